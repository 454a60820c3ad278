"""Pictures of attacks: a grid of what is shown of digits, bars of right guesses, and curves of rows that are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pbmvfl.attacks.pictures import Pictures
from pbmvfl.attacks.scores import Score
from pbmvfl.attacks.suite import AttackReport
from pbmvfl.report.evidence import GRID
from pbmvfl.report.plots import COLOURS, new_figure, save_figure

#: Files of the other pictures.
BARS, FOUND = "attack-bars.png", "attack-found.png"
_MOST_BARS = 24


def draw_attack(report: AttackReport, folder: Path) -> list[Path]:
    """Draw all pictures of a report into a folder and return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    if report.pictures is not None:
        drawn += [_grid(report.pictures, folder / GRID), _found(report.pictures, folder / FOUND)]
    shares = [score for score in report.scores if score.measure == "share right"]
    if shares:
        drawn.append(_bars(shares, folder / BARS))
    return drawn


def _grid(pictures: Pictures, path: Path) -> Path:
    lines, columns = pictures.shown.shape[:2]
    figure, axes = new_figure(1, width=9.0, height=0.62 * lines)
    axis: Any = axes[0]
    axis.remove()
    grid = figure.add_gridspec(lines, columns + 4, wspace=0.05, hspace=0.12)
    for line, title in enumerate(pictures.titles):
        words = figure.add_subplot(grid[line, :4])
        words.axis("off")
        words.text(1.0, 0.5, title, ha="right", va="center", fontsize=8, transform=words.transAxes)
        for column in range(columns):
            place = figure.add_subplot(grid[line, 4 + column])
            place.imshow(pictures.shown[line, column], cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
            place.set_xticks([])
            place.set_yticks([])
    save_figure(figure, path)
    return path


def _found(pictures: Pictures, path: Path) -> Path:
    figure, axes = new_figure(1, width=6.5)
    axis: Any = axes[0]
    for colour, (name, points) in zip(COLOURS, pictures.found.items(), strict=False):
        axis.plot([x for x, _ in points], [100 * y for _, y in points], "o-", color=colour, label=name)
    axis.axhline(100 / pictures.candidates, color="#888888", linestyle=":", label="blind guess")
    axis.set_xscale("log")
    axis.set_ylim(0, 103)
    axis.set_xlabel("releases of the row")
    axis.set_ylabel(f"true row found among {pictures.candidates} (%)")
    axis.legend()
    save_figure(figure, path)
    return path


def _bars(scores: list[Score], path: Path) -> Path:
    chosen = _chosen(scores)
    figure, axes = new_figure(1, width=9.0, height=1.0 + 0.38 * len(chosen))
    axis: Any = axes[0]
    for place, score in enumerate(reversed(chosen)):
        axis.barh(place + 0.2, 100 * score.baseline, 0.34, color="#BBBBBB", label="sees nothing" if not place else None)
        axis.barh(place - 0.2, 100 * score.value, 0.34, color=COLOURS[1], label="attack" if not place else None)
        if score.bound is not None:
            axis.plot([100 * score.bound] * 2, [place - 0.42, place + 0.42], color=COLOURS[0], linewidth=2.2)
    axis.plot([], [], color=COLOURS[0], linewidth=2.2, label="the account permits")
    axis.set_yticks(range(len(chosen)))
    axis.set_yticklabels([f"{score.attack}\n{score.setting}" for score in reversed(chosen)], fontsize=7)
    axis.set_xlim(0, 102)
    axis.set_ylim(-0.6, len(chosen) - 0.4)
    axis.set_xlabel("right guesses of 100")
    figure.legend(loc="outside upper center", ncol=3, fontsize=8)
    save_figure(figure, path)
    return path


def _chosen(scores: list[Score]) -> list[Score]:
    """Return the scores against the server and those of labels by solving, at most a page of them."""
    shown = [score for score in scores if score.attacker == "server" or "solving" in score.attack]
    return shown[:_MOST_BARS]
