"""Randomised response with k answers: a party sends the bin of each coordinate, or now and then another one.

    j = round((x/C + 1) (k-1)/2)              the bin of one coordinate x in [-C, C], 0..k-1
    sent: j with weight W, each other bin with weight w      W + (k-1) w = 2^32
    h~ = C / a * (2 S / (k-1) - M)            S the sum of what was sent, a = 1 - k w / 2^32

W/w is at most e^epsilon, in integers, so the program's law is the charged one. The guarantee needs no secure sum and
no other party's noise. The estimate is affine in what is sent, so the sum over the parties is all that the server
needs; it is unbiased for the centre of every bin, and off by at most C/(k-1) a party for what lies between two centres.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from pbmvfl._settings import check_whole, finite, setting
from pbmvfl.crypto.ring import Ring
from pbmvfl.crypto.secure_sum import PackedIntegers
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms.base import Mechanism, NoisySum, Scratch, largest_value, register
from pbmvfl.privacy.composition import AtomLosses, Losses
from pbmvfl.privacy.events import ReleaseEvent, register_event
from pbmvfl.privacy.loss_distribution import LossDistribution
from pbmvfl.privacy.orders import ORDERS, Curve
from pbmvfl.privacy.pure_pairs import atoms_rdp
from pbmvfl.privacy.units import SERVER, Adversary, Unit

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pbmvfl.crypto.entropy import Entropy

#: Weights are integers that add up to this: one random word of 32 bits decides.
WEIGHT_ONE = 1 << 32
LARGEST_SYMBOLS = 256
SMALLEST_EPSILON, LARGEST_EPSILON = 0.01, 16.0
NO_NOISE_OF_OTHERS = "every symbol hides behind its own noise alone: nothing is assumed of other parties"
_PANEL = "Privacy mechanism"


def other_weight(symbols: int, epsilon: float) -> int:
    """Return the weight w of each other symbol, rounded up.

    The smallest integer with (2^32 - (k-1) w) / w <= e^epsilon.
    """
    # The margin is above the rounding of exp and of the division, and costs 1e-14 of epsilon.
    return math.ceil(WEIGHT_ONE / (math.exp(epsilon) + symbols - 1) * (1 + 1e-14))


def randomised_symbols(
    own: npt.NDArray[np.int64], symbols: int, weight: int, entropy: Entropy
) -> npt.NDArray[np.int64]:
    """Return each symbol of 0..k-1, or another one with weight `weight` of 2^32 each."""
    words = np.empty(own.shape, dtype=np.uint32)
    entropy.fill(words)
    # Of all words the first (k-1) w name another symbol, w of them each; the rest leave the own one.
    steps = np.minimum(words // np.uint32(weight), np.uint32(symbols - 1)).astype(np.int64)
    sent = own + np.where(steps == symbols - 1, 0, steps + 1)
    return np.where(sent >= symbols, sent - symbols, sent)


@lru_cache(maxsize=256)
def response_losses(symbols: int, weight: int) -> LossDistribution:
    """Return the losses of one symbol of k against another: +-ln(W/w) at the two of them and 0 at the others."""
    own = WEIGHT_ONE - (symbols - 1) * weight
    epsilon = math.log(own / weight)
    losses, weights = [-epsilon, 0.0, epsilon], [weight, (symbols - 2) * weight, own]
    return LossDistribution(np.array(losses), np.array(weights, dtype=np.float64) / WEIGHT_ONE)


@lru_cache(maxsize=256)
def _response_curve(symbols: int, weight: int, orders: tuple[float, ...]) -> Curve:
    """Return the Renyi curve of one symbol. A plan's account asks for the same one dozens of times."""
    return atoms_rdp(response_losses(symbols, weight), orders)


