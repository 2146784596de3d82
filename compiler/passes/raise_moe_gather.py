"""Raise Mixture-of-Experts blocks that gather whole expert matrices (torch dynamo, `batched_mm`).

Before (r = row * k + choice; GatherND or Gather of stacked weights by the chosen experts):
    %p = Softmax(%logits);  %v, %i = TopK(%p)                            [%v / sum(%v)]
    %h = MatMul(GatherND(%w_in, %i), %x repeated k times)                (T*k, 2F)
    %a = Mul(Mul(%g, Sigmoid(%g)), %u)                                   %g, %u = halves of %h
    %o = MatMul(GatherND(%w_out, %i), %a)                                (T*k, D)
    %y = ReduceSum(Mul(%o, %v) as (T, k, D), axis 1)
After:
    %i, %v = "moe.route"(%x, %w) <{k = 2, order = "softmax_topk"}>
    %y = "moe.experts"(%x, %i, %v, %w_in', %w_out') <{act = "swiglu"}>

Router and experts are matched on their own, so each router goes with each expert body. Which
element of a gathered product is gate, which is up, which row meets which expert: all of it is read
off index arrays, and weights are permuted to the catalogue's order if the file has another. Left
out: biases of experts, clamped activations, group-limited and sparse-mixer routers.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import Array
from compiler.analysis.movement import (
    Index,
    Trace,
    chain_symbols,
    only_leaf,
    spread,
    trace,
    view_source,
)
from compiler.dialects.dims import Binding, Dim, witnesses
from compiler.dialects.moe import ExpertsOp, RouteOp
from compiler.dialects.sp import LinearOp, OnnxOp
from compiler.dialects.types import shape_of, sizes_at, symbols_of
from compiler.passes.base import PassContext, PassResult
from compiler.passes.functions import functions, operations
from compiler.passes.match import Bind, OneOf, attr, find, node, onnx
from compiler.passes.rewriting import erase_dead, insert_before, replace, reshaped

_SWIGLU: Final = node("Mul", node("Mul", Bind("gate"), node("Sigmoid", Bind("gate"))), Bind("up"))
_SWIGLU_LATE: Final = node(
    "Mul", node("Mul", Bind("gate"), Bind("up")), node("Sigmoid", Bind("gate"))
)
_SWISH: Final = node("Mul", node("Swish", Bind("gate")), Bind("up"))
_RELU: Final = node("Relu", Bind("gate"))
_HIDDEN: Final = (("swiglu", OneOf((_SWIGLU, _SWIGLU_LATE, _SWISH))), ("relu", _RELU))


@dataclass(frozen=True)
class RaiseMoeGather:
    """Recognise routers (softmax and top-k) and experts (gathered matrices)."""

    name: ClassVar[str] = "raise-moe-gather"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Raise experts from their sums, then the routers that they read."""
        experts = sum(_raise_experts(op, ctx) for op in operations(module))
        for func in functions(module):
            erase_dead(func)
        routers = sum(_raise_router(op) for op in operations(module))
        for func in functions(module):
            erase_dead(func)
        return PassResult(experts + routers)


