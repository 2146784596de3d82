"""Small ONNX models for tests: blocks, a whole vision-language submission, and disguises."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser

OPSET = 18
DOMAIN = "ai.sparsefleet"

ROUTER = """<domain: "ai.sparsefleet", opset_import: ["" : 18]>
MoERouter <k> (h, w, bias, lam) => (i, wt) {
  t = Transpose <perm = [1, 0]> (w)
  r = MatMul (h, t)
  b = Mul (lam, bias)
  s = Add (r, b)
  k0 = Constant <value_int : int = @k> ()
  one = Constant <value_ints = [1]> ()
  kk = Reshape (k0, one)
  v, i = TopK <axis = -1> (s, kk)
  wt = Softmax <axis = -1> (v)
}"""
EXPERT = """<domain: "ai.sparsefleet", opset_import: ["" : 18]>
MoEExpert (h, idx, gw, w1, w2) => (y) {
  a = Gather <axis = 0> (w1, idx)
  ax = Constant <value_ints = [1, 3]> ()
  x = Unsqueeze (h, ax)
  m = MatMul (a, x)
  r = Relu (m)
  b = Gather <axis = 0> (w2, idx)
  o = MatMul (b, r)
  three = Constant <value_ints = [3]> ()
  z = Squeeze (o, three)
  two = Constant <value_ints = [2]> ()
  g = Unsqueeze (gw, two)
  p = Mul (z, g)
  one = Constant <value_ints = [1]> ()
  y = ReduceSum <keepdims = 0> (p, one)
}"""
PRUNE = """<domain: "ai.sparsefleet", opset_import: ["" : 18]>
DynamicPrune <k> (tok, cls) => (out, idx) {
  one = Constant <value_ints = [1]> ()
  big = Constant <value_ints = [1000000]> ()
  two = Constant <value_ints = [2]> ()
  c = Slice (cls, one, big, two)
  a = ReduceMean <keepdims = 0> (c, one)
  k0 = Constant <value_int : int = @k> ()
  kk = Reshape (k0, one)
  v, i = TopK <axis = -1> (a, kk)
  f = Cast <to = 1> (i)
  s, si = TopK <axis = -1, largest = 0> (f, kk)
  idx = Cast <to = 7> (s)
  u = Unsqueeze (idx, two)
  out = GatherND <batch_dims = 1> (tok, u)
}"""


@dataclass
class GraphBuilder:
    """Writes nodes one after the other; every method returns value names."""

    seed: int = 0
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def op(self, kind: str, *inputs: str, domain: str = "", **attrs: Any) -> str:
        return self.ops(kind, *inputs, count=1, domain=domain, **attrs)[0]

    def ops(self, kind: str, *inputs: str, count: int, domain: str = "", **attrs: Any) -> list[str]:
        at = len(self.nodes)
        outputs = [f"v{at}_{i}" for i in range(count)]
        name = f"node_{kind}_{at}"
        self.nodes.append(
            helper.make_node(kind, list(inputs), outputs, name=name, domain=domain, **attrs)
        )
        return outputs

    def const(self, value: Any, dtype: str = "float32") -> str:
        array = np.asarray(value, dtype=dtype)
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def ints(self, *values: int) -> str:
        return self.const(list(values), "int64")

    def weight(self, *shape: int, scale: float = 0.3) -> str:
        return self.const(self.rng.standard_normal(shape) * scale)

    def model(
        self,
        inputs: Mapping[str, tuple[str, Sequence[int | str]]],
        outputs: Mapping[str, str],
        functions: Sequence[str] = (),
        opset: int = OPSET,
    ) -> onnx.ModelProto:
        """Finish: inputs name -> (numpy type, shape); outputs name -> value."""
        nodes = [*self.nodes]
        nodes += [helper.make_node("Identity", [v], [name]) for name, v in outputs.items()]
        graph = helper.make_graph(
            nodes,
            "graph",
            [_info(name, dtype, shape) for name, (dtype, shape) in inputs.items()],
            [onnx.ValueInfoProto(name=name) for name in outputs],
            self.initializers,
        )
        imports = [helper.make_opsetid("", opset)]
        if any(node.domain == DOMAIN for node in nodes):
            imports.append(helper.make_opsetid(DOMAIN, 1))
        protos = [parser.parse_function(text) for text in functions]
        model = helper.make_model(graph, opset_imports=imports, ir_version=10, functions=protos)
        inferred = onnx.shape_inference.infer_shapes(model)
        del model.graph.output[:]
        for info in inferred.graph.output:
            kind = info if info.HasField("type") else _untyped(info.name)
            model.graph.output.append(kind)
        return model


def _info(name: str, dtype: str, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_tensor_value_info(name, element, list(shape))


def _untyped(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)


# --- blocks of family `graph` --------------------------------------------------------------------

Block = Callable[[GraphBuilder, str], str]


def block_model(block: Block, width: int = 8, seed: int = 0, opset: int = OPSET) -> onnx.ModelProto:
    """Return x (1, s, width) -> y of a block."""
    b = GraphBuilder(seed)
    y = block(b, "x")
    functions = [text for text in (ROUTER, EXPERT) if any(_uses(b, text))]
    return b.model({"x": ("float32", (1, "s", width))}, {"y": y}, functions, opset)


def _uses(b: GraphBuilder, text: str) -> list[bool]:
    name = parser.parse_function(text).name
    return [node.op_type == name for node in b.nodes]


def linear(b: GraphBuilder, x: str, cols: int, rows: int, *, bias: bool = True) -> str:
    y = b.op("MatMul", x, b.weight(cols, rows))
    return b.op("Add", y, b.weight(rows)) if bias else y


def mlp_block(b: GraphBuilder, x: str) -> str:
    h = b.op("Relu", linear(b, x, 8, 16))
    return b.op("Add", x, linear(b, h, 16, 8, bias=False))


def gemm_block(b: GraphBuilder, x: str) -> str:
    rows = b.op("Reshape", x, b.ints(-1, 8))
    h = b.op("Gemm", rows, b.weight(16, 8), b.weight(16), transB=1, alpha=0.5, beta=2.0)
    h = b.op("Mul", h, b.op("Sigmoid", h))
    y = b.op("Gemm", h, b.weight(16, 8))
    return b.op("Reshape", y, b.ints(1, -1, 8))


def rms_block(form: str = "reciprocal") -> Block:
    """Decomposed RMS normalisation; `form` names how the root is divided by."""

    def build(b: GraphBuilder, x: str) -> str:
        axes = b.ints(-1)
        square = b.op("Mul", x, x) if form == "square" else b.op("Pow", x, b.const(2.0))
        total = b.op("Add", b.op("ReduceMean", square, axes, keepdims=1), b.const(1e-5))
        match form:
            case "power":
                y = b.op("Mul", x, b.op("Pow", total, b.const(-0.5)))
            case "divide":
                y = b.op("Div", x, b.op("Sqrt", total))
            case "inverse":
                y = b.op("Mul", b.op("Div", b.const(1.0), b.op("Sqrt", total)), x)
            case _:
                y = b.op("Mul", x, b.op("Reciprocal", b.op("Sqrt", total)))
        return b.op("Mul", b.weight(8), y)

    return build


def layer_norm_block(b: GraphBuilder, x: str) -> str:
    axes = b.ints(-1)
    centred = b.op("Sub", x, b.op("ReduceMean", x, axes, keepdims=1))
    variance = b.op("ReduceMean", b.op("Pow", centred, b.const(2.0)), axes, keepdims=1)
    root = b.op("Sqrt", b.op("Add", variance, b.const(1e-6)))
    return b.op("Add", b.op("Mul", b.op("Div", centred, root), b.weight(8)), b.weight(8))


def elementwise_block(b: GraphBuilder, x: str) -> str:
    h = b.op("Relu", b.op("Add", b.weight(8), x))
    h = b.op("Mul", h, b.op("Tanh", x))
    h = b.op("Sub", h, b.weight(1, 1, 8))
    return b.op("Div", h, b.const(np.full(8, 3.0)))


@dataclass(frozen=True)
class MoeShape:
    """How a gathered Mixture-of-Experts block is written.

    Attributes:
        order: Where the softmax stands: softmax_topk, softmax_topk_renorm or topk_softmax.
        act: swiglu or relu.
        swapped: The second half of the hidden rows is the gate.
        interleaved: Gate and up rows alternate.
        transposed: Weights are (E, K, N) and multiplied from the right.
        gather: `GatherND` or `Gather`.
    """

    order: str = "softmax_topk_renorm"
    act: str = "swiglu"
    swapped: bool = False
    interleaved: bool = False
    transposed: bool = False
    gather: str = "GatherND"
    width: int = 8
    hidden: int = 6
    experts: int = 4
    k: int = 2


def moe_block(shape: MoeShape = MoeShape()) -> Block:
    """Return a block in the shape of the dynamo exporter's `batched_mm` experts."""

    def build(b: GraphBuilder, x: str) -> str:
        rows = b.op("Reshape", x, b.ints(-1, shape.width))
        gate, index = _router(b, rows, shape)
        flat_index = b.op("Reshape", index, b.ints(-1))
        repeated = b.op("Unsqueeze", rows, b.ints(1))
        repeated = b.op("Expand", repeated, b.ints(1, shape.k, 1))
        repeated = b.op("Reshape", repeated, b.ints(-1, shape.width))
        factor = 2 if shape.act == "swiglu" else 1
        hidden = _gathered(b, repeated, flat_index, factor * shape.hidden, shape.width, shape)
        hidden = _activation(b, hidden, shape)
        out = _gathered(b, hidden, flat_index, shape.width, shape.hidden, shape)
        flat_gate = b.op("Unsqueeze", b.op("Reshape", gate, b.ints(-1)), b.ints(-1))
        weighted = b.op("Reshape", b.op("Mul", out, flat_gate), b.ints(-1, shape.k, shape.width))
        total = b.op("ReduceSum", weighted, b.ints(1), keepdims=0)
        return b.op("Reshape", total, b.ints(1, -1, shape.width))

    return build


