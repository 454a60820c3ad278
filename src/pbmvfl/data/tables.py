"""Loading of the user's own tables: one for all parties with the columns of each named, or one per party."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pbmvfl._text import counted
from pbmvfl.crypto.public_streams import SPLIT_STREAM, public_permutation
from pbmvfl.data.column_rules import PartyColumns, check_name, default_name, held_columns, party_sources, resolved
from pbmvfl.data.encoding import Features
from pbmvfl.data.faults import Faults
from pbmvfl.data.joining import Aligned, read_each, read_one
from pbmvfl.data.labels import Labels, classes_of_test_rows_alone, label_values, number_classes
from pbmvfl.data.readers import arrow_table, column_names, feature_names, source_of, stem_of
from pbmvfl.data.schema import Schema, read_schema
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import DataError


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """Encoded rows of the training table and, if there is one, of the test table."""

    splits: list[Aligned]
    columns: tuple[PartyColumns, ...]
    features: list[tuple[Features, ...]]
    class_names: tuple[str, ...]
    #: None without a label.
    labels: list[Labels] | None


def prepare(
    tables: Sequence[Any],
    *,
    held: Mapping[str, Sequence[str]] | None,
    label: str | None,
    id: str | None,
    label_data: Any,
    schema: Mapping[str, Any] | str | Path | None,
) -> Prepared:
    """Read, join, check and encode as far as possible, then raise all faults at once."""
    faults = Faults()
    rules = read_schema(schema, faults)
    splits: list[Aligned] = []
    for table in tables:
        found = _read(table, held, label, id, label_data, rules, faults)
        if found is not None:
            splits.append(found)
            held = found.held  # a test table needs the columns that the training rows have
    for split in splits[:1]:
        files = " or ".join(dict.fromkeys(place.file for place in split.places.values()))
        rules.refuse_absent(split.present, files, faults)
    columns = _columns(splits[0], rules, faults) if splits else ()
    features = [
        tuple(part.encode_present(split.tables[part.party], split.places[part.party], faults) for part in columns)
        for split in splits
    ]
    classes, labels = ((), None) if label is None else _labels(splits, label, faults)
    faults.raise_any()
    return Prepared(splits=splits, columns=columns, features=features, class_names=classes, labels=labels)


def _read(
    data: Any,
    held: Mapping[str, Sequence[str]] | None,
    label: str | None,
    id: str | None,
    label_data: Any,
    rules: Schema,
    faults: Faults,
) -> Aligned | None:
    if not isinstance(data, Mapping):
        assert held is not None
        if label_data is not None:
            raise DataError("label_data goes with a table for each party; with one table for all it has the label")
        return read_one(source_of(data), held=held, label=label, id=id, rules=lambda _: rules.rules, faults=faults)
    if len(data) < 2:
        raise DataError(f"there are tables of {counted(len(data), 'party', 'parties')}; at least 2 parties are needed")
    if id is None:
        raise DataError("id is needed with a table for each party: name the column by which the rows are joined")
    return read_each(
        party_sources(data),
        held=held,
        label=label,
        label_source=None if label_data is None else source_of(label_data, called="frame of labels"),
        id=id,
        rules=lambda _: rules.rules,
        faults=faults,
    )


def _columns(split: Aligned, rules: Schema, faults: Faults) -> tuple[PartyColumns, ...]:
    found = []
    for party, names in split.held.items():
        table, place = split.tables[party], split.places[party]
        own = [resolved(name, rules, table.column(name), place, faults) for name in names if name in table.column_names]
        found.append(PartyColumns(party=party, rules=tuple(rule for rule in own if rule is not None)))
    return tuple(found)


def _labels(splits: Sequence[Aligned], label: str, faults: Faults) -> tuple[tuple[str, ...], list[Labels]]:
    raw = [label_values(split.label, label, split.label_place, faults) for split in splits if split.label is not None]
    read = [values for values in raw if values is not None]
    return number_classes(read, label, faults) if read and len(read) == len(splits) else ((), [])


#: Columns that a note names; it counts the others.
_MOST_NAMES = 5


def load_table(
    source: Any,
    *,
    label: str,
    columns: Mapping[str, Sequence[str]] | str | None = None,
    id: str | None = None,
    label_data: Any = None,
    test: Any = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    schema: Mapping[str, Any] | str | Path | None = None,
    name: str | None = None,
) -> VerticalDataset:
    """Load a data set from a table, or from one table per party.

    A table is the path of a .parquet or .csv file, a DataFrame (pandas, polars) or a pyarrow table.

    Args:
        source: A table for all parties, or one per party, {"bank": "bank.csv", "shop": "shop.parquet"}, joined by `id`.
        label: Column of the labels, which belong to the server.
        columns: Each party's columns, {"bank": ["age"], ...} or "bank=age;shop=item". With a table per party it may be
            left out: a party then holds all columns but the id and the label.
        id: Column that identifies rows. Ledgers identify rows by it, else by their number in the file, whatever the
            split; with a limit, only by an `id`.
        label_data: With a table per party, a table of id and label where no party's table has the label.
        test: A table of test rows, of the same form as `source`.
        test_fraction: Without `test`, the share of rows kept for testing, chosen by `seed`; 0 keeps none.
        seed: Public seed of that choice.
        schema: What is public about the columns, as a mapping or a JSON file:
            {"columns": {"job": {"vocabulary": ["a", "b"], "other": true}, "age": {"range": [0, 120]}}}; with
            "missing": true a column has a slot for missing values.
        name: The owner's name for these people, under which ledgers count what is spent on them: one name, one privacy
            budget. By default the file's name without its ending.

    Returns:
        The data set.

    Raises:
        DataError: With every fault of schema and tables, by row and column, without a value of a column.
    """
    check_name(name)
    if isinstance(test_fraction, bool) or not isinstance(test_fraction, int | float) or not 0 <= test_fraction < 1:
        raise DataError(
            f"test_fraction={test_fraction!r} is not permitted; give a number between 0 and 1, 1 excluded; 0 is no "
            "test rows"
        )
    if not isinstance(label, str) or not isinstance(id, str | None):
        raise DataError(f"label={label!r} and id={id!r} must be names of columns; only id may be left out")
    by_party = isinstance(source, Mapping)
    held = held_columns(columns, label, id, by_party=by_party)
    if test is not None and isinstance(test, Mapping) is not by_party:
        raise DataError("test must be given as the training data is: one table for all, or one for each party")
    tables = [source] if test is None else [source, test]
    found = prepare(tables, held=held, label=label, id=id, label_data=label_data, schema=schema)
    features, labels = list(found.features), found.labels
    assert labels is not None
    ids = [_row_ids(found.splits[0])]
    if test is not None:
        ids.append(_row_ids(found.splits[1], of=_prefix(source, test)))
    else:
        features, labels, ids = _cut(features[0], labels[0], ids[0], test_fraction, seed)
    own_notes = [note for split in found.splits for note in split.notes]
    found.splits.clear()  # the tables, which are in memory beside the rows that they became
    found.features.clear()
    _forget_tables()
    return VerticalDataset(
        name=default_name(source) if name is None else name,
        party_names=tuple(part.party for part in found.columns),
        train_features=features[0],
        test_features=features[1],
        train_labels=labels[0],
        test_labels=labels[1],
        class_names=found.class_names,
        default_encoder="mlp",
        layout="assigned",
        notes=(
            *_unscaled(found.columns),
            *own_notes,
            *classes_of_test_rows_alone(found.class_names, labels[0], labels[1]),
        ),
        train_ids=ids[0],
        test_ids=ids[1],
        rows_are_named=id is not None,
        columns=found.columns,
        label=label,
    )


@dataclass(frozen=True, kw_only=True)
class CheckedTable:
    """Table and schema that go together."""

    num_rows: int
    columns: tuple[PartyColumns, ...]
    class_names: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        widths = [
            f"{part.party}: {counted(len(part.rules), 'column becomes', 'columns become')} "
            f"{counted(part.width, 'number')}"
            for part in self.columns
        ]
        classes = [f"classes: {', '.join(self.class_names)}"] if self.class_names else []
        return "\n".join([f"fine: {counted(self.num_rows, 'row')}", *widths, *classes, *self.notes])


def check_table(
    source: Any,
    *,
    schema: Mapping[str, Any] | str | Path | None,
    columns: Mapping[str, Sequence[str]] | str | None = None,
    label: str | None = None,
    id: str | None = None,
    label_data: Any = None,
) -> CheckedTable:
    """Check that `load_table` would accept the tables; without a label, the label is not checked.

    With one table for all and no `columns`, all of its columns are checked, whichever party will hold them.

    Raises:
        DataError: With all faults.
    """
    by_party = isinstance(source, Mapping)
    notes: list[str] = []
    if columns is None and not by_party:
        faults, whole = Faults(), source_of(source)
        present = column_names(whole, faults)
        faults.raise_any()
        held: Mapping[str, Sequence[str]] | None = {"table": feature_names(whole, present or [], (label, id), notes)}
    else:
        held = held_columns(columns, label, id, by_party=by_party)
    found = prepare([source], held=held, label=label, id=id, label_data=label_data, schema=schema)
    return CheckedTable(
        num_rows=found.splits[0].num_rows,
        columns=found.columns,
        class_names=found.class_names,
        notes=(*_unscaled(found.columns), *notes, *found.splits[0].notes),
    )


def _row_ids(split: Aligned, *, of: str = "") -> tuple[str, ...]:
    return split.ids or tuple(f"{of}{row}" for row in range(split.num_rows))


def _prefix(source: Any, test: Any) -> str:
    """Return the prefix of row numbers: the file's name keeps its rows apart from those of the training file."""
    if isinstance(source, Mapping) or test is source:
        return ""
    are_files = isinstance(source, str | Path) and isinstance(test, str | Path)
    return "" if are_files and os.path.samefile(source, test) else f"{stem_of(test)}:"


