"""Dialect `hw`: calls of catalogue kernels on matrices, the last form before the plan."""

from collections.abc import Mapping, Sequence
from typing import Final

from xdsl.dialects.builtin import (
    ArrayAttr,
    DenseArrayBase,
    DictionaryAttr,
    FloatAttr,
    IntAttr,
    IntegerAttr,
    StringAttr,
    TensorType,
)
from xdsl.ir import Attribute, Dialect, ParametrizedAttribute, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    BaseAttr,
    IRDLOperation,
    irdl_attr_definition,
    irdl_op_definition,
    opt_prop_def,
    param_def,
    prop_def,
    var_operand_def,
    var_result_def,
)
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException

from compiler.dialects.properties import integer, integers, real, require
from compiler.dialects.types import Tensor, shape_of

LAYOUTS: Final = ("tiles", "csr", "coo", "blocked_ell<32,4>", "nm<2,4,16>")


@irdl_attr_definition
class LayoutAttr(ParametrizedAttribute):
    """How the four-bit weights of a call are stored, and how many blocks they keep.

    Written `#hw.layout<"tiles", block [16, 32], live 131 of 256>`.
    """

    name = "hw.layout"
    kind: StringAttr = param_def(BaseAttr(StringAttr))
    block: ArrayAttr[IntAttr] = param_def()
    live: IntAttr = param_def()
    tiles: IntAttr = param_def()

    @classmethod
    def make(cls, kind: str, block: Sequence[int], live: int, tiles: int) -> "LayoutAttr":
        """Build the attribute from plain values."""
        sizes = ArrayAttr([IntAttr(size) for size in block])
        return cls(StringAttr(kind), sizes, IntAttr(live), IntAttr(tiles))

    def verify(self) -> None:
        """Refuse layouts without a kernel, and more blocks than there are."""
        if self.kind.data not in LAYOUTS:
            raise VerifyException(f"no kernel reads layout {self.kind.data!r}")
        if not 0 <= self.live.data <= self.tiles.data:
            raise VerifyException(f"{self.live.data} of {self.tiles.data} blocks are live")

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        """Parse the text between the angle brackets, brackets included."""
        with parser.in_angle_brackets():
            kind = parser.parse_str_literal()
            parser.parse_punctuation(",")
            parser.parse_keyword("block")
            square = parser.Delimiter.SQUARE
            block = parser.parse_comma_separated_list(square, parser.parse_integer)
            parser.parse_punctuation(",")
            parser.parse_keyword("live")
            live = parser.parse_integer()
            parser.parse_keyword("of")
            tiles = parser.parse_integer()
        return cls.make(kind, block, live, tiles).parameters

    def print_parameters(self, printer: Printer) -> None:
        """Print the text that `parse_parameters` reads."""
        block = ", ".join(str(size.data) for size in self.block.data)
        live = f"live {self.live.data} of {self.tiles.data}"
        printer.print_string(f'<"{self.kind.data}", block [{block}], {live}>')


@irdl_op_definition
class CallOp(IRDLOperation):
    """One record of the tape: `op` of the catalogue over matrices and constants.

    `slots` and `weight_slots` give, per operand position of the catalogue entry, the index into
    `arguments` or `weights`, or -1 for an absent operand. `layout` says how four-bit weights are
    stored if not densely, `storage` in how many bits the matrices of experts are if not in four.
    """

    name = "hw.call"
    arguments = var_operand_def(TensorType)
    weights = var_operand_def(TensorType)
    op = prop_def(StringAttr)
    params = prop_def(DictionaryAttr)
    slots = prop_def(DenseArrayBase)
    weight_slots = prop_def(DenseArrayBase)
    layout = opt_prop_def(LayoutAttr)
    storage = opt_prop_def(StringAttr)
    outputs = var_result_def(TensorType)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)

    def __init__(
        self,
        op: str,
        arguments: Sequence[SSAValue | None],
        weights: Sequence[SSAValue | None],
        params: Mapping[str, int | float],
        results: Sequence[Tensor],
        storage: str = "w4",
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
                **({} if storage == "w4" else {"storage": StringAttr(storage)}),
            },
            result_types=[list(results)],
        )

    @property
    def stored_as(self) -> str:
        """In how many bits the matrices of experts are stored: `w4` or `w8`."""
        return "w4" if self.storage is None else self.storage.data

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


Hw: Final = Dialect("hw", [CallOp], [LayoutAttr])
