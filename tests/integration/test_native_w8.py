"""Products with weights of eight bits: the same bits everywhere, and no trust in bytes."""

from dataclasses import replace

import numpy as np
import pytest

from compiler.contract.native_errors import NativeError
from compiler.contract.plan import PlanError, parse_plan
from compiler.contract.plan_format import Kind, weight_bytes
from compiler.driver.bundle_simulator import BundleSimulator
from compiler.emitters.runner import ScriptRun, play
from compiler.kernels.program import DENSE, ExpertAct, Module, Op, ProgramError, validate_module
from compiler.quant.row_codes import I8
from tests.factories.kernels import Case, ids, native_targets, raw
from tests.factories.modules import ModuleBuilder
from tests.factories.w8 import product, routed
from tests.integration.test_native_emulated import RUNS, runner

ROWS = (1, 2, 3, 4, 7, 12, 13, 29)
"""Blocks of every size, and what is left of them."""
EXPERT_KINDS = (("w8", "w8"), ("w4", "w8"), ("w8", "w4"))
SHAPES = ((1, 1), (16, 32), (33, 40), (70, 300))


def rows_of(module: Module, rows: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(rows)
    cols = module.buffers[0].cols
    return {"x": random.standard_normal((rows, cols)).astype(np.float32)}


@pytest.mark.parametrize("target", native_targets())
@pytest.mark.parametrize("shape", SHAPES)
def test_it_gives_the_bits_of_the_simulator(shape: tuple[int, int], target: str) -> None:
    case = Case.of(product(*shape, None, max(ROWS)))
    bundle = BundleSimulator({**case.emitted.sections, "plan": case.emitted.plan_bytes})
    with case.native(target) as plan:
        for rows in ROWS:
            values = rows_of(case.module, rows)
            expected = raw(case.simulator().run("run", values))
            assert raw(plan.run("run", values)) == expected
            assert raw(bundle.run("run", values)) == expected


@pytest.mark.parametrize("name", RUNS)
def test_every_other_machine_gives_the_same_bits(name: str) -> None:
    built, emulator = runner(name)
    for shape in SHAPES:
        case = Case.of(product(*shape, None, max(ROWS)))
        values = [rows_of(case.module, rows) for rows in ROWS]
        runs = [ScriptRun("run", {"x": one["x"].tobytes()}) for one in values]
        found = play(built, emulator, case.emitted.plan_bytes, case.emitted.sections, runs)
        simulator = case.simulator()
        assert found == [raw(simulator.run("run", one)) for one in values]


@pytest.mark.parametrize("target", native_targets())
@pytest.mark.parametrize("whole", [False, True], ids=["experts", "layer"])
@pytest.mark.parametrize("act", [ExpertAct.RELU, ExpertAct.SWIGLU, ExpertAct.REGLU])
@pytest.mark.parametrize("kinds", EXPERT_KINDS, ids="-".join)
def test_experts_give_the_bits_of_the_simulator(
    kinds: tuple[str, str], act: ExpertAct, whole: bool, target: str
) -> None:
    case = Case.of(routed(kinds, act, whole=whole))
    stored = {case.module.weights[at].kind for at in case.module.programs[0].calls[-1].weights[-2:]}
    assert stored == set(kinds)
    bundle = BundleSimulator({**case.emitted.sections, "plan": case.emitted.plan_bytes})
    with case.native(target) as plan:
        for rows in (1, 2, 5, 16):
            values = rows_of(case.module, rows)
            expected = raw(case.simulator().run("run", values))
            assert raw(plan.run("run", values)) == expected
            assert raw(bundle.run("run", values)) == expected


@pytest.mark.parametrize("name", RUNS)
def test_experts_give_the_same_bits_on_every_other_machine(name: str) -> None:
    built, emulator = runner(name)
    for whole in (False, True):
        case = Case.of(routed(("w8", "w8"), ExpertAct.SWIGLU, whole=whole))
        values = [rows_of(case.module, rows) for rows in (1, 16)]
        runs = [ScriptRun("run", {"x": one["x"].tobytes()}) for one in values]
        found = play(built, emulator, case.emitted.plan_bytes, case.emitted.sections, runs)
        simulator = case.simulator()
        assert found == [raw(simulator.run("run", one)) for one in values]


def test_experts_are_stored_alike() -> None:
    module = routed(("w8", "w8"), ExpertAct.RELU, whole=False)
    weights = list(module.weights)
    weights[-1] = replace(weights[-1], kind="w4")
    with pytest.raises(ProgramError, match="expert 3 differs in shape from expert 0"):
        validate_module(replace(module, weights=tuple(weights)))


@pytest.mark.parametrize("target", native_targets())
def test_the_widest_sums_are_exact(target: str) -> None:
    module = product(16, 8192, 1)
    codes = np.full((16, 8192), 255.0, np.float32)
    codes[8:] = -255.0
    module.weights[0].array[:] = codes
    case = Case.of(module)
    values = {"x": np.ones((1, 8192), np.float32)}
    expected = raw(case.simulator().run("run", values))
    with case.native(target) as plan:
        assert raw(plan.run("run", values)) == expected
    found = np.frombuffer(expected["y"], "<f4") - module.weights[1].array
    assert found == pytest.approx(np.repeat([255.0 * 8192, -255.0 * 8192], 8), rel=1e-6)


def test_it_takes_a_quarter_of_the_bytes() -> None:
    plan = parse_plan(Case.of(product(64, 320, 1)).emitted.plan_bytes)
    assert plan.weights[0].kind is Kind.W8
    assert plan.weights[0].length == 64 * 320 + 64 * 4 + 64


def test_the_device_refuses_another_length() -> None:
    plan_bytes = Case.of(product(33, 40, 1)).emitted.plan_bytes
    length = weight_bytes(Kind.W8, 33, 40)
    wrong = plan_bytes.replace(length.to_bytes(8, "little"), (length - 16).to_bytes(8, "little"))
    with pytest.raises(PlanError, match=f"takes {length} bytes, not {length - 16}"):
        parse_plan(wrong)


def test_the_runtime_refuses_a_section_that_is_too_small() -> None:
    case = Case.of(product(33, 40, 1))
    cut = {name: data[:-64] for name, data in case.emitted.sections.items()}
    broken = replace(case, emitted=replace(case.emitted, sections=cut))
    with pytest.raises((NativeError, PlanError)):
        broken.native(native_targets()[0])


@pytest.mark.parametrize("target", native_targets())
def test_bytes_of_any_value_run(target: str) -> None:
    case = Case.of(product(33, 40, None))
    random = np.random.default_rng(0)
    sections = {name: random.bytes(len(data)) for name, data in case.emitted.sections.items()}
    broken = replace(case, emitted=replace(case.emitted, sections=sections))
    with broken.native(target) as plan:
        assert len(raw(plan.run("run", rows_of(case.module, 8)))["y"]) == 8 * 33 * 4


def coded(op: Op, n: int, k: int, layout: str) -> Module:
    """Return EMBED or LINEAR_F32 with a matrix of signed bytes times steps."""
    b = ModuleBuilder(6, 9)
    codes = b.random.integers(-128, 128, (n, k)).astype(np.float32)
    steps = b.random.uniform(0.001, 0.1, (n, 1)).astype(np.float32)
    weight = b.weight(codes * steps)
    b.weights[weight] = replace(b.weights[weight], layout=layout)
    is_table = op is Op.EMBED
    x = b.buffer(None, 1, "i32") if is_table else b.buffer(None, k)
    y = b.buffer(None, k if is_table else n)
    b.call(op, [x], [y], [weight])
    b.program("run", {"x": x}, {"y": y})
    return b.module()


@pytest.mark.parametrize("target", native_targets())
@pytest.mark.parametrize("op", [Op.EMBED, Op.LINEAR_F32])
@pytest.mark.parametrize("shape", [(1, 1), (7, 9), (13, 40), (33, 203)])
def test_codes_give_the_bits_of_the_matrix(op: Op, shape: tuple[int, int], target: str) -> None:
    plain, stored = (Case.of(coded(op, *shape, layout)) for layout in (DENSE, I8))
    sizes = [len(case.emitted.sections["weights.shared"]) for case in (plain, stored)]
    assert sizes[1] <= sizes[0] // 4 + 64 + 4 * shape[0]
    bundle = BundleSimulator({**stored.emitted.sections, "plan": stored.emitted.plan_bytes})
    with plain.native(target) as one, stored.native(target) as other:
        for rows in (1, 3, 4, 9):
            values = rows_of(stored.module, rows)
            if op is Op.EMBED:
                values = {"x": ids(np.arange(rows) * 5 % shape[0])}
            expected = raw(one.run("run", values))
            assert raw(other.run("run", values)) == expected
            assert raw(bundle.run("run", values)) == expected
            assert raw(stored.simulator().run("run", values)) == expected
