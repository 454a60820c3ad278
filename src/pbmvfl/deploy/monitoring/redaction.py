"""Redaction of errors for an organisation's own log and status.

Both are read by the organisation's own operators, on their own machine. They may hold paths and names. They hold no
feature value, row id, weight or key: files are copied into tickets and backups.
"""

from __future__ import annotations

import traceback
from pathlib import Path

from pbmvfl.errors import DataError, EncoderError, LedgerError, NonFiniteError, PbmvflError, ProtocolError

LONGEST_WORDS = 500
#: Errors whose texts may quote cells of a table, or come from an organisation's own network.
_MAY_QUOTE = (DataError, EncoderError, NonFiniteError)


def printable(words: str, longest: int = LONGEST_WORDS) -> str:
    """Return one bounded line without control characters: some texts come from other organisations."""
    line = " ".join(str(words).split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= longest else line[: longest - 3] + "..."


def redacted_error(error: BaseException) -> str:
    """Return an error's type with its text if that cannot quote a private value, else with its place in the code."""
    kind = type(error).__name__
    quotes = isinstance(error, _MAY_QUOTE) and not isinstance(error, ProtocolError)
    if isinstance(error, LedgerError) and "row id" in str(error):
        quotes = True
    if isinstance(error, PbmvflError) and not quotes:
        return printable(f"{kind}: {error}")
    # strerror is the system's text, and a path is no private value; the text of any other error is not known to be
    # safe.
    if isinstance(error, OSError) and not quotes and isinstance(error.strerror, str):
        path = f" {error.filename}" if isinstance(error.filename, str) else ""
        return printable(f"{kind}: {error.strerror}{path}")
    return printable(f"{kind} at {_place(error)}; its text may quote values, and is not kept")


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    last = frames[-1]
    own = next((frame for frame in reversed(frames) if "pbmvfl" in Path(frame.filename).parts), last)
    places = dict.fromkeys(f"{Path(frame.filename).name}:{frame.lineno}" for frame in (own, last))
    return " -> ".join(places)
