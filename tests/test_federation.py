"""A whole federation: what it learns, what it sends, what it says that it cost."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import pbmvfl
from pbmvfl.encoders import build_head
from pbmvfl.errors import (
    BudgetExceeded,
    CheckpointError,
    DataError,
    EncoderError,
    LedgerError,
    PlanError,
    ProtocolError,
    WrongSender,
)
from pbmvfl.federation import Federation, Parties
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit, epsilon_at
from pbmvfl.mechanisms import mechanism_for
from pbmvfl.plan import Plan
from pbmvfl.privacy.accounting import NO_SECURE_SUM, rdp_curve
from pbmvfl.privacy.table import SEEDED_NOISE, release_event, training_run
from pbmvfl.privacy.units import Accounting, Adversary, Unit
from pbmvfl.report.curves import describe_mechanism
from pbmvfl.schedule import Schedule
from pbmvfl.transport.links import ROUNDS_AHEAD, InProcessLink, PartyInputs, ProcessLink, _rebuilt

HEADER = 44
EMBEDDING = 6
JOINT, PREDICTION = 1, 2


class Wire:
    """Everything that crossed the wire, read from the bytes alone: kind at 5, round at 32, round kind at 40."""

    def __init__(self, federation: Federation) -> None:
        self.messages: list[tuple[str, int, bytes]] = []
        federation._taps.append(lambda *message: self.messages.append(message))

    def embeddings(self, round_kind: int) -> list[tuple[int, int, bytes]]:
        """(round, party, payload) of every release of this kind."""
        return [
            (struct.unpack_from("<I", message, 32)[0], party, message[HEADER:])
            for direction, party, message in self.messages
            if direction == "up" and message[5] == EMBEDDING and message[40] == round_kind
        ]

    def row_releases(self, plan: Plan, round_kind: int) -> Counter[tuple[int, int]]:
        """How often each (party, row) was released."""
        schedule, seen = Schedule(plan), Counter()
        for number, party, _ in self.embeddings(round_kind):
            seen.update((party, int(row)) for row in schedule[number].rows)
        return seen


def fitted(plan: Plan, data, **options):
    federation = Federation(plan)
    wire = Wire(federation)
    return federation.fit(data, **options), wire


def weights(checkpoints: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.stem: load_file(path) for path in sorted(checkpoints.glob("round-*/*.safetensors"))}


def assert_same_weights(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    assert len(first) > 2
    for role, state in first.items():
        assert state.keys() == second[role].keys()
        for name, value in state.items():
            assert torch.equal(value, second[role][name]), (role, name)


# --- without secure aggregation ---


def test_without_secure_aggregation_the_same_noise_teaches_the_same_weights(data, make_plan, tmp_path):
    results, wires = [], []
    for name, secure in (("masked", True), ("clear", False)):
        federation = Federation(make_plan(data, secure_aggregation=secure))
        federation._known_randomness = b"the same"
        wires.append(Wire(federation))
        results.append(federation.fit(data, checkpoints=tmp_path / name))
    assert_same_weights(weights(tmp_path / "masked"), weights(tmp_path / "clear"))
    assert results[0].metrics == results[1].metrics
    masked, clear = (wire.embeddings(JOINT) for wire in wires)
    assert len(masked) == len(clear)
    assert [payload for *_, payload in masked] != [payload for *_, payload in clear]


def test_other_noise_teaches_other_weights(data, make_plan, tmp_path):
    for name in ("one", "two"):
        federation = Federation(make_plan(data))
        federation._known_randomness = name.encode()
        federation.fit(data, checkpoints=tmp_path / name)
    with pytest.raises(AssertionError, match=r"server|party"):
        assert_same_weights(weights(tmp_path / "one"), weights(tmp_path / "two"))


def test_a_run_without_secure_aggregation_is_labelled_everywhere(data, make_plan):
    result, _ = fitted(make_plan(data, secure_aggregation=False, num_epochs=1), data)
    assert "sums not hidden" in describe_mechanism(result.plan)
    assert result.to_dict()["plan"]["secure_aggregation"] is False
    assert all(NO_SECURE_SUM in row.conditions for row in result.privacy().bounds)
    masked = result.plan.replace(secure_aggregation=True)
    assert "sums not hidden" not in describe_mechanism(masked)
    assert all(NO_SECURE_SUM not in row.conditions for row in masked.privacy().bounds)


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
    rows = Schedule(plan)[0].rows
    scores = build_head(plan)(noisy_sums(plan, wire.embeddings(JOINT), 0))
    assert result.metrics["train_accuracy"] == accuracy(scores, data.train_labels[rows])
    loss = nn.functional.cross_entropy(scores, torch.from_numpy(data.train_labels[rows]))
    assert result.metrics["train_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_released_test_metrics_come_from_one_noisy_release_of_every_test_row(data, make_plan, tmp_path):
    plan = byte_plan(data, make_plan, num_epochs=2)
    result, wire = fitted(plan, data, checkpoints=tmp_path)
    head = weights(tmp_path)["server"]
    sums = noisy_sums(plan, wire.embeddings(PREDICTION), plan.num_rounds)
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
    lines: list[dict] = []

    def recompute(line: dict) -> None:
        state = weights(tmp_path)
        head = {name: value.double().numpy() for name, value in state["server"].items()}
        for split, labels in (("train", data.train_labels), ("test", data.test_labels)):
            total = 0.0
            for m, features in enumerate(data.train_features if split == "train" else data.test_features):
                party = [value.double().numpy() for name, value in sorted(state[f"party-{m}"].items())]
                bias, weight = party  # sorted by name
                total = total + bound * np.tanh(features.astype(float) @ weight.T + bias)
            scores = total @ head["model.weight"].T + head["model.bias"]
            assert line[f"{split}_accuracy"] == (scores.argmax(1) == labels).mean()
            if num_classes == 2:
                expected = average_precision(labels, scores[:, 1] - scores[:, 0])
                assert line[f"{split}_auprc"] == pytest.approx(expected, abs=1e-6)
            else:
                assert f"{split}_auprc" not in line
        lines.append(line)

    result = Federation(plan).fit(data, checkpoints=tmp_path, on_epoch=recompute)
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert result.history == lines
    assert result.metrics.items() <= lines[-1].items()
    assert any("exact sums" in note for note in result.notes)


# --- memory ---


def memory_of_epochs(data, plan: Plan, *taps) -> list[tuple[int, int, int]]:
    """After every epoch: bytes that Python and numpy hold, the most they held during it, and the tensors alive."""
    federation = Federation(plan)
    federation._taps.extend(taps)
    seen: list[tuple[int, int, int]] = []

    def look(_: dict) -> None:
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
    full, small = (Plan(gradient_codec=codec, **sizes).traffic().bytes_down for codec in ("float32", "int8"))
    assert full >= 3.2 * small


# --- own encoders ---


def own_networks(plan: Plan, data, *, bound: float | None = 1.0) -> list[nn.Module]:
    torch.manual_seed(3)
    networks = [nn.Linear(part.shape[1], plan.embedding_dim) for part in data.train_features]
    return networks if bound is None else [pbmvfl.Bounded(network, bound=bound) for network in networks]


def refused(plan: Plan, data, encoders: list[nn.Module]) -> str:
    federation = Federation(plan, encoders=encoders)
    wire = Wire(federation)
    with pytest.raises(EncoderError) as error:
        federation.fit(data)
    assert not wire.messages
    return str(error.value)


def test_a_network_whose_output_can_leave_the_bound_is_refused(data, make_plan):
    plan = make_plan(data, bound=2.5)
    message = refused(plan, data, own_networks(plan, data, bound=None))
    assert "Linear" in message
    assert "[-C, C] = [-2.5, 2.5]" in message
    assert "pbmvfl.Bounded(network, bound=2.5)" in message


def test_a_network_that_only_ends_in_tanh_is_refused_too(data, make_plan):
    plan = make_plan(data)
    encoders = own_networks(plan, data)
    encoders[2] = nn.Sequential(nn.Linear(4, plan.embedding_dim), nn.Tanh())
    assert "party=2" in refused(plan, data, encoders)


def test_an_encoder_with_another_bound_is_refused(data, make_plan):
    plan = make_plan(data, bound=2.0)
    message = refused(plan, data, own_networks(plan, data, bound=1.5))
    assert "bound=1.5" in message
    assert "bound=2" in message


def test_bounded_networks_of_one_s_own_are_trained(data, make_plan):
    plan = make_plan(data, bound=2.0, num_epochs=6, num_trials=100)
    encoders = own_networks(plan, data, bound=2.0)
    before = [encoder.network.weight.detach().clone() for encoder in encoders]
    result = Federation(plan, encoders=encoders).fit(data)
    assert all(not torch.equal(old, encoder.network.weight) for old, encoder in zip(before, encoders, strict=True))
    assert result.metrics["train_accuracy"] > 0.8


def test_one_encoder_for_each_party_is_needed(data, make_plan):
    plan = make_plan(data)
    with pytest.raises(PlanError, match="2 encoders for num_parties=3"):
        Federation(plan, encoders=own_networks(plan, data)[:2])


# --- plans that cannot be trained ---


def test_a_plan_with_noisy_weight_updates_is_refused_before_anything_is_sent(data, make_plan, tmp_path):
    federation = Federation(make_plan(data, noise_multiplier=1.5))
    wire = Wire(federation)
    with pytest.raises(PlanError, match=r"noise_multiplier=1\.5.*noise_multiplier=0"):
        federation.fit(data, checkpoints=tmp_path / "checkpoints")
    assert not wire.messages
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("name", "value"), [("num_parties", 4), ("num_samples", 36), ("num_classes", 4), ("num_test_samples", 1)]
)
def test_a_plan_for_other_data_is_refused(name, value, data, make_plan):
    with pytest.raises(PlanError, match=f"{name}={value} in the plan, {getattr(data, name)} in the data"):
        Federation(make_plan(data, **{name: value})).fit(data)


# --- what it cost ---


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
    federation = Federation(make_plan(data))
    federation._known_randomness = b"known"
    result = federation.fit(data)
    assert {row.epsilon for row in result.privacy().bounds} == {math.inf}
    assert {row.conditions for row in result.privacy().bounds} == {(SEEDED_NOISE,)}
    assert any("seeded" in note for note in result.notes)
    assert all(math.isfinite(row.epsilon) for row in result.plan.privacy().bounds)


def test_an_unseeded_resume_of_a_seeded_run_still_has_an_infinite_epsilon(data, make_plan, tmp_path):
    """The first session's noise is known whatever the second one draws."""
    plan = make_plan(data)
    seeded = Federation(plan)
    seeded._known_randomness = b"known"
    with pytest.raises(Killed):
        seeded.fit(data, checkpoints=tmp_path, on_epoch=killer())
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
    plan = Plan(num_samples=100, num_classes=2, mechanism=mechanism, **sizes)
    assert mechanism_for(plan).event == release_event(plan)


