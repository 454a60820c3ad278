"""One job at one site, from its first process to its last word; with NVFlare around it or without.

python -m pbmvfl.deploy.job.process HOME JOB < ORDER     one role of one job, without NVFlare: for tests and for trials
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from pathlib import Path

from pbmvfl.deploy.job.link_factory import party_line, server_line
from pbmvfl.deploy.job.party_job import PartySite, public_words
from pbmvfl.deploy.job.reporting import PartyReport, ServerReport
from pbmvfl.deploy.job.server_job import Progress, ServerSite, outcome_folder
from pbmvfl.deploy.job.warm import warm_up
from pbmvfl.deploy.link.interface import PartyLink, ServerLink
from pbmvfl.deploy.site.folder import Home
from pbmvfl.deploy.site.job_spec import Order, Work
from pbmvfl.deploy.site.outcome import Ending, Outcome
from pbmvfl.errors import PbmvflError

_log = logging.getLogger(__name__)


def prepare_process() -> None:
    """One thread a process, and arithmetic that takes as long for one value as for another."""
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


class PartyJob:
    """A party's side of a job. `run` returns when the work is over; `stop` makes it return."""

    def __init__(self, home: Home, order: Order, *, job: str, link: PartyLink | None = None) -> None:
        """`link` is one that somebody else has opened; without it, the line."""
        self._home, self._order, self._job = home, order, job
        self._link = link
        self._stopped = threading.Event()

    def run(self) -> None:
        report = PartyReport(self._home, self._order, self._job)
        site = PartySite(self._home, self._order, on_progress=report.progress)
        try:
            report.state("warming up")
            prepare_process()
            if self._order.plan is not None:
                warm_up(self._order.plan)
            if self._link is None:
                self._link = party_line(self._home, self._job)
            if not self._stopped.is_set():
                report.state("joining")
                self._link.serve(site.handle)
        except Exception as error:
            # Nobody else would see it: NVFlare only sees that the thread is over.
            if not self._stopped.is_set():
                report.failed(error)
                if not isinstance(error, PbmvflError):
                    _log.exception("the party's part of the job failed")
        finally:
            site.close()
            if self._link is not None:
                self._link.close()
            report.close(site)

    def stop(self) -> None:
        """The job is to end: the link is closed, and with it the ledger."""
        self._stopped.set()
        if self._link is not None:
            self._link.close()


class ServerJob:
    """The label holder's side of a job."""

    def __init__(self, home: Home, order: Order, *, job: str, link: ServerLink | None = None) -> None:
        self._home, self._order, self._job = home, order, job
        self._link = link
        self._stopped = threading.Event()
        self._why_closed = ""
        self.outcome: Outcome | None = None

    def run(self) -> None:
        report = ServerReport(self._home, self._order, self._job)
        try:
            if self._link is None:  # first of all: parties that are ready sooner find somebody who listens
                self._link = server_line(self._home, self._job)
            report.progress(Progress(state="warming up"))
            prepare_process()
            if self._order.plan is not None and self._order.work is not Work.ALIGN:
                warm_up(self._order.plan)
            site = ServerSite(
                self._home,
                self._order,
                self._link,
                job=self._job,
                on_progress=report.progress,
                why_closed=lambda: self._why_closed,
            )
            self.outcome = site.run()
        except Exception as error:
            _log.exception("the label holder's part of the job failed")
            words = self._why_closed or f"{self._home.name}: {public_words(error)}"
            self.outcome = Outcome(job=self._job, ending=Ending.FAILED, words=words)
            with contextlib.suppress(PbmvflError, OSError):  # the disk may be what failed
                self.outcome.write(outcome_folder(self._home, self._order))
            report.progress(Progress(state="failed", words=words))
        finally:
            if self._link is not None:
                self._link.close()
            report.close()

    def stop(self) -> None:
        """The job is to end. Who is not there any more is why, as far as it can be seen from here."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._link is not None:
            here = self._link.alive
            gone = [name for name in self._link.parties if name not in here]
            first = getattr(self._link, "first_gone", "")
            words = f"lost {first or ', '.join(gone)}: its process ended"
            self._why_closed = words if first or gone else "NVFlare ended the job"
            self._link.close()


def main(arguments: list[str]) -> int:
    """Run the role of an organisation's folder; 0 if the work ended well."""
    home, job = Home.at(Path(arguments[0])), arguments[1]
    order = Order.from_text(sys.stdin.read())
    if not home.is_server:
        PartyJob(home, order, job=job).run()
        return 0
    served = ServerJob(home, order, job=job)
    served.run()
    return 0 if served.outcome is not None and served.outcome.ending is Ending.DONE else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
