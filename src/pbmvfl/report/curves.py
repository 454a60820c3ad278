"""The picture of one run: loss and accuracy by epoch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pbmvfl.plan_groups import Training
from pbmvfl.report.style import COLOURS, new_figure, save_figure

if TYPE_CHECKING:
    from pbmvfl.runs.results import Result


def draw_curves(result: Result, path: Path) -> None:
    """Loss, where rounds have one; accuracy (and AUPRC for two classes), with the last values in the legend."""
    losses = [(line.epoch, line.train_loss) for line in result.history if line.train_loss is not None]
    local = result.plan.training is Training.LOCAL
    figure, (*loss_axes, score_axis) = new_figure(1 if local and not losses else 2)
    epochs = [line.epoch for line in result.history]
    marker = "o" if len(epochs) < 3 else None
    for loss_axis in loss_axes:
        loss_axis.plot([x for x, _ in losses], [y for _, y in losses], color=COLOURS[0], marker=marker)
        noisy = "" if not result.plan.release.variance_upper_bound else ", at noisy sums"
        loss_axis.set(xlabel="epoch", ylabel=f"training loss{noisy}", title="Loss")
    names = (
        ("train_accuracy", "train accuracy", COLOURS[0], "-"),
        ("test_accuracy", "test accuracy", COLOURS[1], "-"),
        ("train_auprc", "train AUPRC", COLOURS[0], ":"),
        ("test_auprc", "test AUPRC", COLOURS[1], ":"),
    )
    for name, label, colour, line_style in names:
        points = [(line.epoch, line.metrics[name]) for line in result.history if name in line.metrics]
        if points:
            x, y = zip(*points, strict=True)
            single = "o" if len(points) < 3 else None
            score_axis.plot(x, y, line_style, color=colour, marker=single, label=f"{label} {y[-1]:.3f}", clip_on=False)
    score_axis.set(xlabel="epoch", ylim=(0, 1.02), title=f"Evaluation: {result.plan.evaluation}")
    if score_axis.lines:  # none, if the first round was refused and nothing was evaluated
        score_axis.legend(loc="lower right", frameon=False)
    for axis in (*loss_axes, score_axis):
        axis.set_xlim((0, max(epochs)) if len(epochs) > 1 else (epochs[0] - 0.5, epochs[0] + 0.5))
        axis.xaxis.get_major_locator().set_params(integer=True)
    plan = result.plan
    trained = f"{plan.release.describe()}, P={plan.embedding_dim}"
    if local:
        trained = (
            f"parties alone, noise {plan.noise_multiplier:.4g} a step" if plan.noise_multiplier else "parties alone"
        )
    figure.suptitle(f"{plan.num_parties} parties, {plan.num_samples:,} rows, {trained}", fontsize=11)
    save_figure(figure, path)
