"""Noisy updates: per-row gradients, clipping, how far one row moves a sum, and whole runs with them."""

from __future__ import annotations

import copy
import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.errors import EncoderError, PlanError, WrongPlan
from pbmvfl.federation.federation import Federation, Parties
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.spending import spending
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import JOINT
from pbmvfl.plan.schedule import Round
from pbmvfl.privacy.accounting import rdp_curve
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.protocol.party_rows import check_rows_once
from pbmvfl.research.simulation.engine import check_plan
from pbmvfl.training.dense import dense_leaves
from pbmvfl.training.encoders import Bounded, build_encoder
from pbmvfl.training.fixed_point_grid import CHUNK, Grid, add_products, product_rounding
from pbmvfl.training.noisy import Noisy
from pbmvfl.training.per_row_gradients import AnyRows, DenseRows, add_clipped, outer_sums, rows_of, weights_of
from pbmvfl.training.updates import update_for
from support import statistical
from support.federation_runs import Killed, fitted, killer, own_networks, weights
from support.known_randomness import SeededEntropy, known_federation


class Gated(nn.Module):
    """A network of somebody's own: two ways through, a weight without a layer, one dense layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 5)
        self.again = nn.Linear(5, 5, bias=False)
        self.gate = nn.Parameter(torch.linspace(-1, 1, 5))
        self.out = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.into(x))
        return self.out(torch.tanh(self.again(torch.tanh(self.again(hidden)))) * self.gate + hidden)


def network(name: str) -> tuple[Bounded, torch.Tensor]:
    """A network and a batch for it."""
    torch.manual_seed(4)
    rows = torch.randn(7, 4)
    match name:
        case "mlp":
            inner: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 3)))
        case "no bias":
            inner = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))
        case "frozen":
            inner = nn.Sequential(nn.Linear(4, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 3))
        case "conv":
            inner = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.GroupNorm(1, 3), nn.Flatten())
            inner.append(nn.Linear(27, 3))
            rows = torch.randn(7, 1, 3, 3)
        case "sequence":
            inner = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3))
            rows = torch.randn(7, 2, 2)
        case _:
            inner = Gated()
    return Bounded(inner, bound=1.5), rows


STRICT_CELL = (Unit.CELL, Accounting.STRICT)
NETWORKS = ("mlp", "no bias", "frozen", "conv", "sequence", "own")


def grid_for(encoder: nn.Module, *, clip: float = 1e3, sigma: float = 1e-3, batch: int = 16) -> Grid:
    return Grid(noise_multiplier=sigma, clip_norm=clip, num_weights=weights_of(encoder), largest_batch=batch)


def looped(encoder: Bounded, rows: torch.Tensor, slopes: torch.Tensor, clip: float = math.inf) -> torch.Tensor:
    """One row after another through autograd, in float64, clipped by the definition."""
    twin = copy.deepcopy(encoder).double()
    parameters = [each for each in twin.parameters() if each.requires_grad]
    found = []
    for row, slope in zip(rows.double(), slopes.double(), strict=True):
        gradient = torch.autograd.grad(twin(row[None])[0], parameters, slope)
        flat = torch.cat([part.flatten() for part in gradient])
        found.append(flat * min(1.0, clip / float(flat.norm())))
    return torch.stack(found)


# --- per-row gradients ---


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("clip", [1e3, 0.3])
def test_the_clipped_sum_is_that_of_a_loop_over_the_rows(name, clip):
    encoder, rows = network(name)
    grid = grid_for(encoder, clip=clip)
    slopes = torch.randn(len(rows), 3)
    expected = looped(encoder, rows, slopes, clip)
    for way in (rows_of(encoder, grid), AnyRows(encoder, grid)):
        embedding = way.forward(rows)
        assert torch.allclose(embedding, encoder(rows))
        found = torch.from_numpy(way.clipped_sum(slopes)) / grid.units
        assert (found - expected.sum(0)).abs().max() < max(1e-5, 1e-7 * clip)


@pytest.mark.parametrize("name", NETWORKS)
def test_dense_layers_take_the_way_without_per_row_gradients(name):
    encoder, _ = network(name)
    expected = DenseRows if name in ("mlp", "no bias", "frozen", "sequence") else AnyRows
    assert type(rows_of(encoder, grid_for(encoder))) is expected


def test_a_layer_that_is_used_twice_takes_the_general_way():
    layer = nn.Linear(4, 4)
    encoder = Bounded(nn.Sequential(layer, nn.Tanh(), layer))
    assert type(rows_of(encoder, grid_for(encoder))) is AnyRows
    tied = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    assert type(rows_of(Bounded(tied), grid_for(encoder))) is AnyRows


class Sign(nn.Module):
    """Nothing in it learns, and nobody knows for which values it fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sign(x)


