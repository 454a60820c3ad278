"""Attacks on pictures of digits: what a learned decoder shows, and the row that is found among N candidates.

A picture that looks like the label's mean is not protected: beside every picture stands how often the true row is the
likeliest of all candidates, for an attacker who knows the networks.

Shape suffixes: E epochs, N rows, T targets, M parties, P embedding_dim, D pixels, R releases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.attacks.decoders import decode
from pbmvfl.attacks.likelihood import draw_counts, log_law, probabilities
from pbmvfl.attacks.scores import SERVER_ALONE, Score, most_right, paired_interval, share_right
from pbmvfl.attacks.staged import StagedVotes, releases_bound, staged_votes
from pbmvfl.attacks.transcripts import joint_rounds
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import DataError
from pbmvfl.mechanisms.poisson_binomial import PoissonBinomial
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.units import Unit

Array = npt.NDArray[Any]
#: Releases of a row at which it is looked for.
RELEASES = (1, 2, 5, 10, 20, 40, 100, 300)
#: Releases whose mean is shown beside a single one.
MANY = 40
_SIDE = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Pictures:
    """Pictures of some targets as each setting shows them, and curves of how often a row is found.

    Args:
        titles: What each line of pictures shows.
        shown: Pictures (lines, columns, side, side), in [0, 1].
        found: For each setting (releases, share found) points.
        candidates: N of "found among N".
    """

    titles: tuple[str, ...]
    shown: npt.NDArray[np.float64]
    found: dict[str, list[tuple[int, float]]]
    candidates: int


def whole_pictures(parts: tuple[Array, ...]) -> npt.NDArray[np.float64]:
    """Join four quadrants, each (N, 16), to pictures (N, 64).

    Raises:
        DataError: There are not four quadrants of 4 x 4.
    """
    half = _SIDE // 2
    if len(parts) != 4 or any(part.shape[1:] != (half * half,) for part in parts):
        raise DataError("pictures here are the digits of four parties, a quadrant of 4 x 4 each; load digits")
    quarter = [np.asarray(part, dtype=np.float64).reshape(-1, half, half) for part in parts]
    top, bottom = (np.concatenate(pair, axis=2) for pair in (quarter[:2], quarter[2:]))
    return np.concatenate([top, bottom], axis=1).reshape(len(parts[0]), _SIDE * _SIDE)


def explained(truth_TD: Array, shown_TD: Array, mean_D: Array) -> float:
    """Return R2: the share of the squared distance from the mean picture that is explained."""
    return float(1 - ((truth_TD - shown_TD) ** 2).sum() / ((truth_TD - mean_D) ** 2).sum())


def picture_score(
    truth_TD: Array, shown_TD: Array, base_TD: Array, mean_D: Array, *, attack: str, setting: str
) -> Score:
    """Score decoded pictures by R2, paired with the baseline's picture of the same row."""
    scale = ((truth_TD - mean_D) ** 2).sum(1).mean()
    gains = (((truth_TD - base_TD) ** 2).sum(1) - ((truth_TD - shown_TD) ** 2).sum(1)) / scale
    return Score(
        attack=attack,
        attacker=SERVER_ALONE.name,
        setting=setting,
        measure="R2 of pictures",
        value=explained(truth_TD, shown_TD, mean_D),
        baseline=explained(truth_TD, base_TD, mean_D),
        gain=paired_interval(gains),
        bound=None,
        bound_words="see found",
        surely_above=None,
        tries=len(truth_TD),
    )


