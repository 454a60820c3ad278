"""Local differential privacy: every party releases every row once, as symbols by k-ary randomised response.

A party's columns become symbols by a public code: groups of few-valued columns, or signs of public projections. The
server makes tables of the released training rows, symbol by class, with the response's randomness taken out; a row's
score is the sum of its symbols' logarithms (naive Bayes). Rows to be predicted are looked up at home
(`exact_scores`), or released in turn as symbols of their scores (`scores`).

Shape suffixes: N rows, K classes, S symbols.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.utility.tables import Floats, Indices, Table, as_symbols

Reals = npt.NDArray[np.float64]

#: Projections are drawn from this public seed; which of them are used is chosen on hold-outs.
_PROJECTION_SEED = 0
_COUNT_OF_NOBODY = 0.5
#: Of so many training rows, so many are for tables, where rows to be predicted are released.
_OF_ROWS, _FIRST_ROWS = 10, 7


@dataclass(frozen=True, kw_only=True)
class Code:
    """Public code from a party's columns to symbols."""

    #: Few-valued columns a symbol; 0 for the sum of all columns.
    columns: int = 0
    #: Signs of projections a symbol, where columns have many values, and how many such symbols.
    bits: int = 0
    repeats: int = 1
    #: Which projections.
    draw: int = 0
    #: Steps of a score that is released, for two classes.
    levels: int = 2

    def symbols(self, rows_ND: Floats, column_values: int | None) -> tuple[list[Indices], int]:
        """Return every symbol of every row, and the number of possible symbols."""
        if column_values is None:
            rng = np.random.default_rng((_PROJECTION_SEED, self.draw))
            directions = rng.normal(size=(rows_ND.shape[1], self.bits * self.repeats))
            directions -= directions.mean(axis=0)  # what all columns have in common says little
            signs_NB = (rows_ND @ directions.astype(np.float32)) > 0
            each = np.split(signs_NB, self.repeats, axis=1)
            return [signs @ (1 << np.arange(self.bits)) for signs in each], 1 << self.bits
        values_ND = as_symbols(rows_ND, column_values)
        if self.columns == 0:
            return [values_ND.sum(axis=1)], rows_ND.shape[1] * (column_values - 1) + 1
        weights = column_values ** np.arange(self.columns)
        first = range(0, rows_ND.shape[1], self.columns)
        return [values_ND[:, at : at + self.columns] @ weights for at in first], column_values**self.columns


def codes(column_values: int | None, levels: tuple[int, ...] = (2,)) -> Iterator[Code]:
    """Return all codes that are tried."""
    if column_values is None:
        shapes = ((1, 1), (2, 1), (3, 1), (5, 1), (7, 1), (9, 1), (1, 4), (1, 12), (3, 3), (5, 2))
        yield from (Code(bits=bits, repeats=repeats, draw=draw) for bits, repeats in shapes for draw in range(6))
    else:
        yield from (Code(columns=columns, levels=each) for columns in (0, 1, 2, 3, 6) for each in levels)


def exact_scores(table: Table, code: Code, *, epsilon: float, rng: np.random.Generator) -> Reals:
    """Return class scores of the judged rows, looked up by their party: only training rows are released."""
    total_NK = np.broadcast_to(table.prior_K, (len(table.judged_labels), table.num_classes)).copy()
    everybody = np.arange(len(table.labels))
    for party in range(len(table.columns)):
        total_NK += _party(table, party, code, everybody, epsilon, rng)(table.judged_columns[party])
    return total_NK


def scores(table: Table, code: Code, *, epsilon: float, rng: np.random.Generator) -> Reals:
    """Return class scores of judged rows that are released, too.

    Some training rows are released by the code, for tables; the others, and the judged rows, as symbols of the scores
    that the tables give them at their party. Every row is released once, so each gets the whole epsilon.
    """
    total_NK = np.broadcast_to(table.prior_K, (len(table.judged_labels), table.num_classes)).copy()
    is_first = np.arange(len(table.labels)) % _OF_ROWS < _FIRST_ROWS
    first, second = np.flatnonzero(is_first), np.flatnonzero(~is_first)
    for party, (columns, judged_columns) in enumerate(zip(table.columns, table.judged_columns, strict=True)):
        own = _party(table, party, code, first, epsilon, rng)
        size = code.levels if table.num_classes == 2 else table.num_classes
        released = _responses(_symbols_of(own(columns[second]) + table.prior_K, size), size, epsilon, rng)
        asked = _responses(_symbols_of(own(judged_columns) + table.prior_K, size), size, epsilon, rng)
        counts_SK = np.full((size, table.num_classes), _COUNT_OF_NOBODY)
        np.add.at(counts_SK, (released, table.labels[second]), 1)
        total_NK += np.log(counts_SK / counts_SK.sum(axis=0))[asked]
    return total_NK


