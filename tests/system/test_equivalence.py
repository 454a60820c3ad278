"""Different ways to the same run: centralised, unmasked, in processes, and again from the same public seed."""

from __future__ import annotations

import copy
import dataclasses
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pbmvfl.errors import PlanError
from pbmvfl.federation.epoch_history import EpochLine
from pbmvfl.federation.federation import Federation, Parties
from pbmvfl.training.encoders import Bounded, build_encoder, build_head
from support import statistical
from support.known_randomness import KnownSetup, SameSetup, known_federation

HEADER = 44
KIND = 5
EMBEDDING = 6


def payloads(transcript: list[tuple[str, int, bytes]], kind: int = EMBEDDING) -> list[bytes]:
    return [message[HEADER:] for _, _, message in transcript if message[KIND] == kind]


def listen(federation: Federation) -> list[tuple[str, int, bytes]]:
    heard: list[tuple[str, int, bytes]] = []
    federation.taps.append(lambda *message: heard.append(message))
    return heard


def fitted(plan, data, **choices):
    federation = Federation(plan, **choices)
    heard = listen(federation)
    return federation.fit(data), heard


# --- one centralised network ---


def networks(plan, columns: int) -> list[nn.Sequential]:
    torch.manual_seed(11)
    return [
        nn.Sequential(nn.Linear(columns, 6), nn.ReLU(), nn.Linear(6, plan.embedding_dim))
        for _ in range(plan.num_parties)
    ]


def centralised(plan, data, encoders: list[nn.Sequential], head: nn.Linear, optimizer) -> list[float]:
    """The same sum in one graph, one loss, one backward pass, torch's plain optimiser over all weights."""
    rows = [torch.from_numpy(x) for x in data.train_features]
    labels = torch.from_numpy(data.train_labels)
    schedule, losses = plan.schedule, []
    for number in range(len(plan.schedule)):
        batch = torch.tensor(schedule[number].rows)
        total = sum(plan.bound * torch.tanh(f(x[batch])) for f, x in zip(encoders, rows, strict=True))
        scores = total @ head.weight.T + head.bias
        loss = (torch.logsumexp(scores, dim=1) - scores[torch.arange(len(batch)), labels[batch]]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "choices",
    [
        {"learning_rate": 0.2},
        {"learning_rate": 0.1, "momentum": 0.9},
        {"learning_rate": 0.01, "optimizer": "adam"},
        {"learning_rate": 0.2, "bound": 1.7},
    ],
    ids=str,
)
def test_an_exact_federation_equals_one_centralised_network(choices, data, make_plan, tmp_path):
    plan = make_plan(data, mechanism="none", num_epochs=3, **choices)
    inner = networks(plan, columns=4)
    alone, head = copy.deepcopy(inner), copy.deepcopy(build_head(plan))
    start = copy.deepcopy(inner)
    weights = [*(p for f in alone for p in f.parameters()), *head.parameters()]
    if choices.get("optimizer") == "adam":
        optimizer = torch.optim.Adam(weights, lr=plan.learning_rate, fused=False, foreach=False)
    else:
        optimizer = torch.optim.SGD(weights, lr=plan.learning_rate, momentum=plan.momentum, fused=False, foreach=False)
    losses = centralised(plan, data, alone, head, optimizer)
    assert len(losses) == 12

    federation = Federation(plan, encoders=[Bounded(f, bound=plan.bound) for f in inner])
    seen: list[float] = []
    federation.fit(data, checkpoints=tmp_path, on_round=lambda _, loss, __: seen.append(loss))
    newest = max((tmp_path / "server").glob("round-*"))
    server = load_file(newest)
    assert max(abs(a - b) for a, b in zip(losses, seen, strict=True)) < 1e-6
    assert (server["model.weight"] - head.weight).abs().max() < 1e-6
    assert (server["model.bias"] - head.bias).abs().max() < 1e-6
    for mine, theirs, first in zip(inner, alone, start, strict=True):
        for p, q, r in zip(mine.parameters(), theirs.parameters(), first.parameters(), strict=True):
            assert (p - q).abs().max() < 1e-6
            assert (p - r).abs().max() > 1e-4  # it did train


def test_the_comparison_with_one_network_would_notice_a_wrong_step(data, make_plan):
    # The control: a learning rate wrong by one part in a thousand moves weights by more than the tolerance.
    plan = make_plan(data, mechanism="none", num_epochs=3, learning_rate=0.2)
    results = []
    for rate in (0.2, 0.2002):
        encoders, head = networks(plan, columns=4), copy.deepcopy(build_head(plan))
        weights = [*(p for f in encoders for p in f.parameters()), *head.parameters()]
        centralised(plan, data, encoders, head, torch.optim.SGD(weights, lr=rate))
        results.append(torch.cat([p.detach().reshape(-1) for p in weights]))
    assert (results[0] - results[1]).abs().max() > 1e-5


