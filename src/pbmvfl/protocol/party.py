"""A party: its columns, its network, its noise and its masks. Bytes in, bytes out, no I/O of its own.

    START -> HELLO    NONCES -> KEY    ROUND t -> EMBEDDING t    KEYS, LABELS, UPDATE, STOP -> nothing

Every message gets bytes back: the answer, no bytes where the protocol has none, or a REFUSAL with a public text. A
message that does not fit is refused before anything changes. A round is drawn once, whatever sequence of messages
arrives: the same request again gets the same bytes, because fresh noise would be a second release for one charge, and
under an old mask would leak the difference. Any other request below the next round is refused. Messages are handled
one at a time; a second thread waits.

Shape suffixes: B rows of the batch, P embedding_dim.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pbmvfl.crypto.entropy import Entropy, SystemEntropy
from pbmvfl.crypto.key_exchange import Identity, Session, kind_key
from pbmvfl.crypto.secure_sum import Masks
from pbmvfl.errors import (
    EncoderError,
    OutOfOrder,
    PbmvflError,
    TruncatedMessage,
    WrongPlan,
    WrongSender,
)
from pbmvfl.mechanisms import Scratch
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import RoundKind, Split
from pbmvfl.plan.schedule import Round
from pbmvfl.privacy.events import Event
from pbmvfl.protocol.handshake import Handshake
from pbmvfl.protocol.party_network import PartyNetwork
from pbmvfl.protocol.party_rows import Features, PartyRows, check_rows, check_rows_once
from pbmvfl.protocol.stored_answers import AnswersOf, PartyAnswers
from pbmvfl.training.features import LazyRows
from pbmvfl.training.optimizer import WEIGHTS
from pbmvfl.training.preparation import PREPARATION
from pbmvfl.wire.gradient_codecs import codec_for
from pbmvfl.wire.messages import SERVER, Message, MessageKind, decode_labels
from pbmvfl.wire.refusals import Refusal

_log = logging.getLogger(__name__)
#: State key, beside the weights of a checkpoint, of whether their run began with public ones.
_PUBLIC_START = "run.public_start"


class ReleaseGuard(Protocol):
    """Check before every release, such as the party's own ledger. It raises to refuse the release."""

    def charge(self, current: Round, events: Sequence[Event]) -> None:
        """Charge what one use of each of the round's rows releases and updates.

        Raises:
            PbmvflError: The release is refused.
        """

    def close(self) -> None: ...


class OpenGuard(Protocol):
    """Opens a session's guard."""

    def __call__(
        self,
        session: Session,
        first_round: int,
        public_start: bool,
        unanswered: npt.NDArray[np.int64] | None,
        /,
    ) -> ReleaseGuard:
        """Open the guard.

        Args:
            session: The session.
            first_round: Its first round.
            public_start: Whether its run began with public weights.
            unanswered: As `Party.unanswered` returns it: the rows to charge one by one.
        """


class Keeper(Protocol):
    """Storage for the checkpoints of one role. `federation.checkpoints` has one that writes files."""

    def rounds(self, run_id: bytes) -> Sequence[int]:
        """Return the rounds of a run that can be resumed from."""

    def wants(self, completed_rounds: int) -> bool:
        """Return whether to keep the state after so many rounds, at the end of an epoch."""

    def save(self, run_id: bytes, completed_rounds: int, state: dict[str, Tensor]) -> None: ...

    def load(self, run_id: bytes, completed_rounds: int) -> dict[str, Tensor]: ...


def weights_are_charged(state: Mapping[str, Tensor]) -> bool:
    """Return whether a kept state says that its weights depend on rows only through what was charged.

    No flag means no.
    """
    flag = state.get(_PUBLIC_START)
    return flag is not None and flag.numel() == 1 and bool(flag)


