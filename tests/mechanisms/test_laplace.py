"""Discrete Laplace noise in shares: exact draws, the account against every outcome and every number of colluders.

Oracles are sums over outcomes in fractions or 50 digits, and share no code with the mechanism or the account.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pbmvfl import Federation, Ledger, Limit, Plan
from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms import PolyaLaplace
from pbmvfl.mechanisms import negative_binomial as polya
from pbmvfl.mechanisms.laplace import PolyaLaplaceRelease, PolyaLaplaceSharesRelease
from pbmvfl.privacy.composition import AtomLosses
from pbmvfl.privacy.loss_distribution import compose
from pbmvfl.privacy.pure_pairs import missing_shares_epsilon
from pbmvfl.privacy.units import SERVER, Adversary, Unit
from pbmvfl.research.simulation import Simulation
from support import statistical

DELTA = 1e-5
DIGITS = 50


def made(*, parties: int = 3, **numbers: Any) -> PolyaLaplace:
    usual: dict[str, Any] = {"embedding_dim": 1, "levels": 2, "scale": 2.5, "secure_aggregation": True}
    return PolyaLaplace(num_parties=parties, **{**usual, **numbers})


# --- oracles ---


@lru_cache(maxsize=64)
def negative_binomial(scale: float, r: Fraction, tail: float = 1e-30) -> list[mpmath.mpf]:
    """Masses of NegativeBinomial(r, exp(-1/scale)), by the definition with binomial coefficients, until little is
    left."""
    with mpmath.workdps(DIGITS):
        p, shape = mpmath.exp(-1 / mpmath.mpf(scale)), mpmath.mpf(r.numerator) / r.denominator
        found: list[mpmath.mpf] = []
        left = mpmath.mpf(1)
        while left > tail:
            k = len(found)
            found.append(mpmath.binomial(k + shape - 1, k) * p**k * (1 - p) ** shape)
            left -= found[-1]
        return found


@lru_cache(maxsize=64)
def noise(scale: float, r: Fraction) -> dict[int, mpmath.mpf]:
    """The law of X - Y."""
    masses = negative_binomial(scale, r)
    with mpmath.workdps(DIGITS):
        count = len(masses)
        upper = [mpmath.fdot(masses[: count - d], masses[d:]) for d in range(count)]
        return {d: upper[abs(d)] for d in range(1 - count, count)}


def hockey_stick(law: dict[int, mpmath.mpf], distance: int, epsilon: float) -> float:
    """Of the law against the same law around `distance`."""
    with mpmath.workdps(DIGITS):
        ratio = mpmath.exp(mpmath.mpf(epsilon))
        return float(mpmath.fsum(max(mass - ratio * law.get(x - distance, 0), 0) for x, mass in law.items()))


# --- the shares ---


def rising(r: Fraction, k: int) -> Fraction:
    """The binomial coefficient of k + r - 1 over k."""
    return math.prod(((r + i) / (i + 1) for i in range(k)), start=Fraction(1))


@pytest.mark.parametrize("shares", [1, 2, 3, 5])
def test_shares_add_up_to_a_geometric_law_and_fewer_to_a_negative_binomial_one(shares: int) -> None:
    """In fractions: p^k and (1-p)^(1/n) are the same on both sides, and what is left are these coefficients."""
    top = 9
    one = [rising(Fraction(1, shares), k) for k in range(top)]
    total = [Fraction(int(k == 0)) for k in range(top)]
    for count in range(1, shares + 1):
        total = [sum((total[i] * one[k - i] for i in range(k + 1)), Fraction(0)) for k in range(top)]
        assert total == [rising(Fraction(count, shares), k) for k in range(top)]
    assert total == [1] * top


def test_two_geometric_ones_differ_by_discrete_laplace_noise() -> None:
    law = noise(2.5, Fraction(1))
    with mpmath.workdps(DIGITS):
        p = mpmath.exp(mpmath.mpf(-1) / mpmath.mpf(2.5))
        for x in range(-30, 31):
            assert abs(law[x] - (1 - p) / (1 + p) * p ** abs(x)) < mpmath.mpf("1e-29")


# --- the sampler ---

TABLES = [(0.0625, 1), (0.7, 3), (2.5, 1), (2.5, 4), (64.0, 5), (37.25, 100)]


@pytest.mark.parametrize(("scale", "shares"), TABLES)
def test_every_entry_of_the_table_is_the_law_s_sum_rounded_down(scale: float, shares: int) -> None:
    entries = polya.table(scale, shares).tolist()
    with mpmath.workdps(DIGITS):
        p, r = mpmath.exp(-1 / mpmath.mpf(scale)), mpmath.mpf(1) / shares
        total, term = mpmath.mpf(0), (1 - p) ** r
        for k, entry in enumerate(entries):
            total += term
            assert entry == int(mpmath.floor(total * 2**64))
            term *= p * (k + r) / (k + 1)
    assert entries[-1] == 2**64 - 1
    assert entries[-2] < 2**64 - 1 if len(entries) > 1 else True
    assert entries == sorted(entries)


class TheseWords:
    """Stands in for secret randomness: these 64-bit words, one after the other."""

    seeded = True

    def __init__(self, *words: int) -> None:
        self._words = list(words)

    def fill(self, buffer: npt.NDArray[Any]) -> None:
        taken, self._words = self._words[: buffer.size], self._words[buffer.size :]
        buffer[:] = np.array(taken, dtype=np.uint64)

    @property
    def left(self) -> int:
        return len(self._words)


@pytest.mark.parametrize(("scale", "shares"), TABLES)
def test_a_word_between_two_entries_decides_alone(scale: float, shares: int) -> None:
    entries = polya.table(scale, shares).tolist()
    words, expected = [0], [0]
    for k, entry in enumerate(entries[:-1]):
        words += [entry - 1, entry + 1]
        expected += [sum(each < entry - 1 for each in entries), k + 1]
    safe = [i for i, word in enumerate(words) if word not in set(entries)]
    asked = np.array([words[i] for i in safe], dtype=np.uint64)
    assert polya.draw(scale, shares, asked, TheseWords()).tolist() == [expected[i] for i in safe]


@pytest.mark.parametrize(("scale", "shares"), [(2.5, 1), (2.5, 4), (64.0, 5)])
def test_a_word_that_is_an_entry_gets_more_bits_until_it_is_decided(scale: float, shares: int) -> None:
    entries = polya.table(scale, shares).tolist()
    for k in (0, 1, len(entries) // 2):
        with mpmath.workdps(120):
            p, r = mpmath.exp(-1 / mpmath.mpf(scale)), mpmath.mpf(1) / shares
            total = mpmath.fsum(mpmath.binomial(j + r - 1, j) * p**j * (1 - p) ** r for j in range(k + 1))
            digits = int(mpmath.floor(total * 2**192))
        first, second, third = digits >> 128, (digits >> 64) % 2**64, digits % 2**64
        assert entries[k] == first
        words = np.array([first], dtype=np.uint64)
        for more, expected in (
            ((second - 1,), k),
            ((second + 1,), k + 1),
            ((second, third - 1), k),
            ((second, third + 1), k + 1),
        ):
            entropy = TheseWords(*more, 77)
            assert polya.draw(scale, shares, words, entropy).tolist() == [expected]
            assert entropy.left == 1  # no more bits than it takes


def test_the_last_word_of_all_stands_for_the_whole_tail() -> None:
    """2^64 - 1 and more bits: how far out it is follows from them."""
    top = np.array([2**64 - 1], dtype=np.uint64)
    masses = negative_binomial(2.5, Fraction(1, 2), 1e-45)
    for more in ((0,), (2**63,), (2**64 - 2**20,), (2**64 - 1, 5)):
        drawn = polya.draw(2.5, 2, top, TheseWords(*more)).item()
        with mpmath.workdps(DIGITS):
            u = mpmath.mpf(2**64 - 1) / 2**64 + sum(mpmath.mpf(w) / 2 ** (64 * (i + 2)) for i, w in enumerate(more))
            below, total = 0, mpmath.mpf(0)
            for mass in masses:
                total += mass
                below += total <= u
        assert drawn == below
        assert drawn >= len(polya.table(2.5, 2)) - 1


def as_fractions(law: dict[int, mpmath.mpf], span: int) -> list[Fraction]:
    """Masses at -span..span, what lies outside at the nearer end; they add up to 1."""
    inside = [Fraction(int(mpmath.floor(law[x] * 2**120)), 2**120) for x in range(-span, span + 1)]
    rest = (1 - sum(inside)) / 2
    return [inside[0] + rest, *inside[1:-1], inside[-1] + rest]


def contradicts(drawn: npt.NDArray[np.int64], law: dict[int, mpmath.mpf], span: int) -> bool:
    counts = np.bincount(np.clip(drawn, -span, span) + span, minlength=2 * span + 1)
    return statistical.chi_square_rejects(counts, as_fractions(law, span))


@pytest.mark.parametrize(("scale", "shares"), [(2.5, 1), (2.5, 3), (6.0, 2), (0.7, 5)])
def test_one_party_s_share_has_its_law_and_a_scale_wrong_by_a_twentieth_is_noticed(scale: float, shares: int) -> None:
    law, span = noise(scale, Fraction(1, shares)), math.ceil(8 * scale)

    def shares_of(wrong: float, number: int) -> npt.NDArray[np.int64]:
        mechanism = made(parties=5, scale=wrong, honest_parties=number, levels=1)
        sent = mechanism.randomize(np.zeros(statistical.NUM_DRAWS, np.float32), SystemEntropy()).astype(np.int64)
        size = 1 << mechanism.ring.bits
        return np.where(sent >= size // 2, sent - size, sent)

    assert not contradicts(shares_of(scale, shares), law, span)
    assert contradicts(shares_of(scale * 1.05, shares), law, span)
    assert contradicts(shares_of(scale / 1.05, shares), law, span)
    assert contradicts(shares_of(scale, shares + 1 if shares < 5 else 4), law, span)


@pytest.mark.parametrize(("parties", "honest"), [(2, 2), (3, 3), (4, 2)])
def test_the_masked_sum_of_all_parties_has_the_law_of_whole_noise(parties: int, honest: int) -> None:
    law = noise(2.5, Fraction(parties, honest))

    def estimated(scale: float) -> npt.NDArray[np.int64]:
        mechanism = made(parties=parties, scale=scale, honest_parties=honest, levels=4, bound=2.0)
        form, entropy = mechanism.payload, SystemEntropy()
        places = [(-1) ** i * 2.0 for i in range(parties)]
        count = statistical.NUM_DRAWS
        sent = [form.encode(mechanism.randomize(np.full(count, x, np.float32), entropy)) for x in places]
        total = mechanism.estimate(form.total(sent, count)) * 2 - 4 * sum(places) / 2
        return np.rint(total).astype(np.int64)

    assert not contradicts(estimated(2.5), law, 25)
    assert contradicts(estimated(2.5 * 1.05), law, 25)
    assert contradicts(estimated(2.5 / 1.05), law, 25)


# --- the account, against every outcome ---


def charged(levels: int, scale: float, needed: int, *, secure_sum: bool = True, dim: int = 1) -> PolyaLaplaceRelease:
    return PolyaLaplaceRelease(
        num_parties=3, embedding_dim=dim, levels=levels, scale=scale, noisy_parties=needed, secure_sum=secure_sum
    )


@pytest.mark.parametrize(("levels", "scale"), [(1, 0.8), (2, 2.5)])
@pytest.mark.parametrize("needed", [1, 2, 3])
@pytest.mark.parametrize("colluding", [0, 1, 2])
def test_no_sum_of_any_inputs_is_above_the_account_and_whole_noise_attains_it(
    levels: int, scale: float, needed: int, colluding: int
) -> None:
    """What is left to read has the honest parties' noise around the sum of their integers. Two neighbouring inputs move
    that sum by any distance up to 2D a changed party, either way; the law of the noise is the same around both."""
    adversary, honest = Adversary(colluding_parties=colluding), 3 - colluding
    event = charged(levels, scale, needed)
    law = noise(scale, Fraction(honest, needed))
    for unit, cells in ((Unit.CELL, 1), (Unit.PARTY, 1), (Unit.RECORD, honest)):
        farthest = 2 * levels * cells
        losses = event.losses(unit, adversary)
        assert isinstance(losses, AtomLosses)
        assert losses.copies == 1
        allowed = compose(losses.atoms, 1, 1e-6)
        pure = float(losses.atoms.losses.max())
        for epsilon in (-0.5, 0.0, *(share * pure for share in (0.05, 0.2, 0.5, 0.8, 0.97, 0.999, 1.0))):
            deltas = [hockey_stick(law, d, epsilon) for way in (1, -1) for d in range(way, way * (farthest + 1), way)]
            assert max(deltas) <= allowed.delta(epsilon) + 1e-12
            if honest == needed:
                assert allowed.delta(epsilon) == pytest.approx(max(deltas), abs=2e-5)
        with mpmath.workdps(DIGITS):
            largest = max(mpmath.log(law[x] / law[x + farthest]) for x in range(-farthest - 2, 12))
        if honest > needed:
            assert largest <= pure * (1 + mpmath.mpf("1e-12"))
        else:  # the pure epsilon is attained with all shares, and with some of them
            assert largest * (1 - mpmath.mpf("1e-12")) <= pure <= largest * (1 + mpmath.mpf("1e-9"))


@pytest.mark.parametrize("needed", [1, 3])
def test_without_a_secure_sum_a_party_has_its_own_share_alone(needed: int) -> None:
    event = charged(2, 2.5, needed, secure_sum=False, dim=2)
    law = noise(2.5, Fraction(1, needed))
    for unit, copies in ((Unit.CELL, 2), (Unit.PARTY, 2), (Unit.RECORD, 6)):
        losses = event.losses(unit)
        assert isinstance(losses, AtomLosses)
        assert losses.copies == copies
        allowed = compose(losses.atoms, 1, 1e-6)
        for epsilon in (0.0, 0.5, 1.0, 1.5, 3.0):
            assert max(hockey_stick(law, d, epsilon) for d in range(1, 5)) <= allowed.delta(epsilon) + 1e-12
        # The same as against all the others together, who leave one share.
        alone = charged(2, 2.5, needed, dim=2).rdp(Unit.CELL, Adversary(colluding_parties=2))
        assert np.allclose(event.rdp(unit), alone * (copies / 2), rtol=1e-12)


@pytest.mark.parametrize(("levels", "scale"), [(1, 0.8), (2, 2.5), (16, 5.0)])
def test_its_renyi_curve_is_the_definition_s(levels: int, scale: float) -> None:
    orders = (1.01, 1.5, 2.0, 7.5, 64.0, 2048.0)
    for colluding, needed in ((0, 3), (1, 2), (2, 1)):
        adversary, honest = Adversary(colluding_parties=colluding), 3 - colluding
        event = charged(levels, scale, needed, dim=2)
        for unit, cells in ((Unit.CELL, 1), (Unit.RECORD, honest)):
            distance = 2 * levels * cells
            for order, value in zip(orders, event.rdp(unit, adversary, orders), strict=True):
                with mpmath.workdps(DIGITS):
                    a, p = mpmath.mpf(order), mpmath.exp(-1 / mpmath.mpf(scale))
                    tails = p ** (distance * (1 - a)) / (1 - p) + p ** (distance * a) / (1 - p)
                    middle = mpmath.fsum(p ** (a * x + (1 - a) * (distance - x)) for x in range(1, distance))
                    truth = 2 * mpmath.log((tails + middle) * (1 - p) / (1 + p)) / (a - 1)
                assert truth <= value <= truth * (1 + mpmath.mpf("3e-9"))


@pytest.mark.parametrize(
    ("distance", "scale", "shares", "needed"),
    [(128, 64.0, 1, 5), (128, 64.0, 4, 5), (2, 0.3, 1, 2), (640, 128.0, 3, 7), (8, 500.0, 1, 100), (5000, 10.0, 1, 3)],
)
def test_missing_shares_cost_what_the_hypergeometric_series_says(
    distance: int, scale: float, shares: int, needed: int
) -> None:
    with mpmath.workdps(60):
        p, r = mpmath.exp(-1 / mpmath.mpf(scale)), mpmath.mpf(shares) / needed
        together = mpmath.hyp2f1(r, r, 1, p**2)
        apart = p**distance * mpmath.binomial(distance + r - 1, distance)
        apart *= mpmath.hyp2f1(r, r + distance, distance + 1, p**2)
        truth = mpmath.log(together / apart)
    found = missing_shares_epsilon(distance, scale, shares, needed)
    assert truth <= found <= truth * (1 + 1e-8)
    assert found > distance / scale
    fewer = missing_shares_epsilon(distance, scale, shares, needed + 1)
    assert fewer > found


def test_more_colluders_than_planned_for_cost_more_and_never_nothing() -> None:
    plan = Plan.of(
        num_parties=5, num_samples=100, num_classes=2, mechanism="laplace", honest_parties=4, embedding_dim=1
    )
    event = plan.release.event
    curves = [event.rdp(Unit.CELL, Adversary(colluding_parties=t)) for t in range(5)]
    assert np.array_equal(curves[0], curves[1])
    assert all(np.all(more > fewer) for fewer, more in pairwise(curves[1:]))
    assert all(np.all(np.isfinite(curve)) for curve in curves)


def epsilon_of_sums(distance: int, scale: float, count: int, delta: float) -> float:
    """The least epsilon of so many sums that all move by this distance, by counting losses in steps of 1/scale."""
    with mpmath.workdps(30):
        p = mpmath.exp(-1 / mpmath.mpf(scale))
        one = {distance - 2 * x: (1 - p) / (1 + p) * p**x for x in range(1, distance)}
        one |= {distance: 1 / (1 + p), -distance: p**distance / (1 + p)}
        total = {0: mpmath.mpf(1)}
        for _ in range(count):
            following: dict[int, mpmath.mpf] = {}
            for loss, mass in total.items():
                for step, share in one.items():
                    following[loss + step] = following.get(loss + step, 0) + mass * share
            total = following

        def delta_at(epsilon: mpmath.mpf) -> mpmath.mpf:
            terms = ((mass, loss / mpmath.mpf(scale) - epsilon) for loss, mass in total.items())
            return mpmath.fsum(mass * -mpmath.expm1(-above) for mass, above in terms if above > 0)

        low, high = mpmath.mpf(0), mpmath.mpf(count * distance) / scale
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if delta_at(middle) <= delta else (middle, high)
        return float(high)


@pytest.mark.parametrize(("levels", "scale", "epochs", "dim"), [(16, 16.0, 1, 1), (4, 8.0, 3, 2), (2, 30.0, 20, 1)])
def test_a_plan_s_epsilon_is_that_of_its_sums(levels: int, scale: float, epochs: int, dim: int) -> None:
    sizes: dict[str, Any] = {"num_parties": 3, "num_samples": 100, "num_classes": 2, "mechanism": "laplace"}
    plan = Plan.of(**sizes, levels=levels, scale=scale, num_epochs=epochs, embedding_dim=dim)
    table = plan.privacy(delta=DELTA)
    for unit, cells in (("cell", 1), ("record", 3)):
        truth = epsilon_of_sums(2 * levels * cells, scale, epochs * dim, DELTA)
        assert truth * (1 - 1e-12) <= table.epsilon(unit, "paper") <= truth * (1 + 2e-4)
        assert table.epsilon(unit, "paper") <= 2 * levels * cells / scale * epochs * dim * (1 + 1e-4)


def test_the_planner_finds_the_least_scale_that_a_budget_allows() -> None:
    sizes: dict[str, Any] = {"num_parties": 5, "num_samples": 100, "num_classes": 2, "mechanism": "laplace"}
    plan = Plan.for_budget(
        epsilon=2.0, delta=DELTA, unit="cell", accounting="paper", **sizes, num_epochs=1, embedding_dim=1
    )
    assert isinstance(plan.release, PolyaLaplace)
    assert 1.99 < plan.privacy(delta=DELTA).epsilon("cell", "paper") <= 2.0
    assert plan.release.scale == pytest.approx(2 * 64 / 2.0, rel=0.01)  # pure, but for what delta gives


@pytest.mark.parametrize("colluding", [0, 1, 2, 4])
def test_against_colluders_the_planner_counts_on_the_others_alone(colluding: int) -> None:
    sizes: dict[str, Any] = {"num_parties": 5, "num_samples": 100, "num_classes": 2, "mechanism": "laplace"}
    plan = Plan.for_budget(
        epsilon=2.0,
        delta=DELTA,
        unit="cell",
        accounting="paper",
        colluding_parties=colluding,
        **sizes,
        num_epochs=1,
        embedding_dim=1,
    )
    assert isinstance(plan.release, PolyaLaplace)
    assert plan.release.shares == 5 - colluding
    assert plan.release.scale == pytest.approx(2 * 64 / 2.0, rel=0.01)


# --- shares of a whole ---


def shares_event(levels: int, scale: float, needed: int, *, dim: int, secure_sum: bool = True) -> Any:
    return PolyaLaplaceSharesRelease(
        num_parties=3, embedding_dim=dim, levels=levels, scale=scale, noisy_parties=needed, secure_sum=secure_sum
    )


def of_a_whole(levels: int, dim: int) -> list[tuple[int, ...]]:
    """Every list of so many integers of at least 0 that add up to at most `levels`."""
    return [each for each in product(range(levels + 1), repeat=dim) if sum(each) <= levels]


def moved_rows(scale: float, r: Fraction, move: tuple[int, ...]) -> tuple[npt.NDArray[np.float64], ...]:
    """Masses of every outcome of a row of noisy coordinates, and of the same after these moves; tails of 1e-11 are cut
    off, which is far below what the comparison allows."""
    law = {x: float(mass) for x, mass in noise(scale, r).items() if mass > 1e-11}
    reach = max(law)
    p, q = np.ones(1), np.ones(1)
    for distance in move:
        places = range(-reach, reach + distance + 1)
        before = np.array([law.get(x, 0.0) for x in places])
        after = np.array([law.get(x - distance, 0.0) for x in places])
        p, q = np.outer(p, before).ravel(), np.outer(q, after).ravel()
    return p, q


def row_deltas(scale: float, r: Fraction, move: tuple[int, ...], epsilons: list[float]) -> list[float]:
    p, q = moved_rows(scale, r, move)
    return [float(np.maximum(p - math.exp(epsilon) * q, 0).sum()) for epsilon in epsilons]


@pytest.mark.parametrize(("levels", "scale", "dim"), [(1, 0.8, 2), (2, 1.5, 2), (2, 0.7, 3), (3, 2.0, 1)])
@pytest.mark.parametrize(("needed", "colluding"), [(3, 0), (2, 1), (1, 2), (2, 0), (3, 1), (3, 2)])
def test_no_two_rows_of_shares_are_above_the_account_and_whole_noise_attains_it(
    levels: int, scale: float, dim: int, needed: int, colluding: int
) -> None:
    """All pairs of one party's integers for a cell, and of lists of a whole that is as many times as large for a
    record: that is what the honest parties' integers add up to."""
    adversary, honest = Adversary(colluding_parties=colluding), 3 - colluding
    event, r = shares_event(levels, scale, needed, dim=dim), Fraction(honest, needed)
    epsilons = [0.0, *(share * 2 * levels / scale for share in (0.1, 0.4, 0.8, 0.99, 1.2))]
    for unit, cells in ((Unit.CELL, 1), (Unit.RECORD, honest)):
        losses = event.losses(unit, adversary)
        composed = compose(losses.atoms, losses.copies, 1e-9)
        allowed = [composed.delta(epsilon) for epsilon in epsilons]
        rows = of_a_whole(levels * cells, dim)
        # By symmetry of the noise only the distances count, in any order.
        moves = {tuple(sorted(abs(a - b) for a, b in zip(*pair, strict=True))) for pair in product(rows, repeat=2)}
        attained = [0.0] * len(epsilons)
        for move in moves:
            found = row_deltas(scale, r, move, epsilons)
            assert all(one <= top + 1e-9 for one, top in zip(found, allowed, strict=True)), move
            attained = [max(pair) for pair in zip(attained, found, strict=True)]
        if honest == needed:
            assert attained == pytest.approx(allowed, abs=2e-5)


