"""The exact law of everything that a tiny run publishes, for neighbouring inputs, against the account.

The program itself is run, once for every outcome of its noise. Its sampler is replaced by a rounded normal law of
standard deviation 4 instead of 2^28, whose probabilities are those of the normal law; so the grid is coarse, and a few
thousand outcomes are all there are. What lies further out than 5 standard deviations is left out, and its probability
is added to delta.

One party has three rows of one column, and one weight: class scores are (w x, -w x). Two rows train in two local steps,
the third is a fusion row; the votes on the fusion row and on a test row, by randomised response, are published. Of
each row the cell is +10 or -10. In the strongest view the adversary sees the noisy sums too, and with them all weights,
as the proof has it. A row that trains moves the sums alone, and a fusion row its own symbol alone.

Controls show that the test could fail: a signal twice as strong as the plan says, a row that is not clipped, noise
that is used again, a row twice in its batch, a fusion row that trains. Each of them lies above the account; and each is
caught or refused by the program where it can be.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.crypto.rounded_normal import rounded_normal
from pbmvfl.errors import WrongPlan
from pbmvfl.federation.federation import Federation
from pbmvfl.mechanisms import RandomisedSymbols
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import FUSION, LOCAL, Split
from pbmvfl.plan.schedule import Round
from pbmvfl.privacy.accounting import TrainingRun, epsilon_bound
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.protocol.party import Party
from pbmvfl.protocol.party_rows import check_rows_once
from pbmvfl.training.encoders import Bounded, weights_digest
from pbmvfl.training.fixed_point_grid import Grid
from support.cohorts import Cohort, small_data
from support.known_randomness import SeededEntropy, known_federation
from support.local_plans import local_plan

SIGMA = 4
VALUES = range(-20, 20)
OUTSIDE = 2 * float(norm.cdf(-5))  # of one draw
LABELS = torch.tensor([0, 1])
DELTAS = (0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4)
RESPONSE = 1.0


@lru_cache(maxsize=1024)
def probability(value: int) -> float:
    """P(floor(X) = v), X normal with standard deviation 4; from the side where it keeps its digits."""
    far, near = sorted((abs(value), abs(value + 1)), reverse=True)
    return float(norm.sf(near / SIGMA) - norm.sf(far / SIGMA))


def one_weight() -> Bounded:
    """Scores (w x, -w x): the second layer stays as it is."""
    learns, stays = nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)
    nn.init.zeros_(learns.weight)
    stays.weight = nn.Parameter(torch.tensor([[1.0], [-1.0]]), requires_grad=False)
    return Bounded(nn.Sequential(learns, stays), activation="none")


def tiny_plan(**choices: Any) -> Plan:
    data = small_data(num_parties=2, num_samples=3, num_test_samples=1, num_classes=2, columns=1)
    usual = {
        "batch_size": 2,
        "num_epochs": 2,
        "noise_multiplier": 1.0,
        "clip_norm": 0.1,
        "learning_rate": 1e-3,
        "evaluation": "released",
        "vote": "top",
        "num_fusion_samples": 1,
        "prediction_mechanism": "krr",
        "prediction_symbols": 2,
        "prediction_response_epsilon": RESPONSE,
        "prediction_secure_aggregation": False,
        "first_weights": (weights_digest(one_weight()),) * 2,
    }
    return local_plan(data, **{**usual, **choices})


class Chosen:
    """The sampler's place: the next values of its list, one for each draw."""

    def __init__(self) -> None:
        self.values: list[int] = []

    def __call__(self, _: Any, count: int) -> np.ndarray:
        return np.array([self.values.pop(0) if self.values else 0 for _ in range(count)], dtype=np.int64)


CHOSEN = Chosen()


@pytest.fixture
def noise(monkeypatch) -> Chosen:
    chosen = CHOSEN
    monkeypatch.setattr("pbmvfl.training.fixed_point_grid.rounded_normal", chosen)
    monkeypatch.setattr("pbmvfl.training.fixed_point_grid.SIGMA", SIGMA)
    return chosen


