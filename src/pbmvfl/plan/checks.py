"""Checks between the groups of a plan, one for each thing that a plan is about.

Each part has checked its own numbers by then. The text of every refusal names the value, and what would do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pbmvfl.errors import PlanError
from pbmvfl.mechanisms.votes import VoteKind
from pbmvfl.plan.groups import Activation, Evaluation, Head, Labels, PreparationName
from pbmvfl.plan.round_kinds import COUNTS, FUSION, GRAM, LABELS, MEAN, SYMBOLS
from pbmvfl.privacy.noise_band import check_band

if TYPE_CHECKING:
    from pbmvfl.plan.plan import Plan

#: Why a plan of an earlier version is refused.
NO_COUNTS = (
    "this plan counts votes, as plans of earlier versions did; a fusion model reads them now: train again, with a plan "
    "that is made anew"
)
NO_INTERACTIONS = (
    "the plan has interactions, by which parties released symbols of training rows: this version does not train so; "
    "make a plan with `pbmvfl plan`, and train again"
)


def check_together(plan: Plan) -> None:
    """Refuse a plan whose parts contradict each other."""
    for release in (plan.release, plan.prediction or plan.release):
        if release.num_parties != plan.num_parties:
            raise PlanError(f"num_parties={plan.num_parties} in the plan, {release.num_parties} in its release")
    _model(plan)
    _prediction(plan)
    _fusion(plan)
    _schedule(plan)
    _learning(plan)
    _networks(plan)


def _model(plan: Plan) -> None:
    learning = [phase.kind.name for phase in plan.rounds.phases if phase.kind.updates]
    if plan.model and learning:
        raise PlanError(
            f"model={plan.model[:8]}... with {learning[0]} rounds: a plan either trains or goes on with a trained "
            "model; leave out one of them"
        )


def _networks(plan: Plan) -> None:
    if plan.party_shapes and len(plan.party_shapes) != plan.num_parties:
        raise PlanError(
            f"shapes={plan.shapes!r} are of {len(plan.party_shapes)} of num_parties={plan.num_parties} parties; give "
            "those of each, separated by semicolons"
        )
    if plan.first_weights and len(plan.first_weights) != plan.num_parties:
        raise PlanError(
            f"first_weights has {len(plan.first_weights)} digests for num_parties={plan.num_parties}; give one for "
            "each party, or none"
        )
    if plan.update.noise_multiplier and plan.network.couples_rows:
        # The noise hides one clipped gradient; here a row moves the gradients of its whole batch.
        raise PlanError(
            f"noise_multiplier={plan.noise_multiplier:g} with encoder={plan.encoder}, which couples the rows of a "
            "batch: one row moves every clipped gradient of its batch, and the noise is for one; use "
            "encoder=resnet18, which normalises by groups, or noise_multiplier=0"
        )


def _prediction(plan: Plan) -> None:
    release = plan.prediction or plan.release
    kind = plan.voting.vote
    if kind is VoteKind.RAW:
        numbers = (release.embedding_dim, release.bound), (plan.release.embedding_dim, plan.release.bound)
        # Scores without a bound of their own are clipped to that of the mechanism, whatever it is.
        if numbers[0] != numbers[1] and (plan.activation is not Activation.NONE or numbers[0][0] != numbers[1][0]):
            raise PlanError(
                f"predictions have embedding_dim={release.embedding_dim}, bound={release.bound:g}, training has "
                f"{plan.release.embedding_dim} and {plan.release.bound:g}; one network makes both"
            )
        return
    if plan.prediction is None or plan.head is not Head.FIXED:
        raise PlanError(
            f"vote={kind} is made of class scores for a mechanism of predictions alone: give prediction_mechanism "
            "and head=fixed"
        )
    plan.vote.check_classes(plan.num_classes)
    if release.embedding_dim != plan.vote.width(plan.num_classes):
        raise PlanError(
            f"predictions have embedding_dim={release.embedding_dim}; vote={kind} with "
            f"num_classes={plan.num_classes} makes {plan.vote.width(plan.num_classes)}"
        )
    released = any(phase.kind.releases and not phase.kind.trains for phase in plan.rounds.phases)
    if not released:
        return
    symbols = plan.vote.symbols(plan.num_classes)
    if symbols is not None and (getattr(release, "symbols", None) != symbols or release.secure_aggregation):
        raise PlanError(
            f"vote={kind} makes one of {symbols} symbols, which the server reads party by party: give "
            f"prediction_mechanism=krr, prediction_symbols={symbols} and no secure aggregation"
        )


def _fusion(plan: Plan) -> None:
    """Refuse fusion rows that the rest of the plan does not fit."""
    phases = [phase for phase in plan.rounds.phases if phase.kind.fuses]
    if plan.model:
        return
    if bool(phases) != bool(plan.num_fusion_samples) or sum(phase.passes for phase in phases) > 1:
        raise PlanError(
            f"num_fusion_samples={plan.num_fusion_samples} with {len(phases)} phases of {FUSION.name} rounds: fusion "
            "rows are released once; give their number without phases"
        )
    if phases and (plan.prediction is None or plan.head is not Head.FIXED or plan.couples_rows):
        raise PlanError(
            f"num_fusion_samples={plan.num_fusion_samples}, head={plan.head}, encoder={plan.encoder}: fusion rows are "
            "released by the mechanism of predictions after local training, and each by itself; give "
            "prediction_mechanism, head=fixed and an encoder that couples no rows, or no fusion rows"
        )
    kinds = [phase.kind for phase in plan.rounds.phases]
    if phases and any(kind.updates for kind in kinds[kinds.index(FUSION) :]):
        raise PlanError(f"{FUSION.name} rounds before the last round that trains: they release what networks end with")
    if phases and any(kind.releases and not kind.updates for kind in kinds[: kinds.index(FUSION)]):
        raise PlanError(f"predictions before {FUSION.name} rounds: the fusion model that reads them comes after these")


def _learning(plan: Plan) -> None:
    """Refuse rounds that the rest of the plan does not fit."""
    kinds = plan.schedule.kinds
    local = [kind.name for kind in kinds if kind.needs_labels]
    if local and plan.labels is not Labels.PARTIES:
        raise PlanError(
            f"labels={plan.labels}, but {local[0]} rounds train at the parties, which then need the labels of the "
            "training rows; if their holder allows that, plan with labels=parties, otherwise with algorithm=pbm"
        )
    if local and plan.embedding_dim != plan.num_classes:
        raise PlanError(
            f"embedding_dim={plan.embedding_dim} with {local[0]} rounds: each party makes one score for each "
            f"class, so it must be num_classes={plan.num_classes}"
        )
    if plan.head is Head.FIXED and plan.embedding_dim != plan.num_classes:
        raise PlanError(
            f"head=fixed takes sums for class scores, so embedding_dim={plan.embedding_dim} must be "
            f"num_classes={plan.num_classes}"
        )
    releasing = [kind.name for kind in kinds if kind.releases and kind.trains]
    if plan.activation is Activation.NONE and releasing:
        raise PlanError(
            f"activation=none with {releasing[0]} rounds: embeddings that are released must stay in [-C, C]; use "
            "activation=tanh"
        )
    prepared = [phase.kind for phase in plan.rounds.phases if phase.kind in (MEAN, GRAM)]
    if not plan.model and prepared != ([MEAN, GRAM] if plan.preparation is PreparationName.WHITEN else []):
        raise PlanError(
            f"preparation={plan.preparation} with rounds of {', '.join(kind.name for kind in prepared) or 'none'}; "
            "whitening has one of mean and then one of gram: give preparation=whiten without phases"
        )


def _schedule(plan: Plan) -> None:
    if any(phase.kind == SYMBOLS for phase in plan.rounds.phases):
        raise PlanError(NO_INTERACTIONS)
    if any(phase.kind == COUNTS for phase in plan.rounds.phases):
        raise PlanError(NO_COUNTS)
    if any(phase.kind == LABELS for phase in plan.rounds.phases):
        raise PlanError(
            "a phase of labels rounds: the label holder draws labels by itself, before a run; give label_epsilon"
        )
    if plan.evaluation is Evaluation.RELEASED and plan.num_test_samples < 1:
        raise PlanError(
            f"evaluation=released needs num_test_samples of at least 1, got {plan.num_test_samples}; "
            "give test rows or use evaluation=simulator"
        )
    check_band(plan.update.band, plan.schedule.steps_between_uses)
    if 4 * plan.schedule.largest_batch * plan.embedding_dim >= 1 << 32:
        raise PlanError(
            f"batch_size={plan.batch_size} times embedding_dim={plan.embedding_dim} makes a message of 4 GiB or "
            "more; choose less"
        )
