"""A bare ONNX file becomes a submission: sizes pinned, what is missing listed."""

import json
from pathlib import Path

import onnx
import pytest
from onnx import helper

from compiler.errors import MalformedModelError, UnsupportedOperatorError
from compiler.frontend.describe import write_submission
from compiler.frontend.importer import import_pipeline
from compiler.frontend.operator_check import require_operators


def model(tmp_path: Path) -> Path:
    """Write y = x + bias and z = ids + 1; x is (batch, ?, 4), bias (4), ids (batch)."""
    kinds = onnx.TensorProto
    inputs = [
        helper.make_tensor_value_info("x", kinds.FLOAT, ["batch", None, 4]),
        helper.make_tensor_value_info("rate", kinds.FLOAT, []),
        helper.make_tensor_value_info("the ids", kinds.INT64, ["batch"]),
    ]
    outputs = [
        helper.make_tensor_value_info("y", kinds.FLOAT, ["batch", None, 4]),
        helper.make_tensor_value_info("z", kinds.INT64, ["batch"]),
    ]
    nodes = [
        helper.make_node("Mul", ["x", "rate"], ["y"]),
        helper.make_node("Add", ["the ids", "the ids"], ["z"]),
    ]
    graph = helper.make_graph(nodes, "two", inputs, outputs)
    path = tmp_path / "two.onnx"
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def test_it_pins_sizes_by_name_and_by_place(tmp_path: Path) -> None:
    out = tmp_path / "submission"
    spec = write_submission(model(tmp_path), out, {"batch": 2, "x:1": 3}, {"rate": 0.5})
    ports = {port.name: port for port in spec.components[0].inputs}
    assert ports["x"].shape == (2, 3, 4)
    assert ports["the ids"].shape == (2,)
    assert (ports["rate"].role, ports["rate"].value) == ("constant", 0.5)
    assert [port.role for port in ports.values()] == ["constant", "tensor:the_ids", "tensor:x"]
    assert spec.quantise == "none"
    assert json.loads((out / "pipeline.json").read_text())["family"] == "graph"
    text = str(import_pipeline(out).module)
    assert "tensor<2x3x4xf32>" in text


def test_it_lists_every_size_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MalformedModelError) as caught:
        write_submission(model(tmp_path), tmp_path / "s", {}, {"rate": 1.0})
    assert "batch (or x:0), x:1, batch (or the ids:0)" in str(caught.value)
    assert caught.value.hint.endswith("for example --dim batch=1 --dim x:1=1")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("dims", "constants", "message"),
    [
        ({"batch": 1, "x:1": 1, "width": 2}, {}, "no axis called 'width'"),
        ({"batch": 1, "x:1": 1}, {"speed": 2.0}, "no input called 'speed'"),
        ({"batch": 1, "x:1": 0}, {}, "size 0 of 'x:1' is not positive"),
        ({"batch": 1, "x:1": 1, "x:2": 5}, {}, "x:2 is 4, it cannot be 5"),
    ],
)
def test_it_refuses_names_and_sizes_that_do_not_fit(
    tmp_path: Path, dims: dict[str, int], constants: dict[str, float], message: str
) -> None:
    with pytest.raises(MalformedModelError, match=message):
        write_submission(model(tmp_path), tmp_path / "s", dims, constants)


