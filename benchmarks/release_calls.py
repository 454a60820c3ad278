"""Count the ledgers, connections, digests and calls of one charged prediction of 100 rows by two parties.

python -m benchmarks.release_calls
"""

from __future__ import annotations

import contextlib
import cProfile
import json
import pstats
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from pbmvfl import Federation, Ledger, Limit, Plan
from pbmvfl.data.new_rows import NewRows
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.ledger import row_identity

ROWS, REPEATS = 100, 7
PARTIES = ("bank", "shop")


def people() -> VerticalDataset:
    draw = np.random.default_rng(7)
    columns = tuple(draw.uniform(-1, 1, (300, 4)).astype(np.float32) for _ in PARTIES)
    return VerticalDataset(
        name="people",
        party_names=PARTIES,
        train_features=columns,
        train_labels=(columns[0][:, 0] > 0).astype(np.int64),
        test_features=tuple(part[:0] for part in columns),
        test_labels=np.zeros(0, dtype=np.int64),
        class_names=("no", "yes"),
        train_ids=tuple(f"p{row}" for row in range(300)),
        test_ids=(),
        default_encoder="linear",
    )


def rows_to_predict(number: int) -> NewRows:
    draw = np.random.default_rng(100 + number)
    return NewRows(
        name="people",
        party_names=PARTIES,
        features=tuple(draw.uniform(-1, 1, (ROWS, 4)).astype(np.float32) for _ in PARTIES),
        ids=tuple(f"n{number}-{row}" for row in range(ROWS)),
        rows_are_named=True,
    )


@contextlib.contextmanager
def counted(found: Counter[str], name: str, owner: Any, attribute: str) -> Iterator[None]:
    """Count the calls of a function, wherever it was imported from `owner`."""
    original = getattr(owner, attribute)

    def call(*values: Any, **named: Any) -> Any:
        found[name] += 1
        return original(*values, **named)

    with mock.patch.object(owner, attribute, call):
        yield


def main() -> None:
    """Print the counts of one release as JSON."""
    limit = Limit.choose(unit="cell", accounting="strict", epsilon=10_000.0, delta=1e-5)
    data = people()
    with tempfile.TemporaryDirectory() as folder:
        ledgers = Path(folder) / "ledgers"
        for party in PARTIES:
            with contextlib.closing(Ledger(ledgers / f"{party}.sqlite")) as ledger:
                ledger.set_limit("people", limit)
        plan = Plan.for_budget(epsilon=8, delta=1e-5, data=data, evaluation="none")
        model = Federation(plan).fit(data, ledger=ledgers).model
        assert model is not None
        model.release(rows_to_predict(0))  # loads whatever is loaded once
        found: Counter[str] = Counter()
        with (
            counted(found, "ledgers", Ledger, "__init__"),
            counted(found, "connections", sqlite3, "connect"),
            counted(found, "digests of rows", row_identity, "_digest"),
            counted(found, "digests of rows", row_identity, "_digests_of"),
        ):
            model.release(rows_to_predict(1))
        profile = cProfile.Profile()
        profile.runcall(model.release, rows_to_predict(2))
        seconds = []
        for number in range(REPEATS):
            rows = rows_to_predict(3 + number)
            started = time.perf_counter()
            model.release(rows)
            seconds.append(time.perf_counter() - started)
    calls = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    print(json.dumps({**found, "calls": calls, "seconds": round(float(np.median(seconds)), 4)}))


if __name__ == "__main__":
    main()
