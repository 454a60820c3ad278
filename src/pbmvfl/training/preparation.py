"""Private preparation of a party's own columns before training: learned with noise, charged, and kept by the party.

`whiten` takes two sums over the rows, each row's part clipped, with noise: of x, for the mean m; then of z z^T, where z
is x - m clipped to a norm, for the matrix S. From then on the columns are (S + r I)^(-1/2) z, with r a multiple of what
the noise may add to a direction. All directions then have about the same scale, and steps of one size fit them all.

Shape suffixes: N rows, D columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pbmvfl.errors import CheckpointError, EncoderError
from pbmvfl.plan.groups import GRAM_DIAMETER, PreparationName
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import MEAN
from pbmvfl.training.fixed_point_grid import Grid
from pbmvfl.training.per_row_gradients import add_clipped, gram_sum

if TYPE_CHECKING:
    from pbmvfl.crypto.entropy import Entropy

#: Prefix of the preparation's names in a state.
PREPARATION = "preparation."
#: More columns would make a matrix that takes minutes to invert.
LARGEST_COLUMNS = 4096


class ColumnPreparation(Protocol):
    """Map of a party's columns, with what it has learned of them."""

    def learn(self, statistic: str, pieces: Iterable[Tensor], entropy: Entropy) -> None:
        """Learn a noisy statistic of all rows, which costs one use of each. Sums are exact: pieces change nothing."""

    #: Whether it changes rows at all.
    changes_rows: bool

    def __call__(self, rows_ND: Tensor) -> Tensor: ...

    def state(self) -> dict[str, Tensor]: ...

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Remove this preparation's entries from a party's state, and restore them."""


class AsTheyAre:
    """Identity map of the columns."""

    changes_rows = False

    def learn(self, statistic: str, pieces: Iterable[Tensor], entropy: Entropy) -> None:
        del statistic, pieces, entropy

    def __call__(self, rows_ND: Tensor) -> Tensor:
        return rows_ND

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        del state


class Whitening:
    """Map that subtracts the noisy mean and divides by the root of the noisy covariance."""

    changes_rows = True

    def __init__(self, plan: Plan, columns: int, *, index: int = 0) -> None:
        #: Shapes have small norms however many hats there are.
        norm = plan.party_shapes[index].norm if plan.party_shapes else math.sqrt(columns)
        self._radius = plan.gram_clip * norm
        noise = plan.gram_noise * self._radius**2 / plan.num_network_samples
        #: A symmetric matrix of such noise has a norm of about the deviation of an entry times sqrt(2 D).
        self._ridge = plan.ridge * noise * math.sqrt(2 * columns)
        self._mean_grid = Grid(
            noise_multiplier=plan.mean_noise,
            clip_norm=plan.mean_clip * norm,
            num_weights=columns,
            largest_batch=plan.num_network_samples,
        )
        self._gram_grid = Grid(
            noise_multiplier=plan.gram_noise,
            clip_norm=self._radius**2,
            num_weights=columns**2,
            largest_batch=plan.num_network_samples,
            diameter=GRAM_DIAMETER,
        )
        self._mean_D = torch.zeros(columns)
        self._matrix_DD = torch.eye(columns)

    def learn(self, statistic: str, pieces: Iterable[Tensor], entropy: Entropy) -> None:
        if statistic == MEAN.statistic:
            self._mean_D.copy_(torch.from_numpy(self._mean(pieces, entropy)))
        else:
            self._matrix_DD.copy_(torch.from_numpy(self._root(self._gram(pieces, entropy))))

    def _mean(self, pieces: Iterable[Tensor], entropy: Entropy) -> npt.NDArray[np.float64]:
        grid, total_D, count = self._mean_grid, np.zeros(len(self._mean_D)), 0
        for rows_ND in pieces:
            add_clipped(rows_ND.contiguous().numpy(), grid, total_D)
            count += len(rows_ND)
        return np.asarray(grid.released(total_D, entropy) * (grid.step / count), dtype=np.float64)

    def _gram(self, pieces: Iterable[Tensor], entropy: Entropy) -> npt.NDArray[np.float64]:
        grid, total_DD, count = self._gram_grid, np.zeros((len(self._mean_D),) * 2), 0
        for rows_ND in pieces:
            total_DD += gram_sum(self._centred(rows_ND).contiguous().numpy(), grid)
            count += len(rows_ND)
        noisy_DD = grid.released(total_DD.reshape(-1), entropy).reshape(total_DD.shape) * (grid.step / count)
        return (noisy_DD + noisy_DD.T) / 2

    def _root(self, gram_DD: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return (S + r I)^(-1/2). Noise may make variances negative; they count as zero."""
        variances_D, directions_DD = np.linalg.eigh(gram_DD)
        scales_D = 1 / np.sqrt(np.maximum(variances_D, 0.0) + self._ridge)
        return np.asarray((directions_DD * scales_D) @ directions_DD.T, dtype=np.float64)

    def _centred(self, rows_ND: Tensor) -> Tensor:
        centred_ND = rows_ND - self._mean_D
        norms_N1: Tensor = torch.linalg.vector_norm(centred_ND, dim=1, keepdim=True)
        clipped_ND: Tensor = centred_ND * (self._radius / norms_N1.clamp_min(1e-30)).clamp_max(1.0)
        return clipped_ND

    def __call__(self, rows_ND: Tensor) -> Tensor:
        return self._centred(rows_ND) @ self._matrix_DD

    def state(self) -> dict[str, Tensor]:
        return {PREPARATION + "mean": self._mean_D.clone(), PREPARATION + "matrix": self._matrix_DD.clone()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, mine in (("mean", self._mean_D), ("matrix", self._matrix_DD)):
            kept = state.pop(PREPARATION + name, None)
            if kept is None or kept.shape != mine.shape or not bool(torch.isfinite(kept).all()):
                raise CheckpointError(
                    f"the checkpoint has no {name} of prepared columns of shape={tuple(mine.shape)}; restore it from a "
                    "copy, or start a new run"
                )
            mine.copy_(kept)


def preparation_for(plan: Plan, *, index: int, rows: Tensor) -> ColumnPreparation:
    """Return the plan's preparation of one party's columns; `rows` are a few of them.

    Raises:
        EncoderError: If the plan prepares columns and the rows are not of few enough numbers.
    """
    if plan.preparation is PreparationName.NONE:
        return AsTheyAre()
    if rows.ndim != 2 or not rows.dtype.is_floating_point or not 1 <= rows.shape[1] <= LARGEST_COLUMNS:
        raise EncoderError(
            f"party={index}: preparation={plan.preparation} needs rows of 1 to {LARGEST_COLUMNS} numbers, got "
            f"shape={tuple(rows.shape[1:])} of {rows.dtype}; plan with preparation=none"
        )
    return Whitening(plan, rows.shape[1], index=index)
