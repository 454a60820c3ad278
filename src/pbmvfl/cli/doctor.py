"""`pbmvfl doctor`: check that this machine can run a federation: packages, folders, and known answers."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import typer
from filelock import lock_descriptor

from pbmvfl.cli.options import AsJson
from pbmvfl.crypto.entropy import SystemEntropy, fast_keystream, keystream
from pbmvfl.crypto.ring import Ring
from pbmvfl.crypto.rounded_normal import SIGMA, rounded_normal
from pbmvfl.crypto.secure_sum import Masks
from pbmvfl.data.datasets import DATASETS, data_root
from pbmvfl.data.sources import cache_root
from pbmvfl.errors import DataError
from pbmvfl.ledger.tamper_evidence import state_folder
from pbmvfl.mechanisms import PoissonBinomial
from pbmvfl.privacy.accounting import Activity, TrainingRun, epsilon_bound
from pbmvfl.privacy.events import NoisyUpdate
from pbmvfl.privacy.units import Accounting, Adversary, Unit
from pbmvfl.wire.traffic import human_bytes

# --- Findings ---


class Status(StrEnum):
    OK = "ok"
    #: Something optional is missing; everything works without it.
    NOTE = "note"
    TROUBLE = "trouble"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of `pbmvfl doctor`."""

    name: str
    status: Status
    found: str
    #: Suggested remedy; empty if none is needed.
    way_out: str = ""

    def to_dict(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}


#: A check returns its finding; if it raises, its name and the error become the finding.
Check = Callable[[], Finding]


def ok(name: str, found: str) -> Finding:
    return Finding(name=name, status=Status.OK, found=found)


def note(name: str, found: str, way_out: str) -> Finding:
    return Finding(name=name, status=Status.NOTE, found=found, way_out=way_out)


def trouble(name: str, found: str, way_out: str) -> Finding:
    return Finding(name=name, status=Status.TROUBLE, found=found, way_out=way_out)


def run_check(name: str, check: Check) -> Finding:
    """Run a check and report any exception as a finding, so that the other checks still run."""
    try:
        return check()
    except Exception as error:
        said = str(error) or type(error).__name__
        return trouble(name, f"the check itself failed: {said}", "install the package anew, or report this as a bug")


# --- Installed packages and writable folders ---
# Checks remove every file that they create.


