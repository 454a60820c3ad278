"""Conversion of a curve or a loss distribution to (epsilon, delta).

What cannot be computed becomes infinity, never 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pbmvfl.errors import PlanError
from pbmvfl.privacy.adaptive import (
    LARGEST_ADAPTIVE_SPREAD,
    LARGEST_ADAPTIVE_SUM,
    adaptive_losses,
    total_spread,
)
from pbmvfl.privacy.advantage import Attack, attack_on, least, randomised_response
from pbmvfl.privacy.large_sums import largest_loss
from pbmvfl.privacy.loss_distribution import (
    LARGEST_BINOMIAL,
    NOTHING_RELEASED,
    LossDistribution,
    binomial_losses,
    cell_losses,
    compose,
    compose_parts,
    smallest_epsilon,
)
from pbmvfl.privacy.orders import ORDERS, Curve

#: The privacy-loss path is not used when its own error terms would eat more than this share of delta.
_LARGEST_SLACK_SHARE = 0.1

#: Up to so many releases the hull over k, on its finer grid, is now and then below the account step by step.
_FEW_RELEASES = 4


#: Largest default delta.
LARGEST_USUAL_DELTA = 1e-5


def usual_delta(num_samples: int) -> float:
    """Return the default delta: a tenth of 1/N, so that publishing one row of N is far from permitted."""
    return min(LARGEST_USUAL_DELTA, 0.1 / max(1, num_samples))


def check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise PlanError(f"delta={delta}; permitted: above 0 and below 1 (1e-5 is usual; stay below 1/num_samples).")


def epsilon_from_rdp(curve: Curve, delta: float, orders: tuple[float, ...] = ORDERS) -> tuple[float, float | None]:
    """Return epsilon, and the order that gave it, by the rule of dp-accounting's RDP accountant.

    Canonne, Kamath, Steinke, arXiv 2004.00010v4, Proposition 12, and epsilon = 0 where delta >= sqrt(1 - exp(-D)).
    Written out because importing dp-accounting takes longer than everything here, and because its converter answers 0
    for a curve with one NaN.

    Args:
        curve: Divergence at each order. Anything that is no divergence (NaN, infinite, negative) counts as infinity.
        delta: Above 0 and below 1.
        orders: Renyi orders, above 1.

    Returns:
        (epsilon, order), or (infinity, None).

    Raises:
        PlanError: delta or an order is out of range, or the curve has another length than the orders.
    """
    check_delta(delta)
    if len(curve) != len(orders):
        raise PlanError(f"{len(curve)} values of a curve for {len(orders)} orders; permitted: one for each.")
    alpha = np.asarray(orders, dtype=np.float64)
    if not np.all(alpha > 1):
        raise PlanError(f"order={alpha.min()}; permitted: above 1.")
    rdp = np.asarray(curve, dtype=np.float64)
    rdp = np.where(np.isfinite(rdp) & (rdp >= 0), rdp, np.inf)
    epsilons = np.maximum(rdp + np.log1p(-1 / alpha) - np.log(delta * alpha) / (alpha - 1), 0.0)
    # dp-accounting does the same: the formula is not stable at 1.01 and below.
    epsilons = np.where(alpha > 1.01, epsilons, np.inf)
    epsilons = np.where(delta * delta + np.expm1(-rdp) > 0, 0.0, epsilons)
    best = int(np.argmin(epsilons))
    epsilon = float(epsilons[best])
    return (epsilon, orders[best]) if math.isfinite(epsilon) else (math.inf, None)


def epsilon_from_losses(losses: LossDistribution, gaussian_shift: float, delta: float, largest: float) -> float:
    """Return the smallest epsilon up to `largest` of the losses composed with a Gaussian; infinity if there is none."""
    check_delta(delta)
    if not math.isfinite(largest) or not math.isfinite(gaussian_shift) or losses.slack > _LARGEST_SLACK_SHARE * delta:
        return math.inf
    # With a Gaussian each delta is a long sum. A coarser law says where to look.
    likely = math.inf
    if gaussian_shift and losses.sketch is not losses:
        likely = _smallest_epsilon(losses.sketch, gaussian_shift, delta, largest)
    return _smallest_epsilon(losses, gaussian_shift, delta, largest, likely)


def _smallest_epsilon(
    losses: LossDistribution, gaussian_shift: float, delta: float, largest: float, likely: float = math.inf
) -> float:
    return smallest_epsilon(lambda epsilon: losses.delta_with_gaussian(epsilon, gaussian_shift), delta, largest, likely)


@dataclass(frozen=True, kw_only=True)
class ComposedLosses:
    """Losses of all releases, composed, beside a Gaussian that is moved by gaussian_shift deviations."""

    losses: tuple[LossDistribution, ...]
    """Each of them dominates all, so the smallest number counts; none where there are too many to be composed."""
    largest_loss: float
    """What they add up to at most; infinity where that is not known."""
    gaussian_shift: float = 0.0

    def epsilon(self, delta: float, largest: float) -> float:
        """Return the smallest epsilon up to `largest`; infinity if there is none."""
        if not math.isfinite(largest):
            return math.inf
        # This holds whatever the sums hide: all bits are seen, and each has the largest loss a bit can have.
        pure = self.largest_loss
        if self.gaussian_shift and math.isfinite(pure):
            certain = LossDistribution(np.array([pure]), np.ones(1))
            pure = epsilon_from_losses(certain, self.gaussian_shift, delta, largest)
        return min([pure, *(epsilon_from_losses(each, self.gaussian_shift, delta, largest) for each in self.losses)])

    def attack(self) -> Attack:
        """Return an upper bound on what the best attack achieves."""
        # Any release whose loss is never larger is a function of one randomised response with this loss.
        pure = randomised_response(self.largest_loss)
        return least(attack_on(each, self.gaussian_shift) for each in (pure, *self.losses))


def composed_cell(
    *, num_trials: int, beta_16: int, noisy_parties: int, coordinates: int, gaussian_shift: float, delta: float
) -> ComposedLosses:
    """Compose `coordinates` releases at the cell's rate, well enough for this delta."""
    if noisy_parties == 1 or coordinates == 0:
        return composed_bits(
            num_bits=num_trials * coordinates, beta_16=beta_16, gaussian_shift=gaussian_shift, delta=delta
        )
    spread = total_spread(num_trials, beta_16, noisy_parties, coordinates)
    few_bits = num_trials * noisy_parties <= LARGEST_ADAPTIVE_SUM
    step_by_step = coordinates > 1 and few_bits and spread < LARGEST_ADAPTIVE_SPREAD
    losses = []
    if step_by_step:
        losses.append(compose_parts(adaptive_losses(num_trials, beta_16, noisy_parties, coordinates), delta))
    if not step_by_step or coordinates <= _FEW_RELEASES:
        losses.append(compose(cell_losses(num_trials, beta_16, noisy_parties), coordinates, delta))
    pure = largest_loss(num_trials * coordinates, beta_16)
    return ComposedLosses(losses=tuple(losses), largest_loss=pure, gaussian_shift=gaussian_shift)


def composed_bits(*, num_bits: int, beta_16: int, gaussian_shift: float, delta: float) -> ComposedLosses:
    """Compose num_bits bits that all move from lo to hi, whatever the sums they come in."""
    if num_bits == 0:
        return ComposedLosses(losses=(NOTHING_RELEASED,), largest_loss=0.0, gaussian_shift=gaussian_shift)
    losses = (binomial_losses(num_bits, beta_16, delta),) if num_bits <= LARGEST_BINOMIAL else ()
    pure = largest_loss(num_bits, beta_16)
    return ComposedLosses(losses=losses, largest_loss=pure, gaussian_shift=gaussian_shift)
