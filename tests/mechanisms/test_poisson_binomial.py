"""The sampler draws from the law that the account assumes, for the program and not only for real numbers."""

from __future__ import annotations

import itertools
import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms import Exact, LocalGaussian, PoissonBinomial
from pbmvfl.mechanisms.poisson_binomial import TILE, count_successes
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.events import LocalGaussianRelease, PoissonBinomialRelease, local_gaussian_variance
from pbmvfl.research.simulation.engine import noisy_sum
from support import statistical
from support.known_randomness import SeededEntropy
from support.statistical import NUM_DRAWS

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
betas = st.floats(1 / 128, 63 / 128)
bounds = st.floats(1e-3, 1e3)


def float32(value: float) -> float:
    """The nearest float32, by the standard library; beyond the largest, infinity."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def pbm(num_trials: int, beta: float, *, bound: float = 1.0, num_parties: int = 2) -> PoissonBinomial:
    return PoissonBinomial(num_trials=num_trials, beta=beta, bound=bound, num_parties=num_parties, embedding_dim=1)


EXACT = Exact(num_parties=2, embedding_dim=1)


def exact_probability(x: float, beta: float, bound: float) -> Fraction:
    """1/2 + beta x / C in whole units of 1/65536: the definition, in fractions."""
    beta_16 = math.floor(Fraction(beta) * 65536)
    shift = Fraction(x) / Fraction(bound) * beta_16
    return Fraction(32768 + max(-beta_16, min(beta_16, math.floor(shift + Fraction(1, 2)))), 65536)


def program_probabilities(values: list[float], beta: float, bound: float) -> list[int]:
    """How many of all 65536 random words are a success, by feeding each of them once: the law of one trial, exactly."""
    x = np.array(values, dtype=np.float32)
    beta_16 = math.floor(Fraction(beta) * 65536)
    counts = np.zeros(len(values), dtype=np.uint16)
    words = np.repeat(np.arange(65536, dtype=np.uint16), len(values))
    assert len(values) <= TILE
    count_successes(x, np.float32(beta_16 / bound), beta_16, 65536, words, counts)
    return counts.tolist()


def slow_counts(values: list[float], scale: float, beta_16: int, num_trials: int, words: list[int]) -> list[int]:
    """The kernel's contract in plain Python: one step at a time, rounded to float32 by the standard library."""
    thresholds = []
    for x in values:
        shift = min(max(float32(x * scale), float(-beta_16)), float(beta_16))
        thresholds.append(min(max(int(float32(shift + 32768.5)), 32768 - beta_16), 32768 + beta_16))
    counts = [0] * len(values)
    position = 0
    for start in range(0, len(values), 2048):
        tile = range(start, min(start + 2048, len(values)))
        for _ in range(num_trials):
            for i in tile:
                counts[i] += words[position] < thresholds[i]
                position += 1
    assert position == len(words)
    return counts


def drawn_counts(mechanism: PoissonBinomial, x: float, entropy: object = None) -> np.ndarray:
    drawn = mechanism.randomize(np.full((NUM_DRAWS // 100, 100), x, dtype=np.float32), entropy or SystemEntropy())
    return np.bincount(drawn.reshape(-1), minlength=mechanism.num_trials + 1)


# --- the law, without statistics ---


@given(
    values=st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=20),
    beta=betas,
    bound=bounds,
)
@example(values=[1.0, -1.0, 0.0], beta=0.25, bound=1.0)
@example(values=[1.0, -1.0, 0.0], beta=1 / 128, bound=1.0)
@example(values=[1.0, -1.0, 0.0], beta=63 / 128, bound=1.0)
def test_one_trial_succeeds_with_the_defined_probability(values, beta, bound):
    # Fed with all 65536 words, so a comparison <= in place of < shows here as one unit too much.
    values = [float32(x * bound) for x in values]
    for x, program in zip(values, program_probabilities(values, beta, bound), strict=True):
        exact = 65536 * exact_probability(x, beta, bound)
        # float32 arithmetic may turn an exact half unit to either side: 1/256 of a unit is its spacing there.
        beta_16 = math.floor(Fraction(beta) * 65536)
        shift = Fraction(x) / Fraction(bound) * beta_16
        distance_to_half = abs((shift - Fraction(1, 2)) - round(shift - Fraction(1, 2)))
        assert program == exact or (abs(program - exact) == 1 and distance_to_half < Fraction(1, 128))


@given(beta=betas, bound=bounds, beyond=st.floats(1, 1e30))
@example(beta=0.25, bound=1.0, beyond=1.0)
@example(beta=0.1, bound=1.0, beyond=LARGEST_FLOAT32)
def test_values_at_and_beyond_the_bound_clamp_to_the_end_points_exactly(beta, bound, beyond):
    beta_16 = math.floor(Fraction(beta) * 65536)
    x = float32(max(bound * min(beyond, 1e35), float32(bound)))
    assert program_probabilities([x, -x], beta, bound) == [32768 + beta_16, 32768 - beta_16]


@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1), beta=betas)
def test_no_value_whatever_leaves_the_interval_of_the_account(values, beta):
    beta_16 = math.floor(Fraction(beta) * 65536)
    assert all(abs(p - 32768) <= beta_16 for p in program_probabilities(values, beta, 1.0))


