"""Average precision against scikit-learn's, bit for bit, and where it is undefined."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from pbmvfl.training.metrics import classification_metrics


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
