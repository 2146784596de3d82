"""From evaluated ONNX nodes to an IR function.

Operations are created by a depth-first walk from the outputs in role order, operands left to right,
so neither names nor the order of nodes in the file leave a trace in the text. Constants are named
by content. Shape operands vanish: movement operations carry their result shape in the type.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from xdsl.dialects.builtin import (
    ArrayAttr,
    DictionaryAttr,
    StringAttr,
)
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from compiler.analysis.constants import ConstantTable
from compiler.dialects.dims import Dim, fit, symbol_dim
from compiler.dialects.movement import ConcatOp, ExpandOp, ReshapeOp, SliceOp, TransposeOp
from compiler.dialects.properties import integer, real
from compiler.dialects.sp import OnnxOp
from compiler.dialects.types import Tensor, is_supported_dtype, shape_of, tensor_type
from compiler.errors import MalformedModelError, UnsupportedOperatorError
from compiler.frontend import fold_rules
from compiler.frontend.evaluate import Evaluation
from compiler.frontend.length_values import POSITIONS, length_role
from compiler.frontend.onnx_ops import OPERATORS
from compiler.frontend.shape_rules import conv_geometry, reduce_axes
from compiler.frontend.values import Known, Node, axis_of
from compiler.passes.functions import ROLE
from compiler.passes.origins import Origins


@dataclass(frozen=True, slots=True)
class Argument:
    """One input of the function: ONNX name, role, type."""

    name: str
    role: str
    dtype: str
    shape: Sequence[Dim]


@dataclass(slots=True)
class FunctionBuilder:
    """Builds the function of one component."""

    component: str
    evaluation: Evaluation
    constants: ConstantTable
    origins: Origins
    block: Block = field(default_factory=Block)
    values: dict[str, SSAValue] = field(default_factory=dict)
    roles: list[str] = field(default_factory=list)
    constant_ops: dict[str, SSAValue] = field(default_factory=dict)
    passed_on: list[tuple[Node, SSAValue]] = field(default_factory=list)

    def build(self, arguments: Sequence[Argument], outputs: Sequence[tuple[str, str]]) -> FuncOp:
        """Build the function.

        Args:
            arguments: Inputs in canonical order.
            outputs: (ONNX name, role) in canonical order.
        """
        for at, argument in enumerate(arguments):
            kind = tensor_type(argument.dtype, argument.shape)
            self.values[argument.name] = self.block.insert_arg(kind, at)
            self.roles.append(argument.role)
        makers = {name: node for node in self.evaluation.nodes for name in node.outputs if name}
        for name, _ in outputs:
            self._visit(name, makers)
        results = [self.value_of(name) for name, _ in outputs]
        self.block.add_op(ReturnOp(*results))
        self._charge_passed_on()
        return FuncOp(
            self.component,
            (list(self.block.arg_types), [result.type for result in results]),
            Region(self.block),
            arg_attrs=_roles(self.roles),
            res_attrs=_roles([role for _, role in outputs]),
        )

    def _visit(self, name: str, makers: dict[str, Node]) -> None:
        stack = [(name, False)]
        while stack:
            current, expanded = stack.pop()
            if current in self.values or self._is_leaf(current, makers):
                continue
            node = makers.get(current)
            if node is None:
                raise MalformedModelError(
                    f"{self.component}: {current!r} is needed but nothing makes it"
                )
            if expanded:
                self._emit(node)
                continue
            stack.append((current, True))
            stack.extend((operand, False) for operand in reversed(self._operands(node)))

    def _is_leaf(self, name: str, makers: dict[str, Node]) -> bool:
        """Return whether `value_of` can make a value without the nodes before it.

        What depends on the lengths is worked out again at run time if its node can be: cosines of
        positions are known for every binding, and still have to be computed from the positions.
        """
        if not self.evaluation.is_known(name):
            return False
        if self.evaluation.constant(name) is not None or self.evaluation.uniform(name) is not None:
            return True
        node = makers.get(name)
        computed = node is not None and OPERATORS[node.op].build != "constant"
        return self._length_role(name) is not None or not computed

    def _length_role(self, name: str) -> str | None:
        return length_role(self.evaluation.values[name], self.evaluation.bindings)

    def _operands(self, node: Node) -> list[str]:
        absorbed = OPERATORS[node.op].absorbed
        return [name for at, name in enumerate(node.inputs) if name and at not in absorbed]

    def value_of(self, name: str) -> SSAValue:
        """Return the IR value of an ONNX value; constants are made where they are first read.

        Raises:
            UnsupportedOperatorError: The elements depend on the run-time lengths.
        """
        if name in self.values:
            return self.values[name]
        array = self.evaluation.constant(name)
        fill = self.evaluation.uniform(name) if array is None else None
        shape = self.evaluation.shape(name)
        if fill is not None and shape is not None:
            op = ExpandOp(self._constant(fill), shape)
            self.block.add_op(op)
            self.values[name] = op.result
            return op.result
        role = self._length_role(name) if array is None else None
        if role is not None and shape is not None:
            return self._argument_of(role, name, shape)
        if array is None:
            raise UnsupportedOperatorError(
                f"{self.component}: {name!r} depends on the run-time length and is used as data",
                hint="feed positions and masks as inputs with their roles",
            )
        return self._constant(array)

    def _argument_of(self, role: str, name: str, shape: list[Dim]) -> SSAValue:
        """Return the argument of a role, shaped as `name`; it is added when first read."""
        if role not in self.roles:
            dtype = self.evaluation.values[name][0].dtype
            whole = [Dim(1), symbol_dim("T")] if role == POSITIONS else shape
            self.block.insert_arg(tensor_type(dtype, whole), len(self.block.args))
            self.roles.append(role)
        argument = self.block.args[self.roles.index(role)]
        if list(shape_of(argument)) == shape:
            self.values[name] = argument
            return argument
        op = ReshapeOp(argument, shape)
        self.block.add_op(op)
        self.values[name] = op.result
        return op.result

    def _constant(self, array: np.ndarray) -> SSAValue:
        self._need_element_type(array.dtype.name, f"{self.component}: a constant")
        op = self.constants.add(array)
        key = op.sha256.data
        if key not in self.constant_ops:
            self.block.add_op(op)
            self.constant_ops[key] = op.result
        return self.constant_ops[key]

    def _emit(self, node: Node) -> None:
        row = OPERATORS[node.op]
        builder = _BUILDERS.get(row.build, _build_generic)
        types = [self._type(node, at) for at in range(len(node.outputs))]
        try:
            made = builder(self, node, types)
        except (ValueError, IndexError, TypeError) as error:
            raise MalformedModelError(f"operator {node.op} (node {node.name}): {error}") from error
        for name, value in zip(node.outputs, made, strict=False):
            if name:
                self.values[name] = value
                self.passed_on.append((node, value))

    def _charge_passed_on(self) -> None:
        """Give nodes that only hand a value on to what makes it, or else to what reads it."""
        for node, value in self.passed_on:
            owner = value.owner
            readers = [use.operation for use in value.uses]
            heirs = [owner] if isinstance(owner, Operation) else readers
            for heir in heirs:
                if not isinstance(heir, ReturnOp):
                    self.origins.give(heir, node.sources)

    def _type(self, node: Node, at: int) -> Tensor:
        name = node.outputs[at]
        if not name:
            return tensor_type("float32", [])
        shape = self.evaluation.shape(name)
        dtype = self.evaluation.values[name][0].dtype
        if shape is None:
            raise UnsupportedOperatorError(
                f"operator {node.op} (node {node.name}): a size is not linear in the lengths"
            )
        self._need_element_type(dtype, f"operator {node.op} (node {node.name}): a result")
        return tensor_type(dtype, shape)

    def _need_element_type(self, dtype: str, what: str) -> None:
        if not is_supported_dtype(dtype):
            raise UnsupportedOperatorError(
                f"{what} has element type {dtype}",
                hint="kernels compute in float32; indices are int32 or int64",
            )

    def add(self, op: Operation, node: Node) -> Operation:
        """Append an operation and remember which node it came from."""
        self.block.add_op(op)
        self.origins.give(op, node.sources)
        return op

    def shape(self, name: str) -> list[Dim]:
        """Return the sizes of an ONNX value whose type has been checked."""
        shape = self.evaluation.shape(name)
        assert shape is not None
        return shape


def _roles(roles: Sequence[str]) -> ArrayAttr[DictionaryAttr]:
    return ArrayAttr([DictionaryAttr({ROLE: StringAttr(role)}) for role in roles])


def _build_generic(b: FunctionBuilder, node: Node, types: list[Tensor]) -> list[SSAValue]:
    absorbed = OPERATORS[node.op].absorbed
    arguments = [
        b.value_of(name) if name else None
        for at, name in enumerate(node.inputs)
        if at not in absorbed
    ]
    op = b.add(OnnxOp(node.op, arguments, _attributes(b, node), types), node)
    return list(op.results)


def _build_identity(b: FunctionBuilder, node: Node, _types: list[Tensor]) -> list[SSAValue]:
    return [b.value_of(node.inputs[0])]


def _build_reshape(b: FunctionBuilder, node: Node, _types: list[Tensor]) -> list[SSAValue]:
    x = b.value_of(node.inputs[0])
    return list(b.add(ReshapeOp(x, b.shape(node.outputs[0])), node).results)


def _build_expand(b: FunctionBuilder, node: Node, _types: list[Tensor]) -> list[SSAValue]:
    x = b.value_of(node.inputs[0])
    return list(b.add(ExpandOp(x, b.shape(node.outputs[0])), node).results)


def _build_transpose(b: FunctionBuilder, node: Node, _types: list[Tensor]) -> list[SSAValue]:
    x = b.value_of(node.inputs[0])
    perm = node.attrs["perm"] or list(range(len(shape_of(x))))[::-1]
    return list(b.add(TransposeOp(x, perm), node).results)


def _build_concat(b: FunctionBuilder, node: Node, _types: list[Tensor]) -> list[SSAValue]:
    parts = [b.value_of(name) for name in node.inputs]
    axis = axis_of(int(node.attrs["axis"]), len(shape_of(parts[0])))
    return list(b.add(ConcatOp(parts, axis), node).results)


def _build_slice(b: FunctionBuilder, node: Node, _types: list[Tensor]) -> list[SSAValue]:
    x = b.value_of(node.inputs[0])
    evaluation = b.evaluation
    per_binding = [
        fold_rules.slices(node, [evaluation.values[n][at] if n else None for n in node.inputs])
        for at in range(len(evaluation.bindings))
    ]
    for axis, count in enumerate(b.shape(node.outputs[0])):
        starts = [slices[axis].start or 0 for slices in per_binding]
        steps = {1 if slices[axis].step is None else slices[axis].step for slices in per_binding}
        first = fit(starts, evaluation.bindings)
        if first is None or len(steps) != 1:
            raise UnsupportedOperatorError(
                f"operator Slice (node {node.name}): a bound is not linear in the lengths"
            )
        (step,) = steps
        if (first, count, step) != (Dim(0), shape_of(x)[axis], 1):
            x = b.add(SliceOp(x, axis, first, count, step), node).results[0]
    return [x]


def _build_split(b: FunctionBuilder, node: Node, types: list[Tensor]) -> list[SSAValue]:
    x = b.value_of(node.inputs[0])
    axis = axis_of(int(node.attrs["axis"]), len(shape_of(x)))
    results: list[SSAValue] = []
    start = Dim(0)
    for name, _ in zip(node.outputs, types, strict=True):
        count = b.shape(name)[axis]
        results.append(b.add(SliceOp(x, axis, start, count), node).results[0])
        start = start + count
    return results


def _build_gather(b: FunctionBuilder, node: Node, types: list[Tensor]) -> list[SSAValue]:
    index = b.evaluation.constant(node.inputs[1])
    runtime = b.evaluation.constant(node.inputs[0]) is None
    if index is None or index.ndim > 0 or not runtime:
        return _build_generic(b, node, types)
    x = b.value_of(node.inputs[0])
    axis = axis_of(int(node.attrs["axis"]), len(shape_of(x)))
    start = Dim(int(index)) if index >= 0 else shape_of(x)[axis] + Dim(int(index))
    one = b.add(SliceOp(x, axis, start, Dim(1)), node).results[0]
    return list(b.add(ReshapeOp(one, b.shape(node.outputs[0])), node).results)


_BUILDERS = {
    "identity": _build_identity,
    "reshape": _build_reshape,
    "expand": _build_expand,
    "transpose": _build_transpose,
    "concat": _build_concat,
    "slice": _build_slice,
    "split": _build_split,
    "gather": _build_gather,
}


def _attributes(b: FunctionBuilder, node: Node) -> dict[str, Attribute]:
    values = {key: value for key, value in node.attrs.items() if value is not None}
    first = b.evaluation.values[node.inputs[0]][0]
    operands = [b.evaluation.values[name][0] if name else None for name in node.inputs]
    rank = len(first.shape)
    if "axis" in values and node.op not in _FREE_AXIS:
        values["axis"] = axis_of(int(values["axis"]), rank + (node.op == "OneHot"))
    if node.op.startswith("Reduce"):
        values = {"axes": list(reduce_axes(node, operands)), "keepdims": values["keepdims"]}
    if node.op == "TopK":
        count = operands[1]
        assert isinstance(count, Known)
        values["k"] = int(count.array.reshape(-1)[0])
    if "auto_pad" in values:
        values = {key: value for key, value in values.items() if key not in _WORKED_OUT}
        values |= _window(b, node, first.shape)
    return {key: _attribute(value) for key, value in values.items()}


def _window(b: FunctionBuilder, node: Node, shape: Sequence[int]) -> dict[str, Any]:
    """Return the geometry of a convolution or pool with all pads worked out."""
    at = {"QLinearConv": 3}.get(node.op, 1)
    window = node.attrs["kernel_shape"] or b.evaluation.values[node.inputs[at]][0].shape[2:]
    out = None
    if node.op == "ConvTranspose":
        out = b.evaluation.values[node.outputs[0]][0].shape[2:]
    strides, dilations, pads = conv_geometry(node, shape[2:], window, out)
    geometry = {"strides": strides, "dilations": dilations, "pads": pads}
    return geometry if "Conv" in node.op else {**geometry, "kernel_shape": list(window)}


_WORKED_OUT: Final = frozenset({"auto_pad", "kernel_shape", "output_padding", "output_shape"})
"""Attributes of windows that the geometry makes superfluous."""
_FREE_AXIS: Final = frozenset({"QuantizeLinear", "DequantizeLinear"})
"""Operators whose axis does not simply number the axes of the first operand."""


def _attribute(value: object) -> Attribute:
    match value:
        case int():
            return integer(value)
        case float():
            return real(value)
        case str():
            return StringAttr(value)
        case list() | tuple():
            return ArrayAttr([_attribute(item) for item in value])
        case _:
            raise UnsupportedOperatorError(f"an attribute of type {type(value).__name__}")
