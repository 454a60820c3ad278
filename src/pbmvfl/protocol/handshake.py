"""A party's side of the handshake: who is asked by whom, for which plan, and the keys that follow.

    START -> HELLO    NONCES -> KEY    KEYS -> a key for every pair

It knows nothing of columns, weights or ledgers. What does not fit is refused before anything changes.
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
from pbmvfl.wire.bodies import Hello
from pbmvfl.wire.messages import Message


class Handshake:
    """One session's handshake, from the server's first message to the pairs' keys."""

    def __init__(
        self,
        plan: Plan,
        *,
        index: int,
        identity: Identity,
        identities: Sequence[bytes],
        secret: Callable[[int], bytes],
    ) -> None:
        """`secret` gives random bytes that nobody else knows."""
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
        """The hello that answers a start; `rounds_of` are those of a run that this party could go on from."""
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
        """The session that everybody's nonces make. It is this party's once it has said `join`."""
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
        """This party's signed key for the session."""
        self.session = session
        self._exchange = KeyExchange(session=session, index=self._index, identity=self._identity, secret=self._secret)
        return self._exchange.signed_key.to_bytes()

    def pair_keys(self, message: Message) -> dict[int, bytes]:
        """A key with every other party, from everybody's signed ones."""
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
        """Rounds may follow, and the secret half of the key is gone."""
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
