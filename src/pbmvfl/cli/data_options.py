"""Data options of a command: a named dataset, a table, a plan file, a run folder, or explicit sizes."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pbmvfl._text import did_you_mean
from pbmvfl.cli.options import TableOptions, data_option
from pbmvfl.cli.train import read_plan, source_of
from pbmvfl.errors import DataError, PlanError, RunFolderError
from pbmvfl.federation.run_folder import NamedSource, TableSource

if TYPE_CHECKING:
    from pbmvfl.data.vertical import VerticalDataset

Source = Annotated[
    str | None,
    typer.Argument(
        help="A named dataset, a run folder, or a plan of `pbmvfl plan --out`; or give --data, or numbers.",
        show_default=False,
    ),
]
PlanFile = Annotated[Path | None, data_option("--plan", help="The sizes of this plan's file.")]


@dataclass(frozen=True, kw_only=True)
class PlannedTable(TableOptions):
    """Options of a table, or of its width."""

    columns: Annotated[
        str | None,
        data_option(
            help='Who holds what in --data: "bank=a,b,c;hospital=d,e". With numbers: the most columns that a party has.'
        ),
    ] = None


_OF_TABLES = ("label", "id", "label_data", "schema", "test_data", "test_fraction")
#: Default fraction of test rows.
_USUAL_FRACTION = 0.2
#: Plan fields that the data determines.
_SIZES = ("num_parties", "num_samples", "num_classes", "num_test_samples")


@dataclass(frozen=True, kw_only=True)
class KnownData:
    """Data that the options name, or only its sizes."""

    data: VerticalDataset | None = None
    sizes: dict[str, int]
    columns: int | None = None
    #: Arguments with which `pbmvfl train` uses the same data.
    command: str = "DATASET"
    #: Run folder, if one was given.
    folder: Path | None = None
    #: Plan file, if one was given.
    plan_file: Path | None = None


def known_data(
    *,
    source: str | None,
    table: TableOptions,
    plan_file: Path | None,
    given: dict[str, Any],
    load: bool = True,
) -> KnownData:
    """Return the data that the options name, checked against the sizes in `given`.

    Only one of a source, a table and a plan file is permitted. Without `load` the rows of a run folder are not read.
    """
    ways = {"SOURCE": source, "--data": table.data or None, "--plan": plan_file}
    said = [way for way, value in ways.items() if value is not None]
    if len(said) > 1:
        raise DataError(f"{said[0]} and {said[1]} both say which data is meant; give one of them")
    seed, num_parties = given.get("seed", 0), given.get("num_parties")
    if table.data:
        rows = source_of(None, table.to_dict(), num_parties, None, seed)
        return _loaded(rows, given, command=_table_command(table.given))
    columns = _count(table.columns)
    if others := [name for name in _OF_TABLES if table.given[name]]:
        raise DataError(f"--{others[0].replace('_', '-')} goes with --data TABLE")
    if source is None and plan_file is None:
        return KnownData(sizes=_sizes_of(given), columns=columns)
    path = Path(source) if plan_file is None and source is not None else plan_file
    assert path is not None
    if path.is_dir() and plan_file is None:
        return _of_run(path, given, load=load)
    if path.is_file() or plan_file is not None:
        plan = read_plan(path)
        sizes = {name: getattr(plan, name) for name in _SIZES}
        return KnownData(sizes=_agreeing(sizes, given), columns=columns, plan_file=path)
    from pbmvfl.data.datasets import DATASETS

    assert source is not None
    if source not in DATASETS:
        raise RunFolderError(
            f"source={source!r} is neither a run folder, nor a plan's file, nor a dataset ({', '.join(DATASETS)}); "
            f"give one of these, or --data TABLE.{did_you_mean(source, DATASETS)}"
        )
    if columns is not None:
        raise DataError(f"--columns goes with --data TABLE or with numbers: {source} has its own")
    more = "" if num_parties is None else f" --num-parties {num_parties}"
    return _loaded(NamedSource(dataset=source, num_parties=num_parties), given, command=source + more)


def _of_run(path: Path, given: dict[str, Any], *, load: bool) -> KnownData:
    from pbmvfl.federation.run_folder import RunFolder

    folder = RunFolder.existing(path)
    source = folder.read_source()
    command = source.rows.dataset or _table_command(source.to_dict())
    if not load:
        plan = folder.read_plan()
        sizes = {name: getattr(plan, name) for name in _SIZES}
        return KnownData(sizes=_agreeing(sizes, given), command=command, folder=path)
    found = _loaded(source.rows, given, command=command)
    return KnownData(data=found.data, sizes=found.sizes, command=command, folder=path)


def _loaded(rows: NamedSource | TableSource, given: dict[str, Any], *, command: str) -> KnownData:
    data = rows.load()
    return KnownData(data=data, sizes=_agreeing({name: getattr(data, name) for name in _SIZES}, given), command=command)


def _sizes_of(given: dict[str, Any]) -> dict[str, int]:
    return {name: given[name] for name in _SIZES if name in given}


def _agreeing(known: dict[str, int], given: dict[str, Any]) -> dict[str, int]:
    """Return the known sizes; refuse given sizes that differ."""
    for name, value in _sizes_of(given).items():
        if known.get(name, value) != value:
            option = "--" + name.replace("_", "-")
            raise PlanError(f"{name}={value}, but the data has {known[name]}; leave {option} out")
    return known


def _count(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise PlanError(
            f"columns={text!r} must be a whole number of at least 1, the most columns that a party has; who holds "
            "which goes with --data TABLE"
        )
    return int(text)


def _table_command(table: dict[str, Any]) -> str:
    """Return the command-line options of a table, quoted for a shell."""
    names = ("data", "label", "columns", "id", "label_data", "schema", "test_data", "test_fraction")
    said = {name: table[name] for name in names if table.get(name) not in (None, _USUAL_FRACTION)}
    given = [(name, text) for name, value in said.items() for text in _texts(value)]
    return " ".join(f"--{name.replace('_', '-')} {shlex.quote(text)}" for name, text in given)


def _texts(value: Any) -> list[str]:
    """Return an option's values as text: one for each party's file, or a single one."""
    if isinstance(value, dict):
        return [f"{party}={file}" for party, file in value.items()]
    if isinstance(value, list):
        return [str(each) for each in value]
    return [str(value)]
