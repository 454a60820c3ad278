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
    PlanError,
    ProtocolError,
    TruncatedMessage,
    WrongPlan,
    WrongSender,
    WrongSession,
)
from pbmvfl.mechanisms import Mechanism, PolyaLaplace, RandomisedSymbols
from pbmvfl.mechanisms.vote_tables import (
    ballot_scores,
    class_scores,
    decode_table,
    log_prior,
    sent_log_likelihoods,
    symbol_shares,
)
from pbmvfl.mechanisms.votes import VoteKind
from pbmvfl.plan.groups import Loss
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.schedule import COUNTS, Round
from pbmvfl.protocol.party import Keeper
from pbmvfl.training.encoders import SumsAsScores, build_head
from pbmvfl.training.head import HeadLoss, log_shares
from pbmvfl.training.optimizer import WEIGHTS, Trainer
from pbmvfl.wire.bodies import Hello, encode_labels
from pbmvfl.wire.gradient_codecs import codec_for
from pbmvfl.wire.messages import NO_SESSION, SERVER, Message, MessageKind
from pbmvfl.wire.refusals import Refusal

# --- Reading votes by every party's noisy counts: symbols one by one, or ballots as noisy sums ---


class VoteReader:
    """Class scores from all parties' votes, computed only from what was released."""

    def __init__(
        self, plan: Plan, tables_MKS: Sequence[npt.NDArray[np.int64]], rows_of_class_K: npt.NDArray[np.int64]
    ) -> None:
        """Prepare to read votes by the parties' noisy counts.

        Args:
            plan: The plan; its prediction mechanism is krr or laplace.
            tables_MKS: Each party's noisy counts of its votes by class, as `decode_table` gives them.
            rows_of_class_K: How many training rows each class has.

        Raises:
            PlanError: The mechanism or the shape of a table does not fit the plan.
        """
        mechanism = plan.prediction
        if not isinstance(mechanism, RandomisedSymbols | PolyaLaplace):
            raise PlanError(f"vote={plan.vote.kind}: counts read votes of mechanism=krr and mechanism=laplace alone")
        self._mechanism = mechanism
        symbols = plan.vote.counted(plan.num_classes)
        for party, table_KS in enumerate(tables_MKS):
            if table_KS.shape != (plan.num_classes, symbols):
                raise PlanError(
                    f"party={party}: its counts have shape={table_KS.shape}, vote={plan.vote.kind} makes "
                    f"{(plan.num_classes, symbols)}"
                )
        self.tables_MKS = tuple(tables_MKS)
        self._log_prior_K = log_prior(rows_of_class_K)
        self._shares_MKS = [symbol_shares(table_KS, rows_of_class_K, plan.table_noise) for table_KS in tables_MKS]

    def scores(self, payloads: Sequence[bytes | memoryview], rows: int) -> npt.NDArray[np.float32]:
        """Return ln P(class | all votes) of each row, (B, K)."""
        mechanism = self._mechanism
        if isinstance(mechanism, RandomisedSymbols):
            tables_MKS = [sent_log_likelihoods(shares_KS, mechanism.kept) for shares_KS in self._shares_MKS]
            return class_scores(mechanism.payload.each(payloads, rows), tables_MKS, self._log_prior_K)
        shape = (rows, mechanism.embedding_dim)
        ballots_BK = mechanism.estimate(mechanism.payload.total(payloads, shape[0] * shape[1])).reshape(shape)
        return ballot_scores(ballots_BK / mechanism.bound, self._shares_MKS, mechanism.scale, self._log_prior_K)


# --- server ---


