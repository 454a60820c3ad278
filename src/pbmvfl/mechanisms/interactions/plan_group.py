"""Public numbers of released symbols: which columns at which levels, how many a row shows, and which act together.

A plan has one such value for each release of symbols. Without pairs it is a screen: every column at few levels. With
pairs it is what training uses: one column a party, finer, and all parties learn all symbols.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pbmvfl._settings import check_whole, finite
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms.interactions.screen import Column, Selection
from pbmvfl.mechanisms.interactions.symbols import Integers, Levels, Reals, shown_columns
from pbmvfl.mechanisms.randomized_response import LARGEST_SYMBOLS, RandomisedSymbols

#: Products of context features with weights stay far inside float32.
LARGEST_SCALE = 1e3


class ShownColumn(NamedTuple):
    """Column of a party in symbols: its public range, in so many equal parts."""

    column: int
    low: float
    high: float
    levels: int

    @property
    def cuts(self) -> Levels:
        return Levels.equal_parts([(self.low, self.high)], self.levels)

    @property
    def values_L(self) -> Reals:
        """The middle of each part."""
        return self.low + (self.high - self.low) * (np.arange(self.levels) + 0.5) / self.levels


@dataclass(frozen=True, kw_only=True)
class Interactions:
    """Symbols that are released of training rows, and the parties that learn from them."""

    #: For each party the columns that its symbols are made of; none: it sends noise alone.
    columns: tuple[tuple[ShownColumn, ...], ...]
    #: Largest number of its columns that a row shows.
    shown: int
    #: Pure epsilon of one symbol.
    response_epsilon: float
    #: Columns of two parties that act together; all parties then learn all symbols.
    pairs: tuple[tuple[Column, Column], ...] = ()
    #: Factor of context features beside a party's own.
    context_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("response_epsilon", "context_scale"):
            object.__setattr__(self, name, finite(name, getattr(self, name)))
        if not 0 < self.context_scale <= LARGEST_SCALE:
            raise PlanError(f"context_scale={self.context_scale:g} must be above 0 and at most {LARGEST_SCALE:g}")
        check_whole("shown", self.shown, least=1)
        try:
            columns = tuple(tuple(ShownColumn(*each) for each in party) for party in self.columns)
            pairs = tuple((Column(*one), Column(*other)) for one, other in self.pairs)
        except (TypeError, ValueError):
            raise PlanError(
                "columns must be (column, low, high, levels) for each party, and pairs two of (party, column)"
            ) from None
        object.__setattr__(self, "columns", tuple(map(_checked, columns)))
        object.__setattr__(self, "pairs", pairs)
        if not any(columns):
            raise PlanError("columns names none of any party: there is nothing to release")
        if self.num_symbols > LARGEST_SYMBOLS:
            raise PlanError(
                f"shown={self.shown} columns of {self.base} levels make {self.num_symbols} symbols; permitted: at most "
                f"{LARGEST_SYMBOLS}"
            )
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.pairs and (self.shown != 1 or any(len(party) > 1 for party in self.columns)):
            raise PlanError("with pairs every party releases one column or none, and shown must be 1")
        released = {Column(party, each.column) for party, of in enumerate(self.columns) for each in of}
        for one, other in self.pairs:
            if one.party == other.party or not {one, other} <= released:
                raise PlanError(
                    f"pairs has {tuple(one)} with {tuple(other)}; permitted: two (party, column) of different parties "
                    "that are released"
                )
        if len(set(map(frozenset, self.pairs))) < len(self.pairs):
            raise PlanError("pairs names two columns twice")

    # --- what follows ---

    @cached_property
    def base(self) -> int:
        """Levels of a digit: the most of any column."""
        return max(each.levels for party in self.columns for each in party)

    @property
    def num_symbols(self) -> int:
        symbols: int = self.base**self.shown
        return symbols

    @property
    def publishes(self) -> bool:
        """Return whether all parties learn all symbols."""
        return bool(self.pairs)

    @property
    def selection(self) -> Selection:
        return Selection(pairs=self.pairs)

    @property
    def released_by(self) -> tuple[int, ...]:
        """Parties whose symbols say something."""
        return tuple(party for party, columns in enumerate(self.columns) if columns)

    def mechanism(self, num_parties: int) -> RandomisedSymbols:
        return RandomisedSymbols(
            num_parties=num_parties,
            embedding_dim=1,
            bound=1.0,
            secure_aggregation=False,
            symbols=self.num_symbols,
            response_epsilon=self.response_epsilon,
        )

    def places(self, party: int, *, num_rows: int, seed: int) -> Integers:
        """Return which of a party's released columns, by their place among those, each row shows: N x S, public."""
        count = len(self.columns[party])
        return shown_columns(num_rows=num_rows, num_columns=count, shown=min(self.shown, count), seed=seed, party=party)

    def partners(self, party: int) -> Iterator[tuple[ShownColumn, int, ShownColumn]]:
        """Return for every pair that a party is in: its own column, the other party, and that party's column."""
        for _, other in self.selection.partners(party):
            yield self.columns[party][0], other.party, self.columns[other.party][0]

    def context_width(self, party: int) -> int:
        """Return how many context features a row has at a party."""
        return sum(1 + own.levels * other.levels for own, _, other in self.partners(party))

    # --- forms ---

    def to_dict(self) -> dict[str, Any]:
        return {
            "columns": [[list(each) for each in party] for party in self.columns],
            "shown": self.shown,
            "response_epsilon": self.response_epsilon,
            "pairs": [[list(one), list(other)] for one, other in self.pairs],
            "context_scale": self.context_scale,
        }

    @classmethod
    def of(cls, value: object) -> Interactions:
        """Return such a value from one, or from what `to_dict` wrote."""
        if isinstance(value, Interactions):
            return value
        names = {each.name for each in fields(cls)}
        if not isinstance(value, Mapping) or set(value) != names:
            raise PlanError(f"interactions={value!r} must be an object with {', '.join(sorted(names))}")
        for name in ("columns", "pairs"):
            if not isinstance(value[name], Sequence) or isinstance(value[name], str):
                raise PlanError(f"{name}={value[name]!r} must be a list")
        return cls(**value)


def _checked(columns: tuple[ShownColumn, ...]) -> tuple[ShownColumn, ...]:
    found = []
    for each in columns:
        check_whole("column", each.column, least=0)
        check_whole("levels", each.levels, least=2, most=LARGEST_SYMBOLS)
        low, high = finite("low", each.low), finite("high", each.high)
        if not low < high or not np.isfinite(high - low):
            raise PlanError(f"low={low:g}, high={high:g} must be two numbers that rise")
        found.append(ShownColumn(each.column, low, high, each.levels))
    numbers = [each.column for each in found]
    if sorted(set(numbers)) != numbers:
        raise PlanError(f"columns={numbers} of a party must rise")
    return tuple(found)
