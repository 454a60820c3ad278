"""Columns of each party, and the public rule of each column."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pbmvfl.data.encoding import Features, encode_columns, is_text, refuse_absent, refuse_words
from pbmvfl.data.faults import Faults, Place, nearest
from pbmvfl.data.readers import Source, source_of, stem_of
from pbmvfl.data.schema import ColumnRule, Schema, rule_of_entry
from pbmvfl.errors import DataError
from pbmvfl.plan.shapes import kind_of_range

__all__ = [
    "ColumnRule",
    "PartyColumns",
    "check_name",
    "default_name",
    "held_columns",
    "parse_columns",
    "party_sources",
    "resolved",
    "split_names",
]


# --- Public rules of a party's columns, which alone decide the numbers that its rows become ---


@dataclass(frozen=True, kw_only=True)
class PartyColumns:
    """Columns of one party, and what is public about each."""

    party: str
    rules: tuple[ColumnRule, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(rule.name for rule in self.rules)

    @property
    def width(self) -> int:
        """Return how many numbers one row becomes."""
        return sum(rule.width for rule in self.rules)

    @property
    def kinds(self) -> str:
        """Return the kind of knots (`plan.shapes`) of every number of a row, a letter each, by public ranges alone."""
        return "".join(_kinds_of(rule) for rule in self.rules)

    def encode(self, table: Any, where: str) -> Features:
        """Encode the rows of a pyarrow table.

        Args:
            table: A table with these columns.
            where: Name of the table, for error messages.

        Returns:
            Array of shape (N, width), float32.

        Raises:
            DataError: With all faults of the columns.
        """
        faults = Faults()
        absent = [name for name in self.names if name not in table.column_names]
        for name in absent:
            faults.add(f"column={name!r} is not in {where}{nearest(name, table.column_names)}")
        found = self.encode_present(table, Place(file=where), faults)
        faults.raise_any()
        return found

    def encode_present(self, table: Any, place: Place, faults: Faults) -> Features:
        """Encode those of the columns that the table has; faults go to `faults`."""
        present = [rule for rule in self.rules if rule.name in table.column_names]
        return encode_columns(present, table, place, faults)

    def to_dict(self) -> dict[str, Any]:
        return {"party": self.party, "columns": [{"name": rule.name, **rule.to_entry()} for rule in self.rules]}

    @classmethod
    def from_dict(cls, values: Any) -> PartyColumns:
        """Read what `to_dict` wrote; anything else is refused with all its faults."""
        party, columns = (values.get("party"), values.get("columns")) if isinstance(values, Mapping) else (None, None)
        if not isinstance(party, str) or not isinstance(columns, list) or not columns:
            raise DataError('a party\'s columns must be of the form {"party": "a", "columns": [{"name": "b", ...}]}')
        faults = Faults()
        rules = [_rule_from_dict(entry, faults) for entry in columns]
        faults.raise_any()
        return cls(party=party, rules=tuple(rule for rule in rules if rule is not None))


def _kinds_of(rule: ColumnRule) -> str:
    if rule.range is not None:
        return kind_of_range(*rule.range) + "c" * rule.missing
    return "c" * rule.width if rule.vocabulary is None else "b" + "w" * (rule.width - 1)


def _rule_from_dict(entry: Any, faults: Faults) -> ColumnRule | None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        faults.add('a column must be of the form {"name": "...", ...}; one has no name')
        return None
    said = {key: value for key, value in entry.items() if key != "name"}
    # Nothing said: numbers that are used as they are.
    return rule_of_entry(entry["name"], said, faults) if said else ColumnRule(name=entry["name"])


def resolved(name: str, schema: Schema, column: Any, place: Place, faults: Faults) -> ColumnRule | None:
    """Return a column's rule from the schema, else from its type alone; None if there is none or it has a fault."""
    import pyarrow as pa

    if name in schema.faulty:
        kind = schema.faulty[name]
        if kind is not None:
            refuse_absent(kind, column, place, faults)
        return None
    rule = schema.rules.get(name)
    if rule is None and pa.types.is_boolean(column.type):
        return ColumnRule(name=name, vocabulary=(False, True))  # known from the type alone, so nothing is learned
    if rule is None and is_text(column.type):
        refuse_words(name, column, place, faults)
        return None
    return rule or ColumnRule(name=name)


# --- Assignment of columns to parties, and the name of the rows ---


#: One party's part of an assignment: a semicolon inside a quoted name does not end it.
_PART = re.compile(r'(?:[=,]\s*"(?:[^"]|"")*"|[^;])+')


def split_names(text: str) -> tuple[str, ...]:
    """Return the names in a text such as 'a,b,"c, d"': a name with a comma in it stands in double quotes."""
    fields = next(csv.reader([" ".join(text.splitlines())], skipinitialspace=True), [])
    return tuple(filter(None, (name.strip() for name in fields)))


def parse_columns(text: str, *, may_share: bool = False) -> dict[str, tuple[str, ...]]:
    """Parse "bank=a,b,c;hospital=d,e" into each party's columns.

    Args:
        text: Parties separated by semicolons, each with its columns; a name with a comma or a semicolon in it stands in
            double quotes.
        may_share: Permit one column name at several parties, as where each has a file of its own.

    Returns:
        The columns of each party, in the order given.

    Raises:
        DataError: If the text is of another form.
    """
    columns: dict[str, tuple[str, ...]] = {}
    for part in filter(None, (piece.strip() for piece in _PART.findall(text))):
        party, equals, names = (piece.strip() for piece in part.partition("="))
        if not equals or not party:
            raise DataError(f"columns={text!r}: {part!r} is not of the form party=column,column;party=column")
        if party in columns:
            raise DataError(f"columns={text!r}: party={party!r} occurs twice; list all its columns in one place")
        columns[party] = split_names(names)
    return _check_assignment(columns, may_share=may_share)


def held_columns(
    columns: Mapping[str, Sequence[str]] | str | None, label: str | None, id: str | None, *, by_party: bool
) -> Mapping[str, Sequence[str]] | None:
    """Return each party's columns, as far as they were given."""
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
    """Return the assignment as plain tuples, or refuse it."""
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


def check_name(name: str | None) -> None:
    if name is None:
        return
    # Blanks at an end would make a second budget that looks like the first; run folders are named by it, too.
    if not isinstance(name, str) or not name or name != name.strip() or "/" in name or "\\" in name:
        raise DataError(
            f"name={name!r} is not permitted; give a text without / and \\ that neither begins nor ends with a blank, "
            "as in 'patients-2024', or leave it out to use the file's name"
        )


def default_name(source: Any) -> str:
    """Name tables whose owner gave no name: the file names without their endings."""
    return "+".join(dict.fromkeys(map(stem_of, source.values() if isinstance(source, Mapping) else [source])))


def party_sources(tables: Mapping[str, Any]) -> dict[str, Source]:
    """Return one source per party; a frame is named after its party."""
    return {party: source_of(table, called=f"frame of {party}") for party, table in tables.items()}
