"""docs/images/accuracy.png, for the README's first screen: `python -m benchmarks.utility.first_screen`.

Drawn from records alone: benchmarks/results/utility.jsonl (all methods, exact sums of test rows) and strict.jsonl
(predictions that were released).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

RESULTS = Path(__file__).parents[1] / "results"
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "accuracy.png"
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
#: (name in the records, words, colour, mark, width): few enough to be read at a glance; utility.md has all.
LINES = (
    ("ours", "ours, strict (exact sums at test)", "#0072B2", "o", 2.6),
    ("central", "DP-SGD on pooled columns (whole row)", "#009E73", "s", 1.5),
    ("paper", "PBM-VFL, paper's epsilon (not a proof)", "#D55E00", "^", 1.5),
    ("local_dp", "local DP, test rows too", "#8c8c8c", "v", 1.5),
)


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def compared(found: list[dict[str, Any]], dataset: str, method: str) -> dict[float | None, float]:
    """Return the mean accuracy over seeds, by epsilon; None is no privacy."""
    rows = [row for row in found if (row.get("dataset"), row.get("method")) == (dataset, method) and "accuracy" in row]
    return {
        epsilon: float(np.mean([row["accuracy"] for row in rows if row["epsilon"] == epsilon]))
        for epsilon in dict.fromkeys(row["epsilon"] for row in rows)
    }


def released(found: list[dict[str, Any]], dataset: str) -> dict[float, float]:
    """Return the mean accuracy of released predictions over seeds, by a prediction's epsilon; training had 8."""
    by_epsilon: dict[float, list[float]] = {}
    for row in found:
        options = row["options"]
        if row["dataset"] == dataset and options[:3] == ["--epsilon", "8", "--prediction-epsilon"]:
            by_epsilon.setdefault(float(options[3]), []).append(row["metrics"]["test_accuracy"])
    return {epsilon: float(np.mean(values)) for epsilon, values in sorted(by_epsilon.items())}


def draw(path: Path) -> None:
    """Draw the picture. Its ground is white, so that it can be read on a dark page too."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    every, strict = records("utility.jsonl"), records("strict.jsonl")
    figure, axes = plt.subplots(1, 2, figsize=(10.6, 3.9), sharey=True)
    for axis, dataset in zip(axes, ("phishing", "activity"), strict=True):
        axis.axhline(compared(every, dataset, "open_pooled")[None], color="black", linestyle="--", linewidth=1,
                     label="no privacy, columns pooled")  # fmt: skip
        for method, words, colour, mark, width in LINES:
            means = compared(every, dataset, method)
            axis.plot(EPSILONS, [means[epsilon] for epsilon in EPSILONS], color=colour, marker=mark, markersize=6,
                      linewidth=width, label=words, zorder=4 if method == "ours" else 3)  # fmt: skip
        asked = released(strict, dataset)
        axis.plot(list(asked), list(asked.values()), color="#0072B2", marker="o", markerfacecolor="white", markersize=7,
                  linestyle=":", linewidth=1.8, zorder=5,
                  label="ours, each prediction released at\nthis epsilon (trained at 8)")  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axis.minorticks_off()
        axis.set_ylim(0.1, 1)
        axis.grid(visible=True, axis="y", color="#e3e3e3", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.set_title(f"{dataset.capitalize()}, 5 parties", loc="left", fontweight="bold")
        axis.set_xlabel("epsilon of a cell, delta $10^{-5}$")
    axes[0].set_ylabel("accuracy on test rows")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center left", bbox_to_anchor=(0.655, 0.53), frameon=False, fontsize=9.5)
    figure.subplots_adjust(left=0.065, right=0.65, top=0.91, bottom=0.14, wspace=0.1)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    draw(PICTURE)
