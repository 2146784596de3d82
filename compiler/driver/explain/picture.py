"""The picture of a plan: a layered drawing, computed here and drawn elsewhere.

One column per program, time downwards. Calls that do not depend on each other stand side by side;
a repeated layer is drawn once, in a frame that says how often. The result is plain JSON in pixels:
`compiler.driver.explain.svg` makes a file of it, the web page draws it with its own colours.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from compiler.contract.canonical import Json
from compiler.driver.explain.document import MEASURED, segments_of
from compiler.driver.explain.repeats import Segment

NODE_WIDTH: Final = 208
NODE_HEIGHT: Final = 62
GAP_X: Final = 14
GAP_Y: Final = 18
FRAME: Final = 12
MARGIN: Final = 16
COLUMN_GAP: Final = 56
HEADING: Final = 44
MAX_NODES: Final = 400
"""A program with more nodes than this, repeats drawn once, is cut there; the heading says so."""
MAX_NAMED: Final = 24
"""So many nodes of the files are named in the hint of a box."""


@dataclass(slots=True)
class _Column:
    """One program being placed: ranks by node, nodes by rank."""

    program: Mapping[str, Any]
    nodes: Sequence[Sequence[str]]
    parts: list[Segment]
    shown: list[int]
    rank: dict[int, int]
    frames: list[tuple[int, int, int]]


def picture(document: Mapping[str, Any]) -> dict[str, Json]:
    """Return the drawing of an explain document: size, nodes, edges, frames, headings."""
    drawing: dict[str, list[Json]] = {"nodes": [], "edges": [], "frames": [], "headings": []}
    left, bottom = MARGIN, 0
    for name, program in document["programs"].items():
        column = _rank(program, document.get("nodes", ()))
        width, height = _place(name, column, document["shares"], left, drawing)
        left += width + COLUMN_GAP
        bottom = max(bottom, height)
    size: dict[str, Json] = {"width": left - COLUMN_GAP + MARGIN, "height": bottom + MARGIN}
    return {**size, "shares": document["shares"], **drawing}


def _rank(program: Mapping[str, Any], nodes: Sequence[Sequence[str]]) -> _Column:
    """Give every shown call a rank: below everything it reads, segments one below the other."""
    parts = segments_of(program)
    alias = _aliases(parts)
    shown = sorted(set(alias.values()))[:MAX_NODES]
    visible = set(shown)
    sources: defaultdict[int, set[int]] = defaultdict(set)
    for source, target in program["edges"]:
        one, other = alias.get(source, -1), alias[target]
        if one in visible and other in visible and one < other:
            sources[other].add(one)
    rank: dict[int, int] = {}
    frames: list[tuple[int, int, int]] = []
    floor = 0
    for part in parts:
        members = [at for at in range(part.first, part.first + part.length) if at in visible]
        for at in members:
            rank[at] = max([floor, *(rank[source] + 1 for source in sources[at])])
        if not members:
            break
        last = max(rank[at] for at in members)
        _lower(members, sources, rank)
        if part.repeats > 1:
            frames.append((floor, last, part.repeats))
        floor = last + 1
    return _Column(program, nodes, parts, shown, rank, frames)


def _lower(members: Sequence[int], sources: Mapping[int, set[int]], rank: dict[int, int]) -> None:
    """Move calls of a segment down to what reads them first, so that lines stay short."""
    for at in reversed(members):
        readers = [rank[other] for other in members if at in sources.get(other, ())]
        if readers:
            rank[at] = min(readers) - 1


def _aliases(parts: Sequence[Segment]) -> dict[int, int]:
    """Return, for every call, the call that stands for it: itself, or its place in a repeat."""
    return {
        part.first + at: part.first + at % part.length
        for part in parts
        for at in range(part.length * part.repeats)
    }


def _place(
    name: str, column: _Column, shares: str, left: int, drawing: dict[str, list[Json]]
) -> tuple[int, int]:
    rows: defaultdict[int, list[int]] = defaultdict(list)
    for at in column.shown:
        rows[column.rank[at]].append(at)
    most = max((len(row) for row in rows.values()), default=1)
    inner = most * NODE_WIDTH + (most - 1) * GAP_X
    lane = left + 3 * FRAME + inner
    tops = _row_tops(len(rows), column.frames)
    boxes: dict[int, tuple[int, int]] = {}
    for number, row in rows.items():
        start = left + FRAME + (inner - len(row) * NODE_WIDTH - (len(row) - 1) * GAP_X) // 2
        for place, at in enumerate(row):
            boxes[at] = (start + place * (NODE_WIDTH + GAP_X), tops[number])
    repeats = {part.first + at: part.repeats for part in column.parts for at in range(part.length)}
    for at, (x, y) in boxes.items():
        drawing["nodes"].append(_node(column, at, repeats[at], shares, (x, y)))
    for first, last, times in column.frames:
        drawing["frames"].append(
            {
                "x": left,
                "y": tops[first] - FRAME,
                "width": inner + 2 * FRAME,
                "height": tops[last] + NODE_HEIGHT - tops[first] + 2 * FRAME,
                "label": f"layer, {times} times",
            }
        )
    widest = _edges(column, boxes, lane, drawing["edges"])
    bottom = max((y for _, y in boxes.values()), default=HEADING) + NODE_HEIGHT
    drawing["headings"].append(_heading(name, column, shares, left))
    return max(inner + 2 * FRAME, widest - left), bottom + FRAME


def _row_tops(count: int, frames: Sequence[tuple[int, int, int]]) -> list[int]:
    """Return the y of every rank, with more room where a frame begins or ends."""
    opening = {first for first, _, _ in frames}
    closing = {last + 1 for _, last, _ in frames}
    tops: list[int] = []
    y = MARGIN + HEADING
    for number in range(count):
        y += 2 * FRAME * (number in opening) + FRAME * (number in closing)
        tops.append(y)
        y += NODE_HEIGHT + GAP_Y
    return tops


def _node(
    column: _Column, at: int, repeats: int, shares: str, corner: tuple[int, int]
) -> dict[str, Json]:
    program, nodes = column.program, column.nodes
    call = program["calls"][at]
    sparsity = call["sparsity"]
    key = "measured_ratio" if shares == MEASURED else "expected_ratio"
    step = next((part.length for part in segments_of(program) if part.first <= at < part.end), 0)
    share = sum(program["calls"][at + turn * step][key] or 0.0 for turn in range(repeats))
    fused = [part for part in call["fused"] if part in ("bias", "residual", "relu", "silu")]
    before = "norm > " if any(part.endswith("norm before") for part in call["fused"]) else ""
    return {
        "x": corner[0],
        "y": corner[1],
        "width": NODE_WIDTH,
        "height": NODE_HEIGHT,
        "title": before + " + ".join((call["title"], *fused)),
        "detail": call["shape"],
        "source": call.get("source", ""),
        "share": f"{share:.1%}",
        "share_ratio": round(share, 5),
        "density_ratio": round(sparsity["kept"] / sparsity["of"], 4) if sparsity else None,
        "density": _density(sparsity),
        "tone": _tone(call),
        "hint": _hint(call, nodes),
    }


def _density(sparsity: Mapping[str, Any] | None) -> str:
    if sparsity is None:
        return ""
    if sparsity["kind"] in ("causal", "window"):
        return f"{sparsity['kept'] / sparsity['of']:.0%} of the scores"
    return f"{sparsity['kept']} of {sparsity['of']} {sparsity['kind']}"


def _tone(call: Mapping[str, Any]) -> str:
    if call["sparsity"] is not None:
        return "sparse"
    if call["is_reference"]:
        return "reference"
    if call["is_tiled"]:
        return "tiled"
    return "plain" if call["flops"] else "move"


def _hint(call: Mapping[str, Any], nodes: Sequence[Sequence[str]]) -> str:
    parts = [f"call {call['call']}: {call['kernel']} ({call['why']})", call["layout"]]
    if call["fused"]:
        parts.append("fused: " + ", ".join(call["fused"]))
    if call["sparsity"]:
        parts.append(call["sparsity"]["proof"])
    named = [f"{nodes[n][2]} {nodes[n][1]}" for n in call.get("nodes", ()) if n < len(nodes)]
    if named:
        more = [f"and {len(named) - MAX_NAMED} more"] if len(named) > MAX_NAMED else []
        parts.append("stands for " + ", ".join(named[:MAX_NAMED] + more))
    return "; ".join(parts)


def _edges(
    column: _Column, boxes: Mapping[int, tuple[int, int]], lane: int, edges: list[Json]
) -> int:
    """Draw what a call reads: straight to the next rank, else along a lane at the right side."""
    alias = _aliases(column.parts)
    drawn: set[tuple[int, int]] = set()
    busy: list[tuple[int, int]] = []
    widest = lane
    pairs = {(alias.get(source, -1), alias[target]) for source, target in column.program["edges"]}
    order = sorted(
        (pair for pair in pairs if pair[0] in boxes and pair[1] in boxes and pair[0] < pair[1]),
        key=lambda pair: (column.rank[pair[1]] - column.rank[pair[0]], pair),
    )
    for source, target in order:
        (x1, y1), (x2, y2) = boxes[source], boxes[target]
        if column.rank[target] - column.rank[source] == 1:
            start, end = (x1 + NODE_WIDTH // 2, y1 + NODE_HEIGHT), (x2 + NODE_WIDTH // 2, y2)
            middle = (start[1] + end[1]) // 2
            path = f"M{start[0]} {start[1]}C{start[0]} {middle} {end[0]} {middle} {end[0]} {end[1]}"
            edges.append({"path": path, "is_skip": False})
        else:
            y1, y2 = y1 + NODE_HEIGHT * 3 // 4, y2 + NODE_HEIGHT // 4
            track = _track(busy, y1, y2)
            x = lane + 8 * track
            widest = max(widest, x)
            path = f"M{x1 + NODE_WIDTH} {y1}H{x}V{y2}H{x2 + NODE_WIDTH}"
            edges.append({"path": path, "is_skip": True})
        drawn.add((source, target))
    return widest


def _track(busy: list[tuple[int, int]], top: int, bottom: int) -> int:
    """Return the first lane that is free between two heights, and take it."""
    for track, (_, until) in enumerate(busy):
        if until < top:
            busy[track] = (top, bottom)
            return track
    busy.append((top, bottom))
    return len(busy) - 1


def _heading(name: str, column: _Column, shares: str, x: int) -> dict[str, Json]:
    program = column.program
    dense = program["dense_flops"] or 1
    text = f"{program['flops'] / 1e6:.1f} of {dense / 1e6:.1f} MFLOP dense"
    if program["measured_us"] is not None and shares == MEASURED:
        text = f"{program['measured_us'] / 1e3:.2f} ms · {text}"
    return {"x": x, "y": MARGIN + 14, "title": f"program {name}", "detail": text}
