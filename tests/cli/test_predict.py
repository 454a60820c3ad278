"""`pbmvfl predict` and `pbmvfl evaluate` as a person uses them, from a table of their own to a file of predictions."""

from __future__ import annotations

import contextlib
import csv
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from pbmvfl.errors import DataError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.ledger_folder import ledger_file_of
from support.charged_rows import charged_predictions
from support.command_line import run_command

COLUMNS = ("--label", "churn", "--columns", "bank=income,debt;shop=visits,job")
SCHEMA = {
    "columns": {
        "income": {"range": [-3, 5], "missing": True},
        "debt": {"range": [-3, 5]},
        "visits": {"range": [-3, 5]},
        "job": {"vocabulary": ["cook", "clerk"], "other": True, "missing": True},
    }
}


def write(path: Path, first: int, count: int, *, label: bool = True, drop: str | None = None) -> list[str]:
    """Rows with numbers and words, some of them missing; the label's words in the order of the rows."""
    random = np.random.default_rng(first)
    labels = random.integers(0, 2, count)
    header = ["person", "income", "debt", "visits", "job", *(["churn"] if label else [])]
    rows = []
    for i, churns in enumerate(labels):
        numbers = [f"{2 * churns + n:.4f}" for n in random.normal(size=3)]
        numbers[0] = "" if i % 7 == 3 else numbers[0]
        job = "?" if i % 11 == 5 else ("cook", "clerk", "king")[int(churns) if i % 9 else 2]
        rows.append([f"p{first + i}", *numbers, job, *([("stays", "goes")[churns]] if label else [])])
    kept = [i for i, name in enumerate(header) if name != drop]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([[row[i] for i in kept] for row in [header, *rows]])
    return [("stays", "goes")[churns] for churns in labels]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run with ledgers, made once; tests work on copies."""
    folder = tmp_path_factory.mktemp("trained")
    write(folder / "people.csv", 0, 400)
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    options = ("--schema", "schema.json", "--id", "person", "--ledger", "books", "--exact-metrics", "--out", "run")
    assert run_command("train", "--data", "people.csv", *COLUMNS, *options, "--json", cwd=folder) == 0
    return folder


@pytest.fixture
def place(trained, tmp_path, monkeypatch) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    source = json.loads((tmp_path / "run" / "data.json").read_text())
    for name in ("ledger", "schema", "data"):
        source[name] = str(tmp_path / Path(source[name]).name)
    (tmp_path / "run" / "data.json").write_text(json.dumps(source))
    monkeypatch.chdir(tmp_path)
    # Copies of a book are told apart from the book by a count outside of it; here each copy is a world of its own.
    monkeypatch.setenv("PBMVFL_STATE", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def cli(run_main, place):
    del place  # the folder to work in
    return run_main


def test_rows_without_a_label_become_a_file_of_predictions(cli, place):
    write(place / "new.csv", 1000, 50, label=False)
    code, out, err = cli("predict", "run", "--data", "new.csv", "--id", "person", "--out", "p.parquet")
    assert code == 0, err
    assert "epsilon that a row's prediction costs" in out
    assert "50 of 50 rows predicted" in out
    found = pq.read_table(place / "p.parquet").to_pydict()
    assert found["id"] == [f"p{1000 + row}" for row in range(50)]
    assert set(found["prediction"]) <= {"goes", "stays"}
    assert list(found) == ["id", "prediction", "p(goes)", "p(stays)"]


def test_predictions_are_charged_under_the_names_of_the_rows(cli, place):
    write(place / "new.csv", 1000, 5, label=False)
    assert cli("predict", "run", "--data", "new.csv", "--id", "person")[0] == 0
    for index, party in enumerate(("bank", "shop")):
        book = Ledger(ledger_file_of(place / "books", index, party), read_only=True)
        entry = book.sessions("people")[-1]
        assert entry.row_releases == 5
        assert list(book.read_ids(entry.test_ids)) == [f"p{row}" for row in range(1000, 1005)]
        book.close()
    assert sorted(path.name for path in (place / "run").glob("predictions-*")) == ["predictions-001.parquet"]
    noted = json.loads((place / "run" / "released.jsonl").read_text())
    assert (noted["rows"], noted["exact"], noted["accuracy"]) == (5, False, None)
    assert 7.9 < noted["epsilon"] <= 8
    assert "p1000" not in (place / "run" / "released.jsonl").read_text()


def test_what_was_asked_stands_on_the_runs_page(cli, place):
    write(place / "test.csv", 2000, 40)
    code, out, err = cli("evaluate", "run", "--data", "test.csv", "--id", "person", "--json")
    assert code == 0, err
    right = json.loads(out)["metrics"]["test_accuracy"]
    code, out, err = cli("report", "run", "--json")
    assert code == 0, err
    (asked,) = json.loads(out)[0]["asked"]
    assert asked["accuracy"] == pytest.approx(right)
    assert cli("report", "run", "--out", "page.html")[0] == 0
    page = (place / "page.html").read_text()
    assert "Predictions since" in page
    assert f">{right:.4f}<" in page
    (place / "run" / "released.jsonl").write_text("{")
    code, _, err = cli("report", "run", "--json")
    assert (code, "released.jsonl is damaged" in err) == (2, True)


def test_an_evaluation_is_a_release_and_says_what_it_was_measured_on(cli, place):
    labels = write(place / "test.csv", 2000, 60)
    code, out, err = cli("evaluate", "run", "--data", "test.csv", "--id", "person", "--out", "p.csv")
    assert code == 0, err
    majority = max(Counter(labels).values()) / 60
    assert f"most frequent class: {majority:.4f}" in out
    assert "released predictions" in out
    with open(place / "p.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    right = sum(row["prediction"] == row["label"] for row in rows) / 60
    assert [row["label"] for row in rows] == labels
    assert f"accuracy {right:.4f}" in out
    assert right > majority + 0.1  # the classes are two deviations apart in three columns


def test_the_runs_own_test_rows_are_the_default_and_have_their_own_names(cli, place):
    code, out, err = cli("evaluate", "run", "--json")
    assert code == 0, err
    shown = json.loads(out)
    assert shown["rows"] == shown["predicted"] == 80
    strict = [row for row in shown["bounds"] if row["unit"] == "cell" and row["accounting"] == "strict"]
    assert 7.9 < strict[0]["epsilon"] <= 8
    book = Ledger(ledger_file_of(place / "books", 0, "bank"), read_only=True)
    first, last = book.sessions("people")[0], book.sessions("people")[-1]
    assert book.read_ids(last.test_ids) == book.read_ids(first.test_ids)
    book.close()


def test_test_rows_that_training_released_and_rows_that_were_asked_about_cost_nothing_again(cli, place):
    options = ("--schema", "schema.json", "--id", "person", "--ledger", "books", "--prediction-epsilon", 8)
    code, _, err = cli("train", "--data", "people.csv", *COLUMNS, *options, "--out", "released", "--json")
    assert code == 0, err
    book = ledger_file_of(place / "books", 0, "bank")
    before = charged_predictions(book)
    assert (len(before), set(before.values())) == (80, {1})
    code, out, err = cli("evaluate", "released")
    assert code == 0, err
    assert "80 of 80 rows have stored answers and cost nothing" in " ".join(out.split())
    measured = json.loads((place / "released" / "result.json").read_text())["released"]["test_accuracy"]
    assert f"accuracy {measured:.4f}" in out
    assert charged_predictions(book) == before
    write(place / "new.csv", 1000, 40, label=False)
    write(place / "more.csv", 1000, 50, label=False)
    for file, known in (("new.csv", None), ("more.csv", "40 of 50")):
        code, out, err = cli("predict", "released", "--data", file, "--id", "person")
        assert code == 0, err
        assert ("have stored answers" in out) == (known is not None)
        assert known is None or f"{known} rows have stored answers and cost nothing" in " ".join(out.split())
    assert charged_predictions(book) == before + Counter(f"p{row}" for row in range(1000, 1050))


def test_exact_sums_are_asked_for_by_name_and_cost_nothing(cli, place):
    code, out, err = cli("evaluate", "run", "--exact")
    assert code == 0, err
    assert "exact sums, outside of any epsilon" in out
    assert "epsilon that a row's prediction costs" not in out
    assert "accuracy" in out
    with_books = [Ledger(ledger_file_of(place / "books", 0, "bank"), read_only=True)]
    assert len(with_books[0].sessions("people")) == 1
    with_books[0].close()


def test_a_file_for_each_party_is_joined_by_its_ids(cli, place):
    write(place / "new.csv", 1000, 30, label=False)
    with open(place / "new.csv", newline="") as file:
        header, *rows = csv.reader(file)
    for name, kept, order in (("b.csv", (0, 1, 2), rows[:25]), ("s.csv", (0, 3, 4), rows[:4:-1])):
        with open(place / name, "w", newline="") as file:
            csv.writer(file).writerows([[row[i] for i in kept] for row in [header, *order]])
    options = ("--data", "bank=b.csv", "--data", "shop=s.csv", "--id", "person")
    code, out, err = cli("predict", "run", *options, "--out", "p.parquet")
    assert code == 0, err
    assert sorted(pq.read_table(place / "p.parquet")["id"].to_pylist()) == [f"p{row}" for row in range(1005, 1025)]
    assert "note:" in out


def test_columns_that_changed_are_asked_about_by_another_data_version(cli, place):
    """The same people with other columns get the answers that they got; the owner's word makes a new question."""
    ask = ("predict", "run", "--data", "new.csv", "--id", "person")
    write(place / "new.csv", 1000, 30, label=False)
    assert cli(*ask, "--out", "first.parquet")[0] == 0
    first = pq.read_table(place / "first.parquet")
    header, *rows = (place / "new.csv").read_text().splitlines()
    changed = [",".join([row.split(",")[0], "4.5", "4.5", "-2.5", "clerk"]) for row in rows]
    (place / "new.csv").write_text("\n".join([header, *changed]) + "\n")
    assert cli(*ask, "--out", "again.parquet")[0] == 0
    assert pq.read_table(place / "again.parquet").equals(first)
    code, out, err = cli(*ask, "--data-version", "2026-02", "--out", "anew.parquet")
    assert (code, "of dataset people, version 2026-02" in out) == (0, True), err
    assert not pq.read_table(place / "anew.parquet").equals(first)
    with contextlib.closing(Ledger(ledger_file_of(place / "books", 0, "bank"), read_only=True)) as book:
        assert [entry.row_releases for entry in book.sessions("people")[1:]] == [30, 0, 30]
    code, _, err = cli("predict", "run", "--rows", "visitors", "--data-version", "2026-02")
    assert (code, "[data] version" in err) == (2, True)


