"""Accuracy, and for two classes the area under the precision-recall curve."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def classification_metrics(scores: npt.NDArray[Any], labels: npt.NDArray[np.int64], *, prefix: str) -> dict[str, float]:
    """`{prefix}_accuracy`, and `{prefix}_auprc` (positive class 1) where there are two classes."""
    metrics = {f"{prefix}_accuracy": float((scores.argmax(axis=1) == labels).mean())}
    if scores.shape[1] == 2:
        from sklearn.metrics import average_precision_score

        if len(np.unique(labels)) == 2:  # undefined otherwise
            metrics[f"{prefix}_auprc"] = float(average_precision_score(labels, scores[:, 1] - scores[:, 0]))
    return metrics
