"""What leaves a party, as frozen values whose meaning never changes.

An event says what was released, not how much it costs: the curves live beside it, and neither imports anything
that trains. Every mechanism names its event next to its sampling code.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Success probabilities are integers in units of 1/65536, and so is beta.
PROBABILITY_BITS = 16
PROBABILITY_ONE = 1 << PROBABILITY_BITS


def fixed_point_beta(beta: float) -> int:
    """beta in units of 1/65536, rounded down: rounding up would release more than the account says."""
    return int(beta * PROBABILITY_ONE)


@dataclass(frozen=True, kw_only=True)
class PoissonBinomialRelease:
    """The sum over the parties of Binomial(num_trials, p), p in 1/2 -+ beta, per coordinate of a row's embedding."""

    num_trials: int
    beta: float
    num_parties: int
    embedding_dim: int

    @property
    def beta_16(self) -> int:
        return fixed_point_beta(self.beta)


@dataclass(frozen=True, kw_only=True)
class LocalGaussianRelease:
    """One row's embedding from each party, readable one by one, with Gaussian noise of this variance per coordinate."""

    variance: float
    bound: float
    num_parties: int
    embedding_dim: int


@dataclass(frozen=True, kw_only=True)
class ExactRelease:
    """One row's embedding from each party, exactly: no privacy at all."""

    num_parties: int
    embedding_dim: int


@dataclass(frozen=True, kw_only=True)
class NoisyUpdate:
    """One weight update of one party: per-row gradients clipped to clip_norm, summed, plus Gaussian noise of
    standard deviation noise_multiplier * clip_norm."""

    clip_norm: float
    noise_multiplier: float


ReleaseEvent = PoissonBinomialRelease | LocalGaussianRelease | ExactRelease
Event = ReleaseEvent | NoisyUpdate
