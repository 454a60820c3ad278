"""Findings of an audit: one test each, with a p-value, and the few tests that laws are held against."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from pbmvfl.audit.constants import LARGEST_CELLS, SMALLEST_EXPECTED, TAIL_SHARE

#: A law that has no place with this much on both sides is not held against independence of neighbours.
_SMALLEST_SHARE = 0.1
Counts = npt.NDArray[np.int64]
Probabilities = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one test.

    Args:
        what: What was drawn.
        law: What was tested about it.
        trials: Draws, or comparisons.
        statistic: What was found, for a person.
        p_value: Probability of something as odd, or odder, if the law holds. 0: impossible by the law.
        case: Which of several draws of the same thing, such as a value.
    """

    what: str
    law: str
    trials: int
    statistic: str
    p_value: float
    case: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def of_case(findings: Iterable[Finding], case: str) -> Iterator[Finding]:
    """Return the findings with the name of their case."""
    return (replace(each, case=case) for each in findings)


def certain(what: str, law: str, trials: int, *, holds: bool, statistic: str) -> Finding:
    """Return the finding of a statement that has no exceptions."""
    return Finding(what=what, law=law, trials=trials, statistic=statistic, p_value=1.0 if holds else 0.0)


def count_test(what: str, law: str, successes: int, trials: int, probability: float) -> Finding:
    """Hold a number of successes against Binomial(trials, probability): exact, two-sided."""
    below = float(stats.binom.cdf(successes, trials, probability))
    above = float(stats.binom.sf(successes - 1, trials, probability))
    text = f"{successes:,} of {trials:,}, expected {trials * probability:,.1f}"
    return Finding(what=what, law=law, trials=trials, statistic=text, p_value=min(1.0, 2 * min(below, above)))


def normal_test(what: str, law: str, trials: int, deviations: float) -> Finding:
    """Hold a standardised sum of many terms against the standard normal law, two-sided."""
    p_value = 2 * float(stats.norm.sf(abs(deviations))) if math.isfinite(deviations) else 0.0
    return Finding(what=what, law=law, trials=trials, statistic=f"{deviations:+.2f} deviations", p_value=p_value)


def pooled(counts: Counts, expected: Probabilities) -> tuple[Counts, Probabilities]:
    """Join neighbouring cells until each expects SMALLEST_EXPECTED, and there are at most LARGEST_CELLS."""
    least = max(SMALLEST_EXPECTED, float(expected.sum()) / LARGEST_CELLS)
    ends, mass = [], 0.0
    for i, mean in enumerate(expected.tolist()):
        mass += mean
        if mass >= least:
            ends.append(i + 1)
            mass = 0.0
    if not ends:
        return counts.sum(keepdims=True), expected.sum(keepdims=True)
    ends[-1] = len(expected)  # what is left over at the end goes to the last cell
    starts = [0, *ends[:-1]]
    return np.add.reduceat(counts, starts), np.add.reduceat(expected, starts)


def chi_square_test(what: str, counts: Counts, probabilities: Probabilities, law: str = "chi-square") -> Finding:
    """Hold counts against the probabilities of all cells.

    Raises:
        ValueError: There are too few draws for two cells, which could contradict nothing.
    """
    trials = int(counts.sum())
    seen, means = pooled(counts, probabilities * trials)
    if len(seen) < 2:
        raise ValueError(f"{what}: trials={trials} are too few for a chi-square; use more")
    statistic = float(((seen - means) ** 2 / means).sum())
    p_value = float(stats.chi2.sf(statistic, len(seen) - 1))
    return Finding(
        what=what, law=law, trials=trials, statistic=f"{statistic:.1f} at {len(seen) - 1} d.f.", p_value=p_value
    )


def squares_test(what: str, law: str, values: npt.NDArray[np.float64]) -> Finding:
    """Hold values against the standard normal law by the sum of their squares, two-sided."""
    total, trials = float(np.square(values).sum()), values.size
    tail = min(float(stats.chi2.cdf(total, trials)), float(stats.chi2.sf(total, trials)))
    text = f"deviation {math.sqrt(total / trials):.4f} of the charged one"
    return Finding(what=what, law=law, trials=trials, statistic=text, p_value=min(1.0, 2 * tail))


def neighbours_test(what: str, above: npt.NDArray[np.bool_], probability: float) -> Finding:
    """Hold neighbouring draws against independence, by which of them lie above a place near the median.

    Bits and not values: a product of two rare large values would decide by itself.
    """
    centred = above.astype(np.float64) - probability
    products = float((centred[:-1] * centred[1:]).sum())
    deviations = products / (probability * (1 - probability) * math.sqrt(max(1, centred.size - 1)))
    return normal_test(what, "neighbours", centred.size, deviations)


