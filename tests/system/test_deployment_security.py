"""Attacks on one federation that really runs: kits, NVFlare's processes and port, the line, jobs, the lead's commands.

Every attack is tried, and beside it something that shows that it is one: the honest way works, or the payload is live.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("nvflare")

import grpc

from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.deploy.alignment.aligned_rows import AlignedRows
from pbmvfl.deploy.job.link_factory import link_context, party_message_auth, server_message_auth
from pbmvfl.deploy.link import grpc_stream as streams
from pbmvfl.deploy.link.interface import Channel
from pbmvfl.deploy.link.message_auth import PartyMessageAuth
from pbmvfl.deploy.link.revocation import Revoked, sign_list
from pbmvfl.deploy.link.tls import Certificate, Credentials
from pbmvfl.deploy.monitoring.status import State
from pbmvfl.deploy.nvflare import processes
from pbmvfl.deploy.nvflare.keeper import read_record
from pbmvfl.deploy.site.job_spec import Ending
from pbmvfl.errors import LinkError
from support.attacked_federation import (
    COLUMNS,
    LEAD,
    PARTIES,
    ROWS,
    SERVER,
    Attacked,
    common_id,
    copy_kit,
    feature,
    in_thread,
    own_id,
    tls_talk,
)
from support.line_parties import Guest, Site

pytestmark = pytest.mark.slow
HERE = Path(__file__).parents[1]


#: In every process of the kits: who unpickles what; and, once it can be spoken to, whether the guard is in force.
AUDIT = """
import sys, threading, time, traceback
def hook(event, args):
    if event == "pickle.find_class":
        files = " ".join(frame.filename for frame in traceback.extract_stack())
        with open({out!r} + "/unpickled.txt", "a") as out:
            out.write(args[0] + "." + args[1] + " by " + files + "\\n")
sys.addaudithook(hook)
def look():
    for _ in range(3000):
        cells = sys.modules.get("nvflare.fuel.f3.cellnet.core_cell")
        kind = getattr(cells, "CoreCell", None)
        if getattr(kind, "ALL_CELLS", None):
            started = [each for each in sys.orig_argv if each.startswith(("nvflare.private.fed.app", "pbmvfl.deploy."))]
            module = sys.modules["__main__"].__spec__.name if started else ""
            with open({out!r} + "/in-force.txt", "a") as out:
                out.write(kind._process_received_msg.__module__ + " " + module + "\\n")
            return
        time.sleep(0.1)
