"""Raise attention, with or without a key/value cache, to `mm.attention` on rows.

Before (heads on their own axis, %k and %v possibly `concat(past of layer l, new rows)`):
    %s = "sp.onnx"(%q, %kt) <{op = "MatMul"}>          scalar factors on either side or on %s
    %m = "sp.onnx"(%s, %mask) <{op = "Add"}>           %mask = argument of role causal_mask
    %p = "sp.onnx"(%m) <{op = "Softmax", axis = 3}>
    %o = "sp.onnx"(%p, %v) <{op = "MatMul"}>
After:
    %keys, %values = "mm.kv_append"(%krows, %vrows) <{layer = l}>
    %r = "mm.attention"(%qrows, %keys, %values) <{heads, kv_heads, scale, mask = "causal"}>
    %o = the heads of %r

Which rows and columns meet is decided on index arrays, so any chain of reshapes and transposes
will do, and key heads may be shared by groups of query heads. Left out: masks that are computed in
the graph, windows, biases by distance. Without a mask keys may have other rows than queries (cross
attention); with a causal one, stored or an argument, they have the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import BlockArgument, Operation, SSAValue

from compiler.analysis.causal import is_causal_plane
from compiler.analysis.constants import ConstantTable
from compiler.analysis.movement import (
    Index,
    Leaf,
    Trace,
    chain_symbols,
    only_leaf,
    scalar_multiple,
    spread,
    trace,
)
from compiler.dialects.dims import Dim, witnesses
from compiler.dialects.mm import AttentionOp, KvAppendOp
from compiler.dialects.movement import TransposeOp
from compiler.dialects.sp import OnnxOp
from compiler.dialects.types import shape_of, sizes_at
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import role_of_argument
from compiler.passes.match import attr, onnx
from compiler.passes.rewriting import insert_before, replace, reshaped, sweep

CACHE_ROLES: Final = frozenset({"past_key", "past_value"})


@dataclass(frozen=True, slots=True)
class Rows:
    """One side of attention as rows.

    Attributes:
        value: New rows (..., R, heads * head_dim).
        heads: Heads in a row.
        factor: Scalar factor between the rows and what the product reads.
        layer: Cache layer in front of the rows, or None.
        past: The argument that holds the cache.
    """

    value: SSAValue
    heads: int
    factor: float
    layer: int | None = None
    past: SSAValue | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """What stands in front of a softmax: `q k^T * scale`, and whether a causal mask is added."""

    q: SSAValue
    k: SSAValue
    scale: float
    causal: bool


@dataclass(frozen=True)
class RaiseAttention(Pass):
    """Recognise softmax(q k^T) v per head."""

    name: ClassVar[str] = "raise-attention"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Rewrite every matching product."""
        appended: dict[tuple[SSAValue, SSAValue], KvAppendOp] = {}
        return PassResult(sweep(module, ctx, partial(_raise, appended=appended)))


def _raise(
    op: Operation, ctx: PassContext, appended: dict[tuple[SSAValue, SSAValue], KvAppendOp]
) -> int:
    if not isinstance(op, OnnxOp) or op.op.data != "MatMul":
        return 0
    scores = softmax_scores(op.arguments[0], ctx.constants)
    if scores is None:
        return 0
    q = _stored_rows(scores.q, op, ctx.constants) or query_rows(scores.q, ctx.constants)
    k = _key_rows(scores.k, ctx.constants, q, axes=(1, 2, 0)) if q else None
    v = _key_rows(op.arguments[1], ctx.constants, q, axes=(1, 0, 2)) if q else None
    if q is None or k is None or v is None or not _agree(q, k, v, scores):
        return 0
    keys, values = k.value, v.value
    if k.layer is not None:
        append = appended.get((keys, values))
        if append is None:
            append = KvAppendOp(keys, values, layer=k.layer, heads=k.heads)
            insert_before(op, append)
            appended[(keys, values)] = append
        keys, values = append.keys, append.values
    attention = AttentionOp(
        q.value,
        keys,
        values,
        heads=q.heads,
        kv_heads=k.heads,
        scale=scores.scale * q.factor * k.factor,
        mask="causal" if scores.causal else "none",
    )
    insert_before(op, attention)
    replace(op, [_split_heads(attention.result, q.heads, shape_of(op.outputs[0]), op)], ctx.origins)
    return 1


def _stored_rows(value: SSAValue, anchor: Operation, constants: ConstantTable) -> Rows | None:
    """Return constant queries (..., H, R, hd), as resamplers have them, as a constant of rows."""
    array = constants.get(value)
    if array is None or array.ndim < 3 or array.size != np.prod(array.shape[-3:]):
        return None
    heads, rows, head_dim = array.shape[-3:]
    turned = array.reshape(heads, rows, head_dim).swapaxes(0, 1)
    lead = (1,) * (array.ndim - 3)
    stored = constants.add(np.ascontiguousarray(turned.reshape(*lead, rows, heads * head_dim)))
    insert_before(anchor, stored)
    return Rows(stored.result, heads, 1.0)


