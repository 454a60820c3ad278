"""Benchmarks of a federation between organisations: TLS link, cell, alignment, large tables, faults."""
