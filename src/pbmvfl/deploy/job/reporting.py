"""Reports of a job to its own site's operators: status file, log, and a metrics port if the policy has one."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

from pbmvfl.deploy.monitoring.log import open_logs, prune_jobs
from pbmvfl.deploy.monitoring.log_events import Event
from pbmvfl.deploy.monitoring.prometheus import MetricsPort
from pbmvfl.deploy.monitoring.status import EpsilonSpent, Role, State, StatusFile
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import Ending, JobSpec
from pbmvfl.deploy.site.policy_file import PolicyFile
from pbmvfl.errors import FederationError, PbmvflError
from pbmvfl.ledger.ledger import Ledger
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
        with contextlib.closing(Ledger(path, must_exist=True, read_only=True)) as ledger:
            return tuple(
                EpsilonSpent(
                    limit=f"{limit.unit}, {limit.accounting}, {limit.against}",
                    spent=spending(ledger, dataset, limit).epsilon,
                    epsilon=limit.epsilon,
                    delta=limit.delta,
                )
                for limit in ledger.limits(dataset)
            )
    except (PbmvflError, OSError):  # there is none yet, or it changed while it was read: the next read will succeed
        return ()


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


# --- reporting ---


class Report:
    """Report of one job at its site: the status, of which the label holder sees more, and the log."""

    def __init__(self, site_folder: SiteFolder, spec: JobSpec, job: str) -> None:
        self._is_server = site_folder.is_server
        self._log = open_logs(site_folder, job, run=spec.run)
        self._status = StatusFile(
            site_folder.status,
            site=site_folder.name,
            role=Role.SERVER if self._is_server else Role.PARTY,
            work=str(spec.work),
            job=job,
            run=spec.run,
            rounds_total=0 if spec.plan is None else len(spec.plan.schedule),
            parties=site_folder.federation.parties if self._is_server else (),
        )
        self._spent: SpentWatch | None = None
        self._metrics: MetricsPort | None = None
        self._log.event(Event.STARTED)
        with contextlib.suppress(PbmvflError, OSError):  # the job itself reports a faulty policy
            policy = PolicyFile.read(site_folder)
            self._spent = SpentWatch(self._status, site_folder.ledger, policy.dataset)
            if policy.metrics_port is not None:
                self._metrics = MetricsPort(site_folder.status, policy.metrics_port)
                self._log.event(Event.METRICS_PORT, port=policy.metrics_port)
        removed = prune_jobs(site_folder, busy=(job,))
        if removed:
            self._log.event(Event.PRUNED, count=removed)

    def update(self, **changes: Any) -> None:
        """Set fields of the status (`Status`); log when training begins."""
        before, completed = self._status.now, changes.get("round", 0)
        if self._is_server and changes.get("state") is State.TRAINING and before.state is not State.TRAINING:
            self._log.event(Event.HANDSHAKE)
        if not self._is_server and completed and not before.round:  # where a run resumes is unknown before
            event = Event.FIRST_ROUND if completed == 1 else Event.RESUMED
            self._log.event(event, round=completed - 1, rounds=before.rounds_total)
        self._status.update(**changes)

    def end(self, ending: str, words: str, error: Exception | None = None) -> None:
        """Report how the job ended, and close.

        Args:
            ending: One of `Ending`.
            words: What the label holder says about it.
            error: This site's own error, which is reported instead.
        """
        if self._spent is not None:
            self._spent.close()
        if ending in (Ending.DONE, Ending.STOPPED):
            self._log.event(Event.DONE, rounds=self._status.now.round)
            self._status.update(state=State.DONE)
        else:
            error = error or FederationError(words or "the server gave the job up")
            self._log.error(Event.FAILED, error)
            self._status.failed(error)
        if self._metrics is not None:
            self._metrics.close()
        self._status.close()
        self._log.close()
