"""Routers asked before their layer: the same bits, the right experts named and counted."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest

from compiler.contract.expert_pool import ReadAhead
from compiler.contract.operations import ExpertEvent, NormKind, Op
from compiler.contract.pool_abi import ExpertState, PoolKnob
from compiler.contract.steering import Residency, Steering
from compiler.driver.scheduling import schedule_module
from compiler.emitters.schedule import obey, schedule_ops
from compiler.errors import UnsupportedOperatorError
from compiler.kernels.program import Call, Module
from compiler.quant.constant_time import constant_time
from tests.factories.kernels import PORTABLE, Case, native_targets, raw
from tests.factories.modules import DecoderBuilder
from tests.factories.pools import pooled
from tests.integration.test_native_fused import moe
from tests.integration.test_native_pool import conversation, small_pool

TARGETS = native_targets()
LAYERS, EXPERTS = 3, 8


def decoder() -> Module:
    builder = DecoderBuilder(3, layers=LAYERS, experts=EXPERTS, hidden=96)
    builder.add_step()
    return builder.module()


def early(module: Module) -> Module:
    return obey(module, schedule_ops(module, {}, foresee=True), {})


def asked_of_its_own_rows() -> Module:
    """A layer whose router is asked of the very rows that the layer gets."""
    module = moe(NormKind.LAYER, 0, residual=True, fused=True)
    (program,) = module.programs
    (layer,) = program.calls
    load = Call(Op.EXPERT_LOAD, (), (), layer.weights[4:], {})
    calls = (foresight(layer), load, layer)
    return replace(module, programs=(replace(program, calls=calls),))


def foresight(layer: Call) -> Call:
    params = {name: layer.params[name] for name in ("k", "order", "kind", "eps")}
    weights = (*layer.weights[:4], -1, *layer.weights[4:])
    return Call(Op.EXPERT_FORESEE, layer.inputs, (), weights, params)


class Told:
    """A pager that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[ExpertEvent, int]] = []

    def __call__(self, event: ExpertEvent, weight: int) -> bool:
        self.events.append((event, weight))
        return True

    def weights(self, event: ExpertEvent) -> list[int]:
        return [weight for found, weight in self.events if found is event]


@pytest.mark.parametrize("target", TARGETS)
def test_it_says_what_the_simulator_says_and_changes_no_bit(target: str) -> None:
    plain, case = Case.of(decoder()), Case.of(early(decoder()))
    simulator, simulated, told = case.simulator(), Told(), Told()
    simulator.set_pager(simulated)
    with plain.native(target) as before, case.native(target) as native:
        native.set_pager(told)
        for values in conversation():
            expected = raw(before.run("step", values))
            assert raw(native.run("step", values)) == expected
            assert raw(simulator.run("step", values)) == expected
    assert told.events == simulated.events
    assert told.weights(ExpertEvent.PREFETCH)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "record",
    [
        Steering(pull=2.0, protect=0, margin=1.0),
        Steering(pull=0.5, margin=0.1, max_k=1),
        Steering(may_load=False, pull=1.0),
    ],
)
def test_a_steered_router_is_asked_as_it_will_choose(target: str, record: Steering) -> None:
    """What it remembers and what is counted of it are those of a tape that asks nobody."""
    plain, case = Case.of(decoder()), Case.of(early(decoder()))
    simulator, simulated, told = case.simulator(), Told(), Told()
    residency = Residency(len(case.module.weights))
    for weight in range(0, len(residency), 3):
        residency[weight] = False
    simulator.set_pager(simulated)
    simulator.set_steering(record, residency)
    with plain.native(target) as before, case.native(target) as native:
        for plan in (before, native):
            plan.steering.publish(record, residency)
        native.set_pager(told)
        for values in conversation():
            expected = raw(before.run("step", values))
            assert raw(native.run("step", values)) == expected
            assert raw(simulator.run("step", values)) == expected
        assert native.steering.counts() == before.steering.counts() == simulator.steering_counts
    assert told.events == simulated.events
    if not record.may_load:
        named = set(told.weights(ExpertEvent.PREFETCH))
        assert named
        assert all(residency[weight] for weight in named)


@pytest.mark.parametrize("target", TARGETS)
def test_of_the_rows_that_the_layer_gets_it_names_what_the_layer_chooses(target: str) -> None:
    case = Case.of(asked_of_its_own_rows())
    x = np.random.default_rng(2).standard_normal((4, 24)).astype(np.float32).tobytes()
    simulator, simulated, told = case.simulator(), Told(), Told()
    simulator.set_pager(simulated)
    with case.native(target) as native:
        native.set_pager(told)
        assert raw(native.run("run", {"x": x})) == raw(simulator.run("run", {"x": x}))
    assert told.events == simulated.events
    assert told.weights(ExpertEvent.PREFETCH) == told.weights(ExpertEvent.USE)


