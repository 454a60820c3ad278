"""Attacks on staged training: rows that are predicted, from the private votes that leave for them.

Nothing about a row leaves a party in local rounds, so what is attacked is the release of a fusion or predicted row.
Parties train with made-up noise by their own updates; votes are drawn by the mechanism's own sampler on made-up bytes.

Shape suffixes: N rows, M parties, K classes, W coordinates of a vote.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pbmvfl.attacks.likelihood import MadeUpEntropy
from pbmvfl.attacks.scores import SERVER_ALONE, Score, share_right
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms import Mechanism
from pbmvfl.mechanisms.randomized_response import RandomisedSymbols
from pbmvfl.plan.groups import Training
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import LOCAL
from pbmvfl.privacy.accounting import Activity, EpsilonBound, TrainingRun, epsilon_bound
from pbmvfl.privacy.events import ReleaseEvent
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.training.encoders import build_encoder
from pbmvfl.training.features import feature_shape, mapped
from pbmvfl.training.head import log_shares, mean_loss_slope
from pbmvfl.training.preparation import preparation_for
from pbmvfl.training.updates import update_for

Array = npt.NDArray[Any]
#: Delta of every epsilon here.
_DELTA = 1e-5
#: Pairs of values in the test of a predicted cell.
_GAMES = 2000


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedVotes:
    """Votes of a staged federation before they are randomised.

    Args:
        plan: The plan, which has a mechanism for predictions.
        train_MNW: Votes on the training rows, which an attacker may simulate on rows that it knows.
        test_MNW: Votes on the test rows.
    """

    plan: Plan
    train_MNW: npt.NDArray[np.float32]
    test_MNW: npt.NDArray[np.float32]

    @property
    def mechanism(self) -> Mechanism:
        assert self.plan.prediction is not None
        return self.plan.prediction

    def sent(self, votes_MNW: Array, seed: int) -> Array:
        """Draw what would be sent for these votes, party by party."""
        return self.mechanism.randomize(np.ascontiguousarray(votes_MNW), MadeUpEntropy(seed))

    def features(self, sent_MNW: Array) -> npt.NDArray[np.float64]:
        """Return what the server sees of each row as numbers: symbols as indicators, or sums."""
        if isinstance(self.mechanism, RandomisedSymbols):
            hot_MNWS = np.eye(self.mechanism.symbols)[sent_MNW.astype(np.int64)]
            return np.ascontiguousarray(hot_MNWS.transpose(1, 0, 2, 3)).reshape(sent_MNW.shape[1], -1)
        return np.asarray(sent_MNW.astype(np.float64).sum(0))

    def with_epsilon(self, epsilon: float) -> StagedVotes:
        """Return the same votes with randomised response of another epsilon."""
        if not isinstance(self.mechanism, RandomisedSymbols):
            raise PlanError(f"prediction_mechanism={self.mechanism.name}: another epsilon is for krr alone")
        return replace(self, plan=self.plan.replace(prediction_response_epsilon=epsilon))


def staged_votes(plan: Plan, data: VerticalDataset, *, seed: int) -> StagedVotes:
    """Train every party alone with made-up noise, and return its votes.

    Args:
        plan: A plan with local rounds and a mechanism for predictions.
        data: The rows.
        seed: Of the noise and of the drawn labels.

    Raises:
        PlanError: The plan trains in another way, or makes no predictions.
    """
    if plan.training is not Training.LOCAL or plan.prediction is None:
        raise PlanError("this attack is on plans with training=local and a prediction mechanism")
    entropy = MadeUpEntropy(seed)
    response = plan.label_response
    labels = data.train_labels if response is None else response.draw(data.train_labels, entropy)
    pairs = zip(data.train_features, data.test_features, strict=True)
    votes = [_votes_of(plan, index, train, test, labels, entropy) for index, (train, test) in enumerate(pairs)]
    return StagedVotes(
        plan=plan, train_MNW=np.stack([each[0] for each in votes]), test_MNW=np.stack([each[1] for each in votes])
    )


def _votes_of(
    plan: Plan, index: int, train: Array, test: Array, labels: Array, entropy: MadeUpEntropy
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    rows = torch.from_numpy(mapped(plan, train, index=index).astype(np.float32, copy=False))
    encoder = build_encoder(plan, index=index, input_shape=feature_shape(plan, train.shape[1:], index=index))
    preparation = preparation_for(plan, index=index, rows=rows[:4])
    update = update_for(plan, encoder)
    labels_N = torch.from_numpy(labels)
    prior_K = log_shares(
        labels_N[torch.from_numpy(plan.schedule.part_of(LOCAL).copy())], plan.num_classes, plan.label_response
    )
    prepared = rows
    for turn in plan.schedule:
        if turn.kind.trains:
            at = torch.from_numpy(turn.rows.copy())
            scores = torch.from_numpy(update.embed(prepared[at].contiguous(), for_training=True)) + prior_K
            slope = mean_loss_slope(scores, labels_N[at], plan.loss, kept=plan.label_kept)
            update.apply(slope.clamp(-plan.gradient_bound, plan.gradient_bound).numpy(), entropy)
        elif turn.kind.statistic:
            preparation.learn(turn.kind.statistic, [rows[torch.from_numpy(turn.rows.copy())]], entropy)
            prepared = preparation(rows)
    later = preparation(torch.from_numpy(mapped(plan, test, index=index).astype(np.float32, copy=False)))
    vote = plan.vote
    return tuple(vote(update.embed(part.contiguous(), for_training=False)) for part in (prepared, later))  # type: ignore[return-value]


def releases_bound(event: ReleaseEvent, unit: Unit, *, releases: int = 1) -> EpsilonBound:
    """Return the bound of a row of which so many releases are seen, and nothing else.

    Args:
        event: The release of one row.
        unit: What is protected.
        releases: How often it is released.
    """
    activity = Activity(
        split="test", release=event, update=None, row_releases=releases, row_updates=0, total_releases=releases
    )
    run = TrainingRun(activities=(activity,), num_parties=event.num_parties)
    return epsilon_bound(run, unit, Accounting.STRICT, SERVER_ALONE.adversary, delta=_DELTA)


def vote_pair_score(votes: StagedVotes, *, setting: str, seed: int) -> Score | None:
    """Score the likelihood-ratio test of a predicted cell, networks known; None for votes that are no symbols.

    Args:
        votes: The federation's votes.
        setting: Name of the setting.
        seed: Of pairs and noise.
    """
    mechanism = votes.mechanism
    if not isinstance(mechanism, RandomisedSymbols) or not votes.test_MNW.shape[1]:
        return None
    random = np.random.default_rng(seed)
    parties, rows, _ = votes.test_MNW.shape
    party, row, other = (random.integers(high, size=_GAMES) for high in (parties, rows, rows))
    true_CW, other_CW = votes.test_MNW[party, row], votes.test_MNW[party, other]
    sent_CW = votes.sent(true_CW, seed + 1).astype(np.int64)
    # The own symbol is likelier than any other, and all others are alike: the test counts agreements.
    agree = [(sent_CW == mechanism.bins(each)).sum(1) for each in (true_CW, other_CW)]
    right = np.where(agree[0] == agree[1], random.random(_GAMES) < 0.5, agree[0] > agree[1])
    bound = releases_bound(mechanism.event, Unit.CELL)
    return share_right(
        right,
        0.5,
        attack="which of two values of a predicted cell",
        attacker=SERVER_ALONE,
        setting=setting,
        bound=0.5 + bound.advantage_upper_bound / 2,
        bound_words="cell, one prediction",
    )
