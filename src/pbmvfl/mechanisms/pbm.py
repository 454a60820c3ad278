"""The Poisson binomial mechanism, in integers.

    p = 1/2 + beta * x / C        success probability of one coordinate x in [-C, C]
    q ~ Binomial(b, p)            what a party adds to the sum
    h~ = C / (beta * b) * (sum of q - b * M / 2)

p and beta are integers in units of 1/65536, and the sampler compares integers, so the account's worst case (p at
1/2 -+ beta exactly) holds for the program and not only for real numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.mechanisms import kernels
from pbmvfl.mechanisms.refusals import not_finite
from pbmvfl.privacy.events import PROBABILITY_ONE, PoissonBinomialRelease
from pbmvfl.randomness.secret import Entropy
from pbmvfl.secagg.ring import Ring

#: Random bytes drawn at a time: they stay in the second-level cache between the cipher and the comparison.
_BLOCK_BYTES = 1 << 19


@dataclass(frozen=True, kw_only=True)
class PoissonBinomial:
    """One party's mechanism and the server's estimator for it."""

    num_trials: int
    beta: float
    bound: float
    num_parties: int
    embedding_dim: int
    _random: list[npt.NDArray[np.uint16]] = field(default_factory=list, init=False, repr=False, compare=False)

    @cached_property
    def event(self) -> PoissonBinomialRelease:
        """What one row's release is. Sampler and estimator take beta from here, rounded as the account rounds it."""
        return PoissonBinomialRelease(
            num_trials=self.num_trials,
            beta=self.beta,
            num_parties=self.num_parties,
            embedding_dim=self.embedding_dim,
        )

    @property
    def variance_upper_bound(self) -> float:
        """Of one coordinate of the estimated sum, whatever the embeddings are: C^2 M / (4 beta^2 b)."""
        return self.bound**2 * self.num_parties / (4 * self._true_beta**2 * self.num_trials)

    @property
    def _true_beta(self) -> float:
        return self.event.beta_16 / PROBABILITY_ONE

    @cached_property
    def _dtype(self) -> type[np.uint8] | type[np.uint16]:
        return Ring.for_sums_up_to(self.num_trials * self.num_parties).dtype

    @cached_property
    def _constants(self) -> tuple[int, np.float32]:
        """beta in units of 1/65536, and what turns an embedding into a shift of that many units."""
        beta_16 = self.event.beta_16
        return beta_16, np.float32(beta_16 / self.bound)

    def randomize(self, embedding: npt.NDArray[np.float32], entropy: Entropy) -> npt.NDArray[Any]:
        """A fresh q for every value of the embedding, in the ring's own type.

        NaN and infinity raise; they never become a probability.
        """
        values = np.ascontiguousarray(embedding, dtype=np.float32).reshape(-1)
        counts = np.empty(values.size, dtype=self._dtype)
        step = max(1, _BLOCK_BYTES // (2 * self.num_trials))
        if values.size <= step:
            self._randomize_block(values, entropy, counts)
        else:
            for start in range(0, values.size, step):
                self._randomize_block(values[start : start + step], entropy, counts[start : start + step])
        return counts.reshape(embedding.shape)

    def _randomize_block(self, values: npt.NDArray[np.float32], entropy: Entropy, counts: npt.NDArray[Any]) -> None:
        random = self._buffer(values.size * self.num_trials)
        entropy.fill(random)
        beta_16, scale = self._constants
        if not kernels.count_successes(values, scale, beta_16, self.num_trials, random, counts):
            raise not_finite()

    def _buffer(self, size: int) -> npt.NDArray[np.uint16]:
        # A fresh 50 kB array every round costs page faults; the buffer is reused and holds only spent randomness.
        if not self._random or self._random[0].size < size:
            self._random[:] = [np.empty(size, dtype=np.uint16)]
        buffer = self._random[0]
        return buffer if buffer.size == size else buffer[:size]

    def estimate(self, quantized_sum: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
        """The unbiased estimate of the sum of the embeddings."""
        scale = self.bound * PROBABILITY_ONE / (self.event.beta_16 * self.num_trials)
        centre = self.num_trials * self.num_parties / 2
        return ((quantized_sum.astype(np.float32) - np.float32(centre)) * np.float32(scale)).astype(np.float32)
