"""The ledger: what it counts, what it refuses, and what survives a killed process."""

import contextlib
import json
import os
import shutil
import signal
import sqlite3
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.errors import BudgetExceeded, LedgerError, PlanError
from pbmvfl.federation import Federation
from pbmvfl.ledger import file as ledger_file
from pbmvfl.ledger.charging import LedgerSession
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit, divergence_budget, epsilon_at
from pbmvfl.ledger.spending import fixed_plan_epsilon, spending
from pbmvfl.plan import Plan
from pbmvfl.privacy.accounting import rdp_curve
from pbmvfl.privacy.rdp import cell_rdp
from pbmvfl.privacy.table import training_run
from pbmvfl.privacy.units import SERVER, Accounting, Unit
from pbmvfl.schedule import Schedule
from pbmvfl.transport.links import ROUNDS_AHEAD
from pbmvfl.wire.messages import MessageKind

DELTA = 1e-5
NAME = "people"


def small_plan(**choices):
    sizes = {"num_parties": 3, "num_samples": 23, "num_classes": 2, "num_test_samples": 7, "batch_size": 5}
    return Plan.from_dict({**sizes, "num_epochs": 4, "num_trials": 2, "beta": 0.1, "embedding_dim": 2, **choices})


def paper_limit(epsilon=1000.0, **choices):
    return Limit.choose(
        **{"unit": "cell", "accounting": "paper", "epsilon": epsilon, "delta": DELTA, "order": 4.0, **choices}
    )


def charge_all(ledger, plan, *, run="run", session="s", rounds=None, first_round=0, **choices):
    """Charge rounds until the end or a refusal; the number that went through."""
    opened = ledger.open_session(dataset=NAME, plan=plan, run=run, session=session, first_round=first_round, **choices)
    schedule = Schedule(plan)
    last = len(schedule) if rounds is None else first_round + rounds
    done = 0
    try:
        for number in range(first_round, last):
            opened.charge(schedule[number])
            done += 1
    except BudgetExceeded:
        pass
    opened.close()
    return done


def test_a_whole_run_costs_what_the_account_of_its_plan_says(tmp_path):
    plan = small_plan()
    charge_all(Ledger(tmp_path / "a.sqlite"), plan)
    ledger = Ledger(tmp_path / "a.sqlite")
    for accounting in Accounting:
        for unit in Unit:
            limit = paper_limit(unit=unit, accounting=accounting)
            expected = rdp_curve(training_run(plan), unit, accounting, SERVER, orders=(limit.order,))[0]
            assert spending(ledger, NAME, limit).worst == pytest.approx(expected, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 19), st.integers(0, 19), st.sampled_from(["one", "two"])), min_size=1, max_size=5
    )
)
def test_rows_are_counted_like_a_plain_loop_over_every_release(tmp_path_factory, pieces):
    """Oracle: a dictionary, one release after the other, in plain Python."""
    plan = small_plan()
    path = tmp_path_factory.mktemp("ledger") / "a.sqlite"
    schedule = Schedule(plan)
    uses = {}
    everything, started, reached = {}, set(), {}
    for i, (anywhere, count, run) in enumerate(pieces):
        first = min(anywhere, reached.get(run, 0))  # a run goes on where it was, or before that
        last = min(first + count, plan.num_rounds)
        reached[run] = max(last, reached.get(run, 0))
        charge_all(Ledger(path), plan, run=run, session=str(i), first_round=first, rounds=max(0, last - first))
        for number in range(first, last):
            rows = schedule[number].rows.tolist()
            for row in rows:
                uses[row] = uses.get(row, 0) + 1
            everything[run] = everything.get(run, 0) + (1 if run not in started else len(rows))
            started.add(run)
    ledger = Ledger(path)
    rate = plan.embedding_dim * cell_rdp(plan.num_trials, plan.beta_16, plan.num_parties, (4.0,))[0]
    spent = spending(ledger, NAME, paper_limit())
    for row in range(plan.num_samples):
        assert spent.rows[row] == pytest.approx(rate * uses.get(row, 0), rel=1e-9)
    strict = spending(ledger, NAME, paper_limit(accounting="strict"))
    assert strict.worst == pytest.approx(rate * sum(everything.values()), rel=1e-9)


def test_the_round_that_would_cross_a_limit_is_refused_and_the_one_before_is_not(tmp_path):
    plan = small_plan()
    rate = plan.embedding_dim * cell_rdp(plan.num_trials, plan.beta_16, plan.num_parties, (4.0,))[0]
    two_epochs = epsilon_at(2 * rate * (1 + 1e-9), DELTA, 4.0)
    ledger = Ledger(tmp_path / "a.sqlite")
    ledger.set_limit(NAME, paper_limit(two_epochs))
    assert charge_all(ledger, plan) == 2 * plan.rounds_per_epoch
    ledger = Ledger(tmp_path / "a.sqlite")
    (entry,) = ledger.sessions(NAME)
    assert entry.charged_until == 2 * plan.rounds_per_epoch
    ((number, reason, _),) = ledger.refusals(entry.id)
    assert number == entry.charged_until
    assert "Nothing was sent" in reason
    # a new run on the same rows has nothing left, whatever it is called
    assert charge_all(ledger, plan, run="another") == 0


