"""Beginning a session in a ledger: everything that can be refused is refused here, before anything is released."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from filelock import lock_descriptor

from pbmvfl._descriptors import set_mode
from pbmvfl.errors import LedgerError
from pbmvfl.ledger import history
from pbmvfl.ledger.charging import Charging, RowByRow, check_permitted
from pbmvfl.ledger.database import has_row_values, now
from pbmvfl.ledger.forecast import Forecast, forecasts
from pbmvfl.ledger.row_identity import Digests, check_ids, keep_ids, keyed_digests, row_digests, shared_rows
from pbmvfl.ledger.session_lock import Holder, check_free, forget, take
from pbmvfl.ledger.session_terms import LabelDraws, SessionTerms
from pbmvfl.ledger.store import LedgerEntry, LedgerStore
from pbmvfl.ledger.tamper_evidence import Outside, key_of
from pbmvfl.plan.groups import Evaluation
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import Split
from pbmvfl.plan.schedule import Round, Schedule


@dataclass(frozen=True, eq=False)
class _Values:
    """Kept part of a session's values: digests of all rows together, and of each."""

    digests: tuple[str, ...]
    rows: Digests


@dataclass(frozen=True, eq=False, kw_only=True)
class SessionRows:
    """Values and ids of a session's rows. They are digested once for a forecast and its session."""

    #: (N, D) the party's training rows, and (T, D) its test rows. Only digests under the ledger's own key are kept.
    train_values: npt.NDArray[Any] | None = None
    test_values: npt.NDArray[Any] | None = None
    #: None for the rows' numbers, test rows after training rows.
    train_ids: Sequence[str] | range | None = None
    test_ids: Sequence[str] | range | None = None
    _digested: dict[tuple[bytes, frozenset[Split]], _Values] = field(default_factory=dict, init=False, repr=False)
    _chosen: dict[bytes, SessionRows] = field(default_factory=dict, init=False, repr=False)

    def ids(self, schedule: Schedule) -> tuple[Sequence[str] | range, Sequence[str] | range]:
        """Return the ids of both splits, or refuse other numbers of rows than the schedule has."""
        count, num_test = schedule.num_samples, schedule.num_test_samples
        train = range(count) if self.train_ids is None else self.train_ids
        test = range(count, count + num_test) if self.test_ids is None else self.test_ids
        for ids, planned, name in ((train, count, "train_ids"), (test, num_test, "test_ids")):
            if len(ids) != planned:
                raise LedgerError(f"{name} has {len(ids)} rows, the plan has {planned}")
        return train, test

    def chosen(self, rows: npt.NDArray[np.int64], planned: Schedule) -> SessionRows:
        """Return these test rows alone, of those that the schedule has; the same object for the same rows."""
        _, test = self.ids(planned)
        if len(rows) == len(test):
            return self
        if (known := rows.tobytes()) not in self._chosen:
            self._chosen[known] = SessionRows(
                test_values=None if self.test_values is None else self.test_values[rows],
                train_ids=self.train_ids,
                test_ids=[str(test[row]) for row in rows.tolist()],
            )
        return self._chosen[known]

    def used(self, schedule: Schedule) -> list[tuple[npt.NDArray[Any], Sequence[str] | range]]:
        """Return values and ids of the splits that a session releases or learns anything of."""
        train, test = self.ids(schedule)
        splits = {kind.split for kind in schedule.kinds}
        both = ((Split.TRAIN, self.train_values, train), (Split.TEST, self.test_values, test))
        return [(rows, ids) for split, rows, ids in both if split in splits and rows is not None and len(rows)]

    def digests(self, key: bytes, schedule: Schedule) -> _Values:
        """Return the digests of the values under a ledger's key."""
        known = (key, frozenset(kind.split for kind in schedule.kinds))
        if known not in self._digested:
            whole = keyed_digests(key, self.train_values, self.test_values, *self.ids(schedule))
            each = row_digests(key, *(rows for rows, _ in self.used(schedule)))
            self._digested[known] = _Values(whole, each)
        return self._digested[known]