# --- no path around the count ---


class Killed(Exception):
    pass


def killer():
    def kill(*_: object) -> None:
        raise Killed

    return kill


def released_until_killed(plan: Plan, data, folder: Path, every: int, at: int | None) -> tuple[Wire, object]:
    """One session that ends just after its `at`-th embedding was sent, or at the end of the plan."""
    federation = Federation(plan)
    wire = Wire(federation)

    def kill(direction: str, party: int, message: bytes) -> None:
        del party
        sent = len(wire.embeddings(JOINT)) + len(wire.embeddings(PREDICTION))
        if direction == "up" and message[5] == EMBEDDING and sent == at:
            raise Killed

    federation._taps.append(kill)
    try:
        return wire, federation.fit(data, checkpoints=folder, checkpoint_every=every)
    except Killed:
        return wire, None


@pytest.mark.parametrize(
    ("every", "kills"),
    [
        (1, [1]),  # the first message of the first round
        (1, [8]),  # the last message of the first epoch's last round
        (1, [9]),
        (1, [13, 1, 1]),  # again and again in the same epoch
        (2, [15]),
        (2, [17, 9]),
        (1, [33]),  # a test row's first release
        (1, [34, 1]),
        (3, [31, 2]),
        (4, []),
    ],
)
def test_at_least_as_many_row_releases_are_charged_as_were_seen_on_the_wire(
    every, kills, make_data, make_plan, tmp_path
):
    data = make_data(num_parties=2, num_samples=37, num_test_samples=13)
    plan = make_plan(data, batch_size=10, num_epochs=4, evaluation="released", num_trials=1)
    train, test = Counter(), Counter()
    sessions = 0
    result = None
    for at in [*kills, None]:
        wire, result = released_until_killed(plan, data, tmp_path, every, at)
        assert (result is None) == (at is not None)
        train += wire.row_releases(plan, JOINT)
        test += wire.row_releases(plan, PREDICTION)
        sessions += 1
    assert len(result.sessions) == sessions
    assert len({session.session for session in result.sessions}) == sessions
    seen = {"train": max(train.values()), "test": max(test.values())}
    assert seen["train"] >= plan.num_epochs
    for split, count in result.row_uses.items():
        # charged ahead, but never by more than what lies between two checkpoints
        assert seen[split] <= count <= seen[split] + every * len(kills)
    if not kills:
        assert result.row_uses == {"train": 4, "test": 1}
        assert result.privacy() == plan.privacy()
    else:
        assert result.privacy().epsilon("cell", "strict") > plan.privacy().epsilon("cell", "strict")
        assert any("resumed" in note for note in result.notes)


