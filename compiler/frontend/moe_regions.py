"""Find mixtures of experts whose bodies run on data-dependent rows (shapes O3, O4 and O6).

Such a region starts where expert ids are compared (`OneHot`, `Equal`) and ends at the one merge
that everything behind passes through: the last `Add` or `Scatter` of the accumulation, or the
result of `Loop` or `If`. In between each body multiplies some rows with one expert's matrices and
weighs the result with gates. Names never matter.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import onnx

from compiler.frontend.graph_view import GraphView, attribute, reads, subgraphs

_COMPARES: Final = frozenset({"OneHot", "Equal"})
_MERGES: Final = frozenset({"Add", "ScatterElements", "ScatterND", "Loop", "If", "Sum"})
_PRODUCTS: Final = frozenset({"MatMul", "Gemm"})
_TAKES: Final = frozenset({"Gather", "GatherND", "Compress"})


@dataclass(frozen=True, slots=True)
class Body:
    """One traced expert.

    Attributes:
        out: The value that is weighed with gates.
        gate: The value it is weighed with.
        expert: The expert's id if it is written in the file, None if it is computed.
    """

    out: str
    gate: str
    expert: int | None


@dataclass(frozen=True, slots=True)
class Region:
    """A mixture in a graph.

    Attributes:
        result: The value that ends it; made by node number `place`.
        index: Expert ids (T, k).
        gate: Gates (T, k).
        x: Rows (T, D).
        bodies: In the order of the file.
    """

    result: str
    place: int
    index: str
    gate: str
    x: str
    bodies: tuple[Body, ...]


def find_regions(view: GraphView) -> Iterator[Region]:
    """Yield the mixtures of a graph, in order."""
    for index in _compared(view):
        end = _end(view, index)
        region = None if end is None else _region(view, index, *end)
        if region is not None:
            yield region


def _compared(view: GraphView) -> list[str]:
    """Return integer values that are compared with expert ids, each once."""
    found: dict[str, None] = {}
    for node in _all_nodes(view):
        if node.op_type in _COMPARES:
            for name in node.input[: 1 if node.op_type == "OneHot" else 2]:
                root = view.root(name)
                if root in view.dynamic and root not in view.iterations and _is_choice(view, root):
                    found[root] = None
    return list(found)


def _all_nodes(view: GraphView) -> Iterator[onnx.NodeProto]:
    seen: set[int] = set()
    for node in view.makers.values():
        if id(node) not in seen:
            seen.add(id(node))
            yield node


def _is_choice(view: GraphView, name: str) -> bool:
    """Return whether a value is made of positions: of a top-k or of arg-max."""
    node = view.maker(name)
    while node is not None and node.op_type in ("Cast", "Concat", "Identity"):
        name = node.input[0]
        node = view.maker(name)
    if node is None:
        return False
    return node.op_type == "ArgMax" or (node.op_type == "TopK" and name == node.output[1])


def _end(view: GraphView, index: str) -> tuple[str, int] | None:
    """Return the first merge that everything computed from compared ids passes through."""
    nodes = list(view.graph.node)
    last_use: dict[str, int] = {}
    for place, node in enumerate(nodes):
        last_use.update(dict.fromkeys(reads(node), place))
    last_use.update(dict.fromkeys((o.name for o in view.graph.output), len(nodes)))
    tainted: set[str] = set()
    compared = [place for place, node in enumerate(nodes) if _compares(view, node, index)]
    if not compared:
        return None
    for place, node in enumerate(nodes):
        if place in compared or tainted.intersection(reads(node)):
            tainted.update(node.output)
        live = {name for name in tainted if last_use.get(name, -1) > place}
        closed = place >= compared[-1] and len(live) == 1 and live <= set(node.output)
        if closed and node.op_type in _MERGES:
            return live.pop(), place
        tainted = live
    return None


def _compares(view: GraphView, node: onnx.NodeProto, index: str) -> bool:
    """Return whether a node, or a body inside it, compares the ids."""
    if node.op_type in _COMPARES:
        return any(view.root(name) == index for name in node.input if name)
    return any(_compares(view, inner, index) for body in subgraphs(node) for inner in body.node)


def _region(view: GraphView, index: str, result: str, place: int) -> Region | None:
    tainted = _tainted(view, view.behind(result), index)
    options = [
        (node, out, gate, root)
        for node in _weighings(view, tainted)
        for out, gate in (tuple(node.input), tuple(node.input)[::-1])
        if (root := _gate_root(view, gate, index, tainted)) is not None
        and _has_product(view, out, {index, root})
    ]
    if not options:
        return None
    gates = Counter(root for *_, root in options).most_common(1)[0][0]
    chosen = [(out, gate) for _, out, gate, root in options if root == gates]
    x = _rows(view, [out for out, _ in chosen], tainted)
    if x is None:
        return None
    bodies = tuple(Body(out, gate, _expert(view, out, gate, index, x)) for out, gate in chosen)
    return Region(result, place, index, gates, x, bodies)


def _tainted(view: GraphView, everything: set[str], index: str) -> dict[str, onnx.NodeProto]:
    """Return the values of a region that depend on compared ids, with their makers."""
    rounds = {
        graph.input[0].name
        for node in _all_nodes(view)
        if node.op_type == "Loop" and _compares(view, node, index)
        for graph in subgraphs(node)
    }
    depends: dict[str, bool] = {}
    opened: set[str] = set()
    stack = list(everything)
    while stack:
        current = stack[-1]
        node = view.makers.get(current)
        if current in depends or node is None or current == index:
            depends.setdefault(current, current in rounds)
            stack.pop()
            continue
        operands = [view.through(name) for name in node.input if name]
        waiting = [name for name in operands if name not in depends and name not in opened]
        opened.add(current)
        if waiting:
            stack.extend(waiting)
            continue
        starts = node.op_type in _COMPARES and any(view.root(name) == index for name in operands)
        depends[current] = starts or any(depends.get(name, False) for name in operands)
        stack.pop()
    return {name: view.makers[name] for name in everything if depends[name] and name in view.makers}


def _weighings(view: GraphView, tainted: dict[str, onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the multiplications of a region in the order of the file."""
    inside = {id(node) for node in tainted.values() if node.op_type == "Mul"}
    return [node for node in _all_nodes(view) if id(node) in inside]


