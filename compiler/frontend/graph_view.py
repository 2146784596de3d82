"""An ONNX graph with its control flow opened, for looking at; nothing here changes a graph.

The bodies of `Loop` and `If` stand beside the outer nodes, joined by aliases: a result of `If` is
the result of the branch that computes something, a result of `Loop` is what the body hands on. That
is not what the graph computes, but it is where its parts are, which is all a search needs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import onnx
from onnx import numpy_helper

from compiler.frontend.values import Array

VIEWS: Final = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity"})
_SHAPE_ONLY: Final = frozenset({"Shape", "Size"})
_WORK: Final = frozenset({"MatMul", "Gemm"})


def subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the graphs among the attributes of a node."""
    return [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]


def attribute(node: onnx.NodeProto, name: str, default: object) -> object:
    """Return an attribute's value."""
    for item in node.attribute:
        if item.name == name:
            value: object = onnx.helper.get_attribute_value(item)
            return value.decode() if isinstance(value, bytes) else value
    return default


def reads(node: onnx.NodeProto) -> list[str]:
    """Return all values a node reads, those captured by its bodies included."""
    found = [name for name in node.input if name]
    for graph in subgraphs(node):
        made = {info.name for info in graph.input} | {i.name for i in graph.initializer}
        for inner in graph.node:
            found += [name for name in reads(inner) if name not in made]
            made.update(inner.output)
        found += [info.name for info in graph.output if info.name not in made]
    return found


