"""Trace points: every call with name and times, every shared piece with its thread."""

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.contract.native import NativePlan
from compiler.contract.native_errors import NativeError, UnsupportedPlanError
from compiler.contract.native_trace import READS, Event, Kind, Trace, traced
from compiler.contract.pool_abi import ExpertState, PoolKnob, TraceOutcome
from compiler.contract.pooled_weights import PooledWeights
from compiler.contract.trace_files import chrome_json, perfetto_trace
from compiler.kernels import registry
from tests.factories.kernels import Case, ids, library, native_targets, raw
from tests.factories.modules import small_decoder
from tests.factories.pools import pooled
from tests.factories.trace_files import read_chrome, read_perfetto
from tests.factories.wide_calls import CASES, ROWS, inputs
from tests.integration.test_native_pool import conversation, decoder, scheduled, talk
from tests.integration.test_native_threads import load

TARGETS = native_targets()
TEMPLATES = Path(registry.__file__).parent


def decoder_runs(plan: NativePlan) -> list[dict[str, bytes]]:
    image = np.random.default_rng(5).integers(0, 256, 256, dtype=np.uint8)
    step = {"token_ids": ids([1, 2]), "positions": ids([20, 21])}
    return [raw(plan.run("see", {"image": image})), raw(plan.run("step", step))]


@pytest.mark.parametrize("target", TARGETS)
def test_it_tells_every_call_in_order_and_changes_no_bit(target: str) -> None:
    case = Case.of(small_decoder(4))
    with case.native(target) as plan:
        expected = decoder_runs(plan)
        plan.kv_length = 0
        before = time.perf_counter_ns()
        with traced(plan) as trace:
            assert decoder_runs(plan) == expected
        after = time.perf_counter_ns()
        plan.kv_length = 0
        assert decoder_runs(plan) == expected
    events = trace.events()
    assert trace.lost == 0
    assert [e.name for e in events if e.kind is Kind.RUN] == ["see", "step"]
    for program in plan.plan.programs:
        calls = [e for e in events if e.kind is Kind.CALL and e.program == program.name]
        assert [e.name for e in calls] == [call.op.name for call in program.calls]
        assert [e.call for e in calls] == list(range(len(program.calls)))
        assert all(e.start_ns <= e.end_ns for e in calls)
        assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(calls))
        (run,) = (e for e in events if e.kind is Kind.RUN and e.program == program.name)
        assert run.start_ns <= calls[0].start_ns
        assert calls[-1].end_ns <= run.end_ns
    assert before <= min(e.start_ns for e in events)
    assert max(e.end_ns for e in events) <= after


def test_it_tells_which_thread_did_which_piece() -> None:
    case = CASES["experts"]
    with load(case, TARGETS[0], 3) as plan:
        expected = raw(plan.run("run", inputs(case, ROWS)))
        with traced(plan) as trace:
            for _ in range(20):
                assert raw(plan.run("run", inputs(case, ROWS))) == expected
    events = trace.events()
    calls = [e for e in events if e.kind is Kind.CALL]
    pieces = [e for e in events if e.kind is Kind.PIECE]
    assert {e.name for e in (*calls, *pieces)} == {"EXPERTS"}
    assert {e.thread for e in calls} == {calls[0].thread}
    assert len(pieces) > len(calls)
    for piece in pieces:
        assert any(c.start_ns <= piece.start_ns <= piece.end_ns <= c.end_ns for c in calls)


def test_a_full_ring_keeps_the_newest() -> None:
    case = Case.of(small_decoder(4))
    with case.native(TARGETS[0]) as plan:
        with traced(plan, slots=8) as trace:
            decoder_runs(plan)
        total = sum(len(p.calls) for p in plan.plan.programs) + len(plan.plan.programs)
    assert trace.lost == total - 8
    events = trace.events()
    assert [e.name for e in events][-1] == "step"
    assert [e.call for e in events[:-1]] == list(range(events[0].call, events[0].call + 7))


