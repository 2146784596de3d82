"""Plans with random weights of any size, for benchmarks of kernels; nothing is learned or exact.

Every matrix has bytes of its own, so that a walk over many of them reads memory, not a cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from compiler.contract.native import NativePlan
from compiler.emitters.backends import build_kernels
from compiler.emitters.plan import EmittedPlan, emit_plan
from compiler.hardware.targets import find_target
from compiler.kernels.program import (
    DENSE,
    TILES,
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

CACHE: Final = Path(__file__).resolve().parents[1] / "var" / "bench-cache" / "kernels"
SECTION: Final = "weights.shared"
TILE_BYTES: Final = PANEL * GROUP // 2 + PANEL
"""Codes and scales of one tile of 16 rows and 32 columns."""
ROW_SCALE: Final = 2.0**-13
DIFFERENT: Final = 48


def random_w4(n: int, k: int, seed: int, live: float = 1.0) -> PackedW4:
    """Return random packed bytes of an (n, k) matrix, n a multiple of 16, k of 32.

    Args:
        n: Rows.
        k: Columns.
        seed: Of the codes.
        live: Share of 32 x 32 blocks (two panels) that are not all zero.
    """
    random = np.random.default_rng(seed)
    panels, groups = n // PANEL, k // GROUP
    codes = random.integers(0, 256, (panels, groups, PANEL * GROUP // 2), np.uint8)
    if live < 1.0:
        dead = np.repeat(random.random((-(-panels // 2), groups)) >= live, 2, axis=0)[:panels]
        dead[:, 0] = False
        codes[dead] = 0x88  # the code of zero in both halves
    scales = random.integers(1, 256, panels * groups * PANEL, np.uint8)
    rows = np.full(n, ROW_SCALE, "<f4")
    return PackedW4(n, k, codes.tobytes(), scales.tobytes(), rows.tobytes())


def live_bytes(packed: PackedW4) -> int:
    """Return the bytes that a product with live tiles reads of a matrix."""
    codes = np.frombuffer(packed.codes, np.uint8).reshape(-1, PANEL * GROUP // 2)
    return int((codes != 0x88).any(axis=1).sum()) * TILE_BYTES


@dataclass(frozen=True)
class Synthetic:
    """A module, its packed weights and how many weight bytes one run reads."""

    module: Module
    packed: Mapping[int, PackedW4]
    read_bytes: int

    def emit(self) -> EmittedPlan:
        return emit_plan(self.module, weights_packed=self.packed)


def load(target_id: str, emitted: EmittedPlan, ops: tuple[Op, ...], threads: int) -> NativePlan:
    """Build kernels for the operations and load the plan on them."""
    kernels = build_kernels(find_target(target_id), ops, CACHE)
    return NativePlan(kernels, emitted.plan_bytes, emitted.sections, threads=threads)


def shape_only(n: int, k: int) -> np.ndarray:
    """Return an array of a shape that takes no memory."""
    return np.broadcast_to(np.float32(1.0), (n, k))


def linear_walk(n: int, k: int, count: int, rows: int = 1, live: float = 1.0) -> Synthetic:
    """Return `count` products of one x (rows, k) with matrices (n, k) of their own.

    Of more than `DIFFERENT` matrices some have equal bytes, at places of their own.
    """
    different = [random_w4(n, k, at, live) for at in range(min(count, DIFFERENT))]
    packed = {at: different[at % DIFFERENT] for at in range(count)}
    layout = DENSE if live == 1.0 else TILES
    weights = tuple(Weight(at, "w4", shape_only(n, k), SECTION, layout) for at in range(count))
    buffers = [Buffer(0, rows, False, k, "f32")]
    buffers += [Buffer(at + 1, rows, False, n, "f32") for at in range(count)]
    calls = tuple(Call(Op.LINEAR, (0,), (at + 1,), (at,), {}) for at in range(count))
    roles = {f"y{at}": at + 1 for at in range(count)}
    program = Program("run", calls, {"x": 0}, roles)
    read = sum(live_bytes(matrix) if live < 1.0 else n * k * 17 // 32 for matrix in packed.values())
    return Synthetic(Module((program,), tuple(buffers), weights, None, 1), packed, read)


def moe_walk(layers: int, width: int, hidden: int, experts: int, k: int = 2) -> Synthetic:
    """Return a chain of routed SwiGLU layers over one token, each with experts of its own."""
    random = np.random.default_rng(5)
    weights: list[Weight] = []
    packed: dict[int, PackedW4] = {}
    buffers = [Buffer(0, 1, False, width, "f32")]
    calls: list[Call] = []

    def add_f32(array: np.ndarray) -> int:
        weights.append(Weight(len(weights), "f32", array.astype(np.float32), SECTION))
        return len(weights) - 1

    def add_w4(n: int, depth: int) -> int:
        packed[len(weights)] = random_w4(n, depth, len(weights))
        weights.append(Weight(len(weights), "w4", shape_only(n, depth), SECTION))
        return len(weights) - 1

    for layer in range(layers):
        fixed = [add_f32(np.ones(width)), -1, add_f32(random.standard_normal((experts, width))), -1]
        mixed = [add_w4(*shape) for _ in range(experts) for shape in _expert_shapes(width, hidden)]
        at = len(buffers)
        buffers += [
            Buffer(at, 1, False, width, "f32"),
            Buffer(at + 1, 1, False, k, "i32"),
            Buffer(at + 2, 1, False, k, "f32"),
        ]
        params = {
            "k": k,
            "order": RouteOrder.SOFTMAX_TOPK_RENORM,
            "act": ExpertAct.SWIGLU,
            "kind": NormKind.RMS,
            "eps": 1e-6,
            "residual": 1,
        }
        operands = tuple(fixed + mixed)
        source = 0 if layer == 0 else at - 3
        calls.append(Call(Op.MOE_LAYER, (source,), (at, at + 1, at + 2), operands, params))
    program = Program("run", tuple(calls), {"x": 0}, {"y": len(buffers) - 3})
    module = Module((program,), tuple(buffers), tuple(weights), None, 1)
    read = layers * (k * 3 * width * hidden * 17 // 32 + experts * width * 4)
    return Synthetic(module, packed, read)


def _expert_shapes(width: int, hidden: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (2 * hidden, width), (width, hidden)


def router(width: int, experts: int, k: int = 2) -> Module:
    """Return one routing decision over one token."""
    weight = np.random.default_rng(6).standard_normal((experts, width)).astype(np.float32)
    buffers = (
        Buffer(0, 1, False, width, "f32"),
        Buffer(1, 1, False, k, "i32"),
        Buffer(2, 1, False, k, "f32"),
    )
    params = {"k": k, "order": RouteOrder.SOFTMAX_TOPK_RENORM}
    call = Call(Op.ROUTE, (0,), (1, 2), (0,), params)
    program = Program("run", (call,), {"x": 0}, {"index": 1, "gate": 2})
    return Module((program,), buffers, (Weight(0, "f32", weight, SECTION),), None, 1)