def _router(b: GraphBuilder, rows: str, shape: MoeShape) -> tuple[str, str]:
    logits = b.op("Gemm", rows, b.weight(shape.experts, shape.width, scale=1.0), transB=1)
    if shape.order == "topk_softmax":
        values, index = b.ops("TopK", logits, b.ints(shape.k), count=2)
        return b.op("Softmax", values, axis=-1), index
    scores = b.op("Softmax", logits, axis=-1)
    values, index = b.ops("TopK", scores, b.ints(shape.k), count=2)
    if shape.order == "softmax_topk_renorm":
        values = b.op("Div", values, b.op("ReduceSum", values, b.ints(-1), keepdims=1))
    return values, index


def _gathered(b: GraphBuilder, x: str, index: str, rows: int, cols: int, shape: MoeShape) -> str:
    sizes = (shape.experts, cols, rows) if shape.transposed else (shape.experts, rows, cols)
    stack = b.weight(*sizes)
    if shape.gather == "GatherND":
        chosen = b.op("GatherND", stack, b.op("Unsqueeze", index, b.ints(-1)))
    else:
        chosen = b.op("Gather", stack, index, axis=0)
    if shape.transposed:
        product = b.op("MatMul", b.op("Unsqueeze", x, b.ints(1)), chosen)
        return b.op("Squeeze", product, b.ints(1))
    return b.op("Squeeze", b.op("MatMul", chosen, b.op("Unsqueeze", x, b.ints(-1))), b.ints(-1))


