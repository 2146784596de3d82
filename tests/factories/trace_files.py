"""What a reader of traces demands: validators of both file formats, which return what they read.

JSON: the trace event format (phases X, i and M; a name for every process and thread). Perfetto's
own: a subset of its .proto files, declared here and parsed by the protobuf library, which knows
nothing of our writer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FIELDS: Final[Mapping[str, Mapping[str, tuple[type, ...]]]] = {
    "X": {"ts": (int, float), "dur": (int, float), "cat": (str,)},
    "i": {"ts": (int, float), "cat": (str,), "s": (str,)},
    "M": {},
}
COMMON: Final = {"name": (str,), "pid": (int,), "tid": (int,), "args": (dict,)}
OPTIONAL: Final = frozenset({"ph"})
METADATA: Final = frozenset({"process_name", "thread_name"})
BEGIN, END, INSTANT = 1, 2, 3

_F = descriptor_pb2.FieldDescriptorProto
_MESSAGES: Final[Mapping[str, Mapping[str, tuple[int, int, str]]]] = {
    "Trace": {"packet": (1, _F.TYPE_MESSAGE, "TracePacket")},
    "TracePacket": {
        "timestamp": (8, _F.TYPE_UINT64, ""),
        "trusted_packet_sequence_id": (10, _F.TYPE_UINT32, ""),
        "track_event": (11, _F.TYPE_MESSAGE, "TrackEvent"),
        "track_descriptor": (60, _F.TYPE_MESSAGE, "TrackDescriptor"),
    },
    "TrackEvent": {
        "debug_annotations": (4, _F.TYPE_MESSAGE, "DebugAnnotation"),
        "type": (9, _F.TYPE_INT32, ""),
        "track_uuid": (11, _F.TYPE_UINT64, ""),
        "categories": (22, _F.TYPE_STRING, ""),
        "name": (23, _F.TYPE_STRING, ""),
    },
    "DebugAnnotation": {
        "int_value": (4, _F.TYPE_INT64, ""),
        "string_value": (6, _F.TYPE_STRING, ""),
        "name": (10, _F.TYPE_STRING, ""),
    },
    "TrackDescriptor": {
        "uuid": (1, _F.TYPE_UINT64, ""),
        "name": (2, _F.TYPE_STRING, ""),
        "process": (3, _F.TYPE_MESSAGE, "ProcessDescriptor"),
        "thread": (4, _F.TYPE_MESSAGE, "ThreadDescriptor"),
        "parent_uuid": (5, _F.TYPE_UINT64, ""),
    },
    "ProcessDescriptor": {
        "pid": (1, _F.TYPE_INT32, ""),
        "process_name": (6, _F.TYPE_STRING, ""),
    },
    "ThreadDescriptor": {
        "pid": (1, _F.TYPE_INT32, ""),
        "tid": (2, _F.TYPE_INT32, ""),
        "thread_name": (5, _F.TYPE_STRING, ""),
    },
}
_REPEATED: Final = frozenset({"packet", "debug_annotations", "categories"})


@dataclass(frozen=True, order=True)
class Slice:
    """One event as a reader sees it; `depth` events lie around it."""

    start_ns: int
    end_ns: int
    depth: int
    name: str
    category: str
    args: tuple[tuple[str, int | str], ...] = ()


@dataclass
class ReadTrack:
    """One track as a reader sees it."""

    name: str
    slices: list[Slice] = field(default_factory=list)
    around: list[int] = field(default_factory=list)


def read_chrome(text: str) -> dict[str, list[Slice]]:
    """Return slices by track name; AssertionError if the document breaks the format."""
    document = json.loads(text)
    assert document["displayTimeUnit"] in {"ns", "ms"}
    tracks: dict[tuple[int, int], ReadTrack] = {}
    processes: set[int] = set()
    last = 0
    for row in document["traceEvents"]:
        _check_row(row)
        key = row["pid"], row["tid"]
        if row["ph"] == "M":
            assert row["name"] in METADATA
            if row["name"] == "process_name":
                processes.add(row["pid"])
            else:
                assert key not in tracks, f"two names for {key}"
                tracks[key] = ReadTrack(row["args"]["name"])
            continue
        assert key in tracks, f"an event on {key}, which has no name"
        start = round(row["ts"] * 1000)
        assert start >= last, f"{row} begins before the one before"
        last = start
        end = round((row["ts"] + row.get("dur", 0)) * 1000)
        _nest(tracks[key], row["name"], start, end, row)
    assert processes >= {pid for pid, _ in tracks}
    return _by_name(list(tracks.values()))


def _check_row(row: Mapping[str, Any]) -> None:
    assert row["ph"] in FIELDS, f"unknown phase {row['ph']!r}"
    wanted = {**COMMON, **FIELDS[row["ph"]]}
    assert set(row) - OPTIONAL == set(wanted), f"fields of {row}"
    for name, types in wanted.items():
        assert isinstance(row[name], types), f"{name} of {row}"
        assert not isinstance(row[name], bool)
        if isinstance(row[name], Real) and name != "args":
            assert row[name] >= 0, f"{name} of {row}"
    assert row["name"]
    assert row.get("s", "t") in {"t", "p", "g"}
    assert row["ph"] == "M" or row["tid"] > 0, "thread 0 is the idle task"


def _nest(track: ReadTrack, name: str, start: int, end: int, row: Mapping[str, Any]) -> None:
    while track.around and track.around[-1] <= start:
        track.around.pop()
    assert not track.around or end <= track.around[-1], f"{name} ends after what it lies in"
    args = tuple(row["args"].items())
    track.slices.append(Slice(start, end, len(track.around), name, row["cat"], args))
    track.around.append(end)


def read_perfetto(data: bytes) -> dict[str, list[Slice]]:
    """Return slices by track name; AssertionError if the packets break the format."""
    trace: Any = _message_class("Trace")()
    trace.ParseFromString(data)
    trace.DiscardUnknownFields()
    assert trace.SerializeToString() == data, "unknown fields, or no canonical order"
    tracks: dict[int, ReadTrack] = {}
    parents: set[int] = set()
    stacks: dict[int, list[tuple[int, Any]]] = {}
    last = 0
    for packet in trace.packet:
        assert packet.trusted_packet_sequence_id > 0
        if packet.HasField("track_descriptor"):
            assert not packet.HasField("track_event")
            _described(packet.track_descriptor, tracks, parents)
            continue
        assert packet.timestamp >= last, "times go back"
        last = packet.timestamp
        event = packet.track_event
        assert event.track_uuid in tracks, f"track {event.track_uuid} is not described"
        _take(tracks[event.track_uuid], stacks.setdefault(event.track_uuid, []), last, event)
    assert not any(stacks.values()), "a slice is never ended"
    return _by_name([track for uuid, track in tracks.items() if uuid not in parents])


def _described(found: Any, tracks: dict[int, ReadTrack], parents: set[int]) -> None:
    assert found.uuid
    assert found.uuid not in tracks
    assert found.name
    if found.HasField("process"):
        assert found.process.pid > 0
        assert found.process.process_name
        parents.add(found.uuid)
    else:
        assert found.parent_uuid in parents
        assert found.thread.pid > 0
        assert found.thread.tid > 0
        assert found.thread.thread_name == found.name
    tracks[found.uuid] = ReadTrack(found.name)


def _take(track: ReadTrack, stack: list[tuple[int, Any]], at: int, event: Any) -> None:
    if event.type == BEGIN:
        stack.append((at, event))
    elif event.type == END:
        assert stack, "an end without a begin"
        start, begun = stack.pop()
        track.slices.append(_slice(start, at, len(stack), begun))
    else:
        assert event.type == INSTANT, f"type {event.type}"
        track.slices.append(_slice(at, at, len(stack), event))


def _slice(start: int, end: int, depth: int, event: Any) -> Slice:
    assert event.name
    (category,) = event.categories
    args = tuple(
        (note.name, note.int_value if note.HasField("int_value") else note.string_value)
        for note in event.debug_annotations
    )
    return Slice(start, end, depth, event.name, category, args)


def _by_name(tracks: list[ReadTrack]) -> dict[str, list[Slice]]:
    assert len({track.name for track in tracks}) == len(tracks), "two tracks of one name"
    return {track.name: sorted(track.slices) for track in tracks}


def _message_class(name: str) -> type:
    file = descriptor_pb2.FileDescriptorProto(name="subset.proto", package="p", syntax="proto2")
    for message, fields in _MESSAGES.items():
        added = file.message_type.add(name=message)
        for label, (number, kind, of) in fields.items():
            repeated = _F.LABEL_REPEATED if label in _REPEATED else _F.LABEL_OPTIONAL
            one = added.field.add(name=label, number=number, type=kind, label=repeated)
            if of:
                one.type_name = f".p.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"p.{name}"))
