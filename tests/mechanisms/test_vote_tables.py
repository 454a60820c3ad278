"""Tables of symbols: what a cell moves, the law of their noise, and scores against Bayes by enumeration."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms import RandomisedSymbols
from pbmvfl.mechanisms.vote_tables import (
    TABLE_DIAMETER,
    ballot_scores,
    class_scores,
    exact_counts,
    log_prior,
    noisy_counts,
    sent_log_likelihoods,
    steps_per_row,
    symbol_shares,
)
from support import statistical

ONE = 2**32


class NoNoise:
    """Words for which every attempt of the sampler ends at the same number; tables then differ by data alone."""

    seeded = True

    def fill(self, buffer: npt.NDArray[Any]) -> None:
        buffer.view(np.uint8)[...] = 0x35


# --- counting ---


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=40))
def test_counts_are_those_of_a_loop(rows: list[tuple[int, int]]) -> None:
    labels, symbols = (np.array([row[i] for row in rows], dtype=np.int64) for i in (0, 1))
    expected = [[sum(row == (k, s) for row in rows) for s in range(5)] for k in range(3)]
    assert exact_counts(symbols, labels, 3, 5).tolist() == expected


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=12),
    changed=st.integers(0, 11),
    symbol=st.integers(0, 4),
    deviation=st.sampled_from([0.37, 1.0, 5.0, 77.7]),
)
def test_replacing_one_cell_moves_the_table_by_at_most_its_diameter(
    rows: list[tuple[int, int]], changed: int, symbol: int, deviation: float
) -> None:
    """In steps: two counts by one row each. Against noise of that deviation it is a shift of sqrt 2 / deviation."""
    labels, symbols = (np.array([row[i] for row in rows], dtype=np.int64) for i in (0, 1))
    other = symbols.copy()
    other[changed % len(rows)] = symbol
    before, after = (noisy_counts(each, labels, 3, 5, deviation, NoNoise()) for each in (symbols, other))
    distance = math.sqrt(
        sum((a - b) ** 2 for a, b in zip(before.ravel().tolist(), after.ravel().tolist(), strict=True))
    )
    assert distance <= math.sqrt(2) * 2**28 / deviation
    assert math.sqrt(2) == TABLE_DIAMETER
    if symbol != symbols[changed % len(rows)]:
        assert distance >= 0.999 * math.sqrt(2) * 2**28 / deviation  # it is attained


@pytest.mark.parametrize("deviation", [2.0, 5.0])
def test_every_count_has_noise_of_the_stated_deviation_and_less_is_noticed(deviation: float) -> None:
    """Nearly normal: a step is 2^-28 of a deviation. 400 tables of 40 * 12 counts."""
    symbols, labels = np.arange(12).repeat(9), np.zeros(108, dtype=np.int64)
    tables = [noisy_counts(symbols, labels, 40, 12, deviation, SystemEntropy()) for _ in range(400)]
    exact = np.zeros((40, 12))
    exact[0] = 9
    errors = np.stack([table / steps_per_row(deviation) - exact for table in tables]).ravel()
    assert not statistical.normal_law_rejects(errors, mean=0.0, variance=deviation**2)
    assert statistical.normal_law_rejects(errors, mean=0.0, variance=(1.05 * deviation) ** 2)
    assert statistical.normal_law_rejects(errors, mean=0.0, variance=(deviation / 1.05) ** 2)


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, 1e-4, 1e7, "5", True])
def test_a_deviation_out_of_range_is_named(bad: Any) -> None:
    with pytest.raises(PlanError, match=r"table_deviation="):
        steps_per_row(bad)


def test_more_rows_than_64_bits_can_count_are_refused() -> None:
    many = np.broadcast_to(np.int64(0), (2**25,))
    with pytest.raises(PlanError, match=r"table_deviation=0.001 is too small for 33,554,432 rows.*use 0.002 or more"):
        noisy_counts(many, many, 2, 2, 0.001, NoNoise())


# --- from counts to probabilities ---


@settings(max_examples=80, deadline=None)
@given(
    counts=st.lists(st.integers(-400, 4000), min_size=2, max_size=8),
    total=st.integers(0, 5000),
    deviation=st.sampled_from([0.5, 5.0, 100.0]),
)
def test_shares_are_probabilities_whatever_the_noise_was(counts: list[int], total: int, deviation: float) -> None:
    noisy = np.array([counts], dtype=np.int64) * steps_per_row(deviation)
    shares = symbol_shares(noisy, np.array([total]), deviation)[0]
    assert np.all(shares > 0)
    assert shares.sum() == pytest.approx(1, abs=1e-12)
    order = np.argsort(counts, kind="stable")
    assert np.all(np.diff(shares[order]) >= -1e-12)  # a larger count never gets a smaller share


@pytest.mark.parametrize(("counts", "total"), [([5.0, -2.0, 3.0], 6), ([1.0, 1.0, 1.0], 9), ([-4.0, -5.0, 2.0], 1)])
def test_the_nearest_permitted_table_counts(counts: list[float], total: int) -> None:
    """Against all tables of thirds of a row."""
    grid = 3
    best = min(
        ((a, b, total * grid - a - b) for a, b in product(range(total * grid + 1), repeat=2) if a + b <= total * grid),
        key=lambda table: sum((x / grid - c) ** 2 for x, c in zip(table, counts, strict=True)),
    )
    deviation = 1.0
    noisy = np.array([[round(c * steps_per_row(deviation)) for c in counts]], dtype=np.int64)
    shares = symbol_shares(noisy, np.array([total]), deviation)[0]
    smoothed = shares * (total + 3 * 0.5) - 0.5
    assert smoothed.tolist() == pytest.approx([x / grid for x in best], abs=0.34)


def test_many_rows_and_little_noise_give_the_true_shares() -> None:
    rng = np.random.default_rng(1)
    truth = np.array([[0.5, 0.3, 0.2, 0.0], [0.1, 0.1, 0.1, 0.7]])
    labels = np.repeat([0, 1], 50_000)
    symbols = np.concatenate([rng.choice(4, 50_000, p=row) for row in truth])
    noisy = noisy_counts(symbols, labels, 2, 4, 5.0, SystemEntropy())
    found = symbol_shares(noisy, np.bincount(labels), 5.0)
    assert np.abs(found - truth).max() < 0.02


# --- Bayes by enumeration ---


def posterior(
    prior: list[Fraction], true: list[list[list[Fraction]]], own: Fraction, other: Fraction, sent: tuple[int, ...]
) -> list[Fraction]:
    """P(class | sent), summing over everything that the parties' true symbols can be."""
    joint = []
    for k, first in enumerate(prior):
        total = Fraction(0)
        for symbols in product(range(len(true[0][0])), repeat=len(sent)):
            mass = first
            for m, (symbol, seen) in enumerate(zip(symbols, sent, strict=True)):
                mass *= true[m][k][symbol] * (own if symbol == seen else other)
            total += mass
        joint.append(total)
    return [each / sum(joint) for each in joint]


