"""Means and spreads over seeds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.utility.records import Records


@dataclass(frozen=True)
class Summary:
    """One measure of one method at one epsilon."""

    mean: float
    deviation: float
    seeds: int

    def __str__(self) -> str:
        return f"{_short(self.mean)} ± {_short(self.deviation)}"


def summary(records: Records, dataset: str, method: str, epsilon: float | None, measure: str) -> Summary | None:
    """None if there is no result yet, or none of this measure."""
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
