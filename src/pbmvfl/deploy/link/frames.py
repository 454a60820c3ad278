"""Frames on a stream of bytes: four bytes of length, then so many bytes.

What a stranger sends is not believed: a length above the limit is refused before anything is kept for it, and memory
grows with the bytes that have come, not with those that are announced.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import time
from collections.abc import Iterator

from pbmvfl.errors import LinkError

_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size
#: The longest frame: setup messages of a private alignment have some megabytes.
LIMIT = 64 << 20
_CHUNK = 1 << 16


def framed(body: bytes, *, limit: int = LIMIT) -> bytes:
    """The bytes that travel."""
    if len(body) > limit:
        raise LinkError(f"a frame of {len(body):,} bytes; permitted: at most {limit:,}; send less at a time")
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Bytes that have come and are not taken yet. It outlives timeouts: what came of a frame stays."""

    def __init__(self, *, limit: int = LIMIT) -> None:
        self._limit = limit
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def take(self) -> bytes | None:
        """The next whole frame; None while it is not there. A length above the limit raises `LinkError`."""
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
    """The next frame of a blocking socket, by `time.monotonic() == deadline` at the latest.

    Raises `TimeoutError` when the time is over, and can then be called again; `EOFError` when the other end has closed;
    another `OSError` when the connection broke; `LinkError` for a frame that is too long.
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
    """A whole frame on a blocking socket. After a `TimeoutError` part of it may have left: close the connection."""
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
    """The system's own "timed out" means that the other end is out of reach, not that the deadline has passed."""
    try:
        yield
    except TimeoutError as error:
        if error.errno == errno.ETIMEDOUT:
            raise ConnectionAbortedError(error.errno, "the other end is out of reach") from error
        raise
