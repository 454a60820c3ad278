"""From a budget to local training: rules of thumb about learning, and the least noise that the budget allows.

Every party learns class scores from its own columns by noisy steps on all rows at once. With full batches the noise of
the result, relative to what is learned, does not depend on how many steps there are: as many as it takes to arrive.
Steps, the columns' mean and their Gram matrix are sums of clipped rows with Gaussian noise, so squares of their shifts
add up; the shares below say how the whole of it is divided. What is chosen here depends on public sizes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pbmvfl.mechanisms.label_response import LabelResponse
from pbmvfl.mechanisms.randomized_response import LARGEST_EPSILON
from pbmvfl.plan.groups import FeatureMap, feature_width

#: Shares of the squared shift: of the columns' mean, of their Gram matrix, of counts of votes; the steps get the rest.
_MEAN_SHARE, _GRAM_SHARE, _TABLE_SHARE = 0.04, 0.12, 0.05
_STEPS = 40
#: Up to so many numbers a row, a weight for every two values is worth its noise.
_WIDEST_VALUES = 256
#: Products of columns are looked at up to so many numbers a row, up to so much noise on a score, and from so many rows
#: for each weight on: where nothing acts together they then cost about a point; where something does they bring ten.
_WIDEST_PAIRS, _PAIRS_NOISE, _ROWS_PER_WEIGHT = 512, 0.5, 12.0
#: Up to so much noise on a score, rows keep their usual norm; beyond it they are clipped, by this power of the excess.
_UNCLIPPED_NOISE, _CLIP_POWER, _LEAST_CLIP_SHARE = 0.08, 0.75, 0.05
#: The step size of gradients that are not clipped: for each class, and for the root of rows times shift over the root
#: of the numbers in a row; the smallest, for the root of the classes; and the largest.
_RATE, _LEAST_RATE, _LARGEST_RATE = 0.0019, 0.05, 1.5
#: Where noise on a score is above the first, many classes get shorter steps, at ten times that by this power of half
#: their number; where there are so many classes and so much noise, a stronger ridge.
_NOISY, _NOISY_POWER = 0.1, 0.4
_MANY_CLASSES, _RIDGE_NOISE = 6, 0.3
#: Products with fewer rows a weight than this get shorter steps.
_MANY_ROWS_PER_WEIGHT = 40.0
#: Columns that are not prepared have a smaller norm than the largest they may have.
_UNPREPARED_SHARE, _UNPREPARED_RATE = 0.3, 3.0
#: Taken for the columns of a party where their number is not given.
USUAL_COLUMNS = 16
_SEARCH_STEPS = 40
#: Rows times shift, for each root of the numbers in a row: preparation pays from here on.
_LEAST_PREPARED = 20.0
#: The same for each class as well: nothing is learned up to the first, and little up to the second.
_NOTHING_LEARNED, _LITTLE_LEARNED = 1.5, 5.0
#: Where one class has more than this share, the same over the share of all others: rare classes are lost much earlier.
_FREQUENT, _NOTHING_RARE, _LITTLE_RARE = 0.6, 8.0, 16.0

#: Drawn labels tell as much as a^2 N true ones, where a is the share that is kept. By the root, for each of K classes:
#: nothing is learned up to the first, and little up to the second. On hold-outs of three tables of 2, 6 and 10 classes,
#: with 300 to 3,000 rows, drawn labels left of the accuracy above the majority rate at most 0.25 up to 0.8, 0.36 to
#: 0.62 from 1.1 to 1.6, and 0.59 or more from 2.7 on.
_NOTHING_LEFT, _LITTLE_LEFT = 0.75, 3.0

#: Pictures of more points a side are made smaller, by whole blocks, for networks of one layer.
_LARGEST_SIDE = 16


def block_sides(shape: Sequence[int]) -> tuple[int, int]:
    """Return how many points of a picture (channels, height, width), down and across, a dense layer sees as one."""
    height, width = (
        next(block for block in range(1, side + 1) if side % block == 0 and side // block <= _LARGEST_SIDE)
        for side in shape[1:]
    )
    return height, width


def dense_columns(shape: Sequence[int]) -> int:
    """Return how many numbers of a row a dense layer sees: all of a table's, and those of a smaller picture."""
    if len(shape) != 3:
        return math.prod(shape)
    height, width = block_sides(shape)
    return math.prod(shape) // (height * width)