@dataclass(frozen=True, eq=False, kw_only=True)
class Opening:
    """A session that a party asks its ledger for."""

    #: The owner's name for the data.
    dataset: str
    plan: Plan | LabelDraws
    #: All rows of the plan.
    rows: SessionRows = field(default_factory=SessionRows)
    #: Numbers of the test rows that have no stored answer, if only those are charged, one by one; none: nothing is.
    unanswered: npt.NDArray[np.int64] | None = None
    run: str = ""
    session: str = ""
    #: The first round that it may charge.
    first_round: int = 0
    #: The run began with weights that depend on no row. Without it every release of the session is charged as one that
    #: may be about any row.
    public_start: bool = False
    #: The owner permits exact metrics of rows with a limit.
    exact_metrics: bool = False
    #: How many rounds are written in one transaction. Those that were not used are given back when the session is
    #: closed or the owner changes a limit, and stay charged if the process is killed.
    rounds_ahead: int = 1

    def begin(self, store: LedgerStore) -> Charging:
        self._check_numbers()
        train, test = self._own_rows.ids(self._schedule)
        holder = Holder.new()
        lock = _lock(store)
        outside: Outside | None = None
        try:
            outside = _outside(store, lock)
            with store.transaction():
                store.announce(lock)
                store.check_unspoiled()
                take(store.db, store.path, holder)
                self._check_permitted(store)
                values = self._check_values(store)
                history.close_left_sessions(store.db)
                terms, started = replace(self._terms(store), schedule=self._schedule), self._is_started(store)
                number = self._insert(store, terms, values, train, test)
            # So that a copy of the file without its log is never an empty ledger.
            store.db.rows("PRAGMA wal_checkpoint(PASSIVE)")
            return Charging(
                store,
                number,
                self.dataset,
                terms,
                self._first_in_line,
                row_by_row=self._row_by_row,
                lock=lock,
                outside=outside,
                holder=holder,
                run_started=started,
                rounds_ahead=self.rounds_ahead,
                shows_exact_metrics=self._shows_exact_metrics,
            )
        except BaseException:
            forget(holder)
            if outside is not None:
                outside.close()
            os.close(lock)
            raise

    @cached_property
    def _row_by_row(self) -> RowByRow | None:
        if self.unanswered is None or not len(self.unanswered):
            return None
        return RowByRow(planned=self.plan.schedule, first_round=self.first_round, rows=self.unanswered)

    @property
    def _schedule(self) -> Schedule:
        """The schedule of the session's line in the ledger."""
        return self.plan.schedule if self._row_by_row is None else self._row_by_row.schedule

    @property
    def _first_in_line(self) -> int:
        """The first round of that schedule that the session may charge."""
        return self.first_round if self._row_by_row is None else 0

    @property
    def _own_rows(self) -> SessionRows:
        """The rows that the line names."""
        if self._row_by_row is None:
            return self.rows
        return self.rows.chosen(self._row_by_row.rows, self.plan.schedule)

    def forecast(self, store: LedgerStore) -> tuple[Forecast, ...]:
        """Return what each limit says to the session, or refuse as `begin` would; nothing is written."""
        self._check_numbers()
        train, test = self._own_rows.ids(self._schedule)
        check_ids(train)
        check_ids(test)
        store.check_unspoiled()
        check_free(store.db, store.path)
        self._check_permitted(store)
        self._check_values(store)
        parts: Callable[[], Iterable[Round]] | None = None
        if self.unanswered is not None:
            parts = tuple if self._row_by_row is None else self._row_by_row.charged_parts
        return forecasts(
            store,
            self.dataset,
            self._terms(store),
            train,
            test,
            first_round=self.first_round,
            charged_parts=parts,
            run_started=self.first_round > 0 or self._is_started(store),
        )

    @property
    def _shows_exact_metrics(self) -> bool:
        """Return whether exact metrics will be looked at without the owner's permission."""
        return self.plan.evaluation is Evaluation.SIMULATOR and not self.exact_metrics

    # --- what can be refused ---

    def _check_numbers(self) -> None:
        ahead, first, last = self.rounds_ahead, self.first_round, len(self.plan.schedule)
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1:
            raise LedgerError(f"rounds_ahead={ahead!r}; permitted: 1 or more, 1 charges every round by itself")
        if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first <= last:
            raise LedgerError(f"first_round={first!r}; permitted: 0 to {last}, the number of the plan's rounds")
        for name in ("public_start", "exact_metrics"):
            if not isinstance(getattr(self, name), bool):
                raise LedgerError(f"{name}={getattr(self, name)!r}; permitted: True or False")

    def _check_permitted(self, store: LedgerStore) -> None:
        self._check_continues(store)
        has_limit = bool(store.db.rows("SELECT 1 FROM limits WHERE dataset = ?", (self.dataset,)))
        check_permitted(store, self.dataset, has_limit, self._shows_exact_metrics)

    def _check_continues(self, store: LedgerStore) -> None:
        """Refuse to resume a run whose earlier releases are not here: its epsilon would be too small."""
        ((known,),) = store.db.rows(
            "SELECT max(charged_until) FROM sessions JOIN charged ON id = charged.session "
            "WHERE dataset = ? AND run = ?",
            (self.dataset, self.run),
        )
        if self.first_round > (known or 0):
            raise LedgerError(
                f"ledger={str(store.path)!r} has {known or 'no'} rounds of run={self.run!r} on "
                f"dataset={self.dataset!r}, which goes on at round={self.first_round}: the ledger was moved, replaced "
                "or is another party's, and its epsilon would be too small. Put the run's own ledger back at this "
                "path, or start a new run"
            )

    def _check_values(self, store: LedgerStore) -> _Values:
        """Refuse values that were released under another name, unless the owner says that these are other people."""
        key: bytes = store.db.rows("SELECT key FROM identity")[0][0]
        values = self._own_rows.digests(key, self._schedule)
        if store.db.rows("SELECT 1 FROM allowed WHERE dataset = ?", (self.dataset,)):
            return values
        others = self._others(store)
        for digest in values.digests:
            for (other,) in store.db.rows("SELECT dataset FROM seen_values WHERE digest = ?", (digest,)):
                if other in others:
                    self._refuse_values(store, other, "the values")
        if not has_row_values(store.db):
            return values
        own = []
        for other, blob in store.db.rows("SELECT dataset, digests FROM row_values"):
            known = np.frombuffer(blob, dtype=np.uint32)
            if other in others and (found := shared_rows(values.rows, known)):
                self._refuse_values(store, other, f"{found:,} of the rows")
            if other == self.dataset:
                own.append(known)
        if own:
            names = [str(name) for _, ids in self._own_rows.used(self._schedule) for name in ids]
            self._check_ids_of_values(store, values.rows, names, own)
        return values

    def _check_ids_of_values(self, store: LedgerStore, rows: Digests, ids: list[str], own: Sequence[Digests]) -> None:
        """Refuse rows with new ids and known values: one person with two ids would have two budgets."""
        known = _known_ids(store, self.dataset)
        is_new = np.array([name not in known for name in ids], dtype=np.bool_)
        if not is_new.any():
            return
        for each in own:
            if found := shared_rows(rows[is_new], each):
                raise LedgerError(
                    f"dataset={self.dataset!r} has {found:,} rows with the values of rows that ledger="
                    f"{str(store.path)!r} knows by other ids, and what was spent on those would not count; give a row "
                    "the id that it had (a file that was renamed or cut needs a column of ids: --id, id=...), or, if "
                    f"these are other people, say so: `pbmvfl ledger allow {store.path} --dataset {self.dataset}`"
                )

    def _others(self, store: LedgerStore) -> set[str]:
        """Return other names of which something was released, unless the owner said that these are other people.

        That permission was about one name. Names that had releases of their own by then keep them apart from it; a new
        name would be a way around both.
        """
        charged = {
            name
            for (name,) in store.db.rows(
                "SELECT DISTINCT dataset FROM sessions JOIN charged ON id = charged.session "
                "WHERE charged_until > first_round"
            )
        }
        allowed = {name for (name,) in store.db.rows("SELECT dataset FROM allowed")}
        return charged - {self.dataset} - (allowed if self.dataset in charged else set())

    def _refuse_values(self, store: LedgerStore, other: str, what: str) -> NoReturn:
        raise LedgerError(
            f"dataset={self.dataset!r} has {what} of dataset={other!r} in ledger={str(store.path)!r}, and what was "
            f"spent on those would not count; run it as {other!r}, or, if these are other people, say so: `pbmvfl "
            f"ledger allow {store.path} --dataset {self.dataset}`"
        )

    def _terms(self, store: LedgerStore) -> SessionTerms:
        public = self.public_start and self._began_public(store)
        known = None if public else self._known_datasets(store)
        return SessionTerms.of(self.plan, public_start=public, known_datasets=known)

    def _known_datasets(self, store: LedgerStore) -> tuple[str, ...] | None:
        """Return the datasets whose rows the weights of a trained model know; None: any.

        A training that this ledger charged, and that began with public weights, has told them of no other rows.
        """
        if not self.plan.model:
            return None
        entries = store.entries()
        runs = {entry.run for entry in entries if _is_training_of(self.plan.model, entry)}
        trained = [entry for entry in entries if entry.run in runs]
        if not trained or not all(entry.terms.public_start for entry in trained):
            return None
        return tuple(sorted({entry.dataset for entry in trained}))

    def _is_started(self, store: LedgerStore) -> bool:
        """Return whether the run has charged a round before."""
        return bool(
            store.db.rows(
                "SELECT 1 FROM sessions JOIN charged ON id = charged.session "
                "WHERE run = ? AND charged_until > first_round LIMIT 1",
                (self.run,),
            )
        )

    def _began_public(self, store: LedgerStore) -> bool:
        """Return whether all earlier sessions of the run began with public weights."""
        found = store.db.rows(
            "SELECT DISTINCT terms FROM plans JOIN sessions ON hash = sessions.plan WHERE run = ?", (self.run,)
        )
        return all(store.read_terms(text).public_start for (text,) in found)

    # --- what is written ---

    def _insert(
        self,
        store: LedgerStore,
        terms: SessionTerms,
        values: _Values,
        train: Sequence[str] | range,
        test: Sequence[str] | range,
    ) -> int:
        db = store.db
        key = key_of(self.plan.hash, terms.to_json())
        # Texts that are not the key's, which an owner accepted, would price this session too.
        db.run("INSERT OR REPLACE INTO plans VALUES (?, ?, ?)", (key, self.plan.to_json(), terms.to_json()))
        line = (self.dataset, values.digests[0] if values.digests else "", self.run, self.session, key)
        number = db.run(
            "INSERT INTO sessions (dataset, fingerprint, run, session, plan, train_ids, test_ids, first_round, opened) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*line, keep_ids(db, train), keep_ids(db, test), self._first_in_line, now()),
        ).lastrowid
        assert number is not None
        for digest in values.digests:
            db.run("INSERT OR IGNORE INTO seen_values VALUES (?, ?)", (digest, self.dataset))
        if len(values.rows):
            rows = np.sort(values.rows).tobytes()
            content = hashlib.sha256(rows).hexdigest()
            db.run("INSERT OR IGNORE INTO row_values VALUES (?, ?, ?)", (content, self.dataset, rows))
        db.run("INSERT INTO charged VALUES (?, ?, 1)", (number, self._first_in_line))
        exact = self.plan.evaluation is Evaluation.SIMULATOR and self.exact_metrics
        history.append(db, "opened", session=number, dataset=self.dataset, exact_metrics=exact)
        return number


