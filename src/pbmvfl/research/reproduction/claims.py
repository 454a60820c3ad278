"""Claims of the paper, tested over seeds.

Trend (accuracy rises with b, with beta): within a block (one seed, all else equal) the configurations are exchangeable
if the claim is false. The statistic counts pairs in the claimed order less pairs against it; its law under all
permutations of all blocks is computed exactly, by convolution. Paired comparison (PBM against LDP, few against many
parties): if the claim is false the sign of every difference is a fair coin; the law of the sum of the differences under
all signs is computed exactly up to 20 pairs. Both are one-sided. A claim holds if its p-value is at most FALSE_ALARM
divided by the number of claims tested: the chance that any of them holds by luck is at most FALSE_ALARM.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from pbmvfl.research.reproduction.records import Record, epochs_to
from pbmvfl.research.reproduction.studies import Cell, Study

#: The false-alarm rate of all claims of one study together.
FALSE_ALARM = 0.01
_LARGEST_BLOCK = 7
_EXACT_PAIRS = 20


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim and the evidence for it."""

    text: str
    test: str
    #: In how many of the comparisons the claimed side won; ties count for neither.
    wins: int
    comparisons: int
    #: None for a comparison that is only reported: its pairs share runs, so no exact law is known.
    p_value: float | None
    effect: str = ""

    def holds(self, num_claims: int) -> bool:
        return self.p_value is not None and self.p_value <= FALSE_ALARM / num_claims

    def to_dict(self, num_claims: int) -> dict[str, Any]:
        return {
            "claim": self.text,
            "test": self.test,
            "won": f"{self.wins} of {self.comparisons}",
            "effect": self.effect,
            "p": "" if self.p_value is None else f"{self.p_value:.2g}",
            "holds": "reported" if self.p_value is None else "yes" if self.holds(num_claims) else "not shown",
        }


def _score(values: Sequence[float]) -> int:
    """Count pairs in rising order less pairs in falling order."""
    return sum(int(a < b) - int(a > b) for a, b in itertools.combinations(values, 2))


def trend_p_value(blocks: Sequence[Sequence[float]]) -> float:
    """Return the exact chance, under permutation within every block, of a score at least as large as that observed."""
    seen = sum(_score(block) for block in blocks)
    law: Counter[int] = Counter({0: 1})
    total = 1
    for block in blocks:
        if len(block) > _LARGEST_BLOCK:
            raise ValueError(f"a block of {len(block)} values; at most {_LARGEST_BLOCK} are enumerated")
        scores = Counter(_score(order) for order in itertools.permutations(block))
        joint: Counter[int] = Counter()
        for (a, n), (b, m) in itertools.product(law.items(), scores.items()):
            joint[a + b] += n * m
        law = joint
        total *= math.factorial(len(block))
    return float(Fraction(sum(count for score, count in law.items() if score >= seen), total))


def paired_p_value(differences: Sequence[float]) -> float:
    """Return the p-value, exact up to 20 pairs by all signs of the differences; above that, of the exact sign test."""
    values = np.array([value for value in differences if value], dtype=np.float64)
    if not len(values):
        return 1.0
    if len(values) > _EXACT_PAIRS:
        wins = int((values > 0).sum())
        return sum(math.comb(len(values), k) for k in range(wins, len(values) + 1)) / 2.0 ** len(values)
    sums = np.zeros(1)
    for value in np.abs(values):
        sums = np.concatenate([sums - value, sums + value])
    return float((sums >= values.sum() - 1e-12).mean())


def trend(text: str, blocks: Sequence[Sequence[float]], *, effect: str = "") -> Claim:
    pairs = [pair for block in blocks for pair in itertools.combinations(block, 2)]
    return Claim(
        text=text,
        test=f"exact permutation in {len(blocks)} blocks",
        wins=sum(a < b for a, b in pairs),
        comparisons=len(pairs),
        p_value=trend_p_value(blocks),
        effect=effect,
    )


