"""Properties of steered choices, on the simulator: what may change and what may not."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from compiler.contract.operations import RouteOrder
from compiler.contract.steering import (
    MAX_BIAS,
    MAX_PULL,
    Counts,
    Residency,
    Steering,
    SteeringError,
    steered_experts,
)
from compiler.kernels.program import ExpertAct, Module, Op
from compiler.simulator import Simulator
from tests.factories.modules import ModuleBuilder, small_decoder
from tests.factories.steering import EXPERTS, TOKENS, WIDTH, K, residency, routed

SUMMED = (RouteOrder.TOPK_SOFTMAX, RouteOrder.SOFTMAX_TOPK_RENORM)
HALF = {0, 2, 4}
ORDERS = tuple(RouteOrder)


def rows(seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.standard_normal((TOKENS, WIDTH)) * 2).astype(np.float32)


def choose(
    module: Module, steering: Steering | None, table: Residency | None = None, seeds: int = 6
) -> Iterator[tuple[np.ndarray, np.ndarray, Counts]]:
    simulator = Simulator(module, mode="f64")
    simulator.set_steering(steering, table)
    for seed in range(seeds):
        found = simulator.run_arrays("run", {"x": rows(seed)})
        yield found["index"], found["gate"], simulator.steering_counts


@pytest.mark.parametrize("order", ORDERS)
def test_a_shift_of_all_experts_changes_no_choice(order: RouteOrder) -> None:
    module = routed(order)
    shift = Steering(modality=1.0, bias=(2.0,) * len(module.weights))
    nobody = residency(module, set())
    everyone = residency(module, set(range(EXPERTS + 2)))
    plain = list(choose(module, None))
    for steering, table in (
        (shift, None),
        (Steering(pull=9.0), nobody),
        (Steering(pull=9.0), everyone),
    ):
        for (index, gate, _), (wanted, gates, _) in zip(
            choose(module, steering, table), plain, strict=True
        ):
            assert (index == wanted).all()
            assert (gate == gates).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("protect", [1, 2])
def test_the_best_are_never_lost(order: RouteOrder, protect: int) -> None:
    module = routed(order)
    steering = Steering(pull=MAX_PULL, protect=protect)
    moved = 0
    for (index, _, _), (wanted, _, _) in zip(
        choose(module, steering, residency(module, HALF)), choose(module, None), strict=True
    ):
        assert all({*best[:protect]} <= {*found} for found, best in zip(index, wanted, strict=True))
        moved += int((np.sort(index) != np.sort(wanted)).sum())
    assert moved > 0


@pytest.mark.parametrize("order", SUMMED)
def test_gates_keep_their_sum(order: RouteOrder) -> None:
    module = routed(order)
    for steering in (
        Steering(pull=2.0, protect=0),
        Steering(margin=0.1),
        Steering(max_k=2),
        Steering(may_load=False),
    ):
        for index, gate, _ in choose(module, steering, residency(module, HALF)):
            assert np.allclose(gate.sum(axis=1), 1.0)
            assert ((index < 0) == (gate == 0)).all()


def test_gates_come_from_the_logits_alone() -> None:
    """A token that keeps its experts keeps its gates, whatever was added to choose them."""
    module = routed(RouteOrder.TOPK_SOFTMAX)
    same = 0
    steered = choose(module, Steering(pull=0.2), residency(module, HALF))
    for (index, gate, _), (wanted, gates, _) in zip(steered, choose(module, None), strict=True):
        kept = (index == wanted).all(axis=1)
        assert (gate[kept] == gates[kept]).all()
        same += int(kept.sum())
    assert same > 0


@pytest.mark.parametrize("order", ORDERS)
def test_what_may_not_be_loaded_is_not_chosen(order: RouteOrder) -> None:
    module = routed(order)
    for index, _, counts in choose(module, Steering(may_load=False), residency(module, HALF)):
        assert {*index[index >= 0]} <= HALF
        assert counts.substituted >= counts.missing
    assert counts.substituted > 0
    assert counts.chosen == counts.rows * K - counts.missing


def test_fewer_experts_are_the_best_ones() -> None:
    module = routed(RouteOrder.TOPK_SOFTMAX)
    narrowed = 0
    plain = choose(module, None)
    for (index, _, counts), (wanted, gates, _) in zip(
        choose(module, Steering(margin=0.4)), plain, strict=True
    ):
        sure = gates[:, 0] - gates[:, 1] > np.float32(0.4)
        assert (index[:, 0] == wanted[:, 0]).all()
        assert (index[sure, 1:] == -1).all()
        assert (index[~sure] == wanted[~sure]).all()
        narrowed += int(sure.sum())
        assert counts.narrowed == narrowed
    assert 0 < narrowed < counts.rows
    assert counts.mean_k == counts.chosen / counts.rows < K
    for index, _, _ in choose(module, Steering(max_k=1)):
        assert (index[:, 1:] == -1).all()


def test_a_bias_moves_choices_by_modality() -> None:
    module = routed(RouteOrder.TOPK_SOFTMAX)
    bias = [0.0] * len(module.weights)
    firsts = next(iter(steered_experts(module.programs[0].calls, _rows(module)).values()))
    bias[firsts[3]] = 50.0
    text = Steering(protect=0, modality=1.0, bias=tuple(bias))
    for index, _, _ in choose(module, text):
        assert (index == 3).any(axis=1).all()
    for index, _, _ in choose(module, replace(text, modality=-1.0)):
        assert not (index == 3).any()


def test_counts_subtract() -> None:
    assert Counts(5, 9, 1, 2, 1).since(Counts(3, 5, 1, 0, 0)) == Counts(2, 4, 0, 2, 1)
    assert Counts().mean_k is None


def _rows(module: Module) -> list[int]:
    return [np.atleast_2d(weight.array).shape[0] for weight in module.weights]


def test_it_steers_routers_whose_choice_goes_to_experts_and_ports_alone() -> None:
    decoder = small_decoder(5, see=False)
    (step,) = decoder.programs
    assert len(steered_experts(step.calls, _rows(decoder))) == sum(
        c.op is Op.ROUTE for c in step.calls
    )
    for reader in (Op.ADD, Op.EXPERTS, Op.COLS_SLICE):
        module = _with_reader(reader)
        found = steered_experts(module.programs[0].calls, _rows(module))
        assert bool(found) is (reader is Op.COLS_SLICE)


def _with_reader(reader: Op) -> Module:
    """Return a router whose gates one more operation reads."""
    b = ModuleBuilder(1, TOKENS)
    x, y, gate = b.buffer(None, 2), b.buffer(None, 2), b.buffer(None, 2)
    index, more = b.buffer(None, 2, "i32"), b.buffer(None, 1 if reader is Op.COLS_SLICE else 2)
    mixed = [b.w4(2, 2, f"expert.L0.E{at // 2}") for at in range(6)]
    b.call(Op.ROUTE, [x], [index, gate], [b.weight(b.normal(3, 2))], k=2, order=0)
    b.call(Op.EXPERTS, [x, index, gate], [y], mixed, act=ExpertAct.RELU)
    if reader is Op.EXPERTS:
        b.call(reader, [x, index, gate], [more], mixed, act=ExpertAct.RELU)
    elif reader is Op.ADD:
        b.call(reader, [x, gate], [more])
    else:
        b.call(reader, [gate], [more], start=0, count=1)
    b.program("run", {"x": x}, {"y": y, "more": more})
    return b.module()


@pytest.mark.parametrize("entry", [float("nan"), float("inf"), 1e39, -1e39, 10**400])
def test_it_refuses_a_bias_that_no_f32_holds(entry: float) -> None:
    with pytest.raises(SteeringError, match="finite"):
        Steering(bias=(0.0, entry)).check(2)
    Steering(bias=(MAX_BIAS, -MAX_BIAS)).check(2)
    assert np.float32(MAX_BIAS) == np.finfo(np.float32).max == MAX_BIAS


def test_it_refuses_a_table_of_another_plan() -> None:
    with pytest.raises(SteeringError):
        Simulator(routed(RouteOrder.TOPK_SOFTMAX), mode="f64").set_steering(
            Steering(), Residency(3)
        )
