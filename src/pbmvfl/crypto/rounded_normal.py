"""The normal law of mean 0 and standard deviation 2^28, rounded down to integers, drawn with integers alone.

    P(floor(X) = v) = Phi((v + 1) / 2^28) - Phi(v / 2^28)

Rounded down, and not towards zero or to the nearest: for a vector S of integers S + floor(X) = floor(S + X), which is
computed from S + X, the output of the Gaussian mechanism. So all that holds of that mechanism holds of this one, its
loss distribution too. For another standard deviation, choose the grid that the integers stand for.

One attempt draws a real number |X| = 2^24 (k + x), of which only as many bits are made as matter:

    k >= 0 with probability proportional to exp(-(k/16)^2 / 2), x uniform in [0, 1), a sign
    accept with probability exp(-y), y = x (2k + x) / 512

because exp(-(k/16)^2 / 2 - y) = exp(-X^2 / 2^57) (Karney, 2016, with a finer k). k and the first 24 bits of x are the
integer part n of |X|; floor(X) is n, or -n - 1 below zero. A coin of probability exp(-y): count how often in a row
coins of probability y, y/2, y/3, ... succeed; an even number accepts (von Neumann; Canonne, Kamath, Steinke, 2020).
About 98 of 100 attempts are accepted.

The compiled loop sees the first 32 bits of each random number and the first 24 of x, does the same for every attempt,
and branches on none. What it decides is so whatever bits follow. In some of a million attempts these bits do not
decide; Python then draws 224 more of each number and continues exactly. The law of one draw is within 2^-240 of the
exact one in total variation, which is the last bit of those numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pbmvfl._compiled import compiled

if TYPE_CHECKING:
    from pbmvfl.crypto.entropy import Entropy

#: Random numbers of 32 bits in one attempt: one for k, one for x and the sign, three for the coins y, y/2 and y/3.
WORDS = 5
#: Bits that follow the first ones of each random number where those do not decide, and how many there are then.
_MORE_BITS = 224
_PRECISION = 32 + _MORE_BITS
#: Attempts at a time: their words and all that is made of them stay in the second-level cache.
_BLOCK = 8192
#: And those that the loop passes over together, in the first-level cache.
TILE = 1024
_REFUSED, _ACCEPTED, _UNDECIDED = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the grid.

    The standard deviation is 2^(step_bits + low_bits); k counts parts of it, 2^step_bits in each.
    """

    step_bits: int
    low_bits: int

    def integer_part(self, k: int, low: int) -> int:
        """Integer part of |X|."""
        return (k << self.low_bits) + low

    @property
    def one(self) -> int:
        """Number that stands for y = 1 in the units of `exponent`."""
        return 1 << 2 * (self.step_bits + self.low_bits + _MORE_BITS) + 1

    def exponent(self, k: int, low: int, more: int) -> int:
        """Return y, if `more` are the next 224 bits of x: (|X|^2 - (start of step k)^2) / (2 sigma^2), exactly."""
        inside = low << _MORE_BITS | more
        return inside * ((k << self.low_bits + _MORE_BITS + 1) + inside)


#: The compiled loop has the numbers of this scale in it.
SCALE = Scale(step_bits=4, low_bits=24)
SIGMA = 1 << SCALE.step_bits + SCALE.low_bits


@lru_cache(maxsize=4)
def _thresholds(step_bits: int) -> tuple[int, ...]:
    """P(k <= i) for i = 0, 1, ... in units of 2^-256, as far as it is not 1."""
    with localcontext() as context:
        context.prec = 120
        weights = [(Decimal(-i * i) / (2 << 2 * step_bits)).exp() for i in range(25 << step_bits)]
        total, so_far, found = sum(weights), Decimal(0), []
        for weight in weights:
            so_far += weight
            found.append(int(so_far / total * (1 << _PRECISION)))
    return tuple(each for each in found if each < (1 << _PRECISION) - 1)


@lru_cache(maxsize=1)
def _short_thresholds() -> npt.NDArray[np.uint32]:
    """Return the first 32 bits of the thresholds.

    Where these are all ones, longer numbers must decide, so one of those is enough.
    """
    short = [each >> _MORE_BITS for each in _thresholds(SCALE.step_bits)]
    return np.array([*(each for each in short if each < 0xFFFFFFFF), 0xFFFFFFFF], dtype=np.uint32)


