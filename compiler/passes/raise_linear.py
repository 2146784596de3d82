"""Raise products with constant matrices to `sp.linear`, and fuse what follows.

Before:
    %1 = "sp.onnx"(%x, %w) <{op = "MatMul"}>       (%w constant, K x N)
    %2 = "sp.onnx"(%1, %b) <{op = "Add"}>          (%b constant vector)
    %3 = "sp.onnx"(%2) <{op = "Relu"}>
After:
    %3 = "sp.linear"(%x, %w', %b) <{act = "relu", storage = "w4"}>     (%w' = transposed, N x K)

Gemm folds alpha and beta into its constants. A residual is fused when the linear has no other user:
`y = residual + act(x w^T + b)`. `x * sigmoid(x)` after a linear is its silu. Matrices with fewer
rows or columns than the options say stay f32: fewer bits would save nothing there.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import Array
from compiler.dialects.sp import ConstantOp, LinearOp, OnnxOp
from compiler.dialects.types import shape_of
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.match import Bind, attr, find, node
from compiler.passes.pipeline_spec import QUANTISE_NONE
from compiler.passes.rewriting import erase, insert_before, swap, sweep

_SILU = node("Mul", Bind("x"), node("Sigmoid", Bind("x")))


@dataclass(frozen=True)
class RaiseLinear(Pass):
    """MatMul and Gemm with constant weights, then bias, activation and residual.

    Attributes:
        min_rows: Least N for storage in four or eight bits.
        min_cols: Least K for that.
        max_cols: Greatest K of their kernels (exact int32 sums).
    """

    name: ClassVar[str] = "raise-linear"
    min_rows: int = 16
    min_cols: int = 32
    max_cols: int = 8192

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Raise, then fuse in one forward walk."""
        return PassResult(sweep(module, ctx, self._raise, _fuse))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a matrix (N, K) may be stored in few bits."""
        rows, cols = shape
        return rows >= self.min_rows and self.min_cols <= cols <= self.max_cols

    def _raise(self, op: Operation, ctx: PassContext) -> int:
        if not isinstance(op, OnnxOp):
            return 0
        parts = _weight_and_bias(op, ctx)
        if parts is None:
            return 0
        weight, bias = parts
        quantise = ctx.spec.quantise
        new: list[ConstantOp] = [ctx.constants.add(weight)]
        if bias is not None:
            new.append(ctx.constants.add(bias))
        linear = LinearOp(
            op.arguments[0],
            new[0].result,
            new[1].result if bias is not None else None,
            storage=quantise if self.fits(weight.shape) and quantise != QUANTISE_NONE else "f32",
        )
        insert_before(op, *new)
        swap(op, linear, ctx.origins)
        return 1


def _weight_and_bias(op: OnnxOp, ctx: PassContext) -> tuple[Array, Array | None] | None:
    match op.op.data:
        case "MatMul":
            weight = ctx.constants.get(op.arguments[1])
            if weight is None or weight.ndim != 2 or len(shape_of(op.arguments[0])) < 2:
                return None
            return np.ascontiguousarray(weight.T), None
        case "Gemm":
            return _gemm(op, ctx)
        case _:
            return None


def _gemm(op: OnnxOp, ctx: PassContext) -> tuple[Array, Array | None] | None:
    weight = ctx.constants.get(op.arguments[1])
    if weight is None or attr(op, "transA") != 0:
        return None
    alpha, beta = attr(op, "alpha"), attr(op, "beta")
    assert isinstance(alpha, float)
    assert isinstance(beta, float)
    rows = np.ascontiguousarray(weight if attr(op, "transB") else weight.T)
    rows = rows if alpha == 1.0 else rows * np.float32(alpha)
    third = op.operand_at(2)
    if third is None:
        return rows, None
    bias = ctx.constants.get(third)
    if bias is None or bias.size not in (1, rows.shape[0]) or bias.size != bias.shape[-1:][0]:
        return None
    vector = np.broadcast_to(bias.reshape(-1), rows.shape[:1]).astype(np.float32)
    return rows, vector if beta == 1.0 else vector * np.float32(beta)


def _linear_of(value: SSAValue, *, uses: int = 1) -> LinearOp | None:
    owner = value.owner
    if not isinstance(owner, LinearOp) or sum(1 for _ in value.uses) != uses:
        return None
    return owner


def _fuse(op: Operation, ctx: PassContext) -> int:
    return any(fuse(op, ctx) for fuse in (_fuse_bias, _fuse_act, _fuse_residual))


def _fuse_bias(op: Operation, ctx: PassContext) -> bool:
    if not isinstance(op, OnnxOp) or op.op.data != "Add":
        return False
    for at in (0, 1):
        linear = _linear_of(op.arguments[at])
        array = ctx.constants.get(op.arguments[1 - at])
        if linear is None or array is None or linear.bias is not None:
            continue
        width = shape_of(linear.result)[-1].constant
        plain = linear.residual is None and linear.act.data == "none"
        if not plain or array.size != width or array.shape[-1] != width:
            continue
        if len(shape_of(op.outputs[0])) != len(shape_of(linear.result)):
            continue
        bias = ctx.constants.add(array.reshape(-1))
        insert_before(op, bias)
        _absorb(op, linear, ctx, bias=bias.result)
        return True
    return False


def _fuse_act(op: Operation, ctx: PassContext) -> bool:
    if not isinstance(op, OnnxOp):
        return False
    match op.op.data:
        case "Relu":
            linear, act = _linear_of(op.arguments[0]), "relu"
        case "Swish" if attr(op, "alpha") in (None, 1.0):
            linear, act = _linear_of(op.arguments[0]), "silu"
        case "Mul":
            env = find(_SILU, op.outputs[0], ctx.constants)
            linear = _linear_of(env["x"], uses=2) if env is not None else None
            act = "silu"
        case _:
            return False
    if linear is None or linear.act.data != "none" or linear.residual is not None:
        return False
    _absorb(op, linear, ctx, act=act)
    return True


def _fuse_residual(op: Operation, ctx: PassContext) -> bool:
    if not isinstance(op, OnnxOp) or op.op.data != "Add":
        return False
    for at in (1, 0):
        linear = _linear_of(op.arguments[at])
        other = op.arguments[1 - at]
        if linear is None or linear.residual is not None:
            continue
        if isinstance(other.owner, ConstantOp) or shape_of(other) != shape_of(linear.result):
            continue
        _absorb(op, linear, ctx, residual=other)
        return True
    return False


def _absorb(
    op: OnnxOp,
    linear: LinearOp,
    ctx: PassContext,
    *,
    bias: SSAValue | None = None,
    act: str | None = None,
    residual: SSAValue | None = None,
) -> None:
    """Replace `op` by `linear` with one more thing fused in."""
    fused = LinearOp(
        linear.x,
        linear.weight,
        bias if bias is not None else linear.bias,
        residual if residual is not None else linear.residual,
        act=act if act is not None else linear.act.data,
        storage=linear.storage.data,
    )
    swap(op, fused, ctx.origins)
    if linear.result.first_use is None and linear.parent is not None:
        erase(linear, ctx.origins)
