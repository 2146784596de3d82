"""Store four-bit weights with zeros as what is left of them, where that is cheaper.

Before:
    %1 = "hw.call"(%0, %w) <{op = "LINEAR", ...}>
After, if 131 of the 256 tiles of 16 x 32 of %w hold anything:
    %1 = "hw.call"(%0, %w) <{op = "LINEAR", layout = #hw.layout<"tiles", block [16, 32],
         live 131 of 256>, ...}>

The choice is the cheapest row of `compiler.analysis.cost.cost_table` that the kernels of all calls
with these weights read and whose workspace is within the budget: live tiles, CSR, COO, or blocked
ELL of 32 x 4. A price is the sum over those calls, at their rows, one for a number of rows that is
known at run time. Matrices of an expert stack are chosen together, by their sum; their kernel reads
dense panels and live tiles only. The bits do not depend on the layout: leaving out a code of zero
leaves out an integer zero of an exact sum. A weight is converted when the plan is emitted, so a
conversion costs nothing at run time; the workspace is for activations, which CSR and COO want eight
rows side by side. `layout_rows` tells the prices and why each refused layout was refused.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from compiler.analysis.cost import (
    BLOCKS,
    DENSE,
    EMITTED,
    TILES,
    LayoutCost,
    ZeroCount,
    cheapest,
    cost_table,
    count_zeros,
)
from compiler.contract.elements import WORKSPACE_BUDGET_BYTES
from compiler.contract.operations import Op
from compiler.dialects.hw import CallOp, LayoutAttr
from compiler.dialects.sp import ConstantOp
from compiler.dialects.types import shape_of
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import body, functions
from compiler.passes.operand_check import STACKED
from compiler.passes.pipeline_spec import QUANTISE_W4

MOST_NONZERO: Final = 0.99
"""Share of elements beyond which a weight counts as full: its zeros are accidents."""
_STACK_READS: Final = (DENSE, TILES)


@dataclass(frozen=True)
class AssignLayouts(Pass):
    """Annotate calls whose weights are cheaper in another layout than dense.

    Attributes:
        workspace_budget_bytes: The most bytes that a layout may need beside its operands.
    """

    name: ClassVar[str] = "assign-layouts"
    workspace_budget_bytes: int = WORKSPACE_BUDGET_BYTES

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Annotate every call of LINEAR, EXPERTS and MOE_LAYER."""
        found = list(priced(module, ctx, self.workspace_budget_bytes))
        notes = []
        for weights in found:
            chosen = weights.chosen.layout
            if chosen == DENSE:
                continue
            kept, of = weights.count.units[chosen], weights.count.most[chosen]
            for call in weights.calls:
                call.properties["layout"] = LayoutAttr.make(chosen, BLOCKS[chosen], kept, of)
            notes.append(f"{chosen} for {len(weights.calls)} calls, {kept} of {of} stored")
        changed = sum(len(w.calls) for w in found if w.chosen.layout != DENSE)
        return PassResult(changed, tuple(notes))


@dataclass(frozen=True, slots=True)
class Priced:
    """The four-bit weights of some calls, with zeros among them, and their prices.

    Attributes:
        calls: All calls of the module with these weights, and `programs` where they stand.
        rows: Activation rows of each call; 1 for a run-time number.
        count: What is stored of the weights in each layout.
        table: The cost table.
    """

    calls: tuple[CallOp, ...]
    programs: tuple[str, ...]
    rows: tuple[int, ...]
    count: ZeroCount
    table: tuple[LayoutCost, ...]

    @property
    def chosen(self) -> LayoutCost:
        """The cheapest layout that may be chosen."""
        return cheapest(self.table)


def priced(module: ModuleOp, ctx: PassContext, budget_bytes: int) -> Iterator[Priced]:
    """Yield the prices of all four-bit weights that have zeros, in order of first use."""
    groups: dict[tuple[str, ...], list[tuple[str, CallOp]]] = {}
    for func in functions(module):
        for op in body(func).ops:
            if isinstance(op, CallOp) and (weights := _four_bit(op)):
                key = tuple(_digest(weight) for weight in weights)
                groups.setdefault(key, []).append((func.sym_name.data, op))
    for group in groups.values():
        calls = tuple(call for _, call in group)
        count = _count(_four_bit(calls[0]), ctx)
        if count is None:
            continue
        rows = tuple(_rows(call) for call in calls)
        is_stack = any(Op[call.op.data] in STACKED for call in calls)
        readable = _STACK_READS if is_stack else EMITTED
        table = cost_table(count, rows, budget_bytes, readable)
        yield Priced(calls, tuple(name for name, _ in group), rows, count, table)


def layout_rows(module: ModuleOp, ctx: PassContext, budget_bytes: int) -> list[dict[str, Any]]:
    """Return, for each weight with zeros, the layout chosen and the price of every layout."""
    return [
        {
            "operation": item.calls[0].op.data,
            "nodes": [*ctx.origins.nearest(item.calls[0])],
            "programs": list(item.programs),
            "shape": [item.count.rows, item.count.cols],
            "density": round(item.count.nonzero / item.count.elements, 6),
            "rows": list(item.rows),
            "chosen": item.chosen.layout,
            "budget_bytes": budget_bytes,
            "prices": [
                {
                    "layout": row.layout,
                    "bytes": row.bytes,
                    "workspace_bytes": row.workspace_bytes,
                    "expected_us": None if row.microseconds is None else round(row.microseconds, 2),
                    "refused": row.refused,
                }
                for row in item.table
            ],
        }
        for item in priced(module, ctx, budget_bytes)
    ]


def _four_bit(op: CallOp) -> list[SSAValue]:
    """Return the four-bit weights, or stacks of them, of a call."""
    code = Op[op.op.data]
    if op.stored_as != QUANTISE_W4:
        return []
    if code is Op.LINEAR:
        return list(op.weights)[:1]
    return list(op.weights)[-2:] if code in STACKED and not op.parameters().get("biases") else []


def _digest(weight: SSAValue) -> str:
    return weight.owner.sha256.data if isinstance(weight.owner, ConstantOp) else ""


def _rows(call: CallOp) -> int:
    rows = shape_of(call.arguments[0])[0]
    return rows.constant if rows.is_static else 1


def _count(weights: Iterable[SSAValue], ctx: PassContext) -> ZeroCount | None:
    """Count what all matrices store; None if there are none, or no zero is worth a look."""
    counts = []
    for weight in weights:
        array = ctx.constants.get(weight)
        if array is None:
            return None
        counts += [count_zeros(matrix) for matrix in array.reshape(-1, *array.shape[-2:])]
    if not counts:
        return None
    total = ZeroCount(
        live=sum(count.live for count in counts),
        tiles=sum(count.tiles for count in counts),
        nonzero=sum(count.nonzero for count in counts),
        elements=sum(count.elements for count in counts),
        blocks=sum(count.blocks for count in counts),
        all_blocks=sum(count.all_blocks for count in counts),
        rows=sum(count.rows for count in counts),
        cols=max(count.cols for count in counts),
        is_2_of_4=all(count.is_2_of_4 for count in counts),
        is_nm=all(count.is_nm for count in counts),
    )
    return total if total.nonzero < MOST_NONZERO * total.elements else None
