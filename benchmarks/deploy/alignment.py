"""Private alignment of two lists in two processes over mutual TLS: seconds, and the peak memory of each.

python -m benchmarks.deploy.alignment [--ids 100000] [--json benchmarks/results/alignment.json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.deploy.sites import LinkSites
from pbmvfl.deploy.alignment.coordinator import LabelSideAlignment, PartySideAlignment
from pbmvfl.deploy.alignment.row_ids import AgreedOrder, RowIds
from pbmvfl.deploy.link.interface import Channel, Handler

NAME = "people"
LONGEST_SECONDS, LARGEST_MEGABYTES = 25.0, 300.0


def ids_of(first: int, count: int) -> RowIds:
    return RowIds.of([f"person-{number:09d}" for number in range(first, first + count)])


def used() -> dict[str, float]:
    """Return the peak memory and the processor time of this process."""
    mine = resource.getrusage(resource.RUSAGE_SELF)
    return {"megabytes": mine.ru_maxrss / 1024, "processor_seconds": mine.ru_utime + mine.ru_stime}


@dataclass(frozen=True)
class Aligns:
    """Party that shares half of its ids with the label holder, and answers other questions with its resource use."""

    count: int

    def begin(self) -> Handler:
        kept: list[AgreedOrder] = []
        ids = ids_of(self.count // 2, self.count)
        side = PartySideAlignment(party="party-0", name=NAME, ids=ids, kinds="u" * 10, keep=kept.append)

        def handle(channel: Channel, body: bytes) -> bytes:
            if channel is Channel.ALIGN:
                return side.receive(body)
            return json.dumps({**used(), "common": kept[0].count if kept else 0}).encode()

        return handle


def measure(count: int) -> dict[str, object]:
    ids = ids_of(0, count)
    sites = LinkSites([Aligns(count)])
    try:
        began = time.perf_counter()
        found = LabelSideAlignment().align(sites.link, ids, name=NAME)
        seconds = time.perf_counter() - began
        at_party = json.loads(sites.link.ask({0: b""}, channel=Channel.SETUP).received[0])
        bytes_down, bytes_up = sites.bytes_on_sockets()
    finally:
        sites.close()
    assert found.count == at_party["common"] == count - count // 2
    return {
        "ids": count,
        "common": found.count,
        "seconds": round(seconds, 2),
        "bytes_down": bytes_down,
        "bytes_up": bytes_up,
        "label_holder": {name: round(value, 1) for name, value in used().items()},
        "party": {name: round(float(value), 1) for name, value in at_party.items()},
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deploy.alignment", description=__doc__)
    parser.add_argument("--ids", type=int, default=100_000, help="of each side; half are shared")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    given = parser.parse_args()
    found = measure(given.ids)
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    most = max(float(found[side]["megabytes"]) for side in ("label_holder", "party"))  # type: ignore[index]
    passed = float(str(found["seconds"])) < LONGEST_SECONDS and most < LARGEST_MEGABYTES
    print(f"{'pass' if passed else 'FAIL'}: under {LONGEST_SECONDS:g} s and {LARGEST_MEGABYTES:g} MB a process")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
