"""How well models do under a budget."""
