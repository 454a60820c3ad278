"""Who is heard by NVFlare's processes: the table, and what is left of NVFlare's commands once it is in force."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from pbmvfl.deploy.nvflare.guard import Who, is_forged_return, is_permitted, too_large, who

PARTIES = ("bank", "hospital")
ADMIN = "_admin_0f0e"
#: Every channel that a process of NVFlare 2.9 registered something on, and one that nobody did.
CHANNELS = (
    "admin",
    "aux_communication",
    "task",
    "server_command",
    "server_parent_listener",
    "client_command",
    "return_only",
    "hci_channel",
    "cellnet.channel",
    "_net_manager",
    "credential_manager",
    "download_service__",
    "pbmvfl",
    "",
)


def heard(me: str, origin: str) -> set[str]:
    """With a topic that jobs have where there is a list of them."""
    topic = "__sync_runner__"
    return {each for each in CHANNELS if is_permitted(origin, each, topic, me=me, parties=PARTIES)}


@pytest.mark.parametrize("me", ["hospital", "hospital.job-1"])
@pytest.mark.parametrize("origin", ["bank", "bank.job-1", "stranger", ADMIN, "", "hospitals", "Hospital", ".hospital"])
def test_a_party_hears_nothing_of_another_site(me: str, origin: str) -> None:
    assert heard(me, origin) == set()


def test_a_party_hears_the_server_on_channels_that_jobs_need() -> None:
    needed = {"admin", "client_command", "aux_communication", "return_only", "cellnet.channel"}
    assert heard("hospital", "server") == needed
    assert heard("hospital", "hospital.job-1") == needed


@pytest.mark.parametrize("me", ["server", "server.job-1"])
@pytest.mark.parametrize("origin", ["stranger", "stranger.job-1", "", "_adminx", f"{ADMIN}.x", "bank2", "serverx"])
def test_the_server_hears_nobody_who_is_not_of_the_federation(me: str, origin: str) -> None:
    assert heard(me, origin) == set()


def test_a_party_cannot_speak_as_the_servers_own_job_nor_as_the_lead() -> None:
    assert heard("server", "bank") == {"task", "return_only", "cellnet.channel"}
    assert "hci_channel" in heard("server", ADMIN)
    assert "server_parent_listener" in heard("server", "server.job-1")


def test_a_party_asks_the_servers_job_for_tasks_and_gives_it_no_orders() -> None:
    def heard_on(origin: str, topic: str) -> bool:
        return is_permitted(origin, "server_command", topic, me="server.job-1", parties=PARTIES)

    assert heard_on("bank.job-1", "get_task")
    for topic in ("abort", "show_stats", "configure_job_log", "app_command", "get_errors", "handle_dead_job", ""):
        assert not heard_on("bank.job-1", topic)
        assert heard_on("server", topic)


def test_no_event_is_fired_in_anothers_process() -> None:
    for me, origin in (("server.job-1", "bank.job-1"), ("bank", "server"), ("bank.job-1", "server.job-1")):
        for topic in ("__sync_runner__", "__job_heartbeat__"):
            assert is_permitted(origin, "aux_communication", topic, me=me, parties=PARTIES)
        for topic in ("fed.event", "__do_task__", "", "anything"):
            assert not is_permitted(origin, "aux_communication", topic, me=me, parties=PARTIES)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config/x": b"{}"}, ""),
        ({f"config/{number}": b"" for number in range(51)}, "51 files of 0 bytes; permitted: 50"),
        ({"config/x": bytes(40_000_000)}, "1 files of 40,000,000 bytes"),
        (None, "not a zip file"),
    ],
)
def test_what_a_job_would_take_on_disk_is_known_before_it_is_unpacked(
    files: dict[str, bytes] | None, words: str
) -> None:
    data = io.BytesIO()
    if files is not None:
        with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, content in files.items():
                packed.writestr(name, content)
    found = too_large(data.getvalue())
    assert words in found
    assert bool(found) is bool(words)


def test_nobody_is_heard_where_cells_are_looked_into_stopped_or_relayed() -> None:
    for me in ("server", "server.job-1", "hospital", "hospital.job-1"):
        for origin in ("server", "server.job-1", "bank", "hospital", ADMIN):
            assert not heard(me, origin) & {"_net_manager", "download_service__", "credential_manager", ""}


def test_a_site_is_known_by_the_first_part_of_its_name_alone() -> None:
    assert who("bank.server", me="server", parties=PARTIES) is Who.PARTY
    assert who("server.bank", me="bank", parties=PARTIES) is Who.SERVER
    assert who("stranger.bank", me="server", parties=PARTIES) is Who.STRANGER


def test_only_whom_it_was_for_or_the_server_may_return_a_request() -> None:
    assert is_forged_return("bank", "hospital", me="server")
    assert is_forged_return("bank.job", "hospital.job", me="server.job")
    assert not is_forged_return("hospital", "hospital.job", me="server.job")
    assert not is_forged_return("server", "hospital", me="server.job")


def test_a_site_keeps_the_commands_that_a_job_needs_and_no_shell() -> None:
    # In a process of its own: what is in force is in force for all of a process.
    program = """
