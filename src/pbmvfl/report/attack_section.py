"""Section of a page with what `pbmvfl attack` got of a run: numbers alone, no row and no picture of one."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from pbmvfl._files import checked_object, read_object
from pbmvfl.errors import RunFolderError
from pbmvfl.report.charts import WIDTH
from pbmvfl.report.markup import Markup, el, joined

#: File of the results, in a run folder or in the folder of --out.
ATTACK_FILE = "attack.json"
_LEFT, _EACH = 8, 44


@dataclass(frozen=True, kw_only=True)
class ShownScore:
    """One score, as far as a page shows it."""

    attack: str
    attacker: str
    setting: str
    measure: str
    value: float
    baseline: float
    bound: float | None
    bound_words: str
    is_alarm: bool


def read_scores(path: Path) -> tuple[ShownScore, ...]:
    """Return the scores of an attack's results; none if there is no such file.

    Raises:
        RunFolderError: The file is damaged.
    """
    if not path.is_file():
        return ()
    written = read_object(path, {"scores": list}, RunFolderError)
    number = int | float
    kinds = dict.fromkeys(("attack", "attacker", "setting", "measure", "bound_words"), str)
    types = {**kinds, "value": number, "baseline": number, "bound": number | None, "is_alarm": bool}
    found = []
    for score in written["scores"]:
        checked_object(score, types, path, RunFolderError)
        found.append(ShownScore(**{each.name: score[each.name] for each in fields(ShownScore)}))
    return tuple(found)


def attack_section(scores: tuple[ShownScore, ...]) -> Markup:
    """Return the words, the bars and the table."""
    alarm = [score for score in scores if score.is_alarm]
    return joined(
        el(
            "p",
            "Attacks on this run's plan and rows with made-up noise, as `pbmvfl attack` wrote them: what the attack "
            "gets, what the same attacker gets who saw nothing, and what the account permits. They are computed from "
            "the rows themselves, outside of the epsilon.",
        ),
        el("p", "A score is surely above its bound: the program does not do what its account says.", class_="warn")
        if alarm
        else None,
        _bars([score for score in scores if score.measure == "share right"]),
        _table(scores),
    )


def _bars(scores: list[ShownScore]) -> Markup:
    """Draw right guesses of 100: the baseline, the attack, and the bound as a line."""
    parts = []
    scale = (WIDTH - 2 * _LEFT) / 100
    for i, score in enumerate(scores):
        top = i * _EACH
        words = f"{score.attack} ({score.attacker}), {score.setting}: {100 * score.value:.0f}"
        parts.append(el("text", words, class_="name", x=_LEFT, y=top + 13))
        for place, (colour, share) in enumerate((("c5", score.baseline), ("c1", score.value))):
            width = round(100 * scale * share, 2)
            parts.append(el("rect", class_=f"bar {colour}", x=_LEFT, y=top + 18 + 9 * place, width=width, height=8))
        if score.bound is not None:
            at = round(_LEFT + 100 * scale * score.bound, 2)
            parts.append(el("line", class_="level", x1=at, x2=at, y1=top + 15, y2=top + 38))
    height = _EACH * len(scores) + 4
    title = "Right guesses of 100: seeing nothing, the attack, and the line of what the account permits"
    chart = el("svg", *parts, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=title)
    return el("figure", el("figcaption", title), chart, class_="chart")


def _table(scores: tuple[ShownScore, ...]) -> Markup:
    titles = ("setting", "attack", "attacker", "measure", "sees nothing", "attack", "account permits")
    kinds = (None, None, None, None, "number", "number", None)
    head = el("tr", *(el("th", title, class_=kind) for title, kind in zip(titles, kinds, strict=True)))
    rows = []
    for score in scores:
        permits = score.bound_words if score.bound is None else f"{score.bound:.3f} ({score.bound_words})"
        texts = (score.setting, score.attack, score.attacker, score.measure)
        line = (*texts, f"{score.baseline:.3f}", f"{score.value:.3f}", permits)
        rows.append(el("tr", *(el("td", text, class_=kind) for text, kind in zip(line, kinds, strict=True))))
    return el("div", el("table", el("thead", head), el("tbody", *rows)), class_="scroll")
