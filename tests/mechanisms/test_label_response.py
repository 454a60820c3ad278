"""Drawn labels: the law against its definition in fractions, and the inverse of the flip matrix."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms.label_response import LabelResponse
from support.statistical import chi_square_rejects


def flip_matrix(num_classes: int, weight: int) -> list[list[Fraction]]:
    """Return P(drawn = j | true = i) by the definition."""
    moved = Fraction(weight, 2**32)
    return [
        [1 - (num_classes - 1) * moved if i == j else moved for j in range(num_classes)] for i in range(num_classes)
    ]


@given(num_classes=st.integers(2, 40), epsilon=st.floats(0.01, 16))
def test_the_law_spends_at_most_epsilon_and_nearly_all_of_it(num_classes: int, epsilon: float) -> None:
    weight = LabelResponse(num_classes=num_classes, epsilon=epsilon).event.other_weight
    row = flip_matrix(num_classes, weight)[0]
    assert sum(row) == 1
    limit = Fraction(math.exp(epsilon))
    assert row[0] / row[1] <= limit
    # A smaller weight would spend more: it is the smallest, up to the rounding of one division.
    smaller = flip_matrix(num_classes, weight - 2)[0]
    assert smaller[0] / smaller[1] > limit


@given(
    counts=st.lists(st.integers(0, 1000), min_size=2, max_size=6),
    epsilon=st.floats(0.1, 10),
)
def test_corrected_counts_are_unbiased(counts: list[int], epsilon: float) -> None:
    response = LabelResponse(num_classes=len(counts), epsilon=epsilon)
    matrix = flip_matrix(len(counts), response.event.other_weight)
    expected = [float(sum(counts[i] * matrix[i][j] for i in range(len(counts)))) for j in range(len(counts))]
    assert np.allclose(response.corrected_counts(np.array(expected)), counts, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("true", [0, 2])
def test_drawn_labels_have_the_law_that_is_charged(true: int) -> None:
    response = LabelResponse(num_classes=3, epsilon=1.0)
    draws = 200_000
    drawn = response.draw(np.full(draws, true), SystemEntropy())
    seen = np.bincount(drawn, minlength=3)
    matrix = flip_matrix(3, response.event.other_weight)
    assert not chi_square_rejects(seen, matrix[true])
    # Control: the law of an epsilon that is 5% larger is rejected.
    other = flip_matrix(3, LabelResponse(num_classes=3, epsilon=1.05).event.other_weight)
    assert chi_square_rejects(seen, other[true])


def test_shares_of_kept_and_flipped_labels() -> None:
    response = LabelResponse(num_classes=4, epsilon=2.0)
    matrix = flip_matrix(4, response.event.other_weight)
    assert response.flipped == pytest.approx(float(1 - matrix[0][0]))
    assert response.kept == pytest.approx(float(matrix[0][0] - matrix[0][1]))


@pytest.mark.parametrize(
    ("epsilon", "words"),
    [(0.0, r"label_epsilon=0 must be in \[0.01, 16\]"), (17, "label_epsilon=17"), (math.nan, "label_epsilon=nan")],
)
def test_an_epsilon_out_of_range_is_named(epsilon: float, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        LabelResponse(num_classes=2, epsilon=epsilon)


def test_labels_outside_the_classes_are_named() -> None:
    with pytest.raises(PlanError, match="labels of 0 to 3 with num_classes=3; permitted: 0 to 2"):
        LabelResponse(num_classes=3, epsilon=1).draw(np.array([0, 3]), SystemEntropy())
