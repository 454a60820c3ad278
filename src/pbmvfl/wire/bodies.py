"""What a party says first: which plan it follows, a nonce, and the rounds that it has checkpoints of."""

from __future__ import annotations

import struct
from typing import NamedTuple

from pbmvfl.crypto.key_exchange import NONCE_BYTES
from pbmvfl.errors import TruncatedMessage

HASH_BYTES = 32
_COUNT = struct.Struct("<H")
_ROUND = struct.Struct("<I")
#: A party keeps two checkpoints of a run; more than this is no list of them.
MOST_ROUNDS = 64


class Hello(NamedTuple):
    """The payload of HELLO."""

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
    """How long the payload is."""
    return HASH_BYTES + NONCE_BYTES + _COUNT.size + _ROUND.size * num_rounds
