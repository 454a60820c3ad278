"""The hole in a count of own releases, as a game: whole trainings with one cell at either of two values.

In every game a coin chooses the cell's value, all parties train, and the server, who replays that party's training with
both values, says which one it was. The pair is searched on other noise, and the rule (the likelier value) has no
number that was fitted, so every game counts.

The same game is then played against staged training, where each update carries noise. The attacker is given more than
any server sees: every noisy sum that the party computed, on the party's own columns prepared by those sums.

Shape suffixes: G games, M parties, B rows of a round, D columns, P embedding_dim, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pbmvfl.attacks.likelihood import MadeUpEntropy, draw_counts, probabilities
from pbmvfl.attacks.replay import Cells, StackedNetworks, equal_columns, moments, normal_log, random_cells, replay
from pbmvfl.attacks.scores import ALARM_RATE, lower_end, upper_end
from pbmvfl.attacks.transcripts import Array, transcript
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms.poisson_binomial import PoissonBinomial
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import JOINT
from pbmvfl.privacy.accounting import EpsilonBound, epsilon_bound
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.training.encoders import build_encoder, build_head
from pbmvfl.training.features import feature_shape, mapped
from pbmvfl.training.fixed_point_grid import Grid
from pbmvfl.training.head import log_shares, mean_loss_slope
from pbmvfl.training.optimizer import TotalTrainer
from pbmvfl.training.per_row_gradients import rows_of, weights_of

#: Confidence of the lower bounds that are reported.
_RATE = 0.05
#: Trainings that the best cells are tried on.
_TRIALS = 2
#: Games of the command against joint and against staged training, and the delta of every epsilon.
_GAMES, _STAGED_GAMES, _DELTA = 200, 40, 1e-5


@dataclass(frozen=True, kw_only=True)
class GameResult:
    """Games won, and what an account says about them."""

    name: str
    games: int
    right: int
    #: At least this, with 95% confidence.
    advantage_at_least: float
    epsilon_at_least: float
    #: The account's numbers for this game.
    epsilon_bound: float
    advantage_bound: float
    delta: float
    #: The share of right guesses that a sound account permits is exceeded, at a false-alarm rate of one in a million.
    is_above: bool

    @property
    def advantage(self) -> float:
        """Measured advantage: twice the share of right guesses, less one."""
        return 2 * self.right / self.games - 1

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "advantage": self.advantage}


@dataclass(frozen=True, kw_only=True)
class HoleResult:
    """The game by the releases of the cell's own row, by those of all rows, and against staged training."""

    own: GameResult
    all: GameResult
    staged: GameResult
    party: int
    row: int
    train_accuracy: float

    @property
    def is_shown(self) -> bool:
        """True if the measured advantage is above the paper's with 95% confidence."""
        return self.all.advantage_at_least > self.all.advantage_bound

    @property
    def is_alarm(self) -> bool:
        """True if the game against staged training is surely above that training's own bound."""
        return self.staged.is_above

    def to_dict(self) -> dict[str, Any]:
        names = ("own", "all", "staged")
        games = {name: getattr(self, name).to_dict() for name in names}
        return {
            **games,
            "party": self.party,
            "row": self.row,
            "train_accuracy": self.train_accuracy,
            "is_shown": self.is_shown,
            "is_alarm": self.is_alarm,
        }


def game_result(name: str, ratio_G: Array, coin_G: Array, bound: EpsilonBound) -> GameResult:
    """Score games by the sign of log likelihood ratios of value 1 against value 0.

    Args:
        name: Of the game.
        ratio_G: Log likelihood ratio of each game.
        coin_G: The true value, 0 or 1, of each game.
        bound: The account's bound.
    """
    said = ratio_G > 0
    right = int((said == (coin_G == 1)).sum())
    games = len(ratio_G)
    permitted = 0.5 + bound.advantage_upper_bound / 2
    hits, alarms = int(said[coin_G == 1].sum()), int(said[coin_G == 0].sum())
    ones, zeros = int((coin_G == 1).sum()), int((coin_G == 0).sum())
    # Both ways of calling one value the alarm; half of the error rate for each of the four ends.
    sides = ((hits, ones, alarms, zeros), (zeros - alarms, zeros, ones - hits, ones))
    epsilons = [
        (lower_end(a, n, _RATE / 4) - bound.delta) / max(upper_end(b, m, _RATE / 4), 1e-12) for a, n, b, m in sides
    ]
    best = max(epsilons)
    return GameResult(
        name=name,
        games=games,
        right=right,
        advantage_at_least=2 * lower_end(right, games, _RATE) - 1,
        epsilon_at_least=max(0.0, math.log(best)) if best > 0 else 0.0,
        epsilon_bound=bound.epsilon,
        advantage_bound=bound.advantage_upper_bound,
        delta=bound.delta,
        is_above=lower_end(right, games, ALARM_RATE) > permitted,
    )


