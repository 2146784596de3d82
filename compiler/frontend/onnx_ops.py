"""The ONNX operators the importer knows, as rows of data.

Adding an operator is adding a row: how its results' shapes follow, how it folds when its operands
are constant, which attributes it has, which operands vanish at import, and how it enters the IR.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import onnx

from compiler.frontend import fold_rules as f
from compiler.frontend import generic_rules as g
from compiler.frontend import shape_rules as s
from compiler.frontend.values import Array, Node, Runtime, Values

REQUIRED: Final = object()


@dataclass(frozen=True, slots=True)
class OnnxOperator:
    """One operator.

    Attributes:
        name: Operator type; `domain::type` outside the default domain.
        shapes: Result shapes; None = run `fold` on stand-ins.
        fold: Results when all operands are known; None = never folded.
        attrs: Attribute names with defaults (`REQUIRED` = none).
        absorbed: Operands that only say shape or count and vanish at import.
        of_shape: The results follow from operand shapes alone.
        arity: Numbers of operands and results; None = the ONNX checker knows.
        build: How it enters the IR: `generic`, `constant` (only folded) or a movement kind.
        way_out: What to do where an operator that is only folded cannot be.
    """

    name: str
    shapes: Callable[[Node, Values], list[Runtime]] | None = None
    fold: f.Fold | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)
    absorbed: frozenset[int] = frozenset()
    of_shape: bool = False
    arity: tuple[int, int] | None = None
    build: str = "generic"
    way_out: str = ""


_REDUCE: Final[Mapping[str, Any]] = MappingProxyType(
    {"axes": None, "keepdims": 1, "noop_with_empty_axes": 0}
)


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _clip(x: Array, *bounds: Array) -> Array:
    low = bounds[0] if bounds else None
    high = bounds[1] if len(bounds) > 1 else None
    return np.clip(x, low, high)


def _unary(name: str, function: Callable[..., Any] | None = None) -> OnnxOperator:
    return OnnxOperator(name, s.same, f.elementwise(function) if function else None)


def _binary(name: str, function: Callable[..., Any]) -> OnnxOperator:
    return OnnxOperator(name, s.broadcast, f.elementwise(function))


def _compare(name: str, function: Callable[..., Any]) -> OnnxOperator:
    return OnnxOperator(name, s.compare, f.comparison(function))


def _reduce(name: str, function: Callable[..., Any]) -> OnnxOperator:
    return OnnxOperator(name, s.reduce, f.reduction(function), _REDUCE, frozenset({1}))


def _move(
    name: str,
    build: str,
    fold: f.Fold,
    attrs: Mapping[str, Any] | None = None,
    absorbed: tuple[int, ...] = (),
) -> OnnxOperator:
    return OnnxOperator(
        name, None, fold, attrs or {}, frozenset(absorbed), of_shape=False, build=build
    )


def plain_value(value: Any) -> Any:  # noqa: ANN401 - whatever an attribute holds
    """Return an attribute's value with text as str."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list) and value and isinstance(value[0], bytes):
        return [item.decode() for item in value]
    return value


def _schema(name: str) -> OnnxOperator:
    """Return a row whose attributes, shapes and folding are those of the ONNX package."""
    attrs: dict[str, Any] = {}
    for key, attribute in onnx.defs.get_schema(name).attributes.items():
        default = plain_value(onnx.helper.get_attribute_value(attribute.default_value))
        attrs[key] = REQUIRED if attribute.required else default
    return OnnxOperator(name, g.inferred, g.evaluated, attrs)


def _known(name: str, way_out: str) -> OnnxOperator:
    """Return the row of an operator that is computed only where its operands are known."""
    row = _schema(name)
    return replace(row, shapes=None, build="constant", way_out=way_out)


