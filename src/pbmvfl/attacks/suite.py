"""All attacks on one dataset, by a given plan or the usual ones, beside exact sums and a stronger setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pbmvfl.attacks.columns import (
    attack_table,
    column_scores,
    columns_right,
    indicators,
    pair_scores,
    recovery_scores,
    replay_score,
)
from pbmvfl.attacks.decoders import decode
from pbmvfl.attacks.digits import Pictures, PictureSetting, attack_pictures, picture_plan, staged_settings
from pbmvfl.attacks.label_attacks import label_scores
from pbmvfl.attacks.scores import SERVER_ALONE, Score, share_right
from pbmvfl.attacks.staged import StagedVotes, staged_votes, vote_pair_score
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import DataError, PlanError
from pbmvfl.mechanisms.poisson_binomial import PoissonBinomial
from pbmvfl.plan.groups import Training
from pbmvfl.plan.plan import Plan

Say = Callable[[str], None]
#: Settings of digits where no plan is given.
_DIGITS = (
    PictureSetting(name="pbm (16, .15)", num_trials=16, beta=0.15),
    PictureSetting(name="pbm (4, .1)", num_trials=4, beta=0.1),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackReport:
    """Scores of all attacks, and pictures where rows are pictures."""

    scores: tuple[Score, ...]
    pictures: Pictures | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_alarm(self) -> bool:
        """True if a score is surely above its bound."""
        return any(score.is_alarm for score in self.scores)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; pixels in whole percent."""
        found: dict[str, Any] = {"scores": [score.to_dict() for score in self.scores], "notes": list(self.notes)}
        found["is_alarm"] = self.is_alarm
        if self.pictures is not None:
            found["found"] = {name: [list(point) for point in points] for name, points in self.pictures.found.items()}
            found["candidates"] = self.pictures.candidates
            pixels = np.rint(100 * self.pictures.shown).astype(int)
            found["pictures"] = {"titles": list(self.pictures.titles), "percent": pixels.tolist()}
        return found


def usual_table_plans(data: VerticalDataset) -> dict[str, Plan]:
    """Return the paper's setting for tables, and one that the paper's count puts at epsilon 8."""
    shared: dict[str, Any] = {"batch_size": 100, "label_epsilon": None}
    return {
        "pbm (64, .25), 30 epochs": Plan.for_data(
            data, num_trials=64, beta=0.25, embedding_dim=16, num_epochs=30, **shared
        ),
        "pbm (16, .149), P=1, 2 epochs": Plan.for_data(
            data,
            num_trials=16,
            beta=0.149,
            embedding_dim=1,
            num_epochs=2,
            learning_rate=0.1,
            momentum=0.9,
            **shared,
        ),
    }


