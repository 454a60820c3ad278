"""Figures drawn with matplotlib: the curves of a run, epsilon by budget, and what attacks get."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pbmvfl._text import counted
from pbmvfl.mechanisms.poisson_binomial import SMALLEST_BETA, Trials
from pbmvfl.plan.groups import Algorithm
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.search import PlannedBudget
from pbmvfl.privacy.conversion import usual_delta
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.report.epsilon_history import EpsilonPath, epsilon_paths
from pbmvfl.report.facts import GRID

if TYPE_CHECKING:
    from pbmvfl.attacks.digits import Pictures
    from pbmvfl.attacks.scores import Score
    from pbmvfl.attacks.suite import AttackReport
    from pbmvfl.federation.results import Result


# --- Common style: readable at page width, safe for colour-blind readers ---


#: Okabe and Ito's palette, ordered so that neighbours differ clearly; black is for runs without privacy.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

_STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "figure.dpi": 150,
    "font.size": 10,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.bbox": "tight",
}


def new_figure(columns: int = 1, *, width: float = 9.0, height: float = 3.6) -> tuple[Any, Any]:
    """Return a figure and its row of axes, drawn without a display."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(1, columns, squeeze=False)
    return figure, axes[0]


def save_figure(figure: Any, path: Any) -> None:
    from matplotlib import rc_context

    with rc_context(_STYLE):
        figure.savefig(path)


# --- Figure of one run: loss and accuracy by epoch, epsilon by round ---


#: Points of a path of epsilon: few, because every training run draws this figure at its end.
_POINTS = 12
_SCORES = (
    ("train_accuracy", "train accuracy", COLOURS[0], "-"),
    ("test_accuracy", "test accuracy", COLOURS[1], "-"),
    ("train_auprc", "train AUPRC", COLOURS[0], ":"),
    ("test_auprc", "test AUPRC", COLOURS[1], ":"),
)


def draw_curves(result: Result, path: Path, *, delta: float | None = None) -> None:
    """Draw loss if rounds have one, accuracy (AUPRC too for two classes) and epsilon; legends have the last values."""
    delta = usual_delta(result.plan.num_samples) if delta is None else delta
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
    return f"{plan.num_parties} parties, {plan.num_samples:,} rows, {plan.algorithm}: {_trained(plan)}"


def _trained(plan: Plan) -> str:
    """Describe what is released in training, or the noise of parties that train alone."""
    if plan.algorithm is Algorithm.PBM:
        return f"{plan.release.describe()}, P={plan.embedding_dim}"
    return f"parties alone, noise {plan.noise_multiplier:.4g} a step" if plan.noise_multiplier else "parties alone"


def _draw_loss(axis: Any, result: Result, losses: list[tuple[float, float]]) -> None:
    marker = "o" if len(losses) < 3 else None
    axis.plot([x for x, _ in losses], [y for _, y in losses], color=COLOURS[0], marker=marker)
    axis.set(xlabel="epoch", ylabel=f"training loss, by {result.plan.release.reading}", title="Loss")
    _fit_epochs(axis, result)


def _draw_scores(axis: Any, result: Result) -> None:
    for name, label, colour, line_style in _SCORES:
        points = [(line.epoch, line.metrics[name]) for line in result.history if name in line.metrics]
        if points:
            x, y = zip(*points, strict=True)
            marker = "o" if len(points) < 3 else None
            axis.plot(x, y, line_style, color=colour, marker=marker, label=f"{label} {y[-1]:.3f}")
    exact = result.plan.evaluation == "simulator"
    last = ", at last simulated releases" if exact and result.fusion is not None else ""
    title = f"By exact sums{last} (simulator)" if exact else f"By {result.measured_on}, released"
    title = title if exact or axis.lines else "Nothing was measured"
    axis.set(xlabel="epoch", ylim=(0, 1.04), title=title)
    if axis.lines:  # there are none if the first round was refused and nothing was evaluated
        axis.legend(loc="lower right", frameon=False)
    _fit_epochs(axis, result)