class World:
    """The party whose cell of the first row that trains is this number, and all that a run of it can publish."""

    def __init__(
        self, plan: Plan, cell: float, noise: Chosen, *, fusion_cell: float = 10.0, test_cell: float = 10.0
    ) -> None:
        #: The rows that train, then the fusion row.
        self.rows = [row for kind in (LOCAL, FUSION) for row in plan.schedule.part_of(kind).tolist()]
        cells = dict(zip(self.rows, (cell, 10.0, fusion_cell), strict=True))
        identities = [Identity.from_private_bytes(bytes([9 + index]) * 32) for index in range(2)]
        self.plan, self.noise = plan, noise
        self.party = Party(
            plan,
            index=0,
            train_features=np.array([[cells[row]] for row in range(3)], dtype=np.float32),
            test_features=np.array([[test_cell]], dtype=np.float32),
            encoder=one_weight(),
            identity=identities[0],
            identities=[identity.public for identity in identities],
        )
        self.party.network.hold(LABELS)
        self.grid: Grid = self.party.network.update._grid  # type: ignore[attr-defined]
        self.steps = [current for current in plan.schedule if current.kind == LOCAL]
        self.same_noise = False

    def step(self, current: Round, noise: int) -> int:
        """One local step with this noise: the noisy sum that it published, in steps of the grid."""
        seen: list[int] = []
        released = Grid.released

        def spy(grid: Grid, total: np.ndarray, entropy: Any) -> np.ndarray:
            found = released(grid, total, entropy)
            seen.append(int(found[0]))
            return found

        self.noise.values = [noise]
        Grid.released = spy  # type: ignore[method-assign]
        try:
            self.party.network.local_step(current, SystemEntropy())
        finally:
            Grid.released = released  # type: ignore[method-assign]
        assert len(seen) == 1
        return seen[0]

    def votes(self) -> tuple[int, ...]:
        """Of both rows that train, of the fusion row and of the test row, with the weights as they are."""
        rows = self.party.rows
        both = [rows.batch(Split.TRAIN, np.array(self.rows)), rows.batch(Split.TEST, np.array([0]))]
        scores = self.party.network.update.embed(torch.cat(both), for_training=False)
        return tuple(self.plan.vote.symbol(scores).tolist())

    # --- the law of both steps' noisy sums, and the votes that follow from them ---

    def open(self) -> None:
        """Once, before anything is asked; the schedule may have been broken by then."""
        self.start = self.party.network.update.state()
        self.first = self.step(self.steps[0], 0)  # with noise 0 the sum itself
        self._after: dict[int, tuple[dict[str, torch.Tensor], int]] = {}
        self._votes: dict[tuple[int, int], tuple[int, ...]] = {}

    def after(self, one: int) -> tuple[dict[str, torch.Tensor], int]:
        """The weights after a first noisy sum, and the second sum that they lead to."""
        if one not in self._after:
            self.party.network.update.load_state(self.start)
            assert self.step(self.steps[0], one - self.first) == one
            state = self.party.network.update.state()
            self._after[one] = (state, self.step(self.steps[1], 0))
        return self._after[one]

    def mass(self, sums: tuple[int, int]) -> float:
        first, second = sums[0] - self.first, sums[1] - self.after(sums[0])[1]
        if self.same_noise:
            return probability(first) * (first == second)
        return probability(first) * probability(second)

    def votes_at(self, sums: tuple[int, int]) -> tuple[int, ...]:
        """The program's, after these two sums."""
        if sums not in self._votes:
            state, second = self.after(sums[0])
            self.party.network.update.load_state(state)
            assert self.step(self.steps[1], sums[1] - second) == sums[1]
            self._votes[sums] = self.votes()
            assert self.party.fault is None
        return self._votes[sums]

    def outcomes(self) -> Iterator[tuple[int, int]]:
        """All but what is further out than five standard deviations."""
        for one in VALUES:
            before = self.first + one
            second = self.after(before)[1]
            for two in (one,) if self.same_noise else VALUES:
                yield before, second + two


