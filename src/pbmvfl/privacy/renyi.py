"""Exact Renyi divergence of one row's release, for each unit, over a grid of orders.

Proofs in theory.md. Every curve is an upper bound. RECORD is attained; CELL is wherever the maximum over k sits at
an end, as it did in every case tried. Where exactness would take too long (more than 1,536 bits in a sum) one in a
hundred bits of noise is left out of the count, which raises the curve by about a hundredth: `large_sums`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pbmvfl.errors import PlanError
from pbmvfl.privacy.large_sums import LARGEST_SUM, grouped_divergences
from pbmvfl.privacy.orders import ORDERS, Curve
from pbmvfl.privacy.poisson_binomial import (
    UNIT_OF_ROUNDING,
    check_bits,
    counted_parties,
    end_points,
    log_sum_pmfs_and_error,
)

#: Every curve is raised by this share, far above the rounding of closed forms and of sums of curves. One that comes
#: from a table is also raised by what the table's error can take away, so that rounding can only cost budget.
ROUNDING_MARGIN = 1e-9
#: Up to here the maximum over the other parties' bits is taken over every k.
LARGEST_EXACT_SUM = 1536
#: exp() of more than this needs the slower sum in log space.
_LARGEST_EXPONENT = 600.0
#: Terms smaller than exp(-this) of the largest are left out: 8,192 of them are 1e-22 of it.
_NEGLIGIBLE = 60.0
#: Entries worked on at once: they stay in the processor's cache.
_BLOCK_ENTRIES = 131_072


def _divergences(
    log_p: NDArray[np.float64], log_q: NDArray[np.float64], orders: tuple[float, ...], *, log_error: float
) -> Curve:
    """Return the maximum over the rows of D_order(P || Q), for each order, from logarithms wrong by at most log_error.

    Raised by what that error and the rounding of the sums here can take away: docs/explanation/theory.md, 2.8.
    """
    columns = log_p.shape[1]
    error = log_error + (4 * columns + 8) * UNIT_OF_ROUNDING
    height = max(1, _BLOCK_ENTRIES // columns)
    curve = np.zeros(len(orders))
    for top in range(0, len(log_p), height):
        block = log_p[top : top + height]
        loss = block - log_q[top : top + height]
        pmf, largest = np.exp(block), float(loss.max())
        for i, order in enumerate(orders):
            # Nearly all of a moment sits in a few columns, and rows that differ by few bits agree on which.
            tilted = block[[0, -1]] + (order - 1) * loss[[0, -1]]
            weighty = tilted > tilted.max(axis=1, keepdims=True) - _NEGLIGIBLE
            if (order - 1) * largest < _LARGEST_EXPONENT:
                # sum P (r^(order-1) - 1): no digits are lost when the moment is close to 1
                here = _span(weighty | (block[[0, -1]] > -_NEGLIGIBLE))
                excess = np.einsum("kx,kx->k", pmf[:, here], np.expm1((order - 1) * loss[:, here]))
                log_moment, times = np.log1p(excess), 4.0
            else:
                here = _span(weighty)
                exponent = block[:, here] + (order - 1) * loss[:, here]
                peak = exponent.max(axis=1)
                log_moment = peak + np.log(np.exp(exponent - peak[:, None]).sum(axis=1))
                times = 4 + 2 / (order - 1)
            divergence = float(log_moment.max()) / (order - 1)
            curve[i] = max(curve[i], divergence + (times + divergence) * error)
    return curve


def _span(columns: NDArray[np.bool_]) -> slice:
    """Return the range from the first to the last column that is set in any row."""
    (found,) = np.nonzero(columns.any(axis=0))
    return slice(int(found[0]), int(found[-1]) + 1)


def _published(curve: Curve) -> Curve:
    """Return the curve rounded up, rising in the order as a divergence must, and read-only for a shared cache."""
    published = np.maximum.accumulate(curve) * (1 + ROUNDING_MARGIN)
    published.setflags(write=False)
    return published


@lru_cache(maxsize=1024)
def bernoulli_rdp(beta_16: int, orders: tuple[float, ...] = ORDERS) -> Curve:
    """Return D(Bernoulli(hi) || Bernoulli(lo)); the other direction is the same number."""
    check_bits(1, beta_16)
    lo, hi = end_points(beta_16)
    log_p = np.log(np.array([[lo, hi]]))
    return _published(_divergences(log_p, log_p[:, ::-1], orders, log_error=3 * UNIT_OF_ROUNDING))


@lru_cache(maxsize=1024)
def cell_rdp(num_trials: int, beta_16: int, noisy_parties: int, orders: tuple[float, ...] = ORDERS) -> Curve:
    """Return the cost of one coordinate of one row, one of noisy_parties embeddings replaced.

    The maximum over k other bits at hi is taken, in both directions: F(n, j) read backwards is F(n, n - j), so the
    reverse
    divergence at k is the forward one at b(M-t-1) - k, and the maximum over k contains both.
    """
    check_bits(num_trials, beta_16)
    if noisy_parties < 1:
        raise PlanError(f"noisy_parties={noisy_parties}; permitted: 1 or more.")
    counted = counted_parties(num_trials, beta_16, noisy_parties)
    num_bits = min(num_trials * counted, max(LARGEST_SUM, num_trials))
    others = num_bits - num_trials
    if others == 0:
        return record_rdp(num_trials, beta_16, 1, orders)
    if num_bits > LARGEST_EXACT_SUM:
        return _published(grouped_divergences(num_bits, num_trials, beta_16, orders))
    log_p, log_q, error = log_sum_pmfs_and_error(num_bits, beta_16, num_trials, 1)
    return _published(_divergences(log_p, log_q, orders, log_error=error))


@lru_cache(maxsize=1024)
def record_rdp(num_trials: int, beta_16: int, honest_parties: int, orders: tuple[float, ...] = ORDERS) -> Curve:
    """Return the cost of one coordinate of one row, all honest embeddings replaced: every bit moves from lo to hi."""
    check_bits(num_trials, beta_16)
    if honest_parties < 1:
        raise PlanError(f"honest_parties={honest_parties}; permitted: 1 or more.")
    curve = num_trials * honest_parties * bernoulli_rdp(beta_16, orders)
    curve.setflags(write=False)
    return curve


def gaussian_rdp(shift: float, orders: tuple[float, ...] = ORDERS) -> Curve:
    """Return the cost of a Gaussian moved by `shift` standard deviations: order * shift^2 / 2."""
    return np.asarray(orders) * (shift * shift / 2 * (1 + ROUNDING_MARGIN))


def composed(*parts: tuple[int, Curve]) -> Curve:
    """Sum of count * curve: adaptive composition adds divergences. Nothing released costs nothing, even if one
    release would cost everything."""
    total = np.zeros_like(parts[0][1])
    for count, curve in parts:
        if count < 0:
            raise PlanError(f"count={count} of releases; permitted: 0 or more.")
        if count:
            total = total + count * curve
    return total
