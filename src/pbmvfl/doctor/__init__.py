"""Whether this machine can run a federation: what is installed, what can be written, and known answers."""
