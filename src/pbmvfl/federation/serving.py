"""Asking a trained federation: a plan without training, one release of every row, charged like any other.

Everything that protects training rows protects these: a session with new keys, the same state machines, ledgers that
are asked before anything leaves. Nothing is trained, so a session has no checkpoints: one that was cut is begun anew,
and what it had released stays charged. Rows whose answers are stored get the same ones again, for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pbmvfl._settings import one_of
from pbmvfl.errors import ModelError, PartyRefused, PbmvflError, PlanError
from pbmvfl.mechanisms import Mechanism
from pbmvfl.plan.groups import Evaluation, Head, Labels, Learning, Rounds, UpdateNoise, Voting
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.prediction_search import plan_prediction
from pbmvfl.plan.schedule import PREDICTION, Order, Phase, Round
from pbmvfl.privacy.composition import epsilon_by_losses
from pbmvfl.privacy.units import SERVER, Unit
from pbmvfl.protocol.server import Server
from pbmvfl.protocol.session import Meter, Tap, deliver, drive
from pbmvfl.protocol.transport import Inspection, Transport
from pbmvfl.wire.refusals import RefusalCode
from pbmvfl.wire.traffic import Traffic

#: What a row's prediction may cost where nobody said.
DEFAULT_EPSILON = 8.0
#: Rows of a round: large enough that its message is not mostly header, small enough to be cut without losing much.
ROWS_PER_ROUND = 1000


@dataclass(frozen=True, kw_only=True)
class Release:
    """How rows are released: by which law, what of their scores, and why so."""

    mechanism: Mechanism
    voting: Voting
    words: str


def release_for(
    training: Plan, *, epsilon: float | None, delta: float, unit: Unit | str = Unit.CELL, has_tables: bool
) -> Release:
    """How a model releases a row's prediction within `epsilon`; without one as training planned it, or within 8.

    `has_tables` says whether the server has counts of votes: symbols can be read only by them.
    """
    unit = one_of("unit", unit, Unit)
    own = _planned(training, has_tables)
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
    if own is not None and unit == Unit.CELL:
        cost = epsilon_by_losses([(1, own.mechanism.event.losses(Unit.CELL, SERVER))], delta, 1e4)
        if cost <= wanted:
            return own  # read by counts, it is the better one at less than what it may cost
    choice = plan_prediction(
        epsilon=wanted,
        delta=delta,
        unit=unit,
        num_parties=training.num_parties,
        num_classes=training.num_classes,
        num_rows=training.num_samples,
        tables=False,
    )
    voting = Voting(vote=choice.vote.kind, vote_gain=choice.vote.gain, vote_grades=choice.vote.grades)
    return Release(mechanism=choice.mechanism, voting=voting, words=choice.words)


def _planned(training: Plan, has_tables: bool) -> Release | None:
    """As the training's plan has it; None if it has nothing that protects a row, or reads votes by tables that are not
    there."""
    mechanism = training.prediction or training.release
    if not mechanism.is_private or (training.voting.has_tables and not has_tables):
        return None
    return Release(mechanism=mechanism, voting=training.voting, words="as it was planned with training")


def serving_plan(training: Plan, *, model: str, num_rows: int, release: Release) -> Plan:
    """The plan of one session that predicts so many rows with a trained model, and trains nothing."""
    if training.interactions is not None:
        raise ModelError(
            "this model was trained on columns of different parties together, and what others have of a new row is "
            "not released: it cannot be asked; train without interactions, or look at its result"
        )
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
            "supervision": replace(training.supervision, labels=Labels.SERVER),
            "network": replace(training.network, model=model, first_weights=()),
            "evaluation": Evaluation.RELEASED,
        }
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Served:
    """What came of a session: scores of each row, NaN for rows that were not released, and why it ended early."""

    scores_NK: npt.NDArray[np.float32]
    traffic: Traffic
    stopped: str = ""
    #: Whether all weights know rows only by what was charged.
    public_start: bool = True


def serve(
    plan: Plan,
    *,
    trained: dict[str, Tensor],
    transport: Transport,
    owners: Inspection | None,
    taps: Sequence[Tap] = (),
    on_round: Callable[[int], None] | None = None,
) -> Served:
    """Ask the parties for all rows of a serving plan. A limit that ends it leaves what was released before."""
    server = Server(plan, trained=trained)
    meter = Meter(taps=list(taps))
    scores_NK = np.full((plan.num_test_samples, plan.num_classes), np.nan, dtype=np.float32)

    def take(current: Round, scores: Tensor) -> None:
        scores_NK[current.rows] = scores.numpy()

    def tell() -> None:
        if on_round is not None:
            on_round(server.completed_rounds)

    def nothing() -> None:
        """Nothing is trained, so no epoch ends."""

    server.on_scores = take
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
    """Class scores of exact sums, which no role of the protocol sees: for a simulator alone."""
    total = sum(embeddings[1:], start=embeddings[0])
    return Server(plan, trained=trained).predict(torch.from_numpy(total)).log_softmax(dim=1)
