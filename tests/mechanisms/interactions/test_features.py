"""Context features against a loop, and their bounds for whatever stands in a column."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbmvfl.errors import DataError
from pbmvfl.mechanisms.interactions.features import (
    PRODUCT_SCALE,
    VALUE_BOUND,
    Context,
    context_features,
)


def context(prior: list[float], values: list[float]) -> Context:
    return Context(prior_L=np.array(prior), values_L=np.array(values))


OWN = context([0.5, 0.25, 0.25], [-1.0, 0.0, 2.0])
OTHER = context([0.75, 0.25], [0.0, 1.0])


def test_features_are_those_of_a_loop_over_rows_and_levels() -> None:
    rng = np.random.default_rng(0)
    values, levels = rng.normal(size=40), rng.integers(0, 3, size=40)
    laws = rng.dirichlet([1.0, 1.0], size=40)
    found = context_features(values, levels, OWN, laws, OTHER)
    assert found.shape == (40, 1 + 3 * 2)
    own_mean = -1.0 * 0.5 + 2.0 * 0.25
    own_deviation = math.sqrt(0.5 * (-1 - own_mean) ** 2 + 0.25 * own_mean**2 + 0.25 * (2 - own_mean) ** 2)
    other_deviation = math.sqrt(0.75 * 0.25)
    for row in range(40):
        own = (values[row] - own_mean) / own_deviation
        other = (laws[row, 1] - 0.25) / other_deviation
        clipped = [max(-VALUE_BOUND, min(VALUE_BOUND, each)) for each in (own, other)]
        assert found[row, 0] == pytest.approx(PRODUCT_SCALE * clipped[0] * clipped[1])
        for level in range(3):
            for partner in range(2):
                expected = laws[row, partner] - (0.75, 0.25)[partner] if level == levels[row] else 0.0
                assert found[row, 1 + 2 * level + partner] == pytest.approx(expected)


@given(st.lists(st.floats(), min_size=1, max_size=6), st.floats(0, 1))
def test_a_row_s_features_are_bounded_whatever_stands_in_the_column(values: list[float], share: float) -> None:
    rows = len(values)
    laws = np.tile([1 - share, share], (rows, 1))
    found = context_features(np.array(values), np.zeros(rows, dtype=np.int64), OWN, laws, OTHER)
    assert np.isfinite(found).all()
    assert (np.abs(found[:, 0]) <= PRODUCT_SCALE * VALUE_BOUND**2).all()
    assert (np.linalg.norm(found[:, 1:], axis=1) <= math.sqrt(2) + 1e-12).all()


def test_no_number_counts_as_the_mean_and_infinity_as_the_end() -> None:
    found = OWN.standardised(np.array([math.nan, math.inf, -math.inf, 1e308, OWN.mean]))
    assert found.tolist() == [0.0, VALUE_BOUND, -VALUE_BOUND, VALUE_BOUND, 0.0]
    assert context([0.5, 0.5], [3.0, 3.0]).deviation == 1.0


def test_a_symbol_that_tells_nothing_adds_nothing() -> None:
    laws = np.tile(OTHER.prior_L, (2, 1))
    found = context_features(np.array([1.0, -5.0]), np.array([0, 2]), OWN, laws, OTHER)
    np.testing.assert_allclose(found, 0, atol=1e-15)


def test_features_have_mean_zero_over_the_other_party_s_symbols() -> None:
    """The products say nothing of the own column by itself: that is what own features are for."""
    kept = 0.6
    channel = (1 - kept) / 2 + kept * np.eye(2)
    sent_shares = OTHER.prior_L @ channel
    laws = (OTHER.prior_L[:, None] * channel / sent_shares).T
    for level in range(3):
        found = context_features(np.array([1.0, 1.0]), np.array([level] * 2), OWN, laws, OTHER)
        np.testing.assert_allclose(sent_shares @ found, 0, atol=1e-12)


def test_numbers_out_of_range_are_named() -> None:
    with pytest.raises(DataError, match="add up to 1"):
        context([0.5, 0.6], [0.0, 1.0])
    with pytest.raises(DataError, match="above 0"):
        context([1.0, 0.0], [0.0, 1.0])
    with pytest.raises(DataError, match="finite"):
        context([0.5, 0.5], [0.0, math.nan])
    with pytest.raises(DataError, match="two finite numbers or more"):
        context([1.0], [0.0])
    with pytest.raises(DataError, match="does not fit 1 rows and 2 levels"):
        context_features(np.zeros(1), np.zeros(1, dtype=np.int64), OWN, np.zeros((1, 3)), OTHER)
    with pytest.raises(DataError, match="from 0 to 2"):
        context_features(np.zeros(1), np.array([3]), OWN, np.array([[0.5, 0.5]]), OTHER)
