"""The picture of a timeline: reads are cut where runs stall, every bar lies where its time is."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.runtime_timeline import busiest, write
from benchmarks.timeline_picture import Paint, Reads, cut, picture, reads_of
from compiler.contract.native_trace import Event, Kind
from tests.factories.trace_files import read_chrome, read_perfetto

MS = 1_000_000
EVENTS = (
    Event(Kind.RUN, "step", 0, 10 * MS, 0, "step"),
    Event(Kind.CALL, "MOE_LAYER", 0, 10 * MS, 0, "step", 0),
    Event(Kind.STALL, "<one>", 2 * MS, 4 * MS),
    Event(Kind.LOAD, "<one>", 2 * MS, 4 * MS),
    Event(Kind.STALL, "two", 6 * MS, 8 * MS),
    Event(Kind.WAIT, "two", 6 * MS, 8 * MS),
    Event(Kind.AHEAD, "two", 1 * MS, 7 * MS, 1),
    Event(Kind.AHEAD, "three", 8 * MS, 12 * MS, 1),
    Event(Kind.EVICT, "four", 8 * MS, 8 * MS, 1),
)
STALLS = [event for event in EVENTS if event.kind is Kind.STALL]


def test_a_read_is_cut_where_runs_stall() -> None:
    assert list(cut(EVENTS[6], STALLS)) == [
        (1 * MS, 2 * MS, Paint.HIDDEN),
        (2 * MS, 4 * MS, Paint.BESIDE),
        (4 * MS, 6 * MS, Paint.HIDDEN),
        (6 * MS, 7 * MS, Paint.SEEN),
    ]
    assert list(cut(EVENTS[3], STALLS)) == [(2 * MS, 4 * MS, Paint.SEEN)]
    assert list(cut(EVENTS[7], STALLS)) == [(8 * MS, 12 * MS, Paint.HIDDEN)]


def test_what_is_hidden_is_summed_up() -> None:
    spent = {Paint.HIDDEN: 7 * MS, Paint.BESIDE: 2 * MS, Paint.SEEN: 3 * MS}
    assert reads_of(EVENTS) == Reads(3, 1, spent)
    assert reads_of(()) == Reads(0, 0, dict.fromkeys(spent, 0))


def test_every_bar_lies_where_its_time_is() -> None:
    drawn = ElementTree.fromstring(picture(EVENTS, "a < b", "below"))
    name = "{http://www.w3.org/2000/svg}"
    bars = [rect for rect in drawn.iter(f"{name}rect") if rect.find(f"{name}title") is not None]
    found: dict[str, list[tuple[float, float]]] = {}
    for bar in bars:
        place = float(bar.get("x", "")), float(bar.get("width", ""))
        found.setdefault(bar.get("fill", ""), []).append(place)
    left, width = found[Paint.EXPERTS.colour][0]
    per = width / 10
    assert found[Paint.LOAD.colour] == [pytest.approx((left + 2 * per, 2 * per), abs=0.02)]
    assert found[Paint.WAIT.colour] == [pytest.approx((left + 6 * per, 2 * per), abs=0.02)]
    assert found[Paint.SEEN.colour] == [pytest.approx((left + 6 * per, per), abs=0.02)]
    assert len(found[Paint.HIDDEN.colour]) == 3
    assert found[Paint.EVICT.colour][0][0] == pytest.approx(left + 8 * per, abs=0.02)
    texts = {text.text for text in drawn.iter(f"{name}text")}
    assert texts >= {"a < b", "below", "runs", "reads experts", "0 ms", "12 ms"}
    assert {paint.words for paint in Paint} <= texts
    with pytest.raises(ValueError, match="needs events"):
        picture((), "", "")


def test_the_tokens_that_read_most_are_shown(tmp_path: Path) -> None:
    later = [Event(Kind.RUN, "step", at * MS, (at + 5) * MS, 0, "step") for at in range(20, 50, 10)]
    shown = busiest([*EVENTS, *later], 1)
    assert {event.name for event in shown} == {event.name for event in EVENTS}
    assert max(event.end_ns for event in shown) == 10 * MS, "cut where the tokens end"
    with pytest.raises(ValueError, match="cannot be shown"):
        busiest(EVENTS, 2)
    chrome, packed, drawn = write([*EVENTS, *later], "title", 1, tmp_path / "new")
    assert read_chrome(chrome.read_text()) == read_perfetto(packed.read_bytes())
    assert "1 of 3 reads" in drawn.read_text()
