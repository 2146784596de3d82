"""A module as it stands: to tell whether a pass changed it, and to bring back what it was.

    state = state_of(module)       the operations, what they read, are and yield, in order
    state_of(module) == state      nothing was rewritten meanwhile
    rebuilt(function_state)        a copy of a function as it was, and its values by the old ones

Passes edit operations in place. A state therefore keeps what an edit replaces (operands, results,
properties, attributes) and holds the operations themselves, so that no new one is taken for an old
one. Our functions are straight lines: operations have no regions. Called by `KnownFacts` and by the
pass manager's invariant check.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

Values = tuple[SSAValue, ...]


class OperationState(NamedTuple):
    """One operation; values and operations are compared by identity."""

    op: Operation
    operands: Values
    results: Values
    properties: dict[str, Attribute]
    attributes: dict[str, Attribute]


@dataclass(frozen=True, slots=True)
class FunctionState:
    """One function.

    Attributes:
        own: The function itself; its properties hold name, type and roles.
        arguments: Its block's arguments.
        body: Its operations in order, the terminator last.
    """

    own: OperationState
    arguments: Values
    body: tuple[OperationState, ...]

    @property
    def name(self) -> str:
        """The function's name."""
        assert isinstance(self.own.op, FuncOp)
        return self.own.op.sym_name.data

    @property
    def returned(self) -> Values:
        """What the terminator returns."""
        return self.body[-1].operands

    def values(self) -> Iterator[SSAValue]:
        """Yield its arguments and the results of its operations."""
        yield from self.arguments
        for one in self.body:
            yield from one.results


ModuleState = tuple[FunctionState, ...]


def state_of(module: ModuleOp) -> ModuleState:
    """Return the state of every function, in order."""
    return tuple(
        FunctionState(_state(op), tuple(op.body.block.args), tuple(map(_state, op.body.block.ops)))
        for op in module.body.block.ops
        if isinstance(op, FuncOp)
    )


def rebuilt(state: FunctionState) -> tuple[FuncOp, dict[SSAValue, SSAValue]]:
    """Return a copy of a function as it was, and for each value of then the value of the copy."""
    block = Block(arg_types=[value.type for value in state.arguments])
    twins: dict[SSAValue, SSAValue] = dict(zip(state.arguments, block.args, strict=True))
    for one in state.body:
        copy = type(one.op).create(
            operands=[twins[value] for value in one.operands],
            result_types=[value.type for value in one.results],
            properties=one.properties,
            attributes=one.attributes,
        )
        block.add_op(copy)
        twins.update(zip(one.results, copy.results, strict=True))
    func = FuncOp.create(properties=state.own.properties, regions=[Region(block)])
    return func, twins


def _state(op: Operation) -> OperationState:
    return OperationState(
        op, tuple(op.operands), tuple(op.results), dict(op.properties), dict(op.attributes)
    )
