"""Grid of settings that a user with many trials would try, and the best of them.

The grid is the same for every table: clip norms are shares of the norm that a row of so many numbers may have. The best
is chosen by the mean accuracy on hold-out rows over some draws of noise; what is reported of it comes from test rows
and other draws, so that the largest of many noisy figures is not taken for skill. Every setting has the same epsilon.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.planner.tables import Table
from benchmarks.planner.trials import Settings, delta_of, measures, planned, scores
from benchmarks.utility.learning import shift_of
from pbmvfl.plan.groups import FeatureMap, feature_width
from pbmvfl.plan.local_search import learning_note

EPSILONS = (8.0, 1.0)
RATES = (0.1, 0.5, 2.5)
CLIP_SHARES = (0.3, 1.0)
STEPS = (20, 60)
#: Wider maps take minutes, and are not tried.
WIDEST = 512
CHOOSING_SEEDS, JUDGING_SEEDS = (0, 1), (100, 101, 102, 103, 104)


def grid(table: Table) -> Iterator[Settings]:
    """Return 48 settings, or 24 where products of columns would be too wide."""
    for features in ("columns", "pairs"):
        width = feature_width(FeatureMap(features), table.columns, 3)
        if width > WIDEST:
            continue
        for preparation, steps, share, rate in itertools.product(("whiten", "none"), STEPS, CLIP_SHARES, RATES):
            yield Settings(
                features=features,
                preparation=preparation,
                steps=steps,
                clip_norm=share * math.sqrt(width + 1),
                learning_rate=rate,
            )


def compared(table: Table, epsilon: float) -> dict[str, Any]:
    """Compare planned training with the best of the grid, on one table."""
    started = time.perf_counter()
    shift = shift_of(epsilon, delta_of(table.num_samples))
    tried = list(grid(table))
    accuracies: dict[Settings, list[float]] = {each: [] for each in tried}
    for seed in CHOOSING_SEEDS:
        found, _ = scores(table, tried, shift, seed)
        for each in tried:
            accuracies[each].append(measures(found[each], table.hold_out_labels)["accuracy"])
    best = max(tried, key=lambda each: float(np.mean(accuracies[each])))
    ours = planned(table, epsilon)
    return {
        "table": table.name,
        "epsilon": epsilon,
        "rows": table.num_samples,
        "parties": table.num_parties,
        "columns": table.columns,
        "classes": table.num_classes,
        "majority": round(table.majority, 4),
        "grid": len(tried),
        "best": judged(table, best, shift),
        "planned": judged(table, ours, shift),
        "best_settings": _short(best),
        "planned_settings": _short(ours),
        "note": note(table, ours, shift),
        "seconds": round(time.perf_counter() - started, 1),
    }


def judged(table: Table, settings: Settings, shift: float) -> dict[str, float]:
    """Evaluate on test rows, by draws of noise that nothing was chosen on: mean, deviation and mean recall."""
    found = [measures(scores(table, [settings], shift, seed)[1][settings], table.test_labels) for seed in JUDGING_SEEDS]
    accuracy = [each["accuracy"] for each in found]
    return {
        "accuracy": round(float(np.mean(accuracy)), 5),
        "deviation": round(float(np.std(accuracy, ddof=1)), 5),
        "balanced": round(float(np.mean([each["balanced"] for each in found])), 5),
    }


def alone(table: Table, epsilon: float) -> dict[str, Any]:
    """Evaluate planned training and its note without a grid: where noise is large."""
    shift = shift_of(epsilon, delta_of(table.num_samples))
    ours = planned(table, epsilon)
    return {
        "table": table.name,
        "epsilon": epsilon,
        "classes": table.num_classes,
        "majority": round(table.majority, 4),
        "planned": judged(table, ours, shift),
        "note": note(table, ours, shift),
    }


def note(table: Table, settings: Settings, shift: float) -> str | None:
    """Return what the program prints before training."""
    width = feature_width(FeatureMap(settings.features), table.columns, settings.column_values)
    sizes = {"num_samples": table.num_samples, "num_classes": table.num_classes}
    frequent = float(np.bincount(table.train_labels).max()) / table.num_samples
    return learning_note(shift=shift, width=width, majority=frequent, **sizes)


def _short(settings: Settings) -> dict[str, Any]:
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in vars(settings).items()
    }
