"""The normal law rounded down: its exact law, its arithmetic bit by bit, and the attempts that need more bits."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pbmvfl.crypto import rounded_normal as sampler
from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.crypto.rounded_normal import Scale
from support import statistical
from support.known_randomness import SeededEntropy

thresholds_of, short_thresholds, exp_coin = sampler._thresholds, sampler._short_thresholds, sampler._exp_coin
SIGMA = 2**28
#: Cells of the chi-square: edges in sixteenths of a standard deviation.
EDGES = range(-56, 57)
#: sigma = 1: no bit of x is in the integer part, every cell is a step of k, and y is often above 1.
UNIT = Scale(step_bits=0, low_bits=0)
#: sigma = 8: two bits of x are.
EIGHT = Scale(step_bits=1, low_bits=2)


class Constant:
    """Every byte the same: all zeros are the smallest numbers, so that coins succeed; all ones the largest."""

    seeded = True

    def __init__(self, byte: int) -> None:
        self.byte = byte

    def fill(self, buffer: npt.NDArray[np.uint8]) -> None:
        buffer.view(np.uint8)[...] = self.byte


def as_fractions(masses: list[mpmath.mpf]) -> list[Fraction]:
    """To 80 bits, with what is missing from 1 in the middle."""
    whole = [int(mass * 2**80) for mass in masses]
    whole[len(whole) // 2] += 2**80 - sum(whole)
    return [Fraction(each, 2**80) for each in whole]


def masses_between(edges: list[int], sigma: float) -> list[Fraction]:
    """Of floor(X) from each edge to the next, the tails included: floor(X) >= e is X >= e."""
    with mpmath.workdps(30):
        cdf = [mpmath.ncdf(mpmath.mpf(edge) / sigma) for edge in edges]
        return as_fractions([b - a for a, b in zip([mpmath.mpf(0), *cdf], [*cdf, mpmath.mpf(1)], strict=True)])


def rejects(values: npt.NDArray[np.int64], sigma: float = SIGMA) -> bool:
    """The shape over cells, the number of values within one standard deviation, and the sum of squares."""
    edges = [edge * 2**24 for edge in EDGES]
    observed = np.bincount(np.searchsorted(np.array(edges), values, side="right"), minlength=len(EDGES) + 1)
    inside = int(((values >= -SIGMA) & (values < SIGMA)).sum())
    expected = float(mpmath.erf(mpmath.mpf(SIGMA) / sigma / mpmath.sqrt(2)))
    squares = float((values.astype(np.float64) ** 2).sum() / sigma**2)
    tail = min(stats.chi2.cdf(squares, values.size), stats.chi2.sf(squares, values.size))
    return (
        statistical.chi_square_rejects(observed, masses_between(edges, sigma))
        or statistical.count_rejects(inside, values.size, expected, statistical.EXACT_ALARM / 2)
        or bool(tail < statistical.EXACT_ALARM / 4)
    )


# --- the law of what is drawn ---


@pytest.fixture(scope="module")
def draws() -> npt.NDArray[np.int64]:
    return sampler.rounded_normal(SystemEntropy(), statistical.NUM_DRAWS)


def test_draws_have_the_exact_law(draws):
    assert not rejects(draws)


@pytest.mark.parametrize("wrong", [0.95, 1.05])
def test_a_standard_deviation_wrong_by_a_twentieth_is_rejected(draws, wrong):
    assert rejects(draws, wrong * SIGMA)
    assert rejects((draws * wrong).astype(np.int64))


def test_draws_rounded_to_a_coarser_grid_are_noticed_in_their_last_bits(draws):
    for bits in range(8):  # the last bits are uniform but for 1e-8
        assert not statistical.uniform_law_rejects(np.bincount((draws >> (3 * bits)) & 7, minlength=8))
    assert statistical.uniform_law_rejects(np.bincount((draws * 2) & 7, minlength=8))


def test_neighbouring_draws_are_independent(draws):
    centred = draws + 0.5
    assert not statistical.products_reject_independence(centred[1:], centred[:-1])
    assert statistical.products_reject_independence(centred, centred)
    assert not statistical.mean_rejects(centred)


@pytest.mark.parametrize("count", [0, 1, 2, 31, 8191, 8192, 8193, 20_000])
def test_any_number_of_draws(count):
    assert sampler.rounded_normal(SystemEntropy(), count).shape == (count,)


def test_two_streams_give_different_noise_and_a_reused_one_the_same():
    first, again, other = (sampler.rounded_normal(SeededEntropy(seed), 100) for seed in (b"a", b"a", b"b"))
    assert (first == again).all()  # the control: this is what a reused stream looks like
    assert not (first == other).any()
    one = SystemEntropy()
    left, right = sampler.rounded_normal(one, 100), sampler.rounded_normal(one, 100)
    assert not (left == right).any()


# --- the law integer by integer, where the standard deviation is small ---


def small_draws(scale: Scale, count: int) -> npt.NDArray[np.int64]:
    """Draws of the attempt with longer numbers, which is the whole sampler but for its compiled shortcut."""
    entropy = SystemEntropy()
    words = np.empty((count, sampler.WORDS), dtype=np.uint32)
    entropy.fill(words)
    found = (sampler.decide(tuple(row), entropy, scale) for row in words.tolist())
    return np.array([value for value, accepted in found if accepted])


def small_rejects(values: npt.NDArray[np.int64], sigma: int) -> bool:
    edges = list(range(-4 * sigma, 4 * sigma + 1))
    observed = np.bincount(np.searchsorted(np.array(edges), values, side="right"), minlength=len(edges) + 1)
    return statistical.chi_square_rejects(observed, masses_between(edges, sigma))


@pytest.mark.parametrize("scale", [UNIT, EIGHT], ids=["sigma 1", "sigma 8"])
def test_every_integer_has_the_normal_law_s_probability_and_other_roundings_are_noticed(scale):
    sigma = 1 << scale.step_bits + scale.low_bits
    values = small_draws(scale, 40_000)
    assert len(values) > 20_000
    assert not small_rejects(values, sigma)
    assert not small_rejects(-1 - values, sigma)  # symmetric about -1/2
    assert small_rejects(-values, sigma)  # rounded up
    towards_zero = np.where(values < 0, values + 1, values)
    assert small_rejects(towards_zero, sigma)


def test_a_discrete_gaussian_is_not_the_rounded_normal():
    rng = np.random.default_rng(8)
    support = np.arange(-12, 13)
    weights = np.exp(-(support**2) / 2)
    assert small_rejects(rng.choice(support, 20_000, p=weights / weights.sum()), 1)
    assert not small_rejects(np.floor(rng.normal(size=20_000)).astype(np.int64), 1)


@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize(
    ("scale", "k", "low"),
    [
        (sampler.SCALE, 0, 0),
        (sampler.SCALE, 3, 2**24 - 1),
        (sampler.SCALE, 40, 12345),
        (sampler.SCALE, 290, 2**23),
        (UNIT, 0, 0),
        (UNIT, 5, 0),
        (EIGHT, 2, 3),
    ],
)
def test_an_attempt_s_share_of_a_cell_is_that_of_the_normal_law(scale, k, low, sign):
    """The weight of k times the mean of exp(-y) over the further bits of x, by quadrature, against Phi."""
    sigma = 1 << scale.step_bits + scale.low_bits
    n = scale.integer_part(k, low)
    value = -n - 1 if sign else n
    with mpmath.workdps(40):

        def accepted(more: mpmath.mpf) -> mpmath.mpf:
            return mpmath.exp(-mpmath.mpf(scale.exponent(k, low, int(more * 2**224))) / scale.one)

        share = mpmath.exp(-mpmath.mpf(k * k) / (2 << 2 * scale.step_bits)) * mpmath.quad(accepted, [0, 1])
        # The difference of two values of Phi on the side where they are small keeps its digits.
        ends = sorted((abs(mpmath.mpf(value)), abs(mpmath.mpf(value + 1))))
        cell = (mpmath.erfc(ends[0] / sigma / mpmath.sqrt(2)) - mpmath.erfc(ends[1] / sigma / mpmath.sqrt(2))) / 2
        assert abs(share / (cell * sigma * mpmath.sqrt(2 * mpmath.pi)) - 1) < mpmath.mpf(10) ** -22


@given(
    st.integers(0, 6), st.integers(0, 24), st.integers(0, 400), st.integers(0, 2**24 - 1), st.integers(0, 2**224 - 1)
)
def test_k_and_the_coin_together_make_the_gaussian_s_exponent(step_bits, low_bits, k, low, more):
    # exp(-(k / steps)^2 / 2) * exp(-y) = exp(-|X|^2 / (2 sigma^2)), as fractions in the exponent
    scale = Scale(step_bits=step_bits, low_bits=low_bits)
    low %= 2**low_bits
    y = Fraction(scale.exponent(k, low, more), scale.one)
    magnitude = scale.integer_part(k, low) + Fraction(more, 2**224)
    assert Fraction(k * k, 2 * 4**step_bits) + y == magnitude**2 / (2 * 4 ** (step_bits + low_bits))


# --- the arithmetic ---


@pytest.mark.parametrize("step_bits", [0, 1, 4])
def test_thresholds_are_the_law_of_k_to_two_hundred_bits(step_bits):
    with mpmath.workprec(400):
        steps = 1 << step_bits
        weights = [mpmath.exp(-((mpmath.mpf(k) / steps) ** 2) / 2) for k in range(44 * steps)]
        total, so_far = mpmath.fsum(weights), mpmath.mpf(0)
        thresholds = thresholds_of(step_bits)
        for weight, threshold in zip(weights, thresholds, strict=False):
            so_far += weight
            assert abs(mpmath.mpf(threshold) - so_far / total * 2**256) <= 1
        beyond = 1 - (so_far + weights[len(thresholds)]) / total  # k above all thresholds is the last one there is
        assert beyond < mpmath.mpf(2) ** -254


def by_definition(words: tuple[int, ...]) -> tuple[int, bool] | None:
    """An attempt in fractions, where these bits decide whatever follows them; None where they do not."""
    low, sign = words[1] % 2**24, words[1] >> 31
    k = 0
    for threshold in thresholds_of(4):
        at = Fraction(threshold, 2**224)
        if words[0] == math.floor(at):
            return None
        k += words[0] > at
    # the least and the most that y can be
    ends = [Fraction(j * (2**25 * k + j), 2**57) for j in (low, low + 1)]
    if ends[1] >= 1:
        return None
    for successes, word in enumerate(words[2:]):
        least, most = (end / (successes + 1) * 2**32 for end in ends)
        if not (word + 1 <= least or word >= most):
            return None
        if word >= most:
            break
    else:
        return None
    n = 2**24 * k + low
    return (-n - 1 if sign else n), successes % 2 == 0


def kernel(words: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    values, states = np.empty(words.shape[1], dtype=np.int64), np.empty(words.shape[1], dtype=np.uint8)
    sampler.attempt(words, short_thresholds(), values, states)
    return values, states


def odd_words(random: np.random.Generator, count: int) -> npt.NDArray[np.uint32]:
    """Ordinary words, and ones at every place where bits begin or cease to decide."""
    words = random.integers(0, 2**32, size=(5, count), dtype=np.uint32)
    part = count // 5
    words[2:, :part] = random.integers(0, 2**28, size=(3, part), dtype=np.uint32)  # coins that succeed
    short = short_thresholds()
    words[0, part : 2 * part] = random.choice(short, part) + random.integers(-1, 2, part).astype(np.uint32)
    words[1, :50] = random.integers(0, 2, 50).astype(np.uint32) << 31  # x begins with zeros, both signs
    words[1, 50:100] |= 2**24 - 1  # and with ones
    words[0, :25] = 0  # k = 0
    for n in (1, 2, 3):  # within some k of the ends of the n-th coin, which the ones before it reach
        chosen = slice((n + 1) * part, (n + 2) * part)
        k = np.searchsorted(short, words[0, chosen], side="left").astype(object)
        low = (words[1, chosen] & (2**24 - 1)).astype(object)
        coin = low * (2**25 * k + low) // 2**25 // n + random.integers(-3, 20, part) * (1 + k // 8)
        words[2 : 1 + n, chosen] = 0
        words[1 + n, chosen] = np.clip(coin.astype(np.int64), 0, 2**32 - 1)
    return words


def test_the_compiled_loop_decides_by_the_definition_and_nothing_that_later_bits_could_change():
    words = odd_words(np.random.default_rng(5), 3000)
    values, states = kernel(words)
    undecided = too_careful = 0
    for i in range(words.shape[1]):
        expected = by_definition(tuple(int(word) for word in words[:, i]))
        undecided += expected is None
        if states[i] == 2:
            too_careful += expected is not None
        else:
            assert (int(values[i]), bool(states[i])) == expected
    assert undecided > 500
    # It takes ends of coins together that a longer computation tells apart, and looks at coins that are not reached.
    assert too_careful < 1500


def test_few_attempts_are_left_undecided():
    words = np.empty((5, 400_000), dtype=np.uint32)
    SystemEntropy().fill(words)
    left = int((kernel(words)[1] == 2).sum())
    # Some 16 of a million, because the third coin succeeds: 60 of 400,000 has a probability below 1e-30.
    assert left < 60
    assert (kernel(np.zeros((5, 100), dtype=np.uint32))[1] == 2).all()  # the control


def test_longer_numbers_decide_as_the_short_ones_wherever_those_do():
    words = odd_words(np.random.default_rng(6), 1500)
    values, states = kernel(words)
    for i in np.flatnonzero(states < 2):
        for entropy in (SystemEntropy(), Constant(0), Constant(255)):
            value, accepted = sampler.decide(tuple(int(word) for word in words[:, i]), entropy)
            assert (value, accepted) == (values[i], bool(states[i]))


def test_what_the_loop_leaves_undecided_is_decided_by_the_bits_that_follow():
    words = np.zeros((5, 4), dtype=np.uint32)
    words[1] = [5, 2**24 - 1, 2**31 + 5, 0]
    words[2:, 1] = 0xFFFFFFFF
    assert kernel(words)[1].tolist() == [2, 1, 2, 2]  # near the end of a coin; decided; near; near
    # Ones: the numbers of the coins are as large as can be, so that the first coin fails and the attempt is accepted.
    assert sampler.draws_of(words, Constant(255)).tolist() == [5, 2**24 - 1, -6, 0]


@pytest.mark.parametrize(("byte", "succeeds"), [(0, False), (255, True)])
def test_the_further_bits_of_x_move_the_coin(byte, succeeds):
    """A word between the two ends of the first coin: x's zeros make it fail, x's ones make it succeed."""
    low, k_word = 2**23, 2**31
    k = sum(int(threshold) < k_word for threshold in short_thresholds())
    ends = [Fraction(j * (2**25 * k + j), 2**25) for j in (low, low + 1)]
    between = math.floor((ends[0] + ends[1]) / 2)
    assert math.ceil(ends[0]) <= between < between + 1 < ends[1]
    words = (k_word, low, between, 0xFFFFFFFF, 0xFFFFFFFF)  # the second coin fails: one success refuses
    assert kernel(np.array([words], dtype=np.uint32).T.copy())[1].tolist() == [2]

    class Further:
        """The five numbers' further bits: x's are `byte`, the others' zeros."""

        seeded = True

        def fill(self, buffer: npt.NDArray[np.uint8]) -> None:
            assert buffer.size == 5 * 28
            buffer[...] = 0
            buffer[28:56] = byte

    value, found = sampler.decide(words, Further())
    assert value == 2**24 * k + low
    assert found is not succeeds  # no success accepts, one refuses


