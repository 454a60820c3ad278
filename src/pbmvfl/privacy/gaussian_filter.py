"""Accounting in standard deviations: it adds up however the next release is chosen, and is exact for Gaussian noise.

A release is mu-GDP if telling two neighbours apart by it is no easier than telling N(0, 1) from N(mu, 1). Squares of mu
add up although each release, and its mu, may be chosen after looking at all before (Smith and Thakurta, arXiv
2210.17520), and one Gaussian's epsilon at a delta is known exactly. For other curves of errors such a sum is not valid.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from pbmvfl.privacy.composition import AtomLosses, BitLosses, GaussianLosses, HullLosses, Losses, NoLosses, Parts
from pbmvfl.privacy.conversion import check_delta
from pbmvfl.privacy.large_sums import largest_loss
from pbmvfl.privacy.loss_distribution import gaussian_delta

#: Margin for what rounding may take away: shifts of releases are raised by this share, and deltas lowered by it.
_ROUNDING = 1e-9
#: Steps of a bisection down to neighbouring numbers.
_STEPS = 200
_LARGEST_SHIFT = 1e6


def shift_of_pure(epsilon: float) -> float:
    """Return the mu of whatever has losses of at most epsilon: 2 Phi^-1(e^epsilon / (1 + e^epsilon)).

    Its curve of errors lies above two straight lines that meet at both errors 1/(1 + e^epsilon); the Gaussian's, which
    is convex and has the same ends, goes through that point, so it lies below both.
    """
    from scipy.special import expit, ndtri

    if not epsilon >= 0:
        return math.inf  # NaN too
    return float(-2 * ndtri(expit(-epsilon))) * (1 + _ROUNDING)


def pure_epsilon(losses: Losses) -> float:
    """Return the most that can be lost, where that is what a release is planned by; infinity for all others."""
    if isinstance(losses, AtomLosses) and losses.atoms.slack == 0:
        return float(losses.atoms.losses[-1]) * losses.copies
    return math.inf


def squared_shift(losses: Losses) -> float:
    """Return mu squared of a release; infinity where there is no such bound.

    Sums of bits are bounded as if every bit that moves were seen by itself: their Renyi divergence is the better count.
    """
    match losses:
        case GaussianLosses():
            return losses.shift**2
        case AtomLosses():
            one = shift_of_pure(float(losses.atoms.losses[-1])) if losses.atoms.slack == 0 else math.inf
            return one**2 * losses.copies
        case BitLosses():
            return shift_of_pure(largest_loss(1, losses.beta_16)) ** 2 * losses.num_bits
        case HullLosses():
            return shift_of_pure(largest_loss(1, losses.beta_16)) ** 2 * losses.num_trials * losses.coordinates
        case NoLosses():
            return math.inf


def epsilon_in_turn(parts: Parts, delta: float) -> float:
    """Return the epsilon of releases one after the other, each so many times.

    Pure ones add up by themselves until the first that is not, and from then on all add up by their squares. It holds
    although each may be chosen after looking.
    """
    pure, square = 0.0, 0.0
    for count, losses in parts:
        if not count:
            continue
        if not square and math.isfinite(pure_epsilon(losses)):
            pure += count * pure_epsilon(losses)
        else:
            square += count * squared_shift(losses)
    return pure + gaussian_epsilon(square, delta)


@lru_cache(maxsize=4096)
def largest_square(epsilon: float, delta: float) -> float:
    """Return the largest mu squared whose Gaussian is still (epsilon, delta), rounded down; below 0 if epsilon is."""
    check_delta(delta)
    if epsilon < 0:
        return -math.inf
    low, high = 0.0, _LARGEST_SHIFT
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if _delta(epsilon, middle) <= delta * (1 - _ROUNDING) else (low, middle)
    return low * low


@lru_cache(maxsize=4096)
def gaussian_epsilon(square: float, delta: float) -> float:
    """Return the epsilon at delta of a Gaussian moved by so many standard deviations, squared; rounded up."""
    check_delta(delta)
    if square == 0:
        return 0.0
    if not 0 < square <= _LARGEST_SHIFT**2:
        return math.inf
    shift = math.sqrt(square) * (1 + 1e-15)
    low, high = 0.0, shift * shift + 40 * shift + 1
    while _delta(high, shift) > delta * (1 - _ROUNDING):
        high *= 2
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if _delta(middle, shift) <= delta * (1 - _ROUNDING) else (middle, high)
    return high


def _delta(epsilon: float, shift: float) -> float:
    return float(gaussian_delta(np.array([epsilon]), shift)[0])