def _is_training_of(model: str, entry: LedgerEntry) -> bool:
    """Return whether a session is of the training that a model came from."""
    try:
        return Plan.from_dict(entry.plan).model_digest(bytes.fromhex(entry.run)) == model
    except ValueError:  # PlanError too: a plan that cannot be read is of no model that can be asked
        return False


def _known_ids(store: LedgerStore, dataset: str) -> set[str]:
    """Return the ids of all rows that sessions of a dataset were opened for."""
    references = set()
    for entry in store.sessions(dataset):
        splits = {kind.split for kind in entry.terms.schedule.kinds}
        references |= {entry.train_ids} if Split.TRAIN in splits else set()
        references |= {entry.test_ids} if Split.TEST in splits else set()
    return {str(name) for reference in references for name in store.read_ids(reference)}


def _lock(store: LedgerStore) -> int:
    """Lock the ledger: two processes that charge it would each see only half of it."""
    descriptor = store.open_lock(os.O_RDWR | os.O_CREAT)
    with contextlib.suppress(OSError):  # somebody else's
        set_mode(descriptor, 0o600)
    with contextlib.suppress(OSError):  # Without locks another session may charge it.
        if lock_descriptor(descriptor, blocking=False):
            return descriptor
    os.close(descriptor)
    raise LedgerError(f"ledger={str(store.path)!r} is being charged by another session; wait for it")


def _outside(store: LedgerStore, lock: int) -> Outside:
    try:
        return Outside(store.identity, lock, alone=True)
    except LedgerError as error:
        raise LedgerError(f"ledger={str(store.path)!r}: {error}") from None
