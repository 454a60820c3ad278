"""The simulation against Party and Server: equal weights without noise, equal laws with it, and light to import."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from pbmvfl.crypto.public_streams import SCHEDULE_STREAM, public_permutation
from pbmvfl.errors import PlanError
from pbmvfl.federation.federation import Federation
from pbmvfl.mechanisms import PoissonBinomial
from pbmvfl.mechanisms.simulated import (
    BinomialSum,
    CompiledBinomialSum,
    GaussianSum,
    compared_sum,
    success_probability,
)
from pbmvfl.plan.plan import Plan
from pbmvfl.research.reproduction import cuda
from pbmvfl.research.simulation import Simulation, graphed
from pbmvfl.research.simulation.augmentation import crop_and_flip, cut, joined
from pbmvfl.research.simulation.engine import noise_seed, noisy_sum
from pbmvfl.research.simulation.graphed import Execution, GraphedSimulation, evaluate_together, take_turns
from pbmvfl.training.encoders import build_encoder
from support import statistical

CPU = torch.device("cpu")


def federation_weights(plan, data, folder: Path) -> tuple[list[dict], dict]:
    from safetensors.torch import load_file

    Federation(plan).fit(data, checkpoints=folder)

    def newest(role: str) -> dict:
        return load_file(max((folder / role).glob("round-*")))

    return [newest(f"party-{m}") for m in range(plan.num_parties)], newest("server")


def largest_difference(plan, data, folder: Path) -> float:
    """Over every weight, between the simulation and the federation after the whole plan."""
    parties, server = federation_weights(plan, data, folder)
    simulation = Simulation(plan, data)
    simulation.fit()
    blank = [build_encoder(plan, index=m, input_shape=x.shape[1:]) for m, x in enumerate(data.train_features)]
    encoders, head = simulation.networks(blank)
    worst = 0.0
    for network, state in [*zip(encoders, parties, strict=True), (head, server)]:
        for name, value in network.state_dict().items():
            worst = max(worst, float((value - state["model." + name]).abs().max()))
    return worst


@pytest.mark.parametrize(
    "choices",
    [
        {"learning_rate": 0.2, "encoder": "mlp"},
        {"learning_rate": 0.1, "momentum": 0.9, "encoder": "mlp"},
        {"learning_rate": 0.01, "optimizer": "adam", "encoder": "mlp"},
        {"learning_rate": 0.2, "encoder": "linear", "bound": 1.7},
        {"learning_rate": 0.2, "encoder": "mlp", "activation": "softsign"},
        {"learning_rate": 0.2, "encoder": "mlp", "activation": "hardtanh", "bound": 0.5},
    ],
    ids=str,
)
def test_without_noise_the_weights_equal_a_federations(choices, data, make_plan, tmp_path):
    plan = make_plan(data, mechanism="none", num_epochs=3, **choices)
    assert largest_difference(plan, data, tmp_path) < 1e-5


def test_parties_with_different_numbers_of_columns_are_padded_without_effect(make_data, make_plan, tmp_path):
    data = make_data()
    cut = [slice(None), slice(None, 2), slice(None, 3)]
    data = replace(
        data,
        train_features=tuple(np.ascontiguousarray(x[:, c]) for x, c in zip(data.train_features, cut, strict=True)),
        test_features=tuple(np.ascontiguousarray(x[:, c]) for x, c in zip(data.test_features, cut, strict=True)),
    )
    for number, choices in enumerate(({"learning_rate": 0.2}, {"learning_rate": 0.01, "optimizer": "adam"})):
        plan = make_plan(data, mechanism="none", num_epochs=3, encoder="mlp", **choices)
        assert largest_difference(plan, data, tmp_path / str(number)) < 1e-5


def test_convolutions_equal_a_federations_too(make_plan, tmp_path):
    plan, data = views(make_plan)
    assert largest_difference(plan, data, tmp_path) < 1e-5


def test_the_comparison_of_weights_would_notice_a_learning_rate_wrong_by_a_thousandth(data, make_plan):
    weights = []
    for rate in (0.2, 0.2002):
        simulation = Simulation(make_plan(data, mechanism="none", encoder="mlp", learning_rate=rate), data)
        simulation.fit()
        weights.append(torch.cat([p.detach().reshape(-1) for p in simulation.encoders.parameters()]))
    assert (weights[0] - weights[1]).abs().max() > 1e-5


def test_metrics_equal_a_federations(data, make_plan):
    plan = make_plan(data, mechanism="none", encoder="mlp", num_epochs=3)
    theirs = Federation(plan).fit(data).history
    ours = Simulation(plan, data).fit()
    for a, b in zip(ours, theirs, strict=True):
        assert a["train_accuracy"] == b.train_accuracy
        assert a["test_accuracy"] == b.test_accuracy
        assert a["train_loss"] == pytest.approx(b.train_loss, abs=1e-5)


# --- the law of the sums ---
# Weights that hardly move (learning rate 1e-9) make every epoch's sums draws from one law per row and coordinate.
# All of them together form one histogram a side; strata only make its cells vary less than a multinomial's, so the
# chi-square of two such histograms is conservative. False alarm: at most 1e-9 (cells expect 500, nominal 1e-10).


def two_histograms_differ(first: np.ndarray, second: np.ndarray, largest: int) -> bool:
    a, b = (np.bincount(x, minlength=largest + 1).astype(float) for x in (first, second))
    together = a + b
    groups = np.minimum(np.cumsum(together) // (2 * statistical.SMALLEST_EXPECTED), 200).astype(int)
    a, b = (np.bincount(groups, weights=x) for x in (a, b))
    keep = a + b >= 2 * statistical.SMALLEST_EXPECTED
    a, b = a[keep], b[keep]
    share = a.sum() / (a + b).sum()
    expected = (a + b) * share
    statistic = ((a - expected) ** 2 / (expected * (1 - share))).sum()
    means = (np.array([x.mean() for x in (first, second)]), np.array([x.var() / len(x) for x in (first, second)]))
    shifted = abs(means[0][0] - means[0][1]) > 6.6 * np.sqrt(means[1].sum())  # two-sided 4e-11 if normal
    return bool(statistic > stats.chi2.isf(statistical.CHI_SQUARE_ALARM, len(a) - 1) or shifted)


def federation_sums(plan, data, make_cohort) -> np.ndarray:
    """Every quantised sum that the server of a real, masked run computes."""
    cohort = make_cohort(plan, data)
    heard: list[np.ndarray] = []
    with pytest.MonkeyPatch.context() as patch:
        estimate = PoissonBinomial.estimate

        def listening(mechanism, total):
            heard.append(total.astype(np.int64).ravel())
            return estimate(mechanism, total)

        patch.setattr(PoissonBinomial, "estimate", listening)
        cohort.run()
    return np.concatenate(heard)


def torch_sum(plan: Plan, device: torch.device) -> BinomialSum:
    assert isinstance(plan.release, PoissonBinomial)
    return BinomialSum(plan.release, seed=noise_seed(plan), device=device)


def simulated_sums(plan, data, make_noise=noisy_sum) -> np.ndarray:
    simulation = Simulation(plan, data)
    heard: list[np.ndarray] = []
    noise = make_noise(plan, CPU)
    draw = noise.quantized_sum

    def listening(embedding):
        total = draw(embedding)
        heard.append(total.to(torch.int64).numpy().ravel())
        return total

    noise.quantized_sum = listening
    simulation._noisy_sum = noise
    for _ in range(plan.num_epochs):
        simulation.run_epoch()
    return np.concatenate(heard)


@pytest.mark.slow
@pytest.mark.parametrize(("num_trials", "beta"), [(5, 0.25), (64, 0.1)])
def test_sums_have_the_law_of_a_federations(num_trials, beta, data, make_plan, make_cohort):
    # Wide columns drive the embeddings to both ends, where beta shows.
    data = replace(data, train_features=tuple(9 * x for x in data.train_features))
    choices = {"num_epochs": 300, "learning_rate": 1e-9, "encoder": "linear", "num_trials": num_trials}
    plan = make_plan(data, beta=beta, **choices)
    real = federation_sums(plan, data, make_cohort)
    assert real.size == 300 * data.num_samples * plan.embedding_dim
    largest = plan.num_trials * plan.num_parties
    for make_noise in (noisy_sum, torch_sum):
        assert not two_histograms_differ(real, simulated_sums(plan, data, make_noise), largest)
    # The controls, which must fail: another beta, and a trial too few.
    wider = make_plan(data, **choices, beta=beta * 0.7)
    assert two_histograms_differ(real, simulated_sums(wider, data), largest)
    fewer = make_plan(data, **(choices | {"num_trials": num_trials - 1}), beta=beta)
    assert two_histograms_differ(real, simulated_sums(fewer, data), largest)


@pytest.mark.parametrize("num_trials", [1, 7, 24, 25, 64, 65, 130])
def test_the_compiled_sampler_follows_the_binomial_law(num_trials):
    plan = Plan.of(num_parties=2, num_samples=1, num_classes=2, embedding_dim=1, num_trials=num_trials, beta=0.2)
    noise = noisy_sum(plan, CPU)
    assert isinstance(noise, CompiledBinomialSum)
    # Both parties at one value: the sum is one binomial of twice the trials. Checked as `statistical` states.
    embedding = torch.full((2, statistical.NUM_DRAWS, 1), 0.3)
    p_16 = int(success_probability(embedding[0, 0], plan.release)[0])
    counts = np.bincount(noise.quantized_sum(embedding).numpy().ravel(), minlength=2 * num_trials + 1)
    assert not statistical.binomial_law_rejects(counts, 2 * num_trials, Fraction(p_16, 65536))
    assert statistical.binomial_law_rejects(counts, 2 * num_trials, Fraction(p_16 + 1400, 65536))


def test_comparisons_on_a_device_follow_the_same_law():
    plan = Plan.of(num_parties=3, num_samples=1, num_classes=2, embedding_dim=1, num_trials=6, beta=0.1)
    p_16 = success_probability(torch.full((3, statistical.NUM_DRAWS, 1), -0.5), plan.release)
    total = compared_sum(p_16, 6, torch.Generator().manual_seed(1)).numpy().ravel()
    counts = np.bincount(total, minlength=19)
    assert not statistical.binomial_law_rejects(counts, 18, Fraction(int(p_16[0, 0, 0]), 65536))


def test_probabilities_equal_the_parties_own_integers():
    """The parties' sampler is asked with every possible random integer: the count is its probability."""
    mechanism = PoissonBinomial(num_trials=1 << 14, beta=0.13, bound=1.5, num_parties=2, embedding_dim=1)
    plan = Plan.of(num_parties=2, num_samples=1, num_classes=2, num_trials=1, beta=0.13, bound=1.5)

    class Integers:
        seeded = True

        def __init__(self, first):
            self.first = first

        def fill(self, buffer):
            buffer[:] = np.arange(self.first, self.first + (1 << 14))

    for x in (-1.5, -1.4999, -0.77, -1e-5, 0.0, 0.3333, 1.2, 1.5):
        value = np.array([x], dtype=np.float32)
        theirs = sum(int(mechanism.randomize(value, Integers(first))[0]) for first in range(0, 1 << 16, 1 << 14))
        assert theirs == int(success_probability(torch.from_numpy(value), plan.release)[0])


