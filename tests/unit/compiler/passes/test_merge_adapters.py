"""Adapters become part of the weights beside them, if a submission asks for it and they can."""

from pathlib import Path

import numpy as np
import pytest

from compiler.errors import MalformedModelError
from compiler.frontend.pipeline_json import read_pipeline
from compiler.kernels.merged import Merged, stacked
from compiler.kernels.program import Module, Op
from tests.factories.onnx_adapters import ask_to_merge
from tests.factories.onnx_blocks import Block, GraphBuilder, linear
from tests.factories.onnx_models import (
    TinyShape,
    attention,
    merge_heads,
    split_heads,
    write_block,
)
from tests.factories.onnx_runs import block_difference, lowered
from tests.unit.compiler.passes.test_adapters import RANK, WIDTH, adapted


def merged(folder: Path, block: Block) -> Module:
    """Lower a block that asks for merged adapters; it computes what the file says."""
    directory = ask_to_merge(write_block(folder, block, width=WIDTH))
    assert block_difference(directory, tokens=5) <= 1e-5
    return lowered(directory).module


def linears(module: Module) -> int:
    return sum(call.op in (Op.LINEAR, Op.LINEAR_F32) for call in module.programs[0].calls)


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("branches", [1, 2])
def test_every_branch_goes(tmp_path: Path, scale: float | None, branches: int) -> None:
    module = merged(tmp_path, adapted(scale, branches))
    assert linears(module) == 3
    assert {w.section for w in module.weights} == {"weights.shared"}
    found = [w for w in module.weights if w.merged is not None]
    assert [w.merged.left.shape[1] for w in found if w.merged] == 2 * [branches * RANK]
    for weight in found:
        assert weight.merged is not None
        wanted = weight.merged.base + weight.merged.left @ weight.merged.right
        np.testing.assert_allclose(weight.array, wanted, atol=1e-6)


def branch(b: GraphBuilder, x: str) -> str:
    """The product of an adapter with `x`."""
    return b.op("MatMul", b.op("MatMul", x, b.weight(WIDTH, RANK)), b.weight(RANK, WIDTH))


def divided(b: GraphBuilder, x: str) -> str:
    base = linear(b, x, WIDTH, WIDTH)
    return b.op("Add", base, b.op("Div", branch(b, x), b.const(4.0)))


def activated_sum(b: GraphBuilder, x: str) -> str:
    return b.op("Relu", b.op("Add", branch(b, x), linear(b, x, WIDTH, WIDTH)))


@pytest.mark.parametrize("block", [divided, activated_sum])
def test_it_merges_scales_and_sums_of_other_forms(tmp_path: Path, block: Block) -> None:
    assert linears(merged(tmp_path, block)) == 1


def read_twice(b: GraphBuilder, x: str) -> str:
    base = linear(b, x, WIDTH, WIDTH)
    return b.op("Mul", b.op("Relu", base), b.op("Add", b.op("Sigmoid", base), branch(b, x)))


def sparse(b: GraphBuilder, x: str) -> str:
    weight = b.rng.standard_normal((WIDTH, WIDTH))
    weight[:, : WIDTH // 2] = 0
    return b.op("Add", b.op("MatMul", x, b.const(weight)), branch(b, x))


def scaled_by_columns(b: GraphBuilder, x: str) -> str:
    scaled = b.op("Mul", branch(b, x), b.weight(WIDTH))
    return b.op("Add", linear(b, x, WIDTH, WIDTH), scaled)


@pytest.mark.parametrize("block", [read_twice, sparse, scaled_by_columns])
def test_it_leaves_what_it_cannot_merge(tmp_path: Path, block: Block) -> None:
    module = merged(tmp_path, block)
    assert linears(module) == 3
    assert all(weight.merged is None for weight in module.weights)


def attended(b: GraphBuilder, x: str) -> str:
    """One head of attention, an adapter beside the queries and one beside the values."""
    shape = TinyShape(width=WIDTH, heads=2, kv_heads=2)
    parts = [linear(b, x, WIDTH, WIDTH) for _ in range(3)]
    for at in (0, 2):
        parts[at] = b.op("Add", parts[at], branch(b, x))
    q, k, v = (split_heads(b, part, shape) for part in parts)
    return merge_heads(b, attention(b, q, k, v, shape), shape)


def test_queries_keys_and_values_become_one_layer_with_both_adapters(tmp_path: Path) -> None:
    module = merged(tmp_path, attended)
    assert linears(module) == 1
    (weight,) = (w for w in module.weights if w.kind == "w4")
    assert weight.merged is not None
    assert weight.merged.left.shape == (3 * WIDTH, 2 * RANK)
    assert not weight.merged.left[WIDTH : 2 * WIDTH].any()
    np.testing.assert_allclose(weight.array, weight.merged.values(), atol=1e-6)


def test_layers_side_by_side_stack_their_adapters() -> None:
    rng = np.random.default_rng(7)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    parts = [
        Merged.nothing(draw(4, 6)).plus(draw(4, 2), draw(2, 6)),
        Merged.nothing(draw(3, 6)),
        Merged.nothing(draw(5, 6)).plus(draw(5, 1), draw(1, 6)).plus(draw(5, 2), draw(2, 6)),
    ]
    one = stacked(parts)
    assert one.left.shape == (12, 5)
    np.testing.assert_array_equal(one.values(), np.concatenate([p.values() for p in parts]))


def test_it_refuses_another_word(tmp_path: Path) -> None:
    path = ask_to_merge(write_block(tmp_path, adapted(), width=WIDTH)) / "pipeline.json"
    assert read_pipeline(tmp_path).merge_adapters
    path.write_text(path.read_text().replace('"merge"', '"melt"'))
    with pytest.raises(MalformedModelError, match="'adapters' is 'melt'"):
        read_pipeline(tmp_path)
