"""A party's own ledger of what it has released about each of its rows, over all runs, and the limits it keeps.

SQLite, one transaction a round, written before the bytes leave: a round that was counted and not sent stays counted,
and a round that was sent is never uncounted. The ledger does not store uses one by one: rows of a round follow from the
plan's public schedule, so a session is one line with the rounds it has charged, whatever their number.

Rows are the owner's: a dataset's name and row ids. A digest of the values, under a key that never leaves the ledger,
only detects that they changed or came back under another name; changed values do not get a new budget.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pbmvfl._text import counted, html_table, short_repr
from pbmvfl.errors import LedgerError
from pbmvfl.ledger import history
from pbmvfl.ledger.charging import Charging
from pbmvfl.ledger.database import now
from pbmvfl.ledger.forecast import Forecast, exported, notes_of
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.session_lock import check_free
from pbmvfl.ledger.session_opening import Opening
from pbmvfl.ledger.store import LedgerEntry, LedgerStore
from pbmvfl.ledger.tamper_evidence import Outside, known_outside
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.privacy.units import Accounting, Unit


class Ledger:
    """One party's ledger. Any number of readers; one process at a time may charge it."""

    def __init__(
        self,
        path: Path | str,
        *,
        owner: str = "",
        durable: bool = False,
        must_exist: bool = False,
        read_only: bool = False,
        prepare: bool = True,
    ) -> None:
        """Open a ledger, or make a new one.

        Args:
            path: Its file.
            owner: The party that opens its ledger: a new one is that party's, and another party's is refused.
            durable: Wait for the disk at every round (power loss); without it a killed process loses nothing.
            must_exist: Refuse to make a new one.
            read_only: Change nothing on disk, and need no right to; it may show the ledger as it was when opened.
            prepare: False to look at a ledger that is there, and charge it later: nothing is written before
                `prepare` is called.

        Raises:
            LedgerError: It cannot be used, is another program's database, or another party's ledger.
        """
        self.path = Path(path)
        if self.path.is_dir():
            example = str(self.path / "bank.sqlite")
            raise LedgerError(f"ledger={str(path)!r} is a folder; permitted: a file, such as {example!r}")
        if (must_exist or read_only or not prepare) and not self.path.is_file():
            raise LedgerError(f"ledger={str(path)!r} does not exist; it is made by the first run with --ledger")
        self._store = LedgerStore(self.path, owner=owner, durable=durable, read_only=read_only, prepare=prepare)

    def prepare(self, *, owner: str, durable: bool = False) -> None:
        """Make a ledger that was opened with `prepare=False` ready to be charged.

        Args:
            owner: The party that charges it; another party's ledger is refused.
            durable: As for a new one.
        """
        self._store.prepare(owner=owner, durable=durable)

    def check_owner(self, owner: str) -> None:
        """Refuse another party's ledger.

        Args:
            owner: The party that uses it.

        Raises:
            LedgerError: It has another owner.
        """
        self._store.check_owner(owner)

    @property
    def owner(self) -> str:
        """Return the party that owns it; none for a ledger that an earlier version made."""
        return self._store.owner

    def __repr__(self) -> str:
        return short_repr("Ledger", repr(self.path.name), *self._described())

    def _repr_html_(self) -> str:
        from pbmvfl.ledger.spending import spending

        rows = []
        for dataset in self.datasets():
            runs = counted(len(self.sessions(dataset)), "session")
            for limit in self.limits(dataset) or (None,):
                spent = "" if limit is None else format_epsilon(spending(self, dataset, limit).epsilon)
                rows.append((dataset, runs, "none" if limit is None else str(limit), spent))
        title = f"ledger {self.path.name}; {', '.join(self._described())}"
        return html_table(title, rows, header=("dataset", "sessions", "limit", "epsilon spent"))

    def _described(self) -> list[str]:
        try:
            return [f"owner={self.owner!r}" if self.owner else "", f"datasets={', '.join(self.datasets())}"]
        except LedgerError:
            return ["closed"]

    def close(self) -> None:
        """Close the file."""
        self._store.db.close()

    # --- limits ---

    def set_limit(self, dataset: str, limit: Limit) -> Limit:
        """Set or replace the limit for this unit, accounting and number of colluders; it holds from the next round.

        A limit that replaces another counts at the other's order, and is returned so: an order that was chosen after
        releases were seen is not one that the filter's theorem is about.

        Args:
            dataset: The owner's name for the data.
            limit: The limit to keep.

        Returns:
            The limit as it is counted.
        """
        values = (dataset, str(limit.unit), str(limit.accounting), limit.colluding_parties)
        with self._store.changed():
            earlier = self._store.db.rows(  # also of a limit that was removed
                'SELECT "order" FROM orders '
                "WHERE dataset = ? AND unit = ? AND accounting = ? AND colluding_parties = ?",
                values,
            )
            if earlier and self.charged_to(dataset):
                limit = replace(limit, order=earlier[0][0])
            numbers = (limit.epsilon, limit.delta, limit.order)
            self._store.db.run(
                "INSERT OR REPLACE INTO limits VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*values, *numbers, now())
            )
            self._store.db.run("INSERT OR REPLACE INTO orders VALUES (?, ?, ?, ?, ?)", (*values, limit.order))
            kept = {**asdict(limit), "unit": str(limit.unit), "accounting": str(limit.accounting)}
            history.append(self._store.db, "limit", dataset=dataset, **kept)
        return limit

    def remove_limit(self, dataset: str, unit: Unit, accounting: Accounting, colluding_parties: int) -> None:
        """Remove a limit; what was spent stays counted.

        Args:
            dataset: Name that the limit is for.
            unit: The limit's unit.
            accounting: The limit's accounting.
            colluding_parties: The limit's number of colluders.

        Raises:
            LedgerError: There is no such limit.
        """
        with self._store.changed():
            removed = self._store.db.run(
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
                self._store.db,
                "removed",
                dataset=dataset,
                unit=str(unit),
                accounting=str(accounting),
                colluding_parties=colluding_parties,
            )

    def allow(self, dataset: str) -> None:
        """Note that the owner says `dataset` is about other people, although its values are known by another name.

        Args:
            dataset: The owner's name for the data.
        """
        with self._store.changed():
            self._store.db.run("INSERT OR REPLACE INTO allowed VALUES (?, ?)", (dataset, now()))
            history.append(self._store.db, "allowed", dataset=dataset)

    def note_exact(self, dataset: str) -> None:
        """Note that the owner permits exact predictions of these rows, which are outside of every epsilon.

        Args:
            dataset: The owner's name for the data.
        """
        with self._store.changed():
            history.append(self._store.db, "exact", dataset=dataset)

    def note_uncharged(self, dataset: str, *, num_rows: int) -> None:
        """Note that the owner permits a release of so many rows that no limit counts.

        Args:
            dataset: The owner's name for the data.
            num_rows: Rows of the release.
        """
        with self._store.changed():
            history.append(self._store.db, "uncharged", dataset=dataset, rows=num_rows)

    def limits(self, dataset: str) -> list[Limit]:
        """Return the limits of a dataset.

        Args:
            dataset: The owner's name for the data.
        """
        return self.all_limits().get(dataset, [])

    def all_limits(self) -> dict[str, list[Limit]]:
        """Return the limits of every dataset that has one."""
        return self._store.all_limits()

    @property
    def has_limits(self) -> bool:
        """Return whether any dataset has one."""
        return self._store.has_limits

    # --- copies ---

    def trouble(self) -> str | None:
        """Return why this ledger cannot be trusted to have everything, as the end of a sentence; None if it can.

        It is an older copy, or something else wrote to it.
        """
        return self._store.trouble()

    def check_unspoiled(self) -> None:
        """Refuse a ledger that cannot be trusted to have everything.

        Raises:
            LedgerError: `trouble` has a reason.
        """
        self._store.check_unspoiled()

    def accept(self) -> str | None:
        """Take the ledger as it is, which is noted in it, and return what was wrong with it; None if nothing was."""
        with contextlib.ExitStack() as opened:
            with self._store.transaction():
                check_free(self._store.db, self.path)
                if (found := self.trouble()) is None:
                    return None
                outside = known_outside(self._store.identity, self._store.lock_file)
                behind = max(0, max((each.counter for each in outside), default=0) - self._store.known().counter)
                self._store.db.run("UPDATE identity SET changes = changes + ?", (behind + 1,))
                history.append(self._store.db, "accepted", why=found)
                history.append(self._store.db, "owned", owner=self.owner)  # as it is, like the rest
                lock: int | None = None
                with contextlib.suppress(FileNotFoundError):
                    lock = self._store.open_lock(os.O_RDWR)
                    opened.callback(os.close, lock)
                places = Outside(self._store.identity, lock, alone=False)
                opened.callback(places.close)
                known = self._store.known()
            places.write(known, force=True)
        return found

    # --- contents ---

    def datasets(self) -> list[str]:
        """Return every name that has a session or a limit."""
        found = self._store.db.rows("SELECT dataset FROM sessions UNION SELECT dataset FROM limits ORDER BY 1")
        return [name for (name,) in found]

    def sessions(self, dataset: str) -> list[LedgerEntry]:
        """Return the sessions of a dataset, in their order.

        Args:
            dataset: The owner's name for the data.
        """
        return self._store.sessions(dataset)

    def charged_to(self, dataset: str) -> list[LedgerEntry]:
        """Return the sessions that a dataset's limits count, in their order.

        Those are its own, and those of other datasets whose first weights may know its rows.

        Args:
            dataset: The owner's name for the data.
        """
        return self._store.charged_to(dataset)

    def refusals(self, session: int) -> list[tuple[int, str, str]]:
        """Return the rounds that a session was refused.

        Args:
            session: The session's number in this ledger.

        Returns:
            (round, reason, when) of each.
        """
        return self._store.db.rows("SELECT round, reason, at FROM refusals WHERE session = ?", (session,))

    def history(self) -> list[history.Event]:
        """Return what the owner and the sessions did, in its order."""
        return history.events(self._store.db)

    def notes(self, dataset: str) -> list[str]:
        """Return what a reader should know beside the numbers.

        Args:
            dataset: The owner's name for the data.
        """
        return notes_of(self, dataset)

    def export(self) -> dict[str, Any]:
        """Return the whole ledger as plain values, with what each limit has left, without what tells values."""
        return exported(self)

    def read_ids(self, reference: str) -> Sequence[str] | range:
        """Return the rows that a session's line refers to.

        Args:
            reference: The reference in the session's line.
        """
        return self._store.read_ids(reference)

    # --- charging ---

    def open_session(self, opening: Opening) -> Charging:
        """Begin to charge a session.

        Args:
            opening: What the session is about: data set, plan, run, rows and where it begins.

        Returns:
            The open session, which charges rounds.
        """
        self._store.check_writable()
        return opening.begin(self._store)

    def forecast(self, opening: Opening) -> tuple[Forecast, ...]:
        """Return each limit's answer to such a session; whatever `open_session` refuses is refused.

        Nothing is written, and a reader may ask.

        Args:
            opening: What the session is about.
        """
        return opening.forecast(self._store)