def part_of_state(plan: Plan, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a party's state that belongs to the trained model.

    The part says whether everything that its weights learned from rows was charged as noisy updates. Steps without
    noise
    leave more in the weights: then every release that is made with them is about all rows they were trained on.

    Args:
        plan: The training plan.
        state: The party's state, as a checkpoint has it.

    Returns:
        Weights, what prepares the columns, and the flag; no moments of the optimiser.
    """
    updates = [plan.update_event(kind) for kind in plan.schedule.kinds]
    charged = all(update.is_noisy for update in updates if update is not None) and weights_are_charged(state)
    kept = {name: value for name, value in state.items() if name.startswith((WEIGHTS, PREPARATION))}
    return {**kept, _PUBLIC_START: torch.tensor([charged], dtype=torch.uint8)}


class Party:
    """State machine of one party for one session."""

    def __init__(
        self,
        plan: Plan,
        *,
        index: int,
        train_features: Features | LazyRows,
        encoder: nn.Module,
        identity: Identity,
        identities: Sequence[bytes],
        test_features: Features | LazyRows | None = None,
        keeper: Keeper | None = None,
        open_guard: OpenGuard | None = None,
        answers: AnswersOf | None = None,
        trained: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Check what the owner gives against the plan.

        Args:
            plan: The plan that the session follows.
            index: The party's number, 0 to num_parties - 1.
            train_features: The owner's columns of the training rows, before the plan's public map.
            encoder: The party's network h_m.
            identity: The party's signing key.
            identities: The pinned public keys of all parties, by index.
            test_features: Columns of the test rows, where the plan has rounds with them.
            keeper: Storage for checkpoints; without one the party can only begin with round 0.
            open_guard: Opens the guard that every release passes, before anything is released.
            answers: Store of releases that stand alone: a row that comes again gets the same answer.
            trained: The party's part of a model, as `part_state` gives it, for plans that only predict.

        Raises:
            WrongPlan: Something does not fit the plan.
            DataError: A column has NaN or a number out of scale.
            EncoderError: The encoder does not fit the plan.
        """
        if not 0 <= index < plan.num_parties:
            raise WrongPlan(f"party={index}: the plan has parties 0 to {plan.num_parties - 1}")
        self._secret: Callable[[int], bytes] = os.urandom
        self._handshake = Handshake(
            plan, index=index, identity=identity, identities=identities, secret=lambda count: self._secret(count)
        )
        uses_train = any(kind.split is Split.TRAIN for kind in plan.schedule.kinds)
        if uses_train and len(train_features) != plan.num_samples:
            raise WrongPlan(f"party={index}: has {len(train_features)} rows, the plan has {plan.num_samples}")
        num_test = 0 if test_features is None else len(test_features)
        uses_test = any(kind.split is Split.TEST for kind in plan.schedule.kinds)
        if uses_test and num_test != plan.num_test_samples:
            raise WrongPlan(f"party={index}: has {num_test} test rows, the plan has {plan.num_test_samples}")
        for kind in plan.schedule.kinds:
            if not kind.releases and not kind.updates:
                raise WrongPlan(f"{kind.name} rounds neither release nor update: there is nothing to do in them")
        for rows, split in ((train_features, Split.TRAIN), (test_features, Split.TEST)):
            check_rows(rows, index=index, split=split)
        self.plan = plan
        self.index = index
        self._rows = PartyRows(plan, index=index, train=train_features, test=test_features)
        self.network = PartyNetwork(plan, encoder, self._rows, index=index)
        self._scratch = Scratch()
        self._codec = codec_for(plan.gradient_codec)
        self._schedule = plan.schedule
        updates = {kind: plan.update_event(kind) for kind in plan.schedule.kinds}
        self._noisy_kinds = {kind for kind, update in updates.items() if update is not None and update.is_noisy}
        self._keeper = keeper
        self._open_guard = open_guard
        self._answers = None if answers is None else PartyAnswers(plan, self._rows, self.network, answers)
        #: True if a trained part's weights depend on rows only through what was charged; None where the session trains.
        self._part_is_charged = self._begin_with(trained)
        self._guard: ReleaseGuard | None = None
        self._unanswered: npt.NDArray[np.int64] | None = None
        self._entropy: Entropy = SystemEntropy()
        self._one_at_a_time = threading.Lock()
        # --- the session ---
        self._masks: dict[RoundKind, Masks] = {}
        #: True if the run began with public weights. Set when the session has its first round.
        self.public_start = False
        self._start_digest: str | None = None  # digest of those weights, until the first release
        # --- the rounds ---
        self._next_round = 0
        self._weights_of = 0  # how many rounds the weights have seen, at least: those up to the last step
        self._answered: Round | None = None  # the round that was answered and waits for its gradient
        self._last: tuple[bytes, bytes] | None = None  # the last message that was accepted, and what answered it
        self._last_round: tuple[bytes, bytes] | None = None  # the newest request for a round, and what answered it
        self._drawn_BP: npt.NDArray[Any] | None = None  # drawn and charged for the next round, and not yet sent
        self._stepped_for: bytes | None = None  # the last request whose gradient was used, answered or not
        self._stopped = False
        #: Last error, for the owner's log only; never sent.
        self.last_error: Exception | None = None

    @property
    def encoder(self) -> nn.Module:
        return self.network.encoder

    @property
    def fault(self) -> Exception | None:
        """First failure of the party's own network, for the owner. The party answered all the same."""
        return self.network.fault

    @property
    def noise_is_seeded(self) -> bool:
        """Return whether the noise may be known to another role, so that releases have no epsilon."""
        return self._entropy.seeded

    # --- messages ---

    def receive(self, data: bytes) -> bytes:
        """Handle one message of the server. Never raises.

        Args:
            data: The message, whatever it is.

        Returns:
            The answer, no bytes where the protocol has none, or a REFUSAL.
        """
        with self._one_at_a_time:
            self.last_error = None
            try:
                return self._answer(data)
            except Exception as error:
                self.last_error = error
                refusal = Refusal.of(error)
                _log.warning("party=%d refused (%s): %s", self.index, refusal.code.name, error)
                if not isinstance(error, PbmvflError):
                    _log.exception("party=%d: this is a fault of the program or of the party's own network", self.index)
                return Message(
                    MessageKind.REFUSAL,
                    self.index,
                    run_id=self._handshake.run_id or bytes(8),
                    session_id=self._handshake.session.id if self._handshake.session else bytes(16),
                    payload=refusal.to_payload(),
                ).to_bytes()

    def answer(self, data: bytes) -> bytes:
        """Handle one message as `receive` does, but raise the error, with its full text, instead of refusing."""
        with self._one_at_a_time:
            return self._answer(data)

    def _answer(self, data: bytes) -> bytes:
        for answered in (self._last, self._last_round):
            if answered is not None and data == answered[0]:
                return answered[1]  # a retry: the same bytes, no new noise, no new charge
        message = Message.from_bytes(data)
        if message.sender != SERVER:
            raise WrongSender(f"sender={message.sender}: a party listens to the server ({SERVER}) alone")
        match message.kind:
            case MessageKind.START:
                answer = self._receive_start(message)
            case MessageKind.NONCES:
                answer = self._receive_nonces(message)
            case MessageKind.KEYS:
                answer = self._receive_keys(message)
            case MessageKind.LABELS:
                answer = self._receive_labels(message)
            case MessageKind.ROUND:
                self._step_once(message, data)
                answer = self._answer_round(self._schedule[message.round_number])
                self._last_round = (bytes(data), answer)
            case MessageKind.UPDATE:
                self._step_once(message, data)
                self._keep_if_wanted()
                answer = b""
            case MessageKind.STOP:
                answer = self._receive_stop(message)
            case _:
                raise WrongSender(f"kind={message.kind.name}: not a message that a server sends")
        self._last = (bytes(data), answer)
        return answer

    # --- handshake ---

    def _receive_start(self, message: Message) -> bytes:
        hello = self._handshake.start(message, lambda run: () if self._keeper is None else self._keeper.rounds(run))
        return Message(MessageKind.HELLO, self.index, run_id=self._handshake.run_id, payload=hello).to_bytes()

    def _receive_nonces(self, message: Message) -> bytes:
        session = self._handshake.session_of(message)
        self._go_to(message.round_number)  # a round without a checkpoint is refused before the party joins
        return self._reply(MessageKind.KEY, self._handshake.join(session))

    def _go_to(self, first_round: int) -> None:
        """Begin with round 0 and the first weights, or resume from a checkpoint of this party."""
        if first_round:
            self.public_start = self._load(self._handshake.run_id, first_round)
        elif self._part_is_charged is not None:
            self.public_start = self._part_is_charged
        else:
            self.public_start = self.network.begins_publicly()
        self._start_digest = self.network.digest()
        self._next_round = self._weights_of = first_round

    def _load(self, run_id: bytes, first_round: int) -> bool:
        """Load the checkpoint of a round; return whether its run began with public weights."""
        if self._keeper is None or first_round not in self._keeper.rounds(run_id):
            raise OutOfOrder(f"round={first_round}: this party has no checkpoint of it; it can begin with round 0")
        return self._take_state(self._keeper.load(run_id, first_round))

    def _take_state(self, state: Mapping[str, Tensor]) -> bool:
        """Load a kept state; return whether its weights depend on rows only through what was charged."""
        self.network.load_state({name: value for name, value in state.items() if name != _PUBLIC_START})
        return weights_are_charged(state)

    def _begin_with(self, trained: Mapping[str, Tensor] | None) -> bool | None:
        """Load a trained part; return whether its weights depend on rows only through what was charged."""
        if (trained is None) == bool(self.plan.model):
            has, needs = ("a part of a model", "none") if trained is not None else ("no part of a model", "one")
            raise WrongPlan(f"party={self.index}: it has {has}, and the plan needs {needs}")
        return None if trained is None else self._take_state(trained)

    def part_state(self) -> dict[str, Tensor]:
        """Return this party's part of the model, which stays with the party: weights and what prepares its columns."""
        return part_of_state(self.plan, self._kept_state())

    def _check_start(self) -> None:
        """Refuse weights that changed after the handshake judged them public or not, and before the first release."""
        if self.public_start and self._start_digest is not None and self.network.digest() != self._start_digest:
            raise EncoderError(
                f"party={self.index}: its weights changed between the handshake and the first round; a network can be "
                "in one run at a time, give each run a copy of its own"
            )
        self._start_digest = None

    def _receive_keys(self, message: Message) -> bytes:
        pair_keys = self._handshake.pair_keys(message)
        self._masks = {
            kind: masks for kind in self._schedule.kinds if (masks := self._masks_for(kind, pair_keys)) is not None
        }
        if self._open_guard is not None:
            assert self._handshake.session is not None
            self._unanswered = self.unanswered(self._next_round)
            self._guard = self._open_guard(
                self._handshake.session, self._next_round, self.public_start, self._unanswered
            )
        self._handshake.finish()
        return b""

    def _receive_labels(self, message: Message) -> bytes:
        self._handshake.check(message)
        if not self.plan.sends_labels:
            raise WrongPlan(f"labels={self.plan.labels}: this plan sends no labels to parties")
        if self.network.labels is not None:
            raise OutOfOrder(f"party={self.index}: labels come once in a session")
        labels = decode_labels(
            message.payload, num_samples=self.plan.num_network_samples, num_classes=self.plan.num_classes
        )
        self.network.hold(torch.from_numpy(labels))
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

    # --- rounds ---

    def _step_once(self, message: Message, data: bytes) -> None:
        """Apply the gradient that a message carries, but only once if the message is refused later and comes again."""
        self._handshake.check(message)
        self._check_round(message)
        if data == self._stepped_for:
            return
        gradient_BP = self._gradient_of(message)
        if gradient_BP is not None:
            self.network.apply(gradient_BP, self._entropy)  # Algorithm 2, lines 16 to 18
            assert self._answered is not None
            self._weights_of = self._answered.number + 1
            self._answered = None
        self._stepped_for = bytes(data)

    def _check_round(self, message: Message) -> None:
        """Refuse a request that does not fit the party's state, whether it is new or a retry. Changes nothing."""
        if self._stopped:
            raise OutOfOrder(f"round={message.round_number}: this session was stopped; start a new one to resume")
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
        if not update and kind.needs_labels and self.network.labels is None:
            raise OutOfOrder(f"round={expected}: {kind.name} rounds need labels, and none came")

    def _gradient_of(self, message: Message) -> npt.NDArray[np.float32] | None:
        """Return the decoded gradient that a message carries, or None where it has none. Changes nothing."""
        number, update = message.round_number, message.kind is MessageKind.UPDATE
        if message.carries_gradient != (self._answered is not None):
            have = "waits for" if self._answered is not None else "does not wait for"
            raise OutOfOrder(f"round={number}: this party {have} a gradient")
        if self._answered is None:
            if update and (self._schedule.kind(number).carries_gradient or not self._schedule.may_keep(number)):
                raise OutOfOrder(
                    "an update carries a gradient, or ends an epoch of rounds without one or a fusion round"
                )
            if len(message.payload):
                raise TruncatedMessage(f"payload of {len(message.payload)} bytes where none belongs")
            return None
        return self._codec.decode(
            message.payload, self._answered.num_rows, self.plan.embedding_dim, bound=self.plan.gradient_bound
        )

    def _answer_round(self, current: Round) -> bytes:
        """Embed, randomise, charge, mask, and return the answer (Algorithm 2, line 6).

        After an error the request can be sent again. What was charged by then is neither drawn nor charged a second
        time.
        """
        if self._start_digest is not None:
            self._check_start()
        if current.kind in self._noisy_kinds:
            check_rows_once(current)
        if not current.kind.releases:
            return self._learn_alone(current)
        mechanism = self.plan.mechanism_for(current.kind)
        stored = self._answers if self.plan.stores_answers(current.kind) else None
        keys = [] if stored is None else stored.keys(current)
        if self._drawn_BP is None:
            embedding_BP = self.network.released_numbers(current)  # Algorithm 2, line 6, with the draw below
            released_BP = mechanism.randomize(embedding_BP, self._entropy, self._scratch)
            # Rows that have been answered before get the same answers again, and cost nothing.
            charged = current if stored is None else self._to_charge(current, stored.new_rows(current, keys))
            if self._guard is not None and charged.num_rows:
                self._guard.charge(charged, self.plan.events(current.kind))
            self._drawn_BP = released_BP
        released_BP = self._drawn_BP if stored is None else stored.settle(keys, self._drawn_BP)
        masks = self._masks.get(current.kind)
        sent = released_BP if masks is None else masks.add(current.number, released_BP)  # Protocol 0, step 3
        answer = self._reply(MessageKind.EMBEDDING, mechanism.payload.encode(sent), current)
        self._drawn_BP = None
        self._answered = current if current.kind.carries_gradient else None
        self._next_round = current.number + 1
        return answer

    def _to_charge(self, current: Round, new_rows: npt.NDArray[np.int64]) -> Round:
        """Return what is charged of a round: its new rows, or all of it if it has any and rounds are charged whole."""
        if self._unanswered is None and len(new_rows):
            return current
        return Round(current.number, current.kind, new_rows)

    def _learn_alone(self, current: Round) -> bytes:
        """Charge, then learn from own columns and labels. The answer says no more than that it is done."""
        if self._guard is not None:
            self._guard.charge(current, self.plan.events(current.kind))
        # Before anything is drawn: a step that is interrupted is not taken a second time.
        self._next_round = self._weights_of = current.number + 1
        self.network.learn_alone(current, self._entropy)
        return self._reply(MessageKind.EMBEDDING, b"", current)

    def _reply(self, kind: MessageKind, payload: bytes, current: Round | None = None) -> bytes:
        session = self._handshake.session
        assert session is not None
        return Message(
            kind,
            self.index,
            run_id=session.run_id,
            session_id=session.id,
            round_number=current.number if current else 0,
            round_kind=current.kind.code if current else 0,
            payload=payload,
        ).to_bytes()

    # --- what the party keeps ---

    @property
    def completed_rounds(self) -> int:
        """Number of rounds whose steps the weights have taken."""
        return self._next_round if self._answered is None else self._answered.number

    def _keep_if_wanted(self) -> None:
        if self._keeper is not None and self._keeper.wants(self.completed_rounds):
            self._keeper.save(self._handshake.run_id, self.completed_rounds, self._kept_state())

    def _receive_stop(self, message: Message) -> bytes:
        """End the session in the middle of an epoch.

        All parties have taken the same steps, so another session can resume the run from here. This one answers no more
        rounds.
        """
        self._handshake.check(message)
        if self._learned_alone(message.round_number):
            self._stopped = True
            return b""  # another party refused it, and its step is taken here: an older checkpoint must do
        if not self._weights_of <= message.round_number <= self.completed_rounds:
            raise OutOfOrder(
                f"round={message.round_number}: this party has the weights of {self._weights_of} to "
                f"{self.completed_rounds} completed rounds"
            )
        if self._keeper is not None:
            # Rounds after the last one that trains or teaches the fusion model are all run again.
            kept = min(message.round_number, self._schedule.settled_at)
            self._keeper.save(self._handshake.run_id, kept, self._kept_state())
        self._stopped = True
        return b""

    def _learned_alone(self, number: int) -> bool:
        """Return whether this is the last round, and this party has learned in it without waiting for others."""
        return number == self._next_round - 1 == self._weights_of - 1 and not self._schedule.kind(number).releases

    def _kept_state(self) -> dict[str, Tensor]:
        """Return the state of a checkpoint.

        It says whether the run began with public weights: a resume is charged by that.
        """
        return {**self.network.state(), _PUBLIC_START: torch.tensor([self.public_start], dtype=torch.uint8)}

    def close(self) -> None:
        """End the session. The guard learns that nothing more will be sent."""
        with self._one_at_a_time:
            if self._answers is not None:
                self._answers.close()
            if self._guard is not None:
                self._guard.close()

    def unanswered(self, first_round: int, *, run_id: bytes | None = None) -> npt.NDArray[np.int64] | None:
        """Return the test rows that a session from this round on is charged for, one by one.

        Args:
            first_round: The session's first round.
            run_id: The run whose checkpoint of that round is loaded first; None for the present weights.

        Returns:
            The numbers of those that have no stored answer, in the order of their rounds. None where the plan's rounds
            are charged as wholes: answers are not stored, or weights change before them.
        """
        if self._answers is None:
            return None
        if run_id is not None:
            self._load(run_id, first_round)
        return self._answers.unanswered(first_round)

    # --- beside the protocol ---

    def exact_embeddings(self, split: Split) -> npt.NDArray[np.float32]:
        """Return noise-free embeddings, for a simulator's evaluation alone: no role of the protocol ever sees them."""
        return self.network.exact_embeddings(split)

    @property
    def rows(self) -> PartyRows:
        """The party's rows, for a simulator's evaluation alone."""
        return self._rows
