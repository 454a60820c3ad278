"""Local rounds: what is learned, what crosses the wire, what is charged, what is refused, and what a resume does."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import fractional_matrix_power

from pbmvfl.errors import BudgetExceeded, OutOfOrder, PlanError, ProtocolError, TruncatedMessage, WrongPlan
from pbmvfl.federation.federation import Federation
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit, epsilon_at
from pbmvfl.ledger.spending import spending
from pbmvfl.plan import round_kinds as rounds
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.schedule import Order, Phase
from pbmvfl.privacy.accounting import epsilon_bound, rdp_curve
from pbmvfl.privacy.units import Accounting, Adversary, Unit
from pbmvfl.wire.messages import SERVER, Message, MessageKind
from support.cohorts import Cohort, small_data
from support.federation_runs import (
    EMBEDDING,
    Killed,
    Wire,
    counted_uses,
    fitted,
    killer,
    set_limit,
    shown_uses,
    spans_of,
    weights,
)
from support.ledger_books import opening
from support.local_plans import FUSION, GRAM, LOCAL, MEAN, WHITENED, local_plan, trained_in_numpy, voting_plan

HEADER = 44
DATA = small_data(num_parties=3, num_samples=37, num_test_samples=13)
K = DATA.num_classes


# --- what is learned ---


def weights_of(party: Any) -> tuple[np.ndarray, np.ndarray]:
    weight, bias = party.encoder.parameters()
    return weight.detach().numpy(), bias.detach().numpy()


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"loss": "squared"},
        {"momentum": 0.9, "nesterov": True, "averaging": 0.5},
        {"momentum": 0.8, "loss": "squared", "averaging": 0.3, "learning_rate": 0.05},
        {"activation": "tanh", "bound": 2.0, "momentum": 0.9},
        {"batch_size": 37, "num_epochs": 12, "averaging": 0.99},
    ],
    ids=str,
)
def test_parties_learn_what_one_loop_over_their_own_columns_learns(choices):
    plan = local_plan(DATA, **choices)
    cohort = Cohort(plan, DATA)
    assert cohort.run() is None
    for party, columns in zip(cohort.parties, DATA.train_features, strict=True):
        assert party.fault is None
        for found, expected in zip(weights_of(party), trained_in_numpy(plan, columns, DATA.train_labels), strict=True):
            assert np.abs(expected).max() > 0.05
            np.testing.assert_allclose(found, expected, atol=1e-5)


def no_noise(_: Any, count: int) -> np.ndarray:
    """Stands in for the sampler: what is left is clipping and rounding."""
    return np.zeros(count, dtype=np.int64)


def test_noisy_steps_without_their_noise_are_clipped_ones(monkeypatch):
    monkeypatch.setattr("pbmvfl.training.fixed_point_grid.rounded_normal", no_noise)
    plan = local_plan(DATA, noise_multiplier=3.0, clip_norm=0.7, momentum=0.9, nesterov=True, averaging=0.5)
    cohort = Cohort(plan, DATA)
    cohort.run()
    unlike = 0.0
    for party, columns in zip(cohort.parties, DATA.train_features, strict=True):
        expected = trained_in_numpy(plan, columns, DATA.train_labels, clipped=True)
        for found, each in zip(weights_of(party), expected, strict=True):
            np.testing.assert_allclose(found, each, atol=1e-5)
        unlike += float(np.abs(trained_in_numpy(plan, columns, DATA.train_labels)[0] - expected[0]).max())
    assert unlike > 0.1  # without clipping it would be something else


def test_whitening_is_the_inverse_root_of_the_clipped_rows_second_moments(monkeypatch):
    monkeypatch.setattr("pbmvfl.training.fixed_point_grid.rounded_normal", no_noise)
    plan = local_plan(DATA, num_epochs=1, **WHITENED)
    cohort = Cohort(plan, DATA)
    cohort.run()
    for party, columns in zip(cohort.parties, DATA.train_features, strict=True):
        rows = columns.astype(np.float64)
        columns_of = rows.shape[1]

        def clipped(rows: np.ndarray, norm: float) -> np.ndarray:
            return rows * np.minimum(1, norm / np.linalg.norm(rows, axis=1, keepdims=True))

        mean = clipped(rows, math.sqrt(columns_of)).mean(axis=0)
        radius = 0.8 * math.sqrt(columns_of)
        inside = clipped(rows - mean, radius)
        ridge = 0.5 * 5.0 * radius**2 / len(rows) * math.sqrt(2 * columns_of)
        root = fractional_matrix_power(inside.T @ inside / len(rows) + ridge * np.eye(columns_of), -0.5)
        (found,) = party.rows.pieces(rounds.Split.TRAIN)
        np.testing.assert_allclose(found, inside @ root, atol=1e-4)
        # and the rows that are predicted are prepared by what was learned of those that train
        test = clipped(DATA.test_features[party.index] - mean, radius) @ root
        (found,) = party.rows.pieces(rounds.Split.TEST)
        np.testing.assert_allclose(found, test, atol=1e-4)


# --- what crosses the wire ---


@pytest.mark.parametrize(
    "plan",
    [
        local_plan(DATA),
        (local_plan(DATA, noise_multiplier=5.0, batch_size=37, **WHITENED)),
        voting_plan(DATA),
        voting_plan(
            DATA,
            vote="shares",
            num_fusion_samples=0,
            prediction_mechanism="laplace",
            prediction_scale=8.0,
            prediction_secure_aggregation=True,
        ),
    ],
    ids=["plain", "whitened", "krr", "laplace"],
)
def test_traffic_is_predicted_to_the_byte(plan):
    federation = Federation(plan)
    wire = Wire(federation)
    result = federation.fit(DATA)
    assert result.traffic == plan.traffic()
    assert result.traffic.total == sum(len(message) for *_, message in wire.messages)
    for direction, _, message in wire.messages:
        if direction == "up" and message[5] == EMBEDDING and message[40] in (LOCAL, MEAN, GRAM):
            assert len(message) == HEADER  # that it is done, and no more
    labels = [message[HEADER:] for _, _, message in wire.messages if message[5] == MessageKind.LABELS]
    sent = DATA.train_labels[plan.schedule.part_of(rounds.LOCAL)]  # those of fusion rows stay with their holder
    assert labels == [sent.astype(np.uint8).tobytes()] * plan.num_parties
    assert "test_accuracy" in result.metrics  # how right thirteen noisy rows are is chance


ODD_PHASES = {
    "fusion after, and two passes of predictions": [
        (rounds.MEAN, 1),
        (rounds.GRAM, 1),
        (rounds.LOCAL, 2),
        (rounds.LOCAL, 1),
        (rounds.FUSION, 1),
        (rounds.PREDICTION, 2),
        (rounds.PREDICTION, 1),
    ],
    "local and joint in turn": [(rounds.LOCAL, 2), (rounds.JOINT, 2), (rounds.LOCAL, 1), (rounds.JOINT, 1)],
}


@pytest.mark.parametrize("name", ODD_PHASES)
def test_rounds_in_any_order_run_and_are_counted(name):
    joint = any(kind is rounds.JOINT for kind, _ in ODD_PHASES[name])
    mixed = {"training": "joint", "mechanism": "pbm", "num_trials": 4, "activation": "tanh", "noise_multiplier": 4.0}
    flat = (local_plan(DATA, **mixed) if joint else voting_plan(DATA)).flat()
    for each in ("num_epochs", "training"):
        flat.pop(each)
    phases = tuple(Phase(kind=kind, passes=passes, order=Order.AS_GIVEN) for kind, passes in ODD_PHASES[name])
    plan = Plan.of(**flat, phases=phases)
    assert Plan.of(**plan.flat()) == plan == Plan.from_json(plan.to_json())
    result = Federation(plan).fit(DATA)
    assert result.traffic == plan.traffic()
    for use in result.row_uses:
        passes = sum(each for kind, each in ODD_PHASES[name] if kind == use.kind)
        assert use.updates == (passes if use.kind.updates else 0)
        assert use.releases == (passes if use.kind.releases else 0)


@pytest.mark.parametrize(
    "plan",
    [
        local_plan(DATA, loss="squared", averaging=0.25),
        local_plan(DATA, noise_multiplier=5.0, **WHITENED),
        voting_plan(DATA),
        voting_plan(DATA, prediction_bound=2.0),
        local_plan(
            DATA,
            training="joint",
            num_epochs=2,
            mechanism="pbm",
            num_trials=3,
            activation="tanh",
            noise_multiplier=4.0,
            **WHITENED,
        ),
        voting_plan(DATA).replace(evaluation="simulator"),
    ],
    ids=str,
)
def test_plans_are_the_same_after_every_form(plan):
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.of(**plan.flat()) == plan
    assert Plan.from_json(plan.to_json()).hash == plan.hash == plan.replace().hash


# --- what is charged ---

#: Everything that a party's book can charge, with how often.
USES = {"mean": 1, "gram": 1, "local": 3}


def test_every_party_s_book_charges_exactly_the_uses(tmp_path):
    plan = voting_plan(DATA)
    fused = plan.schedule.part_of(rounds.FUSION)
    result, wire = fitted(plan, DATA, ledger=tmp_path)
    assert shown_uses(result.row_uses) == counted_uses(plan, spans_of(result)) | {
        name: (0, uses, 0) for name, uses in USES.items()
    }
    for order in (2.0, 8.0):
        for unit, honest in ((Unit.CELL, 1), (Unit.RECORD, 3)):
            # By hand: Renyi divergences of Gaussians, order * shift^2 / 2, at each of the honest parties.
            shifts = {"mean": 2 / 4.0, "gram": math.sqrt(2) / 5.0, "local": 2 / 6.0}
            by_hand = honest * sum(uses * order * shifts[name] ** 2 / 2 for name, uses in USES.items())
            # And of one symbol of three with a pure epsilon of 2.
            high, low = (math.exp(2.0) / (math.exp(2.0) + 2), 1 / (math.exp(2.0) + 2))
            symbol = honest * math.log(high**order * low ** (1 - order) + low**order * high ** (1 - order) + low)
            symbol /= order - 1
            curve = rdp_curve(plan.training_run().of_split("train"), unit, Accounting.STRICT, orders=(order,))
            assert curve[0] == pytest.approx(max(by_hand, symbol), rel=1e-6)
            limit = Limit(
                unit=unit, accounting=Accounting.STRICT, colluding_parties=0, epsilon=1.0, delta=1e-5, order=order
            )
            for party in range(plan.num_parties):
                book = Ledger(tmp_path / f"party-{party}.sqlite", read_only=True)
                spent = spending(book, DATA.name, limit)
                # Rows are numbered through: those that train, fusion rows among them, and those that are predicted.
                expected = np.full(DATA.num_samples, by_hand)
                expected[fused] = symbol
                np.testing.assert_allclose(spent.rows[: DATA.num_samples], expected, rtol=1e-6)
                whole = rdp_curve(plan.training_run(), unit, Accounting.STRICT, orders=(order,))[0]
                assert spent.worst == pytest.approx(whole, rel=1e-12)
                book.close()
    assert len(wire.embeddings(LOCAL)) == 3 * 4 * 3


def test_a_record_pays_for_the_updates_of_every_honest_party():
    run = local_plan(DATA, noise_multiplier=5.0, **WHITENED).training_run()
    cell = rdp_curve(run, Unit.CELL, Accounting.STRICT)
    for colluding, honest in ((0, 3), (1, 2), (2, 1)):
        record = rdp_curve(run, Unit.RECORD, Accounting.STRICT, Adversary(colluding_parties=colluding))
        np.testing.assert_allclose(record, honest * cell, rtol=1e-12)


def test_a_limit_ends_the_run_before_it_is_crossed(tmp_path):
    plan = voting_plan(DATA)
    order, shifts = 4.0, [2 / 4.0, math.sqrt(2) / 5.0, 2 / 6.0, 2 / 6.0]
    room = sum(order * shift**2 / 2 for shift in shifts) * 1.0001  # mean, gram and two epochs
    limit = Limit.choose(
        unit="cell", accounting="strict", epsilon=epsilon_at(room, 1e-5, order), delta=1e-5, order=order
    )
    set_limit(tmp_path / "party-1.sqlite", DATA.name, limit)
    for party in (0, 2):
        set_limit(
            tmp_path / f"party-{party}.sqlite",
            DATA.name,
            Limit.choose(unit="cell", accounting="strict", epsilon=50.0, delta=1e-5, order=order),
        )
    result, _ = fitted(plan, DATA, ledger=tmp_path, checkpoints=tmp_path / "run", until_limit=True)
    assert "limit" in result.stopped
    book = Ledger(tmp_path / "party-1.sqlite", read_only=True)
    assert spending(book, DATA.name, limit).within_limit()
    assert book.sessions(DATA.name)[0].charged_until == 2 + 2 * 4  # two statistics, two epochs of four batches
    book.close()
    # Others had taken the step of the refused round: the run goes on from what all have kept, if the owner allows more.
    set_limit(
        tmp_path / "party-1.sqlite",
        DATA.name,
        Limit.choose(unit="cell", accounting="strict", epsilon=60.0, delta=1e-5, order=order),
    )
    result, _ = fitted(plan, DATA, ledger=tmp_path, checkpoints=tmp_path / "run")
    assert not result.stopped
    assert [session.first_round for session in result.sessions] == [0, 10]


@pytest.mark.parametrize("at", [0, 1, 4, 12])
def test_whoever_learned_in_a_round_that_another_refused_takes_a_stop(at):
    """In the middle of a statistic or of an epoch; nothing is kept that the others do not have."""
    cohort = Cohort(voting_plan(DATA), DATA)
    cohort.parties[2].guard_with(Refuses(at))
    with pytest.raises(BudgetExceeded):
        cohort.run()
    kept: list[int] = []
    for party in cohort.parties:
        party.keep_with(Kept(kept))
        assert party.answer(cohort.server.stop()) == b""
    assert kept == [at]  # of the one that refused alone


class Kept:
    """A keeper that says what it was given to keep."""

    def __init__(self, kept: list[int]) -> None:
        self.kept = kept

    def save(self, _run_id: bytes, completed: int, _state: dict[str, torch.Tensor]) -> None:
        self.kept.append(completed)


class Refuses:
    """A guard whose owner's limit is reached at one round."""

    def __init__(self, at: int) -> None:
        self.at = at

    def charge(self, current: Any, events: Any) -> None:
        del events
        if current.number >= self.at:
            raise BudgetExceeded(f"round={current.number}")

    def close(self) -> None: ...


