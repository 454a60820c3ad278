"""Budgets on the command line: strict by default, predictions apart, what `privacy RUN` says, and what is refused."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from pbmvfl.plan.plan import Plan


@pytest.fixture
def cli(monkeypatch, run_main, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return run_main


@pytest.fixture
def table(tmp_path: Path) -> tuple[str, ...]:
    """Options for a table of 400 rows, two parties, two columns each."""
    random = np.random.default_rng(3)
    labels = random.integers(0, 2, 400)
    columns = np.clip(random.normal(size=(400, 4)) * 0.3 + (labels[:, None] - 0.5), -1, 1)
    with open(tmp_path / "people.csv", "w", newline="") as file:
        rows = ([*map(str, row), ("no", "yes")[label]] for row, label in zip(columns, labels, strict=True))
        csv.writer(file).writerows([["a", "b", "c", "d", "y"], *rows])
    return ("--data", "people.csv", "--label", "y", "--columns", "one=a,b;two=c,d")


def gaussian_epsilon(mu: float, delta: float) -> float:
    """By bisection on the Gaussian's own curve: an oracle for noisy updates."""
    low, high = 0.0, 200.0
    for _ in range(200):
        e = (low + high) / 2
        lost = norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu)
        low, high = (e, high) if lost > delta else (low, e)
    return high


def strict(rows: list[dict[str, Any]], unit: str = "cell") -> dict[str, Any]:
    (found,) = (
        row
        for row in rows
        if (row["unit"], row["accounting"], row["adversary"], row["colluding_parties"]) == (unit, "strict", "server", 0)
    )
    return found


