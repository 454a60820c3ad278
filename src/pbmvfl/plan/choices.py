"""Types of a plan's flat names, for editors and type checkers: the keyword arguments of `Plan.of` and its like.

`flat_names` has the same names with their defaults, help and checks. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from pbmvfl.mechanisms.votes import VoteKind
from pbmvfl.plan.groups import (
    Activation,
    Algorithm,
    Evaluation,
    FeatureMap,
    FusionName,
    Head,
    Labels,
    Loss,
    OptimizerName,
    PreparationName,
    Start,
    Training,
)
from pbmvfl.plan.schedule import Phase
from pbmvfl.wire.gradient_codecs import GradientCodecName


class PlanOptions(TypedDict, total=False):
    """Flat names of a plan without its sizes. An enum may also be given as it is spelled."""

    # Mechanism of training rounds.
    mechanism: str
    secure_aggregation: bool | None
    embedding_dim: int
    bound: float
    num_trials: int
    beta: float
    levels: int
    scale: float
    honest_parties: int
    bounded_total: bool
    symbols: int
    response_epsilon: float
    # Mechanism of predictions, where it is another one.
    prediction_mechanism: str
    prediction_secure_aggregation: bool | None
    prediction_embedding_dim: int
    prediction_bound: float
    prediction_num_trials: int
    prediction_beta: float
    prediction_levels: int
    prediction_scale: float
    prediction_honest_parties: int
    prediction_bounded_total: bool
    prediction_symbols: int
    prediction_response_epsilon: float
    # Votes of predictions.
    vote: VoteKind | str
    vote_gain: float
    vote_grades: int
    num_fusion_samples: int
    fusion: FusionName | str
    # Rounds.
    batch_size: int
    num_epochs: int
    training: Training | str
    phases: Sequence[Phase] | None
    evaluation: Evaluation | str
    seed: int
    # Learning.
    learning_rate: float
    optimizer: OptimizerName | str
    momentum: float
    nesterov: bool
    averaging: float
    gradient_codec: GradientCodecName | str
    gradient_bound: float
    labels: Labels | str
    loss: Loss | str
    head: Head | str
    # Noise on updates, and preparation of columns.
    noise_multiplier: float
    clip_norm: float
    noise_band: int
    preparation: PreparationName | str
    mean_noise: float
    mean_clip: float
    gram_noise: float
    gram_clip: float
    ridge: float
    # Networks.
    encoder: str
    activation: Activation | str
    features: FeatureMap | str
    column_values: int
    shapes: str
    start: Start | str
    first_weights: Sequence[str]
    model: str


class PlanChoices(PlanOptions, total=False):
    """Every flat name of a plan; those here are arguments of their own in `Plan.for_budget`."""

    num_parties: int
    num_samples: int
    num_classes: int
    num_test_samples: int
    algorithm: Algorithm | str
    label_epsilon: float | None
