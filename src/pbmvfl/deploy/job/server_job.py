"""What one job does at the label holder: joins the parties, agrees with them, works, and writes what came of it.

The files are the label holder's own: checkpoints of the head, the log of releases, the result, its part of the model,
predictions. Nothing here is read from NVFlare.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl._files import PRIVATE_FILE, write_atomically
from pbmvfl.deploy.alignment.runner import LabelRows, align_labels
from pbmvfl.deploy.job.admission import take_up
from pbmvfl.deploy.job.agreement import CHALLENGE_BYTES, Answer, Question, check_answer, facts
from pbmvfl.deploy.link.interface import Channel, ServerLink
from pbmvfl.deploy.monitoring.redaction import printable
from pbmvfl.deploy.site.folder import Home
from pbmvfl.deploy.site.job_spec import Ending, Order, Outcome, Work
from pbmvfl.errors import (
    FederationError,
    LinkError,
    PartyLost,
    PartyRefused,
    PbmvflError,
)
from pbmvfl.federation.checkpoints import Checkpoints
from pbmvfl.federation.model_files import ServerPart, model_digest
from pbmvfl.federation.predictions import Predictions
from pbmvfl.federation.release_log import ReleaseLog
from pbmvfl.federation.results import Result
from pbmvfl.federation.run import Run
from pbmvfl.federation.run_folder import RunFolder
from pbmvfl.federation.serving import serve
from pbmvfl.plan.schedule import Split
from pbmvfl.protocol.server import Server
from pbmvfl.wire.refusals import RefusalCode
from pbmvfl.wire.traffic import Traffic

_log = logging.getLogger(__name__)
#: Seconds that parties have to come to a job, and to make themselves ready.
JOIN_SECONDS, SETUP_SECONDS = 60.0, 120.0
#: Refusals that another job may not meet again: a file in use, a full disk.
_MAY_PASS = (RefusalCode.LEDGER, RefusalCode.FAULT)


@dataclass(kw_only=True)
class Progress:
    """What the label holder may see on the way: the protocol's own noisy sums, and counts."""

    state: str = "joining"
    round: int = 0
    rounds_total: int = 0
    loss: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    alive: tuple[str, ...] = ()
    words: str = ""
    began: float = field(default_factory=time.monotonic)


OnProgress = Callable[[Progress], None]


class _Declared:
    """What owners said of themselves at set-up. There is no door to their logs, nor to exact sums."""

    def __init__(self, public_starts: Sequence[bool]) -> None:
        self._public_starts = public_starts

    def public_starts(self) -> Sequence[bool]:
        return self._public_starts

    def owner_error(self, party: int) -> None:
        del party

    def exact_embeddings(self, split: Split) -> Sequence[npt.NDArray[np.float32]]:
        raise FederationError(f"exact embeddings of {split} rows: nobody sees them in a deployment")