def _activation(b: GraphBuilder, hidden: str, shape: MoeShape) -> str:
    if shape.act == "relu":
        return b.op("Relu", hidden)
    if shape.interleaved:
        ends, axes, steps = b.ints(2**63 - 1), b.ints(1), b.ints(2)
        first = b.op("Slice", hidden, b.ints(0), ends, axes, steps)
        second = b.op("Slice", hidden, b.ints(1), ends, axes, steps)
    else:
        first, second = b.ops("Split", hidden, count=2, axis=1, num_outputs=2)
    gate, up = (second, first) if shape.swapped else (first, second)
    return b.op("Mul", b.op("Mul", gate, b.op("Sigmoid", gate)), up)


def native_moe_block(b: GraphBuilder, x: str) -> str:
    rows = b.op("Reshape", x, b.ints(-1, 8))
    index, gate = b.ops(
        "MoERouter", rows, b.weight(4, 8), b.weight(4), b.const(0.5), count=2, domain=DOMAIN, k=2
    )
    w1, w2 = b.weight(4, 6, 8), b.weight(4, 8, 6)
    y = b.op("MoEExpert", rows, index, gate, w1, w2, domain=DOMAIN)
    return b.op("Reshape", y, b.ints(1, -1, 8))


# --- a whole submission of family `vision-embed-decoder` -----------------------------------------


