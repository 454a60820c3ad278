"""Charging a party's ledger, round by round and before the bytes leave, up to the limits that its owner set."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from pbmvfl._descriptors import read_beside_lock
from pbmvfl.errors import BudgetExceeded, LedgerError
from pbmvfl.ledger import history
from pbmvfl.ledger.database import MARK_BYTES, identity_of, mark, now
from pbmvfl.ledger.forecast import compared_by, why_charged
from pbmvfl.ledger.session_lock import Holder, forget
from pbmvfl.ledger.session_terms import SessionTerms
from pbmvfl.ledger.spending import Account, RowNumbers, accounts
from pbmvfl.ledger.store import LedgerEntry, LedgerStore
from pbmvfl.ledger.tamper_evidence import Known, Outside
from pbmvfl.plan.round_kinds import Split
from pbmvfl.plan.schedule import Order, Phase, Round, Schedule
from pbmvfl.privacy.events import Event


class Charging:
    """Charges one session's rounds, and refuses the one that would cross a limit."""

    def __init__(
        self,
        store: LedgerStore,
        number: int,
        dataset: str,
        terms: SessionTerms,
        first_round: int,
        *,
        row_by_row: RowByRow | None = None,
        lock: int,
        outside: Outside,
        holder: Holder,
        run_started: bool,
        rounds_ahead: int,
        shows_exact_metrics: bool,
    ) -> None:
        """Begin after `Opening`; `shows_exact_metrics` is without the permission that a dataset with a limit needs."""
        self._store, self._db = store, store.db
        self._number, self._dataset, self._terms = number, dataset, terms
        self._row_by_row = row_by_row
        self._lock, self._outside, self._holder = lock, outside, holder
        self._shows_exact_metrics = shows_exact_metrics
        self._process = os.getpid()
        # By name and by what is open: a file that was removed or replaced is not the one that others look at.
        self._files = [
            (str(store.path.resolve()), store.file),
            (str(store.lock_file), identity_of(lock)),
        ]
        self._check_files(first_round)
        self._known = Known(0, "")
        # Weights depend on no private row only before the first round of a run. Rows one by one are no such round.
        self._run_started = run_started or first_round > 0 or row_by_row is not None
        self._rounds_ahead = rounds_ahead
        self._schedule = terms.schedule
        self._sent_until = self._charged_until = first_round
        entry = next(entry for entry in store.sessions(dataset) if entry.id == number)
        self._rows = RowNumbers(store, dataset)
        self._train = self._rows.numbers(entry.train_ids)
        self._train_is_numbered = (
            entry.train_ids == f"range:0:{terms.schedule.num_samples}"
        )  # then a row's number is its own
        self._test = self._rows.numbers(entry.test_ids)
        self.notes = self._look_for_changes(entry)
        self._version = -1
        self._known_mark = b""
        self._accounts: list[Account] = []
        self._load_limits()
        self._outside.write(self._known)

    def _look_for_changes(self, entry: LedgerEntry) -> list[str]:
        past = [each for each in self._store.sessions(self._dataset) if compared_by(each) == compared_by(entry)]
        others = {each.fingerprint for each in past if each.id != entry.id} - {""}
        if others and entry.fingerprint and entry.fingerprint not in others:
            return [
                f"dataset {self._dataset!r} has other values than in its earlier runs; "
                "its rows keep what was spent on them"
            ]
        return []

    def _load_limits(self) -> None:
        """Load what every limit has left, from the whole ledger; again whenever the owner changes one."""
        version, limits, known = self._store.versioned_limits()
        check_permitted(self._store, self._dataset, self._dataset in limits, self._shows_exact_metrics)
        found = accounts(self._store, self._dataset, self._terms, limits, rows=self._rows)
        # together: an error in between must not leave one of them
        self._version, self._known_mark, self._accounts, self._known = version, mark(version), found, known

    def charge(self, current: Round, events: Sequence[Event]) -> None:
        """Charge a round, on disk, before its bytes leave; or raise BudgetExceeded and charge nothing.

        Args:
            current: The round. Where the session charges rows one by one, with its rows that have no stored answer.
            events: What one use of each of its rows releases and updates: those that the session was opened with.
        """
        if tuple(events) != self._terms.events.get(current.kind):
            raise LedgerError(
                f"round={current.number}: its events are not those of {current.kind.name} rounds that the session was "
                "opened with; open a session with the plan that is run"
            )
        if os.getpid() != self._process:
            raise LedgerError(f"round={current.number} is asked of a forked copy of the session; open one of its own")
        if self._lock < 0:
            raise LedgerError(f"round={current.number} comes after the session was closed; open another")
        if self._row_by_row is not None:
            self._charge_in_turn(current, self._row_by_row)
            return
        if current.number < self._sent_until:
            raise LedgerError(
                f"round={current.number} was charged in this session or comes before it; permitted: "
                f"{self._sent_until} to {len(self._schedule) - 1}. A charge is for one draw: to run a round again open "
                "a session that begins with it"
            )
        # A lock file without a name was removed or replaced, and then nobody can tell this session of a new limit.
        if current.number >= self._charged_until or not os.fstat(self._lock).st_nlink:
            self._check_files(current.number)
        if current.number < self._charged_until:
            if not self._limits_changed():
                self._sent_until = current.number + 1
                return  # paid ahead
            self._give_back(current.number)  # the owner changed a limit: it holds from this round on
            self._load_limits()
        ahead = self._ahead(current)
        while True:
            # From where the ledger stands: it has one number for a session, so rounds left out are charged too.
            numbers = range(self._charged_until, current.number + ahead)
            try:
                self._charge_until(numbers.stop, partial(self._rounds, numbers, current))
            except BudgetExceeded as refusal:
                if ahead == 1:
                    self._write_refusal(current.number, str(refusal))
                    raise
                ahead = 1  # a block that does not fit says nothing about its first round
                continue
            break
        self._sent_until = current.number + 1

    def _rounds(self, numbers: range, current: Round) -> list[Round]:
        return [current if number == current.number else self._schedule[number] for number in numbers]

    def _charge_in_turn(self, current: Round, one_by_one: RowByRow) -> None:
        """Charge the rows of a round that are next in the line of the session's rows."""
        part = one_by_one.charged_part(current.number)
        same = part.num_rows and np.array_equal(one_by_one.rows[part.rows], current.rows)
        if not same or int(part.rows[0]) != self._charged_until:
            raise LedgerError(
                f"round={current.number}: its {current.num_rows} rows without a stored answer are not those that are "
                "next in the session's line; a row is charged once: to predict others open another session"
            )
        self._check_files(current.number)
        try:
            self._charge_until(int(part.rows[-1]) + 1, lambda: [part])
        except BudgetExceeded as refusal:
            self._write_refusal(current.number, str(refusal))
            raise
        self._sent_until = self._charged_until

    def _ahead(self, current: Round) -> int:
        """Return how many rounds are charged together, from this one on.

        Rounds that only release rows are charged one at a time: a row that was charged and not sent would pay again.
        """
        ahead = min(self._rounds_ahead, len(self._schedule) - current.number)
        while ahead > 1 and not self._schedule.kind(current.number + ahead - 1).updates:
            ahead -= 1
        return ahead

    def _check_files(self, number: int) -> None:
        """Refuse to charge files that other processes would not find any more."""
        for path, known in self._files:
            if identity_of(path) != known:
                raise LedgerError(
                    f"round={number}: {path!r} was removed or replaced while this session charged it; nothing was "
                    "sent. Put it back as it was and start the session again"
                )

    def _limits_changed(self) -> bool:
        """Return whether the owner changed a limit. The lock file is read first: it takes 3 us, the ledger 20."""
        if read_beside_lock(self._lock, MARK_BYTES, 0) == self._known_mark:
            return False
        return self._store.limits_version() != self._version

    def _give_back(self, first_unused: int) -> None:
        self._db.run(
            "UPDATE charged SET charged_until = ?, writes = writes + 1 WHERE session = ?", (first_unused, self._number)
        )
        self._charged_until = first_unused
        self._count()

    def _count(self) -> None:
        """Count one more change outside of the ledger, before the bytes leave."""
        self._known = Known(self._known.counter + 1, self._known.head)
        self._outside.write(self._known)

    def _charge_until(self, until: int, rounds: Callable[[], Sequence[Round]]) -> None:
        """Charge rounds of the line up to one, which are what `rounds` gives."""
        for _ in range(100):
            known = self._version
            try:
                if self._accounts:
                    self._reserve(rounds())
            except BudgetExceeded:
                if self._version == known:
                    raise
                continue  # the owner has changed a limit since
            try:
                changed = self._db.run(
                    "UPDATE charged SET charged_until = ?, writes = writes + 1 "
                    "WHERE session = ? AND (SELECT limits_version FROM book) = ?",
                    (until, self._number, self._version),
                ).rowcount
            except LedgerError:
                self._version = -1  # what was reserved is not in the ledger: the next try starts from it
                raise
            if changed:
                self._charged_until = until
                self._run_started = True
                self._count()
                return
            self._load_limits()  # the owner changed a limit since the last round; what was reserved is gone with it
        raise LedgerError("limits change faster than rounds can be charged")

    def _reserve(self, rounds: Sequence[Round]) -> None:
        """Add the rounds to every limit's account; if one would be crossed, start over from the ledger and raise."""
        for i, current in enumerate(rounds):
            rows = self._row_numbers(current)
            num_rows = len(rows)
            opens_run = i == 0 and not self._run_started
            for account in self._accounts:
                rates, spent = account.rates, account.spent
                everywhere = rates.for_all(current.kind, num_rows, first_of_run=opens_run)
                spent.add(rows, rates.for_row(current.kind, num_rows), everywhere)
                if not spent.within_limit():
                    would = spent.epsilon
                    self._load_limits()  # nothing of this was written
                    raise BudgetExceeded(
                        f"round={current.number} would bring dataset {account.dataset!r} to epsilon {would:.4g}; its "
                        f"owner's limit is {account.limit}. Nothing was sent"
                        + ("" if account.dataset == self._dataset else f". {why_charged(account.dataset)}")
                    )

    def _row_numbers(self, current: Round) -> npt.NDArray[np.int64]:
        if current.kind.split is Split.TEST:
            return self._test[current.rows]
        return current.rows if self._train_is_numbered else self._train[current.rows]

    def _write_refusal(self, number: int, reason: str) -> None:
        self._db.run("INSERT INTO refusals VALUES (?, ?, ?, ?)", (self._number, number, reason, now()))

    def close(self) -> None:
        """Give back what was charged ahead and not used, and let others charge the ledger."""
        if self._lock < 0:
            return
        lock, self._lock = self._lock, -1
        if os.getpid() != self._process:
            return  # a forked copy: what is charged, and the lock, are its parent's
        unused = self._sent_until < self._charged_until
        try:
            with contextlib.nullcontext() if unused else contextlib.suppress(LedgerError):
                self._write_end(unused)
        finally:  # what could not be given back stays charged
            forget(self._holder)
            self._outside.close()
            os.close(lock)
            self._store.close()

    def _write_end(self, unused: bool) -> None:
        with self._db.transaction("IMMEDIATE"):
            if unused:
                self._db.run(
                    "UPDATE charged SET charged_until = ?, writes = writes + 1 WHERE session = ?",
                    (self._sent_until, self._number),
                )
            history.close_left_sessions(self._db, [self._number])
            self._db.run("DELETE FROM holder WHERE token = ?", (self._holder.token,))
            known = self._store.known()
        self._outside.write(known)


