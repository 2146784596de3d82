"""Layouts of pruned weights and run-time checks: measured products, and the regret of a choice.

    python -m benchmarks.layouts [--check]      regret on shapes and densities the model never saw
    python -m benchmarks.layouts --points FILE  measure the points that the model is fitted to

A product is the LINEAR call of a plan on weights that are hot in the cache: quantising the
activations, the product, no Python. The layouts of one weight are measured in turns, in one run;
times are medians over the turns, in CPU time of the thread, so that neighbours disturb all alike.
The regret of a choice is how much longer it takes than the best measured.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.runner import Claim, main
from compiler.analysis.checks import checked_groups
from compiler.analysis.cost import ZeroCount, choose, count_zeros
from compiler.contract.native import NativePlan
from compiler.contract.plan_format import PANEL
from compiler.driver.native_check import host_target
from compiler.emitters.backends import build_kernels
from compiler.emitters.plan import emit_plan
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
    ("2:4 of panels", 0.5),
)
HELD_OUT_SHAPES = ((192, 320), (640, 384), (2048, 512), (768, 1536), (3000, 700))
HELD_OUT = (
    *(("tiles", density) for density in (0.55, 0.3, 0.12)),
    *(("blocks", density) for density in (0.35, 0.15, 0.06)),
    *(("elements", density) for density in (0.2, 0.08, 0.03, 0.01, 0.001)),
    *(("2:4", 0.5), ("1:16", 0.0625), ("8:16 of panels", 0.5)),
)
MOST_STORED = {CSR: 0.06, COO: 0.06, ELL: 0.6}
"""Shares of elements or blocks beyond which a layout is not fitted."""
ROWS = (1, 8)
CHECKED_SHAPES = ((256, 512), (1024, 1024))
CHECK_BARS: Final[Mapping[str, float]] = {"holds": 1.3, "at_bound": 0.97, "broken": 0.95}
CACHE: Final = Path(__file__).resolve().parents[1] / "var" / "bench-cache" / "kernels"
FITTED_TARGET: Final = "x86-64-v3"
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


def _of_panels(of: int) -> Callable[..., np.ndarray]:
    """Return a share of every `of` columns, alike in the 16 rows of a panel."""

    def pattern(random: np.random.Generator, n: int, k: int, density: float) -> np.ndarray:
        order = random.random((-(-n // PANEL), -(-k // of), of)).argsort(axis=2)
        live = (order < round(density * of)).reshape(len(order), -1)
        return np.repeat(live, PANEL, axis=0)[:n, :k]

    return pattern


PATTERNS: Mapping[str, Callable[..., np.ndarray]] = {
    "tiles": _blocks(16, 32),
    "blocks": _blocks(32, 4),
    "elements": _blocks(1, 1),
    "2:4": _of_m,
    "1:16": _of_m,
    "2:4 of panels": _of_panels(4),
    "8:16 of panels": _of_panels(16),
}


def pruned(pattern: str, n: int, k: int, density: float, seed: int) -> np.ndarray:
    """Return a normal weight (n, k) f32, zero where its pattern says so."""
    random = np.random.default_rng(seed)
    live = PATTERNS[pattern](random, n, k, density)
    return (random.standard_normal((n, k)) * live).astype(np.float32)


def linear_module(weight: np.ndarray, layout: str, rows: int, check: int = 0) -> Module:
    """Return a module of one LINEAR call on `rows` rows."""
    n, k = weight.shape
    buffers = (Buffer(0, rows, False, k, "f32"), Buffer(1, rows, False, n, "f32"))
    call = Call(Op.LINEAR, (0,), (1,), (0,), {"check": check})
    program = Program("run", (call,), {"x": 0}, {"y": 1})
    stored = Weight(0, "w4", weight, "weights.shared", layout)
    return Module((program,), buffers, (stored,), None, 1)


def _seconds(plan: NativePlan, calls: int, repeats: int) -> float:
    start = time.thread_time()
    for _ in range(repeats):
        plan.run_calls("run", None, 0, calls, 0)
    return (time.thread_time() - start) / repeats


def microseconds(kernels: bytes, modules: Mapping[str, Module], x: np.ndarray) -> dict[str, float]:
    """Return the median time of the only call of each module, measured in turns.

    The modules share one weight; those that are stored alike are measured once.
    """
    packed = pack_module(next(iter(modules.values()))).packed
    plans: dict[str, NativePlan] = {}
    samples: dict[str, list[float]] = {}
    stored = set()
    with ExitStack() as stack:
        for name, module in modules.items():
            emitted = emit_plan(module, weights_packed=packed)
            if emitted.plan_bytes in stored:
                continue
            stored.add(emitted.plan_bytes)
            plan = NativePlan(kernels, emitted.plan_bytes, emitted.sections)
            plans[name], samples[name] = stack.enter_context(plan), []
            plan.run("run", {"x": x})
        repeats = {
            name: max(1, round(SAMPLE_S / max(1e-7, _seconds(plan, 1, 3))))
            for name, plan in plans.items()
        }
        for _ in range(TURNS):
            for name, plan in plans.items():
                spent = _seconds(plan, 1, repeats[name]) - _seconds(plan, 0, repeats[name])
                samples[name].append(spent)
    return {name: 1e6 * statistics.median(spent) for name, spent in samples.items()}


def measure_layouts(
    kernels: bytes, shapes: Sequence[tuple[int, int]], patterns: Sequence[tuple[str, float]]
) -> Iterator[Measured]:
    """Measure every pattern on every shape, for every number of rows."""
    for at, (n, k) in enumerate(shapes):
        for pattern, density in patterns:
            weight = pruned(pattern, n, k, density, at)
            for rows in ROWS:
                modules = {name: linear_module(weight, name, rows) for name in W4_LAYOUTS}
                x = np.random.default_rng(0).standard_normal((rows, k)).astype(np.float32)
                times = microseconds(kernels, modules, x)
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


def regret_claims(found: Sequence[Measured]) -> list[Claim]:
    """Return the regret of the cost model's choices, and where each layout is the best measured."""
    chosen = [choose(item.count, (item.rows,)).layout for item in found]
    best = [min(item.times, key=lambda name: item.times[name]) for item in found]
    regrets = [
        item.times[ours] / item.times[theirs] - 1.0
        for item, ours, theirs in zip(found, chosen, best, strict=True)
    ]
    right = sum(regret == 0.0 for regret in regrets) / len(regrets)
    worst = found[int(np.argmax(regrets))]
    place = f"{worst.rows} x {worst.count.rows} x {worst.count.cols}, {worst.pattern}"
    claims = [
        _claim("layouts.choice.best", 100 * right, "%", right, 0.9, f"of {len(found)} products"),
        *(
            _claim(f"layouts.regret.{name}", 100 * regret, "%", 1 / (1 + regret), bar, note)
            for name, regret, bar, note in (
                ("median", statistics.median(regrets), None, ""),
                ("mean", statistics.mean(regrets), 0.95, ""),
                ("worst", max(regrets), None, f"{place} {worst.density:g}"),
            )
        ),
    ]
    for layout in W4_LAYOUTS:
        note = f"chosen for {chosen.count(layout)}"
        claims.append(
            _claim(f"layouts.{layout}.best", best.count(layout), "products", None, None, note)
        )
    return claims


