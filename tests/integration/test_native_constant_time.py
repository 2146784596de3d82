"""Constant-time plans: one path and one set of addresses, whatever activations and weights hold."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from compiler.contract.native import NativePlan
from compiler.contract.operations import RECURRENT_GATES
from compiler.contract.plan import parse_plan
from compiler.contract.plan_format import Kind
from compiler.contract.policy import parse_policy
from compiler.driver import portable_stage
from compiler.driver.compile import compile_model
from compiler.driver.explain.text import explain_lines
from compiler.driver.options import CompileOptions
from compiler.errors import UnsupportedOperatorError
from compiler.kernels.program import (
    COLUMNS,
    CSR,
    TILES,
    ExpertAct,
    Module,
    Op,
    RecurrentKind,
    call_params,
)
from compiler.kernels.registry import KERNELS
from compiler.quant.constant_time import CONSTANT_TIME, constant_time
from compiler.quant.record import CalibrationRecord
from compiler.quant.w8 import round_w8
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.modules import ModuleBuilder
from tests.factories.submissions import linear_submission
from tests.factories.traced_kernels import take_trace, traced
from tests.integration.test_native_neurons import experts, inputs, linear
from tests.integration.test_native_ops import CASES, OpCase

TARGETS = tuple(target for target in native_targets() if target != "portable")[-1:]
TOKENS = 5
FEWEST = {op: next(case for case in CASES if case.op is op) for op in {case.op for case in CASES}}
CHECKED = [
    case
    for case in CASES
    if case.op in CONSTANT_TIME and case.op not in (Op.ROUTE, Op.EXPERTS) and case.layout == "dense"
]


def densities(values: Mapping[str, np.ndarray], seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the values with 0, 50 and 90 % of their floats zero, and with others in their place."""
    random = np.random.default_rng(seed)
    for zeros in (0.0, 0.5, 0.9):
        yield {
            role: array * (random.random(array.shape) >= zeros).astype(array.dtype)
            if array.dtype == np.float32
            else array
            for role, array in values.items()
        }
    yield {
        role: -2 * array[::-1].copy() if array.dtype == np.float32 else array
        for role, array in values.items()
    }


def traces(plan: NativePlan, values: Mapping[str, np.ndarray]) -> set[int]:
    """Return the traces of runs over those densities; the cache is as before each of them."""
    found = set()
    for one in densities(values, 4):
        plan.kv_length = 0
        take_trace(plan)
        plan.run("run", one)
        found.add(take_trace(plan))
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.name)
def test_activations_do_not_change_the_path(case: OpCase, target: str) -> None:
    module = constant_time(case.module())
    emitted = Case.of(module).emitted
    kernels = traced(target, CONSTANT_TIME)
    with NativePlan(kernels, emitted.plan_bytes, emitted.sections) as plan:
        assert len(traces(plan, case.values(TOKENS, 1))) == 1


def routed(act: ExpertAct, *, neurons: bool) -> Module:
    return experts(act, neurons=neurons, width=64, hidden=96, lean=0.5)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("act", list(ExpertAct))
def test_experts_that_are_chosen_take_one_path(target: str, act: ExpertAct) -> None:
    module = constant_time(routed(act, neurons=True))
    emitted = Case.of(module).emitted
    with NativePlan(traced(target, CONSTANT_TIME), emitted.plan_bytes, emitted.sections) as plan:
        values = inputs(module, TOKENS)
        assert len(traces(plan, values)) == 1
        other = {**values, "index": (values["index"] + 1) % 4}
        take_trace(plan)
        plan.run("run", other)
        assert take_trace(plan) not in traces(plan, values)  # the choice itself is not hidden


@pytest.mark.parametrize("target", TARGETS)
def test_skipping_takes_other_paths(target: str) -> None:
    """The control: what the test would see if a kernel looked at values."""
    for module in (routed(ExpertAct.REGLU, neurons=True), linear(COLUMNS, 64, 96)):
        emitted = Case.of(module).emitted
        with NativePlan(
            traced(target, CONSTANT_TIME), emitted.plan_bytes, emitted.sections
        ) as plan:
            assert len(traces(plan, inputs(module, TOKENS))) > 2