@pytest.mark.parametrize(("num_classes", "num_symbols", "num_parties"), [(2, 2, 3), (3, 3, 2), (2, 4, 2)])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_scores_are_the_logarithms_of_the_posterior(
    num_classes: int, num_symbols: int, num_parties: int, epsilon: float
) -> None:
    rng = np.random.default_rng(num_classes + num_symbols)
    weights = rng.integers(0, 9, (num_parties, num_classes, num_symbols)) + (rng.random((1, 1, num_symbols)) < 2)
    true = [[[Fraction(int(w), int(row.sum())) for w in row] for row in table] for table in weights]
    rows = np.array([30, 50, 20][:num_classes])
    mechanism = RandomisedSymbols(
        num_parties=num_parties, embedding_dim=1, symbols=num_symbols, response_epsilon=epsilon
    )
    weight = mechanism.event.other_weight
    own, other = Fraction(ONE - (num_symbols - 1) * weight, ONE), Fraction(weight, ONE)
    shares = [np.array([[float(p) for p in row] for row in table]) for table in true]
    tables = [sent_log_likelihoods(each, mechanism.kept) for each in shares]
    every = list(product(range(num_symbols), repeat=num_parties))
    scores = class_scores(np.array(every).T.astype(np.uint16), tables, log_prior(rows))
    prior = [Fraction(int(row), int(rows.sum())) for row in rows]
    for sent, found in zip(every, scores.tolist(), strict=True):
        truth = [math.log(p) for p in posterior(prior, true, own, other, sent)]
        assert found == pytest.approx(truth, rel=1e-4, abs=1e-5)
        assert int(np.argmax(found)) == int(np.argmax(truth)) or abs(max(truth) - sorted(truth)[-2]) < 1e-5


def test_a_number_that_is_no_symbol_says_nothing() -> None:
    table = np.log(np.array([[0.9, 0.1], [0.2, 0.8]]))
    scores = class_scores(np.array([[0, 7, 65535]]), [table], np.log(np.array([0.25, 0.75])))
    assert np.exp(scores[1]).tolist() == pytest.approx([0.25, 0.75], abs=1e-6)
    assert np.array_equal(scores[1], scores[2])
    assert not np.array_equal(scores[0], scores[1])


