"""What each operation computes, over numpy arrays, for either arithmetic.

Every function takes a `Step` and returns its results in output order. Reductions, rounding and ties
follow the C templates; see there for the equations.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.moe_rules import FIRST_EXPERT, MOST_FORESEEN_ROWS
from compiler.contract.native_errors import BadIndexError, BadTokenError
from compiler.contract.operand_rules import MASK_BITS, complete_params
from compiler.contract.operations import NormKind, Op, PackedKind, UnaryKind
from compiler.contract.plan_format import GROUP
from compiler.simulator import experts as moe
from compiler.simulator.attention import attention, attention_row, heads_of, rope
from compiler.simulator.convolution import conv2d, depthwise, sparse_conv
from compiler.simulator.numerics import act, relu, silu, tanh
from compiler.simulator.pruning import (
    TopP,
    keep_top_p,
    looked_at,
    merged_tokens,
    weighted_scores,
)
from compiler.simulator.recurrent import recurrent, recurrent_f32
from compiler.simulator.reference import REFERENCE
from compiler.simulator.step import Cache, Results, Step, best, softmax_terms, taken

__all__ = ["OPERATIONS", "Array", "Cache", "Results", "Step"]

Array = NDArray[Any]


def _image_u8(s: Step) -> Results:
    pixels = s.source(0).astype(s.numerics.dtype)
    return (pixels / s.real("divide") - s.real("subtract"),)


def _embed(s: Step) -> Results:
    table = s.constant(0)
    return (table[taken(s.source(0), len(table), BadTokenError, "token id")],)


def _finish(s: Step, y: Array) -> Results:
    bias, residual = s.maybe_constant(1), s.maybe_source(1)
    if bias is not None:
        y = y + bias
    y = act(s.numerics, s.number("act"), y)
    return (y if residual is None else residual + y,)


def _linear(s: Step) -> Results:
    x, scale = s.numerics.quantise(_normed(s))
    return _finish(s, s.numerics.linear(x, scale, s.weight_ids[0], _live_columns(s, x)))


def _linear_w8(s: Step) -> Results:
    x, scale = s.numerics.quantise(_normed(s), s.real("x_step"))
    return _finish(s, s.numerics.linear(x, scale, s.weight_ids[0]))


def _live_columns(s: Step, x: Array) -> Array | None:
    """Return the columns of the live groups if the call's check holds, None if not or without."""
    most = s.number("check")
    if not most:
        return None
    groups = np.unique(np.nonzero(x)[1] // GROUP)
    held = len(groups) <= most
    s.checked(held)
    if not held:
        return None
    columns = np.arange(x.shape[1])
    return columns[np.isin(columns // GROUP, groups)]


def _linear_f32(s: Step) -> Results:
    return _finish(s, s.numerics.dot_rows(_normed(s), s.constant(0)))


def _normed(s: Step) -> Array:
    """Return what a linear operation multiplies: x, or its norm."""
    norm = s.number("norm")
    if not norm:
        return s.source(0)
    params = {"kind": norm - 1, "eps": s.params["eps"]}
    return _norm(replace(s, weights=s.weights[2:], params=params))[0]


def _moe_layer(s: Step) -> Results:
    (h,) = _norm(replace(s, weights=s.weights[:2]))
    routed = complete_params(Op.ROUTE, {name: s.params[name] for name in ("k", "order")})
    index, gate, *entropy = moe.route(
        replace(
            s,
            inputs=(h,),
            weights=s.weights[2:4],
            weight_ids=s.weight_ids[2:4],
            params=routed,
            sizes=s.sizes[1:],
        )
    )
    mixed = replace(
        s,
        inputs=(h, index, gate),
        weights=s.weights[4:],
        weight_ids=s.weight_ids[4:],
        params=complete_params(Op.EXPERTS, {"act": s.params["act"]}),
    )
    (y,) = moe.experts(mixed)
    return (s.source(0) + y if s.number("residual") else y), index, gate, *entropy


def _expert_foresee(s: Step) -> Results:
    """Tell whom the router would choose of rows that are known before its layer."""
    x, first = s.source(0), FIRST_EXPERT[Op.EXPERT_FORESEE]
    if s.pages.pager is None or len(x) > MOST_FORESEEN_ROWS:
        return ()
    if s.maybe_constant(0) is not None:
        (x,) = _norm(replace(s, weights=s.weights[:2]))
    names = ("k", "order", "groups", "top_groups", "group_take")
    index, _ = moe.route(
        replace(
            s,
            inputs=(x,),
            weights=s.weights[2:first],
            weight_ids=s.weight_ids[2:first],
            params=complete_params(Op.ROUTE, {name: s.params[name] for name in names}),
            steers=s.steers.apart(),
        )
    )
    moe.expert_prefetch(replace(s, weight_ids=s.weight_ids[first:]), np.unique(index[index >= 0]))
    return ()


def _norm(s: Step) -> Results:
    x, gamma, beta = s.source(0), s.constant(0), s.maybe_constant(1)
    one, size = s.numerics.dtype(1), s.numerics.dtype(x.shape[1])
    if s.number("kind") == NormKind.LAYER:
        x = x - (s.numerics.total(x) / size)[:, None]
    inverse = one / np.sqrt(s.numerics.total(x * x) / size + s.real("eps"))
    y = (x * inverse[:, None]) * gamma
    return (y if beta is None else y + beta,)


def _prune(s: Step) -> Results:
    x, first = s.source(0), s.number("score_offset")
    kept = np.sort(best(s.source(1)[first : first + len(x), 0], s.number("k")))
    return x[kept], kept[:, None].astype(np.int32)


def _attention_score(s: Step) -> Results:
    heads, row, first = s.number("heads"), s.number("row"), s.number("first")
    q = s.source(0)[first:] if row < 0 else s.source(0)[row : row + 1]
    k = heads_of(s.source(1)[first:], heads)
    shares = looked_at(s.numerics, heads_of(q, heads), k, s.real("scale"))
    return (weighted_scores(s.numerics, shares)[:, None],)


def _prune_top_p(s: Step) -> Results:
    x, score, rule = s.source(0), s.source(1)[:, 0], TopP.of(s.params)
    kept, into = keep_top_p(s.numerics, score, rule)
    rows, keys = x.copy(), s.maybe_source(2)
    if keys is not None:
        first = s.number("key_offset")
        keys = keys[first : first + len(x)]
        rows[into] = merged_tokens(s.numerics, x, score, keys, kept, into)
    index = np.sort(np.concatenate([kept, into]))
    most = min(len(x), rule.max_keep + rule.merge)
    out, places = np.zeros((most, x.shape[1]), x.dtype), np.zeros((most, 1), np.int32)
    out[: len(index)], places[: len(index), 0] = rows[index], index
    return out, places, np.array([[len(index)]], np.int32)


def _rows_concat(s: Step) -> Results:
    constant = s.maybe_constant(0)
    parts = [constant if part is None else part for part in (s.inputs[0], s.maybe_source(1))]
    return (np.concatenate([part for part in parts if part is not None]),)


def _rows_slice(s: Step) -> Results:
    x, start, count = s.source(0), s.number("start"), s.number("count")
    if start == -1:
        return (x[-1:],)
    return (x[start:] if count == -1 else x[start : start + count],)


def _binary(operator: Callable[[Array, Array], Array]) -> Callable[[Step], Results]:
    def run(s: Step) -> Results:
        b = s.maybe_source(1)
        y = operator(s.source(0), s.constant(0) if b is None else b)
        return (act(s.numerics, s.number("act"), y),)

    return run


def _pack(s: Step) -> Results:
    x = act(s.numerics, s.number("act"), s.source(0))
    kept = (x != 0) | np.signbit(x)
    values = np.zeros_like(x)
    for row, flags, to in zip(x, kept, values, strict=True):
        to[: flags.sum()] = row[flags]
    padded = np.zeros((len(x), -(-x.shape[1] // MASK_BITS) * MASK_BITS), bool)
    padded[:, : x.shape[1]] = kept
    return values, np.packbits(padded, axis=1, bitorder="little").view("<i4")


def _packed(s: Step) -> Results:
    kind, values = s.number("kind"), s.source(0)
    words = np.ascontiguousarray(s.source(1).astype("<i4"))
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=values.shape[1], bitorder="little")
    x = np.zeros_like(values)
    for to, flags, row in zip(x, bits.astype(bool), values, strict=True):
        to[flags] = row[: flags.sum()]
    if kind in _PACKED_NORMS:
        params = {"kind": _PACKED_NORMS[kind], "eps": s.params["eps"]}
        return _norm(replace(s, inputs=(x,), params=params))
    given = s.maybe_source(2) if s.maybe_source(2) is not None else s.maybe_constant(0)
    y = _PACKED_BINARIES[kind](x, x if given is None else given)
    return (act(s.numerics, s.number("act"), np.asarray(y)),)


_PACKED_NORMS: Final[Mapping[int, NormKind]] = MappingProxyType(
    {PackedKind.RMS: NormKind.RMS, PackedKind.LAYER: NormKind.LAYER}
)
_PACKED_BINARIES: Final[Mapping[int, Callable[[Array, Array], Array]]] = MappingProxyType(
    {PackedKind.ADD: np.add, PackedKind.MUL: np.multiply, PackedKind.SUB: np.subtract}
)
_UNARY: Final[Mapping[int, Callable[[Step, Array], Array]]] = MappingProxyType(
    {
        UnaryKind.RELU: lambda _, x: relu(x),
        UnaryKind.SIGMOID: lambda s, x: 1 / (1 + s.numerics.exp(-x)),
        UnaryKind.SILU: lambda s, x: silu(s.numerics, x),
        UnaryKind.NEG: lambda _, x: -x,
        UnaryKind.SQRT: lambda _, x: np.sqrt(x),
        UnaryKind.RECIPROCAL: lambda _, x: 1 / x,
        UnaryKind.EXP: lambda s, x: s.numerics.exp(x),
        UnaryKind.TANH: lambda s, x: tanh(s.numerics, x),
        UnaryKind.GELU: moe.gelu,
        UnaryKind.GELU_TANH: moe.gelu_tanh,
    }
)


def _unary(s: Step) -> Results:
    return (_UNARY[s.number("kind")](s, s.source(0)),)


def _softmax(s: Step) -> Results:
    terms, total = softmax_terms(s, s.source(0))
    return (terms / total,)


def _argmax(s: Step) -> Results:
    return (best(s.source(0), 1).astype(np.int32),)


def _gather_rows(s: Step) -> Results:
    x = s.source(0)
    return (x[taken(s.source(1), len(x), BadIndexError, "row")],)


def _cols_concat(s: Step) -> Results:
    return (np.concatenate([s.source(at) for at in range(len(s.inputs))], axis=1),)


def _cols_slice(s: Step) -> Results:
    start = s.number("start")
    return (s.source(0)[:, start : start + s.number("count")],)


OPERATIONS: Final[Mapping[Op, Callable[[Step], Results]]] = MappingProxyType(
    {
        Op.IMAGE_U8: _image_u8,
        Op.EMBED: _embed,
        Op.LINEAR: _linear,
        Op.LINEAR_F32: _linear_f32,
        Op.LINEAR_W8: _linear_w8,
        Op.NORM: _norm,
        Op.ROPE: rope,
        Op.ATTENTION: attention,
        Op.ATTENTION_ROW: attention_row,
        Op.PRUNE: _prune,
        Op.ATTENTION_SCORE: _attention_score,
        Op.PRUNE_TOP_P: _prune_top_p,
        Op.CONV2D: conv2d,
        Op.CONV_DEPTHWISE: depthwise,
        Op.SPARSE_CONV: sparse_conv,
        Op.ROWS_CONCAT: _rows_concat,
        Op.ROWS_SLICE: _rows_slice,
        Op.ADD: _binary(np.add),
        Op.MUL: _binary(np.multiply),
        Op.SUB: _binary(np.subtract),
        Op.PACK: _pack,
        Op.PACKED: _packed,
        Op.DIV: _binary(np.divide),
        Op.UNARY: _unary,
        Op.SOFTMAX: _softmax,
        Op.ROUTE: moe.route,
        Op.EXPERTS: moe.experts,
        Op.ARGMAX: _argmax,
        Op.GATHER_ROWS: _gather_rows,
        Op.COLS_CONCAT: _cols_concat,
        Op.COLS_SLICE: _cols_slice,
        Op.MOE_LAYER: _moe_layer,
        Op.RECURRENT: recurrent,
        Op.RECURRENT_F32: recurrent_f32,
        Op.EXPERT_PREFETCH: moe.expert_prefetch,
        Op.EXPERT_LOAD: moe.expert_load,
        Op.EXPERT_FORESEE: _expert_foresee,
        **REFERENCE,
    }
)
