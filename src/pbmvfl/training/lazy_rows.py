"""Rows that stay in a mapped file: a batch of them is gathered, and mapped by the public map, when it is needed.

A party's columns may be larger than its memory. Whatever is computed over all rows is computed piece by piece.

Shape suffixes: N rows, D columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from pbmvfl.plan.plan import Plan
from pbmvfl.training.features import feature_shape, mapped

#: Of mapped rows that are looked at together.
_PIECE_BYTES = 4 << 20


def is_mapped(rows: object) -> TypeGuard[np.memmap[Any, Any]]:
    """Whether rows stay in their file. One that can be written to, as a scratch file, is taken for an array."""
    return isinstance(rows, np.memmap) and not rows.flags.writeable


class LazyRows:
    """The rows of a mapped file as `features.mapped` would give them, some at a time."""

    def __init__(self, plan: Plan, rows: np.memmap[Any, Any]) -> None:
        self._plan = plan
        #: The columns in their file, before the map: the same memory without memmap's bookkeeping, which would cost
        #: more than a small batch.
        self.raw: npt.NDArray[Any] = rows.view(np.ndarray)
        self.shape = (len(rows), *feature_shape(plan, rows.shape[1:]))
        self.dtype: np.dtype[Any] = mapped(plan, self.raw[:0]).dtype
        self.piece_rows = max(1, _PIECE_BYTES // max(1, math.prod(self.shape[1:]) * self.dtype.itemsize))

    def __len__(self) -> int:
        return int(self.shape[0])

    def take(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """These rows, in this order, as an array of their own."""
        return mapped(self._plan, self.raw.take(rows, axis=0))

    def pieces(self) -> Iterator[npt.NDArray[Any]]:
        """All rows in their order."""
        for start in range(0, len(self), self.piece_rows):
            yield mapped(self._plan, np.array(self.raw[start : start + self.piece_rows]))
