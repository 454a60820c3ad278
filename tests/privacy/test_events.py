"""What Gaussian noise on integers is charged: the rounded normal by its loss distribution, older laws as they were."""

from __future__ import annotations

import contextlib
import json
import math
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from pbmvfl.errors import PlanError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit, epsilon_at
from pbmvfl.ledger.session_terms import SessionTerms
from pbmvfl.ledger.spending import fixed_plan_epsilon, spending
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import JOINT
from pbmvfl.plan.search import _least_multiplier
from pbmvfl.privacy.accounting import Activity, EpsilonBound, TrainingRun, epsilon_bound, rdp_curve
from pbmvfl.privacy.advantage import randomised_response
from pbmvfl.privacy.composition import AtomLosses, GaussianLosses, Losses, bounds_by_losses
from pbmvfl.privacy.conversion import epsilon_from_losses
from pbmvfl.privacy.events import (
    DiscreteGaussianUpdate,
    RoundedGaussianSum,
    UpdateEvent,
    event_from_dict,
)
from pbmvfl.privacy.loss_distribution import LossDistribution, smallest_epsilon
from pbmvfl.privacy.units import Accounting, Unit
from support.ledger_books import DELTA, NAME, charge_all, small_plan

FROZEN: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "frozen-events.json").read_text())
#: epsilon at delta 1e-5 -> by how many standard deviations a Gaussian may move, to three digits.
SHIFTS = {8: 1.666, 4: 0.925, 2: 0.502, 1: 0.268, 0.5: 0.142}


def hockey_stick(epsilon: float, mu: float) -> float:
    """Of a Gaussian that is moved by mu standard deviations, any sign of epsilon; the oracle, by scipy."""
    return float(stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu)))


def updates(event: UpdateEvent, uses: int) -> TrainingRun:
    """Local training: so many updates with every row, and no release."""
    local = Activity(split="train", release=None, update=event, row_releases=0, row_updates=uses, total_releases=0)
    return TrainingRun(activities=(local,), num_parties=5)


def bound_of(event: UpdateEvent, uses: int, unit: Unit = Unit.CELL) -> EpsilonBound:
    return epsilon_bound(updates(event, uses), unit, Accounting.STRICT, delta=DELTA)


# --- the rounded normal has the Gaussian mechanism's curve ---


def cells(sigma: float, shift: int, reach: int) -> list[mpmath.mpf]:
    """P(shift + floor(X) = v) for v from -reach to reach, exactly."""
    edges = [mpmath.ncdf((mpmath.mpf(v) - shift) / sigma) for v in range(-reach, reach + 2)]
    return [b - a for a, b in pairwise(edges)]


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("shift", [1, 2, 5])
@pytest.mark.parametrize("epsilon", [-1.0, 0.0, 0.7, 3.0])
def test_a_moved_sum_plus_the_rounded_normal_lies_below_the_gaussian_s_curve(sigma, shift, epsilon):
    with mpmath.workdps(30):
        pairs = list(zip(cells(sigma, shift, 60), cells(sigma, 0, 60), strict=True))
        forth = float(mpmath.fsum(max(p - mpmath.exp(epsilon) * q, mpmath.mpf(0)) for p, q in pairs))
        back = float(mpmath.fsum(max(q - mpmath.exp(epsilon) * p, mpmath.mpf(0)) for p, q in pairs))
        renyi = float(mpmath.log(mpmath.fsum(p**4 / q**3 for p, q in pairs if q)) / 3)
    # a row's limit of 1 is half of the shift
    event = RoundedGaussianSum(clip_norm=1.0, noise_multiplier=2 * sigma / shift)
    losses = event.losses()
    assert isinstance(losses, GaussianLosses)
    assert max(forth, back) <= hockey_stick(epsilon, losses.shift) + 1e-12
    assert renyi <= event.rdp((4.0,))[0]
    if sigma == 3.0 and shift == 1 and epsilon == 0:  # hardly anything is lost by rounding
        assert forth >= hockey_stick(0.0, losses.shift) * 0.98


def test_so_does_a_vector_of_integers_whose_coordinates_move_together():
    sigma, epsilon = 1.5, 0.3
    with mpmath.workdps(20):
        moved, still = (np.array([float(p) for p in cells(sigma, k, 16)]) for k in (1, 0))
    back, two = (np.array([float(p) for p in cells(sigma, k, 16)]) for k in (-1, 2))
    p = np.einsum("i,j,k->ijk", moved, back, two)
    q = np.einsum("i,j,k->ijk", still, still, still)
    shift = math.sqrt(1 + 1 + 4) / sigma
    assert np.maximum(p - math.exp(epsilon) * q, 0).sum() <= hockey_stick(epsilon, shift) + 1e-12
    assert np.maximum(p - math.exp(epsilon) * q, 0).sum() > hockey_stick(epsilon, 0.8 * shift)  # the control


