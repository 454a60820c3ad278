"""A party's columns as one symbol a row: public levels, public choice of the columns that a row shows, and back.

    level of x = number of the column's public cuts that x reaches               NaN reaches none
    symbol     = sum over the shown columns of level * base^place                0 .. base^S - 1
    released   = randomised response with k answers (`mechanisms/randomized_response.py`): the own symbol with
                 probability `kept`, and else one of all k, each equally often. So every digit is its own with
                 probability `kept`, else uniform.

A row shows only S of its party's D columns, another choice for each row, drawn from the public seed: a symbol of few
columns is told truly far more often, and that outweighs the rows that do not show a column (`screen.shown_count`).

Letters: N rows, D columns of a party, S columns shown, U symbols in use, k answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pbmvfl._settings import check_whole
from pbmvfl.crypto.public_streams import SHOWN_STREAM, public_bits
from pbmvfl.errors import DataError, PlanError
from pbmvfl.mechanisms.randomized_response import LARGEST_SYMBOLS, WEIGHT_ONE, RandomisedResponse

Integers = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

#: The level of a column that a row does not show.
NOT_SHOWN = -1


def kept(event: RandomisedResponse) -> float:
    """Return the probability that randomised response leaves a symbol as it is; else it is any of all k, equally."""
    return 1 - event.symbols * event.other_weight / WEIGHT_ONE


def kept_at(symbols: int, epsilon: float) -> float:
    """Return `kept` for k answers at a pure epsilon, before weights are rounded to integers: for planning."""
    check_whole("symbols", symbols, least=2, most=LARGEST_SYMBOLS)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise PlanError(f"epsilon={epsilon!r} must be a finite number above 0")
    return -math.expm1(-epsilon) / (1 + (symbols - 1) * math.exp(-epsilon))


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Public cuts of each column of a party. A value's level is how many of its column's cuts it reaches."""

    cuts: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.cuts:
            raise PlanError("cuts=() names no column; give at least one column with at least one cut")
        for column, cuts in enumerate(self.cuts):
            rising = all(low < high for low, high in pairwise(cuts))
            if not cuts or not rising or not all(math.isfinite(cut) for cut in cuts):
                raise PlanError(f"cuts[{column}]={cuts!r} must be finite numbers that rise, at least one")

    @classmethod
    def equal_parts(cls, ranges: Sequence[tuple[float, float]], count: int) -> Self:
        """Cut every public range into `count` equal parts; two parts are cut in the middle."""
        check_whole("count", count, least=2, most=LARGEST_SYMBOLS)
        for column, (low, high) in enumerate(ranges):
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise PlanError(f"ranges[{column}]=({low!r}, {high!r}) must be two finite numbers that rise")
        return cls(
            cuts=tuple(tuple(low + (high - low) * (part / count) for part in range(1, count)) for low, high in ranges)
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return how many levels each column has."""
        return tuple(len(cuts) + 1 for cuts in self.cuts)

    @property
    def base(self) -> int:
        return max(self.sizes)

    def only(self, columns: Sequence[int]) -> Self:
        """Return the cuts of some of the columns, in this order."""
        return type(self)(cuts=tuple(self.cuts[column] for column in columns))

    def of(self, columns_ND: npt.NDArray[Any]) -> Integers:
        """Levels of whatever stands in the columns: NaN reaches no cut, infinity reaches all."""
        if columns_ND.ndim != 2 or columns_ND.shape[1] != len(self.cuts):
            raise DataError(f"columns of shape {columns_ND.shape} do not have {len(self.cuts)} columns with cuts")
        levels = np.empty(columns_ND.shape, dtype=np.int64)
        for column, cuts in enumerate(self.cuts):
            # Comparisons are false for NaN, wherever a search would put it.
            levels[:, column] = (columns_ND[:, column, None] >= np.array(cuts)).sum(axis=1)
        return levels


def shown_columns(*, num_rows: int, num_columns: int, shown: int, seed: int, party: int) -> Integers:
    """Return which columns of a party each row shows, N x S, rising.

    Uniform for each row, the same on every machine.
    """
    check_whole("num_rows", num_rows, least=1)
    check_whole("num_columns", num_columns, least=1)
    check_whole("shown", shown, least=1, most=num_columns, why=": a row cannot show more columns than there are")
    words = public_bits(num_rows * num_columns, seed=seed, stream=SHOWN_STREAM, index=party)
    order = np.argsort(words.reshape(num_rows, num_columns), axis=1, kind="stable")
    return np.sort(order[:, :shown], axis=1).astype(np.int64)


def to_symbols(levels_NS: Integers, sizes: Sequence[int]) -> Integers:
    """One number for the levels of each row: the first column counts ones, the second sizes[0]s, and so on."""
    if levels_NS.ndim != 2 or levels_NS.shape[1] != len(sizes):
        raise DataError(f"levels of shape {levels_NS.shape} do not have the {len(sizes)} columns of sizes={sizes}")
    if levels_NS.size and not (levels_NS.min() >= 0 and (levels_NS < np.array(sizes)).all()):
        raise DataError(f"levels must be from 0 to size-1 with sizes={tuple(sizes)}")
    return np.asarray(levels_NS @ _places(sizes), dtype=np.int64)


def from_symbols(symbols_N: Integers, sizes: Sequence[int]) -> Integers:
    """Levels of each row, N x S. Of symbols beyond the last that is in use the digits are read all the same."""
    if symbols_N.size and symbols_N.min() < 0:
        raise DataError(f"symbols must be 0 or more; the least is {int(symbols_N.min())}")
    return np.asarray(symbols_N[:, None] // _places(sizes) % np.array(sizes), dtype=np.int64)


def _places(sizes: Sequence[int]) -> Integers:
    if not sizes or math.prod(sizes) > LARGEST_SYMBOLS:
        raise PlanError(f"sizes={tuple(sizes)} make {math.prod(sizes)} symbols; permitted: 1 to {LARGEST_SYMBOLS}")
    return np.cumprod([1, *sizes[:-1]], dtype=np.int64)


def shown_symbols(columns_ND: npt.NDArray[Any], levels: Levels, shown_NS: Integers, base: int) -> Integers:
    """Return the true symbol of each row, of base^S: the levels of the columns that the row shows."""
    if base < levels.base:
        raise PlanError(f"base={base} is below the {levels.base} levels of a column")
    chosen = np.take_along_axis(levels.of(columns_ND), shown_NS, axis=1)
    return to_symbols(chosen, [base] * shown_NS.shape[1])


def shown_levels(symbols_N: Integers, shown_NS: Integers, *, num_columns: int, base: int) -> Integers:
    """Return the levels that the server reads out of released symbols: N x D, NOT_SHOWN where a row does not show."""
    levels = np.full((len(symbols_N), num_columns), NOT_SHOWN, dtype=np.int64)
    np.put_along_axis(levels, shown_NS, from_symbols(symbols_N, [base] * shown_NS.shape[1]), axis=1)
    return levels


def as_coordinates(symbols_N: Integers, *, num_symbols: int, bound: float) -> npt.NDArray[np.float32]:
    """Return the coordinate in [-C, C] whose bin is the symbol, N x 1: what `RandomisedSymbols.randomize` is given."""
    check_whole("num_symbols", num_symbols, least=2, most=LARGEST_SYMBOLS)
    if symbols_N.size and not (symbols_N.min() >= 0 and symbols_N.max() < num_symbols):
        raise DataError(f"symbols must be from 0 to {num_symbols - 1}")
    return (bound * (2 * symbols_N[:, None] / (num_symbols - 1) - 1)).astype(np.float32)


def unbiased_indicators(sent_N: Integers, *, used: int, num_symbols: int, kept: float) -> Reals:
    """Return for every symbol in use a number whose mean over the response is 1 if it is the true one, else 0: N x U.

    Responses of two parties are independent, so the product of two such numbers is unbiased for both at once.
    """
    _check_response(used, num_symbols, kept)
    hits = sent_N[:, None] == np.arange(used)
    return np.asarray((hits - (1 - kept) / num_symbols) / kept)


def _check_response(used: int, num_symbols: int, kept: float) -> None:
    check_whole("num_symbols", num_symbols, least=2)
    check_whole("used", used, least=1, most=num_symbols, why=": no more symbols can be in use than there are answers")
    if not 0 < kept <= 1:
        raise PlanError(f"kept={kept!r} must be above 0 and at most 1")


def estimated_prior(sent_N: Integers, *, used: int, num_symbols: int, kept: float) -> Reals:
    """Estimate the frequency of each symbol in use from what was sent.

    Unbiased, raised to a least share, scaled to 1.
    """
    shares = unbiased_indicators(sent_N, used=used, num_symbols=num_symbols, kept=kept).mean(axis=0)
    raised = np.maximum(shares, LEAST_SHARE)
    return np.asarray(raised / raised.sum())


#: A symbol is never taken for impossible because its noisy count fell below zero.
LEAST_SHARE = 1e-3


def posterior(sent_N: Integers, prior_U: Reals, *, num_symbols: int, kept: float) -> Reals:
    """Return the law of the true symbol given the sent one, N x U. A symbol that is not in use tells nothing."""
    _check_response(len(prior_U), num_symbols, kept)
    hits = sent_N[:, None] == np.arange(len(prior_U))
    joint = prior_U * (hits * kept + (1 - kept) / num_symbols)
    total = joint.sum(axis=1, keepdims=True)
    # With kept = 1 a symbol that is not in use has no law at all; the prior is as good as any.
    return np.where(total > 0, joint / np.where(total > 0, total, 1.0), prior_U)
