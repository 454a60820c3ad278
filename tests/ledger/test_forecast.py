"""What a book says to a run beforehand is what it says on the way: the same round is refused, at the same epsilon."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.errors import BudgetExceeded, LedgerError
from pbmvfl.federation.federation import Federation
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.spending import spending
from pbmvfl.plan.plan import Plan
from support.federation_runs import limit_of, make_ledgers, set_limit
from support.ledger_books import DELTA, LOCAL_NUMBERS, NAME, charge_all, on_disk, opening, paper_limit, small_plan

ROWS, TEST_ROWS = 23, 7
#: Plans of every sort of count: releases alone, noisy steps, pure predictions, and all of them on one another's rows.
PLANS: dict[str, dict[str, Any]] = {
    "releases": {"num_epochs": 3},
    "released test rows": {"num_epochs": 2, "evaluation": "released"},
    "noisy joint steps": {"num_epochs": 2, "noise_multiplier": 4.0},
    "local": LOCAL_NUMBERS,
}
LIMITS = [
    {"accounting": "paper", "order": 4.0},
    {"accounting": "strict", "order": 3.0},
    {"accounting": "strict"},
    {"accounting": "strict", "unit": "record", "colluding_parties": 1},
    {"accounting": "strict", "unit": "party"},
]


def plan_of(sort: str) -> Plan:
    choices = PLANS[sort]
    if choices.get("mechanism") == "none":
        sizes = {"num_parties": 3, "num_samples": ROWS, "num_classes": 2, "num_test_samples": TEST_ROWS}
        return Plan.from_dict({**sizes, "batch_size": 5, **choices})
    return small_plan(**choices)


def ids(first: int, count: int) -> tuple[str, ...]:
    return tuple(f"p{number}" for number in range(first, first + count))


SORTS = st.sampled_from(sorted(PLANS))
#: (plan, rounds that ran of it, where its people begin): earlier sessions share some rows, or none.
SESSIONS = st.tuples(SORTS, st.integers(0, 12), st.sampled_from([0, 5, 20, 100]))


@settings(max_examples=40, deadline=None)  # a busy machine is no failure
@given(
    earlier=st.lists(SESSIONS, max_size=3),
    sort=SORTS,
    choices=st.sampled_from(LIMITS),
    share=st.floats(0.3, 1.2).filter(lambda share: abs(share - 1) > 1e-6),  # a tie is decided by rounding
    rounds_ahead=st.sampled_from([1, 16]),
)
def test_a_run_ends_where_the_forecast_says(earlier, sort, choices, share, rounds_ahead):
    """Oracle: the session itself, under a limit of some share of what the whole would come to."""
    plan, usual = plan_of(sort), {"unit": "cell", "delta": DELTA, **choices}
    rows = {"train_ids": ids(0, ROWS), "test_ids": ids(ROWS, TEST_ROWS)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.sqlite"
        for number, (before, rounds, first) in enumerate(earlier):
            other = {"train_ids": ids(first, ROWS), "test_ids": ids(first + ROWS, TEST_ROWS)}
            done = min(rounds, len(plan_of(before).schedule))
            charge_all(Ledger(path), plan_of(before), run=f"earlier {number}", rounds=done, **other)
        ask = {"dataset": NAME, "plan": plan, "public_start": True, "exact_metrics": True, **rows}
        whole = Limit.choose(**{**usual, "epsilon": 1e7})
        with contextlib.closing(Ledger(path)) as book:
            book.set_limit(NAME, whole)
            (all_of_it,) = book.forecast(opening(**ask))
            limit = book.set_limit(NAME, Limit.choose(**{**usual, "epsilon": max(share * all_of_it.will_be, 5.0)}))
            spent = spending(book, NAME, limit).epsilon
            (said,) = book.forecast(opening(**ask))
        assert said.limit == limit
        assert said.spent == spent
        done = charge_all(Ledger(path), plan, run="new", rounds_ahead=rounds_ahead, **rows)
        assert done == (len(plan.schedule) if said.stops_at is None else said.stops_at)
        with contextlib.closing(Ledger(path)) as book:
            after = spending(book, NAME, limit).epsilon
        if said.stops_at is None:
            assert after == pytest.approx(said.will_be, rel=1e-9)
        else:
            assert after <= max(limit.epsilon, spent) * (1 + 1e-9)  # a limit may come too late
            assert said.will_be > limit.epsilon


@pytest.mark.parametrize("sort", sorted(PLANS))
def test_a_resumed_run_ends_where_its_forecast_says(sort, tmp_path):
    """Its earlier rounds are in the book, and its first round is not the first of its run."""
    plan = plan_of(sort)
    for room in (0.5, 0.8, 1.1):
        path = tmp_path / f"{room}.sqlite"
        charge_all(Ledger(path), plan, run="r", rounds=4)
        ask = {"dataset": NAME, "plan": plan, "public_start": True, "exact_metrics": True, "run": "r", "first_round": 3}
        with contextlib.closing(Ledger(path)) as book:
            book.set_limit(NAME, Limit.choose(unit="cell", accounting="strict", epsilon=1e7, delta=DELTA))
            (whole,) = book.forecast(opening(**ask))
            book.set_limit(
                NAME, Limit.choose(unit="cell", accounting="strict", epsilon=room * whole.will_be, delta=DELTA)
            )
            (said,) = book.forecast(opening(**ask))
        done = charge_all(Ledger(path), plan, run="r", first_round=3)
        assert done + 3 == (len(plan.schedule) if said.stops_at is None else said.stops_at)
        assert (said.stops_at is None) == (room > 1)


def test_a_forecast_writes_nothing_and_needs_no_right_to(tmp_path):
    path = tmp_path / "a.sqlite"
    with contextlib.closing(Ledger(path)) as book:
        book.set_limit(NAME, paper_limit(4.5))
    before = on_disk(tmp_path)
    with contextlib.closing(Ledger(path, read_only=True)) as book:
        (said,) = book.forecast(opening(dataset=NAME, plan=small_plan(), public_start=True, exact_metrics=True))
    assert said.stops_at is not None
    assert on_disk(tmp_path) == before


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        ({"exact_metrics": False}, "exact metrics"),
        ({"dataset": "folk"}, "has no limit"),
        ({"train_ids": ("a",)}, "train_ids has 1 rows"),
        ({"train_ids": ("a",) * ROWS}, "different from each other"),
        ({"run": "r", "first_round": 2}, "which goes on at round=2"),
    ],
)
def test_whatever_a_session_is_refused_for_its_forecast_is_refused_for(ask, words, tmp_path):
    with contextlib.closing(Ledger(tmp_path / "a.sqlite")) as book:
        book.set_limit(NAME, paper_limit())
        usual = {"dataset": NAME, "plan": small_plan(), "exact_metrics": True}
        with pytest.raises(LedgerError, match=words):
            book.forecast(opening(**{**usual, **ask}))
        with pytest.raises(LedgerError, match=words):
            book.open_session(opening(**{"run": "r", "session": "s", **usual, **ask}))


def test_a_book_that_is_being_charged_has_no_forecast(tmp_path):
    plan = small_plan()
    session = Ledger(tmp_path / "a.sqlite").open_session(opening(dataset=NAME, plan=plan, run="r", session="s"))
    with (
        contextlib.closing(Ledger(tmp_path / "a.sqlite", read_only=True)) as book,
        pytest.raises(LedgerError, match="being charged by another session"),
    ):
        book.forecast(opening(dataset=NAME, plan=plan))
    session.close()


# --- in a federation ---


def test_a_federation_is_refused_before_anything_is_written_or_sent(data, make_plan, tmp_path):
    plan = make_plan(data)
    book = tmp_path / "books" / "party-1.sqlite"
    make_ledgers(tmp_path / "books", data.party_names)
    set_limit(book, data.name, limit_of(plan, 1.5))
    federation, seen = Federation(plan), []
    federation.taps.append(lambda *message: seen.append(message))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BudgetExceeded, match=r"party='party-1'.* at round=4 of 8.*--until-limit"):
        federation.fit(data, ledger=tmp_path / "books", checkpoints=tmp_path / "run", exact_metrics=True)
    assert not seen
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("uses", [0.5, 1.5, 2.5])
def test_after_a_refusal_every_book_has_exactly_what_left_its_party(uses, data, make_plan, tmp_path):
    """Oracle: embeddings on the wire, party by party. Blocks that were charged ahead are given back."""
    plan = make_plan(data, num_epochs=4)
    make_ledgers(tmp_path, data.party_names)
    set_limit(tmp_path / "party-1.sqlite", data.name, limit_of(plan, uses))
    federation, left = Federation(plan), np.zeros(plan.num_parties, dtype=int)

    def count(direction: str, party: int, message: bytes) -> None:
        left[party] += direction == "up" and message[5] == 6  # an embedding

    federation.taps.append(count)
    result = federation.fit(data, ledger=tmp_path, exact_metrics=True, until_limit=True)
    assert result.stopped
    for party in range(plan.num_parties):
        with contextlib.closing(Ledger(tmp_path / f"party-{party}.sqlite", read_only=True)) as book:
            assert [entry.charged_until for entry in book.sessions(data.name)] == [left[party]]


def test_a_resumed_federation_is_refused_too_and_goes_on_when_the_limit_is_raised(data, make_plan, tmp_path):
    plan = make_plan(data, num_epochs=3)
    folders = {"ledger": tmp_path / "books", "checkpoints": tmp_path / "run", "exact_metrics": True}
    book = tmp_path / "books" / "party-1.sqlite"
    make_ledgers(tmp_path / "books", data.party_names)
    set_limit(book, data.name, limit_of(plan, 1.5))
    assert Federation(plan).fit(data, until_limit=True, **folders).stopped
    with pytest.raises(BudgetExceeded, match="would end this run at round=4 of 12"):
        Federation(plan).fit(data, **folders)
    set_limit(book, data.name, limit_of(plan, 10))
    assert not Federation(plan).fit(data, **folders).stopped
