"""Softmax regression by noisy full-batch or sampled steps, after a noisy mean and Gram matrix: in plain numpy.

The recipe is the library's (theory.md), with numpy's Gaussians for the library's exact ones, so that baselines
get what ours gets. All noise of one model has a shift, mu: epsilon and delta give it. Shares of mu^2 go to mean, Gram
matrix and steps. Without noise, mu is infinite.

Shape suffixes: N rows, D columns, K classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import dp_accounting
import numpy as np
import numpy.typing as npt
from dp_accounting import pld
from scipy.optimize import brentq
from scipy.stats import norm

from benchmarks.utility.tables import Floats, Indices, Part

Reals = npt.NDArray[np.float64]

_MEAN_SHARE, _GRAM_SHARE = 0.04, 0.12
_MOMENTUM, _RIDGE, _CLIP = 0.9, 0.5, 1.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Learning settings that baselines may choose on hold-outs."""

    #: Times the library's rule.
    rate: float = 1.0
    steps: int = 40
    prepared: bool = True
    #: The share of rows in a step; below 1 every row is drawn by itself (Poisson sampling).
    sampled: float = 1.0


def shift_of(epsilon: float, delta: float) -> float:
    """Return the shift of a Gaussian, in deviations, with this epsilon at delta (Balle and Wang, 2018, Theorem 8)."""

    def excess(mu: float) -> float:
        return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)) - delta

    return float(brentq(excess, 1e-4, 50))


def advantage_of(mu: float) -> float:
    """Return the best attack's advantage on a Gaussian with this shift."""
    return float(2 * norm.cdf(mu / 2) - 1)


def advantage(recipe: Recipe, epsilon: float, delta: float) -> float:
    """Return the best attack's advantage on a model that was learned by this recipe within this budget."""
    mu = shift_of(epsilon, delta)
    if recipe.sampled >= 1:
        return advantage_of(mu)
    prepared = math.sqrt(_MEAN_SHARE + _GRAM_SHARE) * mu if recipe.prepared else 0.0
    multiplier = sampled_noise(epsilon, delta, recipe.sampled, recipe.steps, prepared)
    return float(_accountant(multiplier, recipe.sampled, recipe.steps, prepared).get_delta(0.0))


def _accountant(multiplier: float, sampled: float, steps: int, prepared: float) -> pld.PLDAccountant:
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE, value_discretization_interval=1e-3)
    step = dp_accounting.PoissonSampledDpEvent(sampled, dp_accounting.GaussianDpEvent(multiplier))
    accountant.compose(step, steps)
    if prepared:
        accountant.compose(dp_accounting.GaussianDpEvent(2 / prepared))
    return accountant


@cache
def sampled_noise(epsilon: float, delta: float, sampled: float, steps: int, prepared: float) -> float:
    """Return the noise multiplier of sampled steps beside a Gaussian of shift `prepared`, by dp-accounting."""

    def spent(multiplier: float) -> float:
        return float(_accountant(multiplier, sampled, steps, prepared).get_epsilon(delta)) - epsilon

    return float(brentq(spent, 0.3, 2000.0, xtol=1e-3))


@dataclass(frozen=True)
class Model:
    """Class scores of a part's rows."""

    mean_D: Reals
    matrix_DD: Reals | None
    radius: float
    weights_DK: Reals

    def __call__(self, part: Part) -> Reals:
        return _features(part, self.mean_D, self.matrix_DD, self.radius).astype(np.float64) @ self.weights_DK


def learned(
    part: Part,
    labels: Indices,
    prior_K: Reals,
    recipe: Recipe,
    *,
    epsilon: float,
    delta: float,
    rng: np.random.Generator,
    noise_factor: float = 1.0,
) -> Model:
    """Learn a model of one part within the budget; `noise_factor` is the root of how many parts add their own noise."""
    count, columns = part.rows_ND.shape
    mu = shift_of(epsilon, delta) if math.isfinite(epsilon) else math.inf
    mean_D, matrix_DD, radius = np.zeros(columns), None, math.inf
    spent = 0.0
    if recipe.prepared:
        radius = part.centred_share * part.bound
        mean_D = part.rows_ND.mean(axis=0) + rng.normal(size=columns) * (
            2 * part.bound / (math.sqrt(_MEAN_SHARE) * mu) / count
        )
        matrix_DD = _whitening(_centred(part.rows_ND, mean_D, radius), math.sqrt(_GRAM_SHARE) * mu, radius, rng)
        spent = _MEAN_SHARE + _GRAM_SHARE
    rows = _features(part, mean_D, matrix_DD, radius)
    if not math.isfinite(mu):
        multiplier = 0.0
    elif recipe.sampled < 1:
        multiplier = sampled_noise(epsilon, delta, recipe.sampled, recipe.steps, math.sqrt(spent) * mu)
    else:
        multiplier = 2 * math.sqrt(recipe.steps / (1 - spent)) / mu
    signal = min(mu, 2.0) * count / noise_factor
    rule = min(0.02 * len(prior_K) ** 1.5 * signal**0.3, signal / (60 * math.sqrt(columns + 1)))
    weights = _steps(rows, labels, prior_K, recipe, recipe.rate * rule, multiplier * noise_factor, rng)
    return Model(mean_D, matrix_DD, radius, weights)


