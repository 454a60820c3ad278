"""Noisy sums of embeddings by an ordinary generator: the law of the mechanisms, without their secrecy.

The success probability is the same 16-bit integer that the party's sampler computes, so the sums have exactly the law
of a deployment's. Only the sum over the parties is drawn for the Gaussian baseline: M independent noises of variance v
add up to one of variance M*v. Needs torch; numba where it is there.

Shape suffixes: M parties, B rows, P embedding_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pbmvfl._compiled import compiled
from pbmvfl.mechanisms.base import NoisySum
from pbmvfl.privacy.poisson_binomial import PROBABILITY_ONE

if TYPE_CHECKING:
    from pbmvfl.mechanisms.poisson_binomial import PoissonBinomial

HALF = PROBABILITY_ONE // 2
#: 256 kB of random words at a time.
_CACHED_WORDS = 1 << 15


class Generated:
    """Noise from torch's generator on the device."""

    def __init__(self, *, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)

    def state(self) -> Tensor:
        return self.generator.get_state()

    def load_state(self, state: Tensor) -> None:
        self.generator.set_state(state)


class GaussianSum(Generated):
    """Gaussian noise of all parties, drawn as one of this deviation."""

    def __init__(self, deviation: float, *, seed: int, device: torch.device) -> None:
        super().__init__(seed=seed, device=device)
        self.deviation = deviation

    def __call__(self, embedding_MBP: Tensor) -> Tensor:
        exact_BP = embedding_MBP.sum(0)
        noise_BP = torch.randn(exact_BP.shape, generator=self.generator, device=exact_BP.device)
        return exact_BP + noise_BP * self.deviation


# --- the Poisson binomial ---


def success_probability(embedding: Tensor, pbm: PoissonBinomial) -> Tensor:
    """Return p in units of 1/65536, in the float32 arithmetic of the sampler that parties use."""
    scale = float(torch.tensor(pbm.beta_16 / pbm.bound, dtype=torch.float32))
    shift = (embedding.to(torch.float32) * scale).nan_to_num(nan=0.0).clamp(-float(pbm.beta_16), float(pbm.beta_16))
    return shift.add(HALF + 0.5).to(torch.int32).clamp(HALF - pbm.beta_16, HALF + pbm.beta_16)


def estimate(quantized_sum: Tensor, pbm: PoissonBinomial) -> Tensor:
    """Return the unbiased estimate of the sum of the embeddings."""
    scale = pbm.bound * PROBABILITY_ONE / (pbm.beta_16 * pbm.num_trials)
    return (quantized_sum.to(torch.float32) - pbm.num_trials * pbm.num_parties / 2) * scale


class BinomialSum(Generated):
    """On any device, by torch alone: on a GPU b comparisons a value, elsewhere torch's own sampler."""

    def __init__(self, pbm: PoissonBinomial, *, seed: int, device: torch.device) -> None:
        super().__init__(seed=seed, device=device)
        self.pbm = pbm

    def __call__(self, embedding_MBP: Tensor) -> Tensor:
        return estimate(self.quantized_sum(embedding_MBP), self.pbm)

    def quantized_sum(self, embedding_MBP: Tensor) -> Tensor:
        probability = success_probability(embedding_MBP, self.pbm)
        if embedding_MBP.device.type == "cuda":
            return compared_sum(probability, self.pbm.num_trials, self.generator)
        trials = torch.full(probability.shape, float(self.pbm.num_trials))
        # p/65536 is exact in float32, so this is the integer sampler's law.
        return torch.binomial(trials, probability / PROBABILITY_ONE, generator=self.generator).sum(0)


