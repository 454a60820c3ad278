"""From a budget to local training: rules of thumb about learning, and the least noise that the budget allows.

Every party learns class scores from its own columns by noisy steps on all rows at once. With full batches the noise of
the result, relative to what is learned, does not depend on how many steps there are: as many as it takes to arrive.
Steps, the columns' mean and their Gram matrix are sums of clipped rows with Gaussian noise, so squares of their shifts
add up; the shares below say how the whole of it is divided. What is chosen here depends on public sizes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Shares of the squared shift: of the columns' mean, of their Gram matrix, of counts of votes; the steps get the rest.
_MEAN_SHARE, _GRAM_SHARE, _TABLE_SHARE = 0.04, 0.12, 0.05
_STEPS = 40
#: Up to so many numbers a row, a weight for every two values is worth its noise.
_WIDEST_VALUES = 256
#: Up to so many whitened columns, and from so many rows times shift on for each class and root of them, rows are not
#: clipped below their usual norm.
_NARROW, _STRONG = 16, 300.0
_SEARCH_STEPS = 40
#: Rows times shift, for each root of the numbers in a row: preparation pays from here on.
_LEAST_PREPARED = 25.0
#: The same for each class as well: nothing is learned up to the first, and little up to the second.
_NOTHING_LEARNED, _LITTLE_LEARNED = 1.0, 3.0


@dataclass(frozen=True, kw_only=True)
class LocalRules:
    """Public choices about learning, and how noise is divided."""

    num_samples: int
    num_classes: int
    #: The most columns of any party; None if nobody said.
    columns: int | None = None
    #: How many values every column has, equally spaced from 0 to 1; None if nobody said.
    column_values: int | None = None
    has_tables: bool = False

    def settings(self) -> dict[str, Any]:
        """Names and values of a plan, but for noise."""
        few = self._has_few_values
        return {
            "training": "local",
            "labels": "parties",
            "head": "fixed",
            "mechanism": "none",
            "embedding_dim": self.num_classes,
            "encoder": "linear",
            **({"features": "values", "column_values": self.column_values} if few else {}),
            "activation": "none",
            "start": "zero",
            "preparation": "whiten",
            "mean_clip": 1.0,
            # Chosen on hold-outs: rows of values all have one norm, and need more of it and a stronger ridge.
            "gram_clip": 0.8 if few else 0.3,
            "ridge": 1.0 if few else 0.5,
            "batch_size": self.num_samples,
            "num_epochs": _STEPS,
            "optimizer": "sgd",
            "momentum": 0.9,
            "nesterov": True,
            "averaging": 0.5,
            "clip_norm": 1.0,
        }

    def _clip_norm(self, signal: float) -> float:
        """D whitened numbers and a constant have a norm of about sqrt(D + 1). Clipping below it bends what is learned
        where classes are not equally frequent (6 points of accuracy on a made table). Above 1 it brings noise, which
        only few columns of many rows do not feel."""
        if self.columns is None or self.columns > _NARROW or self._has_few_values:
            return 1.0
        strong = signal >= _STRONG * self.num_classes * math.sqrt(self.columns)
        return float(f"{math.sqrt(self.columns + 1):.3g}") if strong else 1.0

    @property
    def _has_few_values(self) -> bool:
        if self.columns is None or self.column_values is None:
            return False
        return self._width_of_values(self.columns, self.column_values) <= _WIDEST_VALUES

    @staticmethod
    def _width_of_values(columns: int, values: int) -> int:
        return columns * values + columns * (columns - 1) // 2 * values**2

    def _learning_rate(self, signal: float) -> float:
        """Chosen on hold-outs of two tables (flat within a factor of 2) and tried on six others, where the second
        limit matters: `signal` is the rows times the shift, and a wide row of few rows collects too much noise."""
        rate: float = 0.02 * self.num_classes**1.5 * signal**0.3
        if self.columns is None:
            return rate
        return min(rate, signal / (60 * math.sqrt(self._width + 1)))

    @property
    def _width(self) -> int:
        """Numbers that a network sees of a row; 1 if nobody said."""
        if self.columns is None:
            return 1
        if self._has_few_values and self.column_values is not None:
            return self._width_of_values(self.columns, self.column_values)
        return self.columns

    def can_prepare(self, shift: float) -> bool:
        """Whether the noise of the columns' mean would be small beside their range: below, preparing them only adds
        noise."""
        return shift * self.num_samples >= _LEAST_PREPARED * math.sqrt(self._width)

    def strength(self, shift: float, *, num_epochs: int, prepared: bool) -> dict[str, float]:
        """The noise of every part, for a whole shift: the root of the sum of their squared shifts; and the step that
        goes with it. Noise in the result grows with the step's size, and what is not learned yet falls with it."""
        mean, gram = (_MEAN_SHARE, _GRAM_SHARE) if prepared else (0.0, 0.0)
        tables = _TABLE_SHARE if self.has_tables else 0.0
        found = {"noise_multiplier": 2 * math.sqrt(num_epochs / (1 - mean - gram - tables)) / shift}
        if prepared:
            found |= {"mean_noise": 2 / math.sqrt(mean) / shift, "gram_noise": math.sqrt(2 / gram) / shift}
            found["clip_norm"] = self._clip_norm(shift * self.num_samples)
        if tables:
            found |= {"table_noise": math.sqrt(2 / tables) / shift}
        found["learning_rate"] = self._learning_rate(shift * self.num_samples)
        return {name: float(f"{value:.6g}") for name, value in found.items()}


def learning_note(*, shift: float, num_samples: int, num_classes: int, width: int) -> str | None:
    """What a person should know before training whose noise leaves nothing, or little, to be learned."""
    signal = shift * num_samples / (num_classes * math.sqrt(width))
    if signal > _LITTLE_LEARNED:
        return None
    more = math.ceil(_LITTLE_LEARNED / signal)
    amount = "nothing: expect the rate of the most frequent class" if signal <= _NOTHING_LEARNED else "little"
    return (
        f"this much noise on {num_samples:,} rows of {width} numbers and {num_classes} classes leaves {amount}; it "
        f"would take about {more} times as many rows, or {more} times the epsilon"
    )


def largest_shift(spent: Callable[[float], float], epsilon: float) -> float | None:
    """The largest shift whose account stays within epsilon, to a ten-thousandth; None if there is none."""
    low, high = 1e-4, 64.0
    if spent(low) > epsilon:
        return None
    for _ in range(_SEARCH_STEPS):
        if high <= low * 1.0001:
            break
        middle = math.sqrt(low * high)
        low, high = (middle, high) if spent(middle) <= epsilon else (low, middle)
    return low
