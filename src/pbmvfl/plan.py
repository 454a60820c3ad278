"""Plan: every public number of a run, in one frozen value.

Mechanism, schedule, wire sizes and privacy account all read the same plan, so they cannot disagree. A plan holds
nothing private and nothing that depends on anyone's columns; its hash is what the parties sign. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from pbmvfl.errors import PlanError
from pbmvfl.privacy.events import fixed_point_beta
from pbmvfl.protocol import PROTOCOL_VERSION

if TYPE_CHECKING:
    from pbmvfl.data.vertical import VerticalDataset
    from pbmvfl.privacy.table import PrivacyTable
    from pbmvfl.privacy.units import Adversary
    from pbmvfl.wire.traffic import Traffic

#: Below this, rounding a probability to 16 bits would move an embedding by more than 1e-3 of its bound.
SMALLEST_BETA = 1 / 128
LARGEST_BETA = 1 / 4
#: Far inside what float32 arithmetic on embeddings can hold.
SMALLEST_BOUND = 1e-6
LARGEST_BOUND = 1e6
#: The ring Z/2^k is held in 16-bit integers.
LARGEST_SUM = 65535


#: Encoders whose embedding of a row depends on the other rows of its batch.
COUPLES_ROWS = frozenset({"resnet18-batchnorm"})


class MechanismName(StrEnum):
    """How a party makes its embedding safe to send."""

    PBM = "pbm"  #: Poisson binomial: random integers, masked, only the sum is readable
    LDP = "ldp"  #: the paper's Gaussian baseline: each embedding noisy and readable, for studies
    NONE = "none"  #: exact embeddings in clear (the paper's NPQ), for studies


class GradientCodecName(StrEnum):
    """How the server writes the one gradient that goes to all parties."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


class OptimizerName(StrEnum):
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


def _finite(name: str, value: object) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise PlanError(f"{name}={value!r} must be a finite number")
    return number + 0.0  # minus zero equals zero and must hash alike


_Kind = TypeVar("_Kind", bound=StrEnum)


