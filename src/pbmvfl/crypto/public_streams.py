"""Public randomness: the same words on every machine for (seed, stream, index). Never used for noise or masks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: Streams of the public seed. Two uses of one seed must never share a stream.
SCHEDULE_STREAM = 1
SPLIT_STREAM = 2
WEIGHTS_STREAM = 3
CODEC_STREAM = 4


def public_bits(count: int, *, seed: int, stream: int, index: int = 0) -> npt.NDArray[np.uint64]:
    """Return public random 64-bit words.

    A bit generator's raw stream is fixed for ever; what numpy's Generator methods make of it is not.

    Args:
        count: Number of words.
        seed: Public seed of the plan.
        stream: Use of the seed, one of the constants of this module.
        index: Place within the stream, such as an epoch, a round or a party.
    """
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, (stream << 48) | index], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(count)
    return np.asarray(words, dtype=np.uint64)


def public_permutation(count: int, *, seed: int, stream: int, index: int = 0) -> npt.NDArray[np.int64]:
    """Return a permutation of 0..count-1 that every machine and every numpy version computes alike."""
    return np.argsort(public_bits(count, seed=seed, stream=stream, index=index), kind="stable").astype(np.int64)
