"""Privacy-loss distributions: a dominating pair for each unit, its composition, and delta as a function of epsilon.

RECORD: all bits from lo to hi is one pair that dominates, and N bits are N randomised responses whatever the sum they
came in, so the composition is a single binomial and nothing is discretised.

CELL: no single pair dominates. The receiver operating curve of a pair is the set of (false alarms, detections) of its
tests; the hockey-stick divergence at epsilon is the largest detections - e^epsilon * false alarms. The envelope over k
at every epsilon, negative ones included, therefore has as its curve the upper concave hull of all the pairs' points,
and the edges of that hull are the atoms of a pair that dominates every k. Atoms are then moved onto a grid
pessimistically (connect the dots: each is split between its neighbours so that its mass under both laws is kept) and
composed by FFT.

For sums of many bits the hull is taken over groups of k, each on the part of the range that matters.

Every approximation adds to delta: tails that are cut off, and a bound on the rounding of the FFT. Where many releases
are composed and delta is small, that bound would be larger than delta. Then the law is also composed after tilting it
towards large losses, so that rounding is small compared with the tail, and the smaller of the two bounds counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pbmvfl.privacy.large_sums import LARGEST_SUM, largest_loss, pairs
from pbmvfl.privacy.poisson_binomial import counted_parties, end_points, log_sum_pmfs

Vector = NDArray[np.float64]

#: Up to here the hull is taken over every k.
LARGEST_HULL_SUM = 1024
#: More bits than this in one RECORD composition are accounted by RDP alone.
LARGEST_BINOMIAL = 10**9
#: Points of the grid of losses after composition.
_GRID_POINTS = 1 << 17
#: Share of delta given away for each cut tail.
_TAIL_SHARE = 1e-6
#: Atoms are differences of sums that are good to about 1e-13; losses and masses are raised by this before composition.
ATOM_ROUNDING = 1e-10
#: A running sum of 10^5 positive numbers is good to 1e-11 of itself.
_SUM_ROUNDING = 2e-11
#: Points of the coarser law on which an epsilon is looked for where every look at the finer one takes long.
_FEW_POINTS = 2048
#: An epsilon is found to within this share of itself.
_EPSILON_SHARE = 1e-5
#: Up to so many atoms a direct sum is as fast as looking its parts up.
_FEW_ATOMS = 2048
#: exp() of less than this neither overflows nor underflows.
_LARGEST_EXPONENT = 700.0
#: Up to this loss of a release, false alarms that matter are numbers: exp(-600 - 140) is one.
_LARGEST_NUMBERS = 600.0
#: A hull is computed in numbers, not in logarithms, up to this spread of logarithms.
_LARGEST_SPREAD = 1300.0
#: Rounding of up to this share of delta is simply added to it.
_LARGEST_ROUNDING_SHARE = 1e-4
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
        """Return an upper bound on the hockey-stick divergence at epsilon, any sign."""
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
        """Return delta of the losses composed with a Gaussian moved by `shift` deviations, without discretising it."""
        if shift == 0:
            return self.delta(epsilon)
        return self.slack + float(np.dot(gaussian_delta(epsilon - self.losses, shift), self.probs))

    def coarser(self, points: int) -> LossDistribution:
        """Return the losses on a grid of about so many points, or unchanged if there are no more."""
        if len(self.losses) <= points:
            return self
        step = float(np.ptp(self.losses)) / points
        first, probs = connect_the_dots(self, step)
        return LossDistribution(step * np.arange(first, first + len(probs), dtype=np.float64), probs, self.slack)

    @cached_property
    def sketch(self) -> LossDistribution:
        """Losses on few points: a bound too, and nearly as good beside a Gaussian."""
        return self.coarser(_FEW_POINTS)


#: Pairs as atoms, and how many releases there are of each.
Parts = Sequence[tuple[LossDistribution, int]]

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


def _upper_hull(false_alarms: Vector, detections: Vector, scale: float) -> tuple[Vector, Vector]:
    """Vertices of the upper concave hull from (0, 0) to where its slope falls to 1. False alarms are in units of
    `scale`, so that very small ones are numbers too."""
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
    steep = 1 + int(np.sum(np.diff(vertices_a) > np.diff(vertices_c) * scale))
    return vertices_c[:steep], vertices_a[:steep]


Edges = tuple[Vector, Vector, Vector]


def _steep_edges(log_p: Sequence[Vector], log_q: Sequence[Vector], log_scale: float = 0.0) -> Edges:
    """Return the hull of these pairs where losses are above 0.

    Losses, masses under the first law, and under the second.

    Losses fall. log_scale is added to the logarithms of the second law.
    """
    # Tests "sum > x" are the best ones (the ratio rises in x); summing from the top keeps relative accuracy.
    detections = [np.cumsum(np.exp(row[::-1])) for row in log_p]
    false_alarms = [np.cumsum(np.exp(row[::-1] + log_scale)) for row in log_q]
    scale = math.exp(-log_scale)
    # The hull of a few k first: whatever lies below it can be no vertex, and that is nearly everything.
    few = np.linspace(0, len(log_p) - 1, 17).astype(np.int64)
    some = np.union1d(few, len(log_p) - 1 - few).tolist()
    hull_c, hull_a = _upper_hull(
        np.concatenate([false_alarms[k] for k in some]), np.concatenate([detections[k] for k in some]), scale
    )
    c, a = np.concatenate(false_alarms), np.concatenate(detections)
    keep = (c <= hull_c[-1]) & (a >= np.interp(c, hull_c, hull_a) * (1 - 1e-12))
    keep |= (c > hull_c[-1]) & (a - c * scale >= (hull_a[-1] - hull_c[-1] * scale) * (1 - 1e-12))
    hull_c, hull_a = _upper_hull(c[keep], a[keep], scale)
    under_p, under_q = np.diff(hull_a), np.diff(hull_c)
    return np.log(under_p / under_q) + log_scale, under_p, under_q * scale


def _joined(above: Edges, below: Edges) -> tuple[Vector, Vector]:
    """Atoms of a pair from its losses above 0 and from those above 0 of the reversed pair.

    Computing the latter from 1 - tail would lose their digits. What is left has loss 0.
    """
    used, loss = len(above[0]), 0.0
    mass, other = np.concatenate(([0.0], np.cumsum(above[1]))), float(below[2].sum())
    # An edge of slope 1, steeper by rounding alone, is in both and counts once, with the larger of its losses.
    while used and mass[used] + other > 1 + 1e-12:
        used -= 1
        loss = float(above[0][used])
    middle = max(0.0, 1.0 - float(mass[used]) - other)
    losses, probs = above[0][:used][::-1], above[1][:used][::-1]
    return np.concatenate((-below[0], [loss], losses)), np.concatenate((below[2], [middle], probs))


@lru_cache(maxsize=64)
def cell_losses(num_trials: int, beta_16: int, noisy_parties: int) -> LossDistribution:
    """Return the pair that dominates one coordinate's release for a CELL, as atoms: the hull over k of the ROC points.

    Where the laws are so far apart that false alarms cannot be written as numbers, all that is said is the largest
    loss; a Renyi bound is good there.
    """
    num_bits = num_trials * counted_parties(num_trials, beta_16, noisy_parties)
    if num_bits <= LARGEST_HULL_SUM and largest_loss(num_trials, beta_16) < _LARGEST_NUMBERS:
        log_p, log_q = log_sum_pmfs(num_bits, beta_16, num_trials, 1)
        edges = _steep_edges(list(log_p), list(log_q))
        # k and b(M-t-1) - k are each other's reverse: the whole set is its own.
        # A false alarm that is too small to be a number belongs to a detection below exp(-140).
        (atoms, probs), slack = _joined(edges, edges), 1e-60
    else:
        atoms, probs, slack = _large_envelope(min(num_bits, max(LARGEST_SUM, num_trials)), num_trials, beta_16)
    atoms.setflags(write=False)
    probs.setflags(write=False)
    return LossDistribution(atoms, probs, slack)


def group_losses(num_trials: int, beta_16: int, noisy_parties: int, groups: int) -> list[LossDistribution]:
    """Return what `cell_losses` does for a few groups of neighbouring k, each with a pair of its own.

    The two ends are groups alone.
    """
    num_bits = num_trials * noisy_parties
    log_p, log_q = log_sum_pmfs(num_bits, beta_16, num_trials, 1)
    last = len(log_p) - 1
    cuts = sorted({0, 1, *np.linspace(1, last, groups - 1).astype(int).tolist(), last, last + 1})
    spans = [(low, high) for low, high in pairwise(cuts) if low < high]
    edges = {span: _steep_edges(list(log_p[slice(*span)]), list(log_q[slice(*span)])) for span in spans}
    losses = []
    for low, high in spans:
        # the reverse of k is last - k: of this group, that of its mirror image, if the cuts have one
        mirror = last + 1 - high, last + 1 - low
        rows = slice(*mirror)
        reverse = edges.get(mirror) or _steep_edges(list(log_p[rows]), list(log_q[rows]))
        losses.append(LossDistribution(*_joined(edges[low, high], reverse)))
    return losses


def _large_envelope(num_bits: int, num_trials: int, beta_16: int) -> tuple[Vector, Vector, float]:
    """Atoms and slack from groups of k and the first piece of each: docs/explanation/theory.md, 2.9."""
    table = pairs(num_bits, num_trials, beta_16)
    columns = [slice(0, pair.ends[1]) for pair in table]
    log_p = [pair.log_p[here] for pair, here in zip(table, columns, strict=True)]
    log_q = [row - pair.loss[here] for row, pair, here in zip(log_p, table, columns, strict=True)]
    smallest, largest = min(float(row.min()) for row in log_q), max(float(row.max()) for row in log_q)
    if largest - smallest > _LARGEST_SPREAD:
        return np.array([largest_loss(num_trials, beta_16)]), np.ones(1), 0.0
    # The middle of the logarithms is moved to 0 where they would leave the range of numbers.
    log_scale = -(largest + smallest) / 2 if smallest < -_LARGEST_SPREAD / 2 else 0.0
    edges = _steep_edges(log_p, log_q, log_scale)
    atoms, probs = _joined(edges, edges)
    # Sums of entries whose logarithms are wrong by h are wrong by a share h, beside their own rounding.
    error = max(pair.errors[1] for pair in table) + 2 * max(map(len, log_p)) * 2.0**-53
    slack = max(math.exp(pair.log_outside) for pair in table)
    return atoms + 2 * error, probs * (1 + 2 * error), slack


def connect_the_dots(atoms: LossDistribution, step: float) -> tuple[int, Vector]:
    """Return the index of the first point and the probabilities on the grid of multiples of step.

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


