"""A table of one's own, .parquet or .csv, with the columns named for each party.

Encoding follows a *schema*: public metadata that all parties agree on before anybody looks at a value. A vocabulary
or a range learned from private values would itself be a release about them, outside every account of privacy; so
nothing is learned here. What the schema does not say is either used as it is or refused.
"""

from __future__ import annotations

import csv
import difflib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import DataError
from pbmvfl.randomness.public import SPLIT_STREAM, public_permutation

#: Unquoted, these are missing values in a CSV; in quotes they are words.
_CSV_NULLS = ["", "NA", "N/A", "NaN", "nan", "NULL", "null"]

#: Column names that an error lists.
_SHOWN = 20

#: ImageNet has as many. A label with more is nearly always an amount or an identifier.
_MOST_CLASSES = 1_000
_GROUP_LABELS = (
    "If the label is an amount or an identifier, put it into a few classes before loading (0 and 1, or low and high), "
    "or give another column as label"
)


@dataclass(frozen=True, kw_only=True)
class _ColumnSchema:
    """What is public about one column: the words that may occur, or the range of its numbers."""

    vocabulary: tuple[str | int | bool, ...] | None = None
    other: bool = False
    range: tuple[float, float] | None = None


def parse_columns(text: str) -> dict[str, tuple[str, ...]]:
    """Who holds which column, from "bank=a,b,c;hospital=d,e"."""
    columns: dict[str, tuple[str, ...]] = {}
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        party, equals, names = (piece.strip() for piece in part.partition("="))
        if not equals or not party:
            raise DataError(f"columns={text!r}: {part!r} is not of the form party=column,column;party=column")
        if party in columns:
            raise DataError(f"columns={text!r}: party={party!r} occurs twice; list all its columns in one place")
        columns[party] = tuple(filter(None, (name.strip() for name in names.split(","))))
    return _check_assignment(columns)


def load_table(
    path: str | Path,
    *,
    label: str,
    columns: Mapping[str, Sequence[str]] | str,
    test: str | Path | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    schema: Mapping[str, Any] | str | Path | None = None,
    name: str | None = None,
) -> VerticalDataset:
    """A data set from a .parquet or .csv file: `columns` says which party holds which, `label` is the server's.

    Without a `test` file, `test_fraction` of the rows, chosen by the public `seed`, are kept for testing. Rows are
    known to ledgers by their number in the file, whatever the split.
    `schema` is public: {"columns": {"job": {"vocabulary": ["a", "b"], "other": true}, "age": {"range": [0, 120]}}}.
    `name` is the owner's name for these people, under which ledgers count what is spent on them: one name, one budget.
    By default it is the file's name without its ending.
    """
    _check_name(name)
    held = parse_columns(columns) if isinstance(columns, str) else _check_assignment(columns)
    if isinstance(test_fraction, bool) or not isinstance(test_fraction, int | float) or not 0 < test_fraction < 1:
        raise DataError(
            f"test_fraction={test_fraction!r} is not permitted; give a number between 0 and 1, both excluded"
        )
    for party, names in held.items():
        if label in names:
            raise DataError(f"label={label!r} is also a column of party={party!r}; a label cannot be a feature")
    rules = _read_schema(schema)
    files = [Path(file) for file in (path, test) if file is not None]
    used = [name for part in held.values() for name in part]
    tables = [_read_table(file, [*used, label], rules) for file in files]
    raw_labels = [_label_values(table, label, file) for table, file in zip(tables, files, strict=True)]
    classes, labels = _number_classes(raw_labels, label)
    features = [
        tuple(
            np.concatenate([_encode(table, name, rules.get(name)) for name in part], axis=1) for part in held.values()
        )
        for table in tables
    ]
    ids = [_row_ids(len(labels[0]))]
    if test is not None:
        # The file's own name keeps its rows apart from those of the training file.
        ids.append(_row_ids(len(labels[1]), of="" if os.path.samefile(*files) else f"{files[1].stem}:"))
    else:
        count = len(labels[0])
        num_test = math.ceil(count * test_fraction)
        if count - num_test < 1:
            raise DataError(f"test_fraction={test_fraction} of {count} rows leaves none for training; give less")
        order = public_permutation(count, seed=seed, stream=SPLIT_STREAM)
        splits = (order[: count - num_test], order[count - num_test :])
        labels = [labels[0][rows] for rows in splits]
        features = [tuple(part[rows] for part in features[0]) for rows in splits]
        ids = [tuple(ids[0][row] for row in rows.tolist()) for rows in splits]
    return VerticalDataset(
        name=Path(path).stem if name is None else name,
        party_names=tuple(held),
        train_features=features[0],
        test_features=features[1],
        train_labels=labels[0],
        test_labels=labels[1],
        class_names=classes,
        default_encoder="mlp",
        layout="assigned",
        notes=_notes(held, tables[0], rules),
        train_ids=ids[0],
        test_ids=ids[1],
    )


