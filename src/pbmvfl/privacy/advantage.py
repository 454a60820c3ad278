"""Advantage of the best attack, which an epsilon alone does not tell.

An epsilon of 8 is nearly everything for a pure mechanism, and much less for a Gaussian one.

An attack looks at everything that is released and says which of two neighbouring data sets it came from. Its advantage
is the share of true alarms minus the share of false ones; what the best one reaches is the total variation of the
dominating pair, delta at epsilon 0. Its detection rate is the share of true alarms when one in 1,000 is false. Both are
bounded from above; proofs in docs/explanation/theory.md, 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from pbmvfl.privacy.loss_distribution import LossDistribution
from pbmvfl.privacy.orders import ORDERS, Curve

#: Share of false alarms at which detection rates are stated.
FALSE_ALARM_RATE = 1e-3
#: Sums here are good to 1e-12 of themselves, and differences of numbers of about 1 to this.
_ROUNDING, _SMALLEST = 1e-9, 1e-14
#: From here on a detection rate is not looked for: it is as close to 1.
_NEARLY_CERTAIN = 1 - 1e-6
#: Epsilons that are tried where a bound holds at each of them.
_EPSILONS = np.geomspace(1e-4, 50.0, 120)
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, kw_only=True)
class Attack:
    """At most this is what an attack on two neighbouring data sets achieves."""

    advantage: float
    """True alarms minus false ones. Of two equally likely data sets it names the right one with probability
    1/2 + advantage/2."""
    detection: float
    """The share of true alarms if the share of false ones is FALSE_ALARM_RATE."""


NO_PROTECTION = Attack(advantage=1.0, detection=1.0)
NO_ATTACK = Attack(advantage=0.0, detection=FALSE_ALARM_RATE)


def least(attacks: Iterable[Attack]) -> Attack:
    """Return the least of several upper bounds on the same attack."""
    attacks = tuple(attacks)
    return Attack(advantage=min(a.advantage for a in attacks), detection=min(a.detection for a in attacks))


def largest(attacks: Iterable[Attack]) -> Attack:
    """Return the largest of upper bounds on attacks of which one may be chosen."""
    attacks = (NO_ATTACK, *attacks)
    return Attack(advantage=max(a.advantage for a in attacks), detection=max(a.detection for a in attacks))


def randomised_response(loss: float) -> LossDistribution:
    """Return the best attack on one bit that tells the truth with probability e^loss / (1 + e^loss).

    It dominates everything whose privacy loss is never above this in absolute value.
    """
    if not math.isfinite(loss):
        return LossDistribution(np.zeros(1), np.zeros(1), 1.0)  # nothing is known: delta 1
    lie = math.exp(-loss) / (1 + math.exp(-loss))
    return LossDistribution(np.array([-loss, loss]), np.array([lie, 1 - lie]))


def attack_on(losses: LossDistribution, gaussian_shift: float) -> Attack:
    """Return the best attack on a dominating pair, beside a Gaussian that is moved by gaussian_shift deviations."""

    def delta_at(epsilon: float) -> float:
        return losses.delta_with_gaussian(epsilon, gaussian_shift)

    advantage = delta_at(0.0)
    if not advantage > 0:
        return NO_ATTACK
    if advantage > _NEARLY_CERTAIN:
        # some attack has fewer than 1 false alarm in 1,000 and nearly every true one, if the bound is good
        return Attack(advantage=_raised(advantage), detection=1.0)
    # With a Gaussian each delta is a long sum. Any epsilon gives a bound, so a coarser law may choose it.
    coarse = losses.sketch if gaussian_shift else losses
    best = _best_epsilon(lambda epsilon: coarse.delta_with_gaussian(epsilon, gaussian_shift))
    detection = min(delta_at(best) + math.exp(best) * FALSE_ALARM_RATE, advantage + FALSE_ALARM_RATE)
    return Attack(advantage=_raised(advantage), detection=_raised(detection))


def attack_from_rdp(curve: Curve) -> Attack:
    """Return the best attack from a Renyi curve that holds in both directions.

    What is no divergence counts as infinity.
    """
    alpha, rdp = np.asarray(ORDERS, dtype=np.float64), np.asarray(curve, dtype=np.float64)
    known = np.isfinite(rdp) & (rdp >= 0)
    if not known.any():
        return NO_PROTECTION
    alpha, rdp = alpha[known], rdp[known]
    smallest = float(rdp.min())
    if smallest == 0:
        return NO_ATTACK
    # Every order's divergence is at least the Kullback-Leibler divergence: Pinsker, and Bretagnolle and Huber.
    advantages = [math.sqrt(smallest / 2), math.sqrt(-math.expm1(-smallest))]
    # delta at each epsilon (docs/explanation/theory.md, 2.7), and the advantage that the two of them permit
    log_deltas = (alpha - 1) * (rdp + np.log1p(-1 / alpha) - _EPSILONS[:, None]) - np.log(alpha)
    deltas = np.exp(np.minimum(log_deltas.min(axis=1), 0.0))
    advantages.append(float(np.min(np.tanh(_EPSILONS / 2) + 2 * deltas / (np.exp(_EPSILONS) + 1))))
    advantage = min(advantages)
    # detection^a * false_alarms^(1-a) <= exp((a-1) D)
    log_detections = (alpha - 1) / alpha * (rdp + math.log(FALSE_ALARM_RATE))
    detection = min(math.exp(min(0.0, float(log_detections.min()))), advantage + FALSE_ALARM_RATE)
    return Attack(advantage=_raised(advantage), detection=_raised(detection))


def _best_epsilon(delta_at: Callable[[float], float]) -> float:
    """Find where delta + e^epsilon * FALSE_ALARM_RATE is smallest, by golden section: it is convex in e^epsilon."""

    def value(epsilon: float) -> float:
        return delta_at(epsilon) + math.exp(epsilon) * FALSE_ALARM_RATE

    low, high = 0.0, -math.log(FALSE_ALARM_RATE)  # beyond, the bound is above 1
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = value(left), value(right)
    while high - low > 1e-7:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = value(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = value(right)
    return (low + high) / 2


def _raised(probability: float) -> float:
    return min(1.0, probability * (1 + _ROUNDING) + _SMALLEST)
