"""Mixtures of experts in all shapes in which they are exported, with every router.

Shapes are those of `compiler.frontend.moe_shapes`. Weights have the statistics of trained ones:
rows of very different size, elements with heavy tails, experts that share most of what they do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from onnx import helper

from tests.factories.onnx_blocks import Block, GraphBuilder

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Mix:
    """One mixture: router, activation and sizes.

    Attributes:
        router: One of the router kinds.
        act: One of the expert kinds.
        biases: Whether experts have biases.
        missing: Experts whose bodies are not written (O3 and O4).
        stacked: O4 bodies take their weights from complete stacks.
        merge: How O4 bodies are added up: scatter_nd, scatter_elements or add.
        mask: How O4 bodies find their rows: equal or one_hot.
    """

    router: str = "softmax_topk_renorm"
    act: str = "swiglu"
    biases: bool = False
    missing: tuple[int, ...] = ()
    stacked: bool = False
    merge: str = "scatter_nd"
    mask: str = "equal"
    width: int = 12
    hidden: int = 10
    experts: int = 6
    k: int = 2
    groups: int = 3

    @property
    def gated(self) -> bool:
        return self.act.startswith("swiglu") or self.act == "reglu"

    @property
    def wide(self) -> int:
        return self.hidden * (2 if self.gated else 1)


def trained(random: np.random.Generator, experts: int, rows: int, cols: int) -> Array:
    """Return (E, rows, cols) f32: correlated experts, heavy-tailed elements and row sizes."""
    shared = random.standard_t(4, (rows, cols))
    own = random.standard_t(4, (experts, rows, cols))
    sizes = np.exp(0.6 * random.standard_normal((experts, rows, 1)))
    return ((0.8 * shared + 0.6 * own) * sizes * 0.3 * cols**-0.5).astype(np.float32)


@dataclass(frozen=True)
class Weights:
    """What a mixture is made of: stacks as `dialects.moe.ExpertsOp` has them."""

    w_in: Array
    w_out: Array
    b_in: Array
    b_out: Array

    @classmethod
    def of(cls, mix: Mix, random: np.random.Generator) -> "Weights":
        return cls(
            trained(random, mix.experts, mix.wide, mix.width),
            trained(random, mix.experts, mix.width, mix.hidden),
            trained(random, mix.experts, mix.wide, 1)[:, :, 0],
            trained(random, mix.experts, mix.width, 1)[:, :, 0],
        )


# --- routers -------------------------------------------------------------------------------------


def route(b: GraphBuilder, rows: str, mix: Mix) -> tuple[str, str]:
    """Return index and gate, both (T, k)."""
    weight = b.const(trained(b.rng, 1, mix.experts, mix.width)[0] * 3)
    logits = b.op("Gemm", rows, weight, b.weight(mix.experts), transB=1)
    return ROUTERS[mix.router](b, logits, mix)


def logits_of(b: GraphBuilder, rows: str, mix: Mix) -> str:
    """Return the logits alone, for operators that route themselves."""
    weight = b.const(trained(b.rng, 1, mix.experts, mix.width)[0].T * 3)
    return b.op("MatMul", rows, weight)


def _divided(b: GraphBuilder, values: str) -> str:
    return b.op("Div", values, b.op("ReduceSum", values, b.ints(-1), keepdims=1))


def _softmax_topk(b: GraphBuilder, logits: str, mix: Mix) -> tuple[str, str]:
    values, index = b.ops("TopK", b.op("Softmax", logits, axis=-1), b.ints(mix.k), count=2)
    return index, values


def _softmax_topk_renorm(b: GraphBuilder, logits: str, mix: Mix) -> tuple[str, str]:
    index, values = _softmax_topk(b, logits, mix)
    return index, _divided(b, values)


def _topk_softmax(b: GraphBuilder, logits: str, mix: Mix) -> tuple[str, str]:
    values, index = b.ops("TopK", logits, b.ints(mix.k), count=2)
    return index, b.op("Softmax", values, axis=-1)


def _sparsemixer(b: GraphBuilder, logits: str, mix: Mix) -> tuple[str, str]:
    size, left = b.op("Abs", logits), logits
    indices, gates = [], []
    low = b.const(-np.inf)
    for _ in range(mix.k):
        top = b.op("ReduceMax", left, b.ints(-1), keepdims=1)
        index = b.op("ArgMax", left, axis=-1)
        far = b.op("Div", b.op("Sub", top, logits), b.op("Max", size, top))
        near = b.op("Where", b.op("Greater", far, b.const(0.02)), low, left)
        gates.append(b.op("GatherElements", b.op("Softmax", near, axis=-1), index, axis=-1))
        indices.append(index)
        gone = b.op("Expand", low, b.op("Shape", index))
        left = b.op("ScatterElements", left, index, gone, axis=-1)
    return b.op("Concat", *indices, axis=-1), b.op("Concat", *gates, axis=-1)


def _sigmoid_topk(b: GraphBuilder, logits: str, mix: Mix) -> tuple[str, str]:
    scores = b.op("Sigmoid", logits)
    choice = b.op("Add", scores, b.weight(mix.experts, scale=0.1))
    size = mix.experts // mix.groups
    split = b.op("Reshape", choice, b.ints(-1, mix.groups, size))
    best, _ = b.ops("TopK", split, b.ints(2), count=2)
    sums = b.op("ReduceSum", best, b.ints(-1), keepdims=0)
    _, kept = b.ops("TopK", sums, b.ints(2), count=2)
    none = b.op("Expand", b.const(0.0), b.op("Shape", sums))
    ones = b.op("Expand", b.const(1.0), b.op("Shape", kept))
    mask = b.op("Unsqueeze", b.op("ScatterElements", none, kept, ones, axis=1), b.ints(-1))
    mask = b.op(
        "Reshape", b.op("Expand", mask, b.ints(1, mix.groups, size)), b.ints(-1, mix.experts)
    )
    kept_only = b.op("Where", b.op("Cast", mask, to=9), choice, b.const(-np.inf))
    _, index = b.ops("TopK", kept_only, b.ints(mix.k), count=2)
    return index, b.op("GatherElements", scores, index, axis=1)


def _sigmoid_topk_renorm(b: GraphBuilder, logits: str, mix: Mix) -> tuple[str, str]:
    index, values = _sigmoid_topk(b, logits, mix)
    return index, b.op("Mul", _divided(b, values), b.const(2.5))


ROUTERS: Final[Mapping[str, Callable[[GraphBuilder, str, Mix], tuple[str, str]]]] = (
    MappingProxyType(
        {
            "softmax_topk_renorm": _softmax_topk_renorm,
            "softmax_topk": _softmax_topk,
            "topk_softmax": _topk_softmax,
            "sparsemixer": _sparsemixer,
            "sigmoid_topk": _sigmoid_topk,
            "sigmoid_topk_renorm": _sigmoid_topk_renorm,
        }
    )
)

# --- activations ---------------------------------------------------------------------------------


def activate(b: GraphBuilder, wide: str, mix: Mix, axis: int = -1) -> str:
    """Return the hidden values (.., F) of (.., N) along the last axis."""
    if not mix.gated:
        return _PLAIN[mix.act](b, wide)
    if mix.act in ("swiglu", "reglu"):
        gate, up = b.ops("Split", wide, count=2, axis=axis, num_outputs=2)
        opened = b.op("Relu", gate) if mix.act == "reglu" else None
        return b.op("Mul", opened or b.op("Mul", gate, b.op("Sigmoid", gate)), up)
    ends, axes, steps = b.ints(2**63 - 1), b.ints(axis), b.ints(2)
    gate = b.op("Slice", wide, b.ints(0), ends, axes, steps)
    up = b.op("Slice", wide, b.ints(1), ends, axes, steps)
    gate = b.op("Clip", gate, "", b.const(0.4))
    up = b.op("Clip", up, b.const(-0.4), b.const(0.4))
    swish = b.op("Mul", gate, b.op("Sigmoid", b.op("Mul", gate, b.const(1.702))))
    return b.op("Mul", b.op("Add", up, b.const(1.0)), swish)


def _gelu(b: GraphBuilder, x: str) -> str:
    inner = b.op("Add", b.op("Erf", b.op("Div", x, b.const(2**0.5))), b.const(1.0))
    return b.op("Mul", b.op("Mul", x, inner), b.const(0.5))


def _gelu_tanh(b: GraphBuilder, x: str) -> str:
    cube = b.op("Mul", b.op("Mul", x, b.op("Mul", x, x)), b.const(0.044715))
    inner = b.op("Tanh", b.op("Mul", b.op("Add", x, cube), b.const((2 / np.pi) ** 0.5)))
    return b.op("Mul", b.op("Mul", x, b.const(0.5)), b.op("Add", inner, b.const(1.0)))


_PLAIN: Final[Mapping[str, Callable[[GraphBuilder, str], str]]] = MappingProxyType(
    {
        "relu": lambda b, x: b.op("Relu", x),
        "silu": lambda b, x: b.op("Mul", x, b.op("Sigmoid", x)),
        "gelu": _gelu,
        "gelu_tanh": _gelu_tanh,
        "identity": lambda b, x: x,
    }
)


def interleaved(mix: Mix, rows: Array) -> Array:
    """Return gate and up rows in alternation, where the activation reads them so."""
    if mix.act != "swiglu_clipped":
        return rows
    half = rows.shape[1] // 2
    mixed = np.empty_like(rows)
    mixed[:, 0::2], mixed[:, 1::2] = rows[:, :half], rows[:, half:]
    return mixed


def expert(b: GraphBuilder, x: str, e: int, mix: Mix, w: Weights) -> str:
    """Return one expert's MLP with weights of its own."""
    w_in, b_in = interleaved(mix, w.w_in)[e], interleaved(mix, w.b_in[:, :, None])[e, :, 0]
    wide = b.op("Gemm", x, b.const(w_in), *([b.const(b_in)] if mix.biases else []), transB=1)
    hidden = activate(b, wide, mix)
    out = b.op("MatMul", hidden, b.const(w.w_out[e].T))
    return b.op("Add", out, b.const(w.b_out[e])) if mix.biases else out


