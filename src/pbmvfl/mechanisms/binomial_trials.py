"""Binomial trials: b and beta, their search within a budget, and the sampling loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from pbmvfl._compiled import compiled
from pbmvfl._settings import check_whole, finite, setting
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms.base import Mechanism, largest
from pbmvfl.privacy.poisson_binomial import LARGEST_FAR_SUM, NEAR_BETA_16, PROBABILITY_ONE, fixed_point_beta

# --- The two numbers b and beta, their range, and the search for the least noise that a budget allows ---


#: Below this, rounding a probability to 16 bits would move an embedding by more than 1e-3 of its bound.
SMALLEST_BETA = 1 / 128
#: Largest permitted beta: bits are then the sign of an embedding with probability 127/128.
LARGEST_BETA = 63 / 128
#: The ring Z/2^k is held in 16-bit integers.
LARGEST_SUM = 65535
#: Values that a search tries. Beyond, the gain in noise at equal epsilon is below 1%, and bytes and time grow.
_TRIALS = (1, 2, 3, 4, 6, 8, 12, 16)
_SMALLEST_BETA_16 = int(SMALLEST_BETA * PROBABILITY_ONE)
_LARGEST_BETA_16 = int(LARGEST_BETA * PROBABILITY_ONE)
_PANEL = "Privacy mechanism"


@dataclass(frozen=True, kw_only=True)
class Trials(Mechanism):
    """Mechanism whose strength is num_trials * beta^2."""

    num_trials: int = setting(16, help="b: trials per coordinate. More: less noise, less privacy.", panel=_PANEL)
    beta: float = setting(0.25, help="In [1/128, 63/128]. More: less noise, less privacy.", panel=_PANEL)

    def check(self) -> None:
        check_whole("num_trials", self.num_trials, least=1)  # Algorithm 1, line 1, with a wider range of beta
        object.__setattr__(self, "beta", finite("beta", self.beta))
        if not SMALLEST_BETA <= self.beta <= LARGEST_BETA:
            reason = ""
            if 0 < self.beta < SMALLEST_BETA:
                reason = (
                    f": probabilities are 16-bit integers, and a beta below 1/128 = {SMALLEST_BETA} would round "
                    "embeddings too coarsely; lower num_trials instead for more privacy"
                )
            raise PlanError(f"beta={self.beta:g} must be in [1/128, 63/128]{reason}")
        if self.num_trials > LARGEST_SUM // 2:  # too many for two parties: how many there are does not matter
            raise PlanError(
                f"num_trials={self.num_trials} must be at most {LARGEST_SUM // 2}, and at most {LARGEST_SUM} divided "
                "by the number of parties: sums travel in rings of at most 16 bits"
            )
        if self.beta > 1 / 4 and self.num_trials > LARGEST_FAR_SUM:
            raise PlanError(
                f"beta={self.beta:g} with num_trials={self.num_trials}: above 1/4 num_trials must be at most "
                f"{LARGEST_FAR_SUM}, where the account is exact"
            )
        if self.num_trials * self.num_parties > LARGEST_SUM:
            raise PlanError(
                f"num_trials*num_parties={self.num_trials}*{self.num_parties}={self.num_trials * self.num_parties} "
                f"must be at most {LARGEST_SUM}: sums travel in rings of at most 16 bits"
            )

    @cached_property
    def beta_16(self) -> int:
        """Beta in units of 1/65536, rounded down: the beta that sampler, estimator and account really use."""
        return fixed_point_beta(self.beta)

    @property
    def _largest_beta_16(self) -> int:
        return _LARGEST_BETA_16 if self.num_trials <= LARGEST_FAR_SUM else NEAR_BETA_16

    # --- planning: for each b the largest beta under the budget; beta is an integer, so the search ends ---

    def scan(self, fixed: frozenset[str], fits: Callable[[Self], bool]) -> Iterator[Self]:
        """Return for each b the largest beta that fits."""
        trials = (self.num_trials,) if "num_trials" in fixed else _TRIALS
        for num_trials in trials:
            if num_trials * self.num_parties > LARGEST_SUM:
                continue
            tried = replace(self, num_trials=num_trials)
            found = tried._with_beta(fixed, fits, _SMALLEST_BETA_16, tried._largest_beta_16)
            if found is not None:
                yield found

    def refined(self, fixed: frozenset[str], fits: Callable[[Self], bool]) -> Self:
        """Return the settings with a larger beta, up to two fifths more.

        That is what the smaller of two valid bounds allows beyond the faster.
        """
        top = min(self._largest_beta_16, math.ceil(self.beta_16 * 1.4))
        return self._with_beta(fixed, fits, self.beta_16, top) or self

    def _with_beta(self, fixed: frozenset[str], fits: Callable[[Self], bool], low: int, high: int) -> Self | None:
        if "beta" in fixed:
            return self if fits(self) else None

        best = largest(lambda beta_16: fits(self._at(beta_16)), low, high)
        return None if best is None else self._at(best)

    def _at(self, beta_16: int) -> Self:
        return replace(self, beta=beta_16 / PROBABILITY_ONE)

    @classmethod
    def quietest(cls, base: Self, fixed: frozenset[str]) -> Self:
        return replace(
            base,
            num_trials=base.num_trials if "num_trials" in fixed else 1,
            beta=base.beta if "beta" in fixed else SMALLEST_BETA,
        )


# --- The sampler's inner loop, in constant time ---
# It runs a number of steps that depends on shapes alone and branches on no secret: an early exit would make time a
# measurement of the noise. It is also the fastest form, because it vectorises.


#: Values handled together: thresholds and counts stay in the first-level cache while the trials pass over them.
TILE = 2048


@compiled
def count_successes(values: Any, scale: Any, beta_16: Any, num_trials: Any, random: Any, counts: Any) -> None:
    """Count how many of num_trials 16-bit random integers lie below the 16-bit success probability of each value.

    The probability is 32768 + round(values[i] * scale), clamped to 32768 -+ beta_16, in units of 1/65536 (Algorithm 1,
    lines 2 and 3). `random` holds num_trials integers a value, trial by trial inside each tile, so that the comparison
    vectorises over values (the slices matter: an index that could be negative would stop that). NaN counts as 0 and
    infinity as an end, by selecting and not by branching: odd values take no other time than others.
    """
    probabilities = np.empty(TILE, np.uint16)
    tallies = np.empty(TILE, np.uint16)
    limit = np.float32(beta_16)
    half = np.float32(0.5)
    lowest = np.int32(32768 - beta_16)
    highest = np.int32(32768 + beta_16)
    for start in range(0, values.size, TILE):
        width = min(TILE, values.size - start)
        tile = values[start : start + width]
        tally = tallies[:width]
        target = counts[start : start + width]
        probability = probabilities[:width]
        for i in range(width):
            scaled = tile[i] * scale
            # Comparisons with NaN are false, so it goes to the upper end here and to the lower one there: their mean
            # is 0. Of a number both are the same, and so is their mean, to the bit.
            above = max(scaled if scaled < limit else limit, -limit)
            below = min(scaled if scaled > -limit else -limit, limit)
            shift = (above + below) * half
            rounded = np.int32(shift + np.float32(32768.5))
            probability[i] = np.uint16(min(max(rounded, lowest), highest))  # Algorithm 1, line 2
            tally[i] = 0
        first = start * num_trials
        for _ in range(num_trials):
            drawn = random[first : first + width]
            for i in range(width):
                tally[i] += np.uint16(drawn[i] < probability[i])  # Algorithm 1, line 3
            first += width
        for i in range(width):
            target[i] = tally[i]
