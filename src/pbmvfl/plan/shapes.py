"""Shapes: public maps of single columns to hat functions, and of two columns to products of coarse ones.

A hat function is 1 at its own knot, 0 at all others, and linear between them, so that a network of one layer learns
any curve through the knots. Knots follow from a column's public range alone. A party's shapes are written as

    2u16+5c+1g16+1w3+p4

two columns with 16 uniform knots each, five columns as they are, one with 16 geometric knots, a word of three slots,
and products of every two words or columns with knots, of which four coarse hats are taken. Kinds of knots:

    c   none: the column by itself, as numbers without a range and slots for missing values
    w   none: the slots of a word, one of which is 1; they take the place of hats, in products too
    u   uniform over [-1, 1], to which columns with a range are scaled
    v   uniform over [0, 1], as columns of few known values are
    g   geometric over two decades from the lower end up, and the lower end: for ranges such as [0, 40000], where most
        values are far below the largest

A row's hats of one column have a norm of at most 1, and so have products of two: the norm of a mapped row is at most
the root of how many columns and products there are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

from pbmvfl.errors import PlanError

#: Kinds of columns in a text with a letter for each: as above, and b for the first slot of a word.
KINDS = "cuvgbw"
_WORD = "w"
#: Most slots of a word.
LARGEST_WORD = 4096
#: Far more than noise permits.
LARGEST_KNOTS = 64
#: How far below the largest knot the smallest geometric one is.
_SPAN = 100.0
#: A range from 0 to at least this is wide.
_WIDE = 1000.0
_PART = re.compile(r"([1-9]\d{0,4})c|([1-9]\d{0,4})([uvgw])([1-9]\d{0,3})")
_KINDS = re.compile("bw*|.")
_PRODUCTS = re.compile(r"p([1-9]\d?)")


def kind_of_range(low: float, high: float) -> str:
    """Return the kind of knots for a column with this public range."""
    return "g" if low == 0 and high >= _WIDE else "u"


def knots_of(kind: str, count: int) -> tuple[float, ...]:
    """Return the knots of a kind, ascending, in the units of a scaled column."""
    if kind == "g":
        ratio = _SPAN ** (1 / max(1, count - 2))
        return (-1.0, *(2 * ratio**-power - 1 for power in range(count - 2, -1, -1)))
    low = 0.0 if kind == "v" else -1.0
    return tuple(low + (1 - low) * place / (count - 1) for place in range(count))


@dataclass(frozen=True)
class PartyShapes:
    """Shapes of one party's columns."""

    #: For every column its kind and number of knots; 0 for a column as it is. A word is one column: its slots.
    columns: tuple[tuple[str, int], ...]
    #: Coarse knots of every column in products of two; 0 for no products.
    products: int = 0

    _FORM: ClassVar[str] = "permitted: such as 2u16+5c+1g16+1w3+p4"

    @classmethod
    def of_kinds(cls, kinds: str, knots: int, products: int = 0) -> PartyShapes:
        """Return shapes of columns of these kinds, one letter each; fewer than two knots leave columns as they are."""
        if knots < 2:
            return cls(tuple(("c", 0) for _ in kinds))
        columns = tuple(
            (_WORD, len(part)) if part[0] in "bw" else (part, 0 if part == "c" else knots)
            for part in _KINDS.findall(kinds)
        )
        found = cls(columns, products if products > 1 else 0)
        return found if found.num_pairs else cls(columns)

    @classmethod
    def parse(cls, text: str) -> PartyShapes:
        """Read what `str` wrote.

        Raises:
            PlanError: It is not of this form.
        """
        columns: list[tuple[str, int]] = []
        *parts, last = text.split("+")
        products = _PRODUCTS.fullmatch(last)
        for part in parts if products else (*parts, last):
            found = _PART.fullmatch(part)
            if found is None:
                raise PlanError(f"shapes={text!r} has {part!r}; {cls._FORM}")
            plain, count, kind, knots = found.groups()
            columns += [("c", 0)] * int(plain) if plain else [(kind, int(knots))] * int(count)
        wrong = [knots for kind, knots in columns if kind in "uvg" and not 2 <= knots <= LARGEST_KNOTS]
        wrong += [slots for kind, slots in columns if kind == _WORD and slots > LARGEST_WORD]
        coarse = int(products[1]) if products else 0
        if wrong or not columns or (products and not 2 <= coarse <= LARGEST_KNOTS):
            raise PlanError(f"shapes={text!r}: columns and products have 2 to {LARGEST_KNOTS} knots; {cls._FORM}")
        return cls(tuple(columns), coarse)

    def __str__(self) -> str:
        parts = []
        for (kind, knots), same in groupby(self.columns):
            parts.append(f"{len(list(same))}{kind}{knots or ''}")
        return "+".join([*parts, *([f"p{self.products}"] if self.products else [])])

    @property
    def num_columns(self) -> int:
        """Return how many numbers a row has before it is mapped."""
        return sum(size if kind == _WORD else 1 for kind, size in self.columns)

    @property
    def coarse(self) -> tuple[int, ...]:
        """Return how many numbers each column has in products; 0 for a column as it is, and where there are none."""
        of_kind = {"c": 0} if self.products else dict.fromkeys("cuvgw", 0)
        return tuple(of_kind.get(kind, size if kind == _WORD else self.products) for kind, size in self.columns)

    @property
    def num_pairs(self) -> int:
        """Return how many pairs of columns have products."""
        return math.comb(sum(size > 0 for size in self.coarse), 2)

    @property
    def width(self) -> int:
        """Return how many numbers a mapped row has."""
        products = sum(self.coarse) ** 2 - sum(size**2 for size in self.coarse)
        return sum(size or 1 for _, size in self.columns) + products // 2

    @property
    def norm(self) -> float:
        """Return the largest norm of a mapped row whose other columns are at most 1 in size."""
        return math.sqrt(len(self.columns) + self.num_pairs)

    def knots(self) -> Iterator[tuple[float, ...]]:
        """Yield each column's knots; none for a column as it is, and for a word."""
        for kind, count in self.columns:
            yield () if kind in ("c", _WORD) else knots_of(kind, count)

    def coarse_knots(self) -> Iterator[tuple[float, ...]]:
        """Yield the coarse knots of each column, for products; none for a column as it is, and for a word."""
        for kind, _ in self.columns:
            yield knots_of(kind, self.products) if kind in "uvg" and self.products else ()


def parse_shapes(text: str) -> tuple[PartyShapes, ...]:
    """Return every party's shapes, from a plan's text; none from an empty one."""
    return tuple(PartyShapes.parse(part) for part in text.split(";")) if text else ()


def join_shapes(shapes: Sequence[PartyShapes]) -> str:
    """Return a plan's text of all parties' shapes."""
    return ";".join(map(str, shapes))
