"""Launches of the reference operations: flat operands, walked as a geometry says.

A geometry is checked here, before every launch, as the kernels in C check it: one that leaves its
operands ends the run with `BAD_PLAN` and reaches nothing. Indices are values; kernels check them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Final

from compiler.contract.native_errors import raise_status
from compiler.contract.operations import Op
from compiler.contract.plan import PlanCall
from compiler.contract.plan_format import DType, Kind, Status
from compiler.contract.reference import (
    MapKind,
    ReduceKind,
    geometry_length,
    layout_of,
    unpack_geometry,
)
from compiler.emitters.opencl.device import Long, Operand
from compiler.emitters.opencl.frame import Frame
from compiler.kernels.reference import MAPS

_MOST: Final = 1 << 40
_WIDEST: Final = 1 << 20
_I32_MAX: Final = (1 << 31) - 1
_WORD: Final = 4
_NOT_OF_I32: Final = (ReduceKind.L1, ReduceKind.L2, ReduceKind.SUM_SQUARE)
"""Kinds of reduction that i32 does not have."""


@dataclass(frozen=True, slots=True)
class _Flat:
    """An operand as one row of f32 or i32."""

    at: Operand
    count: int
    is_int: bool

    def holds(self, at: int, sizes: Sequence[int], steps: Sequence[int]) -> None:
        """Refuse a walk that leaves the operand."""
        _total(sizes)
        ends = [(size - 1) * step for size, step in zip(sizes, steps, strict=True)]
        low, high = (at + sum(pick(0, end) for end in ends) for pick in (min, max))
        _require(low >= 0 and high < self.count and all(abs(end) <= _MOST for end in ends))


@dataclass(frozen=True, slots=True)
class _Geometry:
    """One row of a call's geometry: its fields, and where it lies on the device."""

    fields: Mapping[str, list[int]]
    at: Operand

    def __getitem__(self, name: str) -> int:
        return self.fields[name][0]


def _require(fits: bool) -> None:
    if not fits:
        raise_status(Status.BAD_PLAN, "a geometry")


def _total(sizes: Sequence[int]) -> int:
    """Return how many elements there are; refuse sizes below 1, or more than 2^40 elements."""
    total = prod(sizes)
    _require(min(sizes) >= 1 and total <= _MOST)
    return total


def _geometries(f: Frame, call: PlanCall) -> list[_Geometry]:
    rows, length = f.weights.integers.get(call.weights[0]), geometry_length(call.op.name)
    _require(rows is not None and rows.shape[1] == length)
    assert rows is not None
    base = f.constant(call.weights[0])
    return [
        _Geometry(unpack_geometry(call.op.name, row), base.after(at * length * _WORD))
        for at, row in enumerate(rows.tolist())
    ]


def _source(f: Frame, call: PlanCall, number: int) -> _Flat:
    """Return input `number`, or weight `-number`."""
    if number >= 0:
        view = f.input(call, number)
        _require(view is not None)
        assert view is not None
        dtype = f.plan.buffers[call.inputs[number]].dtype
        _require(dtype in (DType.F32, DType.I32))
        return _Flat(view.at, view.rows * view.cols, dtype is DType.I32)
    weight = f.weight(call, -number)
    _require(weight is not None)
    assert weight is not None
    found = f.plan.weights[weight]
    _require(found.kind in (Kind.F32, Kind.I32))
    return _Flat(f.constant(weight), found.rows * found.cols, found.kind is Kind.I32)


def _result(f: Frame, call: PlanCall, at: int = 0) -> _Flat:
    view, dtype = f.output(call, at), f.plan.buffers[call.outputs[at]].dtype
    _require(dtype in (DType.F32, DType.I32))
    return _Flat(view.at, view.rows * view.cols, dtype is DType.I32)


def _word(flat: _Flat) -> str:
    """Return which rendering of a kernel sums such elements; i32 wraps."""
    return "uint" if flat.is_int else "float"


def _are_apart(sizes: Sequence[int], steps: Sequence[int]) -> bool:
    """Return whether each step of a walk is surely wider than all narrower ones reach."""
    reach = 0
    for step, size in sorted((abs(step), size) for step, size in zip(steps, sizes, strict=True)):
        if size > 1 and step <= reach:
            return False
        reach += (size - 1) * step
    return True


