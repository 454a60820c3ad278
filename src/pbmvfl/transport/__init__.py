"""How one message of the server reaches every party, and their answers come back."""
