"""The grid of a noisy update: how far a row may move a sum of integers, and how gradients become integers.

The noise is a discrete Gaussian of standard deviation s = 2^28 steps, which stands for noise_multiplier * clip_norm.
So a step is noise_multiplier * clip_norm / s, and clip_norm is C = s / noise_multiplier steps. Rows are added up on a
finer grid, exactly, and the sum is rounded to steps once. With d weights that moves the difference of two sums by at
most sqrt(d), so a row may have a norm of R = C - sqrt(d)/2 steps: two sums that differ in one row are at most
2R + sqrt(d) = 2C steps apart; where rows are at most D R apart, R = C - sqrt(d)/D and D C. docs/theory.md, 2.16, has
the proof.

Shape suffixes: B rows of the batch, L layers, I columns into a layer, O columns out of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pbmvfl.compiled import compiled
from pbmvfl.errors import PlanError
from pbmvfl.randomness.rounded_normal import SIGMA, rounded_normal

if TYPE_CHECKING:
    from pbmvfl.randomness.secret import Entropy

#: Sums of integers below 2^53 are exact in float64, in whatever order they are added; half of that for safety.
_EXACT_BITS = 52
#: The norm of one row in fine units: its factors then have norms of at most 2^22, and sums of squares fit 64 bits.
_ROW_BITS = 44
#: Norms are compared with a limit that is lower by this share, far above what rounding can hide, and rows are scaled to
#: one that is lower still, so that the comparison never fails for a row that was scaled.
_CHECK_MARGIN, _SCALE_MARGIN = 2.0**-24, 2.0**-20
#: More than this share of the clip norm is not given to the rounding of the sum.
_LARGEST_ROUNDING_SHARE = 1 / 8


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The numbers of one party's noisy updates. Public: none depends on columns."""

    noise_multiplier: float
    clip_norm: float
    num_weights: int
    largest_batch: int
    #: How far apart two rows may be, in units of the longest: 2 where they may be opposite, sqrt(2) where no two
    #: have a product below zero.
    diameter: float = 2.0

    def __post_init__(self) -> None:
        if not self.largest_batch * self.clip_steps < 2.0**62:
            raise PlanError(
                f"noise_multiplier={self.noise_multiplier:g} is too small for exact noise on a batch of "
                f"{self.largest_batch}: sums would leave 64-bit integers; use 1e-4 or more, or 0 for no noise"
            )
        share = self.rounding / self.clip_steps
        if share > _LARGEST_ROUNDING_SHARE:
            raise PlanError(
                f"noise_multiplier={self.noise_multiplier:g} with {self.num_weights:,} weights: the grid of the noise "
                f"would take {share:.0%} of the clip norm; permitted: {_LARGEST_ROUNDING_SHARE:.0%}; use a smaller "
                "network, or less noise"
            )

    @property
    def clip_steps(self) -> float:
        """C: the clip norm in steps."""
        return SIGMA / self.noise_multiplier

    @property
    def rounding(self) -> float:
        """What rounding the sum takes of the clip norm, in steps: it moves the difference of two sums by sqrt(d)."""
        return math.sqrt(self.num_weights) / self.diameter

    @property
    def step(self) -> float:
        """What one step of the grid stands for."""
        return self.noise_multiplier * self.clip_norm / SIGMA

    @cached_property
    def fine_bits(self) -> int:
        """A fine unit is a step divided by 2 to this power. It may be negative: then it is some steps."""
        bits = min(_ROW_BITS, _EXACT_BITS - math.ceil(math.log2(self.largest_batch)))
        return bits - math.ceil(math.log2(self.clip_steps))

    @cached_property
    def units(self) -> float:
        """Fine units in a gradient of norm 1."""
        return self.clip_steps * 2.0**self.fine_bits / self.clip_norm

    @cached_property
    def row_norm(self) -> float:
        """R in fine units: what a row's integers may have as their norm."""
        return (self.clip_steps - self.rounding) * 2.0**self.fine_bits

    @property
    def largest_square(self) -> float:
        """What a computed squared norm is compared with; the true one is then at most row_norm^2."""
        return self.row_norm**2 * (1 - _CHECK_MARGIN)

    @property
    def target(self) -> float:
        """The norm that longer rows are scaled to, in fine units."""
        return self.row_norm * (1 - _SCALE_MARGIN)

    def rounded(self, total: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """An exact sum of fine units in whole steps. A power of two scales exactly."""
        return np.rint(total * 2.0**-self.fine_bits).astype(np.int64)

    def released(self, total: npt.NDArray[np.float64], entropy: Entropy) -> npt.NDArray[np.int64]:
        """The sum in steps with its noise: all that the weights ever learn of the batch."""
        return self.rounded(total) + rounded_normal(entropy, total.size)


@compiled
def row_squares(values: Any, start: Any, squares: Any) -> None:
    """squares[b] = start + the sum of squares of row b; not finite if a value is not."""
    rows, columns = values.shape
    for b in range(rows):
        row = values[b]
        s0, s1, s2, s3 = np.float64(start), 0.0, 0.0, 0.0
        i = 0
        while i + 4 <= columns:
            v0, v1 = np.float64(row[i]), np.float64(row[i + 1])
            v2, v3 = np.float64(row[i + 2]), np.float64(row[i + 3])
            s0 += v0 * v0
            s1 += v1 * v1
            s2 += v2 * v2
            s3 += v3 * v3
            i += 4
        while i < columns:
            last = np.float64(row[i])
            s0 += last * last
            i += 1
        squares[b] = (s0 + s1) + (s2 + s3)


@compiled
def factor_scales(ins: Any, outs: Any, units: Any, target: Any, scale_in: Any, scale_out: Any) -> None:
    """By what each row's factors are multiplied, layer by layer, so that its norm in fine units is at most target.

    `ins` and `outs` are the squared norms of the inputs of layers and of the gradients at their outputs. Both factors
    get the same norm, which loses least to rounding. A row with something that is not finite gets zeros.
    """
    layers, rows = ins.shape
    for b in range(rows):
        total = 0.0
        for layer in range(layers):
            total += ins[layer, b] * outs[layer, b]
        finite = total < np.inf  # NaN is not
        norm = np.sqrt(total) * units
        factor = units * min(1.0, target / norm) if norm > 0 else units
        for layer in range(layers):
            there = finite and ins[layer, b] > 0 and outs[layer, b] > 0
            balance = np.sqrt(factor * np.sqrt(outs[layer, b] / ins[layer, b])) if there else 0.0
            scale_in[layer, b] = balance
            scale_out[layer, b] = factor / balance if there else 0.0


@compiled
def truncated(values: Any, scales: Any, with_one: Any, integers: Any, squares: Any) -> None:
    """integers[b] = values[b] * scales[b] towards zero, and squares[b] the sum of their squares, exactly.

    `with_one` adds a column for the bias, whose input is 1. NaN counts as 0; nothing branches on a value.
    """
    rows, columns = values.shape
    for b in range(rows):
        row, target, scale = values[b], integers[b], scales[b]
        total = np.int64(0)
        for i in range(columns):
            scaled = np.float64(row[i]) * scale
            known = scaled if scaled == scaled else 0.0
            whole = np.int32(min(max(known, -8388608.0), 8388608.0))
            target[i] = np.float64(whole)
            total += np.int64(whole) * np.int64(whole)
        if with_one:
            last = np.int64(min(max(scale, 0.0), 8388608.0))
            target[columns] = np.float64(last)
            total += last * last
        squares[b] = total


@compiled
def add_truncated(values: Any, scales: Any, largest_square: Any, total: Any) -> None:
    """total += each row of values * scales towards zero, unless the squares of these integers exceed the largest.

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