@register_event
@dataclass(frozen=True, kw_only=True)
class RandomisedResponse(ReleaseEvent):
    """One symbol of `symbols` from each party, for each coordinate of a row.

    Each symbol other than the party's own has weight `other_weight` out of 2^32.
    """

    name: ClassVar[str] = "randomised-response"
    symbols: int
    other_weight: int

    def copies(self, unit: Unit, adversary: Adversary = SERVER) -> int:
        """Return how many symbols of one row's release depend on the unit."""
        return self.embedding_dim * (self._honest(adversary) if unit is Unit.RECORD else 1)

    def _atoms(self, adversary: Adversary) -> LossDistribution:
        self._honest(adversary)  # names numbers that make no sense
        if not 2 <= self.symbols <= WEIGHT_ONE or not 1 <= self.other_weight <= WEIGHT_ONE // self.symbols:
            raise PlanError(
                f"symbols={self.symbols}, other_weight={self.other_weight}; permitted: 2 symbols or more, and a weight "
                "from 1 up to that of the own symbol."
            )
        return response_losses(self.symbols, self.other_weight)

    def rdp(self, unit: Unit, adversary: Adversary = SERVER, orders: tuple[float, ...] = ORDERS) -> Curve:
        self._atoms(adversary)  # names numbers that make no sense
        return self.copies(unit, adversary) * _response_curve(self.symbols, self.other_weight, orders)

    def losses(self, unit: Unit, adversary: Adversary = SERVER) -> Losses:
        return AtomLosses(atoms=self._atoms(adversary), copies=self.copies(unit, adversary))

    @property
    def conditions(self) -> tuple[str, ...]:
        return (NO_NOISE_OF_OTHERS,)


