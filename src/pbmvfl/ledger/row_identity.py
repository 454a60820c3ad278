"""Identity of rows: keyed digests of values, and lists of row ids."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.errors import LedgerError
from pbmvfl.ledger.database import Database

# ---
# Recognising values without keeping anything that tells them: digests under a key that never leaves the ledger.
#
# All rows together have one digest, which is equal or not. Each row by itself has a short one, so that a part of the
# rows, another order of rows or of columns, or a table with some cells changed is recognised by the rest of its rows.


_Rows = npt.NDArray[Any]
_Ids = Sequence[str] | range
Digests = npt.NDArray[np.uint32]

#: Four bytes of a row: enough to see that many rows are known, too few to be sure of one by trying its values.
_ROW_BYTES = 4
#: So many are in memory at once.
_ROWS_AT_A_TIME = 1 << 14
#: Lists of ids that are remembered: a simulation's parties all name the same training, test and other rows.
_LISTS = 4
#: A table is taken for known if it shares more rows than chance explains, by so many standard deviations and rows.
_DEVIATIONS, _ROWS = 4.0, 3.0


def keyed_digests(
    key: bytes, train: _Rows | None, test: _Rows | None, train_ids: _Ids, test_ids: _Ids
) -> tuple[str, ...]:
    """Return digests of all rows together, then of each split: none where there are no values.

    Rows with names are taken in the order of their names, so that another order or another split changes nothing.
    """
    both = ((train, train_ids), (test, test_ids))
    parts = [(rows, ids) for rows, ids in both if rows is not None and len(rows)]
    if not parts:
        return ()
    named = [(rows, None if isinstance(ids, range) else tuple(map(str, ids))) for rows, ids in parts]
    found = [_digest(key, rows, names) for rows, names in named]
    if len(parts) > 1:
        whole = np.concatenate([rows for rows, _ in parts])
        all_names = tuple(name for _, names in named for name in names or ())
        found.insert(0, _digest(key, whole, all_names if len(all_names) == len(whole) else None))
    return tuple(dict.fromkeys(found))


@lru_cache(maxsize=_LISTS)
def _order_of(names: tuple[str, ...]) -> npt.NDArray[np.int64]:
    return np.argsort(np.array(names), kind="stable")


def _digest(key: bytes, rows: _Rows, names: tuple[str, ...] | None) -> str:
    """In the order of names, if there are any; some rows at a time, since they may be in a file larger than memory."""
    code = hmac.new(key, f"{rows.dtype.str} {rows.shape}\0".encode(), "sha256")
    order = None if names is None else _order_of(names)
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        some = slice(start, start + _ROWS_AT_A_TIME)
        code.update(np.ascontiguousarray(rows[some] if order is None else rows[order[some]]).data)
    return code.hexdigest()


# --- each row by itself ---


def row_digests(key: bytes, *splits: _Rows | None) -> Digests:
    """One for each row of all splits; rows of one table have the same whatever the order of its columns."""
    parts = [_digests_of(key, rows) for rows in splits if rows is not None and len(rows)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint32)


def _digests_of(key: bytes, rows: _Rows) -> Digests:
    found = bytearray()
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        found += _digests_of_some(key, rows[start : start + _ROWS_AT_A_TIME])
    return np.frombuffer(bytes(found), dtype="<u4").astype(np.uint32)


def _digests_of_some(key: bytes, rows: _Rows) -> bytearray:
    # Pictures have no columns that somebody names in another order, and many values.
    flat = np.sort(rows, axis=1) if rows.ndim == 2 else rows.reshape(len(rows), -1)
    if flat.dtype == np.float32:
        flat = flat + np.float32(0)  # there are two zeros, and they are equal
    width = flat.shape[1] * flat.itemsize
    data = flat.tobytes()
    first = hashlib.blake2b(flat.dtype.str.encode(), digest_size=_ROW_BYTES, key=key)
    found = bytearray()
    for start in range(0, len(data), width):
        code = first.copy()
        code.update(data[start : start + width])
        found += code.digest()
    return found


def shared_rows(new: Digests, known: Digests) -> int:
    """Return how many rows two tables share if they are more than chance explains, else 0.

    Only rows that are alone in their table with their values are compared: everybody has a row of zeros. If both were
    drawn from one population of other people, a new row would hit one of the known single rows with the share of rows
    whose values were seen twice (Good and Turing's estimate), and by a short digest now and then.
    """
    own, counts = np.unique(new, return_counts=True)
    others, numbers = np.unique(known, return_counts=True)
    single, known_single = own[counts == 1], others[numbers == 1]
    found = len(np.intersect1d(single, known_single, assume_unique=True))
    if not found:
        return 0
    pairs = int(np.count_nonzero(numbers == 2))
    chance = len(new) * (2 * (pairs + 1) / len(known) + len(known_single) / 2.0 ** (8 * _ROW_BYTES))
    return found if found > chance + _DEVIATIONS * math.sqrt(chance) + _ROWS else 0


# --- Lists of row ids, each stored once however many sessions name it ---


def keep_ids(db: Database, ids: Sequence[str] | range) -> str:
    """A reference to a list of row ids, inside the caller's transaction; numbered rows need no list."""
    check_ids(ids)
    if isinstance(ids, range):
        return f"range:{ids.start}:{ids.stop}"
    digest, packed = _packed(_names(ids))
    db.run("INSERT OR IGNORE INTO row_ids VALUES (?, ?)", (digest, packed))
    return f"list:{digest}"


@lru_cache(maxsize=_LISTS)
def _packed(names: tuple[str, ...]) -> tuple[str, bytes]:
    """Return the digest of a list and its bytes in the file."""
    text = json.dumps(names).encode()
    return hashlib.sha256(text).hexdigest(), zlib.compress(text)


def check_ids(ids: Sequence[str] | range) -> None:
    """Refuse what cannot be the rows of a session."""
    if isinstance(ids, range):
        if ids.step != 1 or ids.start < 0:
            raise LedgerError(
                f"row ids {ids!r}; permitted: a range from 0 or above, without a step, or a list of names"
            )
        return
    if not _all_differ(_names(ids)):
        raise LedgerError("row ids must be different from each other: one row twice would be counted as two")


@lru_cache(maxsize=_LISTS)
def _all_differ(names: tuple[str, ...]) -> bool:
    return len(set(names)) == len(names)


def _names(ids: Sequence[str]) -> tuple[str, ...]:
    """Return a list's ids as text."""
    if type(ids) is tuple and all(type(each) is str for each in ids):
        return ids
    return tuple(each if type(each) is str else _name(each) for each in ids)


def read_ids(db: Database, reference: str) -> Sequence[str] | range:
    """The list behind a reference."""
    kind, _, rest = reference.partition(":")
    if kind == "range":
        start, stop = rest.split(":")
        return range(int(start), int(stop))
    found = db.rows("SELECT ids FROM row_ids WHERE hash = ?", (rest,))
    if not found:
        raise LedgerError(f"ledger={str(db.path)!r} lacks the row ids {rest!r}; put a whole copy of it back")
    text = _unpacked(found[0][0])
    if hashlib.sha256(text).hexdigest() != rest:
        raise LedgerError(
            f"ledger={str(db.path)!r} was changed by something else than this program: the row ids {rest!r} are not "
            "what was written; put a whole copy of it back"
        )
    return _unpacked_names(text)


@lru_cache(maxsize=_LISTS)
def _unpacked_names(text: bytes) -> tuple[str, ...]:
    return _names(json.loads(text))


def _unpacked(data: bytes) -> bytes:
    """Return a list's text, or no text where it is damaged."""
    try:
        return zlib.decompress(data)
    except zlib.error:
        return b""


def _name(row: object) -> str:
    """A row's id as text: row 7 and row "7" are one row."""
    if isinstance(row, bool) or not isinstance(row, str | int):
        raise LedgerError(f"row id {row!r}; permitted: text, or a whole number")
    return str(row)
