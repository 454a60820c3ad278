"""Screen for columns of different parties that act on the label together, read from released symbols at no cost.

For a pair of columns of two parties let G hold the products of their shown levels (indicators, centred, 0 where a row
does not show a column), and Z a constant and every shown level by itself. With G' what is left of G after Z,

    U = G'^T y,    x = 4 U^T (G'^T G')^- U,    r = rank of G'

Null: given the symbols, labels are independent and each one's mean is additive in the shown levels (in particular:
does not depend on them). Then x is above t with probability at most (t/r)^(r/2) exp((r-t)/2), and for r = 1 also at
most 2 exp(-t/2). No large numbers are assumed: theory.md, "The screen's alarm rate". The union over pairs and
classes is taken, so `log_tail` bounds the logarithm of the probability that a screen without any interaction has such a
pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pbmvfl._settings import check_whole
from pbmvfl.errors import DataError, PlanError
from pbmvfl.mechanisms.interactions.symbols import NOT_SHOWN, Integers, Reals, kept_at
from pbmvfl.mechanisms.randomized_response import LARGEST_SYMBOLS

#: False-alarm rate: how often a screen of a table without any interaction reports one.
ALARM = 0.01
#: Once one pair is certain, others are taken with it up to this many false ones in the mean.
FURTHER = 0.1
#: Remainder of a product after its main effects, relative to the product, that is still taken for rounding.
_ROUNDING = 1e-8


class Column(NamedTuple):
    """Column of a party."""

    party: int
    column: int


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Pair of columns: how far its products are from additive, and how often that happens by chance at most."""

    first: Column
    second: Column
    statistic: float
    dimensions: int
    #: Logarithm of the bound for all pairs and classes together; above 0 it says nothing.
    log_tail: float


def log_tail_bound(statistic: float, dimensions: int) -> float:
    """Return ln of a bound on P(x >= statistic) under the null, for products of that many dimensions."""
    check_whole("dimensions", dimensions, least=0)
    if dimensions == 0 or statistic <= dimensions:
        return 0.0
    bound = dimensions / 2 * math.log(statistic / dimensions) + (dimensions - statistic) / 2
    return min(bound, math.log(2) - statistic / 2, 0.0) if dimensions == 1 else min(bound, 0.0)


def _contrasts(levels_N: Integers, base: int) -> Reals:
    """Indicators of all levels but the first, centred over the rows that show the column; 0 in the others."""
    shows = levels_N != NOT_SHOWN
    hits = (levels_N[:, None] == np.arange(1, base)).astype(np.float64)
    means = hits[shows].mean(axis=0) if shows.any() else np.zeros(base - 1)
    return np.where(shows[:, None], hits - means, 0.0)


def _pseudo_inverse(gram: Reals, scale: float) -> tuple[Reals, int]:
    """Return the inverse on the span of the eigenvectors that are not rounding, and how many these are."""
    values, vectors = np.linalg.eigh(gram)
    good = values > _ROUNDING * max(scale, np.finfo(np.float64).tiny)
    return (vectors[:, good] / values[good]) @ vectors[:, good].T, int(good.sum())


def screen(
    shown_levels: Sequence[Integers], labels_N: npt.NDArray[np.int64], *, base: int, num_classes: int
) -> tuple[Finding, ...]:
    """Return every pair of columns of two parties, the least explicable by chance first.

    Args:
        shown_levels: Each party's levels, as `symbols.shown_levels` reads them: N x D, NOT_SHOWN where a row does not
            show.
        labels_N: The class of each row.
        base: Levels of a digit.
        num_classes: Classes of the labels.

    Raises:
        DataError: Levels and labels do not fit each other.
    """
    check_whole("base", base, least=2, most=LARGEST_SYMBOLS)
    check_whole("num_classes", num_classes, least=2)
    rows = len(labels_N)
    if not rows or any(levels.ndim != 2 or len(levels) != rows for levels in shown_levels):
        raise DataError(f"levels of shapes {[levels.shape for levels in shown_levels]} do not fit {rows} labels")
    names = [Column(party, column) for party, each in enumerate(shown_levels) for column in range(each.shape[1])]
    contrasts = [_contrasts(shown_levels[name.party][:, name.column], base) for name in names]
    mains = np.concatenate([np.ones((rows, 1)), *contrasts], axis=1)
    main_inverse, _ = _pseudo_inverse(mains.T @ mains, rows)
    # One indicator decides two classes; more classes are tested one after another.
    tested = range(1, num_classes) if num_classes == 2 else range(num_classes)
    answers = np.stack([labels_N == label for label in tested], axis=1).astype(np.float64)
    left = answers - mains @ (main_inverse @ (mains.T @ answers))
    tests = math.log(max(1, _num_pairs([each.shape[1] for each in shown_levels]) * len(tested)))
    found = []
    for one, other in combinations(range(len(names)), 2):
        if names[one].party == names[other].party:
            continue
        both = np.flatnonzero(contrasts[one].any(axis=1) & contrasts[other].any(axis=1))
        products = (contrasts[one][both, :, None] * contrasts[other][both, None, :]).reshape(len(both), (base - 1) ** 2)
        shared = mains[both].T @ products
        gram = products.T @ products
        inverse, rank = _pseudo_inverse(gram - shared.T @ main_inverse @ shared, float(np.trace(gram)))
        sums = products.T @ left[both]
        statistic = float(4 * np.einsum("ic,ij,jc->c", sums, inverse, sums).max())
        found.append(
            Finding(
                first=names[one],
                second=names[other],
                statistic=statistic,
                dimensions=rank,
                log_tail=log_tail_bound(statistic, rank) + tests,
            )
        )
    return tuple(sorted(found, key=lambda each: (each.log_tail, -each.statistic)))


