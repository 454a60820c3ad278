"""Whose book it is, what its file is called, and which values it knows again under another name."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbmvfl.errors import LedgerError
from pbmvfl.federation.federation import Federation
from pbmvfl.ledger.database import file_name
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.ledger_folder import ledger_file_of
from pbmvfl.ledger.row_identity import row_digests, shared_rows
from support.ledger_books import NAME, charge_all, opening, small_plan

# --- names of files ---


@pytest.mark.parametrize("party", ["bank", "party-0", "Shop_2", "a.b"])
def test_a_plain_name_is_the_name_of_the_file(party):
    assert file_name(party) == f"{party}.sqlite"


@pytest.mark.parametrize("party", ["", "..", "../bank", "a/b", "a b", ".hidden", "-rf", "Bänk", "x" * 300, "a\0b", "~"])
def test_an_odd_name_makes_a_file_that_stays_in_its_folder(party, tmp_path):
    name = file_name(party)
    assert (tmp_path / name).resolve().parent == tmp_path.resolve()
    assert name.isascii()
    assert len(name) < 100
    assert not set(name) & set("/\\\0: ")
    assert name[0] not in ".-"
    (tmp_path / name).touch()


#: Names of one another's files, and names that differ in what a file cannot show.
NAMES = st.one_of(st.text(max_size=70), st.text(max_size=20).map(lambda text: file_name(text).removesuffix(".sqlite")))


@given(st.lists(NAMES, unique=True, min_size=2, max_size=6))
def test_different_parties_have_different_files(parties):
    assert len({file_name(party) for party in parties}) == len(parties)


# --- owners ---


def test_a_new_book_says_whose_it_is_and_is_nobody_else_s(tmp_path):
    path = tmp_path / "a.sqlite"
    charge_all(Ledger(path, owner="bank"), small_plan())
    for read_only in (False, True):
        with contextlib.closing(Ledger(path, owner="bank", read_only=read_only)) as book:
            assert book.owner == "bank"
            assert book.export()["owner"] == "bank"
            assert book.trouble() is None
        with pytest.raises(LedgerError, match=r"party='bank', not of party='shop'; name that party's own"):
            Ledger(path, owner="shop", read_only=read_only)


def test_a_book_that_only_has_a_limit_is_taken_by_the_party_that_it_is_named_after(tmp_path):
    """As `ledger limit books/bank.sqlite` makes it, before the first run."""
    path = tmp_path / "bank.sqlite"
    for owner, found in (("", ""), ("shop", ""), ("bank", "bank")):
        with contextlib.closing(Ledger(path, owner=owner)) as book:
            assert book.owner == found
            assert book.trouble() is None


def test_a_change_of_owner_by_something_else_is_seen_and_can_be_accepted(tmp_path):
    path = tmp_path / "a.sqlite"
    Ledger(path, owner="bank").close()
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("UPDATE identity SET owner = 'shop'")
        other.commit()
    with contextlib.closing(Ledger(path)) as book:
        assert "another owner" in (book.trouble() or "")
        book.accept()
        assert book.trouble() is None
        assert book.owner == "shop"


def without_owner(path: Path) -> None:
    """As the version before owners left a book."""
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("ALTER TABLE identity DROP COLUMN owner")
        other.execute("DROP TABLE row_values")
        other.commit()


def test_a_book_from_before_owners_is_read_gone_on_with_and_belongs_to_whoever_finds_it_there(tmp_path):
    path = tmp_path / "party-0.sqlite"
    charge_all(Ledger(path), small_plan(), run="1")
    without_owner(path)
    with contextlib.closing(Ledger(path, owner="bank", read_only=True)) as book:
        assert book.owner == ""
        assert len(book.sessions(NAME)) == 1
        assert book.forecast(opening(dataset=NAME, plan=small_plan(), train_values=VALUES)) == ()
    charge_all(Ledger(path, owner="bank"), small_plan(), run="2", train_values=VALUES)
    charge_all(Ledger(path, owner="party-0"), small_plan(), run="3")  # as the folder was used for named datasets too
    with contextlib.closing(Ledger(path, read_only=True)) as book:
        assert book.trouble() is None
        assert len(book.sessions(NAME)) == 3


def test_books_are_looked_for_under_both_names(tmp_path):
    named, numbered = tmp_path / "bank.sqlite", tmp_path / "party-0.sqlite"
    assert ledger_file_of(tmp_path, 0, "bank", dataset=NAME) == named  # nothing is there yet
    charge_all(Ledger(numbered, owner="party-0"), small_plan())
    assert ledger_file_of(tmp_path, 0, "bank", dataset=NAME) == named  # that one is another party's
    assert ledger_file_of(tmp_path, 0, "party-0", dataset=NAME) == numbered
    earlier = tmp_path / "earlier"
    charge_all(Ledger(earlier / "party-0.sqlite"), small_plan())
    assert ledger_file_of(earlier, 0, "bank", dataset=NAME) == earlier / "party-0.sqlite"
    Ledger(earlier / "bank.sqlite", owner="bank").close()
    assert (
        ledger_file_of(earlier, 0, "bank", dataset="others") == earlier / "bank.sqlite"
    )  # the older one knows nothing of it
    with pytest.raises(LedgerError, match=r"two ledgers of party='bank'.*bank\.sqlite and party-0\.sqlite"):
        ledger_file_of(earlier, 0, "bank", dataset=NAME)


def test_a_federation_names_its_books_by_its_parties(data, make_plan, tmp_path):
    named = replace(data, party_names=("bank", "a shop", "../x"))
    Federation(make_plan(data, num_epochs=1)).fit(named, ledger=tmp_path / "books")
    found = sorted((tmp_path / "books").glob("*.sqlite"))
    owners = [Ledger(path, read_only=True).owner for path in found]
    assert sorted(owners) == ["../x", "a shop", "bank"]
    assert [path.name for path in found] == sorted(map(file_name, named.party_names))


# --- values that are known again ---

ROWS = 300
RANDOM = np.random.default_rng(5)
VALUES: npt.NDArray[Any] = RANDOM.normal(size=(23, 3)).astype(np.float32)
TABLE: npt.NDArray[Any] = RANDOM.normal(size=(ROWS, 6)).round(2).astype(np.float32)


def changed(rows: npt.NDArray[Any], cells: int) -> npt.NDArray[Any]:
    """So many rows have one cell changed each."""
    copy = rows.copy()
    copy[np.arange(cells), np.arange(cells) % rows.shape[1]] += 1
    return copy


RENAMED = {
    "as it is": TABLE,
    "in another order": TABLE[::-1],
    "a part of it": TABLE[100:130],
    "columns in another order": TABLE[:, ::-1],
    "one cell changed": changed(TABLE, 1),
    "a cell of most rows changed": changed(TABLE, 280),
    "with others": np.concatenate([TABLE[:40], RANDOM.normal(size=(200, 6)).astype(np.float32)]),
}
OTHERS = {
    "other people": RANDOM.normal(size=(ROWS, 6)).round(2).astype(np.float32),
    "a cell of every row changed": changed(TABLE, ROWS),
    "fewer columns": TABLE[:, :5],
    "three of them": TABLE[:3],
}


def open_under(path: Path, name: str, rows: npt.NDArray[Any], ids: tuple[str, ...] | None = None) -> None:
    plan = small_plan(num_samples=len(rows))
    values = {"train_values": rows, "train_ids": ids}
    session = Ledger(path).open_session(opening(dataset=name, plan=plan, run=name, session="s", **values))
    session.charge(plan.schedule[0], plan.events(plan.schedule[0].kind))
    session.close()


@pytest.mark.parametrize("case", RENAMED)
def test_rows_that_were_released_under_another_name_are_known_again(case, tmp_path):
    path = tmp_path / "a.sqlite"
    open_under(path, "people", TABLE)
    with pytest.raises(LedgerError, match=r"dataset='folk' has .*of dataset='people'.*pbmvfl ledger allow"):
        open_under(path, "folk", RENAMED[case])
    with contextlib.closing(Ledger(path)) as book:
        assert book.datasets() == ["people"]
        plan = small_plan(num_samples=len(RENAMED[case]))
        with pytest.raises(LedgerError, match="pbmvfl ledger allow"):
            book.forecast(opening(dataset="folk", plan=plan, train_values=RENAMED[case]))
        book.allow("folk")
    open_under(path, "folk", RENAMED[case])
    open_under(path, "people", RENAMED[case])  # under its own name anything may change
    with pytest.raises(LedgerError, match="pbmvfl ledger allow"):
        open_under(path, "a third", RENAMED[case])  # that word was about one name


@pytest.mark.parametrize("case", OTHERS)
def test_what_cannot_be_known_again_is_taken_for_other_people(case, tmp_path):
    path = tmp_path / "a.sqlite"
    open_under(path, "people", TABLE)
    open_under(path, "folk", OTHERS[case])


def ids(stem: str, count: int) -> tuple[str, ...]:
    return tuple(f"{stem}:{number}" for number in range(count))


def test_a_person_has_one_id_under_one_name(tmp_path):
    """Rows of a file without ids are named by the file: renamed or cut, each would get a second budget."""
    path = tmp_path / "a.sqlite"
    open_under(path, "people", TABLE, ids("new", ROWS))
    open_under(path, "people", TABLE[::-1], ids("new", ROWS)[::-1])
    open_under(path, "people", changed(TABLE, 200), ids("new", ROWS))  # values may change, the people are the same
    others = np.concatenate([TABLE[:100], OTHERS["other people"]])
    open_under(path, "people", others, (*ids("new", 100), *ids("others", ROWS)))
    for rows, names in ((TABLE, ids("renamed", ROWS)), (TABLE[50:80], ids("cut", 30))):
        with pytest.raises(LedgerError, match=r"rows with the values of rows .* knows by other ids.*--id, id="):
            open_under(path, "people", rows, names)
    Ledger(path).allow("people")
    open_under(path, "people", TABLE, ids("renamed", ROWS))


def test_rows_of_which_nothing_was_asked_are_not_known(tmp_path):
    """The plan looks at no test row: they may come later, under whatever id."""
    path = tmp_path / "a.sqlite"
    plan = small_plan(num_samples=200, num_test_samples=100)
    charge_all(Ledger(path), plan, train_values=TABLE[:200], test_values=TABLE[200:])
    open_under(path, NAME, TABLE[200:], ids("later", 100))
    with pytest.raises(LedgerError, match="knows by other ids"):
        open_under(path, NAME, TABLE[100:], ids("later still", 200))


def test_values_that_nothing_was_released_of_are_nobody_s_yet(tmp_path):
    path = tmp_path / "a.sqlite"
    plan = small_plan(num_samples=ROWS)
    Ledger(path).open_session(opening(dataset="people", plan=plan, run="r", session="s", train_values=TABLE)).close()
    open_under(path, "folk", TABLE)


def test_other_people_of_the_same_population_are_not_taken_for_the_same():
    """Tables of few and of many different rows. With 4 standard deviations and 3 rows above a doubled estimate, a false
    alarm has a probability below 1e-6 a pair; seeds are fixed, so the outcome does not change from run to run."""
    random, key = np.random.default_rng(11), b"k" * 32
    for levels in (2, 3, 5, 12, 100):
        for columns in (1, 3, 6, 10):
            weights = random.dirichlet(np.ones(levels))
            for known, new in ((1000, 1000), (3000, 100), (50, 2000)):
                first, second = (
                    random.choice(levels, p=weights, size=(rows, columns)).astype(np.float32) for rows in (known, new)
                )
                assert shared_rows(row_digests(key, second), row_digests(key, first)) == 0


def test_digests_of_rows_depend_on_the_key_of_the_book_and_are_in_no_export(tmp_path):
    assert not np.array_equal(row_digests(b"a" * 32, TABLE), row_digests(b"b" * 32, TABLE))
    path = tmp_path / "a.sqlite"
    open_under(path, "people", TABLE)
    with contextlib.closing(Ledger(path, read_only=True)) as book:
        assert "digest" not in repr(book.export())
