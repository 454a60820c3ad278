"""Sums of a ledger's sessions for each of a dataset's rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from pbmvfl.ledger.limits import GAUSSIAN_ORDER, Cost, Limit, Rates
from pbmvfl.plan.round_kinds import Split
from pbmvfl.privacy.accounting import TrainingRun, charges, rdp_curve
from pbmvfl.privacy.composition import Losses, NoLosses
from pbmvfl.privacy.conversion import epsilon_from_rdp
from pbmvfl.privacy.events import Event, ReleaseEvent, UpdateEvent
from pbmvfl.privacy.gaussian_filter import epsilon_in_turn
from pbmvfl.privacy.orders import ORDERS
from pbmvfl.privacy.units import Accounting, Unit

if TYPE_CHECKING:
    from pbmvfl.ledger.session_terms import SessionTerms
    from pbmvfl.ledger.store import LedgerEntry, Records

_Numbers = npt.NDArray[np.int64]
#: A subset of the orders gives a bound too, and a ledger is gone through once for each.
_FEW_ORDERS = ORDERS[2::8]
#: Rounds kept aside before they are added to the rows.
_MANY = 256
_NO_ROWS: _Numbers = np.zeros(0, dtype=np.int64)


class RowNumbers:
    """One number for each of the owner's row ids, over all lists that the dataset's sessions name.

    Row 7 and a row that is named "7" are one row. "007" is another name.
    """

    def __init__(self, ledger: Records, dataset: str) -> None:
        self._ledger = ledger
        self._names: list[str] = []  # named rows, in the order in which they were named first
        self._known: dict[str, int] | None = {}  # which of them a name is
        self._decimal = _NO_ROWS  # of each of them the number that it is a name for, or -1
        self._lists: dict[str, _Numbers] = {}  # by reference: which of the known rows a list names
        self._placed: dict[str, _Numbers] = {}  # by reference: where those rows stand, until a larger range comes
        self._largest_range = 0
        for entry in ledger.sessions(dataset):
            for reference in (entry.train_ids, entry.test_ids):
                self.numbers(reference)
        self._known = None  # larger than all the rest, and seldom needed again

    @property
    def count(self) -> int:
        return self._largest_range + int(np.count_nonzero(~self._is_numbered()))

    def numbers(self, reference: str) -> _Numbers:
        """Return the places of a list's rows: numbered rows at their number, other names after all of them.

        Sessions repeat their lists, and a list can name millions of rows: each is unpacked once, then kept.
        """
        if reference in self._placed:
            return self._placed[reference]
        if reference not in self._lists:
            ids = self._ledger.read_ids(reference)
            if isinstance(ids, range):
                self._make_room(ids)
                return np.arange(ids.start, ids.stop, dtype=np.int64)
            self._lists[reference] = self._indices(ids)
        self._placed[reference] = _kept(self._places()[self._lists[reference]])
        return self._placed[reference]

    def numbers_of(self, *lists: Sequence[str] | range) -> list[_Numbers]:
        """Return the places of rows that no session has named yet. All others may have moved: look them up again."""
        found = [None if isinstance(ids, range) else self._indices([str(name) for name in ids]) for ids in lists]
        for ids in lists:
            if isinstance(ids, range):
                self._make_room(ids)
        places = self._places()
        return [
            np.arange(ids.start, ids.stop, dtype=np.int64) if isinstance(ids, range) else places[indices]
            for ids, indices in zip(lists, found, strict=True)
        ]

    def _make_room(self, ids: range) -> None:
        """Names that are no numbers move up behind the numbered rows."""
        if ids.stop > self._largest_range:
            self._largest_range = ids.stop
            self._placed = {}

    def _indices(self, ids: Sequence[str]) -> _Numbers:
        if self._known is None:
            self._known = {name: number for number, name in enumerate(self._names)}
        known, before = self._known, len(self._known)
        found = [known.setdefault(name, len(known)) for name in ids]
        new = tuple(islice(known, before, None))
        self._names += new
        self._decimal = np.concatenate((self._decimal, _numbers_named(new)))
        return np.array(found, dtype=np.int64)

    def _is_numbered(self) -> npt.NDArray[np.bool_]:
        return (self._decimal >= 0) & (self._decimal < self._largest_range)

    def _places(self) -> _Numbers:
        numbered = self._is_numbered()
        return np.where(numbered, self._decimal, self._largest_range - 1 + np.cumsum(~numbered))


@lru_cache(maxsize=4)  # parties of a simulation name the same rows
def _numbers_named(names: tuple[str, ...]) -> _Numbers:
    return _kept(np.array(list(map(_number_named, names)), dtype=np.int64))


def _number_named(name: str) -> int:
    """The row number that a name spells without a sign or leading zeros; -1 for any other name."""
    if not "0" <= name[:1] <= "9":  # most names, and at once
        return -1
    if name.isascii() and name.isdecimal() and (name == "0" or name[0] != "0") and len(name) <= 18:
        return int(name)
    return -1


def _kept(rows: _Numbers) -> _Numbers:
    """Read-only, since all sessions with the same list share it."""
    rows.flags.writeable = False
    return rows


#: Row numbers of rounds that are added in bulk, at most: those of a large table would take more memory than its ledger.
_MOST_PENDING = 1 << 20


class Spent:
    """Sums by a limit: for each row by itself, and for all of them alike.

    Rounds are added to the rows in bulk, as long as even their sum on one row could not matter. Pure epsilons add up by
    themselves on a row for which nothing else has added up yet; from then on they count like all others.
    """

    def __init__(self, num_rows: int, limit: Limit) -> None:
        self._limit, self._budget = limit, limit.budget
        self._rows = np.zeros(num_rows)
        self._worst = 0.0
        self._pending: list[tuple[_Numbers, float]] = []
        self._pending_sum, self._pending_rows = 0.0, 0
        self.everywhere = 0.0
        #: Pure epsilons of each row, and how much else its limit leaves beside them; None as long as there are none.
        self._pure: npt.NDArray[np.float64] | None = None
        self._left = np.zeros(0)
        self._pure_everywhere = 0.0

    @property
    def rows(self) -> npt.NDArray[np.float64]:
        """Return what each row has by itself, beside pure epsilons."""
        for rows, own in self._pending:
            self._rows[rows] += own  # rows of a round are different from each other
        if self._pending:
            self._worst = float(self._rows.max())
        self._pending, self._pending_sum, self._pending_rows = [], 0.0, 0
        return self._rows

    @property
    def worst(self) -> float:
        """Return the sum of the row that has most, beside pure epsilons."""
        return float(self.rows.max(initial=0.0)) + self.everywhere

    @property
    def epsilon(self) -> float:
        """Return the epsilon of the row that has most."""
        if self._pure is None:
            return self._limit.epsilon_of(self.worst, self._pure_everywhere)
        amounts = self.rows + self.everywhere
        found = [
            self._limit.epsilon_of(float(amounts[self._pure == pure].max()), float(pure) + self._pure_everywhere)
            for pure in np.unique(self._pure)
        ]
        return max(found, default=0.0)

    def copy_of_worst(self, num_rows: int) -> Spent:
        """So many rows, each with the most that any row has here."""
        copy = Spent(num_rows, self._limit)
        copy.everywhere, copy._pure_everywhere = self.worst, self._pure_everywhere
        if self._pure is not None:
            copy._pure_everywhere += float(self._pure.max(initial=0.0))
        copy._look_again()
        return copy

    def add(self, rows: _Numbers, own: Cost, everywhere: Cost) -> None:
        """Charge one round: `own` to each of its rows, `everywhere` to all rows."""
        if own.amount and math.isfinite(own.pure):
            self._add_pure(rows, own)
        elif own.amount:
            self._pending.append((rows, own.amount))
            self._pending_sum += own.amount
            self._pending_rows += len(rows)
            if self._pending_rows > _MOST_PENDING:
                _ = self.rows
        if everywhere.amount:
            if math.isfinite(everywhere.pure) and not self.worst:
                self._pure_everywhere += everywhere.pure
                self._look_again()
            else:
                self.everywhere += everywhere.amount

    def _add_pure(self, rows: _Numbers, own: Cost) -> None:
        untouched = (self.rows[rows] == 0) & (self.everywhere == 0)
        first, others = rows[untouched], rows[~untouched]
        if len(others):
            self._rows[others] += own.amount
            self._worst = max(self._worst, float(self._rows[others].max()))
        if len(first):
            if self._pure is None:
                self._pure = np.zeros(len(self._rows))
                self._left = np.full(len(self._rows), self._limit.left_beside(self._pure_everywhere))
            self._pure[first] += own.pure
            self._left[first] = self._left_beside(self._pure[first])

    def _look_again(self) -> None:
        """Compute what is left after a pure epsilon for all rows."""
        self._budget = self._limit.left_beside(self._pure_everywhere)
        if self._pure is not None:
            self._left = self._left_beside(self._pure)

    def _left_beside(self, pure: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        values, where = np.unique(pure, return_inverse=True)
        return np.array([self._limit.left_beside(value + self._pure_everywhere) for value in values.tolist()])[where]

    def within_limit(self) -> bool:
        """Return whether no row has more than its limit. False for anything that is not a number."""
        if self._pure is not None:
            return bool(np.all(self.rows + self.everywhere <= self._left))
        if len(self._pending) < _MANY and self._worst + self._pending_sum + self.everywhere <= self._budget:
            return True
        return self.worst <= self._budget


def spending(ledger: Records, dataset: str, limit: Limit, *, rows: RowNumbers | None = None) -> Spent:
    """Return everything that the ledger charges to a dataset, as a limit counts."""
    rows = rows if rows is not None else RowNumbers(ledger, dataset)
    spent = Spent(rows.count, limit)
    started: set[str] = set()
    for entry in ledger.charged_to(dataset):
        rates = _rates(entry.terms, limit, entry.dataset, dataset)
        first_of_run = entry.first_round == 0 and entry.run not in started
        _add_session(spent, entry, rates, rows, first_of_run=first_of_run)
        if entry.charged_until > entry.first_round:
            started.add(entry.run)
    return spent


class Account(NamedTuple):
    """One limit that a session's releases count against, and what was spent of it before."""

    dataset: str
    limit: Limit
    rates: Rates
    spent: Spent


