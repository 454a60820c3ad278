"""One file adds a mechanism: it is planned, accounted, drawn, sent, simulated, charged, trained with and printed.

Nothing else in the package knows of `toy_mechanism`. Its epsilons are checked against sums over all outcomes, in
fractions and mpmath, that share no code with it or with the account.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from typing import Any, ClassVar

import mpmath
import numpy as np
import pytest

from pbmvfl import Federation, Ledger, Limit, Plan
from pbmvfl.errors import LedgerError, PlanError
from pbmvfl.ledger.session_terms import SessionTerms
from pbmvfl.mechanisms import MECHANISMS
from pbmvfl.privacy.events import EVENTS
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.research.simulation import Simulation
from support.federation_runs import make_ledgers
from support.mechanism_conformance import MechanismConformance
from support.toy_mechanism import OneBit, OneBitRelease, registered

DELTA = 1e-5
SIZES: dict[str, Any] = {"num_parties": 3, "num_samples": 100, "num_classes": 2, "mechanism": "toy"}


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    with registered():
        yield


class TestOneBit(MechanismConformance):
    name = "toy"
    choices: ClassVar[dict[str, Any]] = {"flips": 40}
    others: ClassVar[dict[str, Any]] = {"flips": 41}


class TestOneBitInClear(TestOneBit):
    choices: ClassVar[dict[str, Any]] = {"flips": 100, "secure_aggregation": False}


# --- oracles ---


def law_of_sum(probabilities: list[Fraction]) -> list[Fraction]:
    """Of independent bits, by adding up every outcome."""
    law = [Fraction(0)] * (len(probabilities) + 1)
    for outcome in product((0, 1), repeat=len(probabilities)):
        law[sum(outcome)] += math.prod(
            (p if bit else 1 - p for p, bit in zip(probabilities, outcome, strict=True)), start=Fraction(1)
        )
    return law


def pairs(flips: int, parties: int) -> list[tuple[list[Fraction], list[Fraction]]]:
    """The sum's laws with the cell at either end, for everything that the others' bits can be."""
    f = Fraction(flips, 256)
    found = []
    for others in product((f, 1 - f), repeat=parties - 1):
        high, low = law_of_sum([1 - f, *others]), law_of_sum([f, *others])
        found += [(high, low), (low, high)]
    return found


def divergence(flips: int, parties: int, order: float) -> mpmath.mpf:
    """Of one coordinate, by the definition of Renyi's divergence."""
    a = mpmath.mpf(order)
    with mpmath.workdps(40):
        return max(
            mpmath.log(
                mpmath.fsum(
                    (mpmath.mpf(x.numerator) / x.denominator) ** a
                    * (mpmath.mpf(y.numerator) / y.denominator) ** (1 - a)
                    for x, y in zip(p, q, strict=True)
                )
            )
            / (a - 1)
            for p, q in pairs(flips, parties)
        )


@functools.cache
def epsilon_of_bits(flips: int, count: int, delta: float) -> float:
    """The least epsilon of so many bits that are turned over, by its definition and by halving."""
    kept = mpmath.mpf(256 - flips) / 256

    def delta_at(epsilon: mpmath.mpf) -> mpmath.mpf:
        terms = (
            mpmath.binomial(count, i)
            * max(kept**i * (1 - kept) ** (count - i) - mpmath.exp(epsilon) * kept ** (count - i) * (1 - kept) ** i, 0)
            for i in range(count + 1)
        )
        return mpmath.fsum(terms)

    low, high = mpmath.mpf(0), count * mpmath.log(kept / (1 - kept))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if delta_at(middle) <= delta else (middle, high)
    return float(high)


def epsilon_of_sums(flips: int, parties: int, uses: int, delta: float) -> float:
    """The least epsilon of every sequence of sums, the others' bits the same in all of them: less than what a bound
    must cover, and close to it."""
    found = 0.0
    for p, q in pairs(flips, parties):
        first = np.array([float(math.prod(xs)) for xs in product(p, repeat=uses)])
        second = np.array([float(math.prod(xs)) for xs in product(q, repeat=uses)])
        best = np.argsort(second / first)  # the best set against any epsilon holds the first of these
        in_first, in_second = np.cumsum(first[best]), np.cumsum(second[best])
        enough = in_first > delta
        found = max(found, float(np.max(np.log((in_first[enough] - delta) / in_second[enough]))))
    return found


# --- known, and forgotten ---


def test_it_is_known_only_while_it_is_registered() -> None:
    plan = Plan.of(**SIZES)
    assert isinstance(plan.release, OneBit)
    written, terms = plan.to_json(), SessionTerms.of(plan, public_start=True).to_json()
    MECHANISMS.forget("toy")
    EVENTS.forget("toy-one-bit")
    try:
        with pytest.raises(PlanError, match=r"mechanism='toy' is not one of"):
            Plan.from_json(written)
        with pytest.raises(PlanError, match=r"unknown plan field 'flips'"):
            Plan.of(num_parties=3, num_samples=100, num_classes=2, flips=3)
        with pytest.raises(LedgerError, match=r"cannot price .*event='toy-one-bit' is not one of"):
            SessionTerms.from_json(terms)
    finally:
        MECHANISMS.add("toy", OneBit)
        EVENTS.add("toy-one-bit", OneBitRelease)
    assert Plan.from_json(written) == plan
    assert SessionTerms.from_json(terms) == SessionTerms.of(plan, public_start=True)


