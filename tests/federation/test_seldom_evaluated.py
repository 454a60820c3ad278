"""Exact evaluations of large tables: not after every epoch, and what a result promises holds all the same."""

from __future__ import annotations

import csv
import io

import pytest

from pbmvfl.federation import run
from pbmvfl.federation.epoch_history import history_csv
from pbmvfl.federation.federation import Federation
from pbmvfl.federation.results import Result
from pbmvfl.federation.run import evaluated_every
from pbmvfl.plan.plan import Plan
from support.federation_runs import limit_of, make_ledgers, set_limit
from support.known_randomness import known_federation

EPOCHS = 7


def evaluated(result: Result) -> list[float]:
    return [line.epoch for line in result.history if line.train_accuracy is not None]


@pytest.fixture
def seldom(monkeypatch, data):
    """Two epochs lie between evaluations."""
    rows = data.num_samples + data.num_test_samples
    monkeypatch.setattr(run, "_MOST_EVALUATED", rows * EPOCHS // 3 + 1)


def test_the_rule_follows_from_public_sizes_and_bounds_the_rows_that_are_evaluated():
    sizes = {"num_parties": 5, "num_classes": 2, "num_epochs": 40}
    for rows in (1_000, 26_000, 65_000, 130_000, 260_000, 521_000, 5_000_000):
        plan = Plan.of(num_samples=rows, num_test_samples=rows // 4, **sizes)
        every, each = evaluated_every(plan), rows + rows // 4
        assert every == 1 if 40 * each <= 2**19 else every > 1
        assert 40 // every * each <= 2**19
        assert every == 1 or (40 / (every - 1)) * each > 2**19  # and no more seldom than that


def test_every_few_epochs_and_the_last_are_evaluated_as_if_all_were(data, make_plan, monkeypatch):
    plan = make_plan(data, num_epochs=EPOCHS)
    always = known_federation(plan).fit(data)
    rows = data.num_samples + data.num_test_samples
    monkeypatch.setattr(run, "_MOST_EVALUATED", rows * EPOCHS // 3 + 1)
    result = known_federation(plan).fit(data)
    assert evaluated(always) == [1, 2, 3, 4, 5, 6, 7]
    assert evaluated(result) == [3, 6, 7]
    assert [line.epoch for line in result.history] == [1, 2, 3, 4, 5, 6, 7]
    assert result.metrics == always.metrics
    assert result.classes == always.classes
    for line, other in zip(result.history, always.history, strict=True):
        assert line.released == other.released  # the server's own figures are there in every epoch
        assert line.train_loss == other.train_loss
        if line.train_accuracy is not None:
            assert line.metrics == other.metrics


@pytest.mark.usefixtures("seldom")
def test_history_has_the_same_columns_and_gaps(data, make_plan):
    result = Federation(make_plan(data, num_epochs=EPOCHS)).fit(data)
    lines = list(csv.DictReader(io.StringIO(history_csv(result.history))))
    assert list(lines[0])[:4] == ["epoch", "train_loss", "train_accuracy", "test_accuracy"]
    assert [line["epoch"] for line in lines if line["test_accuracy"]] == ["3", "6", "7"]


@pytest.mark.usefixtures("seldom")
@pytest.mark.parametrize("allowed", [1.5, 2.2, 4.5])
def test_a_run_that_a_ledger_ends_is_evaluated_where_it_ended(allowed, data, make_plan, tmp_path):
    plan = make_plan(data, num_epochs=EPOCHS)
    make_ledgers(tmp_path, data.party_names)
    set_limit(tmp_path / "party-1.sqlite", data.name, limit_of(plan, allowed))
    result = Federation(plan).fit(data, ledger=tmp_path, exact_metrics=True, until_limit=True)
    assert result.stopped
    assert 0 < result.history[-1].epoch < EPOCHS
    assert {"train_accuracy", "test_accuracy"} <= set(result.metrics)
    epochs = [line.epoch for line in result.history]
    assert epochs == sorted(set(epochs))


@pytest.mark.usefixtures("seldom")
def test_a_run_that_diverges_is_evaluated_where_it_ended(data, make_plan, monkeypatch):
    monkeypatch.setattr(run, "divergence", lambda *said: "it went astray" if said[-1] == 2 else None)
    result = Federation(make_plan(data, num_epochs=EPOCHS)).fit(data)
    assert result.diverged
    assert evaluated(result) == [2]
    assert "test_accuracy" in result.metrics
