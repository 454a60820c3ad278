"""Readers of .csv and .parquet files and of pandas, polars or pyarrow frames, as pyarrow tables.

A CSV has text only. A column's rule says what its cells mean; without a rule, the column as a whole does.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from pbmvfl._text import counted
from pbmvfl.data.encoding import absent_in, infer, is_text, truths_of
from pbmvfl.data.faults import Faults, listed, nearest
from pbmvfl.data.schema import ColumnRule
from pbmvfl.errors import DataError

#: Unquoted, these are missing values in a CSV; in quotes they are words.
_CSV_NULLS = ["", "NA", "N/A", "NaN", "nan", "NULL", "null"]

#: Marks that a header has instead of commas, rather than inside its names, where it has as many of them as names.
_OTHER_SEPARATORS = (";", "\t", "|")

#: Line numbers that one fault lists.
_SHOWN_LINES = 5


@dataclass(frozen=True, kw_only=True)
class Source:
    """A table's path, or a frame in memory."""

    value: Any
    #: As messages and row ids name it.
    file: str
    stem: str

    @property
    def path(self) -> Path | None:
        return self.value if isinstance(self.value, Path) else None

    @property
    def is_csv(self) -> bool:
        return self.path is not None and self.path.suffix == ".csv"


def source_of(value: Any, *, called: str = "frame") -> Source:
    """Return the source for a path or a frame; a frame has no name of its own and is `called` so."""
    import pyarrow as pa

    if isinstance(value, str | Path):
        return Source(value=Path(value), file=Path(value).name, stem=stem_of(value))
    if _is_pandas(value) or isinstance(value, pa.Table):
        return Source(value=value, file=called, stem=stem_of(value))
    try:
        # Here and once: some streams can be read a single time.
        return Source(value=pa.table(value), file=called, stem=stem_of(value))
    except (TypeError, ValueError, pa.ArrowException):
        raise DataError(
            f"data of type {type(value).__name__} cannot be read; give the path of a .parquet or .csv file, a "
            "DataFrame (pandas, polars) or a pyarrow table"
        ) from None


def stem_of(value: Any) -> str:
    """Return a file's name without its ending; "frame" for a frame."""
    return Path(value).stem if isinstance(value, str | Path) else "frame"


def column_names(source: Source, faults: Faults) -> list[str] | None:
    """Return the names of a table's columns, or None with a fault if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = source.path
    if path is None:
        value = source.value
        return [str(name) for name in (value.columns if _is_pandas(value) else value.column_names)]
    if path.suffix not in (".parquet", ".csv"):
        faults.add(f"path={str(path)!r} ends in {path.suffix!r}; permitted are .parquet and .csv")
    elif not path.is_file():
        faults.add(f"path={str(path)!r} does not exist or is not a file; check the spelling")
    else:
        try:
            if not source.is_csv:
                return list(pq.read_schema(path).names)
            header = _csv_header(path, faults)
            # Blanks around a name are never intended, and no option could name such a column.
            return None if header is None else [name.strip() for name in header]
        except (OSError, pa.ArrowException) as error:
            faults.add(f"path={str(path)!r} cannot be read as a table ({error})")
    return None


def feature_names(
    source: Source, present: Sequence[str], besides: Collection[str | None], notes: list[str]
) -> list[str]:
    """Return the columns that are features where none are named: all but `besides` and, with a note, pandas' index."""
    index = [name for name in _index_names(source) if name not in besides]
    notes += [
        f"{source.file}: column={name!r} is the index of a pandas frame and no feature, so it is left out; name it "
        "among the columns to use it."
        for name in index
    ]
    return [name for name in present if name not in (*besides, *index)]


def _index_names(source: Source) -> list[str]:
    """Return the columns that hold the index of the pandas frame that a table was written from."""
    import pyarrow.parquet as pq

    if source.is_csv or _is_pandas(source.value):
        return []
    schema = source.value.schema if source.path is None else pq.read_schema(source.path)
    # An index that is a range of numbers is described there and stored in no column.
    return [name for name in (schema.pandas_metadata or {}).get("index_columns", []) if isinstance(name, str)]


def require_columns(source: Source, present: Sequence[str], wanted: Sequence[str], faults: Faults) -> list[str]:
    """Return those of `wanted` that can be read; one fault names all absent ones."""
    absent = [name for name in dict.fromkeys(wanted) if name not in present]
    if absent:
        first, *others = [(f"column={name!r}", nearest(name, present)) for name in absent]
        faults.add(
            f"{first[0]} is not in {source.file}{first[1]}{''.join(f', nor is {name}{hint}' for name, hint in others)}"
            f"; it has {counted(len(present), 'column')}: {listed(present)}{_quoting_hint(absent, present)}"
        )
    twice = [name for name in dict.fromkeys(wanted) if present.count(name) > 1]
    for name in twice:
        faults.add(f"column={name!r} occurs twice in {source.file}; rename one of them")
    return [name for name in dict.fromkeys(wanted) if name not in absent and name not in twice]


