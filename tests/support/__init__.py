"""What several test files share. `tests/` is on the path: `from support.statistical import ...`."""
