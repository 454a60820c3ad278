"""The paper's local baseline (LDP): each party adds Gaussian noise and sends its embedding in clear."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import numpy.typing as npt

from pbmvfl.crypto.payloads import Floats
from pbmvfl.mechanisms.base import NoisySum, Scratch, register
from pbmvfl.mechanisms.binomial_trials import Trials
from pbmvfl.privacy.events import LocalGaussianRelease, local_gaussian_variance

if TYPE_CHECKING:
    import torch

    from pbmvfl.crypto.entropy import Entropy


@register
@dataclass(frozen=True, kw_only=True)
class LocalGaussian(Trials):
    """Noise of the event's variance on every coordinate; the account charges that very number. For studies only.

    The paper states the variance by PBM's two numbers, 2M/(b beta^2), so it has the same settings.
    """

    name: ClassVar[str] = "ldp"
    words: ClassVar[str] = "Gaussian, each embedding is readable, for studies"
    sums_are_hidden: ClassVar[bool] = False

    @property
    def event(self) -> LocalGaussianRelease:
        variance = local_gaussian_variance(
            num_parties=self.num_parties, num_trials=self.num_trials, beta=self.beta, bound=self.bound
        )
        return LocalGaussianRelease(
            variance=variance, bound=self.bound, num_parties=self.num_parties, embedding_dim=self.embedding_dim
        )

    @property
    def ring(self) -> None:
        return None

    @property
    def payload(self) -> Floats:
        return Floats()

    @property
    def variance_upper_bound(self) -> float:
        """Every party's noise adds up."""
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

    def estimate(self, total: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return total

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
