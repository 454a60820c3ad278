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

#: Success probabilities are integers in units of 1/65536, and so is beta: the sampler compares what is charged.
PROBABILITY_ONE = 1 << 16
Matrix = NDArray[np.float64]

#: Half of the distance from 1 to the next number: the relative error of one operation.
UNIT_OF_ROUNDING = 2.0**-53

#: beta in units of 1/65536: up to here sums of any length have a curve. Above it a law reaches over more orders of
#: magnitude, and the noise of more bits than the following is left out of the count.
NEAR_BETA_16 = PROBABILITY_ONE // 4
LARGEST_FAR_SUM = 512
#: hi = 127/128: above, a probability in units of 1/65536 would be too coarse.
LARGEST_BETA_16 = PROBABILITY_ONE // 2 - PROBABILITY_ONE // 128

#: Below this a product of two factors may have lost digits to underflow, so another tilt must supply the entry.
_SMALLEST_TRUSTED = 1e-280
#: Places of the tilted mean of the sum, as a share of n; more of them are tried until every entry is trusted.
_TILTS = ((0.5,), (0.2, 0.8), (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98), tuple(np.linspace(0.005, 0.995, 41)))


def fixed_point_beta(beta: float) -> int:
    """Return beta in units of 1/65536, rounded down: rounding up would release more than the account says."""
    return int(beta * PROBABILITY_ONE)


def check_bits(num_trials: int, beta_16: int) -> None:
    if num_trials < 1:
        raise PlanError(f"num_trials={num_trials}; permitted: 1 or more.")
    if not 1 <= beta_16 <= LARGEST_BETA_16:
        raise PlanError(
            f"beta_16={beta_16} (beta={beta_16 / PROBABILITY_ONE:.6f}); permitted: 1 to {LARGEST_BETA_16}, that "
            f"is beta from 1/{PROBABILITY_ONE} to 63/128."
        )
    if beta_16 > NEAR_BETA_16 and num_trials > LARGEST_FAR_SUM:
        raise PlanError(
            f"num_trials={num_trials} with beta={beta_16 / PROBABILITY_ONE:g}; permitted above 1/4: at most "
            f"{LARGEST_FAR_SUM}."
        )