# --- what is wrong is named, and nothing is released ---


def sessions(place: Path) -> int:
    book = Ledger(ledger_file_of(place / "books", 0, "bank"), read_only=True)
    found = len(book.sessions("people"))
    book.close()
    return found


def test_what_is_wrong_is_named_before_anything_is_released(cli, place):
    write(place / "new.csv", 1000, 5, label=False)
    write(place / "other.csv", 1000, 5, label=False, drop="debt")
    (place / "there.parquet").write_text("mine")
    cases = [
        (("predict", "nowhere"), "neither a run folder"),
        (("predict", "run", "--data", "other.csv"), "column='debt' is not in other.csv"),
        (("predict", "run", "--data", "nothing.csv"), "nothing.csv"),
        (("predict", "run", "--data", "new.csv", "--id", "passport"), "passport"),
        (("predict", "run", "--data", "new.csv", "--out", "p.txt"), "permitted are .parquet and .csv"),
        (("predict", "run", "--data", "new.csv", "--out", "there.parquet"), "exists already"),
        (("predict", "run", "--data", "new.csv", "--epsilon", -2), "prediction_epsilon=-2"),
        (("predict", "run", "--data", "new.csv", "--delta", 2), "delta=2"),
        (("predict", "run", "--data", "new.csv", "--unit", "house"), "unit='house'"),
        (("predict", "run", "--id", "person"), "--id names a column of --data"),
        (("evaluate", "run", "--data", "new.csv"), "column='churn' is not in new.csv"),
        (("evaluate", "run/model"), "no rows of its own"),
        (("predict", "run/model", "--data", "new.csv"), "charged to ledgers, and predictions are charged there, too"),
    ]
    for command, words in cases:
        code, out, err = cli(*command)
        assert (code, words in err) == (2, True), (command, err, out)
        assert "Traceback" not in err
    assert sessions(place) == 1
    assert (place / "there.parquet").read_text() == "mine"
    assert not list((place / "run").glob("predictions-*"))