def _agree(q: Rows, k: Rows, v: Rows, scores: Scores) -> bool:
    """Cache and mask come together; keys and values share layer, heads and row count."""
    cached = k.layer is not None
    if k.layer != v.layer or k.heads != v.heads or v.factor != 1.0 or q.heads % k.heads:
        return False
    if shape_of(k.value) != shape_of(v.value):
        return False
    if not cached:
        alike = -1 if scores.causal else -2  # without a causal limit queries may have other rows
        return shape_of(k.value)[:alike] == shape_of(q.value)[:alike]
    roles = (role_of_argument(_argument(k.past)), role_of_argument(_argument(v.past)))
    return scores.causal and roles == ("past_key", "past_value")


def _argument(value: SSAValue | None) -> SSAValue:
    assert value is not None
    return value


def softmax_scores(value: SSAValue, constants: ConstantTable) -> Scores | None:
    """Return the scores that a softmax over the last axis normalises, or None."""
    value, guard = _without_guard(value)
    softmax = onnx(value, "Softmax")
    if softmax is None or attr(softmax, "axis") != len(shape_of(value)) - 1:
        return None
    scores, causal = softmax.arguments[0], False
    added = onnx(scores, "Add")
    if added is not None:
        a, b = added.arguments
        if _is_causal_mask(b, scores, constants):
            scores, causal = a, True
        elif _is_causal_mask(a, scores, constants):
            scores, causal = b, True
        else:
            return None
        guard = None if guard in (a, b) else guard
    if guard is not None:
        return None
    scale = 1.0
    while isinstance(scores.owner, OnnxOp):
        scaled = scalar_multiple(scores.owner, constants)
        if scaled is None:
            break
        scores, scale = scaled[0], scale * scaled[1]
    product = onnx(scores, "MatMul")
    if product is None:
        return None
    return Scores(product.arguments[0], product.arguments[1], scale, causal)


def _without_guard(value: SSAValue) -> tuple[SSAValue, SSAValue | None]:
    """Return the weights behind `Where(IsInf(ReduceMax(mask)), 0, weights)`, and the mask.

    The guard gives weights of zero to a query that sees no key; under a causal mask each sees one.
    """
    guarded = onnx(value, "Where")
    blind = onnx(guarded.arguments[0], "IsInf") if guarded is not None else None
    best = onnx(blind.arguments[0], "ReduceMax") if blind is not None else None
    if guarded is None or best is None:
        return value, None
    return guarded.arguments[2], best.arguments[0]


def _is_causal_mask(value: SSAValue, scores: SSAValue, constants: ConstantTable) -> bool:
    """Return whether `value` is the whole causal mask, the same for every head."""
    array = constants.get(value)
    if array is not None:
        queries, keys = shape_of(scores)[-2:]
        is_square = queries.is_static and queries == keys
        return is_square and is_causal_plane(array, queries.constant, 0)
    for binding in witnesses(chain_symbols(value) | chain_symbols(scores)):
        found = trace(value, binding)
        if len(found.leaves) != 1 or role_of_argument(found.leaves[0].value) != "causal_mask":
            return False
        sizes = sizes_at(scores, binding)
        rows, cols = sizes[-2:]
        plane = np.arange(rows * cols).reshape(rows, cols)
        added = spread(found.index, sizes)
        if added is None or found.leaves[0].numbers().size != plane.size:
            return False
        if not np.array_equal(added, np.broadcast_to(plane, sizes)):
            return False
    return True


def query_rows(value: SSAValue, constants: ConstantTable) -> Rows | None:
    """Return the rows whose heads `value` (..., H, R, hd) holds, or None."""
    shape = shape_of(value)
    if len(shape) < 3 or any(dim != Dim(1) for dim in shape[:-3]):
        return None
    heads, head_dim = shape[-3].constant, shape[-1].constant
    if not (shape[-3].is_static and shape[-1].is_static):
        return None

    def expected(leaf: Leaf, found: Trace) -> Index | None:
        rows = found.index.shape[-2]
        return _heads_index(leaf, rows, heads, head_dim)

    return _one_leaf(value, constants, expected, heads)