def test_the_count_of_a_run_is_the_count_of_the_wire_when_nothing_is_charged_ahead_in_vain(data, make_plan, tmp_path):
    plan = make_plan(data, num_epochs=3)
    with pytest.raises(Killed):
        Federation(plan).fit(data, checkpoints=tmp_path, on_epoch=killer())  # right after the first checkpoint
    federation = Federation(plan)
    wire = Wire(federation)
    result = federation.fit(data, checkpoints=tmp_path)
    assert set(wire.row_releases(plan, JOINT).values()) == {2}  # the first epoch did not run again
    assert result.row_uses["train"] <= 4


def test_two_runs_do_not_share_a_folder_of_checkpoints(data, make_plan, tmp_path):
    """Each would write down its own releases and forget the other's."""
    plan = make_plan(data)

    def second(*_: object) -> None:
        with pytest.raises(CheckpointError, match="training in this folder"):
            Federation(plan).fit(data, checkpoints=tmp_path)

    result = Federation(plan).fit(data, checkpoints=tmp_path, on_epoch=second)
    assert {session.plan_hash for session in result.sessions} == {plan.hash.hex()}
    assert len(Federation(plan).fit(data, checkpoints=tmp_path).sessions) == 2  # the first has let go of it


def test_a_checkpoint_of_another_plan_is_refused_by_what_differs(data, make_plan, tmp_path):
    with pytest.raises(Killed):
        Federation(make_plan(data)).fit(data, checkpoints=tmp_path, on_epoch=killer())
    with pytest.raises(CheckpointError, match="num_trials=5, this plan has num_trials=6"):
        Federation(make_plan(data, num_trials=6)).fit(data, checkpoints=tmp_path)


