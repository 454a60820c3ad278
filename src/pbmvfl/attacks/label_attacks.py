"""Labels from gradients: what a curious party reads off the gradients that it receives.

With the head known, the gradient at the sums is solved for the gradient at the scores, whose least entry is the label
that the server used. Without it, gradients of a round are clustered by direction, and clusters are named by the rows
whose labels the attacker knows.

Shape suffixes: B rows of a round, P embedding_dim, K classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.attacks.scores import CURIOUS_PARTY, Score, most_right, share_right
from pbmvfl.attacks.transcripts import joint_rounds
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import PlanError
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import label_bound

Array = npt.NDArray[Any]
#: Label epsilons that a plan is attacked with; None: labels in clear.
LEVELS: tuple[float | None, ...] = (None, 4.0, 2.0, 1.0)
#: Rounds that are looked at.
_MOST_ROUNDS = 100


def solved_labels(gradient_BP: Array, head_KP: Array) -> npt.NDArray[np.int64]:
    """Return the label that each row's gradient was computed from.

    Exact for P of K - 1 or more; otherwise the best fit in the least-squares sense.

    Args:
        gradient_BP: Gradient at the sums.
        head_KP: Weights of the head in that round.
    """
    classes = len(head_KP)
    # Gradients at scores add up to 0 over the classes, so K - 1 numbers determine them.
    basis = np.eye(classes) - 1 / classes
    at_scores_BK = (
        np.asarray(gradient_BP, dtype=np.float64) @ np.linalg.pinv(basis @ head_KP.astype(np.float64)) @ basis
    )
    return np.asarray(at_scores_BK.argmin(axis=1), dtype=np.int64)


def clustered_labels(gradient_BP: Array, known_B: Array, num_classes: int, *, seed: int) -> npt.NDArray[np.int64]:
    """Return labels by clusters of directions.

    Args:
        gradient_BP: Gradient at the sums.
        known_B: Labels that the attacker knows, and -1 elsewhere.
        num_classes: K.
        seed: Of the clusters' first centres.
    """
    from sklearn.cluster import KMeans

    norm_B1 = np.linalg.norm(gradient_BP, axis=1, keepdims=True)
    direction_BP = gradient_BP / np.where(norm_B1 > 0, norm_B1, 1)
    clusters = min(num_classes, len(np.unique(direction_BP, axis=0)))
    found = KMeans(clusters, n_init=4, random_state=seed).fit_predict(direction_BP.astype(np.float64))
    known = known_B >= 0
    usual = np.bincount(known_B[known], minlength=num_classes).argmax() if known.any() else 0
    names = np.full(clusters, usual)
    for cluster in range(clusters):
        mine = known_B[known & (found == cluster)]
        if len(mine):
            names[cluster] = np.bincount(mine, minlength=num_classes).argmax()
    return np.asarray(names[found], dtype=np.int64)


def label_scores(plan: Plan, data: VerticalDataset, *, seed: int) -> list[Score]:
    """Attack training labels in clear and by label epsilons, with the head known and without.

    Each row's first gradient is used: later ones are computed from the same drawn label.

    Args:
        plan: A joint plan; its label epsilon is replaced.
        data: The rows.
        seed: Of noise, drawn labels and clusters.
    """
    found = []
    for level in LEVELS:
        chosen = plan.replace(label_epsilon=level, num_epochs=1)
        found += _scores(chosen, data, seed=seed)
    return found


def _scores(plan: Plan, data: VerticalDataset, *, seed: int) -> list[Score]:
    random = np.random.default_rng(seed)
    truth = data.train_labels
    known = np.where(random.random(len(truth)) < 0.5, truth, -1)  # the attacker's auxiliary rows
    solved, clustered, rows = [], [], []
    for number, turn in enumerate(joint_rounds(plan, data, seed=seed)):
        if number == _MOST_ROUNDS:
            break
        targets = known[turn.rows] < 0
        solved.append(solved_labels(turn.gradient_BP, turn.head[0])[targets])
        if number < 20:  # clusters of few rounds say the same as those of many
            clustered.append(clustered_labels(turn.gradient_BP, known[turn.rows], plan.num_classes, seed=seed)[targets])
        rows.append(turn.rows[targets])
    bound = label_bound(plan.training_run())
    if bound is None:
        raise PlanError("the plan uses no labels, so there is nothing to attack")
    commonest = int(np.bincount(known[known >= 0], minlength=plan.num_classes).argmax())
    level = "labels in clear" if plan.label_epsilon is None else f"label epsilon {plan.label_epsilon:g}"
    scores = []
    for name, guesses in (("labels by solving", solved), ("labels by clusters", clustered)):
        targets = np.concatenate(rows[: len(guesses)])
        guessed = truth[targets] == commonest
        prior = float((truth == np.bincount(truth).argmax()).mean())
        scores.append(
            share_right(
                np.concatenate(guesses) == truth[targets],
                guessed,
                attack=f"{name}, {level}",
                attacker=CURIOUS_PARTY,
                setting="labels from gradients",
                bound=None if plan.label_epsilon is None else most_right(bound, prior),
                bound_words="label epsilon" if plan.label_epsilon is not None else "labels in clear have none",
            )
        )
    return scores