def worlds_of(plan: Plan, *cells: float, **choices: float) -> tuple[World, ...]:
    made = tuple(World(plan, cell, CHOSEN, **choices) for cell in cells)
    for world in made:
        world.open()
    return made


@lru_cache(maxsize=2)
def usual_worlds() -> tuple[World, ...]:
    """Used by several tests, which look at them and change nothing."""
    return worlds_of(tiny_plan(), 10.0, -10.0)


def hockey_stick(first: World, second: World, epsilon: float, *, symbol_of: int | None = None) -> float:
    """Of everything published: both sums, and if asked for the vote of one of the rows by randomised response.

    Votes of other rows are computed from the weights: they are the same in both worlds once the sums are, and add
    nothing.
    """
    ratio, total = math.exp(epsilon), 0.0
    kept = math.exp(RESPONSE) / (1 + math.exp(RESPONSE))
    for sums in first.outcomes():
        mass, other = first.mass(sums), second.mass(sums)
        votes = (0, 0) if symbol_of is None else (first.votes_at(sums)[symbol_of], second.votes_at(sums)[symbol_of])
        for p, q in ((1.0, 1.0),) if votes[0] == votes[1] else ((kept, 1 - kept), (1 - kept, kept)):
            total += max(0.0, mass * p - ratio * other * q)
    return total


#: Of two sums: what is left out of the enumeration.
LEFT_OUT = 2 * OUTSIDE


def exceeds(plan: Plan | TrainingRun, first: World, second: World, **view: int) -> list[float]:
    """The deltas at which what is published lies above the account's (epsilon, delta), in either direction."""
    run = plan.training_run().of_split("train") if isinstance(plan, Plan) else plan
    return [
        delta
        for delta in DELTAS
        for ours, theirs in ((first, second), (second, first))
        if hockey_stick(ours, theirs, epsilon_bound(run, Unit.CELL, Accounting.STRICT, delta=delta).epsilon, **view)
        > delta + LEFT_OUT
    ]


# --- the program ---


@pytest.mark.usefixtures("noise")
def test_everything_published_about_a_training_cell_lies_below_the_account():
    plan = tiny_plan()
    worlds = usual_worlds()
    for world in worlds:
        assert sum(map(world.mass, world.outcomes())) == pytest.approx((1 - OUTSIDE) ** 2, abs=1e-12)
    assert exceeds(plan, *worlds) == []
    for sums in itertools.islice(worlds[0].outcomes(), 0, None, 7):  # other rows' votes follow from the sums
        assert worlds[0].votes_at(sums)[1:] == worlds[1].votes_at(sums)[1:]
    # and not by far: at most half of the account's epsilon would be too little
    for delta in (0.1, 0.01):
        epsilon = epsilon_bound(
            plan.training_run().of_split("train"), Unit.CELL, Accounting.STRICT, delta=delta
        ).epsilon
        assert hockey_stick(*worlds, 0.5 * epsilon) > delta


@pytest.mark.usefixtures("noise")
@pytest.mark.parametrize("cells", [(1e9, 0.0), (0.004, -0.004)])
def test_whatever_the_two_cells_are(cells):
    plan = tiny_plan()
    worlds = worlds_of(plan, *cells)
    assert exceeds(plan, *worlds) == []


@pytest.mark.usefixtures("noise")
def test_rows_in_batches_of_their_own():
    """The cell is in one of two steps; the account has one use of it."""
    plan = tiny_plan(batch_size=1, num_epochs=1)
    worlds = worlds_of(plan, 10.0, -10.0)
    assert exceeds(plan, *worlds) == []


