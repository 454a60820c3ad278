"""The limits of a ledger: which round they refuse, and when a new one holds."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbmvfl.errors import BudgetExceeded, LedgerError, PlanError
from pbmvfl.federation.federation import Federation
from pbmvfl.ledger import store as ledger_store
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit, divergence_budget, epsilon_at
from pbmvfl.ledger.spending import fixed_plan_epsilon, spending
from pbmvfl.plan.round_kinds import JOINT
from pbmvfl.privacy.renyi import cell_rdp
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.wire.messages import MessageKind
from support.federation_runs import make_ledgers
from support.ledger_books import DELTA, NAME, charge, charge_all, opening, paper_limit, small_plan, store_of


def test_the_round_that_would_cross_a_limit_is_refused_and_the_one_before_is_not(tmp_path):
    plan = small_plan()
    rate = plan.embedding_dim * cell_rdp(plan.num_trials, plan.beta_16, plan.num_parties, (4.0,))[0]
    two_epochs = epsilon_at(2 * rate * (1 + 1e-9), DELTA, 4.0)
    ledger = Ledger(tmp_path / "a.sqlite")
    ledger.set_limit(NAME, paper_limit(two_epochs))
    assert charge_all(ledger, plan) == 2 * plan.schedule.rounds_per_pass(JOINT)
    ledger = Ledger(tmp_path / "a.sqlite")
    (entry,) = ledger.sessions(NAME)
    assert entry.charged_until == 2 * plan.schedule.rounds_per_pass(JOINT)
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
    session = ledger.open_session(opening(dataset=NAME, plan=plan, run="r", session="s", exact_metrics=True))
    for number in range(plan.schedule.rounds_per_pass(JOINT)):
        charge(session, plan, number)

    def accounts():
        return [spent for *_, spent in session._accounts]

    before = [(spent.worst, spent.rows.copy()) for spent in accounts()]
    for _ in range(3):
        with pytest.raises(BudgetExceeded):
            charge(session, plan, plan.schedule.rounds_per_pass(JOINT))
    for (worst, rows), spent in zip(before, accounts(), strict=True):
        assert spent.worst == pytest.approx(worst, rel=1e-12)
        assert np.allclose(spent.rows, rows, rtol=1e-12)
    session.close()


@pytest.mark.parametrize("rounds_ahead", [1, 8])
def test_rounds_that_were_left_out_are_charged_and_counted_against_the_limit(rounds_ahead, tmp_path):
    """The book has one number for a session's rounds, so that leaving some out buys nothing."""
    plan = small_plan()
    rate = plan.embedding_dim * cell_rdp(plan.num_trials, plan.beta_16, plan.num_parties, (4.0,))[0]
    ledger = Ledger(tmp_path / "a.sqlite")
    ledger.set_limit(NAME, paper_limit(epsilon_at(2.5 * rate, DELTA, 4.0)))
    session = ledger.open_session(
        opening(dataset=NAME, plan=plan, run="r", session="s", exact_metrics=True, rounds_ahead=rounds_ahead)
    )
    charge(session, plan, 0)
    with pytest.raises(BudgetExceeded):
        charge(session, plan, 3 * plan.schedule.rounds_per_pass(JOINT))
    charge(session, plan, 2 * plan.schedule.rounds_per_pass(JOINT) - 1)
    session.close()
    assert Ledger(tmp_path / "a.sqlite").sessions(NAME)[0].charged_until == 2 * plan.schedule.rounds_per_pass(JOINT)


def test_a_block_that_does_not_fit_is_charged_round_by_round_up_to_the_limit(tmp_path):
    plan = small_plan()
    rate = plan.embedding_dim * cell_rdp(plan.num_trials, plan.beta_16, plan.num_parties, (4.0,))[0]
    counts = []
    for ahead in (1, 8):
        ledger = Ledger(tmp_path / f"{ahead}.sqlite")
        ledger.set_limit(NAME, paper_limit(epsilon_at(2.5 * rate, DELTA, 4.0)))
        counts.append(charge_all(ledger, plan, rounds_ahead=ahead))
    assert counts[0] == counts[1] == 2 * plan.schedule.rounds_per_pass(JOINT)


