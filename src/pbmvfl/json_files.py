"""Reading back JSON that was written before: a file that is not what was written is refused by name, never guessed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from pbmvfl.errors import PbmvflError

#: Names that an object must have, and the kind of each value.
Kinds = Mapping[str, type | UnionType]


def read_json(path: Path, error: type[PbmvflError]) -> Any:
    """The file's value, or `error` with the file's name."""
    try:
        return json.loads(path.read_bytes().decode())
    except (OSError, ValueError, RecursionError) as reason:  # bytes that are no text and text that is no JSON too
        raise error(f"{path} cannot be read: {reason}; restore the file from a copy, or make it anew") from reason


def read_object(path: Path, kinds: Kinds, error: type[PbmvflError]) -> dict[str, Any]:
    """The file's object, with at least these names."""
    return checked_object(read_json(path, error), kinds, path, error)


def checked_object(value: object, kinds: Kinds, path: Path, error: type[PbmvflError]) -> dict[str, Any]:
    """`value`, which `path` holds, as an object with at least these names."""
    if not isinstance(value, dict):
        raise _damaged(path, f"it has {str(value)[:40]!r} where an object must be", error)
    for name, kind in kinds.items():
        if name not in value:
            raise _damaged(path, f"it lacks {name!r}", error)
        found = value[name]
        # To Python True is an int; to a count it is damage.
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise _damaged(path, f"{name}={str(found)[:40]!r} must be {_spelled(kind)}", error)
    return value


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The object with a digest of all that it says."""
    return {**values, "sha256": _seal(values)}


def check_seal(value: Mapping[str, Any], path: Path, error: type[PbmvflError]) -> None:
    """Refuse an object that is not what `sealed` made."""
    if value.get("sha256") != _seal(value):
        raise error(f"{path} is damaged: it is not what was written there; restore it from a copy, or make it anew")


def _seal(values: Mapping[str, Any]) -> str:
    said = {name: value for name, value in values.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _damaged(path: Path, what: str, error: type[PbmvflError]) -> PbmvflError:
    return error(f"{path} is damaged: {what}; restore the file from a copy, or make it anew")


def _spelled(kind: type | UnionType) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
