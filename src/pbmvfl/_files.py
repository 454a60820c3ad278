"""Atomic writes of files, and JSON that is read back exactly."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO

from filelock import lock_descriptor

from pbmvfl._descriptors import NO_FOLLOW, NO_WAIT, WINDOWS, open_file, read_at, set_mode
from pbmvfl.errors import PbmvflError, WriteError

# --- Writing files so that a killed process leaves the old one or the new one, never half of one ---


#: Of files that only their owner may read, whatever the umask is, and of folders with such files.
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
#: Names of temporary files: the target's own, a token, ".tmp".
_TOKEN_BYTES = 8
_TOKEN = "[0-9a-f]" * (2 * _TOKEN_BYTES)
#: Another writer may take a new temporary file for a leftover before it is locked.
_MOST_ATTEMPTS = 100
_MAKE_ROOM = "make room on that disk"
_WAYS_OUT = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EFBIG: "raise the limit on the size of files",
    errno.EACCES: "allow writing there",
    errno.EPERM: "allow writing there",
    errno.EROFS: "choose a place that can be written",
}


def write_atomically(path: Path, data: str | bytes, *, mode: int | None = None, durable: bool = True) -> None:
    """Write a temporary file beside `path`, force it to disk, then replace. A `mode` holds whatever the umask is.

    What is not `durable` is not forced to disk: a power cut may lose it.

    Each write has a temporary file of its own, so that of several writers the last one to finish wins, and a reader
    finds the whole file of one of them. If a write fails, as on a full disk, the file is as it was and its temporary
    file is gone; that of a killed process is removed by the next write of the same file.
    """
    try:
        remove_leftovers(path.parent, glob.escape(path.name))
        with _temporary_for(path, mode) as (temporary, file):
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            if WINDOWS:
                file.close()
            os.replace(temporary, path)
        if durable:
            sync_folder(path.parent)
    except OSError as error:
        raise not_written(path, error) from error


def append_durably(path: Path, data: bytes) -> None:
    """Append whole lines to a file for its owner alone, and force them to disk.

    What a killed process or a full disk left of a line ends before them.
    """
    try:
        is_new = not path.exists()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | NO_FOLLOW
        with open(open_file(path, flags, PRIVATE_FILE), "r+b", buffering=0) as file:
            set_mode(file.fileno(), PRIVATE_FILE)
            size = os.fstat(file.fileno()).st_size
            cut = size and read_at(file.fileno(), 1, size - 1) != b"\n"
            left = memoryview(b"\n" + data if cut else data)
            while left:
                left = left[os.write(file.fileno(), left) :]
            os.fsync(file.fileno())
        if is_new:
            sync_folder(path.parent)
    except OSError as error:
        raise not_written(path, error) from error


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove temporary files of killed writers, of all files in `folder` whose names match `pattern`.

    A writer locks its temporary file, and the lock ends with its process: one that can be locked has no writer. Where
    the file system has no locks nothing is removed, nor on Windows, where a writer closes its file before it replaces
    another, and so ends its lock.
    """
    if WINDOWS:
        return
    for left in folder.glob(f"{pattern}.{_TOKEN}.tmp"):
        with contextlib.suppress(OSError):
            descriptor = os.open(left, os.O_RDWR | NO_FOLLOW | NO_WAIT)
            try:
                if lock_descriptor(descriptor, blocking=False):
                    left.unlink()
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def _temporary_for(path: Path, mode: int | None) -> Iterator[tuple[Path, BinaryIO]]:
    """Make a locked temporary file beside `path`; whatever still has its name at the end is removed."""
    temporary, descriptor = _make_temporary(path, 0o666 if mode is None else mode)
    try:
        with open(descriptor, "wb") as file:
            if mode is not None:
                set_mode(descriptor, mode)
            yield temporary, file
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _make_temporary(path: Path, mode: int) -> tuple[Path, int]:
    """Return the name of a new file and the descriptor that holds its lock."""
    for _ in range(_MOST_ATTEMPTS):
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(_TOKEN_BYTES)}.tmp")
        descriptor = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            locked = lock_descriptor(descriptor, blocking=False)
        except OSError:  # Without locks here, no process removes it.
            return temporary, descriptor
        if locked and os.fstat(descriptor).st_nlink:
            return temporary, descriptor
        os.close(descriptor)  # `remove_leftovers` of another writer found it before it was locked
    raise OSError(errno.EAGAIN, f"{_MOST_ATTEMPTS} temporary files were removed by other writers")


def not_written(path: Path, error: OSError) -> WriteError:
    """Return an error that names the file, which the system's own does not when a disk is full."""
    if isinstance(error, WriteError):
        return error
    what_to_do = _WAYS_OUT.get(error.errno or 0, "see that it can be written")
    return WriteError(f"{path} cannot be written: {error.strerror or error}; {what_to_do}")


def make_private(path: Path) -> None:
    """Make an empty file that only its owner may read; one that is there is left as it is."""
    with contextlib.suppress(OSError):  # The next one to open it reports the fault.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
        set_mode(descriptor, PRIVATE_FILE)
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
    """Make a rename in this folder survive a power cut. Windows opens no folder."""
    if WINDOWS:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---
# Reading back JSON that was written before: a file that is not what was written is refused by name, never guessed.


#: Names that an object must have, and the kind of each value.
Kinds = Mapping[str, type | UnionType]


def read_json(path: Path, error: type[PbmvflError]) -> Any:
    """Return the file's value, or raise `error` with the file's name."""
    try:
        return json.loads(path.read_bytes().decode())
    except (OSError, ValueError, RecursionError) as reason:  # bytes that are no text and text that is no JSON too
        raise error(f"{path} cannot be read: {reason}; restore the file from a copy, or make it anew") from reason


def read_object(path: Path, kinds: Kinds, error: type[PbmvflError]) -> dict[str, Any]:
    """Return the file's object, which has at least these names."""
    return checked_object(read_json(path, error), kinds, path, error)


def checked_object(value: object, kinds: Kinds, path: Path, error: type[PbmvflError]) -> dict[str, Any]:
    """Return `value`, which `path` holds, as an object with at least these names."""
    if not isinstance(value, dict):
        raise _damaged(path, f"it has {str(value)[:40]!r} where an object must be", error)
    for name, kind in kinds.items():
        if name not in value:
            raise _damaged(path, f"it lacks {name!r}", error)
        found = value[name]
        # To Python True is an int; to a count it is damage.
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise _damaged(path, f"{name}={str(found)[:40]!r} must be {_spelled(kind)}", error)
    return value


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object with a digest of all its values."""
    return {**values, "sha256": seal(values)}


def check_seal(value: Mapping[str, Any], path: Path, error: type[PbmvflError]) -> None:
    """Refuse an object that is not what `sealed` made."""
    if value.get("sha256") != seal(value):
        raise error(f"{path} is damaged: it is not what was written there; restore it from a copy, or make it anew")


def seal(values: Mapping[str, Any]) -> str:
    """Return a digest of all values but the digest itself."""
    said = {name: value for name, value in values.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _damaged(path: Path, what: str, error: type[PbmvflError]) -> PbmvflError:
    return error(f"{path} is damaged: {what}; restore the file from a copy, or make it anew")


def _spelled(kind: type | UnionType) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
