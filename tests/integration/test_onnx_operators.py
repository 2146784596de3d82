"""Every ONNX operator of the importer: plan, native code and simulator against its runtime."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.factories.graph_runs import GraphCase, relative_error
from tests.factories.onnx_control import CONTROL_CASES, ControlCase
from tests.factories.onnx_operators import GROUPS, OperatorCase
from tests.factories.onnx_runs import session
from tests.factories.onnx_written import BY_THE_STANDARD, FOLDED, WRITTEN_OUT, joined

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


def _checked(path: Path, arrays: dict[str, np.ndarray], wanted: list[np.ndarray]) -> list[float]:
    """Return the error of every output, after native code and simulator agreed on all bits."""
    case = GraphCase.of(path, path.parent / "submission")
    feeds = case.feeds(arrays)
    native = case.native(feeds)
    assert native == case.simulated(feeds)
    errors = []
    roles = {port.name: port.role for port in case.spec.components[0].outputs}
    for name, value in zip((o.name for o in onnx.load(path).graph.output), wanted, strict=True):
        role = roles[name]
        found = case.array(role, native[role], value)
        errors.append(relative_error(found, value) if np.isfinite(found).all() else np.inf)
    return errors


@pytest.mark.parametrize("opset", sorted({item.opset for item in WRITTEN_OUT}))
def test_it_computes_operators_that_are_written_out(opset: int, tmp_path: Path) -> None:
    cases = [item for item in WRITTEN_OUT if item.opset == opset]
    path = tmp_path / "operators.onnx"
    onnx.save(joined(cases), path)
    drawn = [item.arrays() for item in cases]
    arrays = {f"{at}/{n}": a for at, given in enumerate(drawn) for n, a in given.items()}
    errors = _checked(path, arrays, session(path).run(None, arrays))
    names = [item.name for item in cases for _ in range(item.results[1])]
    wrong = {n: e for n, e in zip(names, errors, strict=True) if e > 1e-5}
    assert not wrong


@pytest.mark.parametrize("item", BY_THE_STANDARD, ids=lambda item: item.name)
def test_it_computes_operators_that_onnx_runtime_lacks(item: OperatorCase, tmp_path: Path) -> None:
    path = tmp_path / "operator.onnx"
    onnx.save(item.model(), path)
    arrays = item.arrays()
    wanted = ReferenceEvaluator(str(path)).run(None, arrays)
    assert max(_checked(path, arrays, wanted)) <= item.tolerance


@pytest.mark.parametrize("item", FOLDED, ids=lambda item: item.name)
def test_it_folds_operators_of_known_operands(item: OperatorCase, tmp_path: Path) -> None:
    path = tmp_path / "operator.onnx"
    model = item.model()
    made = model.graph.output[0]
    model.graph.node.append(helper.make_node("Cast", [made.name], ["floats"], to=1))
    model.graph.node.append(helper.make_node("Add", ["floats", "x"], ["y"]))
    shape = ReferenceEvaluator(item.model()).run(None, {})[0].shape
    info = [helper.make_tensor_value_info(name, 1, shape) for name in ("x", "y")]
    model.graph.input.append(info[0])
    del model.graph.output[:]
    model.graph.output.append(info[1])
    onnx.save(model, path)
    arrays = {"x": np.zeros(shape, np.float32)}
    assert max(_checked(path, arrays, session(path).run(None, arrays))) <= 1e-5


@pytest.mark.parametrize("item", CONTROL_CASES, ids=lambda item: item.name)
def test_it_computes_control_flow_and_sequences(item: ControlCase, tmp_path: Path) -> None:
    path = tmp_path / "control.onnx"
    onnx.save(item.model(), path)
    arrays = item.arrays()
    wanted = session(path).run(None, arrays)
    assert max(_checked(path, arrays, wanted)) <= 1e-5


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
