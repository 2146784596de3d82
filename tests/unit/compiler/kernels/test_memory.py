"""The arena: buffers overlap only when one is dead."""

from dataclasses import replace

import numpy as np
import pytest

from compiler.contract.plan import PlanError, parse_plan
from compiler.contract.plan_format import ALIGNMENT, BUFFER, HEADER, SECTION, WEIGHT, align
from compiler.emitters.memory import MemoryPlan, buffer_bytes, plan_memory
from compiler.emitters.placement import Block, Life, meet, most_alive, peak_of, place
from compiler.emitters.plan import emit_plan
from compiler.kernels.program import ABSENT, Module, Op, Program
from compiler.quant.module import pack_module
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.modules import ModuleBuilder, single_call, small_decoder


def lives(program: Program) -> dict[int, tuple[int, int]]:
    """Return first and last call of every buffer, found independently of the planner."""
    found: dict[int, tuple[int, int]] = {}
    end = len(program.calls)
    for buffer in {b for call in program.calls for b in (*call.inputs, *call.outputs)} - {ABSENT}:
        uses = [at for at, c in enumerate(program.calls) if buffer in (*c.inputs, *c.outputs)]
        first = -1 if buffer in program.inputs.values() else uses[0]
        found[buffer] = (first, end if buffer in program.outputs.values() else uses[-1])
    return found


def replaces(plan: MemoryPlan, result: int, operand: int) -> bool:
    return plan.in_place.get(result) == operand and plan.offsets[result] == plan.offsets[operand]


def check(module: Module) -> None:
    plan = plan_memory(module)
    for program in module.programs:
        alive = lives(program)
        for a, (a_first, a_last) in alive.items():
            for b, (b_first, b_last) in alive.items():
                if a < b and a_first <= b_last and b_first <= a_last:
                    if replaces(plan, b, a) and a_last == b_first:
                        continue
                    a_end = plan.offsets[a] + buffer_bytes(module.buffers[a])
                    b_end = plan.offsets[b] + buffer_bytes(module.buffers[b])
                    assert a_end <= plan.offsets[b] or b_end <= plan.offsets[a]
    for buffer in module.buffers:
        assert plan.offsets[buffer.id] % ALIGNMENT == 0
        assert plan.offsets[buffer.id] + buffer_bytes(buffer) <= plan.arena_bytes


def test_it_places_live_buffers_apart() -> None:
    check(small_decoder())
    check(small_decoder(swiglu=True, see=False))


def test_it_reuses_dead_memory() -> None:
    module = small_decoder()
    total = sum(buffer_bytes(buffer) for buffer in module.buffers)
    assert plan_memory(module).arena_bytes < total / 4


def test_it_is_deterministic() -> None:
    module = small_decoder()
    packed = pack_module(module).packed
    first = emit_plan(module, weights_packed=packed)
    second = emit_plan(small_decoder(), weights_packed=pack_module(small_decoder()).packed)
    assert first == second


def test_it_keeps_unread_inputs_apart_to_the_end() -> None:
    ports = [(2, 4, "f32"), (2, 4, "f32")]
    module = single_call(Op.ADD, ports, [(2, 4, "f32")])
    unread = replace(module.programs[0], calls=())
    check(replace(module, programs=(replace(unread, outputs={}),)))
    offsets = plan_memory(replace(module, programs=(replace(unread, outputs={}),))).offsets
    assert offsets[0] != offsets[1]


def in_place_chain() -> Module:
    """x -> NORM -> UNARY -> ADD with itself, and a second reader of the first result."""
    b = ModuleBuilder()
    x, h, u, y, z = (b.buffer(None, 16) for _ in range(5))
    b.call(Op.NORM, [x], [h], [b.vector(16)], kind=0, eps=1e-6)
    b.call(Op.UNARY, [h], [u], kind=0)
    b.call(Op.ADD, [h, u], [y])
    b.call(Op.MUL, [y, y], [z])
    b.program("run", {"x0": x}, {"y0": z})
    return b.module()


def test_it_writes_over_operands_that_die() -> None:
    module = in_place_chain()
    plan = plan_memory(module)
    check(module)
    assert dict(plan.in_place) == {1: 0, 3: 1, 4: 3}
    assert plan.arena_bytes == plan.max_live_bytes == 2 * buffer_bytes(module.buffers[0])


