"""The account: the largest table of the paper, and a bound from a standing start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from benchmarks.measure import Row, seconds_per_call
from pbmvfl.privacy.renyi import cell_rdp

_BOUND_OF_A_RECORD = """
import time; start = time.perf_counter()
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import epsilon_bound
from pbmvfl.privacy.units import Accounting, Unit
plan = Plan.of(num_parties=50, num_samples=1000, num_classes=2, num_trials=16, beta=0.1, embedding_dim=1, num_epochs=1)
epsilon_bound(plan.training_run(), Unit.RECORD, Accounting.STRICT, delta=1e-5)
print(time.perf_counter() - start)
"""


def account() -> Iterator[Row]:
    """Time accounts without caches, once with the imports that a user waits for."""
    largest = min(seconds_per_call(lambda: cell_rdp.__wrapped__(128, 6553, 10), 1) for _ in range(3))
    yield Row("account, Renyi curve of a cell, M=10, b=128", largest, 5, "s")
    fresh = min(
        float(
            subprocess.run(
                [sys.executable, "-c", _BOUND_OF_A_RECORD], check=True, capture_output=True, text=True
            ).stdout
        )
        for _ in range(3)
    )
    yield Row("account, bound of a record in a fresh interpreter, M=50, b=16", fresh, 1, "s")
