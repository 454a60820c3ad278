"""Whole runs with drawn labels: what is charged over runs, and that parties see a function of drawn labels alone."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbmvfl import Federation, Ledger, Limit
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import BudgetExceeded, CheckpointError, LedgerError
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import LOCAL
from support.cohorts import small_data, small_plan
from support.known_randomness import known_federation
from support.label_draws import LEDGER, STORE, charged, made
from support.local_plans import voting_plan

EPSILON = 1.0
DATA = small_data(num_samples=60)
NAMED = replace(DATA, train_ids=tuple(f"person {row}" for row in range(60)))
LABELS = 11


def pbm(data: VerticalDataset, **choices: Any) -> Plan:
    return small_plan(data, **{"label_epsilon": EPSILON, "evaluation": "none", **choices})


def staged(data: VerticalDataset, **choices: Any) -> Plan:
    usual = {"label_epsilon": EPSILON, "evaluation": "none", "noise_multiplier": 1.0}
    return voting_plan(data, **{**usual, **choices})


ALGORITHMS = [pytest.param(pbm, id="pbm"), pytest.param(staged, id="staged")]
Made = Callable[..., Plan]


def with_labels(data: VerticalDataset, shift: int) -> VerticalDataset:
    """The same people, every label another one."""
    return replace(data, train_labels=(data.train_labels + shift) % data.num_classes)


def heard(federation: Federation) -> list[tuple[str, int, bytes]]:
    found: list[tuple[str, int, bytes]] = []
    federation.taps.append(lambda *message: found.append(message))
    return found


# --- charged once ---


def test_five_trainings_and_predictions_cost_one_draw_and_a_lost_store_a_second(tmp_path: Path) -> None:
    used = []
    for number in range(5):
        federation = Federation(staged(NAMED, seed=number) if number else pbm(NAMED))
        result = federation.fit(NAMED, ledger=tmp_path)
        assert charged(tmp_path).total() == made(tmp_path) == 60
        used.append(federation.labels)
    assert all(np.array_equal(used[0], each) for each in used)
    assert result.model is not None
    result.model.release(NAMED)
    assert charged(tmp_path).total() == 60
    shutil.rmtree(tmp_path / STORE)
    with pytest.raises(LedgerError, match="60 labels were drawn before"):
        Federation(staged(NAMED)).fit(NAMED, ledger=tmp_path)
    assert charged(tmp_path).total() == 60
    federation = Federation(staged(NAMED))
    federation.fit(NAMED, ledger=tmp_path, redraw_labels=True)
    assert set(charged(tmp_path).values()) == {2}
    assert not np.array_equal(federation.labels, used[0])
    with contextlib.closing(Ledger(tmp_path / LEDGER, read_only=True)) as ledger:
        assert ledger.owner == "label-holder"
        assert [entry.row_releases for entry in ledger.sessions(DATA.name)] == [60, 60]


def test_a_limit_of_labels_ends_a_run_before_anything_is_sent(tmp_path: Path) -> None:
    with contextlib.closing(Ledger(tmp_path / LEDGER, owner="label-holder")) as ledger:
        ledger.set_limit(DATA.name, Limit.choose(unit="label", accounting="strict", epsilon=1.5, delta=1e-5))
    federation = Federation(pbm(DATA))
    (*parties, ahead) = federation.forecast(DATA, tmp_path)
    assert [book.party for book in parties] == list(DATA.party_names)
    assert (ahead.party, ahead.path) == ("label-holder", tmp_path / LEDGER)
    assert [(limit.spent, limit.will_be) for limit in ahead.limits] == [(0.0, pytest.approx(1.0))]
    federation.fit(DATA, ledger=tmp_path)
    for until_limit in (False, True):  # there is no such thing as a part of a draw
        federation = Federation(pbm(DATA, label_epsilon=0.6))
        said = heard(federation)
        with pytest.raises(BudgetExceeded, match=r"from epsilon 1\.00 to 1\.60"):
            federation.fit(DATA, ledger=tmp_path, until_limit=until_limit)
        assert not said
    assert charged(tmp_path).total() == made(tmp_path) == 60


def test_labels_in_clear_leave_no_ledger_and_no_store(tmp_path: Path) -> None:
    federation = Federation(pbm(DATA, label_epsilon=None))
    federation.fit(DATA, ledger=tmp_path)
    assert np.array_equal(federation.labels, DATA.train_labels)
    assert not (tmp_path / LEDGER).exists()
    assert not (tmp_path / STORE).exists()


def test_rows_without_ids_are_drawn_anew_in_every_run_and_need_ids_under_a_limit(tmp_path: Path) -> None:
    """Places in a table are other people in another table: a label that was kept for a place would be another's."""
    places = replace(NAMED, train_ids=tuple(map(str, range(60))), rows_are_named=False)
    used = []
    for _ in range(2):
        federation = Federation(pbm(places))
        federation.fit(places, ledger=tmp_path)
        used.append(federation.labels)
    assert not np.array_equal(*used)
    assert set(charged(tmp_path).values()) == {2}
    assert not (tmp_path / STORE).exists()
    with contextlib.closing(Ledger(tmp_path / LEDGER)) as ledger:
        ledger.set_limit(DATA.name, Limit.choose(unit="label", accounting="strict", epsilon=50.0, delta=1e-5))
    with pytest.raises(LedgerError, match="has a limit, and rows of dataset='small' have no ids"):
        Federation(pbm(places)).fit(places, ledger=tmp_path)


