"""Store four-bit weights with empty tiles as the tiles that are left, where that is cheaper.

Before:
    %1 = "hw.call"(%0, %w) <{op = "LINEAR", ...}>
After, if 131 of the 256 tiles of 16 x 32 of %w hold anything:
    %1 = "hw.call"(%0, %w) <{op = "LINEAR", layout = #hw.layout<"tiles", block [16, 32],
         live 131 of 256>, ...}>

The choice is the cheapest row of `compiler.analysis.cost.cost_table` that a kernel reads and whose
workspace is within the budget. Matrices of an expert stack are chosen together, by their sum. The
bits do not depend on the layout. A weight is converted when the plan is emitted, so a conversion
costs nothing at run time. Left out: CSR, COO and blocked ELL, which no kernel reads; the cost table
lists their bytes.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from compiler.analysis.cost import TILES, WORKSPACE_BUDGET_BYTES, TileCount, choose, count_tiles
from compiler.contract.operations import Op
from compiler.contract.tiles import GROUP, MAX_GROUPS, PANEL
from compiler.dialects.hw import CallOp, LayoutAttr
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import operations
from compiler.passes.operand_check import STACKED


@dataclass(frozen=True)
class AssignLayouts(Pass):
    """Annotate calls whose weights are cheaper as tiles.

    Attributes:
        workspace_budget_bytes: The most bytes that a layout may need beside its operands.
    """

    name: ClassVar[str] = "assign-layouts"
    workspace_budget_bytes: int = WORKSPACE_BUDGET_BYTES

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Annotate every call of LINEAR, EXPERTS and MOE_LAYER."""
        changed = live = tiles = 0
        for op in operations(module):
            if not isinstance(op, CallOp) or op.layout is not None:
                continue
            count = _count(_four_bit(op), ctx)
            if count is None or choose(count, self.workspace_budget_bytes).layout != TILES:
                continue
            op.properties["layout"] = LayoutAttr.make(
                TILES, (PANEL, GROUP), count.live, count.tiles
            )
            changed, live, tiles = changed + 1, live + count.live, tiles + count.tiles
        if not changed:
            return PassResult(0)
        return PassResult(changed, (f"{live} of {tiles} tiles stored for {changed} calls",))


def _four_bit(op: CallOp) -> list[SSAValue]:
    """Return the four-bit weights, or stacks of them, of a call."""
    code = Op[op.op.data]
    if code is Op.LINEAR:
        return list(op.weights)[:1]
    return list(op.weights)[-2:] if code in STACKED and not op.parameters().get("biases") else []


def _count(weights: list[SSAValue], ctx: PassContext) -> TileCount | None:
    """Count the tiles of all matrices; None if there are none or an index would not fit."""
    counts = []
    for weight in weights:
        array = ctx.constants.get(weight)
        if array is None or array.shape[-1] > MAX_GROUPS * GROUP:
            return None
        counts += [count_tiles(matrix) for matrix in array.reshape(-1, *array.shape[-2:])]
    if not counts:
        return None
    live, tiles, nonzero, rows, cols, width = np.array(counts).sum(axis=0).tolist()
    return TileCount(live, tiles, nonzero, rows, cols // len(counts), width)
