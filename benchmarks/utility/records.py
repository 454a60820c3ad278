"""Results as lines of JSON, one for every data set, method, epsilon and seed: a run continues where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Key = tuple[str, str, float | None, int | None]


class Records:
    """Choices and results on disk, in the order in which they were made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[Key, dict[str, Any]] = {}
        if path.exists():
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                try:
                    record = json.loads(line)
                    self._lines[_key(record)] = record
                except (ValueError, KeyError, TypeError) as error:
                    raise SystemExit(f"{path}:{number} is no result ({error}); delete that line") from error

    def find(self, dataset: str, method: str, epsilon: float | None, seed: int | None) -> dict[str, Any] | None:
        """A result, or with no seed what was chosen on hold-outs."""
        return self._lines.get((dataset, method, epsilon, seed))

    def add(self, record: dict[str, Any]) -> None:
        """Keep a record, on disk first."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._lines[_key(record)] = record

    def results(self) -> Iterator[dict[str, Any]]:
        """All results, without choices."""
        return (record for record in self._lines.values() if record["seed"] is not None)


def _key(record: dict[str, Any]) -> Key:
    return record["dataset"], record["method"], record["epsilon"], record["seed"]
