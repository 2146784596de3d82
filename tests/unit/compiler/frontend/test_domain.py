"""The domain `ai.sparsefleet`: bodies are valid, mean what they say, and run everywhere."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from compiler.errors import MalformedModelError
from compiler.frontend.domain import NAMES, attach_functions, function
from compiler.frontend.function_bodies import (
    INLINED,
    MEANINGS,
    check_function_bodies,
    inline_operators,
)
from compiler.frontend.onnx_file import KNOWN_FUNCTIONS
from compiler.simulator import Simulator
from tests.factories.onnx_blocks import DOMAIN, GraphBuilder, linear
from tests.factories.onnx_models import TinyShape, tiny_document, tiny_models, write_submission
from tests.factories.onnx_runs import lowered, session

EVERY = {**MEANINGS, **INLINED}


def calling(name: str) -> onnx.ModelProto:
    """Return a model that is one call of an operator, with its body."""
    meaning, operands, attrs = EVERY[name]
    results = len(meaning(*operands))
    inputs, outputs = [f"i{at}" for at in range(len(operands))], [f"o{at}" for at in range(results)]
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(inputs, operands, strict=True)
    ]
    made = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(outputs, meaning(*operands), strict=True)
    ]
    node = helper.make_node(name, inputs, outputs, domain=DOMAIN, **attrs)
    graph = helper.make_graph([node], "g", infos, made)
    imports = [helper.make_opsetid("", 18)]
    return attach_functions(helper.make_model(graph, opset_imports=imports, ir_version=10))


def test_it_has_six_operators() -> None:
    assert set(NAMES) == set(EVERY) == KNOWN_FUNCTIONS


@pytest.mark.parametrize("name", NAMES)
def test_a_runtime_that_knows_nothing_of_us_computes_the_meaning(name: str) -> None:
    model = calling(name)
    onnx.checker.check_model(model, full_check=True)
    meaning, operands, _ = EVERY[name]
    run = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = run.run(None, {f"i{at}": array for at, array in enumerate(operands)})
    for a, b in zip(found, meaning(*operands), strict=True):
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_the_importer_takes_the_bodies_for_true(name: str) -> None:
    model = calling(name)
    check_function_bodies(model, "model.onnx")
    inlined = inline_operators(model, "model.onnx")
    assert any(node.op_type == name for node in inlined.graph.node) is (name in MEANINGS)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("SparseConv", "Mul", "Add"),
        ("SparseAttention", "Less", "LessOrEqual"),
        ("DynamicTopK", "Softmax", "Sigmoid"),
        ("DynamicTopK", "Softmax", "Det"),
    ],
)
def test_it_refuses_bodies_that_mean_something_else(name: str, right: str, wrong: str) -> None:
    model = calling(name)
    node = next(n for n in model.functions[0].node if n.op_type == right)
    node.op_type = wrong
    if wrong in {"Sigmoid", "Det"}:
        del node.attribute[:]
    with pytest.raises(MalformedModelError, match=r"does not compute|cannot be checked"):
        inline_operators(model, "model.onnx")


def test_it_refuses_what_the_domain_does_not_have() -> None:
    model = calling("MoERouter")
    model.graph.node[0].op_type = "MoEOracle"
    with pytest.raises(ValueError, match="MoEOracle"):
        attach_functions(model)
    with pytest.raises(ValueError, match="opset 18"):
        function("MoERouter", opset=13)


def test_a_masked_convolution_compiles_to_one_with_fewer_weights(tmp_path: Path) -> None:
    """See `SparseConv` through: importer, passes, and our kernels against ONNX Runtime."""
    write_submission(tmp_path, *sparse_vision())
    module = lowered(tmp_path).module
    pixels = np.random.default_rng(5).integers(0, 256, (8, 8)).astype(np.uint8)
    feeds = {"image": pixels.reshape(1, -1), "positions": np.arange(16)[:, None]}
    found = Simulator(module, mode="f64").run_arrays("see", feeds)["embeds"]
    scaled = (pixels.astype(np.float32) / 127.5 - 1.0)[None, None]
    (wanted,) = session(tmp_path / "vision.onnx").run(["tokens"], {"image": scaled})
    assert np.abs(found - wanted[0]).max() <= 1e-3
    kernel = max(
        (w.array for w in module.weights), key=lambda a: (a == 0).mean() if a.ndim == 2 else 0
    )
    assert (kernel == 0).mean() >= 0.4


def sparse_vision() -> tuple[dict[str, onnx.ModelProto], dict[str, Any]]:
    """The tiny submission with a masked convolution in front, and no pruning."""
    shape = TinyShape()
    models, document = tiny_models(shape), tiny_document(shape)
    b = GraphBuilder(7)
    width = shape.width
    mask = b.const((b.rng.random((width, 1, 3, 3)) < 0.5).astype(np.float32))
    attrs = {"strides": [2, 2], "pads": [1, 1, 1, 1], "dilations": [1, 1], "group": 1}
    weight, bias = b.weight(width, 1, 3, 3), b.weight(width)
    x = b.op("SparseConv", "image", weight, bias, mask, domain=DOMAIN, **attrs)
    x = b.op("Transpose", b.op("Reshape", x, b.ints(1, width, 16)), perm=[0, 2, 1])
    x = linear(b, b.op("Relu", x), width, width)
    inputs = {"image": ("float32", ("n", 1, shape.side, shape.side))}
    model = b.model(inputs, {"tokens": x})
    made = helper.make_tensor_value_info("tokens", onnx.TensorProto.FLOAT, [1, 16, width])
    model.graph.output[0].CopyFrom(made)
    models["vision"] = attach_functions(model)
    document["components"]["vision"]["outputs"] = {"tokens": {"role": "embeds"}}
    return models, document
