"""Whole trainings with one cell at two extremes: the account is nearly reached, and games can contradict it.

Games of the sound build are compared at LEVEL; the control has a probability below 1e-6 of passing.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from pbmvfl.audit import training
from pbmvfl.audit.constants import LEVEL
from pbmvfl.audit.training import account_mu, mu_at_least, noise_multiplier_for, training_game, training_plan
from pbmvfl.crypto.entropy import SystemEntropy
from support import planted_faults as faults

DATA = training.training_data()
#: Two uses of a row in four steps, at epsilon 8 all the same.
SHORT = training_plan(DATA, num_epochs=2, noise_multiplier=noise_multiplier_for(2))


def test_the_account_s_mu_is_the_gaussian_s_by_hand() -> None:
    plan = training_plan(DATA)
    mu = 2 * math.sqrt(20) / plan.noise_multiplier
    assert account_mu(plan) == pytest.approx(mu)
    delta = stats.norm.cdf(mu / 2 - 8 / mu) - math.exp(8) * stats.norm.cdf(-mu / 2 - 8 / mu)
    assert delta == pytest.approx(1e-5, rel=1e-3)


def test_errors_of_either_kind_bound_mu() -> None:
    assert mu_at_least(50, 50, 100, 0.05) == 0.0
    found = mu_at_least(0, 0, 1000, 0.05)
    assert found == pytest.approx(2 * stats.norm.isf(1 - 0.025 ** (1 / 1000)))
    # A million games of the normal laws themselves show nearly all of mu, and not more.
    rate = stats.norm.sf(0.8)
    assert 1.59 < mu_at_least(round(1e6 * rate), round(1e6 * rate), 10**6, 0.05) < 1.6


def test_games_of_a_sound_training_lie_below_the_account() -> None:
    found, noise = training_game(SHORT, DATA, 150, shift=1.0, level=LEVEL)
    assert found.sound
    assert found.mu == pytest.approx(account_mu(training_plan(DATA)))
    # Six deviations below what 150 sessions are expected to show.
    assert found.mu_lower_bound > 0.3 * found.mu
    assert [each for each in noise if each.p_value < LEVEL] == []


def test_control_a_quarter_of_the_noise_is_contradicted_by_the_games_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.update_noise_times(0.25)(monkeypatch)
    found, _ = training_game(SHORT, DATA, 150, shift=1.0, level=LEVEL)
    assert not found.sound
    assert found.epsilon_lower_bound > found.epsilon


def test_little_noise_is_read_as_well_as_much() -> None:
    """At a multiplier of 1e-3 sums are ten thousand times as large as their noise, and weights are float32."""
    wide = training.wide_data()
    plan = training_plan(wide, batches=1, noise_multiplier=1e-3)
    found = list(training.step_noise_tests(plan, wide, 20_000))
    assert min(each.p_value for each in found) >= LEVEL


def test_bytes_that_are_replayed_are_the_same_and_only_once_recorded() -> None:
    entropy, drawn = training.Replayed(), []
    for _ in range(2):
        some, more = np.empty(8, dtype=np.uint64), np.empty(3, dtype=np.uint32)
        entropy.fill(some)
        entropy.fill(more)
        drawn.append(some.tobytes() + more.tobytes())
        entropy.again()
    assert drawn[0] == drawn[1]
    other = np.empty(8, dtype=np.uint64)
    SystemEntropy().fill(other)
    assert other.tobytes() != drawn[0][:64]
