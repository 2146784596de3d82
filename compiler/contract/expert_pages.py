"""The order in which a tape prefetches, loads and uses experts.

    EXPERT_PREFETCH (likely ones, any time before) > EXPERT_LOAD (all of a call) > the call

An expert is known by the numbers of its weights. A program without these records has every expert
in memory from the start; in one that has any,

- an expert is used only after a load step of its own, and a load serves one call;
- it is prefetched at most once, before that load step;
- nothing is prefetched or loaded that no later call uses.

Called by the compiler on what it lowered and by `parse_plan` on what a device received. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

from compiler.contract.moe_rules import expert_kinds
from compiler.contract.operands import need
from compiler.contract.operations import Op

Expert = tuple[int, ...]
"""Numbers of the weights of one expert, w_in first."""
ROUTED: Final = (Op.EXPERTS, Op.MOE_LAYER)
PAGE_OPS: Final = (Op.EXPERT_PREFETCH, Op.EXPERT_LOAD)
_FIRST: Final[Mapping[Op, int]] = MappingProxyType(
    {Op.EXPERTS: 0, Op.MOE_LAYER: 4, Op.EXPERT_PREFETCH: 0, Op.EXPERT_LOAD: 0}
)
"""Where the weights of experts begin."""


class TapeCall(Protocol):
    """A call of a lowered program, or one read from a plan."""

    @property
    def op(self) -> Op:
        """Its operation."""

    @property
    def weights(self) -> Sequence[int]:
        """Numbers of its weights."""

    @property
    def params(self) -> Mapping[str, int | float]:
        """Its parameters, defaults perhaps left out."""


def experts_of(call: TapeCall) -> tuple[Expert, ...]:
    """Return the experts that a call names, in its order; none if it is not about experts."""
    if call.op not in _FIRST:
        return ()
    stride = len(expert_kinds(int(call.params.get("biases", 0))))
    weights = tuple(call.weights[_FIRST[call.op] :])
    return tuple(weights[at : at + stride] for at in range(0, len(weights), stride))


def first_expert_weight(op: Op) -> int | None:
    """Return where the weights of experts begin among those of `op`; None if it has none."""
    return _FIRST.get(op)


def is_scheduled(calls: Iterable[TapeCall]) -> bool:
    """Return whether a program says when its experts are loaded."""
    return any(call.op in PAGE_OPS for call in calls)


def check_pages(calls: Sequence[TapeCall]) -> None:
    """Check the order of one program; whole experts are what the rules of operations check.

    Raises:
        OperandError: The order is broken; the message says how.
    """
    if not is_scheduled(calls):
        return
    asked: set[Expert] = set()
    loaded: set[Expert] = set()
    for at, call in enumerate(calls):
        named = experts_of(call)
        if call.op in PAGE_OPS:
            need(len(set(named)) == len(named), f"call {at} names an expert twice")
            need(not loaded & {*named}, f"call {at}: an expert is loaded already")
        if call.op is Op.EXPERT_PREFETCH:
            need(not asked & {*named}, f"call {at}: an expert is prefetched twice")
            asked |= {*named}
        elif call.op is Op.EXPERT_LOAD:
            loaded |= {*named}
            asked -= {*named}
        elif named:
            need(loaded >= {*named}, f"call {at} uses an expert before its load step")
            loaded -= {*named}
    need(not asked, "an expert is prefetched and never loaded")
    need(not loaded, "an expert is loaded and never used")
