"""A party's own book of what it has released about each of its rows, over all runs, and the limits it keeps.

SQLite, one transaction a round, written before the bytes leave: a round that was counted and not sent stays counted,
and a round that was sent is never uncounted. The book does not store uses one by one: rows of a round follow from the
plan's public schedule, so a session is one line with the rounds it has charged, whatever their number.

Rows are the owner's: a dataset's name and row ids. A fingerprint of the values only detects that they changed; changed
values do not get a new budget.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.data.schedule import Round, RoundKind, Schedule
from pbmvfl.errors import BudgetExceeded, LedgerError
from pbmvfl.plan import Plan
from pbmvfl.privacy.filters import Limit, Rates, epsilon_at
from pbmvfl.privacy.spending import RowNumbers, Spent, spending
from pbmvfl.privacy.units import Accounting, Unit

_FORMAT = 1
_SCHEMA = """
CREATE TABLE book (format INTEGER NOT NULL, limits_version INTEGER NOT NULL) STRICT;
CREATE TABLE plans (hash TEXT PRIMARY KEY, plan TEXT NOT NULL) STRICT;
CREATE TABLE row_ids (hash TEXT PRIMARY KEY, ids BLOB NOT NULL) STRICT;
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, dataset TEXT NOT NULL, fingerprint TEXT NOT NULL, run TEXT NOT NULL,
    session TEXT NOT NULL, plan TEXT NOT NULL REFERENCES plans, train_ids TEXT NOT NULL, test_ids TEXT NOT NULL,
    first_round INTEGER NOT NULL, opened TEXT NOT NULL
) STRICT;
CREATE TABLE charged (session INTEGER PRIMARY KEY REFERENCES sessions, charged_until INTEGER NOT NULL) STRICT;
CREATE TABLE limits (
    dataset TEXT NOT NULL, unit TEXT NOT NULL, accounting TEXT NOT NULL, colluding_parties INTEGER NOT NULL,
    epsilon REAL NOT NULL, delta REAL NOT NULL, "order" REAL NOT NULL, set_at TEXT NOT NULL,
    PRIMARY KEY (dataset, unit, accounting, colluding_parties)
) STRICT;
CREATE TABLE refusals (session INTEGER NOT NULL, round INTEGER NOT NULL, reason TEXT NOT NULL, at TEXT NOT NULL) STRICT;
"""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class SessionEntry:
    """One session's line in the book."""

    id: int
    dataset: str
    fingerprint: str
    run: str
    session: str
    plan: Plan
    train_ids: str
    test_ids: str
    first_round: int
    charged_until: int
    opened: str

    @property
    def row_releases(self) -> int:
        """Row releases of all rows together."""
        return _rows_between(self.plan, self.first_round, self.charged_until)


def _rows_between(plan: Plan, first: int, until: int) -> int:
    """Rows of the rounds first <= r < until, without making their batches."""

    def before(number: int) -> int:
        epochs, rest = divmod(min(number, plan.num_rounds), plan.rounds_per_epoch)
        joint = epochs * plan.num_samples + min(rest * plan.batch_size, plan.num_samples)
        return joint + min(max(number - plan.num_rounds, 0) * plan.batch_size, plan.num_test_samples)

    return before(until) - before(first)


