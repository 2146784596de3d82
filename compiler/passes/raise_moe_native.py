"""Raise the operators of domain `ai.sparsefleet` to `moe.route` and `moe.experts`.

Before:
    %i, %g = "sp.onnx"(%x, %w, %b, %lambda) <{op = "ai.sparsefleet::MoERouter", attrs = {k = 2}}>
    %y = "sp.onnx"(%x, %i, %g, %w1, %w2) <{op = "ai.sparsefleet::MoEExpert"}>
After:
    %i, %g = "moe.route"(%x, %w, %b') <{k = 2, order = "topk_softmax"}>       (%b' = lambda * b)
    %y = "moe.experts"(%x, %i, %g, %w1, %w2) <{act = "relu"}>

MoERouter adds lambda times the bias to the logits, takes the k greatest and a softmax over them.
A bias of zeros (lambda 0) is dropped. Weights, bias and lambda must be constants.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation

from compiler.dialects.moe import ExpertsOp, RouteOp
from compiler.dialects.sp import OnnxOp
from compiler.dialects.types import shape_of
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.match import attr
from compiler.passes.rewriting import insert_before, swap, sweep


@dataclass(frozen=True)
class RaiseMoeNative(Pass):
    """One-to-one raising of MoERouter and MoEExpert."""

    name: ClassVar[str] = "raise-moe-native"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Rewrite every router and every expert layer with constant weights."""
        return PassResult(sweep(module, ctx, _raise))


def _raise(op: Operation, ctx: PassContext) -> int:
    rule = _RULES.get(op.op.data) if isinstance(op, OnnxOp) else None
    return rule(op, ctx) if rule is not None and isinstance(op, OnnxOp) else 0


def _route(op: OnnxOp, ctx: PassContext) -> int:
    x, weight, bias, factor = op.arguments
    array, scale, k = ctx.constants.get(bias), ctx.constants.scalar(factor), attr(op, "k")
    if ctx.constants.get(weight) is None or array is None or scale is None:
        return 0
    assert isinstance(k, int)
    scaled = (array.reshape(-1) * np.float32(scale)).astype(np.float32)
    new: list[Operation] = []
    if scaled.any():
        new.append(ctx.constants.add(scaled))
    if not np.isfinite(scaled).all() or len(shape_of(weight)) != 2:
        return 0
    insert_before(op, *new)
    bias_operand = new[0].results[0] if new else None
    swap(op, RouteOp(x, weight, bias_operand, k=k, order="topk_softmax"), ctx.origins)
    return 1


def _experts(op: OnnxOp, ctx: PassContext) -> int:
    x, index, gate, w_in, w_out = op.arguments
    arrays = (ctx.constants.get(w_in), ctx.constants.get(w_out))
    if any(array is None or array.ndim != 3 for array in arrays):
        return 0
    swap(
        op,
        ExpertsOp(x, index, gate, w_in, w_out, act="relu", storage=ctx.spec.experts),
        ctx.origins,
    )
    return 1


_RULES: Final[Mapping[str, Callable[[OnnxOp, PassContext], int]]] = MappingProxyType(
    {"ai.sparsefleet::MoERouter": _route, "ai.sparsefleet::MoEExpert": _experts}
)
