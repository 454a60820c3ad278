"""One run: a server and its parties from the first message to the result."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pbmvfl._files import checked_object
from pbmvfl.crypto.entropy import Entropy, SystemEntropy
from pbmvfl.errors import CheckpointError, EncoderError, NonFiniteError, PartyRefused, PbmvflError, ProtocolError
from pbmvfl.federation.checkpoints import Checkpoints
from pbmvfl.federation.epoch_history import EpochLine, HistoryLog
from pbmvfl.federation.metrics_summary import Figures, Labelled, divergence, what_to_change
from pbmvfl.federation.release_log import ReleaseLog
from pbmvfl.federation.results import TRAFFIC_KINDS, FusionFigures, Result
from pbmvfl.federation.trackers import Callback
from pbmvfl.mechanisms.votes import VoteKind
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import PREDICTION, Split
from pbmvfl.plan.schedule import Round
from pbmvfl.protocol.server import ScoredRound, Server
from pbmvfl.protocol.session import Meter, Tap, deliver, drive
from pbmvfl.protocol.transport import Inspection, Transport
from pbmvfl.training.metrics import classification_metrics
from pbmvfl.wire.refusals import RefusalCode
from pbmvfl.wire.traffic import Traffic

#: Rows that a simulator evaluates exactly in a run, about: more would take longer than the training of large tables.
_MOST_EVALUATED = 1 << 19


def evaluated_every(plan: Plan) -> int:
    """Return how many epochs lie between two exact evaluations; the last epoch always has one.

    It follows from public sizes: 1 while all epochs together evaluate no more rows than `_MOST_EVALUATED`.
    """
    return max(1, -(-plan.num_epochs * (plan.num_samples + plan.num_test_samples) // _MOST_EVALUATED))


class _Diverged(Exception):
    """Training diverged, as the message says. Releases after this would be wasted."""


class Run:
    """Run of a session: log of releases, evaluation, history, the server's checkpoints, an early end."""

    def __init__(
        self,
        server: Server,
        transport: Transport,
        data: Labelled,
        *,
        log: ReleaseLog,
        keeper: Checkpoints | None,
        inspection: Inspection | None,
        owners: Inspection | None,
        noise_is_seeded: bool,
        taps: Sequence[Tap],
        on_round: Callable[[int, float, Traffic], None] | None,
        on_epoch: Callable[[EpochLine], None] | None,
        entropy: Entropy | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Prepare a run. `inspection` gives exact sums, `owners` the parties' logs; a deployment has neither.

        `entropy` is what the simulator draws releases from that no role sees; None for the system's.
        """
        self._entropy = entropy or SystemEntropy()
        self._server, self._transport, self._data = server, transport, data
        self._plan = server.plan
        self._log, self._keeper = log, keeper
        self._epochs = None if keeper is None else HistoryLog(keeper.folder / "history.jsonl")
        self._inspection, self._owners = inspection, owners
        self._noise_is_seeded = noise_is_seeded
        self._on_round, self._on_epoch, self._callbacks = on_round, on_epoch, callbacks
        self._meter = Meter(taps=list(taps))
        self._started = time.perf_counter()
        self._earlier = Traffic()
        self._history: list[EpochLine] = []
        self._figures = Figures(data)
        self._is_open = False
        self._loss = float("nan")
        self._losses: list[float] = []
        #: Rows and noisy scores of this epoch's joint rounds, as the server saw them.
        self._seen: list[tuple[npt.NDArray[np.int64], Tensor]] = []
        #: Rows and noisy scores of this pass over the test rows, as far as it is.
        self._predicted: list[tuple[npt.NDArray[np.int64], Tensor]] = []

    def finish(self) -> Result:
        """Run to the plan's end, or to the round that a party refuses, and return the result."""
        stopped, diverged = "", False
        try:
            drive(
                self._server,
                self._transport,
                self._meter,
                on_open=self._open,
                on_round=self._round,
                on_epoch_end=self._epoch_end,
            )
            self._log.charge_until(self._server.completed_rounds)
        except PartyRefused as refusal:
            stopped = self._stopped_by(refusal)
            self._stop_early()
        except _Diverged as end:
            stopped, diverged = str(end), True
            self._evaluate_last()
            self._give_up(self._server.completed_rounds)
        except NonFiniteError as error:
            if isinstance(error, ProtocolError) or not self._is_open:  # A message had it, not the server's own sums.
                raise
            completed = self._server.completed_rounds
            stopped = f"the gradient of round {completed} (counted from 0) is no number; {what_to_change(self._plan)}"
            diverged = True
            self._history.append(EpochLine(epoch=_shown(self._plan.schedule.epochs_before(completed))))
            self._give_up(completed + 1)  # the round whose gradient is no number was released too
        except KeyboardInterrupt:
            if self._is_open:  # Rounds charged ahead and never sent are given back; the round under way counts.
                sent = self._server.completed_rounds + 1
                self._log.charge_until(min(sent, self._log.records[-1].charged_until))
            raise
        fusion = self._server.fusion
        lacking = fusion is not None or not self._figures.has_measured
        if self._inspection is not None and self._is_evaluated and lacking:
            # The fusion model is there; or an earlier session evaluated the epoch, and the history lacks some figures.
            self._history[-1] = dataclasses.replace(self._history[-1], **self._evaluate())
        return Result(
            plan=self._plan,
            metrics=self._history[-1].metrics if self._history else {},
            history=tuple(self._history),
            traffic=self._traffic(),
            seconds=time.perf_counter() - self._started,
            sessions=tuple(self._log.records),
            row_uses=self._log.uses(self._plan),
            noise_is_seeded=self._log.noise_is_seeded,
            stopped=stopped,
            classes=self._figures.classes,
            scores=self._figures.scores,
            largest_score=self._figures.largest_score,
            diverged=diverged,
            fusion=None if fusion is None else FusionFigures.of(fusion),
        )

    def _stopped_by(self, refusal: PartyRefused) -> str:
        """Return why the run ends with a result. Only a limit ends it so; any other refusal is raised."""
        error = None if self._owners is None else self._owners.owner_error(refusal.party)
        if refusal.code != RefusalCode.BUDGET or not self._is_open:
            # The caller runs all roles, and gets the error that the party's owner would find in its log.
            raise (error if isinstance(error, PbmvflError) else refusal) from refusal
        return str(refusal if error is None else error)

    def _stop_early(self) -> None:
        """End the run at a refused round. Every network has taken the step before it, so the state is complete."""
        completed = self._server.completed_rounds
        # Answers of other parties to the refused round have left them, and count. If all refused, none has.
        sent = completed + (1 if self._server.has_answers else 0)
        deliver(self._server, self._transport, self._meter, self._server.stop(), setup=False)
        if completed == 0:  # Nothing was trained, so there is nothing to evaluate.
            self._history.append(EpochLine(epoch=0))
        elif completed < self._plan.schedule.trained_at:
            epoch = _shown(self._plan.schedule.epochs_before(completed))
            if self._losses or not self._history or (self._history[-1].epoch < epoch and not self._is_evaluated):
                self._history.append(self._line(epoch))
            self._evaluate_last()
        if completed:
            self._save(min(completed, self._plan.schedule.settled_at))
        self._log.charge_until(sent)

    def _give_up(self, sent: int) -> None:
        """End a run that diverged: nothing more is released, and checkpoints stay as they are."""
        self._log.charge_until(sent)
        if sent < len(self._plan.schedule):
            deliver(self._server, self._transport, self._meter, self._server.stop(), setup=False)

    # --- hooks of the session ---

    def _open(self) -> None:
        assert self._server.session is not None
        self._is_open = True
        first_round = self._server.first_round
        if first_round:
            self._log.must_cover(first_round)
            self._continue_from(first_round)
        self._log.open(
            self._server.session.id.hex(),
            first_round=first_round,
            until=self._next_boundary(),
            noise_is_seeded=self._noise_is_seeded,
            # Without access to the parties, weights must be taken as depending on the rows.
            public_start=self._owners is not None and all(self._owners.public_starts()),
        )

    def _continue_from(self, first_round: int) -> None:
        """Restore seconds, traffic and history from the checkpoint."""
        assert self._keeper is not None
        assert self._epochs is not None
        notes = self._keeper.notes_of(self._server.run_id, first_round)
        path = self._keeper.folder
        kinds = {"seconds": int | float, "traffic": dict, "history": str | list}
        known = checked_object(dict(notes), kinds, path, CheckpointError)
        self._started -= known["seconds"]
        self._earlier = Traffic(**checked_object(known["traffic"], TRAFFIC_KINDS, path, CheckpointError))
        kept = known["history"]
        if isinstance(kept, str):
            self._history = self._epochs.read(kept)
        else:  # checkpoints of format 2 have all epochs themselves
            self._history = [EpochLine.from_dict(line, path) for line in kept]

    def _next_boundary(self) -> int:
        """Return the round after which the next checkpoint comes; releases are charged ahead up to it."""
        every = 1 if self._keeper is None else self._keeper.every
        schedule, completed = self._plan.schedule, self._server.completed_rounds
        if schedule.trained_at <= completed < schedule.settled_at:
            return completed + 1  # every fusion round has one
        epoch = int(schedule.epochs_before(completed))
        end = schedule.end_of_epoch(epoch + every - epoch % every)
        return min(end, schedule.trained_at) if completed < schedule.trained_at < schedule.settled_at else end

    def _take_scores(self, scored: ScoredRound) -> None:
        """Keep a joint round's loss and scores for its epoch; measure a whole pass over the test rows."""
        current, scores = scored.round, scored.scores_BK
        if scored.loss is not None:
            self._loss = scored.loss
            self._losses.append(scored.loss)
            self._seen.append((current.rows, scores))
            return
        if current.kind.split is not Split.TEST or self._inspection is not None:
            return
        first, end = self._plan.schedule.pass_of(current.number)
        if current.number == first:
            self._predicted = []
        self._predicted.append((current.rows, scores))
        if current.number == end - 1 and len(self._predicted) == end - first and self._history:
            labels = self._data.test_labels[np.concatenate([rows for rows, _ in self._predicted])]
            found = torch.cat([scores for _, scores in self._predicted]).numpy()
            metrics: dict[str, Any] = self._figures.measure(found, labels, "test")
            self._history[-1] = dataclasses.replace(self._history[-1], **metrics)

    def _round(self) -> None:
        if self._server.scored is not None:
            self._take_scores(self._server.scored)
        if self._on_round is not None:
            self._on_round(self._server.completed_rounds, self._loss, self._traffic())

    def _epoch_end(self) -> None:
        self._raise_faults()
        completed = self._server.completed_rounds
        if completed > self._plan.schedule.trained_at:  # a fusion round: no epoch
            self._save(completed)
            return
        mean_loss = float(np.mean(self._losses)) if self._losses else None
        line = self._line(self._plan.schedule.epochs_before(completed))
        self._history.append(line)
        self._losses, self._seen = [], []
        if self._keeper is not None and self._keeper.wants(completed):
            self._save(completed)
        if self._on_epoch is not None:
            self._on_epoch(line)
        if self._callbacks:
            uses = self._log.uses_until(self._plan, completed)
            spent = self._plan.training_run(uses, public_start=self._log.public_start)
            for callback in self._callbacks:
                callback.on_epoch(line, spent)
        if (words := divergence(self._plan, mean_loss, line.epoch)) is not None:
            raise _Diverged(words)

    def _raise_faults(self) -> None:
        """Raise the failure of a party's network, which the party hides from the server, at the end of the epoch."""
        for party in range(self._plan.num_parties):
            error = None if self._owners is None else self._owners.owner_error(party)
            if error is not None:
                raise EncoderError(
                    f"party={party}: its network failed in training: {error}; give one that takes the party's rows"
                ) from error

    def _line(self, epoch: float) -> EpochLine:
        traffic = self._traffic()
        loss = float(np.mean(self._losses)) if self._losses else None
        return EpochLine(
            epoch=_shown(epoch),
            train_loss=loss if loss is None or math.isfinite(loss) else None,
            **self._evaluate(exactly=epoch % evaluated_every(self._plan) == 0 or epoch >= self._plan.num_epochs),
            bytes_up=traffic.bytes_up,
            bytes_down=traffic.bytes_down,
            seconds=round(time.perf_counter() - self._started, 3),
        )

    @property
    def _is_evaluated(self) -> bool:
        return bool(self._history) and self._history[-1].train_accuracy is not None

    def _evaluate_last(self) -> None:
        """Evaluate the weights of the last line exactly, if it was passed over."""
        if self._inspection is not None and self._history and not self._is_evaluated:
            self._history[-1] = dataclasses.replace(self._history[-1], **self._evaluate())

    def _evaluate(self, *, exactly: bool = True) -> dict[str, Any]:
        """Return metrics of the epoch, from the noisy sums that the server saw or from the simulator's exact ones.

        Once there is a fusion model, the simulator draws releases as a deployment would, and the model reads them.
        """
        metrics: dict[str, float] = {}
        if self._seen:
            scores = torch.cat([scores for _, scores in self._seen]).numpy()
            labels = self._data.train_labels[np.concatenate([rows for rows, _ in self._seen])]
            if self._inspection is not None:
                metrics = classification_metrics(scores, labels, prefix="released_train")
            else:
                metrics = self._figures.measure(scores, labels, "train")
        if self._inspection is None or not exactly:
            return metrics
        for split, labels in ((Split.TRAIN, self._data.train_labels), (Split.TEST, self._data.test_labels)):
            if len(labels):
                scores = self._scores(self._inspection.exact_embeddings(split)).numpy()
                metrics |= self._figures.measure(scores, labels, split.value)
        return metrics

    def _scores(self, embeddings: Sequence[npt.NDArray[np.float32]]) -> Tensor:
        """Return class scores of every party's exact embeddings of some rows, for the simulator alone."""
        if self._server.fusion is not None:
            return self._server.read(drawn_release(self._server, embeddings, self._entropy))
        exact, *others = embeddings
        with np.errstate(over="ignore", invalid="ignore"):  # NaN is reported at the end.
            for other in others:
                exact = exact + other
        return self._server.predict(torch.from_numpy(exact))

    def _save(self, completed_rounds: int) -> None:
        """Write the server's own checkpoint; every party has written its own."""
        if self._keeper is None or self._epochs is None:
            return
        self._keeper.notes.update(
            seconds=time.perf_counter() - self._started,
            traffic=self._traffic().to_dict(),
            history=self._epochs.write(self._history),
        )
        self._keeper.save(self._server.run_id, completed_rounds, self._server.state())
        self._log.charge_until(self._next_boundary())

    def _traffic(self) -> Traffic:
        return self._earlier + self._meter.traffic()


def drawn_release(server: Server, embeddings: Sequence[npt.NDArray[np.float32]], entropy: Entropy) -> npt.NDArray[Any]:
    """Return what the server would read of rows that the parties released as predictions: no role sees this draw."""
    plan, rows = server.plan, Round(0, PREDICTION, np.arange(len(embeddings[0])))
    mechanism, vote = plan.mechanism_for(PREDICTION), plan.vote
    made = (each if vote.kind is VoteKind.RAW else vote(each) for each in embeddings)
    return server.values_of([mechanism.payload.encode(mechanism.randomize(each, entropy)) for each in made], rows)


def _shown(epoch: float) -> float:
    """Return whole epochs as whole numbers."""
    return int(epoch) if epoch == int(epoch) else round(epoch, 4)
