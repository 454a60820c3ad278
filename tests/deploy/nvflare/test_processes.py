"""The process of a kit: what is checked before it starts, one at a time, and an end that ends nobody else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

import psutil

from pbmvfl.deploy.link.tls import Credentials
from pbmvfl.deploy.nvflare import keeper, processes
from pbmvfl.deploy.nvflare.authority import provision
from pbmvfl.deploy.nvflare.processes import start, status, stop
from pbmvfl.deploy.site import preflight
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.preflight import check_server
from pbmvfl.errors import FederationError, LinkError, PbmvflError
from support.certificates import Authority
from support.deployments import POLICY, SERVER, federation_text, free_ports, plain_home

LONG = 120.0


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SiteFolder]]:
    """A trial's folders; whatever of them runs at the end is stopped."""
    folder = tmp_path_factory.mktemp("kits")
    port, line_port = free_ports()
    (folder / "federation.toml").write_text(federation_text(port=port, line_port=line_port))
    made = provision(folder / "federation.toml", folder / "homes")
    for name in ("bank", "hospital"):
        made[name].policy.write_text(POLICY)
        made[name].policy.chmod(0o600)
    yield made
    for home in made.values():
        stop(home)


def soon(true: Callable[[], bool], within: float = LONG) -> bool:
    until = time.monotonic() + within
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def asks_for_a_certificate(port: int) -> bool:
    """Whether a stranger who speaks TLS is turned away for having none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), timeout=LONG) as plain, context.wrap_socket(plain) as line:
        try:
            line.recv(1)
        except ssl.SSLError as error:
            return "CERTIFICATE_REQUIRED" in (error.reason or "")
        except ConnectionResetError:
            return True  # it hung up so fast that its reason was lost
    return False


def record_of(home: SiteFolder) -> keeper.Record:
    record = keeper.read_record(home)
    assert record is not None
    return record


# --- before a start ---


def test_a_party_whose_server_is_not_there_says_so(homes: dict[str, SiteFolder]) -> None:
    with pytest.raises(LinkError, match=r"no process listens at 127\.0\.0\.1:\d+; the label holder starts it with"):
        start(homes["hospital"])
    assert not status(homes["hospital"]).running


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda home: home.policy.unlink(), r"policy\.toml cannot be read"),
        (lambda home: home.private_key.chmod(0o644), r"client\.key may be read by others \(mode 644\); chmod 600 it"),
        (lambda home: (home.path / "identity.key").chmod(0o604), r"identity\.key may be read by others"),
        (lambda home: (home.path / "pins.json").unlink(), r"pins\.json cannot be read"),
        (lambda home: home.certificate.unlink(), r"lacks client\.crt"),
        (lambda home: home.certificate.write_text("x"), r"client\.crt is no certificate"),
        (lambda home: (home.kit / "local/custom").mkdir(), "has files that no kit has: custom"),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(
    homes: dict[str, SiteFolder], tmp_path: Path, break_it: Callable[[SiteFolder], object], words: str
) -> None:
    shutil.copytree(homes["hospital"].path, tmp_path / "hospital")
    home = SiteFolder.at(tmp_path / "hospital")
    break_it(home)
    with pytest.raises(PbmvflError, match=words):
        start(home)
    assert keeper.read_record(home) is None


def test_a_port_that_another_program_has_is_named(homes: dict[str, SiteFolder]) -> None:
    with socket.socket() as taken:
        taken.bind(("", homes[SERVER].federation.port))
        taken.listen()
        with pytest.raises(FederationError, match=r"port=\d+ cannot be used here: Address already in use"):
            start(homes[SERVER])


def test_a_port_that_a_killed_start_still_has_is_waited_for(
    homes: dict[str, SiteFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = homes[SERVER]
    dead = keeper.Record(pid=1, birth="another boot", site=1, site_birth="another boot", since="")
    monkeypatch.setattr(processes, "read_record", lambda _: dead)
    with socket.socket() as taken:
        taken.bind(("", home.federation.line_port))
        taken.listen()
        looks: list[float] = []

        def release(seconds: float) -> None:
            looks.append(seconds)
            taken.close()

        monkeypatch.setattr(preflight.time, "sleep", release)
        assert processes.check_start(home) > 0
    assert len(looks) == 1


# --- one handshake ---


class Listener:
    """A TLS server that takes one connection after another and says nothing, as a site's does to a stranger."""

    def __init__(self, credentials: Credentials) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._context.load_verify_locations(str(credentials.authority))
        self._context.load_cert_chain(str(credentials.certificate), str(credentials.private_key))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                plain, _ = self._socket.accept()
            except OSError:
                return
            plain.settimeout(LONG)
            try:
                with self._context.wrap_socket(plain, server_side=True) as line:
                    line.recv(1)
            except (ssl.SSLError, OSError):
                plain.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def listen() -> Iterator[Callable[[Credentials], int]]:
    opened: list[Listener] = []

    def open_(credentials: Credentials) -> int:
        opened.append(Listener(credentials))
        return opened[-1].port

    yield open_
    for each in opened:
        each.close()