@pytest.mark.parametrize("at", [0, 1, 2, 5, 14])
def test_nothing_moves_after_a_refusal(at):
    plan = voting_plan(DATA)
    cohort = Cohort(plan, DATA)
    guarded = cohort.parties[1]
    guarded.guard_with(Refuses(at))
    before: dict[str, torch.Tensor] = {}

    def remember(party: Any, _: bytes) -> None:
        if party is guarded:
            before.clear()
            before.update({name: value.clone() for name, value in party.kept_state().items()})

    with pytest.raises(BudgetExceeded):
        cohort.run(before_party=remember)
    for name, value in guarded.kept_state().items():
        assert torch.equal(value, before[name]), name
    assert guarded.completed_rounds == at


# --- what the account must not forget ---


def epsilon(plan: Plan, unit: Unit = Unit.CELL) -> float:
    return epsilon_bound(plan.training_run(), unit, Accounting.STRICT, delta=1e-5).epsilon


def test_local_steps_without_noise_make_every_prediction_a_release_about_every_training_row():
    """Weights know the rows exactly, and 13 predictions carry them out; a count of 0 would be wrong."""
    plan = local_plan(
        DATA,
        evaluation="released",
        vote="shares",
        prediction_mechanism="laplace",
        prediction_scale=128.0,
        prediction_secure_aggregation=True,
    )
    run = plan.training_run()
    assert run.first_batch == 1
    noisy = plan.replace(noise_multiplier=6.0)
    assert (
        epsilon(plan)
        > 5 * epsilon_bound(noisy.training_run().of_split("test"), Unit.CELL, Accounting.STRICT, delta=1e-5).epsilon
    )


