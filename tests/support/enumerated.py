"""Laws of finitely many outcomes in fractions, and what an attacker can make of two of them. Shares no code with the
package."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from fractions import Fraction
from itertools import product

import mpmath

Law = Mapping[Hashable, Fraction]


def together(*laws: Law) -> dict[Hashable, Fraction]:
    """The law of independent draws seen one by one."""
    found: dict[Hashable, Fraction] = {}
    for outcome in product(*(law.items() for law in laws)):
        probability = Fraction(1)
        for _, each in outcome:
            probability *= each
        found[tuple(value for value, _ in outcome)] = probability
    return found


def summed(*laws: Law) -> dict[Hashable, Fraction]:
    """The law of the sum of independent draws."""
    found: dict[Hashable, Fraction] = {}
    for outcome, probability in together(*laws).items():
        total = sum(outcome)  # type: ignore[arg-type]  # a tuple of integers
        found[total] = found.get(total, Fraction(0)) + probability
    return found


def hockey_stick(p: Law, q: Law, ratio: Fraction) -> Fraction:
    """The largest P(A) - ratio * Q(A) over all sets A of outcomes."""
    return sum((max(Fraction(0), mass - ratio * q.get(value, Fraction(0))) for value, mass in p.items()), Fraction(0))


def renyi(p: Law, q: Law, order: float) -> mpmath.mpf:
    """By the definition, in 40 digits."""
    with mpmath.workdps(40):
        a = mpmath.mpf(order)
        terms = [_real(mass) ** a * _real(q[value]) ** (1 - a) for value, mass in p.items() if mass]
        return mpmath.log(mpmath.fsum(terms)) / (a - 1)


def _real(value: Fraction) -> mpmath.mpf:
    return mpmath.mpf(value.numerator) / value.denominator
