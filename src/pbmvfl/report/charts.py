"""Charts as inline SVG: no script, no network, readable at the width of a phone and on paper.

Colours come from `page.css`, so that they follow the page's theme. Every mark carries its numbers, for the reader's
pointer and for the tests, which compare its position with the axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pbmvfl.report.markup import Markup, el, joined

WIDTH, HEIGHT = 440, 250
_RIGHT, _TOP, _BOTTOM = 16, 12, 40
#: Space left of an axis: for its title, and for each character of its longest number.
_TITLE_ROOM, _CHARACTER = 32, 6.9
#: More marks than this would hide a line: then only some are drawn, and the line still has all points.
_MOST_MARKS = 60
#: Space beside the axis for infinite values.
_OUTSIDE = 34
_COLOURS = 6

Point = tuple[float, float]


def plain(value: float) -> str:
    """Format a number for an axis."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


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


def _round_step(size: float, *, whole: bool) -> float:
    """Return 1, 2 or 5 times a power of ten, at least `size`."""
    power: float = 10.0 ** math.floor(math.log10(size))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= size * (1 - 1e-9))
    return max(1.0, step) if whole else step


# --- Lines ---


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_title: str,
    y_title: str,
    levels: Sequence[Level] = (),
    from_zero: bool = False,
    at_most: float | None = None,
    log: bool = False,
) -> Markup:
    """Draw lines over rounds or epochs, with their last values in the legend."""
    everything = [y for each in series for _, y in each.points] + [level.value for level in levels]
    finite = [y for y in everything if math.isfinite(y) and (y > 0 or not log)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if not log:
        # Values that differ by rounding alone, such as two scores of nearly 1, are one value: no axis fits them.
        spread = high - low if high - low > 1e-9 * max(abs(low), abs(high)) else 0.0
        room = 0.04 * spread or 0.05 * abs(high) or 1.0
        low, high = (0.0 if from_zero else low - room), high + room
        if at_most is not None:
            high = min(high, at_most)
    across = [x for each in series for x, _ in each.points]
    y = Axis(low, high, HEIGHT - _BOTTOM, _TOP, log=log)
    x = Axis(0, max(across), _left(y), WIDTH - _RIGHT, whole=True, tight=True)
    drawn = joined(
        _frame(x, y, x_title, y_title),
        *(_level(level, x, y) for level in levels),
        *(_line(each, x, y) for each in series),
    )
    return _figure(title, drawn, _legend(series, levels))


def _left(y: Axis) -> float:
    """Return the start of the x axis that leaves space for the numbers of the y axis."""
    return _TITLE_ROOM + _CHARACTER * max(len(plain(tick)) for tick in y.ticks)


def _line(series: Series, x: Axis, y: Axis) -> Markup:
    points = [(a, b) for a, b in series.points if math.isfinite(b) and (b > 0 or not y.log)]
    if not points:
        return joined()
    colour = f"c{series.colour % _COLOURS}"
    path = [f"M{x(points[0][0])} {y(points[0][1])}"]
    for a, b in points[1:]:
        path.append(f"V{y(b)}H{x(a)}" if series.steps else f"L{x(a)} {y(b)}")
    every = -(-len(points) // _MOST_MARKS)
    marks = [
        el(
            "circle",
            el("title", f"{series.name}: {plain(a)}, {b:.6g}"),
            class_=f"mark {colour}",
            cx=x(a),
            cy=y(b),
            r=2.2,
            data_series=series.name,
            data_x=a,
            data_y=b,
        )
        for i, (a, b) in enumerate(points)
        if (len(points) - 1 - i) % every == 0
    ]
    return joined(el("path", class_=f"line {colour}" + (" dashed" if series.dashed else ""), d="".join(path)), *marks)


def _level(level: Level, x: Axis, y: Axis) -> Markup:
    place = y(level.value)
    return el("line", class_="level", x1=x.start, x2=x.end, y1=place, y2=place, data_level=level.name)


def _legend(series: Sequence[Series], levels: Sequence[Level] = ()) -> Markup:
    entries = [
        (f"line c{each.colour % _COLOURS}" + (" dashed" if each.dashed else ""), each.name, each.last)
        for each in series
    ] + [("level", level.name, level.shown) for level in levels]
    return el(
        "ul",
        *(
            el(
                "li",
                el("svg", el("line", class_=kind, x1=1, x2=21, y1=5, y2=5), viewBox="0 0 22 10", aria_hidden="true"),
                f"{name} ",
                el("b", last) if last else None,
            )
            for kind, name, last in entries
        ),
        class_="legend",
    )


# --- Frames ---


def _frame(x: Axis, y: Axis, x_title: str, y_title: str, *, label: Callable[[float], str] = plain) -> Markup:
    """Draw the grid, the ticks with their numbers, and the titles of the axes."""
    bottom, top = HEIGHT - _BOTTOM, _TOP
    parts = []
    for tick in y.ticks:
        parts.append(el("line", class_="grid", x1=x.start, x2=x.end, y1=y(tick), y2=y(tick)))
        parts.append(el("text", plain(tick), class_="tick y", x=x.start - 7, y=y(tick) + 4, data_at=y(tick)))
    for tick in x.ticks:
        parts.append(el("line", class_="grid faint", x1=x(tick), x2=x(tick), y1=top, y2=bottom))
        parts.append(_x_tick(x, tick, bottom, label))
    parts.append(el("text", x_title, class_="title x", x=(x.start + x.end) / 2, y=HEIGHT - 6))
    parts.append(el("text", y_title, class_="title y", transform=f"translate(12 {(top + bottom) / 2}) rotate(-90)"))
    return joined(*parts)


def _x_tick(x: Axis, tick: float, bottom: float, label: Callable[[float], str]) -> Markup:
    """Draw the number of a tick; numbers at the ends of an axis stay within it."""
    text = label(tick)
    edge = ""
    if len(text) > 2:
        edge = " first" if x(tick) - x.start < 10 else " last" if x.end - x(tick) < 10 else ""
    return el("text", text, class_=f"tick x{edge}", x=x(tick), y=bottom + 16, data_at=x(tick))


def _figure(title: str, drawn: Markup, legend: Markup | None = None, *, height: float = HEIGHT) -> Markup:
    chart = el("svg", drawn, viewBox=f"0 0 {WIDTH} {height:g}", role="img", aria_label=title)
    return el("figure", el("figcaption", title), legend, chart, class_="chart")


# --- Points for runs ---


@dataclass(frozen=True, kw_only=True)
class Dot:
    """Point for a run in a comparison, labelled by its number in the table."""

    number: int
    name: str
    x: float
    y: float
    hollow: bool = False


def scatter(
    title: str, dots: Sequence[Dot], *, x_title: str, y_title: str, label: Callable[[float], str] = plain
) -> Markup:
    """Draw numbered points over a logarithmic axis, with infinite values to its right."""
    finite = [dot.x for dot in dots if math.isfinite(dot.x)]
    outside = len(finite) < len(dots)
    end = WIDTH - _RIGHT - (_OUTSIDE if outside else 0)
    heights = [dot.y for dot in dots]
    room = 0.08 * (max(heights) - min(heights)) or 0.02
    y = Axis(min(heights) - room, min(1.0, max(heights) + room), HEIGHT - _BOTTOM, _TOP)
    x = Axis(min(finite, default=1.0), max(finite, default=10.0), _left(y), end, log=True)
    parts = [_frame(x, y, x_title, y_title, label=label)]
    if outside:
        parts.append(el("text", "∞", class_="tick x", x=WIDTH - _RIGHT - 8, y=HEIGHT - _BOTTOM + 16))
    for dot in dots:
        place = x(dot.x) if math.isfinite(dot.x) else WIDTH - _RIGHT - 8
        parts.append(
            el(
                "g",
                el("title", f"{dot.number}: {dot.name}"),
                el("circle", cx=place, cy=y(dot.y), r=9),
                el("text", str(dot.number), x=place, y=y(dot.y) + 3.6),
                class_=f"dot c{(dot.number - 1) % _COLOURS}" + (" hollow" if dot.hollow else ""),
                data_run=dot.name,
                data_x=dot.x if math.isfinite(dot.x) else "inf",
                data_y=dot.y,
            )
        )
    return _figure(title, joined(*parts))


# --- Bars ---


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Horizontal bar of several pieces."""

    name: str
    pieces: Sequence[tuple[str, float]]
    total: str


def bar_chart(title: str, bars: Sequence[Bar], *, x_title: str, label: Callable[[float], str]) -> Markup:
    """Draw stacked bars from zero; pieces with the same name have the same colour."""
    names = list(dict.fromkeys(name for bar in bars for name, _ in bar.pieces))
    each, top = 46, 6
    height = top + each * len(bars) + _BOTTOM
    x = Axis(0, max(sum(size for _, size in bar.pieces) for bar in bars) or 1, 8, WIDTH - _RIGHT)
    bottom = height - _BOTTOM
    parts = []
    for tick in x.ticks:
        parts.append(el("line", class_="grid faint", x1=x(tick), x2=x(tick), y1=top, y2=bottom))
        parts.append(_x_tick(x, tick, bottom, label))
    for i, bar in enumerate(bars):
        y = top + i * each
        parts.append(el("text", f"{bar.name}: ", el("tspan", bar.total, class_="strong"), class_="name", x=8, y=y + 14))
        done = 0.0
        for name, size in bar.pieces:
            left, done = x(done), done + size
            parts.append(
                el(
                    "rect",
                    el("title", f"{bar.name}, {name}: {label(size)}"),
                    class_=f"bar c{names.index(name) % _COLOURS}",
                    x=left,
                    y=y + 20,
                    width=round(x(done) - left, 3),
                    height=18,
                    data_bar=bar.name,
                    data_piece=name,
                    data_value=size,
                )
            )
    parts.append(el("text", x_title, class_="title x", x=WIDTH / 2, y=height - 6))
    legend = el(
        "ul",
        *(
            el("li", el("svg", el("rect", class_=f"bar c{i}", width=12, height=10), viewBox="0 0 12 10"), name)
            for i, name in enumerate(names)
        ),
        class_="legend",
    )
    return _figure(title, joined(*parts), legend, height=height)


def share_chart(title: str, shares: Sequence[tuple[str, float]], *, x_title: str) -> Markup:
    """Draw one mark per row on a logarithmic axis, with a reference line at 1."""
    finite = [share for _, share in shares if share > 0]
    x = Axis(min(*finite, 0.1), max(*finite, 1.0), 12, WIDTH - _RIGHT - 4, log=True)
    each, top = 38, 6
    height = top + each * len(shares) + _BOTTOM
    bottom = height - _BOTTOM
    parts = []
    for tick in x.ticks:
        parts.append(el("line", class_="grid faint", x1=x(tick), x2=x(tick), y1=top, y2=bottom))
        parts.append(_x_tick(x, tick, bottom, plain))
    parts.append(el("line", class_="level", x1=x(1), x2=x(1), y1=top, y2=bottom))
    for i, (name, share) in enumerate(shares):
        y = top + i * each
        parts.append(
            el("text", f"{name}: ", el("tspan", f"{share:.3g}", class_="strong"), class_="name", x=12, y=y + 14)
        )
        if share > 0:
            parts.append(el("line", class_="stem", x1=x.start, x2=x(share), y1=y + 25, y2=y + 25))
            mark = el("circle", cx=x(share), cy=y + 25, r=5, class_="mark c1", data_series=name, data_x=share)
            parts.append(mark)
    parts.append(el("text", x_title, class_="title x", x=WIDTH / 2, y=height - 6))
    return _figure(title, joined(*parts), height=height)
