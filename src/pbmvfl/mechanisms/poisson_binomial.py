"""The Poisson binomial mechanism, in integers.

    p = 1/2 + beta * x / C        success probability of one coordinate x in [-C, C]
    q ~ Binomial(b, p)            what a party adds to the sum
    h~ = C / (beta * b) * (sum of q - b * M / 2)

p and beta are integers in units of 1/65536, and the sampler compares integers, so the account's worst case (p at
1/2 -+ beta exactly) holds for the program and not only for real numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from pbmvfl.crypto.ring import Ring
from pbmvfl.crypto.secure_sum import PackedIntegers
from pbmvfl.mechanisms import binomial_trials
from pbmvfl.mechanisms.base import NoisySum, Scratch, register
from pbmvfl.mechanisms.binomial_trials import Trials
from pbmvfl.privacy.events import PoissonBinomialRelease
from pbmvfl.privacy.poisson_binomial import PROBABILITY_ONE

if TYPE_CHECKING:
    import torch

    from pbmvfl.crypto.entropy import Entropy

#: Random bytes drawn at a time: they stay in the second-level cache between the cipher and the comparison.
_BLOCK_BYTES = 1 << 19


@register
@dataclass(frozen=True, kw_only=True)
class PoissonBinomial(Trials):
    """Mechanism of one party and the server's estimator for it."""

    name: ClassVar[str] = "pbm"
    words: ClassVar[str] = "Poisson binomial, only sums are readable"
    reading: ClassVar[str] = "noisy sums"
    sums_are_hidden: ClassVar[bool] = True

    @cached_property
    def event(self) -> PoissonBinomialRelease:
        """Event of one row's release. Sampler and estimator take beta from here, rounded as the account rounds it."""
        return PoissonBinomialRelease(
            num_trials=self.num_trials,
            beta=self.beta,
            num_parties=self.num_parties,
            embedding_dim=self.embedding_dim,
            secure_sum=self.secure_aggregation,
        )

    @cached_property
    def ring(self) -> Ring:
        return Ring.for_sums_up_to(self.largest_sum)

    @property
    def largest_sum(self) -> int:
        return self.num_trials * self.num_parties

    @cached_property
    def payload(self) -> PackedIntegers:
        # Without masks a party's value is at most b, and needs only the bits of b.
        bits = self.ring.bits if self.secure_aggregation else self.num_trials.bit_length()
        return PackedIntegers(bits=bits, ring=self.ring)

    @property
    def variance_upper_bound(self) -> float:
        """Variance C^2 M / (4 beta^2 b), which no embedding exceeds."""
        beta = self.event.beta_16 / PROBABILITY_ONE
        return self.bound**2 * self.num_parties / (4 * beta**2 * self.num_trials)

    @cached_property
    def _constants(self) -> tuple[int, np.float32]:
        """Return beta in units of 1/65536, and the factor that turns an embedding into a shift of that many units."""
        beta_16 = self.event.beta_16
        return beta_16, np.float32(beta_16 / self.bound)

    def randomize(
        self, embedding: npt.NDArray[np.float32], entropy: Entropy, scratch: Scratch | None = None
    ) -> npt.NDArray[Any]:
        """Return a fresh q for every value of the embedding, in the ring's own type.

        NaN counts as 0, infinity as an end.
        """
        scratch = scratch or Scratch()
        values = np.ascontiguousarray(embedding, dtype=np.float32).reshape(-1)
        counts = np.empty(values.size, dtype=self.ring.dtype)
        step = max(1, _BLOCK_BYTES // (2 * self.num_trials))
        if values.size <= step:  # nearly always; slices of so few values would cost a tenth of the draw
            self._draw(values, entropy, scratch, counts)
        else:
            for start in range(0, values.size, step):
                self._draw(values[start : start + step], entropy, scratch, counts[start : start + step])
        return counts.reshape(embedding.shape)  # Algorithm 1, line 4

    def _draw(
        self, values: npt.NDArray[np.float32], entropy: Entropy, scratch: Scratch, counts: npt.NDArray[Any]
    ) -> None:
        random = scratch.words(values.size * self.num_trials)
        entropy.fill(random)
        beta_16, scale = self._constants
        binomial_trials.count_successes(values, scale, beta_16, self.num_trials, random, counts)

    def estimate(self, total: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
        """Return the unbiased estimate of the sum of the embeddings."""
        # Algorithm 2, line 10, with the bound C that the printed line leaves out.
        scale = self.bound * PROBABILITY_ONE / (self.event.beta_16 * self.num_trials)
        centre = self.num_trials * self.num_parties / 2
        return ((total.astype(np.float32) - np.float32(centre)) * np.float32(scale)).astype(np.float32)

    def simulated_sum(self, *, seed: int, device: torch.device) -> NoisySum:
        from pbmvfl.mechanisms.simulated import binomial_sum

        return binomial_sum(self, seed=seed, device=device)

    @classmethod
    def candidates(cls, base: Self, fixed: frozenset[str], fits: Callable[[Self], bool]) -> Iterator[Self]:
        yield from base.scan(fixed, fits)

    def describe(self) -> str:
        return f"PBM b={self.num_trials}, beta={self.beta:g}" + ("" if self.secure_aggregation else ", sums not hidden")

    @property
    def notes(self) -> tuple[str, ...]:
        if self.secure_aggregation:
            return ()
        return ("without secure aggregation the server reads every party's values, not only their sum",)
