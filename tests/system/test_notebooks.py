"""The notebooks of examples/ run from top to bottom, and what they show is what is committed.

Each runs in a process of its own, one kernel at a time. A cell with the tag `random` shows figures of one draw: they
are compared without their digits.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are not beside these tests")


def shown(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """What every code cell shows, as text; of a random cell without figures, and a picture as its place alone."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        texts = [
            each.get("text") or each["data"].get("text/html") or each["data"]["text/plain"] for each in cell.outputs
        ]
        if "random" in cell.metadata.get("tags", ()):
            texts = [re.sub(r"\s+", " ", re.sub(r"[\d.,]*\d", "#", text)) for text in texts]
        found.append(texts)
    return found


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook after a run in a copy of the examples."""
    shutil.copytree(EXAMPLES, folder / "examples")
    own = {name: str(folder / name) for name in ("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "PBMVFL_STATE")}
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "tests" / "support" / "execute_notebook.py",
            folder / "examples" / path.name,
            folder / "done.ipynb",
        ],
        env={**os.environ, **own, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return nbformat.read(folder / "done.ipynb", as_version=4)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_committed(path, tmp_path):
    committed = nbformat.read(path, as_version=4)
    assert shown(executed(path, tmp_path)) == shown(committed)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_was_executed_in_order_and_names_no_machine(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.outputs for cell in cells), "every cell shows something"
    outputs = [each for cell in cells for each in cell.outputs]
    assert {each.get("name", "stdout") for each in outputs} == {"stdout"}, "no warning is shown"
    texts = "".join(text for cell in shown(notebook) for text in cell)
    assert not re.search(r"/(?:home|root|work|tmp|Users)/|\d s\b", texts), "no path of a machine, no time"


def test_figures_of_a_random_cell_alone_may_differ():
    def notebook(figure: str, *tags: str) -> nbformat.NotebookNode:
        output = nbformat.v4.new_output("stream", text=f"accuracy {figure}\n")
        cell = nbformat.v4.new_code_cell("1", metadata={"tags": list(tags)}, outputs=[output])
        return nbformat.v4.new_notebook(cells=[cell])

    assert shown(notebook("0.81", "random")) == shown(notebook("0.79", "random"))
    assert shown(notebook("0.81")) != shown(notebook("0.79"))
    assert shown(notebook("0.81", "random")) != shown(notebook("none", "random"))


def test_there_are_three():
    assert [path.stem for path in NOTEBOOKS] == ["choosing_an_epsilon", "paper_table_4_small", "tutorial"]
