"""What a session would do to the limits of a book, before anything of it is released or written.

The same additions in the same order as `Charging` makes them, so that a run is refused beforehand exactly if it would
be refused on its way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pbmvfl.ledger.limits import Limit, Rates
from pbmvfl.ledger.session_terms import Terms
from pbmvfl.ledger.spending import RowNumbers, Spent, accounts, spending
from pbmvfl.plan.schedule import Split

if TYPE_CHECKING:
    from pbmvfl.ledger.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one limit says to a session."""

    #: Whose limit it is: the session's own dataset, or another one whose rows its first weights may know.
    dataset: str
    limit: Limit
    #: Epsilon of the row that has most, over the whole dataset, as the book has it now.
    spent: float
    #: The same after the session's last round, as if the limit let it get there.
    will_be: float
    #: The first round that the limit refuses; None if it refuses none.
    stops_at: int | None
    #: Epochs that are complete before that round, or all of them.
    epochs: float


def forecasts(
    ledger: Ledger,
    dataset: str,
    terms: Terms,
    train_ids: Sequence[str] | range,
    test_ids: Sequence[str] | range,
    *,
    first_round: int = 0,
    until: int | None = None,
    run_started: bool = False,
) -> tuple[Forecast, ...]:
    """What every limit says that a session on these rows counts against; none where there are no limits.

    Rounds from `until` on are not charged: all that they tell was told before.
    """
    _, limits, _ = ledger._versioned_limits()
    if not limits:
        return ()
    rounds = range(first_round, len(terms.schedule) if until is None else until)
    rows = RowNumbers(ledger, dataset)
    train, test = rows.numbers_of(train_ids, test_ids)
    numbers = {Split.TRAIN: train, Split.TEST: test}
    found = []
    for account in accounts(ledger, dataset, terms, limits, rows=rows):
        before = account.spent.epsilon
        stops_at = _run(account.spent, terms, account.rates, numbers, rounds, run_started=run_started)
        found.append(_forecast(account.dataset, account.limit, before, account.spent, stops_at, terms))
    return tuple(found)


def forecasts_for_plan(ledger: Ledger, dataset: str, terms: Terms) -> tuple[Forecast, ...]:
    """The same for a new run that nobody has named rows for: those of the last training there, if it has as many."""
    schedule = terms.schedule
    for entry in reversed(ledger.sessions(dataset)):
        if all(kind.split is Split.TEST for kind in entry.terms.schedule.kinds):
            continue  # a model was asked: its training rows are not named there
        train, test = ledger.read_ids(entry.train_ids), ledger.read_ids(entry.test_ids)
        if len(train) == schedule.num_samples and len(test) >= schedule.num_test_samples:
            return forecasts(ledger, dataset, terms, train, test[: schedule.num_test_samples])
    return forecasts_for_any_rows(ledger, dataset, terms)


def forecasts_for_any_rows(ledger: Ledger, dataset: str, terms: Terms) -> tuple[Forecast, ...]:
    """The same for a new run whose rows are not known yet: each may be the one on which most was spent."""
    train, test = (terms.schedule.rows_of(split) for split in (Split.TRAIN, Split.TEST))
    numbers = {Split.TRAIN: np.arange(train), Split.TEST: np.arange(train, train + test)}
    found = []
    for limit in ledger.limits(dataset):
        spent = spending(ledger, dataset, limit)
        after = spent.copy_of_worst(train + test)
        rounds = range(len(terms.schedule))
        stops_at = _run(after, terms, Rates.of(terms, limit), numbers, rounds, run_started=False)
        found.append(_forecast(dataset, limit, spent.epsilon, after, stops_at, terms))
    return tuple(found)


def _run(
    spent: Spent,
    terms: Terms,
    rates: Rates,
    numbers: Mapping[Split, npt.NDArray[np.int64]],
    rounds: range,
    *,
    run_started: bool,
) -> int | None:
    """Add all rounds; the first one that is refused."""
    stops_at: int | None = None
    for number in rounds:
        current = terms.schedule[number]
        opens_run = number == rounds.start and not run_started
        everywhere = rates.for_all(current.kind, current.num_rows, first_of_run=opens_run)
        own = rates.for_row(current.kind, current.num_rows)
        spent.add(numbers[current.kind.split][current.rows], own, everywhere)
        if stops_at is None and not spent.within_limit():
            stops_at = number
    return stops_at


def _forecast(dataset: str, limit: Limit, before: float, after: Spent, stops_at: int | None, terms: Terms) -> Forecast:
    done = len(terms.schedule) if stops_at is None else stops_at
    return Forecast(
        dataset=dataset,
        limit=limit,
        spent=before,
        will_be=after.epsilon,
        stops_at=stops_at,
        epochs=terms.schedule.epochs_before(done),
    )