@given(st.integers(-(2**62), 2**62), st.fractions())
def test_an_integer_plus_noise_rounded_down_is_their_sum_rounded_down_and_no_other_rounding_does_that(integer, noise):
    assert integer + math.floor(noise) == math.floor(integer + noise)
    # Towards zero it is not, so that one would not be computed from the Gaussian mechanism's output.
    assert 1 + math.trunc(Fraction(-1, 2)) != math.trunc(1 + Fraction(-1, 2))


def test_a_discrete_gaussian_s_hockey_stick_curve_is_another_so_it_has_no_account_by_losses():
    # sigma = 1/2, shift 1: the continuous curve is 1 - 2*ncdf(-1) = 0.683 at epsilon 0, the discrete one above it.
    with mpmath.workdps(20):
        weights = [mpmath.exp(-2 * mpmath.mpf(x) ** 2) for x in range(-30, 32)]
        laws = [w / mpmath.fsum(weights) for w in weights]
        discrete = mpmath.fsum(max(mpmath.mpf(0), a - b) for a, b in zip([0, *laws], [*laws, 0], strict=True))
        assert discrete > 1 - 2 * mpmath.ncdf(-1)
    assert type(DiscreteGaussianUpdate(clip_norm=1.0, noise_multiplier=1.0).losses()).__name__ == "NoLosses"


def renyi_discrete(shift: int, sigma: mpmath.mpf, order: float) -> mpmath.mpf:
    """D(N_Z(shift, sigma^2) || N_Z(0, sigma^2)) from the definition, summed until nothing is left."""
    reach = int(60 * sigma) + abs(shift) * (int(order) + 2)
    total = mpmath.fsum(mpmath.exp(-(mpmath.mpf(x) ** 2) / (2 * sigma**2)) for x in range(-reach, reach + 1))
    moment = mpmath.fsum(
        mpmath.exp(-(order * mpmath.mpf(x - shift) ** 2 + (1 - order) * mpmath.mpf(x) ** 2) / (2 * sigma**2))
        for x in range(-reach, reach + 1)
    )
    return mpmath.log(moment / total) / (order - 1)


@pytest.mark.parametrize(("sigma", "shift", "order"), [("0.4", 1, 1.5), ("1", 2, 2.0), ("3.7", 5, 8.25)])
def test_a_discrete_gaussian_costs_at_most_what_its_event_says(sigma, shift, order):
    with mpmath.workdps(30):
        truth = float(renyi_discrete(shift, mpmath.mpf(sigma), order))
    event = DiscreteGaussianUpdate(clip_norm=1.0, noise_multiplier=2 * float(sigma) / shift)
    assert truth <= event.rdp((order,))[0]


# --- the account ---


@pytest.mark.parametrize("epsilon", SHIFTS)
def test_many_updates_are_one_gaussian_of_the_exact_shift(epsilon):
    exact = optimize.brentq(lambda mu: hockey_stick(epsilon, mu) - DELTA, 1e-3, 10.0, xtol=1e-14)
    assert round(exact, 3) == SHIFTS[epsilon]
    found = bound_of(RoundedGaussianSum(clip_norm=0.5, noise_multiplier=2 * math.sqrt(40) / exact), 40)
    assert found.method == "pld"
    assert epsilon * (1 - 1e-9) <= found.epsilon <= epsilon * (1 + 2e-5)
    assert found.advantage_upper_bound == pytest.approx(2 * stats.norm.cdf(exact / 2) - 1, rel=1e-8)
    # most true alarms at a share of false ones: Phi(mu - z)
    assert found.detection_upper_bound == pytest.approx(stats.norm.cdf(exact - stats.norm.isf(1e-3)), rel=1e-6)
    by_rdp = epsilon_bound(
        updates(RoundedGaussianSum(clip_norm=0.5, noise_multiplier=2 * math.sqrt(40) / exact), 40),
        Unit.CELL,
        Accounting.STRICT,
        delta=DELTA,
        pld=False,
    )
    assert 1.06 < by_rdp.epsilon / found.epsilon < 1.11


def test_a_record_s_updates_are_those_of_all_honest_parties():
    event = RoundedGaussianSum(clip_norm=1.0, noise_multiplier=50.0)
    assert bound_of(event, 8, Unit.RECORD).epsilon == bound_of(event, 40).epsilon


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 0.4)), min_size=1, max_size=6))
def test_shifts_of_any_sizes_add_up_by_their_squares(parts):
    mu = math.sqrt(sum(count * shift**2 for count, shift in parts))
    losses = [(count, GaussianLosses(shift=shift)) for count, shift in parts]
    found, attack = bounds_by_losses(losses, DELTA, 100.0)
    assert hockey_stick(found, mu) <= DELTA * (1 + 1e-9)
    assert hockey_stick(found * (1 - 2e-5), mu) >= DELTA * (1 - 1e-9)
    assert attack.advantage == pytest.approx(2 * stats.norm.cdf(mu / 2) - 1, rel=1e-8)


