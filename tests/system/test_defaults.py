"""One default everywhere: a strict budget of 8, for named datasets and own tables, commands and Python alike."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbmvfl.data import load_dataset, load_table
from pbmvfl.errors import PlanError
from pbmvfl.plan.plan import Plan

TABLE = ("--data", "people.csv", "--label", "y", "--columns", "one=a,b;two=c,d")


@pytest.fixture
def cli(monkeypatch, run_main, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return run_main


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """400 rows, two parties, two columns each."""
    random = np.random.default_rng(3)
    labels = random.integers(0, 2, 400)
    columns = np.clip(random.normal(size=(400, 4)) * 0.3 + (labels[:, None] - 0.5), -1, 1)
    path = tmp_path / "people.csv"
    with open(path, "w", newline="") as file:
        rows = ([*map(str, row), ("no", "yes")[label]] for row, label in zip(columns, labels, strict=True))
        csv.writer(file).writerows([["a", "b", "c", "d", "y"], *rows])
    return path


def planned(out: str) -> Plan:
    return Plan.from_dict(json.loads(out)["plan"])


def titles(out: str) -> list[str]:
    """The first words of lines that say something of a plan."""
    known = ("data", "training", "noise", "predictions", "bytes", "epsilon", "cell", "record", "party")
    return [words[0] for words in map(str.split, out.splitlines()) if words and words[0] in known]


# --- the same plan, whoever asks ---


@pytest.mark.usefixtures("table")
def test_the_two_defaults_print_the_same_kind_of_plan(cli):
    named, own = cli("plan", "digits"), cli("plan", *TABLE)
    assert (named[0], own[0]) == (0, 0), named[2] + own[2]
    assert titles(named[1]) == titles(own[1])
    for _, out, _ in (named, own):
        assert out.startswith("For epsilon 8 at delta 1e-05 for a cell against server, strict accounting:")
        assert "algorithm staged:" in " ".join(out.split())


@pytest.mark.usefixtures("table")
def test_a_plan_of_a_table_is_what_python_plans_and_what_train_trains(cli):
    code, out, err = cli("plan", *TABLE, "--json")
    assert code == 0, err
    data = load_table("people.csv", label="y", columns="one=a,b;two=c,d")
    assert planned(out) == Plan.for_data(data) == Plan.for_budget(epsilon=8, data=data)
    code, trained, err = cli("train", *TABLE, "--out", "run", "--json")
    assert code == 0, err
    assert planned(trained) == planned(out)


@pytest.mark.usefixtures("table")
def test_sizes_by_hand_make_the_same_plan_as_the_data_that_has_them(cli):
    code, out, err = cli("plan", *TABLE, "--json")
    assert code == 0, err
    sizes = ("--num-parties", 2, "--num-samples", 320, "--num-classes", 2, "--num-test-samples", 80, "--columns", 2)
    code, by_hand, err = cli("plan", *sizes, "--json")
    assert code == 0, err
    assert planned(by_hand) == planned(out)


@pytest.mark.usefixtures("table")
def test_a_run_folder_and_a_plan_s_file_say_sizes_too(cli):
    assert cli("train", *TABLE, "--epsilon", 3, "--out", "run", "--json")[0] == 0
    code, out, err = cli("plan", "run", "--epsilon", 2, "--out", "plan.json")
    assert code == 0, err
    words = " ".join(out.split())
    assert "--label y --columns 'one=a,b;two=c,d' --plan plan.json" in words
    written = Plan.from_json(Path("plan.json").read_text())
    data = load_table("people.csv", label="y", columns="one=a,b;two=c,d")
    assert written == Plan.for_budget(epsilon=2, data=data)
    code, out, err = cli("plan", "--plan", "plan.json", "--epsilon", 2, "--columns", 2, "--json")
    assert code == 0, err
    assert planned(out) == written


@pytest.mark.usefixtures("table")
def test_privacy_of_a_dataset_is_that_of_its_default_plan_and_numbers_win(cli):
    code, out, err = cli("privacy", *TABLE, "--json")
    assert code == 0, err
    shown = json.loads(out)
    assert planned(out) == planned(cli("plan", *TABLE, "--json")[1])
    assert 7.99 < bound(shown["bounds"])["epsilon"] <= 8
    numbers = ("--num-trials", 4, "--beta", 0.1, "--embedding-dim", 2, "--num-epochs", 3)
    code, out, err = cli("privacy", *TABLE, *numbers, "--json")
    assert code == 0, err
    assert (planned(out).num_samples, planned(out).num_parties, planned(out).num_epochs) == (320, 2, 3)


def bound(rows: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = (
        row
        for row in rows
        if (row["unit"], row["accounting"], row["adversary"], row["colluding_parties"])
        == ("cell", "strict", "server", 0)
    )
    return found


# --- what changes it ---


def test_a_seed_or_an_evaluation_alone_is_still_the_default(make_data):
    data = make_data()
    usual = Plan.for_data(data)
    assert Plan.for_data(data, seed=7) == usual.replace(seed=7)
    assert Plan.for_data(data, evaluation="simulator") == usual
    by_hand = Plan.for_data(data, num_trials=4)
    assert (by_hand.training, by_hand.mechanism, by_hand.num_trials) == ("joint", "pbm", 4)


def test_released_predictions_without_a_budget_have_that_of_training(make_data):
    plan = Plan.for_data(make_data(), evaluation="released")
    delta = 1e-5
    spent = {split: plan.training_run().of_split(split) for split in ("train", "test")}
    from pbmvfl.privacy.accounting import epsilon_bound
    from pbmvfl.privacy.units import Accounting, Unit

    for run in spent.values():
        assert 7.9 < epsilon_bound(run, Unit.CELL, Accounting.STRICT, delta=delta).epsilon <= 8


@pytest.mark.parametrize(("rows", "delta"), [(500, 1e-5), (10_000, 1e-5), (40_000, 2.5e-6)])
def test_delta_is_a_tenth_of_one_over_the_rows_and_at_most_1e_5(rows, delta, cli):
    sizes = ("--num-parties", 2, "--num-samples", rows, "--num-classes", 2, "--columns", 3)
    code, out, err = cli("plan", *sizes, "--json")
    assert code == 0, err
    assert f"at delta {delta:g} " in json.loads(out)["budget"]
    sizes_by_name = {"num_parties": 2, "num_samples": rows, "num_classes": 2, "columns": 3}
    assert Plan.for_budget(epsilon=8, **sizes_by_name) == Plan.for_budget(epsilon=8, delta=delta, **sizes_by_name)


@pytest.mark.usefixtures("table")
def test_record_is_short_for_the_unit(cli):
    code, short, err = cli("plan", *TABLE, "--record", "--json")
    assert code == 0, err
    assert planned(short) == planned(cli("plan", *TABLE, "--unit", "record", "--json")[1])
    assert "for a record" in json.loads(short)["budget"]
    code, out, err = cli("train", *TABLE, "--record", "--unit", "cell", "--out", "run")
    assert (code, out) == (2, "")
    assert "--unit cell and --record contradict each other" in " ".join(err.split())


def test_what_reproduces_the_paper_is_asked_for_by_name(cli):
    quick = ("--num-epochs", 1, "--batch-size", 700)
    code, out, err = cli("train", "digits", "--paper", *quick, "--out", "run", "--json")
    assert code == 0, err
    plan = planned(out)
    assert (plan.training, plan.mechanism, plan.num_trials, plan.embedding_dim) == ("joint", "pbm", 16, 10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--paper", "--epsilon", 8), "--epsilon and --paper both say what is spent"),
        (("--paper", "--record"), "--unit and --paper both say what is spent"),
        (("--paper", "--accounting", "strict"), "--accounting and --paper both say"),
    ],
)
def test_the_paper_s_training_and_a_budget_are_refused_together(options, words, cli, tmp_path):
    code, out, err = cli("train", "digits", *options, "--out", "run")
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())
    assert not (tmp_path / "run").exists()


# --- refusals ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "digit"), "source='digit' is neither a run folder, nor a plan's file, nor a dataset (digits"),
        (("privacy", "digit"), "source='digit' is neither"),
        (("plan", "digits", *TABLE), "SOURCE and --data both say which data is meant"),
        (("privacy", *TABLE, "--plan", "plan.json"), "--data and --plan both say which data is meant"),
        (("plan", "digits", "--columns", "3"), "--columns goes with --data TABLE or with numbers"),
        (("plan", "digits", "--label", "y"), "--label goes with --data TABLE"),
        (("plan", *TABLE, "--num-samples", 7), "num_samples=7, but the data has 320; leave --num-samples out"),
        (("plan", "--columns", "a;b", "--num-samples", 7), "columns='a;b' must be a whole number of at least 1"),
        (("plan", "--columns", "0"), "columns='0' must be a whole number of at least 1"),
        (("plan", "--num-samples", 7), "or say --num-parties, --num-classes"),
        (("plan", "--plan", "nowhere.json"), "nowhere.json"),
        (("privacy", "--num-samples", 7), "or say --num-parties, --embedding-dim, --num-epochs"),
    ],
)
@pytest.mark.usefixtures("table")
def test_what_does_not_say_one_kind_of_data_is_refused_in_words(arguments, words, cli):
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())


@pytest.mark.parametrize("command", ["plan", "privacy"])
def test_what_is_planned_and_printed_depends_on_sizes_and_not_on_values(command, cli, table):
    """Neighbouring worlds, and worlds that have nothing in common but sizes and labels: the same bytes."""
    first = cli(command, *TABLE)
    assert first[0] == 0, first[2]
    header, *rows = table.read_text().splitlines()
    for value in ("0", "1e8", "-3.5"):
        others = [",".join([value] * 4 + [row.split(",")[-1]]) for row in rows]
        table.write_text("\n".join([header, *others]) + "\n")
        assert cli(command, *TABLE) == first


# --- pictures ---


def pictures(rows: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, size=(rows, *shape), dtype=np.uint8)


def test_pictures_become_means_of_blocks_between_minus_one_and_one():
    from pbmvfl.training.features import feature_shape, mapped

    plan = Plan.for_budget(epsilon=8, num_parties=2, num_samples=50, num_classes=2, columns=32)
    rows = pictures(3, 2, 32, 48)
    found = mapped(plan, rows)
    assert found.shape == (3, *feature_shape(plan, (2, 32, 48))) == (3, 2 * 16 * 16)
    for row in range(3):
        for channel in range(2):
            for down, across in ((0, 0), (15, 15), (3, 9)):
                block = rows[row, channel, 2 * down : 2 * down + 2, 3 * across : 3 * across + 3]
                value = found[row, channel * 256 + down * 16 + across]
                assert value == pytest.approx(float(block.astype(float).mean()) / 127.5 - 1, abs=1e-6)
    small = pictures(2, 3, 16, 16)
    np.testing.assert_allclose(mapped(plan, small), small.reshape(2, -1) / 127.5 - 1, atol=1e-6)


def test_pictures_are_planned_like_tables_and_trained(make_data):
    from dataclasses import replace

    from pbmvfl.federation.federation import Federation

    data = make_data()
    random = np.random.default_rng(9)

    def drawn(labels):
        bright = 90 + 70 * (labels == labels.max())
        return np.clip(random.normal(size=(len(labels), 1, 4, 4)) * 40 + bright[:, None, None, None], 0, 255).astype(
            np.uint8
        )

    data = replace(
        data,
        train_features=tuple(drawn(data.train_labels) for _ in data.party_names),
        test_features=tuple(drawn(data.test_labels) for _ in data.party_names),
        default_encoder="resnet18",
        train_ids=None,
        test_ids=None,
    )
    plan = Plan.for_data(data)
    assert (plan.training, plan.encoder) == ("local", "linear")
    result = Federation(plan).fit(data)
    assert np.isfinite(result.metrics["test_accuracy"])
    assert result.model is not None
    released = result.model.release(data)  # the trained model takes the same pictures
    assert set(released.numbers.tolist()) <= set(range(data.num_classes))


def test_the_default_of_a_named_dataset_is_that_of_its_data(cli):
    code, out, err = cli("plan", "digits", "--json")
    assert code == 0, err
    assert planned(out) == Plan.for_data(load_dataset("digits"))


def test_a_budget_that_is_no_number_is_refused_in_python(make_data):
    with pytest.raises(PlanError, match="epsilon='8' is of type str"):
        Plan.for_budget(epsilon="8", data=make_data())  # type: ignore[arg-type]


@pytest.mark.usefixtures("table")
def test_a_plan_that_was_written_is_trained_as_it_is(cli):
    """Its network too: steps that are made for one layer do not fit three."""
    assert cli("plan", *TABLE, "--out", "plan.json")[0] == 0
    code, _, err = cli("train", *TABLE, "--plan", "plan.json", "--out", "run", "--json")
    assert code == 0, err
    written, trained = (json.loads(Path(name).read_text()) for name in ("plan.json", "run/plan.json"))
    assert trained == written