def test_the_gaussian_sum_has_the_variance_of_all_parties_together():
    plan = Plan.of(num_parties=4, num_samples=1, num_classes=2, mechanism="ldp", num_trials=8, beta=0.1, bound=0.5)
    noise = noisy_sum(plan, CPU)
    assert isinstance(noise, GaussianSum)
    drawn = noise(torch.zeros(4, statistical.NUM_DRAWS, 1)).numpy().ravel().astype(float)
    variance = 4 * 2 * 4 * 0.25 / (8 * 0.01)
    assert not statistical.normal_law_rejects(drawn, mean=0, variance=variance)
    assert statistical.normal_law_rejects(drawn, mean=0, variance=variance * 1.05)


def test_odd_embeddings_are_drawn_as_those_of_parties_are():
    plan = Plan.of(num_parties=2, num_samples=1, num_classes=2, embedding_dim=1)
    for noise in (noisy_sum(plan, CPU), torch_sum(plan, CPU)):
        for odd, same in ((math.nan, 0.0), (math.inf, 1.0), (-math.inf, -1.0)):
            start = noise.state()
            first = noise(torch.tensor([[[0.0]], [[odd]]]))
            noise.load_state(start)
            assert torch.equal(first, noise(torch.tensor([[[0.0]], [[same]]])))