def pure_and_gaussian(epsilon: float, pure: float, mu: float) -> float:
    """delta: a bit that is true with probability p beside a Gaussian."""
    p = 1 / (1 + math.exp(-pure))
    return p * hockey_stick(epsilon - pure, mu) + (1 - p) * hockey_stick(epsilon + pure, mu)


MIXED = [(6.0, 0.502), (4.0, 0.268), (1.0, 0.5), (0.1, 1.0), (8.0, 0.142), (0.01, 0.2), (3.0, 3.0)]


@pytest.mark.parametrize(("pure", "mu"), MIXED)
def test_a_pure_release_beside_gaussian_updates_costs_what_the_formula_says(pure, mu):
    truth = optimize.brentq(lambda epsilon: pure_and_gaussian(epsilon, pure, mu) - DELTA, 0.0, pure + 60)
    atoms = AtomLosses(atoms=randomised_response(pure))
    found, attack = bounds_by_losses([(1, atoms), (9, GaussianLosses(shift=mu / 3))], DELTA, 100.0)
    assert truth * (1 - 1e-9) <= found <= truth * (1 + 2e-5)
    assert attack.advantage == pytest.approx(pure_and_gaussian(0.0, pure, mu), rel=1e-8)
    # composed on a grid, as several releases are, it is the same to the digits that the search has
    halves = AtomLosses(atoms=randomised_response(pure), copies=3)
    with_three, _ = bounds_by_losses([(1, halves), (9, GaussianLosses(shift=mu / 3))], DELTA, 200.0)
    assert (
        found
        < with_three
        <= bounds_by_losses(
            [(1, AtomLosses(atoms=randomised_response(3 * pure))), (9, GaussianLosses(shift=mu / 3))], DELTA, 200.0
        )[0]
        * (1 + 3e-5)
    )


def test_dp_accounting_says_the_same():
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    mu, pure = 0.5, 1.5
    gaussian = pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=1e-3)
    response = pld.from_randomized_response(2 / (1 + math.exp(pure)), 2, value_discretization_interval=1e-3)
    for theirs, parts in (
        (gaussian, [(4, GaussianLosses(shift=mu / 2))]),
        (
            gaussian.compose(response),
            [(4, GaussianLosses(shift=mu / 2)), (1, AtomLosses(atoms=randomised_response(pure)))],
        ),
    ):
        assert bounds_by_losses(parts, DELTA, 100.0)[0] == pytest.approx(theirs.get_epsilon_for_delta(DELTA), rel=2e-3)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.05, 3.0), st.integers(3000, 6000), st.integers(0, 10**6))
def test_a_coarser_law_only_says_where_to_look(shift, points, seed):
    """The search from a likely epsilon ends where the plain one does."""
    rng = np.random.default_rng(seed)
    losses = LossDistribution(np.sort(rng.normal(0.5, 1.0, points)), rng.dirichlet(np.full(points, 0.05)))
    plain = smallest_epsilon(lambda epsilon: losses.delta_with_gaussian(epsilon, shift), DELTA, 100.0)
    found = epsilon_from_losses(losses, shift, DELTA, 100.0)
    assert losses.delta_with_gaussian(found, shift) <= DELTA
    assert found == pytest.approx(plain, rel=2.1e-5)


@pytest.mark.parametrize("likely", [math.inf, 0.0, 1e-9, 0.5, 2.0, 2.00001, 2.5, 50.0, 99.0, 100.0, 1000.0])
def test_a_wrong_guess_costs_looks_and_no_truth(likely):
    found = smallest_epsilon(lambda epsilon: math.exp(-epsilon), math.exp(-2), 100.0, likely)
    assert 2.0 <= found <= 2.0 * (1 + 1.1e-5)
    assert smallest_epsilon(lambda _: 0.0, 0.1, 100.0, likely) == 0.0
    assert smallest_epsilon(lambda _: 1.0, 0.1, 100.0, likely) == math.inf


# --- the planner ---


@pytest.mark.parametrize("epsilon", SHIFTS)
def test_the_planner_s_noise_is_the_least_that_the_exact_account_allows(epsilon):
    tried = []

    def spent(multiplier: float) -> float:
        tried.append(multiplier)
        return bound_of(RoundedGaussianSum(clip_norm=1.0, noise_multiplier=multiplier), 40).epsilon

    least = 2 * math.sqrt(40) / optimize.brentq(lambda mu: hockey_stick(epsilon, mu) - DELTA, 1e-3, 10.0)
    found = _least_multiplier(spent, 1.08 * least, epsilon)
    assert least * (1 - 1e-9) <= found <= least * 1.001
    assert len(tried) <= 8
    assert spent(found) <= epsilon
    assert _least_multiplier(lambda _: math.inf, 3.0, epsilon) == 3.0
    assert _least_multiplier(lambda _: epsilon, 3.0, epsilon) == 3.0