def test_no_party_has_the_name_of_the_label_holder_s_ledger(tmp_path: Path) -> None:
    data = replace(DATA, party_names=("bank", "label-holder", "shop"))
    with pytest.raises(LedgerError, match="party='label-holder' has the name of the label holder's ledger"):
        Federation(pbm(data, label_epsilon=None)).fit(data, ledger=tmp_path)


# --- resumed ---


def killed_after(rounds: int) -> Callable[..., None]:
    def kill(completed: int, *_: object) -> None:
        if completed == rounds:
            raise KeyboardInterrupt

    return kill


@pytest.mark.parametrize("has_ledger", [False, True])
def test_a_resumed_run_goes_on_with_its_labels(has_ledger: bool, tmp_path: Path) -> None:
    ledger, kept = tmp_path / "books" if has_ledger else None, tmp_path / "run"
    store = tmp_path / "books" / STORE if has_ledger else kept / "server" / STORE
    plan = staged(NAMED)
    killed = Federation(plan)
    with pytest.raises(KeyboardInterrupt):
        killed.fit(NAMED, checkpoints=kept, ledger=ledger, on_round=killed_after(4))
    store.rename(tmp_path / "aside")
    for redraw in (False, True):
        with pytest.raises(LedgerError, match="60 labels"):
            Federation(plan).fit(NAMED, checkpoints=kept, ledger=ledger, redraw_labels=redraw)
    shutil.rmtree(store, ignore_errors=True)
    (tmp_path / "aside").rename(store)
    resumed = Federation(plan)
    said = heard(resumed)
    assert not resumed.fit(NAMED, checkpoints=kept, ledger=ledger).stopped
    assert np.array_equal(resumed.labels, killed.labels)
    known = killed.labels[plan.schedule.part_of(LOCAL)].astype("u1").tobytes()
    assert {message[44:] for way, _, message in said if message[5] == LABELS} == {known}
    if has_ledger:
        assert charged(tmp_path / "books").total() == 60


def test_a_run_is_not_resumed_with_another_run_s_second_draw(tmp_path: Path) -> None:
    plan, kept, books = staged(NAMED), tmp_path / "run", tmp_path / "books"
    with pytest.raises(KeyboardInterrupt):
        Federation(plan).fit(NAMED, checkpoints=kept, ledger=books, on_round=killed_after(4))
    shutil.rmtree(books / STORE)
    Federation(plan).fit(NAMED, ledger=books, redraw_labels=True)
    resumed = Federation(plan)
    said = heard(resumed)
    with pytest.raises(CheckpointError, match="is of a run with other drawn labels"):
        resumed.fit(NAMED, checkpoints=kept, ledger=books)
    assert not said


# --- parties see a function of drawn labels ---


def everything_of(
    data: VerticalDataset, plan: Plan, folder: Path
) -> tuple[list[tuple[str, int, bytes]], dict[str, bytes]]:
    """All messages of a run with known noise, and the weights that each party keeps."""
    federation = known_federation(plan)
    said = heard(federation)
    federation.fit(data, ledger=folder, checkpoints=folder / "run")
    parts = sorted((folder / "run").glob("party-*/*.safetensors"))
    return said, {str(path.relative_to(folder)): path.read_bytes() for path in parts}


@pytest.mark.parametrize("make", ALGORITHMS)
def test_other_true_labels_with_the_same_draws_change_no_byte_that_a_party_sees_or_keeps(
    make: Made, tmp_path: Path
) -> None:
    """With every label another one, and in clear the bytes differ, so that a label that is seen would be caught."""
    worlds = [with_labels(NAMED, shift) for shift in (0, 1)]
    runs = {}
    for number, data in enumerate(worlds):
        books = tmp_path / str(number)
        books.mkdir()
        if number:
            shutil.copytree(tmp_path / "0" / STORE, books / STORE)
        with warnings.catch_warnings():  # that the labels are other rows', which the holder alone is told
            warnings.simplefilter("ignore", UserWarning)
            runs[number] = everything_of(data, make(data), books)
    assert runs[0] == runs[1]
    assert runs[0][1]
    clear = [
        everything_of(data, make(data, label_epsilon=None), tmp_path / f"c{data.train_labels[0]}") for data in worlds
    ]
    assert clear[0] != clear[1]


def test_the_labels_that_are_sent_are_the_drawn_ones(tmp_path: Path) -> None:
    federation = Federation(staged(DATA))
    said = heard(federation)
    federation.fit(DATA, ledger=tmp_path)
    sent = [np.frombuffer(message[44:], dtype=np.uint8) for way, _, message in said if message[5] == LABELS]
    assert len(sent) == 3
    stored = np.frombuffer((tmp_path / STORE / "answers").read_bytes()[64 + 24 + 61 * 16 : -16], dtype="<u4")[:-1]
    differ = stored != DATA.train_labels
    assert 0 < differ.sum() < 60  # each with probability 0.42
    for labels in sent:  # and those of fusion rows stay with their holder
        assert np.array_equal(labels, stored[federation.plan.schedule.part_of(LOCAL)])


def test_a_draw_that_is_not_kept_anywhere_is_drawn_anew_by_every_fit() -> None:
    federation, used = Federation(pbm(DATA)), []
    for _ in range(2):
        federation.fit(DATA)
        used.append(federation.labels)
    assert not np.array_equal(*used)
