"""Fusion rows in a federation: what crosses the wire, what is charged and kept, and the model that reads releases."""

from __future__ import annotations

import contextlib
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

import pbmvfl
from pbmvfl import Federation, ReleaseOptions
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import ModelError, PlanError
from pbmvfl.federation.results import Result
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.spending import spending
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import FUSION
from pbmvfl.wire.messages import MessageKind
from support.known_randomness import known_federation
from support.local_plans import voting_plan

EMBEDDING, LABELS = MessageKind.EMBEDDING, MessageKind.LABELS
RANDOM = np.random.default_rng(8)


def made_up(rows: int = 120, classes: int = 2) -> VerticalDataset:
    """Columns that say much about the class; party names and class names of their own."""
    labels = np.arange(rows + 30) % classes
    parts = [(RANDOM.normal(size=(rows + 30, 3)) * 0.3 + labels[:, None] - 0.5).astype(np.float32) for _ in range(2)]
    return VerticalDataset(
        name="people",
        party_names=("bank", "shop"),
        train_features=tuple(part[:rows] for part in parts),
        test_features=tuple(part[rows:] for part in parts),
        train_labels=labels[:rows],
        test_labels=labels[rows:],
        class_names=tuple(f"class {k}" for k in range(classes)),
        default_encoder="linear",
    )


DATA = made_up()
QUIET = {"noise_multiplier": 0.5, "mean_noise": 0.5, "gram_noise": 0.5, "learning_rate": 1.0, "batch_size": 120}


def plan_of(data: VerticalDataset = DATA, **choices: Any) -> Plan:
    """Networks that learn well, thirty fusion rows, and hardly any noise on a release."""
    usual = {**QUIET, "num_fusion_samples": 30, "prediction_response_epsilon": 8.0}
    return voting_plan(data, **{**usual, **choices})


LAPLACE = {
    "vote": "shares",
    "prediction_mechanism": "laplace",
    "prediction_scale": 16.0,
    "prediction_secure_aggregation": True,
}


def laplace_plan(**choices: Any) -> Plan:
    return plan_of(**{**LAPLACE, **choices})


class Seen:
    """Rounds that the first party answered, from bytes alone."""

    def __init__(self, federation: Federation, *, kill_at: int | None = None) -> None:
        self.rounds: Counter[int] = Counter()
        self.kill_at = kill_at
        federation.taps.append(self)

    def __call__(self, direction: str, party: int, message: bytes) -> None:
        if direction == "up" and party == 0 and message[5] == EMBEDDING:
            number = struct.unpack_from("<I", message, 32)[0]
            self.rounds[number] += 1
            if number == self.kill_at:
                raise KeyboardInterrupt


def of_kind(plan: Plan, name: str) -> list[int]:
    return [number for number in range(len(plan.schedule)) if plan.schedule.kind(number).name == name]


# --- labels ---


@pytest.mark.parametrize("label_epsilon", [None, 1.0])
def test_labels_of_fusion_rows_move_nothing_that_leaves_the_server(label_epsilon: float | None) -> None:
    """Noise, masks and draws are known here, so all bytes can be compared."""
    plan = plan_of(label_epsilon=label_epsilon)
    other_labels = DATA.train_labels.copy()
    other_labels[plan.schedule.part_of(FUSION)] = 0
    sent = []
    for data in (DATA, replace(DATA, train_labels=other_labels)):
        federation = known_federation(plan)
        messages: list[bytes] = []
        federation.taps.append(lambda way, _, message, kept=messages: kept.append(message) if way == "down" else None)
        result = federation.fit(data)
        sent.append(messages)
        assert result.fusion is not None
    assert any(message[5] == LABELS for message in sent[0])
    if label_epsilon is None:
        assert sent[0] == sent[1]
    lengths = [{len(message) for message in each if message[5] == LABELS} for each in sent]
    assert lengths[0] == lengths[1] == {44 + plan.num_network_samples}


