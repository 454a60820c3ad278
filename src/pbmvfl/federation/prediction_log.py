"""Log of the predictions of a run's trained model: one line each, for people.

The count that holds is the ledgers'. This file says what was predicted, at which epsilon, and how right it was where
labels were known; it has no row in it and no file's name.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pbmvfl._files import Kinds, checked_object, make_private
from pbmvfl.errors import RunFolderError

FILE = "released.jsonl"
_KINDS: Kinds = {"rows": int, "predicted": int, "exact": bool, "law": str}
_NUMBERS = ("epsilon", "advantage", "delta", "accuracy", "auprc", "majority_rate")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request: predictions of some rows."""

    rows: int
    #: Rows that have a prediction; a limit may have kept others back.
    predicted: int
    #: Exact sums of a simulator: nothing was released, and no epsilon holds.
    exact: bool
    #: By which law a row was released.
    law: str
    #: Of one row's cell, strict, against the server; None for exact sums.
    epsilon: float | None = None
    advantage: float | None = None
    delta: float | None = None
    #: Where labels were known.
    accuracy: float | None = None
    auprc: float | None = None
    majority_rate: float | None = None

    def note(self, folder: Path) -> None:
        """Add a line to a run's folder."""
        path = folder / FILE
        make_private(path)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self)) + "\n")


def read_asked(folder: Path) -> tuple[Asked, ...]:
    """Return all requests, the first one first."""
    path = folder / FILE
    if not path.is_file():
        return ()
    return tuple(_read_line(line, path) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


def _read_line(line: str, path: Path) -> Asked:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged: a line is no JSON ({error}); restore it from a copy") from error
    values = checked_object(value, {**_KINDS, **dict.fromkeys(_NUMBERS, int | float | None)}, path, RunFolderError)
    return Asked(**{each.name: values[each.name] for each in fields(Asked)})