def test_another_limit_that_still_has_room_is_not_charged_for_a_refused_round(tmp_path):
    plan = small_plan()
    ledger = Ledger(tmp_path / "a.sqlite")
    rate = plan.embedding_dim * cell_rdp(plan.num_trials, plan.beta_16, plan.num_parties, (4.0,))[0]
    ledger.set_limit(NAME, paper_limit(10_000.0, accounting="strict"))
    ledger.set_limit(NAME, paper_limit(epsilon_at(rate * 1.0001, DELTA, 4.0)))
    session = ledger.open_session(dataset=NAME, plan=plan, run="r", session="s")
    schedule = Schedule(plan)
    for number in range(plan.rounds_per_epoch):
        session.charge(schedule[number])
    before = [(spent.worst, spent.rows.copy()) for *_, spent in session._accounts]
    for _ in range(3):
        with pytest.raises(BudgetExceeded):
            session.charge(schedule[plan.rounds_per_epoch])
    for (worst, rows), (*_, spent) in zip(before, session._accounts, strict=True):
        assert spent.worst == pytest.approx(worst, rel=1e-12)
        assert np.allclose(spent.rows, rows, rtol=1e-12)
    session.close()


@pytest.mark.parametrize("same_connection", [False, True], ids=["another connection", "the same connection"])
@pytest.mark.parametrize("rounds_ahead", [1, 8])
def test_a_limit_set_while_a_session_runs_holds_from_its_next_round(rounds_ahead, same_connection, tmp_path):
    plan = small_plan()
    charging = Ledger(tmp_path / "a.sqlite")
    owner = charging if same_connection else Ledger(tmp_path / "a.sqlite")
    session = charging.open_session(dataset=NAME, plan=plan, run="r", session="s", rounds_ahead=rounds_ahead)
    schedule = Schedule(plan)
    session.charge(schedule[0])
    owner.set_limit(NAME, paper_limit(epsilon_at(1e-9, DELTA, 4.0) * 1.0001))
    for _ in range(2):
        with pytest.raises(BudgetExceeded):
            session.charge(schedule[1])
    assert owner.sessions(NAME)[0].charged_until == 1  # nothing is paid for rounds that may not leave
    owner.set_limit(NAME, paper_limit(1000.0))
    session.charge(schedule[1])
    session.close()
    assert Ledger(tmp_path / "a.sqlite").sessions(NAME)[0].charged_until == 2


@pytest.mark.parametrize("changed_before", range(1, 20, 3))
def test_rounds_ahead_make_no_difference_to_where_a_limit_set_under_way_ends_a_run(changed_before, tmp_path):
    """Oracle: two epochs of uses of a row fit, counted by hand, from whichever round on the limit holds."""
    plan = small_plan()
    rate = plan.embedding_dim * cell_rdp(plan.num_trials, plan.beta_16, plan.num_parties, (4.0,))[0]
    schedule = Schedule(plan)
    ledger, owner = Ledger(tmp_path / "a.sqlite"), Ledger(tmp_path / "a.sqlite")
    session = ledger.open_session(dataset=NAME, plan=plan, run="r", session="s", rounds_ahead=8)
    uses, sent = np.zeros(plan.num_samples), 0
    with contextlib.suppress(BudgetExceeded):
        for number in range(plan.num_rounds):
            if number == changed_before:
                owner.set_limit(NAME, paper_limit(epsilon_at(2.5 * rate, DELTA, 4.0)))
            session.charge(schedule[number])
            uses[schedule[number].rows] += 1
            sent += 1
    session.close()
    assert sent == max(2 * plan.rounds_per_epoch, changed_before)
    assert Ledger(tmp_path / "a.sqlite").sessions(NAME)[0].charged_until == sent
    assert np.allclose(spending(owner, NAME, paper_limit()).rows[: plan.num_samples], rate * uses, rtol=1e-9)


