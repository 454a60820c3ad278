"""`python -m benchmarks.utility`: accuracy against epsilon and against advantage, as a table and a picture.

Results go to benchmarks/results/utility.jsonl, one line each; a run that was stopped continues there.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.utility import page, tables
from benchmarks.utility.methods import METHODS, Task
from benchmarks.utility.records import Records

_HERE = Path(__file__).parent
_RESULTS = _HERE.parent / "results" / "utility.jsonl"
_DOCS = _HERE.parent.parent / "docs"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.utility", description=__doc__)
    parser.add_argument("--config", type=Path, default=_HERE / "config.toml")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="lines of JSON; continued if they exist")
    parser.add_argument("--docs", type=Path, default=_DOCS, help="where utility.md and utility.png go")
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), help="only these")
    parser.add_argument("--page-only", action="store_true", help="table and picture from what is there")
    given = parser.parse_args()
    config = tomllib.loads(given.config.read_text())
    if unknown := set(config["methods"]) - set(METHODS):
        parser.error(f"methods={sorted(unknown)} in {given.config}; there are {', '.join(METHODS)}")
    torch.set_num_threads(1)
    records = Records(given.results)
    if not given.page_only:
        _measure(config, given.methods or config["methods"], records)
    page.write(config, records, given.docs)
    return 0


def _measure(config: dict[str, Any], names: list[str], records: Records) -> None:
    todo = [
        (dataset, name, epsilon, seed)
        for dataset in config["datasets"]
        for name in names
        for epsilon in (config["epsilons"] if METHODS[name].is_private else [None])
        for seed in config["seeds"]
        if records.find(dataset, name, epsilon, seed) is None
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    loaded: tuple[str, Task] | None = None
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=len(todo))
        for dataset, name, epsilon, seed in todo:
            progress.update(bar, description=f"{dataset} {name} {'' if epsilon is None else f'{epsilon:g}'}")
            if loaded is None or loaded[0] != dataset:
                data, table = tables.load(dataset, config["num_parties"])
                loaded = dataset, Task(data=data, table=table, delta=config["delta"])
            method, budget = METHODS[name], math.inf if epsilon is None else epsilon
            key = {"dataset": dataset, "method": name, "epsilon": epsilon}
            chosen = records.find(dataset, name, epsilon, None)
            if chosen is None:
                chosen = {**key, "seed": None, "choice": method.choose(loaded[1], budget)}
                records.add(chosen)
            choice = {at: value for at, value in chosen["choice"].items() if at != "hold_out_accuracy"}
            started = time.perf_counter()
            found = method.run(loaded[1], budget, seed, choice)
            seconds = round(time.perf_counter() - started, 2)
            rounded = {at: round(value, 5) for at, value in found.items()}
            records.add({**key, "seed": seed, **rounded, "seconds": seconds})
            progress.advance(bar)


if __name__ == "__main__":
    sys.exit(main())
