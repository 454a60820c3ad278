"""Public maps of a party's columns: what its network sees of a row, whatever anybody's rows are.

Shape suffixes: N rows, D columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.errors import EncoderError
from pbmvfl.plan import Plan
from pbmvfl.plan_groups import FeatureMap

#: Wider rows would make matrices that take minutes.
LARGEST_WIDTH = 4096


def feature_shape(plan: Plan, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a mapped row."""
    if plan.features is FeatureMap.COLUMNS:
        return tuple(shape)
    columns = math.prod(shape)
    if columns * (columns + 1) // 2 > LARGEST_WIDTH:
        raise EncoderError(
            f"features=pairs of {columns} columns makes {columns * (columns + 1) // 2:,} numbers a row; permitted: at "
            f"most {LARGEST_WIDTH:,}; plan with features=columns"
        )
    return (columns * (columns + 1) // 2,)


def mapped(plan: Plan, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows as the network takes them: by themselves, or with the product of every two columns beside them.

    With products one dense layer sees how a party's columns go together.
    """
    if plan.features is FeatureMap.COLUMNS:
        return rows
    feature_shape(plan, rows.shape[1:])  # refuses what would be too wide
    rows_ND = rows.reshape(len(rows), math.prod(rows.shape[1:])).astype(np.float32, copy=False)
    left, right = np.triu_indices(rows_ND.shape[1], k=1)
    return np.concatenate((rows_ND, rows_ND[:, left] * rows_ND[:, right]), axis=1)
