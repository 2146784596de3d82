"""Products measured under every variant of the policy, by the plan VM's own meters.

A product is one call of a plan on weights that are hot in the cache. Its plan runs under one table
per variant, in turns; a meter gives ticks per call without Python, and the machine's clock the
length of a tick. A time is the median over the turns, and the least of several passes over all
products: a slow spell of the machine lasts longer than one product. Each sample has the cores to
itself.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.priority import uninterrupted
from benchmarks.synthetic import SECTION, load, random_w4
from compiler.analysis.checks import checked_groups
from compiler.contract.native import NativePlan
from compiler.contract.native_policy import PublishedPolicy, readings_since
from compiler.contract.policy import CELLS, LEGAL, CallKind, Cell, Variant
from compiler.emitters.plan import emit_plan
from compiler.kernels.policy_model import Product
from compiler.kernels.program import (
    DENSE,
    TILES,
    Buffer,
    Call,
    ExpertAct,
    Module,
    Op,
    Program,
    Weight,
)

THREADS: Final = 2
TURNS: Final = 5
PASSES: Final = 4
SAMPLE_S: Final = 4e-4
MOST_REPEATS: Final = 64
GROUP: Final = 32
EXPERTS: Final = 4
TOP_K: Final = 2
SHAPES: Final = (
    *((64, 128), (128, 256), (256, 256), (512, 256), (256, 768), (512, 512)),
    *((1024, 512), (768, 1024), (2048, 1024), (4096, 1024)),
)
HELD_OUT: Final = ((96, 192), (384, 320), (320, 640), (896, 512), (1536, 768), (2560, 1024))
ROWS: Final = (1, 4, 16, 64)
DENSITIES: Final = (0.08, 0.2, 0.35, 0.6, 0.8)
LIVE: Final = (0.25, 0.5, 0.75, 0.85, 1.0)
Inputs = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Made:
    """A plan of one call, and what to run it with."""

    product: Product
    plan: NativePlan
    inputs: Inputs

    @property
    def runs(self) -> Callable[[], object]:
        return lambda: self.plan.run("run", {role: x.data for role, x in self.inputs.items()})


def _rows(rows: int, cols: int, live: float = 1.0) -> np.ndarray:
    x = np.random.default_rng(rows).standard_normal((rows, cols)).astype(np.float32)
    x[:, round(live * cols / GROUP) * GROUP :] = 0.0
    return x


def _shape_only(n: int, k: int) -> np.ndarray:
    return np.broadcast_to(np.float32(1.0), (n, k))


def linear(target: str, kind: CallKind, n: int, k: int, rows: int, density: float) -> Made:
    """Return one LINEAR call: dense, of live tiles, or with a check of that many live columns."""
    is_tiles = kind is CallKind.TILES
    packed = random_w4(n, k, 1, density if is_tiles else 1.0)
    buffers = (Buffer(0, rows, False, k, "f32"), Buffer(1, rows, False, n, "f32"))
    params = {"check": checked_groups(k)} if kind is CallKind.CHECKED else {}
    call = Call(Op.LINEAR, (0,), (1,), (0,), params)
    weight = Weight(0, "w4", _shape_only(n, k), SECTION, TILES if is_tiles else DENSE)
    module = Module((Program("run", (call,), {"x": 0}, {"y": 1}),), buffers, (weight,), None, 1)
    plan = load(target, emit_plan(module, weights_packed={0: packed}), (Op.LINEAR,), 1)
    if is_tiles:
        codes = np.frombuffer(packed.codes, np.uint8).reshape(-1, 256)
        density = float((codes != 0x88).any(axis=1).mean())
    live = density if kind is CallKind.CHECKED else 1.0
    return Made(Product(kind, rows, n, k, density), plan, {"x": _rows(rows, k, live)})


def linear_f32(target: str, n: int, k: int, rows: int) -> Made:
    """Return one LINEAR_F32 call."""
    array = np.random.default_rng(2).standard_normal((n, k)).astype(np.float32)
    buffers = (Buffer(0, rows, False, k, "f32"), Buffer(1, rows, False, n, "f32"))
    call = Call(Op.LINEAR_F32, (0,), (1,), (0,), {})
    weights = (Weight(0, "f32", array, SECTION),)
    module = Module((Program("run", (call,), {"x": 0}, {"y": 1}),), buffers, weights, None, 1)
    plan = load(target, emit_plan(module, weights_packed={}), (Op.LINEAR_F32,), 1)
    product = Product(CallKind.LINEAR_F32, rows, n, k, 1.0)
    return Made(product, plan, {"x": _rows(rows, k)})


def experts(target: str, hidden: int, width: int, rows: int) -> Made:
    """Return one EXPERTS call: 4 ReLU experts of (hidden, width), two a token."""
    shapes = [(hidden, width), (width, hidden)] * EXPERTS
    packed = {at: random_w4(*shape, at) for at, shape in enumerate(shapes)}
    weights = tuple(Weight(at, "w4", _shape_only(*s), SECTION) for at, s in enumerate(shapes))
    buffers = (
        Buffer(0, rows, False, width, "f32"),
        Buffer(1, rows, False, TOP_K, "i32"),
        Buffer(2, rows, False, TOP_K, "f32"),
        Buffer(3, rows, False, width, "f32"),
    )
    params = {"act": ExpertAct.RELU}
    call = Call(Op.EXPERTS, (0, 1, 2), (3,), tuple(range(len(shapes))), params)
    roles = {"x": 0, "index": 1, "gate": 2}
    module = Module((Program("run", (call,), roles, {"y": 3}),), buffers, weights, None, 1)
    plan = load(target, emit_plan(module, weights_packed=packed), (Op.EXPERTS,), 1)
    index = np.stack([np.random.default_rng(at).permutation(EXPERTS)[:TOP_K] for at in range(rows)])
    inputs = {
        "x": _rows(rows, width),
        "index": index.astype(np.int32),
        "gate": np.full((rows, TOP_K), 0.5, np.float32),
    }
    return Made(Product(CallKind.EXPERTS, rows, hidden, width, 1.0), plan, inputs)


def products(target: str, shapes: Iterable[tuple[int, int]]) -> Iterator[Made]:
    """Yield every product on these shapes, loaded on one thread; the caller closes the plans."""
    for n, k in shapes:
        for rows in ROWS:
            yield linear(target, CallKind.LINEAR, n, k, rows, 1.0)
            if n * k <= 1 << 20:
                yield experts(target, n, k, rows)
            if n * k <= 1 << 18:
                yield linear_f32(target, n, k, rows)
            for density in DENSITIES if rows in (1, 16) else ():
                yield linear(target, CallKind.TILES, n, k, rows, density)
            for live in LIVE if checked_groups(k) and rows in (1, 16) else ():
                yield linear(target, CallKind.CHECKED, n, k, rows, live)


def forced(variant: Variant) -> bytes:
    """Return a table with one variant wherever it is legal."""
    cells = map(Cell.at, range(CELLS))
    return bytes(variant if variant in LEGAL[cell.kind] else 0 for cell in cells)


def tick_us() -> float:
    """Return microseconds of a tick of the meters' clock, by a call of known length."""
    made = linear("x86-64-v1", CallKind.LINEAR, 4096, 1024, 16, 1.0)
    with made.plan as plan:
        table = plan.policy.publish(forced(Variant.ALONE))
        ratios = []
        for _ in range(9):
            before = sum(ticks for ticks, _ in table.readings().values())
            start = time.perf_counter()
            made.runs()
            spent = time.perf_counter() - start
            ticks = sum(ticks for ticks, _ in table.readings().values()) - before
            ratios.append(1e6 * spent / ticks)
    return min(ratios)


