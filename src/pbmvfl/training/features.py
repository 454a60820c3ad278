"""Public maps of a party's columns, and rows that stay in a memory-mapped file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from pbmvfl._compiled import compiled
from pbmvfl.data.encoding import LARGEST_COLUMN
from pbmvfl.errors import EncoderError
from pbmvfl.plan.groups import Algorithm, FeatureMap, feature_width
from pbmvfl.plan.local_search import block_sides, dense_columns
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.shapes import PartyShapes

# --- Public maps of a party's columns to the inputs of its network; they depend on no rows ---
#     columns   the columns by themselves
#     pairs     and the product of every two beside them
#     values    for every column and each of L values, equally spaced from 0 to 1, whether the column is nearest to it;
#               and half as much for every two columns and each of L^2 pairs of values
#     shapes    for every column hat functions at its public knots, and products of coarse ones of every two; which
#               knots is up to each party's columns (`plan.shapes`)
#
# Pictures that parties learn from alone, by one dense layer, are made smaller first: blocks of points become their
# mean, which is scaled from 0..255 to [-1, 1].
#
# With the latter three maps, one dense layer sees interactions of a party's columns. Rows of `values` all have the norm
# of a row of as many ones.
#
# Every map is total on columns that are permitted (at most LARGEST_COLUMN in size), and so is what follows: results are
# clipped to the same bound. Whether a row is accepted depends on its columns alone, by one rule for all maps.
#
# Shape suffixes: N rows, D columns, L values, H hats.


#: Wider rows would make matrices that take minutes.
LARGEST_WIDTH = 4096
_PAIR_WEIGHT = 0.5
_PICTURES_AT_A_TIME = 1024


def feature_shape(plan: Plan, shape: Sequence[int], *, index: int | None = None) -> tuple[int, ...]:
    """Return the shape of a mapped row; refuse maps that would be too wide, or are for other columns."""
    if _takes_pictures(plan, shape):
        return (dense_columns(shape),)
    if plan.features is FeatureMap.COLUMNS:
        return tuple(shape)
    width = feature_width(plan.features, math.prod(shape), plan.column_values)
    if plan.features is FeatureMap.SHAPES:
        shapes = _shapes_of(plan, index)
        if shapes.num_columns != math.prod(shape):
            raise EncoderError(
                f"party={index}: shapes={shapes} are of {shapes.num_columns} columns, but its rows have "
                f"{math.prod(shape)}; plan for these columns"
            )
        width = shapes.width
    if width > LARGEST_WIDTH:
        raise EncoderError(
            f"features={plan.features} of {math.prod(shape)} columns makes {width:,} numbers a row; permitted: at most "
            f"{LARGEST_WIDTH:,}; plan with features=columns"
        )
    return (width,)


def mapped(plan: Plan, rows: npt.NDArray[Any], *, index: int | None = None) -> npt.NDArray[Any]:
    """Return rows as the network takes them: columns by themselves, or what a map makes of them, within the bound.

    Args:
        plan: The training plan.
        rows: Columns of some rows.
        index: The party's number, which maps that differ from party to party need.
    """
    if _takes_pictures(plan, rows.shape[1:]):
        return _clipped(_points(rows))
    if plan.features is FeatureMap.COLUMNS:
        return rows
    feature_shape(plan, rows.shape[1:], index=index)  # refuses what would be too wide
    rows_ND = rows.reshape(len(rows), math.prod(rows.shape[1:])).astype(np.float32, copy=False)
    if plan.features is FeatureMap.SHAPES:
        return _shaped(rows_ND, _shapes_of(plan, index))
    return _clipped(_pairs(rows_ND)) if plan.features is FeatureMap.PAIRS else _values(rows_ND, plan.column_values)


def _clipped(found_ND: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Clip to the bound in place, so that no result of a map is out of scale where its columns are not."""
    return np.clip(found_ND, -LARGEST_COLUMN, LARGEST_COLUMN, out=found_ND)


def _takes_pictures(plan: Plan, shape: Sequence[int]) -> bool:
    """Return True if rows are pictures and the network is one dense layer that a party trains alone."""
    alone = plan.algorithm is Algorithm.STAGED and plan.features is FeatureMap.COLUMNS
    return len(shape) == 3 and plan.encoder == "linear" and alone


