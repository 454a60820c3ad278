"""Random words for simulations, faster than any cipher: SplitMix64, a counter through a mixing function.

Every word depends on its number alone, so the loop vectorises, and a place in the stream is one integer. It is no
secret from anybody who knows the seed: for studies only, never for a party.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pbmvfl._compiled import compiled

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@compiled
def fill_words(words: Any, place: Any) -> None:
    """words[i] = word number place + i of the stream (Steele, Lea and Flood 2014, the constants of version 13)."""
    for i in range(words.size):
        word = (place + np.uint64(i) + np.uint64(1)) * _GOLDEN
        word = (word ^ (word >> np.uint64(30))) * _MIX_1
        word = (word ^ (word >> np.uint64(27))) * _MIX_2
        words[i] = word ^ (word >> np.uint64(31))