def test_dense_layers_with_a_layer_of_one_s_own_between_them_take_the_general_way():
    """If it failed on a row, others would be added up in other chunks, and rounded otherwise."""
    encoder = Bounded(nn.Sequential(nn.Linear(4, 4), Sign(), nn.Linear(4, 4)))
    assert type(rows_of(encoder, grid_for(encoder))) is AnyRows


def test_rows_in_chunks_are_the_rows_at_once(monkeypatch):
    encoder, rows = network("conv")
    slopes = torch.randn(len(rows), 3)
    sums = []
    for chunk in (1 << 24, 2 * weights_of(encoder), 1):
        monkeypatch.setattr("pbmvfl.training.per_row_gradients._CHUNK", chunk)
        way = AnyRows(encoder, grid_for(encoder, clip=0.5))
        way.forward(rows)
        sums.append(way.clipped_sum(slopes) / grid_for(encoder, clip=0.5).units)
    assert np.abs(sums[0] - sums[1]).max() < 1e-6
    assert np.abs(sums[0] - sums[2]).max() < 1e-6


# --- clipping, in integers ---

ODD = (0.0, -0.0, 1e-45, -1e-38, 1e-20, 1.0, -3.5, 1e9, 1e30, -3.4e38, math.inf, -math.inf, math.nan)


