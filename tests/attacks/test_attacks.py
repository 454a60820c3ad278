"""Attacks get what their laws say, everything where nothing is private, and nothing beyond their bounds."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

import pbmvfl.crypto.entropy
import pbmvfl.ledger.ledger
import pbmvfl.protocol.party
from pbmvfl.attacks import columns
from pbmvfl.attacks.decoders import decode
from pbmvfl.attacks.digits import explained, found_rows, whole_pictures
from pbmvfl.attacks.hole import game_result, hole_plan, play_joint, search_cell, show_hole, staged_game
from pbmvfl.attacks.label_attacks import clustered_labels, label_scores, solved_labels
from pbmvfl.attacks.replay import Cells
from pbmvfl.attacks.scores import SERVER_ALONE, lower_end, most_right, share_right, upper_end
from pbmvfl.attacks.staged import releases_bound, staged_votes, vote_pair_score
from pbmvfl.attacks.suite import attack_data
from pbmvfl.attacks.transcripts import Probes, SeenRound, Transcript
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import DataError, PlanError
from pbmvfl.mechanisms.poisson_binomial import PoissonBinomial
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import epsilon_bound
from pbmvfl.privacy.units import Accounting, Unit
from support.cohorts import small_data, small_plan

DATA = small_data(num_parties=3, num_samples=120, num_test_samples=40)


# --- scores ---


def test_ends_of_intervals_are_clopper_and_pearson_s() -> None:
    """Oracle: binomial tails by their definition."""
    low, high = lower_end(7, 20, 0.05), upper_end(7, 20, 0.05)
    tail = sum(math.comb(20, k) * low**k * (1 - low) ** (20 - k) for k in range(7, 21))
    head = sum(math.comb(20, k) * high**k * (1 - high) ** (20 - k) for k in range(8))
    assert (tail, head) == (pytest.approx(0.05), pytest.approx(0.05))
    assert (lower_end(0, 20, 0.05), upper_end(20, 20, 0.05)) == (0.0, 1.0)


def test_the_bound_of_a_guess_is_never_below_the_best_guess_of_randomised_response() -> None:
    """Oracle: every rule from symbols to values, enumerated, for a few priors; one prior attains the bound."""
    k, epsilon = 3, 1.0
    own = math.exp(epsilon) / (math.exp(epsilon) + k - 1)
    law = np.full((k, k), (1 - own) / (k - 1)) + np.eye(k) * (own - (1 - own) / (k - 1))
    bound = dataclasses.replace(
        releases_bound(_pbm().event, Unit.CELL), epsilon=epsilon, delta=0.0, advantage_upper_bound=law[0, 0] - law[0, 1]
    )
    for prior in (np.full(k, 1 / k), np.array([0.6, 0.3, 0.1])):
        rules = itertools.product(range(k), repeat=k)
        best = max(sum(prior[rule[s]] * law[rule[s], s] for s in range(k)) for rule in rules)
        assert best <= most_right(bound, prior.max()) + 1e-12


def test_an_alarm_is_raised_above_the_bound_and_not_near_it() -> None:
    shared = {"attack": "a", "attacker": SERVER_ALONE, "setting": "s", "bound": 0.6, "bound_words": ""}
    right = np.arange(1000) < 600
    assert not share_right(right, 0.5, **shared).is_alarm
    assert not share_right(np.arange(1000) < 650, 0.5, **shared).is_alarm  # 3.2 deviations: chance among many runs
    assert share_right(np.arange(1000) < 720, 0.5, **shared).is_alarm
    score = share_right(right, 0.5, **{**shared, "bound": None})
    assert not score.is_alarm
    assert score.gain.low < 0.1 < score.gain.high


# --- tests of two values ---


def _pbm(**choices: object) -> PoissonBinomial:
    usual = {"num_parties": 2, "num_trials": 2, "beta": 0.25, "embedding_dim": 1, "secure_aggregation": True}
    return PoissonBinomial(**{**usual, **choices})  # type: ignore[arg-type]


def toy_table(rows: int = 20_000) -> columns.TableAttack:
    """One release of rows whose first party is at either end, and whose second is at one of them."""
    ends = np.where(np.arange(rows) % 2, 1.0, -1.0).astype(np.float32)
    parts = (ends[:, None], np.ones((rows, 1), dtype=np.float32))
    data = VerticalDataset(
        name="toy",
        party_names=("a", "b"),
        train_features=parts,
        test_features=tuple(part[:0] for part in parts),
        train_labels=np.zeros(rows, dtype=np.int64),
        test_labels=np.zeros(0, dtype=np.int64),
        class_names=("x", "y"),
        default_encoder="linear",
    )
    plan = Plan.for_data(data, num_trials=2, beta=0.25, embedding_dim=1, num_epochs=1, batch_size=rows)
    probes = Probes(row_C=np.arange(rows), other_C=(np.arange(rows) + 1) % rows)
    embedding = np.stack(parts)
    turn = SeenRound(
        rows=np.arange(rows),
        embedding_MBP=embedding,
        estimate_BP=embedding.sum(0),
        gradient_BP=embedding[0],
        head=(embedding[0], embedding[0]),
        probe=np.arange(rows),
        probe_MCP=embedding[:, probes.other_C],
    )
    return columns.TableAttack(
        data=data,
        seen=Transcript(plan=plan, rounds=(turn,)),
        setting="toy",
        probes=probes,
        auxiliary=np.arange(0),
        targets=np.arange(rows),
        seed=0,
    )


def best_guess(p_0: list[float], p_1: list[float], trials: int) -> float:
    """Success of the best guess between two sums of binomials, by enumeration of all counts."""

    def law(probabilities: list[float]) -> np.ndarray:
        found = np.ones(1)
        for p in probabilities:
            one = [math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(trials + 1)]
            found = np.convolve(found, one)
        return found

    return float(np.maximum(law(p_0), law(p_1)).sum() / 2)


def test_the_likelihood_ratio_test_is_as_good_as_the_best_guess_and_not_better() -> None:
    """20,000 games: five standard errors, a false alarm in about two million runs."""
    scores = {score.attacker: score for score in columns.pair_scores(toy_table()) if "cell" in score.attack}
    expected = {"server": best_guess([0.75, 0.75], [0.25, 0.75], 2), "server + 1 party": best_guess([0.75], [0.25], 2)}
    for attacker, best in expected.items():
        assert abs(scores[attacker].value - best) < 5 * 0.5 / math.sqrt(20_000)
        assert best <= scores[attacker].bound + 1e-9
        assert not scores[attacker].is_alarm
    # The two ends are the worst case of one party's law.
    assert scores["server + 1 party"].bound == pytest.approx(expected["server + 1 party"], abs=1e-6)
    # A control: a beta of .2 would be noticed.
    assert abs(scores["server + 1 party"].value - best_guess([0.7], [0.3], 2)) > 5 * 0.5 / math.sqrt(20_000)
    observer = scores["network observer, no masks"]
    assert abs(observer.value - expected["server + 1 party"]) < 5 * 0.5 / math.sqrt(20_000)


def test_counts_with_too_little_noise_raise_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: parties draw with twice the beta that is charged."""
    sound = columns.draw_counts
    louder = _pbm(beta=0.45)
    monkeypatch.setattr(columns, "draw_counts", lambda _, *rest: sound(louder, *rest))
    assert any(score.is_alarm for score in columns.pair_scores(toy_table()))


