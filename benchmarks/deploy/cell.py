"""A whole exchange over the cell, against the bare exchange that NVFlare itself offers, alternating in one run.

python -m benchmarks.deploy.cell [--blocks N] [--json FILE]

Processes are as in a deployment: one for the server's parent, one for its job (this one), one for each party's job;
scheme tcp, mutual TLS with the kits' certificates. The bare exchange is one `broadcast_request` of the same bytes,
without authentication.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.measure import Row, alternate
from pbmvfl.deploy.link.interface import Channel
from pbmvfl.deploy.site.folder import SiteFolder

PARTIES = ("bank", "hospital", "insurer", "laboratory")
JOB = "job"
#: Bytes of a round of Activity: four parties, batches of 100, sixteen numbers a row, sixteen trials.
DOWN, UP = 6_444, 1_444
GATE = 2.0
_BARE = ("bare", "ask")
_PATIENCE = 60.0

_FEDERATION = """
[federation]
name = "benchmark"
[server]
name = "clinic"
host = "127.0.0.1"
port = {port}
carrier = "cell"
lead = "lead@clinic.example"
"""


def _open_cell(home: SiteFolder, name: str, **choices: Any) -> Any:
    from nvflare.fuel.f3.cellnet.core_cell import CoreCell
    from nvflare.fuel.utils.config_service import ConfigService

    # Not those of some kit below the folder in which this is run.
    ConfigService.initialize(section_files={}, config_path=[str(home.kit)])
    role = "server" if home.is_server else "client"
    credentials = {
        "ca_cert": str(home.authority),
        f"{role}_cert": str(home.certificate),
        f"{role}_key": str(home.private_key),
    }
    federation = home.federation
    cell = CoreCell(
        name,
        root_url=f"tcp://{federation.host}:{federation.port}",
        secure=True,
        credentials=credentials,
        auth_identity_map={"server": federation.server},
        **choices,
    )
    cell.start()
    return cell


class _Job:
    """Stand-in for a job's cell."""

    def __init__(self, core_cell: Any) -> None:
        self.core_cell = core_cell


def _run_parent(path: Path, url: Any, over: Any) -> None:
    cell = _open_cell(SiteFolder.at(path), "server", create_internal_listener=True)
    url.put(cell.get_internal_listener_url())
    over.wait()
    cell.stop()


def _run_party(path: Path) -> None:
    from nvflare.fuel.f3.message import Message

    from pbmvfl.deploy.nvflare.cell import party_cell

    home = SiteFolder.at(path)
    cell = _open_cell(home, f"{home.name}.{JOB}")
    answer = os.urandom(UP)
    cell.register_request_cb(*_BARE, lambda _: Message(None, answer))
    link = party_cell(home, _Job(cell), JOB)
    try:
        link.serve(lambda channel, _: answer if channel is Channel.PROTOCOL else b"")
    finally:
        link.close()
        cell.stop()


def measure(*, blocks: int, calls: int = 10) -> dict[str, Any]:
    from nvflare.fuel.f3.message import Message

    from pbmvfl.deploy.nvflare.cell import server_cell
    from pbmvfl.deploy.nvflare.provision import provision

    context = multiprocessing.get_context("spawn")
    url, over = context.Queue(), context.Event()
    with tempfile.TemporaryDirectory(prefix="pbmvfl-cell-") as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        parties = "".join(f'[[party]]\nname = "{name}"\n' for name in PARTIES)
        text = _FEDERATION.format(port=port) + parties + f"[line]\npatience = {_PATIENCE:g}\n"
        (Path(folder) / "federation.toml").write_text(text)
        homes = provision(Path(folder) / "federation.toml", Path(folder) / "homes")
        clinic = homes["clinic"]
        processes = [context.Process(target=_run_parent, args=(clinic.path, url, over), daemon=True)]
        processes += [context.Process(target=_run_party, args=(homes[name].path,), daemon=True) for name in PARTIES]
        for process in processes:
            process.start()
        cell = _open_cell(clinic, f"server.{JOB}", parent_url=url.get(timeout=60))
        link = server_cell(clinic, _Job(cell), JOB)
        try:
            link.join(timeout=60)
            question = os.urandom(DOWN)
            targets = [f"{name}.{JOB}" for name in PARTIES]

            def over_the_link() -> None:
                received = link.exchange(question).received
                assert [len(received[index]) for index in range(len(PARTIES))] == [UP] * len(PARTIES)

            def bare() -> None:
                replies = cell.broadcast_request(*_BARE, targets, Message(None, question), timeout=_PATIENCE)
                assert [len(replies[target].payload) for target in targets] == [UP] * len(PARTIES)

            ratio, seconds, bare_seconds = alternate(over_the_link, bare, calls=calls, blocks=blocks)
            link.ask(dict.fromkeys(range(len(PARTIES)), b""), channel=Channel.END, timeout=30)
        finally:
            link.close()
            over.set()
            for process in processes:
                process.join(timeout=10)
                if process.is_alive():
                    process.kill()
            cell.stop()
    return {
        "what": "whole exchange over the cell / bare broadcast_request",
        "ratio": round(ratio, 3),
        "gate": GATE,
        "cell_ms": round(1000 * seconds, 3),
        "bare_ms": round(1000 * bare_seconds, 3),
        "exchanges_each": blocks * calls,
        "parties": len(PARTIES),
        "bytes_down": DOWN,
        "bytes_up": UP,
        "load_average": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
        "at": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deploy.cell", description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=61, help="pairs of ten exchanges each (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    given = parser.parse_args()
    found = measure(blocks=given.blocks)
    row = Row("cell / bare exchange", found["ratio"], GATE, "x")
    print(f"{row.name}: {row.measured:.2f} x, goal at most {row.limit:g} x: {'pass' if row.passed else 'FAIL'}")
    print(f"  {found['cell_ms']:.2f} ms against {found['bare_ms']:.2f} ms, {found['exchanges_each']} exchanges each")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if row.passed else 1


if __name__ == "__main__":
    sys.exit(main())
