"""Every operation, on every instruction set of this machine: native bits equal the simulator's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from compiler.analysis.conv_runs import find_runs
from compiler.contract.expert_pages import PAGE_OPS
from compiler.contract.operations import GATED, RECURRENT_GATES
from compiler.contract.windows import Window, pad_code
from compiler.kernels.program import (
    DENSE,
    W4_LAYOUTS,
    Act,
    ExpertAct,
    KvCache,
    Module,
    NormKind,
    Op,
    RecurrentKind,
    RouteOrder,
    UnaryKind,
)
from compiler.kernels.registry import KERNELS
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.modules import single_call
from tests.factories.w8 import on_grid

Ports = list[tuple[int | None, int, str]]
Weights = list[tuple[str, np.ndarray] | None]
RANDOM = np.random.default_rng(7)
MAX_TOKENS = 8


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * RANDOM.standard_normal(shape)).astype(np.float32)


def f32(*shape: int) -> tuple[str, np.ndarray]:
    return ("f32", normal(*shape))


def w4(n: int, k: int) -> tuple[str, np.ndarray]:
    return ("w4", normal(n, k, scale=k**-0.5))


@dataclass
class OpCase:
    """One call and how to fill its inputs."""

    name: str
    op: Op
    inputs: Ports
    outputs: Ports
    weights: Weights = field(default_factory=list)
    params: Mapping[str, float] = field(default_factory=dict)
    kv: KvCache | None = None
    fill: Mapping[int, Callable[[int, int], np.ndarray]] = field(default_factory=dict)
    layout: str = DENSE

    def module(self) -> Module:
        module = single_call(
            self.op,
            self.inputs,
            self.outputs,
            self.weights,
            self.params,
            kv=self.kv,
            max_tokens=MAX_TOKENS,
        )
        if self.layout == DENSE:
            return module
        first, *others = module.weights
        return replace(module, weights=(replace(first, layout=self.layout), *others))

    def values(self, tokens: int, seed: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(seed)
        found = {}
        for at, (rows, cols, dtype) in enumerate(self.inputs):
            count = tokens if rows is None else rows
            if not cols:
                continue
            if at in self.fill:
                found[f"x{at}"] = self.fill[at](count, cols)
            elif dtype == "u8":
                found[f"x{at}"] = random.integers(0, 256, (count, cols), np.uint8)
            else:
                found[f"x{at}"] = random.standard_normal((count, cols)).astype(np.float32)
        return found


def indices(limit: int) -> Callable[[int, int], np.ndarray]:
    def fill(rows: int, cols: int) -> np.ndarray:
        draws = [RANDOM.permutation(limit)[:cols] for _ in range(rows)]
        return np.asarray(draws, np.int32)

    return fill


def zeros(rows: int, cols: int) -> np.ndarray:
    return np.zeros((rows, cols), np.float32)


def shares(rows: int, _cols: int) -> np.ndarray:
    terms = np.exp(RANDOM.standard_normal((rows, 1)))
    return (terms / terms.sum()).astype(np.float32)


def top_p(p: float, low: int, high: int, merge: int) -> OpCase:
    rows = min(11, high + merge)
    return OpCase(
        f"PRUNE_TOP_P-{p}-{low}-{high}-{merge}",
        Op.PRUNE_TOP_P,
        [(11, 9, "f32"), (11, 1, "f32"), (13, 21 if merge else 0, "f32")],
        [(rows, 9, "f32"), (rows, 1, "i32"), (1, 1, "i32")],
        [],
        {"p": p, "min_keep": low, "max_keep": high, "merge": merge, "key_offset": merge and 2},
        fill={1: shares},
    )


def linear(
    n: int, k: int, *, act: Act = Act.NONE, bias: bool = False, residual: bool = False,
    op: Op = Op.LINEAR, **params: float,
) -> OpCase:  # fmt: skip
    weight = w4(n, k) if op is Op.LINEAR else f32(n, k)
    weight = ("w8", on_grid(n, k)) if op is Op.LINEAR_W8 else weight
    return OpCase(
        f"{op.name}-{n}x{k}-{act.name}{'-bias' * bias}{'-residual' * residual}"
        + "".join(f"-{name}{value}" for name, value in params.items()),
        op,
        [(None, k, "f32"), (None, n if residual else 0, "f32")],
        [(None, n, "f32")],
        [weight, f32(n) if bias else None],
        {"act": act, **params},
    )


def pruned(n: int, k: int, layout: str) -> OpCase:
    """Return a LINEAR whose weight keeps every tenth element."""
    weight = ("w4", normal(n, k) * (RANDOM.random((n, k)) < 0.1))
    case = linear(n, k, act=Act.RELU, bias=True, residual=True)
    weights = [weight, case.weights[1]]
    return replace(case, name=f"LINEAR-{n}x{k}-{layout}", weights=weights, layout=layout)


def checked(n: int, k: int, most: int) -> OpCase:
    """Return a LINEAR that looks for zeros, over rows with four live groups."""

    def fill(rows: int, cols: int) -> np.ndarray:
        return normal(rows, cols) * (np.arange(cols) // 32 % 3 == 1)

    case = linear(n, k)
    params = {"check": most}
    return replace(case, name=f"LINEAR-{n}x{k}-check-{most}", params=params, fill={0: fill})


def attention(
    width: int,
    heads: int,
    *,
    groups: int = 0,
    layer: int = -1,
    causal: int = 0,
    keys: int | None = None,
) -> OpCase:
    kv_width = width // heads * (groups or heads)
    return OpCase(
        f"ATTENTION-{width}-{heads}-{groups}-{layer}-{causal}" + (f"-over{keys}" if keys else ""),
        Op.ATTENTION,
        [(None, width, "f32"), (keys, kv_width, "f32"), (keys, kv_width, "f32")],
        [(None, width, "f32")],
        [],
        {
            "heads": heads,
            "scale": (width // heads) ** -0.5,
            "kv_layer": layer,
            "kv_heads": groups,
            "causal": causal,
        },
        KvCache(2, groups or heads, width // heads, 40) if layer >= 0 else None,
    )


def conv(
    side: int, depth: int, channels: int, kernel: int, stride: int, pad: int, images: int = 1
) -> OpCase:
    out = (side + 2 * pad - kernel) // stride + 1
    height = side + 2
    out_h = (height + 2 * pad - kernel) // stride + 1
    return OpCase(
        f"CONV2D-{side}-{depth}-{channels}-{kernel}-{stride}-{pad}-{images}",
        Op.CONV2D,
        [(images * height * side, depth, "f32")],
        [(images * out * out_h, channels, "f32")],
        [f32(channels, kernel * kernel * depth), f32(channels)],
        {
            "kh": kernel, "kw": kernel, "stride": stride, "pad": pad,
            "act": Act.RELU, "H": height, "W": side,
        },
    )  # fmt: skip


def depthwise(
    side: int, channels: int, kernel: int, stride: int, pad: int, across: int = 0, images: int = 1
) -> OpCase:
    height = side + 2
    out_h = (height + 2 * pad - kernel) // stride + 1
    out_w = (side + 2 * pad - kernel) // (across or stride) + 1
    return OpCase(
        f"CONV_DEPTHWISE-{side}-{channels}-{kernel}-{stride}-{pad}-{across}-{images}",
        Op.CONV_DEPTHWISE,
        [(images * height * side, channels, "f32")],
        [(images * out_h * out_w, channels, "f32")],
        [f32(kernel * kernel, channels), f32(channels) if pad else None],
        {
            "kh": kernel, "kw": kernel, "stride": stride, "pad": pad,
            "act": Act.SILU if across else Act.RELU, "H": height, "W": side, "stride_x": across,
        },
    )  # fmt: skip


def sides(op: Op, depth: int, channels: int, pads: tuple[int, ...], **params: int) -> OpCase:
    """A convolution of two images of 7 x 9 whose window, strides and padding differ by axis."""
    given = {"H": 7, "W": 9, "stride": 1, "stride_x": 0, "pad": pad_code(*pads), **params}
    rows, columns = Window.of(given).out
    taps = given["kh"] * given["kw"]
    weights: Weights = [f32(channels, taps * depth), f32(channels)]
    if op is Op.CONV_DEPTHWISE:
        weights[0] = f32(taps, channels)
    elif op is Op.SPARSE_CONV:
        live = RANDOM.random((-(-channels // 16), taps * depth)) < 0.4
        weight = normal(channels, taps * depth) * np.repeat(live, 16, axis=0)[:channels]
        found = find_runs(weight, given["kw"] * depth)
        weights = [("f32", found.taps), ("i32", found.first), ("i32", found.runs), weights[1]]
    name = f"{op.name}-{depth}-{channels}-{pads}-{sorted(params.items())}"
    inputs, outputs = [(2 * 63, depth, "f32")], [(2 * rows * columns, channels, "f32")]
    return OpCase(name, op, inputs, outputs, weights, {**given, "act": Act.RELU})


def route(
    width: int, experts: int, k: int, order: RouteOrder, *, bias: bool = False,
    correction: bool = False, measured: bool = False, **params: float,
) -> OpCase:  # fmt: skip
    if order is RouteOrder.SPARSEMIXER:
        params = {"jitter": 0.3, **params}
    extra = "".join(f"-{name}{value}" for name, value in params.items())
    return OpCase(
        f"ROUTE-{experts}-{k}-{order.name}{'-bias' * bias}{'-correction' * correction}{extra}"
        f"{'-measured' * measured}",
        Op.ROUTE,
        [(None, width, "f32")],
        [(None, k, "i32"), (None, k, "f32"), *([(None, 1, "f32")] if measured else [])],
        [
            f32(experts, width),
            f32(experts) if bias else None,
            f32(experts) if correction else None,
        ],
        {"k": k, "order": order, **params},
    )


def experts(
    width: int, hidden: int, count: int, k: int, act: ExpertAct, *, biases: bool = False,
    limit: float = 0.5,
) -> OpCase:  # fmt: skip
    wide = hidden * (2 if act in GATED else 1)
    weights: Weights = []
    for _ in range(count):
        weights += [w4(wide, width), w4(width, hidden)]
        weights += [f32(wide), f32(width)] if biases else []
    params: dict[str, float] = {"act": act, "biases": biases}
    if act is ExpertAct.SWIGLU_CLIPPED:
        params |= {"alpha": 1.702, "limit": limit, "shift": 1.0}
    return OpCase(
        f"EXPERTS-{width}-{hidden}-{count}-{k}-{act.name}{'-biases' * biases}-{limit}",
        Op.EXPERTS,
        [(None, width, "f32"), (None, k, "i32"), (None, k, "f32")],
        [(None, width, "f32")],
        weights,
        params,
        fill={1: indices(count)},
    )


def binary(op: Op, b_rows: int | None, b_cols: int, *, constant: bool = False) -> OpCase:
    second = (b_rows, 0 if constant else b_cols, "f32")
    weight = [f32(*((b_rows or 1), b_cols))] if constant else []
    rows = 3 if constant and (b_rows or 0) > 1 else None
    return OpCase(
        f"{op.name}-{b_rows}-{b_cols}{'-constant' * constant}",
        op,
        [(rows, 21, "f32"), second],
        [(rows, 21, "f32")],
        weight,
        {"act": Act.SILU if op is Op.MUL else Act.NONE},
    )


def norm(width: int, kind: NormKind) -> OpCase:
    beta = f32(width) if kind is NormKind.LAYER else None
    return OpCase(
        f"NORM-{width}-{kind.name}",
        Op.NORM,
        [(None, width, "f32")],
        [(None, width, "f32")],
        [f32(width), beta],
        {"kind": kind, "eps": 1e-5},
    )


def rope(width: int, heads: int) -> OpCase:
    half = width // heads // 2
    return OpCase(
        f"ROPE-{width}-{heads}",
        Op.ROPE,
        [(None, width, "f32"), (None, 1, "i32")],
        [(None, width, "f32")],
        [f32(30, half), f32(30, half)],
        {"heads": heads},
        fill={1: lambda rows, _: RANDOM.integers(0, 30, (rows, 1)).astype(np.int32)},
    )


def unary(kind: UnaryKind) -> OpCase:
    def fill(rows: int, cols: int) -> np.ndarray:
        values = normal(rows, cols, scale=25.0)
        if kind is UnaryKind.EXP:
            return np.minimum(values, np.float32(80))
        return np.abs(values) + np.float32(1e-3) if kind is UnaryKind.SQRT else values

    ports: Ports = [(None, 19, "f32")]
    return OpCase(f"UNARY-{kind.name}", Op.UNARY, ports, ports, [], {"kind": kind}, fill={0: fill})


def softmax(cols: int) -> OpCase:
    ports: Ports = [(None, cols, "f32")]
    return OpCase(f"SOFTMAX-{cols}", Op.SOFTMAX, ports, ports)


def moves() -> list[OpCase]:
    wide, f = (None, 9, "f32"), "f32"
    return [
        OpCase("IMAGE_U8", Op.IMAGE_U8, [(1, 60, "u8")], [(20, 3, f)], [],
               {"divide": 127.5, "subtract": 1.0}),
        OpCase("EMBED", Op.EMBED, [(None, 1, "i32")], [wide], [f32(11, 9)], fill={0: indices(11)}),
        OpCase("ROWS_CONCAT", Op.ROWS_CONCAT, [(2, 9, f), (3, 9, f)], [(5, 9, f)], [None]),
        OpCase("ROWS_CONCAT-first", Op.ROWS_CONCAT, [(2, 0, f), (3, 9, f)], [(4, 9, f)],
               [f32(1, 9)]),
        OpCase("ROWS_CONCAT-second", Op.ROWS_CONCAT, [(2, 9, f), (2, 0, f)], [(5, 9, f)],
               [f32(3, 9)]),
        OpCase("ROWS_SLICE-last", Op.ROWS_SLICE, [wide], [(1, 9, f)], [],
               {"start": -1, "count": 1}),
        OpCase("ROWS_SLICE-end", Op.ROWS_SLICE, [(7, 9, f)], [(5, 9, f)], [],
               {"start": 2, "count": -1}),
        OpCase("ROWS_SLICE-middle", Op.ROWS_SLICE, [(7, 9, f)], [(3, 9, f)], [],
               {"start": 1, "count": 3}),
        OpCase("GATHER_ROWS", Op.GATHER_ROWS, [(7, 9, f), (4, 1, "i32")], [(4, 9, f)], [],
               fill={1: indices(7)}),
        OpCase("COLS_CONCAT", Op.COLS_CONCAT, [wide, (None, 2, f), (None, 1, f)], [(None, 12, f)]),
        OpCase("COLS_SLICE", Op.COLS_SLICE, [wide], [(None, 4, f)], [], {"start": 3, "count": 4}),
        OpCase("ARGMAX", Op.ARGMAX, [(1, 37, f)], [(1, 1, "i32")]),
        OpCase("ARGMAX-ties", Op.ARGMAX, [(1, 37, f)], [(1, 1, "i32")],
               fill={0: lambda r, c: np.float32(np.arange(r * c) % 5)[None]}),
        OpCase("PRUNE", Op.PRUNE, [(11, 9, f), (13, 1, f)], [(5, 9, f), (5, 1, "i32")], [],
               {"k": 5, "score_offset": 1}),
        OpCase("PRUNE-ties", Op.PRUNE, [(11, 9, f), (12, 1, f)], [(5, 9, f), (5, 1, "i32")], [],
               {"k": 5, "score_offset": 1},
               fill={1: lambda r, _: np.float32(np.arange(r) % 3)[:, None]}),
        *(top_p(p, *bounds, merge) for p, bounds, merge in (
            (0.5, (1, 11), 0), (0.5, (1, 6), 3), (0.05, (4, 9), 4), (1.0, (1, 11), 2),
            (0.6, (2, 8), 1), (1.0, (3, 10), 1),
        )),
        OpCase("PRUNE_TOP_P-ties", Op.PRUNE_TOP_P, [(11, 9, f), (11, 1, f), (12, 5, f)],
               [(9, 9, f), (9, 1, "i32"), (1, 1, "i32")], [],
               {"p": 0.5, "max_keep": 7, "merge": 2, "key_offset": 1},
               fill={1: lambda r, _: np.float32(np.arange(r) % 3)[:, None],
                     2: lambda r, c: np.float32(np.arange(r * c) % 2).reshape(r, c)}),
        OpCase("PRUNE_TOP_P-zero", Op.PRUNE_TOP_P, [(11, 9, f), (11, 1, f), (11, 5, f)],
               [(9, 9, f), (9, 1, "i32"), (1, 1, "i32")], [],
               {"p": 0.5, "max_keep": 7, "merge": 2}, fill={1: zeros, 2: zeros}),
        *(OpCase(f"ATTENTION_SCORE-{row}-{first}-{heads}", Op.ATTENTION_SCORE,
                 [(rows, 36, f), (rows, 36, f)], [(rows - first, 1, f)], [],
                 {"heads": heads, "scale": scale, "row": row, "first": first})
          for rows, row, first, heads, scale in (
              (13, 2, 0, 3, 0.3), (17, 0, 1, 4, 3.0), (13, -1, 0, 2, 0.4), (14, -1, 1, 1, 2.0),
              (2, 0, 1, 3, 1.0), (13, 0, 1, 2, 200.0),
          )),
        OpCase("ATTENTION_SCORE-uniform", Op.ATTENTION_SCORE, [(13, 36, f), (13, 36, f)],
               [(12, 1, f)], [], {"heads": 3, "scale": 0.3, "row": -1, "first": 1},
               fill={0: zeros}),
        OpCase("ATTENTION_ROW", Op.ATTENTION_ROW, [(13, 36, f), (13, 36, f)], [(13, 1, f)], [],
               {"heads": 3, "scale": 0.3, "row": 2}),
    ]  # fmt: skip


def recurrent(
    kind: RecurrentKind, batch: int, hidden: int, op: Op = Op.RECURRENT, *, reverse: bool = False,
    start: bool = True, bias: bool = True,
) -> OpCase:  # fmt: skip
    """Return five steps of a batch, or as many as there are tokens if the batch is one."""
    gates = RECURRENT_GATES[kind] * hidden
    rows, cells = None if batch == 1 else 5 * batch, kind is RecurrentKind.LSTM
    state = (batch, hidden if start else 0, "f32")
    weight = w4(gates, hidden) if op is Op.RECURRENT else f32(gates, hidden)
    return OpCase(
        f"{op.name}-{kind.name}-{batch}-{hidden}{'-reverse' * reverse}{'-start' * start}",
        op,
        [(rows, gates, "f32"), state, (state[0], state[1] if cells else 0, "f32")],
        [(rows, hidden, "f32"), *[(batch, hidden, "f32")] * (2 if cells else 1)],
        [weight, f32(gates) if bias else None],
        {"kind": kind, "batch": batch, "reverse": int(reverse)},
    )


CASES = [
    *(recurrent(kind, 2, 24) for kind in RecurrentKind if kind != RecurrentKind.GRU_RESET_BEFORE),
    *(recurrent(kind, 1, 13, Op.RECURRENT_F32, start=False) for kind in RecurrentKind),
    *(recurrent(kind, 3, 40, Op.RECURRENT_F32, reverse=True) for kind in RecurrentKind),
    recurrent(RecurrentKind.LSTM, 1, 130, bias=False),
    *(linear(n, k) for n, k in ((1, 1), (16, 32), (17, 33), (24, 8), (96, 128), (50, 500))),
    linear(40, 72, act=Act.RELU, bias=True),
    linear(40, 72, act=Act.SILU, bias=True, residual=True),
    linear(33, 72, residual=True),
    *(linear(n, k, op=Op.LINEAR_F32) for n, k in ((1, 1), (7, 9), (16, 64))),
    linear(13, 24, op=Op.LINEAR_F32, act=Act.SILU, bias=True, residual=True),
    *(linear(n, k, op=Op.LINEAR_W8) for n, k in ((1, 1), (17, 33), (50, 500))),
    linear(40, 72, op=Op.LINEAR_W8, act=Act.SILU, bias=True, residual=True),
    *(linear(33, 72, op=Op.LINEAR_W8, bias=True, x_step=step) for step in (0.03, 0.05)),
    *(norm(width, kind) for width in (1, 7, 8, 48, 129) for kind in NormKind),
    rope(16, 1), rope(36, 3), rope(10, 5),
    attention(32, 4), attention(33, 3), attention(20, 2, causal=1), attention(70, 1),
    attention(64, 4, layer=1), attention(48, 4, groups=2, layer=0), attention(36, 6, groups=1),
    attention(32, 4, keys=1), attention(48, 4, groups=2, keys=50), attention(33, 3, keys=9),
    conv(9, 1, 8, 3, 2, 1), conv(8, 3, 13, 3, 1, 1), conv(11, 5, 24, 5, 2, 0),
    conv(6, 16, 32, 1, 1, 0), conv(7, 3, 19, 3, 2, 1, images=3), conv(5, 2, 8, 3, 1, 0, images=2),
    depthwise(9, 1, 3, 1, 1), depthwise(11, 37, 3, 2, 1), depthwise(12, 16, 5, 1, 2, images=2),
    depthwise(8, 24, 3, 2, 1, across=1), depthwise(7, 20, 5, 1, 2, across=3),
    depthwise(3, 40, 3, 1, 4), depthwise(6, 8, 2, 2, 0, images=3), depthwise(2, 9, 5, 1, 3),
    *(
        sides(op, depth, depth if op is Op.CONV_DEPTHWISE else 21, pads, **params)
        for op in (Op.CONV2D, Op.CONV_DEPTHWISE, Op.SPARSE_CONV)
        for depth, pads, params in (
            (5, (0, 1, 0, 1), {"kh": 1, "kw": 3}),
            (18, (0, 2, 3, 1), {"kh": 4, "kw": 2, "stride_x": 3}),
            (3, (1, 0, 0, 4), {"kh": 3, "kw": 1, "stride": 2, "stride_x": 1}),
            (2, (0, 100, 0, 127), {"kh": 1, "kw": 200, "stride": 9}),
        )
    ),
    *(route(20, 7, k, order) for k in (1, 2, 7) for order in RouteOrder),
    route(33, 16, 2, RouteOrder.TOPK_SOFTMAX, bias=True),
    route(33, 16, 2, RouteOrder.SPARSEMIXER, bias=True, jitter=0.02),
    route(20, 12, 3, RouteOrder.SIGMOID_TOPK_RENORM, correction=True, scale=2.5,
          groups=4, top_groups=2, group_take=2),
    route(20, 12, 2, RouteOrder.SIGMOID_TOPK, bias=True, groups=6, top_groups=1, group_take=1),
    route(20, 9, 2, RouteOrder.SIGMOID_TOPK_RENORM, correction=True, groups=9, top_groups=3,
          group_take=1),
    route(20, 9, 2, RouteOrder.SOFTMAX_TOPK, scale=16.0),
    *(route(20, 9, 2, order, bias=True, measured=True) for order in RouteOrder),
    route(16, 1, 1, RouteOrder.TOPK_SOFTMAX, measured=True),
    route(128, 16, 2, RouteOrder.TOPK_SOFTMAX, measured=True),
    *(experts(w, h, 5, 2, act) for w, h in ((16, 32), (40, 23)) for act in ExpertAct),
    *(experts(24, 19, 4, 2, act, biases=True) for act in ExpertAct),
    experts(24, 19, 4, 2, ExpertAct.SWIGLU_CLIPPED, limit=0.0),
    experts(32, 48, 3, 1, ExpertAct.RELU), experts(24, 16, 6, 6, ExpertAct.SWIGLU),
    *(binary(op, None, 21) for op in (Op.ADD, Op.MUL, Op.SUB, Op.DIV)),
    binary(Op.MUL, None, 1), binary(Op.ADD, 1, 21), binary(Op.SUB, 1, 1),
    binary(Op.ADD, 1, 21, constant=True), binary(Op.MUL, 1, 1, constant=True),
    binary(Op.ADD, 3, 21, constant=True), binary(Op.DIV, 3, 1, constant=True),
    *(unary(kind) for kind in UnaryKind),
    *(softmax(cols) for cols in (1, 7, 8, 50)),
    *moves(),
    *(pruned(n, k, layout) for n, k in ((50, 203), (33, 8)) for layout in W4_LAYOUTS[1:]),
    checked(40, 390, 4), checked(40, 390, 3),
]  # fmt: skip


@pytest.mark.parametrize("target", native_targets())
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_gives_the_bits_of_the_simulator(case: OpCase, target: str) -> None:
    built = Case.of(case.module())
    simulator = built.simulator()
    with built.native(target) as plan:
        for run, tokens in enumerate((1, 5, MAX_TOKENS)):
            values = case.values(tokens, run)
            expected = raw(simulator.run("run", values))
            assert raw(plan.run("run", values)) == expected
            assert all(np.isfinite(np.frombuffer(v, "<f4")).all() for v in expected.values())
            assert plan.kv_length == simulator.kv_length


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_stays_near_the_mathematics(case: OpCase) -> None:
    built = Case.of(case.module())
    values = case.values(5, 3)
    got = built.simulator().run_arrays("run", values)
    exact = built.exact().run_arrays("run", values)
    for role, array in got.items():
        difference = np.abs(array.astype(np.float64) - exact[role]).max()
        size = np.abs(exact[role]).max() + 1e-3
        quantised = case.op in (Op.LINEAR, Op.LINEAR_W8, Op.EXPERTS, Op.RECURRENT)
        assert difference <= size * (0.35 if quantised else 2e-5)


def test_it_covers_every_operation() -> None:
    fused = {Op.MOE_LAYER}  # see test_native_fused
    pages = {*PAGE_OPS}  # see test_native_schedule, test_native_foresight
    reference = {op for op in Op if KERNELS[op].is_reference}  # see test_onnx_operators
    packed = {Op.PACK, Op.PACKED}  # see test_native_packed
    assert {case.op for case in CASES} == set(Op) - fused - pages - reference - packed


def test_scores_need_memory_for_rows_not_for_a_map() -> None:
    target = native_targets()[0]

    def context_bytes(rows: int) -> int:
        params = {"heads": 4, "scale": 0.5, "row": -1}
        ports: Ports = [(rows, 16, "f32")]
        built = Case.of(single_call(Op.ATTENTION_SCORE, ports * 2, [(rows, 1, "f32")], [], params))
        with built.native(target) as plan:
            return plan.context_bytes

    operands, score, scratch = 2 * 16 * 4, 4, 2 * 4
    assert context_bytes(2048) - context_bytes(1024) == 1024 * (operands + score + scratch)
