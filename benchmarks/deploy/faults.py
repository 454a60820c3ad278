"""`python -m benchmarks.deploy.faults --runs 20 --seed 1`: kill -9 at random moments of a run between organisations.

One federation of real kits on loopback. In each run one process is killed: a party's job, a party's NVFlare parent, the
server's job, or the server's parent. Dead parents are started again after 3 seconds, as systemd would. Every run must
end by itself, no ledger may have less than what left the party, and the model must be as good as unharmed ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from benchmarks.deploy.phishing import PARTIES, SERVER, Trial, environment, wait_for
from pbmvfl.deploy.alignment.runner import LabelRows
from pbmvfl.deploy.job.job_plans import training_plan
from pbmvfl.deploy.nvflare.keeper import read_record
from pbmvfl.federation.model import load
from pbmvfl.federation.serving import ReleaseOptions

EPOCHS = 160
RESTART_AFTER = 3.0
LONGEST_RUN = 600.0
TARGETS = ("party job", "party parent", "server job", "server parent")
#: Beside them, by --target: the process that keeps NVFlare's, and everything of a site at once, as in a power cut.
MORE_TARGETS = ("party keeper", "server keeper", "party power", "server power")
RESULTS = Path(__file__).parent.parent / "results" / "faults.json"


@dataclass
class Told:
    """Result of one run."""

    number: int
    killed: str = "nothing"
    site: str = ""
    #: What the label holder's status said when it was killed, and the round.
    state: str = ""
    round: int = 0
    #: From the kill to the first round that every party has answered anew; None if there was none to come.
    seconds_until_rounds: float | None = None
    seconds: float = 0.0
    jobs: int = 1
    ending: str = ""
    words: list[str] = field(default_factory=list)
    #: Of later rows, exact.
    accuracy: float | None = None
    #: For each party: rounds that left it, rounds in its ledger; over all sessions.
    released: dict[str, int] = field(default_factory=dict)
    charged: dict[str, int] = field(default_factory=dict)
    ledgers_hold: bool = True
    load: float = 0.0


# --- what left a party, and what its book has; neither by the program's own reader ---


def answers(trial: Trial, party: str, since: float, run_id: str = "") -> list[tuple[float, str, int, str]]:
    """Return (time, session, round, digest) of every round answer that the tap recorded, of one run or of any."""
    path = trial.homes[party].path / "released.log"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        moment, session, number, run, digest = line.split()
        if float(moment) >= since and run_id in ("", run):
            found.append((float(moment), session, int(number), digest))
    return found


def released(trial: Trial, party: str, run_id: str) -> set[tuple[str, int]]:
    """Return (session, round) of what left a party in a run.

    What is said again, byte for byte, left once: fusion rows and predicted rows have one stored answer.
    """
    left, said = set(), set()
    for _, session, number, digest in answers(trial, party, 0, run_id):
        if digest == "-" or digest not in said:
            left.add((session, number))
        said.add(digest)
    return left


def charged(trial: Trial, party: str) -> dict[str, tuple[int, int]]:
    """Return every session's rounds in a party's ledger, from its tables."""
    book = sqlite3.connect(f"file:{trial.homes[party].ledger}?mode=ro", uri=True)
    rows = book.execute(
        "SELECT s.session, s.first_round, c.charged_until FROM sessions s JOIN charged c ON c.session = s.id"
    ).fetchall()
    book.close()
    return {session: (first, until) for session, first, until in rows}


def compare_ledgers(trial: Trial, told: Told, run: str) -> None:
    order = trial.server.run(run) / "order.json"
    run_id = json.loads(order.read_text())["run_id"]
    for party in PARTIES:
        left = released(trial, party, run_id)
        book = charged(trial, party)
        told.released[party] = len(left)
        sessions = {session for session, _ in left}
        told.charged[party] = sum(until - first for name, (first, until) in book.items() if name in sessions)
        for session, number in left:
            first, until = book.get(session, (0, 0))
            if not first <= number < until:
                told.ledgers_hold = False


# --- one run ---


def status(trial: Trial, run: str) -> dict[str, Any]:
    try:
        found = json.loads(trial.server.status.read_text())
    except (OSError, ValueError):
        return {}
    return found if found.get("run") == run else {}


def one_run(trial: Trial, number: int, target: str | None, site: str, when: tuple[str, float], plan: Path) -> Told:
    """Run once with a kill; `when` is ("seconds", s) after submitting, or ("round", r)."""
    told, name = Told(number, load=os.getloadavg()[0]), f"trial-{number:03d}"
    began = time.time()
    command = trial.command(
        SERVER, "submit", name, "--home", str(trial.server.path), "--plan", str(plan), "--keep-going"
    )
    with tempfile.TemporaryFile("w+") as output:
        submitter = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)
        restart: threading.Thread | None = None
        killed_at = None
        try:
            if target is not None:
                restart, killed_at = _kill(trial, told, name, target, site, when, submitter)
            try:
                submitter.wait(timeout=LONGEST_RUN)
            except subprocess.TimeoutExpired:
                told.words.append(f"no end within {LONGEST_RUN:g} seconds")
        finally:
            if submitter.poll() is None:
                submitter.kill()
            submitter.wait()
            if restart is not None:
                restart.join(timeout=160)
        output.seek(0)
        said = output.read()
    told.seconds = round(time.time() - began, 1)
    told.words += [line for line in said.splitlines() if "new job" in line or "waiting" in line or "lost" in line]
    told.jobs = 1 + said.count("going on in a new job")
    told.ending = {0: "done", 3: "stopped", 5: "failed"}.get(submitter.returncode or 0, f"code {submitter.returncode}")
    if told.ending != "done":
        told.words.append(said[-600:])
    compare_ledgers(trial, told, name)
    if killed_at is not None:
        told.seconds_until_rounds = _until_rounds(trial, killed_at)
    if told.ending == "done":
        told.accuracy = accuracy(trial, name)
    return told


def _kill(trial, told, name, target, site, when, submitter):
    kind, amount = when
    began = time.monotonic()
    alive = lambda: submitter.poll() is None  # noqa: E731
    if kind == "seconds":
        wait_for(lambda: time.monotonic() - began >= amount or not alive(), 60)
    else:
        wait_for(lambda: status(trial, name).get("round", 0) >= amount or not alive(), 120, 0.01)
    processes = wait_for(lambda: _victims(trial, target, site) or (None if alive() else "none"), 60)
    if processes in (None, "none"):
        told.words.append("there was nothing to kill any more")
        return None, None
    seen = status(trial, name)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with the one before
            process.kill()
    killed_at = time.time()
    told.killed, told.site = target, site
    told.state, told.round = seen.get("state", "before the job"), seen.get("round", 0)
    restart = None
    if "job" not in target:
        restart = threading.Timer(RESTART_AFTER, _start_again, [trial, site])
        restart.start()
    return restart, killed_at


def _start_again(trial: Trial, site: str) -> None:
    """Start a site as systemd does: again, if it failed."""
    for _ in range(5):
        with contextlib.suppress(subprocess.SubprocessError):
            trial.start(site)
            return
        time.sleep(RESTART_AFTER)


def _victims(trial: Trial, target: str, site: str) -> list[psutil.Process]:
    if "job" in target or "parent" in target:
        found = trial.job(site) if "job" in target else trial.parent(site)
        return [] if found is None else [found]
    record = read_record(trial.homes[site])
    if record is None or not record.alive:
        return []
    keeper = psutil.Process(record.pid)
    return [keeper, *(keeper.children(recursive=True) if "power" in target else [])]


def _until_rounds(trial: Trial, killed_at: float) -> float | None:
    """Return when every party had answered a round of a session that began after the kill."""
    firsts = []
    for party in PARTIES:
        everything = answers(trial, party, 0)
        old = {session for moment, session, *_ in everything if moment < killed_at}
        new = [moment for moment, session, *_ in everything if moment >= killed_at and session not in old]
        if not new:
            return None
        firsts.append(min(new))
    return round(max(firsts) - killed_at, 1)


def accuracy(trial: Trial, run: str) -> float:
    """Return the accuracy on later rows without noise, from all sites' parts, which no organisation could join."""
    rows = pd.read_csv(trial.server.path / "new.csv")
    with tempfile.TemporaryDirectory() as folder:
        for site, home in trial.homes.items():
            shutil.copytree(home.model(run), Path(folder) / ("server" if site == SERVER else site))
            if site != SERVER:
                rows = rows.merge(pd.read_csv(home.path / "rows.csv"), on="id")
        model = load(folder)
        found = model.evaluate(rows, ReleaseOptions(exact=True, exact_metrics=True), label="label", id="id")
    return round(found["test_accuracy"], 4)


