"""What a schedule of loads comes to in time: two lanes, one that computes and one that reads.

    calls in order, ns each                      run:    c0 c1 ...... c2 | waits for r1 | c3
    reads: bytes, asked beside call i,   ->      reads:     r0 r1 ...............r1 r2
           needed by call j

A call begins when the one before has ended and all that it needs has been read. One read goes on at
a time, begins when it is asked for at the soonest, and those that a call needs now go before those
that are asked for ahead. What a run reads by itself takes its own time. Pure; the costs are the
caller's: bytes over a rate for reads, a cost model or a meter for calls.
`benchmarks.runtime_timeline` holds it against what the runtime traced.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

NEVER: Final = -1


@dataclass(frozen=True, slots=True)
class Read:
    """One load of an expert.

    Attributes:
        name: Of the expert.
        ns: What reading it takes, nanoseconds.
        asked: Number of the call beside which it is asked for.
        needed: Number of the call that waits for it; `NEVER` if none does.
        by_run: Whether the run reads it itself, as part of the call that needs it.
    """

    name: str
    ns: float
    asked: int
    needed: int = NEVER
    by_run: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when, nanoseconds; a call's is without the time that it waits before."""

    start_ns: float
    end_ns: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What was predicted.

    Attributes:
        calls: By number.
        reads: By position of what was given; None for those that never begin.
        stalls: When the run waits, ascending.
    """

    calls: tuple[Span, ...]
    reads: tuple[Span | None, ...]
    stalls: tuple[Span, ...]


@dataclass(slots=True)
class _Lane:
    """The lane that reads."""

    reads: Sequence[Read]
    free_ns: float = 0.0
    waiting: list[tuple[int, float]] = field(default_factory=list)
    done: dict[int, Span] = field(default_factory=dict)

    def ask(self, numbers: Sequence[int], now: float, *, is_first: bool) -> None:
        entries = [(number, now) for number in numbers]
        self.waiting = entries + self.waiting if is_first else self.waiting + entries

    def serve(self, until: float) -> None:
        """Begin all reads that begin before `until`."""
        while self.waiting:
            start = max(self.free_ns, self.waiting[0][1])
            if start >= until:
                return
            self._begin(start)

    def finish(self, number: int) -> float:
        """Return when a read that was asked for ends; those before it end sooner."""
        while number not in self.done:
            self._begin(max(self.free_ns, self.waiting[0][1]))
        return self.done[number].end_ns

    def _begin(self, start: float) -> None:
        number, _ = self.waiting.pop(0)
        self.free_ns = start + self.reads[number].ns
        self.done[number] = Span(start, self.free_ns)


def predict(calls: Sequence[float], reads: Sequence[Read]) -> Timeline:
    """Return when each call and each read happens.

    Args:
        calls: What each call takes by itself, nanoseconds, in order.
        reads: In the order in which they are asked for beside a call.

    Raises:
        ValueError: A read is asked for beside no call, or needed before it is asked for.
    """
    asked, needed = _by_call(reads, len(calls))
    lane, now = _Lane(reads), 0.0
    spans, stalls, own = [], [], {}
    for at, takes in enumerate(calls):
        lane.serve(now)
        lane.ask([n for n in asked[at] if reads[n].needed == at], now, is_first=True)
        lane.ask([n for n in asked[at] if reads[n].needed != at], now, is_first=False)
        ready = now
        for number in needed[at]:
            if not reads[number].by_run:
                ready = max(ready, lane.finish(number))
        for number in needed[at]:
            if reads[number].by_run:
                own[number] = Span(ready, ready + reads[number].ns)
                ready = own[number].end_ns
        if ready > now:
            stalls.append(Span(now, ready))
        spans.append(Span(ready, ready + takes))
        now = ready + takes
    lane.serve(now)
    found = {**lane.done, **own}
    return Timeline(
        tuple(spans), tuple(found.get(number) for number in range(len(reads))), tuple(stalls)
    )


def _by_call(reads: Sequence[Read], calls: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the reads that the lane is asked for beside each call, and those that it needs."""
    asked: list[list[int]] = [[] for _ in range(calls)]
    needed: list[list[int]] = [[] for _ in range(calls)]
    for number, read in enumerate(reads):
        is_needed = read.needed != NEVER
        if not 0 <= read.asked < calls or (is_needed and not read.asked <= read.needed < calls):
            raise ValueError(f"read of {read.name}: asked beside call {read.asked} of {calls}")
        if not read.by_run:
            asked[read.asked].append(number)
        if is_needed:
            needed[read.needed].append(number)
    return asked, needed


def hidden_share(reads: Sequence[Span | None], stalls: Sequence[Span]) -> float:
    """Return the share of the time of reads in which the run does not wait; 1 without reads."""
    whole = sum(read.end_ns - read.start_ns for read in reads if read is not None)
    seen = sum(
        max(0.0, min(read.end_ns, stall.end_ns) - max(read.start_ns, stall.start_ns))
        for read in reads
        if read is not None
        for stall in stalls
    )
    return 1.0 - seen / whole if whole else 1.0
