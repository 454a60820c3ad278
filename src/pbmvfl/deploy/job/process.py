"""One job at one site, from its first process to its result, with NVFlare around it or without.

python -m pbmvfl.deploy.job.process HOME JOB < ORDER     one role of one job, without NVFlare: for tests and for trials
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.deploy.job.link_factory import party_link, server_link
from pbmvfl.deploy.job.party_job import PartySite, public_error_text
from pbmvfl.deploy.job.reporting import Report
from pbmvfl.deploy.job.server_job import ServerSite, result_folder
from pbmvfl.deploy.link.interface import PartyLink, ServerLink
from pbmvfl.deploy.monitoring.status import State
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import Ending, JobResult, JobSpec, Work
from pbmvfl.errors import PbmvflError
from pbmvfl.federation.drawn_labels import LabelHolder
from pbmvfl.federation.federation import Federation
from pbmvfl.federation.in_process import InProcess
from pbmvfl.plan.groups import Evaluation, Head, Labels, PreparationName
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import FUSION, JOINT, LOCAL, PREDICTION
from pbmvfl.plan.schedule import Order, Phase
from pbmvfl.protocol.server import Server
from pbmvfl.protocol.session import Meter, drive
from pbmvfl.training.encoders import own_generator

# --- Warm-up: a tiny federation of the same kind of plan, in this process, before the first real round ---
# The first use of torch's optimisers, of per-row gradients and of compiled loops takes seconds, which could time out a
# round. The tiny federation has made-up rows, keys of its own, no ledger and no files. It leaves nothing behind but
# loaded code: every random stream of a run is drawn from the run's own seed, keys or entropy, and torch's global
# generator is restored.


_PARTIES, _COLUMNS, _BATCH = 2, 3, 4
#: Shape of made-up pictures: small ones run the same layers.
_PICTURE = (1, 16, 16)
_PICTURE_ENCODERS = frozenset({"multiview-conv", "resnet18", "resnet18-batchnorm"})


def warm_up(plan: Plan, *, fuses: bool = True) -> float:
    """Load and compile what rounds of this plan need, and return the seconds that it took.

    It fails no job: what has no tiny version stays cold, and the first round takes longer.

    Args:
        plan: The plan of the job.
        fuses: Whether this process may learn a fusion model, as the label holder's does: scikit-learn takes memory.
    """
    began = time.perf_counter()
    with contextlib.suppress(PbmvflError, ArithmeticError, RuntimeError):
        train_tiny(plan, fuses=fuses)
    return time.perf_counter() - began


def train_tiny(plan: Plan, *, fuses: bool = True) -> None:
    """Run all rounds of the tiny plan with local parties and a local server."""
    small = tiny_plan(plan)
    rows = _made_up_rows(small)
    with own_generator():
        transport = InProcess(Federation(small).party_setups(rows, None, None, 1))
        try:
            holder = LabelHolder(dataset=rows.name, class_names=rows.class_names)
            server = Server(small, train_labels=holder.draw(small.label_response, rows.train_labels).labels_N)
            drive(server, transport, Meter(), on_open=_nothing, on_round=_nothing, on_epoch_end=_nothing)
            # It is learned when it is asked for.
            assert not fuses or (server.fusion is None) == (not small.num_fusion_samples)
        finally:
            transport.close()


def _nothing() -> None:
    """Skip reporting, whose modules load slower than everything else and which no party needs."""


def tiny_plan(plan: Plan) -> Plan:
    """Return a plan with the same mechanisms, updates, networks and round kinds, of a few rows and two parties."""
    values = plan.flat()
    for name in ("num_epochs", "training"):
        values.pop(name, None)
    phases = _tiny_phases(plan)
    # Correlated noise needs as many steps between two uses of a row as its band is wide.
    rows = max(2, plan.noise_band) * _BATCH
    predicted = phases[-1].kind == PREDICTION
    fused = _BATCH if plan.num_fusion_samples else 0
    return Plan.of(
        **{
            **values,
            "num_parties": _PARTIES,
            "num_samples": max(rows, plan.num_classes) + fused,
            "num_fusion_samples": fused,
            "num_test_samples": _BATCH if predicted else 0,
            "batch_size": _BATCH,
            "phases": phases,
            "evaluation": Evaluation.RELEASED if predicted else Evaluation.NONE,
            "preparation": PreparationName.NONE if plan.model else plan.preparation,
            "labels": Labels.PARTIES if any(phase.kind.needs_labels for phase in phases) else plan.labels,
            "first_weights": (),
            "model": "",
            "seed": 0,
        }
    )


def _tiny_phases(plan: Plan) -> tuple[Phase, ...]:
    """Return one pass of each phase, preceded by training if the plan only predicts."""
    phases = [Phase(kind=phase.kind, passes=1, order=phase.order) for phase in plan.rounds.phases]
    if plan.model:
        learns = LOCAL if plan.head is Head.FIXED else JOINT
        before = [learns, FUSION] if plan.num_fusion_samples else [learns]
        phases = [*(Phase(kind=kind, passes=1, order=Order.AS_GIVEN) for kind in before), *phases]
    return tuple(phases)


def _made_up_rows(plan: Plan) -> VerticalDataset:
    def features(rows: int) -> npt.NDArray[Any]:
        if plan.encoder in _PICTURE_ENCODERS:
            return np.full((rows, *_PICTURE), 100, dtype=np.uint8)
        cells = np.arange(rows * _COLUMNS, dtype=np.float32) % 7 / 6
        return cells.reshape(rows, _COLUMNS)

    labels = np.arange(plan.num_samples) % plan.num_classes
    return VerticalDataset(
        name="warm-up",
        party_names=tuple(f"party-{index}" for index in range(plan.num_parties)),
        train_features=tuple(features(plan.num_samples) for _ in range(plan.num_parties)),
        test_features=tuple(features(plan.num_test_samples) for _ in range(plan.num_parties)),
        train_labels=labels,
        test_labels=labels[: plan.num_test_samples],
        class_names=tuple(f"class-{index}" for index in range(plan.num_classes)),
        default_encoder=plan.encoder,
    )


# --- process ---


_log = logging.getLogger(__name__)


def prepare_process() -> None:
    """Set one thread, and arithmetic whose time does not depend on values."""
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


class PartyJob:
    """A party's side of a job. `run` returns when the work is over; `stop` makes it return."""

    def __init__(self, site_folder: SiteFolder, spec: JobSpec, *, job: str, link: PartyLink | None = None) -> None:
        """Store the parameters.

        Args:
            site_folder: The party's folder.
            spec: The job spec.
            job: Id of the job.
            link: An open link; None to open one.
        """
        self._site_folder, self._spec, self._job = site_folder, spec, job
        self._link = link
        self._stopped = threading.Event()

    def run(self) -> None:
        """Serve the job until its end. Errors go to the site's log and status."""
        report = Report(self._site_folder, self._spec, self._job)
        site = PartySite(self._site_folder, self._spec, on_progress=report.update)
        failed: Exception | None = None
        try:
            report.update(state=State.WARMING_UP)
            prepare_process()
            if self._spec.plan is not None:
                warm_up(self._spec.plan, fuses=False)
            if self._link is None:
                self._link = party_link(self._site_folder, self._job)
            if not self._stopped.is_set():
                report.update(state=State.JOINING)
                self._link.serve(site.handle)
        except Exception as error:
            # The error would be lost: NVFlare only sees that the thread is over.
            if not self._stopped.is_set():
                failed = error
                if not isinstance(error, PbmvflError):
                    _log.exception("the party's part of the job failed")
        finally:
            site.close()
            if self._link is not None:
                self._link.close()
            ended = site.ended or {"ending": Ending.FAILED, "words": "the job ended before its work did"}
            report.end(**ended, error=failed or site.last_error)

    def stop(self) -> None:
        """Close the link, and with it the ledger."""
        self._stopped.set()
        if self._link is not None:
            self._link.close()


