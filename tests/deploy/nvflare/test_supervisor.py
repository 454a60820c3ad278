"""Who watches over a job: what it takes for a loss, what for a no, and when it goes on; against a server made here."""

from __future__ import annotations

import socket
import time

import pytest

pytest.importorskip("nvflare")

from pbmvfl.deploy.nvflare import supervisor
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
