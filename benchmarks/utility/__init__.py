"""What accuracy privacy leaves: ours beside others' at one epsilon (`python -m benchmarks.utility`), and studies."""
