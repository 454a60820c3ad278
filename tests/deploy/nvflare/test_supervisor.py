"""Who watches over a job: what it takes for a loss, what for a no, and when it goes on; against a server made here."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time

import pytest

pytest.importorskip("nvflare")

from pbmvfl.deploy.nvflare import keeper, supervisor
from pbmvfl.deploy.nvflare.supervisor import Supervisor, Watched
from pbmvfl.deploy.site.job_spec import Ending, JobResult, JobSpec, Work
from pbmvfl.errors import FederationError
from support.deploy_homes import PARTIES, SERVER, Tables, make_homes


class FakeServer:
    """What `Session` shows of a server: jobs with a status, which of them have processes, and sites' signs of life."""

    def __init__(self, monkeypatch):
        self.started = 1.0
        self.jobs: dict[str, dict] = {}
        self.tokens: dict[str, str] = {}
        self.processes: set[str] = set()
        self.silent: set[str] = set()
        self.on_submit = lambda job: None  # noqa: ARG005
        self.on_look = lambda: None
        monkeypatch.setattr(supervisor, "_connect", lambda home: self)  # noqa: ARG005
        monkeypatch.setattr(supervisor, "LOOK", 0.01)
        monkeypatch.setattr(supervisor, "LOST_AFTER", 0.3)
        monkeypatch.setattr(supervisor, "LOST_BY_RESTART", 0.1)

    def submit_job(self, folder, submit_token):  # noqa: ARG002
        job = self.tokens.setdefault(submit_token, f"job-{len(self.tokens) + 1}")
        self.jobs.setdefault(job, {"status": "SUBMITTED"})
        self.on_submit(job)
        return job

    def get_job_meta(self, job):
        self.on_look()
        return self.jobs[job]

    def check_status(self, kind):
        assert kind == "server"
        heard = [{"client_name": name, "client_last_conn_time": time.time()} for name in PARTIES]
        return {
            "server_start_time": self.started,
            "jobs": [{"job_id": job} for job in self.processes],
            "clients": [each for each in heard if each["client_name"] not in self.silent],
        }

    def close(self):
        pass


@pytest.fixture
def server(monkeypatch):
    return FakeServer(monkeypatch)


@pytest.fixture
def homes(tmp_path):
    return make_homes(tmp_path, Tables.drawn(rows=4), patience=1)


def supervise(homes, *, keep_going=True, progress=lambda: 0):
    said: list[str] = []
    home = homes[SERVER]
    order = JobSpec(work=Work.ALIGN, federation="people", alignment="people")
    watched = Watched(folder=home.request("people"), progress=progress)
    outcome = Supervisor(home, order, watched, token="token", say=said.append).run(keep_going=keep_going)
    return outcome, said


def write_end(homes, job, ending=Ending.DONE, words=""):
    JobResult(job=job, ending=ending, words=words).write(homes[SERVER].request("people"))


def test_done_is_what_the_job_wrote_whatever_the_status_says(server, homes):
    server.on_submit = lambda job: (server.jobs[job].update(status="RUNNING"), write_end(homes, job))
    outcome, _ = supervise(homes)
    assert (outcome.job, outcome.ending) == ("job-1", "done")


def test_a_job_that_a_restarted_server_still_calls_running_is_followed_by_another(server, homes):
    looks = []

    def submitted(job):
        server.jobs[job]["status"] = "RUNNING"
        server.processes.add(job)
        if job == "job-2":
            write_end(homes, job)

    def look():
        looks.append(1)
        if len(looks) == 3:  # the server dies and comes back: its files say RUNNING for ever
            server.started, server.processes = 2.0, set()

    server.on_submit, server.on_look = submitted, look
    outcome, said = supervise(homes)
    assert (outcome.job, outcome.ending) == ("job-2", "done")
    assert said == ["the server was restarted and has lost the job; going on in a new job"]


@pytest.mark.parametrize("status", ["RUNNING", "DISPATCHED"])
def test_a_job_without_a_process_is_lost_also_if_the_server_was_never_seen_to_go(server, homes, status):
    def submitted(job):
        server.jobs[job]["status"] = status
        if job == "job-2":
            write_end(homes, job)

    server.on_submit = submitted
    assert supervise(homes)[0].job == "job-2"


def test_a_site_that_is_lost_while_a_job_is_brought_to_it_has_refused_nothing(server, homes):
    def submitted(job):
        if job == "job-2":
            return write_end(homes, job)
        details = ["server: OK", "bank: no reply (deployment timeout)", "shop: OK", "num_ok_sites 1 < required 2"]
        return server.jobs[job].update(status="FINISHED:FAILED_TO_RUN", job_deploy_detail=details)

    server.on_submit = submitted
    outcome, said = supervise(homes)
    assert (outcome.job, outcome.ending) == ("job-2", "done")
    assert said == ["bank: no reply (deployment timeout); going on in a new job"]


def test_a_site_that_says_no_ends_it_and_its_words_are_kept(server, homes):
    details = ["server: OK", "bank: NVFLARE_ERROR: epsilon=9 is above 8", "shop: no reply (deployment timeout)"]
    server.on_submit = lambda job: server.jobs[job].update(status="FINISHED:FAILED_TO_RUN", job_deploy_detail=details)
    outcome, _ = supervise(homes)
    assert (outcome.ending, outcome.words) == ("refused", "bank: epsilon=9 is above 8")
    assert list(server.jobs) == ["job-1"]