def test_preparation_takes_away_the_discount_of_a_first_round():
    """Without noise on updates a first batch of joint rounds is charged for its own rows alone, unless columns were
    prepared before it by numbers that depend on all rows."""
    joint = {"training": "joint", "mechanism": "pbm", "num_trials": 2, "activation": "tanh", "num_epochs": 1}
    bare, prepared = local_plan(DATA, **joint), local_plan(DATA, **joint, **WHITENED)
    assert bare.training_run().first_batch == 10
    assert prepared.training_run().first_batch == 1
    assert epsilon(bare) < epsilon(prepared)


@pytest.mark.parametrize("noise", [0.0, 6.0])
@pytest.mark.parametrize("unit", [Unit.CELL, Unit.RECORD, Unit.PARTY])
@pytest.mark.parametrize("accounting", list(Accounting))
def test_the_ledger_counts_local_plans_as_the_account_does(noise, unit, accounting, tmp_path):
    for number, plan in enumerate(
        [
            voting_plan(DATA, noise_multiplier=noise),
            voting_plan(DATA, noise_multiplier=noise, preparation="none", batch_size=37),
            local_plan(DATA, noise_multiplier=noise),
        ]
    ):
        run = plan.training_run()
        limit = Limit(unit=unit, accounting=accounting, colluding_parties=0, epsilon=1.0, delta=1e-5, order=4.0)
        book = Ledger(tmp_path / f"{number}.sqlite")
        opened = book.open_session(
            opening(
                dataset="d",
                plan=plan,
                run="run",
                session="s",
                exact_metrics=True,
                public_start=True,
                train_ids=[f"train {row}" for row in range(37)],
                test_ids=[f"test {row}" for row in range(13)],
            )
        )
        for current in plan.schedule:
            opened.charge(current, plan.events(current.kind))
        found = spending(Ledger(tmp_path / f"{number}.sqlite", read_only=True), "d", limit)
        expected = rdp_curve(run, unit, accounting, orders=(4.0,))[0]
        assert math.isfinite(expected)
        assert found.worst == pytest.approx(expected, rel=1e-9)
        opened.close()