class Constants(Mapping[str, Array]):
    """Arrays by name, read from the file when they are asked for the first time."""

    def __init__(self) -> None:
        self._stored: dict[str, onnx.TensorProto | Array] = {}

    def put(self, name: str, value: "onnx.TensorProto | Array") -> None:
        """Store a tensor or an array."""
        self._stored[name] = value

    def __getitem__(self, name: str) -> Array:
        value = self._stored[name]
        if isinstance(value, onnx.TensorProto):
            value = self._stored[name] = numpy_helper.to_array(value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored


@dataclass(slots=True)
class GraphView:
    """Makers, constants and dependence on data of one graph, bodies opened.

    Attributes:
        constants: Values of initializers and Constant nodes.
        makers: The node that makes a value.
        alias: What a result of control flow, or a body's input, stands for.
        dynamic: Values that depend on what the model is fed, not only on its shapes.
        iterations: Iteration numbers of loops.
        carried: Values that loops hand from one round to the next.
    """

    graph: onnx.GraphProto
    constants: Constants = field(default_factory=Constants)
    makers: dict[str, onnx.NodeProto] = field(default_factory=dict)
    alias: dict[str, str] = field(default_factory=dict)
    dynamic: set[str] = field(default_factory=set)
    iterations: set[str] = field(default_factory=set)
    carried: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, graph: onnx.GraphProto) -> "GraphView":
        """Look at a graph."""
        view = cls(graph)
        view.dynamic.update(info.name for info in graph.input)
        view._open(graph)
        view.dynamic -= view.constants.keys()
        return view

    def _open(self, graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            self.constants.put(tensor.name, tensor)
        for node in graph.node:
            self._add(node)

    def _add(self, node: onnx.NodeProto) -> None:
        if node.op_type == "Constant":
            array = constant_of(node)
            if array is not None:
                self.constants.put(node.output[0], array)
                return
        self.makers.update(dict.fromkeys(node.output, node))
        if node.op_type not in _SHAPE_ONLY and any(n in self.dynamic for n in reads(node)):
            self.dynamic.update(node.output)
        if node.op_type == "Loop":
            self._loop(node)
        elif node.op_type == "If":
            self._branch(node)

    def _loop(self, node: onnx.NodeProto) -> None:
        (body,) = subgraphs(node)
        iteration, _, *carried = [info.name for info in body.input]
        self.iterations.add(iteration)
        self.dynamic.add(iteration)
        for name, initial in zip(carried, node.input[2:], strict=True):
            self.alias[name] = initial
            self.carried.add(name)
            self.dynamic.add(name)
        self._open(body)
        for name, result in zip(node.output, [o.name for o in body.output][1:], strict=False):
            self.alias[name] = result

    def _branch(self, node: onnx.NodeProto) -> None:
        branches = subgraphs(node)
        for branch in branches:
            self._open(branch)
        works = [b for b in branches if any(n.op_type in _WORK for n in b.node)] or branches
        for name, result in zip(node.output, works[0].output, strict=True):
            self.alias[name] = result.name

    def maker(self, name: str) -> onnx.NodeProto | None:
        """Return the node behind a value, through control flow."""
        return self.makers.get(self.through(name))

    def through(self, name: str) -> str:
        """Return the value that a result of control flow stands for."""
        while name in self.alias and name not in self.carried:
            name = self.alias[name]
        return name

    def constant(self, name: str) -> Array | None:
        """Return a constant's value; casts of constants and views of one element count."""
        if name in self.constants:
            return self.constants[name]
        node = self.maker(name)
        if node is None or not node.input or node.op_type not in VIEWS | {"Cast"}:
            return None
        array = self.constant(node.input[0])
        if array is None or (node.op_type in VIEWS and array.size != 1):
            return None
        return array.reshape(()) if node.op_type in VIEWS else array

    def scalar(self, name: str) -> float | None:
        """Return the number behind a constant of one element."""
        array = self.constant(name)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None

    def is_data(self, name: str) -> bool:
        """Return whether a value is computed from what the model is fed, once for all rounds."""
        inside = name in self.carried or name in self.iterations
        return name in self.dynamic and not inside

    def root(self, name: str) -> str:
        """Return what a chain of views starts from."""
        node = self.maker(name)
        while node is not None and node.op_type in VIEWS:
            name = node.input[0]
            node = self.maker(name)
        return self.through(name)

    def behind(self, name: str, stops: frozenset[str] | set[str] = frozenset()) -> set[str]:
        """Return all values that `name` is computed from, itself included, up to `stops`."""
        seen: set[str] = set()
        stack = [self.through(name)]
        while stack:
            current = stack.pop()
            if current in seen:
                continue
            seen.add(current)
            node = self.makers.get(current)
            if node is None or current in stops:
                continue
            stack.extend(self.through(n) for n in node.input if n and n not in seen)
        return seen


def constant_of(node: onnx.NodeProto) -> Array | None:
    """Return the value of a Constant node of the usual kinds."""
    (item,) = node.attribute
    value = onnx.helper.get_attribute_value(item)
    match item.name:
        case "value":
            return numpy_helper.to_array(value)
        case "value_int" | "value_ints":
            return np.asarray(value, np.int64)
        case "value_float" | "value_floats":
            return np.asarray(value, np.float32)
        case _:
            return None


def extract(
    graph: onnx.GraphProto, output: str, inputs: Sequence[str], nodes: Sequence[onnx.NodeProto]
) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Return the outer nodes and initializers that `output` needs, given `inputs`."""
    wanted, kept = {output}, []
    for node in reversed(nodes):
        if wanted.intersection(node.output) and not set(node.output) <= set(inputs):
            kept.append(node)
            wanted.update(name for name in reads(node) if name not in inputs)
    stored = [tensor for tensor in graph.initializer if tensor.name in wanted]
    return kept[::-1], stored


def widths(view: GraphView, name: str) -> int | None:
    """Return the size of the last axis of expert choices: what top-k or arg-max say."""
    node = view.maker(name)
    if node is None:
        return None
    match node.op_type:
        case "TopK":
            k = view.scalar(node.input[1])
            return None if k is None else int(k)
        case "Concat":
            parts = [widths(view, part) for part in node.input]
            return None if None in parts else sum(p for p in parts if p is not None)
        case "ArgMax":
            return 1 if attribute(node, "keepdims", 1) else None
        case "Cast" | "Identity":
            return widths(view, node.input[0])
        case _:
            return None


def router_shape(view: GraphView, index: str) -> tuple[int, int] | None:
    """Return how many experts the router behind expert ids knows, and the width of its rows."""
    name: str | None = index
    seen = set()
    while name is not None and name not in seen:
        seen.add(name)
        node = view.maker(name)
        if node is None or not node.input:
            return None
        if node.op_type in _WORK:
            weight = view.constants.get(node.input[1])
            if weight is None or weight.ndim != 2:
                return None
            turned = node.op_type == "Gemm" and bool(attribute(node, "transB", 0))
            experts, width = weight.shape if turned else weight.shape[::-1]
            return int(experts), int(width)
        name = next((n for n in node.input if n in view.dynamic), None)
    return None
