"""Alignment and the default training of large tables between organisations: seconds, and peak memory of each process.

python -m benchmarks.deploy.scale [--rows 100000] [--parties 2] [--columns 10] [--align-only] [--json FILE]

Every organisation is a folder with a Parquet file, certificates, a policy and a ledger, and every role of a job is a
process of its own over gRPC with mutual TLS, as at a site of NVFlare. Nine of ten rows are common to all.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

# Folders of organisations on one machine are the tests' own helpers.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from pbmvfl.deploy.alignment.runner import LabelRows
from pbmvfl.deploy.job.job_plans import training_plan
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import JobSpec
from support.deploy_homes import Tables, align_order, make_homes, train_order
from support.federation_texts import SERVER


def write_tables(homes: Mapping[str, SiteFolder], rows: int, columns: int) -> None:
    """Give each organisation its rows, in an order of its own; one in ten is nobody else's."""
    common = rows - rows // 10
    for place, (name, home) in enumerate(homes.items()):
        random = np.random.default_rng(place)
        number = random.permutation(np.concatenate((np.arange(common), common + place * rows + np.arange(rows // 10))))
        ids = pa.array([f"person-{each:010d}" for each in number])
        label = (number * 2654435761 >> 7) % 2
        if name == SERVER:
            table = {"id": ids, "label": np.where(label == 1, "sick", "healthy")}
        else:
            drawn = random.random((columns, rows), dtype=np.float32) * np.float32(0.6)
            table = {"id": ids, **{f"{name}_{i}": each + label * np.float32(0.3) for i, each in enumerate(drawn)}}
        pq.write_table(pa.table(table), home.path / "rows.parquet")
        for file in ("rows.csv", "labels.csv"):
            home.policy.write_text(home.policy.read_text().replace(f'"{file}"', '"rows.parquet"'))


def run_job(homes: Mapping[str, SiteFolder], order: JobSpec) -> dict[str, Any]:
    """Run one job, every role in a process of its own; return what each took."""
    job, used = secrets.token_hex(8), {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(name: str, home: SiteFolder) -> None:
        command = [sys.executable, "-m", "pbmvfl.deploy.job.process", str(home.path), job]
        child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True)
        assert child.stdin is not None
        child.stdin.write(order.to_text())
        child.stdin.close()
        _, status, found = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        used[name] = {
            "code": child.returncode,
            "processor_seconds": round(found.ru_utime + found.ru_stime, 1),
            "peak_megabytes": round(found.ru_maxrss / 1024, 1),
        }

    began = time.perf_counter()
    threads = [threading.Thread(target=run, args=each) for each in homes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if any(each["code"] for each in used.values()):
        raise SystemExit(f"the job {order.work} did not end well: {used}")
    seconds = time.perf_counter() - began
    worked = sum(each["processor_seconds"] for each in used.values())
    return {
        "seconds": round(seconds, 1),
        # Share of the cores' time that the roles had, on a machine without other work.
        "busy": round(worked / seconds / (os.cpu_count() or 1), 3),
        "roles": {name: used[name] for name in homes},
    }


def measure(rows: int, parties: int, columns: int, *, trains: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pbmvfl-scale-") as folder:
        names = tuple(f"party-{index:02d}" for index in range(parties))
        tiny = Tables.drawn(rows=2, columns=columns, parties=names)
        homes = make_homes(Path(folder), tiny, parties=names, patience=300)
        write_tables(homes, rows, columns)
        found: dict[str, Any] = {"rows": rows, "parties": parties, "columns": columns}
        found["align"] = run_job(homes, align_order(homes))
        aligned = LabelRows.load(homes[SERVER], "people")
        found["common"] = aligned.num_rows
        if trains:
            plan = training_plan(homes[SERVER].federation, aligned, label_epsilon=None)
            found["rounds"], found["features"] = len(plan.schedule), str(plan.features)
            found["train"] = run_job(homes, train_order(plan))
    return {**found, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deploy.scale", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="of each organisation")
    parser.add_argument("--parties", type=int, default=2, help="beside the label holder")
    parser.add_argument("--columns", type=int, default=10, help="of each party")
    parser.add_argument("--align-only", action="store_true", help="do not train")
    parser.add_argument("--json", type=Path, help="put the figures into this list of runs")
    given = parser.parse_args()
    found = measure(given.rows, given.parties, given.columns, trains=not given.align_only)
    print(json.dumps(found, indent=1))
    if given.json:
        size = ("rows", "parties", "columns")
        before = json.loads(given.json.read_text()) if given.json.is_file() else []
        others = [each for each in before if any(each[name] != found[name] for name in size)]
        given.json.write_text(json.dumps([*others, found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
