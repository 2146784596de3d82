"""Routed ReGLU layers that leave out dead neurons, against the same layers read densely.

Part of `python -m benchmarks.kernels`. Eight experts of 1024-4096, top 2, one token, six layers
with weights of their own, so that weights are cold. Which neurons are dead is drawn per expert:
gate rows hold only positive or only negative weights, and the token is positive. Both plans hold
the same numbers and give the same bits, which is checked before they are timed.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from benchmarks.runner import Claim
from benchmarks.synthetic import SECTION, Synthetic, load, random_w4
from compiler.contract.native import NativePlan
from compiler.kernels.program import (
    COLUMNS,
    DENSE,
    UP_ROWS,
    Buffer,
    Call,
    ExpertAct,
    Module,
    NormKind,
    Op,
    Program,
    RouteOrder,
    Weight,
)
from compiler.quant.w4 import GROUP, PANEL, PackedW4

WIDTH: Final = 1024
HIDDEN: Final = 4096
EXPERTS: Final = 8
LAYERS: Final = 6
BARS: Final[Mapping[float, float | None]] = {0.9: 1.4, 0.8: 1.2, 0.7: None}
"""Share of dead gates, and what leaving them out must gain; the last one only informs."""
NEURONS: Final = (UP_ROWS, COLUMNS)
Run = Callable[[], object]
Measure = Callable[[Mapping[str, Run]], Mapping[str, list[float]]]


def gated_w4(hidden: int, width: int, dead: float, seed: int) -> PackedW4:
    """Return random w_in (2 * hidden, width): a share `dead` of the gate rows is negative."""
    packed = random_w4(2 * hidden, width, seed)
    codes = np.frombuffer(packed.codes, np.uint8).reshape(-1, width // GROUP, 4, PANEL, 4).copy()
    is_dead = np.random.default_rng(seed).random((hidden // PANEL, 1, 1, PANEL, 1)) < dead
    gate = codes[: hidden // PANEL]
    gate[:] = np.where(is_dead, gate & 0x77, gate | 0x99)
    return PackedW4(packed.n, packed.k, codes.tobytes(), packed.scales, packed.rows)


def layers(
    dead: float, layouts: tuple[str, str], count: int = LAYERS, hidden: int = HIDDEN
) -> Synthetic:
    """Return `count` routed layers over one token, each with experts of its own."""
    random = np.random.default_rng(5)
    weights: list[Weight] = []
    packed: dict[int, PackedW4] = {}
    buffers = [Buffer(0, 1, False, WIDTH, "f32")]
    calls, outputs = [], {}

    def add(array: np.ndarray, kind: str, layout: str = DENSE) -> int:
        weights.append(Weight(len(weights), kind, array, SECTION, layout))
        return len(weights) - 1

    def add_w4(matrix: PackedW4, layout: str) -> int:
        packed[len(weights)] = matrix
        return add(np.broadcast_to(np.float32(1.0), (matrix.n, matrix.k)), "w4", layout)

    for layer in range(count):
        operands = [add(np.ones(WIDTH, np.float32), "f32"), -1]
        operands += [add(random.standard_normal((EXPERTS, WIDTH)).astype(np.float32), "f32"), -1]
        for expert in range(EXPERTS):
            seed = 2 * (layer * EXPERTS + expert)
            operands.append(add_w4(gated_w4(hidden, WIDTH, dead, seed), layouts[0]))
            operands.append(add_w4(random_w4(WIDTH, hidden, seed + 1), layouts[1]))
        at = len(buffers)
        buffers += [Buffer(at, 1, False, WIDTH, "f32"), Buffer(at + 1, 1, False, 2, "i32")]
        buffers.append(Buffer(at + 2, 1, False, 2, "f32"))
        params = {"k": 2, "order": RouteOrder.SOFTMAX_TOPK_RENORM, "act": ExpertAct.REGLU}
        params |= {"kind": NormKind.RMS, "eps": 1e-6}
        calls.append(Call(Op.MOE_LAYER, (0,), (at, at + 1, at + 2), tuple(operands), params))
        outputs[f"y{layer}"] = at
    program = Program("run", tuple(calls), {"x": 0}, outputs)
    module = Module((program,), tuple(buffers), tuple(weights), None, 1)
    return Synthetic(module, packed, count * 2 * 3 * WIDTH * hidden * 17 // 32)


def token_run(plan: NativePlan) -> Run:
    """Return a run over one positive token."""
    x = np.abs(np.random.default_rng(0).standard_normal((1, WIDTH))).astype(np.float32)
    return lambda: plan.run("run", {"x": x.data})


def skip_claims(target: str, measure: Measure) -> list[Claim]:
    """Return layers that leave out dead neurons against dense ones, by share of dead gates."""
    claims = []
    for dead, bar in BARS.items():
        plans = {
            name: load(target, layers(dead, layouts).emit(), (Op.MOE_LAYER,), 1)
            for name, layouts in (("dense", (DENSE, DENSE)), ("skip", NEURONS))
        }
        results = [
            {role: bytes(view) for role, view in plan.run("run", token()).items()}
            for plan in plans.values()
        ]
        assert results[0] == results[1], "leaving out dead neurons changed a bit"
        runs = measure({name: token_run(plan) for name, plan in plans.items()})
        dense, ours = (float(np.median(runs[name])) / LAYERS * 1e6 for name in plans)
        note = f"ReGLU, {EXPERTS} experts, top 2, {WIDTH}-{HIDDEN}, 1 thread, cold, {target}"
        name = f"kernels.skip.{round(100 * dead)}"
        claims.append(
            Claim(name, ours, "us", "own dense", "", dense, dense / ours, bar, "host", note)
        )
        for plan in plans.values():
            plan.close()
    return claims


def token() -> dict[str, memoryview]:
    """Return the input of a run."""
    x = np.abs(np.random.default_rng(0).standard_normal((1, WIDTH))).astype(np.float32)
    return {"x": x.data}
