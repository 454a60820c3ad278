"""The planner's benchmark trains as the program's parties do, at the same epsilon, and chooses without test rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.planner import page
from benchmarks.planner.grid import EPSILONS, compared, grid, variations
from benchmarks.planner.tables import FAMILIES, HELD_OUT, LOOKED_AT, Recipe, Table, made
from benchmarks.planner.trials import Trial, measure, plan_of, summary

from pbmvfl.plan.round_kinds import Split
from pbmvfl.plan.shapes import parse_shapes
from pbmvfl.privacy.accounting import epsilon_bound
from pbmvfl.privacy.conversion import usual_delta
from pbmvfl.privacy.units import Accounting, Unit

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "planner.json"
SMALL = Recipe(kind="clinic", seed=5, rows=800, parties=2, columns=3, rare=0.3)


@pytest.fixture(scope="module")
def table() -> Table:
    return made(SMALL, hold_out_rows=200, test_rows=300)


def test_a_trial_is_what_the_program_does_within_a_budget():
    """A table that is easy at epsilon 8. At .001 its noise is some thousand times what is learned."""
    trial = Trial(table="breast_cancer", epsilon=8.0, seed=1, judged=True)
    assert measure(trial)["accuracy"] > 0.85
    assert measure(replace(trial, epsilon=0.001))["accuracy"] < 0.85


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_every_setting_of_the_grid_is_within_the_same_epsilon(epsilon, table):
    tried = grid(table)
    varied = [each for best in (tried[0], tried[-1]) for each in variations(table, best, epsilon)]
    for choices in (*tried[::9], *varied, {}):
        plan = plan_of(table, epsilon, choices, predicted=300)
        run = plan.training_run().of_split(Split.TRAIN)
        spent = epsilon_bound(run, Unit.CELL, Accounting.STRICT, delta=usual_delta(table.num_samples)).epsilon
        assert epsilon * 0.999 <= spent <= epsilon


def test_planned_settings_are_the_planner_s_for_these_sizes_and_kinds(table):
    assert table.kinds == ("uuubwww", "uuubwww")
    plan = plan_of(table, 8.0, {}, predicted=300)
    assert {(each.num_columns, each.num_pairs) for each in parse_shapes(plan.shapes)} == {(7, 6)}
    assert plan.label_response is None
    assert plan.num_fusion_samples == 0, "so few rows of two classes have none"


def test_the_best_is_chosen_on_hold_out_rows_and_judged_on_others(table):
    """A runner that makes the third setting best where it is chosen, and notes what it was asked."""
    asked: list[Trial] = []

    def run(trials):
        asked.extend(trials)
        best = grid(table)[2]
        return [{"accuracy": 0.9 if each.choices == best else 0.5, "balanced": 0.5} for each in trials]

    found = compared(table, 1.0, run)
    assert found["best_settings"] == grid(table)[2]
    assert (found["best"]["accuracy"], found["planned"]["accuracy"]) == (0.9, 0.5)
    judged = {(each.seed, bool(each.choices)) for each in asked if each.judged}
    chosen = {each.seed for each in asked if not each.judged}
    assert {seed for seed, _ in judged} & chosen == set()
    assert len(judged) == 10
    assert all(each.choices for each in asked if not each.judged)


def test_means_and_deviations_are_those_of_the_runs():
    runs = [{"accuracy": each, "balanced": 0.5} for each in (0.6, 0.7, 0.8)]
    assert summary(runs) == {"accuracy": 0.7, "deviation": 0.1, "balanced": 0.5}


def test_the_families_share_no_generator_and_no_table():
    looked_at = {recipe.kind for recipe in LOOKED_AT}
    assert not looked_at & {recipe.kind for recipe in HELD_OUT}
    assert not set(FAMILIES["tuning"]) & set(FAMILIES["held-out"])
    assert len({*FAMILIES["tuning"], *FAMILIES["held-out"]}) == sum(map(len, FAMILIES.values()))


@pytest.mark.parametrize(
    "recipe", [replace(each, rows=300) for each in (*LOOKED_AT, *HELD_OUT)], ids=lambda each: each.name
)
def test_made_tables_are_the_same_every_time_and_within_range(recipe):
    one, other = (made(recipe, hold_out_rows=50, test_rows=60) for _ in range(2))
    assert [len(part) for part in (one.train_labels, one.hold_out_labels, one.test_labels)] == [300, 50, 60]
    for a, b in zip(one.train + one.test, other.train + other.test, strict=True):
        assert np.array_equal(a, b)
        assert a.dtype == np.float32
        assert np.abs(a).max() <= 1
    assert one.train_labels.max() < recipe.classes


def test_the_grid_is_of_the_promised_size_and_has_no_maps_that_are_too_wide(table):
    assert len({json.dumps(each) for each in grid(table)}) == 54
    wide = made(Recipe(kind="normal", seed=1, rows=40, parties=2, columns=40), hold_out_rows=5, test_rows=5)
    assert {each["features"] for each in grid(wide)} == {"columns", "shapes"}
    assert {parse_shapes(each["shapes"])[0].width for each in grid(wide) if "shapes" in each} == {160, 320}


# --- the page ---


def test_the_page_names_every_comparison_that_misses_a_goal():
    records = json.loads(RESULTS.read_text())
    losses = [page.loss(found) for found in records["compared"]]
    tables = {found["table"] for found in records["compared"]}
    assert tables == set(FAMILIES["held-out"])
    assert len(losses) == len(EPSILONS) * len(tables)
    assert np.median(losses) <= page.GOAL_MEDIAN
    assert max(losses) < 5.5
    text = (RESULTS.parent.parent.parent / "docs" / "evidence" / "planner.md").read_text()
    missed = " ".join(text[text.index("- goals:") : text.index("| said before training")].split())
    for found in records["compared"]:
        assert f"| {found['table']} |" in text
        named = f"{found['table']} at epsilon {found['epsilon']:g} " in missed
        assert named == (page.loss(found) > page.GOAL_WORST)


def test_the_page_is_made_from_results_and_keeps_what_people_wrote(tmp_path):
    found = {
        "table": "made",
        "epsilon": 8.0,
        "classes": 2,
        "majority": 0.5,
        "best": {"accuracy": 0.9, "deviation": 0.01, "balanced": 0.9},
        "planned": {"accuracy": 0.88, "deviation": 0.01, "balanced": 0.87},
        "planned_settings": {"map": "8 knots", "num_fusion_samples": 1200},
        "note": None,
        "seconds": 1.0,
    }
    (tmp_path / "evidence").mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "evidence" / "planner.md").write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    page.write({"compared": [found], "alone": []}, tmp_path)
    text = (tmp_path / "evidence" / "planner.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "| made | .500 | 8 | .900 ± .010 | .880 ± .010 | +2.0 | .900, .870 | 8 knots; 1,200 fusion rows |" in text
    assert "old" not in text
    assert (tmp_path / "images" / "planner.png").stat().st_size > 1000
    assert "lost 2.00 points on the median, 2.00 at the worst" in page.summary([found])
