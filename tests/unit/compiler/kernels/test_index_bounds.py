"""Index checks: proved only where no run can fail them, and never an interval that a run leaves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compiler.contract.native_errors import NativeError
from compiler.contract.reference import MapKind, ReduceKind, ScatterKind, pack_geometry
from compiler.driver.sections import index_check_rows
from compiler.kernels import index_bounds
from compiler.kernels.index_bounds import (
    CHECKS,
    RESULTS,
    IndexCheck,
    Known,
    index_checks,
    known_values,
)
from compiler.kernels.intervals import FULL, I32_HIGH, I32_LOW, MAP_INTERVALS, Interval
from compiler.kernels.program import Call, Module, Op, Program, validate_module
from compiler.kernels.reference import MAPS
from compiler.simulator import Simulator
from compiler.simulator.reference_maps import MAPS as FUNCTIONS
from examples.edgecard.materialise import materialise
from tests.factories.modules import ModuleBuilder
from tests.factories.onnx_models import graph_document, write_submission
from tests.factories.onnx_runs import lowered

EXPORTS = Path(__file__).parents[4] / "examples" / "moe-exports"
LEAST_SHARE = 0.9
RANDOM_MODULES = 400
LEAST_BOUNDED, LEAST_PROVED = 1_000, 150


def shares(checks: Sequence[IndexCheck]) -> tuple[int, int]:
    internal = [check for check in checks if check.is_internal]
    return sum(check.is_proved for check in internal), len(internal)


@pytest.fixture(scope="module")
def edgecard(tmp_path_factory: pytest.TempPathFactory) -> Module:
    return lowered(materialise("v1", tmp_path_factory.mktemp("edgecard"))).module


def test_it_proves_what_the_model_itself_indexes(edgecard: Module) -> None:
    proved, internal = shares(index_checks(edgecard))
    assert internal >= 10
    assert proved >= LEAST_SHARE * internal


def test_it_keeps_every_check_of_what_a_caller_passes(edgecard: Module) -> None:
    external = [check for check in index_checks(edgecard) if not check.is_internal]
    assert {check.what for check in external} == {"token id", "position"}
    assert not any(check.is_proved for check in external)


@pytest.mark.parametrize(
    "name", ["exp_mixtral_eager_ts", "exp_deepseek_v3_batched_mm_dynamo", "exp_phimoe_eager_ts"]
)
def test_it_proves_the_experts_of_exported_blocks(name: str, tmp_path: Path) -> None:
    model = onnx.load(EXPORTS / f"{name}.onnx")
    directory = write_submission(tmp_path, {"model": model}, graph_document(model))
    proved, internal = shares(index_checks(lowered(directory).module))
    assert internal >= 1
    assert proved >= LEAST_SHARE * internal


def test_it_reports_each_check_with_its_chain(edgecard: Module) -> None:
    rows = index_check_rows(edgecard)
    assert (rows["internal"], rows["external"]) == (11, 5)
    found = rows["checks"]
    assert isinstance(found, dict)
    assert found["see#28.position"] == {
        "verdict": "proved, check kept as defence",
        "reason": "[0, 63] lies in [0, 319]",
        "required": [0, 319],
        "chain": ["#24 PRUNE", "#28 ATTENTION"],
    }
    assert found["step#0.token_id"]["reason"] == "comes from input token_ids"  # type: ignore[call-overload, index]


def routed(experts: int, *, router: int = 4, k: int = 2) -> Module:
    b = ModuleBuilder()
    x, y = b.buffer(None, 8), b.buffer(None, 8)
    index, gate = b.buffer(None, k, "i32"), b.buffer(None, k)
    b.call(Op.ROUTE, [x], [index, gate], [b.weight(b.normal(router, 8))], k=k, order=0)
    weights = [w for e in range(experts) for w in (b.w4(8, 8, f"expert.L0.E{e}"), b.w4(8, 8))]
    b.call(Op.EXPERTS, [x, index, gate], [y], weights, act=0)
    b.program("run", {"x": x}, {"y": y})
    return b.module()


def chosen_row(table: int, *, scores: int = 6) -> Module:
    """The best of some scores names a row of a table."""
    b = ModuleBuilder()
    x, best, y = b.buffer(1, scores), b.buffer(1, 1, "i32"), b.buffer(1, 4)
    b.call(Op.ARGMAX, [x], [best])
    b.call(Op.EMBED, [best], [y], [b.weight(b.normal(table, 4))])
    b.program("run", {"x": x}, {"y": y})
    return b.module()


def kept_rows(*, positions: int = 12, from_port: bool = False) -> Module:
    """Rows of 12 are kept, in two parts, and rotated by the positions they had."""
    b = ModuleBuilder()
    x, score = b.buffer(12, 8), b.buffer(12, 1)
    kept, index, last = b.buffer(5, 8), b.buffer(5, 1, "i32"), b.buffer(3, 1, "i32")
    port, rows, y = b.buffer(3, 1, "i32"), b.buffer(3, 8), b.buffer(3, 8)
    table = b.weight(b.normal(positions, 2))
    b.call(Op.PRUNE, [x, score], [kept, index], k=5)
    b.call(Op.ROWS_SLICE, [index], [last], start=2, count=3)
    b.call(Op.GATHER_ROWS, [x, last], [rows])
    b.call(Op.ROPE, [rows, port if from_port else last], [y], [table, table], heads=2)
    ports = {"x": x, "score": score, **({"at": port} if from_port else {})}
    b.program("run", ports, {"y": y})
    return b.module()


@pytest.mark.parametrize(
    ("module", "proved"),
    [
        (routed(4), [True]),
        (routed(5), [True]),
        (routed(3), [False]),
        (routed(4, router=5), [False]),
        (chosen_row(6), [True]),
        (chosen_row(5), [False]),
        (chosen_row(6, scores=7), [False]),
        (kept_rows(), [True, True]),
        (kept_rows(positions=11), [True, False]),
        (kept_rows(from_port=True), [True, False]),
    ],
)
def test_it_proves_a_check_only_if_the_producer_bounds_it(
    module: Module, proved: list[bool]
) -> None:
    validate_module(module)
    assert [check.is_proved for check in index_checks(module)] == proved


def test_it_claims_nothing_of_a_router_that_takes_more_experts_than_it_has() -> None:
    module = routed(4)
    route, experts = module.programs[0].calls
    greedy = replace(route, params={**route.params, "k": 5})
    program = replace(module.programs[0], calls=(greedy, experts))
    (check,) = index_checks(replace(module, programs=(program,)))
    assert check.known.interval == FULL
    assert not check.is_proved


def test_rows_of_a_dynamic_operand_are_at_least_one() -> None:
    b = ModuleBuilder()
    x, scores, best, y = b.buffer(None, 4), b.buffer(1, 3), b.buffer(1, 1, "i32"), b.buffer(1, 4)
    b.call(Op.ARGMAX, [scores], [best])
    b.call(Op.GATHER_ROWS, [x, best], [y])
    b.program("run", {"x": x, "scores": scores}, {"y": y})
    (check,) = index_checks(b.module())
    assert check.required == Interval(0, 0)
    assert not check.is_proved


def test_an_element_that_nothing_writes_may_be_anything() -> None:
    b = ModuleBuilder()
    x, y = b.buffer(1, 3, "i32"), b.buffer(1, 4, "i32")
    fields = {"x": -1, "x_at": 0, "y_at": 0, "sizes": [3], "x_steps": [1], "y_steps": [1]}
    rows = np.array([pack_geometry("REF_MOVE", fields)], np.int32)  # type: ignore[arg-type]
    constant = b.weight(np.arange(3, dtype=np.int32)[None], "i32")
    b.call(Op.REF_MOVE, [x], [y], [b.weight(rows, "i32"), constant])
    b.program("run", {"x": x}, {"y": y})
    module = b.module()
    assert known_values(module, module.programs[0])[y].interval == FULL
    call = replace(module.programs[0].calls[0], params={"fill": 1, "value": -5})
    filled = replace(module.programs[0], calls=(call,))
    assert known_values(module, filled)[y].interval == Interval(-5, 2)


EDGES = [I32_LOW, I32_LOW + 1, -300, -128, -7, -3, -1, 0, 1, 2, 5, 127, 255, 1 << 20, I32_HIGH]


@pytest.mark.parametrize("kind", sorted(MAP_INTERVALS))
def test_every_function_stays_in_its_interval(kind: MapKind) -> None:
    random = np.random.default_rng(int(kind))
    takes = MAPS[kind].takes
    for _ in range(300):
        ends = [Interval(*sorted(int(e) for e in random.choice(EDGES, 2))) for _ in takes]
        inside = [
            np.append(random.integers(low, high + 1, 60), [low, high, low]) for low, high in ends
        ]
        mixed = [random.permutation(values) for values in inside]
        arrays = [
            values.astype(np.int32 if t == "i" else np.float32)
            for values, t in zip(mixed, takes, strict=True)
        ]
        with np.errstate(all="ignore"):
            y = FUNCTIONS[kind](*arrays, 0.0, 0.0).astype(np.int64)
        low, high = MAP_INTERVALS[kind](*ends)
        assert low <= y.min()
        assert y.max() <= high


class Growing:
    """A program over i32 rows of one width, grown call by call."""

    def __init__(self, seed: int) -> None:
        self.b = ModuleBuilder(seed)
        self.rng = np.random.default_rng(seed)
        self.width = int(self.rng.integers(2, 6))
        self.x = self.b.buffer(1, self.width)
        self.port = self.b.buffer(1, self.width, "i32")
        self.pool = [self.port]

    def pick(self) -> int:
        return int(self.rng.choice(self.pool[-4:]))

    def new(self, cols: int | None = None, dtype: str = "i32") -> int:
        return self.b.buffer(1, cols or self.width, dtype)

    def constant(self) -> int:
        """Add an i32 row; return its number."""
        low = int(self.rng.integers(-6, 3))
        row = self.rng.integers(low, low + int(self.rng.integers(1, 9)), (1, self.width))
        return self.b.weight(row.astype(np.int32), "i32")

    def reference(
        self, op: Op, inputs: list[int], outputs: list[int], more: list[int], fields: dict, **params
    ) -> None:
        row = np.array([pack_geometry(op.name, fields)], np.int32)
        self.b.call(op, inputs, outputs, [self.b.weight(row, "i32"), *more], **params)
        self.pool += [at for at in outputs if self.b.buffers[at].dtype == "i32"]

    def line(self, name: str, source: int) -> dict[str, int | list[int]]:
        return {name: source, f"{name}_at": 0, f"{name}_steps": [1]}


def _best(g: Growing) -> None:
    """Ranks of the f32 port: places among its elements."""
    values, places = g.new(dtype="f32"), g.new()
    fields = {"x": 0, "outer": 1, "n": g.width, "inner": 1, "k": g.width}
    g.reference(Op.REF_TOPK, [g.x], [values, places], [], fields)


def _ranked(g: Growing) -> None:
    fields = {"x": 0, "outer": 1, "n": g.width, "inner": 1, "k": g.width}
    largest = int(g.rng.integers(2))
    g.reference(Op.REF_TOPK, [g.pick()], [g.new(), g.new()], [], fields, largest=largest)


def _mapped(g: Growing) -> None:
    kinds = [k for k in MAP_INTERVALS if set(MAPS[k].takes) == {"i"}]
    kind = kinds[int(g.rng.integers(len(kinds)))]
    fields: dict = {"sizes": [g.width], **g.line("b", 0), **g.line("c", 0)}
    inputs, more = [], []
    for name in "abc"[: len(MAPS[kind].takes)]:
        if g.rng.random() < 0.5:
            inputs.append(g.pick())
            fields |= g.line(name, len(inputs) - 1)
        else:
            more.append(g.constant())
            fields |= g.line(name, -len(more))
    g.reference(Op.REF_MAP, inputs or [g.pick()], [g.new()], more, fields, kind=int(kind))


def _reduced(g: Growing) -> None:
    kind = int(g.rng.choice([int(k) for k in ReduceKind if k.name not in ("L1", "L2")]))
    fields = {
        "x": 0,
        "x_at": 0,
        "sizes": [g.width],
        "x_steps": [0],
        "inner": [g.width],
        "inner_steps": [1],
    }
    g.reference(Op.REF_REDUCE, [g.pick()], [g.new()], [], fields, kind=kind)


def _moved(g: Growing) -> None:
    size = int(g.rng.integers(1, g.width + 1))
    at = int(g.rng.integers(g.width - size + 1))
    fields = {"x": 0, "x_at": 0, "y_at": at, "sizes": [size], "x_steps": [1], "y_steps": [1]}
    value = int(g.rng.integers(-4, 5))
    g.reference(Op.REF_MOVE, [g.pick()], [g.new()], [], fields, fill=1, value=value)


def _gathered(g: Growing) -> None:
    fields: dict = {
        "x": 0,
        "index": 1,
        "limit": g.width,
        "step": 1,
        "x_at": 0,
        "i_at": 0,
        "sizes": [g.width],
        "x_steps": [0],
        "i_steps": [1],
    }
    g.reference(Op.REF_GATHER, [g.pick(), g.pick()], [g.new()], [], fields)


def _scattered(g: Growing) -> None:
    fields: dict = {
        "x": 0,
        "index": 1,
        "u": 2,
        "limit": g.width,
        "step": 1,
        "y_at": 0,
        "i_at": 0,
        "u_at": 0,
        "sizes": [g.width],
        "y_steps": [0],
        "i_steps": [1],
        "u_steps": [1],
    }
    kind = int(g.rng.choice([int(k) for k in ScatterKind]))
    inputs = [g.pick(), g.pick(), g.pick()]
    g.reference(Op.REF_SCATTER, inputs, [g.new()], [], fields, kind=kind)


def _scanned(g: Growing) -> None:
    fields = {"x": 0, "outer": 1, "n": g.width, "inner": 1}
    flags = {name: int(g.rng.integers(2)) for name in ("exclusive", "reverse")}
    g.reference(Op.REF_SCAN, [g.pick()], [g.new()], [], fields, **flags)


def _joined(g: Growing) -> None:
    both, y = g.new(2 * g.width), g.new()
    g.b.call(Op.COLS_CONCAT, [g.pick(), g.pick()], [both])
    g.b.call(Op.COLS_SLICE, [both], [y], start=int(g.rng.integers(g.width)), count=g.width)
    g.pool.append(y)


GROWTHS: Sequence[Callable[[Growing], None]] = (
    *(_best, _ranked, _mapped, _mapped, _mapped, _reduced, _moved, _gathered, _scattered),
    *(_scanned, _joined),
)


def random_module(seed: int) -> Module:
    growing = Growing(seed)
    _best(growing)
    for _ in range(10):
        GROWTHS[int(growing.rng.integers(len(GROWTHS)))](growing)
    ports = {"x": growing.x, "port": growing.port}
    growing.b.program("run", ports, {"y": growing.pool[-1]})
    return growing.b.module()


class Watch:
    """Compares every i32 value of a run with its interval, and every check with its verdict."""

    def __init__(self, module: Module) -> None:
        program: Program = module.programs[0]
        self.calls = {id(call): at for at, call in enumerate(program.calls)}
        self.known = known_values(module, program)
        self.checks = {check.call: check for check in index_checks(module)}
        self.bounded = self.finished = 0
        self.outside: list[str] = []

    def product(self, weight: int, x: np.ndarray) -> None:
        """Not of interest."""

    def ran(self) -> None:
        """Not of interest."""

    def call(
        self,
        program: str,
        call: Call,
        inputs: object,
        outputs: Sequence[np.ndarray],
        runs: object = None,
    ) -> None:
        self.finished = self.calls[id(call)] + 1
        for at, array in zip(call.outputs, outputs, strict=True):
            if at not in self.known:
                continue
            low, high = self.known[at].interval
            self.bounded += not self.known[at].interval.is_full
            if array.min() < low or array.max() > high:
                self.outside.append(f"{call.op.name}: {array} outside [{low}, {high}]")


def check_random_modules(seeds: range) -> tuple[int, int]:
    """Return how many values had an interval and how many checks were proved, all of them run."""
    bounded = proved = 0
    for seed in seeds:
        module = random_module(seed)
        rng = np.random.default_rng([seed, 1])
        for spread in (3, 1 << 31):
            watch = Watch(module)
            port = rng.integers(-spread, spread, module.buffers[1].cols, np.int64)
            x = rng.standard_normal((1, module.buffers[0].cols)).astype(np.float32)
            try:
                inputs = {"x": x, "port": port[None].astype(np.int32)}
                Simulator(module, {}, observer=watch).run_arrays("run", inputs)
            except NativeError:
                failed = watch.checks[watch.finished]
                assert not failed.is_proved, (seed, failed)
            assert watch.outside == [], seed
            bounded += watch.bounded
            proved += sum(c.is_proved for c in watch.checks.values() if c.call < watch.finished)
    return bounded, proved


def test_no_run_of_a_random_module_leaves_an_interval_or_fails_a_proved_check() -> None:
    bounded, proved = check_random_modules(range(RANDOM_MODULES))
    assert bounded >= LEAST_BOUNDED
    assert proved >= LEAST_PROVED


def _first_source(s: Any) -> list[Known]:
    return [s.source(s.geometry()[0]["x"][0])]


MUTANTS: Mapping[Op, Callable[[Any], list[Known]]] = {
    Op.REF_TOPK: lambda s: [*_first_source(s), Known(Interval(0, s.geometry()[0]["n"][0] - 2))],
    Op.REF_SCAN: _first_source,
    Op.REF_REDUCE: _first_source,
    Op.REF_SCATTER: _first_source,
    Op.REF_MOVE: _first_source,
    Op.REF_GATHER: lambda s: [Known(Interval(0, 2))],
    Op.REF_MAP: lambda s: [Known(Interval(0, 1))],
    Op.COLS_CONCAT: lambda s: [s.input(0)],
}


@pytest.mark.parametrize("op", MUTANTS)
def test_random_modules_catch_a_wrong_rule(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_bounds, "RESULTS", {**RESULTS, op: MUTANTS[op]})
    with pytest.raises(AssertionError):
        check_random_modules(range(RANDOM_MODULES))


def test_every_kernel_that_can_refuse_an_index_has_a_row() -> None:
    templates = Path(__file__).parents[4] / "compiler" / "kernels" / "templates"
    refusing = sum(
        path.read_text().count("return SF_Status_BAD_INDEX")
        + path.read_text().count("return SF_Status_BAD_TOKEN")
        + path.read_text().count("return SF_Status_BAD_POSITION")
        for path in templates.glob("*.c.in")
    )
    # EXPERTS and MOE_LAYER share one check; REF_RESAMPLE refuses with BAD_PLAN.
    assert refusing == len(CHECKS) - 2
    assert set(RESULTS) >= {Op.ROUTE, Op.MOE_LAYER, Op.ARGMAX, Op.PRUNE, Op.PRUNE_TOP_P}
