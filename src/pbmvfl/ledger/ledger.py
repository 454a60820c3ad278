"""A party's own book of what it has released about each of its rows, over all runs, and the limits it keeps.

SQLite, one transaction a round, written before the bytes leave: a round that was counted and not sent stays counted,
and a round that was sent is never uncounted. The book does not store uses one by one: rows of a round follow from the
plan's public schedule, so a session is one line with the rounds it has charged, whatever their number.

Rows are the owner's: a dataset's name and row ids. A digest of the values, under a key that never leaves the book, only
detects that they changed or came back under another name; changed values do not get a new budget.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from pbmvfl._files import make_private
from pbmvfl.errors import LedgerError
from pbmvfl.ledger import history, tamper_evidence
from pbmvfl.ledger import owner as owners
from pbmvfl.ledger.charging import Charging, identity_of
from pbmvfl.ledger.database import FORMAT, error_code, format_of, mark, now, open_for_reading, open_for_writing
from pbmvfl.ledger.forecast import Forecast, exported, notes_of
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.migration import migrate
from pbmvfl.ledger.row_identity import read_ids
from pbmvfl.ledger.schema import add_what_came_later, make_tables
from pbmvfl.ledger.session_lock import check_free
from pbmvfl.ledger.session_opening import Opening
from pbmvfl.ledger.session_terms import Terms
from pbmvfl.ledger.tamper_evidence import Known, Outside, known_outside
from pbmvfl.privacy.units import Accounting, Unit

if TYPE_CHECKING:
    from pbmvfl.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One session's line in the book."""

    id: int
    dataset: str
    #: Of the values, under the book's key: to compare with others of the same book. In no export.
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
        uses = self.terms.schedule.total_uses(self.first_round, self.charged_until)
        return sum(count for kind, count in uses.items() if kind.releases)


