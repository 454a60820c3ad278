"""Table and picture of docs/evidence/planner.md, from the results."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- made by python -m benchmarks.planner: begin -->", "<!-- end -->"
#: Accuracy that is no further above the rate of the most frequent class has learned nothing.
_AT_THE_MAJORITY = 0.01
GOAL_MEDIAN, GOAL_WORST = 1.5, 3.0

Found = dict[str, Any]


def loss(found: Found) -> float:
    """Return the points of accuracy that planning loses; negative where it wins."""
    return float(100 * (found["best"]["accuracy"] - found["planned"]["accuracy"]))


def line(found: Found) -> str:
    """Format one result for a log."""
    best, ours = found["best"], found["planned"]
    return (
        f"{found['table']:<32} epsilon {found['epsilon']:g}: best {best['accuracy']:.3f}, planned "
        f"{ours['accuracy']:.3f}, lost {loss(found):.2f}, {found['seconds']:.0f} s"
    )


def summary(compared: Sequence[Found]) -> str:
    """Return median and worst, for each epsilon and for all."""
    lines = []
    for epsilon in (*sorted({found["epsilon"] for found in compared}, reverse=True), None):
        losses = [loss(found) for found in compared if epsilon in (None, found["epsilon"])]
        if losses:
            title = "all" if epsilon is None else f"epsilon {epsilon:g}"
            lines.append(
                f"{title}: {len(losses)} comparisons, lost {statistics.median(losses):.2f} points on the median, "
                f"{max(losses):.2f} at the worst, {min(losses):.2f} at the best"
            )
    return "\n".join(lines)


def write(records: dict[str, list[Found]], docs: Path) -> None:
    """Write table and picture, if there are results."""
    if not records["compared"]:
        return
    path = docs / "evidence" / "planner.md"
    text = path.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n\n{_tables(records)}\n{END}{after}")
    _picture(records["compared"], docs / "images" / "planner.png")


def studio_records(compared: Sequence[Found]) -> str:
    """Return the text of the records from which `pbmvfl studio` estimates accuracy."""
    names = ("rows", "columns", "classes", "epsilon", "majority")
    kept = ({**{name: each[name] for name in names}, "accuracy": each["planned"]["accuracy"]} for each in compared)
    return "[\n" + ",\n".join(f" {json.dumps(each)}" for each in kept) + "\n]\n"


def _tables(records: dict[str, list[Found]]) -> str:
    lines = [
        "| table (rows x parties x columns, classes) | most frequent | epsilon | best of grid | planned | lost, points "
        "| balanced: best, planned | planned on |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for found in records["compared"]:
        best, ours = found["best"], found["planned"]
        lines.append(
            f"| {found['table']} | {_points(found['majority'])} | {found['epsilon']:g} "
            f"| {_points(best['accuracy'])} ± {_points(best['deviation'])} "
            f"| {_points(ours['accuracy'])} ± {_points(ours['deviation'])} | {loss(found):+.1f} "
            f"| {_points(best['balanced'])}, {_points(ours['balanced'])} | {_chosen(found['planned_settings'])} |"
        )
    lines += ["", *(f"- {each}" for each in summary(records["compared"]).splitlines()), _verdict(records["compared"])]
    lines += ["", *_notes(records)]
    return "\n".join(lines) + "\n"


def _chosen(settings: dict[str, Any]) -> str:
    fused = settings["num_fusion_samples"]
    return settings["map"] + (f"; {fused:,} fusion rows" if fused else "")


def _verdict(compared: Sequence[Found]) -> str:
    """Return the goals, and the results that miss them."""
    goals = f"- goals: at most {GOAL_MEDIAN:g} points on the median and {GOAL_WORST:g} at the worst"
    missed = [
        f"{each['table']} at epsilon {each['epsilon']:g} ({loss(each):.1f})"
        for each in compared
        if loss(each) > GOAL_WORST
    ]
    said = f"{goals}; the second is missed by {', '.join(missed)}" if missed else f"{goals}: met"
    return textwrap.fill(said, 120, subsequent_indent="  ", break_on_hyphens=False)


def _points(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def note_counts(records: dict[str, list[Found]]) -> dict[tuple[str, str], int]:
    """Count the notes before training, by what came of it."""
    counts: dict[tuple[str, str], int] = {}
    for found in (*records["compared"], *records["alone"]):
        above = found["planned"]["accuracy"] - found["majority"]
        # Where hardly any row has another class, accuracy says nothing, so classes are compared one by one.
        learned = above > _AT_THE_MAJORITY or found["planned"]["balanced"] > 1 / found["classes"] + 2 * _AT_THE_MAJORITY
        said = "silent" if found["note"] is None else "nothing" if "leaves nothing" in found["note"] else "little"
        key = ("learned" if learned else "nothing learned", said)
        counts[key] = counts.get(key, 0) + 1
    return counts


def _notes(records: dict[str, list[Found]]) -> list[str]:
    counts = note_counts(records)
    lines = ["| said before training | training learned | training ended within a point of the most frequent class |"]
    lines.append("|---|---|---|")
    for said, words in (("silent", "nothing"), ("little", '"leaves little"'), ("nothing", '"leaves nothing"')):
        lines.append(f"| {words} | {counts.get(('learned', said), 0)} | {counts.get(('nothing learned', said), 0)} |")
    return lines


def _picture(compared: Sequence[Found], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    epsilons = sorted({found["epsilon"] for found in compared}, reverse=True)
    tables = list(dict.fromkeys(found["table"] for found in compared))
    figure, axes = pyplot.subplots(
        1, len(epsilons), figsize=(5.2 * len(epsilons), 0.3 * len(tables) + 1.6), sharey=True, squeeze=False
    )
    for axis, epsilon in zip(axes[0], epsilons, strict=True):
        for height, name in enumerate(reversed(tables)):
            found = next((f for f in compared if (f["table"], f["epsilon"]) == (name, epsilon)), None)
            if found is None:
                continue
            ours, best = found["planned"]["accuracy"], found["best"]["accuracy"]
            axis.plot([ours, best], [height, height], color="#9aa5b1", linewidth=2, zorder=1)
            axis.scatter([found["majority"]], [height], marker="|", s=70, color="#9aa5b1", zorder=2)
            axis.scatter([best], [height], s=42, facecolor="white", edgecolor="#b4531a", linewidth=1.6, zorder=3)
            axis.scatter([ours], [height], s=22, color="#1f5fa8", zorder=4)
        axis.set_title(f"epsilon {epsilon:g}", fontsize=11, loc="left")
        axis.set_xlabel("test accuracy, mean of 5 draws of noise", fontsize=9)
        axis.grid(axis="x", color="#e3e7eb", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8, length=0)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        axis.set_xlim(0.05, 1.02)
    axes[0][0].set_yticks(range(len(tables)), list(reversed(tables)))
    marks = [
        Line2D([], [], marker="o", color="none", markerfacecolor="#1f5fa8", markeredgecolor="none"),
        Line2D([], [], marker="o", color="none", markerfacecolor="white", markeredgecolor="#b4531a"),
        Line2D([], [], marker="|", color="none", markeredgecolor="#9aa5b1", markersize=9),
    ]
    words = ["planned from sizes alone", "best of the grid, chosen on hold-outs", "most frequent class"]
    figure.legend(marks, words, loc="lower center", ncols=3, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.045, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
