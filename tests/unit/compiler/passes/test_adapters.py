"""Adapters stay a branch of the plan, in sections of their own; an update touches only those."""

from pathlib import Path

import pytest

from compiler.emitters.plan import emit_plan
from compiler.kernels.program import Module, Op
from compiler.quant.module import pack_module
from tests.factories.onnx_blocks import Block, GraphBuilder, linear
from tests.factories.onnx_models import write_block
from tests.factories.onnx_runs import block_difference, lowered

WIDTH, RANK = 32, 4


def adapted(scale: float | None = 0.5, branches: int = 1, *, changed: float = 0.0) -> Block:
    """Two layers with low-rank branches, then the layer that joins them."""

    def build(b: GraphBuilder, x: str) -> str:
        for layer in range(2):
            base = linear(b, x, WIDTH, WIDTH, bias=layer == 1)
            for _ in range(branches):
                down = b.const(b.rng.standard_normal((WIDTH, RANK)) * 0.3 + changed)
                up = b.const(b.rng.standard_normal((RANK, WIDTH)) * 0.3 + changed)
                branch = b.op("MatMul", b.op("MatMul", x, down), up)
                if scale is not None:
                    branch = b.op("Mul", branch, b.const(scale))
                base = b.op("Add", base, branch) if layer else b.op("Add", branch, base)
            x = b.op("Relu", base)
        return linear(b, x, WIDTH, WIDTH)

    return build


def compiled(folder: Path, block: Block) -> tuple[Module, Path]:
    directory = write_block(folder, block, width=WIDTH)
    return lowered(directory).module, directory


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("branches", [1, 2])
def test_it_keeps_a_branch_of_three_layers(tmp_path: Path, scale: float, branches: int) -> None:
    module, directory = compiled(tmp_path, adapted(scale, branches))
    ops = [call.op for call in module.programs[0].calls if call.op in (Op.LINEAR, Op.LINEAR_F32)]
    assert len(ops) == 2 * (1 + 2 * branches) + 1
    sections = {w.section for w in module.weights}
    assert sections == {"weights.shared", *(f"adapter.{n}" for n in range(branches))}
    for n in range(branches):
        shapes = [w.array.shape for w in module.weights if w.section == f"adapter.{n}"]
        assert sorted(shapes) == sorted([(RANK, WIDTH), (WIDTH, RANK)] * 2)
    assert block_difference(directory, tokens=5) <= 1e-5


def test_an_update_of_the_adapter_touches_no_other_section(tmp_path: Path) -> None:
    old, new = (
        emit(compiled(tmp_path / str(at), adapted(changed=change))[0])
        for at, change in enumerate((0.0, 0.01))
    )
    assert {name for name in old if old[name] != new[name]} == {"adapter.0"}


def emit(module: Module) -> dict[str, bytes]:
    emitted = emit_plan(module, weights_packed=pack_module(module).packed)
    return {**emitted.sections, "plan": emitted.plan_bytes}


def bottleneck(b: GraphBuilder, x: str) -> str:
    """Narrow and wide again, but beside nothing: a layer of the model, no adapter."""
    h = b.op("MatMul", b.op("MatMul", x, b.weight(WIDTH, RANK)), b.weight(RANK, WIDTH))
    return b.op("Add", x, h)


def activated(b: GraphBuilder, x: str) -> str:
    base = linear(b, x, WIDTH, WIDTH, bias=False)
    h = b.op("Relu", b.op("MatMul", x, b.weight(WIDTH, RANK)))
    return b.op("Add", base, b.op("MatMul", h, b.weight(RANK, WIDTH)))


def other_input(b: GraphBuilder, x: str) -> str:
    base = linear(b, b.op("Relu", x), WIDTH, WIDTH, bias=False)
    h = b.op("MatMul", b.op("MatMul", x, b.weight(WIDTH, RANK)), b.weight(RANK, WIDTH))
    return b.op("Add", base, h)


@pytest.mark.parametrize("block", [bottleneck, activated, other_input])
def test_it_takes_no_layer_for_an_adapter(tmp_path: Path, block: Block) -> None:
    module, _ = compiled(tmp_path, block)
    assert {w.section for w in module.weights} == {"weights.shared"}