threading.Thread(target=look, daemon=True).start()
"""


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """Up, and with aligned rows: the honest way works."""
    attacked = Attacked(tmp_path_factory.mktemp("attacked"))
    hooked = attacked.folder / "hooked"
    put("sitecustomize.py", AUDIT.format(out=str(attacked.folder)))(hooked)
    path = os.pathsep.join([str(hooked), *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        yield from _running(attacked)


def _running(attacked: Attacked) -> Iterator[Attacked]:
    try:
        attacked.start()
        outcome = attacked.align()
        assert outcome.ending is Ending.DONE, outcome
        yield attacked
    finally:
        attacked.stop()


# --- certificates ---


def wrong_certificates(fed: Attacked) -> dict[str, Credentials | None]:
    return {
        "none": None,
        "another federation's": fed.others.issue("bank"),
        "expired": fed.strangers.issue("bank", first_day=-3, last_day=-1),
        "not yet valid": fed.strangers.issue("bank", first_day=1, last_day=3),
    }


def own_certificate(fed: Attacked, name: str) -> Credentials:
    home = fed.homes[name]
    return Credentials(certificate=home.certificate, private_key=home.private_key, authority=home.authority)


@pytest.mark.parametrize("kind", ["none", "another federation's", "expired", "not yet valid"])
def test_nvflares_port_hears_no_wrong_certificate(fed: Attacked, kind: str) -> None:
    authority = fed.homes["bank"].authority
    answer = tls_talk(fed.port, wrong_certificates(fed)[kind], authority=authority)
    assert answer.startswith("refused: ") or answer == "closed", answer


def test_nvflares_port_hears_a_party(fed: Attacked) -> None:
    """The control: it is the certificate that the others are refused for."""
    bank = own_certificate(fed, "bank")
    assert tls_talk(fed.port, bank, authority=bank.authority, seconds=1).startswith("heard")


def test_nvflares_port_refuses_a_revoked_certificate_by_name_and_no_other(fed: Attacked, tmp_path: Path) -> None:
    stolen, server = fed.strangers.issue("bank"), fed.homes[SERVER]
    assert tls_talk(fed.port, stolen, authority=stolen.authority, seconds=1).startswith("heard")
    serial = Certificate.read(stolen.certificate).value.serial_number
    entries = [Revoked(serial=serial, since=datetime.datetime.now(datetime.UTC))]
    key = fed.strangers.key_file(tmp_path / "rootCA.key")
    found = sign_list(tmp_path / "revoked.pem", server.authority, key, entries, number=1, days=1)
    for home in fed.homes.values():
        home.install_revocations(found.path)

    def answer(site: Credentials) -> str:
        return tls_talk(fed.port, site, authority=site.authority, seconds=1)

    assert wait_for(lambda: "revoked" in answer(stolen).lower())
    assert answer(own_certificate(fed, "bank")).startswith("heard")


# --- one site to another ---


@contextlib.contextmanager
def evil_process(fed: Attacked, home: Path, name: str, *targets: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A site's process whose owner lets it ask others, and the file where it writes what it got."""
    out, log = fed.folder / f"evil-{name}.jsonl", fed.folder / f"evil-{name}.log"
    command = [sys.executable, "-P", str(HERE / "support" / "evil_site.py"), str(home), name, str(out), *targets]
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
    try:
        yield process, out
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)


def evil(fed: Attacked, name: str, *targets: str) -> list[dict[str, str]]:
    """What an organisation's site gets; the honest process rests meanwhile."""
    processes.stop(fed.homes[name])
    with evil_process(fed, fed.homes[name].path, name, *targets) as (process, out):
        wait_for(lambda: process.poll() is not None or (out.exists() and '"end"' in out.read_text()))
        assert out.exists(), (fed.folder / f"evil-{name}.log").read_text()[-2000:]
        return [json.loads(line) for line in out.read_text().splitlines()]


def wait_for(is_so: Callable[[], bool], seconds: float = 120.0) -> bool:
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def check_told_nothing(found: list[dict[str, str]], *, of: tuple[str, ...]) -> None:
    control, end = found[0], found[-1]
    assert "[data]" in control["answer"], "NVFlare's own shell would not have told; the attack is none"
    assert end["topic"] == "end"
    asked = found[1:-1]
    assert {each["target"] for each in asked} == set(of)
    for each in asked:
        assert each["answer"] in ("None", "", "invalid_request"), each
        assert each["code"] == "timeout" or each["answer"] == "invalid_request", each


def test_a_name_that_is_not_in_the_federation_is_nobody_although_its_authority_signed_it(fed: Attacked) -> None:
    """The control is the next test: there the same process, with the bank's name, is taken."""
    home = copy_kit(fed.homes["bank"].path, fed.folder / "stranger")
    stranger = fed.strangers.issue("stranger")
    (home / "kit/startup/client.crt").write_bytes(stranger.certificate.read_bytes())
    (home / "kit/startup/client.key").write_bytes(stranger.private_key.read_bytes())
    edit("kit/startup/fed_client.json", '"fqsn": "bank"', '"fqsn": "stranger"')(home)
    log = fed.clinic.kit / "log.txt"
    with evil_process(fed, home, "stranger", "hospital") as (_, out):
        words = "a message by 'stranger' in the name of 'stranger' was dropped"
        assert wait_for(lambda: log.exists() and words in log.read_text())
        with fed.session() as session:
            assert {each.name for each in session.get_system_info().client_info} == set(PARTIES)
        assert not out.exists()