# --- killed, and continued ---


@pytest.mark.parametrize(
    ("then", "kills"), [("in-process", (1, 3)), pytest.param("processes", (4,), marks=pytest.mark.slow)]
)
def test_a_resumed_run_learns_the_same_bits(then, kills, tmp_path):
    """Killed before the average begins, or in the midst of it, and continued in processes too."""
    data = small_data(num_parties=2, num_samples=37)
    plan = local_plan(data, num_epochs=6, momentum=0.9, nesterov=True, averaging=0.5, learning_rate=0.1)
    Federation(plan).fit(data, checkpoints=tmp_path / "whole")
    for epochs in kills:
        left = [epochs]

        def kill(*_: object, left: list[int] = left) -> None:
            left[0] -= 1
            if not left[0]:
                raise Killed

        with pytest.raises(Killed):
            Federation(plan).fit(data, checkpoints=tmp_path / "parts", on_epoch=kill)
    result = Federation(plan, parties=then).fit(data, checkpoints=tmp_path / "parts")
    assert [session.first_round for session in result.sessions] == [0, *4 * np.cumsum(kills)]
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for role in whole:
        for name, value in whole[role].items():
            assert torch.equal(value, parts[role][name]), (role, name)


@pytest.mark.slow
def test_processes_send_as_many_bytes():
    data = small_data(num_parties=2, num_samples=20, num_test_samples=5)
    plan = voting_plan(data, batch_size=20)
    result = Federation(plan, parties="processes").fit(data)
    assert result.traffic == plan.traffic()
    assert result.metrics["test_accuracy"] >= 0