def _points(pictures: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return means of blocks, some pictures at a time: as floats, all together would take four times their memory."""
    rows, (channels, height, width) = len(pictures), pictures.shape[1:]
    down, across = block_sides(pictures.shape[1:])
    found = np.empty((rows, channels * (height // down) * (width // across)), dtype=np.float32)
    for start in range(0, rows, _PICTURES_AT_A_TIME):
        some = pictures[start : start + _PICTURES_AT_A_TIME]
        blocks = some.reshape(len(some), channels, height // down, down, width // across, across)
        means = blocks.mean(axis=(3, 5), dtype=np.float32).reshape(len(some), -1)
        found[start : start + len(some)] = means / 127.5 - 1 if pictures.dtype == np.uint8 else means
    return found


def _pairs(rows_ND: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    left, right = np.triu_indices(rows_ND.shape[1], k=1)
    return np.concatenate((rows_ND, rows_ND[:, left] * rows_ND[:, right]), axis=1)


def _values(rows_ND: npt.NDArray[np.float32], column_values: int) -> npt.NDArray[np.float32]:
    """Map columns to indicators of the nearest values. Total: NaN counts as 0, values outside as the nearer end."""
    count, columns = rows_ND.shape
    nearest_ND = np.rint(np.nan_to_num(rows_ND, nan=0.0).clip(0, 1) * (column_values - 1)).astype(np.int64)
    left, right = np.triu_indices(columns, k=1)
    width = feature_width(FeatureMap.VALUES, columns, column_values)
    found = np.zeros((count, width), dtype=np.float32)
    rows = np.arange(count)[:, None]
    scale = math.sqrt(width / (columns + _PAIR_WEIGHT**2 * len(left))) if columns else 1.0
    found[rows, np.arange(columns) * column_values + nearest_ND] = scale
    together = nearest_ND[:, left] * column_values + nearest_ND[:, right]
    found[rows, columns * column_values + np.arange(len(left)) * column_values**2 + together] = _PAIR_WEIGHT * scale
    return found


def _shapes_of(plan: Plan, index: int | None) -> PartyShapes:
    if index is None:
        raise EncoderError("features=shapes differ from party to party: say whose by index")
    return plan.party_shapes[index]


def _shaped(rows_ND: npt.NDArray[np.float32], shapes: PartyShapes) -> npt.NDArray[np.float32]:
    """Map columns to their hats and products. Total: NaN counts as the lowest knot, values outside as an end."""
    count, coarse, column, at = len(rows_ND), [], 0, 0
    found = np.zeros((count, shapes.width), dtype=np.float32)
    for (_, size), knots, few, factors in zip(
        shapes.columns, shapes.knots(), shapes.coarse_knots(), shapes.coarse, strict=True
    ):
        slots = slice(column, column + (1 if knots else max(1, size)))
        hats_NH = found[:, at : at + max(1, size)]
        if knots:
            _add_hats(rows_ND[:, column], np.array(knots, np.float32), hats_NH)
        else:
            np.clip(rows_ND[:, slots], -LARGEST_COLUMN, LARGEST_COLUMN, out=hats_NH)
        if factors:
            coarse.append(np.zeros((count, factors), dtype=np.float32) if few else hats_NH)
        if few:
            _add_hats(rows_ND[:, column], np.array(few, np.float32), coarse[-1])
        column, at = slots.stop, at + max(1, size)
    for left, right in combinations(coarse, 2):
        for hat in left.T:
            np.multiply(hat[:, None], right, out=found[:, at : at + right.shape[1]])
            at += right.shape[1]
    return found


@compiled
def _add_hats(column_N: Any, knots_H: Any, out_NH: Any) -> None:
    """Set the two hats beside each value, which add up to 1; all others stay 0."""
    last = len(knots_H) - 1
    for row in range(len(column_N)):
        value = column_N[row]
        value = max(knots_H[0], min(value, knots_H[last])) if value == value else knots_H[0]
        lower = max(0, min(np.searchsorted(knots_H, value, side="right") - 1, last - 1))
        share = (value - knots_H[lower]) / (knots_H[lower + 1] - knots_H[lower])
        out_NH[row, lower] = np.float32(1) - share
        out_NH[row, lower + 1] = share


# --- Rows before the public map: a batch is gathered, and mapped, when it is needed ---
#
# A party's columns may be in a memory-mapped file, and larger than its memory, so computations over all rows go piece
# by piece. Pieces also fit a processor's cache.
#
# Shape suffixes: N rows, D columns.


#: Size of a piece of mapped rows.
_PIECE_BYTES = 4 << 20


def is_mapped(rows: object) -> TypeGuard[np.memmap[Any, Any]]:
    """Return True for rows that stay in a read-only file; a writable one, as a scratch file, counts as an array."""
    return isinstance(rows, np.memmap) and not rows.flags.writeable


def following(rows: npt.NDArray[np.int64]) -> slice | None:
    """Return the slice that rows are, if each is the one after the last; else None."""
    count = len(rows)
    if not count or rows[-1] - rows[0] != count - 1 or (rows[1:] - rows[:-1] != 1).any():
        return None
    return slice(int(rows[0]), int(rows[-1]) + 1)


def run_of(rows: npt.NDArray[np.int64], rising: npt.NDArray[np.int64]) -> slice | None:
    """Return the slice of a rising list that rows are, if they are one; else None."""
    start = int(np.searchsorted(rising, rows[0])) if len(rows) else 0
    at = slice(start, start + len(rows))
    return at if np.array_equal(rising[at], rows) else None


class LazyRows:
    """Rows of an array, or of a memory-mapped file, as `features.mapped` would return them, some at a time."""

    def __init__(self, plan: Plan, rows: npt.NDArray[Any], *, index: int | None = None) -> None:
        self._plan, self._index = plan, index
        #: The columns before the map: of a file the same memory without memmap's bookkeeping, which would cost more
        #: than a small batch.
        self.raw: npt.NDArray[Any] = rows.view(np.ndarray)
        self.shape = (len(rows), *feature_shape(plan, rows.shape[1:], index=index))
        none = self.raw[:0]
        #: Whether the map leaves columns as they are.
        self.is_raw = self._mapped(none) is none
        self.dtype: np.dtype[Any] = self._mapped(none).dtype
        #: Size of a mapped row.
        self.row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        self.piece_rows = max(1, _PIECE_BYTES // max(1, self.row_bytes))

    def __len__(self) -> int:
        return int(self.shape[0])

    def take(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return these rows, in this order, as a new array."""
        at = following(rows)
        return self._mapped(self.raw.take(rows, axis=0) if at is None else np.array(self.raw[at]))

    def _mapped(self, columns: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return mapped(self._plan, columns, index=self._index)
