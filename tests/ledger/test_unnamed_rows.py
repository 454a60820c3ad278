"""Rows without ids are known by their places in a table: where a ledger has a limit, they are refused.

The attack: four people who have spent their limit stand in thirty files. By file and number they would be thirty times
four new people, and values are recognised only from about a dozen rows on.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pyarrow.csv
import pytest

from pbmvfl import Federation, VerticalClassifier
from pbmvfl.data.new_rows import NewRows, load_rows
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import DataError, LedgerError, PbmvflError
from support.federation_runs import forget_answers
from support.limited_people import EACH, LIMIT, Left, load_people, plan_of, sessions, set_limits, trained, write_people

FOUR = range(200, 204)
REFUSED = r"has a limit, and rows of dataset='people' have no ids.*--id COLUMN, id="


@pytest.fixture
def data(tmp_path) -> VerticalDataset:
    return load_people(write_people(tmp_path / "people.csv", range(60)))


@pytest.fixture
def model(data, tmp_path):
    set_limits(tmp_path / "books")
    return trained(data, tmp_path / "books")


def rows_of(model, path, id=None) -> NewRows:
    return load_rows(path, columns=model.columns, class_names=model.class_names, id=id, name="people")


def test_four_people_at_their_limit_are_not_asked_again_from_other_files(model, tmp_path):
    for _ in range(2):
        forget_answers(model)
        model.predict(write_people(tmp_path / "four.csv", FOUR), id="person")
    left = Left(model)
    for number in range(30):
        try:
            model.predict(write_people(tmp_path / f"four-{number}.csv", FOUR))
        except PbmvflError:
            continue
    assert left.count == 0


def test_rows_without_ids_are_refused_in_every_form_before_anything_is_sent_or_written(model, tmp_path):
    path = write_people(tmp_path / "new.csv", FOUR)
    (tmp_path / "other").mkdir()
    same_name = write_people(tmp_path / "other" / "people.csv", FOUR)
    unnamed = load_people(path, id=None)
    forms = {
        "file": path,
        "file of the dataset's own name": same_name,
        "frame": pyarrow.csv.read_csv(path),
        "arrays": list(unnamed.test_features),
        "loaded rows": rows_of(model, path),
        "a table's test rows": unnamed,
        "a test file": load_people(tmp_path / "people.csv", id=None, test=path),
    }
    left, before = Left(model), sessions(tmp_path / "books")
    taken = set()
    for form, rows in forms.items():
        for ask in (model.predict, model.forecast, model.predict_proba):
            with contextlib.suppress(LedgerError):
                ask(rows)
                taken.add(form)
    assert taken == set()
    with pytest.raises(LedgerError, match=REFUSED):
        model.predict(path)
    with pytest.raises(LedgerError, match=REFUSED):
        model.evaluate(path, label="churn")
    assert (left.count, sessions(tmp_path / "books")) == (0, before)


def test_rows_with_ids_are_answered_in_every_form(model, data, tmp_path):
    path = write_people(tmp_path / "new.csv", FOUR)
    assert len(model.predict(path, id="person")) == 4
    assert len(model.predict(pyarrow.csv.read_csv(path), id="person")) == 4
    assert len(model.predict(data)) == data.num_test_samples
    assert len(model.predict(rows_of(model, write_people(tmp_path / "more.csv", range(210, 214)), "person"))) == 4
    named = load_people(tmp_path / "people.csv", test=write_people(tmp_path / "test.csv", range(220, 224)))
    assert len(model.predict(named)) == 4


def test_without_a_limit_places_will_do(data, tmp_path):
    model = trained(data, tmp_path / "books")
    assert len(model.predict(write_people(tmp_path / "new.csv", FOUR))) == 4


def test_a_limit_of_parties_that_do_not_take_part_asks_for_no_ids(data, tmp_path):
    model = trained(data, tmp_path / "books")
    set_limits(tmp_path / "books", ["clinic"])
    assert len(model.predict(write_people(tmp_path / "new.csv", FOUR))) == 4


def test_rows_cannot_name_other_parties_than_the_model_s(model, tmp_path):
    """Ledgers are found by the names of parties: rows that bring others are charged to the model's parties all the
    same."""
    path = write_people(tmp_path / "new.csv", FOUR)
    strangers = replace(rows_of(model, path, "person"), party_names=("x", "y"))
    before = sessions(tmp_path / "books")
    model.predict(strangers)
    assert sessions(tmp_path / "books") == before + 1
    assert not (tmp_path / "books" / "x.sqlite").exists()


# --- training ---


def test_four_people_at_their_limit_are_not_test_rows_of_one_training_after_the_other(tmp_path):
    """Training on strangers costs each of them little, and releases its test rows: the four, from another file."""
    set_limits(tmp_path / "books")
    train = write_people(tmp_path / "people.csv", range(60))
    released = 0
    for number in range(4):
        data = load_people(train, id=None, test=write_people(tmp_path / f"four-{number}.csv", FOUR))
        plan = plan_of(data, noise_multiplier=200.0, mean_noise=200.0, gram_noise=200.0)
        try:
            Federation(plan.replace(evaluation="released")).fit(data, ledger=tmp_path / "books")
        except LedgerError:
            continue
        released += 1
    assert released * EACH <= LIMIT


def test_training_without_ids_is_refused_only_under_a_limit(tmp_path):
    unnamed = load_people(write_people(tmp_path / "people.csv", range(60)), id=None)
    Federation(plan_of(unnamed)).fit(unnamed, ledger=tmp_path / "free")
    set_limits(tmp_path / "books")
    with pytest.raises(LedgerError, match=REFUSED):
        Federation(plan_of(unnamed)).fit(unnamed, ledger=tmp_path / "books")
    assert sessions(tmp_path / "books") == 0
    numbered = replace(unnamed, train_ids=None, test_ids=None, rows_are_named=True)  # as of a dataset with a loader
    Federation(plan_of(numbered)).fit(numbered, ledger=tmp_path / "books")


def test_frames_without_ids_are_unnamed_too():
    import pandas as pd

    values = np.random.default_rng(1).normal(size=(20, 2))
    frames = {"bank": pd.DataFrame({"a": values[:, 0]}), "shop": pd.DataFrame({"b": values[:, 1]})}
    labels, ids = [number % 2 for number in range(20)], [f"p{number}" for number in range(20)]
    assert not VerticalDataset.from_frames(frames, labels=labels).rows_are_named
    assert VerticalDataset.from_frames(frames, labels=labels, ids=ids).rows_are_named


def test_the_estimator_refuses_rows_without_names(tmp_path):
    set_limits(tmp_path / "books", ["party-0", "party-1"], dataset="frame")
    values, labels = np.random.default_rng(1).normal(size=(40, 4)), np.arange(40) % 2
    with pytest.raises(DataError, match="these rows have none"):
        VerticalClassifier(ledger=tmp_path / "books").fit(values, labels)


# --- on the command line ---


@pytest.fixture
def run(run_main, monkeypatch, tmp_path):
    """A run under a limit, and four people who are not in it."""
    monkeypatch.chdir(tmp_path)
    write_people(tmp_path / "people.csv", range(60))
    write_people(tmp_path / "new.csv", FOUR)
    limit = ("ledger", "limit", "books", "--parties", "bank,shop", "--dataset", "people", "--epsilon", 40)
    assert run_main(*limit)[0] == 0
    columns = ("--columns", "bank=income,debt;shop=visits,basket", "--label", "churn", "--id", "person")
    code, _, err = run_main("train", "--data", "people.csv", *columns, "--ledger", "books", "--out", "run", "--json")
    assert code == 0, err
    return run_main


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_commands_refuse_rows_without_ids_and_say_what_to_give(command, run, tmp_path):
    before = sessions(tmp_path / "books")
    code, _, err = run(command, "run", "--data", "new.csv")
    assert (code, "have no ids" in err, "--id COLUMN" in err) == (2, True, True), err
    assert sessions(tmp_path / "books") == before
    assert not list((tmp_path / "run").glob("predictions-*"))
    assert not (tmp_path / "run" / "released.jsonl").exists()
    code, _, err = run(command, "run", "--data", "new.csv", "--id", "person")
    assert code == 0, err
    code, _, err = run(command, "run")  # the run's own test rows have their ids
    assert code == 0, err
    assert sessions(tmp_path / "books") == before + 2
