"""`python -m pbmvfl.deploy.nvflare.job_process`: pre-warmed worker process that waits for one job.

Loading torch is most of the time between a submit and the first round. A pre-warmed worker has done
it before. It knows nothing of the organisation until a job comes: one line on its standard input, from the site's own
process, which alone holds the other end. If that end is closed instead, the worker ends.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from collections.abc import Mapping, Sequence

#: NVFlare's modules that run a job, at a party and at the server; no other module is run here.
PARTY, SERVER = "nvflare.private.fed.app.client.worker_process", "nvflare.private.fed.app.server.runner_process"
_USED = ("pbmvfl.deploy.nvflare.executor", "pbmvfl.deploy.nvflare.controller", "pbmvfl.deploy.nvflare.validator")
#: Longest line in bytes; a command and an environment have a few thousand.
_LONGEST = 1 << 20


def job_line(command: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """Return the line for a worker: NVFlare's command, without the interpreter and `-m`, and its environment."""
    line = json.dumps({"command": list(command), "environment": dict(environment)}).encode() + b"\n"
    if len(line) > _LONGEST:
        raise ValueError(f"a job's command and environment have {len(line):,} bytes; permitted: at most {_LONGEST:,}")
    return line


def load() -> None:
    """Load all that is the same for every job. Nothing here reads a file of the organisation or opens a connection."""
    for name in (*_USED, PARTY, SERVER):
        importlib.import_module(name)
    for name in (PARTY, SERVER):
        del sys.modules[name]  # it is run as a program later on


def main() -> int:
    load()
    line = sys.stdin.buffer.readline(_LONGEST + 1)
    if not line.endswith(b"\n"):
        return 0
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    job = json.loads(line)
    module, *arguments = job["command"]
    if module not in (PARTY, SERVER):
        raise ValueError(f"module={module!r} is not NVFlare's for a job; permitted: {PARTY}, {SERVER}")
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
