"""The process that waits for a job: what it is told, what it runs, and that it never outlives who holds it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("nvflare")

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, JobConstants
from nvflare.apis.job_launcher_spec import JobProcessArgs, JobReturnCode
from nvflare.apis.workspace import Workspace
from nvflare.app_common.job_launcher.process_launcher import ProcessJobLauncher

from pbmvfl.deploy.monitoring.status import State, StatusFile
from pbmvfl.deploy.nvflare import job_process, launcher
from pbmvfl.deploy.site.folder import SiteFolder
from support.certificates import Authority
from support.deployments import POLICY, plain_home
from support.federation_texts import federation_text

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

    workspace: Any = None

    def __init__(self, module: str = job_process.PARTY) -> None:
        self.arguments = {
            JobProcessArgs.EXE_MODULE: ("-m", module),
            JobProcessArgs.JOB_ID: ("-n", "a-job"),
            JobProcessArgs.AUTH_TOKEN: ("-t", "secret-of-a-job"),
        }

    def get_prop(self, name: str) -> Any:
        return {
            FLContextKey.JOB_PROCESS_ARGS: self.arguments,
            FLContextKey.WORKSPACE_OBJECT: self.workspace,
        }.get(name)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Waiting processes load nothing; every one that was started."""
    found: list[Any] = []
    popen = subprocess.Popen

    def start(command: list[str], **more: Any) -> Any:
        assert command[-2:] == ["-m", job_process.__name__]
        found.append(popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, **more))
        return found[-1]

    monkeypatch.setattr(ProcessJobLauncher, "launch_job", lambda *_: pytest.fail("NVFlare's way was taken"))
    monkeypatch.setattr(launcher.subprocess, "Popen", start)
    monkeypatch.setattr(launcher.PrewarmedWorker, "prepare_after", lambda *_: None)
    return found


def said_by(process: Any) -> dict[str, Any]:
    with process.stdout:
        said: dict[str, Any] = json.loads(process.stdout.read().splitlines()[1])
    process.wait(60)
    return said


def test_a_job_goes_to_the_process_that_waits_and_the_next_one_to_a_new_one(started) -> None:
    site = launcher.PartyLauncher()
    site.handle_event(EventType.SYSTEM_START, Context())
    for number in (1, 2):
        handle = site.launch_job({"job_id": "a-job"}, Context())
        assert len(started) == number
        assert handle.adapter.process is started[-1]
        said = said_by(started[-1])
        assert said["module"] == job_process.PARTY
        assert said["arguments"] == ["-n", "a-job"]  # the token is no argument
        assert "secret-of-a-job" in said["environment"].values()
        assert handle.poll() == JobReturnCode.SUCCESS


def test_a_folder_may_have_spaces_in_its_name(started) -> None:
    context = Context()
    context.arguments[JobProcessArgs.WORKSPACE] = ("-m", "/srv/our people/bank/kit")
    context.arguments[JobProcessArgs.OPTIONS] = ("--set", "secure_train=true uid=bank")
    launcher.PartyLauncher().launch_job({"job_id": "a-job"}, context)
    said = said_by(started[0])["arguments"]
    assert said == ["-m", "/srv/our people/bank/kit", "-n", "a-job", "--set", "secure_train=true", "uid=bank"]


def test_one_that_died_while_it_waited_costs_nothing_but_time(started) -> None:
    site = launcher.ServerLauncher()
    site.handle_event(EventType.SYSTEM_START, Context())
    started[0].kill()
    started[0].communicate()
    site.launch_job({"job_id": "a-job"}, Context(job_process.SERVER))
    assert said_by(started[1])["module"] == job_process.SERVER


def test_a_job_whose_description_names_another_one_is_not_started(started) -> None:
    """Its files would be those of a job that nobody has looked at."""
    site = launcher.PartyLauncher()
    with pytest.raises(ValueError, match="another job's"):
        site.launch_job({"job_id": "job-b"}, Context())
    assert started == []