@pytest.mark.parametrize("target", native_targets())
def test_it_computes_the_same_bits_in_place(target: str) -> None:
    case = Case.of(in_place_chain())
    x = np.random.default_rng(1).standard_normal((5, 16)).astype(np.float32)
    with case.native(target) as plan:
        assert raw(plan.run("run", {"x0": x})) == raw(case.simulator().run("run", {"x0": x}))


def test_the_device_refuses_a_result_over_a_living_operand() -> None:
    """`parse_plan` finds lifetimes by itself: h is read after u would have replaced it."""
    module = in_place_chain()
    forced = plan_memory(module)
    offsets = {**forced.offsets, 2: forced.offsets[1]}
    with pytest.raises(PlanError, match="overlaps a live buffer"):
        parse_plan(encode_with(module, replace(forced, offsets=offsets)))
    parse_plan(encode_with(module, forced))


def test_the_device_refuses_a_result_over_an_operand_of_another_kernel() -> None:
    """CONV2D, LINEAR and the like read an operand after they began to write."""
    b = ModuleBuilder()
    x, y = b.buffer(None, 32), b.buffer(None, 32)
    b.call(Op.LINEAR, [x], [y], [b.w4(32, 32)])
    b.program("run", {"x0": x}, {"y0": y})
    module = b.module()
    forced = replace(plan_memory(module), offsets={0: 0, 1: 0})
    with pytest.raises(PlanError, match="overlaps a live buffer"):
        parse_plan(encode_with(module, forced))


def encode_with(module: Module, memory: MemoryPlan) -> bytes:
    """Return plan bytes with the buffers where `memory` says."""
    emitted = emit_plan(module, weights_packed=pack_module(module).packed)
    data = bytearray(emitted.plan_bytes)
    sections, weights = len(emitted.sections), len(module.weights)
    start = HEADER.layout.size + sections * SECTION.layout.size + weights * WEIGHT.layout.size
    for buffer in module.buffers:
        at = start + buffer.id * BUFFER.layout.size
        row = list(BUFFER.layout.unpack_from(data, at))
        row[4] = memory.offsets[buffer.id]
        BUFFER.layout.pack_into(data, at, *row)
    return bytes(data)


def random_blocks(seed: int, count: int) -> list[Block]:
    """Sizes over three orders of magnitude, most of them short lived, as activations are."""
    random = np.random.default_rng(seed)
    blocks = []
    for _ in range(count):
        first = int(random.integers(0, count))
        length = (
            int(random.geometric(0.2)) if random.random() < 0.9 else int(random.integers(count))
        )
        size = 64 * int(np.exp(random.uniform(0, 7)))
        blocks.append(Block(size, (Life(0, first, first + length),)))
    return blocks


@pytest.mark.parametrize("count", [8, 40, 120])
def test_random_intervals_stay_within_five_percent_of_the_bound(count: int) -> None:
    for seed in range(12):
        blocks = random_blocks(seed, count)
        offsets = place(blocks)
        spans = list(zip(offsets, blocks, strict=True))
        for a, (a_at, some) in enumerate(spans):
            for b_at, other in spans[:a]:
                apart = a_at + some.size <= b_at or b_at + other.size <= a_at
                assert apart or not meet(some, other)
        alive = [
            sum(b.size for b in blocks if b.lives[0].first <= t <= b.lives[0].last)
            for t in range(2 * count)
        ]
        assert most_alive(blocks) == max(alive)
        assert max(alive) <= peak_of(blocks, offsets) <= 1.05 * max(alive), seed


def test_models_stay_within_five_percent_of_the_bound() -> None:
    for module in (small_decoder(), small_decoder(1, swiglu=True), small_decoder(2, see=False)):
        plan = plan_memory(module)
        assert plan.max_live_bytes <= plan.arena_bytes <= 1.05 * plan.max_live_bytes
        for program in module.programs:
            memory = plan.programs[program.name]
            assert memory.max_live_bytes <= memory.arena_bytes <= plan.arena_bytes
            assert memory.max_live_bytes == most_live(module, plan, program)
        assert plan.kv_bytes == 2 * 4 * 2 * 48 * 64


def most_live(module: Module, plan: MemoryPlan, program: Program) -> int:
    """Return the most aligned bytes alive at one call, from the independent lifetimes."""
    alive = lives(program)
    most = 0
    for at in range(-1, len(program.calls) + 1):
        held = {b for b, (first, last) in alive.items() if first <= at <= last}
        replaced = {plan.in_place[b] for b in held if alive[b][0] == at and b in plan.in_place}
        most = max(most, sum(align(buffer_bytes(module.buffers[b])) for b in held - replaced))
    return most