class Ledger:
    """One party's book. Any number of readers; one process at a time may charge it."""

    def __init__(self, path: Path | str, *, durable: bool = False, must_exist: bool = False) -> None:
        """`durable` waits for the disk at every round (power loss); otherwise a killed process loses nothing."""
        self.path = Path(path)
        if must_exist and not self.path.is_file():
            raise LedgerError(f"ledger={str(path)!r} does not exist; it is made by the first run with --ledger")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=10)
            # Small pages: a round changes one number, and its page is what is written. Every so many pages the log is
            # folded into the book, which waits for the disk; a log of 1 MB keeps that to microseconds a round.
            self._db.execute("PRAGMA page_size = 512")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._db.execute("PRAGMA wal_autocheckpoint = 1900")
            with self._transaction():
                if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'book'").fetchone():
                    for statement in _SCHEMA.split(";"):
                        self._db.execute(statement)
                    self._db.execute("INSERT INTO book VALUES (?, 0)", (_FORMAT,))
            (found,) = self._db.execute("SELECT format FROM book").fetchone()
        except sqlite3.DatabaseError as error:
            raise LedgerError(f"ledger={str(path)!r} cannot be read as a ledger: {error}") from error
        if found != _FORMAT:
            raise LedgerError(f"ledger={str(path)!r} has format {found}; this program reads format {_FORMAT}")

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # --- limits ---

    def set_limit(self, dataset: str, limit: Limit) -> None:
        """Set or replace the limit for this unit, accounting and number of colluders; it holds from the next round."""
        values = (dataset, limit.unit, limit.accounting, limit.colluding_parties)
        with self._transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO limits VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*map(str, values[:3]), values[3], limit.epsilon, limit.delta, limit.order, _now()),
            )
            self._db.execute("UPDATE book SET limits_version = limits_version + 1")

    def remove_limit(self, dataset: str, unit: Unit, accounting: Accounting, colluding_parties: int) -> None:
        with self._transaction():
            removed = self._db.execute(
                "DELETE FROM limits WHERE dataset = ? AND unit = ? AND accounting = ? AND colluding_parties = ?",
                (dataset, str(unit), str(accounting), colluding_parties),
            ).rowcount
            self._db.execute("UPDATE book SET limits_version = limits_version + 1")
        if not removed:
            raise LedgerError(
                f"dataset={dataset!r} has no limit for unit={unit}, accounting={accounting}, "
                f"colluding_parties={colluding_parties}"
            )

    def limits(self, dataset: str) -> list[Limit]:
        return self._versioned_limits(dataset)[1]

    def _versioned_limits(self, dataset: str) -> tuple[int, list[Limit]]:
        with self._transaction():
            (version,) = self._db.execute("SELECT limits_version FROM book").fetchone()
            found = self._db.execute(
                'SELECT unit, accounting, colluding_parties, epsilon, delta, "order" FROM limits WHERE dataset = ? '
                "ORDER BY unit, accounting, colluding_parties",
                (dataset,),
            ).fetchall()
        names = ("colluding_parties", "epsilon", "delta", "order")
        return version, [
            Limit(unit=Unit(row[0]), accounting=Accounting(row[1]), **dict(zip(names, row[2:], strict=True)))
            for row in found
        ]

    # --- what is in the book ---

    def datasets(self) -> list[str]:
        """Every name that has a session or a limit."""
        found = self._db.execute("SELECT dataset FROM sessions UNION SELECT dataset FROM limits ORDER BY 1")
        return [name for (name,) in found]

    def sessions(self, dataset: str) -> list[SessionEntry]:
        plans = {key: Plan.from_json(text) for key, text in self._db.execute("SELECT hash, plan FROM plans")}
        names = list(SessionEntry.__dataclass_fields__)
        columns = ", ".join(f"charged.{name}" if name == "charged_until" else f"sessions.{name}" for name in names)
        rows = self._db.execute(
            f"SELECT {columns} FROM sessions JOIN charged ON id = charged.session WHERE dataset = ? ORDER BY id",
            (dataset,),
        )
        entries = (dict(zip(names, row, strict=True)) for row in rows)
        return [SessionEntry(**{**entry, "plan": plans[entry["plan"]]}) for entry in entries]

    def refusals(self, session: int) -> list[tuple[int, str, str]]:
        """(round, reason, when) of the rounds that a session was refused."""
        return self._db.execute("SELECT round, reason, at FROM refusals WHERE session = ?", (session,)).fetchall()

    def export(self) -> dict[str, Any]:
        """The whole book as plain values, with what each limit has left."""
        book: dict[str, Any] = {"format": _FORMAT, "datasets": {}}
        for dataset in self.datasets():
            limits = []
            for limit in self.limits(dataset):
                spent = spending(self, dataset, limit)
                limits.append(
                    {**asdict(limit), "spent_epsilon": _plain(epsilon_at(spent.worst, limit.delta, limit.order))}
                )
            sessions = [
                {**asdict(entry), "plan": entry.plan.to_dict(), "row_releases": entry.row_releases}
                for entry in self.sessions(dataset)
            ]
            book["datasets"][dataset] = {"limits": limits, "sessions": sessions}
        return book

    # --- rows ---

    def _keep_ids(self, ids: Sequence[str] | range) -> str:
        """A reference to a list of row ids, stored once; numbered rows need no list."""
        if isinstance(ids, range):
            return f"range:{ids.start}:{ids.stop}"
        if len(set(ids)) != len(ids):
            raise LedgerError("row ids must be different from each other: one row twice would be counted as two")
        text = json.dumps(list(ids)).encode()
        digest = hashlib.sha256(text).hexdigest()
        self._db.execute("INSERT OR IGNORE INTO row_ids VALUES (?, ?)", (digest, zlib.compress(text)))
        return f"list:{digest}"

    def read_ids(self, reference: str) -> Sequence[str] | range:
        kind, _, rest = reference.partition(":")
        if kind == "range":
            start, stop = rest.split(":")
            return range(int(start), int(stop))
        (packed,) = self._db.execute("SELECT ids FROM row_ids WHERE hash = ?", (rest,)).fetchone()
        ids: list[str] = json.loads(zlib.decompress(packed))
        return ids

    # --- charging ---

    def open_session(
        self,
        *,
        dataset: str,
        plan: Plan,
        run: str,
        session: str,
        first_round: int = 0,
        fingerprint: str = "",
        train_ids: Sequence[str] | range | None = None,
        test_ids: Sequence[str] | range | None = None,
        rounds_ahead: int = 1,
    ) -> LedgerSession:
        """Begin to charge a session. Row ids default to the rows' numbers, test rows after training rows.

        With `rounds_ahead` above 1 so many rounds are written in one transaction; what was not used of them is given
        back when the session is closed, and stays charged if the process is killed.
        """
        train = range(plan.num_samples) if train_ids is None else train_ids
        test = range(plan.num_samples, plan.num_samples + plan.num_test_samples) if test_ids is None else test_ids
        for ids, count, name in ((train, plan.num_samples, "train_ids"), (test, plan.num_test_samples, "test_ids")):
            if len(ids) != count:
                raise LedgerError(f"{name} has {len(ids)} rows, the plan has {count}")
        lock = self._lock()
        with self._transaction():
            self._db.execute("INSERT OR IGNORE INTO plans VALUES (?, ?)", (plan.hash.hex(), plan.to_json()))
            started = self._db.execute(
                "SELECT 1 FROM sessions JOIN charged ON id = charged.session "
                "WHERE run = ? AND charged_until > first_round",
                (run,),
            ).fetchone()
            number = self._db.execute(
                "INSERT INTO sessions (dataset, fingerprint, run, session, plan, train_ids, test_ids, first_round, "
                "opened) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    dataset,
                    fingerprint,
                    run,
                    session,
                    plan.hash.hex(),
                    self._keep_ids(train),
                    self._keep_ids(test),
                    first_round,
                    _now(),
                ),
            ).lastrowid
            self._db.execute("INSERT INTO charged VALUES (?, ?)", (number, first_round))
        assert number is not None
        return LedgerSession(self, number, dataset, plan, first_round, lock, bool(started), rounds_ahead)

    def _lock(self) -> int:
        """Two processes that charge one book would each see only half of it."""
        descriptor = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise LedgerError(f"ledger={str(self.path)!r} is being charged by another session; wait for it") from None
        return descriptor


