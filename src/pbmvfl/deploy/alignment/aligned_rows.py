"""An organisation's rows in the common order, on its own disk.

alignments/NAME/order.json    name, count, digest and key of the order, rules of columns; sealed
alignments/NAME/rows.arrow    at a party: ids and, row by row, the numbers that they become
                              at the label holder: ids and, if there are any, labels

rows.arrow is an Arrow file with one record batch, so that all rows are one matrix that is mapped into memory and never
loaded: a table may be larger than memory. order.json is written last, and says that an alignment is there; one that is
there is never written over.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pbmvfl._files import (
    PRIVATE_FILE,
    check_seal,
    checked_object,
    make_private_folder,
    not_written,
    read_object,
    sealed,
    write_atomically,
)
from pbmvfl.data.column_rules import PartyColumns
from pbmvfl.deploy.alignment.row_ids import KEY_BYTES, AgreedOrder, IdForm, RowIds, order_digest, order_proof
from pbmvfl.deploy.alignment.tables import LabelTable, PartyTable, file_digest
from pbmvfl.errors import AlignmentError, DataError

FORMAT = 1
ORDER, ROWS, _SCRATCH = "order.json", "rows.arrow", "features.tmp"
_IDS, _FEATURES, _LABELS = "id", "features", "label"
_KINDS = {
    "format": int,
    "name": str,
    "count": int,
    "width": int,
    "digest": str,
    "key": str,
    "columns": dict,
    "source": str,
    "rows_bytes": int,
    "rows_sha256": str,
}
#: Free disk space that must remain after writing.
_SPARE_BYTES = 64 << 20


def materialise(table: PartyTable, order: AgreedOrder, folder: Path) -> AlignedRows:
    """Write a party's rows in the common order, reading the table in batches with bounded memory."""
    count, width = order.count, table.width
    places = np.full(table.num_rows, -1, np.int64)
    places[order.rows] = np.arange(count)
    with _making(folder, room=2 * 4 * count * width):
        with _create(folder / _SCRATCH) as file:
            os.posix_fallocate(file.fileno(), 0, max(1, 4 * count * width))  # a full disk is an error, no signal
            rows_ND = np.memmap(file, dtype=np.float32, mode="r+", shape=(count, width))
        for start, found_BD in table.features():
            at = places[start : start + len(found_BD)]
            rows_ND[at[at >= 0]] = found_BD[at >= 0]
        said = {"columns": table.columns.to_dict(), "source": table.file_digest, "width": width}
        _write(folder, order, table.ids, {_FEATURES: rows_ND}, said)
        (folder / _SCRATCH).unlink()
    return AlignedRows.load(folder, quick=True)


def materialise_labels(table: LabelTable, order: AgreedOrder, folder: Path) -> None:
    """Write the label holder's ids and labels in the common order."""
    columns = {} if table.labels is None else {_LABELS: table.labels[order.rows]}
    with _making(folder, room=8 * order.count):
        said = {"columns": {}, "class_names": list(table.class_names), "source": table.file_digest, "width": 0}
        _write(folder, order, table.ids, columns, said)


# --- aligned rows ---


@dataclass(frozen=True, eq=False, repr=False)
class _Aligned:
    """Common part of both kinds. Its values are private, so its repr shows name and count alone."""

    name: str
    count: int
    digest: bytes
    key: bytes
    #: SHA-256 of the file that the rows came from.
    source: str
    _batch: Any

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, count={self.count})"

    def __len__(self) -> int:
        return self.count

    @cached_property
    def ids(self) -> Sequence[str]:
        """Id of every row, built on each access: a tuple of a few million takes some hundred megabytes."""
        return tuple(self._batch.column(_IDS).to_pylist())

    def proof(self, challenge: bytes, party: str) -> bytes:
        """Return the proof of this row order for a challenge."""
        return order_proof(key=self.key, digest=self.digest, challenge=challenge, party=party)


@dataclass(frozen=True, eq=False, repr=False)
class AlignedRows(_Aligned):
    """A party's rows in the common order."""

    columns: PartyColumns
    #: N x D, mapped from the file, read only: a party takes batches from there, and loads nothing.
    features: np.memmap[Any, np.dtype[np.float32]]

    @classmethod
    def load(cls, folder: Path, *, quick: bool = False) -> AlignedRows:
        """Map the rows of an alignment.

        Args:
            folder: The alignment's folder.
            quick: Skip the digest check, which reads all rows once.

        Raises:
            AlignmentError: If the files are missing or damaged.
        """
        said, batch, base = _open(folder, quick=quick)
        path, count, width = folder / ORDER, said["count"], said["width"]
        try:
            columns = PartyColumns.from_dict(said["columns"])
        except DataError as error:
            raise AlignmentError(f"{path} is no party's: {error}") from error
        column = batch.column(_FEATURES) if _FEATURES in batch.schema.names else None
        if column is None or columns.width != width or column.type.list_size != width:
            raise _damaged(folder / ROWS, "it has other columns than were written")
        inside = column.values.buffers()[1].address + 4 * column.values.offset - base  # of the file, as numpy maps it
        features: np.memmap[Any, np.dtype[np.float32]]
        features = np.memmap(folder / ROWS, np.float32, "r", offset=inside, shape=(count, width))
        return cls(**_common(said, batch), columns=columns, features=features)


@dataclass(frozen=True, eq=False, repr=False)
class AlignedLabels(_Aligned):
    """The label holder's rows in the common order."""

    #: Class of each row; None for rows to predict.
    labels: npt.NDArray[np.int64] | None
    #: All classes that occur in the table.
    class_names: tuple[str, ...]