@pytest.mark.parametrize(("first", "second", "scale"), [(1, 1, 0.8), (1, 4, 2.5), (3, 3, 1.7), (2, 5, 6.0)])
def test_one_coordinate_that_moves_by_the_sum_is_worse_than_two(first: int, second: int, scale: float) -> None:
    """The lemma behind it, at every epsilon where something changes, negative ones too."""
    epsilons = [step / scale / 2 for step in range(-2 * (first + second), 2 * (first + second) + 1)]
    both = row_deltas(scale, Fraction(1), (first, second), epsilons)
    one = row_deltas(scale, Fraction(1), (first + second,), epsilons)
    assert all(a <= b + 1e-9 for a, b in zip(both, one, strict=True))
    assert any(a < b - 1e-3 for a, b in zip(both, one, strict=True))


def test_a_row_of_shares_costs_the_same_however_many_coordinates_it_has() -> None:
    curves = [shares_event(8, 12.0, 3, dim=dim).rdp(Unit.CELL) for dim in (1, 2, 3, 50)]
    assert np.all(curves[0] < curves[1])
    assert np.array_equal(curves[1], curves[2])
    assert np.array_equal(curves[1], curves[3])
    plain = charged(8, 12.0, 3, dim=2)
    assert np.all(curves[1] < plain.rdp(Unit.CELL))
    pure = shares_event(8, 12.0, 3, dim=6)
    assert pure.rdp(Unit.CELL, SERVER, (1e6,))[0] == pytest.approx(2 * 8 / 12.0, rel=1e-4)
    assert pure.rdp(Unit.RECORD, SERVER, (1e6,))[0] == pytest.approx(3 * 2 * 8 / 12.0, rel=1e-4)


