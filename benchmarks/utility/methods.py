"""Methods that are compared: each from a data set, an epsilon and a seed to measures on the test rows.

A baseline makes its choices for every epsilon by its mean accuracy on hold-outs of the training rows, which is not
charged, in its favour. Ours has nothing to choose: the library's planner does, from public sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.metrics import average_precision_score

from benchmarks.utility import local_dp
from benchmarks.utility.learning import Recipe, advantage, advantage_of, learned, shift_of
from benchmarks.utility.tables import Table
from pbmvfl import Federation, Plan
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.privacy.accounting import epsilon_bound
from pbmvfl.privacy.units import Accounting, Unit

Reals = npt.NDArray[np.float64]
Choice = dict[str, Any]
Measures = dict[str, float]
_HOLD_OUT_SEED = 1_000


@dataclass(frozen=True, kw_only=True)
class Task:
    """Inputs of every method."""

    data: VerticalDataset
    table: Table
    delta: float


@dataclass(frozen=True, kw_only=True)
class Method:
    """One line of the table."""

    name: str
    label: str
    is_private: bool
    run: Callable[[Task, float, int, Choice], Measures]
    #: What is tried on hold-outs, and how; nothing if there is nothing to choose.
    candidates: Callable[[Table], Iterable[Choice]] | None = None
    trial: Callable[[Table, float, float, int, Choice], Reals] | None = None

    def choose(self, task: Task, epsilon: float) -> Choice:
        """Return the candidate with the best mean accuracy on hold-outs."""
        if self.candidates is None or self.trial is None:
            return {}
        splits = list(task.table.hold_outs())
        best: tuple[float, Choice] = (-1.0, {})
        for choice in self.candidates(task.table):
            found = [
                _measures(self.trial(split, epsilon, task.delta, _HOLD_OUT_SEED + number, choice), split)["accuracy"]
                for number, split in enumerate(splits)
            ]
            best = max(best, (float(np.mean(found)), choice), key=lambda pair: pair[0])
        return best[1] | {"hold_out_accuracy": round(best[0], 4)}


def _measures(scores_NK: Reals, table: Table) -> Measures:
    found = {"accuracy": float((scores_NK.argmax(axis=1) == table.judged_labels).mean())}
    if table.num_classes == 2:
        found["auprc"] = float(average_precision_score(table.judged_labels, scores_NK[:, 1] - scores_NK[:, 0]))
    return found


# --- softmax regression on the library's features ---


def _recipe(choice: Choice) -> Recipe:
    return Recipe(**{name: value for name, value in choice.items() if name in Recipe.__dataclass_fields__})


def _additive(
    table: Table, epsilon: float, delta: float, seed: int, choice: Choice, noise_factor: float = 1.0
) -> Reals:
    rng = np.random.default_rng(seed)
    total_NK = np.broadcast_to(table.prior_K, (len(table.judged_labels), table.num_classes)).copy()
    for part, judged in zip(table.train, table.judged, strict=True):
        model = learned(
            part,
            table.labels,
            table.prior_K,
            _recipe(choice),
            epsilon=epsilon,
            delta=delta,
            rng=rng,
            noise_factor=noise_factor,
        )
        total_NK += model(judged)
    return total_NK


def _pooled(table: Table, epsilon: float, delta: float, seed: int, choice: Choice) -> Reals:
    return _additive(table.pooled(), epsilon, delta, seed, choice)


def _run_open(
    trial: Callable[[Table, float, float, int, Choice], Reals],
) -> Callable[[Task, float, int, Choice], Measures]:
    def run(task: Task, epsilon: float, seed: int, choice: Choice) -> Measures:
        return _measures(trial(task.table, epsilon, task.delta, seed, choice), task.table) | {"advantage": 1.0}

    return run


def _open_candidates(table: Table) -> Iterable[Choice]:
    del table
    return ({"rate": rate, "steps": steps} for steps in (40, 150) for rate in (0.25, 0.5, 1.0, 2.0))


def _central_candidates(table: Table) -> Iterable[Choice]:
    """Return full batches and sampled ones with steps of several sizes, and full ones without preparation."""
    del table
    yield from ({"rate": rate} for rate in (0.5, 1.0, 2.0, 4.0))
    yield from ({"rate": rate, "sampled": 0.1, "steps": 100} for rate in (0.5, 1.0, 2.0))
    yield {"rate": 1.0, "prepared": False}


def _run_central(task: Task, epsilon: float, seed: int, choice: Choice) -> Measures:
    found = _measures(_pooled(task.table, epsilon, task.delta, seed, choice), task.table)
    return found | {"advantage": advantage(_recipe(choice), epsilon, task.delta)}


# --- the library's own ---


def _run_library(accounting: Accounting, unit: Unit = Unit.CELL) -> Callable[[Task, float, int, Choice], Measures]:
    def run(task: Task, epsilon: float, seed: int, choice: Choice) -> Measures:
        plan = Plan.for_budget(
            epsilon=epsilon,
            delta=task.delta,
            unit=unit.value,
            accounting=accounting.value,
            data=task.data,
            seed=seed,
            **choice,
        )
        result = Federation(plan).fit(task.data)
        bounds = {
            each: epsilon_bound(plan.training_run(), unit, each, delta=task.delta)
            for each in {accounting, Accounting.STRICT}
        }
        found = {
            "accuracy": float(result.metrics["test_accuracy"]),
            "advantage": bounds[accounting].advantage_upper_bound,
            "epsilon_spent": bounds[accounting].epsilon,
            "strict_epsilon": bounds[Accounting.STRICT].epsilon,
            "strict_advantage": bounds[Accounting.STRICT].advantage_upper_bound,
        }
        if "test_auprc" in result.metrics:
            found["auprc"] = float(result.metrics["test_auprc"])
        return found

    return run


# --- local differential privacy ---


def _local_dp(exact: bool) -> Callable[[Table, float, float, int, Choice], Reals]:
    def trial(table: Table, epsilon: float, delta: float, seed: int, choice: Choice) -> Reals:
        if "code" in choice:
            code = local_dp.Code(**choice["code"])
            scores = local_dp.exact_scores if exact else local_dp.scores
            return scores(table, code, epsilon=epsilon, rng=np.random.default_rng(seed))
        # Every row's gradient with noise of its own, as if each row were a client: the sum has that of all of them.
        return _additive(table, epsilon, delta, seed, choice, noise_factor=math.sqrt(len(table.labels)))

    return trial


def _local_dp_candidates(exact: bool) -> Callable[[Table], Iterable[Choice]]:
    def candidates(table: Table) -> Iterable[Choice]:
        for code in local_dp.codes(table.column_values, (2,) if exact else (2, 4, 16)):
            yield {"code": asdict(code)}
        if exact:
            yield from ({"prepared": False, "rate": rate, "steps": 20} for rate in (0.25, 1.0))

    return candidates


def _run_local_dp(exact: bool) -> Callable[[Task, float, int, Choice], Measures]:
    trial = _local_dp(exact)

    def run(task: Task, epsilon: float, seed: int, choice: Choice) -> Measures:
        found = _measures(trial(task.table, epsilon, task.delta, seed, choice), task.table)
        if "code" in choice:
            code = local_dp.Code(**choice["code"])
            return found | {"advantage": local_dp.advantage(code, task.table, epsilon, exact=exact)}
        return found | {"advantage": advantage_of(shift_of(epsilon, task.delta))}

    return run


METHODS = {
    method.name: method
    for method in (
        Method(
            name="open_pooled",
            label="no privacy, pooled columns",
            is_private=False,
            run=_run_open(_pooled),
            candidates=_open_candidates,
            trial=_pooled,
        ),
        Method(
            name="open_local",
            label="no privacy, parties alone",
            is_private=False,
            run=_run_open(_additive),
            candidates=_open_candidates,
            trial=_additive,
        ),
        Method(
            name="central",
            label="central DP-SGD (whole row)",
            is_private=True,
            run=_run_central,
            candidates=_central_candidates,
            trial=_pooled,
        ),
        Method(name="ours", label="ours, strict (cell)", is_private=True, run=_run_library(Accounting.STRICT)),
        Method(
            name="ours_record",
            label="ours, strict (whole row)",
            is_private=True,
            run=_run_library(Accounting.STRICT, Unit.RECORD),
        ),
        Method(name="paper", label="PBM-VFL, paper's epsilon", is_private=True, run=_run_library(Accounting.PAPER)),
        Method(
            name="local_dp_exact",
            label="local DP, exact at test",
            is_private=True,
            run=_run_local_dp(exact=True),
            candidates=_local_dp_candidates(exact=True),
            trial=_local_dp(exact=True),
        ),
        Method(
            name="local_dp",
            label="local DP",
            is_private=True,
            run=_run_local_dp(exact=False),
            candidates=_local_dp_candidates(exact=False),
            trial=_local_dp(exact=False),
        ),
    )
}
