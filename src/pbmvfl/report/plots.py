"""The picture of one run: loss and accuracy by epoch, epsilon by round."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pbmvfl.plan.groups import Training
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.report.epsilon_history import EpsilonPath, epsilon_paths
from pbmvfl.report.style import COLOURS, new_figure, save_figure

if TYPE_CHECKING:
    from pbmvfl.federation.results import Result

#: Points of a path of epsilon: a picture at the end of every training must not be waited for.
_POINTS = 12
_SCORES = (
    ("train_accuracy", "train accuracy", COLOURS[0], "-"),
    ("test_accuracy", "test accuracy", COLOURS[1], "-"),
    ("train_auprc", "train AUPRC", COLOURS[0], ":"),
    ("test_auprc", "test AUPRC", COLOURS[1], ":"),
)


def draw_curves(result: Result, path: Path, *, delta: float = 1e-5) -> None:
    """Loss, where rounds have one; accuracy (and AUPRC for two classes); epsilon. Last values are in the legends."""
    losses = [(line.epoch, line.train_loss) for line in result.history if line.train_loss is not None]
    paths = [path for path in _paths(result, delta) if 0 < path.points[-1][1] < math.inf]
    panels = bool(losses) + 1 + bool(paths)
    figure, axes = new_figure(panels, width=4.6 * panels if panels > 1 else 7.0)
    remaining = list(axes)
    if losses:
        _draw_loss(remaining.pop(0), result, losses)
    _draw_scores(remaining.pop(0), result)
    if paths:
        _draw_epsilon(remaining.pop(0), paths, delta)
    figure.suptitle(_title(result), fontsize=11)
    save_figure(figure, path)


def _paths(result: Result, delta: float) -> tuple[EpsilonPath, ...]:
    return epsilon_paths(result, delta=delta, units=(Unit.CELL,), points=_POINTS)


def _title(result: Result) -> str:
    plan = result.plan
    trained = f"{plan.release.describe()}, P={plan.embedding_dim}"
    if plan.training is Training.LOCAL:
        trained = (
            f"parties alone, noise {plan.noise_multiplier:.4g} a step" if plan.noise_multiplier else "parties alone"
        )
    return f"{plan.num_parties} parties, {plan.num_samples:,} rows, {trained}"


def _draw_loss(axis: Any, result: Result, losses: list[tuple[float, float]]) -> None:
    noisy = ", at noisy sums" if result.plan.release.variance_upper_bound else ""
    marker = "o" if len(losses) < 3 else None
    axis.plot([x for x, _ in losses], [y for _, y in losses], color=COLOURS[0], marker=marker)
    axis.set(xlabel="epoch", ylabel=f"training loss{noisy}", title="Loss")
    _fit_epochs(axis, result)


def _draw_scores(axis: Any, result: Result) -> None:
    for name, label, colour, line_style in _SCORES:
        points = [(line.epoch, line.metrics[name]) for line in result.history if name in line.metrics]
        if points:
            x, y = zip(*points, strict=True)
            marker = "o" if len(points) < 3 else None
            axis.plot(x, y, line_style, color=colour, marker=marker, label=f"{label} {y[-1]:.3f}")
    exact = result.plan.evaluation == "simulator"
    title = "By exact sums (simulator)" if exact else "By released noisy sums" if axis.lines else "Nothing was measured"
    axis.set(xlabel="epoch", ylim=(0, 1.04), title=title)
    if axis.lines:  # none, if the first round was refused and nothing was evaluated
        axis.legend(loc="lower right", frameon=False)
    _fit_epochs(axis, result)


def _draw_epsilon(axis: Any, paths: list[EpsilonPath], delta: float) -> None:
    """A line stands at the height of the later point: it is never below what is not computed."""
    several = len({path.accounting for path in paths}) > 1
    for index, path in enumerate(paths):
        rounds, epsilons = zip(*path.points, strict=True)
        rows = {"": "", "train": ", trained on", "test": ", predicted"}[path.rows]
        unproved = " (not a proof)" if path.accounting is Accounting.PAPER else ""
        label = f"{path.accounting}{unproved}{rows} {format_epsilon(epsilons[-1])}"
        dashes = "--" if path.accounting is Accounting.PAPER else "-"
        axis.step(rounds, epsilons, dashes, where="pre", color=COLOURS[index % len(COLOURS)], label=label)
    if several:  # the two counts can be thousands of times apart
        least = min(epsilon for path in paths for _, epsilon in path.points if epsilon > 0)
        axis.set_yscale("log")
        axis.set_ylim(bottom=least / 4)
    else:
        axis.set_ylim(bottom=0)
    axis.set(xlabel="round", ylabel=f"epsilon at delta {delta:g}", title="Epsilon of a cell, from the server")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.margins(x=0.03)
    axis.legend(loc="best", frameon=False)


def _fit_epochs(axis: Any, result: Result) -> None:
    """From 0 to the last epoch, with room for a mark that stands there."""
    last = max((line.epoch for line in result.history), default=0)
    axis.set_xlim((-0.03 * last, 1.03 * last) if last else (-0.5, 0.5))
    axis.xaxis.get_major_locator().set_params(integer=True)
