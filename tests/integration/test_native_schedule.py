"""The schedule on the tape: native plan and simulator do it in the same order, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest

from compiler.contract.native_errors import ExpertAbsentError
from compiler.contract.operations import ExpertEvent, Op
from compiler.emitters.memory import page_blocks, plan_memory
from compiler.emitters.placement import most_alive
from compiler.emitters.schedule import obey, schedule_ops
from compiler.kernels.program import Module, NormKind
from tests.factories.kernels import Case, ids, native_targets, raw
from tests.factories.modules import DecoderBuilder, small_decoder
from tests.integration.test_native_fused import moe

LIKELY = {"see": {0: (1,), 1: (0, 2)}, "step": {0: (3,), 1: (1, 2)}}
TARGETS = native_targets()
Event = tuple[ExpertEvent, int]


def planned(module: Module) -> Module:
    return obey(module, schedule_ops(module, LIKELY), LIKELY)


def fused() -> Module:
    module = moe(NormKind.RMS, 0, residual=True, fused=True)
    return obey(module, schedule_ops(module))


def step_inputs(tokens: int) -> dict[str, np.ndarray]:
    return {"token_ids": ids(range(3, 3 + tokens)), "positions": ids(range(tokens))}


class Log:
    """A pager that keeps what it is told, and lacks what it is told to lack."""

    def __init__(self, missing: Event | None = None) -> None:
        self.events: list[Event] = []
        self.missing = missing

    def __call__(self, event: ExpertEvent, weight: int) -> bool:
        self.events.append((event, weight))
        return (event, weight) != self.missing


@pytest.mark.parametrize("target", TARGETS)
def test_it_runs_as_scheduled_and_computes_the_same_bits(target: str) -> None:
    module = small_decoder(5)
    plain, case = Case.of(module), Case.of(planned(module))
    simulator, simulated = case.simulator(), Log()
    simulator.set_pager(simulated)
    with plain.native(target) as before, case.native(target) as native:
        told = Log()
        native.set_pager(told)
        for tokens in (3, 1, 1):
            values = {role: array.tobytes() for role, array in step_inputs(tokens).items()}
            expected = raw(before.run("step", values))
            assert raw(native.run("step", values)) == expected
            assert raw(simulator.run("step", values)) == expected
    assert told.events == simulated.events
    kinds = [event for event, _ in told.events]
    first = [kinds.index(event) for event in (ExpertEvent.PREFETCH, ExpertEvent.LOAD)]
    assert first == sorted(first)
    assert kinds.count(ExpertEvent.PREFETCH) == 3 * 2
    assert kinds.count(ExpertEvent.LOAD) == 3 * 8
    used = [n for n, (event, _) in enumerate(told.events) if event is ExpertEvent.USE]
    for n in used:
        assert (ExpertEvent.LOAD, told.events[n][1]) in told.events[:n]


@pytest.mark.parametrize("target", TARGETS)
def test_a_fused_layer_tells_the_pager_too(target: str) -> None:
    case = Case.of(fused())
    x = np.random.default_rng(2).standard_normal((4, 24)).astype(np.float32)
    simulator, simulated, told = case.simulator(), Log(), Log()
    simulator.set_pager(simulated)
    expected = raw(simulator.run("run", {"x": x.tobytes()}))
    with case.native(target) as native:
        native.set_pager(told)
        assert raw(native.run("run", {"x": x.tobytes()})) == expected
    assert told.events == simulated.events
    chosen = np.frombuffer(expected["index"], np.int32)
    assert sum(event is ExpertEvent.USE for event, _ in told.events) == len(np.unique(chosen))


def test_an_absent_expert_ends_the_run_and_leaves_the_cache() -> None:
    case = Case.of(planned(small_decoder(5)))
    values = {role: array.tobytes() for role, array in step_inputs(2).items()}
    log = Log()
    simulator = case.simulator()
    simulator.set_pager(log)
    expected = raw(simulator.run("step", values))
    events = [item for item in log.events if item[0] is not ExpertEvent.PREFETCH]
    with case.native(TARGETS[0]) as native:
        for missing in (events[0], events[-1]):
            native.set_pager(Log(missing))
            with pytest.raises(ExpertAbsentError):
                native.run("step", values)
            assert native.kv_length == 0
            other = case.simulator()
            other.set_pager(Log(missing))
            with pytest.raises(ExpertAbsentError):
                other.run("step", values)
        ignored = Log(next(item for item in log.events if item[0] is ExpertEvent.PREFETCH))
        native.set_pager(ignored)
        assert raw(native.run("step", values)) == expected


def test_what_a_pager_raises_comes_out() -> None:
    def broken(event: ExpertEvent, weight: int) -> bool:
        raise LookupError(f"{event.name} {weight}")

    case = Case.of(planned(small_decoder(5)))
    values = {role: array.tobytes() for role, array in step_inputs(1).items()}
    with case.native(TARGETS[0]) as native:
        native.set_pager(broken)
        with pytest.raises(LookupError, match="PREFETCH"):
            native.run("step", values)
        native.set_pager(Log())
        native.run("step", values)


def test_the_simulator_refuses_an_expert_before_its_load_step() -> None:
    """Its own check, beside the one on the order of the tape: run a tape made wrong afterwards."""
    case = Case.of(planned(small_decoder(5)))
    simulator = case.simulator()
    program = simulator._programs["step"]
    load = next(at for at, call in enumerate(program.calls) if call.op is Op.EXPERT_LOAD)
    late = (*program.calls[:load], program.calls[load + 1], program.calls[load])
    calls = (*late, *program.calls[load + 2 :])
    simulator._programs["step"] = replace(program, calls=calls)
    order = [*range(load), load + 1, load, *range(load + 2, len(calls))]
    simulator._params["step"] = [simulator._params["step"][at] for at in order]
    with pytest.raises(ExpertAbsentError, match="before its load step"):
        simulator.run_arrays("step", step_inputs(2))


def test_the_memory_bound_counts_what_the_schedule_holds() -> None:
    module = planned(small_decoder(5))
    stored = {weight.id: 64 * (1 + weight.id) for weight in module.weights}
    memory = plan_memory(module, stored).programs["step"]
    number, step = next((n, p) for n, p in enumerate(module.programs) if p.name == "step")
    held = []
    for at, call in enumerate(step.calls):
        if call.op is Op.EXPERTS:
            pages = [stored[a] + stored[b] for a, b in zip(*[iter(call.weights)] * 2, strict=True)]
            ahead = next((c for c in step.calls[:at] if c.op is Op.EXPERT_PREFETCH), None)
            assert ahead is not None
            listed = sum(stored[weight] for weight in ahead.weights)
            held.append(sum(pages) + (listed if not held else 0))
    assert memory.page_bytes == max(held)
    assert memory.expert_bytes > memory.page_bytes > 0
    blocks = page_blocks(module, step, number, stored)
    assert most_alive(blocks) == memory.page_bytes
    assert memory.max_live_bytes < memory.peak_bytes <= memory.max_live_bytes + memory.page_bytes
    assert plan_memory(small_decoder(5), stored).programs["step"].page_bytes == 0


@pytest.mark.parametrize(("max_tokens", "pages"), [(1, 4), (2, 6), (16, 10)])
def test_rows_bound_the_experts_that_a_call_can_choose(max_tokens: int, pages: int) -> None:
    """Two prefetched for the layer ahead, and two more for each row of eight experts in all."""
    builder = DecoderBuilder(experts=8, max_tokens=max_tokens)
    builder.add_step()
    module = planned(builder.module())
    memory = plan_memory(module, {weight.id: 100 for weight in module.weights}).programs["step"]
    assert memory.page_bytes == 2 * 100 * pages
