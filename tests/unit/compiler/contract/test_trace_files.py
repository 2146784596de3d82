"""Timeline files: what is written is what a reader of the format sees, in both formats."""

import json
from dataclasses import replace

import pytest

from compiler.contract.native_trace import Event, Kind
from compiler.contract.pool_abi import TraceOutcome
from compiler.contract.trace_files import chrome_json, perfetto_trace, tracks
from tests.factories.trace_files import Slice, read_chrome, read_perfetto

T = 123_456_789_012_345
EVENTS = (
    Event(Kind.CALL, "EXPERTS", T + 100, T + 900, 0, "step", 3),
    Event(Kind.STALL, "expert.0", T + 200, T + 700, 0, outcome=TraceOutcome.LATE),
    Event(Kind.WAIT, "expert.0", T + 201, T + 699, 0, outcome=TraceOutcome.DONE),
    Event(Kind.RUN, "step", T, T + 1000, 0, "step"),
    Event(Kind.EVICT, "expert.7", T + 150, T + 150, 2, outcome=TraceOutcome.UNUSED),
    Event(Kind.CHOSEN, "expert.0", T + 151, T + 698, 2, outcome=TraceOutcome.DONE),
    Event(Kind.AHEAD, "expert.9", T + 700, T + 5000, 2, outcome=TraceOutcome.TAKEN),
    Event(Kind.PIECE, "EXPERTS", T + 800, T + 850, 1, "step", 3, 1),
    Event(Kind.RUN, "step", T + 1000, T + 1001, 0, "step"),
    Event(Kind.ANSWER, "answer", T, T + 1001),
)
EXPECTED = {
    "runs": [
        Slice(T, T + 1001, 0, "answer", "answer"),
        Slice(T, T + 1000, 1, "step", "run", (("program", "step"),)),
        Slice(T + 100, T + 900, 2, "EXPERTS", "call", (("program", "step"), ("call", 3))),
        Slice(T + 200, T + 700, 3, "stalled for expert.0", "stall", (("outcome", "late"),)),
        Slice(T + 201, T + 699, 4, "wait for expert.0", "wait", (("outcome", "done"),)),
        Slice(T + 1000, T + 1001, 1, "step", "run", (("program", "step"),)),
    ],
    "helps": [
        Slice(
            *(T + 800, T + 850, 0, "EXPERTS", "piece"),
            (("program", "step"), ("call", 3), ("piece", 1)),
        )
    ],
    "reads experts": [
        Slice(T + 150, T + 150, 0, "evict expert.7", "evict", (("outcome", "unused"),)),
        Slice(T + 151, T + 698, 0, "read beside expert.0", "chosen", (("outcome", "done"),)),
        Slice(T + 700, T + 5000, 0, "read ahead expert.9", "ahead", (("outcome", "taken"),)),
    ],
}
READERS = {
    "json": lambda events: read_chrome(chrome_json(events)),
    "perfetto": lambda events: read_perfetto(perfetto_trace(events)),
}


@pytest.mark.parametrize("form", READERS)
def test_a_reader_sees_what_was_written(form: str) -> None:
    expected = {name: sorted(slices) for name, slices in EXPECTED.items()}
    assert READERS[form](EVENTS) == expected
    assert READERS[form](EVENTS[::-1]) == expected
    assert READERS[form](()) == {}


@pytest.mark.parametrize("form", READERS)
def test_a_span_of_another_clock_still_nests(form: str) -> None:
    late = replace(EVENTS[0], end_ns=T + 1000 + 7)
    (around, inside) = READERS[form]([EVENTS[3], late])["runs"]
    assert (around.end_ns, inside.end_ns, inside.depth) == (T + 1000, T + 1000, 1)


@pytest.mark.parametrize("form", READERS)
def test_an_event_of_no_length_begins_and_ends(form: str) -> None:
    nothing = Event(Kind.RUN, "step", T, T, 0, "step")
    after = Event(Kind.RUN, "step", T, T + 1, 0, "step")
    lengths = [s.end_ns - s.start_ns for s in READERS[form]([nothing, after])["runs"]]
    assert sorted(lengths) == [0, 1]


def test_tracks_are_named_by_what_their_threads_do() -> None:
    again = replace(EVENTS[3], thread=4)
    gone = replace(EVENTS[4], thread=5)
    named = {track.thread: track.name for track in tracks([*EVENTS, again, gone])}
    assert named == {0: "runs", 1: "helps", 2: "reads experts", 4: "runs 2", 5: "other"}
    assert next(track.name for track in tracks(EVENTS, {0: "voice"})) == "voice"


def test_long_names_and_large_numbers_are_whole() -> None:
    long = Event(Kind.RUN, "é" * 300, 2**62, 2**63 - 1, 300, "p" * 200, 2**31)
    (found,) = read_perfetto(perfetto_trace([long]))["runs"]
    assert found == Slice(
        2**62, 2**63 - 1, 0, "é" * 300, "run", (("program", "p" * 200), ("call", 2**31))
    )


BREAKS = {
    "unknown phase": {"ph": "Q"},
    "fields of": {"extra": 1},
    "ts of": {"ts": -1.0},
    "dur of": {"dur": "1"},
    "begins before": {"ts": 1.0},
    "has no name": {"tid": 99},
    "ends after": {"dur": 1e9},
}


@pytest.mark.parametrize("complaint", BREAKS)
def test_the_validator_of_documents_finds_what_is_wrong(complaint: str) -> None:
    document = json.loads(chrome_json(EVENTS))
    row = next(row for row in document["traceEvents"] if row["name"] == "EXPERTS")
    row.update(BREAKS[complaint])
    with pytest.raises(AssertionError, match=complaint):
        read_chrome(json.dumps(document))


def test_the_validator_of_packets_finds_what_is_wrong() -> None:
    whole = perfetto_trace(EVENTS)
    packets = _packets(whole)
    assert b"".join(packets) == whole
    for complaint, broken in {
        "never ended": packets[:-1],
        "is not described": packets[:1] + packets[2:],
        "times go back": [*packets[:5], packets[6], packets[5], *packets[7:]],
        "an end without": [*packets, packets[-1]],
        "unknown fields": [*packets, b"\x10\x01"],
    }.items():
        with pytest.raises(AssertionError, match=complaint):
            read_perfetto(b"".join(broken))


def _packets(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        length, size = data[at + 1], 2
        if length > 127:
            length, size = (length & 127) + (data[at + 2] << 7), 3
        found.append(data[at : at + size + length])
        at += size + length
    return found