@dataclass(frozen=True)
class IntegerLaw:
    """Exact law of an integer: `probabilities[i]` is that of `first + i`; all others are impossible."""

    first: int
    probabilities: Probabilities

    @property
    def values(self) -> npt.NDArray[np.int64]:
        return self.first + np.arange(len(self.probabilities))

    @property
    def mean(self) -> float:
        return float(self.values @ self.probabilities)

    @property
    def variance(self) -> float:
        return float(np.square(self.values - self.mean) @ self.probabilities)

    def nearly_normal(self, trials: int) -> bool:
        """Return whether a mean of so many draws is normal up to a factor of e^1.5 of its far tail.

        The first two terms of the Edgeworth series at 6.5 deviations.
        """
        if self.variance <= 0:
            return False
        standard = (self.values - self.mean) / math.sqrt(self.variance)
        skewness = float(standard**3 @ self.probabilities)
        excess = float(standard**4 @ self.probabilities) - 3
        return abs(skewness) * 6.5**3 / (6 * math.sqrt(trials)) + abs(excess) * 6.5**4 / (24 * trials) < 1.5

    @property
    def middle(self) -> tuple[int, float]:
        """Return the value with P(X >= value) nearest to 1/2, and that probability."""
        above = np.cumsum(self.probabilities[::-1])[::-1]
        place = int(np.argmin(np.abs(above - 0.5)))
        return self.first + place, float(above[place])

    def plus(self, other: IntegerLaw) -> IntegerLaw:
        """Return the law of the sum of two independent integers."""
        from scipy.signal import convolve

        # Large arrays are convolved by FFT, which may leave numbers a hair below 0.
        summed = np.maximum(convolve(self.probabilities, other.probabilities), 0.0)
        return IntegerLaw(self.first + other.first, summed / summed.sum())

    def tail_cells(self) -> npt.NDArray[np.bool_]:
        """Return which values lie in the tails: at each side at most half of TAIL_SHARE, or else the last value."""
        below = np.cumsum(self.probabilities) <= TAIL_SHARE / 2
        above = np.cumsum(self.probabilities[::-1])[::-1] <= TAIL_SHARE / 2
        if not below.any():
            below[0] = True
        if not above.any():
            above[-1] = True
        return np.asarray(below | above)


def law_tests(what: str, draws: npt.NDArray[Any], law: IntegerLaw) -> Sequence[Finding]:
    """Hold independent draws against an exact law: its support, mean, tails, every cell, and independence."""
    places = draws.astype(np.int64).reshape(-1) - law.first
    trials, size = places.size, len(law.probabilities)
    inside = (places >= 0) & (places < size)
    counts = np.bincount(places[inside], minlength=size)
    tails, likeliest = law.tail_cells(), int(np.argmax(law.probabilities))
    outside = int(trials - inside.sum())
    found = [
        certain(what, "support", trials, holds=not outside, statistic=f"{outside:,} draws are impossible"),
        count_test(what, "tails", int(counts[tails].sum()), trials, float(law.probabilities[tails].sum())),
        count_test(what, "likeliest", int(counts[likeliest]), trials, float(law.probabilities[likeliest])),
    ]
    if law.nearly_normal(trials):
        moved = float(places.sum() + trials * (law.first - law.mean)) / math.sqrt(trials * law.variance)
        found.append(normal_test(what, "mean", trials, moved))
    middle, share = law.middle
    if _SMALLEST_SHARE <= share <= 1 - _SMALLEST_SHARE:
        found.append(neighbours_test(what, places >= middle - law.first, share))
    if min(law.probabilities.max(), 1 - law.probabilities.max()) * trials >= 2 * SMALLEST_EXPECTED:
        found.append(chi_square_test(what, counts, law.probabilities))
    return found


def normal_tests(what: str, values: npt.NDArray[np.float64]) -> Sequence[Finding]:
    """Hold independent draws against the standard normal law: its mean, variance, tails and every cell."""
    edges = stats.norm.ppf(np.arange(1, LARGEST_CELLS) / LARGEST_CELLS)
    counts = np.bincount(np.searchsorted(edges, values), minlength=LARGEST_CELLS)
    far = float(-stats.norm.ppf(TAIL_SHARE / 2))
    return [
        normal_test(what, "mean", values.size, float(values.sum()) / math.sqrt(values.size)),
        squares_test(what, "variance", values),
        count_test(what, "tails", int((np.abs(values) > far).sum()), values.size, TAIL_SHARE),
        chi_square_test(what, counts, np.full(LARGEST_CELLS, 1 / LARGEST_CELLS)),
        neighbours_test(what, values >= 0, 0.5),
    ]


def uniform_tests(what: str, residues: npt.NDArray[Any], bits: int) -> Sequence[Finding]:
    """Hold residues modulo 2^bits against the uniform law; the first and the last count by themselves."""
    values = residues.reshape(-1).astype(np.int64)
    trials, size = values.size, 1 << bits
    found = []
    if trials / size >= 1:  # else one residue is expected too rarely for a test
        for name, residue in (("residue 0", 0), ("top residue", size - 1)):
            found.append(count_test(what, name, int((values == residue).sum()), trials, 1 / size))
    # At most 256 cells at a time: the high bits of every value, and the low ones.
    cells = min(bits, 8)
    parts = [("high bits", values >> (bits - cells))] + ([("low bits", values & 255)] if bits > 8 else [])
    for name, part in parts:
        counts = np.bincount(part, minlength=1 << cells)
        found.append(chi_square_test(what, counts, np.full(1 << cells, 2.0**-cells), f"chi-square of {name}"))
    return found
