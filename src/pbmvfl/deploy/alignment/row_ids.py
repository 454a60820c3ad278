"""Checked ids of an organisation's rows, and the proof of their order. Nothing here leaves the organisation.

Errors have counts, never an id: they are kept in logs.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.errors import AlignmentError

KEY_BYTES = 32
Rows = npt.NDArray[np.int64]
_WHOLE_NUMBER = r"^(0|-?[1-9][0-9]*)$"
_LENGTH = struct.Struct("<Q")
_PIECE = 65_536


class IdForm(IntEnum):
    """Form in which ids are stored. The numbers travel, and keep their meaning."""

    WORDS = 1  #: text, not all of it spelled as a whole number is: "007", "A12"
    WHOLE_NUMBERS = 2  #: a column of integers
    DIGITS = 3  #: text, and each is spelled as a whole number is: it may be the same as a column of integers

    def fits(self, other: IdForm) -> bool:
        """Return whether the same id is spelled alike in both forms."""
        return {self, other} != {IdForm.WORDS, IdForm.WHOLE_NUMBERS}

    @property
    def words(self) -> str:
        return {1: "words", 2: "whole numbers", 3: "words spelled as whole numbers are"}[int(self)]


@dataclass(frozen=True, eq=False)
class RowIds:
    """One id for every row: no two alike, none missing. `column` is an Arrow array of text."""

    column: Any
    form: IdForm

    @classmethod
    def of(cls, values: Any, *, where: str = "the table") -> RowIds:
        """Build ids from an Arrow column of text or of integers.

        Args:
            values: The ids.
            where: Name of the table in errors.

        Raises:
            AlignmentError: If an id is missing or repeated, with counts only.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        column = _as_arrow(values, where)
        whole = pa.types.is_integer(column.type)
        texts = column.cast(pa.large_string())
        missing = texts.null_count + (pc.sum(pc.equal(texts, "")).as_py() or 0)
        if missing:
            raise AlignmentError(
                f"{where}: {missing:,} of {len(texts):,} rows have no id; leave out such rows, or give them one"
            )
        if not len(texts):
            raise AlignmentError(f"{where} has no rows; give at least one")
        repeated = len(texts) - len(pc.unique(texts))
        if repeated:
            raise AlignmentError(
                f"{where}: {repeated:,} of {len(texts):,} rows have an id that an earlier row has; ids must tell the "
                "rows apart, so keep one row for each"
            )
        if whole:
            return cls(texts, IdForm.WHOLE_NUMBERS)
        digits = pc.all(pc.match_substring_regex(texts, _WHOLE_NUMBER)).as_py()
        return cls(texts, IdForm.DIGITS if digits else IdForm.WORDS)

    @staticmethod
    def texts_of(column: Any) -> Any:
        """Return a column of text or of integers as one array of text, as ids are compared."""
        import pyarrow as pa

        return _as_arrow(column, "the table").cast(pa.large_string())

    def __len__(self) -> int:
        return len(self.column)

    def take(self, rows: Rows) -> list[str]:
        """Return the ids of these rows, in this order."""
        import pyarrow as pa

        found: list[str] = self.column.take(pa.array(rows)).to_pylist()
        return found

    def pieces(self, rows: Rows | None = None) -> Iterator[list[str]]:
        """Yield the ids of these rows, or of all, in pieces."""
        rows = np.arange(len(self)) if rows is None else rows
        for start in range(0, len(rows), _PIECE):
            yield self.take(rows[start : start + _PIECE])


def _as_arrow(values: Any, where: str) -> Any:
    """Return one array of text or of integers."""
    import pyarrow as pa

    column = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_null(column.type):
        return column.cast(pa.large_string())
    if not (
        pa.types.is_integer(column.type) or pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    ):
        raise AlignmentError(
            f"{where}: its ids have type {column.type}; permitted are words and whole numbers, all of one kind"
        )
    return column


# --- an order, and the proof of it ---


@dataclass(frozen=True, kw_only=True, eq=False)
class AgreedOrder:
    """Result of an alignment at an organisation: which of its rows, in which order."""

    name: str
    #: Row numbers of the organisation's own table.
    rows: Rows
    #: Key of the alignment, which all members have.
    key: bytes
    digest: bytes

    @property
    def count(self) -> int:
        return len(self.rows)


def order_digest(key: bytes, pieces: Iterator[Sequence[str]] | Sequence[Sequence[str]], count: int) -> bytes:
    """Return the keyed digest of ids in their order. Without the key a guessed list cannot be tested against it."""
    digest = hmac.new(key, b"pbmvfl order 1\0" + _LENGTH.pack(count), hashlib.sha256)
    for piece in pieces:
        for each in piece:
            text = each.encode()
            digest.update(_LENGTH.pack(len(text)) + text)
    return digest.digest()


def order_proof(*, key: bytes, digest: bytes, challenge: bytes, party: str) -> bytes:
    """Return the answer to a challenge, bound to a name; it takes this order and the alignment's key."""
    said = b"".join(_LENGTH.pack(len(part)) + part for part in (challenge, party.encode(), digest))
    return hmac.digest(key, b"pbmvfl order proof 1\0" + said, "sha256")
