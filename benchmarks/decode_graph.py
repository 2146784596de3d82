"""The decoder of `benchmarks.decode` as an ONNX graph: GroupQueryAttention, QMoE, MatMulNBits.

    x -> norm -> q, k, v -> attention, cache -> + x -> norm -> 8 experts, top 2 -> + x   (layers)
      -> norm -> logits

One writer serves two readers. ONNX Runtime runs the graph from token ids to the next token, with
lengths as inputs and buffers as long as the context. Our compiler reads it as a submission of
`vision-embed-decoder`, the form of ORT-GenAI's builder; its vision is one convolution that nothing
measures. Weights are random codes, no two matrices alike, because ONNX Runtime merges those that
are.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.synthetic import TILE_BYTES
from compiler.quant.w4 import GROUP, PANEL

TILE: Final = PANEL * GROUP
CONTRIB: Final = "com.microsoft"
OPSET: Final = 21
IR_VERSION: Final = 10
ACCURACY_LEVEL: Final = 4
"""Activations as int8, as ours."""
EPSILON: Final = 1e-5
ROPE_BASE: Final = 10_000.0
PICTURE: Final = 8
PATCH: Final = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the decoder.

    Attributes:
        hidden: Width of an expert.
        context: The most tokens, prompt and answer together.
    """

    layers: int = 12
    width: int = 1024
    heads: int = 16
    kv_heads: int = 4
    experts: int = 8
    top: int = 2
    hidden: int = 4096
    vocabulary: int = 4096
    context: int = 512

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def read_bytes(self) -> int:
        """Bytes of our weights that one token reads: W4 matrices, and routers in f32."""
        attention = 2 * self.width * (self.width + self.kv_width)
        experts = self.top * 3 * self.width * self.hidden
        packed = self.layers * (attention + experts) + self.vocabulary * self.width
        return packed * TILE_BYTES // TILE + 4 * self.layers * self.experts * self.width


def cache_name(kind: str, layer: int, part: str) -> str:
    """Return the name of a layer's keys or values; kind is `past` or `present`."""
    return f"{kind}.{layer}.{part}"


