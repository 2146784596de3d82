"""What trace points cost: a part of `make bench-kernels`.

A program of 512 calls that do next to nothing runs untraced, traced, and, from a source without
trace points, as it would be if there were none; interleaved. An event's cost is the difference of
the first two over the events.
"""

import statistics
from typing import Final

import numpy as np

from benchmarks.priority import uninterrupted
from benchmarks.runner import Claim, interleaved
from benchmarks.synthetic import CACHE
from compiler.contract.native import NativePlan
from compiler.contract.native_trace import Trace
from compiler.emitters.backends import render_kernels
from compiler.emitters.plan import emit_plan
from compiler.emitters.toolchain import compile_shared
from compiler.hardware.targets import find_target
from compiler.kernels.program import SHARED_SECTION, Buffer, Call, Module, Op, Program, Weight

CALLS: Final = 512
RUNS: Final = 20
ROUNDS: Final = 60
MOST_NS: Final = 50.0
LEAST_SHARE: Final = 0.98
TRACE_TEST: Final = "if (ctx->trace) {"


def tiny_calls() -> Module:
    """Return a program that adds one to one number, many times."""
    buffers = tuple(Buffer(at, 1, False, 1, "f32") for at in range(CALLS + 1))
    weight = Weight(0, "f32", np.ones((1, 1), np.float32), SHARED_SECTION)
    calls = tuple(Call(Op.ADD, (at,), (at + 1,), (0,), {}) for at in range(CALLS))
    program = Program("run", calls, {"x": 0}, {"y": CALLS})
    return Module((program,), buffers, (weight,), None, 1)


def trace_claims(target_id: str) -> list[Claim]:
    """Return the rows about trace points."""
    target, emitted = find_target(target_id), emit_plan(tiny_calls(), weights_packed={})
    source = render_kernels(target, [Op.ADD])
    assert source.count(TRACE_TEST) == 2
    bare = source.replace(TRACE_TEST, "if (0) {")
    plans = {
        name: NativePlan(compile_shared(text, target, CACHE), emitted.plan_bytes, emitted.sections)
        for name, text in (("off", source), ("on", source), ("none", bare))
    }
    trace = Trace(plans["on"])
    trace.attach(plans["on"])
    x = {"x": np.zeros(1, np.float32).data}

    def run(plan: NativePlan) -> None:
        with uninterrupted():
            for _ in range(RUNS):
                plan.run("run", x)

    seconds = interleaved({name: lambda p=plan: run(p) for name, plan in plans.items()}, ROUNDS)
    per_call = {name: statistics.median(s) / (RUNS * CALLS) * 1e9 for name, s in seconds.items()}
    for plan in plans.values():
        plan.close()
    event = max(0.1, per_call["on"] - per_call["off"])
    share = per_call["none"] / per_call["off"]
    off, none = per_call["off"], per_call["none"]
    return [
        Claim("trace.on", event, "ns/event", "bar", "", MOST_NS, MOST_NS / event, 1.0, "host"),
        Claim("trace.off", off, "ns/call", "no trace points", "", none, share, LEAST_SHARE, "host"),
    ]
