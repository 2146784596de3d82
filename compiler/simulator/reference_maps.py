"""What each elementwise reference function computes; see `compiler.kernels.reference` for its C.

Operands are arrays of the arithmetic's float type or int32; f64 values are rounded once.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.reference import MapKind
from compiler.simulator import functions as f

Array = NDArray[Any]
Map = Callable[..., Array]
"""Takes one to three operands, then alpha and beta."""


def _double(function: Callable[..., Array], operands: int = 1) -> Map:
    def apply(*given: Array) -> Array:
        arrays = given[:operands]
        return function(*(a.astype(np.float64) for a in arrays)).astype(arrays[0].dtype)

    return apply


def _plain(function: Callable[..., Any], operands: int) -> Map:
    def apply(*given: Array) -> Array:
        return np.asarray(function(*given[:operands]))

    return apply


def _truth(function: Callable[..., Any], operands: int) -> Map:
    def apply(*given: Array) -> Array:
        return np.asarray(function(*given[:operands])).astype(np.int32)

    return apply


def _number(value: float, like: Array) -> Array:
    return np.asarray(value, like.dtype)


def _clip(x: Array, low: Array, high: Array, *_: float) -> Array:
    y = np.where(x < low, low, x)
    return np.where(y > high, high, y)


def _hard_sigmoid(a: Array, alpha: float, beta: float) -> Array:
    line = _number(alpha, a) * a + _number(beta, a)
    return _clip(line, _number(0, a), _number(1, a))


def _elu(a: Array, alpha: float, _beta: float) -> Array:
    low = (np.float64(np.float32(alpha)) * (f.exp(a.astype(np.float64)) - 1.0)).astype(a.dtype)
    return np.where(a < 0, low, a)


def _shrink(a: Array, alpha: float, beta: float) -> Array:
    by, edge = _number(beta, a), _number(alpha, a)
    return np.where(a < -edge, a + by, np.where(a > edge, a - by, _number(0, a)))


def _swish(a: Array, alpha: float, _beta: float) -> Array:
    x = a.astype(np.float64)
    return np.asarray(x * f.sigmoid(np.float64(np.float32(alpha)) * x)).astype(a.dtype)


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1.0 + f.erf(x * 0.7071067811865476)))


def _gelu_tanh(x: Array) -> Array:
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return np.asarray(0.5 * x * (1.0 + f.tanh(inner)))


def _sign(a: Array) -> Array:
    return np.where(a > 0, _number(1, a), np.where(a < 0, _number(-1, a), a))


def _to_int(a: Array, *_: float) -> Array:
    low, high = -(2.0**31), 2.0**31
    inside = np.where((a < high) & (a > low), a, 0).astype(np.int32)
    top, bottom = np.int32(2**31 - 1), np.int32(-(2**31))
    return np.where(a >= high, top, np.where(a > low, inside, bottom))


def _quantise(a: Array, scale: Array, zero: Array, low: float, high: float) -> Array:
    y = f.rounded((a / scale).astype(np.float64)) + zero.astype(np.float64)
    y = np.where(np.isnan(y) | (y < low), low, np.where(y > high, high, y))
    return y.astype(np.int32)


def _dequantise(a: Array, scale: Array, zero: Array, *_: float) -> Array:
    return np.asarray((a - zero).astype(scale.dtype) * scale)


def _divide(a: Array, b: Array, *_: float) -> Array:
    wide, by = a.astype(np.int64), np.where(b == 0, 1, b).astype(np.int64)
    quotient = np.sign(wide) * np.sign(by) * (np.abs(wide) // np.abs(by))
    return np.where(b == 0, 0, quotient).astype(np.int32)


def _remainder(a: Array, b: Array, *_: float) -> Array:
    whole = _divide(a, b).astype(np.int64)
    rest = a.astype(np.int64) - whole * b
    return np.where((b == 0) | (b == -1), 0, rest).astype(np.int32)


def _modulo(a: Array, b: Array, *_: float) -> Array:
    r = _remainder(a, b)
    return np.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


_K: Final = MapKind

MAPS: Final[Mapping[MapKind, Map]] = MappingProxyType(
    {
        _K.NEG: _plain(np.negative, 1),
        _K.ABS: _plain(np.abs, 1),
        _K.SQRT: _plain(np.sqrt, 1),
        _K.RECIPROCAL: _plain(lambda a: _number(1, a) / a, 1),
        _K.EXP: _double(f.exp),
        _K.LOG: _double(f.log),
        _K.SIN: _double(lambda x: f.sine(x, 0)),
        _K.COS: _double(lambda x: f.sine(x, 1)),
        _K.TANH: _double(f.tanh),
        _K.SIGMOID: _double(f.sigmoid),
        _K.ERF: _double(f.erf),
        _K.FLOOR: _double(f.floor),
        _K.CEIL: _double(lambda x: -f.floor(-x)),
        _K.ROUND: _double(f.rounded),
        _K.SIGN: _plain(_sign, 1),
        _K.RELU: _plain(lambda a: np.where(a < 0, _number(0, a), a), 1),
        _K.SOFTPLUS: _double(f.softplus),
        _K.ELU: _elu,
        _K.LEAKY_RELU: lambda a, alpha, _: np.where(a < 0, _number(alpha, a) * a, a),
        _K.HARD_SIGMOID: _hard_sigmoid,
        _K.HARD_SWISH: lambda a, alpha, beta: a * _hard_sigmoid(a, alpha, beta),
        _K.SOFTSIGN: _plain(lambda a: a / (_number(1, a) + np.abs(a)), 1),
        _K.GELU: _double(_gelu),
        _K.GELU_TANH: _double(_gelu_tanh),
        _K.MISH: _double(lambda x: x * f.tanh(f.softplus(x))),
        _K.TAN: _double(lambda x: f.sine(x, 0) / f.sine(x, 1)),
        _K.ATAN: _double(f.atan),
        _K.SINH: _double(lambda x: (f.exp(x) - f.exp(-x)) * 0.5),
        _K.COSH: _double(lambda x: (f.exp(x) + f.exp(-x)) * 0.5),
        _K.THRESHOLDED_RELU: lambda a, alpha, _: np.where(a > _number(alpha, a), a, _number(0, a)),
        _K.SHRINK: _shrink,
        _K.SWISH: _swish,
        _K.ASIN: _double(f.asin),
        _K.ACOS: _double(f.acos),
        _K.ASINH: _double(f.asinh),
        _K.ACOSH: _double(f.acosh),
        _K.ATANH: _double(f.atanh),
        _K.ADD: _plain(np.add, 2),
        _K.SUB: _plain(np.subtract, 2),
        _K.MUL: _plain(np.multiply, 2),
        _K.DIV: _plain(np.divide, 2),
        _K.POW: _double(f.power, 2),
        _K.MAX: _plain(lambda a, b: np.where(a > b, a, b), 2),
        _K.MIN: _plain(lambda a, b: np.where(a < b, a, b), 2),
        _K.FMOD: _double(f.fmod, 2),
        _K.PRELU: _plain(lambda a, b: np.where(a < 0, a * b, a), 2),
        _K.CLIP: _clip,
        _K.WHERE: _plain(lambda a, b, c: np.where(a != 0, b, c), 3),
        _K.EQUAL: _truth(np.equal, 2),
        _K.LESS: _truth(np.less, 2),
        _K.LESS_EQUAL: _truth(np.less_equal, 2),
        _K.IS_NAN: _truth(np.isnan, 1),
        _K.IS_INF: _truth(np.isinf, 1),
        _K.NEG_I: _plain(np.negative, 1),
        _K.ABS_I: _plain(np.abs, 1),
        _K.SIGN_I: _plain(np.sign, 1),
        _K.NOT_I: _truth(lambda a: a == 0, 1),
        _K.ADD_I: _plain(np.add, 2),
        _K.SUB_I: _plain(np.subtract, 2),
        _K.MUL_I: _plain(np.multiply, 2),
        _K.DIV_I: _divide,
        _K.MOD_I: _modulo,
        _K.FMOD_I: _remainder,
        _K.MAX_I: _plain(np.maximum, 2),
        _K.MIN_I: _plain(np.minimum, 2),
        _K.AND_I: _plain(np.bitwise_and, 2),
        _K.OR_I: _plain(np.bitwise_or, 2),
        _K.XOR_I: _plain(np.bitwise_xor, 2),
        _K.EQUAL_I: _truth(np.equal, 2),
        _K.LESS_I: _truth(np.less, 2),
        _K.LESS_EQUAL_I: _truth(np.less_equal, 2),
        _K.CLIP_I: _clip,
        _K.WHERE_I: _plain(lambda a, b, c: np.where(a != 0, b, c), 3),
        _K.TO_INT: _to_int,
        _K.TO_FLOAT: _plain(np.asarray, 1),
        _K.TO_BOOL: _truth(lambda a: a != 0, 1),
        _K.TO_BOOL_I: _truth(lambda a: a != 0, 1),
        _K.WRAP_U8_I: _plain(lambda a: a & 255, 1),
        _K.WRAP_I8_I: _plain(lambda a: ((a & 255) ^ 128) - 128, 1),
        _K.QUANTISE: _quantise,
        _K.DEQUANTISE: _dequantise,
    }
)
