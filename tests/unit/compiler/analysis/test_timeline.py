"""Predicted times of loads beside compute: a few schedules worked out by hand."""

import pytest

from compiler.analysis.timeline import NEVER, Read, Span, hidden_share, predict


def test_without_reads_calls_follow_each_other() -> None:
    found = predict([10, 20, 30], [])
    assert found.calls == (Span(0, 10), Span(10, 30), Span(30, 60))
    assert (found.stalls, hidden_share(found.reads, found.stalls)) == ((), 1.0)


def test_a_read_that_is_asked_for_early_enough_is_hidden() -> None:
    found = predict([10, 20, 30], [Read("a", 15, asked=0, needed=2)])
    assert found.reads == (Span(0, 15),)
    assert (found.calls[2], found.stalls) == (Span(30, 60), ())
    assert hidden_share(found.reads, found.stalls) == 1.0


def test_one_that_comes_late_is_waited_for_and_only_the_rest_is_seen() -> None:
    found = predict([10, 20, 30], [Read("a", 50, asked=1, needed=2)])
    assert found.reads == (Span(10, 60),)
    assert found.stalls == (Span(30, 60),)
    assert found.calls[2] == Span(60, 90)
    assert hidden_share(found.reads, found.stalls) == pytest.approx(20 / 50)


def test_reads_take_turns_and_what_is_needed_now_goes_first() -> None:
    reads = [
        Read("likely", 40, asked=0),
        Read("also likely", 40, asked=0, needed=3),
        Read("chosen", 10, asked=1, needed=1),
    ]
    found = predict([10, 5, 5, 5], reads)
    assert found.reads == (Span(0, 40), Span(50, 90), Span(40, 50))
    assert found.stalls == (Span(10, 50), Span(60, 90))
    assert found.calls == (Span(0, 10), Span(50, 55), Span(55, 60), Span(90, 95))


def test_what_a_run_reads_itself_takes_its_own_time() -> None:
    reads = [Read("own", 30, asked=1, needed=1, by_run=True), Read("ahead", 100, asked=0)]
    found = predict([10, 5], reads)
    assert found.reads == (Span(10, 40), Span(0, 100))
    assert found.calls[1] == Span(40, 45)
    assert found.stalls == (Span(10, 40),)


def test_a_read_that_never_begins_has_no_time() -> None:
    reads = [Read("first", 100, asked=0), Read("second", 1, asked=0)]
    assert predict([10], reads).reads == (Span(0, 100), None)


@pytest.mark.parametrize("read", [Read("a", 1, 2), Read("a", 1, -1), Read("a", 1, 1, needed=0)])
def test_a_read_that_no_call_asks_for_is_refused(read: Read) -> None:
    assert NEVER < 0
    with pytest.raises(ValueError, match="asked beside call"):
        predict([1.0, 1.0], [read])