@pytest.mark.usefixtures("noise")
def test_what_really_leaves_says_less():
    """Without the sums: the symbols of the fusion row and of the test row, over all weights that lead to them."""
    plan = tiny_plan()
    kept = math.exp(RESPONSE) / (1 + math.exp(RESPONSE))
    worlds: list[dict[tuple[int, int], float]] = []
    for world in usual_worlds():
        seen = dict.fromkeys(itertools.product((0, 1), repeat=2), 0.0)
        for sums in world.outcomes():
            votes, mass = world.votes_at(sums)[2:], world.mass(sums)
            for sent in seen:
                seen[sent] += mass * math.prod(kept if a == b else 1 - kept for a, b in zip(votes, sent, strict=True))
        worlds.append(seen)
    for delta in (0.1, 0.01):
        run = plan.training_run().of_split("train")
        epsilon = epsilon_bound(run, Unit.CELL, Accounting.STRICT, delta=delta).epsilon
        for ours, theirs in (worlds, worlds[::-1]):
            assert sum(max(0.0, ours[sent] - math.exp(epsilon) * theirs[sent]) for sent in ours) <= delta + LEFT_OUT
    assert sum(worlds[0].values()) == pytest.approx(1, abs=1e-5)


@pytest.mark.usefixtures("noise")
def test_a_record_at_both_parties_lies_below_twice_as_many_uses():
    """Sums of both parties together; their noise is independent, so the law is the product."""
    plan = tiny_plan()
    worlds = usual_worlds()
    ours, theirs = (np.array([world.mass(sums) for sums in worlds[0].outcomes()]) for world in worlds)
    steps_only = replace(
        plan.training_run(),
        activities=tuple(part for part in plan.training_run().activities if part.row_updates == 2),
    )
    for delta in (0.3, 0.1, 0.01):
        epsilon = epsilon_bound(steps_only, Unit.RECORD, Accounting.STRICT, delta=delta).epsilon
        both = np.maximum(0, np.outer(ours, ours) - math.exp(epsilon) * np.outer(theirs, theirs)).sum()
        assert both <= delta + LEFT_OUT
        cell = epsilon_bound(steps_only, Unit.CELL, Accounting.STRICT, delta=delta).epsilon
        assert np.maximum(0, np.outer(ours, ours) - math.exp(cell) * np.outer(theirs, theirs)).sum() > delta


# --- splits ---


@pytest.mark.usefixtures("noise")
def test_a_row_that_trains_and_is_predicted_pays_for_both():
    plan = tiny_plan()
    worlds = usual_worlds()
    run = plan.training_run()
    together = run.of_one_row()
    assert exceeds(together, *worlds, symbol_of=0) == []
    # What the two parts add: a pure epsilon of the response on top of the rest.
    apart = epsilon_bound(run.of_split("train"), Unit.CELL, Accounting.STRICT, delta=1e-3).epsilon
    assert apart < epsilon_bound(together, Unit.CELL, Accounting.STRICT, delta=1e-3).epsilon < apart + RESPONSE + 1e-6
    # If nothing else were published, charging the splits apart would be too little for such a row.
    kept = math.exp(RESPONSE) / (1 + math.exp(RESPONSE))
    assert kept - math.exp(0.5) * (1 - kept) > 0.2


@pytest.mark.usefixtures("noise")
def test_a_predicted_row_pays_for_its_symbol_alone():
    """Weights have the same law whatever the test row is, so two test rows differ by one randomised response."""
    plan = tiny_plan()
    first, second = (worlds_of(plan, 10.0, test_cell=cell)[0] for cell in (10.0, -10.0))
    mechanism = plan.prediction
    assert isinstance(mechanism, RandomisedSymbols)
    other = mechanism.event.other_weight / 2**32
    epsilon = epsilon_bound(plan.training_run().of_split("test"), Unit.CELL, Accounting.STRICT, delta=1e-5).epsilon
    assert math.log((1 - other) / other) <= epsilon + 1e-4
    seen, differ = 0.0, 0
    for sums in first.outcomes():
        assert first.mass(sums) == second.mass(sums)
        if sum(sums) % 5 == 0 and first.votes_at(sums)[3] != second.votes_at(sums)[3]:
            differ += 1
            seen += max(0.0, (1 - other) - math.exp(epsilon) * other)
    assert differ > 200
    assert seen / differ <= 1e-5


# --- parts: fusion rows, and rows that train ---


