"""Accuracy against epsilon and against advantage, one row of panels for every data set."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.utility.methods import METHODS
from benchmarks.utility.records import Records, Summary, summary

#: Okabe and Ito's colours, which people with any colour vision tell apart, and a mark of its own for each.
_STYLES = {
    "ours": ("#0072B2", "o"),
    "ours_record": ("#56B4E9", "P"),
    "central": ("#009E73", "s"),
    "paper": ("#D55E00", "^"),
    "local_dp_exact": ("#CC79A7", "D"),
    "local_dp": ("#E69F00", "v"),
    "open_pooled": ("#000000", ""),
    "open_local": ("#777777", ""),
}
_TICKS = (0.2, 0.4, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97)
_LABEL_GAP = 0.062


def draw(config: dict[str, Any], records: Records, path: Path) -> None:
    """Draw the picture to a file."""
    datasets = config["datasets"]
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(
        len(datasets), 2, figsize=(11, 4.1 * len(datasets)), sharey="row", squeeze=False, layout="none"
    )
    figure.subplots_adjust(left=0.06, right=0.985, top=0.95, bottom=0.065, wspace=0.7, hspace=0.3)
    for (left, right), dataset in zip(axes, datasets, strict=True):
        _panel(left, right, config, records, dataset)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(left: Any, right: Any, config: dict[str, Any], records: Records, dataset: str) -> None:
    ends: list[tuple[float, str, str]] = []
    lows: list[float] = []
    tops: list[float] = []
    for name in config["methods"]:
        colour, mark = _STYLES[name]
        method = METHODS[name]
        epsilons = config["epsilons"] if method.is_private else [None]
        points = [
            (epsilon, found, summary(records, dataset, name, epsilon, "advantage"))
            for epsilon in sorted(epsilons, key=lambda value: value or 0)
            if (found := summary(records, dataset, name, epsilon, "accuracy")) is not None
        ]
        if not points:
            continue
        lows.append(min(found.mean for _, found, _ in points))
        tops.append(max(found.mean for _, found, _ in points))
        ends.append((_height(points[-1][1].mean), method.label, colour))
        if not method.is_private:
            for axis in (left, right):
                axis.axhline(_height(points[0][1].mean), color=colour, linestyle="--", linewidth=1, zorder=1)
            continue
        _line(left, [epsilon for epsilon, _, _ in points], [found for _, found, _ in points], colour, mark, name)
        advantages = [found.mean for _, _, found in points if found is not None]
        _line(right, advantages, [found for _, found, _ in points], colour, mark, name)
    bottom, top = _height(max(0.05, min(lows) - 0.04)), _height(max(tops) + 0.15 * (1 - max(tops)))
    left.set_ylim(bottom, top)
    ticks = [tick for tick in _TICKS if bottom <= _height(tick) <= top]
    left.set_yticks([_height(tick) for tick in ticks], [f"{tick:g}".removeprefix("0") for tick in ticks])
    right.tick_params(labelleft=True)
    left.set_xscale("log", base=2)
    left.set_xticks(config["epsilons"], [f"{epsilon:g}" for epsilon in config["epsilons"]])
    left.minorticks_off()
    left.set_xlabel(f"epsilon, at delta $10^{{{math.log10(config['delta']):.0f}}}$")
    right.set_xlabel("advantage of the best attack")
    left.set_ylabel("accuracy on test rows")
    left.set_title(f"{dataset.capitalize()}, {config['num_parties']} parties", loc="left", fontweight="bold")
    for axis in (left, right):
        axis.grid(visible=True, axis="y", color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
    right.set_xlim(0, 1)
    _labels(left, ends, bottom, top)


def _line(axis: Any, across: list[float], found: list[Summary], colour: str, mark: str, name: str) -> None:
    x = np.asarray(across)
    means, spreads = (np.asarray([getattr(each, which) for each in found]) for which in ("mean", "deviation"))
    ours = name == "ours"
    axis.plot(x, _height(means), color=colour, marker=mark, markersize=6 if ours else 5, linewidth=2.4 if ours else 1.5,
              zorder=4 if ours else 3)  # fmt: skip
    axis.vlines(x, _height(means - spreads), _height(np.minimum(means + spreads, 0.999)), color=colour, linewidth=1)


def _height(accuracy: Any) -> Any:
    """Map accuracy so that halving the errors is one step everywhere: small differences at the top stay visible."""
    return -np.log10(1 - np.asarray(accuracy))


def _labels(axis: Any, ends: list[tuple[float, str, str]], bottom: float, top: float) -> None:
    """Write names beside the ends of the lines, moved apart where they would touch."""
    gap = _LABEL_GAP * (top - bottom)
    ends = sorted(ends)
    heights = [end[0] for end in ends]
    for _ in range(200):
        for low in range(len(heights) - 1):
            if (missing := gap - (heights[low + 1] - heights[low])) > 0:
                heights[low] -= missing / 2
                heights[low + 1] += missing / 2
    for height, (end, label, colour) in zip(heights, ends, strict=True):
        axis.annotate(
            label,
            xy=(1.0, end),
            xytext=(1.1, height),
            xycoords=axis.get_yaxis_transform(),
            textcoords=axis.get_yaxis_transform(),
            color=colour,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.7,
                "shrinkA": 1,
                "shrinkB": 2,
                "relpos": (0, 0.5),
            },
        )