def _forget_tables() -> None:
    """Give back the memory that reading took: training needs it."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()


def _cut(
    features: tuple[Features, ...], labels: Labels, ids: tuple[str, ...], test_fraction: float, seed: int
) -> tuple[list[tuple[Features, ...]], list[Labels], list[tuple[str, ...]]]:
    """Split the rows into training and test rows by the public seed."""
    count = len(labels)
    num_test = math.ceil(count * test_fraction)
    if count - num_test < 1:
        raise DataError(f"test_fraction={test_fraction} of {count} rows leaves none for training; give less")
    order = public_permutation(count, seed=seed, stream=SPLIT_STREAM)
    chosen = (order[: count - num_test], order[count - num_test :])
    return (
        [tuple(part[rows] for part in features) for rows in chosen],
        [labels[rows] for rows in chosen],
        [tuple(ids[row] for row in np.asarray(rows).tolist()) for rows in chosen],
    )


def _unscaled(columns: Sequence[PartyColumns]) -> list[str]:
    """Return one note on the numeric columns for which the schema has no range, if there are any."""
    names = {
        part.party: [rule.name for rule in part.rules if rule.vocabulary is None and rule.range is None]
        for part in columns
    }
    total = sum(map(len, names.values()))
    if not total:
        return []
    parties = "; ".join(
        f"{party}: {', '.join(found[:_MOST_NAMES])}{' and others' if len(found) > _MOST_NAMES else ''}"
        for party, found in names.items()
        if found
    )
    are = "column has no range in a schema and is" if total == 1 else "columns have no range in a schema and are"
    return [f"{total} {are} used unscaled; see `pbmvfl schema` ({parties})"]


# --- DataFrames in memory, with labels and ids inside or beside them ---


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
