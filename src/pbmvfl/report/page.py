"""HTML page of one run or several: one self-contained file that runs nothing and fetches nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.resources import files

from pbmvfl import __version__
from pbmvfl._text import counted
from pbmvfl.errors import RunFolderError
from pbmvfl.plan.groups import Evaluation
from pbmvfl.privacy.table import format_advantage, format_epsilon
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.report.charts import Dot, scatter
from pbmvfl.report.facts import RunFacts
from pbmvfl.report.markup import Markup, document, el, embedded_json, joined, style
from pbmvfl.report.sections import majority_rate, sections, summary
from pbmvfl.wire.traffic import human_bytes

#: Version of the JSON inside the page.
FORMAT = 1
#: Largest page that is convenient to send.
LARGEST_BYTES = 3_000_000
#: Content security policy: a browser that supports it runs no script and fetches nothing, whatever the page contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def report_page(runs: Sequence[RunFacts]) -> str:
    """Return the whole HTML file."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    head = joined(
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="referrer", content="no-referrer"),
        el("title", f"{title} · pbmvfl"),
        style(files("pbmvfl.report").joinpath("page.css").read_text()),
    )
    several = len(runs) > 1
    articles = [
        _run(facts, prefix=f"run-{i}-" if several else "", is_one_of_many=several) for i, facts in enumerate(runs, 1)
    ]
    numbers = {"format": FORMAT, "made_by": f"pbmvfl {__version__}", "runs": [facts.to_dict() for facts in runs]}
    footer = el(
        "footer",
        f"Made by pbmvfl {__version__} from what the run folder holds. This file runs no script and loads nothing; its "
        "numbers are in it as JSON, in the element ",
        el("code", "pbmvfl-report"),
        ".",
    )
    main = el("main", _comparison(runs) if several else None, *articles, footer)
    page = document("en", head, joined(main, embedded_json("pbmvfl-report", numbers)))
    if len(page.encode()) > LARGEST_BYTES:
        raise RunFolderError(
            f"a page of {len(runs)} runs would have {len(page.encode()):,} bytes; permitted: {LARGEST_BYTES:,}; give "
            "fewer runs"
        )
    return page


def _run(facts: RunFacts, *, prefix: str, is_one_of_many: bool) -> Markup:
    parts = list(sections(facts, prefix))
    links = [el("a", title, href=f"#{anchor}") for anchor, title, _ in parts]
    heading = el("h1", f"Run {facts.name}", id=f"{prefix}top")
    return el(
        "article",
        el("p", "pbmvfl: columns of different organisations, one model, an epsilon", class_="eyebrow")
        if not is_one_of_many
        else None,
        heading,
        summary(facts),
        el("nav", *(joined(link, " ") for link in links), aria_label="Sections"),
        *(el("section", el("h2", title, id=anchor), content) for anchor, title, content in parts),
    )


# --- Several runs ---


def _comparison(runs: Sequence[RunFacts]) -> Markup:
    measured = [(i, facts, facts.accuracy) for i, facts in enumerate(runs, 1) if facts.accuracy is not None]
    dots = [
        (
            Dot(number=i, name=facts.name, x=facts.headline[1], y=accuracy, hollow=not _is_exact(facts)),
            Dot(number=i, name=facts.name, x=facts.result.traffic.total, y=accuracy, hollow=not _is_exact(facts)),
        )
        for i, facts, accuracy in measured
    ]
    by_epsilon = [dot for dot, _ in dots if dot.x > 0]
    charts = []
    if by_epsilon:
        charts.append(
            scatter(
                "Accuracy against epsilon",
                by_epsilon,
                x_title="epsilon of a cell, strict, from the server",
                y_title="accuracy",
            )
        )
    if dots:
        charts.append(
            scatter(
                "Accuracy against bytes",
                [dot for _, dot in dots],
                x_title="bytes of all parties",
                y_title="accuracy",
                label=human_bytes,
            )
        )
    several_data = len({facts.data for facts in runs}) > 1
    return joined(
        el("p", "pbmvfl: columns of different organisations, one model, an epsilon", class_="eyebrow"),
        el("h1", f"{counted(len(runs), 'run')} compared"),
        el(
            "p",
            "Every epsilon here is of a cell, one party's values of one row, in the strict count against the server. "
            "Filled marks: accuracy by exact sums, outside the epsilon. Hollow marks: by releases, inside it.",
        ),
        el("p", "The runs are of different data: their accuracies are not to be compared.", class_="warn")
        if several_data
        else None,
        el("div", *charts, class_="charts"),
        _table(runs),
    )


def _is_exact(facts: RunFacts) -> bool:
    return facts.result.plan.evaluation is Evaluation.SIMULATOR


def _table(runs: Sequence[RunFacts]) -> Markup:
    titles = ("epsilon", "advantage", "as the paper counts", "accuracy", "majority rate", "bytes", "rounds")
    head = [el("th", "run", scope="col"), el("th", "data", scope="col")]
    head += [el("th", title, class_="number", scope="col") for title in titles]
    body = []
    for i, facts in enumerate(runs, 1):
        _, epsilon, advantage = facts.headline
        split = "test" if "test_accuracy" in facts.result.metrics else "train"
        rate = majority_rate(facts, split)
        how = f"{split}, exact" if _is_exact(facts) else f"{split}, released"
        values = (
            joined(format_epsilon(epsilon), el("small", f"delta {facts.delta:g}")),
            format_advantage(advantage),
            _paper(facts),
            joined("not measured" if facts.accuracy is None else f"{facts.accuracy:.4f}", el("small", how)),
            "not known" if rate is None else f"{rate:.4f}",
            human_bytes(facts.result.traffic.total),
            f"{facts.result.traffic.rounds:,}",
        )
        name = joined(f"{i} ", el("a", facts.name, href=f"#run-{i}-top"))
        body.append(
            el(
                "tr",
                el("td", name, class_="name"),
                el("td", facts.data, class_="name"),
                *(el("td", value, class_="number") for value in values),
            )
        )
    return el("div", el("table", el("thead", el("tr", *head)), el("tbody", *body)), class_="scroll")


def _paper(facts: RunFacts) -> str:
    if not facts.result.training_run.has_joint_rounds:
        return "the same"
    epsilon = facts.tables[0][1].bound(Unit.CELL, Accounting.PAPER).epsilon
    return f"{format_epsilon(epsilon)}, not a proof" if math.isfinite(epsilon) else "infinity"
