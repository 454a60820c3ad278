"""Reports of a job to its own site's operators: status file, log, and a metrics port if the policy has one."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from pbmvfl.deploy.job.party_job import PartySite
from pbmvfl.deploy.job.server_job import Progress
from pbmvfl.deploy.monitoring.log import open_logs, prune_jobs
from pbmvfl.deploy.monitoring.log_events import Event
from pbmvfl.deploy.monitoring.prometheus import MetricsPort
from pbmvfl.deploy.monitoring.status import EpsilonSpent, Role, State, StatusFile
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import JobSpec
from pbmvfl.deploy.site.policy_file import PolicyFile
from pbmvfl.errors import FederationError, PbmvflError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.spending import spending

# --- Spending of each limit of an organisation's owner, for its status ---


#: Shortest pause between two reads in seconds, and the ratio of pause to reading time: reading the ledger of 500,000
#: named rows takes 1 to 4 s, in which rounds are slower.
SHORTEST_PAUSE, SHARE = 10.0, 20.0
#: Approximate longest wait of a job for its last read, in seconds.
_LONGEST_LAST_LOOK = 5.0


def limits_spent(path: Path, dataset: str) -> tuple[EpsilonSpent, ...]:
    """Return the spending of every limit of a dataset; empty if there is no readable ledger.

    The ledger may be charged meanwhile. Rounds that are charged ahead count as spent. The whole ledger is read, so
    `SpentWatch` calls this in a thread of its own.
    """
    try:
        ledger = Ledger(path, must_exist=True, read_only=True)
    except (PbmvflError, OSError):
        return ()
    try:
        return tuple(_spent(ledger, dataset, limit) for limit in ledger.limits(dataset))
    except (PbmvflError, OSError):  # it changed while it was read; the next read will succeed
        return ()
    finally:
        ledger.close()


class SpentWatch:
    """Thread that keeps a status up to date with the ledger, for a small share of the time."""

    def __init__(self, status: StatusFile, ledger: Path, dataset: str, *, pause: float = SHORTEST_PAUSE) -> None:
        self._status, self._ledger, self._dataset, self._pause = status, ledger, dataset, pause
        self._closed = threading.Event()
        self._took = 0.0
        # A thread that is no daemon would keep a job's process alive at its end.
        self._thread = threading.Thread(target=self._watch, name="pbmvfl-spent", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and update the status a last time if that is quick, so that it has what the job spent."""
        self._closed.set()
        self._thread.join(timeout=_LONGEST_LAST_LOOK)
        if not self._thread.is_alive() and self._took <= _LONGEST_LAST_LOOK:
            self._look()

    def _watch(self) -> None:
        self._look()
        while not self._closed.wait(max(self._pause, SHARE * self._took)):
            self._look()

    def _look(self) -> None:
        began = time.monotonic()
        found = limits_spent(self._ledger, self._dataset)
        self._took = time.monotonic() - began
        if found:  # while the ledger is unreadable, the last values stay
            self._status.spent(found)


def _spent(ledger: Ledger, dataset: str, limit: Limit) -> EpsilonSpent:
    return EpsilonSpent(
        limit=f"{limit.unit}, {limit.accounting}, {limit.against}",
        spent=spending(ledger, dataset, limit).epsilon,
        epsilon=limit.epsilon,
        delta=limit.delta,
    )


# --- reporting ---


_STATES = {
    "joining": State.JOINING,
    "set up": State.HANDSHAKE,
    "warming up": State.WARMING_UP,
    "aligning": State.ALIGNING,
    "training": State.TRAINING,
    "predicting": State.PREDICTING,
    "done": State.DONE,
    "stopped": State.DONE,
    "refused": State.FAILED,
    "failed": State.FAILED,
}


class _Report:
    """Common part of both roles' reports."""

    def __init__(self, site_folder: SiteFolder, spec: JobSpec, job: str, role: Role) -> None:
        self._site_folder, self._spec = site_folder, spec
        self._log = open_logs(site_folder, job, run=spec.run)
        self._status = StatusFile(
            site_folder.status,
            site=site_folder.name,
            role=role,
            work=str(spec.work),
            job=job,
            run=spec.run,
            rounds_total=0 if spec.plan is None else len(spec.plan.schedule),
            parties=site_folder.federation.parties if role is Role.SERVER else (),
        )
        self._state = ""
        self._spent: SpentWatch | None = None
        with contextlib.suppress(PbmvflError, OSError):  # the job itself reports a faulty policy
            self._spent = SpentWatch(self._status, site_folder.ledger, PolicyFile.read(site_folder).dataset)
        self._log.event(Event.STARTED)
        self._metrics: MetricsPort | None = None
        with contextlib.suppress(PbmvflError, OSError):  # the job does not depend on it
            port = PolicyFile.read(site_folder).metrics_port
            if port is not None:
                self._metrics = MetricsPort(site_folder.status, port)
                self._log.event(Event.METRICS_PORT, port=port)
        removed = prune_jobs(site_folder, busy=(job,))
        if removed:
            self._log.event(Event.PRUNED, count=removed)

    def state(self, state: str) -> None:
        """Report the job's current state."""
        if state == self._state:
            return
        self._state = state
        self._status.state(_STATES[state])

    def failed(self, error: Exception) -> None:
        self._log.error(Event.FAILED, error)
        self._status.failed(error)

    def _close_watch(self) -> None:
        if self._spent is not None:
            self._spent.close()

    def _close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self._status.close()
        self._log.close()


class PartyReport(_Report):
    """Report of a party: its own round, and what is left of its limits."""

    def __init__(self, site_folder: SiteFolder, spec: JobSpec, job: str) -> None:
        super().__init__(site_folder, spec, job, Role.PARTY)
        self._begun = False

    def progress(self, state: str, completed: int) -> None:
        if not self._begun and completed:  # the round at which a run resumes is unknown before
            self._begun = True
            event = Event.FIRST_ROUND if completed == 1 else Event.RESUMED
            self._log.event(event, round=completed - 1, rounds=self._status.now.rounds_total)
        self.state(state)
        self._status.count(completed)

    def close(self, site: PartySite) -> None:
        """Report how the server ended the job, or that it did not."""
        self._close_watch()
        ended = site.ended
        if ended is None:
            if not self._status.now.state.is_over:
                self.failed(site.last_error or FederationError("the job ended before its work did"))
        elif ended["ending"] in ("done", "stopped"):
            self._log.event(Event.DONE)
            self._status.done()
        else:
            self.failed(site.last_error or FederationError(ended["words"] or "the server gave the job up"))
        self._close()


class ServerReport(_Report):
    """Report of the label holder: rounds, the protocol's own loss, bytes, parties."""

    def __init__(self, site_folder: SiteFolder, spec: JobSpec, job: str) -> None:
        super().__init__(site_folder, spec, job, Role.SERVER)

    def progress(self, progress: Progress) -> None:
        if progress.state == "training" and self._state != "training":
            self._log.event(Event.HANDSHAKE)
        if _STATES[progress.state] is State.FAILED:
            self._state = progress.state
            self.failed(FederationError(progress.words))
            return
        if _STATES[progress.state] is State.DONE and self._state != progress.state:
            self._log.event(Event.DONE, rounds=progress.round)
        self._status.count(
            progress.round,
            loss=progress.loss,
            bytes_up=progress.bytes_up,
            bytes_down=progress.bytes_down,
            parties_alive=progress.alive,
        )
        self.state(progress.state)

    def close(self) -> None:
        self._close_watch()
        self._close()
