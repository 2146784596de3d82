"""Shape rules: result shapes and element types of ONNX nodes under one binding.

A rule takes the node and its operands and returns one `Runtime` per result. Movement operations
need no rule of their own: running them on stand-in arrays gives the shape (`fold_rules`).
"""

from collections.abc import Sequence

import numpy as np
import onnx

from compiler.frontend.values import Node, Runtime, Values, axis_of, integers, operand

Shapes = list[Runtime]


def same(_node: Node, values: Values) -> Shapes:
    """Return the first operand's shape."""
    x = operand(values, 0)
    return [Runtime(x.shape, x.dtype)]


def dequantized(_node: Node, values: Values) -> Shapes:
    """Return the first operand's shape, of the scale's type."""
    return [Runtime(operand(values, 0).shape, widened(operand(values, 1).dtype))]


def along_axis(node: Node, values: Values) -> Shapes:
    """Return the first operand's shape, which must have the axis."""
    axis_of(node.attrs["axis"], len(operand(values, 0).shape))
    return same(node, values)


def broadcast(_node: Node, values: Values) -> Shapes:
    """Return the broadcast shape of all operands, with the first operand's type."""
    present = [value for value in values if value is not None]
    shape = np.broadcast_shapes(*(value.shape for value in present))
    return [Runtime(tuple(shape), present[0].dtype)]


def compare(node: Node, values: Values) -> Shapes:
    """Return the broadcast shape, of truth values."""
    return [Runtime(broadcast(node, values)[0].shape, "bool")]


def where(node: Node, values: Values) -> Shapes:
    """Return the broadcast shape of condition and branches, with the branches' type."""
    return [Runtime(broadcast(node, values)[0].shape, operand(values, 1).dtype)]


def cast(node: Node, values: Values) -> Shapes:
    """Return the operand's shape with the target type."""
    return [Runtime(operand(values, 0).shape, cast_dtype(node))]


def cast_dtype(node: Node) -> str:
    """Return the numpy name of a Cast's target; half precision is computed in f32."""
    name = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(int(node.attrs["to"]))).name
    return widened(name)


