"""Neighbouring worlds of local training: what leaves a party is the same, whatever its columns are.

In local rounds nothing about a row leaves: every answer must be the same bytes in all worlds. Released fusion rows and
predictions have numbers in them, which noise covers; of those the header and the length must be the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import Split
from pbmvfl.protocol.server import Server
from pbmvfl.training.encoders import Bounded
from pbmvfl.training.fixed_point_grid import Grid
from pbmvfl.training.per_row_gradients import gram_sum
from pbmvfl.training.preparation import Whitening
from support.cohorts import small_data
from support.known_randomness import SeededEntropy, TwinSetup
from support.local_plans import WHITENED, local_plan, voting_plan

HEADER = 44
DATA = small_data(num_parties=2, num_samples=24, num_test_samples=5)
COLUMNS = DATA.train_features[0]
N, D = COLUMNS.shape
#: Answers of these kinds of rounds have released numbers in them.
FUSED, PREDICTED = 9, 2


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Account:
    """A guard that keeps what it was asked to charge."""

    def __init__(self) -> None:
        self.charged: list[tuple[int, str]] = []

    def charge(self, current: Any, events: Any) -> None:
        self.charged.append((current.number, str([event.to_dict() for event in events])))

    def close(self) -> None: ...


def leaves(
    plan: Plan, columns: np.ndarray, *, encoder: torch.nn.Module | None = None, test: np.ndarray | None = None
) -> tuple[list[Any], Any]:
    """All that leaves party 0 in a whole run, message by message, with what it was charged; and the party."""
    identities = [Identity.from_private_bytes(bytes([60 + index]) * 32) for index in range(2)]
    parties = []
    for index, identity in enumerate(identities):
        own = index == 0
        setup = TwinSetup(
            plan=plan,
            index=index,
            identity=identity.private_bytes(),
            identities=tuple(each.public for each in identities),
            train_features=columns if own else DATA.train_features[1],
            test_features=test if own and test is not None else DATA.test_features[index][:, : columns.shape[1]],
        )
        parties.append(setup.build(encoder if own else None))
    account = Account()
    parties[0].guard_with(account)
    server = Server(plan, train_labels=DATA.train_labels, run_id=b"run-0001")
    seen: list[Any] = []
    while (message := server.advance()) is not None:
        for index, party in enumerate(parties):
            answer = party.receive(message)
            if index == 0:
                numbers = len(answer) > 40 and answer[5] == 6 and answer[40] in (FUSED, PREDICTED)
                seen.append((answer[:HEADER], len(answer)) if numbers else answer)
            if answer:
                server.receive(answer, sender=index)
    return [*seen, account.charged], parties[0]


def neighbours() -> Iterator[tuple[str, np.ndarray]]:
    """Other columns: of one cell, and of the whole party, which no epsilon of a cell covers and no form may tell."""
    for value in (0.0, 1e-38, 1e-45, 1e9, -1e9):
        changed = COLUMNS.copy()
        changed[5, 1] = value
        yield f"one cell of {value:g}", changed
    yield "all zeros", np.zeros_like(COLUMNS)
    yield "constant columns", np.full_like(COLUMNS, 3.0)
    yield "huge", np.full_like(COLUMNS, 1e9)
    yield "huge, with both signs", (1e9 * np.where(np.arange(N * D).reshape(N, D) % 2, 1, -1)).astype(np.float32)
    yield "one row only", np.where(np.arange(N)[:, None] == 3, np.float32(1e9), np.float32(0))
    yield "a hair's breadth", np.full_like(COLUMNS, 1e-40)


PLANS = {
    "strict": voting_plan(DATA, num_epochs=2, batch_size=24),
    "small batches, momentum": voting_plan(
        DATA, num_epochs=5, batch_size=7, momentum=0.9, nesterov=True, averaging=0.5
    ),
    "steps that explode": voting_plan(DATA, num_epochs=10, batch_size=12, learning_rate=1e30, momentum=0.9),
    "adam": voting_plan(DATA, num_epochs=3, optimizer="adam", learning_rate=1e20),
    "squared": voting_plan(DATA, num_epochs=6, loss="squared", learning_rate=1e6, preparation="none"),
    "without noise": voting_plan(DATA, num_epochs=18, batch_size=24, noise_multiplier=0.0, learning_rate=1e20),
    "little noise, wide clip": voting_plan(DATA, num_epochs=2, mean_clip=1e6, gram_clip=1e6, ridge=1e-6),
    "much noise, narrow clip": voting_plan(DATA, num_epochs=2, mean_clip=1e-6, gram_clip=1e-6, gram_noise=1e4),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_leaves_in_local_training_is_the_same_whatever_the_columns_are(name):
    plan = PLANS[name]
    first, party = leaves(plan, COLUMNS)
    assert party.fault is None
    answers = [answer for answer in first[:-1] if isinstance(answer, bytes) and answer and answer[5] == 6]
    assert len(answers) == plan.schedule.num_rounds(plan.schedule.kinds[0]) * (
        2 if plan.preparation == "whiten" else 0
    ) + plan.num_epochs * -(-plan.num_network_samples // plan.batch_size)
    assert {len(answer) for answer in answers} == {HEADER}
    for what, columns in neighbours():
        other, party = leaves(plan, columns)
        assert other == first, what
        assert party.fault is None, what
        for split in Split:
            assert all(torch.isfinite(piece).all() for piece in party.rows.pieces(split)), (what, split)


class Guarded(torch.nn.Module):
    """A layer of somebody's own that fails on some values, and gives another shape on others."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return rows  # a row by itself, whose values cannot be asked for
        if (rows == 77).any():
            raise RuntimeError("cannot take 77")
        return rows[:, :1] if (rows == 78).any() else rows


