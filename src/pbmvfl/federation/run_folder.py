"""The folder of a run, and the source of its rows."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pbmvfl._files import (
    PRIVATE_FILE,
    PRIVATE_FOLDER,
    Kinds,
    checked_object,
    make_private,
    read_object,
    write_atomically,
)
from pbmvfl.errors import CheckpointError, DataError, PlanError, RunFolderError, WriteError
from pbmvfl.federation.epoch_history import EpochLine, history_csv
from pbmvfl.federation.results import Result
from pbmvfl.plan.plan import Plan

if TYPE_CHECKING:
    from pbmvfl.data.vertical import VerticalDataset


# ---
# Source of a run's rows, and what else a resume must find unchanged: typed, and written as data.json.


#: Delta of folders of version 0.1, which did not write it.
_DELTA = 1e-5
_TEXT = str | None
_NAMED: Kinds = {"dataset": str, "num_parties": int | None, "root": _TEXT}
_TABLE: Kinds = {
    "data": str | dict,
    "label": str,
    "columns": _TEXT,
    "schema": _TEXT,
    "test_data": str | dict | None,
    "test_fraction": int | float,
    "seed": int,
    "num_parties": int | None,
}


@dataclass(frozen=True, kw_only=True)
class NamedSource:
    """One of the datasets that have a loader."""

    dataset: str
    num_parties: int | None = None
    root: str | None = None

    @property
    def name(self) -> str:
        """Name of the rows in ledgers."""
        return self.dataset

    def load(self) -> VerticalDataset:
        from pbmvfl.data import load_dataset

        return load_dataset(self.dataset, num_parties=self.num_parties, root=self.root)

    def changes(self, path: Path) -> list[str]:
        """Return no notes: a named dataset is checked by its loader."""
        del path
        return []


#: A file for all parties, or one for each.
Files = str | dict[str, str]


@dataclass(frozen=True, kw_only=True)
class TableSource:
    """A table of the user's own, or one for each party."""

    data: Files
    label: str
    #: None: each party's file has its columns.
    columns: str | None = None
    schema: str | None = None
    test_data: Files | None = None
    test_fraction: float = 0.2
    dataset_name: str | None = None
    seed: int = 0
    num_parties: int | None = None
    #: The column of row ids; version 0.1 had none.
    id: str | None = None
    label_data: str | None = None
    #: (size, time of the last change) of each file when the run began: facts of files, which tell nothing about values.
    files: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def dataset(self) -> None:
        """None: no loader knows the table."""
        return

    @property
    def name(self) -> str:
        """Name of the rows in ledgers."""
        from pbmvfl.data.column_rules import default_name

        return self.dataset_name or default_name(self.data)

    def load(self) -> VerticalDataset:
        from pbmvfl.data import load_table

        table = load_table(
            self.data,
            label=self.label,
            columns=self.columns,
            id=self.id,
            label_data=self.label_data,
            test=self.test_data,
            test_fraction=self.test_fraction,
            seed=self.seed,
            schema=self.schema,
            name=self.dataset_name,
        )
        if self.num_parties is not None and self.num_parties != table.num_parties:
            raise DataError(
                f"num_parties={self.num_parties} but --{'data' if self.columns is None else 'columns'} names "
                f"{table.num_parties} parties: "
                f"{', '.join(table.party_names)}"
            )
        return table

    def file_facts(self) -> dict[str, tuple[int, int]]:
        """Return size and time of every file of the table, as they are now."""
        found = {}
        for name, file in self._files().items():
            if Path(file).is_file():
                status = Path(file).stat()
                found[name] = (status.st_size, status.st_mtime_ns)
        return found

    def _files(self) -> dict[str, str]:
        """Return every file by the option that named it, and by its party where there is one for each."""
        found: dict[str, str] = {}
        for name in ("data", "test_data", "label_data", "schema"):
            files = getattr(self, name)
            if isinstance(files, dict):
                found |= {f"{name}:{party}": file for party, file in files.items()}
            elif files is not None:
                found[name] = files
        return found

    def changes(self, path: Path) -> list[str]:
        """Refuse files that have changed since the run in `path` began; return a note for one that may have."""
        notes = []
        now = self.file_facts() if self.files else {}
        for name, (size, time) in now.items():
            known_size, known_time = self.files.get(name, (size, time))
            file = self._files()[name]
            if size != known_size:
                raise CheckpointError(
                    f"{path} is a run on other values: {file} had {known_size} bytes when it began and has {size} "
                    "now; put the data back as it was, or start a new run"
                )
            if time != known_time:
                notes.append(f"{file} was written to since the run began; it must hold the same values")
        return notes