@pytest.mark.parametrize("at", [1, 4, 7, 13, 26, 39, 43, 47])
def test_rounds_that_run_again_are_charged_again_and_nothing_is_lost(at, tmp_path):
    """Killed after the n-th answer: in mean, gram, any epoch, fusion rows or predictions; three answers a round."""
    plan = voting_plan(DATA)
    federation = Federation(plan)
    seen: list[tuple[int, int]] = []

    def kill(direction: str, party: int, message: bytes) -> None:
        if direction == "up" and message[5] == EMBEDDING:
            seen.append((party, struct.unpack_from("<I", message, 32)[0]))
            if len(seen) == at:
                raise Killed

    federation.taps.append(kill)
    with pytest.raises(Killed):
        federation.fit(DATA, checkpoints=tmp_path / "run", ledger=tmp_path)
    again = Federation(plan)
    again.taps.append(
        lambda direction, party, message: (
            seen.append((party, struct.unpack_from("<I", message, 32)[0]))
            if direction == "up" and message[5] == EMBEDDING
            else None
        )
    )
    result = again.fit(DATA, checkpoints=tmp_path / "run", ledger=tmp_path)
    limit = Limit(unit=Unit.CELL, accounting=Accounting.STRICT, colluding_parties=0, epsilon=1.0, delta=1e-5, order=4.0)
    price = {}
    for kind in plan.schedule.kinds:
        (event,) = plan.events(kind)
        price[kind] = (event.rdp(orders=(4.0,)) if kind.updates else event.rdp(Unit.CELL, orders=(4.0,)))[0]
    for party in range(3):
        sent = np.zeros(DATA.num_samples)
        for sender, number in seen:
            current = plan.schedule[number]
            if sender == party and current.kind.split is rounds.Split.TRAIN:
                # The same answer to a fusion row again, from the party's store, tells nothing new.
                again = 0.0 if current.kind.fuses else sent[current.rows]
                sent[current.rows] = again + price[current.kind]
        book = Ledger(tmp_path / f"party-{party}.sqlite", read_only=True)
        spent = spending(book, DATA.name, limit).rows[: DATA.num_samples]
        assert (spent >= sent - 1e-12).all()
        book.close()
    assert shown_uses(result.row_uses) == counted_uses_without_releases(plan, spans_of(result))
    assert result.sessions[-1].charged_until == len(plan.schedule)