def test_no_job_is_submitted_while_a_site_is_missing_and_the_site_is_named(server, homes):
    server.silent.add("shop")
    outcome, _ = supervise(homes)
    assert outcome.ending == "failed"
    assert "not connected to the server: shop" in outcome.words
    assert not server.jobs


def test_no_job_is_submitted_while_another_process_has_the_links_port(server, homes, monkeypatch):
    monkeypatch.setattr(supervisor, "PORT_PATIENCE", 0.1)
    port = homes[SERVER].federation.line_port
    with socket.create_server(("127.0.0.1", port)), pytest.raises(FederationError, match=f"line_port={port} cannot be"):
        supervise(homes)
    assert server.jobs == {}
    server.processes.add("earlier")  # a job of the server may have it: this one waits for that
    server.on_submit = lambda job: write_end(homes, job)
    with socket.create_server(("127.0.0.1", port)):
        assert supervise(homes)[0].ending is Ending.DONE


def test_jobs_that_never_get_further_are_given_up(server, homes):
    server.on_submit = lambda job: write_end(homes, job, Ending.FAILED, "lost bank: its process ended")
    outcome, said = supervise(homes)
    assert outcome.words == "lost bank: its process ended"
    assert len(server.jobs) == supervisor.MOST_FRUITLESS == len(said) + 1


def test_a_site_that_says_the_same_no_again_is_not_asked_many_times(server, homes):
    server.on_submit = lambda job: write_end(homes, job, Ending.FAILED, "bank refused: something failed at this party")
    assert supervise(homes)[0].words.startswith("bank refused")
    assert len(server.jobs) == supervisor.MOST_REFUSALS


def test_a_server_process_that_ended_without_a_word_is_named(server, homes):
    server.on_submit = lambda job: server.jobs[job].update(status="FINISHED:EXECUTION_EXCEPTION")
    outcome, _ = supervise(homes, keep_going=False)
    assert outcome.words == "lost clinic: its process ended without a word (execution_exception)"


def test_without_keep_going_one_loss_is_the_end(server, homes):
    server.on_submit = lambda job: write_end(homes, job, Ending.FAILED, "lost bank: its process ended")
    assert supervise(homes, keep_going=False)[0].ending == "failed"
    assert list(server.jobs) == ["job-1"]


# --- a server that is not there ---


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch, homes):
    """No server answers; every attempt to reach it takes as long as the longest."""
    made = Clock()

    def unreached(home):  # noqa: ARG001
        made.sleep(5.0)
        raise ConnectionRefusedError

    monkeypatch.setattr(supervisor, "time", made)
    monkeypatch.setattr(supervisor, "_connect", unreached)
    (homes[SERVER].path / "state").mkdir()
    return made


def ended_process() -> int:
    with subprocess.Popen(["true"]) as process:
        return process.pid


@pytest.mark.parametrize("keeper_lives", [True, False])
def test_a_killed_keeper_is_told_within_fifteen_seconds(clock, homes, keeper_lives):
    record = keeper.write_record(homes[SERVER], ended_process())
    assert record.alive  # this process stands for the keeper
    if not keeper_lives:
        path = homes[SERVER].path / "state" / "process.json"
        path.write_text(path.read_text().replace(record.birth, "another"))
    began = clock.now
    with pytest.raises(FederationError, match=r"no answer of the server for .*: the process of clinic ended"):
        supervise(homes, keep_going=False)
    assert clock.now - began <= 18.0
    told = []
    said = []

    def say(words):
        said.append(words)
        told.append(clock.now)

    began = clock.now
    order = JobSpec(work=Work.ALIGN, federation="people", alignment="people")
    watched = Watched(folder=homes[SERVER].request("people"), progress=lambda: 0)
    with pytest.raises(FederationError, match="start it with `pbmvfl server start`"):
        Supervisor(homes[SERVER], order, watched, token="token", say=say).run(keep_going=True)
    ending = "its keeper lives" if keeper_lives else "its keeper too"
    assert said[-1] == (
        f"waiting for the server: the process of clinic ended, and {ending}; start it with `pbmvfl server start`"
    )
    assert told[-1] - began <= 15.0
    assert clock.now - began >= supervisor.SERVER_PATIENCE  # it may be started again: nothing is given up before


def test_a_server_that_was_never_started_is_told_so(clock, homes):
    with pytest.raises(FederationError, match="clinic was not started"):
        supervise(homes, keep_going=False)
    assert clock.now < 1020


def test_a_server_that_lives_and_does_not_answer_is_waited_for(clock, homes):
    keeper.write_record(homes[SERVER], os.getpid())
    began = clock.now
    with pytest.raises(FederationError, match=r"no answer of the server for 18\d seconds: it is at 127"):
        supervise(homes, keep_going=False)
    assert clock.now - began >= supervisor.SERVER_PATIENCE


def test_a_full_disk_of_the_label_holder_is_told_as_what_it_is(server, clock, homes, monkeypatch):
    """On a file system that has no room, not by an error that is made up."""
    del server, clock
    state = homes[SERVER].path / "state"
    real = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: open("/dev/full", "wb") if dir == state else real())  # noqa: SIM115
    with pytest.raises(FederationError, match=r"clinic cannot write to .*state: No space left on device; make room"):
        supervise(homes)


def test_a_job_that_a_full_disk_ended_without_a_word_names_the_disk(server, homes, monkeypatch):
    server.on_submit = lambda job: server.jobs[job].update(status="FINISHED:EXECUTION_EXCEPTION")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: open("/dev/full", "wb"))  # noqa: SIM115, ARG005
    with pytest.raises(FederationError, match="No space left on device"):
        supervise(homes, keep_going=False)
