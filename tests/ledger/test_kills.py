"""What survives a killed process: a round is on disk before its bytes leave, in copies and forks too."""

from __future__ import annotations

import os
import shutil
import sqlite3
from functools import partial

import numpy as np
import pytest

from pbmvfl.errors import LedgerError
from pbmvfl.federation.federation import Federation
from pbmvfl.federation.party_setup import ROUNDS_AHEAD
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import epsilon_at
from pbmvfl.ledger.spending import spending
from pbmvfl.privacy.renyi import cell_rdp
from pbmvfl.wire.messages import MessageKind
from support.ledger_books import (
    DELTA,
    NAME,
    charge,
    charge_all,
    kill_after,
    on_disk,
    opening,
    paper_limit,
    release_until_killed,
    small_plan,
)


def test_a_charge_is_on_disk_when_it_returns(tmp_path):
    """Another process's view, through its own connection, without the first one closing anything."""
    plan = small_plan()
    session = Ledger(tmp_path / "a.sqlite").open_session(
        opening(dataset=NAME, plan=plan, run="r", session="s", exact_metrics=True)
    )
    for number in range(3):
        charge(session, plan, number)
        other = sqlite3.connect(tmp_path / "a.sqlite")
        assert other.execute("SELECT charged_until FROM charged").fetchone() == (number + 1,)
        other.close()
    session.close()


def test_rounds_charged_ahead_are_given_back_at_a_clean_end_only(tmp_path):
    plan = small_plan()
    ledger = Ledger(tmp_path / "a.sqlite", durable=True)
    session = ledger.open_session(
        opening(dataset=NAME, plan=plan, run="r", session="s", exact_metrics=True, rounds_ahead=8)
    )
    charge(session, plan, 0)
    assert Ledger(tmp_path / "a.sqlite").sessions(NAME)[0].charged_until == 8  # what a killed process would leave
    charge(session, plan, 1)
    session.close()
    assert Ledger(tmp_path / "a.sqlite").sessions(NAME)[0].charged_until == 2


# --- killed processes ---


def _train_until_killed(plan, data, folder, pipe):
    """A whole federation; every message of party 1 is reported as soon as it is on the wire."""
    federation = Federation(plan)

    def report(direction, party, message):
        if direction == "up" and party == 1 and message[5] == MessageKind.EMBEDDING:
            os.write(pipe, message[32:36])  # its round number

    federation.taps.append(report)
    federation.fit(data, ledger=folder / "ledgers", checkpoints=folder / "checkpoints")


def _charged_rounds(path, dataset):
    book = Ledger(path)
    total = sum(entry.charged_until - entry.first_round for entry in book.sessions(dataset))
    book.close()
    return total


@pytest.mark.slow
def test_fifty_killed_federations_never_leave_less_in_the_ledger_than_what_left_the_party(data, make_plan, tmp_path):
    """Every report stands for a round that left; the ledger must hold all of them, resume after resume."""
    Federation(make_plan(data, num_epochs=1)).fit(data)  # every child begins with the compiled loops loaded
    plan = make_plan(data, num_epochs=5000)
    chance = np.random.default_rng(7)
    arrived = 0
    for attempt in range(50):
        arrived += kill_after(int(chance.integers(1, 12)), lambda pipe: _train_until_killed(plan, data, tmp_path, pipe))
        charged = _charged_rounds(tmp_path / "ledgers" / "party-1.sqlite", data.name)
        assert arrived <= charged <= arrived + (attempt + 1) * ROUNDS_AHEAD  # at most one block a kill is for nothing
    assert arrived > 200  # the test saw real work


@pytest.mark.slow
def test_fifty_kills_between_charging_and_sending_leave_at_most_one_round_charged_for_nothing(tmp_path):
    plan = small_plan(num_epochs=4000, num_samples=100, batch_size=10)
    path = tmp_path / "a.sqlite"
    chance = np.random.default_rng(8)
    arrived = 0
    for attempt in range(50):
        work = partial(release_until_killed, plan, path, arrived, str(attempt))
        arrived += kill_after(int(chance.integers(0, 60)), work)
        charged = _charged_rounds(path, NAME)
        assert arrived <= charged <= arrived + attempt + 1
    assert arrived > 500


def test_a_limit_set_between_kills_stops_the_party_before_it_is_crossed(tmp_path):
    plan = small_plan(num_epochs=50)
    path = tmp_path / "a.sqlite"
    rate = plan.embedding_dim * cell_rdp(plan.num_trials, plan.beta_16, plan.num_parties, (4.0,))[0]
    charge_all(Ledger(path), plan, rounds=12)
    owner = Ledger(path)
    limit = paper_limit(epsilon_at(7.5 * rate, DELTA, 4.0))
    owner.set_limit(NAME, limit)
    first = 12
    for attempt in range(10):
        first += charge_all(Ledger(path), plan, session=str(attempt), first_round=first, rounds=9)
    assert spending(owner, NAME, limit).worst <= limit.budget
    assert spending(owner, NAME, limit).worst == pytest.approx(7 * rate, rel=1e-9)


# --- copies and forks ---


def test_a_copy_of_the_file_alone_knows_of_the_session_that_was_open(tmp_path):
    plan = small_plan()
    opened = Ledger(tmp_path / "a.sqlite").open_session(
        opening(dataset=NAME, plan=plan, run="run", session="s", exact_metrics=True)
    )
    shutil.copy(tmp_path / "a.sqlite", tmp_path / "copy.sqlite")  # as after kill -9, without the log beside it
    opened.close()
    assert [entry.run for entry in Ledger(tmp_path / "copy.sqlite").sessions(NAME)] == ["run"]


@pytest.mark.parametrize("may_write", [True, False])
def test_rounds_in_a_log_without_an_index_are_never_overlooked(may_write, monkeypatch, tmp_path):
    """As in a copy of a killed party's book without its third file."""
    plan = small_plan(num_epochs=4000)
    path = tmp_path / "a.sqlite"
    sent = kill_after(3, partial(release_until_killed, plan, path, 0, "s"))
    (tmp_path / "a.sqlite-shm").unlink()
    monkeypatch.setattr(os, "access", lambda *_: may_write)
    if may_write:
        assert Ledger(path, read_only=True).sessions(NAME)[0].charged_until >= sent
        return
    before = on_disk(tmp_path)
    with pytest.raises(LedgerError, match=r"a\.sqlite-wal.*let its owner open it once"):
        Ledger(path, read_only=True)
    assert on_disk(tmp_path) == before


def test_a_forked_copy_of_a_session_neither_charges_nor_gives_back(tmp_path):
    plan = small_plan()
    opened = Ledger(tmp_path / "a.sqlite").open_session(
        opening(dataset=NAME, plan=plan, run="run", session="s", rounds_ahead=len(plan.schedule))
    )
    charge(opened, plan, 0)
    child = os.fork()
    if child == 0:
        try:
            charge(opened, plan, 1)
        except LedgerError:
            opened.close()
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for number in range(1, 3):
        charge(opened, plan, number)
    opened.close()
    (entry,) = Ledger(tmp_path / "a.sqlite").sessions(NAME)
    assert entry.charged_until == 3
