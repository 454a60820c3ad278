"""Losses of drawn labels: gradients against autograd of the definition, and what they estimate."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pbmvfl.mechanisms.label_response import LabelResponse
from pbmvfl.plan.groups import Loss
from pbmvfl.plan.plan import Plan
from pbmvfl.training.head import HeadLoss, log_shares, mean_loss, mean_loss_slope
from pbmvfl.training.optimizer import Trainer

KEPT = st.one_of(st.just(1.0), st.floats(0.05, 0.99))


def scores_and_labels(seed: int, rows: int = 7, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(seed)
    scores = torch.from_numpy(random.normal(scale=3, size=(rows, classes)).astype(np.float32))
    return scores, torch.from_numpy(random.integers(0, classes, rows))


def drawn_log_likelihood(scores: torch.Tensor, labels: torch.Tensor, kept: float) -> torch.Tensor:
    """ln P(drawn label) by the definition: the true one with probability `kept`, else uniform. In float64."""
    shares = scores.double().softmax(dim=1)
    drawn = kept * shares + (1 - kept) / scores.shape[1]
    return drawn[torch.arange(len(labels)), labels].log()


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), kept=KEPT)
def test_cross_entropy_of_drawn_labels_and_its_gradient(seed: int, kept: float) -> None:
    scores, labels = scores_and_labels(seed)
    exact = scores.double().requires_grad_()
    expected = -drawn_log_likelihood(exact, labels, kept).mean()
    (slope,) = torch.autograd.grad(expected, exact)
    assert mean_loss(scores, labels, Loss.CROSS_ENTROPY, kept=kept).item() == pytest.approx(expected.item(), rel=1e-5)
    found = mean_loss_slope(scores, labels, Loss.CROSS_ENTROPY, kept=kept)
    assert torch.allclose(found.double(), slope / kept, atol=1e-5)


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), kept=KEPT)
def test_a_dense_head_agrees_with_autograd(seed: int, kept: float) -> None:
    sums, _ = scores_and_labels(seed, classes=3)
    _, labels = scores_and_labels(seed, classes=4)
    plan = Plan.of(num_parties=2, num_samples=7, num_classes=4, embedding_dim=3)
    head = nn.Linear(3, 4)
    trainer = Trainer(plan, head, num_steps=1)
    found = HeadLoss(trainer, labels.numpy(), kept=kept).gradients(sums.clone(), labels)
    exact = sums.clone().requires_grad_()
    expected = -drawn_log_likelihood(head(exact), labels, kept).mean()
    at_sums, *at_weights = torch.autograd.grad(expected / kept, [exact, head.weight, head.bias])
    assert found.loss == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    assert torch.allclose(found.gradient_BP, at_sums, rtol=1e-3, atol=1e-4)
    for slope, other in zip(found.slopes, at_weights, strict=True):
        assert torch.allclose(slope, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("loss", list(Loss))
def test_the_true_law_of_classes_is_where_the_mean_gradient_vanishes(loss: Loss) -> None:
    """Whatever is learned from drawn labels estimates the true classes: summed over all draws, in expectation."""
    response = LabelResponse(num_classes=3, epsilon=1.0)
    true = torch.tensor([[0.6, 0.3, 0.1]])
    scores = true.log() if loss is Loss.CROSS_ENTROPY else true
    flip = (1 - response.kept) / 3
    expected = torch.zeros(1, 3)
    for drawn in range(3):
        probability = response.kept * true[0, drawn] + flip
        expected += probability * mean_loss_slope(scores, torch.tensor([drawn]), loss, kept=response.kept)
    assert torch.allclose(expected, torch.zeros(1, 3), atol=1e-6)
    # Control: without the correction it does not vanish there.
    plain = sum(
        (response.kept * true[0, drawn] + flip) * mean_loss_slope(scores, torch.tensor([drawn]), loss)
        for drawn in range(3)
    )
    assert isinstance(plain, torch.Tensor)
    assert plain.abs().max() > 0.05


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), kept=st.floats(0.05, 0.99))
def test_gradients_of_drawn_labels_are_bounded_however_sure_the_scores_are(seed: int, kept: float) -> None:
    scores, labels = scores_and_labels(seed)
    slope = mean_loss_slope(scores * 1e6, labels, Loss.CROSS_ENTROPY, kept=kept)
    assert torch.isfinite(slope).all()
    assert slope.norm(dim=1).max() * len(labels) <= math.sqrt(2) / kept + 1e-5


@pytest.mark.parametrize("kept", [1.0, 0.6])
def test_scores_that_are_no_numbers_have_the_gradient_of_the_nearest_ones(kept: float) -> None:
    inf, big, nan = math.inf, float(np.finfo(np.float32).max), math.nan
    labels = torch.tensor([0, 1, 2, 0, 1])
    odd = torch.tensor([[nan, 1, 2], [inf, 0, -inf], [inf, inf, nan], [nan, nan, nan], [-inf, -inf, -inf]])
    near = torch.tensor([[0.0, 1, 2], [big, 0, -big], [big, big, 0], [0, 0, 0], [-big, -big, -big]])
    shares = near.double().softmax(dim=1)
    drawn = shares * (kept * nn.functional.one_hot(labels, 3) + (1 - kept) / 3)
    certain = nn.functional.one_hot(labels, 3).double()  # where a share is 0 and labels are true, so is its posterior
    goals = certain if kept == 1.0 else drawn / drawn.sum(dim=1, keepdim=True)
    found = mean_loss_slope(odd, labels, Loss.CROSS_ENTROPY, rows=10, kept=kept)
    assert torch.allclose(found.double(), (shares - goals) / (10 * kept), atol=1e-7)


@pytest.mark.parametrize("labels", [[0, 3], [-1, 0], [0], [0, 1, 2]])
def test_labels_that_are_no_classes_of_the_rows_are_refused(labels: list[int]) -> None:
    with pytest.raises(ValueError, match="labels of 2 rows"):
        mean_loss_slope(torch.zeros(2, 3), torch.tensor(labels), Loss.CROSS_ENTROPY)


def test_shares_of_classes_are_those_of_true_labels() -> None:
    response = LabelResponse(num_classes=2, epsilon=1.0)
    true = np.array([700, 300])
    drawn = np.rint(response.kept * true + (1 - response.kept) / 2 * 1000).astype(int)
    labels = torch.from_numpy(np.repeat([0, 1], drawn))
    assert log_shares(labels, 2, response).exp().tolist() == pytest.approx([0.7, 0.3], abs=2e-3)
    assert log_shares(labels, 2).exp().tolist() == pytest.approx((drawn / 1000).tolist())
