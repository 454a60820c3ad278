"""Benchmarks of a deployment: what organisations do on machines of their own."""
