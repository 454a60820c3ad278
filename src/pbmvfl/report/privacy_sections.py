"""Privacy sections of a page: the epsilon table in plain words, and epsilon over rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pbmvfl._text import counted
from pbmvfl.privacy.accounting import NOT_A_PROOF, EpsilonBound
from pbmvfl.privacy.table import (
    PrivacyTable,
    attack_in_words,
    format_advantage,
    format_epsilon,
    label_in_words,
    privacy_notes,
)
from pbmvfl.privacy.units import Accounting, Adversary, Unit
from pbmvfl.report.charts import Level, Series, line_chart
from pbmvfl.report.epsilon_history import EpsilonPath, LimitPath
from pbmvfl.report.facts import RunFacts
from pbmvfl.report.markup import Child, Markup, el, items, joined, sentence

_UNITS = {
    Unit.CELL: "one party's values of one row",
    Unit.RECORD: "a whole row, at every party",
    Unit.PARTY: "all values of one party, in every row",
    Unit.LABEL: "the label of one training row",
}
#: Above this number, parties are counted instead of named.
_MOST_NAMES = 4
_ROWS = {"": "any row", "train": "rows that were trained on", "test": "rows that were predicted"}


def privacy_section(facts: RunFacts) -> Markup:
    run = facts.result.training_run
    parts: list[Child] = []
    for rows, table in facts.tables:
        if len(facts.tables) > 1:
            parts.append(el("h3", _ROWS[rows].capitalize()))
        if not run.has_joint_rounds:  # the paper counts otherwise only in joint rounds
            table = PrivacyTable(tuple(bound for bound in table.bounds if bound.accounting is Accounting.STRICT))
        parts.append(_epsilon_table(table))
        parts.append(el("p", sentence(attack_in_words(table.bound(Unit.CELL, Accounting.STRICT)))))
        if table.label is not None:
            parts.append(el("p", sentence(label_in_words(table.label))))
    if facts.both is not None:
        parts.append(
            el(
                "p",
                f"A row that was trained on and is also predicted: epsilon {format_epsilon(facts.both)} "
                "(cell, strict, server).",
            )
        )
    if not run.releases and not facts.result.noise_is_seeded:
        told = any(part.told_rows for part in run.activities)
        words = "No row was released in this run by itself, only every party's noisy counts of its votes by class."
        if not told:
            words = (
                "Nothing about any row was released in this run: a party's 0 covers neither predictions nor weights."
            )
        parts.append(el("p", words))
    strict = facts.tables[0][1].bound(Unit.CELL, Accounting.STRICT)
    parts += [
        el("h3", "How to read it"),
        items(_reading(facts)),
        el("h3", "What the numbers assume"),
        items(condition[0].upper() + condition[1:] + "." for condition in strict.conditions),
    ]
    if notes := privacy_notes(run, num_samples=facts.result.plan.num_samples, delta=facts.delta):
        parts += [el("h3", "Mind"), items(sentence(note) for note in notes)]
    return joined(*parts)


def _reading(facts: RunFacts) -> Iterator[str]:
    yield (
        "Epsilon bounds how much more likely any output becomes if values are others: at most exp(epsilon) times, but "
        f"for a probability of delta = {facts.delta:g}. The advantage (adv.) is that of the best attack: 0 is blind "
        "guessing, 1 is certainty."
    )
    yield "; ".join(f"{unit}: {words}" for unit, words in _UNITS.items()) + "."
    others = counted(facts.result.plan.num_parties - 1, "party", "parties")
    yield (
        f"From whom: the server, which sees every message; one curious party; the server with {others}, which is "
        "everybody but the one whose values are protected."
    )
    yield (
        "Counting strictly: everything that can depend on the values. It is a theorem under the assumptions below."
        + (f" As the paper counts: {NOT_A_PROOF}." if _has_paper(facts) else "")
    )


def _has_paper(facts: RunFacts) -> bool:
    return facts.result.training_run.has_joint_rounds


def _epsilon_table(table: PrivacyTable) -> Markup:
    adversaries = list(dict.fromkeys(bound.adversary for bound in table.of_columns))
    kinds = list(dict.fromkeys((bound.unit, bound.accounting) for bound in table.of_columns))
    head = [el("th", "protects", scope="col"), el("th", "counting", scope="col")]
    head += [el("th", f"from {adversary}", class_="number", scope="col") for adversary in adversaries]
    body = []
    for unit, accounting in kinds:
        starred = accounting is Accounting.PAPER and unit is not Unit.PARTY
        cells = [_epsilon_cell(table.bound(unit, accounting, adversary)) for adversary in adversaries]
        counting = joined(str(accounting), el("small", ", not a proof", class_="muted") if starred else None)
        body.append(el("tr", el("th", str(unit), scope="row"), el("td", counting), *cells))
    return el("div", el("table", el("thead", el("tr", *head)), el("tbody", *body)), class_="scroll")


def _epsilon_cell(bound: EpsilonBound) -> Markup:
    loud = bound.unit is Unit.CELL and bound.accounting is Accounting.STRICT and bound.adversary == Adversary()
    return el(
        "td",
        format_epsilon(bound.epsilon),
        el("small", f"adv. {format_advantage(bound.advantage_upper_bound)}"),
        class_="number loud" if loud else "number",
        data_epsilon=bound.epsilon if math.isfinite(bound.epsilon) else "inf",
        data_unit=str(bound.unit),
        data_accounting=str(bound.accounting),
        data_adversary=str(bound.adversary),
    )


# --- Epsilon over rounds ---


def rounds_section(facts: RunFacts) -> Markup:
    charts = [*_limit_charts(facts), *_account_charts(facts)]
    return joined(
        el("p", _about_ledgers(facts)),
        el("div", *charts, class_="charts")
        if charts
        else el("p", "There is nothing to draw: nothing was sent, or no epsilon holds."),
        el("p", "Between two marks a line stands at the height of the later one.", class_="muted small")
        if charts
        else None,
    )


def _about_ledgers(facts: RunFacts) -> str:
    account = "By the account: what the table above says, as it grew. It is about this run alone."
    if not facts.has_ledgers:
        return f"This run has no ledgers, so nobody added it to other runs of the same rows. {account}"
    if not facts.reads_ledgers:
        return f"This run has ledgers, and none of them can be read from here. {account}"
    if not facts.limits:
        return f"This run has ledgers, and their owners set no limit for {facts.data}. {account}"
    later = " Some rows were used again since." if any(_grew(path) for path in facts.limits) else ""
    return (
        "By the books: what their owners count against their limits, over all runs of the same rows before this one. "
        f"That number may be larger, because it holds whatever is run next.{later} {account}"
    )


def _grew(path: LimitPath) -> bool:
    return bool(path.spent_now > path.points[-1][1] * (1 + 1e-9))


def _limit_charts(facts: RunFacts) -> Iterator[Markup]:
    for path in facts.limits:
        limit = path.limit
        against = Adversary(colluding_parties=limit.colluding_parties)
        name = f"{limit.unit}, {limit.accounting}, {against}"
        last = format_epsilon(path.points[-1][1])
        if _grew(path):
            last += f", by now {format_epsilon(path.spent_now)}"
        yield line_chart(
            _whose(path.books),
            [Series(name=name, points=path.points, colour=0, steps=True, last=last)],
            x_title="rounds sent",
            y_title=f"epsilon, delta {limit.delta:g}",
            levels=[Level(name="limit", value=limit.epsilon, shown=f"{limit.epsilon:g}")],
            from_zero=True,
        )


def _whose(books: tuple[str, ...]) -> str:
    if len(books) > _MOST_NAMES:
        return f"By the books of {len(books)} parties, which are alike"
    return f"By the book{'' if len(books) == 1 else 's'} of {', '.join(books)}"


def _account_charts(facts: RunFacts) -> Iterator[Markup]:
    for accounting in (Accounting.STRICT, Accounting.PAPER):
        for rows in dict.fromkeys(path.rows for path in facts.paths):
            paths = [path for path in facts.paths if (path.accounting, path.rows) == (accounting, rows)]
            paths = [path for path in paths if _finite(path)]
            if paths:
                whose = f", {_ROWS[rows]}" if rows else ""
                unproved = ", not a proof" if accounting is Accounting.PAPER else ""
                yield line_chart(
                    f"By the account, {accounting}{unproved}{whose}",
                    [_path_series(path, i) for i, path in enumerate(paths)],
                    x_title="rounds sent",
                    y_title=f"epsilon, delta {facts.delta:g}",
                    from_zero=True,
                )


def _finite(path: EpsilonPath) -> bool:
    """Return whether a path can be drawn: it has rounds, and every epsilon is finite."""
    return len(path.points) > 1 and all(math.isfinite(epsilon) for _, epsilon in path.points)


def _path_series(path: EpsilonPath, index: int) -> Series:
    last = format_epsilon(path.points[-1][1])
    return Series(
        name=str(path.unit),
        points=path.points,
        colour=index,
        steps=True,
        dashed=path.unit is Unit.RECORD,
        last=last,
    )
