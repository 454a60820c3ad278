"""The public numbers of a plan by group: sizes, rounds, learning, noise on updates, networks. Frozen values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from pbmvfl._settings import check_whole, finite, one_of, setting
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms.label_response import LabelResponse, check_label_epsilon
from pbmvfl.mechanisms.votes import Vote, VoteKind
from pbmvfl.plan.round_kinds import FUSION, GRAM, JOINT, LOCAL, MEAN, PREDICTION
from pbmvfl.plan.schedule import Order, Phase
from pbmvfl.plan.shapes import parse_shapes
from pbmvfl.privacy.events import PlainUpdate, RoundedGaussianSum, UpdateEvent
from pbmvfl.privacy.noise_band import Band, banded_event
from pbmvfl.wire.gradient_codecs import GradientCodecName

#: Encoders whose embedding of a row depends on the other rows of its batch.
COUPLES_ROWS = frozenset({"resnet18-batchnorm"})
#: Far inside float32: products of a gradient with a weight and a column stay finite for all but absurd columns.
LARGEST_GRADIENT_BOUND = 1e6
#: How far apart two rows' own products z z^T are, if no row is longer than 1: their inner product is never below zero.
GRAM_DIAMETER = math.sqrt(2)
#: Their squares, and what those are divided into, stay far inside float32.
SMALLEST_CLIP, LARGEST_CLIP = 1e-6, 1e6
DATA, MECHANISM, TRAINING = "Data", "Privacy mechanism", "Training"


class OptimizerName(StrEnum):
    """Optimisers of every network."""

    SGD = "sgd"
    ADAM = "adam"


class Evaluation(StrEnum):
    """Sources of accuracy figures."""

    SIMULATOR = "simulator"  #: exact sums that no role of the protocol ever sees; outside the epsilon
    RELEASED = "released"  #: what the server reads of releases; every extra one is charged
    NONE = "none"  #: nothing beside training is looked at, neither exactly nor by a release


class Activation(StrEnum):
    """The last step of an encoder. All but `none` keep the embedding inside [-C, C]."""

    TANH = "tanh"
    HARDTANH = "hardtanh"
    SOFTSIGN = "softsign"
    NONE = "none"  #: scores as they are, where training releases none; what is released later is bounded by its vote


class Training(StrEnum):
    """Kind of rounds that update weights."""

    JOINT = "joint"  #: embeddings up, one gradient for all down
    LOCAL = "local"  #: every party learns class scores from its own columns and the labels, and nothing leaves it


class Algorithm(StrEnum):
    """Algorithms, named by the rounds that train. The mechanism of those rounds is another choice."""

    PBM = "pbm"  #: joint rounds, as in the paper's Algorithm 2
    STAGED = "staged"  #: local rounds: every party's network first, then one private release of a row

    @property
    def training(self) -> Training:
        """Kind of the rounds that train."""
        return Training.JOINT if self is Algorithm.PBM else Training.LOCAL


class Labels(StrEnum):
    """Holders of the labels."""

    SERVER = "server"
    PARTIES = "parties"  #: the label holder sends those of the training rows to every party


class Loss(StrEnum):
    """Losses of class scores."""

    CROSS_ENTROPY = "cross-entropy"
    SQUARED = "squared"  #: half the squared distance to 1 for the row's class and 0 for the others


class Head(StrEnum):
    """Maps of sums to class scores."""

    TRAINED = "trained"  #: one dense layer of the server, which learns in joint rounds
    FIXED = "fixed"  #: the sums are the scores, with the logarithms of the classes' shares of training rows added once


class FeatureMap(StrEnum):
    """A public map of a party's columns."""

    COLUMNS = "columns"  #: by themselves
    PAIRS = "pairs"  #: and the product of every two beside them
    VALUES = "values"  #: for each of a few values whether a column has it, and the same for every two columns together
    SHAPES = "shapes"  #: hat functions of single columns and their products, for each party by `shapes`


def feature_width(features: FeatureMap, columns: int, column_values: int) -> int:
    """Return how many numbers a mapped row of so many columns has, by a map that is the same for all parties."""
    pairs = columns * (columns - 1) // 2
    match features:
        case FeatureMap.PAIRS:
            return columns + pairs
        case FeatureMap.VALUES:
            return columns * column_values + pairs * column_values**2
    return columns


