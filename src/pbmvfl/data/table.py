"""Tables of one's own, with the columns named for each party, or a table per party."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pbmvfl.data.columns import PartyColumns, resolved
from pbmvfl.data.encoding import Features, encode_columns
from pbmvfl.data.faults import Faults, nearest
from pbmvfl.data.joining import Aligned, read_each, read_one
from pbmvfl.data.labels import Labels, classes_of_test_rows_alone, label_values, number_classes
from pbmvfl.data.reading import Source, source_of
from pbmvfl.data.schema import Schema, read_schema
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import DataError
from pbmvfl.randomness.public import SPLIT_STREAM, public_permutation


def parse_columns(text: str, *, may_share: bool = False) -> dict[str, tuple[str, ...]]:
    """Who holds which column, from "bank=a,b,c;hospital=d,e". Files of their own `may_share` a column's name."""
    columns: dict[str, tuple[str, ...]] = {}
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        party, equals, names = (piece.strip() for piece in part.partition("="))
        if not equals or not party:
            raise DataError(f"columns={text!r}: {part!r} is not of the form party=column,column;party=column")
        if party in columns:
            raise DataError(f"columns={text!r}: party={party!r} occurs twice; list all its columns in one place")
        columns[party] = tuple(filter(None, (name.strip() for name in names.split(","))))
    return _check_assignment(columns, may_share=may_share)


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
    """A data set from a table: `columns` says which party holds which, `label` is the server's.

    A table is the path of a .parquet or .csv file, a DataFrame (pandas, polars) or a pyarrow table. Or give one per
    party, {"bank": "bank.csv", "shop": "shop.parquet"}, and the `id` column by which their rows are joined; the label
    stands in one of them or, beside the id, in `label_data`. `columns` may then be left out: a party holds all others.

    Without a `test` table, `test_fraction` of the rows, chosen by the public `seed`, are kept for testing; 0 is none.
    Ledgers know rows by their `id`, or by their number in the file, whatever the split.
    `schema` is public: {"columns": {"job": {"vocabulary": ["a", "b"], "other": true}, "age": {"range": [0, 120]}}};
    with "missing": true a column has a slot for missing values.
    `name` is the owner's name for these people, under which ledgers count what is spent on them: one name, one budget.
    By default it is the file's name without its ending.

    Every fault of schema and tables is named in one error, with row and column, and without a value of a column.
    """
    check_name(name)
    if isinstance(test_fraction, bool) or not isinstance(test_fraction, int | float) or not 0 <= test_fraction < 1:
        raise DataError(
            f"test_fraction={test_fraction!r} is not permitted; give a number from 0 (no test rows) to less than 1"
        )
    by_party = isinstance(source, Mapping)
    held = _held(columns, label, id, by_party=by_party)
    if test is not None and isinstance(test, Mapping) is not by_party:
        raise DataError("test must be given as the training data is: one table for all, or one for each party")
    faults = Faults()
    rules = read_schema(schema, faults)
    splits: list[Aligned] = []
    for data in (source,) if test is None else (source, test):
        found = _read(data, held, label, id, label_data, rules, faults)
        if found is not None:
            splits.append(found)
            held = found.held  # a test table needs the columns that the training rows have
    _refuse_unknown(rules, splits, faults)
    party_columns = _columns(splits[0], rules, faults) if splits else ()
    features = [_features(split, party_columns, faults) for split in splits]
    classes, labels = _labels(splits, label, faults)
    faults.raise_any()
    ids = [_row_ids(splits[0])]
    if test is not None:
        ids.append(_row_ids(splits[1], of=_prefix(source, test)))
    else:
        features, labels, ids = _cut(features[0], labels[0], ids[0], test_fraction, seed)
    return VerticalDataset(
        name=default_name(source) if name is None else name,
        party_names=tuple(part.party for part in party_columns),
        train_features=features[0],
        test_features=features[1],
        train_labels=labels[0],
        test_labels=labels[1],
        class_names=classes,
        default_encoder="mlp",
        layout="assigned",
        notes=(
            *_unscaled(party_columns),
            *(note for split in splits for note in split.notes),
            *classes_of_test_rows_alone(classes, labels[0], labels[1]),
        ),
        train_ids=ids[0],
        test_ids=ids[1],
        columns=party_columns,
        label=label,
    )


def default_name(source: Any) -> str:
    """The name of tables whose owner gave none: the files' names without their endings."""
    if isinstance(source, Mapping):
        return "+".join(dict.fromkeys(source_of(each).stem for each in source.values()))
    return source_of(source).stem


def party_sources(tables: Mapping[str, Any]) -> dict[str, Source]:
    """A table per party; a frame is called by its party."""
    return {party: source_of(table, called=f"frame of {party}") for party, table in tables.items()}


# --- who holds what ---


