"""Discrete Laplace noise on a secure sum, of which every party adds its share.

    v = round(D x / C)                     one coordinate x in [-C, C] as an integer in [-D, D]
    sent: v + X - Y modulo 2^k             X, Y ~ NegativeBinomial(1/n, exp(-1/s)), see `polya`
    h~ = C / D * (the sum, read as a signed number of k bits)

The shares of n parties add up to discrete Laplace noise of scale s exactly. n is how many honest parties are counted
on: with n = M - t the noise of the others is enough against t colluders, and the sum of all M has a little more. Sums
wrap around in the ring: that is computed from the sum and says nothing more about it, and it happens with probability
at most 2^-40 a coordinate.

With `bounded_total` a row's coordinates are shares of a whole, such as votes for classes: x in [0, C] becomes
v = floor(D x / C), and the integers of a row add up to at most D. A changed row then moves them by D upwards and D
downwards in all, not by 2D in every coordinate, and its cost does not grow with the number of coordinates.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from pbmvfl._settings import check_whole, finite, setting
from pbmvfl.crypto.ring import Ring
from pbmvfl.crypto.secure_sum import PackedIntegers
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms import negative_binomial
from pbmvfl.mechanisms.base import Mechanism, NoisySum, Scratch, largest_value, register
from pbmvfl.privacy.composition import AtomLosses, Losses
from pbmvfl.privacy.events import IDEAL_SUM, NO_SECURE_SUM, ReleaseEvent, register_event
from pbmvfl.privacy.loss_distribution import LossDistribution
from pbmvfl.privacy.orders import ORDERS, Curve
from pbmvfl.privacy.pure_pairs import atoms_rdp, laplace_losses, missing_shares_epsilon, pure_losses
from pbmvfl.privacy.units import SERVER, Adversary, Unit

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pbmvfl.crypto.entropy import Entropy

LARGEST_LEVELS = 4096
#: Above, the table of the sampler would be larger than a processor's cache, and take seconds to make.
SMALLEST_SCALE, LARGEST_SCALE = 1 / 16, 16384.0
#: A sum of all parties wraps around with at most this probability.
_LOG_WRAP = -40 * math.log(2)
#: Random bytes drawn at a time: they stay in the second-level cache between the cipher and the search.
_BLOCK_BYTES = 1 << 19
_PANEL = "Privacy mechanism"


@dataclass(frozen=True, kw_only=True)
class _Shares(ReleaseEvent):
    """Sum over the parties of integers and of shares of discrete Laplace noise."""

    levels: int
    scale: float
    noisy_parties: int
    #: True if only the sum can be read; otherwise each party's integers are read one by one.
    secure_sum: bool = True

    @abstractmethod
    def _pair(self, unit: Unit, adversary: Adversary) -> tuple[LossDistribution, int]:
        """Return a pair such that so many copies of it dominate a row's release."""

    def _counted(self, unit: Unit, adversary: Adversary) -> tuple[int, int]:
        """Return the cells that a unit has, and the shares of noise that hide one sum."""
        honest = self._honest(adversary)
        if self.levels < 1 or self.noisy_parties < 1 or not 0 < self.scale < math.inf:
            raise PlanError(
                f"levels={self.levels}, scale={self.scale}, noisy_parties={self.noisy_parties}; permitted: all above 0."
            )
        return honest if unit is Unit.RECORD else 1, honest if self.secure_sum else 1

    def rdp(self, unit: Unit, adversary: Adversary = SERVER, orders: tuple[float, ...] = ORDERS) -> Curve:
        pair, copies = self._pair(unit, adversary)
        return copies * atoms_rdp(pair, orders)

    def losses(self, unit: Unit, adversary: Adversary = SERVER) -> Losses:
        pair, copies = self._pair(unit, adversary)
        return AtomLosses(atoms=pair, copies=copies)

    @property
    def conditions(self) -> tuple[str, ...]:
        return (IDEAL_SUM if self.secure_sum else NO_SECURE_SUM,)