def move(f: Frame, call: PlanCall) -> None:
    """Launch REF_MOVE: perhaps fill, then piece after piece."""
    y, pieces = _result(f, call), _geometries(f, call)
    sources = [_source(f, call, piece["x"]) for piece in pieces]
    for x, g in zip(sources, pieces, strict=True):
        _require(x.is_int == y.is_int)
        x.holds(g["x_at"], g.fields["sizes"], g.fields["x_steps"])
        y.holds(g["y_at"], g.fields["sizes"], g.fields["y_steps"])
    if call.params["fill"]:
        f.device.launch("run_fill", (y.count,), y.at, int(call.params["value"]))
    for x, g in zip(sources, pieces, strict=True):
        count, apart = prod(g.fields["sizes"]), _are_apart(g.fields["sizes"], g.fields["y_steps"])
        size = (count if apart else 1,)
        f.device.launch("run_move", size, g.at, x.at, y.at, Long(count))


def map_(f: Frame, call: PlanCall) -> None:
    """Launch REF_MAP."""
    (g,), y, kind = _geometries(f, call), _result(f, call), int(call.params["kind"])
    _require(kind in set(MapKind))
    row, sizes = MAPS[MapKind(kind)], g.fields["sizes"]
    _require(_total(sizes) == y.count and y.is_int == (row.gives == "i"))
    operands = [f.none] * 3
    for at, letter in enumerate(row.takes):
        name = "abc"[at]
        x = _source(f, call, g[name])
        _require(x.is_int == (letter == "i"))
        x.holds(g[f"{name}_at"], sizes, g.fields[f"{name}_steps"])
        operands[at] = x.at
    scalars = float(call.params["alpha"]), float(call.params["beta"])
    f.device.launch("run_map", (y.count,), g.at, *operands, y.at, kind, *scalars)


def reduce(f: Frame, call: PlanCall) -> None:
    """Launch REF_REDUCE."""
    (g,), y, kind = _geometries(f, call), _result(f, call), ReduceKind(int(call.params["kind"]))
    x, place = _source(f, call, g["x"]), kind >= ReduceKind.ARG_MAX
    outer, inner = g.fields["sizes"], g.fields["inner"]
    count = _total(inner)
    _require(count <= _I32_MAX and _total(outer) == y.count)
    _require(not (x.is_int and kind in _NOT_OF_I32) and y.is_int == (place or x.is_int))
    x.holds(g["x_at"], outer + inner, g.fields["x_steps"] + g.fields["inner_steps"])
    how = (int(kind), count, x.is_int, place)
    f.device.launch("run_reduce", (y.count,), g.at, x.at, y.at, *how)


def contract(f: Frame, call: PlanCall) -> None:
    """Launch REF_CONTRACT."""
    (g,), y = _geometries(f, call), _result(f, call)
    a, b = (_source(f, call, g[name]) for name in "ab")
    batch, m, k, n = g.fields["sizes"], g["m"], g["k"], g["n"]
    _require(a.is_int == b.is_int == y.is_int and _total([*batch, m, n]) == y.count)
    a.holds(g["a_at"], [*batch, m, k], [*g.fields["a_steps"], g["a_m"], g["a_k"]])
    b.holds(g["b_at"], [*batch, k, n], [*g.fields["b_steps"], g["b_k"], g["b_n"]])
    f.device.launch(f"run_contract_{_word(y)}", (y.count,), g.at, a.at, b.at, y.at)


