"""Canonical form: no duplicates, no dead code, no movement that moves nothing.

Before:
    %1 = "sp.reshape"(%0) : (tensor<1x4x8xf32>) -> tensor<4x8xf32>
    %2 = "sp.reshape"(%1) : (tensor<4x8xf32>) -> tensor<1x4x8xf32>
    %3 = "sp.onnx"(%2) <{op = "Relu", ...}>
    %4 = "sp.onnx"(%2) <{op = "Relu", ...}>
After:
    %3 = "sp.onnx"(%0) <{op = "Relu", ...}>

Chains of movement operations that keep the flat order become one reshape, or nothing; chains over
constants become constants. Casts to the same type vanish. Left out: arithmetic identities, because
the exporters we read have already applied them.
"""

from dataclasses import dataclass
from typing import ClassVar

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.movement import trace, view_source
from compiler.dialects.movement import MOVEMENT_OPS, ConcatOp, ReshapeOp
from compiler.dialects.sp import ConstantOp
from compiler.dialects.types import dtype_of, shape_of
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import body, functions
from compiler.passes.match import onnx
from compiler.passes.rewriting import erase_dead, insert_before, is_pure, replace, swap


@dataclass(frozen=True)
class Canonicalise(Pass):
    """Fold views and constants, merge equal operations, erase dead ones."""

    name: ClassVar[str] = "canonicalise"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Rewrite every function; one walk each."""
        changed = 0
        for func in functions(module):
            changed += erase_dead(func, ctx.origins)
            for op in list(body(func).ops):
                changed += _drop_cast(op, ctx) or _fold_movement(op, ctx)
            changed += erase_dead(func, ctx.origins)
            changed += _merge_equal(func, ctx)
            changed += erase_dead(func, ctx.origins)
        return PassResult(changed)


def _drop_cast(op: Operation, ctx: PassContext) -> int:
    cast = onnx(op.results[0], "Cast") if op.results else None
    if cast is None or dtype_of(cast.arguments[0]) != dtype_of(cast.outputs[0]):
        return 0
    replace(cast, [cast.arguments[0]], ctx.origins)
    return 1


def _fold_movement(op: Operation, ctx: PassContext) -> int:
    if not isinstance(op, MOVEMENT_OPS) or not _read_by_computation(op.results[0]):
        return 0
    value = op.results[0]
    constant = _constant_behind(value, ctx)
    if constant is not None:
        insert_before(op, constant)
        replace(op, [constant.result], ctx.origins)
        return 1
    source = view_source(value)
    if source is None or source is value:
        return 0
    if shape_of(source) == shape_of(value):
        replace(op, [source], ctx.origins)
        return 1
    if isinstance(op, ReshapeOp) and op.x is source:
        return 0
    swap(op, ReshapeOp(source, shape_of(value)), ctx.origins)
    return 1


def _read_by_computation(value: SSAValue) -> bool:
    """Return whether a value must exist: a join copies its parts, so it reads them too."""
    return any(
        isinstance(use.operation, ConcatOp) or not isinstance(use.operation, MOVEMENT_OPS)
        for use in value.uses
    )


def _constant_behind(value: SSAValue, ctx: PassContext) -> ConstantOp | None:
    if not all(dim.is_static for dim in shape_of(value)):
        return None
    leaves = _leaves(value)
    if len(leaves) != 1 or ctx.constants.get(leaves[0]) is None:
        return None
    array = ctx.constants.get(leaves[0])
    assert array is not None
    return ctx.constants.add(array.reshape(-1)[trace(value, {}).index])


def _leaves(value: SSAValue) -> list[SSAValue]:
    """Return the leaves of a chain without evaluating it."""
    found: dict[SSAValue, None] = {}
    stack = [value]
    while stack:
        current = stack.pop()
        owner = current.owner
        if isinstance(owner, MOVEMENT_OPS):
            stack.extend(owner.operands)
        else:
            found[current] = None
    return list(found)


def _merge_equal(func: FuncOp, ctx: PassContext) -> int:
    first: dict[tuple[str, tuple[SSAValue, ...]], Operation] = {}
    texts: dict[tuple[str, tuple[SSAValue, ...]], dict[str, Operation]] = {}
    merged = 0
    for op in list(body(func).ops):
        if not is_pure(op):
            continue
        key = (op.name, tuple(op.operands))
        if key not in first:  # most operations are the only one of their name on their operands
            first[key] = op
            continue
        alike = texts.setdefault(key, {_text(first[key]): first[key]})
        twin = alike.setdefault(_text(op), op)
        if twin is not op:
            replace(op, list(twin.results), ctx.origins)
            merged += 1
    return merged


def _text(op: Operation) -> str:
    """Return what tells an operation from others of its name on the same operands."""
    properties = sorted((key, str(value)) for key, value in op.properties.items())
    return repr((properties, [str(result.type) for result in op.results]))
