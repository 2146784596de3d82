"""OpenCL kernels on PoCL: the bits of the simulator and of native code, run after run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from compiler.contract.native_errors import (
    BadIndexError,
    BadPositionError,
    BadTokenError,
    ContextFullError,
    NativeError,
    NotFiniteError,
    TooManyTokensError,
    UnsupportedPlanError,
)
from compiler.emitters.opencl.device import Launch
from compiler.emitters.opencl.runner import OpenClPlan
from compiler.emitters.runner import ScriptRun, play
from compiler.emitters.tiles import live_mask
from compiler.kernels.program import DENSE, NM, TILES, Module, Op
from compiler.quant.row_codes import I8
from tests.factories.checked_kernels import outcome
from tests.factories.graph_runs import FORWARD, GraphCase
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.legal_calls import draw
from tests.factories.modules import small_decoder
from tests.factories.opencl import EMITTER, device, load
from tests.integration.test_native_emulated import IMAGE, runner, step
from tests.integration.test_native_images import written
from tests.integration.test_native_kv_codes import SHAPES, STEP, attention, rows
from tests.integration.test_native_nm import linear as nm_linear
from tests.integration.test_native_nm import shared
from tests.integration.test_native_ops import CASES, MAX_TOKENS, OpCase
from tests.integration.test_native_schedule import fused
from tests.integration.test_native_tiles import experts, inputs, linear
from tests.integration.test_native_w8 import coded

pytestmark = pytest.mark.opencl
DRAWS = 6
OFFERED = [case for case in CASES if case.op in EMITTER.capabilities()]
SPARSE = {
    "dense": lambda: linear(DENSE),
    "tiles": lambda: linear(TILES),
    "half of the columns": lambda: nm_linear(NM, shared(90, 203)),
    "codes": lambda: coded(Op.LINEAR_F32, 33, 203, I8),
    "experts of tiles": lambda: experts(TILES),
    "MoE layer": fused,
}


def tile_launches(module: Module, tokens: int) -> list[Launch]:
    """Return the launches over tiles that one run makes."""
    plan = load(Case.of(module))
    with observed() as launches:
        plan.run("run", inputs(module, tokens))
    return [launch for launch in launches if launch.kernel == "run_tiles"]


@contextmanager
def observed() -> Iterator[list[Launch]]:
    """Collect the launches of the block."""
    found: list[Launch] = []
    device().observer = found.append
    try:
        yield found
    finally:
        device().observer = None


@pytest.mark.parametrize("name", SHAPES)
def test_a_cache_of_codes_gives_the_bits_of_the_simulator(name: str) -> None:
    """Also where a window lets the cache wrap around."""
    shape = SHAPES[name]
    case = Case.of(attention(shape))
    simulator, plan = case.simulator(), load(case)
    length = shape[3] + (60 if shape[4] else 0)
    for at, start in enumerate(range(0, length, STEP)):
        values = rows(shape, min(STEP, length - start), at)
        assert raw(plan.run("run", values)) == raw(simulator.run("run", values))
    assert plan.kv_length == simulator.kv_length == length


def test_a_cache_of_codes_takes_no_key_or_value_that_is_no_number() -> None:
    plan = load(Case.of(attention(SHAPES["groups"])))
    for role in ("x1", "x2"):
        values = rows(SHAPES["groups"], 2, 1)
        values[role][1, 3] = np.inf
        with pytest.raises(NotFiniteError):
            plan.run("run", values)
    assert plan.kv_length == 0


@pytest.mark.parametrize("case", OFFERED, ids=lambda case: case.name)
def test_it_gives_the_bits_of_the_simulator(case: OpCase) -> None:
    built = Case.of(case.module())
    simulator, plan = built.simulator(), load(built)
    for run, tokens in enumerate((1, 5, MAX_TOKENS)):
        values = case.values(tokens, run)
        expected = raw(simulator.run("run", values))
        assert raw(plan.run("run", values)) == expected
        assert all(np.isfinite(np.frombuffer(v, "<f4")).all() for v in expected.values())
        assert plan.kv_length == simulator.kv_length


@pytest.mark.parametrize("op", sorted(EMITTER.capabilities()), ids=lambda op: op.name)
def test_random_legal_calls_give_the_outcome_of_the_simulator(op: Op) -> None:
    """The same bits, or the same error, for calls that nobody thought of."""
    for seed in range(DRAWS):
        drawn = draw(op, seed)
        case = Case.of(drawn.module)
        values = drawn.values(drawn.module.max_tokens, seed)
        if op is not Op.LINEAR_W8 and any(w.kind == "w8" for w in drawn.module.weights):
            with pytest.raises(UnsupportedPlanError, match="no kernel for weights W8"):
                load(case).run("run", values)
            continue
        expected = outcome(case.simulator().run, "run", values)
        assert outcome(load(case).run, "run", values) == expected, seed


@pytest.mark.parametrize("name", SPARSE)
def test_every_back_end_gives_the_same_bits(name: str) -> None:
    case = Case.of(SPARSE[name]())
    values = inputs(case.module, 5)
    expected = raw(case.simulator().run("run", values))
    emitted = case.emitted
    script = [ScriptRun("run", {role: array.tobytes() for role, array in values.items()})]
    found = {}
    for target in native_targets():
        with case.native(target) as native:
            found[target] = raw(native.run("run", values))
    for target in ("aarch64", "aarch64-dotprod", "riscv64"):
        (found[target],) = play(*runner(target), emitted.plan_bytes, emitted.sections, script)
    for run in range(2):
        found[f"opencl, run {run}"] = raw(load(case).run("run", values))
    assert len(found) >= 5
    assert {target for target, outputs in found.items() if outputs != expected} == set()


@pytest.mark.parametrize("swiglu", [False, True], ids=["relu", "swiglu"])
def test_it_runs_a_whole_decoder_with_pictures_and_a_cache(swiglu: bool) -> None:
    case = Case.of(small_decoder(4, swiglu=swiglu))
    simulator, plan = case.simulator(), load(case)
    for run in (
        ScriptRun("see", {"image": IMAGE}),
        step([1, 2, 3, 4, 5], 20),
        step([6], 25),
        step([7, 8, 9], 22, keep=8),
    ):
        for runs in (simulator, plan):
            runs.kv_length = run.keep if run.keep is not None else runs.kv_length
        assert raw(plan.run(run.program, run.inputs)) == raw(simulator.run(run.program, run.inputs))
        assert plan.kv_length == simulator.kv_length


def seen(folder: Path) -> GraphCase:
    """Write and compile a small network of images: fast kernels, and plain ones between them."""
    rng = np.random.default_rng(11)
    weights = {
        "w1": rng.normal(0, 0.3, (12, 3, 3, 3)),
        "w2": rng.normal(0, 0.3, (12, 1, 3, 3)),
        "w3": rng.normal(0, 0.3, (12, 6, 2, 2)),
        "w4": rng.normal(0, 0.3, (7, 12)),
    }
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w1"], ["c1"], pads=[1] * 4),
        node("HardSwish", ["c1"], ["h1"]),
        node("MaxPool", ["h1"], ["m1"], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4),
        node("Conv", ["m1", "w2"], ["c2"], group=12, pads=[1] * 4),
        node("ConvTranspose", ["c2", "w3"], ["c3"], group=2, strides=[2, 2]),
        node("Softplus", ["c3"], ["h3"]),
        node("GlobalAveragePool", ["h3"], ["g"]),
        node("Flatten", ["g"], ["f"]),
        node("Gemm", ["f", "w4"], ["l"], transB=1),
        node("TopK", ["l", "k"], ["best", "at"], largest=1),
        node("Cast", ["at"], ["places"], to=onnx.TensorProto.FLOAT),
        node("Concat", ["best", "places"], ["y"], axis=1),
    ]
    nodes.insert(0, node("Constant", [], ["k"], value_ints=[3]))
    path = written(folder / "seen.onnx", nodes, weights, [2, 3, 10, 12], [2, 6])
    return GraphCase.of(path, folder / "out")


def test_a_network_of_images_gives_the_bits_of_the_simulator(tmp_path: Path) -> None:
    case = seen(tmp_path)
    assert {"CONV2D", "CONV_DEPTHWISE", "REF_CONV_TRANSPOSE", "REF_POOL"} <= case.operations
    assert {"REF_MAP", "REF_REDUCE", "REF_TOPK", "REF_MOVE"} <= case.operations
    x = np.random.default_rng(5).standard_normal((2, 3, 10, 12)).astype(np.float32)
    feeds = case.feeds({"x": x})
    assert raw(load(case.case).run(FORWARD, feeds)) == case.simulated(feeds)


@pytest.mark.parametrize("layout", [DENSE, TILES])
@pytest.mark.parametrize("density", [0.9, 0.4, 0.1])
def test_it_launches_live_tiles_only(layout: str, density: float) -> None:
    module = linear(layout, density=density)
    live = int(live_mask(Case.of(module).packed.packed[0]).sum())
    assert 0 < live < 6 * 7
    (launch,) = tile_launches(module, 1)
    assert (launch.size, launch.group) == ((16, live), (16, 1))


def test_it_launches_no_tile_of_an_expert_that_no_row_chose() -> None:
    module = experts(TILES)
    packed = Case.of(module).packed.packed
    chosen = set(inputs(module, 1)["index"].ravel().tolist())
    assert len(chosen) == 2
    launches = tile_launches(module, 1)
    for at, launch in enumerate(launches):
        live = sum(int(live_mask(packed[2 * expert + at]).sum()) for expert in chosen)
        assert launch.size == (16, live)
    assert len(launches) == 2


def test_it_takes_local_memory_by_density() -> None:
    sizes = {
        density: tile_launches(linear(TILES, density=density), MAX_TOKENS)[0].local_bytes
        for density in (0.9, 0.4, 0.05)
    }
    assert sizes == {0.9: 8 * 32, 0.4: 4 * 32, 0.05: 2 * 32}


def fill(plan: OpenClPlan) -> None:
    for _ in range(100):
        plan.run("step", step([1, 2, 3, 4], 0).inputs)


def test_it_raises_what_native_code_raises() -> None:
    plan = load(Case.of(small_decoder(4, see=False)))
    for tokens, first, error in (
        ([999], 0, BadTokenError),
        ([1], 999, BadPositionError),
        ([1] * 99, 0, TooManyTokensError),
    ):
        with pytest.raises(error):
            plan.run("step", step(tokens, first).inputs)
    assert plan.kv_length == 0
    with pytest.raises(ContextFullError):
        fill(plan)
    with pytest.raises(NativeError, match="no program"):
        plan.run("sleep", {})
    with pytest.raises(NativeError, match="inputs must be"):
        plan.run("step", {})
    with pytest.raises(NativeError, match="cannot set the cache"):
        plan.kv_length = plan.kv_length + 1


def test_it_refuses_by_name_a_kind_of_weight_that_it_lacks() -> None:
    module = linear(TILES)
    frame = load(Case.of(module))._frame
    frame.weights.tiles.clear()
    with pytest.raises(UnsupportedPlanError, match="no kernel for weights W4_TILES"):
        frame.tiles(0)


def test_it_refuses_what_is_not_finite_and_what_points_nowhere() -> None:
    module = experts(TILES)
    plan, values = load(Case.of(module)), inputs(module, 2)
    values["x"][1, 3] = np.inf
    with pytest.raises(NotFiniteError):
        plan.run("run", values)
    values = inputs(module, 2)
    values["index"] = values["index"] + 3
    with pytest.raises(BadIndexError):
        plan.run("run", values)
    values = inputs(module, 2)
    assert raw(plan.run("run", values)) == raw(Case.of(module).simulator().run("run", values))
