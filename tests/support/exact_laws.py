"""Laws of sums of bits by their definition, in fractions: nothing is shared with the package."""

from __future__ import annotations

from fractions import Fraction

Law = list[Fraction]


def law_of_sum(probabilities: list[Fraction]) -> Law:
    pmf = [Fraction(1)]
    for p in probabilities:
        pmf = [a * (1 - p) + b * p for a, b in zip([*pmf, Fraction(0)], [Fraction(0), *pmf], strict=True)]
    return pmf


def pairs_by_k(b: int, beta_16: int, m: int) -> list[tuple[Law, Law]]:
    lo, hi = Fraction(32768 - beta_16, 65536), Fraction(32768 + beta_16, 65536)
    others = b * (m - 1)
    return [
        (law_of_sum([hi] * (b + k) + [lo] * (others - k)), law_of_sum([hi] * k + [lo] * (b + others - k)))
        for k in range(others + 1)
    ]


def hockey_stick(p: Law, q: Law, ratio: Fraction) -> Fraction:
    return sum((max(Fraction(0), x - ratio * y) for x, y in zip(p, q, strict=True)), Fraction(0))
