"""Trace a plan: which call ran when, in which thread, as events and as a file for Perfetto.

    with traced(plan) as trace:          ring of events -> sf_set_trace
        plan.run("step", ...)            the runtime writes: run, calls, pieces of shared work
    chrome_json(trace.events())          -> ui.perfetto.dev, chrome://tracing

The ring is memory that is written and never allocated while runs go on; when it is full the oldest
events go. Times are nanoseconds of `time.perf_counter_ns`: the runtime writes ticks, and both ends
of the trace tell how they relate. Standard library only.
"""

import ctypes
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from compiler.contract.canonical import Json
from compiler.contract.native import NativePlan
from compiler.contract.native_abi import SfEvent, SfTrace
from compiler.contract.native_errors import NativeError
from compiler.contract.plan import Plan

SLOTS: Final = 1 << 16
MAX_SLOTS: Final = 1 << 24
_WHOLE: Final = 0xFFFFFFFF
_MICROSECOND_NS: Final = 1_000


class Kind(StrEnum):
    """What an event is about."""

    ANSWER = "answer"
    RUN = "run"
    CALL = "call"
    PIECE = "piece"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time.

    Attributes:
        name: Program of a run, operation of a call or of one of its pieces.
        start_ns: When it began, nanoseconds of `time.perf_counter_ns`.
        end_ns: When it ended.
        thread: Number of the thread, 0 for the one that began first.
        program: Name of the program; empty outside a run.
        call: Position of the call in its program, -1 for a run.
        piece: Number of the piece of the call's work, -1 for the whole.
    """

    kind: Kind
    name: str
    start_ns: int
    end_ns: int
    thread: int = 0
    program: str = ""
    call: int = -1
    piece: int = -1


class Trace:
    """A ring of events and how its ticks relate to the clock."""

    def __init__(self, plan: Plan, slots: int = SLOTS) -> None:
        """Take the memory.

        Raises:
            NativeError: `slots` is no power of two, or out of range.
        """
        if not 1 <= slots <= MAX_SLOTS or slots & (slots - 1):
            raise NativeError(f"a trace of {slots} events: it takes a power of two up to 2^24")
        self._plan = plan
        self._events = (SfEvent * slots)()
        self._record = SfTrace(
            struct_bytes=ctypes.sizeof(SfTrace),
            slots=slots,
            events=ctypes.addressof(self._events),
        )
        self._span_ns = (0, 1)

    def attach(self, plan: NativePlan) -> None:
        """Have the plan write here."""
        plan.set_trace(ctypes.addressof(self._record))
        self._span_ns = (time.perf_counter_ns(), 0)

    def detach(self, plan: NativePlan) -> None:
        """Have the plan write nowhere."""
        plan.set_trace(None)
        self._span_ns = (self._span_ns[0], time.perf_counter_ns())

    @property
    def lost(self) -> int:
        """How many events went because the ring was full."""
        return max(0, int(self._record.next) - int(self._record.slots))

    def events(self) -> list[Event]:
        """Return the events in the order in which they ended; after `detach`."""
        count = min(int(self._record.next), int(self._record.slots))
        first = int(self._record.next) - count
        slots = [self._events[at % len(self._events)] for at in range(first, first + count)]
        order = sorted((int(e.start), int(e.thread)) for e in slots)
        threads = {thread: n for n, thread in enumerate(dict.fromkeys(t for _, t in order))}
        return [self._event(slot, threads) for slot in slots]

    def _event(self, slot: SfEvent, threads: dict[int, int]) -> Event:
        start, end, thread = self._ns(slot.start), self._ns(slot.end), threads[int(slot.thread)]
        program, at = self._plan.programs[slot.program], int(slot.call)
        if at == _WHOLE:
            return Event(Kind.RUN, program.name, start, end, thread, program.name)
        op = program.calls[at].op.name
        if slot.piece == _WHOLE:
            return Event(Kind.CALL, op, start, end, thread, program.name, at)
        return Event(Kind.PIECE, op, start, end, thread, program.name, at, int(slot.piece))

    def _ns(self, ticks: int) -> int:
        started, stopped = int(self._record.started), int(self._record.stopped)
        begin, end = self._span_ns
        return begin + (int(ticks) - started) * (end - begin) // max(1, stopped - started)


@contextmanager
def traced(plan: NativePlan, slots: int = SLOTS) -> Iterator[Trace]:
    """Trace the runs of the block; read the trace after it.

    Raises:
        NativeError: The plan is running, closed or traced already (the outer trace goes on), or
            `slots` is no power of two.
        UnsupportedPlanError: The kernels were built before there were traces.
    """
    trace = Trace(plan.plan, slots)
    trace.attach(plan)
    try:
        yield trace
    finally:
        trace.detach(plan)


def chrome_json(events: Iterable[Event], process: str = "sparsefleet") -> str:
    """Return the trace event document that Perfetto and Chrome open; times in microseconds."""
    pid = os.getpid()
    rows: list[Json] = [
        {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": process}}
    ]
    for event in sorted(events, key=lambda e: (e.start_ns, -e.end_ns)):
        arguments: dict[str, Json] = {"program": event.program} if event.program else {}
        arguments |= {"call": event.call} if event.call >= 0 else {}
        arguments |= {"piece": event.piece} if event.piece >= 0 else {}
        rows.append(
            {
                "name": event.name,
                "cat": event.kind.value,
                "ph": "X",
                "ts": event.start_ns / _MICROSECOND_NS,
                "dur": (event.end_ns - event.start_ns) / _MICROSECOND_NS,
                "pid": pid,
                "tid": event.thread,
                "args": arguments,
            }
        )
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ns"}, indent=1) + "\n"
