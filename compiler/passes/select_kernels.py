"""Choose a catalogue kernel for every operation: `sp`, `moe`, `mm` to `hw.call` on matrices.

Before:
    %1 = "sp.norm"(%0, %g) <{kind = "rms", eps = 1e-05}> : (tensor<1x?x128xf32>, ...)
    %2 = "sp.reshape"(%1) : ... -> tensor<?x128xf32>
After:
    %1 = "hw.call"(%0, %g) <{op = "NORM", params = {eps = ..., kind = 0}}> : (tensor<?x128xf32>)

What no fast kernel takes becomes reference calls if its sizes are fixed (`reference_select`): in
family `graph`, and in `see`, where a resampler's learned queries are such rows.
Views vanish: two tensors with the same flat order and the same last axis are one matrix. What no
row of `kernel_rows.ROWS` takes is refused here, by operator and node name.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, BlockArgument, Operation, Region, SSAValue

from compiler.dialects.dims import Dim
from compiler.dialects.hw import CallOp
from compiler.dialects.mm import KvAppendOp
from compiler.dialects.sp import ConstantOp, OnnxOp
from compiler.dialects.types import Tensor, dtype_of, encoding_of, shape_of
from compiler.errors import UnsupportedOperatorError
from compiler.kernels.program import Op
from compiler.kernels.registry import KERNELS
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.compose import SEE
from compiler.passes.functions import (
    arguments,
    body,
    functions,
    refresh_type,
    results,
    role_attributes,
    roles,
)
from compiler.passes.kernel_rows import ROWS, append_only
from compiler.passes.matrices import matrix_type, rows_of
from compiler.passes.pipeline_spec import POSITION_ROWS
from compiler.passes.reference_select import has_reference, materialised, select_reference
from compiler.passes.selection import Selection, refuse

COLUMN_ROLES: Final = frozenset({"token_ids", *POSITION_ROWS})


@dataclass(frozen=True)
class SelectKernels(Pass):
    """Replace every operation by calls, or refuse it."""

    name: ClassVar[str] = "select-kernels"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Select for every program.

        Raises:
            UnsupportedOperatorError: An operation has no kernel; the first imported one is named.
        """
        programs = functions(module)
        for func in programs:
            for op in body(func).ops:
                if isinstance(op, OnnxOp) and not has_reference(op):
                    refuse(op, ctx, "no pass could map it to a kernel in this place")
        selected = [_select(func, ctx) for func in programs]
        for func in programs:
            module.body.block.erase_op(func)
        module.body.block.add_ops(selected)
        calls = sum(isinstance(op, CallOp) for func in selected for op in body(func).ops)
        return PassResult(calls, (f"{calls} kernel calls",))


def _select(func: FuncOp, ctx: PassContext) -> FuncOp:
    selection = Selection(ctx)
    if selection.is_graph or func.sym_name.data == SEE:  # a picture has a fixed size
        selection.materialise = materialised
    selection.current = func
    for at, (role, argument) in enumerate(arguments(func)):
        kind = _argument_type(role, argument, selection)
        selection.matrices[argument] = selection.block.insert_arg(kind, at)
    for op in body(func).ops:
        selection.current = op
        if not isinstance(op, ConstantOp | ReturnOp):
            _map(op, selection)
    for op in body(func).ops:
        selection.current = op
        if isinstance(op, KvAppendOp) and op.layer.value.data not in selection.cached:
            append_only(op, selection)
    outputs = [(role, _output(value, selection)) for role, value in results(func)]
    _erase_unread(selection.block, {value for _, value in outputs if value is not None})
    _hand_over(func, selection)
    selection.block.add_op(ReturnOp(*(value for _, value in outputs if value is not None)))
    program = FuncOp(
        func.sym_name.data,
        (list(selection.block.arg_types), [v.type for _, v in outputs if v is not None]),
        Region(selection.block),
        arg_attrs=role_attributes(roles(func.arg_attrs)),
        res_attrs=role_attributes([role for role, _ in outputs]),
    )
    refresh_type(program)
    return program


def _output(value: SSAValue, selection: Selection) -> SSAValue | None:
    """Return the matrix of a result, made now if it is only a view."""
    if isinstance(value.owner, Operation):
        selection.current = value.owner
    return selection.matrix(value)


def _hand_over(func: FuncOp, selection: Selection) -> None:
    """Give the nodes of every operation to the calls that do its work.

    An operation without a call is a view, or was taken into the calls of its readers: these stand
    for it. If only the caller reads it, the calls that it reads do.
    """
    origins = selection.ctx.origins
    ops = [op for op in body(func).ops if not isinstance(op, ConstantOp | ReturnOp)]
    calls = {op: [c for c in selection.made.get(op, ()) if c.parent is not None] for op in ops}
    for op in reversed(ops):
        if not calls[op]:
            users = [use.operation for result in op.results for use in result.uses]
            calls[op] = [call for user in users for call in calls.get(user, ())]
    for op in ops:
        if not calls[op]:
            makers = [v.owner for v in op.operands if isinstance(v.owner, Operation)]
            calls[op] = [call for maker in makers for call in calls.get(maker, ())]
        for call in dict.fromkeys(calls[op]):
            origins.give(call, origins.of(op))


def _erase_unread(block: Block, kept: set[SSAValue]) -> None:
    """Erase reference calls whose results nobody reads, and constants only they read."""
    for op in reversed(list(block.ops)):
        is_plain = isinstance(op, CallOp) and KERNELS[Op[op.op.data]].is_reference
        unread = not any(result.first_use is not None or result in kept for result in op.results)
        if unread and (is_plain or isinstance(op, ConstantOp)):
            block.erase_op(op)


def _argument_type(role: str, argument: BlockArgument, selection: Selection) -> Tensor:
    if role in COLUMN_ROLES:
        return matrix_type(dtype_of(argument), shape_of(argument)[-1], 1)
    dtype, shape = dtype_of(argument), shape_of(argument)
    if selection.is_graph and dtype == "uint8":
        dtype = "int64"
    if not shape:  # a number
        return matrix_type(dtype, Dim(1), 1)
    cols = selection.result_type(argument).get_shape()[-1]
    return matrix_type(dtype, rows_of(shape) or Dim(1), cols, encoding_of(argument))


def _map(op: Operation, selection: Selection) -> None:
    row = ROWS.get(type(op))
    has_last_resort = selection.materialise is not None and has_reference(op)
    if row is None and not has_last_resort:
        selection.refuse("no kernel moves elements like this")
    try:
        made = row(op, selection) if row is not None else None
    except UnsupportedOperatorError:
        if not has_last_resort:
            raise
        made = None
    if made is None:
        select_reference(op, selection)
    else:
        selection.matrices.update(zip(op.results, made, strict=False))