class Ledger:
    """One party's book. Any number of readers; one process at a time may charge it."""

    def __init__(
        self,
        path: Path | str,
        *,
        owner: str = "",
        durable: bool = False,
        must_exist: bool = False,
        read_only: bool = False,
    ) -> None:
        """`durable` waits for the disk at every round (power loss); otherwise a killed process loses nothing.

        `owner` is the party that opens its book: a new one is that party's, and another party's is refused.

        `read_only` changes nothing on disk and needs no right to; what it shows may be the book as it was when opened.
        """
        self.path = Path(path)
        self._read_only = read_only
        if self.path.is_dir():
            example = str(self.path / "bank.sqlite")
            raise LedgerError(f"ledger={str(path)!r} is a folder; permitted: a file, such as {example!r}")
        if (must_exist or read_only) and not self.path.is_file():
            raise LedgerError(f"ledger={str(path)!r} does not exist; it is made by the first run with --ledger")
        if read_only:
            self._db = open_for_reading(self.path)
        else:
            self._make_folder()
            if self.path.exists():
                self._look_first()
            else:
                make_private(self.path)  # the log and its index get the rights of the file
            self._db = open_for_writing(self.path)
        try:
            if not read_only:
                self._prepare(durable, owner)
            found = format_of(self._db, self.path)
            if found is None:
                raise LedgerError(f"ledger={str(path)!r} is empty; it is filled by the first run with --ledger")
            if found != FORMAT:  # a reader leaves the file as it is
                self._db = self._db.copy_in_memory()
                migrate(self._db)
            owners.check(self._db, self.path, owner)
            self._file = identity_of(self.path)
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

    def _prepare(self, durable: bool, owner: str) -> None:
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
                for each in (self.path, *map(Path, (f"{self.path}-wal", f"{self.path}-shm"))):
                    with contextlib.suppress(OSError):  # somebody else's, or not there
                        each.chmod(0o600)
            if found is None:
                make_tables(self._db)
            else:
                add_what_came_later(self._db)
            owners.take(self._db, self.path, owner, is_new=found is None)

    @property
    def owner(self) -> str:
        """The party whose book this is; none for a book that an earlier version made."""
        return owners.owner_of(self._db)

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
        values = (dataset, str(limit.unit), str(limit.accounting), limit.colluding_parties)
        with self._changed():
            earlier = self._db.rows(  # also of a limit that was removed
                'SELECT "order" FROM orders '
                "WHERE dataset = ? AND unit = ? AND accounting = ? AND colluding_parties = ?",
                values,
            )
            if earlier and self.charged_to(dataset):
                limit = replace(limit, order=earlier[0][0])
            numbers = (limit.epsilon, limit.delta, limit.order)
            self._db.run("INSERT OR REPLACE INTO limits VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*values, *numbers, now()))
            self._db.run("INSERT OR REPLACE INTO orders VALUES (?, ?, ?, ?, ?)", (*values, limit.order))
            kept = {**asdict(limit), "unit": str(limit.unit), "accounting": str(limit.accounting)}
            history.append(self._db, "limit", dataset=dataset, **kept)
        return limit

    def remove_limit(self, dataset: str, unit: Unit, accounting: Accounting, colluding_parties: int) -> None:
        with self._changed():
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
            history.append(
                self._db,
                "removed",
                dataset=dataset,
                unit=str(unit),
                accounting=str(accounting),
                colluding_parties=colluding_parties,
            )

    def allow(self, dataset: str) -> None:
        """The owner's word that `dataset` is about other people, although its values are known by another name."""
        with self._changed():
            self._db.run("INSERT OR REPLACE INTO allowed VALUES (?, ?)", (dataset, now()))
            history.append(self._db, "allowed", dataset=dataset)

    def note_exact(self, dataset: str) -> None:
        """The owner's word that exact predictions of these rows may be seen: outside of every epsilon, and noted."""
        with self._changed():
            history.append(self._db, "exact", dataset=dataset)

    def note_uncharged(self, dataset: str, *, num_rows: int) -> None:
        """Note that the owner permits a release of so many rows that no limit counts."""
        with self._changed():
            history.append(self._db, "uncharged", dataset=dataset, rows=num_rows)

    @contextlib.contextmanager
    def _changed(self) -> Iterator[None]:
        """A transaction of the owner, announced in the lock file before it is true.

        A session may see the announcement too early, and then asks the book until it agrees; never too late.
        """
        with contextlib.ExitStack() as opened:
            with self._transaction():
                self.check_unspoiled()
                yield
                self._db.run("UPDATE book SET limits_version = limits_version + 1")
                self._db.run("UPDATE identity SET changes = changes + 1")
                lock: int | None = None
                with contextlib.suppress(FileNotFoundError):
                    # If it is not there, no session was ever opened, and one that is will write it after this.
                    lock = self._open_lock(os.O_RDWR)
                    opened.callback(os.close, lock)
                    self._announce(lock)
                outside = Outside(self._identity, lock, alone=False)
                opened.callback(outside.close)
                known = self._known()
            outside.write(known)

    def _open_lock(self, flags: int) -> int:
        try:
            return os.open(self._lock_file, flags, 0o600)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._no_lock(error) from error

    def _announce(self, lock: int) -> None:
        """Only within a transaction: then nobody else does, and the file and the book agree after it."""
        try:
            os.pwrite(lock, mark(self._limits_version()), 0)
        except OSError as error:
            raise self._no_lock(error) from error

    def limits(self, dataset: str) -> list[Limit]:
        return self._versioned_limits()[1].get(dataset, [])

    def _versioned_limits(self) -> tuple[int, dict[str, list[Limit]], Known]:
        """Return the version of the limits, all of them by dataset, and how many changes there were."""
        with self._db.transaction("DEFERRED"):  # all of one moment
            version, known = self._limits_version(), self._known()
            found = self._db.rows(
                'SELECT dataset, unit, accounting, colluding_parties, epsilon, delta, "order" FROM limits '
                "ORDER BY dataset, unit, accounting, colluding_parties"
            )
        names = ("colluding_parties", "epsilon", "delta", "order")
        limits: dict[str, list[Limit]] = {}
        for dataset, unit, accounting, *numbers in found:
            limit = Limit(unit=Unit(unit), accounting=Accounting(accounting), **dict(zip(names, numbers, strict=True)))
            limits.setdefault(dataset, []).append(limit)
        return version, limits, known

    @property
    def has_limits(self) -> bool:
        """Whether any dataset has one."""
        return bool(self._db.rows("SELECT 1 FROM limits LIMIT 1"))

    def _limits_version(self) -> int:
        """Another number after every change of a limit."""
        version: int = self._db.rows("SELECT limits_version FROM book")[0][0]
        return version

    # --- copies ---

    @property
    def _identity(self) -> str:
        name: str = self._db.rows("SELECT id FROM identity")[0][0]
        return name

    def _known(self) -> Known:
        """How many changes there were, and where the history stands."""
        return tamper_evidence.known(self._db)

    def trouble(self) -> str | None:
        """Why this book cannot be trusted to have everything: it is behind, or something else wrote to it."""
        return tamper_evidence.trouble(self._db, known_outside(self._identity, self._lock_file))

    def check_unspoiled(self) -> None:
        if (found := self.trouble()) is not None:
            raise LedgerError(
                f"ledger={str(self.path)!r} {found}. Releases may be missing, and the epsilon would be too small: put "
                f"the newest copy back, or take this one as it is: `pbmvfl ledger accept {self.path}`, which is noted"
            )

    def accept(self) -> str | None:
        """The owner takes the book as it is, which is noted in it. What was wrong with it; None if nothing was."""
        with contextlib.ExitStack() as opened:
            with self._transaction():
                check_free(self._db, self.path)
                if (found := self.trouble()) is None:
                    return None
                outside = known_outside(self._identity, self._lock_file)
                behind = max(0, max((each.counter for each in outside), default=0) - self._known().counter)
                self._db.run("UPDATE identity SET changes = changes + ?", (behind + 1,))
                history.append(self._db, "accepted", why=found)
                history.append(self._db, "owned", owner=self.owner)  # as it is, like the rest
                lock: int | None = None
                with contextlib.suppress(FileNotFoundError):
                    lock = self._open_lock(os.O_RDWR)
                    opened.callback(os.close, lock)
                places = Outside(self._identity, lock, alone=False)
                opened.callback(places.close)
                known = self._known()
            places.write(known, force=True)
        return found

    # --- what is in the book ---

    def datasets(self) -> list[str]:
        """Every name that has a session or a limit."""
        found = self._db.rows("SELECT dataset FROM sessions UNION SELECT dataset FROM limits ORDER BY 1")
        return [name for (name,) in found]

    def sessions(self, dataset: str) -> list[LedgerEntry]:
        """Return the sessions of a dataset, in their order."""
        return self._entries("WHERE dataset = ?", (dataset,))

    def charged_to(self, dataset: str) -> list[LedgerEntry]:
        """Return the sessions that a dataset's limits count, in their order.

        Those are its own, and those of other datasets whose first weights may know its rows.
        """
        return [each for each in self._entries() if each.dataset == dataset or each.terms.may_know(dataset)]

    def _entries(self, where: str = "", values: Sequence[str] = ()) -> list[LedgerEntry]:
        names = [name for name in LedgerEntry.__dataclass_fields__ if name != "terms"]
        columns = ", ".join(f"charged.{name}" if name == "charged_until" else f"sessions.{name}" for name in names)
        rows = self._db.rows(
            f"SELECT {columns} FROM sessions JOIN charged ON id = charged.session {where} ORDER BY id", tuple(values)
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

    def history(self) -> list[history.Event]:
        """What the owner and the sessions did, in its order."""
        return history.events(self._db)

    def notes(self, dataset: str) -> list[str]:
        """What a reader should know beside the numbers."""
        return notes_of(self, dataset)

    def export(self) -> dict[str, Any]:
        """The whole book as plain values, with what each limit has left, and without anything that tells values."""
        return exported(self)

    def read_ids(self, reference: str) -> Sequence[str] | range:
        """The rows that a session's line refers to."""
        return read_ids(self._db, reference)

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
        exact_metrics: bool = False,
        train_values: npt.NDArray[Any] | None = None,
        test_values: npt.NDArray[Any] | None = None,
        train_ids: Sequence[str] | range | None = None,
        test_ids: Sequence[str] | range | None = None,
        rounds_ahead: int = 1,
    ) -> Charging:
        """Begin to charge a session. Row ids default to the rows' numbers, test rows after training rows.

        `public_start` says that the run began with weights that depend on no row; without it every release of the
        session is charged as one that may be about any row. `exact_metrics` is the owner's word that exact metrics of
        rows with a limit may be looked at. Of the values only digests under the book's own key are kept.

        With `rounds_ahead` above 1 so many rounds are written in one transaction; what was not used of them is given
        back when the session is closed or the owner changes a limit, and stays charged if the process is killed.
        """
        self._check_writable()
        return Opening(
            dataset=dataset,
            plan=plan,
            run=run,
            session=session,
            first_round=first_round,
            public_start=public_start,
            exact_metrics=exact_metrics,
            train_values=train_values,
            test_values=test_values,
            train_ids=train_ids,
            test_ids=test_ids,
            rounds_ahead=rounds_ahead,
        ).begin(self)

    def forecast(
        self,
        *,
        dataset: str,
        plan: Plan,
        run: str = "",
        first_round: int = 0,
        until: int | None = None,
        public_start: bool = False,
        exact_metrics: bool = False,
        train_values: npt.NDArray[Any] | None = None,
        test_values: npt.NDArray[Any] | None = None,
        train_ids: Sequence[str] | range | None = None,
        test_ids: Sequence[str] | range | None = None,
    ) -> tuple[Forecast, ...]:
        """What each limit of the dataset would say to such a session; whatever `open_session` refuses is refused.

        Nothing is written. A reader may ask, and the names are those of `open_session`. Rounds from `until` on will not
        be charged, because all that they tell was told before.
        """
        return Opening(
            dataset=dataset,
            plan=plan,
            run=run,
            session="",
            first_round=first_round,
            public_start=public_start,
            exact_metrics=exact_metrics,
            train_values=train_values,
            test_values=test_values,
            train_ids=train_ids,
            test_ids=test_ids,
            rounds_ahead=1,
        ).forecast(self, until=until)

    @property
    def _lock_file(self) -> Path:
        path = self.path.resolve()  # one lock for one book, by whatever name it is opened
        return path.with_name(path.name + ".lock")

    def _no_lock(self, error: OSError) -> LedgerError:
        return LedgerError(
            f"ledger={str(self.path)!r} cannot be changed: {error.strerror}: {str(self._lock_file)!r}; "
            "see that you may write to that file and its folder"
        )