def test_mechanisms_without_privacy_are_refused_by_any_limit(tmp_path):
    ledger = Ledger(tmp_path / "a.sqlite")
    ledger.set_limit(NAME, paper_limit(1e6))
    assert charge_all(ledger, small_plan(mechanism="none")) == 0


# --- limits set while a session runs ---


@pytest.mark.parametrize("same_connection", [False, True], ids=["another connection", "the same connection"])
@pytest.mark.parametrize("rounds_ahead", [1, 8])
def test_a_limit_set_while_a_session_runs_holds_from_its_next_round(rounds_ahead, same_connection, tmp_path):
    plan = small_plan()
    charging = Ledger(tmp_path / "a.sqlite")
    owner = charging if same_connection else Ledger(tmp_path / "a.sqlite")
    session = charging.open_session(
        opening(dataset=NAME, plan=plan, run="r", session="s", exact_metrics=True, rounds_ahead=rounds_ahead)
    )
    charge(session, plan, 0)
    owner.set_limit(NAME, paper_limit(epsilon_at(1e-9, DELTA, 4.0) * 1.0001))
    for _ in range(2):
        with pytest.raises(BudgetExceeded):
            charge(session, plan, 1)
    assert owner.sessions(NAME)[0].charged_until == 1  # nothing is paid for rounds that may not leave
    owner.set_limit(NAME, paper_limit(1000.0))
    charge(session, plan, 1)
    session.close()
    assert Ledger(tmp_path / "a.sqlite").sessions(NAME)[0].charged_until == 2


@pytest.mark.parametrize("changed_before", range(1, 20, 3))
def test_rounds_ahead_make_no_difference_to_where_a_limit_set_under_way_ends_a_run(changed_before, tmp_path):
    """Oracle: two epochs of uses of a row fit, counted by hand, from whichever round on the limit holds."""
    plan = small_plan()
    rate = plan.embedding_dim * cell_rdp(plan.num_trials, plan.beta_16, plan.num_parties, (4.0,))[0]
    schedule = plan.schedule
    ledger, owner = Ledger(tmp_path / "a.sqlite"), Ledger(tmp_path / "a.sqlite")
    session = ledger.open_session(
        opening(dataset=NAME, plan=plan, run="r", session="s", exact_metrics=True, rounds_ahead=8)
    )
    uses, sent = np.zeros(plan.num_samples), 0
    with contextlib.suppress(BudgetExceeded):
        for number in range(len(plan.schedule)):
            if number == changed_before:
                owner.set_limit(NAME, paper_limit(epsilon_at(2.5 * rate, DELTA, 4.0)))
            charge(session, plan, number)
            uses[schedule[number].rows] += 1
            sent += 1
    session.close()
    assert sent == max(2 * plan.schedule.rounds_per_pass(JOINT), changed_before)
    assert Ledger(tmp_path / "a.sqlite").sessions(NAME)[0].charged_until == sent
    assert np.allclose(spending(owner, NAME, paper_limit()).rows[: plan.num_samples], rate * uses, rtol=1e-9)


