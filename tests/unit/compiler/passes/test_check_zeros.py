"""Which products get a run-time check, and that a check never changes what they compute."""

from pathlib import Path

import numpy as np
import pytest

from compiler.kernels.program import DENSE, Module, Op, call_params
from tests.factories.onnx_blocks import Block, GraphBuilder
from tests.factories.onnx_models import write_block
from tests.factories.onnx_runs import lowered, module_difference

WIDE = 256


def relu(b: GraphBuilder, x: str) -> str:
    """A product over what a ReLU left."""
    return b.op("MatMul", b.op("Relu", b.op("MatMul", x, b.weight(8, WIDE))), b.weight(WIDE, 64))


def unproved(b: GraphBuilder, x: str) -> str:
    """A product over masked channels behind a norm that does not keep their zeros."""
    kept = (np.arange(WIDE) < 96).astype(np.float32)
    masked = b.op("Mul", b.op("Relu", b.op("MatMul", x, b.weight(8, WIDE))), b.const(kept))
    scale, shift = b.const(np.ones(WIDE)), b.const(np.linspace(-0.1, 0.1, WIDE))
    normed = b.op("LayerNormalization", masked, scale, shift, axis=-1)
    return b.op("MatMul", normed, b.weight(WIDE, 64))


def full(b: GraphBuilder, x: str) -> str:
    """A product over operands without known zeros."""
    return b.op("MatMul", b.op("Tanh", b.op("MatMul", x, b.weight(8, WIDE))), b.weight(WIDE, 64))


def narrow(b: GraphBuilder, x: str) -> str:
    """A product over so few groups that looking does not pay."""
    return b.op("MatMul", b.op("Relu", b.op("MatMul", x, b.weight(8, 192))), b.weight(192, 64))


def pruned(b: GraphBuilder, x: str) -> str:
    """A product whose weight leaves out blocks, behind a ReLU."""
    live = np.kron(b.rng.random((WIDE // 4, 8)) < 0.2, np.ones((4, 32)))
    weight = b.rng.standard_normal(live.shape) * live
    return b.op("MatMul", b.op("Relu", b.op("MatMul", x, b.weight(8, WIDE))), b.const(weight))


def checks(module: Module) -> list[int]:
    return [
        int(call_params(call)["check"])
        for program in module.programs
        for call in program.calls
        if call.op is Op.LINEAR
    ]


@pytest.mark.parametrize(
    ("block", "expected"),
    [(relu, [7]), (unproved, [7]), (full, [0]), (narrow, [0]), (pruned, [0])],
)
def test_products_over_likely_zeros_are_checked(
    tmp_path: Path, block: Block, expected: list[int]
) -> None:
    directory = write_block(tmp_path, block)
    found = lowered(directory)
    assert checks(found.module)[-1:] == expected
    assert any(note.startswith("check-zeros: 1") for note in found.notes) == (expected != [0])
    assert module_difference(directory, found.module, tokens=5) < 1e-5


def test_a_group_that_loses_its_zeros_is_looked_at(tmp_path: Path) -> None:
    found = lowered(write_block(tmp_path, unproved))
    assert "forward: 1 x NORM > LINEAR: unproved -> dense" in "; ".join(found.notes)
    (call,) = [c for c in found.module.programs[0].calls if c.op is Op.LINEAR]
    assert (call_params(call)["norm"], call_params(call)["check"]) == (2, 7)


def test_a_weight_in_another_layout_has_no_check(tmp_path: Path) -> None:
    module = lowered(write_block(tmp_path, pruned)).module
    layouts = {weight.layout for weight in module.weights if weight.kind == "w4"}
    assert layouts - {DENSE}
    assert not any(checks(module))
