"""Convolutions of images: the fast kernels, no layout change between two of them."""

from dataclasses import dataclass
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
    y: list[str | int | None],
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


def require_wanted(case: GraphCase, x: np.ndarray, tolerance: float = 2e-6) -> None:
    """Native code gives the simulator's bits, and what ONNX Runtime gives up to rounding."""
    native = case.native(feeds := case.feeds({"x": x}))
    assert native == case.simulated(feeds)
    (wanted,) = case.wanted({"x": x}).values()
    found = case.array("tensor", native["tensor"], wanted)
    assert relative_error(found, wanted) <= tolerance


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


@dataclass(frozen=True)
class Windows:
    """Two convolutions of images or lines and a HardSwish between; sizes by axis."""

    shape: tuple[int, ...]
    kernel: tuple[int, ...]
    pads: tuple[int, ...]
    strides: tuple[int, ...]
    depthwise: bool = False

    def write(self, path: Path) -> Path:
        rng = np.random.default_rng(12)
        middle = 6 if self.depthwise else 10
        weights = {
            "w1": rng.normal(0, 0.3, (middle, 1 if self.depthwise else 6, *self.kernel)),
            "b1": rng.normal(0, 0.3, middle),
            "w2": rng.normal(0, 0.3, (4, middle, *[1] * len(self.kernel))),
        }
        given = {"pads": self.pads, "strides": self.strides, "group": 6 if self.depthwise else 1}
        nodes = [
            helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], **given),
            helper.make_node("HardSwish", ["c1"], ["r1"]),
            helper.make_node("Conv", ["r1", "w2"], ["y"]),
        ]
        sizes = [*self.shape]
        return written(path, nodes, weights, sizes, [None] * len(sizes))


BY_AXIS = {
    "1x3": Windows((1, 6, 7, 9), (1, 3), (0, 1, 0, 1), (1, 1)),
    "3x1": Windows((2, 6, 7, 9), (3, 1), (1, 0, 1, 0), (2, 1)),
    "one-sided": Windows((1, 6, 7, 9), (3, 3), (0, 0, 1, 2), (2, 2)),
    "all-differ": Windows((3, 6, 9, 11), (2, 5), (1, 0, 2, 3), (3, 2)),
    "one-sided-depthwise": Windows((2, 6, 7, 9), (3, 2), (0, 3, 1, 0), (1, 3), depthwise=True),
    "line": Windows((1, 6, 40), (5,), (2, 2), (1,)),
    "line-causal": Windows((2, 6, 40), (7,), (6, 0), (3,)),
    "line-depthwise": Windows((1, 6, 40), (4,), (3, 0), (1,), depthwise=True),
    "line-long": Windows((1, 6, 400), (256,), (0, 64), (64,)),
}


@pytest.mark.parametrize("name", BY_AXIS)
def test_windows_that_differ_by_axis_and_lines_have_the_fast_kernels(
    name: str, tmp_path: Path
) -> None:
    case = GraphCase.of(BY_AXIS[name].write(tmp_path / "m.onnx"), tmp_path / "s")
    made = [call.op.name for call in case.pipeline.module.programs[0].calls]
    first = "CONV_DEPTHWISE" if BY_AXIS[name].depthwise else "CONV2D"
    assert made[:4] == ["REF_MOVE", first, "REF_MAP", "CONV2D"]
    assert set(made[4:]) <= {"REF_MOVE"}
    x = np.random.default_rng(6).standard_normal(BY_AXIS[name].shape).astype(np.float32)
    require_wanted(case, x)


@pytest.mark.parametrize(
    ("shape", "given"),
    [
        ((1, 6, 9, 9), {"dilations": [2, 1]}),
        ((1, 6, 9, 9), {"pads": [0, 200, 0, 0]}),
        ((1, 6, 5000), {"kernel_shape": [4500]}),
        ((1, 6, 5, 5, 5), {}),
    ],
    ids=["dilated", "padded-far", "long", "volume"],
)
def test_what_has_no_fast_kernel_is_convolved_plainly(
    shape: tuple[int, ...], given: dict[str, list[int]], tmp_path: Path
) -> None:
    kernel = given.get("kernel_shape", [2] * (len(shape) - 2))
    weights = {"w": np.random.default_rng(4).normal(0, 0.3, (2, 6, *kernel))}
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], **given)]
    path = written(tmp_path / "m.onnx", nodes, weights, list(shape), [None] * len(shape))
    case = GraphCase.of(path, tmp_path / "s")
    assert "REF_CONV" in case.operations
    require_wanted(case, np.random.default_rng(6).standard_normal(shape).astype(np.float32), 1e-5)


@pytest.mark.parametrize("images", [1, 2, 5])
def test_it_convolves_images_one_after_the_other(images: int, tmp_path: Path) -> None:
    case = GraphCase.of(stacked(tmp_path / "m.onnx"), tmp_path / "s", {"n": images})
    calls = [call.op.name for call in case.pipeline.module.programs[0].calls]
    assert calls[:3] == ["REF_MOVE", "CONV2D", "CONV2D"]  # to rows once, nothing in between
    assert set(calls[3:]) == {"REF_MOVE"}
    x = np.random.default_rng(images).standard_normal((images, 3, 8, 10)).astype(np.float32)
    require_wanted(case, x)
