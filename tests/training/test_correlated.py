"""Noise that is correlated within a band: coefficients, sensitivity by brute force, the law of whole runs, refusals."""

from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.errors import PlanError
from pbmvfl.federation.federation import Federation
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.spending import spending
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import JOINT, PREDICTION
from pbmvfl.plan.schedule import Order, Phase, Schedule
from pbmvfl.privacy.accounting import rdp_curve
from pbmvfl.privacy.noise_band import COEFFICIENT_BITS, LARGEST_BAND, Band
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.training.encoders import build_encoder
from pbmvfl.training.fixed_point_grid import Grid
from pbmvfl.training.noisy import BandMemory, Correlated, Noisy
from pbmvfl.training.updates import update_for
from support import statistical
from support.cohorts import small_data
from support.federation_runs import Killed, killer
from support.known_randomness import SeededEntropy

# --- coefficients ---


@pytest.mark.parametrize("width", [1, 2, 3, 10, 50, LARGEST_BAND])
def test_coefficients_are_the_square_root_of_a_smoothed_running_sum(width):
    numerators = Band(width).numerators
    assert len(numerators) == width
    assert numerators[0] == 1 << COEFFICIENT_BITS
    assert all(a > b > 0 for a, b in itertools.pairwise(numerators))  # so errors die out: all roots beyond 1
    c = np.array(numerators, dtype=np.float64) / 2.0**COEFFICIENT_BITS
    # c times c as power series is 1/((1-x)(1-3x/4)), whose terms are sums of powers of 3/4.
    expected = np.cumsum(0.75 ** np.arange(width))
    rounding = 2.0**-COEFFICIENT_BITS * np.cumsum(c + 2.0**-COEFFICIENT_BITS)
    assert (np.abs(np.convolve(c, c)[:width] - expected) <= rounding).all()


@pytest.mark.parametrize("width", [1, 2, 7, 100])
def test_the_norm_is_never_below_the_true_one(width):
    band = Band(width)
    square = sum(Fraction(each, 1 << COEFFICIENT_BITS) ** 2 for each in band.numerators)
    assert Fraction(band.norm) ** 2 >= square
    assert band.norm == pytest.approx(math.sqrt(square), rel=1e-12)
    assert Fraction(band.total) == sum(Fraction(each, 1 << COEFFICIENT_BITS) for each in band.numerators)
    assert Band(1).norm == Band(1).total == 1


# --- sensitivity, by brute force ---


def sensitivity(band: Band, uses: int) -> float:
    """The claim: how far all releases move together (Euclidean norm) if each of a row's uses moves its sum by 1."""
    return band.norm * math.sqrt(uses)


def mixing_matrix(band: Band, steps: int) -> np.ndarray:
    """What a sequence of so many steps releases, row by row, from the sums of all of them."""
    matrix = np.zeros((steps, steps))
    for t in range(steps):
        for lag, numerator in enumerate(band.numerators[: t + 1]):
            matrix[t, t - lag] = numerator / 2.0**COEFFICIENT_BITS
    return matrix


def worst_shift(matrix: np.ndarray, schedule: Schedule, rounds: list[int]) -> tuple[float, int]:
    """(over all rows and all signs of a row's uses the longest shift of everything released, the most uses).

    A use moves one sum by a vector of norm at most 1; in one dimension those are signs, and by the triangle inequality
    over pairs of uses nothing is longer in more: the square is sum over pairs <column, column> <move, move>, and that
    is at most its value for signs if the inner products of columns have one sign, which they do here.
    """
    assert (matrix >= 0).all()
    worst, most = 0.0, 0
    for row in range(schedule.num_samples):
        uses = [step for step, number in enumerate(rounds) if row in schedule[number].rows]
        for signs in itertools.product((1, -1), repeat=len(uses)):
            moved = np.zeros(len(rounds))
            moved[uses] = signs
            worst = max(worst, float(np.linalg.norm(matrix @ moved)))
        most = max(most, len(uses))
    return worst, most


def training_rounds(schedule: Schedule) -> list[int]:
    return [number for number in range(len(schedule)) if schedule.kind(number).updates]


def schedule_of(order: Order, *, rows: int = 9, batch: int = 2, passes: int = 4, seed: int = 1) -> Schedule:
    phases = (
        Phase(kind=JOINT, passes=passes - 1, order=order),
        Phase(kind=PREDICTION, passes=1, order=Order.AS_GIVEN),
        Phase(kind=JOINT, passes=1, order=order),
    )
    return Schedule(num_samples=rows, num_test_samples=3, batch_size=batch, seed=seed, phases=phases)


