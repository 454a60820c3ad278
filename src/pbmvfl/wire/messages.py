"""Header of every message, the parser of messages, and the bodies of HELLO and LABELS.

    offset  bytes  field
    0       4      magic "PBMV"
    4       1      protocol version
    5       1      message kind
    6       2      sender: party index, or 65535 for the server
    8       8      run: chosen by the server, the same after a resume
    16      16     session: new at every start (zeros before it is agreed)
    32      4      round number; in NONCES the first round of the session
    36      4      payload length in bytes
    40      1      round kind (0 outside rounds)
    41      1      flags: 1 = the payload is a gradient
    42      2      zero

All integers are little-endian. The payload follows and its length must be exact.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pbmvfl.crypto.key_exchange import NONCE_BYTES
from pbmvfl.crypto.protocol_version import PROTOCOL_VERSION
from pbmvfl.errors import ProtocolError, TruncatedMessage, WrongVersion

_HEADER = struct.Struct("<4sBBH8s16sIIBBH")
_MAGIC = b"PBMV"
HEADER_BYTES = _HEADER.size
SERVER = 0xFFFF
NO_SESSION = bytes(16)
NO_RUN = bytes(8)
_CARRIES_GRADIENT = 1


class MessageKind(IntEnum):
    START = 8  #: server: plan hash; opens a session
    HELLO = 1  #: party: plan hash, nonce, and the rounds that it has checkpoints of
    NONCES = 2  #: server: plan hash and every party's nonce
    KEY = 3  #: party: signed session key
    KEYS = 4  #: server: every party's signed session key
    ROUND = 5  #: server: requests a round; carries the gradient of the one before
    EMBEDDING = 6  #: party: its masked embedding
    UPDATE = 7  #: server: the end of an epoch, with the last gradient where rounds have one; no answer
    STOP = 9  #: server: the run ends here before its plan does; no answer
    REFUSAL = 10  #: party: no, with a code and public words, instead of any answer
    LABELS = 11  #: server: every training row's class, before the first round, if the plan lets them go; no answer


class Message(NamedTuple):
    """Message between a party and the server. It is a tuple because one is made in every round."""

    kind: MessageKind
    sender: int
    run_id: bytes = NO_RUN
    session_id: bytes = NO_SESSION
    round_number: int = 0
    round_kind: int = 0
    carries_gradient: bool = False
    payload: bytes | memoryview = b""

    def to_bytes(self) -> bytes:
        header = _HEADER.pack(
            _MAGIC,
            PROTOCOL_VERSION,
            self.kind,
            self.sender,
            self.run_id,
            self.session_id,
            self.round_number,
            len(self.payload),
            self.round_kind,
            _CARRIES_GRADIENT if self.carries_gradient else 0,
            0,
        )
        return b"".join((header, self.payload))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Message:
        """Read a message, or refuse it. The payload is a view, not a copy."""
        if len(data) < HEADER_BYTES:
            raise TruncatedMessage(f"length={len(data)}: a message has at least {HEADER_BYTES} bytes")
        magic, version, kind, sender, run, session, number, length, round_kind, flags, zero = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise WrongVersion(f"magic={magic!r}: not a pbmvfl message (they begin with {_MAGIC!r})")
        if version != PROTOCOL_VERSION:
            raise WrongVersion(f"version={version}: this program speaks {PROTOCOL_VERSION}; update the older one")
        if len(data) != HEADER_BYTES + length:
            raise TruncatedMessage(f"length={len(data)}: the header announces {HEADER_BYTES + length} bytes")
        if kind not in _KINDS or flags not in (0, _CARRIES_GRADIENT) or zero:
            raise WrongVersion(f"kind={kind}, flags={flags}: unknown in protocol version {PROTOCOL_VERSION}")
        return cls(
            kind=MessageKind(kind),
            sender=sender,
            run_id=run,
            session_id=session,
            round_number=number,
            round_kind=round_kind,
            carries_gradient=bool(flags),
            payload=memoryview(data)[HEADER_BYTES:],
        )


_KINDS = frozenset(MessageKind)


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