# --- masks ---


class RecordingHead(nn.Linear):
    """A head that keeps what it was given: the server's estimated sums."""

    def __init__(self, plan) -> None:
        super().__init__(plan.embedding_dim, plan.num_classes)
        self.seen: list[torch.Tensor] = []
        with torch.no_grad():
            self.weight.copy_(torch.linspace(-1, 1, self.weight.numel()).reshape(self.weight.shape))
            self.bias.zero_()

    def forward(self, sums: torch.Tensor) -> torch.Tensor:
        self.seen.append(sums.detach().clone())
        return super().forward(sums)


def unpacked(payload: bytes, bits: int, count: int) -> list[int]:
    number = int.from_bytes(payload, "little")
    return [(number >> (bits * i)) % 2**bits for i in range(count)]


@pytest.mark.parametrize("num_trials", [1, 5, 100])
def test_masked_sums_equal_unmasked_sums_and_the_plain_sum_of_the_integers(num_trials, data, make_plan, make_cohort):
    runs = []
    for masked in (True, False):
        plan = make_plan(data, num_trials=num_trials, secure_aggregation=masked, evaluation="released")
        head = RecordingHead(plan)
        cohort = make_cohort(plan, data, head=head)
        cohort.run()
        runs.append((plan, head, cohort))
    (_, masked_head, masked_run), (plan, head, run) = runs
    assert len(head.seen) == len(plan.schedule)
    assert all(torch.equal(a, b) for a, b in zip(head.seen, masked_head.seen, strict=True))
    assert torch.equal(head.weight, masked_head.weight)
    # Without masks every integer can be read: C / (beta b) * (sum - b M / 2), in fractions.
    bits = next(k for k in range(17) if 2**k > num_trials)
    masked_bits = next(k for k in range(17) if 2**k > num_trials * plan.num_parties)
    clear, hidden = payloads(run.transcript), payloads(masked_run.transcript)
    equal = total = 0
    for number, sums in enumerate(head.seen):
        count = sums.numel()
        group = slice(number * plan.num_parties, (number + 1) * plan.num_parties)
        values = [unpacked(payload, bits, count) for payload in clear[group]]
        assert max(max(party) for party in values) <= num_trials
        scale = Fraction(65536, plan.beta_16 * num_trials)
        for at, found in enumerate(sums.reshape(-1).tolist()):
            exact = scale * (sum(party[at] for party in values) - Fraction(num_trials * plan.num_parties, 2))
            assert abs(Fraction(found) - exact) <= abs(exact) * Fraction(1, 2**22)
        for seen, payload in zip(values, hidden[group], strict=True):
            equal += sum(a == b for a, b in zip(seen, unpacked(payload, masked_bits, count), strict=True))
            total += count
    # What travels under a mask agrees with what it hides as often as a blind guess does.
    assert not statistical.count_rejects(equal, total, 2.0**-masked_bits)


# --- processes ---


@pytest.mark.slow
def test_parties_in_processes_send_the_same_bytes_as_parties_in_this_process(make_data, make_plan):
    data = make_data(num_parties=2, num_samples=23, num_test_samples=7)
    plan = make_plan(data, evaluation="released", gradient_codec="int8", momentum=0.5)
    heard, results = [], []
    for where in Parties:
        federation = known_federation(plan, parties=where)
        heard.append(listen(federation))
        results.append(federation.fit(data))
    assert heard[0] == heard[1]
    assert len(payloads(heard[0])) == 2 * (len(plan.schedule))
    assert results[0].metrics == results[1].metrics
    assert results[0].traffic == results[1].traffic
    assert all(result.noise_is_seeded for result in results)


def test_own_networks_are_refused_in_processes(data, make_plan):
    plan = make_plan(data)
    with pytest.raises(PlanError, match="in-process"):
        Federation(plan, encoders=[Bounded(f) for f in networks(plan, 4)], parties=Parties.PROCESSES)
    with pytest.raises(PlanError, match="2 encoders"):
        Federation(plan, encoders=[Bounded(f) for f in networks(plan, 4)[:2]])


# --- what a public seed fixes, and what it does not ---


def without_time(history: tuple[EpochLine, ...]) -> list[EpochLine]:
    return [dataclasses.replace(line, seconds=0.0) for line in history]


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_the_public_seed_reproduces_a_whole_exact_run(codec, data, make_plan):
    plan = make_plan(data, mechanism="none", gradient_codec=codec, evaluation="released")
    (first, one), (second, other) = fitted(plan, data), fitted(plan, data)
    assert payloads(one) == payloads(other)
    assert payloads(one, kind=5) == payloads(other, kind=5)  # gradients
    assert first.metrics == second.metrics
    assert without_time(first.history) == without_time(second.history)
    assert one != other  # runs and sessions are never the same


