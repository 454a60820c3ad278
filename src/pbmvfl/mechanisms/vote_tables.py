"""Reading symbols: how often each class has each symbol at a party, counted with noise, and the class that follows.

A party counts the symbols of its training rows by class and adds noise: one release of the whole table, in which
replacing a cell moves one row of the data from one count to another of the same class (labels are the same in both
worlds), so two counts by one: an l2 distance of sqrt 2. The server makes of it the probability of each SENT symbol, as
the law of the randomised response is public, and adds up logarithms over the parties:

    score(class) = ln prior(class) + sum over the parties of ln P(sent symbol | class)

the logarithm of the posterior, up to a constant a row, if symbols of different parties are independent given the class.
Sums of ballots with Laplace noise are read by the same tables, coordinate by coordinate (`ballot_scores`).

Shape suffixes: M parties, B rows, N training rows, K classes, S symbols.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pbmvfl._settings import finite
from pbmvfl.crypto.rounded_normal import SIGMA, rounded_normal
from pbmvfl.errors import PlanError

if TYPE_CHECKING:
    from pbmvfl.crypto.entropy import Entropy

#: The largest distance of two tables that differ in one cell, in rows.
TABLE_DIAMETER = math.sqrt(2)
SMALLEST_DEVIATION, LARGEST_DEVIATION = 1e-3, 1e6
#: Counts in steps stay below this, so that noise cannot carry them over the end of 64-bit integers.
_LARGEST_STEPS = 1 << 62
#: Rows that are added to every count, in units of the noise and at least: a symbol that no row had is not impossible.
_SMOOTHING_SHARE, _SMALLEST_SMOOTHING = 0.2, 0.5


# --- at a party ---


def steps_per_row(deviation: float) -> int:
    """Return what one row counts for, in steps of the noise, whose standard deviation is 2^28 steps.

    Rounded down, so that the noise is of at least `deviation` rows.
    """
    deviation = finite("table_deviation", deviation)
    if not SMALLEST_DEVIATION <= deviation <= LARGEST_DEVIATION:
        raise PlanError(f"table_deviation={deviation:g} must be in [{SMALLEST_DEVIATION:g}, {LARGEST_DEVIATION:g}]")
    return int(SIGMA / deviation)


def exact_counts(
    symbols_N: npt.NDArray[np.int64], labels_N: npt.NDArray[np.int64], num_classes: int, num_symbols: int
) -> npt.NDArray[np.int64]:
    """Return how many rows of each class have each symbol, (K, S). Never leaves the party."""
    flat = np.bincount(labels_N * num_symbols + symbols_N, minlength=num_classes * num_symbols)
    return flat.astype(np.int64).reshape(num_classes, num_symbols)


def noisy_counts(
    symbols_N: npt.NDArray[np.int64],
    labels_N: npt.NDArray[np.int64],
    num_classes: int,
    num_symbols: int,
    deviation: float,
    entropy: Entropy,
) -> npt.NDArray[np.int64]:
    """Return the table that leaves the party, (K, S).

    Args:
        symbols_N: The true vote of each row.
        labels_N: The class of each row.
        num_classes: K.
        num_symbols: S.
        deviation: Standard deviation of the noise on each count, in rows.
        entropy: Source of secret randomness.

    Returns:
        Counts in steps (`steps_per_row`), with noise.

    Raises:
        PlanError: There are too many rows for so little noise.
    """
    steps = steps_per_row(deviation)
    if len(symbols_N) * steps >= _LARGEST_STEPS:
        raise PlanError(
            f"table_deviation={deviation:g} is too small for {len(symbols_N):,} rows: counts would leave 64-bit "
            f"integers; use {len(symbols_N) * SIGMA / _LARGEST_STEPS:.2g} or more"
        )
    exact = exact_counts(symbols_N, labels_N, num_classes, num_symbols) * steps
    return exact + rounded_normal(entropy, exact.size).reshape(exact.shape)


# --- on the wire ---

_COUNT = np.dtype("<i8")


def table_bytes(num_classes: int, num_symbols: int) -> int:
    return num_classes * num_symbols * _COUNT.itemsize


def encode_table(noisy_KS: npt.NDArray[np.int64]) -> bytes:
    return noisy_KS.astype(_COUNT).tobytes()


def decode_table(payload: bytes | memoryview, num_classes: int) -> npt.NDArray[np.int64]:
    """Return a table of the right length; whatever its numbers are, `symbol_shares` makes probabilities of them."""
    return np.frombuffer(payload, dtype=_COUNT).astype(np.int64).reshape(num_classes, -1)


# --- at the server ---


def symbol_shares(
    noisy_KS: npt.NDArray[np.int64], rows_of_class_K: npt.NDArray[np.int64], deviation: float
) -> npt.NDArray[np.float64]:
    """Return the estimated probability of each true symbol given the class, (K, S); every row adds up to 1.

    The server knows how many rows a class has. So of all tables without negative counts and with these totals the
    nearest one counts, which takes most of the noise out of the empty places; then a few rows are added everywhere.
    """
    counts = noisy_KS / steps_per_row(deviation)
    smoothing = max(_SMALLEST_SMOOTHING, _SMOOTHING_SHARE * deviation)
    shares = np.empty(counts.shape)
    for k, total in enumerate(rows_of_class_K.tolist()):
        nearest = _nearest_counts(counts[k], float(total)) + smoothing
        shares[k] = nearest / nearest.sum()
    return shares


def _nearest_counts(counts: npt.NDArray[np.float64], total: float) -> npt.NDArray[np.float64]:
    """Return the nearest list to `counts` without negative numbers that adds up to the total.

    All are lowered or raised by one and the same number, and what falls below 0 is 0.
    """
    falling = np.sort(counts)[::-1]
    lowered = (np.cumsum(falling) - total) / np.arange(1, counts.size + 1)
    kept = np.nonzero(falling > lowered)[0]
    by = lowered[kept[-1]] if kept.size else 0.0
    return np.maximum(counts - by, 0.0)


def sent_log_likelihoods(shares_KS: npt.NDArray[np.float64], kept: float) -> npt.NDArray[np.float64]:
    """Return ln P(sent symbol | class), (K, S): the true one with probability `kept`, else one of all S uniformly."""
    return np.asarray(np.log(kept * shares_KS + (1 - kept) / shares_KS.shape[1]))


def log_prior(rows_of_class_K: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return ln P(class) from the number of training rows of each class; a class without rows counts as half a row."""
    rows = np.maximum(rows_of_class_K.astype(np.float64), 0.5)
    return np.asarray(np.log(rows / rows.sum()))


