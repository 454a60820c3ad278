"""The opened file of a ledger: everything that the modules of this package share of it.

`ledger.Ledger` is its owner's view; `session_opening` and `charging` work on the store itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pbmvfl._descriptors import open_file, write_beside_lock
from pbmvfl._files import make_private
from pbmvfl.errors import LedgerError
from pbmvfl.ledger import history, tamper_evidence
from pbmvfl.ledger.database import (
    FORMAT,
    Database,
    add_what_came_later,
    error_code,
    file_name,
    format_of,
    has_log,
    has_owner,
    identity_of,
    make_tables,
    mark,
    open_for_reading,
    open_for_writing,
)
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.migration import migrate
from pbmvfl.ledger.row_identity import read_ids
from pbmvfl.ledger.session_terms import SessionTerms
from pbmvfl.ledger.tamper_evidence import Known, Outside, known_outside
from pbmvfl.privacy.units import Accounting, Unit


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One session's line in the ledger."""

    id: int
    dataset: str
    #: Digest of the values under the ledger's key, to compare with others of the same ledger. In no export.
    fingerprint: str
    run: str
    session: str
    #: What was released, by frozen names; all that is priced.
    terms: SessionTerms
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
        uses = self.terms.schedule.total_uses(self.first_round, self.charged_until)
        return sum(count for kind, count in uses.items() if kind.releases)


class EmptyLedger(LedgerError):
    """Ledger file without any table: a full disk left it so, and nothing was ever written to it."""


class Records(Protocol):
    """Charges and limits of a ledger, to be added up: a `Ledger` or its store."""

    def sessions(self, dataset: str) -> list[LedgerEntry]: ...
    def charged_to(self, dataset: str) -> list[LedgerEntry]: ...
    def read_ids(self, reference: str) -> Sequence[str] | range: ...
    def all_limits(self) -> dict[str, list[Limit]]: ...


