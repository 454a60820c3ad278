"""Fusion rows in schedule, plan and account: two parts of the training rows, and the larger epsilon of the two."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbmvfl.errors import PlanError
from pbmvfl.federation.serving import release_for
from pbmvfl.ledger.session_terms import SessionTerms
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import FUSION, GRAM, LOCAL, MEAN, PREDICTION
from pbmvfl.plan.schedule import Order, Phase, Schedule
from pbmvfl.privacy.accounting import PARTS_APART, epsilon_bound
from pbmvfl.privacy.units import Accounting, Adversary, Unit

SIZES: dict[str, Any] = {"num_parties": 3, "num_samples": 40, "num_classes": 2, "num_test_samples": 6}
FUSED: dict[str, Any] = {
    **SIZES,
    "training": "local",
    "labels": "parties",
    "head": "fixed",
    "mechanism": "none",
    "embedding_dim": 2,
    "activation": "none",
    "encoder": "linear",
    "batch_size": 16,
    "num_epochs": 3,
    "noise_multiplier": 6.0,
    "vote": "top",
    "prediction_mechanism": "krr",
    "prediction_symbols": 2,
    "prediction_response_epsilon": 2.0,
    "prediction_secure_aggregation": False,
    "num_fusion_samples": 10,
}


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    rows = draw(st.integers(2, 60))
    orders = st.sampled_from(list(Order))
    return Schedule(
        num_samples=rows,
        num_fusion_samples=draw(st.integers(1, rows - 1)),
        num_test_samples=draw(st.integers(1, 9)),
        batch_size=draw(st.integers(1, 70)),
        seed=draw(st.integers(0, 2**63 - 1)),
        phases=(
            Phase(kind=MEAN, passes=1, order=Order.AS_GIVEN),
            Phase(kind=LOCAL, passes=draw(st.integers(1, 3)), order=draw(orders)),
            Phase(kind=FUSION, passes=1, order=draw(orders)),
            Phase(kind=PREDICTION, passes=1, order=draw(orders)),
        ),
    )


# --- schedule ---


@given(schedules())
def test_every_training_row_is_in_one_part_and_in_every_pass_of_it(schedule: Schedule) -> None:
    walked: dict[str, Counter[int]] = {kind.name: Counter() for kind in schedule.kinds}
    for current in schedule:
        assert current.num_rows == schedule.num_rows(current.number) > 0
        assert len(set(current.rows.tolist())) == current.num_rows
        walked[current.kind.name].update(current.rows.tolist())
    network, fused = set(walked["local"]), set(walked["fusion"])
    assert network | fused == set(range(schedule.num_samples))
    assert not network & fused
    assert len(fused) == schedule.num_fusion_samples
    assert set(walked["mean"]) == network
    assert set(walked["prediction"]) == set(range(schedule.num_test_samples))
    for use in schedule.uses():
        counts = walked[use.kind.name]
        assert set(counts.values()) == {use.updates if use.kind.updates else use.releases}
        assert use.total_releases == (sum(counts.values()) if use.kind.releases else 0)
        assert schedule.part_of(use.kind).tolist() == sorted(counts)
        assert schedule.size_of_part(use.kind) == len(counts)
    assert Schedule.from_dict(schedule.to_dict()) == schedule


@given(schedules(), st.data())
def test_uses_between_two_rounds_are_those_of_a_walk(schedule: Schedule, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(schedule)))
    until = data.draw(st.integers(first, len(schedule)))
    counts: dict[str, Counter[int]] = {kind.name: Counter() for kind in schedule.kinds}
    for number in range(first, until):
        counts[schedule.kind(number).name].update(schedule[number].rows.tolist())
    for use in schedule.uses([(first, until)]):
        most = max(counts[use.kind.name].values(), default=0)
        assert max(use.releases, use.updates) == most
    total = schedule.total_uses(first, until)
    assert {kind.name: sum(counts[kind.name].values()) for kind in schedule.kinds} == {
        kind.name: count for kind, count in total.items()
    }


def test_other_seeds_make_other_fusion_rows_and_no_order_moves_them() -> None:
    parts = {seed: Plan.of(**FUSED, seed=seed).schedule.part_of(FUSION).tolist() for seed in range(5)}
    assert len(set(map(tuple, parts.values()))) == 5
    again = Plan.of(**{**FUSED, "batch_size": 7, "num_epochs": 9}, seed=3)
    assert again.schedule.part_of(FUSION).tolist() == parts[3]


def test_checkpoints_belong_after_epochs_and_after_fusion_rounds() -> None:
    schedule = Plan.of(**{**FUSED, "batch_size": 4, "num_epochs": 1, "evaluation": "released"}).schedule
    kinds = [schedule.kind(number).name for number in range(len(schedule))]
    assert kinds == ["local"] * 8 + ["fusion"] * 3 + ["prediction"] * 2
    assert [number for number in range(13) if schedule.may_keep(number)] == [7, 8, 9, 10]
    assert (schedule.trained_at, schedule.settled_at) == (8, 11)


# --- plan ---


def test_plans_without_fusion_rows_say_nothing_of_them() -> None:
    plan = Plan.of(**SIZES)
    assert "fusion" not in plan.to_json()
    assert "fusion" not in SessionTerms.of(plan, public_start=True).to_json()
    fused = Plan.of(**FUSED)
    for again in (Plan.from_json(fused.to_json()), Plan.of(**fused.flat()), fused.replace()):
        assert again == fused
        assert again.hash == fused.hash
    terms = SessionTerms.of(fused, public_start=True)
    assert SessionTerms.from_json(terms.to_json()) == terms


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_fusion_samples": 40}, r"num_fusion_samples=40 must be in 0\.\.39"),
        ({"head": "trained"}, "head=fixed"),
        ({"encoder": "resnet18-batchnorm", "noise_multiplier": 0.0}, "an encoder that couples no rows"),
        (
            {"num_epochs": None, "training": None, "phases": (Phase(kind=LOCAL, passes=1),)},
            "num_fusion_samples=10 with 0 phases of fusion rounds",
        ),
        (
            {
                "num_epochs": None,
                "training": None,
                "phases": (Phase(kind=FUSION, passes=1), Phase(kind=LOCAL, passes=1)),
            },
            "they release what networks end with",
        ),
        (
            {
                "num_epochs": None,
                "training": None,
                "phases": (
                    Phase(kind=LOCAL, passes=1),
                    Phase(kind=PREDICTION, passes=1),
                    Phase(kind=FUSION, passes=1),
                ),
            },
            "predictions before fusion rounds",
        ),
    ],
)
def test_fusion_rows_that_a_plan_cannot_have_are_refused(changes: dict[str, Any], words: str) -> None:
    values = {name: value for name, value in {**FUSED, **changes}.items() if value is not None}
    with pytest.raises(PlanError, match=words):
        Plan.of(**{**values, **({"vote": "raw"} if changes.get("head") else {})})


# --- account ---


def epsilon(plan: Plan, unit: Unit = Unit.CELL, adversary: Adversary | None = None, **choices: Any) -> float:
    run = plan.training_run().of_split("train")
    return epsilon_bound(run, unit, Accounting.STRICT, adversary or Adversary(), delta=1e-5, **choices).epsilon


@pytest.mark.parametrize("unit", [Unit.CELL, Unit.RECORD])
@pytest.mark.parametrize("colluding", [0, 1])
def test_a_training_row_pays_the_larger_part_and_not_both(unit: Unit, colluding: int) -> None:
    against = Adversary(colluding_parties=colluding)
    of_updates = epsilon(
        Plan.of(**{**FUSED, "num_fusion_samples": 0, "vote": "raw", "prediction_embedding_dim": 2}), unit, against
    )
    honest = 3 - colluding if unit is Unit.RECORD else 1
    for response in (0.5, 2.0, 8.0):
        plan = Plan.of(**{**FUSED, "prediction_response_epsilon": response})
        assert epsilon(plan, unit, against) == pytest.approx(max(of_updates, honest * response), rel=2e-3)


def test_a_row_that_trains_and_is_predicted_pays_its_part_and_the_prediction() -> None:
    plan = Plan.of(**{**FUSED, "evaluation": "released", "noise_multiplier": 1000.0})
    both = epsilon_bound(plan.training_run().of_one_row(), Unit.CELL, Accounting.STRICT, delta=1e-5).epsilon
    assert both == pytest.approx(4.0, rel=1e-3)  # a fusion row that is predicted: two releases of 2
    predicted = plan.training_run().of_split("test")
    assert epsilon_bound(predicted, Unit.CELL, Accounting.STRICT, delta=1e-5).epsilon == pytest.approx(2.0, rel=1e-3)


def test_a_party_pays_for_every_fusion_row() -> None:
    few, many = (Plan.of(**{**FUSED, "num_fusion_samples": rows}).training_run() for rows in (5, 20))
    found = [epsilon_bound(run, Unit.PARTY, Accounting.STRICT, delta=1e-5).epsilon for run in (few, many)]
    assert found[1] == pytest.approx(4 * found[0], rel=0.05)


def test_steps_without_noise_make_every_release_one_about_every_row() -> None:
    plain = Plan.of(**{**FUSED, "noise_multiplier": 0.0})
    assert epsilon(plain) == pytest.approx(10 * 2.0, rel=0.05)


def test_the_table_says_that_parts_are_apart() -> None:
    table = Plan.of(**FUSED).privacy()
    assert PARTS_APART in table.conditions
    assert "a public draw puts each training row into one part" in str(table)
    assert PARTS_APART not in Plan.of(**{**FUSED, "num_fusion_samples": 0, "vote": "raw"}).privacy().conditions


# --- budgets ---

BUDGET: dict[str, Any] = {"num_parties": 3, "num_samples": 5000, "num_classes": 2, "columns": 4}


@pytest.mark.parametrize(
    ("choices", "fused"),
    [
        ({"epsilon": 8.0}, True),
        ({"epsilon": 8.0, "prediction_epsilon": 2.0, "num_test_samples": 10}, True),
        ({"epsilon": 1.0, "prediction_epsilon": 1.0, "num_test_samples": 10}, True),
        ({"epsilon": 1.0}, False),  # later rows may cost 8 each: more than a fusion row has
        ({"epsilon": 1.0, "prediction_epsilon": 4.0, "num_test_samples": 10}, False),
        ({"epsilon": 8.0, "prediction_epsilon": 4.0, "num_test_samples": 10, "same_rows": True}, True),
        ({"epsilon": 8.0, "prediction_epsilon": 6.0, "num_test_samples": 10, "same_rows": True}, False),
        ({"epsilon": 8.0, "num_samples": 60}, False),  # too few rows to learn from
        ({"epsilon": 8.0, "serving_epsilon": None}, False),
    ],
    ids=str,
)
def test_fusion_rows_are_planned_where_the_budget_covers_their_release(choices: dict[str, Any], fused: bool) -> None:
    plan = Plan.for_budget(**{**BUDGET, **choices})
    assert (plan.num_fusion_samples > 0) is fused
    assert (FUSION in plan.schedule.kinds) is fused
    assert plan.schedule.rounds_per_pass(LOCAL) == 1
    run = plan.training_run()
    run = run.of_one_row() if choices.get("same_rows") else run.of_split("train")
    delta = min(1e-5, 0.1 / plan.num_samples)
    spent = epsilon_bound(run, Unit.CELL, Accounting.STRICT, delta=delta).epsilon
    assert 0.99 * choices["epsilon"] < spent <= choices["epsilon"]


@pytest.mark.parametrize(
    "choices",
    [
        {"epsilon": 2.0, "serving_epsilon": 4.0},  # above the budget of a fusion row
        {"epsilon": 8.0, "serving_epsilon": 4.0, "num_samples": 60},  # too few rows for a fusion model
        {"epsilon": 8.0, "serving_epsilon": 2.0},
        {"epsilon": 2.0, "serving_epsilon": 4.0, "unit": "record"},
    ],
    ids=str,
)
def test_a_later_prediction_costs_what_the_plan_was_made_for(choices: dict[str, Any]) -> None:
    """Pure epsilon of the law itself: odds of a symbol, or the ratio of a Laplace law over the range of a vote."""
    plan = Plan.for_budget(**{**BUDGET, **choices})
    release = release_for(plan, epsilon=None, delta=1e-6, has_fusion=plan.num_fusion_samples > 0)
    law: Any = release.mechanism
    cost = law.response_epsilon if hasattr(law, "response_epsilon") else 2 * law.levels / law.scale
    cells = plan.num_parties if choices.get("unit") == "record" else 1
    assert 0.98 * choices["serving_epsilon"] < cells * cost <= choices["serving_epsilon"]
    assert Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize("choices", [{"epsilon": 2.0}, {"epsilon": 8.0, "num_samples": 60}], ids=str)
def test_where_a_record_is_protected_later_predictions_cost_eight_for_a_record(choices: dict[str, Any]) -> None:
    """Without fusion rows, too: a record's prediction by randomised response is one symbol of each of three parties."""
    plan = Plan.for_budget(**{**BUDGET, "unit": "record", **choices})
    assert plan.num_fusion_samples == 0
    release = release_for(plan, epsilon=None, delta=1e-6, has_fusion=False)
    law: Any = release.mechanism
    cost = law.response_epsilon if hasattr(law, "response_epsilon") else 2 * law.levels / law.scale
    assert 7.98 < 3 * cost <= 8
    assert plan.evaluation == "simulator"  # nothing is released until the model is asked
    assert plan.schedule.rounds_per_pass(PREDICTION) == 0


