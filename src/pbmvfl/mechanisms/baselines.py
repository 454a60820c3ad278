"""Baselines of the paper: local Gaussian noise (LDP), and exact embeddings (NPQ)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import numpy.typing as npt

from pbmvfl.crypto.ring import Floats
from pbmvfl.mechanisms.base import Mechanism, NoisySum, Scratch, register
from pbmvfl.mechanisms.poisson_binomial import Trials
from pbmvfl.privacy.events import ExactRelease, LocalGaussianRelease, local_gaussian_variance

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pbmvfl.crypto.entropy import Entropy


class _InClear(Mechanism):
    """Mechanism whose numbers go to the server as floats, one party's by one."""

    sums_are_hidden: ClassVar[bool] = False

    @property
    def ring(self) -> None:
        return None

    @property
    def payload(self) -> Floats:
        return Floats()

    def estimate(self, total: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return total


# --- The paper's local baseline (LDP): each party adds Gaussian noise and sends its embedding in clear ---


@register
@dataclass(frozen=True, kw_only=True)
class LocalGaussian(_InClear, Trials):
    """Noise of the event's variance on every coordinate; the account charges that very number. For studies only.

    The paper states the variance by PBM's two numbers, 2M/(b beta^2), so it has the same settings.
    """

    name: ClassVar[str] = "ldp"
    words: ClassVar[str] = "Gaussian, each embedding is readable, for studies"
    reading: ClassVar[str] = "noisy embeddings"

    @property
    def event(self) -> LocalGaussianRelease:
        variance = local_gaussian_variance(
            num_parties=self.num_parties, num_trials=self.num_trials, beta=self.beta, bound=self.bound
        )
        return LocalGaussianRelease(
            variance=variance, bound=self.bound, num_parties=self.num_parties, embedding_dim=self.embedding_dim
        )

    @property
    def variance_upper_bound(self) -> float:
        """Variance of the sum of every party's noise."""
        return self.num_parties * self.event.variance

    def randomize(
        self, embedding: npt.NDArray[np.float32], entropy: Entropy, scratch: Scratch | None = None
    ) -> npt.NDArray[np.float32]:
        from pbmvfl.crypto.entropy import standard_normal

        del scratch
        noise = standard_normal(entropy, embedding.size).reshape(embedding.shape)
        clipped = np.clip(np.nan_to_num(embedding, nan=0.0), -self.bound, self.bound)
        noisy: npt.NDArray[np.float32] = (clipped + math.sqrt(self.event.variance) * noise).astype(np.float32)
        return noisy

    def simulated_sum(self, *, seed: int, device: torch.device) -> NoisySum:
        from pbmvfl.mechanisms.simulated import GaussianSum

        return GaussianSum(math.sqrt(self.variance_upper_bound), seed=seed, device=device)

    @classmethod
    def candidates(cls, base: Self, fixed: frozenset[str], fits: Callable[[Self], bool]) -> Iterator[Self]:
        yield from base.scan(fixed, fits)

    def describe(self) -> str:
        return f"local Gaussian, b={self.num_trials}, beta={self.beta:g}"

    @property
    def notes(self) -> tuple[str, ...]:
        return ("mechanism ldp is the paper's baseline, for studies; embeddings go up one by one",)


# ---
# No privacy and no quantisation (the paper's NPQ): exact embeddings in clear, for studies and for oracles.


@register
@dataclass(frozen=True, kw_only=True)
class Exact(_InClear):
    """Embeddings without noise."""

    name: ClassVar[str] = "none"
    words: ClassVar[str] = "no noise, for studies"
    reading: ClassVar[str] = "embeddings in clear"

    @property
    def event(self) -> ExactRelease:
        return ExactRelease(num_parties=self.num_parties, embedding_dim=self.embedding_dim)

    @property
    def variance_upper_bound(self) -> float:
        return 0.0

    def randomize(
        self, embedding: npt.NDArray[np.float32], entropy: Entropy, scratch: Scratch | None = None
    ) -> npt.NDArray[np.float32]:
        del entropy, scratch  # nothing random about it
        return np.nan_to_num(embedding, nan=0.0, posinf=self.bound, neginf=-self.bound)

    def simulated_sum(self, *, seed: int, device: torch.device) -> NoisySum:
        del seed, device
        return ExactSum()

    @classmethod
    def candidates(cls, base: Self, fixed: frozenset[str], fits: Callable[[Self], bool]) -> Iterator[Self]:
        del fixed
        if fits(base):
            yield base

    @classmethod
    def quietest(cls, base: Self, fixed: frozenset[str]) -> Self:
        del fixed
        return base

    def describe(self) -> str:
        return "no privacy"

    @property
    def notes(self) -> tuple[str, ...]:
        return ("mechanism none protects nothing: every embedding goes to the server in clear",)

    @property
    def is_private(self) -> bool:
        return False


class ExactSum:
    """Sum without noise."""

    def __call__(self, embedding_MBP: Tensor) -> Tensor:
        return embedding_MBP.sum(0)

    def state(self) -> Tensor:
        import torch

        return torch.empty(0, dtype=torch.uint8)

    def load_state(self, state: Tensor) -> None:
        del state
