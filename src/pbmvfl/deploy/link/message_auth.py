"""Authentication of every message between a party and the server: sender, job and order, whatever the transport.

Each process draws one X25519 key. The server's pinned identity signs its key (CHALLENGE), the party's pinned identity
signs both (JOIN); the two share a secret, from which one key for each direction is derived. A question has a number, a
channel, a body and a MAC; its answer has the same number. The party answers each number once: a repeated question gets
the same bytes again, and any other frame whose number is not the next one is refused.

Nothing is encrypted here, on purpose: TLS does that, and the content must stay readable for the tests of what leaves a
party.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pbmvfl.crypto.key_exchange import KEY_BYTES, SIGNATURE_BYTES, Identity
from pbmvfl.crypto.protocol_version import PROTOCOL_VERSION
from pbmvfl.deploy.link.interface import Channel, Handler
from pbmvfl.errors import LinkError

_CHALLENGE_LABEL = b"pbmvfl link challenge\0"
_JOIN_LABEL = b"pbmvfl link join\0"
_KEY_LABEL = b"pbmvfl link key\0"
_DOWN, _UP = b"down", b"up"
_CONTEXT_BYTES = 32
_NONCE_BYTES = 16
MAC_BYTES = 16
#: Protocol version, digest of the context, nonce, server's key.
_CHALLENGE = struct.Struct(f">H{_CONTEXT_BYTES}s{_NONCE_BYTES}s{KEY_BYTES}s")
#: Protocol version, digest of the context, number of the last question that was answered, party's key.
_JOIN = struct.Struct(f">H{_CONTEXT_BYTES}sQ{KEY_BYTES}s")
_HEAD = struct.Struct(">QB")
Keyed = hashlib.blake2b
#: Bytes that authentication adds to a body.
OVERHEAD = _HEAD.size + MAC_BYTES
CHALLENGE_BYTES = _CHALLENGE.size + SIGNATURE_BYTES
JOIN_BYTES = _JOIN.size + SIGNATURE_BYTES
#: Largest number of unanswered questions to one party; each timed out at the server, and is still the party's next.
MOST_UNANSWERED = 4


class ProcessReplaced(LinkError):
    """The peer has the right identity but is another process, without the state of this session."""


class OtherJob(LinkError):
    """The peer has the right identity but is in another job; an earlier one may still be ending there."""


# --- the server's side ---


class ServerMessageAuth:
    """Server's side of message authentication towards all parties; belongs to one thread."""

    def __init__(self, identity: Identity, pins: Mapping[str, bytes], context: bytes) -> None:
        """Draw the key of this process.

        Args:
            identity: The server's own identity.
            pins: Pinned public identity of each party.
            context: Job and federation that all messages are bound to.
        """
        self._identity = identity
        self._pins = dict(pins)
        self._context = hashlib.sha256(context).digest()
        self._private = X25519PrivateKey.generate()
        self._channels: dict[str, PartyChannel] = {}

    def challenge(self) -> bytes:
        """Return a fresh signed challenge; its nonce prevents the reuse of a JOIN."""
        public = self._private.public_key().public_bytes_raw()
        said = _CHALLENGE.pack(PROTOCOL_VERSION, self._context, os.urandom(_NONCE_BYTES), public)
        return said + self._identity.sign(_CHALLENGE_LABEL + said)

    def admit(self, name: str, challenge: bytes, join: bytes) -> Admission:
        """Verify the JOIN of the party of this name.

        Raises:
            LinkError: If it is not that party's, or is for another job (`OtherJob`) or of another process of that party
                (`ProcessReplaced`).
        """
        where = f"party={name}"
        if name not in self._pins:
            raise LinkError(f"{where}: it is not of this federation, which has {', '.join(self._pins)}")
        if len(join) != JOIN_BYTES:
            raise LinkError(f"{where}: its join has {len(join)} bytes; permitted: {JOIN_BYTES}")
        said, signature = join[: _JOIN.size], join[_JOIN.size :]
        version, context, last, public = _JOIN.unpack(said)
        _verify(self._pins[name], signature, _joined(name, challenge, said), where)
        _same_version_and_context(version, context, self._context, where)
        known = self._channels.get(name)
        if known is None:
            own = self._private.public_key().public_bytes_raw()
            agreed = _agreed(name, self._context, server=own, party=public)
            known = self._channels[name] = PartyChannel(name, public, _keys(self._private, public, agreed, where))
        elif known.public != public:
            raise ProcessReplaced(f"{where}: its process was replaced by another one")
        return Admission(channel=known, last=last)