@given(
    rows=st.integers(1, 9),
    batch=st.integers(1, 5),
    passes=st.integers(2, 5),
    seed=st.integers(0, 99),
    order=st.sampled_from([Order.FIXED, Order.AS_GIVEN]),
    data=st.data(),
)
@settings(max_examples=60)
def test_no_row_moves_a_run_further_than_the_claim(rows, batch, passes, seed, order, data):
    schedule = schedule_of(order, rows=rows, batch=batch, passes=passes, seed=seed)
    band = Band(data.draw(st.integers(1, schedule.steps_between_uses)))
    rounds = training_rounds(schedule)
    worst, uses = worst_shift(mixing_matrix(band, len(rounds)), schedule, rounds)
    assert uses == passes
    assert worst <= sensitivity(band, uses) * (1 + 1e-12)
    # Attained: a row of the first batch has its last band within the run.
    assert worst == pytest.approx(sensitivity(band, uses), rel=1e-9)


def test_a_reshuffled_order_or_a_wider_band_moves_it_further():
    band = Band(5)
    shuffled, fixed = schedule_of(Order.SHUFFLED), schedule_of(Order.FIXED)
    assert shuffled.steps_between_uses == 1
    assert fixed.steps_between_uses == 5
    rounds = training_rounds(fixed)
    assert worst_shift(mixing_matrix(band, len(rounds)), fixed, rounds)[0] <= sensitivity(band, 4) * (1 + 1e-12)
    assert worst_shift(mixing_matrix(band, len(rounds)), shuffled, rounds)[0] > 1.1 * sensitivity(band, 4)
    assert worst_shift(mixing_matrix(Band(6), len(rounds)), fixed, rounds)[0] > 1.02 * sensitivity(Band(6), 4)


@given(
    starts=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10)), min_size=1, max_size=4), seed=st.integers(0, 9)
)
def test_sessions_that_begin_anew_cost_a_row_no_more_than_its_uses(starts, seed):
    # Each session has some rounds in a row and a matrix of its own; rounds that run again count again.
    schedule = schedule_of(Order.FIXED, passes=3, seed=seed)
    band, rounds = Band(5), training_rounds(schedule)
    sessions = [rounds[first : first + count] for first, count in starts]
    walked = [number for session in sessions for number in session]
    matrix = np.zeros((len(walked), len(walked)))
    at = 0
    for session in sessions:
        end = at + len(session)
        matrix[at:end, at:end] = mixing_matrix(band, len(session))
        at = end
    worst, uses = worst_shift(matrix, schedule, walked)
    assert worst <= sensitivity(band, uses) * (1 + 1e-12)


# --- the plan ---


@pytest.fixture
def data():
    return small_data(num_samples=40)  # four full batches


def make(data, **choices) -> Plan:
    values = {"phases": (Phase(kind=JOINT, passes=3, order=Order.FIXED),), "noise_multiplier": 2.0, **choices}
    usual = {"batch_size": 10, "embedding_dim": 3, "num_trials": 5, "learning_rate": 0.1, "seed": 7}
    return Plan.for_data(data, **{**usual, **values})


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"noise_band": 5}, r"noise_band=5 must be in 1\.\.4"),
        ({"noise_band": 0}, r"noise_band=0 must be a whole number in 1\.\.128"),
        ({"noise_band": 2.0}, r"noise_band=2\.0 must be a whole number"),
        ({"noise_band": True}, r"noise_band=True must be a whole number"),
        ({"noise_band": 2, "noise_multiplier": 0.0}, "noise_band=2 goes with a noise_multiplier above 0"),
        ({"noise_band": 2, "phases": (Phase(kind=JOINT, passes=2),)}, "noise_band=2 needs order=fixed"),
        (
            {"noise_band": 2, "phases": tuple(Phase(kind=JOINT, passes=1, order=o) for o in ("fixed", "as-given"))},
            "noise_band=2 needs order=fixed",
        ),
    ],
    ids=str,
)
def test_a_plan_refuses_a_band_for_which_the_proof_does_not_hold(choices, words, data):
    if "phases" in choices:
        choices["phases"] = tuple(dataclasses.replace(each, order=Order(each.order)) for each in choices["phases"])
    with pytest.raises(PlanError, match=words):
        make(data, **choices)


