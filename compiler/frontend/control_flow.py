"""Control flow that is decided while importing: branches and loops become straight lines.

Before (the condition follows from constants and fixed sizes):
    y = If(cond) <then: {a = Relu(x) -> a}, else: {b = Neg(x) -> b}>
After:
    n0/a = Relu(x);  y = Identity(n0/a)

A loop with a known trip count is repeated; its scanned results are joined along a new first axis.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import onnx
from onnx import helper

from compiler.errors import UnsupportedOperatorError
from compiler.frontend.values import axis_of

MAX_TRIPS: Final = 1024
CONTROL: Final = frozenset({"If", "Loop", "Scan"})


def subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the graphs in a node's attributes."""
    return [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]


def subgraph(node: onnx.NodeProto, name: str) -> onnx.GraphProto:
    """Return the graph attribute `name`, which the checker has required."""
    graph: onnx.GraphProto = next(a.g for a in node.attribute if a.name == name)
    return graph


def reads(node: onnx.NodeProto) -> set[str]:
    """Return every name a node reads, those that its graphs capture included."""
    names = {name for name in node.input if name}
    for graph in subgraphs(node):
        inner = {name for child in graph.node for name in reads(child)}
        inner.update(info.name for info in graph.output)
        made = {name for child in graph.node for name in child.output}
        made.update(info.name for info in graph.input)
        made.update(item.name for item in graph.initializer)
        names |= inner - made
    return names


def renamed(
    graph: onnx.GraphProto, prefix: str, outer: Mapping[str, str]
) -> tuple[list[onnx.NodeProto], dict[str, str]]:
    """Return a graph's nodes with values of their own, and the new name of every visible value.

    Args:
        graph: Body of a branch or of one trip.
        prefix: Unique among all expansions.
        outer: New names of values around the graph and of its inputs.
    """
    names = dict(outer)
    for item in graph.initializer:
        names[item.name] = f"{prefix}{item.name}"
    nodes = []
    for item in graph.initializer:
        value = onnx.TensorProto()
        value.CopyFrom(item)
        nodes.append(helper.make_node("Constant", [], [names[item.name]], value=value))
    for child in graph.node:
        names.update((name, f"{prefix}{name}") for name in child.output if name)
    nodes += [_rename(child, names) for child in graph.node]
    return nodes, names


def rename_node(node: onnx.NodeProto, names: Mapping[str, str], label: str) -> onnx.NodeProto:
    """Return a node with other names of values, in its graphs too, and a name of its own."""
    copy = _rename(node, names)
    copy.name = label
    return copy