class ServerSite:
    """One job at the label holder."""

    def __init__(
        self,
        home: Home,
        order: Order,
        link: ServerLink,
        *,
        job: str,
        on_progress: OnProgress | None = None,
        why_closed: Callable[[], str] = str,
    ) -> None:
        """`why_closed`: whoever closes the link from outside says why."""
        self._home, self._order, self._link, self._job = home, order, link, job
        self._why_closed = why_closed
        self._on_progress = on_progress
        self._owners = _Declared([False] * len(home.federation.parties))
        self._is_told = False
        self._progress = Progress(rounds_total=0 if order.plan is None else len(order.plan.schedule))

    @property
    def folder(self) -> Path:
        """Where the outcome of the work is written."""
        return outcome_folder(self._home, self._order)

    def run(self) -> Outcome:
        """Do the work. Every ending is written down before anybody is told of it."""
        try:
            take_up(self._home, self._order, datetime.now().astimezone())
            self._link.join(timeout=JOIN_SECONDS)
            outcome = self._work()
        except PartyRefused as error:
            ending = Ending.FAILED if error.code in _MAY_PASS else Ending.REFUSED
            outcome = self._outcome(ending, f"{self._name(error.party)} refused: {error.words}")
        except PartyLost as error:
            lost = "; ".join(f"{self._name(party)}: {words}" for party, words in sorted(error.reasons.items()))
            outcome = self._outcome(Ending.FAILED, f"lost {lost}")
        except LinkError as error:
            outcome = self._outcome(Ending.FAILED, self._why_closed() or str(error))
        except FederationError as error:
            outcome = self._outcome(Ending.REFUSED, str(error))
        except PbmvflError as error:  # of its own files: what to do stands in the words, and where is said here
            outcome = self._outcome(Ending.REFUSED, f"{self._home.name}: {error}")
        except Exception as error:
            _log.exception("the label holder's part failed")
            outcome = self._outcome(Ending.FAILED, f"{type(error).__name__} at {self._home.name}; its log says more")
        if not self._is_told:
            self._say_end(outcome, completed=0)
        outcome.write(self.folder)
        self._tell(state=str(outcome.ending), words=outcome.words)
        return outcome

    def _outcome(self, ending: Ending, words: str = "") -> Outcome:
        return Outcome(job=self._job, ending=ending, words=words)

    def _name(self, party: int) -> str:
        return self._home.federation.parties[party]

    def _tell(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self._progress, name, value)
        self._progress.alive = tuple(self._link.alive)
        if self._on_progress is not None:
            self._on_progress(self._progress)

    def _work(self) -> Outcome:
        match self._order.work:
            case Work.ALIGN:
                return self._align()
            case Work.TRAIN:
                return self._train()
            case Work.PREDICT:
                return self._predict()

    # --- before a session ---

    def _agree(self, rows: LabelRows | None) -> None:
        """Ask every party, with a challenge of its own, whether it means the same."""
        self._tell(state="set up")
        mine = facts(self._home, self._order, rows=0 if rows is None else rows.num_rows)
        names = self._home.federation.parties
        challenges = {index: os.urandom(CHALLENGE_BYTES) for index in range(len(names))}
        questions = {
            index: Question(facts=mine, challenge=challenge).to_bytes() for index, challenge in challenges.items()
        }
        answers = self._link.ask(questions, channel=Channel.SETUP, timeout=SETUP_SECONDS)
        public = [False] * len(names)
        for index, received in sorted(answers.received.items()):
            proof = b"" if rows is None else rows.proof(challenges[index], names[index])
            answer = Answer.from_bytes(received)
            check_answer(answer, mine=mine, server=self._home.name, party=names[index], proof=proof)
            public[index] = answer.public_start
        if answers.lost:
            raise PartyLost(answers.lost)
        self._owners = _Declared(public)

    def _say_end(self, outcome: Outcome, *, completed: int) -> list[str]:
        """Tell everybody who is still there; the words of those who could not keep their part."""
        self._is_told = True
        said = {"ending": str(outcome.ending), "words": outcome.words, "completed_rounds": completed}
        body = json.dumps(said).encode()
        alive = [index for index, name in enumerate(self._link.parties) if name in self._link.alive]
        faults = []
        try:
            answers = self._link.ask(dict.fromkeys(alive, body), channel=Channel.END, timeout=30)
        except PbmvflError as error:
            return [str(error)]
        for index, answer in sorted(answers.received.items()):
            words = _why_not_kept(answer)
            if words:
                faults.append(f"{self._name(index)}: {words}")
        faults += [f"{self._name(index)}: {words}" for index, words in sorted(answers.lost.items())]
        faults += [f"{name}: not connected" for name in self._link.parties if name not in self._link.alive]
        return faults

    # --- alignment ---

    def _align(self) -> Outcome:
        self._agree(None)
        self._tell(state="aligning")

        def progress(done: int, total: int) -> None:
            self._tell(round=done, rounds_total=total)

        found = align_labels(self._home, self._order.alignment, self._link, progress)
        outcome = self._outcome(Ending.DONE, f"{found.num_rows} rows in common")
        faults = self._say_end(outcome, completed=0)
        return outcome if not faults else self._outcome(Ending.FAILED, "; ".join(faults))

    # --- training ---

    def _train(self) -> Outcome:
        order, home = self._order, self._home
        assert order.plan is not None
        plan, run_id = order.plan, bytes.fromhex(order.run_id)
        rows = LabelRows.load(home, order.alignment)
        self._agree(rows)
        result = self._trained_before()
        if result is None:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            log = ReleaseLog(self.folder, plan_hash=plan.hash.hex())
            try:
                result, server = self._fit(log, rows, run_id)
            finally:
                log.close()
            self._keep(result, server, rows)
        ending = Ending.STOPPED if result.stopped else Ending.DONE
        outcome = self._outcome(ending, result.stopped)
        completed = plan.schedule.trained_at if not result.stopped else len(plan.schedule)
        faults = self._say_end(outcome, completed=completed)
        if faults:
            return self._outcome(Ending.FAILED, "trained, but not kept by " + "; ".join(faults))
        return outcome

    def _trained_before(self) -> Result | None:
        """What an earlier job came to, if it reached the plan's end and only the parties' parts were not kept."""
        path = self.folder / "result.json"
        result = Result.read(path) if path.is_file() else None
        return None if result is None or result.stopped else result

    def _fit(self, log: ReleaseLog, rows: LabelRows, run_id: bytes) -> tuple[Result, Server]:
        plan = self._order.plan
        assert plan is not None
        keeper = Checkpoints(folder=self.folder / "checkpoints", plan=plan)
        server = Server(plan, train_labels=rows.train_labels, run_id=run_id, keeper=keeper)

        def on_round(completed: int, loss: float, traffic: Traffic) -> None:
            known = None if loss != loss else loss
            self._tell(round=completed, loss=known, bytes_up=traffic.bytes_up, bytes_down=traffic.bytes_down)

        self._tell(state="training")
        run = Run(
            server,
            self._link,
            rows,
            log=log,
            keeper=keeper,
            inspection=None,
            owners=self._owners,
            noise_is_seeded=False,
            taps=[],
            on_round=on_round,
            on_epoch=None,
        )
        return run.finish(), server

    def _keep(self, result: Result, server: Server, rows: LabelRows) -> None:
        """The label holder's part of the model, then the result: what says that training is over comes last."""
        plan = server.plan
        ServerPart(
            model=model_digest(plan, server.run_id),
            plan=plan,
            dataset=self._order.alignment,
            state=server.part_state(),
            party_names=self._home.federation.parties,
            class_names=rows.class_names,
            label=rows.label,
        ).save(self._home.model(self._order.run))
        RunFolder(self.folder).write_result(replace(result, model=None))

    # --- predicting ---

    def _predict(self) -> Outcome:
        order = self._order
        assert order.plan is not None
        rows = LabelRows.load(self._home, order.alignment)
        part = ServerPart.load(self._home.model(order.run))
        if order.plan.model != part.model:
            raise FederationError(
                f"run={order.run!r}: the order is for model {order.plan.model[:8]}, not {part.model[:8]}"
            )
        self._agree(rows)
        self._tell(state="predicting")
        began = time.monotonic()
        served = serve(
            order.plan,
            trained=dict(part.state),
            transport=self._link,
            owners=self._owners,
            on_round=lambda done: self._tell(round=done),
        )
        found = Predictions(
            ids=tuple(rows.ids),
            class_names=part.class_names,
            scores_NK=served.scores_NK,
            plan=order.plan,
            traffic=served.traffic,
            seconds=time.monotonic() - began,
            stopped=served.stopped,
            public_start=served.public_start,
            true_labels=rows.labels_for(part.class_names),
        )
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found.write(self.folder / "predictions.parquet")
        write_atomically(self.folder / "summary.json", json.dumps(_summary(found)) + "\n", mode=PRIVATE_FILE)
        outcome = self._outcome(Ending.STOPPED if served.stopped else Ending.DONE, served.stopped)
        faults = self._say_end(outcome, completed=0)
        if faults:
            _log.warning("predicted, but %s", "; ".join(faults))
        return outcome


