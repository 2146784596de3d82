"""Reference rows of operators that pick, place and repeat elements."""

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Final

import numpy as np

from compiler.contract.operations import Op
from compiler.contract.reference import MapKind, ScatterKind
from compiler.dialects.sp import OnnxOp
from compiler.passes.match import attr
from compiler.passes.reference_calls import Fields, ReferenceCalls, View, merged, steps_of
from compiler.passes.reference_rows import Row, fixed, integer, operands

_K: Final = MapKind


def gathered(r: ReferenceCalls, x: View, index: View, axis: int) -> View:
    """Return slices of one axis by index."""
    shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    zeros = (0,) * len(index.shape)
    x_steps = (*x.steps[:axis], *zeros, *x.steps[axis + 1 :])
    after = (0,) * (len(x.shape) - axis - 1)
    i_steps = ((0,) * axis) + index.steps + after
    return _gather_call(r, x, index, shape, x_steps, i_steps, axis)


def _gather_call(
    r: ReferenceCalls,
    x: View,
    index: View,
    shape: Sequence[int],
    x_steps: Sequence[int],
    i_steps: Sequence[int],
    axis: int,
) -> View:
    sizes, (xs, indices, _) = merged(shape, [x_steps, i_steps, steps_of(shape)])
    fields: Fields = {
        "limit": x.shape[axis],
        "step": x.steps[axis],
        "x_at": x.at,
        "i_at": index.at,
        "sizes": sizes,
        "x_steps": xs,
        "i_steps": indices,
    }
    return r.indexed(Op.REF_GATHER, fields, {"x": x, "index": index}, (tuple(shape), x.kind))


