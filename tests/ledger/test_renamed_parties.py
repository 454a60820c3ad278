"""A party under another name is a new party: where a ledger of the folder has a limit, its owner adds it first.

The attack: `bank` has spent its limit. As `Bank`, as `bank-2`, or with its columns in a group of another name, the same
columns would begin with a new ledger, which knows no limit and nothing spent.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil

import pytest

from pbmvfl import Federation, Ledger, Limit, ReleaseOptions, VerticalClassifier
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import BudgetExceeded, LedgerError
from pbmvfl.ledger.database import file_name
from support.limited_people import NAME, WHO, Left, load_people, plan_of, sessions, set_limits, trained, write_people

REFUSED = r"has no ledger of party=.* has a limit.*let its owner add it with a limit E: `pbmvfl ledger limit "
OTHER_NAMES = {
    "another case": {"Bank": WHO["bank"], "shop": WHO["shop"]},
    "a number": {"bank-2": WHO["bank"], "shop-2": WHO["shop"]},
    "regrouped": {"bank": ["debt"], "shop": ["basket"], "all": ["income", "visits"]},
    "swapped and renamed": {"shop": WHO["bank"], "store": WHO["shop"]},
}


@pytest.fixture
def data(tmp_path) -> VerticalDataset:
    return load_people(write_people(tmp_path / "people.csv", range(60)))


@pytest.fixture
def books(data, tmp_path):
    """Ledgers of bank and shop, in which training has spent the limit."""
    folder = tmp_path / "books"
    set_limits(folder, epsilon=2.0)
    Federation(strong(data)).fit(data, ledger=folder)
    with pytest.raises(BudgetExceeded):
        Federation(strong(data)).fit(data, ledger=folder)
    return folder


def strong(data: VerticalDataset):
    """Most of 2 for each training row."""
    return plan_of(data, noise_multiplier=5.0, mean_noise=20.0, gram_noise=20.0)


@pytest.mark.parametrize("case", OTHER_NAMES)
def test_training_under_other_names_of_parties_is_refused_before_anything_is_sent(case, books, tmp_path):
    renamed = load_people(tmp_path / "people.csv", who=OTHER_NAMES[case])
    federation = Federation(strong(renamed))
    left, before = Left(federation), sorted(books.iterdir())
    with pytest.raises(LedgerError, match=REFUSED):
        federation.fit(renamed, ledger=books)
    with pytest.raises(LedgerError, match=REFUSED):
        federation.forecast(renamed, books)
    with pytest.raises(LedgerError, match=REFUSED):
        federation.fit(renamed, ledger=books, until_limit=True)
    assert (left.count, sorted(books.iterdir())) == (0, before)


def test_a_model_of_renamed_parties_is_not_asked_with_these_ledgers(books, tmp_path):
    """One that was trained without ledgers: predictions would make them."""
    renamed = load_people(tmp_path / "people.csv", who=OTHER_NAMES["a number"])
    model = trained(renamed, None)
    left, before = Left(model), sorted(books.iterdir())
    for ask in (model.predict, model.evaluate, model.forecast):
        with pytest.raises(LedgerError, match=REFUSED):
            ask(renamed, ReleaseOptions(ledger=books))
    for how in ({"exact": True}, {"exact": True, "exact_metrics": True}, {"uncharged": True}):
        with pytest.raises(LedgerError, match=REFUSED):
            model.predict(renamed, ReleaseOptions(ledger=books, **how))
    assert (left.count, sorted(books.iterdir())) == (0, before)


def test_the_estimator_refuses_a_renamed_party(tmp_path):
    import pandas as pd

    frame = pd.DataFrame({"a": range(40), "b": range(40)}, index=[f"p{row}" for row in range(40)]) / 40
    set_limits(tmp_path, ["bank", "shop"], dataset="frame")
    found = VerticalClassifier(columns={"Bank": ["a"], "shop": ["b"]}, ledger=tmp_path)
    with pytest.raises(LedgerError, match=REFUSED):
        found.fit(frame, [row % 2 for row in range(40)])


@pytest.mark.parametrize("party", ["bank-2", "Bank", "O'Brien", "a; shop & co", "$HOME", "bank,shop", "-rf", "Bänk"])
def test_the_error_has_the_command_by_which_an_owner_adds_a_party(party, books, run_main, tmp_path):
    """As a shell reads it, with a number for E. The new ledger is that party's, and has the limit."""
    renamed = load_people(tmp_path / "people.csv", who={party: WHO["bank"], "shop": WHO["shop"]}, name="others people")
    set_limits(books, dataset="others people")
    for each in ("bank", "shop"):  # the owner's word that these are others: this test is about the party's name
        with contextlib.closing(Ledger(books / file_name(each))) as ledger:
            ledger.allow("others people")
    with pytest.raises(LedgerError) as refusal:
        Federation(plan_of(renamed)).fit(renamed, ledger=books)
    (command,) = re.findall(r"limit E: `(pbmvfl ledger limit .*)`$", str(refusal.value))
    words = shlex.split(command)
    assert words[-1] == "E"
    code, _, err = run_main(*words[1:-1], "8")
    assert code == 0, err
    Federation(plan_of(renamed)).fit(renamed, ledger=books)
    with contextlib.closing(Ledger(books / file_name(party), read_only=True)) as ledger:
        assert (ledger.owner, len(ledger.limits("others people"))) == (party, 1)
        assert [event.what for event in ledger.history()][:2] == ["limit", "owned"]