@pytest.mark.parametrize("cells", [[(9, 77.0)], [(9, 78.0)], [(row, 77.0) for row in range(8, N)]])
@pytest.mark.parametrize("noise_multiplier", [0.0, 6.0])
def test_a_network_that_fails_is_answered_for(cells, noise_multiplier):
    """In local steps, of fusion rows and in predictions; the owner alone is told."""
    plan = voting_plan(DATA, preparation="none", noise_multiplier=noise_multiplier, num_epochs=2, batch_size=12)
    columns, test = COLUMNS.copy(), DATA.test_features[0].copy()
    for row, value in cells:
        columns[row, 1] = value
    test[2, 0] = 77.0
    found = []
    for train, predicted in ((COLUMNS, DATA.test_features[0]), (columns, test)):
        torch.manual_seed(3)
        network = torch.nn.Sequential(Guarded(), torch.nn.Linear(D, DATA.num_classes))
        found.append(leaves(plan, train, encoder=Bounded(network, activation="none"), test=predicted))
    assert found[0][0] == found[1][0]
    assert found[0][1].fault is None
    assert found[1][1].fault is not None


# --- statistics ---

ROWS = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 12), st.integers(1, 4)),
    elements=st.one_of(
        st.sampled_from([0.0, 1.0, -1.0, 1e9, -1e9, 1e-45]), st.floats(-1e9, 1e9, width=32, allow_nan=False)
    ),
)


class SeenWhitening(Whitening):
    """Its grids, and rows as they are before the matrix."""

    @property
    def grids(self) -> tuple[Grid, Grid]:
        return self._mean_grid, self._gram_grid

    def centred(self, rows_ND: torch.Tensor) -> torch.Tensor:
        return self._centred(rows_ND)


