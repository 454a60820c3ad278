"""Features out of released symbols.

A party whose column i acts together with column j of another party learns, in a context round, from

    its level of i (x) (law of j's level given the released symbol - how frequent each level is)      a table
    its value of i  *  mean of j's level value given the released symbol                              a product

beside its own features. The second factors are functions of what was released: public. Both are bounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.errors import DataError, WrongPlan
from pbmvfl.mechanisms.interactions.plan_group import Interactions
from pbmvfl.mechanisms.interactions.symbols import (
    Integers,
    Levels,
    Reals,
    estimated_prior,
    kept,
    posterior,
    shown_symbols,
)

#: Values are standardised by public means and deviations, and end here.
VALUE_BOUND = 3.0
#: Scale of the product feature beside the table's entries, so that both learn at about one speed.
PRODUCT_SCALE = 0.5


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """Public knowledge of one released column: how frequent its levels are, and what each stands for."""

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
        """Standard deviation of the levels' values; 1 where they do not vary."""
        deviation = math.sqrt(float(self.prior_L @ (self.values_L - self.mean) ** 2))
        return deviation if deviation > 0 else 1.0

    def standardised(self, values_N: npt.NDArray[Any]) -> Reals:
        """Return (x - mean) / deviation, clipped to [-VALUE_BOUND, VALUE_BOUND]; NaN counts as the mean."""
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = (np.asarray(values_N, dtype=np.float64) - self.mean) / self.deviation
        return np.clip(np.nan_to_num(scaled, nan=0.0, posinf=np.inf, neginf=-np.inf), -VALUE_BOUND, VALUE_BOUND)


def context_features(
    own_values_N: npt.NDArray[Any], own_levels_N: Integers, own: Context, law_NL: Reals, other: Context
) -> Reals:
    """Return the features of one party for one pair of columns, N x (1 + own levels * other's levels).

    `law_NL` is the law of the other's level given its symbol (`symbols.posterior`), or the level's indicator where it
    is
    known. A row's features are bounded: the product by PRODUCT_SCALE * VALUE_BOUND^2, the table's norm by sqrt(2).
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


# ---
# A party's symbols, from its own columns, and its context features, from all released symbols.
#
# Shape suffixes: N rows, D columns of the party.


#: Both parties of a pair learn the same product, and scores are added up: each counts for a half.
SHARED_BY_TWO = 0.5


class OwnColumns:
    """Columns of one party that its symbols are made of, as they are: never as a network takes them."""

    def __init__(self, interactions: Interactions, *, party: int, rows: npt.NDArray[Any]) -> None:
        self.interactions, self.party = interactions, party
        released = interactions.columns[party]
        width = math.prod(rows.shape[1:])
        for each in released:
            if each.column >= width:
                raise WrongPlan(f"party={party}: the plan releases column={each.column}; it has 0 to {width - 1}")
        rows_ND = rows.reshape(len(rows), width)
        self.columns_ND = rows_ND[:, [each.column for each in released]]

    def symbols(self, *, seed: int) -> Integers:
        """Return the true symbol of each row, before it is randomised."""
        released = self.interactions.columns[self.party]
        if not released:
            return np.zeros(len(self.columns_ND), dtype=np.int64)
        places = self.interactions.places(self.party, num_rows=len(self.columns_ND), seed=seed)
        levels = Levels(cuts=tuple(each.cuts.cuts[0] for each in released))
        return shown_symbols(self.columns_ND, levels, places, self.interactions.base)

    @property
    def values_N(self) -> npt.NDArray[Any]:
        """Values of the one column that is released; zeros if none is."""
        return self.columns_ND[:, 0] if self.columns_ND.shape[1] else np.zeros(len(self.columns_ND))

    @property
    def levels_N(self) -> Integers:
        """Levels of the one column that is released; zeros if none is."""
        if not self.columns_ND.shape[1]:
            return np.zeros(len(self.columns_ND), dtype=np.int64)
        return self.interactions.columns[self.party][0].cuts.of(self.columns_ND[:, :1])[:, 0]


@dataclass(frozen=True, eq=False)
class _Read:
    """Public knowledge of one party's column."""

    context: Context
    #: The law of the level of each training row.
    law_NL: Reals


class PublishedContext:
    """Context features of one party, from published symbols: all scales come from these, none from columns."""

    def __init__(self, interactions: Interactions, *, party: int, sent: Mapping[int, Integers], num_parties: int):
        """Read the released symbols.

        Args:
            interactions: The plan's symbols and pairs.
            party: The party whose features are made.
            sent: Symbols of the training rows of every party that releases a column.
            num_parties: Parties of the plan.
        """
        self._interactions, self._party = interactions, party
        mechanism = interactions.mechanism(num_parties)
        share = kept(mechanism.event)
        self._read: dict[int, _Read] = {}
        for other, sent_N in sent.items():
            (column,) = interactions.columns[other]
            prior_L = estimated_prior(sent_N, used=column.levels, num_symbols=mechanism.symbols, kept=share)
            law_NL = posterior(sent_N, prior_L, num_symbols=mechanism.symbols, kept=share)
            self._read[other] = _Read(Context(prior_L=prior_L, values_L=column.values_L), law_NL)

    def of_training(self, own: OwnColumns) -> npt.NDArray[np.float32]:
        """Return the features of the training rows, with the others' released symbols."""
        return self._features(own, {other: read.law_NL for other, read in self._read.items()})

    def of_known(self, own: OwnColumns, levels: Mapping[int, Integers]) -> npt.NDArray[np.float32]:
        """Return the features of rows whose levels at the other parties are known, as an evaluation takes them.

        Both parties of a pair have its features in an evaluation, so each counts for a half.
        """
        laws = {
            other: (levels[other][:, None] == np.arange(read.context.num_levels)).astype(np.float64)
            for other, read in self._read.items()
        }
        return self._features(own, laws) * np.float32(SHARED_BY_TWO)

    def _features(self, own: OwnColumns, laws: Mapping[int, Reals]) -> npt.NDArray[np.float32]:
        found = [
            context_features(
                own.values_N, own.levels_N, self._read[self._party].context, laws[other], self._read[other].context
            )
            for _, other, _ in self._interactions.partners(self._party)
        ]
        if not found:
            return np.zeros((len(own.levels_N), 0), dtype=np.float32)
        return (np.concatenate(found, axis=1) * self._interactions.context_scale).astype(np.float32)
