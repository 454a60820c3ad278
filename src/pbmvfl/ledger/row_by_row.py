"""Charging of predicted rows one by one, where a party answers some of them from its store.

A ledger has one number for a session: how many rounds of its schedule are charged. A session that charges rows one by
one therefore has a schedule of its own in the ledger: one round for each row that is charged, in the order in which
rows are predicted. Rows with stored answers are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pbmvfl.errors import LedgerError
from pbmvfl.plan.round_kinds import Split
from pbmvfl.plan.schedule import Order, Phase, Round, Schedule


@dataclass(frozen=True, kw_only=True, eq=False)
class RowByRow:
    """The rounds of a session as they are charged: predicted rows one by one."""

    #: The schedule of the session's plan, and the session's first round.
    planned: Schedule
    first_round: int
    #: Numbers of the test rows that are charged, in the order of their rounds.
    rows: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        """Refuse other rows than those that the remaining rounds predict, and other rounds than can be counted so."""
        kinds = {self.planned.kind(number) for number in self._numbers}
        countable = len(kinds) == 1 and all(kind.split is Split.TEST for kind in kinds)
        rounds = [self.planned[number].rows for number in self._numbers]
        predicted = np.concatenate(rounds) if countable else self.rows[:0]
        if not len(self.rows) or not np.array_equal(predicted[np.isin(predicted, self.rows)], self.rows):
            raise LedgerError(
                f"unanswered={len(self.rows)} rows from round={self.first_round} on; permitted: test rows that the "
                "plan predicts from there on, at least one, each once and in the order of their rounds, where nothing "
                "else comes before them"
            )

    @property
    def _numbers(self) -> range:
        return range(self.first_round, len(self.planned))

    @cached_property
    def _places(self) -> npt.NDArray[np.int64]:
        """The place of each test row among those that are charged; -1 for the others."""
        places = np.full(self.planned.num_test_samples, -1, dtype=np.int64)
        places[self.rows] = np.arange(len(self.rows))
        return places

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of the session's line in the ledger."""
        phase = Phase(kind=self.planned.kind(self.first_round), passes=1, order=Order.AS_GIVEN)
        return replace(self.planned, num_test_samples=len(self.rows), batch_size=1, phases=(phase,))

    def charged_part(self, number: int) -> Round:
        """Return what is charged of one of the plan's rounds; a row's number is then its place among the charged."""
        current = self.planned[number]
        places = self._places[current.rows]
        return Round(number, current.kind, places[places >= 0])

    def charged_parts(self) -> Iterator[Round]:
        """Yield what is charged of every round, where that is anything."""
        return (part for number in self._numbers if (part := self.charged_part(number)).num_rows)