# --- links ---


def recorded_links(monkeypatch, base: type = InProcessLink) -> list:
    """Every link that a federation opens from now on; `closed` says whether it was closed."""
    links: list = []

    class Recorded(base):
        closed = False

        def __init__(self, inputs: PartyInputs, *others: object) -> None:
            super().__init__(inputs, *others)
            links.append(self)

        def close(self) -> None:
            self.closed = True
            super().close()

    monkeypatch.setattr(f"pbmvfl.federation.{base.__name__}", Recorded)
    return links


def fails_to_close(link: object) -> None:
    close = link.close

    def fail() -> None:
        close()
        raise RuntimeError("this one cannot be closed")

    link.close = fail


def test_every_link_is_closed_although_one_fails_to(data, make_plan, monkeypatch):
    links = recorded_links(monkeypatch)
    with pytest.raises(RuntimeError, match="cannot be closed"):
        Federation(make_plan(data)).fit(data, on_round=lambda number, *_: number == 1 and fails_to_close(links[1]))
    assert [link.closed for link in links] == [True] * 3


def test_what_ended_a_run_is_raised_and_not_what_closing_it_adds(data, make_plan, monkeypatch):
    links = recorded_links(monkeypatch)

    def kill(*_: object) -> None:
        fails_to_close(links[0])
        fails_to_close(links[2])
        raise Killed

    with pytest.raises(Killed) as error:
        Federation(make_plan(data)).fit(data, on_round=kill)
    assert [link.closed for link in links] == [True] * 3
    assert len([note for note in error.value.__notes__ if "cannot be closed" in note]) == 2