def check_claims(kernels: bytes) -> list[Claim]:
    """Return what a run-time check saves where its claim holds, and costs where it does not."""
    claims = []
    for n, k in CHECKED_SHAPES:
        weight, groups = pruned("elements", n, k, 1.0, 0), k // 32
        most = checked_groups(k)
        for rows in ROWS:
            modules = {
                "dense": linear_module(weight, W4_LAYOUTS[0], rows),
                "checked": linear_module(weight, W4_LAYOUTS[0], rows, most),
            }
            for name, live in (("holds", groups // 2), ("at_bound", most), ("broken", groups)):
                x = np.random.default_rng(0).standard_normal((rows, k)).astype(np.float32)
                x[:, 32 * live :] = 0.0
                times = microseconds(kernels, modules, x)
                place, note = f"{rows}x{n}x{k}.{name}", f"{live} of {groups} groups live"
                ratio = times["dense"] / times["checked"]
                value, bar = times["checked"], CHECK_BARS[name]
                claims.append(
                    _claim(f"layouts.check.{place}", value, "us", ratio, bar, note, times["dense"])
                )
    return claims


def _claim(
    name: str,
    value: float,
    unit: str,
    ratio: float | None,
    bar: float | None,
    note: str,
    peer_value: float | None = None,
) -> Claim:
    peer = "best measured" if peer_value is None else "dense"
    return Claim(name, value, unit, peer, "", peer_value, ratio, bar, "host", note)


def measure() -> list[Claim]:
    """Measure the held-out products and the checks; return the claims."""
    target = host_target()
    if target is None:
        raise SystemExit("error: no target runs on this machine")
    kernels = build_kernels(find_target(FITTED_TARGET), [Op.LINEAR], CACHE)
    found = []
    for item in measure_layouts(kernels, HELD_OUT_SHAPES, HELD_OUT):
        found.append(item)
        times = "  ".join(f"{name} {spent:.1f}" for name, spent in item.times.items())
        where = f"{item.rows} x {item.count.rows} x {item.count.cols}"
        choice = choose(item.count, (item.rows,)).layout
        print(f"{where} {item.pattern} {item.density:g}: {choice}  ({times} us)", flush=True)
    return [*regret_claims(found), *check_claims(kernels)]


def write_points(path: Path) -> None:
    """Measure what the cost model is fitted to; write the rows of its table."""
    kernels = build_kernels(find_target(FITTED_TARGET), [Op.LINEAR], CACHE)
    found = points(measure_layouts(kernels, FITTED_SHAPES, FITTED))
    lines = "".join(f"    {point!r},\n" for point in found)
    path.write_text(lines.replace("'", '"'))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--points"]:
        write_points(Path(sys.argv[2]))
    else:
        sys.exit(main("layouts", measure, sys.argv[1:]))
