"""Demand: which elements of each value any result can observe, backward from the results.

The counterpart of `compiler.analysis.propagation` on the same lattice: where a forward mask says
"may be non-zero", a demand mask says "may matter". Everything that a function returns or appends to
the key-value cache is demanded; a value is demanded where any of its uses demands it. Demands start
at the bottom and only grow. Functions are straight lines and the cache is demanded whole, so one
sweep over the operations in reverse is the fixpoint.

A clause may assume values finite, as forward clauses do: a factor that a proved zero excuses must
not become infinite (0 * inf is NaN), and no quotient may divide by a zero whose sign changed.

Called by `compiler.passes.pipeline` for the compile report. Says what need not be computed; changes
nothing by itself. A `DemandLogic` other than `STANDARD_DEMAND` exists for mutation tests only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import ConstantTable
from compiler.analysis.demand_rules import (
    DEMAND_HOOKS,
    DEMAND_RULES,
    DIVIDING,
    DemandHook,
    DemandKind,
    whole,
)
from compiler.analysis.mask_moves import Environment
from compiler.analysis.masks import BOTTOM, DENSE, Mask, Produced, of_pattern
from compiler.analysis.propagation import Facts
from compiler.analysis.savings import NOMINAL, static_part
from compiler.analysis.zero_hooks import operands
from compiler.dialects.dims import Binding
from compiler.dialects.invariant import zero_rule
from compiler.dialects.sp import ConstantOp
from compiler.dialects.types import sizes_at

TRUTHS: Final = ("where", "mask")
"""Sources whose value is a truth value that chooses or multiplies."""


@dataclass(frozen=True, slots=True)
class DemandLogic:
    """The table and the functions that an analysis asks."""

    rules: Mapping[str, DemandKind]
    hooks: Mapping[DemandKind, DemandHook]
    key: Callable[[Operation], str | None] = zero_rule


STANDARD_DEMAND: Final = DemandLogic(DEMAND_RULES, DEMAND_HOOKS)


@dataclass(slots=True)
class Demands:
    """What is observed of one function's values.

    Attributes:
        masks: Demand of every value that is used.
        numbers: Values that some clause assumes finite, by number; begins with the facts' own.
        indices: Index arrays of run-time gathers, by number; begins with the facts' own.
    """

    masks: dict[SSAValue, Mask] = field(default_factory=dict)
    numbers: list[SSAValue] = field(default_factory=list)
    indices: list[SSAValue] = field(default_factory=list)

    def of(self, value: SSAValue) -> Mask:
        """Return where a value may matter; nowhere if nothing uses it."""
        return self.masks.get(value, BOTTOM)


@dataclass(slots=True)
class _Sweep:
    constants: ConstantTable
    facts: Facts
    demands: Demands
    quotients: tuple[SSAValue, ...]

    def demand(self, value: SSAValue) -> Mask:
        return self.demands.of(value)

    def zeros(self, value: SSAValue) -> Mask:
        """Return the forward mask, and the pattern of a truth value that is a source itself."""
        mask = self.facts.of(value)
        for source in self.facts.sources:
            if source.value is value and source.kind in TRUTHS:
                made = Produced(source.number, source.granularity, source.density)
                mask = mask & of_pattern(made)
        return mask

    def gather(self, index: SSAValue) -> int:
        return _numbered(self.demands.indices, index)

    def excused(self, mask: Mask, *values: SSAValue) -> Mask:
        assumed = (*values, *self.quotients)
        return mask.assuming(_numbered(self.demands.numbers, value) for value in assumed)


def function_demands(
    func: FuncOp, facts: Facts, constants: ConstantTable, logic: DemandLogic = STANDARD_DEMAND
) -> Demands:
    """Return what the results of a function observe of its values, given its forward facts."""
    ops = list(func.body.block.ops)
    demands = Demands({}, list(facts.numbers), list(facts.indices))
    quotients = tuple(r for op in ops if zero_rule(op) in DIVIDING for r in op.results)
    sweep = _Sweep(constants, facts, demands, quotients)
    for op in reversed(ops):
        for value, mask in zip(operands(op), _observed(op, sweep, logic), strict=True):
            demands.masks[value] = demands.of(value) | mask
    return demands


def _observed(op: Operation, sweep: _Sweep, logic: DemandLogic) -> list[Mask]:
    if isinstance(op, ReturnOp) or not op.results:
        return [DENSE for _ in operands(op)]
    kind = logic.rules.get(logic.key(op) or "")
    hook: DemandHook = whole if kind is None else logic.hooks[kind]
    return hook(op, sweep)


def _numbered(values: list[SSAValue], value: SSAValue) -> int:
    for number, known in enumerate(values):
        if known is value:
            return number
    values.append(value)
    return len(values) - 1


def demand_rows(func: FuncOp, demands: Demands, binding: Binding = NOMINAL) -> list[dict[str, Any]]:
    """Return one row per value that is not demanded whole, as plain JSON values, in order.

    `unobserved` counts elements that no result observes whatever the input; the demanded density
    bounds the share that some result may.
    """
    rows = []
    for number, op in enumerate(func.body.block.ops):
        for at, value in enumerate(op.results):
            mask = demands.of(value)
            if mask.is_dense or isinstance(op, ConstantOp):
                continue
            live = static_part(mask).evaluate(Environment(binding), sizes_at(value, binding))
            rows.append(
                {
                    "value": f"{number}:{op.name}#{at}",
                    "level": mask.level,
                    "demanded_low": round(mask.density[0], 6),
                    "demanded_high": round(min(mask.density[1], float(live.mean())), 6),
                    "elements": int(live.size),
                    "unobserved": int(live.size - live.sum()),
                    "if_finite": mask != mask.unconditional(),
                }
            )
    return rows
