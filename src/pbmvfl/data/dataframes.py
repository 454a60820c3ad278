"""DataFrames in memory, one per party, with labels and ids inside or beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pbmvfl.data.column_rules import party_sources
from pbmvfl.data.readers import arrow_table
from pbmvfl.data.tables import load_table
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import DataError

#: Columns that labels and ids beside the frames become; faults name them as the arguments that they are.
_LABELS, _IDS = "labels=", "ids="


def dataset_of_frames(
    frames: Mapping[str, Any],
    *,
    labels: Any,
    ids: Any,
    schema: Mapping[str, Any] | str | Path | None,
    test_fraction: float,
    seed: int,
    name: str | None,
) -> VerticalDataset:
    """Load frames, as `VerticalDataset.from_frames` says."""
    if not isinstance(frames, Mapping) or len(frames) < 2:
        raise DataError('frames must be of the form {"bank": frame, "shop": frame}, with at least 2 parties')
    settings: dict[str, Any] = {"schema": schema, "test_fraction": test_fraction, "seed": seed, "name": name}
    if isinstance(ids, str):
        if not isinstance(labels, str):
            raise DataError(
                f"ids={ids!r} joins the frames' rows, so labels beside them belong to no row; put the labels into one "
                "of the frames and give the column's name"
            )
        return load_table(frames, label=labels, id=ids, **settings)
    import pyarrow as pa

    tables = {party: arrow_table(source) for party, source in party_sources(frames).items()}
    first, count = next((party, table.num_rows) for party, table in tables.items())
    if any(table.num_rows != count for table in tables.values()):
        said = ", ".join(f"{party} has {table.num_rows:,}" for party, table in tables.items())
        raise DataError(f"frames have different numbers of rows: {said}; give ids, the name of a column that all have")
    if not isinstance(labels, str):
        tables[first] = _with(tables[first], _LABELS, _column(labels, _LABELS))
    names = pa.array([str(row) for row in range(count)]) if ids is None else _column(ids, _IDS)
    tables = {party: _with(table, _IDS, names) for party, table in tables.items()}
    found = load_table(tables, label=labels if isinstance(labels, str) else _LABELS, id=_IDS, **settings)
    return replace(found, rows_are_named=ids is not None)


def _with(table: Any, name: str, column: Any) -> Any:
    if len(column) != table.num_rows:
        raise DataError(
            f"{name} has {len(column):,} values for {table.num_rows:,} rows; give one per row, in their order"
        )
    return table.append_column(name, column)


def _column(values: Any, name: str) -> Any:
    import pyarrow as pa

    try:
        found = values if isinstance(values, pa.ChunkedArray) else pa.array(values, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError):  # Arrow's message may have a value in it
        raise DataError(
            f"{name} must be a list, an array or a series of words, whole numbers, or true and false"
        ) from None
    return found.cast(found.type.value_type) if pa.types.is_dictionary(found.type) else found
