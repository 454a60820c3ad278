"""A small federation that really runs, by its own kits, and what attackers of it are given: certificates, kits, jobs.

Whoever provisions a trial has the authority's key; here it is kept, so that strangers can be signed by it.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import secrets
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pbmvfl.deploy.alignment.runner import LabelRows, Request
from pbmvfl.deploy.link.tls import Credentials
from pbmvfl.deploy.monitoring.status import Status, read_status
from pbmvfl.deploy.nvflare import authority, processes
from pbmvfl.deploy.nvflare.authority import provision
from pbmvfl.deploy.nvflare.job import write_job
from pbmvfl.deploy.nvflare.supervisor import Supervisor, Watched
from pbmvfl.deploy.site.federation_file import FederationFile
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import JobResult, JobSpec, Work
from pbmvfl.plan.plan import Plan
from support import nvflare_settings  # noqa: F401
from support.federation_texts import LEAD, SERVER, federation_text, free_ports

PARTIES = ("bank", "hospital")
ROWS, COLUMNS = 60, 3
_DAY = datetime.timedelta(days=1)


class Strangers:
    """Certificates that the federation's own authority has signed, or another one."""

    def __init__(self, folder: Path, authority: tuple[bytes, bytes] | None = None) -> None:
        """`authority` is a certificate and its key; without it one is made."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        if authority is None:
            self._key: Any = ec.generate_private_key(ec.SECP256R1())
            self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "people")])
            root = self._sign("people", self._key.public_key(), -1, 30, is_authority=True)
            (folder / "rootCA.pem").write_bytes(root)
        else:
            (folder / "rootCA.pem").write_bytes(authority[0])
            self._name = x509.load_pem_x509_certificate(authority[0]).subject
            self._key = serialization.load_pem_private_key(authority[1], password=None)

    def issue(self, name: str, *, first_day: int = -1, last_day: int = 30, role: str = "") -> Credentials:
        key = ec.generate_private_key(ec.SECP256R1())
        place = self._folder / f"{name}{first_day}{last_day}{role}"
        certificate, private = place.with_suffix(".crt"), place.with_suffix(".key")
        certificate.write_bytes(self._sign(name, key.public_key(), first_day, last_day, role=role))
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        private.chmod(0o600)
        return Credentials(certificate=certificate, private_key=private, authority=self._folder / "rootCA.pem")

    def key_file(self, path: Path) -> Path:
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        path.write_bytes(self._key.private_bytes(*form))
        return path

    def _sign(
        self, name: str, public: Any, first_day: int, last_day: int, *, role: str = "", is_authority: bool = False
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        said = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        if role:  # as NVFlare writes it
            said.append(x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, role))
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name(said))
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + first_day * _DAY)
            .not_valid_after(now + last_day * _DAY)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=is_authority)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        return made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


class Attacked:
    """The federation, its folders, and how to use and misuse it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.line_port = free_ports(2)
        (folder / "federation.toml").write_text(
            federation_text(PARTIES, host="127.0.0.1", port=self.port, line_port=self.line_port, patience=60)
        )
        self.homes, authority = _provision(folder / "federation.toml", folder / "homes")
        self.strangers = Strangers(folder / "strangers", authority)
        self.others = Strangers(folder / "others")
        _write_rows(self.homes)

    # --- processes ---

    def start(self) -> None:
        processes.start(self.homes[SERVER], timeout=120)
        with ThreadPoolExecutor(len(PARTIES)) as pool:
            list(pool.map(lambda name: processes.start(self.homes[name], wait=30, timeout=120), PARTIES))

    def stop(self) -> None:
        for home in reversed(list(self.homes.values())):
            with contextlib.suppress(Exception):
                processes.stop(home)

    def restart_parties(self) -> None:
        for name in PARTIES:
            processes.stop(self.homes[name])
            processes.start(self.homes[name], wait=30, timeout=120)

    def wait_for_parties(self, seconds: float = 120.0) -> None:
        """After a new start of the server: until it has taken all parties again."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(Exception), self.session() as session:
                if {each.name for each in session.get_system_info().client_info} == set(PARTIES):
                    return
            time.sleep(0.5)
        raise AssertionError("the parties did not come back")

    # --- honest work ---

    @property
    def clinic(self) -> SiteFolder:
        return self.homes[SERVER]

    def align(self, name: str = "people") -> JobResult:
        folder = self.clinic.request(name)
        Request.of(self.clinic).write(folder)
        order = JobSpec(work=Work.ALIGN, federation="people", alignment=name)
        return self.supervise(order, folder)

    def training(self, run: str, **choices: Any) -> JobSpec:
        rows = LabelRows.load(self.clinic, "people")
        usual = {"num_parties": len(PARTIES), "num_samples": rows.num_rows, "num_classes": 2, "evaluation": "none"}
        usual |= {"label_epsilon": 4.0}
        plan = Plan.of(**{**usual, "batch_size": 10, "num_epochs": 2, "embedding_dim": 2, **choices})
        return JobSpec(
            work=Work.TRAIN,
            federation="people",
            alignment="people",
            run=run,
            run_id=secrets.token_hex(8),
            plan=plan,
        )

    def supervise(self, order: JobSpec, folder: Path) -> JobResult:
        watched = Watched(folder=folder, progress=lambda: 0)
        said: list[str] = []
        supervisor = Supervisor(self.clinic, order, watched, token=secrets.token_hex(8), say=said.append)
        return supervisor.run(keep_going=False)

    def status(self, name: str) -> Status | None:
        return read_status(self.homes[name].status)

    # --- jobs and the lead ---

    @contextlib.contextmanager
    def session(self, kit: Path | None = None, user: str = LEAD, timeout: float = 20.0) -> Iterator[Any]:
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        with contextlib.redirect_stdout(io.StringIO()):
            session = new_secure_session(user, str(kit or self.clinic.lead_kit), timeout=timeout)
        try:
            yield session
        finally:
            with contextlib.suppress(Exception):
                session.close()

    def job(self, order: JobSpec, change: Callable[[Path], None] | None = None) -> Path:
        folder = self.folder / f"job-{secrets.token_hex(4)}"
        write_job(folder, order, self.clinic.federation)
        if change is not None:
            change(folder)
        return folder

    def refusal(self, session: Any, job: str, *, seconds: float = 60.0) -> tuple[str, str]:
        """How a job ended, and what the sites said; it fails if the job runs."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            meta = session.get_job_meta(job)
            status = str(meta.get("status", ""))
            assert "RUNNING" not in status, meta
            said = meta.get("job_deploy_detail") or meta.get("schedule_history")
            if (
                status.startswith("FINISHED") or "ABANDON" in status
            ) and said:  # what sites said is stored a little later
                return status, json.dumps(meta.get("job_deploy_detail", [])) + json.dumps(
                    meta.get("schedule_history", [])
                )
            time.sleep(0.2)
        raise AssertionError(f"job {job} was neither refused nor run within {seconds} seconds: {meta}")