def test_classes_without_rows_have_a_small_prior_and_no_error() -> None:
    prior = np.exp(log_prior(np.array([10, 0, 30])))
    assert prior.sum() == pytest.approx(1)
    assert 0 < prior[1] < 0.02
    shares = symbol_shares(np.full((2, 3), -(2**40), dtype=np.int64), np.array([0, 0]), 5.0)
    assert np.all(np.isfinite(shares))
    assert shares.sum(axis=1).tolist() == pytest.approx([1, 1])


def test_the_class_with_the_likelier_symbols_is_found_through_the_whole_pipeline() -> None:
    """Three parties whose symbols say the class three times in four; what Bayes can get at best is 27/32."""
    rng = np.random.default_rng(2)
    labels, asked = rng.integers(0, 2, 4000), rng.integers(0, 2, 4000)
    mechanism = RandomisedSymbols(num_parties=3, embedding_dim=1, symbols=2, response_epsilon=8.0)
    tables, sent = [], []
    for _ in range(3):
        own, later = (np.where(rng.random(4000) < 0.75, each, 1 - each) for each in (labels, asked))
        noisy = noisy_counts(own, labels, 2, 2, 5.0, SystemEntropy())
        shares = symbol_shares(noisy, np.bincount(labels), 5.0)
        tables.append(sent_log_likelihoods(shares, mechanism.kept))
        values = (2.0 * later - 1).astype(np.float32)[:, None]
        sent.append(mechanism.payload.encode(mechanism.randomize(values, SystemEntropy())))
    scores = class_scores(mechanism.payload.each(sent, 4000), tables, log_prior(np.bincount(labels)))
    # 27/32 -+ 7 standard deviations
    assert abs((scores.argmax(axis=1) == asked).mean() - 27 / 32) < 7 * math.sqrt(27 / 32 * 5 / 32 / 4000)


# --- sums of ballots ---


@pytest.mark.parametrize("scale", [0.7, 2.0])
def test_scores_of_one_noisy_count_are_the_logarithms_of_the_posterior(scale: float) -> None:
    """One coordinate, three parties, two classes: every way in which the parties can have voted, in fractions."""
    chances = [[Fraction(1, 4), Fraction(2, 3)], [Fraction(1, 2), Fraction(1, 8)], [Fraction(0), Fraction(9, 10)]]
    rows = np.array([30, 10])
    seen = np.arange(-9, 13)
    shares = [np.array([[float(p)] for p in party]) for party in chances]
    scores = ballot_scores(seen[:, None].astype(np.float32), shares, scale, log_prior(rows))
    for total, found in zip(seen.tolist(), scores.tolist(), strict=True):
        joint = []
        for k, prior in enumerate((0.75, 0.25)):
            likelihood = 0.0
            for votes in product((0, 1), repeat=3):
                ways = math.prod(float(p[k] if v else 1 - p[k]) for p, v in zip(chances, votes, strict=True))
                likelihood += ways * math.exp(-abs(total - sum(votes)) / scale)
            joint.append(prior * likelihood)
        assert found == pytest.approx([math.log(each / sum(joint)) for each in joint], rel=1e-4, abs=1e-5)


def test_ballots_far_out_are_read_like_those_at_the_edge_and_none_is_no_number() -> None:
    shares = [np.array([[0.9, 0.1], [0.2, 0.8]])] * 3
    far = np.array([[1e6, -1e6], [3e9, 0.0], [3e2, 0.0], [3.0, 0.0]], dtype=np.float32)
    scores = ballot_scores(far, shares, 1.5, np.log(np.array([0.5, 0.5])))
    assert np.all(np.isfinite(scores))
    assert scores.argmax(axis=1).tolist() == [0, 0, 0, 0]
    assert np.array_equal(scores[1], scores[2])
    assert np.exp(scores).sum(axis=1).tolist() == pytest.approx([1, 1, 1, 1], abs=1e-5)


def test_what_tables_know_of_confusions_makes_ballots_worth_more() -> None:
    """Class 2 is always taken for class 1 by everybody: counting ballots alone never finds it."""
    confused = [np.array([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.6, 0.3]])] * 5
    ballots = np.array([[0, 3, 2], [0, 5, 0], [5, 0, 0]], dtype=np.float32)
    scores = ballot_scores(ballots, confused, 0.5, np.log(np.ones(3) / 3))
    assert scores.argmax(axis=1).tolist() == [2, 1, 0]
    assert ballots.argmax(axis=1).tolist() == [1, 1, 0]
