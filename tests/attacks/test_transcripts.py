"""Simulated trainings and replays of attacks are those of the roles: same gradients, same networks."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from pbmvfl.attacks.likelihood import MadeUpEntropy, counts_of, draw_counts, log_law, log_likelihood
from pbmvfl.attacks.replay import Cells, replay
from pbmvfl.attacks.transcripts import joint_rounds, transcript
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms.poisson_binomial import PoissonBinomial
from pbmvfl.plan.plan import Plan
from support.cohorts import Cohort, small_data, small_plan

DATA = small_data(num_parties=3, num_samples=60)


@pytest.mark.parametrize("encoder", ["linear", "mlp"])
def test_a_transcript_without_noise_has_the_gradients_of_the_roles(encoder: str) -> None:
    """Oracle: what a server of the protocol sends to its parties, round by round."""
    plan = small_plan(DATA, mechanism="none", encoder=encoder, momentum=0.5, label_epsilon=None)
    cohort = Cohort(plan, DATA)
    sent: dict[int, np.ndarray] = {}

    def note(server, answer) -> None:
        del answer
        if server.completed_rounds and server.head is not None:
            sent[server.completed_rounds] = server.head.weight.detach().numpy().copy()

    cohort.run(after_server=note)
    heads = [turn.head[0] for turn in joint_rounds(plan, DATA, seed=0)]
    assert len(heads) == len(plan.schedule)
    compared = 0
    for done, weight in sent.items():
        if done < len(heads):
            np.testing.assert_allclose(heads[done], weight, atol=1e-5)
            compared += 1
    assert compared > 5
    assert not np.allclose(heads[0], heads[-1])  # it learned


def test_other_noise_gives_another_transcript_and_the_same_seed_the_same() -> None:
    plan = small_plan(DATA, label_epsilon=2.0)
    first, again, other = (transcript(plan, DATA, seed=seed).estimate_ENP for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


@pytest.mark.parametrize("choices", [{"encoder": "mlp"}, {"encoder": "linear", "momentum": 0.9}])
def test_a_replay_with_the_true_value_is_the_training_itself(choices: dict) -> None:
    """Oracle: the party's own update. A replay that was wrong anywhere would see two different worlds."""
    plan = small_plan(DATA, label_epsilon=None, learning_rate=0.5, num_trials=8, **choices)
    seen = transcript(plan, DATA, seed=3)
    rows, parties = np.array([0, 5, 9]), np.array([0, 1, 2])
    own = np.stack([DATA.train_features[m][n] for m, n in zip(parties, rows, strict=True)])
    same = replay(seen, DATA, Cells(party_C=parties, row_C=rows, value_CD=own))
    other = replay(seen, DATA, Cells(party_C=parties, row_C=rows, value_CD=own + 3))
    assert np.abs(same.all).max() < 1e-2
    assert np.abs(same.squared_distance).max() < 1e-4
    assert other.squared_distance.min() > 1e-2
    assert (other.all != other.own).all()  # other rows tell something too


def test_the_law_of_a_sum_is_that_of_independent_bits() -> None:
    """Oracle: products of polynomials in fractions."""
    probabilities, trials = [Fraction(3, 8), Fraction(5, 8), Fraction(1, 2)], 2
    law = [Fraction(1)]
    for p in probabilities:
        for _ in range(trials):
            law = [
                (law[k] * (1 - p) if k < len(law) else Fraction(0)) + (law[k - 1] * p if k else Fraction(0))
                for k in range(len(law) + 1)
            ]
    found = np.exp(log_law(np.array([float(p) for p in probabilities]), trials))
    np.testing.assert_allclose(found, [float(p) for p in law], rtol=1e-10)
    picked = log_likelihood(np.array([2, 4]), np.array([[0.375, 0.625, 0.5]] * 2), trials)
    np.testing.assert_allclose(np.exp(picked), [float(law[2]), float(law[4])], rtol=1e-10)
    # Many bits: the normal approximation is near the exact law.
    wide = np.full((1, 5), 0.4)
    approximate = log_likelihood(np.array([200]), wide, 100)
    assert approximate[0] == pytest.approx(log_law(wide, 100)[0, 200], abs=1e-3)


def test_counts_are_drawn_by_the_mechanism_s_law_and_read_back_from_estimates() -> None:
    pbm = PoissonBinomial(num_parties=3, num_trials=8, beta=0.2, embedding_dim=2, secure_aggregation=True)
    counts = draw_counts(pbm, np.full((20_000, 2), 0.5, dtype=np.float32), np.random.default_rng(0))
    # 8 (1/2 + .2/2) = 4.8 with a deviation of 1.39: six standard errors of 40,000 draws.
    assert abs(counts.mean() - 4.8) < 6 * 1.39 / 200
    sums = np.arange(25, dtype=np.uint16)
    assert (counts_of(pbm, pbm.estimate(sums)) == sums).all()


def test_made_up_bytes_are_reproducible_and_say_so() -> None:
    first, second = np.empty(7, dtype=np.uint16), np.empty(7, dtype=np.uint16)
    MadeUpEntropy(3).fill(first)
    MadeUpEntropy(3).fill(second)
    assert (first == second).all()
    assert len(set(first.tolist())) > 1
    assert MadeUpEntropy.seeded


def test_plans_of_another_kind_are_refused() -> None:
    with pytest.raises(PlanError, match="joint training"):
        next(joint_rounds(Plan.for_budget(epsilon=4, data=DATA), DATA, seed=0))
