"""A screen, what it says, and the training that follows, within one total: oracles share no code with the account."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from pbmvfl import Federation, Ledger, Limit, VerticalDataset
from pbmvfl.errors import BudgetExceeded, PlanError, RunFolderError
from pbmvfl.mechanisms.interactions.screen import Column, Selection
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.schedule import SYMBOLS
from pbmvfl.plan.search import Budget
from pbmvfl.privacy.units import SERVER, Accounting, Adversary, Unit
from pbmvfl.research.joint import (
    EXACT_LEVELS,
    NO_COLUMNS,
    Columns,
    JointResult,
    context_interactions,
    joint_privacy,
    pure_epsilon,
    read_screen,
    runs_together,
    screen_offer,
    screen_plan,
    train_jointly,
)

DELTA = 1e-5
BUDGET = Budget(epsilon=12.0, delta=DELTA, unit=Unit.CELL, accounting=Accounting.STRICT)


@cache
def table(*, product: float, rows: int = 4000) -> VerticalDataset:
    """Two parties of two columns in [-1, 1]; the label follows the product of the first two, and the sum of others."""
    random = np.random.default_rng(11)
    x = np.clip(random.normal(size=(2, rows + 2000, 2)) / 4, -1, 1).astype(np.float32)
    logit = 16 * product * x[0, :, 0] * x[1, :, 0] + 4 * (x[0, :, 1] + x[1, :, 1])
    labels = (random.random(rows + 2000) < 1 / (1 + np.exp(-logit))).astype(np.int64)
    return VerticalDataset(
        name="made",
        party_names=("one", "other"),
        train_features=tuple(np.ascontiguousarray(part[:rows]) for part in x),
        test_features=tuple(np.ascontiguousarray(part[rows:]) for part in x),
        train_labels=labels[:rows],
        test_labels=labels[rows:],
        class_names=("no", "yes"),
        default_encoder="linear",
    )


@cache
def trained(product: float, joint: str) -> JointResult:
    return train_jointly(table(product=product), epsilon=12, joint=joint, column_range=(-1, 1), num_epochs=10)


# --- the whole ---


def test_a_product_of_two_parties_columns_is_found_and_learned() -> None:
    """The product explains about a fifth of the label: the screen misses it, and accuracy differs by less than 5 points
    of about 15, with a probability far below 1e-9 (the statistic is some hundreds, the accuracies' deviation .01)."""
    local, together = trained(3.0, "off"), trained(3.0, "auto")
    assert together.selection.pairs == ((Column(0, 0), Column(1, 0)),)
    assert together.is_joint
    assert not local.is_joint
    assert together.metrics["test_accuracy"] > local.metrics["test_accuracy"] + 0.05
    assert "columns that act together (party.column): 0.0 x 1.0" in together.words[1]
    assert together.words[2] == EXACT_LEVELS
    assert together.screen is not None
    assert together.screen.metrics == {}


def test_without_a_product_training_is_local_with_what_is_left() -> None:
    """Labels are additive in log odds, and nearly in their means: a false alarm has a probability of about .01, so the
    screen's outcome is asked of the words alone; the account holds for either."""
    found = trained(0.0, "auto")
    assert found.words[1].startswith("no product" if not found.is_joint else "columns that act")
    assert found.privacy.epsilon <= 12
    kinds = [phase.kind.name for phase in found.training.plan.rounds.phases]
    assert ("symbols" in kinds) == found.is_joint


@pytest.mark.parametrize(("product", "joint"), [(3.0, "off"), (3.0, "auto"), (0.0, "auto")])
def test_the_total_is_within_what_was_asked_for_and_uses_nearly_all_of_it(product: float, joint: str) -> None:
    spent = trained(product, joint).privacy
    assert spent.composed.epsilon <= spent.epsilon + 1e-9
    assert 11.9 < spent.epsilon <= 12
    assert spent.screen_epsilon == (0 if joint == "off" else pytest.approx(6, abs=1e-6))
    assert spent.screen_epsilon <= 6
    assert f"epsilon {spent.epsilon:.4g} at delta 1e-05 for a cell" in str(spent)


def hockey_stick(epsilon: float, mu: float) -> float:
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


def test_the_composed_total_is_that_of_two_responses_and_a_gaussian() -> None:
    """Losses of both responses by their definitions, the Gaussian's divergence in closed form, and a root of the sum.

    Noise of the steps, the mean and the matrix make one Gaussian: squares of their shifts add up."""
    found = trained(3.0, "auto")
    assert found.screen is not None
    first, second = found.screen.plan, found.training.plan
    shifts = [2 / second.mean_noise, math.sqrt(2) / second.gram_noise] if second.mean_noise else []
    shifts += [2 / second.noise_multiplier] * second.num_epochs
    mu = math.sqrt(sum(shift**2 for shift in shifts))
    losses = [(0.0, 1.0)]
    for plan in (first, second):
        assert plan.interactions is not None
        k, epsilon = plan.interactions.num_symbols, plan.interactions.response_epsilon
        weight = math.ceil(2**32 / (math.exp(epsilon) + k - 1)) / 2**32
        own = 1 - (k - 1) * weight
        atoms = [(math.log(own / weight), own), (0.0, (k - 2) * weight), (-math.log(own / weight), weight)]
        losses = [(one + other, p * q) for one, p in losses for other, q in atoms]

    def delta(epsilon: float) -> float:
        return sum(probability * hockey_stick(epsilon - loss, mu) for loss, probability in losses)

    expected = brentq(lambda epsilon: delta(epsilon) - DELTA, 0.1, 40)
    assert found.privacy.composed.epsilon == pytest.approx(expected, rel=2e-3)
    assert found.privacy.composed.epsilon >= expected - 1e-6


def test_each_branch_is_within_what_the_screen_left() -> None:
    """What the choice by an outcome rests on: theory 2.20."""
    for product in (3.0, 0.0):
        found = trained(product, "auto")
        left = 12 - found.privacy.screen_epsilon
        assert found.privacy.training_epsilon <= left
        assert BUDGET.spent_by(found.training.plan) == pytest.approx(found.privacy.training_epsilon, rel=1e-9)


def test_a_record_s_screen_costs_every_honest_party_s_symbol() -> None:
    data = table(product=3.0)
    plan = screen_plan(data, Columns.of(data, (-1, 1)), shown=2, epsilon=1.5)
    assert pure_epsilon(plan, Unit.CELL, SERVER) == pytest.approx(1.5, abs=1e-6)
    assert pure_epsilon(plan, Unit.RECORD, SERVER) == pytest.approx(3.0, abs=1e-6)
    assert pure_epsilon(plan, Unit.RECORD, Adversary(colluding_parties=1)) == pytest.approx(1.5, abs=1e-6)
    assert pure_epsilon(plan, Unit.CELL, SERVER) <= 1.5


def test_the_same_book_is_charged_for_both_runs(tmp_path: Path) -> None:
    data = table(product=3.0)
    for party in range(2):
        book = Ledger(tmp_path / f"party-{party}.sqlite")
        book.set_limit("made", Limit.choose(unit="cell", accounting="strict", epsilon=40.0, delta=DELTA, order=4.0))
        book.close()
    found = train_jointly(
        data, epsilon=12, column_range=(-1, 1), ledger=tmp_path, exact_metrics=True, joint="on", num_epochs=3
    )
    for party in range(2):
        book = Ledger(tmp_path / f"party-{party}.sqlite", read_only=True)
        sessions = book.sessions("made")
        book.close()
        assert len(sessions) == 2
        assert sum(entry.row_releases for entry in sessions) == 4000 * (1 + found.is_joint)


def test_a_screen_that_an_owner_stops_trains_nothing(tmp_path: Path) -> None:
    Ledger(tmp_path / "party-0.sqlite").close()
    book = Ledger(tmp_path / "party-1.sqlite")
    book.set_limit("made", Limit.choose(unit="cell", accounting="strict", epsilon=2.0, delta=DELTA))
    book.close()
    with pytest.raises(BudgetExceeded, match=r"party='other'.* would end this run at round=\d+ .*Nothing was sent"):
        train_jointly(
            table(product=3.0), epsilon=12, column_range=(-1, 1), ledger=tmp_path, exact_metrics=True, num_epochs=3
        )


class Enough(Exception):
    pass


def test_an_interrupted_call_goes_on_and_a_screen_that_is_done_is_not_released_again(tmp_path: Path) -> None:
    data = table(product=3.0)

    def stop(line: Any) -> None:
        if line.epoch == 2:
            raise Enough

    heard: list[str] = []
    rounds: list[int] = []
    settings: dict[str, Any] = {"epsilon": 12, "column_range": (-1, 1), "num_epochs": 3, "folder": tmp_path}
    with pytest.raises(Enough):
        train_jointly(data, **settings, on_epoch=stop, say=heard.append)
    assert len(heard) == 3
    found = train_jointly(data, **settings, on_round=lambda done, *_: rounds.append(done))
    assert found.words == tuple(heard)
    # Symbols, mean, matrix and two steps were done before; on_round would have said 1 for a screen.
    assert rounds == [6]
    assert found.is_joint
    uses = {use.kind.name: (use.releases, use.updates) for use in found.training.row_uses}
    assert uses["symbols"] == (1, 0)
    assert found.privacy.screen_epsilon == pytest.approx(6, abs=1e-6)
    # What was charged ahead of the interruption counts, and the total says so.
    assert (found.privacy.epsilon > 12) == (uses["local"][1] > 3)
    with pytest.raises(RunFolderError, match="of a screen with another plan"):
        train_jointly(data, **{**settings, "epsilon": 11})


def test_a_screen_that_was_interrupted_and_released_again_counts_twice(tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise Enough

    settings: dict[str, Any] = {"epsilon": 12, "column_range": (-1, 1), "num_epochs": 3, "folder": tmp_path}
    with pytest.raises(Enough):
        train_jointly(table(product=3.0), **settings, on_round=stop)
    with pytest.raises(BudgetExceeded, match="released 2 times, which cost epsilon 12 of 12"):
        train_jointly(table(product=3.0), **settings)


# --- whether it is offered ---


def offered(counts: tuple[int, ...], rows: int, classes: int, epsilon: float, **columns: Any) -> bool:
    found = screen_offer(
        (rows, classes), Columns(counts=counts, **columns), epsilon=epsilon, unit=Unit.CELL, adversary=SERVER
    )
    assert ("so training is local" in found.words) == (not found.pays)
    return found.pays


def test_it_is_not_offered_where_it_cannot_pay() -> None:
    """Sizes of the two tables on which sums of parties that train alone are as good: 5 parties each."""
    for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0):
        assert not offered((6,) * 5, 8844, 2, epsilon, column_values=3)
        assert not offered((113, 112, 112, 112, 112), 7352, 6, epsilon, column_range=(-1, 1))
    assert offered((6,) * 4, 20_000, 2, 8.0, column_range=(-1, 1))
    assert not offered((6,) * 4, 20_000, 2, 2.0, column_range=(-1, 1))


def test_what_is_not_offered_is_said_and_trained_locally() -> None:
    data = table(product=3.0)
    silent = train_jointly(data, epsilon=12, num_epochs=2)
    assert silent.words == (NO_COLUMNS,)
    assert silent.offer is None
    small = train_jointly(data, epsilon=0.5, column_range=(-1, 1), num_epochs=2)
    assert small.offer is not None
    assert small.words == (small.offer.words,)
    for found in (silent, small):
        assert found.screen is None
        assert found.selection == Selection(pairs=())
        assert found.privacy.screen_epsilon == 0
    assert train_jointly(data, epsilon=12, joint="off", num_epochs=2).words == ()


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"joint": "maybe"}, "joint='maybe' is not one of auto, on, off"),
        ({"unit": "party"}, "use unit=cell or unit=record"),
        ({"column_range": (1, 1)}, "column_range=.1, 1. must be two finite numbers that rise"),
        ({"column_range": (0, math.inf)}, "two finite numbers that rise"),
        ({"epsilon": 0}, "epsilon=0 must be a finite number above 0"),
        ({"delta": 0}, "delta"),
        ({"prediction_epsilon": 4.0}, "context of rows that are predicted is not released"),
        ({"momentum": 2.0}, "momentum=2 must be in"),
        ({"labels": "server"}, "labels=server"),
    ],
)
def test_bad_choices_are_refused_before_anything_is_released(choices: dict[str, Any], words: str) -> None:
    usual: dict[str, Any] = {"epsilon": 12, "column_range": (-1, 1)}
    done: list[int] = []
    with pytest.raises(PlanError, match=words):
        train_jointly(table(product=3.0), **{**usual, **choices}, on_round=lambda number, *_: done.append(number))
    assert done == []


