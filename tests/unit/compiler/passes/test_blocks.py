"""Blocks of one kind: what they are raised to, and that both sides compute the same."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compiler.errors import MalformedModelError, UnsupportedOperatorError
from compiler.kernels.program import Module
from compiler.quant.row_codes import I8
from compiler.quant.w8 import lies_on_grid
from tests.factories.onnx_blocks import (
    Block,
    GraphBuilder,
    block_model,
    elementwise_block,
    gemm_block,
    layer_norm_block,
    linear,
    mlp_block,
    native_moe_block,
    rms_block,
)
from tests.factories.onnx_models import graph_document, write_block, write_submission
from tests.factories.onnx_runs import block_difference, lowered


def operations(module: Module) -> list[str]:
    return [call.op.name for call in module.programs[0].calls]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (mlp_block, ["LINEAR_F32", "LINEAR_F32"]),
        (gemm_block, ["LINEAR_F32", "LINEAR_F32"]),
        (rms_block("reciprocal"), ["NORM"]),
        (rms_block("square"), ["NORM"]),
        (rms_block("power"), ["NORM"]),
        (rms_block("divide"), ["NORM"]),
        (rms_block("inverse"), ["NORM"]),
        (layer_norm_block, ["NORM"]),
        (elementwise_block, ["ADD", "UNARY", "MUL", "SUB", "DIV"]),
        (native_moe_block, ["ROUTE", "EXPERTS"]),
    ],
)
def test_it_raises_a_block_and_keeps_its_meaning(
    tmp_path: Path, block: Block, expected: list[str]
) -> None:
    directory = write_block(tmp_path, block)
    assert operations(lowered(directory).module) == expected
    assert block_difference(directory, tokens=1) < 1e-5
    assert block_difference(directory, tokens=7) < 1e-5


def test_it_fuses_bias_activation_and_residual(tmp_path: Path) -> None:
    module = lowered(write_block(tmp_path, mlp_block)).module
    first, second = module.programs[0].calls
    assert first.params["act"] == 1
    assert len(first.weights) == 2
    assert second.inputs[1] == module.programs[0].inputs["tensor"]


def test_it_stores_large_matrices_in_four_bits(tmp_path: Path) -> None:
    def block(b: GraphBuilder, x: str) -> str:
        return linear(b, linear(b, x, 32, 16), 16, 32)

    module = lowered(write_block(tmp_path, block, width=32)).module
    assert operations(module) == ["LINEAR", "LINEAR_F32"]
    assert [weight.kind for weight in module.weights] == ["w4", "f32", "f32", "f32"]


def test_it_stores_large_matrices_in_eight_bits_on_request(tmp_path: Path) -> None:
    def block(b: GraphBuilder, x: str) -> str:
        return linear(b, linear(b, x, 32, 16), 16, 32)

    model = block_model(block, width=32)
    document = graph_document(model) | {"quantise": "w8"}
    module = lowered(write_submission(tmp_path, {"model": model}, document)).module
    assert operations(module) == ["LINEAR_W8", "LINEAR_F32"]
    assert lies_on_grid(module.weights[0].array)
    assert block_difference(tmp_path, tokens=5) < 0.01


def test_it_keeps_matrices_that_a_file_made_from_bytes_as_codes(tmp_path: Path) -> None:
    def block(b: GraphBuilder, x: str) -> str:
        codes = b.const(b.rng.integers(-128, 128, (96, 64)), "int8")
        steps = b.const(b.rng.uniform(0.01, 0.02, 64))
        return b.op("MatMul", x, b.op("Mul", b.op("Cast", codes, to=1), steps))

    model = block_model(block, width=96)
    document = graph_document(model) | {"quantise": "none"}
    module = lowered(write_submission(tmp_path, {"model": model}, document)).module
    assert operations(module) == ["LINEAR_F32"]
    assert module.weights[0].layout == I8
    assert block_difference(tmp_path, tokens=5) < 1e-6


def test_it_does_not_fuse_what_others_read(tmp_path: Path) -> None:
    def block(b: GraphBuilder, x: str) -> str:
        h = linear(b, x, 8, 8, bias=False)
        return b.op("Add", b.op("Relu", h), h)

    directory = write_block(tmp_path, block)
    assert operations(lowered(directory).module) == ["LINEAR_F32", "UNARY", "ADD"]
    assert block_difference(directory, tokens=5) < 1e-5


def test_it_joins_and_cuts_columns(tmp_path: Path) -> None:
    def block(b: GraphBuilder, x: str) -> str:
        left = b.op("Slice", x, b.ints(0), b.ints(3), b.ints(2))
        right = b.op("Slice", x, b.ints(3), b.ints(8), b.ints(2))
        return b.op("Concat", b.op("Relu", right), left, axis=2)

    directory = write_block(tmp_path, block)
    expected = ["COLS_SLICE", "UNARY", "COLS_SLICE", "COLS_CONCAT"]
    assert operations(lowered(directory).module) == expected
    assert block_difference(directory, tokens=4) == 0.0


@pytest.mark.parametrize(
    ("wrong", "operator"),
    [
        (lambda b, x: b.op("ReduceMean", x, b.ints(1), keepdims=1), "ReduceMean"),
        (lambda b, x: b.op("Transpose", x, perm=[0, 2, 1]), "Transpose"),
        (lambda b, x: b.op("Softmax", x, axis=1), "Softmax"),
        (lambda b, x: b.op("MatMul", x, b.op("Transpose", x, perm=[0, 2, 1])), "MatMul"),
        (lambda b, x: b.op("LayerNormalization", x, b.weight(8), axis=1), "LayerNormalization"),
        (lambda b, x: b.op("Sub", b.weight(8), x), "Sub"),
        (lambda b, x: b.op("Relu", b.op("Erf", x)), "Erf"),
        (lambda b, x: b.op("Clip", x, b.const(0.0), b.const(6.0)), "Clip"),
    ],
)
def test_it_refuses_by_name_what_no_kernel_computes(
    tmp_path: Path, wrong: Callable[[GraphBuilder, str], str], operator: str
) -> None:
    with pytest.raises(UnsupportedOperatorError, match=f"operator {operator} ") as caught:
        lowered(write_block(tmp_path, wrong))
    assert f"node_{operator}" in str(caught.value)
    assert "rotary" in caught.value.hint


def rms_with(**changes: object) -> Block:
    """A normalisation with one thing wrong."""

    def build(b: GraphBuilder, x: str) -> str:
        power = b.op("Pow", x, b.const(changes.get("exponent", 2.0)))
        axes = b.ints(int(str(changes.get("axis", -1))))
        mean = b.op("ReduceMean", power, axes, keepdims=1)
        root = b.op("Sqrt", b.op("Add", mean, b.const(1e-5)))
        other = b.op("Relu", x) if changes.get("other") else x
        return b.op("Mul", b.op("Mul", other, b.op("Reciprocal", root)), b.weight(8))

    return build


@pytest.mark.parametrize("change", [{"exponent": 3.0}, {"axis": 1}, {"other": True}])
def test_it_does_not_take_other_arithmetic_for_a_norm(
    tmp_path: Path, change: dict[str, object]
) -> None:
    with pytest.raises(UnsupportedOperatorError):
        lowered(write_block(tmp_path, rms_with(**change)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda b, x: linear(
                b, b.op("Concat", *[x] * 60, *[b.op("Relu", x)] * 60, axis=2), 960, 8
            ),
            r"operator Concat \(node node_Concat_\d+\): COLS_CONCAT takes 2 to 64",
        ),
        (
            lambda b, x: b.op("Softmax", linear(b, linear(b, x, 8, 8200), 8200, 8), axis=-1),
            r"node node_\w+\): linear over 8200 elements, at most 8192",
        ),
    ],
)
def test_it_names_the_node_that_exceeds_a_kernel(
    tmp_path: Path, wrong: Callable[[GraphBuilder, str], str], message: str
) -> None:
    with pytest.raises(UnsupportedOperatorError, match=message):
        lowered(write_block(tmp_path, wrong))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_it_refuses_weights_that_are_not_finite(tmp_path: Path, number: float) -> None:
    def block(b: GraphBuilder, x: str) -> str:
        weight = np.eye(8, dtype=np.float32)
        weight[3, 4] = number
        return b.op("MatMul", x, b.const(weight))

    with pytest.raises(MalformedModelError, match="NaN or infinity"):
        lowered(write_block(tmp_path, block))
