"""The distinguishing game: what it promises by the claimed law, what it shows, and that it can contradict an epsilon.

A bound at 95% is wrong once in 20 runs, so tests compare the bound at LEVEL with the exact epsilon, and what games are
expected to show by the claimed law, which has no chance in it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from pbmvfl.audit import games
from pbmvfl.audit.constants import LEVEL
from pbmvfl.audit.games import EpsilonFinding, choose_game, epsilon_at_least, epsilon_test
from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.mechanisms import Exact, LocalGaussian, Mechanism, PoissonBinomial, PolyaLaplace, RandomisedSymbols
from support import planted_faults as faults

ONE_BIT = PoissonBinomial(num_parties=5, num_trials=1, beta=0.25, embedding_dim=1, secure_aggregation=True)
SIXTEEN = PoissonBinomial(num_parties=4, num_trials=16, beta=0.1, embedding_dim=1, secure_aggregation=True)
MILLION = 1_000_000


def played(mechanism: Mechanism, trials: int = MILLION) -> EpsilonFinding:
    return epsilon_test(mechanism, SystemEntropy, trials, level=LEVEL)


def expected_bound(mechanism: PoissonBinomial, trials: int) -> float:
    """Return the bound at the expected counts, by laws of bits that are convolved here."""
    game = choose_game(mechanism, trials)
    rates = []
    for own in (1.0, -1.0):
        total = np.ones(1)
        for unit in (own, *game.others):
            p = 0.5 + unit * mechanism.event.beta_16 / 65536
            total = np.convolve(total, stats.binom.pmf(np.arange(mechanism.num_trials + 1), mechanism.num_trials, p))
        rates.append(total[game.threshold :].sum())
    return epsilon_at_least(round(trials * rates[0]), round(trials * rates[1]), trials, delta=1e-5, error=0.05)


@pytest.mark.parametrize(("mechanism", "promised", "surely"), [(ONE_BIT, 0.98, 0.95), (SIXTEEN, 0.75, 0.6)])
def test_a_million_games_show_most_of_the_exact_epsilon(
    mechanism: PoissonBinomial, promised: float, surely: float
) -> None:
    found = played(mechanism)
    assert expected_bound(mechanism, MILLION) > promised * found.epsilon
    # Six deviations below what is expected: less than once in a million runs.
    assert found.share > surely
    assert found.sound
    assert found.epsilon_alarm_bound < found.epsilon_lower_bound
    assert found.advantage_lower_bound < found.advantage


def test_the_exact_epsilon_is_that_of_the_definition() -> None:
    """One bit of five, the others at one end: the smallest epsilon whose hockey-stick divergence is delta."""
    p, q = (np.convolve(np.ones(1), [1 - own, own]) for own in (0.75, 0.25))
    for _ in range(4):
        p, q = (np.convolve(each, [0.25, 0.75]) for each in (p, q))
    epsilon = played(ONE_BIT, 20_000).epsilon
    at, below = (np.maximum(p - math.exp(each) * q, 0).sum() for each in (epsilon, epsilon * (1 - 1e-4)))
    assert at <= 1e-5 < below


@pytest.mark.parametrize(
    "mechanism",
    [
        RandomisedSymbols(num_parties=3, symbols=4, response_epsilon=1.0, embedding_dim=2),
        PolyaLaplace(num_parties=3, levels=8, scale=16.0, embedding_dim=1, secure_aggregation=True),
        PolyaLaplace(num_parties=3, levels=8, scale=16.0, embedding_dim=4, bounded_total=True, secure_aggregation=True),
    ],
    ids=lambda each: each.describe(),
)
def test_other_mechanisms_are_played_against_and_lie_below_their_epsilon(mechanism: Mechanism) -> None:
    found = played(mechanism, 200_000)
    assert found.sound
    assert found.share > 0.8


def test_control_a_sampler_that_says_more_than_is_charged_is_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beta 1.6 times too large: the game proves twice the charged epsilon. For 1% it is blind, which laws are for."""
    faults.beta_times(1.6)(monkeypatch)
    found = played(ONE_BIT, 200_000)
    assert not found.sound
    assert found.epsilon_alarm_bound > 1.5 * found.epsilon


def test_the_choice_is_made_before_anything_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sampler does, the game is the same."""
    before = choose_game(SIXTEEN, MILLION)
    faults.beta_times(0.5)(monkeypatch)
    monkeypatch.setattr(PoissonBinomial, "randomize", None)
    assert choose_game(SIXTEEN, MILLION) == before


def test_readable_integers_are_played_against_by_themselves() -> None:
    """Without a secure sum other parties' bits hide nothing, and the account says so."""
    hidden, readable = played(ONE_BIT, 50_000), played(replace(ONE_BIT, secure_aggregation=False), 50_000)
    assert readable.sound
    assert readable.epsilon == pytest.approx(math.log(3), rel=1e-3)
    assert choose_game(replace(ONE_BIT, secure_aggregation=False), 50_000).others == ()
    assert readable.advantage_lower_bound > 2 * hidden.advantage_lower_bound


def test_many_parties_and_coordinates_are_played_against_in_seconds() -> None:
    """Laws of sums are doubled, not added one by one, and the adversary loses nothing by their cut tails."""
    many = PolyaLaplace(
        num_parties=100, levels=64, scale=50.0, embedding_dim=2, honest_parties=90, secure_aggregation=True
    )
    found = played(many, 1000)
    assert found.sound
    assert found.epsilon_lower_bound > 0
    wide = PoissonBinomial(num_parties=40, num_trials=8, beta=0.1, embedding_dim=16, secure_aggregation=True)
    total, game = games.totals(wide, 1.0, (-1.0,) * 39), choose_game(wide, MILLION)
    bits = 16 * 8
    mean = bits * (0.5 + 39 * 0.5 - 38 * wide.event.beta_16 / 65536)
    assert total.mean == pytest.approx(mean, rel=1e-9)
    assert len(game.others) == 39


def test_there_is_no_game_without_integers() -> None:
    assert not games.can_play(LocalGaussian(num_parties=3))
    assert not games.can_play(Exact(num_parties=3))
