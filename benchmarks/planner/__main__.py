"""`python -m benchmarks.planner`: planned training against the best of a grid, over tables that no rule was chosen on.

    python -m benchmarks.planner                          # all that is not there yet, a line a table
    python -m benchmarks.planner --tables "wine" "digits" # only these
    python -m benchmarks.planner --page-only              # table and picture again

About an hour on two cores.

Results go to benchmarks/results/planner.json after every table; a run that was stopped continues there. The page is
docs/evidence/planner.md, of which the part between two marks is written anew, and docs/images/planner.png.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.planner import page
from benchmarks.planner.grid import EPSILONS, alone, compared
from benchmarks.planner.tables import FAMILIES, load
from benchmarks.planner.trials import Runner, runner

_HERE = Path(__file__).parent
_RESULTS = _HERE.parent / "results" / "planner.json"
_DOCS = _HERE.parent.parent / "docs"
_STUDIO = _HERE.parent.parent / "src" / "pbmvfl" / "cli" / "studio" / "assets" / "benchmark.json"
#: Where little or nothing is left to learn: for what is said before training.
_SMALL_EPSILONS = (0.3, 0.1, 0.03, 0.01)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=sorted(FAMILIES), default="held-out")
    parser.add_argument("--tables", nargs="+", help="only these of the family")
    parser.add_argument("--results", type=Path, default=_RESULTS)
    parser.add_argument("--docs", type=Path, default=_DOCS)
    parser.add_argument("--page-only", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    given = parser.parse_args()
    names = FAMILIES[given.family]
    if unknown := set(given.tables or ()) - set(names):
        parser.error(f"unknown table {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    records: dict[str, list[dict[str, Any]]] = {"compared": [], "alone": []}
    if given.results.exists():
        records = json.loads(given.results.read_text())
    if not given.page_only:
        only = [name for name in names if not given.tables or name in given.tables]
        with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
            _measure(only, records, given.results, runner(pool))
    if given.family == "held-out":
        page.write(records, given.docs)
        _STUDIO.write_text(page.studio_records(records["compared"]))
    print(page.summary(records["compared"]))
    return 0


def _measure(names: list[str], records: dict[str, list[dict[str, Any]]], path: Path, run: Runner) -> None:
    for name in names:
        table = load(name)
        for kind, epsilons, measure in (("compared", EPSILONS, compared), ("alone", _SMALL_EPSILONS, alone)):
            for epsilon in epsilons:
                if any((each["table"], each["epsilon"]) == (name, epsilon) for each in records[kind]):
                    continue
                found = measure(table, epsilon, run)
                records[kind].append(found)
                path.write_text(json.dumps(records, indent=1) + "\n")
                if kind == "compared":
                    print(page.line(found), flush=True)


if __name__ == "__main__":
    sys.exit(main())