def test_everything_is_found_where_nothing_is_private() -> None:
    data = small_data(num_parties=3, num_samples=400, num_test_samples=2, columns=2)
    rounded = tuple(np.rint(np.clip(part, -1, 1)).astype(np.float32) for part in data.train_features)
    data = dataclasses.replace(data, train_features=rounded)
    # Steps are small: with so much noise large ones would only shake the networks.
    choices = {"embedding_dim": 8, "num_epochs": 4, "learning_rate": 1e-4, "num_trials": 1, "beta": 0.02}
    plan = small_plan(data, label_epsilon=None, **choices)
    table = columns.attack_table(plan, data, setting="own", seed=0, games=200)
    exact, own = columns.recovery_scores(table)
    assert exact.value > exact.baseline + 0.15
    assert exact.value > 0.75  # what is left are cells whose value no auxiliary row has
    assert own.value < own.baseline + 0.05  # a beta of .02 tells next to nothing
    exact, own = columns.column_scores(table)
    assert exact.value > 0.9 > own.value


# --- the hole ---


def test_the_cell_is_found_by_other_rows_releases_and_not_by_its_own() -> None:
    """Large steps, small batches, one epoch: the paper's account counts one release of the cell."""
    data = small_data(num_parties=2, num_samples=400, num_test_samples=2, num_classes=2)
    plan = hole_plan(data).replace(encoder="mlp", learning_rate=2.0)
    cell = search_cell(plan, data, seed=0, candidates=40)
    own, everything, coin, _ = play_joint(plan, data, cell, games=150, seed=1)
    paper = epsilon_bound(plan.training_run(), Unit.CELL, Accounting.PAPER, delta=1e-5)
    by_own, by_all = (game_result("", each, coin, paper) for each in (own, everything))
    assert by_own.advantage_at_least < paper.advantage_upper_bound < by_all.advantage_at_least
    assert not by_own.is_above
    # A replay of the other world's value in a world without any difference tells nothing: the same value twice.
    same = Cells(
        party_C=cell.party_C, row_C=cell.row_C, value_CD=data.train_features[cell.party_C[0]][cell.row_C].astype("f4")
    )
    _, nothing, _, _ = play_joint(plan, data, same, games=4, seed=1)
    assert np.abs(nothing).max() < 1e-6


