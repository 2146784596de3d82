"""Convolutions and pools over volumes (N, C, D, H, W) as calls of the kernels for planes.

`reference_nn` comes here for windows with three axes. Nothing is added to the plan's operations:

    convolution   slices along the depth become channels (a strided copy), one REF_CONV per volume
    transposed    one plane per (filter, tap along the depth), then a sum along the depth, which is
                  a transposed convolution of lines with ones
    pool          over each slice, then along the depth: both maxima and means are separable

Taps are added in the order (channel, kz, ky, kx), as in planes.
"""

from collections.abc import Sequence
from math import prod

import numpy as np

from compiler.contract.operations import Op
from compiler.contract.reference import PoolKind
from compiler.dialects.sp import OnnxOp
from compiler.passes.reference_calls import ReferenceCalls, View
from compiler.passes.reference_rows import integers

DEPTH_AXES = 3


class Window:
    """A window over three axes, pads worked out: sizes, strides, gaps, pads before and after."""

    def __init__(self, op: OnnxOp, r: ReferenceCalls, sizes: Sequence[int]) -> None:
        """Read a window's geometry from an operation's attributes."""
        ones = [1] * DEPTH_AXES
        pads = integers(op, "pads") or [0] * 2 * DEPTH_AXES
        if min(pads) < 0:
            r.sel.refuse("its padding is negative")
        self.sizes = list(sizes)
        self.strides = integers(op, "strides") or ones
        self.gaps = integers(op, "dilations") or ones
        self.before, self.after = pads[:DEPTH_AXES], pads[DEPTH_AXES:]

    def plane(self) -> dict[str, int]:
        """Return the part over height and width as fields of a geometry."""
        names = ("kh", "kw", "step_h", "step_w", "gap_h", "gap_w", "top", "left")
        values = (*self.sizes[1:], *self.strides[1:], *self.gaps[1:], *self.before[1:])
        return dict(zip(names, values, strict=True))

    def depth(self) -> dict[str, int]:
        """Return the part along the depth, over planes (depth, everything else)."""
        return {
            "kh": self.sizes[0],
            "step_h": self.strides[0],
            "gap_h": self.gaps[0],
            "top": self.before[0],
            "kw": 1,
            "step_w": 1,
            "gap_w": 1,
            "left": 0,
        }


def _convolved(
    r: ReferenceCalls,
    named: dict[str, View],
    geometry: dict[str, int],
    groups: int,
    shape: tuple[int, int, int, int],
    op: Op = Op.REF_CONV,
) -> View:
    batch, channels, height, width = named["x"].shape
    fields = {
        **geometry,
        "batch": batch,
        "channels": channels,
        "height": height,
        "width": width,
        "filters": shape[1],
        "groups": groups,
        "out_h": shape[2],
        "out_w": shape[3],
        "has_bias": int("bias" in named),
        "bias": 0,
    }
    return r.flat(op, named, fields, [(shape, named["x"].kind)])[0]


def convolve_volume(
    r: ReferenceCalls,
    x: View,
    w: View,
    bias: View | None,
    window: Window,
    groups: int,
    shape: Sequence[int],
) -> View:
    """Return a convolution of x (N, C, D, H, W) with w (M, C / groups, kz, ky, kx)."""
    n, channels, depth, height, width = x.shape
    filters, out_d, out_h, out_w = shape[1:]
    kz, step, gap = window.sizes[0], window.strides[0], window.gaps[0]
    if window.before[0] or window.after[0]:
        depth += window.before[0] + window.after[0]
        framed = (n, channels, depth, height, width)
        x = r.moved(framed, [(x, (0, 0, window.before[0], 0, 0))], 0.0)
    sn, sc, sd, sh, sw = x.steps
    slices = View(
        (n, out_d, channels, kz, height, width),
        *(x.kind, x.matrix, x.array, x.at),
        (sn, sd * step, sc, sd * gap, sh, sw),
    )
    planes = r.reshaped(slices, (n * out_d, channels * kz, height, width))
    taps = r.reshaped(w, (filters, w.shape[1] * kz, *w.shape[3:]))
    named = {"x": planes, "w": taps} | ({"bias": bias} if bias is not None else {})
    made = _convolved(r, named, window.plane(), groups, (n * out_d, filters, out_h, out_w))
    split = r.reshaped(made, (n, out_d, filters, out_h, out_w))
    return split.permuted((0, 2, 1, 3, 4))


def unconvolve_volume(
    r: ReferenceCalls,
    x: View,
    w: View,
    bias: View | None,
    window: Window,
    groups: int,
    shape: Sequence[int],
) -> View:
    """Return a transposed convolution of x (N, C, D, H, W) with w (C, M / groups, kz, ky, kx)."""
    n, channels, depth, height, width = x.shape
    filters, out_d, out_h, out_w = shape[1:]
    kz, up = window.sizes[0], Op.REF_CONV_TRANSPOSE
    planes = r.reshaped(x.permuted((0, 2, 1, 3, 4)), (n * depth, channels, height, width))
    taps = r.reshaped(w, (channels, w.shape[1] * kz, *w.shape[3:]))
    size = (n * depth, filters * kz, out_h, out_w)
    each = _convolved(r, {"x": planes, "w": taps}, window.plane(), groups, size, up)
    lines = r.reshaped(each, (n, depth, filters * kz, out_h * out_w)).permuted((0, 2, 1, 3))
    ones = np.broadcast_to(np.eye(kz, dtype=np.float32), (filters, kz, kz))
    named = {"x": lines, "w": r.constant(ones.reshape(filters * kz, 1, kz, 1))}
    named |= {"bias": bias} if bias is not None else {}
    size = (n, filters, out_d, out_h * out_w)
    return r.reshaped(_convolved(r, named, window.depth(), filters, size, up), shape)


def pool_volume(
    r: ReferenceCalls, x: View, window: Window, kind: PoolKind, shape: Sequence[int]
) -> View:
    """Return a pool of x (N, C, D, H, W)."""
    n, channels, depth, height, width = x.shape
    out_d, out_h, out_w = shape[2:]
    fields = {
        **window.plane(),
        "planes": n * channels * depth,
        "height": height,
        "width": width,
        "bottom": window.after[1],
        "right": window.after[2],
        "out_h": out_h,
        "out_w": out_w,
    }
    params = {"kind": int(kind)}
    size = (n, channels, depth, out_h * out_w)
    (flat,) = r.flat(Op.REF_POOL, {"x": x}, fields, [(size, "f")], params)
    fields = {
        **window.depth(),
        "planes": n * channels,
        "height": depth,
        "width": prod(size[3:]),
        "bottom": window.after[0],
        "right": 0,
        "out_h": out_d,
        "out_w": size[3],
    }
    return r.flat(Op.REF_POOL, {"x": flat}, fields, [(tuple(shape), "f")], params)[0]
