"""A bank, a hospital, an insurer and a clinic with the labels, each as processes of its own on this machine.

    python examples/four_organisations.py [FOLDER]        or: make deploy-demo

Every organisation makes its own keys, starts its own site, finds the common rows without showing an id, trains one
model strictly at epsilon 8 on the Phishing table, predicts rows that nobody trained on, and looks at its own ledger. A
real federation types the same commands, on four machines.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

import numpy as np

import pbmvfl

CLINIC, PARTIES = "clinic", ("bank", "hospital", "insurer")
SHARE_KNOWN_ELSEWHERE = 0.97
"""Of all people, those that one party knows: a little fewer than all, and not the same at each."""
PATIENCE = 30
"""Seconds that a party waits for the clinic's server, which starts at the same time."""


def main(folder: Path) -> None:
    began = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    town = Town(folder)
    town.heading("All agree on federation.toml, and everybody makes their own keys.")
    (folder / "federation.toml").write_text(federation_file())
    print((folder / "federation.toml").read_text())
    town.set_up()
    town.heading("Everybody writes down what they have and what they accept. Nobody sees another's file.")
    write_tables(folder)
    print((folder / "bank" / "policy.toml").read_text())
    town.run_each(dict.fromkeys(PARTIES, "policy check"))
    try:
        town.heading("Everybody starts their site.")
        town.run_each({CLINIC: "server start", **dict.fromkeys(PARTIES, f"party start --wait {PATIENCE}")})
        town.heading("The clinic looks for the people whom all four know. No id leaves anybody.")
        town.run(CLINIC, "align people")
        town.heading("Training, strictly within epsilon 8.")
        town.run(CLINIC, "submit run-001 --keep-going")
        town.run("bank", "watch --once")
        town.heading("Rows that nobody trained on: one charged release of each.")
        town.run(CLINIC, "align visitors --ids visitors.csv")
        town.run(CLINIC, "evaluate run-001 --rows visitors --out predictions.parquet")
        town.heading("What each party's rows have spent, by its own ledger.")
        town.run_each(dict.fromkeys(PARTIES, "ledger show ledger.sqlite"))
    finally:
        town.run_each({**dict.fromkeys(PARTIES, "party stop"), CLINIC: "server stop"}, must=False)
    print(f"\nall of it took {time.monotonic() - began:.0f} s; everything is in {folder}")


class Town:
    """Runs each organisation's commands in its own folder, and shows them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def heading(self, text: str) -> None:
        print(f"\n=== {text}\n", flush=True)

    def run(self, name: str, command: str) -> None:
        """Run one command, and show what it prints while it goes on."""
        print(f"{name}$ pbmvfl {command}", flush=True)
        self._ended(name, command, self._started(name, command).wait())

    def run_each(self, commands: Mapping[str, str], *, must: bool = True) -> None:
        """Run a command of each organisation at the same time, and show what they printed one after another."""
        started = {name: self._started(name, command, stdout=PIPE, stderr=STDOUT) for name, command in commands.items()}
        for name, process in started.items():
            said, _ = process.communicate()
            print(f"{name}$ pbmvfl {commands[name]}\n{said}", end="", flush=True)
        for name, process in started.items():
            self._ended(name, commands[name], process.returncode if must else 0)

    def _started(self, name: str, command: str, **streams: int) -> Popen[str]:
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        words = [sys.executable, "-m", "pbmvfl", *shlex.split(command)]
        return Popen(words, cwd=self._folder / name, env=environment, text=True, **streams)

    def _ended(self, name: str, command: str, code: int) -> None:
        if code:
            raise SystemExit(f"{name}: `pbmvfl {command}` ended with {code}")

    def set_up(self) -> None:
        """Requests go to whoever keeps the authority, here the clinic, and what is signed comes back."""
        self.run("", "federation init federation.toml --authority authority")
        everybody = (CLINIC, *PARTIES)
        for name in everybody:
            (self._folder / name).mkdir(mode=0o700)
        self.run_each({name: f"federation request ../federation.toml --name {name}" for name in everybody})
        requests = " ".join(f"../{name}/request/{name}.request.json" for name in everybody)
        self.run(CLINIC, f"federation approve ../authority {requests}")
        self.run_each({name: f"federation package ../authority/signed/{name}.signed.json" for name in everybody})


def federation_file() -> str:
    parties = "".join(f'[[party]]\nname = "{name}"\n\n' for name in PARTIES)
    return (
        f'[federation]\nname = "phishing"\n\n[server]\nname = "{CLINIC}"\nhost = "127.0.0.1"\nport = {free_port()}\n'
        f'line_port = {free_port()}\nlead = "lead@clinic.example"\n\n{parties}[plan]\nepsilon = 8\n'
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_tables(folder: Path) -> None:
    """The Phishing table, ten columns to each party, rows under ids and in an order of each one's own."""
    data = pbmvfl.load_dataset("phishing", num_parties=len(PARTIES))
    draw = np.random.default_rng(0)
    people = data.num_samples + data.num_test_samples
    ids = [f"site-{number:06d}" for number in draw.permutation(people)]
    for index, name in enumerate(PARTIES):
        rows = np.concatenate((data.train_features[index], data.test_features[index]))
        columns = [f"{name}_{number}" for number in range(rows.shape[1])]
        known = draw.permutation(people)[: int(SHARE_KNOWN_ELSEWHERE * people)]
        lines = [",".join(["id", *columns])]
        lines += [",".join([ids[row], *(f"{value:g}" for value in rows[row])]) for row in known]
        home = folder / name
        (home / "rows.csv").write_text("\n".join(lines) + "\n")
        (home / "schema.json").write_text(json.dumps({"columns": {each: {"range": [0, 1]} for each in columns}}))
        write_policy(home, PARTY_POLICY)
    labels = np.concatenate((data.train_labels, data.test_labels))
    for file, rows in {"labels.csv": range(data.num_samples), "visitors.csv": range(data.num_samples, people)}.items():
        lines = ["id,label", *(f"{ids[row]},{data.class_names[labels[row]]}" for row in rows)]
        (folder / CLINIC / file).write_text("\n".join(lines) + "\n")
    write_policy(folder / CLINIC, CLINIC_POLICY)


def write_policy(home: Path, text: str) -> None:
    path = home / "policy.toml"
    path.write_text(text)
    path.chmod(0o600)


PARTY_POLICY = """\
[data]
file = "rows.csv"
id = "id"
schema = "schema.json"
dataset = "people"

[[limit]]                  # what one value of one row may spend, over all runs
epsilon = 8
delta = 1e-5
unit = "cell"
accounting = "strict"

[plan]
smallest_num_parties = 3
"""

CLINIC_POLICY = """\
[data]
file = "labels.csv"
id = "id"
label = "label"
"""


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/deploy-demo").resolve())
