"""Fold rules: ONNX nodes computed with numpy, for constants and for shape arithmetic.

A rule takes the node and its operands (elements known) and returns one array per result. Movement
rules also run on stand-ins, which is how result shapes of movement nodes are found.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx

from compiler.frontend.shape_rules import cast_dtype, reduce_axes
from compiler.frontend.values import (
    Array,
    Known,
    Node,
    Values,
    axis_of,
    integers,
    known,
    operand,
    required,
    stand_in,
)

Arrays = list[Array]
Fold = Callable[[Node, Values], Arrays]


def data(values: Values) -> Array:
    """Return the first operand's elements, or a stand-in for them."""
    return stand_in(operand(values, 0))


def elementwise(function: Callable[..., Any]) -> Fold:
    """Return the rule that applies a numpy function to all operands."""

    def fold(_node: Node, values: Values) -> Arrays:
        arrays = [stand_in(value) for value in values if value is not None]
        with np.errstate(all="ignore"):
            return [np.asarray(function(*arrays), dtype=arrays[0].dtype)]

    return fold


def comparison(function: Callable[..., Any]) -> Fold:
    """Return the rule that applies a numpy comparison."""

    def fold(_node: Node, values: Values) -> Arrays:
        return [np.asarray(function(*(stand_in(v) for v in values if v is not None)), dtype=bool)]

    return fold


def reduction(function: Callable[..., Any]) -> Fold:
    """Return the rule that applies a numpy reduction."""

    def fold(node: Node, values: Values) -> Arrays:
        x, axes = data(values), reduce_axes(node, values)
        return [np.asarray(function(x, axis=axes, keepdims=bool(node.attrs["keepdims"])), x.dtype)]

    return fold


def divide(a: Array, b: Array) -> Array:
    """Division as ONNX does it: integers truncate towards zero."""
    if np.issubdtype(a.dtype, np.integer):
        return np.trunc(np.true_divide(a, b)).astype(a.dtype)
    return np.true_divide(a, b)


def cast(node: Node, values: Values) -> Arrays:
    """Conversion of elements."""
    with np.errstate(all="ignore"):
        return [data(values).astype(cast_dtype(node))]


def where(_node: Node, values: Values) -> Arrays:
    """Choice between two arrays."""
    return [np.where(*(stand_in(value) for value in values if value is not None))]


def matmul(_node: Node, values: Values) -> Arrays:
    """Product of constant matrices."""
    return [np.matmul(data(values), stand_in(operand(values, 1)))]


def constant(node: Node, _values: Values) -> Arrays:
    """A Constant node's value, whichever attribute holds it.

    Raises:
        ValueError: The value is of a kind that is not a dense tensor or numbers.
    """
    given = {key: value for key, value in node.attrs.items() if value is not None}
    if len(given) != 1:
        raise ValueError("a Constant has exactly one value")
    ((key, value),) = given.items()
    match key:
        case "value":
            return [np.asarray(onnx.numpy_helper.to_array(value))]
        case "value_float" | "value_floats":
            return [np.asarray(value, np.float32)]
        case _:
            return [np.asarray(value, np.int64)]


def constant_of_shape(node: Node, values: Values) -> Arrays:
    """An array filled with one number."""
    given = node.attrs["value"]
    fill = np.zeros(1, np.float32) if given is None else onnx.numpy_helper.to_array(given)
    return [np.broadcast_to(fill.reshape(()), integers(values, 0))]


def shape(node: Node, values: Values) -> Arrays:
    """Sizes of an operand's axes."""
    sizes = operand(values, 0).shape
    return [np.array(sizes[slice(node.attrs["start"], node.attrs["end"])], np.int64)]


def size(_node: Node, values: Values) -> Arrays:
    """Number of elements of an operand."""
    return [np.array(np.prod(operand(values, 0).shape, dtype=np.int64))]


def arange_shape(values: Values) -> tuple[int, ...]:
    """Return how many numbers a Range has."""
    start, limit, delta = (required(values, at).reshape(()) for at in range(3))
    return (max(0, int(np.ceil((limit - start) / delta))),)


