"""What a party learns about its own columns before training: with noise, at a charge, and kept at home.

`whiten`: from one sum over the rows of x (x, 1)^T, clipped row by row, with noise, come the mean m and the covariance S
of the columns; then x is replaced by (S + r I)^(-1/2) (x - m), r a share of the largest variance. All directions then
have about the same scale, and steps of one size fit all of them. Clipping of gradients comes after it.

Shape suffixes: N rows, D columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from pbmvfl.errors import CheckpointError, EncoderError
from pbmvfl.plan import Plan
from pbmvfl.plan_groups import PreparationName
from pbmvfl.updates.grid import Grid
from pbmvfl.updates.rows import outer_sums

if TYPE_CHECKING:
    from pbmvfl.randomness.secret import Entropy

_PREFIX = "preparation."
#: More columns would make a matrix that takes minutes to invert.
LARGEST_COLUMNS = 4096


class ColumnPreparation(Protocol):
    """A map of a party's columns, with what it has learned of them."""

    def learn(self, rows_ND: Tensor, entropy: Entropy) -> None:
        """Take the noisy statistics. All of it is what one use of every row costs."""

    def __call__(self, rows_ND: Tensor) -> Tensor: ...

    def state(self) -> dict[str, Tensor]: ...

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take what belongs to it out of a party's state."""


class AsTheyAre:
    """Columns by themselves."""

    def learn(self, rows_ND: Tensor, entropy: Entropy) -> None:
        del rows_ND, entropy

    def __call__(self, rows_ND: Tensor) -> Tensor:
        return rows_ND

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        del state


class Whitening:
    """Columns with their noisy mean taken off and their noisy covariance divided out."""

    def __init__(self, plan: Plan, columns: int) -> None:
        self._ridge = plan.preparation_ridge
        self._grid = Grid(
            noise_multiplier=plan.preparation_noise,
            clip_norm=plan.preparation_clip,
            num_weights=columns * (columns + 1),
            largest_batch=plan.num_samples,
        )
        self._mean_D = torch.zeros(columns)
        self._matrix_DD = torch.eye(columns)

    def learn(self, rows_ND: Tensor, entropy: Entropy) -> None:
        rows = rows_ND.contiguous().numpy()
        (total,) = outer_sums([rows], [rows], [True], self._grid)
        shape = total.shape
        noisy = self._grid.released(total.reshape(-1), entropy).reshape(shape) * (self._grid.step / len(rows))
        mean_D, gram_DD = noisy[:, -1], noisy[:, :-1]
        covariance_DD = (gram_DD + gram_DD.T) / 2 - np.outer(mean_D, mean_D)
        variances_D, directions_DD = np.linalg.eigh(covariance_DD)
        # Noise may leave variances below zero; they count as none.
        known_D = np.maximum(variances_D, 0.0)
        largest = max(float(known_D.max()), 1e-30)
        scales_D = 1 / np.sqrt(known_D + self._ridge * largest)
        self._mean_D = torch.from_numpy(mean_D.astype(np.float32))
        self._matrix_DD = torch.from_numpy(((directions_DD * scales_D) @ directions_DD.T).astype(np.float32))

    def __call__(self, rows_ND: Tensor) -> Tensor:
        return (rows_ND - self._mean_D) @ self._matrix_DD

    def state(self) -> dict[str, Tensor]:
        return {_PREFIX + "mean": self._mean_D.clone(), _PREFIX + "matrix": self._matrix_DD.clone()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, mine in (("mean", self._mean_D), ("matrix", self._matrix_DD)):
            kept = state.pop(_PREFIX + name, None)
            if kept is None or kept.shape != mine.shape or not bool(torch.isfinite(kept).all()):
                raise CheckpointError(
                    f"the checkpoint has no {name} of prepared columns of shape={tuple(mine.shape)}; restore it from a "
                    "copy, or start a new run"
                )
            mine.copy_(kept)


def preparation_for(plan: Plan, *, index: int, rows: Tensor) -> ColumnPreparation:
    """The plan's preparation of one party's columns; `rows` are a few of them."""
    if plan.preparation is PreparationName.NONE:
        return AsTheyAre()
    if rows.ndim != 2 or not rows.dtype.is_floating_point or not 1 <= rows.shape[1] <= LARGEST_COLUMNS:
        raise EncoderError(
            f"party={index}: preparation={plan.preparation} needs rows of 1 to {LARGEST_COLUMNS} numbers, got "
            f"shape={tuple(rows.shape[1:])} of {rows.dtype}; plan with preparation=none"
        )
    return Whitening(plan, rows.shape[1])
