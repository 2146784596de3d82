"""Movement operations of dialect `sp`: they only say which element goes where.

`compiler.analysis.movement` evaluates chains of them.
"""

from collections.abc import Sequence
from typing import Final

from xdsl.dialects.builtin import DenseArrayBase, IntegerAttr, StringAttr, TensorType
from xdsl.ir import SSAValue
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    prop_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.traits import Pure

from compiler.dialects.dims import Dim, parse_dim, witnesses
from compiler.dialects.invariant import SparsityInvariant
from compiler.dialects.properties import element_count, integer, integers, require
from compiler.dialects.types import dtype_of, shape_of, symbols_of, tensor_type


@irdl_op_definition
class ReshapeOp(IRDLOperation):
    """The same elements in the same flat order under another shape."""

    name = "sp.reshape"
    x = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(self, x: SSAValue, shape: Sequence[Dim]) -> None:
        super().__init__(operands=[x], result_types=[tensor_type(dtype_of(x), shape)])

    def verify_(self) -> None:
        """The number of elements may not change."""
        symbols = symbols_of(self.x) | symbols_of(self.result)
        same = element_count(self.x, symbols) == element_count(self.result, symbols)
        require(same, self, f"element counts differ: {self.x.type} and {self.result.type}")


@irdl_op_definition
class ExpandOp(IRDLOperation):
    """Repetition along axes of size one (numpy broadcasting)."""

    name = "sp.expand"
    x = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(self, x: SSAValue, shape: Sequence[Dim]) -> None:
        super().__init__(operands=[x], result_types=[tensor_type(dtype_of(x), shape)])

    def verify_(self) -> None:
        """Axes align from the right; a size other than one must stay."""
        source, target = shape_of(self.x), shape_of(self.result)
        require(len(source) <= len(target), self, "the result has fewer axes")
        for a, b in zip(reversed(source), reversed(target), strict=False):
            require(a in (b, Dim(1)), self, f"axis of size {a} cannot become {b}")


@irdl_op_definition
class TransposeOp(IRDLOperation):
    """Result axis i is operand axis `perm[i]`."""

    name = "sp.transpose"
    x = operand_def(TensorType)
    perm = prop_def(DenseArrayBase)
    result = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(self, x: SSAValue, perm: Sequence[int]) -> None:
        shape = shape_of(x)
        super().__init__(
            operands=[x],
            properties={"perm": integers(perm)},
            result_types=[tensor_type(dtype_of(x), [shape[p] for p in perm])],
        )

    def verify_(self) -> None:
        """`perm` is a permutation and the result has the permuted shape."""
        perm = [int(p) for p in self.perm.get_values()]
        shape = shape_of(self.x)
        require(sorted(perm) == list(range(len(shape))), self, f"{perm} is not a permutation")
        require(shape_of(self.result) == tuple(shape[p] for p in perm), self, "wrong result shape")


@irdl_op_definition
class SliceOp(IRDLOperation):
    """Elements `start, start+step, ...` of one axis; the count is the result's size there."""

    name = "sp.slice"
    x = operand_def(TensorType)
    axis = prop_def(IntegerAttr)
    start = prop_def(StringAttr)
    step = prop_def(IntegerAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(self, x: SSAValue, axis: int, start: Dim, count: Dim, step: int = 1) -> None:
        shape = list(shape_of(x))
        shape[axis] = count
        super().__init__(
            operands=[x],
            properties={
                "axis": integer(axis),
                "start": StringAttr(str(start)),
                "step": integer(step),
            },
            result_types=[tensor_type(dtype_of(x), shape)],
        )

    @property
    def offset(self) -> Dim:
        """The index of the first element, counted from the front."""
        return parse_dim(self.start.data)

    def verify_(self) -> None:
        """The slice stays inside its axis for every witness; other axes do not change."""
        axis, step = self.axis.value.data, self.step.value.data
        source, target = shape_of(self.x), shape_of(self.result)
        require(0 <= axis < len(source) == len(target), self, f"no axis {axis}")
        require(source[:axis] == target[:axis], self, "another axis changes")
        require(source[axis + 1 :] == target[axis + 1 :], self, "another axis changes")
        for binding in witnesses(symbols_of(self.x) | symbols_of(self.result)):
            first, count = self.offset.at(binding), target[axis].at(binding)
            ends = (first, first + (count - 1) * step)
            inside = count == 0 or (min(ends) >= 0 and max(ends) < source[axis].at(binding))
            require(inside, self, "the slice leaves its operand")


@irdl_op_definition
class ConcatOp(IRDLOperation):
    """Operands one after the other along `axis`."""

    name = "sp.concat"
    parts = var_operand_def(TensorType)
    axis = prop_def(IntegerAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(self, parts: Sequence[SSAValue], axis: int) -> None:
        shape = list(shape_of(parts[0]))
        shape[axis] = Dim(0)
        for part in parts:
            shape[axis] = shape[axis] + shape_of(part)[axis]
        super().__init__(
            operands=[list(parts)],
            properties={"axis": integer(axis)},
            result_types=[tensor_type(dtype_of(parts[0]), shape)],
        )

    def verify_(self) -> None:
        """All other axes agree and sizes along `axis` add up."""
        axis = self.axis.value.data
        require(bool(self.parts), self, "there is nothing to join")
        shapes = [shape_of(part) for part in self.parts]
        target = shape_of(self.result)
        require(0 <= axis < len(target), self, f"no axis {axis}")
        total = Dim(0)
        for shape in shapes:
            require(len(shape) == len(target), self, "ranks differ")
            total = total + shape[axis]
            others = shape[:axis] + shape[axis + 1 :]
            require(others == target[:axis] + target[axis + 1 :], self, "another axis differs")
        require(total == target[axis], self, f"{total} elements along a result axis of {target}")


MOVEMENT_OPS: Final = (ReshapeOp, ExpandOp, TransposeOp, SliceOp, ConcatOp)
