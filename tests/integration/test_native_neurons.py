"""Weights stored neuron by neuron: the bits of dense weights, and work for live neurons only."""

from dataclasses import replace

import numpy as np
import pytest

from compiler.contract.native import NativePlan
from compiler.contract.native_errors import NativeError
from compiler.contract.operations import GATED
from compiler.contract.plan import PlanError, parse_plan
from compiler.contract.plan_format import WEIGHT, Kind
from compiler.contract.policy import Cell
from compiler.contract.policy_calls import call_cell
from compiler.driver.bundle_simulator import BundleSimulator
from compiler.emitters.neurons import pack_neurons, unpack_neurons
from compiler.emitters.plan import read_packed
from compiler.kernels.program import COLUMNS, DENSE, UP_ROWS, ExpertAct, Module, NormKind, Op
from compiler.quant.w4 import pack_w4, quantise_w4
from tests.factories.kernels import Case, ids, library, native_targets, raw
from tests.factories.modules import ModuleBuilder
from tests.factories.w8 import routed

TOKENS = 7
K = 2


def stored(b: ModuleBuilder, array: np.ndarray, layout: str, section: str) -> int:
    number = b.weight(array, "w4", section)
    b.weights[number] = replace(b.weights[number], layout=layout)
    return number


def experts(
    act: ExpertAct, *, neurons: bool, width: int = 48, hidden: int = 80, count: int = 4,
    biases: bool = False, lean: float = 0.0, layer: bool = False,
) -> Module:  # fmt: skip
    """Return experts whose gates lean to the negative side where `lean` is positive."""
    b = ModuleBuilder(3, TOKENS)
    first = UP_ROWS if neurons and act is ExpertAct.REGLU else DENSE
    x, index, gate = b.buffer(None, width), b.buffer(None, K, "i32"), b.buffer(None, K)
    y = b.buffer(None, width)
    weights = []
    for expert in range(count):
        section = f"expert.L0.E{expert}"
        wide = hidden * (2 if act in GATED else 1)
        w_in = b.normal(wide, width, scale=width**-0.5)
        w_in[:hidden] -= np.float32(lean / width)
        weights += [stored(b, w_in, first, section)]
        second = b.normal(width, hidden, scale=hidden**-0.5)
        weights += [stored(b, second, COLUMNS if neurons else DENSE, section)]
        weights += [b.vector(wide), b.vector(width)] if biases else []
    if layer:
        norm, router = [b.vector(width, offset=1.0), -1], [b.weight(b.normal(count, width)), -1]
        params = {"k": K, "order": 2, "act": act, "kind": NormKind.RMS, "eps": 1e-5}
        b.call(Op.MOE_LAYER, [x], [y, index, gate], [*norm, *router, *weights], **params)
        b.program("run", {"x": x}, {"y": y})
    else:
        b.call(Op.EXPERTS, [x, index, gate], [y], weights, act=act, biases=int(biases))
        b.program("run", {"x": x, "index": index, "gate": gate}, {"y": y})
    return b.module()


def linear(layout: str, n: int, k: int) -> Module:
    b = ModuleBuilder(2, TOKENS)
    weight = stored(b, b.normal(n, k, scale=k**-0.5), layout, "weights.shared")
    x, y = b.buffer(None, k), b.buffer(None, n)
    b.call(Op.LINEAR, [x], [y], [weight, b.vector(n)], act=1)
    b.program("run", {"x": x}, {"y": y})
    return b.module()


