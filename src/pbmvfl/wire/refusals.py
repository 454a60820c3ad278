"""Refusals of a party: a code, and a text that is fit to be public."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from pbmvfl.errors import (
    BudgetExceeded,
    CheckpointError,
    LedgerError,
    PolicyError,
    ProtocolError,
    TruncatedMessage,
    WriteError,
    WrongPlan,
)

_CODE = struct.Struct("<H")
#: In bytes. Enough for a sentence, too little to carry anything else.
LONGEST_WORDS = 400


class RefusalCode(IntEnum):
    """Reason of a refusal. The numbers travel, and keep their meaning."""

    MESSAGE = 1  #: the message does not fit; the words say how
    PLAN = 2  #: the party follows another plan; the words name both hashes
    POLICY = 3  #: the party's owner does not accept the plan
    BUDGET = 4  #: a limit of the party's owner would be crossed
    LEDGER = 5  #: the party's ledger cannot be charged
    FAULT = 6  #: something failed at the party; its log says what


_WORDS = {
    RefusalCode.POLICY: "its owner's policy does not accept the plan",
    RefusalCode.BUDGET: "a limit that its owner set would be crossed; nothing was sent",
    RefusalCode.LEDGER: "its ledger cannot be charged; its owner's log says why",
    RefusalCode.FAULT: "something failed at this party; its owner's log says what",
}

_NOT_WRITTEN = "a file cannot be written there, as on a full disk: its owner's log says which; make room, then resume"
_NO_CHECKPOINT = "a checkpoint there cannot be used: its owner's log says which; restore a copy, then resume"


@dataclass(frozen=True)
class Refusal:
    """Payload that travels instead of an answer."""

    code: RefusalCode
    words: str

    @classmethod
    def of(cls, error: Exception) -> Refusal:
        """Return the public part of an error. Texts of protocol errors speak of the message and the plan alone."""
        match error:
            case WrongPlan():
                return cls(RefusalCode.PLAN, str(error))
            case ProtocolError():
                return cls(RefusalCode.MESSAGE, str(error))
            case BudgetExceeded():
                code = RefusalCode.BUDGET
            case LedgerError():
                code = RefusalCode.LEDGER
            case PolicyError():
                code = RefusalCode.POLICY
            case WriteError():  # whether a disk is full does not depend on what is in a column
                return cls(RefusalCode.FAULT, _NOT_WRITTEN)
            case CheckpointError():
                return cls(RefusalCode.FAULT, _NO_CHECKPOINT)
            case _:
                code = RefusalCode.FAULT
        return cls(code, _WORDS[code])

    def to_payload(self) -> bytes:
        return _CODE.pack(self.code) + self.words.encode()[:LONGEST_WORDS]

    @classmethod
    def from_payload(cls, payload: bytes | memoryview) -> Refusal:
        """Decode a refusal and make its text fit to be printed: its sender is not trusted."""
        raw = bytes(payload)
        if not _CODE.size <= len(raw) <= _CODE.size + LONGEST_WORDS:
            raise TruncatedMessage(f"refusal length={len(raw)}: at most {_CODE.size + LONGEST_WORDS} bytes")
        (number,) = _CODE.unpack_from(raw)
        if number not in tuple(RefusalCode):
            raise TruncatedMessage(f"refusal code={number} is not one of {', '.join(map(str, map(int, RefusalCode)))}")
        text = raw[_CODE.size :].decode(errors="replace")
        return cls(RefusalCode(number), "".join(c if c.isprintable() else "?" for c in text))
