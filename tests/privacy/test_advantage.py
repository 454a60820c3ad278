"""What the best attack achieves. Oracles: all strategies in Fractions, Neyman-Pearson tests on enumerated laws, closed
forms, and dp-accounting."""

from __future__ import annotations

import itertools
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.privacy.accounting import EpsilonBound, TrainingRun, epsilon_bound, epsilon_bounds
from pbmvfl.privacy.advantage import (
    FALSE_ALARM_RATE,
    NO_ATTACK,
    NO_PROTECTION,
    Attack,
    attack_from_rdp,
    attack_on,
    randomised_response,
)
from pbmvfl.privacy.composition import (
    AtomLosses,
    BitLosses,
    GaussianLosses,
    HullLosses,
    Losses,
    NoLosses,
    bounds_by_losses,
)
from pbmvfl.privacy.events import ExactRelease, LocalGaussianRelease, NoisyUpdate, PoissonBinomialRelease
from pbmvfl.privacy.loss_distribution import NOTHING_RELEASED, LossDistribution, binomial_losses
from pbmvfl.privacy.orders import ORDERS
from pbmvfl.privacy.renyi import cell_rdp, gaussian_rdp, record_rdp
from pbmvfl.privacy.table import privacy_table
from pbmvfl.privacy.units import CURIOUS_PARTY, SERVER, Accounting, Adversary, Unit
from support.training_runs import training_run

DELTA = 1e-5
NORMAL = statistics.NormalDist()
RATE = Fraction(1, 1000)
EPSILONS = np.linspace(0, 6.9, 400)
Law = list[Fraction]
Pair = tuple[Law, Law]


def attack_of(*parts: tuple[int, Losses]) -> Attack:
    return bounds_by_losses(parts, DELTA, 1e6)[1]


def cell(b: int, beta_16: int, m: int, coordinates: int = 1) -> HullLosses:
    return HullLosses(num_trials=b, beta_16=beta_16, noisy_parties=m, coordinates=coordinates)


def pbm_run(m: int, b: int, beta: float, epochs: int, update: NoisyUpdate | None = None) -> TrainingRun:
    event = PoissonBinomialRelease(num_trials=b, beta=beta, num_parties=m, embedding_dim=2)
    return training_run(num_samples=20, batch_size=5, num_epochs=epochs, event=event, update=update)


# ------------------------------------------------------------------------------------------------------ brute force


def law_of_sum(probabilities: list[Fraction]) -> Law:
    pmf = [Fraction(1)]
    for p in probabilities:
        pmf = [a * (1 - p) + b * p for a, b in zip([*pmf, Fraction(0)], [Fraction(0), *pmf], strict=True)]
    return pmf


def pairs_by_k(b: int, beta_16: int, m: int) -> list[Pair]:
    """The sum when the cell's own bits are likelier one, and likelier zero, with k of the others' likelier one."""
    lo, hi = Fraction(32768 - beta_16, 65536), Fraction(32768 + beta_16, 65536)
    others = b * (m - 1)
    return [
        (law_of_sum([hi] * (b + k) + [lo] * (others - k)), law_of_sum([hi] * k + [lo] * (b + others - k)))
        for k in range(others + 1)
    ]


def best_guess(pairs: list[Pair], count: int, p: Fraction = Fraction(1), q: Fraction = Fraction(1)) -> Fraction:
    """The largest sum of max(0, P - Q) over all ways to choose a pair after each output, by trying them all."""
    if count == 0:
        return max(Fraction(0), p - q)
    return max(
        sum((best_guess(pairs, count - 1, p * x, q * y) for x, y in zip(*laws, strict=True)), Fraction(0))
        for laws in pairs
    )


def power(first: Law, second: Law, level: Fraction) -> Fraction:
    """Neyman and Pearson: outcomes are taken in the order of their ratio until the false alarms are used up."""
    detections, left = Fraction(0), level
    for x, y in sorted(zip(first, second, strict=True), key=lambda xy: xy[0] / xy[1], reverse=True):
        share = min(Fraction(1), left / y)
        detections, left = detections + share * x, left - share * y
    return detections


