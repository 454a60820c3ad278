"""Reported epsilons against lower bounds and exact values by other code: never below, and close."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from benchmarks.looseness import Setting, lower_bound, measure, pair, random_settings, reported
from scipy.special import logsumexp, ndtr
from scipy.stats import binom

from pbmvfl.privacy.adaptive import adaptive_losses
from pbmvfl.privacy.conversion import composed_cell, epsilon_from_losses
from pbmvfl.privacy.large_sums import NODES, Bits, grouped_divergences, largest_loss, log_pmf_window, strides
from pbmvfl.privacy.loss_distribution import (
    NOTHING_RELEASED,
    LossDistribution,
    cell_losses,
    compose,
    compose_parts,
)
from pbmvfl.privacy.orders import ORDERS
from pbmvfl.privacy.renyi import cell_rdp
from support.exact_laws import Law, pairs_by_k


def cell(b: int, m: int, beta_16: int, count: int, delta: float) -> Setting:
    return Setting("cell", b, m, beta_16, 0, 1, count, delta)


#: Sums of few bits and many releases, where the hull over k was too high by up to 11%; sums of many bits, where it was
#: not used and noise was left out; one release and 10^6 of them; large and small delta.
SETTINGS = [
    cell(1, 5, 16384, 100, 1e-2),
    cell(1, 12, 16384, 100, 1e-2),
    cell(1, 2, 4000, 1000, 1e-5),
    cell(3, 10, 16384, 1000, 1e-2),
    cell(10, 50, 16384, 300, 1e-2),
    cell(30, 50, 3000, 1, 1e-6),
    cell(60, 100, 8000, 20, 1e-9),
    cell(9, 1000, 16384, 10**6, 1e-10),
    cell(9000, 2, 512, 1, 1e-2),
    cell(900, 40, 512, 40, 1e-4),
    cell(100, 655, 6553, 1, 1e-10),
    cell(1, 65535, 512, 10**6, 1e-10),
    Setting("record", 40, 30, 2000, 3, 2, 5, 1e-7),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_reported_epsilon_lies_between_a_lower_bound_and_a_twentieth_above(setting: Setting) -> None:
    outcome = measure(setting)
    assert outcome.lower <= outcome.reported <= 1.05 * outcome.lower
    assert outcome.lower > 0
    assert outcome.reported <= outcome.pure * (1 + 1e-12)


def test_random_settings_are_never_below_a_lower_bound_nor_above_the_pure_bound() -> None:
    for setting in itertools.islice((s for s in random_settings(400, 7) if s.bits < 4000), 12):
        epsilon, _, _ = reported(setting)
        assert lower_bound(setting) <= epsilon <= setting.pure * (1 + 1e-12)


@pytest.mark.parametrize("unit", ["cell", "record"])
@pytest.mark.parametrize(("b", "m"), [(1, 2), (2, 3), (1, 40), (700, 2), (4000, 2)])
def test_no_epsilon_is_above_the_pure_bound(unit: str, b: int, m: int) -> None:
    for beta_16, delta in itertools.product((512, 16384), (1e-10, 1e-2)):
        setting = Setting(unit, b, m, beta_16, 0, 1, 1, delta)
        epsilon, _, _ = reported(setting)
        assert epsilon <= setting.pure * (1 + 1e-12)


def test_with_a_gaussian_the_pure_bound_is_that_of_the_bits_and_the_gaussian() -> None:
    composed = composed_cell(num_trials=1, beta_16=600, noisy_parties=3, coordinates=2, gaussian_shift=0.9, delta=1e-6)
    alone = epsilon_from_losses(NOTHING_RELEASED, 0.9, 1e-6, 50.0)
    both = composed.epsilon(1e-6, 50.0)
    assert alone < both <= (alone + largest_loss(2, 600)) * (1 + 2e-5)


def test_the_largest_sums_have_finite_epsilons() -> None:
    """How long they take is a figure of `python -m benchmarks.looseness`."""
    for b, m in ((1000, 65), (1, 65535), (32767, 2)):
        epsilon, *_ = reported(cell(b, m, 6553, 16, 1e-6))
        assert 0 < epsilon < math.inf


# --------------------------------------------------------------------------------- windows and groups (theory 2.9)


@pytest.mark.parametrize(
    ("n", "high", "beta_16", "away"),
    [
        (3000, 0, 16384, 0.0),
        (3000, 1100, 512, 0.0),
        (4000, 3990, 9000, 30.0),
        (2500, 600, 32000, 12.0),
        (9, 4, 900, 0.0),
    ],
)
def test_log_pmfs_of_a_window_are_as_good_as_they_say(n: int, high: int, beta_16: int, away: int) -> None:
    bits = Bits(n, beta_16)
    middle = min(bits.mean(high) + away * bits.deviation, n - 2)
    first, last = max(0, int(middle - 9 * bits.deviation)), min(n, int(middle + 9 * bits.deviation))
    logs, error = log_pmf_window(bits, high, first, last)
    assert len(logs) == last - first + 1
    with mpmath.workdps(40):
        lo, hi = mpmath.mpf(32768 - beta_16) / 65536, mpmath.mpf(32768 + beta_16) / 65536
        for x in sorted({first, (first + last) // 2, last}):
            truth = mpmath.log(
                mpmath.fsum(
                    mpmath.binomial(high, i) * hi**i * lo ** (high - i)
                    * mpmath.binomial(n - high, x - i) * lo ** (x - i) * hi ** (n - high - x + i)
                    for i in range(max(0, x - n + high), min(high, x) + 1)
                )
            )  # fmt: skip
            assert abs(float(mpmath.mpf(float(logs[x - first])) - truth)) <= error
    assert error < 1e-9


@pytest.mark.parametrize(("n", "high", "beta_16"), [(40, 13, 16384), (2000, 700, 1000), (500, 500, 32000)])
def test_mass_outside_of_a_window_is_bounded(n: int, high: int, beta_16: int) -> None:
    bits, (lo, hi) = Bits(n, beta_16), ((32768 - beta_16) / 65536, (32768 + beta_16) / 65536)
    law = np.convolve(binom.pmf(range(high + 1), high, hi), binom.pmf(range(n - high + 1), n - high, lo))
    for log_tail in (-5.0, -20.0):
        top, bottom = bits.reach(high, 1, log_tail), bits.reach(high, -1, log_tail)
        assert law[top + 1 :].sum() <= math.exp(log_tail) + 1e-15
        assert law[:bottom].sum() <= math.exp(log_tail) + 1e-15
    for x in range(math.ceil(bits.mean(high)), n + 1, max(1, n // 20)):
        assert law[x:].sum() <= math.exp(bits.log_tail(high, x)) + 1e-15


@pytest.mark.parametrize(
    ("n", "b", "groups"), [(1537, 1, 112), (5000, 2500, 112), (30, 3, 5), (64, 60, 3), (7, 1, 112)]
)
def test_every_k_is_in_a_group_that_has_its_noise(n: int, b: int, groups: int) -> None:
    stride, starts = strides(n, b, groups)
    noise = n - b - stride + 1  # the other bits of a group's pair
    assert all(0 <= j <= noise for j in starts)
    for k in range(n - b + 1):
        # some group has no more bits at hi and no more at lo than this k has
        assert any(j <= k and noise - j <= n - b - k for j in starts)


@pytest.mark.parametrize(
    ("b", "m", "beta_16"), [(1, 6000, 16384), (40, 60, 512), (1500, 2, 6553), (3000, 5, 3000), (20, 2000, 9000)]
)
def test_curves_of_large_sums_are_upper_bounds_and_close(b: int, m: int, beta_16: int) -> None:
    n, orders = b * m, (1.01, 1.3, 2.0, 5.0, 20.0)
    curve = cell_rdp(b, beta_16, m, orders)
    shift = (beta_16 / 32768) * b / math.sqrt(n * (0.25 - (beta_16 / 65536) ** 2))
    assert np.all(curve <= b * math.log((32768 + beta_16) / (32768 - beta_16)) * (1 + 2e-9))
    for order, value in zip(orders, curve, strict=True):
        reached = 0.0
        for k in (0, (n - b) // 2, n - b):
            masses, losses = pair(n, b, k, beta_16)
            # without what the oracle does not look at: a lower bound
            reached = max(reached, float(logsumexp((order - 1) * losses, b=masses)) / (order - 1))
        assert reached * (1 - 1e-6) <= value
        if (
            order - 1
        ) * shift < 5:  # the order matters for some delta above 1e-6, and the oracle sees all of the moment
            assert value <= 1.03 * reached


def test_curves_of_large_sums_join_those_of_smaller_ones() -> None:
    """Groups and windows where every k and every value is affordable too."""
    for b, m, beta_16 in ((12, 100, 6553), (500, 2, 16384), (1, 1200, 512)):
        exact, grouped = cell_rdp(b, beta_16, m), grouped_divergences(b * m, b, beta_16, ORDERS)
        assert np.all(grouped >= exact * (1 - 1e-8))
        assert np.all(grouped <= exact * 1.03)
        assert grouped_divergences(b * m, b, beta_16, (NODES[40],))[0] == pytest.approx(
            grouped[ORDERS.index(NODES[40])], rel=1e-12
        )


@pytest.mark.parametrize(("b", "m", "beta_16"), [(1, 1500, 16384), (30, 60, 2000), (900, 2, 6553), (2000, 3, 16384)])
def test_losses_of_large_sums_dominate_every_k(b: int, m: int, beta_16: int) -> None:
    envelope, n = cell_losses(b, beta_16, m), b * m
    assert envelope.probs.sum() == pytest.approx(1, abs=1e-9)
    for k in (0, (n - b) // 3, n - b):
        masses, losses = pair(n, b, k, beta_16)
        for quantile in (0.001, 0.2, 0.5, 0.9, 0.9999):
            epsilon = float(losses[np.searchsorted(np.cumsum(masses), quantile)])
            truth = float(np.dot(masses, np.maximum(-np.expm1(epsilon - losses), 0)))
            assert truth * (1 - 1e-8) - 1e-18 <= envelope.delta(epsilon)


# ------------------------------------------------------------------- step by step, and other parts (theory 2.10, 2.11)


def worst_adaptive(pairs: list[tuple[Law, Law]], count: int, ratio: Fraction) -> Fraction:
    """The largest sum of max(0, P - ratio * Q) over all ways to choose a pair after each output, by trying them all."""
    if count == 0:
        return max(Fraction(0), 1 - ratio)
    return max(
        sum((x * worst_adaptive(pairs, count - 1, ratio * y / x) for x, y in zip(p, q, strict=True)), Fraction(0))
        for p, q in pairs
    )


@pytest.mark.parametrize(("b", "m", "beta_16", "count"), [(1, 2, 16384, 4), (1, 3, 9830, 3), (2, 2, 6553, 2)])
def test_step_by_step_is_the_worst_adaptive_choice(b: int, m: int, beta_16: int, count: int) -> None:
    (losses, once), pairs = adaptive_losses(b, beta_16, m, count)[0], pairs_by_k(b, beta_16, m)
    hull = compose(cell_losses(b, beta_16, m), count, 1e-5)
    assert once == 1
    for epsilon in (-0.7, 0.0, 0.4, 1.0, 1.8):
        ratio = Fraction(math.exp(epsilon))
        truth = float(worst_adaptive(pairs, count, ratio))
        assert truth <= losses.delta(math.log(ratio)) <= truth * 1.001 + 1e-4
        assert truth <= hull.delta(math.log(ratio))


@pytest.mark.parametrize(
    ("b", "m", "beta_16", "count"), [(1, 5, 16384, 300), (2, 20, 9000, 1000), (1, 2, 512, 100_003)]
)
def test_step_by_step_in_blocks_lies_between_a_fixed_k_and_the_hull(b: int, m: int, beta_16: int, count: int) -> None:
    parts = adaptive_losses(b, beta_16, m, count)
    assert len(parts) == 2  # the blocks, and what is left over
    for losses, _ in parts:
        assert losses.probs.sum() == pytest.approx(1, abs=1e-5)
    largest, delta = count * largest_loss(b, beta_16), 1e-4
    by_steps = epsilon_from_losses(compose_parts(parts, delta), 0.0, delta, largest)
    by_hull = epsilon_from_losses(compose(cell_losses(b, beta_16, m), count, delta), 0.0, delta, largest)
    assert lower_bound(cell(b, m, beta_16, count, delta)) <= by_steps < by_hull


def test_parts_compose_like_the_product_of_their_laws() -> None:
    """Two releases of one kind and three of another, brute force in Fractions; the order does not matter."""
    (p, q), (r, s) = pairs_by_k(1, 16384, 2)[0], pairs_by_k(1, 3000, 1)[0]

    def atoms(first: Law, second: Law) -> LossDistribution:
        rows = sorted((math.log(x / y), float(x)) for x, y in zip(first, second, strict=True))
        return LossDistribution(*(np.array(column) for column in zip(*rows, strict=True)))

    parts = [(atoms(p, q), 2), (atoms(r, s), 3), (atoms(p, q), 0)]
    composed, reversed_parts = compose_parts(parts, 1e-5), compose_parts(parts[::-1], 1e-5)
    before = [math.prod(xs) for xs in itertools.product(q, q, s, s, s)]
    after = [math.prod(xs) for xs in itertools.product(p, p, r, r, r)]
    for epsilon in (-1.0, 0.0, 0.5, 1.5, 2.0):
        ratio = Fraction(math.exp(epsilon))
        truth = float(sum(max(Fraction(0), x - ratio * y) for x, y in zip(after, before, strict=True)))
        assert truth <= composed.delta(math.log(ratio)) <= truth * (1 + 1e-4) + 1e-9
        assert composed.delta(epsilon) == pytest.approx(reversed_parts.delta(epsilon), rel=1e-9, abs=1e-14)


def test_nothing_composes_to_nothing_and_slack_is_kept() -> None:
    assert compose_parts([], 1e-5) is NOTHING_RELEASED
    assert compose_parts([(cell_losses(1, 512, 2), 0)], 1e-5) is NOTHING_RELEASED
    sloppy = LossDistribution(np.array([-0.1, 0.1]), np.array([0.47, 0.53]), slack=1e-9)
    assert compose(sloppy, 7, 1e-5).slack >= 7e-9


def test_one_huge_loss_stays_huge() -> None:
    """A grid as fine as the spread of one atom, which is none, would put it anywhere."""
    certain = LossDistribution(np.array([36_000.0]), np.ones(1))
    for count in (1, 1000):
        assert compose(certain, count, 1e-5).delta(35_999.0 * count) > 0.6


@pytest.mark.parametrize("count", [1000, 100_000, 10**6])
def test_many_releases_keep_their_digits_at_a_small_delta(count: int) -> None:
    """One bit at a time: their composition is a binomial. Untilted, rounding would be above delta."""
    lo, hi = 0.498, 0.502
    atoms = LossDistribution(np.array([math.log(lo / hi), math.log(hi / lo)]), np.array([lo, hi]))
    ones = np.arange(count + 1)
    losses = (2.0 * ones - count) * math.log(hi / lo)
    probs = binom.pmf(ones, count, hi)
    composed = compose(atoms, count, 1e-10)
    for epsilon in np.linspace(0.5, 9.0, 9) * math.sqrt(count) * 2 * (hi - lo) / 1.2:
        truth = float(np.dot(-np.expm1(np.minimum(epsilon - losses, 0.0)), probs))
        value = composed.delta(float(epsilon))
        assert truth * (1 - 1e-6) <= value
        if truth >= 1e-10:
            assert value <= truth * 1.2


def test_delta_at_epsilon_0_is_the_total_variation() -> None:
    # three parties, one bit, beta = 1/4: 5/16 for one release (theory 2.3)
    assert cell_losses(1, 16384, 3).delta(0.0) == pytest.approx(5 / 16, rel=1e-12)
    # a Gaussian alone, moved by mu: 2 Phi(mu/2) - 1
    assert NOTHING_RELEASED.delta_with_gaussian(0.0, 1.4) == pytest.approx(2 * float(ndtr(0.7)) - 1, rel=1e-12)
    assert NOTHING_RELEASED.delta(0.0) == 0
    assert compose(cell_losses(4, 16384, 2), 400, 1e-6).delta_with_gaussian(0.0, 3.0) == pytest.approx(1, abs=1e-6)
