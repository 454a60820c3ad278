"""A run and what is kept of it: checkpoints, the log of releases, results, and its folder."""