# --- plans and parts ---


def test_columns_of_few_values_have_a_level_for_each() -> None:
    """Values i/3 of 4: each is the middle of its level, as far from both ends."""
    columns = Columns(counts=(2, 2), column_values=4)
    shown = columns.shown(1, numeric_levels=8)
    np.testing.assert_allclose(shown.values_L, [0, 1 / 3, 2 / 3, 1], atol=1e-12)
    values = np.array([[0], [1 / 3], [2 / 3], [1]], dtype=np.float32)
    assert shown.cuts.of(values)[:, 0].tolist() == [0, 1, 2, 3]
    shared = context_interactions(Selection(pairs=((Column(0, 1), Column(1, 0)),)), columns, epsilon=2.5)
    assert [[each.levels for each in party] for party in shared.columns] == [[4], [4]]
    assert shared.num_symbols == 4


def test_a_screen_s_plan_releases_once_and_does_nothing_else() -> None:
    data = table(product=3.0)
    plan = screen_plan(data, Columns.of(data, (-1, 1)), shown=2, epsilon=3.0, seed=5)
    assert [kind.name for kind in plan.schedule.kinds] == ["symbols"]
    assert [event.name for event in plan.events(SYMBOLS)] == ["randomised-response"]
    assert plan.update_event(SYMBOLS) is None
    assert plan.published_at is None
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match="no screen"):
        read_screen(trained(3.0, "off").training.plan, np.zeros((2, 4000), dtype=np.int64), data.train_labels)


