"""Reading and encoding of tables, with every fault of schema and tables in one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pbmvfl._text import counted
from pbmvfl.data.column_rules import PartyColumns, party_sources, resolved
from pbmvfl.data.encoding import Features
from pbmvfl.data.faults import Faults
from pbmvfl.data.joining import Aligned, read_each, read_one
from pbmvfl.data.labels import Labels, label_values, number_classes
from pbmvfl.data.readers import source_of
from pbmvfl.data.schema import Schema, read_schema
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
