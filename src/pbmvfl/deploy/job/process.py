"""One job at one site, from its first process to its result, with NVFlare around it or without.

python -m pbmvfl.deploy.job.process HOME JOB < ORDER     one role of one job, without NVFlare: for tests and for trials
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from pathlib import Path

from pbmvfl.deploy.job.link_factory import party_link, server_link
from pbmvfl.deploy.job.party_job import PartySite, public_error_text
from pbmvfl.deploy.job.reporting import Report
from pbmvfl.deploy.job.server_job import ServerSite, result_folder
from pbmvfl.deploy.link.interface import PartyLink, ServerLink
from pbmvfl.deploy.monitoring.status import State
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import Ending, JobResult, JobSpec
from pbmvfl.errors import PbmvflError

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
