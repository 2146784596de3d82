"""Dialect `moe`, second part: whole routed layers, their pieces, and when to load what.

    moe.fused_layer = sp.norm > moe.layer [> sp.binary add]
    moe.layer       = moe.route, and per expert moe.expert_load > moe.gemm, then moe.merge
    moe.schedule    says, per layer, what the planner does beside it: `prefetch(l+1)`, `defer(k)`

`compiler.passes.decompose_moe` goes from one form to the other and back.
"""

from collections.abc import Sequence
from typing import Final

from xdsl.dialects.builtin import ArrayAttr, FloatAttr, IntAttr, IntegerAttr, StringAttr, TensorType
from xdsl.ir import Attribute, ParametrizedAttribute, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    BaseAttr,
    IRDLOperation,
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    param_def,
    prop_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from compiler.contract.schedule import LEAST_AMOUNT, STEP_KINDS, step_place
from compiler.dialects.dims import Dim
from compiler.dialects.moe import EXPERT_ACTS, GATED_ACTS
from compiler.dialects.properties import integer, real, require
from compiler.dialects.types import Tensor, dtype_of, shape_of, tensor_type

PLAIN_ORDERS: Final = ("topk_softmax", "softmax_topk", "softmax_topk_renorm")
STEPS: Final = STEP_KINDS
"""`prefetch(d)`: load the likely experts of layer l + d. `foresee(d)`: load what the router of that
layer would choose of what is known here. `defer(k)`: the k weakest experts of this layer may be
added one layer later."""


def _layer_results(x: SSAValue, k: int) -> list[Tensor]:
    rows = shape_of(x)[:-1]
    return [
        tensor_type(dtype_of(x), shape_of(x)),
        tensor_type("int64", [*rows, Dim(k)]),
        tensor_type(dtype_of(x), [*rows, Dim(k)]),
    ]


@irdl_op_definition
class LayerOp(IRDLOperation):
    """`index, gate = route(x)`, `result = experts(x, index, gate)`, without biases of experts."""

    name = "moe.layer"
    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    bias = opt_operand_def(TensorType)
    w_in = operand_def(TensorType)
    w_out = operand_def(TensorType)
    k = prop_def(IntegerAttr)
    order = prop_def(StringAttr)
    act = prop_def(StringAttr)
    result = result_def(TensorType)
    index = result_def(TensorType)
    gate = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(
        self,
        x: SSAValue,
        router: tuple[SSAValue, SSAValue | None],
        experts: tuple[SSAValue, SSAValue],
        *,
        k: int,
        order: str,
        act: str,
    ) -> None:
        super().__init__(
            operands=[x, *router, *experts],
            properties={"k": integer(k), "order": StringAttr(order), "act": StringAttr(act)},
            result_types=_layer_results(x, k),
        )

    def verify_(self) -> None:
        """Router and experts are of equal number and fit the rows."""
        width, router = shape_of(self.x)[-1], shape_of(self.weight)
        w_in, w_out = shape_of(self.w_in), shape_of(self.w_out)
        require(self.order.data in PLAIN_ORDERS, self, f"unknown order {self.order.data!r}")
        require(self.act.data in EXPERT_ACTS, self, f"unknown act {self.act.data!r}")
        require(len(w_in) == len(w_out) == 3, self, "weights are not stacked by expert")
        factor = 2 if self.act.data in GATED_ACTS else 1
        chained = w_in[0] == w_out[0] and w_in[1] == w_out[2].times(factor)
        require(chained and w_in[2] == width == w_out[1], self, "expert shapes do not chain")
        require(router == (w_in[0], width), self, "the router does not fit the experts")
        require(1 <= self.k.value.data <= w_in[0].constant, self, "k exceeds the experts")


@irdl_op_definition
class FusedLayerOp(IRDLOperation):
    """`result = [x +] layer(norm(x))`: what one MOE_LAYER call computes."""

    name = "moe.fused_layer"
    x = operand_def(TensorType)
    gamma = operand_def(TensorType)
    beta = opt_operand_def(TensorType)
    weight = operand_def(TensorType)
    bias = opt_operand_def(TensorType)
    w_in = operand_def(TensorType)
    w_out = operand_def(TensorType)
    kind = prop_def(StringAttr)
    eps = prop_def(FloatAttr)
    residual = prop_def(IntegerAttr)
    k = prop_def(IntegerAttr)
    order = prop_def(StringAttr)
    act = prop_def(StringAttr)
    result = result_def(TensorType)
    index = result_def(TensorType)
    gate = result_def(TensorType)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(Pure())

    def __init__(
        self,
        x: SSAValue,
        norm: tuple[SSAValue, SSAValue | None],
        router: tuple[SSAValue, SSAValue | None],
        experts: tuple[SSAValue, SSAValue],
        *,
        kind: str,
        eps: float,
        residual: bool,
        k: int,
        order: str,
        act: str,
    ) -> None:
        super().__init__(
            operands=[x, *norm, *router, *experts],
            properties={
                "kind": StringAttr(kind),
                "eps": real(eps),
                "residual": integer(int(residual)),
                "k": integer(k),
                "order": StringAttr(order),
                "act": StringAttr(act),
            },
            result_types=_layer_results(x, k),
        )

    def verify_(self) -> None:
        """The norm fits the rows; the rest is checked on the layer it stands for."""
        require(self.kind.data in ("rms", "layer"), self, f"unknown norm {self.kind.data!r}")
        require(shape_of(self.gamma) == shape_of(self.x)[-1:], self, "gamma has another size")
        require(self.residual.value.data in (0, 1), self, "residual is 0 or 1")


