"""Draw random legal calls: one row of `GENERATORS` per operation, so that none is forgotten.

A generator adds operands and one call that the contract's rules allow; `draw(op, seed)` returns the
module and what fills its inputs. A new operation gets a row here (those on flat operands in
`legal_reference_calls`), which tests hold to all of `Op`.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np

from compiler.analysis.conv_runs import find_runs
from compiler.contract.operations import GATED, LINEARS, RECURRENT_GATES, SIGMOID_ORDERS
from compiler.contract.windows import Window, pad_code
from compiler.kernels.program import (
    ABSENT,
    COLUMNS,
    DENSE,
    TILES,
    UP_ROWS,
    W4_LAYOUTS,
    Act,
    ExpertAct,
    KvCache,
    KvKind,
    NormKind,
    Op,
    PackedKind,
    RecurrentKind,
    RouteOrder,
    UnaryKind,
    validate_module,
)
from tests.factories.draws import (
    BAD_INDEX_SHARE,
    Array,
    Draw,
    Drawn,
    Fill,
    Generator,
    floats,
    positive,
)
from tests.factories.legal_reference_calls import REFERENCE
from tests.factories.w8 import on_grid


def _image_u8(d: Draw) -> None:
    rows, cols = d.size(40), d.size(9)
    d.call(Op.IMAGE_U8, [d.x(1, rows * cols, "u8")], [d.y(rows, cols)], divide=127.5, subtract=0.3)


def _embed(d: Draw) -> None:
    rows, limit, cols = d.rows(), d.size(20), d.size()
    table = _codes(d, limit, cols, (DENSE, "i8"))
    d.call(Op.EMBED, [d.index(rows, limit)], [d.y(rows, cols)], [table])


def _matrix(d: Draw, op: Op, n: int, k: int) -> int:
    if op is Op.LINEAR:
        return d.product(n, k, (*W4_LAYOUTS, COLUMNS))
    if op is Op.LINEAR_W8:
        return d.weight(on_grid(n, k), "w8")
    return _codes(d, n, k, (DENSE, "i8"))


def _codes(d: Draw, n: int, k: int, layouts: tuple[str, ...]) -> int:
    """A matrix as it is, or on a grid per row and stored as codes."""
    layout = d.pick(layouts)
    if layout == DENSE:
        return d.weight(d.normal(n, k, scale=k**-0.5))
    top = 127 if layout == "i8" else 32767
    codes = d.rng.integers(-top, top + 1, (n, k))
    codes[:, 0] = top
    scale = d.rng.uniform(0.5, 1.0, (n, 1)).astype(np.float32) / np.float32(top)
    at = d.weight(codes.astype(np.float32) * scale)
    d.weights[at] = replace(d.weights[at], layout=layout)
    return at


def _linear(op: Op) -> Generator:
    def generate(d: Draw) -> None:
        rows, n, k = d.rows(), d.size(100), d.size(400)
        weight = _matrix(d, op, n, k)
        norm = d.pick((0, 0, NormKind.RMS + 1, NormKind.LAYER + 1))
        weights = [weight, d.maybe(n)]
        if norm:
            weights += [d.vector(k, offset=1.0)]
        if norm == NormKind.LAYER + 1:
            weights += [d.maybe(k)]
        params = {"act": d.pick(Act), "norm": norm, "eps": 10 ** d.rng.uniform(-6, -2)}
        if op is Op.LINEAR and d.chance():
            params["check"] = d.size(14)
        if op is Op.LINEAR_W8 and d.chance(0.3):
            params["x_step"] = 10 ** d.rng.uniform(-4, 0)
        inputs = [d.x(rows, k, fill=d.pick((floats, _few_groups)))]
        inputs += [d.x(rows, n)] if d.chance() else []
        d.call(op, inputs, [d.y(rows, n)], weights, **params)

    return generate


def _few_groups(rng: np.random.Generator, rows: int, cols: int) -> Array:
    return floats(rng, rows, cols) * (rng.random(-(-cols // 32)) < 0.3)[np.arange(cols) // 32]


def _norm(d: Draw) -> None:
    rows, cols, kind = d.rows(), d.size(200), d.pick(NormKind)
    weights = [d.vector(cols, offset=1.0)]
    weights += [d.maybe(cols)] if kind is NormKind.LAYER else []
    d.call(Op.NORM, [d.x(rows, cols)], [d.y(rows, cols)], weights, kind=kind, eps=1e-5)


def _tables(d: Draw, half: int, limit: int) -> list[int]:
    angle = np.arange(limit)[:, None] * 0.3 ** np.arange(half)
    return [d.weight(f(angle).astype(np.float32)) for f in (np.cos, np.sin)]


def _rope(d: Draw) -> None:
    rows, heads, half, limit = d.rows(), d.size(5), d.size(20), d.size(30)
    inputs = [d.x(rows, heads * half * 2), d.index(rows, limit)]
    d.call(Op.ROPE, inputs, [d.y(rows, heads * half * 2)], _tables(d, half, limit), heads=heads)


def _attention(d: Draw) -> None:
    rows, groups, width = d.rows(), d.size(4), 2 * d.size(20)
    heads = groups * d.size(3)
    params = {"heads": heads, "kv_heads": groups, "scale": width**-0.5, "causal": int(d.chance())}
    mode = d.pick(("plain", "cross", "cache", "window"))
    keys = rows
    if mode == "cross":
        params["causal"], keys = 0, d.pick((d.size(30), rows))
    if mode in ("cache", "window"):
        params["kv_layer"] = d.size(2) - 1
        capacity = 3 * d.max_tokens + 30
        d.kv = KvCache(2, groups, width, capacity, d.pick(KvKind))
    if mode == "window":
        params |= {"window": d.size(9), "sink": d.size(5) - 1}
    cuts = [[heads, groups, groups], [heads, 2 * groups], [heads + 2 * groups]]
    parts = cuts[0] if mode == "cross" else d.pick(cuts)
    inputs = [d.x(rows if at == 0 else keys, n * width) for at, n in enumerate(parts)]
    tables: list[int] = []
    if mode != "cross" and d.chance():
        limit = d.size(30)
        inputs += [ABSENT] * (3 - len(parts)) + [d.index(rows, limit)]
        tables = _tables(d, width // 2, limit)
    d.call(Op.ATTENTION, inputs, [d.y(rows, heads * width)], tables, **params)


def _attention_row(d: Draw) -> None:
    rows, heads, width = d.size(20), d.size(4), d.size(20)
    cols, params = heads * width, {"heads": heads, "scale": 0.3, "row": int(d.rng.integers(rows))}
    if d.chance():
        inputs, params = [d.x(rows, 2 * cols + d.size(9) - 1)], params | {"cols": cols}
    else:
        inputs = [d.x(rows, cols), d.x(rows, cols)]
    d.call(Op.ATTENTION_ROW, inputs, [d.y(rows, 1)], **params)


def _attention_score(d: Draw) -> None:
    rows, heads, width = d.size(20), d.size(4), d.size(20)
    first, row = int(d.rng.integers(rows)), int(d.rng.integers(-1, rows))
    inputs = [d.x(rows, heads * width), d.x(rows, heads * width)]
    params = {"heads": heads, "scale": 0.3, "row": row, "first": first}
    d.call(Op.ATTENTION_SCORE, inputs, [d.y(rows - first, 1)], **params)


def _prune(d: Draw) -> None:
    rows, cols, offset = d.size(40), d.size(40), d.size(4) - 1
    k = int(d.rng.integers(1, rows + 1))
    inputs = [d.x(rows, cols), d.x(rows + offset, 1)]
    d.call(Op.PRUNE, inputs, [d.y(k, cols), d.y(k, 1, "i32")], k=k, score_offset=offset)


def _prune_top_p(d: Draw) -> None:
    rows, cols = d.size(40), d.size(40)
    high = int(d.rng.integers(1, rows + 1))
    low, merge, offset = int(d.rng.integers(1, high + 1)), d.size(5) - 1, d.size(4) - 1
    inputs = [d.x(rows, cols), d.x(rows, 1, fill=positive(0.0))]
    inputs += [d.x(rows + offset, d.size(30))] if merge else []
    kept = min(rows, high + merge)
    params = {"p": float(d.rng.uniform(0.01, 1.0)), "min_keep": low, "max_keep": high}
    params |= {"merge": merge, "key_offset": offset if merge else 0}
    outputs = [d.y(kept, cols), d.y(kept, 1, "i32"), d.y(1, 1, "i32")]
    d.call(Op.PRUNE_TOP_P, inputs, outputs, **params)


def _conv(op: Op) -> Generator:
    def generate(d: Draw) -> None:
        kh, kw, depth, images = d.size(5), d.size(5), d.size(40), d.size(2)
        even = d.size(3) - 1
        sides = d.pick(([even] * 4, [d.size(4) - 1 for _ in range(4)]))
        height = max(1, kh - sides[0] - sides[2]) + d.size(9) - 1
        width = max(1, kw - sides[1] - sides[3]) + d.size(9) - 1
        params = {"kh": kh, "kw": kw, "stride": d.size(3), "pad": pad_code(*sides)}
        params |= {"H": height, "W": width, "stride_x": d.pick((0, 1, 2, 3))}
        channels = depth if op is Op.CONV_DEPTHWISE else d.size(40)
        of_tap = (kh * kw, depth) if op is Op.CONV_DEPTHWISE else (channels, kh * kw * depth)
        weight, more = floats(d.rng, *of_tap), []
        if op is Op.SPARSE_CONV:
            weight[:, d.rng.random(weight.shape[1]) < d.pick((0.0, 0.5, 0.9, 1.0))] = 0
            found = find_runs(weight, kw * depth)
            weight, more = found.taps, [d.weight(a, "i32") for a in (found.first, found.runs)]
        weights = [d.weight(weight), *more, d.maybe(channels)]
        rows, columns = Window.of(params).out
        x, y = d.x(images * height * width, depth), d.y(images * rows * columns, channels)
        d.call(op, [x], [y], weights, act=d.pick(Act), **params)

    return generate


def _rows_concat(d: Draw) -> None:
    cols, sizes = d.size(), [d.size(9), d.size(9)]
    constant = d.pick((None, 0, 1))
    dtype = d.pick(("f32", "i32")) if constant is None else "f32"
    inputs = [ABSENT if at == constant else d.x(n, cols, dtype) for at, n in enumerate(sizes)]
    weights = [] if constant is None else [d.weight(floats(d.rng, sizes[constant], cols))]
    d.call(Op.ROWS_CONCAT, inputs, [d.y(sum(sizes), cols, dtype)], weights)


def _rows_slice(d: Draw) -> None:
    cols, dtype = d.size(), d.pick(("f32", "i32"))
    if d.chance(0.3):
        start, rows, count = -1, d.rows(), 1
    else:
        rows = d.size(20)
        start = int(d.rng.integers(rows))
        count = int(d.rng.integers(1, rows - start + 1))
    given = -1 if start >= 0 and start + count == (rows or 0) else count
    x, y = d.x(rows, cols, dtype), d.y(count, cols, dtype)
    d.call(Op.ROWS_SLICE, [x], [y], start=start, count=given)


def _binary(op: Op) -> Generator:
    def generate(d: Draw) -> None:
        rows, cols = d.rows(), d.size()
        fill = positive() if op is Op.DIV else floats
        b_rows, b_cols = d.pick((1, rows)), d.pick((1, cols))
        inputs, weights = [d.x(rows, cols)], []
        if d.chance(0.7):
            inputs += [d.x(b_rows, b_cols, fill=fill)]
        else:
            weights = [d.weight(fill(d.rng, b_rows or 1, b_cols))]
        d.call(op, inputs, [d.y(rows, cols)], weights, act=d.pick(Act))

    return generate


def _pack(d: Draw) -> None:
    rows, cols = d.rows(), d.size(200)
    outputs = [d.y(rows, cols), d.y(rows, -(-cols // 32), "i32")]
    d.call(Op.PACK, [d.x(rows, cols, fill=_some_zeros)], outputs, act=d.pick(Act))


def _some_zeros(rng: np.random.Generator, rows: int, cols: int) -> Array:
    return floats(rng, rows, cols) * (rng.random((rows, cols)) < rng.random())


def _packed(d: Draw) -> None:
    """Rows of any mask, bits beyond the columns among them."""
    rows, cols, kind = d.rows(), d.size(200), d.pick(PackedKind)
    inputs, weights, params = [d.x(rows, cols), d.x(rows, -(-cols // 32), "i32")], [], {}
    if kind in (PackedKind.RMS, PackedKind.LAYER):
        weights = [
            d.vector(cols, offset=1.0),
            d.maybe(cols) if kind is PackedKind.LAYER else ABSENT,
        ]
        params["eps"] = 1e-5
    else:
        params["act"] = d.pick(Act)
        b_rows, b_cols = d.pick((1, rows)), d.pick((1, cols))
        if kind is not PackedKind.MUL or d.chance(0.7):
            if d.chance():
                inputs += [d.x(b_rows, b_cols)]
            else:
                weights = [d.weight(floats(d.rng, b_rows or 1, b_cols))]
    d.call(Op.PACKED, inputs, [d.y(rows, cols)], weights, kind=kind, **params)


def _unary(d: Draw) -> None:
    rows, cols, kind = d.rows(), d.size(), d.pick(UnaryKind)
    fill = positive() if kind in (UnaryKind.SQRT, UnaryKind.RECIPROCAL) else floats
    d.call(Op.UNARY, [d.x(rows, cols, fill=fill)], [d.y(rows, cols)], kind=kind)


def _softmax(d: Draw) -> None:
    rows, cols = d.rows(), d.size(200)
    d.call(Op.SOFTMAX, [d.x(rows, cols)], [d.y(rows, cols)])


def _route(d: Draw) -> None:
    rows, width, order = d.rows(), d.size(100), d.pick(RouteOrder)
    groups, each = d.size(4), d.size(6)
    experts, params = groups * each, {"order": order, "scale": d.pick((0.0, 2.5))}
    taken = experts
    weights = [_codes(d, experts, width, (DENSE, "i8", "i16")), d.maybe(experts)]
    if order is RouteOrder.SPARSEMIXER:
        params["jitter"] = 0.2
    if order in SIGMOID_ORDERS:
        weights += [d.maybe(experts)]
        if d.chance():
            top = int(d.rng.integers(1, groups + 1))
            params |= {"groups": groups, "top_groups": top, "group_take": d.size(each)}
            taken = top * each
    k = min(d.size(6), taken)
    outputs = [d.y(rows, k, "i32"), d.y(rows, k)] + ([d.y(rows, 1)] if d.chance() else [])
    d.call(Op.ROUTE, [d.x(rows, width)], outputs, weights, k=k, **params)


def _chosen(experts: int, high: int) -> Fill:
    """Return what fills rows with different experts, and with one beyond if `high` allows it."""

    def fill(rng: np.random.Generator, rows: int, cols: int) -> Array:
        found = [rng.permutation(max(experts, high))[:cols] for _ in range(rows)]
        return np.asarray(found, np.int32)

    return fill


def _expert_weights(d: Draw, experts: int, width: int, hidden: int, act: ExpertAct) -> list[int]:
    wide = hidden * (2 if act in GATED else 1)
    first = (DENSE, TILES, UP_ROWS) if act is ExpertAct.REGLU else (DENSE, TILES)
    parts = ((wide, width, first), (width, hidden, (DENSE, TILES, COLUMNS)))
    in_bytes = [d.chance(0.3) for _ in parts]
    weights = []
    for expert in range(experts):
        where = {"section": f"expert.L0.E{expert}"}
        for (n, k, layouts), eight in zip(parts, in_bytes, strict=True):
            made = d.weight(on_grid(n, k), "w8", **where) if eight else None
            weights += [d.product(n, k, layouts, **where) if made is None else made]
    return weights


def _experts(d: Draw) -> None:
    _routed(d, [])


def _routed(d: Draw, before: list[Op]) -> None:
    """Add an EXPERTS call, after steps that prefetch or load its experts."""
    rows, width, hidden, experts = d.rows(), d.size(60), d.size(60), d.size(6)
    k, act, biases = min(d.size(4), experts), d.pick(ExpertAct), d.chance(0.3)
    weights = _expert_weights(d, experts, width, hidden, act)
    if biases:
        pairs = [weights[at : at + 2] for at in range(0, len(weights), 2)]
        wide = hidden * (2 if act in GATED else 1)
        weights = [w for pair in pairs for w in (*pair, d.vector(wide), d.vector(width))]
    params = {"act": act, "biases": int(biases)}
    if act is ExpertAct.SWIGLU_CLIPPED:
        params |= {"alpha": 1.7, "limit": d.pick((0.0, 0.5)), "shift": 1.0}
    high = experts + (1 if d.chance(BAD_INDEX_SHARE) else 0)
    inputs = [d.x(rows, width), d.x(rows, k, "i32", _chosen(experts, high)), d.x(rows, k)]
    for op in before:
        if op is Op.EXPERT_FORESEE:
            _foresee(d, rows, experts, weights, biases=biases)
            continue
        ahead = {"bytes": d.size(200)} if op is Op.EXPERT_PREFETCH else {}
        d.step(op, weights, biases=int(biases), **ahead)
    d.call(Op.EXPERTS, inputs, [d.y(rows, width)], weights, **params)


def _expert_prefetch(d: Draw) -> None:
    _routed(d, [Op.EXPERT_PREFETCH, Op.EXPERT_LOAD])


def _expert_load(d: Draw) -> None:
    _routed(d, [Op.EXPERT_LOAD])


def _expert_foresee(d: Draw) -> None:
    _routed(d, [Op.EXPERT_FORESEE, Op.EXPERT_LOAD])


def _foresee(d: Draw, rows: int | None, experts: int, weights: list[int], *, biases: bool) -> None:
    width, order, kind = d.size(60), d.pick(RouteOrder), d.pick(NormKind)
    norm = [ABSENT, ABSENT]
    if d.chance(0.8):
        norm = [d.vector(width, offset=1.0), d.maybe(width)]
    router = _codes(d, experts, width, (DENSE, "i8", "i16"))
    correction = d.maybe(experts) if order in SIGMOID_ORDERS else ABSENT
    asked = [*norm, router, d.maybe(experts), correction, *weights]
    params = {"k": min(d.size(4), experts), "order": order, "kind": kind, "eps": 1e-5}
    if order in SIGMOID_ORDERS and d.chance():
        params |= {"groups": 1, "top_groups": 1, "group_take": d.size(experts)}
    d.step(Op.EXPERT_FORESEE, asked, (d.x(rows, width),), biases=int(biases), **params)


def _moe_layer(d: Draw) -> None:
    rows, width, hidden, experts = d.rows(), d.size(60), d.size(60), d.size(6)
    k, act, kind = min(d.size(4), experts), d.pick(ExpertAct), d.pick(NormKind)
    norm = [d.vector(width, offset=1.0), d.vector(width) if kind is NormKind.LAYER else ABSENT]
    weights = [*norm, _codes(d, experts, width, (DENSE, "i8", "i16")), d.maybe(experts)]
    weights += _expert_weights(d, experts, width, hidden, act)
    params = {"k": k, "order": d.pick(RouteOrder), "act": act, "kind": kind, "eps": 1e-5}
    outputs = [d.y(rows, width), d.y(rows, k, "i32"), d.y(rows, k)]
    outputs += [d.y(rows, 1)] if d.chance() else []
    x = d.x(rows, width)
    d.call(Op.MOE_LAYER, [x], outputs, weights, **params, residual=int(d.chance()))


def _recurrent(op: Op) -> Generator:
    kinds = [k for k in RecurrentKind if op is Op.RECURRENT_F32 or "BEFORE" not in k.name]

    def generate(d: Draw) -> None:
        kind, hidden, batch = d.pick(kinds), d.size(60), d.size(3)
        rows = None if d.chance(0.3) else batch * d.size(6)
        batch, wide = 1 if rows is None else batch, RECURRENT_GATES[kind] * hidden
        states = 2 if kind is RecurrentKind.LSTM else 1
        inputs = [d.x(rows, wide)]
        inputs += [d.x(batch, hidden) if d.chance() else ABSENT for _ in range(states)]
        weight = d.product(wide, hidden) if op is Op.RECURRENT else d.weight(d.sparse(wide, hidden))
        outputs = [d.y(rows, hidden), *(d.y(batch, hidden) for _ in range(states))]
        params = {"kind": kind, "batch": batch, "reverse": int(d.chance())}
        d.call(op, inputs, outputs, [weight, d.maybe(wide)], **params)

    return generate


def _argmax(d: Draw) -> None:
    d.call(Op.ARGMAX, [d.x(1, d.size(300))], [d.y(1, 1, "i32")])


def _gather_rows(d: Draw) -> None:
    rows, cols, k, dtype = d.size(20), d.size(), d.rows(), d.pick(("f32", "i32"))
    inputs = [d.x(rows, cols, dtype), d.index(k, rows)]
    d.call(Op.GATHER_ROWS, inputs, [d.y(k, cols, dtype)])


def _cols_concat(d: Draw) -> None:
    rows, dtype, sizes = d.rows(), d.pick(("f32", "i32")), [d.size(20) for _ in range(d.size(6))]
    sizes += [d.size(9)]
    sizes += [d.size(9)] if len(sizes) < 2 else []
    inputs = [d.x(rows, cols, dtype) for cols in sizes]
    d.call(Op.COLS_CONCAT, inputs, [d.y(rows, sum(sizes), dtype)])


def _cols_slice(d: Draw) -> None:
    rows, cols, dtype = d.rows(), d.size(), d.pick(("f32", "i32"))
    start = int(d.rng.integers(cols))
    count = int(d.rng.integers(1, cols - start + 1))
    x, y = d.x(rows, cols, dtype), d.y(rows, count, dtype)
    d.call(Op.COLS_SLICE, [x], [y], start=start, count=count)


GENERATORS: Final[Mapping[Op, Generator]] = MappingProxyType(
    {
        Op.IMAGE_U8: _image_u8,
        Op.EMBED: _embed,
        **{op: _linear(op) for op in LINEARS},
        Op.NORM: _norm,
        Op.ROPE: _rope,
        Op.ATTENTION: _attention,
        Op.ATTENTION_ROW: _attention_row,
        Op.PRUNE: _prune,
        **{op: _conv(op) for op in (Op.CONV2D, Op.CONV_DEPTHWISE, Op.SPARSE_CONV)},
        Op.ROWS_CONCAT: _rows_concat,
        Op.ROWS_SLICE: _rows_slice,
        **{op: _binary(op) for op in (Op.ADD, Op.MUL, Op.SUB, Op.DIV)},
        Op.PACK: _pack,
        Op.PACKED: _packed,
        Op.UNARY: _unary,
        Op.SOFTMAX: _softmax,
        Op.ROUTE: _route,
        Op.EXPERTS: _experts,
        Op.ARGMAX: _argmax,
        **{op: _recurrent(op) for op in (Op.RECURRENT, Op.RECURRENT_F32)},
        Op.GATHER_ROWS: _gather_rows,
        Op.COLS_CONCAT: _cols_concat,
        Op.COLS_SLICE: _cols_slice,
        Op.ATTENTION_SCORE: _attention_score,
        Op.PRUNE_TOP_P: _prune_top_p,
        Op.MOE_LAYER: _moe_layer,
        Op.EXPERT_PREFETCH: _expert_prefetch,
        Op.EXPERT_LOAD: _expert_load,
        Op.EXPERT_FORESEE: _expert_foresee,
        **REFERENCE,
    }
)


def draw(op: Op, seed: int) -> Drawn:
    """Return a random call of `op`, the same for the same seed."""
    made = Draw(seed)
    GENERATORS[op](made)
    drawn = made.finish()
    validate_module(drawn.module)
    return drawn