def _quoting_hint(absent: Sequence[str], present: Sequence[str]) -> str:
    """Return what to do where an absent name is a piece of one with a comma or a semicolon in it."""
    cut = next((name for name in present if {each.strip() for each in re.split("[,;]", name)} & set(absent)), None)
    return "" if cut is None else f'. A name with a comma in it goes into double quotes, as in bank="{cut}"'


def read_columns(
    source: Source,
    wanted: Sequence[str],
    rules: Mapping[str, ColumnRule],
    faults: Faults,
    *,
    as_text: Collection[str] = (),
) -> Any:
    """Return a pyarrow table of the wanted columns, which must exist, or None with a fault if it cannot be read.

    A CSV's cells become what `rules` say; those of the columns in `as_text` stay as they are written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not wanted:
        return None
    try:
        if source.path is None:
            table = _of_frame(source, wanted, faults)
        elif source.is_csv:
            table = _of_csv(source.path, wanted, rules, as_text, faults)
        else:
            with pq.ParquetFile(source.path) as file:  # read_table would import pandas
                table = file.read(columns=list(wanted))
        table = None if table is None else plain(table)
    except (OSError, pa.ArrowException) as error:
        # A CSV reader's message may have a value in it.
        faults.add(f"{source.file} cannot be read as a table" + ("" if source.is_csv else f" ({error})"))
        return None
    if table is not None and not table.num_rows:
        faults.add(f"{source.file} has column names but no rows; at least one row is needed")
        return None
    return table


def plain(table: Any) -> Any:
    """Replace dictionary columns by their values, and every kind of text by one type."""
    import pyarrow as pa

    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_dictionary(column.type):
            # Arrow has no cast for dictionaries of string views, which polars makes, so each chunk is looked up.
            chunks = [_one_text(chunk.dictionary).take(chunk.indices) for chunk in column.chunks]
            columns[name] = pa.chunked_array(chunks or [_one_text(pa.array([], column.type.value_type))])
        else:
            columns[name] = _one_text(column)
    return pa.table(columns)


def _one_text(column: Any) -> Any:
    import pyarrow as pa

    return column.cast(pa.string()) if is_text(column.type) else column


# --- frames ---


def _is_pandas(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "iloc") and hasattr(value, "columns")


def arrow_table(source: Source) -> Any:
    """Return a frame in memory as a pyarrow table with all its columns."""
    faults = Faults()
    names = column_names(source, faults)
    table = read_columns(source, names or [], {}, faults)
    faults.raise_any()
    return table


def _of_frame(source: Source, wanted: Sequence[str], faults: Faults) -> Any:
    import pyarrow as pa

    if not _is_pandas(source.value):
        return source.value.select(list(wanted))
    names = [str(name) for name in source.value.columns]
    columns = {}
    for name in wanted:
        series = source.value.iloc[:, names.index(name)]
        try:
            columns[name] = pa.array(series, from_pandas=True)
        except (pa.ArrowException, OverflowError):  # Arrow's message has a value in it
            columns[name] = _mixed(series)
            if columns[name] is None:
                faults.add(
                    f"{source.file}: column={name!r} has objects of several types; make it numbers, words, or true and "
                    "false"
                )
    usable = {name: column for name, column in columns.items() if column is not None}
    return pa.table(usable) if len(usable) == len(columns) else None


def _mixed(series: Any) -> Any:
    """Return a column of numbers and words, which programs that guess types piece by piece leave behind, as text."""
    import pyarrow as pa

    cells = series.tolist()
    if not all(cell is None or isinstance(cell, str | int | float) for cell in cells):
        return None
    absent = np.array([cell is None or cell != cell for cell in cells])
    return pa.array([str(cell) for cell in cells], pa.string(), mask=absent)


# --- CSV ---


def _csv_header(path: Path, faults: Faults) -> list[str] | None:
    """Return the column names of a CSV; text that is not UTF-8 is refused, because no schema could list its words.

    The header is read separately: a wrong separator often ends in an error about some row before anything shows it.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = _first_line(file)
            while file.read(1 << 20):
                pass
    except UnicodeDecodeError:
        faults.add(
            f"path={str(path)!r} is not UTF-8; save it as UTF-8 (in Excel: 'CSV UTF-8' in the list of file types)"
        )
        return None
    except csv.Error as error:
        faults.add(f"path={str(path)!r} has no readable header ({error}); give names separated by commas")
        return None
    if not header:
        faults.add(f"path={str(path)!r} is empty; give a line of column names and then the rows")
        return None
    found = next((mark for mark in _OTHER_SEPARATORS if sum(name.count(mark) for name in header) >= len(header)), None)
    if found is not None:
        faults.add(
            f"{path.name} has {counted(len(header), 'column')}: {listed(header)}. Columns must be separated by commas, "
            f"not by {found!r}; save the file with commas"
        )
        return None
    return header


def _first_line(file: TextIO) -> list[str]:
    return next(filter(None, csv.reader(file)), [])


