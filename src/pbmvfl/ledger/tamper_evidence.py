"""Tamper evidence of a ledger: a counter kept outside of it, and what an edited or older copy lacks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import lock_descriptor

from pbmvfl._descriptors import open_file, read_beside_lock, set_mode, write_beside_lock
from pbmvfl.errors import LedgerError
from pbmvfl.ledger import history
from pbmvfl.ledger.database import MARK_BYTES, Database
from pbmvfl.ledger.history import plan_digest
from pbmvfl.ledger.migration import terms_of

# ---
# The number of changes of a ledger, kept outside of it as well: an older copy that is put back is behind it.
#
# Two places have it: the lock file beside the ledger, and a small file in the owner's state folder, named by the
# ledger's random id. Both are written after the ledger and before the bytes leave, so they are never ahead of a ledger
# that lost nothing.


#: A number of 20 digits, a blank, a hash of 64 digits, a line's end.
_BYTES = 86


@dataclass(frozen=True)
class Known:
    """Number of a ledger's changes, and the last hash of its history then."""

    counter: int
    head: str

    def to_bytes(self) -> bytes:
        return f"{self.counter:020d} {self.head:64s}\n".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Known | None:
        """None for what nobody wrote, or not to its end."""
        text = data.decode(errors="replace")
        if len(text) != _BYTES or not text[:20].isdecimal() or text[20] != " ":
            return None
        return cls(int(text[:20]), text[21:85].strip())


def state_folder() -> Path | None:
    """$PBMVFL_STATE, or pbmvfl in $XDG_STATE_HOME or in ~/.local/state; None if the user has no home."""
    if own := os.environ.get("PBMVFL_STATE"):
        return Path(own)
    if shared := os.environ.get("XDG_STATE_HOME"):
        return Path(shared) / "pbmvfl"
    try:
        return Path.home() / ".local" / "state" / "pbmvfl"
    except RuntimeError:
        return None


def known_outside(identity: str, lock_file: Path) -> list[Known]:
    """Return what the two places know, as far as they are there."""
    folder = state_folder()
    places = [(lock_file, MARK_BYTES)] + ([] if folder is None else [(folder / identity, 0)])
    found = []
    for path, offset in places:
        with contextlib.suppress(OSError):
            descriptor = open_file(path, os.O_RDONLY)
            try:
                known = Known.from_bytes(read_beside_lock(descriptor, _BYTES, offset))
            finally:
                os.close(descriptor)
            if known is not None:
                found.append(known)
    return found


class Outside:
    """The two places, open for writing."""

    def __init__(self, identity: str, lock: int | None, *, alone: bool) -> None:
        """`lock` is the lock file's descriptor and stays the caller's. `alone` keeps other sessions of the same ledger,
        or of a copy of it, away from the state folder's file until `close`."""
        self._places: list[tuple[int, int]] = [] if lock is None else [(lock, MARK_BYTES)]
        self._state = _open_state(identity)
        if self._state is None:
            return
        self._places.append((self._state, 0))
        if alone:
            try:
                locked = lock_descriptor(self._state, blocking=False)
            except OSError:
                return  # a file system without locks: the lock file and the ledger itself have theirs
            if not locked:
                self.close()
                raise LedgerError("a copy of it is being charged by another session; wait for it")

    def write(self, known: Known, *, force: bool = False) -> None:
        """Never a smaller number than what is there, unless the owner accepted a ledger as it is."""
        data = known.to_bytes()
        for descriptor, offset in self._places:
            with contextlib.suppress(OSError):  # the other place has it, and the ledger itself
                there = None if force else Known.from_bytes(read_beside_lock(descriptor, _BYTES, offset))
                if there is None or there.counter <= known.counter:
                    write_beside_lock(descriptor, data, offset)

    def close(self) -> None:
        state, self._state = self._state, None
        if state is not None:
            self._places = self._places[:-1]
            os.close(state)


def _open_state(identity: str) -> int | None:
    """None where the state folder cannot be written to."""
    folder = state_folder()
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = open_file(folder / identity, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        set_mode(descriptor, 0o600)
    return descriptor


# --- Keys of the plans in a ledger ---
# Each is a hash of the texts that it stands for, so that a changed text shows.
#
# A session names its plan and its terms by their key, and the ledger's history covers what a session names.


#: Versions of the protocol, which is in every plan's hash, that a ledger may have been written under.
_VERSIONS = range(256)


def key_of(plan_hash: bytes, terms: str) -> str:
    """Return the key of a plan and its terms.

    By the terms as well: if a later version made other releases of the same plan, both would be kept.
    """
    return hashlib.sha256(plan_hash + terms.encode()).hexdigest()


def difference(db: Database, taken: Mapping[str, str]) -> str | None:
    """Return which session's plan or terms are missing or not what was written; None if all are as they were.

    Args:
        db: The ledger.
        taken: Digests, by key, of texts that the history's last snapshot took as they were.
    """
    kept = {key: (plan, terms) for key, plan, terms in db.rows("SELECT hash, plan, terms FROM plans")}
    for number, key in db.rows("SELECT min(id), plan FROM sessions GROUP BY plan ORDER BY 1"):
        if key not in kept:
            return f"the plan of session {number} is missing"
        if taken.get(key) != plan_digest(*kept[key]) and not _is_key_of(key, *kept[key]):
            return f"the plan or the terms of session {number} are not what was written"
    return None


def _is_key_of(key: str, plan: str, terms: str) -> bool:
    """Return whether a key is the hash of a plan and its terms, or of a plan of version 0.1 that has those terms."""
    try:
        values = json.loads(plan)
        for version in _VERSIONS:
            text = json.dumps({"protocol": version, **values}, sort_keys=True, separators=(",", ":"))
            plan_hash = hashlib.sha256(text.encode())
            if key == key_of(plan_hash.digest(), terms):
                return True
            if key == plan_hash.hexdigest():
                return bool(json.loads(terms) == terms_of(values))
    except (KeyError, TypeError, ValueError):
        pass  # no plan, or none that a version wrote
    return False


# --- Whether a ledger is the newest one that this machine knows of, and nobody but this program wrote to it ---


_COUNTER = "SELECT changes + (SELECT coalesce(sum(writes), 0) FROM charged) FROM identity"


def known(db: Database) -> Known:
    """Return the number of changes, and the last hash of the history."""
    return Known(db.rows(_COUNTER)[0][0], history.head(db))


def trouble(db: Database, outside: Sequence[Known]) -> str | None:
    """Describe an inconsistency, as the end of a sentence about the ledger; None if there is none."""
    if (found := history.difference(db) or difference(db, history.taken_plans(db))) is not None:
        return f"was changed by something else than this program: {found}"
    counter, made = known(db).counter, max((each.counter for each in outside), default=0)
    if counter < made:
        return f"is an older copy: it has {counter} changes, and {made} were made"
    hashes = {"", *(event.hash for event in history.events(db))}
    if any(each.head not in hashes for each in outside):
        return "is a copy that went its own way: what was written on this machine is not in it"
    return None
