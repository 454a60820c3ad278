"""What class scores are trained by: a loss of every row, and its slope at the scores.

Shape suffixes: B rows of the batch, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pbmvfl.plan.groups import Loss


def log_shares(labels: Tensor, num_classes: int) -> Tensor:
    """The logarithm of each class's share of the labels; a class without any counts as half a row."""
    counts_K = torch.bincount(labels, minlength=num_classes).clamp_min(0.5).double()
    return (counts_K / counts_K.sum()).log().float()


def mean_loss(scores_BK: Tensor, labels_B: Tensor, loss: Loss) -> Tensor:
    """The batch's mean."""
    if loss is Loss.CROSS_ENTROPY:
        return functional.cross_entropy(scores_BK, labels_B)
    goals_BK = functional.one_hot(labels_B, scores_BK.shape[1])
    return (scores_BK - goals_BK).square().sum(dim=1).mean() / 2


def mean_loss_slope(scores_BK: Tensor, labels_B: Tensor, loss: Loss, *, rows: int | None = None) -> Tensor:
    """The gradient of `mean_loss` at the scores. Total: scores that are no numbers count as 0.

    `rows` are those of the whole batch, if these are a piece of one.
    """
    scores_BK = scores_BK.nan_to_num(nan=0.0)
    if loss is Loss.CROSS_ENTROPY:
        scores_BK = scores_BK.softmax(dim=1)
    goals_BK = functional.one_hot(labels_B, scores_BK.shape[1])
    return (scores_BK - goals_BK) / (len(labels_B) if rows is None else rows)