@dataclass(frozen=True)
class TinyShape:
    """A vision-language model of the EdgeCard kind, and ways to break it.

    Attributes:
        merge_perm: How attention heads are merged; (0, 2, 1, 3) is right.
        swap_present: Return the cache of layer 0 as layer 1 and the other way round.
        swap_halves: Rotate with the halves exchanged (another rotation, not RoPE).
        mask_twice: Add the mask to the values' side as well.
    """

    side: int = 8
    width: int = 16
    heads: int = 2
    layers: int = 2
    keep: int = 6
    vocabulary: int = 12
    experts: int = 4
    hidden: int = 8
    merge_perm: tuple[int, ...] = (0, 2, 1, 3)
    swap_present: bool = False
    swap_halves: bool = False
    mask_scale: float | None = None

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
    x = b.op("Concat", b.weight(1, 1, width), x, axis=1)
    h = b.op("LayerNormalization", x, b.weight(width), b.weight(width), axis=-1, epsilon=1e-5)
    q, k, v = (split_heads(b, linear(b, h, width, width), shape) for _ in range(3))
    attended = merge_heads(b, attention(b, q, k, v, shape), shape)
    x = b.op("Add", x, linear(b, attended, width, width))
    row = b.op("Slice", q, b.ints(0), b.ints(1), b.ints(2), b.ints(1))
    scores = b.op("MatMul", row, b.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = b.op("Softmax", b.op("Div", scores, b.const(shape.head_dim**0.5)), axis=-1)
    seen = b.op("Gather", scores, b.const(0, "int64"), axis=2)
    patches = b.op("Slice", x, b.ints(1), b.ints(2**63 - 1), b.ints(1), b.ints(1))
    kept, index = b.ops("DynamicPrune", patches, seen, count=2, domain=DOMAIN, k=shape.keep)
    tokens = linear(b, kept, width, width)
    inputs = {"image": ("float32", ("n", 1, shape.side, shape.side))}
    model = b.model(inputs, {"tokens": tokens, "kept": index}, [PRUNE])
    return _typed(model, {"tokens": "float32", "kept": "int64"})


def split_heads(b: GraphBuilder, x: str, shape: TinyShape) -> str:
    split = b.op("Reshape", x, b.ints(1, -1, shape.heads, shape.head_dim))
    return b.op("Transpose", split, perm=[0, 2, 1, 3])


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
    frequencies = b.const(100.0 ** -(np.arange(half) / half))
    positions = b.op("Unsqueeze", b.op("Cast", "pos", to=1), b.ints(2))
    angle = b.op("Mul", positions, frequencies)
    one = b.ints(1)
    return b.op("Unsqueeze", b.op("Cos", angle), one), b.op("Unsqueeze", b.op("Sin", angle), one)


def rotate(b: GraphBuilder, x: str, tables: tuple[str, str], shape: TinyShape) -> str:
    half, end, axes, one = shape.head_dim // 2, b.ints(2**63 - 1), b.ints(3), b.ints(1)
    first = b.op("Slice", x, b.ints(0), b.ints(half), axes, one)
    second = b.op("Slice", x, b.ints(half), end, axes, one)
    if shape.swap_halves:
        first, second = second, first
    c, s = tables
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
        q, k, v = (split_heads(b, linear(b, h, width, width, bias=False), shape) for _ in range(3))
        q, k = rotate(b, q, tables, shape), rotate(b, k, tables, shape)
        at = b.const(layer, "int64")
        k = b.op("Concat", b.op("Gather", "past_k", at, axis=0), k, axis=2)
        v = b.op("Concat", b.op("Gather", "past_v", at, axis=0), v, axis=2)
        keys.append(b.op("Unsqueeze", k, b.ints(0)))
        values.append(b.op("Unsqueeze", v, b.ints(0)))
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
    past = ("float32", (shape.layers, "n", shape.heads, "p", shape.head_dim))
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
    return {
        "schema": "sparsefleet.pipeline/1",
        "family": "vision-embed-decoder",
        "components": json.loads(json.dumps(VISION_COMPONENTS)),
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
