"""Events: what leaves a party, as frozen values whose meaning never changes, each with the curve that it costs.

An event says what was released; a ledger keeps it by its name and numbers, so that later versions cannot price an old
release anew. A name therefore stands for one law for ever: a changed law gets a new name. Nothing here trains.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeVar, get_type_hints

import numpy as np

from pbmvfl._settings import Registry
from pbmvfl.errors import LedgerError, PlanError
from pbmvfl.privacy.composition import BitLosses, GaussianLosses, HullLosses, Losses, NoLosses
from pbmvfl.privacy.orders import ORDERS, Curve
from pbmvfl.privacy.poisson_binomial import fixed_point_beta
from pbmvfl.privacy.renyi import cell_rdp, gaussian_rdp, record_rdp
from pbmvfl.privacy.units import SERVER, Adversary, Unit

IDEAL_SUM = "the secure sum is ideal, and the other honest parties add their noise"
NO_SECURE_SUM = "without secure aggregation every party's integers are readable: only its own noise hides a cell"
CLEAR_FLOATS = "Gaussian noise is continuous in the theory and 32-bit in the program: for studies only"
EXACT = "embeddings are sent exactly: nothing is protected"
CLIP_LAST = "gradients are clipped after any preconditioning, and non-finite ones are zero before summing"
WEIGHTS_STAY = "weights never leave a party: exporting them is not covered"


def local_gaussian_variance(*, num_parties: int, num_trials: int, beta: float, bound: float) -> float:
    """Return the variance of one party's noise on one coordinate in the paper's local baseline.

    Section 7 of the paper prints 2M / (b * beta^2), which takes C = 1.
    """
    return bound**2 * (2 * num_parties / (num_trials * beta**2))


# --- the two sorts of events ---


@dataclass(frozen=True, kw_only=True)
class Event(ABC):
    """Something that depends on private rows and that an adversary can see, or see the consequences of."""

    #: Under which a ledger keeps it.
    name: ClassVar[str]

    @property
    def conditions(self) -> tuple[str, ...]:
        """Return what must hold for the curve, in words."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        return {"event": self.name, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class ReleaseEvent(Event):
    """Release of one row by every party: all coordinates of its embedding."""

    num_parties: int
    embedding_dim: int

    @abstractmethod
    def rdp(self, unit: Unit, adversary: Adversary = SERVER, orders: tuple[float, ...] = ORDERS) -> Curve:
        """Return what ONE row's release costs. PARTY is charged at the cell's rate, row by row."""

    @abstractmethod
    def losses(self, unit: Unit, adversary: Adversary = SERVER) -> Losses:
        """Return that cost as privacy losses; `NoLosses` where there is no such account."""

    def _honest(self, adversary: Adversary) -> int:
        if self.embedding_dim < 1:
            raise PlanError(f"embedding_dim={self.embedding_dim}; permitted: 1 or more.")
        return adversary.honest_parties(self.num_parties)


@dataclass(frozen=True, kw_only=True)
class UpdateEvent(Event):
    """Step of one party's weights, taken with a row in its batch."""

    #: True if noise hides the row in the weights; otherwise all that they touch afterwards depends on the row.
    is_noisy: ClassVar[bool]

    @abstractmethod
    def rdp(self, orders: tuple[float, ...] = ORDERS) -> Curve:
        """Return what ONE update of ONE party costs a cell that was in its batch once."""

    @abstractmethod
    def losses(self) -> Losses: ...


EVENTS: Registry[type[Event]] = Registry("event", LedgerError)
_Class = TypeVar("_Class", bound=type[Event])


def register_event(event: _Class) -> _Class:
    """Register an event class under a name that was never used for another law."""
    EVENTS.add(event.name, event)
    return event


def event_from_dict(values: dict[str, Any]) -> Event:
    """Return the event that `Event.to_dict` wrote.

    Raises:
        LedgerError: This version does not know the event, or it has another form.
    """
    kind = EVENTS[values.get("event", "")]
    numbers = {name: value for name, value in values.items() if name != "event"}
    if set(numbers) != {field.name for field in fields(kind)}:
        expected = ", ".join(field.name for field in fields(kind))
        raise LedgerError(f"event={kind.name!r} has {', '.join(numbers)} where {expected} must be; restore a copy")
    hints = _hints(kind)
    for name, value in numbers.items():
        if not _is_a(hints[name], value):
            raise LedgerError(f"event={kind.name!r} has {name}={value!r}, which is no {name}; restore a copy")
    return kind(**numbers)


