"""k-bit integers one after the other, without gaps, for k up to 32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl._compiled import compiled


def packed_bytes(count: int, bits: int) -> int:
    """Exactly how many bytes `count` values of `bits` bits take."""
    return (count * bits + 7) // 8


def pack(values: npt.NDArray[Any], bits: int, mask: npt.NDArray[Any] | None = None) -> bytes:
    """The low `bits` bits of every value, or of every value plus its mask, least significant bit first.

    Cutting off the higher bits is the reduction modulo 2^bits, so adding a mask here is adding it in the ring.
    """
    # Protocol 0, step 3: y_m.
    flat = values.reshape(-1)
    if bits == 8:
        return (flat if mask is None else flat + mask).astype(np.uint8).tobytes()
    words = np.empty((flat.size * bits + 31) // 32, dtype="<u4")
    _pack(flat, np.zeros(flat.size, dtype=np.uint8) if mask is None else mask, bits, words)
    return words.view(np.uint8)[: packed_bytes(flat.size, bits)].tobytes()


def add_packed(payload: bytes | memoryview, bits: int, totals: npt.NDArray[Any]) -> None:
    """Add every packed value to its total, wrapping where the totals' own type does."""
    source = np.frombuffer(payload, dtype=np.uint8)
    if bits == 8:
        np.add(totals, source, out=totals)
    else:
        _unpack_add(source, bits, totals)


@compiled
def _pack(values: Any, mask: Any, bits: Any, words: Any) -> None:
    """Add, cut off, and collect bits in a 64-bit register; write 32 of them whenever they are there."""
    pending = np.uint64(0)
    held = np.uint64(0)
    width = np.uint64(bits)
    low = (np.uint64(1) << width) - np.uint64(1)
    half = np.uint64(32)
    position = 0
    for i in range(values.size):
        pending |= ((np.uint64(values[i]) + np.uint64(mask[i])) & low) << held
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
