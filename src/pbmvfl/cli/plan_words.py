"""A plan in a few lines for a terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pbmvfl._text import counted
from pbmvfl.mechanisms import Mechanism
from pbmvfl.mechanisms.votes import VoteKind
from pbmvfl.plan.groups import Evaluation, FeatureMap, PreparationName, Training, feature_width
from pbmvfl.plan.local_search import dense_columns, learning_note
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.schedule import COUNTS
from pbmvfl.wire.traffic import human_bytes

if TYPE_CHECKING:
    from pbmvfl.data.vertical import VerticalDataset


def describe_plan(plan: Plan) -> Iterator[tuple[str, str]]:
    """(title, words) of every line."""
    if plan.training is Training.LOCAL:
        yield "training", _local(plan)
        yield "noise", _noise(plan)
    else:
        yield "mechanism", _released(plan.release)
        yield from _deviation(plan)
        yield "training", _joint(plan)
    yield from _prediction(plan)
    traffic = plan.traffic()
    down = human_bytes(traffic.bytes_down)
    gradient = f" ({plan.gradient_codec} gradient)" if plan.training is Training.JOINT else ""
    labels = f", labels {human_bytes(traffic.bytes_setup)} with the handshake" if plan.sends_labels else ""
    yield "bytes", f"{human_bytes(traffic.bytes_up)} up, {down} down{gradient}{labels}"


def learning_notes(plan: Plan, *, columns: int | None, majority: float | None = None) -> list[str]:
    """What a person should know about local training with at most so many columns a party, before it begins."""
    if plan.training is not Training.LOCAL or not plan.noise_multiplier or columns is None:
        return []
    shift = 2 * math.sqrt(plan.num_epochs) / plan.noise_multiplier
    width = feature_width(plan.features, columns, plan.column_values)
    sizes = {"num_samples": plan.num_samples, "num_classes": plan.num_classes}
    note = learning_note(shift=shift, width=width, majority=majority, **sizes)
    return [] if note is None else [note]


def learning_notes_for(plan: Plan, data: VerticalDataset) -> list[str]:
    """The same for these rows: their shapes, and how frequent the most frequent class is, which local training tells
    every party anyway."""
    columns = max(dense_columns(part.shape[1:]) for part in data.train_features)
    frequent = max(Counter(data.train_labels.tolist()).values()) / data.num_samples
    return learning_notes(plan, columns=columns, majority=frequent)


def _released(release: Mechanism) -> str:
    values = counted(release.embedding_dim, "value")
    return f"{release.describe()}, embeddings of {values} in [-{release.bound:g}, {release.bound:g}]"


def _deviation(plan: Plan) -> Iterator[tuple[str, str]]:
    noise = plan.release.variance_upper_bound**0.5
    if noise:
        widest = plan.num_parties * plan.bound
        yield "noise", f"standard deviation {noise:.3g} on sums within [-{widest:g}, {widest:g}]"


def _steps(plan: Plan) -> str:
    kind = next(phase.kind for phase in plan.rounds.phases if phase.kind.trains)
    rounds = plan.schedule.rounds_per_pass(kind)
    each = "of all rows" if rounds == 1 else f"of {counted(rounds, 'round')}, {counted(plan.batch_size, 'row')} each"
    return f"{counted(plan.num_epochs, 'epoch')} {each}, {plan.optimizer} {plan.learning_rate:g}"


def _joint(plan: Plan) -> str:
    return _steps(plan)


def _local(plan: Plan) -> str:
    seen = {
        FeatureMap.COLUMNS: "its columns",
        FeatureMap.PAIRS: "its columns and their products",
        FeatureMap.VALUES: "the values of its columns and of every two together",
    }[plan.features]
    prepared = ", whitened" if plan.preparation is PreparationName.WHITEN else ""
    leaves = "only noisy counts of its votes leave it" if COUNTS in plan.schedule.kinds else "nothing leaves it"
    return f"every party alone on {seen}{prepared}; {leaves}; {_steps(plan)}"


def _noise(plan: Plan) -> str:
    if not plan.noise_multiplier:
        return "none"
    rows = plan.schedule.num_rows(plan.schedule.trained_at - 1)
    share = plan.noise_multiplier / rows
    return f"{plan.noise_multiplier:.4g} times what one row may add to a step, {share:.2g} of what all {rows:,} may add"


def _prediction(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.evaluation is not Evaluation.RELEASED:
        if plan.evaluation is Evaluation.NONE:
            yield "predictions", "none in training: nothing is measured"
        elif plan.training is Training.LOCAL:
            yield "predictions", "exact sums, which the label holder may see; outside the epsilon"
        if plan.prediction is not None:
            vote = f" of every party's vote ({plan.vote.kind})"
            yield "later rows", f"{plan.prediction.describe()}{vote}, when the trained model is asked"
        return
    release = plan.prediction or plan.release
    vote = "" if plan.vote.kind is VoteKind.RAW else f" of every party's vote ({plan.vote.kind})"
    yield "predictions", f"{release.describe()}{vote}, one release a test row"
