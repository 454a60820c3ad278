"""What a whole federation sends, and what it says that it cost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbmvfl.federation.federation import Federation
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.events import NO_SECURE_SUM
from pbmvfl.privacy.table import SEEDED_NOISE
from pbmvfl.privacy.units import Adversary
from support.federation_runs import Killed, fitted, killer
from support.known_randomness import known_federation

# --- traffic ---


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"num_trials": 1, "embedding_dim": 5},
        {"num_trials": 21, "gradient_codec": "int8"},
        {"num_trials": 22, "gradient_codec": "bfloat16", "evaluation": "released"},
        {"num_trials": 21845, "batch_size": 1, "num_epochs": 1},
        {"batch_size": 37},
        {"batch_size": 1000, "evaluation": "released"},
    ],
)
def test_measured_traffic_is_what_the_plan_predicts_and_what_k_bits_a_value_cost(choices, data, make_plan):
    plan = make_plan(data, **choices)
    result, wire = fitted(plan, data)
    assert result.traffic == plan.traffic()
    assert result.traffic.total == sum(len(message) for *_, message in wire.messages)
    bits = math.ceil(math.log2(plan.num_trials * plan.num_parties + 1))
    sizes = [min(plan.batch_size, plan.num_samples - at) for at in range(0, plan.num_samples, plan.batch_size)]
    sizes *= plan.num_epochs
    if plan.evaluation == "released":
        sizes += [
            min(plan.batch_size, plan.num_test_samples - at) for at in range(0, plan.num_test_samples, plan.batch_size)
        ]
    payload = plan.num_parties * sum(math.ceil(bits * rows * plan.embedding_dim / 8) for rows in sizes)
    header, rest = divmod(result.traffic.bytes_up - payload, plan.num_parties * len(sizes))
    assert rest == 0
    assert 0 < header <= 48
    assert result.traffic.rounds == len(sizes)


@pytest.mark.parametrize("choices", [{"mechanism": "none"}, {"mechanism": "ldp"}, {"secure_aggregation": False}])
def test_traffic_in_clear_is_what_the_plan_predicts(choices, data, make_plan):
    plan = make_plan(data, evaluation="released", **choices)
    result, wire = fitted(plan, data)
    assert result.traffic == plan.traffic()
    assert result.traffic.total == sum(len(message) for *_, message in wire.messages)


def test_the_int8_codec_cuts_the_bytes_down_at_least_3_2_times(make_data, make_plan):
    data = make_data(num_samples=300, num_parties=2)
    sizes = {"batch_size": 100, "embedding_dim": 16, "num_epochs": 1}
    down = {
        codec: fitted(make_plan(data, gradient_codec=codec, **sizes), data)[0].traffic.bytes_down
        for codec in ("float32", "int8")
    }
    assert down["float32"] >= 3.2 * down["int8"]


def test_the_int8_codec_cuts_the_bytes_down_of_the_activity_shape_at_least_3_2_times():
    sizes = {"num_parties": 5, "num_samples": 7352, "num_classes": 6, "embedding_dim": 16, "batch_size": 100}
    full, small = (Plan.of(gradient_codec=codec, **sizes).traffic().bytes_down for codec in ("float32", "int8"))
    assert full >= 3.2 * small


# --- privacy ---


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"evaluation": "released"},
        {"secure_aggregation": False, "evaluation": "released"},
        {"mechanism": "ldp"},
        {"mechanism": "none"},
    ],
)
def test_an_undisturbed_run_spends_what_its_plan_says(choices, data, make_plan):
    plan = make_plan(data, **choices)
    result, _ = fitted(plan, data)
    assert result.privacy() == plan.privacy()
    assert result.privacy(delta=1e-3) == plan.privacy(delta=1e-3) != plan.privacy()


def test_exact_embeddings_have_an_infinite_epsilon_for_everyone(data, make_plan):
    result, _ = fitted(make_plan(data, mechanism="none"), data)
    assert {row.epsilon for row in result.privacy().bounds} == {math.inf}
    assert {row["epsilon"] for row in result.to_dict()["privacy"]} == {"inf"}


def test_seeded_noise_has_an_infinite_epsilon_and_says_why(data, make_plan):
    result = known_federation(make_plan(data)).fit(data)
    assert {row.epsilon for row in result.privacy().bounds} == {math.inf}
    assert {row.conditions for row in result.privacy().bounds} == {(SEEDED_NOISE,)}
    assert any("seeded" in note for note in result.notes)
    assert all(math.isfinite(row.epsilon) for row in result.plan.privacy().of_columns)


def test_an_unseeded_resume_of_a_seeded_run_still_has_an_infinite_epsilon(data, make_plan, tmp_path):
    """The first session's noise is known whatever the second one draws."""
    plan = make_plan(data)
    with pytest.raises(Killed):
        known_federation(plan).fit(data, checkpoints=tmp_path, on_epoch=killer())
    result = Federation(plan).fit(data, checkpoints=tmp_path)
    assert {row.epsilon for row in result.privacy().bounds} == {math.inf}


@given(
    mechanism=st.sampled_from(["pbm", "ldp", "none"]),
    num_trials=st.integers(1, 200),
    beta=st.floats(1 / 128, 1 / 4),
    bound=st.floats(0.01, 100),
    num_parties=st.integers(2, 20),
    embedding_dim=st.integers(1, 4096),
)
def test_every_mechanism_names_the_event_that_the_account_charges(mechanism, **sizes):
    plan = Plan.of(
        num_samples=100, num_test_samples=7, num_classes=2, mechanism=mechanism, evaluation="released", **sizes
    )
    trials, beta, bound, parties = (sizes[name] for name in ("num_trials", "beta", "bound", "num_parties"))
    expected = {
        "pbm": {"event": "poisson-binomial", "num_trials": trials, "beta": beta, "secure_sum": True},
        "ldp": {"event": "local-gaussian", "variance": bound**2 * (2 * parties / (trials * beta**2)), "bound": bound},
        "none": {"event": "exact"},
    }[mechanism] | {"num_parties": parties, "embedding_dim": sizes["embedding_dim"]}
    assert plan.release.event.to_dict() == expected
    train, test = plan.training_run().activities
    assert train.release == test.release == plan.release.event
    assert (train.update, test.update) == (plan.update.event, None)


# --- without secure aggregation ---


def test_a_run_without_secure_aggregation_is_labelled_everywhere(data, make_plan):
    result, _ = fitted(make_plan(data, secure_aggregation=False, num_epochs=1), data)
    assert "sums not hidden" in result.plan.release.describe()
    assert result.to_dict()["plan"]["release"]["secure_aggregation"] is False
    assert all(NO_SECURE_SUM in row.conditions for row in result.privacy().of_columns)
    masked = result.plan.replace(secure_aggregation=True)
    assert "sums not hidden" not in masked.release.describe()
    assert all(NO_SECURE_SUM not in row.conditions for row in masked.privacy().of_columns)


def test_without_secure_aggregation_a_cell_has_only_its_own_noise(make_data, make_plan):
    data = make_data(num_parties=4)
    plan = make_plan(data, num_epochs=1)
    result, _ = fitted(plan.replace(secure_aggregation=False), data)
    others = plan.num_parties - 1
    alone = plan.privacy(adversaries=[Adversary(colluding_parties=others)])
    for accounting in ("paper", "strict"):
        own = alone.epsilon("cell", accounting, colluding_parties=others)
        assert result.privacy().epsilon("cell", accounting) == own
        assert own > plan.privacy().epsilon("cell", accounting)
