"""The order in which a tape prefetches, loads and uses experts.

    EXPERT_PREFETCH (likely ones, any time before) > EXPERT_LOAD (all of a call) > the call
    EXPERT_FORESEE (all of a call, before)         >

An expert is known by the numbers of its weights. A program without these records has every expert
in memory from the start; in one that has any,

- an expert is used only after a load step of its own, and a load serves one call;
- it is prefetched at most once and named by a foresight at most once, before that load step;
- nothing is prefetched, foreseen or loaded that no later call uses.

Called by the compiler on what it lowered and by `parse_plan` on what a device received. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

from compiler.contract.moe_rules import FIRST_EXPERT, expert_kinds
from compiler.contract.operands import need
from compiler.contract.operations import Op

Expert = tuple[int, ...]
"""Numbers of the weights of one expert, w_in first."""
ROUTED: Final = (Op.EXPERTS, Op.MOE_LAYER)
PAGE_OPS: Final = (Op.EXPERT_PREFETCH, Op.EXPERT_LOAD, Op.EXPERT_FORESEE)
_ASKING: Final[Mapping[Op, str]] = MappingProxyType(
    {Op.EXPERT_PREFETCH: "prefetched", Op.EXPERT_FORESEE: "foreseen"}
)


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
    if call.op not in FIRST_EXPERT:
        return ()
    stride = len(expert_kinds(int(call.params.get("biases", 0))))
    weights = tuple(call.weights[FIRST_EXPERT[call.op] :])
    return tuple(weights[at : at + stride] for at in range(0, len(weights), stride))


def first_expert_weight(op: Op) -> int | None:
    """Return where the weights of experts begin among those of `op`; None if it has none."""
    return FIRST_EXPERT.get(op)


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
    asked: dict[Op, set[Expert]] = {op: set() for op in _ASKING}
    loaded: set[Expert] = set()
    for at, call in enumerate(calls):
        named = experts_of(call)
        if call.op in PAGE_OPS:
            need(len(set(named)) == len(named), f"call {at} names an expert twice")
            need(not loaded & {*named}, f"call {at}: an expert is loaded already")
        if call.op in _ASKING:
            twice = asked[call.op] & {*named}
            need(not twice, f"call {at}: an expert is {_ASKING[call.op]} twice")
            asked[call.op] |= {*named}
        elif call.op is Op.EXPERT_LOAD:
            loaded |= {*named}
            for waiting in asked.values():
                waiting -= {*named}
        elif named:
            need(loaded >= {*named}, f"call {at} uses an expert before its load step")
            loaded -= {*named}
    for op, waiting in asked.items():
        need(not waiting, f"an expert is {_ASKING[op]} and never loaded")
    need(not loaded, "an expert is loaded and never used")
