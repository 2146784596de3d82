"""Raise normalisations, whole or decomposed, to `sp.norm`.

Before (with x -> Pow 2 -> ReduceMean -> Add eps -> Sqrt -> Reciprocal = %r):
    %n = "sp.onnx"(%x, %r) <{op = "Mul"}>
    %y = "sp.onnx"(%n, %gamma) <{op = "Mul"}>
After:
    %y = "sp.norm"(%x, %gamma) <{kind = "rms", eps = 1e-05}>

Variants: x*x for Pow; Div by the root for Mul by its reciprocal; Pow -0.5; 1/Sqrt; LayerNorm as
(x - mean) / sqrt(var + eps) * gamma + beta. Without a gamma, ones are used. The axis must be the
last one, and every mean must keep it.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from compiler.dialects.sp import ConstantOp, NormOp, OnnxOp
from compiler.dialects.types import shape_of
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.match import (
    Bind,
    Env,
    OneOf,
    Pattern,
    Scalar,
    attr,
    find,
    node,
    onnx,
    single_use,
)
from compiler.passes.rewriting import insert_before, redirect, replace, sweep


def _square(of: Pattern) -> Pattern:
    return OneOf((node("Pow", of, Scalar("two", 2.0)), node("Mul", of, of)))


def _divided_by_root(x: Pattern, variance: Pattern) -> Pattern:
    total = node("Add", variance, Scalar("eps"))
    root = node("Sqrt", total)
    inverse = OneOf(
        (
            node("Reciprocal", root),
            node("Div", Scalar("one", 1.0), root),
            node("Pow", total, Scalar("half", -0.5)),
        )
    )
    return OneOf((node("Mul", x, inverse), node("Div", x, root)))


_X: Final = Bind("x")
_RMS: Final = _divided_by_root(_X, node("ReduceMean", _square(_X), name="mean"))
_CENTRED: Final = node("Sub", _X, node("ReduceMean", _X, name="mean"), name="centred")
_LAYER: Final = _divided_by_root(
    _CENTRED,
    node("ReduceMean", _square(_CENTRED), name="variance"),
)


@dataclass(frozen=True)
class RaiseNorm(Pass):
    """Recognise RMS and layer normalisation over the last axis."""

    name: ClassVar[str] = "raise-norm"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Rewrite from the outputs' side, so that gamma and beta are found before the core."""
        return PassResult(sweep(module, ctx, _raise))


def _raise(op: Operation, ctx: PassContext) -> int:
    return _raise_whole(op, ctx) or _raise_decomposed(op, ctx)


def _raise_whole(op: Operation, ctx: PassContext) -> int:
    if not isinstance(op, OnnxOp) or op.op.data not in ("LayerNormalization", "RMSNormalization"):
        return 0
    last = shape_of(op.arguments[0])[-1:]
    gamma, beta = _vector(op.operand_at(1), ctx), _vector(op.operand_at(2), ctx)
    used = [result for result in op.outputs[1:] if result.first_use is not None]
    if attr(op, "axis") != len(shape_of(op.arguments[0])) - 1 or gamma is None or used:
        return 0
    if shape_of(gamma.result) != last or (beta is None) != (op.operand_at(2) is None):
        return 0
    if beta is not None and shape_of(beta.result) != last:
        return 0
    kind = "layer" if op.op.data == "LayerNormalization" else "rms"
    eps = attr(op, "epsilon")
    assert isinstance(eps, float)
    norm = NormOp(op.arguments[0], gamma.result, beta.result if beta else None, kind=kind, eps=eps)
    insert_before(op, *([gamma, beta] if beta else [gamma]), norm)
    redirect(op.outputs[0], norm.result, ctx.origins)
    return 1


def _raise_decomposed(op: Operation, ctx: PassContext) -> int:
    if not isinstance(op, OnnxOp) or op.op.data not in ("Mul", "Div"):
        return 0
    core = op.outputs[0]
    for kind, pattern in (("layer", _LAYER), ("rms", _RMS)):
        env = find(pattern, core, ctx.constants)
        if env is not None and _means_last_axis(env):
            _emit(op, kind, env, ctx)
            return 1
    return 0


def _means_last_axis(env: Env) -> bool:
    last = len(shape_of(env["x"])) - 1
    for name in ("mean", "variance"):
        mean = onnx(env[name], "ReduceMean") if name in env else None
        if mean is not None and (attr(mean, "axes") != [last] or attr(mean, "keepdims") != 1):
            return False
    return True


def _emit(core: OnnxOp, kind: str, env: Env, ctx: PassContext) -> None:
    x = env["x"]
    end: Operation = core
    gamma, end = _following_vector(core, "Mul", end, ctx)
    beta = None
    if kind == "layer":
        beta, end = _following_vector(end, "Add", end, ctx)
    if gamma is None:
        gamma = ctx.constants.add(np.ones(shape_of(x)[-1].constant, np.float32))
    eps = ctx.constants.scalar(env["eps"])
    assert eps is not None
    norm = NormOp(x, gamma.result, beta.result if beta else None, kind=kind, eps=eps)
    insert_before(end, *([gamma, beta] if beta else [gamma]), norm)
    replace(end, [norm.result], ctx.origins)


def _following_vector(
    op: Operation, kind: str, end: Operation, ctx: PassContext
) -> tuple[ConstantOp | None, Operation]:
    """Return the vector that the only user of `op` multiplies or adds, and that user."""
    value = op.results[0]
    if not single_use(value):
        return None, end
    (user,) = (use.operation for use in value.uses)
    if not isinstance(user, OnnxOp) or user.op.data != kind:
        return None, end
    other = user.arguments[1] if user.arguments[0] is value else user.arguments[0]
    vector = _vector(other, ctx)
    if vector is None or shape_of(vector.result) != shape_of(value)[-1:]:
        return None, end
    return vector, user


def _vector(value: SSAValue | None, ctx: PassContext) -> ConstantOp | None:
    """Return a new constant operation with the one-dimensional form of a constant vector."""
    array = ctx.constants.get(value)
    if array is None or array.ndim < 1 or array.size != array.shape[-1]:
        return None
    return ctx.constants.add(array.reshape(-1))
