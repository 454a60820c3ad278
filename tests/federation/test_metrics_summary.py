"""Figures with what they were measured on, what they must be compared with, and what they warn of."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbmvfl._text import counted
from pbmvfl.errors import RunFolderError
from pbmvfl.federation.federation import Federation
from pbmvfl.federation.metrics_summary import (
    describe_classes,
    divergence,
    loss_limit,
    notes_on_classes,
    notes_on_predictions,
)
from pbmvfl.federation.results import Result
from pbmvfl.plan.plan import Plan
from pbmvfl.training.metrics import ClassFigures, class_figures, majority, per_class
from support.federation_runs import JOINT, Wire, counted_uses, fitted, shown_uses, spans_of

DATA = Path(__file__).parents[1] / "data"


def strict_json(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    return found


# --- classes ---


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_every_class_is_counted_row_by_row(pairs):
    """(true class, said class) of each row; one loop over them is the oracle."""
    labels = np.array([true for true, _ in pairs], dtype=np.int64)
    scores = np.zeros((len(pairs), 4))
    for row, (_, said) in enumerate(pairs):
        scores[row, said] = 1
    said_to_be, have = Counter(said for _, said in pairs), Counter(true for true, _ in pairs)
    found = Counter(true for true, said in pairs if true == said)
    for k, figures in enumerate(per_class(scores, labels, split="test")):
        assert figures["test_predicted"] == said_to_be[k]
        assert figures["test_recall"] == (found[k] / have[k] if have[k] else None)
    classes = class_figures("abcd", labels, labels[:0])
    assert [(each.name, each.train, each.test) for each in classes] == [
        (name, have[k], 0) for k, name in enumerate("abcd")
    ]
    guess = majority(classes)
    assert set(guess) == {"train"}
    assert guess["train"].rate == max(have.values()) / len(pairs)
    assert have["abcd".index(guess["train"].name)] == max(have.values())


def test_the_majority_rate_of_each_split_is_of_its_own_commonest_class():
    classes = (ClassFigures(name="no", train=30, test=2), ClassFigures(name="yes", train=10, test=8))
    assert {split: (each.name, each.rate) for split, each in majority(classes).items()} == {
        "train": ("no", 0.75),
        "test": ("yes", 0.8),
    }


def test_a_class_that_only_test_rows_have_and_names_that_differ_by_blanks_are_said():
    rows = {"yes": (9, 2), "yes ": (4, 0), "maybe": (0, 1), "no": (5, 5), "never": (0, 0)}
    notes = notes_on_classes([ClassFigures(name=name, train=a, test=b) for name, (a, b) in rows.items()])
    assert [note for note in notes if "'maybe'" in note] == [
        "no training row has class 'maybe', so it cannot be learned; 1 test row has it, and each counts as an error"
    ]
    assert "no training row has class 'never', so it cannot be learned" in notes
    (alike,) = (note for note in notes if "blanks" in note)
    assert "'yes' and 'yes '" in alike
    assert notes_on_classes([ClassFigures(name=name, train=1, test=0) for name in ("yes", "no", "y es 2")]) == []


def test_classes_are_described_with_counts_and_many_by_their_range():
    few = [ClassFigures(name=name, train=1200, test=30) for name in "ab"]
    assert describe_classes(few) == "a (1,200 + 30), b (1,200 + 30); training + test rows"
    assert describe_classes([replace(each, test=0) for each in few]) == "a (1,200), b (1,200); training rows"
    many = [ClassFigures(name=f"c{k}", train=10 + k, test=1) for k in range(40)]
    assert describe_classes(many) == "c0, c1, c2, c3, c4 and 35 others, 10 to 49 training rows each"


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 rounds"), (1, "1 round"), (2, "2 rounds"), (1234, "1,234 rounds")]
)
def test_one_is_singular(number, words):
    assert counted(number, "round") == words
    assert counted(number, "class", "classes").endswith("class") == (number == 1)


# --- a result ---


def test_a_result_has_its_classes_and_what_the_server_saw(data, make_plan):
    """Without noise and without a step, noisy sums are exact ones: both columns agree."""
    plan = make_plan(data, mechanism="none", learning_rate=1e-30)
    result, _ = fitted(plan, data)
    assert [(each.name, each.train, each.test) for each in result.classes] == [
        (name, int((data.train_labels == k).sum()), int((data.test_labels == k).sum()))
        for k, name in enumerate(data.class_names)
    ]
    assert result.measured_on == "exact sums"
    assert result.released == {"train_accuracy": pytest.approx(result.metrics["train_accuracy"])}
    for split, rows in (("train", data.num_samples), ("test", data.num_test_samples)):
        said = [each.predicted(split) or 0 for each in result.classes]
        assert sum(said) == rows
        recalls = [getattr(each, f"{split}_recall") or 0 for each in result.classes]
        found = sum(recall * each.count(split) for recall, each in zip(recalls, result.classes, strict=True))
        assert found / rows == pytest.approx(result.metrics[f"{split}_accuracy"])
    assert result.positive_class is None


@pytest.mark.parametrize("evaluation", ["simulator", "released"])
def test_noise_is_seen_only_in_what_the_server_saw(evaluation, data, make_plan):
    result, _ = fitted(make_plan(data, evaluation=evaluation, num_trials=1, beta=1 / 64, learning_rate=1e-30), data)
    exact, _ = fitted(make_plan(data, mechanism="none", learning_rate=1e-30), data)
    names = {"train_accuracy"} | ({"test_accuracy"} if evaluation == "released" else set())
    assert set(result.released) == names
    if evaluation == "simulator":
        assert result.metrics["train_accuracy"] == exact.metrics["train_accuracy"]
    else:
        assert result.measured_on == "noisy sums"
        assert {name: result.metrics[name] for name in names} == result.released


def test_a_binary_result_names_the_positive_class(make_data, make_plan):
    data = make_data(num_classes=2)
    result, _ = fitted(make_plan(data), data)
    assert result.positive_class == data.class_names[1]
    assert {"train_auprc", "train_accuracy"} == set(result.released)


def test_a_result_is_written_and_read_with_its_figures(data, make_plan, tmp_path):
    result, _ = fitted(make_plan(data), data)
    path = tmp_path / "result.json"
    result = replace(result, seconds=round(result.seconds, 3))
    path.write_text(result.to_json())
    assert Result.read(path) == result
    wild = replace(result, largest_score=math.inf, diverged=True, stopped="words")
    path.write_text(json.dumps(strict_json(wild.to_json())))
    assert Result.read(path) == wild


@pytest.mark.parametrize("version", [2, 3])
def test_a_frozen_result_is_read(version):
    path = DATA / f"result-version-{version}.json"
    written = json.loads(path.read_text())
    assert written["version"] == version
    result = Result.read(path)
    assert result.metrics == written["metrics"]
    assert [line.to_dict() for line in result.history] == written["history"]
    assert shown_uses(result.row_uses) == {"joint": (2, 2, 80)}
    if version == 2:
        assert (result.classes, result.majority, result.positive_class, result.released) == ((), {}, None, {})
        assert result.warnings == []
        return
    assert [each.to_dict() for each in result.classes] == written["classes"]
    assert [(each.train, each.test) for each in result.classes] == [(24, 6), (16, 4)]
    assert {split: each.rate for split, each in result.majority.items()} == {"train": 0.6, "test": 0.6}
    assert (result.measured_on, result.released) == ("exact sums", written["released"])
    assert (result.positive_class, result.diverged) == ("yes", False)
    again = {name: value for name, value in result.to_dict().items() if name != "privacy"}
    assert again == {name: value for name, value in written.items() if name != "privacy"}


@pytest.mark.parametrize(
    "change",
    [{"classes": {}}, {"classes": [1]}, {"classes": [{"name": "a"}]}, {"largest_score": []}, {"diverged": 0}],
    ids=str,
)
def test_damaged_figures_are_refused_by_name(change, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(json.loads((DATA / "result-version-3.json").read_text()) | change))
    with pytest.raises(RunFolderError, match=r"result\.json is damaged"):
        Result.read(path)


# --- warnings ---


def figures(*rows: tuple[int, int, int]) -> list[ClassFigures]:
    """(training rows, test rows, test rows said to be it) of classes a, b, ..."""
    return [
        ClassFigures(name=name, train=a, test=b, test_predicted=c)
        for name, (a, b, c) in zip("abcdef", rows, strict=False)
    ]


@pytest.mark.parametrize(
    ("classes", "accuracy", "words"),
    [
        (figures((20, 6, 10), (10, 4, 0)), 0.6, ("says class 'a' for every test row", "not above 0.6000")),
        (figures((20, 6, 9), (10, 4, 1)), 0.5, ("not above 0.6000, what saying 'a' for every row gives",)),
        (figures((20, 6, 6), (10, 4, 4)), 0.61, ()),
        (figures((20, 10, 10), (10, 0, 0)), 1.0, ("says class 'a'", "not above 1.0000")),
    ],
)
def test_a_model_no_better_than_its_commonest_class_is_said_to_be_none(classes, accuracy, words):
    plan = Plan.of(num_parties=2, num_samples=30, num_classes=2)
    notes = notes_on_predictions(classes, {"test_accuracy": accuracy}, largest_score=1.0, plan=plan)
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


@pytest.mark.parametrize(("largest", "said"), [(9999.0, False), (10001.0, True), (math.inf, True), (None, False)])
def test_scores_without_a_sensible_size_are_said(largest, said):
    plan = Plan.of(num_parties=2, num_samples=30, num_classes=2, learning_rate=7.0)
    notes = notes_on_predictions(
        figures((20, 6, 6), (10, 4, 4)), {"test_accuracy": 0.9}, largest_score=largest, plan=plan
    )
    assert any("smaller learning_rate than 7" in note for note in notes) == said


def test_a_run_that_learns_one_class_warns_in_its_result(make_data, make_plan):
    data = make_data(num_classes=2)
    blank = tuple(np.zeros_like(part) for part in data.train_features)
    data = replace(data, train_features=blank, test_features=tuple(np.zeros_like(part) for part in data.test_features))
    result, _ = fitted(make_plan(data, mechanism="none"), data)
    assert any("for every test row" in note for note in result.notes)
    assert any("do not use this model" in note for note in result.warnings)


# --- a loss that goes astray ---


def test_a_run_whose_loss_goes_astray_ends_and_releases_no_more(data, make_plan, tmp_path):
    plan = make_plan(data, num_epochs=4, learning_rate=1e9, optimizer="adam")
    federation = Federation(plan)
    wire = Wire(federation)
    result = federation.fit(data, checkpoints=tmp_path)
    assert result.diverged
    assert "smaller learning_rate than 1e+09" in result.stopped
    assert any(result.stopped in note for note in result.notes)
    assert [line.epoch for line in result.history] == [1]
    sent = {number for number, *_ in wire.embeddings(JOINT)}
    assert sent == set(range(4))
    assert spans_of(result) == [(0, 4)]
    assert shown_uses(result.row_uses) == counted_uses(plan, [(0, 4)])
    assert len(list(tmp_path.glob("*/round-0000004-*.safetensors"))) == 1 + data.num_parties
    strict_json(result.to_json())


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_a_gradient_that_is_no_number_ends_a_run_and_its_round_is_counted(codec, data, make_plan):
    plan = make_plan(data, learning_rate=3e38, optimizer="adam", gradient_codec=codec, mechanism="none")
    federation = Federation(plan)
    wire = Wire(federation)
    result = federation.fit(data)
    assert result.diverged
    sent = {number for number, *_ in wire.embeddings(JOINT)}
    assert sent == set(range(len(sent)))
    assert spans_of(result) == [(0, len(sent))]
    assert len(sent) < len(plan.schedule)
    strict_json(result.to_json())


PLANS: list[dict[str, Any]] = [
    {},
    {"mechanism": "none"},
    {"mechanism": "ldp", "num_trials": 1, "beta": 1 / 128},
    {"num_trials": 1, "beta": 1 / 128, "embedding_dim": 16},
    {"num_trials": 1, "beta": 1 / 128, "bound": 5.0, "optimizer": "adam", "learning_rate": 0.1},
]


@pytest.mark.parametrize("choices", PLANS, ids=str)
def test_noise_alone_is_not_taken_for_a_loss_that_goes_astray(choices, data, make_plan):
    """The noisiest plans there are: their losses stay far below the limit, so that it can be far above them."""
    plan = make_plan(data, **{"num_epochs": 3, **choices})
    result, _ = fitted(plan, data)
    assert not result.diverged
    assert max(line.train_loss or 0 for line in result.history) < loss_limit(plan) / 3


@pytest.mark.parametrize("loss", [math.inf, math.nan, 1e300])
def test_a_loss_that_is_no_number_has_gone_astray(loss, data, make_plan):
    plan = make_plan(data)
    assert divergence(plan, loss, 2) is not None
    assert divergence(plan, None, 2) is None
    assert divergence(plan, loss_limit(plan), 2) is None


# --- on the terminal ---


@pytest.fixture
def cli(monkeypatch, run_main, tmp_path):
    random = np.random.default_rng(3)
    labels = random.integers(0, 2, 60)
    with open(tmp_path / "people.csv", "w", newline="") as file:
        rows = [[*(f"{2 * label + x:.4f}" for x in random.normal(size=3)), ("no", "yes")[label]] for label in labels]
        csv.writer(file).writerows([["a", "b", "c", "y"], *rows])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return run_main


TABLE = ("train", "--data", "people.csv", "--label", "y", "--columns", "one=a,b;two=c")
QUICK = ("--encoder", "linear", "--batch-size", 10, "--embedding-dim", 1, "--num-trials", 4, "--learning-rate", 0.1)


def test_a_person_sees_what_figures_were_measured_on_and_what_was_spent_once(cli):
    code, out, err = cli(*TABLE, *QUICK, "--num-epochs", 1, "--out", "run", "--verbose")
    assert code == 0, err
    words = " ".join(out.split())
    for part in ("exact sums, simulator only", "noisy sums, as the server saw", "majority rate, '"):
        assert part in words
    assert "- not measured, needs a release (pbmvfl evaluate RUN)" in words
    assert "the positive class is 'yes'" in words
    assert "; training + test rows" in words
    assert "1 epoch of 5 rounds, 10 rows each" in words
    assert "embeddings of 1 value in" in words
    assert words.count("advantage ") == 1
    assert "as planned" in words
    assert "that was spent" not in words


def test_a_strict_budget_is_spent_as_planned_and_its_figures_are_the_simulators(cli):
    code, out, err = cli(*TABLE, "--epsilon", 8, "--num-epochs", 1, "--out", "run", "--verbose")
    assert code == 0, err
    words = " ".join(out.split())
    assert "spent: epsilon 8.00 (cell, strict, server)" in words
    assert "as the server saw" not in words  # it saw nothing
    needs = "not measured, needs a release (--prediction-epsilon E, or pbmvfl evaluate RUN)"
    assert f"what the server sees of predictions: {needs}" in words
    code, out, err = cli(
        *TABLE, "--epsilon", 8, "--prediction-epsilon", 4, "--num-epochs", 1, "--out", "other", "--verbose"
    )
    assert code == 0, err
    words = " ".join(out.split())
    assert "spent: epsilon 8.00 of training rows, 4.00 of predicted rows (cell, strict, server)" in words
    assert "exact sums, simulator only" not in words


def test_epoch_lines_stay_on_a_terminal_and_of_many_epochs_there_are_some(cli, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, as far as what is printed goes
    code, out, err = cli(
        *TABLE, *QUICK, "--num-epochs", 31, "--batch-size", 48, "--checkpoint-every", 99, "--out", "run", "-v"
    )
    assert code == 0, err
    shown = [line for line in out.replace("\r", "\n").split("\n") if "epoch " in line and " of 31 after" in line]
    assert len(shown) == 16
    assert "epoch 31 of 31" in shown[-1]
    assert "round 31/31" in out


def test_a_run_that_diverges_returns_4_and_is_not_continued(cli, tmp_path):
    command = (*TABLE, *QUICK, "--num-epochs", 5, "--learning-rate", 1e9, "--out", "run", "--verbose")
    code, out, err = cli(*command)
    assert (code, err) == (4, "")
    words = " ".join(out.split())
    assert "diverged: the training loss of epoch 1 is" in words
    assert "smaller learning_rate than 1e+09, such as 0.01" in words
    assert "epsilon that was spent" in words  # less than planned
    result = strict_json((tmp_path / "run/result.json").read_text())
    assert result["diverged"] is True
    assert not (tmp_path / "run/model").exists()  # nobody should ask it
    before = (tmp_path / "run/sessions.json").read_bytes()
    code, out, err = cli("train", "--resume", "run", "--json")
    assert (code, err) == (4, "")
    assert strict_json(out) == result
    assert (tmp_path / "run/sessions.json").read_bytes() == before


def test_help_says_how_a_run_can_end(run_main):
    code, out, _ = run_main("train", "--help")
    assert code == 0
    words = " ".join(out.split())
    for part in ("0 done", "2 bad input", "3 ended by a party's ledger", "4 the loss diverged", "130 interrupted"):
        assert part in words
