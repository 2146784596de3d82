"""ROPE, ATTENTION and ATTENTION_ROW over numpy arrays; rows of `operations.OPERATIONS` name them.

Reductions, rounding and ties follow the C templates; see there for the equations.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiler.contract.native_errors import BadPositionError, NotFiniteError
from compiler.kernels.constants import KV_LIMIT, QUERY_LIMIT, SMALLEST_AMAX
from compiler.simulator.step import Cache, Results, Step, softmax_terms, taken

Array = NDArray[Any]


def rope(s: Step) -> Results:
    """Rotate the halves of each head by the angles of its row's position."""
    positions = taken(s.source(1), len(s.constant(0)), BadPositionError, "position")
    return (_rotated(s, s.source(0), positions, s.number("heads")),)


def _rotated(s: Step, x: Array, positions: Array, heads: int) -> Array:
    cos, sin = s.constant(0)[positions][:, None, :], s.constant(1)[positions][:, None, :]
    a, b = np.split(x.reshape(len(x), heads, -1), 2, axis=2)
    y = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)
    return np.asarray(y.reshape(x.shape))


def heads_of(x: Array, heads: int) -> Array:
    """Return (heads, R, head_dim)."""
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def _parts(s: Step) -> tuple[Array, Array, Array]:
    """Return q, k and v, which lie side by side in inputs 0 to 2; q has no columns if absent."""
    found = [part for at in range(3) if (part := s.maybe_source(at)) is not None]
    heads = 0 if s.number("append_only") else s.number("heads")
    groups = s.number("kv_heads") or s.number("heads")
    width = sum(part.shape[1] for part in found) // (heads + 2 * groups)
    q, k, v = _side_by_side(found, [heads * width, groups * width, groups * width])
    positions = s.maybe_source(3)
    if positions is not None:
        rows = taken(positions, len(s.constant(0)), BadPositionError, "position")
        q = _rotated(s, q, rows, heads) if heads else q
        k = _rotated(s, k, rows, groups)
    return q, k, v


def _side_by_side(operands: list[Array], widths: list[int]) -> list[Array]:
    """Return the next columns of operands, which no part spans; rows may differ by operand."""
    parts, at, column = [], 0, 0
    for width in widths:
        if column == operands[at].shape[1]:
            at, column = at + 1, 0
        parts.append(operands[at][:, column : column + width])
        column += width
    return parts


def attention(s: Step) -> Results:
    """Append to the cache, if there is one, and look from each row at the rows that it may see."""
    q, k, v = _parts(s)
    layer, window, sink = s.number("kv_layer"), s.number("window"), s.number("sink")
    past = 0
    if layer >= 0 and s.cache is not None:
        past = s.cache.length
        at = slots(np.arange(past, past + len(k)), sink, s.cache)
        _append(s.cache, layer, at, k, v)
    if s.number("append_only"):
        return ()
    if not window:
        rows = np.arange(past + len(k))
        seen = _seen(s, layer, rows) or Seen(k, v)
        return (_all_rows(s, q, seen, past if layer >= 0 or s.number("causal") else None),)
    found = []
    for row in range(len(q)):
        at = visible(past + row + 1, window, sink)
        seen = _seen(s, layer, at) or Seen(k[at], v[at])
        found.append(_all_rows(s, q[row : row + 1], seen, None))
    return (np.concatenate(found),)


class Seen(NamedTuple):
    """Keys and values (J, G*hd); with scales (J, G) they are codes."""

    keys: Array
    values: Array
    key_scales: Array | None = None
    value_scales: Array | None = None


def _append(cache: Cache, layer: int, at: Array, k: Array, v: Array) -> None:
    if cache.key_scales is None or cache.value_scales is None:
        cache.keys[layer, at], cache.values[layer, at] = k, v
        return
    for x, rows, scales in (
        (k, cache.keys, cache.key_scales),
        (v, cache.values, cache.value_scales),
    ):
        heads = scales.shape[-1]
        codes, steps = code_rows(x.reshape(len(x) * heads, -1), KV_LIMIT)
        if not np.isfinite(steps).all():
            raise NotFiniteError("a key or value is infinite or NaN")
        rows[layer, at], scales[layer, at] = codes.reshape(x.shape), steps.reshape(-1, heads)


def _seen(s: Step, layer: int, rows: Array) -> Seen | None:
    """Return rows of a cache layer; None without one."""
    if layer < 0 or s.cache is None:
        return None
    cache, at = s.cache, slots(rows, s.number("sink"), s.cache)
    seen = Seen(cache.keys[layer, at], cache.values[layer, at])
    if cache.key_scales is None or cache.value_scales is None:
        return seen
    return seen._replace(
        key_scales=cache.key_scales[layer, at], value_scales=cache.value_scales[layer, at]
    )