def test_a_limit_that_was_announced_and_never_set_changes_nothing_and_hides_no_later_one(tmp_path, monkeypatch):
    """As if the owner's process had been killed just before its transaction ended."""
    plan = small_plan()
    schedule = Schedule(plan)
    ledger, owner = Ledger(tmp_path / "a.sqlite"), Ledger(tmp_path / "a.sqlite")
    session = ledger.open_session(dataset=NAME, plan=plan, run="r", session="s", rounds_ahead=8)
    session.charge(schedule[0])
    with monkeypatch.context() as killed:
        killed.setattr(os, "close", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            owner.set_limit(NAME, paper_limit(4.0))
    session.charge(schedule[1])
    assert owner.sessions(NAME)[0].charged_until == 8
    owner.set_limit(NAME, paper_limit(epsilon_at(1e-9, DELTA, 4.0) * 1.0001))
    with pytest.raises(BudgetExceeded):
        session.charge(schedule[2])
    session.close()


@pytest.mark.parametrize("rounds_ahead", [1, 8])
def test_asking_for_an_earlier_round_again_uncharges_nothing(rounds_ahead, tmp_path):
    plan = small_plan()
    schedule = Schedule(plan)
    ledger = Ledger(tmp_path / "a.sqlite")
    session = ledger.open_session(dataset=NAME, plan=plan, run="r", session="s", rounds_ahead=rounds_ahead)
    for number in [*range(6), 1]:
        session.charge(schedule[number])
    session.close()
    assert Ledger(tmp_path / "a.sqlite").sessions(NAME)[0].charged_until == 6


def test_a_round_that_may_have_left_stays_charged_when_a_limit_changes(tmp_path):
    plan = small_plan()
    schedule = Schedule(plan)
    ledger, owner = Ledger(tmp_path / "a.sqlite"), Ledger(tmp_path / "a.sqlite")
    session = ledger.open_session(dataset=NAME, plan=plan, run="r", session="s", rounds_ahead=8)
    for number in range(3):
        session.charge(schedule[number])
    owner.set_limit(NAME, paper_limit(epsilon_at(1e-9, DELTA, 4.0) * 1.0001))
    session.charge(schedule[2])  # its bytes exist already: the same ones are sent again
    with pytest.raises(BudgetExceeded):
        session.charge(schedule[3])
    session.close()
    assert Ledger(tmp_path / "a.sqlite").sessions(NAME)[0].charged_until == 3


def test_a_round_before_the_session_s_first_is_refused(tmp_path):
    plan = small_plan()
    schedule = Schedule(plan)
    charge_all(Ledger(tmp_path / "a.sqlite"), plan, rounds=8)
    session = Ledger(tmp_path / "a.sqlite").open_session(dataset=NAME, plan=plan, run="run", session="t", first_round=5)
    with pytest.raises(LedgerError, match=f"round=4 .* permitted: 5, .* to {len(schedule) - 1}"):
        session.charge(schedule[4])
    session.charge(schedule[5])
    session.close()


@pytest.mark.parametrize("rounds_ahead", [1, 8])
def test_rounds_that_were_left_out_are_charged_and_counted_against_the_limit(rounds_ahead, tmp_path):
    """The book has one number for a session's rounds, so that leaving some out buys nothing."""
    plan = small_plan()
    rate = plan.embedding_dim * cell_rdp(plan.num_trials, plan.beta_16, plan.num_parties, (4.0,))[0]
    schedule = Schedule(plan)
    ledger = Ledger(tmp_path / "a.sqlite")
    ledger.set_limit(NAME, paper_limit(epsilon_at(2.5 * rate, DELTA, 4.0)))
    session = ledger.open_session(dataset=NAME, plan=plan, run="r", session="s", rounds_ahead=rounds_ahead)
    session.charge(schedule[0])
    with pytest.raises(BudgetExceeded):
        session.charge(schedule[3 * plan.rounds_per_epoch])
    session.charge(schedule[2 * plan.rounds_per_epoch - 1])
    session.charge(schedule[1])
    session.close()
    assert Ledger(tmp_path / "a.sqlite").sessions(NAME)[0].charged_until == 2 * plan.rounds_per_epoch


@pytest.mark.parametrize("rounds_ahead", [0, -8])
def test_charging_no_round_at_a_time_is_refused(rounds_ahead, tmp_path):
    ledger = Ledger(tmp_path / "a.sqlite")
    with pytest.raises(LedgerError, match=f"rounds_ahead={rounds_ahead}; permitted: 1 or more"):
        ledger.open_session(dataset=NAME, plan=small_plan(), run="r", session="s", rounds_ahead=rounds_ahead)


def test_mechanisms_without_privacy_are_refused_by_any_limit(tmp_path):
    ledger = Ledger(tmp_path / "a.sqlite")
    ledger.set_limit(NAME, paper_limit(1e6))
    assert charge_all(ledger, small_plan(mechanism="none")) == 0


def test_changed_values_keep_what_was_spent_and_are_noticed(tmp_path):
    plan = small_plan()
    charge_all(Ledger(tmp_path / "a.sqlite"), plan, fingerprint="before")
    ledger = Ledger(tmp_path / "a.sqlite")
    before = spending(ledger, NAME, paper_limit()).worst
    session = ledger.open_session(dataset=NAME, plan=plan, run="2", session="t", fingerprint="after")
    assert any("other values" in note for note in session.notes)
    session.close()
    assert spending(Ledger(tmp_path / "a.sqlite"), NAME, paper_limit()).worst == before > 0


def test_rows_are_known_by_their_owners_ids_and_not_by_their_position(tmp_path):
    plan = small_plan(num_epochs=1, num_samples=4, batch_size=2, num_test_samples=0)
    path = tmp_path / "a.sqlite"
    charge_all(Ledger(path), plan, run="1", train_ids=["ann", "bob", "cat", "dan"], test_ids=[])
    charge_all(Ledger(path), plan, run="2", train_ids=["dan", "eve", "fay", "ann"], test_ids=[])
    spent = spending(Ledger(path), NAME, paper_limit())
    rate = plan.embedding_dim * cell_rdp(plan.num_trials, plan.beta_16, plan.num_parties, (4.0,))[0]
    assert sorted(np.round(spent.rows / rate).tolist()) == [1, 1, 1, 1, 2, 2]


def test_row_ids_must_differ_and_fit_the_plan(tmp_path):
    plan = small_plan(num_samples=2, num_test_samples=0)
    ledger = Ledger(tmp_path / "a.sqlite")
    with pytest.raises(LedgerError, match="different"):
        ledger.open_session(dataset=NAME, plan=plan, run="r", session="s", train_ids=["a", "a"], test_ids=[])
    with pytest.raises(LedgerError, match="has 1 rows, the plan has 2"):
        Ledger(tmp_path / "b.sqlite").open_session(
            dataset=NAME, plan=plan, run="r", session="s", train_ids=["a"], test_ids=[]
        )


# --- a run that goes on ---


@pytest.mark.parametrize(
    "mistake", ["new book", "another run's book", "another dataset's", "an earlier copy", "a session without a round"]
)
def test_a_run_that_goes_on_is_refused_by_a_book_without_its_earlier_rounds(mistake, tmp_path):
    plan = small_plan()
    path = tmp_path / "a.sqlite"
    if mistake == "another run's book":
        charge_all(Ledger(path), plan, run="other")
    elif mistake == "another dataset's":
        session = Ledger(path).open_session(dataset="places", plan=plan, run="run", session="s")
        for number in range(9):
            session.charge(Schedule(plan)[number])
        session.close()
    elif mistake == "an earlier copy":
        charge_all(Ledger(path), plan, rounds=4)
    elif mistake == "a session without a round":
        charge_all(Ledger(path), plan, rounds=0)
    before = Ledger(path).export()
    with pytest.raises(LedgerError, match=r"(?s)a\.sqlite.*run='run'.*round=5.*too small.*or start a new run"):
        charge_all(Ledger(path), plan, session="t", first_round=5)
    assert Ledger(path).export() == before
    charge_all(Ledger(path), plan, run="a new run")  # the refusal keeps nobody out


@pytest.mark.parametrize("first_round", [0, 3, 5])
def test_a_run_may_go_on_at_or_before_its_last_charged_round(first_round, tmp_path):
    plan = small_plan()
    charge_all(Ledger(tmp_path / "a.sqlite"), plan, rounds=5)
    charge_all(Ledger(tmp_path / "a.sqlite"), plan, session="t", first_round=first_round)
    entries = Ledger(tmp_path / "a.sqlite").sessions(NAME)
    assert [(entry.first_round, entry.charged_until) for entry in entries] == [
        (0, 5),
        (first_round, len(Schedule(plan))),
    ]


# --- locks and errors ---


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


def test_a_session_that_could_not_be_opened_keeps_nobody_out(tmp_path, monkeypatch):
    plan = small_plan(num_samples=2, num_test_samples=0)
    ledger = Ledger(tmp_path / "a.sqlite")
    with pytest.raises(LedgerError, match="different"):
        ledger.open_session(dataset=NAME, plan=plan, run="r", session="s", train_ids=["a", "a"], test_ids=[])
    with monkeypatch.context() as broken:
        broken.setattr(LedgerSession, "_load_limits", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ledger.open_session(dataset=NAME, plan=plan, run="r", session="s")
    charge_all(Ledger(tmp_path / "a.sqlite"), plan)
    assert charge_all(ledger, plan, run="2") == len(Schedule(plan))


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
            lambda: ledger.open_session(dataset=NAME, plan=plan, run="r", session="s"),
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
    session = ledger.open_session(dataset=NAME, plan=plan, run="r", session="s", rounds_ahead=rounds_ahead)
    schedule = Schedule(plan)
    with writing(path):
        for _ in range(3):
            with pytest.raises(LedgerError, match="try again"):
                session.charge(schedule[0])
    for number in range(plan.rounds_per_epoch):
        session.charge(schedule[number])
    session.close()
    assert Ledger(path).sessions(NAME)[0].charged_until == plan.rounds_per_epoch


@pytest.mark.usefixtures("impatient")
def test_rounds_that_could_not_be_given_back_stay_charged_and_the_book_is_free_again(tmp_path):
    plan = small_plan()
    path = tmp_path / "a.sqlite"
    session = Ledger(path).open_session(dataset=NAME, plan=plan, run="r", session="s", rounds_ahead=8)
    session.charge(Schedule(plan)[0])
    with writing(path), pytest.raises(LedgerError, match="try again"):
        session.close()
    session.close()  # again: nothing more to do
    for number in (1, 8):
        with pytest.raises(LedgerError, match=f"round={number} comes after the session was closed"):
            session.charge(Schedule(plan)[number])
    with pytest.raises(LedgerError, match="open it again"):
        session._ledger.datasets()
    assert Ledger(path).sessions(NAME)[0].charged_until == 8
    charge_all(Ledger(path), plan, run="2")


def test_a_folder_where_a_file_belongs_and_a_file_where_a_folder_belongs_are_refused(data, make_plan, tmp_path):
    for read_only in (False, True):
        with pytest.raises(LedgerError, match=r"is a folder; permitted: a file, such as .*party-0\.sqlite"):
            Ledger(tmp_path, read_only=read_only)
    file = tmp_path / "books"
    file.write_text("mine")
    with pytest.raises(LedgerError, match=r"books.*permitted: a file in a folder"):
        Ledger(file / "party-0.sqlite")
    with pytest.raises(LedgerError, match="books"):
        Federation(make_plan(data)).fit(data, ledger=file)
    assert file.read_text() == "mine"


def test_only_one_session_at_a_time_may_charge_a_book(tmp_path):
    plan = small_plan()
    session = Ledger(tmp_path / "a.sqlite").open_session(dataset=NAME, plan=plan, run="r", session="s")
    with pytest.raises(LedgerError, match="another session"):
        Ledger(tmp_path / "a.sqlite").open_session(dataset=NAME, plan=plan, run="r", session="t")
    session.close()
    charge_all(Ledger(tmp_path / "a.sqlite"), plan)


def test_rounds_charged_ahead_are_given_back_at_a_clean_end_only(tmp_path):
    plan = small_plan()
    schedule = Schedule(plan)
    ledger = Ledger(tmp_path / "a.sqlite", durable=True)
    session = ledger.open_session(dataset=NAME, plan=plan, run="r", session="s", rounds_ahead=8)
    session.charge(schedule[0])
    assert Ledger(tmp_path / "a.sqlite").sessions(NAME)[0].charged_until == 8  # what a killed process would leave
    session.charge(schedule[1])
    session.close()
    assert Ledger(tmp_path / "a.sqlite").sessions(NAME)[0].charged_until == 2


def test_a_block_that_does_not_fit_is_charged_round_by_round_up_to_the_limit(tmp_path):
    plan = small_plan()
    rate = plan.embedding_dim * cell_rdp(plan.num_trials, plan.beta_16, plan.num_parties, (4.0,))[0]
    counts = []
    for ahead in (1, 8):
        ledger = Ledger(tmp_path / f"{ahead}.sqlite")
        ledger.set_limit(NAME, paper_limit(epsilon_at(2.5 * rate, DELTA, 4.0)))
        counts.append(charge_all(ledger, plan, rounds_ahead=ahead))
    assert counts[0] == counts[1] == 2 * plan.rounds_per_epoch


@given(st.floats(1.05, 500), st.floats(0.01, 1e4), st.floats(1e-12, 0.1))
def test_the_budget_of_a_limit_is_the_inverse_of_the_conversion(order, divergence, delta):
    epsilon = epsilon_at(divergence, delta, order)
    if epsilon > 0:
        assert divergence_budget(epsilon, delta, order) == pytest.approx(divergence, rel=1e-6, abs=1e-6)


def test_a_fixed_order_never_shows_less_than_the_best_order_chosen_afterwards(tmp_path):
    path = tmp_path / "a.sqlite"
    charge_all(Ledger(path), small_plan())
    ledger = Ledger(path)
    for epsilon in (1.0, 8.0, 50.0):
        limit = Limit.choose(unit="cell", accounting="paper", epsilon=epsilon, delta=DELTA)
        fixed = epsilon_at(spending(ledger, NAME, limit).worst, DELTA, limit.order)
        best = fixed_plan_epsilon(
            ledger, NAME, unit=Unit.CELL, accounting=Accounting.PAPER, colluding_parties=0, delta=DELTA
        )
        assert best <= fixed * 1.02 + 0.05  # the best order is looked for on a coarser grid


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"epsilon": 0}, "epsilon=0"),
        ({"epsilon": float("inf")}, "epsilon=inf"),
        ({"delta": 0}, "delta=0"),
        ({"delta": 1.0}, "delta=1.0"),
        ({"unit": "row"}, "unit='row'"),
        ({"accounting": "loose"}, "accounting='loose'"),
        ({"colluding_parties": -1}, "colluding_parties=-1"),
        ({"order": 1.0}, "order=1.0; permitted: a finite number above 1"),
        ({"order": float("inf")}, "order=inf; permitted: a finite number above 1"),
        ({"order": float("nan")}, "order=nan; permitted: a finite number above 1"),
        ({"epsilon": 1e-9, "order": None}, "leaves no room"),
    ],
)
def test_a_bad_limit_is_refused_by_name(bad, message):
    with pytest.raises(PlanError, match=message):
        paper_limit(**bad)


