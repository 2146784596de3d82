"""Which elements are certainly zero: masks made by ReLUs, and how far they carry.

A *source* is a value whose producer ends in a ReLU. A value *carries* source s if every element is
zero wherever the element of s at the same flat place is zero, for every input of the model, in IEEE
arithmetic. The rules below are the ones that hold without assuming finite values: a product with a
run-time factor does not carry a mask (0 * inf is NaN), a product with finite constants does.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import ConstantTable
from compiler.dialects.movement import ReshapeOp
from compiler.dialects.sp import BinaryOp, Conv2dOp, LinearOp, UnaryOp
from compiler.dialects.types import shape_of

ZERO_TO_ZERO: Final = frozenset({"relu", "silu", "neg", "sqrt", "tanh"})

Masks = frozenset[int]
_NONE: Final[Masks] = frozenset()


def zero_masks(func: FuncOp, constants: ConstantTable) -> dict[SSAValue, Masks]:
    """Return the sources that each value of a function carries; sources are numbered in order."""
    masks: dict[SSAValue, Masks] = {}
    sources = 0
    for op in func.body.block.ops:
        carried = _carried(op, masks, constants)
        if _ends_in_relu(op):
            carried |= {sources}
            sources += 1
        if carried and op.results:
            masks[op.results[0]] = carried
    return masks


def _ends_in_relu(op: Operation) -> bool:
    match op:
        case UnaryOp():
            return op.kind.data == "relu"
        case LinearOp():
            return op.act.data == "relu" and op.residual is None
        case Conv2dOp() | BinaryOp():
            return op.act.data == "relu"
        case _:
            return False


def _carried(op: Operation, masks: Mapping[SSAValue, Masks], constants: ConstantTable) -> Masks:
    match op:
        case ReshapeOp():
            return masks.get(op.x, _NONE)
        case UnaryOp():
            return masks.get(op.x, _NONE) if op.kind.data in ZERO_TO_ZERO else _NONE
        case BinaryOp():
            return _binary(op, masks, constants)
        case _:
            return _NONE


def _binary(op: BinaryOp, masks: Mapping[SSAValue, Masks], constants: ConstantTable) -> Masks:
    left, kind = masks.get(op.a, _NONE), op.kind.data
    if kind in ("add", "sub"):
        right = masks.get(op.b, _NONE) if shape_of(op.a) == shape_of(op.b) else _NONE
        return left & right
    factor = constants.get(op.b)
    if factor is None or not np.isfinite(factor).all():
        return _NONE
    return left if kind == "mul" or bool((factor != 0).all()) else _NONE