def arange(_node: Node, values: Values) -> Arrays:
    """Range with known bounds."""
    start, _, delta = (required(values, at).reshape(()) for at in range(3))
    return [(start + np.arange(*arange_shape(values)) * delta).astype(start.dtype)]


def identity(_node: Node, values: Values) -> Arrays:
    """The operand itself."""
    return [data(values)]


def reshape(node: Node, values: Values) -> Arrays:
    """Reshape with 0 = keep (unless `allowzero`) and -1 = the rest."""
    x, sizes = data(values), integers(values, 1)
    if not node.attrs["allowzero"]:
        sizes = [x.shape[i] if s == 0 and i < x.ndim else s for i, s in enumerate(sizes)]
    return [x.reshape(sizes)]


def flatten(node: Node, values: Values) -> Arrays:
    """Two axes: before and from `axis`."""
    x = data(values)
    axis = int(node.attrs["axis"]) % (x.ndim + 1) if node.attrs["axis"] else 0
    return [x.reshape(int(np.prod(x.shape[:axis], dtype=np.int64)), -1)]


def transpose(node: Node, values: Values) -> Arrays:
    """Axes in another order, reversed by default."""
    return [data(values).transpose(node.attrs["perm"])]


def _axes(node: Node, values: Values) -> list[int] | None:
    """Return the axes of operand 1, or of the attribute as old operator sets have it."""
    if len(values) > 1 and values[1] is not None:
        return integers(values, 1)
    axes: list[int] | None = node.attrs["axes"]
    return axes


def squeeze(node: Node, values: Values) -> Arrays:
    """Axes of size one dropped."""
    x, axes = data(values), _axes(node, values)
    if axes is None:
        return [x.squeeze()]
    return [x.squeeze(tuple(axis_of(a, x.ndim) for a in axes))]


def unsqueeze(node: Node, values: Values) -> Arrays:
    """Axes of size one added; numbers refer to the result."""
    x, axes = data(values), _axes(node, values)
    if axes is None:
        raise ValueError("its axes are missing")
    rank = x.ndim + len(axes)
    return [np.expand_dims(x, tuple(axis_of(a, rank) for a in axes))]


def expand(_node: Node, values: Values) -> Arrays:
    """Two-way broadcast to a shape."""
    return [np.broadcast_to(data(values), expand_shape(values))]


def expand_shape(values: Values) -> tuple[int, ...]:
    """Return the sizes of an expanded tensor."""
    return np.broadcast_shapes(operand(values, 0).shape, tuple(integers(values, 1)))


def concat(node: Node, values: Values) -> Arrays:
    """Operands joined along an axis."""
    arrays = [stand_in(value) for value in values if value is not None]
    return [np.concatenate(arrays, axis=int(node.attrs["axis"]))]


