"""Link on this machine, with its parties in processes of their own."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

# Certificates for a trial, and networks with a cable that can be cut, are the tests' own helpers.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.deploy.link.grpc_party import GrpcPartyLink
from pbmvfl.deploy.link.grpc_server import GrpcServerLink
from pbmvfl.deploy.link.interface import Channel, Handler
from pbmvfl.deploy.link.message_auth import PartyMessageAuth, ServerMessageAuth
from pbmvfl.deploy.link.tls import Credentials
from pbmvfl.protocol.transport import Answers
from support.certificates import Authority

if TYPE_CHECKING:
    from pbmvfl.federation.party_setup import PartySetup

CONTEXT = b"benchmark"
SERVER = "server"
PATIENCE = 300.0


class Work(Protocol):
    """Work of a party; it is pickled to the party's process, and begins there."""

    def begin(self) -> Handler: ...


@dataclass(frozen=True)
class Trains:
    """Party that trains by the protocol."""

    setup: PartySetup

    def begin(self) -> Handler:
        import torch

        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        party = self.setup.build()

        def handle(channel: Channel, body: bytes) -> bytes:
            if channel is Channel.PROTOCOL:
                return party.receive(body)
            party.close()
            return b""

        return handle


@dataclass(frozen=True)
class Site:
    """Start parameters of a party's process."""

    name: str
    identity: bytes
    server_pin: bytes
    address: tuple[str, int]
    credentials: Credentials
    work: Work

    def serve(self) -> None:
        GrpcPartyLink(
            address=self.address,
            credentials=self.credentials,
            auth=PartyMessageAuth(Identity.from_private_bytes(self.identity), self.server_pin, self.name, CONTEXT),
            server_name=SERVER,
            patience=PATIENCE,
        ).serve(self.work.begin())


def serve_all(sites: Sequence[Site]) -> None:
    """Serve one or more parties in this process, a thread each."""
    threads = [threading.Thread(target=site.serve, daemon=True) for site in sites]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class LinkSites:
    """Transport over a link, with several parties in each process."""

    def __init__(
        self,
        works: Sequence[Work],
        *,
        parties_a_process: int = 1,
        join_seconds: float = 180,
        addresses: tuple[str, str] = ("127.0.0.1", "127.0.0.1"),
    ) -> None:
        """Start the parties' processes and wait until all have joined.

        Args:
            works: What each party does.
            parties_a_process: How many parties share a process, as threads.
            join_seconds: How long to wait for them.
            addresses: Where the server listens, and where parties find it.
        """
        self._folder = tempfile.TemporaryDirectory()
        authority = Authority(Path(self._folder.name))
        names = [f"party-{index}" for index in range(len(works))]
        server, parties = Identity.generate(), [Identity.generate() for _ in works]
        pins = {name: identity.public for name, identity in zip(names, parties, strict=True)}
        self.link = GrpcServerLink(
            listen=(addresses[0], 0),
            credentials=authority.issue(SERVER),
            auth=ServerMessageAuth(server, pins, CONTEXT),
            parties=names,
            patience=PATIENCE,
        )
        address = addresses[1], self.link.address[1]
        sites = [
            Site(name, identity.private_bytes(), server.public, address, authority.issue(name), work)
            for name, identity, work in zip(names, parties, works, strict=True)
        ]
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        try:
            for start in range(0, len(sites), parties_a_process):
                some = sites[start : start + parties_a_process]
                process = context.Process(target=serve_all, args=(some,), daemon=True)
                process.start()
                self._processes.append(process)
            self.link.join(timeout=join_seconds)
        except BaseException:
            self.close()
            raise

    def bytes_on_sockets(self) -> tuple[int, int]:
        """Return bytes sent to and received from the parties, TLS and framing included, as the system counts them."""
        port = self.link.address[1]
        said = subprocess.run(["ss", "-tinH", f"sport = :{port}"], capture_output=True, text=True, check=True).stdout
        down, up = (sum(map(int, re.findall(rf"\b{name}:(\d+)", said))) for name in ("bytes_acked", "bytes_received"))
        return down, up

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        return self.link.exchange(message, timeout=timeout)

    def close(self) -> None:
        processes, self._processes = self._processes, []
        if processes:
            self.link.ask(dict.fromkeys(range(len(self.link.parties)), b""), channel=Channel.END, timeout=30)
        self.link.close()
        for process in processes:
            process.join(timeout=30)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()
