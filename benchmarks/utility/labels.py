"""`python -m benchmarks.utility.labels`: accuracy against the label epsilon, for both algorithms.

Results go to benchmarks/results/labels.jsonl, one line for each dataset, algorithm, label epsilon and seed; a run that
was stopped continues there. Everything is planned by default commands: epsilon 8, strict for `staged`, the paper's
count for `pbm`. Nothing is chosen on test rows. `staged` has two figures: predictions as they are released by default,
and sums of party networks that all training rows have trained. `paper` is the paper's own Activity setting, in epochs
up to a train accuracy of 80%.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

import pbmvfl
from benchmarks.utility.records import Records
from pbmvfl.cli.train import preset
from pbmvfl.plan.plan import Plan

_HERE = Path(__file__).parent
RESULTS = _HERE.parent / "results" / "labels.jsonl"
_DOCS = _HERE.parent.parent / "docs"
DATASETS = ("phishing", "activity", "digits")
#: Methods in the results, with what of a row is read at test time and what is chosen beside the budget.
METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "staged": ("staged", "released at 8", {"accounting": "strict"}),
    "staged, exact sums": ("staged", "exact sums", {"accounting": "strict", "num_fusion_samples": 0}),
    "pbm": ("pbm", "exact sums", {"accounting": "paper"}),
}
#: None: labels in clear.
LABEL_EPSILONS = (None, 4.0, 2.0, 1.0)
SEEDS = range(5)
EPSILON = 8.0
_GOAL, _MOST_EPOCHS = 0.8, 60


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.utility.labels", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="lines of JSON; continued if they exist")
    parser.add_argument("--docs", type=Path, default=_DOCS, help="where the picture goes")
    parser.add_argument("--page-only", action="store_true", help="table and picture from what is there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    records = Records(given.results)
    if not given.page_only:
        _measure(records)
    write(records, given.docs)
    return 0


def _measure(records: Records) -> None:
    todo = [
        (dataset, method, epsilon, seed)
        for seed in SEEDS
        for dataset in DATASETS
        for method in METHODS
        for epsilon in LABEL_EPSILONS
    ]
    todo += [("activity", "paper", epsilon, seed) for seed in SEEDS for epsilon in LABEL_EPSILONS[:2]]
    for number, (dataset, method, epsilon, seed) in enumerate(todo, start=1):
        if records.find(dataset, method, epsilon, seed) is not None:
            continue
        started = time.perf_counter()
        found = _paper_epochs(epsilon, seed) if method == "paper" else _accuracy(dataset, method, epsilon, seed)
        key = {"dataset": dataset, "method": method, "epsilon": epsilon, "seed": seed}
        records.add({**key, **found, "seconds": round(time.perf_counter() - started, 2)})
        print(f"{number} of {len(todo)}: {key} {found}", flush=True)


def _accuracy(dataset: str, method: str, epsilon: float | None, seed: int) -> dict[str, float]:
    data = pbmvfl.load_dataset(dataset)
    _, _, choices = METHODS[method]
    plan = Plan.for_budget(epsilon=EPSILON, data=data, label_epsilon=epsilon, seed=seed, **choices)
    result = pbmvfl.Federation(plan).fit(data)
    wanted = ("test_accuracy", "test_auprc")
    return {name: round(result.metrics[name], 5) for name in wanted if name in result.metrics}


class _Reached(Exception):
    """The train accuracy is high enough."""


def _paper_epochs(epsilon: float | None, seed: int) -> dict[str, float]:
    """Return the epochs that the paper's setting takes to a train accuracy of 80%."""
    data = pbmvfl.load_dataset("activity")
    plan = Plan.for_data(
        data, **{**preset("activity"), "num_epochs": _MOST_EPOCHS, "label_epsilon": epsilon, "seed": seed}
    )
    epochs = [0]

    def look(line: Any) -> None:
        epochs[0] = line.epoch
        if line.metrics.get("train_accuracy", 0.0) >= _GOAL:
            raise _Reached

    try:
        pbmvfl.Federation(plan).fit(data, on_epoch=look)
    except _Reached:
        return {"epochs": epochs[0]}
    return {"epochs": float("inf")}


