"""Time and memory of `pbmvfl train` on large tables: growing no faster than the rows.

python -m benchmarks.large_tables [--rows 65000 130000 260000 521000] [--json benchmarks/results/large-tables.json]

A table of five parties is repeated to each size and written as Parquet to a temporary folder. Each size is trained by
the default command in a process of its own, without ledgers and with them. Processor time is compared, which a busy
machine changes less than time on the clock; both are written down.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS = (65_000, 130_000, 260_000, 521_000)
PARTIES, COLUMNS, REPEATED = 5, 4, 8_000
#: Time or memory of a row may grow by this much from one size to the next: clocks are not exact.
LARGEST_GROWTH = 1.1
#: Of the largest table, with and without ledgers, as two cores of a laptop have it.
MOST_MEGABYTES = 1500.0


def write_table(folder: Path, rows: int) -> list[str]:
    """Write a table and its schema; return the options of `train` that name them."""
    random = np.random.default_rng(0)
    values = np.clip(random.normal(scale=0.4, size=(REPEATED, PARTIES * COLUMNS)), -1, 1).astype(np.float32)
    score = values @ random.normal(size=values.shape[1]) + 4 * np.abs(values[:, 0]) - 2 * values[:, 4] * values[:, 5]
    label = np.where(score + random.normal(size=REPEATED) > np.median(score), "yes", "no")
    at = np.arange(rows) % REPEATED
    names = [f"c{number}" for number in range(values.shape[1])]
    table = {"person": np.arange(rows), **{name: values[at, i] for i, name in enumerate(names)}, "label": label[at]}
    pq.write_table(pa.table(table), folder / "people.parquet")
    (folder / "schema.json").write_text(json.dumps({"columns": {name: {"range": [-1, 1]} for name in names}}))
    held = (f"party{i}={','.join(names[i * COLUMNS : (i + 1) * COLUMNS])}" for i in range(PARTIES))
    files = ["--data", str(folder / "people.parquet"), "--schema", str(folder / "schema.json")]
    return [*files, "--label", "label", "--id", "person", "--columns", ";".join(held)]


def train(options: Sequence[str], folder: Path) -> dict[str, float]:
    """Train in a process of its own, and return what it took."""
    command = [sys.executable, "-m", "pbmvfl", "train", *options, "--out", str(folder / "run"), "--json"]
    began = time.perf_counter()
    with open(folder / "result.json", "wb") as said:
        child = os.posix_spawn(command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, said.fileno(), 1)])
        _, status, used = os.wait4(child, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{' '.join(command)} ended with code {os.waitstatus_to_exitcode(status)}")
    result = json.loads((folder / "result.json").read_text())
    return {
        "seconds": round(time.perf_counter() - began, 2),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_megabytes": round(used.ru_maxrss / 1024, 1),
        "test_accuracy": round(result["metrics"]["test_accuracy"], 4),
    }


def measure(rows: int, *, ledgers: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = write_table(folder, rows)
        if ledgers:
            options += ["--ledger", str(folder / "ledgers")]
        return {"rows": rows, "ledgers": ledgers, **train(options, folder)}


def faults(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return what grows faster than the rows, or is too large; lines are in the order of their rows."""
    found = []
    for ledgers in (False, True):
        of = [line for line in lines if line["ledgers"] is ledgers]
        where = "with ledgers" if ledgers else "without ledgers"
        for what in ("processor_seconds", "peak_megabytes"):
            for less, more in pairwise(of):
                growth = (more[what] / more["rows"]) / (less[what] / less["rows"])
                if growth > LARGEST_GROWTH:
                    found.append(
                        f"{where}: {what} a row grow by {growth:.2f} from {less['rows']:,} to {more['rows']:,}"
                    )
        if of and of[-1]["peak_megabytes"] > MOST_MEGABYTES:
            found.append(f"{where}: {of[-1]['peak_megabytes']:,.0f} MB at {of[-1]['rows']:,} rows")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_tables", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="sizes, from small to large")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lines = []
    print("    rows  ledgers  seconds  processor  us a row  peak MB  test accuracy")
    for ledgers in (False, True):
        for rows in given.rows:
            line = measure(rows, ledgers=ledgers)
            lines.append(line)
            print(
                f"{rows:8,}  {'yes' if ledgers else 'no':>7}  {line['seconds']:7.1f}  "
                f"{line['processor_seconds']:9.1f}  {line['processor_seconds'] / rows * 1e6:8.1f}  "
                f"{line['peak_megabytes']:7,.0f}  {line['test_accuracy']:13.4f}",
                flush=True,
            )
    wrong = faults(lines)
    print("\n".join(wrong) or "time and memory grow no faster than the rows")
    if given.json:
        machine = {"cores": os.cpu_count(), "load": [round(each, 1) for each in os.getloadavg()]}
        given.json.write_text(json.dumps({"machine": machine, "lines": lines, "faults": wrong}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