def test_without_a_secure_sum_a_row_of_shares_has_its_party_s_noise_alone() -> None:
    clear = shares_event(2, 1.5, 3, dim=3, secure_sum=False)
    alone = shares_event(2, 1.5, 3, dim=3).rdp(Unit.CELL, Adversary(colluding_parties=2))
    assert np.array_equal(clear.rdp(Unit.CELL), alone)
    assert clear.rdp(Unit.RECORD).tolist() == pytest.approx((3 * alone).tolist())


@settings(max_examples=100, deadline=None)
@given(
    rows=arrays.arrays(
        np.float32, st.tuples(st.integers(0, 5), st.integers(1, 7)), elements=st.floats(width=32, allow_nan=True)
    ),
    levels=st.sampled_from([1, 5, 64, 4096]),
)
def test_integers_of_a_row_are_shares_whatever_the_embedding_is(rows: Any, levels: int) -> None:
    mechanism = made(embedding_dim=rows.shape[1], levels=levels, bounded_total=True, bound=2.0)
    integers = mechanism.integers(rows)
    assert integers.shape == rows.shape
    assert np.all(integers >= 0)
    assert np.all(integers.sum(axis=1) <= levels)
    for row, found in zip(rows.tolist(), integers.tolist(), strict=True):
        left = levels
        for value, integer in zip(row, found, strict=True):
            wanted = 0 if math.isnan(value) else math.floor(min(max(value / 2.0, 0.0), 1.0) * levels)
            assert integer == min(wanted, left)
            left -= integer