def measure(made: Made, us_per_tick: float) -> dict[Variant, float]:
    """Return the microseconds of the call under each variant, measured in turns."""
    kind, seat = made.product.kind, made.plan.policy
    made.plan.threads = THREADS
    tables = {variant: seat.publish(forced(variant)) for variant in LEGAL[kind]}
    samples: dict[Variant, list[float]] = {variant: [] for variant in tables}
    once = min(_ticks(made, next(iter(tables.values())), 1) for _ in range(3)) * us_per_tick
    repeats = min(MOST_REPEATS, max(3, round(1e6 * SAMPLE_S / max(once, 1.0))))
    for turn in range(TURNS):
        order = list(tables) if turn % 2 == 0 else list(tables)[::-1]
        for variant in order:
            samples[variant].append(_ticks(made, tables[variant], repeats) * us_per_tick)
    made.plan.threads = 1
    return {variant: statistics.median(found) for variant, found in samples.items()}


def measure_all(all_made: Sequence[Made], us_per_tick: float) -> list[dict[Variant, float]]:
    """Return the microseconds of every product under each variant, the least of all passes."""
    least: list[dict[Variant, float]] = [{} for _ in all_made]
    for _ in range(PASSES):
        for one, known in zip(all_made, least, strict=True):
            for variant, spent in measure(one, us_per_tick).items():
                known[variant] = min(spent, known.get(variant, spent))
    return least


def _ticks(made: Made, table: PublishedPolicy, repeats: int) -> float:
    """Return ticks per run, the first run not counted: it wakes the threads."""
    made.plan.policy.use(table)
    with uninterrupted():
        made.runs()
        before = table.readings()
        for _ in range(repeats):
            made.runs()
    counted = readings_since(before, table.readings())
    return sum(ticks for ticks, _ in counted.values()) / sum(runs for _, runs in counted.values())