def test_a_file_that_is_no_ledger_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "a.sqlite"
    path.write_bytes(b"not a database, but a long enough text to look at" * 40)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="cannot be read as a ledger"):
        Ledger(path)
    assert path.read_bytes() == before


# --- reading changes nothing ---


def book_with_limit(path, epsilon):
    book = Ledger(path)
    book.set_limit(NAME, paper_limit(epsilon))
    book.close()


def on_disk(folder):
    """Every byte, but for the memory that readers and a writer of this process share while a book is open."""
    return {file.name: b"" if file.name.endswith("-shm") else file.read_bytes() for file in folder.iterdir()}


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


@pytest.mark.parametrize("state", ["closed", "being charged", "killed"])
def test_a_book_is_read_without_a_trace(state, tmp_path):
    plan = small_plan(num_epochs=4000)
    path = tmp_path / "a.sqlite"
    book_with_limit(path, 1e6)
    if state == "killed":
        sent = _kill_after(3, partial(_release_until_killed, plan, path, 0, "s"))
    else:
        session = Ledger(path).open_session(dataset=NAME, plan=plan, run="run", session="s")
        for number in range(3):
            session.charge(Schedule(plan)[number])
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
        lambda: book.open_session(dataset=NAME, plan=plan, run="other", session="t"),
    ):
        with pytest.raises(LedgerError, match="read_only=True"):
            change()
    book.close()
    assert on_disk(tmp_path) == before


