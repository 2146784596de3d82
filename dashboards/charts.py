"""Line charts as geometry: numbers in, coordinates and labels out, drawn by one SVG template. Pure.

No script draws anything, so charts work without JavaScript and under a strict content policy.
Every chart is shown with a table of the same numbers under it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MAX_TICKS: Final = 6
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Frame:
    """Size of a drawing, the edges of its plot, and how many labels fit below it."""

    name: str
    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    x_labels: int


# One for wide screens and one for narrow ones; the style sheet shows one of the two.
WIDE: Final = Frame("wide", 720, 220, left=70, right=708, top=10, bottom=194, x_labels=12)
COMPACT: Final = Frame("compact", 340, 220, left=64, right=332, top=10, bottom=194, x_labels=4)


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
class Drawing:
    """A chart laid out for one width."""

    frame: Frame
    lines: tuple[DrawnLine, ...]
    levels: tuple[DrawnLimit, ...]
    marks: tuple[DrawnLimit, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """All that the SVG template needs."""

    title: str
    summary: str
    x_title: str
    drawings: tuple[Drawing, ...]


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
    x_ends = _ends(x_range or (min(xs), max(xs)))
    y_ends = _ends(y_range or _padded(min(ys), max(ys)))
    scale = _Scale(
        x_ends,
        y_ends,
        _labels(x_ends) if x_ticks is None else x_ticks,
        _labels(y_ends) if y_ticks is None else y_ticks,
    )
    drawings = tuple(_drawing(frame, scale, drawn, levels, marks) for frame in (WIDE, COMPACT))
    return Chart(title, summary, x_title, drawings)


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


@dataclass(frozen=True, slots=True)
class _Scale:
    """Ends and labels of both axes."""

    x_ends: tuple[float, float]
    y_ends: tuple[float, float]
    x_labels: Sequence[tuple[float, str]]
    y_labels: Sequence[tuple[float, str]]


def _drawing(
    frame: Frame,
    scale: _Scale,
    drawn: Sequence[tuple[Line, Sequence[Point]]],
    levels: Sequence[Level],
    marks: Sequence[Mark],
) -> Drawing:
    x_axis = Axis(*scale.x_ends, frame.left, frame.right)
    y_axis = Axis(*scale.y_ends, frame.bottom, frame.top)
    return Drawing(
        frame=frame,
        lines=tuple(_draw(line, points, x_axis, y_axis) for line, points in drawn),
        levels=tuple(_level(level, y_axis, frame) for level in levels),
        marks=tuple(_mark(mark, x_axis, frame) for mark in marks),
        x_ticks=_ticks(x_axis, _thinned(scale.x_labels, frame.x_labels)),
        y_ticks=_ticks(y_axis, scale.y_labels),
    )


def _ends(ends: tuple[float, float]) -> tuple[float, float]:
    low, high = ends
    return (low - 0.5, high + 0.5) if high - low < 1e-12 else (low, high)


def _padded(low: float, high: float) -> tuple[float, float]:
    pad = (high - low) * 0.06 or 0.5
    return low - pad, high + pad


def _labels(ends: tuple[float, float]) -> list[tuple[float, str]]:
    return [(value, label_of(value)) for value in round_ticks(*ends)]


def _thinned(labels: Sequence[tuple[float, str]], limit: int) -> Sequence[tuple[float, str]]:
    return labels[:: -(-len(labels) // limit)] if labels else labels


def _ticks(axis: Axis, labels: Sequence[tuple[float, str]]) -> tuple[Tick, ...]:
    return tuple(
        Tick(axis.at(value), label) for value, label in labels if axis.low <= value <= axis.high
    )


def _draw(line: Line, points: Sequence[Point], x_axis: Axis, y_axis: Axis) -> DrawnLine:
    placed = [(x_axis.at(x), y_axis.at(y)) for x, y in points]
    path = " ".join(f"{x:g},{y:g}" for x, y in placed) if len(placed) > 1 else ""
    return DrawnLine(line.name, line.tone, path, placed[-1], line.is_dashed)


def _level(level: Level, axis: Axis, frame: Frame) -> DrawnLimit:
    at = axis.at(level.y)
    label_y = at - 5 if at > frame.top + 14 else at + 13
    return DrawnLimit(level.name, level.tone, at, frame.left + 6, label_y, "start")


def _mark(mark: Mark, axis: Axis, frame: Frame) -> DrawnLimit:
    at = axis.at(mark.x)
    is_right = at > (frame.left + frame.right) / 2
    label_x, anchor = (at - 5, "end") if is_right else (at + 5, "start")
    return DrawnLimit(mark.name, mark.tone, at, label_x, frame.top + 11, anchor)