def _num_pairs(columns: Sequence[int]) -> int:
    return sum(one * other for one, other in combinations(columns, 2))


# --- what is taken from it ---


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Pairs of columns that are trained on together; none: there is nothing to gain, and training is local."""

    pairs: tuple[tuple[Column, Column], ...]

    def columns(self, party: int) -> tuple[int, ...]:
        """Return the columns that a party releases, rising."""
        return tuple(sorted({each.column for pair in self.pairs for each in pair if each.party == party}))

    def partners(self, party: int) -> Iterator[tuple[int, Column]]:
        """Return for every pair that the party is in: its own column, and the other party's."""
        for first, second in self.pairs:
            if first.party == party:
                yield first.column, second
            elif second.party == party:
                yield second.column, first


def select(
    findings: Sequence[Finding], *, alarm: float = ALARM, further: float = FURTHER, columns_a_party: int = 1
) -> Selection:
    """Select the pairs to train with.

    With no interaction anywhere, the selection is empty with probability at least 1 - alarm.

    Args:
        findings: All pairs of the screen.
        alarm: Nothing is selected unless one pair is beyond chance at this rate.
        further: Then pairs up to this rate are, best first, while there is room.
        columns_a_party: Room: columns of each party that may be selected.

    Raises:
        PlanError: A rate or a number is out of range.
    """
    check_whole("columns_a_party", columns_a_party, least=1)
    if not 0 < alarm <= further:
        raise PlanError(f"alarm={alarm!r}, further={further!r}; permitted: 0 < alarm <= further")
    ordered = sorted(findings, key=lambda each: (each.log_tail, -each.statistic))
    if not ordered or ordered[0].log_tail > math.log(alarm):
        return Selection(pairs=())
    taken: dict[int, set[int]] = {}
    pairs = []
    for each in ordered:
        if each.log_tail > math.log(further):
            break
        both = (each.first, each.second)
        if all(len(taken.get(party, set()) | {column}) <= columns_a_party for party, column in both):
            for party, column in both:
                taken.setdefault(party, set()).add(column)
            pairs.append(both)
    return Selection(pairs=tuple(pairs))


# --- what a screen can find, from public numbers alone ---


def smallest_statistic(dimensions: int, log_tail: float) -> float:
    """Return the statistic from which on the bound is at most exp(log_tail)."""
    from scipy import optimize  # imported late: plans that have no screen do not need it

    if log_tail >= 0:
        return float(dimensions)
    high = dimensions + 1.0
    while log_tail_bound(high, dimensions) > log_tail:
        high *= 2
    return float(optimize.brentq(lambda x: log_tail_bound(x, dimensions) - log_tail, dimensions, high))


@dataclass(frozen=True, kw_only=True)
class ScreenSize:
    """Public numbers of a screen: rows, columns of each party, levels of a column and classes."""

    num_rows: int
    columns: tuple[int, ...]
    base: int = 2
    num_classes: int = 2

    def __post_init__(self) -> None:
        check_whole("num_rows", self.num_rows, least=1)
        check_whole("base", self.base, least=2, most=LARGEST_SYMBOLS)
        check_whole("num_classes", self.num_classes, least=2)
        check_whole("parties", len(self.columns), least=2, why=": one party alone interacts with nobody")
        for party, count in enumerate(self.columns):
            check_whole(f"columns[{party}]", count, least=1)

    @property
    def num_tests(self) -> int:
        return _num_pairs(self.columns) * (1 if self.num_classes == 2 else self.num_classes)

    def possible_shown(self) -> range:
        """Return how many columns a row can show, every party alike."""
        most = int(math.log(LARGEST_SYMBOLS) / math.log(self.base) + 1e-9)
        return range(1, min(min(self.columns), most) + 1)

    def shown_count(self, epsilon: float) -> int:
        """Return how many columns a row should show.

        (S/D)^2 of the rows show a pair, and its product is told kept^2.
        """
        return max(self.possible_shown(), key=lambda shown: shown * kept_at(self.base**shown, epsilon) ** 2)

    def power(self, epsilon: float, explained: float, *, alarm: float = ALARM) -> float:
        """Return the probability that a screen at a pure epsilon finds one given pair.

        The pair explains that share of a class's variance. Levels and classes are taken to be equally frequent, in the
        parties
        with the most columns, and the statistic to be noncentral chi-square. An estimate for planning: no guarantee
        rests on
        it.
        """
        from scipy import stats

        if not 0 < explained <= 1:
            raise PlanError(f"explained={explained!r} must be above 0 and at most 1")
        shown = self.shown_count(epsilon)
        most, next_most = sorted(self.columns)[-1], sorted(self.columns)[-2]
        told = kept_at(self.base**shown, epsilon) ** 4 * (shown / most) * (shown / next_most)
        share = 1 / self.num_classes
        moved = 4 * self.num_rows * told * explained * share * (1 - share)
        dimensions = (self.base - 1) ** 2
        beyond = smallest_statistic(dimensions, math.log(alarm / self.num_tests))
        return float(stats.ncx2.sf(beyond, dimensions, moved))


