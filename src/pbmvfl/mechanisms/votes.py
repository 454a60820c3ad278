"""Votes: what a party makes of its own class scores before a mechanism takes them, and how sums become scores again.

    raw       the scores themselves, K coordinates
    margin    two classes: gain (s1 - s0), clipped to [-1, 1], one coordinate
    shares    softmax(gain s), K coordinates, none negative, together at most one
    ballot    1 for the class with the largest score and 0 for the others, K coordinates
    bins      two classes: one symbol, the bin of the logistic of gain (s1 - s0) among `grades` equal ones
    top       one symbol of K: which class has the largest score
    ranks     one symbol of K (K-1): which class has the largest score, and which the second

`top` and `ranks` may have `grades`: so many equal bins of tanh(gain/2 (largest - second largest score)), and as many
times as many symbols. The federation's score of a class is the sum over the parties, so margins, shares and ballots may
be added up; symbols are read party by party, by a fusion model. A vote is public and is computed from one row's scores
alone. It never fails: what is no number counts as 0 and infinity as a large number, because whether a party answers
must not depend on its columns.

Shape suffixes: B rows, K classes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl._settings import check_whole, finite, one_of
from pbmvfl.errors import PlanError

#: Far above any score that decides something, and far inside of what float64 can multiply by a gain.
_LARGEST_SCORE = 1e30
SMALLEST_GAIN, LARGEST_GAIN = 1e-6, 1e6
#: Largest number of symbols, the values of a byte; mechanisms with symbols have the same limit.
LARGEST_SYMBOLS = 256


class VoteKind(StrEnum):
    """Kinds of votes that scores become."""

    RAW = "raw"
    MARGIN = "margin"
    SHARES = "shares"
    BALLOT = "ballot"
    BINS = "bins"
    TOP = "top"
    RANKS = "ranks"


#: Those that are one symbol.
SYMBOLIC = frozenset({VoteKind.BINS, VoteKind.RANKS, VoteKind.TOP})
_TWO_CLASSES = frozenset({VoteKind.MARGIN, VoteKind.BINS})


@dataclass(frozen=True, kw_only=True)
class Vote:
    """Map from scores to what a mechanism takes. Every number is public."""

    kind: VoteKind
    #: Scores are multiplied by it first, but raw ones. More: small differences count more, large ones saturate.
    gain: float = 1.0
    #: Number of parts that a difference of scores is cut into, for bins, top and ranks.
    grades: int = 1
    #: C: what is handed to the mechanism lies in [-C, C].
    bound: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", one_of("vote", self.kind, VoteKind))
        for name in ("gain", "bound"):
            object.__setattr__(self, name, finite(f"vote_{name}", getattr(self, name)))
            value = getattr(self, name)
            if not SMALLEST_GAIN <= value <= LARGEST_GAIN:
                raise PlanError(f"vote_{name}={value:g} must be in [{SMALLEST_GAIN:g}, {LARGEST_GAIN:g}]")
        least = 2 if self.kind is VoteKind.BINS else 1
        most = LARGEST_SYMBOLS if self.kind in SYMBOLIC else 1
        check_whole("vote_grades", self.grades, least=least, most=most, why=f" for vote={self.kind}")

    # --- sizes ---

    def check_classes(self, num_classes: int) -> None:
        """Refuse a number of classes that this vote has no words for."""
        check_whole("num_classes", num_classes, least=2)
        if self.kind in _TWO_CLASSES and num_classes != 2:
            raise PlanError(f"vote={self.kind} with num_classes={num_classes}: it is for 2 classes; use shares or top")
        symbols = self.symbols(num_classes)
        if symbols is not None and symbols > LARGEST_SYMBOLS:
            raise PlanError(
                f"vote={self.kind} with num_classes={num_classes} has {symbols:,} symbols; permitted: at most "
                f"{LARGEST_SYMBOLS}; use shares"
            )

    def width(self, num_classes: int) -> int:
        """Released coordinates of a row."""
        return 1 if self.kind is VoteKind.MARGIN or self.kind in SYMBOLIC else num_classes

    def symbols(self, num_classes: int) -> int | None:
        """Return how many symbols there are; None for a vote that is no symbol."""
        match self.kind:
            case VoteKind.BINS:
                return self.grades
            case VoteKind.TOP:
                return num_classes * self.grades
            case VoteKind.RANKS:
                return num_classes * (num_classes - 1) * self.grades
        return None

    # --- at a party ---

    def __call__(self, scores_BK: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return what the mechanism takes, (B, width), in [-C, C]."""
        num_classes = scores_BK.shape[1]
        symbols = self.symbols(num_classes)
        if symbols is not None:
            # The centre of the symbol's bin: randomised response rounds it to that very symbol.
            unit = 2 * self.symbol(scores_BK)[:, None] / (symbols - 1) - 1
        else:
            scores = _numbers(scores_BK)
            match self.kind:
                case VoteKind.MARGIN:
                    unit = np.clip(self.gain * (scores[:, 1:2] - scores[:, 0:1]), -1, 1)
                case VoteKind.SHARES:
                    unit = _softmax(self.gain * scores)
                case VoteKind.BALLOT:
                    unit = np.eye(num_classes)[self.symbol(scores_BK)]
                case _:
                    unit = np.clip(scores / self.bound, -1, 1)
        bound = np.float32(self.bound)
        return np.clip((unit * self.bound).astype(np.float32), -bound, bound)

    def symbol(self, scores_BK: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the true symbol of each row, 0 up to symbols - 1, or the class of a ballot.

        Of equal scores the first class counts as larger.
        """
        scores = _numbers(scores_BK)
        if self.kind is VoteKind.BINS:
            margin = self.gain * (scores[:, 1] - scores[:, 0])
            return self._graded(0.5 + 0.5 * np.tanh(0.5 * margin))
        if self.kind not in SYMBOLIC and self.kind is not VoteKind.BALLOT:
            names = ", ".join(sorted((*SYMBOLIC, VoteKind.BALLOT)))
            raise PlanError(f"vote={self.kind} is no symbol; permitted: {names}")
        top: npt.NDArray[np.int64] = np.argmax(scores, axis=1).astype(np.int64)
        if self.kind is VoteKind.BALLOT or (self.kind is VoteKind.TOP and self.grades == 1):
            return top
        others = scores.copy()
        np.put_along_axis(others, top[:, None], -np.inf, axis=1)
        second = np.argmax(others, axis=1).astype(np.int64)
        symbol: npt.NDArray[np.int64] = top
        if self.kind is VoteKind.RANKS:
            # The second is one of the K-1 others: those after the top move down by one place.
            symbol = top * (scores.shape[1] - 1) + second - (second > top)
        lead = np.tanh(0.5 * self.gain * score_leads(scores))
        graded: npt.NDArray[np.int64] = symbol * self.grades + self._graded(lead)
        return graded

    def _graded(self, unit: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return which of the equal parts of [0, 1] a number is in."""
        parts: npt.NDArray[np.int64] = np.minimum(np.floor(unit * self.grades), self.grades - 1).astype(np.int64)
        return parts

    # --- at the server ---

    def decode_sums(self, estimated: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return class scores (B, K) from the estimated sums (B, width) over the parties of what `__call__` gave."""
        match self.kind:
            case VoteKind.MARGIN:
                half = estimated[:, :1] / np.float32(2 * self.gain)
                return np.concatenate([-half, half], axis=1)
            case VoteKind.RAW | VoteKind.SHARES | VoteKind.BALLOT:
                return estimated
        raise PlanError(f"vote={self.kind} is a symbol of each party, which is read party by party; sums say nothing")

    def symbol_scores(self, num_classes: int) -> npt.NDArray[np.float64]:
        """Return the class scores that each symbol stands for, (S, K): those in the middle of its bin.

        Of classes that a symbol does not tell apart, all have the same score.
        """
        symbols = self.symbols(num_classes)
        if symbols is None:
            raise PlanError(f"vote={self.kind} is no symbol; permitted: {', '.join(sorted(SYMBOLIC))}")
        middle_G = (np.arange(self.grades) + 0.5) / self.grades
        if self.kind is VoteKind.BINS:
            margin_G = np.log(middle_G / (1 - middle_G)) / self.gain
            return np.stack([-margin_G / 2, margin_G / 2], axis=1)
        lead_S = np.tile(2 * np.arctanh(middle_G) / self.gain, symbols // self.grades)
        named_S = np.arange(symbols) // self.grades
        scores_SK = np.zeros((symbols, num_classes))
        if self.kind is VoteKind.RANKS:
            top_S, second_S = np.divmod(named_S, num_classes - 1)
            second_S = second_S + (second_S >= top_S)
            scores_SK -= lead_S[:, None]
            scores_SK[np.arange(symbols), second_S] = 0
            named_S = top_S
        scores_SK[np.arange(symbols), named_S] = lead_S
        return scores_SK

    def symbol_logs(self, num_classes: int, *, kept: float) -> npt.NDArray[np.float64]:
        """Return the log shares of classes that each released symbol stands for, (S, K).

        Args:
            num_classes: K.
            kept: Probability that a released symbol is the party's own; else it is uniform over all.
        """
        return np.asarray(np.log(kept * _softmax(self.symbol_scores(num_classes)) + (1 - kept) / num_classes))

    def read_symbols(self, symbols_BM: npt.NDArray[Any], num_classes: int, *, kept: float) -> npt.NDArray[np.float32]:
        """Return the sum over parties of what their symbols say of each class, (B, K), where no model was learned.

        Args:
            symbols_BM: Released symbols; a number that is none says nothing.
            num_classes: K.
            kept: As in `symbol_logs`.
        """
        logs_SK = self.symbol_logs(num_classes, kept=kept)
        known_BM = (symbols_BM >= 0) & (symbols_BM < len(logs_SK))
        logs_SK = np.concatenate([logs_SK, np.full((1, num_classes), -np.log(num_classes))])
        return np.asarray(logs_SK[np.where(known_BM, symbols_BM, -1)].sum(axis=1), dtype=np.float32)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kind": str(self.kind)}


def score_leads(scores_BK: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return by how much the largest score of each row is above the second."""
    two = np.partition(_numbers(scores_BK), -2, axis=1)[:, -2:]
    return np.asarray(two[:, 1] - two[:, 0])


def _numbers(scores: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return scores that can be compared and multiplied, whatever they were."""
    large = _LARGEST_SCORE
    known = np.nan_to_num(scores.astype(np.float64), nan=0.0, posinf=large, neginf=-large)
    return np.clip(known, -large, large)


def _softmax(scores_BK: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(scores_BK - scores_BK.max(axis=1, keepdims=True))
    shares: npt.NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return shares