def compared_sum(probability_M: Tensor, num_trials: int, generator: torch.Generator | None) -> Tensor:
    """Return how many of num_trials 16-bit integers lie below p, summed over the parties. Runs inside a CUDA graph."""
    total: Tensor | None = None
    step = max(1, min(num_trials, (1 << 24) // max(1, probability_M.numel())))  # 64 MB of random numbers at a time
    for first in range(0, num_trials, step):
        size = (min(step, num_trials - first), *probability_M.shape)
        drawn = torch.randint(
            PROBABILITY_ONE, size, dtype=torch.int32, device=probability_M.device, generator=generator
        )
        counted = (drawn < probability_M).sum((0, 1), dtype=torch.int32)
        total = counted if total is None else total + counted
    assert total is not None
    return total


class CompiledBinomialSum:
    """On the CPU with the parties' own compiled comparison, on random words that are no secret."""

    def __init__(self, pbm: PoissonBinomial, *, seed: int) -> None:
        from pbmvfl.mechanisms.poisson_binomial import count_successes

        self.pbm = pbm
        self._count, self._fill = count_successes, fill_words
        #: The number of the next random word. Configurations start at random places of one stream of 2^64 words.
        self._place = seed
        self._scale = np.float32(pbm.beta_16 / pbm.bound)
        # Values at a time, a multiple of four so that whole words are used up; their words stay in the cache.
        self._step = max(4, (_CACHED_WORDS // pbm.num_trials) * 4)
        self._words = np.empty(self._step * pbm.num_trials // 4, dtype=np.uint64)
        self._counts = np.empty(0, dtype=np.uint16)

    def __call__(self, embedding_MBP: Tensor) -> Tensor:
        return estimate(self.quantized_sum(embedding_MBP), self.pbm)

    def quantized_sum(self, embedding_MBP: Tensor) -> Tensor:
        pbm = self.pbm
        values = embedding_MBP.detach().contiguous().view(-1).numpy()
        if self._counts.size != values.size:
            self._counts = np.empty(values.size, dtype=np.uint16)
        for first in range(0, values.size, self._step):
            part = values[first : first + self._step]
            words = self._words[: -(-part.size * pbm.num_trials // 4)]
            self._fill(words, np.uint64(self._place))
            self._place = (self._place + words.size) % (1 << 64)
            counts = self._counts[first : first + part.size]
            self._count(part, self._scale, pbm.beta_16, pbm.num_trials, words.view(np.uint16), counts)
        total = self._counts.reshape(pbm.num_parties, -1).sum(0, dtype=np.int32)
        return torch.from_numpy(total.reshape(embedding_MBP.shape[1:]))

    def state(self) -> Tensor:
        return torch.from_numpy(np.array([self._place], dtype=np.uint64).view(np.int64))

    def load_state(self, state: Tensor) -> None:
        self._place = int(state.numpy().view(np.uint64)[0])


def binomial_sum(pbm: PoissonBinomial, *, seed: int, device: torch.device) -> NoisySum:
    """Return the fastest draw that this machine has."""
    if device.type == "cpu":
        try:
            import numba  # noqa: F401  (compilation waits for the first call; this checks that it can)
        except ImportError:  # a machine with torch and numpy alone
            return BinomialSum(pbm, seed=seed, device=device)
        return CompiledBinomialSum(pbm, seed=seed)
    return BinomialSum(pbm, seed=seed, device=device)


# --- Random words for simulations, faster than any cipher: SplitMix64, a counter through a mixing function ---
# Every word depends on its number alone, so the loop vectorises, and a place in the stream is one integer. It is no
# secret from a reader who knows the seed: for studies only, never for a party.


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@compiled
def fill_words(words: Any, place: Any) -> None:
    """Set words[i] to word number place + i of the stream (Steele, Lea and Flood 2014, the constants of version 13)."""
    for i in range(words.size):
        word = (place + np.uint64(i) + np.uint64(1)) * _GOLDEN
        word = (word ^ (word >> np.uint64(30))) * _MIX_1
        word = (word ^ (word >> np.uint64(27))) * _MIX_2
        words[i] = word ^ (word >> np.uint64(31))
