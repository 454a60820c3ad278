"""A file's rows some at a time, so that a table may be larger than memory. Each batch is as `read_columns` gives it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pbmvfl.data.faults import Faults
from pbmvfl.data.readers import Source, csv_options, plain, ragged_lines, typed
from pbmvfl.data.schema import ColumnRule

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
    """Tables of the wanted columns, which must be there, in the file's order. What cannot be read goes to `faults`.

    A CSV's column without a rule has the type that the cells of its batch have; with one, that of the rule.
    """
    import pyarrow as pa

    assert source.path is not None
    try:
        batches = _of_csv(source, wanted, faults) if source.is_csv else _of_parquet(source, wanted)
        for batch in batches:
            table = pa.Table.from_batches([batch])
            if source.is_csv:
                table = typed(table.rename_columns(list(wanted)), rules, as_text)
            if table.num_rows:
                yield plain(table)
    except (OSError, pa.ArrowException) as error:
        # A CSV reader's words may have a value in them.
        faults.add(f"{source.file} cannot be read as a table" + ("" if source.is_csv else f" ({error})"))


def _of_parquet(source: Source, wanted: Sequence[str]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(source.path, memory_map=True) as file:
        for batch in file.iter_batches(batch_size=_ROWS, columns=list(wanted), use_threads=False):
            yield batch.select(list(wanted))


def _of_csv(source: Source, wanted: Sequence[str], faults: Faults) -> Iterator[Any]:
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