def test_the_fusion_model_learns_true_labels_where_parties_get_drawn_ones() -> None:
    """All thirty drawn labels would be the true ones once in a million runs: each is with a chance of .62."""
    plan = plan_of(label_epsilon=0.5, evaluation="simulator")
    federation = Federation(plan)
    federation.fit(DATA)
    assert federation.model is not None
    assert federation.model.fusion is not None
    learned = federation.model.fusion.state()["fusion.labels"].numpy()
    assert learned.tolist() == DATA.train_labels[plan.schedule.part_of(FUSION)].tolist()


# --- what is read, and how it is said ---


@pytest.mark.parametrize("evaluation", ["simulator", "released"])
@pytest.mark.parametrize("law", ["krr", "laplace"])
def test_predictions_are_read_by_the_fusion_model(evaluation: str, law: str, tmp_path: Path) -> None:
    make = plan_of if law == "krr" else laplace_plan
    plan = make(evaluation=evaluation)
    federation = Federation(plan)
    result = federation.fit(DATA)
    assert result.traffic == plan.traffic()
    assert result.metrics["test_accuracy"] > 0.8
    assert result.fusion is not None
    assert result.fusion.beats_majority
    assert ("simulated releases" in result.notes[0]) == (evaluation == "simulator")
    assert Result.read(_written(result, tmp_path)).fusion == result.fusion
    model = pbmvfl.load(federation.save(tmp_path / "model"))
    assert model.fusion is not None
    assert model.fusion.description == result.fusion.description
    assert model.evaluate(DATA)["test_accuracy"] > 0.8
    assert federation.model is not None
    exact = ReleaseOptions(exact=True)
    np.testing.assert_array_equal(model.release(DATA, exact).scores_NK, federation.model.release(DATA, exact).scores_NK)


def _written(result: Result, folder: Path) -> Path:
    path = folder / "result.json"
    path.write_text(result.to_json())
    return path


def test_a_loaded_model_reads_the_same_values_alike(tmp_path: Path) -> None:
    federation = Federation(plan_of())
    federation.fit(DATA)
    assert federation.model is not None
    first, second = federation.model.fusion, pbmvfl.load(federation.save(tmp_path / "model")).fusion
    assert first is not None
    assert second is not None
    values = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    np.testing.assert_array_equal(first.log_probabilities(values), second.log_probabilities(values))


def test_classes_that_no_fusion_row_has_break_nothing() -> None:
    data = made_up(classes=3)
    labels = data.train_labels.copy()
    plan = plan_of(data)
    labels[plan.schedule.part_of(FUSION)] %= 2
    result = Federation(plan).fit(replace(data, train_labels=labels))
    assert 0 <= result.metrics["test_accuracy"] <= 1


def test_a_model_that_learned_nothing_says_so() -> None:
    """Columns without anything in them, one class nine times in ten, and noise that leaves nothing."""
    labels = (np.arange(150) % 10 == 0).astype(np.int64)
    data = replace(
        DATA,
        train_features=tuple(np.zeros_like(part) for part in DATA.train_features),
        train_labels=labels[:120],
        test_labels=labels[120:],
    )
    result = Federation(plan_of(data, prediction_response_epsilon=0.05)).fit(data)
    assert result.fusion is not None
    if not result.fusion.beats_majority:
        assert any("fusion model is not better than the most frequent class" in note for note in result.warnings)
    assert result.metrics["test_accuracy"] >= 0.85


# --- killed, and continued ---