@register_event
@dataclass(frozen=True, kw_only=True)
class PolyaLaplaceRelease(_Shares):
    """Sum over the parties, for each coordinate of a row, of an integer in [-levels, levels] and noise.

    Each party's noise is the difference of two NegativeBinomial(1/noisy_parties, exp(-1/scale)).
    """

    name: ClassVar[str] = "polya-laplace"

    def _pair(self, unit: Unit, adversary: Adversary) -> tuple[LossDistribution, int]:
        cells, shares = self._counted(unit, adversary)
        distance = 2 * self.levels * (cells if self.secure_sum else 1)
        copies = self.embedding_dim * (1 if self.secure_sum else cells)
        if shares >= self.noisy_parties:  # what is more than a whole Laplace noise can only hide more
            return laplace_losses(distance, self.scale), copies
        return pure_losses(missing_shares_epsilon(distance, self.scale, shares, self.noisy_parties)), copies


@register_event
@dataclass(frozen=True, kw_only=True)
class PolyaLaplaceSharesRelease(_Shares):
    """Sum over the parties, for each coordinate of a row, of an integer of at least 0 and noise.

    Each party's noise is the difference of two NegativeBinomial(1/noisy_parties, exp(-1/scale)). The integers of one
    party's row add up to at most `levels`.

    Proofs in theory.md, "Shares of a whole". What goes up goes up by `levels` in all, and so does what goes down;
    one coordinate for each is the worst case, if the noise is whole.
    """

    name: ClassVar[str] = "polya-laplace-shares"

    def _pair(self, unit: Unit, adversary: Adversary) -> tuple[LossDistribution, int]:
        cells, shares = self._counted(unit, adversary)
        distance = self.levels * (cells if self.secure_sum else 1)
        rows = 1 if self.secure_sum else cells
        if shares >= self.noisy_parties:
            return laplace_losses(distance, self.scale), rows * min(2, self.embedding_dim)
        return pure_losses(self._missing_shares_epsilon(distance, shares)), rows

    def _missing_shares_epsilon(self, distance: int, shares: int) -> float:
        """Return the largest loss if shares are missing.

        Noise that is not whole is worst spread out: its losses grow less than the distance does.
        """
        most = 2 * distance if self.embedding_dim > 1 else distance
        each, one_more = divmod(most, self.embedding_dim)
        parts = ((each, self.embedding_dim - one_more), (each + 1, one_more))
        return sum(
            count * missing_shares_epsilon(moved, self.scale, shares, self.noisy_parties)
            for moved, count in parts
            if moved and count
        )


