"""What the compiler explains about a plan, for the page of a build: a picture and tables. Pure.

The document comes from a worker and is shown to people: every number is bounded, every path is of
numbers and path letters only, and every text is escaped by the template. What does not fit is left
out; a report without it (of an older compiler, or of a failed build) shows nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dashboards.reports import ReportTable, cell_text, items_in, report_of, text_in

MAX_PIXELS: Final = 100_000
MAX_TITLE: Final = 22
MAX_SOURCE: Final = 30
MAX_HINT: Final = 1_000
TONES: Final = frozenset({"tiled", "sparse", "plain", "move", "reference"})
LEGEND: Final = (
    ("tiled", "4-bit tile kernel"),
    ("sparse", "leaves work out"),
    ("plain", "vector kernel"),
    ("move", "moves data only"),
    ("reference", "reference kernel"),
)
_FATES: Final[Mapping[str, str]] = {
    "call": "in calls",
    "folded": "folded when compiling",
    "dead": "dead",
}
_SPARSITY: Final[Mapping[str, str]] = {
    "operations": "work that zeros save",
    "tensors": "zeros of its tensors",
    "sources": "where sparsity comes from",
}
_NUMBERS: Final = frozenset({"number", "nodes", "operation", "value", "sources"})
"""What the compiler calls things by; a source has nothing else in reports of older ones."""
_PATH: Final = re.compile(r"[MCHV0-9 ]{2,200}")
_COLUMNS: Final = (
    *("Calls", "Operation", "Nodes of the file", "Fused", "Shape", "Computed of dense"),
    "Why the rest may be left out",
    *("FLOPs", "Dense FLOPs", "Moved", "Kernel", "Layout", "Share of time"),
)


@dataclass(frozen=True, slots=True)
class PlanNode:
    """A box with its texts; `share_width` is the length of its bar in pixels.

    Attributes:
        source: The most telling node of the model's file that the call stands for.
    """

    x: int
    y: int
    width: int
    height: int
    tone: str
    title: str
    detail: str
    source: str
    share: str
    share_width: int
    hint: str


@dataclass(frozen=True, slots=True)
class PlanText:
    """A frame or a heading: where it is, how large, and what it says."""

    x: int
    y: int
    width: int
    height: int
    title: str
    detail: str


@dataclass(frozen=True, slots=True)
class PlanEdge:
    """A line between two boxes; `tone` is `far` for one that passes others."""

    path: str
    tone: str


@dataclass(frozen=True, slots=True)
class PlanPicture:
    """A drawing in pixels, `shares` saying whether times were measured."""

    width: int
    height: int
    shares: str
    nodes: tuple[PlanNode, ...]
    edges: tuple[PlanEdge, ...]
    frames: tuple[PlanText, ...]
    headings: tuple[PlanText, ...]
    legend: tuple[tuple[str, str], ...] = LEGEND


def plan_picture(report: object) -> PlanPicture | None:
    """Return the drawing of a report, or None if it has none that can be drawn."""
    document = report.get("picture") if isinstance(report, Mapping) else None
    if not isinstance(document, Mapping):
        return None
    nodes = tuple(_node(item) for item in items_in(document, "nodes"))
    width, height = _pixels(document, "width"), _pixels(document, "height")
    if not nodes or not width or not height:
        return None
    return PlanPicture(
        width,
        height,
        text_in(document, "shares"),
        nodes,
        tuple(_edges(document)),
        tuple(_label(item, "label") for item in items_in(document, "frames")),
        tuple(_label(item, "title") for item in items_in(document, "headings")),
    )


def plan_tables(report: object) -> tuple[ReportTable, ...]:
    """Return one table per program: its calls, repeated layers once."""
    explained = report.get("explained") if isinstance(report, Mapping) else None
    programs = explained.get("programs") if isinstance(explained, Mapping) else None
    if not isinstance(programs, Mapping):
        return ()
    return tuple(
        _table(str(name), program)
        for name, program in programs.items()
        if isinstance(program, Mapping)
    )


def fate_tables(report: object) -> tuple[ReportTable, ...]:
    """Return what became of the nodes of the model's files, by component and operator."""
    explained = report.get("explained") if isinstance(report, Mapping) else None
    rows = items_in(explained, "fates") if isinstance(explained, Mapping) else []
    if not rows:
        return ()
    total = {fate: sum(_bounded(row.get(fate)) for row in rows) for fate in _FATES}
    words = ", ".join(f"{count} {_FATES[fate]}" for fate, count in total.items())
    table = report_of({"fates": rows}).tables[0]
    columns = tuple(_FATES.get(name.lower(), name).capitalize() for name in table.columns)
    title = f"Nodes of the model's files: {words}"
    return (replace(table, title=title, columns=columns),)


def sparsity_tables(report: object) -> tuple[ReportTable, ...]:
    """Return, per program, tables of zeros: their sources, where they are, what they save."""
    found = report.get("sparsity") if isinstance(report, Mapping) else None
    if not isinstance(found, Mapping):
        return ()
    named = {
        f"Program {name}, {title}": [_named(row) for row in items_in(rows, key) if _saves(row)]
        for name, rows in found.items()
        if isinstance(rows, Mapping)
        for key, title in _SPARSITY.items()
    }
    return report_of({title: rows for title, rows in named.items() if rows}).tables


