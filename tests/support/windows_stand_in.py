"""Make this process lack what Windows lacks about files, as far as Linux can pretend.

Gone: `fcntl` and other modules of Unix, `os.fchmod`, `os.pread` and their like, descriptors of folders, moving or
removing a file that is open here, and reading the first byte of a locked file by another descriptor. `filelock` is
loaded before, and its `flock` stands for `LockFileEx`. Import this before the package.
"""

from __future__ import annotations

import builtins
import importlib.abc
import io
import os
import sys
from collections.abc import Callable
from typing import Any

import filelock

HIDDEN = {"fcntl", "pwd", "grp", "termios", "resource", "pty", "tty"}
MISSING = ["fchmod", "pread", "pwrite", "getuid", "geteuid", "fork", "O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY"]
#: Descriptors that have a lock, by the file's device and number.
_holders: dict[tuple[int, int], int] = {}


class _Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> None:
        if name in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r} (as on Windows)", name=name)


def _denied(path: object) -> PermissionError:
    return PermissionError(13, "Permission denied (as on Windows)", str(path))


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _is_open(path: Any) -> bool:
    own = os.path.realpath(path)
    return any(os.path.realpath(f"/proc/self/fd/{each}") == own for each in os.listdir("/proc/self/fd"))


def _without_open_files(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(path: Any, *others: Any, **options: Any) -> Any:
        if _is_open(path):
            raise _denied(path)
        return function(path, *others, **options)

    return called


def install() -> None:
    lock, os_open, os_read, os_write, io_open = filelock.lock_descriptor, os.open, os.read, os.write, io.open

    def lock_descriptor(descriptor: int, **options: Any) -> bool:
        locked = lock(descriptor, **options)
        if locked:
            _holders[_key(os.fstat(descriptor))] = descriptor
        return locked

    def is_kept_out(descriptor: int) -> bool:
        """Whether another descriptor has the lock, on byte 0, and the next byte of this one is that byte."""
        holder = _holders.get(_key(os.fstat(descriptor)))
        if holder is None or holder == descriptor or os.lseek(descriptor, 0, os.SEEK_CUR) > 0:
            return False
        try:
            return _key(os.fstat(holder)) == _key(os.fstat(descriptor))
        except OSError:  # closed: the lock has ended
            return False

    def open_file(path: Any, flags: int, *others: Any, **options: Any) -> int:
        if os.path.isdir(path) and not flags & os.O_TMPFILE == os.O_TMPFILE:  # tempfile asks for such files here
            raise _denied(path)
        return os_open(path, flags, *others, **options)

    def read(descriptor: int, count: int) -> bytes:
        if is_kept_out(descriptor):
            raise _denied(descriptor)
        return os_read(descriptor, count)

    def write(descriptor: int, data: Any) -> int:
        if is_kept_out(descriptor):
            raise _denied(descriptor)
        return os_write(descriptor, data)

    def opened(file: Any, *others: Any, **options: Any) -> Any:
        made = io_open(file, *others, **options)
        if not isinstance(file, int) and made.seekable() and is_kept_out(made.fileno()):
            made.close()
            raise _denied(file)
        return made

    def kill(process: int, number: int) -> None:
        raise AssertionError(f"os.kill({process}, {number}) ends a process on Windows")

    filelock.lock_descriptor = lock_descriptor
    for name in HIDDEN:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _Hidden())
    for name in MISSING:
        delattr(os, name)
    replacements = {"open": open_file, "read": read, "write": write, "kill": kill}
    for name, function in replacements.items():
        setattr(os, name, function)
    for name in ("replace", "rename", "unlink", "remove"):
        setattr(os, name, _without_open_files(getattr(os, name)))
    io.open = builtins.open = opened
    from pbmvfl import _descriptors

    _descriptors.WINDOWS = True
