"""Features out of released symbols, and what the server learns from symbols alone.

A party whose column i acts together with column j of another party learns, in a context round, from

    its level of i (x) (law of j's level given the released symbol - how frequent each level is)      a table
    its value of i  *  mean of j's level value given the released symbol                              a product

beside its own features. The second factors are functions of what was released: public. Both are bounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl._settings import check_whole
from pbmvfl.errors import DataError, PlanError
from pbmvfl.mechanisms.interactions.symbols import Integers, Reals

#: Values are standardised by public means and deviations, and end here.
VALUE_BOUND = 3.0
#: Of the product feature beside the table's entries, so that both learn at about one speed.
PRODUCT_SCALE = 0.5


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """What everybody knows of one released column: how frequent its levels are, and what each stands for."""

    #: Share of each level, from the released symbols of the training rows.
    prior_L: Reals
    #: A number for each level, in the column's own units: the middles of numeric levels, the codes of others.
    values_L: Reals

    def __post_init__(self) -> None:
        shapes = self.prior_L.shape == self.values_L.shape and self.prior_L.ndim == 1 and len(self.prior_L) >= 2
        if not shapes or not np.isfinite(self.values_L).all():
            raise DataError("prior_L and values_L must be two finite numbers or more for the same levels")
        if not (self.prior_L > 0).all() or abs(self.prior_L.sum() - 1) > 1e-9:
            raise DataError("prior_L must be above 0 and add up to 1")

    @property
    def num_levels(self) -> int:
        return len(self.prior_L)

    @property
    def mean(self) -> float:
        return float(self.prior_L @ self.values_L)

    @property
    def deviation(self) -> float:
        """Of the levels' values; 1 where they do not vary."""
        deviation = math.sqrt(float(self.prior_L @ (self.values_L - self.mean) ** 2))
        return deviation if deviation > 0 else 1.0

    def standardised(self, values_N: npt.NDArray[Any]) -> Reals:
        """(x - mean) / deviation in [-VALUE_BOUND, VALUE_BOUND]; NaN counts as the mean."""
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = (np.asarray(values_N, dtype=np.float64) - self.mean) / self.deviation
        return np.clip(np.nan_to_num(scaled, nan=0.0, posinf=np.inf, neginf=-np.inf), -VALUE_BOUND, VALUE_BOUND)


def num_context_features(own: Context, other: Context) -> int:
    return 1 + own.num_levels * other.num_levels


def context_features(
    own_values_N: npt.NDArray[Any], own_levels_N: Integers, own: Context, law_NL: Reals, other: Context
) -> Reals:
    """N x (1 + own levels * other's levels): what one party learns from for one pair of columns.

    `law_NL` is the law of the other's level given its symbol (`symbols.posterior`, `symbols.digit_law`), or the level's
    indicator where it is known. A row's features are bounded: the product by PRODUCT_SCALE * VALUE_BOUND^2, the
    table's norm by sqrt(2).
    """
    rows = len(own_levels_N)
    if law_NL.shape != (rows, other.num_levels) or len(own_values_N) != rows:
        raise DataError(f"law of shape {law_NL.shape} does not fit {rows} rows and {other.num_levels} levels")
    if rows and not (own_levels_N.min() >= 0 and own_levels_N.max() < own.num_levels):
        raise DataError(f"own levels must be from 0 to {own.num_levels - 1}")
    product = PRODUCT_SCALE * own.standardised(own_values_N) * other.standardised(law_NL @ other.values_L)
    table = np.zeros((rows, own.num_levels, other.num_levels))
    table[np.arange(rows), own_levels_N] = law_NL - other.prior_L
    return np.concatenate([product[:, None], table.reshape(rows, -1)], axis=1)


# --- the server's own model of a pair: symbols alone, no further round ---


def response_channel(levels: int, kept: float) -> Reals:
    """P(sent | true) of one digit of a symbol: its own with probability kept, else any, equally."""
    check_whole("levels", levels, least=2)
    if not 0 < kept <= 1:
        raise PlanError(f"kept={kept!r} must be above 0 and at most 1")
    return np.full((levels, levels), (1 - kept) / levels) + kept * np.eye(levels)


def fitted_table(counts_KST: npt.NDArray[Any], first: Reals, second: Reals, *, rounds: int = 300) -> Reals:
    """The law of (class, level, level) that makes the counted (class, sent, sent) most probable: K x A x B, sums to 1.

    Expectation maximisation for known channels, with one row spread evenly over each class's table: no cell is empty.
    """
    counts = np.asarray(counts_KST, dtype=np.float64)
    if counts.ndim != 3 or counts.shape[1:] != (first.shape[1], second.shape[1]) or counts.min() < 0:
        raise DataError(f"counts of shape {counts.shape} do not fit channels {first.shape} and {second.shape}")
    cells = len(first) * len(second)
    law = np.full((len(counts), len(first), len(second)), 1 / (len(counts) * cells))
    for _ in range(rounds):
        sent = np.einsum("kab,as,bt->kst", law, first, second)
        ratio = np.divide(counts, sent, out=np.zeros_like(counts), where=sent > 0)
        law = law * np.einsum("kst,as,bt->kab", ratio, first, second) + 1 / cells
        law /= law.sum()
    return law


def pair_scores(law_KAB: Reals) -> Reals:
    """What the pair adds to each class's score beyond its two columns by themselves: K x A x B, doubly centred.

    Log probabilities of the classes given both levels, less what is additive, weighted by how frequent levels are.
    """
    given = np.log(law_KAB) - np.log(law_KAB.sum(axis=0))
    first, second = law_KAB.sum(axis=(0, 2)), law_KAB.sum(axis=(0, 1))
    rows = given @ second
    columns = np.einsum("a,kab->kb", first, given)
    return np.asarray(given - rows[:, :, None] - columns[:, None, :] + (columns @ second)[:, None, None])