class ServerJob:
    """The label holder's side of a job."""

    def __init__(self, site_folder: SiteFolder, spec: JobSpec, *, job: str, link: ServerLink | None = None) -> None:
        self._site_folder, self._spec, self._job = site_folder, spec, job
        self._link = link
        self._stopped = threading.Event()
        self._why_closed = ""
        self.result: JobResult | None = None

    def run(self) -> None:
        """Run the job to its end, and keep its result in `result`."""
        report = Report(self._site_folder, self._spec, self._job)
        try:
            if self._link is None:  # first, so that parties which are ready sooner can connect
                self._link = server_link(self._site_folder, self._job)
            report.update(state=State.WARMING_UP)
            prepare_process()
            if self._spec.plan is not None and self._spec.work is not Work.ALIGN:
                warm_up(self._spec.plan)
            site = ServerSite(
                self._site_folder,
                self._spec,
                self._link,
                job=self._job,
                on_progress=report.update,
                why_closed=lambda: self._why_closed,
            )
            self.result = site.run()
        except Exception as error:
            _log.exception("the label holder's part of the job failed")
            words = self._why_closed or f"{self._site_folder.name}: {public_error_text(error)}"
            self.result = JobResult(job=self._job, ending=Ending.FAILED, words=words)
            with contextlib.suppress(PbmvflError, OSError):  # the disk may be what failed
                self.result.write(result_folder(self._site_folder, self._spec))
        finally:
            if self._link is not None:
                self._link.close()
        report.end(self.result.ending, self.result.words)

    def stop(self) -> None:
        """Close the link, and record the lost parties as the reason, as far as they are known here."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._link is not None:
            here = self._link.alive
            gone = [name for name in self._link.parties if name not in here]
            first = self._link.first_lost
            words = f"lost {first or ', '.join(gone)}: its process ended"
            self._why_closed = words if first or gone else "NVFlare ended the job"
            self._link.close()


def main(arguments: list[str]) -> int:
    """Run one role of one job; return 0 if it ended well."""
    site_folder, job = SiteFolder.at(Path(arguments[0])), arguments[1]
    spec = JobSpec.from_text(sys.stdin.read())
    if not site_folder.is_server:
        PartyJob(site_folder, spec, job=job).run()
        return 0
    served = ServerJob(site_folder, spec, job=job)
    served.run()
    return 0 if served.result is not None and served.result.ending is Ending.DONE else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
