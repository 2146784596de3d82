"""Launches of ATTENTION: keys and values to where they are read, then every row of every head."""

from dataclasses import dataclass
from typing import Final

from compiler.contract.plan import PlanCall
from compiler.emitters.opencl.device import Operand
from compiler.emitters.opencl.frame import Frame

_FLOAT: Final = 4
_CODE: Final = 2
"""Bytes of a query's element as a code."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Columns of an operand, one of q, k and v; `scales` where they are codes of the cache."""

    at: Operand
    stride: int
    rows: int
    scales: Operand | None = None


def _blocks(f: Frame, call: PlanCall, widths: tuple[int, ...]) -> list[_Block]:
    """Return the next columns of the operands 0 to 2, which hold q, k and v side by side."""
    found, operand, column = [], 0, 0
    for width in widths:
        view = f.required(call, operand)
        if column == view.cols:
            operand, column = operand + 1, 0
            view = f.required(call, operand)
        found.append(_Block(view.at.after(column * _FLOAT), view.cols, view.rows))
        column += width
    return found


def attention(f: Frame, call: PlanCall) -> None:
    """Launch ATTENTION: keys and values to where they are read, then every row of every head."""
    p = {name: int(value) for name, value in call.params.items() if name != "scale"}
    keys, queries = p["kv_heads"] or p["heads"], 0 if p["append_only"] else p["heads"]
    present = [view.cols for at in range(3) if (view := f.input(call, at)) is not None]
    width = sum(present) // (queries + 2 * keys)
    widths = (queries * width, keys * width, keys * width)
    *asked, k, v = _blocks(f, call, widths if queries else widths[1:])
    rows, cached = f.required(call, 0).rows, p["kv_layer"] >= 0
    placed = _place_keys(f, call, (k, v), (rows, keys, width))
    if not queries:
        return
    k, v = placed
    past, capacity = (f.cache.length, f.cache.capacity) if cached else (0, k.rows)
    tables = _tables(f, call)
    f.device.launch(
        "run_attention" if k.scales is None else "run_attention_codes",
        (queries, rows),
        *(block.at for block in (*asked, k, v)),
        *tables.operands,
        f.device.space("scores", queries * rows * capacity * _FLOAT),
        f.device.space("query", queries * rows * width * _FLOAT),
        f.output(call).at,
        *_scales(f, k, v, queries * rows * width),
        *(block.stride for block in (*asked, k, v)),
        *(queries, keys, width, past, k.rows, capacity, p["window"], p["sink"], tables.rows),
        cached or p["causal"],
        tables.rows > 0,
        float(call.params["scale"]),
    )


def _scales(f: Frame, k: _Block, v: _Block, elements: int) -> tuple[Operand, ...]:
    """Return what a launch over codes needs besides: scales, and room for the query's codes."""
    if k.scales is None or v.scales is None:
        return ()
    return (k.scales, v.scales, f.device.space("query codes", elements * _CODE))


@dataclass(frozen=True, slots=True)
class _Tables:
    """Positions, cosines and sines of a rotation; 0 rows = none."""

    operands: tuple[Operand, Operand, Operand]
    rows: int


def _tables(f: Frame, call: PlanCall) -> _Tables:
    cosines, sines = f.weight(call, 0), f.weight(call, 1)
    if cosines is None:
        return _Tables((f.none, f.none, f.none), 0)
    places = f.required(call, 3).at, f.constant(cosines), f.constant(sines)
    return _Tables(places, f.plan.weights[cosines].rows)


def _place_keys(
    f: Frame, call: PlanCall, blocks: tuple[_Block, _Block], shape: tuple[int, int, int]
) -> tuple[_Block, _Block]:
    """Append keys and values to the cache, or rotate keys, or leave both where they are."""
    (k, v), (rows, heads, width) = blocks, shape
    layer, sink = int(call.params["kv_layer"]), int(call.params["sink"])
    tables, cols, cached = _tables(f, call), heads * width, int(call.params["kv_layer"]) >= 0
    copied = cached and not f.cache.is_coded
    if copied:
        (keys, _), (values, _) = f.cache.half(layer, 0), f.cache.half(layer, 1)
    else:
        keys, values = f.device.space("keys", rows * cols * _FLOAT), f.none
    if copied or tables.rows:
        f.device.launch(
            "run_keys",
            (rows,),
            k.at,
            v.at,
            *tables.operands,
            keys,
            values,
            f.status,
            *(k.stride, v.stride, heads, width, f.cache.length, f.cache.capacity, sink),
            tables.rows,
            copied,
            tables.rows > 0,
        )
        k = _Block(keys, cols, k.rows)
    if copied:
        return k, _Block(values, cols, v.rows)
    if cached:
        return _coded(f, call, (k, v), shape)
    return k, v


def _coded(
    f: Frame, call: PlanCall, blocks: tuple[_Block, _Block], shape: tuple[int, int, int]
) -> tuple[_Block, _Block]:
    """Append keys and values to a cache of codes; return where its layer lies."""
    rows, heads, width = shape
    layer, sink = int(call.params["kv_layer"]), int(call.params["sink"])
    found = []
    for which, block in enumerate(blocks):
        codes, scales = f.cache.half(layer, which)
        sizes = (block.stride, heads, width, f.cache.length, f.cache.capacity, sink)
        size = (heads, rows)
        f.device.launch("run_codes", size, block.at, codes, scales, f.status, *sizes)
        found.append(_Block(codes, heads * width, block.rows, scales))
    return found[0], found[1]
