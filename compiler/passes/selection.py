"""The state of choosing kernels for one function, and how an operation is refused."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NoReturn

from xdsl.ir import Block, Operation, SSAValue

from compiler.analysis.constants import Array
from compiler.contract.operand_rules import OperandError
from compiler.dialects.hw import CallOp
from compiler.dialects.sp import BinaryOp, OnnxOp, UnaryOp
from compiler.dialects.types import Tensor, dtype_of, encoding_of, shape_of
from compiler.errors import UnsupportedOperatorError
from compiler.kernels.program import Op
from compiler.passes.base import PassContext
from compiler.passes.matrices import matrix_type, rows_of
from compiler.passes.operand_check import check_operands
from compiler.passes.pipeline_spec import FAMILY_GRAPH

SUPPORTED: Final = (
    "convolutions of one image",
    "linear layers with constant weights (bias, ReLU, SiLU, residual)",
    "layer and RMS normalisation over the last axis",
    "scaled dot-product attention, causal with a key/value cache or unmasked",
    "half-split rotary embedding",
    "mixtures of experts (MoERouter and MoEExpert, MoE and QMoE, and the shapes of"
    " compiler.frontend.moe_shapes)",
    "pruning by attention of one row (DynamicPrune)",
    "with fixed sizes any operator of the importer, by reference kernels",
    "table look-up, elementwise Add, Mul, Sub, Div, Relu, Sigmoid, Neg, Sqrt, Reciprocal, Exp,"
    " Tanh, Softmax over the last axis, slices and joins of rows or columns",
)


@dataclass(slots=True)
class Selection:
    """Calls of one program under construction.

    Attributes:
        ctx: Constants and origins.
        block: The new body.
        matrices: For each tensor of the old body, the matrix that holds it.
        current: The operation that is being mapped.
        made: The calls that mapping an operation appended.
        constants: Constants of the new body by content.
        cached: Cache layers that a call already appends to.
        views: Tensors that reference calls made or moved, where their elements are.
        materialise: Makes a matrix of a view or constant, gives None if a tensor is neither; set
            where operations of fixed sizes may become reference calls.
    """

    ctx: PassContext
    block: Block = field(default_factory=Block)
    matrices: dict[SSAValue, SSAValue] = field(default_factory=dict)
    current: Operation | None = None
    made: dict[Operation, list[CallOp]] = field(default_factory=dict)
    constants: dict[str, SSAValue] = field(default_factory=dict)
    cached: set[int] = field(default_factory=set)
    views: dict[SSAValue, object] = field(default_factory=dict)
    materialise: "Callable[[SSAValue, Selection], SSAValue | None] | None" = None

    @property
    def is_graph(self) -> bool:
        """Whether the program is a graph of its own, without a cache."""
        return self.ctx.spec.family == FAMILY_GRAPH

    def matrix(self, value: SSAValue | None) -> SSAValue | None:
        """Return the matrix of a tensor; None for an absent operand."""
        if value is None:
            return None
        if value not in self.matrices:
            made = None if self.materialise is None else self.materialise(value, self)
            if made is not None:
                self.matrices[value] = made
                return made
            self.refuse("an operand is constant where a run-time matrix is expected")
        return self.matrices[value]

    def array(self, value: SSAValue | None) -> Array | None:
        """Return the elements of a constant operand, None if it is absent or not constant."""
        return self.ctx.constants.get(value)

    def weight(self, array: Array | None) -> SSAValue | None:
        """Return a constant operand of a call; None for an absent one."""
        if array is None:
            return None
        op = self.ctx.constants.add(array)
        key = op.sha256.data
        if key not in self.constants:
            self.block.add_op(op)
            self.constants[key] = op.result
        return self.constants[key]

    def result_type(self, value: SSAValue) -> Tensor:
        """Return the matrix type of a tensor."""
        shape = shape_of(value)
        rows = rows_of(shape)
        if rows is None or not shape or not shape[-1].is_static:
            self.refuse(f"{value.type} is not a matrix with fixed columns")
        return matrix_type(dtype_of(value), rows, shape[-1].constant, encoding_of(value))

    def column_type(self, value: SSAValue) -> Tensor:
        """Return the type of one integer per row, for a tensor (..., rows)."""
        return matrix_type(dtype_of(value), shape_of(value)[-1], 1)

    def call(
        self,
        op: Op,
        inputs: list[SSAValue | None],
        weights: list[SSAValue | None],
        params: dict[str, int | float],
        results: list[Tensor],
        storage: str = "w4",
    ) -> list[SSAValue]:
        """Append a call; trailing absent operands are left out."""
        while inputs and inputs[-1] is None:
            inputs.pop()
        while weights and weights[-1] is None:
            weights.pop()
        call = CallOp(op.name, inputs, weights, params, results, storage)
        try:
            check_operands(op, call, self.ctx)
        except OperandError as error:
            self.refuse(str(error))
        self.block.add_op(call)
        if self.current is not None:
            self.made.setdefault(self.current, []).append(call)
        return list(call.outputs)

    def refuse(self, reason: str) -> NoReturn:
        """Refuse the current operation."""
        assert self.current is not None
        refuse(self.current, self.ctx, reason)


def refuse(op: Operation, ctx: PassContext, reason: str) -> NoReturn:
    """Raise `UnsupportedOperatorError` that names the operator and the node."""
    match op:
        case OnnxOp():
            kind = op.op.data
        case BinaryOp() | UnaryOp():
            kind = op.kind.data.capitalize()
        case _:
            kind = op.name.split(".")[-1].capitalize()
    raise UnsupportedOperatorError(
        f"{ctx.origins.where(op, kind)}: {reason}",
        hint="compiled are: " + "; ".join(SUPPORTED),
    )