def _of_csv(
    path: Path,
    wanted: Sequence[str],
    rules: Mapping[str, ColumnRule],
    as_text: Collection[str],
    faults: Faults,
) -> Any:
    import pyarrow.csv

    ragged = 0

    def skip(row: Any) -> str:
        nonlocal ragged
        del row
        ragged += 1
        return "skip"

    table = pyarrow.csv.read_csv(path, **csv_options(path, wanted, skip))
    if ragged:
        faults.add(ragged_lines(path, ragged))
        return None
    return typed(table.rename_columns(list(wanted)), rules, as_text)


def csv_options(path: Path, wanted: Sequence[str], on_ragged: Callable[[Any], str]) -> dict[str, Any]:
    """Return Arrow's options for reading these columns of a CSV, all as text."""
    import pyarrow as pa
    import pyarrow.csv

    with path.open(encoding="utf-8-sig", newline="") as file:
        written = {name.strip(): name for name in _first_line(file)}
    as_written = [written[name] for name in wanted]
    return {
        "read_options": pyarrow.csv.ReadOptions(use_threads=False),
        "parse_options": pyarrow.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=on_ragged),
        "convert_options": pyarrow.csv.ConvertOptions(
            include_columns=as_written,
            column_types=dict.fromkeys(as_written, pa.string()),
            null_values=_CSV_NULLS,
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    }


def typed(table: Any, rules: Mapping[str, ColumnRule], as_text: Collection[str]) -> Any:
    """Convert a table of text to the types that the columns' rules say."""
    for position, name in enumerate(table.column_names):
        if name not in as_text:
            table = table.set_column(position, name, _typed(table.column(name), rules.get(name)))
    return table


def _typed(column: Any, rule: ColumnRule | None) -> Any:
    """Convert text to the type of its rule; it stays text where a cell does not fit, and the encoder names the cell."""
    if rule is not None and rule.word_type is str:
        return column
    absent = absent_in(rule, column) if rule is not None and rule.missing else np.asarray(column.is_null().to_numpy())
    if rule is not None and rule.word_type is bool:
        truths, wrong = truths_of(column, absent)
        return column if wrong.any() else truths
    typed = infer(column, absent)
    return typed if rule is None or not is_text(typed.type) else column


def ragged_lines(path: Path, count: int) -> str:
    """Describe the lines whose number of values differs from the header's; no value is shown."""
    found: list[tuple[int, int]] = []
    width = 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        try:
            for cells in reader:
                width = width or len(cells)
                if cells and len(cells) != width and len(found) < _SHOWN_LINES:
                    found.append((reader.line_num, len(cells)))
        except csv.Error:
            pass  # the lines before it are named
    lines = ", ".join(f"line {line} has {cells}" for line, cells in found)
    more = f", and {count - len(found):,} more" if found and count > len(found) else ""
    return (
        f"{path.name}: {counted(count, 'row')} with another number of values than the header's "
        f"{counted(width, 'name')}: {lines or 'their lines could not be told'}{more} (lines counted from 1, with the "
        "header); put values with a comma in them into quotes, and give every row as many values as there are names"
    )


# --- A file's rows some at a time, so that a table may be larger than memory ---
# Each batch is as `read_columns` gives it.


#: Rows of a Parquet file at a time.
_ROWS = 1 << 15
#: Bytes of a CSV file at a time.
_BYTES = 1 << 23


def read_batches(
    source: Source,
    wanted: Sequence[str],
    rules: Mapping[str, ColumnRule],
    faults: Faults,
    *,
    as_text: Collection[str] = (),
) -> Iterator[Any]:
    """Yield tables of the wanted columns, which must exist, in the file's order; faults go to `faults`.

    A CSV's column without a rule has the type of the cells of its batch; with one, the rule's type.
    """
    import pyarrow as pa

    assert source.path is not None
    try:
        batches = _csv_batches(source, wanted, faults) if source.is_csv else _of_parquet(source, wanted)
        for batch in batches:
            table = pa.Table.from_batches([batch])
            if source.is_csv:
                table = typed(table.rename_columns(list(wanted)), rules, as_text)
            if table.num_rows:
                yield plain(table)
    except (OSError, pa.ArrowException) as error:
        # A CSV reader's message may have a value in it.
        faults.add(f"{source.file} cannot be read as a table" + ("" if source.is_csv else f" ({error})"))


def _of_parquet(source: Source, wanted: Sequence[str]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(source.path, memory_map=True) as file:
        for batch in file.iter_batches(batch_size=_ROWS, columns=list(wanted), use_threads=False):
            yield batch.select(list(wanted))


def _csv_batches(source: Source, wanted: Sequence[str], faults: Faults) -> Iterator[Any]:
    import pyarrow.csv

    assert source.path is not None
    ragged = 0

    def skip(row: Any) -> str:
        nonlocal ragged
        del row
        ragged += 1
        return "skip"

    options = csv_options(source.path, wanted, skip)
    options["read_options"].block_size = _BYTES
    with pyarrow.csv.open_csv(source.path, **options) as reader:
        yield from reader
    if ragged:
        faults.add(ragged_lines(source.path, ragged))
