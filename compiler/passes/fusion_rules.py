"""The three rewrites of `FuseGroups`: attention with its rotation and projections, MoE, norms.

Each takes one call and the state, and fuses if the structure fits and the state admits the group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from xdsl.ir import Operation, SSAValue

from compiler.analysis.fusion import Verdict
from compiler.contract.operand_rules import complete_params
from compiler.contract.operations import LINEARS, Act, ExpertAct, Op, RouteOrder
from compiler.dialects.dims import Dim
from compiler.dialects.hw import CallOp
from compiler.dialects.sp import ConstantOp
from compiler.dialects.types import Tensor, shape_of, tensor_type, type_of
from compiler.kernels.merged import Merged, stacked
from compiler.passes.base import PassContext
from compiler.passes.horizontal import (
    Digests,
    attention_parts,
    call_of,
    digest_of,
    linear_of,
    runs_of,
)
from compiler.passes.rewriting import erase, insert_before, redirect, swap

Params = dict[str, int | float]
_MOE_ACTS = (ExpertAct.RELU, ExpertAct.SWIGLU, ExpertAct.REGLU)
_MOE_ORDERS = frozenset(
    {RouteOrder.TOPK_SOFTMAX, RouteOrder.SOFTMAX_TOPK, RouteOrder.SOFTMAX_TOPK_RENORM}
)


@dataclass(slots=True)
class FusionState:
    """What the rewrites share.

    Attributes:
        shared: Per weight, the weights it may be concatenated with.
        admits: Whether a chain may be fused, and what is known of its zeros.
        groups: What was fused so far, in words.
    """

    ctx: PassContext
    shared: Mapping[str, Digests]
    admits: Callable[[list[CallOp]], Verdict | None]
    groups: list[str] = field(default_factory=list)

    def constant(self, array: np.ndarray, anchor: Operation) -> SSAValue:
        """Insert a constant before `anchor`."""
        op = self.ctx.constants.add(array)
        insert_before(anchor, op)
        return op.result

    def array(self, value: SSAValue | None) -> np.ndarray:
        """Return a constant that must be there."""
        found = self.ctx.constants.get(value)
        assert found is not None
        return found


def fuse_norm(op: CallOp, state: FusionState) -> None:
    """NORM > LINEAR: the linear layer normalises its rows itself, if nobody else reads them."""
    kind, params = op.op.data, op.parameters()
    norm = call_of(op.argument(0), Op.NORM)
    is_linear = Op[kind] in LINEARS
    if not is_linear or norm is None or params.get("norm", 0) or not _only_reader(norm, op):
        return
    verdict = state.admits([norm, op])
    if verdict is None:
        return
    settings = norm.parameters()
    params |= {"norm": int(settings["kind"]) + 1, "eps": settings["eps"]}
    weights = [op.weight(0), op.weight(1), norm.weight(0), norm.weight(1)]
    fused = CallOp(kind, [norm.argument(0), op.argument(1)], _trimmed(weights), params, _types(op))
    swap(op, fused, state.ctx.origins)
    erase(norm, state.ctx.origins)
    state.groups.append(f"NORM > {kind}: {verdict.value}")


def fuse_moe(op: CallOp, state: FusionState) -> None:
    """NORM > ROUTE > EXPERTS [> ADD of the norm's own input]: one call per routed layer."""
    if op.op.data != Op.NORM.name:
        return
    readers = _readers(op)
    route = next((r for r in readers if r.op.data == Op.ROUTE.name), None)
    experts = next((r for r in readers if r.op.data == Op.EXPERTS.name), None)
    if len(readers) != 2 or route is None or experts is None or not _plain(route, experts):
        return
    if (experts.argument(1), experts.argument(2)) != tuple(route.outputs):
        return
    add = _residual(op, experts)
    members = [op, route, experts, *([add] if add is not None else [])]
    verdict = state.admits(members)
    if verdict is None:
        return
    weights = [op.weight(0), op.weight(1), route.weight(0), route.weight(1), *experts.weights]
    params = {
        "k": route.parameters()["k"],
        "order": route.parameters()["order"],
        "act": experts.parameters()["act"],
        **op.parameters(),
        "residual": int(add is not None),
    }
    types = [type_of(experts.outputs[0]), *(type_of(value) for value in route.outputs)]
    copies = [None if weight is None else _moved(weight, op) for weight in weights]
    fused = CallOp(Op.MOE_LAYER.name, [op.argument(0)], copies, params, types, experts.stored_as)
    insert_before(op, fused)
    origins = state.ctx.origins
    redirect((add or experts).outputs[0], fused.outputs[0], origins)
    for old, new in zip(route.outputs, fused.outputs[1:], strict=True):
        redirect(old, new, origins)
    for member in reversed(members):
        erase(member, origins)
    chain = " > ".join(member.op.data for member in members)
    state.groups.append(f"{chain}: {verdict.value}")


def fuse_attention(op: CallOp, state: FusionState) -> None:
    """ROPE > ATTENTION, then its projections side by side in one linear layer."""
    if op.op.data != Op.ATTENTION.name or op.argument(3) is not None:
        return
    op = _rotating(op, state)
    parts = attention_parts(op)
    runs = [cut for run in runs_of(parts) for cut in _agreed(run, state)]
    packed = [operand for run in runs for operand in _concatenated(run, op, state)]
    if len(packed) == len(parts):
        return
    slots: list[SSAValue | None] = [*packed, *[None] * (3 - len(packed)), op.argument(3)]
    swap(
        op,
        CallOp(op.op.data, _trimmed(slots), op.weights, op.parameters(), _types(op)),
        state.ctx.origins,
    )
    for part in parts:
        if isinstance(part.owner, CallOp) and part.first_use is None:
            erase(part.owner, state.ctx.origins)


def _rotating(op: CallOp, state: FusionState) -> CallOp:
    parts = attention_parts(op)
    turned = parts[:-1]
    ropes = [call_of(part, Op.ROPE) for part in turned]
    heads = [_heads(op)[0], _heads(op)[1]][-len(turned) :]
    first = ropes[0]
    if first is None or any(rope is None for rope in ropes) or len(set(turned)) != len(turned):
        return op
    found = [rope for rope in ropes if rope is not None]
    alike = all(
        (rope.argument(1), *rope.weights) == (first.argument(1), *first.weights)
        and int(rope.parameters()["heads"]) == count
        and _only_reader(rope, op)
        for rope, count in zip(found, heads, strict=True)
    )
    verdict = state.admits([first, op]) if alike else None
    if verdict is None:
        return op
    slots: list[SSAValue | None] = [*(rope.argument(0) for rope in found), parts[-1]]
    slots += [None] * (3 - len(slots))
    fused = CallOp(
        op.op.data, [*slots, first.argument(1)], first.weights, op.parameters(), _types(op)
    )
    swap(op, fused, state.ctx.origins)
    for rope in found:
        erase(rope, state.ctx.origins)
    state.groups.append(f"ROPE > ATTENTION: {verdict.value}")
    return fused


def _agreed(run: list[SSAValue], state: FusionState) -> list[list[SSAValue]]:
    """Cut a run into the groups of `FusionState.shared`; a group that is not whole falls apart."""
    cuts: list[list[SSAValue]] = []
    at = 0
    while at < len(run):
        linear = linear_of(run[at])
        group = state.shared.get(digest_of(linear), ()) if linear is not None else ()
        members = run[at : at + max(1, len(group))]
        linears = [linear_of(member) for member in members]
        whole = tuple(digest_of(item) for item in linears if item is not None) == group
        cuts.append(members if whole and group else [run[at]])
        at += len(cuts[-1])
    return cuts


def _concatenated(run: list[SSAValue], attention: CallOp, state: FusionState) -> list[SSAValue]:
    """Return the operand that holds a run's columns, or the run itself if others read its parts."""
    rows = _row_readers(run, attention)
    if len(run) < 2 or len(set(run)) != len(run) or rows is None:
        return run
    linears = [linear for part in run if (linear := linear_of(part)) is not None]
    first = linears[0]
    verdict = state.admits([first])
    if verdict is None:
        return run
    fused = _side_by_side(linears, shape_of(run[0])[0], state)
    cols = shape_of(run[0])[1].constant
    for row in rows:
        params = row.parameters() | {"cols": cols}
        swap(
            row, CallOp(row.op.data, [fused.outputs[0]], [], params, _types(row)), state.ctx.origins
        )
    state.groups.append(f"{first.op.data} x{len(run)}: {verdict.value}")
    return [fused.outputs[0]]


def _side_by_side(linears: Sequence[CallOp], rows: Dim, state: FusionState) -> CallOp:
    """Insert one linear layer whose columns are those of `linears` in order."""
    first = linears[0]
    weight = np.concatenate([state.array(linear.weight(0)) for linear in linears])
    weights: list[SSAValue | None] = [state.constant(weight, first)]
    _note_merged(linears, weights[0], state)
    if first.weight(1) is not None:
        bias = np.concatenate([state.array(linear.weight(1)).reshape(-1) for linear in linears])
        weights.append(state.constant(bias, first))
    kind = tensor_type("float32", [rows, Dim(len(weight))])
    fused = CallOp(first.op.data, [first.argument(0)], weights, first.parameters(), [kind])
    insert_before(first, fused)
    for linear in linears:
        state.ctx.origins.stands(linear, [fused])
    return fused


def _note_merged(linears: Sequence[CallOp], weight: SSAValue | None, state: FusionState) -> None:
    """Keep what adapters added to any of `linears`, for the weight that they share now."""
    merges, digests = state.ctx.merges, [digest_of(linear) for linear in linears]
    if not any(digest in merges for digest in digests):
        return
    assert weight is not None
    assert isinstance(weight.owner, ConstantOp)
    merges[weight.owner.sha256.data] = stacked(
        [
            merges.get(digest) or Merged.nothing(state.array(linear.weight(0)))
            for digest, linear in zip(digests, linears, strict=True)
        ]
    )


def _row_readers(run: Sequence[SSAValue], attention: CallOp) -> list[CallOp] | None:
    """Return the ATTENTION_ROW calls that read q and k of a run; None if anything else reads it."""
    found: dict[CallOp, None] = {}
    for part in run:
        for use in part.uses:
            user = use.operation
            if user is attention:
                continue
            is_row = isinstance(user, CallOp) and user.op.data == Op.ATTENTION_ROW.name
            if not isinstance(user, CallOp) or not is_row or list(user.arguments) != list(run[:2]):
                return None
            found[user] = None
    return list(found)


def _heads(attention: CallOp) -> tuple[int, int]:
    params = complete_params(Op.ATTENTION, attention.parameters())
    return int(params["heads"]), int(params["kv_heads"] or params["heads"])


def _plain(route: CallOp, experts: CallOp) -> bool:
    """Return whether both calls say nothing that MOE_LAYER has no parameter for."""
    for call, kept, stacks in ((route, {"k", "order"}, 2), (experts, {"act"}, 2)):
        op, given = Op[call.op.data], call.parameters()
        spare = {name: value for name, value in given.items() if name in kept}
        if complete_params(op, given) != complete_params(op, spare):
            return False
        if len(call.weights) > stacks or call.weight(2) is not None:
            return False
    is_known = int(route.parameters()["order"]) in _MOE_ORDERS
    return is_known and int(experts.parameters()["act"]) in _MOE_ACTS


def _residual(norm: CallOp, experts: CallOp) -> CallOp | None:
    """Return the ADD of the experts' result and the norm's input, if it is their only reader."""
    readers = _readers(experts)
    add = readers[0] if len(readers) == 1 and readers[0].op.data == Op.ADD.name else None
    if add is None or int(add.parameters().get("act", Act.NONE)) != Act.NONE:
        return None
    is_sum = {add.argument(0), add.argument(1)} == {norm.argument(0), experts.outputs[0]}
    return add if is_sum else None


def _readers(call: CallOp) -> list[CallOp]:
    """Return the calls that read a call's first result, one per use; none if others read it."""
    users = [use.operation for use in call.outputs[0].uses]
    calls = [user for user in users if isinstance(user, CallOp)]
    return calls if len(calls) == len(users) else []


def _only_reader(call: CallOp, reader: CallOp) -> bool:
    return [use.operation for use in call.outputs[0].uses] == [reader]


def _moved(weight: SSAValue, anchor: Operation) -> SSAValue:
    """Return a copy of a constant in front of `anchor`."""
    assert isinstance(weight.owner, ConstantOp)
    copy = weight.owner.clone()
    insert_before(anchor, copy)
    return copy.result


def _trimmed(operands: Sequence[SSAValue | None]) -> list[SSAValue | None]:
    found = list(operands)
    while found and found[-1] is None:
        found.pop()
    return found


def _types(op: CallOp) -> list[Tensor]:
    return [type_of(value) for value in op.outputs]