def selected_expert(b: GraphBuilder, x: str, e: str, mix: Mix, w: "Stacks") -> str:
    """Return an expert's MLP with weights selected from stacks by a computed id."""
    picked = b.op("Transpose", b.op("Gather", w.w_in, e, axis=0), perm=[1, 0])
    wide = b.op("MatMul", x, picked)
    if mix.biases:
        wide = b.op("Add", wide, b.op("Gather", w.b_in, e, axis=0))
    hidden = activate(b, wide, mix)
    out = b.op("MatMul", hidden, b.op("Transpose", b.op("Gather", w.w_out, e, axis=0), perm=[1, 0]))
    return b.op("Add", out, b.op("Gather", w.b_out, e, axis=0)) if mix.biases else out


@dataclass(frozen=True)
class Stacks:
    """Names of stacks in a graph."""

    w_in: str
    w_out: str
    b_in: str
    b_out: str

    @classmethod
    def of(cls, b: GraphBuilder, mix: Mix, w: Weights) -> "Stacks":
        bias = interleaved(mix, w.b_in[:, :, None])[:, :, 0]
        arrays = (interleaved(mix, w.w_in), w.w_out, bias, w.b_out)
        return cls(*(b.const(array) for array in arrays))


# --- shapes --------------------------------------------------------------------------------------

