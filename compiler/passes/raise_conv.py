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
for every channel (depthwise) has w' (C, kh*kw). A line (N, C, W) is an image of one row. Left out:
other groups, dilation, more axes, and sizes beyond those of a call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from compiler.contract.operations import MAX_DIM, MAX_WINDOW
from compiler.contract.windows import MAX_PAD, Window, pad_code
from compiler.dialects.dims import Dim
from compiler.dialects.movement import ReshapeOp, TransposeOp
from compiler.dialects.sp import Conv2dOp, OnnxOp
from compiler.dialects.types import shape_of
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.channel_last import channel_first, channel_last
from compiler.passes.match import attr, onnx, single_use
from compiler.passes.rewriting import insert_before, replace, sweep


@dataclass(frozen=True)
class RaiseConv(Pass):
    """Recognise plain and depthwise convolutions of planes and lines, and a ReLU behind them."""

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
    filters = np.moveaxis(weight, 1, -1).reshape(weight.shape[0], -1)
    to_rows = _to_rows(op.arguments[0])
    constants = [ctx.constants.add(np.ascontiguousarray(filters))]
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
    """Return the way from (N, C, [H,] W) to (N*H*W, C)."""
    shape = shape_of(images)
    pixels = Dim(prod(dim.constant for dim in (shape[0], *shape[2:])))
    last = TransposeOp(images, channel_last(len(shape)))
    return [last, ReshapeOp(last.result, (pixels, shape[1]))]


def _to_images(rows: SSAValue, shape: Sequence[Dim]) -> list[ReshapeOp | TransposeOp]:
    """Return the way back from (N*H*W, C) to (N, C, [H,] W)."""
    last = ReshapeOp(rows, (shape[0], *shape[2:], shape[1]))
    return [last, TransposeOp(last.result, channel_first(len(shape)))]


def _geometry(op: OnnxOp) -> tuple[int, ...] | None:
    """Return H, W, kh, kw, stride, pad and stride across of `contract.windows`; None if no kernel.

    A line is an image of one row. The stride across is left out where it is the stride down.
    """
    shape, kernel = (shape_of(value) for value in op.arguments[:2])
    strides, dilations, pads = (attr(op, key) for key in ("strides", "dilations", "pads"))
    if len(shape) not in (3, 4) or not all(dim.is_static for dim in (*shape, *kernel)):
        return None
    if attr(op, "group") != 1 and not (kernel[1] == Dim(1) and kernel[0] == shape[1]):
        return None
    if not (isinstance(strides, list) and isinstance(dilations, list) and isinstance(pads, list)):
        return None
    spatial = len(shape) - 2
    sides = [*_plane(pads[:spatial], 0), *_plane(pads[spatial:], 0)]
    if any(gap != 1 for gap in dilations) or not all(0 <= side <= MAX_PAD for side in sides):
        return None
    height, width = _plane([dim.constant for dim in shape[2:]], 1)
    kh, kw = _plane([dim.constant for dim in kernel[2:]], 1)
    down, across = _plane(strides, strides[-1])
    geometry = (height, width, kh, kw, down, pad_code(*sides), *[across] * (across != down))
    return geometry if _is_within_limits(geometry, shape[0].constant, kernel) else None


def _plane(sizes: Sequence[int], first: int) -> tuple[int, int]:
    """Return the numbers of a plane's two axes; `first` is that of a line's missing one."""
    down, across = (first, *sizes)[-2:]
    return down, across


def _is_within_limits(geometry: Sequence[int], images: int, kernel: Sequence[Dim]) -> bool:
    """Return whether the numbers of a call may be as large."""
    window = Window.of(dict(zip(Conv2dOp.FIELDS, geometry, strict=False)))
    if not window.fits or max(window.kh, window.kw, window.down, window.across) > MAX_WINDOW:
        return False
    taps = prod(dim.constant for dim in kernel[1:])
    rows = images * max(window.height * window.width, prod(window.out))
    return max(rows, taps, kernel[0].constant) <= MAX_DIM


def _with_relu(op: OnnxOp) -> tuple[OnnxOp, str]:
    if single_use(op.outputs[0]):
        (user,) = (use.operation for use in op.outputs[0].uses)
        relu = onnx(user.results[0], "Relu") if user.results else None
        if relu is not None:
            return relu, "relu"
    return op, "none"
