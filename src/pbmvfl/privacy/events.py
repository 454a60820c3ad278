"""What leaves a party, as frozen values whose meaning never changes.

An event says what was released, not how much it costs: the curves live beside it, and neither imports anything
that trains. Account and mechanism start from one event (`table.release_event`): what is drawn is what is charged.
"""

from __future__ import annotations

from dataclasses import dataclass

from pbmvfl.privacy.paper import ldp_variance

#: Success probabilities are integers in units of 1/65536, and so is beta.
PROBABILITY_BITS = 16
PROBABILITY_ONE = 1 << PROBABILITY_BITS


def fixed_point_beta(beta: float) -> int:
    """beta in units of 1/65536, rounded down: rounding up would release more than the account says."""
    return int(beta * PROBABILITY_ONE)


def local_gaussian_variance(*, num_parties: int, num_trials: int, beta: float, bound: float) -> float:
    """Of one party's noise on one coordinate in the paper's local baseline, which is printed for C = 1."""
    return bound**2 * ldp_variance(num_parties=num_parties, num_trials=num_trials, beta=beta)


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