# --- joint training ---


def search_cell(plan: Plan, data: VerticalDataset, *, seed: int, candidates: int = 160) -> Cells:
    """Return the one cell, with its other value, of which other rows' releases tell most, on noise of its own.

    Candidates are in the first rounds, after which most releases follow.

    Args:
        plan: The plan of the games.
        data: The rows.
        seed: Of the noise and of the candidates.
        candidates: How many cells are tried.
    """
    random = np.random.default_rng(seed)
    early = np.concatenate([plan.schedule[number].rows for number in range(min(6, len(plan.schedule)))])
    cells = random_cells(data, candidates, random, rows=early)
    total = np.zeros(candidates)
    for trial in range(_TRIALS):
        found = replay(transcript(plan, data, seed=seed + 1000 + trial), data, cells).squared_distance
        # A pair that is far apart on one noise may be near on another: what counts is the typical distance.
        total = total + np.sqrt(found)
        best = np.argsort(-total)[: max(1, len(total) // 4)]
        cells, total = cells[best], total[best]
    return cells[np.arange(1)]


def play_joint(
    plan: Plan, data: VerticalDataset, cell: Cells, *, games: int, seed: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.int64], float]:
    """Play whole joint trainings side by side.

    Args:
        plan: A joint plan that can be replayed, with labels in clear.
        data: The rows; the cell's value in them is value 0.
        cell: One cell, whose other value is value 1.
        games: How many trainings.
        seed: Of coins and noise.

    Returns:
        Log likelihood ratios of value 1 against 0 by own and by all releases, the coins, and the training accuracy.
    """
    pbm = plan.release
    assert isinstance(pbm, PoissonBinomial)
    random = np.random.default_rng(seed)
    count, columns = plan.num_parties, equal_columns(data)
    party, row = int(cell.party_C[0]), int(cell.row_C[0])
    coin_G = np.arange(games) % 2
    random.shuffle(coin_G)
    # The last network of a game is the party's own as it would be with the value that the coin did not choose.
    networks = StackedNetworks(plan, np.tile([*range(count), party], games), columns)
    features_MND = torch.from_numpy(np.stack([*data.train_features, data.train_features[party]]).astype(np.float32))
    values_2D = torch.from_numpy(np.stack([data.train_features[party][row], cell.value_CD[0]]).astype(np.float32))
    head: Any = build_head(plan)
    weight_GKP = head.weight.detach().repeat(games, 1, 1)
    bias_G1K = head.bias.detach().repeat(games, 1, 1)
    velocity = [torch.zeros_like(weight_GKP), torch.zeros_like(bias_G1K)]
    ratio_2G = np.zeros((2, games))
    labels = torch.from_numpy(data.train_labels)
    right = seen = 0
    for turn in plan.schedule:
        if turn.kind != JOINT:
            continue
        batch_GMBD = features_MND[:, torch.from_numpy(turn.rows.copy())].expand(games, -1, -1, -1)
        own = turn.rows == row
        if own.any():
            batch_GMBD = batch_GMBD.clone()
            at = int(np.flatnonzero(own)[0])
            batch_GMBD[:, party, at] = values_2D[torch.from_numpy(coin_G)]
            batch_GMBD[:, count, at] = values_2D[torch.from_numpy(1 - coin_G)]
        rows = len(turn.rows)
        embedding = networks.embed(batch_GMBD.reshape(games * (count + 1), rows, columns))
        embedding_MGBP = embedding.view(games, count + 1, rows, -1).transpose(0, 1).numpy()
        p_MGBP = probabilities(pbm, embedding_MGBP)
        counts_GBP = draw_counts(pbm, embedding_MGBP[:count], random).sum(0)
        true_mean, true_variance = moments(p_MGBP[:count], pbm.num_trials)
        p_other = np.concatenate([np.delete(p_MGBP[:count], party, axis=0), p_MGBP[count:]])
        other_mean, other_variance = moments(p_other, pbm.num_trials)
        ratio_GB = (
            normal_log(counts_GBP, true_mean, true_variance) - normal_log(counts_GBP, other_mean, other_variance)
        ).sum(2)
        ratio_2G += np.stack([ratio_GB[:, own].sum(1), ratio_GB.sum(1)])
        sums_GBP = torch.from_numpy(pbm.estimate(counts_GBP.astype(np.uint16)))
        scores_GBK = torch.baddbmm(bias_G1K, sums_GBP, weight_GKP.transpose(1, 2))
        labels_B = labels[torch.from_numpy(turn.rows.copy())]
        right += int((scores_GBK.argmax(2) == labels_B).sum())
        seen += scores_GBK[:, :, 0].numel()
        flat = scores_GBK.reshape(games * rows, -1)
        slope_GBK = mean_loss_slope(flat, labels_B.repeat(games), plan.loss, rows=rows).view(scores_GBK.shape)
        gradient_GBP = torch.bmm(slope_GBK, weight_GKP).clamp_(-plan.gradient_bound, plan.gradient_bound)
        for value, step, kept in zip(
            (weight_GKP, bias_G1K),
            (torch.bmm(slope_GBK.transpose(1, 2), sums_GBP), slope_GBK.sum(1, keepdim=True)),
            velocity,
            strict=True,
        ):
            moved = kept.mul_(plan.momentum).add_(step) if plan.momentum else step
            value.add_(moved, alpha=-plan.learning_rate)
        networks.step(gradient_GBP.repeat_interleave(count + 1, dim=0))
    # Ratios above are of the true value against the other one: turn them into those of value 1 against value 0.
    own_G, all_G = np.where(coin_G == 1, ratio_2G, -ratio_2G)
    return own_G, all_G, coin_G, right / max(1, seen)


# --- staged training ---


def staged_game(
    plan: Plan, data: VerticalDataset, cell: Cells, *, games: int, seed: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Play local trainings with noisy steps, and give the attacker every noisy sum of gradients.

    Columns are prepared by nothing but the public map here: the statistics of `preparation` are further noisy sums, and
    their share of the epsilon is left to the attacker unused.

    Args:
        plan: A plan with local rounds and noisy steps, independent from step to step.
        data: The rows; the cell's value in them is value 0.
        cell: One cell, whose other value is value 1.
        games: How many trainings.
        seed: Of the coins and of the noise, which the party's own sampler makes from made-up bytes.

    Returns:
        Log likelihood ratios of value 1 against value 0, and the coins.

    Raises:
        PlanError: The plan trains in another way.
    """
    if not plan.noise_multiplier or plan.noise_band > 1 or plan.schedule.num_rounds(JOINT):
        raise PlanError("the game is for plans with local rounds and noise_multiplier above 0; use Plan.for_budget")
    party, row = int(cell.party_C[0]), int(cell.row_C[0])
    coin_G = np.arange(games) % 2
    np.random.default_rng(seed).shuffle(coin_G)
    part = np.ascontiguousarray(data.train_features[party], dtype=np.float32)
    values = np.stack([part[row], cell.value_CD[0][: part.shape[1]]])
    shape = feature_shape(plan, part.shape[1:], index=party)
    rows_ND = torch.from_numpy(mapped(plan, part, index=party))
    values_2D = torch.from_numpy(mapped(plan, values, index=party))
    response = plan.label_response
    entropy = MadeUpEntropy(seed)
    ratio_G = np.zeros(games)
    for game in range(games):
        labels = data.train_labels if response is None else response.draw(data.train_labels, entropy)
        ratio_G[game] = _staged_ratio(
            plan, rows_ND, values_2D, row, int(coin_G[game]), torch.from_numpy(labels), party, shape, entropy
        )
    return ratio_G, coin_G


def _staged_ratio(
    plan: Plan,
    rows_ND: torch.Tensor,
    values_2D: torch.Tensor,
    row: int,
    coin: int,
    labels: torch.Tensor,
    party: int,
    shape: tuple[int, ...],
    entropy: MadeUpEntropy,
) -> float:
    encoder = build_encoder(plan, index=party, input_shape=shape)
    trainer = TotalTrainer(plan, encoder)
    grid = Grid(
        noise_multiplier=plan.noise_multiplier,
        clip_norm=plan.clip_norm_of(weights_of(encoder)),
        num_weights=weights_of(encoder),
        largest_batch=plan.schedule.largest_batch,
        band=plan.update.band,
    )
    gradients = rows_of(encoder, grid)
    # In units of the grid's steps, as the noisy sums are.
    variance = (plan.noise_multiplier * plan.clip_norm_of(weights_of(encoder)) / grid.step) ** 2

    prior_K = log_shares(labels, plan.num_classes, plan.label_response)

    def clipped(batch: torch.Tensor, of: torch.Tensor) -> npt.NDArray[np.float64]:
        scores = gradients.forward(batch).detach() + prior_K
        return gradients.clipped_sum(mean_loss_slope(scores, of, plan.loss, rows=1, kept=plan.label_kept))

    ratio = 0.0
    for turn in plan.schedule:
        if not turn.kind.trains:
            continue
        others = torch.from_numpy(turn.rows[turn.rows != row])
        has_cell = len(others) < len(turn.rows)
        sums = clipped(rows_ND[others], labels[others]) if len(others) else np.zeros(grid.num_weights)
        if has_cell:
            both = [clipped(values_2D[i : i + 1], labels[row : row + 1]) for i in (0, 1)]
            noisy = grid.released(sums + both[coin], entropy).astype(np.float64)
            means = [(sums + each) / 2.0**grid.fine_bits for each in both]
            # A step is rounded down, which moves every value by half a step in the mean, whatever the cell is.
            distances = [float(((noisy + 0.5 - mean) ** 2).sum()) for mean in means]
            ratio += (distances[0] - distances[1]) / (2 * variance)
        else:
            noisy = grid.released(sums, entropy).astype(np.float64)
        mean = torch.from_numpy((noisy * (grid.step / len(turn.rows))).astype(np.float32))
        sizes = [weight.numel() for weight in trainer.parameters]
        slopes = [
            piece.view(weight.shape) for piece, weight in zip(torch.split(mean, sizes), trainer.parameters, strict=True)
        ]
        trainer.step(slopes)
    return ratio


# --- the command ---


def hole_plan(data: VerticalDataset) -> Plan:
    """Return the plan of the demonstration: the paper counts epsilon 5.35, and steps are large and batches small."""
    return Plan.for_data(
        data,
        embedding_dim=1,
        num_trials=16,
        beta=0.149,
        num_epochs=1,
        batch_size=10,
        learning_rate=0.5,
        label_epsilon=None,
    )


def show_hole(data: VerticalDataset, *, seed: int = 0, say: Callable[[str], None] = lambda _: None) -> HoleResult:
    """Search a cell, play the game against the paper's training, and play it against staged training.

    The joint plan is `hole_plan`, the staged one that of `Plan.for_budget` with the epsilon that the paper would count.

    Args:
        data: The rows.
        seed: Of the attacker's choices and of simulated noise.
        say: Called with what is done next.
    """
    equal_columns(data)
    plan = hole_plan(data)
    paper = epsilon_bound(plan.training_run(), Unit.CELL, Accounting.PAPER, delta=_DELTA)
    say("searching a cell of which other rows' releases tell most")
    cell = search_cell(plan, data, seed=seed)
    say(f"playing {_GAMES} whole trainings with one of two values in that cell")
    own_G, all_G, coin_G, accuracy = play_joint(plan, data, cell, games=_GAMES, seed=seed + 1)
    staged = Plan.for_budget(epsilon=paper.epsilon, delta=_DELTA, data=data)
    bound = epsilon_bound(staged.training_run().of_split("train"), Unit.CELL, Accounting.STRICT, delta=_DELTA)
    say(f"playing {_STAGED_GAMES} staged trainings with the same two values")
    ratio_G, staged_coin_G = staged_game(staged, data, cell, games=_STAGED_GAMES, seed=seed + 2)
    return HoleResult(
        own=game_result("own releases", own_G, coin_G, paper),
        all=game_result("all releases, replayed", all_G, coin_G, paper),
        staged=game_result("staged, every noisy sum given", ratio_G, staged_coin_G, bound),
        party=int(cell.party_C[0]),
        row=int(cell.row_C[0]),
        train_accuracy=accuracy,
    )