def accounts(
    ledger: Records, dataset: str, terms: SessionTerms, limits: Mapping[str, Sequence[Limit]], *, rows: RowNumbers
) -> list[Account]:
    """Return the accounts of a session: of its own dataset, and of others whose rows its first weights may know.

    Args:
        ledger: The ledger that the session is charged to.
        dataset: The session's own.
        terms: What the session may release.
        limits: All limits of the ledger, by dataset.
        rows: The numbers of the dataset's rows.
    """
    found = []
    for name in sorted(limits, key=lambda each: (each != dataset, each)):
        if name != dataset and not terms.may_know(name):
            continue
        known = rows if name == dataset else RowNumbers(ledger, name)
        for limit in limits[name]:
            spent = spending(ledger, name, limit, rows=known)
            found.append(Account(name, limit, _rates(terms, limit, dataset, name), spent))
    return found


def _rates(terms: SessionTerms, limit: Limit, own: str, charged: str) -> Rates:
    """Return what a session of one dataset adds to the rows of the same or another one."""
    rates = Rates.of(terms, limit)
    return rates if own == charged else rates.elsewhere


def _add_session(spent: Spent, entry: LedgerEntry, rates: Rates, rows: RowNumbers, *, first_of_run: bool) -> None:
    """Pass by pass, in the order of the rounds."""
    schedule = entry.terms.schedule
    ids = {Split.TRAIN: entry.train_ids, Split.TEST: entry.test_ids}
    # Of a session that charges all rows alike no row is looked up: those of another dataset have no number here.
    numbers = {split: rows.numbers(ids[split]) if rates.counts_rows else _NO_ROWS for split in ids}
    number, until = entry.first_round, entry.charged_until
    while number < until:
        first, end = schedule.pass_of(number)
        kind = schedule.kind(number)
        opens_run = first_of_run and number == entry.first_round
        # No row is twice in a pass, so its rounds are added together where they have one price.
        stop = number + 1 if opens_run or rates.couples_rows else min(end, until)
        count = schedule.total_uses(number, stop)[kind]
        own, everywhere = rates.for_row(kind, count), rates.for_all(kind, count, first_of_run=opens_run)
        used = numbers[kind.split] if own.amount else _NO_ROWS
        if len(used) and (number, stop) != (first, end):
            used = used[schedule.rows_between(number, stop)]
        elif len(used) > count:  # a pass over one part of the rows
            used = used[schedule.part_of(kind)]
        spent.add(used, own, everywhere)
        number = stop


