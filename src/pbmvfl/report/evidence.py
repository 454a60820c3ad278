"""Results that `pbmvfl attack` and `pbmvfl audit` left in a run folder, as far as a page shows them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pbmvfl._files import Kinds, checked_object, read_object
from pbmvfl.errors import RunFolderError

#: Files of the results, in a run folder or in the folder of --out.
ATTACK_FILE, AUDIT_FILE = "attack.json", "audit.json"
#: Picture of rows as attacks show them, beside the results.
GRID = "attack-grid.png"
_NUMBER = int | float


@dataclass(frozen=True, kw_only=True)
class ShownScore:
    """One score of an attack."""

    attack: str
    attacker: str
    setting: str
    measure: str
    value: float
    baseline: float
    bound: float | None
    bound_words: str
    is_alarm: bool


@dataclass(frozen=True, kw_only=True)
class ShownAttack:
    """Scores of all attacks, and for pictures how often a row is found: numbers alone, no row."""

    scores: tuple[ShownScore, ...] = ()
    #: (releases, share found) points by setting, among so many candidates.
    found: Mapping[str, list[tuple[float, float]]] = field(default_factory=dict)
    candidates: int = 1


@dataclass(frozen=True, kw_only=True)
class ShownAudit:
    """Verdict of an audit."""

    sound: bool
    tests: int
    false_alarm_rate: float
    alarms: list[str]


def read_attack(folder: Path) -> ShownAttack:
    """Return an attack's results; none if the folder has no such file.

    Raises:
        RunFolderError: The file is damaged.
    """
    path = folder / ATTACK_FILE
    if not path.is_file():
        return ShownAttack()
    written = read_object(path, {"scores": list}, RunFolderError)
    kinds = dict.fromkeys(("attack", "attacker", "setting", "measure", "bound_words"), str)
    types = {**kinds, "value": _NUMBER, "baseline": _NUMBER, "bound": _NUMBER | None, "is_alarm": bool}
    scores = [checked_object(score, types, path, RunFolderError) for score in written["scores"]]
    found: dict[str, Any] = {}
    if "found" in written:
        checked_object(written, {"found": dict, "candidates": int}, path, RunFolderError)
        for name, points in checked_object(written["found"], {}, path, RunFolderError).items():
            found[name] = [(float(x), float(y)) for x, y in points]
    return ShownAttack(
        scores=tuple(ShownScore(**{each.name: score[each.name] for each in fields(ShownScore)}) for score in scores),
        found=found,
        candidates=written.get("candidates", 1),
    )


def read_audit(folder: Path) -> ShownAudit | None:
    """Return an audit's verdict, or None if the folder has none.

    Raises:
        RunFolderError: The file is damaged.
    """
    path = folder / AUDIT_FILE
    if not path.is_file():
        return None
    types: Kinds = {"sound": bool, "tests": int, "false_alarm_rate": _NUMBER, "alarms": list}
    written = read_object(path, types, RunFolderError)
    return ShownAudit(**{name: written[name] for name in types})


def read_picture(path: Path) -> str | None:
    """Return a PNG file as a data URI, or None if there is none."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" if path.is_file() else None