class LedgerSession:
    """Charges one session's rounds, and refuses the one that would cross a limit."""

    def __init__(
        self,
        ledger: Ledger,
        number: int,
        dataset: str,
        plan: Plan,
        first_round: int,
        lock: int,
        run_started: bool,
        rounds_ahead: int,
    ) -> None:
        self._ledger, self._db = ledger, ledger._db
        self._number, self._dataset, self._plan = number, dataset, plan
        self._lock = lock
        self._run_started = run_started
        self._rounds_ahead = rounds_ahead
        self._schedule = Schedule(plan)
        self._sent_until = self._charged_until = first_round
        entry = next(entry for entry in ledger.sessions(dataset) if entry.id == number)
        self._rows = RowNumbers(ledger, dataset)
        self._train = self._rows.numbers(entry.train_ids)
        self._train_is_numbered = entry.train_ids == f"range:0:{plan.num_samples}"  # then a row's number is its own
        self._test = self._rows.numbers(entry.test_ids)
        self.notes = self._look_for_changes(entry)
        self._version = -1
        self._accounts: list[tuple[Limit, float, Rates, Spent]] = []
        self._load_limits()

    def _look_for_changes(self, entry: SessionEntry) -> list[str]:
        others = {past.fingerprint for past in self._ledger.sessions(self._dataset) if past.id != entry.id}
        if others and entry.fingerprint not in others:
            return [
                f"dataset {self._dataset!r} has other values than in its earlier runs; "
                "its rows keep what was spent on them"
            ]
        return []

    def _load_limits(self) -> None:
        """What every limit has left, from the whole book; again whenever the owner changes one."""
        self._version, limits = self._ledger._versioned_limits(self._dataset)
        self._accounts = [
            (
                limit,
                limit.budget,
                Rates.of(self._plan, limit),
                spending(self._ledger, self._dataset, limit, rows=self._rows),
            )
            for limit in limits
        ]

    def charge(self, current: Round) -> None:
        """Charge a round, on disk, before its bytes leave; or raise BudgetExceeded and charge nothing."""
        if current.number < self._charged_until:
            self._sent_until = current.number + 1
            return  # paid ahead
        ahead = min(self._rounds_ahead, len(self._schedule) - current.number)
        while True:
            try:
                self._charge_block(current, ahead)
            except BudgetExceeded as refusal:
                if ahead == 1:
                    self._write_refusal(current.number, str(refusal))
                    raise
                ahead = 1  # a block that does not fit says nothing about its first round
                continue
            break
        self._sent_until = current.number + 1

    def _charge_block(self, current: Round, count: int) -> None:
        first = current.number
        for _ in range(100):
            known = self._version
            try:
                if self._accounts:
                    self._reserve([current, *(self._schedule[number] for number in range(first + 1, first + count))])
            except BudgetExceeded:
                if self._version == known:
                    raise
                continue  # the owner has changed a limit since
            changed = self._db.execute(
                "UPDATE charged SET charged_until = ? WHERE session = ? AND (SELECT limits_version FROM book) = ?",
                (first + count, self._number, self._version),
            ).rowcount
            if changed:
                self._charged_until = first + count
                self._run_started = True
                return
            self._load_limits()  # the owner changed a limit since the last round; what was reserved is gone with it
        raise LedgerError("limits change faster than rounds can be charged")

    def _reserve(self, rounds: Sequence[Round]) -> None:
        """Add the rounds to every limit's account; if one would be crossed, start over from the book and raise."""
        for i, current in enumerate(rounds):
            rows = self._row_numbers(current)
            num_rows = len(rows)
            opens_run = i == 0 and not self._run_started
            for limit, budget, rates, spent in self._accounts:
                own = rates.for_row(current.kind, num_rows)
                party_unit = limit.unit is Unit.PARTY
                everywhere = rates.for_all(num_rows, first_round_of_run=opens_run, party_unit=party_unit)
                spent.add(rows, own, everywhere)
                if not spent.within(budget):
                    would = epsilon_at(spent.worst, limit.delta, limit.order)
                    self._load_limits()  # nothing of this was written
                    raise BudgetExceeded(
                        f"round={current.number} would bring dataset {self._dataset!r} to epsilon {would:.4g}; "
                        f"its owner's limit is {limit}. Nothing was sent"
                    )

    def _row_numbers(self, current: Round) -> npt.NDArray[np.int64]:
        if current.kind is RoundKind.JOINT:
            return current.rows if self._train_is_numbered else self._train[current.rows]
        return self._test[current.rows]

    def _write_refusal(self, number: int, reason: str) -> None:
        self._db.execute("INSERT INTO refusals VALUES (?, ?, ?, ?)", (self._number, number, reason, _now()))

    def close(self) -> None:
        """Give back what was charged ahead and not used, and let others charge the book."""
        if self._lock < 0:
            return
        if self._sent_until < self._charged_until:
            self._db.execute("UPDATE charged SET charged_until = ? WHERE session = ?", (self._sent_until, self._number))
        os.close(self._lock)
        self._lock = -1
        self._ledger.close()


def _plain(value: float) -> float | str:
    return value if np.isfinite(value) else "inf"