def of_part(plan: Plan, part: str) -> TrainingRun:
    """What a row of one part of the training rows is charged for."""
    run = plan.training_run()
    return replace(run, activities=tuple(each for each in run.activities if each.part == part))


@pytest.mark.usefixtures("noise")
def test_a_fusion_cell_moves_its_own_symbol_alone():
    """Sums have the same law, exactly, and so have all weights; what is left is one randomised response."""
    plan = tiny_plan()
    worlds = [worlds_of(plan, 10.0, fusion_cell=cell)[0] for cell in (10.0, -10.0)]
    assert list(worlds[0].outcomes()) == list(worlds[1].outcomes())
    assert all(worlds[0].mass(sums) == worlds[1].mass(sums) for sums in worlds[0].outcomes())
    assert exceeds(of_part(plan, "fusion"), *worlds, symbol_of=2) == []
    # A share of the response's epsilon would be too little: the symbol does differ.
    assert hockey_stick(*worlds, 0.5 * RESPONSE, symbol_of=2) > 0.1


@pytest.mark.usefixtures("noise")
def test_a_cell_that_trains_moves_the_charged_sums_alone():
    plan = tiny_plan()
    assert exceeds(of_part(plan, "network"), *usual_worlds()) == []
    # Its own vote is not published, and would cost more than that.
    with_vote = hockey_stick(*usual_worlds(), 1.0, symbol_of=0)
    assert with_vote > hockey_stick(*usual_worlds(), 1.0) + 0.01


def test_the_account_is_the_larger_part_and_not_their_sum():
    plan = tiny_plan()
    for delta in DELTAS:
        parts = [
            epsilon_bound(of_part(plan, part), Unit.CELL, Accounting.STRICT, delta=delta).epsilon
            for part in ("network", "fusion")
        ]
        whole = epsilon_bound(plan.training_run().of_split("train"), Unit.CELL, Accounting.STRICT, delta=delta).epsilon
        assert whole == max(parts)
        assert min(parts) > 0


@pytest.mark.usefixtures("noise")
def test_control_a_fusion_row_that_trains():
    """In the place of a row of the second step: far above the account of its part."""
    plan = tiny_plan(noise_multiplier=0.7)
    worlds = []
    for cell in (10.0, -10.0):
        world = World(plan, 10.0, CHOSEN, fusion_cell=cell)
        world.party.network.labels[world.rows[2]] = 0
        world.steps[1] = Round(world.steps[1].number, LOCAL, np.array([world.rows[1], world.rows[2]]))
        world.open()
        worlds.append(world)
    assert len(exceeds(of_part(plan, "fusion"), *worlds, symbol_of=2)) >= 6


# --- controls: what is broken lies above the account ---


def broken(plan: Plan, breakage: Callable[[World], None] = lambda _: None) -> list[float]:
    made = [World(plan, cell, CHOSEN) for cell in (10.0, -10.0)]
    for world in made:
        breakage(world)
        world.open()
    return exceeds(plan, *made)


@pytest.mark.usefixtures("noise")
def test_control_a_doubled_signal(monkeypatch):
    row_norm = Grid.row_norm.func  # type: ignore[attr-defined]
    monkeypatch.setattr(Grid, "row_norm", property(lambda grid: 2 * row_norm(grid)))
    assert len(broken(tiny_plan())) >= 6


@pytest.mark.usefixtures("noise")
def test_control_a_row_that_is_not_clipped(monkeypatch):
    monkeypatch.setattr(Grid, "target", property(lambda _: math.inf))
    monkeypatch.setattr(Grid, "largest_square", property(lambda _: math.inf))
    assert set(broken(tiny_plan())) == set(DELTAS)


@pytest.mark.usefixtures("noise")
def test_control_noise_that_is_used_again():
    """Row 1 is known, and its step has the same noise: the sum of row 0 is read exactly."""
    plan = tiny_plan(batch_size=1, num_epochs=1)

    def again(world: World) -> None:
        world.same_noise = True

    assert broken(plan) == []  # by itself it is not
    assert set(broken(plan, again)) == set(DELTAS)


