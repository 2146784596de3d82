"""Repeated layers in a sequence of calls, so that a table or a picture shows each once."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from compiler.contract.expert_pages import PAGE_OPS
from compiler.contract.operations import Op
from compiler.contract.plan import Plan, PlanCall, PlanWeight
from compiler.contract.plan_format import CODE_BYTES, Kind

LONGEST_PERIOD: Final = 96
SHORTEST_PERIOD: Final = 3
_STARTS: Final = frozenset({Op.NORM})
"""Where a layer likes to begin, if a repeat may be cut in several places."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`repeats` times the same `length` calls, the first at `first`."""

    first: int
    length: int
    repeats: int = 1

    @property
    def end(self) -> int:
        """Number of the first call behind it."""
        return self.first + self.length * self.repeats


def signature(plan: Plan, call: PlanCall) -> Hashable:
    """Return what two calls of repeated layers share: operation, shapes, kinds of weights.

    How many bits a layer's router is stored in makes it no other layer, nor how many of its
    experts are prefetched.
    """
    return (
        call.op,
        tuple(_shape(plan, at) for at in (*call.inputs, *call.outputs)),
        tuple((_kind(w), w.rows, w.cols) if w else None for w in _held(plan, call)),
    )


def _kind(weight: PlanWeight) -> Kind:
    return Kind.F32 if weight.kind in CODE_BYTES else weight.kind


def segments(plan: Plan, calls: Sequence[PlanCall]) -> list[Segment]:
    """Split calls into repeated layers and what stands between them, in order."""
    signs = [signature(plan, call) for call in calls]
    starts = [call.op in _STARTS for call in calls]
    return _split(signs, starts, 0, len(signs))


def _split(signs: Sequence[Hashable], starts: Sequence[bool], low: int, high: int) -> list[Segment]:
    found = _best(signs, starts, low, high)
    if found is None:
        return [Segment(low, high - low)] if high > low else []
    before = _split(signs, starts, low, found.first)
    return [*before, found, *_split(signs, starts, found.end, high)]


def _best(signs: Sequence[Hashable], starts: Sequence[bool], low: int, high: int) -> Segment | None:
    """Return the repeat that saves most calls, or None; of equals the shortest period."""
    best: Segment | None = None
    saved = 0
    for period in range(SHORTEST_PERIOD, min(LONGEST_PERIOD, (high - low) // 2) + 1):
        run = 0
        for at in range(high - period - 1, low - 1, -1):
            run = run + 1 if signs[at] == signs[at + period] else 0
            more = run // period
            if more and (more * period, starts[at]) > (saved, _begins(best, starts)):
                best, saved = Segment(at, period, more + 1), more * period
    return best


def _begins(found: Segment | None, starts: Sequence[bool]) -> bool:
    return found is not None and starts[found.first]


def _shape(plan: Plan, at: int) -> Hashable:
    if at < 0:
        return None
    buffer = plan.buffers[at]
    return (0 if buffer.dynamic else buffer.rows, buffer.cols, buffer.dtype)


def _held(plan: Plan, call: PlanCall) -> list[PlanWeight | None]:
    if call.op in PAGE_OPS:
        return []
    return [plan.weights[at] if at >= 0 else None for at in call.weights]
