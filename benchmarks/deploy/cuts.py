"""`python -m benchmarks.deploy.cuts`: a party's cable is cut for some seconds during a run, as root on Linux.

Every site has a network of its own, with one cable to a switch. NVFlare's connections are cut with the TLS link. A cut
shorter than the patience must not cost a job: rounds continue in the same session after the mend.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.deploy.faults import Told, accuracy, answers, compare_ledgers, prepare, status
from benchmarks.deploy.phishing import PARTIES, SERVER, Trial, environment, wait_for

SECONDS = (3, 8, 20, 60)
RESULTS = Path(__file__).parent.parent / "results" / "cuts.json"
_SWITCH, _PREFIX = "pbmvfl-sw", "pbmvfl-"
_NET = "10.213.7"


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


@contextlib.contextmanager
def networks() -> Iterator[dict[str, str]]:
    """Create a namespace for each site and one for the switch, without access to the machine's own network."""
    names = {site: f"{_PREFIX}{site}" for site in (SERVER, *PARTIES)}
    try:
        _ip("netns", "add", _SWITCH)
        _ip("-n", _SWITCH, "link", "add", "br0", "type", "bridge")
        _ip("-n", _SWITCH, "link", "set", "br0", "up")
        for number, (site, name) in enumerate(names.items(), start=1):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", site, "netns", _SWITCH)
            _ip("-n", name, "addr", "add", f"{_NET}.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
            _ip("-n", _SWITCH, "link", "set", site, "master", "br0")
            _ip("-n", _SWITCH, "link", "set", site, "up")
        yield names
    finally:
        for name in (*names.values(), _SWITCH):
            _ip("netns", "del", name, check=False)


def cut(site: str, *, up: bool) -> None:
    """Cut the cable at the switch: the site's own end stays up, as with a broken cable."""
    _ip("-n", _SWITCH, "link", "set", site, "up" if up else "down")


def one_cut(trial: Trial, number: int, seconds: float, site: str, plan: Path) -> dict[str, Any]:
    name = f"cut-{number:03d}"
    began = time.time()
    command = trial.command(
        SERVER, "submit", name, "--home", str(trial.server.path), "--plan", str(plan), "--keep-going"
    )
    told = Told(number, killed=f"cable of {site}, {seconds:g} s", site=site, load=os.getloadavg()[0])
    with tempfile.TemporaryFile("w+") as output:
        submitter = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: status(trial, name).get("round", 0) >= 10 or submitter.poll() is not None, 180, 0.01)
            told.round = status(trial, name).get("round", 0)
            told.state = status(trial, name).get("state", "")
            cut(site, up=False)
            time.sleep(seconds)
            before = {party: len(answers(trial, party, began)) for party in PARTIES}
            cut(site, up=True)
            mended = time.time()
            submitter.wait(timeout=300)
        finally:
            cut(site, up=True)
            if submitter.poll() is None:
                submitter.kill()
            submitter.wait()
        output.seek(0)
        said = output.read()
    told.jobs = 1 + said.count("going on in a new job")
    told.words = [line for line in said.splitlines() if "new job" in line or "waiting" in line or "lost" in line]
    told.ending = {0: "done"}.get(submitter.returncode, f"code {submitter.returncode}: {said[-500:]}")
    told.seconds = round(time.time() - began, 1)
    after = answers(trial, site, mended)
    told.seconds_until_rounds = round(after[0][0] - mended, 1) if after else None
    compare_ledgers(trial, told, name)
    if told.ending == "done":
        told.accuracy = accuracy(trial, name)
    return {**told.__dict__, "cut": seconds, "released_at_the_mend": before[site]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deploy.cuts", description=__doc__)
    parser.add_argument("--seconds", type=float, nargs="*", default=SECONDS)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found = []
    with tempfile.TemporaryDirectory(prefix="pbmvfl-cuts-") as scratch, networks() as names:
        folder = given.folder or Path(scratch)
        trial = Trial.of(folder, host=f"{_NET}.1", port=38022, patience=120, networks=names)
        with trial.running():
            plan = prepare(folder, trial)
            for number, seconds in enumerate(given.seconds, start=given.first):
                found.append(one_cut(trial, number, seconds, PARTIES[number % len(PARTIES)], plan))
                print(json.dumps(found[-1]), flush=True)
                given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(each["jobs"] == 1 and each["ending"] == "done" for each in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