Body = Callable[[GraphBuilder, str, str, str, Mix, Weights], str]


def gathered(b: GraphBuilder, rows: str, index: str, gate: str, mix: Mix, w: Weights) -> str:
    """O2: matrices gathered by the chosen experts."""
    s = Stacks.of(b, mix, w)
    flat = b.op("Reshape", index, b.ints(-1))
    spread = b.op("Expand", b.op("Unsqueeze", rows, b.ints(1)), b.ints(1, mix.k, 1))
    x = b.op("Reshape", spread, b.ints(-1, mix.width, 1))
    ids = b.op("Unsqueeze", flat, b.ints(-1))
    wide = b.op("Squeeze", b.op("MatMul", b.op("GatherND", s.w_in, ids), x), b.ints(-1))
    if mix.biases:
        wide = b.op("Add", wide, b.op("GatherND", s.b_in, ids))
    hidden = b.op("Unsqueeze", activate(b, wide, mix), b.ints(-1))
    out = b.op("Squeeze", b.op("MatMul", b.op("GatherND", s.w_out, ids), hidden), b.ints(-1))
    if mix.biases:
        out = b.op("Add", out, b.op("GatherND", s.b_out, ids))
    weighed = b.op("Mul", out, b.op("Reshape", gate, b.ints(-1, 1)))
    choices = b.op("Reshape", weighed, b.ints(-1, mix.k, mix.width))
    return b.op("ReduceSum", choices, b.ints(1), keepdims=0)


