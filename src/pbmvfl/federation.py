"""Federation: all roles in one place, with real masks and real noise. The embedded default.

Each party's columns go to that party's state machine alone and the labels to the server's; what passes between them is
the bytes of the wire. Only the simulator's evaluation looks at exact sums, and it says so.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.encoders import build_encoder, check_distinct
from pbmvfl.errors import BudgetExceeded, EncoderError, LedgerError, PlanError
from pbmvfl.metrics import classification_metrics
from pbmvfl.plan import Plan
from pbmvfl.plan_groups import Evaluation
from pbmvfl.runs.checkpoints import Progress, load_progress, load_weights, save_checkpoint
from pbmvfl.runs.driver import Meter, Tap, drive
from pbmvfl.runs.release_log import SessionLog
from pbmvfl.runs.results import Result
from pbmvfl.schedule import Round, Split
from pbmvfl.secagg.keys import Identity
from pbmvfl.server import Server
from pbmvfl.transport.links import InProcessLink, PartyInputs, PartyLink, ProcessLink
from pbmvfl.wire.traffic import Traffic

#: Called after every round with (completed rounds, the last loss, traffic so far).
OnRound = Callable[[int, float, Traffic], None]
#: Called after every epoch with its line of the history.
OnEpoch = Callable[[dict[str, Any]], None]


class Parties(StrEnum):
    """Where the parties run."""

    IN_PROCESS = "in-process"
    PROCESSES = "processes"

    @classmethod
    def named(cls, name: str) -> Parties:
        """As an option spells it."""
        if name not in tuple(cls):
            raise PlanError(f"parties={name!r} is not one of {', '.join(cls)}")
        return cls(name)


class Federation:
    """A whole federation. `fit` trains it and returns what came out and what it cost."""

    def __init__(
        self,
        plan: Plan,
        *,
        encoders: Sequence[nn.Module] | None = None,
        parties: Parties | str = Parties.IN_PROCESS,
    ) -> None:
        self.plan = plan
        self._encoders = encoders
        self._first_weights: list[dict[str, Any]] = []
        self._parties = Parties.named(parties)
        if encoders is not None:
            if len(encoders) != plan.num_parties:
                raise PlanError(f"{len(encoders)} encoders for num_parties={plan.num_parties}")
            if self._parties is Parties.PROCESSES:
                raise PlanError("parties=processes builds the plan's encoders; own networks need parties=in-process")
            check_distinct(encoders)
            self._first_weights = [copy.deepcopy(encoder.state_dict()) for encoder in encoders]
        # Tests only: known bytes instead of secret ones, and a look at every message.
        self._known_randomness: bytes | None = None
        self._taps: list[Tap] = []

    def fit(
        self,
        data: VerticalDataset,
        *,
        checkpoints: Path | str | None = None,
        checkpoint_every: int = 1,
        sessions: Path | str | None = None,
        ledger: Path | str | None = None,
        on_round: OnRound | None = None,
        on_epoch: OnEpoch | None = None,
    ) -> Result:
        """Train to the end of the plan, from the checkpoint in `checkpoints` if there is one.

        A checkpoint is written there after every `checkpoint_every` epochs and at the end; the count of releases in
        the folder `sessions`, by default beside it. With `ledger`, a folder, each party keeps its own book there and
        may end the run at a limit of its owner; the result says so.
        """
        checkpoints, sessions, ledger = (
            None if folder is None else Path(folder) for folder in (checkpoints, sessions or checkpoints, ledger)
        )
        self.check(data)
        if isinstance(checkpoint_every, bool) or not isinstance(checkpoint_every, int) or checkpoint_every < 1:
            raise PlanError(f"checkpoint_every={checkpoint_every!r} must be an integer of at least 1, in epochs")
        if checkpoints is not None:
            load_progress(checkpoints, self.plan)  # names what differs in another plan; the log has only hashes
        for encoder, first in zip(self._encoders or (), self._first_weights, strict=True):
            encoder.load_state_dict(first)  # a second fit starts where the first one did
        with contextlib.ExitStack() as opened:
            run = _Run(self, data, checkpoints, sessions, checkpoint_every, ledger, on_round, on_epoch, opened)
            return run.finish()

    def check(self, data: VerticalDataset) -> None:
        """Refuse a plan that cannot be trained on this data, before anything is written."""
        if self.plan.noise_multiplier:
            raise PlanError(
                f"noise_multiplier={self.plan.noise_multiplier:g}: such a plan can be accounted for, but this version "
                "does not train with noisy weight updates yet; plan with accounting=paper, or set noise_multiplier=0"
            )
        for name in ("num_parties", "num_samples", "num_classes", "num_test_samples"):
            mine, given = getattr(self.plan, name), getattr(data, name)
            if mine != given:
                raise PlanError(f"{name}={mine} in the plan, {given} in the data; make the plan with Plan.for_data")
        if self._encoders is None:
            for features in {(part.shape[1:], part.dtype): part for part in data.train_features}.values():
                _check_encoder_takes(self.plan, features)


class _Run:
    """One call of `fit`: a server, its links, and what is kept about them."""

    def __init__(
        self,
        federation: Federation,
        data: VerticalDataset,
        checkpoints: Path | None,
        sessions: Path | None,
        checkpoint_every: int,
        ledger: Path | None,
        on_round: OnRound | None,
        on_epoch: OnEpoch | None,
        opened: contextlib.ExitStack,
    ) -> None:
        self._plan = federation.plan
        self._data = data
        self._checkpoints = checkpoints
        self._checkpoint_every = checkpoint_every
        self._on_round, self._on_epoch = on_round, on_epoch
        self._sessions = SessionLog(sessions, plan_hash=self._plan.hash.hex(), moved_from=checkpoints)
        opened.callback(self._sessions.close)
        # Only now: whoever has the log is alone with the checkpoints.
        progress = load_progress(checkpoints, self._plan) if checkpoints is not None else None
        if progress is not None:
            self._sessions.must_cover(progress.completed_rounds)
        if ledger is not None:
            _check_ledgers(ledger, self._plan, released=bool(self._sessions.records))
        self._started = time.perf_counter() - (progress.seconds if progress else 0.0)
        self._earlier = Traffic(**progress.traffic) if progress else Traffic()
        self._history: list[dict[str, Any]] = list(progress.history) if progress else []
        self._noise_is_seeded = federation._known_randomness is not None
        # Scores of test rows are not kept: a run that ended among them asks for all of them again.
        first_round = min(progress.completed_rounds, self._plan.schedule.trained_at) if progress else 0
        self._server = Server(
            self._plan,
            train_labels=data.train_labels,
            run_id=bytes.fromhex(progress.run_id) if progress else None,
            first_round=first_round,
        )
        if federation._known_randomness is not None:
            self._server.run_id = federation._known_randomness.ljust(8, b"\0")[:8]
        self._server.on_joint_round = self._joint_round
        self._server.on_prediction = self._prediction
        self._meter = Meter(taps=list(federation._taps))
        self._is_open = False
        self._loss = float("nan")
        self._losses: list[float] = []
        self._seen: list[tuple[Tensor, Tensor]] = []  # this epoch's noisy scores, for evaluation=released
        #: Rows and noisy scores of this pass over the test rows, as far as it is.
        self._predicted: list[tuple[npt.NDArray[np.int64], Tensor]] = []
        links = _open_links(federation, data, first_round, ledger)
        self._links = [opened.enter_context(_closed_at_the_end(link)) for link in links]
        if progress is not None and checkpoints is not None:
            server, parties = load_weights(checkpoints, self._plan)
            self._server.load_state(server)
            for link, state in zip(self._links, parties, strict=True):
                link.load_state(state)

    def finish(self) -> Result:
        stopped = ""
        try:
            drive(
                self._server,
                self._links,
                self._meter,
                on_open=self._open,
                on_round=self._round,
                on_epoch_end=self._epoch_end,
            )
            self._sessions.charge_until(self._server.completed_rounds)
        except BudgetExceeded as refusal:
            stopped = str(refusal)
            self._stop_early()
        except KeyboardInterrupt:
            if self._is_open:  # what was charged ahead and never asked for is given back; the round under way counts
                asked = self._server.completed_rounds + 1
                self._sessions.charge_until(min(asked, self._sessions.records[-1].charged_until))
            raise
        kept = ("train_accuracy", "test_accuracy", "train_auprc", "test_auprc", "train_loss")
        last = self._history[-1] if self._history else {}
        return Result(
            plan=self._plan,
            metrics={name: last[name] for name in kept if last.get(name) is not None},
            history=self._history,
            traffic=self._traffic(),
            seconds=time.perf_counter() - self._started,
            sessions=tuple(self._sessions.records),
            row_uses=self._sessions.uses(self._plan),
            noise_is_seeded=self._sessions.noise_is_seeded,
            stopped=stopped,
        )

    def _stop_early(self) -> None:
        """A party refused a round. Every network has taken the step before it, so what there is, is complete."""
        completed = self._server.completed_rounds
        if completed < self._plan.schedule.trained_at and (self._losses or not self._history):
            self._history.append(self._history_line(self._plan.schedule.epochs_before(completed)))
        if self._checkpoints is not None:
            self._save(self._checkpoints)
        # The refused round may have left the other parties, masked; it counts.
        self._sessions.charge_until(completed + 1)

    # --- what happens on the way ---

    def _open(self) -> None:
        assert self._server.session is not None
        self._is_open = True
        self._sessions.open(
            self._server.session.id.hex(),
            first_round=self._server.completed_rounds,
            until=self._next_boundary(),
            noise_is_seeded=self._noise_is_seeded,
        )

    def _next_boundary(self) -> int:
        """The round after which the next checkpoint comes; until there, releases are charged ahead."""
        epoch = int(self._plan.schedule.epochs_before(self._server.completed_rounds))
        epoch += self._checkpoint_every - epoch % self._checkpoint_every
        return self._plan.schedule.end_of_epoch(epoch)

    def _joint_round(self, loss: float, scores: Tensor, labels: Tensor) -> None:
        self._loss = loss
        self._losses.append(loss)
        if self._plan.evaluation is Evaluation.RELEASED:
            self._seen.append((scores, labels))

    def _prediction(self, current: Round, scores: Tensor) -> None:
        """A whole pass over the test rows is an evaluation of the networks as they are; other scores are nobody's."""
        if current.kind.split is not Split.TEST or self._plan.evaluation is not Evaluation.RELEASED:
            return
        first, end = self._plan.schedule.pass_of(current.number)
        if current.number == first:
            self._predicted = []
        self._predicted.append((current.rows, scores))
        if current.number == end - 1 and len(self._predicted) == end - first and self._history:
            labels = self._data.test_labels[np.concatenate([rows for rows, _ in self._predicted])]
            found = torch.cat([scores for _, scores in self._predicted]).numpy()
            self._history[-1].update(classification_metrics(found, labels, prefix="test"))

    def _round(self) -> None:
        if self._on_round is not None:
            self._on_round(self._server.completed_rounds, self._loss, self._traffic())

    def _epoch_end(self) -> None:
        epoch = round(self._plan.schedule.epochs_before(self._server.completed_rounds))
        line = self._history_line(epoch)
        self._history.append(line)
        self._losses, self._seen = [], []
        if self._checkpoints is not None and (epoch % self._checkpoint_every == 0 or epoch == self._plan.num_epochs):
            self._save(self._checkpoints)
        if self._on_epoch is not None:
            self._on_epoch(line)

    def _history_line(self, epoch: float) -> dict[str, Any]:
        traffic = self._traffic()
        return {
            "epoch": int(epoch) if epoch == int(epoch) else round(epoch, 4),
            **({"train_loss": float(np.mean(self._losses))} if self._losses else {}),
            **self._evaluate(),
            "bytes_up": traffic.bytes_up,
            "bytes_down": traffic.bytes_down,
            "seconds": round(time.perf_counter() - self._started, 3),
        }

    def _evaluate(self) -> dict[str, float]:
        if self._plan.evaluation is Evaluation.RELEASED:
            if not self._seen:
                return {}
            scores = torch.cat([scores for scores, _ in self._seen]).numpy()
            labels = torch.cat([labels for _, labels in self._seen]).numpy()
            return classification_metrics(scores, labels, prefix="train")
        metrics: dict[str, float] = {}
        for split, labels in (("train", self._data.train_labels), ("test", self._data.test_labels)):
            if len(labels):
                exact_sum = self._links[0].exact_embeddings(split)
                for link in self._links[1:]:
                    exact_sum = exact_sum + link.exact_embeddings(split)
                scores = self._server.predict(torch.from_numpy(exact_sum)).numpy()
                metrics |= classification_metrics(scores, labels, prefix=split)
        return metrics

    def _save(self, folder: Path) -> None:
        progress = Progress(
            completed_rounds=self._server.completed_rounds,
            run_id=self._server.run_id.hex(),
            seconds=time.perf_counter() - self._started,
            traffic=self._traffic().to_dict(),
            history=self._history,
        )
        states = [link.state() for link in self._links]
        save_checkpoint(folder, self._plan, progress, server=self._server.state(), parties=states)
        self._sessions.charge_until(self._next_boundary())

    def _traffic(self) -> Traffic:
        return self._earlier + self._meter.traffic()