def test_plans_with_and_without_a_band_are_read_back_and_only_those_with_one_name_it(data):
    without, with_one = make(data), make(data, noise_band=4)
    assert "noise_band" not in without.to_json()
    assert "noise_band" not in without.flat()
    for plan in (without, with_one):
        assert Plan.from_json(plan.to_json()) == plan
        assert Plan.of(**plan.flat()) == plan
    assert with_one.to_dict()["update"]["noise_band"] == 4
    assert without.hash != with_one.hash


def test_a_use_is_charged_for_the_norm_of_the_band(data):
    alone, banded = make(data), make(data, noise_band=4)
    curves = [
        rdp_curve(plan.training_run(), Unit.CELL, Accounting.STRICT, orders=(3.0,))[0]
        - rdp_curve(plan.training_run(), Unit.CELL, Accounting.PAPER, orders=(3.0,))[0]
        for plan in (alone, banded)
    ]
    square = sum(Fraction(each, 1 << COEFFICIENT_BITS) ** 2 for each in Band(4).numerators)
    assert curves[1] / curves[0] == pytest.approx(float(square), rel=1e-6)


# --- mixtures of integers ---


@given(width=st.integers(2, 40), batch=st.integers(1, 10**6), sigma=st.floats(1e-3, 1e4), seed=st.integers(0, 2**32))
def test_mixtures_are_exact_to_the_last_unit_also_for_the_largest_sums(width, batch, sigma, seed):
    grid = Grid(noise_multiplier=sigma, clip_norm=1.0, num_weights=5, largest_batch=batch, band=Band(width))
    memory = BandMemory(grid)
    random = np.random.default_rng(seed)
    largest = int(batch * grid.row_norm)
    assert largest <= 2**52
    history: list[list[int]] = []
    for _ in range(width + 2):
        ends = random.choice([-largest, largest, 0], size=5)
        total = np.where(random.random(5) < 0.5, ends, random.integers(-largest, largest + 1, size=5))
        found = memory.mixture(total.astype(np.float64))
        history.insert(0, [int(each) for each in total])
        for d in range(5):
            mixed = sum(k * sums[d] for k, sums in zip(grid.band.numerators, history, strict=False))
            exact = Fraction(mixed) / Fraction(2) ** (grid.fine_bits + COEFFICIENT_BITS)
            assert abs(int(found[d]) - exact) <= Fraction(1, 2)


@given(width=st.integers(2, 12), sigma=st.floats(0.5, 3e5), seed=st.integers(0, 2**32))
def test_replacing_a_row_moves_the_integers_of_all_its_steps_by_at_most_the_charge(width, sigma, seed):
    # A row at the limit of the grid, turned round or replaced, in a step whose other sums are anything.
    random = np.random.default_rng(seed)
    weights = 64
    grid = Grid(noise_multiplier=sigma, clip_norm=1.0, num_weights=weights, largest_batch=8, band=Band(width))
    direction = random.normal(size=(2, weights))
    rows = np.trunc(direction / np.linalg.norm(direction, axis=1, keepdims=True) * grid.target)
    rows[1] = -rows[0] if random.random() < 0.5 else rows[1]
    others = np.trunc(random.normal(size=(width, weights)) * grid.row_norm / 8)
    squares = 0
    twins = (BandMemory(grid), BandMemory(grid))
    for step in range(width):
        mixtures = [
            memory.mixture(others[step] + (row if step == 0 else 0)) for memory, row in zip(twins, rows, strict=True)
        ]
        squares += sum(int(each) ** 2 for each in mixtures[0] - mixtures[1])
    assert math.sqrt(squares) <= 2 * grid.clip_steps * grid.band.norm


def test_estimates_without_noise_are_the_sums():
    grid = Grid(noise_multiplier=1e-2, clip_norm=1.0, num_weights=3, largest_batch=8, band=Band(6))
    memory = BandMemory(grid)
    random = np.random.default_rng(0)
    for _ in range(40):
        total = np.trunc(random.uniform(-8, 8, size=3) * grid.row_norm)
        found = memory.estimate(memory.mixture(total))
        assert np.abs(found - total * 2.0**-grid.fine_bits).max() < 4  # one rounding a step, which dies out
    memory.forget()
    assert (memory.mixture(np.zeros(3)) == 0).all()
    assert (memory.estimate(np.zeros(3, dtype=np.int64)) == 0).all()


# --- the law of a whole run, enumerated ---


@dataclasses.dataclass(frozen=True)
class ToyGrid:
    """Sums in quarters of a step, noise of a few steps: small enough to look at every transcript."""

    band: Band
    fine_bits: int = 2


#: A row's norm in fine units, and noise in steps.
ROW, SIGMA = 12.0, 1.5
WINDOW = np.arange(-18, 19)


