"""Trace a plan: which call ran when, in which thread, and what its pool of experts did, as events.

    with traced(plan) as trace:          ring of events -> sf_set_trace, sf_pool_set_trace
        plan.run("step", ...)            the runtime writes: run, calls, pieces of shared work;
                                         loads of experts, waits, stalls, evictions
    trace.events()                       -> `trace_files`: files for Perfetto

The ring is memory that is written and never allocated while runs go on; when it is full the oldest
events go. Times are nanoseconds of `time.perf_counter_ns`: the runtime writes ticks, and both ends
of the trace tell how they relate: pairs of both, read so close together that being interrupted does
not part them. Standard library only.
"""

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from compiler.contract.expert_pool import ExpertPool
from compiler.contract.native import NativePlan
from compiler.contract.native_abi import SfEvent, SfTrace
from compiler.contract.native_errors import NativeError
from compiler.contract.pool_abi import TraceOutcome, TracePoint
from compiler.contract.pooled_weights import PooledWeights

SLOTS: Final = 1 << 16
MAX_SLOTS: Final = 1 << 24
_WHOLE: Final = 0xFFFFFFFF
_CLOSE_NS: Final = 10_000
_TRIES: Final = 16


class Kind(StrEnum):
    """What an event is about."""

    ANSWER = "answer"
    RUN = "run"
    CALL = "call"
    PIECE = "piece"
    STALL = "stall"
    LOAD = "load"
    AHEAD = "ahead"
    CHOSEN = "chosen"
    WAIT = "wait"
    EVICT = "evict"


_KINDS: Final[Mapping[TracePoint, Kind]] = MappingProxyType(
    {point: Kind(point.name.lower()) for point in TracePoint if point is not TracePoint.RUN}
)
READS: Final = frozenset({Kind.AHEAD, Kind.CHOSEN})
"""Loads by the thread that reads experts, beside the runs."""


class Role(StrEnum):
    """What a thread is there for; in the order in which threads are numbered."""

    RUNS = "runs"
    HELPS = "helps"
    READS = "reads experts"
    OTHER = "other"


