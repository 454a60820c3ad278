"""The line at a party: it dials the server, answers what it is asked, and dials again when the connection breaks.

Nothing comes in at a party: it only ever calls its own server, at one address. It gives up when the server cannot be
reached within the patience, when the server asks nothing for `idle` seconds, or at once when the server is another one.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time

from pbmvfl.deploy import frames
from pbmvfl.deploy.line import CHALLENGE, REFUSED, TIME_LIMIT, WELCOME
from pbmvfl.deploy.links import Channel, Handler
from pbmvfl.deploy.seal import OtherJob, PartySeal
from pbmvfl.deploy.tls import common_name, drop, prepare, wrap
from pbmvfl.errors import LinkError

_CONNECT_SECONDS = 1.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
#: Seconds after the last answer in which the server may ask for it again.
_LINGER = 2.0
_MOST_FAULTS = 3


class PartyLine:
    """A party's end: a `PartyLink`. `serve` belongs to one thread; `close` may come from any."""

    def __init__(
        self,
        *,
        address: tuple[str, int],
        tls: ssl.SSLContext,
        seal: PartySeal,
        server_name: str,
        patience: float,
        idle: float | None = None,
        ended_after: float = 5.0,
        frame_limit: int = frames.LIMIT,
    ) -> None:
        self._address, self._tls, self._seal, self._server_name = address, tls, seal, server_name
        self._patience, self._ended_after, self._frame_limit = patience, ended_after, frame_limit
        #: The server is silent while it waits for others: for their answers, and for those that are cut off.
        self._idle = 3 * patience if idle is None else idle
        self._closed = threading.Event()
        self._connection: ssl.SSLSocket | None = None
        self._lock = threading.Lock()
        self._was_welcome = False
        self._faults = 0

    def serve(self, handle: Handler) -> None:
        """Answer until the server says that the work is over."""
        asked = time.monotonic()
        ended = False
        while True:
            connection, buffer = self._dial(ended=ended)
            try:
                while True:
                    question = self._next(connection, buffer, asked)
                    asked = time.monotonic()
                    channel, answer = self._seal.respond(question, handle)
                    self._faults = 0
                    # The time that the handler took is this side's own, and no silence of the server.
                    asked = time.monotonic()
                    frames.send(connection, answer, deadline=asked + self._patience, limit=self._frame_limit)
                    if channel is Channel.END:
                        self._linger(connection, buffer, handle)
                        return
            except LinkError as error:
                self._check_open()
                self._faults += 1
                if self._faults >= _MOST_FAULTS or isinstance(error, _Silent):
                    raise
                ended = False
            except (OSError, EOFError) as error:
                self._check_open()
                ended = _is_end(error)
            finally:
                drop(connection)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            drop(self._connection)

    # --- questions ---

    def _next(self, connection: ssl.SSLSocket, buffer: frames.FrameBuffer, asked: float) -> bytes:
        try:
            return frames.receive(connection, buffer, deadline=asked + self._idle)
        except TimeoutError:
            raise _Silent(f"server: it asked nothing for {self._idle:g} seconds; the party lets go") from None

    def _linger(self, connection: ssl.SSLSocket, buffer: frames.FrameBuffer, handle: Handler) -> None:
        """The last answer may have to be sent again; a server that closes has it."""
        until = time.monotonic() + _LINGER
        try:
            while True:
                question = frames.receive(connection, buffer, deadline=until)
                frames.send(connection, self._seal.respond(question, handle)[1], deadline=until)
        except (OSError, EOFError, LinkError):
            return

    # --- dialling ---

    def _dial(self, *, ended: bool) -> tuple[ssl.SSLSocket, frames.FrameBuffer]:
        """A connection to a server that knows this party. `ended`: the last one was closed by the server."""
        since = time.monotonic()
        refused_since: float | None = None
        pause = _FIRST_PAUSE
        while True:
            self._check_open()
            try:
                return self._call()
            except ConnectionRefusedError as error:
                reason = "nobody listens there"
                refused_since = refused_since or time.monotonic()
                if ended and self._was_welcome and time.monotonic() - refused_since >= self._ended_after:
                    raise LinkError("server: its process ended") from error
            except OtherJob as error:
                reason, refused_since = str(error), None
            except (OSError, EOFError) as error:
                self._check_certificates(error)
                reason, refused_since = _words(error), None
            if time.monotonic() - since >= self._patience:
                host, port = self._address
                raise LinkError(f"server: not reached at {host}:{port} within {self._patience:g} seconds: {reason}")
            self._closed.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _call(self) -> tuple[ssl.SSLSocket, frames.FrameBuffer]:
        raw = socket.create_connection(self._address, timeout=_CONNECT_SECONDS)
        connection: socket.socket = raw
        try:
            prepare(raw)
            raw.settimeout(TIME_LIMIT)
            deadline = time.monotonic() + TIME_LIMIT
            connection = guest = wrap(self._tls, raw, server_side=False)
            with self._lock:
                self._check_open()
                self._connection = guest
            guest.do_handshake()
            name = common_name(guest)
            if name != self._server_name:
                raise LinkError(f"server: it has the certificate of {name}; permitted: {self._server_name}")
            buffer = frames.FrameBuffer(limit=self._frame_limit)
            challenge = _said(frames.receive(guest, buffer, deadline=deadline), CHALLENGE)
            frames.send(guest, self._seal.join(challenge), deadline=deadline)
            _said(frames.receive(guest, buffer, deadline=deadline), WELCOME)
        except BaseException:
            drop(connection)
            raise
        self._was_welcome = True
        return guest, buffer

    def _check_certificates(self, error: Exception) -> None:
        """A certificate that is not accepted will not be accepted later: said at once, unless it once was."""
        if self._was_welcome or not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
            return
        if isinstance(error, ssl.SSLCertVerificationError):
            raise LinkError(f"server: its certificate is not accepted here: {error.verify_message}") from error
        if "ALERT" in (error.reason or ""):
            words = error.reason.lower().replace("_", " ")
            raise LinkError(
                f"server: it does not accept this site's certificate ({words}); check its dates, and that it is of "
                "this federation"
            ) from error

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise LinkError("server: the line was closed at this side")


class _Silent(LinkError):
    """The server is there and says nothing."""


def _said(frame: bytes, expected: bytes) -> bytes:
    kind, rest = frame[:1], frame[1:]
    if kind == REFUSED:
        words = "".join(each for each in rest[:400].decode(errors="replace") if each.isprintable())
        raise LinkError(f"server: it refused this site: {words}")
    if kind != expected:
        raise LinkError(f"server: it said {kind!r}; permitted: {expected!r}")
    return rest


def _is_end(error: Exception) -> bool:
    return isinstance(
        error, EOFError | ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionResetError | BrokenPipeError
    )


def _words(error: Exception) -> str:
    if isinstance(error, EOFError | ssl.SSLEOFError | ConnectionResetError):
        return "the connection was closed during the handshake"
    if isinstance(error, TimeoutError):
        return "no answer"
    return getattr(error, "strerror", None) or type(error).__name__
