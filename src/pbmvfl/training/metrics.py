"""Accuracy, for two classes the area under the precision-recall curve, and the figures that belong beside them.

An accuracy by itself says little: beside it belong the rows of each class, the accuracy of a model that always predicts
the commonest class, and whether the model does any better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Split = Literal["train", "test"]
_Labels = npt.NDArray[np.int64]


def classification_metrics(scores: npt.NDArray[Any], labels: _Labels, *, prefix: str) -> dict[str, float]:
    """Return `{prefix}_accuracy`, and `{prefix}_auprc` (positive class 1) for two classes where it is defined."""
    metrics = {f"{prefix}_accuracy": float((scores.argmax(axis=1) == labels).mean())}
    if scores.shape[1] == 2:
        difference = scores[:, 1] - scores[:, 0]
        if 0 < labels.sum() < len(labels) and np.isfinite(difference).all():  # undefined otherwise
            metrics[f"{prefix}_auprc"] = average_precision(difference, labels)
    return metrics


def average_precision(scores: npt.NDArray[Any], labels: _Labels) -> float:
    """Return the area under the precision-recall curve: precision times the recall gained, over distinct thresholds.

    Bit for bit the value of `sklearn.metrics.average_precision_score`, in a quarter of its time and without
    scikit-learn, which a machine that simulates may not have.

    Args:
        scores: A finite score for each row; the higher, the more likely class 1.
        labels: 0 or 1 for each row, and at least one 1.
    """
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    last_of_equal = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]), len(ordered) - 1)
    hits = np.cumsum(labels[order])[last_of_equal]
    precision = (hits / (last_of_equal + 1))[::-1]
    recall = np.append((hits / hits[-1])[::-1], 0.0)
    return float(-np.sum(np.diff(recall) * precision))


#: Points of a precision-recall curve, bins of a calibration, the fewest rows of a bin: no point is about a single row.
_POINTS, _BINS, _FEWEST_ROWS = 20, 10, 10
#: More classes have no confusion matrix.
_LARGEST_MATRIX = 50


def score_figures(scores: npt.NDArray[Any], labels: _Labels) -> dict[str, Any]:
    """Return what a page draws of predictions, as plain values.

    Args:
        scores: Class scores of each row, (N, K); their softmax are probabilities.
        labels: The true class of each row.

    Returns:
        `confusion`: rows by true and by predicted class. `precision_recall`, for two classes: (recall, the best
        precision at this recall or more). `calibration`: (mean probability of the predicted class, share right, rows)
        in bins of that probability. None of it if a score is no number.
    """
    if not np.isfinite(scores).all() or not len(labels):
        return {}
    num_classes = scores.shape[1]
    said = scores.argmax(axis=1)
    found: dict[str, Any] = {}
    if num_classes <= _LARGEST_MATRIX:
        pairs = np.bincount(num_classes * labels + said, minlength=num_classes**2)
        found["confusion"] = pairs.reshape(num_classes, num_classes).tolist()
    if num_classes == 2 and 0 < labels.sum() < len(labels):
        order = np.argsort(scores[:, 0] - scores[:, 1], kind="stable")
        hits = np.cumsum(labels[order])
        recall, precision = hits / hits[-1], hits / np.arange(1, len(hits) + 1)
        wanted = np.linspace(0, 1, _POINTS + 1)[1:]
        best = (float(precision[recall >= level - 1e-9].max()) for level in wanted)
        found["precision_recall"] = [[round(float(a), 6), round(b, 6)] for a, b in zip(wanted, best, strict=True)]
    shares = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    sure = (shares / shares.sum(axis=1, keepdims=True)).max(axis=1)
    bins = np.minimum((sure * _BINS).astype(int), _BINS - 1)
    found["calibration"] = [
        [round(float(sure[chosen].mean()), 6), round(float((said == labels)[chosen].mean()), 6), int(chosen.sum())]
        for chosen in (bins == each for each in range(_BINS))
        if chosen.sum() >= _FEWEST_ROWS
    ]
    return found


@dataclass(frozen=True, kw_only=True)
class ClassFigures:
    """Rows of one class: how many have it, how many were predicted to have it, and the recall."""

    name: str
    train: int
    test: int
    train_predicted: int | None = None
    test_predicted: int | None = None
    train_recall: float | None = None
    test_recall: float | None = None

    def count(self, split: Split) -> int:
        return self.train if split == "train" else self.test

    def predicted(self, split: Split) -> int | None:
        return self.train_predicted if split == "train" else self.test_predicted

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; unmeasured ones are left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Majority:
    """Commonest class of a split and its share, which a model that always predicts it attains."""

    name: str
    rate: float


def class_figures(names: Sequence[str], train: _Labels, test: _Labels) -> tuple[ClassFigures, ...]:
    """Count every class's rows; predictions are not filled in yet."""
    found = [np.bincount(labels, minlength=len(names)).tolist() for labels in (train, test)]
    return tuple(
        ClassFigures(name=name, train=in_train, test=in_test)
        for name, in_train, in_test in zip(names, *found, strict=True)
    )


def majority(classes: Sequence[ClassFigures]) -> dict[str, Majority]:
    """Return the majority of each split that has rows; of equally common classes the first counts."""
    found = {}
    splits: tuple[Split, ...] = ("train", "test")
    for split in splits:
        if rows := sum(each.count(split) for each in classes):
            commonest = max(classes, key=lambda each: each.count(split))
            found[str(split)] = Majority(name=commonest.name, rate=commonest.count(split) / rows)
    return found


def per_class(scores: npt.NDArray[Any], labels: _Labels, *, split: Split) -> list[dict[str, Any]]:
    """Return, for each class, the fields of `ClassFigures` about the predictions of a split."""
    said = scores.argmax(axis=1)
    num_classes = scores.shape[1]
    rows, predicted, found = (
        np.bincount(chosen, minlength=num_classes).tolist() for chosen in (labels, said, labels[said == labels])
    )
    return [
        {f"{split}_predicted": predicted[k], f"{split}_recall": found[k] / rows[k] if rows[k] else None}
        for k in range(num_classes)
    ]
