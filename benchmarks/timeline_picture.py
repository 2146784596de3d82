"""A timeline as a picture: threads as lanes, what compute hides apart from what is waited for.

    events of `native_trace` -> bars, each read cut where a run stalled meanwhile -> SVG

Pure; called by `benchmarks.runtime_timeline`.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape
from typing import Final

from compiler.contract.native_trace import READS, Event, Kind
from compiler.contract.trace_files import Track, tracks

WIDTH, MARGIN, LABELS = 1600, 24, 150
HEAD, LANE, BAR, TICK = 118, 76, 40, 9
STEPS_MS: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
MOST_STEPS: Final = 14
CHARACTER: Final = 6.6
MS_NS: Final = 1e6
EXPERT_CALLS: Final = frozenset({"EXPERTS", "MOE_LAYER"})


class Paint(Enum):
    """What a bar means: its colour, and its words in the legend."""

    EXPERTS = "#2f6fb3", "run: experts"
    OTHER = "#a9c4e0", "run: other operations"
    LOAD = "#8e1b1b", "run stalled: reads by itself"
    WAIT = "#e2574c", "run stalled: waits for a read"
    HIDDEN = "#3d9a5f", "expert read behind compute"
    BESIDE = "#9ccfae", "expert read, run stalled for another"
    SEEN = "#efb13d", "expert read, run stalled for it"
    EVICT = "#5b5b5b", "expert evicted"

    @property
    def colour(self) -> str:
        """Of the bar."""
        return self.value[0]

    @property
    def words(self) -> str:
        """In the legend."""
        return self.value[1]


@dataclass(frozen=True, slots=True)
class Bar:
    """One rectangle of a lane; nanoseconds."""

    start_ns: int
    end_ns: int
    paint: Paint
    label: str


@dataclass(frozen=True, slots=True)
class Reads:
    """What happened while experts were read, in the runs and beside them.

    Attributes:
        total: Experts read.
        unseen: Those of them that no run was stalled for meanwhile.
        ns: Time of all reads by what runs did: HIDDEN, BESIDE, SEEN.
    """

    total: int
    unseen: int
    ns: Mapping[Paint, int]


def reads_of(events: Sequence[Event]) -> Reads:
    """Return how the reads of experts lie beside what runs did."""
    stalls = [e for e in events if e.kind is Kind.STALL]
    reads = [e for e in events if e.kind in READS or e.kind is Kind.LOAD]
    parts = [list(cut(read, stalls)) for read in reads]
    ns = dict.fromkeys((Paint.HIDDEN, Paint.BESIDE, Paint.SEEN), 0)
    for start, end, paint in itertools.chain.from_iterable(parts):
        ns[paint] += end - start
    unseen = sum(all(paint is not Paint.SEEN for _, _, paint in of_one) for of_one in parts)
    return Reads(len(reads), unseen, ns)


def cut(read: Event, stalls: Sequence[Event]) -> Iterator[tuple[int, int, Paint]]:
    """Yield the parts of a read in order: begin, end, and whether runs computed meanwhile."""
    ends = {at for stall in stalls for at in (stall.start_ns, stall.end_ns)}
    edges = sorted({read.start_ns, read.end_ns, *(e for e in ends if _is_in(e, read))})
    for start, end in itertools.pairwise(edges):
        names = {s.name for s in stalls if s.start_ns <= start and end <= s.end_ns}
        paint = Paint.SEEN if read.name in names else Paint.BESIDE if names else Paint.HIDDEN
        yield start, end, paint


def _is_in(at_ns: int, read: Event) -> bool:
    return read.start_ns < at_ns < read.end_ns


def bars(track: Track, stalls: Sequence[Event]) -> Iterator[Bar]:
    """Yield what is drawn of a track, in the order in which it is drawn."""
    plain = {Kind.LOAD: Paint.LOAD, Kind.WAIT: Paint.WAIT, Kind.EVICT: Paint.EVICT}
    for event in track.events:
        start, end, label = event.start_ns, event.end_ns, event.name
        if event.kind in READS:
            for at, until, paint in cut(event, stalls):
                yield Bar(at, until, paint, label)
        elif event.kind in (Kind.CALL, Kind.PIECE):
            paint = Paint.EXPERTS if label in EXPERT_CALLS else Paint.OTHER
            yield Bar(start, end, paint, label)
        elif event.kind in plain:
            yield Bar(start, end, plain[event.kind], label)


def picture(events: Sequence[Event], title: str, below: str) -> str:
    """Return the SVG of a timeline; `title` and `below` are its head.

    Raises:
        ValueError: There are no events.
    """
    if not events:
        raise ValueError("a timeline needs events")
    lanes = tracks(events)
    first, last = min(e.start_ns for e in events), max(e.end_ns for e in events)
    scale = _Scale(first, (WIDTH - 2 * MARGIN - LABELS) / max(1, last - first))
    stalls = [e for e in events if e.kind is Kind.STALL]
    height = HEAD + LANE * len(lanes) + 2 * MARGIN
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _words(MARGIN, 30, title, 'font-size="18" font-weight="bold"'),
        _words(MARGIN, 52, below, 'fill="#444444"'),
        *_legend(),
        *_axis(scale, last, height - MARGIN),
    ]
    for number, lane in enumerate(lanes):
        drawn += _lane(lane, HEAD + LANE * number, scale, stalls)
    return "\n".join([*drawn, "</svg>", ""])


@dataclass(frozen=True, slots=True)
class _Scale:
    """Where a moment lies on the paper."""

    first_ns: int
    per_ns: float

    def x(self, at_ns: float) -> float:
        return MARGIN + LABELS + (at_ns - self.first_ns) * self.per_ns


def _lane(track: Track, top: int, scale: _Scale, stalls: Sequence[Event]) -> Iterator[str]:
    yield _words(MARGIN, top + BAR // 2 + 4, track.name, 'font-size="14"')
    for run in (e for e in track.events if e.kind is Kind.RUN):
        x, width = scale.x(run.start_ns), (run.end_ns - run.start_ns) * scale.per_ns
        yield _rect(x, top - 5, width, BAR + 10, "#eef1f5", run.name, run)
    for bar in bars(track, stalls):
        x, width = scale.x(bar.start_ns), (bar.end_ns - bar.start_ns) * scale.per_ns
        if bar.paint is Paint.EVICT:
            yield _rect(x, top + BAR + 2, 1.2, TICK, bar.paint.colour, bar.label, bar)
            continue
        yield _rect(x, top, max(0.4, width), BAR, bar.paint.colour, bar.label, bar)
        if len(bar.label) * CHARACTER < width and bar.paint not in (Paint.EXPERTS, Paint.OTHER):
            at = x + width / 2, top + BAR // 2 + 4
            ink = "#222222" if bar.paint in (Paint.SEEN, Paint.BESIDE) else "#ffffff"
            yield _words(*at, bar.label, f'text-anchor="middle" font-size="11" fill="{ink}"')


def _legend() -> Iterator[str]:
    x = float(MARGIN)
    for paint in Paint:
        yield f'<rect x="{x:.1f}" y="68" width="13" height="13" fill="{paint.colour}"/>'
        yield _words(x + 18, 79, paint.words)
        x += 34 + CHARACTER * len(paint.words)


def _axis(scale: _Scale, last_ns: int, y: int) -> Iterator[str]:
    length = (last_ns - scale.first_ns) / MS_NS
    step = next((s for s in STEPS_MS if length / s <= MOST_STEPS), STEPS_MS[-1])
    for number in range(int(length / step) + 1):
        x = scale.x(scale.first_ns + number * step * MS_NS)
        line = f'x1="{x:.1f}" x2="{x:.1f}" y1="{HEAD - 14}" y2="{y - 16}"'
        yield f'<line {line} stroke="#d5d9de"/>'
        yield _words(x, y, f"{number * step:g} ms", 'text-anchor="middle" fill="#444444"')


def _rect(
    x: float, y: float, width: float, height: float, fill: str, name: str, span: Bar | Event
) -> str:
    took = (span.end_ns - span.start_ns) / MS_NS
    box = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}"'
    return f'<rect {box} fill="{fill}"><title>{escape(name)}: {took:.3f} ms</title></rect>'


def _words(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" {more}>{escape(text)}</text>'
