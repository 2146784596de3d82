"""Rows behind a ReLU as a bitmap and their values, against dense rows: bytes read, and time.

Rows of `benchmarks.kernels`. What `compiler.analysis.packed_points` holds was measured here: the
time of a reader is a fourth of what five take longer than one, that of packing the rest.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from benchmarks.kernels_ops import medians
from benchmarks.runner import Claim
from benchmarks.synthetic import CACHE
from compiler.analysis.packed_points import packed_bytes
from compiler.contract.native import NativePlan
from compiler.emitters.backends import build_kernels
from compiler.emitters.plan import emit_plan
from compiler.hardware.targets import find_target
from compiler.kernels.program import Buffer, Call, Module, Op, Program, UnaryKind, Weight
from compiler.quant.packing import Points, choose_packed

COLS: Final = 4096
ROWS: Final = (1, 256, 2048)
DENSITY: Final = 0.5
MANY: Final = 5
BAR: Final = 0.6
"""Share of the dense bytes that half full rows may read."""
ALWAYS: Final = Points(reader=(9.0, 9.0, 9.0))


def _module(rows: int, readers: int) -> Module:
    """Return a ReLU over (rows, COLS) and products of it with a vector."""
    buffers = tuple(Buffer(at, rows, False, COLS, "f32") for at in range(readers + 2))
    vector = Weight(0, "f32", np.full((1, COLS), 1.5, np.float32), "weights.shared")
    relu = Call(Op.UNARY, (0,), (1,), (), {"kind": UnaryKind.RELU})
    products = (Call(Op.MUL, (1,), (2 + at,), (0,), {"act": 0}) for at in range(readers))
    outputs = {f"y{at}": 2 + at for at in range(readers)}
    return Module(
        (Program("run", (relu, *products), {"x": 0}, outputs),), buffers, (vector,), None, 1
    )


def _run(target: str, rows: int, readers: int, *, packed: bool) -> Callable[[], object]:
    module = _module(rows, readers)
    if packed:
        module, _ = choose_packed(module, ALWAYS)
    emitted = emit_plan(module, weights_packed={})
    kernels = build_kernels(find_target(target), tuple(module.ops), CACHE)
    plan = NativePlan(kernels, emitted.plan_bytes, emitted.sections)
    x = np.random.default_rng(0).standard_normal((rows, COLS)).astype(np.float32)
    return lambda: plan.run("run", {"x": x.data})


def packed_claims(target: str) -> list[Claim]:
    """Return, per number of rows, what a reader reads, and its speed and that of packing."""
    claims = []
    for rows in ROWS:
        found = medians(
            {
                f"{readers}{packed}": _run(target, rows, readers, packed=packed)
                for readers in (1, MANY)
                for packed in (False, True)
            }
        )
        dense, ours = (
            (found[f"{MANY}{packed}"] - found[f"1{packed}"]) / (MANY - 1)
            for packed in (False, True)
        )
        packing = (found["1True"] - ours) / max(found["1False"] - dense, 1e-9)
        note = (
            f"{rows} rows of {COLS}, half zero, 1 thread, {target}; packing takes {packing:.2f} of"
            " the ReLU; the compiler keeps rows dense where this is below 1"
        )
        claims.append(
            Claim(
                f"kernels.packed.reader.{rows}x{COLS}",
                *(ours * 1e6, "us", "own dense rows", "", dense * 1e6, dense / ours, None),
                *("host", note),
            )
        )
        size, whole = packed_bytes(rows, COLS, DENSITY), 4 * rows * COLS
        claims.append(
            Claim(
                f"kernels.packed.bytes.{rows}x{COLS}",
                *(size, "bytes", "own dense rows", "", whole, whole / size, 1 / BAR),
                *("host", "read by one reader: the values that are not zero, and the bitmap"),
            )
        )
    return claims
