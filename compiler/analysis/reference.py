"""Functions executed plainly in numpy, single precision: what the IR means, element by element.

Knows nothing of zeros, fusion or layouts. It decides whether claims are true: tests run random
functions on it, and the pass manager runs the source program when a pass claims more than before.
Operations without an entry raise `KeyError`; the caller then has no evidence.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.builtin import ArrayAttr
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import ConstantTable
from compiler.contract.windows import Window
from compiler.dialects.dims import Binding
from compiler.dialects.sp import OnnxOp
from compiler.dialects.types import shape_of, sizes_at

Array = NDArray[Any]
Run = dict[SSAValue, Array]
Caches = dict[int, tuple[Array, Array]]

ROUTE_ORDERS: Final = (
    "topk_softmax",
    "softmax_topk",
    "softmax_topk_renorm",
    "sigmoid_topk",
    "sigmoid_topk_renorm",
)
_erf: Final = np.vectorize(math.erf, otypes=[np.float32])


class Execution:
    """One execution of one function.

    Args:
        constants: Arrays of `sp.constant`.
        binding: Run-time lengths.
        caches: Rows in the key-value cache before the call, by layer.
    """

    def __init__(
        self, constants: ConstantTable, binding: Binding, caches: Caches | None = None
    ) -> None:
        self.constants = constants
        self.binding = binding
        self.caches: Caches = dict(caches or {})
        self.values: Run = {}

    def run(
        self, func: FuncOp, inputs: list[Array], overrides: Mapping[SSAValue, Array] | None = None
    ) -> Run:
        """Return every value of `func`; `overrides` replaces values once they are computed.

        Raises:
            KeyError: An operation has no entry.
        """
        changed = overrides or {}
        for argument, array in zip(func.body.block.args, inputs, strict=True):
            self.values[argument] = changed.get(argument, array)
        for op in func.body.block.ops:
            if isinstance(op, ReturnOp):
                continue
            with np.errstate(all="ignore"):
                results = OPERATIONS[_key(op)](op, self)
            for value, array in zip(op.results, results, strict=True):
                fitted = np.asarray(array).reshape(sizes_at(value, self.binding))
                self.values[value] = changed.get(value, fitted)
        return self.values

    def at(self, value: SSAValue) -> Array:
        """Return the array of a value."""
        return self.values[value]

    def arguments(self, op: Operation) -> list[Array]:
        """Return the arrays of all operands."""
        return [self.values[operand] for operand in op.operands]


Meaning = Callable[[Any, Execution], list[Array]]


def relu(x: Array) -> Array:
    """Return the positive part; NaN stays NaN."""
    return np.where(x > 0, x, np.where(np.isnan(x), x, x.dtype.type(0)))


def silu(x: Array) -> Array:
    """Return x * sigmoid(x)."""
    return np.asarray(x / (1 + np.exp(-x)))


def softmax(x: Array) -> Array:
    """Return the softmax of the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


ACTIVATIONS: Final[Mapping[str, Callable[[Array], Array]]] = {
    "none": lambda x: x,
    "relu": relu,
    "silu": silu,
}
ELEMENTWISE: Final[Mapping[str, Callable[[Array], Array]]] = {
    "relu": relu,
    "silu": silu,
    "sigmoid": lambda x: np.asarray(1 / (1 + np.exp(-x))),
    "gelu": lambda x: np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2)))),
    "gelu_tanh": lambda x: np.asarray(
        0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "neg": np.negative,
    "sqrt": np.sqrt,
    "reciprocal": np.reciprocal,
    "exp": np.exp,
    "tanh": np.tanh,
    "Abs": np.abs,
    "Ceil": np.ceil,
    "Cos": np.cos,
    "Erf": lambda x: np.asarray(_erf(x)),
    "Floor": np.floor,
    "Log": np.log,
    "Not": np.logical_not,
    "Round": np.round,
    "Sign": np.sign,
    "Sin": np.sin,
}
PAIRWISE: Final[Mapping[str, Callable[[Array, Array], Array]]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Equal": np.equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Max": np.maximum,
    "Min": np.minimum,
    "Pow": np.power,
}
_ONNX_NAMES: Final = {
    "relu": "Relu",
    "silu": "Swish",
    "gelu": "Gelu",
    "sigmoid": "Sigmoid",
    "neg": "Neg",
    "sqrt": "Sqrt",
    "reciprocal": "Reciprocal",
    "exp": "Exp",
    "tanh": "Tanh",
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
}