def test_a_reader_sees_the_rounds_of_a_run_under_way(tmp_path):
    plan = small_plan()
    session = Ledger(tmp_path / "a.sqlite").open_session(dataset=NAME, plan=plan, run="r", session="s")
    reader = Ledger(tmp_path / "a.sqlite", read_only=True)
    for number in range(3):
        session.charge(Schedule(plan)[number])
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


@pytest.mark.parametrize("may_write", [True, False])
def test_rounds_in_a_log_without_an_index_are_never_overlooked(may_write, monkeypatch, tmp_path):
    """As in a copy of a killed party's book without its third file."""
    plan = small_plan(num_epochs=4000)
    path = tmp_path / "a.sqlite"
    sent = _kill_after(3, partial(_release_until_killed, plan, path, 0, "s"))
    (tmp_path / "a.sqlite-shm").unlink()
    monkeypatch.setattr(os, "access", lambda *_: may_write)
    if may_write:
        assert Ledger(path, read_only=True).sessions(NAME)[0].charged_until >= sent
        return
    before = on_disk(tmp_path)
    with pytest.raises(LedgerError, match=r"a\.sqlite-wal.*let its owner open it once"):
        Ledger(path, read_only=True)
    assert on_disk(tmp_path) == before


def test_a_book_that_changes_while_it_is_copied_is_read_again(monkeypatch, tmp_path):
    """Between the two looks at the file another process writes to it and closes it, once."""
    path = tmp_path / "a.sqlite"
    book_with_limit(path, 50.0)
    whole, calls = ledger_file._connect, []

    def slow(path, how):
        connection = whole(path, how)
        if not calls:
            owner = Ledger.__new__(Ledger)  # without the look that this function is part of
            owner.path, owner._read_only, owner._db = path, False, ledger_file.open_for_writing(path)
            owner.set_limit(NAME, paper_limit(60.0))
            owner.close()
        calls.append(how)
        return connection

    monkeypatch.setattr(ledger_file, "_connect", slow)
    assert [limit.epsilon for limit in Ledger(path, read_only=True).limits(NAME)] == [60.0]
    assert len(calls) == 2


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


