"""Writing files so that a killed process leaves the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from pbmvfl.errors import WriteError

#: Of files that only their owner may read, whatever the umask is, and of folders with such files.
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
_MAKE_ROOM = "make room on that disk"
_WAYS_OUT = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EFBIG: "raise the limit on the size of files",
    errno.EACCES: "allow writing there",
    errno.EPERM: "allow writing there",
    errno.EROFS: "choose a place that can be written",
}


def write_atomically(path: Path, data: str | bytes, *, mode: int | None = None) -> None:
    """Write beside the file, force it to disk, then replace. A `mode` holds whatever the umask is.

    If that fails, as on a full disk, the file is as it was and what was begun beside it is gone.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666 if mode is None else mode)
        with open(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, mode)  # one that a killed process left may have other rights
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise not_written(path, error) from error


def not_written(path: Path, error: OSError) -> WriteError:
    """An error that names the file, which the system's own does not when a disk is full."""
    if isinstance(error, WriteError):
        return error
    what_to_do = _WAYS_OUT.get(error.errno or 0, "see that it can be written")
    return WriteError(f"{path} cannot be written: {error.strerror or error}; {what_to_do}")


def make_private(path: Path) -> None:
    """Make an empty file that only its owner may read; one that is there is left as it is."""
    with contextlib.suppress(OSError):  # whoever opens it next says what is wrong
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
        os.fchmod(descriptor, PRIVATE_FILE)
        os.close(descriptor)


def make_private_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, for its owner alone; one that is there is left as it is."""
    if not path.parent.exists():
        make_private_folder(path.parent)
    try:
        path.mkdir(mode=PRIVATE_FOLDER)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        path.chmod(PRIVATE_FOLDER)


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
