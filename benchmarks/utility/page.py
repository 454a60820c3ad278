"""docs/evidence/utility.md and docs/images/utility.png, from results."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.utility import labels
from benchmarks.utility.methods import METHODS
from benchmarks.utility.picture import draw
from benchmarks.utility.records import Records, summary

_INTRODUCTION = """# What privacy costs in accuracy

Made by `python -m benchmarks.utility` from `benchmarks/results/utility.jsonl` ({num_seeds} seeds); do not edit.
{num_parties} parties, Phishing in file order, test rows; mean ± standard deviation over seeds; delta {delta:g}. The
unit is a cell, one party's values of one row, but where "whole row" is said: a row of all parties together.

![Accuracy against epsilon and against advantage](../images/utility.png)

- **ours, strict**: `Plan.for_budget(epsilon=E, unit="cell")` and `Federation(plan).fit(data)`, all else by default; for
  whole rows `unit="record"`. Epsilon is a theorem ([theory](../explanation/theory.md)). Test rows are summed exactly;
  [released predictions](../explanation/mechanisms.md#predictions) have an epsilon of their own.
- **central DP-SGD**: one party has all columns: the same features, whitening and softmax regression, trained jointly
  with noisy steps. Its unit is the whole row, so compare it with ours for whole rows. For every epsilon the best on
  hold-outs of full batches and Poisson-sampled ones (a tenth of the rows, 100 steps, dp-accounting's losses), with
  several step sizes, and of full batches without whitening.
- **PBM-VFL, paper's epsilon**: the paper's algorithm, planned for the same epsilon by the paper's account, which is not
  a proof. By the strict account the same runs have the epsilons of the last table, and advantage 1.
- **local DP**: each party releases each row once by k-ary randomised response, pure epsilon. Tried: every column by
  itself, two, three or six together, sums of columns (Phishing); 1 to 12 symbols of 1 to 9 signs of public projections,
  six draws of them (Activity). Seven tenths of the training rows make tables of counts by class; the other rows and
  the test rows are released as symbols of the score that those tables give them.
- **local DP, exact at test**: the same tables from all training rows; test rows are summed exactly, as ours are. Also
  tried: each row's gradient with noise of its own.
- **no privacy**: the same features and model without noise, columns pooled, or parties alone as in ours.

Baselines choose by mean accuracy on hold-outs of training rows, uncharged
([how figures were chosen](index.md#utility)).
"""


def write(config: dict[str, Any], records: Records, docs: Path) -> None:
    """Write both files; parts without results yet are left out."""
    for name in ("evidence", "images"):
        (docs / name).mkdir(parents=True, exist_ok=True)
    draw(config, records, docs / "images" / "utility.png")
    introduction = _INTRODUCTION.format(
        num_seeds=len(config["seeds"]), num_parties=config["num_parties"], delta=config["delta"]
    )
    (docs / "evidence" / "utility.md").write_text(
        introduction + "".join(f"\n{line}" for line in _tables(config, records)) + "\n"
    )
    if labels.RESULTS.exists():
        labels.write(Records(labels.RESULTS), docs)


def _tables(config: dict[str, Any], records: Records) -> Iterator[str]:
    for dataset in config["datasets"]:
        yield f"## {dataset.capitalize()}"
        yield from _measure(config, records, dataset, "accuracy", "accuracy")
        yield from _gap(config, records, dataset)
        if summary(records, dataset, "ours", config["epsilons"][0], "auprc") is not None:
            yield from _measure(config, records, dataset, "auprc", "area under precision and recall")
        yield from _measure(config, records, dataset, "advantage", "advantage", private_only=True)
        yield from _chosen(config, records, dataset)
        yield ""
    yield "## The paper's runs by the strict account"
    yield ""
    yield _row("epsilon by strict accounting", [f"{epsilon:g}" for epsilon in config["epsilons"]])
    yield _rule(config)
    for dataset in config["datasets"]:
        found = [summary(records, dataset, "paper", epsilon, "strict_epsilon") for epsilon in config["epsilons"]]
        yield _row(dataset.capitalize(), ["" if each is None else f"{each.mean:,.0f}" for each in found])


def _measure(
    config: dict[str, Any], records: Records, dataset: str, measure: str, title: str, *, private_only: bool = False
) -> Iterator[str]:
    yield ""
    yield _row(f"{title}, at epsilon", [f"{epsilon:g}" for epsilon in config["epsilons"]])
    yield _rule(config)
    for name in config["methods"]:
        method = METHODS[name]
        if private_only and not method.is_private:
            continue
        found = [
            summary(records, dataset, name, epsilon if method.is_private else None, measure)
            for epsilon in config["epsilons"]
        ]
        if any(found):
            values = ["" if each is None else str(each) for each in found]
            if private_only:
                values = ["" if each is None else f"{each.mean:.2f}".removeprefix("0") for each in found]
            if not method.is_private:
                values = [values[0].split(" ")[0]] + [""] * (len(values) - 1)
            yield _row(f"**{method.label}**" if name.startswith("ours") else method.label, values)


def _gap(config: dict[str, Any], records: Records, dataset: str) -> Iterator[str]:
    for name in ("ours", "ours_record"):
        gaps = []
        for epsilon in config["epsilons"]:
            ours, central = (summary(records, dataset, each, epsilon, "accuracy") for each in (name, "central"))
            gaps.append("" if ours is None or central is None else f"{100 * (ours.mean - central.mean):+.1f}")
        yield _row(f"{METHODS[name].label} minus central, points", gaps)


def _chosen(config: dict[str, Any], records: Records, dataset: str) -> Iterator[str]:
    yield ""
    yield "Chosen on hold-outs:"
    yield ""
    for name in config["methods"]:
        said = []
        for epsilon in config["epsilons"] if METHODS[name].is_private else [None]:
            record = records.find(dataset, name, epsilon, None)
            if record is not None and record["choice"]:
                at = "" if epsilon is None else f"{epsilon:g}: "
                said.append(at + _in_words(record["choice"]))
        if said:
            yield textwrap.fill(f"- {METHODS[name].label}: " + "; ".join(said), 118, subsequent_indent="  ")


def _in_words(choice: dict[str, Any]) -> str:
    if "code" in choice:
        code = choice["code"]
        if code["bits"]:
            return f"{code['repeats']} x {code['bits']} signs of draw {code['draw']}"
        levels = f", {code['levels']} steps" if code["levels"] != 2 else ""
        together = {0: "sums", 1: "every column by itself"}
        return together.get(code["columns"], f"{code['columns']} together") + levels
    batch = "sampled" if choice.get("sampled", 1) < 1 else "full batches"
    whitened = "" if choice.get("prepared", True) else ", not whitened"
    return f"{batch} x {choice.get('steps', 40)}, step size {choice['rate']:g}{whitened}"


def _row(name: str, values: list[str]) -> str:
    return f"| {name} | " + " | ".join(values) + " |"


def _rule(config: dict[str, Any]) -> str:
    return "|---|" + "---|" * len(config["epsilons"])
