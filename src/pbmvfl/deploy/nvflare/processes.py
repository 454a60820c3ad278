"""Start, stop and status of an organisation's kit."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import psutil

from pbmvfl._files import PRIVATE_FILE, make_private_folder
from pbmvfl.deploy.link import tls
from pbmvfl.deploy.link.tls import Certificate
from pbmvfl.deploy.monitoring.log import prune_jobs, remove_unfinished_jobs
from pbmvfl.deploy.nvflare import hardening, keeper
from pbmvfl.deploy.nvflare.keeper import birth, is_ready, read_record, take_lock
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.policy_file import PolicyFile
from pbmvfl.deploy.site.preflight import check_port, check_server
from pbmvfl.errors import FederationError

#: The only version of NVFlare that kits are started with.
NVFLARE = "2.9.0"
#: How many folders of old jobs a kit keeps.
KEPT_JOBS = 5
#: What NVFlare prints and could not log.
OUTPUT = "kit.out"
_POLL = 0.05
#: Seconds between SIGTERM and SIGKILL.
_GRACE = 10.0
#: How long a killed process may still be listed.
_MOMENT = 0.3
_LONGEST_LOG = 4000


@dataclass(frozen=True, kw_only=True)
class KitStatus:
    """Status of a kit's process, as seen from outside."""

    name: str
    running: bool
    ready: bool
    pid: int | None
    since: str | None
    certificate_days: int | None
    #: Last error line of its log, of this start or of the one before.
    last_error: str | None


def check_nvflare() -> None:
    """Refuse another version of NVFlare: guards of a kit rest on names inside of this one.

    Raises:
        FederationError: If another one is installed.
    """
    found = importlib.metadata.version("nvflare")
    if found != NVFLARE:
        raise FederationError(
            f"nvflare={found}; permitted: {NVFLARE}, whose weaknesses this version knows and closes; install it with "
            f'`pip install "nvflare=={NVFLARE}"`'
        )


def check_start(site_folder: SiteFolder, *, wait: float = 0.0) -> int:
    """Run the preflight checks of a kit, and return the days that its certificate has left.

    Args:
        site_folder: The organisation's folder.
        wait: Seconds that a party waits for a server that is unreachable.

    Raises:
        PbmvflError: If the kit cannot work, with what to do.
    """
    check_nvflare()
    hardening.check(site_folder)
    own, authority = Certificate.read(site_folder.certificate), Certificate.read(site_folder.authority)
    days = tls.check(own, site_folder.private_key, authority, name=site_folder.name)
    site_folder.pins()
    revoked = site_folder.revocations()
    if revoked is not None:
        revoked.check_fresh()
        if own.value.serial_number in revoked.entries:
            raise FederationError(
                f"{own.path} was revoked, by list {revoked.number} of the authority; ask for new certificates with "
                "`pbmvfl federation request`, after a call"
            )
    if site_folder.is_server:
        if site_folder.policy.exists():
            PolicyFile.read(site_folder)
        # What a killed start left behind ends by itself, and has the ports until then.
        left = _GRACE if read_record(site_folder) is not None else 0.0
        check_port(site_folder.federation.port, "port", wait=left)
        check_port(site_folder.federation.line_port, "line_port", wait=left)
        return days
    PolicyFile.read(site_folder)
    check_server(site_folder, wait=wait)
    return days


def start(site_folder: SiteFolder, *, wait: float = 0.0, timeout: float = 60.0) -> KitStatus:
    """Start a kit's process, and return when the server accepted the party, or accepts parties.

    Args:
        site_folder: The organisation's folder.
        wait: Seconds that a party waits for a server that is unreachable.
        timeout: Seconds that the process has to become ready.

    Raises:
        FederationError: If it did not start.
    """
    with _locked(site_folder) as lock:
        _prepare(site_folder, wait)
        with _output(site_folder) as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", keeper.__name__, str(site_folder.path), str(lock)],
                env=keeper.environment(),
                cwd=site_folder.path,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(lock,),
            )
        # If this process lives on, it reaps its child.
        threading.Thread(target=process.wait, daemon=True).start()
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            record = read_record(site_folder)
            if record is not None and record.pid == process.pid and is_ready(site_folder, record):
                return status(site_folder)
            if process.returncode is not None:
                raise FederationError(f"{site_folder.name} ended while it started: {_said(site_folder)}")
            time.sleep(_POLL)
        stop(site_folder)
        raise FederationError(f"{site_folder.name} was not ready after {timeout:g} seconds: {_said(site_folder)}")