def _centred(rows_ND: Floats, mean_D: Reals, radius: float) -> Floats:
    centred_ND = rows_ND - mean_D.astype(np.float32)
    norms_N1 = np.linalg.norm(centred_ND, axis=1, keepdims=True)
    return np.asarray(centred_ND * np.minimum(1, radius / np.maximum(norms_N1, 1e-12)), np.float32)


def _whitening(rows_ND: Floats, mu: float, radius: float, rng: np.random.Generator) -> Reals:
    """Return (S + r I)^(-1/2) of a noisy S, whose diameter is sqrt 2: rows' products have inner product at least 0."""
    count, columns = rows_ND.shape
    deviation = math.sqrt(2) * radius**2 / mu / count
    noise_DD = rng.normal(size=(columns, columns)) * deviation
    gram_DD = (rows_ND.T @ rows_ND).astype(np.float64) / count + (noise_DD + noise_DD.T) / 2
    ridge = _RIDGE * deviation * math.sqrt(2 * columns) + 1e-6 * radius**2
    variances_D, directions_DD = np.linalg.eigh(gram_DD)
    return np.asarray((directions_DD / np.sqrt(np.maximum(variances_D, 0) + ridge)) @ directions_DD.T)


def _features(part: Part, mean_D: Reals, matrix_DD: Reals | None, radius: float) -> Floats:
    rows_ND = part.rows_ND
    if matrix_DD is not None:
        rows_ND = _centred(rows_ND, mean_D, radius) @ matrix_DD.astype(np.float32)
    return np.concatenate((rows_ND, np.ones((len(rows_ND), 1), np.float32)), axis=1)


def _steps(
    rows_ND: Floats,
    labels: Indices,
    prior_K: Reals,
    recipe: Recipe,
    rate: float,
    multiplier: float,
    rng: np.random.Generator,
) -> Reals:
    count, shape = len(rows_ND), (rows_ND.shape[1], len(prior_K))
    norms_N = np.linalg.norm(rows_ND, axis=1)
    targets_NK = np.eye(len(prior_K), dtype=np.float32)[labels]
    weights_DK, velocity_DK, total_DK = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    averaged = 0
    for step in range(recipe.steps):
        drawn = slice(None) if recipe.sampled >= 1 else np.flatnonzero(rng.random(count) < recipe.sampled)
        batch_BD = rows_ND[drawn]
        slopes_BK = _softmax(batch_BD @ weights_DK.astype(np.float32) + prior_K.astype(np.float32)) - targets_NK[drawn]
        lengths_B = np.linalg.norm(slopes_BK, axis=1) * norms_N[drawn]
        slopes_BK *= np.minimum(1, _CLIP / np.maximum(lengths_B, 1e-12))[:, None]
        noise_DK = rng.normal(size=shape) * (multiplier * _CLIP)
        gradient_DK = ((batch_BD.T @ slopes_BK).astype(np.float64) + noise_DK) / (count * recipe.sampled)
        velocity_DK = _MOMENTUM * velocity_DK + gradient_DK
        weights_DK = weights_DK - rate * (gradient_DK + _MOMENTUM * velocity_DK)
        if step >= recipe.steps // 2:
            total_DK += weights_DK
            averaged += 1
    return np.asarray(total_DK / averaged)


def _softmax(scores_BK: Floats) -> Floats:
    powers_BK = np.exp(scores_BK - scores_BK.max(axis=1, keepdims=True))
    return np.asarray(powers_BK / powers_BK.sum(axis=1, keepdims=True), np.float32)
