"""A party: its columns, its network, its noise and its masks. Bytes in, bytes out, no I/O.

    hello() -> HELLO        NONCES -> KEY        KEYS -> nothing        ROUND t -> EMBEDDING t        UPDATE -> nothing

A message that does not fit is refused with a typed error before anything changes. A round's bytes are made once: a
retry gets the same bytes from `resend`, because fresh noise under an old mask would leak the difference.

Shape suffixes: B rows of the batch, P embedding_dim.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pbmvfl.encoders import check_encoder
from pbmvfl.errors import (
    DuplicateMessage,
    EncoderError,
    OutOfOrder,
    TruncatedMessage,
    WrongPlan,
    WrongSender,
    WrongSession,
)
from pbmvfl.mechanisms import Scratch
from pbmvfl.plan import Plan
from pbmvfl.privacy.events import Event
from pbmvfl.randomness.secret import Entropy, SystemEntropy
from pbmvfl.schedule import Round, RoundKind, Split
from pbmvfl.secagg.keys import (
    KEY_BYTES,
    NONCE_BYTES,
    SIGNATURE_BYTES,
    Identity,
    KeyExchange,
    Session,
    SignedKey,
    kind_key,
)
from pbmvfl.secagg.masks import Masks
from pbmvfl.updates.trainer import Trainer
from pbmvfl.wire.codecs import codec_for
from pbmvfl.wire.messages import SERVER, Message, MessageKind

_Features = npt.NDArray[np.float32] | npt.NDArray[np.uint8]


class ReleaseGuard(Protocol):
    """Asked before every release; raises to refuse it. The party's own ledger is one."""

    def charge(self, current: Round, events: Sequence[Event]) -> None:
        """Count what one use of each of the round's rows releases and updates."""

    def close(self) -> None: ...


