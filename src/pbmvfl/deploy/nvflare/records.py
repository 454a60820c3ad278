"""Which process is a kit's: by number and birth, so that another one which got its number later is left alone."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
from dataclasses import asdict, dataclass

from pbmvfl._files import PRIVATE_FILE, make_private_folder, write_atomically
from pbmvfl.deploy.site.folder import Home
from pbmvfl.errors import FederationError
from pbmvfl.json_files import read_object
from pbmvfl.ledger.session_lock import boot_id, start_of

_RECORD, _READY = "process.json", "ready"
#: Held by the keeper of a kit's process, and by whoever is just starting it.
KEPT, STARTING = "lock", "starting"


@dataclass(frozen=True)
class Record:
    """What a kit's keeper wrote when it started NVFlare."""

    pid: int
    birth: str
    #: NVFlare's own process, a child of the keeper.
    site: int
    site_birth: str
    since: str

    @property
    def alive(self) -> bool:
        return birth(self.pid) == self.birth

    @property
    def site_alive(self) -> bool:
        return birth(self.site) == self.site_birth


def birth(pid: int) -> str | None:
    """When a process began, by no clock that anybody can set; None if it is not there or only waits to be buried."""
    started = start_of(pid)
    return None if started is None else f"{boot_id()}:{started}"


def take_lock(home: Home, name: str = KEPT) -> int:
    """A kit's lock, as long as the descriptor is open; -1 if another process has it."""
    make_private_folder(home.path / "state")
    descriptor = os.open(home.path / "state" / name, os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return -1
    return descriptor


def write_record(home: Home, site: int) -> Record:
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    record = Record(os.getpid(), birth(os.getpid()) or "", site, birth(site) or "", since)
    (home.path / "state" / _READY).unlink(missing_ok=True)
    write_atomically(home.path / "state" / _RECORD, json.dumps(asdict(record)) + "\n", mode=PRIVATE_FILE)
    return record


def read_record(home: Home) -> Record | None:
    """The last one that was written; its process may be gone."""
    path = home.path / "state" / _RECORD
    if not path.exists():
        return None
    kinds = {"pid": int, "birth": str, "site": int, "site_birth": str, "since": str}
    said = read_object(path, kinds, FederationError)
    return Record(**{name: said[name] for name in kinds})


def note_ready(home: Home) -> None:
    """NVFlare's process says: the server took this party, or the server takes parties."""
    write_atomically(home.path / "state" / _READY, f"{birth(os.getpid())}\n", mode=PRIVATE_FILE)


def is_ready(home: Home, record: Record) -> bool:
    try:
        return (home.path / "state" / _READY).read_text().strip() == record.site_birth
    except OSError:
        return False
