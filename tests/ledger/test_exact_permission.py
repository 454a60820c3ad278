"""Exact figures are outside every limit: where a ledger has one, its owner permits them, and the ledger notes it.

The attack: `evaluate RUN --exact --dataset nobody`. No limit is called so, and the figures are of the limited rows.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace

import pytest

import pbmvfl
from pbmvfl import Federation, Ledger, ReleaseOptions, VerticalClassifier
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import LedgerError
from support.limited_people import NAME, WHO, load_people, noted, plan_of, sessions, set_limits, trained, write_people

REFUSED = r"has a limit, and no limit counts exact sums.*--exact-metrics, exact_metrics=True"
NAMES = [NAME, "nobody", "PEOPLE", "people "]


@pytest.fixture
def data(tmp_path) -> VerticalDataset:
    return load_people(write_people(tmp_path / "people.csv", range(60)))


@pytest.fixture
def model(data, tmp_path):
    set_limits(tmp_path / "books")
    return trained(data, tmp_path / "books")


@pytest.mark.parametrize("dataset", NAMES)
def test_exact_figures_need_permission_whatever_the_rows_are_called(dataset, model, data, tmp_path):
    saved = model.save(tmp_path / "model")
    for each in (model, pbmvfl.load(saved, ledger=tmp_path / "books")):
        for ask in (each.release, each.predict, each.evaluate, each.score):
            with pytest.raises(LedgerError, match=REFUSED):
                ask(data, options=ReleaseOptions(exact=True), dataset=dataset)
    assert noted(tmp_path / "books") == []
    assert model.release(data, ReleaseOptions(exact=True, exact_metrics=True), dataset=dataset).exact
    for party in WHO:
        assert noted(tmp_path / "books", party) == [("exact", dataset)]
    with pytest.raises(LedgerError, match=REFUSED):  # also of what this object remembers: permission is for once
        model.release(data, ReleaseOptions(exact=True), dataset=dataset)


def test_one_party_s_limit_is_enough(data, tmp_path):
    model = trained(data, tmp_path / "books")
    assert model.release(data, ReleaseOptions(exact=True)).exact
    set_limits(tmp_path / "books", ["shop"], dataset="somebody else")
    with pytest.raises(LedgerError, match=r"shop\.sqlite' has a limit"):
        model.release(data, ReleaseOptions(exact=True))
    model.release(data, ReleaseOptions(exact=True, exact_metrics=True))
    assert (noted(tmp_path / "books", "bank"), noted(tmp_path / "books", "shop")) == ([], [("exact", NAME)])


def test_an_older_copy_without_the_limit_is_no_permission(data, tmp_path):
    books, copy = tmp_path / "books", tmp_path / "copy"
    model = trained(data, books)
    shutil.copytree(books, copy)
    set_limits(books)
    shutil.rmtree(books)
    shutil.copytree(copy, books)
    for dataset in (NAME, "nobody"):
        with pytest.raises(LedgerError, match="pbmvfl ledger accept"):
            model.release(data, ReleaseOptions(exact=True), dataset=dataset)


def test_permission_is_noted_where_training_was_charged_and_nowhere_else(model, data, tmp_path):
    """Another folder's ledgers are not those of these owners."""
    for how in ({"exact": True, "exact_metrics": True}, {"exact": True}, {"uncharged": True}):
        with pytest.raises(LedgerError, match="that ledger is not here"):
            model.release(data, ReleaseOptions(ledger=tmp_path / "elsewhere", **how))
    assert not (tmp_path / "elsewhere").exists()


def test_predictions_that_are_not_charged_are_noted_where_there_is_a_limit(model, data, tmp_path):
    model.predict(data, ReleaseOptions(uncharged=True))
    for party in WHO:
        assert noted(tmp_path / "books", party) == [("uncharged", NAME)]
    with contextlib.closing(Ledger(tmp_path / "books" / "bank.sqlite", read_only=True)) as ledger:
        (event,) = (each for each in ledger.history() if each.what == "uncharged")
        assert event.values["rows"] == data.num_test_samples
        assert any("12 predictions are not charged" in note for note in ledger.notes(NAME))
        assert ledger.trouble() is None


# --- training ---


@pytest.mark.parametrize("dataset", NAMES[:3])
def test_training_with_exact_metrics_needs_permission_whatever_the_rows_are_called(dataset, data, tmp_path):
    set_limits(tmp_path / "books")
    named = replace(data, name=dataset)
    plan = plan_of(named, evaluation="simulator")
    for how in ({}, {"until_limit": True}):
        with pytest.raises(LedgerError, match=r"evaluation=simulator|has no limit in ledger"):
            Federation(plan).fit(named, ledger=tmp_path / "books", **how)
    assert sessions(tmp_path / "books", dataset=dataset) == 0
    if dataset == NAME:
        Federation(plan).fit(named, ledger=tmp_path / "books", exact_metrics=True)
        assert noted(tmp_path / "books") == [("opened", NAME)]


def test_a_run_that_is_done_shows_no_new_exact_figures_once_there_is_a_limit(data, tmp_path):
    plan = plan_of(data, evaluation="simulator")
    folders = {"ledger": tmp_path / "books", "checkpoints": tmp_path / "run"}
    Federation(plan).fit(data, **folders)
    set_limits(tmp_path / "books")
    with pytest.raises(LedgerError, match="evaluation=simulator"):
        Federation(plan).fit(data, **folders)


def test_the_estimator_shows_nothing_exact_under_a_limit(tmp_path):
    import pandas as pd

    frame = pd.DataFrame({"a": range(40), "b": range(40)}, index=[f"p{row}" for row in range(40)]) / 40
    set_limits(tmp_path, ["bank", "shop"], dataset="frame", epsilon=40.0)
    found = VerticalClassifier(columns={"bank": ["a"], "shop": ["b"]}, ledger=tmp_path, exact=True)
    found.fit(frame, [row % 2 for row in range(40)])
    with pytest.raises(LedgerError, match=REFUSED):
        found.predict(frame)


# --- on the command line ---


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_commands_show_nothing_exact_of_nobody(command, run_main, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write_people(tmp_path / "people.csv", range(60))
    assert run_main("ledger", "limit", "books", "--parties", "bank,shop", "--dataset", NAME, "--epsilon", 20)[0] == 0
    columns = ("--columns", "bank=income,debt;shop=visits,basket", "--label", "churn", "--id", "person")
    assert run_main("train", "--data", "people.csv", *columns, "--ledger", "books", "--out", "run", "--json")[0] == 0
    for rows in ((), ("--data", "people.csv", "--id", "person")):
        code, out, err = run_main(command, "run", *rows, "--exact", "--dataset", "nobody")
        assert (code, "--exact-metrics" in err) == (2, True), err
        assert "accuracy" not in out
        assert "predicted" not in out
    assert not list((tmp_path / "run").glob("predictions-*"))
    assert noted(tmp_path / "books") == []
    code, _, err = run_main(command, "run", "--exact", "--dataset", "nobody", "--exact-metrics")
    assert code == 0, err
    assert noted(tmp_path / "books") == noted(tmp_path / "books", "shop") == [("exact", "nobody")]
    assert "exact metrics of its rows were permitted" in " ".join(run_main("ledger", "show", "books")[1].split())
