"""What each kind of zero rule does, one function per kind (`HOOKS`).

A hook gets an operation and the `Flow` of its function and returns the masks of the operation's
results, in order. It must claim a zero only if the element is zero in every execution in which the
values it assumes are finite. Assumptions are handed to `Flow.assume`, which drops those with a
proof. Called by `compiler.analysis.propagation`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np
from xdsl.dialects.builtin import FloatAttr, IntegerAttr
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import Array, ConstantTable
from compiler.analysis.mask_moves import Bits, Cut, Expand, Gather, Pad, Permute, Reshape
from compiler.analysis.masks import DENSE, Band, Density, Mask, of_array, of_pattern, padded
from compiler.analysis.zero_rules import ZeroKind, ZeroRule
from compiler.dialects.dims import Dim
from compiler.dialects.invariant import zero_rule
from compiler.dialects.sp import QUANTISED, ConstantOp, OnnxOp, SoftmaxOp
from compiler.dialects.types import dtype_of, shape_of

EXP_UNDERFLOW: Final = 110.0
"""exp(-110) is zero in single precision, and in our own exp."""


class Flow(Protocol):
    """What a hook may ask."""

    constants: ConstantTable

    def mask(self, value: SSAValue) -> Mask:
        """Return the mask of a value that was computed before."""
        ...

    def fresh(self, value: SSAValue, kind: str, *, granularity: str, density: Density) -> Mask:
        """Return the mask of a new run-time source whose pattern is made from `value`."""
        ...

    def gather(self, index: SSAValue) -> int:
        """Return the number under which executions record a run-time index array."""
        ...

    def assume(self, mask: Mask, *values: SSAValue) -> Mask:
        """Return the mask under the condition that values are finite, dropping proved ones."""
        ...

    def refuses(self, value: SSAValue) -> bool:
        """Return whether a step is refused at run time unless the value is finite."""
        ...

    def bound(self, value: SSAValue) -> float:
        """Return an upper bound of the magnitude, infinity if there is none."""
        ...

    def state(self, op: Operation) -> list[Bits]:
        """Join what is appended into the cache and return its column patterns."""
        ...


Hook = Callable[[Any, Flow, ZeroRule], list[Mask]]


def operands(op: Operation) -> list[SSAValue]:
    """Return the operands, without those that an ONNX node omits."""
    return list(op.arguments) if isinstance(op, OnnxOp) else list(op.operands)


def broadcast(mask: Mask, value: SSAValue, result: SSAValue) -> Mask:
    """Return the mask of `value` broadcast to the shape of `result`."""
    if shape_of(value) == shape_of(result):
        return mask
    return mask.moved(Expand(shape_of(result)))


def constant(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """The array's own zeros."""
    return [flow.constants.learn(op, own_zeros)]


def own_zeros(array: Array) -> Mask:
    """Return the mask of an array of numbers."""
    return of_array(np.asarray(array != 0)) if array.dtype.kind in "fiub" else DENSE


def live_places(array: Array) -> Bits | None:
    """Return where a matrix is not zero, None if it is no matrix of finite numbers."""
    is_usable = array.ndim == 2 and bool(np.isfinite(array).all())
    return np.asarray(array != 0) if is_usable else None


def live_rows(array: Array) -> Bits | None:
    """Return which rows of a matrix are not all zero, None if it is no matrix of finite numbers."""
    live = live_places(array)
    return None if live is None else np.asarray(live.any(axis=1))


def live_columns(array: Array) -> Bits | None:
    """Return which columns are not all zero, None if it is no matrix of finite numbers."""
    return live_rows(array.T)


