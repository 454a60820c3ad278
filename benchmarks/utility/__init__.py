"""Accuracy under privacy: ours beside others' at one epsilon (`python -m benchmarks.utility`), and studies."""
