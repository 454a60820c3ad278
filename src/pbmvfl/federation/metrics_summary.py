"""Figures of a run beside its metrics, collected at each evaluation, and warnings about them.

Nothing here decides about a release. A run that diverges is ended by the noisy sums that the server saw, which costs
nothing; what only the simulator sees is reported when the run is over.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pbmvfl._text import counted
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.plan.groups import Activation, Algorithm, Evaluation, Loss, feature_width
from pbmvfl.plan.local_search import dense_columns, label_note, learning_note
from pbmvfl.plan.plan import Plan
from pbmvfl.training.metrics import (
    ClassFigures,
    Split,
    class_figures,
    classification_metrics,
    majority,
    per_class,
    score_figures,
)

#: A loss this many times above any that noise can cause does not recover.
_ASTRAY = 30.0
#: Stands for the bound of networks whose scores have none.
_UNBOUNDED = 1e4
#: Class scores beyond this are no longer scores: shares of classes made of them are 0 or 1.
LARGEST_SCORE = 1e4
#: Class names that a sentence lists.
_MOST_NAMES = 5


class Labelled(Protocol):
    """Data of the label holder: enough to measure, without any party's columns."""

    @property
    def class_names(self) -> tuple[str, ...]: ...

    @property
    def train_labels(self) -> npt.NDArray[np.int64]: ...

    @property
    def test_labels(self) -> npt.NDArray[np.int64]: ...


class Figures:
    """Figures of every class, and the largest score, of the newest evaluation."""

    def __init__(self, data: Labelled) -> None:
        self._data = data
        self._measured: dict[Split, list[dict[str, Any]]] = {}
        self._largest: dict[Split, float] = {}
        self._newest: dict[Split, tuple[npt.NDArray[Any], npt.NDArray[np.int64]]] = {}

    def measure(self, scores: npt.NDArray[Any], labels: npt.NDArray[np.int64], split: Split) -> dict[str, float]:
        """Return the metrics, and keep the other figures until the split is measured again."""
        self._measured[split] = per_class(scores, labels, split=split)
        self._largest[split] = float(np.abs(scores).max())  # NaN, if one is
        self._newest[split] = scores, labels
        return classification_metrics(scores, labels, prefix=split)

    @property
    def has_measured(self) -> bool:
        return bool(self._measured)

    @property
    def classes(self) -> tuple[ClassFigures, ...]:
        data = self._data
        found = class_figures(data.class_names, data.train_labels, data.test_labels)
        for said in self._measured.values():
            found = tuple(replace(each, **more) for each, more in zip(found, said, strict=True))
        return found

    @property
    def scores(self) -> dict[str, dict[str, Any]]:
        """Figures that a page draws of each split's predictions."""
        return {str(split): score_figures(*each) for split, each in self._newest.items()}

    @property
    def largest_score(self) -> float | None:
        """Largest absolute score; None if nothing was measured, infinity if a score is no number."""
        if not self._largest:
            return None
        return max(value if math.isfinite(value) else math.inf for value in self._largest.values())


# --- divergence ---


def loss_limit(plan: Plan) -> float:
    """Return the loss of an epoch above which training has diverged: far above any that the plan's noise causes.

    Untrained networks have scores of the size of a sum of embeddings with its noise, which the plan bounds. A step
    along a noisy gradient moves the scores of another row by the learning rate times the product of two such sums; a
    learning rate above 1 is no reason to expect more.
    """
    widest = plan.num_parties * plan.bound
    if plan.activation is Activation.NONE:
        widest = max(widest, _UNBOUNDED)
    size = math.hypot(widest, math.sqrt(plan.release.variance_upper_bound))
    size += min(plan.learning_rate, 1.0) * plan.embedding_dim * size**2
    if plan.loss is Loss.SQUARED:
        return _ASTRAY * (1 + plan.num_classes * size**2) / 2
    return _ASTRAY * (math.log(plan.num_classes) + size)


def divergence(plan: Plan, loss: float | None, epoch: float) -> str | None:
    """Return why a run ends after this epoch, or None."""
    if loss is None or loss <= loss_limit(plan):
        return None
    size = f"{loss:.3g}" if math.isfinite(loss) else "no number"
    return (
        f"the training loss of epoch {epoch:g} is {size}, and no noise of this plan brings it above "
        f"{loss_limit(plan):.2g}; {what_to_change(plan)}"
    )


def what_to_change(plan: Plan) -> str:
    """Return advice for a new run."""
    words = f"start a new run with a smaller learning_rate than {plan.learning_rate:g}"
    if plan.algorithm is Algorithm.STAGED:
        return f"{words}, or with none: then it is planned"
    return f"{words}, such as {min(plan.learning_rate / 10, 0.01):g}"


