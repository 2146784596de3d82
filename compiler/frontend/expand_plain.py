"""Operators of the default domain that are a few others: one function per operator.

Rows of `expansions.EXPANSIONS` name them. What a node asks beyond what is written here is refused
by name.
"""

import math
from typing import Final

import numpy as np
import onnx
from onnx import helper

from compiler.frontend.writer import Writer

MAX_STEPS: Final = 256
"""Longest axis along which products are written one by one."""
_UNSIGNED: Final = "unsigned integers of more than 8 bits do not fit the 32 bits of a device"


def bitwise_not(w: Writer) -> None:
    """-1 - x of signed integers, the highest - x of unsigned ones."""
    x = w.inputs[0]
    dtype = np.dtype(w.dtype(x))
    top = np.iinfo(dtype).max if dtype.kind == "u" else -1
    w.op("Sub", w.number(top, dtype.name), x, out=w.outputs[0])


def bit_shift(w: Writer) -> None:
    """X * 2^n or x / 2^n of u8 by known amounts."""
    x, by = w.inputs[:2]
    w.need(w.dtype(x) == "uint8", f"elements of type {w.dtype(x)}", _UNSIGNED)
    factors = 1 << w.stored(by, "the amount").astype(np.int64)
    wide = w.op("Cast", x, to=onnx.TensorProto.INT32)
    kind = "Mul" if w.attrs()["direction"] == "LEFT" else "Div"
    made = w.op(kind, wide, w.store(factors.astype(np.int32)))
    w.op("Cast", made, out=w.outputs[0], to=onnx.TensorProto.UINT8)


def cum_prod(w: Writer) -> None:
    """Products of the elements so far, one after the other."""
    x, given = w.inputs[0], w.attrs(exclusive=0, reverse=0)
    axis = w.integers(w.inputs[1], "the axis")[0] % w.rank(x)
    count = w.size(x, axis)
    w.need(count <= MAX_STEPS, f"{count} factors, written out are at most {MAX_STEPS}")
    slices = [w.slice(x, axis, at, at + 1) for at in range(count)]
    slices = slices[::-1] if given["reverse"] else slices
    if given["exclusive"]:
        slices = [w.store(np.ones(w.shape(slices[0]), w.dtype(x))), *slices[:-1]]
    running = slices[:1]
    for part in slices[1:]:
        running.append(w.op("Mul", running[-1], part))
    parts = running[::-1] if given["reverse"] else running
    w.op("Concat", *parts, out=w.outputs[0], axis=axis)


