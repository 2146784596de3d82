"""Small ONNX submissions for tests: blocks, a vision-language model, and disguises of both."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from tests.factories.onnx_blocks import (
    DOMAIN,
    EXPERT,
    PRUNE,
    ROUTER,
    Block,
    GraphBuilder,
    block_model,
    linear,
)

# --- a whole submission of family `vision-embed-decoder` -----------------------------------------


@dataclass(frozen=True)
class TinyShape:
    """A vision-language model of the EdgeCard kind, and ways to break it.

    Attributes:
        merge_perm: How attention heads are merged; (0, 2, 1, 3) is right.
        swap_present: Return the cache of layer 0 as layer 1 and the other way round.
        swap_halves: Rotate with the halves exchanged (another rotation, not RoPE).
        mask_scale: Multiply the mask by this first.
        rope: How the rotation is written: by `halves`, by a `turned` copy, or turned with angles
            from a `matmul`.
    """

    side: int = 8
    width: int = 16
    heads: int = 2
    kv_heads: int = 2
    layers: int = 2
    keep: int = 6
    prunes: bool = True
    class_token: bool = True
    vocabulary: int = 12
    experts: int = 4
    hidden: int = 8
    merge_perm: tuple[int, ...] = (0, 2, 1, 3)
    swap_present: bool = False
    swap_halves: bool = False
    mask_scale: float | None = None
    rope: str = "halves"

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def tiny_vision(shape: TinyShape = TinyShape()) -> onnx.ModelProto:
    b = GraphBuilder(1)
    width, count = shape.width, (shape.side // 2) ** 2
    conv = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}
    x = b.op("Relu", b.op("Conv", "image", b.weight(width, 1, 3, 3), b.weight(width), **conv))
    x = b.op("Transpose", b.op("Reshape", x, b.ints(-1, width, count)), perm=[0, 2, 1])
    x = b.op("Add", x, b.weight(1, count, width))
    if shape.class_token:
        x = b.op("Concat", b.weight(1, 1, width), x, axis=1)
    h = b.op("LayerNormalization", x, b.weight(width), b.weight(width), axis=-1, epsilon=1e-5)
    q, k, v = (split_heads(b, linear(b, h, width, width), shape) for _ in range(3))
    attended = merge_heads(b, attention(b, q, k, v, shape), shape)
    x = b.op("Add", x, linear(b, attended, width, width))
    inputs = {"image": ("float32", ("n", 1, shape.side, shape.side))}
    if not shape.prunes:
        first = b.ints(int(shape.class_token))
        patches = b.op("Slice", x, first, b.ints(2**63 - 1), b.ints(1), b.ints(1))
        return b.model(inputs, {"tokens": linear(b, patches, width, width)})
    row = b.op("Slice", q, b.ints(0), b.ints(1), b.ints(2), b.ints(1))
    scores = b.op("MatMul", row, b.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = b.op("Softmax", b.op("Div", scores, b.const(shape.head_dim**0.5)), axis=-1)
    seen = b.op("Gather", scores, b.const(0, "int64"), axis=2)
    patches = b.op("Slice", x, b.ints(1), b.ints(2**63 - 1), b.ints(1), b.ints(1))
    kept, index = b.ops("DynamicPrune", patches, seen, count=2, domain=DOMAIN, k=shape.keep)
    tokens = linear(b, kept, width, width)
    model = b.model(inputs, {"tokens": tokens, "kept": index}, [PRUNE])
    return _typed(model, {"tokens": "float32", "kept": "int64"})


def split_heads(b: GraphBuilder, x: str, shape: TinyShape, heads: int | None = None) -> str:
    split = b.op("Reshape", x, b.ints(1, -1, heads or shape.heads, shape.head_dim))
    return b.op("Transpose", split, perm=[0, 2, 1, 3])


def repeat_heads(b: GraphBuilder, x: str, shape: TinyShape) -> str:
    """Give every query head its own copy of a shared key head: 0, 0, 1, 1, ..."""
    copies = shape.heads // shape.kv_heads
    if copies == 1:
        return x
    grown = b.op("Expand", b.op("Unsqueeze", x, b.ints(2)), b.ints(1, 1, copies, 1, 1))
    return b.op("Reshape", grown, b.ints(1, shape.heads, -1, shape.head_dim))


def merge_heads(b: GraphBuilder, x: str, shape: TinyShape) -> str:
    turned = b.op("Transpose", x, perm=list(shape.merge_perm))
    return b.op("Reshape", turned, b.ints(1, -1, shape.width))


def attention(
    b: GraphBuilder, q: str, k: str, v: str, shape: TinyShape, mask: str | None = None
) -> str:
    """Scaled dot-product attention with the scale split over both sides, as torch writes it."""
    scale = b.const([shape.head_dim**-0.25])
    kt = b.op("Mul", b.op("Transpose", k, perm=[0, 1, 3, 2]), scale)
    scores = b.op("MatMul", b.op("Mul", q, scale), kt)
    if mask is not None:
        scores = b.op("Add", scores, mask)
    return b.op("MatMul", b.op("Softmax", scores, axis=-1), v)


def tiny_embed(shape: TinyShape = TinyShape()) -> onnx.ModelProto:
    b = GraphBuilder(2)
    y = b.op("Gather", b.weight(shape.vocabulary, shape.width, scale=1.0), "ids", axis=0)
    return b.model({"ids": ("int64", ("n", "s"))}, {"embeds": y})


def rope_tables(b: GraphBuilder, shape: TinyShape) -> tuple[str, str]:
    half = shape.head_dim // 2
    frequencies = 100.0 ** -(np.arange(half) / half)
    positions = b.op("Cast", "pos", to=1)
    if shape.rope == "matmul":
        row = b.op("Unsqueeze", positions, b.ints(1))
        product = b.op("MatMul", b.const(frequencies.reshape(1, half, 1)), row)
        angle = b.op("Transpose", product, perm=[0, 2, 1])
    else:
        angle = b.op("Mul", b.op("Unsqueeze", positions, b.ints(2)), b.const(frequencies))
    if shape.rope != "halves":
        angle = b.op("Concat", angle, angle, axis=-1)
    one = b.ints(1)
    return b.op("Unsqueeze", b.op("Cos", angle), one), b.op("Unsqueeze", b.op("Sin", angle), one)


def rotate(b: GraphBuilder, x: str, tables: tuple[str, str], shape: TinyShape) -> str:
    half, end, axes, one = shape.head_dim // 2, b.ints(2**63 - 1), b.ints(3), b.ints(1)
    first = b.op("Slice", x, b.ints(0), b.ints(half), axes, one)
    second = b.op("Slice", x, b.ints(half), end, axes, one)
    if shape.swap_halves:
        first, second = second, first
    c, s = tables
    if shape.rope != "halves":
        turned = b.op("Concat", b.op("Neg", second), first, axis=-1)
        return b.op("Add", b.op("Mul", x, c), b.op("Mul", turned, s))
    left = b.op("Sub", b.op("Mul", first, c), b.op("Mul", second, s))
    right = b.op("Add", b.op("Mul", second, c), b.op("Mul", first, s))
    return b.op("Concat", left, right, axis=-1)


def rms(b: GraphBuilder, x: str, shape: TinyShape) -> str:
    mean = b.op("ReduceMean", b.op("Pow", x, b.const(2.0)), b.ints(-1), keepdims=1)
    root = b.op("Sqrt", b.op("Add", mean, b.const(1e-5)))
    scaled = b.op("Mul", x, b.op("Reciprocal", root))
    return b.op("Mul", scaled, b.const(1.0 + b.rng.random(shape.width)))


def tiny_decoder(shape: TinyShape = TinyShape()) -> onnx.ModelProto:
    b = GraphBuilder(3)
    width, x, tables = shape.width, "x", rope_tables(b, shape)
    mask = "mask"
    if shape.mask_scale is not None:
        mask = b.op("Mul", mask, b.const(shape.mask_scale))
    keys, values, chosen = [], [], []
    for layer in range(shape.layers):
        h = rms(b, x, shape)
        q, k, v = (
            split_heads(b, linear(b, h, width, n * shape.head_dim, bias=False), shape, n)
            for n in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        q, k = rotate(b, q, tables, shape), rotate(b, k, tables, shape)
        at = b.const(layer, "int64")
        k = b.op("Concat", b.op("Gather", "past_k", at, axis=0), k, axis=2)
        v = b.op("Concat", b.op("Gather", "past_v", at, axis=0), v, axis=2)
        keys.append(b.op("Unsqueeze", k, b.ints(0)))
        values.append(b.op("Unsqueeze", v, b.ints(0)))
        k, v = repeat_heads(b, k, shape), repeat_heads(b, v, shape)
        attended = merge_heads(b, attention(b, q, k, v, shape, mask), shape)
        x = b.op("Add", x, linear(b, attended, width, width, bias=False))
        rows = b.op("Reshape", rms(b, x, shape), b.ints(-1, width))
        index, gate = b.ops(
            "MoERouter",
            rows,
            b.weight(shape.experts, width, scale=1.0),
            b.weight(shape.experts),
            "lam",
            count=2,
            domain=DOMAIN,
            k=2,
        )
        w1 = b.weight(shape.experts, shape.hidden, width)
        w2 = b.weight(shape.experts, width, shape.hidden)
        y = b.op("MoEExpert", rows, index, gate, w1, w2, domain=DOMAIN)
        x = b.op("Add", x, b.op("Reshape", y, b.ints(1, -1, width)))
        chosen.append(b.op("Unsqueeze", index, b.ints(0)))
    if shape.swap_present:
        keys.reverse()
    logits = linear(b, rms(b, x, shape), width, shape.vocabulary, bias=False)
    past = ("float32", (shape.layers, "n", shape.kv_heads, "p", shape.head_dim))
    inputs = {
        "x": ("float32", ("n", "s", width)),
        "pos": ("int64", ("n", "s")),
        "mask": ("float32", ("n", 1, "s", "t")),
        "lam": ("float32", ()),
        "past_k": past,
        "past_v": past,
    }
    outputs = {
        "logits": logits,
        "next_k": b.op("Concat", *keys, axis=0),
        "next_v": b.op("Concat", *values, axis=0),
        "experts": b.op("Concat", *chosen, axis=0),
    }
    model = b.model(inputs, outputs, [ROUTER, EXPERT])
    kinds = dict.fromkeys(("logits", "next_k", "next_v"), "float32")
    return _typed(model, {**kinds, "experts": "int64"})


def _typed(model: onnx.ModelProto, kinds: Mapping[str, str]) -> onnx.ModelProto:
    """Give outputs element types where inference stops at a custom operator."""
    for info in model.graph.output:
        element = helper.np_dtype_to_tensor_dtype(np.dtype(kinds[info.name]))
        info.type.tensor_type.elem_type = element
    return model


# --- submissions on disk -------------------------------------------------------------------------

VISION_COMPONENTS: dict[str, Any] = {
    "vision": {
        "file": "vision.onnx",
        "inputs": {"image": {"role": "image"}},
        "outputs": {"tokens": {"role": "embeds"}, "kept": {"role": "positions"}},
    },
    "embed": {
        "file": "embed.onnx",
        "inputs": {"ids": {"role": "token_ids"}},
        "outputs": {"embeds": {"role": "embeds"}},
    },
    "decoder": {
        "file": "decoder.onnx",
        "inputs": {
            "x": {"role": "embeds"},
            "pos": {"role": "positions"},
            "mask": {"role": "causal_mask"},
            "lam": {"role": "constant", "value": 0.25},
            "past_k": {"role": "past_key"},
            "past_v": {"role": "past_value"},
        },
        "outputs": {
            "logits": {"role": "logits"},
            "next_k": {"role": "present_key"},
            "next_v": {"role": "present_value"},
            "experts": {"role": "routing"},
        },
    },
}


def graph_document(model: onnx.ModelProto) -> dict[str, Any]:
    """Return the pipeline.json of a block."""
    return {
        "schema": "sparsefleet.pipeline/1",
        "family": "graph",
        "components": {
            "model": {
                "file": "model.onnx",
                "inputs": {info.name: {"role": "tensor"} for info in model.graph.input},
                "outputs": {info.name: {"role": "tensor"} for info in model.graph.output},
            }
        },
        "max_step_tokens": 16,
    }


def tiny_document(shape: TinyShape = TinyShape()) -> dict[str, Any]:
    """Return the pipeline.json of the tiny vision-language model."""
    components = json.loads(json.dumps(VISION_COMPONENTS))
    if not shape.prunes:
        del components["vision"]["outputs"]["kept"]
    return {
        "schema": "sparsefleet.pipeline/1",
        "family": "vision-embed-decoder",
        "components": components,
        "image": {
            "height": shape.side,
            "width": shape.side,
            "channels": 1,
            "divide": 127.5,
            "subtract": 1.0,
        },
        "tokens": {
            "vocabulary": [f"w{i}" for i in range(shape.vocabulary)],
            "eos": 1,
            "position_base": 16,
            "prompts": {"caption": ["w2"]},
            "max_answer_tokens": 8,
        },
        "max_context": 32,
        "max_step_tokens": 8,
    }


def tiny_models(shape: TinyShape = TinyShape()) -> dict[str, onnx.ModelProto]:
    """Return the three models of the tiny submission by component."""
    return {
        "vision": tiny_vision(shape),
        "embed": tiny_embed(shape),
        "decoder": tiny_decoder(shape),
    }


def write_submission(
    directory: Path, models: Mapping[str, onnx.ModelProto], document: Mapping[str, Any]
) -> Path:
    """Write models under the file names of the document, and the document."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, model in models.items():
        onnx.save(model, directory / document["components"][name]["file"])
    (directory / "pipeline.json").write_text(json.dumps(document))
    return directory


