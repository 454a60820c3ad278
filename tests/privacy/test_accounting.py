"""What is charged to which unit, and the figures that follow. No expected figure here comes from running the code."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.errors import PlanError
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import (
    COUPLED_ROWS,
    LABELS_PUBLIC,
    NOT_A_PROOF,
    OWN_ROW,
    WEIGHTS_STAY,
    Activity,
    TrainingRun,
    charges,
    epsilon_bound,
    epsilon_bounds,
    rdp_curve,
)
from pbmvfl.privacy.events import (
    CLIP_LAST,
    NO_SECURE_SUM,
    ExactRelease,
    LocalGaussianRelease,
    NoisyUpdate,
    PlainUpdate,
    PoissonBinomialRelease,
    ReleaseEvent,
)
from pbmvfl.privacy.orders import ORDERS
from pbmvfl.privacy.renyi import cell_rdp
from pbmvfl.privacy.units import CURIOUS_PARTY, SERVER, Accounting, Adversary, Unit
from support.training_runs import training_run

DELTA = 1e-5


def pbm_run(
    num_parties: int,
    num_trials: int,
    beta: float,
    embedding_dim: int,
    num_epochs: int,
    *,
    num_samples: int = 1000,
    batch_size: int = 100,
    update: NoisyUpdate | None = None,
    secure_aggregation: bool = True,
) -> TrainingRun:
    event = PoissonBinomialRelease(
        num_trials=num_trials,
        beta=beta,
        num_parties=num_parties,
        embedding_dim=embedding_dim,
        secure_sum=secure_aggregation,
    )
    return training_run(
        num_samples=num_samples, batch_size=batch_size, num_epochs=num_epochs, event=event, update=update
    )


def counted(run: TrainingRun, unit: Unit, accounting: Accounting, adversary: Adversary = SERVER) -> tuple[int, int]:
    """(releases, updates) that are charged to a unit of a run that has one sort of rows."""
    (one_sort,) = charges(run, unit, accounting, adversary)
    releases = sum(count for count, event in one_sort if isinstance(event, ReleaseEvent))
    return releases, sum(count for count, event in one_sort if not isinstance(event, ReleaseEvent))


CIFAR = pbm_run(4, 16, 0.1, 16, 41, num_samples=50_000)
SMALL = pbm_run(5, 2, 0.05, 16, 9)


def epsilons(run: TrainingRun, unit: Unit, accounting: Accounting = Accounting.PAPER) -> tuple[float, float]:
    """(by RDP alone, as reported)."""
    alone = epsilon_bound(run, unit, accounting, delta=DELTA, pld=False)
    assert alone.method == "rdp"
    return alone.epsilon, epsilon_bound(run, unit, accounting, delta=DELTA).epsilon


@pytest.mark.parametrize(
    ("run", "unit", "least", "most"),
    [
        (CIFAR, Unit.CELL, 319.9, 321),
        (pbm_run(5, 8, 0.15, 16, 86), Unit.CELL, 588, 593),
        (pbm_run(5, 1, 0.25, 1, 5), Unit.CELL, 5.475, 5.485),
        (CIFAR, Unit.RECORD, 3788, 3796),
    ],
)
def test_what_the_printed_settings_cost(run: TrainingRun, unit: Unit, least: float, most: float) -> None:
    by_rdp, reported = epsilons(run, unit)
    assert least <= by_rdp <= most
    assert reported <= by_rdp


def renyi_of_sums(first: list[mpmath.mpf], second: list[mpmath.mpf], order: float) -> mpmath.mpf:
    a = mpmath.mpf(order)
    return mpmath.log(mpmath.fsum(y * (x / y) ** a for x, y in zip(first, second, strict=True))) / (a - 1)


def laws_of_a_cell(num_bits: int, num_trials: int, beta_16: int, k: int) -> list[list[mpmath.mpf]]:
    """The sum of all parties' bits when the cell's own are likelier one, and when they are likelier zero; k of the
    others' are likelier one."""
    hi = mpmath.mpf(32768 + beta_16) / 65536
    laws = []
    for high in (num_trials + k, k):
        law = [mpmath.mpf(1)]
        for bit in range(num_bits):
            p = hi if bit < high else 1 - hi
            law = [a * (1 - p) + c * p for a, c in zip([*law, 0], [0, *law], strict=True)]
        laws.append(law)
    return laws


