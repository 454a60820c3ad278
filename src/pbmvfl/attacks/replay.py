"""Replay of a party's training with other values of one cell, through the gradients that the server sent.

A server knows the first weights, which are public, and every gradient, which it computed. With a guess of a cell's
value it can therefore compute the party's weights after every round as they would be, and with them the law of every
later release of every row: that is what a count of a row's own releases leaves out. Networks of many replays are
stacked, so that thousands of rounds take seconds.

Shape suffixes: C replays, M parties, B rows of a round, D columns, P embedding_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pbmvfl.attacks.likelihood import counts_of, probabilities
from pbmvfl.attacks.transcripts import Array, SeenRound, Transcript
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import DataError, PlanError
from pbmvfl.mechanisms.poisson_binomial import PoissonBinomial
from pbmvfl.plan.groups import Activation, OptimizerName
from pbmvfl.plan.plan import Plan
from pbmvfl.training.encoders import SQUASH, build_encoder

#: Slopes of the activations as functions of their values.
_SLOPES: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.TANH: lambda y: 1 - y * y,
    Activation.HARDTANH: lambda y: ((y > -1) & (y < 1)).to(y.dtype),
    Activation.SOFTSIGN: lambda y: (1 - y.abs()) ** 2,
    Activation.NONE: torch.ones_like,
}


def equal_columns(data: VerticalDataset) -> int:
    """Return how many columns every party has.

    Raises:
        DataError: Parties have different numbers of columns, or pictures.
    """
    shapes = {part.shape[1:] for part in data.train_features}
    if len(shapes) > 1 or len(next(iter(shapes))) != 1:
        raise DataError(f"data={data.name}: replays need parties with equally many columns; permitted: such a table")
    return int(next(iter(shapes))[0])


def can_replay(plan: Plan) -> bool:
    """Return whether replays are written out for a plan: dense networks, SGD, the Poisson binomial mechanism."""
    dense = plan.encoder in ("mlp", "linear") and plan.optimizer is OptimizerName.SGD
    return dense and not plan.nesterov and not plan.averaging and isinstance(plan.release, PoissonBinomial)


class StackedNetworks:
    """Dense networks of equal shape, trained side by side by plain steps.

    Args:
        plan: The training plan.
        parties: Party whose first weights each network has.
        columns: Numbers of a row.

    Raises:
        PlanError: Networks or steps of the plan are of another kind.
    """

    def __init__(self, plan: Plan, parties: Array, columns: int) -> None:
        if not can_replay(plan):
            raise PlanError(
                f"encoder={plan.encoder}, optimizer={plan.optimizer}, mechanism={plan.mechanism}: replays are written "
                "for encoder=mlp or linear, optimizer=sgd without nesterov or averaging, and mechanism=pbm"
            )
        self._plan = plan
        built = {int(m): build_encoder(plan, index=int(m), input_shape=(columns,)) for m in np.unique(parties)}
        layers = {m: [leaf for leaf in net.modules() if isinstance(leaf, nn.Linear)] for m, net in built.items()}
        depth = len(next(iter(layers.values())))
        self._weights = [torch.stack([layers[int(m)][i].weight.detach() for m in parties]) for i in range(depth)]
        self._biases = [torch.stack([layers[int(m)][i].bias.detach()[None] for m in parties]) for i in range(depth)]
        self._velocities = [torch.zeros_like(each) for each in (*self._weights, *self._biases)]
        self._values: list[Tensor] = []

    def embed(self, batch_CBD: Tensor) -> Tensor:
        """Return the embeddings (C, B, P) of each network's own batch."""
        self._values = [batch_CBD]
        for i, (weight, bias) in enumerate(zip(self._weights, self._biases, strict=True)):
            values = torch.baddbmm(bias, self._values[-1], weight.transpose(1, 2))
            if i + 1 < len(self._weights):
                values = values.relu_()
            self._values.append(values)
        self._values[-1] = SQUASH[self._plan.activation](self._values[-1])
        return self._values[-1] * self._plan.bound

    def step(self, gradient_CBP: Tensor) -> None:
        """Step along the gradients of the last batches."""
        plan = self._plan
        at = gradient_CBP * plan.bound * _SLOPES[plan.activation](self._values[-1])
        depth = len(self._weights)
        for i in reversed(range(depth)):
            slope, bias_slope = torch.bmm(at.transpose(1, 2), self._values[i]), at.sum(1, keepdim=True)
            if i:
                at = torch.bmm(at, self._weights[i]) * (self._values[i] > 0)
            if plan.momentum:
                slope = self._velocities[i].mul_(plan.momentum).add_(slope)
                bias_slope = self._velocities[depth + i].mul_(plan.momentum).add_(bias_slope)
            self._weights[i].add_(slope, alpha=-plan.learning_rate)
            self._biases[i].add_(bias_slope, alpha=-plan.learning_rate)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """Cells with another value each.

    Args:
        party_C: Party of each cell.
        row_C: Row of each cell.
        value_CD: The other value of each cell.
    """

    party_C: npt.NDArray[np.int64]
    row_C: npt.NDArray[np.int64]
    value_CD: npt.NDArray[np.float32]

    def __getitem__(self, chosen: Array) -> Cells:
        return Cells(party_C=self.party_C[chosen], row_C=self.row_C[chosen], value_CD=self.value_CD[chosen])


