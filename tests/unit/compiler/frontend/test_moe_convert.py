"""Mixtures of experts between `ai.sparsefleet` and `com.microsoft`: same numbers, same bytes."""

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from compiler.frontend.domain import attach_functions
from compiler.frontend.moe_convert import CONTRIB, from_contrib, to_contrib
from tests.factories.onnx_blocks import DOMAIN

EXPERTS, WIDTH, HIDDEN, ROWS, K = 4, 32, 64, 5, 2
RNG = np.random.default_rng(3)
FLOATS: dict[str, np.ndarray] = {
    "router": RNG.standard_normal((EXPERTS, WIDTH)),
    "bias": RNG.standard_normal(EXPERTS),
    "factor": np.array(0.5),
    "w_in": 0.2 * RNG.standard_normal((EXPERTS, HIDDEN, WIDTH)),
    "w_out": 0.2 * RNG.standard_normal((EXPERTS, WIDTH, HIDDEN)),
}
ROUTED = np.random.default_rng(4).standard_normal((ROWS, WIDTH)).astype(np.float32)


def model_of(
    nodes: list[onnx.NodeProto], arrays: dict[str, np.ndarray], opset: int = 21
) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [ROWS, WIDTH])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [ROWS, WIDTH])
    stored = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], stored)
    imports = [helper.make_opsetid(domain, v) for domain, v in (("", opset), (CONTRIB, 1))]
    return attach_functions(helper.make_model(graph, opset_imports=imports, ir_version=10))


def ours() -> onnx.ModelProto:
    arrays = {name: array.astype(np.float32) for name, array in FLOATS.items()}
    routed = ["x", "router", "bias", "factor"]
    return model_of(
        [
            helper.make_node("MoERouter", routed, ["i", "g"], domain=DOMAIN, k=K),
            helper.make_node("MoEExpert", ["x", "i", "g", "w_in", "w_out"], ["y"], domain=DOMAIN),
        ],
        arrays,
    )


def contrib(bits: int, block: int, **changes: Any) -> onnx.ModelProto:
    """Return a QMoE of random codes; scales per block of K, or per row if `block` is 0."""
    rng = np.random.default_rng(bits + block)
    arrays: dict[str, np.ndarray] = {"turned": FLOATS["router"].T.astype(np.float32).copy()}
    for name, (rows, width) in {"fc1": (HIDDEN, WIDTH), "fc2": (WIDTH, HIDDEN)}.items():
        packed = (EXPERTS, rows, width * bits // 8)
        scales = (EXPERTS, rows, width // block) if block else (EXPERTS, rows)
        arrays[f"{name}_q"] = rng.integers(0, 256, packed).astype(np.uint8)
        arrays[f"{name}_s"] = (rng.random(scales) * 2.0 / (1 << bits)).astype(np.float32)
    attrs = {"k": K, "activation_type": "relu", "normalize_routing_weights": 1}
    attrs |= {"expert_weight_bits": bits, **({"block_size": block} if block else {}), **changes}
    inputs = ["x", "logits", "fc1_q", "fc1_s", "", "fc2_q", "fc2_s"]
    return model_of(
        [
            helper.make_node("MatMul", ["x", "turned"], ["logits"]),
            helper.make_node("QMoE", inputs, ["y"], name="moe", domain=CONTRIB, **attrs),
        ],
        arrays,
    )


def run(model: onnx.ModelProto) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options)
    return session.run(None, {"x": ROUTED})[0]


def kinds(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


def test_floats_go_there_and_back() -> None:
    given = ours()
    there = to_contrib(given)
    assert there.kept == {}
    assert "MoE" in kinds(there.model)
    assert not kinds(there.model) & {"MoERouter", "MoEExpert"}
    assert not there.model.functions
    back = from_contrib(there.model)
    assert kinds(back.model) == {"MoERouter", "MoEExpert"}
    wanted = run(given)
    assert np.abs(run(there.model) - wanted).max() <= 5e-7 * np.abs(wanted).max()
    assert np.abs(run(back.model) - wanted).max() <= 2e-7
    arrays = {t.name: numpy_helper.to_array(t) for t in back.model.graph.initializer}
    for name in ("w_in", "w_out"):
        assert arrays[name].tobytes() == FLOATS[name].astype(np.float32).tobytes()


@pytest.mark.parametrize(
    ("bits", "block", "tolerance"), [(4, 0, 1e-6), (4, 32, 1e-6), (8, 0, 1e-6), (8, 32, 2e-2)]
)
def test_codes_go_there_and_back(bits: int, block: int, tolerance: float) -> None:
    """With 8 bits in blocks the CPU kernel of ONNX Runtime rounds activations to 8 bits as well."""
    given = contrib(bits, block)
    there = from_contrib(given)
    assert kinds(there.model) == {"MoERouter", "MoEExpert", "DequantizeLinear"}
    wanted = run(given)
    assert np.abs(run(there.model) - wanted).max() <= tolerance * np.abs(wanted).max()
    back = to_contrib(there.model)
    assert "QMoE" in kinds(back.model)
    assert np.abs(run(back.model) - wanted).max() <= 2e-7
    assert stored(back.model) == stored(given)


def stored(model: onnx.ModelProto) -> list[bytes]:
    """Return codes and scales of the one QMoE, in the order of its operands."""
    arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    node = next(node for node in model.graph.node if node.op_type == "QMoE")
    return [arrays[node.input[at]].tobytes() for at in (2, 3, 5, 6)]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (contrib(4, 32, activation_type="silu"), "another activation"),
        (contrib(4, 32, use_sparse_mixer=1), "sparse mixer"),
        (contrib(4, 32, quant_type="fp4"), "not integers"),
        (contrib(4, 32, expert_weight_bits=2), "not integers"),
    ],
)
def test_what_cannot_be_said_stays_and_is_told(model: onnx.ModelProto, reason: str) -> None:
    done = from_contrib(model)
    assert done.converted == ()
    assert reason in done.kept["moe"]
    assert kinds(done.model) == kinds(model)


def test_gates_that_are_not_normalised_stay() -> None:
    there = to_contrib(ours()).model
    node = next(n for n in there.graph.node if n.op_type == "MoE")
    flag = next(a for a in node.attribute if a.name == "normalize_routing_weights")
    flag.i = 0
    assert "not normalised" in next(iter(from_contrib(there).kept.values()))


def test_the_given_model_is_not_changed() -> None:
    given = ours()
    before = given.SerializeToString(deterministic=True)
    to_contrib(given)
    assert given.SerializeToString(deterministic=True) == before