def test_a_folder_of_the_job_is_not_where_code_is_loaded_from(started, tmp_path) -> None:
    """NVFlare's own launcher puts it on the path, whoever filled it, and Python would run a file of it by its name."""
    custom = tmp_path / "a-job" / "app_bank" / "custom"
    custom.mkdir(parents=True)
    for folder in ("startup", "local"):
        (tmp_path / folder).mkdir()
    context = Context()
    context.workspace = Workspace(str(tmp_path), "bank")
    assert context.workspace.get_app_custom_dir("a-job") == str(custom)  # the control: it is there to be found
    site = launcher.PartyLauncher()
    site.launch_job({"job_id": "a-job"}, context)
    assert str(custom) not in said_by(started[0])["environment"].get("PYTHONPATH", "")


def test_the_waiting_process_is_one_and_ends_with_the_site(started) -> None:
    site = launcher.PartyLauncher()
    for _ in range(3):
        site.handle_event(EventType.SYSTEM_START, Context())
    site.handle_event(EventType.SYSTEM_END, Context())
    assert len(started) == 1
    assert started[0].returncode == 0
    started[0].stdout.close()


def test_a_site_does_not_wait_for_a_process_that_hangs(started, monkeypatch) -> None:
    monkeypatch.setattr(launcher, "_TO_END", 0.2)
    site = launcher.PartyLauncher()
    site.handle_event(EventType.SYSTEM_START, Context())
    os.kill(started[0].pid, signal.SIGSTOP)
    site.handle_event(EventType.SYSTEM_END, Context())
    assert started[0].returncode == -signal.SIGKILL
    started[0].stdout.close()


# --- when the next one is made ready ---


def test_the_next_process_is_made_ready_when_the_job_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_LOOK", 0.001)
    ready, made, left = launcher.PrewarmedWorker(), threading.Event(), [True, True, False]
    monkeypatch.setattr(ready, "prepare", lambda: made.set() if not left else pytest.fail("too early"))
    ready.prepare_after(lambda: left.pop(0))
    assert made.wait(60)


works_now = launcher._works


@pytest.mark.parametrize(
    ("state", "works"),
    [(State.WARMING_UP, False), (State.HANDSHAKE, False), (State.ALIGNING, True), (State.TRAINING, True)],
)
def test_a_job_works_when_its_own_status_says_so(tmp_path, monkeypatch, state: State, works: bool) -> None:
    (tmp_path / "federation.toml").write_text(federation_text())
    home = SiteFolder(tmp_path)
    home.write_name("bank")
    home.kit.mkdir()
    monkeypatch.chdir(home.kit)
    assert not works_now("job-1")  # no status at all
    with StatusFile(home.status, site="bank", role="party", job="job-1") as status:
        status.update(state=state)
    assert works_now("job-1") is works
    assert not works_now("job-2")


# --- whether a process waits ---


@pytest.mark.parametrize(("memory", "chosen", "kept"), [
    (1 << 30, None, False),
    (2 << 30, None, True),
    (1 << 30, True, True),
    (8 << 30, False, False),
])  # fmt: skip
def test_a_process_waits_if_the_policy_says_so_or_there_is_memory(started, monkeypatch, tmp_path, memory, chosen, kept):
    rule = "" if chosen is None else f"waiting_worker = {str(chosen).lower()}\n"
    home = policy_home(tmp_path, rule)
    monkeypatch.chdir(home.kit)
    monkeypatch.setattr(launcher, "memory", lambda: memory)
    site = launcher.PartyLauncher()
    site.handle_event(EventType.SYSTEM_START, Context())
    assert len(started) == int(kept)
    handle = site.launch_job({JobConstants.JOB_ID: "a-job"}, Context())
    assert len(started) == 1  # the job's own
    handle.wait()
    site.handle_event(EventType.SYSTEM_END, Context())
    for process in started:
        with process:
            assert process.wait(60) == 0  # nothing of an ended job is left


def policy_home(folder: Path, rule: str) -> SiteFolder:
    home = plain_home(folder / "bank", "bank", Authority(folder / "ca"))
    home.policy.write_text(POLICY + "[runs]\n" + rule)
    home.policy.chmod(0o600)
    return home


def test_memory_is_this_machines_or_less() -> None:
    assert 0 < launcher.memory() <= psutil.virtual_memory().total
