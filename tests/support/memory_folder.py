"""Where tests keep their files."""

from __future__ import annotations

import os
import shutil
import tempfile

_MEMORY = "/dev/shm"


def temporary_folder() -> str:
    """Return a folder in memory where there is one with room and nothing else was chosen; else the usual one.

    Ledgers and checkpoints wait for the disk at every write. In memory there is nothing to wait for, and a process that
    is killed leaves there what it would leave on a disk. Some tests start programs from their folders.
    """
    in_memory = (
        "TMPDIR" not in os.environ
        and os.access(_MEMORY, os.W_OK)
        and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC
        and shutil.disk_usage(_MEMORY).free > 4 << 30
    )
    return _MEMORY if in_memory else tempfile.gettempdir()
