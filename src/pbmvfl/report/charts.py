"""Geometry of charts; `templates/charts.html` draws them as inline SVG.

Every mark carries its numbers, for the reader's pointer and for the tests, which compare its position with the axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 440, 250
_RIGHT, _TOP, _BOTTOM = 16, 12, 40
#: Space left of an axis: for its title, and for each character of its longest number.
_TITLE_ROOM, _CHARACTER = 32, 7.5
#: More marks than this would hide a line: then only some are drawn, and the line still has all points.
_MOST_MARKS = 60
#: Space beside the axis for infinite values.
_OUTSIDE = 34

Point = tuple[float, float]


def plain(value: float) -> str:
    """Format a number for an axis."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


class Axis:
    """Linear or logarithmic map from values to coordinates, with round ticks; a tight axis ends at the last value."""

    def __init__(
        self,
        low: float,
        high: float,
        start: float,
        end: float,
        *,
        log: bool = False,
        whole: bool = False,
        tight: bool = False,
    ) -> None:
        self.log = log
        if log:
            low, high = 10 ** math.floor(math.log10(low) + 1e-9), 10 ** math.ceil(math.log10(high) - 1e-9)
            self.low, self.high = low, high if high > low else 10 * low
            decades = round(math.log10(self.high / self.low))
            every = max(1, -(-decades // 6))
            self.ticks = [self.low * 10**i for i in range(0, decades + 1, every)]
            if decades == 1:
                self.ticks = sorted({*self.ticks, *(m * self.low * 10**i for i in range(decades) for m in (2, 5))})
        else:
            step = _round_step((high - low) / 4 or 1.0, whole=whole)
            self.low, self.high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
            if self.high <= self.low:
                self.high = self.low + step
            self.ticks = [self.low + i * step for i in range(round((self.high - self.low) / step) + 1)]
            digits = max(0, 1 - math.floor(math.log10(step)))
            self.ticks = [round(tick, digits) for tick in self.ticks]
            if tight and high > self.low:
                self.high, self.ticks = high, [tick for tick in self.ticks if tick <= high]
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 3)

    def anchor(self, tick: float, text: str) -> str:
        """Return the class of a tick's number: long ones at the ends of an axis stay within it."""
        if len(text) <= 2:
            return ""
        return "first" if self(tick) - self.start < 10 else "last" if self.end - self(tick) < 10 else ""


def _round_step(size: float, *, whole: bool) -> float:
    """Return 1, 2 or 5 times a power of ten, at least `size`."""
    power: float = 10.0 ** math.floor(math.log10(size))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= size * (1 - 1e-9))
    return max(1.0, step) if whole else step


# --- Lines and points between two axes ---


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    colour: int
    dashed: bool = False
    #: Draw steps at the value of the later point, so that the line is an upper bound between computed points.
    steps: bool = False
    last: str = ""


@dataclass(frozen=True, kw_only=True)
class Level:
    """Named horizontal line, such as a limit or a reference rate."""

    name: str
    value: float
    shown: str


