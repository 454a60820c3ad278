"""Figures of the README and of the landing page are those of the result files, read here by themselves.

A failure shows the line that should stand there, to be copied.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import epsilon_bound
from pbmvfl.privacy.units import Accounting, Unit

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TABLES = ("phishing", "activity")
DELTA = 1e-5

pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="the results are not beside these tests")


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def mean(name: str, metric: str = "test_accuracy", **key: Any) -> str:
    """The mean over five seeds as the pages write it: three digits without a zero before the point."""
    found = [each for each in records(name) if key.items() <= each.items() and metric in each]
    assert sorted(each["seed"] for each in found) == list(range(5)), key
    return f"{fmean(each[metric] for each in found):.3f}".lstrip("0")


def released(table: str, epsilon: float, prediction_epsilon: float) -> str:
    key = {"version": "now", "epsilon": epsilon, "prediction_epsilon": prediction_epsilon}
    return mean("fusion.jsonl", table=table, **key)


def advantages(epsilon: float, prediction_epsilon: float) -> tuple[float, float]:
    """Of a training row and of a predicted row of a default plan with Phishing's sizes."""
    sizes = {"num_parties": 5, "num_samples": 7000, "num_test_samples": 1000, "num_classes": 2}
    plan = Plan.for_budget(epsilon=epsilon, prediction_epsilon=prediction_epsilon, delta=DELTA, columns=7, **sizes)
    run = plan.training_run()
    train, test = (
        epsilon_bound(run.of_split(split), Unit.CELL, Accounting.STRICT, delta=DELTA).advantage_upper_bound
        for split in ("train", "test")
    )
    return train, test


def shown(advantage: float) -> str:
    """An advantage as the README writes it: two digits, rounded up."""
    hundredths = math.ceil(100 * advantage - 1e-9)
    return "1" if hundredths == 100 else f".{hundredths:02}"


def readme_rows() -> list[str]:
    """The rows of the README's table that come from result files, as they should be."""
    pooled, paper = (
        " | ".join(mean("utility.jsonl", "accuracy", dataset=table, method=method, epsilon=epsilon) for table in TABLES)
        for method, epsilon in (("open_pooled", None), ("paper", 2.0))
    )
    rows = [
        f"| no privacy, columns pooled | 1, 1 | {pooled} |",
        f"| PBM-VFL, 2 by the paper's count, exact sums | no proof | {paper} |",
    ]
    for epsilon, prediction in ((8.0, 8.0), (1.0, 8.0), (8.0, 2.0)):
        seen = ", ".join(map(shown, advantages(epsilon, prediction)))
        figures = " | ".join(released(table, epsilon, prediction) for table in TABLES)
        rows.append(f"| {epsilon:g}, {prediction:g} | {seen} | {figures} |")
    return rows


def test_the_readme_s_table_has_the_figures_of_the_result_files():
    text = (ROOT / "README.md").read_text()
    for row in readme_rows():
        assert row in text.splitlines(), f"README.md should have the line\n{row}"


def test_the_evidence_has_the_same_figures():
    """Tables of the evidence pages are written by hand, from the same files."""
    page = (ROOT / "docs" / "evidence" / "tables.md").read_text()
    for table, name in {"phishing": "Phishing", "activity": "Activity", "digits": "digits", "skin": "skin"}.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {name} |")][:1]
        cells = [cell.strip() for cell in row.split("|")[3:11:2]]
        budgets = ((8.0, 8.0), (1.0, 8.0), (8.0, 2.0), (8.0, 1.0))
        wanted = [released(table, *budget) for budget in budgets]
        assert [cell.split("/")[0] for cell in cells] == wanted, f"tables.md, {name}: {wanted}"


def test_the_landing_page_s_cards_have_the_figures_of_the_result_files():
    page = (ROOT / "docs" / "index.md").read_text()
    cards = re.findall(r"<div markdown>\*\*(.+?)\*\*", page)
    right = math.ceil(50 + 50 * advantages(1.0, 8.0)[0])
    wanted = [released("phishing", 1.0, 8.0), f"{right} of 100"]
    assert cards[:2] == wanted, f"docs/index.md should have the cards {wanted}"
    assert "training at epsilon 1 and a prediction at 8" in page


def test_an_older_figure_is_noticed():
    row = readme_rows()[-1]
    older = re.sub(r"\.(\d\d)\d \|$", lambda found: f".{found[1]}x |", row)
    assert older != row
    assert older not in (ROOT / "README.md").read_text()