# --- a run ---


def test_a_run_can_be_repeated_and_two_configurations_share_no_noise(data, make_plan):
    plan = make_plan(data, encoder="mlp")
    first, second = (Simulation(plan, data).fit() for _ in range(2))
    assert [line["train_loss"] for line in first] == [line["train_loss"] for line in second]
    assert noise_seed(plan) != noise_seed(plan.replace(beta=0.2)) != noise_seed(plan.replace(seed=8))
    assert noise_seed(plan) == noise_seed(plan.replace(num_epochs=9))


@pytest.mark.parametrize("mechanism", ["pbm", "ldp"])
def test_a_run_continued_after_some_epochs_is_the_same_run(mechanism, data, make_plan):
    plan = make_plan(data, encoder="mlp", num_epochs=4, momentum=0.5, mechanism=mechanism)
    whole = Simulation(plan, data).fit()
    half = Simulation(plan, data)
    assert len(half.fit(limit_epochs=2)) == 2
    assert [line["train_loss"] for line in half.fit()] == [line["train_loss"] for line in whole]


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ({"noise_multiplier": 1.0}, "noise_multiplier"),
        ({"gradient_codec": "int8"}, "gradient_codec"),
        ({"evaluation": "released"}, "evaluation"),
    ],
)
def test_what_a_simulation_would_do_differently_is_refused(choices, named, data, make_plan):
    with pytest.raises(PlanError, match=named):
        Simulation(make_plan(data, encoder="mlp", **choices), data)


