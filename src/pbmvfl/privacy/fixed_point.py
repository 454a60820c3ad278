"""Probabilities as 16-bit integers: what the sampler compares, and what the account charges."""

from __future__ import annotations

#: Success probabilities are integers in units of 1/65536, and so is beta.
PROBABILITY_BITS = 16
PROBABILITY_ONE = 1 << PROBABILITY_BITS


def fixed_point_beta(beta: float) -> int:
    """Return beta in units of 1/65536, rounded down: rounding up would release more than the account says."""
    return int(beta * PROBABILITY_ONE)