def test_both_files_hold_every_event() -> None:
    case = Case.of(small_decoder(4))
    with case.native(TARGETS[0]) as plan, traced(plan) as trace:
        decoder_runs(plan)
    events = trace.events()
    document = read_chrome(chrome_json(events))
    assert read_perfetto(perfetto_trace(events)) == document
    (run,) = document.values()
    assert len(run) == len(events)
    assert {s.category: s.depth for s in run} == {"run": 0, "call": 1}
    assert {s.name for s in run} >= {"see", "step", "LINEAR", "EXPERTS", "ATTENTION"}


def test_it_refuses_a_ring_that_is_none_and_a_plan_that_is_closed() -> None:
    case = Case.of(small_decoder(4))
    with case.native(TARGETS[0]) as plan:
        for slots in (0, 3, 1 << 25):
            with pytest.raises(NativeError, match="power of two"):
                Trace(plan, slots)
    with pytest.raises(NativeError, match="closed"), traced(plan):
        pass


def test_a_second_trace_is_refused_and_the_first_loses_nothing() -> None:
    case = Case.of(small_decoder(4))
    with case.native(TARGETS[0]) as plan:
        with traced(plan) as trace:
            decoder_runs(plan)
            with pytest.raises(NativeError, match="traced already"), traced(plan):
                pass
            decoder_runs(plan)
        with traced(plan) as after:
            decoder_runs(plan)
    runs = [event.name for event in trace.events() if event.kind is Kind.RUN]
    assert runs == ["see", "step"] * 2
    assert [event.name for event in after.events() if event.kind is Kind.RUN] == ["see", "step"]


def within_a_run(plan: NativePlan, act: Callable[[], object]) -> list[object]:
    """Run a step in another thread; act while it is at a call. Return what the run gave."""
    inside, goes_on, found = threading.Event(), threading.Event(), []

    def wait(_event: object, _weight: int) -> bool:
        inside.set()
        return goes_on.wait(60)

    plan.set_pager(wait)
    thread = threading.Thread(target=lambda: found.append(talk(plan, [next(conversation())])))
    thread.start()
    assert inside.wait(60)
    try:
        act()
    finally:
        goes_on.set()
        thread.join()
    return found


def test_the_end_of_a_trace_waits_for_the_run_of_another_thread() -> None:
    case = Case.of(scheduled(decoder()))
    with case.native(TARGETS[0]) as plan:
        trace, ended = Trace(plan), []
        trace.attach(plan)

        def end() -> None:
            trace.detach(plan)
            ended.append(len(trace.events()))

        ending = threading.Thread(target=end)

        def begin_to_end() -> None:
            ending.start()
            ending.join(0.05)
            assert ended == []

        (made,) = within_a_run(plan, begin_to_end)
        ending.join()
        calls = len(plan.plan.programs[0].calls)
        assert ended == [calls + 1]
        plan.kv_length = 0
        assert talk(plan, [next(conversation())]) == made
        assert len(trace.events()) == calls + 1


def test_a_trace_that_cannot_end_stays_in_memory() -> None:
    case = Case.of(scheduled(decoder()))
    with case.native(TARGETS[0]) as plan:
        trace, told = Trace(plan), []
        trace.attach(plan)
        gone = weakref.ref(trace)

        def end(_event: object, _weight: int) -> bool:
            nonlocal trace
            if not told:
                with pytest.raises(NativeError, match="while the plan is running") as error:
                    trace.detach(plan)
                told.append(str(error.value))
                del error, trace
            return True

        plan.set_pager(end)
        talk(plan, [next(conversation())])
        assert len(told) == 1
        kept = gone()
        assert kept is not None
        kept.detach(plan)
        assert [e.name for e in kept.events() if e.kind is Kind.RUN] == ["step"]
        del kept
    gc.collect()
    assert gone() is None


