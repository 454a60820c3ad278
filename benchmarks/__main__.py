"""`make bench`: every ratio of the goals in one table, with pass or fail."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import accounts, kernels, reproduction, simulation, steps
from benchmarks.measure import Row

GROUPS: tuple[Callable[[], Iterator[Row]], ...] = (
    kernels.sampler,
    kernels.masks,
    kernels.packing,
    kernels.predictions,
    accounts.account,
    steps.dense_steps,
    steps.privacy_in_a_step,
    steps.noise_on_updates,
    steps.whole_rounds,
    simulation.epochs,
    steps.ledgers,
    reproduction.smoke_run,
)


def main() -> int:
    names = [group.__name__ for group in GROUPS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="group", help=f"only these: {', '.join(names)}")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    given = parser.parse_args()
    if unknown := set(given.groups) - set(names):
        parser.error(f"unknown group {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    torch.set_num_threads(1)
    console = Console(highlight=False)
    console.width = max(console.width, 132)  # a table that is cut says nothing
    table = Table(title="Speed, one thread", title_justify="left", box=None, padding=(0, 2), header_style="bold")
    for title, justify in (("what", "left"), ("measured", "right"), ("goal", "right"), ("", "left"), ("", "left")):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    rows: list[Row] = []
    with console.status("measuring ...") as status:
        for group in GROUPS:
            if given.groups and group.__name__ not in given.groups:
                continue
            for row in group():
                rows.append(row)
                status.update(f"measured: {row.name}")
                verdict = "[green]pass[/]" if row.passed else "[bold red]FAIL[/]"
                sign = "<=" if row.at_most else ">="
                table.add_row(
                    row.name, f"{row.measured:.2f} {row.unit}", f"{sign} {row.limit:g} {row.unit}", verdict, row.detail
                )
    console.print(table)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) | {"passed": row.passed} for row in rows], indent=1) + "\n")
    failed = sum(not row.passed for row in rows)
    console.print(f"{len(rows) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
