"""`python -m benchmarks.deploy.link`: the gRPC link against local processes, in the same run.

Rounds of both alternate, on the same machine and the same plan. Results go to benchmarks/results/link.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.deploy.relay import FAR, HERE, Relay, enter_own_network
from benchmarks.deploy.sites import LinkSites, Trains
from benchmarks.measure import Row, alternate, seconds_per_call
from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.federation.party_processes import Processes
from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.plan.plan import Plan
from pbmvfl.protocol.server import Server
from pbmvfl.protocol.session import Meter, deliver
from pbmvfl.protocol.transport import Transport
from pbmvfl.wire.messages import Message, MessageKind

RESULTS = Path(__file__).resolve().parents[1] / "results" / "link.json"
LONG = 20_000


def plan_of(**choices: object) -> Plan:
    """Return a plan of Activity's shape with unlimited rounds."""
    usual = {
        "num_parties": 4,
        "num_samples": 7352,
        "num_classes": 6,
        "num_epochs": 2000,
        "beta": 0.25,
        "num_trials": 16,
    }
    return Plan.from_dict({**usual, "batch_size": 100, "embedding_dim": 16, **choices})


def setups_of(plan: Plan, *, columns: int) -> list[PartySetup]:
    random = np.random.default_rng(0)
    identities = [Identity.generate() for _ in range(plan.num_parties)]
    return [
        PartySetup(
            plan=plan,
            index=index,
            identity=identity.private_bytes(),
            identities=tuple(each.public for each in identities),
            train_features=random.normal(size=(plan.num_samples, columns)).astype(np.float32),
            test_features=None,
            exact_metrics=True,  # the plan says simulator, though nobody looks
        )
        for index, identity in enumerate(identities)
    ]


class Rounds:
    """Federation over some transport, of which one call is one round."""

    def __init__(self, plan: Plan, transport: Transport) -> None:
        labels = np.random.default_rng(1).integers(0, plan.num_classes, plan.num_samples).astype(np.int64)
        self.transport, self._server, self.meter = transport, Server(plan, train_labels=labels), Meter()
        while not self._server.is_open:
            self._pass_on()

    def _pass_on(self) -> bytes:
        message = self._server.advance()
        assert message is not None
        deliver(self._server, self.transport, self.meter, message, setup=not self._server.is_open)
        return message

    def __call__(self) -> None:
        if Message.from_bytes(self._pass_on()).kind is MessageKind.UPDATE:  # the end of an epoch: a gradient alone
            self._pass_on()


def rounds_and_bytes(blocks: int) -> Iterator[Row]:
    """Measure a whole round against local processes, and bytes on the sockets against those of the messages."""
    plan = plan_of()
    setups = setups_of(plan, columns=140)
    local = Processes(setups)
    sites = LinkSites([Trains(setup) for setup in setups])
    try:
        by_link, by_processes = Rounds(plan, sites), Rounds(plan, local)
        for _ in range(20):
            by_link()
            by_processes()
        said: Counter[str] = Counter()
        by_link.meter.taps.append(lambda way, _, message: said.update({way: len(message)}))
        before = sites.bytes_on_sockets()
        ratio, link, processes = alternate(by_link, by_processes, calls=4, blocks=blocks)
        after = sites.bytes_on_sockets()
        detail = f"{link * 1e3:.2f} against {processes * 1e3:.2f} ms a round, medians of {blocks} blocks of 4"
        yield Row("a whole round on the link: times local processes", ratio, 2.5, "x", detail=detail)
        down, up = after[0] - before[0], after[1] - before[1]
        said_down, said_up = said["down"], said["up"]
        detail = f"down {down / said_down:.3f}, up {up / said_up:.3f}; {said_down:,} and {said_up:,} bytes of messages"
        yield Row(
            "bytes on the sockets: times the messages", (down + up) / (said_down + said_up), 1.05, "x", detail=detail
        )
    finally:
        sites.close()
        local.close()


#: Slow networks: name, what the line does to a party's packets in each direction, longest median in ms.
SLOW: tuple[tuple[str, dict[str, float], float], ...] = (
    ("at a round trip of 20 ms", {"delay": 0.01}, 35.0),
    ("at a round trip of 100 ms", {"delay": 0.05}, 120.0),
    ("at a round trip of 100 ms, 1% lost", {"delay": 0.05, "loss": 0.01}, 300.0),
    ("over lines of 1 Mbit/s", {"rate": 1e6 / 8}, 90.0),
)