def _gate_root(
    view: GraphView, name: str, index: str, tainted: dict[str, onnx.NodeProto]
) -> str | None:
    """Return the one value of data that a weight is taken from, views away."""
    found: set[str] = set()
    seen: set[str] = set()
    stack = [view.through(name)]
    while stack:
        current = stack.pop()
        if current in seen or current == index:
            continue
        seen.add(current)
        if current not in tainted:
            root = view.root(current)
            if view.is_data(root) and root != index:
                found.add(root)
            continue
        if tainted[current].op_type in _PRODUCTS:
            return None
        if tainted[current].op_type not in ("Shape", "Size"):
            stack.extend(view.through(n) for n in tainted[current].input if n)
    return found.pop() if len(found) == 1 else None


def _has_product(view: GraphView, name: str, stops: set[str]) -> bool:
    behind = view.behind(name, stops=stops) - stops
    return any(view.makers[n].op_type in _PRODUCTS for n in behind if n in view.makers)


def _rows(view: GraphView, outs: list[str], tainted: dict[str, onnx.NodeProto]) -> str | None:
    """Return the rows that the first products of all bodies multiply, or take some of."""
    behind = [view.behind(out) for out in outs]
    shared = set.intersection(*behind) if len(behind) > 1 else behind[0] - tainted.keys()
    found: set[str] = set()
    for name in set.union(*behind) - shared:
        node = view.makers.get(name)
        if node is None or node.op_type not in _PRODUCTS:
            continue
        for operand in node.input[:2]:
            source = _taken_from(view, operand)
            if source in shared and source in view.dynamic:
                found.add(source)
    return found.pop() if len(found) == 1 else None


def _taken_from(view: GraphView, operand: str) -> str:
    """Return what rows are gathered from, or the operand itself."""
    maker = view.maker(view.root(operand))
    takes = maker is not None and maker.op_type in _TAKES and maker.input[0] in view.dynamic
    return view.through(maker.input[0] if takes and maker is not None else operand)


def _expert(view: GraphView, out: str, gate: str, index: str, x: str) -> int | None:
    """Return the expert id that a body is written for, None if it is computed."""
    found: set[int] = set()
    for value in view.behind(gate, stops={index}) | view.behind(out, stops={index, x}):
        node = view.makers.get(value)
        if node is None:
            continue
        if node.op_type == "Equal" and any(view.root(n) == index for n in node.input):
            numbers = [view.scalar(n) for n in node.input]
            found.update(int(n) for n in numbers if n is not None)
        elif node.op_type == "Gather" and attribute(node, "axis", 0) == 0:
            number = view.scalar(node.input[1])
            if number is not None and _holds_one_hot(view, node.input[0], index):
                found.add(int(number))
    return found.pop() if len(found) == 1 else None


def _holds_one_hot(view: GraphView, name: str, index: str) -> bool:
    """Return whether a value is a one-hot mask of the ids, possibly transposed."""
    node = view.maker(name)
    while node is not None and node.op_type in ("Transpose", "Cast"):
        node = view.maker(node.input[0])
    return node is not None and node.op_type == "OneHot" and view.root(node.input[0]) == index
