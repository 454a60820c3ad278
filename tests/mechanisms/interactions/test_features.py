"""Context features against a loop, their bounds for whatever stands in a column, and the server's tables of pairs."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbmvfl.errors import DataError, PlanError
from pbmvfl.mechanisms.interactions.features import (
    PRODUCT_SCALE,
    VALUE_BOUND,
    Context,
    context_features,
    fitted_table,
    num_context_features,
    pair_scores,
    response_channel,
)

Array = npt.NDArray[np.float64]


def context(prior: list[float], values: list[float]) -> Context:
    return Context(prior_L=np.array(prior), values_L=np.array(values))


OWN = context([0.5, 0.25, 0.25], [-1.0, 0.0, 2.0])
OTHER = context([0.75, 0.25], [0.0, 1.0])


def test_features_are_those_of_a_loop_over_rows_and_levels() -> None:
    rng = np.random.default_rng(0)
    values, levels = rng.normal(size=40), rng.integers(0, 3, size=40)
    laws = rng.dirichlet([1.0, 1.0], size=40)
    found = context_features(values, levels, OWN, laws, OTHER)
    assert found.shape == (40, num_context_features(OWN, OTHER)) == (40, 7)
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
    channel = response_channel(2, kept)
    sent_shares = OTHER.prior_L @ channel
    laws = (OTHER.prior_L[:, None] * channel / sent_shares).T
    for level in range(3):
        found = context_features(np.array([1.0, 1.0]), np.array([level] * 2), OWN, laws, OTHER)
        np.testing.assert_allclose(sent_shares @ found, 0, atol=1e-12)


# --- the server's tables ---


def seen_counts(law: Array, first: Array, second: Array, rows: float) -> Array:
    """Expected counts of (class, sent, sent), by the definition."""
    classes, a, b = law.shape
    counts = np.zeros((classes, first.shape[1], second.shape[1]))
    for label in range(classes):
        for one in range(a):
            for other in range(b):
                counts[label] += rows * law[label, one, other] * np.outer(first[one], second[other])
    return counts


def log_likelihood(counts: Array, law: Array, first: Array, second: Array) -> float:
    return float((counts * np.log(seen_counts(law, first, second, 1.0))).sum())


@pytest.mark.parametrize("kept", [1.0, 0.7])
def test_a_table_is_recovered_from_the_counts_that_it_makes(kept: float) -> None:
    rng = np.random.default_rng(1)
    law = rng.dirichlet(np.ones(2 * 3 * 4) * 5).reshape(2, 3, 4)
    first, second = response_channel(3, kept), response_channel(4, kept)
    counts = seen_counts(law, first, second, 1e7)
    np.testing.assert_allclose(fitted_table(counts, first, second, rounds=3_000), law, atol=2e-5)


def test_fitting_raises_the_likelihood() -> None:
    rng = np.random.default_rng(2)
    first, second = response_channel(3, 0.5), response_channel(3, 0.5)
    counts = rng.multinomial(100_000, rng.dirichlet(np.ones(18))).reshape(2, 3, 3).astype(float)
    found = [
        log_likelihood(counts, fitted_table(counts, first, second, rounds=rounds), first, second)
        for rounds in (1, 2, 5, 20, 100)
    ]
    assert found == sorted(found)


def test_an_empty_table_is_even_and_no_cell_is_empty() -> None:
    channel = response_channel(2, 0.9)
    np.testing.assert_allclose(fitted_table(np.zeros((2, 2, 2)), channel, channel), 1 / 8)
    lonely = np.zeros((2, 2, 2))
    lonely[1, 1, 1] = 50
    assert (fitted_table(lonely, channel, channel) > 0).all()


def test_a_pair_adds_nothing_where_the_columns_are_additive_and_its_scores_are_centred() -> None:
    rng = np.random.default_rng(3)
    effects_a, effects_b = rng.normal(size=(3, 4)), rng.normal(size=(3, 5))
    additive = np.exp(effects_a[:, :, None] + effects_b[:, None, :])
    levels = rng.dirichlet(np.ones(4))[:, None] * rng.dirichlet(np.ones(5))[None, :]
    # Log odds of two classes are additive; the normaliser is the same for both, so the difference of scores is 0.
    two = additive[:2] / additive[:2].sum(axis=0) * levels
    scores = pair_scores(two)
    np.testing.assert_allclose(scores[1] - scores[0], 0, atol=1e-12)
    three = pair_scores(rng.dirichlet(np.ones(60)).reshape(3, 4, 5))
    assert np.abs(three).max() > 0.1
    law = rng.dirichlet(np.ones(60)).reshape(3, 4, 5)
    scores, first, second = pair_scores(law), law.sum(axis=(0, 2)), law.sum(axis=(0, 1))
    np.testing.assert_allclose(scores @ second, 0, atol=1e-12)
    np.testing.assert_allclose(np.einsum("a,kab->kb", first, scores), 0, atol=1e-12)


def test_an_exclusive_or_is_all_interaction() -> None:
    law = np.array([[[0.2, 0.05], [0.05, 0.2]], [[0.05, 0.2], [0.2, 0.05]]])
    scores = pair_scores(law)
    np.testing.assert_allclose(scores[1] - scores[0], math.log(4) * np.array([[-1, 1], [1, -1]]), atol=1e-12)


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
    with pytest.raises(PlanError, match=r"kept=1\.5"):
        response_channel(2, 1.5)
    with pytest.raises(DataError, match="do not fit channels"):
        fitted_table(np.zeros((2, 3, 2)), response_channel(2, 0.5), response_channel(2, 0.5))
