"""Privacy-loss distributions: a dominating pair for each unit, its composition, and delta as a function of epsilon.

RECORD: all bits from lo to hi is one pair that dominates, and N bits are N randomised responses whatever the sum they
came in, so the composition is a single binomial and nothing is discretised.

CELL: no single pair dominates. The receiver operating curve of a pair is the set of (false alarms, detections) of its
tests; the hockey-stick divergence at epsilon is the largest detections - e^epsilon * false alarms. The envelope over k
at every epsilon, negative ones included, therefore has as its curve the upper concave hull of all the pairs' points,
and the edges of that hull are the atoms of a pair that dominates every k. Atoms are then moved onto a grid
pessimistically (connect the dots: each is split between its neighbours so that its mass under both laws is kept) and
composed by FFT.

Every approximation adds to delta: tails that are cut off, and a bound on the rounding of the FFT.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from pbmvfl.privacy.poisson_binomial import end_points, log_sum_pmfs

Vector = NDArray[np.float64]

#: Sums of more bits than this have so many atoms that the hull takes seconds; they are accounted by RDP alone.
LARGEST_HULL_SUM = 1024
#: More bits than this in one RECORD composition are accounted by RDP alone.
LARGEST_BINOMIAL = 10**9
#: Points of the grid of losses after composition.
_GRID_POINTS = 1 << 17
#: Share of delta given away for each cut tail.
_TAIL_SHARE = 1e-6
#: Atoms are differences of sums that are good to about 1e-13; losses and masses are raised by this before composition.
_ATOM_ROUNDING = 1e-10
#: A running sum of 10^5 positive numbers is good to 1e-11 of itself.
_SUM_ROUNDING = 2e-11
#: Up to so many atoms a direct sum is as fast as looking its parts up.
_FEW_ATOMS = 2048
#: exp() of less than this neither overflows nor underflows.
_LARGEST_EXPONENT = 700.0
#: Higham, Accuracy and Stability of Numerical Algorithms (2nd ed.), Theorem 24.2: an FFT of N points has relative error
#: log2(N) * eta in the 2-norm; eta is 6 to 7 units of rounding, 8 leaves room for the power and for other radices.
_FFT_ETA = 8 * 2.0**-53


@dataclass(frozen=True)
class LossDistribution:
    """Atoms of the privacy loss, rising, under the first law of a dominating pair; `slack` adds to every delta."""

    losses: Vector
    probs: Vector
    slack: float = 0.0

    def delta(self, epsilon: float) -> float:
        """An upper bound on the hockey-stick divergence at epsilon, any sign."""
        first = int(np.searchsorted(self.losses, epsilon, side="right"))
        if first == len(self.losses):
            return self.slack
        few = len(self.losses) - first < _FEW_ATOMS
        if few or not 0 <= epsilon < _LARGEST_EXPONENT or self.losses[-1] > _LARGEST_EXPONENT:
            return self.slack + float(np.dot(-np.expm1(epsilon - self.losses[first:]), self.probs[first:]))
        # The sums above every point are made once; a difference of two of them loses digits, so it is rounded up.
        mass, other = self._tails
        above = float(mass[first])
        return self.slack + max(above - math.exp(epsilon) * float(other[first]), 0.0) + _SUM_ROUNDING * above

    @cached_property
    def _tails(self) -> tuple[Vector, Vector]:
        """Mass above each point under the first law and, above zero, under the second: p and p * exp(-loss)."""
        other = self.probs * np.exp(-np.maximum(self.losses, 0.0))
        return np.cumsum(self.probs[::-1])[::-1], np.cumsum(other[::-1])[::-1]

    def delta_with_gaussian(self, epsilon: float, shift: float) -> float:
        """The same, composed with a Gaussian moved by `shift` standard deviations, without discretising it."""
        if shift == 0:
            return self.delta(epsilon)
        return self.slack + float(np.dot(gaussian_delta(epsilon - self.losses, shift), self.probs))


NOTHING_RELEASED = LossDistribution(np.zeros(1), np.ones(1))


def gaussian_delta(epsilons: Vector, shift: float) -> Vector:
    """Phi(shift/2 - eps/shift) - e^eps * Phi(-shift/2 - eps/shift): Balle and Wang, arXiv 1805.06530v2, Theorem 8."""
    from scipy.special import log_ndtr  # imported late: half of a second that RDP alone does not need

    first: Vector = np.exp(log_ndtr(shift / 2 - epsilons / shift))
    second: Vector = np.exp(np.minimum(epsilons + log_ndtr(-shift / 2 - epsilons / shift), 0.0))
    return np.maximum(first - second, 0.0)


def binomial_losses(num_bits: int, beta_16: int, delta: float) -> LossDistribution:
    """N = num_bits bits, Bernoulli(hi) against Bernoulli(lo): the loss is (2i - N) ln(hi/lo), i ~ Binomial(N, hi)."""
    from scipy.special import gammaln

    lo, hi = end_points(beta_16)
    tail = _TAIL_SHARE * delta
    # Hoeffding: each tail beyond mean +- width has at most this mass, and adds at most its mass to any delta.
    width = math.sqrt(num_bits * math.log(1 / tail) / 2)
    first, last = max(0, math.floor(num_bits * hi - width)), min(num_bits, math.ceil(num_bits * hi + width))
    ones = np.arange(first, last + 1, dtype=np.float64)
    log_probs = gammaln(num_bits + 1) - gammaln(ones + 1) - gammaln(num_bits - ones + 1)
    log_probs += ones * math.log(hi) + (num_bits - ones) * math.log(lo)
    # gammaln is good to a few units of rounding of its value, here at most N ln N.
    rounding = 16 * 2.0**-53 * num_bits * math.log(num_bits + 1)
    probs = np.exp(log_probs + rounding)
    return LossDistribution((2 * ones - num_bits) * math.log(hi / lo), probs, 2 * tail)


def _upper_hull(false_alarms: Vector, detections: Vector) -> tuple[Vector, Vector]:
    """Vertices of the upper concave hull of a set that is its own mirror image in the antidiagonal, from (0, 0) to the
    last one that is not beyond it. The edge that crosses the antidiagonal has slope 1."""
    order = np.lexsort((detections, false_alarms))
    hull_c, hull_a = [0.0], [0.0]
    for c, a in zip(false_alarms[order].tolist(), detections[order].tolist(), strict=True):
        if a <= hull_a[-1] or c == 0:
            continue
        while len(hull_c) > 1 and (a - hull_a[-1]) * (hull_c[-1] - hull_c[-2]) >= (hull_a[-1] - hull_a[-2]) * (
            c - hull_c[-1]
        ):
            hull_c.pop()
            hull_a.pop()
        hull_c.append(c)
        hull_a.append(a)
    vertices_c, vertices_a = np.array(hull_c), np.array(hull_a)
    # A vertex on the antidiagonal must not be lost to rounding: without it the hull would be too low.
    near_side = vertices_c + vertices_a <= 1 + 1e-12
    return vertices_c[near_side], vertices_a[near_side]


@lru_cache(maxsize=64)
def cell_losses(num_trials: int, beta_16: int, noisy_parties: int) -> LossDistribution:
    """The pair that dominates one coordinate's release for a CELL, as atoms: the hull over k of the ROC points."""
    num_bits = num_trials * noisy_parties
    log_p, log_q = log_sum_pmfs(num_bits, beta_16, num_trials, 1)
    # Tests "sum > x" are the best ones (the ratio rises in x); summing from the top keeps relative accuracy.
    detections = np.cumsum(np.exp(log_p[:, ::-1]), axis=1)
    false_alarms = np.cumsum(np.exp(log_q[:, ::-1]), axis=1)
    # The hull of a few k first: whatever lies below it can be no vertex, and that is nearly everything.
    few = np.linspace(0, len(log_p) - 1, 17).astype(np.int64)
    few = np.union1d(few, len(log_p) - 1 - few)
    hull_c, hull_a = _upper_hull(false_alarms[few].ravel(), detections[few].ravel())
    keep = (false_alarms <= hull_c[-1]) & (detections >= np.interp(false_alarms, hull_c, hull_a) * (1 - 1e-12))
    keep |= (false_alarms > hull_c[-1]) & (detections - false_alarms >= (hull_a[-1] - hull_c[-1]) * (1 - 1e-12))
    keep[few] = True
    hull_c, hull_a = _upper_hull(false_alarms[keep], detections[keep])
    under_p, under_q = np.diff(hull_a), np.diff(hull_c)
    # The hull is its own mirror image in the antidiagonal (k becomes b(M-t-1) - k), so losses below 0 are those above
    # 0 with the two laws exchanged; computing them from 1 - tail instead would lose their digits.
    losses = np.log(under_p / under_q)
    middle = max(0.0, 1.0 - float(hull_a[-1]) - float(hull_c[-1]))
    atoms = np.concatenate((-losses, [0.0], losses[::-1]))
    probs = np.concatenate((under_q, [middle], under_p[::-1]))
    atoms.setflags(write=False)
    probs.setflags(write=False)
    return LossDistribution(atoms, probs)


