"""Gauges of risk: right guesses of the best attack on rows and labels, and what the worst of them means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pbmvfl.privacy.table import PrivacyTable, format_epsilon
from pbmvfl.privacy.units import Accounting, Unit


@dataclass(frozen=True, kw_only=True)
class Gauge:
    """Right guesses of 100 that the best attack has at most; None if nothing of the kind was released."""

    title: str
    #: What is guessed, for the verdict.
    about: str
    advantage: float | None
    epsilon: float | None = None
    detail: str = ""
    is_worst: bool = False

    @property
    def right(self) -> int:
        return math.ceil(50 + 50 * (self.advantage or 0) - 1e-12)

    @property
    def shown_epsilon(self) -> str:
        return "" if self.epsilon is None else format_epsilon(self.epsilon)


#: Advantage and epsilon of one release of a predicted row.
Released = tuple[float, float | None]


def risk_gauges(train: PrivacyTable, predicted: Sequence[Released], *, detail: str = "from the server") -> list[Gauge]:
    """Return the gauges of training rows, predicted rows and labels, the worst of them marked.

    Args:
        train: Bounds of training rows and of labels.
        predicted: All that was released of predicted rows; the worst counts. Empty if nothing was.
        detail: Says what `predicted` covers.
    """
    bound, label = train.bound(Unit.CELL, Accounting.STRICT), train.label
    worst: tuple[float | None, float | None] = max(predicted, key=lambda pair: pair[0], default=(None, None))
    in_clear = label is not None and not math.isfinite(label.epsilon)
    found = [
        Gauge(
            title="Training rows",
            about="one party's values of a training row",
            advantage=bound.advantage_upper_bound,
            epsilon=bound.epsilon,
            detail="from the server",
        ),
        Gauge(
            title="Predicted rows",
            about="one party's values of a predicted row",
            advantage=worst[0],
            epsilon=worst[1],
            detail=detail if predicted else "nothing released",
        ),
        Gauge(
            title="Labels",
            about="the label of a training row",
            advantage=None if label is None else 1.0 if in_clear else label.advantage_upper_bound,
            epsilon=None if label is None else label.epsilon,
            detail="in clear to the parties" if in_clear else "from all parties together" if label else "not used",
        ),
    ]
    highest = max(each.advantage or 0.0 for each in found)
    index = next(i for i, each in enumerate(found) if (each.advantage or 0.0) == highest)
    return [replace(each, is_worst=i == index) for i, each in enumerate(found)]


def verdict(worst: Gauge) -> str:
    """Return what the worst gauge means, in a sentence."""
    if worst.right >= 100:
        return f"Nothing that is proved here keeps an attack on {worst.about} from being always right."
    return (
        f"At worst, the best possible attack on {worst.about} is right in {worst.right} of 100 guesses; 50 is blind "
        "guessing."
    )