def convolve(f: Frame, call: PlanCall) -> None:
    """Launch REF_CONV or REF_CONV_TRANSPOSE."""
    (g,), y = _geometries(f, call), _result(f, call)
    x, w = _source(f, call, g["x"]), _source(f, call, g["w"])
    transposed = call.op is Op.REF_CONV_TRANSPOSE
    _within(call, g, "batch", None, zero=("top", "left"))
    groups, channels, filters = g["groups"], g["channels"], g["filters"]
    _require(not channels % groups and not filters % groups and x.is_int == w.is_int == y.is_int)
    ends = (channels, filters) if transposed else (filters, channels)
    _require(_total([g["batch"], channels, g["height"], g["width"]]) == x.count)
    _require(_total([g["batch"], filters, g["out_h"], g["out_w"]]) == y.count)
    _require(_total([ends[0], ends[1] // groups, g["kh"], g["kw"]]) == w.count)
    bias = f.none
    if g["has_bias"]:
        found = _source(f, call, g["bias"])
        _require(found.is_int == y.is_int and found.count == filters)
        bias = found.at
    kernel = f"run_convolve_{_word(y)}"
    f.device.launch(kernel, (y.count,), g.at, x.at, w.at, bias, y.at, transposed)


def _within(
    call: PlanCall, g: _Geometry, first: str, end: str | None, zero: tuple[str, ...] = ()
) -> None:
    """Refuse a field from `first` up to `end` outside 1..2^20, or 0..2^20 where it may be zero."""
    names = [name for name, _ in layout_of(call.op.name)]
    for name in names[names.index(first) : names.index(end) if end else None]:
        _require((0 if name in zero else 1) <= g[name] <= _WIDEST)


def pool(f: Frame, call: PlanCall) -> None:
    """Launch REF_POOL."""
    (g,), y = _geometries(f, call), _result(f, call)
    x = _source(f, call, g["x"])
    _within(call, g, "planes", "out_h", zero=("top", "left", "bottom", "right"))
    _require(not x.is_int and not y.is_int)
    _require(_total([g["planes"], g["height"], g["width"]]) == x.count)
    _require(_total([g["planes"], g["out_h"], g["out_w"]]) == y.count)
    f.device.launch("run_pool", (y.count,), g.at, x.at, y.at, int(call.params["kind"]))


def resample(f: Frame, call: PlanCall) -> None:
    """Launch REF_RESAMPLE."""
    (g,), y = _geometries(f, call), _result(f, call)
    x, w, index = (_source(f, call, g[name]) for name in ("x", "w", "index"))
    _require(not x.is_int and not w.is_int and index.is_int and not y.is_int)
    _require(_total([g["outer"], g["n"], g["inner"]]) == x.count)
    _require(_total([g["outer"], g["m"], g["inner"]]) == y.count)
    _require(_total([g["m"], g["taps"]]) == w.count == index.count)
    f.device.launch("run_resample", (y.count,), g.at, x.at, w.at, index.at, y.at, f.status)


def gather(f: Frame, call: PlanCall) -> None:
    """Launch REF_GATHER."""
    (g,), y = _geometries(f, call), _result(f, call)
    x, index, sizes = _source(f, call, g["x"]), _source(f, call, g["index"]), g.fields["sizes"]
    _require(index.is_int and x.is_int == y.is_int and _total(sizes) == y.count)
    x.holds(g["x_at"], [*sizes, g["limit"]], [*g.fields["x_steps"], g["step"]])
    index.holds(g["i_at"], sizes, g.fields["i_steps"])
    f.device.launch("run_gather", (y.count,), g.at, x.at, index.at, y.at, f.status)


def scatter(f: Frame, call: PlanCall) -> None:
    """Launch REF_SCATTER: copy, then the updates one after the other."""
    (g,), y = _geometries(f, call), _result(f, call)
    x, index, u = (_source(f, call, g[name]) for name in ("x", "index", "u"))
    sizes = g.fields["sizes"]
    _require(index.is_int and x.is_int == u.is_int == y.is_int and x.count == y.count)
    y.holds(g["y_at"], [*sizes, g["limit"]], [*g.fields["y_steps"], g["step"]])
    index.holds(g["i_at"], sizes, g.fields["i_steps"])
    u.holds(g["u_at"], sizes, g.fields["u_steps"])
    f.device.launch("run_words", (y.count,), x.at, y.at)
    operands = (g.at, index.at, u.at, y.at, f.status, Long(prod(sizes)))
    kernel = f"run_scatter_{'int' if y.is_int else 'float'}"
    f.device.launch(kernel, (1,), *operands, int(call.params["kind"]))


def topk(f: Frame, call: PlanCall) -> None:
    """Launch REF_TOPK."""
    (g,), y, index = _geometries(f, call), _result(f, call), _result(f, call, 1)
    x, outer, n, inner, k = _source(f, call, g["x"]), g["outer"], g["n"], g["inner"], g["k"]
    _require(x.is_int == y.is_int and index.is_int and k <= n)
    _require(_total([outer, n, inner]) == x.count)
    _require(_total([outer, k, inner]) == y.count == index.count)
    how = (n, inner, k, x.is_int, int(call.params["largest"]))
    f.device.launch("run_topk", (outer * inner,), x.at, y.at, index.at, *how)


def scan(f: Frame, call: PlanCall) -> None:
    """Launch REF_SCAN."""
    (g,), y = _geometries(f, call), _result(f, call)
    x, outer, n, inner = _source(f, call, g["x"]), g["outer"], g["n"], g["inner"]
    _require(x.is_int == y.is_int and _total([outer, n, inner]) == x.count == y.count)
    how = (n, inner, int(call.params["exclusive"]), int(call.params["reverse"]))
    f.device.launch(f"run_scan_{_word(y)}", (outer * inner,), x.at, y.at, *how)


LAUNCHERS: Final[Mapping[Op, Callable[[Frame, PlanCall], None]]] = MappingProxyType(
    {
        Op.REF_MOVE: move,
        Op.REF_MAP: map_,
        Op.REF_REDUCE: reduce,
        Op.REF_CONTRACT: contract,
        Op.REF_CONV: convolve,
        Op.REF_CONV_TRANSPOSE: convolve,
        Op.REF_POOL: pool,
        Op.REF_RESAMPLE: resample,
        Op.REF_GATHER: gather,
        Op.REF_SCATTER: scatter,
        Op.REF_TOPK: topk,
        Op.REF_SCAN: scan,
    }
)
