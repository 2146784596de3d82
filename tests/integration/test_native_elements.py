"""CSR, COO and blocked ELL: the bits of dense weights, and no trust in an index."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from compiler.contract.elements import (
    SMALL_KINDS,
    stored_bytes,
    stored_count,
    stored_parts,
    workspace_bytes,
)
from compiler.contract.native import NativeError, NativePlan
from compiler.contract.plan import PlanError, parse_plan
from compiler.contract.plan_format import Kind
from compiler.driver.bundle_simulator import BundleSimulator
from compiler.emitters.elements import pack_elements, unpack_elements
from compiler.emitters.plan import read_packed
from compiler.emitters.runner import ScriptRun, play
from compiler.kernels.program import COO, CSR, DENSE, ELL, Act, Module, NormKind, Op
from compiler.quant.w4 import integer_w4, unpack_w4
from tests.factories.kernels import Case, library, native_targets, raw
from tests.factories.modules import ModuleBuilder
from tests.integration.test_native_emulated import EMULATED, runner
from tests.integration.test_native_memory import Guarded

TOKENS = 13
LAYOUTS = {CSR: Kind.W4_CSR, COO: Kind.W4_COO, ELL: Kind.W4_ELL}
PATTERNS = {
    "unstructured": (1, 1, 0.08),
    "blocks of 32 x 4": (32, 4, 0.3),
    "blocks of 4 x 4": (4, 4, 0.2),
    "nearly empty": (1, 1, 0.004),
    "full": (1, 1, 1.1),
}


def pruned(pattern: str, n: int, k: int) -> np.ndarray:
    """Return normal values where the pattern keeps them, zeros elsewhere."""
    high, wide, density = PATTERNS[pattern]
    random = np.random.default_rng(n * k)
    live = random.random((-(-n // high), -(-k // wide))) < density
    live[-1, -1] = True
    return random.standard_normal((n, k)) * np.kron(live, np.ones((high, wide)))[:n, :k]


def n_of_m(n: int, k: int, keep: int, of: int) -> np.ndarray:
    """Return a weight that keeps `keep` of every `of` neighbours of a row."""
    random = np.random.default_rng(of)
    order = random.random((n, -(-k // of), of)).argsort(axis=2)
    return random.standard_normal((n, k)) * (order < keep).reshape(n, -1)[:, :k]


def linear(layout: str, weight: np.ndarray) -> Module:
    """Return one LINEAR with a norm, a bias, an activation and a residual around the weight."""
    b = ModuleBuilder(2, TOKENS)
    n, k = weight.shape
    number = b.weight(weight.astype(np.float32), "w4")
    b.weights[number] = replace(b.weights[number], layout=layout)
    x, add, y = b.buffer(None, k), b.buffer(None, n), b.buffer(None, n)
    weights = [number, b.vector(n), b.vector(k)]
    norm = NormKind.RMS + 1
    b.call(Op.LINEAR, [x, add], [y], weights, act=Act.SILU, norm=norm, eps=1e-5)
    b.program("run", {"x": x, "add": add}, {"y": y})
    return b.module()


def inputs(weight: np.ndarray, tokens: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(tokens)
    sizes = {"x": weight.shape[1], "add": weight.shape[0]}
    return {
        role: random.standard_normal((tokens, size)).astype(np.float32)
        for role, size in sizes.items()
    }


@pytest.mark.parametrize("target", native_targets())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_bits_of_dense_weights(layout: str, target: str) -> None:
    weights = [pruned(name, *shape) for name in PATTERNS for shape in ((90, 200), (33, 37))]
    weights += [n_of_m(64, 96, keep, of) for keep, of in ((2, 4), (1, 8), (1, 32))]
    for weight in weights:
        dense, small = Case.of(linear(DENSE, weight)), Case.of(linear(layout, weight))
        assert LAYOUTS[layout] in {w.kind for w in parse_plan(small.emitted.plan_bytes).weights}
        sections = {**small.emitted.sections, "plan": small.emitted.plan_bytes}
        bundle = BundleSimulator(sections)
        with dense.native(target) as one, small.native(target) as other:
            for tokens in (1, 2, 3, 8, TOKENS):
                values = inputs(weight, tokens)
                expected = raw(one.run("run", values))
                assert raw(other.run("run", values)) == expected
                assert raw(small.simulator().run("run", values)) == expected
                assert raw(bundle.run("run", values)) == expected


def test_the_widest_sums_stay_exact() -> None:
    weight = np.zeros((16, 8192), np.float32)
    weight[0], weight[1] = 1.0, -1.0
    for layout in LAYOUTS:
        case = Case.of(linear(layout, weight))
        values = inputs(weight, 1)
        values["x"][:] = 1.0
        with case.native(native_targets()[0]) as plan:
            assert raw(plan.run("run", values)) == raw(case.simulator().run("run", values))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packing_keeps_every_integer_weight(layout: str) -> None:
    for name in PATTERNS:
        for shape in ((90, 200), (33, 37), (1, 1)):
            case = Case.of(linear(layout, pruned(name, *shape)))
            plan = parse_plan(case.emitted.plan_bytes)
            found = read_packed(plan, case.emitted.sections)[0]
            packed = case.packed.packed[0]
            assert (found.codes, found.rows) == (packed.codes, packed.rows)
            assert (integer_w4(unpack_w4(found)) == integer_w4(unpack_w4(packed))).all()
            kind = LAYOUTS[layout]
            assert pack_elements(found, kind) == pack_elements(packed, kind)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_work_has_the_bits_of_one_thread(layout: str) -> None:
    weight = pruned("unstructured", 1000, 600)
    case = Case.of(linear(layout, weight))
    parts = library(native_targets()[-2]), case.emitted.plan_bytes, case.emitted.sections
    with NativePlan(*parts) as alone, NativePlan(*parts, threads=3) as shared:
        for tokens in (1, 2, TOKENS):
            values = inputs(weight, tokens)
            expected = raw(alone.run("run", values))
            for _ in range(20):
                assert raw(shared.run("run", values)) == expected


@pytest.mark.parametrize("target", native_targets())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_stay_inside_the_planned_memory(layout: str, target: str) -> None:
    case = Case.of(linear(layout, pruned("unstructured", 90, 203)))
    guarded = Guarded(case, target)
    weights = {name: guarded.inside(name).tobytes() for name in case.emitted.sections}
    for tokens in (1, 8, TOKENS):
        guarded.run(case.module.programs[0], 0, tokens)
        assert guarded.guards_intact()
    assert {name: guarded.inside(name).tobytes() for name in weights} == weights


@pytest.mark.parametrize("name", EMULATED)
def test_other_machines_give_the_same_bits(name: str) -> None:
    built, emulator = runner(name)
    weight = pruned("unstructured", 90, 203)
    for layout in (DENSE, *LAYOUTS):
        case = Case.of(linear(layout, weight))
        values = [inputs(weight, tokens) for tokens in (1, TOKENS)]
        runs = [ScriptRun("run", {k: v.tobytes() for k, v in x.items()}) for x in values]
        found = play(built, emulator, case.emitted.plan_bytes, case.emitted.sections, runs)
        simulator = case.simulator()
        assert found == [raw(simulator.run("run", x)) for x in values]


def test_an_empty_weight_stays_dense() -> None:
    for layout in LAYOUTS:
        plan = parse_plan(Case.of(linear(layout, np.zeros((40, 40)))).emitted.plan_bytes)
        assert not SMALL_KINDS & {weight.kind for weight in plan.weights}


def test_the_count_follows_from_the_bytes() -> None:
    for kind in SMALL_KINDS:
        for rows, cols in ((1, 1), (16, 32), (90, 200), (4096, 1024)):
            most = -(-cols // 4) if kind is Kind.W4_ELL else rows * cols
            for count in {1, 2, most // 2, most - 1, most} & set(range(1, most + 1)):
                length = stored_bytes(kind, rows, count)
                assert stored_count(kind, rows, cols, length) == count
                assert stored_count(kind, rows, cols, length + 1) is None
        assert stored_count(kind, 16, 32, 0) is None
        assert stored_count(kind, 16, 32, 1 << 40) is None
    wide = stored_bytes(Kind.W4_COO, 1 << 17, 5)
    assert stored_count(Kind.W4_COO, 1 << 17, 32, wide) is None


def test_unpacking_needs_no_padding_blocks() -> None:
    weight = np.zeros((64, 64))
    weight[0, ::4] = 1.0  # 16 blocks in the first row of blocks, one in the second
    weight[40, 60] = 1.0
    packed = Case.of(linear(ELL, weight)).packed.packed[0]
    parts = pack_elements(packed, Kind.W4_ELL)
    assert parts is not None
    data = bytearray(stored_bytes(Kind.W4_ELL, 64, 16))
    for (at, length), part in zip(stored_parts(Kind.W4_ELL, 64, 16), parts, strict=True):
        data[at : at + length] = part
    assert unpack_elements(Kind.W4_ELL, 64, 64, bytes(data)).codes == packed.codes


DAMAGES = {
    CSR: ("column beyond", "columns fall", "code beyond", "first falls", "first beyond"),
    COO: ("column beyond", "columns fall", "code beyond", "row beyond", "rows fall"),
    ELL: ("block beyond",),
}


@pytest.mark.parametrize(
    ("layout", "damage"), [(layout, name) for layout in DAMAGES for name in DAMAGES[layout]]
)
def test_the_runtime_refuses_hostile_indices_before_it_reads_by_them(
    layout: str, damage: str
) -> None:
    weight = pruned("blocks of 32 x 4", 90, 200)
    case = Case.of(linear(layout, weight))
    kind, stored = LAYOUTS[layout], parse_plan(case.emitted.plan_bytes).weights[0]
    count = stored_count(kind, 90, 200, stored.length)
    assert count is not None
    data = bytearray(case.emitted.sections["weights.shared"])
    parts = [at for at, _ in stored_parts(kind, 90, count)]
    entries = np.frombuffer(memoryview(data)[parts[1 if layout == COO else 2] :], "<u4", count=4)
    match damage:
        case "column beyond":
            entries[1] = (entries[1] & 0xFFFF0000) | 200
        case "columns fall":
            entries[1] = (entries[1] & 0xFFFF0000) | (entries[0] & 0xFFFF)
        case "code beyond":
            entries[1] = (entries[1] & 0xFF00FFFF) | (100 << 16)
        case "first falls":
            data[parts[1] + 8 : parts[1] + 12] = (0).to_bytes(4, "little")
        case "first beyond":
            data[parts[1] + 4 : parts[1] + 8] = (count + 9).to_bytes(4, "little")
        case "row beyond":
            data[parts[2] + 2 * count - 2 : parts[2] + 2 * count] = (90).to_bytes(2, "little")
        case "rows fall":
            data[parts[2] : parts[2] + 2] = (89).to_bytes(2, "little")
        case _:
            data[parts[3] + 2 : parts[3] + 4] = (50).to_bytes(2, "little")
    broken = replace(case.emitted, sections={"weights.shared": bytes(data)})
    for target in native_targets():
        with case.native(target):
            pass
        with pytest.raises(NativeError):
            replace(case, emitted=broken).native(target)


def test_the_device_refuses_lengths_of_no_count() -> None:
    for layout in LAYOUTS:
        plan_bytes = Case.of(linear(layout, pruned("unstructured", 90, 200))).emitted.plan_bytes
        length = parse_plan(plan_bytes).weights[0].length
        wrong = plan_bytes.replace(length.to_bytes(8, "little"), (length - 1).to_bytes(8, "little"))
        with pytest.raises(PlanError, match="hold no W4_"):
            parse_plan(wrong)


def test_only_linear_reads_them() -> None:
    b = ModuleBuilder(3, 4)
    weights = []
    for shape in ((96, 48), (48, 96)):
        b.weight(pruned("unstructured", *shape).astype(np.float32), "w4", "expert.L0.E0")
        weights.append(len(b.weights) - 1)
    b.weights[-1] = replace(b.weights[-1], layout=CSR)
    x, index, gate = b.buffer(None, 48), b.buffer(None, 1, "i32"), b.buffer(None, 1)
    y = b.buffer(None, 48)
    b.call(Op.EXPERTS, [x, index, gate], [y], weights, act=0)
    b.program("run", {"x": x, "index": index, "gate": gate}, {"y": y})
    with pytest.raises(Exception, match="EXPERTS cannot read weight 1 as it is stored"):
        Case.of(b.module())


def test_the_context_grows_by_the_workspace_that_was_priced() -> None:
    weight = pruned("unstructured", 90, 200)
    sizes = {}
    for layout in (DENSE, *LAYOUTS):
        with Case.of(linear(layout, weight)).native(native_targets()[0]) as plan:
            sizes[layout] = plan.context_bytes
    for layout, kind in LAYOUTS.items():
        assert sizes[layout] - sizes[DENSE] == workspace_bytes(kind, 200)
    assert ctypes.sizeof(ctypes.c_int16) * 8 * 200 == workspace_bytes(Kind.W4_CSR, 200)
