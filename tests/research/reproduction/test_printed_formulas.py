"""The paper's printed formulas and cost columns."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import pytest

from pbmvfl.privacy.events import local_gaussian_variance
from pbmvfl.privacy.renyi import cell_rdp, record_rdp
from pbmvfl.research.reproduction.tables import communication_bits

#: (num_trials or None for NPQ, beta, epochs, printed cost); rows that never reach their target have no cost.
CIFAR_10_TABLE_1 = [
    (4, 0.1, 411, 4570),
    (4, 0.15, 54, 600),
    (8, 0.1, 64, 725),
    (8, 0.15, 38, 430),
    (16, 0.05, 442, 5110),
    (16, 0.1, 41, 470),
    (16, 0.15, 30, 345),
]
ACTIVITY_TABLE_4 = [
    (8, 0.2, 92, 1.94),
    (8, 0.25, 66, 1.39),
    (16, 0.15, 92, 1.98),
    (16, 0.2, 54, 1.16),
    (16, 0.25, 31, 0.67),
    (64, 0.1, 56, 1.25),
    (64, 0.15, 23, 0.51),
    (64, 0.2, 12, 0.27),
    (64, 0.25, 10, 0.22),
    (128, 0.1, 24, 0.55),
    (128, 0.15, 12, 0.27),
    (None, None, 10, 0.38),
]
PHISHING_TABLE_6 = [
    (8, 0.2, 41, 1.04),
    (8, 0.25, 23, 0.58),
    (16, 0.1, 98, 2.54),
    (16, 0.15, 34, 0.88),
    (16, 0.2, 15, 0.39),
    (16, 0.25, 8, 0.21),
    (32, 0.1, 35, 0.92),
    (32, 0.15, 12, 0.32),
    (32, 0.2, 5, 0.13),
    (32, 0.25, 3, 0.08),
    (64, 0.1, 15, 0.40),
    (64, 0.15, 4, 0.11),
    (64, 0.2, 3, 0.08),
    (64, 0.25, 2, 0.05),
    (None, None, 2, 0.09),
]


def cifar(num_trials: int | None, epochs: int) -> float:
    return communication_bits(
        num_epochs=epochs, num_samples=50_000, batch_size=100, num_parties=4, embedding_dim=16, num_trials=num_trials
    )


def tabular(num_trials: int | None, epochs: int, rows_an_epoch: int) -> float:
    return communication_bits(
        num_epochs=epochs,
        num_samples=rows_an_epoch,
        batch_size=100,
        num_parties=5,
        embedding_dim=16,
        num_trials=num_trials,
    )


@pytest.mark.parametrize(("num_trials", "beta", "epochs", "printed"), CIFAR_10_TABLE_1)
def test_table_1_lost_a_factor_of_ten_in_every_pbm_row(
    num_trials: int, beta: float, epochs: int, printed: float
) -> None:
    del beta  # the cost does not depend on it
    # millions of bits, called MB; printed to multiples of 5, rounded down
    assert 0 <= cifar(num_trials, epochs) / 1e6 / 10 - printed < 5


def test_table_1_prints_npq_with_all_its_digits() -> None:
    assert cifar(None, 21) / 1e6 == pytest.approx(4301, abs=0.5)
    assert 0 <= cifar(None, 21) / 1e6 - 4300 < 5


def test_corrected_table_1_saves_in_one_setting_only() -> None:
    npq = cifar(None, 21)
    assert cifar(16, 41) / 1e6 == pytest.approx(4744, abs=0.5)
    assert cifar(8, 38) / npq == pytest.approx(1, abs=0.01)
    assert 1 - cifar(16, 30) / npq == pytest.approx(0.19, abs=0.005)
    cheaper = [row for row in CIFAR_10_TABLE_1 if cifar(row[0], row[2]) < 0.99 * npq]
    assert cheaper == [(16, 0.15, 30, 345)]


@pytest.mark.parametrize(("num_trials", "beta", "epochs", "printed"), ACTIVITY_TABLE_4)
def test_table_4_to_its_rounding(num_trials: int | None, beta: float | None, epochs: int, printed: float) -> None:
    del beta
    assert abs(tabular(num_trials, epochs, 7_400) / 1e9 - printed) <= 0.005


@pytest.mark.parametrize("beta", [0.2, 0.25])
def test_table_4_deviates_at_128_trials(beta: float) -> None:
    del beta  # both rows need 10 epochs and print .22
    cost = tabular(128, 10, 7_400) / 1e9
    assert cost == pytest.approx(0.228, abs=0.0005)
    assert abs(cost - 0.22) > 0.005


@pytest.mark.parametrize(("num_trials", "beta", "epochs", "printed"), PHISHING_TABLE_6)
def test_table_6_to_its_rounding(num_trials: int | None, beta: float | None, epochs: int, printed: float) -> None:
    del beta
    assert abs(tabular(num_trials, epochs, 8_900) / 1e9 - printed) <= 0.005


def test_table_6_deviates_at_8_trials() -> None:
    cost = tabular(8, 86, 8_900) / 1e9
    assert cost == pytest.approx(2.185, abs=0.0005)
    assert cost - 2.18 > 0.005


def test_short_last_batches_are_counted_as_full() -> None:
    assert tabular(8, 3, 8_844) == tabular(8, 3, 8_900)


# --- Theorem 6.2, as printed ---


def sample_privacy_factor(order: float, num_parties: int) -> float:
    """S_M(alpha), for M >= 2."""
    m = num_parties
    linear = (2 ** (m + 1) - 2 ** (m - 1) - 2) * order
    constant = 3 * 2 ** (m - 1) - 3 * m
    pole = (2 ** (m - 1) - 1) / (2 ** (m - 2) * (order - 1))
    return float(linear - constant + pole)


def sample_privacy_rdp(*, order: float, num_parties: int, num_trials: int, beta: float, c0: float) -> float:
    """One release of one coordinate: C0 * b * beta^2 * S_M(alpha) / M."""
    return c0 * num_trials * beta**2 * sample_privacy_factor(order, num_parties) / num_parties


def test_sample_privacy_factor_is_what_the_induction_gives() -> None:
    """S_2 = 4a + 1/(a-1), and each step is the weak triangle inequality at 2a and 2a - 1 (Mironov, Corollary 4)."""
    for order in (1.1, 2.0, 7.5):
        assert sample_privacy_factor(order, 2) == pytest.approx(4 * order + 1 / (order - 1))
        for m in range(2, 9):
            step = (order - 0.5) / (order - 1) * 2 * order + sample_privacy_factor(2 * order - 1, m)
            assert sample_privacy_factor(order, m + 1) == pytest.approx(step)


def test_sample_privacy_is_far_looser_than_the_exact_record() -> None:
    """M=12, b=2, beta=.05, order 2: 0.951 exact against 20.9, with the C0 that the exact cell curve implies there."""
    beta_16 = round(0.05 * 65536)
    implied = cell_rdp(2, beta_16, 12, (2.0,))[0] / (2 * 0.05**2 * 2.0 / 12)
    printed = sample_privacy_rdp(order=2.0, num_parties=12, num_trials=2, beta=0.05, c0=float(implied))
    record = record_rdp(2, beta_16, 12, (2.0,))[0]
    assert record == pytest.approx(0.951, abs=0.002)
    assert record == pytest.approx(float(record_by_definition(2 * 12, beta_16, 2.0)), rel=1e-8)
    assert printed == pytest.approx(20.9, abs=0.05)


def factor_by_induction(order: Fraction, num_parties: int) -> Fraction:
    if num_parties == 2:
        return 4 * order + 1 / (order - 1)
    step = (order - Fraction(1, 2)) / (order - 1) * 2 * order
    return step + factor_by_induction(2 * order - 1, num_parties - 1)


def record_by_definition(num_bits: int, beta_16: int, order: float) -> mpmath.mpf:
    """So many independent bits, each one with probability 1/2 + beta or 1/2 - beta: their divergences add up."""
    lo, hi, a = mpmath.mpf(32768 - beta_16) / 65536, mpmath.mpf(32768 + beta_16) / 65536, mpmath.mpf(order)
    return num_bits * mpmath.log(hi**a * lo ** (1 - a) + lo**a * hi ** (1 - a)) / (a - 1)


@pytest.mark.parametrize("order", [1.5, 2.0, 10.0])
def test_sample_privacy_is_absurd_at_fifty_parties(order: float) -> None:
    printed = sample_privacy_rdp(order=order, num_parties=50, num_trials=16, beta=0.1, c0=8.0)
    record = record_rdp(16, 6553, 50, (order,))[0]
    assert printed == pytest.approx(
        float(8 * 16 * Fraction(1, 100) * factor_by_induction(Fraction(order), 50) / 50), rel=1e-12
    )
    assert record == pytest.approx(float(record_by_definition(16 * 50, 6553, order)), rel=1e-8)
    assert 1e10 < printed / record < 1e13


def test_the_variance_of_the_baseline() -> None:
    assert local_gaussian_variance(num_parties=4, num_trials=16, beta=0.1, bound=1.0) == pytest.approx(50)


def test_natural_logarithm_and_bits() -> None:
    one = {"num_epochs": 1, "num_samples": 1, "batch_size": 1, "num_parties": 4, "embedding_dim": 1}
    assert communication_bits(**one, num_trials=16) == pytest.approx(4 * (32 + math.log(64)))
    assert communication_bits(**one, num_trials=None) == 4 * 64
