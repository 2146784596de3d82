"""Backward slices of the IR, and the same slice as an ONNX model of fixed sizes.

`compiler.passes.judge` runs such models in ONNX Runtime; what an imported operation means is then
decided by the reference implementation and not by our reading of it. Only imported operations,
constants and movement can be part of a slice: anything else has been raised already.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper, numpy_helper
from xdsl.ir import BlockArgument, Operation, SSAValue

from compiler.analysis.constants import Array, ConstantTable
from compiler.dialects.dims import Binding
from compiler.dialects.movement import (
    MOVEMENT_OPS,
    ConcatOp,
    ExpandOp,
    ReshapeOp,
    SliceOp,
    TransposeOp,
)
from compiler.dialects.sp import ConstantOp, OnnxOp
from compiler.dialects.types import dtype_of, sizes_at
from compiler.passes.match import plain

OPSET: Final = 21
CONTRIB: Final = "com.microsoft"
_ABSENT_ATTRS: Final = frozenset({"saturate", "round_mode", "stash_type"})
_FED_BYTES: Final = 1 << 16
"""Constants above this are fed instead of copied into the model, which may not exceed 2 GiB."""


def backward(outputs: Sequence[SSAValue], stops: Sequence[SSAValue]) -> list[Operation] | None:
    """Return the operations between `stops` and `outputs`, operands first.

    None if something else than a stop is reached that no imported operation makes.
    """
    seen: set[SSAValue] = set(stops)
    order: dict[Operation, None] = {}
    stack: list[tuple[SSAValue, bool]] = [(value, False) for value in reversed(outputs)]
    while stack:
        value, expanded = stack.pop()
        owner = value.owner
        if expanded:
            assert isinstance(owner, Operation)
            order[owner] = None
            continue
        if value in seen:
            continue
        seen.add(value)
        if not isinstance(owner, (OnnxOp, ConstantOp, *MOVEMENT_OPS)):
            return None
        stack.append((value, True))
        stack.extend((operand, False) for operand in reversed(owner.operands))
    return list(order)


def run_time_leaves(outputs: Sequence[SSAValue], stops: Sequence[SSAValue]) -> set[SSAValue]:
    """Return what `outputs` depend on that is no constant and no imported operation's result."""
    found: set[SSAValue] = set()
    seen: set[SSAValue] = set()
    stack = list(outputs)
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        owner = value.owner
        if value in stops or isinstance(owner, BlockArgument):
            found.add(value)
        elif isinstance(owner, (OnnxOp, *MOVEMENT_OPS)):
            stack.extend(owner.operands)
        elif not isinstance(owner, ConstantOp):
            found.add(value)
    return found


class SliceModel:
    """An ONNX model of one slice under one binding of the run-time lengths."""

    def __init__(self, constants: ConstantTable, binding: Binding) -> None:
        self.constants, self.binding = constants, binding
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.names: dict[SSAValue, str] = {}
        self.fed: dict[str, Array] = {}

    def build(
        self,
        operations: Sequence[Operation],
        inputs: Mapping[SSAValue, Array],
        outputs: Sequence[SSAValue],
    ) -> tuple[onnx.ModelProto, dict[str, Array]]:
        """Return the model and what to feed it."""
        for value, array in inputs.items():
            self._feed(value, array)
        for op in operations:
            self._add(op)
        feeds = [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            )
            for name, array in self.fed.items()
        ]
        results = [
            helper.make_tensor_value_info(
                self.names[value],
                helper.np_dtype_to_tensor_dtype(np.dtype(dtype_of(value))),
                sizes_at(value, self.binding),
            )
            for value in outputs
        ]
        graph = helper.make_graph(self.nodes, "slice", feeds, results, self.initializers)
        imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10), self.fed

    def _feed(self, value: SSAValue, array: Array) -> None:
        name = f"in{len(self.fed)}"
        self.names[value] = name
        self.fed[name] = array

    def _constant(self, array: Array) -> str:
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def _integers(self, values: Sequence[int]) -> str:
        return self._constant(np.asarray(values, np.int64))

    def _add(self, op: Operation) -> None:
        if isinstance(op, ConstantOp):
            array = self.constants.of(op)
            if array.nbytes > _FED_BYTES:
                self._feed(op.result, array)
            else:
                self.names[op.result] = self._constant(array)
            return
        for result in op.results:
            self.names[result] = f"v{len(self.names)}"
        if isinstance(op, OnnxOp):
            self._onnx(op)
        else:
            self._movement(op)

    def _node(
        self,
        kind: str,
        op: Operation,
        inputs: Sequence[str],
        **attrs: Any,  # noqa: ANN401 - ONNX attributes are of many kinds
    ) -> None:
        outputs = [self.names[result] for result in op.results]
        domain, _, name = kind.rpartition("::")
        self.nodes.append(helper.make_node(name, inputs, outputs, domain=domain, **attrs))

    def _onnx(self, op: OnnxOp) -> None:
        kind = op.op.data
        inputs: list[str] = []
        for at in range(len(op.slots.get_values())):
            operand = op.operand_at(at)
            inputs.append(self.names[operand] if operand is not None else "")
        attrs: dict[str, Any] = {
            key: plain(value) for key, value in op.attrs.data.items() if key not in _ABSENT_ATTRS
        }
        if kind.startswith("Reduce"):
            axes = attrs.pop("axes")
            assert isinstance(axes, list)
            inputs.append(self._integers(axes))
        if kind == "TopK":
            k = attrs.pop("k")
            assert isinstance(k, int)
            inputs.append(self._integers([k]))
        if kind == "OneHot":
            axis = attrs["axis"]
            assert isinstance(axis, int)
            depth = sizes_at(op.outputs[0], self.binding)[axis]
            inputs.insert(1, self._constant(np.asarray(depth, np.int64)))
        if kind == "Tile":
            before = sizes_at(op.arguments[0], self.binding)
            after = sizes_at(op.outputs[0], self.binding)
            inputs.append(self._integers([b // a for a, b in zip(before, after, strict=True)]))
        self._node(kind, op, inputs, **attrs)

    def _movement(self, op: Operation) -> None:
        sizes = sizes_at(op.results[0], self.binding)
        names = [self.names[operand] for operand in op.operands]
        match op:
            case ReshapeOp():
                self._node("Reshape", op, [*names, self._integers(sizes)])
            case ExpandOp():
                self._node("Expand", op, [*names, self._integers(sizes)])
            case TransposeOp():
                self._node("Transpose", op, names, perm=[int(p) for p in op.perm.get_values()])
            case ConcatOp():
                self._node("Concat", op, names, axis=op.axis.value.data)
            case SliceOp():
                step, first = op.step.value.data, op.offset.at(self.binding)
                axis = op.axis.value.data
                stop = first + sizes[axis] * step
                stop = stop if stop >= 0 else -(1 << 62)
                parts = ([first], [stop], [axis], [step])
                self._node("Slice", op, [*names, *(self._integers(part) for part in parts)])
