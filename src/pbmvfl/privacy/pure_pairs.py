"""Privacy losses of discrete Laplace noise, and of noise of which some shares are missing.

Proofs in docs/theory.md, "Laplace noise in shares". Noise of scale s has mass (1-p)/(1+p) p^|x| at x, p = exp(-1/s).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from pbmvfl.privacy.atoms import pure_losses
from pbmvfl.privacy.loss_distribution import LossDistribution

#: Two sums that lie further apart than this are told apart by the largest loss alone.
_LARGEST_DISTANCE = 1 << 16


@lru_cache(maxsize=256)
def laplace_losses(distance: int, scale: float) -> LossDistribution:
    """The noise around 0 against the same around `distance`: exact, as it has distance + 1 different losses."""
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
    """The largest loss if only some of the shares are there: ln(g(0) / g(distance)), rounded up.

    g is the law of X - Y, both NegativeBinomial(shares/all_shares, p). Sums over their common values end where the rest
    is below exp(-60); the rest is added above and left out below.
    """
    from scipy.special import gammaln

    r = shares / all_shares
    count = math.ceil(30 * scale) + 1
    y = np.arange(count, dtype=np.float64)

    def log_mass(at: np.ndarray) -> np.ndarray:
        """ln of P(X = at) / P(X = 0)."""
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
