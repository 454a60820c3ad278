"""Lines of a log, in files that only their owner may read, of bounded size, by several processes at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from pbmvfl._files import PRIVATE_FILE, make_private_folder

LARGEST_FILE, FILES = 5_000_000, 5


class LogFile:
    """Appends whole lines. A full file becomes NAME.1, that one NAME.2, and the oldest goes."""

    def __init__(self, path: Path, *, largest: int = LARGEST_FILE, files: int = FILES) -> None:
        self.path, self._largest, self._files = Path(path), largest, files
        make_private_folder(self.path.parent)
        self._threads = threading.Lock()
        self._lock = self._open(self.path.with_name(self.path.name + ".lock"))

    def write(self, line: str) -> None:
        """One line. Raises OSError if it cannot be written."""
        data = line.encode(errors="replace") + b"\n"
        with self._alone():
            descriptor = self._open(self.path)
            try:
                size = os.fstat(descriptor).st_size
                if size and size + len(data) > self._largest:
                    self._rotate()
                    os.close(descriptor)
                    descriptor = -1
                    descriptor = self._open(self.path)
                elif size and os.pread(descriptor, 1, size - 1) != b"\n":
                    data = b"\n" + data  # a full disk, or a kill, cut the last line: it does not take this one with it
                os.write(descriptor, data)
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

    def close(self) -> None:
        with self._threads:  # a thread that holds the lock file would unlock whatever has its number next
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Other processes of the same site write here too: a job's process, and the one that started it. The file's
        lock is a process's: threads of one would both have it, and two that rotate at once would lose a file."""
        with self._threads:
            if self._lock < 0:
                raise OSError(errno.EBADF, "the log was closed")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _open(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
        os.fchmod(descriptor, PRIVATE_FILE)
        return descriptor

    def _rotate(self) -> None:
        for number in range(self._files - 2, -1, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(numbered(self.path, number), numbered(self.path, number + 1))


def numbered(path: Path, number: int) -> Path:
    """The file's name, or that of an older one."""
    return path.with_name(f"{path.name}.{number}") if number else path


def log_files(path: Path, files: int = FILES) -> list[Path]:
    """Those that are there, oldest first."""
    found = [numbered(path, number) for number in range(files - 1, -1, -1)]
    return [each for each in found if each.is_file()]