# --- Whether training together can pay: first from public numbers, then from what the screen found ---
# A budget epsilon is cut in three: the screen's symbols (pure), the found columns' symbols (pure), and noisy updates.
# If the screen finds nothing, the second part is not spent and the updates get all that is left.


#: Shares of epsilon: 4 and 2.5 of 8. What is left, 1.5 of 8, is for noisy updates.
SCREEN_SHARE = 8 / 16
SYMBOL_SHARE = 5 / 16
#: Share of a class's variance that a pair must explain for a screen to be worth its budget. On made tables two products
#: that explained .04 each were worth 7 points, .09 each 16 points (columns at two levels), .15 each 16 (at four).
WORTHWHILE = 0.1
#: A screen that would miss even such a pair more often than once in a hundred is not worth its budget.
LEAST_POWER = 0.99
#: Levels of a numeric column in the second release.
CONTEXT_LEVELS = 8


@dataclass(frozen=True, kw_only=True)
class Split:
    """Division of a total epsilon if columns of different parties may act together."""

    epsilon: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise PlanError(f"epsilon={self.epsilon!r} must be a finite number above 0")

    @property
    def screen_epsilon(self) -> float:
        return self.epsilon * SCREEN_SHARE

    @property
    def symbol_epsilon(self) -> float:
        return self.epsilon * SYMBOL_SHARE

    @property
    def update_epsilon(self) -> float:
        """Epsilon of the updates after a screen that found something: at least this, at the whole delta."""
        return self.epsilon - self.screen_epsilon - self.symbol_epsilon

    @property
    def local_epsilon(self) -> float:
        """Epsilon of the updates after a screen that found nothing."""
        return self.epsilon - self.screen_epsilon


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Verdict on whether a screen is worth its budget, with the reason in words."""

    pays: bool
    power: float
    split: Split
    shown: int
    words: str


def joint_offer(*, epsilon: float, size: ScreenSize, symbols_a_unit: int = 1) -> Offer:
    """Decide from public numbers alone whether a screen at its share of epsilon would find a pair worth finding.

    Args:
        epsilon: Total epsilon of the run.
        size: Public numbers of the screen.
        symbols_a_unit: How many symbols of one row the unit of privacy covers: 1 for a CELL, those of all honest
            parties
            for a RECORD.

    Raises:
        PlanError: A number is out of range.
    """
    if symbols_a_unit < 1:
        raise PlanError(f"symbols_a_unit={symbols_a_unit} must be at least 1")
    split = Split(epsilon=epsilon)
    each = split.screen_epsilon / symbols_a_unit
    shown = size.shown_count(each)
    power = size.power(each, WORTHWHILE)
    pays = power >= LEAST_POWER
    columns = max(size.columns)
    words = (
        f"a screen of {size.num_tests} products of columns of different parties at epsilon {each:.3g} would find one "
        f"that explains {WORTHWHILE:.0%} of the label with probability {power:.2f}"
    )
    if pays:
        words += f"; it raises a false alarm at most once in {1 / ALARM:.0f} runs, and costs "
        words += f"{split.screen_epsilon:.3g} of {epsilon:.3g}"
    else:
        words += (
            f", and {LEAST_POWER} is asked for: {size.num_rows} rows, {columns} columns a party and epsilon "
            f"{epsilon:.3g} do not allow it, so training is local"
        )
    return Offer(pays=pays, power=power, split=split, shown=shown, words=words)


def verdict(selection: Selection) -> str:
    """Describe the result of a screen in words."""
    if not selection.pairs:
        return "no product of columns of different parties is beyond chance: training is local with all that is left"
    named = ", ".join(f"{a.party}.{a.column} x {b.party}.{b.column}" for a, b in selection.pairs)
    return f"columns that act together (party.column): {named}; training uses the others' released symbols"
