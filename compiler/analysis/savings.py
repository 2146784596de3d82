"""What proved zeros are worth: zeros per tensor, and multiplications that need not be done.

A contraction reads only the places of x that may be non-zero and only the blocks that a route
chose; attention computes only scores inside its band. Shares are bounds: a dynamic mask says at
most how dense it is, a static one exactly. Counted at one binding of the run-time lengths.
Called by the passes and by the report.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import ConstantTable
from compiler.analysis.mask_moves import Environment
from compiler.analysis.masks import DENSE, Density, Mask, of_array
from compiler.analysis.propagation import Facts
from compiler.analysis.zero_hooks import attention_band
from compiler.dialects.dims import Binding
from compiler.dialects.mm import AttentionOp
from compiler.dialects.moe import ExpertsOp
from compiler.dialects.sp import ConstantOp, Conv2dOp, LinearOp
from compiler.dialects.types import dtype_of, sizes_at

NOMINAL: Final[Binding] = {"T": 1, "P": 0}
"""Lengths that a report counts at unless it is told others: one token, an empty cache."""


@dataclass(frozen=True, slots=True)
class TensorZeros:
    """Proved zeros of one value.

    Attributes:
        at: The operation that makes it, by its number within the function.
        value: Which one: the operation that makes it and the result's number.
        level: bottom, static or dynamic.
        granularity: How large the pieces are that are zero together.
        density: Bounds of the share of elements that may be non-zero.
        elements: Elements of the tensor.
        zeros: Elements proved zero at compile time; dynamic masks add more at run time.
        sources: Numbers of the run-time sources.
        assumes: Whether more would be known if some values were proved finite.
    """

    at: int
    value: str
    level: str
    granularity: str
    density: Density
    elements: int
    zeros: int
    sources: tuple[int, ...]
    assumes: bool


@dataclass(frozen=True, slots=True)
class Saving:
    """Multiply-adds of one operation, and bounds of how many have no zero factor.

    Attributes:
        at: Number within the function.
        operation: Name and number within the function.
        dense: Multiply-adds of the dense operation.
        least: The fewest that any execution needs.
        most: The most that any execution needs.
        why: What is skipped.
    """

    at: int
    operation: str
    dense: int
    least: int
    most: int
    why: str


def tensor_zeros(func: FuncOp, facts: Facts, binding: Binding = NOMINAL) -> list[TensorZeros]:
    """Return one row per value with proved zeros, constants included, in order."""
    rows = []
    for number, op in enumerate(func.body.block.ops):
        for at, value in enumerate(op.results):
            mask = facts.proved(value)
            if mask.is_dense:
                continue
            sizes = sizes_at(value, binding)
            static = static_part(mask)
            live = static.evaluate(Environment(binding), sizes)
            rows.append(
                TensorZeros(
                    at=number,
                    value=f"{number}:{op.name}#{at}",
                    level=mask.level,
                    granularity=mask.granularity,
                    density=mask.density,
                    elements=int(live.size),
                    zeros=int(live.size - live.sum()),
                    sources=tuple(sorted(mask.sources())),
                    assumes=facts.of(value) != mask,
                )
            )
    return rows


def savings(
    func: FuncOp, facts: Facts, constants: ConstantTable, binding: Binding = NOMINAL
) -> list[Saving]:
    """Return one row per operation that can skip multiplications, in order."""
    rows = []
    for number, op in enumerate(func.body.block.ops):
        match op:
            case LinearOp() | Conv2dOp():
                row: Saving | None = _contraction(op, number, facts, constants, binding)
            case ExpertsOp():
                row = _experts(op, number, binding)
            case AttentionOp():
                row = _attention(op, number, binding)
            case _:
                row = None
        if row is not None and min(row.least, row.most) < row.dense:
            rows.append(row)
    return rows


def _contraction(
    op: LinearOp | Conv2dOp,
    at: int,
    facts: Facts,
    constants: ConstantTable,
    binding: Binding,
) -> Saving:
    weight, outputs = sizes_at(op.weight, binding), sizes_at(op.result, binding)
    dense = int(np.prod(outputs)) * weight[-1]
    array = constants.get(op.weight)
    weights = of_array(array != 0) if array is not None else DENSE
    x, w = facts.proved(op.x).density, weights.density
    least, most = max(0.0, x[0] + w[0] - 1), min(x[1], w[1])
    few, many = int(dense * least), int(np.ceil(dense * most))
    return Saving(at, f"{at}:{op.name}", dense, few, many, "zeros of x or W")


def _experts(op: ExpertsOp, at: int, binding: Binding) -> Saving:
    experts, *inner = sizes_at(op.w_in, binding)
    rows = int(np.prod(sizes_at(op.x, binding)[:-1]))
    each = int(np.prod(inner)) + int(np.prod(sizes_at(op.w_out, binding)[1:]))
    chosen = sizes_at(op.index, binding)[-1]
    used = rows * chosen * each
    why = f"{chosen} of {experts} experts"
    return Saving(at, f"{at}:{op.name}", rows * experts * each, used, used, why)


def _attention(op: AttentionOp, at: int, binding: Binding) -> Saving:
    rows, width = sizes_at(op.q, binding)[-2:]
    keys = sizes_at(op.k, binding)[-2]
    seen = attention_band(op).evaluate(Environment(binding), (rows, keys))
    each = 2 * width
    used = int(seen.sum()) * each
    why = f"{op.mask.data} band"
    return Saving(at, f"{at}:{op.name}", rows * keys * each, used, used, why)


def static_part(mask: Mask) -> Mask:
    """Return the clauses that need no fact of an execution but its lengths."""
    return Mask(frozenset(clause for clause in mask.clauses if not clause.is_dynamic))


def sparsity_rows(
    func: FuncOp,
    facts: Facts,
    constants: ConstantTable,
    nodes: Callable[[Operation], Iterable[int]],
    binding: Binding = NOMINAL,
) -> dict[str, Any]:
    """Return the report of one function as JSON; `nodes` says which an operation stands for."""
    ops = list(func.body.block.ops)
    saved = savings(func, facts, constants, binding)
    return {
        "binding": dict(binding),
        "tensors": [
            {
                "value": row.value,
                "nodes": [*nodes(ops[row.at])],
                "level": row.level,
                "granularity": row.granularity,
                "density_low": round(row.density[0], 6),
                "density_high": round(row.density[1], 6),
                "elements": row.elements,
                "zeros": row.zeros,
                "sources": list(row.sources),
                "more_if_finite": row.assumes,
            }
            for row in tensor_zeros(func, facts, binding)
        ],
        "sources": [
            {
                "number": source.number,
                "nodes": [*nodes(owner)] if isinstance(owner, Operation) else [],
                "kind": source.kind,
                "granularity": source.granularity,
                "readiness": source.readiness,
            }
            for source in facts.sources
            for owner in (source.value.owner,)
        ],
        "operations": [
            {
                "operation": row.operation,
                "nodes": [*nodes(ops[row.at])],
                "multiply_adds_dense": row.dense,
                "multiply_adds_least": row.least,
                "multiply_adds_most": row.most,
                "why": row.why,
            }
            for row in saved
        ],
    }


def is_annotated(value: SSAValue) -> bool:
    """Return whether a value's type may carry an encoding of zeros: a real-valued result."""
    owner = value.owner
    is_result = isinstance(owner, Operation) and not isinstance(owner, ConstantOp)
    return is_result and dtype_of(value).startswith("float")
