"""Supervisor of jobs at the label holder: submits a job, watches it, and submits it again if permitted.

NVFlare's status shows whether processes exist. Whether the work is done is in the label holder's own files
(`deploy.site.job_spec`), which the job writes last. A lost process costs one new job, which resumes from the newest
checkpoint that all sites have.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from pbmvfl._files import make_private_folder
from pbmvfl.deploy.monitoring.redaction import printable
from pbmvfl.deploy.nvflare import keeper
from pbmvfl.deploy.nvflare.hardening import HEARTBEAT
from pbmvfl.deploy.nvflare.job import write_job
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import Ending, JobResult, JobSpec, final_result, last_result
from pbmvfl.deploy.site.preflight import check_port
from pbmvfl.errors import FederationError, PolicyError

_log = logging.getLogger(__name__)
#: Seconds between two looks; without a server until it is given up; that a job which NVFlare calls running may be
#: missing from the server's process; and the same if the server was restarted meanwhile.
LOOK, SERVER_PATIENCE, LOST_AFTER, LOST_BY_RESTART = 0.5, 180.0, 15.0, 3.0
#: Seconds without a server until the operator is told that its process is gone; and until a request that is not to be
#: repeated gives up for that reason.
TOLD_AFTER, GONE_PATIENCE = 5.0, 12.0
#: NVFlare's states of a job that has, or is about to get, processes. A restarted server never resumes one.
_UNDER_WAY = ("DISPATCHED", "RUNNING")
#: NVFlare's texts for a site that was lost while a job was sent to it; any other text is the site's own.
_NO_REPLY = "no reply"
#: Seconds that the process of an earlier job may take to release the port of the link.
PORT_PATIENCE = 15.0
#: Consecutive jobs without a new round before the run is given up.
MOST_FRUITLESS = 6
#: Consecutive jobs that a site refuses for a reason that may pass (a ledger in use, a full disk), before the same.
MOST_REFUSALS = 2
_REFUSED = " refused: "
_WAITING = "waiting for the server"
#: Bytes that are written to find out whether a disk is full: more than a job's description has.
_PROBE = 1 << 20
_CONNECT = 5.0
#: Longest refusal text of a site in characters; it is printed in the lead's terminal, and its author is not trusted.
LONGEST_DETAIL = 600
#: Called with a sentence for the operator.
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Evidence of the work in the label holder's files."""

    folder: Path
    #: A number that grows with the work: completed rounds.
    progress: Callable[[], int]