@settings(max_examples=60)
@given(rows=ROWS, clip=st.sampled_from([1e-6, 0.3, 1e6]), noise=st.sampled_from([1e-3, 5.0, 1e5]))
def test_whitening_never_raises_and_never_makes_what_is_no_number(rows, clip, noise):
    count, columns = rows.shape
    data = small_data(num_parties=2, num_samples=count, num_test_samples=1, columns=columns)
    plan = local_plan(
        data, preparation="whiten", mean_noise=noise, gram_noise=noise, mean_clip=clip, gram_clip=clip, ridge=1e-6
    )
    whitening = SeenWhitening(plan, columns)
    entropy = SeededEntropy(b"whiten")
    for statistic in ("mean", "gram"):
        whitening.learn(statistic, [torch.from_numpy(rows)], entropy)
        assert torch.isfinite(whitening(torch.from_numpy(rows))).all()
        assert all(torch.isfinite(value).all() for value in whitening.state().values())
    # No row is longer than its clip before the matrix, whatever it was.
    assert float(torch.linalg.vector_norm(whitening.centred(torch.from_numpy(rows)), dim=1).max()) <= (
        clip * math.sqrt(columns) * (1 + 1e-5)
    )


@settings(max_examples=200)
@given(
    rows=arrays.arrays(np.float32, (6, 3), elements=st.floats(-4, 4, width=32)),
    other=arrays.arrays(np.float32, (3,), elements=st.floats(-4, 4, width=32)),
)
def test_replacing_a_row_moves_the_gram_matrix_by_at_most_sqrt_2_clip_norms(rows, other):
    grid = Grid(noise_multiplier=2.0**28 / 20, clip_norm=1.0, num_weights=9, largest_batch=6, diameter=math.sqrt(2))
    changed = rows.copy()
    changed[2] = other
    first, second = (grid.rounded(gram_sum(each, grid)).ravel() for each in (rows, changed))
    assert math.dist(first.tolist(), second.tolist()) <= math.sqrt(2) * grid.clip_steps
    alone = gram_sum(other[None], grid)
    assert np.array_equal(alone, alone.T)
    assert float((alone**2).sum()) <= grid.row_norm**2


def test_products_of_rows_are_the_exact_sums_of_clipped_ones():
    random = np.random.default_rng(4)
    rows = (random.normal(size=(50, 5)) * random.choice([0.1, 1, 30], size=(50, 1))).astype(np.float32)
    grid = Grid(noise_multiplier=5.0, clip_norm=2.0, num_weights=25, largest_batch=50, diameter=math.sqrt(2))
    clipped = rows.astype(np.float64)
    squares = (clipped**2).sum(axis=1, keepdims=True)
    longest = grid.row_norm / grid.units
    assert 1.99 < longest < 2.0
    clipped = clipped * np.sqrt(np.minimum(1, longest / squares))
    np.testing.assert_allclose(gram_sum(rows, grid) / grid.units, clipped.T @ clipped, atol=1e-4)


def test_a_grid_for_opposite_rows_would_leave_too_little_for_the_rounding_of_a_gram_matrix():
    """Two rows whose products are R v v^T and R w w^T, and other rows that add up to where all entries round apart."""
    root = math.sqrt(2)
    v, w = np.ones(3) / math.sqrt(3), np.array([1, -1, 0]) / root
    found = {}
    for diameter in (2.0, root):
        grid = Grid(noise_multiplier=2.0**28 / 19.503, clip_norm=1.0, num_weights=9, largest_batch=8, diameter=diameter)
        unit = 2.0**grid.fine_bits
        longest = grid.row_norm / unit
        worst = 0.0
        for length in np.linspace(0.9 * longest, longest, 400):
            one, two = (length * np.outer(each, each).ravel() for each in (v, w))
            others = np.where(one > two, np.ceil(two) - two, np.ceil(one) - one) + 0.5 - 1e-6
            moved = grid.rounded((one + others) * unit) - grid.rounded((two + others) * unit)
            worst = max(worst, math.sqrt(float((moved**2).sum())))
        found[diameter] = worst / (root * grid.clip_steps)
    assert found[2.0] > 1.005
    assert found[root] <= 1


def test_the_grid_of_the_whitening_is_the_one_that_is_charged():
    plan = local_plan(DATA, **WHITENED)
    for grid, kind in zip(SeenWhitening(plan, D).grids, plan.schedule.kinds[:2], strict=True):
        event = plan.update_event(kind)
        assert grid.diameter == event.diameter  # type: ignore[union-attr]
        assert grid.noise_multiplier == event.noise_multiplier  # type: ignore[union-attr]
