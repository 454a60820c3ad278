"""Templates of a schema, from the names and types of the columns alone.

Values enter a template only where the owner says that they are public: a range or a vocabulary taken from the rows is
a release about them that no account counts.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pbmvfl._text import counted
from pbmvfl.data.column_rules import held_columns, party_sources
from pbmvfl.data.encoding import NUMBERS_OF_DATES, Mask, among, are_dates, infer, is_number, is_text, numbers_of
from pbmvfl.data.faults import Faults, Place, nearest
from pbmvfl.data.readers import Source, column_names, feature_names, read_columns, require_columns, source_of
from pbmvfl.data.schema import USUAL_MARKERS

#: A column with more words is nearly always a name or an identifier.
_MOST_WORDS = 1_000
#: Of the cells of a column that is meant to be numbers: slips of the pen.
_MOST_WRONG = 0.1


@dataclass(frozen=True, kw_only=True)
class Template:
    """Schema with gaps to fill in, and notes for the reader."""

    entries: Mapping[str, Mapping[str, Any]]
    #: Columns whose values are in the schema.
    published: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def schema(self) -> dict[str, Any]:
        return {"columns": {name: dict(entry) for name, entry in self.entries.items()}}

    @property
    def holes(self) -> tuple[str, ...]:
        """Return what must be filled in before the schema can be used, as "range of age"."""
        kinds = {name: "vocabulary" if "vocabulary" in entry else "range" for name, entry in self.entries.items()}
        return tuple(
            f"{kind} of {name}" for name, kind in kinds.items() if self.entries[name][kind] in ([], [None, None])
        )

    def to_json(self) -> str:
        """Return the schema as JSON with one line per column, for editing by hand."""
        lines = [f"  {_readable(name)}: {_readable(entry)}" for name, entry in self.entries.items()]
        return '{"columns": {\n' + ",\n".join(lines) + "\n}}\n"


def _readable(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def schema_template(
    source: Any,
    *,
    columns: Mapping[str, Sequence[str]] | str | None = None,
    label: str | None = None,
    id: str | None = None,
    public_values: Collection[str] = (),
) -> Template:
    """Make a schema template for the columns of a table, or of one table per party.

    Args:
        source: A table for all parties, or one per party, {"bank": "bank.csv", ...}.
        columns: Each party's columns; by default all but the label and the id.
        label: Column of the labels.
        id: Column that identifies rows.
        public_values: Columns whose smallest and largest number, or whose words, are public and may be written.

    Returns:
        The template.

    Raises:
        DataError: With all faults of the tables.
    """
    by_party = isinstance(source, Mapping)
    held = None if columns is None else held_columns(columns, label, id or "", by_party=by_party)
    faults = Faults()
    entries: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    sources = party_sources(source) if by_party else {"": source_of(source)}
    every: list[str] = []
    for party, each in sources.items():
        present = column_names(each, faults)
        if present is None:
            continue
        every += present
        require_columns(each, present, [] if id is None else [id], faults)
        if held is None or (by_party and party not in held):
            wanted: Sequence[str] = feature_names(each, present, (label, id), notes)
        else:
            wanted = held[party] if by_party else [name for names in held.values() for name in names]
        for name, entry in _entries(each, present, wanted, public_values, notes, faults).items():
            if name in entries and set(entries[name]) != set(entry):
                faults.add(f"column={name!r} has numbers in one file and words in another; rename one of them")
            entries[name] = entry
    if label is not None and every and label not in every:
        files = " or ".join(each.file for each in sources.values())
        faults.add(
            f"label={label!r} is not in {files}{nearest(label, every)}; correct the name, or leave the label out where "
            "it has a file of its own"
        )
    for name in (name for name in public_values if name not in entries):
        faults.add(f"public_values name column={name!r}, which is not among the columns{nearest(name, entries)}")
    faults.raise_any()
    return Template(
        entries=entries, published=tuple(name for name in entries if name in public_values), notes=tuple(notes)
    )


def _entries(
    source: Source,
    present: Sequence[str],
    wanted: Sequence[str],
    public_values: Collection[str],
    notes: list[str],
    faults: Faults,
) -> dict[str, dict[str, Any]]:
    table = read_columns(source, require_columns(source, present, wanted, faults), {}, faults)
    found = {}
    for name in [] if table is None else table.column_names:
        where = f"{source.file}: column={name!r}"
        column, absent = _values(table.column(name), where, notes)
        entry = _entry(column)
        if entry is None:
            faults.add(
                f"{where} has type {column.type}; permitted are numbers, words, and true or false. Leave it out; of "
                f"dates, {NUMBERS_OF_DATES}"
            )
            continue
        if name in public_values:
            _publish(entry, column, absent, where, notes, faults)
        found[name] = entry
    return found


def _values(column: Any, where: str, notes: list[str]) -> tuple[Any, Mask]:
    """Return the column in its intended type, null where a cell is something else, and the mask of empty cells."""
    import pyarrow as pa

    absent = np.array(column.is_null(nan_is_null=True).to_numpy(), dtype=bool)
    if not is_text(column.type):
        return column, absent
    absent |= among(column, USUAL_MARKERS)
    if absent.all():
        return pa.chunked_array([pa.nulls(len(column))]), absent
    typed = infer(column, absent) if absent.any() else column
    if not is_text(typed.type):
        return typed, absent
    values, wrong = numbers_of(column, absent)
    if are_dates(column, absent):
        notes.append(f"{where} holds dates; {NUMBERS_OF_DATES}.")
        return column, absent
    if _MOST_WRONG * (~absent).sum() < wrong.sum():
        return column, absent
    if wrong.any():
        rows = Place(file=where).rows(np.flatnonzero(wrong))
        notes.append(f"{where} is mostly numbers, but {rows} {'is' if wrong.sum() == 1 else 'are'} not; mend that.")
    else:
        notes.append(f"{where} has numbers that are stored as words; store the column as numbers.")
    return pa.chunked_array([pa.array(values, mask=absent | wrong)]), absent


def _entry(column: Any) -> dict[str, Any] | None:
    import pyarrow as pa

    if pa.types.is_boolean(column.type):
        return {"vocabulary": [False, True]}  # known from the type alone
    if is_text(column.type):
        return {"vocabulary": []}
    return {"range": [None, None]} if is_number(column.type) or pa.types.is_null(column.type) else None


def _publish(entry: dict[str, Any], column: Any, absent: Mask, where: str, notes: list[str], faults: Faults) -> None:
    """Fill in the range or the vocabulary of the rows."""
    import pyarrow as pa

    known = column.filter(pa.array(~absent)).drop_null()
    if "range" in entry:
        values = np.asarray(known.to_numpy())
        if len(values) and np.isfinite(values.astype(float)).all() and values.min() < values.max():
            entry["range"] = [values.min().item(), values.max().item()]
        else:
            notes.append(f"{where} has fewer than two different finite numbers, so its range is left open")
    elif is_text(column.type):
        words = sorted(set(known.to_pylist()))
        if len(words) > _MOST_WORDS:
            faults.add(
                f"{where} has {counted(len(words), 'different word')}; at most {_MOST_WORDS:,} can be a vocabulary. Is "
                "it a name or an identifier? Leave it out, or put it into groups"
            )
        entry["vocabulary"] = words
    if absent.any():
        entry["missing"] = True
