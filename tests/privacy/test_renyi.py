"""The exact Renyi curves, against oracles that share no code with them: pmfs in Fractions, divergences in mpmath."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.errors import PlanError
from pbmvfl.privacy.accounting import rdp_curve
from pbmvfl.privacy.events import ExactRelease, LocalGaussianRelease, NoisyUpdate, PoissonBinomialRelease
from pbmvfl.privacy.orders import ORDERS
from pbmvfl.privacy.poisson_binomial import _log_pmf_rows
from pbmvfl.privacy.renyi import _divergences, bernoulli_rdp, cell_rdp, composed, gaussian_rdp, record_rdp
from pbmvfl.privacy.units import Accounting, Adversary, Unit
from support.training_runs import training_run

mpmath.mp.dps = 60
HALF = Fraction(1, 2)
FEW_ORDERS = (1.01, 1.5, 2.0, 3.0, 8.0, 64.0, 1024.0)
#: The curves of these sums promise to lie above the truth by at most this share. Sums of many bits with a small beta
#: are raised by a larger one: a table's error does not shrink with the divergence.
MARGIN = 5e-9

trials = st.integers(1, 6)
betas_16 = st.integers(512, 32256)
parties = st.integers(1, 6)


def law_of_sum(probabilities: list[Fraction]) -> list[Fraction]:
    """The pmf of a sum of independent bits, exactly."""
    pmf = [Fraction(1)]
    for p in probabilities:
        pmf = [a * (1 - p) + b * p for a, b in zip([*pmf, Fraction(0)], [Fraction(0), *pmf], strict=True)]
    return pmf


def exact(fraction: Fraction) -> mpmath.mpf:
    return mpmath.mpf(fraction.numerator) / fraction.denominator


def renyi(p: list[Fraction], q: list[Fraction], order: float) -> mpmath.mpf:
    a = mpmath.mpf(order)
    moment = mpmath.fsum(exact(x) ** a * exact(y) ** (1 - a) for x, y in zip(p, q, strict=True))
    return mpmath.log(moment) / (a - 1)


def ends(beta_16: int) -> tuple[Fraction, Fraction]:
    beta = Fraction(beta_16, 65536)
    return HALF - beta, HALF + beta


def pairs_by_k(b: int, beta_16: int, m: int) -> list[tuple[list[Fraction], list[Fraction]]]:
    lo, hi = ends(beta_16)
    others = b * (m - 1)
    return [
        (law_of_sum([hi] * (b + k) + [lo] * (others - k)), law_of_sum([hi] * k + [lo] * (b + others - k)))
        for k in range(others + 1)
    ]


@pytest.mark.parametrize(
    ("b", "beta_16", "m"),
    [
        (1, 16384, 3),
        (2, 3276, 5),
        (1, 512, 12),
        (3, 9830, 3),
        (8, 6553, 2),
        (4, 16384, 4),
        (1, 31457, 5),
        (3, 32256, 4),
        (2, 24576, 6),
    ],
)
def test_cell_curve_is_the_maximum_over_k_and_both_directions(b: int, beta_16: int, m: int) -> None:
    curve = cell_rdp(b, beta_16, m, FEW_ORDERS)
    pairs = pairs_by_k(b, beta_16, m)
    for order, value in zip(FEW_ORDERS, curve, strict=True):
        truth = max(max(renyi(p, q, order), renyi(q, p, order)) for p, q in pairs)
        assert truth <= value <= truth * (1 + MARGIN)
        # verified here and not proved: all the others at one end are the worst case
        p, q = pairs[0]
        assert renyi(q, p, order) >= truth * (1 - mpmath.mpf(10) ** -40)


@pytest.mark.parametrize(
    ("b", "beta_16", "m"), [(40, 16384, 20), (100, 6553, 7), (60, 640, 9), (1, 32256, 300), (20, 30000, 12)]
)
def test_cell_curve_keeps_its_digits_where_probabilities_underflow(b: int, beta_16: int, m: int) -> None:
    lo, hi = ends(beta_16)
    n, others = b * m, b * (m - 1)
    orders = (1.01, 2.0, 20.0, 500.0)
    curve = cell_rdp(b, beta_16, m, orders)

    def law(high: int) -> list[mpmath.mpf]:
        first = [mpmath.binomial(high, i) * exact(hi) ** i * exact(1 - hi) ** (high - i) for i in range(high + 1)]
        rest = n - high
        second = [mpmath.binomial(rest, i) * exact(lo) ** i * exact(1 - lo) ** (rest - i) for i in range(rest + 1)]
        return [
            mpmath.fdot(first[max(0, x - rest) : min(x, high) + 1], second[max(0, x - high) : min(x, rest) + 1][::-1])
            for x in range(n + 1)
        ]

    mpmath.mp.dps, before = 40, mpmath.mp.dps
    try:
        reached = [mpmath.mpf(0)] * len(orders)
        for k in (0, others // 2, others):
            p, q = law(k + b), law(k)
            for i, order in enumerate(orders):
                a = mpmath.mpf(order)
                value = mpmath.log(mpmath.fsum(x * (x / y) ** (a - 1) for x, y in zip(p, q, strict=True))) / (a - 1)
                reached[i] = max(reached[i], value)
        for value, least in zip(curve, reached, strict=True):
            assert least <= value <= least * (1 + MARGIN)
    finally:
        mpmath.mp.dps = before


def laws_of_ends(b: int, beta_16: int, m: int) -> tuple[list[mpmath.mpf], list[mpmath.mpf]]:
    """The sum with all the others at lo, and the changed party at hi and at lo."""
    lo, hi = (exact(p) for p in ends(beta_16))
    n, rest = b * m, b * (m - 1)
    others = [mpmath.binomial(rest, i) * lo**i * hi ** (rest - i) for i in range(rest + 1)]
    mine = [mpmath.binomial(b, i) * hi**i * lo ** (b - i) for i in range(b + 1)]
    after = [
        mpmath.fdot(mine[max(0, x - rest) : min(x, b) + 1], others[max(0, x - b) : min(x, rest) + 1][::-1])
        for x in range(n + 1)
    ]
    return after, [mpmath.binomial(n, i) * lo**i * hi ** (n - i) for i in range(n + 1)]


@pytest.mark.parametrize(
    ("b", "beta_16", "m", "orders"),
    [(1, 512, 1000, (1.02, 64.0, 500.0)), (2, 512, 700, (64.0,)), (16, 512, 90, (2.0, 64.0))],
)
def test_cell_curve_lies_above_the_truth_where_the_divergence_is_small(
    b: int, beta_16: int, m: int, orders: tuple[float, ...]
) -> None:
    curve = cell_rdp(b, beta_16, m, orders)
    with mpmath.workdps(50):
        after, before = laws_of_ends(b, beta_16, m)
        for order, value in zip(orders, curve, strict=True):
            a = mpmath.mpf(order)
            truth = max(
                mpmath.log(mpmath.fsum(x * (x / y) ** (a - 1) for x, y in zip(p, q, strict=True))) / (a - 1)
                for p, q in ((after, before), (before, after))
            )
            assert truth <= value <= truth * (1 + mpmath.mpf("1e-4"))


@pytest.mark.parametrize(
    ("n", "high", "beta_16"), [(1, 1, 16384), (30, 11, 512), (420, 200, 16384), (1000, 1, 512), (1500, 700, 9000)]
)
def test_log_pmfs_are_as_good_as_they_say(n: int, high: int, beta_16: int) -> None:
    rows, error = _log_pmf_rows(n, beta_16, np.array([high]))
    with mpmath.workdps(30):
        lo, hi = (exact(p) for p in ends(beta_16))
        rest = n - high
        first = [mpmath.binomial(high, i) * hi**i * lo ** (high - i) for i in range(high + 1)]
        second = [mpmath.binomial(rest, i) * lo**i * hi ** (rest - i) for i in range(rest + 1)]
        # every entry of a small law, and a few of a large one: the ends, and where the tilts meet
        for x in range(n + 1) if n < 100 else (0, 1, n // 5, n // 3, n // 2, 2 * n // 3, n - 1, n):
            low, top = max(0, x - rest), min(x, high)
            truth = mpmath.log(mpmath.fdot(first[low : top + 1], second[x - top : x - low + 1][::-1]))
            assert abs(float(mpmath.mpf(float(rows[0, x])) - truth)) <= error
    assert error < 1e-14 * (n + 1)


@pytest.mark.parametrize(("b", "beta_16", "m"), [(1, 512, 12), (4, 16384, 4), (700, 16384, 2)])
@pytest.mark.parametrize("log_error", [1e-12, 1e-7])
def test_logarithms_that_are_wrong_by_as_much_as_they_may_be_do_not_lower_a_divergence(
    b: int, beta_16: int, m: int, log_error: float
) -> None:
    """Also on the path of large exponents, which the third case takes at high orders."""
    orders = (1.01, 1.5, 2.0, 20.0, 200.0)
    with mpmath.workdps(50):
        after, before = laws_of_ends(b, beta_16, m)
        log_p, log_q = (np.array([[float(mpmath.log(x)) for x in law]]) for law in (after, before))
        truth = []
        for order in orders:
            a = mpmath.mpf(order)
            moment = mpmath.fsum(x * (x / y) ** (a - 1) for x, y in zip(after, before, strict=True))
            truth.append(float(mpmath.log(moment) / (a - 1)))
    sign = np.sign(log_p - log_q)
    random = np.where(np.random.default_rng(1).random(log_p.shape) < 0.5, -1.0, 1.0)
    for in_p, in_q in ((-1.0, 1.0), (-sign, sign), (sign, sign), (random, -random), (-1.0, -1.0)):
        wrong_p, wrong_q = log_p + log_error * in_p, log_q + log_error * in_q
        # the largest logarithms' own rounding is an error too
        curve = _divergences(wrong_p, wrong_q, orders, log_error=log_error + 2.0**-53 * float(np.abs(log_q).max()))
        assert np.all(curve * (1 + 1e-9) >= truth)


def test_a_table_too_large_for_every_k_is_an_upper_bound_and_close() -> None:
    b, m, beta_16 = 200, 10, 6553
    lo, hi = ends(beta_16)
    n, others = b * m, b * (m - 1)
    with mpmath.workdps(30):
        first = [mpmath.binomial(others, i) * exact(hi) ** i * exact(lo) ** (others - i) for i in range(others + 1)]
        second = [mpmath.binomial(b, i) * exact(lo) ** i * exact(hi) ** (b - i) for i in range(b + 1)]
        worst = [mpmath.binomial(n, i) * exact(hi) ** i * exact(lo) ** (n - i) for i in range(n + 1)]
        other = [
            mpmath.fdot(first[max(0, x - b) : min(x, others) + 1], second[max(0, x - others) : min(x, b) + 1][::-1])
            for x in range(n + 1)
        ]
        truth = mpmath.log(mpmath.fsum(x * x / y for x, y in zip(worst, other, strict=True)))
    value = cell_rdp(b, beta_16, m, (2.0,))[0]
    assert truth <= value <= truth * 1.02


@pytest.mark.parametrize(("b", "m"), [(1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("beta_16", [16384, 6553])
def test_no_values_of_the_parties_exceed_the_cell_curve(b: int, m: int, beta_16: int) -> None:
    lo, hi = (float(p) for p in ends(beta_16))
    grid = np.linspace(lo, hi, 7)
    orders = (1.05, 1.5, 2.0, 6.0, 40.0)
    curve = cell_rdp(b, beta_16, m, orders)

    def law(probabilities: list[float]) -> np.ndarray:
        pmf = np.ones(1)
        for p in probabilities:
            for _ in range(b):
                pmf = np.convolve(pmf, [1 - p, p])
        return pmf

    largest = np.zeros(len(orders))
    for others in itertools.combinations_with_replacement(grid, m - 1):
        laws = [law([*others, p]) for p in grid]
        for p, q in itertools.permutations(laws, 2):
            for i, order in enumerate(orders):
                largest[i] = max(largest[i], math.log(float(np.sum(p**order * q ** (1 - order)))) / (order - 1))
    assert np.all(largest <= curve * (1 + 1e-9))
    assert np.all(largest >= curve * (1 - 1e-6))  # the search is not vacuous: the end points are in its grid


@given(b=trials, beta_16=betas_16, m=parties, order=st.sampled_from(FEW_ORDERS))
@settings(max_examples=25, deadline=None)
def test_record_curve_is_the_divergence_of_the_binomial_pair(b: int, beta_16: int, m: int, order: float) -> None:
    lo, hi = ends(beta_16)
    truth = renyi(law_of_sum([hi] * (b * m)), law_of_sum([lo] * (b * m)), order)
    value = record_rdp(b, beta_16, m, (order,))[0]
    assert truth <= value <= truth * (1 + MARGIN)


@given(beta_16=betas_16, probabilities=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_no_values_of_a_record_exceed_the_record_curve(beta_16: int, probabilities: list[tuple[float, float]]) -> None:
    lo, hi = (float(p) for p in ends(beta_16))
    m, orders = len(probabilities), (1.1, 2.0, 16.0)
    before = after = np.ones(1)
    for old, new in probabilities:
        p, q = lo + (hi - lo) * old, lo + (hi - lo) * new
        before, after = np.convolve(before, [1 - p, p]), np.convolve(after, [1 - q, q])
    for order, value in zip(orders, record_rdp(1, beta_16, m, orders), strict=True):
        assert math.log(float(np.sum(before**order * after ** (1 - order)))) / (order - 1) <= value + 1e-12


@given(b=trials, beta_16=betas_16, m=parties)
@settings(max_examples=40, deadline=None)
def test_cell_rises_with_trials_beta_and_order_and_falls_with_parties(b: int, beta_16: int, m: int) -> None:
    curve = cell_rdp(b, beta_16, m)
    slack = 1 + MARGIN
    assert np.all(curve <= cell_rdp(b + 1, beta_16, m) * slack)
    assert np.all(curve <= cell_rdp(b, min(beta_16 + 97, 32256), m) * slack)
    assert np.all(curve * slack >= cell_rdp(b, beta_16, m + 1))
    assert np.all(np.diff(curve) >= 0)


@given(b=trials, beta_16=betas_16, m=parties)
@settings(max_examples=40, deadline=None)
def test_record_rises_with_trials_beta_order_and_parties(b: int, beta_16: int, m: int) -> None:
    curve = record_rdp(b, beta_16, m)
    assert np.all(curve < record_rdp(b + 1, beta_16, m))
    assert np.all(curve <= record_rdp(b, min(beta_16 + 97, 32256), m))
    assert np.all(curve < record_rdp(b, beta_16, m + 1))
    assert np.all(np.diff(curve) >= 0)


@given(b=trials, beta_16=betas_16, m=st.integers(2, 6), epochs=st.integers(1, 40), dim=st.integers(1, 16))
@settings(max_examples=40, deadline=None)
def test_units_move_with_epochs_dimension_and_colluders(b: int, beta_16: int, m: int, epochs: int, dim: int) -> None:
    def curve(unit: Unit, t: int = 0, more_epochs: int = 0, more_dim: int = 0) -> np.ndarray:
        event = PoissonBinomialRelease(num_trials=b, beta=beta_16 / 65536, num_parties=m, embedding_dim=dim + more_dim)
        run = training_run(num_samples=100, batch_size=10, num_epochs=epochs + more_epochs, event=event)
        return rdp_curve(run, unit, Accounting.PAPER, Adversary(colluding_parties=t))

    for unit in (Unit.CELL, Unit.RECORD):
        assert np.all(curve(unit) < curve(unit, more_epochs=1))
        assert np.all(curve(unit) < curve(unit, more_dim=1))
    for t in range(m - 1):
        assert np.all(curve(Unit.CELL, t) <= curve(Unit.CELL, t + 1) * (1 + MARGIN))
        assert np.all(curve(Unit.RECORD, t) > curve(Unit.RECORD, t + 1))
    assert np.array_equal(curve(Unit.CELL, m - 1), curve(Unit.RECORD, m - 1))


@given(b=trials, beta_16=betas_16, m=parties)
@settings(max_examples=60, deadline=None)
def test_cell_lies_between_the_paper_and_a_simple_lower_bound(b: int, beta_16: int, m: int) -> None:
    beta, orders = beta_16 / 65536, np.array(ORDERS)
    curve = cell_rdp(b, beta_16, m)
    if beta_16 <= 16384:  # the paper has no larger ones
        assert np.all(curve <= 17.21 * b * beta**2 * orders / m)
    # D_2 = ln(1 + chi^2), and chi^2 is at least (difference of means)^2 / variance, both the same for every k.
    least = math.log1p(4 * b * beta**2 / (m * (1 / 4 - beta**2)))
    assert np.all(curve[orders >= 2] >= least)


def test_the_papers_constant_must_be_above_seventeen() -> None:
    largest = float(np.max(cell_rdp(1, 16384, 400) / (np.array(ORDERS) * 0.25**2 / 400)))
    assert 17 < largest < 17.21


def test_the_largest_ratio_to_the_papers_bound_is_that_of_every_sum_enumerated() -> None:
    """b=1, beta=1/4, M=400: with r_k = (1 + 3x)^k (3 + x)^(399-k) the two laws are r_k (1 + 3x) and r_k (3 + x) over
    4^400, in integers. Backwards, k and 399-k exchange the two laws, so one direction of every k covers both."""
    ratios = cell_rdp(1, 16384, 400) / (np.array(ORDERS) * 0.25**2 / 400)
    order = ORDERS[int(np.argmax(ratios))]
    r = [math.comb(399, i) * 3 ** (399 - i) for i in range(400)]
    largest = 0.0
    for _ in range(400):
        p = [a + 3 * c for a, c in zip([*r, 0], [0, *r], strict=True)]
        q = [3 * a + c for a, c in zip([*r, 0], [0, *r], strict=True)]
        moment = math.fsum(y / 4**400 * (x / y) ** order for x, y in zip(p, q, strict=True))
        largest = max(largest, math.log(moment) / (order - 1))
        # the next k: times 1 + 3x, which is p, and divided by 3 + x, which leaves no rest
        r = []
        for coefficient in p[:-1]:
            r.append((coefficient - (r[-1] if r else 0)) // 3)
    assert max(ratios) == pytest.approx(largest / (order * 0.25**2 / 400), rel=MARGIN)


@pytest.mark.parametrize(("b", "beta_16", "m", "count"), [(1, 16384, 2, 3), (2, 6553, 2, 2), (1, 9830, 3, 3)])
def test_composition_equals_the_brute_force_product(b: int, beta_16: int, m: int, count: int) -> None:
    orders = (1.5, 2.0, 5.0)
    curve = composed((count, cell_rdp(b, beta_16, m, orders)))
    pairs = pairs_by_k(b, beta_16, m)
    for order, value in zip(orders, curve, strict=True):
        largest = mpmath.mpf(0)
        for chosen in itertools.combinations_with_replacement(pairs, count):
            p = [math.prod(xs) for xs in itertools.product(*(pair[0] for pair in chosen))]
            q = [math.prod(xs) for xs in itertools.product(*(pair[1] for pair in chosen))]
            largest = max(largest, renyi(p, q, order))
        assert largest <= value <= largest * (1 + MARGIN)


def test_updates_and_gaussians_cost_what_the_definition_says() -> None:
    orders = (1.5, 4.0)
    update = NoisyUpdate(clip_norm=0.3, noise_multiplier=2.0).rdp(orders)
    np.testing.assert_allclose(update, [2 * 1.5 / 4, 2 * 4.0 / 4], rtol=1e-8)
    for order, value in zip(orders, gaussian_rdp(0.7, orders), strict=True):

        def integrand(x: mpmath.mpf, order: float = order) -> mpmath.mpf:
            return mpmath.npdf(x, 0.7) ** order * mpmath.npdf(x) ** (1 - order)

        with mpmath.workdps(20):
            truth = mpmath.log(mpmath.quad(integrand, [-20, 0, 3, 30])) / (order - 1)
        assert float(truth) * (1 - 1e-12) <= value <= float(truth) * (1 + 1e-8)


def test_local_noise_is_charged_for_the_whole_embedding_of_each_honest_party() -> None:
    event = LocalGaussianRelease(variance=50.0, bound=1.5, num_parties=4, embedding_dim=9)
    cell = event.rdp(Unit.CELL, orders=(2.0,))[0]
    # moved by 2 * 1.5 * sqrt(9) = 9 at variance 50: 2 * 81 / (2 * 50)
    assert cell == pytest.approx(1.62, rel=1e-8)
    for t in range(4):
        record = event.rdp(Unit.RECORD, Adversary(colluding_parties=t), orders=(2.0,))[0]
        assert record == pytest.approx((4 - t) * 1.62, rel=1e-8)


def test_exact_release_is_infinite_and_no_release_is_free() -> None:
    event = ExactRelease(num_parties=2, embedding_dim=1)
    curve = event.rdp(Unit.CELL)
    assert np.all(np.isinf(curve))
    assert np.all(composed((0, curve)) == 0)


def test_without_secure_aggregation_only_the_partys_own_noise_hides_a_cell() -> None:
    event = PoissonBinomialRelease(num_trials=3, beta=0.1, num_parties=5, embedding_dim=2)
    clear = replace(event, secure_sum=False)
    alone = event.rdp(Unit.CELL, Adversary(colluding_parties=4))
    assert np.array_equal(clear.rdp(Unit.CELL), alone)
    # a record has five honest cells whether or not their integers are added first
    np.testing.assert_allclose(clear.rdp(Unit.RECORD), 5 * alone, rtol=1e-14)


def test_beta_is_floored_to_sixteen_bits() -> None:
    event = PoissonBinomialRelease(num_trials=1, beta=0.1, num_parties=1, embedding_dim=1)
    assert np.array_equal(event.rdp(Unit.CELL), bernoulli_rdp(6553))


def test_orders_start_at_one_and_a_hundredth_and_widen() -> None:
    steps = np.diff(ORDERS)
    assert ORDERS[0] == 1.01
    assert steps[0] == pytest.approx(0.01)
    assert np.all(np.diff(steps) > -1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cell_rdp(0, 100, 2), r"num_trials=0; permitted: 1 or more"),
        (lambda: cell_rdp(1, 0, 2), r"beta_16=0 .*permitted: 1 to 32256"),
        (lambda: cell_rdp(1, 32257, 2), r"beta_16=32257 .*permitted: 1 to 32256"),
        (lambda: cell_rdp(1, 100, 0), r"noisy_parties=0; permitted: 1 or more"),
        (lambda: record_rdp(1, 100, 0), r"honest_parties=0; permitted: 1 or more"),
        (lambda: NoisyUpdate(clip_norm=1.0, noise_multiplier=0.0).rdp(), r"noise_multiplier=0.0; permitted"),
        (lambda: NoisyUpdate(clip_norm=0.0, noise_multiplier=1.0).rdp(), r"clip_norm=0.0; permitted"),
        (lambda: composed((-1, cell_rdp(1, 100, 2))), r"count=-1 of releases; permitted: 0 or more"),
    ],
)
def test_bad_values_name_themselves_and_what_is_permitted(call: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        call()  # type: ignore[operator]


def test_the_largest_table_of_the_paper_lies_above_its_first_pair_and_below_the_paper_s_bound() -> None:
    """b=128, beta=0.1, M=10: 1280 bits. How long it takes is measured in benchmarks/."""
    orders = (2.0, 16.0)
    curve = cell_rdp(128, 6553, 10, orders)
    with mpmath.workdps(30):
        after, before = laws_of_ends(128, 6553, 10)
        for order, value in zip(orders, curve, strict=True):
            a = mpmath.mpf(order)
            moment = mpmath.fsum(x * (x / y) ** (a - 1) for x, y in zip(after, before, strict=True))
            assert mpmath.log(moment) / (a - 1) <= value <= 17.21 * 128 * (6553 / 65536) ** 2 * order / 10


def test_record_bound_of_fifty_parties_in_a_fresh_interpreter_needs_neither_torch_nor_numba() -> None:
    """All bits of a record move: the epsilon by Renyi divergences alone is an upper bound. Timed in benchmarks/."""
    program = """
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import epsilon_bound
from pbmvfl.privacy.units import Accounting, Unit
plan = Plan.of(num_parties=50, num_samples=1000, num_classes=2, num_trials=16, beta=0.1, embedding_dim=1, num_epochs=1)
print(epsilon_bound(plan.training_run(), Unit.RECORD, Accounting.STRICT, delta=1e-5).epsilon)
import sys
assert "torch" not in sys.modules and "numba" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    lo, hi = (exact(p) for p in ends(6553))
    releases = 1 + 1000 - 100
    epsilons = []
    for order in ORDERS:
        a = mpmath.mpf(order)
        one = mpmath.log(hi**a * lo ** (1 - a) + lo**a * hi ** (1 - a)) / (a - 1)
        epsilons.append(releases * 16 * 50 * one + mpmath.log((a - 1) / a) - mpmath.log(1e-5 * a) / (a - 1))
    assert 0.5 * min(epsilons) < float(ran.stdout) <= min(epsilons) * (1 + MARGIN)


@pytest.mark.parametrize(("b", "beta_16"), [(1, 20000), (3, 32256), (200, 32256)])
def test_above_a_quarter_the_noise_of_more_than_512_bits_is_left_out_and_costs_nothing_less(
    b: int, beta_16: int
) -> None:
    counted = max(1, 512 // b)
    most = cell_rdp(b, beta_16, counted)
    assert np.array_equal(cell_rdp(b, beta_16, counted + 1), most)
    assert np.array_equal(cell_rdp(b, beta_16, 40 * counted), most)
    assert np.all(cell_rdp(b, beta_16, max(1, counted - 1)) >= most)
    with pytest.raises(PlanError, match=r"num_trials=513 with beta=.*permitted above 1/4: at most 512"):
        cell_rdp(513, beta_16, 2)
