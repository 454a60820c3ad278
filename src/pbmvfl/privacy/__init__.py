"""What a run costs in privacy. Imports neither torch nor anything that trains."""
