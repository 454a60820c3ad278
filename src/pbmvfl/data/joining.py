"""Alignment of rows: one table for all parties, or one per party, joined by an id column.

Joining here simulates an alignment: the process that runs it sees all ids. Organisations that may not show each other
their ids need a private set intersection first, and then give each party the rows that all have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl._text import counted
from pbmvfl.data.encoding import is_text
from pbmvfl.data.faults import Faults, Place, nearest
from pbmvfl.data.readers import Source, column_names, feature_names, read_columns, require_columns
from pbmvfl.data.schema import ColumnRule

#: The columns of each party.
Held = Mapping[str, Sequence[str]]
#: The rules of a party's columns, by name.
Rules = Callable[[str], Mapping[str, ColumnRule]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Aligned:
    """Tables whose row i is the same at every party. Columns that could not be read are left out, with a fault."""

    held: Held
    tables: Mapping[str, Any]
    places: Mapping[str, Place]
    num_rows: int
    #: The label's column and where it stands; None if it was not asked for or not found.
    label: Any
    label_place: Place
    #: None: rows have no ids of their own.
    ids: tuple[str, ...] | None
    #: Names of all columns of all files, used or not.
    present: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())


def read_one(
    source: Source, *, held: Held, label: str | None, id: str | None, rules: Rules, faults: Faults
) -> Aligned | None:
    """Read one table with the columns of all parties."""
    present = column_names(source, faults)
    if present is None:
        return None
    used = [name for names in held.values() for name in names]
    extra = [name for name in (label, id) if name is not None]
    wanted = require_columns(source, present, [*used, *extra], faults)
    known = {name: rule for party in held for name, rule in rules(party).items() if name not in extra}
    table = read_columns(source, wanted, known, faults, as_text=(id,) if id else ()) if wanted else None
    if table is None:
        return None
    ids = _ids(table, id, source, faults)
    place = Place(file=source.file)
    return Aligned(
        held=held,
        tables=dict.fromkeys(held, table),
        places=dict.fromkeys(held, place),
        num_rows=table.num_rows,
        label=table.column(label) if label in table.column_names else None,
        label_place=place,
        ids=None if ids is None else tuple(ids),
        present=tuple(present),
    )


def read_each(
    sources: Mapping[str, Source],
    *,
    held: Held | None,
    label: str | None,
    label_source: Source | None,
    id: str,
    rules: Rules,
    faults: Faults,
) -> Aligned | None:
    """Read one table per party, and one with the labels if no party's has them; keep the rows whose id all tables have.

    Parties that `held` does not name hold all columns of their table but the id and the label.
    """
    before = len(faults)
    if held is not None:
        for party in (party for party in held if party not in sources):
            faults.add(f"columns name party={party!r}, which has no table{nearest(party, sources)}; give it one")
    names = {party: column_names(source, faults) for party, source in sources.items()}
    label_names = [] if label_source is None else column_names(label_source, faults)
    if label_names is None or any(found is None for found in names.values()) or len(faults) > before:
        return None
    present = {party: found for party, found in names.items() if found is not None}
    holder = _label_holder(label, present, sources, label_source, faults)
    notes: list[str] = []
    chosen = {
        party: tuple((held or {}).get(party) or feature_names(sources[party], found, (id, label), notes))
        for party, found in present.items()
    }
    read: dict[str, _WithIds] = {}
    for party, source in sources.items():
        wanted = [id, *chosen[party], *([label] if holder == party and label else [])]
        known = {name: rule for name, rule in rules(party).items() if name not in (id, label)}
        if not chosen[party]:
            way_out = f"; if it has the labels alone, give it as {_LABEL_FILE}" if holder == party else ""
            faults.add(f"{source.file} has no column beside id and label; each party needs at least one{way_out}")
        _read_with_ids(read, party, source, present[party], wanted, known, id, faults)
    if label_source is not None and label is not None:
        _read_with_ids(read, _LABELS, label_source, label_names, [id, label], {}, id, faults)
    if len(read) < len(sources) + (label_source is not None):
        return None
    common, positions = _join(read, id, faults)
    if not common:
        return None
    tables = {key: each.table.take(positions[key]) for key, each in read.items()}
    places = {key: Place(file=each.source.file, numbers=positions[key]) for key, each in read.items()}
    of_label = _LABELS if label_source is not None else holder
    return Aligned(
        held=chosen,
        tables={party: tables[party] for party in sources},
        places={party: places[party] for party in sources},
        num_rows=len(common),
        label=tables[of_label].column(label) if of_label is not None and label is not None else None,
        label_place=places[of_label or next(iter(sources))],
        ids=common,
        present=tuple(dict.fromkeys(name for found in present.values() for name in found)),
        notes=(*notes, *_left_out(read, len(common))),
    )


#: The key of a table that is no party's.
_LABELS = "\0labels"
#: Where a file with labels and ids alone is given.
_LABEL_FILE = "--label-data FILE (label_data= in Python)"


@dataclass(frozen=True, eq=False)
class _WithIds:
    source: Source
    table: Any
    ids: list[str]
    kind: str


def _read_with_ids(
    read: dict[str, _WithIds],
    key: str,
    source: Source,
    present: list[str],
    wanted: Sequence[str],
    rules: Mapping[str, ColumnRule],
    id: str,
    faults: Faults,
) -> None:
    usable = require_columns(source, present, wanted, faults)
    table = read_columns(source, usable, rules, faults, as_text=(id,)) if id in usable else None
    if table is None:
        return
    ids = _ids(table, id, source, faults)
    if ids is not None:
        kind = "text" if source.is_csv else "words" if is_text(table.column(id).type) else "whole numbers"
        read[key] = _WithIds(source, table, ids, kind)


def _ids(table: Any, id: str | None, source: Source, faults: Faults) -> list[str] | None:
    """Return every row's id as text; None if there are none, perhaps with a fault. Faults have counts, never an id."""
    import pyarrow as pa

    if id is None or id not in table.column_names:
        return None
    column = table.column(id)
    if not (is_text(column.type) or pa.types.is_integer(column.type) or pa.types.is_null(column.type)):
        faults.add(f"{source.file}: id={id!r} has type {column.type}; permitted are words and whole numbers")
        return None
    ids = [None if value is None or value == "" else str(value) for value in column.to_pylist()]
    missing = [row for row, value in enumerate(ids) if value is None]
    if missing:
        rows = Place(file=source.file).rows(missing)
        faults.add(
            f"{source.file}: id={id!r}: {rows} {'has' if len(missing) == 1 else 'have'} no id; leave out such rows, "
            "or give them one"
        )
        return None
    repeated = len(ids) - len(set(ids))
    if repeated:
        faults.add(
            f"{source.file}: id={id!r}: {counted(repeated, 'row has an id', 'rows have an id')} that an earlier row "
            "has; ids must tell the rows apart, so keep one row for each"
        )
        return None
    return [value for value in ids if value is not None]


