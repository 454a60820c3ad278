"""The sum of the parties' binomials on one core, 64 trials at a time. Fast, and for simulation only.

Comparing a uniform 16-bit integer with p is done bit by bit from the top, for 64 integers in one word; most are decided
after two bits, and the loop ends when all are. That makes time depend on the noise, which the parties' own sampler must
never do, and the generator (SplitMix64) is no secret: neither matters in a study.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pbmvfl.compiled import compiled

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_PAIRS = np.uint64(0x5555555555555555)
_NIBBLES = np.uint64(0x3333333333333333)
_BYTES = np.uint64(0x0F0F0F0F0F0F0F0F)
_ONES = np.uint64(0x0101010101010101)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_WORD = 64
_SHORT = np.uint64(0xFFFF)
#: Up to so many trials comparing one by one is faster.
_FEW = 24


@compiled
def sum_of_binomials(values: Any, scale: Any, beta_16: Any, num_trials: Any, counter: Any, total: Any) -> Any:
    """total[i] = sum over m of Binomial(num_trials, p[m, i] / 65536), p as in `mechanisms.kernels.count_successes`.

    `counter` holds the generator's place and is moved on. False, with nothing drawn, if a value is NaN or infinite.
    """
    parties, size = values.shape
    finite = True
    for m in range(parties):
        for i in range(size):
            finite &= abs(values[m, i]) <= np.float32(3.4028235e38)
    if not finite:
        return False
    limit = np.float32(beta_16)
    lowest, highest = np.int32(32768 - beta_16), np.int32(32768 + beta_16)
    place = counter[0]
    for i in range(size):
        total[i] = 0
    for m in range(parties):
        for i in range(size):
            shift = min(max(values[m, i] * scale, -limit), limit)
            probability = min(max(np.int32(shift + np.float32(32768.5)), lowest), highest)
            successes = np.uint64(0)
            left = num_trials
            if num_trials <= _FEW:  # four 16-bit integers a word, compared one by one: no branch to mispredict
                below = np.uint64(probability)
                while left > 0:
                    place += _GOLDEN
                    word = place
                    word = (word ^ (word >> np.uint64(30))) * _MIX_1
                    word = (word ^ (word >> np.uint64(27))) * _MIX_2
                    word = word ^ (word >> np.uint64(31))
                    for _ in range(min(left, 4)):
                        successes += np.uint64((word & _SHORT) < below)
                        word >>= np.uint64(16)
                    left -= 4
            while left > 0:
                undecided = _ALL if left >= _WORD else (np.uint64(1) << np.uint64(left)) - np.uint64(1)
                left -= _WORD
                bit = np.int32(32768)
                while undecided != np.uint64(0) and bit != 0:
                    place += _GOLDEN
                    word = place
                    word = (word ^ (word >> np.uint64(30))) * _MIX_1
                    word = (word ^ (word >> np.uint64(27))) * _MIX_2
                    word = word ^ (word >> np.uint64(31))
                    if probability & bit:  # a zero here makes the integer smaller than p: a success
                        found = undecided & ~word
                        found = found - ((found >> np.uint64(1)) & _PAIRS)
                        found = (found & _NIBBLES) + ((found >> np.uint64(2)) & _NIBBLES)
                        found = (found + (found >> np.uint64(4))) & _BYTES
                        successes += (found * _ONES) >> np.uint64(56)
                        undecided &= word
                    else:  # a one makes it larger
                        undecided &= ~word
                    bit >>= 1
            total[i] += np.int32(successes)
    counter[0] = place
    return True
