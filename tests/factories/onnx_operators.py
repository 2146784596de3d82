"""One small ONNX graph per operator and variant, with inputs, for the comparison with its runtime.

A case is the text of the node's attributes and the shapes of its operands; operands whose values
matter (axes, sizes, indices) are given as arrays and become initializers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Array = np.ndarray[Any, Any]
RANDOM = np.random.default_rng(5)


@dataclass(frozen=True)
class Input:
    """A run-time operand: its shape, type and where its elements lie.

    Attributes:
        halves: Odd multiples of one half, which rounding has to decide.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    low: float = -2.0
    high: float = 2.0
    halves: bool = False

    def draw(self) -> Array:
        if self.halves:
            return RANDOM.integers(-4, 5, self.shape).astype(np.float32) + np.float32(0.5)
        if self.dtype == "bool":
            return RANDOM.integers(0, 2, self.shape).astype(bool)
        if self.dtype != "float32":
            return RANDOM.integers(int(self.low), int(self.high) + 1, self.shape).astype(self.dtype)
        return RANDOM.uniform(self.low, self.high, self.shape).astype(np.float32)


Operand = Input | Array | None


@dataclass(frozen=True, eq=False)
class OperatorCase:
    """One node.

    Attributes:
        results: How many results the node has, and how many of them are outputs of the graph.
        tolerance: Relative to the greatest magnitude; 0 = equal.
    """

    op: str
    operands: tuple[Operand, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[int, int] = (1, 1)
    opset: int = 18
    tolerance: float = 1e-5
    label: str = ""
    domain: str = ""

    @property
    def name(self) -> str:
        words = [self.op, str(self.opset), self.label]
        return "-".join(word for word in words if word)

    def model(self) -> onnx.ModelProto:
        names, inputs, weights = [], [], []
        for at, operand in enumerate(self.operands):
            if operand is None:
                names.append("")
                continue
            names.append(f"x{at}")
            if isinstance(operand, Input):
                kind = helper.np_dtype_to_tensor_dtype(np.dtype(operand.dtype))
                inputs.append(helper.make_tensor_value_info(f"x{at}", kind, operand.shape))
            else:
                weights.append(numpy_helper.from_array(operand, f"x{at}"))
        made = [f"y{at}" for at in range(self.results[0])]
        node = helper.make_node(
            self.op, names, made, name=f"the_{self.op}", domain=self.domain, **self.attrs
        )
        outputs = [onnx.ValueInfoProto(name=name) for name in made[: self.results[1]]]
        graph = helper.make_graph([node], self.op, inputs, outputs, weights)
        opsets = [helper.make_opsetid("", self.opset)]
        if self.domain:
            opsets.append(helper.make_opsetid(self.domain, 1))
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        typed = onnx.shape_inference.infer_shapes(model)
        for info in typed.graph.output:
            if not info.type.tensor_type.HasField("shape"):
                info.type.CopyFrom(typed.graph.input[0].type)
                if "N" in self.attrs:
                    info.type.tensor_type.shape.dim[-1].dim_value = self.attrs["N"]
        return typed

    def arrays(self) -> dict[str, Array]:
        return {
            f"x{at}": operand.draw()
            for at, operand in enumerate(self.operands)
            if isinstance(operand, Input)
        }


def case(op: str, *operands: Operand, **attrs: Any) -> OperatorCase:
    """Return a case; `opset`, `label`, `results`, `tolerance`, `domain` are taken from `attrs`."""
    own = {key: attrs.pop(key) for key in _OWN & attrs.keys()}
    return OperatorCase(op, operands, attrs, **own)


_OWN = frozenset({"opset", "label", "results", "tolerance", "domain"})


def f32(*shape: int, low: float = -2.0, high: float = 2.0) -> Input:
    return Input(shape, "float32", low, high)


def i64(*shape: int, low: int = -9, high: int = 9) -> Input:
    return Input(shape, "int64", low, high)


def u8(*shape: int, low: int = 0, high: int = 255) -> Input:
    return Input(shape, "uint8", low, high)


def i8(*shape: int, low: int = -128, high: int = 127) -> Input:
    return Input(shape, "int8", low, high)


def truth(*shape: int) -> Input:
    return Input(shape, "bool")


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def floats(*shape: int) -> Array:
    return RANDOM.standard_normal(shape).astype(np.float32)


X = f32(2, 3, 5)
_UNARY = (
    *("Abs", "Atan", "Ceil", "Cos", "Cosh", "Elu", "Erf", "Exp", "Floor", "HardSigmoid"),
    *("HardSwish", "IsNaN", "LeakyRelu", "Mish", "Neg", "Reciprocal", "Relu", "Round", "Selu"),
    *("Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Tan", "Tanh", "Celu"),
    *("ThresholdedRelu", "Shrink", "IsInf", "Identity"),
)
UNARY: Sequence[OperatorCase] = (
    *(case(op, X) for op in _UNARY),
    case("Sqrt", f32(7, low=0.0, high=9.0)),
    *(case(op, f32(40, low=-1.0, high=1.0)) for op in ("Acos", "Asin", "Atanh")),
    *(case(op, f32(9, low=-0.001, high=0.001), label="small") for op in ("Asin", "Atanh", "Asinh")),
    case("Acosh", f32(40, low=1.0, high=90.0)),
    case("Asinh", f32(40, low=-90.0, high=90.0)),
    case("Log", f32(7, low=0.01, high=9.0)),
    case("Exp", f32(40, low=-80.0, high=80.0), label="wide"),
    case("Sin", f32(40, low=-900.0, high=900.0), label="wide"),
    case("Erf", f32(40, low=-5.0, high=5.0), label="wide"),
    case("Gelu", X, opset=20),
    case("Gelu", X, opset=20, approximate="tanh", label="tanh"),
    case("Not", truth(4, 3)),
    case("Abs", i64(5), label="int"),
    case("Neg", i64(5), label="int"),
    case("Sign", i64(5), label="int"),
)
BINARY: Sequence[OperatorCase] = (
    *(case(op, X, f32(3, 1), label="spread") for op in ("Add", "Sub", "Mul", "Max", "Min")),
    *(case(op, f32(1, 3, 1), f32(2, 1, 5), label="both") for op in ("Add", "Mul", "PRelu")),
    *(case(op, i64(4, 3), i64(3), label="int") for op in ("Add", "Sub", "Mul", "Max", "Min")),
    *(case(op, X, f32(5), label="compare") for op in ("Less", "Greater", "LessOrEqual")),
    *(case(op, i64(40, low=0, high=2), ints(1)) for op in ("Equal", "Greater", "GreaterOrEqual")),
    *(case(op, truth(2, 6), truth(6)) for op in ("And", "Or", "Xor")),
    *(case(op, i64(9), i64(9), opset=18) for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")),
    case("Div", X, f32(5, low=0.5)),
    case("Div", i64(9), ints(4), label="int"),
    case("Mod", i64(9), ints(4)),
    case("Mod", i64(9), ints(4), fmod=1, label="fmod"),
    case("Mod", X, f32(5, low=0.5, high=1.5), fmod=1, label="float"),
    case("Pow", f32(9, low=0.1), f32(9)),
    case("Pow", X, np.array(2.0, np.float32), label="square"),
    case("Pow", X, np.array(3.0, np.float32), label="cube"),
    case("Pow", f32(9, low=0.1), np.array(-0.5, np.float32), label="root"),
    case("Sum", X, f32(5), f32(3, 1)),
    case("Mean", X, f32(5), f32(3, 1)),
    case("Where", truth(3, 1), X, f32(5)),
    case("Where", truth(3, 1), i64(2, 3, 5), ints(7), label="int"),
    case("Clip", X, np.array(-0.5, np.float32), np.array(0.75, np.float32)),
    case("Clip", X, None, np.array(0.75, np.float32), label="above"),
    case("Cast", X, to=onnx.TensorProto.INT64, label="int"),
    case("Cast", X, to=onnx.TensorProto.BOOL, label="bool"),
    case("Cast", i64(6), to=onnx.TensorProto.FLOAT, label="float"),
    case("Cast", i64(6, low=-300, high=300), to=onnx.TensorProto.INT8, label="int8"),
    case("Cast", truth(6), to=onnx.TensorProto.FLOAT, label="truth"),
    case("CastLike", i64(6), floats(1)),
    case("Cast", u8(6), to=onnx.TensorProto.INT32, label="u8"),
)
MATRIX: Sequence[OperatorCase] = (
    case("MatMul", f32(4, 9), f32(9, 7)),
    case("MatMul", f32(2, 3, 4, 9), f32(3, 9, 7), label="batch"),
    case("MatMul", f32(9), f32(2, 9, 7), label="row"),
    case("MatMul", f32(2, 4, 9), f32(9), label="column"),
    case("MatMul", f32(4, 40), floats(40, 19), label="constant"),
    case("Gemm", f32(9, 4), f32(7, 9), f32(7), transA=1, transB=1, alpha=0.5, beta=2.0),
    case("Gemm", f32(4, 9), floats(9, 7), floats(7), label="constant"),
    case("Softmax", X),
    case("Softmax", X, axis=1, label="inner"),
    case("Softmax", f32(3, 6), opset=11, label="old"),
    case("LogSoftmax", X, axis=1),
    case("Hardmax", X),
    case("CumSum", X, ints(1), tolerance=1e-6),
    case("CumSum", X, ints(2), exclusive=1, reverse=1, tolerance=1e-6, label="reverse"),
    case("ArgMax", X, axis=1),
    case("ArgMax", X, axis=2, keepdims=0, label="drop"),
    case("ArgMin", X, axis=0),
    case("TopK", X, ints(2), axis=2, results=(2, 2)),
    case("TopK", X, ints(2), axis=1, largest=0, results=(2, 2), label="least"),
    *(
        case(f"Reduce{kind}", f32(2, 3, 4, low=0.2), ints(1), opset=18, label="one")
        for kind in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp")
    ),
    case("ReduceSumSquare", f32(2, 3, 4), ints(0, 2), keepdims=0),
    case("ReduceMean", f32(2, 3, 4), opset=13, axes=[-1], keepdims=0, label="attribute"),
    case("ReduceSum", f32(2, 3, 4), label="all"),
    case("ReduceMax", i64(3, 4), ints(1), label="int"),
    case("ReduceSum", i64(3, 4), ints(0), label="int"),
)
IMAGE = f32(1, 4, 9, 8)
VOLUME = f32(2, 4, 5, 6, 7)
NETWORK: Sequence[OperatorCase] = (
    case("Conv", IMAGE, floats(6, 4, 3, 3), floats(6), pads=[1, 1, 1, 1]),
    case("Conv", IMAGE, floats(8, 1, 3, 3), group=4, pads=[1, 0, 2, 1], label="groups"),
    case("Conv", IMAGE, floats(4, 1, 3, 3), group=4, strides=[2, 1], label="depth"),
    case("Conv", IMAGE, floats(6, 4, 3, 2), dilations=[2, 3], label="dilated"),
    case("Conv", IMAGE, floats(6, 4, 3, 3), auto_pad="SAME_UPPER", strides=[2, 2], label="same"),
    case("Conv", IMAGE, floats(6, 4, 3, 3), auto_pad="SAME_LOWER", strides=[2, 2], label="lower"),
    case("Conv", f32(2, 4, 11), floats(6, 4, 3), floats(6), strides=[2], label="line"),
    case("Conv", f32(2, 4, 5, 5), f32(3, 4, 2, 2), label="running"),
    case("ConvTranspose", IMAGE, floats(4, 6, 2, 2), floats(6), strides=[2, 2]),
    case("ConvTranspose", IMAGE, floats(4, 3, 3, 3), group=2, pads=[1, 1, 1, 1], label="groups"),
    case(
        *("ConvTranspose", IMAGE, floats(4, 3, 3, 3)),
        strides=[2, 2],
        output_padding=[1, 1],
        pads=[1, 1, 1, 1],
        label="more",
    ),
    case("MaxPool", IMAGE, kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 1]),
    case("MaxPool", IMAGE, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1, label="ceil"),
    case("AveragePool", IMAGE, kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    case(
        *("AveragePool", IMAGE),
        kernel_shape=[3, 3],
        pads=[1, 1, 1, 1],
        count_include_pad=1,
        label="pad",
    ),
    case("AveragePool", f32(1, 3, 9), kernel_shape=[2], strides=[2], label="line"),
    case("Conv", VOLUME, floats(6, 4, 3, 2, 3), floats(6), pads=[1, 0, 1, 1, 1, 0], label="volume"),
    case(
        *("Conv", VOLUME, floats(4, 2, 2, 3, 3)),
        group=2,
        strides=[2, 1, 2],
        dilations=[2, 1, 1],
        label="volume-groups",
    ),
    case(
        *("Conv", VOLUME, floats(4, 4, 3, 3, 3)),
        auto_pad="SAME_UPPER",
        strides=[2, 2, 2],
        label="volume-same",
    ),
    case("ConvTranspose", VOLUME, floats(4, 3, 2, 2, 3), floats(3), label="volume"),
    case(
        *("ConvTranspose", VOLUME, floats(4, 3, 3, 3, 2), floats(6)),
        group=2,
        strides=[2, 1, 2],
        pads=[1, 1, 0, 0, 1, 1],
        label="volume-groups",
    ),
    case("MaxPool", VOLUME, kernel_shape=[2, 3, 2], strides=[1, 2, 2], label="volume"),
    case("MaxPool", VOLUME, kernel_shape=[3, 3, 3], pads=[1] * 6, strides=[2] * 3, label="framed"),
    case("AveragePool", VOLUME, kernel_shape=[3, 2, 2], pads=[1, 0, 1, 1, 1, 0], label="volume"),
    case(
        *("AveragePool", VOLUME),
        kernel_shape=[2, 2, 3],
        pads=[1, 1, 1, 0, 1, 1],
        count_include_pad=1,
        label="volume-pad",
    ),
    case("GlobalAveragePool", VOLUME, label="volume"),
    case("GlobalAveragePool", IMAGE),
    case("GlobalMaxPool", IMAGE),
    case(
        *("BatchNormalization", IMAGE, floats(4), floats(4), floats(4)),
        np.array([0.5, 1.0, 1.5, 2.0], np.float32),
    ),
    case("InstanceNormalization", IMAGE, floats(4), floats(4)),
    case("GroupNormalization", IMAGE, floats(4), floats(4), num_groups=2, opset=21),
    case("LayerNormalization", X, floats(5), floats(5)),
    case("RMSNormalization", X, floats(5), opset=23),
    case("LayerNormalization", X, floats(3, 5), floats(3, 5), axis=1, label="two"),
    case("LpNormalization", X, axis=1, p=2),
    case("LRN", IMAGE, size=3),
    case("Resize", IMAGE, None, None, ints(1, 4, 18, 16), mode="nearest"),
    case(
        *("Resize", IMAGE, None, np.array([1, 1, 2, 2], np.float32)),
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
        label="floor",
    ),
    case("Resize", IMAGE, None, None, ints(1, 4, 13, 17), mode="linear", label="linear"),
    case(
        *("Resize", IMAGE, None, None, ints(1, 4, 5, 4)),
        mode="linear",
        coordinate_transformation_mode="align_corners",
        label="corners",
    ),
    case("Resize", IMAGE, None, None, ints(1, 4, 18, 16), mode="cubic", label="cubic"),
    *(
        case(
            *("Resize", IMAGE, None, None, ints(1, 4, *size)),
            mode=mode,
            antialias=1,
            exclude_outside=inside,
            label=f"antialias-{mode}-{size[0]}-{inside}",
        )
        for mode, size, inside in (
            *(("linear", (4, 3), 0), ("linear", (5, 11), 1), ("cubic", (4, 5), 0)),
            *(("cubic", (3, 16), 1),),
        )
    ),
    case(
        *("Resize", IMAGE, None, None, ints(1, 4, 13, 17)),
        mode="cubic",
        exclude_outside=1,
        label="inside",
    ),
)
INDEX: Sequence[OperatorCase] = (
    case("Gather", X, i64(4, low=-3, high=2), axis=1),
    case("Gather", X, ints(2, 0), axis=1, label="constant"),
    case("Gather", floats(11, 4), i64(2, 3, low=0, high=10), label="table"),
    case("GatherElements", X, i64(2, 2, 5, low=0, high=2), axis=1),
    case("GatherND", X, i64(3, 2, low=0, high=1)),
    case("GatherND", f32(2, 3, 4), i64(2, 2, 1, low=0, high=2), batch_dims=1, label="batch"),
    case("ScatterElements", X, np.array([[[0, 2, 1, 3, 4]]], np.int64), f32(1, 1, 5), axis=2),
    case("ScatterElements", X, i64(1, 2, 5, low=0, high=1), f32(1, 2, 5), reduction="add"),
    case("ScatterND", X, np.array([[0, 1], [1, 2]], np.int64), f32(2, 5)),
    case("OneHot", i64(4, low=0, high=5), ints(6), np.array([0, 3], np.float32)),
    case("Pad", X, ints(0, 1, 2, 0, 0, 1)),
    case("Pad", X, ints(0, -1, 2, 0, 0, -1), np.array(1.5, np.float32), label="cut"),
    case("Pad", X, ints(0, 1, 2, 0, 2, 1), mode="reflect", label="reflect"),
    case("Pad", X, ints(0, 1, 2, 0, 2, 1), mode="edge", label="edge"),
    case("Tile", X, ints(2, 1, 3)),
    case("Dropout", X),
    case("DepthToSpace", f32(1, 8, 2, 3), blocksize=2),
    case("DepthToSpace", f32(1, 8, 2, 3), blocksize=2, mode="CRD", label="crd"),
    case("SpaceToDepth", f32(1, 2, 4, 6), blocksize=2),
    case("Trilu", f32(2, 4, 4), np.array(1, np.int64)),
    case("Trilu", f32(2, 4, 4), upper=0, label="lower"),
    case("ReverseSequence", f32(4, 3, 2), ints(4, 2, 3), time_axis=0, batch_axis=1),
    case("Transpose", X, perm=[2, 0, 1]),
    case("Slice", X, ints(4, 1), ints(-9, 3), ints(2, 1), ints(-2, 1)),
    case("Concat", X, f32(2, 1, 5), axis=1),
    case("Concat", X, floats(2, 3, 2), axis=2, label="constant"),
    case("Expand", f32(3, 1), ints(2, 3, 4)),
    case("Reshape", X, ints(5, -1)),
    case("Flatten", X, axis=2),
    case("Squeeze", f32(1, 3, 1), ints(0)),
    case("Squeeze", f32(1, 3, 1), opset=11, axes=[2], label="old"),
    case("Unsqueeze", X, ints(1, 4)),
    case("Split", X, ints(1, 2), axis=1, results=(2, 2)),
)
QUANTISED: Sequence[OperatorCase] = (
    case("QuantizeLinear", X, np.array(0.02, np.float32), np.array(7, np.uint8), tolerance=0.0),
    case(
        *("QuantizeLinear", f32(3, 4), np.array([0.1, 0.02, 0.3], np.float32)),
        np.array([0, -3, 4], np.int8),
        axis=0,
        tolerance=0.0,
        label="axis",
    ),
    case(
        *("QuantizeLinear", Input((9,), halves=True), np.array(1.0, np.float32)),
        np.array(0, np.int8),
        tolerance=0.0,
        label="ties",
    ),
    case("DequantizeLinear", u8(3, 4), np.array(0.02, np.float32), np.array(7, np.uint8)),
    case(
        *("DequantizeLinear", i8(3, 4), np.array([0.1, 0.02, 0.3], np.float32)),
        axis=0,
        label="axis",
    ),
    case("DynamicQuantizeLinear", X, opset=13, results=(3, 3), tolerance=0.0),
    # 7 bits: where a processor has no VNNI, ONNX Runtime saturates sums of pairs at 16 bits
    case(
        *("MatMulInteger", u8(3, 9), i8(9, 4, low=-64, high=63), np.array(100, np.uint8)),
        tolerance=0.0,
    ),
    case(
        *("MatMulInteger", u8(3, 9), RANDOM.integers(-64, 64, (9, 4)).astype(np.int8)),
        *(np.array(3, np.uint8), np.array([1, -2, 0, 4], np.int8)),
        tolerance=0.0,
        label="axis",
    ),
    case(
        *("ConvInteger", u8(1, 2, 5, 5), RANDOM.integers(0, 255, (3, 2, 3, 3)).astype(np.uint8)),
        *(np.array(120, np.uint8), np.array(128, np.uint8)),
        pads=[1, 1, 1, 1],
        tolerance=0.0,
    ),
    case(
        *("QLinearMatMul", u8(3, 9), np.array(0.02, np.float32), np.array(120, np.uint8)),
        *(u8(9, 4), np.array(0.03, np.float32), np.array(130, np.uint8)),
        *(np.array(0.05, np.float32), np.array(110, np.uint8)),
        tolerance=0.005,
    ),
    case(
        *("QLinearConv", u8(1, 2, 5, 5), np.array(0.02, np.float32), np.array(120, np.uint8)),
        RANDOM.integers(0, 255, (3, 2, 3, 3)).astype(np.uint8),
        *(np.array(0.01, np.float32), np.array(128, np.uint8)),
        *(np.array(0.05, np.float32), np.array(110, np.uint8)),
        RANDOM.integers(-99, 99, 3).astype(np.int32),
        tolerance=0.005,
    ),
)


def packed_product(bits: int, block: int, *, zeros: bool) -> OperatorCase:
    """Return x (3, 64) times a packed matrix of 64 x 8."""
    k, n = 64, 8
    blocks = k // block
    weight = RANDOM.integers(0, 256, (n, blocks, block * bits // 8)).astype(np.uint8)
    scales = (0.01 + RANDOM.random(n * blocks) / 20).astype(np.float32)
    points: Operand = None
    if zeros:
        points = RANDOM.integers(0, 256, n * -(-blocks * bits // 8)).astype(np.uint8)
    label = f"{bits}x{block}" + ("-zeros" if zeros else "")
    return case(
        *("MatMulNBits", f32(3, k), weight, scales, *((points,) if zeros else ())),
        K=k,
        N=n,
        bits=bits,
        block_size=block,
        domain="com.microsoft",
        label=label,
    )


PACKED: Sequence[OperatorCase] = (
    packed_product(4, 16, zeros=False),
    packed_product(4, 32, zeros=True),
    packed_product(4, 64, zeros=True),
    packed_product(8, 32, zeros=False),
    packed_product(8, 16, zeros=True),
    packed_product(2, 32, zeros=False),
    packed_product(2, 16, zeros=True),
)
ROWS = f32(2, 5, 16)
FUSED: Sequence[OperatorCase] = (
    *(
        case("MultiHeadAttention", *operands, num_heads=4, domain="com.microsoft", **attrs)
        for operands, attrs in (
            ((ROWS, ROWS, ROWS), {"label": "self"}),
            ((ROWS, f32(2, 7, 16), f32(2, 7, 16), floats(48)), {"label": "cross", "scale": 0.3}),
            ((ROWS, ROWS, ROWS), {"label": "causal", "unidirectional": 1}),
            (
                (ROWS, ROWS, ROWS, None, np.array([[1] * 5, [1, 1, 1, 0, 0]], np.int32)),
                {"label": "padding"},
            ),
            ((ROWS, ROWS, ROWS, None, None, f32(1, 4, 5, 5)), {"label": "bias"}),
        )
    ),
)
SEQUENCE = f32(4, 2, 3)
RECURRENT: Sequence[OperatorCase] = (
    case(
        "LSTM",
        SEQUENCE,
        floats(1, 20, 3),
        floats(1, 20, 5),
        floats(1, 40),
        hidden_size=5,
        results=(3, 3),
    ),
    case(
        "LSTM",
        SEQUENCE,
        floats(2, 20, 3),
        floats(2, 20, 5),
        floats(2, 40),
        None,
        f32(2, 2, 5),
        f32(2, 2, 5),
        hidden_size=5,
        direction="bidirectional",
        results=(3, 3),
        label="both",
    ),
    case(
        "GRU",
        SEQUENCE,
        floats(1, 15, 3),
        floats(1, 15, 5),
        floats(1, 30),
        hidden_size=5,
        results=(2, 2),
    ),
    case(
        "GRU",
        SEQUENCE,
        floats(1, 15, 3),
        floats(1, 15, 5),
        floats(1, 30),
        hidden_size=5,
        linear_before_reset=1,
        direction="reverse",
        results=(2, 2),
        label="reverse",
    ),
    case(
        "LSTM",
        f32(3, 1, 3),
        f32(1, 20, 3),
        floats(1, 20, 5),
        floats(1, 40),
        hidden_size=5,
        results=(3, 3),
        label="unrolled",
    ),
    case(
        "LSTM",
        f32(700, 1, 40, low=-0.5, high=0.5),
        floats(1, 96, 40) * np.float32(0.1),
        floats(1, 96, 24) * np.float32(0.1),
        hidden_size=24,
        direction="reverse",
        results=(3, 1),
        label="long",
    ),
    case(
        "GRU",
        f32(5, 3, 33),
        floats(2, 60, 33),
        floats(2, 60, 20),
        floats(2, 120),
        None,
        f32(2, 3, 20),
        hidden_size=20,
        linear_before_reset=1,
        direction="bidirectional",
        results=(2, 2),
        label="both",
    ),
    case(
        "RNN",
        SEQUENCE,
        floats(1, 5, 3),
        floats(1, 5, 5),
        floats(1, 10),
        hidden_size=5,
        results=(2, 2),
    ),
)
GROUPS: Mapping[str, Sequence[OperatorCase]] = {
    "unary": UNARY,
    "binary": BINARY,
    "matrix": MATRIX,
    "network": NETWORK,
    "index": INDEX,
    "quantised": QUANTISED,
    "packed": PACKED,
    "fused": FUSED,
    "recurrent": RECURRENT,
}
