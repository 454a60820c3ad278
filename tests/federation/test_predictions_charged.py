"""Predictions in the ledgers: every row that was released is charged, once for each release, whatever happens between.

The oracle reads the wire and computes what a release costs from the definition of its law; it shares no code with the
books. Kills are real: a child process is ended by SIGKILL wherever it stands.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pbmvfl import FederatedModel, Federation, Ledger, Limit, Plan, ReleaseOptions, load
from pbmvfl.data.new_rows import NewRows
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import BudgetExceeded, LedgerError, ModelError
from pbmvfl.ledger.ledger_folder import ledger_file_of
from pbmvfl.ledger.spending import RowNumbers, spending
from pbmvfl.plan.round_kinds import FUSION
from support.federation_runs import EMBEDDING, forget_answers
from support.ledger_books import kill_after
from support.local_plans import local_plan, voting_plan

ORDER, DELTA = 8.0, 1e-5
PARTIES = ("bank", "shop")
NOISE, RESPONSE = 5.0, 1.5
LOCAL, MEAN, GRAM, PREDICTION = 3, 4, 5, 2


def table() -> VerticalDataset:
    known = np.random.default_rng(5)
    labels = known.integers(0, 2, size=24)
    parts = [(known.normal(size=(24, 3)) + labels[:, None]).astype(np.float32) / 4 for _ in PARTIES]
    return VerticalDataset(
        name="people",
        party_names=PARTIES,
        train_features=tuple(part[:16] for part in parts),
        test_features=tuple(part[16:] for part in parts),
        train_labels=labels[:16],
        test_labels=labels[16:],
        class_names=("no", "yes"),
        default_encoder="linear",
        train_ids=tuple(f"p{row}" for row in range(16)),
        test_ids=tuple(f"p{row}" for row in range(16, 24)),
    )


def plan_of(data: VerticalDataset) -> Plan:
    return voting_plan(
        data,
        noise_multiplier=NOISE,
        prediction_response_epsilon=RESPONSE,
        num_epochs=2,
        batch_size=16,
        evaluation="simulator",
    )


def people(first: int, count: int) -> NewRows:
    """Rows of ten people who are not in the table, by name: the same name is the same row."""
    known = np.random.default_rng(9)
    columns = [known.normal(size=(10, 3)).astype(np.float32) / 4 for _ in PARTIES]
    chosen = [(first + i) % 10 for i in range(count)]
    return NewRows(
        name="people",
        party_names=PARTIES,
        features=tuple(part[chosen] for part in columns),
        ids=tuple(f"new{row}" for row in chosen),
    )


# --- what it costs, from the definitions ---


def gaussian_cost(noise: float, diameter: float) -> float:
    """Renyi divergence of two normal laws whose means are so far apart, in units of their deviation."""
    return ORDER * (diameter / noise) ** 2 / 2


def response_cost() -> float:
    """Of the two most different inputs of randomised response among two symbols: summed over what can be sent."""
    true = math.exp(RESPONSE) / (math.exp(RESPONSE) + 1)
    sent = [(true, 1 - true), (1 - true, true)]
    return math.log(sum(p**ORDER * q ** (1 - ORDER) for p, q in sent)) / (ORDER - 1)


def cost_of_training(plan: Plan) -> float:
    steps = plan.num_epochs * gaussian_cost(NOISE, 2.0)
    statistics = gaussian_cost(plan.mean_noise, 2.0) + gaussian_cost(plan.gram_noise, math.sqrt(2))
    return steps + statistics


def spent_of(book: Path) -> dict[str, float]:
    """Of every row that the book knows by name, at the order of the tests."""
    with contextlib.closing(Ledger(book, read_only=True)) as ledger:
        limit = Limit(unit="cell", accounting="strict", colluding_parties=0, epsilon=1e6, delta=DELTA, order=ORDER)
        rows = RowNumbers(ledger, "people")
        spent = spending(ledger, "people", limit, rows=rows)
        names = [*(f"p{row}" for row in range(24)), *(f"new{row}" for row in range(10))]
        known = {name for entry in ledger.sessions("people") for name in _names(ledger, entry)}
        return {name: float(spent.rows[rows.numbers_of([name], [])[0][0]]) if name in known else 0.0 for name in names}


def _names(ledger: Ledger, entry) -> set[str]:
    return {str(name) for ids in (entry.train_ids, entry.test_ids) for name in ledger.read_ids(ids)}


class Wire:
    """What left party 1, read from bytes alone."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []

    def __call__(self, direction: str, party: int, message: bytes) -> None:
        if direction == "up" and party == 1 and message[5] == EMBEDDING:
            self.sent.append((message[40], struct.unpack_from("<I", message, 32)[0]))


