"""`python -m pbmvfl.deploy.nvflare.keeper HOME LOCK`: keeper of one kit's NVFlare process, which ends with it.

It holds the kit's lock, which whoever starts it hands over, so two starts of one kit cannot conflict. It reaps
zombies: NVFlare's job processes live on as long as a parent of theirs, even a dead one, is listed. If NVFlare's process
ends, its remaining children are ended too, and a new start finds nothing in its way.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import psutil
from filelock import lock_descriptor

from pbmvfl._files import PRIVATE_FILE, make_private_folder, read_object, write_atomically
from pbmvfl.deploy.nvflare.hardening import HEARTBEAT, OUTCOME_WAIT
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.errors import FederationError
from pbmvfl.ledger.session_lock import boot_id, start_of

# --- A kit's process, identified by number and birth, so that a reused number is not mistaken for it ---


_RECORD, _READY, _LOCK = "process.json", "ready", "lock"


@dataclass(frozen=True)
class Record:
    """Record that a kit's keeper wrote when it started NVFlare."""

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
    """Return when a process began, by a clock that cannot be set; None if it does not exist or is a zombie."""
    started = start_of(pid)
    return None if started is None else f"{boot_id()}:{started}"


def take_lock(site_folder: SiteFolder) -> int:
    """Take a kit's lock for as long as the descriptor is open; return -1 if another process has it."""
    make_private_folder(site_folder.path / "state")
    descriptor = os.open(site_folder.path / "state" / _LOCK, os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
    if lock_descriptor(descriptor, blocking=False):
        return descriptor
    os.close(descriptor)
    return -1


def write_record(site_folder: SiteFolder, site: int) -> Record:
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    record = Record(os.getpid(), birth(os.getpid()) or "", site, birth(site) or "", since)
    (site_folder.path / "state" / _READY).unlink(missing_ok=True)
    write_atomically(site_folder.path / "state" / _RECORD, json.dumps(asdict(record)) + "\n", mode=PRIVATE_FILE)
    return record


def read_record(site_folder: SiteFolder) -> Record | None:
    """Read the last record; its process may be gone."""
    path = site_folder.path / "state" / _RECORD
    if not path.exists():
        return None
    kinds = {"pid": int, "birth": str, "site": int, "site_birth": str, "since": str}
    said = read_object(path, kinds, FederationError)
    return Record(**{name: said[name] for name in kinds})


def note_ready(site_folder: SiteFolder) -> None:
    """Record, in NVFlare's process, that the server accepted this party, or that the server accepts parties."""
    write_atomically(site_folder.path / "state" / _READY, f"{birth(os.getpid())}\n", mode=PRIVATE_FILE)


def is_ready(site_folder: SiteFolder, record: Record) -> bool:
    try:
        return (site_folder.path / "state" / _READY).read_text().strip() == record.site_birth
    except OSError:
        return False


# --- keeper ---


_GRACE = 3.0
_PDEATHSIG, _SUBREAPER = 1, 36
#: Prefixes of variables that would change NVFlare's settings; one of them names code to load.
FOREIGN = ("NVFL", "FL_LOG_LEVEL", "PYTHONSTARTUP", "PYTHONINSPECT")


def command(site_folder: SiteFolder) -> list[str]:
    """Return NVFlare's command without its shell scripts. -P keeps a job's folder off the import path."""
    role = "server" if site_folder.is_server else "client"
    module = f"nvflare.private.fed.app.{role}.{role}_train"
    sets = ["secure_train=true", f"org={site_folder.name.replace('-', '_')}", "config_folder=config"]
    if site_folder.is_server:
        # A party that was lost at the very end would hold up the next job for a quarter of an hour.
        sets.append(f"client_outcome_wait_timeout={OUTCOME_WAIT}")
    else:
        sets += [f"uid={site_folder.name}", f"heart_beat_interval={HEARTBEAT}"]
    kit = str(site_folder.kit)
    return [sys.executable, "-P", "-u", "-m", module, "-m", kit, "-s", f"fed_{role}.json", "--set", *sets]


def environment() -> dict[str, str]:
    """Return this process's environment without variables that would change NVFlare's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    # One thread a process: with more, several busy ones on few cores slow each other many times.
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONSAFEPATH": "1"}


def keep(site_folder: SiteFolder, lock: int) -> int:
    """Run NVFlare's process of a kit until it ends or this one is told to, and return its exit code.

    Args:
        site_folder: The organisation's folder.
        lock: The kit's lock (`take_lock`), which is held until then.
    """
    os.umask(0o077)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)  # what NVFlare's process leaves behind becomes a child of this one

    def with_parent() -> None:
        libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    site = subprocess.Popen(
        command(site_folder),
        env=environment(),
        cwd=site_folder.kit,
        stdin=subprocess.DEVNULL,
        preexec_fn=with_parent,
    )

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        with contextlib.suppress(ProcessLookupError):
            site.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    write_record(site_folder, site.pid)
    code = site.wait()
    _end_all(psutil.Process().children(recursive=True))
    os.close(lock)
    return code


def _end_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, left = psutil.wait_procs(processes, timeout=_GRACE)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=_GRACE)


if __name__ == "__main__":
    sys.exit(keep(SiteFolder.at(Path(sys.argv[1])), int(sys.argv[2])))
