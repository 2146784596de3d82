"""Raise convolutions of images to `sp.conv2d` in HWC order, so that layout changes vanish.

Before:
    %1 = "sp.onnx"(%x, %w, %b) <{op = "Conv", ...}> : tensor<1x3x8x8xf32> -> tensor<1x16x4x4xf32>
    %2 = "sp.onnx"(%1) <{op = "Relu"}>
After:
    %x' = x as (H*W, C);   %w' = w as (Co, kh*kw*Ci)
    %y' = "sp.conv2d"(%x', %w', %b) <{geometry = array<i64: 8, 8, 3, 3, 2, 1>, act = "relu"}>
    %2 = %y' as (1, Co, Ho, Wo)

The two layout changes are movement; between convolutions, and before the usual "flatten and
transpose to tokens", they cancel. Several images are rows one after the other, (N*H*W, C). A group
for every channel (depthwise) has w' (C, kh*kw), and there the strides may differ by axis. Left out:
other groups, dilation, padding that differs by side, a dense one whose strides differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from compiler.dialects.dims import Dim
from compiler.dialects.movement import ReshapeOp, TransposeOp
from compiler.dialects.sp import Conv2dOp, OnnxOp
from compiler.dialects.types import shape_of
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.channel_last import CHANNEL_FIRST, CHANNEL_LAST
from compiler.passes.match import attr, onnx, single_use
from compiler.passes.rewriting import insert_before, replace, sweep


@dataclass(frozen=True)
class RaiseConv(Pass):
    """Recognise plain and depthwise 2-D convolutions and a ReLU behind them."""

    name: ClassVar[str] = "raise-conv"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Rewrite every matching Conv."""
        return PassResult(sweep(module, ctx, _raise))


def _raise(op: Operation, ctx: PassContext) -> int:
    if not isinstance(op, OnnxOp) or op.op.data != "Conv":
        return 0
    geometry = _geometry(op)
    weight = ctx.constants.get(op.arguments[1])
    third = op.operand_at(2)
    bias = ctx.constants.get(third)
    if geometry is None or weight is None or (third is not None and bias is None):
        return 0
    end, act = _with_relu(op)
    filters = np.ascontiguousarray(weight.transpose(0, 2, 3, 1).reshape(weight.shape[0], -1))
    to_rows = _to_rows(op.arguments[0])
    constants = [ctx.constants.add(filters)]
    if bias is not None:
        constants.append(ctx.constants.add(bias))
    conv = Conv2dOp(
        to_rows[-1].result,
        constants[0].result,
        constants[1].result if bias is not None else None,
        geometry,
        act=act,
    )
    back = _to_images(conv.result, shape_of(end.results[0]))
    insert_before(end, *to_rows, *constants, conv, *back)
    replace(end, [back[-1].result], ctx.origins)
    return 1


def _to_rows(images: SSAValue) -> list[ReshapeOp | TransposeOp]:
    """Return the way from (N, C, H, W) to (N*H*W, C)."""
    count, channels, height, width = shape_of(images)
    pixels = Dim(count.constant * height.constant * width.constant)
    last = TransposeOp(images, CHANNEL_LAST)
    return [last, ReshapeOp(last.result, (pixels, channels))]


def _to_images(rows: SSAValue, shape: Sequence[Dim]) -> list[ReshapeOp | TransposeOp]:
    """Return the way back from (N*H*W, C) to (N, C, H, W)."""
    count, channels, height, width = shape
    last = ReshapeOp(rows, (count, height, width, channels))
    return [last, TransposeOp(last.result, CHANNEL_FIRST)]


def _geometry(op: OnnxOp) -> tuple[int, ...] | None:
    """Return H, W, kh, kw, stride, pad, or None if one number is not enough for each.

    A depthwise convolution may have its stride across as a seventh.
    """
    shape, kernel = (shape_of(value) for value in op.arguments[:2])
    strides, dilations, pads = (attr(op, key) for key in ("strides", "dilations", "pads"))
    if len(shape) != 4 or not shape[0].is_static:
        return None
    is_plain = attr(op, "group") == 1
    if not is_plain and not (kernel[1] == Dim(1) and kernel[0] == shape[1]):
        return None
    if not all(isinstance(item, list) for item in (strides, dilations, pads)):
        return None
    assert isinstance(strides, list)
    assert isinstance(pads, list)
    if len(strides) != 2 or len(set(pads)) != 1 or dilations != [1, 1]:
        return None
    across = strides[1:] if strides[0] != strides[1] else []
    if across and is_plain:
        return None
    height, width = shape[2].constant, shape[3].constant
    return (height, width, kernel[2].constant, kernel[3].constant, strides[0], pads[0], *across)


def _with_relu(op: OnnxOp) -> tuple[OnnxOp, str]:
    if single_use(op.outputs[0]):
        (user,) = (use.operation for use in op.outputs[0].uses)
        relu = onnx(user.results[0], "Relu") if user.results else None
        if relu is not None:
            return relu, "relu"
    return op, "none"