def _check_name(name: str | None) -> None:
    if name is None:
        return
    # Blanks at an end would make a second budget that looks like the first; run folders are named by it, too.
    if not isinstance(name, str) or not name or name != name.strip() or "/" in name or "\\" in name:
        raise DataError(
            f"name={name!r} is not permitted; give a text without / and \\ that neither begins nor ends with a blank, "
            "as in 'patients-2024', or leave it out to use the file's name"
        )


def _row_ids(count: int, *, of: str = "") -> tuple[str, ...]:
    return tuple(f"{of}{row}" for row in range(count))


def _check_assignment(columns: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The assignment as plain tuples, after refusing what cannot be one."""
    if len(columns) < 2:
        raise DataError(
            f"columns name {len(columns)} parties; at least 2 are needed, as in bank=age,income;hospital=bmi"
        )
    holder: dict[str, str] = {}
    for party, names in columns.items():
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise DataError(
                f"party={party!r}: columns={names!r} is not a list of names; give one, as in ['age', 'income']"
            )
        if not names:
            raise DataError(f"party={party!r} has no columns; give it at least one or leave it out")
        for name in names:
            if name in holder:
                others = f"party={party!r}" if holder[name] == party else f"party={holder[name]!r} and party={party!r}"
                raise DataError(f"column={name!r} is named twice ({others}); each column belongs to one party, once")
            holder[name] = party
    return {party: tuple(names) for party, names in columns.items()}


def _read_schema(schema: Mapping[str, Any] | str | Path | None) -> dict[str, _ColumnSchema]:
    if schema is None:
        return {}
    if isinstance(schema, str | Path):
        try:
            schema = json.loads(Path(schema).read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
        except OSError as error:
            raise DataError(f"schema={str(schema)!r} cannot be read ({error.strerror}); give a JSON file") from error
        except ValueError as error:
            raise (
                error if isinstance(error, DataError) else DataError(f"schema={str(schema)!r} is not JSON ({error})")
            ) from error
    if not isinstance(schema, Mapping) or not isinstance(schema.get("columns", {}), Mapping):
        raise DataError('the schema must be of the form {"columns": {"name": {...}}}')
    _only_keys(schema, ("columns",), "the schema")
    return {name: _column_schema(name, entry) for name, entry in schema.get("columns", {}).items()}


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"the schema says {name!r} twice; only one of them could be followed")
    return dict(pairs)


def _only_keys(entry: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in entry:
        if key not in known:
            raise DataError(
                f"{where} has the unknown key {key!r}{_nearest(str(key), known)}; known: {', '.join(known)}"
            )


def _column_schema(name: str, entry: Any) -> _ColumnSchema:
    where = f"schema of column={name!r}"
    if not isinstance(entry, Mapping):
        raise DataError(f'{where}: {entry!r} is not of the form {{"vocabulary": [...]}} or {{"range": [low, high]}}')
    _only_keys(entry, ("vocabulary", "other", "range"), where)
    words, other, limits = entry.get("vocabulary"), entry.get("other", False), entry.get("range")
    if (words is None) == (limits is None):
        raise DataError(f"{where}: give either a vocabulary or a range")
    if words is None:
        if "other" in entry:
            raise DataError(f"{where}: other belongs to a vocabulary; a number outside a range is clipped to it")
        return _ColumnSchema(range=_check_range(limits, where))
    if not isinstance(words, list | tuple) or not words or len({type(word) for word in words}) > 1:
        raise DataError(f"{where}: vocabulary={words!r} must be a list of words, of integers, or of true and false")
    if not isinstance(words[0], str | int):
        raise DataError(f"{where}: vocabulary has {words[0]!r}; permitted are words, integers, true and false")
    if len(set(words)) < len(words):
        raise DataError(f"{where}: vocabulary={words!r} has a word twice")
    if not isinstance(other, bool):
        raise DataError(f"{where}: other={other!r}; permitted are true and false")
    return _ColumnSchema(vocabulary=tuple(words), other=other)


def _check_range(limits: Any, where: str) -> tuple[float, float]:
    is_pair = isinstance(limits, list | tuple) and len(limits) == 2
    if not is_pair or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in limits):
        raise DataError(f"{where}: range={limits!r} must be two numbers, [low, high]")
    low, high = (float(value) for value in limits)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise DataError(f"{where}: range={limits!r}; low and high must be finite, and low less than high")
    return low, high


def _nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _read_table(path: Path, wanted: list[str], rules: Mapping[str, _ColumnSchema]) -> Any:
    """A pyarrow table of the wanted columns, dictionary columns as plain ones."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq

    if path.suffix not in (".parquet", ".csv"):
        raise DataError(f"path={str(path)!r} ends in {path.suffix!r}; permitted are .parquet and .csv")
    if not path.is_file():
        raise DataError(f"path={str(path)!r} does not exist or is not a file; check the spelling")
    try:
        if path.suffix == ".parquet":
            present = pq.read_schema(path).names
            _require_columns(path, present, wanted, rules)
            table = pq.read_table(path, columns=wanted)
        else:
            # Words that look like numbers (postcodes) stay words where the vocabulary says that they are.
            words = {
                n: pa.string() for n, rule in rules.items() if rule.vocabulary and isinstance(rule.vocabulary[0], str)
            }
            options = pyarrow.csv.ConvertOptions(
                column_types=words, null_values=_CSV_NULLS, strings_can_be_null=True, quoted_strings_can_be_null=False
            )
            _require_columns(path, _csv_header(path), wanted, rules)
            table = pyarrow.csv.read_csv(path, convert_options=options)
            _require_columns(path, table.column_names, wanted, rules)  # what was read, should the two disagree
            table = table.select(wanted)
        if not table.num_rows:
            raise DataError(f"path={str(path)!r} has column names but no rows; at least one row is needed")
        plain = [
            pa.field(field.name, field.type.value_type if pa.types.is_dictionary(field.type) else field.type)
            for field in table.schema
        ]
        return table.cast(pa.schema(plain))
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"path={str(path)!r} cannot be read as a table ({error})") from error


