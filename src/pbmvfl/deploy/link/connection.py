"""Length-prefixed frames on a byte stream, and a non-blocking connection of one party at the server."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Iterator

from pbmvfl.deploy.link.tls import drop
from pbmvfl.errors import LinkError

# --- Frames on a stream of bytes: four bytes of length, then so many bytes ---
# An announced length is not trusted: one above the limit is refused before memory is allocated, and memory grows with
# the bytes received, not with the bytes announced.


_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size
#: The longest frame: setup messages of a private alignment have some megabytes.
LIMIT = 64 << 20
_CHUNK = 1 << 16


def framed(body: bytes, *, limit: int = LIMIT) -> bytes:
    """Return a body with its length prefix.

    Raises:
        LinkError: If the body is longer than `limit` bytes.
    """
    if len(body) > limit:
        raise LinkError(f"a frame of {len(body):,} bytes; permitted: at most {limit:,}; send less at a time")
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Received bytes that are not consumed yet. A partial frame survives a timeout."""

    def __init__(self, *, limit: int = LIMIT) -> None:
        self._limit = limit
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    def feed(self, data: bytes) -> None:
        """Append received bytes."""
        self._bytes += data

    def take(self) -> bytes | None:
        """Remove and return the next whole frame, or return None if it is incomplete.

        Raises:
            LinkError: If the announced length is above the limit.
        """
        if len(self._bytes) < LENGTH_BYTES:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > self._limit:
            raise LinkError(f"a frame of {length:,} bytes is announced; permitted: at most {self._limit:,}")
        end = LENGTH_BYTES + length
        if len(self._bytes) < end:
            return None
        with memoryview(self._bytes) as view:
            frame = bytes(view[LENGTH_BYTES:end])
        del self._bytes[:end]
        return frame


def receive(connection: socket.socket, buffer: FrameBuffer, *, deadline: float) -> bytes:
    """Return the next frame of a blocking socket.

    Args:
        connection: The socket; its timeout is changed.
        buffer: Bytes that were received before and are not consumed yet.
        deadline: Latest moment, by `time.monotonic()`.

    Raises:
        TimeoutError: If the deadline passed. The call can be repeated.
        EOFError: If the other end closed the connection.
        OSError: If the connection broke.
        LinkError: If the frame is too long.
    """
    while (frame := buffer.take()) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no whole frame came in time")
        connection.settimeout(left)
        with _broken_is_not_late():
            data = connection.recv(_CHUNK)
        if not data:
            raise EOFError("the other end closed the connection")
        buffer.feed(data)
    return frame


def send(connection: socket.socket, body: bytes, *, deadline: float, limit: int = LIMIT) -> None:
    """Send a whole frame on a blocking socket.

    Raises:
        TimeoutError: If the deadline passed. Part of the frame may have left: close the connection.
    """
    data = memoryview(framed(body, limit=limit))
    while data:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the frame could not be sent in time")
        connection.settimeout(left)
        with _broken_is_not_late():
            data = data[connection.send(data[:_CHUNK]) :]


@contextlib.contextmanager
def _broken_is_not_late() -> Iterator[None]:
    """Turn the system's ETIMEDOUT, which means an unreachable peer, into another error than a passed deadline."""
    try:
        yield
    except TimeoutError as error:
        if error.errno == errno.ETIMEDOUT:
            raise ConnectionAbortedError(error.errno, "the other end is out of reach") from error
        raise


# --- One connection of a party at the server: non-blocking, with buffers for both directions ---


#: Bytes that are read at once, before other connections and deadlines get their turn.
_AT_ONE_GO = 1 << 20
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL
#: Size of Linux's `struct tcp_info`, and the offset of its bytes acknowledged and received; byte 0 is the state.
_TCP_INFO_BYTES, _ACKNOWLEDGED = 136, 120
#: States after the other end's FIN: TIME_WAIT, CLOSE_WAIT, LAST_ACK, CLOSING.
_SAID_GOODBYE = frozenset({6, 8, 9, 11})


#: Offset of the milliseconds since the last acknowledgement; the state of a closed connection; and the largest age of
#: "just now", well below the silence after which the system gives a connection up.
_LAST_HEARD, _CLOSED, _JUST_NOW_MS = 56, 7, 2000


class Broken(Exception):
    """Lost connection. `ended` is True if the other end closed or reset it, False if it is unreachable."""

    def __init__(self, *, ended: bool) -> None:
        self.ended = ended
        super().__init__("the other end closed it" if ended else "out of reach")


