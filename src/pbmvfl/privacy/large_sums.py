"""Renyi curves of a CELL where a sum has so many bits that not every k and not every value can be looked at.

Lemmas in theory.md, 2.9: groups of neighbouring k, values far out bounded by Chernoff, orders between two computed
ones by convexity, and orders beyond the last computed one by the largest loss there is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pbmvfl.privacy.orders import ORDERS, Curve
from pbmvfl.privacy.poisson_binomial import UNIT_OF_ROUNDING, end_points

# --- Laws of sums of very many bits, on the part of their range that matters ---
# A sum of n bits has a standard deviation of at most sqrt(n)/2, so nearly all of its law sits in a small part of 0..n.
# Here are the logarithms of a law on such a part, with a bound on their error, and Chernoff bounds for the rest.


Vector = NDArray[np.float64]

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
    """Sum of n independent bits, each at hi or at lo."""

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
        """Return the factor t for which the law times t^x, again a law of bits, has this mean; 0 < mean < n."""
        lo, hi = end_points(self.beta_16)
        n, j = self.num_bits, high_bits
        # the positive root of lo hi (n - mean) t^2 + linear t - lo hi mean = 0
        square, constant = lo * hi * (n - mean), lo * hi * mean
        linear = j * hi * hi + (n - j) * lo * lo - mean * (lo * lo + hi * hi)
        root = math.sqrt(linear * linear + 4 * square * constant)
        return (root - linear) / (2 * square) if linear < 0 else 2 * constant / (root + linear)

    def log_mass(self, high_bits: int, tilt: float) -> float:
        """Return ln E[t^S]."""
        lo, hi = end_points(self.beta_16)
        return high_bits * math.log(lo + hi * tilt) + (self.num_bits - high_bits) * math.log(hi + lo * tilt)

    def log_tail(self, high_bits: int, x: float) -> float:
        """Return Chernoff's upper bound on ln P(S >= x) for x above the mean, and on ln P(S <= x) for x below it."""
        if not 0 <= x <= self.num_bits:
            return -math.inf
        inside = min(max(x, 0.25), self.num_bits - 0.25)
        tilt = self.tilt(high_bits, inside)
        return self.log_mass(high_bits, tilt) - x * math.log(tilt) + _TAIL_ROUNDING

    def reach(self, high_bits: int, side: int, log_tail: float) -> int:
        """Return how far above (side 1) or below (side -1) its mean the law must be kept; the rest has at most this
        mass."""
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
    """Return first value, pmf from there on, mass left out, and error in units of rounding of a Binomial near its mean.

    It works like `poisson_binomial._binomial_pmf`, but takes only as many steps away from the mode as the wanted tail
    needs. A step adds 5 units to the error, and so does the sum that all are divided by, beside one unit for each of
    its
    additions.
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
    """Return Chernoff's bound on ln P(X >= x) or ln P(X <= x), on the side of the mean where x lies."""
    if not 0 <= x <= num_bits:
        return -math.inf
    share = x / num_bits
    exponent = (x * math.log(share / p) if x else 0.0) + (
        (num_bits - x) * math.log((1 - share) / (1 - p)) if x < num_bits else 0.0
    )
    return -exponent + _TAIL_ROUNDING


