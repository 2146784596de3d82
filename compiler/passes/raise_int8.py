"""Raise products of bytes to `sp.linear` of eight bits.

Before:
    %q, %s, %z = "sp.onnx"(%x) <{op = "DynamicQuantizeLinear"}>
    %1 = "sp.onnx"(%q, %w, %z, %wz) <{op = "MatMulInteger"}>       (%w int8 or uint8, K x N)
    %2 = "sp.onnx"(%1) <{op = "Cast", to = float}>
    %3 = "sp.onnx"(%2, %s * %ws) <{op = "Mul"}>                    (%ws a step, or one per column)
After:
    %3 = "sp.linear"(%x, %w') <{storage = "w8"}>                   (%w' = ((%w - %wz) * %ws)^T)

The weights stay what the file stores. Rows of x are rounded one by one, each by its own largest
element, where the file rounds all of x by its range: another error of the same size. A product that
is too small or too wide for the kernel stays as it is, exact. A step with more axes than the
product adds axes of size one to it: an `sp.reshape` behind the `sp.linear`.

Before:
    %y = "sp.onnx"(%a, %as, %az, %w, %ws, %wz, %ys, %yz) <{op = "QLinearMatMul"}>    (bytes, all but
After:                                                                        %a and %y constant)
    %x = "sp.onnx"(%a, %as, %c) <{op = "DequantizeLinear"}>          (%c = a middle of %a's range)
    %r = "sp.linear"(%x, %w', %b) <{storage = "w8"}>          (%b = (%c - %az) * %as * sum(%w' row))
    %y = "sp.onnx"(%r, %ys, %yz) <{op = "QuantizeLinear"}>

Bytes around their middle fit the int8 of the kernel, whatever their zero point, so they are not
rounded again (`x_step` of LINEAR_W8): the sums are those of the plain integers. Only the code that
is 128 away from the middle, on the far side of the zero point, is taken for its neighbour.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import Array
from compiler.dialects.dims import Dim
from compiler.dialects.properties import integer
from compiler.dialects.sp import LinearOp, OnnxOp
from compiler.dialects.types import dtype_of, shape_of, tensor_type, type_of
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.kernel_rows import middles
from compiler.passes.match import Bind, Env, OneOf, find, node
from compiler.passes.raise_linear import RaiseLinear
from compiler.passes.rewriting import insert_before, replace, reshaped, swap, sweep

_BYTES: Final = ("int8", "uint8")
_SIZES: Final = RaiseLinear()
_SCALAR_ATTRS: Final = MappingProxyType({"axis": integer(1), "block_size": integer(0)})
_SUMS = OneOf(
    (
        node("MatMulInteger", Bind("q"), Bind("w"), Bind("zero"), Bind("w_zero")),
        node("MatMulInteger", Bind("q"), Bind("w"), Bind("zero")),
    )
)
_ONE: Final = ((), (Dim(1),))
_PRODUCT = OneOf(
    (
        node("Mul", node("Cast", _SUMS), node("Mul", Bind("step"), Bind("other"))),
        node("Mul", node("Mul", node("Cast", _SUMS), Bind("step")), Bind("other")),
    )
)


@dataclass(frozen=True)
class RaiseInt8(Pass):
    """MatMulInteger of dynamically quantised rows, and QLinearMatMul, with constant bytes."""

    name: ClassVar[str] = "raise-int8"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Rewrite in one forward walk."""
        return PassResult(sweep(module, ctx, _raise, _raise_static))


def _raise(op: Operation, ctx: PassContext) -> int:
    if not isinstance(op, OnnxOp) or op.op.data != "Mul" or dtype_of(op.outputs[0]) != "float32":
        return 0
    env = find(_PRODUCT, op.outputs[0], ctx.constants)
    x = _source(env) if env is not None else None
    weight = _weight(env, ctx) if env is not None else None
    if x is None or weight is None or not _SIZES.fits(weight.shape):
        return 0
    constant = ctx.constants.add(weight)
    linear = LinearOp(x, constant.result, storage="w8")
    ctx.origins.stands(op, [linear])
    insert_before(op, constant, linear)
    replace(op, [reshaped(linear.result, shape_of(op.outputs[0]), op)], ctx.origins)
    return 1


