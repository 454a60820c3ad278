"""Speed of a federation between organisations: python -m benchmarks.deploy.NAME for each."""