class LedgerStore:
    """One ledger's open database, its lock file and its counters."""

    def __init__(
        self, path: Path, *, owner: str = "", durable: bool = False, read_only: bool = False, prepare: bool = True
    ) -> None:
        """Open the file, as `Ledger` explains.

        Raises:
            EmptyLedger: There is nothing in the file, and it is not opened to be filled.
            LedgerError: It is no ledger, or another party's.
        """
        self.path = path
        self._read_only = read_only
        self._is_prepared = False
        #: Terms by their text, since every look at the sessions reads the same few.
        self._terms: dict[str, SessionTerms] = {}
        # A file that cannot be written to is refused when it is charged, not before.
        self._writes = not read_only and (prepare or _is_writable(path))
        if not self._writes:
            self.db = open_for_reading(path)
        else:
            if prepare:
                self._make_folder()
            self.db = self._open(create=prepare)
        try:
            if prepare and not read_only:
                self._prepare(durable, owner)
            found = format_of(self.db, path)
            if found is None:
                raise EmptyLedger(f"ledger={str(path)!r} is empty; it is filled by the first run with --ledger")
            if found != FORMAT:  # a reader leaves the file as it is
                self.db, self._writes = self.db.copy_in_memory(), False
                migrate(self.db)
            self.check_owner(owner)
            #: By which a file that is put in its place is told from it.
            self.file = identity_of(path)
        except BaseException:
            self.db.close()
            raise

    def prepare(self, *, owner: str, durable: bool) -> None:
        """Make a store that was opened with `prepare=False` ready to be written to; idempotent.

        Args:
            owner: The party that charges it; another party's ledger is refused.
            durable: Whether every transaction waits for the disk.
        """
        self.check_owner(owner)
        if self._is_prepared:
            return
        if not self._writes:
            self.db.close()
            self.db, self._writes = self._open(create=False), True
        self._prepare(durable, owner)
        self.file = identity_of(self.path)

    def _open(self, *, create: bool) -> Database:
        """Open for writing; another program's database is refused before anything could change it."""
        if not self.path.exists():
            make_private(self.path)  # the log and its index get the rights of the file
        elif has_log(self.path):
            self._look_first()
        return open_for_writing(self.path, create=create)

    def close(self) -> None:
        self.db.close()

    def _make_folder(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LedgerError(
                f"ledger={str(self.path)!r} cannot be made: {error.strerror}: {error.filename!r}; "
                "permitted: a file in a folder that exists or can be made"
            ) from error

    def _look_first(self) -> None:
        """Refuse another program's database before it is opened for writing: closing it folds its log into it."""
        try:
            with contextlib.closing(open_for_reading(self.path)) as found:
                format_of(found, self.path)
        except LedgerError as error:
            # Somebody was killed while making this file; any reader but this one would tidy up first.
            if error_code(error.__cause__) != sqlite3.SQLITE_READONLY_ROLLBACK:
                raise

    def _prepare(self, durable: bool, owner: str) -> None:
        format_of(self.db, self.path)
        # Small pages: a round changes one number, and its page is what is written. Every so many pages the log is
        # folded into the database, which waits for the disk; a log of 1 MB keeps that to microseconds a round.
        self.db.run("PRAGMA page_size = 512")
        self._keep_log()
        self.db.run(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self.db.run("PRAGMA wal_autocheckpoint = 1900")
        with self.transaction():
            found = format_of(self.db, self.path)
            if found is not None and found != FORMAT:
                migrate(self.db)
                for each in (self.path, *map(Path, (f"{self.path}-wal", f"{self.path}-shm"))):
                    with contextlib.suppress(OSError):  # somebody else's, or not there
                        each.chmod(0o600)
            if found is None:
                make_tables(self.db)
            else:
                add_what_came_later(self.db)
            self._take_owner(owner, is_new=found is None)
        self._is_prepared = True

    @property
    def owner(self) -> str:
        """The party that owns it; none where an earlier version made it, or no party opened it as its own."""
        if not has_owner(self.db):
            return ""
        name: str = self.db.rows("SELECT owner FROM identity")[0][0]
        return name

    def _take_owner(self, owner: str, *, is_new: bool) -> None:
        """Note the owner, inside the caller's transaction.

        A ledger that is there already is taken only by its name and before its first session: other parties may have
        used an older one.
        """
        named = self.path.name == file_name(owner) and not self.db.rows("SELECT 1 FROM sessions LIMIT 1")
        if owner and not self.owner and (is_new or named):
            self.db.run("UPDATE identity SET owner = ?", (owner,))
            history.append(self.db, "owned", owner=owner)

    def check_owner(self, owner: str) -> None:
        """Refuse another party's ledger."""
        if owner and (found := self.owner) not in ("", owner):
            raise LedgerError(
                f"ledger={str(self.path)!r} is the ledger of party={found!r}, not of party={owner!r}; name that "
                "party's own, or a new file"
            )

    def _keep_log(self) -> None:
        for _ in range(20):
            try:
                self.db.run("PRAGMA journal_mode = WAL")
                return
            except LedgerError as error:
                if error_code(error.__cause__) & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
            # Another process makes the same ledger. For a transaction SQLite waits, for this statement it does not.
            with self.transaction():
                pass
        raise LedgerError(f"ledger={str(self.path)!r} is busy: another process is writing; try again")

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        self.check_writable()
        return self.db.transaction("IMMEDIATE")

    def check_writable(self) -> None:
        if self._read_only:
            raise LedgerError(f"ledger={str(self.path)!r} was opened with read_only=True; open it without to change it")

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        """Open a transaction of the owner, announced in the lock file before it is true.

        A session may see the announcement too early, and then looks at the ledger until they agree; never too late.
        """
        with contextlib.ExitStack() as opened:
            with self.transaction():
                self.check_unspoiled()
                yield
                self.db.run("UPDATE book SET limits_version = limits_version + 1")
                self.db.run("UPDATE identity SET changes = changes + 1")
                lock: int | None = None
                with contextlib.suppress(FileNotFoundError):
                    # If it is not there, no session was ever opened, and one that is will write it after this.
                    lock = self.open_lock(os.O_RDWR)
                    opened.callback(os.close, lock)
                    self.announce(lock)
                outside = Outside(self.identity, lock, alone=False)
                opened.callback(outside.close)
                known = self.known()
            outside.write(known)

    def open_lock(self, flags: int) -> int:
        try:
            return open_file(self.lock_file, flags, 0o600)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._no_lock(error) from error

    def announce(self, lock: int) -> None:
        """Only within a transaction: then nobody else does, and the file and the ledger agree after it."""
        try:
            write_beside_lock(lock, mark(self.limits_version()), 0)
        except OSError as error:
            raise self._no_lock(error) from error

    def versioned_limits(self) -> tuple[int, dict[str, list[Limit]], Known]:
        """Return the version of the limits, all of them by dataset, and how many changes there were."""
        with self.db.transaction("DEFERRED"):  # all of one moment
            version, known = self.limits_version(), self.known()
            found = self.db.rows(
                'SELECT dataset, unit, accounting, colluding_parties, epsilon, delta, "order" FROM limits '
                "ORDER BY dataset, unit, accounting, colluding_parties"
            )
        names = ("colluding_parties", "epsilon", "delta", "order")
        limits: dict[str, list[Limit]] = {}
        for dataset, unit, accounting, *numbers in found:
            limit = Limit(unit=Unit(unit), accounting=Accounting(accounting), **dict(zip(names, numbers, strict=True)))
            limits.setdefault(dataset, []).append(limit)
        return version, limits, known

    def all_limits(self) -> dict[str, list[Limit]]:
        """Return the limits of every dataset that has one."""
        return self.versioned_limits()[1]

    @property
    def has_limits(self) -> bool:
        return bool(self.db.rows("SELECT 1 FROM limits LIMIT 1"))

    def limits_version(self) -> int:
        """Another number after every change of a limit."""
        version: int = self.db.rows("SELECT limits_version FROM book")[0][0]
        return version

    @property
    def identity(self) -> str:
        name: str = self.db.rows("SELECT id FROM identity")[0][0]
        return name

    def known(self) -> Known:
        """Return the number of changes, and the last hash of the history."""
        return tamper_evidence.known(self.db)

    def trouble(self) -> str | None:
        """Return why it cannot be trusted: it is an older copy, or something else wrote to it; None if it can."""
        return tamper_evidence.trouble(self.db, known_outside(self.identity, self.lock_file))

    def check_unspoiled(self) -> None:
        if (found := self.trouble()) is not None:
            raise LedgerError(
                f"ledger={str(self.path)!r} {found}. Releases may be missing, and the epsilon would be too small: put "
                f"the newest copy back, or take this one as it is: `pbmvfl ledger accept {self.path}`, which is noted"
            )

    def sessions(self, dataset: str) -> list[LedgerEntry]:
        """Return the sessions of a dataset, in their order."""
        return self.entries("WHERE dataset = ?", (dataset,))

    def charged_to(self, dataset: str) -> list[LedgerEntry]:
        """Return the sessions that a dataset's limits count, in their order.

        Those are its own, and those of other datasets whose first weights may know its rows.
        """
        return [each for each in self.entries() if each.dataset == dataset or each.terms.may_know(dataset)]

    def entries(self, where: str = "", values: Sequence[str] = ()) -> list[LedgerEntry]:
        names = [name for name in LedgerEntry.__dataclass_fields__ if name != "terms"]
        columns = ", ".join(f"charged.{name}" if name == "charged_until" else f"sessions.{name}" for name in names)
        rows = self.db.rows(
            f"SELECT {columns} FROM sessions JOIN charged ON id = charged.session {where} ORDER BY id", tuple(values)
        )
        # After the sessions that name them: another process may begin one in between.
        plans = {key: (plan, terms) for key, plan, terms in self.db.rows("SELECT hash, plan, terms FROM plans")}
        entries = [dict(zip(names, row, strict=True)) for row in rows]
        read = {key: self._read_plan(plans, key) for key in {entry["plan"] for entry in entries}}
        return [LedgerEntry(**{**entry, **read[entry["plan"]]}) for entry in entries]

    def read_terms(self, text: str) -> SessionTerms:
        """Return the terms that a text of the ledger says."""
        if text not in self._terms:
            self._terms[text] = SessionTerms.from_json(text)
        return self._terms[text]

    def _read_plan(self, plans: dict[str, tuple[str, str]], key: str) -> dict[str, Any]:
        """Return a session's terms, and its plan for people; an error has the name of the file."""
        try:
            plan, terms = plans[key]
            return {"plan": json.loads(plan), "terms": self.read_terms(terms)}
        except LedgerError as error:
            raise LedgerError(f"ledger={str(self.path)!r}: {error}") from error
        except (KeyError, ValueError) as error:
            raise LedgerError(
                f"ledger={str(self.path)!r} lacks the plan {key!r} of a session, or has no plan there; put a whole "
                "copy of it back"
            ) from error

    def read_ids(self, reference: str) -> Sequence[str] | range:
        """The rows that a session's line refers to."""
        return read_ids(self.db, reference)

    @property
    def lock_file(self) -> Path:
        path = self.path.resolve()  # one lock for one ledger, by whatever name it is opened
        return path.with_name(path.name + ".lock")

    def _no_lock(self, error: OSError) -> LedgerError:
        return LedgerError(
            f"ledger={str(self.path)!r} cannot be changed: {error.strerror}: {str(self.lock_file)!r}; "
            "see that you may write to that file and its folder"
        )


def _is_writable(path: Path) -> bool:
    return os.access(path, os.W_OK) and os.access(path.absolute().parent, os.W_OK | os.X_OK)
