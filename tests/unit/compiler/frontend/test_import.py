"""From ONNX nodes to IR: order, constants, shapes, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from compiler.dialects.text import parse_module, print_module
from compiler.errors import MalformedModelError, UnsupportedOperatorError
from compiler.frontend import import_pipeline
from compiler.passes.base import ImportedPipeline
from compiler.passes.pipeline import lower_pipeline
from tests.factories.onnx_blocks import GraphBuilder, block_model, mlp_block, native_moe_block
from tests.factories.onnx_models import (
    disguise_submission,
    graph_document,
    tiny_document,
    tiny_models,
    write_block,
    write_submission,
    write_tiny,
)


def imported(
    tmp_path: Path, build: Callable[[GraphBuilder, str], str], opset: int = 18
) -> ImportedPipeline:
    return import_pipeline(write_block(tmp_path / "block", build, opset=opset))


def text_of(tmp_path: Path, build: Callable[[GraphBuilder, str], str]) -> str:
    return print_module(imported(tmp_path, build).module)


def test_it_marks_arguments_and_results_with_roles(tmp_path: Path) -> None:
    text = print_module(import_pipeline(write_tiny(tmp_path)).module)
    assert '{sp.role = "causal_mask"}' in text
    assert '{sp.role = "present_value"}' in text
    assert "unused" not in text


def test_its_text_reads_back(tmp_path: Path) -> None:
    text = print_module(import_pipeline(write_tiny(tmp_path)).module)
    assert print_module(parse_module(text)) == text


@pytest.mark.parametrize("seed", range(5))
def test_it_gives_the_same_text_for_renamed_and_reordered_files(tmp_path: Path, seed: int) -> None:
    models, document = tiny_models(), tiny_document()
    plain = import_pipeline(write_submission(tmp_path / "plain", models, document))
    disguised = disguise_submission(models, document, seed)
    other = import_pipeline(write_submission(tmp_path / "other", *disguised))
    assert print_module(other.module) == print_module(plain.module)


def test_it_leaves_names_out_of_the_text(tmp_path: Path) -> None:
    text = text_of(tmp_path, mlp_block)
    assert "node_" not in text
    assert "v0_" not in text


def test_it_names_equal_constants_once(tmp_path: Path) -> None:
    def build(b: GraphBuilder, x: str) -> str:
        first, second = b.const(np.ones(8)), b.const(np.ones(8))
        return b.op("Mul", b.op("Add", x, first), second)

    assert text_of(tmp_path, build).count("sp.constant") == 1


def test_it_resolves_shape_arithmetic(tmp_path: Path) -> None:
    def build(b: GraphBuilder, x: str) -> str:
        shape = b.op("Shape", x)
        rows = b.op("Gather", shape, b.ints(1), axis=0)
        half = b.op("Div", b.op("Gather", shape, b.ints(2), axis=0), b.ints(2))
        split = b.op("Reshape", x, b.op("Concat", b.ints(1), rows, b.ints(2), half, axis=0))
        return b.op("Reshape", b.op("Relu", split), shape)

    text = text_of(tmp_path, build)
    assert "tensor<1x?x2x4xf32" in text
    assert "Shape" not in text
    assert "sp.constant" not in text


def test_it_folds_constants(tmp_path: Path) -> None:
    def build(b: GraphBuilder, x: str) -> str:
        table = b.op("Transpose", b.weight(4, 8), perm=[1, 0])
        doubled = b.op("Mul", b.op("Cast", table, to=1), b.const(2.0))
        return b.op("MatMul", b.op("MatMul", x, doubled), b.weight(4, 8))

    assert text_of(tmp_path, build).count("sp.onnx") == 2


def test_it_folds_quantised_weights(tmp_path: Path) -> None:
    def build(b: GraphBuilder, x: str) -> str:
        codes = b.const(np.arange(64).reshape(8, 8) - 32, "int8")
        weight = b.op("DequantizeLinear", codes, b.const(np.full(8, 0.5)), axis=1)
        return b.op("MatMul", x, weight)

    done = imported(tmp_path, build)
    (table,) = done.constants.arrays.values()
    assert np.array_equal(table, (np.arange(64).reshape(8, 8) - 32) * np.float32(0.5))


def test_it_computes_half_precision_in_single(tmp_path: Path) -> None:
    def build(b: GraphBuilder, x: str) -> str:
        half = b.op("Cast", x, to=onnx.TensorProto.FLOAT16)
        product = b.op("MatMul", half, b.const(b.rng.standard_normal((8, 8)), "float16"))
        return b.op("Cast", product, to=onnx.TensorProto.FLOAT)

    assert "f16" not in text_of(tmp_path, build)


def test_it_expands_fills_of_run_time_size(tmp_path: Path) -> None:
    def build(b: GraphBuilder, x: str) -> str:
        zeros = b.op("ConstantOfShape", b.op("Shape", x))
        return b.op("Add", x, zeros)

    assert "sp.expand" in text_of(tmp_path, build)


def test_it_names_operator_node_and_what_is_supported(tmp_path: Path) -> None:
    def build(b: GraphBuilder, x: str) -> str:
        return b.op("MaxRoiPool", b.op("Relu", x), x, pooled_shape=[2, 2])

    with pytest.raises(
        UnsupportedOperatorError, match=r"operator MaxRoiPool \(node node_MaxRoiPool_\d\)"
    ) as e:
        imported(tmp_path, build)
    assert "GridSample" in e.value.hint
    assert e.value.code == "build.user.unsupported_op"


def branch(op: str, name: str) -> onnx.GraphProto:
    info = helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
    return helper.make_graph([helper.make_node(op, ["x"], [name])], name, [], [info])


def test_it_refuses_control_flow_that_the_run_decides(tmp_path: Path) -> None:
    def build(b: GraphBuilder, x: str) -> str:
        top = b.op("ReduceMax", x, keepdims=0)
        condition = b.op("Greater", top, b.const(0.0))
        branches = {"then_branch": branch("Relu", "yes"), "else_branch": branch("Exp", "no")}
        return b.op("If", condition, **branches)

    with pytest.raises(UnsupportedOperatorError, match=r"operator If .* known only at run time"):
        imported(tmp_path, build)


@pytest.mark.parametrize(("condition", "op"), [(True, "Relu"), (False, "Exp")])
def test_it_takes_the_branch_that_constants_decide(
    tmp_path: Path, condition: bool, op: str
) -> None:
    def build(b: GraphBuilder, x: str) -> str:
        branches = {"then_branch": branch("Relu", "yes"), "else_branch": branch("Exp", "no")}
        return b.op("If", b.const(condition, "bool"), **branches)

    text = text_of(tmp_path, build)
    assert f'op = "{op}"' in text
    assert ({"Relu", "Exp"} - {op}).pop() not in text


def test_it_unrolls_a_loop_with_a_known_number_of_trips(tmp_path: Path) -> None:
    def build(b: GraphBuilder, x: str) -> str:
        kinds = {"trip": onnx.TensorProto.INT64, "go": onnx.TensorProto.BOOL}
        inputs = [helper.make_tensor_value_info(name, kind, []) for name, kind in kinds.items()]
        inputs.append(helper.make_tensor_value_info("state", onnx.TensorProto.FLOAT, [None] * 3))
        nodes = [
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("Tanh", ["state"], ["next"]),
        ]
        outputs = [
            helper.make_tensor_value_info("on", onnx.TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", onnx.TensorProto.FLOAT, [None] * 3),
        ]
        body = helper.make_graph(nodes, "body", inputs, outputs)
        made = b.op("Loop", b.const(3, "int64"), b.const(True, "bool"), x, body=body)
        return b.op("Reshape", made, b.ints(1, -1, 8))

    assert text_of(tmp_path, build).count('op = "Tanh"') == 3


def test_it_ignores_unsupported_nodes_that_nothing_needs(tmp_path: Path) -> None:
    def build(b: GraphBuilder, x: str) -> str:
        b.op("NonZero", x)
        return b.op("Relu", x)

    assert "NonZero" not in text_of(tmp_path, build)


def test_it_refuses_unknown_domains(tmp_path: Path) -> None:
    model = block_model(native_moe_block)
    for node in model.graph.node:
        if node.op_type == "MoEExpert":
            node.domain = "elsewhere"
    model.opset_import.add(domain="elsewhere", version=1)
    directory = write_submission(tmp_path, {"model": model}, graph_document(model))
    with pytest.raises(UnsupportedOperatorError, match="elsewhere::MoEExpert"):
        import_pipeline(directory)


def test_it_refuses_data_that_depends_on_the_length(tmp_path: Path) -> None:
    def build(b: GraphBuilder, x: str) -> str:
        rows = b.op("Gather", b.op("Shape", x), b.const(1, "int64"), axis=0)
        steps = b.op("Range", b.const(0, "int64"), rows, b.const(1, "int64"))
        column = b.op("Unsqueeze", b.op("Cast", steps, to=1), b.ints(1))
        return b.op("Add", x, column)

    with pytest.raises(UnsupportedOperatorError, match="depends on the run-time length"):
        imported(tmp_path, build)


def test_it_refuses_shapes_that_do_not_fit(tmp_path: Path) -> None:
    def build(b: GraphBuilder, x: str) -> str:
        return b.op("Reshape", x, b.ints(1, -1, 5))

    with pytest.raises(MalformedModelError, match=r"operator Reshape \(node node_Reshape_0\)"):
        imported(tmp_path, build)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (("n", "s", 8), None),
        ((2, "s", 8), "batch is always 1"),
        ((1, 6, 8), "fixed at 6"),
        ((1, "s", "d"), "must have a fixed size"),
        ((1, 1, "s", 8), "4 axes"),
    ],
)
def test_it_binds_axes_by_role(tmp_path: Path, shape: tuple, message: str | None) -> None:
    b = GraphBuilder()
    model = b.model({"x": ("float32", shape)}, {"y": b.op("Relu", "x")})
    directory = write_submission(tmp_path, {"model": model}, graph_document(model))
    if message is None:
        assert "tensor<1x?x8xf32" in print_module(import_pipeline(directory).module)
        return
    with pytest.raises(MalformedModelError, match=message):
        import_pipeline(directory)


def test_it_refuses_inputs_of_the_wrong_type(tmp_path: Path) -> None:
    b = GraphBuilder()
    model = b.model({"x": ("int64", (1, "s", 8))}, {"y": b.op("Abs", "x")})
    directory = write_submission(tmp_path, {"model": model}, graph_document(model))
    with pytest.raises(MalformedModelError, match="element type int64"):
        import_pipeline(directory)


@pytest.mark.parametrize("target", ["INT16", "UINT32", "DOUBLE"])
def test_it_refuses_element_types_without_kernels(tmp_path: Path, target: str) -> None:
    def build(b: GraphBuilder, x: str) -> str:
        cast = b.op("Cast", x, to=onnx.TensorProto.DataType.Value(target))
        return b.op("Cast", b.op("Add", cast, cast), to=onnx.TensorProto.FLOAT)

    with pytest.raises(UnsupportedOperatorError):
        lower_pipeline(imported(tmp_path, build))


def test_it_finds_ports_that_the_file_does_not_have(tmp_path: Path) -> None:
    model = block_model(mlp_block)
    document = graph_document(model)
    document["components"]["model"]["inputs"] = {"z": {"role": "tensor"}}
    with pytest.raises(MalformedModelError, match="no input 'z'") as caught:
        import_pipeline(write_submission(tmp_path, {"model": model}, document))
    assert caught.value.hint == "inputs of the file: x"


def test_it_refuses_graph_inputs_without_a_role(tmp_path: Path) -> None:
    b = GraphBuilder()
    kind = ("float32", (1, "s", 8))
    model = b.model({"x": kind, "w": kind}, {"y": b.op("Add", "x", "w")})
    document = graph_document(model)
    del document["components"]["model"]["inputs"]["w"]
    with pytest.raises(MalformedModelError, match="'w', which is not in"):
        import_pipeline(write_submission(tmp_path, {"model": model}, document))


def test_it_feeds_constants_from_the_document(tmp_path: Path) -> None:
    b = GraphBuilder()
    inputs = {"x": ("float32", (1, "s", 8)), "f": ("float32", ())}
    model = b.model(inputs, {"y": b.op("Mul", "x", "f")})
    document = graph_document(model)
    document["components"]["model"]["inputs"]["f"] = {"role": "constant", "value": 1.5}
    done = import_pipeline(write_submission(tmp_path, {"model": model}, document))
    assert 'preview = "1.5"' in print_module(done.module)
    assert json.dumps(document)