def traced(b: GraphBuilder, rows: str, index: str, gate: str, mix: Mix, w: Weights) -> str:
    """O3: one body per expert that the dummy input hit, ids computed from the hits."""
    s = Stacks.of(b, mix, w)
    mask = b.op("OneHot", index, b.const(mix.experts + 1, "int64"), b.ints(0, 1), axis=-1)
    mask = b.op("Transpose", mask, perm=[2, 1, 0])
    counts = b.op("ReduceSum", mask, b.ints(-1, -2), keepdims=0)
    hits = b.op("NonZero", b.op("Greater", counts, b.const(0, "int64")))
    bodies = mix.experts - len(mix.missing)
    turned = b.op("Transpose", hits, perm=[1, 0])
    parts = b.ops("Split", turned, b.ints(*[1] * bodies), count=bodies, axis=0)
    total = b.op("Expand", b.const(0.0), b.op("Shape", rows))
    for part in parts:
        e = b.op("Squeeze", part, b.ints(0, 1))
        chosen = b.op("NonZero", b.op("Cast", b.op("Gather", mask, e, axis=0), to=9))
        slot, token = b.ops("Split", chosen, count=2, axis=0, num_outputs=2)
        token, slot = b.op("Squeeze", token, b.ints(0)), b.op("Squeeze", slot, b.ints(0))
        x = b.op("Gather", rows, token, axis=0)
        out = selected_expert(b, x, e, mix, s)
        place = b.op("Add", slot, b.op("Mul", token, b.const(mix.k, "int64")))
        taken = b.op("Gather", b.op("Reshape", gate, b.ints(-1, 1)), place, axis=0)
        total = b.op(
            "ScatterND", total, b.op("Unsqueeze", token, b.ints(1)), b.op("Mul", out, taken),
            reduction="add",
        )  # fmt: skip
    return total


def _own_rows(b: GraphBuilder, index: str, gate: str, e: str, mix: Mix) -> tuple[str, str]:
    """Return the tokens that chose expert `e` and their gates (n, 1)."""
    if mix.mask == "one_hot":
        hot = b.op("OneHot", index, b.const(mix.experts, "int64"), b.const([0.0, 1.0]), axis=-1)
        chosen = b.op("Gather", b.op("Transpose", hot, perm=[2, 0, 1]), e, axis=0)
    else:
        chosen = b.op("Cast", b.op("Equal", index, e), to=1)
    dense = b.op("ReduceSum", b.op("Mul", chosen, gate), b.ints(-1), keepdims=1)
    flags = b.op("ReduceSum", chosen, b.ints(-1), keepdims=0)
    token = b.op("Squeeze", b.op("NonZero", b.op("Cast", flags, to=9)), b.ints(0))
    return token, b.op("Gather", dense, token, axis=0)