def test_a_limit_keeps_rows_back_and_returns_3(cli, place):
    write(place / "new.csv", 1000, 5, label=False)
    limit = ("ledger", "limit", "books", "--dataset", "strangers", "--unit", "cell", "--accounting", "strict")
    assert cli(*limit, "--epsilon", 10)[0] == 0
    ask = ("predict", "run", "--data", "new.csv", "--id", "person", "--dataset", "strangers", "--data-version")
    code, out, err = cli(*ask, "1", "--out", "first.parquet")
    assert code == 0, err
    assert "of 10 is spent" in out
    code, out, err = cli(*ask, "2", "--out", "second.parquet")
    assert code == 2
    assert "would end this run" in err
    assert "--until-limit" in err
    code, out, err = cli(*ask, "2", "--out", "third.parquet", "--until-limit")
    assert (code, "0 of 5 rows predicted" in out) == (3, True), err
    assert not (place / "third.parquet").exists()  # there is nothing to write


def test_books_that_do_not_know_of_the_training_are_refused(cli, place):
    """New ones, those of another folder, and a folder that lost one: none knows what was spent, or a limit."""
    write(place / "new.csv", 1000, 5, label=False)
    ask = ("predict", "run", "--data", "new.csv", "--id", "person")
    code, _, err = cli(*ask, "--ledger", "fresh")
    assert (code, "does not know of this model's training" in err) == (2, True)
    assert not (place / "fresh").exists()
    (place / "books" / "shop.sqlite").rename(place / "shop.sqlite")
    code, _, err = cli(*ask)
    assert (code, "party='shop'" in err) == (2, True)
    assert not list((place / "books").glob("shop.sqlite"))
    assert not list((place / "run").glob("predictions-*"))


