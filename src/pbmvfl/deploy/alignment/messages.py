"""The messages of an alignment, in one exact form, and the key under which the order travels.

question                     body                                          answer
BEGIN                        name, number of ids, their form, key share    number of ids, width, form, key share, kinds
SETUP     chunk              -                                             points
REQUEST   chunk              points                                        points
ORDER     part               sealed: a keyed digest of each common id      -
AGREE                        sealed: how many, the alignment's key         keyed digest of the ids in order
KEEP                         -                                             -

An answer begins with 0, or is a refusal: 1 and a public text. The longest message has 1 MiB and a little.

The order could be sent with a key beside it; then a reader of the message could test guessed ids. So both sides first
agree on a key (X25519, shares in BEGIN and its answer), which never travels. The link has authenticated the other side.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pbmvfl.deploy.alignment.row_ids import KEY_BYTES, IdForm
from pbmvfl.deploy.site.folder import NAME
from pbmvfl.errors import AlignmentError
from pbmvfl.plan.shapes import KINDS

VERSION = 2
#: Length of an id's keyed digest. Among 10 million ids, two share one with probability below 2^-80.
TAG_BYTES = 16
#: Digests in one message.
ORDER_CHUNK = 65_536
SHARE_BYTES = 32
#: Longest refusal in bytes: enough for a sentence, too little to carry anything else.
LONGEST_WORDS = 400
#: Largest number of ids, and of columns.
LARGEST_COUNT, LARGEST_WIDTH = 1 << 31, 1 << 20

_HEAD = struct.Struct("<BBI")  # version, kind, number of the chunk
_BEGIN = struct.Struct(f"<QB{SHARE_BYTES}s")
_STATE = struct.Struct(f"<QIB{SHARE_BYTES}s")
_AGREE = struct.Struct(f"<Q{KEY_BYTES}s")


class Kind(IntEnum):
    """Kind of a question. The numbers travel, and keep their meaning."""

    BEGIN = 1
    SETUP = 2
    REQUEST = 3
    ORDER = 4
    AGREE = 5
    KEEP = 6


@dataclass(frozen=True)
class Question:
    """One question of the label holder."""

    kind: Kind
    number: int = 0
    body: bytes = b""

    @property
    def head(self) -> bytes:
        return _HEAD.pack(VERSION, self.kind, self.number)

    def to_bytes(self) -> bytes:
        return self.head + self.body

    @classmethod
    def from_bytes(cls, data: bytes) -> Question:
        if len(data) < _HEAD.size:
            raise AlignmentError(f"a question has {len(data)} bytes; permitted: at least {_HEAD.size}")
        version, kind, number = _HEAD.unpack_from(data)
        if version != VERSION:
            raise AlignmentError(f"version={version}: this party aligns rows by version {VERSION}")
        if kind not in tuple(Kind):
            raise AlignmentError(f"kind={kind} is no question of an alignment")
        return cls(Kind(kind), number, data[_HEAD.size :])


@dataclass(frozen=True, kw_only=True)
class Begin:
    """The label holder's opening facts."""

    name: str
    count: int
    form: IdForm
    share: bytes

    def to_body(self) -> bytes:
        return _BEGIN.pack(self.count, self.form, self.share) + self.name.encode()

    @classmethod
    def from_body(cls, body: bytes) -> Begin:
        if len(body) < _BEGIN.size:
            raise AlignmentError(f"BEGIN has {len(body)} bytes; permitted: at least {_BEGIN.size}")
        count, form, share = _BEGIN.unpack_from(body)
        name = body[_BEGIN.size :].decode("ascii", errors="replace")
        if not NAME.fullmatch(name):
            raise AlignmentError("BEGIN names no alignment: 1 to 60 small letters, digits and hyphens")
        if not 1 <= count <= LARGEST_COUNT or form not in tuple(IdForm):
            raise AlignmentError(f"BEGIN has count={count}, form={form}; permitted: 1..{LARGEST_COUNT}, 1..3")
        return cls(name=name, count=count, form=IdForm(form), share=share)


