"""Parts that both ends of a gRPC link share: event loop, options of the connection, and frames that wait to be sent.

One bidirectional stream carries the messages of one party. The server sends a challenge, the party its JOIN, the server
an empty message; from then on the server sends questions and the party answers, all of them authenticated by
`message_auth`. A refusal is the status of the stream. Between answers a party sends empty messages, so that a stream
which ends just after one was ended by the party's process, and one which ends after seconds of silence by the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

# Handshakes of strangers would fill the log. The library reads the setting when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

from pbmvfl.deploy.link.tls import Credentials

SERVICE, NAME = "pbmvfl.Link", "Talk"
METHOD = f"/{SERVICE}/{NAME}"
WELCOME = b""
#: Longest message in bytes: those of a private alignment have some megabytes.
LIMIT = 64 << 20
#: Seconds that both ends have for TLS and JOIN.
TIME_LIMIT = 10.0
#: Seconds between two empty messages of an idle party.
HEARTBEAT = 0.5
#: Milliseconds after which unacknowledged bytes end a connection: the library sets TCP_USER_TIMEOUT to it. A process
#: that is stopped still acknowledges. Pings, which it would not answer, are for streams without any traffic.
_UNACKNOWLEDGED, _PING_AFTER = 3000, 3_600_000

_Result = TypeVar("_Result")
_lock = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop that runs all streams of this process, in a thread of its own: the library supports one."""
    with _lock:
        if not _loops:
            _loops.append(asyncio.new_event_loop())
            threading.Thread(target=_loops[0].run_forever, name="pbmvfl-streams", daemon=True).start()
        return _loops[0]


def run(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine in the streams' loop, and return its result to another thread."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop()).result()


def options(*, message_limit: int, **more: int | str) -> list[tuple[str, int | str]]:
    """Return options of a server or a channel."""
    usual: dict[str, int | str] = {
        "max_receive_message_length": message_limit,
        "max_send_message_length": message_limit,
        "keepalive_time_ms": _PING_AFTER,
        "keepalive_timeout_ms": _UNACKNOWLEDGED,
    }
    return [(f"grpc.{name}", value) for name, value in {**usual, **more}.items()]


def server_credentials(files: Credentials) -> grpc.ServerCredentials:
    """Return credentials of a server that accepts certificates of the federation's authority alone."""
    key, certificate, authority = files.contents()
    return grpc.ssl_server_credentials([(key, certificate)], root_certificates=authority, require_client_auth=True)


def party_credentials(files: Credentials) -> grpc.ChannelCredentials:
    """Return credentials of a party; no other authority than the federation's is trusted."""
    key, certificate, authority = files.contents()
    return grpc.ssl_channel_credentials(root_certificates=authority, private_key=key, certificate_chain=certificate)


class Outbox:
    """Messages that a stream sends one after the other; used in the streams' loop."""

    def __init__(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        self._write, self._frames = write, deque[bytes]()
        self._task: asyncio.Task[None] | None = None

    def put(self, frame: bytes) -> None:
        self._frames.append(frame)
        if not self.is_busy:
            self._task = asyncio.get_running_loop().create_task(self._send())

    @property
    def is_busy(self) -> bool:
        return self._task is not None and not self._task.done()

    async def _send(self) -> None:
        with contextlib.suppress(Exception):  # its reader notices that the stream ended
            while self._frames:
                await self._write(self._frames.popleft())
