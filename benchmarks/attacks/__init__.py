"""Studies of attacks that need a GPU."""
