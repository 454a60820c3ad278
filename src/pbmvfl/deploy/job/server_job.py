"""Label holder's side of one job: waits for the parties, agrees with them, works, and writes the result.

All files are the label holder's own: checkpoints of the head, the log of releases, the result, its part of the model,
predictions. Nothing here is read from NVFlare.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl._files import PRIVATE_FILE, write_atomically
from pbmvfl.deploy.alignment.runner import LabelRows, align_labels
from pbmvfl.deploy.job.admission import PRIVATE_REASON, accept_job
from pbmvfl.deploy.job.agreement import CHALLENGE_BYTES, Answer, Question, check_answer, facts
from pbmvfl.deploy.link.interface import Channel, ServerLink
from pbmvfl.deploy.monitoring.redaction import printable
from pbmvfl.deploy.monitoring.status import State
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import Ending, JobResult, JobSpec, Work
from pbmvfl.deploy.site.policy_file import PolicyFile, own_ledger
from pbmvfl.errors import (
    AnswersError,
    BudgetExceeded,
    CheckpointError,
    FederationError,
    LedgerError,
    LinkError,
    PartyLost,
    PartyRefused,
    PbmvflError,
    PolicyFileError,
)
from pbmvfl.federation.checkpoints import Checkpoints
from pbmvfl.federation.drawn_labels import LabelHolder, keep_draw, with_true_labels
from pbmvfl.federation.model_files import ServerPart, model_digest
from pbmvfl.federation.predictions import Predictions
from pbmvfl.federation.release_log import ReleaseLog
from pbmvfl.federation.results import Result
from pbmvfl.federation.run import Run
from pbmvfl.federation.run_folder import RunFolder
from pbmvfl.federation.serving import serve
from pbmvfl.plan.round_kinds import Split
from pbmvfl.protocol.server import Server
from pbmvfl.wire.refusals import RefusalCode
from pbmvfl.wire.traffic import Traffic

_log = logging.getLogger(__name__)
#: Seconds that parties have to join a job, and to get ready.
JOIN_SECONDS, SETUP_SECONDS = 60.0, 120.0
#: Refusals that may not recur in another job: a file in use, a full disk.
_MAY_PASS = (RefusalCode.LEDGER, RefusalCode.FAULT)


#: Called with changed fields of the site's status: figures of what was released, and counts.
OnProgress = Callable[..., None]


class _DeclaredStarts:
    """Parties' own declarations at set-up. It gives no access to their logs or to exact sums."""

    def __init__(self, public_starts: Sequence[bool]) -> None:
        self._public_starts = public_starts

    def public_starts(self) -> Sequence[bool]:
        return self._public_starts

    def owner_error(self, party: int) -> None:
        del party

    def exact_embeddings(self, split: Split) -> Sequence[npt.NDArray[np.float32]]:
        raise FederationError(f"exact embeddings of {split} rows: nobody sees them in a deployment")


