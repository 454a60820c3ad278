"""Noisy updates: each row's gradient clipped, summed exactly, with exactly rounded normal noise on the sum.

Later computation on the noisy sum (dividing it by the rows of the batch, momentum, Adam) costs nothing more. A row's
gradient is that of its own loss: the server sends gradients of the batch's mean loss, so they are multiplied by the
rows of the batch before clipping, and the noisy sum is divided by them again.

Shape suffixes: B rows of the batch, P embedding_dim.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from pbmvfl.errors import EncoderError
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.noise_band import COEFFICIENT_BITS
from pbmvfl.training.encoders import Bounded, check_shape
from pbmvfl.training.fixed_point_grid import Grid
from pbmvfl.training.optimizer import TotalTrainer
from pbmvfl.training.per_row_gradients import rows_of, weights_of

if TYPE_CHECKING:
    from pbmvfl.crypto.entropy import Entropy

_log = logging.getLogger(__name__)
#: Function from a piece's embeddings to the gradient of the batch's mean loss at them.
Gradient = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]


class Noisy:
    """One party's network, stepped along noisy sums of clipped gradients.

    If the network raises for a batch, it is run row by row: a row for which it raises has the embedding 0 and the
    gradient 0, and moves no other row's. There is a noisy step for every batch that was embedded for training, whatever
    happened to it.
    """

    def __init__(
        self,
        plan: Plan,
        encoder: nn.Module,
        *,
        rows: Tensor | None = None,
        on_fault: Callable[[Exception], None] | None = None,
    ) -> None:
        """Validate the network for noisy updates.

        Args:
            plan: The training plan.
            encoder: The party's network.
            rows: A few of the party's own rows, to check that gradients can be taken row by row.
            on_fault: Called with what the network raised where training continued without it.

        Raises:
            EncoderError: If the proof does not hold for this network, or its gradients cannot be taken row by row.
        """
        if not isinstance(encoder, Bounded):
            raise EncoderError(f"{type(encoder).__name__} is not pbmvfl.training.encoders.Bounded; wrap it")
        _check_quiet(encoder)
        self._grid = Grid(
            noise_multiplier=plan.noise_multiplier,
            clip_norm=plan.clip_norm_of(weights_of(encoder)),
            num_weights=weights_of(encoder),
            largest_batch=plan.schedule.largest_batch,
            band=plan.update.band,
        )
        if rows is not None and len(rows):
            _try_rows(encoder, rows, self._grid, plan.embedding_dim)
        self._encoder = encoder
        self._embedding_dim = plan.embedding_dim
        self._on_fault = on_fault or _log_fault
        self._trainer = TotalTrainer(plan, encoder)
        self._rows = rows_of(encoder, self._grid)
        self._mean = torch.empty(self._grid.num_weights)  # the last noisy mean; `_slopes` are views of it
        parts = torch.split(self._mean, [weight.numel() for weight in self._trainer.parameters])
        self._slopes = [part.view(weight.shape) for part, weight in zip(parts, self._trainer.parameters, strict=True)]
        self._waiting: Tensor | None = None  # the rows of the batch
        self._whole = False  # whether it was embedded as a whole

    @property
    def waiting_rows(self) -> int:
        return 0 if self._waiting is None else len(self._waiting)

    # --- embeddings ---

    def embed(self, batch: Tensor, *, for_training: bool) -> npt.NDArray[np.float32]:
        self._waiting, self._whole = None, False
        if self._encoder.training != for_training:
            self._encoder.train(for_training)
        try:
            embedding_BP = self._embed(batch, for_training)
            self._whole = for_training
        except Exception as error:
            self._on_fault(error)
            embedding_BP = torch.cat([self._embed_alone(row, for_training) for row in _apart(batch)])
        self._waiting = batch if for_training else None
        return embedding_BP.detach().numpy()

    def _embed(self, batch: Tensor, for_training: bool) -> Tensor:
        if for_training:
            embedding_BP = self._rows.forward(batch)
        else:
            with torch.no_grad():
                embedding_BP = self._encoder(batch)
        check_shape(embedding_BP, len(batch), self._embedding_dim)
        return embedding_BP.detach()

    def _embed_alone(self, row: Tensor, for_training: bool) -> Tensor:
        try:
            return self._embed(row, for_training)
        except Exception:
            return torch.zeros(1, self._embedding_dim)

    # --- steps ---

    def apply(self, gradient_BP: npt.NDArray[np.float32], entropy: Entropy) -> None:
        """Clip, sum, add noise, step. Once for every batch: the next one must be embedded first."""
        if self._waiting is None:
            return
        batch, whole = self._waiting, self._whole
        self._waiting, self._whole = None, False
        slopes_BP = torch.from_numpy(gradient_BP * np.float32(len(batch)))
        mean = self._noisy_mean(self._clipped_sum(batch, slopes_BP, whole), len(batch), entropy)
        np.copyto(self._mean.numpy(), mean, casting="same_kind")
        self._trainer.step(self._slopes)

    def step_over(self, pieces: Iterable[tuple[Tensor, Gradient]], *, rows: int, entropy: Entropy) -> None:
        """Step once over a batch that comes piece by piece, each with its gradient as a function of its embeddings.

        Sums are exact, so that pieces of whole chunks (`piece_rows`) add up to what the batch would have given at once.

        Args:
            pieces: Rows of each piece and its gradient function.
            rows: Rows of the whole batch.
            entropy: Source of the noise.
        """
        total = np.zeros(self._grid.num_weights)
        for piece, gradient in pieces:
            slopes_BP = torch.from_numpy(gradient(self.embed(piece, for_training=True)) * np.float32(rows))
            whole, self._waiting, self._whole = self._whole, None, False
            total += self._clipped_sum(piece, slopes_BP, whole)
        np.copyto(self._mean.numpy(), self._noisy_mean(total, rows, entropy), casting="same_kind")
        self._trainer.step(self._slopes)

    def piece_rows(self, rows: int) -> int:
        """Return about so many rows, in whole chunks that are added up in float32."""
        chunk = self._grid.chunk_rows
        return max(1, rows // chunk) * chunk

    def _noisy_mean(self, total: npt.NDArray[np.float64], rows: int, entropy: Entropy) -> npt.NDArray[np.float64]:
        """Return the noisy mean to step along, from the exact sum in fine units, which nothing else sees."""
        steps = self._grid.released(total, entropy)
        return np.multiply(steps, self._grid.step / rows, dtype=np.float64)

    def _clipped_sum(self, batch: Tensor, slopes_BP: Tensor, whole: bool) -> npt.NDArray[np.float64]:
        if whole:
            try:
                return self._rows.clipped_sum(slopes_BP)
            except Exception as error:
                self._on_fault(error)
        total = np.zeros(self._grid.num_weights)
        for row, slope in zip(_apart(batch), _apart(slopes_BP), strict=True):
            try:
                self._embed(row, True)
                total += self._rows.clipped_sum(slope)
            except Exception:
                continue  # a row for which the network raises adds nothing
        return total

    def state(self) -> dict[str, Tensor]:
        return self._trainer.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._trainer.load_state(state)


def _apart(batch: Tensor) -> list[Tensor]:
    return [batch[i : i + 1] for i in range(len(batch))]


def _log_fault(error: Exception) -> None:
    _log.error("a network failed on a batch; its rows are taken one by one", exc_info=error)


def _check_quiet(encoder: nn.Module) -> None:
    """Refuse networks that draw at random: the gradient would belong to another draw than the embedding."""
    for name, module in encoder.named_modules():
        share = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0)
        if isinstance(module, nn.RReLU) or (isinstance(share, float) and share > 0):
            raise EncoderError(
                f"{name} ({type(module).__name__}) draws at random in training, and updates are noisy: gradients are "
                "taken row by row, and would belong to another draw; leave it out, the noise is there anyway"
            )


def _try_rows(encoder: Bounded, rows: Tensor, grid: Grid, embedding_dim: int) -> None:
    """Refuse networks whose gradients cannot be taken row by row, or that keep state of a batch."""
    network = copy.deepcopy(encoder).train()
    before = [buffer.clone() for buffer in network.buffers()]
    try:
        trial = rows_of(network, grid)
        embedding = trial.forward(rows[: grid.largest_batch])
        trial.clipped_sum(torch.ones(len(embedding), embedding_dim))
    except Exception as error:
        raise EncoderError(
            f"gradients of this network cannot be taken row by row, which noisy updates need: {error}; use layers that "
            "torch.func.vmap can take, without random draws, or noise_multiplier=0"
        ) from error
    same = [torch.equal(old, new) for old, new in zip(before, network.buffers(), strict=True)]
    if not all(same):
        raise EncoderError(
            "this network changes a buffer in training: that is something it learns without noise, and no epsilon "
            "counts it; use layers that keep nothing, or noise_multiplier=0"
        )


# --- Noise that is correlated within a band of steps (`privacy/noise_band.py`) ---
#
# A party keeps the exact sums of its last b - 1 batches, which are secret, and mixes them with the new one before it
# adds noise. It also keeps its estimates of them, which are computed from released values alone. Neither is in a
# checkpoint: after a resume, or if a batch is given up, both start empty. Whenever that happens, a use of a row shows
# in at most b releases with the coefficients of the band, and costs at most what it is charged.
#
# Shape suffixes: D weights.


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
