"""Loss and gradients of the server's head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from pbmvfl._compiled import compiled
from pbmvfl.plan.groups import Loss
from pbmvfl.training.dense import is_plain_linear
from pbmvfl.training.optimizer import Trainer

if TYPE_CHECKING:
    from pbmvfl.mechanisms.label_response import LabelResponse

# --- Losses of class scores, and their slopes at the scores ---
# Drawn labels are the true ones with probability a = `kept`, and otherwise uniform over all K classes
# (`mechanisms.label_response`). Cross-entropy is then taken of the drawn label's probability, a p_y + (1-a)/K, so that
# p estimates the true class. Its gradient is p minus the posterior of the true class given the drawn label, about a
# times as long as that of a true label. Gradients are therefore divided by a: clip norms and step sizes stay as they
# are. Squared distances take the unbiased goal (e_y - (1-a)/K) / a.
#
# Shape suffixes: B rows of the batch, K classes.


def log_shares(labels: Tensor, num_classes: int, response: LabelResponse | None = None) -> Tensor:
    """Return the logarithm of each class's share of the true labels; a class without labels counts as half a row."""
    counts_K = torch.bincount(labels, minlength=num_classes).double()
    if response is not None:
        counts_K = torch.from_numpy(response.corrected_counts(counts_K.numpy()))
    counts_K = counts_K.clamp_min(0.5)
    return (counts_K / counts_K.sum()).log().float()


def mean_loss(scores_BK: Tensor, labels_B: Tensor, loss: Loss, *, kept: float = 1.0) -> Tensor:
    """Return the mean loss of a batch.

    Args:
        scores_BK: Scores of the batch.
        labels_B: Their classes, drawn ones where `kept` is below 1.
        loss: The plan's loss.
        kept: Probability a that a label is the true one.
    """
    if loss is not Loss.CROSS_ENTROPY:
        goals_BK = _squared_goals(labels_B, scores_BK.shape[1], kept)
        return (scores_BK - goals_BK).square().sum(dim=1).mean() / 2
    if kept == 1.0:
        return functional.cross_entropy(scores_BK, labels_B)
    true_B = scores_BK.log_softmax(dim=1).gather(1, labels_B[:, None])[:, 0] + math.log(kept)
    uniform = math.log((1 - kept) / scores_BK.shape[1])
    return -torch.logaddexp(true_B, torch.full_like(true_B, uniform)).mean()


def mean_loss_slope(
    scores_BK: Tensor, labels_B: Tensor, loss: Loss, *, rows: int | None = None, kept: float = 1.0
) -> Tensor:
    """Return the gradient of `mean_loss` at the scores; that of cross-entropy divided by `kept`.

    Total: NaN scores count as 0.

    Args:
        scores_BK: Scores of a batch, or of a piece of one.
        labels_B: Their classes, drawn ones where `kept` is below 1.
        loss: The plan's loss.
        rows: Rows of the whole batch, if these are a piece of one.
        kept: Probability a that a label is the true one.
    """
    count, num_classes = scores_BK.shape
    rows = count if rows is None else rows
    if loss is not Loss.CROSS_ENTROPY:
        return (scores_BK.nan_to_num(nan=0.0) - _squared_goals(labels_B, num_classes, kept)) / rows
    if len(labels_B) != count or (count and not 0 <= int(labels_B.min()) <= int(labels_B.max()) < num_classes):
        raise ValueError(f"{len(labels_B)} labels of {count} rows must each be in 0..{num_classes - 1}")
    slope_BK = torch.empty_like(scores_BK)
    entropy_slope(scores_BK.numpy(), labels_B.numpy(), float(kept), 1.0 / (rows * kept), slope_BK.numpy())
    return slope_BK


def _squared_goals(labels_B: Tensor, num_classes: int, kept: float) -> Tensor:
    goals_BK = functional.one_hot(labels_B, num_classes)
    return goals_BK if kept == 1.0 else (goals_BK - (1 - kept) / num_classes) / kept


# --- Loss of the server's head over one batch, and the gradients that follow from it ---
# For a dense head under cross-entropy they are written out; every other head uses torch's autograd. Results agree to
# the rounding of float32.
#
# Shape suffixes: B rows of the batch, P embedding_dim, K classes.


#: Infinite scores count as the ends of float32.
_LOWEST, _HIGHEST = float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)


class HeadGradients(NamedTuple):
    """Loss of a batch and the gradients that follow from it; no weight has changed yet."""

    loss: float
    scores_BK: Tensor
    gradient_BP: Tensor  # of the mean loss, at the sums
    slopes: list[Tensor]  # of the head's weights