def _one_leaf(
    value: SSAValue,
    constants: ConstantTable,
    expected: Callable[[Leaf, Trace], Index | None],
    heads: int,
) -> Rows | None:
    source, factor = None, None
    for binding in witnesses(chain_symbols(value, constants)):
        found = trace(value, binding, constants)
        leaf = only_leaf(found)
        wanted = expected(leaf, found) if leaf is not None else None
        if wanted is None or not np.array_equal(found.index.reshape(wanted.shape), wanted):
            return None
        source, factor = found.leaves[0].value, found.uniform_factor()
    if source is None or factor is None:
        return None
    return Rows(source, heads, factor)


def _heads_index(leaf: Leaf, rows: int, heads: int, head_dim: int) -> Index | None:
    """Return numbers of a leaf of rows (R, heads*hd), arranged (heads, R, hd)."""
    if leaf.sizes[-1] != heads * head_dim or leaf.numbers().size != rows * heads * head_dim:
        return None
    return leaf.numbers().reshape(rows, heads, head_dim).transpose(1, 0, 2)


def _key_rows(
    value: SSAValue, constants: ConstantTable, q: Rows, axes: tuple[int, int, int]
) -> Rows | None:
    """Return the rows of keys or values that one product reads.

    Args:
        value: Operand of the product, (..., H, hd, S) for keys or (..., H, S, hd) for values.
        constants: Scalar factors are looked up here.
        q: The queries: their heads and head size.
        axes: Order in which (S, H, hd) stands in `value`.
    """
    head_dim = shape_of(q.value)[-1].constant // q.heads
    result: Rows | None = None
    for binding in witnesses(chain_symbols(value, constants)):
        found = trace(value, binding, constants)
        result = _keys_at(found, q.heads, head_dim, axes)
        if result is None:
            return None
    return result


def _keys_at(found: Trace, heads: int, head_dim: int, axes: tuple[int, int, int]) -> Rows | None:
    past = [leaf for leaf in found.leaves if _is_cache(leaf.value)]
    new = [leaf for leaf in found.leaves if not _is_cache(leaf.value)]
    if len(new) != 1 or len(past) > 1 or not new[0].sizes or new[0].sizes[-1] % head_dim:
        return None
    kv_heads = new[0].sizes[-1] // head_dim
    if heads % kv_heads or found.index.size % (heads * head_dim):
        return None
    block = new[0].numbers().reshape(-1, kv_heads, head_dim)
    layer = None
    if past:
        plane = _plane_of(found.index, past[0], kv_heads, head_dim)
        if plane is None:
            return None
        stored = cache_planes(past[0])
        block = np.concatenate([stored[plane].transpose(1, 0, 2), block])
        layer = first_layer(past[0].value) + plane
    wanted = np.repeat(block, heads // kv_heads, axis=1).transpose(axes)
    factor = found.uniform_factor()
    flat = found.index.reshape(-1)
    if factor is None or not np.array_equal(flat, wanted.reshape(-1)):
        return None
    return Rows(new[0].value, kv_heads, factor, layer, past[0].value if past else None)


def _is_cache(value: SSAValue) -> bool:
    return isinstance(value, BlockArgument) and role_of_argument(value) in CACHE_ROLES


def cache_planes(past: Leaf) -> Index:
    """Return the numbers of a cache argument as (layers, H, P, hd)."""
    numbers = past.numbers()
    return numbers.reshape(-1, *numbers.shape[-3:])


def first_layer(past: SSAValue) -> int:
    """Return the layer that the first plane of a cache argument is: arguments count in order."""
    assert isinstance(past, BlockArgument)
    role, layers = role_of_argument(past), 0
    for argument in past.block.args[: past.index]:
        if role_of_argument(argument) == role:
            layers += layers_of(argument)
    return layers


def layers_of(past: SSAValue) -> int:
    """Return how many layers a cache argument holds: (L, 1, H, P, hd), or one without L."""
    shape = shape_of(past)
    return shape[0].constant if len(shape) == 5 else 1


def _plane_of(index: Index, past: Leaf, heads: int, head_dim: int) -> int | None:
    """Return which plane of a cache argument the chain reads."""
    if role_of_argument(past.value) not in CACHE_ROLES:
        return None
    planes = cache_planes(past)
    inside = (index >= past.base) & (index < past.base + planes.size)
    if planes.shape[1] != heads or planes.shape[3] != head_dim or not inside.any():
        return None
    first: int = int(index[inside].min()) - past.base
    return first // int(planes[0].size)


def _split_heads(rows: SSAValue, heads: int, shape: tuple[Dim, ...], anchor: Operation) -> SSAValue:
    """Return rows (..., R, H*hd) as (..., H, R, hd)."""
    width = shape_of(rows)[-1].constant
    count = shape[-2]
    split = reshaped(rows, (count, Dim(heads), Dim(width // heads)), anchor)
    turned = TransposeOp(split, [1, 0, 2])
    insert_before(anchor, turned)
    return reshaped(turned.result, shape, anchor)