def counted_parties(num_trials: int, beta_16: int, noisy_parties: int) -> int:
    """Return how many parties' noise the account counts: all, but for beta above 1/4 only as many as have 512 bits.

    Leaving out noise can only raise a cost.
    """
    if beta_16 <= NEAR_BETA_16:
        return noisy_parties
    return min(noisy_parties, max(1, LARGEST_FAR_SUM // num_trials))


def end_points(beta_16: int) -> tuple[float, float]:
    """Return (lo, hi), exact in binary."""
    half = PROBABILITY_ONE // 2
    return (half - beta_16) / PROBABILITY_ONE, (half + beta_16) / PROBABILITY_ONE


def _binomial_pmf(num_bits: int, odds: float) -> NDArray[np.float64]:
    """Return the Binomial pmf at 0..num_bits for success odds p / (1 - p), each entry good to (11 * num_bits + 1) u.

    Products of neighbouring ratios, outwards from the mode: a step adds 5 units of rounding to the relative error, and
    the sum that all are divided by has no more than its terms and its additions. Logarithms of factorials would lose
    digits to their own size instead. What lies below 1e-308 of the mode becomes 0.
    """
    mode = min(num_bits, int((num_bits + 1) * (odds / (1 + odds))))
    above, below = np.arange(mode, num_bits), np.arange(mode - 1, -1, -1)
    weights = np.ones(num_bits + 1)
    np.cumprod((num_bits - above) / (above + 1) * odds, out=weights[mode + 1 :])
    weights[:mode] = np.cumprod((below + 1) / ((num_bits - below) * odds))[::-1]
    pmf: NDArray[np.float64] = weights / weights.sum()
    return pmf


def _log_pmf_rows(num_bits: int, beta_16: int, high_bits: NDArray[np.int64]) -> tuple[Matrix, float]:
    """Return log F(num_bits, j) for each j of high_bits, one row each, and a bound on the error of every entry.

    Sums of products of positive numbers keep relative accuracy, but far tails underflow. Tilting by tilt^x turns
    Bernoulli bits into Bernoulli bits, so any part of the range can be moved to the middle and back.
    """
    lo, hi = end_points(beta_16)
    sums = np.arange(num_bits + 1)
    for shares in _TILTS:
        rows = np.full((len(high_bits), num_bits + 1), -np.inf)
        trust = np.zeros_like(rows)
        for share in shares:
            tilt = share / (1 - share)  # any tilt is as good as another, so its own rounding is no error
            mass_hi, mass_lo = lo + hi * tilt, hi + lo * tilt
            for row, j in enumerate(high_bits.tolist()):
                pmf = np.convolve(_binomial_pmf(j, hi / lo * tilt), _binomial_pmf(num_bits - j, lo / hi * tilt))
                better = pmf > trust[row]
                untilt = j * math.log(mass_hi) + (num_bits - j) * math.log(mass_lo) - math.log(tilt) * sums
                with np.errstate(divide="ignore"):
                    rows[row, better] = (np.log(pmf) + untilt)[better]
                trust[row, better] = pmf[better]
        if trust.min() > _SMALLEST_TRUSTED:
            return rows, _log_error(num_bits, max(abs(math.log(share / (1 - share))) for share in shares), lo)
    raise PlanError(f"num_bits={num_bits} is too large for the exact law of the sum; permitted: at most 8192.")


def _log_error(num_bits: int, largest_log_tilt: float, lo: float) -> float:
    """Return an upper bound on the error of a log pmf, counted operation by operation with the worst sign everywhere.

    In units of rounding, for n bits: the two pmfs 11 n + 2, their convolution n/2 + 1, and the logarithm, which is at
    most n ln(1/lo) in size and good to its last place: 2.8 n for beta up to 1/4. Untilting, if the logarithm of the
    tilt is at most L: the logarithms of the two masses n (2 + 2 L), the other products and sums 9 n L + 1.4 n. A user
    of the table counts 3.3 n for losses, three times n ln 3; for beta above 1/4 they are larger, and what is missing
    is added here.
    """
    untilting = 3.4 + 11 * largest_log_tilt if largest_log_tilt else 0.0
    logarithm = 2 * max(1.4, -math.log(lo))
    losses = max(0.0, 3 * math.log((1 - lo) / lo) - 3.3)
    return ((11.5 + logarithm + losses + untilting) * num_bits + 3) * UNIT_OF_ROUNDING


def log_sum_pmfs(num_bits: int, beta_16: int, changed_bits: int, stride: int) -> tuple[Matrix, Matrix]:
    """Return log F(num_bits, k + changed_bits) and log F(num_bits, k), rows for k = 0, stride, 2*stride, ...

    The last row is always k = num_bits - changed_bits. Read-only, because it is cached.
    """
    return log_sum_pmfs_and_error(num_bits, beta_16, changed_bits, stride)[:2]


@lru_cache(maxsize=8)
def log_sum_pmfs_and_error(num_bits: int, beta_16: int, changed_bits: int, stride: int) -> tuple[Matrix, Matrix, float]:
    """Return the two tables of `log_sum_pmfs`, and how far any of their entries can be from the truth."""
    others = num_bits - changed_bits
    low = np.unique(np.append(np.arange(0, others + 1, stride), others))
    # F(n, j) read backwards is F(n, n - j): only one half is computed.
    needed = np.union1d(low, low + changed_bits)
    computed = np.unique(np.minimum(needed, num_bits - needed))
    half, error = _log_pmf_rows(num_bits, beta_16, computed)

    def rows(high_bits: NDArray[np.int64]) -> Matrix:
        mirrored = high_bits > num_bits - high_bits
        table = half[np.searchsorted(computed, np.minimum(high_bits, num_bits - high_bits))]
        table[mirrored] = table[mirrored, ::-1]
        table.setflags(write=False)
        return table

    return rows(low + changed_bits), rows(low), error