#: State keys, beside the head in the server's part of a model: rows of each class, and each party's counts of votes.
_CLASS_COUNTS, _TABLE = "classes.rows", "votes.table."


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
    ) -> None:
        """Check what the label holder gives against the plan.

        Args:
            plan: The plan that the session follows.
            train_labels: Class of each training row, for plans that train: the drawn one, if the plan has a label
                epsilon. Nothing else of labels is ever used, so all that leaves the server is computed from these.
            head: The fusion model h_0; None builds the plan's.
            run_id: The run to start or resume; None draws a new one.
            keeper: Storage for checkpoints.
            trained: The server's part of a model, as `part_state` gives it, for plans that only predict; then there are
                no
                labels of training rows.

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
        self.head = head if head is not None else build_head(plan)
        if isinstance(self.head, SumsAsScores) and plan.loss is Loss.CROSS_ENTROPY and trained is None:
            self.head.prior_K = log_shares(torch.from_numpy(train_labels), plan.num_classes, plan.label_response)
        joint = [kind for kind in plan.schedule.kinds if kind.carries_gradient]
        self._trainer = Trainer(plan, self.head, num_steps=sum(map(plan.schedule.num_rounds, joint)))
        self._head_loss = HeadLoss(self._trainer, train_labels, plan.loss, kept=plan.label_kept)
        self._codec = codec_for(plan.gradient_codec)
        self._schedule = plan.schedule
        self._labels = torch.from_numpy(train_labels)
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
        #: Number of training rows of each class; estimated if labels are drawn.
        self.rows_of_class_K = self._of_true_labels(np.bincount(train_labels, minlength=plan.num_classes))
        self._reader: VoteReader | None = None  # once the parties' counts of votes are known
        #: Scores of the last finished round; None where it had none.
        self.scored: ScoredRound | None = None
        if trained is not None:
            self._begin_with(trained)

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
            if self._schedule.ends_epoch(self._next_round - 1):
                return self._send_update()
        if not self._labels_sent:
            self._labels_sent = True
            return self._message(MessageKind.LABELS, encode_labels(self._labels.numpy(), self.plan.num_classes))
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
        """Return whether every network has taken the last step of an epoch."""
        return self._expected is None and self.round is not None and self._schedule.ends_epoch(self.round.number)

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
        return max((number for number in common if number <= self._schedule.trained_at), default=0)

    def _go_to(self, first_round: int) -> None:
        if first_round and self._keeper is not None:
            self.load_state(self._keeper.load(self.run_id, first_round))
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
        # Algorithm 2, line 11: after the last round of an epoch the gradient goes by itself.
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
        payloads = self._take_inbox()
        self.scored = None
        if self.round.kind == COUNTS:
            sent_MKS = (decode_table(payload, self.plan.num_classes) for payload in payloads)
            tables_MKS = [self._of_true_labels(table_KS) for table_KS in sent_MKS]
            self._reader = VoteReader(self.plan, tables_MKS, self.rows_of_class_K)
        elif self.round.kind.releases and not self.round.kind.carries_gradient and self._reader is not None:
            self.scored = ScoredRound(self.round, torch.from_numpy(self._reader.scores(payloads, self.round.num_rows)))
        elif self.round.kind.releases:  # otherwise a party's answer says no more than that it is done
            self._take_sums(payloads)
        self._next_round = self.round.number + 1
        self._expected = None

    def _of_true_labels(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return counts by true class from counts by the class of `train_labels`, which may be drawn."""
        response = self.plan.label_response
        if response is None:
            return counts
        return np.rint(response.corrected_counts(counts)).astype(np.int64)

    def _take_sums(self, payloads: list[bytes | memoryview]) -> None:
        assert self.round is not None
        mechanism = self.plan.mechanism_for(self.round.kind)
        shape = (self.round.num_rows, mechanism.embedding_dim)
        quantized_sum = self._payload.total(payloads, shape[0] * shape[1])  # Algorithm 2, line 9
        if mechanism.largest_sum is not None and int(quantized_sum.max()) > mechanism.largest_sum:
            raise ProtocolError(
                f"round={self.round.number}: a sum is {int(quantized_sum.max())}, and honest parties make at most "
                f"{mechanism.largest_sum}: a party does not follow the protocol, or its masks are another session's"
            )
        estimated = mechanism.estimate(quantized_sum).reshape(shape)  # Algorithm 2, line 10
        if self.round.kind.carries_gradient:
            self._learn(torch.from_numpy(estimated), self._labels.index_select(0, torch.from_numpy(self.round.rows)))
        elif self.plan.vote.kind is VoteKind.RAW:
            self.scored = ScoredRound(self.round, self.predict(torch.from_numpy(estimated)))
        else:
            self.scored = ScoredRound(self.round, torch.from_numpy(self._scores_of_votes(estimated, mechanism)))

    def _scores_of_votes(self, estimated: npt.NDArray[np.float32], mechanism: Mechanism) -> npt.NDArray[np.float32]:
        vote = self.plan.vote
        if self.plan.loss is not Loss.CROSS_ENTROPY:  # such scores know already how frequent classes are
            return vote.decode_sums(estimated)
        return vote.class_scores(
            estimated,
            log_prior_K=log_prior(self.rows_of_class_K),
            noise=mechanism.variance_upper_bound**0.5,
            num_parties=self.plan.num_parties,
        )

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
        """Return the server's part of the model.

        Its head, the frequency of classes, and the counts that votes are read by.
        """
        state = {name: value for name, value in self._trainer.state().items() if name.startswith(WEIGHTS)}
        state[_CLASS_COUNTS] = torch.from_numpy(self.rows_of_class_K.copy())
        tables = () if self._reader is None else self._reader.tables_MKS
        return {**state, **{f"{_TABLE}{party}": torch.from_numpy(table.copy()) for party, table in enumerate(tables)}}

    def _begin_with(self, trained: Mapping[str, Tensor]) -> None:
        state = dict(trained)
        counts = state.pop(_CLASS_COUNTS, None)
        if counts is None or tuple(counts.shape) != (self.plan.num_classes,):
            raise CheckpointError(f"the model has no counts of num_classes={self.plan.num_classes} classes")
        self.rows_of_class_K = counts.numpy()
        tables = [state.pop(f"{_TABLE}{party}", None) for party in range(self.plan.num_parties)]
        self._trainer.load_state(state)
        if self.plan.voting.has_tables:
            if any(table is None for table in tables):
                raise CheckpointError("the model has no counts of votes, and the plan reads votes by them")
            self._reader = VoteReader(
                self.plan, [table.numpy() for table in tables if table is not None], self.rows_of_class_K
            )

    def state(self) -> dict[str, Tensor]:
        """Return the state of a checkpoint."""
        return self._trainer.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._trainer.load_state(state)
