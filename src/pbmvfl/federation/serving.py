"""Predictions of a trained federation: a plan without training, one release of every row, charged like any other.

Everything that protects training rows protects these: a session with new keys, the same state machines, ledgers that
are asked before anything leaves. Nothing is trained, so a session has no checkpoints: one that was cut is begun anew,
and what it had released stays charged. Rows whose answers are stored get the same ones again, for nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pbmvfl.data.new_rows import NewRows, load_rows
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import DataError, LedgerError, ModelError, PartyRefused, PbmvflError, PlanError
from pbmvfl.federation.model_files import PartyPart, ServerPart
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.ledger_folder import OpenLedgers, ledger_file_of, ledger_files_of, limited
from pbmvfl.mechanisms import Mechanism
from pbmvfl.plan.groups import Evaluation, Head, Labels, Learning, Rounds, UpdateNoise, Voting
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.prediction_search import plan_prediction
from pbmvfl.plan.round_kinds import PREDICTION
from pbmvfl.plan.schedule import Order, Phase
from pbmvfl.privacy.composition import epsilon_by_losses
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.privacy.units import SERVER, Unit, column_unit
from pbmvfl.protocol.server import Server
from pbmvfl.protocol.session import Meter, Tap, deliver, drive
from pbmvfl.protocol.transport import Inspection, Transport
from pbmvfl.training.fusion import FusionModel
from pbmvfl.wire.refusals import RefusalCode
from pbmvfl.wire.traffic import Traffic

#: What a row's prediction may cost where nobody said.
DEFAULT_EPSILON = 8.0
#: Rows of a round: large enough that its message is not mostly header, small enough to be cut without losing much.
ROWS_PER_ROUND = 1000


@dataclass(frozen=True, kw_only=True)
class Release:
    """Release of rows: by which law, what of their scores, and why so."""

    mechanism: Mechanism
    voting: Voting
    words: str


@dataclass(frozen=True, kw_only=True)
class ReleaseOptions:
    """Cost of a prediction, and how it is charged: the options of `FederatedModel.release`."""

    #: Largest epsilon of one row; None for what training planned, or 8.
    epsilon: float | None = None
    #: None for the one that training's number of rows suggests.
    delta: float | None = None
    #: What `epsilon` protects: a cell or a record.
    unit: Unit | str = Unit.CELL
    #: Folder of the parties' ledgers; None for the model's own.
    ledger: Path | str | None = None
    #: Public name of the state that the owners' columns are in. Another name releases, and charges, all rows anew.
    data_version: str = ""
    #: Owners permit that no ledger counts these predictions, where training had ledgers; the ledgers note it.
    uncharged: bool = False
    #: Predict the rows before a party's limit instead of refusing all of them.
    until_limit: bool = False
    #: Look at exact sums, as only a simulator can: no noise, no charge, no epsilon.
    exact: bool = False
    #: Owners permit `exact` where a ledger has a limit, whatever the rows are called; the ledgers note it.
    exact_metrics: bool = False
    #: Called with (completed rounds, all rounds) for progress.
    on_round: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        check_data_version(self.data_version)


def release_for(
    training: Plan, *, epsilon: float | None, delta: float, unit: Unit | str = Unit.CELL, has_fusion: bool
) -> Release:
    """Choose the release of a row's prediction within `epsilon`; without one as training planned it, or within 8.

    `has_fusion` says whether the server has a fusion model. It reads the law that it was taught with, and no other.

    Raises:
        PlanError: The fusion model's law costs more than `epsilon`, or nothing can be released within it.
        ModelError: Nothing in training protects a row.
    """
    unit = column_unit(unit)
    if unit is Unit.PARTY:
        raise PlanError("unit='party'; permitted: cell, record, as a prediction is a release about one row")
    own = _planned(training, has_fusion)
    if epsilon is None and own is not None:
        return own
    if training.head is not Head.FIXED:
        if own is not None:
            raise PlanError(
                f"epsilon={epsilon:g} cannot be chosen for this model: its head was trained on sums that "
                f"{own.mechanism.describe()} releases, and predictions are released likewise; leave epsilon out"
            )
        raise ModelError(
            "this model was trained without privacy (mechanism=none with a trained head), and its predictions would be "
            "exact; ask for them by name: exact=True, or --exact"
        )
    wanted = DEFAULT_EPSILON if epsilon is None else epsilon
    if own is not None and training.num_fusion_samples:
        cost = epsilon_by_losses([(1, own.mechanism.event.losses(unit, SERVER))], delta, 1e4)
        if cost > wanted:
            raise PlanError(
                f"epsilon={wanted:g} for a {unit}: the fusion model of this training reads releases of epsilon "
                f"{format_epsilon(cost)} alone, as its fusion rows were released; leave epsilon out, or train with "
                f"--prediction-epsilon {wanted:g} (prediction_epsilon={wanted:g})"
            )
        return own
    choice = plan_prediction(
        epsilon=wanted,
        delta=delta,
        unit=unit,
        num_parties=training.num_parties,
        num_classes=training.num_classes,
        num_rows=training.num_samples,
        fused=False,
    )
    voting = Voting(vote=choice.vote.kind, vote_gain=choice.vote.gain, vote_grades=choice.vote.grades)
    return Release(mechanism=choice.mechanism, voting=voting, words=choice.words)


def _planned(training: Plan, has_fusion: bool) -> Release | None:
    """Return the release of the training's plan; None if nothing in it protects a row, or its fusion model is missing:
    training ended before the fusion rows were released."""
    mechanism = training.prediction or training.release
    if not mechanism.is_private or (training.num_fusion_samples and not has_fusion):
        return None
    return Release(mechanism=mechanism, voting=training.voting, words="as it was planned with training")


def serving_plan(training: Plan, *, model: str, num_rows: int, release: Release) -> Plan:
    """Return the plan of a session that predicts so many rows with a trained model, and trains nothing."""
    groups: dict[str, Any] = {each.name: getattr(training, each.name) for each in fields(training)}
    own = release.mechanism is training.release
    return Plan(
        **{
            **groups,
            "sizes": replace(training.sizes, num_test_samples=num_rows),
            "prediction": None if own else release.mechanism,
            "voting": release.voting,
            "rounds": Rounds(
                batch_size=min(num_rows, ROWS_PER_ROUND),
                phases=(Phase(kind=PREDICTION, passes=1, order=Order.AS_GIVEN),),
            ),
            "learning": Learning(),
            "update": UpdateNoise(),
            "supervision": replace(training.supervision, labels=Labels.SERVER, label_epsilon=None),
            "network": replace(training.network, model=model, first_weights=()),
            "evaluation": Evaluation.RELEASED,
        }
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Served:
    """Outcome of a session: scores of each row, NaN for rows that were not released, and why it ended early."""

    scores_NK: npt.NDArray[np.float32]
    traffic: Traffic
    stopped: str = ""
    #: Whether all weights know rows only by what was charged.
    public_start: bool = True


def serve(
    plan: Plan,
    *,
    trained: dict[str, Tensor],
    fusion: FusionModel | None = None,
    transport: Transport,
    owners: Inspection | None,
    taps: Sequence[Tap] = (),
    on_round: Callable[[int], None] | None = None,
) -> Served:
    """Predict all rows of a serving plan. A limit that ends it leaves what was released before."""
    server = Server(plan, trained=trained, fusion=fusion)
    meter = Meter(taps=list(taps))
    scores_NK = np.full((plan.num_test_samples, plan.num_classes), np.nan, dtype=np.float32)

    def tell() -> None:
        if server.scored is not None:
            scores_NK[server.scored.round.rows] = server.scored.scores_BK.numpy()
        if on_round is not None:
            on_round(server.completed_rounds)

    def nothing() -> None:
        """Nothing is trained, so no epoch ends."""

    stopped = ""
    try:
        drive(server, transport, meter, on_open=nothing, on_round=tell, on_epoch_end=nothing)
        tell()
    except PartyRefused as refusal:
        error = None if owners is None else owners.owner_error(refusal.party)
        if refusal.code != RefusalCode.BUDGET or server.round is None:  # no row was asked for yet: an error
            raise (error if isinstance(error, PbmvflError) else refusal) from refusal
        stopped = str(refusal if error is None else error)
        deliver(server, transport, meter, server.stop(), setup=False)
    public = owners is None or all(owners.public_starts())
    return Served(scores_NK=scores_NK, traffic=meter.traffic(), stopped=stopped, public_start=public)


def exact_scores(plan: Plan, *, trained: dict[str, Tensor], embeddings: Sequence[npt.NDArray[np.float32]]) -> Tensor:
    """Return class scores of exact sums, which no role of the protocol sees: for a simulator alone."""
    total = sum(embeddings[1:], start=embeddings[0])
    return Server(plan, trained=trained).predict(torch.from_numpy(total)).log_softmax(dim=1)


# --- Rows to predict, in whatever form they come, as every party's network takes them ---


_LONGEST_VERSION = 80
#: What can be asked about: rows that were loaded, a file or a frame with all columns, one of each for each party, or
#: one array for each party.
Rows = NewRows | VerticalDataset | str | Path | Mapping[str, Any] | Sequence[npt.NDArray[Any]] | Any


def taken_rows(
    server: ServerPart,
    parts: Sequence[PartyPart],
    rows: Rows,
    *,
    label: str | None,
    label_data: Any,
    id: str | None,
    dataset: str | None,
) -> NewRows:
    """Return the rows, checked against what the model was trained on; `dataset` renames them."""
    if isinstance(rows, VerticalDataset):
        rows = test_rows(rows)
    if isinstance(rows, list | tuple) and rows and all(isinstance(each, np.ndarray) for each in rows):
        _check_arrays(parts, rows)
        rows = NewRows(
            name=server.dataset,
            party_names=server.party_names,
            features=tuple(rows),
            ids=tuple(f"rows:{row}" for row in range(len(rows[0]))),
            rows_are_named=False,
        )
    if not isinstance(rows, NewRows):
        columns = [part.columns for part in parts if part.columns is not None]
        if len(columns) < len(parts):
            raise ModelError(
                f"this model was trained on arrays without column names (dataset={server.dataset!r}), and no table can "
                "be read for it; give one array for each party, or predict its own test rows"
            )
        rows = load_rows(
            rows,
            columns=columns,
            class_names=server.class_names,
            label=label,
            label_data=label_data,
            id=id,
            name=dataset or server.dataset,
        )
    _check_arrays(parts, rows.features)
    # Ledgers are found by the parties' names: those of the model, whatever the rows call them.
    return replace(rows, name=rows.name if dataset is None else dataset, party_names=server.party_names)


def _check_arrays(parts: Sequence[PartyPart], features: Sequence[npt.NDArray[Any]]) -> None:
    if len(features) != len(parts):
        names = ", ".join(part.party for part in parts)
        raise ModelError(f"there are columns of {len(features)} parties; this model has {len(parts)}: {names}")
    for part, rows in zip(parts, features, strict=True):
        if rows.shape[1:] != part.shape or str(rows.dtype) != part.dtype:
            raise ModelError(
                f"party={part.party!r}: rows are {rows.dtype}{rows.shape[1:]}, the model was trained on "
                f"{part.dtype}{part.shape}"
            )
    if not len(features[0]):
        raise DataError("there are no rows to predict; give at least one")


def check_data_version(version: object) -> None:
    """Refuse what cannot be the owners' name of the state that their columns are in."""
    if not isinstance(version, str) or version != version.strip() or len(version) > _LONGEST_VERSION:
        raise DataError(
            f"data_version={version!r}; permitted: a text of at most {_LONGEST_VERSION} characters that neither begins "
            "nor ends with a blank, as in '2026-01'"
        )


