"""Tests of the audit's tests: their exact false-alarm rates, and laws written down once more from the definitions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from pbmvfl.audit import laws
from pbmvfl.audit.constants import DEVIATIONS, FALSE_ALARM_RATE, LEVEL, MOST_TESTS, NOMINAL_RATE, SMALLEST_EXPECTED
from pbmvfl.audit.games import at_least, at_most, epsilon_at_least
from pbmvfl.audit.laws import sent_law, trials_for
from pbmvfl.audit.statistics import (
    IntegerLaw,
    chi_square_test,
    count_test,
    law_tests,
    normal_test,
    pooled,
    uniform_tests,
)
from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.mechanisms import MECHANISMS, PoissonBinomial, PolyaLaplace, RandomisedSymbols
from pbmvfl.mechanisms.label_response import LabelResponse


def test_the_stated_rate_has_room_for_every_test_at_ten_times_its_level() -> None:
    assert pytest.approx(NOMINAL_RATE) == MOST_TESTS * LEVEL
    assert pytest.approx(FALSE_ALARM_RATE) == 10 * NOMINAL_RATE


@pytest.mark.parametrize("trials", [1000, 20_000, 10**6, 10**8])
def test_the_true_rate_of_a_chi_square_is_below_ten_times_the_nominal_one(trials: int) -> None:
    """Exactly, for two cells of which one expects as little as is permitted: the least favourable ones."""
    share = SMALLEST_EXPECTED / trials
    reach = math.sqrt(stats.chi2.isf(LEVEL, 1) * trials * share * (1 - share))
    below = stats.binom.cdf(math.ceil(SMALLEST_EXPECTED - reach) - 1, trials, share)
    above = stats.binom.sf(math.floor(SMALLEST_EXPECTED + reach), trials, share)
    assert below + above < 10 * LEVEL


@pytest.mark.parametrize("share", [0.5, 0.25, 0.01, 0.9995])
def test_the_true_rate_of_a_mean_is_below_ten_times_the_nominal_one(share: float) -> None:
    """Exactly, for one bit, where the audit takes a mean for normal; where it does not, there is no such test."""
    trials = 200_000
    law = IntegerLaw(0, np.array([1 - share, share]))
    if not law.nearly_normal(trials):
        assert share == 0.9995
        return
    reach = stats.norm.isf(LEVEL / 2) * math.sqrt(trials * share * (1 - share))
    below = stats.binom.cdf(math.ceil(trials * share - reach) - 1, trials, share)
    above = stats.binom.sf(math.floor(trials * share + reach), trials, share)
    assert below + above < 10 * LEVEL


def test_counts_have_the_exact_two_sided_p_value() -> None:
    terms = [Fraction(math.comb(12, k), 3**k) * Fraction(2, 3) ** (12 - k) for k in range(13)]
    for seen in range(13):
        tails = sum(terms[: seen + 1]), sum(terms[seen:])
        expected = min(1.0, 2 * float(min(tails)))
        assert count_test("", "", seen, 12, 1 / 3).p_value == pytest.approx(expected, rel=1e-9)


def test_ends_of_intervals_are_where_the_tail_is_the_error() -> None:
    for seen, trials, error in ((3, 50, 0.025), (49, 50, 1e-6), (0, 10**6, 0.05)):
        top = at_most(seen, trials, error)
        assert stats.binom.cdf(seen, trials, top) == pytest.approx(error, rel=1e-6)
        if seen:
            assert stats.binom.sf(seen - 1, trials, at_least(seen, trials, error)) == pytest.approx(error, rel=1e-6)
    assert at_least(0, 9, 0.05) == 0.0
    assert at_most(9, 9, 0.05) == 1.0
    # Nothing shown is no epsilon, and more games without a false alarm show more.
    assert epsilon_at_least(10, 10, 100, delta=1e-5, error=0.05) == 0.0
    assert epsilon_at_least(500, 0, 1000, delta=1e-5, error=0.05) < math.log(1000 / 3)


def test_pooling_keeps_every_draw_and_every_expectation() -> None:
    random = np.random.default_rng(1)
    expected = random.exponential(200, size=300)
    counts = random.poisson(expected)
    seen, means = pooled(counts, expected)
    assert seen.sum() == counts.sum()
    assert means.sum() == pytest.approx(expected.sum())
    assert means.min() >= SMALLEST_EXPECTED


def test_too_few_draws_for_a_chi_square_are_an_error_and_no_verdict() -> None:
    with pytest.raises(ValueError, match="too few"):
        chi_square_test("", np.array([300, 300]), np.array([0.5, 0.5]))


def test_what_is_no_number_is_no_pass() -> None:
    assert normal_test("", "", 1, math.nan).p_value == 0.0


# --- laws ---


def test_the_law_of_pbm_is_the_definition_in_fractions() -> None:
    pbm = PoissonBinomial(num_parties=3, num_trials=5, beta=0.1)
    for unit, shift in ((1.0, 6553), (-1.0, -6553), (0.0, 0)):
        p = Fraction(32768 + shift, 65536)
        terms = [math.comb(5, k) * p**k * (1 - p) ** (5 - k) for k in range(6)]
        law = sent_law(pbm.event, unit)
        assert law is not None
        assert law.probabilities == pytest.approx([float(term) for term in terms], rel=1e-12)


def test_shares_of_laplace_noise_add_up_to_the_closed_form() -> None:
    noise = PolyaLaplace(num_parties=3, levels=4, scale=2.5)
    share = sent_law(noise.event, 0.0)
    assert share is not None
    total = share.plus(share).plus(share)
    ratio = math.exp(-1 / 2.5)
    near = np.abs(total.values) <= 30
    closed = (1 - ratio) / (1 + ratio) * ratio ** np.abs(total.values[near])
    assert total.probabilities[near] == pytest.approx(closed, rel=1e-6)
    assert sent_law(noise.event, 1.0).mean == pytest.approx(4.0, abs=1e-9)  # type: ignore[union-attr]


def test_every_private_mechanism_has_a_law() -> None:
    for name in ("pbm", "laplace", "krr", "ldp"):
        assert laws.has_law(MECHANISMS[name](num_parties=2))
    assert not laws.has_law(MECHANISMS["none"](num_parties=2))


@pytest.mark.parametrize(("trials", "beta"), [(16, 0.25), (16, 0.1), (1, 0.25), (4, 0.1), (64, 0.4)])
def test_draws_are_enough_to_see_one_per_cent_of_beta(trials: int, beta: float) -> None:
    """By the two laws, without the audit's own formula: the counted bits move by the promised deviations."""
    pbm = PoissonBinomial(num_parties=2, num_trials=trials, beta=beta)
    bits = 4 * trials_for(pbm, 20_000) * trials
    claimed, faulty = (0.5 + factor * pbm.event.beta_16 / 65536 for factor in (1.0, 1.01))
    assert (faulty - claimed) * bits / math.sqrt(bits * claimed * (1 - claimed)) > 0.999 * DEVIATIONS