def _draw_epsilon(axis: Any, paths: list[EpsilonPath], delta: float) -> None:
    """Draw epsilon as steps at the later point's value, an upper bound between computed points."""
    several = len({path.accounting for path in paths}) > 1
    for index, path in enumerate(paths):
        rounds, epsilons = zip(*path.points, strict=True)
        rows = {"": "", "train": ", trained on", "test": ", predicted"}[path.rows]
        unproved = " (not a proof)" if path.accounting is Accounting.PAPER else ""
        label = f"{path.accounting}{unproved}{rows} {format_epsilon(epsilons[-1])}"
        dashes = "--" if path.accounting is Accounting.PAPER else "-"
        axis.step(rounds, epsilons, dashes, where="pre", color=COLOURS[index % len(COLOURS)], label=label)
    if several:  # the two counts can differ by a factor of thousands
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
    """Set the x axis from 0 to the last epoch, with a margin for marks at the ends."""
    last = max((line.epoch for line in result.history), default=0)
    axis.set_xlim((-0.03 * last, 1.03 * last) if last else (-0.5, 0.5))
    axis.xaxis.get_major_locator().set_params(integer=True)


# --- Figure of a budget: epsilon against epochs and against num_trials * beta^2 ---


def draw_budget(planned: PlannedBudget, path: Path) -> None:
    """Draw two curves through the chosen plan, with the budget as a line; one curve if the mechanism has no beta."""
    plan, budget = planned.plan, planned.budget
    has_strength = isinstance(plan.release, Trials)
    figure, (left, *rest) = new_figure(2 if has_strength else 1, height=3.8)
    epochs = sorted({1, 2, plan.num_epochs, *np.linspace(1, 6 * plan.num_epochs, 10).astype(int).tolist()})
    left.plot(epochs, [budget.spent_by(plan.replace(num_epochs=e)) for e in epochs], color=COLOURS[0])
    left.plot(
        [plan.num_epochs],
        [planned.epsilon],
        "o",
        color=COLOURS[1],
        label=f"chosen: {counted(plan.num_epochs, 'epoch')}",
    )
    left.set(xlabel="epochs", ylabel=f"epsilon ({budget.unit}, {budget.accounting}, {budget.adversary})")
    for right in rest:
        strengths, epsilons = _by_strength(plan, planned)
        right.plot(strengths, epsilons, color=COLOURS[0])
        chosen = plan.num_trials * plan.beta**2
        right.plot([chosen], [planned.epsilon], "o", color=COLOURS[1], label=f"chosen: noise {planned.noise:.3g}")
        right.set(xlabel="num_trials * beta^2 (noise falls to the right)", xscale="log")
    left.xaxis.get_major_locator().set_params(integer=True)
    for axis, corner in zip((left, *rest), ("lower right", "upper left"), strict=False):
        axis.axhline(
            budget.epsilon, color=COLOURS[6], linestyle="--", linewidth=1.2, label=f"budget {budget.epsilon:g}"
        )
        axis.set_ylim(0, 3 * budget.epsilon)
        axis.legend(loc=corner, frameon=False)
    figure.suptitle(
        f"{plan.num_parties} parties, {plan.algorithm}: {_trained(plan)}, delta={budget.delta:g}", fontsize=11
    )
    save_figure(figure, path)


def _by_strength(plan: Plan, planned: PlannedBudget) -> tuple[list[float], list[float]]:
    betas = sorted({*np.geomspace(SMALLEST_BETA, max(1 / 4, plan.beta), 16).tolist(), plan.beta})
    strengths, epsilons = [], []
    for beta in betas:
        strengths.append(plan.num_trials * beta**2)
        epsilons.append(planned.budget.spent_by(plan.replace(beta=beta)))
    return strengths, epsilons


# --- Attacks: what is shown of digits, right guesses, and rows that are found ---


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