def test_rows(data: VerticalDataset) -> NewRows:
    """Return a dataset's own test rows, under the names by which training's ledgers know them."""
    if not data.num_test_samples:
        raise DataError(f"dataset={data.name!r} has no test rows; give rows to predict")
    ids = data.test_ids
    if ids is None:
        ids = tuple(str(data.num_samples + row) for row in range(data.num_test_samples))
    return NewRows(
        name=data.name,
        party_names=data.party_names,
        features=data.test_features,
        ids=ids,
        rows_are_named=data.rows_are_named,
        labels=data.test_labels,
    )


# --- Checks of the parties' ledgers before rows are predicted, beside the charge itself ---


def look_exactly(parts: Sequence[PartyPart], folder: Path | None, dataset: str, *, permitted: bool) -> None:
    """Check that exact sums may be seen, which no limit counts, and note the owners' permission in their ledgers.

    Every owner whose ledger has a limit is asked, whatever the rows are called: under a name that the ledger does not
    know they may be any of its rows.

    Args:
        parts: The model's parts, whose parties are asked.
        folder: The folder of the parties' ledgers; None where it is not known.
        dataset: The name that the rows are given.
        permitted: Whether the owners permit it.

    Raises:
        LedgerError: A ledger has a limit and its owner has not permitted it; or training was charged to a ledger that
            is not here.
    """
    with OpenLedgers() as opened:
        with_limit = limited(_ledgers(parts, folder, dataset, permitted=permitted, opened=opened), opened)
    for path in with_limit:
        if not permitted:
            raise LedgerError(
                f"exact sums of dataset={dataset!r}: ledger={str(path)!r} has a limit, and no limit counts exact sums; "
                "leave exact out for a charged release, or give the owners' permission, which the ledger notes: "
                "--exact-metrics, exact_metrics=True"
            )
        with contextlib.closing(Ledger(path)) as ledger:
            ledger.note_exact(dataset)


