"""Dialect `sp`: tensor mathematics on values whose types carry `#sp.enc`.

`sp.onnx` is what the importer writes for an ONNX node that no pass has raised yet; every other
operation has a fixed meaning. Movement operations (`reshape`, `expand`, `transpose`, `slice`,
`concat`) only say which element goes where; `compiler.analysis.movement` evaluates chains of them.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from xdsl.dialects.builtin import (
    DenseArrayBase,
    DictionaryAttr,
    FloatAttr,
    StringAttr,
    TensorType,
)
from xdsl.ir import Attribute, Dialect, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    prop_def,
    result_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.traits import Pure

from compiler.contract.windows import Window
from compiler.dialects.dims import Dim
from compiler.dialects.encoding import EncodingAttr
from compiler.dialects.invariant import SparsityInvariant
from compiler.dialects.movement import MOVEMENT_OPS
from compiler.dialects.properties import integers, real, require
from compiler.dialects.sp_convert import CONVERT_OPS
from compiler.dialects.types import Tensor, dtype_of, shape_of, tensor_type

ACTS: Final = ("none", "relu", "silu")
STORAGES: Final = ("w4", "w8", "f32")
QUANTISED: Final = ("w4", "w8")
"""Storages whose products round a row of x to int8, by its largest element."""
BINARY_KINDS: Final = ("add", "mul", "sub", "div")
UNARY_KINDS: Final = (
    *("relu", "sigmoid", "silu", "neg", "sqrt", "reciprocal", "exp", "tanh"),
    *("gelu", "gelu_tanh"),
)


@irdl_op_definition
class ConstantOp(IRDLOperation):
    """A constant by content: the array stands in the `ConstantTable` under `sha256`."""

    name = "sp.constant"
    sha256 = prop_def(StringAttr)
    preview = prop_def(StringAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(self, sha256: str, preview: str, result: Tensor) -> None:
        super().__init__(
            properties={"sha256": StringAttr(sha256), "preview": StringAttr(preview)},
            result_types=[result],
        )


@irdl_op_definition
class OnnxOp(IRDLOperation):
    """An ONNX node as imported: constant shape operands are gone, attributes are complete."""

    name = "sp.onnx"
    arguments = var_operand_def(TensorType)
    op = prop_def(StringAttr)
    attrs = prop_def(DictionaryAttr)
    slots = prop_def(DenseArrayBase)
    outputs = var_result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant("op"))

    def __init__(
        self,
        op: str,
        arguments: Sequence[SSAValue | None],
        attrs: Mapping[str, Attribute],
        results: Sequence[Tensor],
    ) -> None:
        """Build from ONNX operands, where None stands for an omitted one."""
        present = [a for a in arguments if a is not None]
        slots, at = [], 0
        for argument in arguments:
            slots.append(-1 if argument is None else at)
            at += argument is not None
        super().__init__(
            operands=[present],
            properties={
                "op": StringAttr(op),
                "attrs": DictionaryAttr({key: attrs[key] for key in sorted(attrs)}),
                "slots": integers(slots),
            },
            result_types=[list(results)],
        )

    def operand_at(self, at: int) -> SSAValue | None:
        """Return ONNX operand `at`, or None if it is omitted."""
        slots = self.slots.get_values()
        if at >= len(slots) or slots[at] < 0:
            return None
        return self.arguments[int(slots[at])]

    def verify_(self) -> None:
        """Slots must name each argument once, in order."""
        used = [s for s in self.slots.get_values() if s >= 0]
        require(used == list(range(len(self.arguments))), self, "slots do not match the arguments")


@irdl_op_definition
class LinearOp(IRDLOperation):
    """`y = residual + act(x @ weight^T + bias)`; weight (N, K); storage `w4`, `w8` or `f32`."""

    name = "sp.linear"
    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    bias = opt_operand_def(TensorType)
    residual = opt_operand_def(TensorType)
    act = prop_def(StringAttr)
    storage = prop_def(StringAttr)
    result = result_def(TensorType)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(
        self,
        x: SSAValue,
        weight: SSAValue,
        bias: SSAValue | None = None,
        residual: SSAValue | None = None,
        *,
        act: str = "none",
        storage: str = "w4",
    ) -> None:
        shape = (*shape_of(x)[:-1], shape_of(weight)[0])
        super().__init__(
            operands=[x, weight, bias, residual],
            properties={"act": StringAttr(act), "storage": StringAttr(storage)},
            result_types=[tensor_type(dtype_of(x), shape)],
        )

    def verify_(self) -> None:
        """Shapes chain; bias is a vector; the residual has the result's shape."""
        weight, x, y = shape_of(self.weight), shape_of(self.x), shape_of(self.result)
        require(self.act.data in ACTS, self, f"unknown act {self.act.data!r}")
        require(self.storage.data in STORAGES, self, f"unknown storage {self.storage.data!r}")
        require(len(weight) == 2 and weight[1] == x[-1], self, "weight does not fit x")
        require(y == (*x[:-1], weight[0]), self, "weight does not fit the result")
        if self.bias is not None:
            require(shape_of(self.bias) == (weight[0],), self, "bias must be a vector of N")
        if self.residual is not None:
            require(shape_of(self.residual) == y, self, "residual has another shape")