def _source(env: Env) -> SSAValue | None:
    """Return what was quantised, if bytes, zero and step come from one operation."""
    made = env["q"].owner
    if not isinstance(made, OnnxOp) or made.op.data != "DynamicQuantizeLinear":
        return None
    quantised, step, zero = made.outputs
    fits = env["q"] is quantised and env["zero"] is zero and step in (env["step"], env["other"])
    return made.arguments[0] if fits else None


def _weight(env: Env, ctx: PassContext) -> Array | None:
    """Return the matrix (N, K) f32 that the bytes stand for; None if they are no such matrix."""
    steps = ctx.constants.get(env["other"])
    steps = ctx.constants.get(env["step"]) if steps is None else steps
    zeros = ctx.constants.get(env["w_zero"]) if "w_zero" in env else np.zeros((), np.int8)
    return _matrix(ctx.constants.get(env["w"]), steps, zeros)


def _matrix(codes: Array | None, steps: Array | None, zeros: Array | None) -> Array | None:
    """Return (N, K) f32 of codes (K, N) with one step and zero, or one per column; else None."""
    if codes is None or steps is None or zeros is None or codes.ndim != 2:
        return None
    columns = codes.shape[1]
    if codes.dtype.name not in _BYTES or {steps.size, zeros.size} - {1, columns}:
        return None
    if any(array.ndim > 1 and array.size != array.shape[-1] for array in (steps, zeros)):
        return None
    centred = codes.astype(np.int32) - zeros.reshape(-1).astype(np.int32)
    values = centred.astype(np.float32) * steps.reshape(-1).astype(np.float32)
    return np.ascontiguousarray(values.T)


def _raise_static(op: Operation, ctx: PassContext) -> int:
    if not isinstance(op, OnnxOp) or op.op.data != "QLinearMatMul":
        return 0
    a, y_step, y_zero = (op.arguments[at] for at in (0, 6, 7))
    step, zero = (_number(op.arguments[at], ctx) for at in (1, 2))
    weight = _matrix(*(ctx.constants.get(op.arguments[at]) for at in (3, 4, 5)))
    if step is None or zero is None or weight is None or not _SIZES.fits(weight.shape):
        return 0
    if len(shape_of(a)) < 2 or any(shape_of(value) not in _ONE for value in (y_step, y_zero)):
        return 0
    low, high = middles(dtype_of(a))
    middle = np.array(low if zero < high else high, zero.dtype)
    bias = _shift(weight, step, int(middle) - int(zero))
    new = [ctx.constants.add(array) for array in (step, middle, weight)]
    real = OnnxOp(
        "DequantizeLinear",
        [a, new[0].result, new[1].result],
        _SCALAR_ATTRS,
        [tensor_type("float32", shape_of(a))],
    )
    new += [] if bias is None else [ctx.constants.add(bias)]
    added = None if bias is None else new[-1].result
    linear = LinearOp(real.outputs[0], new[2].result, added, storage="w8")
    ctx.origins.stands(op, [real, linear])
    insert_before(op, *new, real, linear)
    operands = [linear.result, y_step, y_zero]
    swap(
        op, OnnxOp("QuantizeLinear", operands, _SCALAR_ATTRS, [type_of(op.outputs[0])]), ctx.origins
    )
    return 1


def _number(value: SSAValue, ctx: PassContext) -> Array | None:
    """Return a constant of one element without axes; None if it is anything else."""
    array = ctx.constants.get(value)
    return array.reshape(()) if array is not None and array.size == 1 else None


def _shift(weight: Array, step: Array, codes: int) -> Array | None:
    """Return what a product misses (N,) if `codes` are added to every element of its rows."""
    if not codes:
        return None
    sums = weight.astype(np.float64).sum(axis=1)
    return np.asarray(sums * float(step) * codes, np.float32)