# --- all of them ---


def prepare(folder: Path, trial: Trial) -> Path:
    home = str(trial.server.path)
    if not trial.server.alignment("visitors").exists():
        trial.call(SERVER, "align", "people", "--home", home)
        trial.call(SERVER, "align", "visitors", "--ids", str(trial.server.path / "new.csv"), "--home", home)
    plan = training_plan(trial.server.federation, LabelRows.load(trial.server, "people"), num_epochs=EPOCHS)
    path = folder / "plan.json"
    path.write_text(plan.to_json())
    return path


def table(runs: list[Told]) -> str:
    lines = [
        "| run | killed | when | rounds go on after s | jobs | ending | accuracy | released / charged, least | load |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for told in runs:
        when = f"{told.state}, round {told.round}" if told.killed != "nothing" else ""
        after = "-" if told.seconds_until_rounds is None else f"{told.seconds_until_rounds:.1f}"
        slack = min(
            ((told.charged[party] - told.released[party], party) for party in told.released), default=(0, PARTIES[0])
        )
        book = f"{told.released.get(slack[1], 0)} / {told.charged.get(slack[1], 0)}"
        what = f"{told.killed} ({told.site})" if told.site else told.killed
        lines.append(
            f"| {told.number} | {what} | {when} | {after} | {told.jobs} | {told.ending} | {told.accuracy} | {book}"
            f"{'' if told.ledgers_hold else ' BELOW'} | {told.load:.1f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deploy.faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--unharmed", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", choices=TARGETS + MORE_TARGETS, nargs="+", default=TARGETS, help="in turn")
    parser.add_argument("--folder", type=Path, help="where the organisations live; default: a temporary folder")
    parser.add_argument("--port", type=int, default=38002)
    parser.add_argument("--first", type=int, default=0, help="number of the first run, in a folder that has some")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    with tempfile.TemporaryDirectory(prefix="pbmvfl-faults-") as scratch:
        folder = given.folder or Path(scratch)
        trial = Trial.of(folder, port=given.port)
        with trial.running():
            runs = _all(trial, prepare(folder, trial), given)
    print(table(runs))
    return 0 if all(told.ending == "done" and told.ledgers_hold for told in runs) else 1


def _all(trial: Trial, plan: Path, given: argparse.Namespace) -> list[Told]:
    chance = random.Random(given.seed)
    rounds = len(
        training_plan(trial.server.federation, LabelRows.load(trial.server, "people"), num_epochs=EPOCHS).schedule
    )
    runs: list[Told] = []
    for number in range(given.first, given.first + given.unharmed + given.runs):
        target, site, when = None, "", ("seconds", 0.0)
        if number >= given.first + given.unharmed:
            # Each kind as often as the others, a third of them before the first round.
            target = given.target[number % len(given.target)]
            site = SERVER if "server" in target else chance.choice(PARTIES)
            early, late = ("seconds", chance.uniform(0, 12)), ("round", float(chance.randrange(rounds)))
            when = chance.choice((early, late, late))
        told = one_run(trial, number, target, site, when, plan)
        runs.append(told)
        print(json.dumps(asdict(told)), flush=True)
        given.json.write_text(json.dumps([asdict(each) for each in runs], indent=1) + "\n")
    return runs


if __name__ == "__main__":
    raise SystemExit(main())