def test_where_no_epsilon_of_predictions_is_given_they_cost_eight() -> None:
    for choices in ({}, {"serving_epsilon": 8.0}, {"serving_epsilon": None}):
        plan = Plan.for_budget(**{**BUDGET, "epsilon": 1.0, **choices})
        assert plan.prediction is None  # as plans of earlier versions
        release = release_for(plan, epsilon=None, delta=1e-6, has_fusion=False)
        assert 7.98 < release.mechanism.response_epsilon <= 8  # type: ignore[attr-defined]


def test_a_prediction_has_no_epsilon_of_a_whole_party() -> None:
    plan = Plan.for_budget(**{**BUDGET, "epsilon": 1.0})
    with pytest.raises(PlanError, match="unit='party'; permitted: cell, record"):
        release_for(plan, epsilon=8.0, delta=1e-6, unit="party", has_fusion=False)


def test_an_epsilon_of_predictions_that_nothing_can_keep_is_refused_before_training() -> None:
    for wrong in (-1.0, 0.0, 1e-7, math.nan):
        with pytest.raises(PlanError, match="prediction_epsilon"):
            Plan.for_budget(**{**BUDGET, "epsilon": 8.0, "serving_epsilon": wrong})
    with pytest.raises(PlanError, match="serving_epsilon=4 goes with algorithm=staged"):
        Plan.for_budget(**{**BUDGET, "epsilon": 8.0, "serving_epsilon": 4.0, "algorithm": "pbm"})


def test_statistics_are_scaled_by_the_rows_that_they_are_of() -> None:
    plan = Plan.for_budget(**{**BUDGET, "epsilon": 8.0})
    for kind in (MEAN, GRAM, LOCAL):
        assert plan.schedule.rows_per_round(kind) == plan.num_network_samples == plan.batch_size
    assert plan.num_network_samples + plan.num_fusion_samples == 5000
    assert np.array_equal(plan.schedule[0].rows, plan.schedule.part_of(MEAN))