def read(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    return found


# --- budgets ---


@pytest.mark.parametrize("unit", ["cell", "record"])
def test_a_budget_alone_trains_and_its_noise_is_what_the_gaussian_s_curve_asks_for(unit, cli, table):
    code, out, err = cli("train", *table, "--epsilon", 3, "--unit", unit, "--out", "run", "--json")
    assert code == 0, err
    result = read(out)
    plan = Plan.from_dict(result["plan"])
    assert plan.training == "local"
    shifts = [plan.num_epochs * (2 / plan.noise_multiplier) ** 2]
    if plan.preparation == "whiten":
        shifts += [(2 / plan.mean_noise) ** 2, 2 / plan.gram_noise**2]
    parties = plan.num_parties if unit == "record" else 1
    epsilon = gaussian_epsilon(math.sqrt(parties * sum(shifts)), 1e-5)
    assert 2.99 < epsilon <= 3
    assert strict(result["privacy"], unit)["epsilon"] == pytest.approx(epsilon, rel=1e-4)
    assert result["metrics"]["test_accuracy"] > 0.8


def test_without_any_number_the_budget_is_8_and_numbers_of_a_mechanism_are_the_paper_s_training(cli, table):
    code, out, err = cli("train", *table, "--out", "run", "--json")
    assert code == 0, err
    usual = read(out)
    assert 7.99 < strict(usual["privacy"])["epsilon"] <= 8
    code, out, err = cli("train", *table, "--num-trials", 4, "--num-epochs", 1, "--out", "other", "--json")
    assert code == 0, err
    assert Plan.from_dict(read(out)["plan"]).training == "joint"


def test_paper_accounting_is_asked_for_by_name(cli, table):
    code, out, err = cli("train", *table, "--epsilon", 8, "--accounting", "paper", "--out", "run", "--json")
    assert code == 0, err
    plan = Plan.from_dict(read(out)["plan"])
    assert (plan.training, plan.mechanism) == ("joint", "pbm")
    assert 7.9 < plan.privacy(delta=1e-5).epsilon("cell", "paper") <= 8


def test_predicted_rows_have_their_own_epsilon_and_a_row_in_both_pays_for_both(cli, table):
    code, out, err = cli(
        "train", *table, "--epsilon", 3, "--prediction-epsilon", 2, "--out", "run", "--ledger", "books", "--json"
    )
    assert code == 0, err
    assert set(read(out)["metrics"]) >= {"test_accuracy"}
    code, out, err = cli("privacy", "run", "--json")
    assert code == 0, err
    spent = read(out)
    assert 2.99 < strict(spent["bounds_by_split"]["train"])["epsilon"] <= 3
    assert 1.99 < strict(spent["bounds_by_split"]["test"])["epsilon"] <= 2
    (label,) = [each for each in spent["ledgers"] if "label" in each]
    assert 3.99 < label["label"] <= 4
    books = [each for each in spent["ledgers"] if each is not label]
    assert len(books) == 2
    for book in books:
        for unit in ("cell", "record"):
            assert book[unit] == pytest.approx(spent["strict_as_ledgers_count"][unit], rel=1e-9)
    code, out, err = cli("privacy", "run")
    assert code == 0, err
    words = " ".join(out.split())
    assert "of training rows" in words
    assert "of predicted rows" in words
    assert "a row that is trained on and also predicted: epsilon" in words


def test_with_same_rows_the_epsilon_is_the_total(cli, table):
    options = ("--epsilon", 5, "--prediction-epsilon", 2, "--same-rows", "--out", "run", "--json")
    code, out, err = cli("train", *table, *options)
    assert code == 0, err
    trained = Plan.from_dict(read(out)["plan"]).training_run().of_split("train")
    code, out, err = cli("privacy", "run", "--json")
    left = strict(read(out)["bounds_by_split"]["train"])["epsilon"]
    assert 2.8 < left < 3.3  # what a pure epsilon of 2 leaves of 5
    assert trained.splits == ("train",)


def test_a_plan_s_file_has_its_own_privacy(cli):
    code, _, err = cli(
        *("plan", "--epsilon", 2, "--num-parties", 3, "--num-samples", 5000, "--num-classes", 4),
        *("--columns", 10, "--prediction-epsilon", 4, "--out", "plan.json"),
    )
    assert code == 0, err
    code, out, err = cli("privacy", "plan.json", "--json")
    assert code == 0, err
    spent = read(out)
    assert 1.99 < strict(spent["bounds_by_split"]["train"])["epsilon"] <= 2
    assert 3.99 < strict(spent["bounds_by_split"]["test"])["epsilon"] <= 4


def test_a_plan_says_how_many_columns_parties_have(cli, table):
    code, out, err = cli("plan", *table[:-1], "one=a;two=b,c,d")
    assert code == 0, err
    assert "320 training rows, 2 classes, 2 parties of 1 to 3 columns" in " ".join(out.split())
    people = Path("people.csv").read_text().splitlines()
    people = [people[0] + ",job", *(f"{line},{('cook', 'nurse')[i % 2]}" for i, line in enumerate(people[1:]))]
    Path("people.csv").write_text("\n".join(people) + "\n")
    Path("schema.json").write_text('{"columns": {"job": {"vocabulary": ["cook", "nurse"], "other": true}}}')
    for held, said in (
        ("one=a,b;two=c,job", "2 parties of 2 columns, as 2 to 4 numbers"),
        ("one=a;two=b,c,d,job", "2 parties of 1 to 4 columns, as 1 to 6 numbers"),
    ):
        code, out, err = cli("plan", *table[:-1], held, "--schema", "schema.json")
        assert code == 0, err
        assert said in " ".join(out.split())
    code, out, err = cli("plan", "--num-parties", 3, "--num-samples", 500, "--num-classes", 2, "--columns", 9)
    assert code == 0, err
    assert "3 parties of at most 9 columns" in " ".join(out.split())


@pytest.mark.parametrize(
    "options",
    [
        ("--features", "columns", "--clip-norm", 0.5),
        ("--features", "pairs", "--momentum", 0.5),
        ("--encoder", "linear", "--activation", "softsign", "--accounting", "paper"),
    ],
)
def test_a_plan_takes_the_settings_that_training_takes(cli, table, options):
    code, out, err = cli("plan", *table, "--epsilon", 8, *options, "--json")
    assert code == 0, err
    planned = Plan.from_dict(read(out)["plan"])
    for name, value in zip(options[:4:2], options[1:4:2], strict=True):
        assert getattr(planned, name[2:].replace("-", "_")) == value
    code, out, err = cli("train", *table, "--epsilon", 8, *options, "--out", "run", "--json")
    assert code == 0, err
    assert Plan.from_dict(read(out)["plan"]) == planned


def test_where_noise_leaves_nothing_to_learn_it_is_said_before_training(cli, table):
    code, out, err = cli("train", *table, "--epsilon", 0.003, "--out", "run", "--verbose")
    assert code == 0, err
    assert "leaves nothing: expect the rate of the most frequent class" in " ".join(out.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--epsilon", 0), "epsilon=0.0 must be a finite number above 0"),
        (("--epsilon", "nan"), "epsilon=nan must be a finite number above 0"),
        (("--epsilon", 8, "--delta", 0), "delta=0.0; permitted: above 0 and below 1"),
        (("--epsilon", 8, "--unit", "row"), "unit='row' is not one of cell, record, party"),
        (("--epsilon", 8, "--accounting", "lenient"), "accounting='lenient' is not one of paper, strict"),
        (("--epsilon", 8, "--mechanism", "none"), "mechanism=none releases embeddings as they are"),
        (("--epsilon", 8, "--algorithm", "staged", "--labels", "server"), "labels=server, but local rounds"),
        (("--epsilon", 8, "--prediction-epsilon", 0), "prediction_epsilon=0 must be above 0"),
        (("--epsilon", 8, "--prediction-epsilon", 1e-9), "must be at least"),
        (("--epsilon", 8, "--accounting", "paper", "--prediction-epsilon", 2), "goes with algorithm=staged"),
        (("--epsilon", 1e-7), "ask for at least that"),
        (("--epsilon", 8, "--same-rows"), "--same-rows goes with --prediction-epsilon"),
        (("--epsilon", 1, "--prediction-epsilon", 4, "--same-rows"), "predictions included; give them less"),
    ],
)
def test_a_bad_budget_is_refused_in_words_and_leaves_nothing(options, words, cli, table, tmp_path):
    code, out, err = cli("train", *table, *options, "--out", "run", "--json")
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())
    assert not (tmp_path / "run").exists()


def test_a_delta_that_permits_publishing_a_row_is_noted(cli, table):
    code, out, err = cli("train", *table, "--epsilon", 8, "--delta", 0.01, "--out", "run")
    assert code == 0, err
    assert "is not below 1/num_samples" in " ".join(out.split())
