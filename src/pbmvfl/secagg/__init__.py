"""Secure sums: pairwise masks in Z/2^k that cancel when all parties' messages are added."""
