"""Acceptor of the server's TLS port: each new connection gets a thread and a time limit to authenticate.

Connections without a valid identity cannot keep parties out. The number of pending handshakes is bounded; above the
bound, one of the address with the most of them is closed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pbmvfl.deploy.link.tls import drop, hang_up, prepare, wrap
from pbmvfl.errors import LinkError

#: Largest number of pending handshakes.
MOST_NEWCOMERS = 64
_BACKLOG = 128
#: Seconds that an earlier process may take to release the port.
PORT_PATIENCE = 15.0
_PAUSE = 0.1

#: Authenticates a connection until a deadline. It keeps the connection and returns, or raises; then it is closed.
OnConnection = Callable[[ssl.SSLSocket, float], None]


@dataclass
class _Newcomer:
    connection: socket.socket
    address: str
    deadline: float


class Acceptor:
    """Listener that hands over connections whose TLS handshake succeeded."""

    def __init__(
        self,
        *,
        listen: tuple[str, int],
        tls: ssl.SSLContext,
        on_connection: OnConnection,
        time_limit: float,
        most: int = MOST_NEWCOMERS,
    ) -> None:
        """Listen, and start the accepting thread.

        Args:
            listen: Host and port; an empty host means every address, port 0 a free port.
            tls: Server-side TLS context.
            on_connection: Authenticates and keeps a connection; see `OnConnection`.
            time_limit: Seconds from accept to the end of authentication.
            most: Largest number of pending handshakes.

        Raises:
            LinkError: If the port cannot be listened on within `PORT_PATIENCE` seconds.
        """
        self._tls, self._on_connection, self._time_limit, self._most = tls, on_connection, time_limit, most
        #: Number of connections so far, authenticated or not.
        self.num_accepted = 0
        self._newcomers: dict[int, _Newcomer] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._listener = _listener(listen, PORT_PATIENCE)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="pbmvfl-door", daemon=True)
        self._thread.start()

    @property
    def num_newcomers(self) -> int:
        """Number of connections that are not authenticated yet."""
        with self._lock:
            return len(self._newcomers)

    def close(self) -> None:
        """Stop listening, and end all pending handshakes."""
        self._closed.set()
        hang_up(self._listener)
        with self._lock:
            for newcomer in self._newcomers.values():
                hang_up(newcomer.connection)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _accept(self) -> None:
        try:
            self._accept_all()
        finally:
            drop(self._listener)

    def _accept_all(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for number in itertools.count():
            try:
                while not poll.poll(1000) and not self._closed.is_set():
                    self._sweep()
                if self._closed.is_set():
                    return
                connection, address = self._listener.accept()
            except OSError:
                if self._closed.wait(_PAUSE):  # out of file descriptors, or the peer has left again
                    return
                continue
            self._accept_one(number, connection, str(address[0]))

    def _accept_one(self, number: int, connection: socket.socket, address: str) -> None:
        self._sweep()
        self.num_accepted += 1
        try:
            prepare(connection)
            connection.settimeout(self._time_limit)
            guest = wrap(self._tls, connection, server_side=True)
        except (OSError, ValueError):
            drop(connection)
            return
        newcomer = _Newcomer(guest, address, time.monotonic() + self._time_limit)
        with self._lock:
            if len(self._newcomers) >= self._most:
                self._evict_one()
            self._newcomers[number] = newcomer
        thread = threading.Thread(
            target=self._handshake, args=(number, guest, newcomer.deadline), name="pbmvfl-newcomer", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no more threads
            self._forget(number)
            drop(guest)

    def _handshake(self, number: int, guest: ssl.SSLSocket, deadline: float) -> None:
        is_in = False
        # Any client may connect and fail, and a connection may be ended during its handshake. `on_connection` has
        # recorded what a party did wrong.
        with contextlib.suppress(Exception):
            guest.settimeout(max(0.01, deadline - time.monotonic()))
            guest.do_handshake()
            self._on_connection(guest, deadline)
            is_in = True
        self._forget(number)  # before it is closed: the descriptor may be another file's afterwards
        if not is_in:
            drop(guest)

    def _forget(self, number: int) -> None:
        with self._lock:
            self._newcomers.pop(number, None)

    def _sweep(self) -> None:
        """Shut down connections past their deadline; their threads then end with an error."""
        now = time.monotonic()
        with self._lock:
            for newcomer in self._newcomers.values():
                if now > newcomer.deadline:
                    hang_up(newcomer.connection)

    def _evict_one(self) -> None:
        """Close a random connection of the busiest address.

        The choice is random: an attacker who reconnects fast enough could always make the honest party the oldest one.
        """
        address, _ = Counter(each.address for each in self._newcomers.values()).most_common(1)[0]
        numbers = [number for number, each in self._newcomers.items() if each.address == address]
        chosen = numbers[int.from_bytes(os.urandom(4), "big") % len(numbers)]
        hang_up(self._newcomers.pop(chosen).connection)


def _listener(listen: tuple[str, int], patience: float) -> socket.socket:
    host, port = listen
    until = time.monotonic() + patience
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with contextlib.ExitStack() as if_it_fails:
                listener = socket.socket(family, socket.SOCK_STREAM)
                if_it_fails.callback(listener.close)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(_BACKLOG)
                listener.setblocking(False)
                if_it_fails.pop_all()
                return listener
        except OSError as error:
            if time.monotonic() >= until:
                raise LinkError(
                    f"server: port={port} of {host or 'this machine'} cannot be listened on: "
                    f"{error.strerror or error}; end whatever has it, or choose another line_port"
                ) from error
            time.sleep(_PAUSE)
