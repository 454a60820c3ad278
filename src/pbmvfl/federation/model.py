"""FederatedModel: every part of a trained federation on one machine, and its predictions.

    model = pbmvfl.Federation(plan).fit(data).model
    model.save("model")                       # model/bank, model/shop, model/server: each to its owner
    pbmvfl.load("model").predict("new.csv")   # one release a row, charged to the parties' ledgers

A real federation has the parts at their owners; this is the simulation of it, with the same state machines.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import nn

from pbmvfl._text import html_table, short_repr
from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.data.new_rows import NewRows
from pbmvfl.errors import DataError, ModelError
from pbmvfl.federation.in_process import InProcess
from pbmvfl.federation.model_files import INDEX, SERVER, Part, PartyPart, ServerPart, folder_name
from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.federation.predictions import Predictions
from pbmvfl.federation.serving import (
    Release,
    ReleaseOptions,
    Rows,
    Served,
    check_known,
    exact_scores,
    look_exactly,
    note_uncharged,
    release_for,
    serve,
    serving_plan,
    taken_rows,
)
from pbmvfl.ledger.ledger_folder import OpenLedgers, PartyForecast, check_reaches_end, ledger_files_for, make_folder
from pbmvfl.mechanisms.votes import VoteKind
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import Split
from pbmvfl.privacy.conversion import usual_delta
from pbmvfl.privacy.table import PrivacyTable, privacy_table
from pbmvfl.privacy.units import Unit
from pbmvfl.protocol.party import weights_are_charged
from pbmvfl.protocol.server import fusion_of, has_fusion
from pbmvfl.protocol.session import Tap
from pbmvfl.protocol.stored_answers import share_answers
from pbmvfl.training.fusion import FusionModel
from pbmvfl.wire.traffic import Traffic

if TYPE_CHECKING:
    from pbmvfl.data.column_rules import PartyColumns

#: Noise of so much of all votes together leaves little of them.
_DROWNED = 0.5
_WITHIN_A_LIMIT = (
    "Ask for fewer rows or a smaller epsilon, or for as many rows as the limit allows: --until-limit, "
    "ReleaseOptions(until_limit=True)"
)
DEFAULT = ReleaseOptions()
_ANSWERS = "answers"
#: Releases that are remembered, so that asking again for the same rows in the same way releases nothing.
_REMEMBERED = 8


class FederatedModel:
    """A trained federation: `predict`, `predict_proba`, `score`, `evaluate`, `save`."""

    def __init__(
        self,
        server: ServerPart,
        parties: Sequence[PartyPart],
        *,
        encoders: Sequence[nn.Module] | None = None,
        fusion: Any = None,
        ledger: Path | str | None = None,
        folder: Path | None = None,
        checkpoints: Path | None = None,
        setup_kind: type[PartySetup] = PartySetup,
        noise_is_seeded: bool = False,
    ) -> None:
        """Put a model together from its parts.

        Args:
            server: The label holder's part.
            parties: A part for each party.
            encoders: The owners' own networks, where training had such: their weights come from the parts.
            fusion: The label holder's own classifier, where it was the fusion model: it is fitted again.
            ledger: Folder of the parties' ledgers, which predictions are charged to.
            folder: Where the parts are; each party keeps its answers beside them.
            checkpoints: Where the answers are that training gave, before there is a `folder`.
            setup_kind: Class of a party's inputs.
            noise_is_seeded: Whether the noise is known, so that no epsilon holds.

        Raises:
            ModelError: The parts do not belong together, or own networks are missing.
        """
        self._server, self._parties = server, sorted(parties, key=lambda part: part.index)
        _check_parts(server, self._parties)
        if any(part.own_network for part in self._parties) != (encoders is not None):
            raise ModelError(
                "this model was trained with the owners' own networks; give them again: "
                "pbmvfl.load(folder, encoders=[...])"
                if encoders is None
                else "this model has the plan's networks; leave encoders out"
            )
        if server.own_fusion != (fusion is not None):
            raise ModelError(
                "this model was trained with the label holder's own classifier as its fusion model; give it again: "
                "pbmvfl.load(folder, fusion=...)"
                if fusion is None
                else "this model has the plan's fusion model; leave fusion out"
            )
        self._own_fusion = fusion
        self._encoders, self._folder, self._checkpoints = encoders, folder, checkpoints
        self._setup_kind, self._noise_is_seeded = setup_kind, noise_is_seeded
        #: The folder of the parties' ledgers; None where there are none.
        self.ledger = None if ledger is None else Path(ledger)
        self._released: OrderedDict[bytes, Predictions] = OrderedDict()
        #: Called with (direction, party, bytes) for every message.
        self.taps: list[Tap] = []

    # --- what it is ---

    @property
    def digest(self) -> str:
        """Digest that all its parts have in common."""
        return self._server.model

    @property
    def plan(self) -> Plan:
        """The training plan."""
        return self._server.plan

    @property
    def dataset(self) -> str:
        """The owners' name of the people it was trained on."""
        return self._server.dataset

    @property
    def party_names(self) -> tuple[str, ...]:
        """Names of the parties, by index."""
        return self._server.party_names

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, by number."""
        return self._server.class_names

    @property
    def label(self) -> str | None:
        """The column that the labels of training came from; None if they came from no table."""
        return self._server.label

    @property
    def columns(self) -> tuple[PartyColumns, ...] | None:
        """Names and encoding of every party's columns; None if it was trained on arrays."""
        found = [part.columns for part in self._parties]
        return None if any(each is None for each in found) else tuple(each for each in found if each is not None)

    def __repr__(self) -> str:
        return short_repr("FederatedModel", *(f"{name}={value}" for name, value in self._described.items()))

    def _repr_html_(self) -> str:
        return html_table("federated model", [*self._described.items(), ("ledgers", self.ledger or "none")])

    @property
    def _described(self) -> dict[str, str]:
        return {
            "dataset": repr(self.dataset),
            "algorithm": str(self.plan.algorithm),
            "parties": ", ".join(self.party_names),
            "classes": ", ".join(self.class_names),
            "digest": self.digest[:8],
        }

    def __reduce__(self) -> str:
        raise ModelError(
            "a model cannot be pickled: its parts belong to different owners, and a pickle runs code when it is read; "
            "use model.save(folder) and pbmvfl.load(folder)"
        )

    # --- files ---

    def save(self, folder: Path | str) -> Path:
        """Write every part into a folder of its own inside `folder`, which must not hold another model.

        Answers that a party has given are known there, too: those to test rows that training released among them.

        Args:
            folder: A new folder, or an empty one.

        Returns:
            The folder.

        Raises:
            ModelError: The folder holds something.
        """
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ModelError(
                f"folder={str(folder)!r} exists already and is not empty; nothing was written. Give another"
            )
        for part in self._parties:
            part.save(folder / folder_name(part.party))
            if (answers := self._answers_of(part)) is not None:
                share_answers(answers, folder / folder_name(part.party) / _ANSWERS)
        self._server.save(folder / SERVER)
        self._folder = folder
        return folder

    # --- predictions ---

    def predict(
        self, rows: Rows, options: ReleaseOptions = DEFAULT, *, id: str | None = None, dataset: str | None = None
    ) -> npt.NDArray[np.object_]:
        """Return the predicted class of each row, by its name.

        Args:
            rows: Rows to predict, as in `release`.
            options: Epsilon, ledgers and limits of the release.
            id: Column of row ids, if `rows` is a table.
            dataset: The owners' name of the people; None for training's.
        """
        return self.release(rows, options, id=id, dataset=dataset).labels

    def predict_proba(
        self, rows: Rows, options: ReleaseOptions = DEFAULT, *, id: str | None = None, dataset: str | None = None
    ) -> npt.NDArray[np.float64]:
        """Return P(class) of each row, (N, K), in the order of `class_names`.

        Args:
            rows: Rows to predict, as in `release`.
            options: Epsilon, ledgers and limits of the release.
            id: Column of row ids, if `rows` is a table.
            dataset: The owners' name of the people; None for training's.
        """
        return self.release(rows, options, id=id, dataset=dataset).probabilities

    def score(
        self,
        rows: Rows,
        labels: Sequence[Any] | npt.NDArray[Any] | None = None,
        options: ReleaseOptions = DEFAULT,
        *,
        label: str | None = None,
        id: str | None = None,
        dataset: str | None = None,
    ) -> float:
        """Return the accuracy of released predictions.

        Args:
            rows: Rows to predict, as in `release`.
            labels: Names of the true classes; None where the rows bring their labels.
            options: Epsilon, ledgers and limits of the release.
            label: Column of the labels, if `rows` is a table.
            id: Column of row ids, if `rows` is a table.
            dataset: The owners' name of the people; None for training's.
        """
        released = self.release(rows, options, label=label, id=id, dataset=dataset)
        true = None if labels is None else self._numbers_of(labels)
        return released.metrics(true)["test_accuracy"]

    def evaluate(
        self,
        rows: Rows,
        options: ReleaseOptions = DEFAULT,
        *,
        label: str | None = None,
        label_data: Any = None,
        id: str | None = None,
        dataset: str | None = None,
    ) -> dict[str, float]:
        """Return accuracy, and AUPRC for two classes, of released predictions of rows that bring their labels.

        Args:
            rows: Rows to predict, as in `release`.
            options: Epsilon, ledgers and limits of the release.
            label: Column of the labels, if `rows` is a table.
            label_data: Table with ids and labels, if the rows have none.
            id: Column of row ids, if `rows` is a table.
            dataset: The owners' name of the people; None for training's.
        """
        return self.release(rows, options, label=label, label_data=label_data, id=id, dataset=dataset).metrics()

    def release(
        self,
        rows: Rows,
        options: ReleaseOptions = DEFAULT,
        *,
        label: str | None = None,
        label_data: Any = None,
        id: str | None = None,
        dataset: str | None = None,
    ) -> Predictions:
        """Predict rows: one release of each, charged to every party's ledger.

        Rows that a party's limit would not all allow are refused before anything is released, unless
        `options.until_limit`. Where a party's ledger has a limit, rows without an `id` are refused.

        Rows with ids that this object released before, with the same options, are answered from what was released,
        whatever their columns are by now: an answer that changed with a cell would tell of it. Another
        `options.data_version` releases, and charges, all rows anew. Rows without ids are nobody in particular, and are
        released anew each time where a ledger counts them.

        Args:
            rows: A file or a frame with the model's columns, one of each for each party, one array for each party, or
                what `load_rows` gave.
            options: Cost of a row, and how it is charged.
            label: Column of the true classes, for metrics.
            label_data: File or frame that has that column, if `rows` have not.
            id: Column by which ledgers know a row.
            dataset: Name under which rows are charged; None for that of the people that the model was trained on.

        Returns:
            The predictions. `Predictions.stopped` names the limit that ended them early, if one did.

        Raises:
            BudgetExceeded: A party's limit would be crossed; nothing was released.
            LedgerError: A ledger refuses the session, or `options.exact` lacks the owners' permission.
            DataError: The rows are not such as the model takes.
            ModelError: The model cannot predict them.
        """
        taken = self._taken(rows, label=label, label_data=label_data, id=id, dataset=dataset)
        release = self._release(options.epsilon, options.delta, options.unit) if not options.exact else None
        plan = self._serving_plan(len(taken.ids), release)
        folder = self._ledger_folder(options)
        if options.exact:
            look_exactly(self._parties, self._folder_of(options), taken.name, permitted=options.exact_metrics)
        elif options.uncharged:
            note_uncharged(self._parties, self._folder_of(options), taken.name, num_rows=len(taken.ids))
        known = None if options.exact else self._known_by(plan, taken, options.data_version, charged=folder is not None)
        if known is not None and known in self._released:
            self._released.move_to_end(known)
            return replace(self._released[known], true_labels=taken.labels)
        started = time.perf_counter()
        with OpenLedgers(to_charge=True) as opened:  # each party's once: it is looked at, and then charged
            setups = self._setups(plan, taken, folder, opened, options.data_version)
            if folder is not None:
                make_folder(folder)
                if not options.until_limit:
                    ahead = self._ahead(setups)
                    rounds = len(plan.schedule)
                    check_reaches_end(ahead, dataset=taken.name, rounds=rounds, way_out=_WITHIN_A_LIMIT)
            with contextlib.closing(InProcess(setups, self._encoders)) as transport:
                serves = self._serve_exactly if options.exact else self._serve
                served = serves(plan, transport, options)
        found = Predictions(
            ids=taken.ids,
            class_names=self.class_names,
            scores_NK=served.scores_NK,
            plan=plan,
            traffic=served.traffic,
            seconds=time.perf_counter() - started,
            exact=options.exact,
            stopped=served.stopped,
            public_start=served.public_start,
            noise_is_seeded=self._noise_is_seeded,
            true_labels=taken.labels,
        )
        if known is not None and not found.stopped:
            self._remember(known, found)
        return found

    def _serve(self, plan: Plan, transport: InProcess, options: ReleaseOptions) -> Served:
        total, on_round = len(plan.schedule), options.on_round
        return serve(
            plan,
            trained=dict(self._server.state),
            fusion=self.fusion if plan.num_fusion_samples else None,
            transport=transport,
            owners=transport,
            taps=self.taps,
            on_round=None if on_round is None else lambda done: on_round(done, total),
        )

    def _serve_exactly(self, plan: Plan, transport: InProcess, _: ReleaseOptions) -> Served:
        embeddings = transport.exact_embeddings(Split.TEST)
        scores = exact_scores(plan, trained=dict(self._server.state), embeddings=embeddings).numpy()
        return Served(scores_NK=scores, traffic=Traffic())

    def serving_plan_for(
        self,
        num_rows: int,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        unit: Unit | str = Unit.CELL,
    ) -> Plan:
        """Return the plan of a session that predicts so many rows.

        Args:
            num_rows: Rows that are predicted.
            epsilon: Privacy budget of one predicted row; None: that of the plan.
            delta: Its delta; None: the default of `Plan.privacy`.
            unit: What the epsilon protects: cell or record.
        """
        return self._serving_plan(num_rows, self._release(epsilon, delta, unit))

    def prediction_privacy(
        self,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        unit: Unit | str = Unit.CELL,
        num_rows: int = 1,
    ) -> PrivacyTable:
        """Return what `release` will cost a row, before anything is released.

        Args:
            epsilon: Privacy budget of one predicted row; None: that of the plan.
            delta: Its delta; None: the default of `Plan.privacy`.
            unit: What the epsilon protects: cell or record.
            num_rows: Rows that are predicted. They matter where weights know rows that were trained on without noise:
                then each release is about all of those.
        """
        plan = self.serving_plan_for(num_rows, epsilon=epsilon, delta=delta, unit=unit)
        run = plan.training_run(public_start=self._weights_are_charged)
        return privacy_table(run.of_split(Split.TEST), delta=self._delta(delta), noise_is_known=self._noise_is_seeded)

    def forecast(
        self, rows: Rows, options: ReleaseOptions = DEFAULT, *, id: str | None = None, dataset: str | None = None
    ) -> list[PartyForecast]:
        """Return what each party's ledger will say to `release` with the same arguments; nothing is written.

        Args:
            rows: Rows to predict, as in `release`.
            options: Epsilon, ledgers and limits of the release.
            id: Column of row ids, if `rows` is a table.
            dataset: The owners' name of the people; None for training's.

        Returns:
            A forecast for each party; none where no ledger would count the rows.
        """
        folder = self._ledger_folder(options)
        if folder is None:
            return []
        taken = self._taken(rows, label=None, label_data=None, id=id, dataset=dataset)
        plan = self.serving_plan_for(len(taken.ids), epsilon=options.epsilon, delta=options.delta, unit=options.unit)
        with OpenLedgers() as opened:
            return self._ahead(self._setups(plan, taken, folder, opened, options.data_version))

    def prediction_words(
        self, *, epsilon: float | None = None, delta: float | None = None, unit: Unit | str = Unit.CELL
    ) -> str:
        """Describe the law by which a row is released, and why.

        Args:
            epsilon: Privacy budget of one predicted row; None: that of the plan.
            delta: Its delta; None: the default of `Plan.privacy`.
            unit: What the epsilon protects: cell or record.

        Returns:
            A sentence's beginning, without a full stop.
        """
        release = self._release(epsilon, delta, unit)
        return f"{release.mechanism.describe()}: {release.words}"

    def prediction_notes(
        self, *, epsilon: float | None = None, delta: float | None = None, unit: Unit | str = Unit.CELL
    ) -> list[str]:
        """Return what to know before a row is paid for: whether noise leaves anything of the votes.

        Args:
            epsilon: Privacy budget of one predicted row; None: that of the plan.
            delta: Its delta; None: the default of `Plan.privacy`.
            unit: What the epsilon protects: cell or record.
        """
        release = self._release(epsilon, delta, unit)
        noise = release.mechanism.variance_upper_bound**0.5 / release.mechanism.bound
        parties = self.plan.num_parties
        if release.mechanism.stands_alone or noise < _DROWNED * parties:
            return []
        what = "embeddings" if release.voting.vote is VoteKind.RAW else "votes"
        return [
            f"noise of {noise:.2g} on sums of {parties} {what}: expect predictions hardly better than the most "
            "frequent class, however good the model is; a larger epsilon for each row would help, more training would "
            "not",
        ]

    # --- inside ---

    @property
    def _weights_are_charged(self) -> bool:
        """Return whether all that weights know of training rows was charged in training."""
        return all(weights_are_charged(part.state) for part in self._parties)

    @cached_property
    def fusion(self) -> FusionModel | None:
        """Model that reads releases, learned again from the server's part; None if training had no fusion rows."""
        return fusion_of(self.plan, self._server.state, self._own_fusion)

    def _delta(self, delta: float | None) -> float:
        return usual_delta(self.plan.num_samples) if delta is None else delta

    def _release(self, epsilon: float | None, delta: float | None, unit: Unit | str) -> Release:
        return release_for(
            self.plan, epsilon=epsilon, delta=self._delta(delta), unit=unit, has_fusion=has_fusion(self._server.state)
        )

    def _serving_plan(self, num_rows: int, release: Release | None) -> Plan:
        if release is None:  # exact sums: whatever would release them is not asked
            release = Release(mechanism=self.plan.release, voting=type(self.plan.voting)(), words="")
        return serving_plan(self.plan, model=self.digest, num_rows=num_rows, release=release)

    def _taken(self, rows: Rows, *, label: str | None, label_data: Any, id: str | None, dataset: str | None) -> NewRows:
        """Rows as every party's network takes them, under a name that they may be charged by."""
        taken = taken_rows(
            self._server, self._parties, rows, label=label, label_data=label_data, id=id, dataset=dataset
        )
        if taken.name != self.dataset and not self._weights_are_charged:
            raise ModelError(
                f"dataset={taken.name!r}: the weights of this model know the rows of dataset={self.dataset!r} without "
                "noise, so every prediction is also about those, and is charged to them; leave dataset out"
            )
        return taken

    def _folder_of(self, options: ReleaseOptions) -> Path | None:
        """Return the folder of the parties' ledgers."""
        return self.ledger if options.ledger is None else Path(options.ledger)

    def _ledger_folder(self, options: ReleaseOptions) -> Path | None:
        """Return the folder of the ledgers that are charged; None where none is."""
        if options.exact or options.uncharged:
            return None
        folder = self._folder_of(options)
        if folder is None and any(part.ledger_run for part in self._parties):
            raise ModelError(
                "training was charged to ledgers, and predictions are charged there, too: give their folder "
                "(ledger=..., --ledger), or state that the owners permit uncharged predictions (uncharged=True, "
                "--uncharged)"
            )
        return folder

    def _setups(
        self, plan: Plan, rows: NewRows, folder: Path | None, opened: OpenLedgers, data_version: str
    ) -> list[PartySetup]:
        """Make the parties' setups, or refuse rows and ledgers that cannot be charged for this model."""
        identities = [Identity.generate() for _ in self._parties]
        pinned = tuple(identity.public for identity in identities)
        ledgers = None if folder is None else ledger_files_for(folder, rows, opened)
        if ledgers is not None:
            check_known(self._parties, ledgers, opened)
        return [
            self._setup_kind(
                plan=plan,
                index=part.index,
                identity=identity.private_bytes(),
                identities=pinned,
                train_features=np.empty((0, *part.shape), dtype=part.dtype),
                test_features=features,
                answers=self._answers_of(part) if rows.rows_are_named else None,
                data_version=data_version,
                ledger=None if ledgers is None else ledgers[part.index],
                opened=None if ledgers is None else opened,
                owner=part.party,
                dataset=rows.name,
                test_ids=rows.ids,
                trained=part.state,
            )
            for part, identity, features in zip(self._parties, identities, rows.features, strict=True)
        ]

    def _ahead(self, setups: Sequence[PartySetup]) -> list[PartyForecast]:
        """Return every party's forecast; rows that were answered before cost nothing."""
        own = self._encoders if self._encoders is not None else [None] * len(setups)
        return [setup.forecast(encoder) for setup, encoder in zip(setups, own, strict=True)]

    def _answers_of(self, part: PartyPart) -> Path | None:
        """Return where a party keeps its answers: beside its part, if that is on a disk, else where training did."""
        if self._folder is not None:
            return self._folder / folder_name(part.party) / _ANSWERS
        trained = None if self._checkpoints is None else self._checkpoints / f"party-{part.index}" / _ANSWERS
        return trained if trained is not None and trained.is_dir() else None

    def _known_by(self, plan: Plan, rows: NewRows, data_version: str, *, charged: bool) -> bytes | None:
        """Return what a release is remembered by: the same rows, in the same order, by the same law; None for none.

        Never by columns where ids say who rows are: whether an answer is a new one would tell of a cell that changed.
        Ids that are places do not say it: a later row at a place may be somebody else. Where a ledger counts, each
        question about such rows is a new release. Where none does, no epsilon is claimed over several questions, and
        rows with the same columns are released once.
        """
        named = rows.rows_are_named
        if charged and not named:
            return None
        digest = hashlib.sha256(plan.hash + json.dumps([rows.name, data_version, named, *rows.ids]).encode())
        for features in () if named else rows.features:
            digest.update(np.ascontiguousarray(features).data)
        return digest.digest()

    def _remember(self, known: bytes, found: Predictions) -> None:
        self._released[known] = found
        while len(self._released) > _REMEMBERED:
            self._released.popitem(last=False)

    def _numbers_of(self, labels: Sequence[Any] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        number = {name: index for index, name in enumerate(self.class_names)}
        found = [number.get(str(label)) for label in labels]
        if None in found:
            raise DataError(
                f"labels: row={found.index(None)} (counted from 0) has a class that the model does not know; it knows "
                f"{', '.join(self.class_names)}"
            )
        return np.array(found, dtype=np.int64)


def load(
    folder: Path | str,
    *,
    encoders: Sequence[nn.Module] | None = None,
    fusion: Any = None,
    ledger: Path | str | None = None,
) -> FederatedModel:
    """Load what `FederatedModel.save` wrote, to the bit, or name the part that is missing, damaged or of another model.

    Args:
        folder: The folder that `save` wrote.
        encoders: The owners' own networks, where training had such, one for each party.
        fusion: The label holder's own classifier, where it was the fusion model: it is fitted again.
        ledger: Folder of the parties' ledgers, which predictions are charged to.

    Returns:
        The model, equal to the bit.

    Raises:
        ModelError: A part is missing, damaged or of another model.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"folder={str(folder)!r} does not exist; give the folder that a model was saved in")
    server = ServerPart.load(folder / SERVER)
    found, missing = [], []
    for name in server.party_names:
        path = folder / folder_name(name)
        if (path / INDEX).is_file():
            found.append(PartyPart.load(path))
        else:
            missing.append(f"{name} ({path})")
    if missing:
        raise ModelError(
            f"folder={str(folder)!r} lacks the part of {', '.join(missing)}; ask its owner for it. A model can be "
            "asked only with all of its parties"
        )
    return FederatedModel(server, found, encoders=encoders, fusion=fusion, ledger=ledger, folder=folder)


def _check_parts(server: ServerPart, parties: Sequence[PartyPart]) -> None:
    names = tuple(part.party for part in parties)
    if [part.index for part in parties] != list(range(server.plan.num_parties)) or names != server.party_names:
        raise ModelError(
            f"there are parts of {', '.join(names) or 'no party'}; the model has one of each of "
            f"{', '.join(server.party_names)}"
        )
    for part in parties:
        other: Part = part
        if other.model != server.model or other.plan.hash != server.plan.hash:
            raise ModelError(
                f"the part of {part.party!r} is of another model ({other.model[:8]}) than the server's "
                f"({server.model[:8]}); put together parts of one training"
            )