def connect_the_dots(atoms: LossDistribution, step: float) -> tuple[int, Vector]:
    """(index of the first point, probabilities) on the grid of multiples of step.

    Doroshenko and others, arXiv 2207.04380v1, Algorithm 1: of all laws on the grid whose profile is nowhere below, the
    lowest. For an atom that means splitting it so that its mass under both laws is kept.
    """
    below = np.floor(atoms.losses / step).astype(np.int64)
    share = np.clip(-np.expm1(below * step - atoms.losses) / -math.expm1(-step), 0.0, 1.0)
    first = int(below.min())
    probs = np.bincount(below - first, weights=atoms.probs * (1 - share), minlength=int(below.max()) - first + 2)
    probs = probs + np.bincount(below - first + 1, weights=atoms.probs * share, minlength=len(probs))
    return first, probs.astype(np.float64)


def _log_moment(atoms: LossDistribution, s: float) -> float:
    exponents = s * atoms.losses
    peak = float(exponents.max())
    return peak + math.log(float(np.dot(np.exp(exponents - peak), atoms.probs)))


def _tail_bounds(atoms: LossDistribution, count: int, tail: float) -> tuple[float, float]:
    """Chernoff: the sum of count losses leaves this interval on either side with at most this probability."""
    low, high = count * float(atoms.losses.min()), count * float(atoms.losses.max())
    spread = math.sqrt(count * max(float(np.dot(atoms.losses**2, atoms.probs)), 1e-300))
    for s in np.geomspace(0.5, 50, 40) / spread:
        high = min(high, (count * _log_moment(atoms, s) + math.log(1 / tail)) / s)
        low = max(low, -(count * _log_moment(atoms, -s) + math.log(1 / tail)) / s)
    return low, high


