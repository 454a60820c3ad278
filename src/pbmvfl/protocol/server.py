"""The server: labels, the head, and sums that it cannot take apart. Bytes in, bytes out, no I/O.

A driver calls `advance` for the next message to all parties and delivers their answers with `receive`. There is one
exchange a round: the request for round t carries the gradient of round t-1. At the end of an epoch the gradient goes
alone, so that every network is complete there: that is where a run is evaluated and checkpointed. A session begins with
the newest round that the server and every party have a checkpoint of.

Shape suffixes: B rows of the batch, P embedding_dim.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pbmvfl.crypto.key_exchange import KEY_BYTES, RUN_ID_BYTES, SIGNATURE_BYTES, Session
from pbmvfl.crypto.ring import PayloadFormat
from pbmvfl.errors import (
    CheckpointError,
    DuplicateMessage,
    OutOfOrder,
    PartyRefused,
    ProtocolError,
    TruncatedMessage,
    WrongPlan,
    WrongSender,
    WrongSession,
)
from pbmvfl.mechanisms import RandomisedSymbols
from pbmvfl.plan.groups import Loss
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import FUSION, LOCAL, PREDICTION
from pbmvfl.plan.schedule import Round
from pbmvfl.protocol.party import Keeper
from pbmvfl.training.encoders import SumsAsScores, build_head
from pbmvfl.training.fusion import FusionModel, fit_fusion
from pbmvfl.training.head import HeadLoss, log_shares
from pbmvfl.training.optimizer import WEIGHTS, Trainer
from pbmvfl.wire.gradient_codecs import codec_for
from pbmvfl.wire.messages import NO_SESSION, SERVER, Hello, Message, MessageKind, encode_labels
from pbmvfl.wire.refusals import Refusal

#: State key, beside the head of a checkpoint, of what was released of the fusion rows.
_RELEASED = "run.fusion"
#: Prefix of the fusion model's names in the server's part of a model.
_FUSION = "fusion."


@dataclass(frozen=True, eq=False)
class ScoredRound:
    """Noisy class scores of one round: all that the server itself may see of its rows."""

    round: Round
    scores_BK: Tensor
    #: Mean loss of a joint round; None where no gradient follows.
    loss: float | None = None


class Server:
    """State machine of the server for one session."""

    def __init__(
        self,
        plan: Plan,
        *,
        train_labels: npt.NDArray[np.int64] | None = None,
        head: nn.Module | None = None,
        run_id: bytes | None = None,
        keeper: Keeper | None = None,
        trained: Mapping[str, Tensor] | None = None,
        estimator: Any = None,
        fusion: FusionModel | None = None,
    ) -> None:
        """Check what the label holder gives against the plan.

        Args:
            plan: The plan that the session follows.
            train_labels: Class of each training row, for plans that train. Of rows that train networks, the drawn one
                if the plan has a label epsilon: all that leaves the server is computed from these. Of fusion rows the
                true one: it teaches the fusion model, which stays here.
            head: The head h_0 of sums; None builds the plan's.
            run_id: The run to start or resume; None draws a new one.
            keeper: Storage for checkpoints.
            trained: The server's part of a model, as `part_state` gives it, for plans that only predict; then there are
                no labels of training rows.
            estimator: The label holder's own scikit-learn classifier, as its fusion model.
            fusion: The fusion model of `trained`, if it was learned again already.

        Raises:
            WrongPlan: Labels or the part of a model do not fit the plan.
            CheckpointError: The part of a model lacks what the plan needs.
        """
        if (trained is None) == bool(plan.model) or (train_labels is None) != (trained is not None):
            raise WrongPlan("a server has labels of training rows, or its part of the model that the plan names")
        if train_labels is None:
            train_labels = np.empty(0, dtype=np.int64)
        elif len(train_labels) != plan.num_samples:
            raise WrongPlan(f"the server has {len(train_labels)} labels, the plan has {plan.num_samples} rows")
        self.plan = plan
        network_labels = train_labels[plan.schedule.part_of(LOCAL)] if trained is None else train_labels
        self.head = head if head is not None else build_head(plan)
        if isinstance(self.head, SumsAsScores) and plan.loss is Loss.CROSS_ENTROPY and trained is None:
            self.head.prior_K = log_shares(torch.from_numpy(network_labels), plan.num_classes, plan.label_response)
        joint = [kind for kind in plan.schedule.kinds if kind.carries_gradient]
        self._trainer = Trainer(plan, self.head, num_steps=sum(map(plan.schedule.num_rounds, joint)))
        self._head_loss = HeadLoss(self._trainer, train_labels, plan.loss, kept=plan.label_kept)
        self._codec = codec_for(plan.gradient_codec)
        self._schedule = plan.schedule
        self._labels, self._network_labels = torch.from_numpy(train_labels), network_labels
        self._labels_sent = not plan.sends_labels
        self.run_id = run_id if run_id is not None else os.urandom(RUN_ID_BYTES)
        self.session: Session | None = None
        self._keeper = keeper
        self._expected: MessageKind | None = None
        self._started = False
        self._inbox: dict[int, bytes | memoryview] = {}
        self.round: Round | None = None  # requested, or just finished
        self.first_round = 0
        self._next_round = 0
        self._gradient: bytes | None = None  # of the last round, not sent yet
        self._estimator = estimator
        self._fusion: FusionModel | None = None
        self._released_FV: npt.NDArray[Any] | None = None  # of the fusion rows, as far as they have come
        #: Scores of the last finished round; None where it had none.
        self.scored: ScoredRound | None = None
        if trained is not None:
            self._begin_with(trained, fusion)

    # --- in ---

    def receive(self, data: bytes, sender: int | None = None) -> None:
        """Accept one party's message of the current stage, or refuse it and change nothing.

        Args:
            data: The message.
            sender: The party at the other end of the connection, for a transport that knows it. Headers are not signed;
                without it a party could send in another's name.

        Raises:
            PartyRefused: The message is a refusal.
            ProtocolError: The message does not fit: sender, order, session, plan, length or content.
        """
        message = Message.from_bytes(data)
        if not 0 <= message.sender < self.plan.num_parties:
            raise WrongSender(f"sender={message.sender}: parties are 0 to {self.plan.num_parties - 1}")
        if sender is not None and message.sender != sender:
            raise WrongSender(f"sender={message.sender}: the message came from party {sender}")
        if message.kind is MessageKind.REFUSAL:
            refusal = Refusal.from_payload(message.payload)
            raise PartyRefused(message.sender, refusal.code, refusal.words)
        if message.kind is not self._expected:
            expected = self._expected.name if self._expected else "nothing"
            raise OutOfOrder(f"kind={message.kind.name} from party {message.sender}: the server expects {expected}")
        session_id = self.session.id if self.session else NO_SESSION
        if message.run_id != self.run_id or message.session_id != session_id:
            raise WrongSession(f"session={message.session_id.hex()} from party {message.sender} is not this one")
        if message.sender in self._inbox:
            raise DuplicateMessage(f"party {message.sender} has sent its {message.kind.name} already")
        if self._expected is MessageKind.EMBEDDING:
            self._check_embedding(message)
        if self._expected is MessageKind.HELLO:
            hello = Hello.from_bytes(message.payload)
            if hello.plan_hash != self.plan.hash:
                raise WrongPlan(
                    f"party {message.sender} follows plan {hello.plan_hash[:8].hex()}, "
                    f"the server {self.plan.hash[:8].hex()}"
                )
        else:
            length = self._expected_length()
            if len(message.payload) != length:
                raise TruncatedMessage(
                    f"payload={len(message.payload)} bytes from party {message.sender}, not {length}"
                )
        if message.kind is MessageKind.EMBEDDING and self._schedule.kind(message.round_number).releases:
            self._payload.check(message.payload)
        self._inbox[message.sender] = message.payload

    def _check_embedding(self, message: Message) -> None:
        assert self.round is not None
        if message.round_number != self.round.number:
            raise OutOfOrder(f"round={message.round_number}: the server asked for round {self.round.number}")
        if message.round_kind != self.round.kind.code:
            raise WrongPlan(f"round kind {message.round_kind}: the server asked for {self.round.kind.name}")

    @property
    def _payload(self) -> PayloadFormat:
        """Payload format of the answers to the current round."""
        assert self.round is not None
        return self.plan.mechanism_for(self.round.kind).payload

    def _expected_length(self) -> int:
        if self._expected is MessageKind.KEY:
            return KEY_BYTES + SIGNATURE_BYTES
        assert self.round is not None
        return self.plan.answer_bytes(self.round.kind, self.round.num_rows)

    # --- out ---

    def advance(self) -> bytes | None:
        """Return the next message for every party, or None when the plan is done.

        Raises:
            OutOfOrder: A party's answer to the last message is missing.
        """
        if not self._started:
            return self._send_start()
        if self._expected is not None:
            missing = sorted(set(range(self.plan.num_parties)) - set(self._inbox))
            if missing:
                raise OutOfOrder(f"waiting for {self._expected.name} from parties {missing}")
        if self._expected is MessageKind.HELLO:
            return self._send_nonces()
        if self._expected is MessageKind.KEY:
            return self._send_keys()
        if self._expected is MessageKind.EMBEDDING:
            self._finish_round()
            if self._schedule.may_keep(self._next_round - 1):
                return self._send_update()
        if not self._labels_sent:
            self._labels_sent = True
            return self._message(MessageKind.LABELS, encode_labels(self._network_labels, self.plan.num_classes))
        if self._next_round >= len(self._schedule):
            return None
        return self._request_round()

    def stop(self) -> bytes:
        """Return the message for every party that ends the run before its plan does."""
        self._expected = None
        self._inbox = {}
        return self._message(MessageKind.STOP, None)

    @property
    def is_open(self) -> bool:
        """Return whether the handshake is over, so that rounds follow."""
        return self.session is not None and self._expected is None and self._labels_sent

    @property
    def has_answers(self) -> bool:
        """Return whether a party has answered the open request."""
        return bool(self._inbox)

    @property
    def completed_rounds(self) -> int:
        return self._next_round

    @property
    def at_epoch_end(self) -> bool:
        """Return whether every role was just told that an epoch or a fusion round is over: time for checkpoints."""
        return self._expected is None and self.round is not None and self._schedule.may_keep(self.round.number)

    def _take_inbox(self) -> list[bytes | memoryview]:
        """Return the payloads in the order of the parties: sums of floats must not depend on the order of arrival."""
        payloads = [self._inbox[i] for i in range(self.plan.num_parties)]
        self._inbox = {}
        return payloads

    def _send_start(self) -> bytes:
        self._started = True
        self._expected = MessageKind.HELLO
        return self._message(MessageKind.START, self.plan.hash)

    def _send_nonces(self) -> bytes:
        hellos = [Hello.from_bytes(payload) for payload in self._take_inbox()]
        self._go_to(self._newest_common(hellos))
        nonces = [hello.nonce for hello in hellos]
        self.session = Session.open(
            plan_hash=self.plan.hash, run_id=self.run_id, nonces=nonces, first_round=self.first_round
        )
        self._expected = MessageKind.KEY
        return self._message(MessageKind.NONCES, self.plan.hash + b"".join(nonces))

    def _newest_common(self, hellos: Sequence[Hello]) -> int:
        """Return the newest round that all roles can resume from, or 0: the first weights are always there."""
        mine = set() if self._keeper is None else set(self._keeper.rounds(self.run_id))
        common = mine.intersection(*(hello.rounds for hello in hellos))
        return max((number for number in common if number <= self._schedule.settled_at), default=0)

    def _go_to(self, first_round: int) -> None:
        if first_round and self._keeper is not None:
            self.load_state(self._keeper.load(self.run_id, first_round))
        if first_round > self._schedule.trained_at and self._released_FV is None:
            raise CheckpointError(
                f"the checkpoint of round {first_round} has no released fusion rows; restore it from a copy, or start "
                "a new run"
            )
        self.first_round = self._next_round = first_round

    def _send_keys(self) -> bytes:
        keys = b"".join(self._take_inbox())
        self._expected = None
        return self._message(MessageKind.KEYS, keys)

    def _request_round(self) -> bytes:
        self.round = self._schedule[self._next_round]
        self._expected = MessageKind.EMBEDDING
        # Algorithm 2, line 11: the gradient of the round before goes with the request for this one.
        gradient, self._gradient = self._gradient, None
        return self._message(MessageKind.ROUND, gradient)

    def _send_update(self) -> bytes:
        self._expected = None
        # Algorithm 2, line 11: after the last round of an epoch the gradient goes by itself, if there is one.
        gradient, self._gradient = self._gradient, None
        return self._message(MessageKind.UPDATE, gradient)

    def _message(self, kind: MessageKind, payload: bytes | None) -> bytes:
        in_round = self.round if kind in (MessageKind.ROUND, MessageKind.UPDATE) else None
        numbers = {MessageKind.NONCES: self.first_round, MessageKind.STOP: self._next_round}
        return Message(
            kind,
            SERVER,
            run_id=self.run_id,
            session_id=self.session.id if self.session else NO_SESSION,
            round_number=in_round.number if in_round else numbers.get(kind, 0),
            round_kind=in_round.kind.code if in_round else 0,
            carries_gradient=in_round is not None and payload is not None,
            payload=payload or b"",
        ).to_bytes()

    # --- learning ---

    def _finish_round(self) -> None:
        assert self.round is not None
        payloads, current = self._take_inbox(), self.round
        self.scored = None
        if current.kind.releases:  # otherwise a party's answer says no more than that it is done
            values_BV = self.values_of(payloads, current)
            if current.kind.carries_gradient:
                labels_B = self._labels.index_select(0, torch.from_numpy(current.rows.copy()))
                self._learn(torch.from_numpy(values_BV), labels_B)
            elif current.kind.fuses:
                self._take_fusion_rows(current, values_BV)
            else:
                self.scored = ScoredRound(current, self.read(values_BV))
        self._next_round = current.number + 1
        self._expected = None

    def values_of(self, payloads: Sequence[bytes | memoryview], current: Round) -> npt.NDArray[Any]:
        """Return what parties released of a round's rows: each party's symbol, (B, M), or estimated sums, (B, P)."""
        mechanism = self.plan.mechanism_for(current.kind)
        if not current.kind.trains and self.plan.num_symbols is not None:
            return mechanism.payload.each(payloads, current.num_rows).T.astype(np.int64)
        shape = (current.num_rows, mechanism.embedding_dim)
        quantized_sum = mechanism.payload.total(payloads, shape[0] * shape[1])  # Algorithm 2, line 9
        if mechanism.largest_sum is not None and int(quantized_sum.max()) > mechanism.largest_sum:
            raise ProtocolError(
                f"round={current.number}: a sum is {int(quantized_sum.max())}, and honest parties make at most "
                f"{mechanism.largest_sum}: a party does not follow the protocol, or its masks are another session's"
            )
        return mechanism.estimate(quantized_sum).reshape(shape)  # Algorithm 2, line 10

    def read(self, values_BV: npt.NDArray[Any]) -> Tensor:
        """Return class scores, (B, K), of rows that were released as predictions are (`values_of`)."""
        if self.fusion is not None:
            return torch.from_numpy(self.fusion.log_probabilities(values_BV))
        vote, mechanism = self.plan.vote, self.plan.mechanism_for(PREDICTION)
        if self.plan.num_symbols is not None and isinstance(mechanism, RandomisedSymbols):
            sums_BK = vote.read_symbols(values_BV, self.plan.num_classes, kept=mechanism.kept)
            return self.predict(torch.from_numpy(sums_BK))
        return self.predict(torch.from_numpy(vote.decode_sums(values_BV)))

    # --- the fusion model ---

    def _take_fusion_rows(self, current: Round, values_BV: npt.NDArray[Any]) -> None:
        if self._released_FV is None:
            shape = (self.plan.num_fusion_samples, values_BV.shape[1])
            self._released_FV = np.zeros(shape, dtype=values_BV.dtype)
        self._released_FV[np.searchsorted(self._schedule.part_of(FUSION), current.rows)] = values_BV

    @property
    def fusion(self) -> FusionModel | None:
        """Model of classes from what is released of a row; None until all fusion rows are released, or without such.

        It is learned when it is first asked for: post-processing, with true labels that stay here.
        """
        if self._fusion is None and self._released_FV is not None and self._next_round >= self._schedule.settled_at:
            self._fusion = fit_fusion(
                self._released_FV,
                self._labels.numpy()[self._schedule.part_of(FUSION)],
                num_classes=self.plan.num_classes,
                num_symbols=self.plan.num_symbols,
                scores_SK=_symbol_logs(self.plan),
                choice=self.plan.fusion,
                estimator=self._estimator,
            )
        return self._fusion

    def _learn(self, estimated_sum_BP: Tensor, labels_B: Tensor) -> None:
        assert self.round is not None
        if not self.head.training:
            self.head.train()
        # Algorithm 2, line 11
        loss, scores, gradient_BP, slopes = self._head_loss.gradients(estimated_sum_BP, labels_B)
        # Encoding refuses NaN, and it comes before the step: bad numbers never reach the weights.
        self._gradient = self._codec.encode(gradient_BP.numpy(), seed=self.plan.seed, round_number=self.round.number)
        self._trainer.step(slopes)  # Algorithm 2, line 13
        self.scored = ScoredRound(self.round, scores, loss)

    def predict(self, sums_BP: Tensor) -> Tensor:
        """Return class scores, (B, K), for sums of embeddings."""
        self.head.eval()
        with torch.no_grad():
            scores: Tensor = self.head(sums_BP)
        return scores

    # --- beside the protocol ---

    def part_state(self) -> dict[str, Tensor]:
        """Return the server's part of the model: its head, and what the fusion model was learned from."""
        state = {name: value for name, value in self._trainer.state().items() if name.startswith(WEIGHTS)}
        return state if self.fusion is None else {**state, **self.fusion.state()}

    def _begin_with(self, trained: Mapping[str, Tensor], fusion: FusionModel | None) -> None:
        state = {name: value for name, value in trained.items() if name.startswith(WEIGHTS)}
        self._trainer.load_state(state)
        self._fusion = fusion if fusion is not None else fusion_of(self.plan, trained)

    def state(self) -> dict[str, Tensor]:
        """Return the state of a checkpoint, with what was released of fusion rows: they are released once."""
        state = self._trainer.state()
        return state if self._released_FV is None else {**state, _RELEASED: torch.from_numpy(self._released_FV.copy())}

    def load_state(self, state: dict[str, Tensor]) -> None:
        state = dict(state)
        kept = state.pop(_RELEASED, None)
        self._trainer.load_state(state)
        self._released_FV = None if kept is None else kept.numpy()


