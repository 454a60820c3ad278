"""Schema: what is public about the columns, agreed on before any party reads a value.

    {"columns": {"job": {"vocabulary": ["cook", "nurse"], "other": true}, "age": {"range": [0, 120], "missing": true}}}

A vocabulary or a range learned from private values would itself be a release about them, outside every account of
privacy; so nothing is learned here. What the schema does not say is either used as it is or refused. A schema with
`"shared": true` beside "columns" may describe columns of other tables, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pbmvfl.data.faults import Faults, nearest
from pbmvfl.errors import DataError

Word = str | int | bool

#: Texts that stand for no value where a column has a slot for missing ones, unless its vocabulary has the word.
USUAL_MARKERS = ("", "?", "NA", "N/A", "NaN", "nan", "NULL", "null")

_KEYS = ("vocabulary", "other", "range", "missing")
_INT64 = 1 << 63


@dataclass(frozen=True, kw_only=True)
class ColumnRule:
    """Public description of one column. Without a vocabulary or a range: numbers, used as they are."""

    name: str
    vocabulary: tuple[Word, ...] | None = None
    #: One more slot, for all words outside the vocabulary.
    other: bool = False
    range: tuple[float, float] | None = None
    #: One more slot, which is 1 where there is no value.
    missing: bool = False
    #: The owner's own marks of a missing value, beside the usual ones.
    markers: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Return how many numbers one value becomes."""
        return (1 if self.vocabulary is None else len(self.vocabulary) + self.other) + self.missing

    @property
    def word_type(self) -> type[str | int | bool] | None:
        """Return the type of the vocabulary's words; None for numbers."""
        return None if self.vocabulary is None else type(self.vocabulary[0])

    def to_entry(self) -> dict[str, Any]:
        """Return the schema's entry for this rule; empty for numbers that are used as they are."""
        entry: dict[str, Any] = {}
        if self.vocabulary is not None:
            entry["vocabulary"] = list(self.vocabulary)
        if self.other:
            entry["other"] = True
        if self.range is not None:
            entry["range"] = list(self.range)
        if self.missing:
            entry["missing"] = list(self.markers) or True
        return entry

    def with_slot_for_missing(self) -> str:
        """Return the line of a schema that would permit missing values."""
        if self.vocabulary is not None:
            said = '"vocabulary": [...], ' + ('"other": true, ' if self.other else "")
        else:
            low, high = ("...", "...") if self.range is None else (f"{end:g}" for end in self.range)
            said = f'"range": [{low}, {high}], '
        return f'"{self.name}": {{{said}"missing": true}}'


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Rules that could be read, and columns whose entry could not."""

    rules: Mapping[str, ColumnRule]
    #: Columns whose entry has a fault, with as much of a rule as tells a missing value; None if nothing can be told.
    faulty: Mapping[str, ColumnRule | None] = field(default_factory=dict)
    #: Whether other tables have some of the columns.
    shared: bool = False

    def refuse_absent(self, present: Sequence[str], files: str, faults: Faults) -> None:
        """Add a fault for columns that no table has, nearly always misspelt ones, unless the schema is shared."""
        absent = [name for name in (*self.rules, *self.faulty) if name not in present]
        if not absent or self.shared:
            return
        first, *others = [(f"column={name!r}", nearest(name, present)) for name in absent]
        faults.add(
            f"the schema describes {first[0]}, which is not in {files}{first[1]}"
            f"{''.join(f', nor is {name}{hint}' for name, hint in others)}; correct the name, or, if other tables use "
            'the schema, too, say so in it: {"shared": true, "columns": {...}}'
        )


def read_schema(schema: Mapping[str, Any] | str | Path | None, faults: Faults) -> Schema:
    """Read all rules of a schema or of its JSON file; faults go to `faults`."""
    if schema is None:
        return Schema(rules={})
    if isinstance(schema, str | Path):
        schema = _read_json(Path(schema), faults)
    columns = schema.get("columns", {}) if isinstance(schema, Mapping) else None
    if not isinstance(columns, Mapping) or not isinstance(schema, Mapping):
        faults.add('the schema must be of the form {"columns": {"name": {...}}}')
        return Schema(rules={})
    _only_keys(schema, ("columns", "shared"), "the schema", faults)
    shared = schema.get("shared", False)
    if not isinstance(shared, bool):
        faults.add(f"the schema has shared={shared!r}; permitted are true and false")
    columns = {str(name): entry for name, entry in columns.items()}
    read = {name: rule_of_entry(name, entry, faults) for name, entry in columns.items()}
    rules = {name: rule for name, rule in read.items() if rule is not None}
    faulty = {name: _kind_alone(name, columns[name]) for name in read if name not in rules}
    return Schema(rules=rules, faulty=faulty, shared=shared is True)


def _kind_alone(name: str, entry: Any) -> ColumnRule | None:
    """Return as much of a faulty rule as tells a missing value, so that missing values are named in the same pass."""
    if not isinstance(entry, Mapping) or entry.get("missing") or ("vocabulary" in entry) == ("range" in entry):
        return None
    return ColumnRule(name=name, vocabulary=("...",) if "vocabulary" in entry else None)


def rule_of_entry(name: str, entry: Any, faults: Faults) -> ColumnRule | None:
    """Return one column's rule, or None if its entry has a fault."""
    before = len(faults)
    where = f"schema of column={name!r}"
    if not isinstance(entry, Mapping):
        faults.add(f'{where}: {entry!r} is not of the form {{"vocabulary": [...]}} or {{"range": [low, high]}}')
        return None
    _only_keys(entry, _KEYS, where, faults)
    has_words, has_range = entry.get("vocabulary") is not None, entry.get("range") is not None
    if has_words == has_range:
        faults.add(f"{where}: give either a vocabulary or a range")
        return None
    vocabulary = _vocabulary(entry["vocabulary"], where, faults) if has_words else None
    limits = _range(entry["range"], where, faults) if has_range else None
    other = entry.get("other", False)
    if not isinstance(other, bool):
        faults.add(f"{where}: other={other!r}; permitted are true and false")
    elif has_range and "other" in entry:
        faults.add(f"{where}: other belongs to a vocabulary; a number outside a range is clipped to it")
    markers = _markers(entry.get("missing", False), vocabulary, where, faults)
    if len(faults) > before:
        return None
    return ColumnRule(
        name=name,
        vocabulary=vocabulary,
        other=other,
        range=limits,
        missing=markers is not None,
        markers=markers or (),
    )


