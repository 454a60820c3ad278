"""The two numbers b and beta, their range, and the search for the least noise that a budget allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from pbmvfl._settings import check_whole, finite, setting
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms.base import Mechanism, largest
from pbmvfl.privacy.fixed_point import PROBABILITY_ONE, fixed_point_beta
from pbmvfl.privacy.poisson_binomial import LARGEST_FAR_SUM, NEAR_BETA_16

#: Below this, rounding a probability to 16 bits would move an embedding by more than 1e-3 of its bound.
SMALLEST_BETA = 1 / 128
#: As large as it may be: bits are then the sign of an embedding with probability 127/128.
LARGEST_BETA = 63 / 128
#: The ring Z/2^k is held in 16-bit integers.
LARGEST_SUM = 65535
#: What a search tries. Beyond, the gain in noise at equal epsilon is below one per cent, and bytes and time grow.
_TRIALS = (1, 2, 3, 4, 6, 8, 12, 16)
_SMALLEST_BETA_16 = int(SMALLEST_BETA * PROBABILITY_ONE)
_LARGEST_BETA_16 = int(LARGEST_BETA * PROBABILITY_ONE)
_PANEL = "Privacy mechanism"


@dataclass(frozen=True, kw_only=True)
class Trials(Mechanism):
    """A mechanism whose strength is num_trials * beta^2."""

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
        """beta in units of 1/65536, rounded down; the beta that sampler, estimator and account really use."""
        return fixed_point_beta(self.beta)

    @property
    def _largest_beta_16(self) -> int:
        return _LARGEST_BETA_16 if self.num_trials <= LARGEST_FAR_SUM else NEAR_BETA_16

    # --- planning: for each b the largest beta under the budget; beta is an integer, so the search ends ---

    def scan(self, fixed: frozenset[str], fits: Callable[[Self], bool]) -> Iterator[Self]:
        """For each b the largest beta that fits."""
        trials = (self.num_trials,) if "num_trials" in fixed else _TRIALS
        for num_trials in trials:
            if num_trials * self.num_parties > LARGEST_SUM:
                continue
            tried = replace(self, num_trials=num_trials)
            found = tried._with_beta(fixed, fits, _SMALLEST_BETA_16, tried._largest_beta_16)
            if found is not None:
                yield found

    def refined(self, fixed: frozenset[str], fits: Callable[[Self], bool]) -> Self:
        """With a larger beta, up to two fifths more: what the smaller of two valid bounds allows beyond the faster."""
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