def _merged(b: GraphBuilder, total: str, token: str, part: str, mix: Mix) -> str:
    place = b.op("Unsqueeze", token, b.ints(1))
    if mix.merge == "scatter_nd":
        return b.op("ScatterND", total, place, part, reduction="add")
    wide = b.op("Expand", place, b.op("Shape", part))
    if mix.merge == "scatter_elements":
        return b.op("ScatterElements", total, wide, part, axis=0, reduction="add")
    zeros = b.op("Expand", b.const(0.0), b.op("Shape", total))
    return b.op("Add", total, b.op("ScatterElements", zeros, wide, part, axis=0))


def unrolled(b: GraphBuilder, rows: str, index: str, gate: str, mix: Mix, w: Weights) -> str:
    """O4: one body per expert, each with weights of its own."""
    s = Stacks.of(b, mix, w) if mix.stacked else None
    total = b.op("Expand", b.const(0.0), b.op("Shape", rows))
    for e in range(mix.experts):
        if e in mix.missing:
            continue
        number = b.const(e, "int64")
        token, taken = _own_rows(b, index, gate, number, mix)
        x = b.op("Gather", rows, token, axis=0)
        out = expert(b, x, e, mix, w) if s is None else selected_expert(b, x, number, mix, s)
        total = _merged(b, total, token, b.op("Mul", out, taken), mix)
    return total


def masked(b: GraphBuilder, rows: str, index: str, gate: str, mix: Mix, w: Weights) -> str:
    """O4 without gathers: every expert on every row, weighed with zero where it was not chosen."""
    total = ""
    for e in range(mix.experts):
        chosen = b.op("Cast", b.op("Equal", index, b.const(e, "int64")), to=1)
        weight = b.op("ReduceSum", b.op("Mul", chosen, gate), b.ints(-1), keepdims=1)
        part = b.op("Mul", expert(b, rows, e, mix, w), weight)
        total = b.op("Add", total, part) if total else part
    return total


def tiled(b: GraphBuilder, rows: str, index: str, gate: str, mix: Mix, w: Weights) -> str:
    """O5: all rows for all experts at once, gates scattered to (T, E)."""
    s = Stacks.of(b, mix, w)
    shape = b.op("Concat", b.ints(mix.experts), b.op("Shape", rows), axis=0)
    x = b.op("Expand", b.op("Unsqueeze", rows, b.ints(0)), shape)
    wide = b.op("MatMul", x, b.op("Transpose", s.w_in, perm=[0, 2, 1]))
    if mix.biases:
        wide = b.op("Add", wide, b.op("Unsqueeze", s.b_in, b.ints(1)))
    out = b.op("MatMul", activate(b, wide, mix), b.op("Transpose", s.w_out, perm=[0, 2, 1]))
    if mix.biases:
        out = b.op("Add", out, b.op("Unsqueeze", s.b_out, b.ints(1)))
    size = b.op("Concat", b.op("Shape", index, start=0, end=1), b.ints(mix.experts), axis=0)
    zeros = b.op("Expand", b.const(0.0), size)
    dense = b.op("ScatterElements", zeros, index, gate, axis=1)
    turned = b.op("Unsqueeze", b.op("Transpose", dense, perm=[1, 0]), b.ints(-1))
    return b.op("ReduceSum", b.op("Mul", out, turned), b.ints(0), keepdims=0)


def looped(b: GraphBuilder, rows: str, index: str, gate: str, mix: Mix, w: Weights) -> str:
    """O6: `Loop` over all experts."""
    return _loop(b, rows, index, gate, mix, w, hits=None)


def looped_hits(b: GraphBuilder, rows: str, index: str, gate: str, mix: Mix, w: Weights) -> str:
    """O6: `Loop` over the experts that were hit."""
    hot = b.op("OneHot", index, b.const(mix.experts, "int64"), b.ints(0, 1), axis=-1)
    counts = b.op("ReduceSum", hot, b.ints(0, 1), keepdims=0)
    hits = b.op("Squeeze", b.op("NonZero", b.op("Cast", counts, to=9)), b.ints(0))
    return _loop(b, rows, index, gate, mix, w, hits=hits)