def _provision(file: Path, out: Path) -> tuple[dict[str, SiteFolder], tuple[bytes, bytes]]:
    """The homes, and the authority that `provision` would forget."""
    kept: list[tuple[bytes, bytes]] = []
    init = authority.init

    def keep(federation_toml: Path, folder: Path) -> FederationFile:
        found = init(federation_toml, folder)
        kept.append(((folder / "rootCA.pem").read_bytes(), (folder / "rootCA.key").read_bytes()))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(authority, "init", keep)
        homes = provision(file, out)
    return homes, kept[0]


def own_id(owner: str, row: int) -> str:
    """An id that one organisation alone has."""
    return f"only-{owner}-{row:04d}"


def common_id(row: int) -> str:
    return f"person-qz-{row:04d}"


def feature(owner: int, row: int, column: int) -> float:
    """A number that is found nowhere by chance."""
    return round(0.13713713 + 0.00713137 * row + 0.00019319 * column + 0.05217931 * owner, 9) + 1.1e-10


def _write_rows(homes: dict[str, SiteFolder]) -> None:
    random = np.random.default_rng(3)
    for index, name in enumerate(PARTIES):
        home = homes[name].path
        rows = [(common_id(i), i) for i in range(ROWS)] + [(own_id(name, i), 100 + i) for i in range(7)]
        lines = ["id," + ",".join(f"c{k}" for k in range(COLUMNS))]
        for i in random.permutation(len(rows)):
            cells = ",".join(repr(feature(index, rows[i][1], k)) for k in range(COLUMNS))
            lines.append(f"{rows[i][0]},{cells}")
        (home / "rows.csv").write_text("\n".join(lines) + "\n")
        columns = {f"c{k}": {"range": [0, 2]} for k in range(COLUMNS)}
        (home / "schema.json").write_text(json.dumps({"columns": columns}))
        _policy(home, 'file = "rows.csv"\nid = "id"\nschema = "schema.json"\ndataset = "people"', limit=True)
    home = homes[SERVER].path
    ids = [common_id(i) for i in range(ROWS)] + [own_id(SERVER, i) for i in range(5)]
    (home / "labels.csv").write_text("\n".join(["id,label", *(f"{each},{i % 2}" for i, each in enumerate(ids))]) + "\n")
    _policy(home, 'file = "labels.csv"\nid = "id"\nlabel = "label"', limit=False)


def _policy(home: Path, data: str, *, limit: bool) -> None:
    text = f"[data]\n{data}\n"
    if home.name != PARTIES[-1]:
        # The last party alone keeps a process that waits for a job, as is usual; the others start one when a job comes.
        # Both ways are attacked, and sites that are started again and again do not load torch for nobody.
        text += "[runs]\nwaiting_worker = false\n"
    if limit:  # so large that nothing here ends by it: what is tried here is not the ledger
        text += '[[limit]]\nepsilon = 1e6\ndelta = 1e-5\nunit = "cell"\naccounting = "strict"\n'
    path = home / "policy.toml"
    path.write_text(text)
    path.chmod(0o600)


# --- at a port ---


def tls_talk(port: int, credentials: Credentials | None, *, authority: Path, seconds: float = 10) -> str:
    """Try to come in at a port: "heard" if the other end took the certificate, else what it did."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(str(authority))
    if credentials is not None:
        context.load_cert_chain(str(credentials.certificate), str(credentials.private_key))
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        plain.settimeout(seconds)
        try:
            with context.wrap_socket(plain, suppress_ragged_eofs=False) as line:
                data = line.recv(1 << 12)
                return "heard: " + data.decode("latin-1") if data else "closed"
        except TimeoutError:
            return "heard: (it waits)"
        except ssl.SSLError as error:
            return f"refused: {error.reason}"
        except OSError as error:
            return f"refused: {type(error).__name__}"


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread and what came of it, an error included."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def copy_kit(source: Path, place: Path) -> Path:
    shutil.copytree(source, place)
    return place
