"""Row numbers: one place for a person whatever names the rows, each list unpacked once; and sums over rounds."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.ledger import spending
from pbmvfl.ledger.limits import Cost, Limit
from pbmvfl.ledger.spending import RowNumbers, Spent


class Book:
    """As much of a ledger as row numbers need: lists by reference, sessions in order, and a count of the reads."""

    def __init__(self, *sessions: tuple[Any, Any]) -> None:
        self._ids: dict[str, Any] = {}
        self.reads: dict[str, int] = {}
        self._sessions = [
            SimpleNamespace(train_ids=self.keep(train), test_ids=self.keep(test)) for train, test in sessions
        ]

    def keep(self, ids: Any) -> str:
        reference = f"range:{ids.start}:{ids.stop}" if isinstance(ids, range) else f"list:{','.join(ids)}"
        self._ids[reference] = ids
        return reference

    def sessions(self, _dataset: str) -> list[Any]:
        return self._sessions

    def read_ids(self, reference: str) -> Any:
        self.reads[reference] = self.reads.get(reference, 0) + 1
        return self._ids[reference]


def row_numbers(book: Book) -> RowNumbers:
    return RowNumbers(book, "people")  # type: ignore[arg-type]


RANGES = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda ends: range(min(ends), max(ends)))
# "3" is row 3 of a range, whether the range comes before it or later; "03" and a number without end are names
LISTS = st.lists(st.sampled_from([*"abcdefgh", "0", "3", "11", "03", "-1", "9" * 30]), unique=True, max_size=8)
IDS = st.one_of(RANGES, LISTS)


@settings(max_examples=300, deadline=None)  # a busy machine is no failure
@given(sessions=st.lists(st.tuples(IDS, IDS), max_size=6), later=st.lists(IDS, max_size=4), again=st.randoms())
def test_places_are_those_of_a_plain_dictionary(sessions: list[Any], later: list[Any], again: Any) -> None:
    """Oracle: all ids in the order of their first mention; numbered rows at their number, then names one by one.

    A name that spells a numbered row's number is that row.
    """
    book = Book(*sessions)
    rows = row_numbers(book)
    mentioned = [ids for pair in sessions for ids in pair]
    for number in range(len(later) + 1):
        if number:  # a list that no session had named when the book was opened
            mentioned.append(later[number - 1])
            rows.numbers(book.keep(later[number - 1]))
        room = max((ids.stop for ids in mentioned if isinstance(ids, range)), default=0)
        places: dict[str, int] = {str(row): row for row in range(room)}
        for ids in mentioned:
            for name in ids:
                places.setdefault(str(name), len(places))
        assert rows.count == len(places)
        shuffled = list(mentioned)
        again.shuffle(shuffled)
        for ids in shuffled:
            assert rows.numbers(book.keep(ids)).tolist() == [places[str(name)] for name in ids]


def test_a_list_is_unpacked_once_however_many_sessions_name_it() -> None:
    people, others = ["ann", "bob", "cat"], ["dan"]
    book = Book(*[(people, others)] * 50, (range(7), range(7, 9)), (others, people))
    rows = row_numbers(book)
    arrays = [rows.numbers(book.keep(people)) for _ in range(3)]
    assert {name: reads for name, reads in book.reads.items() if name.startswith("list:")} == {
        "list:ann,bob,cat": 1,
        "list:dan": 1,
    }
    assert arrays[0] is arrays[1] is arrays[2]  # one array for all sessions, not one for each
    assert arrays[0].tolist() == [9, 10, 11]


def test_a_shared_array_cannot_be_changed_by_one_of_its_users() -> None:
    book = Book((["ann", "bob"], range(3)))
    rows = row_numbers(book)
    with pytest.raises(ValueError, match="read-only"):
        rows.numbers(book.keep(["ann", "bob"]))[0] = 7


def test_arrays_given_out_before_a_larger_range_came_are_left_alone() -> None:
    book = Book((["ann", "bob"], ["cat"]))
    rows = row_numbers(book)
    before = rows.numbers(book.keep(["ann", "bob"]))
    rows.numbers(book.keep(range(5)))
    np.testing.assert_array_equal(before, [0, 1])
    np.testing.assert_array_equal(rows.numbers(book.keep(["bob", "ann"])), [6, 5])
    assert rows.count == 8


@settings(deadline=None)
@given(st.lists(st.tuples(st.sets(st.integers(0, 9)), st.integers(1, 5)), max_size=12), st.sampled_from([0, 7, 10**6]))
def test_rows_have_the_sum_of_their_rounds_however_many_wait(rounds: list[Any], most: int) -> None:
    limit = Limit.choose(unit="cell", accounting="strict", epsilon=8, delta=1e-5)
    spent, expected = Spent(10, limit), [0.0] * 10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spending, "_MOST_PENDING", most)
        for rows, amount in rounds:
            spent.add(np.array(sorted(rows), dtype=np.int64), Cost(amount / 8), Cost(0.0))
            for row in rows:
                expected[row] += amount / 8  # eighths add up exactly
    assert spent.rows.tolist() == expected


@pytest.mark.parametrize("most", [99, 100])
def test_row_numbers_of_large_rounds_do_not_stay_in_memory(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spending, "_MOST_PENDING", most)
    spent = Spent(100, Limit.choose(unit="cell", accounting="strict", epsilon=8, delta=1e-5))
    rows = np.arange(100)
    kept = weakref.ref(rows)
    spent.add(rows, Cost(0.125), Cost(0.0))
    del rows
    assert (kept() is None) == (most < 100)