# --- page and picture ---

_TITLE = "## What label privacy costs"


def write(records: Records, docs: Path) -> None:
    """Write the last section of docs/evidence/utility.md anew, and its picture."""
    page = docs / "evidence" / "utility.md"
    before = page.read_text().partition(_TITLE)[0].rstrip() if page.exists() else ""
    page.write_text(f"{before}\n\n{section(records)}")
    draw(records, docs / "images" / "label-utility.png")


def _figures(records: Records, dataset: str, method: str, epsilon: float | None, name: str) -> list[float]:
    found = (records.find(dataset, method, epsilon, seed) for seed in SEEDS)
    return [record[name] for record in found if record is not None and name in record]


def _cell(records: Records, dataset: str, method: str, epsilon: float | None) -> str:
    accuracy = _figures(records, dataset, method, epsilon, "test_accuracy")
    auprc = _figures(records, dataset, method, epsilon, "test_auprc")
    if not accuracy:
        return ""
    shown = f"{np.mean(accuracy):.4f}"
    return f"{shown} / {np.mean(auprc):.4f}" if auprc else shown


def section(records: Records) -> str:
    """Return the section of docs/evidence/utility.md."""
    titles = ["in clear" if epsilon is None else f"{epsilon:g}" for epsilon in LABEL_EPSILONS]
    lines = [
        _TITLE,
        "",
        "Test accuracy (and AUPRC, for two classes) against the label epsilon: means of 5 seeds, default plans at",
        "epsilon 8, `staged` by the strict count, `pbm` by the paper's (`python -m benchmarks.utility.labels`).",
        "",
        "- **released at 8**: what a default run prints: some training rows are fusion rows and train no network; test",
        "  rows are released as predictions at epsilon 8 are (simulated), and read by the fusion model.",
        "- **exact sums**: all training rows train the party networks (`num_fusion_samples=0`), and test rows are",
        "  summed without noise. It shows what label privacy costs in training alone.",
        "",
        f"| dataset | algorithm | test rows | {' | '.join(titles)} |",
        "|---|---|---|" + "---|" * len(titles),
    ]
    for dataset in DATASETS:
        for method, (algorithm, read, _) in METHODS.items():
            cells = [_cell(records, dataset, method, epsilon) for epsilon in LABEL_EPSILONS]
            lines.append(f"| {dataset} | `{algorithm}` | {read} | {' | '.join(cells)} |")
    clear, drawn = (_figures(records, "activity", "paper", epsilon, "epochs") for epsilon in LABEL_EPSILONS[:2])
    if clear and drawn:
        lines += [
            "",
            f"The paper's Activity setting reaches a train accuracy of 80% after {np.mean(clear):.1f} epochs with",
            f"labels in clear, and after {np.mean(drawn):.1f} with label epsilon 4.",
        ]
    return "\n".join([*lines, "", "![Accuracy against the label epsilon](../images/label-utility.png)", ""])


def draw(records: Records, path: Path) -> None:
    """Draw accuracy against the label epsilon, a panel for each dataset."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    styles = {"staged": ("#0072B2", "o"), "staged, exact sums": ("#56B4E9", "s"), "pbm": ("#D55E00", "^")}
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, len(DATASETS), figsize=(9.5, 3.0), layout="constrained")
    places = range(len(LABEL_EPSILONS))
    for axis, dataset in zip(axes, DATASETS, strict=True):
        for method, (algorithm, read, _) in METHODS.items():
            colour, mark = styles[method]
            found = [_figures(records, dataset, method, epsilon, "test_accuracy") for epsilon in LABEL_EPSILONS]
            means = [np.mean(each) if each else np.nan for each in found]
            spread = [np.std(each, ddof=1) if len(each) > 1 else 0.0 for each in found]
            axis.errorbar(
                places, means, yerr=spread, color=colour, marker=mark, capsize=3, label=f"{algorithm}, {read}"
            )
        axis.set_title(dataset)
        axis.set_xticks(places, ["in clear" if each is None else f"{each:g}" for each in LABEL_EPSILONS])
        axis.set_xlabel("label epsilon")
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("test accuracy")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