def products(pairs: list[Pair], count: int) -> list[Pair]:
    """Every choice of a k for each release, beforehand."""
    return [
        (
            [math.prod(xs) for xs in itertools.product(*(p for p, _ in chosen))],
            [math.prod(xs) for xs in itertools.product(*(q for _, q in chosen))],
        )
        for chosen in itertools.combinations_with_replacement(pairs, count)
    ]


SMALL = [(1, 16384, 2, 1), (1, 16384, 2, 4), (1, 9830, 3, 3), (2, 6553, 2, 2), (1, 16384, 4, 2), (3, 8000, 3, 1)]


@pytest.mark.parametrize(("b", "beta_16", "m", "count"), SMALL)
def test_advantage_is_that_of_the_best_adaptive_strategy(b: int, beta_16: int, m: int, count: int) -> None:
    found = attack_of((count, cell(b, beta_16, m))).advantage
    truth = float(best_guess(pairs_by_k(b, beta_16, m), count))
    assert truth <= found <= truth * 1.001 + 1e-4
    # of a change twice as large, or of twice as many releases, it would be no bound
    assert found < 0.9 * float(best_guess(pairs_by_k(b, 2 * beta_16 if beta_16 < 16384 else 24576, m), count))
    assert found < float(best_guess(pairs_by_k(b, beta_16, m), count + 1)) or count == 1


@pytest.mark.parametrize(("b", "beta_16", "m", "count"), SMALL)
def test_detection_is_that_of_the_best_test_with_one_false_alarm_in_a_thousand(
    b: int, beta_16: int, m: int, count: int
) -> None:
    found = attack_of((count, cell(b, beta_16, m))).detection
    truth = float(max(power(*laws, RATE) for laws in products(pairs_by_k(b, beta_16, m), count)))
    assert truth <= found <= truth * 1.03
    wider = pairs_by_k(b, 2 * beta_16 if beta_16 < 16384 else 24576, m)
    assert found < 0.9 * float(max(power(*laws, RATE) for laws in products(wider, count)))