def odd_values(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Each row ordinary, huge, tiny, or with something in it that is no number."""
    values = random.normal(size=shape) * 10.0 ** random.integers(-44, 38, size=(shape[0], 1))
    if random.random() < 0.5:
        values = random.normal(size=shape)
    for _ in range(int(random.integers(0, 4))):
        values[int(random.integers(shape[0])), int(random.integers(shape[1]))] = random.choice(ODD)
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def clipped_rows(gradients: torch.Tensor, grid: Grid) -> torch.Tensor:
    """What each row adds to a sum."""
    found = np.zeros(gradients.shape)
    for row, total in zip(gradients.numpy(), found, strict=True):
        add_clipped(row[None], grid, total)
    return torch.from_numpy(found)


def layers(random: np.random.Generator, rows: int) -> tuple[list[np.ndarray], list[np.ndarray], list[bool]]:
    sizes = [tuple(int(each) for each in random.integers(1, 9, 2)) for _ in range(int(random.integers(1, 4)))]
    ins = [odd_values(random, (rows, i)) for i, _ in sizes]
    outs = [odd_values(random, (rows, o)) for _, o in sizes]
    return ins, outs, [bool(random.integers(2)) for _ in sizes]


def dense_grid(ins, outs, biased, sigma: float = 2.0, clip: float = 1.0, batch: int = 1000) -> Grid:
    count = sum(o.shape[1] * (i.shape[1] + b) for i, o, b in zip(ins, outs, biased, strict=True))
    return Grid(noise_multiplier=sigma, clip_norm=clip, num_weights=count, largest_batch=batch)


def flat(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([part.ravel() for part in parts])


def squared(values: np.ndarray) -> int:
    """In Python's own integers."""
    assert np.isfinite(values).all()
    assert (values == np.rint(values)).all()
    return sum(int(value) ** 2 for value in values)


def limit(grid: Grid) -> Fraction:
    """(C - sqrt(d)/2)^2 in fine units, from the definition; the root is rounded down."""
    root = Fraction(math.isqrt(grid.num_weights * 4**60) + 1, 2**60)
    steps = Fraction(2**28) / Fraction(grid.noise_multiplier) - root / 2
    return (steps * Fraction(2) ** grid.fine_bits) ** 2


@given(st.integers(0, 2**32 - 1), st.sampled_from((0.01, 1.0, 7.3, 400.0)), st.sampled_from((1e-3, 1.0, 50.0)))
@settings(max_examples=60)
def test_no_row_is_longer_than_the_grid_allows_whatever_it_holds(seed, sigma, clip):
    random = np.random.default_rng(seed)
    ins, outs, biased = layers(random, rows=5)
    grid = dense_grid(ins, outs, biased, sigma=sigma, clip=clip)
    for row in range(5):
        alone = slice(row, row + 1)
        sums = flat(outer_sums([each[alone] for each in ins], [each[alone] for each in outs], biased, grid))
        assert squared(sums) <= limit(grid)
    gradients = torch.from_numpy(odd_values(random, (5, grid.num_weights)))
    general = clipped_rows(gradients, grid).numpy()
    for values in general:
        assert squared(values) <= limit(grid)
    together = np.zeros(grid.num_weights)
    add_clipped(gradients.numpy(), grid, together)
    assert (together == general.sum(axis=0)).all()


def exactly(value: np.floating) -> Fraction:
    return Fraction(*float(value).as_integer_ratio())


def chunk_misses(random: np.random.Generator, rows: int, share: float) -> list[bool]:
    """Whether float32's sum of a chunk is off by more than `share` of the sum of magnitudes, entry by entry."""
    ins, outs = (random.normal(size=(rows, size)) * 10.0 ** random.integers(-2, 3, (rows, 1)) for size in (4, 3))
    ins, outs = ins.astype(np.float32), (outs * 2.0**30).astype(np.float32)
    left, right, product = (np.empty(shape, dtype=np.float32) for shape in ((CHUNK, 3), (CHUNK, 4), (3, 4)))
    total = np.zeros((3, 5))
    add_products(ins, outs, np.ones(rows), True, left, right, product, total)
    columns = [[exactly(value) for value in column] for column in (*ins.T, np.ones(rows, dtype=np.float32))]
    misses = []
    for o in range(3):
        gradients = [exactly(value) for value in outs[:, o]]
        for i, column in enumerate(columns):
            terms = [g * a for g, a in zip(gradients, column, strict=True)]
            room = Fraction(share) * sum(abs(term) for term in terms) + Fraction(1, 2)
            misses.append(abs(int(total[o, i]) - sum(terms)) > room)
    return misses


@given(st.integers(0, 2**32 - 1), st.sampled_from((1, 2, 17, CHUNK)))
@settings(max_examples=25, deadline=None)
def test_a_chunk_is_summed_within_the_error_that_is_left_room_for(seed, rows):
    """In fractions. The control: a bound ten thousand times smaller does not hold."""
    random = np.random.default_rng(seed)
    # Written out again: n products added up in float32, in any order, are off by n u / (1 - n u) of their magnitudes.
    error = Fraction(rows, 2**24) / (1 - Fraction(rows, 2**24))
    assert error <= Fraction(product_rounding(rows)) * (1 + Fraction(1, 2**50))
    assert not any(chunk_misses(random, rows, float(error)))
    if rows == CHUNK:
        assert any(chunk_misses(random, rows, float(error) / 10_000))


@pytest.mark.parametrize("batch", [1, 5, CHUNK, 1000])
@pytest.mark.parametrize("sigma", [1e-3, 1.0, 12.5, 3000.0])
def test_rows_rounding_and_a_chunk_s_error_fill_the_clip_norm_and_no_more(batch, sigma):
    grid = Grid(noise_multiplier=sigma, clip_norm=0.7, num_weights=12_000, largest_batch=batch)
    terms = min(batch, CHUNK)
    error = terms * Fraction(terms, 2**24) / (1 - Fraction(terms, 2**24))
    root = Fraction(math.isqrt(12_000 * 4**60) + 1, 2**60)
    fine = Fraction(2) ** grid.fine_bits
    row = Fraction(grid.row_norm) * (1 - Fraction(1, 2**20))  # what rows are scaled to
    twice = 2 * row * (1 + error) + root + root * fine  # two rows, a chunk's error twice, fine units, steps
    whole = 2 * Fraction(2**28) / Fraction(sigma) * fine
    assert whole * Fraction(99, 100) < twice + root * fine * 10
    assert twice <= whole
    assert error < Fraction(1, 100)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_chunks_are_added_up_exactly_and_each_is_the_sum_of_its_rows(seed):
    random = np.random.default_rng(seed)
    rows = int(random.integers(CHUNK + 1, 3 * CHUNK))
    ins, outs, biased = layers(random, rows=rows)
    grid = dense_grid(ins, outs, biased)

    def sums(chunk: slice) -> list[int]:
        found = flat(outer_sums([each[chunk] for each in ins], [each[chunk] for each in outs], biased, grid))
        return [int(value) for value in found]

    chunks = [sums(slice(start, start + CHUNK)) for start in range(0, rows, CHUNK)]
    assert sums(slice(None)) == [sum(each) for each in zip(*chunks, strict=True)]
    alone = [sums(slice(row, row + 1)) for row in range(CHUNK)]
    off = [whole - sum(each) for whole, each in zip(chunks[0], zip(*alone, strict=True), strict=True)]
    # A row alone is one rounded product and one rounding to fine units away from what it is.
    room = grid.row_norm * (grid.product_error + CHUNK * 2.0**-24) + (CHUNK + 1) * math.sqrt(grid.num_weights) / 2
    assert math.sqrt(sum(each**2 for each in off)) <= room


def test_what_is_kept_for_sums_does_not_grow_with_the_batch():
    encoder = Bounded(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    way = DenseRows(encoder, dense_leaves(encoder), grid_for(encoder, batch=10_000))
    kept = []
    for rows in (CHUNK, 5, 10_000):
        way.forward(torch.randn(rows, 4))
        way.clipped_sum(torch.randn(rows, 3))
        kept.append(sum(each.nbytes for each in way._memory.values()))
    assert kept[0] == kept[1] == kept[2] < 8 * 1000 + 4 * CHUNK * (4 + 6 + 6 + 3) + 4 * 100


def test_factors_that_float32_could_not_hold_count_for_nothing():
    random = np.random.default_rng(5)
    ins, outs = [random.normal(size=(3, 5)).astype(np.float32)], [random.normal(size=(3, 4)).astype(np.float32)]
    grid = dense_grid(ins, outs, [False])
    without = flat(outer_sums([ins[0][1:]], [outs[0][1:]], [False], grid))
    for size_in, size_out, counts in ((1e9, 1.0, True), (1e-9, 1e9, True), (1e30, 1.0, False), (1e-30, 1e30, False)):
        spoiled = [ins[0].copy()], [outs[0].copy()]
        spoiled[0][0][0] *= np.float32(size_in)
        spoiled[1][0][0] *= np.float32(size_out)
        assert (flat(outer_sums(*spoiled, [False], grid)) != without).any() == counts


@pytest.mark.parametrize("batch", [1, 2, 1000, 65_536, 1 << 20])
@pytest.mark.parametrize("sigma", [1e-4, 0.3, 1.0, 12.5, 3000.0])
def test_sums_of_a_whole_batch_stay_where_float64_is_exact(batch, sigma):
    grid = Grid(noise_multiplier=sigma, clip_norm=0.7, num_weights=100, largest_batch=batch)
    assert batch * grid.row_norm < 2**53
    assert batch * grid.clip_steps < 2**62
    # One step of the grid and the noise stand for what the event says.
    assert grid.step * 2**28 == pytest.approx(sigma * 0.7, rel=1e-15)
    assert grid.clip_steps * grid.step == pytest.approx(0.7, rel=1e-15)


def test_long_rows_are_scaled_to_the_clip_norm_and_short_ones_are_left():
    random = np.random.default_rng(2)
    ins, outs = [random.normal(size=(40, 30)).astype(np.float32)], [random.normal(size=(40, 20)).astype(np.float32)]
    grid = dense_grid(ins, outs, [True], sigma=4.0, clip=10.0)
    for row in range(40):
        a, g = (each[row].astype(np.float64) for each in (ins[0], outs[0]))
        exact = np.outer(g, np.append(a, 1.0))
        norm = float(np.linalg.norm(exact))
        alone = [ins[0][row : row + 1]], [outs[0][row : row + 1]]
        found = outer_sums(*alone, [True], grid)[0] / grid.units
        # A thousandth of the clip norm is left for what float32 may do to a chunk.
        assert np.linalg.norm(found - exact * min(1.0, 10.0 / norm)) < (1e-4 if norm < 9.98 else 0.011)
        assert np.linalg.norm(found) <= 10.0
        assert np.linalg.norm(found) >= min(10.0, norm) * (1 - 0.0011)


def test_a_row_with_something_that_is_no_number_counts_for_nothing_and_harms_no_other():
    random = np.random.default_rng(3)
    ins, outs = [random.normal(size=(6, 5)).astype(np.float32)], [random.normal(size=(6, 4)).astype(np.float32)]
    grid = dense_grid(ins, outs, [True])
    without = flat(outer_sums([ins[0][1:]], [outs[0][1:]], [True], grid))
    for place, odd in ((ins, math.nan), (ins, math.inf), (outs, -math.inf), (outs, math.nan)):
        spoiled = [copy.deepcopy(ins), copy.deepcopy(outs)]
        spoiled[0 if place is ins else 1][0][0, 2] = odd
        assert (flat(outer_sums(*spoiled, [True], grid)) == without).all()
        gradients = torch.from_numpy(random.normal(size=(3, grid.num_weights)).astype(np.float32))
        gradients[1, 3] = odd
        clipped = clipped_rows(gradients, grid)
        assert (clipped[1] == 0).all()
        assert (clipped[[0, 2]] == clipped_rows(gradients[[0, 2]], grid)).all()


# --- how far one row moves a sum ---


def shift(grid: Grid, one: np.ndarray, other: np.ndarray) -> float:
    """The distance of two rounded sums in steps, as a share of 2C."""
    difference = grid.rounded(one) - grid.rounded(other)
    return math.sqrt(sum(int(value) ** 2 for value in difference)) / (2 * grid.clip_steps)


@given(st.integers(0, 2**32 - 1), st.sampled_from((0.01, 1.0, 25.0, 1e5, 1e7)))
@settings(max_examples=100)
def test_replacing_one_row_moves_the_integers_by_at_most_twice_the_clip_norm(seed, sigma):
    random = np.random.default_rng(seed)
    rows = int(random.choice([6, CHUNK + 2]))
    ins, outs, biased = layers(random, rows=rows)
    try:
        grid = dense_grid(ins, outs, biased, sigma=sigma)
    except PlanError:  # so much noise that the grid is too coarse: refused
        return
    first = flat(outer_sums(ins, outs, biased, grid))
    if random.integers(2):  # the same row with the other sign moves most
        outs_2 = [each.copy() for each in outs]
        for each in outs_2:
            each[2] *= -1
        second = flat(outer_sums(ins, outs_2, biased, grid))
    else:
        new_ins, new_outs, _ = ([odd_values(random, each.shape) for each in ins], [*outs], biased)
        new_outs = [odd_values(random, each.shape) for each in outs]
        replaced = [
            [np.where(np.arange(rows)[:, None] == 2, new, old) for new, old in zip(news, olds, strict=True)]
            for news, olds in ((new_ins, ins), (new_outs, outs))
        ]
        second = flat(outer_sums(*replaced, biased, grid))
    assert shift(grid, first, second) <= 1


def test_the_bound_is_nearly_attained_and_rounding_alone_would_break_it():
    # A coarse grid, one long row turned round, and a sum that sits at halves: without the room that is left for
    # rounding (the control) the shift would exceed 2C.
    random = np.random.default_rng(0)
    grid = Grid(noise_multiplier=2e5, clip_norm=1.0, num_weights=10_000, largest_batch=2)
    row = torch.from_numpy(random.normal(size=(1, 10_000)).astype(np.float32))
    one, other = (clipped_rows(sign * row, grid).numpy()[0] for sign in (1, -1))
    assert 0.9 < shift(grid, one, other) <= 1
    # Worst case of rounding, built by hand: every coordinate crosses a half for a tiny move.
    fine = 2.0**grid.fine_bits
    low, high = np.full(10_000, 0.49 * fine), np.full(10_000, 0.51 * fine)
    assert np.linalg.norm(grid.rounded(high) - grid.rounded(low)) == math.sqrt(10_000)
    full = grid.clip_steps * fine / np.linalg.norm(one)
    unroomed = shift(grid, np.floor(one * full) + np.sign(one) * fine / 2, np.floor(other * full))
    assert unroomed > 1


def test_an_unclipped_row_or_a_doubled_signal_would_be_noticed():
    random = np.random.default_rng(1)
    ins, outs = [random.normal(size=(6, 5)).astype(np.float32)], [random.normal(size=(6, 4)).astype(np.float32)]
    grid = dense_grid(ins, outs, [True])
    turned = [outs[0].copy()]
    turned[0][2] *= -1
    first, second = (flat(outer_sums(ins, each, [True], grid)) for each in (outs, turned))
    assert 0.99 < shift(grid, first, second) <= 1
    assert shift(grid, 2 * first, 2 * second) > 1.9  # a doubled signal
    raw = [np.einsum("bo,bi->oi", each[0], np.hstack([ins[0], np.ones((6, 1))])) for each in (outs, turned)]
    assert shift(grid, *(np.trunc(each.ravel() * grid.units) for each in raw)) > 2  # no clipping


def test_a_grid_that_is_too_coarse_or_too_fine_is_refused():
    with pytest.raises(PlanError, match=r"noise_multiplier=1e\+06 with 1,000,000 weights: .*permitted: 12%"):
        Grid(noise_multiplier=1e6, clip_norm=1.0, num_weights=1_000_000, largest_batch=10)
    with pytest.raises(PlanError, match=r"noise_multiplier=1e-12 is too small"):
        Grid(noise_multiplier=1e-12, clip_norm=1.0, num_weights=10, largest_batch=10)


# --- steps ---


def noisy_for(plan: Plan, data, **choices) -> Noisy:
    update = update_for(plan, build_encoder(plan, index=0, input_shape=data.train_features[0].shape[1:]), **choices)
    assert isinstance(update, Noisy)
    return update


def one_step(plan: Plan, data, entropy, gradient: float = 0.0) -> torch.Tensor:
    """By how much a first step moves the weights, in units of the learning rate."""
    update = noisy_for(plan, data)
    before = {name: value.clone() for name, value in update.state().items() if name.startswith("model.")}
    update.embed(torch.from_numpy(data.train_features[0][: plan.batch_size]), for_training=True)
    assert update.waiting_rows == plan.batch_size
    slopes = np.full((plan.batch_size, plan.embedding_dim), gradient, dtype=np.float32)
    update.apply(slopes, entropy)
    assert update.waiting_rows == 0
    after = update.state()
    return torch.cat([(before[name] - after[name]).flatten() for name in before]) / plan.learning_rate


def test_a_step_without_signal_is_noise_of_the_plan_s_size(make_data, make_plan):
    data = make_data(columns=400)
    plan = make_plan(data, noise_multiplier=3.0, clip_norm=0.5, encoder="mlp", embedding_dim=64, learning_rate=1.0)
    # The step is along the sum divided by the rows: sigma * c / B. Weights are float32, hence the tolerance.
    noise = one_step(plan, data, SystemEntropy()).double().numpy()
    expected = 3.0 * 0.5 / plan.batch_size
    assert noise.size > 30_000
    assert not statistical.normal_law_rejects(noise, mean=0.0, variance=expected**2)
    assert statistical.normal_law_rejects(noise, mean=0.0, variance=(0.95 * expected) ** 2)


def test_rows_are_clipped_by_the_gradient_of_their_own_loss(data, make_plan):
    # A row's own gradient is the server's times the rows of the batch. Far above the clip norm every row counts c.
    plan = make_plan(data, noise_multiplier=1e-6, clip_norm=0.25, encoder="linear", learning_rate=1.0)
    moved = one_step(plan, data, SystemEntropy(), gradient=100.0)
    assert 0.1 < float(moved.norm()) <= 0.25 * (1 + 1e-4)
    # Far below, the step is the plain one.
    quiet = plan.replace(clip_norm=10.0)
    plain = plan.replace(noise_multiplier=0.0)
    update = update_for(plain, build_encoder(plain, index=0, input_shape=(4,)))
    before = torch.cat([value.flatten() for value in update.state().values()])
    update.embed(torch.from_numpy(data.train_features[0][:10]), for_training=True)
    update.apply(np.full((10, 3), 0.01, dtype=np.float32), SystemEntropy())
    expected = before - torch.cat([value.flatten() for value in update.state().values()])
    assert (one_step(quiet, data, SystemEntropy(), gradient=0.01) - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    "choices",
    [{"encoder": "mlp"}, {"encoder": "linear", "momentum": 0.9}, {"encoder": "mlp", "bound": 1.7}, {"own": True}],
    ids=str,
)
def test_without_noise_in_the_limit_a_run_is_the_plain_one(choices, data, make_plan):
    choices = dict(choices)
    own = choices.pop("own", False)
    losses = []
    for noise in ({}, {"noise_multiplier": 1e-7, "clip_norm": 100.0}):
        plan = make_plan(data, mechanism="none", **choices, **noise)
        torch.manual_seed(1)
        encoders = [Bounded(Gated()) for _ in range(3)] if own else None
        seen: list[float] = []
        Federation(plan, encoders=encoders).fit(data, on_round=lambda _, loss, __, seen=seen: seen.append(loss))
        losses.append(seen)
    assert len(losses[0]) == 8
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-5


def test_noise_comes_from_the_party_s_own_stream_and_once_for_a_batch(data, make_plan):
    plan = make_plan(data, noise_multiplier=2.0)
    one, same, other = (one_step(plan, data, SeededEntropy(seed)) for seed in (b"a", b"a", b"b"))
    assert (one == same).all()  # the control: a stream that is used again shows
    assert not (one == other).any()
    update = noisy_for(plan, data)
    update.apply(np.zeros((10, 3), dtype=np.float32), SeededEntropy(b"a"))  # nothing waits: no step, no noise
    start = build_encoder(plan, index=0, input_shape=(4,)).state_dict()
    assert all((update.state()["model." + name] == value).all() for name, value in start.items())


def test_two_parties_never_share_noise(data, make_plan, tmp_path):
    # Clipped to almost nothing, all that moves the weights is noise: equal first weights would stay equal.
    plan = make_plan(data, noise_multiplier=1.0, encoder="linear", clip_norm=0.1)
    torch.manual_seed(0)
    first = Bounded(nn.Linear(4, 3))
    encoders = [copy.deepcopy(first) for _ in range(3)]
    Federation(plan, encoders=encoders).fit(data, checkpoints=tmp_path)
    found = weights(tmp_path)
    parties = sorted(role for role in found if role.startswith("party"))
    assert len(parties) == 3
    moved = [found[role]["model.network.weight"] - first.network.weight for role in parties]
    for i in range(3):
        assert (moved[i] != 0).all()
        for j in range(i):
            assert not (moved[i] == moved[j]).any()


def test_weights_stay_finite_whatever_the_gradient(data, make_plan):
    plan = make_plan(data, noise_multiplier=5.0, clip_norm=100.0, encoder="mlp", learning_rate=1e5)
    update = noisy_for(plan, data)
    for _ in range(40):
        update.embed(torch.from_numpy(data.train_features[0][:10]), for_training=True)
        update.apply(np.full((10, 3), 1e3, dtype=np.float32), SystemEntropy())
    update.embed(torch.from_numpy(data.train_features[0][:10]), for_training=True)
    assert all(torch.isfinite(value).all() for value in update.state().values())


# --- networks that fail, and networks that are refused ---


class Picky(nn.Module):
    """Cannot take a batch in which some row begins with 99."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch._C._functorch.peek_interpreter_stack() is None and (x[:, 0] == 99).any():
            raise ValueError("99")
        return self.layer(x)


def test_a_row_that_the_network_cannot_take_counts_for_nothing_and_moves_no_other(data, make_plan):
    plan = make_plan(data, noise_multiplier=1e-6, clip_norm=0.25, learning_rate=1.0)
    torch.manual_seed(0)
    first = Bounded(Picky())
    rows = torch.from_numpy(data.train_features[0][:10]).clone()
    slopes = np.ones((10, 3), dtype=np.float32)
    moved, embeddings, faults = [], [], []
    for spoiled in (False, True):
        batch = rows.clone()
        batch[4, 0] = 99.0 if spoiled else batch[4, 0]
        encoder = copy.deepcopy(first)
        update = update_for(plan, encoder, on_fault=faults.append)
        embeddings.append(update.embed(batch, for_training=True))
        update.apply(slopes, SystemEntropy())
        moved.append(encoder.network.layer.weight.detach() - first.network.layer.weight.detach())
    assert len(faults) == 1
    assert (embeddings[1][4] == 0).all()
    keep = [i for i in range(10) if i != 4]
    assert np.abs(embeddings[0][keep] - embeddings[1][keep]).max() < 1e-6
    # One row was replaced by nothing: the mean of ten moves by at most c / 10, and a little.
    assert 0 < float((moved[0] - moved[1]).norm()) <= 0.025 * 1.001


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and x.dim() == 2:
            self.batches += 1
        return self.layer(x)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.Dropout(0.5), "draws at random"),
        (nn.AlphaDropout(0.1), "draws at random"),
        (nn.RReLU(), "row of a batch changes"),
        (nn.BatchNorm1d(3), "statistics over the rows"),
        (Keeps(), "row by row|changes a buffer|keeps for later"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_networks_for_which_the_proof_does_not_hold_are_refused(layer, words, data, make_plan):
    plan = make_plan(data, noise_multiplier=1.0)
    inner = layer if isinstance(layer, Keeps) else nn.Sequential(nn.Linear(4, 3), layer)
    encoders = own_networks(plan, data)
    encoders[1] = Bounded(inner)
    with pytest.raises(EncoderError, match=words):
        Federation(plan, encoders=encoders).fit(data)


def test_dropout_that_draws_nothing_is_accepted(data, make_plan):
    plan = make_plan(data, noise_multiplier=1.0)
    rows = torch.ones(2, 4)
    with_it, without = (
        Bounded(nn.Sequential(nn.Linear(4, plan.embedding_dim), *rest)) for rest in ([nn.Dropout(0.0)], [])
    )
    with_it.load_state_dict(without.state_dict())
    found, expected = (
        update_for(plan, network, rows=rows).embed(rows, for_training=True) for network in (with_it, without)
    )
    assert np.array_equal(found, expected)


def test_a_plan_that_couples_rows_is_refused(data, make_plan):
    with pytest.raises(PlanError, match="couples the rows"):
        make_plan(data, noise_multiplier=1.0, encoder="resnet18-batchnorm")


def test_a_row_twice_in_a_batch_is_refused(data, make_plan):
    check_rows_once(Round(0, JOINT, np.array([3, 1, 2])))
    with pytest.raises(WrongPlan, match="more than once"):
        check_rows_once(Round(0, JOINT, np.array([3, 1, 3])))
    for current in make_plan(data, noise_multiplier=1.0).schedule:
        check_rows_once(current)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.integers(0, 60), min_size=1, max_size=50), far=st.sampled_from([0, 10**6]))
def test_rows_are_put_in_order_and_a_repeated_one_is_found_whatever_the_batch(rows, far):
    """Both ways: by counting, where a batch has a good part of the rows, and by sorting, where it has few."""
    current = Round(0, JOINT, np.array([*rows, *([far] if far else [])]))
    expected = sorted({*rows, *([far] if far else [])})
    assert current.rising.tolist() == expected
    if len(expected) == current.num_rows:
        check_rows_once(current)
    else:
        with pytest.raises(WrongPlan, match="more than once"):
            check_rows_once(current)


def test_a_simulation_refuses_noisy_updates(data, make_plan):
    with pytest.raises(PlanError, match=r"noise_multiplier=1: the simulation has no noisy updates"):
        check_plan(make_plan(data, noise_multiplier=1.0))


# --- whole runs ---


def test_a_strict_plan_is_trained_within_its_budget_and_learns(make_data):
    data = make_data(num_samples=2000, num_test_samples=500)
    plan = Plan.for_budget(epsilon=8, delta=1e-5, unit="cell", accounting="strict", data=data, num_epochs=2)
    assert plan.update.event.to_dict() == {
        "event": "rounded-gaussian-sum",
        "clip_norm": plan.clip_norm,
        "noise_multiplier": plan.noise_multiplier,
        "diameter": 2.0,
    }
    result = Federation(plan).fit(data)
    assert result.metrics["test_accuracy"] > 0.6
    strict = [
        bound
        for bound in result.privacy().bounds
        if bound.unit is Unit.CELL and bound.accounting is Accounting.STRICT and not bound.adversary.colluding_parties
    ]
    assert strict[0].epsilon <= 8
    assert strict[0].method == "pld"


def test_the_ledger_counts_updates_as_the_plan_does(data, make_plan, tmp_path):
    plan = make_plan(data, noise_multiplier=4.0)
    result, _ = fitted(plan, data, ledger=tmp_path)
    planned = {(b.unit, b.accounting): b.epsilon for b in plan.privacy(delta=1e-5).bounds if b.adversary.server}
    assert planned == {(b.unit, b.accounting): b.epsilon for b in result.privacy().bounds if b.adversary.server}
    book = Ledger(tmp_path / "party-0.sqlite", read_only=True)
    (entry,) = book.sessions("small")
    assert entry.terms.update(JOINT) == plan.update.event
    for unit in (Unit.CELL, Unit.RECORD):
        limit = Limit.choose(unit=unit, accounting="strict", epsilon=100, delta=1e-5, order=4.0)
        expected = rdp_curve(plan.training_run(), unit, Accounting.STRICT, orders=(4.0,))[0]
        assert spending(book, "small", limit).worst == pytest.approx(expected, rel=1e-9)
        paper = rdp_curve(plan.training_run(), unit, Accounting.PAPER, orders=(4.0,))[0]
        parties = 3 if unit is Unit.RECORD else 1
        assert expected - paper == pytest.approx(2 * parties * 2 * 4.0 / 4.0**2, rel=1e-6)  # two epochs, 2 a / sigma^2
    book.close()


def test_a_run_goes_on_after_a_stop_and_rounds_that_ran_twice_count_twice(data, make_plan, tmp_path):
    plan = make_plan(data, noise_multiplier=4.0, num_epochs=3)
    federation = Federation(plan)
    rounds = iter(range(100))
    stop = killer()
    with pytest.raises(Killed):
        federation.fit(data, checkpoints=tmp_path, on_round=lambda *_: next(rounds) < 5 or stop())
    result = Federation(plan).fit(data, checkpoints=tmp_path)
    (use,) = result.row_uses
    assert (use.releases, use.updates) == (4, 4)  # the fifth and sixth round ran again
    run = plan.training_run(result.row_uses)
    assert rdp_curve(run, *STRICT_CELL)[0] > rdp_curve(plan.training_run(), *STRICT_CELL)[0] * 1.3


@pytest.mark.slow
def test_parties_in_processes_make_the_same_noisy_steps(make_data, make_plan):
    data = make_data(num_parties=2, num_samples=23, num_test_samples=7)
    plan = make_plan(data, noise_multiplier=1.0, encoder="mlp")
    results = [known_federation(plan, parties=where).fit(data) for where in Parties]
    assert results[0].metrics == results[1].metrics
    lines = [[dataclasses.replace(line, seconds=0.0) for line in result.history] for result in results]
    assert lines[0] == lines[1]