@pytest.mark.usefixtures("noise")
def test_control_a_row_twice_in_its_batch():
    def twice(world: World) -> None:
        world.steps = [Round(each.number, each.kind, np.array([0, 0])) for each in world.steps]

    assert len(broken(tiny_plan(), twice)) >= 6


# --- and the program catches them where it can ---


def test_a_batch_with_a_row_twice_is_refused():
    with pytest.raises(WrongPlan, match="more than once"):
        check_rows_once(Round(3, LOCAL, np.array([4, 1, 4])))
    data = small_data(num_parties=2, num_samples=2, num_test_samples=1, num_classes=2, columns=1)
    for statistics in (False, True):
        choices = {"preparation": "whiten", "mean_noise": 5.0, "gram_noise": 5.0} if statistics else {}
        cohort = Cohort(local_plan(data, noise_multiplier=5.0, **choices), data)
        schedule = cohort.plan.schedule
        schedule.__dict__["_last"] = Round(0, schedule.kind(0), np.array([1, 1]))
        with pytest.raises(WrongPlan, match="more than once"):
            cohort.run()
        del schedule.__dict__["_last"]


def test_no_two_draws_are_alike_and_every_party_draws_its_own():
    """A stream that began again would give the same 64 numbers: by chance that happens less than once in 2^1000."""
    drawn = [rounded_normal(entropy, 64).tobytes() for entropy in (SystemEntropy(), SystemEntropy())]
    one = SystemEntropy()
    drawn += [rounded_normal(one, 64).tobytes() for _ in range(8)]
    assert len(set(drawn)) == len(drawn)
    with pytest.raises(TypeError, match="cannot be copied"):
        one.__reduce__()
    seeded = [rounded_normal(SeededEntropy(b"again"), 64).tobytes() for _ in range(2)]
    assert seeded[0] == seeded[1]  # which is what this test would notice


def test_a_party_s_steps_have_noise_of_their_own():
    """What two steps add beyond their clipped sums, in a run of the program with its real sampler and its real door:
    different in every step, at every party, and in every run."""
    data = small_data(num_parties=2, num_samples=12, num_test_samples=1)
    plan = local_plan(data, noise_multiplier=5.0, batch_size=12, num_epochs=3)
    drawn: list[bytes] = []
    released = Grid.released

    def spy(grid: Grid, total: np.ndarray, entropy: Any) -> np.ndarray:
        assert not entropy.seeded
        found = released(grid, total, entropy)
        drawn.append((found - grid.rounded(total)).tobytes())
        return found

    Grid.released = spy  # type: ignore[method-assign]
    try:
        for _ in range(2):
            Federation(plan).fit(data)
    finally:
        Grid.released = released  # type: ignore[method-assign]
    assert len(drawn) == 2 * 2 * 3
    assert len(set(drawn)) == len(drawn)


def test_noise_that_somebody_knows_has_no_epsilon():
    data = small_data(num_parties=2, num_samples=12, num_test_samples=1)
    plan = local_plan(data, noise_multiplier=5.0)
    cohort = Cohort(plan, data)
    assert all(party.noise_is_seeded for party in cohort.parties)
    result = known_federation(plan).fit(data)
    assert result.noise_is_seeded
    assert result.privacy().epsilon("cell", "strict") == math.inf


def test_the_account_of_the_tiny_run_is_the_gaussian_s():
    """The numbers against which transcripts were held, once more by hand: two steps are one Gaussian."""
    plan = tiny_plan()
    run = of_part(plan, "network")
    assert [part.row_updates for part in run.activities] == [2]
    shift = math.sqrt(2 * 2.0**2)
    for delta in DELTAS:
        epsilon = epsilon_bound(run, Unit.CELL, Accounting.STRICT, delta=delta).epsilon
        exact = norm.cdf(shift / 2 - epsilon / shift) - math.exp(epsilon) * norm.cdf(-shift / 2 - epsilon / shift)
        assert exact == pytest.approx(delta, rel=1e-3)
    assert {part.update for part in run.activities} == {plan.update_event(LOCAL)}
