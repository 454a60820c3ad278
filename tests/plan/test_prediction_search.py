"""Plans of predictions: always within their budget, close to it, and of the kind that the rules say."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pbmvfl.errors import PlanError
from pbmvfl.mechanisms import PolyaLaplace, RandomisedSymbols
from pbmvfl.mechanisms.votes import VoteKind
from pbmvfl.plan.prediction_search import PredictionChoice, fusion_rows, plan_prediction
from pbmvfl.privacy.composition import epsilon_by_losses
from pbmvfl.privacy.units import Adversary, Unit

USUAL: dict[str, Any] = {"delta": 1e-5, "num_parties": 5, "num_classes": 2, "num_rows": 8000}


def planned(epsilon: float, **other: Any) -> PredictionChoice:
    return plan_prediction(epsilon=epsilon, **{**USUAL, **other})


def pure_epsilon(choice: PredictionChoice, unit: Unit, adversary: Adversary) -> float:
    """From the numbers of the mechanism alone, by the formulas of docs/explanation/theory.md, 2.14 and 2.15."""
    honest = choice.mechanism.num_parties - adversary.colluding_parties
    cells = honest if unit is Unit.RECORD else 1
    if isinstance(choice.mechanism, RandomisedSymbols):
        weight = choice.mechanism.event.other_weight
        return cells * math.log((2**32 - (choice.mechanism.symbols - 1) * weight) / weight)
    assert isinstance(choice.mechanism, PolyaLaplace)
    assert choice.mechanism.shares <= honest
    coordinates = 1 if choice.mechanism.bounded_total else choice.mechanism.embedding_dim
    return coordinates * 2 * choice.mechanism.levels * cells / choice.mechanism.scale


def account(choice: PredictionChoice, unit: Unit, adversary: Adversary) -> float:
    """What a ledger of one release says."""
    losses = choice.mechanism.event.losses(unit, adversary)
    return epsilon_by_losses([(1, losses)], 1e-5, 1e4)


CASES = [
    (epsilon, unit, Adversary(colluding_parties=colluding), parties, classes)
    for epsilon in (0.5, 2.0, 8.0)
    for unit in (Unit.CELL, Unit.RECORD)
    for parties, colluding in ((5, 0), (5, 2), (30, 0))
    for classes in (2, 6)
]


@pytest.mark.parametrize(("epsilon", "unit", "adversary", "parties", "classes"), CASES, ids=str)
def test_a_plan_uses_its_budget_and_no_more(
    epsilon: float, unit: Unit, adversary: Adversary, parties: int, classes: int
) -> None:
    choice = planned(epsilon, unit=unit, adversary=adversary, num_parties=parties, num_classes=classes)
    # Of a pure mechanism delta gives away next to nothing.
    assert 0.99 * epsilon <= pure_epsilon(choice, unit, adversary) <= epsilon * (1 + 1e-9)
    assert account(choice, unit, adversary) <= epsilon
    assert choice.mechanism.num_parties == parties
    assert choice.mechanism.embedding_dim == choice.vote.width(classes)
    assert choice.mechanism.bound == choice.vote.bound
    choice.vote.check_classes(classes)
    if isinstance(choice.mechanism, RandomisedSymbols):
        assert choice.vote.symbols(classes) == choice.mechanism.symbols
    assert f"epsilon {epsilon:g} for a {unit}" in choice.words


@pytest.mark.parametrize(
    ("epsilon", "classes", "rows", "name", "kind", "symbols"),
    [
        (8, 2, 8844, "krr", VoteKind.BINS, 16),
        (4, 2, 8844, "krr", VoteKind.BINS, 4),
        (2, 2, 8844, "laplace", VoteKind.MARGIN, None),
        (0.5, 2, 8844, "laplace", VoteKind.MARGIN, None),
        (8, 6, 7352, "krr", VoteKind.RANKS, 60),
        (4, 6, 7352, "krr", VoteKind.TOP, 6),
        (2, 6, 7352, "laplace", VoteKind.BALLOT, None),
        (1, 6, 7352, "laplace", VoteKind.BALLOT, None),
        (8, 10, 1437, "krr", VoteKind.RANKS, 90),
        (8, 3, 20000, "krr", VoteKind.RANKS, 18),
        (20, 2, 8844, "krr", VoteKind.BINS, 16),
    ],
)
def test_the_rules_choose(
    epsilon: float, classes: int, rows: int, name: str, kind: VoteKind, symbols: int | None
) -> None:
    choice = planned(epsilon, num_classes=classes, num_rows=rows)
    assert (choice.mechanism.name, choice.vote.kind) == (name, kind)
    assert choice.vote.symbols(classes) == symbols


def test_many_parties_are_for_sums_and_no_trust_is_for_symbols() -> None:
    assert planned(8, num_parties=5).mechanism.name == "krr"
    assert planned(8, num_parties=500).mechanism.name == "laplace"
    assert planned(8, unit="record").mechanism.name == "laplace"
    for epsilon in (0.5, 2.0, 8.0):
        assert planned(epsilon, secure_sum=False).mechanism.name == "krr"
        assert planned(epsilon, secure_sum=False, num_classes=7).mechanism.name == "krr"


def test_against_colluders_the_others_noise_is_enough() -> None:
    choice = planned(1.0, adversary=Adversary(colluding_parties=2))
    assert isinstance(choice.mechanism, PolyaLaplace)
    assert choice.mechanism.shares == 3
    assert choice.mechanism.event.losses(Unit.CELL, Adversary(colluding_parties=2)) is not None


def test_more_budget_is_never_noisier() -> None:
    sums = [planned(each).mechanism.variance_upper_bound for each in (0.25, 0.5, 1.0, 2.0)]
    assert sums == sorted(sums, reverse=True)
    symbols = [planned(each, num_classes=6).mechanism for each in (6.0, 8.0, 10.0)]
    assert all(isinstance(each, RandomisedSymbols) for each in symbols)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"epsilon": 0.0}, "prediction_epsilon=0 must be above 0"),
    ({"epsilon": -1.0}, "prediction_epsilon=-1 must be above 0"),
    ({"epsilon": math.nan}, "prediction_epsilon=nan must be a finite number"),
    ({"epsilon": 1e-5, "secure_sum": False}, r"prediction_epsilon=1e-05 for unit=cell .* must be at least 0.01"),
    ({"epsilon": 1e-5}, r"prediction_epsilon=1e-05 .* must be at least 0.000122"),
    ({"delta": 0.0}, "delta=0"),
    ({"delta": 1.0}, "delta=1"),
    ({"unit": "row"}, "unit='row' is not one of"),
    ({"num_classes": 1}, "num_classes=1"),
    ({"num_rows": 0}, "num_rows=0"),
    ({"adversary": Adversary(colluding_parties=5)}, "colluding_parties=5"),
    ({"num_classes": 300, "secure_sum": False}, "num_classes=300"),
]


@pytest.mark.parametrize(("numbers", "words"), BAD, ids=str)
def test_bad_numbers_are_named(numbers: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan_prediction(**{**USUAL, "epsilon": 1.0, **numbers})


@pytest.mark.parametrize(
    ("rows", "classes", "epsilon", "fused"),
    [
        (4999, 2, 8.0, 0),  # symbols of two classes are scores already
        (5000, 2, 8.0, 1000),
        (5000, 2, 3.0, 1000),
        (200, 2, 3.0, 40),  # noisy sums need a model, however few rows there are
        (199, 2, 3.0, 0),
        (1000, 10, 8.0, 200),
        (999, 10, 8.0, 0),
    ],
)
def test_a_fifth_of_enough_rows_are_fusion_rows(rows: int, classes: int, epsilon: float, fused: int) -> None:
    assert fusion_rows(rows, classes, epsilon) == fused
