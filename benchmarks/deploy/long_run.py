"""A long PBM job between organisations, while strangers connect to the server's port and say nothing.

    python -m benchmarks.deploy.long_run [--epochs 12000] [--strangers 20] [--json benchmarks/results/long-run.json]

A label holder and two parties with 60 made rows, one round an epoch, each role a process of its own, over the line.
Every role writes a checkpoint after every epoch. The job must reach its end, and what is written after an epoch must
not grow with the epochs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Folders of organisations with certificates of their own are the tests' helpers.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from benchmarks.measure import Row
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import JobSpec, last_result
from pbmvfl.federation.results import Result
from pbmvfl.plan.plan import Plan
from support.deploy_homes import Tables, aligned, make_homes, train_order
from support.federation_texts import PARTIES, SERVER

RESULTS = Path("benchmarks/results/long-run.json")
#: Bytes of an index: the plan, and two states.
LARGEST_INDEX = 8_000
#: Connections that are open at a time: more than the server hears at once.
_OPEN = 200


class Strangers:
    """Silent connections to a port, so many a second; the oldest are closed."""

    def __init__(self, address: tuple[str, int], rate: float) -> None:
        self.connected = 0
        self._address, self._rate = address, rate
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._connect, daemon=True)
        if rate:
            self._thread.start()

    def _connect(self) -> None:
        held: deque[socket.socket] = deque()
        while not self._over.wait(1 / self._rate):
            try:
                held.append(socket.create_connection(self._address, timeout=2))
                self.connected += 1
            except OSError:  # the server does not listen yet, or not any more
                continue
            if len(held) > _OPEN:
                held.popleft().close()
        for each in held:
            each.close()

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()


def start(home: SiteFolder, order: JobSpec, job: str) -> subprocess.Popen[str]:
    """One role of the job as a process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pbmvfl.deploy.job.process", str(home.path), job],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(order.to_text())
    process.stdin.close()
    return process


def milliseconds_an_epoch(result: Result) -> list[float]:
    """Of each tenth of the epochs."""
    seconds = [line.seconds for line in result.history]
    marks = [seconds[number * (len(seconds) - 1) // 10] for number in range(11)]
    epochs = (len(seconds) - 1) / 10
    return [round(1000 * (last - first) / epochs, 2) for first, last in pairwise(marks)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deploy.long_run", description=__doc__)
    parser.add_argument("--epochs", type=int, default=12_000)
    parser.add_argument("--strangers", type=float, default=20.0, help="connections a second; 0: none")
    parser.add_argument("--longest", type=float, default=3600.0, help="seconds after which the job is ended")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pbmvfl-long-") as scratch:
        homes = make_homes(Path(scratch), Tables.drawn(rows=60), limit=1e12)
        rows = aligned(homes)
        plan = Plan.of(
            num_parties=len(PARTIES),
            num_samples=rows.num_rows,
            num_classes=len(rows.class_names),
            num_test_samples=0,
            batch_size=rows.num_rows,
            num_epochs=given.epochs,
            embedding_dim=4,
            encoder="linear",
            learning_rate=0.01,
            evaluation="none",
            mechanism="pbm",
            num_trials=4,
            beta=0.2,
        )
        order, job = train_order(plan), secrets.token_hex(8)
        federation = homes[SERVER].federation
        assert federation.line_port is not None
        strangers = Strangers(("127.0.0.1", federation.line_port), given.strangers)
        began = time.monotonic()
        processes = [start(home, order, job) for home in homes.values()]
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                for process in processes:
                    process.wait(max(1.0, given.longest - (time.monotonic() - began)))
        finally:
            strangers.close()
            for process in processes:
                process.kill()
                process.wait()
        seconds = time.monotonic() - began
        runs = {name: home.run(order.run) for name, home in homes.items()}
        outcome = last_result(runs[SERVER])
        sizes = {name: (run / "checkpoints" / "checkpoints.json").stat().st_size for name, run in runs.items()}
        history = runs[SERVER] / "checkpoints" / "history.jsonl"
        result = Result.read(runs[SERVER] / "result.json") if outcome is not None and not outcome.words else None
        said = {
            "epochs": given.epochs,
            "ending": None if outcome is None else str(outcome.ending),
            "words": "" if outcome is None else outcome.words,
            "seconds": round(seconds, 1),
            "milliseconds_an_epoch_by_tenths": [] if result is None else milliseconds_an_epoch(result),
            "index_bytes": sizes,
            "history_bytes": history.stat().st_size if history.exists() else 0,
            "strangers_connected": strangers.connected,
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
        }
    shown = [
        Row(
            "epochs that were trained", 0.0 if result is None else len(result.history), given.epochs, "", at_most=False
        ),
        Row("bytes of the largest index", float(max(sizes.values())), LARGEST_INDEX, "B"),
    ]
    for row in shown:
        print(row)
    print(json.dumps(said, indent=1))
    given.json.write_text(json.dumps(said, indent=1) + "\n")
    return 0 if all(row.passed for row in shown) else 1


if __name__ == "__main__":
    raise SystemExit(main())
