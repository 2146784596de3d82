"""Line charts as geometry: numbers in, coordinates and labels out, drawn by one SVG template. Pure.

No script draws anything, so charts work without JavaScript and under a strict content policy.
Every chart is shown with a table of the same numbers under it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 720
HEIGHT: Final = 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 26
MAX_TICKS: Final = 6
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One line: a name for the legend, a tone (CSS class), and points with ascending x."""

    name: str
    tone: str
    points: tuple[Point, ...]
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal limit."""

    name: str
    tone: str
    y: float


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical mark."""

    name: str
    tone: str
    x: float


@dataclass(frozen=True, slots=True)
class Tick:
    """A grid line: position in the drawing and its label."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class DrawnLine:
    """A line in drawing coordinates; `path` is empty when there is a single point."""

    name: str
    tone: str
    path: str
    last: Point
    is_dashed: bool


@dataclass(frozen=True, slots=True)
class DrawnLimit:
    """A level or a mark in drawing coordinates."""

    name: str
    tone: str
    at: float
    label_x: float
    label_y: float
    anchor: str


@dataclass(frozen=True, slots=True)
class Chart:
    """All that the SVG template needs."""

    title: str
    summary: str
    lines: tuple[DrawnLine, ...]
    levels: tuple[DrawnLimit, ...]
    marks: tuple[DrawnLimit, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    x_title: str
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear scale from values to coordinates, with ticks at round values."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the coordinate of a value, kept inside the plot."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)


def line_chart(
    *,
    title: str,
    summary: str,
    lines: Sequence[Line],
    levels: Sequence[Level] = (),
    marks: Sequence[Mark] = (),
    x_title: str = "",
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    x_ticks: Sequence[tuple[float, str]] | None = None,
    y_ticks: Sequence[tuple[float, str]] | None = None,
) -> Chart | None:
    """Lay out a chart, or return None when no line has a point.

    Args:
        title: What is shown; the accessible name of the drawing.
        summary: One sentence that says what can be seen.
        lines: Lines; those without a finite point are left out.
        levels: Horizontal limits; they widen the y range unless it is given.
        marks: Vertical marks.
        x_title: What the x axis shows, with unit.
        x_range: Ends of the x axis; from the data when absent.
        y_range: Ends of the y axis; from the data when absent.
        x_ticks: (value, label) pairs; round values when absent.
        y_ticks: (value, label) pairs; round values when absent.
    """
    drawn = [
        (line, [p for p in line.points if math.isfinite(p[0]) and math.isfinite(p[1])])
        for line in lines
    ]
    drawn = [(line, points) for line, points in drawn if points]
    if not drawn:
        return None
    xs = [x for _, points in drawn for x, _ in points] + [mark.x for mark in marks]
    ys = [y for _, points in drawn for _, y in points] + [level.y for level in levels]
    x_axis = _axis(x_range or (min(xs), max(xs)), LEFT, WIDTH - RIGHT)
    y_axis = _axis(y_range or _padded(min(ys), max(ys)), HEIGHT - BOTTOM, TOP)
    return Chart(
        title=title,
        summary=summary,
        lines=tuple(_draw(line, points, x_axis, y_axis) for line, points in drawn),
        levels=tuple(_level(level, y_axis) for level in levels),
        marks=tuple(_mark(mark, x_axis) for mark in marks),
        x_ticks=_ticks(x_axis, x_ticks),
        y_ticks=_ticks(y_axis, y_ticks),
        x_title=x_title,
    )


def round_ticks(low: float, high: float, count: int = MAX_TICKS) -> tuple[float, ...]:
    """Return at most `count` + 1 values inside [low, high]: 1, 2 or 5 times a power of ten."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    for factor in (1, 2, 5, 10):
        if (high - low) / (factor * step) <= count:
            step *= factor
            break
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return tuple(index * step for index in range(first, last + 1))


def label_of(value: float) -> str:
    """Return a short label for a tick."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:,.0f}k"
    digits = max(0, 1 - math.floor(math.log10(abs(value)) + 1e-9))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _axis(ends: tuple[float, float], start: float, end: float) -> Axis:
    low, high = ends
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    return Axis(low, high, start, end)


def _padded(low: float, high: float) -> tuple[float, float]:
    pad = (high - low) * 0.06 or 0.5
    return low - pad, high + pad


def _ticks(axis: Axis, given: Sequence[tuple[float, str]] | None) -> tuple[Tick, ...]:
    if given is None:
        given = [(value, label_of(value)) for value in round_ticks(axis.low, axis.high)]
    return tuple(
        Tick(axis.at(value), label) for value, label in given if axis.low <= value <= axis.high
    )


def _draw(line: Line, points: Sequence[Point], x_axis: Axis, y_axis: Axis) -> DrawnLine:
    placed = [(x_axis.at(x), y_axis.at(y)) for x, y in points]
    path = " ".join(f"{x:g},{y:g}" for x, y in placed) if len(placed) > 1 else ""
    return DrawnLine(line.name, line.tone, path, placed[-1], line.is_dashed)


def _level(level: Level, axis: Axis) -> DrawnLimit:
    at = axis.at(level.y)
    return DrawnLimit(
        level.name, level.tone, at, LEFT + 6, at - 5 if at > TOP + 14 else at + 13, "start"
    )


def _mark(mark: Mark, axis: Axis) -> DrawnLimit:
    at = axis.at(mark.x)
    is_right = at > (LEFT + WIDTH - RIGHT) / 2
    return DrawnLimit(
        mark.name,
        mark.tone,
        at,
        at - 5 if is_right else at + 5,
        TOP + 11,
        "end" if is_right else "start",
    )