def write_block(directory: Path, block: Block, **options: Any) -> Path:
    """Write the submission of one block."""
    model = block_model(block, **options)
    return write_submission(directory, {"model": model}, graph_document(model))


def write_tiny(directory: Path, shape: TinyShape = TinyShape(), **changes: Any) -> Path:
    """Write the tiny vision-language submission."""
    changed = replace(shape, **changes)
    return write_submission(directory, tiny_models(changed), tiny_document(changed))


def write_pruned(directory: Path, shape: TinyShape = TinyShape(), **rule: Any) -> Path:
    """Write the tiny submission with adaptive pruning."""
    document = tiny_document(shape) | {"prune": {"mode": "top_p", **rule}}
    return write_submission(directory, tiny_models(shape), document)


def write_windowed(
    directory: Path, shape: TinyShape = TinyShape(), *, sink: int, window: int, **changes: Any
) -> Path:
    """Write the tiny submission with a window over its cache; `changes` go to `pipeline.json`."""
    document = tiny_document(shape) | {"kv": {"sink": sink, "window": window}} | changes
    return write_submission(directory, tiny_models(shape), document)


# --- disguises -----------------------------------------------------------------------------------


def disguise(model: onnx.ModelProto, seed: int) -> tuple[onnx.ModelProto, Mapping[str, str]]:
    """Rename every value and node and put nodes and constants in another valid order.

    Returns:
        The disguised model, and the new name of each graph input and output.
    """
    chooser = random.Random(seed)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    names = sorted({n for node in graph.node for n in (*node.input, *node.output) if n})
    fresh = [f"t{i}" for i in range(len(names))]
    chooser.shuffle(fresh)
    renamed = dict(zip(names, fresh, strict=True))
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
        node.name = f"n{chooser.randrange(10**9)}"
    for entry in (*graph.initializer, *graph.input, *graph.output):
        entry.name = renamed.get(entry.name, entry.name)
    del graph.value_info[:]
    _shuffle(graph.initializer, chooser)
    order = _random_topological_order(list(graph.node), chooser)
    del graph.node[:]
    graph.node.extend(order)
    onnx.checker.check_model(copy)
    return copy, renamed