def test_what_asks_a_plan_is_refused_while_another_thread_runs_it() -> None:
    case = Case.of(scheduled(decoder()))
    asks: list[Callable[[NativePlan], object]] = [
        lambda plan: plan.kv_length,
        lambda plan: setattr(plan, "kv_length", 0),
        lambda plan: plan.check_counts("step"),
        lambda plan: plan.work_counts("step"),
        lambda plan: plan.set_pager(lambda *_: True),
        lambda plan: plan.policy_cell("step", 0, 1),
        lambda plan: plan.is_resident(0),
    ]
    with case.native(TARGETS[0]) as plan:

        def ask_all() -> None:
            for ask in asks:
                with pytest.raises(NativeError, match="another thread"):
                    ask(plan)

        (made,) = within_a_run(plan, ask_all)
        assert len(made) == 1
        assert plan.kv_length == 5
        (made,) = within_a_run(plan, plan.close)
    for ask in asks[1:]:
        with pytest.raises(NativeError, match="closed"):
            ask(plan)
    assert plan.kv_length == 0


def test_older_kernels_say_that_they_have_none() -> None:
    case = Case.of(small_decoder(4))
    with case.native(TARGETS[0]) as plan:
        assert plan._library is not None
        plan._library.set_trace = None
        with pytest.raises(UnsupportedPlanError, match="build them again"), traced(plan):
            pass


def test_no_kernel_holds_a_trace_point() -> None:
    for path in (TEMPLATES / "templates").glob("*.c.in"):
        assert "trace" not in path.read_text().lower(), path
    vm = (TEMPLATES / "runtime" / "vm.c.in").read_text()
    plain = vm[vm.index("  } else {\n    for (uint32_t i = first;") :].partition("  }\n  sf_float")[
        0
    ]
    assert "trace" not in plain


# ---- pools ----


def counted(weights: PooledWeights, before: dict[str, int]) -> dict[str, int]:
    now = weights.pool.counts()
    return {name: now[name] - before[name] for name in now}


def events_of(events: list[Event], *kinds: Kind) -> list[Event]:
    return [event for event in events if event.kind in kinds]


def lies_in(event: Event, around: list[Event]) -> bool:
    return any(
        a.thread == event.thread and a.start_ns <= event.start_ns <= event.end_ns <= a.end_ns
        for a in around
    )


@pytest.mark.parametrize("target", [TARGETS[0], TARGETS[-1]])
def test_a_pool_tells_what_it_loads_and_whom_a_run_waited_for(target: str) -> None:
    case = Case.of(decoder())
    with case.native(target) as plain:
        expected = talk(plain, conversation())
    with pooled(case, target, 0.25) as (plan, weights):
        names = {expert.name for expert in weights.layout.experts}
        before = weights.pool.counts()
        with traced(plan) as trace:
            assert talk(plan, conversation()) == expected
            wait_for_idle(weights)
            counts = counted(weights, before)
    events = trace.events()
    stalls = events_of(events, Kind.STALL)
    calls = events_of(events, Kind.CALL)
    assert counts["misses"] > 0
    outcomes = [event.outcome for event in stalls]
    assert outcomes.count(TraceOutcome.MISSED) == counts["misses"]
    assert outcomes.count(TraceOutcome.LATE) == counts["late"]
    within = events_of(events, Kind.LOAD, Kind.WAIT)
    assert {event.name for event in (*stalls, *within)} <= names
    assert all(lies_in(event, stalls) for event in within)
    assert all(lies_in(stall, [c for c in calls if c.name == "EXPERTS"]) for stall in stalls)
    assert all(any(lies_in(part, [stall]) for part in within) for stall in stalls)
    evicted = events_of(events, Kind.EVICT)
    assert len(evicted) == counts["evictions"] > 0
    unused = [event.outcome for event in evicted].count(TraceOutcome.UNUSED)
    assert unused == counts["unused"]
    assert all(event.start_ns == event.end_ns for event in evicted)


