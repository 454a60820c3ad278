"""The process that waits for a job: what it is told, what it runs, and that it never outlives who holds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.job_launcher_spec import JobProcessArgs, JobReturnCode
from nvflare.app_common.job_launcher.process_launcher import ProcessJobLauncher

from federation_texts import federation_text
from pbmvfl.deploy.home import Home
from pbmvfl.deploy.nvflare import job_process, launcher
from pbmvfl.deploy.status import State, StatusFile

#: As the module, but without loading anything; NVFlare's program is one that writes down what it was given.
WAITING = """
import json, os, sys
from pbmvfl.deploy.nvflare import job_process
def run(module, *, run_name, alter_sys):
    said = {"module": module, "arguments": sys.argv[1:], "environment": dict(os.environ)}
    print(json.dumps({**said, "stdin": os.readlink("/proc/self/fd/0")}), flush=True)
job_process.load, job_process.runpy.run_module = (lambda: None), run
print("waits", flush=True)
sys.exit(job_process.main())
"""


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"waits\n"
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[bytes], line: bytes) -> tuple[int, dict[str, Any], str]:
    out, err = process.communicate(line, timeout=60)
    return process.returncode, json.loads(out) if out else {}, err.decode()


def test_it_runs_what_it_was_told_with_that_environment_and_hears_nothing_more(waiting) -> None:
    code, said, _ = told(waiting, job_process.job_line([job_process.PARTY, "-n", "a job"], {"TOKEN": "x y", "A": ""}))
    assert code == 0
    assert said == {
        "module": job_process.PARTY,
        "arguments": ["-n", "a job"],
        "environment": {"TOKEN": "x y", "A": ""},  # and nothing of its own
        "stdin": os.devnull,
    }


def test_a_token_is_in_nobodys_list_of_processes(waiting) -> None:
    """NVFlare hands tokens over in the environment, which stays readable as it was at the start of a process."""
    before = Path(f"/proc/{waiting.pid}/environ").read_bytes()
    assert b"PATH=" in before  # the control: this is where it would be
    told(waiting, job_process.job_line([job_process.PARTY], {"TOKEN": "secret-of-a-job"}))
    assert b"secret-of-a-job" not in before


@pytest.mark.parametrize("module", ["os", "pbmvfl", "nvflare.private.fed.app.client.client_train", "", "x; import os"])
def test_no_other_module_is_run(waiting, module: str) -> None:
    code, said, err = told(waiting, job_process.job_line([module], {}))
    assert code != 0
    assert said == {}
    assert f"module={module!r}" in err


@pytest.mark.parametrize("line", [b"", b'{"command": ["' + job_process.PARTY.encode()])
def test_it_ends_quietly_when_nobody_holds_it_any_more(waiting, line: bytes) -> None:
    assert told(waiting, line) == (0, {}, "")


def test_a_line_has_a_longest() -> None:
    with pytest.raises(ValueError, match="at most 1,048,576"):
        job_process.job_line([job_process.PARTY], {"A": "x" * (1 << 20)})


# --- who gives it the job ---


class Context:
    """As much of NVFlare's context as a launcher asks for."""

    def __init__(self, module: str = job_process.PARTY) -> None:
        self.arguments = {
            JobProcessArgs.EXE_MODULE: ("-m", module),
            JobProcessArgs.JOB_ID: ("-n", "a-job"),
            JobProcessArgs.AUTH_TOKEN: ("-t", "secret-of-a-job"),
        }

    def get_prop(self, name: str) -> Any:
        return self.arguments if name == FLContextKey.JOB_PROCESS_ARGS else None


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Waiting processes load nothing; what NVFlare itself would start is only noted."""
    plainly: list[list[str]] = []

    def launch(self: ProcessJobLauncher, job_meta: Any, fl_ctx: Any) -> Any:
        plainly.append(self.get_command(job_meta, fl_ctx).split())
        return SimpleNamespace(poll=lambda: JobReturnCode.SUCCESS)

    popen = subprocess.Popen
    monkeypatch.setattr(ProcessJobLauncher, "launch_job", launch)
    monkeypatch.setattr(
        launcher.subprocess,
        "Popen",
        lambda _, **more: popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, **more),
    )
    monkeypatch.setattr(launcher.ReadyProcess, "prepare_after", lambda *_: None)
    return plainly


def test_a_job_goes_to_the_process_that_waits_and_the_next_one_nvflares_way(started) -> None:
    site = launcher.PartyLauncher()
    site.handle_event(EventType.SYSTEM_START, Context())
    handle = site.launch_job({}, Context())
    process = handle.adapter.process
    with process.stdout:
        said = json.loads(process.stdout.read().splitlines()[1])
    process.wait(60)
    assert said["module"] == job_process.PARTY
    assert said["arguments"] == ["-n", "a-job"]  # the token is no argument
    assert "secret-of-a-job" in said["environment"].values()
    assert handle.poll() == JobReturnCode.SUCCESS
    assert started == []
    site.launch_job({}, Context())  # nobody waits any more
    assert started == [[sys.executable, "-m", job_process.PARTY, "-n", "a-job"]]


def test_one_that_died_while_it_waited_costs_nothing_but_time(started) -> None:
    site = launcher.ServerLauncher()
    site.handle_event(EventType.SYSTEM_START, Context())
    process = site._ready._waiting
    process.kill()
    process.communicate()
    site.launch_job({}, Context(job_process.SERVER))
    assert len(started) == 1


def test_a_command_that_is_not_a_jobs_goes_nvflares_way(started) -> None:
    site = launcher.PartyLauncher()
    site.handle_event(EventType.SYSTEM_START, Context())
    site.launch_job({}, Context("some.other.module"))
    assert len(started) == 1
    with site._ready._waiting.stdout:
        site.handle_event(EventType.SYSTEM_END, Context())


def test_the_waiting_process_is_one_and_ends_with_the_site(started) -> None:  # noqa: ARG001
    site = launcher.PartyLauncher()
    for _ in range(3):
        site.handle_event(EventType.SYSTEM_START, Context())
    process = site._ready._waiting
    site.handle_event(EventType.SYSTEM_END, Context())
    assert process.returncode == 0
    process.stdout.close()


# --- when the next one is made ready ---


def test_the_next_process_is_made_ready_when_the_job_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_LOOK", 0.001)
    ready, made, left = launcher.ReadyProcess(), threading.Event(), [True, True, False]
    monkeypatch.setattr(ready, "prepare", lambda: made.set() if not left else pytest.fail("too early"))
    ready.prepare_after(lambda: left.pop(0))
    assert made.wait(60)


@pytest.mark.parametrize(
    ("state", "works"),
    [(State.WARMING_UP, False), (State.HANDSHAKE, False), (State.ALIGNING, True), (State.TRAINING, True)],
)
def test_a_job_works_when_its_own_status_says_so(tmp_path, monkeypatch, state: State, works: bool) -> None:
    (tmp_path / "federation.toml").write_text(federation_text())
    home = Home(tmp_path)
    home.write_name("bank")
    home.kit.mkdir()
    monkeypatch.chdir(home.kit)
    assert not launcher._works("job-1")  # no status at all
    with StatusFile(home.status, site="bank", role="party", job="job-1") as status:
        status.state(state)
    assert launcher._works("job-1") is works
    assert not launcher._works("job-2")
