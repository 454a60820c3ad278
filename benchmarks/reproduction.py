"""The smoke run of every table and figure, as CI would call it on a machine without data."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Row

LIMIT_SECONDS = 90


def smoke_run() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        nowhere = {"PBMVFL_DATA": folder, "PBMVFL_CACHE": str(Path(folder) / "cache")}
        command = [sys.executable, "-c", "from pbmvfl.cli import main; main()", "reproduce", "all", "--quick"]
        started = time.perf_counter()
        subprocess.run(
            [*command, "--out", str(Path(folder) / "out")],
            env=os.environ | nowhere,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        seconds = time.perf_counter() - started
    yield Row("reproduce all --quick", seconds, LIMIT_SECONDS, "s", detail="a new process, made-up rows")