#: Types of an event's fields. Evaluating them takes longer than the rest of reading one, and a ledger has thousands.
_hints = functools.cache(get_type_hints)


def _is_a(kind: object, value: object) -> bool:
    """Return whether a value that was read is of the sort that a field has.

    An infinite variance would make a release free.
    """
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return math.isfinite(value)
    return type(value) is kind


# --- releases ---


@register_event
@dataclass(frozen=True, kw_only=True)
class PoissonBinomialRelease(ReleaseEvent):
    """Sum over the parties of Binomial(num_trials, p), p in 1/2 -+ beta, per coordinate of a row's embedding."""

    name: ClassVar[str] = "poisson-binomial"
    num_trials: int
    beta: float
    #: True if only the sum can be read; otherwise each party's integers are read one by one.
    secure_sum: bool = True

    @property
    def beta_16(self) -> int:
        return fixed_point_beta(self.beta)

    def hidden_among(self, adversary: Adversary = SERVER) -> int:
        """Parties whose bits hide a cell: M - t behind a secure sum, only the cell's own without one."""
        honest = self._honest(adversary)
        return honest if self.secure_sum else 1

    def rdp(self, unit: Unit, adversary: Adversary = SERVER, orders: tuple[float, ...] = ORDERS) -> Curve:
        if unit is Unit.RECORD:
            curve = record_rdp(self.num_trials, self.beta_16, self._honest(adversary), orders)
        else:
            curve = cell_rdp(self.num_trials, self.beta_16, self.hidden_among(adversary), orders)
        return self.embedding_dim * curve

    def losses(self, unit: Unit, adversary: Adversary = SERVER) -> Losses:
        if unit is Unit.RECORD:
            bits = self.num_trials * self._honest(adversary) * self.embedding_dim
            return BitLosses(num_bits=bits, beta_16=self.beta_16)
        return HullLosses(
            num_trials=self.num_trials,
            beta_16=self.beta_16,
            noisy_parties=self.hidden_among(adversary),
            coordinates=self.embedding_dim,
        )

    @property
    def conditions(self) -> tuple[str, ...]:
        return (IDEAL_SUM if self.secure_sum else NO_SECURE_SUM,)


@register_event
@dataclass(frozen=True, kw_only=True)
class LocalGaussianRelease(ReleaseEvent):
    """Embedding of one row from each party, readable one by one, with Gaussian noise on each coordinate."""

    name: ClassVar[str] = "local-gaussian"
    variance: float
    bound: float

    def shift(self, unit: Unit, adversary: Adversary = SERVER) -> float:
        """Standard deviations by which every coordinate of the unit's embeddings moves, from -C to C."""
        cells = self._honest(adversary) if unit is Unit.RECORD else 1
        if not self.variance > 0 or not self.bound > 0:
            raise PlanError(f"variance={self.variance}, bound={self.bound}; permitted: both above 0.")
        return 2 * self.bound * math.sqrt(self.embedding_dim / self.variance) * math.sqrt(cells)

    def rdp(self, unit: Unit, adversary: Adversary = SERVER, orders: tuple[float, ...] = ORDERS) -> Curve:
        return gaussian_rdp(self.shift(unit, adversary), orders)

    def losses(self, unit: Unit, adversary: Adversary = SERVER) -> Losses:
        return GaussianLosses(shift=self.shift(unit, adversary))

    @property
    def conditions(self) -> tuple[str, ...]:
        return (CLEAR_FLOATS,)


@register_event
@dataclass(frozen=True, kw_only=True)
class ExactRelease(ReleaseEvent):
    """Embedding of one row from each party, exactly: no privacy at all."""

    name: ClassVar[str] = "exact"

    def rdp(self, unit: Unit, adversary: Adversary = SERVER, orders: tuple[float, ...] = ORDERS) -> Curve:
        del unit
        self._honest(adversary)  # names numbers that make no sense
        return np.full(len(orders), np.inf)

    def losses(self, unit: Unit, adversary: Adversary = SERVER) -> Losses:
        del unit, adversary
        return NoLosses()

    @property
    def conditions(self) -> tuple[str, ...]:
        return (EXACT,)


# --- updates ---


