"""The reference operations over numpy arrays, in the order of the C templates `ref_*.c.in`.

A geometry is checked here as the kernels check it, before anything is read through it.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from compiler.contract.native_errors import BadIndexError, NativeError
from compiler.contract.operations import Op
from compiler.contract.reference import (
    MapKind,
    PoolKind,
    ReduceKind,
    ScatterKind,
    unpack_geometry,
)
from compiler.kernels.reference import MAPS as MAP_ROWS
from compiler.simulator.reference_maps import MAPS
from compiler.simulator.step import Step

Array = NDArray[Any]
Results = tuple[Array, ...]
Fields = Mapping[str, list[int]]

_LOWEST: Final = -(1 << 31)


def _fields(s: Step, op: Op) -> list[dict[str, list[int]]]:
    return [unpack_geometry(op.name, row) for row in s.constant(0).tolist()]


def _source(s: Step, number: int) -> Array:
    """Return source `number` flat: an input, or minus the position of a weight."""
    found = s.source(number) if number >= 0 else s.constant(-number)
    return np.ascontiguousarray(found).reshape(-1)


def _view(flat: Array, at: int, sizes: Sequence[int], steps: Sequence[int]) -> Array:
    """Return a strided view after checking that it stays inside.

    Raises:
        NativeError: It leaves the operand.
    """
    ends = [(size - 1) * step for size, step in zip(sizes, steps, strict=True)]
    low = at + sum(end for end in ends if end < 0)
    high = at + sum(end for end in ends if end > 0)
    if min(sizes) < 1 or low < 0 or high >= flat.size:
        raise NativeError(f"a geometry reaches [{low}, {high}] of {flat.size} elements")
    strides = [step * flat.itemsize for step in steps]
    return as_strided(flat[at:], sizes, strides, writeable=flat.flags.writeable)


def _move(s: Step) -> Results:
    pieces = _fields(s, Op.REF_MOVE)
    first = _source(s, pieces[0]["x"][0])
    size = s.sizes[0]
    value = np.array(s.number("value"), np.int32)
    fill = value if first.dtype == np.int32 else value.view(np.float32).astype(first.dtype)
    y = np.full(size, fill, first.dtype)
    for p in pieces:
        x = _source(s, p["x"][0])
        target = _view(y, p["y_at"][0], p["sizes"], p["y_steps"])
        target[...] = _view(x, p["x_at"][0], p["sizes"], p["x_steps"])
    return (y,)


def _map(s: Step) -> Results:
    (g,) = _fields(s, Op.REF_MAP)
    kind = MapKind(s.number("kind"))
    operands = []
    for name in "abc"[: len(MAP_ROWS[kind].takes)]:
        flat = _source(s, g[name][0])
        operands.append(_view(flat, g[f"{name}_at"][0], g["sizes"], g[f"{name}_steps"]))
    y = MAPS[kind](*operands, s.params["alpha"], s.params["beta"])
    if MAP_ROWS[kind].gives == "f":
        return (y.astype(s.numerics.dtype).reshape(-1),)
    return (y.astype(np.int32).reshape(-1),)


def _total(x: Array, kind: ReduceKind) -> Array:
    """Return sums or products over the last axis in order; f64 over floats."""
    wide = x.astype(np.float64)
    match kind:
        case ReduceKind.L1:
            wide = np.where(wide < 0, -wide, wide)
        case ReduceKind.L2 | ReduceKind.SUM_SQUARE:
            wide = wide * wide
        case ReduceKind.PROD:
            return np.asarray(np.multiply.accumulate(wide, axis=-1)[..., -1])
        case _:
            pass
    total = np.add.accumulate(wide, axis=-1)[..., -1] + 0.0
    if kind is ReduceKind.MEAN:
        return np.asarray(total / float(x.shape[-1]))
    return np.asarray(np.sqrt(total) if kind is ReduceKind.L2 else total)


def _best(x: Array, kind: ReduceKind) -> Array:
    """Return the place of the extreme along the last axis, first or last of equals."""
    name = kind.name
    is_last = name.endswith("LAST")
    seen = x[..., ::-1] if is_last else x
    at = np.argmax(seen, axis=-1) if "MAX" in name else np.argmin(seen, axis=-1)
    return np.asarray(x.shape[-1] - 1 - at if is_last else at)


def _reduce(s: Step) -> Results:
    (g,) = _fields(s, Op.REF_REDUCE)
    kind = ReduceKind(s.number("kind"))
    flat = _source(s, g["x"][0])
    view = _view(flat, g["x_at"][0], g["sizes"] + g["inner"], g["x_steps"] + g["inner_steps"])
    x = view.reshape(int(np.prod(g["sizes"])), -1)
    if kind in (ReduceKind.MAX, ReduceKind.MIN):
        return (np.take_along_axis(x, _best(x, kind)[:, None], axis=1)[:, 0],)
    if kind >= ReduceKind.ARG_MAX:
        return (_best(x, kind).astype(np.int32),)
    if np.issubdtype(x.dtype, np.floating):
        return (_total(x, kind).astype(x.dtype),)
    wide = x.astype(np.int64)
    if kind is ReduceKind.PROD:
        return (np.multiply.reduce(wide, axis=1).astype(np.int32),)
    total = wide.sum(axis=1).astype(np.int32)
    if kind is ReduceKind.MEAN:
        count = x.shape[1]
        total = (np.sign(total) * (np.abs(total.astype(np.int64)) // count)).astype(np.int32)
    return (total,)


def _contract(s: Step) -> Results:
    (g,) = _fields(s, Op.REF_CONTRACT)
    batch, m, k, n = g["sizes"], g["m"][0], g["k"][0], g["n"][0]
    a_steps = [*g["a_steps"], g["a_m"][0], g["a_k"][0]]
    b_steps = [*g["b_steps"], g["b_k"][0], g["b_n"][0]]
    a = _view(_source(s, g["a"][0]), g["a_at"][0], [*batch, m, k], a_steps)
    b = _view(_source(s, g["b"][0]), g["b_at"][0], [*batch, k, n], b_steps)
    if a.dtype == np.int32:
        return ((a.astype(np.int64) @ b.astype(np.int64)).astype(np.int32).reshape(-1),)
    y = np.zeros((*batch, m, n), a.dtype)
    for at in range(k):
        y += a[..., :, at, None] * b[..., None, at, :]
    return (y.reshape(-1),)


def _windows(x: Array, g: Fields, ky: int, kx: int) -> tuple[Array, Array]:
    """Return, for every output pixel, the element under tap (ky, kx) of planes (..., H, W).

    And, for every output pixel, whether there is one; where not, the element means nothing.
    """
    (out_h,), (out_w,) = g["out_h"], g["out_w"]
    rows = np.arange(out_h) * g["step_h"][0] - g["top"][0] + ky * g["gap_h"][0]
    cols = np.arange(out_w) * g["step_w"][0] - g["left"][0] + kx * g["gap_w"][0]
    inside = ((rows >= 0) & (rows < x.shape[-2]))[:, None] & ((cols >= 0) & (cols < x.shape[-1]))
    taken = x[..., np.clip(rows, 0, x.shape[-2] - 1), :][..., np.clip(cols, 0, x.shape[-1] - 1)]
    return taken, inside


def _start(s: Step, g: Fields, dtype: np.dtype[Any]) -> Array:
    shape = (g["batch"][0], g["filters"][0], g["out_h"][0], g["out_w"][0])
    y = np.zeros(shape, dtype)
    if g["has_bias"][0]:
        y[...] = _source(s, g["bias"][0])[:, None, None]
    return y


def _conv(s: Step) -> Results:
    (g,) = _fields(s, Op.REF_CONV)
    groups, kh, kw = g["groups"][0], g["kh"][0], g["kw"][0]
    image = (g["batch"][0], groups, -1, g["height"][0], g["width"][0])
    x = _source(s, g["x"][0]).reshape(image)
    w = _source(s, g["w"][0]).reshape(groups, -1, x.shape[2], kh, kw)
    y = _start(s, g, x.dtype)
    sums = y.reshape(y.shape[0], groups, -1, *y.shape[2:])
    for d in range(x.shape[2]):
        for ky in range(kh):
            for kx in range(kw):
                taken, inside = _windows(x[:, :, d], g, ky, kx)
                part = taken[:, :, None] * w[None, :, :, d, ky, kx, None, None]
                np.add(sums, part, out=sums, where=inside)
    return (y.reshape(-1),)


def _conv_transpose(s: Step) -> Results:
    (g,) = _fields(s, Op.REF_CONV_TRANSPOSE)
    groups, kh, kw = g["groups"][0], g["kh"][0], g["kw"][0]
    x = _source(s, g["x"][0]).reshape(g["batch"][0], groups, -1, g["height"][0], g["width"][0])
    w = _source(s, g["w"][0]).reshape(groups, x.shape[2], -1, kh, kw)
    y = _start(s, g, x.dtype)
    sums = y.reshape(y.shape[0], groups, -1, *y.shape[2:])
    for d in range(x.shape[2]):
        for ky in range(kh):
            rows, ys = _reached(g, "h", ky, x.shape[3], y.shape[2])
            for kx in range(kw):
                cols, xs = _reached(g, "w", kx, x.shape[4], y.shape[3])
                part = x[:, :, d][:, :, rows][..., cols][:, :, None]
                sums[:, :, :, ys[:, None], xs] += part * w[None, :, d, :, ky, kx, None, None]
    return (y.reshape(-1),)


def _reached(g: Fields, axis: str, tap: int, size: int, out: int) -> tuple[Array, Array]:
    """Return the inputs that a tap carries to an output, and those outputs."""
    pad = g["top" if axis == "h" else "left"][0]
    to = np.arange(size) * g[f"step_{axis}"][0] - pad + tap * g[f"gap_{axis}"][0]
    kept = np.flatnonzero((to >= 0) & (to < out))
    return kept, to[kept]


def _pool(s: Step) -> Results:
    (g,) = _fields(s, Op.REF_POOL)
    kind = PoolKind(s.number("kind"))
    x = _source(s, g["x"][0]).reshape(g["planes"][0], g["height"][0], g["width"][0])
    framed = {
        "height": [x.shape[1] + g["top"][0] + g["bottom"][0]],
        "width": [x.shape[2] + g["left"][0] + g["right"][0]],
    }
    shape = (g["planes"][0], g["out_h"][0], g["out_w"][0])
    best = np.full(shape, -np.inf, x.dtype)
    total, count = np.zeros(shape), np.zeros(shape[1:])
    frame = np.ones((framed["height"][0], framed["width"][0]))
    in_frame = {**g, "top": [0], "left": [0]}
    for ky in range(g["kh"][0]):
        for kx in range(g["kw"][0]):
            v, inside = _windows(x, g, ky, kx)
            best = np.where(inside & (v > best), v, best)
            total = np.where(inside, total + v.astype(np.float64), total)
            counted = inside if kind is PoolKind.AVERAGE else _windows(frame, in_frame, ky, kx)[1]
            count += counted
    y = best if kind is PoolKind.MAX else (total / count).astype(x.dtype)
    return (y.reshape(-1),)


def _resample(s: Step) -> Results:
    (g,) = _fields(s, Op.REF_RESAMPLE)
    x = _source(s, g["x"][0]).reshape(g["outer"][0], g["n"][0], g["inner"][0])
    w = _source(s, g["w"][0]).reshape(g["m"][0], g["taps"][0])
    index = _source(s, g["index"][0]).reshape(w.shape)
    if (index < 0).any() or (index >= x.shape[1]).any():
        raise NativeError("a resampling table leaves its operand")
    y = np.zeros((x.shape[0], w.shape[0], x.shape[2]), x.dtype)
    for tap in range(w.shape[1]):
        y += w[:, tap, None] * x[:, index[:, tap]]
    return (y.reshape(-1),)


def _places(index: Array, limit: int) -> Array:
    """Return indices counted from the front.

    Raises:
        BadIndexError: One is outside [-limit, limit).
    """
    if ((index < -limit) | (index >= limit)).any():
        raise BadIndexError(f"an index is outside [-{limit}, {limit})")
    return np.where(index < 0, index + limit, index).astype(np.int64)


def _offsets(at: int, sizes: Sequence[int], steps: Sequence[int]) -> Array:
    total = np.full(sizes, at, np.int64)
    for axis, step in enumerate(steps):
        shape = [1] * len(sizes)
        shape[axis] = -1
        total += (np.arange(sizes[axis]) * step).reshape(shape)
    return total


def _gather(s: Step) -> Results:
    (g,) = _fields(s, Op.REF_GATHER)
    x, limit, step = _source(s, g["x"][0]), g["limit"][0], g["step"][0]
    _view(x, g["x_at"][0], [*g["sizes"], limit], [*g["x_steps"], step])
    index = _view(_source(s, g["index"][0]), g["i_at"][0], g["sizes"], g["i_steps"])
    base = _offsets(g["x_at"][0], g["sizes"], g["x_steps"])
    return (x[(base + step * _places(index, limit)).reshape(-1)],)


def _scatter(s: Step) -> Results:
    (g,) = _fields(s, Op.REF_SCATTER)
    y, limit, step = _source(s, g["x"][0]).copy(), g["limit"][0], g["step"][0]
    _view(y, g["y_at"][0], [*g["sizes"], limit], [*g["y_steps"], step])
    index = _view(_source(s, g["index"][0]), g["i_at"][0], g["sizes"], g["i_steps"])
    u = _view(_source(s, g["u"][0]), g["u_at"][0], g["sizes"], g["u_steps"]).reshape(-1)
    base = _offsets(g["y_at"][0], g["sizes"], g["y_steps"])
    at = (base + step * _places(index, limit)).reshape(-1)
    match ScatterKind(s.number("kind")):
        case ScatterKind.SET:
            for place, value in zip(at.tolist(), u, strict=True):
                y[place] = value
        case ScatterKind.ADD:
            np.add.at(y, at, u)
        case ScatterKind.MUL:
            np.multiply.at(y, at, u)
        case ScatterKind.MAX:
            np.maximum.at(y, at, u)
        case ScatterKind.MIN:
            np.minimum.at(y, at, u)
    return (y,)


def _topk(s: Step) -> Results:
    (g,) = _fields(s, Op.REF_TOPK)
    x = _source(s, g["x"][0]).reshape(g["outer"][0], g["n"][0], g["inner"][0])
    ranked = np.where(np.isnan(x), -np.inf, x).astype(np.float64)
    order = np.argsort(-ranked if s.number("largest") else ranked, axis=1, kind="stable")
    index = order[:, : g["k"][0]]
    values = np.take_along_axis(x, index, axis=1)
    return values.reshape(-1), index.astype(np.int32).reshape(-1)


def _scan(s: Step) -> Results:
    (g,) = _fields(s, Op.REF_SCAN)
    x = _source(s, g["x"][0]).reshape(g["outer"][0], g["n"][0], g["inner"][0])
    ordered = x[:, ::-1] if s.number("reverse") else x
    start = np.zeros_like(x[:, :1])
    sums = np.add.accumulate(np.concatenate([start, ordered], axis=1), axis=1, dtype=x.dtype)
    y = sums[:, :-1] if s.number("exclusive") else sums[:, 1:]
    return ((y[:, ::-1] if s.number("reverse") else y).reshape(-1),)


REFERENCE: Final[Mapping[Op, Callable[[Step], Results]]] = MappingProxyType(
    {
        Op.REF_MOVE: _move,
        Op.REF_MAP: _map,
        Op.REF_REDUCE: _reduce,
        Op.REF_CONTRACT: _contract,
        Op.REF_CONV: _conv,
        Op.REF_CONV_TRANSPOSE: _conv_transpose,
        Op.REF_POOL: _pool,
        Op.REF_RESAMPLE: _resample,
        Op.REF_GATHER: _gather,
        Op.REF_SCATTER: _scatter,
        Op.REF_TOPK: _topk,
        Op.REF_SCAN: _scan,
    }
)