@irdl_op_definition
class NormOp(IRDLOperation):
    """Normalisation of the last axis; `kind` rms (no beta) or layer."""

    name = "sp.norm"
    x = operand_def(TensorType)
    gamma = operand_def(TensorType)
    beta = opt_operand_def(TensorType)
    kind = prop_def(StringAttr)
    eps = prop_def(FloatAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant("kind"))

    def __init__(
        self, x: SSAValue, gamma: SSAValue, beta: SSAValue | None, *, kind: str, eps: float
    ) -> None:
        super().__init__(
            operands=[x, gamma, beta],
            properties={"kind": StringAttr(kind), "eps": real(eps)},
            result_types=[tensor_type(dtype_of(x), shape_of(x))],
        )

    def verify_(self) -> None:
        """Vectors gamma and beta run over the last axis."""
        last = shape_of(self.x)[-1:]
        require(self.kind.data in ("rms", "layer"), self, f"unknown kind {self.kind.data!r}")
        require(shape_of(self.gamma) == last, self, "gamma must be a vector over the last axis")
        require(self.beta is None or shape_of(self.beta) == last, self, "beta has another size")
        require(shape_of(self.x) == shape_of(self.result), self, "the shape changes")


@irdl_op_definition
class Conv2dOp(IRDLOperation):
    """Convolution of images in HWC order: x (N*H*W, Ci), weight (Co, kh*kw*Ci) in (ky, kx, ci).

    Depthwise is weight (Ci, kh*kw): every channel by itself. Numbers of the geometry are those of
    `compiler.contract.windows`; a seventh is the stride across, if that is not the stride down.
    """

    name = "sp.conv2d"
    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    bias = opt_operand_def(TensorType)
    geometry = prop_def(DenseArrayBase)
    act = prop_def(StringAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant())
    FIELDS: ClassVar[tuple[str, ...]] = ("H", "W", "kh", "kw", "stride", "pad", "stride_x")

    def __init__(
        self,
        x: SSAValue,
        weight: SSAValue,
        bias: SSAValue | None,
        geometry: Sequence[int],
        *,
        act: str = "none",
    ) -> None:
        window = Window.of(dict(zip(self.FIELDS, geometry, strict=False)))
        images = shape_of(x)[0].constant // (window.height * window.width)
        rows, columns = window.out
        super().__init__(
            operands=[x, weight, bias],
            properties={"geometry": integers(geometry), "act": StringAttr(act)},
            result_types=[
                tensor_type(dtype_of(x), [Dim(images * rows * columns), shape_of(weight)[0]])
            ],
        )

    def parameters(self) -> dict[str, int]:
        """Return height, width, window, stride and padding by name."""
        return dict(zip(self.FIELDS, map(int, self.geometry.get_values()), strict=False))

    @property
    def is_depthwise(self) -> bool:
        """Whether every channel is convolved by itself; one channel counts as dense."""
        p, x, weight = self.parameters(), shape_of(self.x), shape_of(self.weight)
        return x[1] != Dim(1) and (weight[0], weight[1]) == (x[1], Dim(p["kh"] * p["kw"]))

    def verify_(self) -> None:
        """Rows are whole images of H*W and weight columns are kh*kw*Ci, or kh*kw by channel."""
        p, x, weight = self.parameters(), shape_of(self.x), shape_of(self.weight)
        require(len(p) >= len(self.FIELDS) - 1, self, "its geometry has too few numbers")
        require(self.act.data in ACTS, self, f"unknown act {self.act.data!r}")
        images, rest = divmod(x[0].constant, p["H"] * p["W"])
        require(x[0].is_static and images > 0 and not rest, self, "rows are not whole images")
        dense = weight[1] == x[1].times(p["kh"] * p["kw"])
        require(dense or self.is_depthwise, self, "weight columns do not fit")


