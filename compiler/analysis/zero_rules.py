"""The zero rules: one table, a row per operation, saying what it does to zeros.

M(x) is the mask of elements of x that may be non-zero (`compiler.analysis.masks`). `ZeroKind` names
a behaviour (`compiler.analysis.zero_hooks` has one function per kind); a row gives an operation its
kind. Whoever adds an operation adds a row; without one it is dense. Read by
`compiler.analysis.propagation` and by the passes that look for sources of zeros.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class ZeroKind(StrEnum):
    """What an operation does to zeros."""

    CONSTANT = "constant"  # M = the array's own zeros
    SOURCE = "source"  # M = fresh source * M(x)
    ANNIHILATING = "annihilating"  # M = M(a) * M(b)
    UNION = "union"  # M = M(a) + M(b)
    PRESERVING = "preserving"  # M = M(x), because f(0) = 0
    CAST = "cast"  # M = M(x); a cast truth value is a fresh source
    QUOTIENT = "quotient"  # M = M(a) if the divisor is a constant without zeros
    BREAKING = "breaking"  # M = dense
    SOFTMAX = "softmax"  # M = where the operand is not minus infinity
    CONTRACTION = "contraction"  # M = dense but for columns with dead weights; skips M(x)
    RESHAPE = "reshape"
    EXPAND = "expand"
    TRANSPOSE = "transpose"
    SLICE = "slice"
    CONCAT = "concat"
    GATHER = "gather"
    ROUTE = "route"  # one-hot blocks, density k/E
    EXPERTS = "experts"  # dense; reads only the blocks of the route
    SCATTER = "scatter"  # M = one-hot of indices, if scattered into zeros
    WHERE = "where"  # M = (m * M(x)) + (not m * M(y))
    BAND = "band"  # static band
    ATTENTION = "attention"  # dense; scores outside the band are skipped
    PRUNE = "prune"  # rows gathered; a source of shape
    PRUNE_MERGE = "prune and merge"  # kept rows, mixtures, then rows of zeros
    STATE = "state"  # key-value cache: join over the steps


@dataclass(frozen=True, slots=True)
class ZeroRule:
    """One row.

    Attributes:
        kind: What the operation does to zeros.
        row: The line of the published rule table that it belongs to.
        source: Name of the kind of source it is, for rows that make zeros.
    """

    kind: ZeroKind
    row: str
    source: str = ""


def _rows(kind: ZeroKind, row: str, *keys: str, source: str = "") -> dict[str, ZeroRule]:
    return {key: ZeroRule(kind, row, source) for key in keys}


def _onnx(*operators: str) -> tuple[str, ...]:
    return tuple(f"sp.onnx:{operator}" for operator in operators)


_K: Final = ZeroKind
ZERO_RULES: Final[Mapping[str, ZeroRule]] = MappingProxyType(
    {
        **_rows(_K.CONSTANT, "static", "sp.constant"),
        **_rows(_K.SOURCE, "source", "sp.unary:relu", *_onnx("Relu"), source="relu"),
        **_rows(_K.SOURCE, "source", *_onnx("Clip"), source="clip"),
        **_rows(_K.SOURCE, "source", *_onnx("ThresholdedRelu"), source="threshold"),
        **_rows(_K.ANNIHILATING, "mul", "sp.binary:mul", *_onnx("Mul", "And")),
        **_rows(_K.UNION, "add", "sp.binary:add", "sp.binary:sub"),
        **_rows(_K.UNION, "add", *_onnx("Add", "Sub", "Max", "Min", "Or")),
        **_rows(
            _K.PRESERVING,
            "preserving",
            *(f"sp.unary:{kind}" for kind in ("silu", "neg", "sqrt", "tanh", "gelu", "gelu_tanh")),
            *_onnx("Abs", "Ceil", "Erf", "Floor", "Identity", "Neg", "Sin", "Sqrt", "Swish"),
            *_onnx("Gelu", "LeakyRelu", "Round", "Sign", "Tanh"),
        ),
        **_rows(_K.CAST, "preserving", *_onnx("Cast"), source="mask"),
        **_rows(_K.PRESERVING, "rms norm", "sp.norm:rms", *_onnx("RMSNormalization")),
        **_rows(_K.QUOTIENT, "div", "sp.binary:div", *_onnx("Div")),
        **_rows(
            _K.BREAKING,
            "breaking",
            *(f"sp.unary:{kind}" for kind in ("exp", "sigmoid", "reciprocal")),
            *_onnx("Cos", "Exp", "Log", "Not", "Pow", "Reciprocal", "Sigmoid"),
            *_onnx("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
            *_onnx("LayerNormalization", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"),
            *("sp.norm:layer", "sp.image", "sp.argmax", "mm.rope", "mm.attention_row"),
            "mm.attention_score",
        ),
        **_rows(_K.SOFTMAX, "softmax", "sp.softmax", *_onnx("Softmax"), source="softmax"),
        **_rows(_K.CONTRACTION, "contraction", "sp.linear", "sp.conv2d"),
        **_rows(_K.CONTRACTION, "contraction", *_onnx("MatMul")),
        **_rows(_K.RESHAPE, "structural", "sp.reshape"),
        **_rows(_K.EXPAND, "structural", "sp.expand"),
        **_rows(_K.TRANSPOSE, "structural", "sp.transpose"),
        **_rows(_K.SLICE, "structural", "sp.slice"),
        **_rows(_K.CONCAT, "structural", "sp.concat"),
        **_rows(_K.GATHER, "structural", "sp.embed", *_onnx("Gather")),
        **_rows(_K.ROUTE, "route", "moe.route", source="route"),
        **_rows(_K.EXPERTS, "route", "moe.experts"),
        **_rows(_K.SCATTER, "route", *_onnx("ScatterElements"), source="one-hot"),
        **_rows(_K.WHERE, "where", *_onnx("Where"), source="where"),
        **_rows(_K.BAND, "band", *_onnx("Trilu"), source="band"),
        **_rows(_K.ATTENTION, "band", "mm.attention", source="band"),
        **_rows(_K.PRUNE, "prune", "mm.prune", source="prune"),
        **_rows(_K.PRUNE, "prune", *_onnx("ai.sparsefleet::DynamicPrune"), source="prune"),
        **_rows(_K.PRUNE_MERGE, "prune", "mm.prune_top_p", source="count"),
        **_rows(_K.PRESERVING, "prune", "mm.splice"),
        **_rows(_K.STATE, "state", "mm.kv_append"),
    }
)
"""What an operation does to zeros, by the key that `SparsityInvariant.zero_rule` returns."""
