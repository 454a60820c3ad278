"""A book has one session at a time, and whoever could not open it or write to it leaves it free."""

from __future__ import annotations

import contextlib
import os
import sqlite3

import pytest

from pbmvfl.errors import LedgerError
from pbmvfl.ledger import database as ledger_file
from pbmvfl.ledger.charging import Charging
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import epsilon_at
from pbmvfl.plan.round_kinds import JOINT
from pbmvfl.privacy.renyi import cell_rdp
from support.ledger_books import DELTA, NAME, charge, charge_all, opening, paper_limit, small_plan


def opened_files(path):
    """What this process has open of a book and of the files beside it."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [name for link in links if os.path.lexists(link) and (name := os.readlink(link)).startswith(str(path))]


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="sees open files through /proc")


@pytest.fixture
def impatient(monkeypatch):
    """A book that another process writes to is given up at once."""
    monkeypatch.setattr(ledger_file, "_PATIENCE", 0.0)


@contextlib.contextmanager
def writing(path):
    """Somebody else in the middle of a transaction."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    yield
    other.execute("ROLLBACK")
    other.close()


def test_only_one_session_at_a_time_may_charge_a_book(tmp_path):
    plan = small_plan()
    session = Ledger(tmp_path / "a.sqlite").open_session(
        opening(dataset=NAME, plan=plan, run="r", session="s", exact_metrics=True)
    )
    with pytest.raises(LedgerError, match="another session"):
        Ledger(tmp_path / "a.sqlite").open_session(
            opening(dataset=NAME, plan=plan, run="r", session="t", exact_metrics=True)
        )
    session.close()
    charge_all(Ledger(tmp_path / "a.sqlite"), plan)


def test_one_book_under_two_names_has_one_session_at_a_time(tmp_path):
    plan = small_plan()
    opened = Ledger(tmp_path / "a.sqlite").open_session(
        opening(dataset=NAME, plan=plan, run="run", session="s", exact_metrics=True)
    )
    (tmp_path / "alias.sqlite").symlink_to(tmp_path / "a.sqlite")
    with pytest.raises(LedgerError, match="being charged by another session"):
        Ledger(tmp_path / "alias.sqlite").open_session(
            opening(dataset=NAME, plan=plan, run="other", session="t", exact_metrics=True)
        )
    opened.close()


def test_a_session_that_could_not_be_opened_keeps_nobody_out(tmp_path, monkeypatch):
    plan = small_plan(num_samples=2, num_test_samples=0)
    ledger = Ledger(tmp_path / "a.sqlite")
    with pytest.raises(LedgerError, match="different"):
        ledger.open_session(
            opening(
                dataset=NAME, plan=plan, run="r", session="s", exact_metrics=True, train_ids=["a", "a"], test_ids=[]
            )
        )
    with monkeypatch.context() as broken:
        broken.setattr(Charging, "_load_limits", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ledger.open_session(opening(dataset=NAME, plan=plan, run="r", session="s", exact_metrics=True))
    charge_all(Ledger(tmp_path / "a.sqlite"), plan)
    assert charge_all(ledger, plan, run="2") == len(plan.schedule)


@needs_proc
def test_a_book_that_could_not_be_opened_leaves_no_file_open(tmp_path):
    path = tmp_path / "a.sqlite"
    Ledger(path).close()
    newer = sqlite3.connect(path, isolation_level=None)
    newer.execute("UPDATE book SET format = format + 1")
    newer.close()
    errors = []  # with their tracebacks, which would keep what they can reach
    for read_only in (False, True):
        with pytest.raises(LedgerError, match="has format") as caught:
            Ledger(path, read_only=read_only)
        errors.append(caught.value)
    assert opened_files(path) == []


@pytest.mark.usefixtures("impatient")
def test_a_busy_book_is_a_ledger_error_that_says_to_try_again(tmp_path):
    plan = small_plan()
    path = tmp_path / "a.sqlite"
    ledger = Ledger(path)
    busy = rf"(?s){path.name}.*another process is writing; try again"
    with writing(path):
        for attempt in (
            lambda: ledger.set_limit(NAME, paper_limit()),
            lambda: ledger.open_session(opening(dataset=NAME, plan=plan, run="r", session="s", exact_metrics=True)),
            lambda: Ledger(path),
        ):
            with pytest.raises(LedgerError, match=busy):
                attempt()
        assert ledger.datasets() == []  # anyone may read
        assert Ledger(path, read_only=True).datasets() == []
    charge_all(ledger, plan)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("rounds_ahead", [1, 8])
def test_a_round_that_could_not_be_written_is_charged_once_when_it_is_asked_for_again(rounds_ahead, tmp_path):
    plan = small_plan()
    path = tmp_path / "a.sqlite"
    rate = plan.embedding_dim * cell_rdp(plan.num_trials, plan.beta_16, plan.num_parties, (4.0,))[0]
    ledger = Ledger(path)
    ledger.set_limit(NAME, paper_limit(epsilon_at(1.5 * rate, DELTA, 4.0)))  # each row once, and not twice
    session = ledger.open_session(
        opening(dataset=NAME, plan=plan, run="r", session="s", exact_metrics=True, rounds_ahead=rounds_ahead)
    )
    with writing(path):
        for _ in range(3):
            with pytest.raises(LedgerError, match="try again"):
                charge(session, plan, 0)
    for number in range(plan.schedule.rounds_per_pass(JOINT)):
        charge(session, plan, number)
    session.close()
    assert Ledger(path).sessions(NAME)[0].charged_until == plan.schedule.rounds_per_pass(JOINT)


@pytest.mark.usefixtures("impatient")
def test_rounds_that_could_not_be_given_back_stay_charged_and_the_book_is_free_again(tmp_path):
    plan = small_plan()
    path = tmp_path / "a.sqlite"
    ledger = Ledger(path)
    session = ledger.open_session(
        opening(dataset=NAME, plan=plan, run="r", session="s", exact_metrics=True, rounds_ahead=8)
    )
    charge(session, plan, 0)
    with writing(path), pytest.raises(LedgerError, match="try again"):
        session.close()
    session.close()  # again: nothing more to do
    for number in (1, 8):
        with pytest.raises(LedgerError, match=f"round={number} comes after the session was closed"):
            charge(session, plan, number)
    with pytest.raises(LedgerError, match="open it again"):
        ledger.datasets()
    assert Ledger(path).sessions(NAME)[0].charged_until == 8
    charge_all(Ledger(path), plan, run="2")
