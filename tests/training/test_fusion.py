"""Fusion models: naive Bayes against enumeration in fractions, what only trees learn, choices, states, bad values."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from pbmvfl.errors import ModelError, PlanError
from pbmvfl.mechanisms.votes import Vote, VoteKind
from pbmvfl.plan.groups import FusionName
from pbmvfl.training.fusion import FusionModel, fit_fusion


def shares(model: FusionModel, values: Any) -> npt.NDArray[np.float64]:
    return np.exp(model.log_probabilities(np.asarray(values)).astype(np.float64))


def additive(rows: int, *, parties: int = 3, symbols: int = 4, classes: int = 2, seed: int = 0) -> tuple[Any, Any]:
    """Rows whose symbols each tell something about the class, independently."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, rows)
    right = random.random((rows, parties)) < 0.6
    values = np.where(right, labels[:, None] % symbols, random.integers(0, symbols, (rows, parties)))
    return values, labels


def jointly(rows: int, *, seed: int = 0) -> tuple[Any, Any]:
    """Rows whose class is whether two parties' bits differ: no party knows anything by itself."""
    random = np.random.default_rng(seed)
    values = random.integers(0, 2, (rows, 3))
    return values, values[:, 0] ^ values[:, 1]


# --- naive Bayes ---


def posterior(rows: list[tuple[tuple[int, ...], int]], asked: tuple[int, ...], classes: int, symbols: int) -> list[Any]:
    """Bayes in fractions, row by row: P(class) by rows and a half, P(symbol | class) by rows and sixteen usual ones."""
    count = len(rows)
    prior = [Fraction(2 * sum(k == label for _, label in rows) + 1, 2 * count + classes) for k in range(classes)]
    joint = list(prior)
    for party, symbol in enumerate(asked):
        if not 0 <= symbol < symbols:
            continue
        own = [(values[party], label) for values, label in rows if 0 <= values[party] < symbols]
        usual = Fraction(sum(value == symbol for value, _ in own) + 1, len(own) + symbols)
        for k in range(classes):
            of_class = [value for value, label in own if label == k]
            joint[k] *= Fraction(sum(value == symbol for value in of_class) + 16 * usual, len(of_class) + 16)
    bayes = [each / sum(joint) for each in joint]
    return [(count * share + part) / (count + 1) for share, part in zip(bayes, prior, strict=True)]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.tuples(st.integers(-1, 3), st.integers(-1, 3)), st.integers(0, 2)), min_size=2, max_size=14
    )
)
@example(  # half of it is the classes' shares
    rows=[((0, 0), 0)] * 5
    + [((0, 0), 2), ((2, 0), 2), ((0, 0), 2), ((1, 0), 2)]
    + [((0, 0), 2)] * 2
    + [((1, 0), 1)] * 2
    + [((2, 0), 2)]
)
def test_the_sum_is_bayes_with_the_fusion_rows_tables(rows: list[tuple[tuple[int, ...], int]]) -> None:
    """Symbols -1 and 3 are none of the three: they say nothing, in fusion rows and in rows to predict."""
    values, labels = np.array([row for row, _ in rows]), np.array([label for _, label in rows])
    model = fit_fusion(values, labels, num_classes=3, num_symbols=3, choice="sum")
    if not model.beats_majority or len(set(labels.tolist())) < 2:
        return
    every = list(product((-1, 0, 1, 2, 3), repeat=2))
    weight, prior = model.weights["sum"], posterior(rows, (-1, -1), 3, 3)  # the classes' shares have the other part
    expected = [
        [weight * float(share) + (1 - weight) * float(part) for share, part in zip(found, prior, strict=True)]
        for found in (posterior(rows, asked, 3, 3) for asked in every)
    ]
    assert np.allclose(shares(model, every), expected, rtol=1e-4)


# --- what is learned, and the choice ---