def check_name(name: str | None) -> None:
    if name is None:
        return
    # Blanks at an end would make a second budget that looks like the first; run folders are named by it, too.
    if not isinstance(name, str) or not name or name != name.strip() or "/" in name or "\\" in name:
        raise DataError(
            f"name={name!r} is not permitted; give a text without / and \\ that neither begins nor ends with a blank, "
            "as in 'patients-2024', or leave it out to use the file's name"
        )


def _held(
    columns: Mapping[str, Sequence[str]] | str | None, label: str, id: str | None, *, by_party: bool
) -> Mapping[str, Sequence[str]] | None:
    """Who holds what, as far as it was said."""
    if columns is None:
        if not by_party:
            raise DataError("columns are needed with one table for all: say who holds what, as in bank=age;shop=visits")
        return None
    if by_party and id is None:
        raise DataError("id is needed with a table for each party: name the column by which the rows are joined")
    held = (
        parse_columns(columns, may_share=by_party)
        if isinstance(columns, str)
        else _check_assignment(columns, may_share=by_party)
    )
    for party, names in held.items():
        if label in names:
            raise DataError(f"label={label!r} is also a column of party={party!r}; a label cannot be a feature")
        if id is not None and id in names:
            raise DataError(f"id={id!r} is also a column of party={party!r}; an id cannot be a feature")
    if id is not None and id == label:
        raise DataError(f"id={id!r} is also the label; give another column")
    return held


def _check_assignment(columns: Mapping[str, Sequence[str]], *, may_share: bool) -> dict[str, tuple[str, ...]]:
    """The assignment as plain tuples, after refusing what cannot be one."""
    if len(columns) < 2 and not may_share:
        parties = "1 party" if len(columns) == 1 else f"{len(columns)} parties"
        raise DataError(f"columns name {parties}; at least 2 are needed, as in bank=age,income;hospital=bmi")
    holder: dict[str, str] = {}
    for party, names in columns.items():
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise DataError(
                f"party={party!r}: columns={names!r} is not a list of names; give one, as in ['age', 'income']"
            )
        if not names:
            raise DataError(f"party={party!r} has no columns; give it at least one or leave it out")
        for name in names:
            if holder.get(name) == party or (name in holder and not may_share):
                others = f"party={party!r}" if holder[name] == party else f"party={holder[name]!r} and party={party!r}"
                raise DataError(f"column={name!r} is named twice ({others}); each column belongs to one party, once")
            holder[name] = party
    return {party: tuple(names) for party, names in columns.items()}


# --- rows ---


def _refuse_unknown(rules: Schema, splits: Sequence[Aligned], faults: Faults) -> None:
    """A schema's column that no file has is nearly always a misspelt one."""
    for split in splits[:1]:
        files = " or ".join(dict.fromkeys(place.file for place in split.places.values()))
        for name in rules.names:
            if name not in split.present:
                hint = nearest(name, split.present)
                faults.add(f"the schema describes column={name!r}, which is not in {files}{hint}")


def _read(
    data: Any,
    held: Mapping[str, Sequence[str]] | None,
    label: str,
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
        raise DataError(f"a table for each of {len(data)} parties; at least 2 parties are needed")
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


def _features(split: Aligned, columns: Sequence[PartyColumns], faults: Faults) -> tuple[Features, ...]:
    encoded = []
    for part in columns:
        table = split.tables[part.party]
        rules = [rule for rule in part.rules if rule.name in table.column_names]
        encoded.append(encode_columns(rules, table, split.places[part.party], faults))
    return tuple(encoded)


def _labels(splits: Sequence[Aligned], label: str, faults: Faults) -> tuple[tuple[str, ...], list[Labels]]:
    raw = [label_values(split.label, label, split.label_place, faults) for split in splits if split.label is not None]
    read = [values for values in raw if values is not None]
    return number_classes(read, label, faults) if read and len(read) == len(splits) else ((), [])


def _row_ids(split: Aligned, *, of: str = "") -> tuple[str, ...]:
    return split.ids or tuple(f"{of}{row}" for row in range(split.num_rows))


def _prefix(source: Any, test: Any) -> str:
    """The file's own name keeps its rows apart from those of the training file."""
    if isinstance(source, Mapping) or test is source:
        return ""
    files = [source_of(each).path for each in (source, test)]
    is_same = files[0] is not None and files[1] is not None and os.path.samefile(files[0], files[1])
    return "" if is_same else f"{source_of(test).stem}:"


def _cut(
    features: tuple[Features, ...], labels: Labels, ids: tuple[str, ...], test_fraction: float, seed: int
) -> tuple[list[tuple[Features, ...]], list[Labels], list[tuple[str, ...]]]:
    """Training and test rows, chosen by the public seed."""
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
    notes = []
    for part in columns:
        names = [rule.name for rule in part.rules if rule.vocabulary is None and rule.range is None]
        if names:
            notes.append(
                f"Party {part.party}: {', '.join(names)} {'has' if len(names) == 1 else 'have'} no range in the "
                "schema, so the values are unscaled, as they stand in the table."
            )
    return notes