from pbmvfl.deploy.nvflare import guard
from nvflare.private.fed.client.admin_commands import AdminCommands
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
before = {type(each).__name__ for each in ClientRequestProcessors.request_processors}
assert {"ShellCommandProcessor", "ConfigureSiteLogProcessor", "DeleteRunNumberProcessor"} <= before, before
guard.install(("bank", "hospital"), "lead@clinic.example")
guard.install(("bank", "hospital", "stranger"), "lead@clinic.example")  # the first word counts
kept = {type(each).__name__ for each in ClientRequestProcessors.request_processors}
assert kept == guard.SITE_COMMANDS, kept
assert {type(each).__name__ for each in AdminCommands.commands} == guard.JOB_COMMANDS
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_a_jobs_folder_is_no_other_folder_of_the_kit(tmp_path: Path) -> None:
    program = """
import sys
from nvflare.apis.workspace import Workspace
from pbmvfl.deploy.nvflare import guard
kit = Workspace(sys.argv[1], "bank")
assert kit.get_run_dir("startup").endswith("/startup")  # NVFlare would empty it for a job of this name
guard.install(("bank", "hospital"), "lead@clinic.example")
assert kit.get_run_dir("01234567-89ab-cdef-0123-456789abcdef")
for name in ("startup", "local", "..", "", None, 7, "01234567-89ab-cdef-0123-456789abcdef/.."):
    try:
        kit.get_run_dir(name)
    except ValueError:
        continue
    raise AssertionError(name)
"""
    for folder in ("startup", "local"):
        (tmp_path / folder).mkdir()
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_a_jobs_files_are_taken_once(tmp_path: Path) -> None:
    program = """
import os, sys, threading
os.chdir(sys.argv[1])
from nvflare.private.admin_defs import ok_reply
from nvflare.private.defs import RequestHeader
from nvflare.private.fed.client.training_cmds import DeployProcessor
from pbmvfl.deploy.nvflare import guard
taken = []
DeployProcessor.process = lambda self, request, engine: taken.append(request.job) or ok_reply()
guard.install(("bank", "hospital"), "lead@clinic.example")

class Request:
    body = b"PK\\5\\6" + bytes(18)  # an empty zip file
    def __init__(self, job):
        self.job = job
    def get_header(self, name):
        return {RequestHeader.JOB_ID: self.job, RequestHeader.JOB_META: {"job_id": self.job}}[name]

first, there = "01234567-89ab-cdef-0123-456789abcdef", "11234567-89ab-cdef-0123-456789abcdef"
os.mkdir(there)  # of an earlier start
threads = [threading.Thread(target=DeployProcessor().process, args=(Request(first), None)) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert "came before" in str(DeployProcessor().process(Request(there), None).body)
assert taken == [first], taken
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_what_cannot_be_unpacked_wholly_or_names_another_job_leaves_nothing(tmp_path: Path) -> None:
    """By NVFlare's own deployment, with files that fit where it looks at their signature, and not where they stay."""
    program = """
import io, os, sys, uuid, zipfile
from pathlib import Path
from types import SimpleNamespace
os.chdir(sys.argv[1])
from nvflare.private.admin_defs import Message
from nvflare.private.defs import RequestHeader
from nvflare.private.fed.client import training_cmds
from nvflare.private.fed.client.client_engine import ClientEngine
from nvflare.private.privacy_manager import PrivacyService
from pbmvfl.deploy.nvflare import guard
PrivacyService.initialize(None)
training_cmds.require_signed_jobs = lambda *_: False  # the lead signs what he likes; here nobody has to
if sys.argv[2] == "guarded":
    guard.install(("bank", "hospital"), "lead@clinic.example")
engine = ClientEngine.__new__(ClientEngine)
engine.args, engine.client = SimpleNamespace(workspace=os.getcwd()), SimpleNamespace(client_name="hospital")
engine.get_component, engine.new_context = lambda name: None, lambda: None

def deploy(job, described, files):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as packed:
        for name in files:
            packed.writestr(name, "raise SystemExit")
    request = Message("deploy", data.getvalue())
    request.set_header(RequestHeader.JOB_ID, job)
    request.set_header(RequestHeader.JOB_META, {"job_id": described})
    request.set_header(RequestHeader.APP_NAME, "party")
    try:
        return str(training_cmds.DeployProcessor().process(request, engine).body)
    except Exception as error:
        return str(error)

first, second = str(uuid.uuid4()), str(uuid.uuid4())
long = "/".join(["z" * 200] * 19) + "/" + "z" * 200
answer = deploy(first, first, ["custom/sitecustomize.py", long])
assert "too long" in answer, answer
left = sorted(str(each) for each in Path(first).rglob("*.py"))
assert bool(left) is (sys.argv[2] == "open"), left
if sys.argv[2] == "guarded":
    assert "names another job" in deploy(second, first, ["config/x"])
    assert not Path(second).exists()
"""
    kit = tmp_path / ("k" * 100) / ("k" * 100)  # deeper than a temporary folder
    for folder in ("startup", "local"):
        (kit / folder).mkdir(parents=True)
    for mode in ("open", "guarded"):  # the former is the control
        ended = subprocess.run(
            [sys.executable, "-c", program, str(kit), mode], capture_output=True, text=True, timeout=120
        )
        assert ended.returncode == 0, (mode, ended.stderr)
