"""A line and its parties for tests: each party a thread, or a process that can be stopped and killed."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.deploy.link.acceptor import Acceptor
from pbmvfl.deploy.link.interface import Channel, Handler
from pbmvfl.deploy.link.message_auth import PartyMessageAuth, ServerMessageAuth
from pbmvfl.deploy.link.tls import Credentials, drop, party_context, server_context
from pbmvfl.deploy.link.tls_client import TlsPartyLink
from pbmvfl.deploy.link.tls_server import TlsServerLink
from pbmvfl.errors import LinkError
from pbmvfl.protocol.transport import Answers
from support.certificates import Authority

if TYPE_CHECKING:  # a party's process here has no party, and starts without torch
    from pbmvfl.federation.party_setup import PartySetup

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

    def auth(self) -> PartyMessageAuth:
        return PartyMessageAuth(identity_of(self.name), identity_of(SERVER).public, self.name, self.context)

    def line(self, **choices: Any) -> TlsPartyLink:
        usual = {
            "address": self.address,
            "tls": party_context(self.credentials),
            "auth": self.auth(),
            "server_name": SERVER,
            "patience": self.patience,
        }
        return TlsPartyLink(**{**usual, **choices})


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
        self.auth = ServerMessageAuth(
            identity_of(SERVER), {name: identity_of(name).public for name in self.names}, CONTEXT
        )
        self.line = TlsServerLink(
            listen=(self.host, 0),
            tls=server_context(self.authority.issue(SERVER)),
            auth=self.auth,
            parties=self.names,
            patience=self.patience,
            **self.choices,
        )
        self._ends: list[tuple[TlsPartyLink, threading.Thread]] = []

    @property
    def acceptor(self) -> Acceptor:
        """What listens at the line's port, and counts who comes."""
        return self.line._acceptor

    def site(self, name: str, **choices: Any) -> Site:
        choices.setdefault("credentials", self.authority.issue(name))
        return Site(name=name, **{"address": self.line.address, "patience": self.patience, **choices})

    def dial(self, name: str, handle: Handler, **choices: Any) -> TlsPartyLink:
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


def until(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether something comes to hold; the seconds end a test that hangs."""
    last = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > last:
            return False
        time.sleep(0.005)
    return True


def echo(channel: Channel, body: bytes) -> bytes:
    return bytes([channel]) + body


class LineThreads:
    """A transport for the conformance suite: a line, and a thread for each party, over real sockets."""

    def __init__(self, setups: Sequence[PartySetup], folder: Path) -> None:
        names = [f"party-{index}" for index in range(len(setups))]
        self.federation = Federation(folder, names, choices={"ended_after": 0.5})
        self.parties = [setup.build() for setup in setups]
        self.held = [threading.Event() for _ in setups]
        self.ends = [self.federation.dial(name, self._handler(index)) for index, name in enumerate(names)]
        self.federation.line.join(timeout=60)

    def _handler(self, index: int) -> Handler:
        self.held[index].set()

        def handle(channel: Channel, body: bytes) -> bytes:
            self.held[index].wait()
            return self.parties[index].receive(body) if channel is Channel.PROTOCOL else b""

        return handle

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        return self.federation.line.exchange(message, timeout=timeout)

    def close(self) -> None:
        self.federation.close()
        for party in self.parties:
            party.close()


class Proxy:
    """A cable that can be cut: it passes bytes on between parties and a line, and counts connections."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    drop(near)
                    continue
                with self._lock:
                    self._pairs.append((near, far))
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for each in (source, sink):
            drop(each)

    def cut(self) -> None:
        """Every connection ends, on both sides."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for each in pair:
                drop(each)

    def close(self) -> None:
        drop(self._listener)
        self.cut()


class EchoProcess:
    """A party that says back what it hears, in a process of its own, maybe in a network of its own."""

    def __init__(self, site: Site, folder: Path, *, network: str = "", seconds: float = 0.0) -> None:
        order = folder / f"{site.name}.pickle"
        order.write_bytes(pickle.dumps((site, seconds)))
        prefix = ["ip", "netns", "exec", network] if network else []
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(Path(__file__).resolve()), str(order)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _main(order: str) -> None:
    site, seconds = pickle.loads(Path(order).read_bytes())

    def handle(channel: Channel, body: bytes) -> bytes:
        time.sleep(seconds)  # work
        return echo(channel, body)

    with contextlib.suppress(LinkError):
        site.line().serve(handle)


if __name__ == "__main__":
    from support.line_parties import _main as main  # so that what is read has the module's own name

    main(sys.argv[1])