def transcript_law(order: str, kept: float, band: Band) -> np.ndarray:
    """log P of every transcript of a run of four steps on one weight with two rows, `kept` the sign of row a.

    Row b's gradient depends on the weight, and so on everything released before: the run is adaptive.
    """
    grids = np.meshgrid(*[WINDOW] * len(order), indexing="ij")
    transcripts = [each.ravel() for each in grids]
    log_noise = -(np.arange(-200, 201) ** 2) / (2 * SIGMA**2)
    log_noise -= np.log(np.exp(log_noise).sum())
    memory = BandMemory(ToyGrid(band))  # type: ignore[arg-type]  # all that it asks a grid for
    weight = np.zeros(transcripts[0].size)
    law = np.zeros(transcripts[0].size)
    for row, seen in zip(order, transcripts, strict=True):
        gradient = np.full(weight.size, kept * ROW) if row == "a" else np.trunc(np.clip(3 * weight - 4, -ROW, ROW))
        mean = memory.mixture(gradient)
        law += log_noise[seen - mean + 200]
        weight = weight - 0.3 * memory.estimate(seen)
    return law


def renyi(order: str, band: Band, alpha: float) -> float:
    first, second = (transcript_law(order, kept, band) for kept in (1.0, -1.0))
    assert np.exp(first).sum() == pytest.approx(1, abs=1e-6)
    return float(np.log(np.exp(alpha * first + (1 - alpha) * second).sum()) / (alpha - 1))


def test_the_law_of_every_transcript_lies_below_the_account_and_a_reshuffled_order_above():
    band, alpha = Band(2), 1.25
    clip_steps = ROW / 4 + math.sqrt(2) / (2 * band.norm)  # what a row may be, and room for rounding

    def account(uses: int) -> float:
        return alpha * uses * (2 * clip_steps * band.norm / SIGMA) ** 2 / 2

    fixed, shuffled, once = renyi("abab", band, alpha), renyi("baab", band, alpha), renyi("abbb", band, alpha)
    assert 0.6 * account(2) < fixed <= account(2)
    assert 0.6 * account(1) < once <= account(1)
    assert shuffled > account(2)
    # In numbers: shifts of 6 and round(5.25) steps for a use.
    assert once == pytest.approx(alpha * (6**2 + 5**2) / (2 * SIGMA**2), rel=0.1)


# --- steps ---


def encoder_for(plan: Plan, data):
    return build_encoder(plan, index=0, input_shape=data.train_features[0].shape[1:])


def flat_weights(update) -> torch.Tensor:
    return torch.cat([value.flatten().double() for name, value in update.state().items() if name.startswith("model.")])


def moves(update, plan: Plan, data, entropies, gradient: float = 0.0) -> list[np.ndarray]:
    """By how much each step moves the weights, as the estimate of a sum."""
    found = []
    for step, entropy in enumerate(entropies):
        rows = data.train_features[0][10 * (step % 4) : 10 * (step % 4) + 10]
        before = flat_weights(update)
        update.embed(torch.from_numpy(rows), for_training=True)
        update.apply(np.full((10, plan.embedding_dim), gradient, dtype=np.float32), entropy)
        found.append(((before - flat_weights(update)) / plan.learning_rate * 10).numpy())
    return found


def test_a_band_of_one_step_is_independent_noise(data):
    plan = make(data)
    assert type(update_for(plan, encoder_for(plan, data))) is Noisy
    runs = []
    for kind in (Noisy, Correlated):
        entropy = SeededEntropy(b"one stream")
        runs.append(moves(kind(plan, encoder_for(plan, data)), plan, data, [entropy] * 5, gradient=0.02))
    assert all((a == b).all() for a, b in zip(*runs, strict=True))


def test_without_noise_in_the_limit_a_run_is_the_plain_one(data):
    losses = []
    for noise in ({"noise_multiplier": 0.0}, {"noise_multiplier": 1e-6, "clip_norm": 100.0, "noise_band": 4}):
        plan = make(data, mechanism="none", num_trials=1, momentum=0.9, encoder="mlp", **noise)
        seen: list[float] = []
        Federation(plan).fit(data, on_round=lambda _, loss, __, seen=seen: seen.append(loss))
        losses.append(seen)
    assert len(losses[0]) == 12
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-5


def released_noise(found: list[np.ndarray], band: Band) -> np.ndarray:
    """What noise the steps had before it was made correlated: y = C G, for steps without signal."""
    return mixing_matrix(band, len(found)) @ np.stack(found)


