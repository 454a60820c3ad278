"""No privacy and no quantisation (the paper's NPQ): exact embeddings in clear, for studies and for oracles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pbmvfl.mechanisms.refusals import not_finite
from pbmvfl.privacy.events import ExactRelease
from pbmvfl.randomness.secret import Entropy


@dataclass(frozen=True, kw_only=True)
class Exact:
    event: ExactRelease

    @property
    def variance_upper_bound(self) -> float:
        return 0.0

    def randomize(self, embedding: npt.NDArray[np.float32], entropy: Entropy) -> npt.NDArray[np.float32]:
        del entropy  # nothing random about it
        if not np.isfinite(embedding).all():
            raise not_finite()
        return embedding

    def estimate(self, total: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return total
