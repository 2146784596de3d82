"""Reference rows of convolutions, pools and normalisations over tensors in NCHW order.

Windows over volumes are in `reference_volume`.
"""

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Final

import numpy as np

from compiler.contract.operations import Op
from compiler.contract.reference import MapKind, PoolKind, ReduceKind
from compiler.dialects.sp import OnnxOp
from compiler.passes.match import attr
from compiler.passes.reference_calls import ReferenceCalls, View
from compiler.passes.reference_index import gathered
from compiler.passes.reference_rows import (
    Row,
    fixed,
    integer,
    integers,
    number,
    operand,
    operands,
)
from compiler.passes.reference_volume import (
    DEPTH_AXES,
    Window,
    convolve_volume,
    pool_volume,
    unconvolve_volume,
)

_K: Final = MapKind


def _planar(r: ReferenceCalls, sizes: Sequence[int]) -> tuple[int, int]:
    """Return one or two spatial sizes as (height, width); a line has height 1."""
    if len(sizes) > 2:
        r.sel.refuse("it has more than three spatial axes")
    height, width = (1, *sizes)[-2:]
    return height, width


def window_geometry(op: OnnxOp, r: ReferenceCalls, window: Sequence[int]) -> dict[str, int]:
    """Return window, steps, gaps and leading pads; a line is one row."""
    spatial = len(window)
    pads = integers(op, "pads") or [0] * 2 * spatial
    if min(pads, default=0) < 0:
        r.sel.refuse("its padding is negative")
    ones = [1] * spatial
    kh, kw = _planar(r, window)
    step_h, step_w = _planar(r, integers(op, "strides") or ones)
    gap_h, gap_w = _planar(r, integers(op, "dilations") or ones)
    top, left = (0, *pads[:spatial])[-2:]
    return {
        "kh": kh,
        "kw": kw,
        "step_h": step_h,
        "step_w": step_w,
        "gap_h": gap_h,
        "gap_w": gap_w,
        "top": top,
        "left": left,
    }


def convolve(
    r: ReferenceCalls,
    x: View,
    w: View,
    bias: View | None,
    geometry: Mapping[str, int],
    groups: int,
    shape: tuple[int, ...],
    *,
    transposed: bool = False,
) -> View:
    """Return a (transposed) convolution of `shape`; see `Op.REF_CONV`."""
    height, width = _planar(r, x.shape[2:])
    out_h, out_w = _planar(r, shape[2:])
    fields = {
        **geometry,
        "batch": x.shape[0],
        "channels": x.shape[1],
        "height": height,
        "width": width,
        "filters": shape[1],
        "groups": groups,
        "out_h": out_h,
        "out_w": out_w,
        "has_bias": int(bias is not None),
        "bias": 0,
    }
    named = {"x": x, "w": w} | ({"bias": bias} if bias is not None else {})
    op = Op.REF_CONV_TRANSPOSE if transposed else Op.REF_CONV
    return r.flat(op, named, fields, [(shape, x.kind)])[0]


