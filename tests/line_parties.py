"""A line and its parties for tests: each party a thread, or a process that can be stopped and killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from certificates import Authority
from pbmvfl.deploy.line import Line
from pbmvfl.deploy.line_party import PartyLine
from pbmvfl.deploy.links import Channel, Handler
from pbmvfl.deploy.seal import PartySeal, ServerSeal
from pbmvfl.deploy.tls import Credentials, party_context, server_context
from pbmvfl.errors import LinkError
from pbmvfl.party_setup import PartySetup
from pbmvfl.secagg.keys import Identity
from pbmvfl.transport.base import Answers

SERVER = "clinic"
CONTEXT = b"federation, job 1"


def identity_of(name: str) -> Identity:
    return Identity.from_private_bytes(name.encode().ljust(32, b"\1")[:32])


@dataclass
class Site:
    """What one party needs to dial: all of it can be sent to another process."""

    name: str
    address: tuple[str, int]
    credentials: Credentials
    patience: float = 60.0
    context: bytes = CONTEXT

    def seal(self) -> PartySeal:
        return PartySeal(identity_of(self.name), identity_of(SERVER).public, self.name, self.context)

    def line(self, **choices: Any) -> PartyLine:
        usual = {
            "address": self.address,
            "tls": party_context(self.credentials),
            "seal": self.seal(),
            "server_name": SERVER,
            "patience": self.patience,
        }
        return PartyLine(**{**usual, **choices})


@dataclass
class Federation:
    """An authority, a line that listens, and parties that dial it."""

    folder: Path
    names: Sequence[str] = ("bank", "hospital", "insurer")
    patience: float = 60.0
    host: str = "127.0.0.1"
    choices: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.authority = Authority(self.folder / "ca")
        self.seal = ServerSeal(identity_of(SERVER), {name: identity_of(name).public for name in self.names}, CONTEXT)
        self.line = Line(
            listen=(self.host, 0),
            tls=server_context(self.authority.issue(SERVER)),
            seal=self.seal,
            parties=self.names,
            patience=self.patience,
            **self.choices,
        )
        self._ends: list[tuple[PartyLine, threading.Thread]] = []

    def site(self, name: str, **choices: Any) -> Site:
        usual = {"credentials": self.authority.issue(name), "address": self.line.address, "patience": self.patience}
        return Site(name=name, **{**usual, **choices})

    def dial(self, name: str, handle: Handler, **choices: Any) -> PartyLine:
        """A party as a thread of this process."""
        end = self.site(name).line(**choices)

        def serve() -> None:
            with contextlib.suppress(LinkError):
                end.serve(handle)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        self._ends.append((end, thread))
        return end

    def close(self) -> None:
        for end, _ in self._ends:
            end.close()
        self.line.close()
        for _, thread in self._ends:
            thread.join(timeout=30)

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def echo(channel: Channel, body: bytes) -> bytes:
    return bytes([channel]) + body


def serve_setup(site: Site, setup: PartySetup) -> None:
    """A party's process: a party behind its line until the server says that the work is over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    party = setup.build()
    try:
        with contextlib.suppress(LinkError):
            site.line().serve(lambda channel, body: party.receive(body) if channel is Channel.PROTOCOL else b"")
    finally:
        party.close()


class LineProcesses:
    """A transport of its own for the conformance suite: a line, and a process for each party."""

    def __init__(self, setups: Sequence[PartySetup], folder: Path, *, patience: float = 60.0, **choices: Any) -> None:
        names = [f"party-{index}" for index in range(len(setups))]
        self.federation = Federation(folder, names, patience=patience, choices=choices)
        context = multiprocessing.get_context("spawn")
        self.processes: list[BaseProcess] = []
        try:
            for name, setup in zip(names, setups, strict=True):
                process = context.Process(target=serve_setup, args=(self.federation.site(name), setup), daemon=True)
                process.start()
                self.processes.append(process)
            self.federation.line.join(timeout=120)
        except BaseException:
            self.close()
            raise

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        return self.federation.line.exchange(message, timeout=timeout)

    def close(self) -> None:
        line, processes, self.processes = self.federation.line, self.processes, []
        if processes:
            line.ask(dict.fromkeys(range(len(processes)), b"done"), channel=Channel.END, timeout=30)
        self.federation.close()
        for process in processes:
            process.join(timeout=30)
            if process.is_alive():
                process.kill()
                process.join()

    def kill(self, party: int) -> None:
        self.processes[party].kill()
        self.processes[party].join()

    def signal(self, party: int, number: signal.Signals) -> None:
        pid = self.processes[party].pid
        assert pid is not None
        os.kill(pid, number)
