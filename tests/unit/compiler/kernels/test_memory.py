"""The arena: buffers overlap only when one is dead."""

from dataclasses import replace

from compiler.contract.plan_format import ALIGNMENT
from compiler.emitters.memory import buffer_bytes, plan_memory
from compiler.emitters.plan import emit_plan
from compiler.kernels.program import ABSENT, Module, Op, Program
from compiler.quant.module import pack_module
from tests.factories.modules import single_call, small_decoder


def lives(program: Program) -> dict[int, tuple[int, int]]:
    """Return first and last call of every buffer, found independently of the planner."""
    found: dict[int, tuple[int, int]] = {}
    end = len(program.calls)
    for buffer in {b for call in program.calls for b in (*call.inputs, *call.outputs)} - {ABSENT}:
        uses = [at for at, c in enumerate(program.calls) if buffer in (*c.inputs, *c.outputs)]
        first = -1 if buffer in program.inputs.values() else uses[0]
        found[buffer] = (first, end if buffer in program.outputs.values() else uses[-1])
    return found


def check(module: Module) -> None:
    plan = plan_memory(module)
    for program in module.programs:
        alive = lives(program)
        for a, (a_first, a_last) in alive.items():
            for b, (b_first, b_last) in alive.items():
                if a < b and a_first <= b_last and b_first <= a_last:
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
