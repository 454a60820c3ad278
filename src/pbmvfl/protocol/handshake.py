"""A party's side of the handshake: agree on plan and session, and derive a key with every other party.

    START -> HELLO    NONCES -> KEY    KEYS -> a key for every pair

It knows nothing of columns, weights or ledgers. A message that does not fit is refused before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pbmvfl.crypto.key_exchange import (
    KEY_BYTES,
    NONCE_BYTES,
    SIGNATURE_BYTES,
    Identity,
    KeyExchange,
    Session,
    SignedKey,
)
from pbmvfl.errors import OutOfOrder, TruncatedMessage, WrongPlan, WrongSession
from pbmvfl.plan.plan import Plan
from pbmvfl.protocol.party_rows import check_identities
from pbmvfl.wire.messages import Hello, Message


class Handshake:
    """Handshake of one session, from the server's first message to the keys of the pairs."""

    def __init__(
        self,
        plan: Plan,
        *,
        index: int,
        identity: Identity,
        identities: Sequence[bytes],
        secret: Callable[[int], bytes],
    ) -> None:
        """Check the pinned identities.

        Args:
            plan: The plan that the party follows.
            index: The party's number.
            identity: The party's signing key.
            identities: The pinned public keys of all parties, by index.
            secret: Returns so many secret random bytes.

        Raises:
            WrongPlan: The identities do not fit the plan.
        """
        check_identities(identities, plan, index=index, own=identity.public)
        self._plan, self._index = plan, index
        self._identity, self._identities = identity, tuple(identities)
        self._secret = secret
        self._nonce: bytes | None = None
        self._exchange: KeyExchange | None = None
        self._keyed = False
        #: The run that the server started the session for; no bytes before that.
        self.run_id = b""
        self.session: Session | None = None

    def start(self, message: Message, rounds_of: Callable[[bytes], Sequence[int]]) -> bytes:
        """Return the hello that answers a START.

        Args:
            message: The server's START.
            rounds_of: Returns the rounds of a run that this party could resume from.

        Raises:
            OutOfOrder: The session is open already.
            TruncatedMessage: The payload is no plan hash.
            WrongPlan: The server follows another plan.
        """
        if self._nonce is not None:
            raise OutOfOrder(f"party={self._index}: this session is open already; make a new Party to start again")
        payload = bytes(message.payload)
        if len(payload) != len(self._plan.hash):
            raise TruncatedMessage(f"start length={len(payload)}: a plan's hash has {len(self._plan.hash)} bytes")
        self._check_plan(payload)
        self.run_id = message.run_id
        self._nonce = self._secret(NONCE_BYTES)
        return Hello(self._plan.hash, self._nonce, tuple(rounds_of(self.run_id))).to_bytes()

    def _check_plan(self, plan_hash: bytes) -> None:
        if plan_hash != self._plan.hash:
            raise WrongPlan(
                f"party={self._index}: it follows plan {self._plan.hash[:8].hex()}, the server {plan_hash[:8].hex()}"
            )

    def session_of(self, message: Message) -> Session:
        """Return the session that all nonces make. The party is in it once `join` is called.

        Raises:
            OutOfOrder: NONCES came before START, or twice.
            TruncatedMessage: The payload has the wrong length.
            WrongPlan: The server follows another plan.
            WrongSession: The run, the session id or the party's own nonce is not the expected one.
        """
        if self._nonce is None or self.session is not None:
            raise OutOfOrder(f"party={self._index}: nonces belong after the start, once")
        plan = self._plan
        expected = len(plan.hash) + plan.num_parties * NONCE_BYTES
        payload = bytes(message.payload)
        if len(payload) != expected:
            raise TruncatedMessage(f"nonces length={len(payload)}: {plan.num_parties} parties make {expected}")
        self._check_plan(payload[:32])
        if message.run_id != self.run_id:
            raise WrongSession(f"run={message.run_id.hex()}: the session was started for run {self.run_id.hex()}")
        nonces = [payload[32 + i * NONCE_BYTES :][:NONCE_BYTES] for i in range(plan.num_parties)]
        if nonces[self._index] != self._nonce:
            raise WrongSession(f"party={self._index}: its own nonce is not among those that the server returned")
        session = Session.open(
            plan_hash=plan.hash, run_id=message.run_id, nonces=nonces, first_round=message.round_number
        )
        if message.session_id != session.id:
            raise WrongSession(f"session={message.session_id.hex()}: the nonces make {session.id.hex()}")
        return session

    def join(self, session: Session) -> bytes:
        """Join the session and return this party's signed key for it."""
        self.session = session
        self._exchange = KeyExchange(session=session, index=self._index, identity=self._identity, secret=self._secret)
        return self._exchange.signed_key.to_bytes()

    def pair_keys(self, message: Message) -> dict[int, bytes]:
        """Return a key with every other party, from the signed keys of all.

        Raises:
            OutOfOrder: KEYS came before NONCES, or twice.
            TruncatedMessage: The payload has the wrong length.
            IdentityError: A key is not signed by its party's pinned identity.
        """
        if self._exchange is None:
            raise OutOfOrder(f"party={self._index}: keys belong after nonces, once")
        self.check(message, keyed=False)
        size, count = KEY_BYTES + SIGNATURE_BYTES, self._plan.num_parties
        payload = bytes(message.payload)
        if len(payload) != count * size:
            raise TruncatedMessage(f"keys length={len(payload)}: expected {count * size}")
        keys = [SignedKey.from_bytes(payload[i * size :][:size]) for i in range(count)]
        return self._exchange.pair_keys(keys, self._identities)

    def finish(self) -> None:
        """Let rounds follow, and drop the secret half of the key."""
        self._exchange = None
        self._keyed = True

    def check(self, message: Message, *, keyed: bool = True) -> None:
        """Refuse a message of another session, or one that comes too early."""
        if self.session is None or (keyed and not self._keyed):
            raise OutOfOrder(f"kind={message.kind.name}: the handshake is not finished")
        if message.run_id != self.session.run_id or message.session_id != self.session.id:
            raise WrongSession(
                f"session={message.session_id.hex()}: this party is in {self.session.id.hex()}; "
                "an older session cannot be continued, start a new one"
            )