def paired(text: str, first: Sequence[float], second: Sequence[float]) -> Claim:
    """Test the claim that `first` is above `second`, pair by pair."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    exact = sum(bool(value) for value in differences) <= _EXACT_PAIRS
    return Claim(
        text=text,
        test=f"exact {'sign-flip' if exact else 'sign'} test on {len(differences)} pairs",
        wins=sum(value > 0 for value in differences),
        comparisons=len(differences),
        p_value=paired_p_value(differences),
        effect=f"mean {np.mean(differences):+.4f}, least {min(differences):+.4f}",
    )


# --- Claims that a study can test from its own runs ---
# Scores are the mean of the metric over the last ten epochs.


#: From a configuration to its finished runs, or None.
Find = Callable[[Cell], Sequence[Record] | None]
_LAST = 10
#: Largest difference that counts as "almost the same as without privacy".
CLOSE = 0.02


def score(record: Record, metric: str, limit_epochs: int) -> float:
    """Return the mean of the metric over the last ten epochs."""
    return float(np.mean([line[metric] for line in record.history[:limit_epochs][-_LAST:]]))


def study_claims(study: Study, find: Find, *, limit_epochs: int) -> list[Claim]:
    """Test the claims of the paper for which this study has runs."""
    cells = [cell for cell in study.all_cells() if find(cell)]
    if study.target is not None:
        return list(_table_claims(study, cells, find, limit_epochs))
    return list(_figure_claims(study, cells, find, limit_epochs))


def _blocks(cells: Iterable[Cell], vary: str, fixed: str) -> list[list[Cell]]:
    """Group PBM cells that differ in one number only, in its order."""
    groups: dict[tuple[int, float], list[Cell]] = {}
    for cell in cells:
        if cell.mechanism == "pbm":
            groups.setdefault((cell.num_parties, getattr(cell, fixed)), []).append(cell)
    ordered = [sorted(group, key=lambda cell: float(getattr(cell, vary))) for group in groups.values()]
    return [group for group in ordered if len(group) > 1]


def _table_claims(study: Study, cells: list[Cell], find: Find, limit: int) -> Iterable[Claim]:
    assert study.target is not None
    target = study.target
    runs = {
        cell: {r.plan.seed: r.history[:limit] for r in find(cell) or ()} for cell in cells if cell.mechanism == "pbm"
    }
    # Only what all configurations have can be compared: the seeds of each, and epochs as far as each was run.
    seeds = sorted(set.intersection(*(set(found) for found in runs.values()))) if runs else []
    histories = [found[seed] for found in runs.values() for seed in seeds]
    within = min((len(history) for history in histories if epochs_to(history, *target) is None), default=limit)
    fewer = within < limit or any(len(found) > len(seeds) for found in runs.values())
    compared = f" (seed {', '.join(map(str, seeds))}, within {within} epochs)" if fewer else ""

    def speeds(cell: Cell) -> list[float]:
        found = (epochs_to(runs[cell][seed][:within], *target) for seed in seeds)
        return [-float(within + 1 if epoch is None else epoch) for epoch in found]

    for vary, fixed, sign in (("num_trials", "beta", "b"), ("beta", "num_trials", "beta")):
        groups = [np.array([speeds(cell) for cell in group]).T for group in _blocks(cells, vary, fixed)]
        blocks = [list(seed) for group in groups for seed in group]
        if blocks:
            yield trend(f"the target is reached in fewer epochs as {sign} grows{compared}", blocks)


def _figure_claims(study: Study, cells: list[Cell], find: Find, limit: int) -> Iterable[Claim]:
    def scores(cell: Cell) -> list[float]:
        return [score(record, study.metric, limit) for record in find(cell) or ()]

    for vary, fixed, sign in (("num_trials", "beta", "b"), ("beta", "num_trials", "beta")):
        groups = [np.array([scores(cell) for cell in group]).T for group in _blocks(cells, vary, fixed)]
        blocks = [list(seed) for group in groups for seed in group]
        if blocks:
            yield trend(f"{study.metric} rises with {sign}", blocks)
    yield from _against_ldp(cells, scores)
    yield from _parties(cells, scores)
    yield from _close_to_npq(cells, scores)


def _against_ldp(cells: list[Cell], scores: Callable[[Cell], list[float]]) -> Iterable[Claim]:
    for kind, name in (("ldp", "the printed noise"), ("ldp-calibrated", "equal epsilon")):
        first, second = [], []
        for cell in cells:
            if cell.mechanism != kind:
                continue
            numbers = cell.equal_to or (cell.num_trials, cell.beta)
            for other in cells:
                same = (other.num_parties, other.num_trials, other.beta) == (cell.num_parties, *numbers)
                if other.mechanism == "pbm" and same:
                    first += scores(other)
                    second += scores(cell)
        if first:
            yield paired(f"PBM is above LDP with {name}", first, second)


def _parties(cells: list[Cell], scores: Callable[[Cell], list[float]]) -> Iterable[Claim]:
    counts = sorted({cell.num_parties for cell in cells})
    if len(counts) != 2:
        return
    few, many = counts
    first, second = [], []
    for cell in cells:
        if cell.mechanism != "pbm" or cell.num_parties != few:
            continue
        for other in cells:
            numbers = (other.mechanism, other.num_parties, other.num_trials, other.beta)
            if numbers == ("pbm", many, cell.num_trials, cell.beta):
                first += scores(cell)
                second += scores(other)
    if first:
        yield paired(f"PBM is better with {few} parties than with {many}", first, second)


def _close_to_npq(cells: list[Cell], scores: Callable[[Cell], list[float]]) -> Iterable[Claim]:
    for parties in sorted({cell.num_parties for cell in cells}):
        pbm = [cell for cell in cells if cell.mechanism == "pbm" and cell.num_parties == parties]
        npq = [cell for cell in cells if cell.mechanism == "none" and cell.num_parties == parties]
        if not pbm or not npq:
            continue
        largest = max(cell.num_trials for cell in pbm)
        best = [cell for cell in pbm if cell.num_trials == largest]
        differences = [a - b for cell in best for a, b in zip(scores(cell), scores(npq[0]), strict=True)]
        yield Claim(
            text=f"b = {largest} comes within {CLOSE:g} of no privacy, {parties} parties",
            test=f"reported over {len(differences)} runs",
            wins=sum(value >= -CLOSE for value in differences),
            comparisons=len(differences),
            p_value=None,
            effect=f"mean {np.mean(differences):+.4f}, least {min(differences):+.4f}",
        )
