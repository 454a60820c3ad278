"""Open files on every system: rights, reads and writes at an offset, and folders that are locked.

Windows has no `fcntl`, no `os.pread`, no `os.fchmod` before Python 3.13 and no `os.O_NOFOLLOW`, opens no folder, and
moves no file that is open. The rest of the package calls these functions, and `filelock.lock_descriptor`: an exclusive
lock of the system on a descriptor (`flock`, or `LockFileEx`), which ends with its process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from filelock import lock_descriptor

WINDOWS = sys.platform == "win32"
NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)
#: Seconds between two attempts at a lock that another process has for a moment.
POLL_INTERVAL = 0.005
#: Windows changes line ends in files that are not opened so.
_BINARY: int = getattr(os, "O_BINARY", 0)


def open_file(path: str | Path, flags: int, mode: int = 0o600) -> int:
    """Return a descriptor of a file, whose bytes are read and written as they are."""
    return os.open(path, flags | _BINARY, mode)


def set_mode(descriptor: int, mode: int) -> None:
    """Set a file's rights whatever the umask is. On Windows a file has those of its folder."""
    if not WINDOWS:
        os.fchmod(descriptor, mode)


def read_at(descriptor: int, count: int, offset: int) -> bytes:
    """Return up to `count` bytes from `offset` on."""
    if not WINDOWS:
        return os.pread(descriptor, count, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, count)


def read_beside_lock(descriptor: int, count: int, offset: int) -> bytes:
    """Return what `write_beside_lock` wrote, whichever process has the file's lock.

    `LockFileEx` keeps other descriptors from the first byte, so on Windows the contents begin behind it.
    """
    return read_at(descriptor, count, offset + WINDOWS)


def write_beside_lock(descriptor: int, data: bytes, offset: int) -> None:
    """Write a few bytes to a file that another process may have locked."""
    if not WINDOWS:
        os.pwrite(descriptor, data, offset)
    else:
        os.lseek(descriptor, offset + 1, os.SEEK_SET)
        os.write(descriptor, data)


def lock_folder(folder: Path, lock_file: str, *, blocking: bool) -> int | None:
    """Lock a folder until the returned descriptor is closed, or the process ends.

    The folder itself is locked: there is no file whose removal would let a second process in. Network file systems lock
    only what is open for writing, and Windows opens no folder; there it is a file.

    Args:
        folder: The folder.
        lock_file: Name of the file in it that is locked where the folder cannot be.
        blocking: Wait for another process that has the lock.

    Returns:
        The descriptor; None if another process has the lock.

    Raises:
        OSError: The file system has no locks.
    """
    targets = [(folder / lock_file, os.O_RDWR | os.O_CREAT)]
    if not WINDOWS:
        targets.insert(0, (folder, os.O_RDONLY))
    for i, (target, flags) in enumerate(targets):
        descriptor = open_file(target, flags, 0o600)
        try:
            if lock_descriptor(descriptor, blocking=blocking, poll_interval=POLL_INTERVAL):
                return descriptor
        except OSError:
            os.close(descriptor)
            if i + 1 == len(targets):
                raise
        except BaseException:
            os.close(descriptor)
            raise
        else:
            os.close(descriptor)
            return None
    raise AssertionError("one of the targets returns or raises")
