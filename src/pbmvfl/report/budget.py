"""The picture of a budget: epsilon against epochs and against num_trials * beta^2."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pbmvfl._text import counted
from pbmvfl.mechanisms.binomial_trials import SMALLEST_BETA, Trials
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.search import PlannedBudget
from pbmvfl.report.style import COLOURS, new_figure, save_figure


def draw_budget(planned: PlannedBudget, path: Path) -> None:
    """Two curves through the chosen plan, with the budget as a line; one where the mechanism has no beta."""
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
    numbers = f"b={plan.num_trials}, beta={plan.beta:.4f}" if has_strength else plan.release.describe()
    figure.suptitle(
        f"{plan.num_parties} parties, {numbers}, P={plan.embedding_dim}, delta={budget.delta:g}", fontsize=11
    )
    save_figure(figure, path)


def _by_strength(plan: Plan, planned: PlannedBudget) -> tuple[list[float], list[float]]:
    betas = sorted({*np.geomspace(SMALLEST_BETA, max(1 / 4, plan.beta), 16).tolist(), plan.beta})
    strengths, epsilons = [], []
    for beta in betas:
        strengths.append(plan.num_trials * beta**2)
        epsilons.append(planned.budget.spent_by(plan.replace(beta=beta)))
    return strengths, epsilons
