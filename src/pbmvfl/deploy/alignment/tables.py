"""An organisation's tables: a party's columns by its own public rules, a label holder's labels.

A party's file is read in batches, twice: once to check that all of it can be used, before any question is sent, and
once to put its rows in the common order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.data.column_rules import PartyColumns, resolved
from pbmvfl.data.encoding import Features, encode_columns
from pbmvfl.data.faults import Faults, Place
from pbmvfl.data.labels import label_values
from pbmvfl.data.readers import (
    Source,
    column_names,
    feature_names,
    read_batches,
    read_columns,
    require_columns,
    source_of,
)
from pbmvfl.data.schema import Schema, read_schema
from pbmvfl.deploy.alignment.row_ids import RowIds
from pbmvfl.errors import AlignmentError

#: Faults after which the rest of a file is skipped.
_ENOUGH_FAULTS = 20


@dataclass(frozen=True, kw_only=True, eq=False)
class PartyTable:
    """A party's checked file: its ids and the public rules of its columns."""

    source: Source
    id: str
    columns: PartyColumns
    ids: RowIds
    #: SHA-256 of the file.
    file_digest: str

    @property
    def num_rows(self) -> int:
        return len(self.ids)

    @property
    def width(self) -> int:
        """Number of values that a row becomes."""
        return self.columns.width

    def features(self) -> Iterator[tuple[int, Features]]:
        """Yield the rows as numbers, in the file's order: (number of the first row, their numbers)."""
        rules = {rule.name: rule for rule in self.columns.rules}
        faults, start = Faults(), 0
        for batch in read_batches(self.source, [self.id, *rules], rules, faults, as_text=(self.id,)):
            texts = RowIds.texts_of(batch.column(self.id))
            if start + len(texts) > self.num_rows or not texts.equals(self.ids.column.slice(start, len(texts))):
                raise self._changed()
            place = Place(file=self.source.file, numbers=np.arange(start, start + len(texts)))
            found = encode_columns(self.columns.rules, batch, place, faults)
            faults.raise_any()
            yield start, found
            start += len(texts)
        faults.raise_any()
        if start != self.num_rows:
            raise self._changed()

    def _changed(self) -> AlignmentError:
        return AlignmentError(f"{self.source.file} was changed while its rows were aligned; leave it alone, align anew")


def read_party_table(
    path: Path | str,
    *,
    id: str,
    columns: Sequence[str] | PartyColumns | None = None,
    schema: Mapping[str, Any] | str | Path | None = None,
    party: str = "party",
) -> PartyTable:
    """Read a party's .csv or .parquet file, and check all of it. Faults name rows, never a value.

    `columns` are those that the party takes part with, by default all but the id; or the exact rules of an earlier
    table, as a later one needs them. `schema` is the public one: vocabularies, ranges, slots for missing values.
    """
    source, faults = source_of(Path(path)), Faults()
    known = columns if isinstance(columns, PartyColumns) else None
    said = read_schema(schema, faults) if known is None else Schema(rules={rule.name: rule for rule in known.rules})
    present = column_names(source, faults)
    faults.raise_any()
    assert present is not None
    chosen = (
        columns.names if isinstance(columns, PartyColumns) else columns or feature_names(source, present, (id,), [])
    )
    names = [name for name in chosen if name != id]
    usable = require_columns(source, present, [id, *names], faults)
    said.refuse_absent(present, source.file, faults)
    if not names:
        faults.add(f"{source.file} has no column beside the id; a party needs at least one")
    faults.raise_any()
    found, ids = _read_through(source, usable, id, said, party, faults)
    return PartyTable(
        source=source,
        id=id,
        columns=known or found,
        ids=RowIds.of(ids, where=source.file),
        file_digest=file_digest(Path(path)),
    )


def _read_through(
    source: Source, usable: Sequence[str], id: str, said: Schema, party: str, faults: Faults
) -> tuple[PartyColumns, Any]:
    """Return the rules of all columns and the column of ids; every row is encoded once as a check."""
    import pyarrow as pa

    rules, columns, chunks, start = dict(said.rules), None, [], 0
    for batch in read_batches(source, usable, rules, faults, as_text=(id,)):
        place = Place(file=source.file, numbers=np.arange(start, start + batch.num_rows))
        if columns is None:  # columns without a schema get their rules from the types of the first rows
            own = [resolved(name, said, batch.column(name), place, faults) for name in usable if name != id]
            columns = PartyColumns(party=party, rules=tuple(rule for rule in own if rule is not None))
            rules.update({rule.name: rule for rule in columns.rules})
        encode_columns(columns.rules, batch, place, faults)
        chunks += batch.column(id).chunks
        start += batch.num_rows
        if len(faults) >= _ENOUGH_FAULTS:
            break
    if columns is None:
        faults.add(f"{source.file} has column names but no rows; at least one row is needed")
    faults.raise_any()
    assert columns is not None
    return columns, pa.chunked_array(chunks)


def file_digest(path: Path) -> str:
    """Return the file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- the label holder ---


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelTable:
    """The label holder's file: ids and, if requested, the class of each row."""

    source: Source
    ids: RowIds
    labels: npt.NDArray[np.int64] | None
    class_names: tuple[str, ...]
    file_digest: str

    @property
    def num_rows(self) -> int:
        return len(self.ids)


def read_label_table(path: Path | str, *, id: str, label: str | None) -> LabelTable:
    """Read the label holder's .csv or .parquet file; without a `label`, rows to predict without truth."""
    source, faults = source_of(Path(path)), Faults()
    present = column_names(source, faults)
    faults.raise_any()
    assert present is not None
    usable = require_columns(source, present, [id, *([] if label is None else [label])], faults)
    faults.raise_any()
    table = read_columns(source, usable, {}, faults, as_text=(id,))
    faults.raise_any()
    ids = RowIds.of(table.column(id), where=source.file)
    labels: npt.NDArray[np.int64] | None = None
    names: tuple[str, ...] = ()
    if label is not None:
        values = label_values(table.column(label), label, Place(file=source.file), faults)
        faults.raise_any()
        assert values is not None
        classes = sorted(set(values))
        numbers = {value: number for number, value in enumerate(classes)}
        labels = np.array([numbers[value] for value in values], dtype=np.int64)
        names = tuple(map(str, classes))
    return LabelTable(source=source, ids=ids, labels=labels, class_names=names, file_digest=file_digest(Path(path)))
