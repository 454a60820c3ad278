"""Public maps of a party's columns: what its network sees of a row, whatever anybody's rows are.

    columns   the columns by themselves
    pairs     and the product of every two beside them
    values    for every column and each of L values, equally spaced from 0 to 1, whether the column is nearest to it;
              and half as much for every two columns and each of L^2 pairs of values

With the latter two, one dense layer sees how a party's columns go together. Rows of `values` all have the norm of a row
of as many ones.

Shape suffixes: N rows, D columns, L values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.errors import EncoderError
from pbmvfl.plan import Plan
from pbmvfl.plan_groups import FeatureMap, feature_width

#: Wider rows would make matrices that take minutes.
LARGEST_WIDTH = 4096
_PAIR_WEIGHT = 0.5


def feature_shape(plan: Plan, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a mapped row."""
    if plan.features is FeatureMap.COLUMNS:
        return tuple(shape)
    width = feature_width(plan.features, math.prod(shape), plan.column_values)
    if width > LARGEST_WIDTH:
        raise EncoderError(
            f"features={plan.features} of {math.prod(shape)} columns makes {width:,} numbers a row; permitted: at most "
            f"{LARGEST_WIDTH:,}; plan with features=columns"
        )
    return (width,)


def mapped(plan: Plan, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows as the network takes them."""
    if plan.features is FeatureMap.COLUMNS:
        return rows
    feature_shape(plan, rows.shape[1:])  # refuses what would be too wide
    rows_ND = rows.reshape(len(rows), math.prod(rows.shape[1:])).astype(np.float32, copy=False)
    return _pairs(rows_ND) if plan.features is FeatureMap.PAIRS else _values(rows_ND, plan.column_values)


def _pairs(rows_ND: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    left, right = np.triu_indices(rows_ND.shape[1], k=1)
    return np.concatenate((rows_ND, rows_ND[:, left] * rows_ND[:, right]), axis=1)


def _values(rows_ND: npt.NDArray[np.float32], column_values: int) -> npt.NDArray[np.float32]:
    """Total: what is no number counts as 0, and what lies outside as the nearer end."""
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