def random_cells(data: VerticalDataset, count: int, random: np.random.Generator, *, rows: Array | None = None) -> Cells:
    """Return random cells, each with the different value that another random row has there."""
    parts = data.train_features
    party_C = random.integers(len(parts), size=count)
    row_C = random.choice(np.arange(data.num_samples) if rows is None else rows, size=count)
    width = max(part.shape[1] for part in parts)
    value_CD = np.zeros((count, width), dtype=np.float32)
    for c, (party, row) in enumerate(zip(party_C, row_C, strict=True)):
        part = parts[party]
        others = part[random.integers(len(part), size=64)]
        different = others[(others != part[row]).any(axis=1)]
        value = different[0] if len(different) else part[row]
        value_CD[c, : len(value)] = value
    return Cells(party_C=party_C, row_C=row_C, value_CD=value_CD)


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """Log likelihood ratios of the true value of each cell against its other value.

    Args:
        own: By the releases of the cell's own row.
        all: By the releases of all rows.
        squared_distance: Expected twice the ratio by all releases: how far apart the two worlds are.
    """

    own: npt.NDArray[np.float64]
    all: npt.NDArray[np.float64]
    squared_distance: npt.NDArray[np.float64]


def replay(seen: Transcript, data: VerticalDataset, cells: Cells) -> Evidence:
    """Replay one training for each cell's other value.

    Args:
        seen: The training with the true values.
        data: The true values, which the attacker knows but for the cell.
        cells: Cells, each with another value; parties must have equally many columns.

    Raises:
        PlanError: The plan's networks or steps are of another kind.
    """
    plan = seen.plan
    columns = equal_columns(data)
    networks = StackedNetworks(plan, cells.party_C, columns)
    features_MND = torch.from_numpy(np.stack(data.train_features).astype(np.float32))
    party_C, value_CD = torch.from_numpy(cells.party_C), torch.from_numpy(cells.value_CD)
    found = np.zeros((3, len(cells.row_C)))
    for turn in seen.rounds:
        batch_CBD = features_MND[:, torch.from_numpy(turn.rows.copy())][party_C]
        is_cell_CB = turn.rows[None] == cells.row_C[:, None]
        at_c, at_b = np.nonzero(is_cell_CB)
        batch_CBD[at_c, at_b] = value_CD[at_c]
        embedding_CBP = networks.embed(batch_CBD)
        ratio_CB, distance_C = _ratios(plan, turn, cells.party_C, embedding_CBP.numpy())
        found[0] += np.where(is_cell_CB, ratio_CB, 0).sum(1)
        found[1] += ratio_CB.sum(1)
        found[2] += distance_C
        networks.step(torch.from_numpy(turn.gradient_BP).expand(len(cells.row_C), -1, -1))
    return Evidence(own=found[0], all=found[1], squared_distance=found[2])


def _ratios(
    plan: Plan, turn: SeenRound, party_C: Array, other_CBP: Array
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return log likelihood ratios of the true embeddings against others of one party, and squared distances."""
    pbm = plan.release
    assert isinstance(pbm, PoissonBinomial)
    p_MBP = probabilities(pbm, turn.embedding_MBP)
    q_CBP = probabilities(pbm, other_CBP)
    counts_BP = counts_of(pbm, turn.estimate_BP)
    mean_BP, variance_BP = moments(p_MBP, pbm.num_trials)
    own_CBP = p_MBP[party_C]
    mean_CBP = mean_BP + pbm.num_trials * (q_CBP - own_CBP)
    variance_CBP = variance_BP + pbm.num_trials * (q_CBP * (1 - q_CBP) - own_CBP * (1 - own_CBP))
    ratio_CBP = normal_log(counts_BP, mean_BP, variance_BP) - normal_log(counts_BP, mean_CBP, variance_CBP)
    distance_C = ((mean_CBP - mean_BP) ** 2 / variance_BP).sum((1, 2))
    return ratio_CBP.sum(2), distance_C


def moments(p_MBP: Array, trials: int) -> tuple[Array, Array]:
    """Return mean and variance of sums of counts over the parties, the first axis."""
    return trials * p_MBP.sum(0), trials * (p_MBP * (1 - p_MBP)).sum(0)


def normal_log(value: Array, mean: Array, variance: Array) -> Array:
    """Return the log density of normal laws."""
    return -0.5 * ((value - mean) ** 2 / variance + np.log(2 * math.pi * variance))
