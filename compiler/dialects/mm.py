"""Dialect `mm`: what joins vision and language, and attention over rows.

Rows stay `(..., R, H * head_dim)` everywhere; heads are a property, never an axis.
"""

from typing import Final

from xdsl.dialects.builtin import FloatAttr, IntegerAttr, StringAttr, TensorType
from xdsl.ir import Dialect, SSAValue
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    prop_def,
    result_def,
    traits_def,
)
from xdsl.traits import Pure

from compiler.dialects.dims import Dim, symbol_dim
from compiler.dialects.invariant import SparsityInvariant
from compiler.dialects.properties import integer, real, require
from compiler.dialects.types import dtype_of, shape_of, tensor_type

MASKS: Final = ("none", "causal")


@irdl_op_definition
class RopeOp(IRDLOperation):
    """Half-split rotation of each head by `position * inv_freq`: a*cos - b*sin, b*cos + a*sin."""

    name = "mm.rope"
    x = operand_def(TensorType)
    positions = operand_def(TensorType)
    inv_freq = operand_def(TensorType)
    heads = prop_def(IntegerAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(self, x: SSAValue, positions: SSAValue, inv_freq: SSAValue, *, heads: int) -> None:
        super().__init__(
            operands=[x, positions, inv_freq],
            properties={"heads": integer(heads)},
            result_types=[tensor_type(dtype_of(x), shape_of(x))],
        )

    def verify_(self) -> None:
        """One frequency per pair of a head's columns."""
        width = shape_of(self.inv_freq)[0].times(2 * self.heads.value.data)
        require(shape_of(self.x)[-1] == width, self, "columns are not heads * 2 * frequencies")
        require(shape_of(self.x) == shape_of(self.result), self, "the shape changes")


@irdl_op_definition
class KvAppendOp(IRDLOperation):
    """Append rows of keys and values (`heads` each) to cache layer `layer`.

    Results are all P + R rows of the layer.
    """

    name = "mm.kv_append"
    k = operand_def(TensorType)
    v = operand_def(TensorType)
    layer = prop_def(IntegerAttr)
    heads = prop_def(IntegerAttr)
    keys = result_def(TensorType)
    values = result_def(TensorType)
    traits = traits_def(SparsityInvariant())

    def __init__(self, k: SSAValue, v: SSAValue, *, layer: int, heads: int) -> None:
        shapes = [list(shape_of(value)) for value in (k, v)]
        for shape in shapes:
            shape[-2] = symbol_dim("P") + shape[-2]
        super().__init__(
            operands=[k, v],
            properties={"layer": integer(layer), "heads": integer(heads)},
            result_types=[tensor_type(dtype_of(k), shape) for shape in shapes],
        )

    def verify_(self) -> None:
        """Keys and values have as many rows, and results P more."""
        require(shape_of(self.k)[-2] == shape_of(self.v)[-2], self, "rows of k and v differ")
        rows = symbol_dim("P") + shape_of(self.k)[-2]
        require(shape_of(self.keys)[-2] == rows, self, "result rows are not P + R")
        divides = shape_of(self.k)[-1].constant % self.heads.value.data == 0
        require(divides, self, "columns do not divide into heads")


@irdl_op_definition
class AttentionOp(IRDLOperation):
    """softmax(q k^T * scale + mask) v per head; mask causal: row i sees the past and rows 0..i."""

    name = "mm.attention"
    q = operand_def(TensorType)
    k = operand_def(TensorType)
    v = operand_def(TensorType)
    heads = prop_def(IntegerAttr)
    kv_heads = prop_def(IntegerAttr)
    scale = prop_def(FloatAttr)
    mask = prop_def(StringAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(
        self,
        q: SSAValue,
        k: SSAValue,
        v: SSAValue,
        *,
        heads: int,
        kv_heads: int,
        scale: float,
        mask: str,
    ) -> None:
        super().__init__(
            operands=[q, k, v],
            properties={
                "heads": integer(heads),
                "kv_heads": integer(kv_heads),
                "scale": real(scale),
                "mask": StringAttr(mask),
            },
            result_types=[tensor_type(dtype_of(q), shape_of(q))],
        )

    def verify_(self) -> None:
        """Head sizes divide, keys and values agree in rows."""
        heads, kv_heads = self.heads.value.data, self.kv_heads.value.data
        require(self.mask.data in MASKS, self, f"unknown mask {self.mask.data!r}")
        require(1 <= kv_heads <= heads and heads % kv_heads == 0, self, "heads do not share keys")
        width = shape_of(self.q)[-1].constant
        require(width % heads == 0, self, "columns do not divide into heads")
        kv_width = Dim(width // heads * kv_heads)
        require(shape_of(self.k)[-1] == kv_width, self, "key columns do not fit")
        require(shape_of(self.k) == shape_of(self.v), self, "keys and values differ")


@irdl_op_definition
class AttentionRowOp(IRDLOperation):
    """Mean over heads of softmax(q[row] k^T * scale): how much one row looks at each row."""

    name = "mm.attention_row"
    q = operand_def(TensorType)
    k = operand_def(TensorType)
    heads = prop_def(IntegerAttr)
    scale = prop_def(FloatAttr)
    row = prop_def(IntegerAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(self, q: SSAValue, k: SSAValue, *, heads: int, scale: float, row: int) -> None:
        super().__init__(
            operands=[q, k],
            properties={"heads": integer(heads), "scale": real(scale), "row": integer(row)},
            result_types=[tensor_type(dtype_of(q), [shape_of(k)[-2], Dim(1)])],
        )

    def verify_(self) -> None:
        """The row exists and columns divide into heads."""
        require(shape_of(self.q)[-1] == shape_of(self.k)[-1], self, "q and k differ in columns")
        divides = shape_of(self.q)[-1].constant % self.heads.value.data == 0
        require(divides, self, "columns do not divide into heads")


@irdl_op_definition
class PruneOp(IRDLOperation):
    """Keep the `k` tokens of highest `score[token + score_offset]`, in token order."""

    name = "mm.prune"
    tokens = operand_def(TensorType)
    score = operand_def(TensorType)
    k = prop_def(IntegerAttr)
    score_offset = prop_def(IntegerAttr)
    kept = result_def(TensorType)
    index = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(self, tokens: SSAValue, score: SSAValue, *, k: int, score_offset: int) -> None:
        shape = list(shape_of(tokens))
        shape[-2] = Dim(k)
        super().__init__(
            operands=[tokens, score],
            properties={"k": integer(k), "score_offset": integer(score_offset)},
            result_types=[
                tensor_type(dtype_of(tokens), shape),
                tensor_type("int64", shape[:-1]),
            ],
        )

    def verify_(self) -> None:
        """There are k tokens to keep and a score for each token."""
        tokens = shape_of(self.tokens)[-2]
        scores = shape_of(self.score)[0]
        require(self.k.value.data <= tokens.constant, self, "k exceeds the tokens")
        needed = tokens + Dim(self.score_offset.value.data)
        require(needed.constant <= scores.constant, self, "scores are too few")


@irdl_op_definition
class AttentionScoreOp(IRDLOperation):
    """How much each row from `first` on is looked at; heads weighted by 1 - entropy over the rows.

    By query `row`, or by all rows from `first` on (their mean) if it is -1.
    """

    name = "mm.attention_score"
    q = operand_def(TensorType)
    k = operand_def(TensorType)
    heads = prop_def(IntegerAttr)
    scale = prop_def(FloatAttr)
    row = prop_def(IntegerAttr)
    first = prop_def(IntegerAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(
        self, q: SSAValue, k: SSAValue, *, heads: int, scale: float, row: int, first: int
    ) -> None:
        super().__init__(
            operands=[q, k],
            properties={
                "heads": integer(heads),
                "scale": real(scale),
                "row": integer(row),
                "first": integer(first),
            },
            result_types=[tensor_type(dtype_of(q), [shape_of(k)[-2] + Dim(-first), Dim(1)])],
        )

    def verify_(self) -> None:
        """The row exists or is -1, some rows are scored, columns divide into heads."""
        rows, columns = shape_of(self.k)[-2], shape_of(self.k)[-1]
        require(shape_of(self.q)[-1] == columns, self, "q and k differ in columns")
        require(columns.constant % self.heads.value.data == 0, self, "heads do not divide columns")
        require(-1 <= self.row.value.data < rows.constant, self, "there is no such row")
        require(0 <= self.first.value.data < rows.constant, self, "no row is scored")


@irdl_op_definition
class PruneTopPOp(IRDLOperation):
    """Keep the fewest tokens that hold `p` of the score, between `min_keep` and `max_keep`.

    The rest joins up to `merge` context tokens by similarity of `keys`. Results have the most rows
    there can be; `count` says how many are real, the others are zero.
    """

    name = "mm.prune_top_p"
    tokens = operand_def(TensorType)
    score = operand_def(TensorType)
    keys = opt_operand_def(TensorType)
    p = prop_def(FloatAttr)
    min_keep = prop_def(IntegerAttr)
    max_keep = prop_def(IntegerAttr)
    merge = prop_def(IntegerAttr)
    key_offset = prop_def(IntegerAttr)
    kept = result_def(TensorType)
    index = result_def(TensorType)
    count = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(
        self,
        tokens: SSAValue,
        score: SSAValue,
        keys: SSAValue | None = None,
        *,
        p: float,
        min_keep: int,
        max_keep: int,
        merge: int = 0,
        key_offset: int = 0,
    ) -> None:
        shape = list(shape_of(tokens))
        shape[-2] = Dim(min(shape[-2].constant, max_keep + merge))
        super().__init__(
            operands=[tokens, score, keys],
            properties={
                "p": real(p),
                "min_keep": integer(min_keep),
                "max_keep": integer(max_keep),
                "merge": integer(merge),
                "key_offset": integer(key_offset),
            },
            result_types=[
                tensor_type(dtype_of(tokens), shape),
                tensor_type("int64", shape[:-1]),
                tensor_type("int64", [Dim(1), Dim(1)]),
            ],
        )

    def verify_(self) -> None:
        """Bounds stand in order, every token has a score and, to be merged, a key."""
        tokens = shape_of(self.tokens)[-2]
        low, high = self.min_keep.value.data, self.max_keep.value.data
        require(0.0 < self.p.value.data <= 1.0, self, "p is outside (0, 1]")
        require(1 <= low <= high <= tokens.constant, self, "bounds do not fit the tokens")
        require(shape_of(self.score) == (tokens, Dim(1)), self, "one score per token is needed")
        require((self.keys is None) == (self.merge.value.data == 0), self, "merging takes keys")
        if self.keys is not None:
            needed = tokens.constant + self.key_offset.value.data
            require(needed <= shape_of(self.keys)[-2].constant, self, "keys are too few")


@irdl_op_definition
class SpliceOp(IRDLOperation):
    """Hand vision tokens and their positions to the language model as its next rows."""

    name = "mm.splice"
    tokens = operand_def(TensorType)
    index = operand_def(TensorType)
    embeds = result_def(TensorType)
    positions = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(self, tokens: SSAValue, index: SSAValue) -> None:
        super().__init__(operands=[tokens, index], result_types=[tokens.type, index.type])

    def verify_(self) -> None:
        """One position per token."""
        require(shape_of(self.tokens)[-2] == shape_of(self.index)[-1], self, "counts differ")


Mm: Final = Dialect(
    "mm",
    [
        RopeOp,
        KvAppendOp,
        AttentionOp,
        AttentionRowOp,
        PruneOp,
        AttentionScoreOp,
        PruneTopPOp,
        SpliceOp,
    ],
    [],
)
