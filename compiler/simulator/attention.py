"""ROPE, ATTENTION and ATTENTION_ROW over numpy arrays; rows of `operations.OPERATIONS` name them.

Reductions, rounding and ties follow the C templates; see there for the equations.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.contract.native_errors import BadPositionError
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
        s.cache.keys[layer, at], s.cache.values[layer, at] = k, v
        if not window:
            k, v = s.cache.keys[layer, : past + len(k)], s.cache.values[layer, : past + len(k)]
    if s.number("append_only"):
        return ()
    if not window:
        return (_all_rows(s, q, k, v, past if layer >= 0 or s.number("causal") else None),)
    rows = []
    for row in range(len(q)):
        seen = visible(past + row + 1, window, sink)
        if layer >= 0 and s.cache is not None:
            at = slots(seen, sink, s.cache)
            keys, values = s.cache.keys[layer, at], s.cache.values[layer, at]
        else:
            keys, values = k[seen], v[seen]
        rows.append(_all_rows(s, q[row : row + 1], keys, values, None))
    return (np.concatenate(rows),)


def visible(end: int, window: int, sink: int) -> Array:
    """Return the rows that row `end - 1` sees: the first `sink` and the last `window`."""
    rows = np.arange(end)
    return rows[(rows < sink) | (rows >= end - window)]


def slots(rows: Array, sink: int, cache: Cache) -> Array:
    """Return the cache slot of each row: itself, beyond the capacity a ring behind the sink."""
    capacity = cache.keys.shape[1]
    ring = max(1, capacity - sink)
    return np.asarray(np.where(rows < capacity, rows, sink + (rows - sink) % ring))


def _all_rows(s: Step, q: Array, k: Array, v: Array, past: int | None) -> Array:
    """Attend from each row of q to all rows of k, or with `past` to rows 0 .. past + row."""
    heads, groups = s.number("heads"), s.number("kv_heads") or s.number("heads")
    keys, values = (heads_of(part, groups).repeat(heads // groups, axis=0) for part in (k, v))
    scores = s.numerics.dot_rows(heads_of(q, heads), keys) * s.real("scale")
    if past is not None:
        hidden = np.arange(len(k))[None, :] > past + np.arange(len(q))[:, None]
        scores = np.where(hidden, s.numerics.dtype(-np.inf), scores)
    terms, total = softmax_terms(s, scores)
    y = s.numerics.running_sum(terms, values) * (s.numerics.dtype(1) / total)
    return np.asarray(y.transpose(1, 0, 2).reshape(q.shape))


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
