"""Session that charges a ledger, noted in it: a lock file can be deleted, this cannot without a trace."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from pbmvfl.errors import LedgerError
from pbmvfl.ledger.database import Database

#: Sessions that this process has open, by their tokens.
_OPEN: set[str] = set()


@dataclass(frozen=True)
class Holder:
    """One session of one process, known by its number, when it started, and in which boot of the machine."""

    process: int
    started: str
    boot: str
    token: str

    @classmethod
    def new(cls) -> Holder:
        number = os.getpid()
        return cls(number, start_of(number) or "", boot_id(), secrets.token_hex(16))

    @property
    def is_alive(self) -> bool:
        if self.boot != boot_id():
            return False
        started = start_of(self.process)
        if started is None or started != self.started:
            return False
        return self.process != os.getpid() or self.token in _OPEN


def take(db: Database, path: Path, holder: Holder) -> None:
    """Note the session that charges the ledger, inside the caller's transaction; refuse if a live one does."""
    check_free(db, path)
    db.run("DELETE FROM holder")
    db.run("INSERT INTO holder VALUES (?, ?, ?, ?)", (holder.process, holder.started, holder.boot, holder.token))
    _OPEN.add(holder.token)


def check_free(db: Database, path: Path) -> None:
    for row in db.rows("SELECT process, started, boot, token FROM holder"):
        found = Holder(*row)
        if found.is_alive:
            raise LedgerError(
                f"ledger={str(path)!r} is being charged by another session, of process {found.process}; wait for it"
            )


def forget(holder: Holder) -> None:
    """End a session for this process, whatever the ledger still says."""
    _OPEN.discard(holder.token)


def start_of(process: int) -> str | None:
    """When a process started, as the system counts it; None if there is no such process, or only its remains."""
    try:
        # The name of the program is in brackets and may hold anything, so what follows is counted from the last one.
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        pass
    if Path("/proc/self/stat").exists():
        return None
    import psutil  # a system without /proc

    try:
        return repr(psutil.Process(process).create_time())
    except psutil.NoSuchProcess:
        return None


def boot_id() -> str:
    """Return the id of this boot of the machine: process numbers of an earlier one mean nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