def _gather(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, index = operands(op, r)
    return [gathered(r, x, index, integer(op, "axis"))]


def _gather_elements(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    (x, index), axis = operands(op, r), integer(op, "axis")
    x_steps = tuple(0 if at == axis else step for at, step in enumerate(x.steps))
    return [_gather_call(r, x, index, index.shape, x_steps, index.steps, axis)]


def _flat_index(r: ReferenceCalls, index: View, sizes: Sequence[int]) -> View:
    """Return tuples of indices (..., n) as one index (...) into axes of `sizes`, row-major."""
    limits = r.constant(np.asarray(sizes, np.int32))
    below = r.map(_K.LESS_I, index, r.scalar(0, "i"))
    index = r.map(_K.ADD_I, index, r.map(_K.MUL_I, below, limits))
    factors = r.constant(np.asarray(steps_of(sizes), np.int32).reshape(-1, 1))
    rows = r.reshaped(index, (index.size // len(sizes), len(sizes)))
    return r.reshaped(r.contract(rows, factors), index.shape[:-1])


def _gather_nd(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    (x, index), batch = operands(op, r), integer(op, "batch_dims")
    depth = index.shape[-1]
    head, picked, rest = x.shape[:batch], x.shape[batch : batch + depth], x.shape[batch + depth :]
    flat = _flat_index(r, index, picked)
    grouped = r.reshaped(x, (prod(head), prod(picked), prod(rest)))
    flat = r.reshaped(flat, (prod(head), flat.size // prod(head)))
    shape = (prod(head), flat.shape[1], prod(rest))
    x_steps = (grouped.steps[0], 0, grouped.steps[2])
    i_steps = (*flat.steps, 0)
    made = _gather_call(r, grouped, flat, shape, x_steps, i_steps, 1)
    return [r.reshaped(made, (*index.shape[:-1], *rest))]


def _scatter_kind(op: OnnxOp) -> dict[str, int]:
    names = {"add": ScatterKind.ADD, "mul": ScatterKind.MUL}
    names |= {"max": ScatterKind.MAX, "min": ScatterKind.MIN}
    return {"kind": int(names.get(str(attr(op, "reduction")), ScatterKind.SET))}


def _scatter_elements(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    (x, index, u), axis = operands(op, r), integer(op, "axis")
    whole = steps_of(x.shape)
    y_steps = tuple(0 if at == axis else step for at, step in enumerate(whole))
    sizes, (ys, indices, us, _) = merged(
        index.shape, [y_steps, index.steps, u.steps, steps_of(index.shape)]
    )
    fields: Fields = {
        "limit": x.shape[axis],
        "step": whole[axis],
        "y_at": 0,
        "i_at": index.at,
        "u_at": u.at,
        "sizes": sizes,
        "y_steps": ys,
        "i_steps": indices,
        "u_steps": us,
    }
    named = {"x": r.ordered(x), "index": index, "u": u}
    return [r.indexed(Op.REF_SCATTER, fields, named, (x.shape, x.kind), _scatter_kind(op))]


def _scatter_nd(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, index, u = operands(op, r)
    depth = index.shape[-1]
    picked, rest = x.shape[:depth], x.shape[depth:]
    flat = _flat_index(r, index, picked)
    flat = r.reshaped(flat, (flat.size, 1))
    updates = r.reshaped(u, (flat.size, prod(rest)))
    fields: Fields = {
        "limit": prod(picked),
        "step": prod(rest),
        "y_at": 0,
        "i_at": flat.at,
        "u_at": updates.at,
        "sizes": [flat.size, prod(rest)],
        "y_steps": [0, 1],
        "i_steps": [flat.steps[0], 0],
        "u_steps": list(updates.steps),
    }
    named = {"x": r.ordered(x), "index": flat, "u": updates}
    return [r.indexed(Op.REF_SCATTER, fields, named, (x.shape, x.kind), _scatter_kind(op))]


def _around(x: View, axis: int) -> dict[str, int]:
    return {
        "outer": prod(x.shape[:axis]),
        "n": x.shape[axis],
        "inner": prod(x.shape[axis + 1 :]),
    }


def _topk(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, axis = operands(op, r)[0], integer(op, "axis")
    shape = r.shape(op.outputs[0])
    fields = {**_around(x, axis), "k": shape[axis]}
    results = [(shape, x.kind), (shape, "i")]
    params = {"largest": integer(op, "largest", 1)}
    return r.flat(Op.REF_TOPK, {"x": x}, fields, results, params)


def _cumsum(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, axis = operands(op, r)[0], fixed(op, r, 1)
    assert axis is not None
    fields = _around(x, int(axis.reshape(-1)[0]) % len(x.shape))
    params = {"exclusive": integer(op, "exclusive"), "reverse": integer(op, "reverse")}
    return r.flat(Op.REF_SCAN, {"x": x}, fields, [(x.shape, x.kind)], params)


def _one_hot(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    (index, values), shape, axis = operands(op, r), r.shape(op.outputs[0]), integer(op, "axis")
    count = shape[axis]
    if index.kind == "f":
        index = r.map(_K.TO_INT, index)
    index = r.map(_K.MOD_I, index, r.scalar(count, "i"))
    spread = r.reshaped(index, (*index.shape[:axis], 1, *index.shape[axis:]))
    ramp = r.constant(np.arange(count).reshape(-1, *[1] * (len(shape) - axis - 1)))
    hit = r.map(_K.EQUAL_I, spread, ramp)
    off, on = (r.reshaped(values.sliced(0, at, 1), ()) for at in (0, 1))
    return [r.map(_K.WHERE if values.kind == "f" else _K.WHERE_I, hit, on, off)]


def _pad(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, mode = operands(op, r)[0], attr(op, "mode")
    shape = r.shape(op.outputs[0])
    amounts, axes = fixed(op, r, 1), fixed(op, r, 3)
    assert amounts is not None
    rank = len(shape)
    which = range(rank) if axes is None else [int(a) % rank for a in axes.reshape(-1)]
    before, after = [0] * rank, [0] * rank
    half = amounts.size // 2
    for axis, low, high in zip(
        which, amounts[:half].tolist(), amounts[half:].tolist(), strict=True
    ):
        before[axis], after[axis] = int(low), int(high)
    if mode == "constant":
        return [_framed(op, r, x, shape, before, after)]
    for axis in range(rank):
        if before[axis] or after[axis]:
            place = np.arange(-before[axis], x.shape[axis] + after[axis])
            index = _outside(str(mode), place, x.shape[axis])
            x = gathered(r, x, r.constant(index.astype(np.int32)), axis)
    return [x]


def _framed(
    op: OnnxOp,
    r: ReferenceCalls,
    x: View,
    shape: tuple[int, ...],
    before: list[int],
    after: list[int],
) -> View:
    value = fixed(op, r, 2)
    fill = 0.0 if value is None or not value.size else float(value.reshape(-1)[0])
    for axis, (low, high) in enumerate(zip(before, after, strict=True)):
        cut = x.shape[axis] + min(low, 0) + min(high, 0)
        x = x.sliced(axis, max(-low, 0), cut)
    return r.moved(shape, [(x, [max(low, 0) for low in before])], fill)


def _outside(mode: str, place: np.ndarray, size: int) -> np.ndarray:
    """Return which element of an axis stands at each place of the padded axis."""
    if mode == "edge":
        return np.asarray(np.clip(place, 0, size - 1))
    if mode == "wrap":
        return np.asarray(np.mod(place, size))
    period = max(2 * (size - 1), 1)
    folded = np.mod(place, period)
    return np.asarray(np.where(folded < size, folded, period - folded))


def _tile(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, shape = operands(op, r)[0], r.shape(op.outputs[0])
    apart: list[int] = []
    into: list[int] = []
    for size, out in zip(x.shape, shape, strict=True):
        apart += [1, size]
        into += [out // size, size]
    steps: list[int] = []
    for step in x.steps:
        steps += [0, step]
    repeated = View(tuple(into), x.kind, x.matrix, x.array, x.at, tuple(steps))
    return [r.reshaped(repeated, shape)]


def _depth_to_space(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, block = operands(op, r)[0], integer(op, "blocksize", 1)
    n, c, h, w = x.shape
    shape = r.shape(op.outputs[0])
    if op.op.data == "SpaceToDepth":
        split = r.reshaped(x, (n, c, h // block, block, w // block, block))
        return [r.reshaped(split.permuted((0, 3, 5, 1, 2, 4)), shape)]
    if attr(op, "mode") == "CRD":
        split = r.reshaped(x, (n, c // block**2, block, block, h, w))
        return [r.reshaped(split.permuted((0, 1, 4, 2, 5, 3)), shape)]
    split = r.reshaped(x, (n, block, block, c // block**2, h, w))
    return [r.reshaped(split.permuted((0, 3, 4, 1, 5, 2)), shape)]


def _trilu(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, offset = operands(op, r)[0], fixed(op, r, 1)
    k = 0 if offset is None else int(offset.reshape(-1)[0])
    ones = np.ones(x.shape[-2:], np.int32)
    mask = np.triu(ones, k) if integer(op, "upper", 1) else np.tril(ones, k)
    zero = r.scalar(0, x.kind)
    return [r.map(_K.WHERE if x.kind == "f" else _K.WHERE_I, r.constant(mask), x, zero)]


def _reverse_sequence(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    x, lengths = operands(op, r)[0], fixed(op, r, 1)
    time, batch = integer(op, "time_axis"), integer(op, "batch_axis", 1)
    assert lengths is not None
    step = np.arange(x.shape[time])
    index = np.where(step < lengths[:, None], lengths[:, None] - 1 - step, step)
    shape = [1] * len(x.shape)
    shape[time], shape[batch] = x.shape[time], x.shape[batch]
    ordered = index.T if time < batch else index
    spread = r.constant(ordered.reshape(shape).astype(np.int32)).expanded(x.shape)
    x_steps = tuple(0 if at == time else s for at, s in enumerate(x.steps))
    return [_gather_call(r, x, spread, x.shape, x_steps, spread.steps, time)]


PLACES: Final[Mapping[str, Row]] = MappingProxyType(
    {
        "CumSum": _cumsum,
        "DepthToSpace": _depth_to_space,
        "Gather": _gather,
        "GatherElements": _gather_elements,
        "GatherND": _gather_nd,
        "OneHot": _one_hot,
        "Pad": _pad,
        "ReverseSequence": _reverse_sequence,
        "ScatterElements": _scatter_elements,
        "ScatterND": _scatter_nd,
        "SpaceToDepth": _depth_to_space,
        "Tile": _tile,
        "TopK": _topk,
        "Trilu": _trilu,
    }
)
