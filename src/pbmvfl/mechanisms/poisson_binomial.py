"""The Poisson binomial mechanism, in integers; b and beta, their search within a budget, and the sampling loop.

    p = 1/2 + beta * x / C        success probability of one coordinate x in [-C, C]
    q ~ Binomial(b, p)            what a party adds to the sum
    h~ = C / (beta * b) * (sum of q - b * M / 2)

p and beta are integers in units of 1/65536, and the sampler compares integers, so the account's worst case (p at
1/2 -+ beta exactly) holds for the program and not only for real numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from pbmvfl._compiled import compiled
from pbmvfl._settings import check_whole, finite, setting
from pbmvfl.crypto.ring import Ring
from pbmvfl.crypto.secure_sum import PackedIntegers
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms.base import Mechanism, NoisySum, Scratch, largest, register
from pbmvfl.privacy.events import PoissonBinomialRelease
from pbmvfl.privacy.poisson_binomial import LARGEST_FAR_SUM, NEAR_BETA_16, PROBABILITY_ONE, fixed_point_beta

if TYPE_CHECKING:
    import torch

    from pbmvfl.crypto.entropy import Entropy

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


# --- The Poisson binomial mechanism ---

#: Random bytes drawn at a time: they stay in the second-level cache between the cipher and the comparison.
_BLOCK_BYTES = 1 << 19


@register
@dataclass(frozen=True, kw_only=True)
class PoissonBinomial(Trials):
    """Mechanism of one party and the server's estimator for it."""

    name: ClassVar[str] = "pbm"
    words: ClassVar[str] = "Poisson binomial, only sums are readable"
    reading: ClassVar[str] = "noisy sums"
    sums_are_hidden: ClassVar[bool] = True

    @cached_property
    def event(self) -> PoissonBinomialRelease:
        """Event of one row's release. Sampler and estimator take beta from here, rounded as the account rounds it."""
        return PoissonBinomialRelease(
            num_trials=self.num_trials,
            beta=self.beta,
            num_parties=self.num_parties,
            embedding_dim=self.embedding_dim,
            secure_sum=self.secure_aggregation,
        )

    @cached_property
    def ring(self) -> Ring:
        return Ring.for_sums_up_to(self.largest_sum)

    @property
    def largest_sum(self) -> int:
        return self.num_trials * self.num_parties

    @cached_property
    def payload(self) -> PackedIntegers:
        # Without masks a party's value is at most b, and needs only the bits of b.
        bits = self.ring.bits if self.secure_aggregation else self.num_trials.bit_length()
        return PackedIntegers(bits=bits, ring=self.ring)

    @property
    def variance_upper_bound(self) -> float:
        """Variance C^2 M / (4 beta^2 b), which no embedding exceeds."""
        beta = self.event.beta_16 / PROBABILITY_ONE
        return self.bound**2 * self.num_parties / (4 * beta**2 * self.num_trials)

    @cached_property
    def _constants(self) -> tuple[int, np.float32]:
        """Return beta in units of 1/65536, and the factor that turns an embedding into a shift of that many units."""
        beta_16 = self.event.beta_16
        return beta_16, np.float32(beta_16 / self.bound)

    def randomize(
        self, embedding: npt.NDArray[np.float32], entropy: Entropy, scratch: Scratch | None = None
    ) -> npt.NDArray[Any]:
        """Return a fresh q for every value of the embedding, in the ring's own type.

        NaN counts as 0, infinity as an end.
        """
        scratch = scratch or Scratch()
        values = np.ascontiguousarray(embedding, dtype=np.float32).reshape(-1)
        counts = np.empty(values.size, dtype=self.ring.dtype)
        step = max(1, _BLOCK_BYTES // (2 * self.num_trials))
        if values.size <= step:  # nearly always; slices of so few values would cost a tenth of the draw
            self._draw(values, entropy, scratch, counts)
        else:
            for start in range(0, values.size, step):
                self._draw(values[start : start + step], entropy, scratch, counts[start : start + step])
        return counts.reshape(embedding.shape)  # Algorithm 1, line 4

    def _draw(
        self, values: npt.NDArray[np.float32], entropy: Entropy, scratch: Scratch, counts: npt.NDArray[Any]
    ) -> None:
        random = scratch.words(values.size * self.num_trials)
        entropy.fill(random)
        beta_16, scale = self._constants
        count_successes(values, scale, beta_16, self.num_trials, random, counts)

    def estimate(self, total: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
        """Return the unbiased estimate of the sum of the embeddings."""
        # Algorithm 2, line 10, with the bound C that the printed line leaves out.
        scale = self.bound * PROBABILITY_ONE / (self.event.beta_16 * self.num_trials)
        centre = self.num_trials * self.num_parties / 2
        return ((total.astype(np.float32) - np.float32(centre)) * np.float32(scale)).astype(np.float32)

    def simulated_sum(self, *, seed: int, device: torch.device) -> NoisySum:
        from pbmvfl.mechanisms.simulated import binomial_sum

        return binomial_sum(self, seed=seed, device=device)

    @classmethod
    def candidates(cls, base: Self, fixed: frozenset[str], fits: Callable[[Self], bool]) -> Iterator[Self]:
        yield from base.scan(fixed, fits)

    def describe(self) -> str:
        return f"PBM b={self.num_trials}, beta={self.beta:g}" + ("" if self.secure_aggregation else ", sums not hidden")

    @property
    def notes(self) -> tuple[str, ...]:
        if self.secure_aggregation:
            return ()
        return ("without secure aggregation the server reads every party's values, not only their sum",)
