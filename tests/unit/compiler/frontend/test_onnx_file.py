import shutil
from pathlib import Path

import onnx
import pytest
from onnx import helper, parser

from compiler.errors import MalformedModelError
from compiler.frontend.function_bodies import check_function_bodies
from compiler.frontend.onnx_file import read_model
from tests.factories.onnx_blocks import (
    EXPERT,
    PRUNE,
    ROUTER,
    block_model,
    mlp_block,
    native_moe_block,
)


def saved(tmp_path: Path, model: onnx.ModelProto | None = None) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(model or block_model(mlp_block), path)
    return path


def test_it_reads_a_model(tmp_path: Path) -> None:
    assert read_model(saved(tmp_path)).graph.node


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.9, 0.999])
def test_it_refuses_a_truncated_file(tmp_path: Path, share: float) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(MalformedModelError) as caught:
        read_model(path)
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("data", [b"\x00" * 64, b"not a model at all", b"\x89PNG\r\n\x1a\n" * 9])
def test_it_refuses_what_is_not_onnx(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(MalformedModelError, match=r"model\.onnx"):
        read_model(path)


def test_it_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MalformedModelError, match=r"nowhere\.onnx cannot be read"):
        read_model(tmp_path / "nowhere.onnx")


@pytest.mark.parametrize("opset", [9, 10, 29])
def test_it_refuses_other_opsets(tmp_path: Path, opset: int) -> None:
    model = block_model(mlp_block)
    model.opset_import[0].version = opset
    with pytest.raises(MalformedModelError, match=f"opset {opset}"):
        read_model(saved(tmp_path, model))


@pytest.mark.parametrize("opset", [13, 17, 21, 28])
def test_it_takes_opsets_13_to_28(tmp_path: Path, opset: int) -> None:
    assert read_model(saved(tmp_path, block_model(mlp_block, opset=opset))).graph.node


def test_it_loads_external_data_beside_the_model_only(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    big = block_model(mlp_block)
    onnx.save(big, path, save_as_external_data=True, location="weights.bin", size_threshold=16)
    assert read_model(path).graph.initializer[0].raw_data
    shutil.move(tmp_path / "weights.bin", tmp_path / "elsewhere.bin")
    with pytest.raises(MalformedModelError, match="external data"):
        read_model(path)


def test_it_does_not_follow_external_data_out_of_the_directory(tmp_path: Path) -> None:
    secret = tmp_path / "secret.bin"
    secret.write_bytes(b"\0" * 4096)
    inside = tmp_path / "submission"
    inside.mkdir()
    model = block_model(mlp_block)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret.bin")
    (inside / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(MalformedModelError, match="external data"):
        read_model(inside / "model.onnx")


def test_it_refuses_a_graph_that_contradicts_itself(tmp_path: Path) -> None:
    model = block_model(mlp_block)
    model.graph.node[0].input[0] = "never made"
    with pytest.raises(MalformedModelError, match="not valid ONNX"):
        read_model(saved(tmp_path, model))


def test_it_inlines_functions_of_other_domains(tmp_path: Path) -> None:
    twice = parser.parse_function(
        '<domain: "local", opset_import: ["" : 18]> Twice (x) => (y) { y = Add (x, x) }'
    )
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, "s", 4])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, "s", 4])
    graph = helper.make_graph(
        [helper.make_node("Twice", ["x"], ["y"], domain="local")], "g", [x], [y]
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    model = helper.make_model(graph, opset_imports=imports, functions=[twice], ir_version=10)
    read = read_model(saved(tmp_path, model))
    assert [node.op_type for node in read.graph.node] == ["Add"]


def test_it_keeps_known_functions_as_nodes(tmp_path: Path) -> None:
    read = read_model(saved(tmp_path, block_model(native_moe_block)))
    assert {"MoERouter", "MoEExpert"} <= {node.op_type for node in read.graph.node}


@pytest.mark.parametrize("text", [ROUTER, EXPERT, PRUNE])
def test_it_accepts_bodies_that_mean_what_the_operator_means(text: str) -> None:
    model = block_model(mlp_block)
    model.functions.append(parser.parse_function(text))
    check_function_bodies(model, "model.onnx")


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        (ROUTER, "s = Add (r, b)", "s = Sub (r, b)"),
        (ROUTER, "wt = Softmax <axis = -1> (v)", "wt = Sigmoid (v)"),
        (EXPERT, "r = Relu (m)", "r = Sigmoid (m)"),
        (PRUNE, "largest = 0", "largest = 1"),
        (PRUNE, "c = Slice (cls, one, big, two)", "c = Slice (cls, two, big, two)"),
    ],
)
def test_it_refuses_bodies_that_compute_something_else(text: str, right: str, wrong: str) -> None:
    assert right in text
    model = block_model(mlp_block)
    model.functions.append(parser.parse_function(text.replace(right, wrong)))
    with pytest.raises(MalformedModelError, match="does not compute"):
        check_function_bodies(model, "model.onnx")


def test_it_refuses_bodies_that_it_cannot_run() -> None:
    model = block_model(mlp_block)
    text = EXPERT.replace("r = Relu (m)", "r = Det (m)")
    model.functions.append(parser.parse_function(text))
    with pytest.raises(MalformedModelError, match="cannot be checked"):
        check_function_bodies(model, "model.onnx")
