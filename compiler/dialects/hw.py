"""Dialect `hw`: calls of catalogue kernels on matrices, the last form before the plan."""

from collections.abc import Mapping, Sequence
from typing import Final

from xdsl.dialects.builtin import (
    DenseArrayBase,
    DictionaryAttr,
    FloatAttr,
    IntegerAttr,
    StringAttr,
    TensorType,
)
from xdsl.ir import Dialect, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    IRDLOperation,
    irdl_op_definition,
    prop_def,
    var_operand_def,
    var_result_def,
)

from compiler.dialects.properties import integer, integers, real, require
from compiler.dialects.types import Tensor, shape_of


@irdl_op_definition
class CallOp(IRDLOperation):
    """One record of the tape: `op` of the catalogue over matrices and constants.

    `slots` and `weight_slots` give, per operand position of the catalogue entry, the index into
    `arguments` or `weights`, or -1 for an absent operand. `layer` numbers expert layers.
    """

    name = "hw.call"
    arguments = var_operand_def(TensorType)
    weights = var_operand_def(TensorType)
    op = prop_def(StringAttr)
    params = prop_def(DictionaryAttr)
    slots = prop_def(DenseArrayBase)
    weight_slots = prop_def(DenseArrayBase)
    outputs = var_result_def(TensorType)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)

    def __init__(
        self,
        op: str,
        arguments: Sequence[SSAValue | None],
        weights: Sequence[SSAValue | None],
        params: Mapping[str, int | float],
        results: Sequence[Tensor],
    ) -> None:
        attributes = {
            key: real(value) if isinstance(value, float) else integer(value)
            for key, value in sorted(params.items())
        }
        super().__init__(
            operands=[
                [a for a in arguments if a is not None],
                [w for w in weights if w is not None],
            ],
            properties={
                "op": StringAttr(op),
                "params": DictionaryAttr(attributes),
                "slots": integers(_slots(arguments)),
                "weight_slots": integers(_slots(weights)),
            },
            result_types=[list(results)],
        )

    def argument(self, at: int) -> SSAValue | None:
        """Return the operand at a position of the catalogue entry, or None."""
        return _at_slot(self.slots.get_values(), self.arguments, at)

    def weight(self, at: int) -> SSAValue | None:
        """Return the constant at a position of the catalogue entry, or None."""
        return _at_slot(self.weight_slots.get_values(), self.weights, at)

    def parameters(self) -> dict[str, int | float]:
        """Return the parameters as plain numbers."""
        values: dict[str, int | float] = {}
        for key, value in self.params.data.items():
            assert isinstance(value, IntegerAttr | FloatAttr)
            values[key] = value.value.data
        return values

    def verify_(self) -> None:
        """Everything is a matrix; slots name each operand once, in order."""
        for value in (*self.arguments, *self.outputs):
            require(len(shape_of(value)) == 2, self, f"{value.type} is not a matrix")
        for slots, given in ((self.slots, self.arguments), (self.weight_slots, self.weights)):
            used = [s for s in slots.get_values() if s >= 0]
            require(used == list(range(len(given))), self, "slots do not match the operands")


def _at_slot(slots: Sequence[float], given: Sequence[SSAValue], at: int) -> SSAValue | None:
    return given[int(slots[at])] if at < len(slots) and slots[at] >= 0 else None


def _slots(operands: Sequence[SSAValue | None]) -> list[int]:
    slots, at = [], 0
    for operand in operands:
        slots.append(-1 if operand is None else at)
        at += operand is not None
    return slots


Hw: Final = Dialect("hw", [CallOp], [])