def widened(dtype: str) -> str:
    """Return the type we compute in: half precision becomes f32."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def matmul(_node: Node, values: Values) -> Shapes:
    """numpy.matmul."""
    a, b = operand(values, 0), operand(values, 1)
    left = (1, *a.shape) if len(a.shape) == 1 else a.shape
    right = (*b.shape, 1) if len(b.shape) == 1 else b.shape
    if left[-1] != right[-2]:
        raise ValueError(f"inner sizes {left[-1]} and {right[-2]} differ")
    shape = [*np.broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-1]]
    if len(a.shape) == 1:
        del shape[-2]
    if len(b.shape) == 1:
        del shape[-1]
    return [Runtime(tuple(shape), a.dtype)]


def gemm(node: Node, values: Values) -> Shapes:
    """Product of two matrices, each possibly transposed."""
    a, b = operand(values, 0), operand(values, 1)
    left = a.shape[::-1] if node.attrs["transA"] else a.shape
    right = b.shape[::-1] if node.attrs["transB"] else b.shape
    if len(left) != 2 or len(right) != 2 or left[1] != right[0]:
        raise ValueError(f"matrices {left} and {right} do not chain")
    return [Runtime((left[0], right[1]), a.dtype)]


def conv(node: Node, values: Values) -> Shapes:
    """Convolution in NCHW with explicit padding."""
    x, weight = operand(values, 0), operand(values, 1)
    spatial = len(x.shape) - 2
    if spatial < 1 or len(weight.shape) != len(x.shape):
        raise ValueError(f"window {weight.shape} does not fit image {x.shape}")
    strides, dilations, pads = conv_geometry(node, x.shape[2:], weight.shape[2:], None)
    sizes = []
    for i in range(spatial):
        window = (weight.shape[2 + i] - 1) * dilations[i] + 1
        sizes.append((x.shape[2 + i] + pads[i] + pads[i + spatial] - window) // strides[i] + 1)
    if any(size < 1 for size in sizes) or x.shape[1] != weight.shape[1] * node.attrs["group"]:
        raise ValueError(f"window {weight.shape} does not fit image {x.shape}")
    return [Runtime((x.shape[0], weight.shape[0], *sizes), x.dtype)]


def conv_geometry(
    node: Node, size: Sequence[int], window: Sequence[int], out: Sequence[int] | None
) -> tuple[list[int], list[int], list[int]]:
    """Return strides, dilations and pads (begins, then ends) of a window over an image.

    Args:
        node: With its attributes.
        size: Spatial sizes of the image.
        window: Spatial sizes of the window.
        out: Spatial sizes of the result of a transposed convolution, whose pads follow from it.
    """
    ones = [1] * len(size)
    strides = list(node.attrs["strides"] or ones)
    dilations = list(node.attrs.get("dilations") or ones)
    auto = node.attrs["auto_pad"]
    spans = [(k - 1) * d + 1 for k, d in zip(window, dilations, strict=True)]
    if out is not None and (auto not in ("NOTSET", "VALID") or node.attrs["output_shape"]):
        extra = node.attrs["output_padding"] or [0] * len(size)
        totals = [
            max(s * (n - 1) + e + span - o, 0)
            for s, n, e, span, o in zip(strides, size, extra, spans, out, strict=True)
        ]
        upper = auto != "SAME_UPPER"
    elif auto in ("NOTSET", "VALID"):
        pads = node.attrs["pads"] if auto == "NOTSET" else None
        return strides, dilations, list(pads or [0] * 2 * len(size))
    else:
        totals = [
            max((-(-n // s) - 1) * s + span - n, 0)
            for s, n, span in zip(strides, size, spans, strict=True)
        ]
        upper = auto == "SAME_LOWER"
    begins = [total - total // 2 if upper else total // 2 for total in totals]
    return strides, dilations, begins + [t - b for t, b in zip(totals, begins, strict=True)]


def reduce_axes(node: Node, values: Values) -> tuple[int, ...]:
    """Return the reduced axes counted from the front: attribute or second operand, else all."""
    rank = len(operand(values, 0).shape)
    axes: list[int] | None = node.attrs.get("axes")
    if axes is None and len(values) > 1 and values[1] is not None:
        axes = integers(values, 1)
    if not axes:
        return () if node.attrs.get("noop_with_empty_axes") else tuple(range(rank))
    return tuple(sorted(axis_of(axis, rank) for axis in axes))


def reduce(node: Node, values: Values) -> Shapes:
    """Axes reduced to one, or dropped."""
    x, axes = operand(values, 0), reduce_axes(node, values)
    return [Runtime(_reduced(x.shape, axes, bool(node.attrs["keepdims"])), x.dtype)]


def argmax(node: Node, values: Values) -> Shapes:
    """One axis reduced, of indices."""
    x = operand(values, 0)
    axis = axis_of(node.attrs["axis"], len(x.shape))
    return [Runtime(_reduced(x.shape, (axis,), bool(node.attrs["keepdims"])), "int64")]


def _reduced(shape: tuple[int, ...], axes: tuple[int, ...], keep: bool) -> tuple[int, ...]:
    if keep:
        return tuple(1 if i in axes else size for i, size in enumerate(shape))
    return tuple(size for i, size in enumerate(shape) if i not in axes)


def topk(node: Node, values: Values) -> Shapes:
    """Values and indices, k along the axis."""
    x = operand(values, 0)
    axis = axis_of(node.attrs["axis"], len(x.shape))
    (k,) = integers(values, 1)
    if not 1 <= k <= x.shape[axis]:
        raise ValueError(f"k = {k} of {x.shape[axis]} elements")
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    return [Runtime(shape, x.dtype), Runtime(shape, "int64")]


def concat(node: Node, values: Values) -> Shapes:
    """Sizes added up along the axis; all other sizes equal."""
    parts = [value for value in values if value is not None]
    axis = axis_of(node.attrs["axis"], len(parts[0].shape))
    others = {part.shape[:axis] + part.shape[axis + 1 :] for part in parts}
    if len(others) != 1:
        raise ValueError(f"parts differ in more than axis {axis}")
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return [Runtime(tuple(shape), parts[0].dtype)]


def tile(_node: Node, values: Values) -> Shapes:
    """Every axis repeated."""
    x, repeats = operand(values, 0), integers(values, 1)
    return [Runtime(tuple(a * r for a, r in zip(x.shape, repeats, strict=True)), x.dtype)]


def gather(node: Node, values: Values) -> Shapes:
    """Slices of one axis by index."""
    x, index = operand(values, 0), operand(values, 1)
    axis = axis_of(node.attrs["axis"], len(x.shape))
    return [Runtime((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]), x.dtype)]


def one_hot(node: Node, values: Values) -> Shapes:
    """The indices' shape with an axis of `depth` put in."""
    shape = list(operand(values, 0).shape)
    (depth,) = integers(values, 1)
    shape.insert(axis_of(node.attrs["axis"], len(shape) + 1), depth)
    return [Runtime(tuple(shape), operand(values, 2).dtype)]