def test_the_engine_imports_and_runs_with_torch_and_numpy_alone():
    program = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        root = name.partition('.')[0]
        if root in {'numba', 'cryptography', 'sklearn', 'scipy', 'rich', 'typer', 'matplotlib', 'dp_accounting',
                    'pyarrow', 'safetensors', 'pandas'}:
            raise ImportError(name + ' is blocked')
sys.meta_path.insert(0, Block())
import numpy as np, torch
from pbmvfl.plan.plan import Plan
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.research.simulation import Simulation
import pbmvfl.research.reproduction.cuda
x = tuple(np.random.default_rng(m).normal(size=(30, 4)).astype(np.float32) for m in range(3))
y = np.arange(30) % 3
data = VerticalDataset(name='t', party_names=('a', 'b', 'c'), train_features=x, test_features=x, train_labels=y,
                       test_labels=y, class_names=('0', '1', '2'), default_encoder='mlp')
for mechanism in ('pbm', 'ldp', 'none'):
    history = Simulation(Plan.for_data(data, mechanism=mechanism, num_epochs=2, batch_size=10), data).fit()
    assert len(history) == 2
print('ran')
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ran\n"


def views(make_plan):
    """Two parties with one small picture each."""
    from pbmvfl.data.vertical import VerticalDataset

    random = np.random.default_rng(3)
    labels = np.arange(14) % 2
    pictures = [random.integers(0, 256, (14, 1, 16, 16)).astype(np.uint8) for _ in range(2)]
    data = VerticalDataset(
        name="views",
        party_names=("left", "right"),
        train_features=tuple(p[:10] for p in pictures),
        test_features=tuple(p[10:] for p in pictures),
        train_labels=labels[:10],
        test_labels=labels[10:],
        class_names=("0", "1"),
        default_encoder="multiview-conv",
    )
    return make_plan(data, mechanism="none", batch_size=4, learning_rate=0.01), data


# --- the engine for a GPU, on the CPU ---


def quadrants(num_samples: int = 10, side: int = 16):
    from pbmvfl.data.vertical import VerticalDataset, picture_quadrants

    random = np.random.default_rng(5)
    rows = num_samples + 6
    pictures = random.integers(0, 256, (rows, 3, side, side)).astype(np.uint8)
    labels = np.arange(rows) % 3
    return VerticalDataset(
        name="pictures",
        party_names=("a", "b", "c", "d"),
        train_features=picture_quadrants(pictures[:num_samples]),
        test_features=picture_quadrants(pictures[num_samples:]),
        train_labels=labels[:num_samples],
        test_labels=labels[num_samples:],
        class_names=("0", "1", "2"),
        default_encoder="resnet18",
        layout="quadrants",
    )


