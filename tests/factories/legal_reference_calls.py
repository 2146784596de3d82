"""Random legal calls of the operations on flat operands: their geometries stay inside."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from compiler.contract.reference import (
    MapKind,
    PoolKind,
    ReduceKind,
    ScatterKind,
    pack_geometry,
)
from compiler.kernels.program import Op
from compiler.kernels.reference import MAPS
from tests.factories.draws import (
    BAD_INDEX_SHARE,
    Array,
    Draw,
    Fill,
    Generator,
    floats,
    ints,
    positive,
)

Fields = dict[str, int | Sequence[int]]
WHOLE_I32: Final = ints(-(1 << 31), 1 << 31)
_FLOAT_KINDS: Final = (ReduceKind.L1, ReduceKind.L2, ReduceKind.SUM_SQUARE)


def _within(low: float, high: float) -> Fill:
    return lambda rng, rows, cols: rng.uniform(low, high, (rows, cols)).astype(np.float32)


_DOMAINS: Final[Mapping[MapKind, tuple[Fill, ...]]] = MappingProxyType(
    {
        MapKind.SQRT: (positive(0.0),),
        MapKind.RECIPROCAL: (positive(),),
        MapKind.LOG: (positive(),),
        MapKind.ASIN: (_within(-1, 1),),
        MapKind.ACOS: (_within(-1, 1),),
        MapKind.ACOSH: (positive(1.0),),
        MapKind.ATANH: (_within(-0.99, 0.99),),
        MapKind.TAN: (_within(-1.5, 1.5),),
        MapKind.DIV: (floats, positive()),
        MapKind.POW: (positive(), _within(-3, 3)),
        MapKind.FMOD: (floats, positive()),
        MapKind.QUANTISE: (floats, positive(), ints(-200, 200)),
    }
)
"""What fills the operands of functions that are not defined everywhere."""


def sizes_of(d: Draw, most: int = 4) -> list[int]:
    """Return up to `most` sizes, each small."""
    return [d.size(6) for _ in range(d.size(most))]


def source(d: Draw, dtype: str, count: int, fill: Fill | None, more: list[int]) -> int:
    """Add `count` elements as an input or a weight; return their number in geometries."""
    if d.chance(0.7):
        d.x(1, count, dtype, fill)
        return len(d.fills) - 1
    plain = floats if dtype == "f32" else WHOLE_I32
    more.append(d.weight((fill or plain)(d.rng, 1, count), dtype))
    return -len(more)


def strides(d: Draw, sizes: Sequence[int], repeats: bool = True) -> tuple[int, list[int], int]:
    """Return start, steps and elements of an operand read in any order, with gaps and repeats."""
    steps, span = [0] * len(sizes), 1
    for axis in d.rng.permutation(len(sizes)):
        if repeats and d.chance(0.2):
            continue
        steps[axis] = span
        span *= sizes[axis] + int(d.chance(0.2))
    at = int(d.rng.integers(3))
    for axis, size in enumerate(sizes):
        if d.chance(0.2):
            at += steps[axis] * (size - 1)
            steps[axis] = -steps[axis]
    reach = sum(abs(step) * (size - 1) for step, size in zip(steps, sizes, strict=True))
    low = at - sum(-step * (size - 1) for step, size in zip(steps, sizes, strict=True) if step < 0)
    return at, steps, low + reach + 1 + int(d.rng.integers(3))


def add(
    d: Draw, op: Op, rows: Sequence[Fields], outputs: list[int], more: list[int], **params: float
) -> None:
    """Add the call; all inputs are its sources."""
    geometry = np.array([pack_geometry(op.name, row) for row in rows], np.int32)
    d.call(op, list(d.fills), outputs, [d.weight(geometry, "i32"), *more], **params)


def _total(sizes: Sequence[int]) -> int:
    return int(np.prod(sizes))


def _move(d: Draw) -> None:
    dtype, fill, more, rows = d.pick(("f32", "i32")), d.chance(), [], []
    sizes = sizes_of(d)
    count = _total(sizes) + (d.size(20) if fill else 0)
    for _ in range(d.size(3)):
        x_at, x_steps, elements = strides(d, sizes)
        number = source(d, dtype, elements, None, more)
        y_at = int(d.rng.integers(count - _total(sizes) + 1))
        y_steps = [_total(sizes[axis + 1 :]) for axis in range(len(sizes))]
        row: Fields = {"x": number, "x_at": x_at, "y_at": y_at}
        rows.append({**row, "sizes": sizes, "x_steps": x_steps, "y_steps": y_steps})
    value = int(d.rng.integers(-(1 << 31), 1 << 31)) if dtype == "i32" else 0
    add(d, Op.REF_MOVE, rows, [d.y(1, count, dtype)], more, fill=int(fill), value=value)


def _map(d: Draw) -> None:
    kind, more = d.pick(MAPS), []
    row, sizes = MAPS[kind], sizes_of(d)
    fields: Fields = {"sizes": sizes}
    for at, name in enumerate("abc"):
        start, steps, elements = strides(d, sizes)
        number = 0
        if at < len(row.takes):
            dtype, domain = {"f": "f32", "i": "i32"}[row.takes[at]], _DOMAINS.get(kind)
            number = source(d, dtype, elements, domain[at] if domain else None, more)
        fields |= {name: number, f"{name}_at": start, f"{name}_steps": steps}
    y = d.y(1, _total(sizes), {"f": "f32", "i": "i32"}[row.gives])
    low, high = (-128.0, 127.0) if kind is MapKind.QUANTISE else (0.3, 0.6)
    add(d, Op.REF_MAP, [fields], [y], more, kind=int(kind), alpha=low, beta=high)


def _reduce(d: Draw) -> None:
    dtype, more = d.pick(("f32", "i32")), []
    kind = d.pick([k for k in ReduceKind if dtype == "f32" or k not in _FLOAT_KINDS])
    outer, inner = sizes_of(d, 3), sizes_of(d, 3)
    at, steps, elements = strides(d, outer + inner)
    fill = _within(-2, 2) if kind is ReduceKind.PROD and dtype == "f32" else None
    fields: Fields = {"x": source(d, dtype, elements, fill, more), "x_at": at}
    fields |= {"sizes": outer, "x_steps": steps[: len(outer)]}
    fields |= {"inner": inner, "inner_steps": steps[len(outer) :]}
    result = "i32" if kind >= ReduceKind.ARG_MAX else dtype
    add(d, Op.REF_REDUCE, [fields], [d.y(1, _total(outer), result)], more, kind=int(kind))


def _contract(d: Draw) -> None:
    dtype, more, batch = d.pick(("f32", "i32")), [], sizes_of(d, 2)
    m, k, n = d.size(20), d.size(40), d.size(40)
    fields: Fields = {"sizes": batch, "m": m, "k": k, "n": n}
    for name, (first, second), shape in (("a", "mk", (m, k)), ("b", "kn", (k, n))):
        at, steps, elements = strides(d, [*batch, *shape])
        fields |= {name: source(d, dtype, elements, None, more), f"{name}_at": at}
        fields |= {f"{name}_steps": steps[:-2]}
        fields |= {f"{name}_{first}": steps[-2], f"{name}_{second}": steps[-1]}
    add(d, Op.REF_CONTRACT, [fields], [d.y(1, _total(batch) * m * n, dtype)], more)


def _window(d: Draw, size: int, transposed: bool) -> tuple[int, int, int, int, int]:
    """Return kernel, step, gap, pad before and outputs along one axis."""
    while True:
        kernel, step, gap = d.size(4), d.size(3), d.size(2)
        span = (kernel - 1) * gap + 1
        before, after = (int(d.rng.integers(span)) for _ in range(2))
        if transposed:
            out = (size - 1) * step - before - after + span + d.size(2) - 1
        else:
            out = (size + before + after - span) // step + 1
        if out >= 1:
            return kernel, step, gap, before, out


def _named(names: str, *values: int) -> Fields:
    return dict(zip(names.split(), values, strict=True))


def _conv(op: Op) -> Generator:
    transposed = op is Op.REF_CONV_TRANSPOSE

    def generate(d: Draw) -> None:
        dtype, more = d.pick(("f32", "i32")), []
        batch, groups, height, width = d.size(2), d.size(3), d.size(9), d.size(9)
        channels, filters = groups * d.size(4), groups * d.size(4)
        kh, sh, gh, top, out_h = _window(d, height, transposed)
        kw, sw, gw, left, out_w = _window(d, width, transposed)
        taps = (filters if not transposed else channels) * kh * kw
        taps *= (channels if not transposed else filters) // groups
        x = source(d, dtype, batch * channels * height * width, None, more)
        w = source(d, dtype, taps, None, more)
        has_bias = int(d.chance())
        bias = source(d, dtype, filters, None, more) if has_bias else 0
        fields: Fields = {
            **_named("x w has_bias bias batch", x, w, has_bias, bias, batch),
            **_named("channels height width filters", channels, height, width, filters),
            **_named("groups kh kw step_h step_w", groups, kh, kw, sh, sw),
            **_named("gap_h gap_w top left out_h out_w", gh, gw, top, left, out_h, out_w),
        }
        add(d, op, [fields], [d.y(1, batch * filters * out_h * out_w, dtype)], more)

    return generate


def _pool(d: Draw) -> None:
    more: list[int] = []
    planes, sizes, kind = d.size(4), (d.size(9), d.size(9)), d.pick(PoolKind)
    fields: Fields = {"planes": planes, "height": sizes[0], "width": sizes[1]}
    out = []
    for size, axis, ends in zip(sizes, "hw", (("top", "bottom"), ("left", "right")), strict=True):
        kernel, step = min(d.size(4), size), d.size(3)
        before, after = (int(d.rng.integers(kernel)) for _ in range(2))
        out.append((size + before + after - kernel) // step + 1)
        fields |= {f"k{axis}": kernel, f"step_{axis}": step, f"gap_{axis}": 1}
        fields |= {ends[0]: before, ends[1]: after, f"out_{axis}": out[-1]}
    fields |= {"x": source(d, "f32", planes * _total(sizes), None, more)}
    add(d, Op.REF_POOL, [fields], [d.y(1, planes * _total(out))], more, kind=int(kind))


def _resample(d: Draw) -> None:
    more: list[int] = []
    outer, n, inner, m, taps = d.size(4), d.size(9), d.size(9), d.size(9), d.size(4)
    fields: Fields = {"outer": outer, "n": n, "inner": inner, "m": m, "taps": taps}
    fields |= {"x": source(d, "f32", outer * n * inner, None, more)}
    fields |= {"w": source(d, "f32", m * taps, None, more)}
    fields |= {"index": source(d, "i32", m * taps, ints(0, n), more)}
    add(d, Op.REF_RESAMPLE, [fields], [d.y(1, outer * m * inner)], more)


def _places(d: Draw, limit: int) -> Fill:
    """Return what fills indices, which may count from the end; now and then one beyond."""
    return ints(-limit, limit + (1 if d.chance(BAD_INDEX_SHARE) else 0))


def _gather(d: Draw) -> None:
    dtype, more, sizes, limit = d.pick(("f32", "i32")), [], sizes_of(d), d.size(9)
    at, steps, elements = strides(d, [*sizes, limit])
    i_at, i_steps, places = strides(d, sizes)
    fields: Fields = {"x": source(d, dtype, elements, None, more)}
    fields |= {"index": source(d, "i32", places, _places(d, limit), more)}
    fields |= {"limit": limit, "step": steps[-1], "x_at": at, "i_at": i_at}
    fields |= {"sizes": sizes, "x_steps": steps[:-1], "i_steps": i_steps}
    add(d, Op.REF_GATHER, [fields], [d.y(1, _total(sizes), dtype)], more)


def _scatter(d: Draw) -> None:
    dtype, more, sizes, limit = d.pick(("f32", "i32")), [], sizes_of(d, 3), d.size(9)
    at, steps, elements = strides(d, [*sizes, limit])
    fields: Fields = {"x": source(d, dtype, elements, None, more), "limit": limit}
    for name, kind, fill in (("i", "i32", _places(d, limit)), ("u", dtype, None)):
        start, walk, count = strides(d, sizes)
        port = "index" if name == "i" else "u"
        fields |= {port: source(d, kind, count, fill, more)}
        fields |= {f"{name}_at": start, f"{name}_steps": walk}
    fields |= {"step": steps[-1], "y_at": at, "sizes": sizes, "y_steps": steps[:-1]}
    kind = d.pick(ScatterKind)
    add(d, Op.REF_SCATTER, [fields], [d.y(1, elements, dtype)], more, kind=int(kind))


def _axis(d: Draw, more: list[int]) -> tuple[Fields, str]:
    dtype, outer, n, inner = d.pick(("f32", "i32")), d.size(5), d.size(20), d.size(5)
    x = source(d, dtype, outer * n * inner, d.pick((None, _ties(dtype))), more)
    return {"x": x, "outer": outer, "n": n, "inner": inner}, dtype


def _ties(dtype: str) -> Fill:
    def fill(rng: np.random.Generator, rows: int, cols: int) -> Array:
        found = rng.integers(-2, 3, (rows, cols))
        return found.astype(np.int32 if dtype == "i32" else np.float32)

    return fill


def _topk(d: Draw) -> None:
    more: list[int] = []
    fields, dtype = _axis(d, more)
    k = int(d.rng.integers(1, int(fields["n"]) + 1))  # type: ignore[call-overload]
    count = int(fields["outer"]) * k * int(fields["inner"])  # type: ignore[call-overload]
    outputs = [d.y(1, count, dtype), d.y(1, count, "i32")]
    add(d, Op.REF_TOPK, [{**fields, "k": k}], outputs, more, largest=int(d.chance()))


def _scan(d: Draw) -> None:
    more: list[int] = []
    fields, dtype = _axis(d, more)
    count = _total([int(fields[name]) for name in ("outer", "n", "inner")])  # type: ignore[call-overload]
    flags = {name: int(d.chance()) for name in ("exclusive", "reverse")}
    add(d, Op.REF_SCAN, [fields], [d.y(1, count, dtype)], more, **flags)


REFERENCE: Final[Mapping[Op, Callable[[Draw], None]]] = MappingProxyType(
    {
        Op.REF_MOVE: _move,
        Op.REF_MAP: _map,
        Op.REF_REDUCE: _reduce,
        Op.REF_CONTRACT: _contract,
        Op.REF_CONV: _conv(Op.REF_CONV),
        Op.REF_CONV_TRANSPOSE: _conv(Op.REF_CONV_TRANSPOSE),
        Op.REF_POOL: _pool,
        Op.REF_RESAMPLE: _resample,
        Op.REF_GATHER: _gather,
        Op.REF_SCATTER: _scatter,
        Op.REF_TOPK: _topk,
        Op.REF_SCAN: _scan,
    }
)
