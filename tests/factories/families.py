"""Tiny random exports of multimodal families; `family_directories` lays them out on disk."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.factories.onnx_blocks import GraphBuilder, linear

Inputs = Mapping[str, tuple[str, Sequence[int | str]]]


@dataclass(frozen=True)
class Vlm:
    """Sizes of a tiny vision-language model, and which of the habits of real ones it has.

    Attributes:
        norm: Of the language model: `layer` (Phi) or `rms` (LLaMA, Qwen).
        act: Of its MLP: `gelu` or `silu` (gated).
        partial_rotary: Share of a head that is rotated.
        class_token: Whether vision has one (dropped before the projector).
        queries: Learned queries of a resampler; 0 = an MLP projects every patch.
        pooled: Whether a depthwise convolution and a pool of 2x2 follow the MLP (MobileVLM).
        wide: Width of the picture, whose height is `side`; 0 = as wide as high.
        positions: `input` (position_ids), `computed` from the attention mask, or `rows`: time,
            height and width, each rotating its sections of a head.
        scale: Standard deviation of weights.
    """

    side: int = 8
    patch: int = 4
    width: int = 16
    heads: int = 2
    kv_heads: int = 2
    layers: int = 2
    hidden: int = 24
    vocabulary: int = 20
    vision_width: int = 8
    image_token: int = 19
    norm: str = "rms"
    act: str = "silu"
    bias: bool = False
    class_token: bool = True
    queries: int = 0
    pooled: bool = False
    positions: str = "input"
    scale: float = 0.3
    wide: int = 0

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of the picture."""
        return self.side, self.wide or self.side

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def patches(self) -> int:
        return (self.sides[0] // self.patch) * (self.sides[1] // self.patch)

    @property
    def image_tokens(self) -> int:
        return self.queries or self.patches // (4 if self.pooled else 1)


LLAVA_PHI = Vlm(norm="layer", act="gelu", bias=True)
MOBILE_VLM = Vlm(kv_heads=1, positions="computed")
MINICPM_V = Vlm(class_token=False, queries=3)
QWEN_VL = Vlm(kv_heads=1, bias=True, class_token=False)
QWEN_VL_ROWS = Vlm(kv_heads=1, bias=True, class_token=False, positions="rows")


def norm(b: GraphBuilder, x: str, width: int, kind: str) -> str:
    scale = b.const(1.0 + 0.1 * b.rng.standard_normal(width))
    if kind == "layer":
        return b.op("LayerNormalization", x, scale, b.weight(width), axis=-1, epsilon=1e-5)
    mean = b.op("ReduceMean", b.op("Pow", x, b.const(2.0)), b.ints(-1), keepdims=1)
    root = b.op("Sqrt", b.op("Add", mean, b.const(1e-6)))
    return b.op("Mul", scale, b.op("Mul", x, b.op("Reciprocal", root)))


def gelu(b: GraphBuilder, x: str) -> str:
    """The tanh form, as Phi has it."""
    cube = b.op("Mul", b.op("Mul", x, x), x)
    inner = b.op("Add", x, b.op("Mul", cube, b.const(0.044715)))
    turned = b.op("Tanh", b.op("Mul", inner, b.const(0.7978845608)))
    half = b.op("Mul", x, b.const(0.5))
    return b.op("Mul", half, b.op("Add", turned, b.const(1.0)))


def heads_of(b: GraphBuilder, x: str, heads: int, head_dim: int) -> str:
    split = b.op("Reshape", x, b.ints(1, -1, heads, head_dim))
    return b.op("Transpose", split, perm=[0, 2, 1, 3])


def attend(b: GraphBuilder, q: str, k: str, v: str, head_dim: int, mask: str = "") -> str:
    scores = b.op("MatMul", q, b.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = b.op("Mul", scores, b.const(head_dim**-0.5))
    if mask:
        scores = b.op("Add", scores, mask)
    mixed = b.op("MatMul", b.op("Softmax", scores, axis=-1), v)
    return b.op("Transpose", mixed, perm=[0, 2, 1, 3])


# --- components -----------------------------------------------------------------------------------


def encoder(b: GraphBuilder, shape: Vlm, image: str = "pixel_values") -> str:
    """A one-layer ViT without its projector: (1, patches, vision width)."""
    width, heads = shape.vision_width, 2
    window = {"kernel_shape": [shape.patch] * 2, "strides": [shape.patch] * 2}
    weight = b.weight(width, 3, shape.patch, shape.patch, scale=0.2)
    x = b.op("Conv", image, weight, b.weight(width), **window)
    x = b.op("Reshape", x, b.ints(1, width, shape.patches))
    x = b.op("Transpose", x, perm=[0, 2, 1])
    count = shape.patches
    if shape.class_token:
        x, count = b.op("Concat", b.weight(1, 1, width), x, axis=1), count + 1
    x = b.op("Add", x, b.weight(1, count, width))
    h = norm(b, x, width, "layer")
    q, k, v = (heads_of(b, linear(b, h, width, width), heads, width // heads) for _ in range(3))
    mixed = b.op("Reshape", attend(b, q, k, v, width // heads), b.ints(1, count, width))
    x = b.op("Add", x, linear(b, mixed, width, width))
    if shape.class_token:
        x = b.op("Slice", x, b.ints(1), b.ints(2**31), b.ints(1), b.ints(1))
    return x


def resampler(b: GraphBuilder, x: str, shape: Vlm) -> str:
    """Learned queries attend to the patches: (1, queries, width)."""
    inner, width = shape.vision_width, shape.width
    queries = b.weight(1, shape.queries, width)
    keys = linear(b, x, inner, width)
    head_dim = width // 2
    q = heads_of(b, linear(b, queries, width, width), 2, head_dim)
    k, v = (heads_of(b, linear(b, keys, width, width), 2, head_dim) for _ in range(2))
    mixed = b.op("Reshape", attend(b, q, k, v, head_dim), b.ints(1, shape.queries, width))
    return norm(b, linear(b, mixed, width, width), width, "layer")


def projector(b: GraphBuilder, x: str, shape: Vlm) -> str:
    h = gelu(b, linear(b, x, shape.vision_width, shape.width))
    x = linear(b, h, shape.width, shape.width)
    return pool(b, x, shape) if shape.pooled else x


def pool(b: GraphBuilder, x: str, shape: Vlm) -> str:
    """Tokens as a picture, each channel filtered, and the mean of every four: (1, P/4, width)."""
    side, width = shape.side // shape.patch, shape.width
    planes = b.op("Reshape", b.op("Transpose", x, perm=[0, 2, 1]), b.ints(1, width, side, side))
    window = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "group": width}
    h = b.op("HardSwish", b.op("Conv", planes, b.weight(width, 1, 3, 3), **window))
    h = b.op("AveragePool", b.op("Add", planes, h), kernel_shape=[2, 2], strides=[2, 2])
    flat = b.op("Reshape", h, b.ints(1, width, shape.image_tokens))
    return b.op("Transpose", flat, perm=[0, 2, 1])


def pixels_of(shape: Vlm) -> Inputs:
    return {"pixel_values": ("float32", ("batch", 3, *shape.sides))}


def vision(shape: Vlm) -> onnx.ModelProto:
    b = GraphBuilder(11, scale=shape.scale)
    x = encoder(b, shape)
    x = resampler(b, x, shape) if shape.queries else projector(b, x, shape)
    return b.model(pixels_of(shape), {"image_features": x})


def embed(shape: Vlm) -> onnx.ModelProto:
    b = GraphBuilder(12)
    table = b.weight(shape.vocabulary, shape.width, scale=1.0)
    rows = b.op("Gather", table, "input_ids", axis=0)
    return b.model({"input_ids": ("int64", ("batch", "sequence"))}, {"inputs_embeds": rows})


def embed_with_splice(shape: Vlm, how: str = "scatter") -> onnx.ModelProto:
    """As ORT-GenAI's embedding model: rows of the image token are replaced by image features."""
    b = GraphBuilder(12)
    table = b.weight(shape.vocabulary, shape.width, scale=1.0)
    rows = b.op("Gather", table, "input_ids", axis=0)
    is_image = b.op("Equal", "input_ids", b.const(shape.image_token, "int64"))
    if how == "scatter":
        places = b.op("Transpose", b.op("NonZero", is_image), perm=[1, 0])
        rows = b.op("ScatterND", rows, places, "image_features")
    else:
        counts = b.op("CumSum", b.op("Cast", is_image, to=TensorProto.INT64), b.const(1, "int64"))
        number = b.op("Max", b.op("Sub", counts, b.const(1, "int64")), b.const(0, "int64"))
        taken = b.op("Gather", "image_features", number, axis=0)
        rows = b.op("Where", b.op("Unsqueeze", is_image, b.ints(2)), taken, rows)
    inputs: Inputs = {
        "input_ids": ("int64", ("batch", "sequence")),
        "image_features": ("float32", ("tokens", shape.width)),
    }
    return b.model(inputs, {"inputs_embeds": rows})


def causal_mask(b: GraphBuilder, past: str) -> tuple[str, str]:
    """Mask (1, 1, T, P + T) and positions (T), from the attention mask and the cache's size."""
    zero, one = b.const(0, "int64"), b.const(1, "int64")
    seen = b.op("Gather", b.op("Shape", past), b.const(2, "int64"), axis=0)
    rows = b.op("Gather", b.op("Shape", "inputs_embeds"), one, axis=0)
    total = b.op("Add", seen, rows)
    here = b.op("Range", seen, total, one)
    keys = b.op("Range", zero, total, one)
    visible = b.op(
        "LessOrEqual", b.op("Unsqueeze", keys, b.ints(0)), b.op("Unsqueeze", here, b.ints(1))
    )
    padded = b.op("Cast", "attention_mask", to=TensorProto.BOOL)
    visible = b.op(
        "And", b.op("Unsqueeze", visible, b.ints(0, 1)), b.op("Unsqueeze", padded, b.ints(1, 2))
    )
    return b.op("Where", visible, b.const(0.0), b.const(-3.4e38)), here


def rope(b: GraphBuilder, position_rows: str, shape: Vlm) -> tuple[str, str]:
    """Cosine and sine (1, 1, T, head size) of positions (1, T)."""
    half = shape.head_dim // 2
    row = b.op("Unsqueeze", b.op("Cast", position_rows, to=TensorProto.FLOAT), b.ints(1))
    frequencies = b.const((100.0 ** -(np.arange(half) / half)).reshape(1, half, 1))
    angle = b.op("Transpose", b.op("MatMul", frequencies, row), perm=[0, 2, 1])
    angle = b.op("Concat", angle, angle, axis=-1)
    return tuple(b.op("Unsqueeze", b.op(kind, angle), b.ints(1)) for kind in ("Cos", "Sin"))


def rope_of_rows(b: GraphBuilder, shape: Vlm) -> tuple[str, str]:
    """Cosine and sine (1, 1, T, head size) of positions (3, 1, T), as Qwen2-VL's sections."""
    half = shape.head_dim // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3] * 2
    row = b.op("Unsqueeze", b.op("Cast", "position_ids", to=TensorProto.FLOAT), b.ints(2))
    frequencies = b.const((100.0 ** -(np.arange(half) / half)).reshape(1, 1, half, 1))
    angle = b.op("Transpose", b.op("MatMul", frequencies, row), perm=[0, 1, 3, 2])
    angle = b.op("Concat", angle, angle, axis=-1)
    tables = []
    for kind in ("Cos", "Sin"):
        pieces = b.ops("Split", b.op(kind, angle), b.ints(*sections), count=6, axis=-1)
        taken = [b.op("Gather", p, b.const(at % 3, "int64"), axis=0) for at, p in enumerate(pieces)]
        tables.append(b.op("Unsqueeze", b.op("Concat", *taken, axis=-1), b.ints(1)))
    return tables[0], tables[1]


def rotate(b: GraphBuilder, x: str, tables: tuple[str, str], shape: Vlm) -> str:
    half, axes, one = shape.head_dim // 2, b.ints(3), b.ints(1)
    first = b.op("Slice", x, b.ints(0), b.ints(half), axes, one)
    second = b.op("Slice", x, b.ints(half), b.ints(2**31), axes, one)
    turned = b.op("Concat", b.op("Neg", second), first, axis=-1)
    return b.op("Add", b.op("Mul", x, tables[0]), b.op("Mul", turned, tables[1]))


def mlp(b: GraphBuilder, h: str, shape: Vlm) -> str:
    width, hidden = shape.width, shape.hidden
    if shape.act == "gelu":
        return linear(b, gelu(b, linear(b, h, width, hidden)), hidden, width)
    gate = linear(b, h, width, hidden, bias=False)
    gate = b.op("Mul", gate, b.op("Sigmoid", gate))
    up = linear(b, h, width, hidden, bias=False)
    return linear(b, b.op("Mul", gate, up), hidden, width, bias=False)


def shared(b: GraphBuilder, x: str, shape: Vlm) -> str:
    copies = shape.heads // shape.kv_heads
    if copies == 1:
        return x
    grown = b.op("Expand", b.op("Unsqueeze", x, b.ints(2)), b.ints(1, 1, copies, 1, 1))
    return b.op("Reshape", grown, b.ints(1, shape.heads, -1, shape.head_dim))


def past_name(layer: int, part: str) -> str:
    return f"past_key_values.{layer}.{part}"


def decoder(shape: Vlm) -> onnx.ModelProto:
    """A decoder as exporters write it: embeddings, attention mask, one cache pair per layer."""
    b = GraphBuilder(13, scale=shape.scale)
    x = "inputs_embeds"
    mask, here = causal_mask(b, past_name(0, "key"))
    positions = (
        b.op("Unsqueeze", here, b.ints(0)) if shape.positions == "computed" else "position_ids"
    )
    rows = shape.positions == "rows"
    tables = rope_of_rows(b, shape) if rows else rope(b, positions, shape)
    outputs: dict[str, str] = {}
    for layer in range(shape.layers):
        h = norm(b, x, shape.width, shape.norm)
        q, k, v = (
            heads_of(
                b, linear(b, h, shape.width, n * shape.head_dim, bias=shape.bias), n, shape.head_dim
            )
            for n in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        q, k = rotate(b, q, tables, shape), rotate(b, k, tables, shape)
        k = b.op("Concat", past_name(layer, "key"), k, axis=2)
        v = b.op("Concat", past_name(layer, "value"), v, axis=2)
        outputs |= {f"present.{layer}.key": k, f"present.{layer}.value": v}
        mixed = attend(b, q, shared(b, k, shape), shared(b, v, shape), shape.head_dim, mask)
        mixed = b.op("Reshape", mixed, b.ints(1, -1, shape.width))
        x = b.op("Add", x, linear(b, mixed, shape.width, shape.width, bias=False))
        x = b.op("Add", x, mlp(b, norm(b, x, shape.width, shape.norm), shape))
    logits = linear(
        b, norm(b, x, shape.width, shape.norm), shape.width, shape.vocabulary, bias=False
    )
    return b.model(decoder_inputs(shape), {"logits": logits, **outputs})


def decoder_inputs(shape: Vlm) -> dict[str, tuple[str, Sequence[int | str]]]:
    past = ("float32", ("batch", shape.kv_heads, "past", shape.head_dim))
    inputs: dict[str, tuple[str, Sequence[int | str]]] = {
        "inputs_embeds": ("float32", ("batch", "sequence", shape.width)),
        "attention_mask": ("int64", ("batch", "total")),
    }
    if shape.positions != "computed":
        rows = (3,) if shape.positions == "rows" else ()
        inputs["position_ids"] = ("int64", (*rows, "batch", "sequence"))
    for layer in range(shape.layers):
        inputs |= {past_name(layer, part): past for part in ("key", "value")}
    return inputs


def merged_decoder(shape: Vlm) -> onnx.ModelProto:
    """The old merged form: one graph for both calls, chosen by `use_cache_branch`."""
    inner = decoder(shape)
    names = [output.name for output in inner.graph.output]
    branches = {f"{key}_branch": _renamed(inner.graph, key) for key in ("then", "else")}
    node = helper.make_node("If", ["use_cache_branch"], names, name="merged", **branches)
    flag = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    graph = helper.make_graph(
        [node], "merged", [*inner.graph.input, flag], list(inner.graph.output)
    )
    return helper.make_model(graph, opset_imports=list(inner.opset_import), ir_version=10)


def _renamed(whole: onnx.GraphProto, prefix: str) -> onnx.GraphProto:
    """Return a graph as the branch of an `If`: no inputs, and a name of its own for every value."""
    graph = onnx.GraphProto()
    graph.CopyFrom(whole)
    graph.name = prefix
    del graph.input[:]
    del graph.value_info[:]
    made = {name for node in graph.node for name in node.output}
    made |= {tensor.name for tensor in graph.initializer}
    for at, node in enumerate(graph.node):
        node.name = f"{prefix}/{at}/{node.name}"
        node.input[:] = [f"{prefix}/{name}" if name in made else name for name in node.input]
        node.output[:] = [f"{prefix}/{name}" for name in node.output]
    for named in (*graph.initializer, *graph.output):
        named.name = f"{prefix}/{named.name}"
    return graph


def in_few_bits(
    b: GraphBuilder, x: str, cols: int, rows: int, *, bias: bool, bits: int, zeros: bool
) -> str:
    """Write a product with a random matrix of few bits in blocks of 16."""
    blocks = cols // 16
    codes = b.const(b.rng.integers(0, 256, (rows, blocks, 2 * bits)), "uint8")
    scales = b.const(b.rng.uniform(0.3, 0.6, rows * blocks) * cols**-0.5 * 2.0 ** (1 - bits))
    inputs = [x, codes, scales]
    if zeros:
        points = b.rng.integers(0, 256, rows * -(-blocks * bits // 8))
        inputs.append(b.const(points, "uint8"))
    if bias:
        inputs += [""] * (5 - len(inputs)) + [b.weight(rows)]
    sizes = {"K": cols, "N": rows, "bits": bits, "block_size": 16}
    return b.op("MatMulNBits", *inputs, domain="com.microsoft", **sizes)


def genai_decoder(
    shape: Vlm, *, rotary: str = "inside", packed: bool = False, bits: int = 0, zeros: bool = False
) -> onnx.ModelProto:
    """A decoder as ORT-GenAI's builder writes it: one fused attention, norms with shortcuts.

    `rotary` is done `inside` the attention or by an `operator` before it. Its projections may be
    `packed` side by side, and stored in some `bits`.
    """
    b, contrib = GraphBuilder(14, scale=shape.scale), "com.microsoft"
    half, width = shape.head_dim // 2, shape.width
    angle = np.arange(64)[:, None] * 100.0 ** -(np.arange(half) / half)
    tables = (b.const(np.cos(angle)), b.const(np.sin(angle)))
    lengths = b.op("Sub", b.op("ReduceSum", "attention_mask", b.ints(1), keepdims=1), b.ints(1))
    lengths = b.op("Cast", lengths, to=TensorProto.INT32)
    total = b.op("Gather", b.op("Shape", "attention_mask"), b.const(1, "int64"), axis=0)
    total = b.op("Cast", total, to=TensorProto.INT32)
    outputs: dict[str, str] = {}
    gamma = [b.const(1.0 + 0.1 * b.rng.standard_normal(width)) for _ in range(2 * shape.layers + 1)]
    x = "inputs_embeds"
    h = b.op("SimplifiedLayerNormalization", x, gamma[0], axis=-1, epsilon=1e-6)
    heads = {"num_heads": shape.heads, "kv_num_heads": shape.kv_heads}
    for layer in range(shape.layers):
        counts = (shape.heads, shape.kv_heads, shape.kv_heads)
        sizes = [sum(counts)] if packed else counts
        write = partial(in_few_bits, bits=bits, zeros=zeros) if bits else linear
        parts = [write(b, h, width, n * shape.head_dim, bias=shape.bias) for n in sizes]
        if rotary == "operator":
            parts[:2] = [
                b.op("RotaryEmbedding", a, "position_ids", *tables, domain=contrib, num_heads=n)
                for a, n in zip(parts, counts[:2], strict=False)
            ]
        parts += [""] * (3 - len(parts))
        cache = [past_name(layer, part) for part in ("key", "value")]
        inner = [*tables] if rotary == "inside" else []
        mixed, key, value = b.ops(
            *("GroupQueryAttention", *parts, *cache, lengths, total, *inner),
            count=3,
            domain=contrib,
            do_rotary=int(rotary == "inside"),
            **heads,
        )
        outputs |= {f"present.{layer}.key": key, f"present.{layer}.value": value}
        mixed = linear(b, mixed, width, width, bias=False)
        for at, part in ((1, mixed), (2, None)):
            part = part or mlp(b, h, shape)
            h, _, _, x = b.ops(
                *("SkipSimplifiedLayerNormalization", x, part, gamma[2 * layer + at]),
                count=4,
                domain=contrib,
                epsilon=1e-6,
            )
    logits = linear(b, h, width, shape.vocabulary, bias=False)
    return _contrib_model(b, shape, {"logits": logits, **outputs})


def _contrib_model(b: GraphBuilder, shape: Vlm, outputs: dict[str, str]) -> onnx.ModelProto:
    """Finish a graph with operators that shape inference does not know."""
    for node in b.nodes:
        if node.op_type.startswith("Skip"):  # unused results have no names
            node.output[1], node.output[2] = "", ""
    inputs = [_value(name, *kind) for name, kind in decoder_inputs(shape).items()]
    cache = ("batch", shape.kv_heads, "total", shape.head_dim)
    sizes = dict.fromkeys(outputs, cache) | {"logits": ("batch", "sequence", shape.vocabulary)}
    made = [_value(name, "float32", sizes[name]) for name in outputs]
    nodes = [*b.nodes, *(helper.make_node("Identity", [v], [n]) for n, v in outputs.items())]
    graph = helper.make_graph(nodes, "decoder", inputs, made, b.initializers)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def _value(name: str, dtype: str, sizes: Sequence[int | str]) -> onnx.ValueInfoProto:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_tensor_value_info(name, element, list(sizes))


def variant(shape: Vlm, **changes: Any) -> Vlm:
    """Return a shape with some habits changed."""
    return replace(shape, **changes)
