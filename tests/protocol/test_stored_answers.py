"""Stored answers: the same row again gets the same symbols, whatever happened in between, and nothing else does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.errors import AnswersError
from pbmvfl.mechanisms import RandomisedSymbols
from pbmvfl.mechanisms.votes import Vote, VoteKind
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import JOINT, PREDICTION
from pbmvfl.plan.schedule import Order, Phase
from pbmvfl.protocol.stored_answers import PartyAnswers, StoredAnswers

VOTE = Vote(kind=VoteKind.TOP)
MECHANISM = RandomisedSymbols(num_parties=3, embedding_dim=1, symbols=4, response_epsilon=1.0)
RELEASE = {**MECHANISM.event.to_dict(), "vote": VOTE.to_dict()}
HEAD = 16 + 32 + 16


def keys(answers: StoredAnswers, rows: range | list[int] = range(40), **other: Any) -> list[bytes]:
    usual: dict[str, Any] = {**RELEASE, "dataset": "people", "data_version": "", "weights": "w" * 64}
    return answers.keys({**usual, **other}, [f"p{row}" for row in rows])


def drawn(count: int = 40) -> npt.NDArray[Any]:
    return MECHANISM.randomize(VOTE(np.zeros((count, 4))), SystemEntropy())


@pytest.mark.parametrize("stored", [False, True])
def test_a_row_asked_again_gets_the_same_symbols_and_is_known(stored: bool, tmp_path: Path) -> None:
    answers = StoredAnswers(tmp_path / "party-0" if stored else None)
    first = answers.settle(keys(answers, range(25)), drawn(25))
    mixed = [7, 30, 3, 39, 24]
    assert answers.known(keys(answers, mixed)).tolist() == [True, False, True, False, True]
    second = answers.settle(keys(answers, mixed), drawn(5))
    assert second[[0, 2, 4]].tolist() == first[[7, 3, 24]].tolist()
    assert answers.known(keys(answers, mixed)).all()
    assert len(answers) == 27
    again = answers.settle(keys(answers, mixed), drawn(5))
    assert again.tolist() == second.tolist()
    assert again.dtype == drawn(1).dtype


def test_answers_survive_a_restart(tmp_path: Path) -> None:
    answers = StoredAnswers(tmp_path)
    sent = [answers.settle(keys(answers, range(i, i + 10)), drawn(10)) for i in range(0, 40, 10)]
    answers.close()
    again = StoredAnswers(tmp_path)
    assert again.known(keys(again)).all()
    assert again.settle(keys(again), drawn()).tolist() == np.concatenate(sent).tolist()
    more = again.settle(keys(again, dataset="others"), drawn())
    again.close()
    third = StoredAnswers(tmp_path)
    assert third.settle(keys(third, dataset="others"), drawn()).tolist() == more.tolist()
    assert os.stat(tmp_path / "answers").st_mode & 0o777 == 0o600


CHANGES: dict[str, dict[str, Any]] = {
    "whose rows": {"dataset": "others"},
    "version of the data": {"data_version": "2026-01"},
    "weights": {"weights": "v" * 64},
    "law": {"other_weight": 5},
    "vote": {"vote": Vote(kind=VoteKind.TOP, gain=2.0).to_dict()},
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_row_that_is_asked_about_otherwise_is_another_one(change: str) -> None:
    answers = StoredAnswers()
    answers.settle(keys(answers), drawn())
    assert not answers.known(keys(answers, **CHANGES[change])).any()
    assert not answers.known(keys(answers, range(40, 80))).any()
    assert answers.known(keys(answers)).all()


def test_two_stores_have_different_keys_so_a_key_says_nothing_without_the_secret() -> None:
    first, second = StoredAnswers(), StoredAnswers()
    assert not set(keys(first)) & set(keys(second))
    assert len(set(keys(first))) == 40


def test_the_file_holds_no_true_symbol_and_its_size_follows_from_the_rows_that_were_asked(tmp_path: Path) -> None:
    """Files are equally long, whatever was drawn."""
    sizes = []
    for world in (0, 1):
        answers = StoredAnswers(tmp_path / str(world))
        for rows in (range(10), range(5, 20), range(20)):
            answers.settle(keys(answers, rows), (drawn(len(rows)) + world) % 4)
        answers.close()
        sizes.append((tmp_path / str(world) / "answers").stat().st_size)
    assert sizes == [HEAD + 2 * (8 + 16 + 16) + 20 * (16 + 4)] * 2


def test_a_flipped_bit_anywhere_is_refused(tmp_path: Path) -> None:
    answers = StoredAnswers(tmp_path)
    for i in (0, 8):
        answers.settle(keys(answers, range(i, i + 8)), drawn(8))
    answers.close()
    path = tmp_path / "answers"
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(AnswersError, match=r"answers=.*are damaged.*restore a copy"):
            StoredAnswers(tmp_path)
    path.write_bytes(whole)
    assert len(StoredAnswers(tmp_path)) == 16


def test_blocks_that_changed_places_are_refused(tmp_path: Path) -> None:
    answers = StoredAnswers(tmp_path)
    for i in (0, 8):
        answers.settle(keys(answers, range(i, i + 8)), drawn(8))
    answers.close()
    path = tmp_path / "answers"
    whole = path.read_bytes()
    length = (len(whole) - HEAD) // 2
    path.write_bytes(whole[:HEAD] + whole[HEAD + length :] + whole[HEAD : HEAD + length])
    with pytest.raises(AnswersError, match="are damaged"):
        StoredAnswers(tmp_path)


def test_what_a_killed_process_left_unfinished_was_never_sent_and_is_cut_off(tmp_path: Path) -> None:
    answers = StoredAnswers(tmp_path)
    first = answers.settle(keys(answers, range(8)), drawn(8))
    answers.close()
    path = tmp_path / "answers"
    short = path.stat().st_size
    answers = StoredAnswers(tmp_path)
    answers.settle(keys(answers, range(8, 20)), drawn(12))
    answers.close()
    whole = path.read_bytes()
    assert short < len(whole)
    for length in range(short, len(whole)):
        path.write_bytes(whole[:length])
        again = StoredAnswers(tmp_path)
        assert again.known(keys(again, range(20))).tolist() == [True] * 8 + [False] * 12
        assert again.settle(keys(again, range(8)), drawn(8)).tolist() == first.tolist()
        again.close()
        assert path.stat().st_size == short
    for length in range(HEAD):  # the very first write
        path.write_bytes(whole[:length])
        again = StoredAnswers(tmp_path)
        assert len(again) == 0
        again.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    answers = StoredAnswers(tmp_path)
    with pytest.raises(AnswersError, match="in use by another process"):
        StoredAnswers(tmp_path)
    answers.close()
    StoredAnswers(tmp_path).close()


def test_an_answer_stands_for_ever() -> None:
    answers = StoredAnswers()
    names = keys(answers, range(3))
    answers.put(names, np.array([[1], [2], [3]]))
    answers.put(names, np.array([[1], [2], [3]]))
    with pytest.raises(AnswersError, match="was given another one"):
        answers.put(names, np.array([[1], [2], [0]]))
    assert answers.settle(names, np.zeros((3, 1), dtype=np.int64)).tolist() == [[1], [2], [3]]


def test_a_row_twice_in_one_list_gets_one_answer() -> None:
    answers = StoredAnswers()
    twice = keys(answers, [4, 9, 4])
    sent = answers.settle(twice, np.array([[1], [2], [3]], dtype=np.uint8))
    assert sent.tolist() == [[1], [2], [1]]


def test_bad_calls_are_named(tmp_path: Path) -> None:
    answers = StoredAnswers()
    names = keys(answers, range(3))
    with pytest.raises(AnswersError, match=r"shape \(3,\) for 3 rows"):
        answers.put(names, np.zeros(3, dtype=np.uint8))
    with pytest.raises(AnswersError, match="are not integers"):
        answers.put(names, np.full((3, 1), 0.5))
    answers.put(names, np.ones((3, 2), dtype=np.int64))
    with pytest.raises(AnswersError, match="2 coordinates and the release 1"):
        answers.settle(names, np.zeros((3, 1), dtype=np.uint8))
    (tmp_path / "file").write_text("")
    with pytest.raises(AnswersError, match="cannot be opened"):
        StoredAnswers(tmp_path / "file" / "folder")
    (tmp_path / "answers").write_text("something else that somebody has put there")
    with pytest.raises(AnswersError, match="are damaged"):
        StoredAnswers(tmp_path)


PREDICTS: dict[str, Any] = {
    "num_parties": 2,
    "num_samples": 20,
    "num_classes": 2,
    "num_test_samples": 8,
    "evaluation": "released",
    "prediction_mechanism": "krr",
    "prediction_symbols": 2,
    "prediction_response_epsilon": 1.0,
    "prediction_secure_aggregation": False,
}


@pytest.mark.parametrize(
    ("choices", "before"),
    [
        ({"encoder": "resnet18-batchnorm"}, 0),  # a new row's answer is about the rows beside it
        ({}, 1),  # weights are still to change
        ({"prediction_secure_aggregation": True}, 0),
        ({"phases": (Phase(kind=JOINT, passes=1), Phase(kind=PREDICTION, passes=2, order=Order.AS_GIVEN))}, 0),
    ],
    ids=["coupled", "training", "sums", "twice"],
)
def test_rounds_that_cannot_be_charged_by_row_are_charged_whole(choices: dict[str, Any], before: int) -> None:
    nothing: Any = None  # neither rows nor weights nor a store decide it
    plan, control = Plan.of(**{**PREDICTS, **choices}), Plan.of(**PREDICTS)
    assert PartyAnswers(plan, nothing, nothing, nothing).unanswered(plan.schedule.trained_at - before) is None
    with pytest.raises(AttributeError):  # the control: of such a plan the store is asked
        PartyAnswers(control, nothing, nothing, nothing).unanswered(control.schedule.trained_at)


@settings(max_examples=40, deadline=None)
@given(asked=st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=6, unique=True), max_size=8))
def test_whatever_is_asked_every_row_has_the_answer_that_it_got_first(asked: list[list[int]]) -> None:
    answers = StoredAnswers()
    book: dict[int, list[int]] = {}
    for rows in asked:
        assert answers.known(keys(answers, rows)).tolist() == [row in book for row in rows]
        for row, symbol in zip(rows, answers.settle(keys(answers, rows), drawn(len(rows))).tolist(), strict=True):
            assert symbol == book.setdefault(row, symbol)
    assert len(answers) == len(book)