class FusionName(StrEnum):
    """Models by which the label holder reads what parties released of a row."""

    AUTO = "auto"  #: the mixture of all that predicts held-out fusion rows best
    SUM = "sum"  #: what parties say is added up, as if they were independent
    LOGISTIC = "logistic"  #: logistic regression: weighs what several parties know
    BOOSTED = "boosted"  #: boosted trees: learns what parties know jointly


class Start(StrEnum):
    """First weights of the networks that the plan makes."""

    RANDOM = "random"  #: drawn from the public seed
    ZERO = "zero"  #: for networks of one layer


class PreparationName(StrEnum):
    """Statistics of columns that are learned before training, with noise and a charge."""

    NONE = "none"
    WHITEN = "whiten"  #: mean and Gram matrix, to give all directions the same scale


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def words(kind: type[StrEnum]) -> str:
    return " | ".join(kind)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the data."""

    num_parties: int = setting(help="M: parties, each with its own columns.", panel=DATA)
    num_samples: int = setting(help="N: training rows.", panel=DATA)
    num_classes: int = setting(help="Classes of the label.", panel=DATA)
    num_test_samples: int = setting(0, help="Test rows.", panel=DATA)

    def __post_init__(self) -> None:
        alone = ": with one party the sum is that party's own embedding"
        check_whole("num_parties", self.num_parties, least=2, why=alone)
        check_whole("num_parties", self.num_parties, least=2, most=0xFFFE)
        check_whole("num_samples", self.num_samples, least=1)
        check_whole("num_classes", self.num_classes, least=2)
        check_whole("num_test_samples", self.num_test_samples, least=0)


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Batches, and phases of passes over the rows."""

    batch_size: int = setting(100, help="B: rows per round.", panel=TRAINING)
    phases: tuple[Phase, ...] = (Phase(kind=JOINT, passes=10),)

    def __post_init__(self) -> None:
        check_whole("batch_size", self.batch_size, least=1)
        if not self.phases:
            raise PlanError("phases=() must hold at least one phase, such as 10 passes of joint rounds")

    @property
    def num_epochs(self) -> int:
        """E: passes over the training rows that move weights."""
        return sum(phase.passes for phase in self.phases if phase.kind.trains)

    @property
    def training(self) -> Training:
        """Local if weights move in no other rounds."""
        trained = {phase.kind for phase in self.phases if phase.kind.trains}
        return Training.LOCAL if trained == {LOCAL} else Training.JOINT

    @property
    def order(self) -> Order:
        """Order of the first rounds that train."""
        return next((phase.order for phase in self.phases if phase.kind.trains), Order.SHUFFLED)

    @property
    def is_released(self) -> bool:
        """True if a pass of predictions ends the run."""
        return self.phases[-1].kind == PREDICTION

    @property
    def usual(self) -> bool:
        """True if `training`, `num_epochs`, `evaluation` and `preparation` determine the phases."""
        kinds = {phase.kind.name for phase in self.phases}
        return self.num_epochs > 0 and self.phases == usual_phases(
            self.num_epochs,
            training=self.training,
            prepared=GRAM.name in kinds,
            fused=FUSION.name in kinds,
            released=self.is_released,
            order=self.order,
        )


