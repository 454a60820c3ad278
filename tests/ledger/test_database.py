"""The file of a ledger: reading changes nothing, and what is no ledger is refused and left alone."""

from __future__ import annotations

import os
import sqlite3
from functools import partial

import pytest

from pbmvfl.errors import LedgerError
from pbmvfl.federation.federation import Federation
from pbmvfl.ledger import database as ledger_file
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.spending import spending
from pbmvfl.privacy.units import Accounting, Unit
from support.ledger_books import (
    NAME,
    book_with_limit,
    charge,
    charge_all,
    kill_after,
    on_disk,
    opening,
    paper_limit,
    release_until_killed,
    small_plan,
)


def test_a_folder_where_a_file_belongs_and_a_file_where_a_folder_belongs_are_refused(data, make_plan, tmp_path):
    for read_only in (False, True):
        with pytest.raises(LedgerError, match=r"is a folder; permitted: a file, such as .*bank\.sqlite"):
            Ledger(tmp_path, read_only=read_only)
    file = tmp_path / "books"
    file.write_text("mine")
    with pytest.raises(LedgerError, match=r"books.*permitted: a file in a folder"):
        Ledger(file / "party-0.sqlite")
    with pytest.raises(LedgerError, match="books"):
        Federation(make_plan(data)).fit(data, ledger=file)
    assert file.read_text() == "mine"


def test_a_file_that_is_no_ledger_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "a.sqlite"
    path.write_bytes(b"not a database, but a long enough text to look at" * 40)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="cannot be read as a ledger"):
        Ledger(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("open_elsewhere", [False, True])
@pytest.mark.parametrize("journal", ["DELETE", "WAL"])
@pytest.mark.parametrize("table", ["shelf (title TEXT)", "book (title TEXT)", "book (format INTEGER)"])
def test_another_program_s_database_is_refused_and_left_alone(table, journal, open_elsewhere, tmp_path):
    path = tmp_path / "library.sqlite"
    theirs = sqlite3.connect(path, isolation_level=None)
    theirs.execute(f"PRAGMA journal_mode = {journal}")
    theirs.execute(f"CREATE TABLE {table}")
    if not open_elsewhere:
        theirs.close()
    before = on_disk(tmp_path)
    for read_only in (False, True):
        with pytest.raises(LedgerError, match=r"library\.sqlite.*(another program's|cannot be read as a ledger)"):
            Ledger(path, read_only=read_only)
    assert on_disk(tmp_path) == before
    theirs.close()


def test_a_database_that_its_own_program_was_killed_over_is_left_to_it(tmp_path):
    path = tmp_path / "library.sqlite"
    child = os.fork()
    if child == 0:
        theirs = sqlite3.connect(path, isolation_level=None)
        theirs.execute("PRAGMA journal_mode = WAL")
        theirs.execute("CREATE TABLE shelf (title TEXT)")
        os._exit(0)
    os.waitpid(child, 0)
    before = on_disk(tmp_path)
    assert before["library.sqlite-wal"]
    for read_only in (False, True):
        with pytest.raises(LedgerError, match="another program's"):
            Ledger(path, read_only=read_only)
    assert on_disk(tmp_path) == before


@pytest.mark.parametrize("read_only", [True, False])
def test_an_empty_file_is_a_new_book_and_nothing_to_read(read_only, tmp_path):
    path = tmp_path / "a.sqlite"
    path.touch()
    if read_only:
        with pytest.raises(LedgerError, match="is empty"):
            Ledger(path, read_only=True)
        assert on_disk(tmp_path) == {"a.sqlite": b""}
    else:
        assert Ledger(path).datasets() == []


def test_a_book_whose_maker_was_killed_at_it_is_made_all_the_same(tmp_path):
    path = tmp_path / "a.sqlite"
    child = os.fork()
    if child == 0:
        maker = sqlite3.connect(path, isolation_level=None)
        maker.execute("PRAGMA cache_size = 1")  # pages reach the file before the transaction ends
        maker.execute("BEGIN")
        maker.execute("CREATE TABLE book (format INTEGER)")
        for _ in range(100):
            maker.execute("INSERT INTO book SELECT randomblob(4000)")
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "a.sqlite-journal").stat().st_size
    assert Ledger(path).datasets() == []