def compose(atoms: LossDistribution, count: int, delta: float) -> LossDistribution:
    """count releases of the same pair, by FFT, on a grid fine enough for its size."""
    tail = _TAIL_SHARE * delta
    low, high = _tail_bounds(atoms, count, tail)
    widest = max(high - low, float(np.ptp(atoms.losses)))
    step = widest / (0.98 * _GRID_POINTS)
    raised = LossDistribution(atoms.losses + _ATOM_ROUNDING, atoms.probs * (1 + _ATOM_ROUNDING))
    first, probs = connect_the_dots(raised, step)
    # The grid's own law is a little wider than the atoms': its tails are bounded anew.
    support = np.nonzero(probs)[0]
    low, high = _tail_bounds(
        LossDistribution(np.asarray((support + first) * step, np.float64), probs[support]), count, tail
    )
    start, length = math.floor(low / step), math.ceil(high / step) - math.floor(low / step) + 1
    points = 1 << math.ceil(math.log2(max(length, len(probs))))
    transform = np.fft.rfft(probs, points)
    composed = np.fft.irfft(np.abs(transform) ** count * np.exp(1j * count * np.angle(transform)), points)
    # Positions are known modulo `points`; what wraps around lies in a tail, and it is added where it lands.
    indices = start + np.arange(points)
    composed = np.maximum(composed[(indices - count * first) % points], 0.0)
    rounding = 4 * count * math.log2(points) * _FFT_ETA * math.sqrt(points) * float(np.linalg.norm(probs))
    return LossDistribution(np.asarray(indices * step, np.float64), composed, 2 * tail + rounding)


def smallest_epsilon(delta_at: Callable[[float], float], delta: float, largest: float) -> float:
    """The smallest epsilon in [0, largest] whose delta is small enough, rounded up; infinity if there is none."""
    if not delta_at(largest) <= delta:
        return math.inf
    low, high = 0.0, largest
    if delta_at(low) <= delta:
        return low
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        if delta_at(middle) <= delta:
            high = middle
        else:
            low = middle
    return high
