"""Exact draws of the negative binomial shares that add up to discrete Laplace noise.

    P(X = 0) = (1 - p)^(1/n),   P(X = k+1) = P(X = k) * p * (k + 1/n) / (k + 1),   p = exp(-1/scale)

is NegativeBinomial(1/n, p); n independent ones add up to a geometric variable, and the difference of two geometric
ones is discrete Laplace noise of that scale.

A uniform number u gives X = how many k have P(X <= k) <= u. The first 64 bits of u are compared with a table of
floor(2^64 P(X <= k)), by a search whose number of steps depends on the length of the table alone. That decides X unless
u has the very 64 bits of an entry: once in 2^52 draws at a scale of 64, once in 2^44 at the largest. Then u gets more
random bits and the sums more digits, until it is decided. So the law is exact: nothing is rounded and no tail is cut.

Sums are integers in units of 2^-bits with a bound on their error (theory.md, "Laplace noise in shares").
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Context, Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pbmvfl._compiled import compiled

if TYPE_CHECKING:
    from pbmvfl.crypto.entropy import Entropy

_WORD_BITS = 64
_TOP = (1 << _WORD_BITS) - 1
#: Far below a word's last bit even after the errors of a million terms.
_BITS = 256


def cumulative(scale: float, shares: int, bits: int) -> Iterator[tuple[int, int]]:
    """Yield, for k = 0, 1, ..., integers between which 2^bits P(X <= k) lies, ends included."""
    context = Context(prec=bits // 3 + 40)  # a third is above log10(2), and the rest is for rounding
    ratio = context.exp(context.divide(Decimal(-1), Decimal(scale)))
    first = context.exp(context.divide(context.ln(context.subtract(Decimal(1), ratio)), Decimal(shares)))
    unit = context.power(Decimal(2), bits)
    # One less than the floor: below the truth, whatever the last digits were rounded to, by at most two units.
    p, term = (int(context.multiply(each, unit)) - 1 for each in (ratio, first))
    total, k = 0, 0
    while True:
        total += term
        yield total, total + 4 * (k + 1) ** 2
        term = term * p * (k * shares + 1) // (((k + 1) * shares) << bits)
        k += 1


@lru_cache(maxsize=16)
def table(scale: float, shares: int) -> npt.NDArray[np.uint64]:
    """Return floor(2^64 P(X <= k)) for k = 0, 1, ... up to the first that is 2^64 - 1; all later ones are that too."""
    bits = _BITS
    while True:
        found = _table(scale, shares, bits)
        if found is not None:
            entries = np.array(found, dtype=np.uint64)
            entries.setflags(write=False)
            return entries
        bits *= 2  # a sum so near to a multiple of 2^-64 that these digits do not tell on which side


def _table(scale: float, shares: int, bits: int) -> list[int] | None:
    entries: list[int] = []
    for low, high in cumulative(scale, shares, bits):
        entry = low >> (bits - _WORD_BITS)
        if high >> (bits - _WORD_BITS) != entry:
            return None
        entries.append(entry)
        if entry == _TOP:
            return entries
    raise AssertionError("the sums never end")


def decide(scale: float, shares: int, word: int, entropy: Entropy) -> int:
    """Return X for a uniform number whose first 64 bits are `word`, with as many more as it takes."""
    drawn, length = word, _WORD_BITS
    more = np.empty(1, dtype=np.uint64)
    while True:
        found = _decided(scale, shares, drawn, length)
        if found is not None:
            return found
        entropy.fill(more)
        drawn, length = (drawn << _WORD_BITS) | int(more[0]), length + _WORD_BITS


def _decided(scale: float, shares: int, drawn: int, length: int) -> int | None:
    """Return X if every number that begins with these bits has the same one."""
    bits = _BITS + length
    low_end, high_end = drawn << _BITS, (drawn + 1) << _BITS
    if drawn == (1 << length) - 1:
        return None  # such numbers reach up to 1, and X has no end
    for k, (low, high) in enumerate(cumulative(scale, shares, bits)):
        if low >= high_end:
            return k
        if high > low_end:
            return None
    raise AssertionError("the sums never end")


def draw(scale: float, shares: int, words: npt.NDArray[np.uint64], entropy: Entropy) -> npt.NDArray[np.int64]:
    """Return X for each of these random words. `entropy` gives more bits where a word does not decide."""
    entries = table(scale, shares)
    counts = np.empty(words.size, dtype=np.int64)
    if _search(entries, words, counts):
        for i in np.nonzero(entries[counts] == words)[0].tolist():
            counts[i] = decide(scale, shares, int(words[i]), entropy)
    return counts


@compiled
def _search(entries: Any, words: Any, counts: Any) -> Any:
    """Set counts[i] to how many entries lie below words[i]; return how many words are equal to an entry.

    Halving without a branch on what was drawn: every word takes the same steps.
    """
    undecided: Any = 0
    size = entries.size
    for i in range(words.size):
        word = words[i]
        first: Any = 0
        length = size
        while length > 1:
            half = length // 2
            first += half * np.int64(entries[first + half - 1] < word)
            length -= half
        first += np.int64(entries[first] < word)
        counts[i] = first
        undecided += np.int64(entries[first] == word)
    return undecided
