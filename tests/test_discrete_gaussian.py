"""The discrete Gaussian: its law, its arithmetic bit by bit, and the Renyi divergence that is charged for it."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

import statistical
from known_randomness import SeededEntropy
from pbmvfl.privacy.events import DiscreteGaussianUpdate, event_from_dict
from pbmvfl.randomness import discrete_gaussian as sampler
from pbmvfl.randomness.secret import SystemEntropy

SIGMA = 2**28
ONE = 2**57  # y = 1 in the sampler's units
#: Cells of the chi-square: edges in sixteenths of a standard deviation.
EDGES = range(-56, 57)


class Ones:
    """All bits one: the largest numbers, so that coins fail."""

    seeded = True

    def fill(self, buffer: npt.NDArray[np.uint8]) -> None:
        buffer.view(np.uint8)[...] = 255


def exact_masses(sigma: int, edges: range) -> list[Fraction]:
    """Masses of the discrete Gaussian between edges * 2^24 (left ends count), the tails included.

    For such a sigma the sum over integers is that of the density shifted by half a step, to far below 1e-15
    (Poisson summation leaves exp(-2 pi^2 sigma^2); the rule of the midpoint an error of order 1/sigma^2).
    """
    with mpmath.workdps(30):
        cdf = [mpmath.ncdf((mpmath.mpf(edge) * 2**24 - mpmath.mpf(1) / 2) / sigma) for edge in edges]
        masses = [b - a for a, b in zip([mpmath.mpf(0), *cdf], [*cdf, mpmath.mpf(1)], strict=True)]
        whole = [int(mass * 2**80) for mass in masses]
    whole[len(whole) // 2] += 2**80 - sum(whole)
    return [Fraction(each, 2**80) for each in whole]


def rejects(values: npt.NDArray[np.int64], sigma: int = SIGMA) -> bool:
    """The shape over cells, and the exact number of values within one step of the standard deviation."""
    cells = np.searchsorted(np.array(EDGES) * 2**24, values, side="right")
    observed = np.bincount(cells, minlength=len(EDGES) + 1)
    inside = int((np.abs(values) < SIGMA).sum())
    expected = float(mpmath.erf(mpmath.mpf(SIGMA) / sigma / mpmath.sqrt(2)))
    squares = float((values.astype(np.float64) ** 2).sum() / sigma**2)
    tail = min(stats.chi2.cdf(squares, values.size), stats.chi2.sf(squares, values.size))
    return (
        statistical.chi_square_rejects(observed, exact_masses(sigma, EDGES))
        or statistical.count_rejects(inside, values.size, expected, statistical.EXACT_ALARM / 2)
        or bool(tail < statistical.EXACT_ALARM / 4)
    )


# --- the law ---


@pytest.fixture(scope="module")
def draws() -> npt.NDArray[np.int64]:
    return sampler.discrete_gaussian(SystemEntropy(), statistical.NUM_DRAWS)


def test_draws_have_the_exact_law(draws):
    assert not rejects(draws)


@pytest.mark.parametrize("wrong", [0.95, 1.05])
def test_a_standard_deviation_wrong_by_a_twentieth_is_rejected(draws, wrong):
    assert rejects(draws, int(wrong * SIGMA))
    assert rejects((draws * wrong).astype(np.int64))


def test_a_draw_rounded_to_a_coarser_grid_is_noticed_in_its_last_bits(draws):
    for bits in range(8):  # the last bits are uniform but for 1e-8
        assert not statistical.uniform_law_rejects(np.bincount((draws >> (3 * bits)) & 7, minlength=8))
    assert statistical.uniform_law_rejects(np.bincount((draws * 2) & 7, minlength=8))


def test_neighbouring_draws_are_independent(draws):
    centred = draws.astype(np.float64)
    assert not statistical.products_reject_independence(centred[1:], centred[:-1])
    assert statistical.products_reject_independence(centred, centred)
    assert not statistical.mean_rejects(centred)


@pytest.mark.parametrize("count", [0, 1, 2, 31, 8191, 8192, 8193, 20_000])
def test_any_number_of_draws(count):
    assert sampler.discrete_gaussian(SystemEntropy(), count).shape == (count,)


def test_two_streams_give_different_noise_and_a_reused_one_the_same():
    first, again, other = (sampler.discrete_gaussian(SeededEntropy(seed), 100) for seed in (b"a", b"a", b"b"))
    assert (first == again).all()  # the control: this is what a reused stream looks like
    assert not (first == other).any()
    one = SystemEntropy()
    left, right = sampler.discrete_gaussian(one, 100), sampler.discrete_gaussian(one, 100)
    assert not (left == right).any()


# --- the arithmetic ---


def test_thresholds_are_the_law_of_k_to_two_hundred_bits():
    with mpmath.workprec(400):
        weights = [mpmath.exp(-((mpmath.mpf(k) / 16) ** 2) / 2) for k in range(700)]
        total, so_far = mpmath.fsum(weights), mpmath.mpf(0)
        for weight, threshold in zip(weights, sampler._thresholds(), strict=False):
            so_far += weight
            assert abs(mpmath.mpf(threshold) - so_far / total * 2**256) <= 1
        assert 1 - so_far / total < mpmath.mpf(2) ** -250  # what lies beyond the last one


def by_definition(words: tuple[int, ...]) -> tuple[int, bool] | None:
    """An attempt in fractions, where 32 bits of each random number decide; None where they do not."""
    low, sign = words[1] % 2**24, words[1] >> 31
    k = 0
    for threshold in sampler._thresholds():
        at = Fraction(threshold, 2**224)
        if words[0] == math.floor(at):
            return None
        k += words[0] > at
    y = Fraction(low * (2 * 2**24 * k + low), 2 * SIGMA**2)
    if y >= 1:
        return None
    successes = 0
    for word, coin in zip(words[2:], (y, y / 2, y / 3), strict=True):
        if word == math.floor(coin * 2**32):
            return None
    for word, coin in zip(words[2:], (y, y / 2, y / 3), strict=True):
        if word >= coin * 2**32:
            break
        successes += 1
    if successes == 3:
        return None
    magnitude = 2**24 * k + low
    return (-magnitude if sign else magnitude), successes % 2 == 0 and not (sign and magnitude == 0)


def kernel(words: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    values, states = np.empty(words.shape[1], dtype=np.int64), np.empty(words.shape[1], dtype=np.uint8)
    sampler.attempt(words, sampler._short_thresholds(), values, states)
    return values, states


def test_the_compiled_loop_is_the_definition_for_ordinary_and_for_odd_words():
    random = np.random.default_rng(5)
    words = random.integers(0, 2**32, size=(5, 1500), dtype=np.uint32)
    words[2:, :900] = random.integers(0, 2**28, size=(3, 900), dtype=np.uint32)  # coins that succeed
    words[0, 900:1200] = random.choice(sampler._short_thresholds(), 300) + random.integers(-1, 2, 300).astype(np.uint32)
    words[1, :50] = random.integers(0, 2, 50).astype(np.uint32) << 31  # j = 0, both signs
    words[0, :25] = 0  # and k = 0
    values, states = kernel(words)
    undecided = 0
    for i in range(words.shape[1]):
        expected = by_definition(tuple(int(word) for word in words[:, i]))
        if expected is None:
            undecided += 1
            assert states[i] == 2
        else:
            assert (int(values[i]), bool(states[i])) == expected
            assert states[i] < 2
    assert undecided > 50


def test_longer_numbers_decide_as_the_short_ones_wherever_those_do():
    random = np.random.default_rng(6)
    words = random.integers(0, 2**32, size=(5, 400), dtype=np.uint32)
    values, states = kernel(words)
    for i in np.flatnonzero(states < 2):
        value, accepted = sampler.decide(tuple(int(word) for word in words[:, i]), SystemEntropy())
        assert (value, accepted) == (values[i], bool(states[i]))


def test_what_the_loop_leaves_undecided_is_decided_and_counted():
    words = np.zeros((5, 3), dtype=np.uint32)
    words[1] = [5, 2**24 - 1, 2**31]
    words[2:, 1] = 0xFFFFFFFF
    assert kernel(words)[1].tolist() == [2, 1, 2]  # ties with 0; decided; a tie
    drawn = sampler.draws_of(words, Ones())
    assert drawn.tolist() == [5, 2**24 - 1]  # the second zero is refused


def coin_law(y: int) -> Fraction:
    """The probability that a coin accepts, from the measure of each random number that lets it succeed."""
    accepts, alive = Fraction(0), Fraction(1)
    for n in range(60):
        success = Fraction(-(-y * 2**256 // (ONE * (n + 1))), 2**256)
        accepts += alive * (1 - success) if n % 2 == 0 else 0
        alive *= success
    return accepts


@pytest.mark.parametrize("y", [0, 1, 2**20, ONE // 16, ONE // 3, ONE - 1, ONE])
def test_a_coin_has_the_probability_exp_of_minus_y(y):
    with mpmath.workprec(400):
        law = coin_law(y)
        truth = mpmath.exp(-mpmath.mpf(y) / ONE)
        assert abs(mpmath.mpf(law.numerator) / law.denominator - truth) < mpmath.mpf(2) ** -250


@pytest.mark.parametrize("y", [ONE // 16, ONE // 2, ONE])
def test_a_coin_is_drawn_by_that_law(y):
    entropy = SystemEntropy()
    heads = sum(sampler._exp_coin(y, [], entropy) for _ in range(20_000))
    assert not statistical.count_rejects(heads, 20_000, math.exp(-y / ONE))
    assert statistical.count_rejects(heads, 20_000, math.exp(-y / ONE) * 0.9)


@pytest.mark.parametrize(("k", "low"), [(0, 0), (0, 7), (3, 2**24 - 1), (40, 12345), (200, 2**23), (290, 2**24 - 1)])
def test_k_and_the_coin_together_make_the_gaussian_s_exponent(k, low):
    # exp(-(k/16)^2 / 2) * exp(-y) = exp(-x^2 / (2 sigma^2)), as fractions in the exponent
    y = Fraction(low * ((k << 25) + low), ONE)
    x = (k << 24) + low
    assert Fraction(k * k, 512) + y == Fraction(x * x, 2 * SIGMA**2)


def test_values_whose_y_is_above_one_are_accepted_by_that_exponent_too():
    # k = 280: y is about 1.09 at the end of its steps. All bits one are in the tail: k is the largest there is.
    value, accepted = sampler.decide((0xFFFFFFFF, 2**24 - 1, 0, 0, 0), Ones())
    assert value == (len(sampler._thresholds()) << 24) + 2**24 - 1
    assert isinstance(accepted, bool)


# --- what is charged ---


def renyi(shift: int, sigma: mpmath.mpf, order: float) -> mpmath.mpf:
    """D(N_Z(shift, sigma^2) || N_Z(0, sigma^2)) from the definition, summed until nothing is left."""
    reach = int(60 * sigma) + abs(shift) * (int(order) + 2)
    total = mpmath.fsum(mpmath.exp(-(mpmath.mpf(x) ** 2) / (2 * sigma**2)) for x in range(-reach, reach + 1))
    moment = mpmath.fsum(
        mpmath.exp(-(order * mpmath.mpf(x - shift) ** 2 + (1 - order) * mpmath.mpf(x) ** 2) / (2 * sigma**2))
        for x in range(-reach, reach + 1)
    )
    return mpmath.log(moment / total) / (order - 1)


@pytest.mark.parametrize("sigma", ["0.4", "1", "3.7"])
@pytest.mark.parametrize("shift", [1, 2, 5])
@pytest.mark.parametrize("order", [1.5, 2.0, 8.25])
def test_a_discrete_gaussian_costs_at_most_what_the_event_says(sigma, shift, order):
    # In units where the row's limit is shift/2: noise_multiplier = sigma / (shift / 2).
    with mpmath.workdps(30):
        truth = float(renyi(shift, mpmath.mpf(sigma), order))
    event = DiscreteGaussianUpdate(clip_norm=1.0, noise_multiplier=2 * float(sigma) / shift)
    assert truth <= event.rdp((order,))[0]
    if order.is_integer():  # then the shifted lattice is the same one, and the bound is attained
        assert truth >= event.rdp((order,))[0] * (1 - 1e-8)


def test_its_hockey_stick_curve_is_not_the_continuous_one_s_so_it_has_no_account_by_losses():
    # sigma = 1/2, shift 1: the continuous curve is 1 - 2*ncdf(-1) = 0.683 at epsilon 0, the discrete one above it.
    with mpmath.workdps(20):
        weights = [mpmath.exp(-2 * mpmath.mpf(x) ** 2) for x in range(-30, 32)]
        laws = [w / mpmath.fsum(weights) for w in weights]
        discrete = mpmath.fsum(max(mpmath.mpf(0), a - b) for a, b in zip([0, *laws], [*laws, 0], strict=True))
        assert discrete > 1 - 2 * mpmath.ncdf(-1)
    assert type(DiscreteGaussianUpdate(clip_norm=1.0, noise_multiplier=1.0).losses()).__name__ == "NoLosses"


def test_the_event_is_read_as_it_was_written():
    event = DiscreteGaussianUpdate(clip_norm=0.5, noise_multiplier=6.3)
    assert event.to_dict() == {"event": "discrete-gaussian-update", "clip_norm": 0.5, "noise_multiplier": 6.3}
    assert event_from_dict(event.to_dict()) == event
