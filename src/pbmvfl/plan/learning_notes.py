"""Notes before training: noise, or drawn labels, that leave nothing or little to be learned."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from pbmvfl.mechanisms.label_response import LabelResponse
from pbmvfl.mechanisms.randomized_response import LARGEST_EPSILON
from pbmvfl.plan.groups import Algorithm, feature_width
from pbmvfl.plan.local_search import dense_columns

if TYPE_CHECKING:
    from pbmvfl.data.vertical import VerticalDataset
    from pbmvfl.plan.plan import Plan

#: Rows times shift, for each class and each root of the numbers in a row: nothing is learned up to the first, and
#: little up to the second.
_NOTHING_LEARNED, _LITTLE_LEARNED = 0.3, 5.0
#: Where one class has more than this share, the same over the share of all others: rare classes are lost much earlier.
_FREQUENT, _NOTHING_RARE, _LITTLE_RARE = 0.6, 5.0, 16.0
#: Drawn labels tell as much as a^2 N true ones, where a is the share that is kept. By the root, for each of K classes:
#: nothing is learned up to the first, and little up to the second. On hold-outs of three tables of 2, 6 and 10 classes,
#: with 300 to 3,000 rows, drawn labels left of the accuracy above the majority rate at most 0.25 up to 0.8, 0.36 to
#: 0.62 from 1.1 to 1.6, and 0.59 or more from 2.7 on.
_NOTHING_LEFT, _LITTLE_LEFT = 0.75, 3.0


def learning_notes(plan: Plan, *, columns: int | None, majority: float | None = None) -> list[str]:
    """Return notes on what can be learned from drawn labels, and by local training.

    Args:
        plan: The plan of the training.
        columns: The most columns of any party; None where that is not known.
        majority: Share of the most frequent class, where it is known.
    """
    found = [] if plan.label_response is None else [label_note(plan.label_response, num_samples=plan.num_samples)]
    if plan.algorithm is Algorithm.STAGED and plan.noise_multiplier and columns is not None:
        noise = learning_note(
            shift=2 * math.sqrt(plan.num_epochs) / plan.noise_multiplier,
            num_samples=plan.num_samples,
            num_classes=plan.num_classes,
            width=feature_width(plan.features, columns, plan.column_values),
            majority=majority,
        )
        found.append(noise)
    return [note for note in found if note is not None]


def learning_notes_for(plan: Plan, data: VerticalDataset) -> list[str]:
    """Return the notes of `learning_notes` for a dataset.

    They use its column counts and the share of its most frequent class, and are for the label holder alone.
    """
    columns = max(dense_columns(part.shape[1:]) for part in data.train_features)
    frequent = max(Counter(data.train_labels.tolist()).values()) / data.num_samples
    return learning_notes(plan, columns=columns, majority=frequent)


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
