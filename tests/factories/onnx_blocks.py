"""A writer of small ONNX graphs, and blocks of family `graph` written with it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser

OPSET = 18
DOMAIN = "ai.sparsefleet"
CONTRIB = "com.microsoft"

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
    """Writes nodes one after the other; every method returns value names.

    Attributes:
        prefix: Starts all names; bodies of control flow need names of their own.
        scale: Standard deviation of weights that do not say their own.
    """

    seed: int = 0
    prefix: str = ""
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    scale: float = 0.3

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def op(self, kind: str, *inputs: str, domain: str = "", **attrs: Any) -> str:
        return self.ops(kind, *inputs, count=1, domain=domain, **attrs)[0]

    def ops(self, kind: str, *inputs: str, count: int, domain: str = "", **attrs: Any) -> list[str]:
        at = len(self.nodes)
        outputs = [f"{self.prefix}v{at}_{i}" for i in range(count)]
        name = f"{self.prefix}node_{kind}_{at}"
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

    def weight(self, *shape: int, scale: float | None = None) -> str:
        return self.const(self.rng.standard_normal(shape) * (scale or self.scale))

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
        if any(node.domain == CONTRIB for node in nodes):
            imports.append(helper.make_opsetid(CONTRIB, 1))
        protos = [parser.parse_function(text) for text in functions]
        model = helper.make_model(graph, opset_imports=imports, ir_version=10, functions=protos)
        inferred = onnx.shape_inference.infer_shapes(model)
        del model.graph.output[:]
        for info in inferred.graph.output:
            kind = info if info.HasField("type") else _untyped(info.name)
            if kind.type.tensor_type.elem_type == 0:
                kind = helper.make_tensor_value_info(info.name, 1, ["n", "s", "d"])
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
        act: swiglu, reglu or relu.
        swapped: The second half of the hidden rows is the gate.
        interleaved: Gate and up rows alternate.
        transposed: Weights are (E, K, N) and multiplied from the right.
        gather: `GatherND` or `Gather`.
        separate: Gate and up have a stack of matrices each.
    """

    order: str = "softmax_topk_renorm"
    act: str = "swiglu"
    swapped: bool = False
    interleaved: bool = False
    transposed: bool = False
    gather: str = "GatherND"
    separate: bool = False
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
        factor = 2 if shape.act != "relu" and not shape.separate else 1
        hidden = _gathered(b, repeated, flat_index, factor * shape.hidden, shape.width, shape)
        if shape.separate:
            up = _gathered(b, repeated, flat_index, shape.hidden, shape.width, shape)
            hidden = b.op("Mul", _opened(b, hidden, shape), up)
        else:
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
    return b.op("Mul", _opened(b, gate, shape), up)


def _opened(b: GraphBuilder, gate: str, shape: MoeShape) -> str:
    if shape.act == "reglu":
        return b.op("Relu", gate)
    return b.op("Mul", gate, b.op("Sigmoid", gate))


def native_moe_block(b: GraphBuilder, x: str) -> str:
    rows = b.op("Reshape", x, b.ints(-1, 8))
    index, gate = b.ops(
        "MoERouter", rows, b.weight(4, 8), b.weight(4), b.const(0.5), count=2, domain=DOMAIN, k=2
    )
    w1, w2 = b.weight(4, 6, 8), b.weight(4, 8, 6)
    y = b.op("MoEExpert", rows, index, gate, w1, w2, domain=DOMAIN)
    return b.op("Reshape", y, b.ints(1, -1, 8))
