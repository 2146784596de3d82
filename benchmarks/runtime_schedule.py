"""The schedule as predicted against the schedule as traced: `compiler.analysis.timeline` at work.

    events of a run -> calls and their own time, reads, what asked for them and what waited
    costs: medians over the first half of the tokens, per position of a call, and bytes of reads
           over their time
    the other half, predicted -> time of a token, time of its reads that compute hides, order

What is read, and by whom it is needed, is the routers' choice and is taken from the trace; when
reads and calls happen, and how they lie beside each other, is predicted. An expert read ahead is
asked for beside the layer before its own, as `prefetch(1)` says. Pure; for `runtime_timeline`.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from compiler.analysis.timeline import NEVER, Read, Span, hidden_share, predict
from compiler.contract.native_trace import READS, Event, Kind

ROUTED_CALLS: Final = frozenset({"EXPERTS", "MOE_LAYER"})
TOLERANCE: Final = 0.15


@dataclass(frozen=True, slots=True)
class Token:
    """One traced run.

    Attributes:
        run: The whole.
        calls: Its calls, in order.
        stalls: When it waited.
        reads: Reads of experts that began in it or in the pause behind it.
    """

    run: Event
    calls: tuple[Event, ...]
    stalls: tuple[Event, ...]
    reads: tuple[Event, ...]

    def own_ns(self, call: Event) -> float:
        """Return what a call took without waiting."""
        waited = sum(_overlap(call, stall) for stall in self.stalls)
        return call.end_ns - call.start_ns - waited


@dataclass(frozen=True, slots=True)
class Compared:
    """Predicted against measured, over tokens.

    Attributes:
        tokens: How many.
        within: Share of them whose time lies within 15 % of what was predicted.
        error: Median of the relative errors of a token's time.
        hidden, hidden_predicted: Share of the time of reads that compute hid.
        in_order: Share of pairs of a read and a call of its run that begin in the order predicted.
        reads: Experts read in these tokens.
    """

    tokens: int
    within: float
    error: float
    hidden: float
    hidden_predicted: float
    in_order: float
    reads: int


def tokens_of(events: Sequence[Event]) -> list[Token]:
    """Return the runs of a trace with what belongs to each, in order."""
    runs = sorted((e for e in events if e.kind is Kind.RUN), key=lambda e: e.start_ns)
    ends = [*(run.start_ns for run in runs[1:]), max((e.end_ns for e in events), default=0) + 1]
    found = []
    for run, end in zip(runs, ends, strict=True):
        inside = [e for e in events if run.start_ns <= e.start_ns < end]
        calls = [e for e in inside if e.kind is Kind.CALL and e.thread == run.thread]
        reads = [e for e in inside if e.kind in READS or e.kind is Kind.LOAD]
        found.append(
            Token(
                run,
                tuple(sorted(calls, key=lambda e: e.start_ns)),
                tuple(e for e in inside if e.kind is Kind.STALL),
                tuple(sorted(reads, key=lambda e: e.start_ns)),
            )
        )
    return found


def compared(
    events: Sequence[Event], layers: Mapping[str, int], sizes: Mapping[str, int]
) -> Compared:
    """Predict the second half of the tokens by the costs of the first, and compare.

    Args:
        events: Of a trace that lost none.
        layers: Layer of each expert, by name, numbered as routed calls of a run are.
        sizes: Bytes of each expert.

    Raises:
        ValueError: There are too few tokens or no reads to learn from.
    """
    tokens = tokens_of(events)
    seen, held = tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]
    rates = _rates([read for token in seen for read in token.reads], sizes)
    if len(seen) < 2 or not rates:
        raise ValueError("too few tokens to learn what calls and reads take")
    count = len(seen[0].calls)
    held = [token for token in held if len(token.calls) == count]
    costs = [statistics.median(t.own_ns(t.calls[at]) for t in seen) for at in range(count)]
    gaps = [statistics.median(g) for g in zip(*map(_gaps, seen), strict=True)]
    every = statistics.median(rates.values())

    def takes(read: Event) -> float:
        return sizes[read.name] * rates.get(read.kind is Kind.LOAD, every)

    return _compare(held, costs, gaps, layers, takes)


def _rates(reads: Sequence[Event], sizes: Mapping[str, int]) -> dict[bool, float]:
    """Return nanoseconds a byte of reads by the run itself, and of those beside it."""
    found: dict[bool, list[float]] = {}
    for read in reads:
        per_byte = (read.end_ns - read.start_ns) / sizes[read.name]
        found.setdefault(read.kind is Kind.LOAD, []).append(per_byte)
    return {by_run: statistics.median(each) for by_run, each in found.items()}


def _gaps(token: Token) -> list[float]:
    """Return what lies before each call and behind the last one, nanoseconds."""
    edges = [token.run.start_ns, *(at for c in token.calls for at in (c.start_ns, c.end_ns))]
    return [float(end - start) for start, end in list(pairwise([*edges, token.run.end_ns]))[::2]]


def _compare(
    held: Sequence[Token],
    costs: Sequence[float],
    gaps: Sequence[float],
    layers: Mapping[str, int],
    takes: Callable[[Event], float],
) -> Compared:
    routed = [at for at, call in enumerate(held[0].calls) if call.name in ROUTED_CALLS]
    width = 2 * len(costs) + 2  # a gap before each call, one behind the last, and the pause
    calls: list[float] = []
    reads: list[Read] = []
    for number, token in enumerate(held):
        following = held[number + 1].run.start_ns if number + 1 < len(held) else token.run.end_ns
        for gap, cost in zip(gaps, costs, strict=False):
            calls += [gap, cost]
        calls += [gaps[-1], max(0.0, float(following - token.run.end_ns))]
        reads += [
            _read(event, token, number * width, routed, layers, takes, len(held) * width)
            for event in token.reads
        ]
    found = predict(calls, reads)
    spans = [found.calls[at * width : (at + 1) * width - 1] for at in range(len(held))]
    predicted = [part[-1].end_ns - part[0].start_ns for part in spans]
    predicted = [
        whole + _first_stall(part[0], found.stalls)
        for whole, part in zip(predicted, spans, strict=True)
    ]
    measured = [float(token.run.end_ns - token.run.start_ns) for token in held]
    errors = [abs(p - m) / m for p, m in zip(predicted, measured, strict=True)]
    stalls = [Span(s.start_ns, s.end_ns) for token in held for s in token.stalls]
    traced = [Span(r.start_ns, r.end_ns) for token in held for r in token.reads]
    return Compared(
        len(held),
        sum(error <= TOLERANCE for error in errors) / len(held),
        statistics.median(errors),
        hidden_share(traced, stalls),
        hidden_share(found.reads, found.stalls),
        _in_order(held, found.calls, found.reads, width),
        len(reads),
    )


def _first_stall(first: Span, stalls: Sequence[Span]) -> float:
    """Return what a run waits before its first call: its span does not have it."""
    return sum(stall.end_ns - stall.start_ns for stall in stalls if stall.end_ns == first.start_ns)


def _read(
    event: Event,
    token: Token,
    base: int,
    routed: Sequence[int],
    layers: Mapping[str, int],
    takes: Callable[[Event], float],
    count: int,
) -> Read:
    """Return a traced read as the schedule sees it: beside which call, and for which one."""
    own = base + 2 * routed[layers[event.name]] + 1
    if event.kind is not Kind.AHEAD:  # what a row chose, read beside the run or by it
        return Read(event.name, takes(event), own, own, by_run=event.kind is Kind.LOAD)
    before = layers[event.name] - 1
    if before < 0:  # beside the last layer, for the next run
        asked, needed = base + 2 * routed[-1] + 1, own + 2 * len(token.calls) + 2
    else:
        asked, needed = base + 2 * routed[before] + 1, own
    waited = any(stall.name == event.name for stall in token.stalls)
    return Read(event.name, takes(event), asked, needed if waited and needed < count else NEVER)


def _in_order(
    held: Sequence[Token],
    calls: Sequence[Span],
    reads: Sequence[Span | None],
    width: int,
) -> float:
    """Return the share of pairs of a read and a call of its run that begin as predicted."""
    same = pairs = at = 0
    for number, token in enumerate(held):
        spans = [calls[number * width + 2 * c + 1] for c in range(len(token.calls))]
        for event in token.reads:
            found, at = reads[at], at + 1
            if found is None:
                continue
            for call, span in zip(token.calls, spans, strict=True):
                pairs += 1
                same += (event.start_ns < call.start_ns) == (found.start_ns < span.start_ns)
    return same / pairs if pairs else 1.0


def _overlap(one: Event, other: Event) -> float:
    return max(0.0, min(one.end_ns, other.end_ns) - max(one.start_ns, other.start_ns))
