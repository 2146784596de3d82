"""Check a call against the catalogue where it is chosen, so that a refusal can name its node."""

from typing import Final

from xdsl.ir import SSAValue

from compiler.contract.moe_rules import CODES, expert_kinds
from compiler.contract.operand_rules import (
    KvShape,
    Operands,
    Shape,
    WeightShape,
    check_call,
    complete_params,
)
from compiler.dialects.dims import Dim
from compiler.dialects.hw import CallOp
from compiler.dialects.types import dtype_of, shape_of
from compiler.kernels.program import Op
from compiler.kernels.registry import KERNELS
from compiler.passes.base import PassContext
from compiler.passes.pipeline_spec import QUANTISE_W4

STACKED: Final = {Op.EXPERTS: 0, Op.MOE_LAYER: 4}
"""From which weight on the weights of an operation are stacks, one matrix per expert."""
DTYPES: Final = {"float32": "f32", "int32": "i32", "uint8": "u8"}


def weight_kinds(op: Op, storage: str = QUANTISE_W4) -> tuple[str, ...]:
    """Return the kinds of a call's weights, as far as it has them; those of experts as stored."""
    match op:
        case Op.EXPERTS:
            return expert_parts(storage)
        case Op.LINEAR | Op.RECURRENT:
            return "w4", "f32", "f32", "f32"
        case Op.LINEAR_W8:
            return "w8", "f32", "f32", "f32"
        case Op.SPARSE_CONV:
            return "f32", "i32", "i32", "f32"
        case Op.MOE_LAYER:
            return "f32", "f32", "f32", "f32", *expert_parts(storage)[:2]
        case _:
            return "f32", "f32", "f32", "f32"


def expert_parts(storage: str) -> tuple[str, ...]:
    """Return the kinds of the weights of an expert whose matrices are stored as w4 or w8."""
    return tuple(storage if kind == CODES else kind for kind in expert_kinds(biases=1))


def weight_kind(call: CallOp, at: int, value: SSAValue) -> str:
    """Return the kind of weight `at` of a call; reference kernels take what the constant is."""
    op = Op[call.op.data]
    if KERNELS[op].is_reference:
        return "i32" if dtype_of(value) == "int32" else "f32"
    return weight_kinds(op, call.stored_as)[at]


def check_operands(op: Op, call: CallOp, ctx: PassContext) -> None:
    """Check arity, types, shapes and parameters of a call.

    Raises:
        OperandError: The first rule that is broken.
    """
    params = complete_params(op, call.parameters())
    operands = Operands(
        inputs=_by_slot(call.slots.get_values(), call.arguments, ctx),
        outputs=tuple(_shape(value, ctx) for value in call.outputs),
        weights=_weights(op, call),
        params=params,
        kv=_cache(op, call, params, ctx),
    )
    check_call(op, operands)


def _by_slot(
    slots: tuple[int | float, ...], values: tuple[SSAValue, ...], ctx: PassContext
) -> tuple[Shape | None, ...]:
    return tuple(None if slot < 0 else _shape(values[int(slot)], ctx) for slot in slots)


def _shape(value: SSAValue, ctx: PassContext) -> Shape:
    rows, cols = shape_of(value)
    count = rows.constant if rows.is_static else ctx.spec.max_step_tokens
    dtype = dtype_of(value)
    return Shape(count, cols.constant, DTYPES.get(dtype, dtype), not rows.is_static)


def _weights(op: Op, call: CallOp) -> tuple[WeightShape | None, ...]:
    found: list[WeightShape | None] = []
    for at, slot in enumerate(call.weight_slots.get_values()):
        is_stack = at >= STACKED.get(op, at + 1)
        weight = None if slot < 0 else call.weights[int(slot)]
        kind = "" if weight is None else weight_kind(call, at, weight)
        found.append(None if weight is None else _weight(weight, kind, is_stack=is_stack))
    stacked = STACKED.get(op)
    if stacked is None:
        return tuple(found)
    experts = shape_of(call.weights[-1])[0].constant
    return (*found[:stacked], *found[stacked:] * experts)


def _weight(value: SSAValue, kind: str, *, is_stack: bool) -> WeightShape:
    shape = shape_of(value)[1:] if is_stack else shape_of(value)
    rows = shape[-2] if len(shape) > 1 else Dim(1)
    return WeightShape(rows.constant, shape[-1].constant, kind)


def _cache(
    op: Op, call: CallOp, params: dict[str, int | float], ctx: PassContext
) -> KvShape | None:
    if op is not Op.ATTENTION or params["kv_layer"] < 0:
        return None
    heads, head_dim = cache_heads(call)
    rows = shape_of(call.arguments[0])[0]
    most = rows.constant if rows.is_static else ctx.spec.max_step_tokens
    capacity = max(ctx.spec.max_context, int(params["sink"] + params["window"]) + most)
    return KvShape(int(params["kv_layer"]) + 1, heads, head_dim, capacity)


def cache_heads(call: CallOp) -> tuple[int, int]:
    """Return the key heads of an ATTENTION call and their size."""
    params = complete_params(Op.ATTENTION, call.parameters())
    keys = int(params["kv_heads"] or params["heads"])
    queries = 0 if params["append_only"] else int(params["heads"])
    parts = [int(slot) for slot in call.slots.get_values()[:3] if slot >= 0]
    cols = sum(shape_of(call.arguments[at])[1].constant for at in parts)
    return keys, cols // (queries + 2 * keys)