def log_pmf_window(bits: Bits, high_bits: int, first: int, last: int) -> tuple[Vector, float]:
    """Return log F(n, high_bits) at first..last, and a bound on the error of every entry.

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
    """Return `length` entries of the convolution from `start` on."""
    if length > 1:
        whole: Vector = np.convolve(first, second)
        return whole[start : start + length]
    low, high = max(0, start - len(second) + 1), min(len(first), start + 1)
    return np.array([np.dot(first[low:high], second[start - high + 1 : start - low + 1][::-1])])


def strides(num_bits: int, changed_bits: int, groups: int) -> tuple[int, list[int]]:
    """Return s and the smallest k of each group.

    Groups of s neighbouring k, one s for each `groups`-th part of all bits.

    Every k in [j, j + s) has at least j bits at hi and others - j - s + 1 at lo; the pair from which the remaining
    s - 1 bits are left out dominates all of them (theory.md, 2.9). The last group starts s - 1 before the last k.
    """
    others = num_bits - changed_bits
    stride = min(others + 1, math.ceil(num_bits / groups))
    return stride, sorted({*range(0, others - stride + 2, stride), others - stride + 1})


# --- large sums ---


#: Beyond this many bits, more than any plan has, the noise of the rest is left out of the count.
LARGEST_SUM = 65536
#: Groups of k: one in 112 bits of noise is not counted, which raises a curve by about a hundredth.
_GROUPS = 112
#: Pieces of the range that are looked at beyond the first.
_MORE_PIECES = 2
#: Standard deviations in one of them.
_PIECE_WIDTH = 18.0
#: Beyond the first piece the loss is also known at single values, each so many times as far from the mean as the last.
_STAIR = 1.2
#: Terms smaller than exp(-this) of the largest are left out: 65,536 of them are 1e-21 of it.
_NEGLIGIBLE = 60.0
#: The mass beyond the pieces must be smaller than exp(-this) of the moment.
_NEGLIGIBLE_TAIL = 40.0
#: exp() of more than this needs the slower sum in log space.
_LARGEST_EXPONENT = 600.0
#: Orders worked on at once: their terms are large in nearly the same columns.
_ORDERS_AT_ONCE = 8


def _nodes() -> tuple[float, ...]:
    """Return those of the usual orders that are computed.

    The others lie between two whose distance from 1 differs by 1/8.
    """
    chosen = [ORDERS[0]]
    for order, following in zip(ORDERS[1:], [*ORDERS[2:], math.inf], strict=True):
        if following - 1 > 1.13 * (chosen[-1] - 1):
            chosen.append(order)
    return tuple(chosen)


NODES = _nodes()


def largest_loss(num_trials: int, beta_16: int) -> float:
    """Return num_trials * ln(hi/lo), rounded up: no value of a sum tells more about a CELL than its own bits do."""
    lo, hi = end_points(beta_16)
    return num_trials * math.log(hi / lo) * (1 + 8 * UNIT_OF_ROUNDING)


class Pair:
    """Laws of one group, two of them, in pieces that are added when an order needs them."""

    def __init__(self, bits: Bits, low: int, changed: int) -> None:
        self.bits, self.low, self.changed = bits, low, changed
        self.first = bits.reach(low + changed, -1, LOG_TAIL)
        self.log_p, self.loss, self.errors, self.ends = np.zeros(0), np.zeros(0), [0.0], [0]
        self.last = self.first - 1
        self._add(bits.reach(low + changed, 1, LOG_TAIL))
        self.divergence = float(np.dot(np.exp(self.log_p), self.loss))  # of order 1, for a rule of thumb only

    @property
    def log_outside(self) -> float:
        """Return ln of an upper bound on the mass of the first law outside of the first piece."""
        high = self.low + self.changed
        below, above = self.bits.log_tail(high, self.first - 1), self.bits.log_tail(high, self.first + self.ends[1])
        return float(np.logaddexp(below, above))

    def _add(self, last: int) -> None:
        log_p, error_p = log_pmf_window(self.bits, self.low + self.changed, self.last + 1, last)
        log_q, error_q = log_pmf_window(self.bits, self.low, self.last + 1, last)
        self.log_p = np.concatenate((self.log_p, log_p))
        # The ratio of the two laws rises with the sum (docs/explanation/theory.md, 2.1); rounding may not disturb that.
        self.loss = np.maximum.accumulate(np.concatenate((self.loss, log_p - log_q)))
        self.errors.append(max(self.errors[-1], error_p, error_q))
        self.ends.append(len(self.loss))
        self.last = last

    @cached_property
    def _stairs(self) -> list[tuple[int, float]]:
        """Return (first value, largest loss from there to the next one's) of a few steps from the first piece to n."""
        n, high = self.bits.num_bits, self.low + self.changed
        mean, x = self.bits.mean(high), self.first + self.ends[1]
        stairs = []
        while x <= n:
            top = min(n, math.ceil(mean + (x - mean) * _STAIR))
            log_p, error_p = log_pmf_window(self.bits, high, top, top)
            log_q, error_q = log_pmf_window(self.bits, self.low, top, top)
            stairs.append((x, float(log_p[0] - log_q[0]) + error_p + error_q))
            x = top + 1
        return stairs

    def _log_beyond(self, column: int, powers: Vector, largest: float) -> Vector:
        """Return ln of an upper bound on sum P (P/Q)^s over the values from this column on."""
        high, x = self.low + self.changed, self.first + column
        simple: Vector = self.bits.log_tail(high, x) + powers * largest
        if np.all(simple <= powers * self.divergence - _NEGLIGIBLE_TAIL):
            return simple
        total = np.full(len(powers), -np.inf)
        for (start, loss), (following, _) in pairwise([*self._stairs, (self.bits.num_bits + 1, largest)]):
            if following > x:
                log_tail = self.bits.log_tail(high, max(start, x))
                total = np.logaddexp(total, log_tail + powers * min(loss, largest))
        return total

    def widen(self) -> bool:
        """Add one more piece on the side of large losses; return False if there is none, or if there are enough."""
        n = self.bits.num_bits
        if self.last == n or len(self.ends) > 1 + _MORE_PIECES:
            return False
        lo, hi = end_points(self.bits.beta_16)
        deviation = float(n)
        for j in (self.low, self.low + self.changed):
            odds = self.bits.tilt(j, min(self.last + 1.0, n - 0.25)) * np.array([hi / lo, lo / hi])
            deviation = min(deviation, math.sqrt(float(np.dot([j, n - j], odds / (1 + odds) ** 2))))
        self._add(min(n, self.last + 1 + math.ceil(_PIECE_WIDTH * deviation)))
        return True

    def log_moments(self, powers: Vector, largest: float) -> Vector:
        """Return ln of an upper bound on sum P (P/Q)^s for each s of the rising powers."""
        log_moments = np.zeros(len(powers))
        start = done = 0
        pieces = 1
        while done < len(powers):
            block = powers[done : done + _ORDERS_AT_ONCE]
            enough = 0
            while not enough:
                beyond = self._log_beyond(self.ends[pieces], block, largest)
                enough = int(np.argmin([*(beyond <= block * self.divergence - _NEGLIGIBLE_TAIL), False]))
                if enough:
                    break
                if pieces + 1 == len(self.ends) and not self.widen():
                    # The slope of the logarithm of the moment is a mean of losses: at most the largest one.
                    known, at = (log_moments[done - 1], powers[done - 1]) if done else (0.0, 0.0)
                    log_moments[done:] = known + (powers[done:] - at) * largest
                    return log_moments
                pieces += 1
            until = done + enough
            start = self._fill(log_moments[done:until], powers[done:until], beyond[:enough], pieces, start)
            done = until
        return log_moments

    def _fill(self, out: Vector, powers: Vector, beyond: Vector, pieces: int, start: int) -> int:
        """Return the sums themselves. Returns the first column that matters: for larger powers none before it does."""
        end = self.ends[pieces]
        log_p, loss = self.log_p[start:end], self.loss[start:end]
        exponents = np.multiply.outer(powers, loss)
        tilted = exponents + log_p
        peaks = tilted.max(axis=1, keepdims=True)
        weighty = (tilted > peaks - _NEGLIGIBLE).any(axis=0)
        before = self.bits.log_tail(self.low + self.changed, self.first - 1) + powers * max(float(self.loss[0]), 0.0)
        small = powers * float(loss[-1]) < _LARGEST_EXPONENT
        columns = end - start
        error = self.errors[pieces] + (4 * columns + 8) * UNIT_OF_ROUNDING
        used: NDArray[np.int64] = np.nonzero(weighty)[0]
        if small.all() and start == 0:
            here = slice(min(int(used[0]), int(np.argmax(log_p > -_NEGLIGIBLE))), int(used[-1]) + 1)
            excess = np.expm1(exponents[:, here]) @ np.exp(log_p[here]) + np.exp(beyond) + np.exp(before)
            moments = np.log1p(np.maximum(excess, 0.0))
            out[:] = moments + powers * (4 + moments / powers) * error
            return 0
        here = slice(int(used[0]), int(used[-1]) + 1)
        total = np.exp(tilted[:, here] - peaks).sum(axis=1)
        total += np.exp(beyond - peaks[:, 0]) + np.exp(before - peaks[:, 0])
        moments = peaks[:, 0] + np.log(total)
        out[:] = moments + powers * (4 + 2 / powers + moments / powers) * error
        return start + int(used[0])


@lru_cache(maxsize=1)
def pairs(num_bits: int, num_trials: int, beta_16: int) -> tuple[Pair, ...]:
    """Return a pair for each group of k; together they dominate every k."""
    stride, starts = strides(num_bits, num_trials, _GROUPS)
    bits = Bits(num_bits - stride + 1, beta_16)
    return tuple(Pair(bits, low, num_trials) for low in starts)


def grouped_divergences(num_bits: int, num_trials: int, beta_16: int, orders: tuple[float, ...]) -> Curve:
    """Return an upper bound on the maximum over k of D(F(n, k + b) || F(n, k)), for each order."""
    computed = tuple(sorted({node for order in orders for node in _around(order)}))
    powers = np.array(computed) - 1
    largest = largest_loss(num_trials, beta_16)
    worst = np.zeros(len(powers))
    for pair in pairs(num_bits, num_trials, beta_16):
        np.maximum(worst, pair.log_moments(powers, largest), out=worst)
    # The logarithm of the moment is convex in the order: between two nodes the chord lies above it.
    wanted = np.array(orders) - 1
    curve: Curve = np.minimum(np.interp(wanted, powers, worst) / wanted, largest)
    return curve


def _around(order: float) -> tuple[float, ...]:
    """Return the orders that are computed for one: itself, or for one of the usual orders the nodes on either side."""
    if order in NODES or order not in ORDERS:
        return (order,)
    after = next(i for i, node in enumerate(NODES) if node > order)
    return NODES[after - 1], NODES[after]
