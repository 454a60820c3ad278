"""New rows for a trained model: its columns, encoded by its rules, with or without labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.data.column_rules import PartyColumns, check_name, default_name, party_sources
from pbmvfl.data.encoding import Features
from pbmvfl.data.faults import Faults, nearest
from pbmvfl.data.joining import Aligned, read_each, read_one
from pbmvfl.data.labels import known_labels, label_values
from pbmvfl.data.readers import source_of
from pbmvfl.errors import DataError


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class NewRows:
    """Aligned rows, one feature array per party; row i is the same row everywhere."""

    #: The owner's name for these people, under which ledgers count.
    name: str
    party_names: tuple[str, ...]
    #: float32, or uint8 for pictures.
    features: tuple[npt.NDArray[Any], ...]
    #: Names by which ledgers identify the rows.
    ids: tuple[str, ...]
    #: False where the ids are places in a table, as in `VerticalDataset`.
    rows_are_named: bool = True
    #: None: there are none, as is usual for rows that are to be predicted.
    labels: npt.NDArray[np.int64] | None = None
    #: Notes for the reader: rows that were left out of a join.
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sizes = {len(self.ids), *(len(part) for part in self.features)}
        sizes |= set() if self.labels is None else {len(self.labels)}
        if len(self.party_names) != len(self.features) or len(sizes) > 1:
            raise DataError(f"rows={self.name!r}: every party, the ids and the labels must have the same rows")

    def __repr__(self) -> str:
        """Return names and shapes only: the values are private."""
        parties = ", ".join(
            f"{party}: {part.shape}" for party, part in zip(self.party_names, self.features, strict=True)
        )
        return f"NewRows(name={self.name!r}, {parties}, {'without' if self.labels is None else 'with'} labels)"

    @property
    def num_rows(self) -> int:
        return len(self.ids)


def load_rows(
    source: Any,
    *,
    columns: Sequence[PartyColumns],
    class_names: Sequence[str],
    label: str | None = None,
    id: str | None = None,
    label_data: Any = None,
    name: str | None = None,
) -> NewRows:
    """Load new rows for a trained model.

    Ledgers identify rows by their `id`, else by file and row number. A file whose name equals `name` holds the rows
    that `load_table` numbered: there a row is identified by its number alone, so that it is not counted as another row.
    Where a ledger has a limit, rows without an `id` are refused.

    Args:
        source: A table for all parties, or one per party, {"bank": "bank.csv", ...}, joined by `id`.
        columns: The model's columns; other columns of a table are not read.
        class_names: The model's classes; labels must be among them.
        label: Column of the labels, read only if given.
        id: Column that identifies rows; required with a table per party.
        label_data: With a table per party, a table of id and label where no party's table has the label.
        name: The owner's name for these people, under which ledgers count; by default the file's name without its
            ending.

    Returns:
        The rows, encoded by the model's rules.

    Raises:
        DataError: With every fault of the tables, by row and column, without a value of a column.
    """
    check_name(name)
    faults = Faults()
    rules = {part.party: {rule.name: rule for rule in part.rules} for part in columns}
    held = {part.party: part.names for part in columns}
    if isinstance(source, Mapping):
        rows = _of_each(source, held, rules, label, label_data, id, faults)
    else:
        if label_data is not None:
            raise DataError("label_data goes with a table for each party; with one table for all it has the label")
        rows = read_one(source_of(source), held=held, label=label, id=id, rules=rules.__getitem__, faults=faults)
    features: tuple[Features, ...] = ()
    labels = None
    if rows is not None:
        features = tuple(
            part.encode_present(rows.tables[part.party], rows.places[part.party], faults) for part in columns
        )
        if rows.label is not None and label is not None:
            values = label_values(rows.label, label, rows.label_place, faults)
            labels = None if values is None else known_labels(values, class_names, label, rows.label_place, faults)
    faults.raise_any()
    assert rows is not None
    stem = default_name(source)
    prefix = "" if stem == name and isinstance(source, str | Path) else f"{stem}:"
    return NewRows(
        name=stem if name is None else name,
        party_names=tuple(part.party for part in columns),
        features=features,
        ids=rows.ids or tuple(f"{prefix}{row}" for row in range(rows.num_rows)),
        rows_are_named=rows.ids is not None,
        labels=labels,
        notes=rows.notes,
    )


def _of_each(
    source: Mapping[str, Any],
    held: Mapping[str, Sequence[str]],
    rules: Mapping[str, Any],
    label: str | None,
    label_data: Any,
    id: str | None,
    faults: Faults,
) -> Aligned | None:
    for party in (party for party in held if party not in source):
        faults.add(f"party={party!r} has no table{nearest(party, source)}; give one for each of {', '.join(held)}")
    for party in (party for party in source if party not in held):
        faults.add(f"party={party!r} is not one of the model's{nearest(party, held)}; those are {', '.join(held)}")
    if id is None:
        faults.add("id is needed with a table for each party: name the column by which the rows are joined")
    if len(faults) or id is None:
        return None
    sources = party_sources({party: source[party] for party in held})
    return read_each(
        sources,
        held=held,
        label=label,
        label_source=None if label_data is None or label is None else source_of(label_data, called="frame of labels"),
        id=id,
        rules=rules.__getitem__,
        faults=faults,
    )