@pytest.mark.parametrize(
    ("sizes", "sigma"),
    [
        ((4, 16, 0.1, 16, 41), None),
        ((5, 8, 0.15, 16, 86), None),
        ((5, 1, 0.25, 1, 5), None),
        ((5, 1, 0.18, 1, 10), 6.3),
    ],
)
def test_a_cell_costs_what_the_definition_says_in_mpmath(sizes: tuple[int, ...], sigma: float | None) -> None:
    """The least epsilon over the orders, each divergence from the laws of the sums by the definition."""
    num_parties, num_trials, beta, embedding_dim, num_epochs = sizes
    update = None if sigma is None else NoisyUpdate(clip_norm=1.0, noise_multiplier=sigma)
    accounting = Accounting.PAPER if sigma is None else Accounting.STRICT
    ours = epsilon_bound(pbm_run(*sizes, update=update), Unit.CELL, accounting, delta=DELTA, pld=False)
    with mpmath.workdps(30):
        pairs = [
            laws_of_a_cell(num_parties * num_trials, num_trials, int(beta * 65536), k)
            for k in range(num_trials * (num_parties - 1) + 1)
        ]

        def epsilon(order: float, pairs: list[list[list[mpmath.mpf]]]) -> float:
            one = max(renyi_of_sums(*laws, order) for pair in pairs for laws in (pair, pair[::-1]))
            noise = 0 if sigma is None else 2 * mpmath.mpf(order) / mpmath.mpf(sigma) ** 2
            divergence = num_epochs * (embedding_dim * one + noise)
            a = mpmath.mpf(order)
            return float(divergence + mpmath.log((a - 1) / a) - mpmath.log(DELTA * a) / (a - 1))

        assert ours.order is not None
        assert ours.epsilon == pytest.approx(epsilon(ours.order, pairs), rel=1e-8)
        # no other order is better, even if only the first of the pairs counted
        assert min(epsilon(order, pairs[:1]) for order in ORDERS) >= ours.epsilon * (1 - 1e-8)


def test_a_record_costs_what_the_definition_says_in_mpmath() -> None:
    """All bits of a record move, each by itself: 41 epochs of 16 coordinates of 4 * 16 bits."""
    ours = epsilon_bound(CIFAR, Unit.RECORD, Accounting.PAPER, delta=DELTA, pld=False)
    lo, hi = mpmath.mpf(32768 - 6553) / 65536, mpmath.mpf(32768 + 6553) / 65536

    def epsilon(order: float) -> float:
        a = mpmath.mpf(order)
        divergence = 41 * 16 * 64 * mpmath.log(hi**a * lo ** (1 - a) + lo**a * hi ** (1 - a)) / (a - 1)
        return float(divergence + mpmath.log((a - 1) / a) - mpmath.log(DELTA * a) / (a - 1))

    with mpmath.workdps(30):
        assert ours.epsilon == pytest.approx(min(epsilon(order) for order in ORDERS), rel=1e-8)


def test_reported_epsilon_uses_a_law_that_dominates() -> None:
    reported = epsilon_bound(SMALL, Unit.CELL, Accounting.PAPER, delta=DELTA)
    # 7.245 is what one fixed pair reaches
    assert 7.245 <= reported.epsilon <= 7.41
    assert reported.method == "pld"
    assert reported.order is None


def test_strict_cell_with_noisy_updates() -> None:
    update = NoisyUpdate(clip_norm=1.0, noise_multiplier=6.3)
    run = pbm_run(5, 1, 0.18, 1, 10, update=update)
    by_rdp, reported = epsilons(run, Unit.CELL, Accounting.STRICT)
    assert 7.9 <= by_rdp <= 8.0
    assert reported <= by_rdp
    # E * (P * rdp_pbm + 2 * alpha / sigma^2) with the curve of one coordinate
    orders = (2.0, 5.0)
    expected = 10 * (cell_rdp(1, 11796, 5, orders) + 2 * np.array(orders) / 6.3**2)
    np.testing.assert_allclose(rdp_curve(run, Unit.CELL, Accounting.STRICT, orders=orders), expected, rtol=1e-8)