def test_runs_of_other_parties_have_no_common_account() -> None:
    data = table(product=3.0)
    one = screen_plan(data, Columns.of(data, (-1, 1)), shown=2, epsilon=3.0).training_run()
    other = Plan.of(num_parties=3, num_samples=10, num_classes=2).training_run()
    for runs in ([], [one, other]):
        with pytest.raises(PlanError, match="give runs of the same parties"):
            runs_together(runs)
    both = runs_together([one, one])
    assert [part.row_releases for part in both.activities] == [1, 1]
    plan = screen_plan(data, Columns.of(data, (-1, 1)), shown=2, epsilon=3.0)
    # Twice the same pure release: the screen's counts as pure, the last as a run of its own.
    assert joint_privacy([plan, plan], BUDGET).epsilon == pytest.approx(6, abs=1e-3)


@pytest.mark.parametrize("kept", [{}, {"folder": "run"}, {"ledger": "books"}])
def test_a_screen_is_read_by_the_drawn_labels_that_training_uses(
    kept: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its verdict reaches the parties: read by true labels, or by a second draw, it would tell more than is counted."""
    used: list[npt.NDArray[np.int64]] = []
    fit = Federation.fit

    def watched(self: Federation, *arguments: Any, **named: Any) -> Any:
        result = fit(self, *arguments, **named)
        assert self.labels is not None
        used.append(self.labels)
        return result

    def read(plan: Any, symbols: Any, labels: npt.NDArray[np.int64]) -> Any:
        used.append(labels)
        return read_screen(plan, symbols, labels)

    monkeypatch.setattr(Federation, "fit", watched)
    monkeypatch.setattr("pbmvfl.research.joint.read_screen", read)
    places = {name: tmp_path / place for name, place in kept.items()}
    data, shared = table(product=3.0), {"epsilon": 12, "joint": "on", "column_range": (-1, 1), "num_epochs": 1}
    train_jointly(data, **shared, **places, exact_metrics=True, label_epsilon=1.0)
    assert len(used) == 3
    assert all(np.array_equal(used[0], each) for each in used)
    assert not np.array_equal(used[0], data.train_labels)