@pytest.mark.parametrize("role", ["server", "party-1"])
def test_links_are_closed_if_a_checkpoint_does_not_fit_them(role, data, make_plan, monkeypatch, tmp_path):
    plan = make_plan(data)
    with pytest.raises(Killed):
        Federation(plan).fit(data, checkpoints=tmp_path, on_epoch=killer())
    (path,) = tmp_path.glob(f"round-*/{role}.safetensors")
    save_file({name: torch.zeros(7, 7) for name in load_file(path)}, path)
    links = recorded_links(monkeypatch)
    with pytest.raises(CheckpointError):
        Federation(plan).fit(data, checkpoints=tmp_path)
    assert [link.closed for link in links] == [True] * 3


def test_links_are_closed_if_a_later_party_cannot_be_made(data, make_plan, monkeypatch):
    links = recorded_links(monkeypatch)
    plan = make_plan(data)
    encoders = own_networks(plan, data)
    encoders[2] = nn.Linear(4, plan.embedding_dim)
    with pytest.raises(EncoderError, match="party=2"):
        Federation(plan, encoders=encoders).fit(data)
    assert [link.closed for link in links] == [True] * 2


def test_a_party_cannot_speak_in_another_s_name(data, make_plan, monkeypatch):
    """Two parties exchange their lines: every header is right, and comes from somebody else."""
    links = recorded_links(monkeypatch)
    federation = Federation(make_plan(data))

    def swap(*_: object) -> None:
        links[0].answer, links[1].answer = links[1].answer, links[0].answer

    with pytest.raises(WrongSender, match="sender=1: the message came from party 0"):
        federation.fit(data, on_epoch=swap)


@pytest.mark.parametrize("kind", [BudgetExceeded, LedgerError, PlanError, WrongSender, DataError])
def test_an_error_of_a_party_s_process_comes_back_as_its_own_kind(kind):
    error = _rebuilt(json.dumps([kind.__name__, "round=7 was refused"]).encode())
    assert type(error) is kind
    assert str(error) == "round=7 was refused"


def test_an_error_that_nobody_knows_comes_back_as_a_protocol_error():
    assert type(_rebuilt(b'["KeyError", "7"]')) is ProtocolError


# --- parties in processes of their own ---


def no_process_is_left() -> bool:
    return not multiprocessing.active_children()


def test_a_party_killed_between_rounds_ends_the_run_by_its_name_and_the_others_in_order(
    make_data, make_plan, monkeypatch, tmp_path
):
    data = make_data(num_parties=2)
    plan = make_plan(data, num_epochs=6)
    links = recorded_links(monkeypatch, ProcessLink)

    def kill(completed: int, *_: object) -> None:
        if completed != 5:
            return
        victim = links[1]
        os.kill(victim._process.pid, signal.SIGKILL)
        victim._process.join()
        attempts = (
            victim.hello,
            victim.state,
            lambda: victim.send(b"anything"),
            lambda: victim.exact_embeddings("train"),
            lambda: victim.load_state({"weight": torch.zeros(2)}),
        )
        for attempt in attempts:
            with pytest.raises(ProtocolError, match="party=1: its process ended"):
                attempt()

    federation = Federation(plan, parties=Parties.PROCESSES)
    with pytest.raises(ProtocolError, match="party=1: its process ended"):
        federation.fit(data, on_round=kill, ledger=tmp_path)
    assert [link.closed for link in links] == [True] * 2
    assert no_process_is_left()
    # party 0 may have answered round 5, and gave back what it had charged ahead; the killed one could not
    charged = [Ledger(tmp_path / f"party-{m}.sqlite").sessions(data.name)[0].charged_until for m in range(2)]
    assert charged[0] in (5, 6)
    assert charged[1] == min(ROUNDS_AHEAD, plan.num_rounds)


def limit_of(plan: Plan, uses: float) -> Limit:
    """Room for so many uses of every row."""
    one = training_run(plan.replace(num_epochs=1))
    divergence = uses * rdp_curve(one, Unit.CELL, Accounting.PAPER, orders=(4.0,))[0]
    epsilon = epsilon_at(divergence, 1e-5, 4.0)
    return Limit.choose(unit="cell", accounting="paper", epsilon=epsilon, delta=1e-5, order=4.0)


def set_limit(path: Path, dataset: str, limit: Limit) -> None:
    book = Ledger(path)
    book.set_limit(dataset, limit)
    book.close()


