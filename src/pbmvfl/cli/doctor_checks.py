"""What is installed and what can be written here. Nothing that a check makes stays."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from pbmvfl.cli.finding import Finding, note, ok, trouble
from pbmvfl.data.datasets import DATASETS, data_root
from pbmvfl.data.sources import cache_root
from pbmvfl.errors import DataError
from pbmvfl.ledger.counter import state_folder
from pbmvfl.wire.traffic import human_bytes

OLDEST_PYTHON = (3, 11)
#: Less than this and a run's checkpoints may not fit.
_LEAST_FREE = 500_000_000
_REQUIREMENT = re.compile(r"^([A-Za-z0-9_.-]+)\s*>=\s*([0-9][0-9.]*)")


def python_version(version: tuple[int, ...] | None = None) -> Finding:
    version = tuple(sys.version_info[:3]) if version is None else version
    found = ".".join(map(str, version[:3]))
    if version[:2] < OLDEST_PYTHON:
        needed = ".".join(map(str, OLDEST_PYTHON))
        return trouble("Python", found, f"use Python {needed} or newer")
    return ok("Python", f"{found}, {sys.platform}")


def packages(requirements: Sequence[str] | None = None) -> Finding:
    """Versions against what the package asks for; packages are not imported."""
    if requirements is None:
        try:
            requirements = metadata.requires("pbmvfl") or []
        except metadata.PackageNotFoundError:
            return note(
                "packages", "pbmvfl runs from its source and is not installed", "pip install -e . in its folder"
            )
    wrong, checked = [], 0
    for requirement in requirements:
        matched = _REQUIREMENT.match(requirement)
        if "extra ==" in requirement or matched is None:
            continue
        name, needed = matched[1], matched[2]
        checked += 1
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if _numbers(found) < _numbers(needed):
            wrong.append(f"{name} {found} is older than {needed}")
    if wrong:
        return trouble("packages", "; ".join(wrong), "pip install --upgrade pbmvfl, in a new environment if need be")
    return ok("packages", f"all {checked} that are needed are there, and new enough")


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers: 2.11.0+cpu is (2, 11, 0)."""
    matched = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(int(part) for part in matched[0].split(".")) if matched else ()


def torch_threads() -> Finding:
    import torch

    cores = os.cpu_count() or 1
    used = torch.get_num_threads()
    cores_said = f"{cores} core{'' if cores == 1 else 's'}"
    found = f"torch {torch.__version__}, {used} thread{'' if used == 1 else 's'} of {cores_said}"
    if used > cores:
        return note("torch", found, f"more threads than cores are slow: unset OMP_NUM_THREADS, or set it to {cores}")
    return ok("torch", f"{found}; `train` uses 1, or all cores for pictures (--threads)")


# --- folders ---


def working_folder(folder: Path | None = None) -> Finding:
    """Where runs go unless --out names another place: writing, locks and the ledgers' kind of file."""
    folder = Path.cwd() if folder is None else folder
    name, elsewhere = "run folders", "use --out and --ledger on another file system"
    try:
        with tempfile.TemporaryDirectory(prefix=".pbmvfl-doctor-", dir=folder) as made:
            if (failed := _locks_in(Path(made))) is not None:
                return trouble(name, f"{folder}: {failed}", elsewhere)
            if (failed := _books_in(Path(made))) is not None:
                return trouble(name, f"{folder}: {failed}", elsewhere)
    except OSError as error:
        return trouble(name, f"{folder} cannot be written to: {error.strerror}", "go to another folder, or use --out")
    return ok(name, f"{folder} can be written to, and has locks as ledgers need them")


def _locks_in(folder: Path) -> str | None:
    """Whether a second holder is kept out."""
    path = folder / "lock"
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT, 0o600) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return "its file system lets two processes have one lock"
    except OSError as error:
        return f"its file system has no locks ({error.strerror})"
    finally:
        os.close(first)
        os.close(second)


def _books_in(folder: Path) -> str | None:
    """Whether SQLite can keep its log beside the file."""
    try:
        book = sqlite3.connect(folder / "book.sqlite")
        try:
            (mode,) = book.execute("PRAGMA journal_mode = WAL").fetchone()
            book.execute("CREATE TABLE one (number INTEGER)")
        finally:
            book.close()
    except sqlite3.Error as error:
        return f"SQLite cannot keep a ledger there ({error})"
    return None if mode == "wal" else f"SQLite keeps no log there (journal_mode={mode})"


def state() -> Finding:
    """Where ledgers keep a counter outside of themselves, by which an older copy is known."""
    folder = state_folder()
    way_out = "set PBMVFL_STATE to a folder of your own; without it only the file beside a ledger knows an older copy"
    if folder is None:
        return note("state folder", "there is no home folder", way_out)
    if not _can_be_made(folder):
        return note("state folder", f"{folder} cannot be written to", way_out)
    return ok("state folder", f"{folder}" + ("" if folder.is_dir() else ", made with the first ledger"))


def _can_be_made(folder: Path) -> bool:
    """Whether the folder, or the nearest one above it that exists, can be written to; nothing is made."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def free_disk(folder: Path | None = None) -> Finding:
    folder = Path.cwd() if folder is None else folder
    free = shutil.disk_usage(folder).free
    if free < _LEAST_FREE:
        return trouble("free disk", f"{human_bytes(free)} in {folder}", "free some space, or use --out on another disk")
    return ok("free disk", human_bytes(free))


def data_folders() -> Finding:
    name = "data"
    try:
        folder = data_root()
    except DataError as error:
        return trouble(name, str(error), "set PBMVFL_DATA to a folder with local copies (docs/data.md), or unset it")
    if not _can_be_made(cache_root()):
        return note(name, f"the cache {cache_root()} cannot be written to", "set PBMVFL_CACHE to a folder that can be")
    if folder is None:
        return ok(name, f"no local copies (PBMVFL_DATA is not set): what is fetched goes to {cache_root()}")
    held = [each for each in DATASETS if (folder / each).is_dir()]
    return ok(name, f"{folder}: {', '.join(held) if held else 'no copy of a named dataset'}")


def browser() -> Finding:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = next((path for each in names if (path := shutil.which(each))), None)
    if found is None:
        return note(
            "browser", "no chromium", "none is needed: reports open in any browser; tests look at them in this one"
        )
    return ok("browser", f"{found} (optional: tests look at reports in it)")
