"""What one party sends in a round: k-bit integers, or float32 for the mechanisms in clear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pbmvfl.crypto.packing import add_packed, pack, packed_bytes
from pbmvfl.crypto.ring import Ring
from pbmvfl.errors import NonFiniteMessage


class PayloadFormat(Protocol):
    def num_bytes(self, count: int) -> int:
        """Exactly how long the payload for `count` values is."""

    def encode(self, values: npt.NDArray[Any], mask: npt.NDArray[Any] | None = None) -> bytes:
        """The bytes that leave: with a mask, of values + mask in the ring."""

    def check(self, payload: bytes | memoryview) -> None:
        """Refuse a payload of the right length that no party can have sent."""

    def total(self, payloads: Sequence[bytes | memoryview], count: int) -> npt.NDArray[Any]:
        """The sum over the parties, in the order of their indices."""

    def each(self, payloads: Sequence[bytes | memoryview], count: int) -> npt.NDArray[Any]:
        """What each party sent, (M, count), for releases that stand alone. Behind masks it says nothing."""


class PackedIntegers:
    """Ring elements of k bits each. The sum is reduced into the ring, where it equals the sum of the integers."""

    def __init__(self, *, bits: int, ring: Ring) -> None:
        self.bits = bits
        self.ring = ring

    def num_bytes(self, count: int) -> int:
        return packed_bytes(count, self.bits)

    def encode(self, values: npt.NDArray[Any], mask: npt.NDArray[Any] | None = None) -> bytes:
        return pack(values, self.bits, mask)

    def check(self, payload: bytes | memoryview) -> None:
        del payload  # any k bits are an element of the ring

    def total(self, payloads: Sequence[bytes | memoryview], count: int) -> npt.NDArray[Any]:
        # A ring of at most 16 bits adds up in 16, whichever type its elements have.
        totals: npt.NDArray[Any] = np.zeros(count, dtype=np.uint16 if self.ring.bits <= 16 else np.uint32)
        for payload in payloads:
            add_packed(payload, self.bits, totals)
        return self.ring.reduce(totals)  # Protocol 0, step 4

    def each(self, payloads: Sequence[bytes | memoryview], count: int) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = np.zeros((len(payloads), count), dtype=np.uint16 if self.bits <= 16 else np.uint32)
        for row, payload in zip(values, payloads, strict=True):
            add_packed(payload, self.bits, row)
        return values


class Floats:
    """float32 in clear, for studies."""

    def num_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, values: npt.NDArray[Any], mask: npt.NDArray[Any] | None = None) -> bytes:
        assert mask is None, "masks are for integers; the plan refuses them for floats"
        return values.astype("<f4", copy=False).tobytes()

    def check(self, payload: bytes | memoryview) -> None:
        if not np.isfinite(np.frombuffer(payload, dtype="<f4")).all():
            raise NonFiniteMessage("the embedding that arrived holds NaN or infinity, which no party sends")

    def total(self, payloads: Sequence[bytes | memoryview], count: int) -> npt.NDArray[np.float32]:
        totals = np.zeros(count, dtype=np.float32)
        for payload in payloads:
            totals += np.frombuffer(payload, dtype="<f4")
        return totals

    def each(self, payloads: Sequence[bytes | memoryview], count: int) -> npt.NDArray[np.float32]:
        values = [np.frombuffer(payload, dtype="<f4", count=count) for payload in payloads]
        return np.array(values, dtype=np.float32).reshape(len(payloads), count)
