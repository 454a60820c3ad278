"""Lists of row ids, each stored once however many sessions name it."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence

from pbmvfl.errors import LedgerError
from pbmvfl.ledger.database import Database


def keep_ids(db: Database, ids: Sequence[str] | range) -> str:
    """A reference to a list of row ids, inside the caller's transaction; numbered rows need no list."""
    check_ids(ids)
    if isinstance(ids, range):
        return f"range:{ids.start}:{ids.stop}"
    names = [each if type(each) is str else _name(each) for each in ids]
    text = json.dumps(names).encode()
    digest = hashlib.sha256(text).hexdigest()
    db.run("INSERT OR IGNORE INTO row_ids VALUES (?, ?)", (digest, zlib.compress(text)))
    return f"list:{digest}"


def check_ids(ids: Sequence[str] | range) -> None:
    """Refuse what cannot be the rows of a session."""
    if isinstance(ids, range):
        if ids.step != 1 or ids.start < 0:
            raise LedgerError(
                f"row ids {ids!r}; permitted: a range from 0 or above, without a step, or a list of names"
            )
        return
    if len({each if type(each) is str else _name(each) for each in ids}) != len(ids):
        raise LedgerError("row ids must be different from each other: one row twice would be counted as two")


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
    return [each if type(each) is str else _name(each) for each in json.loads(text)]


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
