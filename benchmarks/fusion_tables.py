"""`python -m benchmarks.fusion_tables`: default plans on tables, with released predictions, beside pooled models.

    python -m benchmarks.fusion_tables --version now
    PYTHONPATH=OLDER/src python benchmarks/fusion_tables.py --version before     (any earlier source, by its own rules)
    python -m benchmarks.fusion_tables --version pooled                          (scikit-learn on all columns together)
    python -m benchmarks.fusion_tables --page                                    (the table, in Markdown)
    python -m benchmarks.fusion_tables --hold-out --results FILE                 (to choose rules: no test row is read)

Results go to benchmarks/results/fusion.jsonl, one line for each run; a run that was stopped continues there. Tables
are read from PBMVFL_DATA: `tables/NAME.csv`, `NAME_test.csv` and `NAME.schema.json`, and the named sets. Only public
API is used here, and no setting but the budgets.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from pbmvfl.data.datasets import load_dataset
from pbmvfl.data.tables import load_table
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.federation.federation import Federation
from pbmvfl.plan.plan import Plan

RESULTS = Path(__file__).parent / "results" / "fusion.jsonl"
#: Label, id and parties of each table; None: groups of columns in the file's order.
TABLES: dict[str, tuple[str, str, str | None]] = {
    "housing": (
        "dear",
        "id",
        "geo=longitude,latitude,ocean_proximity;census=housing_median_age,population,households;"
        "survey=total_rooms,total_bedrooms,median_income",
    ),
    "skin": ("skin", "pixel", "blue=B;green=G;red=R"),
    "covertype": ("Cover_Type", "id", None),
    "diamonds": ("cut", "id", "lab=color,clarity,depth,table;shop=carat,price,x,y,z"),
}
NAMED = ("phishing", "activity", "digits")
_GROUPS = 6
#: Budgets of a training row and of a predicted row.
BUDGETS = ((8.0, 8.0), (1.0, 8.0), (8.0, 2.0), (8.0, 1.0))
SEEDS = range(5)
PLAIN = ("logistic regression", "boosted trees")
#: Learning rates of DP-EBM: its default, with which it has not arrived after its 300 rounds (on one table no row is
#: above one half), and the best of four on held-out training rows of the three tables of two classes.
DP_EBM = {"DP-EBM, its defaults": 0.01, "DP-EBM, rate 0.3": 0.3}


#: Share of the training rows, the last ones of the file, that are judged on where rules are chosen.
_HELD_OUT = 0.2
_choosing = False


@cache
def load(name: str) -> VerticalDataset:
    """Load a table with its test rows, or a named set; to choose rules, training rows alone, the last as test rows."""
    data = _load(name)
    if not _choosing:
        return data
    kept = int((1 - _HELD_OUT) * data.num_samples)
    return replace(
        data,
        train_features=tuple(part[:kept] for part in data.train_features),
        test_features=tuple(part[kept:] for part in data.train_features),
        train_labels=data.train_labels[:kept],
        test_labels=data.train_labels[kept:],
        train_ids=None if data.train_ids is None else data.train_ids[:kept],
        test_ids=None if data.train_ids is None else data.train_ids[kept:],
    )


def _load(name: str) -> VerticalDataset:
    if name in NAMED:
        return load_dataset(name)
    label, identity, columns = TABLES[name]
    folder = Path(os.environ.get("PBMVFL_DATA", "../shared/data")) / "tables"
    schema = folder / f"{name}.schema.json"
    if columns is None:
        names = list(json.loads(schema.read_text())["columns"])
        groups = np.array_split(np.array(names), _GROUPS)
        columns = ";".join(f"party{index}={','.join(group)}" for index, group in enumerate(groups))
    test = folder / f"{name}_test.csv"
    return load_table(folder / f"{name}.csv", label=label, columns=columns, id=identity, schema=schema, test=test)


def federated(name: str, epsilon: float, prediction_epsilon: float, seed: int) -> dict[str, Any]:
    """Train by the default plan of these budgets, and return the figures on released predictions of the test rows."""
    data = load(name)
    plan = Plan.for_budget(epsilon=epsilon, data=data, prediction_epsilon=prediction_epsilon, seed=seed)
    result = Federation(plan).fit(data)
    metrics = {key: value for key, value in result.metrics.items() if key in ("test_accuracy", "test_auprc")}
    told = {key: str(getattr(plan, key)) for key in ("features", "shapes") if hasattr(plan, key)}
    return {**metrics, **told, "vote": str(plan.voting), "prediction": plan.prediction.describe()}


def pooled(name: str, model: str, epsilon: float, seed: int) -> dict[str, Any]:
    """Fit a model to all columns together, without privacy or, for DP-EBM, with the same delta."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import average_precision_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    data = load(name)
    train, test = (
        np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
        for parts in (data.train_features, data.test_features)
    )
    if model == "logistic regression":
        found: Any = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    elif model == "boosted trees":
        found = HistGradientBoostingClassifier(random_state=seed)
    else:
        from interpret.privacy import DPExplainableBoostingClassifier

        # Its noise is not seeded: a fixed seed would void the guarantee. Columns are within public bounds already.
        found = DPExplainableBoostingClassifier(
            epsilon=epsilon,
            delta=min(1e-5, 0.1 / data.num_samples),
            learning_rate=DP_EBM[model],
            privacy_bounds=dict.fromkeys(range(train.shape[1]), (-1.0, 1.0)),
            n_jobs=1,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DP-EBM looks at types of columns, outside of its epsilon, and says so
        shares = found.fit(train, data.train_labels).predict_proba(test)
    metrics = {"test_accuracy": float((found.classes_[shares.argmax(axis=1)] == data.test_labels).mean())}
    if data.num_classes == 2:
        metrics["test_auprc"] = float(average_precision_score(data.test_labels, shares[:, 1]))
    return metrics


def tasks(version: str) -> Iterator[dict[str, Any]]:
    """Yield what there is to do, by its key in the results."""
    for name in (*TABLES, *NAMED):
        for seed in SEEDS:
            if version != "pooled":
                for epsilon, prediction in BUDGETS:
                    yield {"table": name, "seed": seed, "epsilon": epsilon, "prediction_epsilon": prediction}
                continue
            for model in PLAIN if seed == 0 else ():
                yield {"table": name, "seed": seed, "model": model}
            for model in DP_EBM if load(name).num_classes == 2 else ():  # it has no more classes
                for epsilon in (8.0, 1.0):
                    yield {"table": name, "seed": seed, "model": model, "epsilon": epsilon}


def one(version: str, task: dict[str, Any], choosing: bool) -> str:
    """Run one task, and return its line of the results; empty if a library is missing."""
    globals()["_choosing"] = choosing  # of this process
    key = {"version": version, **task}
    began = time.monotonic()
    try:
        if version == "pooled":
            figures = pooled(task["table"], task["model"], task.get("epsilon", 0.0), task["seed"])
        else:
            figures = federated(task["table"], task["epsilon"], task["prediction_epsilon"], task["seed"])
    except ImportError as error:
        print(f"{key}: {error}", file=sys.stderr)
        return ""
    return json.dumps({**key, **figures, "seconds": round(time.monotonic() - began, 1)})


def measure(version: str, only: list[str], seeds: int, results: Path, jobs: int) -> None:
    """Run what is not in the results yet, by so many processes."""
    done = [] if not results.exists() else [json.loads(line) for line in results.read_text().splitlines()]
    left = [
        task
        for task in tasks(version)
        if (not only or task["table"] in only)
        and task["seed"] < seeds
        and not any({"version": version, **task}.items() <= each.items() for each in done)
    ]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool, results.open("a") as file:
        for line in filter(None, pool.map(one, repeat(version), left, repeat(_choosing))):
            print(line, file=file, flush=True)
            print(line, flush=True)


def page(results: Path) -> str:
    """Return the results as a table in Markdown: means over seeds, accuracy and for two classes AUPRC."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]

    def figure(**key: Any) -> str:
        found = [each for each in lines if key.items() <= each.items()]
        if not found:
            return ""
        values = [[each[name] for each in found if name in each] for name in ("test_accuracy", "test_auprc")]
        return "/".join(f"{statistics.fmean(each):.3f}".lstrip("0") for each in values if each)

    versions = [each for each in dict.fromkeys(line["version"] for line in lines) if each != "pooled"]
    heads = [f"{epsilon:g}, {prediction:g}: {version}" for epsilon, prediction in BUDGETS for version in versions]
    private = [(model, epsilon) for model in DP_EBM for epsilon in (8.0, 1.0)]
    rows = [["table", "majority", *heads, *PLAIN, *(f"{model}, epsilon {epsilon:g}" for model, epsilon in private)]]
    for name in (*TABLES, *NAMED):
        counts = np.bincount(load(name).test_labels)
        told = [
            figure(table=name, version=version, epsilon=epsilon, prediction_epsilon=prediction)
            for epsilon, prediction in BUDGETS
            for version in versions
        ]
        beside = [figure(table=name, model=model) for model in PLAIN]
        beside += [figure(table=name, model=model, epsilon=epsilon) for model, epsilon in private]
        rows.append([name, f"{counts.max() / counts.sum():.3f}".lstrip("0"), *told, *beside])
    written = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([written[0], "|" + "---|" * len(rows[0]), *written[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default="now", help="name of the source in the results, or pooled")
    parser.add_argument("--tables", nargs="*", default=[], help="these alone")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="so many runs of each")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--page", action="store_true", help="print the table of what there is")
    parser.add_argument("--hold-out", action="store_true", help="judge on the last fifth of the training rows")
    given = parser.parse_args()
    globals()["_choosing"] = given.hold_out
    if given.hold_out and given.results == RESULTS:
        parser.error("--hold-out goes with --results FILE: figures of held-out training rows are no results")
    if given.page:
        print(page(given.results))
    else:
        measure(given.version, given.tables, given.seeds, given.results, given.jobs)


if __name__ == "__main__":
    main()