@dataclass(frozen=True, kw_only=True)
class PartyFacts:
    """A party's opening facts. All of them are public in a federation."""

    count: int
    form: IdForm
    share: bytes
    #: For each value that a row becomes the kind of its knots, a letter by public ranges alone (`plan.shapes`).
    kinds: str

    def to_body(self) -> bytes:
        return _STATE.pack(self.count, len(self.kinds), self.form, self.share) + self.kinds.encode()

    @classmethod
    def from_body(cls, body: bytes) -> PartyFacts:
        if len(body) < _STATE.size:
            raise AlignmentError(f"it answered BEGIN with {len(body)} bytes; permitted: at least {_STATE.size}")
        count, width, form, share = _STATE.unpack_from(body)
        if not 1 <= count <= LARGEST_COUNT or not 1 <= width <= LARGEST_WIDTH or form not in tuple(IdForm):
            raise AlignmentError(
                f"it says count={count}, width={width}, form={form}; permitted: 1..{LARGEST_COUNT}, "
                f"1..{LARGEST_WIDTH}, 1..3"
            )
        kinds = body[_STATE.size :].decode("ascii", errors="replace")
        if len(kinds) != width:
            raise AlignmentError(f"it says width={width}, and the kinds of {len(kinds)} columns; permitted: of {width}")
        if kinds.strip(KINDS):
            raise AlignmentError(f"it says that its columns are of kinds other than the letters {', '.join(KINDS)}")
        return cls(count=count, form=IdForm(form), share=share, kinds=kinds)


def agree_body(count: int, key: bytes) -> bytes:
    return _AGREE.pack(count, key)


def read_agree(body: bytes) -> tuple[int, bytes]:
    """Return the number of rows in the order, and the alignment's key."""
    if len(body) != _AGREE.size:
        raise AlignmentError(f"AGREE has {len(body)} bytes; permitted: {_AGREE.size}")
    count, key = _AGREE.unpack(body)
    return count, key


# --- answers ---


def accepted(body: bytes = b"") -> bytes:
    return b"\0" + body


def refused(words: str) -> bytes:
    return b"\1" + words.encode(errors="replace")[:LONGEST_WORDS]


def read_answer(answer: bytes, party: str) -> bytes:
    """Return an answer's body.

    Raises:
        AlignmentError: If it is a refusal, with its text made printable: its author is not trusted.
    """
    if answer[:1] == b"\0":
        return answer[1:]
    if answer[:1] == b"\1" and len(answer) <= 1 + LONGEST_WORDS:
        text = answer[1:].decode(errors="replace")
        raise AlignmentError(f"party={party} refused: " + "".join(c if c.isprintable() else "?" for c in text))
    raise AlignmentError(f"party={party} answered with {len(answer)} bytes that are no answer; is it another version?")


# --- shared key ---


class OrderKey:
    """One side's key share, which becomes the shared key."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()

    @property
    def share(self) -> bytes:
        return self._private.public_key().public_bytes_raw()

    def with_share(self, other: bytes, *, label_share: bytes, party_share: bytes, party: str) -> SharedKey:
        try:
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError:  # a share of low order would make the key public
            raise AlignmentError("the key share is none") from None
        info = b"pbmvfl alignment 1\0" + label_share + party_share + party.encode()
        made = HKDF(algorithm=hashes.SHA256(), length=2 * KEY_BYTES, salt=None, info=info).derive(secret)
        return SharedKey(made[:KEY_BYTES], made[KEY_BYTES:])


class SharedKey:
    """Key that encrypts the order and digests its ids; fresh for every party and alignment."""

    def __init__(self, sealing: bytes, tagging: bytes) -> None:
        self._cipher, self._tagging = ChaCha20Poly1305(sealing), tagging

    def tag(self, id: str) -> bytes:
        return hmac.digest(self._tagging, id.encode(), "sha256")[:TAG_BYTES]

    def seal(self, question: Question) -> Question:
        """Return the question with its body encrypted. No head is used twice, so it is the nonce."""
        return Question(question.kind, question.number, self._cipher.encrypt(_nonce(question), question.body, None))

    def open(self, question: Question) -> bytes:
        try:
            return self._cipher.decrypt(_nonce(question), question.body, None)
        except InvalidTag:
            raise AlignmentError(f"{question.kind.name} was not sealed for this alignment") from None


def _nonce(question: Question) -> bytes:
    return question.head.ljust(12, b"\0")
