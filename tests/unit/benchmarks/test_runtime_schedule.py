"""A trace that keeps its schedule is predicted exactly; one that does not is told apart."""

from dataclasses import replace

import pytest

from benchmarks.runtime_schedule import compared, tokens_of
from benchmarks.runtime_timeline import told
from compiler.contract.native_trace import Event, Kind

LAYERS = {"expert.L0.E0": 0, "expert.L1.E0": 1, "expert.L1.E1": 1}
SIZES = dict.fromkeys(LAYERS, 40)
READ_NS = 400
"""Of one expert, at ten nanoseconds a byte."""


def token(start: int, slow: int = 0) -> list[Event]:
    """Return a run of two layers of 100 ns each; layer 1 waits for what layer 0 asks for.

    Calls: linear 50, layer 0 100, linear 50, layer 1 100; 10 between them. Layer 1 needs an expert
    that is asked for when layer 0 begins and takes 400: it waits from 220 to 460, plus `slow`.
    """
    end = 460 + slow
    calls = [
        ("LINEAR", 0, 50),
        ("MOE_LAYER", 60, 160),
        ("LINEAR", 170, 220),
        ("MOE_LAYER", 230, end + 100),
    ]
    found = [
        Event(Kind.CALL, name, start + a, start + b, 0, "step", at)
        for at, (name, a, b) in enumerate(calls)
    ]
    found.append(Event(Kind.RUN, "step", start, start + end + 110, 0, "step"))
    found.append(Event(Kind.AHEAD, "expert.L1.E0", start + 60, start + end, 1))
    found.append(Event(Kind.STALL, "expert.L1.E0", start + 230, start + end, 0))
    return found


def trace(*slow: int) -> list[Event]:
    return [event for at, each in enumerate(slow) for event in token(1_000 * at, each)]


def test_events_belong_to_the_run_that_they_are_in() -> None:
    tokens = tokens_of(trace(0, 0, 0))
    assert [len(each.calls) for each in tokens] == [4, 4, 4]
    assert [len(each.reads) for each in tokens] == [1, 1, 1]
    assert [each.own_ns(each.calls[3]) for each in tokens] == [100, 100, 100]


def test_a_schedule_that_is_kept_is_predicted_exactly() -> None:
    found = compared(trace(*[0] * 8), LAYERS, SIZES)
    assert (found.tokens, found.reads, found.within, found.error) == (4, 4, 1.0, 0.0)
    assert found.in_order == 1.0
    assert found.hidden == found.hidden_predicted == pytest.approx(170 / READ_NS)


def test_tokens_that_take_longer_than_predicted_are_counted() -> None:
    found = compared(trace(*[0] * 4, 0, 300, 0, 300), LAYERS, SIZES)
    assert found.within == 0.5
    assert "50% of the tokens take what was predicted within 15%" in told(found)


def test_reads_that_begin_in_another_order_are_counted() -> None:
    events = trace(*[0] * 8)
    late = [
        replace(e, start_ns=e.start_ns + 120) if e.kind is Kind.AHEAD and e.start_ns > 4_000 else e
        for e in events
    ]
    found = compared(late, LAYERS, SIZES)
    assert found.in_order == 3 / 4


def test_too_few_tokens_predict_nothing() -> None:
    with pytest.raises(ValueError, match="too few tokens"):
        compared(trace(0, 0), LAYERS, SIZES)
