"""Edits that passes share: insert, replace, erase what is dead, clone a movement chain.

Whatever takes an operation away or puts another in its place goes through here, because it has to
be reported to `compiler.passes.origins`; a test holds all passes to it.
"""

from collections.abc import Callable, Mapping, Sequence

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue
from xdsl.traits import Pure

from compiler.dialects.dims import Dim
from compiler.dialects.movement import MOVEMENT_OPS, ReshapeOp
from compiler.dialects.types import shape_of
from compiler.passes.base import PassContext
from compiler.passes.functions import body, functions, operations
from compiler.passes.origins import Origins

Rule = Callable[[Operation, PassContext], int]
"""Rewrites at one operation, or does not; returns how often."""


def insert_before(anchor: Operation, *new: Operation) -> None:
    """Insert operations in front of `anchor`."""
    block = anchor.parent
    assert block is not None
    block.insert_ops_before(list(new), anchor)


def replace(op: Operation, values: Sequence[SSAValue], origins: Origins) -> None:
    """Let every user of `op` read `values` instead and erase it."""
    origins.replaced(op, values)
    for result, value in zip(op.results, values, strict=True):
        result.replace_all_uses_with(value)
    _drop(op)


def swap(op: Operation, new: Operation, origins: Origins) -> None:
    """Put `new` in the place of `op`; results correspond one to one."""
    origins.stands(op, [new])
    insert_before(op, new)
    replace(op, list(new.results), origins)


def redirect(old: SSAValue, new: SSAValue, origins: Origins) -> None:
    """Let every user of `old` read `new`; what made `old` stays until it is found dead."""
    if isinstance(old.owner, Operation) and isinstance(new.owner, Operation):
        origins.stands(old.owner, [new.owner])
    old.replace_all_uses_with(new)


def erase(op: Operation, origins: Origins) -> None:
    """Erase an operation whose results nobody reads."""
    origins.erased(op)
    _drop(op)


def _drop(op: Operation) -> None:
    block = op.parent
    assert block is not None
    block.erase_op(op)


def sweep(module: ModuleOp, ctx: PassContext, *rules: Rule) -> int:
    """Apply every rule to all operations, one rule after the other; erase what dies of each.

    Returns:
        What the rules returned, added up: how often they rewrote something.
    """
    changed = 0
    for rule in rules:
        changed += sum(rule(op, ctx) for op in operations(module))
        for func in functions(module):
            erase_dead(func, ctx.origins)
    return changed


def is_pure(op: Operation) -> bool:
    """Return whether `op` has no effect but its results."""
    return op.has_trait(Pure())


def erase_dead(func: FuncOp, origins: Origins) -> int:
    """Erase pure operations whose results nobody reads; return how many."""
    erased = 0
    for op in reversed(list(body(func).ops)):
        if is_pure(op) and all(result.first_use is None for result in op.results):
            erase(op, origins)
            erased += 1
    return erased


def reshaped(value: SSAValue, shape: Sequence[Dim], anchor: Operation) -> SSAValue:
    """Return `value` under another shape, inserting a reshape before `anchor` if it differs."""
    if shape_of(value) == tuple(shape):
        return value
    op = ReshapeOp(value, shape)
    insert_before(anchor, op)
    return op.result


def rebuild_chain(
    value: SSAValue, replacements: Mapping[SSAValue, SSAValue], anchor: Operation
) -> SSAValue:
    """Clone the movement chain that ends in `value`, reading `replacements` at its leaves."""
    if value in replacements:
        return replacements[value]
    owner = value.owner
    if not isinstance(owner, MOVEMENT_OPS):
        return value
    operands = [rebuild_chain(operand, replacements, anchor) for operand in owner.operands]
    copy = owner.clone()
    copy.operands = operands
    insert_before(anchor, copy)
    return copy.results[0]
