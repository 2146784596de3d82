"""The decoder of the decode benchmark, small: what the compiler makes of it, and how it runs."""

from pathlib import Path

import pytest

from benchmarks.decode_graph import Shape
from benchmarks.decode_plan import PlanDecoder, lowered, variant, write_plan
from compiler.contract.operations import Op
from compiler.driver.native_check import host_target
from compiler.kernels.program import Module

SMALL = Shape(
    layers=3, width=64, heads=4, kv_heads=2, experts=4, hidden=96, vocabulary=64, context=48
)
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def module() -> Module:
    return lowered(SMALL, len(PROMPT))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = host_target()
    if target is None:
        pytest.skip("no target runs on this machine")
    path = tmp_path_factory.mktemp("decode") / "plan"
    write_plan(SMALL, target.id, len(PROMPT), path)
    return path


def said(decoder: PlanDecoder, count: int = 12) -> list[int]:
    decoder.forget()
    tokens = [decoder.step(PROMPT)]
    while len(tokens) < count:
        tokens.append(decoder.step(tokens[-1:]))
    return tokens


def test_a_layer_is_four_calls(module: Module) -> None:
    step = next(program for program in module.programs if program.name == "step")
    layer = [Op.LINEAR, Op.ATTENTION, Op.LINEAR, Op.EXPERT_LOAD, Op.MOE_LAYER]
    calls = [call.op for call in step.calls if call.op is not Op.EXPERT_FORESEE]
    assert calls[: 1 + 2 * len(layer)] == [Op.EMBED, *layer, *layer]
    assert [call.op for call in step.calls].count(Op.EXPERT_FORESEE) == SMALL.layers
    assert step.calls[-1].op is Op.ARGMAX


def test_experts_have_their_full_width(module: Module) -> None:
    shapes = {w.array.shape for w in module.weights if w.section.startswith("expert.")}
    assert shapes == {(2 * SMALL.hidden, SMALL.width), (SMALL.width, SMALL.hidden)}


def test_variants_take_one_expert_and_all(module: Module) -> None:
    found = {
        program.name: {call.params["k"] for call in program.calls if call.op is Op.MOE_LAYER}
        for program in module.programs
    }
    assert found == {"step": {2}, variant(1): {1}, variant(SMALL.experts): {SMALL.experts}}


def test_a_token_reads_what_the_shape_says(module: Module) -> None:
    step = next(program for program in module.programs if program.name == "step")
    reads = [call for call in step.calls if call.op is not Op.EXPERT_FORESEE]
    weights = [module.weights[at] for call in reads for at in call.weights if at >= 0]
    packed = sum(w.array.size for w in weights if w.kind == "w4")
    idle = SMALL.layers * (SMALL.experts - SMALL.top) * 3 * SMALL.width * SMALL.hidden
    loads = sum(
        module.weights[at].array.size
        for call in step.calls
        if call.op is Op.EXPERT_LOAD
        for at in call.weights
    )
    routers = 4 * SMALL.layers * SMALL.experts * SMALL.width
    assert SMALL.read_bytes == (packed - loads - idle) * 17 // 32 + routers


def test_threads_and_repetition_say_the_same(folder: Path) -> None:
    one, two = PlanDecoder(folder, 1), PlanDecoder(folder, 2)
    assert said(one) == said(one) == said(two)


def test_share_of_one_expert_is_spread_over_the_tokens(folder: Path) -> None:
    ran: list[str] = []
    decoder = PlanDecoder(folder, 1, single=0.5)
    run = decoder.plan.run
    decoder.plan.run = lambda program, inputs: (ran.append(program), run(program, inputs))[1]  # type: ignore[method-assign]
    said(decoder, 11)
    assert ran == ["step", *["step", variant(1)] * 5]