def test_another_seed_gives_another_run(data, make_plan):
    plan = make_plan(data, mechanism="none")
    (_, one), (_, other) = fitted(plan, data), fitted(plan.replace(seed=8), data)
    assert payloads(one) != payloads(other)


def test_the_public_seed_fixes_the_first_weights_and_nothing_of_torch_s_own_generator(data, make_plan):
    plan = make_plan(data)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    built = [build_encoder(plan, index=i, input_shape=(4,)).state_dict() for i in (0, 0, 1)]
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    again = build_encoder(plan, index=0, input_shape=(4,)).state_dict()
    other = build_encoder(plan.replace(seed=8), index=0, input_shape=(4,)).state_dict()
    for name, value in built[0].items():
        assert torch.equal(value, built[1][name])
        assert torch.equal(value, again[name])
        assert not torch.equal(value, built[2][name])
        assert not torch.equal(value, other[name])


def test_the_weights_of_every_role_start_differently(data, make_plan):
    plan = make_plan(data, num_classes=3, embedding_dim=4)
    starts = [build_encoder(plan, index=i, input_shape=(4,)).network[-1].bias[:3] for i in range(3)]
    starts.append(build_head(plan).bias[:3])
    assert len({tuple(start.tolist()) for start in starts}) == 4


@pytest.mark.parametrize("choices", [{}, {"secure_aggregation": False}, {"mechanism": "ldp"}], ids=str)
def test_noise_is_not_seeded_by_the_public_seed(choices, data, make_plan):
    plan = make_plan(data, **choices)
    (first, one), (second, other) = fitted(plan, data), fitted(plan, data)
    # Masks alone would make the embeddings differ; the first gradient depends on the sums, which have none. Its 30 sums
    # equal by chance: below 0.4 ** 30.
    first_gradients = [next(gradient for gradient in payloads(heard, kind=5) if gradient) for heard in (one, other)]
    assert first_gradients[0] != first_gradients[1]
    assert payloads(one)[:3] != payloads(other)[:3]
    assert not first.noise_is_seeded
    assert not second.noise_is_seeded


def test_a_run_with_known_noise_says_so(data, make_plan):
    federation = known_federation(make_plan(data))
    result = federation.fit(data)
    assert result.noise_is_seeded
    assert any("epsilon is infinite" in note for note in result.notes)
    assert result.to_dict()["noise_is_seeded"] is True


def test_known_noise_and_known_keys_repeat_a_run_to_the_byte_and_other_bytes_do_not(data, make_plan):
    runs = []
    for setup_kind in (KnownSetup, KnownSetup, SameSetup):
        federation = known_federation(make_plan(data), setup_kind=setup_kind)
        runs.append(listen(federation))
        federation.fit(data)
    assert runs[0] == runs[1] != runs[2]


def test_every_party_draws_its_own_noise(make_data, make_plan):
    # The same columns and the same networks at every party: only the noise can differ.
    data = make_data()
    same = data.train_features[0]
    plan = make_plan(data, secure_aggregation=False, num_trials=100)
    object.__setattr__(data, "train_features", (same,) * 3)
    network = nn.Linear(4, plan.embedding_dim)
    _, heard = fitted(plan, data, encoders=[Bounded(copy.deepcopy(network)) for _ in range(3)])
    first_round = payloads(heard)[:3]
    assert len(set(first_round)) == 3  # equal by chance: below 0.1 ** 30


@pytest.mark.parametrize("num_parties", [2, 5])
def test_the_gradient_is_encoded_once_and_is_the_same_for_all_parties(num_parties, make_data, make_plan):
    data = make_data(num_parties=num_parties)
    _, heard = fitted(make_plan(data, gradient_codec="int8"), data)
    by_party = [[m for way, party, m in heard if way == "down" and party == index] for index in range(num_parties)]
    assert all(messages == by_party[0] for messages in by_party)


def test_rows_travel_in_the_order_of_the_schedule(data, make_plan):
    # The first round of an exact run, recomputed from the first weights: one float32 a value, little-endian.
    plan = make_plan(data, mechanism="none")
    _, heard = fitted(plan, data)
    rows = plan.schedule[0].rows
    for index, payload in enumerate(payloads(heard)[: plan.num_parties]):
        linear = build_encoder(plan, index=index, input_shape=(4,)).network[-1]
        x = data.train_features[index][rows].astype(np.float64)
        expected = np.tanh(x @ linear.weight.detach().double().numpy().T + linear.bias.detach().double().numpy())
        found = struct.unpack(f"<{expected.size}f", payload)
        assert np.abs(np.array(found).reshape(expected.shape) - expected).max() < 1e-6
