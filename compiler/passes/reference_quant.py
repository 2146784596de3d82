"""Reference rows of quantised ONNX operators, with the rounding of ONNX Runtime (half to even)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from compiler.contract.reference import MapKind, ReduceKind
from compiler.dialects.sp import OnnxOp
from compiler.dialects.types import dtype_of
from compiler.passes.reference_calls import ReferenceCalls, View
from compiler.passes.reference_nn import convolve, window_geometry
from compiler.passes.reference_rows import Row, integer, matmul, operand, operands

_K: Final = MapKind
RANGES: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {"uint8": (0, 255), "int8": (-128, 127)}
)


def _along(r: ReferenceCalls, vector: View, x: View, axis: int, block: int) -> View:
    """Return scale or zero point so that it broadcasts against x: per tensor, axis or block."""
    if vector.size == 1:
        return r.reshaped(vector, ())
    if block:
        apart = (*vector.shape[: axis + 1], 1, *vector.shape[axis + 1 :])
        into = (*vector.shape[: axis + 1], block, *vector.shape[axis + 1 :])
        shape = (*vector.shape[:axis], vector.shape[axis] * block, *vector.shape[axis + 1 :])
        whole = r.reshaped(r.reshaped(vector, apart).expanded(into), shape)
        return whole.sliced(axis, 0, x.shape[axis])
    return r.reshaped(vector, (vector.size, *[1] * (len(x.shape) - axis - 1)))


def quantised(r: ReferenceCalls, x: View, scale: View, zero: View, target: str) -> View:
    """Return round(x / scale) + zero within the range of a numpy type."""
    low, high = _range(r, target)
    return r.map(_K.QUANTISE, x, scale, zero, alpha=low, beta=high)


def _range(r: ReferenceCalls, target: str) -> tuple[int, int]:
    if target not in RANGES:
        r.sel.refuse(f"it quantises to {target}; supported are {', '.join(sorted(RANGES))}")
    return RANGES[target]


def _scale_and_zero(op: OnnxOp, r: ReferenceCalls, x: View) -> tuple[View, View]:
    rank = max(len(x.shape), 1)
    axis, block = integer(op, "axis", 1) % rank, integer(op, "block_size")
    scale, zero = r.view(op.arguments[1]), operand(op, r, 2)
    spread = _along(r, scale, x, axis, block)
    if zero is None:
        return spread, r.scalar(0, "i")
    return spread, _along(r, zero, x, axis, block)


def _quantize(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x = operands(op, r)[0]
    scale, zero = _scale_and_zero(op, r, x)
    return [quantised(r, x, scale, zero, dtype_of(op.outputs[0]))]


def _dequantize(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x = operands(op, r)[0]
    return [r.map(_K.DEQUANTISE, x, *_scale_and_zero(op, r, x))]


def dynamic_scale(r: ReferenceCalls, x: View) -> tuple[View, View]:
    """Return scale f32 and zero point u8 of a whole tensor, its range widened to hold 0."""
    zero, axes = r.scalar(0.0), list(range(len(x.shape)))
    low = r.map(_K.MIN, r.reduce(ReduceKind.MIN, x, axes, keep=False), zero)
    high = r.map(_K.MAX, r.reduce(ReduceKind.MAX, x, axes, keep=False), zero)
    span = r.map(_K.SUB, high, low)
    scale = r.map(_K.DIV, span, r.scalar(255.0))
    scale = r.map(_K.WHERE, r.map(_K.EQUAL, span, zero), r.scalar(1.0), scale)
    start = r.map(_K.NEG, low)
    point = r.map(_K.QUANTISE, start, scale, r.scalar(0, "i"), alpha=0, beta=255)
    return scale, point


def _dynamic(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x = operands(op, r)[0]
    scale, point = dynamic_scale(r, x)
    return [quantised(r, x, scale, point, "uint8"), scale, point]


def _centred(r: ReferenceCalls, x: View, zero: View | None, axis: int | None = None) -> View:
    if zero is None:
        return x
    if zero.size > 1 and axis is not None:
        zero = r.reshaped(zero, (zero.size, *[1] * (len(x.shape) - axis - 1)))
    return r.map(_K.SUB_I, x, r.reshaped(zero, ()) if zero.size == 1 else zero)


def _matmul_integer(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    a, b, a_zero, b_zero = (operand(op, r, at) for at in range(4))
    assert a is not None
    assert b is not None
    if a_zero is not None and a_zero.size > 1 and len(a_zero.shape) == 1:
        a_zero = r.reshaped(a_zero, (a_zero.size, 1))
    return [matmul(r, _centred(r, a, a_zero), _centred(r, b, b_zero))]


def _conv_integer(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, w, x_zero, w_zero = (operand(op, r, at) for at in range(4))
    assert x is not None
    assert w is not None
    geometry = window_geometry(op, r, w.shape[2:])
    centred = (_centred(r, x, x_zero), _centred(r, w, w_zero, 0))
    shape = r.shape(op.outputs[0])
    return [convolve(r, *centred, None, geometry, integer(op, "group", 1), shape)]


def _rescaled(
    r: ReferenceCalls, sums: View, factors: tuple[View, View, View], zero: View, target: str
) -> View:
    """Return integer sums times a*b/y scales, rounded to y's type."""
    a, b, y = factors
    real = r.map(_K.MUL, r.map(_K.TO_FLOAT, sums), r.map(_K.DIV, r.map(_K.MUL, a, b), y))
    return quantised(r, real, r.scalar(1.0), r.reshaped(zero, ()), target)


def _qlinear_matmul(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = operands(op, r)
    sums = matmul(r, _centred(r, a, a_zero), _centred(r, b, b_zero))
    scales = tuple(r.reshaped(s, ()) if s.size == 1 else s for s in (a_scale, b_scale, y_scale))
    first, second, third = scales
    target = dtype_of(op.outputs[0])
    return [_rescaled(r, sums, (first, second, third), y_zero, target)]


def _qlinear_conv(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = operands(op, r)[:8]
    bias = operand(op, r, 8)
    geometry = window_geometry(op, r, w.shape[2:])
    shape, groups = r.shape(op.outputs[0]), integer(op, "group", 1)
    centred = (_centred(r, x, x_zero), _centred(r, w, w_zero, 0))
    sums = convolve(r, *centred, bias, geometry, groups, shape)
    spread = w_scale
    if w_scale.size > 1:
        spread = r.reshaped(w_scale, (w_scale.size, *[1] * (len(shape) - 2)))
    else:
        spread = r.reshaped(w_scale, ())
    factors = (r.reshaped(x_scale, ()), spread, r.reshaped(y_scale, ()))
    return [_rescaled(r, sums, factors, y_zero, dtype_of(op.outputs[0]))]


QUANTISED: Final[Mapping[str, Row]] = MappingProxyType(
    {
        "ConvInteger": _conv_integer,
        "DequantizeLinear": _dequantize,
        "DynamicQuantizeLinear": _dynamic,
        "MatMulInteger": _matmul_integer,
        "QLinearConv": _qlinear_conv,
        "QLinearMatMul": _qlinear_matmul,
        "QuantizeLinear": _quantize,
    }
)