def fixed_plan_epsilon(
    ledger: Records, dataset: str, *, unit: Unit, accounting: Accounting, colluding_parties: int, delta: float
) -> float:
    """Return the ledger's epsilon at the best order: valid only if all plans were fixed before the first run.

    A limit never uses it. It is what the same releases would cost had nobody looked at results in between.
    """
    rows = RowNumbers(ledger, dataset)
    worst = np.zeros(len(_FEW_ORDERS))
    for i, order in enumerate(_FEW_ORDERS):
        limit = Limit(
            unit=unit, accounting=accounting, colluding_parties=colluding_parties, epsilon=1.0, delta=delta, order=order
        )
        worst[i] = spending(ledger, dataset, limit, rows=rows).worst
    # Squared shifts of Gaussian noise are a bound too, and mostly the better one where there is nothing else.
    as_gaussian = spending(ledger, dataset, replace(limit, order=GAUSSIAN_ORDER), rows=rows)
    return min(epsilon_from_rdp(worst, delta, _FEW_ORDERS)[0], as_gaussian.epsilon)


def epsilon_of_run(run: TrainingRun, unit: Unit, *, delta: float) -> float:
    """Return the strict epsilon that a ledger counts for a run against the server, if it has no other.

    Args:
        run: The releases and updates.
        unit: A cell or a record.
        delta: Above 0 and below 1.
    """
    curve = rdp_curve(run, unit, Accounting.STRICT, orders=_FEW_ORDERS)
    in_turn = [
        epsilon_in_turn([(count, _losses(event, unit)) for count, event in counted], delta)
        for counted in charges(run, unit, Accounting.STRICT)
    ]
    return min(epsilon_from_rdp(curve, delta, _FEW_ORDERS)[0], max(in_turn, default=0.0))


def _losses(event: Event, unit: Unit) -> Losses:
    if isinstance(event, ReleaseEvent):
        return event.losses(unit)
    return event.losses() if isinstance(event, UpdateEvent) else NoLosses()
