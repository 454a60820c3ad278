"""The paper's local baseline (LDP): each party adds Gaussian noise and sends its embedding in clear."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pbmvfl.mechanisms.refusals import not_finite
from pbmvfl.privacy.events import LocalGaussianRelease
from pbmvfl.randomness.secret import Entropy, standard_normal


@dataclass(frozen=True, kw_only=True)
class LocalGaussian:
    """Noise of the event's variance on every coordinate; the account charges that very number. For studies only."""

    event: LocalGaussianRelease

    @property
    def variance_upper_bound(self) -> float:
        """Of one coordinate of the sum: every party's noise adds up."""
        return self.event.num_parties * self.event.variance

    def randomize(self, embedding: npt.NDArray[np.float32], entropy: Entropy) -> npt.NDArray[np.float32]:
        if not np.isfinite(embedding).all():
            raise not_finite()
        noise = standard_normal(entropy, embedding.size).reshape(embedding.shape)
        clipped = np.clip(embedding, -self.event.bound, self.event.bound)
        noisy: npt.NDArray[np.float32] = (clipped + math.sqrt(self.event.variance) * noise).astype(np.float32)
        return noisy

    def estimate(self, total: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return total
