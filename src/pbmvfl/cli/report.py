"""`pbmvfl report`: an HTML page about one run or several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pbmvfl._files import PRIVATE_FILE, checked_object, read_object, write_atomically
from pbmvfl.cli.options import check_target, say
from pbmvfl.errors import RunFolderError
from pbmvfl.privacy.conversion import check_delta

if TYPE_CHECKING:
    from pbmvfl.report.facts import RunFacts

#: More runs than this are not distinguishable in one chart.
_MOST_RUNS = 30


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders; several are compared.", metavar="RUN", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page. Default: report.html in the run's folder, or here for several runs.", show_default=False
        ),
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Of every epsilon. Default: each run's own.")] = None,
    show_rows: Annotated[
        bool, typer.Option("--show-rows", help="Embed the picture of rows that `pbmvfl attack` drew.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the page's numbers as JSON, write no page.")] = False,
) -> None:
    """Write a page about a run: its verdict, privacy, accuracy, attacks and audit, bytes, and how to do it again.

    One HTML file that loads nothing and runs no script, without rows, values or paths.

    [bold]Try[/]  pbmvfl report runs/phishing-001

    [bold]Compare[/]  pbmvfl report runs/phishing-001 runs/phishing-002 --out compared.html
    """
    if delta is not None:
        check_delta(delta)
    if len(runs) > _MOST_RUNS:
        raise RunFolderError(f"{len(runs)} runs are too many for one page; permitted: up to {_MOST_RUNS}")
    if len({run.resolve() for run in runs}) < len(runs):
        raise RunFolderError("a run is named twice; name each once")
    target = out
    if target is None:
        target = runs[0] / "report.html" if len(runs) == 1 else Path("report.html")
    for run in runs:
        _check(run)
    if not json_:
        check_target("out", target, may_exist=True)
        if target.suffix.lower() not in (".html", ".htm"):
            raise RunFolderError(f"out={str(target)!r} must end in .html; choose another name")
    facts = [_facts(run, delta, show_rows=show_rows) for run in runs]
    if json_:
        print(json.dumps([each.to_dict() for each in facts], indent=2))
        return
    from pbmvfl.report.page import report_page

    page = report_page(facts)
    # In the run folder the page is readable by its owner alone, like the other files; --out means to share it.
    write_atomically(target, page, mode=PRIVATE_FILE if out is None else None)
    say(f"{target} ({len(page.encode()) / 1000:,.0f} kB): open it in a browser")


def _check(run: Path) -> None:
    if not (run / "plan.json").is_file():
        raise RunFolderError(
            f"run={str(run)!r} is not a run folder: it has no plan.json; give a folder that `pbmvfl train` made"
        )
    if not (run / "result.json").is_file():
        raise RunFolderError(
            f"run={str(run)!r} has not ended: it has no result.json; continue it: pbmvfl train --resume {run}"
        )


def _facts(run: Path, delta: float | None, *, show_rows: bool) -> RunFacts:
    from pbmvfl.cli.descriptions import describe_plan
    from pbmvfl.federation.results import Result
    from pbmvfl.federation.run_folder import RunFolder
    from pbmvfl.report.facts import facts_of

    folder = RunFolder.existing(run)
    path = run / "result.json"
    result = Result.read(path)
    checked_object(result.metrics, dict.fromkeys(result.metrics, int | float), path, RunFolderError)
    words: Sequence[tuple[str, str]] = [(title, text) for title, text in describe_plan(result.plan)]
    written = read_object(path, {}, RunFolderError)
    return facts_of(folder, result=result, written=written, plan_words=words, delta=delta, show_rows=show_rows)