@dataclass(frozen=True, kw_only=True)
class Dot:
    """Point for a run in a comparison, labelled by its number in the table."""

    number: int
    name: str
    x: float
    y: float
    hollow: bool = False


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Lines, levels and numbered points between two axes."""

    title: str
    x: Axis
    y: Axis
    x_title: str
    y_title: str
    series: Sequence[Series] = ()
    levels: Sequence[Level] = ()
    dots: Sequence[Dot] = ()
    label: Callable[[float], str] = plain

    def points(self, series: Series) -> list[Point]:
        """Return the points that can be drawn."""
        return [(a, b) for a, b in series.points if math.isfinite(b)]

    def marks(self, series: Series) -> list[Point]:
        points = self.points(series)
        return points[::-1][:: -(-len(points) // _MOST_MARKS) or 1][::-1]

    def path(self, series: Series) -> str:
        """Return the line as SVG's path."""
        drawn = [(self.x(a), self.y(b)) for a, b in self.points(series)]
        middle = (f"V{b}H{a}" if series.steps else f"L{a} {b}" for a, b in drawn[1:])
        return "".join((f"M{drawn[0][0]} {drawn[0][1]}", *middle)) if drawn else ""

    @property
    def outside(self) -> float | None:
        """Place of infinite values, right of the axis; None if there are none."""
        return WIDTH - _RIGHT - 8 if any(not math.isfinite(dot.x) for dot in self.dots) else None


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_title: str,
    y_title: str,
    levels: Sequence[Level] = (),
    from_zero: bool = False,
    at_most: float | None = None,
    shares: bool = False,
    log: bool = False,
) -> Plot:
    """Return lines over counts, with `log` on a logarithmic axis; or of one share over another, both from 0 to 1."""
    everything = [y for each in series for _, y in each.points] + [level.value for level in levels]
    finite = [y for y in everything if math.isfinite(y)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    # Values that differ by rounding alone, such as two scores of nearly 1, are one value: no axis fits them.
    spread = high - low if high - low > 1e-9 * max(abs(low), abs(high)) else 0.0
    room = 0.04 * spread or 0.05 * abs(high) or 1.0
    low, high = (0.0 if from_zero else low - room), high + room
    high = high if at_most is None else min(high, at_most)
    last = max(x for each in series for x, _ in each.points)
    y = Axis(0, 1, HEIGHT - _BOTTOM, _TOP) if shares else Axis(low, high, HEIGHT - _BOTTOM, _TOP)
    x = Axis(int(log), 1 if shares else last, _left(y), WIDTH - _RIGHT, log=log, whole=not shares, tight=True)
    return Plot(title=title, x=x, y=y, x_title=x_title, y_title=y_title, series=series, levels=levels)


def scatter(
    title: str, dots: Sequence[Dot], *, x_title: str, y_title: str, label: Callable[[float], str] = plain
) -> Plot:
    """Return numbered points over a logarithmic axis, with infinite values to its right."""
    finite = [dot.x for dot in dots if math.isfinite(dot.x)]
    heights = [dot.y for dot in dots]
    room = 0.08 * (max(heights) - min(heights)) or 0.02
    y = Axis(min(heights) - room, min(1.0, max(heights) + room), HEIGHT - _BOTTOM, _TOP)
    end = WIDTH - _RIGHT - (_OUTSIDE if len(finite) < len(dots) else 0)
    x = Axis(min(finite, default=1.0), max(finite, default=10.0), _left(y), end, log=True)
    return Plot(title=title, x=x, y=y, x_title=x_title, y_title=y_title, dots=dots, label=label)


def _left(y: Axis) -> float:
    """Return the start of the x axis that leaves space for the numbers of the y axis."""
    return _TITLE_ROOM + _CHARACTER * max(len(plain(tick)) for tick in y.ticks)


# --- Marks on one axis, a line for each thing that is compared ---


@dataclass(frozen=True, kw_only=True)
class RulerRow:
    """Marks (series, value, colour) of one thing, with a second line of text and a bound if it has them."""

    name: str
    shown: str
    marks: Sequence[tuple[str, float, int]]
    more: str = ""
    bound: float | None = None


@dataclass(frozen=True, kw_only=True)
class Ruler:
    """Rows of marks on one axis."""

    title: str
    rows: Sequence[RulerRow]
    x: Axis
    x_title: str
    label: Callable[[float], str] = plain
    #: (class, name) of marks that need a name.
    legend: Sequence[tuple[str, str]] = ()

    top = 6

    @property
    def each(self) -> int:
        return 52 if any(row.more for row in self.rows) else 38

    @property
    def bottom(self) -> int:
        return self.top + self.each * len(self.rows)

    @property
    def height(self) -> int:
        return self.bottom + _BOTTOM


def ruler(
    title: str,
    rows: Sequence[RulerRow],
    *,
    x_title: str,
    label: Callable[[float], str] = plain,
    legend: Sequence[tuple[str, str]] = (),
    ends: tuple[float, float] | None = None,
) -> Ruler:
    """Return rows of marks on a logarithmic axis, or on a linear one between two ends."""
    start, end = 12, WIDTH - _RIGHT - 4
    if ends is None:
        values = [value for row in rows for _, value, _ in row.marks if value > 0]
        x = Axis(min(values, default=1), max(values, default=1), start, end, log=True)
    else:
        x = Axis(*ends, start, end)
    return Ruler(title=title, rows=rows, x=x, x_title=x_title, label=label, legend=legend)