def test_several_new_parties_are_named_with_a_command_each(books, tmp_path):
    renamed = load_people(tmp_path / "people.csv", who=OTHER_NAMES["a number"])
    with pytest.raises(LedgerError, match=r"party='bank-2', party='shop-2'.*bank-2\.sqlite.* && .*shop-2\.sqlite"):
        Federation(strong(renamed)).fit(renamed, ledger=books)


@pytest.mark.parametrize("emptied", [False, True])
def test_a_ledger_that_was_removed_is_not_begun_anew(emptied, books, data):
    path = books / "bank.sqlite"
    path.unlink()
    if emptied:
        path.touch()
    with pytest.raises(LedgerError, match=r"has no ledger of party='bank', and shop\.sqlite there has a limit"):
        Federation(strong(data)).fit(data, ledger=books)


def test_an_older_copy_without_the_limit_lets_no_new_party_in(data, tmp_path):
    books, copy = tmp_path / "books", tmp_path / "copy"
    Federation(strong(data)).fit(data, ledger=books)
    shutil.copytree(books, copy)
    set_limits(books)
    shutil.rmtree(books)
    shutil.copytree(copy, books)
    renamed = load_people(tmp_path / "people.csv", who=OTHER_NAMES["a number"])
    with pytest.raises(LedgerError, match="pbmvfl ledger accept"):
        Federation(strong(renamed)).fit(renamed, ledger=books)


def test_names_that_a_file_system_does_not_tell_apart_are_told_apart_by_the_ledger(books, tmp_path):
    """Where `Bank.sqlite` is `bank.sqlite`, as here by a link, the file itself says whose it is."""
    os.link(books / "bank.sqlite", books / "Bank.sqlite")
    renamed = load_people(tmp_path / "people.csv", who=OTHER_NAMES["another case"])
    before = sessions(books)
    with pytest.raises(LedgerError, match="party='bank', not of party='Bank'"):
        Federation(strong(renamed)).fit(renamed, ledger=books)
    assert sessions(books) == before


def test_without_any_limit_parties_come_and_go(data, tmp_path):
    """The control: it is the limit that asks for known parties."""
    Federation(plan_of(data)).fit(data, ledger=tmp_path / "books")
    renamed = load_people(tmp_path / "people.csv", who=OTHER_NAMES["regrouped"])
    Federation(plan_of(renamed)).fit(renamed, ledger=tmp_path / "books")
    assert sessions(tmp_path / "books", "all") == 1


def test_known_parties_need_no_limit_of_their_own(data, tmp_path):
    """An owner without a limit is known by a ledger without one."""
    set_limits(tmp_path / "books", ["bank"])
    with contextlib.closing(Ledger(tmp_path / "books" / "shop.sqlite", owner="shop")) as ledger:
        assert not ledger.has_limits
    Federation(plan_of(data)).fit(data, ledger=tmp_path / "books")
    assert sessions(tmp_path / "books", "shop") == 1


def test_a_numbered_ledger_of_an_earlier_version_knows_its_party(data, tmp_path):
    """It says of no owner, and is the ledger of whichever party has that number."""
    for number in range(2):
        with contextlib.closing(Ledger(tmp_path / f"party-{number}.sqlite")) as ledger:
            ledger.set_limit(NAME, Limit.choose(unit="cell", accounting="strict", epsilon=5, delta=1e-5))
    Federation(plan_of(data)).fit(data, ledger=tmp_path)
    assert sessions(tmp_path, "party-0") == 1


# --- on the command line ---


def test_commands_refuse_a_renamed_party_and_leave_nothing_behind(run_main, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write_people(tmp_path / "people.csv", range(60))
    assert run_main("ledger", "limit", "books", "--parties", "bank,shop", "--dataset", NAME, "--epsilon", 8.5)[0] == 0
    train = ("train", "--data", "people.csv", "--label", "churn", "--id", "person", "--ledger", "books", "--json")
    columns = "=income,debt;shop=visits,basket"
    assert run_main(*train, "--columns", f"bank{columns}", "--out", "one")[0] == 0
    before = sorted(path.name for path in (tmp_path / "books").iterdir())
    code, _, err = run_main(*train, "--columns", f"Bank{columns}", "--out", "two")
    command = "pbmvfl ledger limit books/Bank.sqlite --dataset people --unit cell --accounting strict --epsilon E"
    assert code == 2
    assert command in err.replace(f"{tmp_path}/", "")
    assert not (tmp_path / "two").exists()
    assert sorted(path.name for path in (tmp_path / "books").iterdir()) == before
