"""Copies of a ledger: taken while a session charges it, and put back without hiding what was charged since.

A copy is a consistent snapshot. The number of a ledger's changes is also kept outside of it (`tamper_evidence`), so a
copy that is put back and is older than the last charge stays refused until its owner accepts that releases are missing
from it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from pbmvfl._files import PRIVATE_FILE, write_atomically
from pbmvfl.errors import LedgerError
from pbmvfl.ledger.database import error_code, format_of, has_log, open_for_reading
from pbmvfl.ledger.session_lock import check_free
from pbmvfl.ledger.tamper_evidence import known

#: What a ledger that `restore` replaces is renamed to.
REPLACED = ".replaced"
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@dataclass(frozen=True)
class Copied:
    """One copy of a ledger."""

    path: Path
    #: Changes that the copy has, by the ledger's own count.
    changes: int


def back_up(ledger: Path, target: Path) -> Copied:
    """Write a consistent copy of a ledger; sessions may go on charging it.

    Args:
        ledger: The ledger's file.
        target: The copy's file. An older copy there is replaced once the new one is whole.

    Returns:
        The copy.

    Raises:
        LedgerError: The ledger cannot be read, or the copy is not a whole ledger.
    """
    if ledger.resolve() == target.resolve():
        raise LedgerError(f"out={str(target)!r} is the ledger itself; name another file or folder")
    with contextlib.closing(open_for_reading(ledger)) as source:
        if format_of(source, ledger) is None:
            raise LedgerError(f"ledger={str(ledger)!r} is empty; name a ledger")
        write_atomically(target, source.to_bytes(), mode=PRIVATE_FILE)
    return Copied(target, _changes(target))


def restore(copy: Path, ledger: Path) -> Copied:
    """Put a copy in the place of a ledger that is lost, damaged or behind it.

    A ledger that is replaced is kept beside it, named `*.replaced`.

    Args:
        copy: What `back_up` wrote.
        ledger: The ledger's file.

    Returns:
        The ledger as it is now.

    Raises:
        LedgerError: The copy is damaged, a session charges the ledger, or the ledger has as many changes as the copy.
    """
    changes = _changes(copy)
    there = _changes_of_readable(ledger)
    if there is not None and there >= changes:
        raise LedgerError(
            f"ledger={str(ledger)!r} has {there} changes, and {str(copy)!r} has {changes}: charges would be lost; "
            "nothing was restored"
        )
    if ledger.exists():
        os.replace(ledger, ledger.with_name(ledger.name + REPLACED))
    for ending in ("-wal", "-shm", "-journal"):  # they belong to the file that was replaced
        ledger.with_name(ledger.name + ending).unlink(missing_ok=True)
    write_atomically(ledger, copy.read_bytes(), mode=PRIVATE_FILE)
    return Copied(ledger, changes)


def _changes(path: Path) -> int:
    """Return the changes of a copy, which is whole and a ledger.

    Raises:
        LedgerError: It is not.
    """
    if not path.is_file():
        raise LedgerError(f"backup={str(path)!r} does not exist; name a file that `pbmvfl ledger backup` wrote")
    if has_log(path):
        raise LedgerError(f"backup={str(path)!r} is a ledger in use; name a file that `pbmvfl ledger backup` wrote")
    with contextlib.closing(open_for_reading(path)) as db:
        if format_of(db, path) is None or (found := db.rows("PRAGMA integrity_check")) != [("ok",)]:
            said = "it is empty" if format_of(db, path) is None else str(found[0][0])
            raise LedgerError(f"backup={str(path)!r} is damaged: {said}; take another copy")
        return known(db).counter


def _changes_of_readable(ledger: Path) -> int | None:
    """Return the changes of a ledger that no session charges; None if it is missing or cannot be read."""
    if not ledger.exists():
        return None
    try:
        with contextlib.closing(open_for_reading(ledger)) as db:
            if format_of(db, ledger) is None:
                return None
            check_free(db, ledger)
            return known(db).counter
    except LedgerError as error:
        cause = error.__cause__
        if isinstance(cause, sqlite3.DatabaseError) and error_code(cause) & 0xFF in _DAMAGED:
            return None
        raise
