"""Noise that is correlated over the rounds of a run, within a band: its coefficients, and how far one row can move it.

In step t a party does not hide the sum G_t of its batch alone but a mixture of the last sums,

    y_t = c_0 G_t + c_1 G_(t-1) + ... + c_(b-1) G_(t-b+1) + z_t,   c_0 = 1,

with fresh noise z_t, and takes from all y so far its estimates of the sums: their errors then cancel from step to step,
and the weights, which add the estimates up, carry much less noise. A sum shows in b steps instead of one, so a use of a
row moves everything that is released by |c| times as much, and b must be at most the steps between two uses of a row.
docs/explanation/theory.md, 2.21, has the proof.

The coefficients are those of the square root of what training does with the estimates: their running sum, smoothed as
momentum would. As a power series that is 1/sqrt((1-x)(1-s x)), cut off after b terms and rounded to multiples of 2^-12,
which makes mixtures of integers exact. s = 3/4 lies between no momentum and .9, and is near the best for both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from pbmvfl.errors import PlanError
from pbmvfl.privacy.events import RoundedGaussianSum, UpdateEvent

#: Coefficients are multiples of 2 to minus this power.
COEFFICIENT_BITS = 12
#: Each step of the band is one more array as large as the network; and coefficients still fall from one to the next.
LARGEST_BAND = 128
_SMOOTHING = Fraction(3, 4)


@dataclass(frozen=True)
class Band:
    """Coefficients of a band of this many steps. One step means independent noise."""

    width: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.width, int) or isinstance(self.width, bool) or not 1 <= self.width <= LARGEST_BAND:
            raise PlanError(f"noise_band={self.width!r} must be a whole number in 1..{LARGEST_BAND}")

    @cached_property
    def numerators(self) -> tuple[int, ...]:
        """The coefficients in units of 2^-COEFFICIENT_BITS; the first is one."""
        one, other = _inverse_root(Fraction(1), self.width), _inverse_root(_SMOOTHING, self.width)
        exact = (sum(one[i] * other[lag - i] for i in range(lag + 1)) for lag in range(self.width))
        return tuple(round(each * (1 << COEFFICIENT_BITS)) for each in exact)

    @cached_property
    def coefficients(self) -> tuple[float, ...]:
        """Coefficients as floats, exactly."""
        return tuple(each / (1 << COEFFICIENT_BITS) for each in self.numerators)

    @cached_property
    def norm(self) -> float:
        """Norm |c|, never below the true one: what a use of a row costs, against independent noise."""
        squares = sum(each * each for each in self.numerators)
        root = math.isqrt((squares << 64) - 1) + 1  # rounded up, and far below 2^53
        return root / (1 << (32 + COEFFICIENT_BITS))

    @cached_property
    def total(self) -> float:
        """The sum of the coefficients: how much larger a mixture of sums can be than one of them."""
        return sum(self.numerators) / (1 << COEFFICIENT_BITS)


INDEPENDENT = Band()


def _inverse_root(factor: Fraction, count: int) -> list[float]:
    """Return the first terms of 1/sqrt(1 - factor*x) as a power series."""
    terms = [1.0]
    for lag in range(1, count):
        terms.append(terms[-1] * float(factor) * (2 * lag - 1) / (2 * lag))
    return terms


def check_band(band: Band, steps_between_uses: int) -> None:
    """Refuse a band that could mix two uses of one row: its shifts would add up, and their squares be too few."""
    if band.width > 1 and steps_between_uses <= 1:
        raise PlanError(
            f"noise_band={band.width} needs order=fixed or order=as-given, the same in every phase that trains: in "
            "another order a row can come back before the band is over; permitted without it: noise_band=1"
        )
    if band.width > max(1, steps_between_uses):
        raise PlanError(
            f"noise_band={band.width} must be in 1..{steps_between_uses}, the rounds of one pass: beyond that a row "
            "comes back before the band is over; use a smaller batch_size, or a narrower band"
        )


def banded_event(band: Band, *, clip_norm: float, noise_multiplier: float) -> UpdateEvent:
    """Return the event of one use of a row in steps with correlated noise.

    The noise has standard deviation noise_multiplier * clip_norm. All shifts of one use together are one shift of |c|
    times
    the clip norm's diameter, rounded up. Uses that are at least a band apart (`check_band`) add up as squares: n of
    them
    move all releases of a run by at most |c| * sqrt(n) diameters, whatever the signs are and however later uses depend
    on
    earlier releases.
    """
    diameter = 2.0 if band.width == 1 else math.nextafter(2 * band.norm, math.inf)
    return RoundedGaussianSum(clip_norm=clip_norm, noise_multiplier=noise_multiplier, diameter=diameter)
