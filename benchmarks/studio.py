"""`python -m benchmarks.studio`: time of an answer of `pbmvfl studio` over HTTP, computed and cached.

Settings are those of a reader who moves epsilon, rows and parties of both algorithms one step at a time. Results go to
benchmarks/results/studio.json.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import threading
import time
from itertools import product
from pathlib import Path
from urllib.parse import urlencode

os.environ.setdefault("OMP_NUM_THREADS", "1")

from pbmvfl.cli.studio.app import server_of, studio_app

_RESULTS = Path(__file__).parent / "results" / "studio.json"
_TOKEN = "benchmark"
#: What the cached answers of a page may take, 95 of 100.
_GOAL_MS = 150


def main() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        server = server_of(studio_app(_TOKEN, port=port, runs=Path("runs")))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        found = {}
        for algorithm, predicted in (("staged", "4"), ("pbm", "none")):
            fixed = {"algorithm": algorithm, "prediction_epsilon": predicted}
            wanted = [
                {**fixed, "num_samples": rows, "num_parties": parties, "epsilon": epsilon}
                for rows, parties, epsilon in product((2000, 10_000), (2, 4), (1, 2, 4, 8))
            ]
            _answered(port, fixed)  # loops are compiled once
            found[algorithm] = {
                "first": _summary([_answered(port, each) for each in wanted]),
                "cached": _summary([_answered(port, each) for _ in range(10) for each in wanted]),
            }
        server.should_exit = True
        thread.join()
    text = json.dumps({"goal_cached_p95_ms": _GOAL_MS, **found}, indent=1)
    _RESULTS.write_text(text + "\n")
    print(text)


def _answered(port: int, query: dict[str, object]) -> tuple[float, float]:
    """Return the milliseconds of one request: on the clock, and of this process alone."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    began, cpu = time.perf_counter(), time.process_time()
    connection.request("GET", f"/{_TOKEN}/plan?{urlencode(query)}")
    reply = connection.getresponse()
    reply.read()
    took = 1000 * (time.perf_counter() - began), 1000 * (time.process_time() - cpu)
    connection.close()
    assert reply.status == 200, query
    return took


def _summary(took: list[tuple[float, float]]) -> dict[str, float]:
    wall, cpu = zip(*took, strict=True)
    return {
        "requests": len(took),
        "median_ms": round(statistics.median(wall), 1),
        "p95_ms": round(statistics.quantiles(wall, n=20)[-1], 1),
        "cpu_median_ms": round(statistics.median(cpu), 1),
        "cpu_p95_ms": round(statistics.quantiles(cpu, n=20)[-1], 1),
    }


if __name__ == "__main__":
    main()
