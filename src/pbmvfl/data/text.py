"""Conversion of text cells to numbers or truth values, each cell by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]

_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")


def is_text(kind: Any) -> bool:
    """Return True for Arrow's types of text."""
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def among(column: Any, words: Iterable[str]) -> Mask:
    """Return the mask of cells that, without surrounding blanks, are one of `words`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found = pc.is_in(_trimmed(column), value_set=pa.array(list(words), pa.string()))
    return np.asarray(found.to_numpy(), dtype=bool)


def numbers_of(column: Any, absent: Mask) -> tuple[npt.NDArray[np.float64], Mask]:
    """Return the values, and the mask of cells that are no number; values are NaN where absent or wrong."""
    import pyarrow as pa

    text = _without(_trimmed(column), absent)
    nothing = np.zeros(len(text), dtype=bool)
    try:
        return _floats(text.cast(pa.float64())), nothing
    except pa.ArrowException:  # Arrow does not say which cells, and its message has a value in it
        values = np.full(len(text), np.nan)
        wrong = nothing
        for row, cell in enumerate(text.to_pylist()):
            if cell is not None:
                values[row], wrong[row] = _float(cell)
        return values, wrong


def truths_of(column: Any, absent: Mask) -> tuple[Any, Mask]:
    """Return an Arrow column of true and false, and the mask of cells that are neither."""
    import pyarrow as pa

    yes, no = among(column, _TRUE), among(column, _FALSE)
    return pa.chunked_array([pa.array(yes, mask=~(yes | no) | absent)]), ~(yes | no | absent)


def are_dates(column: Any, absent: Mask) -> bool:
    """Return True if every cell that has a value begins like 2024-12-31 or 31.12.2024 or 12/31/2024."""
    import pyarrow.compute as pc

    found = pc.match_substring_regex(_trimmed(column), r"^(\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2,4})")
    return bool((np.asarray(found.fill_null(False).to_numpy(), dtype=bool) | absent).all() and not absent.all())


def infer(column: Any, absent: Mask) -> Any:
    """Convert text to the first type that fits all cells of a column: whole numbers, numbers, true and false, words."""
    import pyarrow as pa

    if absent.all():
        return pa.chunked_array([pa.nulls(len(column))])
    values, wrong = numbers_of(column, absent)
    if not wrong.any():
        try:
            # After the numbers: to Arrow 0x10 is a whole number and no number.
            return _without(_trimmed(column), absent).cast(pa.int64())
        except pa.ArrowException:
            return pa.chunked_array([pa.array(values, from_pandas=True)])
    truths, wrong = truths_of(column, absent)
    return column if wrong.any() else truths


def _trimmed(column: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.utf8_trim_whitespace(column.cast(pa.string()))


def _without(text: Any, absent: Mask) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.if_else(pa.array(absent), pa.scalar(None, pa.string()), text) if absent.any() else text


def _floats(column: Any) -> npt.NDArray[np.float64]:
    return np.asarray(column.to_numpy(), dtype=np.float64)


def _float(cell: str) -> tuple[float, bool]:
    try:
        value = float(cell)
    except ValueError:
        return np.nan, True
    return (np.nan, True) if "_" in cell else (value, False)  # 1_000 is a number to Python alone