@compiled
def attempt(words: Any, thresholds: Any, values: Any, states: Any) -> None:
    """Set values[i] and whether it is accepted (1), refused (0) or undecided (2), from the five words[:, i]."""
    above = np.empty(TILE, np.uint32)
    tied = np.empty(TILE, np.uint32)
    for start in range(0, values.size, TILE):
        width = min(TILE, values.size - start)
        end = start + width
        first, second, third = words[0, start:end], words[1, start:end], words[2, start:end]
        fourth, fifth = words[3, start:end], words[4, start:end]
        value, state = values[start:end], states[start:end]
        count, tie_of_k = above[:width], tied[:width]
        for i in range(width):
            count[i] = 0
            tie_of_k[i] = 0
        for threshold in thresholds:  # k = how many thresholds lie below the number; equal bits decide nothing
            for i in range(width):
                count[i] += np.uint32(first[i] > threshold)
                tie_of_k[i] |= np.uint32(first[i] == threshold)
        for i in range(width):
            k = np.uint64(count[i])
            low = np.uint64(second[i]) & np.uint64((1 << 24) - 1)
            negative = np.int64(second[i] >> np.uint32(31))
            y = low * ((k << np.uint64(25)) + low)  # in units of 2^-57, if all further bits of x are zeros
            # If they are ones it is larger by less than 2^25 (k + 1): in units of 2^-32 by at most this, so y/n too.
            room = count[i] + np.uint32(1)
            large = (y + (np.uint64(room) << np.uint64(25))) >> np.uint64(57)
            one = np.uint32(y >> np.uint64(25))
            two = np.uint32(y >> np.uint64(26))
            three = np.uint32((y // np.uint64(3)) >> np.uint64(25))
            chain_1 = third[i] < one
            chain_2 = chain_1 & (fourth[i] < two)
            chain_3 = chain_2 & (fifth[i] < three)
            # A word from the lower end of a coin to `room` above it decides nothing. Below the lower end the difference
            # is of a number below zero, which is a large one here.
            near = (np.uint32(third[i] - one) <= room) | (np.uint32(fourth[i] - two) <= room)
            near |= (np.uint32(fifth[i] - three) <= room) | (large != 0) | (tie_of_k[i] != 0)
            accepted = (not chain_1) | (chain_2 & (not chain_3))
            value[i] = np.int64((k << np.uint64(24)) + low) ^ -negative  # n, or -n - 1
            state[i] = np.uint8(2) if near | chain_3 else np.uint8(accepted)


def decide(words: tuple[int, ...], entropy: Entropy, scale: Scale = SCALE) -> tuple[int, bool]:
    """Decide an attempt with 224 more bits of every number: return the value, and whether it is accepted."""
    drawn = _draw(entropy, WORDS * _MORE_BITS)
    size = _MORE_BITS // 8
    more = [int.from_bytes(drawn[start : start + size], "big") for start in range(0, len(drawn), size)]
    numbers = [word << _MORE_BITS | rest for word, rest in zip(words, more, strict=True)]
    k = sum(threshold <= numbers[0] for threshold in _thresholds(scale.step_bits))
    low, negative = words[1] & ((1 << scale.low_bits) - 1), words[1] >> 31
    whole, rest = divmod(scale.exponent(k, low, more[1]), scale.one)
    accepted = _exp_coin(rest, scale.one, numbers[2:], entropy)
    accepted = accepted and all(_exp_coin(1, 1, [], entropy) for _ in range(whole))
    return scale.integer_part(k, low) ^ -negative, accepted


def _exp_coin(y: int, one: int, numbers: list[int], entropy: Entropy) -> bool:
    """Toss a coin of probability exp(-y / one), y at most one, from these random numbers first."""
    successes = 0
    while True:
        number = numbers[successes] if successes < len(numbers) else int.from_bytes(_draw(entropy, _PRECISION), "big")
        if number * (successes + 1) * one >= y << _PRECISION:
            return successes % 2 == 0
        successes += 1


def _draw(entropy: Entropy, bits: int) -> bytes:
    buffer = np.empty(bits // 8, dtype=np.uint8)
    entropy.fill(buffer)
    return buffer.tobytes()


def rounded_normal(entropy: Entropy, count: int) -> npt.NDArray[np.int64]:
    """Draw independent values of the rounded normal law, of standard deviation 2^28.

    How often the loop runs says nothing about the values.

    Args:
        entropy: Source of secret randomness.
        count: Number of values.
    """
    drawn = np.empty(count, dtype=np.int64)
    done = 0
    words = np.empty((WORDS, min(_BLOCK, _attempts(count))), dtype=np.uint32)
    while done < count:
        attempts = min(_BLOCK, _attempts(count - done))
        here = words if words.shape[1] == attempts else np.empty((WORDS, attempts), dtype=np.uint32)
        entropy.fill(here)
        accepted = draws_of(here, entropy)[: count - done]
        drawn[done : done + len(accepted)] = accepted
        done += len(accepted)
    return drawn


def _attempts(count: int) -> int:
    """Return how many attempts to make at once: a few more than needed, so that a second call is rare."""
    return count + count // 32 + 32


def draws_of(words: npt.NDArray[np.uint32], entropy: Entropy) -> npt.NDArray[np.int64]:
    """Return the accepted values of the attempts of these words, in their order."""
    values = np.empty(words.shape[1], dtype=np.int64)
    states = np.empty(words.shape[1], dtype=np.uint8)
    attempt(words, _short_thresholds(), values, states)
    for i in np.flatnonzero(states == _UNDECIDED):
        values[i], states[i] = decide(tuple(int(word) for word in words[:, i]), entropy)
    accepted: npt.NDArray[np.int64] = values[states == _ACCEPTED]
    return accepted
