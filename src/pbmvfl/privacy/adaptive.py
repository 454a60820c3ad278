"""Many releases of a CELL's coordinates, the worst k chosen anew before each of them.

The hull over k (`loss_distribution.cell_losses`) takes the worst k for every epsilon of one release; composed, it is as
if k could be changed with hindsight. With few bits in a sum and many releases that costs up to a tenth. Here the worst
case is followed step by step instead: V_c(l), the largest delta at epsilon 0 that c more releases can reach when the
losses so far add up to l, is the maximum over k of the mean of V_(c-1)(l + loss). It is the profile of a pair that
dominates c releases (docs/explanation/theory.md, 2.11).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from pbmvfl.privacy.loss_distribution import (
    ATOM_ROUNDING,
    LossDistribution,
    Vector,
    connect_the_dots,
    group_losses,
)
from pbmvfl.privacy.poisson_binomial import end_points

#: Sums of more bits than this have so many and such similar k that the hull over them costs next to nothing.
LARGEST_ADAPTIVE_SUM = 256
#: Releases in a block; blocks are composed as if k could be changed between them with hindsight.
_BLOCK = 128
#: A block's losses may add up to a standard deviation of about this; longer grids would take seconds.
_LARGEST_BLOCK_SPREAD = 40.0
#: Above this the sum of all losses is so close to its mean that a Renyi bound is as good.
LARGEST_ADAPTIVE_SPREAD = 60.0
#: Groups of neighbouring k: within a group the hull is taken.
_GROUPS = 8
#: Points of the grid to one standard deviation of one release's loss, for a whole block; fewer releases have more.
_POINTS = 9
#: Points may not be further apart than this, or the grid's own law would have much longer tails.
_LARGEST_STEP = 0.25
#: Losses whose mass is below this are put together.
_RARE = 1e-24
#: Masses this small count as certain losses without end.
_LOG_TAIL = -50.0
#: 128 sums of a few hundred positive numbers each, and what is computed from them, are good to 1e-11.
_ROUNDING = 1e-10


def _log_moment(losses: Vector, probs: Vector, s: float) -> float:
    exponents = s * losses
    peak = float(exponents.max())
    return peak + math.log(float(np.dot(np.exp(exponents - peak), probs)))


def _kernel(atoms: LossDistribution, step: float) -> tuple[int, Vector, float]:
    """Return the index of the first loss, masses on the grid, and the mass of losses that are taken to be endless."""
    probs = atoms.probs * (1 + ATOM_ROUNDING)
    mass_above = np.cumsum(probs[::-1])[::-1]
    mass_below = np.cumsum(probs)
    common = (mass_above > _RARE) & (mass_below > _RARE)
    lowest = float(atoms.losses[common][0])
    endless = float(probs[(mass_above <= _RARE)].sum())
    kept = mass_above > _RARE
    # a loss that is raised to the lowest common one can only make the worst case worse
    losses = np.maximum(atoms.losses[kept], lowest) + ATOM_ROUNDING
    first, masses = connect_the_dots(LossDistribution(losses, probs[kept]), step)
    return first, masses, endless


def _pair_of(values: Vector, first: int, step: float) -> LossDistribution:
    """Return the pair whose profile at epsilon = -l is the chord through these values at l = first * step, ... ."""
    # epsilons rise: -l from the last index down to the first
    deltas = values[::-1]
    epsilons = -step * np.arange(first + len(values) - 1, first - 1, -1.0)
    # slopes in exp(epsilon), times exp(epsilon) of the left end of each chord
    slopes = np.diff(deltas) / np.expm1(step)
    before = np.concatenate(([deltas[0] - 1.0], slopes * math.exp(step)))
    # the mass under the first law at each point but the last: exp(epsilon) times the change of the slope
    probs = np.maximum(np.concatenate((slopes, [0.0])) - before, 0.0)
    slack = float(deltas[-1])
    # What rounding took away from the profile is put back: the points decide, between them both are chords.
    short, shrink = 1.0, math.exp(-step)
    reached, weight = slack, 0.0
    for delta, prob in zip(deltas[-2::-1].tolist(), probs[:0:-1].tolist(), strict=True):
        weight = prob + shrink * weight
        reached += (1 - shrink) * weight
        if reached < delta:
            short = max(short, delta / reached) if reached > 0 else math.inf
    return LossDistribution(epsilons, probs * (short + _ROUNDING), slack * (1 + _ROUNDING))


def total_spread(num_trials: int, beta_16: int, noisy_parties: int, count: int) -> float:
    """Return the standard deviation of the sum of all losses, about.

    (difference of means) / deviation of one release.
    """
    lo, hi = end_points(beta_16)
    return (hi - lo) * math.sqrt(num_trials * count / (noisy_parties * lo * hi))


@lru_cache(maxsize=16)
def adaptive_losses(
    num_trials: int, beta_16: int, noisy_parties: int, count: int
) -> tuple[tuple[LossDistribution, int], ...]:
    """Return pairs, and how often each, whose composition dominates count releases."""
    groups = group_losses(num_trials, beta_16, noisy_parties, _GROUPS)
    one = total_spread(num_trials, beta_16, noisy_parties, 1)
    block = min(count, _BLOCK, max(1, int((_LARGEST_BLOCK_SPREAD / one) ** 2)))
    rest = count % block
    spread = math.sqrt(min(float(np.dot(atoms.losses**2, atoms.probs)) for atoms in groups))
    step = min(spread / (_POINTS * (_BLOCK / block) ** (2 / 3)), _LARGEST_STEP)
    kernels = [_kernel(atoms, step) for atoms in groups]
    laws = [(step * np.arange(first, first + len(masses), dtype=np.float64), masses) for first, masses, _ in kernels]
    powers = np.geomspace(0.02, 60, 60) / (spread * math.sqrt(block))
    bounds = [(block * max(_log_moment(*law, float(s)) for law in laws) - _LOG_TAIL) / s for s in powers]
    reach = math.ceil(min(*bounds, block * max(float(losses[-1]) for losses, _ in laws)) / step) + 1
    values = -np.expm1(-step * np.maximum(np.arange(-reach, reach + 1.0), 0.0))
    left = max(0, *(-first for first, _, _ in kernels))
    right = max(0, *(first + len(masses) for first, masses, _ in kernels))
    beyond = np.exp(-step * np.arange(reach + 1.0, reach + right + 1))
    parts = []
    for done in range(1, block + 1):
        # Left of the grid stands its first value, for V rises. Right of it V(l) = 1 - exp(-l) (1 - V(-l)).
        padded = np.concatenate((np.full(left, values[0]), values, 1 - beyond * (1 - values[0])))
        worst = np.zeros_like(values)
        for first, masses, endless in kernels:
            start = left + first
            here = padded[start : start + len(values) + len(masses) - 1]
            np.maximum(worst, np.correlate(here, masses, "valid") + endless, out=worst)
        values = np.minimum(worst, 1.0)
        if done == rest:
            parts.append((_pair_of(values, -reach, step), 1))
    parts.append((_pair_of(values, -reach, step), count // block))
    return tuple(parts)
