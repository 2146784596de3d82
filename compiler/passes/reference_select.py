"""The last resort of kernel selection: any operation on fixed shapes as reference calls.

Before:
    %1 = "sp.onnx"(%0, %w) <{op = "ConvTranspose", ...}> : (tensor<1x8x5x5xf32>, ...) -> ...
After:
    %1 = "hw.call"(%0, %geometry, %w) <{op = "REF_CONV_TRANSPOSE"}> : (tensor<40x5xf32>) -> ...

Raised operations whose shapes no fast kernel takes come here too. Movement operations become views;
their elements are copied where a call needs them in order.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from xdsl.ir import Operation, SSAValue

from compiler.contract.reference import MapKind, ReduceKind
from compiler.dialects.movement import ConcatOp, ExpandOp, ReshapeOp, SliceOp, TransposeOp
from compiler.dialects.sp import (
    ArgmaxOp,
    BinaryOp,
    EmbedOp,
    LinearOp,
    NormOp,
    OnnxOp,
    SoftmaxOp,
    UnaryOp,
)
from compiler.dialects.types import shape_of
from compiler.passes.reference_calls import ReferenceCalls, View
from compiler.passes.reference_index import PLACES, gathered
from compiler.passes.reference_nn import NETWORKS, normalised
from compiler.passes.reference_quant import QUANTISED
from compiler.passes.reference_recurrent import RECURRENT
from compiler.passes.reference_rows import ELEMENTWISE, Row, matmul, softmax
from compiler.passes.selection import Selection

ONNX_ROWS: Final[Mapping[str, Row]] = MappingProxyType(
    {**ELEMENTWISE, **NETWORKS, **PLACES, **QUANTISED, **RECURRENT}
)
_K: Final = MapKind


def has_reference(op: Operation) -> bool:
    """Return whether there is a reference row for an operation and all its sizes are fixed."""
    known = op.op.data in ONNX_ROWS if isinstance(op, OnnxOp) else type(op) in _RAISED
    values: list[SSAValue] = [*op.operands, *op.results]
    return known and all(dim.is_static for value in values for dim in shape_of(value))


def select_reference(op: Operation, sel: Selection) -> None:
    """Append reference calls for an operation that `has_reference`.

    Raises:
        UnsupportedOperatorError: An attribute or a shape is not computed; the message says which.
    """
    calls = ReferenceCalls(sel)
    if isinstance(op, OnnxOp):
        views = ONNX_ROWS[op.op.data](op, calls)
    else:
        views = _RAISED[type(op)](op, calls)
    for result, view in zip(op.results, views, strict=False):
        keep_view(result, view, calls)


def keep_view(value: SSAValue, view: View, calls: ReferenceCalls) -> None:
    """Remember where a tensor's elements are; as its matrix too if it has the right shape."""
    sel = calls.sel
    sel.views[value] = view
    kind = calls.result_type(calls.shape(value), view.kind)
    if view.matrix is not None and view.is_ordered and view.matrix.type == kind:
        sel.matrices[value] = view.matrix


def materialised(value: SSAValue, sel: Selection) -> SSAValue | None:
    """Return a matrix for a tensor that is only a view or a constant; None if it is neither."""
    is_fixed = all(dim.is_static for dim in shape_of(value))
    if not is_fixed or (value not in sel.views and sel.array(value) is None):
        return None
    calls = ReferenceCalls(sel)
    view = calls.view(value)
    return calls.matrix(view)


def _shape(calls: ReferenceCalls, value: SSAValue) -> tuple[int, ...]:
    return calls.shape(value)


def _act(r: ReferenceCalls, kind: str, y: View) -> View:
    acts = {"relu": _K.RELU, "silu": _K.SWISH}
    return r.map(acts[kind], y, alpha=1.0) if kind in acts else y


def _reshape(op: ReshapeOp, r: ReferenceCalls) -> list[View]:
    return [r.reshaped(r.view(op.x), _shape(r, op.result))]


def _expand(op: ExpandOp, r: ReferenceCalls) -> list[View]:
    return [r.view(op.x).expanded(_shape(r, op.result))]


def _transpose(op: TransposeOp, r: ReferenceCalls) -> list[View]:
    return [r.view(op.x).permuted([int(p) for p in op.perm.get_values()])]


def _slice(op: SliceOp, r: ReferenceCalls) -> list[View]:
    axis = op.axis.value.data
    count = _shape(r, op.result)[axis]
    return [r.view(op.x).sliced(axis, op.offset.constant, count, op.step.value.data)]


def _concat(op: ConcatOp, r: ReferenceCalls) -> list[View]:
    shape, axis = _shape(r, op.result), op.axis.value.data
    pieces, at = [], 0
    for part in op.parts:
        view = r.view(part)
        pieces.append((view, tuple(at if a == axis else 0 for a in range(len(shape)))))
        at += view.shape[axis]
    return [r.moved(shape, pieces)]


def _binary(op: BinaryOp, r: ReferenceCalls) -> list[View]:
    kind = MapKind[op.kind.data.upper()]
    return [_act(r, op.act.data, r.map(kind, r.view(op.a), r.view(op.b)))]


def _unary(op: UnaryOp, r: ReferenceCalls) -> list[View]:
    x, name = r.view(op.x), op.kind.data
    return [_act(r, "silu", x) if name == "silu" else r.map(MapKind[name.upper()], x)]


def _softmax(op: SoftmaxOp, r: ReferenceCalls) -> list[View]:
    x = r.view(op.x)
    return [softmax(r, x, len(x.shape) - 1)]


def _argmax(op: ArgmaxOp, r: ReferenceCalls) -> list[View]:
    x = r.view(op.x)
    return [r.reduce(ReduceKind.ARG_MAX, x, [len(x.shape) - 1])]


def _embed(op: EmbedOp, r: ReferenceCalls) -> list[View]:
    return [gathered(r, r.view(op.table), r.view(op.ids), 0)]


def _linear(op: LinearOp, r: ReferenceCalls) -> list[View]:
    y = matmul(r, r.view(op.x), r.view(op.weight).permuted((1, 0)))
    if op.bias is not None:
        y = r.map(_K.ADD, y, r.view(op.bias))
    y = _act(r, op.act.data, y)
    return [y if op.residual is None else r.map(_K.ADD, r.view(op.residual), y)]


def _norm(op: NormOp, r: ReferenceCalls) -> list[View]:
    x = r.view(op.x)
    centred = op.kind.data == "layer"
    y, _, _ = normalised(r, x, [len(x.shape) - 1], op.eps.value.data, centred=centred)
    y = r.map(_K.MUL, y, r.view(op.gamma))
    return [y if op.beta is None else r.map(_K.ADD, y, r.view(op.beta))]


_RAISED: Final[Mapping[type[Operation], Callable[[Any, ReferenceCalls], list[View]]]] = (
    MappingProxyType(
        {
            ReshapeOp: _reshape,
            ExpandOp: _expand,
            TransposeOp: _transpose,
            SliceOp: _slice,
            ConcatOp: _concat,
            BinaryOp: _binary,
            UnaryOp: _unary,
            SoftmaxOp: _softmax,
            ArgmaxOp: _argmax,
            EmbedOp: _embed,
            LinearOp: _linear,
            NormOp: _norm,
        }
    )
)