class Connection:
    """Non-blocking frame connection; belongs to one thread at a time."""

    def __init__(self, connection: ssl.SSLSocket, *, last: int, limit: int = LIMIT) -> None:
        connection.setblocking(False)
        self._socket = connection
        #: The number of the last question that the party had answered when it connected.
        self.last = last
        self._in = FrameBuffer(limit=limit)
        self._limit = limit
        self._out: deque[memoryview] = deque()
        self._wants_write = False
        self._broken: Broken | None = None
        self._error = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """Poll event mask."""
        return select.POLLIN | select.POLLRDHUP | (select.POLLOUT if self._out or self._wants_write else 0)

    @property
    def has_ended(self) -> bool:
        """Return whether the system knows that the other end is gone, without reading anything."""
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLRDHUP)
        return any(found & _GONE for _, found in poll.poll(0))

    def put(self, body: bytes) -> None:
        """Queue a frame; `write` sends it."""
        view = memoryview(framed(body, limit=self._limit))
        self._out.extend(view[start : start + _CHUNK] for start in range(0, len(view), _CHUNK))

    def write(self) -> None:
        """Send as many queued bytes as possible without blocking.

        Raises:
            Broken: If the connection is lost.
        """
        if not self._out:
            return
        self._look_for_errors()
        try:
            while self._out:
                sent = self._socket.send(self._out[0])
                if sent < len(self._out[0]):
                    self._out[0] = self._out[0][sent:]
                else:
                    self._out.popleft()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            raise Broken(ended=self._was_closed(error)) from error

    def read(self) -> list[bytes]:
        """Return the whole frames that are available now.

        Raises:
            Broken: If the connection is lost and no frame came before.
            LinkError: If a frame is too long.
        """
        self._wants_write = False
        frames: list[bytes] = []
        count = 0
        self._look_for_errors()
        try:
            while self._broken is None and count < _AT_ONE_GO:
                data = self._socket.recv(_CHUNK)
                if not data:
                    raise EOFError
                count += len(data)
                self._in.feed(data)
                while (frame := self._in.take()) is not None:
                    frames.append(frame)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLWantWriteError:
            self._wants_write = True
        except (OSError, EOFError) as error:
            # The system reports the error once, and frames that came before it count.
            self._broken = Broken(ended=self._was_closed(error))
        if self._broken is not None and not frames:
            raise self._broken
        return frames

    @property
    def must_read(self) -> bool:
        """Return whether there is something to read that polling does not show."""
        return self._broken is not None or self._socket.pending() > 0

    def _look_for_errors(self) -> None:
        """Remember the socket error, which the system reports once; Python's TLS sockets report every error as EOF."""
        self._error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or self._error

    def _was_closed(self, error: Exception) -> bool:
        """Return whether the peer closed or reset the connection, as an ending process does, or is unreachable."""
        # TLS answers an end of file with an alert, and an ended process answers that with a reset, at any time: so the
        # state is read first, and the socket error once more after it.
        info = self._tcp_info()
        self._look_for_errors()
        if self._error:
            return self._error in (errno.ECONNRESET, errno.EPIPE)
        if isinstance(error, ConnectionResetError | BrokenPipeError):
            return True
        if isinstance(error, EOFError | ssl.SSLEOFError | ssl.SSLZeroReturnError):
            # A reset may have come between the two reads, which consumed the error. A peer that acknowledged a moment
            # ago was not cut off: a cut is noticed after seconds of silence.
            (silent_ms,) = struct.unpack_from("=I", info, _LAST_HEARD)
            return info[0] in _SAID_GOODBYE or (info[0] == _CLOSED and silent_ms < _JUST_NOW_MS)
        return False

    def _tcp_info(self) -> bytes:
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:
            info = b""
        return info.ljust(_TCP_INFO_BYTES, b"\0")

    def bytes_on_socket(self) -> tuple[int, int]:
        """Return bytes sent and received, including TLS; (0, 0) if the system does not tell."""
        sent, received = struct.unpack_from("=QQ", self._tcp_info(), _ACKNOWLEDGED)
        return sent, received

    def close_notify(self) -> None:
        """Send TLS close_notify, which tells an orderly end from a dead process."""
        with contextlib.suppress(OSError, ValueError):
            self._socket.unwrap()

    def close(self) -> None:
        """Close the socket."""
        drop(self._socket)
