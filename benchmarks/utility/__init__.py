"""What accuracy privacy leaves: ours beside others at the same epsilon (`python -m benchmarks.utility`), and studies."""
