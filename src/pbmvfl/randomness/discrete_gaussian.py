"""The discrete Gaussian of standard deviation 2^28 on the integers, drawn with integers alone.

    P(X = x) proportional to exp(-x^2 / 2^57)

Whoever needs another standard deviation chooses the grid that the integers stand for. With a power of two everything
below is a comparison of binary fractions: no division, and no function of a floating point number. One attempt:

    k >= 0 with probability proportional to exp(-(k/16)^2 / 2), j uniform in 0..2^24 - 1, a sign
    accept |X| = 2^24 k + j with probability exp(-y), y = j (2^25 k + j) / 2^57; refuse one of the two zeros

because exp(-(k/16)^2 / 2 - y) = exp(-X^2 / 2^57) (Karney, 2016, with a finer k). A coin of probability exp(-y): count
how often in a row coins of probability y, y/2, y/3, ... succeed; an even number accepts (von Neumann; Canonne, Kamath,
Steinke, 2020). About 98 of 100 attempts are accepted.

The compiled loop sees the first 32 bits of each random number, does the same for every attempt, and branches on none.
In a few of a million attempts these bits do not decide; Python then draws 224 more of each number and goes on exactly.
The law of one draw is within 2^-240 of the exact one in total variation, which is the last bit of those numbers.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pbmvfl.compiled import compiled

if TYPE_CHECKING:
    from pbmvfl.randomness.secret import Entropy

#: The standard deviation is 2 to this power.
SIGMA_BITS = 28
SIGMA = 1 << SIGMA_BITS
#: k counts sixteenths of a standard deviation.
_STEP_BITS = 4
_LOW_BITS = SIGMA_BITS - _STEP_BITS
#: y is a multiple of 2 to minus this power.
_Y_BITS = 2 * SIGMA_BITS + 1
#: Random numbers of 32 bits in one attempt: one for k, one for j and the sign, three for the coins y, y/2 and y/3.
WORDS = 5
#: To so many bits a random number is known before a comparison counts as decided in any case.
_PRECISION = 256
#: Attempts at a time: their words and all that is made of them stay in the second-level cache.
_BLOCK = 8192
#: And those that the loop passes over together, in the first-level cache.
_TILE = 1024
_REFUSED, _ACCEPTED, _UNDECIDED = 0, 1, 2


@lru_cache(maxsize=1)
def _thresholds() -> tuple[int, ...]:
    """P(k <= i) for i = 0, 1, ... in units of 2^-256, as far as it is not 1."""
    with localcontext() as context:
        context.prec = 120
        weights = [(Decimal(-i * i) / (2 << 2 * _STEP_BITS)).exp() for i in range(25 << _STEP_BITS)]
        total, so_far, found = sum(weights), Decimal(0), []
        for weight in weights:
            so_far += weight
            found.append(int(so_far / total * (1 << _PRECISION)))
    return tuple(each for each in found if each < (1 << _PRECISION) - 1)


@lru_cache(maxsize=1)
def _short_thresholds() -> npt.NDArray[np.uint32]:
    """Their first 32 bits. Where these are all ones, longer numbers must decide, so one of those is enough."""
    short = [each >> (_PRECISION - 32) for each in _thresholds()]
    return np.array([*(each for each in short if each < 0xFFFFFFFF), 0xFFFFFFFF], dtype=np.uint32)


@compiled
def attempt(words: Any, thresholds: Any, values: Any, states: Any) -> None:
    """values[i] and whether it is accepted (1), refused (0) or undecided (2), from the five words[:, i]."""
    above = np.empty(_TILE, np.uint32)
    tied = np.empty(_TILE, np.uint32)
    for start in range(0, values.size, _TILE):
        width = min(_TILE, values.size - start)
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
            negative = np.uint64(second[i]) >> np.uint64(31)
            y = low * ((k << np.uint64(25)) + low)  # in units of 2^-57
            large = y >> np.uint64(57)
            one = np.uint32(y >> np.uint64(25))
            two = np.uint32((y >> np.uint64(1)) >> np.uint64(25))
            three = np.uint32((y // np.uint64(3)) >> np.uint64(25))
            chain_1 = third[i] < one
            chain_2 = chain_1 & (fourth[i] < two)
            chain_3 = chain_2 & (fifth[i] < three)
            tie = (third[i] == one) | (fourth[i] == two) | (fifth[i] == three) | (large != 0) | (tie_of_k[i] != 0)
            magnitude = (k << np.uint64(24)) + low
            zero_again = (magnitude == 0) & (negative != 0)
            accepted = ((not chain_1) | (chain_2 & (not chain_3))) & (not zero_again)
            value[i] = np.int64(magnitude) * (np.int64(1) - np.int64(2) * np.int64(negative))
            state[i] = np.uint8(2) if tie | chain_3 else np.uint8(accepted)


def decide(words: tuple[int, ...], entropy: Entropy) -> tuple[int, bool]:
    """The same attempt with numbers of 256 bits that begin with these 32: the value, and whether it is accepted."""
    longer = np.frombuffer(_draw(entropy, 4 * (_PRECISION - 32)), dtype=np.uint8).reshape(4, -1)
    numbers = [
        word << (_PRECISION - 32) | int.from_bytes(more.tobytes(), "big")
        for word, more in zip((words[0], *words[2:]), longer, strict=True)
    ]
    k = sum(threshold <= numbers[0] for threshold in _thresholds())
    low, negative = words[1] & ((1 << _LOW_BITS) - 1), words[1] >> 31
    magnitude = (k << _LOW_BITS) + low
    whole, rest = divmod(low * ((k << (_LOW_BITS + 1)) + low), 1 << _Y_BITS)
    accepted = _exp_coin(rest, numbers[1:], entropy) and all(_exp_coin(1 << _Y_BITS, [], entropy) for _ in range(whole))
    return (-magnitude if negative else magnitude), accepted and not (negative and not magnitude)


def _exp_coin(y: int, numbers: list[int], entropy: Entropy) -> bool:
    """A coin of probability exp(-y), y at most 1 in units of 2^-57, from these random numbers first."""
    successes = 0
    while True:
        number = numbers[successes] if successes < len(numbers) else int.from_bytes(_draw(entropy, _PRECISION), "big")
        if number * (successes + 1) << _Y_BITS >= y << _PRECISION:
            return successes % 2 == 0
        successes += 1


def _draw(entropy: Entropy, bits: int) -> bytes:
    buffer = np.empty(bits // 8, dtype=np.uint8)
    entropy.fill(buffer)
    return buffer.tobytes()


def discrete_gaussian(entropy: Entropy, count: int) -> npt.NDArray[np.int64]:
    """So many independent draws. How often the loop runs says nothing about their values."""
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
    """A few more than needed, so that a second call is rare."""
    return count + count // 32 + 32


def draws_of(words: npt.NDArray[np.uint32], entropy: Entropy) -> npt.NDArray[np.int64]:
    """What the attempts of these words give, in their order."""
    values = np.empty(words.shape[1], dtype=np.int64)
    states = np.empty(words.shape[1], dtype=np.uint8)
    attempt(words, _short_thresholds(), values, states)
    for i in np.flatnonzero(states == _UNDECIDED):
        values[i], states[i] = decide(tuple(int(word) for word in words[:, i]), entropy)
    accepted: npt.NDArray[np.int64] = values[states == _ACCEPTED]
    return accepted
