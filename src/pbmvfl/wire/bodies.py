"""Bodies of messages: a party's hello, and training labels."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pbmvfl.crypto.key_exchange import NONCE_BYTES
from pbmvfl.errors import ProtocolError, TruncatedMessage

# --- What a party says first: which plan it follows, a nonce, and the rounds that it has checkpoints of ---


HASH_BYTES = 32
_COUNT = struct.Struct("<H")
_ROUND = struct.Struct("<I")
#: A party keeps two checkpoints of a run; more than this is no list of them.
MOST_ROUNDS = 64


class Hello(NamedTuple):
    """Payload of HELLO."""

    plan_hash: bytes
    nonce: bytes
    rounds: tuple[int, ...]

    def to_bytes(self) -> bytes:
        rounds = self.rounds[-MOST_ROUNDS:]
        return self.plan_hash + self.nonce + _COUNT.pack(len(rounds)) + b"".join(map(_ROUND.pack, rounds))

    @classmethod
    def from_bytes(cls, payload: bytes | memoryview) -> Hello:
        raw = bytes(payload)
        fixed = hello_bytes(0)
        if len(raw) < fixed:
            raise TruncatedMessage(f"hello length={len(raw)}: it has at least {fixed} bytes")
        (count,) = _COUNT.unpack_from(raw, HASH_BYTES + NONCE_BYTES)
        if count > MOST_ROUNDS or len(raw) != hello_bytes(count):
            raise TruncatedMessage(f"hello length={len(raw)}: {count} rounds make {hello_bytes(count)}")
        rounds = tuple(number for (number,) in _ROUND.iter_unpack(raw[fixed:]))
        return cls(raw[:HASH_BYTES], raw[HASH_BYTES : HASH_BYTES + NONCE_BYTES], rounds)


def hello_bytes(num_rounds: int) -> int:
    """Return the length of a HELLO payload."""
    return HASH_BYTES + NONCE_BYTES + _COUNT.size + _ROUND.size * num_rounds


# ---
# Labels of the training rows as they travel: one number a row, in the order of the rows, as few bytes as all fit.


def _kind(num_classes: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype("u1") if num_classes <= 1 << 8 else np.dtype("<u2") if num_classes <= 1 << 16 else np.dtype("<u4")


def label_bytes(num_samples: int, num_classes: int) -> int:
    """Return the length of a LABELS payload."""
    return num_samples * _kind(num_classes).itemsize


def encode_labels(labels: npt.NDArray[np.int64], num_classes: int) -> bytes:
    return labels.astype(_kind(num_classes)).tobytes()


def decode_labels(payload: bytes | memoryview, *, num_samples: int, num_classes: int) -> npt.NDArray[np.int64]:
    """Return the class, 0..num_classes-1, of each row.

    Raises:
        TruncatedMessage: The payload has the wrong length.
        ProtocolError: A label is no class of the plan.
    """
    expected = label_bytes(num_samples, num_classes)
    if len(payload) != expected:
        raise TruncatedMessage(f"labels length={len(payload)}: {num_samples} rows make {expected}")
    labels = np.frombuffer(payload, dtype=_kind(num_classes)).astype(np.int64)
    if labels.size and int(labels.max()) >= num_classes:
        raise ProtocolError(f"label={int(labels.max())} must be in 0..{num_classes - 1}, the plan's classes")
    return labels