def test_cell_grows_and_record_falls_with_colluders_until_they_agree() -> None:
    for pld in (False, True):
        cell, record = (
            [
                epsilon_bound(SMALL, unit, Accounting.PAPER, Adversary(colluding_parties=t), delta=DELTA, pld=pld)
                for t in range(5)
            ]
            for unit in (Unit.CELL, Unit.RECORD)
        )
        assert all(a.epsilon < b.epsilon for a, b in itertools.pairwise(cell))
        assert all(a.epsilon > b.epsilon for a, b in itertools.pairwise(record))
        assert cell[-1].epsilon == pytest.approx(record[-1].epsilon, rel=1e-9)


def test_strict_agrees_between_units_when_one_honest_party_is_left() -> None:
    run = pbm_run(3, 1, 0.1, 2, 4, update=NoisyUpdate(clip_norm=1.0, noise_multiplier=5.0))
    alone = Adversary(colluding_parties=2)
    cell, record = (
        epsilon_bound(run, unit, Accounting.STRICT, alone, delta=DELTA) for unit in (Unit.CELL, Unit.RECORD)
    )
    assert cell.epsilon == pytest.approx(record.epsilon, rel=1e-9)


def brute_force_count(num_samples: int, batch_size: int, num_epochs: int) -> tuple[int, int, int]:
    """(own releases, releases from the unit's first use on with the first round's other rows left out, all)."""
    own = dependent = everything = 0
    touched = False
    for _ in range(num_epochs):
        rows = list(range(num_samples))
        while rows:
            batch, rows = rows[:batch_size], rows[batch_size:]
            for row in batch:
                everything += 1
                own += row == 0
                dependent += row == 0 or touched
            touched = touched or 0 in batch
    return own, dependent, everything


@given(n=st.integers(1, 30), size=st.integers(1, 40), epochs=st.integers(0, 4))
@settings(max_examples=100, deadline=None)
def test_counts_equal_a_walk_through_the_schedule(n: int, size: int, epochs: int) -> None:
    run = pbm_run(3, 1, 0.1, 1, epochs, num_samples=n, batch_size=size)
    own, dependent, everything = brute_force_count(n, size, epochs)
    for unit in (Unit.CELL, Unit.RECORD):
        assert counted(run, unit, Accounting.PAPER) == (own, 0)
        assert counted(run, unit, Accounting.STRICT) == (dependent, 0)
    for accounting in Accounting:
        assert counted(run, Unit.PARTY, accounting) == (everything, 0)


def test_full_batches_give_the_formula_of_the_theory() -> None:
    # 1 + (T - 1) * B with T = 41 * 500 rounds of 100 rows
    assert counted(CIFAR, Unit.CELL, Accounting.STRICT) == (1 + (41 * 500 - 1) * 100, 0)


def test_evaluations_and_predictions_are_charged() -> None:
    event = PoissonBinomialRelease(num_trials=1, beta=0.1, num_parties=3, embedding_dim=1)
    update = NoisyUpdate(clip_norm=1.0, noise_multiplier=4.0)
    plain, noisy = (
        training_run(
            num_samples=20,
            batch_size=5,
            num_epochs=2,
            event=event,
            extra_row_releases=3,
            extra_releases=50,
            update=chosen,
        )
        for chosen in (None, update)
    )
    assert counted(plain, Unit.CELL, Accounting.PAPER) == (5, 0)
    assert counted(plain, Unit.CELL, Accounting.STRICT) == (1 + 35 + 50, 0)
    assert counted(plain, Unit.PARTY, Accounting.STRICT) == (40 + 50, 0)
    assert counted(noisy, Unit.CELL, Accounting.STRICT) == (5, 2)
    assert counted(noisy, Unit.RECORD, Accounting.STRICT) == (5, 6)
    assert counted(noisy, Unit.RECORD, Accounting.STRICT, Adversary(colluding_parties=1)) == (5, 4)
    # weights stay home: a party's updates are not seen, its releases are
    assert counted(noisy, Unit.PARTY, Accounting.STRICT) == (90, 0)