def class_scores(
    sent_MB: npt.NDArray[Any], tables_MKS: Sequence[npt.NDArray[np.float64]], log_prior_K: npt.NDArray[np.float64]
) -> npt.NDArray[np.float32]:
    """Return ln P(class | all parties' symbols), (B, K). The largest is the class to predict.

    A number that is no symbol, which no honest party sends, says nothing about the class.
    """
    scores_BK = np.broadcast_to(log_prior_K, (sent_MB.shape[1], log_prior_K.size)).copy()
    for sent_B, table_KS in zip(sent_MB, tables_MKS, strict=True):
        symbols = sent_B.astype(np.int64)
        known = (symbols >= 0) & (symbols < table_KS.shape[1])
        scores_BK += np.where(known[:, None], table_KS[:, np.where(known, symbols, 0)].T, 0.0)
    return _normalised(scores_BK)


def ballot_scores(
    ballots_BK: npt.NDArray[Any],
    shares_MKS: Sequence[npt.NDArray[np.float64]],
    scale: float,
    log_prior_K: npt.NDArray[np.float64],
) -> npt.NDArray[np.float32]:
    """Return class scores (B, K) from sums of all parties' ballots with discrete Laplace noise of this scale.

    How many ballots a class gets is a sum of independent bits, whose probabilities the tables have; with the noise it
    has a law of its own for each true class. Logarithms are added up over the coordinates, as if these were
    independent: the noise, which is most of it, is. Far out they hardly change, so one large deviation decides nothing.
    """
    totals = np.rint(ballots_BK).astype(np.int64)
    num_classes, most = log_prior_K.size, len(shares_MKS)
    # Beyond, likelihoods of all classes fall by the same factor.
    reach = math.ceil(40 * scale) + most
    seen = np.arange(-reach, reach + 1)
    noise = np.exp(-np.abs(seen[:, None] - np.arange(most + 1)) / scale)
    places = np.clip(totals, -reach, reach) + reach
    scores_BK = np.broadcast_to(log_prior_K, (len(totals), num_classes)).copy()
    for k in range(num_classes):
        for s in range(totals.shape[1]):
            votes = np.ones(1)
            for shares in shares_MKS:
                votes = np.convolve(votes, [1 - shares[k, s], shares[k, s]])
            scores_BK[:, k] += np.log(noise @ votes)[places[:, s]]
    return _normalised(scores_BK)


def _normalised(scores_BK: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Return logarithms of probabilities that add up to 1 in each row."""
    largest = scores_BK.max(axis=1, keepdims=True)
    scores_BK = scores_BK - largest
    scores_BK = scores_BK - np.log(np.exp(scores_BK).sum(axis=1, keepdims=True))
    return scores_BK.astype(np.float32)
