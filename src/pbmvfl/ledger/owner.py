"""Owner of a ledger: the name in it, and the name of its file."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from pbmvfl.errors import LedgerError
from pbmvfl.ledger import history
from pbmvfl.ledger.database import Database
from pbmvfl.ledger.schema import has_owner

ENDING = ".sqlite"
#: Names that every file system takes as they are. The tilde is not among their letters: see `file_name`.
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}")
_DIGEST_DIGITS = 12


def file_name(party: str) -> str:
    """Return a file name for a party's ledger, a different one for every party.

    A name with other letters than a file may have keeps those that it may have, and gets a digest after a tilde, which
    no plain name has in it.
    """
    if _PLAIN.fullmatch(party):
        return party + ENDING
    kept = re.sub(r"[^A-Za-z0-9_-]+", "_", party)[:40].strip("_-")
    return f"{kept or 'party'}~{hashlib.sha256(party.encode()).hexdigest()[:_DIGEST_DIGITS]}{ENDING}"


def owner_of(db: Database) -> str:
    """Return the party that owns a ledger; none where an earlier version made it, or no party opened it as its own."""
    if not has_owner(db):
        return ""
    name: str = db.rows("SELECT owner FROM identity")[0][0]
    return name


def take(db: Database, path: Path, owner: str, *, is_new: bool) -> None:
    """Note the owner of a ledger, inside the caller's transaction.

    A ledger that is there already is taken only by its name and before its first session: other parties may have used
    an older one.
    """
    named = path.name == file_name(owner) and not db.rows("SELECT 1 FROM sessions LIMIT 1")
    if owner and not owner_of(db) and (is_new or named):
        db.run("UPDATE identity SET owner = ?", (owner,))
        history.append(db, "owned", owner=owner)


def check(db: Database, path: Path, owner: str) -> None:
    """Refuse another party's ledger."""
    if owner and (found := owner_of(db)) not in ("", owner):
        raise LedgerError(
            f"ledger={str(path)!r} is the ledger of party={found!r}, not of party={owner!r}; name that party's own, or "
            "a new file"
        )