def choosing(order: int) -> Module:
    b = ModuleBuilder(6, TOKENS)
    x, index, gate = b.buffer(None, 24), b.buffer(None, 2, "i32"), b.buffer(None, 2)
    weights = [b.weight(np.zeros((9, 24), np.float32)), b.vector(9)]
    b.call(Op.ROUTE, [x], [index, gate], weights, k=2, order=order)
    b.program("run", {"x": x}, {"index": index, "gate": gate})
    return b.module()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("order", range(3))
def test_how_a_router_chooses_does_not_show(target: str, order: int) -> None:
    """Scores in another order, other experts: one path, the flags of the taken ones apart."""
    emitted = Case.of(choosing(order)).emitted
    with NativePlan(traced(target, CONSTANT_TIME), emitted.plan_bytes, emitted.sections) as plan:
        values = {"x": np.ones((TOKENS, 24), np.float32)}
        assert len(traces(plan, values)) == 1


def product(array: np.ndarray) -> Module:
    """A LINEAR over a weight that would be stored by live tiles, and checked."""
    b = ModuleBuilder(8, TOKENS)
    weight = b.weight(array, "w4")
    b.weights[weight] = replace(b.weights[weight], layout=TILES)
    x, y = b.buffer(None, array.shape[1]), b.buffer(None, len(array))
    b.call(Op.LINEAR, [x], [y], [weight], check=2)
    b.program("run", {"x": x}, {"y": y})
    return constant_time(b.module())


def product_w8(array: np.ndarray) -> Module:
    """A LINEAR_W8; half of the rows get zeros of their own."""
    b = ModuleBuilder(8, TOKENS)
    array = array + np.abs(array).max() / 2 * (np.arange(len(array)) % 2)[:, None] * (array != 0)
    weight = b.weight(round_w8(array.astype(np.float32)), "w8")
    x, y = b.buffer(None, array.shape[1]), b.buffer(None, len(array))
    b.call(Op.LINEAR_W8, [x], [y], [weight])
    b.program("run", {"x": x}, {"y": y})
    return constant_time(b.module())


def recurrence(op: Op, kind: RecurrentKind, array: np.ndarray) -> Module:
    """A sequence of steps whose weight is cut from `array`, 96 columns or more."""
    b = ModuleBuilder(8, TOKENS)
    hidden, gates = 24, RECURRENT_GATES[kind] * 24
    weight = b.weight(array[:gates, :hidden].copy(), "w4" if op is Op.RECURRENT else "f32")
    x, y = b.buffer(None, gates), b.buffer(None, hidden)
    states = [b.buffer(1, hidden) for _ in range(2 if kind is RecurrentKind.LSTM else 1)]
    b.call(op, [x], [y, *states], [weight], kind=kind)
    b.program("run", {"x": x}, {"y": y})
    return constant_time(b.module())