def inputs(module: Module, tokens: int, zeros: float = 0.0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(tokens)
    found = {
        role: random.standard_normal((tokens, module.buffers[at].cols)).astype(np.float32)
        for role, at in module.programs[0].inputs.items()
    }
    if "index" in found:
        found["x"] = np.abs(found["x"])  # so that `lean` decides how many gates are negative
        found["index"] = np.concatenate([ids(random.permutation(4)[:K]).T for _ in range(tokens)])
    found["x"] *= random.random(found["x"].shape) >= zeros
    return found


def agree(dense: Case, neurons: Case, target: str, threads: int = 1, zeros: float = 0.0) -> None:
    bundle = BundleSimulator({**neurons.emitted.sections, "plan": neurons.emitted.plan_bytes})
    emitted = neurons.emitted
    with (
        dense.native(target) as one,
        NativePlan(library(target), emitted.plan_bytes, emitted.sections, threads=threads) as other,
    ):
        for tokens in (1, 2, TOKENS):
            values = inputs(dense.module, tokens, zeros)
            expected = raw(one.run("run", values))
            assert raw(other.run("run", values)) == expected
            assert raw(neurons.simulator().run("run", values)) == expected
            assert raw(bundle.run("run", values)) == expected


SHAPES = ((48, 80), (33, 17), (288, 200), (520, 150))


@pytest.mark.parametrize("target", native_targets())
@pytest.mark.parametrize("lean", [0.0, 1.0, 40.0])
@pytest.mark.parametrize(("width", "hidden"), SHAPES)
def test_reglu_experts_give_the_bits_of_dense_ones(
    target: str, lean: float, width: int, hidden: int
) -> None:
    cases = [
        Case.of(experts(ExpertAct.REGLU, neurons=neurons, width=width, hidden=hidden, lean=lean))
        for neurons in (False, True)
    ]
    kinds = {w.kind for w in parse_plan(cases[1].emitted.plan_bytes).weights}
    assert kinds == {Kind.W4_UP_ROWS, Kind.W4_COLUMNS}
    agree(*cases, target)


@pytest.mark.parametrize("target", native_targets())
@pytest.mark.parametrize(
    ("act", "biases", "layer"),
    [
        (ExpertAct.REGLU, True, False),
        (ExpertAct.REGLU, False, True),
        (ExpertAct.RELU, True, False),
        (ExpertAct.RELU, False, True),
        (ExpertAct.SWIGLU, False, False),
    ],
)
def test_biases_layers_and_other_activations(
    target: str, act: ExpertAct, biases: bool, layer: bool
) -> None:
    cases = [
        Case.of(experts(act, neurons=neurons, biases=biases, layer=layer, lean=0.7))
        for neurons in (False, True)
    ]
    agree(*cases, target)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_do_not_change_bits(threads: int) -> None:
    cases = [
        Case.of(experts(ExpertAct.REGLU, neurons=neurons, width=1100, hidden=1064, lean=1.0))
        for neurons in (False, True)
    ]
    agree(*cases, native_targets()[-2], threads)


@pytest.mark.parametrize("target", native_targets())
@pytest.mark.parametrize("zeros", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("n", "k"), [(90, 200), (1, 1), (130, 33), (2100, 70)])
def test_columns_give_the_bits_of_a_dense_product(
    target: str, zeros: float, n: int, k: int
) -> None:
    agree(Case.of(linear(DENSE, n, k)), Case.of(linear(COLUMNS, n, k)), target, zeros=zeros)


@pytest.mark.parametrize("threads", [1, 3])
def test_work_is_live_neurons_and_nothing_else(threads: int) -> None:
    """Counted by the kernels, against what the arithmetic of the simulator says is alive."""
    module = experts(ExpertAct.REGLU, neurons=True, width=544, hidden=600, lean=1.0)
    case = Case.of(module)
    values = inputs(module, 3)
    rows, columns = live_neurons(case, values)
    assert 0 < rows < 3 * K * 600
    assert 0 < columns < 3 * K * 600
    with NativePlan(
        library(native_targets()[-2]),
        case.emitted.plan_bytes,
        case.emitted.sections,
        threads=threads,
    ) as plan:
        plan.run("run", values)
        left_out, read = plan.work_counts("run")[0]
        ran = len(np.unique(values["index"]))
        assert read == rows + columns
        assert left_out + read == 600 * ran + 600 * 3 * K


def live_neurons(case: Case, values: dict[str, np.ndarray]) -> tuple[int, int]:
    """Return how many gates are positive in any row of their expert, and activations not zero."""
    numerics = case.simulator()._numerics
    q, scale = numerics.quantise(values["x"])
    rows = columns = 0
    for expert in np.unique(values["index"]):
        at = (values["index"] == expert).any(axis=1)
        wide = numerics.linear(q[at], scale[at], 2 * int(expert))
        gate, up = np.split(wide, 2, axis=1)
        rows += int((gate > 0).any(axis=0).sum())
        hidden = np.where(gate <= 0, np.float32(0), gate * up)
        columns += int((numerics.quantise(hidden)[0] != 0).sum())
    return rows, columns


def test_a_product_by_columns_reads_those_that_are_not_zero() -> None:
    module = linear(COLUMNS, 300, 200)
    case = Case.of(module)
    values = inputs(module, 1, zeros=0.8)
    with case.native(native_targets()[-2]) as plan:
        plan.run("run", values)
        live = int((case.simulator()._numerics.quantise(values["x"])[0] != 0).sum())
        assert plan.work_counts("run") == {0: (200 - live, live)}
        assert plan.check_counts("run") == {}


@pytest.mark.parametrize("layer", [False, True])
def test_the_policy_table_knows_these_weights(layer: bool) -> None:
    case = Case.of(experts(ExpertAct.REGLU, neurons=True, layer=layer))
    with case.native(native_targets()[-2]) as plan:
        call = plan.plan.programs[0].calls[0]
        for tokens in (1, TOKENS):
            assert Cell.at(plan.policy_cell("run", 0, tokens)) == call_cell(plan.plan, call, tokens)


def test_packing_and_unpacking_are_inverse() -> None:
    random = np.random.default_rng(9)
    for n, k in ((2, 1), (34, 70), (256, 256), (300, 513)):
        packed = pack_w4(quantise_w4(random.standard_normal((n, k)).astype(np.float32)))
        for kind in (Kind.W4_UP_ROWS, Kind.W4_COLUMNS):
            parts = pack_neurons(packed, kind)
            assert parts is not None
            data = b"".join(part + bytes(-len(part) % 64) for part in parts)
            found = unpack_neurons(kind, n, k, data)
            assert (found.codes, found.rows) == (packed.codes, packed.rows)
            assert found.scales == packed.scales


def test_a_bundle_gives_its_packed_weights_back() -> None:
    case = Case.of(experts(ExpertAct.REGLU, neurons=True))
    found = read_packed(parse_plan(case.emitted.plan_bytes), case.emitted.sections)
    for number, packed in case.packed.packed.items():
        assert (found[number].codes, found[number].rows) == (packed.codes, packed.rows)


@pytest.mark.parametrize("act", [ExpertAct.RELU, ExpertAct.SWIGLU])
def test_up_rows_belong_to_reglu_alone(act: ExpertAct) -> None:
    module = experts(ExpertAct.REGLU, neurons=True)
    plan = bytearray(Case.of(module).emitted.plan_bytes)
    call = bytes([Op.EXPERTS, 0, 3, 0, 1, 0])
    at = plan.index(call) + 16
    assert plan[at] == ExpertAct.REGLU
    plan[at] = act
    with pytest.raises(PlanError, match=r"cannot read weight|shapes do not chain"):
        parse_plan(bytes(plan))


def test_the_runtime_refuses_a_length_that_is_none() -> None:
    case = Case.of(linear(COLUMNS, 90, 200))
    weight = parse_plan(case.emitted.plan_bytes).weights[0]
    record = WEIGHT.layout.pack(
        weight.kind, weight.section, weight.rows, weight.cols, weight.offset, weight.length
    )
    other = WEIGHT.layout.pack(
        Kind.W4_UP_ROWS, weight.section, weight.rows, weight.cols, weight.offset, weight.length
    )
    broken = case.emitted.plan_bytes.replace(record, other)
    assert broken != case.emitted.plan_bytes
    with pytest.raises(PlanError):
        parse_plan(broken)
    with pytest.raises((NativeError, PlanError)):
        NativePlan(library(native_targets()[0]), broken, case.emitted.sections)


@pytest.mark.parametrize("target", native_targets())
@pytest.mark.parametrize("first", [0, 1, 3])
def test_experts_of_one_batch_may_be_stored_in_different_ways(first: int, target: str) -> None:
    """One has gate rows and up rows, the others have panels, whichever is asked for first."""
    module = routed(("w4", "w8"), ExpertAct.REGLU, whole=False)
    at = module.programs[0].calls[-1].weights[2 * first]
    weights = [replace(w, layout=UP_ROWS) if w.id == at else w for w in module.weights]
    case = Case.of(replace(module, weights=tuple(weights)))
    assert case.emitted.plan.weights[at].kind is Kind.W4_UP_ROWS
    random = np.random.default_rng(4)
    with case.native(target) as plan:
        for rows in (1, 1, 1, 1, 16):
            values = {"x": random.standard_normal((rows, 70)).astype(np.float32)}
            assert raw(plan.run("run", values)) == raw(case.simulator().run("run", values))
