"""Results as lines of JSON, one for every data set, method, epsilon and seed: a run continues where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
        """Return a result, or without a seed the choice made on hold-outs."""
        return self._lines.get((dataset, method, epsilon, seed))

    def add(self, record: dict[str, Any]) -> None:
        """Add a record, on disk first."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._lines[_key(record)] = record

    def results(self) -> Iterator[dict[str, Any]]:
        """Return all results, without choices."""
        return (record for record in self._lines.values() if record["seed"] is not None)


def _key(record: dict[str, Any]) -> Key:
    return record["dataset"], record["method"], record["epsilon"], record["seed"]


# --- means and spreads over seeds ---


@dataclass(frozen=True)
class Summary:
    """One measure of one method at one epsilon."""

    mean: float
    deviation: float
    seeds: int

    def __str__(self) -> str:
        return f"{_short(self.mean)} ± {_short(self.deviation)}"


def summary(records: Records, dataset: str, method: str, epsilon: float | None, measure: str) -> Summary | None:
    """Summarise one measure; None if there is no result yet, or none of this measure."""
    found = [
        record[measure]
        for record in records.results()
        if (record["dataset"], record["method"], record["epsilon"]) == (dataset, method, epsilon) and measure in record
    ]
    if not found:
        return None
    return Summary(float(np.mean(found)), float(np.std(found, ddof=1)) if len(found) > 1 else 0.0, len(found))


def _short(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")