def _check_encoder_takes(plan: Plan, features: npt.NDArray[Any]) -> None:
    """Build the plan's encoder and pass one row of zeros through it."""
    shape = features.shape[1:]
    kind = torch.from_numpy(features[:0]).dtype
    try:
        with torch.no_grad():
            encoder = build_encoder(plan, index=0, input_shape=shape).eval()
            encoder(torch.zeros((1, *shape), dtype=kind))
    except (RuntimeError, ValueError) as error:
        if isinstance(error, EncoderError):
            raise
        raise EncoderError(
            f"encoder={plan.encoder} cannot take rows of shape={tuple(shape)} and type {kind}: {error}; "
            "choose another encoder"
        ) from error


def make_ledger_folder(folder: Path) -> None:
    """Make the folder of the parties' ledgers, or refuse what cannot be one, before anything is released."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LedgerError(
            f"ledger={str(folder)!r} is not a folder and cannot be made one ({error.strerror}); give another folder"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise LedgerError(f"ledger={str(folder)!r} cannot be written to; give another folder, or allow writing there")


def _ledger_of(folder: Path, index: int) -> Path:
    return folder / f"party-{index}.sqlite"


def _check_ledgers(folder: Path, plan: Plan, *, released: bool) -> None:
    """A run that has released something goes on with the books that know of it."""
    if not released:
        make_ledger_folder(folder)
        return
    for index in range(plan.num_parties):
        if not (path := _ledger_of(folder, index)).is_file():
            raise LedgerError(
                f"ledger={str(path)!r} does not exist, but this run has released rounds, and a new ledger would not "
                "know of them; put it back where it was, or start a new run"
            )


def _open_links(
    federation: Federation, data: VerticalDataset, first_round: int, ledger: Path | None
) -> Iterator[PartyLink]:
    """One link after the other: if one fails, those before it are in the hands of somebody who closes them."""
    plan = federation.plan
    identities = [Identity.generate() for _ in range(plan.num_parties)]
    if federation._known_randomness is not None:
        identities = [Identity.from_private_bytes(bytes([i + 1]) * 32) for i in range(plan.num_parties)]
    pinned = tuple(identity.public for identity in identities)
    for index, identity in enumerate(identities):
        inputs = PartyInputs(
            plan=plan,
            index=index,
            identity=identity.private_bytes(),
            identities=pinned,
            train_features=data.train_features[index],
            test_features=data.test_features[index] if data.num_test_samples else None,
            first_round=first_round,
            known_randomness=federation._known_randomness,
            ledger=None if ledger is None else _ledger_of(ledger, index),
            dataset=data.name,
            # Only a ledger asks for them, and a party in a process of its own gets a copy.
            train_ids=None if ledger is None else data.train_ids,
            test_ids=None if ledger is None else data.test_ids,
        )
        if federation._parties is Parties.PROCESSES:
            yield ProcessLink(inputs)
        else:
            yield InProcessLink(inputs, federation._encoders[index] if federation._encoders else None)


@contextlib.contextmanager
def _closed_at_the_end(link: PartyLink) -> Iterator[PartyLink]:
    """An error that is on its way stays the one that is raised, whatever closing adds to it."""
    try:
        yield link
    except BaseException as error:
        try:
            link.close()
        except Exception as later:
            error.add_note(f"Closing a party failed after it: {later}")
        raise
    link.close()
