"""Columns as symbols and back: coding for whatever stands in a column, the law of released digits, and estimates.

Laws are enumerated in fractions from the integers of randomised response and share no code with the package.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.errors import DataError, PlanError
from pbmvfl.mechanisms import RandomisedSymbols
from pbmvfl.mechanisms.interactions.symbols import (
    NOT_SHOWN,
    Levels,
    as_coordinates,
    estimated_prior,
    from_symbols,
    kept,
    kept_at,
    posterior,
    shown_columns,
    shown_levels,
    shown_symbols,
    to_symbols,
    unbiased_indicators,
)
from support import statistical
from support.enumerated import hockey_stick, together

ONE = 2**32


def made(symbols: int, epsilon: float) -> RandomisedSymbols:
    return RandomisedSymbols(num_parties=2, embedding_dim=1, symbols=symbols, response_epsilon=epsilon)


def law_of(mechanism: RandomisedSymbols, own: int) -> dict[int, Fraction]:
    """P(sent) by the definition of randomised response, from its integer weight."""
    k, w = mechanism.symbols, mechanism.event.other_weight
    return {sent: Fraction(ONE - (k - 1) * w if sent == own else w, ONE) for sent in range(k)}


# --- coding ---


@given(
    st.lists(st.floats(), min_size=1, max_size=8), st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=6, unique=True)
)
def test_a_level_is_the_number_of_cuts_reached_whatever_stands_in_the_column(
    values: list[float], cuts: list[float]
) -> None:
    rising = tuple(sorted(cuts))
    found = Levels(cuts=(rising,)).of(np.array(values)[:, None])[:, 0]
    assert found.tolist() == [sum(1 for cut in rising if value >= cut) for value in values]


def test_no_number_is_the_lowest_level_and_infinity_the_highest() -> None:
    levels = Levels.equal_parts([(-1.0, 1.0), (0.0, 4.0)], 4)
    assert levels.cuts == ((-0.5, 0.0, 0.5), (1.0, 2.0, 3.0))
    odd = np.array([[math.nan, math.inf], [-math.inf, math.nan], [0.0, 2.999]])
    assert levels.of(odd).tolist() == [[0, 3], [0, 0], [2, 2]]


def test_codes_cut_between_them_are_their_own_levels() -> None:
    levels = Levels(cuts=((0.5, 1.5), (0.5,)))
    assert levels.sizes == (3, 2)
    assert levels.base == 3
    assert levels.of(np.array([[0, 0], [1, 1], [2, 1]])).tolist() == [[0, 0], [1, 1], [2, 1]]
    assert levels.only([1]).cuts == ((0.5,),)


@given(st.lists(st.integers(2, 5), min_size=1, max_size=3))
def test_symbols_and_levels_are_one_to_one(sizes: list[int]) -> None:
    every = np.array(list(product(*(range(size) for size in sizes))))
    symbols = to_symbols(every, sizes)
    assert sorted(symbols.tolist()) == list(range(math.prod(sizes)))
    assert from_symbols(symbols, sizes).tolist() == every.tolist()


@pytest.mark.parametrize("num_symbols", [2, 3, 16, 64, 255, 256])
@pytest.mark.parametrize("bound", [1.0, 0.3])
def test_the_mechanism_reads_the_symbol_that_the_coordinate_stands_for(num_symbols: int, bound: float) -> None:
    mechanism = RandomisedSymbols(num_parties=2, embedding_dim=1, symbols=num_symbols, bound=bound)
    symbols = np.arange(num_symbols)
    coordinates = as_coordinates(symbols, num_symbols=num_symbols, bound=bound)
    assert coordinates.shape == (num_symbols, 1)
    assert mechanism.bins(coordinates)[:, 0].tolist() == symbols.tolist()


def test_what_a_row_shows_comes_back_and_the_rest_is_not_shown() -> None:
    columns = np.array([[5.0, -1.0, math.nan], [-5.0, 1.0, 2.0]])
    shown = np.array([[0, 2], [1, 2]])
    levels = Levels(cuts=((0.0,), (0.0,), (0.0, 1.0)))
    symbols = shown_symbols(columns, levels, shown, 3)
    assert symbols.tolist() == [1 + 3 * 0, 1 + 3 * 2]
    back = shown_levels(symbols, shown, num_columns=3, base=3)
    assert back.tolist() == [[1, NOT_SHOWN, 0], [NOT_SHOWN, 1, 2]]


# --- the public choice of columns ---

FROZEN = [[0, 3, 5], [2, 4, 5], [0, 1, 5], [0, 4, 5]]


def test_shown_columns_are_the_same_everywhere_and_differ_by_party() -> None:
    frozen = shown_columns(num_rows=4, num_columns=6, shown=3, seed=7, party=1)
    assert frozen.tolist() == FROZEN
    assert frozen.tolist() != shown_columns(num_rows=4, num_columns=6, shown=3, seed=7, party=2).tolist()
    # Rows that come later do not move earlier ones.
    assert shown_columns(num_rows=9, num_columns=6, shown=3, seed=7, party=1)[:4].tolist() == FROZEN


def choices(shown_NS: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    names = {subset: place for place, subset in enumerate(combinations(range(6), 3))}
    return np.bincount([names[tuple(row)] for row in shown_NS.tolist()], minlength=20)


def test_every_choice_of_columns_is_equally_frequent() -> None:
    shown = shown_columns(num_rows=statistical.NUM_DRAWS // 4, num_columns=6, shown=3, seed=1, party=0)
    assert not statistical.uniform_law_rejects(choices(shown))
    # The control: one row in fifty shows the first three.
    shown[::50] = [0, 1, 2]
    assert statistical.uniform_law_rejects(choices(shown))


# --- the law of what is released ---


@pytest.mark.parametrize(("base", "shown", "epsilon"), [(2, 3, 3.0), (3, 2, 1.5), (4, 1, 2.5), (2, 1, 0.5)])
def test_a_released_digit_is_its_own_with_probability_kept_and_else_uniform(
    base: int, shown: int, epsilon: float
) -> None:
    mechanism = made(base**shown, epsilon)
    stays = 1 - Fraction(mechanism.symbols * mechanism.event.other_weight, ONE)
    assert kept(mechanism.event) == pytest.approx(float(stays), rel=1e-15)
    assert kept(mechanism.event) == pytest.approx(kept_at(mechanism.symbols, epsilon), rel=1e-6)
    for own in product(range(base), repeat=shown):
        symbol = sum(digit * base**place for place, digit in enumerate(own))
        for place in range(shown):
            digits = {level: Fraction(0) for level in range(base)}
            for sent, probability in law_of(mechanism, symbol).items():
                digits[sent // base**place % base] += probability
            for level, probability in digits.items():
                assert probability == (stays if level == own[place] else 0) + (1 - stays) / base


@pytest.mark.parametrize(("used", "symbols"), [(4, 4), (3, 5)])
def test_products_of_two_parties_are_unbiased_for_every_pair_of_symbols(used: int, symbols: int) -> None:
    first, second = made(symbols, 1.0), made(8, 2.0)
    stays = kept(first.event), kept(second.event)
    for own in product(range(used), range(8)):
        total = np.zeros((used, 8))
        both = together(law_of(first, own[0]), law_of(second, own[1]))
        for (one, other), probability in both.items():  # type: ignore[misc]
            left = unbiased_indicators(np.array([one]), used=used, num_symbols=symbols, kept=stays[0])[0]
            right = unbiased_indicators(np.array([other]), used=8, num_symbols=8, kept=stays[1])[0]
            total += float(probability) * np.outer(left, right)
        expected = np.zeros((used, 8))
        expected[own] = 1
        np.testing.assert_allclose(total, expected, atol=1e-12)


def test_the_posterior_is_bayes_rule() -> None:
    mechanism = made(6, 1.2)
    prior = [Fraction(1, 2), Fraction(1, 8), Fraction(1, 4), Fraction(1, 8)]
    found = posterior(np.arange(6), np.array([float(p) for p in prior]), num_symbols=6, kept=kept(mechanism.event))
    for sent in range(6):
        joint = [share * law_of(mechanism, own)[sent] for own, share in enumerate(prior)]
        expected = [float(each / sum(joint)) for each in joint]
        np.testing.assert_allclose(found[sent], expected, rtol=1e-12)
    np.testing.assert_allclose(found[5], [float(p) for p in prior], rtol=1e-12)  # not in use: tells nothing


def test_a_response_without_noise_is_believed() -> None:
    found = posterior(np.array([1, 2]), np.array([0.5, 0.5]), num_symbols=3, kept=1.0)
    assert found.tolist() == [[0.0, 1.0], [0.5, 0.5]]


def test_released_symbols_tell_how_frequent_the_true_ones_are() -> None:
    """Unbiased: 7 deviations of a mean of NUM_DRAWS terms that are at most 1/kept apart, two-sided, is below 1e-11."""
    mechanism, shares = made(8, 2.0), np.array([0.4, 0.3, 0.2, 0.1])
    own = np.repeat(np.arange(4), (shares * statistical.NUM_DRAWS).astype(int))
    coordinates = as_coordinates(own, num_symbols=8, bound=mechanism.bound)
    sent = mechanism.randomize(coordinates, SystemEntropy())[:, 0].astype(np.int64)
    stays = kept(mechanism.event)
    indicators = unbiased_indicators(sent, used=4, num_symbols=8, kept=stays)
    for symbol in range(4):
        assert not statistical.mean_rejects(indicators[:, symbol] - (own == symbol))
        # The control: an estimate whose mean is off by a tenth.
        assert statistical.mean_rejects((1 + 0.1 / shares[symbol]) * indicators[:, symbol] - (own == symbol))
    prior = estimated_prior(sent, used=4, num_symbols=8, kept=stays)
    assert prior.sum() == pytest.approx(1)
    np.testing.assert_allclose(prior, shares, atol=0.02)


def test_no_symbol_is_taken_for_impossible() -> None:
    prior = estimated_prior(np.zeros(10, dtype=np.int64), used=4, num_symbols=4, kept=0.5)
    assert (prior > 0).all()
    assert prior.sum() == pytest.approx(1)


# --- a transcript of symbols and context rounds, enumerated ---


def transcript(bits: tuple[int, int], *, honest: bool) -> dict[object, Fraction]:
    """Two parties with one bit for one row. Both release it (odds 3 to 1); then each releases a noisy 'update' (odds 2
    to 1) of what it learns from: its own bit times the other's RELEASED bit, or, not honest, the other's bit itself."""

    def response(bit: int, odds: int) -> dict[int, Fraction]:
        return {bit: Fraction(odds, odds + 1), 1 - bit: Fraction(1, odds + 1)}

    found: dict[object, Fraction] = {}
    for sent, weight in together(response(bits[0], 3), response(bits[1], 3)).items():
        context = sent if honest else bits
        first, second = bits[0] & context[1], context[0] & bits[1]  # type: ignore[index]
        for updates, share in together(response(first, 2), response(second, 2)).items():
            found[sent, updates] = found.get((sent, updates), Fraction(0)) + weight * share
    return found


def test_a_context_round_costs_a_cell_one_update_because_context_is_what_was_released() -> None:
    """Pure costs multiply: 3 for the symbol, 2 for the changed party's own update, and nothing for the other's."""
    for kept_bit, one, other in product((0, 1), repeat=3):
        p, q = transcript((one, kept_bit), honest=True), transcript((other, kept_bit), honest=True)
        assert hockey_stick(p, q, Fraction(3 * 2)) == 0
    # The control: with the other's value itself as context, the other party's update moves too.
    p, q = transcript((0, 1), honest=False), transcript((1, 1), honest=False)
    assert hockey_stick(p, q, Fraction(3 * 2)) > 0
    assert hockey_stick(p, q, Fraction(3 * 2 * 2)) == 0


def test_a_continuation_may_be_chosen_by_what_was_released() -> None:
    """After a pure release of ratio 3 one branch is pure with ratio 2, the other has a delta and ratio 1: each is
    (2, delta) by itself, so the whole is (3 * 2, delta)."""
    delta = Fraction(1, 10)

    def world(bit: int) -> dict[object, Fraction]:
        found: dict[object, Fraction] = {}
        for sent, weight in ((bit, Fraction(3, 4)), (1 - bit, Fraction(1, 4))):
            if sent == 0:
                branch = {("pure", bit): Fraction(2, 3), ("pure", 1 - bit): Fraction(1, 3)}
            else:
                branch = {("told", bit): delta, ("silent", None): 1 - delta}
            for outcome, share in branch.items():
                found[sent, outcome] = weight * share
        return found

    for one, other in ((0, 1), (1, 0)):
        assert hockey_stick(world(one), world(other), Fraction(3 * 2)) <= delta
        assert hockey_stick(world(one), world(other), Fraction(3)) > 0


# --- bad input ---


@pytest.mark.parametrize("cuts", [(), ((),), ((1.0, 1.0),), ((2.0, 1.0),), ((math.nan,),), ((math.inf,),)], ids=str)
def test_cuts_that_do_not_rise_are_refused(cuts: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(PlanError, match=r"cuts"):
        Levels(cuts=cuts)


def test_numbers_out_of_range_are_named() -> None:
    with pytest.raises(PlanError, match=r"ranges\[0\]=\(1\.0, 0\.0\)"):
        Levels.equal_parts([(1.0, 0.0)], 2)
    with pytest.raises(PlanError, match="count=1"):
        Levels.equal_parts([(0.0, 1.0)], 1)
    with pytest.raises(PlanError, match="shown=3 must be at most 2"):
        shown_columns(num_rows=1, num_columns=2, shown=3, seed=0, party=0)
    with pytest.raises(PlanError, match="1000 symbols; permitted: 1 to 256"):
        to_symbols(np.zeros((1, 3), dtype=np.int64), [10, 10, 10])
    with pytest.raises(DataError, match="from 0 to size-1"):
        to_symbols(np.array([[2]]), [2])
    with pytest.raises(DataError, match="the 1 columns"):
        to_symbols(np.zeros((1, 2), dtype=np.int64), [2])
    with pytest.raises(DataError, match="the least is -1"):
        from_symbols(np.array([-1]), [2])
    with pytest.raises(DataError, match="do not have 1 columns"):
        Levels(cuts=((0.0,),)).of(np.zeros((1, 2)))
    with pytest.raises(PlanError, match="base=2 is below the 3 levels"):
        shown_symbols(np.zeros((1, 1)), Levels(cuts=((0.5, 1.5),)), np.array([[0]]), 2)
    with pytest.raises(DataError, match="from 0 to 3"):
        as_coordinates(np.array([4]), num_symbols=4, bound=1.0)
    with pytest.raises(PlanError, match="kept=0"):
        posterior(np.array([0]), np.array([0.5, 0.5]), num_symbols=2, kept=0.0)
    with pytest.raises(PlanError, match="used=3 must be at most 2"):
        unbiased_indicators(np.array([0]), used=3, num_symbols=2, kept=0.5)
    with pytest.raises(PlanError, match="epsilon=0"):
        kept_at(4, 0.0)