@dataclass(frozen=True, kw_only=True)
class RunSource:
    """Everything that a run was started with beside its plan."""

    rows: NamedSource | TableSource
    #: The folder of the parties' ledgers.
    ledger: str | None = None
    #: The delta of the epsilons that are shown.
    delta: float = _DELTA

    def to_dict(self) -> dict[str, Any]:
        return {"dataset": self.rows.dataset, **asdict(self.rows), "ledger": self.ledger, "delta": self.delta}

    @classmethod
    def from_dict(cls, values: dict[str, Any], path: Path) -> RunSource:
        """Read what `to_dict` wrote into `path`; version 0.1 wrote no delta."""
        checked_object(values, {"dataset": _TEXT, "ledger": _TEXT}, path, RunFolderError)
        delta = checked_object({"delta": _DELTA, **values}, {"delta": int | float}, path, RunFolderError)["delta"]
        kind: type[NamedSource] | type[TableSource] = TableSource if values["dataset"] is None else NamedSource
        checked_object(values, _TABLE if kind is TableSource else _NAMED, path, RunFolderError)
        known = {each.name: values[each.name] for each in fields(kind) if each.name in values}
        if kind is TableSource:
            _check_files(known, path)
            known["files"] = _file_facts(known.get("files", {}), path)
        return cls(rows=kind(**known), ledger=values["ledger"], delta=delta)

    def differs(self, wanted: dict[str, Any]) -> str | None:
        """Return the first name whose wanted value is not the kept one; None if all agree."""
        kept = self.to_dict()
        for name, value in wanted.items():
            if value is not None and _comparable(name, value) != _comparable(name, kept.get(name)):
                return name
        return None


def _check_files(known: dict[str, Any], path: Path) -> None:
    checked_object({"id": None, "label_data": None, **known}, {"id": _TEXT, "label_data": _TEXT}, path, RunFolderError)
    for name in ("data", "test_data"):
        files = known.get(name)
        if isinstance(files, dict):
            checked_object(files, dict.fromkeys(files, str), path, RunFolderError)


def _file_facts(values: object, path: Path) -> dict[str, tuple[int, int]]:
    if isinstance(values, dict) and all(isinstance(facts, list) and len(facts) == 2 for facts in values.values()):
        return {name: (int(size), int(time)) for name, (size, time) in values.items()}
    raise RunFolderError(f"{path} is damaged: files={values!r} must have two numbers a file; restore it from a copy")


def _comparable(name: str, value: Any) -> Any:
    """Return a value to compare: columns by party may be spelled with other spaces."""
    from pbmvfl.data.column_rules import parse_columns

    return list(parse_columns(value, may_share=True).items()) if name == "columns" and value is not None else value


# --- The folder of one run: plan.json, data.json, history.csv, result.json, curves.png and checkpoints/ ---


RUNS = Path("runs")


def _make(path: Path) -> None:
    """Make a folder for the owner alone: it will hold all parties' weights."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=PRIVATE_FOLDER)
    path.chmod(PRIVATE_FOLDER)


class RunFolder:
    """Folder that a run writes and a resume reads. Another run's folder is never overwritten."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path | None, *, name: str) -> RunFolder:
        """Make a folder: the given one, which must not exist, or the next free runs/NAME-NNN."""
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
        """Empty the model's folder and return it: a run resumed after a limit trains another model."""
        shutil.rmtree(self.model, ignore_errors=True)
        return self.model

    def write_start(self, plan: Plan, source: RunSource) -> None:
        """Write all that a resume needs, before the first round: plan, data, the ledgers' folder and delta.

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
        """Read what the run was started with. A digest of values that version 0.1 wrote is removed."""
        path = self.path / "data.json"
        values = read_object(path, {}, RunFolderError)
        source = RunSource.from_dict(values, path)
        if "fingerprint" in values:
            self.write_source(source)
        return source

    def read_result(self) -> Result | None:
        """Read the result of a run that has ended, or None; one that a ledger ended can be resumed."""
        path = self.path / "result.json"
        return Result.read(path) if path.exists() else None

    @property
    def curves(self) -> Path:
        """File of the picture, made in advance with the rights of the others."""
        path = self.path / "curves.png"
        make_private(path)
        return path

    def write_history(self, history: Sequence[EpochLine]) -> None:
        write_atomically(self.path / "history.csv", history_csv(history), mode=PRIVATE_FILE)

    def write_result(self, result: Result, *, delta: float | None = None) -> None:
        """Write the last of a run's files: its presence means that the run has ended."""
        self.write_history(result.history)
        write_atomically(self.path / "result.json", result.to_json(delta=delta), mode=PRIVATE_FILE)