# --- words ---


def learning_notes(plan: Plan, *, columns: int | None, majority: float | None = None) -> list[str]:
    """Return notes on what can be learned from drawn labels, and by local training of at most `columns` columns."""
    found = [] if plan.label_response is None else [label_note(plan.label_response, num_samples=plan.num_samples)]
    return [note for note in (*found, _local_note(plan, columns, majority)) if note is not None]


def _local_note(plan: Plan, columns: int | None, majority: float | None) -> str | None:
    if plan.algorithm is not Algorithm.STAGED or not plan.noise_multiplier or columns is None:
        return None
    shift = 2 * math.sqrt(plan.num_epochs) / plan.noise_multiplier
    width = feature_width(plan.features, columns, plan.column_values)
    sizes = {"num_samples": plan.num_samples, "num_classes": plan.num_classes}
    return learning_note(shift=shift, width=width, majority=majority, **sizes)


def learning_notes_for(plan: Plan, data: VerticalDataset) -> list[str]:
    """Return the notes of `learning_notes` for a dataset.

    They use its column counts and the rate of its most frequent class, and are for the label holder alone.
    """
    columns = max(dense_columns(part.shape[1:]) for part in data.train_features)
    frequent = max(Counter(data.train_labels.tolist()).values()) / data.num_samples
    return learning_notes(plan, columns=columns, majority=frequent)


def notes_on_classes(classes: Sequence[ClassFigures]) -> list[str]:
    """Return notes before training: classes that cannot be learned, and names that are hard to tell apart."""
    notes = []
    for each in classes:
        if each.train == 0:
            where = f"{counted(each.test, 'test row')} {'has' if each.test == 1 else 'have'} it" if each.test else ""
            notes.append(
                f"no training row has class {each.name!r}, so it cannot be learned"
                + (f"; {where}, and each counts as an error" if where else "")
            )
    alike: dict[str, list[str]] = defaultdict(list)
    for each in classes:
        alike["".join(each.name.split()).casefold()].append(each.name)
    for names in alike.values():
        if len(names) > 1:
            listed = " and ".join(map(repr, names))
            notes.append(f"classes {listed} differ only in blanks or capitals; if they are one class, write it one way")
    return notes


def notes_on_predictions(
    classes: Sequence[ClassFigures],
    metrics: Mapping[str, float],
    *,
    largest_score: float | None,
    plan: Plan,
    diverged: bool = False,
) -> list[str]:
    """Return warnings about predictions: one class for all rows, no better than guessing, absurd scores."""
    if not classes:  # a result of an earlier version
        return []
    notes = []
    split: Split = "test" if "test_accuracy" in metrics else "train"
    rows = "test" if split == "test" else "training"
    said = [each for each in classes if each.predicted(split)]
    if len(said) == 1 and sum(each.count(split) for each in classes) > 1:
        notes.append(f"the model says class {said[0].name!r} for every {rows} row: it tells no two rows apart")
    accuracy, guess = metrics.get(f"{split}_accuracy"), majority(classes).get(split)
    if accuracy is not None and guess is not None and accuracy <= guess.rate:
        needed = "; it needs more rows, a larger epsilon or other settings (pbmvfl plan shows some)"
        if plan.evaluation is Evaluation.RELEASED and plan.prediction is not None:
            needed = "; the model may be better than its predictions, whose own epsilon (--prediction-epsilon) is small"
        notes.append(
            f"{split} accuracy {accuracy:.4f} is not above {guess.rate:.4f}, what saying {guess.name!r} for every row "
            f"gives: do not use {'this model' if 'model may' not in needed else 'these'}{'' if diverged else needed}"
        )
    if largest_score is not None and largest_score > LARGEST_SCORE and not diverged:
        size = f"up to {largest_score:.3g}" if math.isfinite(largest_score) else "infinite, or no numbers"
        notes.append(f"class scores are {size}, which is no sensible size; {what_to_change(plan)}")
    return notes


def describe_classes(classes: Sequence[ClassFigures]) -> str:
    """Return the classes' names with counts; for many classes the range of the counts."""
    if len(classes) <= 2 * _MOST_NAMES:
        has_test = any(each.test for each in classes)
        counts = (f"{each.train:,} + {each.test:,}" if has_test else f"{each.train:,}" for each in classes)
        return ", ".join(f"{each.name} ({count})" for each, count in zip(classes, counts, strict=True)) + (
            "; training + test rows" if has_test else "; training rows"
        )
    fewest, most = min(each.train for each in classes), max(each.train for each in classes)
    spread = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
    listed = ", ".join(each.name for each in classes[:_MOST_NAMES])
    return f"{listed} and {len(classes) - _MOST_NAMES} others, {spread} training rows each"
