"""Attention, RotaryEmbedding and their kin of the default domain, in plain nodes.

The form is the one that the raising passes recognise: heads on their own axis, one mask added to
scaled scores, a cache joined in front of the new keys. Masks that follow from sizes alone are
constants of every length, so a causal decoder has its causal mask; rotation tables stored in the
file become a frequency per column where the number of rows is known only at run time.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from compiler.frontend.contrib_bodies import BLOCKED, rotated, rotation_tables
from compiler.frontend.values import Array
from compiler.frontend.writer import Writer

_UNSET: Final = -1


@dataclass(frozen=True, slots=True)
class _Operands:
    """Queries, keys and values with heads on axis 1, the cache in front of the keys."""

    q: str
    k: str
    v: str
    past: list[int]
    """Rows of the cache under every binding of the lengths."""


def expand_attention(w: Writer) -> None:
    """Write `Attention` out."""
    given = w.attrs(softcap=0.0, scale=None, qk_matmul_output_mode=0, is_causal=0)
    flat = w.rank(w.inputs[0]) == 3
    operands = _operands(w, given, flat)
    w.need(not w.outputs[3], "its scores are used", "compute the scores with plain nodes")
    head_dim = w.sizes(operands.q)[0][-1]
    scores = w.op("MatMul", operands.q, w.op("Transpose", operands.k, perm=[0, 1, 3, 2]))
    scale = given["scale"] if given["scale"] is not None else head_dim**-0.5
    scores = w.op("Mul", scores, w.number(float(scale)))
    if given["softcap"]:
        cap = w.number(float(given["softcap"]))
        scores = w.op("Mul", w.op("Tanh", w.op("Div", scores, cap)), cap)
    bias, is_soft = _bias(w, given, operands)
    weights = w.op("Softmax", w.op("Add", scores, bias) if bias else scores, axis=-1)
    if bias:
        weights = _without_blind_rows(w, weights, bias, is_soft=is_soft)
    mixed = w.op("MatMul", weights, operands.v)
    if flat:
        rows = w.op("Transpose", mixed, perm=[0, 2, 1, 3])
        w.reshape(rows, 0, 0, -1, out=w.outputs[0])
    else:
        w.give(mixed)


def expand_multi_head_attention(w: Writer) -> None:
    """Write `com.microsoft::MultiHeadAttention` as `Attention` of rows, biases added before."""
    q, k, v, bias, padding, added, past_key, past_value = w.inputs[:8]
    given = w.attrs(mask_filter_value=-10000.0, unidirectional=0)
    plain = bool(k and v) and all(w.rank(x) == 3 for x in (q, k, v))
    w.need(plain, "packed or cached operands", "give queries, keys and values as rows")
    w.need(not any(w.inputs[8:10]), "a shared cache buffer", "give the cache as it is, by Concat")
    if bias:
        ends = np.cumsum([w.size(x, 2) for x in (q, k, v)])
        parts = zip((0, *ends), ends, strict=False)
        q, k, v = (
            w.op("Add", x, w.slice(bias, 0, int(start), int(end)))
            for x, (start, end) in zip((q, k, v), parts, strict=True)
        )
    if padding:
        w.need(w.rank(padding) == 2, "a mask that is not one number per key")
        kept = w.op("Sub", w.number(1.0), w.floats(padding))
        hidden = w.op("Mul", kept, w.number(float(given["mask_filter_value"])))
        hidden = w.op("Unsqueeze", hidden, w.ints(1, 2))
        added = w.op("Add", added, hidden) if added else hidden
    heads = int(given["num_heads"])
    scale = {"scale": given["scale"]} if given.get("scale") else {}
    made = w.ops(
        *("Attention", 3, q, k, v, added, past_key, past_value),
        q_num_heads=heads,
        kv_num_heads=heads,
        is_causal=int(given["unidirectional"]),
        **scale,
    )
    for at, value in enumerate(made):
        if w.outputs[at]:
            w.give(value, at)


def _operands(w: Writer, given: dict[str, Any], flat: bool) -> _Operands:
    q, k, v, _, past_key, past_value, *_ = w.inputs
    if flat:
        heads, kv_heads = (int(given.get(n, 0)) for n in ("q_num_heads", "kv_num_heads"))
        w.need(heads > 0 and kv_heads > 0, "the numbers of heads are not given")
        q, k, v = (
            w.op("Transpose", w.reshape(x, 0, 0, n, -1), perm=[0, 2, 1, 3])
            for x, n in ((q, heads), (k, kv_heads), (v, kv_heads))
        )
    past = [0] * w.bindings
    if past_key:
        past = [sizes[2] for sizes in w.sizes(past_key)]
        k = w.op("Concat", past_key, k, axis=2)
        v = w.op("Concat", past_value, v, axis=2)
    for at, joined in ((1, k), (2, v)):
        if w.outputs[at]:
            w.give(joined, at)
    heads, kv_heads = w.sizes(q)[0][1], w.sizes(k)[0][1]
    w.need(heads % kv_heads == 0, f"{heads} heads do not share {kv_heads}")
    k, v = (_shared(w, x, heads, kv_heads) for x in (k, v))
    return _Operands(q, k, v, past)


def _shared(w: Writer, x: str, heads: int, kv_heads: int) -> str:
    copies, width = heads // kv_heads, w.sizes(x)[0][-1]
    if copies == 1:
        return x
    grown = w.op("Expand", w.op("Unsqueeze", x, w.ints(2)), w.ints(1, 1, copies, 1, 1))
    return w.reshape(grown, w.sizes(x)[0][0], heads, -1, width)


def _bias(w: Writer, given: dict[str, Any], o: _Operands) -> tuple[str, bool]:
    """Write what is added to the scores, and say whether it is just a mask of numbers.

    Several limits are added up, but never beyond `BLOCKED`, so that no sum is infinite.
    """
    mask = w.inputs[3]
    limits = _limits(w, given, o)
    if not mask:
        return (limits, False)
    totals = [sizes[2] for sizes in w.sizes(o.k)]
    widths = [sizes[-1] for sizes in w.sizes(mask)]
    is_soft = w.dtype(mask) != "bool" and widths == totals and not limits
    if w.dtype(mask) == "bool":
        mask = w.op("Where", mask, w.number(0.0), w.number(BLOCKED))
    if widths != totals:
        w.need(len(set(widths + totals)) <= 2, "a mask shorter than the keys, of no fixed size")
        ends = [0] * 2 * w.rank(mask)
        ends[-1] = totals[0] - widths[0]
        mask = w.op("Pad", mask, w.ints(*ends), w.number(BLOCKED))
    if limits:
        mask = w.op("Max", w.op("Add", mask, limits), w.number(BLOCKED))
    return mask, is_soft


def _limits(w: Writer, given: dict[str, Any], o: _Operands) -> str:
    """Write the mask of keys hidden by their place or by the cache's fill; "" if there is none."""
    filled = w.inputs[6]
    totals = [sizes[2] for sizes in w.sizes(o.k)]
    rows = [sizes[2] for sizes in w.sizes(o.q)]
    windows = [int(given.get(f"{side}_window_size", _UNSET)) for side in ("left", "right")]
    causal = bool(given["is_causal"])
    if filled:
        total = totals[0]
        w.need(set(totals) == {total}, "a filled cache of no fixed size")
        keys = w.store(np.arange(total, dtype=np.int64))
        counts = w.reshape(filled, -1, 1, 1, 1)
        seen = w.op("Less", keys, counts)
        if causal or windows != [_UNSET, _UNSET]:
            w.need(
                windows == [_UNSET, _UNSET] and len(set(rows)) == 1, "a window of a filled cache"
            )
            behind = w.store(np.arange(rows[0], dtype=np.int64)[:, None] + 1 - rows[0])
            seen = w.op("And", seen, w.op("Less", keys, w.op("Add", counts, behind)))
        return w.op("Where", seen, w.number(0.0), w.number(BLOCKED))
    if causal or windows != [_UNSET, _UNSET]:
        planes = [
            _plane(row, total, past, windows, causal=causal)
            for row, total, past in zip(rows, totals, o.past, strict=True)
        ]
        return w.by_length(planes)
    return ""