@register
@dataclass(frozen=True, kw_only=True)
class RandomisedSymbols(Mechanism):
    """Each coordinate's bin, by k-ary randomised response."""

    name: ClassVar[str] = "krr"
    words: ClassVar[str] = "randomised response, each symbol is readable"
    reading: ClassVar[str] = "randomised symbols"
    sums_are_hidden: ClassVar[bool] = False
    stands_alone: ClassVar[bool] = True

    symbols: int = setting(8, help="k: bins of a coordinate. More: finer, and more noise.", panel=_PANEL)
    response_epsilon: float = setting(
        2.0, help="In [0.01, 16]: pure epsilon of one symbol. More: less noise, less privacy.", panel=_PANEL
    )

    def check(self) -> None:
        check_whole("symbols", self.symbols, least=2, most=LARGEST_SYMBOLS)
        object.__setattr__(self, "response_epsilon", finite("response_epsilon", self.response_epsilon))
        if not SMALLEST_EPSILON <= self.response_epsilon <= LARGEST_EPSILON:
            raise PlanError(
                f"response_epsilon={self.response_epsilon:g} must be in [{SMALLEST_EPSILON:g}, {LARGEST_EPSILON:g}]"
            )

    @cached_property
    def event(self) -> RandomisedResponse:
        return RandomisedResponse(
            num_parties=self.num_parties,
            embedding_dim=self.embedding_dim,
            symbols=self.symbols,
            other_weight=other_weight(self.symbols, self.response_epsilon),
        )

    # --- what travels ---

    @cached_property
    def ring(self) -> Ring:
        return Ring.for_sums_up_to(self.largest_sum)

    @property
    def largest_sum(self) -> int:
        return (self.symbols - 1) * self.num_parties

    @property
    def payload(self) -> PackedIntegers:
        # Masks are not needed and do no harm. Without them a symbol takes ceil(log2(k)) bits.
        bits = self.ring.bits if self.secure_aggregation else (self.symbols - 1).bit_length()
        return PackedIntegers(bits=bits, ring=self.ring)

    # --- party and server ---

    def bins(self, embedding: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """Return the bin whose centre is nearest. NaN counts as 0, what lies outside as the nearer end."""
        with np.errstate(over="ignore"):
            unit = np.nan_to_num(embedding.astype(np.float64) / self.bound, nan=0.0, posinf=1.0, neginf=-1.0)
        places = (np.clip(unit, -1.0, 1.0) + 1.0) * ((self.symbols - 1) / 2)
        return np.floor(places + 0.5).astype(np.int64)

    def randomize(
        self, embedding: npt.NDArray[np.float32], entropy: Entropy, scratch: Scratch | None = None
    ) -> npt.NDArray[Any]:
        del scratch
        sent = randomised_symbols(self.bins(embedding), self.symbols, self.event.other_weight, entropy)
        return sent.astype(self.ring.dtype)

    @property
    def kept(self) -> float:
        """Probability a = 1 - k w / 2^32 that a symbol is the own one; else it is uniform over all k."""
        return 1 - self.symbols * self.event.other_weight / WEIGHT_ONE

    def estimate(self, total: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        centred = 2 * total.astype(np.float64) / (self.symbols - 1) - self.num_parties
        return (centred * (self.bound / self.kept)).astype(np.float32)

    @property
    def variance_upper_bound(self) -> float:
        """Variance M C^2 (1-a) (a + m) / a^2, m the mean square of the k centres for C = 1; attained at the ends."""
        mean_square = (self.symbols + 1) / (3 * (self.symbols - 1))
        a = self.kept
        return self.num_parties * self.bound**2 * (1 - a) * (a + mean_square) / a**2

    # --- simulation ---

    def simulated_sum(self, *, seed: int, device: torch.device) -> NoisySum:
        return symbol_sum(self, seed=seed, device=device)

    # --- planning: how many bins is a choice about learning; how often they are true is one about privacy ---

    @classmethod
    def candidates(cls, base: Self, fixed: frozenset[str], fits: Callable[[Self], bool]) -> Iterator[Self]:
        found = base._within(fixed, fits, SMALLEST_EPSILON, LARGEST_EPSILON)
        if found is not None:
            yield found

    def refined(self, fixed: frozenset[str], fits: Callable[[Self], bool]) -> Self:
        """Return the settings with a larger epsilon a symbol, up to a half more."""
        top = min(LARGEST_EPSILON, 1.5 * self.response_epsilon)
        return self._within(fixed, fits, self.response_epsilon, top) or self

    def _within(self, fixed: frozenset[str], fits: Callable[[Self], bool], low: float, high: float) -> Self | None:
        if "response_epsilon" in fixed:
            return self if fits(self) else None
        best = largest_value(lambda epsilon: fits(replace(self, response_epsilon=epsilon)), low, high)
        return None if best is None else replace(self, response_epsilon=best)

    @classmethod
    def quietest(cls, base: Self, fixed: frozenset[str]) -> Self:
        return base if "response_epsilon" in fixed else replace(base, response_epsilon=SMALLEST_EPSILON)

    # --- words ---

    def describe(self) -> str:
        return f"randomised response k={self.symbols}, epsilon={self.response_epsilon:g} a symbol"

    @property
    def notes(self) -> tuple[str, ...]:
        shown = 1 - (self.symbols - 1) * self.event.other_weight / WEIGHT_ONE
        return (f"mechanism krr: the server reads each symbol, true with probability {shown:.3g}",)


def symbol_sum(mechanism: RandomisedSymbols, *, seed: int, device: torch.device) -> NoisySum:
    """Draw the parties' integers by torch's generator."""
    import torch

    from pbmvfl.mechanisms.simulated import Generated

    class SymbolSum(Generated):
        def __call__(self, embedding_MBP: Tensor) -> Tensor:
            symbols, event = mechanism.symbols, mechanism.event
            unit = (embedding_MBP.double() / mechanism.bound).nan_to_num(nan=0.0).clamp(-1, 1)
            own = ((unit + 1) * ((symbols - 1) / 2) + 0.5).floor().long()
            words = torch.randint(WEIGHT_ONE, own.shape, generator=self.generator, device=own.device)
            steps = (words // event.other_weight).clamp(max=symbols - 1) + 1
            total = ((own + steps) % symbols).sum(0).double()
            centred = 2 * total / (symbols - 1) - mechanism.num_parties
            return (centred * (mechanism.bound / mechanism.kept)).float()

    return SymbolSum(seed=seed, device=device)