@pytest.mark.parametrize("exponent", [-300, -41, -30, -3, 0, 3, 30, 41, 300])
def test_every_bound_that_a_plan_accepts_gives_the_middle_and_the_end_points(exponent, data, make_plan):
    bound = 10.0**exponent
    try:
        plan = make_plan(data, bound=bound)
    except PlanError:
        return  # a plan may refuse a bound; it must not accept one that the sampler cannot use
    with np.errstate(over="ignore"):
        end = float(np.float32(bound))
        assert 0 < end < math.inf, "an encoder could not even output this bound"
        found = program_probabilities([-end, 0.0, end], plan.beta, bound)
    assert found == [32768 - plan.beta_16, 32768, 32768 + plan.beta_16]


@settings(max_examples=60)
@given(
    size=st.one_of(st.integers(1, 60), st.sampled_from([2047, 2048, 2049, 4095, 4096, 4097, 6145])),
    num_trials=st.integers(1, 300),
    beta=betas,
    bound=bounds,
    seed=st.integers(0, 2**32),
)
@example(size=1, num_trials=300, beta=0.25, bound=1.0, seed=0)
@example(size=2049, num_trials=1, beta=0.25, bound=1.0, seed=0)
def test_the_kernel_equals_plain_python_bit_for_bit(size, num_trials, beta, bound, seed):
    num_trials = min(num_trials, max(1, 60_000 // size))
    random = np.random.default_rng(seed)
    values = (random.uniform(-1.2, 1.2, size) * bound).astype(np.float32)
    words = random.integers(0, 65536, size * num_trials).astype(np.uint16)
    words[::3] = random.integers(-3, 4, words[::3].size) + 32768  # many near the middle, where values near 0 decide
    beta_16 = math.floor(Fraction(beta) * 65536)
    scale = np.float32(beta_16 / bound)
    counts = np.full(size, 9, dtype=np.uint16)
    count_successes(values, scale, beta_16, num_trials, words, counts)
    assert counts.tolist() == slow_counts(values.tolist(), float(scale), beta_16, num_trials, words.tolist())


@pytest.mark.parametrize(
    ("num_trials", "size"), [(1, 3), (1, 262_145), (7, 40_000), (300, 874), (300, 2_000), (1000, 600)]
)
def test_randomize_spends_the_stream_in_order_across_blocks_and_tiles(num_trials, size, counter_mode):
    values = np.random.default_rng(size).uniform(-1, 1, size).astype(np.float32)
    drawn = pbm(num_trials, 0.2).randomize(values, SeededEntropy(b"known"))
    words = np.frombuffer(counter_mode(b"known".ljust(32, b"\0"), 2 * size * num_trials, first_block=2), dtype="<u2")
    block = (1 << 19) // (2 * num_trials)  # random bytes are drawn half a megabyte at a time
    expected = []
    for start in range(0, size, block):
        part = values[start : start + block].tolist()
        used = words[start * num_trials : (start + len(part)) * num_trials].tolist()
        beta_16 = math.floor(Fraction(0.2) * 65536)
        expected += slow_counts(part, float(np.float32(beta_16)), beta_16, num_trials, used)
    assert drawn.tolist() == expected


@given(
    values=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=5000 // 2),
    where=st.integers(0),
    bad=st.sampled_from([math.nan, math.inf, -math.inf]),
)
@settings(max_examples=50)
def test_nan_and_infinity_are_drawn_as_zero_and_the_ends(values, where, bad):
    x = np.array(values, dtype=np.float32)
    x[where % x.size] = bad
    same = x.copy()
    same[where % x.size] = 0 if math.isnan(bad) else math.copysign(1, bad)
    for mechanism in (pbm(3, 0.2), LocalGaussian(num_parties=2, num_trials=3, beta=0.2), EXACT):
        drawn = [mechanism.randomize(each, SeededEntropy(b"odd")) for each in (x, same)]
        assert np.array_equal(drawn[0], drawn[1])


def test_a_nan_in_a_later_block_is_drawn_as_zero_too():
    x = np.zeros(2000, dtype=np.float32)
    x[-1] = np.nan
    drawn = [pbm(300, 0.2).randomize(each, SeededEntropy(b"odd")) for each in (x, np.zeros_like(x))]
    assert np.array_equal(drawn[0], drawn[1])


def test_the_shape_is_kept_and_strided_values_are_read_in_order():
    x = np.where(np.arange(12).reshape(3, 4) % 2, 1, -1).astype(np.float32)
    for view in (x, x.T, x[:, ::2]):
        flat = np.ascontiguousarray(view)
        drawn = pbm(9, 0.25).randomize(view, SeededEntropy(b"shape"))
        assert drawn.shape == view.shape
        assert np.array_equal(drawn, pbm(9, 0.25).randomize(flat, SeededEntropy(b"shape")))


# --- the law, by drawing ---


@pytest.mark.parametrize(
    ("num_trials", "beta", "bound", "x"),
    [
        (1, 0.25, 1.0, 1.0),
        (1, 1 / 128, 1.0, -1.0),
        (4, 0.1, 1.0, 1.0),
        (4, 0.1, 1.0, -1.0),
        (4, 0.1, 1.0, 0.0),
        (4, 0.1, 1.0, 1e30),
        (4, 0.1, 1.0, -7.0),
        (16, 0.25, 1.0, 0.3),
        (16, 0.25, 2.5, -2.5),
        (64, 0.15, 0.5, 0.125),
        (300, 0.05, 1.0, -0.6),
        (2, 0.48, 1.0, 1.0),
        (3, 63 / 128, 1.0, -0.4),
    ],
)
def test_draws_follow_the_exact_binomial_law(num_trials, beta, bound, x):
    counts = drawn_counts(pbm(num_trials, beta, bound=bound), x)
    probability = exact_probability(float32(x), beta, bound)
    assert counts.sum() == NUM_DRAWS
    assert not statistical.binomial_law_rejects(counts, num_trials, probability)


@pytest.mark.parametrize("wrong", [0.95, 1.05])
@pytest.mark.parametrize("x", [1.0, -1.0])
def test_a_sampler_whose_beta_is_wrong_by_five_percent_is_caught(wrong, x):
    # Known bytes: the control gives the same answer in every run.
    counts = drawn_counts(pbm(4, 0.1 * wrong), x, SeededEntropy(b"control"))
    assert statistical.binomial_law_rejects(counts, 4, exact_probability(x, 0.1, 1.0))
    assert not statistical.binomial_law_rejects(counts, 4, exact_probability(x, 0.1 * wrong, 1.0))


@pytest.mark.parametrize("wrong", [0.95, 1.05])
def test_the_power_against_five_percent_of_beta_is_as_stated(wrong):
    true, planted = exact_probability(1.0, 0.1, 1.0), exact_probability(1.0, 0.1 * wrong, 1.0)
    law = [float(p) for p in statistical.binomial_pmf(4, planted)]
    samples = np.random.default_rng(1).multinomial(NUM_DRAWS, law, size=1000)
    caught = sum(statistical.binomial_law_rejects(sample, 4, true) for sample in samples)
    assert caught >= statistical.POWER * len(samples)


def test_the_right_law_is_never_rejected_in_a_thousand_samples():
    probability = exact_probability(1.0, 0.1, 1.0)
    law = [float(p) for p in statistical.binomial_pmf(4, probability)]
    samples = np.random.default_rng(2).multinomial(NUM_DRAWS, law, size=1000)
    assert not any(statistical.binomial_law_rejects(sample, 4, probability) for sample in samples)


def test_a_wrong_shape_with_the_right_mean_is_caught():
    # One word shared by two trials: the mean is right, the variance is not. Only the chi-square can see it.
    fair = np.random.default_rng(3).binomial(2, 0.6, NUM_DRAWS) * 2
    assert statistical.binomial_law_rejects(np.bincount(fair, minlength=5), 4, Fraction(3, 5))


def test_the_false_alarm_rate_of_two_cells_is_as_stated():
    from scipy import stats

    n, p = NUM_DRAWS, statistical.SMALLEST_EXPECTED / NUM_DRAWS
    limit = math.sqrt(stats.chi2.isf(statistical.CHI_SQUARE_ALARM, 1) * n * p * (1 - p))
    rate = stats.binom.cdf(math.ceil(n * p - limit) - 1, n, p) + stats.binom.sf(math.floor(n * p + limit), n, p)
    assert rate < statistical.CHI_SQUARE_TRUE_ALARM
    assert statistical.CHI_SQUARE_TRUE_ALARM + statistical.EXACT_ALARM <= statistical.FALSE_ALARM


def test_a_comparison_with_less_or_equal_could_not_be_seen_by_drawing():
    # It moves p by 1/65536. That is why the law of one trial is also tested by feeding all words.
    p = exact_probability(1.0, 0.1, 1.0)
    law = [float(q) for q in statistical.binomial_pmf(4, p + Fraction(1, 65536))]
    sample = np.random.default_rng(4).multinomial(NUM_DRAWS, law)
    assert not statistical.binomial_law_rejects(sample, 4, p)


#: Neighbours in a row, in a column, one tile apart, and one cipher block apart.
LAGS = (1, 8, 100, 2048)


def test_draws_of_different_rows_and_coordinates_are_uncorrelated():
    drawn = pbm(4, 0.1).randomize(np.zeros((NUM_DRAWS // 100, 100), dtype=np.float32), SystemEntropy())
    centred = drawn.reshape(-1) - 2.0
    for lag in LAGS:
        assert not statistical.products_reject_independence(centred[:-lag], centred[lag:])


@pytest.mark.parametrize("lag", LAGS)
def test_draws_that_share_one_word_in_four_are_caught(lag):
    # The planted error: one of a value's four random words serves a neighbour too.
    words = np.random.default_rng(5).integers(0, 2, (4, NUM_DRAWS))
    shared = words.copy()
    shared[0] = np.roll(words[1], lag)
    centred = shared.sum(axis=0) - 2.0
    assert statistical.products_reject_independence(centred[:-lag], centred[lag:])


def test_two_releases_of_one_embedding_are_uncorrelated():
    x, entropy = np.zeros(NUM_DRAWS, dtype=np.float32), SystemEntropy()
    mechanism = pbm(4, 0.1)
    first, second = (mechanism.randomize(x, entropy) - 2.0 for _ in range(2))
    assert not statistical.products_reject_independence(first, second)


# --- the estimator ---


@given(
    x=st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=3),
    num_trials=st.integers(1, 4),
    beta=betas,
    bound=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_the_estimate_is_unbiased_and_its_variance_is_within_the_bound(x, num_trials, beta, bound):
    # Expectations over every outcome of every party, in fractions.
    mechanism = pbm(num_trials, beta, bound=bound, num_parties=len(x))
    x = [float32(value * bound) for value in x]
    laws = [statistical.binomial_pmf(num_trials, Fraction(p, 65536)) for p in program_probabilities(x, beta, bound)]
    sums = np.arange(num_trials * len(x) + 1, dtype=np.uint16)
    estimates = [Fraction(float(value)) for value in mechanism.estimate(sums)]
    mean = square = Fraction(0)
    for outcome in itertools.product(range(num_trials + 1), repeat=len(x)):
        probability = math.prod((law[q] for law, q in zip(laws, outcome, strict=True)), start=Fraction(1))
        mean += probability * estimates[sum(outcome)]
        square += probability * estimates[sum(outcome)] ** 2
    # 1e-3 of the bound for each party is what 16-bit probabilities cost at the smallest beta.
    assert abs(mean - sum(map(Fraction, x))) < Fraction(len(x) * bound) / 1000
    assert square - mean**2 <= Fraction(mechanism.variance_upper_bound) * (1 + Fraction(1, 10**5))


@given(x=st.floats(-1, 1, width=32), beta=betas)
@example(x=1.0, beta=1 / 128)
def test_rounding_a_probability_moves_an_embedding_by_less_than_a_thousandth(x, beta):
    beta_16 = math.floor(Fraction(beta) * 65536)
    meant = Fraction(program_probabilities([x], beta, 1.0)[0] - 32768, beta_16)
    assert abs(meant - Fraction(x)) < Fraction(1, 1000)


def test_the_variance_bound_is_the_papers_and_is_attained_in_the_middle():
    mechanism = pbm(6, 0.25, bound=2.0, num_parties=5)
    assert mechanism.variance_upper_bound == pytest.approx(2.0**2 * 5 / (4 * 0.25**2 * 6), rel=1e-12)
    step = Fraction(2 * 4, 6)  # C / (beta b)
    assert float(step**2 * 5 * 6 * Fraction(1, 4)) == pytest.approx(mechanism.variance_upper_bound, rel=1e-12)


# --- the baselines ---


@pytest.mark.parametrize(("x", "mean"), [(0.25, 0.25), (2.0, 2.0), (9.0, 2.0), (-9.0, -2.0)])
def test_the_local_baseline_adds_the_papers_gaussian_to_the_clamped_value(x, mean):
    plan = Plan.of(num_samples=1, num_classes=2, mechanism="ldp", num_trials=8, beta=0.2, bound=2.0, num_parties=3)
    mechanism = plan.release
    variance = 2 * 3 / (8 * 0.2**2) * 2.0**2  # NOTES: 2M/(b beta^2), in units of C^2
    drawn = mechanism.randomize(np.full(NUM_DRAWS, x, dtype=np.float32), SystemEntropy()).astype(np.float64)
    assert not statistical.normal_law_rejects(drawn, mean=mean, variance=variance)
    assert mechanism.variance_upper_bound == pytest.approx(3 * variance)
    assert np.array_equal(mechanism.estimate(np.float32([1.5])), np.float32([1.5]))


@pytest.mark.parametrize("wrong", [0.95, 1.05])
def test_a_gaussian_whose_variance_is_wrong_by_five_percent_is_caught(wrong):
    values = np.random.default_rng(6).normal(0, math.sqrt(wrong), NUM_DRAWS)
    assert statistical.normal_law_rejects(values, mean=0.0, variance=1.0)


@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_the_exact_mechanism_passes_values_through(values):
    x = np.array(values, dtype=np.float32)
    released = EXACT.estimate(EXACT.randomize(x, SystemEntropy()))
    assert released.tobytes() == x.tobytes()
    assert EXACT.variance_upper_bound == 0


# --- one event for the account and the sampler ---


def test_the_account_charges_the_variance_that_is_drawn():
    plan = Plan.of(num_samples=1, num_classes=2, mechanism="ldp", num_trials=7, beta=0.21, bound=1.7, num_parties=3)
    mechanism = plan.release
    (event,) = plan.training_run().releases
    assert isinstance(event, LocalGaussianRelease)
    assert event.variance == pytest.approx(2 * 3 * 1.7**2 / (7 * 0.21**2), rel=1e-12)  # 2 M C^2 / (b beta^2)
    assert mechanism.event == event
    assert local_gaussian_variance(num_parties=3, num_trials=7, beta=0.21, bound=1.7) == event.variance
    drawn = mechanism.randomize(np.zeros(NUM_DRAWS, dtype=np.float32), SystemEntropy()).astype(np.float64)
    assert not statistical.normal_law_rejects(drawn, mean=0, variance=event.variance)


def test_a_mechanism_draws_by_the_event_that_the_account_has(monkeypatch):
    # Whatever the account is told, the sampler follows: there is no second place where the numbers are made.
    common = {"num_samples": 1, "num_classes": 2, "num_trials": 4, "beta": 0.2, "num_parties": 3}
    told = PoissonBinomialRelease(num_trials=4, beta=0.1, num_parties=3, embedding_dim=16)
    monkeypatch.setattr(PoissonBinomial, "event", told)
    plan = Plan.of(**common)
    assert plan.training_run().releases == (told,)
    drawn = plan.release.randomize(np.ones(NUM_DRAWS, dtype=np.float32), SystemEntropy())
    assert not statistical.binomial_law_rejects(np.bincount(drawn, minlength=5), 4, exact_probability(1.0, 0.1, 1.0))
    wide = LocalGaussianRelease(variance=9.0, bound=1.0, num_parties=3, embedding_dim=16)
    monkeypatch.setattr(LocalGaussian, "event", wide)
    plan = Plan.of(**common, mechanism="ldp")
    assert plan.training_run().releases == (wide,)
    drawn = plan.release.randomize(np.ones(NUM_DRAWS, dtype=np.float32), SystemEntropy())
    assert not statistical.normal_law_rejects(drawn.astype(np.float64), mean=1.0, variance=9.0)


@pytest.mark.parametrize("bound", [1.0, 2.5])
def test_the_simulated_baseline_has_the_deviation_of_the_mechanism_that_is_charged(bound, data, make_plan):
    plan = make_plan(data, mechanism="ldp", bound=bound)
    simulated = noisy_sum(plan, torch.device("cpu"))
    drawn = simulated(torch.zeros(plan.num_parties, NUM_DRAWS, 1)).numpy().ravel().astype(np.float64)
    assert not statistical.normal_law_rejects(drawn, mean=0.0, variance=plan.release.variance_upper_bound)
    charged = plan.training_run().releases[0]
    assert isinstance(charged, LocalGaussianRelease)
    assert plan.release.variance_upper_bound == pytest.approx(plan.num_parties * charged.variance, rel=1e-12)
