"""Limits that count as Gaussian noise: exact for it, and sound for whatever an adversary chooses next.

Oracles: the normal law of scipy.stats, integrals over an adversary's choices, and a walk over every use of every row.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pbmvfl.errors import PlanError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Counting, Limit
from pbmvfl.ledger.spending import spending
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import FUSION
from pbmvfl.privacy.composition import AtomLosses, BitLosses, GaussianLosses, HullLosses, NoLosses
from pbmvfl.privacy.gaussian_filter import (
    epsilon_in_turn,
    gaussian_epsilon,
    largest_square,
    pure_epsilon,
    shift_of_pure,
    squared_shift,
)
from pbmvfl.privacy.pure_pairs import pure_losses
from support.ledger_books import DELTA, LOCAL_NUMBERS, NAME, charge_all, opening, small_plan


def delta_of(epsilon: float, shift: float) -> float:
    """Balle and Wang's formula, by another program's normal law."""
    if shift == 0:
        return max(0.0, 1 - math.exp(epsilon)) if epsilon < 0 else 0.0
    first, second = shift / 2 - epsilon / shift, -shift / 2 - epsilon / shift
    return float(stats.norm.cdf(first) - math.exp(epsilon) * stats.norm.cdf(second))


@given(st.floats(0.05, 30), st.floats(1e-9, 0.05))
def test_a_shift_and_its_epsilon_are_each_other_s_inverse_and_round_to_the_safe_side(epsilon, delta):
    square = largest_square(epsilon, delta)
    assert delta_of(epsilon, math.sqrt(square)) <= delta
    assert delta_of(epsilon, math.sqrt(square) * (1 + 1e-6)) > delta
    assert gaussian_epsilon(square, delta) == pytest.approx(epsilon, rel=1e-6)
    assert delta_of(gaussian_epsilon(square, delta), math.sqrt(square)) <= delta * (1 + 1e-9)


def test_what_is_no_number_is_never_within_a_limit():
    assert gaussian_epsilon(math.inf, DELTA) == gaussian_epsilon(math.nan, DELTA) == math.inf
    assert largest_square(-1e-12, DELTA) == -math.inf
    assert shift_of_pure(math.nan) == math.inf
    assert squared_shift(NoLosses()) == math.inf


@given(st.floats(0.01, 12), st.floats(1e-6, 1 - 1e-6))
def test_a_pure_epsilon_is_no_easier_to_tell_than_its_gaussian(epsilon, false_alarms):
    """At every rate of false alarms the best test finds at most what it would find of the Gaussian."""
    best = min(1.0, math.exp(epsilon) * false_alarms, 1 - math.exp(-epsilon) * (1 - false_alarms))
    gaussian = stats.norm.sf(stats.norm.isf(false_alarms) - shift_of_pure(epsilon))
    assert best <= gaussian + 1e-12
    middle = 1 / (1 + math.exp(epsilon))  # and where it is easiest, exactly that
    assert stats.norm.sf(stats.norm.isf(middle) - shift_of_pure(epsilon)) == pytest.approx(1 - middle, rel=1e-6)


def test_costs_of_every_sort_of_release():
    assert squared_shift(GaussianLosses(shift=0.5)) == 0.25
    assert pure_epsilon(GaussianLosses(shift=0.5)) == math.inf
    pure = AtomLosses(atoms=pure_losses(1.5), copies=3)
    assert pure_epsilon(pure) == pytest.approx(4.5)
    assert squared_shift(pure) == pytest.approx(3 * shift_of_pure(1.5) ** 2)
    # a bit is 1 with probability 1/2 +- beta; beta_16 counts 2^-16
    bit = stats.norm.ppf(0.75) - stats.norm.ppf(0.25)
    assert squared_shift(BitLosses(num_bits=7, beta_16=1 << 14)) == pytest.approx(7 * bit**2, rel=1e-6)
    hull = HullLosses(num_trials=4, beta_16=1 << 14, noisy_parties=3, coordinates=2)
    assert squared_shift(hull) == pytest.approx(8 * bit**2, rel=1e-6)


# --- an adversary who chooses after looking ---


def attack(first: float, choice: dict[int, float], epsilon: float) -> float:
    """Delta of an adversary who sees one randomised response with epsilon `first` and then, depending on the answer,
    asks for a Gaussian with one shift or another: the sum over both answers."""
    likely = math.exp(first) / (1 + math.exp(first))
    return sum(
        weight * delta_of(epsilon - sign * first, choice[sign]) for sign, weight in ((1, likely), (-1, 1 - likely))
    )


@given(st.floats(0.05, 7), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_pure_epsilons_before_gaussian_noise_hold_for_any_choice_that_follows(first, one, other):
    """Whatever the answer was, at most what the limit leaves beside the pure epsilon is asked for."""
    limit = Limit.choose(unit="cell", accounting="strict", epsilon=8, delta=DELTA)
    most = math.sqrt(limit.left_beside(first))
    assert attack(first, {1: one * most, -1: other * most}, 8) <= DELTA * (1 + 1e-6)


def test_pure_epsilons_after_gaussian_noise_would_not():
    """The control: after a Gaussian that was seen, an adversary takes the pure epsilon where it pays, else the rest of
    the Gaussian. Adding epsilons up, as before it, would let through more than delta; the books count its square."""
    first, epsilon = 0.8, 8.0
    pure = epsilon - gaussian_epsilon(first**2, DELTA)
    rest = math.sqrt(largest_square(epsilon, DELTA) - first**2)
    seen, step = np.linspace(first - 9, first + 9, 20_001, retstep=True)
    loss = seen * first - first**2 / 2
    with_pure = np.maximum(1 - np.exp(epsilon - loss - pure), 0)
    left = epsilon - loss
    with_rest = stats.norm.cdf(rest / 2 - left / rest) - np.exp(left) * stats.norm.cdf(-rest / 2 - left / rest)
    mass = stats.norm.pdf(seen - first) * step
    assert float(mass @ with_pure) == pytest.approx(DELTA, rel=1e-3)  # each by itself is within the limit
    assert float(mass @ with_rest) == pytest.approx(DELTA, rel=1e-3)
    assert float(mass @ np.maximum(with_pure, with_rest)) > 1.3 * DELTA
    assert (
        epsilon_in_turn([(1, GaussianLosses(shift=first)), (1, AtomLosses(atoms=pure_losses(pure)))], DELTA) > epsilon
    )


# --- in a book ---


LOCAL: dict[str, Any] = {
    **LOCAL_NUMBERS,
    "num_parties": 3,
    "num_samples": 23,
    "num_classes": 2,
    "num_test_samples": 7,
    "batch_size": 5,
}


def strict_limit(epsilon: float = 8.0, **choices: Any) -> Limit:
    return Limit.choose(**{"unit": "cell", "accounting": "strict", "epsilon": epsilon, "delta": DELTA, **choices})


def names(first: int, count: int) -> tuple[str, ...]:
    return tuple(f"p{number}" for number in range(first, first + count))


def test_a_book_counts_every_row_as_a_walk_over_its_uses_does(tmp_path):
    """Rows are predicted, then trained on or fused, then predicted again, in three runs that overlap."""
    plan = Plan.from_dict(LOCAL)
    path = tmp_path / "a.sqlite"
    people = [(0, 30), (20, 50), (30, 0)]
    for number, (train, test) in enumerate(people):
        choices = {"train_ids": names(train, 23), "test_ids": names(test, 7)}
        charge_all(Ledger(path), plan, run=str(number), **choices)
    step, answer = (2 / 6.0) ** 2, 1.5
    fused = {row for current in plan.schedule if current.kind is FUSION for row in current.rows.tolist()}
    assert len(fused) == 2
    converted = (2 * stats.norm.ppf(math.exp(answer) / (1 + math.exp(answer)))) ** 2
    squares: dict[str, float] = {}
    pures: dict[str, float] = {}
    for train, test in people:
        released = [name for row, name in enumerate(names(train, 23)) if row in fused]
        for name in set(names(train, 23)).difference(released):
            squares[name] = squares.get(name, 0.0) + 3 * step
        for name in (*released, *names(test, 7)):
            if squares.get(name):
                squares[name] += converted
            else:
                pures[name] = pures.get(name, 0.0) + answer
    everybody = {*squares, *pures}
    by_hand = max(pures.get(name, 0.0) + gaussian_epsilon(squares.get(name, 0.0), DELTA) for name in everybody)
    with contextlib.closing(Ledger(path, read_only=True)) as book:
        assert spending(book, NAME, strict_limit()).epsilon == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize("epsilon", [1.0, 4.0, 8.0, 20.0])
def test_a_strict_plan_for_an_epsilon_runs_to_its_end_under_a_limit_of_it(epsilon, tmp_path):
    """Its training rows by Gaussian noise, its predicted rows by a pure epsilon; a Renyi limit ends it early."""
    sizes = {"num_parties": 3, "num_samples": 500, "num_classes": 2, "num_test_samples": 50, "columns": 4}
    plan = Plan.for_budget(epsilon=epsilon, delta=DELTA, prediction_epsilon=epsilon, **sizes)
    for counting, reaches_end in (("gaussian", True), ("renyi", False)):
        path = tmp_path / f"{counting}.sqlite"
        with contextlib.closing(Ledger(path)) as book:
            book.set_limit(NAME, strict_limit(epsilon, counting=counting))
            (said,) = book.forecast(opening(dataset=NAME, plan=plan, public_start=True))
        assert (said.stops_at is None) is reaches_end
        assert (charge_all(Ledger(path), plan) == len(plan.schedule)) is reaches_end
    assert said.will_be > 1.02 * epsilon


def test_a_predicted_row_is_predicted_again_until_its_pure_epsilons_are_used_up(tmp_path):
    path = tmp_path / "a.sqlite"
    with contextlib.closing(Ledger(path)) as book:
        book.set_limit(NAME, strict_limit(4.0))
    plan = Plan.from_dict({**LOCAL, "noise_multiplier": 40.0})
    asked = [
        charge_all(Ledger(path), plan, run=str(i), train_ids=names(100 * i, 23), test_ids=names(50, 7))
        for i in (1, 2, 3)
    ]
    whole = len(plan.schedule)
    assert asked == [whole, whole, whole - 2]  # 1.5 + 1.5 + 1.5 is more than 4
    with contextlib.closing(Ledger(path, read_only=True)) as book:
        assert spending(book, NAME, strict_limit(4.0)).epsilon == pytest.approx(3.0)


def test_releases_that_are_not_gaussian_still_have_a_price(tmp_path):
    """Bits are counted one by one, which is far above their Renyi divergence: a reason to count by that."""
    path = tmp_path / "a.sqlite"
    charge_all(Ledger(path), small_plan())
    with contextlib.closing(Ledger(path, read_only=True)) as book:
        gaussian = spending(book, NAME, strict_limit()).epsilon
        renyi = spending(book, NAME, strict_limit(70.0, counting="renyi")).epsilon
    assert renyi < gaussian < math.inf


def test_an_exact_release_is_refused_by_any_limit(tmp_path):
    path = tmp_path / "a.sqlite"
    with contextlib.closing(Ledger(path)) as book:
        book.set_limit(NAME, strict_limit(1e6))
    assert charge_all(Ledger(path), small_plan(mechanism="none", num_trials=None, beta=None)) == 0


# --- limits themselves ---


def test_strict_limits_count_as_gaussian_noise_unless_told_otherwise():
    assert strict_limit().counting is Counting.GAUSSIAN
    assert strict_limit(counting="renyi").counting is Counting.RENYI
    assert strict_limit(order=3.0).counting is Counting.RENYI
    assert strict_limit(unit="party").counting is Counting.RENYI
    assert Limit.choose(unit="cell", accounting="paper", epsilon=8, delta=DELTA).counting is Counting.RENYI


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"counting": "loose"}, "counting='loose'; permitted: gaussian, renyi"),
        ({"counting": "gaussian", "order": 4.0}, "order=4"),
    ],
)
def test_a_bad_way_of_counting_is_refused_by_name(bad, message):
    with pytest.raises(PlanError, match=message):
        strict_limit(**bad)


def test_the_way_of_counting_is_kept_once_there_were_releases(tmp_path):
    path = tmp_path / "a.sqlite"
    with contextlib.closing(Ledger(path)) as book:
        book.set_limit(NAME, strict_limit())
    charge_all(Ledger(path), Plan.from_dict(LOCAL), rounds=1)
    with contextlib.closing(Ledger(path)) as book:
        assert book.set_limit(NAME, strict_limit(9.0, counting="renyi")).counting is Counting.GAUSSIAN
        assert book.trouble() is None
        (kept,) = book.export()["datasets"][NAME]["limits"]
    assert (kept["counting"], kept["order"], kept["epsilon"]) == ("gaussian", None, 9.0)