def outcome_folder(home: Home, order: Order) -> Path:
    """Where the label holder keeps what came of an order."""
    if order.work is Work.ALIGN:
        return home.request(order.alignment)
    if order.work is Work.PREDICT:
        return home.run(order.run) / f"asked-{order.alignment}"
    return home.run(order.run)


def _why_not_kept(answer: bytes) -> str:
    """A party's words at the end, fit to be printed; empty if it kept its part."""
    try:
        said = json.loads(answer)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        return "no answer that can be read"
    if said.get("kept") is True:
        return ""
    return printable(str(said.get("words", "")), 400) or "it did not say why"


def _summary(found: Predictions) -> dict[str, Any]:
    """What was predicted, without any row."""
    known = found.is_known
    shown: dict[str, Any] = {
        "rows": len(found),
        "predicted": int(known.sum()),
        "classes": {name: int((found.numbers == k).sum()) for k, name in enumerate(found.class_names)},
        "stopped": found.stopped,
        "bytes_up": found.traffic.bytes_up,
        "bytes_down": found.traffic.bytes_down,
        "seconds": round(found.seconds, 3),
    }
    if found.true_labels is not None and known.any():
        shown["metrics"] = found.metrics()
        shown["majority_rate"] = float(np.bincount(found.true_labels[known]).max() / known.sum())
    return shown