def test_a_book_to_read_must_exist(tmp_path):
    with pytest.raises(LedgerError, match="does not exist"):
        Ledger(tmp_path / "books" / "a.sqlite", read_only=True)
    assert on_disk(tmp_path) == {}


def test_removing_a_limit_that_is_not_there_changes_nothing(tmp_path):
    ledger = Ledger(tmp_path / "a.sqlite")
    ledger.set_limit(NAME, paper_limit())
    before = ledger._versioned_limits(NAME)
    with pytest.raises(LedgerError, match="has no limit for unit=party"):
        ledger.remove_limit(NAME, Unit.PARTY, Accounting.PAPER, 0)
    assert ledger._versioned_limits(NAME) == before


def test_a_million_row_uses_take_less_than_a_megabyte(tmp_path):
    plan = small_plan(num_samples=10_000, batch_size=100, num_epochs=100)  # 10^6 row uses in 10^4 rounds
    charge_all(Ledger(tmp_path / "a.sqlite"), plan)
    Ledger(tmp_path / "a.sqlite").close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1_000_000


def test_the_export_is_plain_json_with_everything_in_it(tmp_path):
    plan = small_plan()
    ledger = Ledger(tmp_path / "a.sqlite")
    ledger.set_limit(NAME, paper_limit())
    charge_all(ledger, plan)
    book = json.loads(json.dumps(Ledger(tmp_path / "a.sqlite").export()))
    (session,) = book["datasets"][NAME]["sessions"]
    assert session["row_releases"] == plan.num_samples * plan.num_epochs
    assert Plan.from_dict(session["plan"]) == plan
    assert book["datasets"][NAME]["limits"][0]["spent_epsilon"] > 0
    assert book["datasets"][NAME]["notes"] == []


