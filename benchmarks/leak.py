"""What time tells about values: `python -m benchmarks.leak`.

A routed ReGLU layer runs over tokens for which 10, 50 and 90 % of the gates are dead, in random
order, hot in the cache. Welch's t between the times of two densities says whether they can be told
apart; |t| < 4.5 is the usual bar (Goodwill and others, A testing methodology for side-channel
resistance validation, 2011). A difference counts if all sets agree about it: each loads plans
anew, because where things lie in memory makes a difference of 0.1 % that changes its sign from set
to set. The control in the same run is the same layer stored neuron by neuron, which must be told
apart plainly. Times above the 95th percentile of a plan are interruptions and left out.

What a constant-time plan (`compile --constant-time`) costs is its time over that of the dense plan.
Paths and addresses are compared exactly by tests/integration/test_native_constant_time.py; this is
about what the machine makes of equal paths.
"""

import itertools
import sys
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Final

import numpy as np

from benchmarks.kernels_skip import NEURONS, gated_w4
from benchmarks.priority import uninterrupted
from benchmarks.runner import Claim, main
from benchmarks.synthetic import SECTION, load, random_w4
from compiler.contract.native import NativePlan
from compiler.driver.native_check import host_target
from compiler.emitters.plan import emit_plan
from compiler.kernels.program import (
    DENSE,
    Buffer,
    Call,
    ExpertAct,
    Module,
    Op,
    Program,
    Weight,
)
from compiler.quant.constant_time import constant_time
from compiler.quant.w4 import PackedW4

WIDTH: Final = 256
HIDDEN: Final = 512
DEAD: Final = 0.9
SAMPLES: Final = 3000
SETS: Final = 5
BATCH: Final = 25
CUT: Final = 95.0
T_BAR: Final = 4.5
T_CONTROL: Final = 100.0
COST_BAR: Final = 1.15
MICROSECONDS: Final = 1e6
DENSITIES: Final = ("10 %", "50 %", "90 %")
Samples = Mapping[tuple[str, str], np.ndarray]


def layer(layouts: tuple[str, str]) -> tuple[Module, dict[int, PackedW4]]:
    """Return one routed layer of two experts, both of which every token takes, and its weights."""
    packed: dict[int, PackedW4] = {}
    for expert in range(2):
        packed[2 * expert] = gated_w4(HIDDEN, WIDTH, DEAD, expert)
        packed[2 * expert + 1] = random_w4(WIDTH, HIDDEN, expert + 9)
    weights = tuple(
        Weight(at, "w4", np.broadcast_to(np.float32(1), (w.n, w.k)), SECTION, layouts[at % 2])
        for at, w in packed.items()
    )
    sizes = ((WIDTH, "f32"), (2, "i32"), (2, "f32"), (WIDTH, "f32"))
    buffers = tuple(Buffer(at, 1, False, cols, kind) for at, (cols, kind) in enumerate(sizes))
    params = {"act": ExpertAct.REGLU}
    call = Call(Op.EXPERTS, (0, 1, 2), (3,), tuple(range(4)), params)
    program = Program("run", (call,), {"x": 0, "index": 1, "gate": 2}, {"y": 3})
    return Module((program,), buffers, weights, None, 1), packed


def tokens() -> dict[str, dict[str, memoryview]]:
    """Return inputs by share of dead gates: positive tokens leave most dead, negative ones few."""
    x = np.abs(np.random.default_rng(1).standard_normal((1, WIDTH))).astype(np.float32)
    mixed = np.repeat(x[:, ::2], 2, axis=1) * np.where(np.arange(WIDTH) % 2, 1, -1)
    rest = {"index": np.array([[0, 1]], np.int32).data, "gate": np.ones((1, 2), np.float32).data}
    return {
        density: {"x": one.data, **rest}
        for density, one in zip(DENSITIES, (-x, mixed.astype(np.float32), x), strict=True)
    }


def plans(target: str) -> dict[str, NativePlan]:
    """Return the constant-time plan, the dense one and the control."""
    sparse, packed = layer(NEURONS)
    modules = {
        "constant time": constant_time(sparse),
        "dense": layer((DENSE, DENSE))[0],
        "skip": sparse,
    }
    return {
        name: load(target, emit_plan(module, weights_packed=packed), (Op.EXPERTS,), 1)
        for name, module in modules.items()
    }


Candidates = Mapping[tuple[str, str], tuple[NativePlan, np.ndarray]]


