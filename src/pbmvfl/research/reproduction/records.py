"""Finished runs, one line each in a JSON-lines file per data set, so that a study runs only what is missing.

A line serves every table and figure that needs the same run: a longer history serves where a shorter one would.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pbmvfl._descriptors import lock_folder
from pbmvfl._files import write_atomically
from pbmvfl.errors import CheckpointError
from pbmvfl.plan.plan import Plan
from pbmvfl.research.simulation.engine import SIMULATED

_METRICS = ("train_accuracy", "test_accuracy", "train_auprc", "test_auprc")
#: Key of the number of rows that an epoch's training metrics were measured on; absent if all of them.
TRAIN_ROWS = "train_rows"
#: A training accuracy so far below a target on 10,000 rows is below it on all: seven standard errors of the share.
SCREEN_MARGIN = 0.03
_DIGITS = 5
EPSILON_NOTE = (
    "simulated noise protects nobody: an epsilon shown with this run is that of the same plan in a deployment"
)


def epochs_to(history: Sequence[dict[str, Any]], metric: str, value: float) -> int | None:
    """Return the first epoch whose metric is at least the value, or None."""
    return next((line["epoch"] for line in history if line[metric] >= value), None)


def is_measured_near(history: Sequence[dict[str, Any]], value: float, num_rows: int) -> bool:
    """Return True if all training accuracies near the value, up to the first that reaches it, are of all rows."""
    for line in history:
        if line["train_accuracy"] >= value - SCREEN_MARGIN and line.get(TRAIN_ROWS, num_rows) < num_rows:
            return False
        if line["train_accuracy"] >= value:
            return True
    return True


def mean_epochs_to(histories: Sequence[Sequence[dict[str, Any]]], metric: str, value: float) -> int | None:
    """Return the first epoch at which the mean of the runs' curves is at least the value, or None."""
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
        """Return True if this is a run of that plan, however long either is."""
        return self.plan.replace(num_epochs=1) == plan.replace(num_epochs=1)

    def to_dict(self) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        for name in ("train_loss", *_METRICS):
            if self.history and name in self.history[0]:
                columns[name] = [round(float(line[name]), _DIGITS) for line in self.history]
        if any(TRAIN_ROWS in line for line in self.history):
            columns[TRAIN_ROWS] = [line.get(TRAIN_ROWS, self.plan.num_samples) for line in self.history]
        return {
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

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Record:
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


#: Key of a line: the configuration's name and the public seed.
_Key = tuple[str, int]


@dataclass(frozen=True)
class _Line:
    number: int
    text: str
    values: dict[str, Any]


class Records:
    """Runs in OUT/records/DATASET.jsonl, one per line, sorted by the name of the configuration and the seed."""

    def __init__(self, out: Path) -> None:
        self._folder = out / "records"
        #: Lines last read of each file, with the file's state at that time.
        self._seen: dict[Path, tuple[tuple[int, ...], dict[_Key, _Line]]] = {}

    def path(self, dataset: str) -> Path:
        return self._folder / f"{dataset}.jsonl"

    def read(self, dataset: str, cell_name: str, seed: int) -> Record | None:
        """Return a recorded run, or None."""
        path = self.path(dataset)
        line = self._lines(path).get((cell_name, seed))
        if line is None:
            return None
        try:
            return Record.from_dict(line.values)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _unreadable(path, line.number, str(error)) from error

    def write(self, record: Record, cell_name: str, seed: int) -> None:
        """Replace the run with the same name and seed, or add it; other lines stay as they are.

        Processes that write at the same time wait for each other, so none loses what another has written.
        """
        path = self.path(record.dataset)
        values = {"cell": cell_name, "seed": seed} | record.to_dict()
        with self._locked():
            texts = {key: line.text for key, line in self._lines(path).items()}
            texts[cell_name, seed] = json.dumps(values, separators=(",", ":"))
            write_atomically(path, "".join(texts[key] + "\n" for key in sorted(texts)))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder itself, so that no lock file can be left behind."""
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = lock_folder(self._folder, ".lock", blocking=True)
        assert descriptor is not None
        try:
            yield
        finally:
            os.close(descriptor)

    def _lines(self, path: Path) -> dict[_Key, _Line]:
        """Return all lines of a file, read again only when the file has changed."""
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                state = (status.st_ino, status.st_mtime_ns, status.st_size)
                if path in self._seen and self._seen[path][0] == state:
                    return self._seen[path][1]
                content = file.read()
        except FileNotFoundError:
            return {}
        lines = _parsed(path, content)
        self._seen[path] = (state, lines)
        return lines


def _parsed(path: Path, content: bytes) -> dict[_Key, _Line]:
    found: dict[_Key, _Line] = {}
    for number, raw in enumerate(content.splitlines(), start=1):
        try:
            text = raw.decode()
            values = json.loads(text)
            key = (str(values["cell"]), int(values["seed"]))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise _unreadable(path, number, str(error)) from error
        if key in found:
            raise _unreadable(path, number, f"it is the same run as line {found[key].number}")
        found[key] = _Line(number, text, values)
    return found


def _unreadable(path: Path, number: int, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}, line {number} is no record that this version can read ({reason}); "
        "restore the file from a copy, or remove the line to run it again"
    )