def disguise_submission(
    models: Mapping[str, onnx.ModelProto], document: Mapping[str, Any], seed: int
) -> tuple[dict[str, onnx.ModelProto], dict[str, Any]]:
    """Disguise every model of a submission and rename ports in its document accordingly."""
    changed = json.loads(json.dumps(document))
    disguised = {}
    for name, model in models.items():
        disguised[name], renamed = disguise(model, seed)
        component = changed["components"][name]
        for side in ("inputs", "outputs"):
            ports = {renamed.get(k, k): v for k, v in component[side].items()}
            component[side] = dict(sorted(ports.items()))
    return disguised, changed


def _shuffle(entries: Any, chooser: random.Random) -> None:
    copies = list(entries)
    chooser.shuffle(copies)
    del entries[:]
    entries.extend(copies)


def _random_topological_order(
    nodes: list[onnx.NodeProto], chooser: random.Random
) -> list[onnx.NodeProto]:
    waiting = list(nodes)
    made_by_nodes = {name for node in nodes for name in node.output if name}
    done: set[str] = set()
    order = []
    while waiting:
        ready = [n for n in waiting if all(i in done or i not in made_by_nodes for i in n.input)]
        chosen = chooser.choice(ready)
        waiting.remove(chosen)
        done.update(chosen.output)
        order.append(chosen)
    return order
