"""Real kits: seconds from a submit to the first round, and weights without noise against those of one process.

    python -m benchmarks.deploy.jobs [--times N] [--port P] [--json FILE]

Three parties and a label holder with Phishing's columns. The rows are declared as made up, so that a plan without noise
is taken; its weights must be to the bit those that `Federation` trains on the same rows in the same order.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")


from benchmarks.deploy.phishing import PARTIES, SERVER, Trial
from benchmarks.deploy.together import differing_tensors, train_together
from benchmarks.measure import Row
from pbmvfl.deploy.alignment.runner import LabelRows
from pbmvfl.deploy.monitoring.status import read_status
from pbmvfl.plan.plan import Plan

RESULTS = Path("benchmarks/results/jobs.json")
GATE = 12.0
_MADE_UP = '[data]\nfile = "rows.csv"\nid = "id"\nschema = "schema.json"\ndataset = "people"\nmade_up = true\n'


def plan_without_noise(rows: LabelRows) -> Plan:
    return Plan.of(
        num_parties=len(PARTIES),
        num_samples=rows.num_rows,
        num_classes=len(rows.class_names),
        num_test_samples=0,
        batch_size=500,
        num_epochs=3,
        mechanism="none",
        embedding_dim=8,
        encoder="mlp",
        momentum=0.5,
        learning_rate=0.1,
        evaluation="none",
    )


def seconds_to_first_round(trial: Trial, run: str, plan: Path) -> float:
    """Return the seconds from submission until the label holder's status has a completed round."""
    found: list[float] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            status = read_status(trial.server.status)
            if status is not None and status.run == run and status.round > 0:
                found.append(time.time())
                return
            time.sleep(0.01)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    before = time.time()
    trial.call(SERVER, "submit", run, "--home", str(trial.server.path), "--plan", str(plan))
    over.set()
    watcher.join()
    # The command's own start, a few seconds of Python, is not the job's: the order is written when it hands it in.
    handed_in = (trial.server.run(run) / "order.json").stat().st_mtime
    return found[0] - max(before, handed_in)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deploy.jobs", description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--port", type=int, default=39002)
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pbmvfl-jobs-") as scratch:
        folder = Path(scratch)
        trial = Trial.of(folder, port=given.port)
        for name in PARTIES:
            trial.homes[name].policy.write_text(_MADE_UP)
        with trial.running():
            began = time.monotonic()
            trial.call(SERVER, "align", "people", "--home", str(trial.server.path))
            aligned = time.monotonic() - began
            rows = LabelRows.load(trial.server, "people")
            plan = plan_without_noise(rows)
            (folder / "plan.json").write_text(plan.to_json())
            seconds = [
                seconds_to_first_round(trial, f"run-{number}", folder / "plan.json") for number in range(given.times)
            ]
            train_together(trial.homes, plan, folder / "here")
            differing = differing_tensors(trial.homes, "run-0", folder / "here")
    shown = [
        Row("submit to first round: median", statistics.median(seconds), GATE, "s"),
        Row("tensors that differ from one process", float(len(differing)), 0.0, ""),
    ]
    load = os.getloadavg()[0]
    for row in shown:
        print(row)
    said = {
        "submit_to_first_round_s": [round(each, 2) for each in seconds],
        "gate_s": GATE,
        "align_command_s": round(aligned, 1),
        "differing_tensors": differing,
        "cores": os.cpu_count(),
        "load": round(load, 1),
    }
    print(json.dumps(said, indent=1))
    given.json.write_text(json.dumps(said, indent=1) + "\n")
    return 0 if not differing and statistics.median(seconds) <= GATE else 1


if __name__ == "__main__":
    raise SystemExit(main())