def role_of(kinds: Iterable[Kind]) -> Role:
    """Return what a thread is there for that wrote events of these kinds."""
    seen = frozenset(kinds)
    if seen & READS:
        return Role.READS
    if seen == {Kind.PIECE}:
        return Role.HELPS
    return Role.OTHER if seen == {Kind.EVICT} else Role.RUNS


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time.

    Attributes:
        name: Program of a run, operation of a call or of one of its pieces, section of an expert.
        start_ns: When it began, nanoseconds of `time.perf_counter_ns`.
        end_ns: When it ended.
        thread: Number of the thread: those that run, those that help, the one that reads experts.
        program: Name of the program; empty outside a run.
        call: Position of the call in its program, -1 for a run.
        piece: Number of the piece of the call's work, -1 for the whole.
        outcome: Of what a pool did; None for anything else.
    """

    kind: Kind
    name: str
    start_ns: int
    end_ns: int
    thread: int = 0
    program: str = ""
    call: int = -1
    piece: int = -1
    outcome: TraceOutcome | None = None


class Trace:
    """A ring of events and how its ticks relate to the clock."""

    def __init__(self, plan: NativePlan, slots: int = SLOTS) -> None:
        """Take the memory.

        Raises:
            NativeError: `slots` is no power of two, or out of range.
        """
        if not 1 <= slots <= MAX_SLOTS or slots & (slots - 1):
            raise NativeError(f"a trace of {slots} events: it takes a power of two up to 2^24")
        self._plan = plan.plan
        self._pool: ExpertPool | None = None
        self._experts: tuple[str, ...] = ()
        if isinstance(plan.weights, PooledWeights):
            self._pool = plan.weights.pool
            self._experts = tuple(expert.name for expert in plan.weights.layout.experts)
        self._events = (SfEvent * slots)()
        self._record = SfTrace(
            struct_bytes=ctypes.sizeof(SfTrace),
            slots=slots,
            events=ctypes.addressof(self._events),
        )
        self._span = _Moment(0, 0), _Moment(1, 1)

    def attach(self, plan: NativePlan) -> None:
        """Have the plan write here, and the pool of its experts if it has one.

        Raises:
            NativeError: The plan is running or closed, or it or its pool is traced already.
            UnsupportedPlanError: The kernels were built before there were traces.
        """
        address = ctypes.addressof(self._record)
        with plan.tracing() as write:
            self._span = _moment(write), _Moment(1, 1)
            write(address, self)
            try:
                if self._pool is not None:
                    self._pool.trace(address)
            except NativeError:
                write(None, None)
                raise

    def detach(self, plan: NativePlan) -> None:
        """Have nobody write here any more; waits for a run of another thread, which still does.

        Raises:
            NativeError: The plan was closed meanwhile, or this is called from within its run.
        """
        if self._pool is not None:
            self._pool.trace(None)
        with plan.tracing(ends=True) as write:
            write(None, None)
            self._span = self._span[0], _moment(write)

    @property
    def lost(self) -> int:
        """How many events went because the ring was full."""
        return max(0, int(self._record.next) - int(self._record.slots))

    def events(self) -> list[Event]:
        """Return the events in the order in which they ended; after `detach`."""
        count = min(int(self._record.next), int(self._record.slots))
        first = int(self._record.next) - count
        slots = [self._events[at % len(self._events)] for at in range(first, first + count)]
        events = [self._event(slot) for slot in slots]
        kinds: dict[int, set[Kind]] = {}
        for event in sorted(events, key=lambda e: e.start_ns):
            kinds.setdefault(event.thread, set()).add(event.kind)
        roles = list(Role)
        order = sorted(kinds, key=lambda thread: roles.index(role_of(kinds[thread])))
        numbers = {thread: number for number, thread in enumerate(order)}
        return [replace(event, thread=numbers[event.thread]) for event in events]

    def _event(self, slot: SfEvent) -> Event:
        start, end, thread = self._ns(slot.start), self._ns(slot.end), int(slot.thread)
        at, point = int(slot.call), TracePoint(slot.point)
        if point is not TracePoint.RUN:
            end = start if point is TracePoint.EVICT else end
            outcome = TraceOutcome(slot.piece)
            return Event(_KINDS[point], self._experts[at], start, end, thread, outcome=outcome)
        program = self._plan.programs[slot.program]
        if at == _WHOLE:
            return Event(Kind.RUN, program.name, start, end, thread, program.name)
        op = program.calls[at].op.name
        if slot.piece == _WHOLE:
            return Event(Kind.CALL, op, start, end, thread, program.name, at)
        return Event(Kind.PIECE, op, start, end, thread, program.name, at, int(slot.piece))

    def _ns(self, ticks: int) -> int:
        begin, end = self._span
        length = max(1, end.ticks - begin.ticks)
        return begin.ns + (int(ticks) - begin.ticks) * (end.ns - begin.ns) // length


@dataclass(frozen=True, slots=True)
class _Moment:
    """One moment by both clocks."""

    ticks: int
    ns: int


def _moment(write: Callable[[int | None, object], None]) -> _Moment:
    """Return the present moment, of which a trace that nobody writes to tells the ticks."""
    events = (SfEvent * 1)()
    address = ctypes.addressof(events)
    record = SfTrace(struct_bytes=ctypes.sizeof(SfTrace), slots=1, events=address)
    found: list[tuple[int, _Moment]] = []
    for _ in range(_TRIES):
        before = time.perf_counter_ns()
        write(ctypes.addressof(record), (record, events))
        after = time.perf_counter_ns()
        write(None, None)
        moment = _Moment(int(record.started), (before + after) // 2)
        found.append((after - before, moment))
        if after - before < _CLOSE_NS:
            break
    return min(found, key=lambda pair: pair[0])[1]


@contextmanager
def traced(plan: NativePlan, slots: int = SLOTS) -> Iterator[Trace]:
    """Trace the runs of the block; read the trace after it. Its end waits for the run under way.

    Raises:
        NativeError: The plan is running, closed or traced already (the outer trace goes on), its
            pool is traced with another plan, or `slots` is no power of two.
        UnsupportedPlanError: The kernels were built before there were traces.
    """
    trace = Trace(plan, slots)
    trace.attach(plan)
    try:
        yield trace
    finally:
        trace.detach(plan)
