"""Formulas of the PBM-VFL paper as printed, for its baseline and for reproducing its tables.

Its privacy theorems are not here, and no epsilon of this package comes from them: C0 is never given in the paper,
Theorem 6.1 does not hold for the adjacency it names, and Theorem 6.2 grows like 2^M. See docs/explanation/theory.md.
"""

from __future__ import annotations

import math

#: Bits of a floating-point number in the paper's cost columns (F).
FLOAT_BITS = 32


def ldp_variance(*, num_parties: int, num_trials: int, beta: float) -> float:
    """Return the variance 2M / (b * beta^2) of the LDP baseline of Section 7, which takes C0 = 1."""
    return 2 * num_parties / (num_trials * beta**2)


def communication_bits(
    *,
    num_epochs: int,
    num_samples: int,
    batch_size: int,
    num_parties: int,
    embedding_dim: int,
    num_trials: int | None,
) -> float:
    """Return the cost T * B * M * P * (ln(b*M) + F) of Section 5, with F = 32, and 2F for NPQ (num_trials=None).

    T * B is epochs * ceil(N/B) * B, the logarithm is natural and the unit is the bit: that is what the cost columns of
    Tables 1, 4 and 6 contain, whatever they are called there. Real messages are counted elsewhere, in bytes.
    """
    up = FLOAT_BITS if num_trials is None else math.log(num_trials * num_parties)
    rows = num_epochs * math.ceil(num_samples / batch_size) * batch_size
    return rows * num_parties * embedding_dim * (up + FLOAT_BITS)
