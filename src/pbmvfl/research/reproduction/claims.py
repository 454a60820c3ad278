"""What the paper claims, tested over seeds instead of seen by eye.

Trend (accuracy rises with b, with beta): within a block (one seed, all else equal) the configurations are exchangeable
if the claim is false. The statistic counts pairs in the claimed order less pairs against it; its law under all
permutations of all blocks is computed exactly, by convolution. Paired comparison (PBM against LDP, few against many
parties): if the claim is false the sign of every difference is a fair coin; the law of the sum of the differences under
all signs is computed exactly up to 20 pairs. Both are one-sided. A claim holds if its p-value is at most FALSE_ALARM
divided by the number of claims tested: the chance that any of them holds by luck is at most FALSE_ALARM.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

#: The false-alarm rate of all claims of one study together.
FALSE_ALARM = 0.01
_LARGEST_BLOCK = 7
_EXACT_PAIRS = 20


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim and the evidence for it."""

    text: str
    test: str
    #: In how many of the comparisons the claimed side won; ties count for neither.
    wins: int
    comparisons: int
    #: None for a comparison that is only reported: its pairs share runs, so no exact law is known.
    p_value: float | None
    effect: str = ""

    def holds(self, num_claims: int) -> bool:
        return self.p_value is not None and self.p_value <= FALSE_ALARM / num_claims

    def to_dict(self, num_claims: int) -> dict[str, Any]:
        return {
            "claim": self.text,
            "test": self.test,
            "won": f"{self.wins} of {self.comparisons}",
            "effect": self.effect,
            "p": "" if self.p_value is None else f"{self.p_value:.2g}",
            "holds": "reported" if self.p_value is None else "yes" if self.holds(num_claims) else "not shown",
        }


def _score(values: Sequence[float]) -> int:
    """Pairs in rising order less pairs in falling order."""
    return sum(int(a < b) - int(a > b) for a, b in itertools.combinations(values, 2))


def trend_p_value(blocks: Sequence[Sequence[float]]) -> float:
    """Exact: the chance, under permutation within every block, of a score at least as large as the one seen."""
    seen = sum(_score(block) for block in blocks)
    law: Counter[int] = Counter({0: 1})
    total = 1
    for block in blocks:
        if len(block) > _LARGEST_BLOCK:
            raise ValueError(f"a block of {len(block)} values; at most {_LARGEST_BLOCK} are enumerated")
        scores = Counter(_score(order) for order in itertools.permutations(block))
        joint: Counter[int] = Counter()
        for (a, n), (b, m) in itertools.product(law.items(), scores.items()):
            joint[a + b] += n * m
        law = joint
        total *= math.factorial(len(block))
    return float(Fraction(sum(count for score, count in law.items() if score >= seen), total))


def paired_p_value(differences: Sequence[float]) -> float:
    """Exact up to 20 pairs, by all signs of the differences; above that, the exact sign test."""
    values = np.array([value for value in differences if value], dtype=np.float64)
    if not len(values):
        return 1.0
    if len(values) > _EXACT_PAIRS:
        wins = int((values > 0).sum())
        return sum(math.comb(len(values), k) for k in range(wins, len(values) + 1)) / 2.0 ** len(values)
    sums = np.zeros(1)
    for value in np.abs(values):
        sums = np.concatenate([sums - value, sums + value])
    return float((sums >= values.sum() - 1e-12).mean())


def trend(text: str, blocks: Sequence[Sequence[float]], *, effect: str = "") -> Claim:
    pairs = [pair for block in blocks for pair in itertools.combinations(block, 2)]
    return Claim(
        text=text,
        test=f"exact permutation in {len(blocks)} blocks",
        wins=sum(a < b for a, b in pairs),
        comparisons=len(pairs),
        p_value=trend_p_value(blocks),
        effect=effect,
    )


def paired(text: str, first: Sequence[float], second: Sequence[float]) -> Claim:
    """The claim that `first` is above `second`, pair by pair."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    exact = sum(bool(value) for value in differences) <= _EXACT_PAIRS
    return Claim(
        text=text,
        test=f"exact {'sign-flip' if exact else 'sign'} test on {len(differences)} pairs",
        wins=sum(value > 0 for value in differences),
        comparisons=len(differences),
        p_value=paired_p_value(differences),
        effect=f"mean {np.mean(differences):+.4f}, least {min(differences):+.4f}",
    )
