"""What a federation too large to try would take, computed from measured costs of a row.

python -m benchmarks.deploy.on_paper [--rows 100000000] [--parties 100] [--measured benchmarks/results/scale.json]

Costs of a row are slopes between the smallest and the largest measured run of two parties (`benchmarks.deploy.scale`);
an elliptic-curve operation is timed here, on one core; bytes are exact, from the formats of the messages.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pbmvfl.deploy.alignment.messages import TAG_BYTES
from pbmvfl.deploy.alignment.psi import POINT_BYTES, PsiClient, PsiServer, points_of
from pbmvfl.deploy.link.grpc_stream import LIMIT
from pbmvfl.plan.plan import Plan
from pbmvfl.wire.messages import label_bytes

_TRIED, _CORES = 2_000, 2
#: Of an id in one party's sorted setup at the label holder: a coordinate and a place.
_INDEX_BYTES = POINT_BYTES - 1 + 8


def curve_seconds() -> tuple[float, float]:
    """Return the processor seconds of hashing and multiplying an id, and of multiplying a point."""
    server, client, ids = PsiServer(workers=1), PsiClient(workers=1), [f"person-{n:09d}" for n in range(_TRIED)]
    points = points_of(client.request(lambda: ids).result(), _TRIED)

    def each(work: Callable[[], object]) -> float:
        began = time.process_time()
        work()
        return (time.process_time() - began) / _TRIED

    try:
        return each(lambda: server.setup(lambda: ids).result()), each(lambda: server.response(points))
    finally:
        server.close()
        client.close()


def slope(runs: list[dict[str, Any]], work: str, role: str, what: str) -> float:
    """Return how much more of something a role takes for another row."""
    less, more = runs[0], runs[-1]
    grown = more[work]["roles"][role][what] - less[work]["roles"][role][what]
    return float(max(0.0, grown) / (more["rows"] - less["rows"]))


def table(rows: int, parties: int, runs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return lines of the table: what, at the label holder, at each party."""
    label, party = next(iter(runs[0]["align"]["roles"])), list(runs[0]["align"]["roles"])[-1]
    hashed, multiplied = curve_seconds()
    hours = [rows * seconds / _CORES / 3600 for seconds in (hashed + parties * multiplied, hashed + multiplied)]
    plan = Plan.for_budget(
        epsilon=8,
        num_parties=parties,
        num_samples=rows,
        num_classes=2,
        columns=runs[-1]["columns"],
        evaluation="none",
        label_epsilon=None,
    )
    down, up = rows * (POINT_BYTES + TAG_BYTES), rows * 2 * POINT_BYTES
    traffic, labels = plan.traffic(), label_bytes(plan.num_network_samples, plan.num_classes)
    told, answered = (traffic.total - traffic.bytes_up) / 1e9, traffic.bytes_up / parties / 1e9
    found: list[tuple[str, ...]] = [
        ("alignment: hours on two cores", f"{hours[0]:,.0f}", f"{hours[1]:,.1f}"),
        ("alignment: GB sent", f"{parties * down / 1e9:,.0f}", f"{up / 1e9:,.1f}"),
    ]
    memory = []
    for role in (label, party):
        more = (parties - runs[-1]["parties"]) * _INDEX_BYTES if role == label else 0
        memory.append(f"{rows * (slope(runs, 'align', role, 'peak_megabytes') * 1e6 + more) / 1e9:,.0f}")
    found.append(("alignment: GB of memory", *memory))
    each = [slope(runs, "train", role, "processor_seconds") * rows / 3600 for role in (label, party)]
    found += [
        (f"training, {len(plan.schedule)} rounds: hours on one core", f"{each[0]:,.1f}", f"{each[1]:,.1f}"),
        ("training: GB sent", f"{told:,.1f}", f"{answered:.2f}"),
    ]
    memory = [f"{slope(runs, 'train', role, 'peak_megabytes') * rows / 1e3:,.0f}" for role in (label, party)]
    found.append(("training: GB of memory", *memory))
    found.append(("longest message, MiB (permitted)", f"{labels / 2**20:,.0f} ({LIMIT >> 20})", "as there"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deploy.on_paper", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--parties", type=int, default=100)
    parser.add_argument("--measured", type=Path, default=Path("benchmarks/results/scale.json"))
    given = parser.parse_args()
    runs = [each for each in json.loads(given.measured.read_text()) if each["parties"] == 2 and "train" in each]
    print(f"| {given.rows:,} rows, {given.parties} parties | label holder | each party |\n|---|---|---|")
    for line in table(given.rows, given.parties, sorted(runs, key=lambda each: each["rows"])):
        print(f"| {' | '.join(line)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
