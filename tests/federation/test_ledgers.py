"""No path around the count: what checkpoints and ledgers write down of a federation's releases."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pbmvfl
from pbmvfl.federation.federation import Federation
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.plan.plan import Plan
from support.federation_runs import (
    EMBEDDING,
    JOINT,
    PREDICTION,
    Killed,
    Wire,
    counted_uses,
    killer,
    limit_of,
    make_ledgers,
    set_limit,
    shown_uses,
    spans_of,
)

# --- checkpoints ---


def released_until_killed(plan: Plan, data, folder: Path, every: int, at: int | None) -> tuple[Wire, Any]:
    """One session that ends just after its `at`-th embedding was sent, or at the end of the plan."""
    federation = Federation(plan)
    wire = Wire(federation)

    def kill(direction: str, party: int, message: bytes) -> None:
        del party
        sent = len(wire.embeddings(JOINT)) + len(wire.embeddings(PREDICTION))
        if direction == "up" and message[5] == EMBEDDING and sent == at:
            raise Killed

    federation.taps.append(kill)
    try:
        return wire, federation.fit(data, checkpoints=folder, checkpoint_every=every)
    except Killed:
        return wire, None


@pytest.mark.parametrize(
    ("every", "kills"),
    [
        (1, [1]),  # the first message of the first round
        (1, [8]),  # the last message of the first epoch's last round
        (1, [9]),
        (1, [13, 1, 1]),  # again and again in the same epoch
        (2, [15]),
        (2, [17, 9]),
        (1, [33]),  # a test row's first release
        (1, [34, 1]),
        (3, [31, 2]),
        (4, []),
    ],
)
def test_at_least_as_many_row_releases_are_charged_as_were_seen_on_the_wire(
    every, kills, make_data, make_plan, tmp_path
):
    data = make_data(num_parties=2, num_samples=37, num_test_samples=13)
    plan = make_plan(data, batch_size=10, num_epochs=4, evaluation="released", num_trials=1)
    train, test = Counter(), Counter()
    sessions = 0
    result = None
    for at in [*kills, None]:
        wire, result = released_until_killed(plan, data, tmp_path, every, at)
        assert (result is None) == (at is not None)
        train += wire.row_releases(plan, JOINT)
        test += wire.row_releases(plan, PREDICTION)
        sessions += 1
    assert len(result.sessions) == sessions
    assert len({session.session for session in result.sessions}) == sessions
    seen = {"joint": max(train.values()), "prediction": max(test.values())}
    assert seen["joint"] >= plan.num_epochs
    shown = shown_uses(result.row_uses)
    assert shown == counted_uses(plan, spans_of(result))
    for kind, (releases, _, total) in shown.items():
        # charged ahead, but never by more than what lies between two checkpoints
        assert seen[kind] <= releases <= seen[kind] + every * len(kills)
        assert total >= sum((train if kind == "joint" else test).values()) / plan.num_parties
    if not kills:
        assert shown == {"joint": (4, 4, 4 * 37), "prediction": (1, 0, 13)}
        assert result.privacy() == plan.privacy()
    else:
        assert result.privacy().epsilon("cell", "strict") > plan.privacy().epsilon("cell", "strict")
        assert any("resumed" in note for note in result.notes)


def test_the_count_of_a_run_is_the_count_of_the_wire_when_nothing_is_charged_ahead_in_vain(data, make_plan, tmp_path):
    plan = make_plan(data, num_epochs=3)
    with pytest.raises(Killed):
        Federation(plan).fit(data, checkpoints=tmp_path, on_epoch=killer())  # right after the first checkpoint
    federation = Federation(plan)
    wire = Wire(federation)
    result = federation.fit(data, checkpoints=tmp_path)
    assert set(wire.row_releases(plan, JOINT).values()) == {2}  # the first epoch did not run again
    assert spans_of(result)[1] == (4, 12)
    # Killed as its checkpoint was reported: the second epoch was charged ahead by then, and counts.
    assert spans_of(result)[0] == (0, 8)
    assert shown_uses(result.row_uses) == {"joint": (4, 4, 4 * 37)}


# --- ledgers ---


def test_two_fits_of_one_federation_keep_to_their_own_ledgers(data, make_plan, monkeypatch, tmp_path):
    federation = Federation(make_plan(data, num_epochs=1))
    check = pbmvfl.federation.federation.check_ledgers

    def another_fit_first(*arguments: Any, **named: Any) -> None:
        monkeypatch.setattr("pbmvfl.federation.federation.check_ledgers", check)
        federation.fit(data, ledger=tmp_path / "two")
        check(*arguments, **named)

    monkeypatch.setattr("pbmvfl.federation.federation.check_ledgers", another_fit_first)
    federation.fit(data, ledger=tmp_path / "one", checkpoints=tmp_path / "checkpoints")
    for name in ("one", "two"):
        assert len(Ledger(tmp_path / name / "party-0.sqlite", must_exist=True).sessions(data.name)) == 1


def test_ledgers_are_told_the_ids_of_the_rows(data, make_plan, tmp_path):
    train = tuple(f"person {number}" for number in reversed(range(data.num_samples)))
    test = tuple(f"guest {number}" for number in range(data.num_test_samples))
    plan = make_plan(data, num_epochs=1)
    Federation(plan).fit(replace(data, train_ids=train, test_ids=test), ledger=tmp_path)
    book = Ledger(tmp_path / "party-2.sqlite", must_exist=True)
    (entry,) = book.sessions(data.name)
    assert tuple(book.read_ids(entry.train_ids)) == train
    assert tuple(book.read_ids(entry.test_ids)) == test


def test_another_order_of_the_same_people_is_no_change_of_values(data, make_plan, tmp_path):
    ids = tuple(str(number) for number in range(data.num_samples))
    named = replace(data, train_ids=ids, test_ids=tuple(f"t{number}" for number in range(data.num_test_samples)))
    order = np.random.default_rng(1).permutation(data.num_samples)
    moved = replace(
        named,
        train_features=tuple(part[order] for part in data.train_features),
        train_labels=data.train_labels[order],
        train_ids=tuple(ids[row] for row in order),
    )
    changed = replace(named, train_features=tuple(part + 1 for part in data.train_features))
    for each in (named, moved, changed):
        Federation(make_plan(data, num_epochs=1)).fit(each, ledger=tmp_path)
    prints = [entry.fingerprint for entry in Ledger(tmp_path / "party-0.sqlite").sessions(data.name)]
    assert prints[0] == prints[1] != prints[2]


def test_a_run_whose_first_round_is_refused_has_no_metrics(data, make_plan, tmp_path):
    plan = make_plan(data)
    make_ledgers(tmp_path, data.party_names)
    set_limit(tmp_path / "party-1.sqlite", data.name, limit_of(plan, 0.5))
    result = Federation(plan).fit(data, ledger=tmp_path, exact_metrics=True, until_limit=True)
    assert result.stopped
    assert result.metrics == {}  # nothing was trained, so nobody looks at exact sums either
    assert [line.to_dict() for line in result.history] == [{"epoch": 0, "bytes_up": 0, "bytes_down": 0, "seconds": 0.0}]


def test_a_run_whose_first_round_is_refused_can_go_on_when_the_limit_is_raised(data, make_plan, tmp_path):
    plan = make_plan(data)
    book = tmp_path / "books" / "party-1.sqlite"
    make_ledgers(tmp_path / "books", data.party_names)
    set_limit(book, data.name, limit_of(plan, 0.5))
    folders: dict = {"ledger": tmp_path / "books", "checkpoints": tmp_path / "checkpoints", "exact_metrics": True}
    folders["until_limit"] = True
    assert Federation(plan).fit(data, **folders).stopped
    assert Federation(plan).fit(data, **folders).stopped
    set_limit(book, data.name, limit_of(plan, 10))
    result = Federation(plan).fit(data, **folders)
    assert not result.stopped
    assert [line.epoch for line in result.history] == [1, 2]
    # Party 0 had answered the first round both times.
    assert spans_of(result) == [(0, 1), (0, 1), (0, 8)]
    assert shown_uses(result.row_uses) == {"joint": (4, 4, 2 * 37 + 2 * 10)}


def test_a_run_that_a_ledger_ended_among_the_test_rows_asks_for_all_of_them_again(make_data, make_plan, tmp_path):
    data = make_data(num_test_samples=52)
    plan = make_plan(data, batch_size=13, evaluation="released")
    assert (plan.schedule.trained_at, len(plan.schedule)) == (6, 10)
    book = tmp_path / "books" / "party-1.sqlite"
    folders = {"ledger": tmp_path / "books", "checkpoints": tmp_path / "checkpoints"}

    def strike(completed: int, *_: object) -> None:
        if completed == 8:
            set_limit(book, data.name, limit_of(plan, 0.5))

    first = Federation(plan).fit(data, on_round=strike, **folders)
    assert "round=8" in first.stopped
    assert "test_accuracy" not in first.metrics
    set_limit(book, data.name, limit_of(plan, 10))
    second = Federation(plan).fit(data, **folders)
    assert not second.stopped
    assert 0 <= second.metrics["test_accuracy"] <= 1
    # Rounds 0 to 8 were charged, the last of them refused by one party alone; then 6 to 9 ran.
    assert spans_of(second) == [(0, 9), (6, 10)]
    assert shown_uses(second.row_uses) == {"joint": (2, 2, 2 * 37), "prediction": (2, 0, (3 + 4) * 13)}
