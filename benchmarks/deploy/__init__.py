"""A federation of real kits on one machine: what it costs, and what it survives."""