def test_a_server_of_the_federation_is_reached(listen: Callable[[Credentials], int], tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    port = listen(authority.issue(SERVER))
    check_server(plain_home(tmp_path / "bank", "bank", authority, port=port))


@pytest.mark.parametrize(
    ("days", "words"),
    [
        ({"first_day": -9, "last_day": -2}, "expired, by this machine's clock"),
        ({"first_day": 2, "last_day": 9}, "not valid yet, by this machine's clock; is the clock right"),
    ],
)
def test_a_servers_dates_are_said_in_words(
    listen: Callable[[Credentials], int], tmp_path: Path, days: dict[str, int], words: str
) -> None:
    authority = Authority(tmp_path / "authority")
    port = listen(authority.issue(SERVER, **days))
    with pytest.raises(FederationError, match=words):
        check_server(plain_home(tmp_path / "bank", "bank", authority, port=port))


def test_a_server_of_another_federation_is_not_trusted(listen: Callable[[Credentials], int], tmp_path: Path) -> None:
    port = listen(Authority(tmp_path / "theirs").issue(SERVER))
    home = plain_home(tmp_path / "bank", "bank", Authority(tmp_path / "ours"), port=port)
    with pytest.raises(
        FederationError,
        match=r"not signed by this federation's authority.*a proxy in between that inspects",
    ):
        check_server(home)


def test_a_party_that_listens_in_the_servers_place_is_named(
    listen: Callable[[Credentials], int], tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority")
    port = listen(authority.issue("hospital"))
    with pytest.raises(FederationError, match="it has the certificate of hospital; permitted: clinic"):
        check_server(plain_home(tmp_path / "bank", "bank", authority, port=port))


@pytest.mark.parametrize("what", ["expired", "another federation's"])
def test_a_certificate_that_the_server_refuses_is_said_in_words(
    listen: Callable[[Credentials], int], tmp_path: Path, what: str
) -> None:
    """NVFlare's own client would say nothing, and try for ever."""
    authority = Authority(tmp_path / "authority")
    port = listen(authority.issue(SERVER))
    if what == "expired":
        home = plain_home(tmp_path / "bank", "bank", authority, port=port, first_day=-9, last_day=-2)
    else:
        home = plain_home(tmp_path / "bank", "bank", Authority(tmp_path / "other"), port=port)
        shutil.copyfile(tmp_path / "authority/rootCA.pem", home.authority)
    # Whether the reason comes through is a race with the server's hanging up; either way the words say what to do.
    with pytest.raises(PbmvflError, match=r"does not accept this site's certificate.*check its dates"):
        check_server(home)


def test_something_that_speaks_no_tls_is_not_taken_for_the_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def answer() -> None:
            connection, _ = plain.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        home = plain_home(tmp_path / "bank", "bank", Authority(tmp_path / "a"), port=plain.getsockname()[1])
        with pytest.raises(FederationError, match=r"speaks no TLS 1\.3"):
            check_server(home)


def test_a_name_without_an_address_is_said(tmp_path: Path) -> None:
    home = plain_home(tmp_path / "bank", "bank", Authority(tmp_path / "a"))
    (home.path / "federation.toml").write_text(federation_text(host="no-such-host.invalid"))
    with pytest.raises(LinkError, match=r"host='no-such-host\.invalid' (has no address|cannot be reached)"):
        check_server(SiteFolder.at(home.path))


# --- running kits ---


@pytest.mark.slow
def test_kits_start_once_survive_a_kill_and_stop_whole(homes: dict[str, SiteFolder]) -> None:
    """One story, since every start takes seconds: server and party, a second start, kills, the end."""
    server, bank = homes[SERVER], homes["bank"]
    assert start(server, timeout=LONG).ready
    assert (server.path / "state/jobs").is_dir(), "the job store is not where the kit says"
    for digit in range(8):
        folder = bank.kit / f"0000000{digit}-0000-4000-8000-000000000000"
        (folder / "app_bank").mkdir(parents=True, mode=0o700)
        folder.chmod(0o700)
        (folder / "meta.json").touch(mode=0o600)
    (bank.kit / "10000000-0000-4000-8000-000000000000/app_bank").mkdir(parents=True)  # of a deployment that was killed
    party = start(bank, timeout=LONG)
    assert (party.running, party.ready, party.last_error) == (True, True, None)
    assert party.certificate_days is not None
    assert party.certificate_days > 300

    # A second start, in the foreground or not, names the first and leaves it alone.
    for second in (start, processes.run):
        with pytest.raises(FederationError, match=rf"bank runs already: process {party.pid} .*`pbmvfl party stop`"):
            second(bank)
    assert status(bank).pid == party.pid

    # Folders of old jobs are gone, all but the newest.
    assert len(list(bank.kit.glob("0000000?-*"))) == processes.KEPT_JOBS
    assert not list(bank.kit.glob("10000000-*"))

    # What a site's process is given: its own rules, private files, no folder of a job on its path.
    site = psutil.Process(party.pid)
    assert site.environ()["PYTHONSAFEPATH"] == "1"
    assert Path(site.cwd()) == bank.kit
    for path in (*bank.kit.rglob("*"), *bank.logs.rglob("*"), *(bank.path / "state").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path

    # Every port that a site's process opened asks for a certificate, the one for its own jobs too.
    for pid, least in ((party.pid, 1), (status(server).pid, 2)):
        ports = {each.laddr.port for each in psutil.Process(pid).net_connections("tcp") if each.status == "LISTEN"}
        assert len(ports) >= least
        for port in ports:
            assert asks_for_a_certificate(port), port

    # NVFlare's process is killed: its keeper notices and ends; a start works at once.
    os.kill(party.pid or 0, signal.SIGKILL)
    again = start(bank, timeout=LONG)
    assert again.ready
    assert again.pid != party.pid

    # The keeper is killed: what it kept goes too; a start works at once.
    kept = record_of(bank)
    os.kill(kept.pid, signal.SIGKILL)
    assert soon(lambda: not record_of(bank).site_alive)
    assert start(bank, timeout=LONG).ready

    # Stopping ends the keeper and all below it, here and at the server.
    for home in (bank, server):
        last = record_of(home)
        below = [each.pid for each in psutil.Process(last.pid).children(recursive=True)]
        assert last.site in below
        assert stop(home)
        assert soon(lambda below=below: not any(keeper.birth(pid) for pid in below))
        assert not record_of(home).alive
        assert not status(home).running
        assert not stop(home)


def test_what_a_killed_site_left_behind_is_ended(tmp_path: Path) -> None:
    """Job processes have sessions of their own; an orphan of that kind would fight the next start for its line."""
    orphan = "import time; time.sleep(600)"
    site = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {orphan!r}], start_new_session=True)
open("orphan", "w").write(str(child.pid) + "\\n")
time.sleep(600)
"""
    program = f"""
import sys
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.nvflare import keeper
keeper.command = lambda home: [sys.executable, "-c", {site!r}]
home = SiteFolder.at({str(tmp_path / "bank")!r})
sys.exit(keeper.keep(home, keeper.take_lock(home)) % 256)
"""
    home = plain_home(tmp_path / "bank", "bank", Authority(tmp_path / "a"))
    kept = subprocess.Popen([sys.executable, "-c", program])
    try:
        written = home.kit / "orphan"
        assert soon(lambda: written.exists() and written.read_text().endswith("\n"))
        assert soon(lambda: keeper.read_record(home) is not None)
        pid = int(written.read_text())
        assert keeper.birth(pid) is not None
        os.kill(record_of(home).site, signal.SIGKILL)
        assert kept.wait(LONG) == -signal.SIGKILL % 256
        assert keeper.birth(pid) is None
        lock = keeper.take_lock(home)
        assert lock >= 0, "the next start finds the lock free"
        os.close(lock)
    finally:
        kept.kill()
        kept.wait()


def test_two_starts_at_the_same_time_do_not_meet(homes: dict[str, SiteFolder]) -> None:
    lock = keeper.take_lock(homes["hospital"])
    try:
        with pytest.raises(FederationError, match="hospital is just being started by another process"):
            start(homes["hospital"])
    finally:
        os.close(lock)


def test_a_process_that_got_the_number_of_a_dead_one_is_left_alone(homes: dict[str, SiteFolder]) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        said = {"pid": bystander.pid, "site": bystander.pid, "since": "2026-01-01T00:00:00+00:00"}
        born = keeper.birth(bystander.pid)
        assert born is not None
        said |= {"birth": born[:-1] + str((int(born[-1]) + 1) % 10), "site_birth": "x"}
        path = homes["hospital"].path / "state/process.json"
        path.write_text(json.dumps(said))
        assert not status(homes["hospital"]).running
        assert not stop(homes["hospital"])
        assert bystander.poll() is None
        # The control: with its true birth it is the one.
        path.write_text(json.dumps({**said, "birth": born, "site_birth": born}))
        assert status(homes["hospital"]).running
        assert stop(homes["hospital"])
        assert bystander.wait(LONG) == -signal.SIGTERM
    finally:
        bystander.kill()
        bystander.wait()
        (homes["hospital"].path / "state/process.json").unlink(missing_ok=True)


def test_a_dead_process_that_nobody_buried_counts_as_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        assert soon(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
        assert keeper.birth(child.pid) is None
    finally:
        child.wait()


def test_a_process_that_ends_while_it_starts_says_why(
    homes: dict[str, SiteFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = homes["hospital"]
    monkeypatch.setattr(processes, "check_start", lambda *_, **__: 1)
    monkeypatch.setattr(processes.hardening, "harden", lambda _: None)
    resources = home.kit / "local/resources.json"
    whole = resources.read_text()
    try:
        resources.write_text(whole.replace("validator.JobValidator", "validator.NoSuchValidator"))
        with pytest.raises(FederationError, match=r"hospital ended while it started: .*NoSuchValidator.*see "):
            start(home, timeout=LONG)
    finally:
        resources.write_text(whole)


def test_settings_of_the_starter_do_not_reach_a_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVFLARE_MAX_MESSAGE_SIZE", "NVFL_JOB_STORE_ROOT", "FL_LOG_LEVEL"):
        monkeypatch.setenv(name, "1")
    found = keeper.environment()
    assert not [name for name in found if name.startswith(("NVFL", "FL_LOG"))]
    assert found["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("found", ["2.8.3", "2.9.1", "3.0.0"])
def test_another_version_of_nvflare_is_refused_with_what_to_do(found, monkeypatch):
    processes.check_nvflare()  # the control: the version that is installed
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"nvflare": found}[name])
    with pytest.raises(FederationError, match=rf"nvflare={found}; permitted: 2\.9\.0.*pip install"):
        processes.check_start(SiteFolder(Path("nowhere")))
