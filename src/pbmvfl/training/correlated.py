"""Noisy updates whose noise is correlated within a band of steps (`privacy/correlated.py`).

A party keeps the exact sums of its last b - 1 batches, which are secret, and mixes them with the new one before it
adds noise. It also keeps its estimates of them, which are computed from released values alone. Neither is in a
checkpoint: after a resume, or if a batch is given up, both start empty. Whenever that happens, a use of a row shows in
at most b releases with the coefficients of the band, and costs at most what it is charged.

Shape suffixes: D weights.
"""

from __future__ import annotations

from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pbmvfl.privacy.correlated import COEFFICIENT_BITS
from pbmvfl.training.noisy import Noisy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from pbmvfl.crypto.entropy import Entropy
    from pbmvfl.training.fixed_point_grid import Grid
    from pbmvfl.training.noisy import Gradient


class BandMemory:
    """Last sums and estimates of one sequence of steps."""

    def __init__(self, grid: Grid) -> None:
        self._numerators = grid.band.numerators
        self._coefficients = grid.band.coefficients
        #: Mixtures are in units of a step divided by 2 to this power.
        self._bits = grid.fine_bits + COEFFICIENT_BITS
        before = grid.band.width - 1
        self._sums: deque[npt.NDArray[np.int64]] = deque(maxlen=before)  # the newest first, in fine units
        self._estimates: deque[npt.NDArray[np.float64]] = deque(maxlen=before)  # the newest first, in steps

    def mixture(self, total_D: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return c_0 G_t + c_1 G_(t-1) + ... in whole steps, and keep G_t.

        Exact but for one rounding to the nearest at the end: the grid leaves room for 64-bit integers.

        Args:
            total_D: The exact sum G_t in fine units.
        """
        newest_D = total_D.astype(np.int64)
        mixed_D = newest_D * np.int64(self._numerators[0])
        for numerator, earlier_D in zip(self._numerators[1:], self._sums, strict=False):
            mixed_D += earlier_D * np.int64(numerator)
        self._sums.appendleft(newest_D)
        if self._bits <= 0:
            return mixed_D << -self._bits
        rounded: npt.NDArray[np.int64] = (mixed_D + (1 << (self._bits - 1))) >> self._bits
        return rounded

    def estimate(self, released_D: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Estimate the newest sum, in steps, from its noisy mixture and the estimates before, by solving y = C G."""
        estimate_D = released_D.astype(np.float64)
        for coefficient, earlier_D in zip(self._coefficients[1:], self._estimates, strict=False):
            estimate_D -= coefficient * earlier_D
        self._estimates.appendleft(estimate_D)
        return estimate_D

    def forget(self) -> None:
        """Start empty: no later mixture or estimate uses a sum or an estimate from before."""
        self._sums.clear()
        self._estimates.clear()


class Correlated(Noisy):
    """Noisy updates with a band.

    The estimate of a sum is divided by the rows of a full batch, also for a short one: errors cancel from step to step
    only if all are divided alike.
    """

    @cached_property
    def _memory(self) -> BandMemory:
        return BandMemory(self._grid)

    def embed(self, batch: Tensor, *, for_training: bool) -> npt.NDArray[np.float32]:
        if self.waiting_rows:  # its gradient never came, so steps are no longer as far apart as rounds
            self._memory.forget()
        return super().embed(batch, for_training=for_training)

    def apply(self, gradient_BP: npt.NDArray[np.float32], entropy: Entropy) -> None:
        try:
            super().apply(gradient_BP, entropy)
        except Exception:  # as above: this step was not made
            self._memory.forget()
            raise

    def step_over(self, pieces: Iterable[tuple[Tensor, Gradient]], *, rows: int, entropy: Entropy) -> None:
        try:
            super().step_over(pieces, rows=rows, entropy=entropy)
        except Exception:
            self._memory.forget()
            raise

    def _noisy_mean(self, total: npt.NDArray[np.float64], rows: int, entropy: Entropy) -> npt.NDArray[np.float64]:
        del rows
        released = self._grid.with_noise(self._memory.mixture(total), entropy)
        return self._memory.estimate(released) * (self._grid.step / self._grid.largest_batch)

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        self._memory.forget()
