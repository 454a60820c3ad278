"""Laws of sums of very many bits, on the part of their range that matters.

A sum of n bits has a standard deviation of at most sqrt(n)/2, so nearly all of its law sits in a small part of 0..n.
Here are the logarithms of a law on such a part, with a bound on their error, and Chernoff bounds for the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pbmvfl.privacy.poisson_binomial import UNIT_OF_ROUNDING, end_points

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

#: A law is cut where the mass beyond is below exp(-this): 2e-22.
LOG_TAIL = -50.0
#: The logarithm of a Chernoff bound is a difference of numbers up to 10^5: it is raised by this.
_TAIL_ROUNDING = 1e-6
#: A cut-off part of a factor may change no entry of a convolution by more than this share.
_LARGEST_CUT = 256 * UNIT_OF_ROUNDING
#: A window that would need factors with longer tails than this is cut in two.
_SMALLEST_LOG_TAIL = -600.0
#: Up to so many standard deviations between a law's mean and the middle of a window no tilt is used.
_UNTILTED = 1.5


@dataclass(frozen=True)
class Bits:
    """n independent bits, each at hi or at lo."""

    num_bits: int
    beta_16: int

    @property
    def deviation(self) -> float:
        """The standard deviation of the sum: every bit has variance lo * hi."""
        lo, hi = end_points(self.beta_16)
        return math.sqrt(self.num_bits * lo * hi)

    def mean(self, high_bits: int) -> float:
        lo, hi = end_points(self.beta_16)
        return self.num_bits * lo + high_bits * (hi - lo)

    def tilt(self, high_bits: int, mean: float) -> float:
        """The factor t for which the law times t^x, again a law of bits, has this mean; 0 < mean < n."""
        lo, hi = end_points(self.beta_16)
        n, j = self.num_bits, high_bits
        # the positive root of lo hi (n - mean) t^2 + linear t - lo hi mean = 0
        square, constant = lo * hi * (n - mean), lo * hi * mean
        linear = j * hi * hi + (n - j) * lo * lo - mean * (lo * lo + hi * hi)
        root = math.sqrt(linear * linear + 4 * square * constant)
        return (root - linear) / (2 * square) if linear < 0 else 2 * constant / (root + linear)

    def log_mass(self, high_bits: int, tilt: float) -> float:
        """ln E[t^S]."""
        lo, hi = end_points(self.beta_16)
        return high_bits * math.log(lo + hi * tilt) + (self.num_bits - high_bits) * math.log(hi + lo * tilt)

    def log_tail(self, high_bits: int, x: float) -> float:
        """Chernoff: an upper bound on ln P(S >= x) for x above the mean and on ln P(S <= x) for x below it."""
        if not 0 <= x <= self.num_bits:
            return -math.inf
        inside = min(max(x, 0.25), self.num_bits - 0.25)
        tilt = self.tilt(high_bits, inside)
        return self.log_mass(high_bits, tilt) - x * math.log(tilt) + _TAIL_ROUNDING

    def reach(self, high_bits: int, side: int, log_tail: float) -> int:
        """How far above (side 1) or below (side -1) its mean the law must be kept; the rest has at most this mass."""
        mean, end = self.mean(high_bits), self.num_bits if side > 0 else 0
        width = math.sqrt(-2 * log_tail) * self.deviation + 2
        while True:
            x = math.ceil(mean + width) if side > 0 else math.floor(mean - width)
            if not 0 < x < self.num_bits:
                return end
            if self.log_tail(high_bits, x + side) <= log_tail:
                return x
            width *= 1.05


def _binomial_window(num_bits: int, odds: float, log_tail: float) -> tuple[int, Vector, float, float]:
    """(first value, pmf from there on, mass left out, error in units of rounding) of a Binomial near its mean.

    As `poisson_binomial._binomial_pmf`, but only as many steps away from the mode as the wanted tail needs. A step adds
    5 units to the error, and so does the sum that all are divided by, beside one unit for each of its additions.
    """
    if num_bits == 0:
        return 0, np.ones(1), 0.0, 0.0
    p = odds / (1 + odds)
    mode = min(num_bits, int((num_bits + 1) * p))
    width = math.sqrt(-2 * log_tail * num_bits * p * (1 - p)) + 4
    while True:
        first, last = max(0, math.floor(mode - width)), min(num_bits, math.ceil(mode + width))
        left_out = _log_binomial_tail(num_bits, p, first - 1), _log_binomial_tail(num_bits, p, last + 1)
        if max(left_out) <= log_tail:
            break
        width *= 1.1
    above, below = np.arange(mode, last), np.arange(mode - 1, first - 1, -1)
    weights = np.ones(last - first + 1)
    np.cumprod((num_bits - above) / (above + 1) * odds, out=weights[mode - first + 1 :])
    weights[: mode - first] = np.cumprod((below + 1) / ((num_bits - below) * odds))[::-1]
    units = 10 * max(last - mode, mode - first) + len(weights) + 1
    return first, weights / weights.sum(), sum(math.exp(tail) for tail in left_out), units


def _log_binomial_tail(num_bits: int, p: float, x: int) -> float:
    """Chernoff: ln P(X >= x) or ln P(X <= x), on the side of the mean where x lies."""
    if not 0 <= x <= num_bits:
        return -math.inf
    share = x / num_bits
    exponent = (x * math.log(share / p) if x else 0.0) + (
        (num_bits - x) * math.log((1 - share) / (1 - p)) if x < num_bits else 0.0
    )
    return -exponent + _TAIL_ROUNDING


def log_pmf_window(bits: Bits, high_bits: int, first: int, last: int) -> tuple[Vector, float]:
    """log F(n, high_bits) at first..last, and a bound on the error of every entry.

    Two binomials, tilted so that the window is where their sum is likely, are cut, multiplied out and tilted back.
    """
    lo, hi = end_points(bits.beta_16)
    n, j, middle = bits.num_bits, high_bits, (first + last) / 2
    tilt = 1.0
    if abs(middle - bits.mean(j)) > _UNTILTED * bits.deviation:
        tilt = bits.tilt(j, min(max(middle, 0.25), n - 0.25))
    log_tail = -42.0 - ((last - first) / 2 / bits.deviation) ** 2 / 2
    while True:
        if log_tail < _SMALLEST_LOG_TAIL:
            # too wide for one tilt
            half = (first + last) // 2
            parts = log_pmf_window(bits, j, first, half), log_pmf_window(bits, j, half + 1, last)
            return np.concatenate([part for part, _ in parts]), max(error for _, error in parts)
        start_1, pmf_1, cut_1, units_1 = _binomial_window(j, hi / lo * tilt, log_tail)
        start_2, pmf_2, cut_2, units_2 = _binomial_window(n - j, lo / hi * tilt, log_tail)
        start = first - start_1 - start_2
        if start >= 0 and start + last - first < len(pmf_1) + len(pmf_2) - 1:
            pmf = _convolve_window(pmf_1, pmf_2, start, last - first + 1)
            smallest = float(pmf.min())
            # an entry misses at most the mass that was cut from either factor
            if cut_1 + cut_2 <= _LARGEST_CUT * smallest:
                break
        log_tail *= 1.3
    log_pmf: Vector = np.log(pmf)
    # Logarithms are good to their last place. A cut changes an entry, and the sum that a factor was divided by.
    units = units_1 + units_2 + min(len(pmf_1), len(pmf_2)) + 4 + 2 * abs(math.log(smallest)) + 2 * 256
    if tilt != 1:
        log_tilt, log_hi, log_lo = math.log(tilt), math.log(lo + hi * tilt), math.log(hi + lo * tilt)
        log_pmf += j * log_hi + (n - j) * log_lo - log_tilt * np.arange(first, last + 1)
        # 2 units for each bit's mass; products, logarithms and sums 5 units of the largest number that occurs
        units += 2 * n + 6 * (j * abs(log_hi) + (n - j) * abs(log_lo) + last * abs(log_tilt) + abs(math.log(smallest)))
    return log_pmf, units * UNIT_OF_ROUNDING


def _convolve_window(first: Vector, second: Vector, start: int, length: int) -> Vector:
    """length entries of the convolution from start on."""
    if length > 1:
        whole: Vector = np.convolve(first, second)
        return whole[start : start + length]
    low, high = max(0, start - len(second) + 1), min(len(first), start + 1)
    return np.array([np.dot(first[low:high], second[start - high + 1 : start - low + 1][::-1])])


def strides(num_bits: int, changed_bits: int, groups: int) -> tuple[int, list[int]]:
    """(s, the smallest k of each group): groups of s neighbouring k, one s for each `groups`-th part of all bits.

    Every k in [j, j + s) has at least j bits at hi and others - j - s + 1 at lo; the pair from which the remaining
    s - 1 bits are left out dominates all of them (docs/theory.md, 2.9). The last group starts s - 1 before the last k.
    """
    others = num_bits - changed_bits
    stride = min(others + 1, math.ceil(num_bits / groups))
    return stride, sorted({*range(0, others - stride + 2, stride), others - stride + 1})
