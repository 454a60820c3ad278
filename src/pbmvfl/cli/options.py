"""Options that several commands have, and their checks, before any long work."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pbmvfl.errors import DataError, PlanError, RunFolderError
from pbmvfl.plan.groups import DATA


def on_or_off(name: str, *, on: bool, off: bool) -> bool | None:
    """A setting with a flag for either way; None if neither was given."""
    if on and off:
        raise PlanError(f"--{name} and --no-{name} contradict each other; give one of them, or neither for the default")
    return on if on or off else None


def check_target(option: str, path: Path | None, *, may_exist: bool = False) -> None:
    """Refuse a file that could not be written, or would replace somebody's, before its content is computed."""
    if path is None:
        return
    if path.is_dir() or (path.exists() and not may_exist):
        raise RunFolderError(f"{option}={str(path)!r} exists already and was not touched; choose another name")
    if not path.parent.is_dir():
        raise RunFolderError(
            f"{option}={str(path)!r} cannot be written: {str(path.parent)!r} is not a folder; make it, or name another"
        )
    if not os.access(path.parent, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise RunFolderError(
            f"{option}={str(path)!r} cannot be written: you have no right to write there; name another place"
        )


#: What matplotlib can draw without further packages, and a reader can open anywhere.
_PICTURES = (".png", ".pdf", ".svg")


def check_picture(option: str, path: Path | None) -> None:
    """Refuse a picture that could not be drawn; an older one is replaced."""
    check_target(option, path, may_exist=True)
    if path is not None and path.suffix.lower() not in _PICTURES:
        raise RunFolderError(f"{option}={str(path)!r} must end in one of {', '.join(_PICTURES)}; choose another name")


# --- a table of the user's own, alike in every command that takes one ---

TableFile = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="Your own table, .parquet or .csv, instead of DATASET. With a file for each party give it several times, "
        "as in --data bank=BANK.csv --data shop=SHOP.csv, and --id.",
        metavar="FILE | PARTY=FILE",
        rich_help_panel=DATA,
    ),
]
TableLabel = Annotated[str | None, typer.Option(help="The label column of --data.", rich_help_panel=DATA)]
TableColumns = Annotated[
    str | None,
    typer.Option(
        help='Who holds what in --data: "bank=a,b,c;hospital=d,e". With a file for each party: all but id and label.',
        rich_help_panel=DATA,
    ),
]
TableId = Annotated[
    str | None,
    typer.Option(
        "--id",
        help="The column of row ids: files are joined by it, ledgers know rows by it. Default: a row's number.",
        rich_help_panel=DATA,
    ),
]
TableLabelData = Annotated[
    Path | None,
    typer.Option(help="A file with id and label, if no party's file has the label.", rich_help_panel=DATA),
]
TableSchema = Annotated[
    Path | None,
    typer.Option(
        help="Public vocabularies and ranges of the columns of --data, JSON; `pbmvfl schema` writes a template.",
        rich_help_panel=DATA,
    ),
]
TableTestData = Annotated[
    list[str] | None,
    typer.Option(
        "--test-data",
        help="Test rows, given as --data is; else a part of it.",
        metavar="FILE | PARTY=FILE",
        rich_help_panel=DATA,
    ),
]
TestFraction = Annotated[
    float | None,
    typer.Option(help="That part, chosen by the public seed; 0 for none. Default: 0.2.", rich_help_panel=DATA),
]


def table_files(option: str, given: Sequence[str | Path] | None) -> str | dict[str, str] | None:
    """One file for all parties or a file for each, with whole paths: run folders may be resumed from elsewhere."""
    if not given:
        return None
    texts = [str(each) for each in given]
    if len(texts) == 1 and ("=" not in texts[0] or Path(texts[0]).is_file()):
        return str(Path(texts[0]).resolve())
    files: dict[str, str] = {}
    for text in texts:
        party, equals, file = text.partition("=")
        if not equals or not party.strip() or not file:
            raise DataError(
                f"{option}={text!r} is not of the form PARTY=FILE; give one file for all parties, or name the party of "
                f"each, as in {option} bank=bank.csv {option} shop=shop.csv"
            )
        if party.strip() in files:
            raise DataError(f"{option} names party={party.strip()!r} twice; a party has one file")
        files[party.strip()] = str(Path(file).resolve())
    return files