def counted_uses_without_releases(plan: Plan, spans: list[tuple[int, int]]) -> dict[str, tuple[int, int, int]]:
    """`counted_uses`, where rounds that release nothing have no releases."""
    releasing = {kind.name for kind in plan.schedule.kinds if kind.releases}
    return {
        name: (most if name in releasing else 0, updates, total if name in releasing else 0)
        for name, (most, updates, total) in counted_uses(plan, spans).items()
    }


# --- refusals ---


def keyed(plan: Plan) -> Cohort:
    """Up to where labels would come."""
    cohort = Cohort(plan, DATA)
    cohort.run(until=lambda message: message[5] in (MessageKind.LABELS, MessageKind.ROUND))
    return cohort


def message(cohort: Cohort, kind: MessageKind, **fields: Any) -> bytes:
    session = cohort.server.session
    assert session is not None
    return Message(kind, SERVER, run_id=cohort.server.run_id, session_id=session.id, **fields).to_bytes()


def ask(cohort: Cohort, number: int, kind: int | None = None) -> bytes:
    code = cohort.plan.schedule.kind(number).code if kind is None else kind
    return message(cohort, MessageKind.ROUND, round_number=number, round_kind=code)


GOOD = DATA.train_labels.astype(np.uint8).tobytes()


def test_local_rounds_wait_for_labels():
    cohort = keyed(local_plan(DATA))
    party = cohort.parties[0]
    with pytest.raises(OutOfOrder, match="need labels, and none came"):
        party.answer(ask(cohort, 0))
    assert party.answer(message(cohort, MessageKind.LABELS, payload=GOOD)) == b""
    assert party.answer(ask(cohort, 0))[5] == EMBEDDING


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b"", TruncatedMessage),
        (GOOD[:-1], TruncatedMessage),
        (GOOD + b"\0", TruncatedMessage),
        (GOOD[:-1] + bytes([K]), ProtocolError),
        (b"\xff" * 37, ProtocolError),
    ],
)
def test_labels_that_are_none_are_refused_and_others_may_follow(payload, error):
    cohort = keyed(local_plan(DATA))
    party = cohort.parties[0]
    with pytest.raises(error, match="label"):
        party.answer(message(cohort, MessageKind.LABELS, payload=payload))
    with pytest.raises(OutOfOrder, match="none came"):
        party.answer(ask(cohort, 0))
    party.answer(message(cohort, MessageKind.LABELS, payload=GOOD))


