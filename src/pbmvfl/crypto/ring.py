"""Integers modulo 2^k: the ring in which sums are masked, their packing, and payloads of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pbmvfl._compiled import compiled
from pbmvfl.errors import NonFiniteMessage

# --- The ring Z/2^k in which parties' integers are masked and summed ---
# Over the integers a mask leaks at the edges: the largest possible y gives q away. In a ring a uniform mask makes y
# uniform whatever q is, and k = ceil(log2(b*M + 1)) bits hold every possible sum.

_Unsigned = TypeVar("_Unsigned", np.uint8, np.uint16, np.uint32)

#: Sums of more bits than this have no native type here.
LARGEST_BITS = 32


@dataclass(frozen=True)
class Ring:
    """Integers modulo 2^bits, held in the smallest native type, whose own wrap-around does most of the reduction."""

    bits: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= LARGEST_BITS:
            raise ValueError(f"bits={self.bits} must be in 1..{LARGEST_BITS}")

    @classmethod
    def for_sums_up_to(cls, largest: int) -> Ring:
        """Return the smallest ring in which 0..largest are all different."""
        return cls(largest.bit_length())

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16] | type[np.uint32]:
        if self.bits <= 8:
            return np.uint8
        return np.uint16 if self.bits <= 16 else np.uint32

    @property
    def itemsize(self) -> int:
        if self.bits <= 8:
            return 1
        return 2 if self.bits <= 16 else 4

    def reduce(self, values: npt.NDArray[_Unsigned]) -> npt.NDArray[_Unsigned]:
        """Reduce modulo 2^bits, in place."""
        if self.bits != 8 * values.itemsize:
            values &= values.dtype.type((1 << self.bits) - 1)
        return values


# --- k-bit integers one after the other, without gaps, for k up to 32 ---


def packed_bytes(count: int, bits: int) -> int:
    """Return the exact number of bytes that `count` values of `bits` bits take."""
    return (count * bits + 7) // 8


def pack(values: npt.NDArray[Any], bits: int) -> bytes:
    """Pack the low bits of every value without gaps, least significant bit first.

    Args:
        values: Unsigned integers, in any shape. Higher bits are cut off: that is the reduction modulo 2^bits.
        bits: Bits of each value, 1 to 32.

    Returns:
        `packed_bytes(values.size, bits)` bytes; unused bits of the last one are 0.
    """
    flat = values.reshape(-1)
    if bits == 8:
        return flat.astype(np.uint8, copy=False).tobytes()
    words = np.empty((flat.size * bits + 31) // 32, dtype="<u4")
    _pack(flat, bits, words)
    return words.view(np.uint8)[: packed_bytes(flat.size, bits)].tobytes()


def add_packed(payload: bytes | memoryview, bits: int, totals: npt.NDArray[Any]) -> None:
    """Add every packed value to its total, wrapping where the totals' own type does.

    Args:
        payload: What `pack` returned.
        bits: Bits of each value.
        totals: Sums, one for each value; changed in place.
    """
    source = np.frombuffer(payload, dtype=np.uint8)
    if bits == 8:
        np.add(totals, source, out=totals)
    else:
        _unpack_add(source, bits, totals)


@compiled
def _pack(values: Any, bits: Any, words: Any) -> None:
    """Collect low bits in a 64-bit register and write 32 of them whenever there are as many."""
    pending = np.uint64(0)
    held = np.uint64(0)
    width = np.uint64(bits)
    low = (np.uint64(1) << width) - np.uint64(1)
    half = np.uint64(32)
    position = 0
    for i in range(values.size):
        pending |= (np.uint64(values[i]) & low) << held
        held += width
        if held >= half:
            words[position] = np.uint32(pending & np.uint64(0xFFFFFFFF))
            pending >>= half
            held -= half
            position += 1
    if held > np.uint64(0):
        words[position] = np.uint32(pending & np.uint64(0xFFFFFFFF))


@compiled
def _unpack_add(packed: Any, bits: Any, totals: Any) -> None:
    """Add each packed `bits`-bit value to its total (wrapping in the totals' own type)."""
    pending = np.uint64(0)
    held = np.uint64(0)
    width = np.uint64(bits)
    low = (np.uint64(1) << width) - np.uint64(1)
    position = 0
    for i in range(totals.size):
        while held < width:
            pending |= np.uint64(packed[position]) << held
            held += np.uint64(8)
            position += 1
        totals[i] += pending & low
        pending >>= width
        held -= width


# --- What one party sends in a round: packed integers (`crypto.secure_sum`), or float32 for the mechanisms in clear ---


class PayloadFormat(Protocol):
    def num_bytes(self, count: int) -> int:
        """Return the exact length of the payload for `count` values."""

    def encode(self, values: npt.NDArray[Any]) -> bytes:
        """Return the bytes that leave a party. Values behind a secure sum are masked before."""

    def check(self, payload: bytes | memoryview) -> None:
        """Refuse a payload of the right length that no party can have sent."""

    def total(self, payloads: Sequence[bytes | memoryview], count: int) -> npt.NDArray[Any]:
        """Return the sum over the parties, in the order of their indices."""

    def each(self, payloads: Sequence[bytes | memoryview], count: int) -> npt.NDArray[Any]:
        """Return what each party sent, (M, count), for releases that stand alone. Masked values say nothing."""


class Floats:
    """Payload of float32 in clear, for studies."""

    def num_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, values: npt.NDArray[Any]) -> bytes:
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
