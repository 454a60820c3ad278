"""Observers of a training. The trackers among them give MLflow and TensorBoard figures after every epoch.

    federation.fit(data, callbacks=[MLflowTracker()])

Epsilons are strict, against the server, and as ledgers count them: the last one is what a ledger has that was charged
by this run alone. An advantage is that of the best attack on what was released.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pbmvfl.errors import PbmvflError
from pbmvfl.federation.epoch_history import EpochLine
from pbmvfl.federation.results import Result
from pbmvfl.ledger.spending import epsilon_of_run
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import TrainingRun, epsilon_bound
from pbmvfl.privacy.conversion import check_delta, usual_delta
from pbmvfl.privacy.units import Accounting, Unit


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


# --- Trackers ---


class Tracker(Callback):
    """Callback that sends figures to a tracker; a subclass has `log`."""

    def __init__(self, *, delta: float | None = None) -> None:
        """Track at a delta; None for a tenth of 1/N, at most 1e-5, where N is the number of training rows."""
        if delta is not None:
            check_delta(delta)
        self._delta = self._given_delta = delta
        self._last: tuple[int, dict[str, float]] | None = None

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Send figures of one step."""
        raise NotImplementedError

    def close(self) -> None:
        """End the tracking of a run."""

    def on_start(self, plan: Plan) -> None:
        """Take the plan's usual delta, if none was given."""
        self._delta = usual_delta(plan.num_samples) if self._given_delta is None else self._given_delta
        self._last = None

    def on_epoch(self, line: EpochLine, spent: TrainingRun) -> None:
        """Log the epoch's metrics and what was spent by its end."""
        self._log({**line.metrics, **self._spent(spent)}, math.ceil(line.epoch))

    def on_end(self, result: Result) -> None:
        """Log what the whole run has spent, if it released more after its last epoch."""
        figures = {**result.metrics, **self._spent(result.training_run)}
        step, logged = self._last or (0, {})
        if any(logged.get(name) != value for name, value in figures.items()):
            self._log(figures, step + 1)
        self.close()

    def _log(self, figures: dict[str, float], step: int) -> None:
        self._last = (step, figures)
        self.log(figures, step)

    def _spent(self, run: TrainingRun) -> dict[str, float]:
        found, delta = {}, self._delta
        assert delta is not None, "on_start comes first"
        for unit in (Unit.CELL, Unit.RECORD):
            found[f"epsilon_{unit}"] = epsilon_of_run(run, unit, delta=delta)
            bound = epsilon_bound(run, unit, Accounting.STRICT, delta=delta)
            found[f"advantage_{unit}"] = bound.advantage_upper_bound
        return found


class MLflowTracker(Tracker):
    """Tracker that logs to the active MLflow run, or to a new one that it ends with the training."""

    def __init__(self, *, delta: float | None = None) -> None:
        super().__init__(delta=delta)
        self._mlflow = _module("mlflow", "mlflow")
        self._own = False

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Log metrics of one step."""
        if self._mlflow.active_run() is None:
            self._mlflow.start_run()
            self._own = True
        self._mlflow.log_metrics(dict(figures), step=step)

    def close(self) -> None:
        """End the run, if it is the tracker's own."""
        if self._own:
            self._mlflow.end_run()
            self._own = False


class TensorBoardTracker(Tracker):
    """Tracker that writes TensorBoard's event files into a folder."""

    def __init__(self, folder: Path | str, *, delta: float | None = None) -> None:
        super().__init__(delta=delta)
        self._writer = _module("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write scalars of one step. TensorBoard keeps them with the precision of float32."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _module(name: str, extra: str) -> Any:
    """Import an optional package."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise PbmvflError(f'{extra} is not installed; pip install "pbmvfl[{extra}]"') from error