def run(site_folder: SiteFolder, *, wait: float = 0.0) -> int:
    """Run a kit in this process, for systemd and the like, and return NVFlare's exit code."""
    with _locked(site_folder) as lock:
        _prepare(site_folder, wait)
        return keeper.keep(site_folder, lock)


def stop(site_folder: SiteFolder) -> bool:
    """End a kit's process and all that it started; return False if none was there."""
    record = read_record(site_folder)
    if record is None or not record.alive:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        kept = psutil.Process(record.pid)
        below = kept.children(recursive=True)
        kept.terminate()
        if not _gone(record.pid, record.birth, _GRACE):
            for each in (kept, *below):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            _gone(record.pid, record.birth, _GRACE)
    return True


def status(site_folder: SiteFolder) -> KitStatus:
    record = read_record(site_folder)
    alive = record is not None and record.site_alive
    days = None
    with contextlib.suppress(FederationError):
        days = Certificate.read(site_folder.certificate).days_left(datetime.datetime.now(datetime.UTC))
    return KitStatus(
        name=site_folder.name,
        running=alive,
        ready=alive and record is not None and is_ready(site_folder, record),
        pid=record.site if record is not None and alive else None,
        since=record.since if record is not None else None,
        certificate_days=days,
        last_error=_last_error(site_folder),
    )


@contextlib.contextmanager
def _locked(site_folder: SiteFolder) -> Iterator[int]:
    """Take the kit's lock, of which a keeper that is started meanwhile has a copy; refuse a second start."""
    while (lock := take_lock(site_folder)) < 0:
        record = read_record(site_folder)
        if record is None or not record.alive:
            raise FederationError(f"{site_folder.name} is just being started by another process; wait for that one")
        if _gone(record.site, record.site_birth, _MOMENT) and _gone(record.pid, record.birth, _GRACE):
            continue  # NVFlare's process was killed, and its keeper was just reaping it
        raise FederationError(
            f"{site_folder.name} runs already: process {record.site} since {record.since}; to start it anew: "
            f"`pbmvfl {site_folder.role} stop`"
        )
    try:
        yield lock
    finally:
        os.close(lock)


def _output(site_folder: SiteFolder) -> BinaryIO:
    """Open the file for what NVFlare prints; the previous start's file stays beside it."""
    path = site_folder.logs / OUTPUT
    if path.exists():
        os.replace(path, path.with_suffix(".out.old"))
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE), "ab")


def _prepare(site_folder: SiteFolder, wait: float) -> None:
    check_start(site_folder, wait=wait)
    hardening.harden(site_folder)
    make_private_folder(site_folder.logs)
    remove_unfinished_jobs(site_folder)
    prune_jobs(site_folder, KEPT_JOBS)


def _gone(pid: int, born: str, within: float) -> bool:
    until = time.monotonic() + within
    while birth(pid) == born:
        if time.monotonic() > until:
            return False
        time.sleep(_POLL)
    return True


def _said(site_folder: SiteFolder) -> str:
    words = _last_error(site_folder)
    if words is None:
        with contextlib.suppress(OSError):
            lines = (site_folder.logs / OUTPUT).read_text(errors="replace")[-_LONGEST_LOG:].strip().splitlines()
            words = lines[-1] if lines else None
    return f"{words or 'it said nothing'}; see {site_folder.kit / 'log.txt'} and {site_folder.logs / OUTPUT}"


def _last_error(site_folder: SiteFolder) -> str | None:
    path = site_folder.kit / "error_log.txt"
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LONGEST_LOG))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    return next((line for line in reversed(lines) if " ERROR " in line or " CRITICAL " in line), None)