class HeadLoss:
    """Mean loss of a head over a batch, and its chain rule.

    Args:
        trainer: The head and its optimiser.
        labels: All labels of the run: those outside the classes are left to torch, which refuses them.
        loss: The plan's loss.
        kept: Probability that a label is the true one; below 1 for drawn labels.
    """

    def __init__(
        self,
        trainer: Trainer,
        labels: npt.NDArray[np.int64],
        loss: Loss = Loss.CROSS_ENTROPY,
        *,
        kept: float = 1.0,
    ) -> None:
        self._trainer = trainer
        self._head = trainer.network
        self._loss, self._kept = loss, kept
        self._written_out = False
        known = loss is Loss.CROSS_ENTROPY
        if known and is_plain_linear(self._head) and isinstance(self._head, nn.Linear) and self._head.bias is not None:
            self._written_out = not labels.size or (labels.min() >= 0 and labels.max() < self._head.out_features)

    def gradients(self, sums_BP: Tensor, labels_B: Tensor) -> HeadGradients:
        # Algorithm 2, lines 11 and 13: the gradients at the sums and at the head's weights.
        """Return the loss, the scores, and the gradients at the sums and at the head's weights."""
        same_rows = 0 < sums_BP.shape[0] == labels_B.shape[0]  # compiled loops check no bounds
        if self._written_out and same_rows and sums_BP.dtype is torch.float32:
            return self._without_autograd(sums_BP, labels_B)
        sums_BP.requires_grad_()
        scores_BK = self._head(sums_BP)
        loss = mean_loss(scores_BK, labels_B, self._loss, kept=self._kept)
        stretched = loss / self._kept if self._loss is Loss.CROSS_ENTROPY and self._kept < 1.0 else loss
        gradient_BP, *slopes = self._trainer.slopes(stretched, inputs=[sums_BP])
        return HeadGradients(loss.item(), scores_BK.detach(), gradient_BP, slopes)

    def _without_autograd(self, sums_BP: Tensor, labels_B: Tensor) -> HeadGradients:
        head = self._head
        assert isinstance(head, nn.Linear)
        weight_KP = head.weight.detach()
        scores_BK = torch.addmm(head.bias.detach(), sums_BP, weight_KP.t())
        at_scores_BK, slope_K = torch.empty_like(scores_BK), torch.empty(head.out_features)
        loss = cross_entropy(scores_BK.numpy(), labels_B.numpy(), at_scores_BK.numpy(), slope_K.numpy(), self._kept)
        slopes = [torch.mm(at_scores_BK.t(), sums_BP), slope_K]
        return HeadGradients(loss, scores_BK, torch.mm(at_scores_BK, weight_KP), slopes)


@compiled
def entropy_slope(scores: Any, labels: Any, kept: Any, weight: Any, slope: Any) -> None:
    """Fill in the gradient of each row's cross-entropy at its scores, times `weight`; NaN scores count as 0."""
    rows, classes = scores.shape
    uniform = (1.0 - kept) / classes
    weights = np.empty(classes)
    for b in range(rows):
        largest = -np.inf
        for k in range(classes):
            score = np.float64(scores[b, k])
            weights[k] = min(max(score, _LOWEST), _HIGHEST) if score == score else 0.0
            largest = max(largest, weights[k])
        norm = 0.0
        for k in range(classes):
            below = weights[k] - largest
            weights[k] = np.exp(below) if below < 0.0 else 1.0
            norm += weights[k]
        drawn = kept * weights[labels[b]] / norm + uniform
        for k in range(classes):
            share, goal = weights[k] / norm, np.float64(k == labels[b])
            if kept != 1.0:
                goal = share * (kept * goal + uniform) / drawn
            slope[b, k] = weight * (share - goal)


@compiled
def cross_entropy(scores: Any, labels: Any, gradient: Any, sums: Any, kept: Any) -> Any:
    """Return the mean cross-entropy; fill in its gradient at the scores, and that gradient's sum over rows."""
    uniform = (1.0 - kept) / scores.shape[1]
    rows, classes = scores.shape
    loss = 0.0
    total = np.zeros(classes)
    weights = np.empty(classes)
    for b in range(rows):
        largest = np.float64(scores[b, 0])
        for k in range(1, classes):
            largest = max(largest, np.float64(scores[b, k]))
        norm = 0.0
        for k in range(classes):
            weights[k] = np.exp(np.float64(scores[b, k]) - largest)
            norm += weights[k]
        if kept == 1.0:
            loss += np.log(norm) + largest - np.float64(scores[b, labels[b]])
        else:
            drawn = kept * weights[labels[b]] / norm + uniform
            loss -= np.log(drawn)
        for k in range(classes):
            share = weights[k] / norm
            goal = np.float64(k == labels[b])
            if kept != 1.0:
                goal = share * (kept * goal + uniform) / drawn
            value = (share - goal) / (rows * kept)
            gradient[b, k] = np.float32(value)
            total[k] += value
    for k in range(classes):
        sums[k] = np.float32(total[k])
    return np.float32(loss / rows)
