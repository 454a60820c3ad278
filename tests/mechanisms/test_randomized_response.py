"""Randomised response with k answers: its law in integers, its account against every outcome, and what it is used for.

Oracles enumerate outcomes in fractions (`enumerated`) and share no code with the mechanism or the account.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import permutations
from typing import Any

import mpmath
import numpy as np
import numpy.typing as npt
import pytest

from pbmvfl import Federation, Ledger, Limit, Plan
from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms import RandomisedSymbols
from pbmvfl.mechanisms.randomized_response import RandomisedResponse
from pbmvfl.privacy.composition import AtomLosses
from pbmvfl.privacy.loss_distribution import compose
from pbmvfl.privacy.units import SERVER, Adversary, Unit
from support import statistical
from support.enumerated import hockey_stick, renyi, summed, together

ONE = 2**32
DELTA = 1e-5


def law(symbols: int, weight: int, own: int) -> dict[Any, Fraction]:
    return {j: Fraction(ONE - (symbols - 1) * weight if j == own else weight, ONE) for j in range(symbols)}


def made(symbols: int, epsilon: float, *, parties: int = 3, dim: int = 1, bound: float = 1.0) -> RandomisedSymbols:
    return RandomisedSymbols(
        num_parties=parties, embedding_dim=dim, symbols=symbols, response_epsilon=epsilon, bound=bound
    )


def event(symbols: int, weight: int, *, parties: int = 3, dim: int = 1) -> RandomisedResponse:
    return RandomisedResponse(num_parties=parties, embedding_dim=dim, symbols=symbols, other_weight=weight)


class TheseWords:
    """Stands in for secret randomness."""

    seeded = True

    def __init__(self, words: list[int]) -> None:
        self._words = np.array(words, dtype=np.uint32)

    def fill(self, buffer: npt.NDArray[Any]) -> None:
        buffer[:] = self._words


# --- the law ---


@pytest.mark.parametrize("symbols", [2, 3, 5, 16, 255, 256])
@pytest.mark.parametrize("epsilon", [0.01, 1.0, 2.0, 7.3, 16.0])
def test_the_ratio_of_weights_is_the_largest_that_epsilon_allows(symbols: int, epsilon: float) -> None:
    weight = made(symbols, epsilon).event.other_weight
    with mpmath.workdps(40):
        top = mpmath.exp(mpmath.mpf(epsilon))
        assert mpmath.mpf(ONE - (symbols - 1) * weight) / weight <= top
        assert mpmath.mpf(ONE - (symbols - 1) * (weight - 1)) / (weight - 1) > top


@pytest.mark.parametrize(("symbols", "epsilon"), [(2, 1.0), (5, 2.0), (16, 8.0), (256, 0.01), (3, 16.0)])
def test_every_random_word_leads_to_the_symbol_that_the_law_says(symbols: int, epsilon: float) -> None:
    """What is sent changes only where a word passes a multiple of the weight: both ends of each stretch are tried."""
    mechanism = made(symbols, epsilon)
    weight = mechanism.event.other_weight
    starts = [i * weight for i in range(symbols)]
    ends = [*(start - 1 for start in starts[1:]), ONE - 1]
    assert starts[-1] <= ends[-1]
    for own in sorted({0, symbols // 2, symbols - 1}):
        centre = -1 + 2 * own / (symbols - 1)
        values = np.full(2 * symbols, centre, dtype=np.float32)
        sent = mechanism.randomize(values, TheseWords([*starts, *ends])).tolist()
        expected = [(own + 1 + i) % symbols for i in range(symbols - 1)] + [own]
        assert sent == expected * 2


@pytest.mark.parametrize("symbols", [2, 3, 8])
def test_a_coordinate_goes_to_the_nearest_centre(symbols: int) -> None:
    mechanism = made(symbols, 1.0, bound=2.0)
    values = np.linspace(-2.5, 2.5, 1001).astype(np.float32)
    centres = np.linspace(-2, 2, symbols)
    nearest = np.abs(np.clip(values, -2, 2)[:, None] - centres).min(axis=1)
    chosen = np.abs(np.clip(values, -2, 2) - centres[mechanism.bins(values)])
    assert np.all(chosen <= nearest + 1e-6)
    assert chosen.max() <= 2 / (symbols - 1) + 1e-6


@pytest.mark.parametrize(("symbols", "epsilon"), [(2, 2.0), (4, 2.0), (7, 1.0)])
def test_symbols_have_the_charged_law_and_another_epsilon_is_noticed(symbols: int, epsilon: float) -> None:
    def rejects(wrong: float) -> bool:
        drawn = made(symbols, wrong).randomize(np.full(statistical.NUM_DRAWS, -1, np.float32), SystemEntropy())
        expected = law(symbols, made(symbols, epsilon).event.other_weight, 0)
        observed = np.bincount(drawn, minlength=symbols)
        return statistical.chi_square_rejects(observed, list(expected.values())) or statistical.count_rejects(
            int(observed[0]), statistical.NUM_DRAWS, float(expected[0])
        )

    assert not rejects(epsilon)
    assert rejects(1.05 * epsilon)
    assert rejects(epsilon / 1.05)


def test_the_estimate_is_unbiased_for_every_centre_and_its_variance_is_the_formula() -> None:
    for symbols, epsilon in ((2, 1.0), (5, 2.0), (8, 0.3)):
        mechanism = made(symbols, epsilon, parties=2, bound=1.5)
        values = mechanism.estimate(np.arange(2 * symbols - 1)).astype(np.float64)
        largest = 0.0
        for first in range(symbols):
            for second in range(symbols):
                weight = mechanism.event.other_weight
                sums = summed(law(symbols, weight, first), law(symbols, weight, second))
                mean = sum(float(p) * values[int(str(total))] for total, p in sums.items())
                truth = 1.5 * (2 * (first + second) / (symbols - 1) - 2)
                assert mean == pytest.approx(truth, abs=1e-5)
                spread = sum(float(p) * (values[int(str(total))] - mean) ** 2 for total, p in sums.items())
                largest = max(largest, spread)
        assert largest == pytest.approx(mechanism.variance_upper_bound, rel=1e-5)


# --- the account, against every outcome ---


def row_deltas(made_event: RandomisedResponse, unit: Unit, adversary: Adversary, epsilons: list[float]) -> list[float]:
    losses = made_event.losses(unit, adversary)
    assert isinstance(losses, AtomLosses)
    composed = compose(losses.atoms, losses.copies, 1e-6)
    return [composed.delta(epsilon) for epsilon in epsilons]


@pytest.mark.parametrize(("symbols", "weight"), [(2, 2**30), (3, 2**28), (4, 3 * 10**8)])
@pytest.mark.parametrize("colluding", [0, 1, 2])
def test_no_outcome_of_a_cell_or_a_record_is_above_the_account_and_the_worst_attains_it(
    symbols: int, weight: int, colluding: int
) -> None:
    """Everybody's symbols are seen; inputs of the honest parties are all there are, colluders' are known."""
    adversary = Adversary(colluding_parties=colluding)
    charged = event(symbols, weight)
    pure = math.log((ONE - (symbols - 1) * weight) / weight)
    epsilons = [-1.0, 0.0, *(share * pure for share in (0.1, 0.5, 0.9, 0.999, 1.3, 1.9, 2.5, 2.999))]
    honest = 3 - colluding
    for unit, changed in ((Unit.CELL, 1), (Unit.RECORD, honest), (Unit.PARTY, 1)):
        allowed = row_deltas(charged, unit, adversary, epsilons)
        attained = [0.0] * len(epsilons)
        for before, after in permutations(range(symbols), 2):
            for also in range(changed + 1):  # how many of the changed parties move the other way
                first = [before] * (changed - also) + [after] * also
                second = [after] * (changed - also) + [before] * also
                p = together(*(law(symbols, weight, own) for own in first))
                q = together(*(law(symbols, weight, own) for own in second))
                for i, epsilon in enumerate(epsilons):
                    delta = float(hockey_stick(p, q, Fraction(math.exp(epsilon))))
                    assert delta <= allowed[i] + 1e-12
                    attained[i] = max(attained[i], delta)
        # The grid of the composition and the tails that are given away cost this much.
        assert allowed == pytest.approx(attained, abs=2e-5)


def test_the_sum_alone_says_less_than_the_symbols() -> None:
    """What a server behind masks sees is computed from the symbols."""
    symbols, weight = 4, 3 * 10**8
    epsilons = [0.0, 0.3, 0.8, 1.2]
    allowed = row_deltas(event(symbols, weight), Unit.CELL, SERVER, epsilons)
    for others in ((0, 0), (0, 3), (2, 3)):
        for before, after in permutations(range(symbols), 2):
            p, q = (summed(*(law(symbols, weight, own) for own in (changed, *others))) for changed in (before, after))
            for epsilon, top in zip(epsilons, allowed, strict=True):
                assert float(hockey_stick(p, q, Fraction(math.exp(epsilon)))) <= top


@pytest.mark.parametrize(("symbols", "weight"), [(2, 2**30), (5, 10**7), (16, 2**32 // 17), (3, 483)])
def test_its_renyi_curve_is_the_definition_s(symbols: int, weight: int) -> None:
    orders = (1.01, 1.5, 2.0, 7.5, 64.0, 2048.0)
    charged = event(symbols, weight, parties=4, dim=3)
    for unit, adversary, copies in (
        (Unit.CELL, SERVER, 3),
        (Unit.PARTY, Adversary(colluding_parties=3), 3),
        (Unit.RECORD, SERVER, 12),
        (Unit.RECORD, Adversary(colluding_parties=3), 3),
    ):
        for order, value in zip(orders, charged.rdp(unit, adversary, orders), strict=True):
            truth = copies * renyi(law(symbols, weight, 0), law(symbols, weight, 1), order)
            assert truth <= value <= truth * (1 + mpmath.mpf("3e-9"))


def epsilon_of_symbols(symbols: int, weight: int, count: int, delta: float) -> float:
    """The least epsilon of so many symbols that all change, by the definition: only how many are the one and how many
    are the other counts."""
    own, other = (mpmath.mpf(each) / ONE for each in (ONE - (symbols - 1) * weight, weight))

    def delta_at(epsilon: mpmath.mpf) -> mpmath.mpf:
        terms = []
        for ones in range(count + 1):
            for twos in range(count + 1 - ones):
                rest = count - ones - twos
                ways = math.comb(count, ones) * math.comb(count - ones, twos) * (symbols - 2) ** rest
                p, q = own**ones * other ** (twos + rest), own**twos * other ** (ones + rest)
                terms.append(ways * max(p - mpmath.exp(epsilon) * q, 0))
        return mpmath.fsum(terms)

    low, high = mpmath.mpf(0), count * mpmath.log(own / other)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if delta_at(middle) <= delta else (middle, high)
    return float(high)


@pytest.mark.parametrize(
    ("symbols", "epsilon", "epochs", "dim"), [(2, 0.5, 5, 2), (8, 2.0, 1, 1), (4, 1.0, 3, 2), (16, 6.0, 1, 2)]
)
def test_a_plan_s_epsilon_is_that_of_its_symbols(symbols: int, epsilon: float, epochs: int, dim: int) -> None:
    plan = Plan.of(
        num_parties=3,
        num_samples=100,
        num_classes=2,
        mechanism="krr",
        symbols=symbols,
        response_epsilon=epsilon,
        num_epochs=epochs,
        embedding_dim=dim,
    )
    assert isinstance(plan.release, RandomisedSymbols)
    table = plan.privacy(delta=DELTA)
    for unit, count in (("cell", epochs * dim), ("record", 3 * epochs * dim)):
        truth = epsilon_of_symbols(symbols, plan.release.event.other_weight, count, DELTA)
        assert truth * (1 - 1e-12) <= table.epsilon(unit, "paper") <= truth * (1 + 2e-4)
    assert table.epsilon("cell", "paper") <= epsilon * epochs * dim * (1 + 1e-4)


def test_an_event_that_makes_no_sense_has_no_price() -> None:
    for symbols, weight in ((1, 5), (2, 0), (2, 2**31 + 1), (4, -3)):
        with pytest.raises(PlanError, match=r"symbols="):
            event(symbols, weight).rdp(Unit.CELL)
        with pytest.raises(PlanError, match=r"symbols="):
            event(symbols, weight).losses(Unit.CELL)
    with pytest.raises(PlanError, match=r"colluding_parties=3"):
        event(2, 5).rdp(Unit.CELL, Adversary(colluding_parties=3))


def test_its_numbers_are_checked_and_named() -> None:
    sizes: dict[str, Any] = {"num_parties": 3, "num_samples": 100, "num_classes": 2, "mechanism": "krr"}
    for bad in (0, 1, 257, 2.5, True, None, "4"):
        with pytest.raises(PlanError, match=r"symbols="):
            Plan.of(**sizes, symbols=bad)
    for worse in (0, 0.009, 16.1, -1, math.nan, math.inf, "2"):
        with pytest.raises(PlanError, match=r"response_epsilon="):
            Plan.of(**sizes, response_epsilon=worse)


# --- what travels, and what it is used for ---


@pytest.mark.parametrize(("symbols", "bits"), [(2, 1), (3, 2), (4, 2), (5, 3), (16, 4), (17, 5), (256, 8)])
def test_a_symbol_takes_the_bits_of_its_name(symbols: int, bits: int) -> None:
    assert made(symbols, 1.0).payload.num_bytes(1000) == 125 * bits


def test_a_federation_learns_with_it_and_its_books_have_its_price(data: Any, make_plan: Any, tmp_path: Any) -> None:
    plan = make_plan(data, mechanism="krr", symbols=9, response_epsilon=6.0, embedding_dim=8, num_epochs=40)
    limit = Limit.choose(unit="cell", accounting="paper", epsilon=1e6, delta=DELTA, order=3.0)
    for party in range(3):
        book = Ledger(tmp_path / f"party-{party}.sqlite")
        book.set_limit("small", limit)
        book.close()
    result = Federation(plan).fit(data, ledger=tmp_path, exact_metrics=True)
    assert result.metrics["train_accuracy"] > 0.8  # guessing one of the three classes: 0.33
    assert result.traffic == plan.traffic()
    weight = plan.release.event.other_weight
    a = mpmath.mpf(3)
    spent = 40 * 8 * renyi(law(9, weight, 0), law(9, weight, 1), 3.0)
    expected = float(spent + mpmath.log(1 - 1 / a) - mpmath.log(DELTA * a) / (a - 1))
    for party in range(3):
        book = Ledger(tmp_path / f"party-{party}.sqlite", read_only=True)
        (kept,) = book.export()["datasets"]["small"]["limits"]
        (entry,) = book.sessions("small")
        book.close()
        assert kept["spent_epsilon"] == pytest.approx(expected, rel=1e-7)
        assert entry.terms.words == "randomised response k=9, epsilon=6 a symbol P=8 M=3"


def test_predictions_may_be_released_by_it_beside_another_mechanism(data: Any, make_plan: Any, tmp_path: Any) -> None:
    plan = make_plan(
        data,
        num_trials=16,
        evaluation="released",
        prediction_mechanism="krr",
        prediction_symbols=5,
        prediction_response_epsilon=4.0,
    )
    assert plan == Plan.from_json(plan.to_json()) == Plan.of(**plan.flat())
    assert (plan.mechanism, plan.prediction.name) == ("pbm", "krr")
    assert plan.secure_aggregation
    assert not plan.prediction.secure_aggregation
    result = Federation(plan).fit(data, ledger=tmp_path, exact_metrics=True)
    assert result.traffic == plan.traffic()
    assert 0 <= result.metrics["test_accuracy"] <= 1
    # A test row is released once, by the other mechanism; its training rows cost what they cost without predictions.
    alone = make_plan(data, num_trials=16)
    assert plan.training_run().releases == (alone.release.event, plan.prediction.event)
    assert plan.privacy().epsilon("cell", "paper") == max(
        alone.privacy().epsilon("cell", "paper"), epsilon_row(plan.prediction.event)
    )


def epsilon_row(released: RandomisedResponse) -> float:
    """Of one row released once, at the account's delta."""
    from pbmvfl.privacy.accounting import Activity, TrainingRun, epsilon_bound
    from pbmvfl.privacy.units import Accounting

    once = Activity(split="test", release=released, update=None, row_releases=1, row_updates=0, total_releases=1)
    run = TrainingRun(activities=(once,), num_parties=3)
    return epsilon_bound(run, Unit.CELL, Accounting.PAPER, delta=DELTA).epsilon


def test_a_ledger_knows_its_event_without_having_seen_a_plan(run_process: Any, tmp_path: Any) -> None:
    program = (
        "import pbmvfl.ledger.session_terms, pbmvfl.privacy.events as e; print(e.EVENTS['randomised-response'].name)"
    )
    assert run_process(cwd=tmp_path, program=program).stdout == "randomised-response\n"
