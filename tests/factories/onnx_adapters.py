"""Submissions with low-rank branches beside their weights."""

import json
from pathlib import Path

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
