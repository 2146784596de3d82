"""Which operands fit ATTENTION; a row of `operand_rules.RULES` names `check_attention`."""

from collections.abc import Sequence

from compiler.contract.operands import (
    KvShape,
    OperandError,
    Operands,
    Shape,
    head_size,
    need,
    same_rows,
)


def check_attention(c: Operands) -> None:
    """Check ATTENTION: q, k and v side by side in inputs 0 to 2, rotation, cache and window."""
    parts = [c.source(0), *(part for at in (1, 2) if (part := c.maybe_source(at)) is not None)]
    is_append = bool(c.number("append_only"))
    heads = 0 if is_append else c.number("heads")
    kv_heads = c.number("kv_heads") or c.number("heads")
    cols = sum(part.cols for part in parts)
    for part in parts[1:]:
        same_rows(part, parts[1], "ATTENTION keys and values")
    need(heads % kv_heads == 0, f"ATTENTION: {heads} heads do not share {kv_heads}")
    head_dim = head_size(Shape(1, cols, "f32"), heads + 2 * kv_heads, "ATTENTION")
    _attention_parts([part.cols for part in parts], [n * head_dim for n in (heads, kv_heads)])
    need(len(c.outputs) == (0 if is_append else 1), "ATTENTION has a result unless append_only")
    if not is_append:
        same_rows(parts[0], c.result(0), "ATTENTION result")
        need(c.result(0).cols == heads * head_dim, "ATTENTION result has the columns of q")
    if len(parts) > 1 and not _is_cross(c, parts, heads * head_dim):
        same_rows(parts[1], parts[0], "ATTENTION keys")
    _attention_rotation(c, parts[0], head_dim)
    _attention_cache(c, parts[0], KvShape(0, kv_heads, head_dim, 0))


def _is_cross(c: Operands, parts: Sequence[Shape], queries: int) -> bool:
    """Return whether keys may have other rows than queries: those stand alone, nothing is hidden.

    Without a cache, a causal limit or rotation, no row of the keys belongs to one of the queries.
    """
    plain = c.number("kv_layer") < 0 and not c.number("causal") and not c.number("append_only")
    return plain and parts[0].cols == queries and c.maybe_source(3) is None


def _attention_parts(operands: Sequence[int], wanted: Sequence[int]) -> None:
    """Check that q, k and v, side by side in the operands, are never cut in two."""
    queries, keys = wanted
    ends = {queries, queries + keys, queries + 2 * keys}
    at = 0
    for cols in operands:
        at += cols
        need(at in ends, f"ATTENTION keys need {keys} columns: operands of {tuple(operands)}")


def _attention_rotation(c: Operands, rows: Shape, head_dim: int) -> None:
    positions, cos, sin = c.maybe_source(3), c.maybe_weight(0), c.maybe_weight(1)
    if positions is None:
        need(cos is None and sin is None, "ATTENTION tables need positions")
        return
    same_rows(rows, positions, "ATTENTION positions")
    need(positions.cols == 1 and head_dim % 2 == 0, "ATTENTION: one position per row, even heads")
    fits = cos is not None and cos == sin and cos.cols == head_dim // 2
    need(fits, f"ATTENTION tables must both be (P, {head_dim // 2})")


def _attention_cache(c: Operands, rows: Shape, heads: KvShape) -> None:
    layer, window, sink = c.number("kv_layer"), c.number("window"), c.number("sink")
    need(window > 0 or sink == 0, "ATTENTION sink without a window")
    if layer < 0:
        need(not c.number("append_only"), "ATTENTION appends to no cache")
        need(window == 0 or c.number("causal") == 1, "ATTENTION windows are causal")
        return
    if c.kv is None:
        raise OperandError("ATTENTION uses a cache, the plan has none")
    need(layer < c.kv.layers, f"ATTENTION cache layer {layer} of {c.kv.layers}")
    need(
        (c.kv.heads, c.kv.head_dim) == (heads.heads, heads.head_dim),
        "ATTENTION heads differ from the cache's",
    )
    need(
        window == 0 or sink + window + rows.rows <= c.kv.capacity,
        f"ATTENTION window: {sink} + {window} + {rows.rows} rows exceed {c.kv.capacity}",
    )


def key_operand(inputs: Sequence[int]) -> int:
    """Return the operand of an ATTENTION whose rows are its keys: the last of inputs 0 to 2."""
    return next(operand for operand in reversed(inputs[:3]) if operand >= 0)
