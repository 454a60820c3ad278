"""A run whose predictions are asked for again: the same bytes, and no second charge."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pbmvfl import Federation, Limit, Plan, load
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import AnswersError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.plan.round_kinds import PREDICTION as PREDICTED
from pbmvfl.protocol.stored_answers import StoredAnswers
from support.charged_rows import charged_predictions
from support.ledger_books import kill_after

EMBEDDING, REFUSAL, PREDICTION = 6, 10, 2
#: Test rows, as ledgers number them: after seventy training rows.
ROWS = [str(row) for row in range(70, 90)]


@pytest.fixture
def data() -> VerticalDataset:
    known = np.random.default_rng(5)
    labels = known.integers(0, 3, size=90)
    parts = [known.normal(size=(90, 4)).astype(np.float32).clip(-1, 1) + 0.1 * labels[:, None] for _ in range(3)]
    return VerticalDataset(
        name="small",
        party_names=("a", "b", "c"),
        train_features=tuple(part[:70].astype(np.float32) for part in parts),
        test_features=tuple(part[70:].astype(np.float32) for part in parts),
        train_labels=labels[:70],
        test_labels=labels[70:],
        class_names=("x", "y", "z"),
        default_encoder="linear",
    )


def plan_for(data: VerticalDataset, **choices: object) -> Plan:
    usual = {
        "training": "local",
        "labels": "parties",
        "head": "fixed",
        "mechanism": "none",
        "embedding_dim": 3,
        "activation": "none",
        "num_epochs": 2,
        "batch_size": 70,
        "noise_multiplier": 4.0,
        "evaluation": "released",
        "vote": "top",
        "num_fusion_samples": 4,
        "prediction_mechanism": "krr",
        "prediction_symbols": 3,
        "prediction_response_epsilon": 2.0,
    }
    return Plan.for_data(data, **{**usual, **choices})


def predictions(seen: list[tuple[str, int, bytes]]) -> list[tuple[int, bytes]]:
    """Every party's payloads in rounds of predictions: kind at 5, kind of round at 40."""
    return [
        (party, message[44:])
        for way, party, message in seen
        if way == "up" and message[5] == EMBEDDING and message[40] == PREDICTION
    ]


def run_twice(data: VerticalDataset, plan: Plan, tmp_path: Path) -> tuple[list[tuple[int, bytes]], ...]:
    """The predictions of a run that was killed after its last round, and those of its resume."""
    federation = Federation(plan)
    seen: list[tuple[str, int, bytes]] = []
    federation.taps.append(lambda *message: seen.append(message))

    def kill(done: int, *_: object) -> None:
        if done == len(plan.schedule):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federation.fit(data, checkpoints=tmp_path / "run", ledger=tmp_path / "books", on_round=kill)
    first = predictions(seen)
    seen.clear()
    federation.fit(data, checkpoints=tmp_path / "run", ledger=tmp_path / "books")
    return first, predictions(seen)


def test_symbols_that_were_sent_are_sent_again_and_charged_once(data: VerticalDataset, tmp_path: Path) -> None:
    plan = plan_for(data)
    first, again = run_twice(data, plan, tmp_path)
    assert len(first) == 3
    assert again == first
    assert charged_predictions(tmp_path / "books" / "a.sqlite", "small") == Counter(ROWS)


def several_rounds(data: VerticalDataset) -> Plan:
    """Twenty test rows in four rounds of predictions, after the counts of votes."""
    return plan_for(data, batch_size=6)