@pytest.mark.parametrize("epsilon", [0.01, 4.0, 16.0])
def test_rare_answers_raise_no_alarm(epsilon: float) -> None:
    """At epsilon 16 one label in ten million is changed: a mean would not be normal, and is not tested."""
    found = list(laws.label_tests(LabelResponse(num_classes=3, epsilon=epsilon), SystemEntropy(), 50_000))
    krr = RandomisedSymbols(num_parties=2, symbols=200, response_epsilon=epsilon)
    found += laws.mechanism_tests(krr, SystemEntropy(), 50_000)
    many = PolyaLaplace(num_parties=5000, scale=300.0)
    found += laws.mechanism_tests(many, SystemEntropy(), 50_000)
    assert min(each.p_value for each in found) >= LEVEL
    assert ("mean" in {each.law for each in found if each.what.startswith("drawn")}) == (epsilon < 16)


# --- controls: what is wrong is seen ---


def test_draws_that_repeat_are_seen_though_their_law_is_right() -> None:
    draws = np.repeat(np.random.default_rng(2).binomial(4, 0.6, size=20_000), 2)
    law = IntegerLaw(0, stats.binom.pmf(np.arange(5), 4, 0.6))
    assert {each.law for each in law_tests("", draws, law) if each.p_value < LEVEL} == {"neighbours"}


def test_an_impossible_draw_is_an_alarm_by_itself() -> None:
    law = IntegerLaw(0, stats.binom.pmf(np.arange(5), 4, 0.6))
    draws = np.append(np.random.default_rng(2).binomial(4, 0.6, size=40_000), 5)
    assert {each.law for each in law_tests("", draws, law) if each.p_value < LEVEL} == {"support"}


def test_a_residue_that_never_comes_is_seen_in_a_ring_of_sixteen_bits() -> None:
    values = np.random.default_rng(3).integers(0, 65535, size=32 << 16)  # the end point is excluded
    assert {each.law for each in uniform_tests("", values, 16) if each.p_value < LEVEL} == {"top residue"}
