"""The benchmark of large tables: it trains what it says, and sees what grows faster than the rows."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.large_tables import faults, measure

SIZES = (65_000, 130_000, 260_000, 521_000)


def lines(power: float, *, fixed: float = 5.0, megabytes: float = 700.0) -> list[dict[str, Any]]:
    return [
        {
            "rows": rows,
            "ledgers": ledgers,
            "processor_seconds": fixed + 20 * (rows / SIZES[-1]) ** power,
            "peak_megabytes": megabytes * rows / SIZES[-1] + 300,
        }
        for ledgers in (False, True)
        for rows in SIZES
    ]


@pytest.mark.parametrize("power", [0.8, 1.0, 1.1])
def test_time_that_grows_with_the_rows_passes(power):
    assert faults(lines(power)) == []


def test_time_that_grows_faster_and_too_much_memory_are_seen():
    assert any("processor_seconds" in each for each in faults(lines(2.0, fixed=0.0)))
    assert faults(lines(1.0, megabytes=1300)) == [
        "without ledgers: 1,600 MB at 521,000 rows",
        "with ledgers: 1,600 MB at 521,000 rows",
    ]


@pytest.mark.slow
def test_a_small_table_is_trained_and_measured():
    found = measure(500, ledgers=True)
    assert (found["rows"], found["ledgers"]) == (500, True)
    assert found["processor_seconds"] > 0
    assert found["peak_megabytes"] > 50
    assert 0 <= found["test_accuracy"] <= 1
