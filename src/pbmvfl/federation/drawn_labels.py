"""Labels of the training rows as parties may see them: drawn once, stored by their holder, charged to its own ledger.

    known rows     the stored label, in every later run, at no charge
    other rows     forecast -> drawn -> stored -> charged -> used

A draw that a killed process did not store was never made. One that it stored and did not charge is charged when the
store is next opened, before anything is used: the ledger's session, opened before the draw, has the rows and a batch
id, and the store gets the batch id together with the labels. So the ledger's total is the number of draws made.

A row is known by the owner's names of the data, of the label and of the row, by the names of the classes and by the law
of the draw, never by its true label: a corrected label keeps its draw. Another data version, another law or another
label column is another draw, and is charged. Whether labels are drawn, stored or refused depends on none of them.

Shape suffixes: N training rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from pbmvfl._files import PRIVATE_FILE, make_private_folder, write_atomically
from pbmvfl._text import counted
from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.errors import AnswersError, CheckpointError, LedgerError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.ledger_folder import LABEL_HOLDER, OpenLedgers, PartyForecast, check_reaches_end, look_ahead
from pbmvfl.ledger.session_opening import Opening, SessionRows
from pbmvfl.ledger.session_terms import LabelDraws
from pbmvfl.ledger.store import LedgerEntry
from pbmvfl.mechanisms.label_response import LabelResponse
from pbmvfl.mechanisms.randomized_response import RandomisedResponse
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import FUSION, LABELS
from pbmvfl.protocol.stored_answers import StoredAnswers

if TYPE_CHECKING:
    from pbmvfl.crypto.entropy import Entropy

_Labels = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]

#: Folder of the store beside a simulation's ledgers, or beside the server's checkpoints.
FOLDER = "labels"
#: Digest of a run's drawn labels, beside the server's checkpoints.
_DIGEST = "labels.sha256"
_BATCH_BYTES = 16
#: False alarms of the note about stored labels that are other rows'.
_FALSE_ALARMS = 1e-9
_WAY_OUT = (
    "Stored labels cost nothing: keep the store, and the label epsilon that they were drawn with. Or draw them by a "
    "smaller label epsilon, or let the label holder raise its limit: `pbmvfl ledger limit ... --unit label`"
)


@dataclass(frozen=True, eq=False)
class DrawnLabels:
    """Labels for everything that a party can see, (N,), and remarks for the label holder alone."""

    labels_N: _Labels
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelHolder:
    """Label holder's own side of a draw: its names of the rows, its store and its ledger.

    Args:
        dataset: Name that the ledger counts under.
        class_names: Names of the classes, by their numbers.
        label: Name of the label's column; "" if it has none.
        row_ids: The owner's names of the training rows; None: their numbers.
        data_version: The owner's public name of the state that the labels are in.
        store: Folder of the store, or a store that is open; None: draws are not kept.
        store_is_of_run: Whether the store is one run's, so that it need not have rows that the ledger knows.
        ledger: File of the ledger; None: nothing is charged.
        owner: Name that the ledger belongs to.
        durable: Whether each charge is forced to the disk.
        redraw: Owner permits a second draw, which is charged, of labels that the store has lost.
        way_to_redraw: How the owner gives that permission.
    """

    dataset: str
    class_names: Sequence[str]
    label: str = ""
    row_ids: Sequence[str] | None = None
    data_version: str = ""
    store: Path | StoredAnswers | None = None
    store_is_of_run: bool = False
    ledger: Path | None = None
    owner: str = LABEL_HOLDER
    durable: bool = False
    redraw: bool = False
    way_to_redraw: str = "--redraw-labels, Federation.fit(redraw_labels=True)"

    def draw(
        self,
        response: LabelResponse | None,
        labels_N: _Labels,
        *,
        resumes: bool = False,
        entropy: Entropy | None = None,
    ) -> DrawnLabels:
        """Return the labels to use, stored and charged.

        Args:
            response: The law; None: labels are used in clear.
            labels_N: True labels.
            resumes: Whether the run has released anything before: then the store must have all of its labels.
            entropy: Source of randomness; None for the system's.

        Raises:
            AnswersError: The store is damaged or in use.
            LedgerError: The ledger cannot be used, or knows draws that the store does not have.
            BudgetExceeded: A limit of the label holder does not permit the draw. Nothing was drawn.
        """
        if response is None:
            return DrawnLabels(labels_N)
        with self._opened() as store:
            self._charge_left(store)
            found = self._look_up(store, response, len(labels_N))
            if not found.known_N.all():
                self._check_not_lost(response, found, resumes=resumes)
            drawn_N = self._settle(store, response, labels_N, found, entropy or SystemEntropy())
        return DrawnLabels(drawn_N, _notes(response, labels_N[found.known_N], drawn_N[found.known_N]))

    def forecast(self, response: LabelResponse, num_rows: int, *, resumes: bool = False) -> PartyForecast:
        """Return what the ledger will say to a draw, or refuse it as `draw` would; nothing is written or drawn."""
        if isinstance(self.store, Path) and not self.store.is_dir():
            found = _none_known(self._names(num_rows), [], charges=self.ledger is not None)
        else:
            with self._opened() as store:
                found = self._look_up(store, response, num_rows)
        if not found.known_N.all():
            self._check_not_lost(response, found, resumes=resumes)
        if found.to_charge_N.any():
            return self._look_ahead(self._opening(response, found.to_charge_N))
        nothing = np.empty(0, dtype=np.int64)  # all rows are named, and none is charged
        return self._look_ahead(replace(self._opening(response, ~found.to_charge_N), unanswered=nothing))

    # --- the draw ---

    def _settle(
        self, store: StoredAnswers, response: LabelResponse, labels_N: _Labels, found: _Found, entropy: Entropy
    ) -> _Labels:
        """Return stored labels where there are some, else draw them; everything is stored and charged by then."""
        drawn_N1 = np.zeros((len(labels_N), 1), dtype=np.int64)
        if found.known_N.all() and not found.to_charge_N.any():
            return np.asarray(store.settle(found.keys, drawn_N1)[:, 0])
        batch = os.urandom(_BATCH_BYTES).hex()
        opening = None
        if self.ledger is not None:
            opening = self._opening(response, found.to_charge_N, batch)
            check_reaches_end([self._look_ahead(opening)], dataset=self.dataset, rounds=1)
        with self._session(opening) as charge:
            missing_N = ~found.known_N
            if missing_N.any():
                drawn_N1[missing_N, 0] = response.draw(labels_N[missing_N], entropy)
            keys, batch_mark = [*found.keys, _mark(store, batch)], np.zeros((1, 1), dtype=np.int64)
            drawn_N1 = store.settle(keys, np.concatenate([drawn_N1, batch_mark]))[:-1]
            charge()
        return np.asarray(drawn_N1[:, 0])

    def _charge_left(self, store: StoredAnswers) -> None:
        """Charge batches that a killed process stored and did not charge."""
        for entry, ids in self._entries(charged=False):
            if store.known([_mark(store, entry.run)]).all():
                plan = LabelDraws(event=_event(entry), num_samples=len(ids))
                with self._session(_opening(entry.dataset, plan, ids, entry.run, entry.session)) as charge:
                    charge()

    # --- rows ---

    def _names(self, num_rows: int) -> list[str]:
        if self.row_ids is None:
            return [str(row) for row in range(num_rows)]
        if len(self.row_ids) != num_rows:
            raise LedgerError(f"row_ids has {len(self.row_ids)} rows, and there are {num_rows} labels")
        return [str(name) for name in self.row_ids]

    @property
    def _what(self) -> _What:
        classes = hashlib.sha256(json.dumps(list(self.class_names)).encode()).hexdigest()[:16]
        return _What(label=self.label, version=self.data_version, classes=classes)

    def _look_up(self, store: StoredAnswers, response: LabelResponse, num_rows: int) -> _Found:
        names = self._names(num_rows)
        release = {"dataset": self.dataset, "what": self._what.to_json(), "event": response.event.to_dict()}
        keys = store.keys(release, names)
        if not len(store):
            return _none_known(names, keys, charges=self.ledger is not None)
        known_N = store.known(keys)
        charged: set[str] = set()
        if self.ledger is not None and known_N.any():
            for entry, ids in self._entries(self.dataset):
                if entry.session == self._what.to_json() and _event(entry) == response.event:
                    charged.update(map(str, ids))
        # A stored label that this ledger has not charged: another ledger was, or it was lost.
        to_charge = [name not in charged or not known for name, known in zip(names, known_N.tolist(), strict=True)]
        return _Found(names, keys, known_N, np.array(to_charge, dtype=np.bool_) & (self.ledger is not None))

    def _check_not_lost(self, response: LabelResponse, found: _Found, *, resumes: bool) -> None:
        """Refuse a second draw of labels, unless the owner permits it."""
        missing = {name for name, known in zip(found.names, found.known_N.tolist(), strict=True) if not known}
        place = str(self.store) if isinstance(self.store, Path) else "memory"
        if resumes:
            raise LedgerError(
                f"labels={place} lacks {counted(len(missing), 'label')} of this run, which has released rounds: the "
                "run's epsilon would not count a second draw; put the store back, or start a new run"
            )
        if self.redraw or self.store_is_of_run:
            return
        for entry, ids in self._entries(self.dataset):
            again, before = len(missing.intersection(map(str, ids))), _What.from_json(entry.session)
            if not again or (before.label, before.version) != (self.label, self.data_version):
                continue
            said = f"dataset={self.dataset!r}: {counted(again, 'label')} were drawn before"
            way_out = f"or draw them a second time, which is charged: {self.way_to_redraw}"
            if before.classes != self._what.classes:
                raise LedgerError(
                    f"{said}, among {_event(entry).symbols} classes; now there are {response.num_classes}, or they "
                    f"have other names. Give the labels the classes that they had, {way_out}"
                )
            if _event(entry) == response.event:
                raise LedgerError(
                    f"{said}, as ledger={str(self.ledger)!r} says, and labels={place} does not have them: the store "
                    f"was lost, or is another one. Put it back, {way_out}"
                )

    # --- store and ledger ---

    @contextlib.contextmanager
    def _opened(self) -> Iterator[StoredAnswers]:
        if isinstance(self.store, StoredAnswers):
            yield self.store
            return
        try:
            store = StoredAnswers(self.store)
        except AnswersError as error:
            raise AnswersError(f"drawn labels: {error}. A second draw needs {self.way_to_redraw}") from error
        with contextlib.closing(store):
            yield store

    def _entries(
        self, dataset: str | None = None, *, charged: bool = True
    ) -> list[tuple[LedgerEntry, Sequence[str] | range]]:
        """Return draws in the ledger with the ids of their rows; those that are not charged if `charged` is False."""
        if self.ledger is None:
            return []
        with OpenLedgers() as ledgers:
            if (ledger := ledgers.begun(self.ledger)) is None:
                return []
            names = ledger.datasets() if dataset is None else [dataset]
            drawn = [each for name in names for each in ledger.sessions(name) if LABELS in each.terms.events]
            done = {each.run for each in drawn if each.charged_until > each.first_round}
            chosen = {each.run: each for each in drawn if (each.run in done) == charged}
            return [(each, ledger.read_ids(each.train_ids)) for each in chosen.values()]

    @contextlib.contextmanager
    def _session(self, opening: Opening | None) -> Iterator[Callable[[], None]]:
        """Open a session of the ledger, and give the function that charges it; without a ledger it does nothing."""
        if self.ledger is None or opening is None:
            yield lambda: None
            return
        with contextlib.closing(Ledger(self.ledger, owner=self.owner, durable=self.durable)) as ledger:
            charging = ledger.open_session(opening)
            current = opening.plan.schedule[0]
            with contextlib.closing(charging):
                yield lambda: charging.charge(current, opening.plan.events(current.kind))

    def _opening(self, response: LabelResponse, to_charge_N: _Mask, batch: str = "") -> Opening:
        ids: Sequence[str] | range = range(len(to_charge_N))
        if self.row_ids is not None or not to_charge_N.all():
            named = zip(self._names(len(to_charge_N)), to_charge_N.tolist(), strict=True)
            ids = [name for name, chosen in named if chosen]
        plan = LabelDraws(event=response.event, num_samples=len(ids))
        return _opening(self.dataset, plan, ids, batch, self._what.to_json())

    def _look_ahead(self, opening: Opening) -> PartyForecast:
        assert self.ledger is not None
        return look_ahead(self.ledger, party=self.owner, opening=opening, way_out=_WAY_OUT)


class _Found(NamedTuple):
    """Rows of a draw, as store and ledger know them."""

    names: list[str]
    keys: list[bytes]
    #: Rows that have a stored label.
    known_N: _Mask
    #: Rows that the ledger is to be charged for.
    to_charge_N: _Mask


def _none_known(names: list[str], keys: list[bytes], *, charges: bool) -> _Found:
    """Return rows of which the store has no label."""
    return _Found(names, keys, np.zeros(len(names), dtype=np.bool_), np.full(len(names), charges))


class _What(NamedTuple):
    """Public description of labels, which a ledger keeps with a session."""

    label: str
    version: str
    #: Digest of the classes' names.
    classes: str

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> _What:
        return cls(**json.loads(text))


def _opening(dataset: str, plan: LabelDraws, ids: Sequence[str] | range, batch: str, what: str) -> Opening:
    rows = SessionRows(train_ids=ids)
    return Opening(dataset=dataset, plan=plan, rows=rows, run=batch, session=what, public_start=True)


def _event(entry: LedgerEntry) -> RandomisedResponse:
    event = entry.terms.release(LABELS)
    assert isinstance(event, RandomisedResponse)
    return event


def _mark(store: StoredAnswers, batch: str) -> bytes:
    """Return the key by which a store knows that it has a batch."""
    return store.keys({"batch": batch}, [""])[0]


def _notes(response: LabelResponse, true_N: _Labels, stored_N: _Labels) -> tuple[str, ...]:
    """Name stored labels that agree with the true ones about as often as other rows' labels would.

    A remark for the label holder: nothing that others see may depend on it.
    """
    if not len(true_N):
        return ()
    expected, found = 1 - response.flipped, float(np.mean(true_N == stored_N))
    counts = [np.bincount(each, minlength=response.num_classes) / len(each) for each in (true_N, stored_N)]
    by_chance = float(counts[0] @ counts[1])
    # Chernoff: the law agrees so rarely with probability at most exp(-N KL(found || expected)).
    parts = ((found, expected), (1 - found, 1 - expected))
    divergence = sum(share * math.log(share / of) for share, of in parts if share)
    if found > (expected + by_chance) / 2 or len(true_N) * divergence < -math.log(_FALSE_ALARMS):
        return ()
    return (
        "stored labels agree with the true ones much less often than their law says: they were drawn for other rows "
        "under the same names, or most labels were changed since; nothing was drawn anew",
    )


def with_true_labels(plan: Plan, labels_N: _Labels, true_N: _Labels) -> _Labels:
    """Return the labels that a server works with: drawn ones, but for fusion rows, whose true labels never leave it."""
    if not plan.num_fusion_samples:
        return labels_N
    found, fused = labels_N.copy(), plan.schedule.part_of(FUSION)
    found[fused] = true_N[fused]
    return found


def keep_draw(folder: Path, labels_N: _Labels, *, resumes: bool) -> None:
    """Note a run's drawn labels beside the server's checkpoints, and refuse to resume the run with others.

    Raises:
        CheckpointError: The run was begun with other draws.
    """
    path, digest = folder / _DIGEST, hashlib.sha256(labels_N.astype("<i8").tobytes()).hexdigest() + "\n"
    if resumes and path.is_file() and path.read_text() != digest:
        raise CheckpointError(
            f"{folder} is of a run with other drawn labels than those in the store, and its epsilon counts one draw; "
            "put back the store that it was begun with, or start a new run"
        )
    make_private_folder(folder)
    write_atomically(path, digest, mode=PRIVATE_FILE)