def _read_json(path: Path, faults: Faults) -> Any:
    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in dict.fromkeys(names):
            if names.count(name) > 1:
                faults.add(f"the schema says {name!r} twice; only one of them could be followed")
        return dict(pairs)

    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=without_repeats)
    except OSError as error:
        raise DataError(f"schema={str(path)!r} cannot be read ({error.strerror}); give a JSON file") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"schema={str(path)!r} is not JSON ({error})") from error


def _only_keys(entry: Mapping[str, Any], known: Sequence[str], where: str, faults: Faults) -> None:
    for key in entry:
        if key not in known:
            faults.add(f"{where} has the unknown key {key!r}{nearest(str(key), known)}; known: {', '.join(known)}")


def _vocabulary(words: Any, where: str, faults: Faults) -> tuple[Word, ...] | None:
    form = "must be a list of words, of integers, or of true and false"
    if isinstance(words, list | tuple) and not words:
        faults.add(f"{where}: the vocabulary is still empty; it must be a list of words that everybody may know")
    elif not isinstance(words, list | tuple) or len({type(word) for word in words}) > 1:
        faults.add(f"{where}: vocabulary={words!r} {form}")
    elif not isinstance(words[0], str | int):
        faults.add(f"{where}: vocabulary has {words[0]!r}; permitted are words, integers, true and false")
    elif len(set(words)) < len(words):
        twice = next(word for word in words if words.count(word) > 1)
        faults.add(f"{where}: the vocabulary has a word twice ({twice!r}); leave one out")
    elif isinstance(words[0], int) and not all(-_INT64 <= word < _INT64 for word in words):
        faults.add(f"{where}: the vocabulary has an integer that does not fit in 64 bits; give such codes as words")
    else:
        return tuple(words)
    return None


def _range(limits: Any, where: str, faults: Faults) -> tuple[float, float] | None:
    is_pair = isinstance(limits, list | tuple) and len(limits) == 2
    if is_pair and None in limits:
        faults.add(f"{where}: the range is not filled in yet; it must be two numbers that everybody may know")
    elif not is_pair or not all(isinstance(end, int | float) and not isinstance(end, bool) for end in limits):
        faults.add(f"{where}: range={limits!r} must be two numbers, [low, high]")
    else:
        try:
            low, high = float(limits[0]), float(limits[1])
        except OverflowError:
            low = high = math.inf
        if math.isfinite(low) and math.isfinite(high) and low < high:
            return low, high
        faults.add(f"{where}: range={list(limits)}; low and high must be finite, and low less than high")
    return None


def _markers(missing: Any, vocabulary: Sequence[Word] | None, where: str, faults: Faults) -> tuple[str, ...] | None:
    """Return the owner's own marks of missing values; None where no value may be missing."""
    if isinstance(missing, bool):
        return () if missing else None
    is_list = isinstance(missing, list | tuple) and len(missing) > 0
    if not is_list or not all(isinstance(mark, str | int | float) and not isinstance(mark, bool) for mark in missing):
        faults.add(f'{where}: missing={missing!r}; permitted are true, false and a list of marks, as in ["?", "-9"]')
        return None
    marks = tuple(dict.fromkeys(str(mark).strip() for mark in missing))
    both = [mark for mark in marks if mark in {str(word) for word in vocabulary or ()}]
    if both:
        faults.add(f"{where}: {both[0]!r} is in the vocabulary and in missing; it can only be one of them")
    return marks
