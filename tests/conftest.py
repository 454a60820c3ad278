"""What the tests share: one thread, small aligned tables, roles driven by hand, counter mode by its definition."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import shutil
import subprocess
import sys
import tempfile

from support.memory_folder import temporary_folder

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TMPDIR"] = temporary_folder()
# Ledgers keep a counter outside of them: in a folder of this test run alone, also in the processes that it starts.
os.environ["PBMVFL_STATE"] = tempfile.mkdtemp(prefix="pbmvfl-state-", dir=os.environ["TMPDIR"])

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# The release monitor is imported before anything of the product; processes that tests start find it on their path.
os.environ["PBMVFL_TEST_VIOLATIONS"] = os.path.join(os.environ["PBMVFL_STATE"], "violations")
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).resolve().parent / "monitored"), os.environ.get("PYTHONPATH")))
)
import pytest
import torch
import typer.main
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import settings

import support.release_monitor as release_monitor
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.plan.plan import Plan
from pbmvfl.report import plots
from support.cohorts import Cohort, small_data, small_plan
from support.command_line import run_command
from support.slow_files import SLOW_FILES, in_turn, place

# What is imported and collected never becomes garbage; `pytest_collection_finish` begins to collect.
gc.disable()
# pytest makes temporary files before it loads this one, and Python keeps the folder that it found then.
tempfile.tempdir = os.environ["TMPDIR"]
atexit.register(shutil.rmtree, os.environ["PBMVFL_STATE"], ignore_errors=True)
torch.set_num_threads(1)
# The tree of commands is the same at every call in a process, and takes longer to make than many a command to run.
typer.main.get_command = functools.cache(typer.main.get_command)
# Compilation on first use would trip any deadline. Where CI is set the examples are the same every time, so that a
# change is judged by itself; everywhere else each run looks at new ones.
settings.register_profile("pbmvfl", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
settings.load_profile("pbmvfl")


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of every later garbage collection: nothing of it becomes garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of slow files, and put those files first: a file is one process's (`--dist loadfile`).

    Of the same place, those with more slow tests come first.
    """
    for item in items:
        if place(item.path) < len(SLOW_FILES):
            item.add_marker(pytest.mark.slow)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    most_first = sorted({item.path: None for item in items}, key=lambda path: -slow[path])
    turns = {path: turn for turn, path in enumerate(in_turn(most_first))}
    items.sort(key=lambda item: turns[item.path])


@pytest.fixture(autouse=True)
def _one_release_for_one_charge(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test, whatever it is about, in which a party released more than was charged."""
    yield
    found = release_monitor.violations()
    if request.node.get_closest_marker("releases_uncharged") is None:
        assert not found, found


@pytest.fixture(autouse=True)
def _arithmetic_as_it_was() -> Iterator[None]:
    """A job's process has numbers near zero flushed; where tests run one as a thread, others must not inherit that."""
    yield
    torch.set_flush_denormal(False)


_save_figure = plots.save_figure
#: One black pixel.
_PICTURE = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55"
    "0000000a49444154789c636000000002000148afa4710000000049454e44ae426082"
)


def _save_unrendered(figure: Any, path: Path) -> None:
    if Path(path).name != "curves.png":
        _save_figure(figure, path)
        return
    from matplotlib import pyplot

    Path(path).write_bytes(_PICTURE)
    pyplot.close(figure)


@pytest.fixture(scope="session", autouse=True)
def _curves_without_pixels() -> Iterator[None]:
    """Do not render `curves.png`, which every `train` command draws: pixels take longer than most trainings here.

    Its figure is still made from each result. Tests of the file itself use the fixture `rendered_curves`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "save_figure", _save_unrendered)
        yield


@pytest.fixture
def rendered_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render `curves.png` as users get it."""
    monkeypatch.setattr(plots, "save_figure", _save_figure)


@pytest.fixture(scope="session")
def make_data() -> Callable[..., VerticalDataset]:
    return small_data


@pytest.fixture(scope="session")
def data() -> VerticalDataset:
    return small_data()


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    return small_plan


@pytest.fixture(scope="session")
def make_cohort() -> Callable[..., Cohort]:
    return Cohort


@pytest.fixture(scope="session")
def counter_mode() -> Callable[..., bytes]:
    """AES-256 in counter mode by its definition: each counter block encrypted by itself (NIST SP 800-38A, 6.5)."""

    def stream(key: bytes, num_bytes: int, *, first_block: int = 0) -> bytes:
        cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        blocks = range(first_block, first_block - (-num_bytes // 16))
        return b"".join(cipher.update(block.to_bytes(16, "big")) for block in blocks)[:num_bytes]

    return stream


@pytest.fixture(scope="session")
def run_process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line, or another program, in a Python process of its own that starts in the folder `cwd`.

    The timeout ends a process that hangs; it is no statement about speed.
    """

    def run(
        *arguments: object, cwd: Path, program: str = "from pbmvfl.cli import main; main()", timeout: float = 900
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def run_main(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        return run_command(*arguments, cwd=Path()), *capsys.readouterr()

    return run