def test_a_party_cannot_make_another_site_show_a_file(fed: Attacked) -> None:
    try:
        found = evil(fed, "bank", "hospital", "server")
        check_told_nothing(found, of=("hospital", "server"))
        words = {
            SERVER: "a message by 'bank' in the name of 'bank' was dropped (closed channel)",
            "hospital": "a message by 'server' in the name of 'bank' was dropped (forged origin)",
        }
        for name, said in words.items():
            assert said in (fed.homes[name].kit / "log.txt").read_text()
    finally:
        processes.start(fed.homes["bank"], wait=30, timeout=120)


def test_the_server_cannot_make_a_party_show_a_file(fed: Attacked) -> None:
    try:
        check_told_nothing(evil(fed, SERVER, *PARTIES), of=PARTIES)
    finally:
        processes.start(fed.homes[SERVER], timeout=120)
        fed.wait_for_parties()


# --- jobs ---


def put(path: str, content: str | bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def edit(path: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / path).read_text()
        assert old in text
        (folder / path).write_text(text.replace(old, new))

    return change


def edit_json(path: str, change_said: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        said = json.loads((folder / path).read_text())
        change_said(said)
        (folder / path).write_text(json.dumps(said, indent=2) + "\n")

    return change


PARTY_CONFIG, SERVER_CONFIG = "party/config/config_fed_client.json", "server/config/config_fed_server.json"
PAYLOAD = "import pathlib\npathlib.Path({marker!r}).touch()\n"


def popen(said: dict[str, Any], marker: str) -> None:
    said["executors"][0]["executor"] = {"path": "subprocess.Popen", "args": {"args": ["touch", marker]}}


def component(said: dict[str, Any], marker: str) -> None:
    said["components"] = [{"id": "x", "path": "subprocess.Popen", "args": {"args": ["touch", marker]}}]


def attacks(marker: str) -> dict[str, Callable[[Path], None]]:
    code = PAYLOAD.format(marker=marker)
    return {
        "code": put("party/custom/sitecustomize.py", code),
        "an empty folder for code": put("party/custom/.keep", ""),
        "comm_config": both(
            put("party/config/comm_config.json", json.dumps({"comm_driver_path": "."})),
            put("party/config/driver.py", code),
            put("server/config/comm_config.json", json.dumps({"comm_driver_path": "."})),
            put("server/config/driver.py", code),
        ),
        "settings": put("party/config/resources.json", json.dumps({"class_list_enforcement_mode": "off"})),
        "another class": edit_json(PARTY_CONFIG, lambda said: popen(said, marker)),
        "a component": edit_json(PARTY_CONFIG, lambda said: component(said, marker)),
        "a component at the server": edit_json(SERVER_CONFIG, lambda said: component(said, marker)),
        "an extra file": put("party/config/notes.txt", "hello"),
        "another order text": edit(PARTY_CONFIG, '"order": "', '"order": "A'),
        "two orders": edit(PARTY_CONFIG, '"args": {', '"args": {"other": "x", '),
    }


def submit(session: Any, folder: Path) -> tuple[str, str]:
    """(job id, "") or ("", why it was not even taken)."""
    try:
        return session.submit_job(str(folder)), ""
    except Exception as error:
        return "", f"{type(error).__name__}: {error}"


def test_no_job_but_ours_is_taken_and_nothing_of_it_runs_or_stays(fed: Attacked) -> None:
    marker = fed.folder / "it-ran"
    order = fed.training("never")
    tried = attacks(str(marker))
    with fed.session() as session:
        jobs = {name: submit(session, fed.job(order, change)) for name, change in tried.items()}
        everywhere = edit_json("meta.json", lambda said: said["deploy_map"].update(party=["@ALL"]))
        jobs["to everybody, with code"] = submit(session, fed.job(order, both(tried["code"], everywhere)))
        for name, (job, why) in jobs.items():
            if why:
                continue
            status, said = fed.refusal(session, job)
            assert "FAILED_TO_RUN" in status or "CANT_SCHEDULE" in status, (name, status, said)
            assert re.search(r"pbmvfl: the job is not of the form|BYOC not permitted|not written as", said), (
                name,
                said,
            )
            assert "Traceback" not in said
            for home in fed.homes.values():
                assert not (home.kit / job).exists() or home.is_server, f"{name}: its files stay at {home.name}"
    assert sum(1 for _, why in jobs.values() if not why) >= 6, jobs
    fed.restart_parties()
    assert not marker.exists()
    assert not fed.homes["bank"].run("never").exists()


def test_settings_in_a_jobs_folder_are_a_live_attack_that_the_kits_own_file_ends(fed: Attacked, tmp_path: Path) -> None:
    """The control: what NVFlare does when a process of a kit looks for its drivers, with and without our file."""
    program = """
import os, sys
os.chdir(sys.argv[1])
from nvflare.fuel.utils.config_service import ConfigService
ConfigService.initialize(section_files={}, config_path=[sys.argv[1]])
from nvflare.fuel.f3 import communicator
communicator.load_comm_drivers()
"""
    for hardened in (False, True):
        kit, marker = copy_kit(fed.homes["bank"].kit, tmp_path / f"kit-{hardened}"), tmp_path / f"ran-{hardened}"
        if not hardened:
            (kit / "comm_config.json").unlink()
        put("job/app/config/comm_config.json", json.dumps({"comm_driver_path": "."}))(kit)
        put("job/app/config/driver.py", PAYLOAD.format(marker=str(marker)))(kit)
        ended = subprocess.run([sys.executable, "-c", program, str(kit)], capture_output=True, text=True, timeout=120)
        assert marker.exists() is not hardened, ended.stderr[-2000:]


def test_a_job_without_the_leads_signature_or_changed_after_it_is_refused(
    fed: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nvflare.fuel.hci.client import file_transfer

    sign = file_transfer.sign_folders
    order = fed.training("unsigned")

    def sign_then_change(folder: str, *rest: Any, **named: Any) -> None:
        sign(folder, *rest, **named)
        edit(PARTY_CONFIG, '"tasks"', '"tasks" ')(Path(folder))

    with fed.session() as session:
        for forge in (lambda *_, **__: None, sign_then_change):
            monkeypatch.setattr(file_transfer, "sign_folders", forge)
            job, why = submit(session, fed.job(order))
            status, said = ("", why) if why else fed.refusal(session, job)
            assert why or "FINISHED" in status
            assert re.search("sign", said), (status, said)
    assert not fed.homes["bank"].run("unsigned").exists()


# --- the lead, and those who would be ---

FORBIDDEN: dict[str, Callable[[Any, str], Any]] = {
    "ls": lambda s, _: s.ls_target("bank", "-l", "."),
    "cat": lambda s, _: s.cat_target("bank", "", "local/resources.json"),
    "grep": lambda s, _: s.grep_target("bank", "-n", "key", "log.txt"),
    "head": lambda s, _: s.head_target("bank", "", "log.txt"),
    "tail": lambda s, _: s.tail_target("server", "", "log.txt"),
    "pwd": lambda s, _: s.get_working_directory("bank"),
    "job logs": lambda s, job: s.get_job_logs(job),
    "configure_job_log": lambda s, job: s.configure_job_log(job, "DEBUG"),
    "configure_site_log": lambda s, _: s.configure_site_log("DEBUG"),
    "download": lambda s, job: s.download_job_result(job),
    "restart": lambda s, _: s.restart("client"),
    "remove_client": lambda s, _: s.remove_client("bank"),
    "disable_client": lambda s, _: s.disable_client("bank"),
    "report_resources": lambda s, _: s.report_resources("client"),
    "report_env": lambda s, _: s._do_command("report_env client"),
    "sys_info": lambda s, _: s._do_command("sys_info client"),
    "cells": lambda s, _: s._do_command("cells"),
    "stop_cell": lambda s, _: s._do_command("stop_cell bank"),
    "show_config_vars": lambda s, _: s._do_command("show_config_vars bank"),
}


def some_job(session: Any) -> str:
    return str(session.list_jobs()[0]["job_id"])


def outcome_of(call: Callable[[], Any]) -> str:
    """An error's words, or what came back."""
    try:
        return f"came back: {call()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_the_lead_has_no_shell_no_logs_no_files_and_still_watches(fed: Attacked) -> None:
    with fed.session() as session:
        job = some_job(session)
        assert session.get_job_meta(job)["submitter_name"] == LEAD
        told = {name: outcome_of(partial(call, session, job)) for name, call in FORBIDDEN.items()}
        assert set(session.check_status("client")["client_status"][0]) >= {"client_name"}
    says_no = re.compile(r"(?i)not authorized|not permitted|no permission|invalid_request|unauthenticated|error")
    tells = re.compile(r"/kit|resources|\.json|rootCA|total|free|log\.txt")
    for name, answer in told.items():
        assert not answer.startswith("came back") or says_no.search(answer) or not tells.search(answer), (name, answer)


def admin_kit(fed: Attacked, place: Path, credentials: Credentials, user: str) -> Path:
    """The lead's kit with somebody else's certificate in it."""
    kit = copy_kit(fed.clinic.lead_kit, place)
    for source, name in ((credentials.certificate, "client.crt"), (credentials.private_key, "client.key")):
        (kit / "startup" / name).write_bytes(source.read_bytes())
    said = json.loads((kit / "startup" / "fed_admin.json").read_text())
    said["admin"]["username"] = user
    (kit / "startup" / "fed_admin.json").write_text(json.dumps(said))
    return kit


@pytest.mark.parametrize("kind", ["a party", "another admin", "the lead's name, another federation"])
def test_nobody_else_submits(fed: Attacked, tmp_path: Path, kind: str) -> None:
    """Nor aborts, nor deletes. A right of an admin's role is in its certificate, and no role but the lead's has any."""
    user, credentials = {
        "a party": ("bank", own_certificate(fed, "bank")),
        "another admin": ("root@bank.example", fed.strangers.issue("root@bank.example", role="project_admin")),
        "the lead's name, another federation": (LEAD, fed.others.issue(LEAD, role="lead")),
    }[kind]
    kit = admin_kit(fed, tmp_path / "kit", credentials, user)
    with fed.session() as lead:
        before = {each["job_id"] for each in lead.list_jobs()}
    job = next(iter(before))
    found = []
    try:
        with fed.session(kit, user, timeout=6) as session:
            folder = fed.job(fed.training("stolen"))
            found.append(outcome_of(lambda: session.submit_job(str(folder))))
            found.append(outcome_of(lambda: session.abort_job(job)))
            found.append(outcome_of(lambda: session.delete_job(job)))
            found.append(outcome_of(lambda: session.clone_job(job)))
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    assert found
    assert not any(each.startswith("came back") for each in found), found
    with fed.session() as lead:
        assert {each["job_id"] for each in lead.list_jobs()} == before


# --- the line, while a run goes on ---


def line_is_open(port: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        time.sleep(0.05)
    return False


def say_at_line(fed: Attacked, credentials: Credentials, answer: Callable[[bytes], bytes]) -> str:
    """How the line refuses an answer to its challenge."""
    with Guest(Site("bank", ("127.0.0.1", fed.line_port), credentials)) as guest:
        try:
            guest.say(answer(guest.hear()))
            return f"heard {guest.hear()!r}"
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"


def _instead(noise: bytes, challenge: bytes) -> bytes:
    del challenge
    return noise


def try_the_line(fed: Attacked) -> None:
    """Everything that somebody can do to a line who is not a party, or is one and would be another."""
    authority = fed.homes["bank"].authority
    for kind, credentials in wrong_certificates(fed).items():
        answer = tls_talk(fed.line_port, credentials, authority=authority)
        assert answer.startswith("refused: ") or answer == "closed", (kind, answer)
    for name in ("stranger", LEAD, SERVER):
        answer = say_at_line(fed, fed.strangers.issue(name), lambda _: b"")
        assert "is not of this federation" in answer, (name, answer)

    def posing_as(name: str, identity: Identity) -> Callable[[bytes], bytes]:
        home = fed.homes["bank"]
        job = fed.status(SERVER).job  # type: ignore[union-attr]
        auth = PartyMessageAuth(identity, home.pins().server, name, link_context(home, job))
        return auth.join

    bank, own = fed.homes["bank"].identity(), own_certificate(fed, "bank")
    for answer_ in (posing_as("hospital", bank), posing_as("bank", Identity.generate())):
        assert "is not signed by its pinned identity" in say_at_line(fed, own, answer_)
    assert "RESOURCE_EXHAUSTED" in say_at_line(fed, own, lambda _: bytes(streams.LIMIT + 1))
    random = np.random.default_rng(7)
    for _ in range(60):
        noise = random.bytes(int(random.integers(1, 400)))
        with socket.create_connection(("127.0.0.1", fed.line_port), timeout=20) as plain, contextlib.suppress(OSError):
            plain.sendall(noise)
        assert "its join has" in say_at_line(fed, own, partial(_instead, noise))


def open_ports(fed: Attacked) -> set[int]:
    """Every port at which a process of a kit listens, as the system counts them."""
    found = set()
    for home in fed.homes.values():
        keeper = psutil.Process(read_record(home).pid)  # type: ignore[union-attr]
        for process in (keeper, *keeper.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                found |= {each.laddr.port for each in process.net_connections("tcp") if each.status == "LISTEN"}
    return found


@contextlib.contextmanager
def flood(ports: set[int]) -> Iterator[Counter[int]]:
    """Silent connections and unfinished handshakes, 60 of them open at a time at each port; how many there were."""
    over, made = threading.Event(), Counter[int]()

    def connect() -> None:
        held: deque[socket.socket] = deque()
        while not over.wait(0.005):
            for port in ports:
                with contextlib.suppress(OSError):
                    held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                    made[port] += 1
                    if made[port] % 2:
                        held[-1].sendall(b"\x16\x03\x01\x02\x00\x01")
            while len(held) > 60 * len(ports):
                held.popleft().close()
        for each in held:
            each.close()

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        over.set()
        thread.join(timeout=30)


def test_a_run_completes_while_the_line_is_attacked(fed: Attacked) -> None:
    """With strangers at every open port since before it began."""
    order = fed.training("run", num_epochs=200)
    kits = open_ports(fed)
    with flood(kits) as connected:
        assert wait_for(lambda: all(connected[port] > 60 for port in kits))
        thread, found = in_thread(lambda: fed.supervise(order, fed.clinic.run("run")))
        assert line_is_open(fed.line_port, 120)
        with flood(open_ports(fed) - kits) as connected_to_jobs:
            _attack_the_line(fed, thread)
        thread.join(timeout=60)
    assert found, "the run did not end"
    assert getattr(found[0], "ending", found[0]) is Ending.DONE, found
    assert fed.port in connected
    assert connected_to_jobs[fed.line_port] > 60
    for name in PARTIES:
        assert (fed.homes[name].model("run") / "part.json").is_file()


def _attack_the_line(fed: Attacked, thread: threading.Thread) -> None:
    """For as long as a run goes on."""
    states, rounds = set(), 0
    until = time.monotonic() + 200
    while thread.is_alive() and time.monotonic() < until:
        status = fed.status(SERVER)
        if status is None or status.run != "run" or status.state.is_over:
            time.sleep(0.05)
            continue
        states.add(status.state)
        try:
            try_the_line(fed)
            rounds += 1
        except (AssertionError, OSError, grpc.RpcError):
            # The line closes when the work is over, in the middle of anything; and only then.
            if not wait_for(lambda: fed.status(SERVER).state.is_over, 10):  # type: ignore[union-attr]
                raise
    assert rounds >= 1
    assert states & {State.WARMING_UP, State.JOINING, State.HANDSHAKE, State.TRAINING}


def test_frames_that_are_replayed_reordered_or_of_another_job_do_nothing(fed: Attacked) -> None:
    """By the very keys of the kits. The handler is what would spend something."""

    def handle(_: Channel, body: bytes) -> bytes:
        handled.append(body)
        return b"answer to " + body

    handled: list[bytes] = []
    server, party = server_message_auth(fed.clinic, "job-1"), party_message_auth(fed.homes["bank"], "job-1")
    challenge = server.challenge()
    channel = server.admit("bank", challenge, party.join(challenge)).channel
    questions = []
    for body in (b"one", b"two"):
        _, question = channel.question(Channel.PROTOCOL, body)
        questions.append(question)
        answer = party.respond(question, handle)[1]
        assert channel.answer(answer).body == b"answer to " + body  # type: ignore[union-attr]
    assert party.respond(questions[1], handle)[1] == answer  # asked again: the same bytes
    _, three = channel.question(Channel.PROTOCOL, b"three")
    _, four = channel.question(Channel.PROTOCOL, b"four")
    for wrong in (
        questions[0],
        four,
        three[:-1] + bytes([three[-1] ^ 1]),
        three[:8] + b"\4" + three[9:],
        b"",
        three[9:],
    ):
        with pytest.raises(LinkError):
            party.respond(wrong, handle)
    assert handled == [b"one", b"two"]
    other = party_message_auth(fed.homes["bank"], "job-2")
    with pytest.raises(LinkError, match="another job"):
        other.join(challenge)
    again = party_message_auth(fed.homes["bank"], "job-1")  # the same job, another process
    again.join(server.challenge())
    with pytest.raises(LinkError, match="did not seal"):
        again.respond(three, handle)
    assert handled == [b"one", b"two"]


# --- what is left behind ---


def files_under(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        for here, _, names in os.walk(folder):
            for name in names:
                path = Path(here) / name
                if path.is_file() and not path.is_symlink():
                    yield path


def test_keys_and_private_files_are_their_owners_alone(fed: Attacked) -> None:
    public = {"federation.toml", "pins.json", "organisation.json", "rows.csv", "schema.json", "labels.csv"}
    public |= {"revoked.pem"}
    seen = set()
    for home in fed.homes.values():
        assert home.path.stat().st_mode & 0o077 == 0
        for path in files_under(home.path):
            seen.add(path.name)
            if path.name not in public:
                assert path.stat().st_mode & 0o077 == 0, f"{path} has mode {path.stat().st_mode & 0o777:o}"
    assert {"identity.key", "client.key", "server.key", "policy.toml", "ledger.sqlite", "rows.arrow"} <= seen


def test_no_key_is_anywhere_but_in_its_file(fed: Attacked) -> None:
    secret = {}
    for home in fed.homes.values():
        keys = [home.path / "identity.key", home.private_key, home.lead_kit / "startup" / "client.key"]
        for path in keys:
            if path.is_file():
                lines = [line for line in path.read_text().splitlines() if not line.startswith("-----")]
                secret[path] = lines[len(lines) // 2].encode()
    assert len(secret) == 2 * len(fed.homes) + 1
    count = 0
    for path in files_under(*(home.path for home in fed.homes.values())):
        count += 1
        data = path.read_bytes()
        for owner, part in secret.items():
            assert part not in data or path == owner, f"{path} has a part of {owner}"
    assert count > 50


def test_no_id_and_no_value_of_a_row_is_where_it_does_not_belong(fed: Attacked) -> None:
    """Ids stay in the tables, in the aligned rows and in the ledger; values in the first two. Other organisations have
    nothing of either."""
    for index, name in enumerate(PARTIES):
        home = fed.homes[name]
        # Row by row: of an id the text, of a value the decimals and the float's own bytes.
        own = [own_id(name, row).encode() for row in range(7)]
        ids = [common_id(row).encode() for row in range(ROWS)]
        values = np.array([[feature(index, row, column) for column in range(COLUMNS)] for row in range(ROWS)])
        shown = [repr(float(value)).encode() for value in values.flat]
        assert min(map(len, shown)) > 10  # so that none is found by chance; of floats a whole row is looked for
        floats = [row.astype(kind).tobytes() for row in values for kind in (np.float32, np.float64)]
        scaled = [row.tobytes() for row in np.array(AlignedRows.load(home.alignment("people")).features)]
        found = (home.path / "rows.csv").read_bytes()
        assert all(each in found for each in (*own, *ids, *shown))  # the search would find them
        mapped = (home.alignment("people") / "rows.arrow").read_bytes()
        assert all(each in mapped for each in (*ids, *scaled))
        assert not any(each in mapped for each in own), "rows that are not common are in the aligned ones"
        for path in files_under(*(each.path for each in fed.homes.values())):
            data = path.read_bytes()
            if path.is_relative_to(home.path):
                if path.name in ("rows.csv", "rows.arrow") or path.name.startswith("ledger.sqlite"):
                    continue
                secret = [*own, *ids, *shown, *floats, *scaled]
            else:
                secret = [*own, *shown, *floats, *scaled]
            hit = next((each for each in secret if each in data), None)
            assert hit is None, f"{path} has {hit!r} of {name}"


def test_the_guard_is_in_force_in_every_process_that_can_be_spoken_to(fed: Attacked) -> None:
    """Of both roles, the kits' and the jobs'. Those without are the evil ones above, and this very process."""
    found = (fed.folder / "in-force.txt").read_text().splitlines()
    guarded = {line.split(" ")[1] for line in found if line.startswith("pbmvfl.deploy.nvflare.guard ")}
    start = "nvflare.private.fed.app."
    assert guarded == {
        f"{start}client.client_train",
        f"{start}client.worker_process",
        f"{start}server.server_train",
        f"{start}server.runner_process",
    }
    assert not any(start in line for line in found if not line.startswith("pbmvfl.")), found


def test_no_process_of_a_kit_unpickled_anything(fed: Attacked) -> None:
    """But compiled code that this machine keeps for itself."""
    out = fed.folder / "unpickled.txt"
    program = "import pickle, datetime; pickle.loads(pickle.dumps(datetime.date(2000, 1, 1)))"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    lines = out.read_text().splitlines()
    assert any(line.startswith("datetime.date by ") for line in lines), "the hook would not have seen it"
    others = [line for line in lines if not line.startswith("datetime.date by ") and "/numba/" not in line]
    assert others == []


def test_nothing_in_the_library_unpickles() -> None:
    """A word list over the sources: pickle and what uses it unless told not to."""
    permitted = re.compile(r"allow_pickle=False|weights_only=True")
    wrong = re.compile(
        r"\bpickle\b|\bmarshal\b|\bshelve\b|\bdill\b|cloudpickle|joblib|torch\.load\(|np\.load\(|\beval\(|\bexec\("
    )
    source = Path(streams.__file__).parents[2]
    found = []
    for path in sorted((source / "deploy").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if wrong.search(line) and not permitted.search(line):
                found.append(f"{path.name}:{number}: {line.strip()}")
    assert found == []