def _loop(
    b: GraphBuilder, rows: str, index: str, gate: str, mix: Mix, w: Weights, hits: str | None
) -> str:
    s = Stacks.of(b, mix, w)
    inner = GraphBuilder(prefix=f"loop{len(b.nodes)}_")
    inner.initializers = b.initializers
    p = inner.prefix
    e = f"{p}i" if hits is None else inner.op("Gather", hits, f"{p}i", axis=0)
    token, taken = _own_rows(inner, index, gate, e, mix)
    x = inner.op("Gather", rows, token, axis=0)
    part = inner.op("Mul", selected_expert(inner, x, e, mix, s), taken)
    total = _merged(inner, f"{p}total", token, part, mix)
    again = inner.op("Identity", f"{p}go")
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        inner.nodes,
        f"{p}body",
        [info(f"{p}i", 7, []), info(f"{p}go", 9, []), info(f"{p}total", 1, ["s", mix.width])],
        [info(again, 9, []), info(total, 1, ["s", mix.width])],
    )
    count = b.const(mix.experts, "int64") if hits is None else b.op("Size", hits)
    zeros = b.op("Expand", b.const(0.0), b.op("Shape", rows))
    return b.op("Loop", count, b.const(np.True_, "bool"), zeros, body=body)


def branched(b: GraphBuilder, rows: str, index: str, gate: str, mix: Mix, w: Weights) -> str:
    """O6: one `If` per expert, taken when somebody chose it."""
    total = b.op("Expand", b.const(0.0), b.op("Shape", rows))
    info = helper.make_tensor_value_info
    for e in range(mix.experts):
        number = b.const(e, "int64")
        flags = b.op("Cast", b.op("Equal", index, number), to=7)
        some = b.op("ReduceMax", flags, b.ints(0, 1), keepdims=0)
        parts = []
        for side in ("yes", "no"):
            inner = GraphBuilder(prefix=f"{side}{len(b.nodes)}_")
            inner.initializers = b.initializers
            if side == "yes":
                token, taken = _own_rows(inner, index, gate, number, mix)
                x = inner.op("Gather", rows, token, axis=0)
                out = inner.op("Mul", expert(inner, x, e, mix, w), taken)
                result = _merged(inner, total, token, out, mix)
            else:
                result = inner.op("Identity", total)
            name = f"{inner.prefix}body"
            parts.append(
                helper.make_graph(inner.nodes, name, [], [info(result, 1, ["s", mix.width])])
            )
        total = b.op("If", b.op("Cast", some, to=9), then_branch=parts[0], else_branch=parts[1])
    return total


SHAPES: Final[Mapping[str, Body]] = MappingProxyType(
    {
        "gathered": gathered,
        "traced": traced,
        "unrolled": unrolled,
        "masked": masked,
        "tiled": tiled,
        "looped": looped,
        "looped_hits": looped_hits,
        "branched": branched,
    }
)


def mixture(shape: str, mix: Mix) -> Block:
    """Return x (1, s, width) -> y of a mixture in one shape."""

    def build(b: GraphBuilder, x: str) -> str:
        rows = b.op("Reshape", x, b.ints(-1, mix.width))
        index, gate = route(b, rows, mix)
        y = SHAPES[shape](b, rows, index, gate, mix, Weights.of(mix, b.rng))
        return b.op("Reshape", y, b.ints(1, -1, mix.width))

    return build


def layers(shapes: Sequence[str], mixes: Sequence[Mix]) -> Block:
    """Return x (1, s, width) -> y of mixtures one behind the other, each around a residual."""

    def build(b: GraphBuilder, x: str) -> str:
        for shape, mix in zip(shapes, mixes, strict=True):
            x = b.op("Add", x, mixture(shape, mix)(b, x))
        return x

    return build
