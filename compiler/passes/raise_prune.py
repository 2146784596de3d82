"""Raise visual token pruning by the attention of one row to `mm.attention_row` and `mm.prune`.

Before:
    %s = MatMul(row 0 of %q per head, %k^T), scaled, "sp.onnx" Softmax       (1, H, 1, S)
    %c = %s with the row axis dropped                                        (1, H, S)
    %t, %i = "sp.onnx"(%tokens, %c) <{op = "ai.sparsefleet::DynamicPrune", attrs = {k = 32}}>
After:
    %a = "mm.attention_row"(%qrows, %krows) <{heads = 4, scale, row = 0}>    (S, 1), mean over heads
    %t, %i = "mm.prune"(%tokens, %a) <{k = 32, score_offset = 1}>

`DynamicPrune` averages over heads and skips the first key (the class token), so the score of token
t is that of key t + 1. Left out: scores that come from anywhere else.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import ConstantTable
from compiler.analysis.movement import chain_symbols, only_leaf, trace, view_source
from compiler.dialects.dims import Dim, witnesses
from compiler.dialects.mm import AttentionRowOp, PruneOp
from compiler.dialects.sp import OnnxOp
from compiler.dialects.types import shape_of
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.match import attr
from compiler.passes.raise_attention import Scores, softmax_scores
from compiler.passes.rewriting import insert_before, replace, reshaped, sweep

SKIPPED_KEYS: Final = 1


@dataclass(frozen=True, slots=True)
class _Row:
    """Attention of one query row over all keys."""

    q: SSAValue
    k: SSAValue
    heads: int
    scale: float
    row: int


@dataclass(frozen=True)
class RaisePrune(Pass):
    """Recognise DynamicPrune over the attention probabilities of one row."""

    name: ClassVar[str] = "raise-prune"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Rewrite every DynamicPrune whose scores are attention of one row."""
        return PassResult(sweep(module, ctx, _raise))


def _raise(op: Operation, ctx: PassContext) -> int:
    if not isinstance(op, OnnxOp) or op.op.data != "ai.sparsefleet::DynamicPrune":
        return 0
    tokens, scores = op.arguments
    probabilities = view_source(scores)
    found = softmax_scores(probabilities, ctx.constants) if probabilities is not None else None
    row = _single_row(found, ctx.constants) if found is not None else None
    heads = Dim(row.heads) if row is not None else Dim(0)
    keys = shape_of(scores)[-1]
    k = attr(op, "k")
    if row is None or not isinstance(k, int) or shape_of(scores) != (Dim(1), heads, keys):
        return 0
    if keys != shape_of(tokens)[-2] + Dim(SKIPPED_KEYS):
        return 0
    attention = AttentionRowOp(row.q, row.k, heads=row.heads, scale=row.scale, row=row.row)
    prune = PruneOp(tokens, attention.result, k=k, score_offset=SKIPPED_KEYS)
    insert_before(op, attention, prune)
    index = reshaped(prune.index, shape_of(op.outputs[1]), op)
    replace(op, [prune.kept, index], ctx.origins)
    return 1


def _single_row(scores: Scores, constants: ConstantTable) -> _Row | None:
    """Return the rows behind a product of one query row with all keys."""
    shape = shape_of(scores.q)
    if scores.causal or len(shape) < 3 or shape[-2] != Dim(1):
        return None
    heads, head_dim = shape[-3].constant, shape[-1].constant
    width = heads * head_dim
    result = None
    symbols = chain_symbols(scores.q, constants) | chain_symbols(scores.k, constants)
    for binding in witnesses(symbols):
        q, k = trace(scores.q, binding, constants), trace(scores.k, binding, constants)
        factors = (q.uniform_factor(), k.uniform_factor())
        q_leaf, k_leaf = only_leaf(q), only_leaf(k)
        if q_leaf is None or k_leaf is None or None in factors:
            return None
        rows = q_leaf.numbers().reshape(-1, q_leaf.sizes[-1])
        keys = k_leaf.numbers()
        row = int(q.index.min()) // width
        if rows.shape[-1] != width or keys.shape[-1] != width:
            return None
        wanted = keys.reshape(-1, heads, head_dim).transpose(1, 2, 0)
        same = np.array_equal(k.index.reshape(-1), wanted.reshape(-1))
        if not same or not np.array_equal(q.index.reshape(-1), rows[row]):
            return None
        scale = scores.scale * (factors[0] or 0.0) * (factors[1] or 0.0)
        result = _Row(q_leaf.value, k_leaf.value, heads, scale, row)
    return result
