"""Observers of a training: what `Federation.fit` calls while it runs."""

from __future__ import annotations

from pbmvfl.federation.epoch_history import EpochLine
from pbmvfl.federation.results import Result
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import TrainingRun


class Callback:
    """Observer of a training. Override what you need; an exception ends the training."""

    def on_start(self, plan: Plan) -> None:
        """Take note of the plan, before anything is released."""

    def on_epoch(self, line: EpochLine, spent: TrainingRun) -> None:
        """Take note of an epoch that has ended.

        Args:
            line: The epoch's line of the history.
            spent: All releases and updates so far, those of earlier sessions included.
        """

    def on_end(self, result: Result) -> None:
        """Take note of the result."""
