"""Fused operators of ONNX Runtime: written out they compute the same, and what we lack is named."""

import contextlib
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from compiler.errors import UnsupportedOperatorError, UserModelError
from compiler.frontend.contrib_bodies import expand_contrib
from tests.factories.families import MOBILE_VLM, genai_decoder, variant

SHAPE = variant(MOBILE_VLM, width=32, layers=1)
RNG = np.random.default_rng(8)


def single(kind: str, arrays: list[np.ndarray], outputs: int = 1, **attrs: Any) -> onnx.ModelProto:
    """Return a model of one operator on x (1, 5, 8) and stored operands."""
    inputs = ["x", *(f"c{at}" for at in range(len(arrays)))]
    names = ["y", "", "", "sum"][:outputs]
    node = helper.make_node(kind, inputs, names, domain="com.microsoft", name="it", **attrs)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 5, 8])
    made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 5, 8]) for n in names if n]
    stored = [
        onnx.numpy_helper.from_array(a.astype(np.float32), f"c{i}") for i, a in enumerate(arrays)
    ]
    graph = helper.make_graph([node], "g", [x], made, stored)
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def run(model: onnx.ModelProto) -> list[np.ndarray]:
    x = np.random.default_rng(9).standard_normal((1, 5, 8)).astype(np.float32)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})


def vector() -> np.ndarray:
    return RNG.standard_normal(8)


@pytest.mark.parametrize(
    "model",
    [
        single("FastGelu", [vector()]),
        single("FastGelu", []),
        single("QuickGelu", [], alpha=1.5),
        single("SkipLayerNormalization", [RNG.standard_normal((1, 5, 8)), vector(), vector()]),
        single(
            "SkipLayerNormalization",
            [RNG.standard_normal((1, 5, 8)), vector(), vector(), vector()],
            outputs=4,
        ),
        single(
            "SkipSimplifiedLayerNormalization",
            [RNG.standard_normal((1, 5, 8)), vector()],
            outputs=4,
            epsilon=1e-5,
        ),
        single(
            "SkipSimplifiedLayerNormalization",
            [RNG.standard_normal((1, 5, 8)), vector(), vector()],
        ),
    ],
)
def test_it_computes_the_same(model: onnx.ModelProto) -> None:
    wanted = run(model)
    assert expand_contrib(model) == 1
    assert all(node.domain == "" for node in model.graph.node)
    for found, expected in zip(run(model), wanted, strict=True):
        assert np.abs(found - expected).max() <= 1e-5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"local_window_size": 4}, "local_window_size"),
        ({"softcap": 30.0}, "softcap"),
        ({"rotary_interleaved": 1}, "rotary_interleaved"),
        ({"smooth_softmax": 1}, "smooth_softmax"),
        ({"kv_num_heads": 3}, "the numbers of heads"),
    ],
)
def test_it_names_what_it_has_no_body_for(change: dict[str, Any], reason: str) -> None:
    model = genai_decoder(SHAPE)
    (name, value), *_ = change.items()
    node = next(n for n in model.graph.node if n.op_type == "GroupQueryAttention")
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])
    with pytest.raises(UnsupportedOperatorError, match="GroupQueryAttention.*" + reason):
        expand_contrib(model)


def test_it_refuses_tables_that_are_no_plain_rotation() -> None:
    model = genai_decoder(SHAPE)
    cosine = model.graph.initializer[0]
    scaled = 1.2 * onnx.numpy_helper.to_array(cosine)
    cosine.CopyFrom(onnx.numpy_helper.from_array(scaled, cosine.name))
    with pytest.raises(UnsupportedOperatorError, match="tables are scaled"):
        expand_contrib(model)


@pytest.mark.parametrize("seed", range(30))
def test_damaged_nodes_end_in_typed_errors(seed: int) -> None:
    chooser = np.random.default_rng(seed)
    model = genai_decoder(SHAPE)
    fused = [n for n in model.graph.node if n.domain == "com.microsoft"]
    node = fused[chooser.integers(len(fused))]
    match seed % 3:
        case 0:
            del node.input[int(chooser.integers(len(node.input))) :]
        case 1:
            del node.attribute[int(chooser.integers(len(node.attribute))) :]
        case _:
            at = int(chooser.integers(len(node.input)))
            node.input[at] = model.graph.initializer[0].name
    with contextlib.suppress(UserModelError):
        expand_contrib(model)
        assert not any(n.op_type == "GroupQueryAttention" for n in model.graph.node)