class _Choice(Generic[_Kind]):
    """A field that may be given as its enum or as the enum's spelling, and reads as the enum. For type checkers: the
    value is checked with all others in `__post_init__`."""

    def __init__(self, default: _Kind) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, plan: object, owner: type) -> _Kind:
        return self._default if plan is None else cast(_Kind, vars(plan)[self._name])

    def __set__(self, plan: object, value: _Kind | str) -> None:
        vars(plan)[self._name] = value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that the roles of a run agree on before it starts."""

    num_parties: int
    num_samples: int
    num_classes: int
    num_test_samples: int = 0
    embedding_dim: int = 16
    bound: float = 1.0
    mechanism: _Choice[MechanismName] = _Choice(MechanismName.PBM)
    num_trials: int = 16
    beta: float = 0.25
    #: None means: on for PBM; off for `ldp` and `none`, which send numbers that can be read.
    secure_aggregation: bool | None = None
    num_epochs: int = 10
    batch_size: int = 100
    learning_rate: float = 0.01
    optimizer: _Choice[OptimizerName] = _Choice(OptimizerName.SGD)
    momentum: float = 0.0
    #: Strict training: Gaussian noise of noise_multiplier * clip_norm on every party's clipped update; 0 means none.
    noise_multiplier: float = 0.0
    clip_norm: float = 1.0
    gradient_codec: _Choice[GradientCodecName] = _Choice(GradientCodecName.FLOAT32)
    evaluation: _Choice[Evaluation] = _Choice(Evaluation.SIMULATOR)
    encoder: str = "mlp"
    activation: _Choice[Activation] = _Choice(Activation.TANH)
    #: Public: the schedule, the first weights and the codec's rounding. Never noise, never masks.
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("bound", "beta", "learning_rate", "momentum", "noise_multiplier", "clip_norm"):
            object.__setattr__(self, name, _finite(name, getattr(self, name)))
        for name, kind in _ENUMS.items():
            self._coerce(name, kind)
        if self.secure_aggregation is None:
            object.__setattr__(self, "secure_aggregation", self.mechanism is MechanismName.PBM)
        self._check_counts()
        self._check_ranges()
        self._check_mechanism()

    def _coerce(self, name: str, kind: type[StrEnum]) -> None:
        value = getattr(self, name)
        try:
            object.__setattr__(self, name, kind(value))
        except ValueError:
            reason = ""
            if name == "activation":
                reason = (
                    f"; with {value} the output can leave [-C, C] = [{-self.bound:g}, {self.bound:g}], "
                    "and the privacy account would not hold"
                )
            raise PlanError(f"{name}={value!r} is not one of {', '.join(kind)}{reason}") from None

    def _check_counts(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not _is_whole(value) or value < least:
                raise PlanError(f"{name}={value!r} must be a whole number of at least {least}{_REASON.get(name, '')}")
        if not _is_whole(self.seed) or not 0 <= self.seed < 1 << 63:
            raise PlanError(f"seed={self.seed!r} must be a whole number in 0..2^63-1")
        if self.num_parties > 0xFFFE:
            raise PlanError(f"num_parties={self.num_parties} must be at most {0xFFFE}")
        # Round numbers and payload lengths are 32-bit fields of every message.
        rounds = self.num_rounds + self.num_prediction_rounds
        if rounds >= 1 << 32:
            raise PlanError(f"num_epochs={self.num_epochs} makes {rounds} rounds; at most 2^32-1 can be numbered")
        if 4 * self.full_batch * self.embedding_dim >= 1 << 32:
            raise PlanError(
                f"batch_size={self.batch_size} times embedding_dim={self.embedding_dim} makes a message of 4 GiB or "
                "more; choose less"
            )
        if not isinstance(self.encoder, str) or not self.encoder:
            raise PlanError(f"encoder={self.encoder!r} must be the name of an encoder, such as mlp")

    def _check_ranges(self) -> None:
        if not SMALLEST_BETA <= self.beta <= LARGEST_BETA:
            reason = ""
            if 0 < self.beta < SMALLEST_BETA:
                reason = (
                    f": probabilities are 16-bit integers, and a beta below 1/128 = {SMALLEST_BETA} would round "
                    "embeddings too coarsely; lower num_trials instead for more privacy"
                )
            raise PlanError(f"beta={self.beta:g} must be in [1/128, 1/4]{reason}")
        if self.noise_multiplier < 0:
            raise PlanError(f"noise_multiplier={self.noise_multiplier:g} must be 0 (no weight noise) or above")
        if not SMALLEST_BOUND <= self.bound <= LARGEST_BOUND:
            raise PlanError(f"bound={self.bound:g} must be in [{SMALLEST_BOUND:g}, {LARGEST_BOUND:g}]")
        for name in ("learning_rate", "clip_norm"):
            if getattr(self, name) <= 0:
                raise PlanError(f"{name}={getattr(self, name):g} must be above 0")
        if not 0 <= self.momentum < 1:
            raise PlanError(f"momentum={self.momentum:g} must be in [0, 1)")
        if self.momentum and self.optimizer is not OptimizerName.SGD:
            raise PlanError(f"momentum={self.momentum:g} goes with optimizer=sgd, not optimizer={self.optimizer}")
        if self.evaluation is Evaluation.RELEASED and self.num_test_samples < 1:
            raise PlanError(
                f"evaluation=released needs num_test_samples of at least 1, got {self.num_test_samples}; "
                "give test rows or use evaluation=simulator"
            )

    def _check_mechanism(self) -> None:
        if self.num_trials > LARGEST_SUM // 2:  # too many for two parties: how many there are does not matter
            raise PlanError(
                f"num_trials={self.num_trials} must be at most {LARGEST_SUM // 2}, and at most {LARGEST_SUM} divided "
                "by the number of parties: sums travel in rings of at most 16 bits"
            )
        if self.num_trials * self.num_parties > LARGEST_SUM:
            raise PlanError(
                f"num_trials*num_parties={self.num_trials}*{self.num_parties}={self.num_trials * self.num_parties} "
                f"must be at most {LARGEST_SUM}: sums travel in rings of at most 16 bits"
            )
        if not isinstance(self.secure_aggregation, bool):
            raise PlanError(f"secure_aggregation={self.secure_aggregation!r} must be True or False")
        if self.secure_aggregation and self.mechanism is not MechanismName.PBM:
            raise PlanError(
                f"secure_aggregation=True with mechanism={self.mechanism}: masks work on integers and this mechanism "
                "sends float32 numbers; use mechanism=pbm, or secure_aggregation=False"
            )
        if self.noise_multiplier and self.encoder in COUPLES_ROWS:
            # The noise hides one clipped gradient; here a row moves the gradients of its whole batch.
            raise PlanError(
                f"noise_multiplier={self.noise_multiplier:g} with encoder={self.encoder}, which couples the rows of a "
                "batch: one row moves every clipped gradient of its batch, and the noise is for one; use "
                "encoder=resnet18, which normalises by groups, or noise_multiplier=0"
            )

    # --- derived numbers ---

    @property
    def beta_16(self) -> int:
        """beta in units of 1/65536, rounded down; the beta that sampler, estimator and account really use."""
        return fixed_point_beta(self.beta)

    @property
    def rounds_per_epoch(self) -> int:
        return -(-self.num_samples // self.batch_size)

    @property
    def num_rounds(self) -> int:
        """Joint rounds of the whole run."""
        return self.num_epochs * self.rounds_per_epoch

    @property
    def num_prediction_rounds(self) -> int:
        """Rounds that release the test rows once, after training, if evaluation is released."""
        return -(-self.num_test_samples // self.batch_size) if self.evaluation is Evaluation.RELEASED else 0

    @property
    def full_batch(self) -> int:
        """Rows in the largest batch there is; keystream slots have this size."""
        return min(self.batch_size, max(self.num_samples, self.num_test_samples))

    @property
    def hash(self) -> bytes:
        """SHA-256 of the canonical JSON form and the protocol version: what parties compare and sign."""
        text = json.dumps({"protocol": PROTOCOL_VERSION, **self.to_dict()}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()

    def privacy(self, *, delta: float = 1e-5, adversaries: Iterable[Adversary] | None = None) -> PrivacyTable:
        """What this plan will cost, for every unit, adversary and accounting, before anything runs."""
        from pbmvfl.privacy.table import planned_privacy

        return planned_privacy(self, delta=delta, adversaries=adversaries)

    @classmethod
    def for_budget(cls, *, epsilon: float, delta: float, unit: str, accounting: str, **sizes: Any) -> Plan:
        """The plan with the least noise under a budget. `unit` and `accounting` say which epsilon is meant.

        Give `data`, or `num_parties`, `num_samples` and `num_classes`; see `privacy.calibration.plan_for_budget`.
        """
        from pbmvfl.planner import plan_for_budget

        return plan_for_budget(epsilon=epsilon, delta=delta, unit=unit, accounting=accounting, **sizes).plan

    def traffic(self) -> Traffic:
        """The bytes that this plan will move, exactly, before anything runs."""
        from pbmvfl.wire.traffic import predicted_traffic

        return predicted_traffic(self)

    # --- forms ---

    @classmethod
    def for_data(cls, data: VerticalDataset, **choices: Any) -> Plan:
        """A plan for these rows, parties and classes; `choices` are the other fields."""
        sizes = {
            "num_parties": data.num_parties,
            "num_samples": data.num_samples,
            "num_test_samples": data.num_test_samples,
            "num_classes": data.num_classes,
            "encoder": data.default_encoder,
        }
        return cls.from_dict({**sizes, **choices})

    def replace(self, **changes: Any) -> Plan:
        """The same plan with some fields changed, checked again."""
        _check_fields(changes)
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return {name: str(v) if isinstance(v, StrEnum) else v for name, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        _check_fields(values)
        missing = sorted({"num_parties", "num_samples", "num_classes"} - set(values))
        if missing:
            raise PlanError(f"the plan lacks {', '.join(missing)}")
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"the plan is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise PlanError("the plan must be a JSON object")
        return cls.from_dict(values)


def _check_fields(names: Iterable[str]) -> None:
    known = sorted(f.name for f in fields(Plan))
    for name in names:
        if name not in known:
            from difflib import get_close_matches

            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? The " if near else ""
            raise PlanError(f"unknown plan field {name!r}; {hint}fields are {', '.join(known)}")


_ENUMS: dict[str, type[StrEnum]] = {
    "mechanism": MechanismName,
    "gradient_codec": GradientCodecName,
    "optimizer": OptimizerName,
    "evaluation": Evaluation,
    "activation": Activation,
}
_LEAST = {
    "num_parties": 2,
    "num_samples": 1,
    "num_classes": 2,
    "num_test_samples": 0,
    "embedding_dim": 1,
    "num_trials": 1,
    "num_epochs": 1,
    "batch_size": 1,
}
_REASON = {"num_parties": ": with one party the sum is that party's own embedding"}
