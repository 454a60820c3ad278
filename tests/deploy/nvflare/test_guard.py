"""Rules of the guard: the table, what each stops, and what is left of NVFlare's commands once they are in force."""

from __future__ import annotations

import inspect
import io
import itertools
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

from nvflare.fuel.f3.cellnet.defs import MessageType

from pbmvfl.deploy.nvflare import guard, readiness
from pbmvfl.deploy.nvflare.authority import provision
from pbmvfl.deploy.nvflare.guard import RULES, Arrival, Members, Who, too_large
from support.federation_texts import SERVER, federation_text

HERE = Path(__file__).parents[2]
PARTIES, LEAD, ADMIN = ("bank", "hospital"), "lead@clinic.example", "_admin_0f0e"
MEMBERS = Members(parties=PARTIES, lead=LEAD)
SITES = ("server", *PARTIES)
CELLS = (*SITES, *(f"{site}.job" for site in SITES))
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


# --- the table ---


def test_every_rule_has_a_test_of_its_name_and_a_row_in_the_documentation() -> None:
    tests = "\n".join(path.read_text() for path in (HERE / "deploy" / "nvflare").glob("test_*.py"))
    tests += (HERE / "system" / "test_deployment_security.py").read_text()
    installed = inspect.getsource(readiness.Readiness.__init__)
    page = (HERE.parent / "docs" / "explanation" / "known-vulnerabilities.md").read_text()
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert re.search(rf"^def {rule.test}\(", tests, re.MULTILINE), rule
        assert f"| {rule.name} | {rule.attack} | `{rule.test}` |" in page, rule
        assert sum(map(bool, (rule.refuses, rule.install, rule.file, rule.module))) == 1, rule
        assert not rule.module or f"{rule.module}.install(" in installed, rule


def test_a_kit_has_the_file_of_every_rule_that_needs_one(tmp_path: Path) -> None:
    """The rules of processes are looked at in running ones, by the deployment's security tests."""
    (tmp_path / "federation.toml").write_text(federation_text())
    homes = provision(tmp_path / "federation.toml", tmp_path / "homes")
    for name, home in homes.items():
        for rule in RULES:
            file = rule.file.replace("fed_client", "fed_server") if name == SERVER else rule.file
            assert not file or (home.kit / file).is_file(), rule
        said = json.loads((home.kit / "local/resources.json").read_text())
        assert {"pbmvfl.deploy.nvflare.readiness.Readiness"} == {
            each["path"] for each in said["components"] if each["id"] == "readiness"
        }


@pytest.mark.slow
def test_each_rule_alone_stops_its_attack(tmp_path: Path) -> None:
    """Over TLS between cells of NVFlare. The control of each rule: without it, and with all others, it succeeds."""
    done = subprocess.run(
        [sys.executable, str(HERE / "support" / "forging_party.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", "")))},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    own = test_each_rule_alone_stops_its_attack.__name__
    assert {each["rule"] for each in found} == {rule.name for rule in RULES if rule.test == own}
    assert {rule.name for rule in RULES if rule.refuses} <= {each["rule"] for each in found}
    for each in found:
        assert (each["refused"], each["guarded"], each["control"]) == (True, False, True), each


# --- messages ---


def arrival(me: str, origin: str, channel: str = "", topic: str = "", **more: str) -> Arrival:
    """What comes over a true connection of its origin's site."""
    said = {"endpoint": origin, "common_name": guard.site_of(origin), "destination": me, **more}
    return Arrival(me=me, origin=origin, channel=channel, topic=topic, **said)


def is_taken(me: str, origin: str, channel: str = "", topic: str = "", **more: str) -> bool:
    found = arrival(me, origin, channel, topic, **more)
    return not any(rule.refuses and rule.refuses(found, MEMBERS) for rule in RULES)


def heard(me: str, origin: str, common_name: str = "") -> set[str]:
    """Channels of an origin's requests, with a topic that jobs have where there is a list of them."""
    topics = {"aux_communication": "__sync_runner__", "cellnet.channel": "bye"}
    named = {"common_name": common_name} if common_name else {}
    return {each for each in CHANNELS if is_taken(me, origin, each, topics.get(each, "get_task"), **named)}


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
    endpoint = origin if me == "server" else "server"
    assert not any(is_taken(me, origin, each, "get_task", endpoint=endpoint, common_name=LEAD) for each in CHANNELS)


def test_only_the_leads_certificate_is_an_admins() -> None:
    assert heard("server", ADMIN, LEAD) == {
        "task",
        "hci_channel",
        "aux_communication",
        "return_only",
        "cellnet.channel",
    }
    assert heard("server", ADMIN, "bank") == heard("server", ADMIN, "") == set()


def test_a_party_cannot_speak_as_the_servers_own_job_nor_as_the_lead() -> None:
    assert heard("server", "bank") == {"task", "return_only", "cellnet.channel"}
    assert "server_parent_listener" in heard("server", "server.job-1")