def test_exact_sums_of_rows_with_a_limit_need_the_owners_word_and_are_noted(cli):
    limit = ("ledger", "limit", "books", "--dataset", "people", "--unit", "cell", "--accounting", "strict")
    assert cli(*limit, "--epsilon", 20)[0] == 0
    code, _, err = cli("evaluate", "run", "--exact")
    assert (code, "--exact-metrics" in err) == (2, True)
    assert cli("evaluate", "run", "--exact", "--exact-metrics")[0] == 0
    assert "exact metrics of its rows were permitted" in " ".join(cli("ledger", "show", "books")[1].split())


def test_a_file_that_cannot_be_written_is_refused_before_rows_are_charged_for_it(cli, place, monkeypatch):
    write(place / "new.csv", 1000, 5, label=False)
    ask = ("predict", "run", "--data", "new.csv", "--id", "person", "--out")
    code, _, err = cli(*ask, "/proc/p.csv")
    assert (code, "nothing was released" in err, sessions(place)) == (2, True, 1)

    def full(*_: object) -> None:
        raise DataError("out='p.csv' cannot be written: the disk is full")

    monkeypatch.setattr("pbmvfl.federation.predictions.Predictions.write", _full_once(full))
    code, out, err = cli(*ask, "p.csv")
    assert code == 0, err
    kept = Path(out.split("predictions are in ")[1].split()[0])
    assert pq.read_table(kept).num_rows == 5
    shutil.rmtree(kept.parent)


def _full_once(full):
    """The first write fails, as on a disk that has become full since it was tried; later ones do not."""
    from pbmvfl.federation.predictions import Predictions

    write_it, failed = Predictions.write, []

    def attempt(self, path):
        if not failed:
            failed.append(path)
            full()
        write_it(self, path)

    return attempt


def test_a_run_that_goes_on_keeps_its_budget(cli, place):
    code, _, err = cli("train", "--resume", "run", "--epsilon", 4)
    assert (code, "--epsilon with --resume" in err) == (2, True), place


def test_a_damaged_or_incomplete_model_is_named(cli, place):
    weights = place / "run" / "model" / "shop" / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    code, _, err = cli("predict", "run")
    assert (code, "is damaged" in err, "shop" in err) == (2, True, True)
    shutil.rmtree(weights.parent)
    code, _, err = cli("predict", "run")
    assert (code, "lacks the part of shop" in err) == (2, True)
    shutil.rmtree(place / "run" / "model")
    code, _, err = cli("predict", "run")
    assert (code, "has no model yet" in err) == (2, True)
