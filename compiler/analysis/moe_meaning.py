"""What `moe.route` and `moe.experts` mean, written as mathematics in f64.

The judge of raised operations compares ONNX Runtime with this; kernels and simulator have their own
implementations, held against it by tests.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_erf: Final = np.frompyfunc(math.erf, 1, 1)


@dataclass(frozen=True, eq=False)
class Router:
    """A router: logits are `x @ weight^T + bias`.

    Attributes:
        weight: (E, D).
        order: One of `dialects.moe.ROUTE_ORDERS`.
        options: groups, top_groups, group_take, scale, jitter, where not neutral.
        correction: (E,), added to sigmoid scores for the choice alone.
    """

    weight: Array
    bias: Array | None
    k: int
    order: str
    options: Mapping[str, float] = field(default_factory=dict)
    correction: Array | None = None


@dataclass(frozen=True, eq=False)
class Experts:
    """Stacks of experts: w_in (E, N, D), w_out (E, D, F), biases (E, N) and (E, D) or None.

    Attributes:
        act: One of `dialects.moe.EXPERT_ACTS`; gated ones have N = 2F, gate rows first.
        options: alpha, limit, shift of swiglu_clipped.
    """

    w_in: Array
    w_out: Array
    b_in: Array | None
    b_out: Array | None
    act: str
    options: Mapping[str, float] = field(default_factory=dict)


def _sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.asarray(1.0 / (1.0 + np.exp(-x)))


def _softmax(x: Array) -> Array:
    terms = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(terms / terms.sum(axis=-1, keepdims=True))


def _best(scores: Array, k: int) -> Array:
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]


def route(router: Router, x: Array) -> tuple[Array, Array, Array]:
    """Return chosen experts (T, k), gates (T, k) and by how little each row's choice was won (T,).

    Args:
        router: What to compute.
        x: (T, D).
    """
    logits = x.astype(np.float64) @ router.weight.astype(np.float64).T
    if router.bias is not None:
        logits = logits + router.bias
    index, gate, scores = _CHOICES[router.order](router, logits)
    order = -np.sort(-scores, axis=-1)
    gaps = order[:, : router.k] - order[:, 1 : router.k + 1]
    margin = gaps.min(axis=-1) if gaps.shape[1] == router.k else gaps.min(axis=-1, initial=np.inf)
    scale = router.options.get("scale", 0.0)
    return index, gate * scale if scale else gate, margin


Choice = tuple[Array, Array, Array]


def _topk_softmax(router: Router, logits: Array) -> Choice:
    index = _best(logits, router.k)
    return index, _softmax(np.take_along_axis(logits, index, axis=1)), logits


def _softmax_topk(router: Router, logits: Array) -> Choice:
    scores = _softmax(logits)
    index = _best(scores, router.k)
    return index, np.take_along_axis(scores, index, axis=1), scores


def _sigmoid_topk(router: Router, logits: Array) -> Choice:
    scores = _sigmoid(logits)
    choice = scores if router.correction is None else scores + router.correction
    choice = _limited(router, choice)
    index = _best(choice, router.k)
    return index, np.take_along_axis(scores, index, axis=1), choice


def _limited(router: Router, choice: Array) -> Array:
    groups = int(router.options.get("groups", 0))
    if not groups:
        return choice
    split = choice.reshape(len(choice), groups, -1)
    take = int(router.options["group_take"])
    sums = (-np.sort(-split, axis=-1))[..., :take].sum(axis=-1)
    kept = np.zeros(sums.shape, bool)
    np.put_along_axis(kept, _best(sums, int(router.options["top_groups"])), values=True, axis=1)
    return np.where(kept[:, :, None], split, -np.inf).reshape(choice.shape)


def _renormalised(choose: Callable[[Router, Array], Choice]) -> Callable[[Router, Array], Choice]:
    def run(router: Router, logits: Array) -> Choice:
        index, gate, scores = choose(router, logits)
        return index, gate / gate.sum(axis=1, keepdims=True), scores

    return run


def _sparsemixer(router: Router, logits: Array) -> Choice:
    left = logits.copy()
    jitter = router.options.get("jitter", 0.0)
    columns = []
    for _ in range(router.k):
        chosen = _best(left, 1)
        top = np.take_along_axis(left, chosen, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            far = (top - logits) / np.maximum(np.abs(logits), top) > jitter
        gates = _softmax(np.where(far, -np.inf, left))
        columns.append((chosen, np.take_along_axis(gates, chosen, axis=1)))
        np.put_along_axis(left, chosen, -np.inf, axis=1)
    index, gate = (np.concatenate(part, axis=1) for part in zip(*columns, strict=True))
    return index, gate, logits


_CHOICES: Final[Mapping[str, Callable[[Router, Array], Choice]]] = MappingProxyType(
    {
        "topk_softmax": _topk_softmax,
        "softmax_topk": _softmax_topk,
        "softmax_topk_renorm": _renormalised(_softmax_topk),
        "sparsemixer": _sparsemixer,
        "sigmoid_topk": _sigmoid_topk,
        "sigmoid_topk_renorm": _renormalised(_sigmoid_topk),
    }
)


def mix(experts: Experts, x: Array, index: Array, gate: Array) -> Array:
    """Return (T, D): for each row the gated sum of its chosen experts.

    Args:
        experts: What to compute.
        x: (T, D).
        index: (T, k) expert ids.
        gate: (T, k).
    """
    rows = x.astype(np.float64)
    y = np.zeros((len(x), experts.w_out.shape[1]))
    for expert in np.unique(index):
        tokens, slots = np.nonzero(index == expert)
        wide = rows[tokens] @ experts.w_in[expert].astype(np.float64).T
        if experts.b_in is not None:
            wide = wide + experts.b_in[expert]
        out = _ACTS[experts.act](experts, wide) @ experts.w_out[expert].astype(np.float64).T
        if experts.b_out is not None:
            out = out + experts.b_out[expert]
        np.add.at(y, tokens, gate[tokens, slots, None] * out)
    return y


def _swiglu_clipped(experts: Experts, wide: Array) -> Array:
    gate, up = np.split(wide, 2, axis=1)
    limit = experts.options.get("limit", 0.0)
    if limit:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    swish = gate * _sigmoid(experts.options.get("alpha", 0.0) * gate)
    return np.asarray(swish * (up + experts.options.get("shift", 0.0)))


def _swiglu(_: Experts, wide: Array) -> Array:
    gate, up = np.split(wide, 2, axis=1)
    return np.asarray(gate * _sigmoid(gate) * up)


def _reglu(_: Experts, wide: Array) -> Array:
    gate, up = np.split(wide, 2, axis=1)
    return np.asarray(np.maximum(gate, 0.0) * up)


def _gelu_tanh(_: Experts, x: Array) -> Array:
    return np.asarray(x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


_ACTS: Final[Mapping[str, Callable[[Experts, Array], Array]]] = MappingProxyType(
    {
        "relu": lambda _, x: np.maximum(x, 0.0),
        "silu": lambda _, x: x * _sigmoid(x),
        "identity": lambda _, x: x,
        "gelu": lambda _, x: x / 2 * (1 + np.asarray(_erf(x / math.sqrt(2)), np.float64)),
        "gelu_tanh": _gelu_tanh,
        "swiglu": _swiglu,
        "swiglu_clipped": _swiglu_clipped,
        "reglu": _reglu,
    }
)