@dataclass(frozen=True)
class Admission:
    """Authenticated party, and the number of the last question that it answered."""

    channel: PartyChannel
    last: int


@dataclass(frozen=True)
class AuthenticatedAnswer:
    """Answer, and the number of its question."""

    number: int
    body: bytes


class PartyChannel:
    """Numbered questions to one party; belongs to one thread at a time."""

    def __init__(self, name: str, public: bytes, keys: _Keys) -> None:
        self.name = name
        self.public = public
        self._keys = keys
        self._next = 1
        #: Frames without an answer, by number.
        self._unanswered: dict[int, bytes] = {}

    @property
    def asked(self) -> int:
        """Number of questions so far."""
        return self._next - 1

    def question(self, channel: Channel, body: bytes) -> tuple[int, bytes]:
        """Return the number and frame of a question; one equal to the last unanswered question is that question.

        Raises:
            LinkError: If `MOST_UNANSWERED` questions have no answer.
        """
        last = self._unanswered.get(self._next - 1)
        if last is not None and last[_HEAD.size - 1] == channel and last[_HEAD.size : -MAC_BYTES] == body:
            return self._next - 1, last
        if len(self._unanswered) >= MOST_UNANSWERED:
            raise LinkError(f"party={self.name}: {MOST_UNANSWERED} questions have no answer; it is asked nothing more")
        number, self._next = self._next, self._next + 1
        self._unanswered[number] = frame = _authenticated(self._keys.down, number, channel, body)
        return number, frame

    def again(self, last: int) -> list[bytes]:
        """Return the frames to send on a new connection to a party whose last answered question was `last`.

        Raises:
            LinkError: If `last` is impossible.
        """
        first = min(self._unanswered, default=self._next)
        if not first - 1 <= last < self._next:
            raise LinkError(f"party={self.name}: it says that it answered question {last}; possible: {first - 1} to "
                            f"{self._next - 1}")  # fmt: skip
        return [frame for number, frame in self._unanswered.items() if number >= last]

    def answer(self, frame: bytes) -> AuthenticatedAnswer | None:
        """Verify a party's answer; return None if that answer was received before.

        Raises:
            LinkError: If the frame is not the party's, or answers a question that was not asked.
        """
        where = f"party={self.name}"
        number, channel, body = _verified(self._keys.up, frame, where)
        if number >= self._next:
            raise LinkError(f"{where}: it answers question {number}, which was not asked")
        asked = self._unanswered.get(number)
        if asked is None:
            return None
        if asked[_HEAD.size - 1] != channel:
            raise LinkError(f"{where}: it answers question {number} on channel {channel}, where it was not asked")
        for older in [each for each in self._unanswered if each <= number]:  # answers come in order
            del self._unanswered[older]
        return AuthenticatedAnswer(number, body)


# --- the party's side ---


class PartyMessageAuth:
    """Party's side of message authentication; belongs to one thread at a time.

    It outlives connections: a process has one for each job.
    """

    def __init__(self, identity: Identity, server_pin: bytes, name: str, context: bytes) -> None:
        """Draw the key of this process.

        Args:
            identity: The party's own identity.
            server_pin: Pinned public identity of the server.
            name: Name of the party.
            context: Job and federation that all messages are bound to.
        """
        self._identity = identity
        self._server_pin = server_pin
        self._name = name
        self._context = hashlib.sha256(context).digest()
        self._private = X25519PrivateKey.generate()
        self._server_public: bytes | None = None
        self._keys: _Keys | None = None
        #: The last question's number and MAC, and the frame of its answer.
        self._last = 0
        self._last_mac = b""
        self._last_answer = b""

    def join(self, challenge: bytes) -> bytes:
        """Return the signed JOIN for a challenge of the pinned server in the same job.

        Raises:
            LinkError: If the challenge is not the pinned server's, or is for another job (`OtherJob`) or of another
                process of the server (`ProcessReplaced`).
        """
        where = "server"
        if len(challenge) != CHALLENGE_BYTES:
            raise LinkError(f"{where}: its challenge has {len(challenge)} bytes; permitted: {CHALLENGE_BYTES}")
        shown, signature = challenge[: _CHALLENGE.size], challenge[_CHALLENGE.size :]
        version, context, _, server_public = _CHALLENGE.unpack(shown)
        _verify(self._server_pin, signature, _CHALLENGE_LABEL + shown, where)
        _same_version_and_context(version, context, self._context, where)
        public = self._private.public_key().public_bytes_raw()
        if self._keys is None:
            agreed = _agreed(self._name, self._context, server=server_public, party=public)
            self._keys = _keys(self._private, server_public, agreed, where)
            self._server_public = server_public
        elif server_public != self._server_public:
            raise ProcessReplaced(f"{where}: its process was replaced by another one, which knows nothing of this job")
        said = _JOIN.pack(PROTOCOL_VERSION, self._context, self._last, public)
        return said + self._identity.sign(_joined(self._name, challenge, said))

    def respond(self, frame: bytes, handle: Handler) -> tuple[Channel, bytes]:
        """Return the channel of an authenticated question, and the authenticated answer.

        The next question is handled; the last question again gets the bytes of its answer again.

        Raises:
            LinkError: If the frame is anything else. It then has no effect.
        """
        where = "server"
        if self._keys is None:
            raise LinkError(f"{where}: it asks before the two know each other")
        number, code, body = _verified(self._keys.down, frame, where)
        try:
            channel = Channel(code)
        except ValueError:
            raise LinkError(f"{where}: channel {code} is not known") from None
        mac = frame[-MAC_BYTES:]
        if number == self._last and mac == self._last_mac:
            return channel, self._last_answer
        if number != self._last + 1:
            raise LinkError(f"{where}: question {number} was asked; permitted: {self._last + 1}, or the same again")
        answer = _authenticated(self._keys.up, number, channel, handle(channel, body))
        self._last, self._last_mac, self._last_answer = number, mac, answer
        return channel, answer


