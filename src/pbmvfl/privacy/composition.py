"""Privacy losses of different events, put together.

Each event names the pair of laws that dominates it (theory.md); here the pairs of a whole run become one number.
What cannot be computed well becomes infinity, and the Renyi curve is reported instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import assert_never

from pbmvfl.privacy.advantage import NO_PROTECTION, Attack
from pbmvfl.privacy.conversion import ComposedLosses, composed_bits, composed_cell
from pbmvfl.privacy.loss_distribution import (
    LossDistribution,
    binomial_losses,
    cell_losses,
    compose,
    compose_parts,
)


@dataclass(frozen=True, kw_only=True)
class GaussianLosses:
    """Gaussian that is moved by `shift` standard deviations."""

    shift: float


@dataclass(frozen=True, kw_only=True)
class BitLosses:
    """Release of num_bits bits, each Bernoulli(1/2 + beta) against Bernoulli(1/2 - beta)."""

    num_bits: int
    beta_16: int


@dataclass(frozen=True, kw_only=True)
class HullLosses:
    """Release of `coordinates` sums of bits.

    Each sum has noisy_parties * num_trials bits of which num_trials move; the others may be anywhere.
    """

    num_trials: int
    beta_16: int
    noisy_parties: int
    coordinates: int


@dataclass(frozen=True, kw_only=True, eq=False)
class AtomLosses:
    """Release of `copies` independent values, each with the same finite list of losses and their probabilities."""

    atoms: LossDistribution
    copies: int = 1

    def __eq__(self, other: object) -> bool:
        """Compare by the object that holds the atoms: mechanisms keep theirs, and arrays have no hash."""
        return isinstance(other, AtomLosses) and self.atoms is other.atoms and self.copies == other.copies

    def __hash__(self) -> int:
        return hash((id(self.atoms), self.copies))


@dataclass(frozen=True)
class NoLosses:
    """There is no bound by losses."""


Losses = GaussianLosses | BitLosses | HullLosses | AtomLosses | NoLosses


Parts = Sequence[tuple[int, Losses]]


def epsilon_by_losses(parts: Parts, delta: float, largest: float) -> float:
    """Return the smallest epsilon up to `largest` of all the parts, each so many times; infinity if there is none."""
    return bounds_by_losses(parts, delta, largest)[0]


def bounds_by_losses(parts: Parts, delta: float, largest: float) -> tuple[float, Attack]:
    """Return the epsilon of `epsilon_by_losses`, and an upper bound on the best attack on all the parts."""
    squares = 0.0
    bits: dict[int, int] = {}
    hulls: dict[HullLosses, int] = {}
    atoms: list[tuple[AtomLosses, int]] = []
    for count, losses in parts:
        if not count:
            continue
        match losses:
            case GaussianLosses():
                squares += count * losses.shift**2
            case BitLosses():
                bits[losses.beta_16] = bits.get(losses.beta_16, 0) + count * losses.num_bits
            case HullLosses():
                hulls[losses] = hulls.get(losses, 0) + count * losses.coordinates
            case AtomLosses():
                atoms.append((losses, count * losses.copies))
            case NoLosses():
                return math.inf, NO_PROTECTION
            case _:
                assert_never(losses)
    return _bounds(math.sqrt(squares), tuple(bits.items()), tuple(hulls.items()), tuple(atoms), delta, largest)


@lru_cache(maxsize=256)
def _bounds(
    shift: float,
    bits: tuple[tuple[int, int], ...],
    hulls: tuple[tuple[HullLosses, int], ...],
    atoms: tuple[tuple[AtomLosses, int], ...],
    delta: float,
    largest: float,
) -> tuple[float, Attack]:
    """Numbers, not distributions, are kept: the rows of one table often count the same releases."""
    composed = replace(_composed(bits, hulls, atoms, delta), gaussian_shift=shift)
    return composed.epsilon(delta, largest), composed.attack()


@lru_cache(maxsize=4)
def _composed(
    bits: tuple[tuple[int, int], ...],
    hulls: tuple[tuple[HullLosses, int], ...],
    atoms: tuple[tuple[AtomLosses, int], ...],
    delta: float,
) -> ComposedLosses:
    """Compose all but the Gaussian part.

    The last few are kept: a planner tries many Gaussians beside the same releases.
    """
    if len(bits) + len(hulls) + len(atoms) > 1:
        different = [
            *((binomial_losses(count, beta_16, delta), 1) for beta_16, count in bits),
            *((cell_losses(each.num_trials, each.beta_16, each.noisy_parties), count) for each, count in hulls),
            *((each.atoms, count) for each, count in atoms),
        ]
        return ComposedLosses(losses=(compose_parts(different, delta),), largest_loss=math.inf)
    for hull, coordinates in hulls:
        return composed_cell(
            num_trials=hull.num_trials,
            beta_16=hull.beta_16,
            noisy_parties=hull.noisy_parties,
            coordinates=coordinates,
            gaussian_shift=0.0,
            delta=delta,
        )
    for single, count in atoms:
        return ComposedLosses(losses=(compose(single.atoms, count, delta),), largest_loss=math.inf)
    beta_16, num_bits = next(iter(bits), (1, 0))
    return composed_bits(num_bits=num_bits, beta_16=beta_16, gaussian_shift=0.0, delta=delta)
