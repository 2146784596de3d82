"""Reference rows of elementwise ONNX operators, reductions and products.

A row takes the operation and `ReferenceCalls` and returns one view per result.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from compiler.contract.reference import MapKind, ReduceKind
from compiler.dialects.sp import OnnxOp
from compiler.dialects.types import dtype_of
from compiler.passes.match import attr
from compiler.passes.reference_calls import FLOATS, LARGEST, ReferenceCalls, View

Row = Callable[[OnnxOp, ReferenceCalls], list[View]]
_K: Final = MapKind

_UNARY: Final[Mapping[str, tuple[MapKind, MapKind | None]]] = MappingProxyType(
    {
        "Abs": (_K.ABS, _K.ABS_I),
        "Acos": (_K.ACOS, None),
        "Acosh": (_K.ACOSH, None),
        "Asin": (_K.ASIN, None),
        "Asinh": (_K.ASINH, None),
        "Atanh": (_K.ATANH, None),
        "Atan": (_K.ATAN, None),
        "Ceil": (_K.CEIL, None),
        "Cos": (_K.COS, None),
        "Cosh": (_K.COSH, None),
        "Erf": (_K.ERF, None),
        "Exp": (_K.EXP, None),
        "Floor": (_K.FLOOR, None),
        "IsNaN": (_K.IS_NAN, None),
        "Log": (_K.LOG, None),
        "Mish": (_K.MISH, None),
        "Neg": (_K.NEG, _K.NEG_I),
        "Not": (_K.TO_BOOL, _K.NOT_I),
        "Reciprocal": (_K.RECIPROCAL, None),
        "Relu": (_K.RELU, None),
        "Round": (_K.ROUND, None),
        "Sigmoid": (_K.SIGMOID, None),
        "Sign": (_K.SIGN, _K.SIGN_I),
        "Sin": (_K.SIN, None),
        "Sinh": (_K.SINH, None),
        "Softplus": (_K.SOFTPLUS, None),
        "Softsign": (_K.SOFTSIGN, None),
        "Sqrt": (_K.SQRT, None),
        "Tan": (_K.TAN, None),
        "Tanh": (_K.TANH, None),
    }
)
_BINARY: Final[Mapping[str, tuple[MapKind | None, MapKind | None]]] = MappingProxyType(
    {
        "Add": (_K.ADD, _K.ADD_I),
        "And": (None, _K.AND_I),
        "BitwiseAnd": (None, _K.AND_I),
        "BitwiseOr": (None, _K.OR_I),
        "BitwiseXor": (None, _K.XOR_I),
        "Div": (_K.DIV, _K.DIV_I),
        "Equal": (_K.EQUAL, _K.EQUAL_I),
        "Less": (_K.LESS, _K.LESS_I),
        "LessOrEqual": (_K.LESS_EQUAL, _K.LESS_EQUAL_I),
        "Max": (_K.MAX, _K.MAX_I),
        "Min": (_K.MIN, _K.MIN_I),
        "Mul": (_K.MUL, _K.MUL_I),
        "Or": (None, _K.OR_I),
        "PRelu": (_K.PRELU, None),
        "Sub": (_K.SUB, _K.SUB_I),
        "Sum": (_K.ADD, _K.ADD_I),
        "Xor": (None, _K.XOR_I),
    }
)
_NUMBERED: Final[Mapping[str, tuple[MapKind, str, float, str, float]]] = MappingProxyType(
    {
        "Elu": (_K.ELU, "alpha", 1.0, "", 0.0),
        "HardSigmoid": (_K.HARD_SIGMOID, "alpha", 0.2, "beta", 0.5),
        "LeakyRelu": (_K.LEAKY_RELU, "alpha", 0.01, "", 0.0),
        "Shrink": (_K.SHRINK, "lambd", 0.5, "bias", 0.0),
        "Swish": (_K.SWISH, "alpha", 1.0, "", 0.0),
        "ThresholdedRelu": (_K.THRESHOLDED_RELU, "alpha", 1.0, "", 0.0),
    }
)
REDUCTIONS: Final[Mapping[str, ReduceKind]] = MappingProxyType(
    {
        "ReduceL1": ReduceKind.L1,
        "ReduceL2": ReduceKind.L2,
        "ReduceMax": ReduceKind.MAX,
        "ReduceMean": ReduceKind.MEAN,
        "ReduceMin": ReduceKind.MIN,
        "ReduceProd": ReduceKind.PROD,
        "ReduceSum": ReduceKind.SUM,
        "ReduceSumSquare": ReduceKind.SUM_SQUARE,
    }
)


def number(op: OnnxOp, key: str, default: float) -> float:
    """Return a numeric attribute."""
    value = attr(op, key)
    return float(value) if isinstance(value, int | float) else default


def integer(op: OnnxOp, key: str, default: int = 0) -> int:
    """Return an integer attribute."""
    value = attr(op, key)
    return value if isinstance(value, int) else default


def integers(op: OnnxOp, key: str) -> list[int]:
    """Return an attribute that is a list of integers; empty if it is absent."""
    value = attr(op, key)
    return [int(item) for item in value] if isinstance(value, list) else []


def operands(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    """Return all present operands."""
    return [r.view(argument) for argument in op.arguments]


def operand(op: OnnxOp, r: ReferenceCalls, at: int) -> View | None:
    """Return operand `at`, None if it is omitted."""
    value = op.operand_at(at)
    return None if value is None else r.view(value)


def fixed(op: OnnxOp, r: ReferenceCalls, at: int) -> np.ndarray | None:
    """Return the elements of operand `at`, None if it is omitted; refuse a run-time one."""
    value = op.operand_at(at)
    if value is None:
        return None
    array = r.sel.array(value)
    if array is None:
        r.sel.refuse(f"operand {at} must be constant")
    return array


def as_float(r: ReferenceCalls, view: View) -> View:
    """Return a view of f32."""
    return view if view.kind == "f" else r.map(_K.TO_FLOAT, view)


def _unary(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x = operands(op, r)[0]
    floats, ints = _UNARY[op.op.data]
    kind = floats if x.kind == "f" else ints
    if kind is None:
        r.sel.refuse("it is not computed on integers")
    return [r.map(kind, x)]


def _binary(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    first, *others = operands(op, r)
    floats, ints = _BINARY[op.op.data]
    kind = floats if first.kind == "f" else ints
    if kind is None:
        r.sel.refuse(f"it is not computed on {first.kind}")
    for other in others:
        first = r.map(kind, first, other)
    return [first]


def _greater(kinds: tuple[MapKind, MapKind]) -> Row:
    def row(op: OnnxOp, r: ReferenceCalls) -> list[View]:
        a, b = operands(op, r)
        return [r.map(kinds[0] if a.kind == "f" else kinds[1], b, a)]

    return row


def _numbered(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    kind, alpha, alpha_default, beta, beta_default = _NUMBERED[op.op.data]
    numbers = {"alpha": number(op, alpha, alpha_default), "beta": beta_default}
    if beta:
        numbers["beta"] = number(op, beta, beta_default)
    return [r.map(kind, operands(op, r)[0], **numbers)]


def _hard_swish(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    return [r.map(_K.HARD_SWISH, operands(op, r)[0], alpha=1 / 6, beta=0.5)]


def _scaled_elu(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x = operands(op, r)[0]
    if op.op.data == "Celu":
        alpha = number(op, "alpha", 1.0)
        inner = r.map(_K.ELU, r.map(_K.DIV, x, r.scalar(alpha)), alpha=1.0)
        return [r.map(_K.MUL, inner, r.scalar(alpha))]
    inner = r.map(_K.ELU, x, alpha=number(op, "alpha", 1.6732632423543772))
    return [r.map(_K.MUL, inner, r.scalar(number(op, "gamma", 1.0507009873554805)))]


def _gelu(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    kind = _K.GELU_TANH if attr(op, "approximate") == "tanh" else _K.GELU
    return [r.map(kind, operands(op, r)[0])]


def _clip(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, low, high = (operand(op, r, at) for at in range(3))
    assert x is not None
    if x.kind == "f":
        low = low or r.scalar(-LARGEST)
        high = high or r.scalar(LARGEST)
        return [r.map(_K.CLIP, x, low, high)]
    low = low or r.scalar(-(1 << 31), "i")
    high = high or r.scalar((1 << 31) - 1, "i")
    return [r.map(_K.CLIP_I, x, low, high)]


def _pow(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    a, b = operands(op, r)
    if a.kind == "i":
        powered = r.map(_K.POW, as_float(r, a), as_float(r, b))
        return [r.map(_K.TO_INT, powered)]
    exponent = r.sel.array(op.arguments[1])
    if exponent is not None and exponent.size == 1 and float(exponent.reshape(-1)[0]) == 2.0:
        return [r.map(_K.MUL, a, a).expanded(np.broadcast_shapes(a.shape, b.shape))]
    return [r.map(_K.POW, a, as_float(r, b))]


def _mod(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    a, b = operands(op, r)
    if a.kind == "f":
        return [r.map(_K.FMOD, a, b)]
    return [r.map(_K.FMOD_I if integer(op, "fmod") else _K.MOD_I, a, b)]


def _mean(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    views = operands(op, r)
    total = views[0]
    for view in views[1:]:
        total = r.map(_K.ADD, total, view)
    return [r.map(_K.DIV, total, r.scalar(float(len(views))))]


def _where(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    condition, a, b = operands(op, r)
    return [r.map(_K.WHERE if a.kind == "f" else _K.WHERE_I, condition, a, b)]


def _is_inf(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x = operands(op, r)[0]
    found = r.map(_K.IS_INF, x)
    positive, negative = integer(op, "detect_positive", 1), integer(op, "detect_negative", 1)
    zero = r.scalar(0.0)
    if not positive:
        found = r.map(_K.AND_I, found, r.map(_K.LESS, x, zero))
    if not negative:
        found = r.map(_K.AND_I, found, r.map(_K.LESS, zero, x))
    return [found]


def cast(r: ReferenceCalls, x: View, target: str) -> View:
    """Return a view converted to a numpy type name; 64-bit integers are held in 32 bits."""
    if target in FLOATS:
        return as_float(r, x)
    if target == "bool":
        return r.map(_K.TO_BOOL if x.kind == "f" else _K.TO_BOOL_I, x)
    if x.kind == "f":
        x = r.map(_K.TO_INT, x)
    wraps = {"uint8": _K.WRAP_U8_I, "int8": _K.WRAP_I8_I}
    return r.map(wraps[target], x) if target in wraps else x


def _cast(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    return [cast(r, operands(op, r)[0], dtype_of(op.outputs[0]))]


def _reduce(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, axes, keep = operands(op, r)[0], integers(op, "axes"), bool(integer(op, "keepdims", 1))
    if not axes:
        return [x]
    name = op.op.data
    if name in REDUCTIONS:
        return [r.reduce(REDUCTIONS[name], x, axes, keep=keep)]
    if name == "ReduceLogSum":
        return [r.map(_K.LOG, r.reduce(ReduceKind.SUM, x, axes, keep=keep))]
    top = r.reduce(ReduceKind.MAX, x, axes)
    terms = r.map(_K.EXP, r.map(_K.SUB, x, top))
    total = r.map(_K.ADD, r.map(_K.LOG, r.reduce(ReduceKind.SUM, terms, axes)), top)
    shape = [size for at, size in enumerate(total.shape) if keep or at not in axes]
    return [r.reshaped(total, shape)]


def _arg(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    last = "_LAST" if integer(op, "select_last_index") else ""
    kind = ReduceKind["ARG_" + op.op.data[3:].upper() + last]
    keep = bool(integer(op, "keepdims", 1))
    return [r.reduce(kind, operands(op, r)[0], [integer(op, "axis")], keep=keep)]


def softmax(r: ReferenceCalls, x: View, axis: int, *, logarithm: bool = False) -> View:
    """Return (the logarithm of) e^x over its sum along an axis."""
    shifted = r.map(_K.SUB, x, r.reduce(ReduceKind.MAX, x, [axis]))
    terms = r.map(_K.EXP, shifted)
    total = r.reduce(ReduceKind.SUM, terms, [axis])
    if logarithm:
        return r.map(_K.SUB, shifted, r.map(_K.LOG, total))
    return r.map(_K.DIV, terms, total)


def _softmax(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x = operands(op, r)[0]
    return [softmax(r, x, integer(op, "axis"), logarithm=op.op.data == "LogSoftmax")]


def _hardmax(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, axis = operands(op, r)[0], integer(op, "axis")
    best = r.reduce(ReduceKind.ARG_MAX, x, [axis])
    shape = [1] * len(x.shape)
    shape[axis] = x.shape[axis]
    ramp = r.constant(np.arange(x.shape[axis]).reshape(shape))
    return [r.map(_K.TO_FLOAT, r.map(_K.EQUAL_I, best, ramp))]


def matmul(r: ReferenceCalls, a: View, b: View) -> View:
    """Return numpy.matmul, vectors included."""
    left = r.reshaped(a, (1, *a.shape)) if len(a.shape) == 1 else a
    right = r.reshaped(b, (*b.shape, 1)) if len(b.shape) == 1 else b
    made = r.contract(left, right)
    shape = list(made.shape)
    if len(b.shape) == 1:
        del shape[-1]
    if len(a.shape) == 1:
        del shape[-1 if len(b.shape) == 1 else -2]
    return r.reshaped(made, shape)


def _matmul(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    return [matmul(r, *operands(op, r))]


def _gemm(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    a, b, c = (operand(op, r, at) for at in range(3))
    assert a is not None
    assert b is not None
    a = a.permuted((1, 0)) if integer(op, "transA") else a
    b = b.permuted((1, 0)) if integer(op, "transB") else b
    y = r.contract(a, b)
    alpha, beta = number(op, "alpha", 1.0), number(op, "beta", 1.0)
    if alpha != 1.0:
        y = r.map(_K.MUL, y, r.scalar(alpha))
    if c is None:
        return [y]
    if beta != 1.0:
        c = r.map(_K.MUL, c, r.scalar(beta))
    return [r.map(_K.ADD if y.kind == "f" else _K.ADD_I, y, c)]


ELEMENTWISE: Final[Mapping[str, Row]] = MappingProxyType(
    {
        **dict.fromkeys(_UNARY, _unary),
        **dict.fromkeys(_BINARY, _binary),
        **dict.fromkeys(_NUMBERED, _numbered),
        **dict.fromkeys(REDUCTIONS, _reduce),
        "ArgMax": _arg,
        "ArgMin": _arg,
        "Cast": _cast,
        "CastLike": _cast,
        "Celu": _scaled_elu,
        "Clip": _clip,
        "Gelu": _gelu,
        "Gemm": _gemm,
        "Greater": _greater((_K.LESS, _K.LESS_I)),
        "GreaterOrEqual": _greater((_K.LESS_EQUAL, _K.LESS_EQUAL_I)),
        "HardSwish": _hard_swish,
        "Hardmax": _hardmax,
        "IsInf": _is_inf,
        "LogSoftmax": _softmax,
        "MatMul": _matmul,
        "Mean": _mean,
        "Mod": _mod,
        "Pow": _pow,
        "ReduceLogSum": _reduce,
        "ReduceLogSumExp": _reduce,
        "Selu": _scaled_elu,
        "Softmax": _softmax,
        "Where": _where,
    }
)
EACH_ELEMENT: Final = frozenset(
    {
        *(*_UNARY, *_BINARY, *_NUMBERED),
        *("Cast", "CastLike", "Celu", "Clip", "Gelu", "Greater", "GreaterOrEqual", "HardSwish"),
        *("IsInf", "Mean", "Mod", "Pow", "Selu", "Where"),
    }
)
"""Operators that make every element of elements at its own place, operands broadcast."""
