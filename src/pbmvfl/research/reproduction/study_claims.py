"""Which claims a study can test, from its own runs. Scores are the mean of the metric over the last ten epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pbmvfl.research.reproduction.claims import Claim, paired, trend
from pbmvfl.research.reproduction.records import Record, epochs_to
from pbmvfl.research.reproduction.studies import Cell, Study

Find = Callable[[Cell], Sequence[Record] | None]
_LAST = 10
#: What "almost the same as without privacy" is taken to mean.
CLOSE = 0.02


def score(record: Record, metric: str, limit_epochs: int) -> float:
    """The mean of the metric over the last ten epochs."""
    return float(np.mean([line[metric] for line in record.history[:limit_epochs][-_LAST:]]))


def study_claims(study: Study, find: Find, *, limit_epochs: int) -> list[Claim]:
    """Claims of the paper that this study has runs for."""
    cells = [cell for cell in study.all_cells() if find(cell)]
    if study.target is not None:
        return list(_table_claims(study, cells, find, limit_epochs))
    return list(_figure_claims(study, cells, find, limit_epochs))


def _blocks(cells: Iterable[Cell], vary: str, fixed: str) -> list[list[Cell]]:
    """PBM cells that differ in one number only, in its order."""
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
