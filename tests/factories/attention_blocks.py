"""Attention with planted dead heads: blocks without a cache, and tiny models with one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from tests.factories.onnx_blocks import Block, GraphBuilder
from tests.factories.onnx_models import (
    TinyShape,
    attention,
    linear,
    merge_heads,
    repeat_heads,
    split_heads,
    tiny_document,
    tiny_models,
    write_submission,
)

UNREAD, SILENT, BOTH = "unread", "silent", "both"


@dataclass(frozen=True)
class Planted:
    """An attention between two layers, with some heads that add nothing.

    Attributes:
        unread: Query heads whose columns of the output projection are zero.
        silent: Key heads whose values are zero, bias included.
    """

    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    unread: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()

    @property
    def shape(self) -> TinyShape:
        width = self.heads * self.head_dim
        return TinyShape(width=width, heads=self.heads, kv_heads=self.kv_heads)


def attention_block(planted: Planted) -> Block:
    """A normalised input, attention over all rows, and a residual."""

    def build(b: GraphBuilder, x: str) -> str:
        shape, width = planted.shape, planted.shape.width
        random = np.random.default_rng(6)
        h = b.op("LayerNormalization", x, b.weight(width), b.weight(width), axis=-1, epsilon=1e-5)
        q = split_heads(b, linear(b, h, width, width), shape)
        keys = planted.kv_heads * planted.head_dim
        k = linear(b, h, width, keys)
        w_v, b_v = random.standard_normal((width, keys)), random.standard_normal(keys)
        columns = head_columns(planted.silent, planted.head_dim)
        w_v[:, columns], b_v[columns] = 0, 0
        v = b.op("Add", b.op("MatMul", h, b.const(w_v)), b.const(b_v))
        k, v = (
            repeat_heads(b, split_heads(b, side, shape, planted.kv_heads), shape) for side in (k, v)
        )
        w_o = random.standard_normal((width, width)) / width
        w_o[head_columns(planted.unread, planted.head_dim)] = 0
        y = b.op("MatMul", merge_heads(b, attention(b, q, k, v, shape), shape), b.const(w_o))
        return b.op("Add", x, y)

    return build


def head_columns(heads: Iterable[int], head_dim: int) -> list[int]:
    """Return the columns of some heads."""
    return [head * head_dim + at for head in heads for at in range(head_dim)]


def write_planted(
    directory: Path, shape: TinyShape, dead: Mapping[str, Mapping[int, tuple[int, ...]]]
) -> Path:
    """Write a tiny model; `dead` names heads whose values and columns are zero, by part and layer.

    All numbers of a dead head are zero where it is read and where its values are made.
    """
    models = tiny_models(shape)
    for part, layers in dead.items():
        for layer, heads in layers.items():
            _plant(models[part], layer, heads, shape)
    return write_submission(directory, models, tiny_document(shape))


def _plant(model: onnx.ModelProto, layer: int, heads: tuple[int, ...], shape: TinyShape) -> None:
    """Zero values and output columns of the layer's heads: matrices come as q, k, v, o."""
    weights = {item.name: item for item in model.graph.initializer}
    products = [n for n in model.graph.node if n.op_type == "MatMul" and n.input[1] in weights]
    value, out = products[4 * layer + 2], products[4 * layer + 3]
    groups = sorted({head * shape.kv_heads // shape.heads for head in heads})
    _zero(weights[value.input[1]], (slice(None), head_columns(groups, shape.head_dim)))
    _zero(weights[out.input[1]], (head_columns(heads, shape.head_dim), slice(None)))
    for node in model.graph.node:
        if node.op_type == "Add" and value.output[0] in node.input:
            bias = next(name for name in node.input if name in weights)
            _zero(weights[bias], (head_columns(groups, shape.head_dim),))


def _zero(tensor: onnx.TensorProto, at: tuple[object, ...]) -> None:
    array = numpy_helper.to_array(tensor).copy()
    array[at] = 0
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def plant_weak(
    model: onnx.ModelProto,
    shape: TinyShape,
    heads: Mapping[int, tuple[int, ...]],
    channels: Mapping[int, tuple[int, ...]],
    scale: float = 1e-4,
) -> None:
    """Shrink heads and expert channels of a tiny decoder, by layer, where they are made and read.

    What is made is too small for the eight bits of its row, so the answers stay without it.
    """
    weights = {item.name: item for item in model.graph.initializer}
    products = [n for n in model.graph.node if n.op_type == "MatMul" and n.input[1] in weights]
    experts = [n for n in model.graph.node if n.op_type == "MoEExpert"]
    for layer, weak in heads.items():
        value, out = (weights[products[4 * layer + at].input[1]] for at in (2, 3))
        _scale(value, (slice(None), head_columns(weak, shape.head_dim)), scale)
        _scale(out, (head_columns(weak, shape.head_dim), slice(None)), scale)
    for layer, weak in channels.items():
        first, second = (weights[name] for name in experts[layer].input[3:5])
        _scale(first, (slice(None), list(weak)), scale)
        _scale(second, (slice(None), slice(None), list(weak)), scale)


def _scale(tensor: onnx.TensorProto, at: tuple[object, ...], scale: float) -> None:
    array = numpy_helper.to_array(tensor).copy()
    array[at] *= np.float32(scale)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def plant_pattern(model: onnx.ModelProto, weak: Iterable[tuple[int, int]]) -> None:
    """Give the first projection of a tiny decoder scattered zeros, and next to nothing in tiles.

    Args:
        model: A decoder.
        weak: First output and first input of tiles of 16 outputs and 32 inputs.
    """
    weights = {item.name: item for item in model.graph.initializer}
    node = next(n for n in model.graph.node if n.op_type == "MatMul" and n.input[1] in weights)
    array = numpy_helper.to_array(weights[node.input[1]]).copy()
    array[np.random.default_rng(8).random(array.shape) < 0.3] = 0
    for output, column in weak:
        array[column : column + 32, output : output + 16] *= np.float32(1e-4)
    weights[node.input[1]].CopyFrom(numpy_helper.from_array(array, node.input[1]))
