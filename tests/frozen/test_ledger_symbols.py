"""Ledgers of versions whose plans had interactions: their sessions keep every charge, and their plans are refused.

Oracle: the Rényi divergences of randomised response and of Gaussian noise, in closed form.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from pbmvfl.errors import PlanError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.spending import spending
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import SYMBOLS
from pbmvfl.plan.schedule import Order, Phase
from support.ledger_books import opening

DATA = Path(__file__).parents[1] / "data"
SYMBOL_COUNT, SYMBOL_EPSILON, NOISE_MULTIPLIER, ORDER = 4, 2.0, 6.0, 4.0
ROWS = 23


def symbol_divergence() -> float:
    """Of two symbols' laws: the own one is sent e^epsilon times as often as each other one."""
    other = 1 / (math.exp(SYMBOL_EPSILON) + SYMBOL_COUNT - 1)
    own, a = math.exp(SYMBOL_EPSILON) * other, ORDER
    return math.log(own**a * other ** (1 - a) + other**a * own ** (1 - a) + (SYMBOL_COUNT - 2) * other) / (a - 1)


def update_divergence() -> float:
    """Of Gaussian noise that one row moves by twice its clip norm."""
    return ORDER * (2 / NOISE_MULTIPLIER) ** 2 / 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "books").mkdir()
    return shutil.copy(DATA / "ledger-symbols.sqlite", tmp_path / "books" / "old.sqlite")


def spent_by_row(path: Path, dataset: str) -> np.ndarray:
    with contextlib.closing(Ledger(path, read_only=True)) as book:
        (limit,) = book.limits(dataset)
        return np.array(spending(book, dataset, limit).rows)


def test_released_symbols_are_charged_as_they_were(path: Path) -> None:
    screened, trained = spent_by_row(path, "screened"), spent_by_row(path, "trained")
    once = symbol_divergence()
    np.testing.assert_allclose(screened[:10], 2 * once, rtol=1e-7)  # a run that was begun twice
    np.testing.assert_allclose(screened[10:ROWS], once, rtol=1e-7)
    np.testing.assert_allclose(trained[:ROWS], once + 3 * update_divergence(), rtol=1e-7)
    assert not screened[ROWS:].any()
    assert not trained[ROWS:].any()


def test_a_later_session_adds_what_it_costs_by_itself(path: Path, tmp_path: Path) -> None:
    sizes = {"num_parties": 2, "num_samples": ROWS, "num_test_samples": 7, "num_classes": 2}
    plan = Plan.of(**sizes, num_trials=1, beta=0.01, embedding_dim=1, num_epochs=1, noise_multiplier=9.0)
    before, new = spent_by_row(path, "trained"), tmp_path / "books" / "new.sqlite"
    with contextlib.closing(Ledger(path, read_only=True)) as old, contextlib.closing(Ledger(new)) as book:
        book.set_limit("trained", *old.limits("trained"))
    for book in (Ledger(path), Ledger(new)):
        opened = book.open_session(
            opening(
                dataset="trained", plan=plan, run="ab" * 8, session="cd" * 16, public_start=True, exact_metrics=True
            )
        )
        with contextlib.closing(opened):
            opened.charge(plan.schedule[0], plan.events(plan.schedule.kind(0)))
    alone = spent_by_row(new, "trained")
    assert (alone[:ROWS] > 0).all()
    np.testing.assert_allclose(spent_by_row(path, "trained"), before + alone, rtol=1e-12)


def test_their_plans_are_refused_with_what_to_do(path: Path) -> None:
    with contextlib.closing(Ledger(path, read_only=True)) as book:
        old = [entry.plan for dataset in ("screened", "trained") for entry in book.sessions(dataset)]
    assert len(old) == 3
    for values in old:
        with pytest.raises(PlanError, match=r"the plan has interactions.*make a plan with .*, and train again"):
            Plan.from_dict(values)


def test_no_plan_has_rounds_of_symbols() -> None:
    phases = (Phase(kind=SYMBOLS, passes=1, order=Order.AS_GIVEN),)
    with pytest.raises(PlanError, match="train again"):
        Plan.of(num_parties=2, num_samples=ROWS, num_classes=2, phases=phases)