OLDEST_PYTHON = (3, 11)
#: With less free space than this, a run's checkpoints may not fit.
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
    """Compare installed versions with the requirements, without importing the packages."""
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
    return ok("packages", f"all {checked} required ones are installed and recent enough")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 2.11.0+cpu is (2, 11, 0)."""
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
    """Check that the default folder of runs supports writing, file locks and SQLite files."""
    folder = Path.cwd() if folder is None else folder
    name, elsewhere = "run folders", "use --out and --ledger on another file system"
    try:
        with tempfile.TemporaryDirectory(prefix=".pbmvfl-doctor-", dir=folder) as made:
            if (failed := _locks_in(Path(made))) is not None:
                return trouble(name, f"{folder}: {failed}", elsewhere)
            if (failed := _sqlite_in(Path(made))) is not None:
                return trouble(name, f"{folder}: {failed}", elsewhere)
    except OSError as error:
        return trouble(name, f"{folder} cannot be written to: {error.strerror}", "go to another folder, or use --out")
    return ok(name, f"{folder} is writable, with the file locks that ledgers need")


def _locks_in(folder: Path) -> str | None:
    """Return the error of file locks in a folder, or None if a second lock is refused."""
    path = folder / "lock"
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT, 0o600) for _ in range(2))
    try:
        if lock_descriptor(first, blocking=False) and lock_descriptor(second, blocking=False):
            return "its file system lets two processes have one lock"
        return None
    except OSError as error:
        return f"its file system has no locks ({error.strerror})"
    finally:
        os.close(first)
        os.close(second)


def _sqlite_in(folder: Path) -> str | None:
    """Return the error of SQLite in a folder, or None if its write-ahead log works there."""
    try:
        ledger = sqlite3.connect(folder / "ledger.sqlite")
        try:
            (mode,) = ledger.execute("PRAGMA journal_mode = WAL").fetchone()
            ledger.execute("CREATE TABLE one (number INTEGER)")
        finally:
            ledger.close()
    except sqlite3.Error as error:
        return f"SQLite cannot keep a ledger there ({error})"
    return None if mode == "wal" else f"SQLite keeps no log there (journal_mode={mode})"


def state() -> Finding:
    """Check the folder of the external counters by which ledgers detect an older copy."""
    folder = state_folder()
    way_out = "set PBMVFL_STATE to a folder of your own; without it only the file beside a ledger knows an older copy"
    if folder is None:
        return note("state folder", "there is no home folder", way_out)
    if not _can_be_made(folder):
        return note("state folder", f"{folder} cannot be written to", way_out)
    return ok("state folder", f"{folder}" + ("" if folder.is_dir() else ", made with the first ledger"))


def _can_be_made(folder: Path) -> bool:
    """Return whether the folder, or its nearest existing parent, is writable; create nothing."""
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
        remedy = "set PBMVFL_DATA to a folder with local copies (docs/how-to/own-table.md), or unset it"
        return trouble(name, str(error), remedy)
    if not _can_be_made(cache_root()):
        return note(name, f"the cache {cache_root()} cannot be written to", "set PBMVFL_CACHE to a folder that can be")
    if folder is None:
        return ok(name, f"no local copies (PBMVFL_DATA is not set): downloads go to {cache_root()}")
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


# --- Known answers of randomness, masks, noise and privacy accounting ---
# None of them is a proof. They detect a replaced library, a build that computes something else, and a machine without
# usable randomness.


_DO_NOT_TRAIN = "do not train with this installation: install it anew in a new environment, and report it if it stays"
#: NIST SP 800-38A, F.5.5: CTR-AES256, the first output block.
_KEY = "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"
_COUNTER = "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
_BLOCK = "0bdf7df1591716335e9a8b15c860c502"
#: Standard deviations within which a sum must lie; one false alarm in 500 million.
_DEVIATIONS = 6.0
_DRAWS = 20_000
#: Gaussian mechanism with neighbours one standard deviation apart, at delta 1e-5: Phi(1/2 - e) - exp(e)
#: Phi(-1/2 - e) = 1e-5 solved for e in 50 digits (`tests/cli/test_doctor.py` does it).
GAUSSIAN_EPSILON = 4.377178


def entropy_source() -> Finding:
    """Check that the operating system's entropy is ready and varies, and that AES-256 gives NIST's answer."""
    name = "entropy"
    try:
        first = os.getrandom(32, os.GRND_NONBLOCK)
    except BlockingIOError:
        return trouble(name, "the system has not gathered enough of it yet", "wait until it has, and ask again")
    except AttributeError:  # not Linux
        first = os.urandom(32)
    words = np.empty(1 << 13, dtype=np.uint64)
    SystemEntropy().fill(words)
    ones = int(np.unpackbits(words.view(np.uint8)).sum())
    bits = words.size * 64
    stuck = first == os.urandom(32) or len(np.unique(words)) < words.size
    if stuck or abs(ones - bits / 2) > _DEVIATIONS * math.sqrt(bits) / 2:
        return trouble(name, "it repeats itself, or has too many bits of one kind", _DO_NOT_TRAIN)
    stream = keystream(bytes.fromhex(_KEY), first_block=int(_COUNTER, 16)).update(bytes(16))
    same = fast_keystream(bytes.fromhex(_KEY)).update(bytes(64))
    if stream.hex() != _BLOCK or same != keystream(bytes.fromhex(_KEY), first_block=2).update(bytes(64)):
        return trouble(name, "AES-256 in counter mode does not give NIST's answer", _DO_NOT_TRAIN)
    return ok(name, "from the operating system; AES-256 gives NIST's answer")


def masks_cancel() -> Finding:
    """Check that the masks of three parties are non-zero and sum to zero."""
    ring = Ring.for_sums_up_to(1000)
    keys = {pair: bytes([i + 1]) * 32 for i, pair in enumerate([(0, 1), (0, 2), (1, 2)])}
    drawn = []
    for party in range(3):
        pairs = {other: keys[min(party, other), max(party, other)] for other in range(3) if other != party}
        masks = Masks(ring=ring, index=party, pair_keys=pairs, values_per_round=64)
        drawn.append(masks.for_round(5, 64).copy())
    total = ring.reduce(drawn[0] + drawn[1] + drawn[2])
    if total.any() or not all(ring.reduce(each).any() for each in drawn):
        return trouble("masks", "those of three parties do not cancel", _DO_NOT_TRAIN)
    return ok("masks", "the masks of three parties cancel, and none is zero")


class _Constant:
    """Entropy source that repeats one 16-bit word."""

    seeded = True

    def __init__(self, word: int) -> None:
        self._word = word

    def fill(self, buffer: npt.NDArray[Any]) -> None:
        buffer.view(np.uint16)[...] = self._word


def noise_has_its_law() -> Finding:
    """Check the thresholds of the Poisson binomial's coins, and the mean and variance of normal noise."""
    name = "noise"
    mechanism = PoissonBinomial(num_parties=2, num_trials=8, beta=0.25, embedding_dim=1)
    # The probabilities are 1/4, 1/2 and 3/4 of 65536: a coin is 1 for a word below its threshold.
    values = np.array([-1.0, 0.0, 1.0], dtype=np.float32)
    for word, expected in ((0x3FFF, [8, 8, 8]), (0x4000, [0, 8, 8]), (0x8000, [0, 0, 8]), (0xC000, [0, 0, 0])):
        if mechanism.randomize(values, _Constant(word)).tolist() != expected:
            return trouble(name, "coins of the Poisson binomial do not turn at their probability", _DO_NOT_TRAIN)
    drawn = rounded_normal(SystemEntropy(), _DRAWS) / SIGMA
    # The sum of n squared standard normal values has mean n and variance 2n.
    if abs(float((drawn**2).sum()) - _DRAWS) > _DEVIATIONS * math.sqrt(2 * _DRAWS):
        return trouble(name, "the normal noise has not the size that is charged", _DO_NOT_TRAIN)
    if abs(float(drawn.sum())) > _DEVIATIONS * math.sqrt(_DRAWS):
        return trouble(name, "the normal noise is not centred", _DO_NOT_TRAIN)
    return ok(name, f"Poisson binomial thresholds and {_DRAWS:,} normal draws are as charged")