def test_rows_and_plans_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlanError, match="num_samples=120 in the plan, 37 in the data"):
        attack_data(small_data(), plan=small_plan(DATA))
    narrow = {
        name: (getattr(DATA, name)[0][:, :2].copy(), *getattr(DATA, name)[1:])
        for name in ("train_features", "test_features")
    }
    uneven = dataclasses.replace(DATA, **narrow)
    with pytest.raises(DataError, match="equally many columns"):
        show_hole(uneven)
    with pytest.raises(PlanError, match="mechanism=ldp"):
        attack_data(DATA, plan=small_plan(DATA, mechanism="ldp", num_trials=4, beta=0.1))


def test_the_game_against_noisy_steps_is_won_without_noise_and_lost_with_it() -> None:
    data = small_data(num_parties=2, num_samples=60, num_test_samples=2, num_classes=2)
    cell = Cells(party_C=np.array([1]), row_C=np.array([4]), value_CD=-data.train_features[1][4][None])
    usual = Plan.for_budget(epsilon=4, data=data)
    for noise, least, most in ((0.05, 30, 30), (500.0, 5, 25)):
        ratio, coin = staged_game(usual.replace(noise_multiplier=noise, num_epochs=4), data, cell, games=30, seed=1)
        right = int(((ratio > 0) == (coin == 1)).sum())
        assert least <= right <= most  # with its seed the second is always the same


# --- labels ---


def test_labels_are_solved_for_any_number_of_classes() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(4, size=50)
    scores = random.normal(size=(50, 4))
    slope = np.exp(scores) / np.exp(scores).sum(1, keepdims=True) - np.eye(4)[labels]
    for width in (3, 5):
        head = random.normal(size=(4, width))
        assert (solved_labels(slope @ head, head) == labels).all()
    head = random.normal(size=(4, 1))  # one number cannot tell four classes apart
    assert (solved_labels(slope @ head, head) == labels).mean() < 0.9
    named = clustered_labels(-np.eye(4)[labels] + 0.01 * scores, np.where(np.arange(50) < 30, labels, -1), 4, seed=0)
    assert (named == labels).all()


