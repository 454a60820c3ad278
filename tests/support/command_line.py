"""The command line in the test's own process: what it does is the same, and torch is loaded already."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from pbmvfl.cli import main


def run_command(*arguments: object, cwd: Path) -> int:
    """Run a command in the folder `cwd`; return its exit code."""
    before = sys.argv
    sys.argv = ["pbmvfl", *map(str, arguments)]
    try:
        with contextlib.chdir(cwd):
            main()
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)  # as Python does
    finally:
        sys.argv = before
    return 0