def test_noise_is_the_plan_s_independent_in_every_step_and_a_reused_stream_is_caught():
    data = small_data(num_samples=40, columns=300)
    plan = make(data, noise_multiplier=3.0, clip_norm=0.5, encoder="mlp", embedding_dim=64, noise_band=4)
    plan = plan.replace(learning_rate=1.0)

    def noise(entropies) -> np.ndarray:
        update = update_for(plan, encoder_for(plan, data))
        assert type(update) is Correlated
        return released_noise(moves(update, plan, data, entropies), Band(4))

    fresh = noise([SystemEntropy()] * 6)
    assert fresh.shape[1] > 20_000
    assert not statistical.normal_law_rejects(fresh.ravel(), mean=0.0, variance=1.5**2)
    assert statistical.normal_law_rejects(fresh.ravel(), mean=0.0, variance=(0.95 * 1.5) ** 2)
    pairs = list(itertools.combinations(range(6), 2))
    assert not any(statistical.products_reject_independence(fresh[i], fresh[j]) for i, j in pairs)
    again = noise([SeededEntropy(b"the same bytes") for _ in range(6)])  # the control
    assert all(statistical.products_reject_independence(again[i], again[j]) for i, j in pairs)


def test_noise_of_weights_falls_two_to_four_times_at_equal_cost():
    # Weights add up the estimates of all steps. Standard deviations by definition, and once by drawing.
    random = np.random.default_rng(3)
    for per_pass, passes, least in ((10, 10, 2.4), (20, 20, 3.4)):
        band, steps = Band(per_pass), per_pass * passes
        noise = random.normal(size=(steps, 2000)) * band.norm
        estimates: list[np.ndarray] = []
        for drawn in noise:
            back = zip(band.coefficients[1:], reversed(estimates), strict=False)
            estimates.append(drawn - sum(c * earlier for c, earlier in back))
        drawn_gain = math.sqrt(steps) / np.sum(estimates, axis=0).std()
        exact = np.linalg.inv(mixing_matrix(band, steps)).sum(axis=0) * band.norm
        gain = math.sqrt(steps) / float(np.linalg.norm(exact))
        assert least < gain < 4.5
        assert drawn_gain == pytest.approx(gain, rel=0.12)  # 2,000 draws: 1.6% a standard deviation


@pytest.mark.parametrize("how", ["resumed", "given up"])
def test_memory_begins_anew_after_a_resume_and_after_a_batch_without_a_gradient(how, data):
    plan = make(data, noise_multiplier=1e-6, clip_norm=100.0, noise_band=4, learning_rate=1.0)
    update = update_for(plan, encoder_for(plan, data))
    moves(update, plan, data, [SystemEntropy()] * 3, gradient=0.5)
    assert isinstance(update, Correlated)
    if how == "resumed":
        state = update.state()
        assert not any(name for name in state if not name.startswith(("model.", "moment.")))
        update.load_state(state)
    else:
        for _ in range(2):
            update.embed(torch.from_numpy(data.train_features[0][:10]), for_training=True)
    # No signal: had it kept a sum and lost the estimates, or the other way round, the step would not be zero.
    (still,) = moves(update, plan, data, [SystemEntropy()])
    if how == "given up":  # the batch that waited was replaced, not stepped with
        assert update.waiting_rows == 0
    assert np.abs(still).max() < 1e-2


# --- whole runs ---


def test_the_ledger_counts_a_banded_run_as_the_plan_does_and_a_resumed_one_goes_on(data, tmp_path):
    plan = make(data, noise_multiplier=4.0, noise_band=4)
    rounds = iter(range(100))
    stop = killer()
    folders = {"checkpoints": tmp_path / "run", "ledger": tmp_path / "books"}
    with pytest.raises(Killed):
        Federation(plan).fit(data, on_round=lambda *_: next(rounds) < 6 or stop(), **folders)
    result = Federation(plan).fit(data, **folders)
    (use,) = result.row_uses
    assert (use.releases, use.updates) == (4, 4)  # rounds after the last checkpoint ran again
    run = plan.training_run(result.row_uses)
    book = Ledger(tmp_path / "books" / "party-0.sqlite", read_only=True)
    limit = Limit.choose(unit=Unit.CELL, accounting="strict", epsilon=100, delta=1e-5, order=4.0)
    expected = rdp_curve(run, Unit.CELL, Accounting.STRICT, orders=(4.0,))[0]
    assert spending(book, "small", limit).worst == pytest.approx(expected, rel=1e-9)
    book.close()