def test_values_that_are_no_whole_rows_are_limited_too() -> None:
    mechanism = made(embedding_dim=3, levels=8, bounded_total=True)
    assert mechanism.integers(np.full(5, 0.5, np.float32)).tolist() == [4, 4, 0, 4, 4]
    assert mechanism.integers(np.full((), 0.5, np.float32)).tolist() == 4


# --- numbers, rings and the estimate ---


def test_its_numbers_are_checked_and_named() -> None:
    sizes: dict[str, Any] = {"num_parties": 3, "num_samples": 100, "num_classes": 2, "mechanism": "laplace"}
    bad: dict[str, list[Any]] = {
        "levels": [0, -1, 4097, 1.5, True, None, "3"],
        "scale": [0, -1.0, 0.06, 16385, math.nan, math.inf, "3", None],
        "honest_parties": [-1, 4, 1.5, True, None],
        "bounded_total": [0, 1, None, "yes"],
    }
    for name, values in bad.items():
        for value in values:
            with pytest.raises(PlanError, match=f"{name}="):
                Plan.of(**sizes, **{name: value})
    for numbers in ({"levels": 0}, {"scale": 0.0}, {"noisy_parties": 0}):
        event = PolyaLaplaceRelease(
            **{"num_parties": 3, "embedding_dim": 1, "levels": 1, "scale": 1.0, "noisy_parties": 3, **numbers}  # type: ignore[arg-type]
        )
        with pytest.raises(PlanError, match="permitted: all above 0"):
            event.rdp(Unit.CELL)
        with pytest.raises(PlanError, match="permitted: all above 0"):
            event.losses(Unit.CELL)


