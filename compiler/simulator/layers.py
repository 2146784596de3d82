"""Run `moe.*` operations of one block over arrays: what their forms mean, in either arithmetic.

The simulator proper runs plans; this runs the IR before it, so that a whole layer and its pieces
can be compared bit by bit. Called by tests and by tools that move single experts.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from xdsl.ir import Operation, SSAValue

from compiler.contract.operand_rules import complete_params
from compiler.contract.operations import ExpertAct, NormKind, Op, RouteOrder
from compiler.dialects.moe import ExpertsOp, RouteOp
from compiler.dialects.moe_schedule import ExpertLoadOp, FusedLayerOp, GemmOp, LayerOp, MergeOp
from compiler.dialects.sp import BinaryOp, NormOp
from compiler.simulator.numerics import Numerics
from compiler.simulator.operations import OPERATIONS
from compiler.simulator.step import Step

Array = NDArray[Any]
Values = MutableMapping[SSAValue, Any]
"""An array (rows, cols) per run-time value and f32 constant; per stack of matrices, and per matrix,
the number or numbers by which the arithmetic knows its weights."""
Params = Mapping[str, int | float]


def run_layers(ops: Iterable[Operation], values: Values, numerics: Numerics) -> None:
    """Run operations in order; `values` receives their results.

    Raises:
        KeyError: An operation is none of a routed layer.
    """
    for op in ops:
        results = _RUN[type(op)](op, values, numerics)
        values.update(zip(op.results, results, strict=True))


def _call(
    op: Op, numerics: Numerics, inputs: list[Any], weights: list[Any], params: Params
) -> list[Array]:
    ids = tuple(w if isinstance(w, int) else -1 for w in weights)
    arrays = tuple(None if w is None or isinstance(w, int) else np.atleast_2d(w) for w in weights)
    step = Step(numerics, tuple(inputs), arrays, ids, complete_params(op, params))
    return list(OPERATIONS[op](step))


def _route(op: RouteOp, values: Values, numerics: Numerics) -> list[Array]:
    weights = [values[op.weight], values[op.bias] if op.bias else None]
    params = {"k": op.k.value.data, "order": RouteOrder[op.order.data.upper()]}
    return _call(Op.ROUTE, numerics, [values[op.x]], weights, params)


def _experts(
    x: Array, routed: list[Array], stacks: list[list[int]], act: str, numerics: Numerics
) -> Array:
    weights = [number for pair in zip(*stacks, strict=True) for number in pair]
    params = {"act": ExpertAct[act.upper()]}
    return _call(Op.EXPERTS, numerics, [x, *routed], weights, params)[0]


def _experts_op(op: ExpertsOp, values: Values, numerics: Numerics) -> list[Array]:
    routed = [values[op.index], values[op.gate]]
    stacks = [values[op.w_in], values[op.w_out]]
    return [_experts(values[op.x], routed, stacks, op.act.data, numerics)]


def _layer(op: LayerOp, values: Values, numerics: Numerics) -> list[Array]:
    weights = [values[op.weight], values[op.bias] if op.bias else None]
    params = {"k": op.k.value.data, "order": RouteOrder[op.order.data.upper()]}
    routed = _call(Op.ROUTE, numerics, [values[op.x]], weights, params)
    stacks = [values[op.w_in], values[op.w_out]]
    return [_experts(values[op.x], routed, stacks, op.act.data, numerics), *routed]


def _fused_layer(op: FusedLayerOp, values: Values, numerics: Numerics) -> list[Array]:
    """Run it as the one call that a plan holds."""
    norm = [values[op.gamma], values[op.beta] if op.beta else None]
    router = [values[op.weight], values[op.bias] if op.bias else None]
    pairs = zip(values[op.w_in], values[op.w_out], strict=True)
    experts = [number for pair in pairs for number in pair]
    params = {
        "k": op.k.value.data,
        "order": RouteOrder[op.order.data.upper()],
        "act": ExpertAct[op.act.data.upper()],
        "kind": NormKind[op.kind.data.upper()],
        "eps": op.eps.value.data,
        "residual": op.residual.value.data,
    }
    return _call(Op.MOE_LAYER, numerics, [values[op.x]], [*norm, *router, *experts], params)


def _load(op: ExpertLoadOp, values: Values, _: Numerics) -> list[int]:
    return [values[op.stack][op.expert.value.data]]


def _gemm(op: GemmOp, values: Values, numerics: Numerics) -> list[Array]:
    """Run the rows that chose the expert through it alone; the others stay zero."""
    x, index, gate = values[op.x], values[op.index], values[op.gate]
    share = np.zeros_like(x)
    chosen = index == op.expert.value.data
    for slot in range(index.shape[1]):
        at = np.flatnonzero(chosen[:, slot])
        if len(at):
            alone = [np.zeros((len(at), 1), np.int32), gate[at, slot, None]]
            stacks = [[values[op.w_in]], [values[op.w_out]]]
            share[at] += _experts(x[at], alone, stacks, op.act.data, numerics)
    return [share]


def _merge(op: MergeOp, values: Values, _: Numerics) -> list[Array]:
    total = np.zeros_like(values[op.shares[0]])
    for share in op.shares:
        total = total + values[share]
    return [total]


def _norm(op: NormOp, values: Values, numerics: Numerics) -> list[Array]:
    weights = [values[op.gamma], values[op.beta] if op.beta else None]
    params = {"kind": NormKind[op.kind.data.upper()], "eps": op.eps.value.data}
    return _call(Op.NORM, numerics, [values[op.x]], weights, params)


def _binary(op: BinaryOp, values: Values, numerics: Numerics) -> list[Array]:
    return _call(Op[op.kind.data.upper()], numerics, [values[op.a], values[op.b]], [], {})


_RUN: Final[Mapping[type[Operation], Callable[[Any, Values, Numerics], list[Any]]]] = (
    MappingProxyType(
        {
            RouteOp: _route,
            ExpertsOp: _experts_op,
            LayerOp: _layer,
            FusedLayerOp: _fused_layer,
            ExpertLoadOp: _load,
            GemmOp: _gemm,
            MergeOp: _merge,
            NormOp: _norm,
            BinaryOp: _binary,
        }
    )
)
