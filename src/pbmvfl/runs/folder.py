"""The folder of one run: plan.json, data.json, history.csv, result.json, curves.png and checkpoints/."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pbmvfl.errors import PlanError, RunFolderError
from pbmvfl.files import PRIVATE_FILE, PRIVATE_FOLDER, make_private, write_atomically
from pbmvfl.json_files import Kinds, checked_object, read_object
from pbmvfl.plan import Plan
from pbmvfl.runs.history import EpochLine, history_csv
from pbmvfl.runs.results import DEFAULT_DELTA, Result

RUNS = Path("runs")
_TEXT = str | None
_SOURCE: Kinds = {"dataset": _TEXT, "num_parties": int | None, "ledger": _TEXT}
#: Not in the folders of earlier versions.
_LATER: dict[str, Any] = {"delta": DEFAULT_DELTA, "files": {}}
_OF_DATASET: Kinds = {"root": _TEXT}
_OF_TABLE: Kinds = {
    "data": str,
    "label": str,
    "columns": str,
    "schema": _TEXT,
    "test_data": _TEXT,
    "test_fraction": int | float,
    "seed": int,
}


def _make(path: Path) -> None:
    """For the owner alone: it will hold all parties' weights."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=PRIVATE_FOLDER)
    path.chmod(PRIVATE_FOLDER)


class RunFolder:
    """Where a run writes, and what a resume reads. Never overwrites another run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path | None, *, name: str) -> RunFolder:
        """A new folder: the one asked for, which must not exist, or the next free runs/NAME-NNN."""
        if path is not None:
            try:
                _make(path)
            except FileExistsError:
                raise RunFolderError(
                    f"out={str(path)!r} exists already and nothing in it was touched; "
                    f"choose another folder, or continue that run with --resume {path}"
                ) from None
            except OSError as error:
                raise RunFolderError(f"out={str(path)!r} cannot be made: {error}") from error
            return cls(path)
        for number in range(1, 1_000_000):
            candidate = RUNS / f"{name}-{number:03d}"
            try:
                _make(candidate)
            except FileExistsError:
                continue
            except OSError as error:
                raise RunFolderError(f"out={str(candidate)!r} cannot be made: {error}; use --out FOLDER") from error
            return cls(candidate)
        raise RunFolderError(f"{RUNS}/{name}-NNN are all taken; use --out FOLDER")

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        if not (path / "plan.json").is_file():
            raise RunFolderError(f"resume={str(path)!r} is not a run folder: it has no plan.json")
        return cls(path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def sessions(self) -> Path:
        """The folder of the count of releases: beside plan.json, so that it outlives checkpoints that are removed."""
        return self.path

    def write_start(self, plan: Plan, source: dict[str, Any]) -> None:
        """All that a resume needs, before the first round: the plan, the data, the ledgers' folder and the delta."""
        write_atomically(self.path / "data.json", json.dumps(source, indent=2) + "\n", mode=PRIVATE_FILE)
        write_atomically(self.path / "plan.json", plan.to_json(), mode=PRIVATE_FILE)

    def read_plan(self) -> Plan:
        return Plan.from_dict(read_object(self.path / "plan.json", {}, PlanError))

    def read_source(self) -> dict[str, Any]:
        path = self.path / "data.json"
        source = {**_LATER, **read_object(path, _SOURCE, RunFolderError)}
        kinds = _OF_TABLE if source["dataset"] is None else _OF_DATASET
        return checked_object(source, {**kinds, "delta": int | float, "files": dict}, path, RunFolderError)

    def read_result(self) -> Result | None:
        """What the run came to, if it has ended; one that a ledger ended can go on."""
        path = self.path / "result.json"
        return Result.read(path) if path.exists() else None

    @property
    def curves(self) -> Path:
        """Where the picture goes: a file that is there already, so that it has the rights of the others."""
        path = self.path / "curves.png"
        make_private(path)
        return path

    def write_history(self, history: Sequence[EpochLine]) -> None:
        write_atomically(self.path / "history.csv", history_csv(history), mode=PRIVATE_FILE)

    def write_result(self, result: Result, *, delta: float = DEFAULT_DELTA) -> None:
        """The last of a run's files: its presence means that the run has ended."""
        self.write_history(result.history)
        write_atomically(self.path / "result.json", result.to_json(delta=delta), mode=PRIVATE_FILE)
