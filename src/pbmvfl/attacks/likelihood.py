"""Likelihoods of sums of the Poisson binomial mechanism, its draws party by party, and made-up bytes to draw from.

Shape suffixes: J parties of a sum, P coordinates.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pbmvfl.mechanisms.poisson_binomial import PoissonBinomial
from pbmvfl.mechanisms.simulated import success_probability
from pbmvfl.privacy.poisson_binomial import PROBABILITY_ONE

Array = npt.NDArray[Any]
#: Up to so many bits the law of a sum is computed exactly; beyond, its normal approximation is.
_EXACT_BITS = 96
#: Values whose law is computed at a time, to bound memory.
_AT_A_TIME = 1 << 15


def probabilities(pbm: PoissonBinomial, embedding: Array) -> npt.NDArray[np.float64]:
    """Return the success probability of each value, as the parties' sampler rounds it."""
    return success_probability(torch.from_numpy(np.asarray(embedding)), pbm).numpy() / PROBABILITY_ONE


def draw_counts(pbm: PoissonBinomial, embedding: Array, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw each value's count of successes from an ordinary generator: noise of one's own, no release."""
    return random.binomial(pbm.num_trials, probabilities(pbm, embedding))


def counts_of(pbm: PoissonBinomial, estimate: Array) -> npt.NDArray[np.int64]:
    """Return the sums of counts of which these are the estimates."""
    scale = pbm.bound * PROBABILITY_ONE / (pbm.beta_16 * pbm.num_trials)
    return np.rint(estimate / scale + pbm.num_trials * pbm.num_parties / 2).astype(np.int64)


def log_likelihood(counts: Array, probability_J: Array, trials: int) -> npt.NDArray[np.float64]:
    """Return the log probability of sums of counts.

    Args:
        counts: Sums over the parties, of any shape.
        probability_J: Success probabilities, of that shape and one more axis for the parties of the sum.
        trials: Bits of each party.
    """
    bits = trials * probability_J.shape[-1]
    if bits > _EXACT_BITS:
        mean = trials * probability_J.sum(-1)
        variance = trials * (probability_J * (1 - probability_J)).sum(-1)
        found = -0.5 * ((counts - mean) ** 2 / variance + np.log(2 * math.pi * variance))
        return np.asarray(found, dtype=np.float64)
    flat, p_J = np.asarray(counts).reshape(-1), probability_J.reshape(-1, probability_J.shape[-1])
    result = np.empty(flat.size)
    for start in range(0, flat.size, _AT_A_TIME):
        some = slice(start, start + _AT_A_TIME)
        result[some] = np.take_along_axis(log_law(p_J[some], trials), flat[some, None], axis=1)[:, 0]
    return result.reshape(np.shape(counts))


def log_law(probability_J: Array, trials: int) -> npt.NDArray[np.float64]:
    """Return the log probability of every sum of counts, 0 to all bits, along a last axis in place of the parties."""
    bits = trials * probability_J.shape[-1]
    turns = np.exp(-2j * math.pi * np.arange(bits + 1) / (bits + 1))
    spectrum = np.ones((*probability_J.shape[:-1], bits + 1), dtype=np.complex128)
    for j in range(probability_J.shape[-1]):
        spectrum *= (1 - probability_J[..., j, None] * (1 - turns)) ** trials
    # Rounding of the transform: what is below it is not known, and counts as equally unlikely.
    return np.log(np.maximum(np.fft.ifft(spectrum).real, 1e-15))


class MadeUpEntropy:
    """Bytes of numpy's generator, reproducible and no secret, with the interface of the parties' source.

    The parties' own samplers can be run on them. What they draw is made up, and no ledger has to count it.

    Args:
        seed: Anything that `numpy.random.default_rng` takes.
    """

    seeded = True

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def fill(self, buffer: npt.NDArray[Any]) -> None:
        """Overwrite the whole (contiguous) buffer."""
        buffer.reshape(-1).view(np.uint8)[:] = np.frombuffer(self._random.bytes(buffer.nbytes), dtype=np.uint8)