def check_permitted(store: LedgerStore, dataset: str, has_limit: bool, shows_exact_metrics: bool) -> None:
    """Refuse what a ledger with limits refuses whatever it would cost."""
    if has_limit and shows_exact_metrics:
        raise LedgerError(
            f"evaluation=simulator looks at exact metrics of dataset={dataset!r}, which has a limit in "
            f"ledger={str(store.path)!r}, and no limit counts them; plan with evaluation=none or "
            "evaluation=released, or state that the owner permits them: --exact-metrics, "
            "Federation.fit(exact_metrics=True)"
        )
    if not has_limit and store.has_limits:
        raise LedgerError(
            f"dataset={dataset!r} has no limit in ledger={str(store.path)!r}, and others have; if these are "
            "people that it knows, run it under their name (--dataset-name), else set a limit: `pbmvfl ledger limit "
            f"{store.path} --dataset {dataset} --unit cell --accounting strict --epsilon E`"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class RowByRow:
    """The rounds of a session as they are charged, where a party answers some predicted rows from its store.

    A ledger has one number for a session: how many rounds of its schedule are charged. Such a session therefore has a
    schedule of its own in the ledger: one round for each row that is charged, in the order in which rows are
    predicted. Rows with stored answers are not in it.
    """

    #: The schedule of the session's plan, and the session's first round.
    planned: Schedule
    first_round: int
    #: Numbers of the test rows that are charged, in the order of their rounds.
    rows: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        """Refuse other rows than those that the remaining rounds predict, and other rounds than can be counted so."""
        kinds = {self.planned.kind(number) for number in self._numbers}
        countable = len(kinds) == 1 and all(kind.split is Split.TEST for kind in kinds)
        rounds = [self.planned[number].rows for number in self._numbers]
        predicted = np.concatenate(rounds) if countable else self.rows[:0]
        if not len(self.rows) or not np.array_equal(predicted[np.isin(predicted, self.rows)], self.rows):
            raise LedgerError(
                f"unanswered={len(self.rows)} rows from round={self.first_round} on; permitted: test rows that the "
                "plan predicts from there on, at least one, each once and in the order of their rounds, where nothing "
                "else comes before them"
            )

    @property
    def _numbers(self) -> range:
        return range(self.first_round, len(self.planned))

    @cached_property
    def _places(self) -> npt.NDArray[np.int64]:
        """The place of each test row among those that are charged; -1 for the others."""
        places = np.full(self.planned.num_test_samples, -1, dtype=np.int64)
        places[self.rows] = np.arange(len(self.rows))
        return places

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of the session's line in the ledger."""
        phase = Phase(kind=self.planned.kind(self.first_round), passes=1, order=Order.AS_GIVEN)
        return replace(self.planned, num_test_samples=len(self.rows), batch_size=1, phases=(phase,))

    def charged_part(self, number: int) -> Round:
        """Return what is charged of one of the plan's rounds; a row's number is then its place among the charged."""
        current = self.planned[number]
        places = self._places[current.rows]
        return Round(number, current.kind, places[places >= 0])

    def charged_parts(self) -> Iterator[Round]:
        """Yield what is charged of every round, where that is anything."""
        return (part for number in self._numbers if (part := self.charged_part(number)).num_rows)