def load_labels(folder: Path) -> AlignedLabels:
    """Map the label holder's rows of an alignment.

    Raises:
        AlignmentError: If the files are missing or damaged.
    """
    said, batch, _ = _open(folder, quick=False)
    if "class_names" not in said:
        raise AlignmentError(f"{folder} has a party's rows, not a label holder's")
    names = checked_object(said, {"class_names": list}, folder / ORDER, AlignmentError)["class_names"]
    has = _LABELS in batch.schema.names
    labels = np.array(batch.column(_LABELS).to_numpy(), dtype=np.int64) if has else None
    return AlignedLabels(**_common(said, batch), labels=labels, class_names=tuple(map(str, names)))


def _common(said: dict[str, Any], batch: Any) -> dict[str, Any]:
    return {
        "name": said["name"],
        "count": said["count"],
        "digest": bytes.fromhex(said["digest"]),
        "key": bytes.fromhex(said["key"]),
        "source": said["source"],
        "_batch": batch,
    }


# --- reading ---


def _open(folder: Path, *, quick: bool) -> tuple[dict[str, Any], Any, int]:
    """Return order.json's content, the mapped record batch of rows.arrow, and the address of the file's first byte."""
    import pyarrow as pa

    order, rows = folder / ORDER, folder / ROWS
    if not order.is_file():
        raise AlignmentError(f"{folder} has no alignment; make one with `pbmvfl align`")
    said = read_object(order, _KINDS, AlignmentError)
    check_seal(said, order, AlignmentError)
    if said["format"] != FORMAT:
        raise AlignmentError(f"{order} has format={said['format']}; this version reads format {FORMAT}; align anew")
    try:
        if rows.stat().st_size != said["rows_bytes"]:
            raise _damaged(rows, f"it has {rows.stat().st_size:,} bytes, not {said['rows_bytes']:,}")
        if not quick and file_digest(rows) != said["rows_sha256"]:
            raise _damaged(rows, "it is not what was written")
        with pa.memory_map(str(rows)) as source, pa.ipc.open_file(source) as file:
            known = (file.schema.metadata or {}).get(b"order")
            if known != said["digest"].encode() or file.num_record_batches != 1:
                raise _damaged(rows, "it belongs to another alignment")
            batch = file.get_batch(0)
            source.seek(0)
            base = source.read_buffer(1).address
    except (OSError, pa.ArrowException) as error:
        raise _damaged(rows, f"it cannot be read ({error})") from error
    key, digest = bytes.fromhex(said["key"]), bytes.fromhex(said["digest"])
    if len(key) != KEY_BYTES or batch.num_rows != said["count"]:
        raise _damaged(rows, f"it has {batch.num_rows:,} rows, not {said['count']:,}")
    ids = RowIds(batch.column(_IDS), IdForm.WORDS)  # checked when they were written
    if not quick and order_digest(key, ids.pieces(), said["count"]) != digest:
        raise _damaged(rows, "its ids are not in the order that was agreed on")
    return said, batch, base


def _damaged(path: Path, what: str) -> AlignmentError:
    return AlignmentError(f"{path} was changed or is damaged: {what}; restore it from a copy, or align anew")


# --- writing ---


@contextlib.contextmanager
def _making(folder: Path, *, room: int) -> Iterator[None]:
    """Refuse to overwrite an alignment, on which runs may depend, and remove partial rows after any failure."""
    if (folder / ORDER).exists():
        raise AlignmentError(
            f"alignment={folder.name!r} is there already, and is not written over; choose another name"
        )
    try:
        make_private_folder(folder)
        _remove(folder)  # left by a killed process
        free = shutil.disk_usage(folder).free
        if free < room + _SPARE_BYTES:
            raise AlignmentError(
                f"{folder} has {free >> 20:,} MiB free, and {(room + _SPARE_BYTES) >> 20:,} MiB are needed; make room "
                "on that disk"
            )
        yield
    except BaseException as error:
        if not (folder / ORDER).exists():
            _remove(folder)
        if isinstance(error, OSError):
            raise not_written(folder, error) from error
        raise


def _remove(folder: Path) -> None:
    for name in (ROWS, _SCRATCH):
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def _create(path: Path) -> BinaryIO:
    return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE_FILE), "r+b")


def _write(
    folder: Path, order: AgreedOrder, ids: RowIds, columns: dict[str, npt.NDArray[Any]], said: dict[str, Any]
) -> None:
    """Write rows.arrow, and then order.json, which has its size and digest."""
    import pyarrow as pa

    arrays = [ids.column.take(pa.array(order.rows))]
    for values in columns.values():
        flat = pa.Array.from_buffers(
            pa.from_numpy_dtype(values.dtype), values.size, [None, pa.py_buffer(values.reshape(-1))]
        )
        arrays.append(flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1]))
    batch = pa.RecordBatch.from_arrays(arrays, names=[_IDS, *columns])
    batch = batch.replace_schema_metadata({"order": order.digest.hex()})
    path = folder / ROWS
    with _create(path) as file:
        with pa.ipc.new_file(pa.PythonFile(file, mode="w"), batch.schema) as writer:
            writer.write_batch(batch)
        file.flush()
        os.fsync(file.fileno())
    text = {
        "format": FORMAT,
        "name": order.name,
        "count": order.count,
        "digest": order.digest.hex(),
        "key": order.key.hex(),
        "rows_bytes": path.stat().st_size,
        "rows_sha256": file_digest(path),
        **said,
    }
    write_atomically(folder / ORDER, json.dumps(sealed(text), indent=1) + "\n", mode=PRIVATE_FILE)