def test_its_own_number_is_checked_like_any_other() -> None:
    for bad in (0, 128, -1, 1.5, "3", True, None):
        with pytest.raises(PlanError, match=r"flips="):
            Plan.of(**SIZES, flips=bad)
    with pytest.raises(PlanError, match=r"unknown plan field 'flip'; did you mean flips\?"):
        Plan.of(**SIZES, flip=3)


# --- accounted ---


@pytest.mark.parametrize("flips", [1, 40, 127])
@pytest.mark.parametrize("parties", [2, 3, 5])
def test_its_curve_is_the_definition_s_for_every_outcome(flips: int, parties: int) -> None:
    for secure_sum in (True, False):
        event = OneBitRelease(num_parties=parties, embedding_dim=3, flips=flips, secure_sum=secure_sum)
        orders = (1.01, 2.0, 7.5, 200.0)
        for order, value in zip(orders, event.rdp(Unit.CELL, orders=orders), strict=True):
            truth = 3 * divergence(flips, parties if secure_sum else 1, order)
            assert truth <= value <= truth * (1 + mpmath.mpf("2e-9"))
        for order, value in zip(orders, event.rdp(Unit.RECORD, orders=orders), strict=True):
            truth = 3 * parties * divergence(flips, 1, order)
            assert truth <= value <= truth * (1 + mpmath.mpf("2e-9"))


@pytest.mark.parametrize(("flips", "epochs", "embedding_dim"), [(100, 5, 2), (64, 3, 1), (120, 40, 4), (5, 1, 3)])
def test_in_clear_a_plan_s_epsilon_is_that_of_its_bits(flips: int, epochs: int, embedding_dim: int) -> None:
    plan = Plan.of(**SIZES, flips=flips, num_epochs=epochs, embedding_dim=embedding_dim, secure_aggregation=False)
    table = plan.privacy(delta=DELTA)
    for unit, bits in (("cell", epochs * embedding_dim), ("record", 3 * epochs * embedding_dim)):
        truth = epsilon_of_bits(flips, bits, DELTA)
        # A reported epsilon is rounded up by up to 1e-5 of itself.
        assert truth * (1 - 1e-12) <= table.epsilon(unit, "paper") <= truth * (1 + 2e-4)


@pytest.mark.parametrize(("flips", "parties", "uses"), [(64, 2, 3), (100, 3, 5), (120, 2, 6), (20, 4, 2)])
def test_behind_a_secure_sum_epsilon_lies_between_that_of_the_sums_and_that_of_the_bits(
    flips: int, parties: int, uses: int
) -> None:
    plan = Plan.of(**{**SIZES, "num_parties": parties}, flips=flips, num_epochs=uses, embedding_dim=1)
    reported = plan.privacy(delta=DELTA).epsilon("cell", "paper")
    assert epsilon_of_sums(flips, parties, uses, DELTA) <= reported
    assert reported <= epsilon_of_bits(flips, uses, DELTA) * (1 + 2e-4)


# --- planned ---


@pytest.mark.parametrize("epsilon", [2.0, 8.0, 30.0])
def test_the_planner_finds_the_fewest_flips_that_a_budget_allows(epsilon: float) -> None:
    choices = {**SIZES, "num_epochs": 4, "embedding_dim": 2, "secure_aggregation": False}
    plan = Plan.for_budget(epsilon=epsilon, delta=DELTA, unit="cell", accounting="paper", **choices)
    assert isinstance(plan.release, OneBit)
    allowed = [flips for flips in range(1, 128) if epsilon_of_bits(flips, 8, DELTA) <= epsilon]
    assert plan.release.flips == min(allowed)


def test_a_budget_that_it_cannot_meet_is_refused_in_its_own_words() -> None:
    with pytest.raises(PlanError, match=r"no plan is within .* even flips=127, embedding_dim=2.*It would take"):
        Plan.for_budget(epsilon=0.001, delta=DELTA, unit="cell", accounting="paper", **SIZES, embedding_dim=2)


# --- drawn ---


@pytest.mark.parametrize("flips", [1, 40, 127])
def test_a_bit_is_one_for_exactly_the_share_of_all_random_words_that_the_law_says(flips: int) -> None:
    class EveryWord:
        seeded = True

        def fill(self, buffer: np.ndarray) -> None:
            buffer[:] = np.arange(65536, dtype=np.uint16)

    mechanism = OneBit(num_parties=2, embedding_dim=1, flips=flips, bound=2.0)
    for x in (Fraction(-2), Fraction(-1), Fraction(0), Fraction(3, 2), Fraction(2), Fraction(9)):
        ones = mechanism.randomize(np.full(65536, float(x), dtype=np.float32), EveryWord()).sum()
        unit = max(Fraction(-1), min(Fraction(1), x / 2))
        f = Fraction(flips, 256)
        assert ones == 65536 * ((1 + unit) / 2 * (1 - f) + (1 - unit) / 2 * f)