def account_gives_known_answers() -> Finding:
    """Check two epsilons with independently known values."""
    name = "account"
    update = Activity(
        split="train",
        release=None,
        update=NoisyUpdate(clip_norm=1.0, noise_multiplier=2.0),
        row_releases=0,
        row_updates=1,
        total_releases=0,
    )
    gaussian = TrainingRun(activities=(update,), num_parties=2)
    found = epsilon_bound(gaussian, Unit.CELL, Accounting.STRICT, delta=1e-5).epsilon
    if not GAUSSIAN_EPSILON * (1 - 1e-6) <= found <= GAUSSIAN_EPSILON * 1.001:
        return trouble(name, f"a Gaussian step has epsilon {found:.6f}, and not {GAUSSIAN_EPSILON}", _DO_NOT_TRAIN)
    # One coin of probability 1/4 or 3/4 without another party's noise is randomised response: ln 3.
    coin = PoissonBinomial(num_parties=2, num_trials=1, beta=0.25, embedding_dim=1)
    release = Activity(split="test", release=coin.event, update=None, row_releases=1, row_updates=0, total_releases=1)
    alone = Adversary(colluding_parties=1)
    run = TrainingRun(activities=(release,), num_parties=2)
    found = epsilon_bound(run, Unit.CELL, Accounting.STRICT, alone, delta=1e-9).epsilon
    if not math.log(3) * (1 - 1e-6) <= found <= math.log(3) * 1.001:
        return trouble(name, f"one coin has epsilon {found:.6f}, and not ln 3", _DO_NOT_TRAIN)
    return ok(name, f"known epsilons are found: {GAUSSIAN_EPSILON:.4f} of a Gaussian step, ln 3 of one coin")


# --- All checks, in display order ---


CHECKS: Sequence[tuple[str, Check]] = (
    ("Python", python_version),
    ("packages", packages),
    ("torch", torch_threads),
    ("entropy", entropy_source),
    ("masks", masks_cancel),
    ("noise", noise_has_its_law),
    ("account", account_gives_known_answers),
    ("run folders", working_folder),
    ("state folder", state),
    ("free disk", free_disk),
    ("data", data_folders),
    ("browser", browser),
)


# --- the command ---


def doctor(json_: AsJson = False) -> None:
    """Check this machine: versions, randomness, known answers of masks, noise and account, folders, locks, disk.

    A few seconds; nothing is left behind. Each [bold]trouble[/] has a way out beside it, and ends in code 1.

    [bold]Try[/]  pbmvfl doctor
    """
    from pbmvfl import __version__

    findings = [run_check(name, check) for name, check in CHECKS]
    bad = [each for each in findings if each.status is Status.TROUBLE]
    if json_:
        shown = {"version": __version__, "ok": not bad, "checks": [each.to_dict() for each in findings]}
        print(json.dumps(shown, indent=2))
        raise typer.Exit(1 if bad else 0)
    from rich.console import Console
    from rich.markup import escape

    from pbmvfl.cli.tables import plain_table

    console = Console(highlight=False)
    colours = {Status.OK: "green", Status.NOTE: "yellow", Status.TROUBLE: "bold red"}
    table = plain_table("check", "", "found", left=3)
    for each in findings:
        words = escape(each.found) + (f"\n[bold]do:[/] {escape(each.way_out)}" if each.way_out else "")
        table.add_row(each.name, f"[{colours[each.status]}]{each.status}[/]", words)
    console.print(table)
    if bad:
        console.print(f"trouble with {', '.join(each.name for each in bad)}", style="bold red", markup=False)
        raise typer.Exit(1)
    console.print(f"pbmvfl {__version__}: ready", style="bold green", markup=False)
