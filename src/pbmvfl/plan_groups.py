"""The public numbers of a plan by group: sizes, rounds, learning, noise on updates, networks. Frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pbmvfl.errors import PlanError
from pbmvfl.privacy.correlated import Band, banded_event
from pbmvfl.privacy.events import PlainUpdate, UpdateEvent
from pbmvfl.schedule import JOINT, PREDICTION, Order, Phase
from pbmvfl.settings import check_whole, finite, one_of, setting
from pbmvfl.wire.codecs import GradientCodecName

#: Encoders whose embedding of a row depends on the other rows of its batch.
COUPLES_ROWS = frozenset({"resnet18-batchnorm"})
#: Far inside float32: products of a gradient with a weight and a column stay finite for all but absurd columns.
LARGEST_GRADIENT_BOUND = 1e6
DATA, MECHANISM, TRAINING = "Data", "Privacy mechanism", "Training"


class OptimizerName(StrEnum):
    """How networks step along their slopes."""

    SGD = "sgd"
    ADAM = "adam"


class Evaluation(StrEnum):
    """Where accuracy figures come from."""

    SIMULATOR = "simulator"  #: exact sums that no role of the protocol ever sees; outside the epsilon
    RELEASED = "released"  #: the noisy sums that the server sees; every extra one is charged


class Activation(StrEnum):
    """The last step of an encoder. Each keeps the embedding inside [-C, C]."""

    TANH = "tanh"
    HARDTANH = "hardtanh"
    SOFTSIGN = "softsign"


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def words(kind: type[StrEnum]) -> str:
    return " | ".join(kind)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much of everything there is; the data says so."""

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
    """How the rows are gone through: batches, and phases of passes over them."""

    batch_size: int = setting(100, help="B: rows per round.", panel=TRAINING)
    phases: tuple[Phase, ...] = (Phase(kind=JOINT, passes=10),)

    def __post_init__(self) -> None:
        check_whole("batch_size", self.batch_size, least=1)
        if not self.phases:
            raise PlanError("phases=() must hold at least one phase, such as 10 passes of joint rounds")

    @property
    def num_epochs(self) -> int:
        """E: passes over the training rows that move weights."""
        return sum(phase.passes for phase in self.phases if phase.kind.updates)

    @property
    def usual(self) -> bool:
        """Whether `num_epochs` and `evaluation` say it all."""
        return self.phases == usual_phases(self.num_epochs, released=self.phases[-1].kind == PREDICTION)


def usual_phases(num_epochs: int, *, released: bool) -> tuple[Phase, ...]:
    """Joint rounds, and one pass over the test rows if evaluation is released."""
    check_whole("num_epochs", num_epochs, least=1)
    joint = Phase(kind=JOINT, passes=num_epochs)
    return (joint, Phase(kind=PREDICTION, passes=1, order=Order.AS_GIVEN)) if released else (joint,)


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How every network steps, and how the gradient travels."""

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

    def __post_init__(self) -> None:
        for name in ("learning_rate", "momentum", "gradient_bound"):
            object.__setattr__(self, name, finite(name, getattr(self, name)))
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
class UpdateNoise:
    """Strict training: noise on every party's update.

    Each row's gradient of its own loss is clipped to clip_norm; to their sum over the batch noise of standard deviation
    noise_multiplier * clip_norm is added; the step is along that sum divided by the rows of the batch. With a band
    above 1 the noise is added to mixtures of the last sums instead (`pbmvfl.privacy.correlated`).
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
        """How the noise of one step hangs together with that of others."""
        return Band(self.noise_band)

    @property
    def event(self) -> UpdateEvent:
        """What one step of one party's weights is."""
        if not self.noise_multiplier:
            return PlainUpdate()
        return banded_event(self.band, clip_norm=self.clip_norm, noise_multiplier=self.noise_multiplier)


@dataclass(frozen=True, kw_only=True)
class Network:
    """What a party computes on its columns."""

    encoder: str = setting(
        "mlp",
        help="mlp | linear | multiview-conv | resnet18 | resnet18-batchnorm (couples the rows of a batch).",
        panel=TRAINING,
    )
    activation: Activation = setting(
        Activation.TANH, help=f"{words(Activation)}: keeps embeddings in [-C, C].", panel=TRAINING
    )
    #: Of networks that are not built from the plan: for each party the digest of its public first weights, as
    #: `encoders.weights_digest` computes it. Whatever else a party starts with is charged as weights that know rows.
    first_weights: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.first_weights, list | tuple) or not all(map(_is_digest, self.first_weights)):
            raise PlanError(
                f"first_weights={self.first_weights!r} must be SHA-256 digests, 64 hexadecimal digits each, one for "
                "each party, or none; pbmvfl.encoders.weights_digest(network) computes them"
            )
        object.__setattr__(self, "first_weights", tuple(self.first_weights))
        if not isinstance(self.encoder, str) or not self.encoder:
            raise PlanError(f"encoder={self.encoder!r} must be the name of an encoder, such as mlp")
        why = f"; with {self.activation} the output can leave [-C, C], and the privacy account would not hold"
        object.__setattr__(self, "activation", one_of("activation", self.activation, Activation, why))

    @property
    def couples_rows(self) -> bool:
        """Whether a row's embedding depends on the other rows of its batch."""
        return self.encoder in COUPLES_ROWS
