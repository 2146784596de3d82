"""How large a parsed model is before anything works on it: nodes, nesting, tensors.

`onnx_file` asks before the ONNX checker and the inliner see the model; both are C++ and follow
functions and subgraphs by recursion.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from compiler.errors import MalformedModelError
from compiler.frontend.limits import ImportLimits, exceeded

FunctionKey = tuple[str, str, str]
"""Domain, name and overload of a function."""


def check_size(model: onnx.ModelProto, name: str, limits: ImportLimits) -> None:
    """Check nesting and number of nodes, as they will be when all functions are inlined.

    Args:
        model: Parsed, otherwise unchecked.
        name: The file's name, for messages.
        limits: What is allowed.

    Raises:
        LimitError: Too many nodes or too deep.
        MalformedModelError: A function calls itself, or two functions have one name.
    """
    functions: dict[FunctionKey, onnx.FunctionProto] = {}
    for function in model.functions:
        key = (function.domain, function.name, function.overload)
        if key in functions:
            raise MalformedModelError(f"{name} has function {key[0]}::{key[1]} twice")
        functions[key] = function
    counter = _NodeCounter(functions, name, limits)
    counter.count(model.graph.node, 0, ())


@dataclass(frozen=True, slots=True)
class _Size:
    """Nodes below a place, and how many graphs and functions are nested there."""

    nodes: int
    height: int


@dataclass(slots=True)
class _NodeCounter:
    """Counts nodes of a file; functions are counted once and added per call."""

    functions: Mapping[FunctionKey, onnx.FunctionProto]
    file: str
    limits: ImportLimits
    sizes: dict[FunctionKey, _Size] = field(default_factory=dict)

    def count(
        self, nodes: Sequence[onnx.NodeProto], depth: int, callers: tuple[FunctionKey, ...]
    ) -> _Size:
        total, height = 0, 0
        for node in nodes:
            found = self._one(node, depth, callers)
            total, height = total + found.nodes, max(height, found.height)
            if total > self.limits.max_nodes:
                what = f"{self.file} has more than {self.limits.max_nodes} nodes"
                raise exceeded("max_nodes", f"{what} with its functions inlined", self.limits)
            if depth + height > self.limits.max_nesting:
                what = f"{self.file} nests graphs and functions {depth + height} deep"
                raise exceeded("max_nesting", what, self.limits)
        return _Size(total, height)

    def _one(self, node: onnx.NodeProto, depth: int, callers: tuple[FunctionKey, ...]) -> _Size:
        if depth > self.limits.max_nesting:
            what = f"{self.file} nests graphs and functions {depth} deep"
            raise exceeded("max_nesting", what, self.limits)
        below = [self.count(graph.node, depth + 1, callers) for graph in subgraphs(node)]
        key = (node.domain, node.op_type, node.overload)
        function = self.functions.get(key)
        if function is not None:
            if key in callers:
                raise MalformedModelError(f"{self.file}: function {key[0]}::{key[1]} calls itself")
            if key not in self.sizes:
                self.sizes[key] = self.count(function.node, depth + 1, (*callers, key))
            below.append(self.sizes[key])
        height = max((size.height + 1 for size in below), default=0)
        return _Size(1 + sum(size.nodes for size in below), height)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs that a node holds in its attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor: initializers and attributes, in subgraphs and functions too."""
    graphs = [model.graph]
    nodes = [node for function in model.functions for node in function.node]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield sparse.values
                yield sparse.indices
            nodes.extend(graph.node)
            continue
        node = nodes.pop()
        graphs.extend(subgraphs(node))
        for attribute in node.attribute:
            yield from _attribute_tensors(attribute)


def _attribute_tensors(attribute: onnx.AttributeProto) -> Iterator[onnx.TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
        yield sparse.values
        yield sparse.indices
