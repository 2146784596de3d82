"""The backward rules: which elements of its operands an operation can observe, by its results.

D(x) is the mask of elements of x that may matter: outside it, any finite number may stand there and
no result of the function changes. `DEMAND_RULES` gives each operation a `DemandKind` and
`DEMAND_HOOKS` has one function per kind; an operation without a row demands its operands whole if
its results are demanded at all. Products and selections ask the forward rules
(`compiler.analysis.zero_rules`) for the zeros that excuse an operand.

A rule must keep one promise: if operands agree wherever D says, results agree where they are
demanded (+0 and -0 agree). So zeros of a factor excuse the other factor only, and are themselves
demanded: `z * z` demands z. Called by `compiler.analysis.demand`.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np
from xdsl.dialects.builtin import IntegerAttr
from xdsl.ir import SSAValue

from compiler.analysis.constants import ConstantTable
from compiler.analysis.mask_moves import (
    Cut,
    Environment,
    Expand,
    Pad,
    Permute,
    Put,
    Reshape,
    Spread,
)
from compiler.analysis.masks import BOTTOM, DENSE, Band, Mask, of_array, of_pattern, padded
from compiler.analysis.zero_hooks import attention_band, gathered, operands
from compiler.dialects.dims import Dim
from compiler.dialects.sp import QUANTISED
from compiler.dialects.types import shape_of


class DemandKind(StrEnum):
    """What an operation observes of its operands, where its results are demanded."""

    POINTWISE = "pointwise"  # the same elements
    PRODUCT = "product"  # the same elements, but where the other factor is zero
    SELECT = "select"  # the same elements, but where the other branch is chosen
    BAND = "band"  # the same elements, inside the triangle that is kept
    EACH = "each"  # operand i is result i
    ROWS = "rows"  # rows of the first operand in which a result is demanded; all of the others
    LINEAR = "linear"  # rows, without columns whose weights are all zero
    EXPERTS = "experts"  # rows of x, indices and gates
    ATTENTION = "attention"  # rows of q, columns of v, keys that some demanded row may see
    RESHAPE = "reshape"
    EXPAND = "expand"
    TRANSPOSE = "transpose"
    SLICE = "slice"  # what is not cut away
    CONCAT = "concat"
    GATHER = "gather"  # slices that are gathered, and every index
    PRUNE = "prune"  # rows that are kept, and every score
    STATE = "state"  # everything: later calls read the cache


class Backward(Protocol):
    """What a rule may ask."""

    constants: ConstantTable

    def demand(self, value: SSAValue) -> Mask:
        """Return which elements of a result are demanded."""
        ...

    def zeros(self, value: SSAValue) -> Mask:
        """Return where a value may be non-zero."""
        ...

    def gather(self, index: SSAValue) -> int:
        """Return the number under which executions record an index array."""
        ...

    def excused(self, mask: Mask, *values: SSAValue) -> Mask:
        """Return the mask under the condition that values stay finite, and so do all quotients."""
        ...


DemandHook = Callable[[Any, Backward], list[Mask]]
"""Returns one mask per operand (absent ONNX operands left out)."""


def whole(op: Any, b: Backward) -> list[Mask]:
    """Everything, if any result is demanded."""
    return [_all(op, b) for _ in operands(op)]


def _all(op: Any, b: Backward) -> Mask:
    return BOTTOM if all(b.demand(result).is_bottom for result in op.results) else DENSE


def narrowed(mask: Mask, value: SSAValue, result: SSAValue) -> Mask:
    """Return the demand of a value that is broadcast to the shape of `result`."""
    given, wide = shape_of(value), shape_of(result)
    if given == wide:
        return mask
    aligned = (Dim(1),) * (len(wide) - len(given)) + given
    for axis, (own, size) in enumerate(zip(aligned, wide, strict=True)):
        if own != size:
            mask = mask.moved(Spread(axis))
    return mask.moved(Reshape(given))


def _pointwise(op: Any, b: Backward) -> list[Mask]:
    result = op.results[0]
    return [narrowed(b.demand(result), value, result) for value in operands(op)]


def _product(op: Any, b: Backward) -> list[Mask]:
    """One factor is excused where the other one, which is demanded there, is zero."""
    result, values = op.results[0], operands(op)
    seen = b.demand(result)
    needed = [seen, seen]
    keeper = 0 if b.constants.get(values[0]) is not None else 1
    if b.zeros(values[keeper]).is_dense:
        keeper = 1 - keeper
    live, free = b.zeros(values[keeper]), values[1 - keeper]
    if values[0] is not values[1] and not live.is_dense:
        wide = live.moved(Expand(shape_of(result)))
        needed[1 - keeper] = seen & b.excused(wide, free)
    return [narrowed(mask, value, result) for mask, value in zip(needed, values, strict=True)]


def _select(op: Any, b: Backward) -> list[Mask]:
    """Where(condition, yes, no): the branch that a known condition leaves is not observed."""
    result, (condition, yes, no) = op.results[0], operands(op)
    seen, known = b.demand(result), b.constants.get(condition)
    wide = b.zeros(condition).moved(Expand(shape_of(result)))
    other = DENSE
    if known is not None:
        other = of_array(np.asarray(known == 0)).moved(Expand(shape_of(result)))
    parts = ((seen, condition), (seen & wide, yes), (seen & other, no))
    return [narrowed(mask, value, result) for mask, value in parts]


def _band(op: Any, b: Backward) -> list[Mask]:
    """Trilu writes zeros outside the triangle whatever stood there."""
    x, upper = op.operands[0], op.attrs.data.get("upper")
    seen = b.demand(op.results[0])
    shift = b.constants.scalar(op.arguments[1]) if len(op.arguments) > 1 else 0
    if isinstance(upper, IntegerAttr) and upper.value.data == 0 and shift is not None:
        rows, columns = shape_of(x)[-2:]
        band = of_pattern(Band(rows, columns, Dim(int(shift))))
        seen = seen & band.moved(Expand(shape_of(x)))
    return [seen, *(_all(op, b) for _ in operands(op)[1:])]


def _each(op: Any, b: Backward) -> list[Mask]:
    return [b.demand(result) for result in op.results]


def in_rows(op: Any, b: Backward, value: SSAValue) -> Mask:
    """Rows of `value` in which some result has a demanded element."""
    shape, found = shape_of(value), BOTTOM
    for result in op.results:
        seen = b.demand(result)
        if not seen.is_bottom and shape_of(result)[:-1] != shape[:-1]:
            return DENSE
        found = found | seen.moved(Spread(len(shape) - 1)).moved(Expand(shape))
    return found


def _rows(op: Any, b: Backward) -> list[Mask]:
    first, *others = operands(op)
    axis = op.attrs.data.get("axis") if hasattr(op, "attrs") else None
    is_last = axis is None or axis.value.data in (-1, len(shape_of(first)) - 1)
    return [in_rows(op, b, first) if is_last else _all(op, b), *(_all(op, b) for _ in others)]


def _linear(op: Any, b: Backward) -> list[Mask]:
    """Zero weights excuse columns of x, but few bits scale by the peak of a whole row."""
    x, weight, *others = operands(op)
    result = op.results[0]
    needed, array = in_rows(op, b, x), b.constants.get(weight)
    is_exact = op.name != "sp.linear" or op.storage.data not in QUANTISED
    if is_exact and array is not None and array.ndim == 2 and np.isfinite(array).all():
        matrix = array if op.name == "sp.linear" else array.T
        columns = b.demand(result).columns()
        used = matrix if columns is None else matrix[columns]
        live = of_array((used != 0).any(axis=0)).moved(Expand(shape_of(x)))
        needed = needed & b.excused(live, x)
    residual = getattr(op, "residual", None)
    rest = [b.demand(result) if value is residual else _all(op, b) for value in others]
    return [needed, _all(op, b), *rest]


def _experts(op: Any, b: Backward) -> list[Mask]:
    return [in_rows(op, b, v) if at < 3 else _all(op, b) for at, v in enumerate(operands(op))]


def _attention(op: Any, b: Backward) -> list[Mask]:
    seen, all_of_it = b.demand(op.result), _all(op, b)
    keys = _seen_keys(op, seen)
    k = v = all_of_it
    if keys is not None:
        k = k & keys.moved(Expand(shape_of(op.k)))
        v = v & b.excused(keys.moved(Expand(shape_of(op.v))), op.v)
    columns = seen.columns()
    if columns is not None and op.heads.value.data == op.kv_heads.value.data:
        v = v & of_array(columns).moved(Expand(shape_of(op.v)))
    found = {op.q: in_rows(op, b, op.q)}
    for value, mask in ((op.k, k), (op.v, v)):
        found[value] = found.get(value, BOTTOM) | mask
    return [found.get(value, all_of_it) for value in operands(op)]


def _seen_keys(op: Any, seen: Mask) -> Mask | None:
    """Return which keys (keys, 1) a demanded row may see, None if nothing static is known."""
    shape = (*shape_of(op.q)[-2:], shape_of(op.k)[-2])
    band = attention_band(op)
    if band.is_dense or len(shape_of(op.q)) != 2 or not all(dim.is_static for dim in shape):
        return None
    rows, width, keys = (dim.constant for dim in shape)
    static = Mask(frozenset(c for c in seen.clauses if not c.is_dynamic and not c.assumes))
    alive = static.evaluate(Environment(), (rows, width)).any(axis=1)
    visible = band.evaluate(Environment(), (rows, keys))[alive].any(axis=0)
    return of_array(np.asarray(visible).reshape(-1, 1))


def _reshape(op: Any, b: Backward) -> list[Mask]:
    return [b.demand(op.result).moved(Reshape(shape_of(op.x)))]


def _expand(op: Any, b: Backward) -> list[Mask]:
    return [narrowed(b.demand(op.result), op.x, op.result)]


def _transpose(op: Any, b: Backward) -> list[Mask]:
    back = np.argsort([int(p) for p in op.perm.get_values()])
    return [b.demand(op.result).moved(Permute(tuple(int(p) for p in back)))]


def _slice(op: Any, b: Backward) -> list[Mask]:
    axis = op.axis.value.data
    step = Pad(axis, op.offset, shape_of(op.x)[axis], op.step.value.data)
    return [padded(b.demand(op.result), step, shape_of(op.result))]


def _concat(op: Any, b: Backward) -> list[Mask]:
    axis, before, found = op.axis.value.data, Dim(0), []
    for part in op.parts:
        size = shape_of(part)[axis]
        found.append(b.demand(op.result).moved(Cut(axis, before, size, 1)))
        before = before + size
    return found


def _gather(op: Any, b: Backward) -> list[Mask]:
    table, index, axis = gathered(op)
    result = op.results[0]
    put = Put(axis, len(shape_of(index)), b.gather(index), shape_of(table)[axis])
    rows = padded(b.demand(result), put, shape_of(result))
    found = {table: rows, index: _all(op, b)}
    return [found[value] for value in operands(op)]


def _prune(op: Any, b: Backward) -> list[Mask]:
    tokens, kept, index = op.operands[0], op.results[0], op.results[1]
    shape, places = shape_of(tokens), shape_of(index)
    axis = len(shape) - 2
    split = (*shape[:axis], *places, *shape[axis + 1 :])
    put = Put(axis, len(places), b.gather(index), shape[axis])
    rows = padded(b.demand(kept).moved(Reshape(split)), put, split)
    needed = BOTTOM if b.demand(kept).is_bottom else rows
    return [needed, *(_all(op, b) for _ in operands(op)[1:])]


def _state(op: Any, b: Backward) -> list[Mask]:
    """Later calls may read every row, whatever this one shows."""
    return [DENSE for _ in operands(op)]


DEMAND_HOOKS: Final[Mapping[DemandKind, DemandHook]] = MappingProxyType(
    {
        DemandKind.POINTWISE: _pointwise,
        DemandKind.PRODUCT: _product,
        DemandKind.SELECT: _select,
        DemandKind.BAND: _band,
        DemandKind.EACH: _each,
        DemandKind.ROWS: _rows,
        DemandKind.LINEAR: _linear,
        DemandKind.EXPERTS: _experts,
        DemandKind.ATTENTION: _attention,
        DemandKind.RESHAPE: _reshape,
        DemandKind.EXPAND: _expand,
        DemandKind.TRANSPOSE: _transpose,
        DemandKind.SLICE: _slice,
        DemandKind.CONCAT: _concat,
        DemandKind.GATHER: _gather,
        DemandKind.PRUNE: _prune,
        DemandKind.STATE: _state,
    }
)


def _kind(kind: DemandKind, *keys: str, onnx: tuple[str, ...] = ()) -> dict[str, DemandKind]:
    return dict.fromkeys((*keys, *(f"sp.onnx:{operator}" for operator in onnx)), kind)


_D: Final = DemandKind
_UNARY: Final = (
    *("relu", "silu", "gelu", "gelu_tanh", "neg", "sqrt", "tanh", "exp", "sigmoid"),
    "reciprocal",
)
DEMAND_RULES: Final[Mapping[str, DemandKind]] = MappingProxyType(
    {
        **_kind(
            _D.POINTWISE,
            *(f"sp.unary:{kind}" for kind in _UNARY),
            *(f"sp.binary:{kind}" for kind in ("add", "sub", "div")),
            onnx=(
                *("Relu", "Clip", "ThresholdedRelu", "LeakyRelu", "Cast", "Identity", "Not"),
                *("Abs", "Ceil", "Erf", "Floor", "Neg", "Round", "Sign", "Sin", "Sqrt", "Swish"),
                *("Gelu", "Tanh", "Cos", "Exp", "Log", "Reciprocal", "Sigmoid"),
                *("Add", "Sub", "Max", "Min", "Or", "Div", "Pow"),
                *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
            ),
        ),
        **_kind(_D.PRODUCT, "sp.binary:mul", onnx=("Mul", "And")),
        **_kind(_D.SELECT, onnx=("Where",)),
        **_kind(_D.BAND, onnx=("Trilu",)),
        **_kind(_D.EACH, "mm.splice"),
        **_kind(_D.ROWS, "sp.norm:rms", "sp.norm:layer", "sp.softmax", "mm.rope", "moe.route"),
        **_kind(_D.ROWS, onnx=("RMSNormalization", "LayerNormalization", "Softmax")),
        **_kind(_D.LINEAR, "sp.linear", onnx=("MatMul",)),
        **_kind(_D.EXPERTS, "moe.experts"),
        **_kind(_D.ATTENTION, "mm.attention"),
        **_kind(_D.RESHAPE, "sp.reshape"),
        **_kind(_D.EXPAND, "sp.expand"),
        **_kind(_D.TRANSPOSE, "sp.transpose"),
        **_kind(_D.SLICE, "sp.slice"),
        **_kind(_D.CONCAT, "sp.concat"),
        **_kind(_D.GATHER, "sp.embed", onnx=("Gather",)),
        **_kind(_D.PRUNE, "mm.prune", onnx=("ai.sparsefleet::DynamicPrune",)),
        **_kind(_D.STATE, "mm.kv_append"),
    }
)
"""By the key that `SparsityInvariant.zero_rule` returns."""

DIVIDING: Final = frozenset(
    {"sp.unary:reciprocal", "sp.binary:div"}
    | {f"sp.onnx:{operator}" for operator in ("Reciprocal", "Div", "Pow")}
)
"""Operations that tell +0 from -0: only by an infinite result."""