def test_labels_come_once_and_where_the_plan_sends_them():
    cohort = keyed(local_plan(DATA))
    party = cohort.parties[0]
    party.answer(message(cohort, MessageKind.LABELS, payload=GOOD))
    others = bytes(37)
    with pytest.raises(OutOfOrder, match="once"):
        party.answer(message(cohort, MessageKind.LABELS, payload=others))
    assert party.network.labels.tolist() == DATA.train_labels.tolist()
    joint = keyed(local_plan(DATA, training="joint", labels="server", activation="tanh", mechanism="pbm"))
    with pytest.raises(WrongPlan, match="labels=server"):
        joint.parties[0].answer(message(joint, MessageKind.LABELS, payload=GOOD))
    early = Cohort(local_plan(DATA), DATA)
    with pytest.raises(OutOfOrder, match="handshake"):
        early.parties[0].answer(Message(MessageKind.LABELS, SERVER, payload=GOOD).to_bytes())


def test_an_epoch_ends_where_it_ends():
    cohort = keyed(local_plan(DATA))
    party = cohort.parties[0]
    party.answer(message(cohort, MessageKind.LABELS, payload=GOOD))

    def update(number: int, **fields: Any) -> bytes:
        return message(cohort, MessageKind.UPDATE, round_number=number, round_kind=LOCAL, **fields)

    with pytest.raises(OutOfOrder):
        party.answer(update(0))  # before any round
    for number in range(4):
        party.answer(ask(cohort, number))
        kept = party.kept_state()
        if number < 3:
            with pytest.raises(OutOfOrder, match="ends an epoch"):
                party.answer(update(number))
        else:
            with pytest.raises(TruncatedMessage, match="none belongs"):
                party.answer(update(number, payload=b"123"))
        with pytest.raises(OutOfOrder, match="does not wait for a gradient"):
            party.answer(update(number, carries_gradient=True, payload=bytes(4 * 10 * K)))
        assert all(torch.equal(value, kept[name]) for name, value in party.kept_state().items())
    assert party.answer(update(3)) == b""


@pytest.mark.parametrize("kind", [1, 2, MEAN, GRAM, FUSION, 77])
def test_a_round_of_another_kind_is_refused(kind):
    cohort = keyed(local_plan(DATA))
    party = cohort.parties[0]
    party.answer(message(cohort, MessageKind.LABELS, payload=GOOD))
    with pytest.raises(WrongPlan, match="the plan has local"):
        party.answer(ask(cohort, 0, kind))
    assert party.completed_rounds == 0