# --- simulated, trained with, charged and printed ---


def test_a_simulation_learns_with_it(data, make_plan) -> None:
    plan = make_plan(data, mechanism="toy", flips=2, embedding_dim=16, num_epochs=40)
    history, again = (Simulation(plan, data).fit() for _ in range(2))
    assert [line["train_loss"] for line in history] == [line["train_loss"] for line in again]
    assert history[-1]["train_accuracy"] > 0.8  # guessing one of the three classes: 0.33


def mask_free_sum(plan: Plan, payloads: list[bytes], count: int) -> list[int]:
    """Little-endian integers of the ring's bits, added up modulo its size: the documented layout, by hand."""
    bits = plan.num_parties.bit_length()
    total = [0] * count
    for payload in payloads:
        number = int.from_bytes(payload, "little")
        for i in range(count):
            total[i] = (total[i] + (number >> (bits * i))) % (1 << bits)
    return total


def test_a_federation_learns_with_it_sends_it_masked_and_its_books_have_its_price(data, make_plan, tmp_path) -> None:
    plan = make_plan(data, mechanism="toy", flips=2, embedding_dim=16, num_epochs=40)
    limit = Limit.choose(unit="cell", accounting="paper", epsilon=1e6, delta=DELTA, order=3.0)
    for party in range(3):
        book = Ledger(tmp_path / f"party-{party}.sqlite")
        book.set_limit("small", limit)
        book.close()
    federation = Federation(plan)
    sent: list[tuple[int, bytes]] = []
    federation.taps.append(lambda _, party, message: sent.append((party, message)) if message[5] == 6 else None)
    result = federation.fit(data, ledger=tmp_path, exact_metrics=True)
    # trained
    assert result.metrics["train_accuracy"] > 0.8
    assert result.traffic == plan.traffic()
    # sent: two bits a coordinate hold every sum of three bits, and every sum is one
    rounds = len(plan.schedule)
    assert len(sent) == 3 * rounds
    for number in (0, rounds - 1):
        messages = sent[3 * number : 3 * number + 3]
        count = plan.schedule.num_rows(number) * 16
        assert all(len(message) == 44 + math.ceil(2 * count / 8) for _, message in messages)
        sums = mask_free_sum(plan, [message[44:] for _, message in messages], count)
        assert set(sums) <= {0, 1, 2, 3}
        assert 0.2 < np.mean(sums) / 3 < 0.8
    # charged: every row forty times, sixteen coordinates each, at the limit's order
    a = mpmath.mpf(3)
    spent = 40 * 16 * divergence(2, 3, 3.0)
    expected = float(spent + mpmath.log(1 - 1 / a) - mpmath.log(DELTA * a) / (a - 1))
    for party in range(3):
        book = Ledger(tmp_path / f"party-{party}.sqlite", read_only=True)
        (kept,) = book.export()["datasets"]["small"]["limits"]
        (entry,) = book.sessions("small")
        book.close()
        assert kept["spent_epsilon"] == pytest.approx(expected, rel=1e-8)
        assert entry.row_releases == 40 * 37
        # printed
        assert entry.terms.words == "one bit, 2 of 256 turned over P=16 M=3"
    assert result.privacy() == plan.privacy()


def test_a_limit_ends_a_run_with_it_where_the_price_says(data, make_plan, tmp_path) -> None:
    plan = make_plan(data, mechanism="toy", flips=100, embedding_dim=2, num_epochs=5)
    a, order = mpmath.mpf(4), 4.0
    two_uses = 2.5 * 2 * divergence(100, 3, order)  # and a half, so that rounding decides nothing
    epsilon = float(two_uses + mpmath.log(1 - 1 / a) - mpmath.log(DELTA * a) / (a - 1))
    make_ledgers(tmp_path, data.party_names)
    book = Ledger(tmp_path / "party-1.sqlite")
    book.set_limit("small", Limit.choose(unit="cell", accounting="paper", epsilon=epsilon, delta=DELTA, order=order))
    book.close()
    result = Federation(plan).fit(data, ledger=tmp_path, exact_metrics=True, until_limit=True)
    assert "its owner's limit is cell, paper" in result.stopped
    (session,) = result.sessions
    assert session.charged_until == 2 * 4 + 1  # two epochs of four rounds, and the one that was refused


def test_it_is_printed(capsys) -> None:
    plan = Plan.of(**SIZES, flips=100, num_epochs=2, embedding_dim=2)
    print(plan.privacy())
    printed = capsys.readouterr().out.splitlines()
    epsilon = plan.privacy().epsilon(Unit.CELL, Accounting.PAPER)
    row = next(line for line in printed if line.startswith("cell") and "paper" in line and " server " in line)
    shown = float(row.split()[4] if row.split()[2] == "*" else row.split()[3])
    assert epsilon <= shown <= 1.01 * epsilon
    assert plan.release.describe() == "one bit, 100 of 256 turned over"
    assert "every bit is turned over by itself" in plan.privacy().conditions