def gather_nd(node: Node, values: Values) -> Shapes:
    """Slices by tuples of indices."""
    x, index = operand(values, 0), operand(values, 1)
    depth = index.shape[-1] + int(node.attrs["batch_dims"])
    return [Runtime((*index.shape[:-1], *x.shape[depth:]), x.dtype)]


def gather_elements(_node: Node, values: Values) -> Shapes:
    """One element per index."""
    return [Runtime(operand(values, 1).shape, operand(values, 0).dtype)]


def layer_norm(node: Node, values: Values) -> Shapes:
    """The normalised tensor; the optional mean and inverse deviation have reduced axes."""
    x = operand(values, 0)
    axis = axis_of(node.attrs["axis"], len(x.shape))
    inner = tuple(range(axis, len(x.shape)))
    for name, factor in zip(("scale", "bias"), values[1:], strict=False):
        if factor is not None and np.broadcast_shapes(factor.shape, x.shape) != x.shape:
            raise ValueError(f"{name} {factor.shape} does not fit {x.shape}")
    statistics = Runtime(_reduced(x.shape, inner, keep=True), "float32")
    return [Runtime(x.shape, x.dtype), statistics, statistics][: max(1, len(node.outputs))]


def group_router(node: Node, values: Values) -> Shapes:
    """`com.microsoft::MoEGroupRouter`: logits (.., E) to as many scores, up to three times."""
    x = operand(values, 0)
    if len(values) > 2 and values[2] is not None:
        raise ValueError("a router with a projection of its own")
    rows = int(np.prod(x.shape[:-1], dtype=np.int64))
    return [Runtime((rows, x.shape[-1]), x.dtype)] * len(node.outputs)


def moe_router(node: Node, values: Values) -> Shapes:
    """`ai.sparsefleet::MoERouter`: rows, weight (E, D), bias, lambda to k indices and gates."""
    x, weight, k = operand(values, 0), operand(values, 1), int(node.attrs["k"])
    if len(x.shape) != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"router weight {weight.shape} does not fit rows {x.shape}")
    if operand(values, 2).shape != weight.shape[:1] or not 1 <= k <= weight.shape[0]:
        raise ValueError(f"k = {k} and the bias do not fit {weight.shape[0]} experts")
    shape = (x.shape[0], k)
    return [Runtime(shape, "int64"), Runtime(shape, x.dtype)]


def moe_expert(_node: Node, values: Values) -> Shapes:
    """`ai.sparsefleet::MoEExpert`: rows, index, gate, w_in (E, F, D), w_out (E, D, F) to rows."""
    x, index, gate, w_in, w_out = (operand(values, at).shape for at in range(5))
    chained = len(x) == 2 and len(w_in) == 3 and w_out == (w_in[0], w_in[2], w_in[1])
    if not chained or x[1] != w_in[2]:
        raise ValueError(f"expert weights {w_in} and {w_out} do not fit rows {x}")
    if index != gate or len(index) != 2 or index[0] != x[0]:
        raise ValueError(f"index {index} and gate {gate} do not fit rows {x}")
    return [Runtime(x, operand(values, 0).dtype)]


def dynamic_prune(node: Node, values: Values) -> Shapes:
    """`ai.sparsefleet::DynamicPrune`: tokens (1, N, D), scores (1, H, N + 1) to k tokens."""
    x, scores, k = operand(values, 0), operand(values, 1).shape, int(node.attrs["k"])
    if len(x.shape) != 3 or len(scores) != 3 or scores[2] != x.shape[1] + 1:
        raise ValueError(f"scores {scores} do not fit tokens {x.shape}")
    if not 1 <= k <= x.shape[1]:
        raise ValueError(f"k = {k} of {x.shape[1]} tokens")
    return [Runtime((x.shape[0], k, x.shape[2]), x.dtype), Runtime((x.shape[0], k), "int64")]