@dataclass(eq=False)
class Supervisor:
    """Supervisor of one job spec, from its first job to its end."""

    site_folder: SiteFolder
    spec: JobSpec
    watched: Watched
    _: KW_ONLY
    #: Name of this request: the same one submitted twice is the same job.
    token: str
    say: Say
    #: Called repeatedly.
    look: Callable[[], None] | None = None
    _session: Any = None
    _keep_going: bool = False

    def run(self, *, keep_going: bool) -> JobResult:
        """Submit, and wait for the end. With `keep_going` a lost job is followed by another."""
        self._keep_going = keep_going
        fruitless, attempt, reached = 0, 0, self.watched.progress()
        try:
            self._check_port()
            while True:
                result = self._one_job(attempt)
                if result.ending is not Ending.FAILED or not keep_going or not result.job:
                    return result
                now = self.watched.progress()
                fruitless = 0 if now > reached else fruitless + 1
                reached = max(reached, now)
                # A site that repeats its refusal is not lost: a full disk, a damaged file. Its owner has to act.
                if fruitless >= (MOST_REFUSALS if _REFUSED in result.words else MOST_FRUITLESS):
                    return result
                attempt += 1
                self.say(f"{result.words or 'the job was lost'}; going on in a new job")
        finally:
            self._close()

    def _check_port(self) -> None:
        """Refuse at once if another process than a job of the server has the link's port: no party could join."""
        if not self._server_status().get("jobs"):
            check_port(self.site_folder.federation.line_port, "line_port", wait=PORT_PATIENCE)

    # --- one job ---

    def _one_job(self, attempt: int) -> JobResult:
        # After a loss, only a newer sign of life proves that a site is there.
        if missing_sites := self._await_sites(time.time() - (0.0 if attempt else 3 * HEARTBEAT)):
            names = ", ".join(missing_sites)
            return JobResult(
                job="",
                ending=Ending.FAILED,
                words=f"not connected to the server: {names}; start there with `pbmvfl party start`",
            )
        server = self._server_started()
        job = self._submit(attempt)
        missing_since: float | None = None
        ended_since: float | None = None
        while True:
            if (found := self._written_result(job)) is not None:
                return found
            status, runs = self._state(job)
            now = time.monotonic()
            if status.startswith("FINISHED") or status in ("ABORTED", "ABANDONED", "FAILED"):
                # What the job wrote is read once more: it may have ended between the two looks.
                ended_since = now if ended_since is None else ended_since
                if now - ended_since > 1.0:
                    return self._written_result(job) or self._unwritten_result(job, status)
            # A job that is listed as running and is missing from the server's process was lost with an earlier one.
            missing = status in _UNDER_WAY and not runs
            missing_since = (missing_since or now) if missing else None
            if missing_since is not None:
                patience = LOST_AFTER if self._server_started() == server else LOST_BY_RESTART
                if now - missing_since >= patience:
                    return JobResult(
                        job=job, ending=Ending.FAILED, words="the server was restarted and has lost the job"
                    )
            if self.look is not None:
                self.look()
            time.sleep(LOOK)

    def _written_result(self, job: str) -> JobResult | None:
        """Return the result that the job itself wrote, or None."""
        for result in (final_result(self.watched.folder), last_result(self.watched.folder)):
            if result is not None and result.job == job:
                return result
        return None

    def _unwritten_result(self, job: str, status: str) -> JobResult:
        """Return the result of a job that never began or was killed; only NVFlare may know the reason."""
        meta = self._call(lambda session: session.get_job_meta(job)) or {}
        sites = ("server", *self.site_folder.federation.parties)
        said = [str(each).partition(":")[::2] for each in meta.get("job_deploy_detail", [])]
        told = [(site, printable(words, LONGEST_DETAIL)) for site, words in said]
        details = [f"{site}: {words}" for site, words in told if site in sites and words != "OK"]
        lost = [each for each in details if _NO_REPLY in each]
        refused = [each for each in details if each not in lost]
        if refused and "FAILED_TO_RUN" in status:
            return JobResult(job=job, ending=Ending.REFUSED, words="; ".join(map(_without_prefix, refused)))
        self._check_disk()
        code = status.removeprefix("FINISHED:").lower()
        words = "; ".join(lost) or f"lost {self.site_folder.name}: its process ended without a word ({code})"
        return JobResult(job=job, ending=Ending.FAILED, words=words)

    def _submit(self, attempt: int) -> str:
        with tempfile.TemporaryDirectory(prefix="pbmvfl-job-") as scratch:
            folder = Path(scratch) / "job"
            write_job(folder, self.spec, self.site_folder.federation)
            token = f"{self.token}-{attempt}"
            job: str | None = self._call(lambda session: session.submit_job(str(folder), submit_token=token))
            if job is None:
                raise FederationError(
                    "the server took no job within the time it has; is it running? `pbmvfl server status`"
                )
        return job

    def _state(self, job: str) -> tuple[str, bool]:
        """Return NVFlare's status, and whether the server's process really has the job."""
        meta = self._call(lambda session: session.get_job_meta(job)) or {}
        status = str(meta.get("status", ""))
        if status not in _UNDER_WAY:
            return status, False
        return status, job in str(self._server_status().get("jobs", ""))

    def _server_started(self) -> float:
        """Return when the server's process began; another moment is another process, which has no jobs."""
        return float(self._server_status().get("server_start_time", 0.0))

    def _server_status(self) -> dict[str, Any]:
        return self._call(lambda session: session.check_status("server")) or {}

    def _await_sites(self, since: float) -> list[str]:
        """Wait for a sign of life of every site as long as the link would; return those without one.

        NVFlare gives a job to a site that is gone, and waits ten seconds for it, again and again.
        """
        began = time.monotonic()
        said: list[str] = []
        while missing := self._missing_sites(since):
            waited = time.monotonic() - began
            if waited > self.site_folder.federation.patience:
                return missing
            if missing != said and waited > 3 * HEARTBEAT:
                self.say(f"waiting for {', '.join(missing)}")
                said = missing
            time.sleep(LOOK)
        return []

    def _missing_sites(self, since: float) -> list[str]:
        """Return the sites without a sign of life since a moment by the clock of the server's machine, this one."""
        heard = {
            str(each.get("client_name")): float(each.get("client_last_conn_time", 0.0))
            for each in self._server_status().get("clients", [])
        }
        return [name for name in self.site_folder.federation.parties if heard.get(name, 0.0) < since]

    # --- the session with the server ---

    def _call(self, ask: Callable[[Any], Any]) -> Any:
        """Call the server, through its restarts, within `SERVER_PATIENCE`."""
        from nvflare.fuel.flare_api.api_spec import AuthorizationError, InvalidJobDefinition, JobNotFound

        began = time.monotonic()
        said = ""
        while True:
            try:
                if self._session is None:
                    self._session = _connect(self.site_folder)
                return ask(self._session)
            except (AuthorizationError, InvalidJobDefinition) as error:
                raise PolicyError(f"the server did not take the job: {error}") from error
            except JobNotFound:
                return None
            except Exception as error:
                self._close()
                self._check_disk()
                waited = time.monotonic() - began
                gone = self._gone() if waited >= TOLD_AFTER else ""
                if waited > (GONE_PATIENCE if gone and not self._keep_going else SERVER_PATIENCE):
                    federation = self.site_folder.federation
                    reason = gone or f"it is at {federation.host}:{federation.port} ({type(error).__name__})"
                    raise FederationError(
                        f"no answer of the server for {waited:.0f} seconds: {reason}; start it with "
                        "`pbmvfl server start`"
                    ) from error
                words = f"waiting for the server: {gone}; start it with `pbmvfl server start`" if gone else _WAITING
                if words != said and (gone or not said):
                    self.say(words)
                    said = words
                time.sleep(LOOK)

    def _gone(self) -> str:
        """Describe how the server's process on this machine is missing, or return ""."""
        record = keeper.read_record(self.site_folder)
        if record is None:
            return f"{self.site_folder.name} was not started"
        if record.site_alive:
            return ""
        return f"the process of {self.site_folder.name} ended, and its keeper {'lives' if record.alive else 'too'}"

    def _check_disk(self) -> None:
        """Refuse to wait for a server that cannot write: it would neither take a job nor say why."""
        folder = self.site_folder.path / "state"
        try:
            make_private_folder(folder)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(bytes(_PROBE))
                probe.flush()
                os.fsync(probe.fileno())
        except OSError as error:
            raise FederationError(
                f"{self.site_folder.name} cannot write to {folder}: {error.strerror}; make room there, then go on: "
                "what was trained is in the last checkpoint"
            ) from error

    def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(Exception):
                session.close()


def _connect(site_folder: SiteFolder) -> Any:
    from nvflare.fuel.flare_api.flare_api import new_secure_session
    from nvflare.fuel.utils.config_service import ConfigService

    # NVFlare would take settings from the environment, and from files in any folder below the current one; one of them
    # names code to load.
    for name in [each for each in os.environ if each.startswith(keeper.FOREIGN)]:
        del os.environ[name]
    ConfigService.initialize(section_files={}, config_path=[str(site_folder.lead_kit)])
    with contextlib.redirect_stdout(io.StringIO()):  # it prints that it connects
        return new_secure_session(site_folder.federation.lead, str(site_folder.lead_kit), timeout=_CONNECT)


def _without_prefix(detail: str) -> str:
    """Return a site's text without NVFlare's prefix."""
    return detail.replace("NVFLARE_ERROR: ", "").replace("ERROR: ", "")
