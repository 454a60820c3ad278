"""Notes before training: what they say it takes is enough, and a little less is not."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from pbmvfl.mechanisms.label_response import LabelResponse
from pbmvfl.plan.learning_notes import label_note, learning_note

# --- what is said before training ---


@pytest.mark.parametrize("majority", [None, 0.5, 0.8, 0.97])
def test_a_note_says_what_it_would_take_and_that_is_enough(majority):
    sizes: dict[str, Any] = {"num_samples": 400, "num_classes": 3, "width": 20, "majority": majority}
    note = learning_note(shift=0.005, **sizes)
    assert note is not None
    assert "leaves nothing: expect the rate of the most frequent class" in note
    needed = re.search(r"about ([\d,]+) rows, or ([\d,.e+]+) times the epsilon", note)
    assert needed is not None
    rows, times = (float(number.replace(",", "")) for number in needed.groups())
    assert learning_note(shift=0.005 * times, **sizes) is None
    assert learning_note(shift=0.005, **{**sizes, "num_samples": int(rows)}) is None


def test_rare_classes_are_said_to_be_lost_where_equal_ones_are_not():
    sizes = {"num_samples": 4000, "num_classes": 2, "width": 20}
    assert learning_note(shift=0.1, **sizes) is None
    assert learning_note(shift=0.1, majority=0.5, **sizes) is None
    note = learning_note(shift=0.1, majority=0.9, **sizes)
    assert note is not None
    assert "90% of them in one, leaves nothing" in note
    assert learning_note(shift=0.1, majority=1.0, **sizes) is not None


def test_notes_grow_with_the_noise():
    def said(shift: float) -> int:
        note = learning_note(shift=shift, num_samples=2000, num_classes=2, width=10)
        return 0 if note is None else 1 if "leaves little" in note else 2

    found = [said(10.0**power) for power in np.linspace(1, -4, 60)]
    assert found == sorted(found)
    assert set(found) == {0, 1, 2}


# --- drawn labels ---


@pytest.mark.parametrize(("num_samples", "num_classes"), [(300, 2), (300, 10), (3000, 6), (50_000, 2), (10**6, 100)])
def test_a_label_epsilon_that_leaves_little_is_named_with_one_and_with_rows_that_would_do(
    num_samples: int, num_classes: int
) -> None:
    """What is named is looked at again: it would do, and a fifth less would not."""

    def note(epsilon: float, rows: int = num_samples) -> str | None:
        return label_note(LabelResponse(num_classes=num_classes, epsilon=epsilon), num_samples=rows)

    said = note(0.01)
    assert said is not None
    found = re.search(r"would take a label epsilon of ([\d.]+), or about ([\d,]+) rows", said)
    assert found is not None
    enough, rows = float(found[1]), int(found[2].replace(",", ""))
    assert note(enough) is None
    assert note(0.01, rows) is None
    assert "leaves little" in str(note(0.8 * enough))
    assert note(0.01, int(0.8 * rows)) is not None
    # The share of labels that are true ones, by its definition, against the noise of counts.
    signal = (math.exp(enough) - 1) / (math.exp(enough) + num_classes - 1) * math.sqrt(num_samples / num_classes)
    assert 3.0 < signal < 3.5


def test_a_label_epsilon_that_leaves_nothing_says_so_and_the_usual_one_is_enough_for_most_tables() -> None:
    nothing = label_note(LabelResponse(num_classes=10, epsilon=0.25), num_samples=1000)
    assert "leaves nothing: expect the rate of the most frequent class" in str(nothing)
    assert label_note(LabelResponse(num_classes=2, epsilon=4.0), num_samples=30) is None
    # Twenty rows of ten classes are too few by any label epsilon: only one that leaves nothing at all is named.
    assert label_note(LabelResponse(num_classes=10, epsilon=4.0), num_samples=20) is None
    assert "it would take about" in str(label_note(LabelResponse(num_classes=10, epsilon=1.0), num_samples=20))
