"""Forecast of a session's charges against the limits of a ledger, before anything of it is released or written.

The same additions in the same order as `Charging` makes them, so that a run is refused beforehand exactly if it would
be refused on its way.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pbmvfl._text import counted, for_json
from pbmvfl.ledger.database import FORMAT
from pbmvfl.ledger.limits import Limit, Rates
from pbmvfl.ledger.session_terms import SessionTerms
from pbmvfl.ledger.spending import RowNumbers, Spent, accounts, spending
from pbmvfl.plan.round_kinds import Split
from pbmvfl.plan.schedule import Round, Schedule

if TYPE_CHECKING:
    from pbmvfl.ledger.ledger import Ledger
    from pbmvfl.ledger.store import LedgerEntry, Records


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Answer of one limit to a session."""

    #: Whose limit it is: the session's own dataset, or another one whose rows its first weights may know.
    dataset: str
    limit: Limit
    #: Epsilon of the row that has most, over the whole dataset, as the ledger has it now.
    spent: float
    #: The same after the session's last round, as if the limit let it get there.
    will_be: float
    #: The first round that the limit refuses; None if it refuses none.
    stops_at: int | None
    #: Epochs that are complete before that round, or all of them.
    epochs: float


def forecasts(
    ledger: Records,
    dataset: str,
    terms: SessionTerms,
    train_ids: Sequence[str] | range,
    test_ids: Sequence[str] | range,
    *,
    first_round: int = 0,
    charged_parts: Callable[[], Iterable[Round]] | None = None,
    run_started: bool = False,
) -> tuple[Forecast, ...]:
    """Return the answer of every limit that a session on these rows counts against.

    Args:
        ledger: The ledger.
        dataset: The session's own.
        terms: What the session may release.
        train_ids: Its training rows.
        test_ids: Its predicted rows.
        first_round: The first round that is charged.
        charged_parts: What is charged of the plan's rounds, where that is not all of them: `RowByRow.charged_parts`.
        run_started: Whether the run has charged a round before.
    """
    limits = ledger.all_limits()
    if not limits:
        return ()
    rounds = partial(_rounds, terms.schedule, first_round) if charged_parts is None else charged_parts
    run_started = run_started or charged_parts is not None
    rows = RowNumbers(ledger, dataset)
    train, test = rows.numbers_of(train_ids, test_ids)
    numbers = {Split.TRAIN: train, Split.TEST: test}
    found = []
    for account in accounts(ledger, dataset, terms, limits, rows=rows):
        before = account.spent.epsilon
        stops_at = _run(account.spent, account.rates, numbers, rounds(), run_started=run_started)
        found.append(_forecast(account.dataset, account.limit, before, account.spent, stops_at, terms))
    return tuple(found)


def forecasts_for_plan(ledger: Records, dataset: str, terms: SessionTerms) -> tuple[Forecast, ...]:
    """Return forecasts of a new run without named rows: for those of the last training there, if it has as many."""
    schedule = terms.schedule
    for entry in reversed(ledger.sessions(dataset)):
        if all(kind.split is Split.TEST for kind in entry.terms.schedule.kinds):
            continue  # a model was asked: its training rows are not named there
        train, test = ledger.read_ids(entry.train_ids), ledger.read_ids(entry.test_ids)
        if len(train) == schedule.num_samples and len(test) >= schedule.num_test_samples:
            return forecasts(ledger, dataset, terms, train, test[: schedule.num_test_samples])
    return forecasts_for_any_rows(ledger, dataset, terms)


def forecasts_for_any_rows(ledger: Records, dataset: str, terms: SessionTerms) -> tuple[Forecast, ...]:
    """Return forecasts of a new run whose rows are not known: each may be the one on which most was spent."""
    train, test = (terms.schedule.rows_of(split) for split in (Split.TRAIN, Split.TEST))
    numbers = {Split.TRAIN: np.arange(train), Split.TEST: np.arange(train, train + test)}
    found = []
    for limit in ledger.all_limits().get(dataset, []):
        spent = spending(ledger, dataset, limit)
        after = spent.copy_of_worst(train + test)
        stops_at = _run(after, Rates.of(terms, limit), numbers, terms.schedule, run_started=False)
        found.append(_forecast(dataset, limit, spent.epsilon, after, stops_at, terms))
    return tuple(found)


def _rounds(schedule: Schedule, first_round: int) -> Iterator[Round]:
    return (schedule[number] for number in range(first_round, len(schedule)))


def _run(
    spent: Spent,
    rates: Rates,
    numbers: Mapping[Split, npt.NDArray[np.int64]],
    rounds: Iterable[Round],
    *,
    run_started: bool,
) -> int | None:
    """Add all rounds, and return the first one that is refused."""
    stops_at: int | None = None
    for i, current in enumerate(rounds):
        opens_run = i == 0 and not run_started
        everywhere = rates.for_all(current.kind, current.num_rows, first_of_run=opens_run)
        own = rates.for_row(current.kind, current.num_rows)
        spent.add(numbers[current.kind.split][current.rows], own, everywhere)
        if stops_at is None and not spent.within_limit():
            stops_at = current.number
    return stops_at


def _forecast(
    dataset: str, limit: Limit, before: float, after: Spent, stops_at: int | None, terms: SessionTerms
) -> Forecast:
    done = len(terms.schedule) if stops_at is None else stops_at
    return Forecast(
        dataset=dataset,
        limit=limit,
        spent=before,
        will_be=after.epsilon,
        stops_at=stops_at,
        epochs=terms.schedule.epochs_before(done),
    )