@pytest.mark.slow
def test_captured_rounds_equal_a_federation_without_noise(make_plan, tmp_path):
    # 10 rows in batches of 6 leave a short round, which a GPU captures separately.
    data = quadrants(num_samples=10, side=32)
    plan = make_plan(
        data,
        mechanism="none",
        encoder="resnet18-batchnorm",
        batch_size=6,
        learning_rate=0.001,
        num_epochs=1,
        momentum=0.5,
    )
    parties, server = federation_weights(plan, data, tmp_path)
    simulation = GraphedSimulation(plan, data, execution=Execution.on("cpu"))
    simulation.run_epoch()
    for network, state in [*zip(simulation.encoders, parties, strict=True), (simulation.head, server)]:
        for name, value in network.state_dict().items():
            if "num_batches" in name or "running" in name:
                continue
            assert (value - state["model." + name]).abs().max() < 1e-5, name
    for encoder, state in zip(simulation.encoders, parties, strict=True):
        for name, value in encoder.state_dict().items():
            if "running" in name:  # evaluation on batch statistics leaves the running ones alone
                assert torch.allclose(value, state["model." + name], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("choices", [{}, {"momentum": 0.9}, {"optimizer": "adam", "learning_rate": 0.001}], ids=str)
def test_captured_rounds_with_noise_can_be_continued(choices, make_plan, tmp_path):
    data = quadrants(num_samples=8)
    plan = make_plan(data, encoder="multiview-conv", batch_size=4, num_epochs=4, **choices)
    whole = GraphedSimulation(plan, data, execution=Execution.on("cpu"), augment=True)
    losses = [whole.run_epoch()["train_loss"] for _ in range(4)]
    first = GraphedSimulation(plan, data, execution=Execution.on("cpu"), augment=True)
    first.run_epoch()
    first.run_epoch()
    first.save(tmp_path / "state.npz")
    second = GraphedSimulation(plan, data, execution=Execution.on("cpu"), augment=True)
    second.load(tmp_path / "state.npz")
    assert [second.run_epoch()["train_loss"] for _ in range(2)] == losses[2:]


def test_quadrants_of_a_cropped_and_flipped_picture_fit_together():
    data = quadrants(num_samples=7)
    whole = joined(data.train_features)
    for part, mine in zip(cut(whole), data.train_features, strict=True):
        assert np.array_equal(part.permute(0, 3, 1, 2).numpy(), mine)
    moved = crop_and_flip(whole, seed=3, epoch=1)
    assert moved.shape == whole.shape
    # By definition, picture by picture: pad, cut out, mirror; one of the possible results must be it.
    pad = whole.shape[1] // 8
    for picture, result in zip(whole.numpy(), moved.numpy(), strict=True):
        padded = np.pad(picture, ((pad, pad), (pad, pad), (0, 0)))
        side = picture.shape[0]
        offsets = [(y, x) for y in range(2 * pad + 1) for x in range(2 * pad + 1)]
        crops = [padded[y : y + side, x : x + side] for y, x in offsets]
        assert any(np.array_equal(result, crop) or np.array_equal(result, crop[:, ::-1]) for crop in crops)
    assert not torch.equal(moved, crop_and_flip(whole, seed=3, epoch=2))


def recorded(out: Path, dataset: str) -> dict[tuple[str, int], dict]:
    """The runs in a file of records, by the name of the configuration and the seed."""
    lines = map(json.loads, (out / "records" / f"{dataset}.jsonl").read_text().splitlines())
    return {(line["cell"], line["seed"]): line for line in lines}


def test_the_program_for_a_gpu_runs_a_study_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PBMVFL_DATA", str(tmp_path))  # no copy of the data: made-up rows
    monkeypatch.setenv("PBMVFL_CACHE", str(tmp_path / "cache"))
    arguments = ["--study", "table1", "--out", str(tmp_path / "out"), "--device", "cpu", "--quick"]
    assert cuda.main([*arguments, "--only", "b16-beta0.15", "--checkpoints", str(tmp_path / "weights")]) == 0
    (written,) = recorded(tmp_path / "out", "cifar10").values()
    assert written["noise"] == "simulation"
    assert written["stand_in"] is True
    assert "s an epoch each to train" in (tmp_path / "out" / "gpu.log").read_text()


def test_training_accuracy_is_that_of_the_coming_epochs_crops(make_plan, monkeypatch):
    """By hand: whole pictures as the next epoch will see them, cut, embedded, summed, classified."""
    data = quadrants(num_samples=90)
    plan = make_plan(data, mechanism="none", encoder="multiview-conv", batch_size=8, learning_rate=0.1, num_epochs=3)
    simulation = GraphedSimulation(plan, data, execution=Execution.on("cpu"), augment=True)
    for epoch in (1, 2, 3):
        line = simulation.run_epoch()
        pictures = crop_and_flip(joined(data.train_features), seed=plan.seed, epoch=epoch)
        with torch.no_grad():
            parts = [part.permute(0, 3, 1, 2) for part in cut(pictures)]
            total = sum(encoder(part) for encoder, part in zip(simulation.encoders, parts, strict=True))
            right = simulation.head(total).argmax(1).numpy() == data.train_labels
        assert line["train_accuracy"] == pytest.approx(right.mean())
    # Far from a target, the first rows of the next epoch's order are enough.
    monkeypatch.setattr(graphed, "SCREEN_ROWS", 8)
    order = public_permutation(90, seed=plan.seed, stream=SCHEDULE_STREAM, index=4)
    take_turns([simulation])
    (line,) = evaluate_together([simulation], screen=1.1)
    pictures = crop_and_flip(joined(data.train_features), seed=plan.seed, epoch=4)
    first = order[: simulation.screen_groups * simulation._grouped * 8]
    assert 8 <= len(first) < 90
    with torch.no_grad():
        parts = [part.permute(0, 3, 1, 2)[first] for part in cut(pictures)]
        total = sum(encoder(part) for encoder, part in zip(simulation.encoders, parts, strict=True))
        right = simulation.head(total).argmax(1).numpy() == data.train_labels[first]
    assert line["train_accuracy"] == pytest.approx(right.mean())


@pytest.mark.slow
def test_studies_share_a_run_until_each_has_enough(tmp_path, monkeypatch):
    monkeypatch.setenv("PBMVFL_DATA", str(tmp_path))
    monkeypatch.setenv("PBMVFL_CACHE", str(tmp_path / "cache"))
    named = ["--study", "table1", "--study", "figure-cifar"]
    limits = ["--limit-epochs", "2", "--limit-epochs", "1", "--only", "b16-beta0.15"]
    cuda.main([*named, *limits, "--out", str(tmp_path / "out"), "--device", "cpu", "--quick"])
    lengths = {key: line["epochs"] for key, line in recorded(tmp_path / "out", "cifar10").items()}
    assert set(lengths.values()) == {1, 2}
    assert lengths["m4-ldp-b16-beta0.15", 0] == 1  # the figure's own
    assert lengths["m4-pbm-b16-beta0.15", 0] == 2  # of both
    assert (tmp_path / "out" / "gpu.log").read_text().count("ready after") == len(lengths)


def test_a_study_continues_from_its_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setenv("PBMVFL_DATA", str(tmp_path))
    monkeypatch.setenv("PBMVFL_CACHE", str(tmp_path / "cache"))
    arguments = ["--study", "figure-activity", "--device", "cpu", "--quick", "--only", "pbm-", "--seeds", "2"]

    def losses(out: str) -> dict[tuple[str, int], list[float]]:
        return {key: line["history"]["train_loss"] for key, line in recorded(tmp_path / out, "activity").items()}

    cuda.main([*arguments, "--out", str(tmp_path / "whole")])
    parts = [*arguments, "--out", str(tmp_path / "parts"), "--checkpoints", str(tmp_path / "weights")]
    cuda.main([*parts, "--limit-epochs", "1"])
    assert {len(column) for column in losses("parts").values()} == {1}
    cuda.main(parts)
    assert len(losses("whole")) == 2
    assert losses("parts") == losses("whole")
    assert "continues after epoch 1" in (tmp_path / "parts" / "gpu.log").read_text()