def test_table_has_every_unit_and_accounting_for_each_adversary() -> None:
    table = epsilon_bounds(SMALL, delta=DELTA, adversaries=(SERVER, CURIOUS_PARTY))
    assert len(table) == 12
    assert len({(row.unit, row.accounting, row.adversary) for row in table}) == 12
    by_key = {(row.unit, row.accounting, row.adversary): row for row in table}
    for unit in (Unit.CELL, Unit.RECORD):
        paper, strict = (by_key[unit, accounting, SERVER] for accounting in (Accounting.PAPER, Accounting.STRICT))
        assert paper.epsilon < strict.epsilon
        assert NOT_A_PROOF in paper.conditions
        assert NOT_A_PROOF not in strict.conditions
        assert WEIGHTS_STAY in strict.conditions
    assert all(LABELS_PUBLIC in row.conditions and row.delta == DELTA for row in table)


def test_a_bound_is_plain_values_for_machines() -> None:
    row = epsilon_bound(
        SMALL, Unit.RECORD, Accounting.STRICT, Adversary(server=False, colluding_parties=2), delta=DELTA
    )
    plain = row.to_dict()
    assert (plain["unit"], plain["accounting"], plain["adversary"]) == ("record", "strict", "party")
    assert (plain["colluding_parties"], plain["epsilon"], plain["delta"]) == (2, row.epsilon, DELTA)
    assert plain["method"] in ("rdp", "pld")
    assert json.loads(json.dumps(plain)) == plain


def test_conditions_follow_the_run() -> None:
    update = NoisyUpdate(clip_norm=1.0, noise_multiplier=4.0)
    noisy = epsilon_bound(pbm_run(3, 1, 0.1, 1, 2, update=update), Unit.CELL, Accounting.STRICT, delta=DELTA)
    assert CLIP_LAST in noisy.conditions
    assert WEIGHTS_STAY not in noisy.conditions
    clear = pbm_run(3, 1, 0.1, 1, 2, secure_aggregation=False)
    assert NO_SECURE_SUM in epsilon_bound(clear, Unit.CELL, Accounting.STRICT, delta=DELTA).conditions


@pytest.mark.parametrize("unit", list(Unit))
def test_every_bound_says_whether_a_row_s_embedding_is_its_own(unit: Unit) -> None:
    for accounting in Accounting:
        apart = epsilon_bound(SMALL, unit, accounting, delta=DELTA, pld=False).conditions
        coupled = epsilon_bound(
            replace(SMALL, rows_together=SMALL.first_batch), unit, accounting, delta=DELTA, pld=False
        ).conditions
        assert OWN_ROW in apart
        assert COUPLED_ROWS not in apart
        assert OWN_ROW not in coupled
        assert (COUPLED_ROWS in coupled) == (unit is not Unit.PARTY)


def test_noisy_updates_of_an_encoder_that_couples_rows_have_no_account() -> None:
    """One row moves every clipped gradient of its batch: the sum by up to 2cB, where the noise is for 2c."""
    update = NoisyUpdate(clip_norm=1.0, noise_multiplier=5.0)
    words = r"couples the rows.*use encoder=resnet18, which normalises by groups"
    event = SMALL.releases[0]
    with pytest.raises(PlanError, match=words):
        training_run(event=event, update=update, couples_rows=True)
    assert training_run(event=event, update=update, couples_rows=False)
    assert training_run(event=event, couples_rows=True)
    sizes = {"num_parties": 4, "num_samples": 1000, "num_classes": 10, "num_trials": 1, "beta": 0.05, "num_epochs": 1}
    with pytest.raises(PlanError, match=f"noise_multiplier=5 .*{words}"):
        Plan.of(**sizes, noise_multiplier=5.0, encoder="resnet18-batchnorm").privacy()
    assert Plan.of(**sizes, noise_multiplier=5.0, encoder="resnet18").privacy().epsilon("cell", "strict") < 10
    assert Plan.of(**sizes, encoder="resnet18-batchnorm").privacy().epsilon("cell", "strict") < math.inf


def test_without_secure_aggregation_a_cell_is_charged_as_if_all_others_colluded() -> None:
    clear = pbm_run(5, 2, 0.05, 16, 9, secure_aggregation=False)
    alone = Adversary(colluding_parties=4)
    for accounting in Accounting:
        expected = epsilon_bound(SMALL, Unit.CELL, accounting, alone, delta=DELTA).epsilon
        assert epsilon_bound(clear, Unit.CELL, accounting, delta=DELTA).epsilon == expected
        assert (
            epsilon_bound(clear, Unit.RECORD, accounting, delta=DELTA).epsilon
            == epsilon_bound(SMALL, Unit.RECORD, accounting, delta=DELTA).epsilon
        )