WEIGHTED: dict[str, Callable[[np.ndarray], Module]] = {
    "LINEAR": product,
    "LINEAR_W8": product_w8,
    **{
        f"{op.name}-{kind.name}": partial(recurrence, op, kind)
        for op in (Op.RECURRENT, Op.RECURRENT_F32)
        for kind in RecurrentKind
        if op is Op.RECURRENT_F32 or kind is not RecurrentKind.GRU_RESET_BEFORE
    },
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("zeros", [0.5, 0.9])
@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_do_not_change_the_path(name: str, target: str, zeros: float) -> None:
    """Another weight at the same place: it is read whole, whatever it says."""
    random = np.random.default_rng(8)
    full = random.standard_normal((96, 128)).astype(np.float32)
    sparse = full * (random.random(full.shape) >= zeros)
    sparse[16:64] = 0.0
    first, second = (Case.of(WEIGHTED[name](array)).emitted for array in (full, sparse))
    assert first.plan_bytes == second.plan_bytes
    assert first.sections != second.sections
    width = WEIGHTED[name](full).buffers[0].cols
    values = {"x": np.random.default_rng(3).standard_normal((TOKENS, width)).astype(np.float32)}
    with NativePlan(traced(target, CONSTANT_TIME), first.plan_bytes, first.sections) as plan:
        found, outputs = set(), set()
        for sections in (first.sections, second.sections):
            data = sections["weights.shared"]
            plan.weights.memory.view[: len(data)] = data
            take_trace(plan)
            outputs.add(bytes(plan.run("run", values)["y"]))
            found.add(take_trace(plan))
        assert len(found) == 1
        assert len(outputs) == 2  # the second weight was read


def test_it_stores_weights_whole_and_checks_nothing() -> None:
    b = ModuleBuilder(8, TOKENS)
    array = b.normal(64, 128)
    array[:, 32:] = 0.0
    weights = [b.weight(array, "w4") for _ in range(2)]
    b.weights = [
        replace(weight, layout=layout)
        for weight, layout in zip(b.weights, (TILES, CSR), strict=True)
    ]
    x, y, z = b.buffer(None, 128), b.buffer(None, 64), b.buffer(None, 64)
    b.call(Op.LINEAR, [x], [y], weights[:1], check=1)
    b.call(Op.LINEAR, [x], [z], weights[1:])
    b.program("run", {"x": x}, {"y": y, "z": z})
    sparse = b.module()
    module = constant_time(sparse)
    plans = [Case.of(one) for one in (sparse, module)]
    kinds = [{w.kind for w in parse_plan(case.emitted.plan_bytes).weights} for case in plans]
    assert kinds == [{Kind.W4_TILES, Kind.W4_CSR}, {Kind.W4}]
    assert not any(call_params(call)["check"] for call in module.programs[0].calls)
    values = {"x": np.ones((TOKENS, 128), np.float32)}
    results = [raw(case.simulator().run("run", values)) for case in plans]
    assert results[0] == results[1]


def test_it_refuses_operations_that_go_where_values_say() -> None:
    for op in (Op.PRUNE_TOP_P, Op.GATHER_ROWS):
        with pytest.raises(UnsupportedOperatorError, match=op.name):
            constant_time(FEWEST[op].module())
    assert not any(KERNELS[op].is_reference for op in CONSTANT_TIME)


@pytest.mark.parametrize("search", ["band_module", "search_steering"])
def test_which_experts_a_step_takes_follows_neither_entropy_nor_memory(
    search: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = CalibrationRecord({}, (), ())
    known = []
    whole = getattr(portable_stage, search)

    def noted(*given: object) -> object:
        known.append(record in given)
        return whole(*given)

    monkeypatch.setattr(portable_stage, "record_cached", lambda *_: record)
    monkeypatch.setattr(portable_stage, search, noted)
    directory = linear_submission(tmp_path / "submission")
    options = CompileOptions("x86-64-v3", "block", "1", cache_dir=tmp_path / "cache")
    compile_model(directory, options)
    compile_model(directory, replace(options, constant_time=True))
    assert known == [True, False]


def test_a_compilation_says_that_it_was_asked(tmp_path: Path) -> None:
    directory = linear_submission(tmp_path / "submission")
    options = CompileOptions("x86-64-v3", "block", "1", cache_dir=tmp_path / "cache")
    plain = compile_model(directory, options)
    leveled = compile_model(directory, replace(options, constant_time=True))
    assert [bundle.report["constant_time"] for bundle in (plain, leveled)] == [False, True]
    assert leveled.report["provenance"]["constant_time"] is True
    assert "constant_time" not in plain.report["provenance"]
    assert leveled.manifest.provenance_sha256 != plain.manifest.provenance_sha256
    assert plain.sections["plan"] == leveled.sections["plan"]  # nothing in it depended on values
    policies = [parse_policy(bundle.sections["policy"]) for bundle in (plain, leveled)]
    assert [policy.is_fixed for policy in policies] == [False, True]
    lines = explain_lines(leveled.report, leveled.report["explained"])
    assert any(line.startswith("constant time") for line in lines)
