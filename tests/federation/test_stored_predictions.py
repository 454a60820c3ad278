"""A run whose predictions are asked for again: the same bytes, and no second charge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pbmvfl import Federation, Plan
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import AnswersError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.protocol.stored_answers import StoredAnswers

EMBEDDING, REFUSAL, PREDICTION = 6, 10, 2


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
        "table_noise": 5.0,
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


def charged_predictions(tmp_path: Path, data: VerticalDataset, plan: Plan) -> list[int]:
    """How many rounds of predictions each session in the first party's book was charged for."""
    book = Ledger(tmp_path / "books" / "a.sqlite", read_only=True)
    sessions = book.sessions("small")
    book.close()
    first = plan.schedule.num_rounds(plan.schedule.kinds[-1])
    del data
    return [max(0, entry.charged_until - (len(plan.schedule) - first)) for entry in sessions]


def test_symbols_that_were_sent_are_sent_again_and_charged_once(data: VerticalDataset, tmp_path: Path) -> None:
    plan = plan_for(data)
    first, again = run_twice(data, plan, tmp_path)
    assert len(first) == 3
    assert again == first
    assert charged_predictions(tmp_path, data, plan) == [1, 0]


def test_noise_on_sums_is_drawn_and_charged_anew(data: VerticalDataset, tmp_path: Path) -> None:
    """The control: a share of a sum's noise is no answer of its own."""
    plan = plan_for(
        data,
        vote="shares",
        table_noise=0.0,
        prediction_mechanism="laplace",
        prediction_scale=64.0,
        prediction_bounded_total=True,
        prediction_symbols=2,
    )
    first, again = run_twice(data, plan, tmp_path)
    assert len(first) == len(again) == 3
    assert all(one != other for one, other in zip(first, again, strict=True))
    assert charged_predictions(tmp_path, data, plan) == [1, 1]


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