def _party(
    table: Table, party: int, code: Code, rows: Indices, epsilon: float, rng: np.random.Generator
) -> Callable[[Floats], Reals]:
    """Return a party's class scores from its columns, by tables of these training rows as they were released."""
    symbols, size = code.symbols(table.columns[party][rows], table.column_values)
    share = epsilon / len(symbols)
    tables = [
        _log_likelihoods(_responses(own, size, share, rng), table.labels[rows], table.num_classes, size, share)
        for own in symbols
    ]

    def scored(columns: Floats) -> Reals:
        looked_up = code.symbols(columns, table.column_values)[0]
        return np.asarray(sum(table_SK[own] for table_SK, own in zip(tables, looked_up, strict=True)))

    return scored


def _symbols_of(scores_NK: Reals, size: int) -> Indices:
    """Return symbols of scores: for two classes the second's probability in equal steps, for more the best class."""
    if scores_NK.shape[1] > 2:
        return np.asarray(scores_NK.argmax(axis=1))
    odds_N = np.clip(scores_NK[:, 1] - scores_NK[:, 0], -30, 30)
    return np.minimum((size / (1 + np.exp(-odds_N))).astype(np.int64), size - 1)


def advantage(code: Code, table: Table, epsilon: float, *, exact: bool) -> float:
    """Return the best attack's advantage on one party's release of one row, for the row where it is largest."""
    symbols, size = code.symbols(table.columns[0][:1], table.column_values)
    found = responses_advantage(len(symbols), size, epsilon / len(symbols))
    if exact:
        return found
    return max(found, responses_advantage(1, code.levels if table.num_classes == 2 else table.num_classes, epsilon))


def responses_advantage(count: int, size: int, epsilon: float) -> float:
    """Return the total variation between so many responses of this epsilon, for rows that differ in all symbols."""
    kept = 1 / (1 + (size - 1) * math.exp(-epsilon))
    other = kept * math.exp(-epsilon)
    chances = {1: kept, -1: other, 0: max(0.0, 1 - kept - other)}
    # Each response tells for one row, for the other, or for neither; only the difference of these counts matters.
    law: dict[int, float] = {0: 1.0}
    for _ in range(count):
        longer: dict[int, float] = {}
        for (at, chance), (move, share) in itertools.product(law.items(), chances.items()):
            longer[at + move] = longer.get(at + move, 0.0) + chance * share
        law = longer
    return sum(max(0.0, law[at] - law[-at]) for at in law)


def _responses(symbols_N: Indices, size: int, epsilon: float, rng: np.random.Generator) -> Indices:
    """Draw the symbol with probability e^epsilon/(e^epsilon + size - 1), else another one uniformly."""
    kept = rng.random(len(symbols_N)) < 1 / (1 + (size - 1) * math.exp(-epsilon))
    others = (symbols_N + rng.integers(1, max(2, size), size=len(symbols_N))) % size
    return np.where(kept, symbols_N, others)


def _log_likelihoods(released_N: Indices, labels_N: Indices, num_classes: int, size: int, epsilon: float) -> Reals:
    """Estimate ln P(symbol | class) before the response, from released symbols."""
    counts_SK = np.zeros((size, num_classes))
    np.add.at(counts_SK, (released_N, labels_N), 1)
    kept = 1 / (1 + (size - 1) * math.exp(-epsilon))
    other = kept * math.exp(-epsilon)
    counts_SK = np.maximum(0, (counts_SK - other * counts_SK.sum(axis=0)) / (kept - other))
    # A count within its own noise says nothing: all are drawn to the share of the symbol in all classes, by so much.
    noise = math.sqrt(len(released_N) / num_classes * other * (1 - other)) / (kept - other)
    shares_S1 = (counts_SK.sum(axis=1, keepdims=True) + 1) / (counts_SK.sum() + size)
    counts_SK += (1 + noise) * min(size, 8) * shares_S1
    return np.asarray(np.log(counts_SK / counts_SK.sum(axis=0)))
