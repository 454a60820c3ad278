"""What people get to read of a ledger: notes beside the numbers, and the whole of it as plain values."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from pbmvfl.ledger.database import FORMAT
from pbmvfl.ledger.spending import spending
from pbmvfl.plan.schedule import Split

if TYPE_CHECKING:
    from pbmvfl.ledger.ledger import Ledger, LedgerEntry


def notes_of(book: Ledger, dataset: str) -> list[str]:
    """What a reader should know beside a dataset's numbers."""
    notes: list[str] = []
    permitted: list[str] = []
    sessions = book.sessions(dataset)
    numbers, known = {entry.id for entry in sessions}, book.datasets()
    prints = {(compared_by(entry), entry.fingerprint) for entry in sessions if entry.fingerprint}
    found = max(Counter(rows for rows, _ in prints).values(), default=0)
    if found > 1:
        notes.append(
            f"its values changed between runs ({found} different fingerprints); rows keep what was spent on them"
        )
    others = [entry for entry in book.charged_to(dataset) if entry.dataset != dataset]
    if names := sorted({entry.dataset for entry in others if entry.charged_until > entry.first_round}):
        notes.append(
            f"what was released of {', '.join(map(repr, names))} with weights that may know its rows is counted for "
            "every one of them"
        )
    for event in book.history():
        if event.what == "migrated" and numbers & set(event.values["sessions"]):
            notes.append("its runs before format 2 have no fingerprint any more: a change of values since is not seen")
        if event.what == "accepted":
            notes.append(f"its owner accepted the book on {event.at}, which {event.values['why']}")
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


def counted(number: int, name: str) -> str:
    """1 run, 2,000 runs."""
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def session_words(entry: LedgerEntry) -> str:
    """What a session did, as far as it was charged."""
    first, until = entry.first_round, entry.charged_until
    if until <= first:
        return "nothing charged"
    schedule = entry.terms.schedule
    said = []
    uses = {kind: count for kind, count in schedule.total_uses(first, until).items() if count}
    for kind, count in uses.items():
        if kind.trains:
            passes = count / schedule.rows_of(kind.split)
            epochs = f"{passes:.4g} epoch" + ("" if passes == 1 else "s")
            said.append(f"trained {epochs} on {counted(schedule.num_samples, 'row')}")
        elif kind.split is Split.TEST:
            said.append(f"{counted(count, 'row')} predicted")
        elif kind.statistic:
            said.append(f"noisy {kind.statistic} told" if kind.told else "columns prepared")
        else:
            said.append(f"{kind.name} of {counted(count, 'row')}")
    words = f", {entry.terms.words}" if any(kind.releases for kind in uses) else ""
    rounds = f"round {first}" if until == first + 1 else f"rounds {first} to {until - 1}"
    return f"{rounds}: {', '.join(dict.fromkeys(said))}{words}"


def exported(book: Ledger) -> dict[str, Any]:
    """The whole book as plain values, with what each limit has left."""
    datasets: dict[str, Any] = {}
    for dataset in book.datasets():
        limits = []
        for limit in book.limits(dataset):
            spent = spending(book, dataset, limit).epsilon
            order = limit.order if np.isfinite(limit.order) else None
            said = {"counting": limit.counting, "order": order, "spent_epsilon": spent if np.isfinite(spent) else "inf"}
            limits.append({**asdict(limit), **said})
        sessions = [_session(entry) for entry in book.sessions(dataset)]
        datasets[dataset] = {"limits": limits, "sessions": sessions, "notes": book.notes(dataset)}
    return {
        "format": FORMAT,
        "owner": book.owner,
        "datasets": datasets,
        "history": [asdict(event) for event in book.history()],
    }


def _session(entry: LedgerEntry) -> dict[str, Any]:
    # Not the fingerprint: whoever had the key could try values against it.
    values = {field.name: getattr(entry, field.name) for field in fields(entry) if field.name != "fingerprint"}
    return {**values, "terms": json.loads(entry.terms.to_json()), "row_releases": entry.row_releases}
