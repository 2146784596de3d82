"""Take routed layers apart into loads, products and a merge, or put them together again.

Before:
    %y, %i, %g = "moe.layer"(%x, %wr, %w_in, %w_out) <{k = 2, order = "topk_softmax", act = "relu"}>
After (`DecomposeMoe()`):
    %i, %g = "moe.route"(%x, %wr) <{k = 2, order = "topk_softmax"}>
    %a = "moe.expert_load"(%w_in) <{expert = 0}>          %b the same of %w_out
    %p = "moe.gemm"(%x, %i, %g, %a, %b) <{act = "relu", expert = 0}>     and so on per expert
    %y = "moe.merge"(%p, ...)

`moe.fused_layer` becomes `sp.norm`, `moe.layer` and, with a residual, `sp.binary` first. With
`together`, pieces become a layer again, and a `moe.route` read by one `moe.experts` becomes one
too. Both forms give the same bits: the fused kernel adds the experts' shares in the same order.
The compilation keeps layers whole; this pass is for planners and tools that move single experts.
Left out: routers and experts with options that `moe.layer` has no property for, and experts in
eight bits.
"""

from dataclasses import dataclass
from typing import ClassVar

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from compiler.dialects.moe import ExpertsOp, RouteOp
from compiler.dialects.moe_schedule import (
    PLAIN_ORDERS,
    ExpertLoadOp,
    FusedLayerOp,
    GemmOp,
    LayerOp,
    MergeOp,
)
from compiler.dialects.sp import BinaryOp, NormOp
from compiler.dialects.types import shape_of
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.rewriting import insert_before, redirect, replace, sweep


@dataclass(frozen=True)
class DecomposeMoe(Pass):
    """Take layers apart, or with `together` put them together."""

    name: ClassVar[str] = "decompose-moe"
    together: bool = False

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Rewrite every function; `moe.fused_layer` is taken apart down to the pieces."""
        rules = (_join_pieces, _join_route) if self.together else (_split_fused, _split_layer)
        return PassResult(sweep(module, ctx, *rules))


def _split_fused(op: Operation, ctx: PassContext) -> int:
    if not isinstance(op, FusedLayerOp):
        return 0
    norm = NormOp(op.x, op.gamma, op.beta, kind=op.kind.data, eps=op.eps.value.data)
    layer = LayerOp(
        norm.results[0],
        (op.weight, op.bias),
        (op.w_in, op.w_out),
        k=op.k.value.data,
        order=op.order.data,
        act=op.act.data,
    )
    insert_before(op, norm, layer)
    result: SSAValue = layer.result
    if op.residual.value.data:
        total = BinaryOp(op.x, result, kind="add")
        insert_before(op, total)
        result = total.results[0]
    replace(op, [result, layer.index, layer.gate], ctx.origins)
    return 1


def _split_layer(op: Operation, ctx: PassContext) -> int:
    if not isinstance(op, LayerOp):
        return 0
    route = RouteOp(op.x, op.weight, op.bias, k=op.k.value.data, order=op.order.data)
    insert_before(op, route)
    shares: list[SSAValue] = []
    for expert in range(shape_of(op.w_in)[0].constant):
        loads = [ExpertLoadOp(stack, expert=expert) for stack in (op.w_in, op.w_out)]
        matrices = loads[0].result, loads[1].result
        routing = route.index, route.gate
        gemm = GemmOp(op.x, routing, matrices, expert=expert, act=op.act.data)
        insert_before(op, *loads, gemm)
        shares.append(gemm.result)
    merge = MergeOp(shares)
    insert_before(op, merge)
    replace(op, [merge.result, route.index, route.gate], ctx.origins)
    return 1


def _join_pieces(op: Operation, ctx: PassContext) -> int:
    if not isinstance(op, MergeOp):
        return 0
    gemms = [share.owner for share in op.shares]
    stacks = [_stacks(gemm, at) for at, gemm in enumerate(gemms)]
    first = gemms[0]
    route = first.index.owner if isinstance(first, GemmOp) else None
    if not isinstance(first, GemmOp) or not isinstance(route, RouteOp) or not _is_plain(route):
        return 0
    whole = stacks[0]
    if whole is None or len(set(stacks)) != 1 or len(gemms) != shape_of(whole[0])[0].constant:
        return 0
    alike = {(g.x, g.index, g.gate, g.act) for g in gemms if isinstance(g, GemmOp)}
    if alike != {(route.x, route.index, route.gate, first.act)}:
        return 0
    return _put_layer(op, route, whole, first.act.data, ctx)


def _join_route(op: Operation, ctx: PassContext) -> int:
    if not isinstance(op, ExpertsOp) or op.b_in is not None or op.options() or op.storage:
        return 0
    route = op.index.owner
    if not isinstance(route, RouteOp) or not _is_plain(route):
        return 0
    if (op.x, op.index, op.gate) != (route.x, route.index, route.gate):
        return 0
    return _put_layer(op, route, (op.w_in, op.w_out), op.act.data, ctx)


def _put_layer(
    op: MergeOp | ExpertsOp,
    route: RouteOp,
    stacks: tuple[SSAValue, SSAValue],
    act: str,
    ctx: PassContext,
) -> int:
    """Put a layer in the place of the router, whose results all later readers then read."""
    if op.parent is not route.parent or not all(_before(stack, route, ctx) for stack in stacks):
        return 0
    router = route.weight, route.bias
    layer = LayerOp(route.x, router, stacks, k=route.k.value.data, order=route.order.data, act=act)
    insert_before(route, layer)
    replace(op, [layer.result], ctx.origins)
    redirect(route.index, layer.index, ctx.origins)
    redirect(route.gate, layer.gate, ctx.origins)
    return 1


def _stacks(gemm: Operation | object, expert: int) -> tuple[SSAValue, SSAValue] | None:
    """Return the stacks behind one expert's product if it is the product of that expert."""
    if not isinstance(gemm, GemmOp) or gemm.expert.value.data != expert:
        return None
    loads = gemm.w_in.owner, gemm.w_out.owner
    found = [
        load.stack
        for load in loads
        if isinstance(load, ExpertLoadOp) and load.expert.value.data == expert
    ]
    return (found[0], found[1]) if len(found) == 2 else None


def _is_plain(route: RouteOp) -> bool:
    return route.order.data in PLAIN_ORDERS and route.correction is None and not route.options()


def _before(value: SSAValue, op: Operation, ctx: PassContext) -> bool:
    """Return whether a value exists before `op`; a constant is moved there if it does not."""
    owner = value.owner
    if not isinstance(owner, Operation) or owner.parent is not op.parent:
        return True
    if owner.is_before_in_block(op):
        return True
    if owner.operands:
        return False
    copy = owner.clone()
    insert_before(op, copy)
    replace(owner, list(copy.results), ctx.origins)
    return True