class Party:
    """One party's state machine for one session."""

    def __init__(
        self,
        plan: Plan,
        *,
        index: int,
        train_features: _Features,
        encoder: nn.Module,
        identity: Identity,
        identities: Sequence[bytes],
        test_features: _Features | None = None,
        first_round: int = 0,
        open_guard: Callable[[Session], ReleaseGuard] | None = None,
    ) -> None:
        if not 0 <= index < plan.num_parties:
            raise WrongPlan(f"party={index}: the plan has parties 0 to {plan.num_parties - 1}")
        if len(identities) != plan.num_parties or identity.public != identities[index]:
            raise WrongPlan(
                f"party={index}: {len(identities)} pinned identities for num_parties={plan.num_parties}, "
                "and its own must be among them at its index"
            )
        if len(train_features) != plan.num_samples:
            raise WrongPlan(f"party={index}: has {len(train_features)} rows, the plan has {plan.num_samples}")
        num_test = 0 if test_features is None else len(test_features)
        uses_test_rows = any(kind.split is Split.TEST for kind in plan.schedule.kinds)
        if uses_test_rows and num_test != plan.num_test_samples:
            raise WrongPlan(f"party={index}: has {num_test} test rows, the plan has {plan.num_test_samples}")
        for kind in plan.schedule.kinds:
            if not kind.releases:  # what it would answer with is a release, and nothing would be charged for it
                raise WrongPlan(f"{kind.name} rounds release nothing: this version runs rounds that release embeddings")
        self.plan = plan
        self.index = index
        self._open_guard = open_guard
        self._guard: ReleaseGuard | None = None
        self.encoder = check_encoder(encoder, plan, index=index, rows=torch.from_numpy(train_features[:8]))
        self._trainer = Trainer(plan, self.encoder)
        self._scratch = Scratch()
        self._codec = codec_for(plan.gradient_codec)
        self._schedule = plan.schedule
        self._features = {
            Split.TRAIN: torch.from_numpy(train_features),
            Split.TEST: torch.from_numpy(test_features) if test_features is not None else None,
        }
        self._identity = identity
        self._identities = tuple(identities)
        self._entropy: Entropy = SystemEntropy()
        self._secret: Callable[[int], bytes] = os.urandom
        # --- the session ---
        self._nonce: bytes | None = None
        self._session: Session | None = None
        self._exchange: KeyExchange | None = None
        self._keyed = False
        self._masks: dict[RoundKind, Masks] = {}
        # --- the rounds ---
        self._next_round = first_round
        self._pending: Tensor | None = None  # this round's embedding with its graph, waiting for its gradient
        self._pending_rows = 0
        self._last: tuple[bytes, bytes] | None = None  # the last request and the bytes that answered it
        self._stepped_for: bytes | None = None  # the last request whose gradient was used, answered or not

    def _use_known_randomness(self, entropy: Entropy, secret: Callable[[int], bytes]) -> None:
        """The tests' private door. A run that went through it claims no privacy."""
        self._entropy, self._secret = entropy, secret

    @property
    def noise_is_seeded(self) -> bool:
        """Whether somebody could know this party's noise: then what it releases has no epsilon."""
        return self._entropy.seeded

    # --- messages ---

    def hello(self) -> bytes:
        """Open a session. Its keys are new, whatever happened before."""
        if self._nonce is not None:
            raise OutOfOrder(f"party={self.index}: this session is open already; make a new Party to start again")
        self._nonce = self._secret(NONCE_BYTES)
        return Message(MessageKind.HELLO, self.index, payload=self.plan.hash + self._nonce).to_bytes()

    def receive(self, data: bytes) -> bytes:
        """Handle one message of the server; the answer, or no bytes where the protocol has none."""
        message = Message.from_bytes(data)
        if message.sender != SERVER:
            raise WrongSender(f"sender={message.sender}: a party listens to the server ({SERVER}) alone")
        if message.kind is MessageKind.NONCES:
            return self._receive_nonces(message)
        if message.kind is MessageKind.KEYS:
            return self._receive_keys(message)
        if message.kind not in (MessageKind.ROUND, MessageKind.UPDATE):
            raise WrongSender(f"kind={message.kind.name}: not a message that a server sends")
        self._check_session(message)
        if self._last is not None and data == self._last[0]:
            raise DuplicateMessage(f"round={message.round_number}: handled already; `resend` repeats the same bytes")
        if data != self._stepped_for:
            self._step(self._check_round(message))
            self._stepped_for = bytes(data)
        answer = b"" if message.kind is MessageKind.UPDATE else self._answer_round(message)
        self._last = (bytes(data), answer)
        return answer

    def resend(self, data: bytes) -> bytes:
        """The answer to the last message again, byte for byte, for a server that asks again with the same bytes."""
        if self._last is None or bytes(data) != self._last[0]:
            raise OutOfOrder("only the last request can be answered again, and only if it is the same to the byte")
        return self._last[1]

    # --- handshake ---

    def _receive_nonces(self, message: Message) -> bytes:
        if self._nonce is None or self._session is not None:
            raise OutOfOrder(f"party={self.index}: nonces belong after hello, once")
        expected = len(self.plan.hash) + self.plan.num_parties * NONCE_BYTES
        payload = bytes(message.payload)
        if len(payload) != expected:
            raise TruncatedMessage(f"nonces length={len(payload)}: {self.plan.num_parties} parties make {expected}")
        if payload[:32] != self.plan.hash:
            raise WrongPlan(
                f"party={self.index}: it follows plan {self.plan.hash[:8].hex()}, the server {payload[:8].hex()}"
            )
        nonces = [payload[32 + i * NONCE_BYTES :][:NONCE_BYTES] for i in range(self.plan.num_parties)]
        if nonces[self.index] != self._nonce:
            raise WrongSession(f"party={self.index}: its own nonce is not among those that the server returned")
        session = Session.open(plan_hash=self.plan.hash, run_id=message.run_id, nonces=nonces)
        if message.session_id != session.id:
            raise WrongSession(f"session={message.session_id.hex()}: the nonces make {session.id.hex()}")
        self._session = session
        self._exchange = KeyExchange(session=session, index=self.index, identity=self._identity, secret=self._secret)
        return self._reply(MessageKind.KEY, self._exchange.signed_key.to_bytes())

    def _receive_keys(self, message: Message) -> bytes:
        if self._exchange is None:
            raise OutOfOrder(f"party={self.index}: keys belong after nonces, once")
        self._check_session(message, keyed=False)
        size = KEY_BYTES + SIGNATURE_BYTES
        payload = bytes(message.payload)
        if len(payload) != self.plan.num_parties * size:
            raise TruncatedMessage(f"keys length={len(payload)}: expected {self.plan.num_parties * size}")
        keys = [SignedKey.from_bytes(payload[i * size :][:size]) for i in range(self.plan.num_parties)]
        pair_keys = self._exchange.pair_keys(keys, self._identities)
        self._masks = {
            kind: masks for kind in self._schedule.kinds if (masks := self._masks_for(kind, pair_keys)) is not None
        }
        if self._open_guard is not None:
            assert self._session is not None
            self._guard = self._open_guard(self._session)
        self._exchange = None  # the secret half is gone
        self._keyed = True
        return b""

    def _masks_for(self, kind: RoundKind, pair_keys: dict[int, bytes]) -> Masks | None:
        mechanism = self.plan.mechanism_for(kind)
        if not kind.releases or not mechanism.secure_aggregation or mechanism.ring is None:
            return None
        return Masks(
            ring=mechanism.ring,
            index=self.index,
            pair_keys={peer: kind_key(key, kind.code) for peer, key in pair_keys.items()},
            values_per_round=self._schedule.largest_batch * mechanism.embedding_dim,
        )

    def _check_session(self, message: Message, *, keyed: bool = True) -> None:
        if self._session is None or (keyed and not self._keyed):
            raise OutOfOrder(f"kind={message.kind.name}: the handshake is not finished")
        if message.run_id != self._session.run_id or message.session_id != self._session.id:
            raise WrongSession(
                f"session={message.session_id.hex()}: this party is in {self._session.id.hex()}; "
                "an older session cannot be continued, start a new one"
            )

    # --- rounds ---

    def _check_round(self, message: Message) -> npt.NDArray[np.float32] | None:
        """Refuse what does not fit; the decoded gradient if there is one. Changes nothing."""
        update = message.kind is MessageKind.UPDATE
        expected = self._next_round - 1 if update else self._next_round
        if message.round_number != expected:
            raise OutOfOrder(f"round={message.round_number}: this party expects round {expected}")
        if not update and expected >= len(self._schedule):
            raise OutOfOrder(f"round={expected}: the plan has only rounds 0 to {len(self._schedule) - 1}")
        kind = self._schedule.kind(expected)
        if message.round_kind != kind.code:
            raise WrongPlan(
                f"round={expected}: round kind {message.round_kind}, the plan has {kind.name} ({kind.code})"
            )
        if message.carries_gradient != (self._pending is not None):
            have = "waits for" if self._pending is not None else "does not wait for"
            raise OutOfOrder(f"round={expected}: this party {have} a gradient")
        if not message.carries_gradient:
            if update:
                raise OutOfOrder("an update carries a gradient")
            if len(message.payload):
                raise TruncatedMessage(f"payload of {len(message.payload)} bytes where none belongs")
            return None
        return self._codec.decode(message.payload, self._pending_rows, self.plan.embedding_dim)

    def _answer_round(self, message: Message) -> bytes:
        """Embed, randomise, have it charged, mask. Whatever raises leaves the round to be asked for again."""
        current = self._schedule[message.round_number]
        embedding_BP = self._embed(current)
        mechanism = self.plan.mechanism_for(current.kind)
        released_BP = mechanism.randomize(embedding_BP.detach().numpy(), self._entropy, self._scratch)
        if self._guard is not None:
            self._guard.charge(current, self.plan.events(current.kind))
        masks = self._masks.get(current.kind)
        mask = None if masks is None else masks.for_round(current.number, released_BP.size)
        answer = self._reply(MessageKind.EMBEDDING, mechanism.payload.encode(released_BP, mask), current)
        if current.kind.carries_gradient:
            self._pending, self._pending_rows = embedding_BP, current.num_rows
        self._next_round = current.number + 1
        return answer

    def _embed(self, current: Round) -> Tensor:
        features = self._features[current.kind.split]
        if features is None:
            raise WrongPlan(f"party={self.index}: the plan asks for test rows and this party has none")
        batch = features.index_select(0, torch.from_numpy(current.rows))
        if current.kind.carries_gradient:
            if not self.encoder.training:  # asking costs nothing; setting it walks through the whole network
                self.encoder.train()
            embedding_BP: Tensor = self.encoder(batch)
        else:
            self.encoder.eval()
            with torch.no_grad():
                embedding_BP = self.encoder(batch)
        if embedding_BP.shape != (current.num_rows, self.plan.embedding_dim):
            raise EncoderError(
                f"party={self.index}: its encoder gives shape={tuple(embedding_BP.shape)}, "
                f"the plan needs ({current.num_rows}, {self.plan.embedding_dim})"
            )
        return embedding_BP

    def _step(self, gradient_BP: npt.NDArray[np.float32] | None) -> None:
        """Chain rule from the gradient of the sum (the sum passes it on unchanged), then one step."""
        if gradient_BP is None or self._pending is None:
            return
        # copy: the array may be a read-only view of the message
        slopes = self._trainer.slopes(self._pending, torch.from_numpy(gradient_BP.copy()))
        self._trainer.step(slopes)
        self._pending = None

    def _reply(self, kind: MessageKind, payload: bytes, current: Round | None = None) -> bytes:
        assert self._session is not None
        return Message(
            kind,
            self.index,
            run_id=self._session.run_id,
            session_id=self._session.id,
            round_number=current.number if current else 0,
            round_kind=current.kind.code if current else 0,
            payload=payload,
        ).to_bytes()

    # --- beside the protocol ---

    def close(self) -> None:
        """End the session: the ledger learns that nothing more will be sent."""
        if self._guard is not None:
            self._guard.close()

    def state(self) -> dict[str, Tensor]:
        """Weights and moments for this party's own checkpoint. No keys, no noise."""
        return self._trainer.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._trainer.load_state(state)

    def exact_embeddings(self, features: Tensor) -> Tensor:
        """Noise-free embeddings, for a simulator's evaluation alone: no role of the protocol ever sees them."""
        self.encoder.eval()
        with torch.no_grad():
            embedding_BP: Tensor = self.encoder(features)
        return embedding_BP