def coin_law(y: int, one: int) -> Fraction:
    """The probability that a coin accepts, from the measure of each random number that lets it succeed."""
    accepts, alive = Fraction(0), Fraction(1)
    for n in range(60):
        success = Fraction(-(-y * 2**256 // (one * (n + 1))), 2**256)
        accepts += alive * (1 - success) if n % 2 == 0 else 0
        alive *= success
    return accepts


ONE = sampler.SCALE.one


@pytest.mark.parametrize("y", [0, 1, 2**400, ONE // 16, ONE // 3, ONE - 1, ONE])
def test_a_coin_has_the_probability_exp_of_minus_y(y):
    with mpmath.workprec(600):
        law = coin_law(y, ONE)
        truth = mpmath.exp(-mpmath.mpf(y) / ONE)
        assert abs(mpmath.mpf(law.numerator) / law.denominator - truth) < mpmath.mpf(2) ** -250


@settings(max_examples=60)
@given(st.integers(0, 64), st.lists(st.integers(0, 2**256 - 1), min_size=3, max_size=3))
def test_a_coin_counts_the_numbers_that_lie_below_its_parts(part, numbers):
    y = part * ONE // 64
    entropy = Constant(255)  # what follows fails
    successes = 0
    while successes < 3 and Fraction(numbers[successes], 2**256) < Fraction(y, ONE * (successes + 1)):
        successes += 1
    assert exp_coin(y, ONE, numbers, entropy) == (successes % 2 == 0)


@pytest.mark.parametrize("y", [ONE // 16, ONE // 2, ONE])
def test_a_coin_is_drawn_by_that_law(y):
    entropy = SystemEntropy()
    heads = sum(exp_coin(y, ONE, [], entropy) for _ in range(20_000))
    assert not statistical.count_rejects(heads, 20_000, math.exp(-y / ONE))
    assert statistical.count_rejects(heads, 20_000, math.exp(-y / ONE) * 0.9)


def test_where_y_is_above_one_its_whole_part_has_a_coin_of_its_own():
    # All bits one are in the tail: k is the largest there is, and y passes 1 within its step. The coin of what is above
    # 1 fails at once, which accepts; that of exp(-1) succeeds once, which refuses.
    largest, ones = len(thresholds_of(4)), 0xFFFFFFFF
    assert sampler.decide((ones, 0, ones, ones, ones), Constant(255)) == (largest << 24, True)
    last = (largest << 24) + 2**24 - 1
    assert sampler.decide((ones, 2**24 - 1, ones, ones, ones), Constant(255)) == (last, False)
