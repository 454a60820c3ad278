"""The law of the sum that the server reads, in log space.

A bit is Bernoulli(hi) or Bernoulli(lo) with hi = 1/2 + beta and lo = 1/2 - beta. F(n, j) is the law of the sum of n
bits of which j are at hi. Replacing one party's embedding from one end to the other turns F(n, k) into F(n, k + b),
where k counts the other parties' bits at hi: every worst case in this folder is a pair of rows of one table.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pbmvfl.errors import PlanError
from pbmvfl.privacy.events import PROBABILITY_ONE

Matrix = NDArray[np.float64]

#: Below this a product of two factors may have lost digits to underflow, so another tilt must supply the entry.
_SMALLEST_TRUSTED = 1e-280
#: Where the tilted mean of the sum is put, as a share of n; more of them are tried until every entry is trusted.
_TILTS = ((0.5,), (0.2, 0.8), (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98), tuple(np.linspace(0.005, 0.995, 41)))


def check_bits(num_trials: int, beta_16: int) -> None:
    if num_trials < 1:
        raise PlanError(f"num_trials={num_trials}; permitted: 1 or more.")
    if not 1 <= beta_16 <= PROBABILITY_ONE // 4:
        raise PlanError(
            f"beta_16={beta_16} (beta={beta_16 / PROBABILITY_ONE:.6f}); permitted: 1 to {PROBABILITY_ONE // 4}, that "
            f"is beta from 1/{PROBABILITY_ONE} to 1/4."
        )


def end_points(beta_16: int) -> tuple[float, float]:
    """(lo, hi), exact in binary."""
    half = PROBABILITY_ONE // 2
    return (half - beta_16) / PROBABILITY_ONE, (half + beta_16) / PROBABILITY_ONE


def log_binomial_pmf(num_bits: int, probability: float) -> NDArray[np.float64]:
    """log of the Binomial(num_bits, probability) pmf at 0..num_bits."""
    steps = np.arange(1, num_bits + 1)
    log_choose = np.concatenate(([0.0], np.cumsum(np.log((num_bits + 1 - steps) / steps))))
    successes = np.arange(num_bits + 1)
    log_pmf: NDArray[np.float64] = (
        log_choose + successes * math.log(probability) + (num_bits - successes) * math.log1p(-probability)
    )
    return log_pmf


def _log_pmf_rows(num_bits: int, beta_16: int, high_bits: NDArray[np.int64]) -> Matrix:
    """log F(num_bits, j) for each j of high_bits, one row each, with relative accuracy in every entry.

    Sums of products of positive numbers keep relative accuracy, but far tails underflow. Tilting by exp(theta * x)
    turns Bernoulli bits into Bernoulli bits, so any part of the range can be moved to the middle and back.
    """
    lo, hi = end_points(beta_16)
    sums = np.arange(num_bits + 1)
    for shares in _TILTS:
        rows = np.full((len(high_bits), num_bits + 1), -np.inf)
        trust = np.zeros_like(rows)
        for share in shares:
            theta = math.log(share / (1 - share))
            mass_hi, mass_lo = 1 - hi + hi * math.exp(theta), 1 - lo + lo * math.exp(theta)
            tilted_hi, tilted_lo = hi * math.exp(theta) / mass_hi, lo * math.exp(theta) / mass_lo
            for row, j in enumerate(high_bits.tolist()):
                at_hi = np.exp(log_binomial_pmf(j, tilted_hi))
                at_lo = np.exp(log_binomial_pmf(num_bits - j, tilted_lo))
                pmf = np.convolve(at_hi, at_lo)
                better = pmf > trust[row]
                untilt = j * math.log(mass_hi) + (num_bits - j) * math.log(mass_lo) - theta * sums
                with np.errstate(divide="ignore"):
                    rows[row, better] = (np.log(pmf) + untilt)[better]
                trust[row, better] = pmf[better]
        if trust.min() > _SMALLEST_TRUSTED:
            return rows
    raise PlanError(f"num_bits={num_bits} is too large for the exact law of the sum; permitted: at most 8192.")


@lru_cache(maxsize=8)
def log_sum_pmfs(num_bits: int, beta_16: int, changed_bits: int, stride: int) -> tuple[Matrix, Matrix]:
    """log F(num_bits, k + changed_bits) and log F(num_bits, k), rows for k = 0, stride, 2*stride, ...

    The last row is always k = num_bits - changed_bits. Read-only, because it is cached.
    """
    others = num_bits - changed_bits
    low = np.unique(np.append(np.arange(0, others + 1, stride), others))
    # F(n, j) read backwards is F(n, n - j): only one half is computed.
    needed = np.union1d(low, low + changed_bits)
    computed = np.unique(np.minimum(needed, num_bits - needed))
    half = _log_pmf_rows(num_bits, beta_16, computed)

    def rows(high_bits: NDArray[np.int64]) -> Matrix:
        mirrored = high_bits > num_bits - high_bits
        table = half[np.searchsorted(computed, np.minimum(high_bits, num_bits - high_bits))]
        table[mirrored] = table[mirrored, ::-1]
        table.setflags(write=False)
        return table

    return rows(low + changed_bits), rows(low)
