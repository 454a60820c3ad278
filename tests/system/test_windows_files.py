"""Where files are as on Windows (`support.windows_stand_in`), the package imports, trains, charges and locks.

The stand-in has its own controls: each thing that it takes away fails there, and succeeds here.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import pbmvfl
from support.windows_stand_in import HIDDEN, MISSING

TESTS = Path(__file__).parents[1]

CONTROLS = {
    "fcntl": "import fcntl",
    "positions": "os.pread(os.open('file', os.O_RDWR), 1, 0)",
    "folders": "os.open('.', os.O_RDONLY)",
    "moves": "file = open('file'); os.replace('file', 'other')",
    "removals": "file = open('file'); os.unlink('file')",
    "locked bytes": "file = os.open('file', os.O_RDWR); filelock.lock_descriptor(file); open('file').read()",
    "signals": "os.kill(os.getpid(), 0)",
}

SIMULATION = """
from pathlib import Path
import pbmvfl
from support.cohorts import small_data, small_plan
data = small_data()
plan = small_plan(data)
for _ in range(2):  # the second one resumes, and has nothing more to do
    result = pbmvfl.Federation(plan).fit(data, checkpoints="run", ledger="ledgers")
assert result.history
assert len(list(Path("ledgers").glob("*.sqlite"))) >= 3
pbmvfl.Federation(pbmvfl.Plan.for_data(data)).fit(data)  # the default algorithm
"""

LEDGER = """
import shutil, subprocess, sys
from pathlib import Path
from support.ledger_books import NAME, charge, charge_all, opening, paper_limit, small_plan
from pbmvfl.errors import LedgerError
from pbmvfl.ledger.ledger import Ledger
plan, path = small_plan(), Path("books/own.sqlite")
path.parent.mkdir()
def refused(attempt, why):
    try:
        attempt()
    except LedgerError as error:
        assert why in str(error), error
    else:
        raise AssertionError(why)
Ledger(path).set_limit(NAME, paper_limit())
charge_all(Ledger(path), plan, run="1", rounds=2)
shutil.copytree("books", "copy")
session = Ledger(path).open_session(
    opening(dataset=NAME, plan=plan, run="2", session="s", public_start=True, exact_metrics=True)
)
charge(session, plan, 0)
Ledger(path).set_limit(NAME, paper_limit(2000.0))  # while another descriptor has the lock
charge(session, plan, 1)
refused(lambda: charge_all(Ledger(path), plan, run="3"), "is being charged by another session")
session.close()
charge_all(Ledger(path), plan, run="3", rounds=1)
assert Ledger(path).trouble() is None
for file in Path("copy").iterdir():
    shutil.copy(file, path.parent / file.name)
refused(lambda: charge_all(Ledger(path), plan, run="4"), "is an older copy")
"""

KILLED = """
import os
from pathlib import Path
from pbmvfl._descriptors import lock_folder
held = lock_folder(Path("."), "lock", blocking=False)
assert held is not None
assert lock_folder(Path("."), "lock", blocking=False) is None
os._exit(9)
"""


def run(program: str, folder: Path, *, stand_in: bool = True) -> subprocess.CompletedProcess[str]:
    start = "import filelock, os\n" + ("import support.windows_stand_in as w; w.install()\n" if stand_in else "")
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PBMVFL_STATE": str(folder / "state")}
    return subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(program)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("program", CONTROLS.values(), ids=CONTROLS)
def test_the_stand_in_lacks_what_windows_lacks(program, tmp_path):
    (tmp_path / "file").write_text("first")
    assert run(program, tmp_path, stand_in=True).returncode == 1
    (tmp_path / "file").write_text("first")
    assert run(program, tmp_path, stand_in=False).returncode == 0


@pytest.mark.parametrize("program", [SIMULATION, LEDGER], ids=["simulation", "ledger"])
def test_simulations_and_ledgers_work_where_files_are_as_on_windows(program, tmp_path):
    done = run(program, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_lock_ends_with_its_process(tmp_path):
    for _ in range(2):
        done = run(KILLED, tmp_path)
        assert done.returncode == 9, done.stderr


def test_no_module_outside_of_a_deployment_uses_what_windows_lacks():
    source = Path(pbmvfl.__file__).parent
    paths = [path for path in source.rglob("*.py") if path.relative_to(source).parts[0] != "deploy"]
    found = {path.name: used(path.read_text()) for path in paths}
    assert found.pop("_descriptors.py") == {"os.fchmod", "os.pread", "os.pwrite"}
    assert {name: names for name, names in found.items() if names} == {}


def used(text: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names} & HIDDEN
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module)} & HIDDEN
        elif isinstance(node, ast.Attribute) and node.attr in [*MISSING, "kill"]:
            names |= {ast.unparse(node)} & {f"os.{node.attr}"}
    return names


def test_a_use_of_what_windows_lacks_is_noticed():
    assert used("def f():\n    import fcntl\n    os.kill(os.getuid(), 0)") == {"fcntl", "os.kill", "os.getuid"}