# --- what both sides share ---


@dataclass(frozen=True)
class _Keys:
    """One key for each direction, as a keyed hash without input."""

    down: Keyed
    up: Keyed


def _agreed(name: str, context: bytes, *, server: bytes, party: bytes) -> bytes:
    """Return the statement that keys are bound to.

    Nonces are not part of it: a new connection between the same processes keeps the keys, so that an answer can be sent
    again as it was.
    """
    return struct.pack(">H", PROTOCOL_VERSION) + context + server + party + name.encode()


def _keys(private: X25519PrivateKey, public: bytes, agreed: bytes, where: str) -> _Keys:
    try:
        secret = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise LinkError(f"{where}: its key is a point of low order") from None
    salt = hashlib.sha256(_KEY_LABEL + agreed).digest()

    def derived(direction: bytes) -> Keyed:
        key = HKDF(algorithm=hashes.SHA256(), length=32, salt=salt, info=_KEY_LABEL + direction).derive(secret)
        return hashlib.blake2b(key=key, digest_size=MAC_BYTES)

    return _Keys(down=derived(_DOWN), up=derived(_UP))


def _joined(name: str, challenge: bytes, join: bytes) -> bytes:
    """Return the statement that a party signs: its name, the challenge and its JOIN."""
    said = name.encode()
    return _JOIN_LABEL + struct.pack(">H", len(said)) + said + hashlib.sha256(challenge).digest() + join


def _verify(pin: bytes, signature: bytes, statement: bytes, where: str) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(pin).verify(signature, statement)
    except InvalidSignature:
        raise LinkError(
            f"{where}: what it said is not signed by its pinned identity {pin.hex()[:16]}...; somebody else answers in "
            "its name, or another identity was pinned: compare fingerprints"
        ) from None


def _same_version_and_context(version: int, context: bytes, own: bytes, where: str) -> None:
    if version != PROTOCOL_VERSION:
        raise LinkError(f"{where}: it speaks protocol version {version}, this side {PROTOCOL_VERSION}")
    if context != own:
        raise OtherJob(
            f"{where}: it is in another job, or has another federation.toml: {context.hex()[:16]} there, "
            f"{own.hex()[:16]} here"
        )


def _mac(key: Keyed, *parts: bytes) -> bytes:
    mac = key.copy()
    for part in parts:
        mac.update(part)
    return mac.digest()


def _authenticated(key: Keyed, number: int, channel: int, body: bytes) -> bytes:
    head = _HEAD.pack(number, channel)
    return b"".join((head, body, _mac(key, head, body)))


def _verified(key: Keyed, frame: bytes, where: str) -> tuple[int, int, bytes]:
    if len(frame) < OVERHEAD:
        raise LinkError(f"{where}: a message of {len(frame)} bytes; permitted: {OVERHEAD} or more")
    if not hmac.compare_digest(_mac(key, frame[:-MAC_BYTES]), frame[-MAC_BYTES:]):
        raise LinkError(f"{where}: a message that it did not seal, or that was changed on the way")
    number, channel = _HEAD.unpack_from(frame)
    return number, channel, frame[_HEAD.size : -MAC_BYTES]
