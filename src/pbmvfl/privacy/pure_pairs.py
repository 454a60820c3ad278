"""Pairs of laws with few privacy losses: pure epsilon, and discrete Laplace noise."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from pbmvfl.privacy.loss_distribution import LossDistribution
from pbmvfl.privacy.orders import Curve

# --- Pairs of laws with few losses: their Renyi curves, and the pair that stands for every pure epsilon ---


#: Every curve is raised by this share, far above what rounding of the losses themselves can take away.
_ROUNDED_UP = 1 + 1e-9
_UNIT_OF_ROUNDING = 2.0**-53
#: exp() of more than this needs the slower sum in log space.
_LARGEST_EXPONENT = 500.0


def atoms_rdp(atoms: LossDistribution, orders: tuple[float, ...]) -> Curve:
    """Return D_a = ln(sum P exp((a-1) loss)) / (a-1) of the pair whose losses these are, rounded up.

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
    """Return the losses of randomised response with two answers.

    It dominates every pair whose losses lie in [-epsilon, epsilon].
    """
    lying = math.exp(-epsilon) / (1 + math.exp(-epsilon))
    return LossDistribution(np.array([-epsilon, epsilon]), np.array([lying, 1 - lying]))


# --- Privacy losses of discrete Laplace noise, and of noise of which some shares are missing ---
# Proofs in theory.md, "Laplace noise in shares". Noise of scale s has mass (1-p)/(1+p) p^|x| at x, p = exp(-1/s).


#: Two sums that lie further apart than this are told apart by the largest loss alone.
_LARGEST_DISTANCE = 1 << 16


@lru_cache(maxsize=256)
def laplace_losses(distance: int, scale: float) -> LossDistribution:
    """Return the losses of discrete Laplace noise around 0 against the same around `distance`.

    They are exact, as there are distance + 1 different ones.
    """
    if distance > _LARGEST_DISTANCE:
        return pure_losses(distance / scale)
    p = math.exp(-1 / scale)
    # From the largest x down: all from `distance` on have one loss, and so have all up to 0.
    x = np.arange(distance, -1, -1, dtype=np.float64)
    probs = np.exp(-x / scale) * (-math.expm1(-1 / scale) / (1 + p))
    probs[0] = math.exp(-distance / scale) / (1 + p)
    probs[-1] = 1 / (1 + p)
    return LossDistribution((distance - 2 * x) / scale, probs)


@lru_cache(maxsize=256)
def missing_shares_epsilon(distance: int, scale: float, shares: int, all_shares: int) -> float:
    """Return the largest loss if only some of the shares are there: ln(g(0) / g(distance)), rounded up.

    g is the law of X - Y, both NegativeBinomial(shares/all_shares, p). Sums over their common values end where the rest
    is below exp(-60); the rest is added above and left out below.
    """
    from scipy.special import gammaln

    r = shares / all_shares
    count = math.ceil(30 * scale) + 1
    y = np.arange(count, dtype=np.float64)

    def log_mass(at: np.ndarray) -> np.ndarray:
        """Return ln of P(X = at) / P(X = 0)."""
        return np.asarray(gammaln(at + r) - gammaln(r) - gammaln(at + 1) - at / scale, dtype=np.float64)

    here, there = log_mass(y), log_mass(y + distance)
    rest = math.exp(-2 * count / scale) / -math.expm1(-2 / scale)
    together = math.log(float(np.exp(2 * here).sum()) + rest)
    terms = here + there
    peak = float(terms.max())
    apart = peak + math.log(float(np.exp(terms - peak).sum()))
    # gammaln is good to a few units of rounding of its value; the sums add one unit for each term, at most.
    largest = count + distance
    rounding = 2.0**-53 * (64 * (largest * math.log(largest + 1) + largest / scale + 1) + 4 * count)
    return together - apart + rounding
