"""Released symbols of the training rows as everybody learns them: party after party, packed, without gaps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from pbmvfl.crypto.packing import add_packed, pack, packed_bytes
from pbmvfl.errors import ProtocolError, TruncatedMessage


def _bits(num_symbols: int) -> int:
    return (num_symbols - 1).bit_length()


def published_bytes(parties: int, num_samples: int, num_symbols: int) -> int:
    """How long the payload is."""
    return packed_bytes(parties * num_samples, _bits(num_symbols))


def encode_symbols(sent: Mapping[int, npt.NDArray[np.int64]], num_symbols: int) -> bytes:
    """The symbols of parties, in the order of their numbers."""
    return pack(np.concatenate([sent[party] for party in sorted(sent)]).astype(np.uint32), _bits(num_symbols))


def decode_symbols(
    payload: bytes | memoryview, *, parties: tuple[int, ...], num_samples: int, num_symbols: int
) -> dict[int, npt.NDArray[np.int64]]:
    """A symbol of 0..num_symbols-1 for each party and row, or an error."""
    expected = published_bytes(len(parties), num_samples, num_symbols)
    if len(payload) != expected:
        raise TruncatedMessage(
            f"published length={len(payload)}: {num_samples} rows of {len(parties)} parties make {expected}"
        )
    found = np.zeros(len(parties) * num_samples, dtype=np.uint32)
    add_packed(payload, _bits(num_symbols), found)
    if found.size and int(found.max()) >= num_symbols:
        raise ProtocolError(f"symbol={int(found.max())} must be in 0..{num_symbols - 1}, the plan's symbols")
    return dict(zip(parties, found.astype(np.int64).reshape(len(parties), num_samples), strict=True))
