"""Trials of the program itself: a plan within a budget, trained on a table, and judged on released predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from benchmarks.planner.tables import Table, load
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.federation.federation import Federation
from pbmvfl.plan.plan import Plan

#: Budget of a prediction, whatever that of training is.
PREDICTION_EPSILON = 8.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training on a table: `choices` are those of `Plan.for_budget`; none are the planner's own."""

    table: str
    epsilon: float
    seed: int
    choices: dict[str, Any] = field(default_factory=dict)
    #: Whether test rows are predicted, which nothing is chosen on, or hold-out rows.
    judged: bool = False


def plan_of(table: Table, epsilon: float, choices: dict[str, Any], *, predicted: int, seed: int = 0) -> Plan:
    """Return the plan of some choices within a budget, made from sizes and kinds of columns alone."""
    return Plan.for_budget(
        epsilon=epsilon,
        prediction_epsilon=PREDICTION_EPSILON,
        num_parties=table.num_parties,
        num_samples=table.num_samples,
        num_classes=table.num_classes,
        num_test_samples=predicted,
        columns=table.columns,
        column_values=table.column_values,
        kinds=table.kinds,
        label_epsilon=None,  # noise on columns alone is what is planned here
        seed=seed,
        **choices,
    )


def data_of(table: Table, *, judged: bool) -> VerticalDataset:
    """Return a table with its test rows, or with its hold-out rows in their place."""
    return VerticalDataset(
        name=table.name,
        party_names=tuple(f"party-{index}" for index in range(table.num_parties)),
        train_features=table.train,
        test_features=table.test if judged else table.hold_out,
        train_labels=table.train_labels,
        test_labels=table.test_labels if judged else table.hold_out_labels,
        class_names=tuple(map(str, range(table.num_classes))),
        default_encoder="linear",
    )


#: A worker goes through the trials of one table after those of another.
_loaded = lru_cache(maxsize=1)(load)


def measure(trial: Trial) -> dict[str, float]:
    """Run a trial, and return accuracy and mean recall over classes of its released predictions."""
    torch.set_num_threads(1)
    data = data_of(_loaded(trial.table), judged=trial.judged)
    plan = plan_of(_loaded(trial.table), trial.epsilon, trial.choices, predicted=data.num_test_samples, seed=trial.seed)
    result = Federation(plan).fit(data)
    recalls = [each.test_recall for each in result.classes if each.test_recall is not None]
    return {"accuracy": result.metrics["test_accuracy"], "balanced": float(np.mean(recalls))}


#: Runs trials, and returns their figures in the same order.
Runner = Callable[[Sequence[Trial]], list[dict[str, float]]]


def runner(pool: ProcessPoolExecutor) -> Runner:
    """Return a runner of trials in the processes of a pool."""
    return lambda trials: list(pool.map(measure, trials))


def summary(found: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return mean and deviation of accuracies, and the mean of mean recalls."""
    accuracy, balanced = zip(*((each["accuracy"], each["balanced"]) for each in found), strict=True)
    figures = {"accuracy": np.mean(accuracy), "deviation": np.std(accuracy, ddof=1), "balanced": np.mean(balanced)}
    return {name: round(float(value), 5) for name, value in figures.items()}