def test_many_rows_and_nobody_to_tell_are_told_nothing() -> None:
    case = Case.of(early(decoder()))
    told = Told()
    with case.native(PORTABLE) as native:
        native.set_pager(told)
        native.run("step", next(iter(conversation_of([9]))))
    assert not told.weights(ExpertEvent.PREFETCH)


def conversation_of(lengths: Iterable[int]) -> Iterable[dict[str, bytes]]:
    for tokens in lengths:
        ids = np.arange(tokens, dtype=np.int32)
        yield {"token_ids": ids.tobytes(), "positions": ids.tobytes()}


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("reads_ahead", [False, True])
def test_the_bits_are_those_of_a_plan_that_has_all(share: float, reads_ahead: bool) -> None:
    case = Case.of(early(decoder()))
    with (
        Case.of(decoder()).native(PORTABLE) as plain,
        pooled(case, PORTABLE, share, reads_ahead=reads_ahead) as (plan, weights),
    ):
        for values in conversation():
            assert raw(plan.run("step", values)) == raw(plain.run("step", values))
        counts = weights.pool.counts()
    assert 0 < counts["foreseen"] <= counts["predicted"]
    assert counts["chosen"] == counts["hits"] + counts["late"] + counts["misses"]


def test_only_what_the_routers_said_is_counted() -> None:
    """Of two layers one is named right, one half right; what is learned of them does not count."""
    pool = small_pool(2, 4, 8)
    for _ in range(5):
        pool.begin_pass()
        pool.foretell([0, 1])
        pool.foretell([4, 5])
        for chosen in ((1, 0), (5, 6)):
            pool.choose(chosen)
            assert all(pool.touch(expert) for expert in chosen)
        pool.settle()
    counts = pool.counts()
    assert (counts["predicted"], counts["foreseen"], counts["chosen"]) == (20, 15, 20)


def test_what_a_router_named_is_read_ahead_and_nothing_else_of_its_layer() -> None:
    pool = small_pool(2, 4, 4)
    pool.set(PoolKnob.RUNS, 0)
    pool.set(PoolKnob.RUNS, 4)
    assert set(pool.states()) == {ExpertState.ABSENT}
    reader = ReadAhead(pool)
    pool.begin_pass()
    pool.foretell([5, 7])
    pool.choose([])
    assert pool.counts()["predicted"] == 2
    pool.choose([0])
    wait_for(lambda: pool.counts()["ahead"] == 2)
    reader.close()
    present = [at for at, state in enumerate(pool.states()) if state is ExpertState.PRESENT]
    assert present == [5, 7]
    pool.choose([5, 6])
    assert pool.touch(5)
    assert pool.touch(6)
    counts = pool.counts()
    assert (counts["foreseen"], counts["chosen"]) == (1, 3)
    assert (counts["hidden"], counts["hits"], counts["misses"] + counts["late"]) == (1, 1, 1)


def wait_for(holds: Callable[[], bool]) -> None:
    for _ in range(5000):
        if holds():
            return
        time.sleep(0.001)
    raise AssertionError("it did not come about")


def test_hits_are_counted_by_how_much_was_used_since() -> None:
    """A cache of two experts: the one used two ago is not in it any more."""
    pool = small_pool(1, 4, 4)
    pool.set(PoolKnob.CACHE_KB, 2 * pool.run_bytes // 1024)
    pool.begin_pass()
    for expert in (0, 1, 0, 1, 2, 0, 0):
        assert pool.touch(expert)
    counts = pool.counts()
    assert (counts["hits"], counts["cached"]) == (7, 3)


def test_a_plan_in_constant_time_asks_no_router_early() -> None:
    module = schedule_module(decoder(), None, is_constant_time=True).module
    assert Op.EXPERT_FORESEE not in module.ops
    constant_time(module)
    asking = schedule_module(decoder(), None).module
    assert Op.EXPERT_FORESEE in asking.ops
    with pytest.raises(UnsupportedOperatorError, match="EXPERT_FORESEE"):
        constant_time(asking)


def test_what_a_layer_does_not_choose_is_read_no_further() -> None:
    pool = small_pool(2, 4, 4)
    pool.set(PoolKnob.RUNS, 0)
    pool.set(PoolKnob.RUNS, 4)
    pool.set(PoolKnob.DELAY_US, 600_000_000)
    reader = ReadAhead(pool)
    pool.begin_pass()
    pool.foretell([1, 2, 3])
    wait_for(lambda: ExpertState.LOADING in pool.states())
    assert pool.states().count(ExpertState.QUEUED) == 2
    pool.choose([3])
    assert pool.states()[1:4] == [ExpertState.ABSENT, ExpertState.ABSENT, ExpertState.QUEUED]
    assert pool.counts()["dropped"] == 2
    assert pool.touch(3)
    reader.close()
    counts = pool.counts()
    assert (counts["ahead"], counts["foreseen"], counts["late"]) == (0, 1, 1)
