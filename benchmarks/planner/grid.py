"""Grid of settings that a user with many trials would try, and the best of them.

The grid is the same for every table: clip norms are shares of the norm that a row of so many numbers may have. The best
is chosen by the mean accuracy on hold-out rows over some draws of noise, first among maps, clip norms and rates, then
among steps, preparation and shares of fusion rows with these; what is reported of it comes from test rows and other
draws, so that the largest of many noisy figures is not taken for skill. Every setting has the same epsilon.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.planner.tables import Table
from benchmarks.planner.trials import PREDICTION_EPSILON, Runner, Trial, plan_of, summary
from pbmvfl.plan.groups import FeatureMap, feature_width
from pbmvfl.plan.learning_notes import learning_notes
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.shapes import PartyShapes, join_shapes, parse_shapes

EPSILONS = (8.0, 1.0)
RATES = (0.1, 0.5, 2.5)
CLIP_SHARES = (0.1, 0.3, 1.0)
#: Knots of every column with a range, and of its products with others.
KNOTS = ((4, 0), (8, 0), (20, 0), (8, 4))
STEPS, FUSION_SHARES = (20, 80), (0.0, 0.1, 0.4)
#: Wider maps take minutes, and are not tried.
WIDEST = 512
CHOOSING_SEEDS, JUDGING_SEEDS = (0, 1), (100, 101, 102, 103, 104)

Choices = dict[str, Any]


def maps(table: Table) -> Iterator[tuple[Choices, float]]:
    """Yield maps of columns, with the largest norm that a row has by each."""
    for features in (FeatureMap.COLUMNS, FeatureMap.PAIRS):
        width = feature_width(features, table.columns, 3)
        if width <= WIDEST:
            yield {"features": str(features)}, math.sqrt(width + 1)
    for knots, products in KNOTS if any(set(kinds) - {"c", "v"} for kinds in table.kinds) else ():
        shapes = tuple(PartyShapes.of_kinds(kinds, knots, products) for kinds in table.kinds)
        if max(each.width for each in shapes) <= WIDEST and (not products or any(each.products for each in shapes)):
            yield {"features": "shapes", "shapes": join_shapes(shapes)}, max(each.norm for each in shapes)


def grid(table: Table) -> list[Choices]:
    """Return at most 54 settings: every map with every clip norm and learning rate."""
    return [
        {**choices, "clip_norm": float(f"{share * norm:.4g}"), "learning_rate": rate}
        for choices, norm in maps(table)
        for share, rate in itertools.product(CLIP_SHARES, RATES)
    ]


def variations(table: Table, best: Choices, epsilon: float) -> list[Choices]:
    """Return the best setting of the grid with other steps, without preparation, and with other fusion rows."""
    found = [{**best, "num_epochs": steps} for steps in STEPS]
    if best["features"] != "shapes":  # which are always prepared
        found.append({**best, "preparation": "none"})
    if epsilon >= PREDICTION_EPSILON:  # else a fusion row would cost more than the budget
        found += [{**best, "num_fusion_samples": int(share * table.num_samples)} for share in FUSION_SHARES]
    return found


def compared(table: Table, epsilon: float, run: Runner) -> dict[str, Any]:
    """Compare planned training with the best of the grid, on one table."""
    started = time.perf_counter()

    def mean(tried: Sequence[Choices]) -> list[float]:
        """Return accuracies on hold-out rows."""
        trials = [
            Trial(table=table.name, epsilon=epsilon, seed=seed, choices=each)
            for each in tried
            for seed in CHOOSING_SEEDS
        ]
        accuracies = [found["accuracy"] for found in run(trials)]
        return [float(each) for each in np.reshape(accuracies, (len(tried), -1)).mean(axis=1)]

    tried = grid(table)
    accuracies = mean(tried)
    varied = variations(table, tried[int(np.argmax(accuracies))], epsilon)
    tried, accuracies = tried + varied, accuracies + mean(varied)
    best = tried[int(np.argmax(accuracies))]
    ours = plan_of(table, epsilon, {}, predicted=len(table.test_labels))
    return {
        "table": table.name,
        "epsilon": epsilon,
        "rows": table.num_samples,
        "parties": table.num_parties,
        "columns": table.columns,
        "classes": table.num_classes,
        "majority": round(table.majority, 4),
        "grid": len(tried),
        "best": judged(table, epsilon, best, run),
        "planned": judged(table, epsilon, {}, run),
        "best_settings": best,
        "planned_settings": described(ours),
        "note": note(table, ours),
        "seconds": round(time.perf_counter() - started, 1),
    }


def judged(table: Table, epsilon: float, choices: Choices, run: Runner) -> dict[str, float]:
    """Evaluate on test rows, by draws of noise that nothing was chosen on."""
    trials = [
        Trial(table=table.name, epsilon=epsilon, seed=seed, choices=choices, judged=True) for seed in JUDGING_SEEDS
    ]
    return summary(run(trials))


def alone(table: Table, epsilon: float, run: Runner) -> dict[str, Any]:
    """Evaluate planned training and its note without a grid: where noise is large."""
    return {
        "table": table.name,
        "epsilon": epsilon,
        "classes": table.num_classes,
        "majority": round(table.majority, 4),
        "planned": judged(table, epsilon, {}, run),
        "note": note(table, plan_of(table, epsilon, {}, predicted=len(table.test_labels))),
    }


def note(table: Table, plan: Plan) -> str | None:
    """Return what the program prints about noise before training."""
    frequent = float(np.bincount(table.train_labels).max()) / table.num_samples
    return next(iter(learning_notes(plan, columns=table.columns, majority=frequent)), None)


def described(plan: Plan) -> dict[str, Any]:
    """Return what the planner chose, for the page."""
    names = ("clip_norm", "learning_rate", "num_epochs", "preparation", "num_fusion_samples")
    found = {name: getattr(plan, name, None) for name in names}
    shapes = parse_shapes(plan.shapes)
    knots = max((count for each in shapes for _, count in each.columns), default=0)
    products = max((each.products for each in shapes), default=0)
    words = f"{knots} knots" + (f", products of {products}" if products else "")
    return {"map": words if shapes else str(plan.features), **{key: _plain(value) for key, value in found.items()}}


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | None) else str(value)
