"""One more kind of round, registered by a test: counted, priced, charged, sent and measured without a change elsewhere.

A rehearsal releases training rows and moves no weights. Every count is compared with one that goes through all rounds
one by one, and with what was seen on the wire.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbmvfl import Federation, Ledger, Limit, Plan, VerticalDataset
from pbmvfl.errors import BudgetExceeded, LedgerError, PlanError, WrongPlan
from pbmvfl.ledger.limits import epsilon_at
from pbmvfl.ledger.session_terms import SessionTerms
from pbmvfl.plan.round_kinds import JOINT, KINDS, PREDICTION, RoundKind, Split, register_kind
from pbmvfl.plan.schedule import Order, Phase
from pbmvfl.privacy.accounting import rdp_curve
from pbmvfl.privacy.units import Accounting, Unit
from support.ledger_books import opening

REHEARSAL = RoundKind(name="rehearsal", code=200, releases=True)
DELTA = 1e-5
HEADER, EMBEDDING = 44, 6


@pytest.fixture(autouse=True)
def rehearsal() -> Iterator[None]:
    register_kind(REHEARSAL)
    yield
    KINDS.forget("rehearsal")


def phases(order: Order = Order.SHUFFLED) -> tuple[Phase, ...]:
    return (
        Phase(kind=JOINT, passes=2),
        Phase(kind=REHEARSAL, passes=1, order=order),
        Phase(kind=JOINT, passes=1),
        Phase(kind=PREDICTION, passes=1, order=Order.AS_GIVEN),
    )


@pytest.fixture
def plan(data: VerticalDataset) -> Plan:
    """37 training rows and 13 test rows in batches of 10: passes of 4 and of 2 rounds."""
    choices = {"phases": phases(), "evaluation": "released", "batch_size": 10}
    usual = {"embedding_dim": 3, "num_trials": 5, "learning_rate": 0.1, "seed": 7}
    return Plan.for_data(data, **usual, **choices)


# --- known, and forgotten ---


def test_it_is_known_only_while_it_is_registered(plan: Plan) -> None:
    written, terms = plan.to_json(), SessionTerms.of(plan, public_start=True).to_json()
    assert Plan.from_json(written) == plan
    assert Plan.from_json(written).hash == plan.hash
    KINDS.forget("rehearsal")
    try:
        with pytest.raises(PlanError, match=r"round kind='rehearsal' is not one of joint, prediction, local"):
            Plan.from_json(written)
        with pytest.raises(LedgerError, match=r"cannot price .*'rehearsal' is not one of"):
            SessionTerms.from_json(terms)
    finally:
        register_kind(REHEARSAL)
    assert SessionTerms.from_json(terms) == SessionTerms.of(plan, public_start=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "joint", "code": 201}, "round kind='joint' is registered already"),
        ({"name": "another"}, "code=200 of round kind 'another' is taken"),
        ({"name": "another", "code": 0}, r"code=0 .* must be in 1\.\.255"),
        ({"name": "another", "code": 256}, r"code=256 .* must be in 1\.\.255"),
        ({"name": "another", "code": 201, "answered": False}, "a release is an answer"),
        ({"name": "another", "code": 201, "carries_gradient": True}, "a gradient belongs to a release"),
        ({"name": "another", "code": 201, "told": True}, "told=True is about a statistic"),
        ({"name": "another", "code": 201, "fuses": True, "updates": True}, "fusion rows are training rows"),
    ],
)
def test_a_kind_that_contradicts_itself_or_another_is_refused(changes: dict[str, Any], words: str) -> None:
    values = {name: getattr(REHEARSAL, name) for name in REHEARSAL.__dataclass_fields__}
    with pytest.raises(PlanError, match=words):
        register_kind(RoundKind(**{**values, **changes}))
    assert list(KINDS) == [
        "joint",
        "prediction",
        "local",
        "mean",
        "gram",
        "counts",
        "symbols",
        "labels",
        "fusion",
        "rehearsal",
    ]


def test_rounds_that_neither_release_nor_update_are_refused_by_a_party(data: VerticalDataset, make_cohort: Any) -> None:
    silent = RoundKind(name="silent", code=201)
    register_kind(silent)
    try:
        plan = Plan.for_data(data, phases=(Phase(kind=JOINT, passes=1), Phase(kind=silent, passes=1)))
        with pytest.raises(WrongPlan, match="silent rounds neither release nor update"):
            make_cohort(plan, data)
    finally:
        KINDS.forget("silent")


# --- counted ---


def test_the_schedule_counts_it_as_a_walk_through_all_rounds_does(plan: Plan) -> None:
    schedule = plan.schedule
    rounds = list(schedule)
    assert [current.kind.name for current in rounds] == (
        ["joint"] * 8 + ["rehearsal"] * 4 + ["joint"] * 4 + ["prediction"] * 2
    )
    assert len(schedule) == 18
    assert {kind: schedule.num_rounds(kind) for kind in schedule.kinds} == Counter(each.kind for each in rounds)
    assert schedule.num_epochs == plan.num_epochs == 3
    assert schedule.trained_at == 16
    assert [number for number in range(18) if schedule.ends_epoch(number)] == [3, 7, 15]
    for first in range(19):
        for until in range(first, 19):
            walked: dict[RoundKind, Counter[int]] = {kind: Counter() for kind in schedule.kinds}
            for current in rounds[first:until]:
                walked[current.kind].update(current.rows.tolist())
            for use in schedule.uses([(first, until)]):
                most = max(walked[use.kind].values(), default=0)
                assert (use.releases, use.updates) == (most, most if use.kind.updates else 0)
                assert use.total_releases == walked[use.kind].total()


def test_a_rehearsal_in_the_given_order_leaves_the_batches_of_training_as_they_were(data: VerticalDataset) -> None:
    with_it = Plan.for_data(data, batch_size=10, phases=phases(Order.AS_GIVEN)).schedule
    without = Plan.for_data(data, batch_size=10, num_epochs=3).schedule
    trained = [current.rows.tolist() for current in with_it if current.kind == JOINT]
    assert trained == [current.rows.tolist() for current in without]


# --- accounted ---


def test_it_is_charged_as_releases_without_updates(plan: Plan) -> None:
    orders = (1.5, 4.0, 30.0)
    for unit in Unit:
        one = plan.release.event.rdp(unit, orders=orders)
        everything = 37 * 4 + 13
        paper = everything if unit is Unit.PARTY else 3 + 1
        strict = everything if unit is Unit.PARTY else everything - (10 - 1)
        for accounting, count in ((Accounting.PAPER, paper), (Accounting.STRICT, strict)):
            curve = rdp_curve(plan.training_run(), unit, accounting, orders=orders)
            np.testing.assert_allclose(curve, count * one, rtol=1e-12)
    usual = plan.replace(phases=(Phase(kind=JOINT, passes=4),), evaluation="simulator")
    assert plan.privacy().epsilon("cell", "paper") == pytest.approx(usual.privacy().epsilon("cell", "paper"), rel=1e-4)


def test_with_weight_noise_only_the_rounds_that_train_add_updates(plan: Plan) -> None:
    orders = (1.5, 4.0)
    noisy = plan.replace(noise_multiplier=2.0, phases=plan.rounds.phases)
    update = 2 * np.array(orders) / 2.0**2  # a Gaussian moved by 2/sigma: alpha * (2/sigma)^2 / 2
    for unit, parties in ((Unit.CELL, 1), (Unit.RECORD, 3)):
        expected = 4 * plan.release.event.rdp(unit, orders=orders) + 3 * parties * update
        curve = rdp_curve(noisy.training_run(), unit, Accounting.STRICT, orders=orders)
        np.testing.assert_allclose(curve, expected, rtol=1e-8)


def test_it_releases_by_the_mechanism_of_rounds_that_do_not_train(plan: Plan) -> None:
    other = plan.replace(prediction_beta=0.1, prediction_num_trials=2)
    assert other.mechanism_for(JOINT).event == plan.release.event
    assert other.mechanism_for(REHEARSAL) == other.mechanism_for(PREDICTION) == other.prediction
    one, two = (other.mechanism_for(kind).event.rdp(Unit.CELL) for kind in (JOINT, REHEARSAL))
    np.testing.assert_allclose(rdp_curve(other.training_run(), Unit.CELL, Accounting.PAPER), 3 * one + two, rtol=1e-12)


# --- charged ---


def order_4_limit(divergence: float, accounting: str = "paper") -> Limit:
    epsilon = epsilon_at(divergence, DELTA, 4.0)
    return Limit.choose(unit="cell", accounting=accounting, epsilon=epsilon, delta=DELTA, order=4.0)


def charged_rounds(plan: Plan, path: Path, limit: Limit) -> int:
    """Rounds that a book with this limit lets through."""
    book = Ledger(path)
    book.set_limit("small", limit)
    session = book.open_session(opening(dataset="small", plan=plan, run="run", session="session", public_start=True))
    done = 0
    try:
        for current in plan.schedule:
            session.charge(current, plan.events(current.kind))
            done += 1
    except BudgetExceeded:
        pass
    session.close()
    return done


@pytest.mark.parametrize(("uses", "rounds"), [(1.5, 4), (2.5, 8), (3.5, 12), (4.5, 18)])
def test_a_ledger_charges_it_to_its_rows_and_stops_where_they_are_used_up(
    uses: float, rounds: int, plan: Plan, tmp_path: Path
) -> None:
    rate = float(plan.release.event.rdp(Unit.CELL, orders=(4.0,))[0])
    path = tmp_path / "book.sqlite"
    assert charged_rounds(plan, path, order_4_limit(uses * rate)) == rounds
    book = Ledger(path, read_only=True)
    (kept,) = book.export()["datasets"]["small"]["limits"]
    (entry,) = book.sessions("small")
    book.close()
    walked: Counter[tuple[Split, int]] = Counter()
    for number in range(rounds):
        current = plan.schedule[number]
        walked.update((current.kind.split, int(row)) for row in current.rows)
    assert entry.row_releases == walked.total()
    assert kept["spent_epsilon"] == pytest.approx(epsilon_at(max(walked.values()) * rate, DELTA, 4.0), rel=1e-12)


@pytest.mark.parametrize("rounds", [0, 1, 5, 9, 12, 13, 17])
def test_counted_strictly_every_release_is_charged_to_every_row(rounds: int, plan: Plan, tmp_path: Path) -> None:
    rate = float(plan.release.event.rdp(Unit.CELL, orders=(4.0,))[0])
    sizes = [plan.schedule.num_rows(number) for number in range(18)]
    # In the first round only a row's own release depends on it; after it, every release does.
    charged = [1 + sum(sizes[1:number]) for number in range(1, 19)]
    room = (charged[rounds - 1] if rounds else 0) + 0.5
    assert charged_rounds(plan, tmp_path / "book.sqlite", order_4_limit(room * rate, "strict")) == rounds


# --- run ---


class Wire:
    """What crossed the wire, read from the bytes alone: kind at 5, round at 32, kind of round at 40."""

    def __init__(self, federation: Federation) -> None:
        self.seen: list[tuple[str, int, bytes]] = []
        federation.taps.append(lambda *message: self.seen.append(message))

    def row_releases(self, plan: Plan) -> Counter[tuple[int, int, int]]:
        """How often each (code, party, row) was released."""
        found: Counter[tuple[int, int, int]] = Counter()
        for direction, party, message in self.seen:
            if direction == "up" and message[5] == EMBEDDING:
                (number,) = struct.unpack_from("<I", message, 32)
                found.update((message[40], party, int(row)) for row in plan.schedule[number].rows)
        return found


def expected_releases(plan: Plan) -> Counter[tuple[int, int, int]]:
    times = {(1, 37): 3, (200, 37): 1, (2, 13): 1}
    return Counter(
        {
            (code, party, row): count
            for (code, rows), count in times.items()
            for party in range(plan.num_parties)
            for row in range(rows)
        }
    )


def test_a_federation_runs_it_and_what_is_counted_was_seen_on_the_wire(
    plan: Plan, data: VerticalDataset, tmp_path: Path
) -> None:
    federation = Federation(plan)
    wire = Wire(federation)
    rate = float(plan.release.event.rdp(Unit.CELL, orders=(4.0,))[0])
    for party in range(3):
        book = Ledger(tmp_path / f"party-{party}.sqlite")
        book.set_limit("small", order_4_limit(100 * rate))
        book.close()
    result = federation.fit(data, ledger=tmp_path)
    seen = wire.row_releases(plan)
    assert seen == expected_releases(plan)
    assert [(use.kind.name, use.releases, use.updates, use.total_releases) for use in result.row_uses] == [
        ("joint", 3, 3, 3 * 37),
        ("rehearsal", 1, 0, 37),
        ("prediction", 1, 0, 13),
    ]
    assert result.privacy() == plan.privacy()
    # every party's own book has the same count
    most = max((Counter({row: seen[1, 0, row] + seen[200, 0, row] for row in range(37)})).values())
    for party in range(3):
        book = Ledger(tmp_path / f"party-{party}.sqlite", read_only=True)
        (kept,) = book.export()["datasets"]["small"]["limits"]
        (entry,) = book.sessions("small")
        book.close()
        assert entry.row_releases == sum(count for (_, who, _), count in seen.items() if who == party)
        assert kept["spent_epsilon"] == pytest.approx(epsilon_at(most * rate, DELTA, 4.0), rel=1e-12)
    # the result's form
    assert type(result).read(_written(result, tmp_path / "result.json")).row_uses == result.row_uses
    assert set(result.metrics) >= {"train_accuracy", "test_accuracy", "train_loss"}


def _written(result: Any, path: Path) -> Path:
    path.write_text(result.to_json())
    return path


def test_its_traffic_is_predicted_to_the_byte(plan: Plan, data: VerticalDataset) -> None:
    for choices in ({}, {"gradient_codec": "int8"}, {"secure_aggregation": False}, {"prediction_num_trials": 90}):
        chosen = plan.replace(**choices)
        federation = Federation(chosen)
        wire = Wire(federation)
        assert federation.fit(data).traffic == chosen.traffic()
        rounds = [message for message in wire.seen if message[2][5] in (5, 6, 7)]
        assert chosen.traffic().bytes_up == sum(len(m) for way, _, m in rounds if way == "up")
        assert chosen.traffic().bytes_down == sum(len(m) for way, _, m in rounds if way == "down")
    # By hand: sums up to 5 * 3 = 15 need 4 bits, three coordinates a row; 4 rounds of 37 rows a pass, 2 of 13.
    a_pass = 4 * HEADER + 3 * math.ceil(4 * 30 / 8) + math.ceil(4 * 21 / 8)
    predicted = 2 * HEADER + math.ceil(4 * 30 / 8) + math.ceil(4 * 9 / 8)
    assert plan.traffic().bytes_up == 3 * (4 * a_pass + predicted)
    gradients = 3 * (37 * 3 * 4) + 3 * HEADER  # the last of an epoch in a message of its own
    assert plan.traffic().bytes_down == 3 * (18 * HEADER + gradients)


def test_a_rehearsal_moves_no_weight(data: VerticalDataset) -> None:
    """In exact sums, so that training is the same to the last bit with it and without it."""
    usual = {"mechanism": "none", "batch_size": 10, "embedding_dim": 3, "learning_rate": 0.1, "seed": 7}
    rehearsed = Plan.for_data(data, **usual, phases=phases(Order.AS_GIVEN), evaluation="released")
    plain = Plan.for_data(data, **usual, num_epochs=3, evaluation="released")
    with_it, without = (Federation(each).fit(data) for each in (rehearsed, plain))
    names = ("epoch", "train_loss", "train_accuracy", "test_accuracy")
    for ours, theirs in zip(with_it.history, without.history, strict=True):
        assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
    assert with_it.metrics == without.metrics


def test_a_run_that_was_killed_while_it_rehearsed_counts_at_least_what_the_wire_saw(
    plan: Plan, data: VerticalDataset, tmp_path: Path
) -> None:
    federation = Federation(plan)
    wire = Wire(federation)

    def kill(done: int, *_: object) -> None:
        if done == 10:  # two of the four rehearsals
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federation.fit(data, checkpoints=tmp_path, on_round=kill)
    result = federation.fit(data, checkpoints=tmp_path)
    seen = wire.row_releases(plan)
    for use in result.row_uses:
        most = max(count for (code, _, _), count in seen.items() if code == use.kind.code)
        total = sum(count for (code, who, _), count in seen.items() if code == use.kind.code and who == 0)
        assert most <= use.releases <= most + 1
        assert total <= use.total_releases <= total + 10  # the round under way counts
    rehearsed = {row: seen[200, 0, row] for row in range(37)}
    assert sorted(Counter(rehearsed.values()).items()) == [(1, 17), (2, 20)]


def test_predictions_between_epochs_are_evaluations_of_their_own(data: VerticalDataset) -> None:
    parts = (
        Phase(kind=JOINT, passes=1),
        Phase(kind=PREDICTION, passes=1),
        Phase(kind=REHEARSAL, passes=1),
        Phase(kind=JOINT, passes=1),
        Phase(kind=PREDICTION, passes=2),
    )
    usual = {"mechanism": "none", "batch_size": 10, "embedding_dim": 3, "learning_rate": 0.5, "seed": 7}
    released = Federation(Plan.for_data(data, **usual, phases=parts, evaluation="released")).fit(data)
    exact = Federation(Plan.for_data(data, **usual, phases=parts)).fit(data)
    # Without noise the released scores are the exact ones.
    assert [line.test_accuracy for line in released.history] == [line.test_accuracy for line in exact.history]
    assert [use.releases for use in released.row_uses] == [2, 3, 1]
