"""What privacy costs in accuracy, ours beside others' at the same epsilon: `python -m benchmarks.utility`."""
