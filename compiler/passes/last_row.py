"""Compute only the last row of what only the last row is read of.

Before:
    %n = "sp.norm"(%x, %g) : (tensor<1x?x128xf32>, ...)
    %l = "sp.linear"(%n, %w) : ... -> tensor<1x?x96xf32>
    %y = "sp.slice"(%l) <{axis = 1, start = "T - 1"}> : ... -> tensor<1x1x96xf32>
After:
    %x' = "sp.slice"(%x) <{axis = 1, start = "T - 1"}>
    %y = "sp.linear"("sp.norm"(%x', %g), %w)

Row-wise operations commute with taking a row. The slice moves up through every one of them whose
result nobody else reads: the head, the last norm, and the last block's experts. Attention is not
row-wise and stops it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import Rewriter

from compiler.dialects.dims import Dim
from compiler.dialects.mm import RopeOp
from compiler.dialects.moe import ExpertsOp, RouteOp
from compiler.dialects.movement import ReshapeOp, SliceOp
from compiler.dialects.sp import BinaryOp, LinearOp, NormOp, SoftmaxOp, UnaryOp
from compiler.dialects.types import dtype_of, shape_of, tensor_type
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import functions, operations
from compiler.passes.rewriting import erase, erase_dead, insert_before, replace

ROW_OPERANDS: Final[Mapping[type[Operation], tuple[str, ...]]] = {
    LinearOp: ("x", "residual"),
    NormOp: ("x",),
    BinaryOp: ("a", "b"),
    UnaryOp: ("x",),
    SoftmaxOp: ("x",),
    RopeOp: ("x", "positions"),
    RouteOp: ("x",),
    ExpertsOp: ("x", "index", "gate"),
}


@dataclass(frozen=True)
class LastRow(Pass):
    """Move slices of the last row towards the inputs."""

    name: ClassVar[str] = "last-row"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Repeat until no slice moves; each move brings one closer to an input."""
        changed = 0
        while moved := sum(_move_up(op, ctx) for op in operations(module)):
            changed += moved
            for func in functions(module):
                erase_dead(func, ctx.origins)
        return PassResult(changed)


def _move_up(op: Operation, ctx: PassContext) -> int:
    if not isinstance(op, SliceOp) or not _takes_last_row(op):
        return 0
    maker = op.x.owner
    if isinstance(maker, ReshapeOp):
        return _through_view(op, maker, ctx)
    names = ROW_OPERANDS.get(type(maker)) if isinstance(maker, Operation) else None
    if names is None or not isinstance(maker, Operation):
        return 0
    slices = _all_slices(maker)
    if slices is None:
        return 0
    _sink(maker, names, op, ctx)
    return 1


def _takes_last_row(op: SliceOp) -> bool:
    shape = shape_of(op.x)
    axis = op.axis.value.data
    last_row = shape[axis] + Dim(-1)
    if shape[axis].is_static or axis != len(shape) - 2:
        return False
    return op.offset == last_row and shape_of(op.result)[axis] == Dim(1)


def _all_slices(maker: Operation) -> list[SliceOp] | None:
    """Return the users of all results if every one of them takes the last row."""
    found: list[SliceOp] = []
    for result in maker.results:
        for use in result.uses:
            user = use.operation
            if not isinstance(user, SliceOp) or not _takes_last_row(user):
                return None
            found.append(user)
    return found


def _through_view(op: SliceOp, view: ReshapeOp, ctx: PassContext) -> int:
    """Slice in front of a reshape that only adds or drops leading axes of size one."""
    source, target = shape_of(view.x), shape_of(view.result)
    if source[-2:] != target[-2:] or len(source) < 2:
        return 0
    if any(dim != Dim(1) for dim in (*source[:-2], *target[:-2])):
        return 0
    axis = len(source) - 2
    row = SliceOp(view.x, axis, op.offset, Dim(1))
    back = ReshapeOp(row.result, shape_of(op.result))
    insert_before(op, row, back)
    replace(op, [back.result], ctx.origins)
    return 1


def _sink(maker: Operation, names: tuple[str, ...], anchor: SliceOp, ctx: PassContext) -> None:
    """Replace `maker` and the slices of it by `maker` on slices of its row operands."""
    rows = shape_of(anchor.x)[-2]
    row_values = [getattr(maker, name) for name in names]
    copy = maker.clone()
    for at, operand in enumerate(maker.operands):
        if any(operand is value for value in row_values):
            copy.operands[at] = _sliced(operand, rows, maker)
    insert_before(maker, copy)
    ctx.origins.stands(maker, [copy])
    for at, result in enumerate(maker.results):
        shape = list(shape_of(result))
        shape[-2] = Dim(1)
        value = Rewriter.replace_value_with_new_type(
            copy.results[at], tensor_type(dtype_of(result), shape)
        )
        for use in list(result.uses):
            replace(use.operation, [value], ctx.origins)
    erase(maker, ctx.origins)


def _sliced(value: SSAValue, rows: Dim, anchor: Operation) -> SSAValue:
    """Return the last row of an operand: axis -2, or -1 if it holds one integer per row."""
    shape = shape_of(value)
    axes = [axis for axis in (len(shape) - 2, len(shape) - 1) if axis >= 0 and shape[axis] == rows]
    if not axes:
        return value
    axis = axes[0]
    op = SliceOp(value, axis, rows + Dim(-1), Dim(1))
    insert_before(anchor, op)
    return op.result