def test_trees_learn_what_two_parties_know_jointly_and_sums_do_not() -> None:
    values, labels = jointly(2000)
    joint = fit_fusion(values, labels, num_classes=2, num_symbols=2)
    assert joint.name is FusionName.BOOSTED
    assert joint.held_out["accuracy"] > 0.99
    asked, true = jointly(500, seed=1)
    assert (joint.log_probabilities(asked).argmax(axis=1) == true).mean() > 0.99
    for choice in ("sum", "logistic"):
        alone = fit_fusion(values, labels, num_classes=2, num_symbols=2, choice=choice)
        # Sums of what parties say can be right about three of the four cells, and are never sure of one.
        assert (alone.log_probabilities(asked).argmax(axis=1) == true).mean() < 0.8
        assert shares(alone, asked).max() < 0.6


def test_what_two_parties_both_know_counts_once() -> None:
    """Four parties say the same, so naive Bayes is far too sure; logistic regression knows the true share."""
    random = np.random.default_rng(3)
    labels = random.integers(0, 2, 3000)
    said = np.where(random.random(3000) < 0.7, labels, 1 - labels)
    values = np.repeat(said[:, None], 4, axis=1)
    model = fit_fusion(values, labels, num_classes=2, num_symbols=2)
    assert model.name is not FusionName.SUM
    # The share of 3,000 rows that are right has a deviation of .0084: 6 of them are not reached once in 1e8 runs.
    assert abs(shares(model, [[1, 1, 1, 1]])[0, 1] - 0.7) < 0.05
    assert shares(fit_fusion(values, labels, num_classes=2, num_symbols=2, choice="sum"), [[1] * 4])[0, 1] > 0.9


def test_few_rows_are_read_by_the_scores_that_symbols_stand_for() -> None:
    """Sixteen bins of a margin and 120 rows: tables have four rows an entry, and the scores need none."""
    random = np.random.default_rng(11)
    labels = random.integers(0, 2, 2120)
    margins = 1.2 * (2 * labels[:, None] - 1) + 1.5 * random.normal(size=(2120, 4))  # log odds of 1.07 times these
    vote = Vote(kind=VoteKind.BINS, gain=0.6, grades=16)
    values = np.stack([vote.symbol(np.stack([-each / 2, each / 2], axis=1)) for each in margins.T], axis=1)
    train, test = (values[:120], labels[:120]), (values[120:], labels[120:])

    def loss(scores: npt.NDArray[np.float64] | None) -> float:
        model = fit_fusion(*train, num_classes=2, num_symbols=16, scores_SK=scores)
        again = FusionModel.from_state(model.state(), num_classes=2, num_symbols=16, scores_SK=scores)
        assert np.array_equal(again.log_probabilities(values), model.log_probabilities(values))
        return -float(model.log_probabilities(test[0])[np.arange(2000), test[1]].mean())

    assert loss(vote.symbol_logs(2, kept=1.0)) < loss(None) - 0.01