# --- experts -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of gathered matrices with vectors: `out[r, n] = sum_c W[e(r), n, c] * v[r, c]`.

    Attributes:
        weight: (E, N, C), transposed if the file multiplies from the other side.
        index: The chosen experts, (T, k).
        vector: The operand that holds v.
        result: The product's value; element (r, n) is number r * N + n.
    """

    weight: Array
    index: SSAValue
    vector: SSAValue
    result: SSAValue


def _raise_experts(op: Operation, ctx: PassContext) -> int:
    total = onnx(op.results[0], "ReduceSum") if op.results else None
    env = find(node("Mul", Bind("a"), Bind("b")), _summed(total), ctx.constants) if total else None
    if total is None or env is None:
        return 0
    for outputs, gates in ((env["a"], env["b"]), (env["b"], env["a"])):
        last = _product_behind(outputs, ctx)
        if last is None or not _is_whole(outputs, last):
            continue
        parts = _body(last, ctx)
        gate = _gates(gates, last, parts.index if parts else None)
        if parts is None or gate is None or not _sums_choices(total, last, parts.index):
            continue
        if (last.weight.shape[0], last.weight.shape[1]) != (
            parts.w_in.shape[0],
            parts.w_in.shape[2],
        ):
            continue
        _emit_experts(total, parts, last, gate, ctx)
        return 1
    return 0


def _summed(total: OnnxOp) -> SSAValue:
    """Return the value under the movement in front of a sum."""
    return view_source(total.arguments[0]) or total.arguments[0]


@dataclass(frozen=True, slots=True)
class _Body:
    """The first half of an expert."""

    act: str
    x: SSAValue
    index: SSAValue
    w_in: Array


def _body(last: _Product, ctx: PassContext) -> _Body | None:
    hidden = view_source(last.vector)
    if hidden is None:
        return None
    for act, pattern in _HIDDEN:
        env = find(pattern, hidden, ctx.constants)
        if env is None:
            continue
        parts = [_rows_of_product(env[name], ctx) for name in ("gate", "up") if name in env]
        if any(part is None or part.index is not last.index for part in parts):
            continue
        sources = [part.x for part in parts if part is not None]
        if any(x is not sources[0] for x in sources):
            continue
        w_in = np.concatenate([part.weight for part in parts if part is not None], axis=1)
        return _Body(act, sources[0], last.index, w_in)
    return None


@dataclass(frozen=True, slots=True)
class _Part:
    """Gate or up: some rows of the first matrices, times each token."""

    x: SSAValue
    index: SSAValue
    weight: Array


def _rows_of_product(value: SSAValue, ctx: PassContext) -> _Part | None:
    product = _product_behind(value, ctx)
    if product is None:
        return None
    rows, x = _rows_read(value, product), _repeated_rows(product)
    if rows is None or x is None:
        return None
    return _Part(x, product.index, product.weight[:, rows])


def _product_behind(value: SSAValue, ctx: PassContext) -> _Product | None:
    """Return the gathered product whose elements the movement chain of `value` reads."""
    leaves = trace(value, witnesses(chain_symbols(value))[0]).leaves
    product = onnx(leaves[0].value, "MatMul") if len(leaves) == 1 else None
    if product is None:
        return None
    for at in (0, 1):
        gathered = _gathered(product.arguments[at], ctx)
        if gathered is None:
            continue
        stack, index = gathered
        weight = stack if at == 0 else stack.transpose(0, 2, 1)
        found = _Product(weight, index, product.arguments[1 - at], product.outputs[0])
        return found if _is_matrix_vector(product, at) else None
    return None


def _gathered(value: SSAValue, ctx: PassContext) -> tuple[Array, SSAValue] | None:
    """Return the stack (E, N, C) and the indices (T, k) that select from it."""
    gather = onnx(value, "GatherND") or onnx(value, "Gather")
    if gather is None:
        return None
    stack = ctx.constants.get(gather.arguments[0])
    plain = attr(gather, "batch_dims") in (0, None) and attr(gather, "axis") in (0, None)
    if stack is None or stack.ndim != 3 or not plain:
        return None
    if gather.op.data == "GatherND" and shape_of(gather.arguments[1])[-1] != Dim(1):
        return None
    index = view_source(gather.arguments[1])
    return (stack, index) if index is not None and len(shape_of(index)) == 2 else None


def _is_matrix_vector(product: OnnxOp, at: int) -> bool:
    """Return whether the other operand is one column (or row) per gathered matrix."""
    thin = shape_of(product.arguments[1 - at])[-1 if at == 0 else -2]
    batch = shape_of(product.arguments[at])[:-2]
    return thin == Dim(1) and len(shape_of(product.outputs[0])) == len(batch) + 2


def _rows_read(value: SSAValue, product: _Product) -> Index | None:
    """Return which weight rows n the elements (r, f) of `value` are, the same for every r."""
    width = product.weight.shape[1]
    found_rows: Index | None = None
    for binding in witnesses(chain_symbols(value)):
        found = trace(value, binding)
        leaf = found.reads(product.result)
        if leaf is None or len(found.leaves) != 1:
            return None
        count = leaf.numbers().size // width
        if count == 0 or found.index.size % count:
            return None
        index = found.index.reshape(count, -1)
        expected = index[:1] + np.arange(count)[:, None] * width
        if (index[:1] >= width).any() or not np.array_equal(index, expected):
            return None
        found_rows = index[0]
    return found_rows


def _is_whole(value: SSAValue, product: _Product) -> bool:
    """Return whether `value` holds all elements of the product in their order."""
    rows = _rows_read(value, product)
    return rows is not None and np.array_equal(rows, np.arange(product.weight.shape[1]))


def _choices(binding: Binding, index: SSAValue) -> tuple[int, int]:
    tokens, k = sizes_at(index, binding)
    return tokens, k


def _repeated_rows(product: _Product) -> SSAValue | None:
    """Return x (T, D) if the product's vector for (token, choice) is row `token` of x."""
    source: SSAValue | None = None
    symbols = chain_symbols(product.vector) | symbols_of(product.index)
    for binding in witnesses(symbols):
        found = trace(product.vector, binding)
        leaf = only_leaf(found)
        if leaf is None:
            return None
        tokens, k = _choices(binding, product.index)
        rows = leaf.numbers().reshape(-1, leaf.sizes[-1])
        vectors = _per_choice(found, tokens, k, leaf.sizes[-1])
        if len(rows) != tokens or vectors is None:
            return None
        if not np.array_equal(vectors, np.repeat(rows, k, axis=0)):
            return None
        source = leaf.value
    return source


