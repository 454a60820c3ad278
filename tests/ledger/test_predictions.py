"""Predictions in the books: what asking a model costs, what asking again costs, and how the books tell of it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import pbmvfl
from pbmvfl import FederatedModel, Federation, ReleaseOptions
from pbmvfl.data.new_rows import NewRows
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import BudgetExceeded, LedgerError, PlanError
from pbmvfl.ledger import row_identity
from pbmvfl.ledger.forecast import session_words
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.spending import spending
from support.local_plans import voting_plan

PARTIES = ("bank", "shop")
RANDOM = np.random.default_rng(4)
LIMIT = Limit.choose(unit="cell", accounting="strict", epsilon=3.0, delta=1e-5)


def table() -> VerticalDataset:
    labels = np.arange(80) % 2
    parts = [(RANDOM.normal(size=(80, 3)) + labels[:, None]).astype(np.float32) / 4 for _ in PARTIES]
    return VerticalDataset(
        name="people",
        party_names=PARTIES,
        train_features=tuple(part[:60] for part in parts),
        test_features=tuple(part[60:] for part in parts),
        train_labels=labels[:60],
        test_labels=labels[60:],
        class_names=("no", "yes"),
        default_encoder="linear",
    )


def new_rows(stem: str, count: int) -> NewRows:
    values = tuple(RANDOM.normal(size=(count, 3)).astype(np.float32) for _ in PARTIES)
    ids = tuple(f"{stem}:{number}" for number in range(count))
    return NewRows(name="people", party_names=PARTIES, features=values, ids=ids, labels=None)


@pytest.fixture
def model(tmp_path: Path) -> FederatedModel:
    """One whose training cost its rows most of their 3, on a disk, where parties keep what they have answered."""
    data = table()
    for party in PARTIES:
        with contextlib.closing(Ledger(tmp_path / "books" / f"{party}.sqlite", owner=party)) as book:
            book.set_limit("people", LIMIT)
    plan = voting_plan(data, noise_multiplier=10.0, mean_noise=8.0, gram_noise=8.0, evaluation="simulator")
    found = Federation(plan).fit(data, ledger=tmp_path / "books", exact_metrics=True).model
    assert found is not None
    return pbmvfl.load(found.save(tmp_path / "model"))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def charged(folder: Path, party: str = "bank") -> list[str]:
    with contextlib.closing(Ledger(folder / "books" / f"{party}.sqlite", read_only=True)) as book:
        return [session_words(entry) for entry in book.sessions("people")]


def test_new_rows_have_a_budget_of_their_own_and_asking_again_costs_nothing(model, tmp_path):
    """Training took most of its rows' budget; a row that it never saw has all of it."""
    rows, books = new_rows("new", 30), tmp_path / "books"
    with contextlib.closing(Ledger(books / "bank.sqlite", read_only=True)) as book:
        trained_for = spending(book, "people", LIMIT).epsilon
    assert 1.5 < trained_for < 3
    first = model.release(rows, ReleaseOptions(ledger=books))  # as planned: a symbol with a pure epsilon of 2
    with contextlib.closing(Ledger(books / "bank.sqlite", read_only=True)) as book:
        assert spending(book, "people", LIMIT).epsilon == pytest.approx(max(trained_for, 2.0), rel=1e-3)
    again = pbmvfl.load(tmp_path / "model")  # another process, as it were: nothing is remembered but what is stored
    for said in again.forecast(rows, ReleaseOptions(ledger=books)):
        (limit,) = said.limits
        assert (limit.stops_at, limit.will_be) == (None, limit.spent)
    second = again.release(rows, ReleaseOptions(ledger=books))
    np.testing.assert_array_equal(first.scores_NK, second.scores_NK)
    trained, asked, repeated = charged(tmp_path)
    assert "trained 3 epochs on 52 rows, 8 fusion rows released" in trained
    assert asked.startswith("30 rows predicted, randomised response")
    assert repeated == "nothing charged"


def test_a_row_that_has_no_budget_left_is_refused_before_anything_is_released(model, tmp_path):
    rows, books = new_rows("new", 30), tmp_path / "books"
    model.release(rows, ReleaseOptions(ledger=books))
    before = files(books)
    with pytest.raises(BudgetExceeded, match=r"from epsilon 2\.\d+ to .*Nothing was sent"):
        model.release(rows, ReleaseOptions(ledger=books, data_version="later"))  # so it would tell something new
    assert files(books) == before


def test_a_fusion_model_reads_one_epsilon_and_says_which(model, tmp_path):
    books = tmp_path / "books"
    before = files(books)
    words = r"epsilon=1.5 for a cell: .* reads releases of epsilon 2.00 alone, .* train with --prediction-epsilon 1.5"
    with pytest.raises(PlanError, match=words):
        model.release(new_rows("new", 3), ReleaseOptions(epsilon=1.5, ledger=books))
    assert files(books) == before


def test_a_refused_prediction_does_not_claim_a_ledger_for_its_party(model, tmp_path):
    """An owner's ledger that has a limit and no owner yet is looked at, and stays as it is."""
    books = tmp_path / "others"
    for party in PARTIES:
        with contextlib.closing(Ledger(books / f"{party}.sqlite")) as ledger:
            ledger.set_limit("people", LIMIT)
    before = files(books)
    with pytest.raises(LedgerError, match="does not know of this model's training"):
        model.release(new_rows("new", 3), ReleaseOptions(ledger=books))
    assert files(books) == before


@pytest.mark.parametrize("stored", [True, False])
def test_a_prediction_opens_each_party_s_ledger_once(model, tmp_path, monkeypatch, stored):
    """It is looked at before anything is released, and charged, by one connection, and its rows are digested once."""
    counts = Counter()

    def count(owner, name):
        whole = getattr(owner, name)

        def call(*values, **named):
            counts[name] += 1
            return whole(*values, **named)

        monkeypatch.setattr(owner, name, call)

    if not stored:
        model._folder = None
    count(sqlite3, "connect")
    count(Ledger, "__init__")
    count(row_identity, "_digest")
    count(row_identity, "_digests_of")
    assert model.release(new_rows("new", 100), ReleaseOptions(ledger=tmp_path / "books")).is_known.all()
    assert counts == {"connect": 2, "__init__": 2, "_digest": 2, "_digests_of": 2}


def test_predicted_rows_under_other_ids_are_refused(model, tmp_path):
    rows, books = new_rows("new", 30), tmp_path / "books"
    model.release(rows, ReleaseOptions(epsilon=2.0, ledger=books))
    renamed = NewRows(
        name="people",
        party_names=PARTIES,
        features=rows.features,
        ids=tuple(f"copy:{number}" for number in range(30)),
        labels=None,
    )
    with pytest.raises(LedgerError, match=r"30 rows with the values of rows .* knows by other ids"):
        model.release(renamed, ReleaseOptions(epsilon=2.0, ledger=books))
