"""One expert's body, rewritten to run for all choices of all tokens at once.

    body of expert e:  rows (n, D) -> MatMul(rows, Transpose(w[e])) -> ...
    batched:           rows (T*k, 1, D) -> MatMul(rows, Transpose(Gather(w, choices))) -> ...

Every value gets one more axis in front, one entry per (token, choice); axes and permutations move
by one. Constants that differ between the bodies of different experts become stacks; constants that
are the same stay. The outcome is plain ONNX that any runtime executes for any number of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from compiler.frontend.graph_view import GraphView, attribute
from compiler.frontend.moe_regions import Region
from compiler.frontend.values import Array

_AS_THEY_ARE: Final = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Neg", "Exp", "Cast", "Sqrt"),
        *("Sigmoid", "Relu", "Clip", "Erf", "Tanh", "Gelu", "Swish", "MatMul", "Identity"),
        *("Shape", "Gather", "Slice", "Split", "Concat"),
    }
)
_TAKES: Final = frozenset({"Gather", "GatherND"})


class BodyError(Exception):
    """A body holds something that cannot be batched, or bodies differ in structure."""


@dataclass(slots=True)
class _Value:
    """A batched value: its name, and whether it has the extra axis."""

    name: str
    batched: bool


@dataclass(slots=True)
class Batch:
    """Writes the batched form of a region.

    Attributes:
        experts: Expert ids of the bodies, in the order of `region.bodies`; None if computed.
        stacked: The greatest number of experts in any stack.
    """

    view: GraphView
    region: Region
    prefix: str
    experts: Sequence[int] | None
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    stacked: int = 0
    _done: dict[tuple[str, ...], _Value] = field(default_factory=dict)

    def write(self, result: str) -> None:
        """Append nodes that compute `result`, the region's result, from x, index and gate.

        Raises:
            BodyError: The bodies are not the same function of different weights.
        """
        region = self.region
        outs = [body.out for body in region.bodies]
        width = self._last_size(region.index)
        self._choices = self.op("Reshape", region.index, self.ints(-1))
        lone = self.op("Unsqueeze", region.x, self.ints(1))
        spread = self.op(
            "Expand", lone, self.op("Concat", self.ints(1), width, self.ints(1), axis=0)
        )
        size = self._last_size(region.x)
        self._rows = self.op("Reshape", spread, self.op("Concat", self.ints(-1, 1), size, axis=0))
        out = self._emit(outs if self.experts is not None else outs[:1])
        if not out.batched:
            raise BodyError("the result does not depend on the rows")
        flat = self.op("Reshape", out.name, self.op("Concat", self.ints(-1), size, axis=0))
        gates = self.op("Reshape", region.gate, self.ints(-1, 1))
        weighed = self.op("Mul", flat, gates)
        sizes = self.op("Concat", self.ints(-1), width, size, axis=0)
        choices = self.op("Reshape", weighed, sizes)
        node = helper.make_node(
            "ReduceSum", [choices, self.ints(1)], [result], name=self._fresh(), keepdims=0
        )
        self.nodes.append(node)

    def holds_stacks(self) -> bool:
        """Return whether bodies with written ids take their weights from stacks of all experts."""
        behind = self.view.behind(self.region.bodies[0].out, stops={self.region.x})
        makers = [self.view.makers[name] for name in behind if name in self.view.makers]
        return any(
            node.op_type == "Gather" and node.input[0] in self.view.constants for node in makers
        )

    _choices: str = ""
    _rows: str = ""

    # --- writing ---------------------------------------------------------------------------------

    def _fresh(self) -> str:
        return f"{self.prefix}{len(self.nodes) + len(self.initializers)}"

    def op(self, kind: str, *inputs: str, count: int = 1, **attrs: object) -> str:
        """Append a node and return its first result."""
        names = [self._fresh() + (f"_{at}" if at else "") for at in range(count)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=names[0], **attrs))  # type: ignore[arg-type]
        return names[0]

    def const(self, array: Array) -> str:
        """Store an array and return its name."""
        name = self._fresh()
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def ints(self, *values: int) -> str:
        """Store a list of integers."""
        return self.const(np.asarray(values, np.int64))

    def _last_size(self, name: str) -> str:
        return self.op("Gather", self.op("Shape", name), self.ints(-1), axis=0)

    # --- bodies ----------------------------------------------------------------------------------

    def _emit(self, names: Sequence[str]) -> _Value:
        """Return the batched form of a value that is `names[j]` in body j."""
        names = [self.view.through(name) for name in names]
        key = tuple(names)
        if key not in self._done:
            self._done[key] = self._make(names)
        return self._done[key]

    def _make(self, names: Sequence[str]) -> _Value:
        arrays = [self.view.constant(name) for name in names]
        known = [array for array in arrays if array is not None]
        if len(known) == len(names):
            return self._constant(known)
        if names[0] == self.region.x:  # made by no node where it is an input of the graph
            return _Value(self._rows, batched=True)
        makers = [self.view.maker(name) for name in names]
        nodes = [node for node in makers if node is not None]
        if len(nodes) != len(names) or len({node.op_type for node in nodes}) != 1:
            raise BodyError("the experts are not built alike")
        if self._takes_rows(nodes[0]):
            return _Value(self._rows, batched=True)
        stack = self._selected(nodes[0]) if self.experts is None else self._shared_stack(nodes)
        if stack is not None:
            return self._pick(stack)
        if any(_settings(node) != _settings(nodes[0]) for node in nodes):
            raise BodyError("operations of different experts have different attributes")
        if nodes[0].op_type == "Gemm":
            return self._gemm(nodes)
        return self._operation(nodes, list(nodes[0].output).index(names[0]))

    def _takes_rows(self, node: onnx.NodeProto) -> bool:
        return node.op_type in _TAKES and self.view.through(node.input[0]) == self.region.x

    def _selected(self, node: onnx.NodeProto) -> Array | None:
        """Return the stack that a computed expert id selects from."""
        if node.op_type != "Gather" or attribute(node, "axis", 0) != 0:
            return None
        stack = self.view.constants.get(node.input[0])
        computed = self.view.constant(node.input[1]) is None
        return stack if stack is not None and stack.ndim >= 1 and computed else None

    def _shared_stack(self, nodes: Sequence[onnx.NodeProto]) -> Array | None:
        """Return the stack that every body takes its own expert's entry of."""
        first = nodes[0]
        if self.experts is None or first.op_type != "Gather" or attribute(first, "axis", 0) != 0:
            return None
        stack = self.view.constants.get(first.input[0])
        taken = [self.view.scalar(node.input[1]) for node in nodes]
        same = all(node.input[0] == first.input[0] for node in nodes)
        return stack if same and taken == list(self.experts) else None

    def _constant(self, arrays: Sequence[Array]) -> _Value:
        first = arrays[0]
        same = all(a.shape == first.shape and np.array_equal(a, first) for a in arrays)
        if same and (first.size == 1 or first.dtype == np.int64 or len(arrays) > 1):
            return _Value(self.const(first), batched=False)
        if self.experts is None or any(a.shape != first.shape for a in arrays):
            raise BodyError("the weights of different experts have different shapes")
        order = np.argsort(np.asarray(self.experts))
        return self._pick(np.stack([arrays[at] for at in order]))

    def _pick(self, stack: Array) -> _Value:
        """Select each choice's entry of a stack (E, ...); vectors become rows."""
        self.stacked = max(self.stacked, len(stack))
        picked = self.op("Gather", self.const(stack), self._choices, axis=0)
        missing = 2 - (stack.ndim - 1)
        if missing > 0:
            picked = self.op("Unsqueeze", picked, self.ints(*range(1, 1 + missing)))
        return _Value(picked, batched=True)

    def _operands(self, nodes: Sequence[onnx.NodeProto]) -> list[_Value]:
        if len({len(node.input) for node in nodes}) != 1:
            raise BodyError("operations of different experts have different operands")
        return [
            _Value("", batched=False)
            if not nodes[0].input[at]
            else self._emit([node.input[at] for node in nodes])
            for at in range(len(nodes[0].input))
        ]

    def _operation(self, nodes: Sequence[onnx.NodeProto], result: int) -> _Value:
        node = nodes[0]
        operands = self._operands(nodes)
        batched = any(operand.batched for operand in operands)
        names = [operand.name for operand in operands]
        attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        kind = node.op_type
        if batched and kind == "Transpose":
            perm = attrs.get("perm", [1, 0])
            attrs["perm"] = [0, *(axis + 1 for axis in perm)]
        elif batched and kind == "Shape":
            attrs = {"start": 1 + int(attrs.get("start", 0))}
            batched = False
        elif batched and kind in ("Slice", "Split", "Concat", "Gather"):
            self._shift_axes(kind, names, attrs, operands)
        elif kind not in _AS_THEY_ARE and kind != "Transpose":
            raise BodyError(f"operator {kind} inside an expert")
        first = self.op(kind, *names, count=len(node.output), **attrs)
        return _Value(first + (f"_{result}" if result else ""), batched)

    def _shift_axes(
        self, kind: str, names: list[str], attrs: dict[str, object], operands: list[_Value]
    ) -> None:
        """Move axes that are counted from the front."""
        if kind == "Slice":
            if len(names) < 4 or not operands[0].batched or any(o.batched for o in operands[1:]):
                raise BodyError("Slice without axes inside an expert")
            axes = self._known(names[3]).reshape(-1)
            names[3] = self.ints(*(int(a) + 1 if a >= 0 else int(a) for a in axes))
            return
        axis = attrs.get("axis", 0)
        assert isinstance(axis, int)
        if kind == "Gather" and not operands[0].batched:
            raise BodyError("Gather by data inside an expert")
        attrs["axis"] = axis + 1 if axis >= 0 else axis

    def _known(self, name: str) -> Array:
        for tensor in self.initializers:
            if tensor.name == name:
                return numpy_helper.to_array(tensor)
        raise BodyError("axes of Slice are not constant")

    def _gemm(self, nodes: Sequence[onnx.NodeProto]) -> _Value:
        """Write Gemm as a product and a sum, which broadcast."""
        node, operands = nodes[0], self._operands(nodes)
        plain = attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1.0
        if not plain or attribute(node, "transA", 0):
            raise BodyError("Gemm with factors inside an expert")
        weight = operands[1]
        if attribute(node, "transB", 0):
            perm = [0, 2, 1] if weight.batched else [1, 0]
            weight = _Value(self.op("Transpose", weight.name, perm=perm), weight.batched)
        out = self.op("MatMul", operands[0].name, weight.name)
        if len(operands) > 2 and operands[2].name:
            out = self.op("Add", out, operands[2].name)
        return _Value(out, batched=operands[0].batched or weight.batched)


def _settings(node: onnx.NodeProto) -> list[bytes]:
    return sorted(a.SerializeToString() for a in node.attribute)
