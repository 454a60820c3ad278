"""Privacy losses of different events, put together.

Each event names the pair of laws that dominates it (docs/theory.md); here the pairs of a whole run become one number.
What cannot be computed well becomes infinity, and the Renyi curve is reported instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from pbmvfl.privacy.conversion import cell_epsilon_by_losses, epsilon_from_losses, record_epsilon_by_losses
from pbmvfl.privacy.loss_distribution import (
    LossDistribution,
    binomial_losses,
    cell_losses,
    compose,
    compose_parts,
)


@dataclass(frozen=True, kw_only=True)
class GaussianLosses:
    """A Gaussian that is moved by `shift` standard deviations."""

    shift: float


@dataclass(frozen=True, kw_only=True)
class BitLosses:
    """num_bits bits, each Bernoulli(1/2 + beta) against Bernoulli(1/2 - beta)."""

    num_bits: int
    beta_16: int


@dataclass(frozen=True, kw_only=True)
class HullLosses:
    """`coordinates` sums of noisy_parties * num_trials bits of which num_trials move, the others anywhere."""

    num_trials: int
    beta_16: int
    noisy_parties: int
    coordinates: int


@dataclass(frozen=True, kw_only=True, eq=False)
class AtomLosses:
    """`copies` independent releases, each with the same finite list of losses and their probabilities."""

    atoms: LossDistribution
    copies: int = 1


@dataclass(frozen=True)
class NoLosses:
    """There is no bound by losses."""


Losses = GaussianLosses | BitLosses | HullLosses | AtomLosses | NoLosses


def epsilon_by_losses(parts: Sequence[tuple[int, Losses]], delta: float, largest: float) -> float:
    """The smallest epsilon up to `largest` of all the parts, each so many times; infinity if there is none."""
    squares = 0.0
    bits: dict[int, int] = {}
    hulls: dict[HullLosses, int] = {}
    atoms: list[tuple[LossDistribution, int]] = []
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
                atoms.append((losses.atoms, count * losses.copies))
            case NoLosses():
                return math.inf
            case _:
                assert_never(losses)
    shift = math.sqrt(squares)
    if len(bits) + len(hulls) + len(atoms) > 1:
        different = [
            *((binomial_losses(count, beta_16, delta), 1) for beta_16, count in bits.items()),
            *((cell_losses(each.num_trials, each.beta_16, each.noisy_parties), count) for each, count in hulls.items()),
            *atoms,
        ]
        return epsilon_from_losses(compose_parts(different, delta), shift, delta, largest)
    for losses, coordinates in hulls.items():
        return cell_epsilon_by_losses(
            num_trials=losses.num_trials,
            beta_16=losses.beta_16,
            noisy_parties=losses.noisy_parties,
            coordinates=coordinates,
            gaussian_shift=shift,
            delta=delta,
            largest=largest,
        )
    for single, count in atoms:
        return epsilon_from_losses(compose(single, count, delta), shift, delta, largest)
    beta_16, num_bits = next(iter(bits.items()), (1, 0))
    return record_epsilon_by_losses(
        num_bits=num_bits, beta_16=beta_16, gaussian_shift=shift, delta=delta, largest=largest
    )
