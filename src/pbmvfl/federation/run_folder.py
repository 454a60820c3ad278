"""The folder of one run: plan.json, data.json, history.csv, result.json, curves.png and checkpoints/."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from pbmvfl._files import PRIVATE_FILE, PRIVATE_FOLDER, make_private, write_atomically
from pbmvfl.errors import PlanError, RunFolderError, WriteError
from pbmvfl.federation.history import EpochLine, history_csv
from pbmvfl.federation.results import DEFAULT_DELTA, Result
from pbmvfl.federation.source import RunSource
from pbmvfl.json_files import read_object
from pbmvfl.plan.plan import Plan

RUNS = Path("runs")


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

    @property
    def model(self) -> Path:
        """The folder of the trained model's parts."""
        return self.path / "model"

    def new_model(self) -> Path:
        """The same, empty: a run that goes on after a limit ended it trains another model than it had."""
        shutil.rmtree(self.model, ignore_errors=True)
        return self.model

    def write_start(self, plan: Plan, source: RunSource) -> None:
        """All that a resume needs, before the first round: the plan, the data, the ledgers' folder and the delta.

        If it cannot be written there is no run, and no folder of one.
        """
        try:
            self.write_source(source)
            write_atomically(self.path / "plan.json", plan.to_json(), mode=PRIVATE_FILE)
        except WriteError:
            with contextlib.suppress(OSError):
                (self.path / "data.json").unlink(missing_ok=True)
                self.path.rmdir()
            raise

    def write_source(self, source: RunSource) -> None:
        write_atomically(self.path / "data.json", json.dumps(source.to_dict(), indent=2) + "\n", mode=PRIVATE_FILE)

    def read_plan(self) -> Plan:
        return Plan.from_dict(read_object(self.path / "plan.json", {}, PlanError))

    def read_source(self) -> RunSource:
        """What the run was started with. A digest of values that version 0.1 left there is taken out."""
        path = self.path / "data.json"
        values = read_object(path, {}, RunFolderError)
        source = RunSource.from_dict(values, path)
        if "fingerprint" in values:
            self.write_source(source)
        return source

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
