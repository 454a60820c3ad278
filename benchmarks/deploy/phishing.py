"""A federation of three parties and a label holder with real kits, Phishing's columns split between them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import pbmvfl
from pbmvfl.deploy.nvflare import job_process
from pbmvfl.deploy.nvflare.authority import provision
from pbmvfl.deploy.nvflare.keeper import birth, read_record
from pbmvfl.deploy.site.folder import SiteFolder

SERVER, PARTIES = "clinic", ("bank", "hospital", "insurer")
TAP = Path(__file__).parent / "tap"
_FEDERATION = """
[federation]
name = "phishing"

[server]
name = "{server}"
host = "{host}"
port = {port}
line_port = {line_port}
lead = "lead@clinic.example"
{parties}
[plan]
epsilon = 8

[line]
patience = {patience}
"""
_POLICY = """
[data]
file = "rows.csv"
id = "id"
schema = "schema.json"
dataset = "people"

[[limit]]
epsilon = 5000
delta = 1e-5
unit = "cell"
accounting = "strict"
"""


@dataclass
class Trial:
    """Four organisations' folders on one machine, and their processes."""

    homes: dict[str, SiteFolder]
    #: Name of each site's network namespace; none: this machine's own network.
    networks: dict[str, str]

    @classmethod
    def of(
        cls,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 38002,
        patience: int = 120,
        networks: dict[str, str] | None = None,
    ) -> Trial:
        """Return the organisations of a folder; make them if there are none."""
        if (folder / "homes").is_dir():
            return cls({name: SiteFolder.at(folder / "homes" / name) for name in (SERVER, *PARTIES)}, networks or {})
        folder.mkdir(parents=True, exist_ok=True)
        parties = "".join(f'\n[[party]]\nname = "{name}"\n' for name in PARTIES)
        text = _FEDERATION.format(
            server=SERVER, host=host, port=port, line_port=port + 1, parties=parties, patience=patience
        )
        (folder / "federation.toml").write_text(text)
        homes = provision(folder / "federation.toml", folder / "homes")
        _write_rows(homes)
        return cls(homes, networks or {})

    @property
    def server(self) -> SiteFolder:
        return self.homes[SERVER]

    # --- commands, as an operator gives them ---

    def command(self, site: str, *arguments: str) -> list[str]:
        network = self.networks.get(site)
        prefix = ["ip", "netns", "exec", network] if network else []
        return [*prefix, sys.executable, "-m", "pbmvfl", *arguments]

    def call(self, site: str, *arguments: str, timeout: float = 300) -> str:
        """Run a command to its end, and return its output; raise with the output if it failed."""
        done = subprocess.run(
            self.command(site, *arguments), env=environment(), capture_output=True, text=True, timeout=timeout
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def start(self, site: str) -> None:
        """Start a site in a process of its own, so that it can have a network namespace."""
        code = (
            "import sys; from pbmvfl.deploy.site.folder import SiteFolder; "
            "from pbmvfl.deploy.nvflare import processes; "
            "processes.start(SiteFolder.at(sys.argv[1]), wait=60)"
        )
        network = self.networks.get(site)
        prefix = ["ip", "netns", "exec", network] if network else []
        command = [*prefix, sys.executable, "-c", code, str(self.homes[site].path)]
        subprocess.run(command, env=environment(), check=True, timeout=150, cwd=self.homes[site].path)

    def stop(self, site: str) -> None:
        from pbmvfl.deploy.nvflare import processes

        processes.stop(self.homes[site])

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        try:
            for site in (SERVER, *PARTIES):
                self.start(site)
            yield
        finally:
            for site in (*PARTIES, SERVER):
                self.stop(site)

    # --- processes, found under their own keeper and nowhere else ---

    def parent(self, site: str) -> psutil.Process | None:
        """Return NVFlare's process of a site."""
        record = read_record(self.homes[site])
        return psutil.Process(record.site) if record is not None and record.site_alive else None

    def job(self, site: str) -> psutil.Process | None:
        """Return the process of a site's current job."""
        parent = self.parent(site)
        if parent is None:
            return None
        with contextlib.suppress(psutil.Error):
            for child in parent.children(recursive=True):
                if birth(child.pid) is not None and _has_job(child):
                    return child
        return None


def _has_job(process: psutil.Process) -> bool:
    """Return whether a worker has a job; an idle one still has its parent's pipe."""
    with contextlib.suppress(OSError):
        known = {job_process.__name__, job_process.PARTY, job_process.SERVER}
        return bool(known & set(process.cmdline())) and os.readlink(f"/proc/{process.pid}/fd/0") == os.devnull
    return False


def environment() -> dict[str, str]:
    source = str(Path(pbmvfl.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(TAP), source)), "OMP_NUM_THREADS": "1"}


def wait_for(condition: Callable[[], Any], seconds: float, pause: float = 0.02) -> Any:
    """Return the first truthy value of the condition, or None."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = condition()
        if found:
            return found
        time.sleep(pause)
    return None


def _write_rows(homes: dict[str, SiteFolder]) -> None:
    """Write every party's columns in an order of its own, and the label holder's labels of training and later rows."""
    data = pbmvfl.load_dataset("phishing", num_parties=len(PARTIES))
    chance = np.random.default_rng(5)
    trained, total = data.num_samples, data.num_samples + data.num_test_samples
    ids = [f"p{number:05d}" for number in range(total)]
    for index, name in enumerate(PARTIES):
        values = np.concatenate([data.train_features[index], data.test_features[index]])
        columns = [f"c{index}{number}" for number in range(values.shape[1])]
        folder = homes[name].path
        with open(folder / "rows.csv", "w") as file:
            file.write(",".join(["id", *columns]) + "\n")
            for row in chance.permutation(total):
                file.write(",".join([ids[row], *(f"{value:g}" for value in values[row])]) + "\n")
        (folder / "schema.json").write_text(json.dumps({"columns": {each: {"range": [0, 1]} for each in columns}}))
        _private(folder / "policy.toml", _POLICY)
    folder = homes[SERVER].path
    for file_name, labels, first in (("labels.csv", data.train_labels, 0), ("new.csv", data.test_labels, trained)):
        with open(folder / file_name, "w") as file:
            file.write("id,label\n")
            for row in chance.permutation(len(labels)):
                file.write(f"{ids[first + row]},{data.class_names[labels[row]]}\n")
    # Weights are compared with those of one process, which needs the same labels in both: in clear.
    policy = '[data]\nfile = "labels.csv"\nid = "id"\nlabel = "label"\n'
    _private(folder / "policy.toml", policy + "[plan]\nlabels_in_clear = true\n")


def _private(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)