@pytest.mark.parametrize("accounting", list(Accounting))
@pytest.mark.parametrize("unit", list(Unit))
def test_exact_embeddings_are_infinite_for_every_unit(unit: Unit, accounting: Accounting) -> None:
    event: ReleaseEvent = ExactRelease(num_parties=2, embedding_dim=4)
    run = training_run(num_samples=10, batch_size=5, event=event)
    answer = epsilon_bound(run, unit, accounting, delta=DELTA)
    assert answer.epsilon == math.inf
    assert answer.order is None


def test_local_noise_of_the_paper_against_the_closed_form() -> None:
    # shift mu: delta = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu); at mu = 1 and eps = 1 it is 0.126936737506...
    event = LocalGaussianRelease(variance=4.0, bound=1.0, num_parties=3, embedding_dim=1)
    run = training_run(num_samples=10, batch_size=10, event=event)
    target = 0.5 * math.erfc(0.5 / math.sqrt(2)) - math.e * 0.5 * math.erfc(1.5 / math.sqrt(2))
    assert epsilon_bound(run, Unit.CELL, Accounting.PAPER, delta=target).epsilon == pytest.approx(1.0, rel=1e-5)


def test_a_run_without_releases_costs_only_its_updates() -> None:
    idle = pbm_run(3, 1, 0.1, 1, 0)
    for row in epsilon_bounds(idle, delta=DELTA):
        assert row.epsilon == 0


def activity(row_releases: int = 0, row_updates: int = 0, total_releases: int = 0) -> Activity:
    return Activity(
        split="train",
        release=SMALL.releases[0],
        update=PlainUpdate(),
        row_releases=row_releases,
        row_updates=row_updates,
        total_releases=total_releases,
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: activity(row_releases=-1), r"row_releases=-1; permitted: 0 or more"),
        (lambda: activity(row_updates=-1), r"row_updates=-1; permitted: 0 or more"),
        (lambda: activity(total_releases=-1), r"total_releases=-1; permitted: 0 or more"),
        (lambda: TrainingRun(activities=(), num_parties=0), r"num_parties=0; permitted: 1 or more"),
        (lambda: TrainingRun(activities=(), num_parties=1, first_batch=0), r"first_batch=0; permitted: 1 or more"),
        (lambda: TrainingRun(activities=(), num_parties=1, rows_together=0), r"rows_together=0; permitted: 1 or more"),
        (lambda: Adversary(colluding_parties=-1), r"colluding_parties=-1; permitted: 0 or more"),
        (lambda: Adversary(server=False), r"server=False with colluding_parties=0 is nobody; permitted"),
        (lambda: Adversary(colluding_parties=3).honest_parties(3), r"colluding_parties=3 .*permitted: 0 to 2"),
        (lambda: SERVER.honest_parties(0), r"num_parties=0; permitted: 1 or more"),
        (
            lambda: epsilon_bound(pbm_run(3, 1, 0.1, 0, 1), Unit.CELL, Accounting.PAPER, delta=DELTA),
            r"embedding_dim=0; permitted: 1 or more",
        ),
        (
            lambda: activity(row_releases=2, total_releases=1),
            r"total_releases=1 with row_releases=2; permitted: at least as many",
        ),
        (
            lambda: epsilon_bound(
                training_run(event=LocalGaussianRelease(variance=0.0, bound=1.0, num_parties=1, embedding_dim=1)),
                Unit.CELL,
                Accounting.PAPER,
                delta=DELTA,
            ),
            r"variance=0.0, bound=1.0; permitted: both above 0",
        ),
    ],
)
def test_bad_values_name_themselves_and_what_is_permitted(call: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        call()  # type: ignore[operator]


def test_adversaries_are_words() -> None:
    assert [str(Adversary(colluding_parties=t)) for t in range(3)] == [
        "server",
        "server + 1 party",
        "server + 2 parties",
    ]
    assert str(CURIOUS_PARTY) == "1 party"
    assert (SERVER.role, CURIOUS_PARTY.role) == ("server", "party")
    assert [unit.value for unit in Unit] == ["cell", "record", "party", "label"]
    assert [accounting.value for accounting in Accounting] == ["paper", "strict"]
