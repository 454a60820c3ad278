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
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pbmvfl.errors import LedgerError
from pbmvfl.ledger.charging import Charging
from pbmvfl.ledger.file import FORMAT, error_code, format_of, mark, now, open_for_reading, open_for_writing
from pbmvfl.ledger.limits import Limit, epsilon_at
from pbmvfl.ledger.migration import migrate
from pbmvfl.ledger.spending import spending
from pbmvfl.ledger.terms import Terms
from pbmvfl.privacy.units import Accounting, Unit

if TYPE_CHECKING:
    from pbmvfl.plan import Plan

_SCHEMA = """
CREATE TABLE book (format INTEGER NOT NULL, limits_version INTEGER NOT NULL) STRICT;
CREATE TABLE plans (hash TEXT PRIMARY KEY, plan TEXT NOT NULL, terms TEXT NOT NULL) STRICT;
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


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One session's line in the book."""

    id: int
    dataset: str
    fingerprint: str
    run: str
    session: str
    #: What was released, by frozen names; all that is priced.
    terms: Terms
    #: The run's plan, as it was written: for people.
    plan: dict[str, Any]
    train_ids: str
    test_ids: str
    first_round: int
    charged_until: int
    opened: str

    @property
    def row_releases(self) -> int:
        """Row releases of all rows together."""
        return sum(self.terms.schedule.total_uses(self.first_round, self.charged_until).values())