def _per_choice(found: Trace, tokens: int, k: int, width: int) -> Index | None:
    """Return index numbers as (T*k, width); one vector per token stands for all its choices."""
    if found.index.size == tokens * k * width:
        return found.index.reshape(tokens * k, width)
    if found.index.size == tokens * width and found.index.ndim >= 3:
        return np.repeat(found.index.reshape(tokens, width), k, axis=0)
    return None


def _gates(value: SSAValue, last: _Product, index: SSAValue | None) -> SSAValue | None:
    """Return the gates (T, k) if `value` holds gate (token, choice) for each output element."""
    if index is None:
        return None
    width, source = last.weight.shape[1], None
    for binding in witnesses(chain_symbols(value) | symbols_of(index)):
        found = trace(value, binding)
        tokens, k = _choices(binding, index)
        if len(found.leaves) != 1 or found.leaves[0].numbers().size != tokens * k:
            return None
        held = spread(found.index, (*found.index.shape[:-1], width))
        wanted = np.repeat(np.arange(tokens * k), width)
        if held is None or not np.array_equal(held.reshape(-1), wanted):
            return None
        source = found.leaves[0].value
    return source


def _sums_choices(total: OnnxOp, last: _Product, index: SSAValue) -> bool:
    """Return whether the sum runs over the k choices of each token and nothing else."""
    summed = shape_of(total.arguments[0])
    axes = attr(total, "axes")
    tokens, k = shape_of(index)
    return summed == (tokens, k, Dim(last.weight.shape[1])) and axes == [1]


def _emit_experts(
    total: OnnxOp, parts: _Body, last: _Product, gate: SSAValue, ctx: PassContext
) -> None:
    w_in = ctx.constants.add(parts.w_in)
    w_out = ctx.constants.add(np.ascontiguousarray(last.weight))
    insert_before(total, w_in, w_out)
    width = shape_of(parts.x)[-1]
    x = reshaped(parts.x, (shape_of(parts.index)[0], width), total)
    gates = reshaped(gate, shape_of(parts.index), total)
    experts = ExpertsOp(x, parts.index, gates, w_in.result, w_out.result, act=parts.act)
    insert_before(total, experts)
    replace(total, [reshaped(experts.result, shape_of(total.outputs[0]), total)])


# --- router --------------------------------------------------------------------------------------


def _raise_router(op: Operation) -> int:
    """Raise one TopK with the softmax before or behind it, and the division by the sum."""
    if not isinstance(op, OnnxOp) or op.op.data != "TopK" or attr(op, "largest") != 1:
        return 0
    values, index = op.outputs
    if attr(op, "axis") != len(shape_of(values)) - 1:
        return 0
    before = onnx(op.arguments[0], "Softmax")
    if before is not None:
        linear = _logits(before.arguments[0])
        order = "softmax_topk"
        ends: list[SSAValue] = [values]
        renormalised = _renormalised(values)
        if renormalised is not None:
            order, ends = "softmax_topk_renorm", [renormalised]
    else:
        linear = _logits(op.arguments[0])
        order = "topk_softmax"
        ends = [u for u in _users(values) if onnx(u, "Softmax") is not None]
    if linear is None or len(ends) != 1 or not _softmax_last(before, ends[0], order):
        return 0
    k = shape_of(values)[-1].constant
    route = RouteOp(linear.x, linear.weight, linear.bias, k=k, order=order)
    insert_before(op, route)
    index.replace_all_uses_with(route.index)
    ends[0].replace_all_uses_with(route.gate)
    return 1


def _logits(value: SSAValue) -> LinearOp | None:
    owner = value.owner
    if not isinstance(owner, LinearOp) or owner.act.data != "none" or owner.residual is not None:
        return None
    return owner


def _users(value: SSAValue) -> list[SSAValue]:
    return [use.operation.results[0] for use in value.uses if use.operation.results]


def _renormalised(values: SSAValue) -> SSAValue | None:
    """Return `values / sum(values)` if that is what all users of `values` are part of."""
    users = _users(values)
    divisions = [user for user in users if onnx(user, "Div") is not None]
    if len(users) != 2 or len(divisions) != 1:
        return None
    division = onnx(divisions[0], "Div")
    assert division is not None
    total = onnx(division.arguments[1], "ReduceSum")
    if division.arguments[0] is not values or total is None or total.arguments[0] is not values:
        return None
    last = len(shape_of(values)) - 1
    if attr(total, "axes") != [last] or attr(total, "keepdims") != 1:
        return None
    return divisions[0]


def _softmax_last(before: OnnxOp | None, end: SSAValue, order: str) -> bool:
    softmax = before if before is not None else onnx(end, "Softmax")
    if softmax is None or attr(softmax, "axis") != len(shape_of(softmax.outputs[0])) - 1:
        return False
    return order != "topk_softmax" or len(shape_of(end)) >= 2
