"""Dialect `moe`: routing tokens to experts, and the experts themselves."""

from collections.abc import Mapping
from typing import Final

from xdsl.dialects.builtin import FloatAttr, IntegerAttr, StringAttr, TensorType
from xdsl.ir import Attribute, Dialect, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    opt_prop_def,
    prop_def,
    result_def,
    traits_def,
)
from xdsl.traits import Pure

from compiler.contract.moe_rules import CODE_KINDS
from compiler.dialects.dims import Dim
from compiler.dialects.invariant import SparsityInvariant
from compiler.dialects.properties import integer, real, require
from compiler.dialects.types import dtype_of, shape_of, tensor_type

ROUTE_ORDERS: Final = (
    "topk_softmax",
    "softmax_topk",
    "softmax_topk_renorm",
    "sparsemixer",
    "sigmoid_topk",
    "sigmoid_topk_renorm",
)
EXPERT_ACTS: Final = (
    "relu",
    "swiglu",
    "gelu",
    "gelu_tanh",
    "silu",
    "identity",
    "swiglu_clipped",
    "reglu",
)
GATED_ACTS: Final = ("swiglu", "swiglu_clipped", "reglu")


@irdl_op_definition
class RouteOp(IRDLOperation):
    """The `k` best experts of each row and their gates.

    Logits are `x @ weight^T + bias`, weight (E, D). `order` says how scores and gates follow from
    them (`compiler.contract.operations.RouteOrder`). The sigmoid orders choose by score plus
    `correction`, from the `top_groups` of `groups` equal groups whose `group_take` best have the
    greatest sum. Gates are multiplied by `scale`; `jitter` is the sparse mixer's threshold. Ties
    go to the lower expert.
    """

    name = "moe.route"
    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    bias = opt_operand_def(TensorType)
    correction = opt_operand_def(TensorType)
    k = prop_def(IntegerAttr)
    order = prop_def(StringAttr)
    groups = opt_prop_def(IntegerAttr)
    top_groups = opt_prop_def(IntegerAttr)
    group_take = opt_prop_def(IntegerAttr)
    scale = opt_prop_def(FloatAttr)
    jitter = opt_prop_def(FloatAttr)
    index = result_def(TensorType)
    gate = result_def(TensorType)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(
        self,
        x: SSAValue,
        weight: SSAValue,
        bias: SSAValue | None,
        correction: SSAValue | None = None,
        *,
        k: int,
        order: str,
        **options: float,
    ) -> None:
        """Build; `options` are the optional properties that are not at their neutral value."""
        rows = shape_of(x)[:-1]
        super().__init__(
            operands=[x, weight, bias, correction],
            properties={"k": integer(k), "order": StringAttr(order), **_numbers(options)},
            result_types=[
                tensor_type("int64", [*rows, Dim(k)]),
                tensor_type(dtype_of(x), [*rows, Dim(k)]),
            ],
        )

    def options(self) -> dict[str, int | float]:
        """Return the optional properties that are set, as numbers."""
        names = ("groups", "top_groups", "group_take", "scale", "jitter")
        return {name: self.properties[name].value.data for name in names if name in self.properties}  # type: ignore[attr-defined]

    def verify_(self) -> None:
        """Results have k columns; the weight has one row per expert and at least k of them."""
        k, weight = Dim(self.k.value.data), shape_of(self.weight)
        require(self.order.data in ROUTE_ORDERS, self, f"unknown order {self.order.data!r}")
        require(shape_of(self.index)[-1] == k, self, f"last dim of index is not k={k}")
        require(shape_of(self.gate) == shape_of(self.index), self, "gate and index differ")
        require(len(weight) == 2 and weight[1] == shape_of(self.x)[-1], self, "weight does not fit")
        require(1 <= k.constant <= weight[0].constant, self, "k exceeds the number of experts")
        for vector in (self.bias, self.correction):
            require(vector is None or shape_of(vector) == weight[:1], self, "bias does not fit")
        grouped = self.correction is not None or self.groups is not None
        sigmoid = self.order.data.startswith("sigmoid")
        require(sigmoid or not grouped, self, "groups belong to sigmoid orders")