def slices(_node: Node, values: Values) -> list[slice]:
    """Return one Python slice per axis of the operand of a Slice node."""
    x = operand(values, 0)
    starts, ends = integers(values, 1), integers(values, 2)
    given_axes, given_steps = known(values, 3), known(values, 4)
    axes = range(len(starts)) if given_axes is None else [int(a) for a in given_axes]
    steps = [1] * len(starts) if given_steps is None else [int(s) for s in given_steps]
    result = [slice(None)] * len(x.shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        at = axis_of(axis, len(x.shape))
        before_front = step < 0 and end < -x.shape[at]
        result[at] = slice(*slice(start, None if before_front else end, step).indices(x.shape[at]))
        if step < 0 and result[at].stop < 0:
            result[at] = slice(result[at].start, None, step)
    return result


def slice_(_node: Node, values: Values) -> Arrays:
    """Slices of several axes."""
    return [data(values)[tuple(slices(_node, values))]]


def split_sizes(node: Node, values: Values) -> list[int]:
    """Return the sizes of a Split's results."""
    x = operand(values, 0)
    total = x.shape[axis_of(node.attrs["axis"], len(x.shape))]
    if len(values) > 1 and values[1] is not None:
        return integers(values, 1)
    if node.attrs["split"]:
        return list(node.attrs["split"])
    count = len(node.outputs)
    chunk = -(-total // count)
    return [min(chunk, total - i * chunk) for i in range(count)]


def split(node: Node, values: Values) -> Arrays:
    """Consecutive parts of one axis."""
    sizes = split_sizes(node, values)
    ends = np.cumsum(sizes)
    x = data(values)
    if ends[-1] != x.shape[int(node.attrs["axis"])] or min(sizes) < 0:
        raise ValueError(f"parts {sizes} do not add up")
    return list(np.split(x, ends[:-1], axis=int(node.attrs["axis"])))


def gather(node: Node, values: Values) -> Arrays:
    """Slices of one axis by index."""
    return [np.take(data(values), stand_in(operand(values, 1)), axis=int(node.attrs["axis"]))]


def gather_nd(node: Node, values: Values) -> Arrays:
    """Slices by tuples of indices, per batch entry."""
    x, index = data(values), stand_in(operand(values, 1))
    batches = int(node.attrs["batch_dims"])
    if batches == 0:
        return [x[tuple(np.moveaxis(index, -1, 0))]]
    pairs = [
        gather_nd(_with_batches(node, batches - 1), [Known(a), Known(b)])[0]
        for a, b in zip(x, index, strict=True)
    ]
    return [np.stack(pairs)]


def _with_batches(node: Node, batches: int) -> Node:
    attrs = {**node.attrs, "batch_dims": batches}
    return Node(node.op, node.name, node.inputs, node.outputs, attrs)


def softmax(node: Node, values: Values) -> Arrays:
    """Softmax along one axis."""
    x, axis = data(values), int(node.attrs["axis"])
    powers = np.exp(x - x.max(axis=axis, keepdims=True))
    return [powers / powers.sum(axis=axis, keepdims=True)]


def topk(node: Node, values: Values) -> Arrays:
    """The k greatest or least along one axis, best first, ties to the lower index."""
    x, axis, (k,) = data(values), int(node.attrs["axis"]), integers(values, 1)
    index = np.argsort(-x if node.attrs["largest"] else x, axis=axis, kind="stable")
    index = np.take(index, np.arange(k), axis=axis)
    return [np.take_along_axis(x, index, axis=axis), index.astype(np.int64)]


def tile(_node: Node, values: Values) -> Arrays:
    """Repetition of whole axes."""
    return [np.tile(data(values), integers(values, 1))]


def dequantize(node: Node, values: Values) -> Arrays:
    """(x - zero point) * scale, one scale per tensor or per slice of `axis`."""
    x, scale = data(values), stand_in(operand(values, 1)).astype(np.float32)
    zero = known(values, 2)
    offset = np.zeros_like(scale) if zero is None else zero.astype(np.float32)
    if scale.ndim > 1 or node.attrs["block_size"]:
        raise ValueError("blocked quantisation")
    if scale.ndim == 1:
        axis = axis_of(node.attrs["axis"], x.ndim)
        around = [1] * x.ndim
        around[axis] = -1
        scale, offset = scale.reshape(around), offset.reshape(around)
    return [(x.astype(np.float32) - offset) * scale]


def one_hot(node: Node, values: Values) -> Arrays:
    """Two values, the second one where the new axis equals the index."""
    index, off_on = data(values), stand_in(operand(values, 2))
    (depth,) = integers(values, 1)
    axis = axis_of(node.attrs["axis"], index.ndim + 1)
    places = np.expand_dims(np.where(index < 0, index + depth, index), axis)
    along = [1] * (index.ndim + 1)
    along[axis] = depth
    return [np.where(places == np.arange(depth).reshape(along), off_on[1], off_on[0])]


ANNOUNCED: Mapping[str, Callable[[Values], tuple[int, ...]]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("BlackmanWindow", "HammingWindow", "HannWindow"),
            lambda values: tuple(integers(values, 0)),
        ),
        "ConstantOfShape": lambda values: tuple(integers(values, 0)),
        "Expand": expand_shape,
        "MelWeightMatrix": lambda v: (integers(v, 1)[0] // 2 + 1, integers(v, 0)[0]),
        "Range": arange_shape,
    }
)
"""What folding would make, for operators without a shape rule that make much of little."""
