"""A mechanism in one file, written as a stranger would: one bit a coordinate, turned over now and then.

A coordinate x in [-C, C] becomes one bit that is 1 with probability (1 + x/C) / 2, and the bit is turned over with
probability f = flips/256. Together it is 1 with probability 1/2 + (1/2 - f) x/C. All of it is in integers of 1/65536.

Nothing here is registered by importing it: `registered()` does that, and forgets it again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pbmvfl._settings import check_whole, setting
from pbmvfl.crypto.entropy import Entropy
from pbmvfl.crypto.ring import Ring
from pbmvfl.crypto.secure_sum import PackedIntegers
from pbmvfl.mechanisms import MECHANISMS, Mechanism, NoisySum, Scratch, register
from pbmvfl.mechanisms.base import largest
from pbmvfl.mechanisms.simulated import Generated
from pbmvfl.privacy.composition import AtomLosses, Losses
from pbmvfl.privacy.events import EVENTS, ReleaseEvent, register_event
from pbmvfl.privacy.loss_distribution import LossDistribution
from pbmvfl.privacy.orders import ORDERS, Curve
from pbmvfl.privacy.units import SERVER, Adversary, Unit

#: Above every rounding of the sums below; a curve may be too high and never too low.
_ROUNDED_UP = 1 + 1e-9


def _divergence(p: npt.NDArray[np.float64], q: npt.NDArray[np.float64], order: float) -> float:
    """Of Renyi, in logarithms: at high orders the powers themselves are beyond floats."""
    return float(np.logaddexp.reduce(order * np.log(p) + (1 - order) * np.log(q))) / (order - 1)


@dataclass(frozen=True, kw_only=True)
class OneBitRelease(ReleaseEvent):
    """One bit from each party for each coordinate of a row's embedding, turned over with probability flips/256."""

    name: ClassVar[str] = "toy-one-bit"
    flips: int
    secure_sum: bool

    def rdp(self, unit: Unit, adversary: Adversary = SERVER, orders: tuple[float, ...] = ORDERS) -> Curve:
        honest = adversary.honest_parties(self.num_parties)
        if unit is Unit.RECORD or not self.secure_sum:  # bits that all move, or that can be told apart
            bits = self.embedding_dim * (honest if unit is Unit.RECORD else 1)
            return np.array([bits * self._one_bit(order) * _ROUNDED_UP for order in orders], dtype=np.float64)
        # The sum of all honest bits, whatever the others' are: divergences are largest where each is at an end.
        worst = [max(self._sum_of_bits(order, honest, k) for k in range(honest)) for order in orders]
        return np.array([self.embedding_dim * each * _ROUNDED_UP for each in worst], dtype=np.float64)

    def losses(self, unit: Unit, adversary: Adversary = SERVER) -> Losses:
        """Of the bits one by one; what is computed from them, such as their sum, costs no more."""
        honest = adversary.honest_parties(self.num_parties)
        bits = self.embedding_dim * (honest if unit is Unit.RECORD else 1)
        kept = 1 - self.flips / 256
        ones = np.arange(bits + 1)
        ways = np.array([math.comb(bits, int(i)) for i in ones], dtype=np.float64)
        probs = ways * kept**ones * (1 - kept) ** (bits - ones)
        losses = np.array([(2 * i - bits) * math.log(kept / (1 - kept)) for i in range(bits + 1)], dtype=np.float64)
        return AtomLosses(atoms=LossDistribution(losses, probs))

    def _one_bit(self, order: float) -> float:
        f = self.flips / 256
        return _divergence(np.array([1 - f, f]), np.array([f, 1 - f]), order)

    def _sum_of_bits(self, order: float, honest: int, k: int) -> float:
        """k of the others' bits are likelier 1, the rest likelier 0; both ways round."""
        f = self.flips / 256
        others = np.ones(1)
        for i in range(honest - 1):
            others = np.convolve(others, [f, 1 - f] if i < k else [1 - f, f])
        high, low = np.convolve(others, [f, 1 - f]), np.convolve(others, [1 - f, f])
        return max(_divergence(high, low, order), _divergence(low, high, order))

    @property
    def conditions(self) -> tuple[str, ...]:
        return ("every bit is turned over by itself",)


