"""A line and its parties for tests: each party a thread, or a process that can be stopped and killed."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.deploy.link import grpc_stream as streams
from pbmvfl.deploy.link.grpc_party import GrpcPartyLink
from pbmvfl.deploy.link.grpc_server import GrpcServerLink
from pbmvfl.deploy.link.interface import Channel, Handler
from pbmvfl.deploy.link.message_auth import PartyMessageAuth, ServerMessageAuth
from pbmvfl.deploy.link.tls import Credentials
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

    def line(self, **choices: Any) -> GrpcPartyLink:
        usual = {
            "address": self.address,
            "credentials": self.credentials,
            "auth": self.auth(),
            "server_name": SERVER,
            "patience": self.patience,
        }
        return GrpcPartyLink(**{**usual, **choices})


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
        self.line = GrpcServerLink(
            listen=(self.host, 0),
            credentials=self.authority.issue(SERVER),
            auth=self.auth,
            parties=self.names,
            patience=self.patience,
            **self.choices,
        )
        self._ends: list[tuple[GrpcPartyLink, threading.Thread]] = []
        #: Called at the end, so that handlers which a test holds let go.
        self.releases: list[Callable[[], None]] = []

    def site(self, name: str, **choices: Any) -> Site:
        choices.setdefault("credentials", self.authority.issue(name))
        return Site(name=name, **{"address": self.line.address, "patience": self.patience, **choices})

    def dial(self, name: str, handle: Handler, **choices: Any) -> GrpcPartyLink:
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
        for release in self.releases:
            release()
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


def drop(connection: socket.socket) -> None:
    """Close a connection that other threads may use; they wake."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


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


class Guest:
    """A stream by hand: the right certificate, and then whatever a test wants."""

    def __init__(self, site: Site) -> None:
        self.auth = site.auth()
        host, port = site.address
        options = streams.options(message_limit=1 << 30, ssl_target_name_override=SERVER, use_local_subchannel_pool=1)
        self._channel = grpc.secure_channel(f"{host}:{port}", streams.party_credentials(site.credentials), options)
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._stream = self._channel.stream_stream(streams.METHOD)(iter(self._said.get, None))

    def hear(self) -> bytes:
        return next(self._stream)

    def say(self, body: bytes) -> None:
        self._said.put(body)

    def join(self) -> None:
        self.say(self.auth.join(self.hear()))
        assert self.hear() == b""

    def is_sent_away(self) -> bool:
        """Whether the server ends the stream, whatever it says before."""
        with contextlib.suppress(grpc.RpcError):
            while next(self._stream, None) is not None:
                pass
        return True

    def close(self) -> None:
        self._said.put(None)
        self._channel.close()

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
