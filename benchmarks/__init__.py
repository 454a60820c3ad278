"""Speed as ratios: two things measured in one run, alternating, on one thread."""
