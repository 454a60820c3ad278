"""The constants of every statistical test, with their reasons, and the few tests that use them.

A test draws NUM_DRAWS values and raises a false alarm at most once in 1e9 runs. Two kinds of evidence share that rate:

- a chi-square over the whole law finds a wrong shape. Its tail is asymptotic, so it runs at a nominal 1e-10 on cells
  that expect at least 500: the true rate is then below 5e-10 (`test_the_false_alarm_rate_of_two_cells_is_as_stated`
  computes it exactly for the least favourable two cells).
- an exact binomial count of the one number that a planted error moves finds a small shift. Without it a chi-square
  alone has power 0.97, not 0.99, against beta wrong by 5% at b=4, beta=0.1.

(Not named after the standard library's `statistics`: this folder is on the import path and would hide it.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt
from scipy import stats

#: Enough that 5% of beta is nine standard deviations at b=4, beta=0.1; it takes milliseconds to draw.
NUM_DRAWS = 200_000
#: Of one test, all its evidence together.
FALSE_ALARM = 1e-9
#: Nominal; with SMALLEST_EXPECTED the true rate stays below 5e-10.
CHI_SQUARE_ALARM = 1e-10
CHI_SQUARE_TRUE_ALARM = 5e-10
SMALLEST_EXPECTED = 500
#: What is left for exact counts.
EXACT_ALARM = 4e-10
#: Planted errors must be caught this often.
POWER = 0.99


def binomial_pmf(num_trials: int, probability: Fraction) -> list[Fraction]:
    """Exact, from the definition."""
    p = probability
    return [math.comb(num_trials, k) * p**k * (1 - p) ** (num_trials - k) for k in range(num_trials + 1)]


def _pooled(observed: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> tuple[list[int], list[float]]:
    """Neighbouring cells joined until each expects SMALLEST_EXPECTED."""
    cells: list[list[float]] = [[0, 0.0]]
    for count, mean in zip(observed.tolist(), expected.tolist(), strict=True):
        if cells[-1][1] >= SMALLEST_EXPECTED:
            cells.append([0, 0.0])
        cells[-1][0] += count
        cells[-1][1] += mean
    if cells[-1][1] < SMALLEST_EXPECTED:
        count, mean = cells.pop()
        cells[-1][0] += count
        cells[-1][1] += mean
    return [int(count) for count, _ in cells], [mean for _, mean in cells]


def chi_square_rejects(observed: npt.NDArray[np.int64], pmf: Sequence[Fraction]) -> bool:
    """Whether these counts contradict the law as a whole."""
    assert sum(pmf) == 1
    total = int(observed.sum())
    counts, means = _pooled(observed, np.array([float(p * total) for p in pmf]))
    assert len(counts) >= 2, "one cell can contradict nothing"
    statistic = sum((count - mean) ** 2 / mean for count, mean in zip(counts, means, strict=True))
    return bool(statistic > stats.chi2.isf(CHI_SQUARE_ALARM, len(counts) - 1))


def count_rejects(successes: int, trials: int, probability: float, alarm: float = EXACT_ALARM) -> bool:
    """Whether a number of successes contradicts Binomial(trials, probability): exact, two-sided."""
    below = stats.binom.cdf(successes, trials, probability)
    above = stats.binom.sf(successes - 1, trials, probability)
    return bool(min(below, above) < alarm / 2)


def binomial_law_rejects(observed: npt.NDArray[np.int64], num_trials: int, probability: Fraction) -> bool:
    """Whether counts of the values 0..num_trials contradict Binomial(num_trials, probability)."""
    total = int(observed.sum())
    successes = int((observed * np.arange(num_trials + 1)).sum())
    return chi_square_rejects(observed, binomial_pmf(num_trials, probability)) or count_rejects(
        successes, num_trials * total, float(probability)
    )


def uniform_law_rejects(observed: npt.NDArray[np.int64]) -> bool:
    """Whether counts of the residues contradict the uniform law; the first and the last residue count by themselves."""
    size, total = len(observed), int(observed.sum())
    ends = any(count_rejects(int(observed[end]), total, 1 / size, EXACT_ALARM / 2) for end in (0, -1))
    return ends or chi_square_rejects(observed, [Fraction(1, size)] * size)


def normal_law_rejects(values: npt.NDArray[np.float64], *, mean: float, variance: float) -> bool:
    """Whether values contradict Normal(mean, variance): the exact law of the sum of squares, and Kolmogorov-Smirnov."""
    squares = float(((values - mean) ** 2).sum() / variance)
    tail = min(stats.chi2.cdf(squares, values.size), stats.chi2.sf(squares, values.size))
    shape = stats.kstest(values, stats.norm(mean, math.sqrt(variance)).cdf).pvalue
    return bool(tail < FALSE_ALARM / 4 or shape < FALSE_ALARM / 2)


def products_reject_independence(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> bool:
    """Whether the mean product of centred values is not zero.

    Seven standard deviations: 2.6e-12 under the normal law, which leaves a factor of 100 for a sum that is only nearly
    normal and for a few pairs of neighbours in one test.
    """
    products = left * right
    return bool(abs(products.sum()) > 7 * math.sqrt((products**2).sum()))


#: Of a self-normalised sum |S| / sqrt(sum of squares). For symmetric terms it is beyond t with probability at most
#: 2 exp(-t^2 / 2), whatever their law (Efron, 1969): 4.6e-11 here. Other terms are only nearly symmetric in their sum
#: of NUM_DRAWS, which the factor of 20 up to FALSE_ALARM is left for.
SELF_NORMALISED = 7.0


def mean_rejects(terms: npt.NDArray[np.float64]) -> bool:
    """Whether terms contradict a mean of 0."""
    return bool(abs(terms.sum()) > SELF_NORMALISED * math.sqrt(float((terms**2).sum())))


def variance_rejects(terms: npt.NDArray[np.float64], most: float) -> bool:
    """Whether terms of mean 0 contradict a variance of at most this."""
    above = terms**2 - most
    return bool(above.sum() > SELF_NORMALISED * math.sqrt(float((above**2).sum())))
