"""A curious party reads labels off the gradients that it receives: what it gets with and without a label epsilon.

The attacker knows the head's weights in every round, which is more than a party sees, and solves for the gradient at
the scores (`pbmvfl.attacks.label_attacks`): its one negative entry is the label that the server used. Against drawn
labels it is right as often as the draw is, and the theorem permits no more: with equally likely classes
e^epsilon / (e^epsilon + K - 1).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from pbmvfl.attacks.label_attacks import solved_labels
from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.schedule import Schedule
from pbmvfl.protocol.party import Party
from pbmvfl.protocol.server import Server
from pbmvfl.wire.messages import Message
from support.cohorts import Cohort, small_data

CLASSES, ROWS, BATCH, WIDTH = 3, 600, 100, 3
DATA = small_data(num_parties=2, num_samples=ROWS, num_test_samples=2, num_classes=CLASSES)
#: One false alarm in a million for each level.
ALARM = 1e-6


def guessed_labels(plan: Plan, labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the attacker's guess of every label after one epoch with gradients of these labels."""
    cohort = Cohort(plan, replace(DATA, train_labels=labels))
    guesses = np.full(ROWS, -1)
    heads: list[npt.NDArray[np.float64]] = []
    schedule: Schedule = plan.schedule

    def note_head(server: Server, answer: bytes) -> None:
        del answer
        heads.append(server.head.weight.detach().numpy().astype(np.float64))  # type: ignore[union-attr,operator]

    def solve(party: Party, message: bytes) -> None:
        seen = Message.from_bytes(message)
        if party.index or not seen.carries_gradient:
            return
        number = seen.round_number if len(seen.payload) and seen.kind.name == "UPDATE" else seen.round_number - 1
        rows = schedule[number].rows
        gradient_BP = np.frombuffer(seen.payload, dtype="<f4").reshape(len(rows), WIDTH).astype(np.float64)
        guesses[rows] = solved_labels(gradient_BP, heads[-1])

    cohort.run(before_party=solve, before_server=note_head)
    return guesses


def pbm_plan(label_epsilon: float | None) -> Plan:
    return Plan.for_data(
        DATA,
        batch_size=BATCH,
        num_epochs=1,
        embedding_dim=WIDTH,
        num_trials=16,
        learning_rate=0.1,
        label_epsilon=label_epsilon,
    )


def test_labels_in_clear_are_read_off_the_gradients() -> None:
    guesses = guessed_labels(pbm_plan(None), DATA.train_labels)
    assert np.mean(guesses == DATA.train_labels) == 1.0


@pytest.mark.parametrize("epsilon", [4.0, 2.0, 1.0])
def test_drawn_labels_are_read_no_better_than_the_theorem_permits(epsilon: float) -> None:
    plan = pbm_plan(epsilon)
    assert plan.label_response is not None
    drawn = plan.label_response.draw(DATA.train_labels, SystemEntropy())
    guesses = guessed_labels(plan, drawn)
    assert (guesses == drawn).all()  # the attack is the best one: it reads everything that was used
    right = int((guesses == DATA.train_labels).sum())
    permitted = math.exp(epsilon) / (math.exp(epsilon) + CLASSES - 1)
    # Clopper-Pearson: the lower end of the interval for the success rate is not above what is permitted ...
    assert stats.beta.ppf(ALARM, right, ROWS - right + 1) <= permitted
    # ... and a control: it is above what a quarter of the epsilon would permit.
    quarter = math.exp(epsilon / 4) / (math.exp(epsilon / 4) + CLASSES - 1)
    assert stats.beta.ppf(ALARM, right, ROWS - right + 1) > quarter