def usual_phases(
    num_epochs: int,
    *,
    released: bool,
    training: Training = Training.JOINT,
    prepared: bool = False,
    fused: bool = False,
    order: Order = Order.SHUFFLED,
) -> tuple[Phase, ...]:
    """Return the phases of a usual run, in their order.

    Args:
        num_epochs: Passes of the rounds that train.
        released: Whether a pass of predictions over the test rows ends the run.
        training: Kind of the rounds that train.
        prepared: Whether columns are prepared.
        fused: Whether fusion rows are released, for a fusion model to learn from.
        order: Order of the rows in rounds that train.
    """
    check_whole("num_epochs", num_epochs, least=1)
    phases = [Phase(kind=kind, passes=1, order=Order.AS_GIVEN) for kind in ((MEAN, GRAM) if prepared else ())]
    phases.append(Phase(kind=LOCAL if training is Training.LOCAL else JOINT, passes=num_epochs, order=order))
    if fused:
        phases.append(Phase(kind=FUSION, passes=1, order=Order.AS_GIVEN))
    if released:
        phases.append(Phase(kind=PREDICTION, passes=1, order=Order.AS_GIVEN))
    return tuple(phases)


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Steps of every network, and the gradient's encoding."""

    learning_rate: float = setting(0.01, help="Of every network.", panel=TRAINING)
    optimizer: OptimizerName = setting(OptimizerName.SGD, help=words(OptimizerName), panel=TRAINING)
    momentum: float = setting(0.0, help="Of sgd.", panel=TRAINING)
    gradient_codec: GradientCodecName = setting(
        GradientCodecName.FLOAT32,
        help=f"{words(GradientCodecName)}: how the gradient goes down; coarser costs no privacy.",
        panel=TRAINING,
    )
    gradient_bound: float = setting(
        1000.0, help="What every party clips the entries of a gradient to, whatever the server sends.", panel=TRAINING
    )
    nesterov: bool = setting(False, help="Momentum that looks one step ahead.", panel=TRAINING, later=True)
    averaging: float = setting(
        0.0, help="In [0, 1): share of the last steps whose weights are averaged.", panel=TRAINING, later=True
    )

    def __post_init__(self) -> None:
        for name in ("learning_rate", "momentum", "gradient_bound", "averaging"):
            object.__setattr__(self, name, finite(name, getattr(self, name)))
        if not isinstance(self.nesterov, bool):
            raise PlanError(f"nesterov={self.nesterov!r} must be True or False")
        if self.nesterov and not self.momentum:
            raise PlanError(f"nesterov=True needs a momentum above 0, got {self.momentum:g}")
        if not 0 <= self.averaging < 1:
            raise PlanError(f"averaging={self.averaging:g} must be in [0, 1)")
        object.__setattr__(self, "optimizer", one_of("optimizer", self.optimizer, OptimizerName))
        object.__setattr__(self, "gradient_codec", one_of("gradient_codec", self.gradient_codec, GradientCodecName))
        if not 0 < self.gradient_bound <= LARGEST_GRADIENT_BOUND:
            raise PlanError(
                f"gradient_bound={self.gradient_bound:g} must be above 0 and at most {LARGEST_GRADIENT_BOUND:g}"
            )
        if self.learning_rate <= 0:
            raise PlanError(f"learning_rate={self.learning_rate:g} must be above 0")
        if not 0 <= self.momentum < 1:
            raise PlanError(f"momentum={self.momentum:g} must be in [0, 1)")
        if self.momentum and self.optimizer is not OptimizerName.SGD:
            raise PlanError(f"momentum={self.momentum:g} goes with optimizer=sgd, not optimizer={self.optimizer}")


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """Holder of the labels, and the loss of scores."""

    labels: Labels = setting(
        Labels.SERVER,
        help=f"{words(Labels)}: whether those of training rows go to every party, which local training needs.",
        panel=TRAINING,
        later=True,
    )
    loss: Loss = setting(Loss.CROSS_ENTROPY, help=words(Loss), panel=TRAINING, later=True)
    head: Head = setting(
        Head.TRAINED, help=f"{words(Head)}: how the server makes class scores of sums.", panel=TRAINING, later=True
    )
    label_epsilon: float | None = setting(
        None,
        help="In [0.01, 16]: pure epsilon of each training label, drawn once by randomised response. none: in clear.",
        panel=MECHANISM,
        later=True,
    )

    def __post_init__(self) -> None:
        for name, kind in (("labels", Labels), ("loss", Loss), ("head", Head)):
            object.__setattr__(self, name, one_of(name, getattr(self, name), kind))
        if self.label_epsilon is not None:
            object.__setattr__(self, "label_epsilon", check_label_epsilon(self.label_epsilon))

    def label_response(self, num_classes: int) -> LabelResponse | None:
        """Return the law by which training labels are drawn; None if they are used in clear."""
        if self.label_epsilon is None:
            return None
        return LabelResponse(num_classes=num_classes, epsilon=self.label_epsilon)


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Statistics of a party's columns before training: noisy sums over all rows, each row's part clipped.

    `whiten` takes the mean of the columns, and then the Gram matrix of what is left of them.
    """

    preparation: PreparationName = setting(
        PreparationName.NONE, help=f"{words(PreparationName)}: of columns, with noise.", panel=TRAINING, later=True
    )
    mean_noise: float = setting(
        0.0, help="Noise of the columns' mean, as a multiple of its clip norm.", panel=TRAINING, later=True
    )
    mean_clip: float = setting(
        1.0, help="What the root mean square of a row is clipped to for the mean.", panel=TRAINING, later=True
    )
    gram_noise: float = setting(
        0.0, help="Noise of their Gram matrix, as a multiple of its clip norm.", panel=TRAINING, later=True
    )
    gram_clip: float = setting(
        1.0,
        help="What that of a row without the mean is clipped to, for the matrix and from then on.",
        panel=TRAINING,
        later=True,
    )
    ridge: float = setting(
        0.5,
        help="Added to every direction's variance, as a multiple of what noise may add to one.",
        panel=TRAINING,
        later=True,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "preparation", one_of("preparation", self.preparation, PreparationName))
        for name in ("mean_noise", "mean_clip", "gram_noise", "gram_clip", "ridge"):
            object.__setattr__(self, name, finite(name, getattr(self, name)))
        for name in ("mean_clip", "gram_clip", "ridge"):
            if not SMALLEST_CLIP <= getattr(self, name) <= LARGEST_CLIP:
                raise PlanError(
                    f"{name}={getattr(self, name):g} must be in [{SMALLEST_CLIP:g}, {LARGEST_CLIP:g}]: squares of it "
                    "are computed in float32"
                )
        for name in ("mean_noise", "gram_noise"):
            noise = getattr(self, name)
            if noise < 0 or (self.preparation is PreparationName.WHITEN and not noise):
                raise PlanError(
                    f"{name}={noise:g} must be above 0: what is learned from private columns without noise is covered "
                    "by no epsilon"
                )

    def event(self, statistic: str) -> UpdateEvent:
        """Return the event that a statistic is charged as."""
        if statistic == GRAM.statistic:
            clip_norm = self.gram_clip**2
            return RoundedGaussianSum(clip_norm=clip_norm, noise_multiplier=self.gram_noise, diameter=GRAM_DIAMETER)
        return RoundedGaussianSum(clip_norm=self.mean_clip, noise_multiplier=self.mean_noise)


@dataclass(frozen=True, kw_only=True)
class Voting:
    """Release of a party's class scores for a prediction, and the model by which the label holder reads it."""

    vote: VoteKind = setting(VoteKind.RAW, help=words(VoteKind), panel=MECHANISM, later=True)
    vote_gain: float = setting(1.0, help="Scores are multiplied by it before a vote.", panel=MECHANISM, later=True)
    vote_grades: int = setting(
        1,
        help="Of vote=bins, top, ranks: parts that a difference of scores is cut into.",
        panel=MECHANISM,
        later=True,
    )
    num_fusion_samples: int = setting(
        0,
        help="Of the training rows: those that train no network, are released once and teach the fusion model.",
        panel=MECHANISM,
        later=True,
    )
    fusion: FusionName = setting(
        FusionName.AUTO, help=f"{words(FusionName)}: model that reads releases.", panel=MECHANISM, later=True
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "vote", one_of("vote", self.vote, VoteKind))
        object.__setattr__(self, "fusion", one_of("fusion", self.fusion, FusionName))
        object.__setattr__(self, "vote_gain", finite("vote_gain", self.vote_gain))
        check_whole("num_fusion_samples", self.num_fusion_samples, least=0)
        self.as_vote(1.0)

    def as_vote(self, bound: float) -> Vote:
        """Return the vote as a map of scores."""
        return Vote(kind=self.vote, gain=self.vote_gain, grades=self.vote_grades, bound=bound)