def col2im(w: Writer) -> None:
    """Columns summed back into an image: a transposed convolution with one tap per row."""
    x, given = w.inputs[0], w.attrs(strides=None, pads=None, dilations=None)
    image, block = (w.integers(n, "the size of image and block") for n in w.inputs[1:3])
    axes, taps = len(image), math.prod(block)
    w.need(axes <= 3, f"{axes} spatial axes, computed are at most 3")
    ones, pads = [1] * axes, given["pads"] or [0] * 2 * axes
    strides, gaps = given["strides"] or ones, given["dilations"] or ones
    counts = [
        (n + pads[i] + pads[i + axes] - gaps[i] * (block[i] - 1) - 1) // strides[i] + 1
        for i, n in enumerate(image)
    ]
    batch, rows, _ = w.shape(x)
    columns = w.reshape(x, batch * (rows // taps), taps, *counts)
    over = [
        n + pads[i] + pads[i + axes] - ((counts[i] - 1) * strides[i] + gaps[i] * (block[i] - 1) + 1)
        for i, n in enumerate(image)
    ]
    w.room(taps, taps)
    weight = np.eye(taps, dtype=np.float32).reshape(taps, 1, *block)
    made = w.op(
        *("ConvTranspose", columns, w.store(weight)),
        strides=strides,
        dilations=gaps,
        pads=pads,
        output_padding=over,
    )
    w.reshape(made, batch, rows // taps, *image, out=w.outputs[0])


def compress(w: Writer) -> None:
    """The slices where a known condition holds."""
    x, condition = w.inputs[:2]
    axis = w.attrs(axis=None)["axis"]
    hint = "multiply by the condition instead, so that the result keeps its size"
    array = w.known(condition)
    if array is None:
        raise w.refusal("the size of its result depends on a condition known at run time", hint)
    chosen = np.flatnonzero(array)
    w.need(len(chosen) > 0, "its condition holds nowhere")
    x = w.reshape(x, -1) if axis is None else x
    w.op("Gather", x, w.store(chosen), out=w.outputs[0], axis=axis or 0)


def determinant(w: Writer) -> None:
    """Expansion along the first row, up to 4 x 4."""
    x = w.inputs[0]
    size = w.shape(x)[-1]
    w.need(1 <= size <= 4, f"matrices of {size} x {size}, computed are up to 4 x 4")
    cells = {
        (i, j): w.op("Gather", w.op("Gather", x, w.scalar(i), axis=-2), w.scalar(j), axis=-1)
        for i in range(size)
        for j in range(size)
    }

    def minor(row: int, cols: tuple[int, ...]) -> str:
        if len(cols) == 1:
            return cells[row, cols[0]]
        total = ""
        for at, col in enumerate(cols):
            rest = minor(row + 1, cols[:at] + cols[at + 1 :])
            term = w.op("Mul", cells[row, col], rest)
            total = w.op("Sub" if at % 2 else "Add", total, term) if total else term
        return total

    w.give(minor(0, tuple(range(size))))


def lp_pool(w: Writer) -> None:
    """(sum of |x|^p over a window)^(1/p): an average over the frame times the window's size."""
    given = w.attrs(p=2)
    p = int(given.pop("p"))
    window = [int(n) for n in given["kernel_shape"]]
    dilated = any(n != 1 for n in given.get("dilations", []))
    w.need(not given.get("ceil_mode") and not dilated, "windows rounded up, or with gaps")
    given = {key: value for key, value in given.items() if key not in ("dilations", "ceil_mode")}
    powers = _powers(w, w.inputs[0], p)
    mean = w.op("AveragePool", powers, count_include_pad=1, **given)
    total = w.op("Mul", mean, w.number(float(math.prod(window))))
    _root(w, total, p)


def global_lp_pool(w: Writer) -> None:
    """(sum of |x|^p over all spatial axes)^(1/p)."""
    x, p = w.inputs[0], int(w.attrs(p=2)["p"])
    axes = w.ints(*range(2, w.rank(x)))
    _root(w, w.op("ReduceSum", _powers(w, x, p), axes, keepdims=1), p)


def _powers(w: Writer, x: str, p: int) -> str:
    size = w.op("Abs", x)
    return size if p == 1 else w.op("Pow", size, w.number(float(p)))


def _root(w: Writer, x: str, p: int) -> None:
    if p == 1:
        w.give(x)
    elif p == 2:
        w.op("Sqrt", x, out=w.outputs[0])
    else:
        w.op("Pow", x, w.number(1.0 / p), out=w.outputs[0])


def max_unpool(w: Writer) -> None:
    """Zeros, and each element where its index says."""
    x, index, wanted = w.inputs[:3]
    given = w.attrs(strides=None, pads=None)
    shape, window = w.shape(x), given["kernel_shape"]
    axes = len(window)
    pads, strides = given["pads"] or [0] * 2 * axes, given["strides"] or [1] * axes
    spatial = [
        (shape[2 + i] - 1) * strides[i] + window[i] - pads[i] - pads[i + axes] for i in range(axes)
    ]
    out = w.integers(wanted, "the size of the result") if wanted else [*shape[:2], *spatial]
    w.need(list(out[2:]) == spatial, "indices of an image of another size")
    w.room(*out)
    zeros = w.store(np.zeros(math.prod(out), np.float32))
    flat = w.op("ScatterElements", zeros, w.reshape(index, -1), w.reshape(x, -1), axis=0)
    w.reshape(flat, *out, out=w.outputs[0])


def tensor_scatter(w: Writer) -> None:
    """Rows written into a cache from an index on, per batch."""
    cache, update, index = w.inputs[:3]
    given = w.attrs(axis=-2, mode="linear")
    shape, rows = w.shape(cache), w.shape(update)
    axis = given["axis"] % len(shape)
    place = w.store(np.arange(rows[axis], dtype=np.int64))
    if index:
        place = w.op("Add", w.reshape(index, -1, 1), place)
    else:
        place = w.op("Expand", place, w.ints(shape[0], rows[axis]))
    if given["mode"] == "circular":
        place = w.op("Mod", place, w.scalar(shape[axis]))
    around = [n if at in (0, axis) else 1 for at, n in enumerate(rows)]
    spread = w.op("Expand", w.reshape(place, *around), w.ints(*rows))
    w.op("ScatterElements", cache, spread, update, out=w.outputs[0], axis=axis)


def eye_like(w: Writer) -> None:
    """Ones on a diagonal of a known shape."""
    given = w.attrs(k=0, dtype=None)
    rows, cols = w.shape(w.inputs[0])
    w.room(rows, cols)
    dtype = np.dtype(w.dtype(w.inputs[0]))
    if given["dtype"] is not None:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(given["dtype"]))
    w.give(w.store(np.eye(rows, cols, given["k"], dtype=dtype)))


def fourier(w: Writer) -> None:
    """DFT along one axis as a product with cosines and sines; the last axis is real, imaginary."""
    x, length = w.inputs[:2]
    axis_name = w.inputs[2] if w.opset >= 20 else ""
    given = w.attrs(axis=1 if w.opset < 20 else -2, inverse=0, onesided=0)
    axis = w.integers(axis_name, "the axis")[0] if axis_name else int(given["axis"])
    rank, shape = w.rank(x), w.shape(x)
    axis %= rank
    n = w.integers(length, "the length")[0] if length else shape[axis]
    w.need(axis < rank - 1 and not (given["inverse"] and given["onesided"]), "this kind", "")
    w.room(n, n)
    x = _of_length(w, x, axis, n)
    count = n // 2 + 1 if given["onesided"] else n
    angle = 2 * np.pi * (np.outer(np.arange(n), np.arange(count)) % n) / n
    sign, scale = (1.0, 1.0 / n) if given["inverse"] else (-1.0, 1.0)
    perm = [*(at for at in range(rank) if at not in (axis, rank - 1)), rank - 1, axis]
    lines = w.op("Transpose", x, perm=perm)
    cosine, sine = (
        w.op("MatMul", lines, w.store((part * scale).astype(np.float32)))
        for part in (np.cos(angle), sign * np.sin(angle))
    )
    real, imaginary = (w.slice(cosine, rank - 2, 0, 1), w.slice(sine, rank - 2, 0, 1))
    if shape[-1] == 2:
        real = w.op("Sub", real, w.slice(sine, rank - 2, 1, 2))
        imaginary = w.op("Add", imaginary, w.slice(cosine, rank - 2, 1, 2))
    both = w.op("Concat", real, imaginary, axis=rank - 2)
    w.op("Transpose", both, out=w.outputs[0], perm=[perm.index(at) for at in range(rank)])


def short_time_fourier(w: Writer) -> None:
    """STFT: overlapping frames of a signal, times a window, as products with cosines and sines."""
    x, step, window, length = w.inputs[:4]
    onesided = w.attrs(onesided=1)["onesided"]
    batch, count, *parts = w.shape(x)
    w.need(parts in ([], [1]), "a complex signal", "write it as Conv with cosines and sines")
    n = w.shape(window)[0] if window else w.integers(length, "the length of a frame")[0]
    hop = w.integers(step, "the step")[0]
    frames = (count - n) // hop + 1
    w.room(n, n)
    w.room(frames, n)
    places = np.arange(frames)[:, None] * hop + np.arange(n)
    rows = w.op("Gather", w.reshape(x, batch, count), w.store(places.astype(np.int64)), axis=1)
    rows = w.op("Mul", rows, window) if window else rows
    bins = n // 2 + 1 if onesided else n
    angle = 2 * np.pi * (np.outer(np.arange(n), np.arange(bins)) % n) / n
    both = [w.store(part.astype(np.float32)) for part in (np.cos(angle), -np.sin(angle))]
    columns = [w.op("Unsqueeze", w.op("MatMul", rows, part), w.ints(3)) for part in both]
    w.op("Concat", *columns, out=w.outputs[0], axis=3)


def _of_length(w: Writer, x: str, axis: int, n: int) -> str:
    size = w.shape(x)[axis]
    if size >= n:
        return x if size == n else w.slice(x, axis, 0, n)
    ends = [0] * 2 * w.rank(x)
    ends[w.rank(x) + axis] = n - size
    return w.op("Pad", x, w.ints(*ends))
