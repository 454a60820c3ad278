"""The number of changes of a ledger, kept outside of it as well: an older copy that is put back is behind it.

Two places have it: the lock file beside the ledger, and a small file in the owner's state folder, named by the
ledger's random id. Both are written after the ledger and before the bytes leave, so they are never ahead of a ledger
that lost nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from pbmvfl.errors import LedgerError
from pbmvfl.ledger.database import MARK_BYTES

#: A number of 20 digits, a blank, a hash of 64 digits, a line's end.
_BYTES = 86


@dataclass(frozen=True)
class Known:
    """How many changes a ledger has had, and the last hash of its history then."""

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
    """What the two places know, as far as they are there."""
    folder = state_folder()
    places = [(lock_file, MARK_BYTES)] + ([] if folder is None else [(folder / identity, 0)])
    found = []
    for path, offset in places:
        with contextlib.suppress(OSError):
            if (known := Known.from_bytes(path.read_bytes()[offset : offset + _BYTES])) is not None:
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
                fcntl.flock(self._state, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise LedgerError("a copy of it is being charged by another session; wait for it") from None
            except OSError:
                pass  # a file system without locks: the lock file and the ledger itself have theirs

    def write(self, known: Known, *, force: bool = False) -> None:
        """Never a smaller number than what is there, unless the owner accepted a ledger as it is."""
        data = known.to_bytes()
        for descriptor, offset in self._places:
            with contextlib.suppress(OSError):  # the other place has it, and the ledger itself
                there = None if force else Known.from_bytes(os.pread(descriptor, _BYTES, offset))
                if there is None or there.counter <= known.counter:
                    os.pwrite(descriptor, data, offset)

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
        descriptor = os.open(folder / identity, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, 0o600)
    return descriptor
