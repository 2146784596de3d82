"""Dense against packed live tiles: measure products, compare with the cost model, print the regret.

    python -m benchmarks.layouts                compare the stored model with this machine
    python -m benchmarks.layouts --points FILE  write measured points for compiler.analysis

Times are the least of several runs of a plan with one LINEAR call, so they hold its whole cost:
quantising the activations, the product, one native call. The weights are hot in the cache.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from compiler.analysis.cost import TileCount, count_tiles, predict
from compiler.contract.native import NativePlan
from compiler.emitters.plan import emit_plan
from compiler.emitters.toolchain import build_kernels
from compiler.hardware.targets import find_target
from compiler.kernels.program import DENSE, TILES, Buffer, Call, Module, Op, Program, Weight
from compiler.quant.module import pack_module

SHAPES = ((128, 128), (384, 128), (256, 512), (1024, 256), (1024, 1024), (4096, 1024))
DENSITIES = (1.0, 0.7, 0.4, 0.2, 0.08)
ROWS = (1, 8)
REPEATS = 40
Point = tuple[int, int, int, int, bool, float]


def block_sparse(n: int, k: int, density: float, seed: int) -> np.ndarray:
    """Return a weight of which about `density` of the 16 x 32 tiles are not zero."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal((n, k)).astype(np.float32)
    tiles = random.random((-(-n // 16), -(-k // 32))) < density
    tiles[0, 0] = True
    return weight * np.kron(tiles, np.ones((16, 32)))[:n, :k].astype(np.float32)


def linear_module(weight: np.ndarray, layout: str, rows: int) -> Module:
    n, k = weight.shape
    buffers = (Buffer(0, rows, False, k, "f32"), Buffer(1, rows, False, n, "f32"))
    call = Call(Op.LINEAR, (0,), (1,), (0,), {})
    program = Program("run", (call,), {"x": 0}, {"y": 1})
    stored = Weight(0, "w4", weight, "weights.shared", layout)
    return Module((program,), buffers, (stored,), None, 1)


def microseconds(kernels: bytes, module: Module) -> float:
    emitted = emit_plan(module, weights_packed=pack_module(module).packed)
    rows, cols = module.buffers[0].rows, module.buffers[0].cols
    x = np.random.default_rng(0).standard_normal((rows, cols)).astype(np.float32)
    with NativePlan(kernels, emitted.plan_bytes, emitted.sections) as plan:
        best = float("inf")
        for _ in range(REPEATS):
            start = time.perf_counter()
            plan.run("run", {"x": x})
            best = min(best, time.perf_counter() - start)
    return best * 1e6


def measure(target: str, cache: Path) -> list[Point]:
    kernels = build_kernels(find_target(target), [Op.LINEAR], cache)
    points: list[Point] = []
    for n, k in SHAPES:
        for density in DENSITIES:
            weight = block_sparse(n, k, density, len(points))
            live = count_tiles(weight).live
            for rows in ROWS:
                for layout in (DENSE, TILES):
                    if layout == TILES and density == 1.0:
                        continue
                    spent = microseconds(kernels, linear_module(weight, layout, rows))
                    points.append((rows, n, k, live, layout == TILES, round(spent, 2)))
    return points


def compare(points: list[Point]) -> str:
    """Return a table of choices: measured, predicted, and how much slower the choice is."""
    measured = {(rows, n, k, live, tiled): t for rows, n, k, live, tiled, t in points}
    lines, regrets, right = ["rows      n     k  live   dense us  tiles us  chosen  regret"], [], 0
    for (rows, n, k, live, tiled), spent in measured.items():
        dense = measured[rows, n, k, live, False]
        if not tiled:
            continue
        count = TileCount(live, -(-n // 16) * -(-k // 32), 0, n, k, 0)
        takes_tiles = predict(rows, count, tiled=True) < predict(rows, count, tiled=False)
        regret = (spent if takes_tiles else dense) / min(spent, dense) - 1.0
        regrets.append(regret)
        right += regret == 0.0
        share, chosen = live / count.tiles, TILES if takes_tiles else DENSE
        lines.append(
            f"{rows:4} {n:6} {k:5} {share:5.2f} {dense:10.2f} {spent:9.2f}"
            f"  {chosen:6} {regret:7.1%}"
        )
    lines.append(
        f"{right} of {len(regrets)} choices are the best measured; regret mean "
        f"{np.mean(regrets):.1%}, worst {max(regrets):.1%}"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="x86-64-v3")
    parser.add_argument("--cache", type=Path, default=Path("var/bench-cache/kernels"))
    parser.add_argument("--points", type=Path, help="write the measured points to this file")
    options = parser.parse_args()
    points = measure(options.target, options.cache)
    if options.points:
        rows = "\n".join(f"    {point}," for point in points)
        options.points.write_text(rows + "\n")
    print(compare(points))


if __name__ == "__main__":
    main()
