"""Private set intersection by openmined-psi: elliptic-curve Diffie-Hellman on P-256.

The label holder (PSI's client, key a) and a party (PSI's server, key b) each hash ids to points of the curve.

    setup      party -> label holder    b H(y) of every own id y, in random order
    request    label holder -> party    a H(x) of every own id x, in random order
    response   party -> label holder    b a H(x), in the request's order

The label holder takes a off again and looks whether b H(x) is in the setup: it multiplies by the inverse of a, and
searches a sorted array. The library's own search would copy the whole setup for every response. The setup is sent as it
is, point by point, not as a filter: so there are no false matches, at 33 bytes an id.

Lists go in chunks by places of a secret random order. Chunks by a hash of the id would let each side count the other's
ids in every bucket; these show nothing but how many ids there are. Chunks also keep messages short and let threads
help: the library releases the interpreter's lock, but two threads in one of its objects end the whole process, so every
thread has its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.errors import AlignmentError

#: A point of P-256, compressed.
POINT_BYTES = 33
#: Ids in one message: 264 KiB of points.
CHUNK = 8_192
WORKERS = 2
#: The number of points of P-256.
_CURVE_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def library() -> Any:
    """Import openmined-psi, or raise with how to install it."""
    try:
        import private_set_intersection.python as psi
    except ImportError as error:
        raise AlignmentError(
            'private alignment needs openmined-psi, which is not installed; pip install "pbmvfl[deploy]"'
        ) from error
    return psi


def num_chunks(count: int) -> int:
    return -(-count // CHUNK)


def chunk_size(count: int, chunk: int) -> int:
    """Return the number of ids in one chunk of a list."""
    return min(CHUNK, count - chunk * CHUNK)


def secret_order(count: int) -> npt.NDArray[np.int64]:
    """Return a secret random order. Two of its 64-bit keys collide with probability below count^2 / 2^65."""
    keys = np.empty(count, dtype=np.uint64)
    SystemEntropy().fill(keys)
    return np.argsort(keys, kind="stable").astype(np.int64)


def points_of(data: bytes, count: int) -> list[bytes]:
    """Split a message into its points, of which it must have exactly `count`."""
    if len(data) != count * POINT_BYTES:
        raise AlignmentError(f"a message has {len(data)} bytes of points; permitted: {count * POINT_BYTES}")
    return [data[start : start + POINT_BYTES] for start in range(0, len(data), POINT_BYTES)]


class Index:
    """Sorted byte strings of one length, and the place of each in the list that they came in."""

    def __init__(self, values: bytes, length: int) -> None:
        self._kind = np.dtype(f"S{length}")
        found = np.frombuffer(values, self._kind)
        self._places = np.argsort(found, kind="stable")
        self._sorted = found[self._places]

    def places_of(self, values: bytes) -> npt.NDArray[np.int64]:
        """Return the place of each of these strings; -1 where it is not in the list."""
        wanted = np.frombuffer(values, self._kind)
        at = np.searchsorted(self._sorted, wanted).clip(max=len(self._sorted) - 1)
        return np.where(self._sorted[at] == wanted, self._places[at], -1)


def _multiplied(psi: Any, server: Any, points: Sequence[bytes], what: str) -> bytes:
    """Return the key of a PSI server times each point, in the same order."""
    request = psi.Request(reveal_intersection=True, encrypted_elements=points)
    try:
        return b"".join(server.ProcessRequest(request).encrypted_elements)
    except RuntimeError:
        raise AlignmentError(f"a {what} has a point that is not on the curve") from None


def _new_key(kind: Any) -> bytes:
    key: bytes = kind.CreateWithNewKey(True).GetPrivateKeyBytes()
    return key


class _Side:
    """One side's key, which is forgotten with this object, and the threads that multiply by it."""

    _kind: str

    def __init__(self, *, workers: int = WORKERS) -> None:
        self._psi, self._workers = library(), workers
        self._key = _new_key(getattr(self._psi, self._kind))
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="psi", initializer=self._prepare)

    def _prepare(self) -> None:
        """Make the library's object of this thread."""
        self._own.object = getattr(self._psi, self._kind).CreateFromKey(self._key, True)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class PsiServer(_Side):
    """Party's side."""

    _kind = "server"

    def setup(self, ids: Callable[[], Sequence[str]]) -> Future[bytes]:
        """Return b H(y) of these ids, sorted, so that their order reveals nothing."""
        return self._pool.submit(self._setup, ids)

    def _setup(self, ids: Callable[[], Sequence[str]]) -> bytes:
        raw, named = self._psi.DataStructure.RAW, list(ids())
        # The rate of false matches applies to filters, which are not used.
        made = self._own.object.CreateSetupMessage(1e-9, max(1, len(named)), named, raw)
        return b"".join(made.raw.encrypted_elements)

    def response(self, points: Sequence[bytes]) -> bytes:
        """Return b times each point, in the same order."""
        share = -(-len(points) // self._workers) or 1
        parts = [points[start : start + share] for start in range(0, len(points), share)]
        return b"".join(self._pool.map(self._response, parts))

    def _response(self, points: Sequence[bytes]) -> bytes:
        return _multiplied(self._psi, self._own.object, points, "request")


class PsiClient(_Side):
    """Label holder's side. One request serves all parties: each answers it under its own key."""

    _kind = "client"

    def _prepare(self) -> None:
        super()._prepare()
        back = pow(int.from_bytes(self._key, "big"), -1, _CURVE_ORDER)  # takes the key off again
        self._own.back = self._psi.server.CreateFromKey(back.to_bytes(len(self._key), "big"), True)

    def request(self, ids: Callable[[], Sequence[str]]) -> Future[bytes]:
        """Return a H(x) of these ids, in their order."""
        return self._pool.submit(self._request, ids)

    def _request(self, ids: Callable[[], Sequence[str]]) -> bytes:
        return b"".join(self._own.object.CreateRequest(list(ids())).encrypted_elements)

    def matches(self, setup: Index, points: Sequence[bytes]) -> Future[npt.NDArray[np.int64]]:
        """Return the places in a response whose ids the party has."""
        return self._pool.submit(self._matches, setup, points)

    def _matches(self, setup: Index, points: Sequence[bytes]) -> npt.NDArray[np.int64]:
        back = _multiplied(self._psi, self._own.back, points, "response")
        return np.flatnonzero(setup.places_of(_across(back)) >= 0)


def whole_setup(chunks: Iterable[bytes]) -> Index:
    """Join the chunks of a party's setup."""
    return Index(_across(b"".join(chunks)), POINT_BYTES - 1)


def _across(points: bytes) -> bytes:
    """Return each point's coordinate x, which it shares with its negative alone."""
    return np.frombuffer(points, np.uint8).reshape(-1, POINT_BYTES)[:, 1:].tobytes()
