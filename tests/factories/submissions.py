"""Small submissions that compile in a second."""

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH = 32


def linear_submission(folder: Path, *, seed: int = 1, layers: int = 1, op: str = "MatMul") -> Path:
    """Write a graph of `layers` square linear layers whose weights lie in a file beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    nodes, weights = [], []
    for at in range(layers):
        weight = random.standard_normal((WIDTH, WIDTH)).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{at}"))
        names = ["x" if at == 0 else f"h{at - 1}", f"w{at}"]
        result = "y" if at == layers - 1 else f"h{at}"
        nodes.append(helper.make_node(op, names, [result], name=f"project_{at}"))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", WIDTH])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 10
    onnx.save(
        model, folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0
    )
    component = {
        "file": "m.onnx",
        "inputs": {"x": {"role": "tensor"}},
        "outputs": {"y": {"role": "tensor"}},
    }
    document = {
        "schema": "sparsefleet.pipeline/1",
        "family": "graph",
        "max_step_tokens": 8,
        "components": {"model": component},
    }
    (folder / "pipeline.json").write_text(json.dumps(document))
    return folder