class Ledger:
    """One party's book. Any number of readers; one process at a time may charge it."""

    def __init__(
        self, path: Path | str, *, durable: bool = False, must_exist: bool = False, read_only: bool = False
    ) -> None:
        """`durable` waits for the disk at every round (power loss); otherwise a killed process loses nothing.

        `read_only` changes nothing on disk and needs no right to; what it shows may be the book as it was when opened.
        """
        self.path = Path(path)
        self._read_only = read_only
        if self.path.is_dir():
            example = str(self.path / "party-0.sqlite")
            raise LedgerError(f"ledger={str(path)!r} is a folder; permitted: a file, such as {example!r}")
        if (must_exist or read_only) and not self.path.is_file():
            raise LedgerError(f"ledger={str(path)!r} does not exist; it is made by the first run with --ledger")
        if read_only:
            self._db = open_for_reading(self.path)
        else:
            self._make_folder()
            if self.path.exists():
                self._look_first()
            self._db = open_for_writing(self.path)
        try:
            if not read_only:
                self._prepare(durable)
            found = format_of(self._db, self.path)
            if found is None:
                raise LedgerError(f"ledger={str(path)!r} is empty; it is filled by the first run with --ledger")
            if found != FORMAT:  # a reader leaves the file as it is
                self._db = self._db.copy_in_memory()
                migrate(self._db)
        except BaseException:
            self._db.close()
            raise

    def _make_folder(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LedgerError(
                f"ledger={str(self.path)!r} cannot be made: {error.strerror}: {error.filename!r}; "
                "permitted: a file in a folder that exists or can be made"
            ) from error

    def _look_first(self) -> None:
        """Refuse another program's database before anything could change it; even closing it may, if it has a log."""
        try:
            with contextlib.closing(open_for_reading(self.path)) as found:
                format_of(found, self.path)
        except LedgerError as error:
            # Somebody was killed while making this file; any reader but this one would tidy up first.
            if error_code(error.__cause__) != sqlite3.SQLITE_READONLY_ROLLBACK:
                raise

    def _prepare(self, durable: bool) -> None:
        format_of(self._db, self.path)
        # Small pages: a round changes one number, and its page is what is written. Every so many pages the log is
        # folded into the book, which waits for the disk; a log of 1 MB keeps that to microseconds a round.
        self._db.run("PRAGMA page_size = 512")
        self._keep_log()
        self._db.run(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self._db.run("PRAGMA wal_autocheckpoint = 1900")
        with self._transaction():
            found = format_of(self._db, self.path)
            if found is not None and found != FORMAT:
                migrate(self._db)
            if found is None:
                for statement in _SCHEMA.split(";"):
                    self._db.run(statement)
                self._db.run("INSERT INTO book VALUES (?, 0)", (FORMAT,))

    def _keep_log(self) -> None:
        for _ in range(20):
            try:
                self._db.run("PRAGMA journal_mode = WAL")
                return
            except LedgerError as error:
                if error_code(error.__cause__) & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
            # Another process makes the same book. For a transaction SQLite waits, for this statement it does not.
            with self._transaction():
                pass
        raise LedgerError(f"ledger={str(self.path)!r} is busy: another process is writing; try again")

    def close(self) -> None:
        self._db.close()

    def _transaction(self) -> contextlib.AbstractContextManager[None]:
        self._check_writable()
        return self._db.transaction("IMMEDIATE")

    def _check_writable(self) -> None:
        if self._read_only:
            raise LedgerError(f"ledger={str(self.path)!r} was opened with read_only=True; open it without to change it")

    # --- limits ---

    def set_limit(self, dataset: str, limit: Limit) -> Limit:
        """Set or replace the limit for this unit, accounting and number of colluders; it holds from the next round.

        A limit that replaces another counts at the other's order, and is returned so: an order that was chosen after
        releases were seen is not one that the filter's theorem is about.
        """
        values = (dataset, limit.unit, limit.accounting, limit.colluding_parties)
        with self._changed_limits():
            earlier = self._db.rows(
                'SELECT "order" FROM limits '
                "WHERE dataset = ? AND unit = ? AND accounting = ? AND colluding_parties = ?",
                (*map(str, values[:3]), values[3]),
            )
            if earlier and self.sessions(dataset):
                limit = replace(limit, order=earlier[0][0])
            self._db.run(
                "INSERT OR REPLACE INTO limits VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*map(str, values[:3]), values[3], limit.epsilon, limit.delta, limit.order, now()),
            )
        return limit

    def remove_limit(self, dataset: str, unit: Unit, accounting: Accounting, colluding_parties: int) -> None:
        with self._changed_limits():
            removed = self._db.run(
                "DELETE FROM limits WHERE dataset = ? AND unit = ? AND accounting = ? AND colluding_parties = ?",
                (dataset, str(unit), str(accounting), colluding_parties),
            ).rowcount
            if not removed:
                raise LedgerError(
                    f"dataset={dataset!r} has no limit for unit={unit}, accounting={accounting}, "
                    f"colluding_parties={colluding_parties} in ledger={str(self.path)!r}; "
                    "`pbmvfl ledger show` lists those it has"
                )

    @contextlib.contextmanager
    def _changed_limits(self) -> Iterator[None]:
        """A transaction after which the limits have another version, announced in the lock file before it is true.

        A session may see the announcement too early, and then asks the book until it agrees; never too late.
        """
        with self._transaction():
            yield
            self._db.run("UPDATE book SET limits_version = limits_version + 1")
            try:
                lock = os.open(self._lock_file, os.O_WRONLY)
            except FileNotFoundError:
                return  # no session was ever opened, and one that is will write the file after this transaction
            except OSError as error:
                raise self._no_lock(error) from error
            try:
                self._announce(lock)
            finally:
                os.close(lock)

    def _announce(self, lock: int) -> None:
        """Only within a transaction: then nobody else does, and the file and the book agree after it."""
        try:
            os.pwrite(lock, mark(self._limits_version()), 0)
        except OSError as error:
            raise self._no_lock(error) from error

    def limits(self, dataset: str) -> list[Limit]:
        return self._versioned_limits(dataset)[1]

    def _versioned_limits(self, dataset: str) -> tuple[int, list[Limit]]:
        with self._db.transaction("DEFERRED"):  # both of one moment
            version = self._limits_version()
            found = self._db.rows(
                'SELECT unit, accounting, colluding_parties, epsilon, delta, "order" FROM limits WHERE dataset = ? '
                "ORDER BY unit, accounting, colluding_parties",
                (dataset,),
            )
        names = ("colluding_parties", "epsilon", "delta", "order")
        return version, [
            Limit(unit=Unit(row[0]), accounting=Accounting(row[1]), **dict(zip(names, row[2:], strict=True)))
            for row in found
        ]

    def _limits_version(self) -> int:
        """Another number after every change of a limit."""
        version: int = self._db.rows("SELECT limits_version FROM book")[0][0]
        return version

    # --- what is in the book ---

    def datasets(self) -> list[str]:
        """Every name that has a session or a limit."""
        found = self._db.rows("SELECT dataset FROM sessions UNION SELECT dataset FROM limits ORDER BY 1")
        return [name for (name,) in found]

    def sessions(self, dataset: str) -> list[LedgerEntry]:
        names = [name for name in LedgerEntry.__dataclass_fields__ if name != "terms"]
        columns = ", ".join(f"charged.{name}" if name == "charged_until" else f"sessions.{name}" for name in names)
        rows = self._db.rows(
            f"SELECT {columns} FROM sessions JOIN charged ON id = charged.session WHERE dataset = ? ORDER BY id",
            (dataset,),
        )
        # After the sessions that name them: another process may begin one in between.
        plans = {key: (plan, terms) for key, plan, terms in self._db.rows("SELECT hash, plan, terms FROM plans")}
        entries = [dict(zip(names, row, strict=True)) for row in rows]
        read = {key: self._read_plan(plans, key) for key in {entry["plan"] for entry in entries}}
        return [LedgerEntry(**{**entry, **read[entry["plan"]]}) for entry in entries]

    def _read_plan(self, plans: dict[str, tuple[str, str]], key: str) -> dict[str, Any]:
        """What a session is priced by, and its plan for people; an error has the name of the file."""
        try:
            plan, terms = plans[key]
            return {"plan": json.loads(plan), "terms": Terms.from_json(terms)}
        except LedgerError as error:
            raise LedgerError(f"ledger={str(self.path)!r}: {error}") from error
        except (KeyError, ValueError) as error:
            raise LedgerError(
                f"ledger={str(self.path)!r} lacks the plan {key!r} of a session, or has no plan there; put a whole "
                "copy of it back"
            ) from error

    def refusals(self, session: int) -> list[tuple[int, str, str]]:
        """(round, reason, when) of the rounds that a session was refused."""
        return self._db.rows("SELECT round, reason, at FROM refusals WHERE session = ?", (session,))

    def notes(self, dataset: str) -> list[str]:
        """What a reader should know beside the numbers."""
        found = len({entry.fingerprint for entry in self.sessions(dataset)})
        if found > 1:
            return [
                f"its values changed between runs ({found} different fingerprints); rows keep what was spent on them"
            ]
        return []

    def export(self) -> dict[str, Any]:
        """The whole book as plain values, with what each limit has left."""
        book: dict[str, Any] = {"format": FORMAT, "datasets": {}}
        for dataset in self.datasets():
            limits = []
            for limit in self.limits(dataset):
                spent = spending(self, dataset, limit)
                limits.append(
                    {**asdict(limit), "spent_epsilon": _plain(epsilon_at(spent.worst, limit.delta, limit.order))}
                )
            sessions = [_exported(entry) for entry in self.sessions(dataset)]
            book["datasets"][dataset] = {"limits": limits, "sessions": sessions, "notes": self.notes(dataset)}
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
        self._db.run("INSERT OR IGNORE INTO row_ids VALUES (?, ?)", (digest, zlib.compress(text)))
        return f"list:{digest}"

    def read_ids(self, reference: str) -> Sequence[str] | range:
        kind, _, rest = reference.partition(":")
        if kind == "range":
            start, stop = rest.split(":")
            return range(int(start), int(stop))
        found = self._db.rows("SELECT ids FROM row_ids WHERE hash = ?", (rest,))
        if not found:
            raise LedgerError(f"ledger={str(self.path)!r} lacks the row ids {rest!r}; put a whole copy of it back")
        ids: list[str] = json.loads(zlib.decompress(found[0][0]))
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
        public_start: bool = False,
        fingerprint: str = "",
        train_ids: Sequence[str] | range | None = None,
        test_ids: Sequence[str] | range | None = None,
        rounds_ahead: int = 1,
    ) -> Charging:
        """Begin to charge a session. Row ids default to the rows' numbers, test rows after training rows.

        `public_start` says that the run began with weights that depend on no row; without it every release of the
        session is charged as one that may be about any row. With `rounds_ahead` above 1 so many rounds are written in one transaction; what was not used of them is given
        back when the session is closed or the owner changes a limit, and stays charged if the process is killed.
        """
        self._check_writable()
        if rounds_ahead < 1:
            raise LedgerError(f"rounds_ahead={rounds_ahead}; permitted: 1 or more, 1 charges every round by itself")
        train = range(plan.num_samples) if train_ids is None else train_ids
        test = range(plan.num_samples, plan.num_samples + plan.num_test_samples) if test_ids is None else test_ids
        for ids, count, name in ((train, plan.num_samples, "train_ids"), (test, plan.num_test_samples, "test_ids")):
            if len(ids) != count:
                raise LedgerError(f"{name} has {len(ids)} rows, the plan has {count}")
        lock = self._lock()
        try:
            with self._transaction():
                self._announce(lock)
                self._check_continues(dataset, run, first_round)
                terms = Terms.of(plan, public_start=public_start and self._began_public(run))
                # By the terms as well: if a later version made other releases of the same plan, both would be kept.
                key = hashlib.sha256(plan.hash + terms.to_json().encode()).hexdigest()
                self._db.run("INSERT OR IGNORE INTO plans VALUES (?, ?, ?)", (key, plan.to_json(), terms.to_json()))
                started = self._db.rows(
                    "SELECT 1 FROM sessions JOIN charged ON id = charged.session "
                    "WHERE run = ? AND charged_until > first_round",
                    (run,),
                )
                number = self._db.run(
                    "INSERT INTO sessions (dataset, fingerprint, run, session, plan, train_ids, test_ids, first_round, "
                    "opened) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        dataset,
                        fingerprint,
                        run,
                        session,
                        key,
                        self._keep_ids(train),
                        self._keep_ids(test),
                        first_round,
                        now(),
                    ),
                ).lastrowid
                self._db.run("INSERT INTO charged VALUES (?, ?)", (number, first_round))
            # So that a copy of the file without its log is never an empty book.
            self._db.rows("PRAGMA wal_checkpoint(PASSIVE)")
            assert number is not None
            return Charging(self, number, dataset, terms, first_round, lock, bool(started), rounds_ahead)
        except BaseException:
            os.close(lock)
            raise

    def _began_public(self, run: str) -> bool:
        """Weights that were not public in one session of a run are not public in its later ones."""
        found = self._db.rows(
            "SELECT DISTINCT terms FROM plans JOIN sessions ON hash = sessions.plan WHERE run = ?", (run,)
        )
        return all(Terms.from_json(text).public_start for (text,) in found)

    def _check_continues(self, dataset: str, run: str, first_round: int) -> None:
        """A run that goes on must find what it released before: counted from here its epsilon would be too small."""
        ((known,),) = self._db.rows(
            "SELECT max(charged_until) FROM sessions JOIN charged ON id = charged.session "
            "WHERE dataset = ? AND run = ?",
            (dataset, run),
        )
        if first_round > (known or 0):
            raise LedgerError(
                f"ledger={str(self.path)!r} has {known or 'no'} rounds of run={run!r} on dataset={dataset!r}, which "
                f"goes on at round={first_round}: the book was moved, replaced or is another party's, and its epsilon "
                "would be too small. Put the run's own ledger back at this path, or start a new run"
            )

    def _lock(self) -> int:
        """Two processes that charge one book would each see only half of it."""
        try:
            descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._no_lock(error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise LedgerError(f"ledger={str(self.path)!r} is being charged by another session; wait for it") from None
        return descriptor

    @property
    def _lock_file(self) -> Path:
        path = self.path.resolve()  # one lock for one book, by whatever name it is opened
        return path.with_name(path.name + ".lock")

    def _no_lock(self, error: OSError) -> LedgerError:
        return LedgerError(
            f"ledger={str(self.path)!r} cannot be changed: {error.strerror}: {str(self._lock_file)!r}; "
            "see that you may write to that file and its folder"
        )


def _exported(entry: LedgerEntry) -> dict[str, Any]:
    values = {field.name: getattr(entry, field.name) for field in fields(entry)}
    return {**values, "terms": json.loads(entry.terms.to_json()), "row_releases": entry.row_releases}


def _plain(value: float) -> float | str:
    return value if np.isfinite(value) else "inf"
