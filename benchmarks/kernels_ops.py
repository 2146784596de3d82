"""Kernels beside the W4 products, against our own plain way or ONNX Runtime f32.

Rows of `benchmarks.kernels`, which calls `op_claims`: attention over a cache of int8 codes against
one of f32, and an LSTM layer.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks import peers_f32
from benchmarks.priority import uninterrupted
from benchmarks.runner import Claim, interleaved
from benchmarks.synthetic import CACHE
from compiler.contract.native import NativePlan
from compiler.emitters.backends import build_kernels
from compiler.emitters.plan import emit_plan
from compiler.hardware.targets import find_target
from compiler.kernels.program import (
    ABSENT,
    Buffer,
    Call,
    KvCache,
    KvKind,
    Module,
    Op,
    Program,
    RecurrentKind,
    Weight,
)
from compiler.quant.module import pack_module

ROUNDS: Final = 15
MICROSECONDS: Final = 1e6
CHUNK: Final = 64
KV_SHAPES: Final = ((8, 8, 64, 1000, 1.05), (16, 4, 64, 4000, 1.05), (32, 8, 128, 8000, 1.8))
"""Heads, key heads, size of a head, cached rows, and how many times faster codes must be."""
LSTM_SHAPES: Final = ((1, 128, (1.0, 1.1)), (100, 128, (None, 1.4)), (100, 512, (None, 2.5)))
"""Steps, width, and the ratios to ONNX Runtime that f32 and four-bit weights must reach. Our
f32 sums have one order on every machine; theirs are contracted."""
Run = Callable[[], object]
Port = tuple[int, int]


def medians(candidates: Mapping[str, Run]) -> dict[str, float]:
    """Return the median seconds of each candidate, taken in turn with the cores to itself."""

    def alone(run: Run) -> Run:
        def sample() -> None:
            with uninterrupted():
                run()

        return sample

    for run in candidates.values():
        run()
    runs = interleaved({name: alone(run) for name, run in candidates.items()}, ROUNDS, pause_s=0.0)
    return {name: statistics.median(times) for name, times in runs.items()}


def versus(name: str, ours: float, peer: str, theirs: float, bar: float | None, note: str) -> Claim:
    """Return a claim that `ours` seconds are `bar` times fewer than `theirs`."""
    us, other = ours * MICROSECONDS, theirs * MICROSECONDS
    return Claim(name, us, "us", peer, "", other, theirs / ours, bar, "host", note)


@dataclass(frozen=True)
class OneCall:
    """A plan of one call; ports `x0`, `x1`, ... and `y0`.

    Attributes:
        inputs: Rows, 0 for the rows of the run, and columns of each f32 input.
        output: The same of the result.
    """

    op: Op
    inputs: Sequence[Port]
    output: Port
    weights: Sequence[np.ndarray | None]
    params: Mapping[str, int | float]
    kv: KvCache | None = None

    def module(self) -> Module:
        """Return the module."""
        ports = [*self.inputs, self.output]
        buffers = tuple(
            Buffer(at, rows or CHUNK, not rows, cols, "f32")
            for at, (rows, cols) in enumerate(ports)
        )
        made = [array for array in self.weights if array is not None]
        weights = tuple(Weight(at, "f32", a, "weights.shared") for at, a in enumerate(made))
        numbers = iter(range(len(made)))
        slots = tuple(ABSENT if a is None else next(numbers) for a in self.weights)
        count = len(self.inputs)
        call = Call(self.op, tuple(range(count)), (count,), slots, self.params)
        roles = {f"x{at}": at for at in range(count)}
        return Module(
            (Program("run", (call,), roles, {"y0": count}),), buffers, weights, self.kv, CHUNK
        )

    def load(self, target: str, threads: int = 1) -> NativePlan:
        """Return the plan, loaded."""
        emitted = emit_plan(self.module(), weights_packed={})
        kernels = build_kernels(find_target(target), (self.op,), CACHE)
        return NativePlan(kernels, emitted.plan_bytes, emitted.sections, threads=threads)


def kv_claims(target: str) -> list[Claim]:
    """Return decode steps over a long cache: int8 codes against f32."""
    claims = []
    for heads, groups, width, rows, bar in KV_SHAPES:
        found = medians(
            {kind.name: _decode(target, (heads, groups, width, rows), kind) for kind in KvKind}
        )
        what = f"{heads} heads over {groups} of {width}, {rows} cached rows, one row, 1 thread"
        name = f"kernels.kv.int8.{rows}"
        claims.append(
            versus(name, found["I8"], "own f32 cache", found["F32"], bar, f"{what}, {target}")
        )
    return claims


def _decode(target: str, shape: tuple[int, int, int, int], kind: KvKind) -> Run:
    heads, groups, width, rows = shape
    random = np.random.default_rng(0)
    params = {"heads": heads, "kv_heads": groups, "scale": width**-0.5, "kv_layer": 0}
    ports = [(0, count * width) for count in (heads, groups, groups)]
    cache = KvCache(1, groups, width, rows + CHUNK, kind)
    plan = OneCall(Op.ATTENTION, ports, (0, heads * width), (), params, cache).load(target)

    def values(count: int) -> dict[str, memoryview]:
        return {
            f"x{at}": random.standard_normal((count, cols)).astype(np.float32).data
            for at, (_, cols) in enumerate(ports)
        }

    while plan.kv_length < rows:
        plan.run("run", values(min(CHUNK, rows - plan.kv_length)))
    one = values(1)

    def step() -> None:
        plan.run("run", one)
        plan.kv_length = rows

    return step


def _lstm(
    target: str, steps: int, width: int, weights: tuple[np.ndarray, ...], linear: Op, cell: Op
) -> Run:
    """Return a run of both calls of an LSTM layer."""
    w, r, bias = weights
    sizes = ((steps, width), (steps, 4 * width), (steps, width), (1, width), (1, width))
    buffers = tuple(Buffer(at, *size[:1], False, size[1], "f32") for at, size in enumerate(sizes))
    kinds = ["w4" if op in (Op.LINEAR, Op.RECURRENT) else "f32" for op in (linear, cell)]
    held = ((kinds[0], w), ("f32", bias), (kinds[1], r))
    made = tuple(Weight(at, kind, a, "weights.shared") for at, (kind, a) in enumerate(held))
    calls = (
        Call(linear, (0,), (1,), (0, 1), {}),
        Call(cell, (1,), (2, 3, 4), (2,), {"kind": RecurrentKind.LSTM}),
    )
    outputs = {"y": 2, "h": 3, "c": 4}
    module = Module((Program("run", calls, {"x": 0}, outputs),), buffers, made, None, 1)
    emitted = emit_plan(module, weights_packed=pack_module(module).packed)
    kernels = build_kernels(find_target(target), (linear, cell), CACHE)
    plan = NativePlan(kernels, emitted.plan_bytes, emitted.sections)
    x = np.random.default_rng(5).standard_normal((steps, width)).astype(np.float32)
    return lambda: plan.run("run", {"x": x.data})


def lstm_claims(target: str) -> list[Claim]:
    """Return an LSTM layer, step by step and over a sequence, against ONNX Runtime f32."""
    claims = []
    for steps, width, bar in LSTM_SHAPES:
        weights = peers_f32.lstm_weights(width)
        candidates = {
            "f32": _lstm(target, steps, width, weights, Op.LINEAR_F32, Op.RECURRENT_F32),
            "w4": _lstm(target, steps, width, weights, Op.LINEAR, Op.RECURRENT),
            "peer": peers_f32.lstm(steps, width, weights),
        }
        found = medians(candidates)
        for kind in ("f32", "w4"):
            note = f"LSTM of {width}, {steps} steps, batch 1, 1 thread, {target}"
            name = f"kernels.lstm.{kind}.{width}x{steps}"
            wanted = bar[kind == "w4"]
            claims.append(versus(name, found[kind], peers_f32.NAME, found["peer"], wanted, note))
    return claims


def op_claims(target: str) -> list[Claim]:
    """Return every row of this module, one group of candidates after another."""
    return [*kv_claims(target), *lstm_claims(target)]
