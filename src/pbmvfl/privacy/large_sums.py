"""Renyi curves of a CELL where a sum has so many bits that not every k and not every value can be looked at.

Lemmas in docs/theory.md, 2.9: groups of neighbouring k, values far out bounded by Chernoff, orders between two computed
ones by convexity, and orders beyond the last computed one by the largest loss there is.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pbmvfl.privacy.orders import ORDERS, Curve
from pbmvfl.privacy.poisson_binomial import UNIT_OF_ROUNDING, end_points
from pbmvfl.privacy.windows import LOG_TAIL, Bits, Vector, log_pmf_window, strides

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
#: What lies beyond the pieces must be smaller than exp(-this) of the moment.
_NEGLIGIBLE_TAIL = 40.0
#: exp() of more than this needs the slower sum in log space.
_LARGEST_EXPONENT = 600.0
#: Orders worked on at once: their terms are large in nearly the same columns.
_ORDERS_AT_ONCE = 8


def _nodes() -> tuple[float, ...]:
    """Of the usual orders those that are computed: the others lie between two whose distance from 1 differs by 1/8."""
    chosen = [ORDERS[0]]
    for order, following in zip(ORDERS[1:], [*ORDERS[2:], math.inf], strict=True):
        if following - 1 > 1.13 * (chosen[-1] - 1):
            chosen.append(order)
    return tuple(chosen)


NODES = _nodes()


def largest_loss(num_trials: int, beta_16: int) -> float:
    """num_trials * ln(hi/lo), rounded up: no value of a sum tells more about a CELL than its own bits do."""
    lo, hi = end_points(beta_16)
    return num_trials * math.log(hi / lo) * (1 + 8 * UNIT_OF_ROUNDING)


class Pair:
    """The two laws of one group, in pieces that are added when an order asks for them."""

    def __init__(self, bits: Bits, low: int, changed: int) -> None:
        self.bits, self.low, self.changed = bits, low, changed
        self.first = bits.reach(low + changed, -1, LOG_TAIL)
        self.log_p, self.loss, self.errors, self.ends = np.zeros(0), np.zeros(0), [0.0], [0]
        self.last = self.first - 1
        self._add(bits.reach(low + changed, 1, LOG_TAIL))
        self.divergence = float(np.dot(np.exp(self.log_p), self.loss))  # of order 1, for a rule of thumb only

    @property
    def log_outside(self) -> float:
        """ln of an upper bound on the mass of the first law outside of the first piece."""
        high = self.low + self.changed
        below, above = self.bits.log_tail(high, self.first - 1), self.bits.log_tail(high, self.first + self.ends[1])
        return float(np.logaddexp(below, above))

    def _add(self, last: int) -> None:
        log_p, error_p = log_pmf_window(self.bits, self.low + self.changed, self.last + 1, last)
        log_q, error_q = log_pmf_window(self.bits, self.low, self.last + 1, last)
        self.log_p = np.concatenate((self.log_p, log_p))
        # The ratio of the two laws rises with the sum (docs/theory.md, 2.1); rounding may not disturb that.
        self.loss = np.maximum.accumulate(np.concatenate((self.loss, log_p - log_q)))
        self.errors.append(max(self.errors[-1], error_p, error_q))
        self.ends.append(len(self.loss))
        self.last = last

    @cached_property
    def _stairs(self) -> list[tuple[int, float]]:
        """(first value, the largest loss from there to the next one's) of a few steps from the first piece to n."""
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
        """ln of an upper bound on sum P (P/Q)^s over the values from this column on."""
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
        """One more piece on the side of large losses; False if there is none, or if there are enough."""
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
        """ln of an upper bound on sum P (P/Q)^s for each s of the rising powers."""
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
        """The sums themselves. Returns the first column that matters: for larger powers none before it does."""
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
    """A pair for each group of k; together they dominate every k."""
    stride, starts = strides(num_bits, num_trials, _GROUPS)
    bits = Bits(num_bits - stride + 1, beta_16)
    return tuple(Pair(bits, low, num_trials) for low in starts)


def grouped_divergences(num_bits: int, num_trials: int, beta_16: int, orders: tuple[float, ...]) -> Curve:
    """An upper bound on the maximum over k of D(F(n, k + b) || F(n, k)), for each order."""
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
    """The orders that are computed for one: itself, or for one of the usual orders the nodes on either side."""
    if order in NODES or order not in ORDERS:
        return (order,)
    after = next(i for i, node in enumerate(NODES) if node > order)
    return NODES[after - 1], NODES[after]