def _csv_header(path: Path) -> list[str]:
    """The column names of a CSV, after refusing text that is not UTF-8, whose words no schema could list.

    Read by itself because a wrong separator often ends in an error about some row, before anything shows the header.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = next(filter(None, csv.reader(file)), [])
            while file.read(1 << 20):
                pass
    except UnicodeDecodeError as error:
        raise DataError(
            f"path={str(path)!r} is not UTF-8; save it as UTF-8 (in Excel: 'CSV UTF-8' in the list of file types)"
        ) from error
    except csv.Error as error:
        raise DataError(
            f"path={str(path)!r} has no readable header ({error}); give names separated by commas"
        ) from error
    if not header:
        raise DataError(f"path={str(path)!r} is empty; give a line of column names and then the rows")
    return header


def _require_columns(path: Path, present: list[str], wanted: list[str], rules: Mapping[str, _ColumnSchema]) -> None:
    for name in wanted:
        if name not in present:
            shown = ", ".join(map(repr, present[:_SHOWN])) + (", ..." if len(present) > _SHOWN else "")
            count = f"{len(present)} column{'' if len(present) == 1 else 's'}"
            raise DataError(
                f"column={name!r} is not in {path.name}{_nearest(name, present)}; it has {count}: {shown}"
                f"{_separator_hint(path, present)}"
            )
        if present.count(name) > 1:
            raise DataError(f"column={name!r} occurs twice in {path.name}; rename one of them")
    for name in rules:
        if name not in present:
            raise DataError(
                f"the schema describes column={name!r}, which is not in {path.name}{_nearest(name, present)}"
            )


def _separator_hint(path: Path, present: Sequence[str]) -> str:
    found = next((mark for mark in (";", "\t", "|") if any(mark in name for name in present)), None)
    if path.suffix != ".csv" or (found is None and len(present) > 1):
        return ""
    instead = "" if found is None else f", not by {found!r}"
    return f". Columns must be separated by commas{instead}; save the file with commas"


def _label_values(table: Any, label: str, path: Path) -> list[Any]:
    import pyarrow as pa
    import pyarrow.compute as pc

    column = table.column(label)
    kind = column.type
    permitted = (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer, pa.types.is_boolean)
    if not (any(check(kind) for check in permitted) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
        raise DataError(f"label={label!r} has type {kind}; permitted are words, numbers and true or false")
    missing = np.flatnonzero(pc.is_null(column, nan_is_null=True).to_numpy(zero_copy_only=False))
    if len(missing):
        raise DataError(
            f"label={label!r}: row={missing[0]} (counted from 0) of {path.name} has no label; every row needs one"
        )
    values = list(column.to_pylist())
    if pa.types.is_floating(kind):
        row = next((row for row, value in enumerate(values) if not value.is_integer()), None)
        if row is not None:
            raise DataError(
                f"label={label!r}: row={row} (counted from 0) of {path.name} has {values[row]!r}, which is not a whole "
                f"number; there are {len(set(values)):,} different values, and each would be a class of its own. "
                f"{_GROUP_LABELS}"
            )
    return values


def _number_classes(raw: list[list[Any]], label: str) -> tuple[tuple[str, ...], list[npt.NDArray[np.int64]]]:
    try:
        classes = sorted({value for values in raw for value in values})
    except TypeError as error:
        raise DataError(f"label={label!r} has another type in the test file than in the training file") from error
    rows = sum(len(values) for values in raw)
    most = min(_MOST_CLASSES, max(2, rows // 2))
    if len(classes) > most:
        raise DataError(
            f"label={label!r} has {len(classes):,} classes in {rows:,} rows; permitted are at most {most:,} "
            f"(half the rows, and never more than {_MOST_CLASSES:,}). {_GROUP_LABELS}"
        )
    number = {value: index for index, value in enumerate(classes)}
    labels = [np.array([number[value] for value in values], dtype=np.int64) for values in raw]
    return tuple(str(value) for value in classes), labels


def _is_word_type(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _encode(table: Any, name: str, rule: _ColumnSchema | None) -> npt.NDArray[np.float32]:
    """One column as (rows, width) float32: one-hot for words, a single column for numbers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = table.column(name)
    kind = column.type
    where = f"column={name!r}"
    missing = np.flatnonzero(pc.is_null(column, nan_is_null=True).to_numpy(zero_copy_only=False))
    if len(missing):
        raise DataError(
            f"{where}: row={missing[0]} (counted from 0) has no value; leave the row out or fill it in before loading"
        )
    if pa.types.is_boolean(kind) and rule is None:
        rule = _ColumnSchema(vocabulary=(False, True))  # known from the type alone, so nothing is learned
    if _is_word_type(kind) and (rule is None or rule.vocabulary is None):
        _refuse_words_among_numbers(column, where, has_range=rule is not None)
        raise DataError(
            f"{where} holds words and needs a vocabulary. One collected from the rows would tell which words occur, "
            "which is a release about private values; so agree on it and write it into the schema: "
            f'{{"columns": {{"{name}": {{"vocabulary": ["...", "..."], "other": true}}}}}}'
        )
    if rule is not None and rule.vocabulary is not None:
        return _one_hot(column, name, rule)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise DataError(f"{where} has type {kind}; permitted are numbers, words, and true or false")
    values = column.cast(pa.float64(), safe=False).to_numpy()
    return _numbers(values, where, None if rule is None else rule.range)


