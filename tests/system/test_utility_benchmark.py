"""The yardstick's own arithmetic: what it says about baselines must be as right as what is said about ours."""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from benchmarks.utility import local_dp, page
from benchmarks.utility.learning import Recipe, advantage_of, learned, sampled_noise, shift_of
from benchmarks.utility.methods import METHODS
from benchmarks.utility.records import Records
from benchmarks.utility.tables import Part, Table, _mapped, _splits
from dp_accounting import pld

CONFIG = tomllib.loads((Path(__file__).parents[2] / "benchmarks" / "utility" / "config.toml").read_text())


def _table(rng: np.random.Generator, rows: int = 400) -> Table:
    columns = rng.uniform(-1, 1, size=(2 * rows, 3)).astype(np.float32)
    labels = (columns[:, 0] + 0.3 * rng.normal(size=2 * rows) > 0).astype(np.int64)
    train, judged = (
        Part(rows_ND=columns[at], bound=math.sqrt(3), centred_share=1.0) for at in (slice(rows), slice(rows, None))
    )
    return Table(
        name="made up",
        num_classes=2,
        train=(train,),
        labels=labels[:rows],
        judged=(judged,),
        judged_labels=labels[rows:],
        columns=(columns[:rows],),
        judged_columns=(columns[rows:],),
        column_values=None,
    )


@pytest.mark.parametrize("epsilon", CONFIG["epsilons"])
def test_the_shift_has_the_epsilon_by_dp_accounting(epsilon):
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_accounting.GaussianDpEvent(1 / shift_of(epsilon, 1e-5)))
    assert accountant.get_epsilon(1e-5) == pytest.approx(epsilon, rel=1e-3)


def test_sampling_every_row_is_a_full_batch():
    mu = shift_of(2.0, 1e-5)
    assert sampled_noise(2.0, 1e-5, 1.0, 10, 0.0) == pytest.approx(2 * math.sqrt(10) / mu, rel=2e-3)


def test_the_advantage_of_a_shift_is_that_of_the_best_threshold():
    mu, grid = 0.9, np.linspace(-9, 9, 200_001)
    density = np.exp(-(grid**2) / 2) - np.exp(-((grid - mu) ** 2) / 2)
    variation = np.abs(density).sum() * (grid[1] - grid[0]) / math.sqrt(2 * math.pi) / 2
    assert advantage_of(mu) == pytest.approx(variation, abs=1e-4)


@pytest.mark.parametrize(("count", "size", "epsilon"), [(1, 2, 1.0), (1, 5, 2.0), (3, 3, 0.7), (4, 2, 0.5)])
def test_the_advantage_of_responses_is_the_total_variation_of_all_outcomes(count, size, epsilon):
    kept = math.exp(epsilon) / (math.exp(epsilon) + size - 1)
    other = (1 - kept) / (size - 1)
    variation = 0.0
    for outcome in itertools.product(range(size), repeat=count):
        first, second = (math.prod(kept if each == at else other for each in outcome) for at in (0, 1))
        variation += abs(first - second) / 2
    assert local_dp.responses_advantage(count, size, epsilon) == pytest.approx(variation, rel=1e-12)


responses, log_likelihoods = local_dp._responses, local_dp._log_likelihoods


def test_a_response_keeps_its_symbol_as_often_as_it_says():
    # 200,000 draws: 6.5 deviations, a false alarm in 10^10 runs.
    rng, count, size, epsilon = np.random.default_rng(0), 200_000, 4, 1.5
    sent = responses(np.full(count, 2), size, epsilon, rng)
    kept = math.exp(epsilon) / (math.exp(epsilon) + size - 1)
    expected = np.full(size, (1 - kept) / (size - 1))
    expected[2] = kept
    seen = np.bincount(sent, minlength=size) / count
    assert np.all(np.abs(seen - expected) < 6.5 * np.sqrt(expected * (1 - expected) / count))


def test_tables_from_responses_find_the_law_before_them():
    rng = np.random.default_rng(1)
    labels = np.arange(200_000) % 2
    symbols = (rng.random(len(labels)) < np.where(labels == 1, 0.8, 0.3)).astype(np.int64)
    sent = responses(symbols, 2, 1.0, rng)
    found = np.exp(log_likelihoods(sent, labels, 2, 2, 1.0))
    np.testing.assert_allclose(found, [[0.7, 0.2], [0.3, 0.8]], atol=0.02)


def test_rows_of_values_have_the_bound_as_norm():
    part = _mapped(np.random.default_rng(2).integers(0, 3, size=(50, 6)).astype(np.float32) / 2, 3)
    assert part.rows_ND.shape == (50, 153)
    np.testing.assert_allclose(np.linalg.norm(part.rows_ND, axis=1), part.bound, rtol=1e-6)


def test_hold_outs_share_no_row_with_what_is_learned_from():
    for kept, held in _splits("phishing", 1000):
        assert set(kept).isdisjoint(held)
        assert max(*kept, *held) < 1000


def test_more_privacy_learns_less():
    rng = np.random.default_rng(3)
    table = _table(rng)
    accuracies = []
    for epsilon in (math.inf, 0.01):
        model = learned(
            table.train[0], table.labels, table.prior_K, Recipe(), epsilon=epsilon, delta=1e-5, rng=rng
        )  # fmt: skip
        accuracies.append((model(table.judged[0]).argmax(axis=1) == table.judged_labels).mean())
    assert accuracies[0] > 0.85 > accuracies[1] + 0.05


def test_results_continue_where_they_stopped(tmp_path):
    path = tmp_path / "results.jsonl"
    record = {"dataset": "phishing", "method": "ours", "epsilon": 8.0, "seed": 1, "accuracy": 0.9}
    Records(path).add(record)
    assert Records(path).find("phishing", "ours", 8.0, 1) == record
    assert Records(path).find("phishing", "ours", 8.0, 2) is None
    with path.open("a") as file:
        file.write('{"dataset": "phi')
    with pytest.raises(SystemExit, match=r"results.jsonl:2 is no result"):
        Records(path)


def test_page_and_picture_come_from_results_alone(tmp_path):
    path = tmp_path / "results.jsonl"
    lines = [
        {"dataset": dataset, "method": name, "epsilon": epsilon, "seed": seed}
        | {"accuracy": 0.8 + seed / 100, "advantage": 0.3}
        for dataset in CONFIG["datasets"]
        for name in METHODS
        for epsilon in (CONFIG["epsilons"] if METHODS[name].is_private else [None])
        for seed in (0, 1)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page.write(CONFIG, Records(path), tmp_path / "docs")
    text = (tmp_path / "docs" / "evidence" / "utility.md").read_text()
    assert ".805 ± .007" in text
    assert all(method.label in text for method in METHODS.values())
    assert (tmp_path / "docs" / "images" / "utility.png").stat().st_size > 10_000