@dataclass(frozen=True, kw_only=True)
class LocalRules:
    """Public choices about learning, and how noise is divided."""

    num_samples: int
    num_classes: int
    #: The most columns of any party; None if not given.
    columns: int | None = None
    #: How many values every column has, equally spaced from 0 to 1; None if not given.
    column_values: int | None = None
    has_tables: bool = False

    def settings(self, shift: float | None = None) -> dict[str, Any]:
        """Names and values of a plan, but for noise. What rows are mapped to depends on the whole shift."""
        features = self._features(shift)
        few = features == "values"
        return {
            "training": "local",
            "labels": "parties",
            "head": "fixed",
            "mechanism": "none",
            "embedding_dim": self.num_classes,
            "encoder": "linear",
            **({"features": features} if features != "columns" else {}),
            **({"column_values": self.column_values} if few else {}),
            "activation": "none",
            "start": "zero",
            "preparation": "whiten",
            "mean_clip": 1.0,
            # Chosen on hold-outs: rows of values all have one norm, and need more of it and a stronger ridge.
            "gram_clip": 0.8 if few else 0.3,
            "ridge": 1.0 if few or self._is_drowned(shift, features) else 0.5,
            "batch_size": self.num_samples,
            "num_epochs": _STEPS,
            "optimizer": "sgd",
            "momentum": 0.9,
            "nesterov": True,
            "averaging": 0.5,
            "clip_norm": 1.0,
        }

    # --- what a network sees of a row ---

    def _features(self, shift: float | None) -> str:
        """The public map: all that a party's columns say together, as far as it is worth its noise."""
        if self.columns is None:
            return "columns"
        if self.column_values is not None and self._width_of("values") <= _WIDEST_VALUES:
            return "values"
        width = self._width_of("pairs")
        affordable = (
            self.columns > 1
            and width <= _WIDEST_PAIRS
            and self.num_samples >= _ROWS_PER_WEIGHT * width * self.num_classes
            and shift is not None
            and self.score_noise(shift, width) <= _PAIRS_NOISE
        )
        return "pairs" if affordable else "columns"

    def _width_of(self, features: str) -> int:
        """Numbers that a network sees of a row."""
        columns = USUAL_COLUMNS if self.columns is None else self.columns
        values = 3 if self.column_values is None else self.column_values
        return feature_width(FeatureMap(features), columns, values)

    def score_noise(self, shift: float, width: int) -> float:
        """Return how far, to first order, all steps' noise moves a class score of a row of so many numbers of about 1.

        The sum of rows' gradients has noise of 2 C / shift in the end, where C is their norm, sqrt(width + 1); weights
        have that divided by rows and curvature, which is about 1 / classes; a score adds up width + 1 of them."""
        return 2 * (width + 1) * self.num_classes / (shift * self.num_samples)

    # --- steps ---

    def _clip_norm(self, noise: float, width: int, *, prepared: bool) -> float:
        """D whitened numbers and a constant have a norm of about sqrt(D + 1). Clipping below it bends what is learned
        where classes are not equally frequent: the rare one is what is clipped (7 points of accuracy at 80/20, down to
        the rate of the frequent class). Not clipping brings noise, which few rows of many columns cannot bear."""
        share: float = max(_LEAST_CLIP_SHARE, min(1.0, (_UNCLIPPED_NOISE / noise) ** _CLIP_POWER))
        return math.sqrt(width + 1) * (share if prepared else min(share, _UNPREPARED_SHARE))

    def _is_drowned(self, shift: float | None, features: str) -> bool:
        """Many classes and much noise: a Gram matrix that is mostly noise makes directions that are none."""
        if shift is None or self.num_classes < _MANY_CLASSES:
            return False
        return self.score_noise(shift, self._width_of(features)) >= _RIDGE_NOISE

    def _learning_rate(self, signal: float, clip_norm: float, features: str, noise: float, *, prepared: bool) -> float:
        """Noise in the result grows with the step's size, and what is not learned yet falls with it. Flat within a
        factor of 4; clipped gradients need steps that are longer by as much as they are shorter."""
        width = self._width_of(features)
        usual = _RATE * self.num_classes * math.sqrt(signal / math.sqrt(width))
        rate: float = min(_LARGEST_RATE, max(usual, _LEAST_RATE * math.sqrt(self.num_classes)))
        excess = min(1.0, max(0.0, math.log10(noise / _NOISY)))
        rate *= (self.num_classes / 2) ** (-_NOISY_POWER * excess)
        if features == "pairs":
            rate *= math.sqrt(min(1.0, self.num_samples / (width * self.num_classes) / _MANY_ROWS_PER_WEIGHT))
        if not prepared:
            rate *= _UNPREPARED_RATE
        return rate * math.sqrt(width + 1) / clip_norm

    def _rate_of_values(self, signal: float, width: int) -> float:
        """Rows of values all have one norm and are clipped far below it; chosen on hold-outs of one table."""
        rate: float = 0.02 * self.num_classes**1.5 * signal**0.3
        return min(rate, signal / (60 * math.sqrt(width + 1)))

    def can_prepare(self, shift: float, features: str = "columns") -> bool:
        """Return whether preparing columns pays: the noise of their mean must be small beside their range."""
        return shift * self.num_samples >= _LEAST_PREPARED * math.sqrt(self._width_of(features))

    def strength(self, shift: float, *, num_epochs: int, prepared: bool, features: str = "columns") -> dict[str, float]:
        """Return the noise of every part, and the steps that go with it.

        `shift` is the whole one: the root of the sum of the parts' squared shifts.
        """
        mean, gram = (_MEAN_SHARE, _GRAM_SHARE) if prepared else (0.0, 0.0)
        tables = _TABLE_SHARE if self.has_tables else 0.0
        found = {"noise_multiplier": 2 * math.sqrt(num_epochs / (1 - mean - gram - tables)) / shift}
        if prepared:
            found |= {"mean_noise": 2 / math.sqrt(mean) / shift, "gram_noise": math.sqrt(2 / gram) / shift}
        if tables:
            found |= {"table_noise": math.sqrt(2 / tables) / shift}
        found |= self._steps(shift, num_epochs, features, prepared=prepared)
        return {name: float(f"{value:.6g}") for name, value in found.items()}

    def _steps(self, shift: float, num_epochs: int, features: str, *, prepared: bool) -> dict[str, float]:
        """Clip norm and learning rate. Half the steps have to go twice as far."""
        width, usual = self._width_of(features), _STEPS / num_epochs
        if features == "values":
            return {"clip_norm": 1.0, "learning_rate": self._rate_of_values(shift * self.num_samples, width)}
        noise = self.score_noise(shift, width)
        clip_norm = float(f"{self._clip_norm(noise, width, prepared=prepared):.3g}")
        rate = self._learning_rate(shift * self.num_samples, clip_norm, features, noise, prepared=prepared)
        return {"clip_norm": clip_norm, "learning_rate": float(f"{min(4.0, usual) * rate:.3g}")}