def _log_moments(parts: Parts, s: float) -> float:
    return sum(count * _log_moment(atoms, s) for atoms, count in parts)


def _tail_bounds(parts: Parts, tail: float) -> tuple[float, float]:
    """Return an interval that the sum of all losses leaves on either side with at most this probability (Chernoff)."""
    low = sum(count * float(atoms.losses.min()) for atoms, count in parts)
    high = sum(count * float(atoms.losses.max()) for atoms, count in parts)
    for s in _powers(parts):
        high = min(high, (_log_moments(parts, s) + math.log(1 / tail)) / s)
        low = max(low, -(_log_moments(parts, -s) + math.log(1 / tail)) / s)
    return low, high


def _powers(parts: Parts) -> Vector:
    """Powers at which Chernoff bounds are tried, in proportion to the inverse of the spread of the sum."""
    spread = math.sqrt(max(sum(count * float(np.dot(a.losses**2, a.probs)) for a, count in parts), 1e-300))
    return np.geomspace(0.5, 50, 40) / spread


def _raised(atoms: LossDistribution) -> LossDistribution:
    """Return losses and masses that are at least the true ones, whatever the rounding of the atoms."""
    return LossDistribution(atoms.losses + ATOM_ROUNDING, atoms.probs * (1 + ATOM_ROUNDING), atoms.slack)


