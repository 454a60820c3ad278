"""Which rows each round uses: public, the same everywhere, and exact in its counts.

Shuffled epochs without replacement: every training row is used exactly once an epoch, so the number of releases
about a row is a fact and not an expectation, and a row is never twice in one batch. Each role computes the schedule
for itself from the public seed; a server cannot ask for other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pbmvfl.randomness.public import SCHEDULE_STREAM, public_permutation

if TYPE_CHECKING:
    from pbmvfl.plan import Plan


class RoundKind(IntEnum):
    """What a round does with the rows. Parties know it from the plan; the number also travels in the header."""

    #: Embeddings up, gradient down, every network takes a step.
    JOINT = 1
    #: Embeddings of test rows up, nothing down: an evaluation that is released and charged.
    PREDICTION = 2


@dataclass(frozen=True, eq=False)
class Round:
    """One round: its number in the run, its kind, and the rows of the train or test split that it uses."""

    number: int
    kind: RoundKind
    rows: npt.NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        return len(self.rows)


@lru_cache(maxsize=2)  # parties, their ledgers and the server of one process ask for the same epoch, and then the next
def _epoch_permutation(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return public_permutation(count, seed=seed, stream=SCHEDULE_STREAM, index=epoch)


class Schedule:
    """All rounds of a plan: joint rounds first, then one pass over the test rows if evaluation is released."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._epoch = -1
        self._permutation: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self._plan.num_rounds + self._plan.num_prediction_rounds

    def num_rows(self, number: int) -> int:
        """The size of a round's batch, without making the batch."""
        self._check(number)
        plan = self._plan
        if number < plan.num_rounds:
            start = number % plan.rounds_per_epoch * plan.batch_size
            return min(plan.batch_size, plan.num_samples - start)
        start = (number - plan.num_rounds) * plan.batch_size
        return min(plan.batch_size, plan.num_test_samples - start)

    def __getitem__(self, number: int) -> Round:
        size = self.num_rows(number)
        plan = self._plan
        if number >= plan.num_rounds:
            start = (number - plan.num_rounds) * plan.batch_size
            return Round(number, RoundKind.PREDICTION, np.arange(start, start + size, dtype=np.int64))
        epoch, position = divmod(number, plan.rounds_per_epoch)
        if epoch != self._epoch:  # one epoch's permutation is kept, never the whole run's
            self._permutation = _epoch_permutation(plan.num_samples, plan.seed, epoch)
            self._epoch = epoch
        start = position * plan.batch_size
        return Round(number, RoundKind.JOINT, self._permutation[start : start + size])

    def _check(self, number: int) -> None:
        if not 0 <= number < len(self):
            raise IndexError(f"round={number} is not in the plan; it has rounds 0 to {len(self) - 1}")
