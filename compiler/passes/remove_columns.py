"""Remove columns that calibration found to matter little: lossy, and only what a caller names.

Before (a removal names columns 2 and 3 of %w2, and says what they add on average):
    %y = "sp.linear"(%h, %w2, %b2) : tensor<?x8xf32>, tensor<8x8xf32>, tensor<8xf32>
After:
    %y = "sp.linear"(%h, %w2', %b2') : ...     columns 2 and 3 of %w2' are zero, %b2' = %b2 + mean

Nobody reads such a column any more; `drop-dead-channels` and `drop-dead-heads`, which run next,
prove that and take what made it away. A removal names the matrix by its content, so it fits no
other weights than those it was chosen for; one that fits nothing is refused. In a stack of experts
each matrix loses columns of its own, and gets no bias.

Runs only in compilations with an accuracy budget (`compiler.driver.choose_removal`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from compiler.dialects.moe import ExpertsOp
from compiler.dialects.sp import ConstantOp, LinearOp
from compiler.dialects.types import shape_of
from compiler.errors import CompilerError
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import functions, operations
from compiler.passes.rewriting import erase_dead, insert_before, swap


@dataclass(frozen=True, slots=True)
class Removal:
    """Columns that go.

    Attributes:
        weight: Digest of the constant: a matrix (N, K), or a stack (E, N, K).
        columns: Columns per matrix, ascending; one entry for a plain matrix, E for a stack.
        bias: (N,) what the columns add on average; empty for a stack, or to add nothing.
    """

    weight: str
    columns: tuple[tuple[int, ...], ...]
    bias: tuple[float, ...] = ()


@dataclass(frozen=True)
class RemoveColumns(Pass):
    """Zero the named columns and put their mean into the bias.

    Attributes:
        removals: At most one per weight.
    """

    name: ClassVar[str] = "remove-columns"
    removals: tuple[Removal, ...] = ()

    @property
    def changes_values(self) -> bool:
        """What is named goes, whatever it adds."""
        return bool(self.removals)

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Rewrite every operation that reads a named weight.

        Raises:
            CompilerError: A removal names a weight that there is not, or columns that it has not.
        """
        wanted = {removal.weight: removal for removal in self.removals}
        used: set[str] = set()
        for op in operations(module):
            if isinstance(op, LinearOp | ExpertsOp):
                used |= _rewrite(op, wanted, ctx)
        missing = sorted(set(wanted) - used)
        if missing:
            raise CompilerError(
                f"columns of {len(missing)} weights are to be removed that the model has not",
                hint="a removal holds for the weights that it was chosen for and no others",
            )
        for func in functions(module):
            erase_dead(func, ctx.origins)
        columns = sum(len(one) for removal in self.removals for one in removal.columns)
        return PassResult(len(used), (f"{columns} columns",) if columns else ())


def _rewrite(
    op: LinearOp | ExpertsOp, wanted: Mapping[str, Removal], ctx: PassContext
) -> frozenset[str]:
    """Return the digest of the removal that was applied to an operation, if there is one."""
    second = op.weight if isinstance(op, LinearOp) else op.w_out
    removal = wanted.get(second.owner.sha256.data) if isinstance(second.owner, ConstantOp) else None
    if removal is None:
        return frozenset()
    weight = _without(second, removal, ctx)
    insert_before(op, weight)
    if isinstance(op, LinearOp):
        bias = _biased(op, removal, ctx)
        swap(
            op,
            LinearOp(
                op.x,
                weight.result,
                bias,
                op.residual,
                act=op.act.data,
                storage=op.storage.data,
            ),
            ctx.origins,
        )
    else:
        narrow = ExpertsOp(
            op.x,
            op.index,
            op.gate,
            op.w_in,
            weight.result,
            op.b_in,
            op.b_out,
            act=op.act.data,
            storage=op.stored_as,
            **op.options(),
        )
        swap(op, narrow, ctx.origins)
    return frozenset({removal.weight})


def _without(second: SSAValue, removal: Removal, ctx: PassContext) -> ConstantOp:
    array = ctx.constants.get(second)
    assert array is not None
    stack = array.reshape(-1, *array.shape[-2:]).copy()
    widest = max((max(one, default=-1) for one in removal.columns), default=-1)
    if len(stack) != len(removal.columns) or widest >= stack.shape[2]:
        raise CompilerError(f"a removal does not fit a weight of shape {array.shape}")
    for matrix, columns in zip(stack, removal.columns, strict=True):
        matrix[:, list(columns)] = 0
    return ctx.constants.add(stack.reshape(array.shape))


def _biased(op: LinearOp, removal: Removal, ctx: PassContext) -> SSAValue | None:
    """Return the bias with the mean of what goes; the old one if there is nothing to add."""
    if not removal.bias:
        return op.bias
    old = ctx.constants.get(op.bias)
    rows = shape_of(op.weight)[0].constant
    added = np.zeros(rows, np.float32) if old is None else old
    bias = ctx.constants.add((added + np.asarray(removal.bias)).astype(np.float32))
    insert_before(op, bias)
    return bias.result
