"""Half of the columns of every panel: the bits of dense weights, half the codes, no bad index."""

from dataclasses import replace

import numpy as np
import pytest

from compiler.contract.plan import PlanError, parse_plan
from compiler.contract.plan_format import Kind, weight_bytes
from compiler.driver.bundle_simulator import BundleSimulator
from compiler.emitters.nm import pack_nm
from compiler.emitters.plan import read_packed
from compiler.emitters.runner import ScriptRun, play
from compiler.kernels.program import DENSE, NM, Module, Op
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.modules import ModuleBuilder
from tests.integration.test_native_emulated import EMULATED, runner

ROWS = (1, 2, 3, 7, 9)
SHAPES = ((1, 1), (16, 32), (33, 40), (90, 203))


def shared(n: int, k: int, kept: int = 2, of: int = 4) -> np.ndarray:
    """Return normal values in `kept` of every `of` columns, alike in the 16 rows of a panel."""
    random = np.random.default_rng(n + k)
    order = random.random((-(-n // 16), -(-k // of), of)).argsort(axis=2)
    live = np.repeat((order < kept).reshape(len(order), -1), 16, axis=0)[:n, :k]
    return (random.standard_normal((n, k)) * live).astype(np.float32)


def linear(layout: str, weight: np.ndarray) -> Module:
    n, k = weight.shape
    b = ModuleBuilder(2, max(ROWS))
    at = b.weight(weight, "w4")
    b.weights[at] = replace(b.weights[at], layout=layout)
    x, y = b.buffer(None, k), b.buffer(None, n)
    b.call(Op.LINEAR, [x], [y], [at, b.vector(n)], act=1)
    b.program("run", {"x": x}, {"y": y})
    return b.module()


def inputs(module: Module, rows: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(rows)
    return {"x": random.standard_normal((rows, module.buffers[0].cols)).astype(np.float32)}


@pytest.mark.parametrize("target", native_targets())
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kept", "of"), [(2, 4), (8, 16), (1, 8)])
def test_it_gives_the_bits_of_dense_weights(
    shape: tuple[int, int], kept: int, of: int, target: str
) -> None:
    weight = shared(*shape, kept, of)
    weight[0, 0] = 1.0 if not weight.any() else weight[0, 0]
    dense, halved = Case.of(linear(DENSE, weight)), Case.of(linear(NM, weight))
    assert parse_plan(halved.emitted.plan_bytes).weights[0].kind is Kind.W4_NM
    bundle = BundleSimulator({**halved.emitted.sections, "plan": halved.emitted.plan_bytes})
    with dense.native(target) as one, halved.native(target) as other:
        for rows in ROWS:
            values = inputs(dense.module, rows)
            expected = raw(one.run("run", values))
            assert raw(other.run("run", values)) == expected
            assert raw(halved.simulator().run("run", values)) == expected
            assert raw(bundle.run("run", values)) == expected


@pytest.mark.parametrize("name", EMULATED)
def test_other_machines_give_the_same_bits(name: str) -> None:
    built, emulator = runner(name)
    for shape in SHAPES[1:]:
        case = Case.of(linear(NM, shared(*shape)))
        values = [inputs(case.module, rows) for rows in ROWS]
        runs = [ScriptRun("run", {"x": one["x"].tobytes()}) for one in values]
        found = play(built, emulator, case.emitted.plan_bytes, case.emitted.sections, runs)
        simulator = case.simulator()
        assert found == [raw(simulator.run("run", one)) for one in values]


def test_it_takes_little_more_than_half_the_bytes() -> None:
    dense, halved = (weight_bytes(kind, 1024, 1024) for kind in (Kind.W4, Kind.W4_NM))
    assert halved < 0.57 * dense


def test_packing_and_unpacking_are_inverse() -> None:
    case = Case.of(linear(NM, shared(90, 203)))
    found = read_packed(parse_plan(case.emitted.plan_bytes), case.emitted.sections)[0]
    packed = case.packed.packed[0]
    assert (found.codes, found.scales, found.rows) == (packed.codes, packed.scales, packed.rows)
    assert pack_nm(found) == pack_nm(packed)


def test_a_panel_that_needs_more_columns_stays_dense() -> None:
    weight = shared(90, 203)
    weight[40, 32:48] = 1.0
    plan = parse_plan(Case.of(linear(NM, weight)).emitted.plan_bytes)
    assert plan.weights[0].kind is Kind.W4


def test_only_linear_reads_it() -> None:
    plan_bytes = Case.of(linear(NM, shared(33, 40))).emitted.plan_bytes
    length = weight_bytes(Kind.W4_NM, 33, 40)
    wrong = plan_bytes.replace(length.to_bytes(8, "little"), (length + 8).to_bytes(8, "little"))
    with pytest.raises(PlanError, match=f"takes {length} bytes, not {length + 8}"):
        parse_plan(wrong)


@pytest.mark.parametrize("target", native_targets())
def test_any_index_stays_within_its_columns(target: str) -> None:
    case = Case.of(linear(NM, shared(33, 40)))
    random = np.random.default_rng(0)
    sections = {name: random.bytes(len(data)) for name, data in case.emitted.sections.items()}
    broken = replace(case, emitted=replace(case.emitted, sections=sections))
    with broken.native(target) as plan:
        assert len(raw(plan.run("run", inputs(case.module, 9)))["y"]) == 9 * 33 * 4