@dataclass(eq=False)
class ServerSite:
    """One job at the label holder."""

    site_folder: SiteFolder
    spec: JobSpec
    link: ServerLink
    _: KW_ONLY
    #: Id of the job.
    job: str
    #: Called at every change of the status.
    on_progress: OnProgress | None = None
    #: Returns the reason if the link was closed from outside, else "".
    why_closed: Callable[[], str] = str

    def __post_init__(self) -> None:
        self._owners = _DeclaredStarts([False] * len(self.site_folder.federation.parties))
        self._end_is_sent = False

    @property
    def folder(self) -> Path:
        """Folder of the job's result."""
        return result_folder(self.site_folder, self.spec)

    def run(self) -> JobResult:
        """Do the work. Every result is written before it is reported."""
        try:
            accept_job(self.site_folder, self.spec, datetime.now().astimezone())
            self.link.join(timeout=JOIN_SECONDS)
            job_result = self._work()
        except PartyRefused as error:
            ending = Ending.FAILED if error.code in _MAY_PASS else Ending.REFUSED
            job_result = self._job_result(ending, f"{self._name(error.party)} refused: {error.words}")
        except PartyLost as error:
            lost = "; ".join(f"{self._name(party)}: {words}" for party, words in sorted(error.reasons.items()))
            job_result = self._job_result(Ending.FAILED, f"lost {lost}")
        except LinkError as error:
            job_result = self._job_result(Ending.FAILED, self.why_closed() or str(error))
        except FederationError as error:
            job_result = self._job_result(Ending.REFUSED, str(error))
        except PbmvflError as error:  # about its own files: the text has what to do, and this adds the site
            job_result = self._job_result(Ending.REFUSED, f"{self.site_folder.name}: {error}")
        except Exception as error:
            _log.exception("the label holder's part failed")
            job_result = self._job_result(
                Ending.FAILED, f"{type(error).__name__} at {self.site_folder.name}; its log says more"
            )
        if not self._end_is_sent:
            self._send_end(job_result, completed=0)
        job_result.write(self.folder)
        return job_result

    def _job_result(self, ending: Ending, words: str = "") -> JobResult:
        return JobResult(job=self.job, ending=ending, words=words)

    def _name(self, party: int) -> str:
        return self.site_folder.federation.parties[party]

    def _report_progress(self, **changes: Any) -> None:
        if self.on_progress is not None:
            self.on_progress(parties_alive=tuple(self.link.alive), **changes)

    def _work(self) -> JobResult:
        work, completed = self.spec.work, 0
        rows = None if work is Work.ALIGN else LabelRows.load(self.site_folder, self.spec.alignment)
        self._agree(rows)
        if rows is None:
            job_result = self._job_result(Ending.DONE, f"{self._align()} rows in common")
        else:
            stopped = self._train(rows) if work is Work.TRAIN else self._predict(rows)
            job_result = self._job_result(Ending.STOPPED if stopped else Ending.DONE, stopped)
            schedule = self.spec.run_plan.schedule
            completed = len(schedule) if stopped else schedule.settled_at
        faults = "; ".join(self._send_end(job_result, completed=completed))
        if faults and work is Work.PREDICT:
            _log.warning("predicted, but %s", faults)
        elif faults:
            return self._job_result(Ending.FAILED, f"trained, but not kept by {faults}" if rows is not None else faults)
        return job_result

    # --- before a session ---

    def _agree(self, rows: LabelRows | None) -> None:
        """Compare facts with every party, each with a challenge of its own."""
        self._report_progress(state=State.HANDSHAKE)
        mine = facts(self.site_folder, self.spec, rows=0 if rows is None else rows.num_rows)
        names = self.site_folder.federation.parties
        challenges = {index: os.urandom(CHALLENGE_BYTES) for index in range(len(names))}
        questions = {
            index: Question(facts=mine, challenge=challenge).to_bytes() for index, challenge in challenges.items()
        }
        answers = self.link.ask(questions, channel=Channel.SETUP, timeout=SETUP_SECONDS)
        public = [False] * len(names)
        for index, received in sorted(answers.received.items()):
            proof = b"" if rows is None else rows.proof(challenges[index], names[index])
            answer = Answer.from_bytes(received)
            check_answer(answer, mine=mine, server=self.site_folder.name, party=names[index], proof=proof)
            public[index] = answer.public_start
        if answers.lost:
            raise PartyLost(answers.lost)
        self._owners = _DeclaredStarts(public)

    def _send_end(self, job_result: JobResult, *, completed: int) -> list[str]:
        """Tell all connected parties the end; return the faults of those that could not save their part."""
        self._end_is_sent = True
        said = {"ending": str(job_result.ending), "words": job_result.words, "completed_rounds": completed}
        body = json.dumps(said).encode()
        alive = [index for index, name in enumerate(self.link.parties) if name in self.link.alive]
        faults = []
        try:
            answers = self.link.ask(dict.fromkeys(alive, body), channel=Channel.END, timeout=30)
        except PbmvflError as error:
            return [str(error)]
        for index, answer in sorted(answers.received.items()):
            words = _why_not_kept(answer)
            if words:
                faults.append(f"{self._name(index)}: {words}")
        faults += [f"{self._name(index)}: {words}" for index, words in sorted(answers.lost.items())]
        faults += [f"{name}: not connected" for name in self.link.parties if name not in self.link.alive]
        return faults

    # --- alignment ---

    def _align(self) -> int:
        """Align, and return the number of common rows."""
        self._report_progress(state=State.ALIGNING)

        def progress(done: int, total: int) -> None:
            self._report_progress(round=done, rounds_total=total)

        return align_labels(self.site_folder, self.spec.alignment, self.link, progress).num_rows

    # --- training ---

    def _train(self, rows: LabelRows) -> str:
        """Train, and return the reason for an early end, or ""."""
        result = self._trained_before()
        if result is None:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with contextlib.closing(ReleaseLog(self.folder, plan_hash=self.spec.run_plan.hash.hex())) as log:
                result, server = self._fit(log, rows)
            self._save_model(result, server, rows)
        return result.stopped

    def _trained_before(self) -> Result | None:
        """Return an earlier job's result if only the parties' parts are missing, else None."""
        path = self.folder / "result.json"
        result = Result.read(path) if path.is_file() else None
        return None if result is None or result.stopped else result

    def _fit(self, log: ReleaseLog, rows: LabelRows) -> tuple[Result, Server]:
        plan = self.spec.run_plan
        keeper = Checkpoints(folder=self.folder / "checkpoints", plan=plan)
        labels = self._labels(log, rows, keeper)
        server = Server(plan, train_labels=labels, run_id=bytes.fromhex(self.spec.run_id), keeper=keeper)

        def on_round(completed: int, loss: float, traffic: Traffic) -> None:
            known = None if loss != loss else loss
            self._report_progress(round=completed, loss=known, bytes_up=traffic.bytes_up, bytes_down=traffic.bytes_down)

        self._report_progress(state=State.TRAINING)
        run = Run(
            server,
            self.link,
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

    def _labels(self, log: ReleaseLog, rows: LabelRows, keeper: Checkpoints) -> npt.NDArray[np.int64]:
        """Return the labels for everything that a party can see: drawn ones, unless the plan uses labels in clear.

        What store and ledger say is the label holder's own: its log has it, and the parties learn only that it refused.
        """
        response, resumes = self.spec.run_plan.label_response, bool(log.records)
        if response is None:
            return rows.train_labels
        try:
            with own_ledger(self.site_folder, PolicyFile.read(self.site_folder)):
                pass  # limits of the policy hold from here on
            drawn = label_holder_at(self.site_folder, rows).draw(response, rows.train_labels, resumes=resumes)
            keep_draw(keeper.folder, drawn.labels_N, resumes=resumes)
        except (AnswersError, BudgetExceeded, CheckpointError, LedgerError, PolicyFileError) as error:
            _log.error("labels were not drawn: %s", error)
            raise FederationError(f"{self.site_folder.name}: {PRIVATE_REASON}") from error
        if drawn.notes:
            _log.warning("stored labels are like other rows', or most labels were changed since they were drawn")
        return with_true_labels(self.spec.run_plan, drawn.labels_N, rows.train_labels)

    def _save_model(self, result: Result, server: Server, rows: LabelRows) -> None:
        """Save the label holder's part of the model, then the result, which marks training as complete."""
        plan = server.plan
        ServerPart(
            model=model_digest(plan, server.run_id),
            plan=plan,
            dataset=self.spec.alignment,
            state=server.part_state(),
            party_names=self.site_folder.federation.parties,
            class_names=rows.class_names,
            label=rows.label,
        ).save(self.site_folder.model(self.spec.run))
        RunFolder(self.folder).write_result(replace(result, model=None))

    # --- predicting ---

    def _predict(self, rows: LabelRows) -> str:
        """Predict, and return the reason for an early end, or ""."""
        spec, plan = self.spec, self.spec.run_plan
        part = ServerPart.load(self.site_folder.model(spec.run))
        if plan.model != part.model:
            raise FederationError(f"run={spec.run!r}: the order is for model {plan.model[:8]}, not {part.model[:8]}")
        self._report_progress(state=State.PREDICTING)
        began = time.monotonic()
        served = serve(
            plan,
            trained=dict(part.state),
            transport=self.link,
            owners=self._owners,
            on_round=lambda done: self._report_progress(round=done),
        )
        found = Predictions(
            ids=tuple(rows.ids),
            class_names=part.class_names,
            scores_NK=served.scores_NK,
            plan=plan,
            traffic=served.traffic,
            seconds=time.monotonic() - began,
            stopped=served.stopped,
            public_start=served.public_start,
            true_labels=rows.labels_for(part.class_names),
        )
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found.write(self.folder / "predictions.parquet")
        write_atomically(self.folder / "summary.json", json.dumps(_summary(found)) + "\n", mode=PRIVATE_FILE)
        return served.stopped


def label_holder_at(site_folder: SiteFolder, rows: LabelRows) -> LabelHolder:
    """Return the label holder's side of a draw of aligned rows: its own names, store and ledger."""
    data = PolicyFile.read(site_folder).data
    return LabelHolder(
        dataset=data.dataset,
        class_names=rows.class_names,
        label=rows.label or "",
        row_ids=rows.ids,
        data_version=data.version,
        store=site_folder.labels,
        ledger=site_folder.ledger,
        owner=site_folder.name,
        durable=True,
        way_to_redraw="another [data] version in policy.toml",
    )


def result_folder(site_folder: SiteFolder, spec: JobSpec) -> Path:
    """Return the label holder's folder for the result of a job."""
    if spec.work is Work.ALIGN:
        return site_folder.request(spec.alignment)
    if spec.work is Work.PREDICT:
        return site_folder.run(spec.run) / f"asked-{spec.alignment}"
    return site_folder.run(spec.run)


def _why_not_kept(answer: bytes) -> str:
    """Return a party's reason for not saving its part, printable; "" if it did."""
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
    """Return the figures of a prediction, without any row."""
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
