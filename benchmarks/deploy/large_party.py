"""A party whose rows stay in a mapped Arrow file: memory, and how long a batch takes.

python -m benchmarks.deploy.large_party [--rows 5000000] [--columns 50] [--json benchmarks/results/large-party.json]

Rows are drawn, written as Parquet, put into a random order as an alignment would, and then trained on. All files go to
a temporary folder that is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.deploy.alignment.aligned_rows import AlignedRows, materialise
from pbmvfl.deploy.alignment.row_ids import AgreedOrder, order_digest
from pbmvfl.deploy.alignment.tables import read_party_table
from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import GRAM, LOCAL, MEAN, Split
from pbmvfl.protocol.party import Party

BATCH, BATCHES = 100, 3_000
LONGEST_MILLISECONDS, LARGEST_GROWTH_MEGABYTES = 2.0, 16.0


def anonymous() -> float:
    """Return the memory of this process that no file backs, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


class Peak:
    """Peak of that memory while this is open, sampled every few milliseconds."""

    def __init__(self) -> None:
        self.megabytes = anonymous()
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self.megabytes = max(self.megabytes, anonymous())

    def __enter__(self) -> Peak:
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._looking.join()


def write_table(path: Path, rows: int, columns: int) -> None:
    names = [f"c{number}" for number in range(columns)]
    schema = pa.schema([("person", pa.int64()), *((name, pa.float32()) for name in names)])
    random, step = np.random.default_rng(0), 100_000
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for start in range(0, rows, step):
            count = min(step, rows - start)
            drawn = random.random((columns, count), dtype=np.float32)
            writer.write_table(
                pa.table([pa.array(np.arange(start, start + count)), *map(pa.array, drawn)], schema=schema)
            )


def align(folder: Path, rows: int) -> dict[str, Any]:
    """Align in a process of its own: from the Parquet file to the common order."""
    before = anonymous()
    with Peak() as peak:
        began = time.perf_counter()
        table = read_party_table(folder / "party.parquet", id="person")
        read = time.perf_counter()
        order, key = np.random.default_rng(1).permutation(rows).astype(np.int64), bytes(32)
        digest = order_digest(key, table.ids.pieces(order), rows)
        agreed_at = time.perf_counter()
        materialise(table, AgreedOrder(name="people", rows=order, key=key, digest=digest), folder / "people")
    return {
        "read_seconds": read - began,
        "materialise_seconds": time.perf_counter() - agreed_at,
        "anonymous_before_mb": before,
        "anonymous_peak_mb": peak.megabytes,
    }


def batches(rows: int, count: int) -> Iterator[np.ndarray]:
    random = np.random.default_rng(2)
    for _ in range(count):
        yield random.choice(rows, BATCH, replace=False).astype(np.int64)


def milliseconds(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(each * 1000 for each in seconds)
    return {"median": statistics.median(ordered), "p99": ordered[int(0.99 * len(ordered))], "most": ordered[-1]}


def party_of(plan: Plan, aligned: AlignedRows) -> Party:
    identities = [Identity.generate() for _ in range(2)]
    return PartySetup(
        plan=plan,
        index=0,
        identity=identities[0].private_bytes(),
        identities=tuple(each.public for each in identities),
        train_features=aligned.features,
        test_features=None,
    ).build()


def train(folder: Path, rows: int, columns: int) -> dict[str, Any]:
    """Train a party on the mapped rows, in a process of its own; the usual plan, with all rows in one batch."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    with Peak() as while_loading:
        aligned = AlignedRows.load(folder / "people")
    loaded = time.perf_counter() - began
    plan = Plan.for_budget(
        epsilon=8, delta=1e-8, num_parties=2, num_samples=rows, num_classes=2, columns=columns, evaluation="none"
    )
    before = anonymous()
    seconds: dict[str, float] = {}
    with Peak() as while_training:
        began = time.perf_counter()
        party = party_of(plan, aligned)
        seconds["build"] = time.perf_counter() - began
        party.network.labels = torch.from_numpy(np.arange(rows) % 2)
        for kind in plan.schedule.kinds:
            if kind in (MEAN, GRAM):
                began = time.perf_counter()
                party.rows.learn(next(each for each in plan.schedule if each.kind == kind), party._entropy)
                seconds[kind.statistic] = time.perf_counter() - began
        numbers = (number for number in range(len(plan.schedule)) if plan.schedule.kind(number) == LOCAL)
        current = plan.schedule[next(numbers)]
        began = time.perf_counter()
        party.network.local_step(current, party._entropy)
        seconds["a step over all rows"] = time.perf_counter() - began
    del current
    party = party_of(plan.replace(batch_size=BATCH), aligned)
    taken, worked, stepped, growth = [], [], [], []
    slope = np.full((BATCH, plan.embedding_dim), 0.01, dtype=np.float32)
    for number, chosen in enumerate(batches(rows, BATCHES)):
        began, busy = time.perf_counter(), time.thread_time()
        batch = party.rows.batch(Split.TRAIN, chosen)
        taken.append(time.perf_counter() - began)
        worked.append(time.thread_time() - busy)
        party.network.update.embed(batch, for_training=True)
        party.network.update.apply(slope, party._entropy)
        stepped.append(time.perf_counter() - began)
        if number % 100 == 99:
            growth.append(anonymous())
    return {
        "load_seconds": loaded,
        "anonymous_peak_while_loading_mb": while_loading.megabytes,
        "seconds": seconds,
        "preparation": str(plan.preparation),
        "anonymous_before_mb": before,
        "anonymous_peak_while_training_mb": while_training.megabytes,
        "anonymous_after_100_batches_mb": growth[0],
        "anonymous_after_all_batches_mb": growth[-1],
        "batch_ms": milliseconds(taken),
        "batch_processor_ms": milliseconds(worked),
        "batch_and_step_ms": milliseconds(stepped),
    }


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def apart(part: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run one part in a process of its own, whose memory is its own."""
    command = [sys.executable, "-m", "benchmarks.deploy.large_party", "--part", part, "--folder", str(folder)]
    command += ["--rows", str(given.rows), "--columns", str(given.columns)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deploy.large_party", description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--columns", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--part", choices=("align", "train"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part == "align":
        print(json.dumps(align(given.folder, given.rows)))
        return 0
    if given.part == "train":
        print(json.dumps(train(given.folder, given.rows, given.columns)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_table(folder / "party.parquet", given.rows, given.columns)
        found = {
            "rows": given.rows,
            "columns": given.columns,
            "batch": BATCH,
            "batches": BATCHES,
            "align": rounded(apart("align", folder, given)),
            "rows_file_mb": round((folder / "people" / "rows.arrow").stat().st_size / 2**20, 1),
            "train": rounded(apart("train", folder, given)),
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
        }
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    seen = found["train"]
    grown = seen["anonymous_after_all_batches_mb"] - seen["anonymous_after_100_batches_mb"]
    passed = seen["batch_ms"]["median"] < LONGEST_MILLISECONDS and grown < LARGEST_GROWTH_MEGABYTES
    print(
        f"{'pass' if passed else 'FAIL'}: a batch in under {LONGEST_MILLISECONDS:g} ms, memory flat (+{grown:.1f} MB)"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