def _conv(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, w, bias = (operand(op, r, at) for at in range(3))
    assert x is not None
    assert w is not None
    shape, groups = r.shape(op.outputs[0]), integer(op, "group", 1)
    transposed = op.op.data == "ConvTranspose"
    if len(shape) == DEPTH_AXES + 2:
        window = Window(op, r, w.shape[2:])
        volume = unconvolve_volume if transposed else convolve_volume
        return [volume(r, x, w, bias, window, groups, shape)]
    geometry = window_geometry(op, r, w.shape[2:])
    return [convolve(r, x, w, bias, geometry, groups, shape, transposed=transposed)]


def _pool(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    if any(result.first_use is not None for result in op.outputs[1:]):
        r.sel.refuse("the places of the greatest elements are not computed")
    x = operands(op, r)[0]
    window = integers(op, "kernel_shape")
    shape = r.shape(op.outputs[0])
    if len(window) == DEPTH_AXES:
        return [pool_volume(r, x, Window(op, r, window), _pool_kind(op), shape)]
    pads = integers(op, "pads") or [0] * 2 * len(window)
    bottom, right = (0, *pads[len(window) :])[-2:]
    height, width = _planar(r, x.shape[2:])
    out_h, out_w = _planar(r, shape[2:])
    fields = {
        **window_geometry(op, r, window),
        "planes": x.shape[0] * x.shape[1],
        "height": height,
        "width": width,
        "bottom": bottom,
        "right": right,
        "out_h": out_h,
        "out_w": out_w,
    }
    return r.flat(Op.REF_POOL, {"x": x}, fields, [(shape, "f")], {"kind": int(_pool_kind(op))})


def _pool_kind(op: OnnxOp) -> PoolKind:
    if op.op.data != "AveragePool":
        return PoolKind.MAX
    return PoolKind.AVERAGE_PADDED if integer(op, "count_include_pad") else PoolKind.AVERAGE


def _global_pool(kind: ReduceKind) -> Row:
    def row(op: OnnxOp, r: ReferenceCalls) -> list[View]:
        x = operands(op, r)[0]
        return [r.reduce(kind, x, list(range(2, len(x.shape))))]

    return row


def _channels(r: ReferenceCalls, vector: View, rank: int) -> View:
    return r.reshaped(vector, (vector.size, *[1] * (rank - 2)))


def _batch_norm(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    if integer(op, "training_mode"):
        r.sel.refuse("it is in training mode")
    x = operands(op, r)[0]
    arrays = [fixed(op, r, at) for at in range(1, 5)]
    scale, offset = folded_batch_norm(arrays, number(op, "epsilon", 1e-5))
    y = r.map(_K.MUL, x, _channels(r, r.constant(scale), len(x.shape)))
    return [r.map(_K.ADD, y, _channels(r, r.constant(offset), len(x.shape)))]


def folded_batch_norm(
    arrays: Sequence[np.ndarray | None], epsilon: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return factor and offset per channel, f32, of a batch normalisation.

    Args:
        arrays: scale, bias, mean, variance, each (channels) f32.
        epsilon: Added to the variance.
    """
    gamma, beta, mean, variance = (np.asarray(a, np.float64) for a in arrays)
    factor = gamma / np.sqrt(variance + epsilon)
    return factor.astype(np.float32), (beta - mean * factor).astype(np.float32)


def normalised(
    r: ReferenceCalls, x: View, axes: Sequence[int], epsilon: float, *, centred: bool = True
) -> tuple[View, View | None, View]:
    """Return x normalised over axes, its mean (None if not centred) and inverse deviation."""
    mean = r.reduce(ReduceKind.MEAN, x, axes) if centred else None
    y = r.map(_K.SUB, x, mean) if mean is not None else x
    square = r.reduce(ReduceKind.SUM_SQUARE, y, axes)
    count = prod(x.shape[axis] for axis in axes)
    variance = r.map(_K.DIV, square, r.scalar(float(count)))
    root = r.map(_K.SQRT, r.map(_K.ADD, variance, r.scalar(epsilon)))
    return r.map(_K.DIV, y, root), mean, r.map(_K.RECIPROCAL, root)


def _scaled(r: ReferenceCalls, y: View, scale: View | None, bias: View | None) -> View:
    if scale is not None:
        y = r.map(_K.MUL, y, scale)
    return y if bias is None else r.map(_K.ADD, y, bias)


def _layer_norm(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, scale, bias = (operand(op, r, at) for at in range(3))
    assert x is not None
    axes = list(range(integer(op, "axis"), len(x.shape)))
    centred = op.op.data == "LayerNormalization"
    y, mean, inverse = normalised(r, x, axes, number(op, "epsilon", 1e-5), centred=centred)
    results = [_scaled(r, y, scale, bias), mean or inverse, inverse]
    return results[: len(op.outputs)]


def _instance_norm(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, scale, bias = operands(op, r)
    rank = len(x.shape)
    y, _, _ = normalised(r, x, list(range(2, rank)), number(op, "epsilon", 1e-5))
    return [_scaled(r, y, _channels(r, scale, rank), _channels(r, bias, rank))]


def _group_norm(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, scale, bias = operands(op, r)
    groups, rank = integer(op, "num_groups", 1), len(x.shape)
    split = r.reshaped(x, (x.shape[0], groups, x.size // (x.shape[0] * groups)))
    y, _, _ = normalised(r, split, [2], number(op, "epsilon", 1e-5))
    y = r.reshaped(y, x.shape)
    if scale.size == groups != x.shape[1]:
        each = x.shape[1] // groups
        scale, bias = (
            r.reshaped(r.reshaped(v, (groups, 1)).expanded((groups, each)), (x.shape[1],))
            for v in (scale, bias)
        )
    return [_scaled(r, y, _channels(r, scale, rank), _channels(r, bias, rank))]


def _lp_norm(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x = operands(op, r)[0]
    kind = ReduceKind.L1 if integer(op, "p", 2) == 1 else ReduceKind.L2
    return [r.map(_K.DIV, x, r.reduce(kind, x, [integer(op, "axis")]))]


def _lrn(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    """Local response: the sum of squares over neighbouring channels is a banded product."""
    x, size = operands(op, r)[0], integer(op, "size", 1)
    channels = x.shape[1]
    place = np.arange(channels)
    off = place[None, :] - place[:, None]
    band = ((off >= -((size - 1) // 2)) & (off <= size // 2)).astype(np.float32)
    flat = r.reshaped(x, (x.shape[0], channels, prod(x.shape[2:])))
    near = r.contract(r.constant(band), r.map(_K.MUL, flat, flat))
    factor = r.scalar(number(op, "alpha", 1e-4) / size)
    base = r.map(_K.ADD, r.map(_K.MUL, near, factor), r.scalar(number(op, "bias", 1.0)))
    power = r.map(_K.POW, base, r.scalar(number(op, "beta", 0.75)))
    return [r.reshaped(r.map(_K.DIV, flat, power), x.shape)]


def _resize(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, shape = operands(op, r)[0], r.shape(op.outputs[0])
    given = fixed(op, r, 2)
    axes = integers(op, "axes") or list(range(len(x.shape)))
    scales = [out / size for out, size in zip(shape, x.shape, strict=True)]
    if given is not None and given.size == len(axes):
        for axis, scale in zip(axes, given.tolist(), strict=True):
            scales[axis % len(x.shape)] = float(scale)
    mode = attr(op, "mode")
    for axis, (size, out, scale) in enumerate(zip(x.shape, shape, scales, strict=True)):
        if size == out and scale == 1.0:
            continue
        at = coordinates(str(attr(op, "coordinate_transformation_mode")), size, out, scale)
        if at is None:
            r.sel.refuse("resizing a part of the picture (tf_crop_and_resize) is not supported")
        if mode == "nearest":
            index = nearest(str(attr(op, "nearest_mode")), at, size)
            x = gathered(r, x, r.constant(index), axis)
        else:
            cubic = number(op, "cubic_coeff_a", -0.75) if mode == "cubic" else None
            shrink = min(scale, 1.0) if integer(op, "antialias") else 1.0
            only_inside = bool(integer(op, "exclude_outside"))
            x = _resampled(r, x, axis, *taps(at, size, cubic, shrink, only_inside=only_inside))
    return [x]


def coordinates(mode: str, size: int, out: int, scale: float) -> np.ndarray | None:
    """Return where each output lies on the input axis, f32 as runtimes compute it."""
    place = np.arange(out, dtype=np.float32)
    factor = np.float32(scale)
    match mode:
        case "asymmetric":
            return np.asarray(place / factor)
        case "half_pixel":
            return np.asarray((place + np.float32(0.5)) / factor - np.float32(0.5))
        case "pytorch_half_pixel":
            half = (place + np.float32(0.5)) / factor - np.float32(0.5)
            return np.asarray(half if out > 1 else place * 0)
        case "align_corners":
            return np.asarray(place * 0 if out == 1 else place * np.float32((size - 1) / (out - 1)))
        case "half_pixel_symmetric":
            shift = np.float32(size / 2 * (1 - out / (scale * size)))
            return np.asarray(shift + (place + np.float32(0.5)) / factor - np.float32(0.5))
        case _:
            return None


def nearest(mode: str, at: np.ndarray, size: int) -> np.ndarray:
    """Return the nearest input of each coordinate, i32."""
    match mode:
        case "floor":
            found = np.floor(at)
        case "ceil":
            found = np.ceil(at)
        case "round_prefer_ceil":
            found = np.floor(at + np.float32(0.5))
        case _:
            found = np.ceil(at - np.float32(0.5))
    return np.asarray(np.clip(found, 0, size - 1), np.int32)


def taps(
    at: np.ndarray, size: int, cubic: float | None, shrink: float, *, only_inside: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return indices i32 and weights f32, (outputs, taps), of linear or cubic interpolation.

    Args:
        at: Where each output lies on the input axis.
        size: Elements of the input axis.
        cubic: Coefficient a of the cubic, None for linear.
        shrink: Below 1, the kernel is widened by its inverse, so that no element is passed over.
        only_inside: Elements outside have no weight; else they are the first or the last.
    """
    if cubic is None and shrink == 1.0:
        clipped = np.clip(at, 0, size - 1)
        low = np.floor(clipped)
        rest = (clipped - low).astype(np.float32)
        index = np.stack([low, np.minimum(low + 1, size - 1)], axis=1)
        return index.astype(np.int32), np.stack([1 - rest, rest], axis=1).astype(np.float32)
    reach = (1 if cubic is None else 2) / shrink
    wide = at.astype(np.float64)
    first = np.floor(wide - reach) + 1
    index = first[:, None] + np.arange(int(np.ceil(2 * reach)))
    weights = _kernel(np.abs(index - wide[:, None]) * shrink, cubic)
    if only_inside:
        weights = np.where((index < 0) | (index >= size), 0.0, weights)
    weights = weights / weights.sum(axis=1, keepdims=True)
    return np.clip(index, 0, size - 1).astype(np.int32), weights.astype(np.float32)


def _kernel(away: np.ndarray, a: float | None) -> np.ndarray:
    """Return the weight of an element by its distance: a triangle, or Keys' cubic."""
    if a is None:
        return np.asarray(np.maximum(1 - away, 0))
    near = ((a + 2) * away - (a + 3)) * away * away + 1
    far = ((a * away - 5 * a) * away + 8 * a) * away - 4 * a
    return np.where(away <= 1, near, np.where(away < 2, far, 0.0))


def _resampled(
    r: ReferenceCalls, x: View, axis: int, index: np.ndarray, weights: np.ndarray
) -> View:
    shape = (*x.shape[:axis], len(index), *x.shape[axis + 1 :])
    fields = {
        "outer": prod(x.shape[:axis]),
        "n": x.shape[axis],
        "inner": prod(x.shape[axis + 1 :]),
        "m": len(index),
        "taps": index.shape[1],
    }
    named = {"x": x, "w": r.constant(weights), "index": r.constant(index)}
    return r.flat(Op.REF_RESAMPLE, named, fields, [(shape, "f")])[0]


NETWORKS: Final[Mapping[str, Row]] = MappingProxyType(
    {
        "AveragePool": _pool,
        "BatchNormalization": _batch_norm,
        "Conv": _conv,
        "ConvTranspose": _conv,
        "GlobalAveragePool": _global_pool(ReduceKind.MEAN),
        "GlobalMaxPool": _global_pool(ReduceKind.MAX),
        "GroupNormalization": _group_norm,
        "InstanceNormalization": _instance_norm,
        "LRN": _lrn,
        "LayerNormalization": _layer_norm,
        "LpNormalization": _lp_norm,
        "MaxPool": _pool,
        "RMSNormalization": _layer_norm,
        "Resize": _resize,
    }
)