def _unary(op: Any, run: Execution) -> list[Array]:
    return [ELEMENTWISE[op.kind.data](run.at(op.x))]


def _binary(op: Any, run: Execution) -> list[Array]:
    result = PAIRWISE[op.kind.data](run.at(op.a), run.at(op.b))
    return [ACTIVATIONS[op.act.data](result)]


def _linear(op: Any, run: Execution) -> list[Array]:
    y = run.at(op.x) @ run.at(op.weight).T
    y = y if op.bias is None else y + run.at(op.bias)
    y = ACTIVATIONS[op.act.data](y)
    return [y if op.residual is None else y + run.at(op.residual)]


def _norm(op: Any, run: Execution) -> list[Array]:
    x = run.at(op.x)
    if op.kind.data == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(op.eps.value.data))
    y = x / scale * run.at(op.gamma)
    return [y if op.beta is None else y + run.at(op.beta)]


def _onnx_norm(op: Any, run: Execution) -> list[Array]:
    x = run.at(op.arguments[0])
    if op.op.data == "LayerNormalization":
        x = x - x.mean(axis=-1, keepdims=True)
    eps = np.float32(op.attrs.data["epsilon"].value.data)
    y = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * run.at(op.arguments[1])
    return [y if len(op.arguments) < 3 else y + run.at(op.arguments[2])]