def _symbol_logs(plan: Plan) -> npt.NDArray[np.float64] | None:
    """Return the log shares of classes that a released symbol stands for; None where votes are numbers."""
    mechanism = plan.mechanism_for(PREDICTION)
    if plan.num_symbols is None or not isinstance(mechanism, RandomisedSymbols):
        return None
    return plan.vote.symbol_logs(plan.num_classes, kept=mechanism.kept)


def has_fusion(state: Mapping[str, Tensor]) -> bool:
    """Return whether a server's part of a model has a fusion model: its training came to release the fusion rows."""
    return any(name.startswith(_FUSION) for name in state)


def fusion_of(plan: Plan, state: Mapping[str, Tensor], estimator: Any = None) -> FusionModel | None:
    """Return the fusion model of a server's part, learned again; None if it has none.

    Args:
        plan: The plan that the model was trained by, or one that predicts with it.
        state: The server's part, as `Server.part_state` gives it.
        estimator: The label holder's own classifier, if it was trained with one.
    """
    if not plan.num_fusion_samples or not has_fusion(state):
        return None
    return FusionModel.from_state(
        state,
        num_classes=plan.num_classes,
        num_symbols=plan.num_symbols,
        scores_SK=_symbol_logs(plan),
        estimator=estimator,
    )
