"""One role of one job as a process, `pbmvfl.deploy.job.process` with a tap outside of it; it can be told to die in a
round.

python tests/support/deploy_processes.py HOME JOB MOMENT ROUNDS < ORDER

MOMENT: `never`, `before` an answer leaves, `after` it has left. ROUNDS: in which answer of this process, from 1. Every
answer of a round is written down before it leaves, read by the offsets of the message's header.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pbmvfl.deploy.job import process
from pbmvfl.deploy.job.party_job import PartySite
from pbmvfl.deploy.job.process import PartyJob, ServerJob
from pbmvfl.deploy.link.grpc_server import GrpcServerLink
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import JobResult, JobSpec
from support.deploy_homes import SERVER

RELEASED = "released.log"
_KIND, _SESSION, _ROUND, _EMBEDDING, _PROTOCOL = 5, slice(16, 32), 32, 6, 2


@dataclass(frozen=True)
class Death:
    """When a process kills itself, as `kill -9` would."""

    moment: str = "never"
    rounds: int = 0


class DyingRole:
    """One role of a job as a process of its own."""

    def __init__(self, home: SiteFolder, order: JobSpec, job: str, death: Death) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(home.path), job, death.moment, str(death.rounds)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(order.to_text())
        self._process.stdin.close()

    def code(self) -> int:
        """Its exit code, when it has ended; below 0 the signal that ended it."""
        return self._process.wait(timeout=120)

    def __enter__(self) -> DyingRole:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def run_with_death(
    homes: Mapping[str, SiteFolder], order: JobSpec, job: str, name: str, death: Death
) -> tuple[int, JobResult | None]:
    """One job in which one role is a process that dies and the others are threads; its code, and the server's outcome
    if the server was not the one."""
    others = [role for role in homes if role != name]
    jobs = {role: (ServerJob if role == SERVER else PartyJob)(homes[role], order, job=job) for role in others}
    threads = [threading.Thread(target=each.run, daemon=True) for each in jobs.values()]
    with DyingRole(homes[name], order, job, death) as dying:
        for thread in threads:
            thread.start()
        code = dying.code()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a role did not end after another one died"
    served = jobs.get(SERVER)
    return code, served.result if isinstance(served, ServerJob) else None


def released(home: SiteFolder) -> list[tuple[str, int]]:
    """(session, round) of every answer that left a party, in their order."""
    path = home.path / RELEASED
    lines = path.read_text().splitlines() if path.exists() else []
    return [(session, int(number)) for session, number in (line.split() for line in lines)]


def charged(home: SiteFolder) -> dict[str, range]:
    """Every session's rounds in a party's book, by its tables and not by its reader."""
    book = sqlite3.connect(home.ledger)
    rows = book.execute(
        "SELECT s.session, s.first_round, c.charged_until FROM sessions s JOIN charged c ON c.session = s.id"
    ).fetchall()
    book.close()
    return {session: range(first, until) for session, first, until in rows}


# --- in the process itself ---


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def tap_parties(death: Death) -> Callable[..., bytes]:
    """What `PartySite.handle` becomes: the same, with every answer of a round written down."""
    handle, count = PartySite.handle, 0

    def watched(self, channel, body):
        nonlocal count
        if death.moment == "after" and count == death.rounds:
            _die()
        answer = handle(self, channel, body)
        if channel == _PROTOCOL and len(answer) > _ROUND + 4 and answer[_KIND] == _EMBEDDING:
            count += 1
            if death.moment == "before" and count == death.rounds:
                _die()
            (number,) = struct.unpack_from("<I", answer, _ROUND)
            with open(self._site_folder.path / RELEASED, "a") as file:
                file.write(f"{bytes(answer[_SESSION]).hex()} {number}\n")
        return answer

    return watched


def _tap_server(death: Death) -> None:
    exchange, count = GrpcServerLink.exchange, 0

    def watched(self, message, *, timeout=None):
        nonlocal count
        answers = exchange(self, message, timeout=timeout)
        if any(answer[_KIND : _KIND + 1] == bytes([_EMBEDDING]) for answer in answers.received.values()):
            count += 1
            if death.moment != "never" and count == death.rounds:
                _die()
        return answers

    GrpcServerLink.exchange = watched  # type: ignore[method-assign]


def _main() -> int:
    folder, job, moment, rounds = sys.argv[1:]
    death = Death(moment, int(rounds))
    if Path(folder).name == SERVER:
        _tap_server(death)
    else:
        PartySite.handle = tap_parties(death)  # type: ignore[method-assign]
    return process.main([folder, job])


if __name__ == "__main__":
    sys.exit(_main())