def stronger(plan: Plan) -> Plan:
    """Return a joint plan with a fourth of the trials and a beta of at most .1."""
    pbm = plan.release
    if not isinstance(pbm, PoissonBinomial):
        raise PlanError(f"mechanism={plan.mechanism}: attacks on joint training are written for mechanism=pbm")
    return plan.replace(num_trials=max(1, pbm.num_trials // 4), beta=min(0.1, pbm.beta))


def attack_data(
    data: VerticalDataset, *, plan: Plan | None = None, seed: int = 0, say: Say = lambda _: None
) -> AttackReport:
    """Run all attacks that fit the rows and the plan.

    Args:
        data: The caller's own rows. Nothing of them is released: noise is made up.
        plan: The plan to attack; None: the paper's settings and the staged default.
        seed: Of the attacker's choices and of the noise.
        say: Called with what is done next.

    Raises:
        DataError: The rows are pictures other than digits.
        PlanError: The plan is of a kind that no attack here is for.
    """
    if any(part.ndim > 2 for part in data.train_features):
        raise DataError(
            f"data={data.name}: pictures with colours are attacked on a GPU (docs/evidence/attacks.md); "
            "permitted here: tables and digits"
        )
    for size in ("num_parties", "num_samples", "num_classes", "num_test_samples") if plan is not None else ():
        if getattr(plan, size) != getattr(data, size):
            raise PlanError(f"{size}={getattr(plan, size)} in the plan, {getattr(data, size)} in the data; plan anew")
    is_staged = plan is not None and plan.training is Training.LOCAL
    staged = plan if is_staged else Plan.for_budget(epsilon=8.0, data=data) if plan is None else None
    if staged is not None and staged.prediction is None:
        raise PlanError(
            "the plan makes no predictions, so nothing about a row leaves that could be attacked; train with "
            "--prediction-epsilon, as in `pbmvfl train DATASET --prediction-epsilon 8`, and attack that run"
        )
    pictures = data.layout == "digits" and data.num_parties == 4
    joint: dict[str, Plan] = {}
    if plan is not None and not is_staged:
        other = stronger(plan)
        joint = {f"this plan: {plan.release.describe()}": plan, f"stronger: {other.release.describe()}": other}
    elif plan is None:
        joint = {each.name: picture_plan(data, each) for each in _DIGITS} if pictures else usual_table_plans(data)
    scores: list[Score] = []
    shown: Pictures | None = None
    if pictures and joint:
        scores, shown = attack_pictures(data, joint, staged=staged, seed=seed, say=say)
    for name, each in {} if pictures else joint.items():
        say(f"training by {name}")
        table = attack_table(each, data, setting=name, seed=seed)
        say("testing cells and records, recovering cells, decoding columns")
        replayed = replay_score(table)
        scores += [*pair_scores(table), *([] if replayed is None else [replayed])]
        scores += [*recovery_scores(table), *column_scores(table)]
    if joint:
        say("reading labels off gradients")
        scores += label_scores(next(iter(joint.values())), data, seed=seed)
    if staged is not None:
        say("attacking predictions of staged training")
        scores += _staged_scores(staged, data, seed=seed)
    return AttackReport(scores=tuple(scores), pictures=shown, notes=_notes(joint, staged))


def _staged_scores(plan: Plan, data: VerticalDataset, *, seed: int) -> list[Score]:
    if not data.num_test_samples:
        return []
    found: list[Score] = []
    for name, votes in staged_settings(staged_votes(plan, data, seed=seed + 7)).items():
        pair = vote_pair_score(votes, setting=name, seed=seed + 8)
        found += [] if pair is None else [pair]
        if (columns := _predicted_columns(votes, data, name, seed=seed + 9)) is not None:
            found.append(columns)
    return found


def _predicted_columns(votes: StagedVotes, data: VerticalDataset, name: str, *, seed: int) -> Score | None:
    """Score the columns of predicted rows by a decoder of their votes, without labels."""
    whole, test = (np.concatenate(parts, axis=1) for parts in (data.train_features, data.test_features))
    values = [np.unique(column) for column in whole.T]
    if max(map(len, values)) > 8:
        return None
    target = indicators(whole, values)
    auxiliary = np.random.default_rng(seed).permutation(len(whole))[: len(whole) // 2]
    known = votes.features(votes.sent(votes.train_MNW[:, auxiliary], seed))
    seen = votes.features(votes.sent(votes.test_MNW, seed + 1))
    decoded = decode(known, target[auxiliary], seen, seed=seed)
    base = np.broadcast_to(target[auxiliary].mean(0), (len(test), target.shape[1]))
    return share_right(
        columns_right(decoded.value_ND, test, values),
        columns_right(base, test, values),
        attack="columns of a predicted row, no label",
        attacker=SERVER_ALONE,
        setting=name,
        bound=None,
        bound_words="several columns at once: no single bound",
    )


def _notes(joint: dict[str, Plan], staged: Plan | None) -> tuple[str, ...]:
    notes = ["A network observer of a federation with masks or TLS sees uniform noise: nothing to attack."]
    if joint:
        notes.append(
            "Own releases are bounded by the paper's count; a replayed training only by the strict one (--show-hole)."
        )
    if staged is not None:
        notes.append("Of training rows nothing leaves a staged federation but one release of each fusion row.")
    return tuple(notes)