def learning_note(
    *, shift: float, num_samples: int, num_classes: int, width: int, majority: float | None = None
) -> str | None:
    """Return a warning before training whose noise leaves nothing, or little, to be learned; None otherwise.

    `majority` is the share of the most frequent class, where it is known; otherwise classes are taken as equal.
    """
    signal = shift * num_samples / (num_classes * math.sqrt(width))
    nothing, little = _NOTHING_LEARNED, _LITTLE_LEARNED
    if majority is not None and majority > _FREQUENT:
        others = max(1 - majority, 1 / max(2, num_samples))
        nothing, little = _NOTHING_RARE / others, _LITTLE_RARE / others
    if signal > little:
        return None
    times = float(f"{1.05 * little / signal:.2g}")
    numbers = f"{width} number{'' if width == 1 else 's'}"
    shares = "" if majority is None else f", {majority:.0%} of them in one,"
    amount = "nothing: expect the rate of the most frequent class" if signal <= nothing else "little"
    return (
        f"this much noise on {num_samples:,} rows of {numbers} and {num_classes} classes{shares} leaves {amount}; it "
        f"would take about {times * num_samples:,.0f} rows, or {times:,g} times the epsilon"
    )


def label_note(response: LabelResponse, *, num_samples: int) -> str | None:
    """Return a warning before training on drawn labels that leave nothing, or little, to be learned; None otherwise.

    Args:
        response: The law of the labels.
        num_samples: N, training rows.
    """
    classes = response.num_classes
    in_clear = math.sqrt(num_samples / classes)
    signal = response.kept * in_clear
    # Where true labels would leave little, as there are few rows, it is not the label epsilon's doing.
    if signal > (_LITTLE_LEFT if in_clear > _LITTLE_LEFT else _NOTHING_LEFT):
        return None
    amount = "nothing: expect the rate of the most frequent class" if signal <= _NOTHING_LEFT else "little"
    rows = float(f"{1.05 * classes * (_LITTLE_LEFT / response.kept) ** 2:.2g}")
    kept = 1.01 * _LITTLE_LEFT / in_clear
    epsilon = math.log((1 + kept * (classes - 1)) / (1 - kept)) if kept < 1 else math.inf
    enough = f"a label epsilon of {math.ceil(100 * epsilon) / 100:g}, or " if epsilon <= LARGEST_EPSILON else ""
    return (
        f"label_epsilon={response.epsilon:g} on {num_samples:,} rows and {classes} classes leaves {amount}; it would "
        f"take {enough}about {rows:,.0f} rows"
    )


def largest_shift(spent: Callable[[float], float], epsilon: float) -> float | None:
    """Return the largest shift whose account stays within epsilon, to a ten-thousandth; None if there is none."""
    low, high = 1e-4, 64.0
    if spent(low) > epsilon:
        return None
    for _ in range(_SEARCH_STEPS):
        if high <= low * 1.0001:
            break
        middle = math.sqrt(low * high)
        low, high = (middle, high) if spent(middle) <= epsilon else (low, middle)
    return low
