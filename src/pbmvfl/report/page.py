"""HTML page of one run or several: one self-contained file that runs nothing and fetches nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from pbmvfl import __version__
from pbmvfl.errors import RunFolderError
from pbmvfl.privacy.table import format_advantage, format_epsilon
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.report.charts import Dot, Plot, plain, scatter
from pbmvfl.report.facts import RunFacts
from pbmvfl.report.view import Cell, RunView, Table
from pbmvfl.wire.traffic import human_bytes

#: Version of the JSON inside the page.
FORMAT = 2
#: Largest page that is convenient to send.
LARGEST_BYTES = 3_000_000


@cache
def _templates() -> Environment:
    """Return the templates of this package: every value in them is escaped."""
    found = Environment(
        loader=PackageLoader("pbmvfl.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals.update(plain=plain, inf=math.inf)
    return found


def report_page(runs: Sequence[RunFacts]) -> str:
    """Return the whole HTML file."""
    several = len(runs) > 1
    views = [RunView(facts, f"run-{i}-" if several else "") for i, facts in enumerate(runs, 1)]
    page = (
        _templates()
        .get_template("page.html")
        .render(
            title=f"{len(runs)} runs compared" if several else f"{runs[0].data}, {runs[0].date}",
            runs=views,
            compared=(_charts(views), _table(views)) if several else None,
            several_data=len({facts.data for facts in runs}) > 1,
            numbers={"format": FORMAT, "made_by": f"pbmvfl {__version__}", "runs": [facts.to_dict() for facts in runs]},
            version=__version__,
            has_pictures=any(facts.picture for facts in runs),
        )
    )
    if len(page.encode()) > LARGEST_BYTES:
        raise RunFolderError(
            f"a page of {len(runs)} runs would have {len(page.encode()):,} bytes; permitted: {LARGEST_BYTES:,}; give "
            "fewer runs"
        )
    return page


# --- Several runs ---


def _charts(views: Sequence[RunView]) -> list[Plot]:
    measured = [(i, view, view.facts.accuracy) for i, view in enumerate(views, 1) if view.facts.accuracy is not None]
    dots = [
        [Dot(number=i, name=view.facts.name, x=x, y=accuracy, hollow=not view.is_exact) for x in (view.epsilon, moved)]
        for i, view, accuracy in measured
        for moved in (view.result.traffic.total,)
    ]
    charts = []
    if by_epsilon := [dot for dot, _ in dots if dot.x > 0]:
        title = "epsilon of a cell, strict, from the server"
        charts.append(scatter("Accuracy against epsilon", by_epsilon, x_title=title, y_title="accuracy"))
    if by_bytes := [dot for _, dot in dots]:
        title = "bytes of all parties"
        charts.append(scatter("Accuracy against bytes", by_bytes, x_title=title, y_title="accuracy", label=human_bytes))
    return charts


def _table(views: Sequence[RunView]) -> Table:
    rows = []
    for i, view in enumerate(views, 1):
        facts = view.facts
        worst = view.worst
        rows.append(
            (
                Cell(f"{i} {facts.name}", href=f"run-{i}-top"),
                facts.data,
                Cell(format_epsilon(view.epsilon), f"delta {facts.delta:g}"),
                Cell(f"{worst.right} of 100", worst.title.lower()),
                _paper(view),
                Cell(
                    "not measured" if facts.accuracy is None else f"{facts.accuracy:.4f}",
                    f"{view.split}, {'exact' if view.is_exact else 'released'}",
                ),
                "not known" if view.majority is None else f"{view.majority:.4f}",
                human_bytes(facts.result.traffic.total),
                f"{facts.result.traffic.rounds:,}",
            )
        )
    titles = (
        "epsilon",
        "right guesses, at worst",
        "as the paper counts",
        "accuracy",
        "majority rate",
        "bytes",
        "rounds",
    )
    return Table(("run", "data", *titles), rows, 2)


def _paper(view: RunView) -> Cell:
    if not view.run.has_joint_rounds:
        return Cell("the same")
    bound = view.facts.tables[0][1].bound(Unit.CELL, Accounting.PAPER)
    return Cell(format_epsilon(bound.epsilon), f"adv. {format_advantage(bound.advantage_upper_bound)}, not a proof")