def _named(row: Mapping[str, object]) -> Mapping[str, object]:
    """Return a row with the node of the model's file for the compiler's number of it."""
    if not row.get("source"):
        return row
    rest = {name: value for name, value in row.items() if name not in _NUMBERS}
    return {"node": rest.pop("source"), **rest}


def _saves(row: Mapping[str, object]) -> bool:
    """Return whether a row of the analysis says more than that nothing is saved."""
    dense = row.get("multiply_adds_dense")
    return dense is None or row.get("multiply_adds_most") != dense


def _table(name: str, program: Mapping[str, object]) -> ReportTable:
    calls = items_in(program, "calls")
    rows = tuple(_row(calls[first::step][:times]) for first, step, times in _shown(program, calls))
    flops, dense = (cell_text("", program.get(key)) for key in ("flops", "dense_flops"))
    title = f"Program {name}: {flops} of {dense} dense FLOPs"
    return ReportTable(title, _COLUMNS, rows, rows_left_out=0)


def _shown(
    program: Mapping[str, object], calls: Sequence[Mapping[str, object]]
) -> Iterator[tuple[int, int, int]]:
    """Yield (first call, distance to the same call of the next layer, layers) of every row."""
    segments = program.get("segments")
    for part in segments if isinstance(segments, list) else ():
        if not isinstance(part, list) or len(part) != 3:
            continue
        first, length, repeats = (_bounded(item) for item in part)
        for at in range(first, min(first + length, len(calls))):
            yield at, max(1, length), max(1, repeats)


def _row(same: Sequence[Mapping[str, object]]) -> tuple[str, ...]:
    call = same[0]
    sparsity = call.get("sparsity")
    computed = why = ""
    if isinstance(sparsity, Mapping):
        computed = " ".join(
            (text_in(sparsity, "kept"), "of", text_in(sparsity, "of"), text_in(sparsity, "kind"))
        )
        why = text_in(sparsity, "proof")
    key = "measured_ratio" if call.get("measured_ratio") is not None else "expected_ratio"
    number = text_in(call, "call") + (f" ×{len(same)}" if len(same) > 1 else "")  # noqa: RUF001
    return (
        number,
        text_in(call, "title"),
        text_in(call, "source"),
        cell_text("", call.get("fused") or ""),
        text_in(call, "shape"),
        computed,
        why,
        cell_text("", _total(same, "flops")),
        cell_text("", _total(same, "dense_flops")),
        cell_text("moved_bytes", _total(same, "moved_bytes")),
        text_in(call, "kernel"),
        text_in(call, "layout"),
        cell_text("share_ratio", _total(same, key)),
    )


def _total(same: Sequence[Mapping[str, object]], key: str) -> float:
    values = (item.get(key) for item in same)
    return sum(value for value in values if isinstance(value, (int, float)))


def _node(item: Mapping[str, object]) -> PlanNode:
    width, share = _pixels(item, "width"), item.get("share_ratio")
    part = min(max(float(share), 0.0), 1.0) if isinstance(share, (int, float)) else 0.0
    title, density, tone = text_in(item, "title"), text_in(item, "density"), text_in(item, "tone")
    return PlanNode(
        x=_pixels(item, "x"),
        y=_pixels(item, "y"),
        width=width,
        height=_pixels(item, "height"),
        tone=tone if tone in TONES else "move",
        title=title if len(title) <= MAX_TITLE else title[: MAX_TITLE - 1] + "…",
        detail=" · ".join(part for part in (text_in(item, "detail"), density) if part),
        source=_middle(text_in(item, "source")),
        share=text_in(item, "share"),
        share_width=round(part * max(0, width - 12)),
        hint=_hint(item.get("hint")),
    )


def _hint(value: object) -> str:
    """Return the text that a box shows when it is pointed at: longer than a cell of a table."""
    if not isinstance(value, str):
        return cell_text("", value or "")
    return value if len(value) <= MAX_HINT else value[: MAX_HINT - 1] + "…"


def _middle(text: str) -> str:
    """Return a text that fits into a box, cut in the middle: names differ at both ends."""
    if len(text) <= MAX_SOURCE:
        return text
    return text[: MAX_SOURCE // 3] + "…" + text[MAX_SOURCE // 3 + 1 - MAX_SOURCE :]


def _edges(document: Mapping[str, object]) -> Iterator[PlanEdge]:
    for item in items_in(document, "edges"):
        path = item.get("path")
        if isinstance(path, str) and _PATH.fullmatch(path):
            yield PlanEdge(path, "far" if item.get("is_skip") is True else "near")


def _label(item: Mapping[str, object], title: str) -> PlanText:
    return PlanText(
        _pixels(item, "x"),
        _pixels(item, "y"),
        _pixels(item, "width"),
        _pixels(item, "height"),
        text_in(item, title),
        text_in(item, "detail"),
    )


def _pixels(item: Mapping[str, object], key: str) -> int:
    return _bounded(item.get(key))


def _bounded(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return min(max(value, 0), MAX_PIXELS)
