"""One role of one job as a process, `pbmvfl.deploy.site` with a tap outside of it; it can be told to die in a round.

python tests/deploy_processes.py HOME JOB MOMENT ROUNDS IDLE < ORDER

MOMENT: `never`, `before` an answer leaves, `after` it has left. ROUNDS: in which answer of this process, from 1. Every
answer of a round is written down before it leaves, read by the offsets of the message's header. IDLE: after how many
seconds a party lets go of a server that asks nothing.
"""

from __future__ import annotations

import functools
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy_homes import SERVER
from pbmvfl.deploy.home import Home
from pbmvfl.deploy.order import Order

RELEASED = "released.log"
_KIND, _SESSION, _ROUND, _EMBEDDING, _PROTOCOL = 5, slice(16, 32), 32, 6, 2


@dataclass(frozen=True)
class Death:
    """When a process kills itself, as `kill -9` would."""

    moment: str = "never"
    rounds: int = 0


class Processes:
    """All roles of one job, each a process of its own."""

    def __init__(
        self,
        homes: Mapping[str, Home],
        order: Order,
        job: str,
        deaths: Mapping[str, Death] | None = None,
        *,
        idle: float = 60,
    ) -> None:
        self._running: dict[str, subprocess.Popen[str]] = {}
        source = os.pathsep.join(filter(None, sys.path))
        for name, home in homes.items():
            death = (deaths or {}).get(name, Death())
            arguments = [str(home.path), job, death.moment, str(death.rounds), str(idle)]
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), *arguments],
                env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert process.stdin is not None
            process.stdin.write(order.to_text())
            process.stdin.close()
            self._running[name] = process

    def code(self, name: str, timeout: float = 120) -> int:
        """A role's exit code, when it has ended; below 0 the signal that ended it."""
        return self._running[name].wait(timeout=timeout)

    def codes(self) -> dict[str, int]:
        return {name: self.code(name) for name in self._running}

    def signal(self, name: str, number: signal.Signals) -> None:
        self._running[name].send_signal(number)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


def released(home: Home) -> list[tuple[str, int]]:
    """(session, round) of every answer that left a party, in their order."""
    path = home.path / RELEASED
    lines = path.read_text().splitlines() if path.exists() else []
    return [(session, int(number)) for session, number in (line.split() for line in lines)]


def charged(home: Home) -> dict[str, range]:
    """Every session's rounds in a party's book, by its tables and not by its reader."""
    book = sqlite3.connect(home.ledger)
    rows = book.execute(
        "SELECT s.session, s.first_round, c.charged_until FROM sessions s JOIN charged c ON c.session = s.id"
    ).fetchall()
    book.close()
    return {session: range(first, until) for session, first, until in rows}


def wait_until(is_so: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, f"it was not so within {seconds:g} seconds"
        time.sleep(0.02)


# --- in the process itself ---


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _tap_party(death: Death) -> None:
    from pbmvfl.deploy.party_site import PartySite

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
            with open(self._home.path / RELEASED, "a") as file:
                file.write(f"{bytes(answer[_SESSION]).hex()} {number}\n")
        return answer

    PartySite.handle = watched  # type: ignore[method-assign]


def _tap_server(death: Death) -> None:
    from pbmvfl.deploy.line import Line

    exchange, count = Line.exchange, 0

    def watched(self, message, *, timeout=None):
        nonlocal count
        answers = exchange(self, message, timeout=timeout)
        if any(answer[_KIND : _KIND + 1] == bytes([_EMBEDDING]) for answer in answers.received.values()):
            count += 1
            if death.moment != "never" and count == death.rounds:
                _die()
        return answers

    Line.exchange = watched  # type: ignore[method-assign]


def _main() -> int:
    from pbmvfl.deploy import carriers, site
    from pbmvfl.deploy.line_party import PartyLine

    folder, job, moment, rounds, idle = sys.argv[1:]
    death = Death(moment, int(rounds))
    if Path(folder).name == SERVER:
        _tap_server(death)
    else:
        carriers.PartyLine = functools.partial(PartyLine, idle=float(idle))  # type: ignore[misc, assignment]
        _tap_party(death)
    return site.main([folder, job])


if __name__ == "__main__":
    sys.exit(_main())
