"""Raise what is left: table look-ups, sums, products and functions of single elements.

Before:
    %1 = "sp.onnx"(%table, %ids) <{op = "Gather", attrs = {axis = 0}}>
    %2 = "sp.onnx"(%1, %c) <{op = "Add"}>
After:
    %1 = "sp.embed"(%ids, %table)
    %2 = "sp.binary"(%1, %c) <{kind = "add", act = "none"}>

The first operand of `sp.binary` has the result's shape; commutative operands are swapped for that,
and a ReLU behind it is fused. SiLU and GELU are also read where they are written out
(`gelu_patterns`). Left out: everything without a kernel, which `select-kernels` refuses
by name.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from compiler.dialects.sp import BinaryOp, EmbedOp, OnnxOp, SoftmaxOp, UnaryOp
from compiler.dialects.types import dtype_of, shape_of
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.gelu_patterns import GELU, GELU_TANH
from compiler.passes.match import Bind, attr, find, node, single_use
from compiler.passes.rewriting import swap, sweep

_BINARY: Final = {"Add": "add", "Mul": "mul", "Sub": "sub", "Div": "div"}
_UNARY: Final = {
    "Relu": "relu",
    "Sigmoid": "sigmoid",
    "Swish": "silu",
    "Neg": "neg",
    "Sqrt": "sqrt",
    "Reciprocal": "reciprocal",
    "Exp": "exp",
    "Tanh": "tanh",
}
_WRITTEN_OUT: Final = (
    ("silu", node("Mul", Bind("x"), node("Sigmoid", Bind("x")))),
    ("gelu", GELU),
    ("gelu_tanh", GELU_TANH),
)


@dataclass(frozen=True)
class RaiseElementwise(Pass):
    """One-to-one raising of operators with a kernel of their own."""

    name: ClassVar[str] = "raise-elementwise"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Rewrite in one forward walk, what is written out before its parts."""
        return PassResult(sweep(module, ctx, _written_out, _raise))


def _written_out(op: Operation, ctx: PassContext) -> int:
    if not isinstance(op, OnnxOp) or op.op.data != "Mul":
        return 0
    result = op.results[0]
    for kind, pattern in _WRITTEN_OUT:
        env = find(pattern, result, ctx.constants)
        if env and dtype_of(result) == "float32" and shape_of(env["x"]) == shape_of(result):
            swap(op, UnaryOp(env["x"], kind=kind), ctx.origins)
            return 1
    return 0


def _raise(op: Operation, ctx: PassContext) -> int:
    if not isinstance(op, OnnxOp) or dtype_of(op.outputs[0]) != "float32":
        return 0
    kind = op.op.data
    if kind == "Swish" and attr(op, "alpha") not in (None, 1.0):
        return 0
    if kind == "Gelu":
        return _unary(op, "gelu_tanh" if attr(op, "approximate") == "tanh" else "gelu", ctx)
    if kind in _UNARY:
        return _unary(op, _UNARY[kind], ctx)
    if kind in _BINARY:
        return _binary(op, _BINARY[kind], ctx)
    if kind == "Softmax" and attr(op, "axis") == len(shape_of(op.arguments[0])) - 1:
        swap(op, SoftmaxOp(op.arguments[0]), ctx.origins)
        return 1
    if kind == "Gather":
        return _embed(op, ctx)
    return 0


def _unary(op: OnnxOp, kind: str, ctx: PassContext) -> int:
    x = op.arguments[0]
    behind = x.owner
    fusible = isinstance(behind, BinaryOp) and behind.act.data == "none" and single_use(x)
    if kind == "relu" and fusible:
        assert isinstance(behind, BinaryOp)
        fused = BinaryOp(behind.a, behind.b, kind=behind.kind.data, act="relu")
        swap(op, fused, ctx.origins)
        return 1
    swap(op, UnaryOp(x, kind=kind), ctx.origins)
    return 1


def _binary(op: OnnxOp, kind: str, ctx: PassContext) -> int:
    a, b = op.arguments
    if shape_of(a) != shape_of(op.outputs[0]) and kind in ("add", "mul"):
        a, b = b, a
    if shape_of(a) != shape_of(op.outputs[0]) or _is_constant(a):
        if _is_constant(a) and shape_of(b) == shape_of(op.outputs[0]) and kind in ("add", "mul"):
            a, b = b, a
        else:
            return 0
    swap(op, BinaryOp(a, b, kind=kind), ctx.origins)
    return 1


def _is_constant(value: SSAValue) -> bool:
    return isinstance(value.owner, Operation) and value.owner.name == "sp.constant"


def _embed(op: OnnxOp, ctx: PassContext) -> int:
    table, ids = op.arguments
    array = ctx.constants.get(table)
    if array is None or array.ndim != 2 or attr(op, "axis") != 0:
        return 0
    if dtype_of(ids) not in ("int64", "int32"):
        return 0
    swap(op, EmbedOp(ids, table), ctx.origins)
    return 1