@pytest.mark.parametrize("sent", [0, 1, 3])
def test_a_run_that_was_killed_between_predictions_charges_each_test_row_once(
    data: VerticalDataset, tmp_path: Path, sent: int
) -> None:
    """Killed for good, in a process of its own, after so many rounds of predictions; then resumed in this one."""
    plan = several_rounds(data)
    rounds = plan.schedule.num_rounds(PREDICTED)
    kept = {"checkpoints": tmp_path / "run", "ledger": tmp_path / "books"}

    def predict_and_wait(pipe: int) -> None:
        def report(done: int, *_: object) -> None:
            if done == len(plan.schedule) - rounds + sent:
                os.write(pipe, done.to_bytes(4, "little"))
                signal.pause()  # until it is killed

        Federation(plan).fit(data, on_round=report, **kept)

    kill_after(1, predict_and_wait)
    charged = [charged_predictions(tmp_path / "books" / f"{party}.sqlite", "small") for party in "abc"]
    assert charged == [Counter(ROWS[: 6 * sent])] * 3
    with contextlib.closing(Ledger(tmp_path / "books" / "a.sqlite")) as book:
        book.set_limit("small", Limit.choose(unit="cell", accounting="paper", epsilon=1e4, delta=1e-5))
    for ahead in Federation(plan).forecast(data, tmp_path / "books", checkpoints=tmp_path / "run"):
        known = len(ROWS) - (len(ROWS) if ahead.charged_rows is None else ahead.charged_rows)
        assert known == 6 * sent
    result = Federation(plan).fit(data, **kept)
    assert not result.stopped
    for party in "abc":
        assert charged_predictions(tmp_path / "books" / f"{party}.sqlite", "small") == Counter(ROWS)
        with contextlib.closing(Ledger(tmp_path / "books" / f"{party}.sqlite", read_only=True)) as book:
            assert book.trouble() is None


@pytest.mark.parametrize("links", [True, False], ids=["one file", "copies"])
def test_test_rows_that_training_released_are_known_to_the_model(
    data: VerticalDataset, tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:

        def refuse(*_: object) -> None:
            raise OSError("no links on this disk")

        monkeypatch.setattr(os, "link", refuse)
    books = tmp_path / "books"
    result = Federation(several_rounds(data)).fit(data, checkpoints=tmp_path / "run", ledger=books)
    assert result.model is not None
    once = Counter(ROWS)
    assert charged_predictions(books / "a.sqlite", "small") == once
    found = result.model.release(data)  # before there is a folder of the model
    assert found.metrics() == {name: result.released[name] for name in found.metrics()}
    folder = result.model.save(tmp_path / "model")
    for model in (result.model, load(folder, ledger=books), load(load(folder).save(tmp_path / "other"), ledger=books)):
        model._released.clear()
        assert np.array_equal(model.release(data).scores_NK, found.scores_NK)
    for party in "abc":
        assert charged_predictions(books / f"{party}.sqlite", "small") == once
        stores = [tmp_path / "run" / f"party-{'abc'.index(party)}", folder / party, tmp_path / "other" / party]
        assert len({(store / "answers" / "answers").stat().st_ino for store in stores}) == (1 if links else 3)
        assert all((store / "answers" / "answers").stat().st_mode & 0o777 == 0o600 for store in stores)


def test_noise_on_sums_is_drawn_and_charged_anew(data: VerticalDataset, tmp_path: Path) -> None:
    """The control: a share of a sum's noise is no answer of its own."""
    plan = plan_for(
        data,
        vote="shares",
        num_fusion_samples=0,
        prediction_mechanism="laplace",
        prediction_scale=64.0,
        prediction_bounded_total=True,
        prediction_symbols=2,
    )
    first, again = run_twice(data, plan, tmp_path)
    assert len(first) == len(again) == 3
    assert all(one != other for one, other in zip(first, again, strict=True))
    assert charged_predictions(tmp_path / "books" / "a.sqlite", "small") == Counter([*ROWS, *ROWS])


def test_a_store_that_fails_sends_nothing_of_the_round_and_says_nothing_of_itself(
    data: VerticalDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise AnswersError("answers=/home/owner/secret-place cannot be written")

    monkeypatch.setattr(StoredAnswers, "put", full)
    federation = Federation(plan_for(data))
    seen: list[tuple[str, int, bytes]] = []
    federation.taps.append(lambda *message: seen.append(message))
    with pytest.raises(AnswersError, match="secret-place"):  # whoever runs all roles is told
        federation.fit(data, checkpoints=tmp_path / "run")
    assert predictions(seen) == []
    said = [message for way, _, message in seen if way == "up" and message[5] == REFUSAL]
    assert len(said) == 3
    assert not any(b"secret" in message or b"owner/" in message for message in said)