# --- What people get to read of a ledger: notes beside the numbers, and the whole of it as plain values ---


def notes_of(ledger: Ledger, dataset: str) -> list[str]:
    """Return what a reader should know beside a dataset's numbers."""
    notes: list[str] = []
    permitted: list[str] = []
    sessions = ledger.sessions(dataset)
    numbers, known = {entry.id for entry in sessions}, ledger.datasets()
    prints = {(compared_by(entry), entry.fingerprint) for entry in sessions if entry.fingerprint}
    found = max(Counter(rows for rows, _ in prints).values(), default=0)
    if found > 1:
        notes.append(
            f"its values changed between runs ({found} different fingerprints); rows keep what was spent on them"
        )
    others = [entry for entry in ledger.charged_to(dataset) if entry.dataset != dataset]
    if names := sorted({entry.dataset for entry in others if entry.charged_until > entry.first_round}):
        notes.append(
            f"what was released of {', '.join(map(repr, names))} with weights that may know its rows is counted for "
            "every one of them"
        )
    for event in ledger.history():
        if event.what == "migrated" and numbers & set(event.values["sessions"]):
            notes.append("its runs before format 2 have no fingerprint any more: a change of values since is not seen")
        if event.what == "accepted":
            notes.append(f"its owner accepted the ledger on {event.at}, which {event.values['why']}")
        if event.what == "allowed" and event.values["dataset"] == dataset:
            notes.append(f"its owner said on {event.at} that it is about other people than data with equal values")
        if event.what == "opened" and event.values["session"] in numbers and event.values["exact_metrics"]:
            permitted.append(event.at)
        # Rows under a name without a session or a limit may be any of the ledger's.
        concerned = event.values.get("dataset") == dataset or event.values.get("dataset") not in known
        if event.what == "exact" and concerned:
            permitted.append(event.at)
        if event.what == "uncharged" and concerned:
            notes.append(f"its owner permitted on {event.at} that {event.values['rows']:,} predictions are not charged")
    if permitted:
        times = "" if len(permitted) == 1 else f" and {counted(len(permitted) - 1, 'time')} before"
        notes.append(
            f"exact metrics of its rows were permitted on {permitted[-1]}{times}: they are outside every epsilon"
        )
    return list(dict.fromkeys(notes))


def why_charged(dataset: str) -> str:
    """Return why a session of another dataset counts against this one, and what to do about it."""
    return (
        f"The weights that the session begins with may know rows of {dataset!r}: begin with the plan's own network, or "
        "with public weights that the plan declares (first_weights)"
    )


def compared_by(entry: LedgerEntry) -> str:
    """Sessions with the same answer hold the same rows: all that train, and of those that do not, each list of rows."""
    trains = any(kind.split is Split.TRAIN for kind in entry.terms.schedule.kinds)
    return "" if trains else entry.test_ids


def session_words(entry: LedgerEntry) -> str:
    """Describe a session, as far as it was charged."""
    first, until = entry.first_round, entry.charged_until
    if until <= first:
        return "nothing charged"
    schedule = entry.terms.schedule
    said = []
    uses = {kind: count for kind, count in schedule.total_uses(first, until).items() if count}
    for kind, count in uses.items():
        if kind.trains:
            passes = count / schedule.size_of_part(kind)
            epochs = f"{passes:.4g} epoch" + ("" if passes == 1 else "s")
            said.append(f"trained {epochs} on {counted(schedule.size_of_part(kind), 'row')}")
        elif kind.split is Split.TEST:
            said.append(f"{counted(count, 'row')} predicted")
        elif kind.statistic:
            said.append(f"noisy {kind.statistic} told" if kind.told else "columns prepared")
        else:
            said.append(
                f"{counted(count, 'fusion row')} released" if kind.fuses else f"{kind.name} of {counted(count, 'row')}"
            )
    words = f", {entry.terms.words}" if any(kind.releases for kind in uses) else ""
    rounds = f"round {first}: " if until == first + 1 else f"rounds {first} to {until - 1}: "
    if all(kind.split is Split.TEST for kind in uses):
        rounds = ""  # rows may be charged one by one, and then rounds are no more than rows
    return f"{rounds}{', '.join(dict.fromkeys(said))}{words}"


def exported(ledger: Ledger) -> dict[str, Any]:
    """Return the whole ledger as plain values, with what each limit has left."""
    datasets: dict[str, Any] = {}
    for dataset in ledger.datasets():
        limits = []
        for limit in ledger.limits(dataset):
            spent = spending(ledger, dataset, limit).epsilon
            order = limit.order if np.isfinite(limit.order) else None
            said = {"counting": limit.counting, "order": order, "spent_epsilon": for_json(spent)}
            limits.append({**asdict(limit), **said})
        sessions = [_session(entry) for entry in ledger.sessions(dataset)]
        datasets[dataset] = {"limits": limits, "sessions": sessions, "notes": ledger.notes(dataset)}
    return {
        "format": FORMAT,
        "owner": ledger.owner,
        "datasets": datasets,
        "history": [asdict(event) for event in ledger.history()],
    }


def _session(entry: LedgerEntry) -> dict[str, Any]:
    # The fingerprint stays out: a reader who had the key could try values against it.
    values = {field.name: getattr(entry, field.name) for field in fields(entry) if field.name != "fingerprint"}
    return {**values, "terms": json.loads(entry.terms.to_json()), "row_releases": entry.row_releases}
