"""A folder of books, one for each party of a simulation, each named by the party that owns it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from pbmvfl.errors import LedgerError
from pbmvfl.ledger.ledger import Ledger

ENDING = ".sqlite"
#: Names that every file system takes as they are. The tilde is not among their letters: see `file_name`.
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}")
_DIGEST_DIGITS = 12


def file_name(party: str) -> str:
    """A file name for a party's book, another one for every party.

    A name with other letters than a file may have keeps those that it may have, and gets a digest after a tilde, which
    no plain name has in it.
    """
    if _PLAIN.fullmatch(party):
        return party + ENDING
    kept = re.sub(r"[^A-Za-z0-9_-]+", "_", party)[:40].strip("_")
    return f"{kept}~{hashlib.sha256(party.encode()).hexdigest()[:_DIGEST_DIGITS]}{ENDING}"


def book_of(folder: Path, index: int, party: str, *, dataset: str | None = None) -> Path:
    """Where a party keeps its book; a new one is named by the party.

    Folders of earlier versions have books by the party's number, which say of no owner: such a one is gone on with. If
    there are both, and the older one knows the dataset, neither alone would have everything.
    """
    named, numbered = folder / file_name(party), folder / f"party-{index}{ENDING}"
    if named == numbered or not numbered.is_file():
        return named
    with contextlib.closing(Ledger(numbered, read_only=True)) as older:
        if older.owner:
            return named  # of a party with that very name
        if not named.is_file():
            return numbered
        if dataset is not None and older.sessions(dataset):
            raise LedgerError(
                f"ledger={str(folder)!r} has two books of party={party!r} that know dataset={dataset!r}: {named.name} "
                f"and {numbered.name}, which an earlier version named by number; move the one that is not to be gone "
                "on with to another folder"
            )
    return named


def books_of(folder: Path, parties: Sequence[str], *, dataset: str | None = None) -> list[Path]:
    """The same for all parties, in their order."""
    return [book_of(folder, index, party, dataset=dataset) for index, party in enumerate(parties)]


def check_folder(folder: Path) -> None:
    """Refuse what cannot be a folder of ledgers, and make nothing yet."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise LedgerError(
            f"ledger={str(folder)!r} is not a folder and cannot be made one: {str(there)!r} is a file; give another "
            "folder"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise LedgerError(f"ledger={str(folder)!r} cannot be written to; give another folder, or allow writing there")


def make_folder(folder: Path) -> None:
    """Make the folder of the parties' ledgers, or refuse what cannot be one, before anything is released."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LedgerError(
            f"ledger={str(folder)!r} is not a folder and cannot be made one ({error.strerror}); give another folder"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise LedgerError(f"ledger={str(folder)!r} cannot be written to; give another folder, or allow writing there")