def _refuse_words_among_numbers(column: Any, where: str, *, has_range: bool) -> None:
    """Name the cell that makes a column of numbers one of words; without effect where words were meant."""
    cells = column.to_pylist()
    wrong = [row for row, cell in enumerate(cells) if not _is_number(cell)]
    if not has_range and 2 * len(wrong) >= len(cells):
        return
    if not wrong:
        raise DataError(f"{where} has numbers that are stored as words; store the column as numbers")
    numbers = f"{len(cells) - len(wrong):,} of {len(cells):,} values are numbers"
    reason = "its schema has a range, which is for numbers" if has_range else numbers
    raise DataError(
        f"{where}: row={wrong[0]} (counted from 0) has the value {cells[wrong[0]]!r}, which is not a number, but "
        f"{reason}. Correct it (numbers are written like 12 or 1.5) or leave the row out; if these are words, give the "
        "column a vocabulary in the schema"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text  # 1_000 is a number to Python alone


def _one_hot(column: Any, name: str, rule: _ColumnSchema) -> npt.NDArray[np.float32]:
    import pyarrow as pa
    import pyarrow.compute as pc

    assert rule.vocabulary is not None
    matching = {str: _is_word_type, bool: pa.types.is_boolean, int: pa.types.is_integer}
    word_type = type(rule.vocabulary[0])
    if not matching[word_type](column.type):
        raise DataError(
            f"column={name!r} has type {column.type}, but its vocabulary is of {word_type.__name__} values; "
            "write the vocabulary in the column's type"
        )
    common = {str: pa.string(), bool: pa.bool_(), int: pa.int64()}[word_type]
    try:
        slots = pc.index_in(column.cast(common), value_set=pa.array(rule.vocabulary, type=common))
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(f"column={name!r}: values or vocabulary do not fit in 64 bits ({error})") from error
    width = len(rule.vocabulary)
    outside = np.flatnonzero(slots.is_null().to_numpy())
    if len(outside) and not rule.other:
        row = int(outside[0])
        raise DataError(
            f"column={name!r}: row={row} (counted from 0) has the value {column[row].as_py()!r}, which is not in the "
            'vocabulary; add it, or give such values a place of their own with "other": true'
        )
    positions: npt.NDArray[np.int32] = slots.fill_null(width).to_numpy()
    slot_vectors: npt.NDArray[np.float32] = np.eye(width + rule.other, dtype=np.float32)
    return slot_vectors[positions]


def _numbers(
    values: npt.NDArray[np.float64], where: str, limits: tuple[float, float] | None
) -> npt.NDArray[np.float32]:
    """Clipped to the public range and scaled to [-1, 1], each row by itself; without a range, as they are."""
    if limits is not None:
        low, high = limits
        infinite = np.flatnonzero(~np.isfinite(values))
        # Halves first: high - low may overflow where each of them does not.
        scaled = (np.clip(values, low, high) / 2 - low / 2) / (high / 2 - low / 2) * 2 - 1
    else:
        infinite = np.flatnonzero(~(np.abs(values) <= np.finfo(np.float32).max))
        scaled = values
    if len(infinite):
        raise DataError(f"{where}: row={infinite[0]} (counted from 0) is infinite or too large for float32; correct it")
    return scaled.astype(np.float32)[:, None]


def _notes(held: Mapping[str, Sequence[str]], table: Any, rules: Mapping[str, _ColumnSchema]) -> tuple[str, ...]:
    import pyarrow as pa

    notes = []
    for party, names in held.items():
        unscaled = [name for name in names if name not in rules and not pa.types.is_boolean(table.column(name).type)]
        if unscaled:
            notes.append(
                f"Party {party}: {', '.join(unscaled)} {'has' if len(unscaled) == 1 else 'have'} no range in the "
                "schema, so the values are unscaled, as they stand in the table."
            )
    return tuple(notes)