@register_event
@dataclass(frozen=True, kw_only=True)
class PlainUpdate(UpdateEvent):
    """Step without noise: from then on the weights depend on the row, and so does every embedding that they make.

    It has no finite cost of its own. It stays affordable as long as the weights stay at home, because then only later
    releases carry the row further, and the strict account charges all of those.
    """

    name: ClassVar[str] = "plain-update"
    is_noisy: ClassVar[bool] = False

    def rdp(self, orders: tuple[float, ...] = ORDERS) -> Curve:
        return np.full(len(orders), np.inf)

    def losses(self) -> Losses:
        return NoLosses()

    @property
    def conditions(self) -> tuple[str, ...]:
        return (WEIGHTS_STAY,)


@dataclass(frozen=True, kw_only=True)
class _GaussianUpdate(UpdateEvent):
    """Sum over rows, each row's part limited to clip_norm, plus noise of deviation noise_multiplier * clip_norm."""

    is_noisy: ClassVar[bool] = True
    clip_norm: float
    noise_multiplier: float

    @property
    def shift(self) -> float:
        """Standard deviations by which replacing one row moves the sum, at the most: 2c against sigma*c."""
        return 2 / self.noise_multiplier

    def rdp(self, orders: tuple[float, ...] = ORDERS) -> Curve:
        return gaussian_rdp(self.shift, orders)

    def losses(self) -> Losses:
        return GaussianLosses(shift=self.shift)

    @property
    def conditions(self) -> tuple[str, ...]:
        return (CLIP_LAST,)


@register_event
@dataclass(frozen=True, kw_only=True)
class NoisyUpdate(_GaussianUpdate):
    """Per-row gradients clipped to clip_norm, summed, plus continuous Gaussian noise of standard deviation
    noise_multiplier * clip_norm. For ledgers of old plans; none was ever trained."""

    name: ClassVar[str] = "noisy-update"

    @property
    def shift(self) -> float:
        if not self.noise_multiplier > 0:
            raise PlanError(f"noise_multiplier={self.noise_multiplier}; permitted: above 0.")
        if not self.clip_norm > 0:
            raise PlanError(f"clip_norm={self.clip_norm}; permitted: above 0.")
        return super().shift


@register_event
@dataclass(frozen=True, kw_only=True)
class DiscreteGaussianUpdate(_GaussianUpdate):
    """Per-row gradients clipped to clip_norm, summed on a grid of integers, plus discrete Gaussian noise of standard
    deviation noise_multiplier * clip_norm on the same grid.

    Replacing a row moves the integers by at most 2 * clip_norm. For whole shifts the discrete Gaussian has at most the
    continuous one's Renyi divergence, in any dimension (Canonne, Kamath, Steinke, 2020, Proposition 5), but not its
    hockey-stick curve: there is no account by losses. For ledgers of runs that drew it; nothing draws it any more.
    """

    name: ClassVar[str] = "discrete-gaussian-update"

    def __post_init__(self) -> None:
        for name in ("clip_norm", "noise_multiplier"):
            if not 0 < getattr(self, name) < math.inf:
                raise PlanError(f"{name}={getattr(self, name)}; permitted: above 0.")

    def losses(self) -> Losses:
        return NoLosses()


@register_event
@dataclass(frozen=True, kw_only=True)
class RoundedGaussianSum(_GaussianUpdate):
    """Sum over rows on a grid of integers, each row's part limited to clip_norm, plus rounded Gaussian noise.

    The noise has standard deviation noise_multiplier * clip_norm and is rounded down to the grid. Replacing a row moves
    the
    integers by at most diameter * clip_norm. Integers plus the rounded noise are the rounded output of the Gaussian
    mechanism, so that one's whole loss distribution bounds it (docs/explanation/theory.md, 2.16).
    """

    name: ClassVar[str] = "rounded-gaussian-sum"
    #: 2 where rows' parts may be opposite, as gradients are; sqrt(2) where they are counts of one class out of several.
    diameter: float = 2.0

    def __post_init__(self) -> None:
        for name in ("clip_norm", "noise_multiplier", "diameter"):
            if not 0 < getattr(self, name) < math.inf:
                raise PlanError(f"{name}={getattr(self, name)}; permitted: a finite number above 0.")

    @property
    def shift(self) -> float:
        """Standard deviations by which replacing one row moves the sum, at the most."""
        return self.diameter / self.noise_multiplier
