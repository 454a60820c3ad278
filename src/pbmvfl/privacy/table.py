"""Epsilon table of a plan, and of what a run has really spent.

There is no epsilon without its unit, adversary and accounting, nor without the advantage of the best attack.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal
from enum import StrEnum
from typing import Any, TypeVar

from pbmvfl._text import for_json, html_table, short_repr
from pbmvfl.errors import PlanError
from pbmvfl.privacy.accounting import (
    NOT_A_PROOF,
    PARTS_APART,
    EpsilonBound,
    TrainingRun,
    epsilon_bound,
    epsilon_bounds,
    label_bound,
)
from pbmvfl.privacy.units import CURIOUS_PARTY, SERVER, Accounting, Adversary, Unit

SEEDED_NOISE = "the noise was seeded for a test, so it hides nothing"
#: Definitions of the units, in one line of a terminal. They stand above the first epsilon.
UNITS_LEGEND = "cell: a row at one party; record: a row; label: its class; party: a whole table"
#: exp(20) is half a billion: with such odds an adversary may be as good as certain of a value.
_PROTECTS_NOBODY = 20.0

_Kind = TypeVar("_Kind", bound=StrEnum)


def named(kind: type[_Kind], value: str, name: str) -> _Kind:
    """Return the member of an enum (a unit or an accounting) that a text names.

    Raises:
        PlanError: There is none of that name.
    """
    try:
        return kind(value)
    except ValueError:
        raise PlanError(f"{name}={value!r} is not one of {', '.join(kind)}: say which epsilon is meant") from None


@dataclass(frozen=True)
class PrivacyTable:
    """Bounds with their conditions; prints as a table."""

    bounds: tuple[EpsilonBound, ...]

    def epsilon(
        self, unit: Unit | str, accounting: Accounting | str, *, server: bool = True, colluding_parties: int = 0
    ) -> float:
        """One number of the table."""
        return self.bound(unit, accounting, Adversary(server=server, colluding_parties=colluding_parties)).epsilon

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows for JSON, where infinity is written as the string "inf"."""
        return [row.to_dict() | {"epsilon": for_json(row.epsilon)} for row in self.bounds]

    @property
    def conditions(self) -> tuple[str, ...]:
        """Conditions of any row, each once."""
        return tuple(dict.fromkeys(condition for row in self.bounds for condition in row.conditions))

    def bound(self, unit: Unit | str, accounting: Accounting | str, adversary: Adversary = SERVER) -> EpsilonBound:
        """One row of the table."""
        wanted = (named(Unit, unit, "unit"), named(Accounting, accounting, "accounting"), adversary)
        for row in self.bounds:
            if (row.unit, row.accounting, row.adversary) == wanted:
                return row
        looked_at = ", ".join(dict.fromkeys(str(row.adversary) for row in self.bounds))
        raise PlanError(
            f"server={adversary.server}, colluding_parties={adversary.colluding_parties}: the table has no row for "
            f"{adversary}; it has {looked_at}; ask privacy() for other adversaries"
        )

    @property
    def label(self) -> EpsilonBound | None:
        """Bound of one training label; None if nothing is computed from labels."""
        return next((row for row in self.bounds if row.unit is Unit.LABEL), None)

    @property
    def of_columns(self) -> tuple[EpsilonBound, ...]:
        """Bounds of what parties hold: all but that of labels."""
        return tuple(row for row in self.bounds if row.unit is not Unit.LABEL)

    def __str__(self) -> str:
        rows = self._worth_printing()
        lines = [UNITS_LEGEND, f"{'unit':8}{'accounting':12}{'adversary':20}{'epsilon':>10}{'advantage':>11}  at delta"]
        for row in rows:
            counting = f"{row.accounting}{' *' if NOT_A_PROOF in row.conditions else ''}"
            lines.append(
                f"{row.unit:8}{counting:12}{row.adversary!s:20}{format_epsilon(row.epsilon):>10}"
                f"{format_advantage(row.advantage_upper_bound):>11}  {row.delta:g} ({row.method})"
            )
        lines += textwrap.wrap(attack_in_words(rows[0]), 80) if rows else []
        if any(PARTS_APART in row.conditions for row in rows):
            lines += textwrap.wrap(PARTS_APART, 80)
        if any(NOT_A_PROOF in row.conditions for row in rows):
            lines.append(f"* {NOT_A_PROOF}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        of_server = [row for row in self._worth_printing() if row.adversary == SERVER or row.unit is Unit.LABEL]
        said = [f"{row.unit} {format_epsilon(row.epsilon)} ({row.accounting})" for row in of_server]
        return short_repr("PrivacyTable", *said, f"delta {self.bounds[0].delta:g}" if self.bounds else "")

    def _repr_html_(self) -> str:
        rows = [
            (
                row.unit,
                f"{row.accounting}{' *' if NOT_A_PROOF in row.conditions else ''}",
                row.adversary,
                format_epsilon(row.epsilon),
                format_advantage(row.advantage_upper_bound),
                math.ceil(50 + 50 * row.advantage_upper_bound),
            )
            for row in self._worth_printing()
        ]
        header = ("unit", "accounting", "adversary", "epsilon", "advantage", "right guesses of 100")
        star = f"; * {NOT_A_PROOF}" if any("*" in str(row[1]) for row in rows) else ""
        delta = f"delta {self.bounds[0].delta:g}; " if self.bounds else ""
        return html_table(f"{delta}{UNITS_LEGEND}{star}", rows, header=header)

    def _worth_printing(self) -> tuple[EpsilonBound, ...]:
        """Return all rows; or the theorems alone, if the paper's count, which is no proof, is smaller nowhere."""
        strict = tuple(row for row in self.bounds if row.accounting is Accounting.STRICT)
        proved = {(row.unit, row.adversary): row.epsilon for row in strict}
        others = (row for row in self.bounds if row.accounting is not Accounting.STRICT)
        says_more = any(row.epsilon < proved.get((row.unit, row.adversary), math.inf) for row in others)
        return self.bounds if says_more or not strict else strict


def attack_in_words(row: EpsilonBound) -> str:
    """Return one sentence on what the advantage of a bound means."""
    unproved = NOT_A_PROOF in row.conditions
    which = f"({row.unit}, {row.accounting}{' *' if unproved else ''}, {row.adversary})"
    if not math.isfinite(row.epsilon):
        return f"no protection {which}: nothing that is proved here keeps an attack from being always right"
    looks_at = "a row's own releases" if unproved else "everything released"
    choice = (
        "a party's values are the true ones or given others"
        if row.unit is Unit.PARTY
        else f"a {row.unit} is the true one or a given other one"
    )
    right, found = (math.ceil(part) for part in (50 + 50 * row.advantage_upper_bound, 1000 * row.detection_upper_bound))
    return (
        f"advantage {format_advantage(row.advantage_upper_bound)} {which}: the best possible attack that looks at "
        f"{looks_at} guesses right in at most {right} of 100 tries whether {choice}, both equally likely (50 is blind "
        f"guessing); with 1 false alarm in 1,000 it finds at most {found:,} of 1,000 (a blind guess finds 1)"
    )


def label_in_words(row: EpsilonBound) -> str:
    """Return one sentence on the bound of training labels."""
    if not math.isfinite(row.epsilon):
        return (
            "labels of training rows: in clear, no epsilon; every party receives them, or can read them off the "
            "gradients"
        )
    right = math.ceil(50 + 50 * row.advantage_upper_bound)
    return (
        f"labels of training rows: epsilon {format_epsilon(row.epsilon)} against all parties together, advantage "
        f"{format_advantage(row.advantage_upper_bound)}: at most {right} of 100 guesses between two labels are right"
    )


def format_advantage(advantage: float) -> str:
    """Format an advantage with two or three decimals, rounded up, without the zero before them."""
    if advantage == 0:
        return "0"
    places = Decimal("0.01") if advantage > 0.099 else Decimal("0.001")
    return str(Decimal(repr(float(advantage))).quantize(places, rounding=ROUND_CEILING)).removeprefix("0")


def format_epsilon(epsilon: float) -> str:
    """Format an epsilon with three significant digits, rounded up.

    A printed epsilon is never below the computed one.
    """
    if epsilon == 0 or not math.isfinite(epsilon):
        return "infinity" if epsilon else "0"
    # In decimals: a product of floats would now and then round a number up that has three digits already.
    exact = Decimal(repr(float(epsilon)))
    rounded = exact.quantize(Decimal((0, (1,), exact.adjusted() - 2)), rounding=ROUND_CEILING)
    if not Decimal("0.001") <= rounded < 100_000:
        return f"{float(rounded):.2e}"
    return f"{rounded:,.{max(0, 2 - rounded.adjusted())}f}"


def usual_adversaries(num_parties: int) -> tuple[Adversary, ...]:
    """Return the server, one curious party, and the server with every party but one."""
    everyone = Adversary(server=True, colluding_parties=num_parties - 1)
    return (SERVER, CURIOUS_PARTY, everyone)


def privacy_table(
    run: TrainingRun, *, delta: float, adversaries: Iterable[Adversary] | None = None, noise_is_known: bool = False
) -> PrivacyTable:
    """Return every bound of a run.

    Args:
        run: The releases and updates.
        delta: Above 0 and below 1.
        adversaries: The readers of what leaves the parties; None takes `usual_adversaries`.
        noise_is_known: True for noise that is known to a reader, as in a test that seeds it. It hides nothing: then
            every
            epsilon is infinite.
    """
    chosen = usual_adversaries(run.num_parties) if adversaries is None else tuple(adversaries)
    found = epsilon_bounds(run, delta=delta, adversaries=chosen)
    label = label_bound(run)
    found = found if label is None else (*found, label)
    if noise_is_known:
        found = tuple(
            replace(
                row,
                epsilon=math.inf,
                order=None,
                conditions=(SEEDED_NOISE,),
                advantage_upper_bound=1.0,
                detection_upper_bound=1.0,
            )
            for row in found
        )
    return PrivacyTable(found)


def privacy_notes(run: TrainingRun, *, num_samples: int, delta: float) -> list[str]:
    """Return warnings for a reader of a run's epsilons: numbers that are right and protect nobody."""
    notes = []
    if delta * num_samples >= 1:
        notes.append(
            f"delta={delta:g} is not below 1/num_samples = 1/{num_samples:,}: such a delta permits publishing a "
            f"row outright; use a smaller one, such as {0.1 / num_samples:.0e}"
        )
    # The Renyi number alone is fast, and an upper bound: the exact one matters only where that is large.
    for pld in (False, True):
        epsilon = epsilon_bound(run, Unit.CELL, Accounting.PAPER, SERVER, delta=delta, pld=pld).epsilon
        if epsilon <= _PROTECTS_NOBODY:
            return notes
    notes.append(
        f"epsilon {format_epsilon(epsilon)} (cell, paper, server): an epsilon this large protects nobody in practice; "
        "see pbmvfl plan --epsilon 8 ... for a plan within a budget"
    )
    return notes