# --- in a federation ---


def test_training_stops_cleanly_at_a_limit_and_keeps_what_it_has(data, make_plan, tmp_path):
    plan = make_plan(data, num_epochs=6)
    rate = plan.embedding_dim * cell_rdp(plan.num_trials, plan.beta_16, plan.num_parties, (4.0,))[0]
    stingy = Ledger(tmp_path / "ledgers" / "party-1.sqlite")
    stingy.set_limit(data.name, paper_limit(epsilon_at(2.5 * rate, DELTA, 4.0)))
    stingy.close()
    result = Federation(plan).fit(data, ledger=tmp_path / "ledgers", checkpoints=tmp_path / "checkpoints")
    assert "its owner's limit" in result.stopped
    assert [line["epoch"] for line in result.history] == [1, 2]
    assert "test_accuracy" in result.metrics
    assert result.row_uses["train"] == 3  # the refused round may have left the others
    spent = spending(Ledger(tmp_path / "ledgers" / "party-1.sqlite"), data.name, paper_limit())
    assert spent.worst == pytest.approx(2 * rate, rel=1e-9)
    for other in (0, 2):
        entry = Ledger(tmp_path / "ledgers" / f"party-{other}.sqlite").sessions(data.name)[0]
        assert entry.charged_until == 2 * plan.rounds_per_epoch + 1  # blocks that were not used up are given back


def test_a_limit_set_while_a_federation_trains_lets_no_further_round_leave(data, make_plan, tmp_path):
    """Oracle: what is on the wire. The limit is set when party 1's third embedding has been seen there."""
    plan = make_plan(data, num_epochs=6)
    federation = Federation(plan)
    left = []

    def owner(direction, party, message):
        if direction == "up" and party == 1 and message[5] == MessageKind.EMBEDDING:
            left.append(int.from_bytes(message[32:36], "little"))
            if len(left) == 3:
                book = Ledger(tmp_path / "party-1.sqlite", must_exist=True)
                book.set_limit(data.name, paper_limit(epsilon_at(1e-9, DELTA, 4.0) * 1.0001))
                book.close()

    federation._taps.append(owner)
    result = federation.fit(data, ledger=tmp_path)
    assert "its owner's limit" in result.stopped
    assert left == [0, 1, 2]
    assert Ledger(tmp_path / "party-1.sqlite").sessions(data.name)[0].charged_until == 3


# --- killed processes ---


def _train_until_killed(plan, data, folder, pipe):
    """A whole federation; every message of party 1 is reported as soon as it is on the wire."""
    federation = Federation(plan)

    def report(direction, party, message):
        if direction == "up" and party == 1 and message[5] == MessageKind.EMBEDDING:
            os.write(pipe, message[32:36])  # its round number

    federation._taps.append(report)
    federation.fit(data, ledger=folder / "ledgers", checkpoints=folder / "checkpoints")


def _release_until_killed(plan, path, first, session, pipe):
    """A party reduced to its ledger, as fast as it can: charge a round, then let its bytes leave."""
    opened = Ledger(path).open_session(dataset=NAME, plan=plan, run="run", session=session, first_round=first)
    schedule = Schedule(plan)
    for number in range(first, len(schedule)):
        opened.charge(schedule[number])
        os.write(pipe, number.to_bytes(4, "little"))


