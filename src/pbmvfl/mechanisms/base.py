"""Interface of mechanisms: the public numbers of a release, and everything that follows from them, in one object.

One module adds one mechanism. It says what is charged (event), what travels (ring, payload), how a party draws it, how
the server reads it, how much noise that is, how a simulation draws it, which settings a budget allows, and how it is
described. Nothing else in the package knows which mechanisms there are.

Shape suffixes: M parties, B rows, P embedding_dim.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from pbmvfl._settings import Registry, check_whole, finite, setting, settings_of
from pbmvfl.crypto.ring import PayloadFormat, Ring
from pbmvfl.errors import PlanError
from pbmvfl.privacy.events import ReleaseEvent

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pbmvfl.crypto.entropy import Entropy

#: Far inside what float32 arithmetic on embeddings can hold.
SMALLEST_BOUND = 1e-6
LARGEST_BOUND = 1e6
_PANEL = "Privacy mechanism"


class Scratch:
    """Memory of one party for random words, used again in every round; it holds only spent randomness.

    Never shared: two parties that drew into one buffer at the same time would draw the same noise.
    """

    def __init__(self) -> None:
        self._words: npt.NDArray[np.uint16] = np.empty(0, dtype=np.uint16)

    def words(self, size: int) -> npt.NDArray[np.uint16]:
        """Return memory for so many 16-bit words. A fresh array every round would cost page faults."""
        if self._words.size < size:
            self._words = np.empty(size, dtype=np.uint16)
        return self._words if self._words.size == size else self._words[:size]


class NoisySum(Protocol):
    """Draw of a simulation: from every party's embedding to what the server learns from."""

    def __call__(self, embedding_MBP: Tensor) -> Tensor: ...

    def state(self) -> Tensor:
        """Return the state of the generator, for a checkpoint."""

    def load_state(self, state: Tensor) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Mechanism(ABC):
    """Randomiser of embeddings before they leave a party. Subclasses add their own public numbers."""

    #: Name in options and plans; it never changes.
    name: ClassVar[str]
    #: A few words for `--help`.
    words: ClassVar[str]
    #: What the server computes with, for texts about figures.
    reading: ClassVar[str] = "releases"
    #: Default of secure_aggregation.
    sums_are_hidden: ClassVar[bool]
    #: True if a party's release of a row needs no other party's noise, so that sending it again tells nothing new.
    stands_alone: ClassVar[bool] = False

    num_parties: int
    embedding_dim: int = setting(16, help="P: length of an embedding. More: less privacy, more bytes.", panel=_PANEL)
    bound: float = setting(1.0, help="C: embeddings lie in [-C, C].", panel=_PANEL)
    secure_aggregation: bool = False

    def __post_init__(self) -> None:
        check_whole(
            "num_parties",
            self.num_parties,
            least=2,
            most=0xFFFE,
            why=": with one party the sum is that party's own embedding" if self.num_parties == 1 else "",
        )
        check_whole("embedding_dim", self.embedding_dim, least=1)
        object.__setattr__(self, "bound", finite("bound", self.bound))
        if not SMALLEST_BOUND <= self.bound <= LARGEST_BOUND:
            raise PlanError(f"bound={self.bound:g} must be in [{SMALLEST_BOUND:g}, {LARGEST_BOUND:g}]")
        if not isinstance(self.secure_aggregation, bool):
            raise PlanError(f"secure_aggregation={self.secure_aggregation!r} must be True or False")
        self.check()
        if self.secure_aggregation and self.ring is None:
            raise PlanError(
                f"secure_aggregation=True with mechanism={self.name}: masks work on integers and this mechanism "
                "sends float32 numbers; use mechanism=pbm, or secure_aggregation=False"
            )

    def check(self) -> None:  # noqa: B027  (a mechanism without numbers of its own has nothing to check)
        """Refuse the mechanism's own numbers if out of range. Called before anything is derived from them."""

    # --- what is charged ---

    @property
    @abstractmethod
    def event(self) -> ReleaseEvent:
        """Event of one row's release: the numbers that are drawn by, and those that are charged."""

    # --- what travels ---

    @property
    @abstractmethod
    def ring(self) -> Ring | None:
        """Ring that holds every possible sum; None for a mechanism that sends floats in clear."""

    @property
    @abstractmethod
    def payload(self) -> PayloadFormat:
        """Format in which a party's values of a round are written, and added up."""

    # --- party and server ---

    @abstractmethod
    def randomize(
        self, embedding: npt.NDArray[np.float32], entropy: Entropy, scratch: Scratch | None = None
    ) -> npt.NDArray[Any]:
        """Return what leaves the party, drawn anew for every value of the embedding.

        Never raises: NaN counts as 0 and a value outside [-C, C] as the nearer end, because whether a party answers
        must not
        depend on its columns.

        Args:
            embedding: Exact values, in any shape.
            entropy: Source of secret randomness.
            scratch: The party's memory for random words.

        Returns:
            Values in the ring's type, or float32 for a mechanism without a ring.
        """

    @abstractmethod
    def estimate(self, total: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return the estimated sum of the embeddings.

        Args:
            total: The sum over the parties of what was sent.
        """

    @property
    @abstractmethod
    def variance_upper_bound(self) -> float:
        """Upper bound on the variance of one coordinate of the estimated sum, whatever the embeddings are."""

    @property
    def largest_sum(self) -> int | None:
        """Largest sum that honest parties can send; None where sums are floats."""
        return None

    # --- simulation ---

    @abstractmethod
    def simulated_sum(self, *, seed: int, device: torch.device) -> NoisySum:
        """Return the mechanism's law drawn by an ordinary generator, for studies; needs torch."""

    # --- planning ---

    @classmethod
    @abstractmethod
    def candidates(cls, base: Self, fixed: frozenset[str], fits: Callable[[Self], bool]) -> Iterator[Self]:
        """Return settings with little noise for which `fits` holds, for a planner to choose from.

        Names in `fixed` stay.
        """

    @classmethod
    @abstractmethod
    def quietest(cls, base: Self, fixed: frozenset[str]) -> Self:
        """Return the settings that release least, with the names in `fixed` as they are."""

    def refined(self, fixed: frozenset[str], fits: Callable[[Self], bool]) -> Self:
        """Return these settings, with less noise if an exact and slower `fits` allows it."""
        del fixed, fits
        return self

    # --- words ---

    @abstractmethod
    def describe(self) -> str:
        """Return a short description, for titles and tables."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return warnings for a person who trains with it."""
        return ()

    @property
    def is_private(self) -> bool:
        """Return whether it protects anything at all."""
        return True

    # --- forms ---

    @classmethod
    def own_settings(cls) -> tuple[str, ...]:
        """Return the names of the numbers that this mechanism has and others need not have."""
        shared = {each.name for each in fields(Mechanism)}
        return tuple(each.name for each in settings_of(cls) if each.name not in shared)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values with the mechanism's name. The number of parties stands elsewhere in a plan."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "num_parties"}
        return {"mechanism": self.name, **values}


MECHANISMS: Registry[type[Mechanism]] = Registry("mechanism", PlanError)
_Class = TypeVar("_Class", bound=type[Mechanism])


def register(mechanism: _Class) -> _Class:
    """Register a mechanism, as a class decorator, so that plans can name it."""
    MECHANISMS.add(mechanism.name, mechanism)
    return mechanism


def largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the largest integer in low..high that fits, to a fifth of a per cent; None if not even `low` fits.

    For a condition that fails from some point on.
    """
    if not fits(low):
        return None
    if fits(high):
        return high
    while high - low > max(1, low // 512):  # a fifth of a per cent of a beta is below what anyone can see
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


#: Ratios of neighbouring numbers that `largest_value` tries.
_RATIOS = 1024


def largest_value(fits: Callable[[float], bool], low: float, high: float) -> float | None:
    """Return the largest number in low..high that fits, to one of 1,024 equal ratios; None if not even `low` fits."""

    def at(step: int) -> float:
        return min(max(low * math.pow(high / low, step / _RATIOS), low), high)

    if not fits(low):
        return None
    least, most = 0, _RATIOS + 1
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(at(middle)) else (least, middle)
    return at(least)