def compose(atoms: LossDistribution, count: int, delta: float) -> LossDistribution:
    """Compose count releases of the same pair."""
    return compose_parts([(atoms, count)], delta)


def compose_parts(parts: Parts, delta: float) -> LossDistribution:
    """Compose count releases of each pair, by FFT, on one grid that is fine enough for the size of the sum.

    Any order of the releases: dominating pairs compose adaptively, whichever release uses which (theory.md, 1).
    """
    parts = [(atoms, count) for atoms, count in parts if count > 0]
    if not parts:
        return NOTHING_RELEASED
    if sum(count for _, count in parts) == 1:  # one release needs no grid
        (alone,) = (_raised(atoms) for atoms, _ in parts)
        return alone
    tail = _TAIL_SHARE * delta
    slack = 2 * tail + sum(count * atoms.slack for atoms, count in parts)
    low, high = _tail_bounds(parts, tail)
    widest = max(high - low, *(float(np.ptp(atoms.losses)) for atoms, _ in parts))
    # Losses that hardly differ need no finer grid than this, and indices stay far below the largest integer.
    coarsest = max(float(np.abs(atoms.losses).max()) for atoms, _ in parts)
    step = max(widest, 1e-6 * coarsest, ATOM_ROUNDING) / (0.98 * _GRID_POINTS)
    grids: list[tuple[int, Vector, int]] = []
    for atoms, count in parts:
        grids.append((*connect_the_dots(_raised(atoms), step), count))
    # The grid's own laws are a little wider than the atoms': their tails are bounded anew.
    laws: list[tuple[LossDistribution, int]] = []
    for first, probs, count in grids:
        support = np.nonzero(probs)[0]
        laws.append((LossDistribution(np.asarray((support + first) * step, np.float64), probs[support]), count))
    low, high = _tail_bounds(laws, tail)
    start, length = math.floor(low / step), math.ceil(high / step) - math.floor(low / step) + 1
    points = 1 << math.ceil(math.log2(max(length, *(len(probs) for _, probs, _ in grids))))
    # Positions are known modulo `points`; what wraps around lies in a tail, and it is added where it lands.
    indices = start + np.arange(points)
    where = (indices - sum(count * first for first, _, count in grids)) % points
    losses = np.asarray(indices * step, np.float64)
    composed, entry, total = _product([(probs, count) for _, probs, count in grids], points)
    if total <= _LARGEST_ROUNDING_SHARE * delta:
        return LossDistribution(losses, composed[where], slack + total)
    tilted = _tilted_product(grids, laws, step, points, losses, delta)
    return LossDistribution(losses, np.minimum(composed[where] + entry, tilted(where)), slack)