def source(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """A fresh source: zero where the result is, and wherever the operand was."""
    result = op.results[0]
    made = flow.fresh(result, rule.source, granularity="element", density=(0.0, 1.0))
    return [made & (flow.mask(op.operands[0]) if maps_zero(op, flow.constants) else DENSE)]


def annihilating(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """Zero where either factor is, if the other one is finite there (or the product is checked)."""
    first, second = operands(op)
    result, masks = op.results[0], []
    for value, other in ((first, second), (second, first)):
        mask = broadcast(flow.mask(value), value, result)
        masks.append(mask if flow.refuses(result) else flow.assume(mask, other))
    return [masks[0] & masks[1]]


def union(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """Zero only where every term is."""
    result, joined = op.results[0], None
    for value in operands(op):
        mask = broadcast(flow.mask(value), value, result)
        joined = mask if joined is None else joined | mask
    return [joined if joined is not None else DENSE]


def preserving(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """f(0) = 0, element by element; further operands are parameters."""
    mask = flow.mask(op.operands[0])
    if rule.row == "rms norm":
        mask = flow.assume(mask, op.operands[0], *op.operands[1:])
    return [mask, *(flow.mask(value) for value in op.operands[1 : len(op.results)])]


def cast(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """Zeros stay; a truth value turned into a number is a mask that somebody multiplies by."""
    mask = flow.mask(op.operands[0])
    if dtype_of(op.operands[0]) != "bool" or mask.level in ("bottom", "static"):
        return [mask]
    made = flow.fresh(op.operands[0], rule.source, granularity="element", density=(0.0, 1.0))
    return [mask & made]


def quotient(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """0 / d is zero for a constant d without zeros and NaNs."""
    first, second = operands(op)
    divisor = flow.constants.get(second)
    if divisor is None or not bool((divisor != 0).all()) or bool(np.isnan(divisor).any()):
        return [DENSE]
    return [broadcast(flow.mask(first), first, op.results[0])]


def breaking(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """f(0) is not zero, or nobody knows."""
    return [DENSE for _ in op.results]


def softmax(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """Zero where the operand is minus infinity, or so low that exp underflows."""
    x = op.operands[0]
    axis = -1 if isinstance(op, SoftmaxOp) else op.attrs.data["axis"].value.data
    if axis not in (-1, len(shape_of(x)) - 1):
        return [DENSE]
    return [_seen(x, op.results[0], flow)]


def _live_outputs(op: Any, flow: Flow) -> Bits | None:
    """Return which outputs have a weight that is not zero on an input that may not be zero."""
    x, owner = op.operands[0], op.operands[1].owner
    if not isinstance(owner, ConstantOp):
        return None
    is_rows = op.name in ("sp.linear", "sp.conv2d")
    inputs = flow.mask(x).columns() if op.name != "sp.conv2d" else None
    if inputs is None:
        return flow.constants.learn(owner, live_rows if is_rows else live_columns)
    live = flow.constants.learn(owner, live_places)
    if live is None:
        return None
    return np.asarray(((live if is_rows else live.T) & inputs).any(axis=1))


def contraction(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """Sums over k: dense, but for outputs whose every product has a static zero factor.

    Reads only rows k where M(x) holds; `compiler.analysis.savings` counts that.
    """
    x, columns = op.operands[0], _live_outputs(op, flow)
    if columns is None:
        return [DENSE]
    mask = of_array(columns).moved(Expand(shape_of(op.results[0])))
    checked = op.name == "sp.linear" and op.storage.data in QUANTISED
    mask = mask if checked else flow.assume(mask, x)
    bias = getattr(op, "bias", None)
    if bias is not None:
        mask = mask | broadcast(flow.mask(bias), bias, op.results[0])
    return [mask]


def reshape(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """The same elements in the same flat order."""
    return [flow.mask(op.x).moved(Reshape(shape_of(op.result)))]


def expand(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """Repeated elements."""
    return [broadcast(flow.mask(op.x), op.x, op.result)]


def transpose(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """Permuted axes."""
    return [flow.mask(op.x).moved(Permute(tuple(int(p) for p in op.perm.get_values())))]


def slice_(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """A part of one axis."""
    axis, stride = op.axis.value.data, op.step.value.data
    return [flow.mask(op.x).moved(Cut(axis, op.offset, shape_of(op.result)[axis], stride))]


def concat(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """Parts one after the other: the join of the parts, each padded with zeros."""
    axis, before, joined = op.axis.value.data, Dim(0), None
    total = shape_of(op.result)[axis]
    for part in op.parts:
        shape = shape_of(part)
        mask = padded(flow.mask(part), Pad(axis, before, total), shape)
        joined = mask if joined is None else joined | mask
        before = before + shape[axis]
    return [joined if joined is not None else DENSE]


def gather(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """Rows of a table by a run-time index."""
    table, index, axis = gathered(op)
    mask = flow.mask(table)
    if mask.is_dense:
        return [DENSE]
    columns = mask.columns()
    if columns is not None and axis == 0 and len(shape_of(table)) == 2:
        return [of_array(columns).moved(Expand(shape_of(op.results[0])))]
    return [mask.moved(Gather(axis, flow.gather(index)))]


def route(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """Chosen experts: a one-hot block mask over E with exactly k per row; results are dense."""
    share = op.k.value.data / shape_of(op.weight)[0].constant
    flow.fresh(op.index, rule.source, granularity="block", density=(share, share))
    return [DENSE, DENSE]


def scatter(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """Values scattered into a tensor: zero where the tensor is and nothing was put."""
    data, index, _ = operands(op)
    base = flow.mask(data)
    axis = op.attrs.data["axis"].value.data
    same_rows = shape_of(data)[:-1] == shape_of(index)[:-1]
    if base.is_dense or not same_rows or axis not in (-1, len(shape_of(data)) - 1):
        return [DENSE]
    chosen, width = shape_of(index)[-1], shape_of(data)[-1]
    share = 1.0
    if chosen.is_static and width.is_static:
        share = min(1.0, chosen.constant / max(1, width.constant))
    put = flow.fresh(index, rule.source, granularity="block", density=(0.0, share))
    return [base | put]


def where(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """A mask chooses: zero where the chosen one is; the unchosen one may be anything."""
    condition, yes, no = operands(op)
    result = op.results[0]
    chosen = broadcast(_chosen(condition, flow), condition, result)
    both = broadcast(flow.mask(yes), yes, result) | broadcast(flow.mask(no), no, result)
    return [both & (chosen | broadcast(flow.mask(no), no, result))]


def band(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """Trilu with upper = 0 keeps the lower triangle: row i keeps columns up to i + k."""
    x = op.operands[0]
    upper = op.attrs.data.get("upper")
    if not isinstance(upper, IntegerAttr) or upper.value.data != 0:
        return [flow.mask(x)]
    shift = flow.constants.scalar(op.arguments[1]) if len(op.arguments) > 1 else 0
    if shift is None:
        return [flow.mask(x)]
    rows, columns = shape_of(x)[-2:]
    mask = of_pattern(Band(rows, columns, Dim(int(shift))))
    return [flow.mask(x) & mask.moved(Expand(shape_of(x)))]


def attention(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """A mixture of values: dense, but for columns in which every value is zero.

    Its probabilities are zero outside a static band (`attention_band`).
    """
    columns = flow.mask(op.v).columns()
    if columns is None:
        return [DENSE]
    groups = op.kv_heads.value.data
    shared = columns.reshape(groups, -1).repeat(op.heads.value.data // groups, axis=0)
    return [flow.assume(of_array(shared.reshape(-1)).moved(Expand(shape_of(op.result))), op.result)]


def prune(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """Kept rows: zeros go with their rows, which are known when the step runs."""
    tokens, kept = op.operands[0], op.results[0]
    axis = len(shape_of(tokens)) - 2
    index = op.results[1]
    flow.fresh(index, rule.source, granularity="row", density=_kept_share(tokens, kept))
    columns = flow.mask(tokens).columns()
    if columns is not None:
        return [of_array(columns).moved(Expand(shape_of(kept))), DENSE]
    rows = flow.mask(tokens)
    if rows.is_dense or any(size != Dim(1) for size in shape_of(index)[:-1]):
        return [DENSE, DENSE]
    moved = rows.moved(Gather(axis, flow.gather(index)))
    return [moved.moved(Reshape(shape_of(kept))), DENSE]


def prune_merge(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """Rows from the count on are zero; others are tokens or means of tokens: columns stay dead."""
    rows = shape_of(op.kept)[-2]
    low = op.min_keep.value.data / max(1, rows.constant)
    real = flow.fresh(op.count, rule.source, granularity="row", density=(low, 1.0))
    real = real.moved(Reshape((rows, Dim(1)))).moved(Expand(shape_of(op.kept)))
    columns = flow.mask(op.tokens).columns()
    if columns is not None:
        dead = of_array(columns).moved(Expand(shape_of(op.kept)))
        real = real & (dead if op.merge.value.data == 0 else flow.assume(dead, op.tokens))
    return [real, DENSE, DENSE]


def state(op: Any, flow: Flow, rule: ZeroRule) -> list[Mask]:
    """Cache rows: columns that no step ever wrote stay zero."""
    columns = flow.state(op)
    return [
        of_array(bits).moved(Expand(shape_of(result)))
        for bits, result in zip(columns, op.results, strict=True)
    ]


def attention_band(op: Any) -> Mask:
    """Return the mask of an attention's probabilities (rows, keys), dense without a mask."""
    if op.mask.data != "causal":
        return DENSE
    rows, keys = shape_of(op.q)[-2], shape_of(op.k)[-2]
    return of_pattern(Band(rows, keys, keys + rows.times(-1)))


HOOKS: Final[Mapping[ZeroKind, Hook]] = MappingProxyType(
    {
        ZeroKind.CONSTANT: constant,
        ZeroKind.SOURCE: source,
        ZeroKind.ANNIHILATING: annihilating,
        ZeroKind.UNION: union,
        ZeroKind.PRESERVING: preserving,
        ZeroKind.CAST: cast,
        ZeroKind.QUOTIENT: quotient,
        ZeroKind.BREAKING: breaking,
        ZeroKind.SOFTMAX: softmax,
        ZeroKind.CONTRACTION: contraction,
        ZeroKind.RESHAPE: reshape,
        ZeroKind.EXPAND: expand,
        ZeroKind.TRANSPOSE: transpose,
        ZeroKind.SLICE: slice_,
        ZeroKind.CONCAT: concat,
        ZeroKind.GATHER: gather,
        ZeroKind.ROUTE: route,
        ZeroKind.EXPERTS: breaking,
        ZeroKind.SCATTER: scatter,
        ZeroKind.WHERE: where,
        ZeroKind.BAND: band,
        ZeroKind.ATTENTION: attention,
        ZeroKind.PRUNE: prune,
        ZeroKind.PRUNE_MERGE: prune_merge,
        ZeroKind.STATE: state,
    }
)


def gathered(op: Any) -> tuple[SSAValue, SSAValue, int]:
    """Return table, index and axis of a gather."""
    if isinstance(op, OnnxOp):
        axis = op.attrs.data["axis"]
        assert isinstance(axis, IntegerAttr)
        return op.arguments[0], op.arguments[1], axis.value.data
    return op.table, op.ids, 0


def _kept_share(tokens: SSAValue, kept: SSAValue) -> Density:
    before, after = shape_of(tokens)[-2], shape_of(kept)[-2]
    if not (before.is_static and after.is_static and before.constant):
        return (0.0, 1.0)
    share = after.constant / before.constant
    return (share, share)


def maps_zero(op: Operation, constants: ConstantTable) -> bool:
    """Return whether a source maps zero to zero (Clip with 0 outside its bounds does not)."""
    if not isinstance(op, OnnxOp) or op.op.data == "Relu":
        return True
    if op.op.data == "ThresholdedRelu":
        alpha = op.attrs.data.get("alpha")
        return isinstance(alpha, FloatAttr) and alpha.value.data >= 0
    low, high = (constants.scalar(op.operand_at(at)) for at in (1, 2))
    has_low, has_high = op.operand_at(1) is not None, op.operand_at(2) is not None
    fits_low = not has_low or (low is not None and low <= 0)
    return fits_low and (not has_high or (high is not None and high >= 0))


def _seen(x: SSAValue, result: SSAValue, flow: Flow) -> Mask:
    """Return where softmax of `x` may be non-zero, from how `x` was masked."""
    owner = x.owner
    if not isinstance(owner, Operation):
        return DENSE
    match zero_rule(owner):
        case "sp.onnx:Add" | "sp.binary:add":
            return _seen_sum(owner, result, flow)
        case "sp.onnx:Where":
            return _seen_where(owner, result, flow)
        case "sp.reshape" if shape_of(x)[-1] == shape_of(owner.operands[0])[-1]:
            seen = _seen(owner.operands[0], result, flow)
            return seen.moved(Reshape(shape_of(x)))
        case _:
            return DENSE


def _seen_sum(op: Operation, result: SSAValue, flow: Flow) -> Mask:
    """Scores plus a constant: unseen where the constant is far below the row's greatest."""
    act = op.properties.get("act")
    if act is not None and getattr(act, "data", "none") != "none":
        return DENSE
    for scores, added in (tuple(op.operands), tuple(op.operands)[::-1]):
        array = flow.constants.get(added)
        if array is None or not array.ndim or shape_of(added)[-1] != shape_of(result)[-1]:
            continue
        bound = flow.bound(scores)
        mask = of_array(_above_underflow(array, bound)).moved(Expand(shape_of(op.results[0])))
        return mask if np.isfinite(bound) else flow.assume(mask, scores)
    return DENSE


def _above_underflow(array: Array, bound: float) -> Bits:
    values = array.astype(np.float64)
    top = values.max(axis=-1, keepdims=True, initial=-np.inf)
    if not np.isfinite(bound):
        return np.asarray((values != -np.inf) | ~np.isfinite(top))
    rounding = 1e-6 * np.abs(np.where(np.isfinite(values), values, 0.0))
    low = values < top - 2 * bound - EXP_UNDERFLOW - rounding
    return np.asarray(~(low & np.isfinite(top)))


def _seen_where(op: Operation, result: SSAValue, flow: Flow) -> Mask:
    """where(m, scores, -inf): unseen where m is false; a row without any m is NaN, not finite."""
    condition, _, no = operands(op)
    filler = flow.constants.get(no)
    if filler is None or not filler.size or not bool((filler == -np.inf).all()):
        return DENSE
    return flow.assume(broadcast(_chosen(condition, flow), condition, op.results[0]), result)


def _chosen(condition: SSAValue, flow: Flow) -> Mask:
    mask = flow.mask(condition)
    if mask.level in ("bottom", "static"):
        return mask
    return mask & flow.fresh(condition, "where", granularity="element", density=(0.0, 1.0))
