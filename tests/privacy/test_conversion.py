"""(epsilon, delta) from curves and from loss distributions. Oracles: exact Fractions, mpmath, and dp-accounting."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from dp_accounting.rdp import compute_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.errors import PlanError
from pbmvfl.privacy.composition import GaussianLosses, HullLosses, Losses, epsilon_by_losses
from pbmvfl.privacy.conversion import (
    composed_bits,
    composed_cell,
    epsilon_from_losses,
    epsilon_from_rdp,
)
from pbmvfl.privacy.loss_distribution import (
    NOTHING_RELEASED,
    LossDistribution,
    binomial_losses,
    cell_losses,
    compose,
    connect_the_dots,
    gaussian_delta,
    smallest_epsilon,
)
from pbmvfl.privacy.orders import ORDERS
from pbmvfl.privacy.renyi import cell_rdp, gaussian_rdp, record_rdp
from support.exact_laws import Law, hockey_stick, law_of_sum, pairs_by_k

DELTA = 1e-5


# ---------------------------------------------------------------------------------------------------- Renyi curves


@given(scale=st.floats(1e-6, 1e5), power=st.floats(0, 1.5), delta=st.sampled_from([1e-3, 1e-5, 1e-9]))
@settings(max_examples=80, deadline=None)
def test_conversion_is_the_rule_of_dp_accounting(scale: float, power: float, delta: float) -> None:
    curve = scale * np.array(ORDERS) ** power
    epsilon, order = epsilon_from_rdp(curve, delta)
    expected, expected_order = compute_epsilon(ORDERS, curve, delta)
    assert epsilon == pytest.approx(expected, rel=1e-12, abs=1e-12)
    if expected > 0:
        assert order == expected_order


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
def test_one_bad_value_is_left_out_and_never_lowers_epsilon(bad: float) -> None:
    curve = np.array(cell_rdp(1, 16384, 5)) * 5
    before, order = epsilon_from_rdp(curve, DELTA)
    curve[ORDERS.index(order)] = bad  # type: ignore[arg-type]
    after, _ = epsilon_from_rdp(curve, DELTA)
    assert before <= after < before * 1.01
    assert epsilon_from_rdp(np.full(len(ORDERS), bad), DELTA) == (math.inf, None)


def test_the_converter_of_dp_accounting_answers_zero_for_one_nan() -> None:
    # Why the guard exists: if this changes there, the guard may stay.
    curve = np.array(cell_rdp(1, 16384, 5)) * 5
    curve[100] = math.nan
    silent, _ = compute_epsilon(ORDERS, curve, DELTA)
    assert not silent > 0
    assert epsilon_from_rdp(curve, DELTA)[0] > 5


def test_nothing_released_is_epsilon_zero() -> None:
    assert epsilon_from_rdp(np.zeros(len(ORDERS)), DELTA)[0] == 0
    assert epsilon_from_losses(NOTHING_RELEASED, 0.0, DELTA, 10.0) == 0


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_delta_outside_zero_to_one_is_refused(delta: float) -> None:
    with pytest.raises(PlanError, match=r"delta=.*permitted: above 0 and below 1"):
        epsilon_from_rdp(np.zeros(len(ORDERS)), delta)


def test_curves_and_orders_must_fit() -> None:
    with pytest.raises(PlanError, match=r"permitted: one for each"):
        epsilon_from_rdp(np.zeros(3), DELTA)
    with pytest.raises(PlanError, match=r"order=1.0; permitted: above 1"):
        epsilon_from_rdp(np.zeros(1), DELTA, (1.0,))


# ---------------------------------------------------------------------------------------------- the envelope over k


def test_no_single_pair_dominates() -> None:
    """M=3, b=1, beta=1/4: the others at one end are not the worst case of the total variation."""
    variations = [hockey_stick(p, q, Fraction(1)) for p, q in pairs_by_k(1, 16384, 3)]
    assert variations == [Fraction(9, 32), Fraction(5, 16), Fraction(9, 32)]
    assert cell_losses(1, 16384, 3).delta(0.0) == pytest.approx(5 / 16, rel=1e-12)


@pytest.mark.parametrize(
    ("b", "beta_16", "m"),
    [(1, 16384, 3), (2, 3276, 5), (3, 9830, 3), (8, 6553, 2), (1, 512, 9), (1, 31457, 5), (2, 28000, 3)],
)
def test_cell_losses_are_the_envelope_at_every_epsilon(b: int, beta_16: int, m: int) -> None:
    pairs, envelope = pairs_by_k(b, beta_16, m), cell_losses(b, beta_16, m)
    largest = b * math.log((32768 + beta_16) / (32768 - beta_16))
    for epsilon in np.linspace(-1.1 * largest, 1.1 * largest, 41):
        ratio = Fraction(math.exp(epsilon))
        truth = max(max(hockey_stick(p, q, ratio), hockey_stick(q, p, ratio)) for p, q in pairs)
        assert envelope.delta(math.log(ratio)) == pytest.approx(float(truth), rel=1e-9, abs=1e-14)


def test_cell_losses_are_a_pair_of_laws() -> None:
    for b, m, beta_16 in itertools.product((1, 2, 8, 16, 32, 64), (2, 3, 4, 5, 7, 10), (64, 655, 3276, 9830, 16384)):
        losses = cell_losses(b, beta_16, m)
        assert losses.probs.sum() == pytest.approx(1, abs=1e-12)
        assert np.dot(losses.probs, np.exp(-losses.losses)) == pytest.approx(1, abs=1e-12)
        assert losses.losses.max() <= b * math.log((32768 + beta_16) / (32768 - beta_16)) * (1 + 1e-12)


def envelope_pair(pairs: list[tuple[Law, Law]]) -> tuple[Law, Law]:
    """The dominating pair in Fractions: gift wrapping around the points (false alarms, detections) of all tests."""
    points = {(Fraction(1), Fraction(1))}
    for p, q in pairs:
        points |= {(sum(q[x:], Fraction(0)), sum(p[x:], Fraction(0))) for x in range(len(p))}
    first, second, here = [], [], (Fraction(0), Fraction(0))
    while here != (1, 1):
        ahead = [point for point in points if point[0] > here[0]]
        here, before = max(ahead, key=lambda z, h=here: ((z[1] - h[1]) / (z[0] - h[0]), z[0])), here
        first.append(here[1] - before[1])
        second.append(here[0] - before[0])
    return first, second


def product(laws: list[Law]) -> Law:
    return [math.prod(xs) for xs in itertools.product(*laws)]


@pytest.mark.parametrize(
    ("b", "beta_16", "m", "count"),
    [(1, 16384, 3, 2), (1, 9830, 3, 3), (2, 6553, 2, 2), (1, 31457, 3, 2), (2, 24576, 2, 2)],
)
def test_composed_envelope_dominates_every_choice_of_k(b: int, beta_16: int, m: int, count: int) -> None:
    composed = compose(cell_losses(b, beta_16, m), count, DELTA)
    pairs = pairs_by_k(b, beta_16, m)
    first, second = envelope_pair(pairs)
    for epsilon in (-0.5, 0.0, 0.3, 1.0, 1.7):
        ratio = Fraction(math.exp(epsilon))
        value = composed.delta(math.log(ratio))
        for chosen in itertools.combinations_with_replacement(pairs, count):
            assert value >= hockey_stick(product([p for p, _ in chosen]), product([q for _, q in chosen]), ratio)
        # and it is the envelope's own composition, not merely something above it: the grid's step is below 1e-4
        truth = hockey_stick(product([first] * count), product([second] * count), ratio)
        assert float(truth) <= value <= float(truth) * (1 + 1e-4) + 1e-9


def test_grid_law_is_dp_accountings_connect_the_dots() -> None:
    atoms, step = cell_losses(2, 6553, 4), 0.05
    first, probs = connect_the_dots(atoms, step)
    indices = np.arange(first, first + len(probs))
    deltas = [atoms.delta(index * step) for index in indices]
    theirs = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, first, int(indices[-1]), deltas)
    for epsilon in np.linspace(-1, 1.5, 26):
        ours = LossDistribution(indices * step, probs).delta(float(epsilon))
        assert ours == pytest.approx(theirs.get_delta_for_epsilon(float(epsilon)), rel=1e-9, abs=1e-12)
        assert ours >= atoms.delta(float(epsilon)) - 1e-14


@pytest.mark.parametrize(
    ("b", "beta_16", "m", "count"), [(2, 3276, 5, 144), (1, 16384, 5, 5), (16, 6553, 4, 16), (1, 11796, 5, 40)]
)
def test_composition_agrees_with_dp_accounting(b: int, beta_16: int, m: int, count: int) -> None:
    """Their grid, their dots, their convolution, from the hockey-stick envelope of float pmfs on a grid of epsilons."""
    lo, hi = (32768 - beta_16) / 65536, (32768 + beta_16) / 65536
    step = 1e-3
    reach = math.ceil(b * math.log(hi / lo) / step) + 1
    epsilons = np.arange(-reach, reach + 1) * step
    deltas = np.zeros(len(epsilons))
    for k in range(b * (m - 1) + 1):
        p = q = np.ones(1)
        for bit in range(b * m):
            low_or_high = hi if bit < k else lo
            p = np.convolve(p, [1 - hi, hi] if bit >= b * (m - 1) else [1 - low_or_high, low_or_high])
            q = np.convolve(q, [1 - lo, lo] if bit >= b * (m - 1) else [1 - low_or_high, low_or_high])
        deltas = np.maximum(deltas, np.maximum(p[None, :] - np.exp(epsilons)[:, None] * q[None, :], 0).sum(axis=1))
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, -reach, reach, np.minimum(deltas, 1))
    theirs = pmf.self_compose(count).get_epsilon_for_delta(DELTA)
    ours = epsilon_from_losses(compose(cell_losses(b, beta_16, m), count, DELTA), 0.0, DELTA, 10 * theirs)
    assert ours == pytest.approx(theirs, rel=1e-3)
    # what is reported follows the worst k step by step, which is no more
    composed = composed_cell(
        num_trials=b, beta_16=beta_16, noisy_parties=m, coordinates=count, gaussian_shift=0.0, delta=DELTA
    )
    reported = composed.epsilon(DELTA, 10 * theirs)
    assert 0.9 * theirs < reported <= theirs * (1 + 1e-3)


Sizes = tuple[int, int, int, int]


@pytest.mark.parametrize(
    ("training", "prediction"),
    [
        ((1, 16384, 3, 4), (2, 9830, 3, 1)),
        ((2, 3276, 4, 40), (3, 13107, 4, 1)),
        ((1, 2000, 5, 60), (1, 16384, 5, 3)),
    ],
)
@pytest.mark.parametrize("shift", [0.0, 0.8])
def test_different_releases_compose_as_in_dp_accounting(training: Sizes, prediction: Sizes, shift: float) -> None:
    """(b, beta, M, releases) of training and others of predictions, beside a Gaussian of updates: the same dominating
    pairs, in Fractions, rounded down and up by dp-accounting and composed there."""

    def theirs(*, pessimistic: bool) -> float:
        losses = []
        for b, beta_16, m, count in (training, prediction):
            laws = envelope_pair(pairs_by_k(b, beta_16, m))
            first, second = ({i: math.log(x) for i, x in enumerate(law)} for law in laws)
            one = privacy_loss_distribution.from_two_probability_mass_functions(
                second, first, pessimistic_estimate=pessimistic, value_discretization_interval=1e-4
            )
            losses.append(one.self_compose(count))
        both = losses[0].compose(losses[1])
        if shift:
            gaussian = privacy_loss_distribution.from_gaussian_mechanism(
                1 / shift, pessimistic_estimate=pessimistic, value_discretization_interval=1e-4, use_connect_dots=False
            )
            both = both.compose(gaussian)
        return float(both.get_epsilon_for_delta(DELTA))

    parts: list[tuple[int, Losses]] = [
        (count, HullLosses(num_trials=b, beta_16=beta_16, noisy_parties=m, coordinates=1))
        for b, beta_16, m, count in (training, prediction)
    ]
    ours = epsilon_by_losses([*parts, (1, GaussianLosses(shift=shift))], DELTA, 100.0)
    assert theirs(pessimistic=False) <= ours <= 1.01 * theirs(pessimistic=True)
    assert theirs(pessimistic=True) <= 1.01 * theirs(pessimistic=False)
    # without the predictions it is less by more than any rounding here
    assert epsilon_by_losses([parts[0], (1, GaussianLosses(shift=shift))], DELTA, 100.0) < 0.95 * ours


# ------------------------------------------------------------------------------------------- records and Gaussians


@pytest.mark.parametrize(("num_bits", "beta_16"), [(1, 16384), (7, 9830), (60, 6553), (400, 3276), (15, 32000)])
def test_record_losses_are_exact(num_bits: int, beta_16: int) -> None:
    lo, hi = Fraction(32768 - beta_16, 65536), Fraction(32768 + beta_16, 65536)
    p = [math.comb(num_bits, i) * hi**i * lo ** (num_bits - i) for i in range(num_bits + 1)]
    losses = binomial_losses(num_bits, beta_16, DELTA)
    for epsilon in (-1.0, 0.0, 0.5, 2.0, 9.0):
        truth = float(hockey_stick(p, p[::-1], Fraction(math.exp(epsilon))))
        # beyond the largest loss only the share of delta that is given away for the cut tail is left
        assert truth <= losses.delta(epsilon) <= truth * (1 + 1e-9) + 3e-6 * DELTA


def test_record_composition_equals_the_product_of_its_releases() -> None:
    """Two releases of three bits: brute force over both sums, in Fractions."""
    lo, hi = Fraction(1, 4), Fraction(3, 4)
    one, other = law_of_sum([hi] * 3), law_of_sum([lo] * 3)
    p = [x * y for x, y in itertools.product(one, one)]
    q = [x * y for x, y in itertools.product(other, other)]
    for epsilon in (0.0, 1.0, 3.0):
        truth = hockey_stick(p, q, Fraction(math.exp(epsilon)))
        assert binomial_losses(6, 16384, DELTA).delta(epsilon) == pytest.approx(float(truth), rel=1e-9)


@pytest.mark.parametrize("shift", [0.05, 1.0, 4.0])
def test_gaussian_delta_is_the_integral_of_its_definition(shift: float) -> None:
    for epsilon in (-2.0, 0.0, 0.7, 3.0):
        with mpmath.workdps(25):
            # the density ratio crosses e^epsilon here
            start = mpmath.mpf(epsilon) / shift + mpmath.mpf(shift) / 2
            truth = mpmath.quad(
                lambda x, e=epsilon: mpmath.npdf(x, shift) - mpmath.exp(e) * mpmath.npdf(x),
                [start, start + 2, start + 8, start + 60],
            )
        assert gaussian_delta(np.array([epsilon]), shift)[0] == pytest.approx(float(truth), rel=1e-8, abs=1e-15)


def test_gaussian_with_releases_agrees_with_dp_accounting() -> None:
    """5 parties, 1 bit, beta = 1/4: three releases beside one Gaussian, their composition against ours."""
    atoms, shift, step = cell_losses(1, 16384, 5), 1.3, 1e-3
    first, probs = connect_the_dots(atoms, step)
    pmf = pld_pmf.create_pmf(dict(zip(range(first, first + len(probs)), probs, strict=True)), step, 0.0, True)
    gaussian = privacy_loss_distribution.from_gaussian_mechanism(
        1.0, sensitivity=shift, value_discretization_interval=step, use_connect_dots=True
    )
    theirs = gaussian.compose(privacy_loss_distribution.PrivacyLossDistribution(pmf.self_compose(3)))
    expected = theirs.get_epsilon_for_delta(DELTA)
    assert epsilon_from_losses(compose(atoms, 3, DELTA), shift, DELTA, 50.0) == pytest.approx(expected, rel=1e-3)
    composed = composed_cell(
        num_trials=1, beta_16=16384, noisy_parties=5, coordinates=3, gaussian_shift=shift, delta=DELTA
    )
    reported = composed.epsilon(DELTA, 50.0)
    assert 0.99 * expected < reported < expected


def test_records_by_losses_lie_below_rdp() -> None:
    for bits in (100, 1000, 100_000, 10_000_000):
        by_rdp, _ = epsilon_from_rdp(record_rdp(1, 6553, bits), DELTA)
        composed = composed_bits(num_bits=bits, beta_16=6553, gaussian_shift=0.0, delta=DELTA)
        assert composed.epsilon(DELTA, by_rdp) < by_rdp


def test_gaussian_alone_lies_below_rdp() -> None:
    by_rdp, _ = epsilon_from_rdp(gaussian_rdp(1.5), DELTA)
    by_losses = epsilon_from_losses(NOTHING_RELEASED, 1.5, DELTA, by_rdp)
    theirs = privacy_loss_distribution.from_gaussian_mechanism(1.0, sensitivity=1.5).get_epsilon_for_delta(DELTA)
    assert by_losses == pytest.approx(theirs, rel=1e-4)
    assert by_losses < by_rdp


# ------------------------------------------------------------------------------------------------------ safe rules


def test_losses_with_too_much_slack_are_not_used() -> None:
    coarse = LossDistribution(np.zeros(1), np.ones(1), slack=0.2 * DELTA)
    assert epsilon_from_losses(coarse, 0.0, DELTA, 10.0) == math.inf


def test_what_is_too_large_is_left_to_rdp() -> None:
    common = {"beta_16": 655, "gaussian_shift": 0.0, "delta": DELTA}
    # all that is said is that every bit has at most its largest loss
    pure = (10**9 + 1) * math.log((32768 + 655) / (32768 - 655))
    epsilon = composed_bits(num_bits=10**9 + 1, **common).epsilon(DELTA, 1e9)
    assert epsilon == pytest.approx(pure, rel=1e-12)
    assert epsilon >= pure
    assert composed_bits(num_bits=5, **common).epsilon(DELTA, math.inf) == math.inf


def test_search_rounds_epsilon_up_and_gives_up_above_its_range() -> None:
    found = smallest_epsilon(lambda epsilon: math.exp(-epsilon), 1e-3, 100.0)
    assert math.log(1000) <= found <= math.log(1000) * (1 + 1e-5)
    assert smallest_epsilon(lambda epsilon: math.exp(-epsilon), 1e-3, 5.0) == math.inf
    assert smallest_epsilon(lambda _: math.nan, 1e-3, 5.0) == math.inf
