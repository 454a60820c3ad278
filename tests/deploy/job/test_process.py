"""Warming up: it does what rounds of the plan do, and leaves no trace in the run, its randomness or on disk."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.deploy.job import process
from pbmvfl.deploy.job.process import tiny_plan, train_tiny, warm_up
from pbmvfl.errors import PlanError
from pbmvfl.federation.federation import Federation
from pbmvfl.federation.serving import release_for, serving_plan
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.plan.plan import Plan
from support.known_randomness import known_federation

SIZES = {"num_parties": 3, "num_samples": 240, "num_classes": 2}


def strict(**choices: Any) -> Plan:
    return Plan.for_budget(epsilon=8, columns=10, evaluation="none", **{**SIZES, **choices})


def predicting() -> Plan:
    plan = strict()
    release = release_for(plan, epsilon=8.0, delta=1e-5, has_fusion=True)
    return serving_plan(plan, model="0" * 64, num_rows=50, release=release)


PLANS = {
    "strict": lambda: strict(),
    "strict, many classes": lambda: strict(num_classes=9),
    "pbm": lambda: Plan.of(**SIZES, mechanism="pbm", num_trials=16, beta=0.1, evaluation="none"),
    "none": lambda: Plan.of(**SIZES, mechanism="none", evaluation="none"),
    "adam": lambda: Plan.of(**SIZES, mechanism="none", optimizer="adam", gradient_codec="int8"),
    "noisy updates": lambda: Plan.of(**SIZES, mechanism="pbm", num_trials=16, beta=0.1, noise_multiplier=2.0),
    "correlated noise": lambda: Plan.of(
        **SIZES, mechanism="none", batch_size=24, noise_multiplier=2.0, noise_band=5, evaluation="none"
    ),
    "released": lambda: Plan.of(
        **SIZES, num_test_samples=9, mechanism="pbm", num_trials=16, beta=0.1, evaluation="released"
    ),
    "pictures": lambda: Plan.of(**SIZES, mechanism="none", encoder="multiview-conv"),
    "predicting": predicting,
}


@pytest.mark.parametrize("name", PLANS)
def test_every_kind_of_plan_can_be_made_tiny_and_run(name: str) -> None:
    plan = PLANS[name]()
    small = tiny_plan(plan)
    assert small.mechanism == plan.mechanism
    assert (small.optimizer, small.encoder) == (plan.optimizer, plan.encoder)
    assert {phase.kind for phase in plan.rounds.phases} <= {phase.kind for phase in small.rounds.phases}
    assert len(small.schedule) <= 20
    train_tiny(plan)  # raises what `warm_up` would cover up


def small_data() -> VerticalDataset:
    drawn = np.random.default_rng(5)
    labels = np.arange(40) % 2
    return VerticalDataset(
        name="small",
        party_names=("bank", "shop"),
        train_features=tuple(drawn.normal(size=(40, 3)).astype(np.float32) for _ in range(2)),
        test_features=tuple(np.zeros((0, 3), dtype=np.float32) for _ in range(2)),
        train_labels=labels,
        test_labels=labels[:0],
        class_names=("no", "yes"),
        default_encoder="mlp",
    )


@pytest.mark.parametrize("choices", [{"mechanism": "none"}, {"mechanism": "pbm", "num_trials": 16, "beta": 0.1}])
def test_weights_are_the_same_to_the_bit_with_and_without_it_even_in_the_middle_of_a_run(
    tmp_path: Path, choices: dict[str, Any]
) -> None:
    data = small_data()
    plan = Plan.for_data(data, batch_size=10, num_epochs=2, evaluation="none", **choices)

    def weights(name: str, plan: Plan, at: int | None = None) -> dict[str, bytes]:
        """Every file of weights of a run that warms up when so many rounds are completed."""

        def on_round(completed: int, *_: object) -> None:
            if completed == at:
                warm_up(plan)

        if at == 0:
            warm_up(plan)
        federation = known_federation(plan)
        federation.fit(data, on_round=on_round)
        folder = federation.save(tmp_path / name)
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}

    plain = weights("without", plan)
    assert len(plain) == 3  # the server's and two parties'
    assert weights("before", plan, at=0) == plain
    assert weights("between", plan, at=3) == plain
    other = weights("other", plan.replace(seed=1))
    assert all(other[name] != plain[name] for name in plain)


def test_no_global_generator_moves_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a ledger was opened")

    monkeypatch.setattr(Ledger, "__init__", refuse)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())  # noqa: NPY002
    for make in PLANS.values():
        warm_up(make())
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002
    assert before[2] == random.getstate()
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_cannot_be_made_tiny_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Plan) -> Plan:
        raise PlanError("no")

    monkeypatch.setattr(process, "tiny_plan", refuse)
    assert warm_up(PLANS["none"]()) >= 0


def test_identities_and_run_ids_are_new_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    made = Federation.party_setups

    def keep(self: Federation, *arguments: Any) -> Any:
        setups = made(self, *arguments)
        seen.extend(setup.identity for setup in setups)
        assert all(setup.ledger is None and setup.checkpoints is None and setup.answers is None for setup in setups)
        return setups

    monkeypatch.setattr(Federation, "party_setups", keep)
    for _ in range(2):
        train_tiny(PLANS["none"]())
    assert len(set(seen)) == 4


def test_a_party_learns_no_fusion_model_and_a_label_holder_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it load scikit-learn, which takes a quarter of a party's memory."""
    learned: list[object] = []
    monkeypatch.setattr("pbmvfl.protocol.server.fit_fusion", lambda *_, **__: learned.append(1) or object())
    plan = strict(num_samples=5000)
    assert plan.num_fusion_samples
    train_tiny(plan, fuses=False)
    assert learned == []
    train_tiny(plan)
    assert learned == [1]
