"""Launcher of job processes: a site gives each job to a pre-warmed worker.

NVFlare would start Python anew, and loading torch takes longer than all else between a submit and the first round. It
would also put a folder of the job on the import path.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, JobConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobProcessArgs, JobReturnCode
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle, ProcessJobLauncher
from nvflare.app_common.job_launcher.server_process_launcher import ServerProcessJobLauncher
from nvflare.utils.job_launcher_utils import get_client_job_args, get_credential_env, get_server_job_args

from pbmvfl.deploy.monitoring.status import State, read_status
from pbmvfl.deploy.nvflare import job_process
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.policy_file import PolicyFile
from pbmvfl.errors import PbmvflError

_log = logging.getLogger(__name__)
#: Seconds between two looks at a starting job, and the longest start.
_LOOK, _LONGEST_START = 0.5, 600.0
#: Seconds that an idle worker has to end.
_TO_END = 5.0
#: States of a starting job; until it works, no other worker is prepared beside it.
_STARTING = frozenset({State.WARMING_UP, State.JOINING, State.HANDSHAKE})
#: Memory in bytes below which no worker waits unless the policy says so; it takes some 260 MB.
LEAST_MEMORY = 2 << 30


def memory() -> int:
    """Return this machine's memory in bytes, or its container's if that has less."""
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def keeps_worker() -> bool:
    """Return whether a worker waits for the next job: the policy's choice, else if there is memory for it."""
    chosen = None
    with contextlib.suppress(PbmvflError):  # admission reports a faulty policy
        chosen = PolicyFile.read(SiteFolder.at(Path.cwd().parent)).runs.waiting_worker
    return memory() >= LEAST_MEMORY if chosen is None else chosen


class PrewarmedWorker:
    """At most one pre-warmed worker process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Start a worker unless one is ready. It ends with this process, which holds its standard input."""
        with self._lock:
            if self._worker is not None and self._worker.poll() is None:
                return
            try:
                self._worker = _start()
            except OSError as error:
                _log.warning("no process can be made ready for the next job: %s", error)

    def prepare_after(self, starts: Callable[[], bool]) -> None:
        """Start the next worker as soon as the current job has started, or has ended."""

        def wait() -> None:
            until = time.monotonic() + _LONGEST_START
            while starts() and time.monotonic() < until:
                time.sleep(_LOOK)
            self.prepare()

        threading.Thread(target=wait, name="pbmvfl-ready", daemon=True).start()

    def give(self, line: bytes) -> subprocess.Popen[bytes]:
        """Give the job to the ready worker, or to a new one, and return its process."""
        with self._lock:
            process, self._worker = self._worker, None
        if process is not None and process.poll() is None:
            try:
                return _send_job(process, line)
            except OSError:  # it died just now
                process.wait()
        return _send_job(_start(), line)

    def close(self) -> None:
        with self._lock:
            process, self._worker = self._worker, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            try:
                process.wait(_TO_END)
            except subprocess.TimeoutExpired:  # an idle worker has no state to lose, and the site must not wait for it
                process.kill()
                process.wait()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-u", "-m", job_process.__name__],
        stdin=subprocess.PIPE,
        start_new_session=True,  # NVFlare ends a job with its whole process group
    )


def _send_job(process: subprocess.Popen[bytes], line: bytes) -> subprocess.Popen[bytes]:
    assert process.stdin is not None
    with process.stdin as told:
        told.write(line)
    return process


class _PrewarmedLauncher(ProcessJobLauncher):
    """Launcher that gives jobs to a pre-warmed worker, in a site's own process."""

    #: Names of NVFlare's options for a job's process.
    arguments: Callable[[], list[str]]

    def __init__(self) -> None:
        super().__init__()
        self._worker = PrewarmedWorker()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.SYSTEM_START and keeps_worker():
            self._worker.prepare()
        elif event_type == EventType.SYSTEM_END:
            self._worker.close()

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
        job, given = str(job_meta.get(JobConstants.JOB_ID)), fl_ctx.get_prop(FLContextKey.JOB_PROCESS_ARGS) or {}
        dash, *command = _job_options(given, self.arguments())
        if dash != "-m" or job not in command:
            raise ValueError(f"job={job}: not a job's command, or another job's")
        process = self._worker.give(job_process.job_line(command, {**os.environ, **get_credential_env(given)}))
        handle = ProcessHandle(process=process)
        if keeps_worker():
            self._worker.prepare_after(lambda: handle.poll() == JobReturnCode.UNKNOWN and not _works(job))
        return handle


def _job_options(given: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return NVFlare's options of a job's process as a list.

    NVFlare itself joins them to one line, which breaks at a space in a folder's name.
    """
    words: list[str] = []
    for name in names:
        if given.get(name):
            option, value = given[name]
            words += [option, *(str(value).split() if name == JobProcessArgs.OPTIONS else [str(value)])]
    return words or [""]


def _works(job: str) -> bool:
    status = read_status(SiteFolder.at(Path.cwd().parent).status)  # NVFlare works in the kit's folder
    return status is not None and status.job == job and status.state not in _STARTING


class PartyLauncher(_PrewarmedLauncher, ClientProcessJobLauncher):
    """Launcher at a party."""

    arguments = staticmethod(get_client_job_args)


class ServerLauncher(_PrewarmedLauncher, ServerProcessJobLauncher):
    """Launcher at the server."""

    arguments = staticmethod(get_server_job_args)