def _kill_after(reports, work):
    """Run `work` in a child, wait for so many reports, strike at whatever point it has reached; what had left it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with contextlib.suppress(BaseException):
            work(writing)
        os._exit(1)
    os.close(writing)
    received = b""
    while len(received) < 4 * reports:
        part = os.read(reading, 4 * reports - len(received))
        assert part, "the child ended by itself"
        received += part
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    while part := os.read(reading, 65536):
        received += part
    os.close(reading)
    return len(received) // 4


def _charged_rounds(path, dataset):
    book = Ledger(path)
    total = sum(entry.charged_until - entry.first_round for entry in book.sessions(dataset))
    book.close()
    return total


def test_fifty_killed_federations_never_leave_less_in_the_ledger_than_what_left_the_party(data, make_plan, tmp_path):
    """Every report stands for a round that left; the ledger must hold all of them, resume after resume."""
    plan = make_plan(data, num_epochs=5000)
    chance = np.random.default_rng(7)
    arrived = 0
    for attempt in range(50):
        arrived += _kill_after(
            int(chance.integers(1, 12)), lambda pipe: _train_until_killed(plan, data, tmp_path, pipe)
        )
        charged = _charged_rounds(tmp_path / "ledgers" / "party-1.sqlite", data.name)
        assert arrived <= charged <= arrived + (attempt + 1) * ROUNDS_AHEAD  # at most one block a kill is for nothing
    assert arrived > 200  # the test saw real work


def test_fifty_kills_between_charging_and_sending_leave_at_most_one_round_charged_for_nothing(tmp_path):
    plan = small_plan(num_epochs=4000, num_samples=100, batch_size=10)
    path = tmp_path / "a.sqlite"
    chance = np.random.default_rng(8)
    arrived = 0
    for attempt in range(50):
        work = partial(_release_until_killed, plan, path, arrived, str(attempt))
        arrived += _kill_after(int(chance.integers(0, 60)), work)
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


def test_a_charge_is_on_disk_when_it_returns(tmp_path):
    """Another process's view, through its own connection, without the first one closing anything."""
    plan = small_plan()
    session = Ledger(tmp_path / "a.sqlite").open_session(dataset=NAME, plan=plan, run="r", session="s")
    schedule = Schedule(plan)
    for number in range(3):
        session.charge(schedule[number])
        other = sqlite3.connect(tmp_path / "a.sqlite")
        assert other.execute("SELECT charged_until FROM charged").fetchone() == (number + 1,)
        other.close()
    session.close()


# --- copies, other names and forks ---


def test_a_copy_of_the_file_alone_knows_of_the_session_that_was_open(tmp_path):
    plan = small_plan()
    opened = Ledger(tmp_path / "a.sqlite").open_session(dataset=NAME, plan=plan, run="run", session="s")
    shutil.copy(tmp_path / "a.sqlite", tmp_path / "copy.sqlite")  # as after kill -9, without the log beside it
    opened.close()
    assert [entry.run for entry in Ledger(tmp_path / "copy.sqlite").sessions(NAME)] == ["run"]


def test_one_book_under_two_names_has_one_session_at_a_time(tmp_path):
    plan = small_plan()
    opened = Ledger(tmp_path / "a.sqlite").open_session(dataset=NAME, plan=plan, run="run", session="s")
    (tmp_path / "alias.sqlite").symlink_to(tmp_path / "a.sqlite")
    with pytest.raises(LedgerError, match="being charged by another session"):
        Ledger(tmp_path / "alias.sqlite").open_session(dataset=NAME, plan=plan, run="other", session="t")
    opened.close()


def test_a_forked_copy_of_a_session_neither_charges_nor_gives_back(tmp_path):
    plan = small_plan()
    opened = Ledger(tmp_path / "a.sqlite").open_session(
        dataset=NAME, plan=plan, run="run", session="s", rounds_ahead=plan.num_rounds
    )
    schedule = Schedule(plan)
    opened.charge(schedule[0])
    child = os.fork()
    if child == 0:
        try:
            opened.charge(schedule[1])
        except LedgerError:
            opened.close()
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for number in range(1, 3):
        opened.charge(schedule[number])
    opened.close()
    (entry,) = Ledger(tmp_path / "a.sqlite").sessions(NAME)
    assert entry.charged_until == 3


def test_a_limit_that_replaces_another_keeps_its_order_once_there_were_releases(tmp_path):
    ledger = Ledger(tmp_path / "a.sqlite")
    assert ledger.set_limit(NAME, paper_limit(order=4.0)).order == 4.0
    assert ledger.set_limit(NAME, paper_limit(order=8.0)).order == 8.0  # nothing was seen yet
    charge_all(ledger, small_plan(), rounds=1)
    ledger = Ledger(tmp_path / "a.sqlite")
    held = ledger.set_limit(NAME, paper_limit(2000.0, order=16.0))
    assert (held.order, held.epsilon) == (8.0, 2000.0)
    assert ledger.limits(NAME) == [held]