def _rename(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [names.get(name, name) for name in node.input]
    copy.output[:] = [names.get(name, name) for name in node.output]
    for attribute in copy.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            _rename_captured(attribute.g, names)
    return copy


def _rename_captured(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    own = {info.name for info in graph.input} | {item.name for item in graph.initializer}
    own |= {name for child in graph.node for name in child.output}
    visible = {key: value for key, value in names.items() if key not in own}
    for child in graph.node:
        child.input[:] = [visible.get(name, name) for name in child.input]
        for attribute in child.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename_captured(attribute.g, visible)
    for info in graph.output:
        info.name = visible.get(info.name, info.name)


def branch(node: onnx.NodeProto, condition: bool, prefix: str) -> list[onnx.NodeProto]:
    """Return the nodes that an `If` with a known condition stands for."""
    graph = subgraph(node, "then_branch" if condition else "else_branch")
    nodes, names = renamed(graph, prefix, {})
    for info, name in zip(graph.output, node.output, strict=True):
        if name:
            nodes.append(helper.make_node("Identity", [names.get(info.name, info.name)], [name]))
    return nodes


class LoopExpansion:
    """A `Loop` with a known trip count, one trip after the other."""

    def __init__(self, node: onnx.NodeProto, trips: int, prefix: str) -> None:
        """Start with the loop's initial values.

        Raises:
            UnsupportedOperatorError: More than `MAX_TRIPS` trips.
        """
        if trips > MAX_TRIPS:
            raise UnsupportedOperatorError(
                f"operator Loop (node {node.name or node.output[0]}) makes {trips} trips,"
                f" unrolled are at most {MAX_TRIPS}"
            )
        self.node = node
        self.trips = trips
        self.prefix = prefix
        self.body = subgraph(node, "body")
        self.carried = list(node.input[2:])
        self.scanned: list[list[str]] = [
            [] for _ in range(len(self.body.output) - 1 - len(self.carried))
        ]

    def trip(self, at: int) -> tuple[list[onnx.NodeProto], str]:
        """Return the nodes of one trip and the name of its condition."""
        prefix = f"{self.prefix}{at}/"
        count, condition = f"{prefix}trip", f"{prefix}condition"
        tensor = helper.make_tensor("value", onnx.TensorProto.INT64, [], [at])
        true = helper.make_tensor("value", onnx.TensorProto.BOOL, [], [True])
        heads = [
            helper.make_node("Constant", [], [count], value=tensor),
            helper.make_node("Constant", [], [condition], value=true),
        ]
        given = [count, condition, *self.carried]
        outer = {info.name: name for info, name in zip(self.body.input, given, strict=True)}
        nodes, names = renamed(self.body, prefix, outer)
        results = [names.get(info.name, info.name) for info in self.body.output]
        self.carried = results[1 : 1 + len(self.carried)]
        for rows, name in zip(self.scanned, results[1 + len(self.carried) :], strict=True):
            rows.append(name)
        return [*heads, *nodes], results[0]

    def finish(self) -> list[onnx.NodeProto]:
        """Return the nodes that give the loop's results their names."""
        nodes = []
        for source, name in zip(self.carried, self.node.output, strict=False):
            if name:
                nodes.append(helper.make_node("Identity", [source], [name]))
        for rows, name in zip(self.scanned, self.node.output[len(self.carried) :], strict=False):
            if name:
                nodes += _stacked(rows, name, 0, f"{name}/axes")
        return nodes


class ScanExpansion:
    """A `Scan` over axes of known size, one trip after the other."""

    def __init__(self, node: onnx.NodeProto, ranks: Sequence[int], prefix: str) -> None:
        """Start with the initial state.

        Args:
            node: The `Scan`.
            ranks: Numbers of axes of its operands.
            prefix: Unique among all expansions.
        """
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        self.node, self.trips, self.prefix = node, 0, prefix
        self.body: onnx.GraphProto = given["body"]
        count = int(given["num_scan_inputs"])
        self.state = list(node.input[: len(node.input) - count])
        self.given = list(node.input[len(self.state) :])
        axes = given.get("scan_input_axes") or [0] * count
        self.axes = [axis_of(a, r) for a, r in zip(axes, ranks[len(self.state) :], strict=True)]
        self.backward = given.get("scan_input_directions") or [0] * count
        made = len(node.output) - len(self.state)
        self.result_axes = given.get("scan_output_axes") or [0] * made
        self.result_backward = given.get("scan_output_directions") or [0] * made
        self.scanned: list[list[str]] = [[] for _ in range(made)]

    def check(self, sizes: set[int]) -> None:
        """Take the number of trips from the sizes of all scanned axes, under all lengths.

        Raises:
            UnsupportedOperatorError: It depends on the run-time lengths, or is above `MAX_TRIPS`.
        """
        where = f"operator Scan (node {self.node.name or self.node.output[0]})"
        if len(sizes) != 1:
            raise UnsupportedOperatorError(
                f"{where}: scanned axes have sizes {sorted(sizes)} or depend on the lengths",
                hint="pin the size of the scanned axis with --dim",
            )
        (self.trips,) = sizes
        if self.trips > MAX_TRIPS:
            raise UnsupportedOperatorError(
                f"{where} makes {self.trips} trips, unrolled are at most {MAX_TRIPS}",
                hint="scan a shorter axis, or cut the sequence into calls that carry the state",
            )

    def trip(self, at: int) -> list[onnx.NodeProto]:
        """Return the nodes of one trip."""
        prefix = f"{self.prefix}{at}/"
        heads, parts = [], []
        for i, (name, axis, back) in enumerate(
            zip(self.given, self.axes, self.backward, strict=True)
        ):
            place, part = f"{prefix}place{i}", f"{prefix}part{i}"
            number = self.trips - 1 - at if back else at
            value = helper.make_tensor("value", onnx.TensorProto.INT64, [], [number])
            heads.append(helper.make_node("Constant", [], [place], value=value))
            heads.append(helper.make_node("Gather", [name, place], [part], axis=axis))
            parts.append(part)
        given = [*self.state, *parts]
        outer = {info.name: name for info, name in zip(self.body.input, given, strict=True)}
        nodes, names = renamed(self.body, prefix, outer)
        results = [names.get(info.name, info.name) for info in self.body.output]
        self.state = results[: len(self.state)]
        for rows, name in zip(self.scanned, results[len(self.state) :], strict=True):
            rows.append(name)
        return [*heads, *nodes]

    def finish(self) -> list[onnx.NodeProto]:
        """Return the nodes that give the results their names."""
        nodes = [
            helper.make_node("Identity", [source], [name])
            for source, name in zip(self.state, self.node.output, strict=False)
            if name
        ]
        for at, (rows, name) in enumerate(
            zip(self.scanned, self.node.output[len(self.state) :], strict=True)
        ):
            if name:
                ordered = rows[::-1] if self.result_backward[at] else rows
                nodes += _stacked(ordered, name, self.result_axes[at], f"{name}/axes")
        return nodes


def _stacked(rows: Sequence[str], name: str, axis: int, axes: str) -> list[onnx.NodeProto]:
    """Return the nodes that join rows along a new axis."""
    tensor = helper.make_tensor("value", onnx.TensorProto.INT64, [1], [axis])
    lifted = [f"{name}/row/{at}" for at in range(len(rows))]
    return [
        helper.make_node("Constant", [], [axes], value=tensor),
        *(
            helper.make_node("Unsqueeze", [row, axes], [up])
            for row, up in zip(rows, lifted, strict=True)
        ),
        helper.make_node("Concat", lifted, [name], axis=axis),
    ]
