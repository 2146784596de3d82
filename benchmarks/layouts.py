"""Layouts of pruned weights: measure products in each, and what the chosen one costs too much.

    python -m benchmarks.layouts                regret on shapes and densities the model never saw
    python -m benchmarks.layouts --points FILE  measure the points that the model is fitted to

A product is the LINEAR call of a plan on weights that are hot in the cache: quantising the
activations, the product, no Python. The layouts of one weight are measured in turns, in one run;
times are medians over the turns, in CPU time of the thread, so that neighbours disturb all alike.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from compiler.analysis.cost import ZeroCount, choose, count_zeros
from compiler.contract.native import NativePlan
from compiler.emitters.plan import emit_plan
from compiler.emitters.toolchain import build_kernels
from compiler.hardware.targets import find_target
from compiler.kernels.program import (
    COO,
    CSR,
    ELL,
    W4_LAYOUTS,
    Buffer,
    Call,
    Module,
    Op,
    Program,
    Weight,
)
from compiler.quant.module import pack_module

FITTED_SHAPES = ((128, 128), (384, 128), (256, 512), (1024, 256), (1024, 1024), (4096, 1024))
FITTED = (
    *(("tiles", density) for density in (1.0, 0.7, 0.4, 0.2, 0.08)),
    *(("blocks", density) for density in (0.5, 0.25, 0.1, 0.03)),
    *(("elements", density) for density in (0.3, 0.12, 0.05, 0.02, 0.005, 0.0005)),
)
HELD_OUT_SHAPES = ((192, 320), (640, 384), (2048, 512), (768, 1536), (3000, 700))
HELD_OUT = (
    *(("tiles", density) for density in (0.55, 0.3, 0.12)),
    *(("blocks", density) for density in (0.35, 0.15, 0.06)),
    *(("elements", density) for density in (0.2, 0.08, 0.03, 0.01, 0.001)),
    *(("2:4", 0.5), ("1:16", 0.0625)),
)
MOST_STORED = {CSR: 0.06, COO: 0.06, ELL: 0.6}
"""Shares of elements or blocks beyond which a layout is not fitted."""
ROWS = (1, 8)
TURNS = 15
SAMPLE_S = 2e-4
"""A turn repeats a call until it takes about so long."""
Point = tuple[str, int, int, int, int, float]


@dataclass(frozen=True)
class Measured:
    """Microseconds of one product in each layout that can store its weight."""

    pattern: str
    density: float
    rows: int
    count: ZeroCount
    times: Mapping[str, float]


def _blocks(high: int, wide: int) -> Callable[..., np.ndarray]:
    def pattern(random: np.random.Generator, n: int, k: int, density: float) -> np.ndarray:
        live = random.random((-(-n // high), -(-k // wide))) < density
        live[0, 0] = True
        return np.kron(live, np.ones((high, wide), bool))[:n, :k]

    return pattern


def _of_m(random: np.random.Generator, n: int, k: int, density: float) -> np.ndarray:
    """Return n of every m neighbours of a row: 2 of 4, or 1 of 16."""
    kept, of = (2, 4) if density == 0.5 else (1, round(1 / density))
    order = random.random((n, -(-k // of), of)).argsort(axis=2)
    return (order < kept).reshape(n, -1)[:, :k]


PATTERNS: Mapping[str, Callable[..., np.ndarray]] = {
    "tiles": _blocks(16, 32),
    "blocks": _blocks(32, 4),
    "elements": _blocks(1, 1),
    "2:4": _of_m,
    "1:16": _of_m,
}


def pruned(pattern: str, n: int, k: int, density: float, seed: int) -> np.ndarray:
    """Return a normal weight (n, k) f32, zero where its pattern says so."""
    random = np.random.default_rng(seed)
    live = PATTERNS[pattern](random, n, k, density)
    return (random.standard_normal((n, k)) * live).astype(np.float32)


def linear_module(weight: np.ndarray, layout: str, rows: int) -> Module:
    """Return a module of one LINEAR call on `rows` rows."""
    n, k = weight.shape
    buffers = (Buffer(0, rows, False, k, "f32"), Buffer(1, rows, False, n, "f32"))
    call = Call(Op.LINEAR, (0,), (1,), (0,), {})
    program = Program("run", (call,), {"x": 0}, {"y": 1})
    stored = Weight(0, "w4", weight, "weights.shared", layout)
    return Module((program,), buffers, (stored,), None, 1)


def _seconds(plan: NativePlan, calls: int, repeats: int) -> float:
    start = time.thread_time()
    for _ in range(repeats):
        plan.run_calls("run", None, 0, calls, 0)
    return (time.thread_time() - start) / repeats


def microseconds(kernels: bytes, weight: np.ndarray, rows: int) -> dict[str, float]:
    """Return the median time of the product in each layout, measured in turns."""
    module = linear_module(weight, W4_LAYOUTS[0], rows)
    packed = pack_module(module).packed
    x = np.random.default_rng(0).standard_normal((rows, weight.shape[1])).astype(np.float32)
    plans, taken, stored = {}, {}, set()
    with ExitStack() as stack:
        for layout in W4_LAYOUTS:
            weights = (replace(module.weights[0], layout=layout),)
            emitted = emit_plan(replace(module, weights=weights), weights_packed=packed)
            digest = emitted.plan_bytes
            if digest in stored:  # nothing to leave out: stored as the dense one
                continue
            stored.add(digest)
            plan = NativePlan(kernels, emitted.plan_bytes, emitted.sections)
            plans[layout] = stack.enter_context(plan)
            plan.run("run", {"x": x})
            repeats = max(1, round(SAMPLE_S / max(1e-7, _seconds(plan, 1, 3))))
            taken[layout] = (repeats, [])
        for _ in range(TURNS):
            for layout, plan in plans.items():
                repeats, samples = taken[layout]
                samples.append(_seconds(plan, 1, repeats) - _seconds(plan, 0, repeats))
    return {name: 1e6 * statistics.median(samples) for name, (_, samples) in taken.items()}


def measure(
    kernels: bytes, shapes: tuple[tuple[int, int], ...], patterns: tuple[tuple[str, float], ...]
) -> Iterator[Measured]:
    """Measure every pattern on every shape, for every number of rows."""
    for at, (n, k) in enumerate(shapes):
        for pattern, density in patterns:
            weight = pruned(pattern, n, k, density, at)
            for rows in ROWS:
                times = microseconds(kernels, weight, rows)
                yield Measured(pattern, density, rows, count_zeros(weight), times)


def points(found: Iterable[Measured]) -> list[Point]:
    """Return the rows of `compiler.analysis.layout_points`.

    Products that were measured several times are one point, their median. Where a layout stores so
    much that dense is far cheaper, its points would only pull at the fit.
    """
    times: dict[tuple[str, int, int, int, int], list[float]] = {}
    for item in found:
        count = item.count
        for layout, spent in item.times.items():
            units = count.units[layout]
            if units <= MOST_STORED.get(layout, 1.0) * count.most[layout]:
                place = (layout, item.rows, count.rows, count.cols, units)
                times.setdefault(place, []).append(spent)
    return [(*place, round(statistics.median(spent), 2)) for place, spent in sorted(times.items())]


def regrets(found: Iterator[Measured]) -> Iterator[tuple[float, str]]:
    """Yield how much slower the chosen layout is than the best measured, with a line about it."""
    for item in found:
        chosen = choose(item.count, (item.rows,)).layout
        best = min(item.times, key=lambda name: item.times[name])
        regret = item.times[chosen] / item.times[best] - 1.0
        times = "  ".join(f"{name} {spent:.1f}" for name, spent in item.times.items())
        yield (
            regret,
            f"{item.rows} x {item.count.rows} x {item.count.cols} {item.pattern} {item.density:g}:"
            f" {chosen}, best {best}, regret {regret:.1%}  ({times} us)",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="x86-64-v3")
    parser.add_argument("--cache", type=Path, default=Path("var/bench-cache/kernels"))
    parser.add_argument("--points", type=Path, help="write the points to fit to to this file")
    options = parser.parse_args()
    kernels = build_kernels(find_target(options.target), [Op.LINEAR], options.cache)
    if options.points:
        found = points(measure(kernels, FITTED_SHAPES, FITTED))
        lines = "".join(f"    {point!r},\n" for point in found)
        options.points.write_text(lines.replace("'", '"'))
        return
    spent = []
    for regret, line in regrets(measure(kernels, HELD_OUT_SHAPES, HELD_OUT)):
        spent.append(regret)
        print(line, flush=True)
    right = sum(regret == 0.0 for regret in spent)
    print(
        f"{right} of {len(spent)} choices are the best measured; regret: median "
        f"{statistics.median(spent):.1%}, mean {statistics.mean(spent):.1%}, worst {max(spent):.1%}"
    )


if __name__ == "__main__":
    main()