def code_rows(x: Array, limit: int) -> tuple[Array, Array]:
    """Return x (R, N) f32 as codes within +-limit (f32) and a scale per row (R,).

    The scale of a row that is not finite is NaN, its codes are zero.
    """
    one, zero = np.float32(1), np.float32(0)
    widest = np.abs(x).max(axis=1)
    finite = np.isfinite(widest)
    none = ~finite | (widest < np.float32(SMALLEST_AMAX))
    safe = np.where(none, one, widest)
    inverse = np.where(none, zero, np.float32(limit) / safe)
    scale = np.where(none, np.where(finite, zero, np.float32(np.nan)), safe / np.float32(limit))
    return np.rint(np.where(none[:, None], zero, x) * inverse[:, None]) + zero, scale


def visible(end: int, window: int, sink: int) -> Array:
    """Return the rows that row `end - 1` sees: the first `sink` and the last `window`."""
    rows = np.arange(end)
    return rows[(rows < sink) | (rows >= end - window)]


def slots(rows: Array, sink: int, cache: Cache) -> Array:
    """Return the cache slot of each row: itself, beyond the capacity a ring behind the sink."""
    capacity = cache.keys.shape[1]
    ring = max(1, capacity - sink)
    return np.asarray(np.where(rows < capacity, rows, sink + (rows - sink) % ring))


def _all_rows(s: Step, q: Array, seen: Seen, past: int | None) -> Array:
    """Attend from each row of q to all rows seen, or with `past` to rows 0 .. past + row."""
    heads, groups = s.number("heads"), s.number("kv_heads") or s.number("heads")

    def shared(part: Array) -> Array:
        return heads_of(part, groups).repeat(heads // groups, axis=0)

    keys, values = shared(seen.keys), shared(seen.values)
    if seen.key_scales is None:
        scores = s.numerics.dot_rows(heads_of(q, heads), keys) * s.real("scale")
    else:
        scores = _code_scores(heads_of(q, heads), keys, shared(seen.key_scales), s.real("scale"))
    if past is not None:
        hidden = np.arange(len(seen.keys))[None, :] > past + np.arange(len(q))[:, None]
        scores = np.where(hidden, s.numerics.dtype(-np.inf), scores)
    terms, total = softmax_terms(s, scores)
    if seen.value_scales is not None:
        terms = terms * shared(seen.value_scales)[..., 0][:, None, :]
    y = _mixed(s, terms, values, past) * (s.numerics.dtype(1) / total)
    return np.asarray(y.transpose(1, 0, 2).reshape(q.shape))


def _mixed(s: Step, terms: Array, values: Array, past: int | None) -> Array:
    """Return (H, R, hd): terms (H, R, J) times values (H, J, hd), added up in key order.

    What a row may not see has terms of 0, and is left out where 0 times it would not be 0.
    """
    if past is None or np.isfinite(values).all():
        return s.numerics.running_sum(terms, values)
    ends = [past + row + 1 for row in range(terms.shape[1])]
    rows = [
        s.numerics.running_sum(terms[:, row : row + 1, :end], values[:, :end])
        for row, end in enumerate(ends)
    ]
    return np.concatenate(rows, axis=1)


def _code_scores(q: Array, keys: Array, scales: Array, scale: Array) -> Array:
    """Return (H, R, J) scores of q (H, R, hd) with codes (H, J, hd) and their scales (H, J, 1)."""
    codes, steps = code_rows(q.reshape(-1, q.shape[-1]), QUERY_LIMIT)
    whole = codes.reshape(q.shape).astype(np.float64)
    sums = (whole @ keys.astype(np.float64).transpose(0, 2, 1)).astype(np.float32)
    factors = steps.reshape(q.shape[:2])[..., None] * scale
    return np.asarray(sums * (scales[..., 0][:, None, :] * factors))


def attention_row(s: Step) -> Results:
    """Return the mean over heads of one row's attention."""
    heads, q, k = s.number("heads"), s.source(0), s.maybe_source(1)
    cols = s.number("cols") or q.shape[1]
    keys = q[:, cols : 2 * cols] if k is None else k[:, :cols]
    row = q[s.number("row")][None, :cols]
    scores = s.numerics.dot_rows(heads_of(row, heads), heads_of(keys, heads))
    terms, total = softmax_terms(s, scores[:, 0] * s.real("scale"))
    y = np.zeros(terms.shape[1], s.numerics.dtype)
    for head in terms / total:
        y = y + head
    return ((y / s.numerics.dtype(heads))[:, None],)