def test_the_reading_thread_has_a_track_of_its_own_and_every_track_nests() -> None:
    case = Case.of(decoder())
    with pooled(case, TARGETS[-1], 0.25) as (plan, weights):
        plan.threads = 2
        before = weights.pool.counts()
        with traced(plan) as trace:
            for _ in range(5):
                plan.kv_length = 0
                talk(plan, conversation())
            for _ in range(4):
                weights.pool.begin_pass()  # what was used is stale now, and makes room
            for number in range(len(weights.layout.experts)):
                weights.pool.want(number)
            wait_for_idle(weights)
            counts = counted(weights, before)
    events = trace.events()
    reads = events_of(events, *READS)
    done = [event for event in reads if event.outcome is TraceOutcome.DONE]
    assert len(done) == counts["ahead"] > 0
    assert Kind.AHEAD in {event.kind for event in reads}
    (reader,) = {event.thread for event in reads}
    assert reader not in {e.thread for e in events_of(events, Kind.RUN, Kind.CALL, Kind.PIECE)}
    taken = [event.outcome for event in (*reads, *events_of(events, Kind.WAIT))]
    assert taken.count(TraceOutcome.TAKEN) >= counts["timeouts"]
    document = read_chrome(chrome_json(events))
    assert read_perfetto(perfetto_trace(events)) == document
    assert set(document) <= {"runs", "helps", "reads experts"}
    assert {s.category for s in document["reads experts"]} <= {"ahead", "chosen", "evict"}
    assert sum(map(len, document.values())) == len(events)
    ends = {(event.thread, event.start_ns, event.end_ns) for event in events}
    seen = {(s.start_ns, s.end_ns) for slices in document.values() for s in slices}
    assert {(start, end) for _, start, end in ends} == seen, "nothing had to be cut to nest"


def wait_for_idle(weights: PooledWeights) -> None:
    """Wait until nothing is asked for."""
    busy = {ExpertState.QUEUED, ExpertState.LOADING}
    wait_for(lambda: not busy & set(weights.pool.states()))


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_read_that_a_run_takes_over_says_so() -> None:
    case = Case.of(decoder())
    with pooled(case, TARGETS[-1], 0.25) as (plan, weights):
        pool = weights.pool
        pool.set(PoolKnob.DELAY_US, 300_000_000)
        states = enumerate(pool.states())
        absent = [
            n for n, state in states if state is ExpertState.ABSENT and not pool.files[n].layer
        ]
        with traced(plan) as trace:
            pool.begin_pass()
            pool.choose(absent[:2])
            wait_for(lambda: pool.states()[absent[1]] is ExpertState.LOADING)
            assert pool.touch(absent[1])
            pool.settle()
            assert weights._reader is not None
            weights._reader.close()
        assert pool.counts()["timeouts"] == 1
    name = weights.layout.experts[absent[1]].name
    told = [(e.kind, e.outcome) for e in trace.events() if e.name == name]
    assert sorted(told) == [
        (Kind.CHOSEN, TraceOutcome.TAKEN),
        (Kind.LOAD, TraceOutcome.DONE),
        (Kind.STALL, TraceOutcome.LATE),
        (Kind.WAIT, TraceOutcome.TAKEN),
    ]


def test_two_plans_over_one_pool_take_turns() -> None:
    case = Case.of(decoder())
    with (
        pooled(case, TARGETS[-1], 0.25) as (plan, weights),
        NativePlan(library(TARGETS[-1]), case.emitted.plan_bytes, weights) as other,
    ):
        with traced(plan) as first:
            with pytest.raises(NativeError, match="pool of experts is traced"), traced(other):
                pass
            talk(other, conversation())
        other.kv_length = 0
        with traced(other) as second:
            talk(other, conversation())
        with traced(plan) as third:
            pass
    assert not events_of(first.events(), Kind.RUN)
    assert events_of(first.events(), Kind.STALL), "of the plan that shares the pool"
    assert len(events_of(second.events(), Kind.RUN)) == len(list(conversation()))
    assert not events_of(third.events(), Kind.RUN, Kind.CALL)


def test_pools_of_older_kernels_tell_nothing() -> None:
    case = Case.of(decoder())
    with pooled(case, TARGETS[-1], 0.25, reads_ahead=False) as (plan, weights):
        bind = weights.pool._library.bind

        def older(name: str, *rest: Any) -> Any:
            return None if name == "sf_pool_set_trace" else bind(name, *rest)

        weights.pool._library.bind = older  # type: ignore[method-assign]
        with traced(plan) as trace:
            talk(plan, conversation())
    assert {event.kind for event in trace.events()} == {Kind.RUN, Kind.CALL}