# --- reading changes nothing ---


def test_a_book_to_read_must_exist(tmp_path):
    with pytest.raises(LedgerError, match="does not exist"):
        Ledger(tmp_path / "books" / "a.sqlite", read_only=True)
    assert on_disk(tmp_path) == {}


@pytest.mark.parametrize("state", ["closed", "being charged", "killed"])
def test_a_book_is_read_without_a_trace(state, tmp_path):
    plan = small_plan(num_epochs=4000)
    path = tmp_path / "a.sqlite"
    book_with_limit(path, 1e6)
    if state == "killed":
        sent = kill_after(3, partial(release_until_killed, plan, path, 0, "s"))
    else:
        session = Ledger(path).open_session(
            opening(dataset=NAME, plan=plan, run="run", session="s", exact_metrics=True)
        )
        for number in range(3):
            charge(session, plan, number)
        if state == "closed":
            session.close()
        sent = 3
    before = on_disk(tmp_path)
    book = Ledger(path, read_only=True)
    (entry,) = book.sessions(NAME)
    assert entry.charged_until in (sent, sent + (state == "killed"))
    assert book.limits(NAME) == [paper_limit(1e6)]
    assert spending(book, NAME, paper_limit()).worst > 0
    assert book.export()["datasets"][NAME]["sessions"][0]["charged_until"] == entry.charged_until
    for change in (
        lambda: book.set_limit(NAME, paper_limit(50.0)),
        lambda: book.remove_limit(NAME, Unit.CELL, Accounting.PAPER, 0),
        lambda: book.open_session(opening(dataset=NAME, plan=plan, run="other", session="t", exact_metrics=True)),
    ):
        with pytest.raises(LedgerError, match="read_only=True"):
            change()
    book.close()
    assert on_disk(tmp_path) == before


def test_a_reader_sees_the_rounds_of_a_run_under_way(tmp_path):
    plan = small_plan()
    session = Ledger(tmp_path / "a.sqlite").open_session(
        opening(dataset=NAME, plan=plan, run="r", session="s", exact_metrics=True)
    )
    reader = Ledger(tmp_path / "a.sqlite", read_only=True)
    for number in range(3):
        charge(session, plan, number)
        assert reader.sessions(NAME)[0].charged_until == number + 1
    session.close()
    reader.close()


def test_a_run_that_begins_while_the_book_is_read_does_not_disturb_the_reader(monkeypatch, tmp_path):
    path = tmp_path / "a.sqlite"
    charge_all(Ledger(path), small_plan(), run="1")
    reader, whole = Ledger(path), ledger_file.Database.rows

    def interrupted(self, *arguments):
        found = whole(self, *arguments)
        with monkeypatch.context() as once:
            once.setattr(ledger_file.Database, "rows", whole)
            charge_all(Ledger(path), small_plan(num_epochs=len(whole(self, "SELECT 1 FROM plans")) + 5), run="2")
        return found

    monkeypatch.setattr(ledger_file.Database, "rows", interrupted)
    assert reader.sessions(NAME)[0].run == "1"


def test_a_book_that_changes_while_it_is_copied_is_read_again(monkeypatch, tmp_path):
    """Between the two looks at the file another process writes to it and closes it, once."""
    path = tmp_path / "a.sqlite"
    book_with_limit(path, 50.0)
    whole, calls = ledger_file._connect, []

    def slow(path, how):
        connection = whole(path, how)
        if not calls:
            owner = Ledger(path)  # a writer needs no look that this function is part of
            owner.set_limit(NAME, paper_limit(60.0))
            owner.close()
        calls.append(how)
        return connection

    monkeypatch.setattr(ledger_file, "_connect", slow)
    assert [limit.epsilon for limit in Ledger(path, read_only=True).limits(NAME)] == [60.0]
    assert len(calls) == 2
