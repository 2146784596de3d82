"""Submissions with low-rank branches beside their weights."""

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.factories.onnx_blocks import GraphBuilder, linear

SMALL_WIDTH, SMALL_RANK = 32, 2


def adapter_block(b: GraphBuilder, x: str) -> str:
    """A layer with a bias, a scaled branch beside it, and the ReLU behind both."""
    down, up = b.weight(SMALL_WIDTH, SMALL_RANK), b.weight(SMALL_RANK, SMALL_WIDTH)
    branch = b.op("Mul", b.op("MatMul", b.op("MatMul", x, down), up), b.const(0.5))
    return b.op("Relu", b.op("Add", linear(b, x, SMALL_WIDTH, SMALL_WIDTH), branch))


def ask_to_merge(directory: Path) -> Path:
    """Let a submission ask for merged adapters; return it."""
    path = directory / "pipeline.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"adapters": "merge"}))
    return directory


def put_branch(path: Path, rank: int, size: float) -> None:
    """Put a branch beside the first product of an ONNX file with a matrix of its own.

    Args:
        path: The file, changed in place.
        rank: Of the branch.
        size: Standard deviation of the factors.
    """
    model = onnx.load(path)
    weights = {item.name: item for item in model.graph.initializer}
    at, product = next(
        (at, node)
        for at, node in enumerate(model.graph.node)
        if node.op_type == "MatMul" and node.input[1] in weights
    )
    source, (rows, cols) = product.input[0], weights[product.input[1]].dims
    random = np.random.default_rng(8)
    for name, shape in (("branch_a", (rows, rank)), ("branch_b", (rank, cols))):
        array = (random.standard_normal(shape) * size).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    total, product.output[0] = product.output[0], "branch_beside"
    nodes = [
        helper.make_node("MatMul", [source, "branch_a"], ["branch_low"]),
        helper.make_node("MatMul", ["branch_low", "branch_b"], ["branch_high"]),
        helper.make_node("Add", ["branch_beside", "branch_high"], [total]),
    ]
    for node in reversed(nodes):
        model.graph.node.insert(at + 1, node)
    onnx.save(model, path)