@irdl_op_definition
class ExpertsOp(IRDLOperation):
    """`y = sum over chosen e of gate_e * (w_out[e] @ act(w_in[e] @ x + b_in[e]) + b_out[e])`.

    Gated acts: w_in (E, 2F, D), gate rows then up rows; others w_in (E, F, D). w_out (E, D, F),
    b_in (E, rows of w_in), b_out (E, D): both or none. Acts are those of
    `compiler.contract.operations.ExpertAct`; `alpha`, `limit`, `shift` belong to swiglu_clipped.
    Matrices are stored in four bits, or in eight with storage `w8`.
    """

    name = "moe.experts"
    x = operand_def(TensorType)
    index = operand_def(TensorType)
    gate = operand_def(TensorType)
    w_in = operand_def(TensorType)
    w_out = operand_def(TensorType)
    b_in = opt_operand_def(TensorType)
    b_out = opt_operand_def(TensorType)
    act = prop_def(StringAttr)
    alpha = opt_prop_def(FloatAttr)
    limit = opt_prop_def(FloatAttr)
    shift = opt_prop_def(FloatAttr)
    storage = opt_prop_def(StringAttr)
    result = result_def(TensorType)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(Pure(), SparsityInvariant())

    def __init__(
        self,
        x: SSAValue,
        index: SSAValue,
        gate: SSAValue,
        w_in: SSAValue,
        w_out: SSAValue,
        b_in: SSAValue | None = None,
        b_out: SSAValue | None = None,
        *,
        act: str,
        storage: str = "w4",
        **options: float,
    ) -> None:
        given = {} if storage == "w4" else {"storage": StringAttr(storage)}
        super().__init__(
            operands=[x, index, gate, w_in, w_out, b_in, b_out],
            properties={"act": StringAttr(act), **given, **_numbers(options)},
            result_types=[tensor_type(dtype_of(x), shape_of(x))],
        )

    @property
    def stored_as(self) -> str:
        """`w4` or `w8`."""
        return "w4" if self.storage is None else self.storage.data

    def options(self) -> dict[str, float]:
        """Return the optional properties that are set, as numbers."""
        names = ("alpha", "limit", "shift")
        return {name: self.properties[name].value.data for name in names if name in self.properties}  # type: ignore[attr-defined]

    def verify_(self) -> None:
        """Index and gate agree, and the two stacks of matrices chain."""
        w_in, w_out, width = shape_of(self.w_in), shape_of(self.w_out), shape_of(self.x)[-1]
        require(self.act.data in EXPERT_ACTS, self, f"unknown act {self.act.data!r}")
        require(self.stored_as in CODE_KINDS, self, f"unknown storage {self.stored_as!r}")
        require(shape_of(self.index) == shape_of(self.gate), self, "gate and index differ")
        require(len(w_in) == 3 and len(w_out) == 3, self, "weights are not stacked by expert")
        factor = 2 if self.act.data in GATED_ACTS else 1
        chained = w_in[0] == w_out[0] and w_in[1] == w_out[2].times(factor)
        require(chained and w_in[2] == width == w_out[1], self, "expert shapes do not chain")
        require((self.b_in is None) == (self.b_out is None), self, "one bias without the other")
        if self.b_in is not None and self.b_out is not None:
            fits = shape_of(self.b_in) == w_in[:2] and shape_of(self.b_out) == w_out[:2]
            require(fits, self, "biases do not fit")
        require(shape_of(self.result) == shape_of(self.x), self, "the shape changes")


def _numbers(options: Mapping[str, float]) -> dict[str, Attribute]:
    return {
        name: integer(value) if isinstance(value, int) else real(value)
        for name, value in options.items()
        if value
    }


Moe: Final = Dialect("moe", [RouteOp, ExpertsOp], [])
