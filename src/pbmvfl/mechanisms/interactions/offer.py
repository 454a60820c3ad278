"""Whether training together can pay: first from public numbers, then from what the screen found.

A budget epsilon is cut in three: the screen's symbols (pure), the found columns' symbols (pure), and noisy updates. If
the screen finds nothing, the second part is not spent and the updates get all that is left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pbmvfl.errors import PlanError
from pbmvfl.mechanisms.interactions.screen import ALARM, ScreenSize, Selection

#: Shares of epsilon: 4 and 2.5 of 8. What is left, 1.5 of 8, is for noisy updates.
SCREEN_SHARE = 8 / 16
SYMBOL_SHARE = 5 / 16
#: Share of a class's variance that a pair must explain for a screen to be worth its budget. On made tables two products
#: that explained .04 each were worth 7 points, .09 each 16 points (columns at two levels), .15 each 16 (at four).
WORTHWHILE = 0.1
#: A screen that would miss even such a pair more often than once in a hundred is not worth its budget.
LEAST_POWER = 0.99
#: Levels of a numeric column in the second release.
CONTEXT_LEVELS = 8


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a total epsilon is spent if columns of different parties may act together."""

    epsilon: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise PlanError(f"epsilon={self.epsilon!r} must be a finite number above 0")

    @property
    def screen_epsilon(self) -> float:
        return self.epsilon * SCREEN_SHARE

    @property
    def symbol_epsilon(self) -> float:
        return self.epsilon * SYMBOL_SHARE

    @property
    def update_epsilon(self) -> float:
        """Of the updates after a screen that found something: at least this, at the whole delta."""
        return self.epsilon - self.screen_epsilon - self.symbol_epsilon

    @property
    def local_epsilon(self) -> float:
        """Of the updates after a screen that found nothing."""
        return self.epsilon - self.screen_epsilon


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Whether a screen is worth its budget, with the reason in words."""

    pays: bool
    power: float
    split: Split
    shown: int
    words: str


def joint_offer(*, epsilon: float, size: ScreenSize, symbols_a_unit: int = 1) -> Offer:
    """From public numbers alone: would a screen at its share of epsilon find a pair that is worth finding?

    `symbols_a_unit` is how many symbols of one row the unit of privacy covers: 1 for a CELL, those of all honest
    parties for a RECORD.
    """
    if symbols_a_unit < 1:
        raise PlanError(f"symbols_a_unit={symbols_a_unit} must be at least 1")
    split = Split(epsilon=epsilon)
    each = split.screen_epsilon / symbols_a_unit
    shown = size.shown_count(each)
    power = size.power(each, WORTHWHILE)
    pays = power >= LEAST_POWER
    columns = max(size.columns)
    words = (
        f"a screen of {size.num_tests} products of columns of different parties at epsilon {each:.3g} would find one "
        f"that explains {WORTHWHILE:.0%} of the label with probability {power:.2f}"
    )
    if pays:
        words += f"; it raises a false alarm at most once in {1 / ALARM:.0f} runs, and costs "
        words += f"{split.screen_epsilon:.3g} of {epsilon:.3g}"
    else:
        words += (
            f", and {LEAST_POWER} is asked for: {size.num_rows} rows, {columns} columns a party and epsilon "
            f"{epsilon:.3g} do not allow it, so training is local"
        )
    return Offer(pays=pays, power=power, split=split, shown=shown, words=words)


def verdict(selection: Selection) -> str:
    """What the screen says, in words."""
    if not selection.pairs:
        return "no product of columns of different parties is beyond chance: training is local with all that is left"
    named = ", ".join(f"{a.party}.{a.column} x {b.party}.{b.column}" for a, b in selection.pairs)
    return f"columns that act together (party.column): {named}; training uses the others' released symbols"
