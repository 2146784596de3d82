"""Files of a timeline that Perfetto opens: the JSON trace event format and its native one.

    events of `native_trace` -> tracks, one per thread, by name -> chrome_json, perfetto_trace

On a track events lie within each other and times never go back; what took no time is an instant.
Field numbers are those of perfetto's protos/perfetto/trace: trace_packet.proto,
track_event/track_event.proto, track_descriptor.proto, process_descriptor.proto,
thread_descriptor.proto and debug_annotation.proto. Called by the agent's `trace` and by benchmarks.
Standard library only.
"""

import heapq
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Final

from compiler.contract.canonical import Json
from compiler.contract.native_trace import Event, Kind, Role, role_of

PROCESS: Final = "sparsefleet"
_MICROSECOND_NS: Final = 1_000
_KIND_ORDER: Final = {kind: at for at, kind in enumerate(Kind)}
_WORDS: Final[Mapping[Kind, str]] = MappingProxyType(
    {
        Kind.STALL: "stalled for ",
        Kind.LOAD: "load ",
        Kind.AHEAD: "read ahead ",
        Kind.CHOSEN: "read beside ",
        Kind.WAIT: "wait for ",
        Kind.EVICT: "evict ",
    }
)
_SEQUENCE: Final = 1
_PROCESS_TRACK: Final = 1
_FIRST_TRACK: Final = 2
_FIRST_THREAD: Final = 1
"""Thread 0 of a trace is the idle task of a system."""


class EventType(IntEnum):
    """`TrackEvent.Type`."""

    SLICE_BEGIN = 1
    SLICE_END = 2
    INSTANT = 3


@dataclass(frozen=True, slots=True)
class Track:
    """What one thread did: events in order of their begin, each within or after the one before."""

    thread: int
    name: str
    events: tuple[Event, ...]


def title(event: Event) -> str:
    """Return what an event is called on a timeline."""
    return _WORDS.get(event.kind, "") + event.name


def tracks(events: Iterable[Event], names: Mapping[int, str] | None = None) -> list[Track]:
    """Return a track per thread, in order of their numbers.

    Spans of the host and of the runtime are told by two clocks, which may differ by a fraction of a
    microsecond: an event ends no later than the one that it begins in.

    Args:
        events: Of one trace, in any order.
        names: Of threads by number; others are named by what they do.
    """
    found: dict[int, list[Event]] = {}
    for event in sorted(events, key=lambda e: (e.start_ns, -e.end_ns, _KIND_ORDER[e.kind])):
        found.setdefault(event.thread, []).append(event)
    roles = {thread: role_of(e.kind for e in found[thread]) for thread in sorted(found)}
    named = {**_names(roles), **(names or {})}
    return [Track(thread, named[thread], tuple(_nested(found[thread]))) for thread in roles]


def _names(roles: Mapping[int, Role]) -> dict[int, str]:
    named: dict[int, str] = {}
    for thread, role in roles.items():
        before = sum(roles[other] is role for other in named)
        named[thread] = f"{role.value} {before + 1}" if before else role.value
    return named


def _nested(events: Sequence[Event]) -> Iterator[Event]:
    within: list[Event] = []
    for event in events:
        while within and within[-1].end_ns <= event.start_ns:
            within.pop()
        fits = not within or event.end_ns <= within[-1].end_ns
        kept = event if fits else replace(event, end_ns=within[-1].end_ns)
        within.append(kept)
        yield kept


def _arguments(event: Event) -> dict[str, int | str]:
    found: dict[str, int | str] = {"program": event.program} if event.program else {}
    found |= {"call": event.call} if event.call >= 0 else {}
    found |= {"piece": event.piece} if event.piece >= 0 else {}
    return found if event.outcome is None else {**found, "outcome": event.outcome.name.lower()}


# ---- JSON ----


