"""Trace points: every call with name and times, every shared piece with its thread."""

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest

from compiler.contract.native import NativePlan
from compiler.contract.native_errors import NativeError, UnsupportedPlanError
from compiler.contract.native_trace import Kind, Trace, chrome_json, traced
from compiler.kernels import registry
from tests.factories.kernels import Case, ids, native_targets, raw
from tests.factories.modules import small_decoder
from tests.factories.wide_calls import CASES, ROWS, inputs
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


def test_it_writes_what_perfetto_reads() -> None:
    case = Case.of(small_decoder(4))
    with case.native(TARGETS[0]) as plan, traced(plan) as trace:
        decoder_runs(plan)
    document = json.loads(chrome_json(trace.events()))
    rows = [row for row in document["traceEvents"] if row["ph"] == "X"]
    assert {row["cat"] for row in rows} == {"run", "call"}
    assert {row["name"] for row in rows} >= {"see", "step", "LINEAR", "EXPERTS", "ATTENTION"}
    assert all(row["dur"] >= 0 and row["ts"] > 0 for row in rows)
    assert [row["ts"] for row in rows] == sorted(row["ts"] for row in rows)


def test_it_refuses_a_ring_that_is_none_and_a_plan_that_is_closed() -> None:
    case = Case.of(small_decoder(4))
    with case.native(TARGETS[0]) as plan:
        for slots in (0, 3, 1 << 25):
            with pytest.raises(NativeError, match="power of two"):
                Trace(plan.plan, slots)
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
