"""No privacy and no quantisation (the paper's NPQ): exact embeddings in clear, for studies and for oracles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pbmvfl.errors import NonFiniteError
from pbmvfl.mechanisms.entropy import Entropy
from pbmvfl.privacy.events import ExactRelease


@dataclass(frozen=True, kw_only=True)
class Exact:
    num_parties: int
    embedding_dim: int

    @property
    def event(self) -> ExactRelease:
        return ExactRelease(num_parties=self.num_parties, embedding_dim=self.embedding_dim)

    @property
    def variance_upper_bound(self) -> float:
        return 0.0

    def randomize(self, embedding: npt.NDArray[np.float32], entropy: Entropy) -> npt.NDArray[np.float32]:
        del entropy  # nothing random about it
        if not np.isfinite(embedding).all():
            raise NonFiniteError("the embedding holds NaN or infinity, so nothing was released")
        return embedding

    def estimate(self, total: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return total
