"""Identities of the parties, and the keys that each pair shares for one session.

Identities (Ed25519) are pinned before the first message. At every start each party draws a nonce; the session is the
hash of protocol, plan, run and all nonces, so an earlier one cannot be replayed. Each party signs its session key
(X25519) together with the session and its index: a server that relays the keys cannot swap them.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from pbmvfl.crypto.entropy import fork_generation
from pbmvfl.crypto.protocol_version import PROTOCOL_VERSION
from pbmvfl.errors import IdentityError, ProtocolError

NONCE_BYTES = 32
KEY_BYTES = 32
IDENTITY_BYTES = 32
SIGNATURE_BYTES = 64
RUN_ID_BYTES = 8
SESSION_ID_BYTES = 16

_SESSION_LABEL = b"pbmvfl session\0"
_KEY_LABEL = b"pbmvfl session key\0"
_MASK_LABEL = b"pbmvfl mask key\0"
_KIND_LABEL = b"pbmvfl kind\0"


class Identity:
    """Long-lived signing key of a party. The others pin its public half."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_private_bytes(cls, secret: bytes) -> Identity:
        return cls(Ed25519PrivateKey.from_private_bytes(secret))

    def private_bytes(self) -> bytes:
        return self._private.private_bytes_raw()

    @property
    def public(self) -> bytes:
        return self._private.public_key().public_bytes_raw()

    def sign(self, statement: bytes) -> bytes:
        return self._private.sign(statement)


@dataclass(frozen=True)
class Session:
    """One start of a run. Every key and signature is bound to it."""

    run_id: bytes
    digest: bytes

    @classmethod
    def open(cls, *, plan_hash: bytes, run_id: bytes, nonces: Sequence[bytes], first_round: int = 0) -> Session:
        """Return the session of these public values.

        A role that was told another plan, run, first round or nonce computes another session, and other masks.

        Args:
            plan_hash: Hash of the plan, 32 bytes.
            run_id: The run, the same after a resume.
            nonces: Nonce of each party, by index.
            first_round: Round that the session begins with.
        """
        text = hashlib.sha256(_SESSION_LABEL)
        agreed = struct.pack("<HHI", PROTOCOL_VERSION, len(nonces), first_round)
        text.update(agreed + plan_hash + run_id + b"".join(nonces))
        return cls(run_id, text.digest())

    @property
    def id(self) -> bytes:
        """The part of the digest that travels in headers."""
        return self.digest[:SESSION_ID_BYTES]


@dataclass(frozen=True)
class SignedKey:
    """Session key of a party with its identity's signature."""

    public: bytes
    signature: bytes

    def to_bytes(self) -> bytes:
        return self.public + self.signature

    @classmethod
    def from_bytes(cls, data: bytes) -> SignedKey:
        return cls(data[:KEY_BYTES], data[KEY_BYTES:])


def _statement(session: Session, index: int, public: bytes) -> bytes:
    return _KEY_LABEL + struct.pack("<HH", PROTOCOL_VERSION, index) + session.digest + public


def kind_key(pair_key: bytes, kind_code: int) -> bytes:
    """Return a pair's mask key for one kind of round.

    Kinds may have rings of different sizes, and must not share a stream.
    """
    return HKDFExpand(algorithm=hashes.SHA256(), length=32, info=_KIND_LABEL + bytes([kind_code])).derive(pair_key)


class KeyExchange:
    """Key agreement of one party for one session. The secret half lives only as long as this object."""

    def __init__(
        self, *, session: Session, index: int, identity: Identity, secret: Callable[[int], bytes] = os.urandom
    ) -> None:
        self._session = session
        self._index = index
        self._generation = fork_generation()
        self._private = X25519PrivateKey.from_private_bytes(secret(KEY_BYTES))
        public = self._private.public_key().public_bytes_raw()
        self.signed_key = SignedKey(public, identity.sign(_statement(session, index, public)))

    def pair_keys(self, keys: Sequence[SignedKey], identities: Sequence[bytes]) -> dict[int, bytes]:
        """Return a mask key for every peer (Protocol 0, step 1).

        Args:
            keys: Signed session key of every party, by index, as the server relayed them.
            identities: Pinned public key of every party, by index.

        Returns:
            The secret seed that this party shares with each peer, by the peer's index.

        Raises:
            IdentityError: A key is not signed by its party's pinned identity, or is a point of low order.
            ProtocolError: The session key belongs to the process that forked this one.
        """
        if self._generation != fork_generation():
            # The parent has the same secret key, so both would use the same masks.
            raise ProtocolError(
                f"party={self._index}: its session key belongs to the process that forked this one; let one process "
                "run the party, or start a new session in this one"
            )
        shared: dict[int, bytes] = {}
        for peer, (key, identity) in enumerate(zip(keys, identities, strict=True)):
            try:
                Ed25519PublicKey.from_public_bytes(identity).verify(
                    key.signature, _statement(self._session, peer, key.public)
                )
            except InvalidSignature:
                raise IdentityError(
                    f"party={peer}: its session key is not signed by its pinned identity {identity.hex()[:16]}...; "
                    "somebody between the parties changed it, or the wrong identity was pinned"
                ) from None
            if peer == self._index:
                if key != self.signed_key:
                    raise IdentityError(f"party={peer}: the server returned another session key than this party sent")
                continue
            try:
                secret = self._private.exchange(X25519PublicKey.from_public_bytes(key.public))
            except ValueError:
                raise IdentityError(f"party={peer}: its session key is a point of low order") from None
            pair = struct.pack("<HHH", PROTOCOL_VERSION, min(peer, self._index), max(peer, self._index))
            # Protocol 0, step 1: the secret seed of the pair.
            shared[peer] = HKDF(
                algorithm=hashes.SHA256(),
                length=32,
                salt=self._session.digest,
                info=_MASK_LABEL + self._session.run_id + pair,
            ).derive(secret)
        return shared
