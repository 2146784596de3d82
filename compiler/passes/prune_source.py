"""Give a picture that keeps every token a pruning that keeps them all, so that it can be adapted.

Before, in @vision of a model that knows no pruning:
    %a = "mm.attention"(%q, %k, %v)                      (1, R, W), the last one
    ...                                                  row-wise, perhaps without the first row
    func.return %e : embeds                              (1, N, D), N = R or R - 1
After:
    %s = "mm.attention_row"(%q, %k) <{row = 0}>          (R, 1)
    %t, %i = "mm.prune"(%e, %s) <{k = N, score_offset = R - N}>
    func.return %t, %i : embeds, positions

Called by `adapt-pruning`, which replaces both operations. A first row that does not become a token
is the class token: its attention can serve as the score. Without one only the mean over all rows
can. What lies between attention and result must be row-wise, so that row i of one is row i of the
other; where it is not (windows, merged patches), nothing is done.
"""

from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from compiler.dialects.dims import Dim
from compiler.dialects.mm import AttentionOp, AttentionRowOp, PruneOp
from compiler.dialects.movement import ReshapeOp, SliceOp
from compiler.dialects.types import shape_of
from compiler.passes.functions import body, results, return_op, set_results
from compiler.passes.last_row import ROW_OPERANDS
from compiler.passes.rewriting import insert_before

CLASS_TOKENS = 1


def keep_every_token(vision: FuncOp) -> PruneOp | None:
    """Insert the pruning that keeps all tokens; None, and no change, if there is no place."""
    outputs = dict(results(vision))
    embeds = outputs.get("embeds")
    if embeds is None or "positions" in outputs or len(shape_of(embeds)) < 2:
        return None
    for attention in reversed([op for op in body(vision).ops if isinstance(op, AttentionOp)]):
        first = _first_token(attention, embeds, vision)
        if first is not None:
            break
    else:
        return None
    row = AttentionRowOp(
        attention.q,
        attention.k,
        heads=attention.heads.value.data,
        scale=attention.scale.value.data,
        row=0,
    )
    prune = PruneOp(embeds, row.result, k=shape_of(embeds)[-2].constant, score_offset=first)
    insert_before(return_op(vision), row, prune)
    others = [(role, value) for role, value in results(vision) if role != "embeds"]
    set_results(vision, [("embeds", prune.kept), ("positions", prune.index), *others])
    return prune


def _first_token(attention: AttentionOp, embeds: SSAValue, vision: FuncOp) -> int | None:
    """Return the attention's row that becomes token 0 of `embeds`, or None if rows do not map."""
    heads, kv_heads = attention.heads.value.data, attention.kv_heads.value.data
    if attention.mask.data != "none" or heads != kv_heads:
        return None
    rows = shape_of(attention.q)[-2]
    tokens = shape_of(embeds)[-2]
    if shape_of(attention.k) != shape_of(attention.q):
        return None
    if not (rows.is_static and tokens.is_static):
        return None
    first = rows.constant - tokens.constant
    follows: set[SSAValue] = {attention.result}
    for op in body(vision).ops:
        if not follows.isdisjoint(op.operands) and _keeps_rows(op, follows, first):
            follows.update(op.results)
    return first if first in (0, CLASS_TOKENS) and embeds in follows else None


def _keeps_rows(op: Operation, follows: set[SSAValue], first: int) -> bool:
    """Return whether row i of the result is made from row i (or i + first) of what follows."""
    match op:
        case ReshapeOp():
            source, target = shape_of(op.x), shape_of(op.result)
            return source[-2:] == target[-2:] and all(dim == Dim(1) for dim in target[:-2])
        case SliceOp():
            axis, whole = op.axis.value.data, shape_of(op.x)
            is_rows = axis == len(whole) - 2 and op.step.value.data == 1
            count = shape_of(op.result)[axis]
            return is_rows and op.offset == Dim(first) and count + Dim(first) == whole[axis]
        case _:
            names = ROW_OPERANDS.get(type(op), ())
            reads = [getattr(op, name) for name in names]
            others = [x for x in op.operands if not any(x is value for value in reads)]
            return bool(names) and follows.isdisjoint(others)