@irdl_op_definition
class BinaryOp(IRDLOperation):
    """Elementwise `act(a kind b)`; b broadcasts to a."""

    name = "sp.binary"
    a = operand_def(TensorType)
    b = operand_def(TensorType)
    kind = prop_def(StringAttr)
    act = prop_def(StringAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant("kind"))

    def __init__(self, a: SSAValue, b: SSAValue, *, kind: str, act: str = "none") -> None:
        super().__init__(
            operands=[a, b],
            properties={"kind": StringAttr(kind), "act": StringAttr(act)},
            result_types=[tensor_type(dtype_of(a), shape_of(a))],
        )

    def verify_(self) -> None:
        """The result has a's shape."""
        require(self.kind.data in BINARY_KINDS, self, f"unknown kind {self.kind.data!r}")
        require(self.act.data in ACTS, self, f"unknown act {self.act.data!r}")
        require(shape_of(self.a) == shape_of(self.result), self, "the shape changes")


@irdl_op_definition
class UnaryOp(IRDLOperation):
    """Elementwise function of one operand."""

    name = "sp.unary"
    x = operand_def(TensorType)
    kind = prop_def(StringAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant("kind"))

    def __init__(self, x: SSAValue, *, kind: str) -> None:
        super().__init__(
            operands=[x],
            properties={"kind": StringAttr(kind)},
            result_types=[tensor_type(dtype_of(x), shape_of(x))],
        )

    def verify_(self) -> None:
        """The function is known and keeps the shape."""
        require(self.kind.data in UNARY_KINDS, self, f"unknown kind {self.kind.data!r}")
        require(shape_of(self.x) == shape_of(self.result), self, "the shape changes")


@irdl_op_definition
class SoftmaxOp(IRDLOperation):
    """Softmax of the last axis."""

    name = "sp.softmax"
    x = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(self, x: SSAValue) -> None:
        super().__init__(operands=[x], result_types=[tensor_type(dtype_of(x), shape_of(x))])


@irdl_op_definition
class EmbedOp(IRDLOperation):
    """Rows of `table` (V, D) by token id; ids (..., T) -> (..., T, D)."""

    name = "sp.embed"
    ids = operand_def(TensorType)
    table = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(self, ids: SSAValue, table: SSAValue) -> None:
        shape = (*shape_of(ids), shape_of(table)[1])
        super().__init__(operands=[ids, table], result_types=[tensor_type(dtype_of(table), shape)])

    def verify_(self) -> None:
        """The table has two axes and ids are integers."""
        require(len(shape_of(self.table)) == 2, self, "the table is not a matrix")
        require(dtype_of(self.ids) in ("int32", "int64"), self, "ids are not integers")


@irdl_op_definition
class ImageOp(IRDLOperation):
    """Pixels u8 (1, H*W*C) in HWC order to `x / divide - subtract`, f32 (H*W, C)."""

    name = "sp.image"
    pixels = operand_def(TensorType)
    divide = prop_def(FloatAttr)
    subtract = prop_def(FloatAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(
        self, pixels: SSAValue, rows: int, channels: int, *, divide: float, subtract: float
    ) -> None:
        super().__init__(
            operands=[pixels],
            properties={"divide": real(divide), "subtract": real(subtract)},
            result_types=[tensor_type("float32", [rows, channels])],
        )


@irdl_op_definition
class ArgmaxOp(IRDLOperation):
    """Index of the greatest element of the last axis; ties go to the lower index."""

    name = "sp.argmax"
    x = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(self, x: SSAValue) -> None:
        shape = (*shape_of(x)[:-1], Dim(1))
        super().__init__(operands=[x], result_types=[tensor_type("int64", shape)])


Sp: Final = Dialect(
    "sp",
    [
        ConstantOp,
        OnnxOp,
        *MOVEMENT_OPS,
        *CONVERT_OPS,
        LinearOp,
        NormOp,
        Conv2dOp,
        BinaryOp,
        UnaryOp,
        SoftmaxOp,
        EmbedOp,
        ImageOp,
        ArgmaxOp,
    ],
    [EncodingAttr],
)
