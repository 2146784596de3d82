"""Which cell of a policy table a call of a plan falls into: the model of the VM's lookup.

The C of it is `compiler/kernels/runtime/policy.c.in`; a test compares both on every call of many
plans, for every number of rows.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from compiler.contract.operations import Op
from compiler.contract.plan import Plan, PlanCall, PlanWeight
from compiler.contract.plan_format import Kind, weight_bytes
from compiler.contract.policy import FULL, CallKind, Cell, cell_of
from compiler.contract.storage_rules import NEURON_KINDS

OP_KINDS: Final[Mapping[Op, CallKind]] = MappingProxyType(
    {
        Op.LINEAR: CallKind.LINEAR,
        Op.LINEAR_F32: CallKind.LINEAR_F32,
        Op.EXPERTS: CallKind.EXPERTS,
        Op.MOE_LAYER: CallKind.EXPERTS,
        Op.ATTENTION: CallKind.ATTENTION,
        Op.CONV2D: CallKind.CONV,
        Op.CONV_DEPTHWISE: CallKind.CONV,
        Op.SPARSE_CONV: CallKind.CONV,
    }
)
"""Kinds of calls by operation; others are OTHER."""
_STORED: Final[Mapping[Kind, CallKind]] = MappingProxyType(
    {
        Kind.W4_TILES: CallKind.TILES,
        Kind.W4_CSR: CallKind.ELEMENTS,
        Kind.W4_COO: CallKind.ELEMENTS,
        Kind.W4_ELL: CallKind.ELEMENTS,
    }
)
_W4: Final = frozenset({Kind.W4, *_STORED, *NEURON_KINDS})
_MATRIX: Final = frozenset({CallKind.LINEAR, CallKind.LINEAR_F32, CallKind.CONV})


def call_kind(plan: Plan, call: PlanCall) -> CallKind:
    """Return what kind of call it is."""
    kind = OP_KINDS.get(call.op, CallKind.OTHER)
    if kind is CallKind.LINEAR:
        stored = _STORED.get(plan.weights[call.weights[0]].kind)
        if stored is not None:
            return stored
        return CallKind.CHECKED if call.params.get("check") else kind
    return kind


def call_cell(plan: Plan, call: PlanCall, tokens: int, live: int = FULL) -> Cell:
    """Return the cell of a call.

    Args:
        plan: A verified plan.
        call: One of its calls.
        tokens: T, the rows of dynamic buffers.
        live: For a checked call: the density of the activations that it saw last, per mille.
    """
    kind = call_kind(plan, call)
    matrices = _matrices(plan, call, kind)
    stored = sum(weight.length for weight in matrices)
    dense = sum(_dense_bytes(weight) for weight in matrices)
    density = min(FULL, stored * FULL // dense) if dense else FULL
    if kind is CallKind.CHECKED:
        density = live
    size = stored
    if kind is CallKind.EXPERTS and matrices:
        size = 2 * stored * _chosen(plan, call) // len(matrices)
    return cell_of(kind, size, call_rows(plan, call, tokens), density)


def call_rows(plan: Plan, call: PlanCall, tokens: int) -> int:
    """Return the activation rows of a call: those of its first input, 1 without one."""
    if not call.inputs or call.inputs[0] < 0:
        return 1
    buffer = plan.buffers[call.inputs[0]]
    return tokens if buffer.dynamic else buffer.rows


def _matrices(plan: Plan, call: PlanCall, kind: CallKind) -> tuple[PlanWeight, ...]:
    if kind is CallKind.EXPERTS:
        found = (plan.weights[at] for at in call.weights if at >= 0)
        return tuple(weight for weight in found if weight.kind in (*_W4, Kind.W8))
    if kind in _MATRIX or call.op is Op.LINEAR:
        return (plan.weights[call.weights[0]],)
    return ()


def _dense_bytes(weight: PlanWeight) -> int:
    if weight.kind in _W4:
        return weight_bytes(Kind.W4, weight.rows, weight.cols)
    return weight.length


def _chosen(plan: Plan, call: PlanCall) -> int:
    """Return how many experts a token takes: the columns of the call's expert numbers."""
    index = call.outputs[1] if call.op is Op.MOE_LAYER else call.inputs[1]
    return plan.buffers[index].cols