def note_uncharged(parts: Sequence[PartyPart], folder: Path | None, dataset: str, *, num_rows: int) -> None:
    """Note in every ledger that its owner permits predictions without a charge: a later limit does not count them."""
    with OpenLedgers() as opened:
        paths = _ledgers(parts, folder, dataset, permitted=True, opened=opened)
        begun = [path for path in paths if opened.begun(path) is not None]
    for path in begun:
        with contextlib.closing(Ledger(path)) as ledger:
            ledger.note_uncharged(dataset, num_rows=num_rows)


def _ledgers(
    parts: Sequence[PartyPart], folder: Path | None, dataset: str, *, permitted: bool, opened: OpenLedgers
) -> list[Path]:
    """Return the ledger files of the model's parties; none where their folder is not known.

    Where training was charged, those are the ledgers that know of it. Only with the owners' permission, and where no
    folder is named in which it could be noted, nothing is looked at.
    """
    if folder is None and permitted:
        return []
    for part in parts:
        path = (
            None if folder is None else ledger_file_of(folder, part.index, part.party, dataset=dataset, opened=opened)
        )
        if part.ledger_run and not (path is not None and _knows(path, part, opened)):
            raise LedgerError(
                f"training of party={part.party!r} was charged to a ledger, which may have a limit, and that ledger is "
                "not here; give its folder (ledger=..., --ledger), or leave the folder out and state that "
                "the owners permit exact sums: --exact-metrics, exact_metrics=True"
            )
    return (
        []
        if folder is None
        else ledger_files_of(folder, [part.party for part in parts], dataset=dataset, opened=opened)
    )


def check_known(parts: Sequence[PartyPart], ledgers: Sequence[Path], opened: OpenLedgers) -> None:
    """Refuse other ledgers than those that training was charged to.

    Others, new ones among them, know neither what was spent nor the owners' limits.

    Args:
        parts: The model's parts.
        ledgers: The file of each part's ledger.
        opened: Ledgers that are open already.

    Raises:
        LedgerError: A part's training was charged, and its ledger does not know of it.
    """
    for part, path in zip(parts, ledgers, strict=True):
        if part.ledger_run and not _knows(path, part, opened):
            raise LedgerError(
                f"ledger={str(path)!r} does not know of this model's training: it is another ledger than that of "
                f"party={part.party!r}, a new one, or an older copy, and what was spent would not count; put the "
                "ledger back that training was charged to, or name its folder"
            )


def _knows(path: Path, part: PartyPart, opened: OpenLedgers) -> bool:
    """Return whether a ledger has the training that a part came from."""
    ledger = opened.begun(path)
    return ledger is not None and any(entry.run == part.ledger_run for entry in ledger.sessions(part.dataset))