def _plane(rows: int, keys: int, past: int, windows: list[int], *, causal: bool) -> Array:
    """Return 0 where query i sees key j and `BLOCKED` elsewhere, (rows, keys) f32."""
    distance = np.arange(keys) - (past + np.arange(rows))[:, None]
    left, right = windows
    seen = (distance <= 0) | (not causal)
    seen &= (distance >= -left) | (left == _UNSET)
    seen &= (distance <= right) | (right == _UNSET)
    return np.where(seen, np.float32(0), np.float32(BLOCKED))


def _without_blind_rows(w: Writer, weights: str, bias: str, *, is_soft: bool) -> str:
    """Write weights of zero for queries that see no key, if there may be some.

    A mask of numbers hides a key only by minus infinity.
    """
    arrays = w.arrays(bias)
    if arrays is not None:
        hidden = [np.isneginf(a) if is_soft else a < BLOCKED / 2 for a in arrays]
        rows = [np.asarray(h.all(axis=-1, keepdims=True)) for h in hidden]
        if not any(row.any() for row in rows):
            return weights
        blind = w.by_length(rows)
    else:
        best = w.op("ReduceMax", bias, w.ints(-1), keepdims=1)
        if is_soft:
            blind = w.op("IsInf", best, detect_positive=0)
        else:
            blind = w.op("Less", best, w.number(BLOCKED / 2))
    return w.op("Where", blind, w.number(0.0), weights)