def test_a_limit_that_was_announced_and_never_set_changes_nothing_and_hides_no_later_one(tmp_path, monkeypatch):
    """As if the owner's process had been killed just before its transaction ended."""
    plan = small_plan()
    ledger, owner = Ledger(tmp_path / "a.sqlite"), Ledger(tmp_path / "a.sqlite")
    session = ledger.open_session(
        opening(dataset=NAME, plan=plan, run="r", session="s", exact_metrics=True, rounds_ahead=8)
    )
    charge(session, plan, 0)
    with monkeypatch.context() as killed:
        killed.setattr(ledger_store, "Outside", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            owner.set_limit(NAME, paper_limit(4.0))
    charge(session, plan, 1)
    assert owner.sessions(NAME)[0].charged_until == 8
    owner.set_limit(NAME, paper_limit(epsilon_at(1e-9, DELTA, 4.0) * 1.0001))
    with pytest.raises(BudgetExceeded):
        charge(session, plan, 2)
    session.close()


def test_a_round_that_may_have_left_stays_charged_when_a_limit_changes(tmp_path):
    plan = small_plan()
    ledger, owner = Ledger(tmp_path / "a.sqlite"), Ledger(tmp_path / "a.sqlite")
    session = ledger.open_session(
        opening(dataset=NAME, plan=plan, run="r", session="s", exact_metrics=True, rounds_ahead=8)
    )
    for number in range(3):
        charge(session, plan, number)
    owner.set_limit(NAME, paper_limit(epsilon_at(1e-9, DELTA, 4.0) * 1.0001))
    with pytest.raises(BudgetExceeded):
        charge(session, plan, 3)
    session.close()
    assert Ledger(tmp_path / "a.sqlite").sessions(NAME)[0].charged_until == 3


# --- limits themselves ---


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


def test_a_limit_that_replaces_another_keeps_its_order_once_there_were_releases(tmp_path):
    ledger = Ledger(tmp_path / "a.sqlite")
    assert ledger.set_limit(NAME, paper_limit(order=4.0)).order == 4.0
    assert ledger.set_limit(NAME, paper_limit(order=8.0)).order == 8.0  # nothing was seen yet
    charge_all(ledger, small_plan(), rounds=1)
    ledger = Ledger(tmp_path / "a.sqlite")
    held = ledger.set_limit(NAME, paper_limit(2000.0, order=16.0))
    assert (held.order, held.epsilon) == (8.0, 2000.0)
    assert ledger.limits(NAME) == [held]


def test_removing_a_limit_that_is_not_there_changes_nothing(tmp_path):
    ledger = Ledger(tmp_path / "a.sqlite")
    ledger.set_limit(NAME, paper_limit())
    before = store_of(ledger).versioned_limits()
    with pytest.raises(LedgerError, match="has no limit for unit=party"):
        ledger.remove_limit(NAME, Unit.PARTY, Accounting.PAPER, 0)
    assert store_of(ledger).versioned_limits() == before


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


# --- in a federation ---


def test_training_stops_cleanly_at_a_limit_and_keeps_what_it_has(data, make_plan, tmp_path):
    plan = make_plan(data, num_epochs=6)
    rate = plan.embedding_dim * cell_rdp(plan.num_trials, plan.beta_16, plan.num_parties, (4.0,))[0]
    make_ledgers(tmp_path / "ledgers", data.party_names)
    stingy = Ledger(tmp_path / "ledgers" / "party-1.sqlite")
    stingy.set_limit(data.name, paper_limit(epsilon_at(2.5 * rate, DELTA, 4.0)))
    stingy.close()
    result = Federation(plan).fit(
        data, ledger=tmp_path / "ledgers", checkpoints=tmp_path / "checkpoints", exact_metrics=True, until_limit=True
    )
    assert "its owner's limit" in result.stopped
    assert [line.epoch for line in result.history] == [1, 2]
    assert "test_accuracy" in result.metrics
    (uses,) = result.row_uses  # the refused round may have left the others
    assert (uses.releases, uses.updates, uses.total_releases) == (3, 3, 2 * 37 + 10)
    spent = spending(Ledger(tmp_path / "ledgers" / "party-1.sqlite"), data.name, paper_limit())
    assert spent.worst == pytest.approx(2 * rate, rel=1e-9)
    for other in (0, 2):
        entry = Ledger(tmp_path / "ledgers" / f"party-{other}.sqlite").sessions(data.name)[0]
        # blocks that were not used up are given back
        assert entry.charged_until == 2 * plan.schedule.rounds_per_pass(JOINT) + 1


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

    federation.taps.append(owner)
    result = federation.fit(data, ledger=tmp_path, exact_metrics=True)
    assert "its owner's limit" in result.stopped
    assert left == [0, 1, 2]
    assert Ledger(tmp_path / "party-1.sqlite").sessions(data.name)[0].charged_until == 3