@irdl_op_definition
class ExpertLoadOp(IRDLOperation):
    """Matrix `expert` of a stack (E, N, K): the point at which it must be in memory."""

    name = "moe.expert_load"
    stack = operand_def(TensorType)
    expert = prop_def(IntegerAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, stack: SSAValue, *, expert: int) -> None:
        super().__init__(
            operands=[stack],
            properties={"expert": integer(expert)},
            result_types=[tensor_type(dtype_of(stack), shape_of(stack)[1:])],
        )

    def verify_(self) -> None:
        """The expert exists."""
        shape = shape_of(self.stack)
        require(len(shape) == 3, self, "the stack is not stacked by expert")
        require(0 <= self.expert.value.data < shape[0].constant, self, "there is no such expert")


@irdl_op_definition
class GemmOp(IRDLOperation):
    """One expert's share: `gate * (w_out @ act(w_in @ x))` in rows that chose it, else zero."""

    name = "moe.gemm"
    x = operand_def(TensorType)
    index = operand_def(TensorType)
    gate = operand_def(TensorType)
    w_in = operand_def(TensorType)
    w_out = operand_def(TensorType)
    expert = prop_def(IntegerAttr)
    act = prop_def(StringAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(
        self,
        x: SSAValue,
        routing: tuple[SSAValue, SSAValue],
        matrices: tuple[SSAValue, SSAValue],
        *,
        expert: int,
        act: str,
    ) -> None:
        super().__init__(
            operands=[x, *routing, *matrices],
            properties={"expert": integer(expert), "act": StringAttr(act)},
            result_types=[tensor_type(dtype_of(x), shape_of(x))],
        )

    def verify_(self) -> None:
        """The two matrices chain and fit the rows."""
        w_in, w_out, width = shape_of(self.w_in), shape_of(self.w_out), shape_of(self.x)[-1]
        require(self.act.data in EXPERT_ACTS, self, f"unknown act {self.act.data!r}")
        factor = 2 if self.act.data in GATED_ACTS else 1
        chained = w_in[0] == w_out[1].times(factor) and w_in[1] == width == w_out[0]
        require(chained, self, "expert shapes do not chain")
        require(shape_of(self.index) == shape_of(self.gate), self, "gate and index differ")


@irdl_op_definition
class MergeOp(IRDLOperation):
    """Sum of the experts' shares in ascending order of expert, starting from zero."""

    name = "moe.merge"
    shares = var_operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, shares: Sequence[SSAValue]) -> None:
        super().__init__(
            operands=[list(shares)],
            result_types=[tensor_type(dtype_of(shares[0]), shape_of(shares[0]))],
        )

    def verify_(self) -> None:
        """Shares are of one shape."""
        require(len(self.shares) >= 1, self, "there is nothing to merge")
        alike = {tuple(shape_of(share)) for share in (*self.shares, self.result)}
        require(len(alike) == 1, self, "shares differ in shape")


@irdl_attr_definition
class StepAttr(ParametrizedAttribute):
    """What happens beside one layer: `#moe.step<layer 0, prefetch 1>`."""

    name = "moe.step"
    layer: IntAttr = param_def()
    kind: StringAttr = param_def(BaseAttr(StringAttr))
    amount: IntAttr = param_def()

    @classmethod
    def make(cls, layer: int, kind: str, amount: int) -> "StepAttr":
        """Build the attribute from plain values."""
        return cls(IntAttr(layer), StringAttr(kind), IntAttr(amount))

    def verify(self) -> None:
        """Refuse unknown kinds, negative layers, and steps of nothing."""
        if self.kind.data not in STEPS:
            raise VerifyException(f"unknown step {self.kind.data!r}")
        if self.layer.data < 0 or self.amount.data < LEAST_AMOUNT[self.kind.data]:
            raise VerifyException("a step has a layer from 0 and an amount that is one")

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        """Parse the text between the angle brackets, brackets included."""
        with parser.in_angle_brackets():
            parser.parse_keyword("layer")
            layer = parser.parse_integer()
            parser.parse_punctuation(",")
            kind = parser.parse_identifier()
            amount = parser.parse_integer()
        return cls.make(layer, kind, amount).parameters

    def print_parameters(self, printer: Printer) -> None:
        """Print the text that `parse_parameters` reads."""
        printer.print_string(f"<layer {self.layer.data}, {self.kind.data} {self.amount.data}>")


@irdl_op_definition
class ScheduleOp(IRDLOperation):
    """The steps of one program, in order of layer; stands beside the functions of a module."""

    name = "moe.schedule"
    program = prop_def(StringAttr)
    steps = prop_def(ArrayAttr)

    def __init__(self, program: str, steps: Sequence[tuple[int, str, int]]) -> None:
        super().__init__(
            properties={
                "program": StringAttr(program),
                "steps": ArrayAttr([StepAttr.make(*step) for step in steps]),
            }
        )

    def entries(self) -> list[tuple[int, str, int]]:
        """Return the steps as (layer, kind, amount)."""
        found = []
        for step in self.steps.data:
            assert isinstance(step, StepAttr)
            found.append((step.layer.data, step.kind.data, step.amount.data))
        return found

    def verify_(self) -> None:
        """Steps are in order of layer; each kind but `foresee` at most once per layer."""
        require(all(isinstance(s, StepAttr) for s in self.steps.data), self, "not a step")
        entries = [step_place(*entry) for entry in self.entries()]
        require(entries == sorted(set(entries)), self, "steps are not in order, or twice")


LAYER_OPS: Final = (LayerOp, FusedLayerOp, ExpertLoadOp, GemmOp, MergeOp, ScheduleOp)
LAYER_ATTRS: Final = (StepAttr,)
