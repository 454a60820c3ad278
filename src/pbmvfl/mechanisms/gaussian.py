"""The paper's local baseline (LDP): each party adds Gaussian noise and sends its embedding in clear."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pbmvfl.errors import NonFiniteError
from pbmvfl.mechanisms.entropy import Entropy, standard_normal
from pbmvfl.privacy.events import LocalGaussianRelease
from pbmvfl.privacy.paper import ldp_variance


@dataclass(frozen=True, kw_only=True)
class LocalGaussian:
    """Noise of variance 2 M / (b beta^2) C^2 on every coordinate, as printed. For studies only."""

    num_trials: int
    beta: float
    bound: float
    num_parties: int
    embedding_dim: int

    @property
    def noise_variance(self) -> float:
        """Of one party's noise on one coordinate."""
        # Spelled as in privacy.table.release_event: the account must charge this very number, to the last bit.
        return self.bound**2 * ldp_variance(num_parties=self.num_parties, num_trials=self.num_trials, beta=self.beta)

    @property
    def event(self) -> LocalGaussianRelease:
        return LocalGaussianRelease(
            variance=self.noise_variance,
            bound=self.bound,
            num_parties=self.num_parties,
            embedding_dim=self.embedding_dim,
        )

    @property
    def variance_upper_bound(self) -> float:
        """Of one coordinate of the sum: every party's noise adds up."""
        return self.num_parties * self.noise_variance

    def randomize(self, embedding: npt.NDArray[np.float32], entropy: Entropy) -> npt.NDArray[np.float32]:
        if not np.isfinite(embedding).all():
            raise NonFiniteError("the embedding holds NaN or infinity, so nothing was released")
        noise = standard_normal(entropy, embedding.size).reshape(embedding.shape)
        clipped = np.clip(embedding, -self.bound, self.bound)
        noisy: npt.NDArray[np.float32] = (clipped + math.sqrt(self.noise_variance) * noise).astype(np.float32)
        return noisy

    def estimate(self, total: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return total