def test_a_party_asks_the_servers_job_for_tasks_and_gives_it_no_orders() -> None:
    def heard_on(origin: str, topic: str) -> bool:
        return is_taken("server.job-1", origin, "server_command", topic, endpoint="server")

    assert heard_on("bank.job-1", "get_task")
    for topic in ("abort", "show_stats", "configure_job_log", "app_command", "get_errors", "handle_dead_job", ""):
        assert not heard_on("bank.job-1", topic)
        assert heard_on("server", topic)


def test_no_event_is_fired_in_anothers_process() -> None:
    for me, origin in (("server.job-1", "bank.job-1"), ("bank", "server"), ("bank.job-1", "server.job-1")):
        for topic in ("__sync_runner__", "__job_heartbeat__"):
            assert is_taken(me, origin, "aux_communication", topic, endpoint="server")
        for topic in ("fed.event", "__do_task__", "", "anything"):
            assert not is_taken(me, origin, "aux_communication", topic, endpoint="server")


def test_nobody_is_heard_where_cells_are_looked_into_stopped_or_relayed() -> None:
    for me, origin in itertools.product(CELLS, (*CELLS, ADMIN)):
        assert not heard(me, origin, LEAD) & {"_net_manager", "download_service__", "credential_manager", ""}


def test_a_connection_is_ended_by_its_two_ends_and_no_bundle_is_taken() -> None:
    assert is_taken("server", "bank", "cellnet.channel", "bye")
    assert is_taken("bank", "server", "cellnet.channel", "bye")
    assert not is_taken("server.job", "bank.job", "cellnet.channel", "bye", endpoint="server")  # it was passed on
    for me, origin in itertools.product(CELLS, (*CELLS, ADMIN)):
        assert not is_taken(me, origin, "cellnet.channel", "bulk", common_name=LEAD)


def test_at_the_server_an_origin_is_of_the_site_that_is_connected() -> None:
    for origin, endpoint in itertools.product(CELLS, CELLS):
        same = origin.split(".")[0] == endpoint.split(".")[0]
        assert is_taken("server", origin, "return_only", endpoint=endpoint) is same, (origin, endpoint)


def test_at_a_party_nobody_but_the_server_and_its_own_site_is_heard() -> None:
    for me, origin, endpoint in itertools.product(("hospital", "hospital.job"), CELLS, CELLS):
        by, said = endpoint.split(".")[0], origin.split(".")[0]
        expected = (by == said == "server") or (by == "hospital" and said in ("hospital", "server"))
        assert is_taken(me, origin, "return_only", endpoint=endpoint) is expected, (me, origin, endpoint)


def test_a_site_is_known_by_the_first_part_of_its_name_alone() -> None:
    assert arrival("server", "bank.server").sender(MEMBERS) is Who.PARTY
    assert arrival("bank", "server.bank").sender(MEMBERS) is Who.SERVER
    assert arrival("server", "stranger.bank").sender(MEMBERS) is Who.STRANGER


def test_only_the_server_and_the_own_site_return_a_request() -> None:
    for me, origin, taken in (
        ("server", "bank", False),
        ("server", "server.job", True),
        ("bank", "server", True),
        ("bank", "bank.job", True),
    ):
        assert is_taken(me, origin, kind=MessageType.RETURN) is taken, (me, origin)
    assert not is_taken("server.job", "bank.job", kind=MessageType.RETURN, endpoint="server")


def test_nobody_is_listed_under_anothers_name() -> None:
    for named in ("bank", ""):
        assert is_taken("server", "bank", "task", named=named)
    for named in ("hospital", "server", LEAD, "bank.job"):
        assert not is_taken("server", "bank", "task", named=named)
    assert is_taken("server", ADMIN, "task", named=LEAD, common_name=LEAD)


# --- commands, and what they leave behind ---


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
assert kept == guard.SITE_COMMANDS - {"DeployProcessor"} | {"WholeDeployment"}, kept
assert {type(each).__name__ for each in AdminCommands.commands} == guard.JOB_COMMANDS
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
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
deployment = guard.WholeDeployment()

class Request:
    body = b"PK\\5\\6" + bytes(18)  # an empty zip file
    def __init__(self, job):
        self.job = job
    def get_header(self, name):
        return {RequestHeader.JOB_ID: self.job, RequestHeader.JOB_META: {"job_id": self.job}}[name]

first, there = "01234567-89ab-cdef-0123-456789abcdef", "11234567-89ab-cdef-0123-456789abcdef"
os.mkdir(there)  # of an earlier start
threads = [threading.Thread(target=deployment.process, args=(Request(first), None)) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert "came before" in str(deployment.process(Request(there), None).body)
for name in ("startup", "local", "..", "", None, 7, f"{first}/.."):  # NVFlare would empty this folder of the kit
    assert "not one that NVFlare gives" in str(deployment.process(Request(name), None).body), name
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
deployment = guard.WholeDeployment() if sys.argv[2] == "guarded" else training_cmds.DeployProcessor()
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
        return str(deployment.process(request, engine).body)
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
