"""The sampler's inner loop, in constant time.

It runs a number of steps that depends on shapes alone and branches on no secret: an early exit would make time a
measurement of the noise. It is also the fastest form, because it vectorises.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pbmvfl._compiled import compiled

#: Values handled together: thresholds and counts stay in the first-level cache while the trials pass over them.
_TILE = 2048


@compiled
def count_successes(values: Any, scale: Any, beta_16: Any, num_trials: Any, random: Any, counts: Any) -> None:
    """counts[i] = how many of num_trials 16-bit random integers lie below the 16-bit success probability of values[i].

    The probability is 32768 + round(values[i] * scale), clamped to 32768 -+ beta_16, in units of 1/65536. `random`
    holds num_trials integers a value, trial by trial inside each tile, so that the comparison vectorises over values
    (the slices matter: an index that could be negative would stop that). NaN counts as 0 and infinity as an end, by
    selecting and not by branching: odd values take no other time than others.
    """
    probabilities = np.empty(_TILE, np.uint16)
    tallies = np.empty(_TILE, np.uint16)
    limit = np.float32(beta_16)
    half = np.float32(0.5)
    lowest = np.int32(32768 - beta_16)
    highest = np.int32(32768 + beta_16)
    for start in range(0, values.size, _TILE):
        width = min(_TILE, values.size - start)
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
