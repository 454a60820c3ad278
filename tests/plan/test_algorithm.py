"""The two algorithms: chosen by one name everywhere, derived from a plan's rounds, and contradicted by nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pbmvfl.errors import PlanError
from pbmvfl.plan.flat_names import is_planned, plan_settings
from pbmvfl.plan.groups import Algorithm, Training
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import JOINT, LOCAL, PREDICTION
from pbmvfl.plan.schedule import Phase

SIZES = {"num_parties": 3, "num_samples": 2000, "num_classes": 2, "num_test_samples": 100}
BUDGET = {"epsilon": 8, **SIZES}
ALONE = {"labels": "parties", "embedding_dim": 2}
FROZEN = Path(__file__).parents[1] / "data" / "frozen-plans.json"


# --- what a plan's rounds are ---


def test_joint_rounds_are_pbm_whatever_their_mechanism_is():
    for mechanism in ("pbm", "laplace", "krr", "ldp", "none"):
        plan = Plan.of(**SIZES, mechanism=mechanism)
        assert (plan.algorithm, plan.training) == ("pbm", "joint")


def test_local_rounds_alone_are_staged_and_with_joint_ones_pbm():
    assert Plan.of(**SIZES, **ALONE, training="local").algorithm is Algorithm.STAGED
    mixed = (Phase(kind=LOCAL, passes=1), Phase(kind=JOINT, passes=1))
    assert Plan.of(**SIZES, **ALONE, phases=mixed).algorithm is Algorithm.PBM


@pytest.mark.parametrize(("head", "algorithm"), [("fixed", "staged"), ("trained", "pbm")])
def test_a_plan_that_only_predicts_has_the_algorithm_of_its_model(head, algorithm):
    phases = (Phase(kind=PREDICTION, passes=1),)
    plan = Plan.of(**SIZES, embedding_dim=2, head=head, phases=phases, model="0" * 64, evaluation="released")
    assert plan.algorithm == algorithm


def test_plans_from_before_the_name_have_one_and_are_written_as_before():
    """Their hashes are frozen in tests/frozen; here, that the name adds nothing to what is hashed."""
    for values in json.loads(FROZEN.read_text()).values():
        plan = Plan.from_dict(values)
        assert plan.algorithm.training is plan.training
        assert "algorithm" not in json.dumps(plan.to_dict())
        assert "algorithm" not in plan.flat()


# --- the choice ---


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_both_names_of_a_choice_make_the_same_plan(algorithm):
    named = Plan.of(**SIZES, **ALONE, algorithm=algorithm)
    assert named == Plan.of(**SIZES, **ALONE, training=algorithm.training)
    assert named == Plan.of(**SIZES, **ALONE, algorithm=str(algorithm), training=str(algorithm.training))
    assert named.algorithm is algorithm


def test_numbers_without_a_name_are_joint_rounds_as_they_always_were():
    assert Plan.of(**SIZES).algorithm is Algorithm.PBM


def test_a_plan_is_replaced_by_one_of_the_other_algorithm():
    plan = Plan.of(**SIZES, **ALONE)
    other = plan.replace(algorithm="staged")
    assert (other.algorithm, other.training) == (Algorithm.STAGED, Training.LOCAL)
    assert other.replace(algorithm="pbm") == plan


@pytest.mark.parametrize(
    ("choices", "algorithm"),
    [
        ({}, "staged"),
        ({"unit": "record"}, "staged"),
        ({"num_epochs": 3}, "staged"),
        ({"algorithm": "pbm"}, "pbm"),
        ({"training": "joint"}, "pbm"),
        ({"accounting": "paper"}, "pbm"),
        ({"accounting": "paper", "algorithm": "staged"}, "staged"),
        ({"unit": "party", "epsilon": 1e9}, "pbm"),
        ({"num_trials": 4}, "pbm"),
        ({"mechanism": "laplace"}, "pbm"),
        ({"encoder": "mlp"}, "pbm"),
    ],
    ids=str,
)
def test_a_budget_is_staged_unless_joint_rounds_are_named_or_needed(choices, algorithm):
    assert Plan.for_budget(**{**BUDGET, "columns": 4, **choices}).algorithm == algorithm


def test_the_paper_counts_a_staged_plan_as_the_strict_account_does():
    """No row is both released and learned from, so both ways plan the same noise."""
    strict, paper = (
        Plan.for_budget(**BUDGET, columns=4, algorithm="staged", accounting=counting)
        for counting in ("strict", "paper")
    )
    assert strict == paper


def test_pbm_under_a_strict_budget_keeps_it_with_noise_on_updates_and_releases():
    plan = Plan.for_budget(**BUDGET, algorithm="pbm", columns=4)
    assert (plan.mechanism, plan.secure_aggregation) == ("pbm", True)
    assert plan.noise_multiplier > 0
    assert 7.5 < plan.privacy(delta=1e-5).epsilon("cell", "strict") <= 8


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"algorithm": "vfl"}, "algorithm='vfl' is not one of pbm, staged"),
        ({"algorithm": "pbm", "training": "local"}, "algorithm=pbm has joint rounds, and training=local"),
        ({"algorithm": "staged", "unit": "party"}, "unit=party with algorithm=staged"),
        ({"algorithm": "staged", "mechanism": "pbm"}, "mechanism=pbm with algorithm=staged"),
        ({"algorithm": "staged", "beta": 0.1}, "beta=0.1 with algorithm=staged"),
        ({"algorithm": "staged", "scale": 4.0}, "scale=4.0 with algorithm=staged"),
        ({"algorithm": "staged", "labels": "server"}, "otherwise with algorithm=pbm"),
        ({"algorithm": "pbm", "prediction_epsilon": 4}, "goes with algorithm=staged"),
        ({"accounting": "paper", "prediction_epsilon": 4}, "goes with algorithm=staged"),
        ({"algorithm": "pbm", "mechanism": "none"}, "releases embeddings as they are"),
    ],
    ids=str,
)
def test_choices_that_contradict_the_algorithm_are_refused_in_words(choices, words):
    with pytest.raises(PlanError) as refused:
        Plan.for_budget(**{**BUDGET, "columns": 4, **choices})
    assert words in str(refused.value)


@pytest.mark.parametrize("name", ["algorithm", "training"])
def test_a_name_and_phases_are_refused_together(name):
    values = {"algorithm": "pbm", "training": "joint"}
    with pytest.raises(PlanError, match=f"{name} and phases both say which rounds there are"):
        Plan.of(**SIZES, phases=(Phase(kind=JOINT, passes=1),), **{name: values[name]})


# --- where the rest is planned ---


@pytest.mark.parametrize(
    ("choices", "planned"),
    [
        ({}, True),
        ({"algorithm": "pbm"}, True),
        ({"algorithm": "pbm", "num_epochs": 3}, True),
        ({"algorithm": "pbm", "num_trials": 4}, False),
        ({"algorithm": "staged", "num_trials": 4}, True),
        ({"num_epochs": 3}, False),
    ],
    ids=str,
)
def test_numbers_of_a_mechanism_say_themselves_what_is_spent(choices, planned):
    assert is_planned(choices) is planned


def test_data_and_an_algorithm_are_planned_within_the_usual_budget(make_data):
    data = make_data()
    for algorithm in Algorithm:
        plan = Plan.for_data(data, algorithm=algorithm)
        assert plan == Plan.for_budget(epsilon=8, data=data, algorithm=algorithm)
        assert plan.algorithm is algorithm


def test_the_name_stands_in_the_help_of_plans_with_both_values():
    said = plan_settings()["algorithm"].help
    assert all(f"{each} (" in said for each in Algorithm)
    assert "algorithm: staged (" in (Plan.__doc__ or "")