@register
@dataclass(frozen=True, kw_only=True)
class PolyaLaplace(Mechanism):
    """Share of discrete Laplace noise of one party, and the server's estimator."""

    name: ClassVar[str] = "laplace"
    words: ClassVar[str] = "discrete Laplace in shares, only sums are readable"
    reading: ClassVar[str] = "noisy sums"
    sums_are_hidden: ClassVar[bool] = True

    levels: int = setting(64, help="D: a coordinate becomes an integer in [-D, D].", panel=_PANEL)
    scale: float = setting(
        128.0, help="s: of the noise, in levels. Pure epsilon of a coordinate: 2D/s. More: more privacy.", panel=_PANEL
    )
    honest_parties: int = setting(
        0, help="Parties whose noise is enough by itself: M - t against t colluders. 0: all.", panel=_PANEL
    )
    bounded_total: bool = setting(
        False, help="A row's coordinates are shares of C: none negative, C in all at the most.", panel=_PANEL
    )

    def check(self) -> None:
        check_whole("levels", self.levels, least=1, most=LARGEST_LEVELS)
        object.__setattr__(self, "scale", finite("scale", self.scale))
        if not SMALLEST_SCALE <= self.scale <= LARGEST_SCALE:
            raise PlanError(f"scale={self.scale:g} must be in [1/16, {LARGEST_SCALE:g}]")
        check_whole("honest_parties", self.honest_parties, least=0)
        check_whole(
            "honest_parties", self.honest_parties, least=0, most=self.num_parties, why=", the number of parties"
        )
        if not isinstance(self.bounded_total, bool):
            raise PlanError(f"bounded_total={self.bounded_total!r} must be True or False")

    @property
    def shares(self) -> int:
        """Number n of parties whose shares are one Laplace noise."""
        return self.honest_parties or self.num_parties

    @cached_property
    def event(self) -> PolyaLaplaceRelease | PolyaLaplaceSharesRelease:
        kind = PolyaLaplaceSharesRelease if self.bounded_total else PolyaLaplaceRelease
        return kind(
            num_parties=self.num_parties,
            embedding_dim=self.embedding_dim,
            levels=self.levels,
            scale=self.scale,
            noisy_parties=self.shares,
            secure_sum=self.secure_aggregation,
        )

    # --- what travels ---

    @cached_property
    def ring(self) -> Ring:
        return Ring.for_sums_up_to(2 * (self.num_parties * self.levels + self._largest_noise))

    @cached_property
    def _largest_noise(self) -> int:
        """Return what all noise together exceeds, on either side, with at most half of the permitted probability.

        Chernoff: ln P(X - Y >= T) <= -z T + r (2 ln(1-p) - ln(1 - p e^z) - ln(1 - p e^-z)) for every z in (0, 1/s).
        """
        r, rate = self.num_parties / self.shares, 1 / self.scale
        bounds = []
        for z in (rate * j / 64 for j in range(1, 64)):
            moment = 2 * math.log(-math.expm1(-rate))
            moment -= math.log(-math.expm1(z - rate)) + math.log(-math.expm1(-z - rate))
            bounds.append((r * moment + math.log(2) - _LOG_WRAP) / z)
        return math.ceil(min(bounds))

    @property
    def payload(self) -> PackedIntegers:
        # With and without masks: a share has no largest value, and wraps around like the sum.
        return PackedIntegers(bits=self.ring.bits, ring=self.ring)

    # --- party and server ---

    def integers(self, embedding: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """Return the nearest of the levels. NaN counts as 0, a value outside as the nearer end."""
        with np.errstate(over="ignore"):
            unit = np.nan_to_num(embedding.astype(np.float64) / self.bound, nan=0.0, posinf=1.0, neginf=-1.0)
        if self.bounded_total:
            return self._shares(unit)
        return np.floor(np.clip(unit, -1.0, 1.0) * self.levels + 0.5).astype(np.int64)

    def _shares(self, unit: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return each coordinate's share of D, rounded down.

        Where a row's integers would exceed D its last ones are lowered: the limit holds for the integers themselves,
        whatever
        rounding did before. A row is `embedding_dim` values.
        """
        flat = np.floor(np.clip(unit, 0.0, 1.0) * self.levels).astype(np.int64).reshape(-1)
        rows = np.zeros((-(-flat.size // self.embedding_dim), self.embedding_dim + 1), dtype=np.int64)
        padded = np.zeros(len(rows) * self.embedding_dim, dtype=np.int64)
        padded[: flat.size] = flat
        np.cumsum(padded.reshape(len(rows), self.embedding_dim), axis=1, out=rows[:, 1:])
        limited = np.diff(np.minimum(rows, self.levels), axis=1)
        return limited.reshape(-1)[: flat.size].reshape(unit.shape)

    def randomize(
        self, embedding: npt.NDArray[np.float32], entropy: Entropy, scratch: Scratch | None = None
    ) -> npt.NDArray[Any]:
        scratch = scratch or Scratch()
        noisy = self.integers(embedding).reshape(-1)
        step = _BLOCK_BYTES // 16
        for start in range(0, noisy.size, step):
            block = noisy[start : start + step]
            words = scratch.words(8 * block.size).view(np.uint64)
            entropy.fill(words)
            drawn = negative_binomial.draw(self.scale, self.shares, words, entropy)
            block += drawn[: block.size] - drawn[block.size :]
        wrapped = (noisy & ((1 << self.ring.bits) - 1)).astype(self.ring.dtype)
        return wrapped.reshape(embedding.shape)

    def estimate(self, total: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return the estimated sum of the embeddings.

        It is unbiased for the levels, which are off by at most C/(2D) a party; shares of a whole are up to C/D too low.
        """
        size = 1 << self.ring.bits
        signed = total.astype(np.int64)
        signed = np.where(signed >= size // 2, signed - size, signed)
        return (signed * (self.bound / self.levels)).astype(np.float32)

    @property
    def variance_upper_bound(self) -> float:
        """Variance (C/D)^2 (M/n) 2p/(1-p)^2, whatever the embeddings are; the ring's wrap-around is left out."""
        share = 2 * math.exp(-1 / self.scale) / math.expm1(-1 / self.scale) ** 2 / self.shares
        return (self.bound / self.levels) ** 2 * self.num_parties * share

    # --- simulation ---

    def simulated_sum(self, *, seed: int, device: torch.device) -> NoisySum:
        return laplace_sum(self, seed=seed, device=device)

    # --- planning: how many levels is a choice about learning; at equal epsilon they hardly change the noise ---

    @classmethod
    def candidates(cls, base: Self, fixed: frozenset[str], fits: Callable[[Self], bool]) -> Iterator[Self]:
        for number in (base.honest_parties,) if "honest_parties" in fixed else base._numbers_of_honest_parties():
            tried = replace(base, honest_parties=number)
            found = tried._within(fixed, fits, SMALLEST_SCALE, LARGEST_SCALE)
            if found is not None:
                yield found

    def _numbers_of_honest_parties(self) -> tuple[int, ...]:
        """Return the numbers that a search tries: all, and some fewer.

        Against t colluders M - t has the least noise.
        """
        return (0, *(number for number in range(self.num_parties - 1, max(0, self.num_parties - 5), -1)))

    def refined(self, fixed: frozenset[str], fits: Callable[[Self], bool]) -> Self:
        """Return the settings with a smaller scale, down to two thirds."""
        return self._within(fixed, fits, max(SMALLEST_SCALE, self.scale / 1.5), self.scale) or self

    def _within(self, fixed: frozenset[str], fits: Callable[[Self], bool], low: float, high: float) -> Self | None:
        if "scale" in fixed:
            return self if fits(self) else None
        best = largest_value(lambda strength: fits(replace(self, scale=high / strength)), 1.0, high / low)
        return None if best is None else replace(self, scale=high / best)

    @classmethod
    def quietest(cls, base: Self, fixed: frozenset[str]) -> Self:
        return replace(
            base,
            scale=base.scale if "scale" in fixed else LARGEST_SCALE,
            honest_parties=base.honest_parties if "honest_parties" in fixed else 1,
        )

    # --- words ---

    def describe(self) -> str:
        counted = "" if self.shares == self.num_parties else f", {self.shares} honest"
        hidden = "" if self.secure_aggregation else ", sums not hidden"
        shares = ", shares of D" if self.bounded_total else ""
        return f"discrete Laplace D={self.levels}, s={self.scale:g}{shares}{counted}{hidden}"

    @property
    def notes(self) -> tuple[str, ...]:
        if self.secure_aggregation:
            return ()
        return ("without secure aggregation a party's values hide behind its own share of the noise alone",)


def laplace_sum(mechanism: PolyaLaplace, *, seed: int, device: torch.device) -> NoisySum:
    """Draw the sum of all parties' noise at once by torch's generator.

    A Poisson variable with a gamma mean is negative binomial.
    """
    import torch

    from pbmvfl.mechanisms.simulated import Generated

    shape = mechanism.num_parties / mechanism.shares
    mean = 1 / math.expm1(1 / mechanism.scale)  # p / (1 - p)

    class LaplaceSum(Generated):
        def __call__(self, embedding_MBP: Tensor) -> Tensor:
            unit = (embedding_MBP.double() / mechanism.bound).nan_to_num(nan=0.0).clamp(-1, 1)
            if mechanism.bounded_total:
                running = (unit.clamp(0, 1) * mechanism.levels).floor().cumsum(-1).clamp(max=mechanism.levels)
                exact_BP = torch.diff(running, dim=-1, prepend=torch.zeros_like(running[..., :1])).sum(0)
            else:
                exact_BP = (unit * mechanism.levels + 0.5).floor().sum(0)
            shapes = torch.full((2, *exact_BP.shape), shape, dtype=torch.float64, device=exact_BP.device)
            means = torch._standard_gamma(shapes, generator=self.generator) * mean
            drawn = torch.poisson(means, generator=self.generator)
            noisy_BP = exact_BP + drawn[0] - drawn[1]
            return (noisy_BP * (mechanism.bound / mechanism.levels)).float()

    return LaplaceSum(seed=seed, device=device)