def test_asked_again_a_local_round_is_neither_run_nor_charged_again():
    cohort = keyed(local_plan(DATA, noise_multiplier=5.0))
    party = cohort.parties[0]
    charged: list[int] = []

    class Counting(Refuses):
        def charge(self, current: Any, events: Any) -> None:
            super().charge(current, events)
            charged.append(current.number)

    party.guard_with(Counting(99))
    party.answer(message(cohort, MessageKind.LABELS, payload=GOOD))
    answer = party.answer(ask(cohort, 0))
    kept = party.kept_state()
    assert party.answer(ask(cohort, 0)) == answer
    assert charged == [0]
    assert all(torch.equal(value, kept[name]) for name, value in party.kept_state().items())
    with pytest.raises(OutOfOrder):
        party.answer(ask(cohort, 2))


@pytest.mark.parametrize(
    "labels",
    [bytes(37), bytes([K - 1]) * 37, bytes(i % K for i in range(37)), GOOD[::-1]],
    ids=["all of the first class", "all of the last", "in turn", "backwards"],
)
def test_whatever_labels_a_server_sends_answers_have_the_same_form(labels):
    """A server may send what it likes, other labels in every session too; nobody fails and no length changes."""
    plan = voting_plan(DATA)
    forms = []
    for payload in (GOOD, labels):
        cohort = keyed(plan)
        out = []
        for party in cohort.parties:
            known = payload[: plan.num_network_samples]
            assert party.receive(message(cohort, MessageKind.LABELS, payload=known)) == b""
            for number in range(len(plan.schedule)):
                answer = party.receive(ask(cohort, number))
                out.append((answer[5], answer[32:44], len(answer)))
            assert party.fault is None
            assert all(torch.isfinite(value).all() for value in party.kept_state().values())
        forms.append(out)
    assert forms[0] == forms[1]
    assert {kind for kind, *_ in forms[0]} == {EMBEDDING}


def test_sessions_with_other_labels_go_on(tmp_path):
    plan = local_plan(DATA, noise_multiplier=5.0, num_epochs=4)
    with pytest.raises(Killed):
        Federation(plan).fit(DATA, checkpoints=tmp_path, on_epoch=killer())
    other = small_data(num_parties=3, num_samples=37, num_test_samples=13)
    other.train_labels[:] = 0
    result = Federation(plan).fit(other, checkpoints=tmp_path)
    assert len(result.sessions) == 2
    assert all(math.isfinite(value) for value in result.metrics.values())


# --- plans that are refused ---


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"labels": "server"}, "labels=server, but local rounds"),
        ({"embedding_dim": 5}, "must be num_classes=3"),
        ({"mean_noise": 3.0, "gram_noise": 0.0, "preparation": "whiten"}, "gram_noise=0 must be above 0"),
        ({"gram_clip": 1e-200, "mean_noise": 1, "gram_noise": 1, "preparation": "whiten"}, "must be in"),
        ({"num_fusion_samples": 5}, "give prediction_mechanism, head=fixed"),
        ({"noise_multiplier": 5.0, "encoder": "resnet18-batchnorm"}, "couples the rows"),
    ],
)
def test_plans_that_cannot_hold_are_refused(choices, words):
    with pytest.raises(PlanError, match=words):
        local_plan(DATA, **choices)


def test_counts_of_earlier_versions_are_refused_with_words_to_train_again():
    flat = local_plan(DATA).flat()
    phases = tuple(Phase(kind=kind, passes=1, order=Order.AS_GIVEN) for kind in (rounds.LOCAL, rounds.COUNTS))
    for name in ("training", "num_epochs"):
        del flat[name]
    with pytest.raises(PlanError, match=r"counts votes, as plans of earlier versions did.*train again"):
        Plan.of(**flat, phases=phases)
    old = voting_plan(DATA).to_dict()
    old["voting"] = {**old["voting"], "table_noise": 5.0}
    with pytest.raises(PlanError, match="train again"):
        Plan.from_dict(old)