def found_rows(
    pbm: PoissonBinomial, embedding_NMP: Array, *, releases: tuple[int, ...], seed: int
) -> dict[int, npt.NDArray[np.bool_]]:
    """Return for each number of releases whether each row is the likeliest of all rows, networks known.

    Args:
        pbm: The mechanism.
        embedding_NMP: Embeddings of the rows, which are the candidates.
        releases: Numbers of releases, rising; each goes on from the one before.
        seed: Of the noise.
    """
    random = np.random.default_rng(seed)
    rows, _, width = embedding_NMP.shape
    log_NF = log_law(probabilities(pbm, embedding_NMP).transpose(0, 2, 1), pbm.num_trials).reshape(rows, -1)
    seen_NF = np.zeros_like(log_NF)
    offset_NP = (np.arange(rows * width) * (log_NF.shape[1] // width)).reshape(rows, width)
    found: dict[int, npt.NDArray[np.bool_]] = {}
    done = 0
    for until in releases:
        for _ in range(until - done):
            sums_NP = draw_counts(pbm, embedding_NMP, random).sum(1)
            seen_NF.reshape(-1)[offset_NP + sums_NP] += 1  # no two of these places are the same
        done = until
        found[until] = np.asarray((seen_NF @ log_NF.T).argmax(1) == np.arange(rows))
    return found


@dataclass(frozen=True, kw_only=True)
class PictureSetting:
    """A setting of the Poisson binomial mechanism that pictures are attacked in."""

    name: str
    num_trials: int
    beta: float


def picture_plan(data: VerticalDataset, setting: PictureSetting) -> Plan:
    """Return the joint training of digits in a setting, with labels in clear."""
    return Plan.for_data(
        data,
        num_trials=setting.num_trials,
        beta=setting.beta,
        embedding_dim=16,
        num_epochs=300,
        batch_size=100,
        learning_rate=0.01,
        momentum=0.9,
        label_epsilon=None,
    )


def attack_pictures(
    data: VerticalDataset,
    plans: dict[str, Plan],
    *,
    staged: Plan | None,
    seed: int,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[list[Score], Pictures]:
    """Attack digits in each joint plan, and a staged plan's predictions.

    Args:
        data: Digits of four parties.
        plans: Joint plans by the names of their settings; the first one's exact sums are shown too.
        staged: Plan with local rounds and predictions; None: none.
        seed: Of noise and auxiliary rows.
        say: Called with what is done next.
    """
    random = np.random.default_rng(seed)
    whole = whole_pictures(data.train_features)
    labels = data.train_labels
    order = random.permutation(len(whole))
    auxiliary, targets = order[: len(order) // 2], order[len(order) // 2 :]
    mean_D = whole[auxiliary].mean(0)
    by_label = np.stack([whole[auxiliary][labels[auxiliary] == k].mean(0) for k in range(data.num_classes)])
    base_TD, truth_TD = by_label[labels[targets]], whole[targets]
    one_of_each = [int(np.flatnonzero(labels[targets] == k)[0]) for k in range(data.num_classes)]
    lines = [("original", truth_TD), ("guess from the label", base_TD)]
    classes = np.eye(data.num_classes)[labels]
    scores: list[Score] = []
    curves: dict[str, list[tuple[int, float]]] = {}

    def show(seen_NF: Array, attack: str, setting: str) -> None:
        seen_NF = np.concatenate([seen_NF, classes], axis=1)
        decoded = decode(
            seen_NF[auxiliary],
            whole[auxiliary],
            seen_NF[targets],
            seed=seed,
            centre_ND=by_label[labels[auxiliary]],
            new_centre=base_TD,
        )
        lines.append((f"{setting}, {attack}" if setting != attack else attack, decoded.value_ND))
        scores.append(picture_score(truth_TD, decoded.value_ND, base_TD, mean_D, attack=attack, setting=setting))

    for number, (name, plan) in enumerate(plans.items()):
        say(f"training by {name}")
        pbm = plan.release
        assert isinstance(pbm, PoissonBinomial)
        sums, embedding_NMP = _sums_by_epoch(plan, data, seed=seed + 1)
        if not number:
            show(sums, f"sums of {plan.num_epochs} epochs", "exact sums")
        drawn = np.random.default_rng(seed + 2)
        released = np.stack([draw_counts(pbm, embedding_NMP, drawn).sum(1) for _ in range(MANY)]).astype(np.float64)
        show(released[0], "one release", name)
        show(released.mean(0), f"{MANY} releases", name)
        curves[name] = []
        for releases, right in found_rows(pbm, embedding_NMP[targets], releases=RELEASES, seed=seed + 3).items():
            curves[name].append((releases, float(right.mean())))
            if releases in (1, MANY):
                bound = releases_bound(pbm.event, Unit.RECORD, releases=releases)
                scores.append(
                    share_right(
                        right,
                        1 / len(targets),
                        attack=f"found among {len(targets)}, {releases} release{'s' if releases > 1 else ''}",
                        attacker=SERVER_ALONE,
                        setting=name,
                        bound=most_right(bound, 1 / len(targets)),
                        bound_words=f"record, {releases} released",
                    )
                )
    if staged is not None:
        say("training parties alone, staged")
        votes = staged_votes(staged, data, seed=seed + 4)
        for name, chosen in staged_settings(votes).items():
            shown, found = _predicted(chosen, whole, auxiliary, targets, name, seed=seed + 5)
            scores.append(found)
            lines.append((f"{name}, predicted once, no label", shown))
    titles = tuple(title for title, _ in lines)
    pictures = np.stack([pixels[one_of_each] for _, pixels in lines])
    pictures = pictures.reshape(len(lines), len(one_of_each), _SIDE, _SIDE)
    return scores, Pictures(titles=titles, shown=np.clip(pictures, 0, 1), found=curves, candidates=len(targets))


def staged_settings(votes: StagedVotes) -> dict[str, StagedVotes]:
    """Return the plan's own votes, and a stronger setting where there is one, by their names."""
    mechanism: Any = votes.mechanism
    own = getattr(mechanism, "response_epsilon", None)
    if own is None:
        return {"staged": votes}
    return {f"staged, epsilon {own:.2g}": votes, f"staged, epsilon {own / 4:.2g}": votes.with_epsilon(own / 4)}


def _sums_by_epoch(plan: Plan, data: VerticalDataset, *, seed: int) -> tuple[Array, Array]:
    """Return exact sums of every row in every epoch (N, E P), and the embeddings of the last epoch (N, M, P)."""
    epochs, count, width = plan.num_epochs, plan.num_samples, plan.embedding_dim
    sums_NEP = np.zeros((count, epochs, width))
    last_NMP = np.zeros((count, plan.num_parties, width), dtype=np.float32)
    uses = np.zeros(count, dtype=np.int64)
    for turn in joint_rounds(plan, data, seed=seed):
        sums_NEP[turn.rows, uses[turn.rows]] = turn.embedding_MBP.sum(0)
        last_NMP[turn.rows] = turn.embedding_MBP.transpose(1, 0, 2)
        uses[turn.rows] += 1
    return sums_NEP.reshape(count, -1), last_NMP


def _predicted(
    votes: StagedVotes, whole: Array, auxiliary: Array, targets: Array, name: str, *, seed: int
) -> tuple[npt.NDArray[np.float64], Score]:
    """Decode the targets from one vote each, without their labels: the attacker votes on auxiliary rows by itself."""
    known = votes.features(votes.sent(votes.train_MNW[:, auxiliary], seed))
    seen = votes.features(votes.sent(votes.train_MNW[:, targets], seed + 1))
    decoded = decode(known, whole[auxiliary], seen, seed=seed).value_ND
    mean_D = whole[auxiliary].mean(0)
    base_TD = np.broadcast_to(mean_D, decoded.shape)
    attack = "a row predicted once, no label"
    return decoded, picture_score(whole[targets], decoded, base_TD, mean_D, attack=attack, setting=name)
