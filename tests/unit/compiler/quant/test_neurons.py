"""Storage neuron by neuron: chosen by what calibration saw, dense where it saw nothing."""

import numpy as np
import pytest

from compiler.contract.operations import GATED
from compiler.kernels.program import COLUMNS, DENSE, UP_ROWS, ExpertAct, Module, Op
from compiler.quant.neurons import NeuronChoice, choose_neurons
from compiler.quant.record import CalibrationRecord, InputSample
from tests.factories.modules import ModuleBuilder

WIDTH, HIDDEN, EXPERTS = 512, 512, 2


def experts(act: ExpertAct) -> Module:
    b = ModuleBuilder(1, 4)
    weights = []
    for _ in range(EXPERTS):
        weights += [b.w4(HIDDEN * (2 if act in GATED else 1), WIDTH), b.w4(WIDTH, HIDDEN)]
    x, index, gate = b.buffer(None, WIDTH), b.buffer(None, 1, "i32"), b.buffer(None, 1)
    y = b.buffer(None, WIDTH)
    b.call(Op.EXPERTS, [x, index, gate], [y], weights, act=act)
    b.program("run", {"x": x, "index": index, "gate": gate}, {"y": y})
    return b.module()


def linear(rows: int | None = None, check: int = 0, width: int = 512) -> Module:
    b = ModuleBuilder(1, 4)
    weight, x, y = b.w4(width, width), b.buffer(rows, width), b.buffer(rows, width)
    b.call(Op.LINEAR, [x], [y], [weight], check=check)
    b.program("run", {"x": x}, {"y": y})
    return b.module()


def record(zeros: dict[int, float], cols: int = HIDDEN) -> CalibrationRecord:
    """Return a record of ten rows with such a share of zeros by weight."""
    samples = []
    for ratio in zeros.values():
        rows = np.ones((10, cols), np.int8)
        rows[:, : round(ratio * cols)] = 0
        ones = np.ones(10, np.float32)
        samples.append(InputSample(rows, ones, 10, (rows == 0).sum(axis=0), np.ones(cols)))
    return CalibrationRecord({at: n for n, at in enumerate(zeros)}, tuple(samples), ())


def layouts(module: Module) -> list[str]:
    return [weight.layout for weight in module.weights]


def only(rows: tuple[NeuronChoice, ...]) -> NeuronChoice:
    assert len(rows) == 1
    return rows[0]


@pytest.mark.parametrize(
    ("act", "zeros", "expected"),
    [
        (ExpertAct.REGLU, 0.9, [UP_ROWS, COLUMNS]),
        (ExpertAct.REGLU, 0.55, [DENSE, DENSE]),
        (ExpertAct.RELU, 0.9, [DENSE, COLUMNS]),
        (ExpertAct.RELU, 0.65, [DENSE, DENSE]),
        (ExpertAct.SWIGLU, 0.9, [DENSE, DENSE]),
    ],
)
def test_experts_are_stored_by_the_zeros_behind_their_relu(
    act: ExpertAct, zeros: float, expected: list[str]
) -> None:
    module, rows = choose_neurons(experts(act), record({1: zeros, 3: zeros}))
    assert layouts(module) == expected * EXPERTS
    if act is ExpertAct.SWIGLU:
        assert rows == ()
    else:
        row = only(rows)
        assert row.zero_ratio == pytest.approx(zeros, abs=0.01)
        assert (row.chosen != ()) == (expected[1] != DENSE)
        assert row.gain is not None
        assert (row.gain >= 1.05) == (expected[1] != DENSE)


def test_experts_that_calibration_saw_speak_for_those_it_did_not() -> None:
    module, rows = choose_neurons(experts(ExpertAct.REGLU), record({3: 0.8}))
    assert layouts(module) == [UP_ROWS, COLUMNS] * EXPERTS
    assert only(rows).zero_ratio == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("known", [None, CalibrationRecord({}, (), ())])
def test_dense_is_what_stays_where_nothing_is_known(known: CalibrationRecord | None) -> None:
    module = experts(ExpertAct.REGLU)
    chosen, rows = choose_neurons(module, known)
    assert chosen is module
    assert only(rows).why == "dense: calibration did not reach it"
    assert choose_neurons(linear(), known)[1] == ()


def test_a_product_with_zeros_among_its_operand_is_stored_by_columns() -> None:
    module, rows = choose_neurons(linear(), record({0: 0.9}))
    assert layouts(module) == [COLUMNS]
    assert only(rows).chosen == (COLUMNS,)
    assert choose_neurons(linear(), record({0: 0.1}))[1] == ()


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (linear(rows=64), "many rows"),
        (linear(check=3), "checked by groups"),
        (linear(width=64), "small enough"),
    ],
)
def test_it_says_why_dense_it_stays(module: Module, why: str) -> None:
    width = module.buffers[0].cols
    chosen, rows = choose_neurons(module, record({0: 0.95}, width))
    assert layouts(chosen) == [DENSE]
    assert why in only(rows).why
