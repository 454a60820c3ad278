"""One JSON file a run, so that a study runs only what is missing.

A file serves every table and figure that needs the same run: a longer history serves where a shorter one would.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pbmvfl.errors import CheckpointError
from pbmvfl.files import write_atomically
from pbmvfl.plan import Plan
from pbmvfl.simulation.noise import SIMULATED

_METRICS = ("train_accuracy", "test_accuracy", "train_auprc", "test_auprc")
#: How many rows the training metrics of an epoch were measured on; absent where it was all of them.
TRAIN_ROWS = "train_rows"
#: A training accuracy so far below a target on 10,000 rows is below it on all: seven standard errors of the share.
SCREEN_MARGIN = 0.03
_DIGITS = 5
EPSILON_NOTE = (
    "simulated noise protects nobody: an epsilon shown with this run is that of the same plan in a deployment"
)


def epochs_to(history: Sequence[dict[str, Any]], metric: str, value: float) -> int | None:
    """The first epoch whose metric is at least the value."""
    return next((line["epoch"] for line in history if line[metric] >= value), None)


def is_measured_near(history: Sequence[dict[str, Any]], value: float, num_rows: int) -> bool:
    """Whether every training accuracy near the value was measured on all rows, up to the first that reaches it."""
    for line in history:
        if line["train_accuracy"] >= value - SCREEN_MARGIN and line.get(TRAIN_ROWS, num_rows) < num_rows:
            return False
        if line["train_accuracy"] >= value:
            return True
    return True


def mean_epochs_to(histories: Sequence[Sequence[dict[str, Any]]], metric: str, value: float) -> int | None:
    """The first epoch at which the mean of the runs' curves is at least the value: how an average of runs is read."""
    for lines in zip(*histories, strict=False):
        if sum(line[metric] for line in lines) / len(lines) >= value:
            return int(lines[0]["epoch"])
    return None


@dataclass(frozen=True, kw_only=True)
class Record:
    """A finished or stopped run."""

    plan: Plan
    dataset: str
    history: list[dict[str, Any]]
    engine: str
    seconds: float
    stand_in: bool = False
    notes: tuple[str, ...] = ()

    def is_of(self, plan: Plan) -> bool:
        """Whether this is a run of that plan, however long either is."""
        return self.plan.replace(num_epochs=1) == plan.replace(num_epochs=1)

    def to_json(self) -> str:
        columns: dict[str, Any] = {}
        for name in ("train_loss", *_METRICS):
            if self.history and name in self.history[0]:
                columns[name] = [round(float(line[name]), _DIGITS) for line in self.history]
        if any(TRAIN_ROWS in line for line in self.history):
            columns[TRAIN_ROWS] = [line.get(TRAIN_ROWS, self.plan.num_samples) for line in self.history]
        values = {
            "noise": SIMULATED,
            "note": EPSILON_NOTE,
            "dataset": self.dataset,
            "stand_in": self.stand_in,
            "notes": list(self.notes),
            "engine": self.engine,
            "seconds": round(self.seconds, 2),
            "epochs": len(self.history),
            "plan": self.plan.to_dict(),
            "history": columns,
        }
        text = json.dumps(values, indent=1)
        for name, column in columns.items():  # one line a column: a thousandth of the lines
            text = text.replace(json.dumps(column, indent=1).replace("\n", "\n  "), json.dumps(column))
            assert f'"{name}": [' in text
        return text + "\n"

    @classmethod
    def from_json(cls, text: str) -> Record:
        values = json.loads(text)
        columns = values["history"]
        history = [
            {"epoch": index + 1} | {name: column[index] for name, column in columns.items()}
            for index in range(values["epochs"])
        ]
        return cls(
            plan=Plan.from_dict(values["plan"]),
            dataset=values["dataset"],
            history=history,
            engine=values["engine"],
            seconds=values["seconds"],
            stand_in=values["stand_in"],
            notes=tuple(values["notes"]),
        )


class Records:
    """The folder of runs: OUT/records/DATASET/CELL-seedN.json."""

    def __init__(self, out: Path) -> None:
        self._folder = out / "records"

    def path(self, dataset: str, cell_name: str, seed: int) -> Path:
        return self._folder / dataset / f"{cell_name}-seed{seed}.json"

    def read(self, dataset: str, cell_name: str, seed: int) -> Record | None:
        """A run that is there; None also for half a file, which is worth nothing and is run again."""
        path = self.path(dataset, cell_name, seed)
        try:
            return Record.from_json(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is no record that this version can read ({error}); move it away to run it again"
            ) from error

    def write(self, record: Record, cell_name: str, seed: int) -> None:
        path = self.path(record.dataset, cell_name, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, record.to_json())