@pytest.mark.parametrize(("num_bits", "beta_16"), [(1, 16384), (6, 9830), (60, 6553), (300, 3276)])
def test_both_are_exact_for_a_record(num_bits: int, beta_16: int) -> None:
    lo, hi = Fraction(32768 - beta_16, 65536), Fraction(32768 + beta_16, 65536)
    first = [math.comb(num_bits, i) * hi**i * lo ** (num_bits - i) for i in range(num_bits + 1)]
    second = first[::-1]
    advantage = float(sum(max(Fraction(0), x - y) for x, y in zip(first, second, strict=True)))
    detection = float(power(first, second, RATE))
    found = attack_of((1, BitLosses(num_bits=num_bits, beta_16=beta_16)))
    assert advantage <= found.advantage <= advantage * (1 + 1e-6) + 1e-9
    assert detection <= found.detection <= detection * (1 + 1e-4)
    half = attack_of((1, BitLosses(num_bits=num_bits, beta_16=beta_16 // 2)))
    assert half.advantage < 0.9 * advantage
    assert half.detection < 0.9 * detection


# ----------------------------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("beta", [0.25, 0.125, 1 / 1024])
def test_pure_randomised_response(beta: float) -> None:
    """One party and one bit: (e^eps - 1) / (e^eps + 1) with eps = ln(hi/lo) is hi - lo."""
    epsilon = math.log((0.5 + beta) / (0.5 - beta))
    event = PoissonBinomialRelease(num_trials=1, beta=beta, num_parties=1, embedding_dim=1)
    row = epsilon_bound(training_run(num_samples=5, batch_size=5, event=event), Unit.CELL, Accounting.PAPER, delta=1e-9)
    expected = (math.exp(epsilon) - 1) / (math.exp(epsilon) + 1)
    assert expected == pytest.approx(2 * beta, rel=1e-12)
    assert expected <= row.advantage_upper_bound <= expected * (1 + 1e-6)
    # nothing is likelier by more than e^eps
    assert row.detection_upper_bound == pytest.approx(math.exp(epsilon) / 1000, rel=1e-3)
    assert row.odds_upper_bound == pytest.approx(math.exp(epsilon), rel=1e-3)
    pure = attack_on(randomised_response(epsilon), 0.0)
    assert pure.advantage == pytest.approx(expected, rel=1e-8)
    assert pure.detection == pytest.approx(math.exp(epsilon) / 1000, rel=1e-3)


@pytest.mark.parametrize("shift", [0.01, 0.5, 1.666, 4.0, 9.0])
def test_gaussian(shift: float) -> None:
    event = LocalGaussianRelease(variance=4 / shift**2, bound=1.0, num_parties=3, embedding_dim=1)
    row = epsilon_bound(
        training_run(num_samples=5, batch_size=5, event=event), Unit.CELL, Accounting.PAPER, delta=DELTA
    )
    expected = 2 * NORMAL.cdf(shift / 2) - 1
    assert expected <= row.advantage_upper_bound <= expected * (1 + 1e-8)
    detected = NORMAL.cdf(NORMAL.inv_cdf(0.001) + shift)
    # an epsilon of at least 0 is used, which costs at most the rate of false alarms
    assert detected <= row.detection_upper_bound <= min(detected * (1 + 1e-5) + (0.001 if shift > 6 else 0), 1)
    assert row.advantage_upper_bound < 2 * NORMAL.cdf(shift) - 1
    assert row.detection_upper_bound < NORMAL.cdf(NORMAL.inv_cdf(0.001) + 2 * shift) or shift > 6


@pytest.mark.parametrize(("e0", "mu"), [(1.0, 0.5), (3.0, 0.268), (0.2, 2.0)])
def test_a_pure_release_beside_a_gaussian(e0: float, mu: float) -> None:
    """p * H_(-e0) + (1 - p) * H_(e0) of the Gaussian, p = e^e0 / (1 + e^e0)."""

    def hockey_stick(epsilon: float) -> float:
        return NORMAL.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * NORMAL.cdf(-mu / 2 - epsilon / mu)

    p = 1 / (1 + math.exp(-e0))
    expected = p * hockey_stick(-e0) + (1 - p) * hockey_stick(e0)
    atoms = LossDistribution(np.array([-e0, e0]), np.array([1 - p, p]))
    for found in (
        attack_on(randomised_response(e0), mu),
        attack_of((1, AtomLosses(atoms=atoms)), (4, GaussianLosses(shift=mu / 2))),
    ):
        assert expected * (1 - 1e-12) <= found.advantage <= expected * (1 + 1e-6)
        assert found.advantage + FALSE_ALARM_RATE >= found.detection
    assert attack_on(randomised_response(e0 / 2), mu / 2).advantage < 0.9 * expected


# --------------------------------------------------------------------------------------------------- dp-accounting


@pytest.mark.parametrize(
    ("b", "beta_16", "m", "count"), [(2, 3276, 5, 36), (1, 16384, 5, 12), (16, 7208, 5, 4), (4, 6000, 3, 20)]
)
def test_advantage_of_many_releases_against_dp_accounting(b: int, beta_16: int, m: int, count: int) -> None:
    """Any one k composed by dp-accounting is a lower bound, and the best of three of them not far below."""
    lo, hi = (32768 - beta_16) / 65536, (32768 + beta_16) / 65536

    def pld(k: int, *, pessimistic: bool) -> privacy_loss_distribution.PrivacyLossDistribution:
        laws = []
        for own in (hi, lo):
            law = np.ones(1)
            for p in [own] * b + [hi] * k + [lo] * (b * (m - 1) - k):
                law = np.convolve(law, [1 - p, p])
            laws.append(np.log(law))
        return privacy_loss_distribution.from_two_probability_mass_functions(
            dict(enumerate(laws[1])),
            dict(enumerate(laws[0])),
            pessimistic_estimate=pessimistic,
            value_discretization_interval=0.01 / count,
        )

    def composed(*, pessimistic: bool) -> list[privacy_loss_distribution.PrivacyLossDistribution]:
        last = b * (m - 1)
        return [pld(k, pessimistic=pessimistic).self_compose(count) for k in (0, last // 2, last)]

    def lowest_line(theirs: privacy_loss_distribution.PrivacyLossDistribution) -> float:
        return float(np.min(np.asarray(theirs.get_delta_for_epsilon(EPSILONS)) + np.exp(EPSILONS) / 1000))

    found = attack_of((count, cell(b, beta_16, m)))
    below, above = composed(pessimistic=False), composed(pessimistic=True)
    advantages, too_large = ([theirs.get_delta_for_epsilon(0.0) for theirs in each] for each in (below, above))
    assert max(too_large) <= 1.02 * max(advantages)
    assert max(advantages) <= found.advantage <= 1.08 * max(advantages)
    # the same for detections: the lowest of the lines that lie above their curve
    assert max(map(lowest_line, below)) * (1 - 1e-3) <= found.detection <= 1.08 * max(map(lowest_line, above))


@pytest.mark.parametrize(("num_bits", "beta_16", "shift"), [(64, 7208, 0.0), (64, 3000, 1.2), (5000, 300, 0.4)])
def test_advantage_of_records_and_updates_against_dp_accounting(num_bits: int, beta_16: int, shift: float) -> None:
    lo, hi = (32768 - beta_16) / 65536, (32768 + beta_16) / 65536
    step = (math.log(hi) - math.log(lo)) / 64  # a bit's loss is on their grid, so that nothing is rounded there
    theirs = privacy_loss_distribution.from_two_probability_mass_functions(
        {0: math.log(hi), 1: math.log(lo)}, {0: math.log(lo), 1: math.log(hi)}, value_discretization_interval=step
    ).self_compose(num_bits)
    parts: list[tuple[int, Losses]] = [(1, BitLosses(num_bits=num_bits, beta_16=beta_16))]
    if shift:
        theirs = theirs.compose(
            privacy_loss_distribution.from_gaussian_mechanism(1 / shift, value_discretization_interval=step)
        )
        parts.append((1, GaussianLosses(shift=shift)))
    found = attack_of(*parts)
    assert found.advantage == pytest.approx(theirs.get_delta_for_epsilon(0.0), rel=1e-3)
    lines = np.asarray(theirs.get_delta_for_epsilon(EPSILONS)) + np.exp(EPSILONS) / 1000
    assert found.detection == pytest.approx(float(lines.min()), rel=1e-3)


# ------------------------------------------------------------------------------------------------------ how it moves


def rises(attacks: list[Attack]) -> bool:
    return all(
        before.advantage < after.advantage and before.detection < after.detection
        for before, after in itertools.pairwise(attacks)
    )


def test_both_rise_with_releases_beta_and_trials_and_fall_with_parties() -> None:
    assert rises([attack_of((count, cell(2, 4000, 4))) for count in (1, 2, 4, 16, 64, 256)])
    assert rises([attack_of((4, cell(2, beta_16, 4))) for beta_16 in (200, 1000, 4000, 8000, 16384)])
    assert rises([attack_of((4, cell(b, 4000, 4))) for b in (1, 2, 4, 8, 16)])
    assert rises([attack_of((4, cell(2, 4000, m))) for m in (40, 20, 10, 5, 3, 2, 1)])
    assert rises([attack_of((4, BitLosses(num_bits=n, beta_16=2000))) for n in (1, 4, 16, 64)])
    assert rises([attack_of((4, cell(2, 4000, 4)), (1, GaussianLosses(shift=s))) for s in (0.1, 0.5, 1.0, 2.0)])


def test_a_table_s_rows_are_ordered_as_their_epsilons() -> None:
    rows = {
        (row.unit, row.accounting, row.adversary): row
        for row in epsilon_bounds(pbm_run(4, 2, 0.1, 2), delta=DELTA, adversaries=(SERVER, CURIOUS_PARTY))
    }
    for unit in (Unit.CELL, Unit.RECORD):
        paper, strict = (rows[unit, accounting, SERVER] for accounting in Accounting)
        assert paper.advantage_upper_bound < strict.advantage_upper_bound
    cells = [rows[Unit.CELL, Accounting.PAPER, adversary] for adversary in (SERVER, CURIOUS_PARTY)]
    assert cells[0].advantage_upper_bound < cells[1].advantage_upper_bound


def implied(row: EpsilonBound) -> tuple[float, float]:
    """What one (epsilon, delta) permits."""
    e = math.exp(min(row.epsilon, 700.0))
    return min(1.0, (e - 1 + 2 * row.delta) / (e + 1)), min(1.0, row.delta + e / 1000)


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-8])
@pytest.mark.parametrize(
    "run",
    [
        pbm_run(4, 2, 0.1, 2),
        pbm_run(5, 1, 0.25, 1),
        pbm_run(3, 16, 0.02, 3),
        pbm_run(3, 1, 0.2, 2, NoisyUpdate(clip_norm=1.0, noise_multiplier=6.3)),
    ],
    ids=["usual", "few bits", "many bits", "noisy updates"],
)
def test_no_bound_is_above_what_its_epsilon_and_delta_permit(run: TrainingRun, delta: float) -> None:
    for row in epsilon_bounds(run, delta=delta, adversaries=(SERVER, Adversary(colluding_parties=2))):
        advantage, detection = implied(row)
        assert 0 < row.advantage_upper_bound <= advantage * (1 + 1e-8) + 1e-12
        assert FALSE_ALARM_RATE < row.detection_upper_bound <= detection * (1 + 1e-6)
        assert row.detection_upper_bound <= row.advantage_upper_bound + FALSE_ALARM_RATE + 1e-8


def test_the_same_epsilon_hides_different_attacks() -> None:
    """Epsilon 8 of one randomised response is nearly everything; of a Gaussian at delta 1e-5 much less."""
    pure, gaussian = attack_on(randomised_response(8.0), 0.0), attack_on(NOTHING_RELEASED, 1.666)
    assert pure.advantage > 0.999
    assert gaussian.advantage < 0.6


# ------------------------------------------------------------------------------------------------- Renyi curves alone


@pytest.mark.parametrize("shift", [0.001, 0.1, 0.7, 1.666, 4.0])
def test_bounds_from_a_curve_lie_above_the_gaussian_s_truth_and_not_far(shift: float) -> None:
    found = attack_from_rdp(gaussian_rdp(shift))
    truth = 2 * NORMAL.cdf(shift / 2) - 1
    assert truth < found.advantage < 1.35 * truth
    detected = NORMAL.cdf(NORMAL.inv_cdf(0.001) + shift)
    assert detected < found.detection < 3 * detected


@given(bits=st.integers(1, 400), beta_16=st.integers(50, 16384), shift=st.sampled_from([0.0, 0.3, 2.0]))
@settings(max_examples=60, deadline=None)
def test_bounds_from_a_curve_are_never_below_those_from_losses(bits: int, beta_16: int, shift: float) -> None:
    by_curve = attack_from_rdp(record_rdp(bits, beta_16, 1) + gaussian_rdp(shift))
    by_losses = attack_on(binomial_losses(bits, beta_16, 1e-9), shift)
    assert by_losses.advantage <= by_curve.advantage * (1 + 1e-6) + 1e-9
    assert by_losses.detection <= by_curve.detection * (1 + 1e-3)


def test_a_curve_of_a_pure_mechanism_knows_that_it_is_pure() -> None:
    """Every order's divergence at most 6: better than by the divergence of order 1 alone."""
    found = attack_from_rdp(np.full(len(ORDERS), 6.0))
    assert math.tanh(3) <= found.advantage <= math.tanh(3) * (1 + 2e-3)
    assert found.advantage < math.sqrt(-math.expm1(-6.0))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
def test_what_is_no_divergence_never_lowers_a_bound(bad: float) -> None:
    assert attack_from_rdp(np.full(len(ORDERS), bad)) == NO_PROTECTION
    curve = np.array(cell_rdp(1, 16384, 5)) * 5
    before = attack_from_rdp(curve)
    curve[::2] = bad
    after = attack_from_rdp(curve)
    assert after.advantage >= before.advantage
    assert after.detection >= before.detection


def test_rdp_alone_gives_a_larger_bound() -> None:
    run = pbm_run(4, 2, 0.05, 1)
    for unit in (Unit.CELL, Unit.RECORD):
        alone, both = (epsilon_bound(run, unit, Accounting.PAPER, delta=DELTA, pld=pld) for pld in (False, True))
        assert both.advantage_upper_bound < alone.advantage_upper_bound < 1
        assert both.detection_upper_bound < alone.detection_upper_bound < 1


# ------------------------------------------------------------------------------------------------------ nothing, all


def test_nothing_released_is_no_better_than_a_blind_guess() -> None:
    for row in epsilon_bounds(pbm_run(3, 1, 0.1, 0), delta=DELTA):
        assert (row.advantage_upper_bound, row.detection_upper_bound) == (0, FALSE_ALARM_RATE)
        assert row.odds_upper_bound == 1
    assert attack_of() == attack_of((0, NoLosses())) == NO_ATTACK
    assert attack_from_rdp(np.zeros(len(ORDERS))) == NO_ATTACK


def test_where_nothing_is_protected_an_attack_may_be_always_right() -> None:
    exact = training_run(num_samples=5, batch_size=5, event=ExactRelease(num_parties=2, embedding_dim=4))
    for row in (
        *epsilon_bounds(exact, delta=DELTA),
        *privacy_table(pbm_run(3, 1, 0.1, 1), delta=DELTA, noise_is_known=True).bounds,
    ):
        assert row.epsilon == math.inf
        assert (row.advantage_upper_bound, row.detection_upper_bound, row.odds_upper_bound) == (1, 1, 1000)
    assert attack_of((1, NoLosses())) == NO_PROTECTION


def test_a_large_delta_hides_an_epsilon_but_no_attack() -> None:
    """At a delta above the total variation epsilon is 0, and the attack is what it was."""
    run = pbm_run(3, 1, 0.1, 1)
    large, small = (epsilon_bound(run, Unit.CELL, Accounting.PAPER, delta=delta) for delta in (0.9, DELTA))
    assert large.epsilon == 0
    assert large.advantage_upper_bound == pytest.approx(small.advantage_upper_bound, rel=1e-3)


def test_more_bits_than_are_composed_have_the_bounds_of_a_pure_release_and_of_the_curve() -> None:
    found = attack_of((1, BitLosses(num_bits=10**9 + 1, beta_16=1)))
    assert found == NO_PROTECTION or found.advantage == pytest.approx(1, abs=1e-6)
    event = PoissonBinomialRelease(num_trials=1, beta=1 / 65536, num_parties=10, embedding_dim=2**27)
    run = training_run(num_samples=5, batch_size=5, event=event)
    row = epsilon_bound(run, Unit.RECORD, Accounting.PAPER, delta=DELTA)
    truth = 2 * NORMAL.cdf(math.sqrt(10 * 2**27) * 2 / 65536) - 1  # the shift of a sum in deviations is 4 beta sqrt(n)
    assert truth * (1 - 1e-6) <= row.advantage_upper_bound <= 1.35 * truth