def _label_holder(
    label: str | None,
    present: Mapping[str, Collection[str]],
    sources: Mapping[str, Source],
    label_source: Source | None,
    faults: Faults,
) -> str | None:
    """Return the party whose table has the label."""
    if label is None or label_source is not None:
        return None
    holders = [party for party, names in present.items() if label in names]
    if len(holders) == 1:
        return holders[0]
    files = ", ".join(source.file for source in sources.values())
    if holders:
        files = " and ".join(sources[party].file for party in holders)
        faults.add(f"label={label!r} is in {files}; leave it in one of them, or give {_LABEL_FILE}")
    else:
        every = [name for names in present.values() for name in names]
        faults.add(
            f"label={label!r} is in none of {files}{nearest(label, every)}; add it to one of them, or give a file "
            f"of ids and labels as {_LABEL_FILE}"
        )
    return None


def _join(
    read: Mapping[str, _WithIds], id: str, faults: Faults
) -> tuple[tuple[str, ...], dict[str, npt.NDArray[np.int64]]]:
    """Return the ids that all tables have, sorted as text, and their positions in each table."""
    kinds = {each.kind: each.source.file for each in read.values() if each.kind != "text"}
    if len(kinds) > 1:
        said = " and ".join(f"{kind} in {file}" for kind, file in kinds.items())
        faults.add(f"id={id!r} is {said}; store it in one type, so that the same id is spelled alike")
        return (), {}
    common = sorted(set.intersection(*(set(each.ids) for each in read.values())))
    if not common:
        files = ", ".join(f"{each.source.file} ({counted(len(each.ids), 'row')})" for each in read.values())
        faults.add(f"id={id!r}: no id is in all of {files}; check that the same ids are spelled alike in every file")
        return (), {}
    where = {key: {value: row for row, value in enumerate(each.ids)} for key, each in read.items()}
    positions = {key: np.array([rows[value] for value in common], dtype=np.int64) for key, rows in where.items()}
    return tuple(common), positions


def _left_out(read: Mapping[str, _WithIds], count: int) -> list[str]:
    return [
        f"{each.source.file}: {len(each.ids) - count:,} of {counted(len(each.ids), 'row')} "
        f"{'is' if len(each.ids) - count == 1 else 'are'} left out because another table does not have the id."
        for each in read.values()
        if len(each.ids) > count
    ]
