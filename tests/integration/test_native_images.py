"""Convolutions of images: the fast kernels, no layout change between two of them."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.factories.graph_runs import GraphCase, relative_error


def written(
    path: Path,
    nodes: list[onnx.NodeProto],
    weights: dict[str, np.ndarray],
    x: list[str | int],
    y: list[str | int],
) -> Path:
    """Write a model of x and y, f32 of these sizes."""
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "images",
        [helper.make_tensor_value_info("x", kind, x)],
        [helper.make_tensor_value_info("y", kind, y)],
        [numpy_helper.from_array(a.astype(np.float32), name) for name, a in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def require_wanted(case: GraphCase, x: np.ndarray) -> None:
    """Native code gives the simulator's bits, and what ONNX Runtime gives to 1e-6."""
    native = case.native(feeds := case.feeds({"x": x}))
    assert native == case.simulated(feeds)
    (wanted,) = case.wanted({"x": x}).values()
    found = case.array("tensor", native["tensor"], wanted)
    assert relative_error(found, wanted) <= 1e-6


def stacked(path: Path) -> Path:
    """Write two convolutions with ReLU, stride two in the second, of a free number of images."""
    rng = np.random.default_rng(8)
    weights = {
        "w1": rng.normal(0, 0.3, (6, 3, 3, 3)),
        "b1": rng.normal(0, 0.3, 6),
        "w2": rng.normal(0, 0.3, (10, 6, 3, 3)),
        "b2": rng.normal(0, 0.3, 10),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1] * 4),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], pads=[1] * 4, strides=[2, 2]),
        helper.make_node("Relu", ["c2"], ["y"]),
    ]
    return written(path, nodes, weights, ["n", 3, 8, 10], ["n", 10, 4, 5])


def grouped(path: Path, groups: int, filters: int) -> Path:
    """Write a convolution of six channels in groups, padded, whose strides differ; then a plain."""
    rng = np.random.default_rng(9)
    weights = {
        "w1": rng.normal(0, 0.3, (filters, 6 // groups, 5, 3)),
        "b1": rng.normal(0, 0.3, filters),
        "w2": rng.normal(0, 0.3, (4, filters, 1, 1)),
    }
    nodes = [
        helper.make_node(
            "Conv", ["x", "w1", "b1"], ["c1"], pads=[2] * 4, strides=[2, 1], group=groups
        ),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["y"]),
    ]
    return written(path, nodes, weights, ["n", 6, 8, 10], ["n", 4, 4, 12])


@pytest.mark.parametrize(
    ("groups", "filters", "calls"),
    [
        (6, 6, ["REF_MOVE", "CONV_DEPTHWISE", "CONV2D"]),
        (6, 12, ["REF_CONV"]),
        (3, 6, ["REF_CONV"]),
    ],
)
@pytest.mark.parametrize("images", [1, 3])
def test_a_group_for_every_channel_has_a_fast_kernel(
    groups: int, filters: int, calls: list[str], images: int, tmp_path: Path
) -> None:
    source = grouped(tmp_path / "m.onnx", groups, filters)
    case = GraphCase.of(source, tmp_path / "s", {"n": images})
    made = [call.op.name for call in case.pipeline.module.programs[0].calls]
    assert made[: len(calls)] == calls
    x = np.random.default_rng(images).standard_normal((images, 6, 8, 10)).astype(np.float32)
    require_wanted(case, x)


@pytest.mark.parametrize("images", [1, 2, 5])
def test_it_convolves_images_one_after_the_other(images: int, tmp_path: Path) -> None:
    case = GraphCase.of(stacked(tmp_path / "m.onnx"), tmp_path / "s", {"n": images})
    calls = [call.op.name for call in case.pipeline.module.programs[0].calls]
    assert calls[:3] == ["REF_MOVE", "CONV2D", "CONV2D"]  # to rows once, nothing in between
    assert set(calls[3:]) == {"REF_MOVE"}
    x = np.random.default_rng(images).standard_normal((images, 3, 8, 10)).astype(np.float32)
    require_wanted(case, x)
