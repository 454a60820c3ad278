"""Epsilon over the rounds of a run: by the accountant, and by each limit of the parties' ledgers.

A path of the accountant ends at the epsilon in the run's own table. A path of a ledger follows the ledger's count for
one limit, including everything that the same rows had spent before the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.spending import RowNumbers, spending
from pbmvfl.plan.schedule import Schedule
from pbmvfl.privacy.accounting import TrainingRun, epsilon_bound
from pbmvfl.privacy.units import Accounting, Unit

if TYPE_CHECKING:
    from pbmvfl.federation.release_log import ReleasedRounds
    from pbmvfl.federation.results import Result
    from pbmvfl.ledger.ledger import Ledger
    from pbmvfl.ledger.store import LedgerEntry

#: Points of a path: enough for a smooth line, and few because each needs its own computation.
_POINTS = 24
#: Spans of rounds first <= r < until, in the order in which they were sent.
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class EpsilonPath:
    """Points (rounds sent, epsilon spent) against the server; `rows` is the split they apply to, "" for any row."""

    unit: Unit
    accounting: Accounting
    rows: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class LimitPath:
    """Epsilon over rounds by one limit; ledgers with equal numbers share one path."""

    ledgers: tuple[str, ...]
    limit: Limit
    points: tuple[tuple[int, float], ...]
    #: Epsilon in the ledger now; more than at the last point if the rows were used again since.
    spent_now: float


# --- By the accountant ---


def epsilon_paths(
    result: Result,
    *,
    delta: float,
    units: Sequence[Unit] = (Unit.CELL, Unit.RECORD),
    points: int = _POINTS,
) -> tuple[EpsilonPath, ...]:
    """Return a path for each unit, accounting and split; none if the noise is seeded and hides nothing."""
    if result.noise_is_seeded:
        return ()
    whole, plan = result.training_run, result.plan
    accountings = [each for each in Accounting if whole.has_joint_rounds or each is Accounting.STRICT]
    spans = _spans(result.sessions)
    moments = _moments([(plan.schedule, *span) for span in spans], points)
    runs = [
        (moment, plan.training_run(plan.schedule.uses(_until(spans, moment)), public_start=result.public_start))
        for moment in moments
    ]
    return tuple(
        EpsilonPath(
            unit=unit,
            accounting=accounting,
            rows=rows,
            points=((0, 0.0), *((moment, _epsilon(run, rows, unit, accounting, delta)) for moment, run in runs)),
        )
        for rows in splits_apart(whole) or ("",)
        for accounting in accountings
        for unit in units
    )


def splits_apart(run: TrainingRun) -> tuple[str, ...]:
    """Return the splits with a separate epsilon; none if one epsilon applies to all rows."""
    return run.splits if run.charges_by_split and len(run.splits) > 1 else ()


def _epsilon(run: TrainingRun, rows: str, unit: Unit, accounting: Accounting, delta: float) -> float:
    chosen = run.of_split(rows) if rows else run
    return epsilon_bound(chosen, unit, accounting, delta=delta).epsilon


def _spans(sessions: Iterable[ReleasedRounds]) -> Spans:
    found = ((session.first_round, session.charged_until) for session in sessions)
    return tuple((first, until) for first, until in found if until > first)


def _until(spans: Spans, moment: int) -> list[tuple[int, int]]:
    """Return the part of the spans within the first `moment` rounds sent."""
    sent = []
    for first, until in spans:
        length = min(until - first, moment)
        if length > 0:
            sent.append((first, first + length))
        moment -= length
    return sent


def _moments(spans: Sequence[tuple[Schedule, int, int]], points: int) -> list[int]:
    """Return the numbers of rounds sent, in spans of schedules, at which to compute epsilon.

    They are the ends of passes, where all rows have been used equally often, if these are enough.
    """
    ends, sent = [], 0
    for schedule, first, until in spans:
        number = first
        while number < until:
            number = min(schedule.pass_of(number)[1], until)
            ends.append(sent + number - first)
        sent += until - first
    chosen = ends if len(ends) >= points // 2 else sorted({*ends, *_evenly(range(1, sent + 1), points)})
    return _evenly(chosen, points)


def _evenly(values: Sequence[int], points: int) -> list[int]:
    """Return at most `points` evenly spaced values, including the last one."""
    step = max(1, -(-len(values) // points))
    return list(reversed(values[::-1][::step]))


# --- By the ledgers ---


class _AsOf:
    """Past state of a ledger, with the one method that `spending` needs."""

    def __init__(self, entries: Sequence[LedgerEntry]) -> None:
        self._entries = entries

    def charged_to(self, dataset: str) -> list[LedgerEntry]:
        del dataset
        return list(self._entries)


def limit_paths(
    ledgers: Iterable[tuple[str, Ledger]], dataset: str, sessions: Sequence[ReleasedRounds]
) -> tuple[LimitPath, ...]:
    """Return a path for each limit of the ledgers that have the run's sessions; equal paths are merged."""
    found: list[LimitPath] = []
    for name, ledger in ledgers:
        for path in _paths_of_ledger(name, ledger, dataset, {each.session for each in sessions}):
            for i, other in enumerate(found):
                if replace(path, ledgers=other.ledgers) == other:
                    found[i] = replace(other, ledgers=(*other.ledgers, name))
                    break
            else:
                found.append(path)
    return tuple(found)


def _paths_of_ledger(name: str, ledger: Ledger, dataset: str, own: set[str]) -> Iterable[LimitPath]:
    entries = ledger.charged_to(dataset)
    mine = [entry for entry in entries if entry.session in own]
    if not mine:
        return
    # A session that was resumed for predictions alone may have a schedule of its own in the ledger.
    spans = [(entry.terms.schedule, entry.first_round, entry.charged_until) for entry in mine]
    moments = [0, *_moments(spans, _POINTS)]
    rows = RowNumbers(ledger, dataset)
    for limit in ledger.limits(dataset):
        path = []
        for moment in moments:
            then = cast("Ledger", _AsOf(list(_as_of(entries, own, moment))))
            path.append((moment, spending(then, dataset, limit, rows=rows).epsilon))
        now = spending(ledger, dataset, limit, rows=rows).epsilon
        yield LimitPath(ledgers=(name,), limit=limit, points=tuple(path), spent_now=now)


def _as_of(entries: Sequence[LedgerEntry], own: set[str], moment: int) -> Iterator[LedgerEntry]:
    """Yield the entries as of the run's first `moment` rounds: earlier sessions included, later ones not."""
    for entry in entries:
        if entry.session not in own:
            yield entry
            continue
        length = min(entry.charged_until - entry.first_round, moment)
        if length > 0:
            yield replace(entry, charged_until=entry.first_round + length)
            moment -= length
        if not moment:
            return
