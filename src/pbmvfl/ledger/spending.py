"""What a book's sessions add up to, for each of a dataset's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pbmvfl.ledger.limits import Limit, Rates
from pbmvfl.privacy.conversion import epsilon_from_rdp
from pbmvfl.privacy.orders import ORDERS
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.schedule import Split

if TYPE_CHECKING:
    from pbmvfl.ledger.ledger import Ledger, LedgerEntry

_Numbers = npt.NDArray[np.int64]
#: Rounds kept aside before they are added to the rows.
_MANY = 256


class RowNumbers:
    """One number for each of the owner's row ids, over all lists that the dataset's sessions name.

    Row 7 and a row that is named "7" are one row. "007" is another name.
    """

    def __init__(self, ledger: Ledger, dataset: str) -> None:
        self._ledger = ledger
        self._known: dict[str, int] = {}  # named rows, in the order in which they were named first
        self._decimal: list[int] = []  # of each of them the number that it is a name for, or -1
        self._lists: dict[str, _Numbers] = {}  # by reference: which of the known rows a list names
        self._placed: dict[str, _Numbers] = {}  # by reference: where those rows stand, until a larger range comes
        self._largest_range = 0
        for entry in ledger.sessions(dataset):
            for reference in (entry.train_ids, entry.test_ids):
                self.numbers(reference)

    @property
    def count(self) -> int:
        return self._largest_range + int(np.count_nonzero(~self._is_numbered()))

    def numbers(self, reference: str) -> _Numbers:
        """Where the rows of a list stand: numbered rows at their number, other names after all of them.

        Sessions repeat their lists, and a list can name millions of rows: each is unpacked once, then kept.
        """
        if reference in self._placed:
            return self._placed[reference]
        if reference not in self._lists:
            ids = self._ledger.read_ids(reference)
            if isinstance(ids, range):
                if ids.stop > self._largest_range:  # other names move up to make room
                    self._largest_range = ids.stop
                    self._placed = {}
                return np.arange(ids.start, ids.stop, dtype=np.int64)
            self._lists[reference] = np.fromiter(map(self._index, ids), dtype=np.int64, count=len(ids))
        self._placed[reference] = _kept(self._places()[self._lists[reference]])
        return self._placed[reference]

    def _index(self, name: str) -> int:
        found = self._known.setdefault(name, len(self._known))
        if found == len(self._decimal):
            self._decimal.append(_number_named(name))
        return found

    def _is_numbered(self) -> npt.NDArray[np.bool_]:
        decimal = np.array(self._decimal, dtype=np.int64)
        return (decimal >= 0) & (decimal < self._largest_range)

    def _places(self) -> _Numbers:
        numbered = self._is_numbered()
        return np.where(numbered, self._decimal, self._largest_range - 1 + np.cumsum(~numbered))


def _number_named(name: str) -> int:
    """The row number that a name spells without a sign or leading zeros; -1 for any other name."""
    if name.isascii() and name.isdecimal() and (name == "0" or name[0] != "0") and len(name) <= 18:
        return int(name)
    return -1


def _kept(rows: _Numbers) -> _Numbers:
    """Read-only, since all sessions with the same list share it."""
    rows.flags.writeable = False
    return rows


class Spent:
    """Divergence at one order: for each row by itself, and for all of them alike.

    Rounds are added to the rows in bulk, as long as even their sum on one row could not matter.
    """

    def __init__(self, num_rows: int) -> None:
        self._rows = np.zeros(num_rows)
        self._worst = 0.0
        self._pending: list[tuple[_Numbers, float]] = []
        self._pending_sum = 0.0
        self.everywhere = 0.0

    @property
    def rows(self) -> npt.NDArray[np.float64]:
        """What each row has by itself."""
        for rows, own in self._pending:
            self._rows[rows] += own  # rows of a round are different from each other
        if self._pending:
            self._worst = float(self._rows.max())
        self._pending, self._pending_sum = [], 0.0
        return self._rows

    @property
    def worst(self) -> float:
        """Of the row that has most."""
        return float(self.rows.max(initial=0.0)) + self.everywhere

    def add(self, rows: _Numbers, own: float, everywhere: float) -> None:
        """Charge one round: `own` to each of its rows, `everywhere` to all rows."""
        if own:
            self._pending.append((rows, own))
            self._pending_sum += own
        self.everywhere += everywhere

    def within(self, budget: float) -> bool:
        """Whether no row has more than the budget. False for anything that is not a number."""
        if len(self._pending) < _MANY and self._worst + self._pending_sum + self.everywhere <= budget:
            return True
        return self.worst <= budget


def spending(ledger: Ledger, dataset: str, limit: Limit, *, rows: RowNumbers | None = None) -> Spent:
    """Everything that the book charges to a dataset, at a limit's order."""
    rows = rows if rows is not None else RowNumbers(ledger, dataset)
    spent = Spent(rows.count)
    started: set[str] = set()
    for entry in ledger.sessions(dataset):
        rates = Rates.of(entry.terms, limit)
        first_of_run = entry.first_round == 0 and entry.run not in started
        _add_session(spent, entry, rates, rows, first_of_run=first_of_run)
        if entry.charged_until > entry.first_round:
            started.add(entry.run)
    return spent


def _add_session(spent: Spent, entry: LedgerEntry, rates: Rates, rows: RowNumbers, *, first_of_run: bool) -> None:
    if entry.charged_until <= entry.first_round:
        return
    schedule = entry.terms.schedule
    if rates.counts_rows:
        numbers = {Split.TRAIN: rows.numbers(entry.train_ids), Split.TEST: rows.numbers(entry.test_ids)}
        number = entry.first_round
        while number < entry.charged_until:
            first, end = schedule.pass_of(number)
            if number == first and end <= entry.charged_until and not rates.couples_rows:  # every row once
                kind = schedule.kind(number)
                spent.add(numbers[kind.split], rates.for_row(kind, 1), 0.0)
                number = end
                continue
            current = schedule[number]
            spent.add(numbers[current.kind.split][current.rows], rates.for_row(current.kind, current.num_rows), 0.0)
            number += 1
    first = entry.first_round
    spent.everywhere += rates.for_all(schedule.kind(first), schedule.num_rows(first), first_of_run=first_of_run)
    for kind, uses in schedule.total_uses(first + 1, entry.charged_until).items():
        if uses:
            spent.everywhere += rates.kinds[kind].everywhere * uses


def fixed_plan_epsilon(
    ledger: Ledger, dataset: str, *, unit: Unit, accounting: Accounting, colluding_parties: int, delta: float
) -> float:
    """The whole book's epsilon at the best order: a valid bound only if all its plans were fixed before the first run.

    A limit never uses it. It is what the same releases would cost had nobody looked at results in between.
    """
    rows = RowNumbers(ledger, dataset)
    orders = ORDERS[2::8]  # a subset gives a bound too, and the book is gone through once for each
    worst = np.zeros(len(orders))
    for i, order in enumerate(orders):
        limit = Limit(
            unit=unit, accounting=accounting, colluding_parties=colluding_parties, epsilon=1.0, delta=delta, order=order
        )
        worst[i] = spending(ledger, dataset, limit, rows=rows).worst
    return epsilon_from_rdp(worst, delta, orders)[0]
