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

from pbmvfl.plan.groups import FeatureMap, feature_width
from pbmvfl.plan.shapes import PartyShapes, join_shapes

#: Shares of the squared shift: of the columns' mean and of their Gram matrix; the steps get the rest.
_MEAN_SHARE, _GRAM_SHARE = 0.04, 0.12
#: Steps over all rows: relative noise does not depend on their number, and so many arrive.
_STEPS = 40
#: Gradients are clipped to this times sqrt(shift N / K), on sums of N rows with noise of 2 clip norms over shift: less
#: bends what is learned, and more drowns it. Within a factor of two on hold-outs of seven tables, at epsilon 8 and 1.
_CLIP = 0.1
#: Step size for each class: scores of K classes have gradients of about 1/K. Flat within a factor of four.
_RATE = 1 / 8
#: Knots of a column, the most first, up to so much noise on a score: a curve is worth more than its noise for long. On
#: made tables, most of which are straight, .1 is better by a point; on a real one of seven classes .3 is worse by 3.
_KNOTS, _KNOTS_NOISE = (20, 16, 12, 8, 6, 4, 3), 0.5
#: Most hats of a party. Wide parties have few rows for each of many curves: on made tables of 12 to 80 columns a party
#: more hats lose 1 to 12 points; real ones of up to 9 columns have fewer.
_MOST_HATS = 200
#: A column that is alone at its party has no more than this: finer ones are not told apart by a party's symbol.
_ALONE_KNOTS = 8
#: Knots of columns in products of two, each up to so much noise and so wide a row: most products are nearly always 0,
#: and whitened away. Fine ones gain .3 to 1 point on hold-outs of three real tables (places, sizes), and lose up to 4
#: on made ones with smooth products, but at so little noise hardly any. Words gain 4 to 6 points where two act
#: together, and lose up to 2 where they do not.
_WIDEST = 768
_PRODUCTS: tuple[tuple[int, float, int], ...] = ((8, 0.05, 256), (4, 1.5, _WIDEST), (3, 1.5, _WIDEST))
#: Products of columns without a range, up to this much: where nothing acts together they then cost about a point.
_PAIRS_NOISE = 0.15
#: All mapped rows of a party take at most so many numbers, 128 MiB.
_MOST_NUMBERS = 1 << 25
#: Taken for the columns of a party where their number is not given.
USUAL_COLUMNS = 16
#: Halvings of an interval of shifts: it is far below a ten-thousandth after these.
_SEARCH_STEPS = 40
#: Rows times shift, for each root of the numbers in a row: preparation pays from here on.
_LEAST_PREPARED = 20.0
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
    #: For each party the kinds of its columns (`plan.shapes`), a letter each; empty if no column has a range.
    kinds: tuple[str, ...] = ()
    #: How many values every column of kind v has; None if not given.
    column_values: int | None = None

    def settings(self, shift: float | None = None) -> dict[str, Any]:
        """Names and values of a plan, but for noise. What rows are mapped to depends on the whole shift."""
        shapes = self._shapes(shift)
        features = {"features": "shapes", "shapes": join_shapes(shapes)} if shapes else self._pairs(shift)
        return {
            "training": "local",
            "labels": "parties",
            "head": "fixed",
            "mechanism": "none",
            "embedding_dim": self.num_classes,
            "encoder": "linear",
            **features,
            "activation": "none",
            "start": "zero",
            "preparation": "whiten",
            "mean_clip": 1.0,
            # Shapes have no larger norm than the one they are clipped to; columns rarely use all of their range.
            "gram_clip": 1.0 if shapes else 0.3,
            "ridge": 0.5,
            "batch_size": self.num_samples,
            "num_epochs": _STEPS,
            "optimizer": "sgd",
            "momentum": 0.9,
            "nesterov": True,
            "averaging": 0.5,
            "clip_norm": 1.0,
        }

    # --- what a network sees of a row ---

    def _shapes(self, shift: float | None) -> tuple[PartyShapes, ...]:
        """Return each party's shapes, by its own width; none where no party can afford any."""
        found = tuple(self._shapes_of(kinds, shift) for kinds in self.kinds) if shift is not None else ()
        return found if any(knots for shapes in found for _, knots in shapes.columns) else ()

    def _shapes_of(self, kinds: str, shift: float | None) -> PartyShapes:
        """Return the finest knots, and then the finest products, that their noise on a score permits."""
        assert shift is not None

        def permitted(shapes: PartyShapes, most: float, widest: int = _WIDEST) -> bool:
            fits = shapes.width <= min(widest, _MOST_NUMBERS // self.num_samples)
            return fits and self.score_noise(shift, shapes.width) <= most

        curves = sum(kind in "ug" for kind in kinds)
        most = _ALONE_KNOTS if len(kinds.replace("c", "")) == 1 else _MOST_HATS // max(1, curves)
        tried, products = [knots for knots in _KNOTS if knots <= most], _PRODUCTS
        if self.column_values is not None and "v" in kinds:  # a knot at every value: more would say nothing
            tried, products = [self.column_values], ((self.column_values, *_PRODUCTS[-1][1:]),)
        for knots in tried:
            shapes = PartyShapes.of_kinds(kinds, knots)
            if permitted(shapes, _KNOTS_NOISE):
                finer = ((PartyShapes.of_kinds(kinds, knots, coarse), limits) for coarse, *limits in products)
                return next((each for each, (noise, widest) in finer if permitted(each, noise, int(widest))), shapes)
        return PartyShapes.of_kinds(kinds, 0)

    def _pairs(self, shift: float | None) -> dict[str, str]:
        """Return products of a party's columns, where they have no ranges and rows pay for products."""
        if self.columns is None or self.columns < 2 or shift is None:
            return {}
        width = self._width_of("pairs")
        fits = width <= min(_WIDEST, _MOST_NUMBERS // self.num_samples)
        return {"features": "pairs"} if fits and self.score_noise(shift, width) <= _PAIRS_NOISE else {}

    def _width_of(self, features: str) -> int:
        """Numbers that a network sees of a row, where all parties have the same map."""
        return feature_width(FeatureMap(features), USUAL_COLUMNS if self.columns is None else self.columns, 2)

    def score_noise(self, shift: float, width: int) -> float:
        """Return how far, to first order, all steps' noise moves a class score of a row of so many numbers of about 1.

        The sum of rows' gradients has noise of 2 C / shift in the end, where C is their norm, sqrt(width + 1); weights
        have that divided by rows and curvature, which is about 1 / classes; a score adds up width + 1 of them."""
        return 2 * (width + 1) * self.num_classes / (shift * self.num_samples)

    # --- steps ---

    def can_prepare(self, shift: float, features: str = "columns") -> bool:
        """Return whether preparing columns pays: the noise of their mean must be small beside their range.

        Shapes are only chosen where it is.
        """
        width = 1 if features == "shapes" else self._width_of(features)
        return shift * self.num_samples >= _LEAST_PREPARED * math.sqrt(width)

    def strength(self, shift: float, *, num_epochs: int, prepared: bool, features: str = "columns") -> dict[str, float]:
        """Return the noise of every part, and the steps that go with it.

        `shift` is the whole one: the root of the sum of the parts' squared shifts.
        """
        mean, gram = (_MEAN_SHARE, _GRAM_SHARE) if prepared else (0.0, 0.0)
        found = {"noise_multiplier": 2 * math.sqrt(num_epochs / (1 - mean - gram)) / shift}
        if prepared:
            found |= {"mean_noise": 2 / math.sqrt(mean) / shift, "gram_noise": math.sqrt(2 / gram) / shift}
        found |= self._steps(shift, num_epochs, features)
        return {name: float(f"{value:.6g}") for name, value in found.items()}

    def _steps(self, shift: float, num_epochs: int, features: str) -> dict[str, float]:
        """Clip norm and learning rate. Half the steps have to go twice as far.

        D whitened numbers and a constant have a norm of about sqrt(D + 1), and need no larger clip norm; with shapes,
        D is each party's own (`Plan.clip_norm_of`).
        """
        clip_norm = _CLIP * math.sqrt(shift * self.num_samples / self.num_classes)
        if features != "shapes":
            clip_norm = min(clip_norm, math.sqrt(self._width_of(features) + 1))
        rate = min(4.0, _STEPS / num_epochs) * _RATE * self.num_classes
        return {"clip_norm": float(f"{clip_norm:.3g}"), "learning_rate": float(f"{rate:.3g}")}


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