def test_a_strict_plan_has_less_noise_than_renyi_curves_allow():
    plan = Plan.for_budget(epsilon=8, delta=DELTA, training="joint", num_parties=5, num_samples=8844, num_classes=2)
    quiet = plan.replace(num_trials=1, beta=1 / 128)
    half = 8 / math.sqrt(2)
    bounds = [
        epsilon_bound(quiet.training_run(), Unit.CELL, Accounting.STRICT, delta=DELTA, pld=pld) for pld in (True, False)
    ]
    assert 0.99 * half < bounds[0].epsilon <= half * 1.01
    assert bounds[1].epsilon > 1.05 * half


# --- ledgers ---


def test_a_ledger_keeps_charges_and_reads_the_new_event(tmp_path):
    plan = small_plan(noise_multiplier=4.0)
    path = tmp_path / "book.sqlite"
    with contextlib.closing(Ledger(path)) as ledger:
        charge_all(ledger, plan)
    with contextlib.closing(Ledger(path, read_only=True)) as ledger:
        (entry,) = ledger.sessions(NAME)
        assert entry.terms.update(JOINT) == RoundedGaussianSum(clip_norm=1.0, noise_multiplier=4.0)
        limit = Limit.choose(unit="cell", accounting="strict", epsilon=50.0, delta=DELTA, counting="renyi")
        spent = spending(ledger, NAME, limit).worst
        expected = rdp_curve(plan.training_run(), Unit.CELL, Accounting.STRICT, orders=(limit.order,))[0]
        assert spent == pytest.approx(expected, rel=1e-9)
        # A limit is for whatever comes, at an order that was fixed before: above the book as one plan, which is above
        # the plan's own bound, because that one may use losses.
        as_one_plan = fixed_plan_epsilon(
            ledger, NAME, unit=Unit.CELL, accounting=Accounting.STRICT, colluding_parties=0, delta=DELTA
        )
        own = epsilon_bound(plan.training_run(), Unit.CELL, Accounting.STRICT, delta=DELTA).epsilon
        assert own < as_one_plan <= epsilon_at(spent, DELTA, limit.order)


def test_an_update_that_nothing_draws_any_more_is_still_priced():
    plan = small_plan(noise_multiplier=4.0)
    text = SessionTerms.of(plan, public_start=True).to_json()
    old = json.loads(text)
    old["events"]["joint"][1] = {
        "event": "discrete-gaussian-update",
        "clip_norm": 1.0,
        "noise_multiplier": 4.0,
    }
    terms = SessionTerms.from_json(json.dumps(old))
    assert terms.update(JOINT) == DiscreteGaussianUpdate(clip_norm=1.0, noise_multiplier=4.0)
    assert SessionTerms.from_json(text).update(JOINT) == RoundedGaussianSum(clip_norm=1.0, noise_multiplier=4.0)


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda frozen: str(frozen["event"]["event"]))
def test_an_event_costs_for_ever_what_it_costs(frozen):
    event = event_from_dict(frozen["event"])
    assert isinstance(event, UpdateEvent)
    assert event.to_dict() == frozen["event"]
    assert event.rdp(tuple(frozen["orders"])) == pytest.approx(frozen["rdp"], rel=1e-12)
    losses: Losses = event.losses()
    assert frozen["shift_of_losses"] == (losses.shift if isinstance(losses, GaussianLosses) else None)


def test_every_noisy_update_is_frozen():
    assert {frozen["event"]["event"] for frozen in FROZEN} == {
        "noisy-update",
        "discrete-gaussian-update",
        "rounded-gaussian-sum",
    }


@pytest.mark.parametrize("name", ["clip_norm", "noise_multiplier", "diameter"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_numbers_that_make_no_sense_are_named(name, value):
    numbers = {"clip_norm": 1.0, "noise_multiplier": 2.0, "diameter": 2.0}
    with pytest.raises(PlanError, match=f"{name}=.*permitted: a finite number above 0"):
        RoundedGaussianSum(**{**numbers, name: value})


def test_counts_of_one_class_out_of_several_move_less():
    counts = RoundedGaussianSum(clip_norm=1.0, noise_multiplier=5.0, diameter=math.sqrt(2))
    gradients = RoundedGaussianSum(clip_norm=1.0, noise_multiplier=5.0)
    assert gradients.shift == 0.4
    assert counts.rdp((2.0,))[0] == pytest.approx(gradients.rdp((2.0,))[0] / 2)
