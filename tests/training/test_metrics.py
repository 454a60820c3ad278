"""Average precision against scikit-learn's, bit for bit, and where it is undefined."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.calibration import calibration_curve
from sklearn.metrics import average_precision_score, confusion_matrix, precision_recall_curve

from pbmvfl.training.metrics import classification_metrics, score_figures


@pytest.mark.parametrize("distinct", [1, 3, 40, 10_000])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_average_precision_equals_scikit_learns_to_the_bit(distinct: int, kind: type) -> None:
    random = np.random.default_rng(distinct)
    labels = random.integers(0, 2, 500)
    scores = (random.integers(0, distinct, (500, 2)) / 7 + 0.5 * labels[:, None] * [0, 1] * (distinct > 1)).astype(kind)
    expected = average_precision_score(labels, scores[:, 1] - scores[:, 0])
    assert classification_metrics(scores, labels, prefix="x")["x_auprc"] == expected


@pytest.mark.parametrize(
    ("scores", "labels"),
    [
        ([[0.0, 1.0], [1.0, 0.0]], [1, 1]),
        ([[0.0, 1.0], [1.0, 0.0]], [0, 0]),
        ([[0.0, np.nan], [1.0, 0.0]], [0, 1]),
        ([[0.0, np.inf], [1.0, 0.0]], [0, 1]),
        ([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], [0, 1]),
    ],
)
def test_where_average_precision_is_undefined_accuracy_stands_alone(
    scores: list[list[float]], labels: list[int]
) -> None:
    assert classification_metrics(np.array(scores), np.array(labels), prefix="x").keys() == {"x_accuracy"}


@pytest.mark.parametrize("num_classes", [2, 5])
def test_figures_of_scores_equal_scikit_learns(num_classes: int) -> None:
    random = np.random.default_rng(3)
    labels = random.integers(num_classes, size=700)
    scores = random.normal(size=(700, num_classes)) + 1.5 * np.eye(num_classes)[labels]
    found = score_figures(scores, labels)
    assert found["confusion"] == confusion_matrix(labels, scores.argmax(axis=1)).tolist()
    if num_classes == 2:
        precision, recall, _ = precision_recall_curve(labels, scores[:, 1] - scores[:, 0])
        expected = [precision[recall >= level - 1e-9].max() for level, _ in found["precision_recall"]]
        assert [share for _, share in found["precision_recall"]] == pytest.approx(expected, abs=1e-6)
        assert found["precision_recall"][-1][0] == 1
    sure = softmax(scores, axis=1).max(axis=1)
    right, stated = calibration_curve(scores.argmax(axis=1) == labels, sure, n_bins=10)
    kept = np.histogram(sure, bins=10, range=(0, 1))[0]
    kept = kept[kept > 0] >= 10
    assert np.array(found["calibration"])[:, :2] == pytest.approx(np.stack([stated, right], axis=1)[kept], abs=1e-6)


def test_scores_that_are_no_numbers_have_no_figures_and_no_point_is_about_few_rows() -> None:
    labels = np.array([0, 1, 1])
    assert score_figures(np.array([[0.0, 1.0], [np.nan, 0.0], [1.0, 0.0]]), labels) == {}
    assert score_figures(np.eye(2)[[0, 1, 1]], labels)["calibration"] == []
