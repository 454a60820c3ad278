"""The printed formulas of the PBM-VFL paper, each with its number. For comparison and for reproducing its tables.

No epsilon that this package claims comes from here: C0 is never given in the paper, Theorem 6.1 does not hold for the
adjacency it names, and Theorem 6.2 grows like 2^M. See docs/theory.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pbmvfl.errors import PlanError

#: Bits of a floating-point number in the paper's cost columns (F).
FLOAT_BITS = 32


def _check_order(order: float) -> None:
    if not order > 1:
        raise PlanError(f"order={order}; permitted: above 1.")


def feature_privacy_rdp(
    *,
    order: float,
    num_parties: int,
    num_samples: int,
    batch_size: int,
    num_rounds: int,
    embedding_dim: int,
    num_trials: int,
    beta: float,
    c0: float,
) -> float:
    """Theorem 6.1: C0 * T * B * P * b * beta^2 * alpha / (M * N)."""
    _check_order(order)
    uses = num_rounds * batch_size / num_samples
    return c0 * uses * embedding_dim * num_trials * beta**2 * order / num_parties


def sample_privacy_factor(order: float, num_parties: int) -> float:
    """S_M(alpha) of Theorem 6.2, for M >= 2."""
    _check_order(order)
    if num_parties < 2:
        raise PlanError(f"num_parties={num_parties}; permitted: 2 or more in Theorem 6.2.")
    m = num_parties
    linear = (2 ** (m + 1) - 2 ** (m - 1) - 2) * order
    constant = 3 * 2 ** (m - 1) - 3 * m
    pole = (2 ** (m - 1) - 1) / (2 ** (m - 2) * (order - 1))
    return float(linear - constant + pole)


def sample_privacy_rdp(
    *, order: float, num_parties: int, embedding_dim: int, num_trials: int, beta: float, c0: float
) -> float:
    """Theorem 6.2, one release: C0 * P * b * beta^2 * S_M(alpha) / M."""
    return c0 * embedding_dim * num_trials * beta**2 * sample_privacy_factor(order, num_parties) / num_parties


def ldp_variance(*, num_parties: int, num_trials: int, beta: float) -> float:
    """Section 7: the variance 2M / (b * beta^2) of the LDP baseline, which takes C0 = 1."""
    return 2 * num_parties / (num_trials * beta**2)


def estimator_variance(*, num_parties: int, num_trials: int, beta: float, bound: float = 1.0) -> float:
    """Theorem 2.3, part 2: C^2 * M / (4 * beta^2 * b), printed as the variance and really its upper bound."""
    return bound**2 * num_parties / (4 * beta**2 * num_trials)


@dataclass(frozen=True, kw_only=True)
class ConvergenceBound:
    """The three terms of Theorem 6.4, on the mean squared gradient norm over T rounds."""

    initial_gap: float
    """2 * (first loss - last loss) / (eta * T): vanishes with T."""
    sampling: float
    """2 * L * eta * sigma^2 / B: vanishes with eta."""
    mechanism: float
    """(1 + 2 L eta) * C^2 * M * P * (L0^2 + Lh^2 * sum H_m^2) / (4 * beta^2 * b): does not vanish."""

    @property
    def total(self) -> float:
        return self.initial_gap + self.sampling + self.mechanism


def convergence_bound(
    *,
    loss_gap: float,
    learning_rate: float,
    num_rounds: int,
    smoothness: float,
    gradient_variance: float,
    batch_size: int,
    num_parties: int,
    embedding_dim: int,
    num_trials: int,
    beta: float,
    server_lipschitz: float,
    sum_lipschitz: float,
    embedding_gradient_bounds: Sequence[float],
    bound: float = 1.0,
) -> ConvergenceBound:
    """Theorem 6.4. Names: L is smoothness, sigma^2 gradient_variance, L_0 server_lipschitz, L_h sum_lipschitz and H_m
    embedding_gradient_bounds, one for each party."""
    if not 0 < learning_rate < 1 / (2 * smoothness):
        raise PlanError(
            f"learning_rate={learning_rate} with smoothness={smoothness}; permitted: above 0 and below "
            f"{1 / (2 * smoothness):g} = 1/(2L) in Theorem 6.4."
        )
    if len(embedding_gradient_bounds) != num_parties:
        raise PlanError(
            f"{len(embedding_gradient_bounds)} embedding_gradient_bounds with num_parties={num_parties}; permitted: "
            "one for each party."
        )
    slopes = server_lipschitz**2 + sum_lipschitz**2 * math.fsum(h**2 for h in embedding_gradient_bounds)
    noise = embedding_dim * estimator_variance(num_parties=num_parties, num_trials=num_trials, beta=beta, bound=bound)
    return ConvergenceBound(
        initial_gap=2 * loss_gap / (learning_rate * num_rounds),
        sampling=2 * smoothness * learning_rate * gradient_variance / batch_size,
        mechanism=(1 + 2 * smoothness * learning_rate) * noise * slopes,
    )


def communication_bits(
    *,
    num_epochs: int,
    num_samples: int,
    batch_size: int,
    num_parties: int,
    embedding_dim: int,
    num_trials: int | None,
) -> float:
    """Section 5: T * B * M * P * (ln(b*M) + F) with F = 32, and 2F for NPQ (num_trials=None).

    T * B is epochs * ceil(N/B) * B, the logarithm is natural and the unit is the bit: that is what the cost columns of
    Tables 1, 4 and 6 contain, whatever they are called there. Real messages are counted elsewhere, in bytes.
    """
    up = FLOAT_BITS if num_trials is None else math.log(num_trials * num_parties)
    rows = num_epochs * math.ceil(num_samples / batch_size) * batch_size
    return rows * num_parties * embedding_dim * (up + FLOAT_BITS)