def _conv2d(op: Any, run: Execution) -> list[Array]:
    m, weight = Window.of(op.parameters()), run.at(op.weight)
    x = run.at(op.x)
    images = x.reshape(-1, m.height, m.width, x.shape[-1])
    images = np.pad(images, ((0, 0), (m.top, m.bottom), (m.left, m.right), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(images, (m.kh, m.kw), axis=(1, 2))
    windows = windows[:, :: m.down, :: m.across]
    if op.is_depthwise:
        y = (windows.reshape(-1, *weight.shape) * weight).sum(axis=-1)
    else:
        y = windows.transpose(0, 1, 2, 4, 5, 3).reshape(-1, weight.shape[1]) @ weight.T
    y = y if op.bias is None else y + run.at(op.bias)
    return [ACTIVATIONS[op.act.data](y)]


def _slice(op: Any, run: Execution) -> list[Array]:
    axis, stride, first = op.axis.value.data, op.step.value.data, op.offset.at(run.binding)
    count = shape_of(op.result)[axis].at(run.binding)
    return [run.at(op.x).take(first + stride * np.arange(count), axis=axis)]


def _route(op: Any, run: Execution) -> list[Array]:
    if op.order.data not in ROUTE_ORDERS or op.options() or op.correction is not None:
        raise KeyError(op.order.data)
    logits = run.at(op.x) @ run.at(op.weight).T
    logits = logits if op.bias is None else logits + run.at(op.bias)
    index = np.argsort(-logits, axis=-1, kind="stable")[..., : op.k.value.data]
    if op.order.data == "topk_softmax":
        gate = softmax(np.take_along_axis(logits, index, axis=-1))
    else:
        shares = ELEMENTWISE["sigmoid"] if op.order.data.startswith("sigmoid") else softmax
        gate = np.take_along_axis(shares(logits), index, axis=-1)
    if op.order.data.endswith("renorm"):
        gate = gate / gate.sum(axis=-1, keepdims=True)
    return [index.astype(np.int64), gate]


def _experts(op: Any, run: Execution) -> list[Array]:
    if op.act.data not in ("relu", "swiglu", "reglu") or op.b_in is not None:
        raise KeyError(op.act.data)
    x, index, gate = (run.at(v).reshape(-1, v.type.get_shape()[-1]) for v in op.operands[:3])
    w_in, w_out = run.at(op.w_in), run.at(op.w_out)
    y = np.zeros_like(x)
    for row in range(len(x)):
        for expert, share in zip(index[row], gate[row], strict=True):
            h = w_in[expert] @ x[row]
            half = len(h) // 2
            if op.act.data == "relu":
                h = relu(h)
            else:
                h = (relu if op.act.data == "reglu" else silu)(h[:half]) * h[half:]
            y[row] += share * (w_out[expert] @ h)
    return [y]


def _rope(op: Any, run: Execution) -> list[Array]:
    x, freq = run.at(op.x), run.at(op.inv_freq)
    angle = run.at(op.positions)[..., None].astype(np.float32) * freq
    heads = x.reshape(*x.shape[:-1], op.heads.value.data, 2, len(freq))
    cos, sin = np.cos(angle)[..., None, :], np.sin(angle)[..., None, :]
    a, b = heads[..., 0, :], heads[..., 1, :]
    return [np.stack([a * cos - b * sin, b * cos + a * sin], axis=-2)]


def _kv_append(op: Any, run: Execution) -> list[Array]:
    old = run.caches[op.layer.value.data]
    new = tuple(
        np.concatenate([past, run.at(v)], axis=-2)
        for past, v in zip(old, (op.k, op.v), strict=True)
    )
    run.caches[op.layer.value.data] = (new[0], new[1])
    return list(new)


def _attention(op: Any, run: Execution) -> list[Array]:
    heads, kv_heads = op.heads.value.data, op.kv_heads.value.data
    q, k, v = (
        _by_head(run.at(x), n) for x, n in ((op.q, heads), (op.k, kv_heads), (op.v, kv_heads))
    )
    k, v = (np.repeat(x, heads // kv_heads, axis=-3) for x in (k, v))
    scores = (q @ np.swapaxes(k, -1, -2)) * np.float32(op.scale.value.data)
    if op.mask.data == "causal":
        rows, keys = scores.shape[-2:]
        seen = np.arange(keys)[None, :] <= np.arange(rows)[:, None] + keys - rows
        scores = np.where(seen, scores, -np.inf)
    y = softmax(scores.astype(np.float32)) @ v
    return [np.swapaxes(y, -2, -3)]


def _by_head(x: Array, heads: int) -> Array:
    return np.swapaxes(x.reshape(*x.shape[:-1], heads, -1), -2, -3)


def _attention_row(op: Any, run: Execution) -> list[Array]:
    q, k = (_by_head(run.at(x), op.heads.value.data) for x in (op.q, op.k))
    row = q[..., op.row.value.data, None, :]
    scores = row @ np.swapaxes(k, -1, -2) * np.float32(op.scale.value.data)
    return [softmax(scores).mean(axis=-3)]


def _prune(op: Any, run: Execution) -> list[Array]:
    tokens, score = run.at(op.operands[0]), run.at(op.operands[1])
    k, count = shape_of(op.results[0])[-2].at(run.binding), tokens.shape[-2]
    if isinstance(op, OnnxOp):
        offset, score = 1, score.mean(axis=1)[0]
    else:
        offset, score = op.score_offset.value.data, score.reshape(-1)
    order = np.argsort(-score.reshape(-1)[offset : offset + count], kind="stable")
    kept = np.sort(order[:k])
    return [tokens.take(kept, axis=-2), kept.astype(np.int64)]


def _attention_score(op: Any, run: Execution) -> list[Array]:
    q, k = (_by_head(run.at(x), op.heads.value.data) for x in (op.q, op.k))
    first, row = op.first.value.data, op.row.value.data
    q = q[..., first:, :] if row < 0 else q[..., row : row + 1, :]
    scores = q @ np.swapaxes(k[..., first:, :], -1, -2) * np.float32(op.scale.value.data)
    p = softmax(scores).mean(axis=-2).reshape(op.heads.value.data, -1)
    entropy = -(p * np.log(np.maximum(p, np.finfo(np.float32).tiny))).sum(axis=-1)
    weights = np.maximum(0, 1 - entropy / np.log(np.float32(max(2, p.shape[-1]))))
    total = weights.sum()
    if not total > 0:
        return [np.full(p.shape[-1], np.float32(1) / p.shape[-1], np.float32)]
    return [(weights @ p) / total]


def _prune_top_p(op: Any, run: Execution) -> list[Array]:
    """Without merging: the fewest tokens that hold p of the scores, then rows of zeros."""
    if op.merge.value.data:
        raise KeyError("merge")
    tokens, score = run.at(op.tokens), run.at(op.score).reshape(-1)
    order, rows = np.argsort(-score, kind="stable"), shape_of(op.kept)[-2].constant
    held = np.cumsum(score[order])
    enough = int(np.searchsorted(held, np.float32(op.p.value.data) * held[-1])) + 1
    count = min(max(enough, op.min_keep.value.data), op.max_keep.value.data)
    kept = np.sort(order[:count])
    fill = [(0, 0)] * (tokens.ndim - 2) + [(0, rows - count), (0, 0)]
    moved = np.pad(tokens.take(kept, axis=-2), fill)
    return [moved, np.pad(kept, (0, rows - count)), np.array([[count]])]


def _clip(op: Any, run: Execution) -> list[Array]:
    bounds = [op.operand_at(at) for at in (1, 2)]
    low, high = (None if b is None else run.at(b) for b in bounds)
    return [np.clip(run.at(op.arguments[0]), low, high)]


def _threshold(op: Any, run: Execution) -> list[Array]:
    x, alpha = run.at(op.arguments[0]), op.attrs.data["alpha"].value.data
    return [np.where(x > alpha, x, np.float32(0))]


def _leaky(op: Any, run: Execution) -> list[Array]:
    x = run.at(op.arguments[0])
    return [np.where(x >= 0, x, np.float32(op.attrs.data["alpha"].value.data) * x)]


def _cast(op: Any, run: Execution) -> list[Array]:
    names = {1: np.float32, 6: np.int32, 7: np.int64, 9: np.bool_}
    return [run.at(op.arguments[0]).astype(names[op.attrs.data["to"].value.data])]


def _gather(op: Any, run: Execution) -> list[Array]:
    table, index = run.arguments(op)
    return [table.take(index.astype(np.int64), axis=op.attrs.data["axis"].value.data)]


def _scatter(op: Any, run: Execution) -> list[Array]:
    data, index, updates = run.arguments(op)
    y = data.copy()
    np.put_along_axis(y, index.astype(np.int64), updates, axis=op.attrs.data["axis"].value.data)
    return [y]


def _topk(op: Any, run: Execution) -> list[Array]:
    x, k = run.at(op.arguments[0]), shape_of(op.outputs[0])[-1].at(run.binding)
    index = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    return [np.take_along_axis(x, index, axis=-1), index.astype(np.int64)]


def _trilu(op: Any, run: Execution) -> list[Array]:
    shift = int(run.at(op.arguments[1]).reshape(-1)[0]) if len(op.arguments) > 1 else 0
    keep = np.triu if op.attrs.data["upper"].value.data else np.tril
    return [keep(run.at(op.arguments[0]), shift)]


def _reduce(function: Callable[..., Array]) -> Meaning:
    def meaning(op: Any, run: Execution) -> list[Array]:
        axes, keep = op.attrs.data.get("axes"), op.attrs.data.get("keepdims")
        chosen = None
        if isinstance(axes, ArrayAttr):  # as the importer writes them
            chosen = tuple(int(item.value.data) for item in axes.data)
        elif axes is not None:
            chosen = tuple(int(a) for a in axes.get_values())
        keepdims = keep is not None and bool(keep.value.data)
        return [function(run.at(op.arguments[0]), axis=chosen, keepdims=keepdims)]

    return meaning


def _apply(function: Callable[..., Array]) -> Meaning:
    def meaning(op: Any, run: Execution) -> list[Array]:
        return [function(*run.arguments(op))]

    return meaning


OPERATIONS: Final[Mapping[str, Meaning]] = {
    "sp.constant": lambda op, run: [run.constants.of(op)],
    "sp.unary": _unary,
    "sp.binary": _binary,
    "sp.linear": _linear,
    "sp.from_dense": lambda op, run: [run.at(op.x)],
    "sp.to_dense": lambda op, run: [run.at(op.x)],
    "sp.matmul": lambda op, run: [run.at(op.a) @ run.at(op.b)],
    "sp.norm": _norm,
    "sp.conv2d": _conv2d,
    "sp.softmax": lambda op, run: [softmax(run.at(op.x))],
    "sp.embed": lambda op, run: [run.at(op.table)[run.at(op.ids)]],
    "sp.image": lambda op, run: [
        run.at(op.pixels).astype(np.float32) / np.float32(op.divide.value.data)
        - np.float32(op.subtract.value.data)
    ],
    "sp.argmax": lambda op, run: [run.at(op.x).argmax(axis=-1)],
    "sp.reshape": lambda op, run: [run.at(op.x)],
    "sp.expand": lambda op, run: [np.broadcast_to(run.at(op.x), sizes_at(op.result, run.binding))],
    "sp.transpose": lambda op, run: [
        run.at(op.x).transpose([int(p) for p in op.perm.get_values()])
    ],
    "sp.slice": _slice,
    "sp.concat": lambda op, run: [np.concatenate(run.arguments(op), axis=op.axis.value.data)],
    "moe.route": _route,
    "moe.experts": _experts,
    "mm.rope": _rope,
    "mm.kv_append": _kv_append,
    "mm.attention": _attention,
    "mm.attention_row": _attention_row,
    "mm.attention_score": _attention_score,
    "mm.prune": _prune,
    "mm.prune_top_p": _prune_top_p,
    "mm.splice": lambda op, run: run.arguments(op),
    "sp.onnx:Clip": _clip,
    "sp.onnx:ThresholdedRelu": _threshold,
    "sp.onnx:LeakyRelu": _leaky,
    "sp.onnx:Cast": _cast,
    "sp.onnx:Gather": _gather,
    "sp.onnx:Identity": lambda op, run: run.arguments(op),
    "sp.onnx:LayerNormalization": _onnx_norm,
    "sp.onnx:RMSNormalization": _onnx_norm,
    "sp.onnx:MatMul": lambda op, run: [run.at(op.arguments[0]) @ run.at(op.arguments[1])],
    "sp.onnx:ScatterElements": _scatter,
    "sp.onnx:Softmax": lambda op, run: [softmax(run.at(op.arguments[0]))],
    "sp.onnx:TopK": _topk,
    "sp.onnx:Trilu": _trilu,
    "sp.onnx:Where": lambda op, run: [np.where(*run.arguments(op))],
    "sp.onnx:ai.sparsefleet::DynamicPrune": _prune,
    "sp.onnx:ReduceMax": _reduce(np.max),
    "sp.onnx:ReduceMean": _reduce(np.mean),
    "sp.onnx:ReduceMin": _reduce(np.min),
    "sp.onnx:ReduceSum": _reduce(np.sum),
    **{f"sp.onnx:{_ONNX_NAMES.get(name, name)}": _apply(f) for name, f in ELEMENTWISE.items()},
    **{f"sp.onnx:{_ONNX_NAMES.get(name, name)}": _apply(f) for name, f in PAIRWISE.items()},
}


def _key(op: Operation) -> str:
    return f"{op.name}:{op.op.data}" if isinstance(op, OnnxOp) else op.name
