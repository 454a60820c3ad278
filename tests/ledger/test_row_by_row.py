"""Predicted rows that a ledger charges one by one: at the price of a round's rows, and only those that are named."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbmvfl.errors import BudgetExceeded, LedgerError
from pbmvfl.ledger.charging import Charging
from pbmvfl.ledger.forecast import session_words
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.session_opening import Opening, SessionRows
from pbmvfl.ledger.spending import RowNumbers, spending
from pbmvfl.plan.round_kinds import PREDICTION
from pbmvfl.plan.schedule import Round
from support.charged_rows import charged_predictions
from support.ledger_books import LOCAL_NUMBERS, NAME, charge_all, paper_limit, small_plan

#: Seven test rows in rounds of five, after training and fusion rows.
PLAN = small_plan(**LOCAL_NUMBERS)
PREDICTED_AT = len(PLAN.schedule) - 2
NAMES = [f"t{row}" for row in range(7)]
ALL = tuple(range(7))
#: The pure epsilon of a prediction.
RESPONSE = LOCAL_NUMBERS["prediction_response_epsilon"]


def trained(path: Path, *, limit: Limit | None = None, **choices: Any) -> Ledger:
    """A ledger that training was charged to."""
    book = Ledger(path)
    if limit is not None:
        book.set_limit(NAME, limit)
    assert charge_all(book, PLAN, rounds=PREDICTED_AT, test_ids=NAMES, **choices) == PREDICTED_AT
    return Ledger(path)


def opening(unanswered: Any = ALL, *, first_round: int = PREDICTED_AT, **choices: Any) -> Opening:
    usual: dict[str, Any] = {"dataset": NAME, "plan": PLAN, "run": "run", "session": "s", "public_start": True}
    chosen = None if unanswered is None else np.array(unanswered, dtype=np.int64)
    rows = SessionRows(test_ids=NAMES)
    return Opening(**{**usual, "rows": rows, "unanswered": chosen, "first_round": first_round, **choices})


def predict(opened: Charging, number: int, rows: Any) -> None:
    opened.charge(Round(number, PREDICTION, np.array(rows, dtype=np.int64)), PLAN.events(PREDICTION))


def predict_all(opened: Charging, unanswered: Any = ALL) -> None:
    for number, together in ((PREDICTED_AT, range(5)), (PREDICTED_AT + 1, range(5, 7))):
        if rows := [row for row in together if row in unanswered]:
            predict(opened, number, rows)


UNITS = ("cell", "record", "party")


@pytest.mark.parametrize("public_start", [True, False])
def test_all_rows_one_by_one_cost_what_their_rounds_cost(tmp_path, public_start):
    one_by_one = trained(tmp_path / "a.sqlite", public_start=public_start)
    opened = one_by_one.open_session(opening(public_start=public_start))
    predict_all(opened)
    opened.close()
    whole = trained(tmp_path / "b.sqlite", public_start=public_start)
    charge_all(whole, PLAN, first_round=PREDICTED_AT, test_ids=NAMES, public_start=public_start)
    for accounting in ("strict", "paper"):
        for unit in UNITS:
            limit = paper_limit(unit=unit, accounting=accounting)
            with contextlib.ExitStack() as opened_again:
                found = [
                    spending(opened_again.enter_context(contextlib.closing(Ledger(path, read_only=True))), NAME, limit)
                    for path in (tmp_path / "a.sqlite", tmp_path / "b.sqlite")
                ]
            assert found[0].worst == pytest.approx(found[1].worst, rel=1e-12)
            assert found[0].rows + found[0].everywhere == pytest.approx(found[1].rows + found[1].everywhere, rel=1e-12)


@given(chosen=st.sets(st.integers(0, 6), min_size=1))
def test_only_the_rows_that_are_named_are_charged(chosen, tmp_path_factory):
    path = tmp_path_factory.mktemp("book") / "a.sqlite"
    with contextlib.closing(trained(path)) as book:
        opened = book.open_session(opening(sorted(chosen)))
        predict_all(opened, chosen)
        opened.close()
    assert charged_predictions(path) == Counter(NAMES[row] for row in chosen)
    with contextlib.closing(Ledger(path, read_only=True)) as again:
        assert again.trouble() is None
        entry = again.sessions(NAME)[-1]
        assert entry.row_releases == len(chosen)
        words = f"{len(chosen)} row{'s' * (len(chosen) > 1)} predicted"
        assert words in session_words(entry)
        rows = RowNumbers(again, NAME)
        spent = spending(again, NAME, paper_limit(accounting="strict"), rows=rows).rows
        each = [float(spent[rows.numbers_of([name], [])[0][0]]) for name in NAMES]
        assert {value > 0 for row, value in enumerate(each) if row in chosen} == {True}
        assert not any(value for row, value in enumerate(each) if row not in chosen)


def test_a_part_of_the_rows_is_charged_as_far_as_it_was_asked_for(tmp_path):
    path = tmp_path / "a.sqlite"
    opened = trained(path).open_session(opening([0, 2, 3, 6]))
    assert charged_predictions(path) == Counter()
    predict(opened, PREDICTED_AT, [0, 2, 3])
    assert charged_predictions(path) == Counter(["t0", "t2", "t3"])
    opened.close()
    assert charged_predictions(path) == Counter(["t0", "t2", "t3"])


@pytest.mark.parametrize(
    ("number", "rows"),
    [(0, [0, 2]), (0, [2, 0, 3]), (0, [0, 2, 4]), (0, []), (1, [6]), (1, [0, 2, 3]), (0, [0, 1, 2, 3, 4])],
)
def test_rows_that_are_not_next_are_refused_and_nothing_is_charged(tmp_path, number, rows):
    path = tmp_path / "a.sqlite"
    opened = trained(path).open_session(opening([0, 2, 3, 6]))
    with pytest.raises(LedgerError, match="are not those that are next in the session's line"):
        predict(opened, PREDICTED_AT + number, rows)
    assert charged_predictions(path) == Counter()
    predict(opened, PREDICTED_AT, [0, 2, 3])
    with pytest.raises(LedgerError, match="are not those that are next"):
        predict(opened, PREDICTED_AT, [0, 2, 3])
    predict(opened, PREDICTED_AT + 1, [6])
    opened.close()
    assert charged_predictions(path) == Counter(["t0", "t2", "t3", "t6"])


@pytest.mark.parametrize("unanswered", [[3, 1], [1, 1], [7], [-1], [0, 7]])
def test_other_rows_than_the_plan_predicts_are_refused_before_anything_is_written(tmp_path, unanswered):
    path = tmp_path / "a.sqlite"
    book = trained(path)
    before = len(book.sessions(NAME))
    with pytest.raises(
        LedgerError, match=r"unanswered=\d rows from round=.*each once and in the order of their rounds"
    ):
        book.open_session(opening(unanswered))
    with pytest.raises(LedgerError, match="unanswered="):
        book.forecast(opening(unanswered))
    assert len(book.sessions(NAME)) == before


def test_rows_are_not_charged_one_by_one_before_training_has_ended(tmp_path):
    with pytest.raises(LedgerError, match="where nothing else comes before them"):
        trained(tmp_path / "a.sqlite").open_session(opening(first_round=PREDICTED_AT - 1))


def test_no_row_without_an_answer_is_nothing_to_charge(tmp_path):
    path = tmp_path / "a.sqlite"
    book = trained(path, limit=Limit.choose(unit="cell", accounting="strict", epsilon=50.0, delta=1e-5))
    (ahead,) = book.forecast(opening([]))
    assert (ahead.stops_at, ahead.will_be) == (None, ahead.spent)
    book.open_session(opening([])).close()
    assert charged_predictions(path) == Counter()


def test_a_limit_refuses_the_round_that_was_forecast_and_counts_new_rows_alone(tmp_path):
    """One prediction of each row: t5 has had its own, so its round is refused, where it is among the rows to charge."""
    plan = PLAN.replace(noise_multiplier=300.0)  # training costs little
    path = tmp_path / "a.sqlite"
    with contextlib.closing(Ledger(path)) as book:
        book.set_limit(NAME, Limit.choose(unit="cell", accounting="strict", epsilon=1.2 * RESPONSE, delta=1e-5))
        charge_all(book, plan, rounds=PREDICTED_AT, test_ids=NAMES)
    for unanswered, stops_at in (([5], None), ([0, 1, 6], None), ([2, 3, 5], PREDICTED_AT + 1)):
        book = Ledger(path)
        session = opening(unanswered, plan=plan)
        (ahead,) = book.forecast(session)
        assert ahead.stops_at == stops_at
        opened = book.open_session(session)
        if stops_at is None:
            predict_all(opened, unanswered)
        else:
            with pytest.raises(BudgetExceeded, match=f"round={stops_at} would bring dataset 'people' to epsilon 3"):
                predict_all(opened, unanswered)
        opened.close()
    assert charged_predictions(path) == Counter(["t5", "t0", "t1", "t6", "t2", "t3"])
    with contextlib.closing(Ledger(path, read_only=True)) as again:
        (refused,) = again.refusals(again.sessions(NAME)[-1].id)
        assert refused[0] == PREDICTED_AT + 1