def sampled(
    candidates: Candidates, place: Mapping[str, memoryview]
) -> dict[tuple[str, str], np.ndarray]:
    """Return seconds of `SAMPLES` runs of each plan over each token, in random order.

    Tokens are copied to one place first, from the columns of one matrix, so that all touch the same
    lines of the cache: where they lie would tell them apart.
    """
    random = np.random.default_rng(7)
    names = list(candidates)
    times: dict[tuple[str, str], list[float]] = {name: [] for name in names}
    order = random.permutation(np.tile(np.arange(len(names)), SAMPLES))
    shared = np.frombuffer(place["x"], np.float32)
    for batch in np.array_split(order, max(1, len(order) // BATCH)):
        with uninterrupted():
            for at in batch:
                plan, token = candidates[names[at]]
                shared[:] = token
                plan.run("run", place)  # as the one before left caches and predictors, not measured
                start = perf_counter()
                plan.run("run", place)
                times[names[at]].append(perf_counter() - start)
    return {name: np.array(found) for name, found in times.items()}


def welch(a: np.ndarray, b: np.ndarray) -> float:
    """Return Welch's t of two samples: the difference of means in standard errors."""
    error = np.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))
    return float((a.mean() - b.mean()) / error)


def cropped(samples: Samples, plan: str) -> dict[str, np.ndarray]:
    """Return the samples of a plan by density without what lies above one common cut."""
    cut = np.percentile(np.concatenate([samples[plan, d] for d in DENSITIES]), CUT)
    return {density: samples[plan, density][samples[plan, density] <= cut] for density in DENSITIES}


def reproduced(ts: Sequence[float]) -> float:
    """Return the smallest |t| of several sets; 0 if they disagree about the sign.

    Sets must agree before a difference counts, as in the paper above: each has plans and tokens at
    addresses of its own, and where something lies shows in times too.
    """
    return min(map(abs, ts)) if len(set(np.sign(ts))) == 1 else 0.0


def largest_t(sets: Sequence[Samples], plan: str) -> float:
    """Return the largest reproduced |t| over pairs of densities."""
    kept = [cropped(samples, plan) for samples in sets]
    pairs = itertools.combinations(DENSITIES, 2)
    return max(reproduced([welch(one[a], one[b]) for one in kept]) for a, b in pairs)


def one_set(target: str) -> Samples:
    """Return the samples of plans that are loaded now, checked to give the same bits."""
    loaded, values = plans(target), tokens()
    results = [
        {density: bytes(plan.run("run", one)["y"]) for density, one in values.items()}
        for plan in loaded.values()
    ]
    assert results[0] == results[1] == results[2], "plans of one layer differ"
    side_by_side = np.stack([np.frombuffer(one["x"], np.float32) for one in values.values()], 1)
    place = {**values[DENSITIES[0]], "x": bytearray(4 * WIDTH)}
    return sampled(
        {
            (name, density): (plan, side_by_side[:, at])
            for name, plan in loaded.items()
            for at, density in enumerate(values)
        },
        {role: memoryview(data) for role, data in place.items()},
    )


def measure() -> list[Claim]:
    """Measure constant time, the control, and the cost."""
    target = host_target()
    if target is None:
        raise SystemExit("error: no target runs on this machine")
    sets = [one_set(target.id) for _ in range(SETS)]
    note = f"{SETS} times {SAMPLES} runs of each density, {WIDTH}-{HIDDEN}, hot, {target.id}"
    level, control = (largest_t(sets, name) for name in ("constant time", "skip"))
    single = max(largest_t([one], "constant time") for one in sets)
    ours, dense = (
        float(np.median(np.concatenate([one[name, d] for one in sets for d in DENSITIES])))
        for name in ("constant time", "dense")
    )
    return [
        Claim(
            "leak.constant_time.t",
            level,
            "|t|",
            "bar",
            "",
            T_BAR,
            T_BAR / max(level, 1e-3),
            1.0,
            "host",
            note,
        ),
        Claim(
            *("leak.constant_time.one_set", single, "|t|", "", "", None, None, None, "host"),
            f"the largest |t| of any one set, its sign not the same in all: {note}",
        ),
        Claim(
            *("leak.control.t", control, "|t|", "bar", "", T_CONTROL, control / T_CONTROL, 1.0),
            *("host", f"skipping, told apart: {note}"),
        ),
        Claim(
            *("leak.cost", ours * MICROSECONDS, "us", "own dense", "", dense * MICROSECONDS),
            *(COST_BAR * dense / ours, 1.0, "host", f"at most {COST_BAR} times dense, {note}"),
        ),
    ]


if __name__ == "__main__":
    sys.exit(main("leak", measure, sys.argv[1:]))