def chrome_json(
    events: Iterable[Event], process: str = PROCESS, names: Mapping[int, str] | None = None
) -> str:
    """Return the document of the trace event format; times in microseconds, `names` as `tracks`."""
    pid = os.getpid()
    lanes = tracks(events, names)
    rows = [_metadata("process_name", pid, 0, process)]
    rows += [_metadata("thread_name", pid, _FIRST_THREAD + t.thread, t.name) for t in lanes]
    spans = heapq.merge(*(track.events for track in lanes), key=lambda event: event.start_ns)
    rows += [_row(event, pid) for event in spans]
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ns"}, indent=1) + "\n"


def _metadata(kind: str, pid: int, tid: int, name: str) -> Json:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _row(event: Event, pid: int) -> Json:
    row: dict[str, Json] = {
        "name": title(event),
        "cat": event.kind.value,
        "ts": event.start_ns / _MICROSECOND_NS,
        "pid": pid,
        "tid": _FIRST_THREAD + event.thread,
        "args": {**_arguments(event)},
    }
    if event.kind is Kind.EVICT:
        return {**row, "ph": "i", "s": "t"}
    return {**row, "ph": "X", "dur": (event.end_ns - event.start_ns) / _MICROSECOND_NS}


# ---- protocol buffers: fields in the order of their numbers ----


def perfetto_trace(
    events: Iterable[Event], process: str = PROCESS, names: Mapping[int, str] | None = None
) -> bytes:
    """Return Perfetto's own format, a `Trace` of packets; times in nanoseconds."""
    pid = os.getpid()
    lanes = tracks(events, names)
    described = _number(1, pid) + _text(6, process)
    packets = [_track_packet(_PROCESS_TRACK, process, _message(3, described))]
    for lane in lanes:
        thread = _number(1, pid) + _number(2, _FIRST_THREAD + lane.thread) + _text(5, lane.name)
        body = _message(4, thread) + _number(5, _PROCESS_TRACK)
        packets.append(_track_packet(_FIRST_TRACK + lane.thread, lane.name, body))
    stamped = heapq.merge(*(_stamped(lane) for lane in lanes), key=lambda packet: packet[0])
    return b"".join([*packets, *(packet for _, packet in stamped)])


def _stamped(track: Track) -> Iterator[tuple[int, bytes]]:
    """Yield begins, ends and instants of a track in order, each with its time."""
    uuid = _FIRST_TRACK + track.thread
    open_until: list[int] = []
    for event in track.events:
        while open_until and open_until[-1] <= event.start_ns:
            yield _end(uuid, open_until.pop())
        is_instant = event.kind is Kind.EVICT
        kind = EventType.INSTANT if is_instant else EventType.SLICE_BEGIN
        notes = (_message(4, _annotation(*item)) for item in _arguments(event).items())
        words = _text(22, event.kind.value) + _text(23, title(event))
        yield event.start_ns, _event_packet(event.start_ns, uuid, kind, b"".join(notes), words)
        if not is_instant:
            open_until.append(event.end_ns)
    while open_until:
        yield _end(uuid, open_until.pop())


def _end(uuid: int, at_ns: int) -> tuple[int, bytes]:
    return at_ns, _event_packet(at_ns, uuid, EventType.SLICE_END)


def _annotation(name: str, value: int | str) -> bytes:
    return (_text(6, value) if isinstance(value, str) else _number(4, value)) + _text(10, name)


def _track_packet(uuid: int, name: str, body: bytes) -> bytes:
    descriptor = _number(1, uuid) + _text(2, name) + body
    return _message(1, _number(10, _SEQUENCE) + _message(60, descriptor))


def _event_packet(
    at_ns: int, uuid: int, kind: EventType, notes: bytes = b"", words: bytes = b""
) -> bytes:
    event = notes + _number(9, kind) + _number(11, uuid) + words
    return _message(1, _number(8, at_ns) + _number(10, _SEQUENCE) + _message(11, event))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


TRACE_FORMATS: Final[Mapping[str, Callable[[Iterable[Event]], bytes]]] = MappingProxyType(
    {"json": lambda events: chrome_json(events).encode(), "perfetto": perfetto_trace}
)
"""Files by the name of their format."""
