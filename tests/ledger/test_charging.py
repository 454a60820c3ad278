"""What a ledger counts: rounds, rows by their owners' ids, and runs that go on."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.errors import LedgerError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.spending import spending
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import rdp_curve
from pbmvfl.privacy.renyi import cell_rdp
from pbmvfl.privacy.units import COLUMN_UNITS, SERVER, Accounting
from support.ledger_books import NAME, charge, charge_all, opening, paper_limit, small_plan


def test_a_whole_run_costs_what_the_account_of_its_plan_says(tmp_path):
    plan = small_plan()
    charge_all(Ledger(tmp_path / "a.sqlite"), plan)
    ledger = Ledger(tmp_path / "a.sqlite")
    for accounting in Accounting:
        for unit in COLUMN_UNITS:
            limit = paper_limit(unit=unit, accounting=accounting)
            expected = rdp_curve(plan.training_run(), unit, accounting, SERVER, orders=(limit.order,))[0]
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
    schedule = plan.schedule
    uses = {}
    everything, started, reached = {}, set(), {}
    for i, (anywhere, count, run) in enumerate(pieces):
        first = min(anywhere, reached.get(run, 0))  # a run goes on where it was, or before that
        last = min(first + count, len(plan.schedule))
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
    (note,) = book["datasets"][NAME]["notes"]
    assert "exact metrics of its rows were permitted" in note
    assert [event["what"] for event in book["history"]] == ["limit", "opened", "closed"]


# --- rounds ---


@pytest.mark.parametrize("rounds_ahead", [1, 8])
def test_an_earlier_round_is_refused_and_stays_charged(rounds_ahead, tmp_path):
    plan = small_plan()
    ledger = Ledger(tmp_path / "a.sqlite")
    session = ledger.open_session(
        opening(dataset=NAME, plan=plan, run="r", session="s", exact_metrics=True, rounds_ahead=rounds_ahead)
    )
    for number in range(6):
        charge(session, plan, number)
    for number in range(6):
        with pytest.raises(LedgerError, match=f"round={number} was charged"):
            charge(session, plan, number)
    session.close()
    assert Ledger(tmp_path / "a.sqlite").sessions(NAME)[0].charged_until == 6


def test_a_round_before_the_session_s_first_is_refused(tmp_path):
    plan = small_plan()
    schedule = plan.schedule
    charge_all(Ledger(tmp_path / "a.sqlite"), plan, rounds=8)
    session = Ledger(tmp_path / "a.sqlite").open_session(
        opening(dataset=NAME, plan=plan, run="run", session="t", exact_metrics=True, first_round=5)
    )
    with pytest.raises(LedgerError, match=f"round=4 .* permitted: 5 to {len(schedule) - 1}"):
        charge(session, plan, 4)
    charge(session, plan, 5)
    session.close()


@pytest.mark.parametrize(
    "changes", [{"beta": 0.2}, {"noise_multiplier": 2.0}, {"mechanism": "none", "secure_aggregation": False}]
)
def test_a_round_with_other_events_than_the_session_was_opened_with_is_refused(changes, tmp_path):
    plan = small_plan()
    session = Ledger(tmp_path / "a.sqlite").open_session(
        opening(dataset=NAME, plan=plan, run="run", session="s", exact_metrics=True)
    )
    first = plan.schedule[0]
    for events in (plan.replace(**changes).events(first.kind), ()):
        with pytest.raises(LedgerError, match="its events are not those of joint rounds"):
            session.charge(first, events)
    charge(session, plan, 0)
    session.close()
    assert Ledger(tmp_path / "a.sqlite").sessions(NAME)[0].charged_until == 1


@pytest.mark.parametrize("rounds_ahead", [0, -8])
def test_charging_no_round_at_a_time_is_refused(rounds_ahead, tmp_path):
    ledger = Ledger(tmp_path / "a.sqlite")
    with pytest.raises(LedgerError, match=f"rounds_ahead={rounds_ahead}; permitted: 1 or more"):
        ledger.open_session(
            opening(
                dataset=NAME, plan=small_plan(), run="r", session="s", exact_metrics=True, rounds_ahead=rounds_ahead
            )
        )


# --- rows ---


def test_changed_values_keep_what_was_spent_and_are_noticed(tmp_path):
    plan = small_plan()
    values = np.arange(plan.num_samples, dtype=np.float32)
    charge_all(Ledger(tmp_path / "a.sqlite"), plan, train_values=values)
    ledger = Ledger(tmp_path / "a.sqlite")
    before = spending(ledger, NAME, paper_limit()).worst
    session = ledger.open_session(
        opening(dataset=NAME, plan=plan, run="2", session="t", exact_metrics=True, train_values=values + 1)
    )
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
        ledger.open_session(
            opening(
                dataset=NAME, plan=plan, run="r", session="s", exact_metrics=True, train_ids=["a", "a"], test_ids=[]
            )
        )
    with pytest.raises(LedgerError, match="has 1 rows, the plan has 2"):
        Ledger(tmp_path / "b.sqlite").open_session(
            opening(dataset=NAME, plan=plan, run="r", session="s", train_ids=["a"], test_ids=[])
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
        session = Ledger(path).open_session(
            opening(dataset="places", plan=plan, run="run", session="s", exact_metrics=True)
        )
        for number in range(9):
            charge(session, plan, number)
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
        (first_round, len(plan.schedule)),
    ]