@dataclass(frozen=True, kw_only=True)
class OneBit(Mechanism):
    """Randomised response on each coordinate."""

    name: ClassVar[str] = "toy"
    words: ClassVar[str] = "one bit a coordinate, turned over now and then"
    sums_are_hidden: ClassVar[bool] = True

    flips: int = setting(64, help="In 1..127: bits turned over out of 256.", panel="Privacy mechanism")

    def check(self) -> None:
        check_whole("flips", self.flips, least=1, most=127)

    @property
    def slope_16(self) -> int:
        """How far a coordinate at C moves the probability from 1/2, in units of 1/65536."""
        return 256 * (128 - self.flips)

    @property
    def event(self) -> OneBitRelease:
        return OneBitRelease(
            num_parties=self.num_parties,
            embedding_dim=self.embedding_dim,
            flips=self.flips,
            secure_sum=self.secure_aggregation,
        )

    @property
    def ring(self) -> Ring:
        return Ring.for_sums_up_to(self.num_parties)

    @property
    def payload(self) -> PackedIntegers:
        return PackedIntegers(bits=self.ring.bits if self.secure_aggregation else 1, ring=self.ring)

    def randomize(
        self, embedding: npt.NDArray[np.float32], entropy: Entropy, scratch: Scratch | None = None
    ) -> npt.NDArray[Any]:
        del scratch
        unit = np.clip(np.nan_to_num(embedding.astype(np.float64), nan=0.0) / self.bound, -1, 1)
        probability_16 = 32768 + np.floor(unit * self.slope_16 + 0.5).astype(np.int64)
        words = np.empty(embedding.shape, dtype=np.uint16)
        entropy.fill(words)
        return (words < probability_16).astype(self.ring.dtype)

    def estimate(self, total: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        centred = total.astype(np.float64) - self.num_parties / 2
        return (centred * (self.bound * 65536 / self.slope_16)).astype(np.float32)

    @property
    def variance_upper_bound(self) -> float:
        return self.num_parties * (self.bound * 65536 / self.slope_16) ** 2 / 4

    def simulated_sum(self, *, seed: int, device: torch.device) -> NoisySum:
        return OneBitSum(self, seed=seed, device=device)

    @classmethod
    def candidates(cls, base: Self, fixed: frozenset[str], fits: Callable[[Self], bool]) -> Iterator[Self]:
        if "flips" in fixed:
            yield from [base] if fits(base) else []
            return
        kept = largest(lambda kept: fits(replace(base, flips=128 - kept)), 1, 127)
        if kept is not None:
            yield replace(base, flips=128 - kept)

    @classmethod
    def quietest(cls, base: Self, fixed: frozenset[str]) -> Self:
        return base if "flips" in fixed else replace(base, flips=127)

    def refined(self, fixed: frozenset[str], fits: Callable[[Self], bool]) -> Self:
        best = self
        while "flips" not in fixed and best.flips > 1 and fits(replace(best, flips=best.flips - 1)):
            best = replace(best, flips=best.flips - 1)
        return best

    def describe(self) -> str:
        return f"one bit, {self.flips} of 256 turned over"


class OneBitSum(Generated):
    """The same bits from an ordinary generator."""

    def __init__(self, mechanism: OneBit, *, seed: int, device: torch.device) -> None:
        super().__init__(seed=seed, device=device)
        self._mechanism = mechanism

    def __call__(self, embedding_MBP: Tensor) -> Tensor:
        unit = (embedding_MBP.double() / self._mechanism.bound).clamp(-1, 1)
        probability_16 = 32768 + (unit * self._mechanism.slope_16 + 0.5).floor().long()
        words = torch.randint(65536, embedding_MBP.shape, generator=self.generator, device=embedding_MBP.device)
        total = (words < probability_16).sum(0)
        return torch.from_numpy(self._mechanism.estimate(total.numpy()))


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Plans can name it and ledgers can price it, until the end of the block."""
    register(OneBit)
    register_event(OneBitRelease)
    try:
        yield
    finally:
        MECHANISMS.forget(OneBit.name)
        EVENTS.forget(OneBitRelease.name)
