"""Encoding of values and of text cells as numbers, each row by itself, by public rules alone.

Words become one slot each, numbers with a range are clipped to it and scaled to [-1, 1], and a missing value sets the
column's slot for missing values and leaves its other numbers 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.data.faults import Faults, Place
from pbmvfl.data.schema import USUAL_MARKERS, ColumnRule

# --- Text cells, each by itself ---

Mask = npt.NDArray[np.bool_]

_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")


def is_text(kind: Any) -> bool:
    """Return True for Arrow's types of text."""
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def among(column: Any, words: Iterable[str]) -> Mask:
    """Return the mask of cells that, without surrounding blanks, are one of `words`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found = pc.is_in(_trimmed(column), value_set=pa.array(list(words), pa.string()))
    return np.asarray(found.to_numpy(), dtype=bool)


def numbers_of(column: Any, absent: Mask) -> tuple[npt.NDArray[np.float64], Mask]:
    """Return the values, and the mask of cells that are no number; values are NaN where absent or wrong."""
    import pyarrow as pa

    text = _without(_trimmed(column), absent)
    nothing = np.zeros(len(text), dtype=bool)
    try:
        return _floats(text.cast(pa.float64())), nothing
    except pa.ArrowException:  # Arrow does not say which cells, and its message has a value in it
        values = np.full(len(text), np.nan)
        wrong = nothing
        for row, cell in enumerate(text.to_pylist()):
            if cell is not None:
                values[row], wrong[row] = _float(cell)
        return values, wrong


def truths_of(column: Any, absent: Mask) -> tuple[Any, Mask]:
    """Return an Arrow column of true and false, and the mask of cells that are neither."""
    import pyarrow as pa

    yes, no = among(column, _TRUE), among(column, _FALSE)
    return pa.chunked_array([pa.array(yes, mask=~(yes | no) | absent)]), ~(yes | no | absent)


def are_dates(column: Any, absent: Mask) -> bool:
    """Return True if every cell that has a value begins like 2024-12-31 or 31.12.2024 or 12/31/2024."""
    import pyarrow.compute as pc

    found = pc.match_substring_regex(_trimmed(column), r"^(\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2,4})")
    return bool((np.asarray(found.fill_null(False).to_numpy(), dtype=bool) | absent).all() and not absent.all())


def infer(column: Any, absent: Mask) -> Any:
    """Convert text to the first type that fits all cells of a column: whole numbers, numbers, true and false, words."""
    import pyarrow as pa

    if absent.all():
        return pa.chunked_array([pa.nulls(len(column))])
    values, wrong = numbers_of(column, absent)
    if not wrong.any():
        try:
            # After the numbers: to Arrow 0x10 is a whole number and no number.
            return _without(_trimmed(column), absent).cast(pa.int64())
        except pa.ArrowException:
            return pa.chunked_array([pa.array(values, from_pandas=True)])
    truths, wrong = truths_of(column, absent)
    return column if wrong.any() else truths


def _trimmed(column: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.utf8_trim_whitespace(column.cast(pa.string()))


def _without(text: Any, absent: Mask) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.if_else(pa.array(absent), pa.scalar(None, pa.string()), text) if absent.any() else text


def _floats(column: Any) -> npt.NDArray[np.float64]:
    return np.asarray(column.to_numpy(), dtype=np.float64)


def _float(cell: str) -> tuple[float, bool]:
    try:
        value = float(cell)
    except ValueError:
        return np.nan, True
    return (np.nan, True) if "_" in cell else (value, False)  # 1_000 is a number to Python alone


# --- Columns by their rules ---

Features = npt.NDArray[np.float32]

#: The public bound of a column, in either direction. Products with weights and a gradient stay far inside float32.
LARGEST_COLUMN = 1e9

_WHY_VOCABULARIES = "One collected from the rows would tell which words occur, which is a release about private values"
#: What to do about dates.
NUMBERS_OF_DATES = "make numbers of them before loading, such as the year, the month or the days since a public day"


def encode_columns(rules: Sequence[ColumnRule], table: Any, place: Place, faults: Faults) -> Features:
    """Encode columns side by side, (N, width), float32; after a fault the numbers mean nothing."""
    parts = [_encode(_Column(rule, table.column(rule.name), place, faults)) for rule in rules]
    return np.concatenate([np.zeros((table.num_rows, 0), np.float32), *parts], axis=1)


def refuse_absent(rule: ColumnRule, column: Any, place: Place, faults: Faults) -> None:
    """Add a fault if a value is missing and the rule has no slot for that."""
    absent = absent_in(rule, column)
    if absent.any() and not rule.missing:
        _refuse_absent(_Column(rule, column, place, faults), absent)


def refuse_words(name: str, column: Any, place: Place, faults: Faults) -> None:
    """Add a fault for words without a rule: words among numbers are named, otherwise the reason and the remedy."""
    cells = _Column(ColumnRule(name=name), column, place, faults)
    absent = absent_in(cells.rule, column)
    _, wrong = numbers_of(column, absent)
    present, words = int((~absent).sum()), int(wrong.sum())
    if not words and absent.any():  # only marks of missing values keep the column from being numbers
        _refuse_absent(cells, absent)
    elif not words:
        cells.fault(" has numbers that are stored as words; store the column as numbers")
    elif are_dates(column, absent):
        cells.fault(f" holds dates; {NUMBERS_OF_DATES}")
    elif 2 * words < present:
        _refuse_non_numbers(cells, wrong, why=f"{present - words:,} of {present:,} values are numbers")
    else:
        line = f'"{name}": {{"vocabulary": ["...", "..."], "other": true}}'
        cells.fault(
            f" holds words and needs a vocabulary as well: {line}"
            if faults.has(_WHY_VOCABULARIES)
            else f" holds words and needs a vocabulary. {_WHY_VOCABULARIES}; so agree on it and write it into the "
            f'schema (`pbmvfl schema` makes a template): {{"columns": {{{line}}}}}'
        )


@dataclass(frozen=True)
class _Column:
    """Cells of one column, its rule, and the list of faults."""

    rule: ColumnRule
    cells: Any
    place: Place
    faults: Faults

    def fault(self, words: str) -> None:
        self.faults.add(f"{self.place.file}: column={self.rule.name!r}{words}")

    def fault_of_rows(self, rows: Mask, one: str, many: str) -> None:
        chosen = np.flatnonzero(rows)
        self.fault(f": {self.place.rows(chosen)} {one if len(chosen) == 1 else many}")

    def zeros(self) -> Features:
        return np.zeros((len(self.cells), self.rule.width), np.float32)


def _encode(column: _Column) -> Features:
    import pyarrow as pa

    rule, before = column.rule, len(column.faults)
    absent = absent_in(rule, column.cells)
    if absent.any() and not rule.missing:
        _refuse_absent(column, absent)
    if pa.types.is_null(column.cells.type):
        known = column.zeros()[:, : rule.width - rule.missing]
    elif rule.vocabulary is not None:
        known = _one_hot(column, absent)
    else:
        known = _numbers(column, absent)
    if len(column.faults) > before:
        return column.zeros()
    known[absent] = 0
    return np.concatenate([known, absent[:, None].astype(np.float32)], axis=1) if rule.missing else known


def absent_in(rule: ColumnRule, cells: Any) -> Mask:
    """Return the mask of missing values, which depends on the cell and the rule alone and never on other rows."""
    import pyarrow.compute as pc

    absent = np.array(pc.is_null(cells, nan_is_null=True).to_numpy(), dtype=bool)
    if is_text(cells.type):
        # Without a slot: what cannot be a value here in any case, so that it is named as what it is.
        marks = {*USUAL_MARKERS, *rule.markers} if rule.missing else set() if rule.other else {"", "?"}
        absent |= among(cells, marks.difference(map(str, rule.vocabulary or ())))
    elif rule.markers and is_number(cells.type):
        import pyarrow as pa

        values, _ = numbers_of(pa.chunked_array([rule.markers]), np.zeros(len(rule.markers), dtype=bool))
        absent |= np.isin(_as_floats(cells), values)  # NaN, for a mark that is a word, is in nothing
    return absent


def _refuse_absent(column: _Column, absent: Mask) -> None:
    rest = (
        "no value (empty, NA or ?); leave out or fill in, or give missing values a slot in the schema: "
        + column.rule.with_slot_for_missing()
    )
    column.fault_of_rows(absent, f"has {rest}", f"have {rest}")


def _as_floats(cells: Any) -> npt.NDArray[np.float64]:
    import pyarrow as pa

    return np.asarray(cells.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)


# --- numbers ---


def _numbers(column: _Column, absent: Mask) -> Features:
    """Clip numbers to the public range and scale them to [-1, 1], each row by itself; without a range, keep them."""
    import pyarrow as pa

    rule, kind = column.rule, column.cells.type
    if is_text(kind):
        values, wrong = numbers_of(column.cells, absent)
        if wrong.any():
            range_is_for_numbers = "its schema has a range, which is for numbers"
            _refuse_non_numbers(column, wrong, why="numbers are meant" if rule.range is None else range_is_for_numbers)
        elif not rule.missing and not absent.any():  # marks of missing values are faults already
            column.fault(" has numbers that are stored as words; store the column as numbers")
    elif is_number(kind):
        values = _as_floats(column.cells)
    elif pa.types.is_boolean(kind):
        way_out = "give numbers" if rule.range is None else "true and false need no entry in the schema"
        column.fault(f" holds true and false where numbers are meant; {way_out}")
        return column.zeros()
    else:
        column.fault(f" has type {kind}; permitted are numbers, words, and true or false{_if_dates(kind)}")
        return column.zeros()
    values = np.where(absent, 0.0, values)
    if rule.range is not None:
        low, high = rule.range
        beyond = np.isinf(values)
        remedy = "infinite; correct"
        # Halves first: high - low may overflow where each of them does not.
        values = (np.clip(values, low, high) / 2 - low / 2) / (high / 2 - low / 2) * 2 - 1
    else:
        beyond = np.abs(values) > LARGEST_COLUMN
        remedy = (
            f"infinite or beyond {LARGEST_COLUMN:g}; give the column a range in the schema, "
            f'"{rule.name}": {{"range": [low, high]}}, or correct'
        )
    if beyond.any():
        column.fault_of_rows(beyond, f"is {remedy} it", f"are {remedy} them")
        return column.zeros()
    return values.astype(np.float32)[:, None]


def _if_dates(kind: Any) -> str:
    import pyarrow as pa

    return f". If these are dates, {NUMBERS_OF_DATES}" if pa.types.is_temporal(kind) else ""


def _refuse_non_numbers(column: _Column, wrong: Mask, *, why: str) -> None:
    rest = "(numbers are written like 12 or 1.5) or leave out"
    if column.rule.missing:
        rest += '; marks of missing values of your own go into the schema, as in "missing": ["unknown"]'
    rest += "; if these are words, give the column a vocabulary in the schema"
    column.fault_of_rows(
        wrong, f"is not a number, but {why}. Correct it {rest}", f"are not numbers, but {why}. Correct them {rest}"
    )


# --- words ---


def _one_hot(column: _Column, absent: Mask) -> Features:
    import pyarrow as pa
    import pyarrow.compute as pc

    rule = column.rule
    assert rule.vocabulary is not None
    common = {str: pa.string(), bool: pa.bool_(), int: pa.int64()}[type(rule.vocabulary[0])]
    words = _words(column, absent)
    if words is None:
        return column.zeros()
    slots = pc.index_in(words, value_set=pa.array(rule.vocabulary, type=common))
    outside = np.asarray(slots.is_null().to_numpy(), dtype=bool) & ~absent
    if outside.any() and not rule.other:
        rest = (
            f"not in the vocabulary{_because_of_blanks(column, outside)}; complete the vocabulary, or give such "
            'values a place of their own with "other": true'
        )
        column.fault_of_rows(outside, f"has a value that is {rest}", f"have values that are {rest}")
        return column.zeros()
    encoded = np.zeros((len(column.cells), len(rule.vocabulary) + rule.other), np.float32)
    # A row without a value takes the last slot here; the caller puts zeros into it.
    encoded[np.arange(len(encoded)), np.asarray(slots.fill_null(encoded.shape[1] - 1).to_numpy())] = 1
    return encoded


def _words(column: _Column, absent: Mask) -> Any:
    """Return the cells in the vocabulary's type, or None with a fault."""
    import pyarrow as pa

    cells, kind, word_type = column.cells, column.cells.type, column.rule.word_type
    assert word_type is not None
    if word_type is str and is_text(kind):
        return cells.cast(pa.string())
    if word_type is bool and pa.types.is_boolean(kind):
        return cells
    if word_type is int and pa.types.is_integer(kind):
        try:
            return cells.cast(pa.int64())
        except pa.ArrowException:
            column.fault(" has integers that do not fit in 64 bits; store such codes as words")
            return None
    if word_type is int and is_number(kind):
        return _whole(_as_floats(cells))
    of_type = f"but its vocabulary is of {word_type.__name__} values"
    if word_type is not str and is_text(kind):
        words, wrong = truths_of(cells, absent) if word_type is bool else _whole_numbers_of(cells, absent)
        if column.rule.missing and not wrong.any():
            return words  # text only because of the marks of missing values
        if wrong.any() and not (wrong | absent).all():
            what = "whole number" if word_type is int else "true or false"
            rest = f"no {what}, {of_type}; correct"
            column.fault_of_rows(wrong, f"is {rest} it", f"are {rest} them")
            return None
    column.fault(f" has type {kind}, {of_type}; write the vocabulary in the column's type")
    return None


def _whole_numbers_of(cells: Any, absent: Mask) -> tuple[Any, Mask]:
    values, wrong = numbers_of(cells, absent)
    return _whole(values), wrong


def _whole(values: npt.NDArray[np.float64]) -> Any:
    """Return whole numbers of a real type as integers, else null: many programs make a column with gaps real."""
    import pyarrow as pa

    with np.errstate(invalid="ignore"):
        whole = (np.floor(values) == values) & (np.abs(values) < 2.0**63)
    return pa.chunked_array([pa.array(np.where(whole, values, 0).astype(np.int64), mask=~whole)])


def _because_of_blanks(column: _Column, outside: Mask) -> str:
    known = [word for word in column.rule.vocabulary or () if isinstance(word, str)]
    has_blanks = bool(known) and bool((among(column.cells, known) & outside).any())
    return " because of blanks around words (take them away)" if has_blanks else ""
