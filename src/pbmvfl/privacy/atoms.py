"""Pairs of laws with few losses: their Renyi curves, and the pair that stands for every pure epsilon."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from pbmvfl.privacy.loss_distribution import LossDistribution
from pbmvfl.privacy.orders import Curve

#: Every curve is raised by this share, far above what rounding of the losses themselves can take away.
_ROUNDED_UP = 1 + 1e-9
_UNIT_OF_ROUNDING = 2.0**-53
#: exp() of more than this needs the slower sum in log space.
_LARGEST_EXPONENT = 500.0


def atoms_rdp(atoms: LossDistribution, orders: tuple[float, ...]) -> Curve:
    """D_a = ln(sum P exp((a-1) loss)) / (a-1) of the pair whose losses these are, rounded up.

    Masses may be wrong by some ten units of rounding each, and by as many more as the largest loss has natural units:
    that much of the sum of all absolute terms is added, which covers the summation too.
    """
    losses, probs = atoms.losses, atoms.probs
    share = (len(losses) + 32 + 4 * float(np.abs(losses).max())) * _UNIT_OF_ROUNDING
    curve = np.empty(len(orders))
    for i, order in enumerate(orders):
        exponents = (order - 1) * losses
        peak = float(exponents.max())
        if peak < _LARGEST_EXPONENT:
            terms = probs * np.expm1(exponents)
            moment = float(terms.sum()) + share * float(np.abs(terms).sum())
            curve[i] = math.log1p(max(moment, 0.0)) / (order - 1)
        else:
            total = float(np.dot(np.exp(exponents - peak), probs))
            curve[i] = (peak + math.log(total) + share) / (order - 1)
    # A divergence rises with its order; where rounding says otherwise the larger of two neighbours holds for both.
    raised: Curve = np.array(curve * _ROUNDED_UP)
    by_order = np.argsort(orders)
    raised[by_order] = np.maximum.accumulate(raised[by_order])
    return raised


@lru_cache(maxsize=256)
def pure_losses(epsilon: float) -> LossDistribution:
    """Randomised response with two answers, which dominates every pair whose losses lie in [-epsilon, epsilon]."""
    lying = math.exp(-epsilon) / (1 + math.exp(-epsilon))
    return LossDistribution(np.array([-epsilon, epsilon]), np.array([lying, 1 - lying]))