# --- any sequence ---

STEPS = st.one_of(
    st.just(("train",)),
    st.just(("evaluate",)),
    st.tuples(st.just("predict"), st.integers(0, 9), st.integers(1, 6)),
    st.tuples(st.just("killed"), st.integers(0, 9), st.integers(1, 6), st.integers(0, 1)),
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEPS, min_size=2, max_size=6))
def test_books_say_what_was_released_by_any_sequence_of_training_and_predictions(steps, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequence")
    data = table()
    plan = plan_of(data)
    books = folder / "books"
    released: Counter[str] = Counter()
    trained = 0
    #: Releases of killed processes that nobody saw leave: they may be charged or not.
    unsure: Counter[str] = Counter()
    model: FederatedModel | None = None
    try:
        for step in [("train",), *steps]:
            if step[0] == "train":
                federation = Federation(plan)
                model = federation.fit(data, ledger=books, exact_metrics=True).model
                trained += 1
                continue
            assert model is not None
            forget_answers(model)
            wire = Wire()
            model.taps = [wire]
            if step[0] == "killed":
                rows = people(step[1], step[2])
                reports = kill_after(step[3], lambda pipe, rows=rows, model=model: _report(model, rows, pipe))
                (released if reports else unsure).update(rows.ids)
                continue
            rows = people(step[1], step[2]) if step[0] == "predict" else data
            found = model.release(rows)
            assert found.is_known.all()
            assert [kind for kind, _ in wire.sent] == [PREDICTION]
            released.update(found.ids)
        for index, party in enumerate(PARTIES):
            spent = spent_of(ledger_file_of(books, index, party))
            for name, value in spent.items():
                least = released[name] * response_cost()
                if name.startswith("p") and int(name[1:]) < 16:
                    fused = int(name[1:]) in plan.schedule.part_of(FUSION)
                    least += trained * (response_cost() if fused else cost_of_training(plan))
                assert least * (1 - 1e-6) <= value <= (least + unsure[name] * response_cost()) * (1 + 1e-6)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _report(model: FederatedModel, rows: NewRows, pipe: int) -> None:
    """Predict, and say so as soon as party 1's answer is on the wire."""

    def tell(direction: str, party: int, message: bytes) -> None:
        if direction == "up" and party == 1 and message[5] == EMBEDDING:
            os.write(pipe, message[32:36])
            signal.pause()  # until it is killed: it must not end by itself first

    model.taps = [tell]
    model.release(rows)


def test_the_oracle_would_see_a_release_that_nobody_charged(tmp_path):
    """The control of the test above: the same rows, predicted without a ledger, are released and not in the books."""
    data = table()
    model = Federation(plan_of(data)).fit(data, ledger=tmp_path, exact_metrics=True).model
    assert model is not None
    wire = Wire()
    model.taps = [wire]
    model.release(people(0, 3), ReleaseOptions(uncharged=True))
    assert [kind for kind, _ in wire.sent] == [PREDICTION]
    spent = spent_of(ledger_file_of(tmp_path, 1, "shop"))
    assert spent["new0"] < response_cost() / 2


# --- asked again ---


def test_the_same_question_to_the_same_object_is_answered_from_what_was_released(tmp_path):
    data = table()
    model = Federation(plan_of(data)).fit(data, ledger=tmp_path, exact_metrics=True).model
    assert model is not None
    rows = people(0, 4)
    first = model.predict_proba(rows)
    assert np.array_equal(model.predict_proba(rows), first)
    model.predict(rows)
    assert spent_of(ledger_file_of(tmp_path, 0, "bank"))["new1"] == pytest.approx(response_cost())
    model.predict(people(0, 3))  # other rows: another release
    assert spent_of(ledger_file_of(tmp_path, 0, "bank"))["new1"] == pytest.approx(2 * response_cost())
    assert spent_of(ledger_file_of(tmp_path, 0, "bank"))["new3"] == pytest.approx(response_cost())


def test_a_saved_model_keeps_its_answers_and_a_row_asked_again_costs_nothing(tmp_path):
    """Also in another order and by another process's object: a row is known by its id, its values and the weights."""
    data = table()
    model = Federation(plan_of(data)).fit(data, ledger=tmp_path / "books", exact_metrics=True).model
    assert model is not None
    model.save(tmp_path / "m")
    sent: list[list[bytes]] = []
    for first, count in ((0, 4), (0, 4), (1, 2)):
        wire: list[bytes] = []
        loaded = load(tmp_path / "m", ledger=tmp_path / "books")
        loaded.taps = [lambda way, _, message, wire=wire: wire.append(message[44:]) if way == "up" else None]
        loaded.release(people(first, count))
        sent.append(wire[-2:])
    assert sent[0] == sent[1]
    spent = spent_of(ledger_file_of(tmp_path / "books", 0, "bank"))
    assert [spent[f"new{row}"] for row in range(4)] == pytest.approx([response_cost()] * 4)


# --- whose budget ---


def test_training_with_ledgers_makes_predictions_with_ledgers(tmp_path):
    data = table()
    model = Federation(plan_of(data)).fit(data, ledger=tmp_path / "books", exact_metrics=True).model
    assert model is not None
    model.save(tmp_path / "m")
    loaded = load(tmp_path / "m")
    with pytest.raises(ModelError, match="charged to ledgers, and predictions are charged there, too"):
        loaded.predict(people(0, 2))
    for books in (None, tmp_path / "new"):  # nobody who could know of a limit is asked
        with pytest.raises(LedgerError, match="that ledger is not here"):
            loaded.predict(people(0, 2), ReleaseOptions(exact=True, ledger=books))
    assert not (tmp_path / "new").exists()
    loaded.predict(people(0, 2), ReleaseOptions(exact=True, exact_metrics=True))
    loaded.predict(people(0, 2), ReleaseOptions(exact=True, ledger=tmp_path / "books"))
    loaded.predict(people(0, 2), ReleaseOptions(uncharged=True))
    loaded.predict(people(0, 3), ReleaseOptions(ledger=tmp_path / "books"))
    assert spent_of(ledger_file_of(tmp_path / "books", 1, "shop"))["new2"] == pytest.approx(response_cost())


def test_a_limit_is_asked_before_anything_is_released_and_can_be_used_up(tmp_path, monkeypatch):
    import pbmvfl.federation.serving

    data = table()
    model = Federation(plan_of(data)).fit(data, ledger=tmp_path, exact_metrics=True).model
    assert model is not None
    monkeypatch.setattr(pbmvfl.federation.serving, "ROWS_PER_ROUND", 2)
    model.predict(people(2, 2), dataset="others")  # these two have one release already
    limit = Limit.choose(unit="cell", accounting="strict", epsilon=1.5 * RESPONSE, delta=DELTA, order=64.0)
    with contextlib.closing(Ledger(ledger_file_of(tmp_path, 0, "bank"))) as book:
        book.set_limit("others", limit)
    wire = Wire()
    model.taps = [wire]
    with pytest.raises(BudgetExceeded, match="the limit of party='bank' would end this run at round=1 of 3"):
        model.predict(people(0, 6), dataset="others")
    assert not wire.sent
    found = model.release(people(0, 6), ReleaseOptions(until_limit=True), dataset="others")
    assert found.is_known.tolist() == [True, True, False, False, False, False]
    assert found.labels.tolist()[2:] == [None] * 4
    assert "limit" in found.stopped
    assert [number for _, number in wire.sent] in ([0], [0, 1])  # the shop may have answered before the bank refused
    model.predict(people(4, 2), dataset="others")  # other people have their own budget


def test_weights_that_know_rows_without_noise_charge_every_prediction_to_all_of_them(tmp_path):
    data = table()
    plan = Plan.for_data(data, embedding_dim=2, num_epochs=1, batch_size=8, num_trials=4, beta=0.1)
    model = Federation(plan).fit(data, ledger=tmp_path, exact_metrics=True).model
    assert model is not None
    limit = Limit(unit="cell", accounting="strict", colluding_parties=0, epsilon=1e6, delta=DELTA, order=ORDER)

    def everywhere() -> float:
        with contextlib.closing(Ledger(ledger_file_of(tmp_path, 0, "bank"), read_only=True)) as ledger:
            return spending(ledger, "people", limit).everywhere

    before = everywhere()
    each = float(plan.release.event.rdp("cell", _server(), (ORDER,))[0])
    model.predict(people(0, 5))
    assert everywhere() - before == pytest.approx(5 * each)
    noisy = Federation(local_plan(data, noise_multiplier=NOISE)).fit(data, ledger=tmp_path, exact_metrics=True).model
    assert noisy is not None
    before = everywhere()
    noisy.predict(people(0, 5))
    assert everywhere() == before


def _server():
    from pbmvfl.privacy.units import SERVER

    return SERVER
