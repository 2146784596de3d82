"""ROUTE and EXPERTS over numpy arrays; rows of `operations.OPERATIONS` name `route` and `experts`.

Reductions, rounding and ties follow the C templates; see there for the equations.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.expert_pages import Expert
from compiler.contract.moe_rules import expert_kinds
from compiler.contract.native_errors import BadIndexError, NotFiniteError
from compiler.contract.operations import GATED, SIGMOID_ORDERS, ExpertAct, RouteOrder
from compiler.contract.steering import NO_EXPERT
from compiler.kernels.constants import GELU
from compiler.simulator.numerics import Numerics, relu, silu, tanh
from compiler.simulator.steering import RouterSteering
from compiler.simulator.step import Results, Step, best, softmax_terms

Array = NDArray[Any]

_UNSUMMED: Final = frozenset({RouteOrder.SOFTMAX_TOPK, RouteOrder.SIGMOID_TOPK})
_SOFTMAX_FIRST: Final = frozenset({RouteOrder.SOFTMAX_TOPK, RouteOrder.SOFTMAX_TOPK_RENORM})
_erf: Final = np.frompyfunc(math.erf, 1, 1)


def route(s: Step) -> Results:
    """Choose k experts per row and their gates; measure the entropy if a result takes it."""
    k, order, bias = s.number("k"), s.number("order"), s.maybe_constant(1)
    logits = s.numerics.dot_rows(s.source(0), s.constant(0))
    if bias is not None:
        logits = logits + bias
    if not np.isfinite(logits).all():
        raise NotFiniteError("a logit of a router is infinite or NaN")
    measured = (_entropy(s, logits),) if len(s.sizes) > 2 else ()
    scores = choice = logits if order == RouteOrder.SPARSEMIXER else _scores(s, logits, order)
    gone = None
    if order in SIGMOID_ORDERS:
        correction = s.maybe_constant(2)
        choice = scores if correction is None else scores + correction
        gone = _outside_groups(s, choice)
    index = best(choice, k, gone)
    if s.steers.record is not None and s.mixes is not None:
        by = choice if order in SIGMOID_ORDERS else logits
        return *_steered(s, _Routed(scores, choice, by, gone, index)), *measured
    return index.astype(np.int32), _gates(s, scores, index), *measured


@dataclass(frozen=True, slots=True)
class _Routed:
    """Rows of a router (R, E), and its own choice (R, k).

    Attributes:
        scores: What gates are made of.
        choice: What experts are chosen by.
        by: The same before a softmax.
        gone: What lies outside the groups, if there are any.
    """

    scores: Array
    choice: Array
    by: Array
    gone: Array | None
    index: Array


def _steered(s: Step, routed: _Routed) -> tuple[Array, Array]:
    """Return the choice under the steering record, and its gates; -1 and 0 where it is short."""
    assert s.mixes is not None
    assert s.steers.record is not None
    steering = RouterSteering(s.steers, s.steers.record, s.weight_ids[0], s.mixes, s.numerics)
    index, gate = np.empty_like(routed.index), np.zeros(routed.index.shape, s.numerics.dtype)
    for at, scores in enumerate(routed.scores):

        def rule(chosen: Array, scores: Array = scores) -> Array:
            return np.asarray(_gates(s, scores[None], chosen[None])[0])

        gone = None if routed.gone is None else routed.gone[at]
        row = steering.row(routed.by[at], routed.choice[at], gone, routed.index[at], rule)
        taken = row[row >= 0]
        index[at] = row
        if len(taken):
            gate[at, : len(taken)] = rule(taken)
    return index.astype(np.int32), gate


def _gates(s: Step, scores: Array, index: Array) -> Array:
    """Return the gates (R, k) of what was chosen, best first, by the rule of the order."""
    order = s.number("order")
    if order == RouteOrder.SPARSEMIXER:
        return _scaled(s, _mixer_gates(s, scores, index))
    gate = np.take_along_axis(scores, index, axis=1)
    if order == RouteOrder.TOPK_SOFTMAX:
        gate = s.numerics.exp(gate - gate[:, :1])
    if order not in _UNSUMMED:
        gate = np.asarray(gate / _in_order(s, gate)[:, None])
    return _scaled(s, gate)


def _entropy(s: Step, logits: Array) -> Array:
    """Return entropies (R, 1) of the softmax over all logits, nats."""
    terms, total = softmax_terms(s, logits)
    mean = s.numerics.total(terms * logits)[:, None] / total
    top = logits.max(axis=1, keepdims=True)
    entropy = (top + s.numerics.log(total)) - mean
    return np.asarray(np.where(entropy <= 0, s.numerics.dtype(0), entropy))


def _scores(s: Step, logits: Array, order: int) -> Array:
    if order in SIGMOID_ORDERS:
        return np.asarray(1 / (1 + s.numerics.exp(-logits)))
    if order in _SOFTMAX_FIRST:
        terms, total = softmax_terms(s, logits)
        return np.asarray(terms / total)
    return logits


def _scaled(s: Step, gate: Array) -> Array:
    scale = s.real("scale")
    return np.asarray(gate * scale) if scale else gate


def _in_order(s: Step, values: Array) -> Array:
    """Return sums over the last axis, first to last."""
    total = np.zeros(values.shape[:-1], s.numerics.dtype)
    for at in range(values.shape[-1]):
        total = total + values[..., at]
    return total


def _outside_groups(s: Step, choice: Array) -> Array | None:
    """Return flags of what lies outside the best groups; None without groups."""
    groups = s.number("groups")
    if not groups:
        return None
    split = choice.reshape(len(choice), groups, -1)
    top = np.take_along_axis(split, best(split, s.number("group_take")), axis=-1)
    kept = best(_in_order(s, top), s.number("top_groups"))
    outside = np.ones((len(choice), groups), bool)
    np.put_along_axis(outside, kept, values=False, axis=1)
    return outside.repeat(split.shape[-1], axis=1)


def _mixer_gates(s: Step, logits: Array, index: Array) -> Array:
    """Return for each chosen expert its share among those near it that are not better."""
    gone, columns = np.zeros(logits.shape, bool), []
    for chosen in np.split(index, index.shape[1], axis=1):
        top = np.take_along_axis(logits, chosen, axis=1)
        better = (logits > top) | (np.isnan(top) & ~np.isnan(logits))
        with np.errstate(divide="ignore", invalid="ignore"):
            far = (top - logits) / np.maximum(np.abs(logits), top) > s.real("jitter")
        near = np.where(far | gone | better, s.numerics.dtype(-np.inf), logits)
        _, total = softmax_terms(s, near)
        columns.append(s.numerics.dtype(1) / total)
        np.put_along_axis(gone, chosen, values=True, axis=1)
    return np.concatenate(columns, axis=1)


def experts(s: Step) -> Results:
    """Run the chosen experts of each row and add up their gated results."""
    x, index, gate = s.source(0), s.source(1), s.source(2)
    stride = len(expert_kinds(s.number("biases")))
    count = len(s.weight_ids) // stride
    least = 0 if s.steers.record is None else NO_EXPERT
    if ((index < least) | (index >= count)).any():
        raise BadIndexError(f"an expert is outside [0, {count})")
    rows, scale = s.numerics.quantise(x)
    y = np.zeros_like(x)
    for expert in np.unique(index[index >= 0]):
        first = stride * int(expert)
        w_in, w_out = s.weight_ids[first], s.weight_ids[first + 1]
        s.pages.use(w_in)
        s.ran.add(w_in)
        for slot in range(index.shape[1]):
            at = np.flatnonzero(index[:, slot] == expert)
            if not len(at):
                continue
            wide = s.numerics.linear(rows[at], scale[at], w_in)
            if s.number("biases"):
                wide = wide + s.constant(first + 2)
            hidden = _HIDDEN[s.number("act")](s, wide)
            weight = gate[at, slot, None]
            y[at] += weight * s.numerics.linear(*s.numerics.quantise(hidden), w_out)
            if s.number("biases"):
                y[at] += weight * s.constant(first + 3)
    s.pages.release(_pages(s))
    return (y,)


def expert_prefetch(s: Step, chosen: Array | None = None) -> Results:
    """Say which experts are likely: those chosen, by position, or all that are named."""
    named = _pages(s)
    s.pages.prefetch(named if chosen is None else [named[at] for at in chosen])
    return ()


def expert_load(s: Step) -> Results:
    """Have the experts of the next routed call in memory."""
    s.pages.load(_pages(s))
    return ()


def _pages(s: Step) -> list[Expert]:
    """Return the experts of a call whose weights are all theirs."""
    stride = len(expert_kinds(s.number("biases")))
    return [s.weight_ids[at : at + stride] for at in range(0, len(s.weight_ids), stride)]


def _swiglu(s: Step, wide: Array) -> Array:
    gate, up = np.split(wide, 2, axis=1)
    return np.asarray(silu(s.numerics, gate) * up)


def _swiglu_clipped(s: Step, wide: Array) -> Array:
    gate, up = np.split(wide, 2, axis=1)
    limit = s.real("limit")
    if limit:
        gate = np.where(gate > limit, limit, gate)
        up = np.where(up > limit, limit, np.where(up < -limit, -limit, up))
    swish = gate / (1 + s.numerics.exp(-s.real("alpha") * gate))
    return np.asarray(swish * (up + s.real("shift")))


def _reglu(s: Step, wide: Array) -> Array:
    gate, up = np.split(wide, 2, axis=1)
    return np.where(gate <= 0, s.numerics.dtype(0), gate * up)


def gelu(s: Step, x: Array) -> Array:
    """Return x / 2 * (1 + erf(x / sqrt 2)), elementwise."""
    one, half = s.numerics.dtype(1), s.numerics.dtype(0.5)
    return np.asarray(
        (x * half) * (one + _erf_of(s.numerics, x * s.numerics.dtype(GELU.inverse_root)))
    )


def _erf_of(numerics: Numerics, z: Array) -> Array:
    """Return erf(z): the polynomial of the C kernel in f32, the function itself in f64."""
    if numerics.dtype is np.float64:
        return np.asarray(_erf(z), np.float64)
    one, size = numerics.dtype(1), np.abs(z)
    t = one / (one + numerics.dtype(GELU.erf_p) * size)
    y = np.full_like(t, GELU.erf_terms[0])
    for term in GELU.erf_terms[1:]:
        y = y * t + numerics.dtype(term)
    y = one - (y * t) * numerics.exp(-(size * size))
    return np.asarray(np.copysign(y, z))


def gelu_tanh(s: Step, x: Array) -> Array:
    """Return the form of GELU with tanh, elementwise."""
    one, half = s.numerics.dtype(1), s.numerics.dtype(0.5)
    scale, cube = s.numerics.dtype(GELU.tanh_scale), s.numerics.dtype(GELU.tanh_cube)
    return np.asarray((x * half) * (one + tanh(s.numerics, scale * (x + cube * ((x * x) * x)))))


_HIDDEN: Final[Mapping[int, Callable[[Step, Array], Array]]] = MappingProxyType(
    {
        ExpertAct.RELU: lambda _, wide: relu(wide),
        ExpertAct.SWIGLU: _swiglu,
        ExpertAct.GELU: gelu,
        ExpertAct.GELU_TANH: gelu_tanh,
        ExpertAct.SILU: lambda s, wide: silu(s.numerics, wide),
        ExpertAct.IDENTITY: lambda _, wide: wide,
        ExpertAct.SWIGLU_CLIPPED: _swiglu_clipped,
        ExpertAct.REGLU: _reglu,
    }
)
assert {ExpertAct(act) for act in _HIDDEN} == set(ExpertAct) >= GATED
