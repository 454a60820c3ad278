"""What a whole federation learns, and from which sums its metrics come."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn

from pbmvfl.federation.epoch_history import EpochLine
from pbmvfl.federation.federation import Federation
from pbmvfl.plan.plan import Plan
from pbmvfl.training.encoders import build_head
from support.federation_runs import JOINT, PREDICTION, Wire, fitted, own_networks, weights
from support.known_randomness import SameSetup, TwinSetup, known_federation

# --- without secure aggregation ---


def assert_same_weights(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    assert len(first) > 2
    for role, state in first.items():
        assert state.keys() == second[role].keys()
        for name, value in state.items():
            assert torch.equal(value, second[role][name]), (role, name)


def test_without_secure_aggregation_the_same_noise_teaches_the_same_weights(data, make_plan, tmp_path):
    results, wires = [], []
    for name, secure in (("masked", True), ("clear", False)):
        federation = known_federation(make_plan(data, secure_aggregation=secure), setup_kind=SameSetup)
        wires.append(Wire(federation))
        results.append(federation.fit(data, checkpoints=tmp_path / name))
    assert_same_weights(weights(tmp_path / "masked"), weights(tmp_path / "clear"))
    assert results[0].metrics == results[1].metrics
    masked, clear = (wire.embeddings(JOINT) for wire in wires)
    assert len(masked) == len(clear)
    assert [payload for *_, payload in masked] != [payload for *_, payload in clear]


def test_other_noise_teaches_other_weights(data, make_plan, tmp_path):
    for name, setup_kind in (("one", SameSetup), ("two", TwinSetup)):
        known_federation(make_plan(data), setup_kind=setup_kind).fit(data, checkpoints=tmp_path / name)
    with pytest.raises(AssertionError, match=r"server|party"):
        assert_same_weights(weights(tmp_path / "one"), weights(tmp_path / "two"))


# --- evaluation=released ---


def byte_plan(data, make_plan, **choices) -> Plan:
    """b*M = 255: one byte a value, so that sums can be read off the wire without the package."""
    usual = {"num_trials": 85, "beta": 1 / 16, "batch_size": 40, "num_epochs": 1, "evaluation": "released"}
    return make_plan(data, **{**usual, **choices})


def noisy_sums(plan: Plan, releases: list[tuple[int, int, bytes]], number: int) -> torch.Tensor:
    parts = [np.frombuffer(payload, np.uint8) for at, _, payload in releases if at == number]
    assert len(parts) == plan.num_parties
    total = (sum(part.astype(np.int64) for part in parts) % 256).reshape(-1, plan.embedding_dim)
    return torch.from_numpy((total - 255 / 2) * plan.bound / (plan.beta * plan.num_trials)).float()


def accuracy(scores: torch.Tensor, labels: np.ndarray) -> float:
    return float((scores.detach().numpy().argmax(1) == labels).mean())


def test_released_train_metrics_come_from_the_training_rounds_own_noisy_sums(data, make_plan):
    plan = byte_plan(data, make_plan)
    result, wire = fitted(plan, data)
    rows = plan.schedule[0].rows
    scores = build_head(plan)(noisy_sums(plan, wire.embeddings(JOINT), 0))
    assert result.metrics["train_accuracy"] == accuracy(scores, data.train_labels[rows])
    loss = nn.functional.cross_entropy(scores, torch.from_numpy(data.train_labels[rows]))
    assert result.metrics["train_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_released_test_metrics_come_from_one_noisy_release_of_every_test_row(data, make_plan, tmp_path):
    plan = byte_plan(data, make_plan, num_epochs=2)
    result, wire = fitted(plan, data, checkpoints=tmp_path)
    head = weights(tmp_path)["server"]
    sums = noisy_sums(plan, wire.embeddings(PREDICTION), plan.schedule.trained_at)
    scores = sums @ head["model.weight"].T + head["model.bias"]
    assert result.metrics["test_accuracy"] == accuracy(scores, data.test_labels)


@pytest.mark.parametrize("mechanism", ["pbm", "ldp", "none"])
def test_released_evaluation_adds_one_release_of_every_test_row_and_no_other(mechanism, data, make_plan):
    plan = make_plan(data, evaluation="released", mechanism=mechanism, batch_size=5, num_epochs=3)
    _, wire = fitted(plan, data)
    train, test = (wire.row_releases(plan, kind) for kind in (JOINT, PREDICTION))
    assert train == {(m, row): 3 for m in range(3) for row in range(data.num_samples)}
    assert test == {(m, row): 1 for m in range(3) for row in range(data.num_test_samples)}
    _, simulated = fitted(plan.replace(evaluation="simulator"), data)
    assert simulated.row_releases(plan, JOINT) == train
    assert not simulated.embeddings(PREDICTION)


def test_released_metrics_of_two_classes_have_an_auprc_for_every_split(make_data, make_plan):
    data = make_data(num_classes=2)
    result, _ = fitted(make_plan(data, evaluation="released"), data)
    assert {"train_accuracy", "test_accuracy", "train_auprc", "test_auprc"} <= result.metrics.keys()
    assert any("one more noisy release of every test row" in note for note in result.notes)


# --- evaluation=simulator ---


def average_precision(labels: np.ndarray, scores: np.ndarray) -> float:
    """By its definition: precision at every positive, from the best score down. No two scores may be equal."""
    assert len(np.unique(scores)) == len(scores)
    ranked = labels[np.argsort(-scores)]
    return float(np.mean([ranked[: k + 1].mean() for k in np.flatnonzero(ranked)]))


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("bound", [1.0, 2.5])
def test_simulated_metrics_of_every_epoch_follow_from_the_checkpointed_weights(
    num_classes, bound, make_data, make_plan, tmp_path
):
    data = make_data(num_classes=num_classes)
    plan = make_plan(data, num_epochs=3, bound=bound, num_trials=50)
    lines: list[EpochLine] = []

    def recompute(line: EpochLine) -> None:
        state = weights(tmp_path)
        head = {name: value.double().numpy() for name, value in state["server"].items()}
        for split, labels in (("train", data.train_labels), ("test", data.test_labels)):
            total = 0.0
            for m, features in enumerate(data.train_features if split == "train" else data.test_features):
                party = {name: value.double().numpy() for name, value in state[f"party-{m}"].items()}
                bias, weight = party["model.network.0.bias"], party["model.network.0.weight"]
                total = total + bound * np.tanh(features.astype(float) @ weight.T + bias)
            scores = total @ head["model.weight"].T + head["model.bias"]
            assert line.metrics[f"{split}_accuracy"] == (scores.argmax(1) == labels).mean()
            if num_classes == 2:
                expected = average_precision(labels, scores[:, 1] - scores[:, 0])
                assert line.metrics[f"{split}_auprc"] == pytest.approx(expected, abs=1e-6)
            else:
                assert f"{split}_auprc" not in line.metrics
        lines.append(line)

    result = Federation(plan).fit(data, checkpoints=tmp_path, on_epoch=recompute)
    assert [line.epoch for line in lines] == [1, 2, 3]
    assert result.history == tuple(lines)
    assert result.metrics == lines[-1].metrics
    assert any("exact sums" in note for note in result.notes)


# --- own encoders ---


def test_bounded_networks_of_one_s_own_are_trained(data, make_plan):
    plan = make_plan(data, bound=2.0, num_epochs=6, num_trials=100)
    encoders = own_networks(plan, data, bound=2.0)
    before = [encoder.network.weight.detach().clone() for encoder in encoders]
    result = Federation(plan, encoders=encoders).fit(data)
    assert all(not torch.equal(old, encoder.network.weight) for old, encoder in zip(before, encoders, strict=True))
    assert result.metrics["train_accuracy"] > 0.8


# --- memory ---


def memory_of_epochs(data, plan: Plan, *taps) -> list[tuple[int, int, int]]:
    """After every epoch: bytes that Python and numpy hold, the most they held during it, and the tensors alive."""
    federation = Federation(plan)
    federation.taps.extend(taps)
    seen: list[tuple[int, int, int]] = []

    def look(_: EpochLine) -> None:
        _, peak = tracemalloc.get_traced_memory()
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        seen.append((held, peak, sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())))
        tracemalloc.reset_peak()

    tracemalloc.start()
    try:
        federation.fit(data, on_epoch=look)
    finally:
        tracemalloc.stop()
    return seen


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_rounds(make_data, make_plan):
    data = make_data(num_parties=2, num_samples=70)
    plan = make_plan(data, num_epochs=4, batch_size=1, num_trials=2)
    #: 140 more rounds; one message kept of each would be 18 kB, the history's two lines are 2 kB
    allowed = 8_000
    Federation(plan.replace(num_epochs=1)).fit(data)  # compiles, and fills caches
    _, second, _, fourth = memory_of_epochs(data, plan)
    assert fourth[0] - second[0] < allowed
    assert fourth[1] - second[1] < allowed
    assert fourth[2] == second[2]
    kept: list[tuple] = []
    _, second, _, fourth = memory_of_epochs(data, plan, lambda *message: kept.append(message))
    assert fourth[0] - second[0] > allowed  # the measurement would notice
