"""One row per IR operation: which kernel it becomes, with which operands and parameters.

A row takes the operation and the selection and returns the matrices of its results.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import Array
from compiler.analysis.conv_runs import worthwhile
from compiler.dialects.dims import Dim
from compiler.dialects.mm import (
    AttentionOp,
    AttentionRowOp,
    AttentionScoreOp,
    KvAppendOp,
    PruneOp,
    PruneTopPOp,
    RopeOp,
    SpliceOp,
)
from compiler.dialects.moe import EXPERT_ACTS, ROUTE_ORDERS, ExpertsOp, RouteOp
from compiler.dialects.movement import ConcatOp, ReshapeOp, SliceOp
from compiler.dialects.sp import (
    ArgmaxOp,
    BinaryOp,
    Conv2dOp,
    EmbedOp,
    ImageOp,
    LinearOp,
    NormOp,
    OnnxOp,
    SoftmaxOp,
    UnaryOp,
)
from compiler.dialects.types import dtype_of, shape_of
from compiler.kernels.program import Act, ExpertAct, NormKind, Op, RouteOrder, UnaryKind
from compiler.passes.matrices import as_matrix, broadcast_matrix
from compiler.passes.pipeline_spec import QUANTISE_W8
from compiler.passes.selection import Selection

Values = list[SSAValue]

ACTS: Final = MappingProxyType({act.name.lower(): int(act) for act in Act})
NORMS: Final = MappingProxyType({kind.name.lower(): int(kind) for kind in NormKind})
UNARIES: Final = MappingProxyType({kind.name.lower(): int(kind) for kind in UnaryKind})
ORDERS: Final = MappingProxyType({name: int(RouteOrder[name.upper()]) for name in ROUTE_ORDERS})
EXPERTS: Final = MappingProxyType({name: int(ExpertAct[name.upper()]) for name in EXPERT_ACTS})
PRODUCTS: Final = MappingProxyType({"w4": Op.LINEAR, "w8": Op.LINEAR_W8, "f32": Op.LINEAR_F32})
BINARIES: Final = MappingProxyType({"add": Op.ADD, "mul": Op.MUL, "sub": Op.SUB, "div": Op.DIV})


def _view(op: ReshapeOp, sel: Selection) -> Values:
    source = sel.matrix(op.x)
    assert source is not None
    cols = shape_of(source)[-1]
    is_column = cols == Dim(1) and all(dim == Dim(1) for dim in shape_of(op.result)[:-1])
    if sel.is_graph and all(dim.is_static for dim in shape_of(op.result)):
        is_column = False
    if shape_of(op.result)[-1:] != (cols,) and not is_column:
        sel.refuse("it changes the number of columns")
    return [source]


def _splice(op: SpliceOp, sel: Selection) -> Values:
    return [v for v in (sel.matrix(op.tokens), sel.matrix(op.index)) if v is not None]


def _image(op: ImageOp, sel: Selection) -> Values:
    params = {"divide": op.divide.value.data, "subtract": op.subtract.value.data}
    return sel.call(Op.IMAGE_U8, [sel.matrix(op.pixels)], [], params, [sel.result_type(op.result)])


def _embed(op: EmbedOp, sel: Selection) -> Values:
    table = sel.weight(sel.array(op.table))
    return sel.call(Op.EMBED, [sel.matrix(op.ids)], [table], {}, [sel.result_type(op.result)])


def _linear(op: LinearOp, sel: Selection) -> Values:
    kind = PRODUCTS[op.storage.data]
    return sel.call(
        kind,
        [sel.matrix(op.x), sel.matrix(op.residual)],
        [sel.weight(sel.array(op.weight)), sel.weight(sel.array(op.bias))],
        {"act": ACTS[op.act.data], **_row_step(op, sel)},
        [sel.result_type(op.result)],
    )


def _row_step(op: LinearOp, sel: Selection) -> dict[str, int | float]:
    """Return the step that all rows of a product in eight bits are multiples of, if there is one.

    Rows that bytes around their middle stand for fit the kernel's int8 as they are.
    """
    made = op.x.owner
    if op.storage.data != QUANTISE_W8 or not isinstance(made, OnnxOp):
        return {}
    if made.op.data != "DequantizeLinear" or len(made.arguments) < 3:
        return {}
    step, zero = (sel.array(value) for value in made.arguments[1:])
    if step is None or zero is None or not step.size == zero.size == 1:
        return {}
    fits = int(zero.item()) in middles(dtype_of(made.arguments[0]))
    return {"x_step": float(step.item())} if fits and step.item() > 0 else {}


def middles(dtype: str) -> tuple[int, ...]:
    """Return the codes of a type of bytes from which every other is at most 128 away."""
    return {"uint8": (127, 128), "int8": (-1, 0)}.get(dtype, ())


def _norm(op: NormOp, sel: Selection) -> Values:
    return sel.call(
        Op.NORM,
        [sel.matrix(op.x)],
        [sel.weight(sel.array(op.gamma)), sel.weight(sel.array(op.beta))],
        {"kind": NORMS[op.kind.data], "eps": op.eps.value.data},
        [sel.result_type(op.result)],
    )


def rope_tables(inv_freq: Array, positions: int) -> tuple[Array, Array]:
    """Return cosine and sine of position * frequency, each (positions, hd/2) f32.

    The angle is rounded to f32 as the model's own product is; its functions are taken in f64.
    """
    steps = np.arange(positions, dtype=np.float32)[:, None]
    angle = (steps * inv_freq.astype(np.float32)[None, :]).astype(np.float64)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def _rope(op: RopeOp, sel: Selection) -> Values:
    inv_freq = sel.array(op.inv_freq)
    assert inv_freq is not None
    cosine, sine = rope_tables(inv_freq, sel.ctx.spec.max_positions)
    return sel.call(
        Op.ROPE,
        [sel.matrix(op.x), sel.matrix(op.positions)],
        [sel.weight(cosine), sel.weight(sine)],
        {"heads": op.heads.value.data},
        [sel.result_type(op.result)],
    )


def _kv_append(_op: KvAppendOp, _sel: Selection) -> Values:
    """Leave it to the attention that reads the cache; past rows never exist as a matrix."""
    return []


def _attention(op: AttentionOp, sel: Selection) -> Values:
    append = op.k.owner
    k, v, layer = op.k, op.v, -1
    if isinstance(append, KvAppendOp):
        layer = append.layer.value.data
        k, v = append.k, append.v
        if op.v is not append.values or layer in sel.cached:
            sel.refuse(f"cache layer {layer} is read by more than one attention")
        sel.cached.add(layer)
    params: dict[str, int | float] = {
        "heads": op.heads.value.data,
        "kv_heads": op.kv_heads.value.data,
        "scale": op.scale.value.data,
        "causal": int(op.mask.data == "causal"),
        "kv_layer": layer,
    }
    operands = [sel.matrix(op.q), sel.matrix(k), sel.matrix(v)]
    return sel.call(Op.ATTENTION, operands, [], params, [sel.result_type(op.result)])


def append_only(op: KvAppendOp, sel: Selection) -> None:
    """Append rows to a cache layer whose attention is dead."""
    heads = op.heads.value.data
    params: dict[str, int | float] = {
        "heads": heads,
        "kv_heads": heads,
        "scale": 1.0,
        "causal": 1,
        "kv_layer": op.layer.value.data,
        "append_only": 1,
    }
    sel.call(Op.ATTENTION, [sel.matrix(op.k), sel.matrix(op.v)], [], params, [])


def _attention_row(op: AttentionRowOp, sel: Selection) -> Values:
    params: dict[str, int | float] = {
        "heads": op.heads.value.data,
        "scale": op.scale.value.data,
        "row": op.row.value.data,
    }
    operands = [sel.matrix(op.q), sel.matrix(op.k)]
    return sel.call(Op.ATTENTION_ROW, operands, [], params, [sel.result_type(op.result)])


def _prune(op: PruneOp, sel: Selection) -> Values:
    params: dict[str, int | float] = {
        "k": op.k.value.data,
        "score_offset": op.score_offset.value.data,
    }
    types = [sel.result_type(op.kept), sel.column_type(op.index)]
    return sel.call(Op.PRUNE, [sel.matrix(op.tokens), sel.matrix(op.score)], [], params, types)


def _attention_score(op: AttentionScoreOp, sel: Selection) -> Values:
    params: dict[str, int | float] = {
        "heads": op.heads.value.data,
        "scale": op.scale.value.data,
        "row": op.row.value.data,
        "first": op.first.value.data,
    }
    operands = [sel.matrix(op.q), sel.matrix(op.k)]
    return sel.call(Op.ATTENTION_SCORE, operands, [], params, [sel.result_type(op.result)])


def _prune_top_p(op: PruneTopPOp, sel: Selection) -> Values:
    params: dict[str, int | float] = {
        "p": op.p.value.data,
        "min_keep": op.min_keep.value.data,
        "max_keep": op.max_keep.value.data,
        "merge": op.merge.value.data,
        "key_offset": op.key_offset.value.data,
    }
    operands = [sel.matrix(op.tokens), sel.matrix(op.score), sel.matrix(op.keys)]
    types = [sel.result_type(op.kept), sel.column_type(op.index), sel.result_type(op.count)]
    return sel.call(Op.PRUNE_TOP_P, operands, [], params, types)


def _conv2d(op: Conv2dOp, sel: Selection) -> Values:
    weight, bias = sel.array(op.weight), sel.weight(sel.array(op.bias))
    assert weight is not None
    params: dict[str, int | float] = {**op.parameters(), "act": ACTS[op.act.data]}
    row = weight.shape[1] // int(params["kh"])
    runs = None if op.is_depthwise else worthwhile(weight, row)
    if runs is not None:
        stored = [sel.weight(part) for part in (runs.taps, runs.first, runs.runs)]
        kind, held = Op.SPARSE_CONV, [*stored, bias]
    elif op.is_depthwise:
        kind, held = Op.CONV_DEPTHWISE, [sel.weight(np.ascontiguousarray(weight.T)), bias]
    else:
        kind, held = Op.CONV2D, [sel.weight(weight), bias]
    return sel.call(kind, [sel.matrix(op.x)], held, params, [sel.result_type(op.result)])


def _concat(op: ConcatOp, sel: Selection) -> Values:
    axis, rank = op.axis.value.data, len(shape_of(op.result))
    if axis == rank - 1:
        return _concat_columns(op, sel)
    leading = shape_of(op.result)[:axis]
    if any(dim != Dim(1) for dim in leading):
        sel.refuse("it joins parts along an inner axis")
    return _concat_rows(op, sel)


def _concat_columns(op: ConcatOp, sel: Selection) -> Values:
    parts = [sel.matrix(part) for part in op.parts]
    return sel.call(Op.COLS_CONCAT, parts, [], {}, [sel.result_type(op.result)])


def _concat_rows(op: ConcatOp, sel: Selection) -> Values:
    """Join from left to right, two parts per call; at most one part of a call is constant."""
    whole = sel.result_type(op.result)
    if len(op.parts) != 2:
        sel.refuse("it joins more than two parts")
    constants = [sel.array(part) for part in op.parts]
    constant = next((as_matrix(array) for array in constants if array is not None), None)
    operands = [
        None if array is not None else sel.matrix(part)
        for part, array in zip(op.parts, constants, strict=True)
    ]
    if operands == [None, None]:
        sel.refuse("all its parts are constant")
    return sel.call(Op.ROWS_CONCAT, list(operands), [sel.weight(constant)], {}, [whole])


def _slice(op: SliceOp, sel: Selection) -> Values:
    shape, axis = shape_of(op.x), op.axis.value.data
    count = shape_of(op.result)[axis]
    if op.step.value.data != 1:
        sel.refuse("it takes steps")
    is_column = shape_of(sel.matrix(op.x) or op.x)[-1] == Dim(1) and shape[-1] != Dim(1)
    if axis == len(shape) - 1 and not is_column:
        if not (op.offset.is_static and count.is_static):
            sel.refuse("columns are chosen at run time")
        params: dict[str, int | float] = {"start": op.offset.constant, "count": count.constant}
        kind = sel.result_type(op.result)
        return sel.call(Op.COLS_SLICE, [sel.matrix(op.x)], [], params, [kind])
    if any(dim != Dim(1) for dim in shape[:axis]):
        sel.refuse("it slices an inner axis")
    kind = sel.column_type(op.result) if is_column else sel.result_type(op.result)
    rows = shape[axis]
    if op.offset == rows + Dim(-1) and count == Dim(1):
        params = {"start": -1, "count": 1}
    elif rows.is_static and op.offset.is_static and count.is_static:
        inner = 1
        for dim in shape[axis + 1 : -1]:
            inner *= dim.constant
        params = {"start": op.offset.constant * inner, "count": count.constant * inner}
    else:
        sel.refuse("rows are chosen at run time")
    return sel.call(Op.ROWS_SLICE, [sel.matrix(op.x)], [], params, [kind])


def _binary(op: BinaryOp, sel: Selection) -> Values:
    against = shape_of(op.a)
    broadcast = broadcast_matrix(shape_of(op.b), against)
    if broadcast is None:
        sel.refuse("its operands do not broadcast row by row")
    constant = sel.array(op.b)
    if constant is None:
        inputs, weights = [sel.matrix(op.a), sel.matrix(op.b)], []
    else:
        inputs = [sel.matrix(op.a)]
        weights = [sel.weight(as_matrix(constant.astype(np.float32)))]
    params: dict[str, int | float] = {"act": ACTS[op.act.data]}
    kind = BINARIES[op.kind.data]
    return sel.call(kind, list(inputs), list(weights), params, [sel.result_type(op.result)])


def _unary(op: UnaryOp, sel: Selection) -> Values:
    params: dict[str, int | float] = {"kind": UNARIES[op.kind.data]}
    return sel.call(Op.UNARY, [sel.matrix(op.x)], [], params, [sel.result_type(op.result)])


def _softmax(op: SoftmaxOp, sel: Selection) -> Values:
    return sel.call(Op.SOFTMAX, [sel.matrix(op.x)], [], {}, [sel.result_type(op.result)])


def _argmax(op: ArgmaxOp, sel: Selection) -> Values:
    return sel.call(Op.ARGMAX, [sel.matrix(op.x)], [], {}, [sel.result_type(op.result)])


def _route(op: RouteOp, sel: Selection) -> Values:
    params: dict[str, int | float] = {
        "k": op.k.value.data,
        "order": ORDERS[op.order.data],
        **op.options(),
    }
    weights = [sel.weight(sel.array(v)) for v in (op.weight, op.bias, op.correction)]
    types = [sel.result_type(op.index), sel.result_type(op.gate)]
    return sel.call(Op.ROUTE, [sel.matrix(op.x)], weights, params, types)


def _experts(op: ExpertsOp, sel: Selection) -> Values:
    return sel.call(
        Op.EXPERTS,
        [sel.matrix(op.x), sel.matrix(op.index), sel.matrix(op.gate)],
        [sel.weight(sel.array(v)) for v in (op.w_in, op.w_out, op.b_in, op.b_out)],
        {"act": EXPERTS[op.act.data], "biases": int(op.b_in is not None), **op.options()},
        [sel.result_type(op.result)],
        op.stored_as,
    )


Row = Callable[[Any, Selection], Values]

ROWS: Final[Mapping[type[Operation], Row]] = MappingProxyType(
    {
        ReshapeOp: _view,
        ConcatOp: _concat,
        SliceOp: _slice,
        ImageOp: _image,
        EmbedOp: _embed,
        LinearOp: _linear,
        NormOp: _norm,
        Conv2dOp: _conv2d,
        BinaryOp: _binary,
        UnaryOp: _unary,
        SoftmaxOp: _softmax,
        ArgmaxOp: _argmax,
        RopeOp: _rope,
        KvAppendOp: _kv_append,
        AttentionOp: _attention,
        AttentionRowOp: _attention_row,
        PruneOp: _prune,
        AttentionScoreOp: _attention_score,
        PruneTopPOp: _prune_top_p,
        SpliceOp: _splice,
        RouteOp: _route,
        ExpertsOp: _experts,
    }
)