@dataclass(frozen=True, kw_only=True)
class UpdateNoise:
    """Strict training: noise on every party's update.

    Each row's gradient of its own loss is clipped to clip_norm; to their sum over the batch noise of standard deviation
    noise_multiplier * clip_norm is added; the step is along that sum divided by the rows of the batch. With a band
    above 1 the noise is added to mixtures of the last sums instead (`pbmvfl.privacy.noise_band`).
    """

    noise_multiplier: float = setting(
        0.0, help="Noise on weight updates, as a multiple of the clip norm; 0 for none.", panel=TRAINING
    )
    clip_norm: float = setting(
        1.0,
        help="What the gradient of a row's own loss is clipped to, over a whole network, where updates are noisy.",
        panel=TRAINING,
    )
    noise_band: int = setting(
        1,
        help="Steps over which the noise of updates is correlated; above 1 needs an order of rows that stays.",
        panel=TRAINING,
        later=True,
    )

    def __post_init__(self) -> None:
        for name in ("noise_multiplier", "clip_norm"):
            object.__setattr__(self, name, finite(name, getattr(self, name)))
        if self.noise_multiplier < 0:
            raise PlanError(f"noise_multiplier={self.noise_multiplier:g} must be 0 (no weight noise) or above")
        if self.clip_norm <= 0:
            raise PlanError(f"clip_norm={self.clip_norm:g} must be above 0")
        if self.band.width > 1 and not self.noise_multiplier:
            raise PlanError(f"noise_band={self.noise_band} goes with a noise_multiplier above 0; without noise it is 1")

    @property
    def band(self) -> Band:
        """Correlation of one step's noise with that of others."""
        return Band(self.noise_band)

    @property
    def event(self) -> UpdateEvent:
        """Event of one step of one party's weights."""
        if not self.noise_multiplier:
            return PlainUpdate()
        return banded_event(self.band, clip_norm=self.clip_norm, noise_multiplier=self.noise_multiplier)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Network of a party."""

    encoder: str = setting(
        "mlp",
        help="mlp | linear | multiview-conv | resnet18 | resnet18-batchnorm (couples the rows of a batch).",
        panel=TRAINING,
    )
    activation: Activation = setting(
        Activation.TANH, help=f"{words(Activation)}: keeps embeddings in [-C, C].", panel=TRAINING
    )
    features: FeatureMap = setting(
        FeatureMap.COLUMNS, help=f"{words(FeatureMap)}: what a network sees of a row.", panel=TRAINING, later=True
    )
    column_values: int = setting(
        3, help="Of features=values: how many a column has, equally spaced from 0 to 1.", panel=TRAINING, later=True
    )
    shapes: str = setting(
        "",
        help="Of features=shapes: knots of each party's columns, such as 2u16+5c+p4;3g16 (plan/shapes.py).",
        panel=TRAINING,
        later=True,
    )
    start: Start = setting(Start.RANDOM, help=f"{words(Start)}: first weights.", panel=TRAINING, later=True)
    #: Of networks that are not built from the plan: for each party the digest of its public first weights, as
    #: `training.encoders.weights_digest` computes it. Whatever else a party starts with is charged as weights that know
    #: rows.
    first_weights: tuple[str, ...] = field(default=(), metadata={"later": True})
    #: Of plans that train nothing: the trained federation whose parts the roles begin with, by its digest.
    model: str = field(default="", metadata={"later": True})

    def __post_init__(self) -> None:
        if self.model != "" and not _is_digest(self.model):
            raise PlanError(
                f"model={self.model!r} must be a SHA-256 digest, 64 hexadecimal digits, or empty; a trained model has "
                "one (`FederatedModel.digest`)"
            )
        if not isinstance(self.first_weights, list | tuple) or not all(map(_is_digest, self.first_weights)):
            raise PlanError(
                f"first_weights={self.first_weights!r} must be SHA-256 digests, 64 hexadecimal digits each, one for "
                "each party, or none; pbmvfl.training.encoders.weights_digest(network) computes them"
            )
        object.__setattr__(self, "first_weights", tuple(self.first_weights))
        if not isinstance(self.encoder, str) or not self.encoder:
            raise PlanError(f"encoder={self.encoder!r} must be the name of an encoder, such as mlp")
        check_whole("column_values", self.column_values, least=2, most=16)
        object.__setattr__(self, "features", one_of("features", self.features, FeatureMap))
        if not isinstance(self.shapes, str):
            raise PlanError(f"shapes={self.shapes!r} must be text, such as 2u16+5c+p4;3g16")
        parse_shapes(self.shapes)
        if (self.features is FeatureMap.SHAPES) != bool(self.shapes):
            raise PlanError(f"shapes={self.shapes!r} with features={self.features}: they go with features=shapes")
        object.__setattr__(self, "start", one_of("start", self.start, Start))
        why = f"; with {self.activation} the output can leave [-C, C], and the privacy account would not hold"
        object.__setattr__(self, "activation", one_of("activation", self.activation, Activation, why))

    @property
    def couples_rows(self) -> bool:
        """True if a row's embedding depends on the other rows of its batch."""
        return self.encoder in COUPLES_ROWS
