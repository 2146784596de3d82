"""Every ONNX operator of the importer: plan, native code and simulator against its runtime."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.factories.graph_runs import GraphCase, relative_error
from tests.factories.onnx_operators import GROUPS, OperatorCase

CASES = [(group, item) for group, items in GROUPS.items() for item in items]


@pytest.mark.parametrize(
    "item", [item for _, item in CASES], ids=[f"{g}-{i.name}" for g, i in CASES]
)
def test_it_computes_an_operator_as_onnx_runtime_does(item: OperatorCase, tmp_path: Path) -> None:
    path = tmp_path / "operator.onnx"
    onnx.save(item.model(), path)
    case = GraphCase.of(path, tmp_path / "submission")
    arrays = item.arrays()
    feeds, wanted = case.feeds(arrays), case.wanted(arrays)
    native = case.native(feeds)
    assert native == case.simulated(feeds)
    for role, value in wanted.items():
        found = case.array(role, native[role], value)
        assert np.isfinite(found).all()
        assert relative_error(found, value) <= item.tolerance, role


def test_it_runs_quantised_graphs_of_pairs(tmp_path: Path) -> None:
    """Quantise and dequantise around a product: weights fold, activations round as in the file."""
    rng = np.random.default_rng(3)
    initializers = {
        "scale": np.array(0.03, np.float32),
        "zero": np.array(121, np.uint8),
        "w": rng.integers(-63, 64, (16, 6)).astype(
            np.int8
        ),  # 7 bits: sums of pairs do not saturate
        "w_scale": rng.uniform(0.01, 0.02, 6).astype(np.float32),
        "w_zero": np.zeros(6, np.int8),
        "bias": rng.standard_normal(6).astype(np.float32),
        "y_scale": np.array(0.05, np.float32),
        "y_zero": np.array(128, np.uint8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "w_scale", "w_zero"], ["wd"], axis=1),
        helper.make_node("MatMul", ["d", "wd"], ["p"]),
        helper.make_node("Add", ["p", "bias"], ["s"]),
        helper.make_node("QuantizeLinear", ["s", "y_scale", "y_zero"], ["qy"]),
        helper.make_node("DequantizeLinear", ["qy", "y_scale", "y_zero"], ["y"]),
    ]
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "pairs",
        [helper.make_tensor_value_info("x", kind, ["n", 16])],
        [helper.make_tensor_value_info("y", kind, ["n", 6])],
        [numpy_helper.from_array(array, name) for name, array in initializers.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    path = tmp_path / "pairs.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    case = GraphCase.of(path, tmp_path / "submission", {"n": 5})
    arrays = {"x": rng.standard_normal((5, 16)).astype(np.float32)}
    feeds = case.feeds(arrays)
    native = case.native(feeds)
    assert native == case.simulated(feeds)
    (wanted,) = case.wanted(arrays).values()
    off = np.abs(case.array("tensor", native["tensor"], wanted) - wanted)
    assert off.max() <= 0.05 * 1.001  # one step of the last rounding, where integers fuse
    assert (off < 1e-6).mean() >= 0.9