_SCHEMA_ROWS: Final = (
    *("Acos", "Acosh", "ArgMin", "Asin", "Asinh", "Atan", "Atanh"),
    *("AveragePool", "BatchNormalization", "BitwiseAnd", "BitwiseOr"),
    *("BitwiseXor", "CastLike", "Celu", "ConvInteger", "ConvTranspose", "Cosh", "CumSum"),
    *("DepthToSpace", "DynamicQuantizeLinear", "Elu", "Gelu"),
    *("GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "HardSwish"),
    *("Hardmax", "InstanceNormalization", "IsInf", "IsNaN", "LRN", "LeakyRelu"),
    *("LogSoftmax", "LpNormalization", "MaxPool", "Mean", "Mish", "Mod"),
    *("PRelu", "Pad", "QLinearConv", "QLinearMatMul", "QuantizeLinear"),
    *("Resize", "ReverseSequence", "Round", "ScatterND", "Selu", "Shrink", "Sign", "Sinh"),
    *("Softplus", "Softsign", "SpaceToDepth", "Sum", "Tan", "ThresholdedRelu", "Trilu", "Xor"),
)

_NORM: Final = {"axis": -1, "epsilon": 1e-5, "stash_type": 1}
_CONV: Final = {
    "auto_pad": "NOTSET",
    "dilations": None,
    "group": 1,
    "kernel_shape": None,
    "pads": None,
    "strides": None,
}
_CONSTANT: Final = {
    "value": None,
    "value_float": None,
    "value_floats": None,
    "value_int": None,
    "value_ints": None,
}

_MOE: Final = {
    "k": 1,
    "activation_type": "relu",
    "normalize_routing_weights": 0,
    "use_sparse_mixer": 0,
    "swiglu_fusion": 0,
    "activation_alpha": None,
    "activation_beta": None,
    "swiglu_limit": None,
    "swiglu_limit_after_activation": 0,
}
_QMOE: Final = {
    **_MOE,
    "expert_weight_bits": 4,
    "fc1_expert_weight_bits": None,
    "fc2_expert_weight_bits": None,
    "fc3_expert_weight_bits": None,
    "block_size": None,
    "quant_type": "int",
    "weights_prepacked": -1,
    "accuracy_level": 0,
}

_SIZE_WAY_OUT: Final = (
    "let the result keep a fixed size: multiply by a mask or use Where instead of choosing"
    " elements, or bound their number with TopK"
)
_WINDOW_WAY_OUT: Final = "let its size be a constant"

_ROWS: Final = (
    *map(_schema, _SCHEMA_ROWS),
    *(replace(_schema(name), shapes=g.recurrent) for name in ("GRU", "LSTM", "RNN")),
    replace(_schema("MatMulInteger"), shapes=g.integer_product),
    _known("BlackmanWindow", _WINDOW_WAY_OUT),
    _known("HammingWindow", _WINDOW_WAY_OUT),
    _known("HannWindow", _WINDOW_WAY_OUT),
    _known("MelWeightMatrix", _WINDOW_WAY_OUT),
    _known("NonZero", _SIZE_WAY_OUT),
    _known("Unique", _SIZE_WAY_OUT),
    _unary("Abs", np.abs),
    _unary("Ceil", np.ceil),
    _unary("Cos", np.cos),
    OnnxOperator("Erf", s.same, g.evaluated),
    _unary("Exp", np.exp),
    _unary("Floor", np.floor),
    _unary("Log", np.log),
    _unary("Neg", np.negative),
    _unary("Not", np.logical_not),
    _unary("Reciprocal", np.reciprocal),
    _unary("Relu", lambda x: np.maximum(x, 0)),
    _unary("Sigmoid", _sigmoid),
    _unary("Sin", np.sin),
    _unary("Sqrt", np.sqrt),
    OnnxOperator("Swish", s.same, None, {"alpha": 1.0}),
    _unary("Tanh", np.tanh),
    _binary("Add", np.add),
    _binary("Div", f.divide),
    _binary("Max", np.maximum),
    _binary("Min", np.minimum),
    _binary("Mul", np.multiply),
    _binary("Pow", np.power),
    _binary("Sub", np.subtract),
    _compare("And", np.logical_and),
    _compare("Equal", np.equal),
    _compare("Greater", np.greater),
    _compare("GreaterOrEqual", np.greater_equal),
    _compare("Less", np.less),
    _compare("LessOrEqual", np.less_equal),
    _compare("Or", np.logical_or),
    OnnxOperator("ReduceL1", s.reduce, None, _REDUCE, frozenset({1})),
    OnnxOperator("ReduceL2", s.reduce, None, _REDUCE, frozenset({1})),
    OnnxOperator("ReduceLogSum", s.reduce, None, _REDUCE, frozenset({1})),
    OnnxOperator("ReduceLogSumExp", s.reduce, None, _REDUCE, frozenset({1})),
    _reduce("ReduceMax", np.max),
    _reduce("ReduceMean", np.mean),
    _reduce("ReduceMin", np.min),
    _reduce("ReduceProd", np.prod),
    _reduce("ReduceSum", np.sum),
    OnnxOperator("ReduceSumSquare", s.reduce, None, _REDUCE, frozenset({1})),
    OnnxOperator("Concat", s.concat, f.concat, {"axis": REQUIRED}, build="concat"),
    _move("Dropout", "identity", f.identity, {"seed": None}, (1, 2)),
    _move("Expand", "expand", f.expand, absorbed=(1,)),
    _move("Flatten", "reshape", f.flatten, {"axis": 1}),
    _move("Identity", "identity", f.identity),
    _move("Reshape", "reshape", f.reshape, {"allowzero": 0}, (1,)),
    _move("Slice", "slice", f.slice_, absorbed=(1, 2, 3, 4)),
    _move("Split", "split", f.split, {"axis": 0, "num_outputs": None, "split": None}, (1,)),
    _move("Squeeze", "reshape", f.squeeze, {"axes": None}, (1,)),
    _move("Transpose", "transpose", f.transpose, {"perm": None}),
    _move("Unsqueeze", "reshape", f.unsqueeze, {"axes": None}, (1,)),
    OnnxOperator(
        "ArgMax", s.argmax, g.evaluated, {"axis": 0, "keepdims": 1, "select_last_index": 0}
    ),
    OnnxOperator("Cast", s.cast, f.cast, {"to": REQUIRED, "saturate": 1, "round_mode": "up"}),
    OnnxOperator("Clip", s.same, f.elementwise(_clip)),
    OnnxOperator("Constant", None, f.constant, _CONSTANT, of_shape=True, build="constant"),
    OnnxOperator("ConstantOfShape", None, f.constant_of_shape, {"value": None}, build="constant"),
    OnnxOperator("Conv", s.conv, None, _CONV),
    OnnxOperator(
        "DequantizeLinear",
        s.dequantized,
        f.dequantize,
        {"axis": 1, "block_size": 0, "output_dtype": 0},
    ),
    OnnxOperator("Gather", s.gather, f.gather, {"axis": 0}, build="gather"),
    OnnxOperator("GatherElements", s.gather_elements, g.evaluated, {"axis": 0}),
    OnnxOperator("GatherND", s.gather_nd, f.gather_nd, {"batch_dims": 0}),
    OnnxOperator(
        "Gemm", s.gemm, g.evaluated, {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
    ),
    OnnxOperator(
        "GroupNormalization",
        s.same,
        None,
        {"epsilon": 1e-5, "num_groups": REQUIRED, "stash_type": 1},
    ),
    OnnxOperator("LayerNormalization", s.layer_norm, None, _NORM),
    OnnxOperator("MatMul", s.matmul, f.matmul),
    OnnxOperator("OneHot", s.one_hot, f.one_hot, {"axis": -1}, frozenset({1})),
    OnnxOperator("RMSNormalization", s.same, None, _NORM),
    OnnxOperator("Range", None, f.arange, {"stash_type": 1}, build="constant"),
    OnnxOperator("ScatterElements", s.same, g.evaluated, {"axis": 0, "reduction": "none"}),
    OnnxOperator(
        "Shape", None, f.shape, {"start": 0, "end": None}, of_shape=True, build="constant"
    ),
    OnnxOperator("Size", None, f.size, of_shape=True, build="constant"),
    OnnxOperator("Softmax", s.along_axis, f.softmax, {"axis": -1}),
    OnnxOperator("Tile", s.tile, f.tile, absorbed=frozenset({1})),
    OnnxOperator("TopK", s.topk, f.topk, {"axis": -1, "largest": 1, "sorted": 1}, frozenset({1})),
    OnnxOperator("Where", s.where, f.where),
    OnnxOperator(
        "ai.sparsefleet::DynamicPrune", s.dynamic_prune, None, {"k": REQUIRED}, arity=(2, 2)
    ),
    OnnxOperator("com.microsoft::MoE", s.same, None, _MOE),
    OnnxOperator(
        "com.microsoft::MoEGroupRouter",
        s.group_router,
        None,
        {
            "top_k": REQUIRED,
            "n_group": 1,
            "topk_group": 1,
            "group_topk": 2,
            "router_sentinel": -10000.0,
        },
    ),
    OnnxOperator("com.microsoft::QMoE", s.same, None, _QMOE),
    OnnxOperator("ai.sparsefleet::MoEExpert", s.moe_expert, arity=(5, 1)),
    OnnxOperator("ai.sparsefleet::MoERouter", s.moe_router, None, {"k": REQUIRED}, arity=(4, 2)),
)

OPERATORS: Final[Mapping[str, OnnxOperator]] = MappingProxyType({row.name: row for row in _ROWS})
