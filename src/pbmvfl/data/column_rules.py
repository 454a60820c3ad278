"""What is public about a party's columns, and the numbers that its rows become by that alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pbmvfl.data.encoding import Features, encode_columns, refuse_absent, refuse_words
from pbmvfl.data.faults import Faults, Place, nearest
from pbmvfl.data.schema import ColumnRule, Schema, rule_of_entry
from pbmvfl.data.text import is_text
from pbmvfl.errors import DataError

__all__ = ["ColumnRule", "PartyColumns", "resolved"]


@dataclass(frozen=True, kw_only=True)
class PartyColumns:
    """Which columns a party holds, and what is public about each."""

    party: str
    rules: tuple[ColumnRule, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(rule.name for rule in self.rules)

    @property
    def width(self) -> int:
        """Numbers that a row becomes."""
        return sum(rule.width for rule in self.rules)

    def encode(self, table: Any, where: str) -> Features:
        """A pyarrow table's rows as (N, width); all faults of its columns in one error. `where` names the table."""
        faults = Faults()
        absent = [name for name in self.names if name not in table.column_names]
        for name in absent:
            faults.add(f"column={name!r} is not in {where}{nearest(name, table.column_names)}")
        present = [rule for rule in self.rules if rule.name not in absent]
        found = encode_columns(present, table, Place(file=where), faults)
        faults.raise_any()
        return found

    def to_dict(self) -> dict[str, Any]:
        return {"party": self.party, "columns": [{"name": rule.name, **rule.to_entry()} for rule in self.rules]}

    @classmethod
    def from_dict(cls, values: Any) -> PartyColumns:
        """What `to_dict` gave; anything else is refused with all its faults."""
        party, columns = (values.get("party"), values.get("columns")) if isinstance(values, Mapping) else (None, None)
        if not isinstance(party, str) or not isinstance(columns, list) or not columns:
            raise DataError('a party\'s columns must be of the form {"party": "a", "columns": [{"name": "b", ...}]}')
        faults = Faults()
        rules = [_rule_from_dict(entry, faults) for entry in columns]
        faults.raise_any()
        return cls(party=party, rules=tuple(rule for rule in rules if rule is not None))


def _rule_from_dict(entry: Any, faults: Faults) -> ColumnRule | None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        faults.add('a column must be of the form {"name": "...", ...}; one has no name')
        return None
    said = {key: value for key, value in entry.items() if key != "name"}
    # Nothing said: numbers that are used as they are.
    return rule_of_entry(entry["name"], said, faults) if said else ColumnRule(name=entry["name"])


def resolved(name: str, schema: Schema, column: Any, place: Place, faults: Faults) -> ColumnRule | None:
    """The rule of a column: the schema's, or what its type alone says; None if there is none or it has a fault."""
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
