"""Private alignment of two lists in two processes over a socket pair: seconds, and the most memory of each.

python -m benchmarks.deploy.alignment [--ids 100000] [--json benchmarks/results/alignment.json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pbmvfl.deploy.alignment import LabelSideAlignment, PartySideAlignment
from pbmvfl.deploy.links import Channel
from pbmvfl.deploy.row_ids import AgreedOrder, RowIds
from pbmvfl.transport.base import Answers

NAME = "people"
LONGEST_SECONDS, LARGEST_MEGABYTES = 25.0, 300.0
_LENGTH = struct.Struct("<I")


def ids_of(first: int, count: int) -> RowIds:
    return RowIds.of([f"person-{number:09d}" for number in range(first, first + count)])


def send(line: socket.socket, data: bytes) -> None:
    line.sendall(_LENGTH.pack(len(data)) + data)


def receive(line: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(line.recv(_LENGTH.size, socket.MSG_WAITALL))
    return line.recv(length, socket.MSG_WAITALL) if length else b""


class SocketLink:
    """A server's link to one party."""

    parties: Sequence[str] = ("bank",)
    alive: Sequence[str] = ("bank",)

    def __init__(self, line: socket.socket) -> None:
        self._line, self.bytes_down, self.bytes_up = line, 0, 0

    def join(self, *, timeout: float) -> None:
        del timeout

    def ask(self, questions: Mapping[int, bytes], *, channel: Channel, timeout: float | None = None) -> Answers:
        del channel, timeout
        send(self._line, questions[0])
        answer = receive(self._line)
        self.bytes_down += len(questions[0])
        self.bytes_up += len(answer)
        return Answers({0: answer})

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        return self.ask({0: message}, channel=Channel.PROTOCOL, timeout=timeout)

    def close(self) -> None:
        self._line.close()


def used() -> dict[str, float]:
    """The most memory and the processor's time of this process."""
    mine = resource.getrusage(resource.RUSAGE_SELF)
    return {"megabytes": mine.ru_maxrss / 1024, "processor_seconds": mine.ru_utime + mine.ru_stime}


def party(descriptor: int, count: int) -> None:
    """The party's process: half of its ids are the label holder's."""
    line = socket.socket(fileno=descriptor)
    kept: list[AgreedOrder] = []
    side = PartySideAlignment(party="bank", name=NAME, ids=ids_of(count // 2, count), width=10, keep=kept.append)
    send(line, b"ready")
    while not kept:
        send(line, side.receive(receive(line)))
    send(line, json.dumps({**used(), "common": kept[0].count}).encode())


def measure(count: int) -> dict[str, object]:
    here, there = socket.socketpair()
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.deploy.alignment", "--party", str(there.fileno()), "--ids", str(count)],
        pass_fds=[there.fileno()],
    ) as process:
        there.close()
        ids, link = ids_of(0, count), SocketLink(here)
        receive(here)
        began = time.perf_counter()
        found = LabelSideAlignment().align(link, ids, name=NAME)
        seconds = time.perf_counter() - began
        at_party = json.loads(receive(here))
        process.wait(timeout=30)
    assert found.count == at_party["common"] == count - count // 2
    return {
        "ids": count,
        "common": found.count,
        "seconds": round(seconds, 2),
        "bytes_down": link.bytes_down,
        "bytes_up": link.bytes_up,
        "label_holder": {name: round(value, 1) for name, value in used().items()},
        "party": {name: round(float(value), 1) for name, value in at_party.items()},
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deploy.alignment", description=__doc__)
    parser.add_argument("--ids", type=int, default=100_000, help="of each side; half are shared")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--party", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.party is not None:
        party(given.party, given.ids)
        return 0
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