def _product(factors: Sequence[tuple[Vector, int]], points: int) -> tuple[Vector, float, float]:
    """Return the cyclic convolution of count copies of each, and bounds on the error of one entry and of all entries.

    theory.md, 2.10. An entry of a transform is a tree of sums of log2(points) levels over the masses, so it is
    wrong by at most log2(points) * eta of their sum; powers and products of such numbers follow from that.
    """
    levels = math.log2(points) * _FFT_ETA
    log_size, log_upper, angle = (np.zeros(points // 2 + 1) for _ in range(3))
    with np.errstate(divide="ignore"):
        for probs, count in factors:
            transform = np.fft.rfft(probs, points)
            size = np.abs(transform)
            error = (levels + 16 * 2.0**-53) * max(1.0, float(probs.sum()))
            log_size += count * np.log(size)
            log_upper += count * np.log(size + error)
            angle += np.remainder(count * np.angle(transform), 2 * math.pi)
    size = np.exp(log_size)
    wrong = np.exp(log_upper) - size
    composed = np.fft.irfft(size * np.exp(1j * angle), points)
    # Each frequency but two stands for a pair of them.
    entry = 2 * float(np.sum(wrong + levels * size)) / points
    total = math.sqrt(2) * float(np.linalg.norm(wrong) + levels * np.linalg.norm(size))
    return np.maximum(composed, 0.0), entry, total


def _tilted_product(
    grids: Sequence[tuple[int, Vector, int]], laws: Parts, step: float, points: int, losses: Vector, delta: float
) -> Callable[[NDArray[np.int64]], Vector]:
    """Return upper bounds on the entries of `_product` by another way.

    Masses times exp(s * loss), composed, divided again.

    s is where Chernoff's bound on the loss at delta is smallest; near that loss the tilted law has its mass.
    """
    powers = _powers(laws)
    s = float(powers[np.argmin([(_log_moments(laws, s) + math.log(1 / delta)) / s for s in powers])])
    factors, log_total, rounding = [], 0.0, 0.0
    for (first, probs, count), (law, _) in zip(grids, laws, strict=True):
        log_moment = _log_moment(law, s)
        exponents = s * step * (first + np.arange(len(probs))) - log_moment
        factors.append((probs * np.exp(exponents), count))
        log_total += count * log_moment
        rounding += count * 8 * 2.0**-53 * (2 + float(np.abs(exponents).max()) + abs(log_moment))
    composed, entry, _ = _product(factors, points)
    back = log_total - s * losses
    rounding += 8 * 2.0**-53 * (2 + float(np.abs(back).max()) + abs(log_total))

    def upper(where: NDArray[np.int64]) -> Vector:
        with np.errstate(over="ignore"):
            bounds: Vector = (composed[where] + entry) * np.exp(back + rounding)
        return bounds

    return upper


def smallest_epsilon(
    delta_at: Callable[[float], float], delta: float, largest: float, likely: float = math.inf
) -> float:
    """Return the smallest epsilon in [0, largest] whose delta is small enough, rounded up; infinity if there is none.

    Close below `likely` it is found with few evaluations of delta.
    """
    low, high = 0.0, largest
    if 0 < likely < largest and delta_at(likely) <= delta:
        low, high = _just_below(delta_at, delta, likely)
    elif not delta_at(largest) <= delta:
        return math.inf
    if not low and delta_at(low) <= delta:
        return low
    while high - low > _EPSILON_SHARE * high:
        middle = (low + high) / 2
        if delta_at(middle) <= delta:
            high = middle
        else:
            low = middle
    return high


def _just_below(delta_at: Callable[[float], float], delta: float, enough: float) -> tuple[float, float]:
    """Return an epsilon that is too small, or 0, and one that is enough, by growing steps down from one that is."""
    share = _EPSILON_SHARE
    while share < 1:
        below = enough * (1 - share)
        if delta_at(below) > delta:
            return below, enough
        enough, share = below, 4 * share
    return 0.0, enough