def named(rows: int, *, seed: int = 0) -> tuple[Any, Any, Vote]:
    """Rows of ten classes, of which each of four parties names the two likeliest, by scores of its own."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, rows)
    scores = 1.5 * np.eye(10)[labels] + random.normal(size=(4, rows, 10))
    vote = Vote(kind=VoteKind.RANKS, gain=0.6)
    return np.stack([vote.symbol(each) for each in scores], axis=1), labels, vote


def test_few_rows_of_many_classes_are_read_no_worse_than_without_a_model() -> None:
    """200 rows for tables of 90 symbols and 10 classes: what is learned must not undo the public reading."""
    values, labels, vote = named(4200)
    scores = vote.symbol_logs(10, kept=0.97)
    public = vote.read_symbols(values[200:], 10, kept=0.97).argmax(axis=1) == labels[200:]

    def right(scores: npt.NDArray[np.float64] | None) -> float:
        model = fit_fusion(values[:200], labels[:200], num_classes=10, num_symbols=90, scores_SK=scores)
        return float((model.log_probabilities(values[200:]).argmax(axis=1) == labels[200:]).mean())

    # Two shares of the same 4,000 rows differ by a deviation of at most .008 where one row in four is read otherwise.
    assert right(scores) > public.mean() - 0.02
    assert right(None) < public.mean() - 0.05, "the control: without it, 200 rows do not suffice"


@pytest.mark.parametrize("rows", [jointly(1500), additive(1500, seed=4)])
def test_the_mixture_has_no_larger_held_out_loss_than_any_of_its_models(rows: tuple[Any, Any]) -> None:
    def loss(choice: str) -> float:
        return fit_fusion(*rows, num_classes=2, num_symbols=4, choice=choice).held_out["log_loss"]

    # Steps from equal weights come near the best ones; equal weights, and the worst of the models, are further away.
    losses = [loss(choice) for choice in ("sum", "logistic", "boosted")]
    assert loss("auto") < min(losses) + 5e-3 < max(losses)


def test_no_model_is_used_where_the_majority_class_is_more_accurate() -> None:
    random = np.random.default_rng(5)
    labels = (random.random(600) < 0.2).astype(np.int64)
    values = random.integers(0, 16, (600, 5))
    model = fit_fusion(values, labels, num_classes=2, num_symbols=16, choice="sum")
    assert not model.beats_majority
    assert "majority class" in model.description
    expected = (np.bincount(labels) + 0.5) / 601
    assert np.allclose(shares(model, values[:3]), expected, atol=1e-6)
    assert fit_fusion(values, labels, num_classes=2, num_symbols=16).held_out["accuracy"] >= model.majority


def test_rare_classes_are_ranked_where_they_cannot_be_predicted() -> None:
    """One row in five, and sums that are nearly all noise: no class but the other is likelier than not."""
    random = np.random.default_rng(8)
    labels = (random.random(24_000) < 0.2).astype(np.int64)
    values = (labels + random.laplace(scale=4.0, size=24_000))[:, None]
    model = fit_fusion(values[:4000], labels[:4000], num_classes=2, num_symbols=None)
    found, true = shares(model, values[4000:])[:, 1], labels[4000:]
    # Shares of 20,000 rows have a deviation of .003, and areas under the curve one of .005 where they are one half.
    assert ((found > 0.5) == true).mean() > 1 - true.mean() - 0.01
    rare, others = found[true == 1], np.sort(found[true == 0])
    area = (np.searchsorted(others, rare, "left") + np.searchsorted(others, rare, "right")).mean() / (2 * len(others))
    assert area > 0.53


@pytest.mark.parametrize("num_classes", [2, 4])
def test_noisy_sums_are_learned_with_their_noise(num_classes: int) -> None:
    random = np.random.default_rng(7)
    labels = random.integers(0, num_classes, 4500)
    values = np.eye(num_classes)[labels] * 5 + random.laplace(scale=2.0, size=(4500, num_classes))
    model = fit_fusion(values[:3000], labels[:3000], num_classes=num_classes, num_symbols=None)
    best = values[3000:].argmax(axis=1) == labels[3000:]
    right = model.log_probabilities(values[3000:]).argmax(axis=1) == labels[3000:]
    assert right.mean() > best.mean() - 0.02
    assert model.held_out["log_loss"] < 0.7 * np.log(num_classes)


def test_an_own_classifier_takes_the_choice_s_place() -> None:
    values, labels = additive(800)
    own = LogisticRegression(C=0.5)
    model = fit_fusion(values, labels, num_classes=3, num_symbols=4, estimator=own)
    assert "LogisticRegression" in model.description
    fitted = LogisticRegression(C=0.5).fit(values, labels)
    assert np.allclose(shares(model, values)[:, :2], fitted.predict_proba(values), atol=2e-3)
    assert not hasattr(own, "classes_"), "the given one is cloned"
    again = FusionModel.from_state(model.state(), num_classes=3, num_symbols=4, estimator=own)
    assert np.array_equal(again.log_probabilities(values), model.log_probabilities(values))
    with pytest.raises(ModelError, match="own classifier"):
        FusionModel.from_state(model.state(), num_classes=3, num_symbols=4)
    with pytest.raises(PlanError, match="predict_proba"):
        fit_fusion(values, labels, num_classes=3, num_symbols=4, estimator=object())


# --- states ---


@pytest.mark.parametrize("choice", list(FusionName))
@pytest.mark.parametrize("num_symbols", [4, None])
def test_a_state_makes_the_same_model_again(choice: FusionName, num_symbols: int | None) -> None:
    values, labels = additive(700, classes=3)
    model = fit_fusion(values, labels, num_classes=3, num_symbols=num_symbols, choice=choice)
    state = {name: tensor.clone() for name, tensor in model.state().items()}
    again = FusionModel.from_state({**state, "other": torch.ones(1)}, num_classes=3, num_symbols=num_symbols)
    assert np.array_equal(again.log_probabilities(values), model.log_probabilities(values))
    assert (again.name, again.description, again.held_out) == (model.name, model.description, model.held_out)
    assert choice in (FusionName.AUTO, again.name)


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("fusion.values", None),
        ("fusion.labels", torch.zeros(3, dtype=torch.int64)),
        ("fusion.labels", torch.full((700,), 9)),
        ("fusion.weights", torch.ones(3)),
        ("fusion.weights", torch.tensor([2.0, -1.0, 0, 0, 0, 0])),
        ("fusion.weights", torch.full((6,), float("nan"))),
        ("fusion.figures", torch.ones(1)),
    ],
)
def test_a_damaged_state_is_refused(name: str, damaged: torch.Tensor | None) -> None:
    values, labels = additive(700)
    state = fit_fusion(values, labels, num_classes=2, num_symbols=4, choice="sum").state()
    state = {key: tensor for key, tensor in {**state, name: damaged}.items() if tensor is not None}
    with pytest.raises(ModelError, match="state"):
        FusionModel.from_state(state, num_classes=2, num_symbols=4)


# --- values that no honest party sends, and classes without rows ---


@pytest.mark.parametrize("choice", list(FusionName))
@pytest.mark.parametrize("num_symbols", [4, None])
def test_whatever_is_sent_every_row_has_probabilities(choice: FusionName, num_symbols: int | None) -> None:
    values, labels = additive(400, classes=3)
    model = fit_fusion(values, labels, num_classes=5, num_symbols=num_symbols, choice=choice)
    strange = np.array([[np.nan] * 3, [np.inf, -np.inf, 1e38], [-5, 4, 99999], [0, np.nan, 1], [0.0, 1.0, 2.0]])
    found = shares(model, strange)
    assert np.isfinite(found).all()
    assert np.allclose(found.sum(axis=1), 1, atol=1e-5)
    assert (found > 0).all(), "classes without fusion rows have a small probability"
    assert (found[:, 3:] < 0.01).all()
    assert model.log_probabilities(strange[:0]).shape == (0, 5)


@pytest.mark.parametrize("rows", [0, 1, 2, 3])
@pytest.mark.parametrize("num_symbols", [4, None])
def test_very_few_rows_or_one_class_predict_by_shares(rows: int, num_symbols: int | None) -> None:
    model = fit_fusion(np.ones((rows, 2)), np.zeros(rows, np.int64), num_classes=2, num_symbols=num_symbols)
    expected = np.array([rows + 0.5, 0.5]) / (rows + 1)
    assert np.allclose(shares(model, np.zeros((1, 2)))[0], expected, atol=1e-6)


@pytest.mark.parametrize("values", [np.zeros(5), np.zeros((4, 2))])
def test_values_and_labels_must_fit_together(values: npt.NDArray[Any]) -> None:
    with pytest.raises(PlanError, match="shape="):
        fit_fusion(values, np.zeros(5, np.int64), num_classes=2, num_symbols=4)
    with pytest.raises(PlanError, match="labels=2"):
        fit_fusion(np.zeros((5, 2)), np.full(5, 2), num_classes=2, num_symbols=4)
    with pytest.raises(PlanError, match="fusion='vote'"):
        fit_fusion(np.zeros((5, 2)), np.zeros(5, np.int64), num_classes=2, num_symbols=4, choice="vote")


def test_scikit_learn_is_imported_when_a_model_is_fitted_and_not_before() -> None:
    program = "import sys; import pbmvfl.training.fusion; print('sklearn' in sys.modules, 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False"]
