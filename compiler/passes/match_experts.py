"""What a mixture of experts looks like inside: stacks of matrices, biases, and what joins them.

Used by `raise_moe_experts`. Nothing here decides that a group of operations *is* a mixture; it
collects what a hypothesis needs (`compiler.passes.hypotheses`), and the judge decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import Array, ConstantTable
from compiler.dialects.dims import Dim
from compiler.dialects.movement import MOVEMENT_OPS, ReshapeOp, TransposeOp
from compiler.dialects.sp import ConstantOp, OnnxOp
from compiler.dialects.types import shape_of
from compiler.passes.match import onnx

ELEMENTWISE: Final = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Neg", "Exp", "Cast", "Identity"),
        *("Sigmoid", "Swish", "Relu", "Clip", "Erf", "Tanh", "Gelu"),
    }
)
_GATHERS: Final = frozenset({"Gather", "GatherND"})


@dataclass(slots=True)
class Reach:
    """What the elementwise operations behind a value read.

    Attributes:
        products: Matrix products.
        biases: Constants of more than one element, (E, N), gathered or spread over the experts.
        scalars: Constants of one element with the operation that reads them.
        operations: The elementwise operations passed.
    """

    products: list[OnnxOp] = field(default_factory=list)
    biases: list[Array] = field(default_factory=list)
    scalars: list[tuple[OnnxOp, float]] = field(default_factory=list)
    operations: list[OnnxOp] = field(default_factory=list)

    @property
    def kinds(self) -> set[str]:
        """Names of the operations passed."""
        return {op.op.data for op in self.operations}


def reach(value: SSAValue, constants: ConstantTable) -> Reach | None:
    """Collect what `value` is computed from; None if something unknown is among it."""
    found, seen, stack = Reach(), {value}, [value]
    while stack:
        owner = stack.pop().owner
        operands: Sequence[SSAValue] = ()
        if isinstance(owner, MOVEMENT_OPS):
            operands = owner.operands
        elif isinstance(owner, OnnxOp) and owner.op.data in ELEMENTWISE:
            found.operations.append(owner)
            operands = _elements(owner, found, constants)
        elif isinstance(owner, OnnxOp) and owner.op.data == "MatMul":
            found.products.append(owner)
        elif not _take_bias(owner, found, constants):
            return None
        stack.extend(operand for operand in operands if operand not in seen)
        seen.update(operands)
    return found


def _elements(op: OnnxOp, found: Reach, constants: ConstantTable) -> list[SSAValue]:
    """Note the scalar operands of `op` and return the others."""
    numbers = [(operand, constants.scalar(operand)) for operand in op.arguments]
    found.scalars += [(op, number) for _, number in numbers if number is not None]
    return [operand for operand, number in numbers if number is None]


def _take_bias(owner: object, found: Reach, constants: ConstantTable) -> bool:
    array = None
    if isinstance(owner, ConstantOp):
        array = constants.of(owner)
    elif isinstance(owner, OnnxOp) and owner.op.data in _GATHERS:
        array = constants.get(owner.arguments[0])
    if array is None or array.ndim < 2:
        return False
    found.biases.append(array.reshape(len(array), -1))
    return True


@dataclass(frozen=True, slots=True)
class Stack:
    """A product of each expert's matrix with vectors.

    Attributes:
        weight: (E, N, K), so that a result row is `weight[e] @ vector`.
        index: The expert ids that select matrices, any shape; None if all experts multiply.
        vector: The other operand.
    """

    weight: Array
    index: SSAValue | None
    vector: SSAValue


def stack_of(product: OnnxOp, constants: ConstantTable) -> Stack | None:
    """Return the stack that a product multiplies with, or None."""
    for at in (0, 1):
        operand, turned = _unturned(product.arguments[at])
        gather = onnx(operand, "GatherND") or onnx(operand, "Gather")
        source = operand if gather is None else gather.arguments[0]
        weight = constants.get(source)
        if weight is None or weight.ndim != 3 or len(weight) < 2:
            continue
        oriented = weight if (at == 0) != turned else np.swapaxes(weight, 1, 2)
        index = None if gather is None else gather.arguments[1]
        return Stack(oriented, index, product.arguments[1 - at])
    return None


def _unturned(value: SSAValue) -> tuple[SSAValue, bool]:
    """Return what a transposition of the last two of three axes turns, and whether there is one."""
    owner = value.owner
    if isinstance(owner, TransposeOp) and owner.perm.get_values() == (0, 2, 1):
        return owner.operands[0], True
    return value, False


def root(value: SSAValue) -> SSAValue:
    """Return what a chain of movement with one operand each starts from."""
    while True:
        owner = value.owner
        tile = onnx(value, "Tile")
        if tile is not None:
            value = tile.arguments[0]
        elif isinstance(owner, MOVEMENT_OPS) and len(owner.operands) == 1:
            value = owner.operands[0]
        else:
            return value


def choice_matrix(value: SSAValue, rows: Dim | None = None) -> SSAValue | None:
    """Return the value (.., T, k) that `value` is a reshape of; its last axis is the choices."""
    found = None
    while True:
        shape = shape_of(value)
        if len(shape) >= 2 and shape[-1].is_static and rows in (None, leading(value)):
            found = value
        owner = value.owner
        if not isinstance(owner, MOVEMENT_OPS) or len(owner.operands) != 1:
            return found
        if rows is None and not isinstance(owner, ReshapeOp):
            return found
        value = owner.operands[0]


def leading(value: SSAValue) -> Dim | None:
    """Return the product of all axes but the last, if at most one of them has a run-time size."""
    total = Dim(1)
    for dim in shape_of(value)[:-1]:
        if not dim.is_static and not total.is_static:
            return None
        total = total.times(dim.constant) if dim.is_static else dim.times(total.constant)
    return total


def owner_of(value: SSAValue) -> Operation:
    """Return the operation that makes `value`."""
    assert isinstance(value.owner, Operation)
    return value.owner