@pytest.mark.parametrize(("parties", "honest", "scale"), [(3, 3, 2.5), (4, 2, 2.5), (6, 2, 1.0), (2, 2, 20.0)])
def test_a_sum_wraps_around_with_at_most_the_stated_probability(parties: int, honest: int, scale: float) -> None:
    mechanism = made(parties=parties, honest_parties=honest, scale=scale, levels=5)
    room = (1 << mechanism.ring.bits) // 2 - parties * 5
    law = noise(scale, Fraction(parties, honest))
    with mpmath.workdps(DIGITS):
        outside = mpmath.fsum(mass for x, mass in law.items() if abs(x) >= room)
    assert outside <= mpmath.mpf(2) ** -40
    needed = mechanism._largest_noise
    with mpmath.workdps(DIGITS):  # and no more room is made than a few times the noise
        assert mpmath.fsum(mass for x, mass in law.items() if abs(x) > needed // 2) > mpmath.mpf(2) ** -40


def test_the_widest_plan_of_all_still_has_a_ring() -> None:
    widest = PolyaLaplace(num_parties=0xFFFE, levels=4096, scale=16384.0, honest_parties=1, secure_aggregation=True)
    assert widest.ring.bits <= 32


@pytest.mark.parametrize("secure", [True, False])
def test_negative_sums_are_read_as_such(secure: bool) -> None:
    mechanism = made(levels=2, bound=3.0, secure_aggregation=secure)
    size = 1 << mechanism.ring.bits
    totals = np.array([0, 1, 2, size - 1, size - 5, size // 2 - 1, size // 2], dtype=mechanism.ring.dtype)
    signed = [0, 1, 2, -1, -5, size // 2 - 1, -size // 2]
    assert mechanism.estimate(totals).tolist() == [1.5 * each for each in signed]


def test_a_coordinate_becomes_the_nearest_level() -> None:
    mechanism = made(levels=4, bound=2.0)
    values = np.array([-9, -2, -1.76, -1.74, -0.2, 0, 0.24, 0.26, 1.9, 2, 9, np.nan], dtype=np.float32)
    assert mechanism.integers(values).tolist() == [-4, -4, -4, -3, 0, 0, 0, 1, 4, 4, 4, 0]


# --- what it is used for ---


def test_a_federation_learns_with_it_and_its_books_have_its_price(data: Any, make_plan: Any, tmp_path: Any) -> None:
    plan = make_plan(data, mechanism="laplace", scale=20.0, honest_parties=2, embedding_dim=8, num_epochs=40)
    limit = Limit.choose(unit="cell", accounting="paper", epsilon=1e6, delta=DELTA, order=3.0)
    for party in range(3):
        book = Ledger(tmp_path / f"party-{party}.sqlite")
        book.set_limit("small", limit)
        book.close()
    result = Federation(plan).fit(data, ledger=tmp_path, exact_metrics=True)
    assert result.metrics["train_accuracy"] > 0.8  # guessing one of the three classes: 0.33
    assert result.traffic == plan.traffic()
    with mpmath.workdps(DIGITS):
        a, p, d = mpmath.mpf(3), mpmath.exp(mpmath.mpf(-1) / 20), 128
        tails = p ** (-2 * d) / (1 - p) + p ** (3 * d) / (1 - p)
        middle = mpmath.fsum(p ** (3 * x - 2 * (d - x)) for x in range(1, d))
        spent = 40 * 8 * mpmath.log((tails + middle) * (1 - p) / (1 + p)) / 2
        expected = float(spent + mpmath.log(1 - 1 / a) - mpmath.log(DELTA * a) / (a - 1))
    for party in range(3):
        book = Ledger(tmp_path / f"party-{party}.sqlite", read_only=True)
        (kept,) = book.export()["datasets"]["small"]["limits"]
        (entry,) = book.sessions("small")
        book.close()
        assert kept["spent_epsilon"] == pytest.approx(expected, rel=1e-7)
        assert entry.terms.words == "discrete Laplace D=64, s=20, 2 honest P=8 M=3"


@pytest.mark.parametrize(("training", "prediction"), [("krr", "laplace"), ("laplace", "pbm"), ("laplace", "krr")])
def test_predictions_may_be_released_by_another_mechanism(
    training: str, prediction: str, data: Any, make_plan: Any, tmp_path: Any
) -> None:
    plan = make_plan(data, mechanism=training, evaluation="released", prediction_mechanism=prediction)
    assert plan == Plan.from_json(plan.to_json()) == Plan.of(**plan.flat())
    assert (plan.mechanism, plan.prediction.name) == (training, prediction)
    result = Federation(plan).fit(data, ledger=tmp_path, exact_metrics=True)
    assert result.traffic == plan.traffic()
    assert 0 <= result.metrics["test_accuracy"] <= 1
    assert plan.training_run().releases == (plan.release.event, plan.prediction.event)
    book = Ledger(tmp_path / "party-0.sqlite", read_only=True)
    (entry,) = book.sessions("small")
    book.close()
    named = {event.name for events in entry.terms.events.values() for event in events}
    assert {plan.release.event.name, plan.prediction.event.name} <= named


def test_unmasked_sums_are_the_same_law(data: Any, make_plan: Any) -> None:
    plan = make_plan(data, mechanism="laplace", scale=1.0, secure_aggregation=False, num_epochs=30, embedding_dim=8)
    assert Federation(plan).fit(data).metrics["train_accuracy"] > 0.8
    assert plan.release.event.rdp(Unit.CELL, SERVER)[0] > 0


@pytest.mark.parametrize(
    "choices", [{"mechanism": "laplace", "scale": 8.0}, {"mechanism": "krr", "symbols": 9}], ids=str
)
def test_a_simulation_learns_with_either_and_again_the_same(choices: dict[str, Any], data: Any, make_plan: Any) -> None:
    plan = make_plan(data, **choices, response_epsilon=6.0, embedding_dim=8, num_epochs=40)
    history, again = (Simulation(plan, data).fit() for _ in range(2))
    assert [line["train_loss"] for line in history] == [line["train_loss"] for line in again]
    assert history[-1]["train_accuracy"] > 0.8
