"""How a party's network learns from a gradient."""