def expand_rotary_embedding(w: Writer) -> None:
    """Write `RotaryEmbedding` out: halves or pairs of columns rotated by stored tables."""
    x, cos_name, sin_name, positions = w.inputs[:4]
    given = w.attrs(interleaved=0, num_heads=0, rotary_embedding_dim=0)
    flat = w.rank(x) == 3
    if flat:
        w.need(given["num_heads"] > 0, "the number of heads is not given")
        x = w.op("Transpose", w.reshape(x, 0, 0, given["num_heads"], -1), perm=[0, 2, 1, 3])
    head_dim = w.sizes(x)[0][-1]
    part = given["rotary_embedding_dim"] or head_dim
    runtime = len({sizes[2] for sizes in w.sizes(x)}) > 1
    turning, rest = x, ""
    if part < head_dim:
        turning, rest = w.slice(x, 3, 0, part), w.slice(x, 3, part, head_dim)
    if runtime and positions and not given["interleaved"]:
        tables = rotation_tables(w, positions, cos_name, sin_name)
        made = rotated(w, turning, tables, part)
    else:
        cosine, sine = (_picked(w, name, positions) for name in (cos_name, sin_name))
        made = _turned(w, turning, cosine, sine, part, pairs=bool(given["interleaved"]))
    made = w.op("Concat", made, rest, axis=3) if rest else made
    if flat:
        w.reshape(w.op("Transpose", made, perm=[0, 2, 1, 3]), 0, 0, -1, out=w.outputs[0])
    else:
        w.give(made)


def _picked(w: Writer, table: str, positions: str) -> str:
    """Write the rows of a table that the positions name, (B, 1, T, half)."""
    rows = w.op("Gather", table, positions, axis=0) if positions else table
    return w.op("Unsqueeze", rows, w.ints(1))


def _turned(w: Writer, x: str, cosine: str, sine: str, part: int, *, pairs: bool) -> str:
    """Write the rotation of columns 2i and 2i + 1, or i and half + i, by angle i."""
    half = part // 2
    if pairs:
        batch, heads = w.sizes(x)[0][:2]
        apart = w.reshape(x, batch, heads, -1, half, 2)
        a, b = (w.op("Gather", apart, w.scalar(at), axis=4) for at in (0, 1))
    else:
        a, b = w.slice(x, 3, 0, half), w.slice(x, 3, half, part)
    real = w.op("Sub", w.op("Mul", cosine, a), w.op("Mul", sine, b))
    imaginary = w.op("Add", w.op("Mul", sine, a), w.op("Mul", cosine, b))
    if not pairs:
        return w.op("Concat", real, imaginary, axis=3)
    both = [w.op("Unsqueeze", value, w.ints(4)) for value in (real, imaginary)]
    return w.reshape(w.op("Concat", *both, axis=4), batch, heads, -1, part)
