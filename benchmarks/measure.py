"""Timing that survives a noisy machine: alternate, take the median of the ratios, compare with a limit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line of the table: a measured figure against its limit."""

    name: str
    measured: float
    limit: float
    unit: str
    at_most: bool = True
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit


def seconds_per_call(call: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started) / calls


def alternate(
    first: Callable[[], object], second: Callable[[], object], *, calls: int, blocks: int = 151
) -> tuple[float, float, float]:
    """Return the median of first/second over the blocks, and the median seconds of each.

    The order alternates too. Blocks are short and many: a shared machine changes its speed for seconds at a time, and
    then hits both alike.
    """
    first(), second()  # compile and warm up
    ratios, firsts, seconds = [], [], []
    for block in range(blocks):
        if block % 2:
            b, a = seconds_per_call(second, calls), seconds_per_call(first, calls)
        else:
            a, b = seconds_per_call(first, calls), seconds_per_call(second, calls)
        ratios.append(a / b)
        firsts.append(a)
        seconds.append(b)
    return statistics.median(ratios), statistics.median(firsts), statistics.median(seconds)
