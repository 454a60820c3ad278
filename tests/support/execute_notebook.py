"""Execute a notebook from top to bottom in its own folder, and write it with its outputs.

`python tests/support/execute_notebook.py NOTEBOOK [WRITTEN]` runs it by this interpreter, on loopback. Without a second
name the notebook itself is written.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

source, written = Path(sys.argv[1]), Path(sys.argv[-1])
notebook = nbformat.read(source, as_version=4)
# Times of cells and the interpreter's version would change in every execution.
client = NotebookClient(
    notebook,
    kernel_name="python3",
    timeout=400,
    startup_timeout=200,
    record_timing=False,
    coalesce_streams=True,
    resources={"metadata": {"path": str(source.parent)}},
)
client.execute()
notebook.metadata["language_info"] = {"name": "python"}
nbformat.write(notebook, written)
