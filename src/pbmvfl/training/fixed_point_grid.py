"""Grid of a noisy update: how far a row may move a sum of integers, and how gradients become integers.

The noise is normal, rounded down, of standard deviation s = 2^28 steps, which stands for noise_multiplier * clip_norm.
So a step is noise_multiplier * clip_norm / s, and clip_norm is C = s / noise_multiplier steps. Rows are added up in
whole units of a finer grid, and the sum is rounded to steps once. With d weights that moves the difference of two sums
by at most sqrt(d), so exact sums would leave a row a norm of R = C - sqrt(d)/2 steps: two that differ in one row are at
most 2R + sqrt(d) = 2C steps apart. Dense layers add up a chunk of rows in float32, which is wrong by at most a share of
R; a tenth of a per cent of R is left for it. theory.md, 2.16 and 2.16a, has the proofs. Where no two rows are
more than D R apart the same holds with D in place of 2 (2.22).

With correlated noise the sums of b steps are mixed before they are rounded, and a row shows in b of them: it may have a
norm of C - sqrt(d b)/(2|c|) steps, and sums have fewer bits, so that their mixture fits 64 (2.21).

Shape suffixes: B rows of the batch, L layers, I columns into a layer, O columns out of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pbmvfl._compiled import compiled, compiled_sums
from pbmvfl.crypto.rounded_normal import SIGMA, rounded_normal
from pbmvfl.errors import PlanError
from pbmvfl.privacy.noise_band import COEFFICIENT_BITS, INDEPENDENT, Band

if TYPE_CHECKING:
    from pbmvfl.crypto.entropy import Entropy

#: Sums of integers below 2^53 are exact in float64, in whatever order they are added; half of that for safety.
_EXACT_BITS = 52
#: Mixtures of sums are made in 64-bit integers.
_MIXTURE_BITS = 62
#: The norm of one row in fine units.
_ROW_BITS = 44
#: So many rows are added up in float32 before their sum becomes integers.
CHUNK = 128
#: Rounding to float32 changes a number by at most this share of it.
_FLOAT32_UNIT = 2.0**-24
#: A row counts for nothing if a layer's input, or the gradient at its output in fine units, is longer than 2^64 or
#: 2^100: otherwise what float32 cannot tell from 0 in one factor could show in the product.
_LARGEST_SQUARE_IN, _LARGEST_SQUARE_OUT = 2.0**128, 2.0**200
#: Norms are compared with a limit that is lower by this share, far above what rounding can hide, and rows are scaled to
#: one that is lower still, so that a row that was scaled is never above, also after rounding to float32.
_CHECK_MARGIN, _SCALE_MARGIN = 2.0**-24, 2.0**-20
#: More than this share of the clip norm is not given to the rounding of the sum.
_LARGEST_ROUNDING_SHARE = 1 / 8


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Public numbers of one party's noisy updates; none depends on columns."""

    noise_multiplier: float
    clip_norm: float
    num_weights: int
    largest_batch: int
    band: Band = INDEPENDENT
    #: How far apart two rows may be, in units of the longest: 2 where they may be opposite, sqrt(2) where no two
    #: have a product below zero.
    diameter: float = 2.0

    def __post_init__(self) -> None:
        if not self.largest_batch * self.clip_steps * self.band.total < 2.0**62:
            raise PlanError(
                f"noise_multiplier={self.noise_multiplier:g} is too small for exact noise on a batch of "
                f"{self.largest_batch}: sums would leave 64-bit integers; use 1e-4 or more, or 0 for no noise"
            )
        share = self.rounding_steps / self.clip_steps
        if share > _LARGEST_ROUNDING_SHARE:
            raise PlanError(
                f"noise_multiplier={self.noise_multiplier:g} with {self.num_weights:,} weights: the grid of the noise "
                f"would take {share:.0%} of the clip norm; permitted: {_LARGEST_ROUNDING_SHARE:.0%}; use a smaller "
                "network, or less noise"
            )

    @property
    def clip_steps(self) -> float:
        """Return C, the clip norm in steps."""
        return SIGMA / self.noise_multiplier

    @property
    def step(self) -> float:
        """Return the size of one step of the grid."""
        return self.noise_multiplier * self.clip_norm / SIGMA

    @property
    def rounding_steps(self) -> float:
        """Return the part of the clip norm, in steps, that is reserved for rounding the sums that a row is in."""
        return math.sqrt(self.num_weights * self.band.width) / (self.diameter * self.band.norm)

    @property
    def _sum_bits(self) -> int:
        """Return the bits of a sum over a batch in fine units."""
        if self.band.width == 1:
            return _EXACT_BITS
        return min(_EXACT_BITS, _MIXTURE_BITS - COEFFICIENT_BITS - math.ceil(math.log2(self.band.total)))

    @cached_property
    def fine_bits(self) -> int:
        """Return the power of 2 that a step is divided by to give a fine unit; if negative, a unit is several steps."""
        bits = min(_ROW_BITS, self._sum_bits - math.ceil(math.log2(self.largest_batch)))
        return bits - math.ceil(math.log2(self.clip_steps))

    @cached_property
    def units(self) -> float:
        """Return the fine units in a gradient of norm 1."""
        return self.clip_steps * 2.0**self.fine_bits / self.clip_norm

    @cached_property
    def chunk_rows(self) -> int:
        """Return how many rows are added up in float32 at a time."""
        return min(CHUNK, self.largest_batch)

    @cached_property
    def product_error(self) -> float:
        """Return how far float32 can move a chunk's sum, as a share of the norm that each of its rows may have."""
        return self.chunk_rows * product_rounding(self.chunk_rows)

    @cached_property
    def row_norm(self) -> float:
        """Return R, the largest norm of a row, in fine units.

        The rest of C is for rounding: to steps, to fine units, and in a chunk's sum.
        """
        exact = (self.clip_steps - self.rounding_steps) * 2.0**self.fine_bits
        return (exact - math.sqrt(self.num_weights) / self.diameter) / (1 + 2 * self.product_error / self.diameter)

    @property
    def largest_square(self) -> float:
        """Return the limit of a computed squared norm that keeps the true one at most row_norm^2."""
        return self.row_norm**2 * (1 - _CHECK_MARGIN)

    @property
    def target(self) -> float:
        """Return the norm that longer rows are scaled to, in fine units."""
        return self.row_norm * (1 - _SCALE_MARGIN)

    def rounded(self, total: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Round an exact sum of fine units to whole steps. A power of two scales exactly."""
        return np.rint(total * 2.0**-self.fine_bits).astype(np.int64)

    def released(self, total: npt.NDArray[np.float64], entropy: Entropy) -> npt.NDArray[np.int64]:
        """Return the sum in steps with its noise: all that the weights ever learn of the batch."""
        return self.with_noise(self.rounded(total), entropy)

    def with_noise(self, steps: npt.NDArray[np.int64], entropy: Entropy) -> npt.NDArray[np.int64]:
        """Add fresh noise to each of the whole steps."""
        return steps + rounded_normal(entropy, steps.size)


def product_rounding(terms: int) -> float:
    """Return the largest error of a float32 sum of products, in any order, as a share of their magnitudes' sum."""
    return terms * _FLOAT32_UNIT / (1 - terms * _FLOAT32_UNIT)


@compiled_sums
def row_squares(values: Any, start: Any, squares: Any) -> None:
    """Set squares[b] = start + the sum of squares of row b; not finite if a value is not."""
    rows, columns = values.shape
    for b in range(rows):
        total = 0.0
        for i in range(columns):
            value = np.float64(values[b, i])
            total += value * value
        squares[b] = total + start


@compiled
def row_scales(ins: Any, outs: Any, units: Any, target: Any, scales: Any) -> None:
    """Set the factors of the rows' gradients at outputs that keep each norm in fine units at most `target`.

    `ins` and `outs` are the squared norms of the inputs of layers and of the gradients at their outputs. A row that is
    not finite, or with a factor so large that the others would leave float32, gets zero.
    """
    layers, rows = ins.shape
    for b in range(rows):
        total = 0.0
        for layer in range(layers):
            total += ins[layer, b] * outs[layer, b]
        norm = np.sqrt(total) * units
        factor = units * min(1.0, target / norm) if norm > 0 else units
        within = total < np.inf  # NaN is not
        for layer in range(layers):
            within &= ins[layer, b] <= _LARGEST_SQUARE_IN
            within &= outs[layer, b] * factor * factor <= _LARGEST_SQUARE_OUT
        scales[b] = factor if within else 0.0


@compiled
def add_products(
    ins: Any, outs: Any, scales: Any, with_one: Any, left: Any, right: Any, product: Any, total: Any
) -> None:
    """Add to `total` the sum over rows of (outs * scales) x (ins, and 1 for the bias), in whole fine units.

    As many rows at a time as `left` and `right` have: each such chunk is added up in float32, and chunks are added up
    exactly. Values that are not finite count as 0; nothing branches on a value. `np.dot` is BLAS's product in float32
    here; torch's could be told to multiply in fewer bits, and the bound on the error would not hold.
    """
    rows, columns_in, columns_out = ins.shape[0], ins.shape[1], outs.shape[1]
    sums = np.empty(columns_out)
    for start in range(0, rows, left.shape[0]):
        size = min(left.shape[0], rows - start)
        sums[:] = 0.0
        for b in range(size):
            scale = scales[start + b]
            for i in range(columns_out):
                value = np.float32(np.float64(outs[start + b, i]) * scale)
                known = value if abs(value) < np.float32(np.inf) else np.float32(0)
                left[b, i] = known
                sums[i] += np.float64(known)
            for i in range(columns_in):
                entry = ins[start + b, i]
                right[b, i] = entry if abs(entry) < np.float32(np.inf) else np.float32(0)
        np.dot(left[:size].T, right[:size], product)
        for o in range(columns_out):
            for i in range(columns_in):
                total[o, i] += np.rint(np.float64(product[o, i]))
            if with_one:
                total[o, columns_in] += np.rint(sums[o])


@compiled
def add_truncated(values: Any, scales: Any, largest_square: Any, total: Any) -> None:
    """Add to `total` each row of values * scales towards zero, unless the squares of these integers exceed the limit.

    NaN counts as 0, so a row of scale 0 adds nothing, whatever it holds.
    """
    rows, columns = values.shape
    for b in range(rows):
        row, scale = values[b], scales[b]
        s0, s1, s2, s3 = 0.0, 0.0, 0.0, 0.0
        for i in range(0, columns - columns % 4, 4):
            v0, v1 = np.trunc(np.float64(row[i]) * scale), np.trunc(np.float64(row[i + 1]) * scale)
            v2, v3 = np.trunc(np.float64(row[i + 2]) * scale), np.trunc(np.float64(row[i + 3]) * scale)
            s0 += v0 * v0 if v0 == v0 else 0.0
            s1 += v1 * v1 if v1 == v1 else 0.0
            s2 += v2 * v2 if v2 == v2 else 0.0
            s3 += v3 * v3 if v3 == v3 else 0.0
        for i in range(columns - columns % 4, columns):
            last = np.trunc(np.float64(row[i]) * scale)
            s0 += last * last if last == last else 0.0
        within = scale if (s0 + s1) + (s2 + s3) <= largest_square else 0.0
        for i in range(columns):
            whole = np.trunc(np.float64(row[i]) * within)
            total[i] += whole if whole == whole else 0.0
