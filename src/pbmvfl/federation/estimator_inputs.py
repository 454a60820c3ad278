"""Inputs of the estimator: frames and arrays, labels, and who holds which column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pbmvfl._text import counted
from pbmvfl.data.column_rules import parse_columns
from pbmvfl.data.faults import Faults, Place, listed, nearest
from pbmvfl.data.labels import NO_REGRESSION
from pbmvfl.data.vertical import Array, column_blocks, numbered_parties, require_party_count
from pbmvfl.errors import DataError

# --- frames and arrays ---


def is_frame(X: Any) -> bool:
    """Return whether X is a frame of pandas, polars or pyarrow."""
    return hasattr(X, "__arrow_c_stream__") and (hasattr(X, "columns") or hasattr(X, "column_names"))


def names_of(X: Any) -> tuple[str, ...] | None:
    """Return the names of a frame's columns; None for arrays."""
    if not is_frame(X):
        return None
    return tuple(map(str, X.column_names if hasattr(X, "column_names") else X.columns))


def row_names(X: Any) -> tuple[str, ...] | None:
    """Return the index of a pandas frame as texts; None if it does not tell the rows apart."""
    index: Any = getattr(X, "index", None)
    if not hasattr(index, "is_unique") or index.hasnans:
        return None
    # 7 and 7.0 are one name: operations on other columns can turn an index of integers into one of floats.
    names = tuple(str(int(each) if isinstance(each, float) and each.is_integer() else each) for each in index)
    return names if len(set(names)) == len(names) else None


def table_of(X: Any, names: Sequence[str]) -> Any:
    """Return a table that column rules can read: a frame as it is, an array with these names."""
    if is_frame(X):
        return X
    import pyarrow as pa

    try:
        return pa.table({name: pa.array(X[:, column]) for column, name in enumerate(names)})
    except (pa.ArrowException, TypeError):  # its words may have a value in them
        raise DataError("X has a column with values of several types; give a DataFrame") from None


def check_labels(y: Any) -> None:
    """Refuse labels that are missing, or of several types.

    scikit-learn takes them for a regression target, or its message does not name the row.

    Raises:
        DataError: A row has no label, or labels have several types.
    """
    # A list of words and gaps would become an array of words, one of which is "nan".
    values = np.asarray(y, dtype=object if isinstance(y, list | tuple) else None)
    if y is None or values.dtype != object:
        return
    missing = [row for row, each in enumerate(values.ravel()) if _is_missing(each)]
    if missing:
        raise DataError(f"y: {Place(file='y').rows(missing)} without a label; every row needs one")
    if len({isinstance(each, str) for each in values.ravel()}) > 1:
        raise DataError("y has words and other values; give labels of one type")


def refuse_amounts(y: Any) -> None:
    """Refuse a regression target: numbers that are not whole. Too many classes are refused where they are numbered.

    Raises:
        DataError: A label is a number that is not whole.
    """
    values = np.asarray(y)
    if values.dtype.kind != "f" or not np.isfinite(values).all():
        return
    if (values != np.floor(values)).any():
        raise DataError(
            f"y: Unknown label type: continuous: {len(np.unique(values)):,} different numbers, not all of them whole; "
            f"{NO_REGRESSION}"
        )


def _is_missing(label: Any) -> bool:
    """Return whether a label is None, not equal to itself, or not comparable."""
    try:
        return label is None or not bool(label == label)
    except (TypeError, ValueError):
        return True


def parts_of(X: Array, held: Mapping[str, Sequence[int]]) -> tuple[Array, ...]:
    """Return each party's columns of an array."""
    return tuple(np.ascontiguousarray(X[:, list(own)]) for own in held.values())


# --- who holds which column ---


def held_by_number(
    columns: Any, num_parties: int, *, names: tuple[str, ...] | None, width: int
) -> dict[str, list[int]]:
    """Return the numbers of the columns that each party holds.

    Args:
        columns: Names or numbers of columns by party, or their text; None for blocks of columns.
        num_parties: How many parties share the columns, where `columns` is None.
        names: Names of the columns; None for an array.
        width: Number of columns.

    Raises:
        DataError: A column does not exist or has two parties, or a party has none.
    """
    if columns is None:
        require_party_count(num_parties)
        if num_parties > width:
            raise DataError(
                f"n_features={width} cannot be shared by num_parties={num_parties}: each party needs at least "
                "one column; give more columns or fewer parties, of which there are at least 2"
            )
        blocks = column_blocks("columns", width, num_parties)
        parties = numbered_parties(num_parties)
        return {party: block.tolist() for party, block in zip(parties, blocks, strict=True)}
    lists = _lists(parse_columns(columns) if isinstance(columns, str) else columns)
    words = [column for own in lists.values() for column in own if isinstance(column, str)]
    if words and names is None:
        raise DataError(
            f"columns are named {listed(words)}, and X is an array, whose columns have no names; give numbers from "
            f"0 to {width - 1}, or a DataFrame (in a pipeline, steps keep names with "
            'set_output(transform="pandas"))'
        )
    held: dict[str, list[int]] = {}
    faults = Faults()
    for party, own in lists.items():
        found = [_number_of(column, names or (), width, faults) for column in own]
        for column, number in zip(own, found, strict=True):
            others = [other for other, taken in held.items() if number in taken]
            if number is not None and (others or found.count(number) > 1):
                who = " and ".join(f"party={each!r}" for each in [*others, party])
                faults.add(f"column={column!r} is named twice ({who}); each column belongs to one party, once")
        held[party] = [number for number in found if number is not None]
    faults.raise_any()
    return held


def _lists(columns: Any) -> dict[str, list[Any]]:
    """Return every party's columns as a list; refuse a value of another form."""
    form = 'columns must be of the form {"bank": ["age", "job"], "shop": ["visits"]}'
    if not isinstance(columns, Mapping) or not all(isinstance(party, str) and party for party in columns):
        raise DataError(f"columns={columns!r}; {form}")
    if len(columns) < 2:
        raise DataError(f"columns name {counted(len(columns), 'party', 'parties')}, and at least 2 are needed; {form}")
    for party, own in columns.items():
        if isinstance(own, str) or not isinstance(own, Iterable) or not list(own):
            raise DataError(f"party={party!r}: columns={own!r} is not a list of columns; {form}")
    return {party: list(own) for party, own in columns.items()}


def _number_of(column: Any, names: tuple[str, ...], width: int, faults: Faults) -> int | None:
    """Return a column's number, given its name or its number; None after noting a fault."""
    if isinstance(column, int | np.integer) and not isinstance(column, bool):
        if 0 <= column < width:
            return int(column)
        faults.add(f"column={column} is not there; X has {width} columns, 0 to {width - 1}")
    elif not isinstance(column, str):
        faults.add(f"column={column!r} must be a column's name or its number")
    elif column not in names:
        faults.add(f"column={column!r} is not in X{nearest(column, names)}; it has {listed(names)}")
    else:
        return names.index(column)
    return None
