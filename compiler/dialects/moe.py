"""Dialect `moe`: routing tokens to experts, and the experts themselves."""

from typing import Final

from xdsl.dialects.builtin import IntegerAttr, StringAttr, TensorType
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

from compiler.dialects.dims import Dim
from compiler.dialects.properties import integer, require
from compiler.dialects.types import dtype_of, shape_of, tensor_type

ROUTE_ORDERS: Final = ("topk_softmax", "softmax_topk", "softmax_topk_renorm")
EXPERT_ACTS: Final = ("relu", "swiglu")


@irdl_op_definition
class RouteOp(IRDLOperation):
    """The `k` best experts of each row and their gates.

    Logits are `x @ weight^T + bias`, weight (E, D). `order` says where the softmax stands and
    whether the chosen gates are divided by their sum. Ties go to the lower expert.
    """

    name = "moe.route"
    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    bias = opt_operand_def(TensorType)
    k = prop_def(IntegerAttr)
    order = prop_def(StringAttr)
    index = result_def(TensorType)
    gate = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(
        self, x: SSAValue, weight: SSAValue, bias: SSAValue | None, *, k: int, order: str
    ) -> None:
        rows = shape_of(x)[:-1]
        super().__init__(
            operands=[x, weight, bias],
            properties={"k": integer(k), "order": StringAttr(order)},
            result_types=[
                tensor_type("int64", [*rows, Dim(k)]),
                tensor_type(dtype_of(x), [*rows, Dim(k)]),
            ],
        )

    def verify_(self) -> None:
        """Results have k columns; the weight has one row per expert and at least k of them."""
        k, weight = Dim(self.k.value.data), shape_of(self.weight)
        require(self.order.data in ROUTE_ORDERS, self, f"unknown order {self.order.data!r}")
        require(shape_of(self.index)[-1] == k, self, f"last dim of index is not k={k}")
        require(shape_of(self.gate) == shape_of(self.index), self, "gate and index differ")
        require(len(weight) == 2 and weight[1] == shape_of(self.x)[-1], self, "weight does not fit")
        require(1 <= k.constant <= weight[0].constant, self, "k exceeds the number of experts")
        require(self.bias is None or shape_of(self.bias) == weight[:1], self, "bias does not fit")


@irdl_op_definition
class ExpertsOp(IRDLOperation):
    """`y = sum over chosen e of gate_e * w_out[e] @ act(w_in[e] @ x)`.

    relu: w_in (E, F, D). swiglu: w_in (E, 2F, D), gate rows then up rows,
    `act(g, u) = silu(g) * u`. w_out (E, D, F).
    """

    name = "moe.experts"
    x = operand_def(TensorType)
    index = operand_def(TensorType)
    gate = operand_def(TensorType)
    w_in = operand_def(TensorType)
    w_out = operand_def(TensorType)
    act = prop_def(StringAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(
        self,
        x: SSAValue,
        index: SSAValue,
        gate: SSAValue,
        w_in: SSAValue,
        w_out: SSAValue,
        *,
        act: str,
    ) -> None:
        super().__init__(
            operands=[x, index, gate, w_in, w_out],
            properties={"act": StringAttr(act)},
            result_types=[tensor_type(dtype_of(x), shape_of(x))],
        )

    def verify_(self) -> None:
        """Index and gate agree, and the two stacks of matrices chain."""
        w_in, w_out, width = shape_of(self.w_in), shape_of(self.w_out), shape_of(self.x)[-1]
        require(self.act.data in EXPERT_ACTS, self, f"unknown act {self.act.data!r}")
        require(shape_of(self.index) == shape_of(self.gate), self, "gate and index differ")
        require(len(w_in) == 3 and len(w_out) == 3, self, "weights are not stacked by expert")
        factor = 2 if self.act.data == "swiglu" else 1
        chained = w_in[0] == w_out[0] and w_in[1] == w_out[2].times(factor)
        require(chained and w_in[2] == width == w_out[1], self, "expert shapes do not chain")
        require(shape_of(self.result) == shape_of(self.x), self, "the shape changes")


Moe: Final = Dialect("moe", [RouteOp, ExpertsOp], [])