def test_it_names_the_element_types_an_input_may_have(tmp_path: Path) -> None:
    kinds = onnx.TensorProto
    info = [helper.make_tensor_value_info(name, kinds.STRING, [2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", info[:1], info[1:])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "s.onnx")
    write_submission(tmp_path / "s.onnx", tmp_path / "s", {}, {})
    with pytest.raises(MalformedModelError, match="element type string") as caught:
        import_pipeline(tmp_path / "s")
    assert "float32" in caught.value.hint


def test_it_names_every_operator_without_a_rule_before_it_writes(tmp_path: Path) -> None:
    kinds = onnx.TensorProto
    nodes = [
        helper.make_node("Fancy", ["x"], ["a"], domain="acme", name="f1"),
        helper.make_node("Fancy", ["a"], ["b"], domain="acme", name="f2"),
        helper.make_node("RandomNormalLike", ["b"], ["c"], name="noise"),
        helper.make_node("Add", ["b", "c"], ["y"]),
        helper.make_node("Unread", ["x"], ["z"], domain="acme"),
    ]
    info = [helper.make_tensor_value_info(name, kinds.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", info[:1], info[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("acme", 1)]
    path = tmp_path / "g.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    with pytest.raises(UnsupportedOperatorError) as caught:
        write_submission(path, tmp_path / "s", {}, {})
    assert str(caught.value) == (
        "operators acme::Fancy (node f1 and 1 more), RandomNormalLike (node noise)"
        " are not supported"
    )
    random, supported = caught.value.hint.splitlines()
    assert random.startswith("RandomNormalLike: its result is random")
    assert "feed them as an input" in random
    assert supported.startswith("supported operators: ")
    assert not (tmp_path / "s").exists()


def test_it_names_one_operator_with_the_way_out() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"RandomNormal \(node r\)") as caught:
        require_operators([helper.make_node("RandomNormal", [], ["y"], name="r", shape=[2])])
    assert caught.value.hint == "draw the numbers in the application and feed them as an input"


PINNED = {"batch": 2, "x:1": 3}


def with_data(tmp_path: Path, location: str, *, is_external: bool = True) -> Path:
    """Write a model whose bias names `location` as its data, below `tmp_path / "models"`."""
    (tmp_path / "models").mkdir()
    bias = helper.make_tensor("bias", onnx.TensorProto.FLOAT, [4], [1.0, 2.0, 3.0, 4.0])
    bias.external_data.add(key="location", value=location)
    if is_external:
        bias.ClearField("float_data")
        bias.data_location = onnx.TensorProto.EXTERNAL
    model_file = onnx.load(model(tmp_path))
    model_file.graph.initializer.append(bias)
    model_file.graph.node.append(helper.make_node("Add", ["y", "bias"], ["w"]))
    del model_file.graph.output[1:]
    model_file.graph.output[0].name = "w"
    path = tmp_path / "models" / "two.onnx"
    path.write_bytes(model_file.SerializeToString())
    return path


def test_it_copies_no_file_that_is_no_external_data(tmp_path: Path) -> None:
    """Nobody reads or checks the location of a tensor whose data is inside the file."""
    source = with_data(tmp_path, "../secret.bin", is_external=False)
    (tmp_path / "secret.bin").write_bytes(bytes(16))
    out = tmp_path / "deep" / "er"
    write_submission(source, out, PINNED, {"rate": 0.5})
    assert sorted(path.name for path in out.iterdir()) == ["model.onnx", "pipeline.json"]
    assert sorted(path.name for path in out.parent.iterdir()) == ["er"]


@pytest.mark.parametrize("name", ["pipeline.json", "model.onnx", "./model.onnx"])
def test_it_refuses_data_in_the_place_of_its_own_files(tmp_path: Path, name: str) -> None:
    source = with_data(tmp_path, name)
    (source.parent / name).write_bytes(bytes(16))
    with pytest.raises(MalformedModelError, match="a submission's own file") as caught:
        write_submission(source, tmp_path / "s", PINNED, {"rate": 0.5})
    assert caught.value.hint
    assert not (tmp_path / "s").exists()


def test_it_copies_data_of_subgraphs_too(tmp_path: Path) -> None:
    source = with_data(tmp_path, "two.data")
    (source.parent / "two.data").write_bytes(bytes(16))
    document = onnx.load(source, load_external_data=False)
    branch = helper.make_graph(
        [helper.make_node("Identity", ["inner"], ["r"])], "b", [], [onnx.ValueInfoProto(name="r")]
    )
    branch.initializer.append(document.graph.initializer[0])
    branch.initializer[0].name = "inner"
    branch.initializer[0].external_data[0].value = "folder/inner.data"
    (source.parent / "folder").mkdir()
    (source.parent / "folder" / "inner.data").write_bytes(bytes(16))
    yes = helper.make_tensor("yes", onnx.TensorProto.BOOL, [], [True])
    document.graph.initializer.append(yes)
    node = helper.make_node("If", ["yes"], ["chosen"], then_branch=branch, else_branch=branch)
    document.graph.node.insert(0, node)
    document.graph.node[-1].input[1] = "chosen"
    source.write_bytes(document.SerializeToString())
    write_submission(source, tmp_path / "s", PINNED, {"rate": 0.5})
    assert (tmp_path / "s" / "folder" / "inner.data").exists()
    import_pipeline(tmp_path / "s")


def test_it_may_lie_beside_its_model(tmp_path: Path) -> None:
    source = with_data(tmp_path, "two.data")
    (source.parent / "two.data").write_bytes(bytes(16))
    write_submission(source, source.parent, PINNED, {"rate": 0.5})
    import_pipeline(source.parent)


def test_it_writes_nothing_that_cannot_be_read_back(tmp_path: Path) -> None:
    for dims, rate in (({"batch": 1 << 40, "x:1": 3}, 0.5), (PINNED, float("nan"))):
        with pytest.raises(MalformedModelError, match=r"pipeline\.json"):
            write_submission(model(tmp_path), tmp_path / "s", dims, {"rate": rate})
        assert not (tmp_path / "s").exists()