def slow_networks(count: int) -> Iterator[Row]:
    """Measure whole rounds over slow lines between the sites: one delay for the message, and nothing besides."""
    for name, line, longest in SLOW:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as own:
            seconds = own.submit(_seconds_of_slow_rounds, line, count).result()
        median, mean = statistics.median(seconds), statistics.fmean(seconds)
        detail = f"{1 / mean:.1f} rounds a second, median of {count} rounds; the mean is {mean * 1e3:.0f} ms"
        yield Row(f"a whole round {name}", median * 1e3, longest, "ms", detail=detail)


def _seconds_of_slow_rounds(line: dict[str, float], count: int) -> list[float]:
    enter_own_network()
    relay, plan = Relay(**line), plan_of()
    sites = LinkSites([Trains(setup) for setup in setups_of(plan, columns=140)], addresses=(HERE, FAR))
    try:
        rounds = Rounds(plan, sites)
        for _ in range(5):
            rounds()
        return [seconds_per_call(rounds, 1) for _ in range(count)]
    finally:
        sites.close()
        relay.close()


def memory(count: int) -> Iterator[Row]:
    """Measure the server's memory over many rounds of small batches: only state of rounds or messages could grow."""
    plan = plan_of(num_parties=2, num_samples=200, batch_size=10, embedding_dim=4, num_epochs=1 << 14)
    sites = LinkSites([Trains(setup) for setup in setups_of(plan, columns=4)])
    try:
        rounds = Rounds(plan, sites)
        for _ in range(count // 10):
            rounds()
        early, started = resident_megabytes(), time.perf_counter()
        for _ in range(count - count // 10):
            rounds()
        seconds = time.perf_counter() - started
        late = resident_megabytes()
    finally:
        sites.close()
    detail = f"{early:.1f} MB after {count // 10:,} rounds, {late:.1f} after {count:,}; batches of 10, {seconds:.0f} s"
    yield Row(f"server's memory, {count:,} rounds: growth", late - early, 5, "MB", detail=detail)


def many_parties(count: int) -> Iterator[Row]:
    """Run an epoch of many parties, each with its own certificate and connection; 25 share a process, as threads."""
    plan = plan_of(num_parties=count, num_samples=1000, batch_size=100, num_epochs=1)
    started = time.perf_counter()
    sites = LinkSites([Trains(setup) for setup in setups_of(plan, columns=11)], parties_a_process=25)
    try:
        joined = time.perf_counter() - started
        rounds = Rounds(plan, sites)
        began = time.perf_counter()
        for _ in range(10):
            rounds()
        seconds = (time.perf_counter() - began) / 10
        here = len(sites.link.alive)
    finally:
        sites.close()
    detail = f"started and joined in {joined:.1f} s, {seconds * 1e3:.0f} ms a round, 10 rounds of 100 rows"
    yield Row(f"{count} parties on the link complete an epoch: there at its end", here, count, "parties", False, detail)


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deploy.link", description=__doc__)
    parser.add_argument("--blocks", type=int, default=151, help="of 4 rounds each, of either kind")
    parser.add_argument("--rounds", type=int, default=LONG, help="in which the server's memory is looked at")
    parser.add_argument("--parties", type=int, default=50, help="in the large federation")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the rows go")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    rows: list[Row] = []
    console = Console(highlight=False, width=170)
    table = Table(
        title="The link, gRPC over mutual TLS 1.3, on this machine", title_justify="left", box=None, padding=(0, 2)
    )
    for title in ("what", "measured", "goal", "", ""):
        table.add_column(title, no_wrap=True)
    for group in (
        rounds_and_bytes(given.blocks),
        slow_networks(given.blocks),
        memory(given.rounds),
        many_parties(given.parties),
    ):
        for row in group:
            rows.append(row)
            sign = "<=" if row.at_most else ">="
            verdict = "pass" if row.passed else "FAIL"
            table.add_row(row.name, f"{row.measured:.3g} {row.unit}", f"{sign} {row.limit:g}", verdict, row.detail)
            print(row, file=sys.stderr)
    console.print(table)
    given.json.parent.mkdir(exist_ok=True)
    said = {
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "rows": [{**asdict(row), "passed": row.passed} for row in rows],
    }
    given.json.write_text(json.dumps(said, indent=1) + "\n")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