def test_labels_are_read_in_clear_and_not_beyond_their_epsilon() -> None:
    data = small_data(num_parties=2, num_samples=900, num_test_samples=2, num_classes=2)
    plan = small_plan(data, batch_size=100)
    scores = {score.attack: score for score in label_scores(plan, data, seed=0)}
    assert scores["labels by solving, labels in clear"].value == 1.0
    assert not any(score.is_alarm for score in scores.values())
    drawn = scores["labels by solving, label epsilon 1"]
    assert drawn.value == pytest.approx(math.e / (1 + math.e), abs=0.1)
    assert drawn.bound is not None
    assert scores["labels by solving, label epsilon 4"].value > drawn.bound  # a control: epsilon 4 permits more


# --- predictions, decoders, pictures ---


def test_votes_are_told_apart_as_often_as_their_epsilon_permits() -> None:
    data = small_data(num_parties=2, num_samples=200, num_test_samples=100, num_classes=2)
    votes = staged_votes(Plan.for_budget(epsilon=20, data=data, num_fusion_samples=40), data, seed=0)
    assert votes.test_MNW.std() > 0  # they learned something to vote by
    loud, quiet = (vote_pair_score(votes.with_epsilon(e), setting="", seed=1) for e in (10.0, 0.1))
    assert loud is not None
    assert quiet is not None
    assert not loud.is_alarm
    assert not quiet.is_alarm
    assert loud.value > quiet.value + 0.1
    assert quiet.bound == pytest.approx(0.5, abs=0.03)


def test_a_decoder_finds_what_is_there_and_falls_back_to_the_mean() -> None:
    random = np.random.default_rng(0)
    seen = random.normal(size=(500, 3))
    target = np.stack([seen[:, 0] * 2, np.sin(2 * seen[:, 1])], axis=1)
    found = decode(seen[:400], target[:400], seen[400:], seed=0)
    assert explained(target[400:], found.value_ND, target[:400].mean(0)) > 0.9
    noise = decode(random.normal(size=(400, 3)), target[:400], random.normal(size=(100, 3)), seed=0)
    assert explained(target[400:], noise.value_ND, target[:400].mean(0)) < 0.1


def test_a_row_is_found_by_many_releases_and_by_none_of_equal_rows() -> None:
    pbm = _pbm(num_trials=8, embedding_dim=4)
    random = np.random.default_rng(0)
    apart = random.uniform(-1, 1, size=(60, 2, 4)).astype(np.float32)
    found = found_rows(pbm, apart, releases=(1, 10, 200), seed=1)
    shares = [found[count].mean() for count in (1, 10, 200)]
    assert shares[0] < shares[1] < shares[2]
    assert shares[2] > 0.95
    same = found_rows(pbm, np.zeros((60, 2, 4), dtype=np.float32), releases=(50,), seed=1)
    assert same[50].sum() <= 1


def test_quadrants_are_joined_as_they_were_split() -> None:
    picture = np.arange(64.0).reshape(1, 8, 8)
    parts = [picture[:, r, c].reshape(1, 16) for r in (slice(0, 4), slice(4, 8)) for c in (slice(0, 4), slice(4, 8))]
    assert (whole_pictures(tuple(parts)) == picture.reshape(1, 64)).all()


# --- nothing is released ---


def test_an_attack_opens_no_role_and_no_ledger_and_draws_no_secret_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an attack released something")

    monkeypatch.setattr(pbmvfl.crypto.entropy.SystemEntropy, "fill", refuse)
    monkeypatch.setattr(pbmvfl.protocol.party.Party, "__init__", refuse)
    monkeypatch.setattr(pbmvfl.ledger.ledger.Ledger, "__init__", refuse)
    joint = attack_data(DATA, plan=small_plan(DATA), seed=0)
    staged = attack_data(DATA, plan=Plan.for_budget(epsilon=8, data=DATA, num_fusion_samples=20), seed=0)
    assert not joint.is_alarm
    assert not staged.is_alarm
    assert {score.setting for score in joint.scores} > {"labels from gradients"}
    assert staged.scores