class _Writer:
    """Writes nodes; every method returns the name of what it made."""

    def __init__(self, shape: Shape, block: int = 0, *, is_runtime: bool = False) -> None:
        self.shape = shape
        self.block = block
        self.is_runtime = is_runtime
        self.random = np.random.default_rng(block)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.outside: dict[str, np.ndarray] = {}

    def op(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:  # noqa: ANN401
        return self.ops(kind, *inputs, outs=[out or f"v{len(self.nodes)}"], **attributes)[0]

    def ops(self, kind: str, *inputs: str, outs: list[str], domain: str = "", **attributes: Any) -> list[str]:  # noqa: ANN401, E501  # fmt: skip
        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, outs, name, domain=domain, **attributes))
        return outs

    def const(self, array: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def f32(self, *sizes: int, scale: float) -> str:
        return self.const(scale * self.random.standard_normal(sizes, np.float32))

    def codes(self, *sizes: int) -> tuple[str, str]:
        """Return 4-bit codes and their scales of matrices (..., N, K); deviation 1 / sqrt(K)."""
        *stack, n, k = sizes
        packed = self.random.integers(0, 256, (*stack, n, k // 2), np.uint8)
        scales = (0.5 + self.random.random((*stack, n, k // self.block), np.float32)) / 5
        return self.const(packed), self.const(scales / np.float32(np.sqrt(k)))

    def large(self, *sizes: int) -> str:
        """Return f32 weights that are kept beside the graph; deviation about 1 / sqrt(columns)."""
        array = self.random.random(sizes, np.float32)
        array -= np.float32(0.5)
        array *= np.float32(np.sqrt(12 / sizes[-1]))
        name = f"c{len(self.constants)}"
        self.outside[name] = array
        tensor = TensorProto(name=name, dims=sizes, data_type=TensorProto.FLOAT)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", name), ("offset", "0"), ("length", str(array.nbytes))):
            tensor.external_data.add(key=key, value=value)
        self.constants.append(tensor)
        return name

    def product(self, x: str, n: int, k: int, out: str = "") -> str:
        if not self.block:
            return self.op("MatMul", x, self.large(k, n), out=out)
        packed, scales = self.codes(n, k)
        self._reshape(packed, n, k // self.block, self.block // 2)
        self._reshape(scales, n * k // self.block)
        return self.op(
            *("MatMulNBits", x, packed, scales),
            out=out,
            domain=CONTRIB,
            K=k,
            N=n,
            bits=4,
            block_size=self.block,
            accuracy_level=ACCURACY_LEVEL,
        )

    def _reshape(self, name: str, *sizes: int) -> None:
        tensor = self.constants[int(name[1:])]
        tensor.ClearField("dims")
        tensor.dims.extend(sizes)

    def norm_weight(self) -> str:
        return self.const(np.float32(1) + np.float32(0.1) * self.random.random(self.shape.width, np.float32))  # noqa: E501  # fmt: skip

    def attention(self, x: str, layer: int, lengths: Sequence[str], tables: Sequence[str]) -> str:
        shape = self.shape
        sizes = [shape.width, shape.kv_width, shape.kv_width]
        if self.is_runtime:
            sizes = [sum(sizes), 0, 0]
        rows = [self.product(x, n, shape.width) if n else "" for n in sizes]
        past, present = ([cache_name(kind, layer, part) for part in ("key", "value")] for kind in ("past", "present"))  # noqa: E501  # fmt: skip
        mixed, *_ = self.ops(
            *("GroupQueryAttention", *rows, *past, *lengths, *tables),
            outs=[f"mixed.{layer}", *present],
            domain=CONTRIB,
            num_heads=shape.heads,
            kv_num_heads=shape.kv_heads,
            do_rotary=1,
        )
        return self.product(mixed, shape.width, shape.width)

    def mixture(self, x: str) -> str:
        shape = self.shape
        flat = self.op("Reshape", x, self.const(np.array([-1, shape.width])))
        router = self.f32(shape.width, shape.experts, scale=shape.width**-0.5)
        logits = self.op("MatMul", flat, router)
        common = {
            "domain": CONTRIB,
            "activation_type": "swiglu",
            "swiglu_fusion": 1,
            "normalize_routing_weights": 1,
            "activation_alpha": 1.0,
            "activation_beta": 0.0,
        }
        sizes = (
            (shape.experts, 2 * shape.hidden, shape.width),
            (shape.experts, shape.width, shape.hidden),
        )
        if not self.block:
            wide, narrow = (self.large(*size) for size in sizes)
            return self.op("MoE", x, logits, wide, "", narrow, k=shape.experts, **common)
        (wide, wide_scales), (narrow, narrow_scales) = (self.codes(*size) for size in sizes)
        return self.op(
            *("QMoE", x, logits, wide, wide_scales, "", narrow, narrow_scales),
            k=shape.top,
            expert_weight_bits=4,
            block_size=self.block,
            accuracy_level=ACCURACY_LEVEL,
            **common,
        )

    def skip_norm(self, x: str, part: str, *, last: bool = False) -> tuple[str, str]:
        """Return the norm of x + part, and that sum."""
        at = len(self.nodes)
        outs = [f"v{at}"] if last else [f"v{at}", "", "", f"s{at}"]
        names = self.ops(
            *("SkipSimplifiedLayerNormalization", x, part, self.norm_weight()),
            outs=outs,
            domain=CONTRIB,
            epsilon=EPSILON,
        )
        return names[0], names[-1]

    def decoder(self, x: str, lengths: Sequence[str], out: str) -> str:
        """Write all layers between the rows `x` (1, T, width) and logits (1, T, vocabulary)."""
        shape = self.shape
        half = shape.head_dim // 2
        angle = np.arange(shape.context)[:, None] * ROPE_BASE ** -(np.arange(half) / half)
        tables = [self.const(f(angle).astype(np.float32)) for f in (np.cos, np.sin)]
        h = self.op("SimplifiedLayerNormalization", x, self.norm_weight(), axis=-1, epsilon=EPSILON)
        for layer in range(shape.layers):
            h, x = self.skip_norm(x, self.attention(h, layer, lengths, tables))
            h, x = self.skip_norm(x, self.mixture(h), last=layer == shape.layers - 1)
        return self.product(h, shape.vocabulary, shape.width, out)

    def model(self, inputs: "Ports", outputs: Sequence[str]) -> onnx.ModelProto:
        """Finish. inputs: type and shape by name; every present cache is an output as well."""
        shape, f32 = self.shape, TensorProto.FLOAT
        caches = [(layer, part) for layer in range(shape.layers) for part in ("key", "value")]
        size = [1, shape.kv_heads, "past", shape.head_dim]
        given = {**inputs, **{cache_name("past", *cache): (f32, size) for cache in caches}}
        made = [*outputs, *(cache_name("present", *cache) for cache in caches)]
        graph = helper.make_graph(
            self.nodes,
            "decoder",
            [helper.make_tensor_value_info(name, *port) for name, port in given.items()],
            [_free(name) for name in made],
            self.constants,
        )
        return _model(graph)


Ports = dict[str, tuple[int, list[int | str]]]


def _free(name: str) -> onnx.ValueInfoProto:
    """Return an output whose sizes are left to inference."""
    if name == "token":
        return helper.make_tensor_value_info(name, TensorProto.INT64, [None, None])
    axes = 4 if name.startswith("present") else 3
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * axes)


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


def runtime_model(shape: Shape, block: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return the graph for ONNX Runtime, and the weights that are beside it.

    Inputs `token_ids` i64 (1, T), `last` i32 (1) = the number of the last key, `total` i32 () =
    keys, and the cache as buffers (1, kv_heads, context, head_dim) that past and present share;
    output `token` i64 (1, 1), the greedy choice after the last row.

    Args:
        block: Codes that share a scale; 0 for f32 weights and all experts for every token.
    """
    w = _Writer(shape, block, is_runtime=True)
    table = w.f32(shape.vocabulary, shape.width, scale=1.0)
    rows = w.op("Gather", table, "token_ids", axis=0)
    logits = w.decoder(rows, ("last", "total"), "")
    ends = [w.const(np.array([at], np.int64)) for at in (-1, 2**31, 1)]
    final = w.op("Slice", logits, *ends[:2], ends[2])
    w.op("ArgMax", final, axis=-1, keepdims=0, out="token")
    inputs: Ports = {
        "token_ids": (TensorProto.INT64, [1, "rows"]),
        "last": (TensorProto.INT32, [1]),
        "total": (TensorProto.INT32, []),
    }
    return w.model(inputs, ["token"]), w.outside


def write_submission(shape: Shape, block: int, directory: Path, step_tokens: int) -> None:
    """Write the graph as a submission for our compiler, with an embedding and a tiny vision."""
    w = _Writer(shape, block)
    one = w.const(np.array([1], np.int64))
    last = w.op("Sub", w.op("ReduceSum", "attention_mask", one, keepdims=0), one)
    total = w.op("Gather", w.op("Shape", "attention_mask"), w.const(np.array(1)), axis=0)
    lengths = [w.op("Cast", name, to=TensorProto.INT32) for name in (last, total)]
    w.decoder("embeds", lengths, "logits")
    inputs: Ports = {
        "embeds": (TensorProto.FLOAT, [1, "rows", shape.width]),
        "attention_mask": (TensorProto.INT64, [1, "keys"]),
    }
    parts = {
        "decoder": w.model(inputs, ["logits"]),
        "embed": _embedding(shape),
        "vision": _vision(shape),
    }
    for name, model in parts.items():
        onnx.save(model, directory / f"{name}.onnx")
    text = json.dumps(_pipeline(shape, step_tokens))
    (directory / "pipeline.json").write_text(text, encoding="utf-8")


def _embedding(shape: Shape) -> onnx.ModelProto:
    w = _Writer(shape)
    table = w.f32(shape.vocabulary, shape.width, scale=1.0)
    w.op("Gather", table, "ids", axis=0, out="rows")
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, [1, "T"])
    return _model(helper.make_graph(w.nodes, "embed", [ids], [_free("rows")], w.constants))


def _vision(shape: Shape) -> onnx.ModelProto:
    w = _Writer(shape)
    weight = w.f32(shape.width, 1, PATCH, PATCH, scale=0.2)
    x = w.op("Conv", "image", weight, kernel_shape=[PATCH, PATCH], strides=[PATCH, PATCH])
    x = w.op("Reshape", x, w.const(np.array([1, shape.width, -1])))
    w.op("Transpose", x, perm=[0, 2, 1], out="rows")
    size = [1, 1, PICTURE, PICTURE]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, size)
    rows = _free("rows")
    return _model(helper.make_graph(w.nodes, "vision", [image], [rows], w.constants))


def _pipeline(shape: Shape, step_tokens: int) -> dict[str, object]:
    def roles(**names: str) -> dict[str, object]:
        return {name: {"role": role} for name, role in names.items()}

    def caches(kind: str) -> dict[str, object]:
        return {
            cache_name(kind, layer, part): {"role": f"{kind}_{part}"}
            for layer in range(shape.layers)
            for part in ("key", "value")
        }

    decoder = roles(embeds="embeds", attention_mask="attention_mask") | caches("past")
    outputs = roles(logits="logits") | caches("present")
    side = {"height": PICTURE, "width": PICTURE, "channels": 1}
    return {
        "schema": "sparsefleet.pipeline/1",
        "family": "vision-embed-decoder",
        "components": {
            "vision": _component("vision", roles(image="image"), roles(rows="embeds")),
            "embed": _component("embed", roles(ids="token_ids"), roles(rows="embeds")),
            "decoder": _component("decoder", decoder, outputs),
        },
        "image": {**side, "divide": 127.5, "subtract": 1.0},
        "tokens": {
            "vocabulary": [f"t{at}" for at in range(shape.vocabulary)],
            "eos": 0,
            "position_base": (PICTURE // PATCH) ** 2,
            "prompts": {},
            "max_answer_tokens": 1,
        },
        "max_context": shape.context,
        "max_step_tokens": step_tokens,
    }


def _component(name: str, inputs: object, outputs: object) -> dict[str, object]:
    return {"file": f"{name}.onnx", "inputs": inputs, "outputs": outputs}
