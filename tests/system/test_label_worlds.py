"""Neighbouring label worlds: whole transcripts of both algorithms, enumerated over every draw of the labels.

All randomness but the draw of labels is known, so a transcript is a function of the drawn labels, and its law in a
world of true labels is a sum over draws. The law of the draw is written out here in fractions of 2^32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import FUSION
from support.cohorts import Cohort, small_data
from support.local_plans import voting_plan

CLASSES, ROWS = 2, 3
DATA = small_data(num_parties=2, num_samples=ROWS, num_test_samples=2, num_classes=CLASSES, columns=2)
EPSILON = 1.5
WORLD, NEIGHBOUR = (0, 1, 1), (0, 0, 1)


def pbm_plan() -> Plan:
    return Plan.for_data(
        DATA, batch_size=2, num_epochs=2, embedding_dim=2, num_trials=4, learning_rate=0.5, label_epsilon=EPSILON
    )


def staged_plan() -> Plan:
    """Row 0 is a fusion row: its true label teaches the fusion model, and never leaves."""
    plans = (voting_plan(DATA, label_epsilon=EPSILON, num_fusion_samples=1, seed=seed) for seed in range(99))
    return next(plan for plan in plans if plan.schedule.part_of(FUSION).tolist() == [0])


def draw_probability(true: tuple[int, ...], drawn: tuple[int, ...]) -> Fraction:
    """Return the probability of a draw: w / 2^32 for each label that moved, with the smallest w that epsilon allows."""
    weight = math.ceil(2**32 / (math.exp(EPSILON) + CLASSES - 1) * (1 + 1e-14))
    kept = Fraction(2**32 - (CLASSES - 1) * weight, 2**32)
    moved = Fraction(weight, 2**32)
    return math.prod((kept if a == b else moved for a, b in zip(true, drawn, strict=True)), start=Fraction(1))


def sent_to_parties(plan: Plan, labels: tuple[int, ...]) -> Any:
    """Return all that the server sends in a run with these labels, in its order."""
    cohort = Cohort(plan, replace(DATA, train_labels=np.array(labels, dtype=np.int64)))
    cohort.run()
    return tuple(message for way, _, message in cohort.transcript if way == "down")


def law(
    plan: Plan, true: tuple[int, ...], used: Callable[[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]
) -> dict[Any, Fraction]:
    """Return the law of the transcript if the server uses `used(true, drawn)` for labels."""
    found: dict[Any, Fraction] = {}
    for drawn in product(range(CLASSES), repeat=ROWS):
        seen = sent_to_parties(plan, used(true, drawn))
        found[seen] = found.get(seen, Fraction(0)) + draw_probability(true, drawn)
    return found


def drawn_alone(true: tuple[int, ...], drawn: tuple[int, ...]) -> tuple[int, ...]:
    del true
    return drawn


def one_true_label(true: tuple[int, ...], drawn: tuple[int, ...]) -> tuple[int, ...]:
    """A planted fault: the row whose label differs between the two worlds is used with its true label."""
    return (drawn[0], true[1], drawn[2])


def largest_ratio(first: dict[Any, Fraction], second: dict[Any, Fraction]) -> float:
    ratios = [math.inf if not second.get(seen) else float(mass / second[seen]) for seen, mass in first.items()]
    return max(ratios)


@pytest.mark.parametrize("make_plan", [pbm_plan, staged_plan])
def test_no_transcript_is_more_than_e_to_the_epsilon_likelier_with_another_label(
    make_plan: Callable[[], Plan],
) -> None:
    plan = make_plan()
    here, there = law(plan, WORLD, drawn_alone), law(plan, NEIGHBOUR, drawn_alone)
    assert sum(here.values()) == sum(there.values()) == 1
    for first, second in ((here, there), (there, here)):
        ratio = largest_ratio(first, second)
        assert ratio <= math.exp(EPSILON)
        # Labels are used, so the bound is reached: a test that sees nothing would pass the line above.
        assert ratio > math.exp(EPSILON) * (1 - 1e-6)
    label = plan.privacy(delta=1e-5).label
    assert label is not None
    assert math.isclose(math.exp(label.epsilon), largest_ratio(here, there), rel_tol=1e-9)


@pytest.mark.parametrize("make_plan", [pbm_plan, staged_plan])
def test_one_use_of_a_true_label_is_caught(make_plan: Callable[[], Plan]) -> None:
    plan = make_plan()
    faulty = [law(plan, world, one_true_label) for world in (WORLD, NEIGHBOUR)]
    assert largest_ratio(*faulty) == math.inf


def test_the_true_label_of_a_fusion_row_moves_no_transcript() -> None:
    plan = staged_plan()
    seen = {sent_to_parties(plan, (true, *rest)) for true in (0, 1) for rest in ((0, 1), (1, 1))}
    assert len(seen) == 2  # one for each pair of labels that do leave


def test_labels_in_clear_give_every_label_away() -> None:
    plan = pbm_plan().replace(label_epsilon=None)
    seen = [sent_to_parties(plan, world) for world in (WORLD, NEIGHBOUR)]
    assert seen[0] != seen[1]
    label = plan.privacy(delta=1e-5).label
    assert label is not None
    assert label.epsilon == math.inf
    assert label.advantage_upper_bound == 1.0


def test_the_server_keeps_nothing_but_drawn_labels() -> None:
    drawn = torch.tensor([1, 0, 1])
    cohort = Cohort(staged_plan(), replace(DATA, train_labels=drawn.numpy()))
    cohort.run()
    (prior,) = [value for name, value in cohort.server.part_state().items() if name.endswith("prior_K")]
    response = staged_plan().label_response
    assert response is not None
    expected = np.maximum(response.corrected_counts(np.array([1, 1])), 0.5)  # of the two rows that train
    np.testing.assert_allclose(prior.numpy(), np.log(expected / expected.sum()), rtol=1e-6)
