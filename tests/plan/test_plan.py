"""The plan: bad values are refused by name and range, and every field is part of what the parties sign."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbmvfl.errors import PlanError
from pbmvfl.mechanisms import MECHANISMS, LocalGaussian, PoissonBinomial
from pbmvfl.plan.flat_names import plan_settings
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import JOINT, PREDICTION
from pbmvfl.plan.schedule import Order, Phase

GOOD = {"num_parties": 3, "num_samples": 100, "num_classes": 4, "num_test_samples": 20, "num_trials": 8}

#: field -> (values that must be refused, what the message must say is permitted)
WHOLE = [1.0, 1.5, "3", None, True, math.nan]
NUMBER = ["0.1", None, True, math.nan, math.inf, -math.inf]
BAD = {
    "num_parties": ([1, 0, -1, *WHOLE], "at least 2"),
    "num_samples": ([0, -5, *WHOLE], "at least 1"),
    "num_classes": ([1, 0, *WHOLE], "at least 2"),
    "num_test_samples": ([-1, *WHOLE], "at least 0"),
    "embedding_dim": ([0, -1, *WHOLE], "at least 1"),
    "bound": ([0, 0.0, -1.0, 1e-7, 1e7, *NUMBER], r"\[1e-06, 1e\+06\]|finite number"),
    "mechanism": (["PBM", "gauss", "", None, 3, []], "pbm, laplace, krr, ldp, none"),
    "num_trials": ([0, -1, *WHOLE], "at least 1"),
    "beta": ([0, -0.1, 0.4921876, 1, *NUMBER], r"\[1/128, 63/128\]|finite number"),
    "secure_aggregation": (["yes", 1, 0], "True or False"),
    "num_epochs": ([0, -1, *WHOLE], "at least 1"),
    "batch_size": ([0, -1, *WHOLE], "at least 1"),
    "learning_rate": ([0, -0.1, *NUMBER], "above 0|finite number"),
    "optimizer": (["sgdm", None, 1], "sgd, adam"),
    "momentum": ([-0.1, 1, 1.5, *NUMBER], r"\[0, 1\)|finite number"),
    "noise_multiplier": ([-1, -1e-9, *NUMBER], "0 .no weight noise. or above|finite number"),
    "clip_norm": ([0, -1.0, *NUMBER], "above 0|finite number"),
    "gradient_codec": (["fp8", None, 32], "float32, bfloat16, int8"),
    "gradient_bound": ([0, -1.0, 1e7, *NUMBER], r"above 0 and at most 1e\+06|finite number"),
    "evaluation": (["some", None, True], "simulator, released, none"),
    "encoder": ([None, 5, ""], "name of an encoder"),
    "activation": (["relu", None, 1], "tanh, hardtanh, softsign"),
    "seed": ([-1, 2**63, *WHOLE], r"0\.\.2\^63-1"),
    "training": (["alone", None, 1], "joint, local"),
    "nesterov": (["yes", 1], "True or False"),
    "averaging": ([-0.1, 1, 1.5, *NUMBER], r"\[0, 1\)|finite number"),
    "labels": (["everybody", None, 1], "server, parties"),
    "loss": (["hinge", None, 1], "cross-entropy, squared"),
    "head": (["mlp", None, 1], "trained, fixed"),
    "label_epsilon": ([0, 0.009, 16.5, math.nan, "4", True], "number|16"),
    "vote": (["majority", None, 1], "raw, margin, shares"),
    "vote_gain": ([0, -1.0, 1e7, *NUMBER], r"\[1e-06, 1e\+06\]|finite number"),
    "vote_grades": ([0, 2, 257, *WHOLE], "at least 1|at most 1"),
    "num_fusion_samples": ([-1, *WHOLE], "at least 0"),
    "fusion": (["mlp", None, 1], "auto, sum, logistic, boosted"),
    "features": (["all", None, 1], "columns, pairs"),
    "column_values": ([1, 17, *WHOLE], "at least 2|at most 16"),
    "shapes": (["2x4", "2u1", "1c", None, 1], "such as 2u16|features=shapes|text"),
    "start": (["ones", None, 1], "random, zero"),
    "preparation": (["scale", None, 1], "none, whiten"),
    "mean_noise": ([-1.0, *NUMBER], "above 0|finite number"),
    "mean_clip": ([0, -1.0, *NUMBER], "must be in|finite number"),
    "gram_noise": ([-1.0, *NUMBER], "above 0|finite number"),
    "gram_clip": ([0, -1.0, *NUMBER], "must be in|finite number"),
    "ridge": ([0, -1.0, *NUMBER], "must be in|finite number"),
}

#: field -> another permitted value
OTHER = {
    "num_parties": 4,
    "num_samples": 101,
    "num_classes": 5,
    "num_test_samples": 21,
    "embedding_dim": 17,
    "bound": 1.5,
    "mechanism": "ldp",
    "num_trials": 9,
    "beta": 0.2,
    "secure_aggregation": False,
    "num_epochs": 11,
    "batch_size": 99,
    "learning_rate": 0.02,
    "optimizer": "adam",
    "momentum": 0.5,
    "noise_multiplier": 1.5,
    "clip_norm": 2.0,
    "gradient_codec": "int8",
    "gradient_bound": 10.0,
    "evaluation": "released",
    "encoder": "linear",
    "activation": "softsign",
    "seed": 1,
    "training": "local",
    "nesterov": True,
    "averaging": 0.5,
    "labels": "parties",
    "loss": "squared",
    "head": "fixed",
    "label_epsilon": 2.0,
    "vote": "top",
    "vote_gain": 2.0,
    "vote_grades": 2,
    "num_fusion_samples": 5,
    "fusion": "sum",
    "features": "pairs",
    "column_values": 4,
    "shapes": "2u4;1c;1c",
    "start": "zero",
    "preparation": "whiten",
    "mean_noise": 3.0,
    "mean_clip": 2.0,
    "gram_noise": 4.0,
    "gram_clip": 3.0,
    "ridge": 0.25,
}
VOTING = {"embedding_dim": 4, "num_classes": 4, "head": "fixed", "prediction_mechanism": "none"}
#: field -> what it needs beside it
NEEDS = {
    "training": {"labels": "parties", "embedding_dim": 4, "num_classes": 4},
    "nesterov": {"momentum": 0.5},
    "head": {"embedding_dim": 4, "num_classes": 4},
    "preparation": {"mean_noise": 1.0, "gram_noise": 1.0},
    "shapes": {"features": "shapes", "shapes": "1c;1c;1c"},
    "vote": {**VOTING, "vote": "raw"},
    "vote_grades": {**VOTING, "vote": "top"},
    "num_fusion_samples": VOTING,
}


def test_the_tables_of_these_tests_name_every_field():
    # Numbers that only other mechanisms have are in the suites of those.
    others = {own for each in MECHANISMS.values() for own in each.own_settings()} - set(PoissonBinomial.own_settings())
    # A band needs phases of its own: tests/training/test_correlated.py. An algorithm is derived from the rounds:
    # tests/plan/test_algorithm.py.
    others |= {"noise_band", "algorithm"}
    assert set(BAD) == set(OTHER) == set(plan_settings()) - others == set(Plan.of(**GOOD).flat())


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (values, _) in BAD.items() for value in values], ids=str
)
def test_a_bad_value_is_refused_with_its_name_its_value_and_what_is_permitted(name, value):
    with pytest.raises(PlanError) as refusal:
        Plan.of(**{**GOOD, name: value})
    message = str(refusal.value)
    assert message.startswith(f"{name}=")
    shown = f"{value:g}" if isinstance(value, float) else repr(value)
    assert shown in message or repr(value) in message
    with pytest.raises(PlanError, match=BAD[name][1]):
        Plan.of(**{**GOOD, name: value})


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"beta": 1 / 129}, r"beta=.* must be in \[1/128, 63/128\]: .*below 1/128.*lower num_trials"),
        ({"num_trials": 21846}, "num_trials.num_parties=21846.3=65538 must be at most 65535"),
        ({"num_trials": 10**8}, "num_trials=100000000 must be at most 32767, and at most 65535 divided by the number"),
        (
            {"noise_multiplier": 1.5, "encoder": "resnet18-batchnorm"},
            "noise_multiplier=1.5 with encoder=resnet18-batchnorm.*use encoder=resnet18, .*or noise_multiplier=0",
        ),
        ({"num_trials": 1, "num_parties": 65535}, "num_parties=65535 must be at most 65534"),
        ({"momentum": 0.5, "optimizer": "adam"}, "momentum=0.5 goes with optimizer=sgd"),
        ({"evaluation": "released", "num_test_samples": 0}, "num_test_samples of at least 1"),
        ({"mechanism": "none", "secure_aggregation": True}, "secure_aggregation=True with mechanism=none"),
        ({"mechanism": "ldp", "secure_aggregation": True}, "secure_aggregation=True with mechanism=ldp"),
        ({"activation": "relu", "bound": 2.0}, r"with relu the output can leave \[-C, C\]"),
    ],
)
def test_values_that_contradict_each_other_are_refused(choices, words):
    with pytest.raises(PlanError, match=words):
        Plan.of(**{**GOOD, **choices})


@pytest.mark.parametrize(
    "choices",
    [
        {"activation": "relu", "bound": "wide"},
        {"learning_rate": 10**400},
        {"bound": 10**400},
        {"num_epochs": 2**70},
        {"num_samples": 2**70},
        {"embedding_dim": 2**70},
    ],
    ids=str,
)
def test_bad_values_never_raise_anything_but_plan_errors(choices):
    with pytest.raises(PlanError):
        Plan.of(**{**GOOD, **choices})


@pytest.mark.parametrize(
    "choices",
    [
        {"num_samples": 2**33, "batch_size": 1, "num_epochs": 1},
        {"num_samples": 2**20, "batch_size": 2**20, "embedding_dim": 2**12},
    ],
    ids=["more rounds than a header can number", "a gradient longer than a header can say"],
)
def test_a_plan_that_does_not_fit_the_wire_is_refused_before_it_runs(choices):
    with pytest.raises(PlanError):
        Plan.of(**{**GOOD, **choices})


@pytest.mark.parametrize(
    "choices",
    [
        {"beta": 1 / 128},
        {"beta": 0.25},
        {"num_trials": 21845},
        {"num_trials": 32767, "num_parties": 2},
        {"seed": 2**63 - 1},
        {"noise_multiplier": 0.0, "encoder": "resnet18-batchnorm"},
        {"noise_multiplier": 1.5, "encoder": "resnet18"},
    ],
)
def test_values_at_the_ends_of_their_ranges_are_permitted(choices):
    assert Plan.of(**{**GOOD, **choices})


@pytest.mark.parametrize("name", ["beta", "mechanism"])
def test_a_plan_cannot_be_changed(name):
    plan = Plan.of(**GOOD)
    with pytest.raises(AttributeError):
        setattr(plan, name, OTHER[name])
    with pytest.raises(AttributeError):
        delattr(plan, name)
    assert plan == Plan.of(**GOOD)


@pytest.mark.parametrize("name", ["optimizer", "gradient_codec", "evaluation", "activation"])
def test_a_choice_given_by_its_spelling_reads_as_its_enum_also_in_a_copy(name):
    plan = Plan.of(**{**GOOD, name: OTHER[name]})
    default = getattr(Plan.of(**GOOD), name)
    for one in (plan, pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert one == plan
        assert getattr(one, name) is type(default)(OTHER[name])
    assert default.value != OTHER[name]


def test_a_mechanism_is_the_object_that_its_name_stands_for_also_in_a_copy():
    plan = Plan.of(**GOOD, mechanism="ldp")
    for one in (plan, pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert one == plan
        assert type(one.release) is LocalGaussian
        assert one.mechanism == "ldp"
    assert type(Plan.of(**GOOD).release) is PoissonBinomial


@pytest.mark.parametrize("name", OTHER)
def test_the_hash_changes_with_every_field(name):
    plan = Plan.of(**{**GOOD, **NEEDS.get(name, {})})
    changes = {name: OTHER[name]}
    if name == "mechanism":  # off in both, so that the mechanism alone changes
        plan, changes = plan.replace(secure_aggregation=False), {"mechanism": "ldp"}
    other = plan.replace(**changes)
    assert getattr(other, name) != getattr(plan, name)
    before, after = plan.flat(), other.flat()
    assert {each for each in before | after if before.get(each) != after.get(each)} == {name}
    assert other.hash != plan.hash
    assert len(plan.hash) == 32


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"bound": 1}, {"bound": 1.0}),
        ({"mechanism": "pbm"}, {"secure_aggregation": True}),
        ({"momentum": 0.0}, {"momentum": -0.0}),
    ],
)
def test_equal_plans_have_equal_hashes(first, second):
    one, other = Plan.of(**{**GOOD, **first}), Plan.of(**{**GOOD, **second})
    assert one == other
    assert one.hash == other.hash


@given(
    num_parties=st.integers(2, 50),
    num_trials=st.integers(1, 1000),
    beta=st.floats(1 / 128, 1 / 4),
    bound=st.floats(1e-3, 1e3),
    learning_rate=st.floats(1e-9, 1e3),
    momentum=st.floats(0, 0.99),
    seed=st.integers(0, 2**63 - 1),
    mechanism=st.sampled_from(["pbm", "ldp", "none"]),
    codec=st.sampled_from(["float32", "bfloat16", "int8"]),
)
def test_plans_survive_json(num_parties, num_trials, beta, bound, learning_rate, momentum, seed, mechanism, codec):
    plan = Plan.of(
        num_parties=num_parties,
        num_samples=10,
        num_classes=2,
        num_trials=num_trials,
        beta=beta,
        bound=bound,
        learning_rate=learning_rate,
        momentum=momentum,
        seed=seed,
        mechanism=mechanism,
        gradient_codec=codec,
    )
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash
    assert json.loads(plan.to_json()) == plan.to_dict()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "JSON object"),
        ('{"num_parties": 3}', "lacks num_classes, num_samples"),
        (json.dumps({**GOOD, "betta": 0.1}), "unknown plan field 'betta'"),
    ],
)
def test_text_that_is_not_a_plan_is_refused(text, words):
    with pytest.raises(PlanError, match=words):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("betta", "unknown plan field 'betta'; did you mean beta?"),
        ("learning_rat", "did you mean learning_rate?"),
        ("nope", "unknown plan field 'nope'; fields are activation, algorithm, averaging, batch_size, beta, "),
    ],
)
def test_a_field_that_is_not_one_is_refused_with_the_nearest_that_is(name, words):
    for make in (Plan.of(**GOOD).replace, lambda **changes: Plan.from_dict({**GOOD, **changes})):
        with pytest.raises(PlanError, match=re.escape(words)):
            make(**{name: 1})


@given(beta=st.floats(1 / 128, 1 / 4))
def test_beta_in_units_of_1_65536_is_rounded_down(beta):
    beta_16 = Plan.of(**GOOD, beta=beta).beta_16
    assert Fraction(beta_16, 65536) <= Fraction(beta) < Fraction(beta_16 + 1, 65536)


def test_secure_aggregation_is_on_for_pbm_and_off_for_numbers_in_clear():
    assert Plan.of(**GOOD).secure_aggregation is True
    assert Plan.of(**GOOD, mechanism="none").secure_aggregation is False
    assert Plan.of(**GOOD, mechanism="ldp").secure_aggregation is False
    assert Plan.of(**GOOD, secure_aggregation=False).secure_aggregation is False


@given(num_samples=st.integers(1, 500), batch_size=st.integers(1, 600), num_epochs=st.integers(1, 9))
def test_round_counts_are_exact(num_samples, batch_size, num_epochs):
    plan = Plan.of(**{**GOOD, "num_samples": num_samples}, batch_size=batch_size, num_epochs=num_epochs)
    schedule, predicting = plan.schedule, plan.replace(evaluation="released").schedule
    assert schedule.rounds_per_pass(JOINT) == math.ceil(Fraction(num_samples, batch_size))
    assert schedule.num_rounds(JOINT) == len(schedule) == num_epochs * schedule.rounds_per_pass(JOINT)
    assert schedule.num_rounds(PREDICTION) == 0
    assert predicting.num_rounds(PREDICTION) == math.ceil(Fraction(20, batch_size))
    assert len(predicting) == len(schedule) + predicting.num_rounds(PREDICTION)


# --- phases, and predictions by another mechanism ---

PHASES = (Phase(kind=JOINT, passes=2), Phase(kind=PREDICTION, passes=3, order=Order.AS_GIVEN))


@pytest.mark.parametrize(
    "choices",
    [
        {"phases": PHASES},
        {"phases": (*PHASES, *PHASES)},
        {"phases": PHASES, "evaluation": "released"},
        {"evaluation": "released", "prediction_beta": 0.1},
        {"evaluation": "released", "prediction_mechanism": "none"},
        {"phases": PHASES, "mechanism": "none", "prediction_mechanism": "pbm", "prediction_num_trials": 3},
    ],
    ids=str,
)
def test_unusual_plans_survive_json_and_flat_names(choices):
    plan = Plan.of(**{**GOOD, **choices})
    for again in (Plan.from_json(plan.to_json()), Plan.of(**plan.flat()), plan.replace(seed=1).replace(seed=0)):
        assert again == plan
        assert again.hash == plan.hash
    assert plan.hash != Plan.of(**GOOD, evaluation=plan.evaluation).hash


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"phases": ()}, "at least one phase"),
        ({"phases": PHASES, "num_epochs": 2}, "num_epochs and phases both"),
        ({"phases": PHASES, "num_test_samples": 0}, "prediction rounds need rows: num_test_samples"),
        ({"prediction_bound": 2.0}, "one network makes both"),
        ({"prediction_embedding_dim": 3}, "one network makes both"),
        ({"prediction_beta": 1.0}, "beta=1 must be in"),
        ({"prediction_mechanism": "gauss"}, "mechanism='gauss' is not one of"),
        ({"prediction_seed": 3}, "unknown plan field 'prediction_seed'"),
    ],
    ids=str,
)
def test_phases_and_predictions_that_cannot_be_are_refused(choices, words):
    with pytest.raises(PlanError, match=words):
        Plan.of(**{**GOOD, **choices})


def test_help_of_a_plan_says_what_every_name_means():
    for each in plan_settings().values():
        assert f"    {each.name}" in (Plan.__doc__ or "")
        assert each.help in (Plan.__doc__ or "")