def test_ledgers_count_the_same_in_processes_as_in_one_process(make_data, make_plan, tmp_path):
    data = make_data(num_parties=2)
    plan = make_plan(data, num_epochs=4)
    rounds, stopped = [], []
    for where in Parties:
        set_limit(tmp_path / where / "party-1.sqlite", data.name, limit_of(plan, 2.5))
        result = Federation(plan, parties=where).fit(data, ledger=tmp_path / where)
        books = [Ledger(tmp_path / where / f"party-{m}.sqlite") for m in range(2)]
        rounds.append([entry.charged_until for book in books for entry in book.sessions(data.name)])
        stopped.append(result.stopped)
        assert result.row_uses["train"] == 3
    assert rounds[0] == rounds[1] == [2 * plan.rounds_per_epoch + 1, 2 * plan.rounds_per_epoch]
    assert stopped[0] == stopped[1] != ""
    assert no_process_is_left()


#: A federation of processes that gets Ctrl-C, as a terminal sends it, to its whole group.
INTERRUPTED = """
import os, signal, sys
from pathlib import Path
import numpy as np
import pbmvfl.federation
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.federation import Federation, Parties
from pbmvfl.transport.links import ProcessLink
from pbmvfl.plan import Plan

processes = []

def interrupt():
    os.killpg(os.getpgid(0), signal.SIGINT)

class Link(ProcessLink):
    def __init__(self, inputs):
        if processes and sys.argv[2] == "starting":
            interrupt()  # the first party is on its way
        super().__init__(inputs)
        processes.append(self._process)

def main():
    x, y = np.zeros((40, 3), np.float32), np.arange(40) % 2
    data = VerticalDataset(
        name="small", party_names=("a", "b"), train_features=(x, x), test_features=(x, x), train_labels=y,
        test_labels=y, class_names=("no", "yes"), default_encoder="linear",
    )
    plan = Plan.for_data(data, num_epochs=50, batch_size=10, num_trials=2)
    pbmvfl.federation.ProcessLink = Link
    stop = lambda completed, *_: completed == 3 and interrupt()
    try:
        Federation(plan, parties=Parties.PROCESSES).fit(data, ledger=Path(sys.argv[1]), on_round=stop)
    except KeyboardInterrupt:
        print([process.exitcode for process in processes])
        sys.exit(130)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("when", ["starting", "training"])
def test_ctrl_c_ends_every_party_without_a_traceback_and_gives_back_what_was_charged_ahead(when, tmp_path):
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, script, tmp_path / "books", when],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        start_new_session=True,  # Ctrl-C is for this group alone
    )
    assert (done.returncode, done.stderr) == (130, "")
    codes = json.loads(done.stdout)
    if when == "starting":  # one that takes too long to start is ended by the parent
        assert codes in ([0], [-signal.SIGKILL])
    else:
        assert codes == [0, 0]
    books = sorted((tmp_path / "books").glob("*.sqlite"))
    charged = [entry.charged_until for book in books for entry in Ledger(book).sessions("small")]
    assert charged == ([] if when == "starting" else [3, 3])


# --- ledgers ---


def test_two_fits_of_one_federation_keep_to_their_own_ledgers(data, make_plan, monkeypatch, tmp_path):
    federation = Federation(make_plan(data, num_epochs=1))
    load = pbmvfl.federation.load_progress

    def another_fit_first(*arguments: object) -> object:
        monkeypatch.setattr("pbmvfl.federation.load_progress", load)
        federation.fit(data, ledger=tmp_path / "two")
        return load(*arguments)

    monkeypatch.setattr("pbmvfl.federation.load_progress", another_fit_first)
    federation.fit(data, ledger=tmp_path / "one", checkpoints=tmp_path / "checkpoints")
    for name in ("one", "two"):
        assert len(Ledger(tmp_path / name / "party-0.sqlite", must_exist=True).sessions(data.name)) == 1


def test_ledgers_are_told_the_ids_of_the_rows(data, make_plan, tmp_path):
    train = tuple(f"person {number}" for number in reversed(range(data.num_samples)))
    test = tuple(f"guest {number}" for number in range(data.num_test_samples))
    plan = make_plan(data, num_epochs=1)
    Federation(plan).fit(replace(data, train_ids=train, test_ids=test), ledger=tmp_path)
    book = Ledger(tmp_path / "party-2.sqlite", must_exist=True)
    (entry,) = book.sessions(data.name)
    assert tuple(book.read_ids(entry.train_ids)) == train
    assert tuple(book.read_ids(entry.test_ids)) == test


def test_another_order_of_the_same_people_is_no_change_of_values(data, make_plan, tmp_path):
    ids = tuple(str(number) for number in range(data.num_samples))
    named = replace(data, train_ids=ids, test_ids=tuple(f"t{number}" for number in range(data.num_test_samples)))
    order = np.random.default_rng(1).permutation(data.num_samples)
    moved = replace(
        named,
        train_features=tuple(part[order] for part in data.train_features),
        train_labels=data.train_labels[order],
        train_ids=tuple(ids[row] for row in order),
    )
    changed = replace(named, train_features=tuple(part + 1 for part in data.train_features))
    for each in (named, moved, changed):
        Federation(make_plan(data, num_epochs=1)).fit(each, ledger=tmp_path)
    prints = [entry.fingerprint for entry in Ledger(tmp_path / "party-0.sqlite").sessions(data.name)]
    assert prints[0] == prints[1] != prints[2]


def test_a_ledger_that_cannot_be_a_folder_is_refused_before_anything_is_sent(data, make_plan, tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "books"):
        federation = Federation(make_plan(data))
        wire = Wire(federation)
        with pytest.raises(LedgerError, match=r"file.* is not a folder and cannot be made one"):
            federation.fit(data, ledger=path)
        assert not wire.messages


@pytest.mark.parametrize("missing", ["*", "party-1.sqlite*"])
def test_a_run_is_not_continued_with_ledgers_that_do_not_know_it(missing, data, make_plan, tmp_path):
    plan = make_plan(data)
    books = tmp_path / "books"
    with pytest.raises(Killed):
        Federation(plan).fit(data, checkpoints=tmp_path / "checkpoints", ledger=books, on_epoch=killer())
    for path in books.glob(missing):
        path.unlink()
    federation = Federation(plan)
    wire = Wire(federation)
    with pytest.raises(LedgerError, match=r"party-\d.sqlite' does not exist, but this run has released rounds"):
        federation.fit(data, checkpoints=tmp_path / "checkpoints", ledger=books)
    assert not wire.messages


def test_a_run_whose_first_round_is_refused_has_metrics_that_are_numbers(data, make_plan, tmp_path):
    plan = make_plan(data)
    set_limit(tmp_path / "party-1.sqlite", data.name, limit_of(plan, 0.5))
    result = Federation(plan).fit(data, ledger=tmp_path)
    assert result.stopped
    assert result.metrics
    assert "train_loss" not in result.metrics
    assert all(isinstance(value, float) for value in result.metrics.values())
    assert [line["epoch"] for line in result.history] == [0]


def test_a_run_that_a_ledger_ended_among_the_test_rows_asks_for_all_of_them_again(make_data, make_plan, tmp_path):
    data = make_data(num_test_samples=52)
    plan = make_plan(data, batch_size=13, evaluation="released")
    assert (plan.num_rounds, plan.num_prediction_rounds) == (6, 4)
    book = tmp_path / "books" / "party-1.sqlite"
    folders = {"ledger": tmp_path / "books", "checkpoints": tmp_path / "checkpoints"}

    def strike(completed: int, *_: object) -> None:
        if completed == 8:
            set_limit(book, data.name, limit_of(plan, 0.5))

    first = Federation(plan).fit(data, on_round=strike, **folders)
    assert "round=8" in first.stopped
    assert "test_accuracy" not in first.metrics
    set_limit(book, data.name, limit_of(plan, 10))
    second = Federation(plan).fit(data, **folders)
    assert not second.stopped
    assert 0 <= second.metrics["test_accuracy"] <= 1
    assert second.row_uses == {"train": 2, "test": 2}


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_a_distance_of_checkpoints_below_one_epoch_is_refused_before_anything_is_sent(every, data, make_plan, tmp_path):
    federation = Federation(make_plan(data))
    wire = Wire(federation)
    with pytest.raises(PlanError, match=f"checkpoint_every={every} must be an integer of at least 1"):
        federation.fit(data, checkpoints=tmp_path / "checkpoints", checkpoint_every=every)
    assert not wire.messages
    assert not (tmp_path / "checkpoints").exists()