@pytest.mark.parametrize("law", ["krr", "laplace"])
def test_a_finished_fusion_round_is_not_asked_again(law: str, tmp_path: Path) -> None:
    make = plan_of if law == "krr" else laplace_plan
    plan = make(batch_size=13)  # three fusion rounds
    fused, predicted = of_kind(plan, "fusion"), of_kind(plan, "prediction")
    assert len(fused) == 3
    first, second = Federation(plan), Federation(plan)
    seen = Seen(first, kill_at=fused[1])
    places: dict[str, Any] = {"checkpoints": tmp_path / "run", "ledger": tmp_path / "books"}
    with pytest.raises(KeyboardInterrupt):
        first.fit(DATA, **places)
    again = Seen(second)
    result = second.fit(DATA, **places)
    assert seen.rounds[fused[0]] == 1
    assert sorted(again.rounds) == [*fused[1:], *predicted]  # the first one was kept; the second was cut
    assert [session.first_round for session in result.sessions] == [0, fused[1]]
    assert result.fusion is not None
    # By row: what crossed the wire. The cut round's rows were answered again, from the store where there is one.
    times = np.zeros(DATA.num_samples)
    times[plan.schedule[fused[0]].rows] = 1
    times[plan.schedule[fused[2]].rows] = 1
    times[plan.schedule[fused[1]].rows] = 2 if law == "laplace" else 1
    event = plan.events(FUSION)[0]
    each = event.rdp("cell", orders=(4.0,))[0]  # type: ignore[call-arg, attr-defined, arg-type]
    limit = Limit.choose(unit="cell", accounting="paper", epsilon=1e6, delta=1e-5, order=4.0)
    with contextlib.closing(Ledger(tmp_path / "books" / "bank.sqlite", read_only=True)) as book:
        spent = spending(book, "people", limit).rows[: DATA.num_samples]
    fusion_rows = plan.schedule.part_of(FUSION)
    assert (spent[fusion_rows] >= times[fusion_rows] * each * (1 - 1e-9)).all()
    assert (spent[fusion_rows] <= 2 * each * (1 + 1e-9)).all()


def test_a_run_that_is_cut_in_its_predictions_goes_on_with_the_fusion_model(tmp_path: Path) -> None:
    plan = laplace_plan(batch_size=13)
    predicted = of_kind(plan, "prediction")
    first, second = Federation(plan), Federation(plan)
    Seen(first, kill_at=predicted[1])
    with pytest.raises(KeyboardInterrupt):
        first.fit(DATA, checkpoints=tmp_path)
    again = Seen(second)
    result = second.fit(DATA, checkpoints=tmp_path)
    assert sorted(again.rounds) == predicted
    assert result.fusion is not None
    assert result.metrics["test_accuracy"] > 0.8


# --- an own classifier ---


def test_an_own_classifier_is_fitted_saved_and_asked_for_again(tmp_path: Path) -> None:
    own = LogisticRegression(C=0.5)
    federation = Federation(plan_of())
    result = federation.fit(DATA, fusion=own)
    assert result.fusion is not None
    assert "LogisticRegression" in result.fusion.description
    assert not hasattr(own, "coef_")  # a copy of it is fitted
    folder = federation.save(tmp_path / "model")
    with pytest.raises(ModelError, match=r"own classifier as its fusion model; give it again: .*fusion="):
        pbmvfl.load(folder)
    assert pbmvfl.load(folder, fusion=LogisticRegression(C=0.5)).evaluate(DATA)["test_accuracy"] > 0.8


@pytest.mark.parametrize(
    ("plan", "own", "words"),
    [
        (plan_of(), object(), "fusion=object must be a scikit-learn classifier"),
        (
            laplace_plan(num_fusion_samples=0),
            LogisticRegression(),
            "this plan has no fusion rows to teach it",
        ),
    ],
    ids=["no classifier", "no fusion rows"],
)
def test_what_cannot_be_a_fusion_model_is_refused_before_anything_is_written(
    plan: Plan, own: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=words):
        Federation(plan).fit(DATA, fusion=own, checkpoints=tmp_path / "run", ledger=tmp_path / "books")
    assert not any(tmp_path.iterdir())


def test_a_model_with_the_plan_s_fusion_takes_no_other(tmp_path: Path) -> None:
    federation = Federation(plan_of())
    federation.fit(DATA)
    with pytest.raises(ModelError, match="leave fusion out"):
        pbmvfl.load(federation.save(tmp_path / "model"), fusion=LogisticRegression())
