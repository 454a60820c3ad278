"""How sure parties are of themselves: the typical lead of the best class over the second, measured with noise.

A vote that saturates (`votes`: margin, shares, bins) needs a gain that fits the size of scores. That size depends on
private rows, so it is either a public guess (`prediction_planner.TYPICAL_LEAD`) or counted with noise here: a party
counts its training rows by the size of their lead, in public bins of half a power of two, and releases the counts as
one more table (`symbol_tables.noisy_counts` with a single class: replacing a cell moves two counts by one).

Shape suffixes: M parties, N training rows, K classes, S bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pbmvfl.symbol_tables import noisy_counts, symbol_shares
from pbmvfl.votes import score_leads

if TYPE_CHECKING:
    from pbmvfl.randomness.secret import Entropy

#: Bins of half a power of two; what is smaller or larger than all of them is in the first or the last.
NUM_BINS = 32
_SMALLEST_LOG2 = -8.0
_BINS_PER_OCTAVE = 2


def lead_bins(scores_NK: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The bin of each row's lead, 0 up to NUM_BINS - 1."""
    logs = np.log2(np.maximum(score_leads(scores_NK), 2.0**-100))
    bins: npt.NDArray[np.int64] = np.clip(np.floor((logs - _SMALLEST_LOG2) * _BINS_PER_OCTAVE), 0, NUM_BINS - 1).astype(
        np.int64
    )
    return bins


def noisy_leads(scores_NK: npt.NDArray[Any], deviation: float, entropy: Entropy) -> npt.NDArray[np.int64]:
    """What leaves a party, (1, S) in steps: one use of a table with noise of `deviation` rows."""
    bins = lead_bins(scores_NK)
    return noisy_counts(bins, np.zeros_like(bins), 1, NUM_BINS, deviation, entropy)


def typical_lead(noisy_M1S: Sequence[npt.NDArray[np.int64]], num_rows: int, deviation: float) -> float:
    """The geometric mean over the parties of their median leads. One number for all: a party that is less sure than
    others must stay so."""
    medians = []
    for noisy in noisy_M1S:
        shares = symbol_shares(noisy, np.array([num_rows]), deviation)[0]
        below = np.concatenate([[0.0], np.cumsum(shares)])
        place = float(np.interp(0.5, below, np.arange(NUM_BINS + 1)))
        medians.append(_SMALLEST_LOG2 + place / _BINS_PER_OCTAVE)
    return math.pow(2.0, sum(medians) / len(medians))
